"""Which spaces are stored with a loss, their identities, and the codec of each block.

A lossy codec is configured by model, and its loss (the codec, its level, and the name of the profile) is
part of the identity of a space. Blocks under one identity are therefore either what was saved, or the result
of this one codec with this one profile, applied once. A client with another loss, or with none, uses other
blocks. If the codec cannot be used, the space stays lossless, with the identity of a space without a loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain

from kvtier.errors import ProfileError
from kvtier.frame import CACHEGEN, ECSQ
from kvtier.layout import KvSpec, space_id
from kvtier_daemon.codec import block_parts, grid
from kvtier_daemon.codec.arranged import Arranged, order_of
from kvtier_daemon.codec.base import Codec
from kvtier_daemon.codec.calibrated import Calibrated, knows
from kvtier_daemon.codec.profile import CACHEGEN_LEVELS, ECSQ_LEVELS, Name, Profile, ProfilePart
from kvtier_daemon.codec.table import CODECS

FIXED: dict[str, Codec] = {codec.name: codec for codec in CODECS if codec.lossy}
LEVELS: dict[Name, Sequence[str]] = {"ecsq": ECSQ_LEVELS, "cachegen": CACHEGEN_LEVELS}
CALIBRATED: dict[str, tuple[Name, str]] = {
    f"{name}-{level}": (name, level) for name, levels in LEVELS.items() for level in levels
}
NAMES = (*FIXED, *CALIBRATED)
NUMBERS = frozenset({codec.number for codec in FIXED.values()} | {ECSQ, CACHEGEN})
DTYPES = ("bfloat16", "float16", "float32")
LIMIT_SPECS = 256  # results for other specs are computed again
# Why a space stays lossless although a lossy codec is configured.
NO_PROFILE, OPAQUE, TYPE, SHAPE = "no_profile", "opaque", "dtype", "shape"

Place = tuple[int, int]  # group, shard


@dataclass(frozen=True, slots=True)
class Loss:
    """How the blocks of a space are encoded with a loss on disk, never in memory. `name` is the loss in the
    space's identity, `configured` the configured codec. Groups without a codec here are lossless."""

    name: str
    configured: str
    codecs: Mapping[Place, Codec]

    def codec(self, group: int, shard: int) -> Codec | None:
        return self.codecs.get((group, shard))


def fits(model: str, pattern: str) -> bool:
    """Return whether a model's name matches. Only * and ? are wildcards, because names contain brackets."""
    return fnmatchcase(model, pattern.replace("[", "[[]"))


class Losses:
    """The configured losses: `by_model` has pairs of a model pattern and a codec, and the first match
    counts; a lossless codec means no loss. Raises ProfileError if two profiles are for the same weights."""

    def __init__(
        self, by_model: Sequence[tuple[str, str]] = (), profiles: Iterable[Profile] = ()
    ) -> None:
        self._by_model = by_model
        self._profiles: dict[tuple[str, str], Profile] = {}
        self._found: dict[tuple[KvSpec, str], Loss | str] = {}
        self._made: dict[tuple[str, bytes, str, Place], Codec] = {}
        for one in profiles:
            if (one.model, one.weights) in self._profiles:
                weights = f", weights {one.weights}" if one.weights else ""
                raise ProfileError(f"two profiles exist for {one.model}{weights}: remove one")
            self._profiles[one.model, one.weights] = one

    def without_profile(self) -> list[tuple[str, str]]:
        """Return the pairs that need a profile and lack it."""
        return [
            (pattern, codec)
            for pattern, codec in self._by_model
            if codec in CALIBRATED and not any(fits(model, pattern) for model, _ in self._profiles)
        ]

    def configured(self, spec: KvSpec) -> str:
        """Return the codec that is configured for this model by name, or an empty string."""
        return next((name for model, name in self._by_model if fits(spec.model, model)), "")

    def find(self, spec: KvSpec) -> Loss | str:
        """Return the loss of such a space, or why it is lossless; an empty reason if none is configured."""
        configured = self.configured(spec)
        if configured not in NAMES:
            return ""
        known = self._found.get((spec, configured))
        if known is None:
            if len(self._found) >= LIMIT_SPECS:
                self._found.clear()
            known = (
                self._fixed(spec, configured)
                if configured in FIXED
                else self._calibrated(spec, configured)
            )
            self._found[spec, configured] = known
        return known

    def identity(self, spec: KvSpec, tenant: str) -> bytes:
        """Return the identity of this tenant's space."""
        loss = self.find(spec)
        return space_id(spec, tenant, loss.name if isinstance(loss, Loss) else "")

    def describes(self, identity: bytes, spec: KvSpec, tenant: str) -> bool:
        """Return whether this tenant's space with that description has this identity, with any known loss."""
        calibrated = (
            f"{codec}:{profile.name.hex()}"
            for codec in CALIBRATED
            for profile in self._profiles.values()
        )
        names = chain(("", *FIXED), calibrated)
        return any(identity == space_id(spec, tenant, name) for name in names)

    def of(self, identity: bytes, spec: KvSpec, tenant: str) -> Loss | None:
        """Return the loss of the space with this identity; None without one in the present configuration."""
        loss = self.find(spec)
        if isinstance(loss, Loss) and identity == space_id(spec, tenant, loss.name):
            return loss
        return None

    def stored(self, identity: bytes, spec: KvSpec, tenant: str) -> str:
        """Return a short text: how the blocks of the space with this identity are stored."""
        loss = self.of(identity, spec, tenant)
        if loss is not None:
            return loss.configured
        names = ("", *FIXED)
        found = (name for name in names if identity == space_id(spec, tenant, name))
        return next(found, "another codec or profile") or "lossless"

    def _fixed(self, spec: KvSpec, configured: str) -> Loss | str:
        if spec.dtype not in DTYPES:
            return TYPE
        codecs: dict[Place, Codec] = {}
        for number, group in enumerate(spec.cache_groups):
            order = order_of(spec, number)
            if order is None and not grid.grids(spec, number):
                continue
            codec = FIXED[configured] if order is None else Arranged(FIXED[configured], order)
            codecs |= {(number, shard): codec for shard in range(group.shards)}
        return Loss(configured, configured, codecs) if codecs else OPAQUE

    def _calibrated(self, spec: KvSpec, configured: str) -> Loss | str:
        profile = self._profiles.get((spec.model, spec.weights))
        profile = profile or self._profiles.get((spec.model, ""))
        if profile is None:
            return NO_PROFILE
        if spec.dtype not in DTYPES:
            return TYPE
        order = order_of(spec, 0)
        if order is None and not grid.is_known(spec, 0):
            return OPAQUE
        layout = grid.layout_of(spec) if order is None else grid.TOKENS_FIRST
        if not _fits(spec, profile, layout):
            return SHAPE
        codecs: dict[Place, Codec] = {}
        shards = spec.cache_groups[0].shards
        for shard in range(shards):
            codec = self._codec(configured, profile, layout, (shard, shards))
            codecs[0, shard] = codec if order is None else Arranged(codec, order)
        return Loss(f"{configured}:{profile.name.hex()}", configured, codecs)

    def _codec(
        self, configured: str, profile: Profile, layout: str, share: tuple[int, int]
    ) -> Codec:
        """Return one codec for all spaces with this layout and share."""
        key = (configured, profile.name, layout, share)
        if key not in self._made:
            name, level = CALIBRATED[configured]
            self._made[key] = Calibrated(name, profile, level, layout, share=share)
        return self._made[key]


def _fits(spec: KvSpec, profile: Profile, layout: str) -> bool:
    """Return whether the profile's layers match the space's, and each rank has its share of the heads."""
    group = spec.cache_groups[0]
    if len(spec.cache_groups) > 1 or spec.pipeline_parallel > 1:
        return False
    if len(profile.layers) != group.layers:
        return False
    if len(block_parts.entries(spec, 0)) != group.layers * group.parts:
        return False

    def is_ours(part: ProfilePart) -> bool:
        ranks = group.shards if part.heads > 1 or group.shards == 1 else 1
        shape = (group.kv_heads * ranks, group.head_dim)
        return (part.heads, part.dim) == shape and knows(layout, part)

    return all(len(layer) == group.parts and all(map(is_ours, layer)) for layer in profile.layers)
