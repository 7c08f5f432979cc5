"""Which spaces are stored with a loss, what that makes of their identity, and by which codec each block is.

A lossy codec is asked for by model, and its loss is part of the identity of the spaces that get it: the
codec, its level, and the profile by name. So what is stored under one identity is what was saved, or what
this one codec with this one profile makes of it, once; who asks for another loss, or for none, asks for other
blocks. Where it can't be had the space stays lossless, under the identity that it has without.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain

from kvtier.codec import grid, raw
from kvtier.codec.arranged import Arranged, order_of
from kvtier.codec.base import CACHEGEN, ECSQ, Codec
from kvtier.codec.calibrated import Calibrated, knows
from kvtier.codec.known import CODECS
from kvtier.codec.profile import CACHEGEN_LEVELS, ECSQ_LEVELS, Name, Part, Profile
from kvtier.errors import ProfileError
from kvtier.layout import KvSpec, space_id

FIXED: dict[str, Codec] = {codec.name: codec for codec in CODECS if codec.lossy}
LEVELS: dict[Name, Sequence[str]] = {"ecsq": ECSQ_LEVELS, "cachegen": CACHEGEN_LEVELS}
CALIBRATED: dict[str, tuple[Name, str]] = {
    f"{name}-{level}": (name, level) for name, levels in LEVELS.items() for level in levels
}
NAMES = (*FIXED, *CALIBRATED)
NUMBERS = frozenset({codec.number for codec in FIXED.values()} | {ECSQ, CACHEGEN})
DTYPES = ("bfloat16", "float16", "float32")
LIMIT_SPECS = 256  # the others are looked at anew
# Why a space stays lossless that was not to be.
NO_PROFILE, OPAQUE, TYPE, SHAPE = "no_profile", "opaque", "dtype", "shape"

Place = tuple[int, int]  # group, shard


@dataclass(frozen=True, slots=True)
class Loss:
    """What the blocks of a space lose on their way to a disk, and nowhere else. `name` is what the space's
    identity says of it, `asked` how it is configured. Groups that have no codec here are lossless."""

    name: str
    asked: str
    codecs: Mapping[Place, Codec]

    def codec(self, group: int, shard: int) -> Codec | None:
        return self.codecs.get((group, shard))


def fits(model: str, pattern: str) -> bool:
    """Whether a model has such a name, where * and ? stand for anything and all else for itself: names have
    brackets."""
    return fnmatchcase(model, pattern.replace("[", "[[]"))


class Losses:
    """What was asked for: `by_model` has patterns of models and names of codecs, of which the first that fits
    counts; lossless ones mean no loss. Raises ProfileError where two profiles are for the same weights."""

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
                raise ProfileError(f"there are two profiles of {one.model}{weights}: keep one")
            self._profiles[one.model, one.weights] = one

    def wanting(self) -> list[tuple[str, str]]:
        """The pairs that need a profile, for whose models there is none."""
        return [
            (pattern, codec)
            for pattern, codec in self._by_model
            if codec in CALIBRATED and not any(fits(model, pattern) for model, _ in self._profiles)
        ]

    def asked(self, spec: KvSpec) -> str:
        """The codec that is asked for this model by name, or nothing."""
        return next((name for model, name in self._by_model if fits(spec.model, model)), "")

    def look(self, spec: KvSpec) -> Loss | str:
        """The loss that such a space has, or why it has none; that is empty where none was asked for."""
        asked = self.asked(spec)
        if asked not in NAMES:
            return ""
        known = self._found.get((spec, asked))
        if known is None:
            if len(self._found) >= LIMIT_SPECS:
                self._found.clear()
            known = self._fixed(spec, asked) if asked in FIXED else self._calibrated(spec, asked)
            self._found[spec, asked] = known
        return known

    def identity(self, spec: KvSpec, tenant: str) -> bytes:
        """The identity of this tenant's space."""
        loss = self.look(spec)
        return space_id(spec, tenant, loss.name if isinstance(loss, Loss) else "")

    def describes(self, identity: bytes, spec: KvSpec, tenant: str) -> bool:
        """Whether this tenant's space of that description has this identity, with any loss known here."""
        calibrated = (
            f"{asked}:{profile.name.hex()}"
            for asked in CALIBRATED
            for profile in self._profiles.values()
        )
        names = chain(("", *FIXED), calibrated)
        return any(identity == space_id(spec, tenant, name) for name in names)

    def of(self, identity: bytes, spec: KvSpec, tenant: str) -> Loss | None:
        """The loss of the space of this identity. None where it has none, or one that is not ours to know: of
        a configuration that was another."""
        loss = self.look(spec)
        if isinstance(loss, Loss) and identity == space_id(spec, tenant, loss.name):
            return loss
        return None

    def stored(self, identity: bytes, spec: KvSpec, tenant: str) -> str:
        """How the blocks of the space of this identity are stored, in a word or two."""
        loss = self.of(identity, spec, tenant)
        if loss is not None:
            return loss.asked
        names = ("", *FIXED)
        found = (name for name in names if identity == space_id(spec, tenant, name))
        return next(found, "another codec or profile") or "lossless"

    def _fixed(self, spec: KvSpec, asked: str) -> Loss | str:
        if spec.dtype not in DTYPES:
            return TYPE
        codecs: dict[Place, Codec] = {}
        for number, group in enumerate(spec.cache_groups):
            order = order_of(spec, number)
            if order is None and not grid.grids(spec, number):
                continue
            codec = FIXED[asked] if order is None else Arranged(FIXED[asked], order)
            codecs |= {(number, shard): codec for shard in range(group.shards)}
        return Loss(asked, asked, codecs) if codecs else OPAQUE

    def _calibrated(self, spec: KvSpec, asked: str) -> Loss | str:
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
            codec = self._codec(asked, profile, layout, (shard, shards))
            codecs[0, shard] = codec if order is None else Arranged(codec, order)
        return Loss(f"{asked}:{profile.name.hex()}", asked, codecs)

    def _codec(self, asked: str, profile: Profile, layout: str, share: tuple[int, int]) -> Codec:
        """One for all spaces whose blocks lie so."""
        key = (asked, profile.name, layout, share)
        if key not in self._made:
            name, level = CALIBRATED[asked]
            self._made[key] = Calibrated(name, profile, level, layout, share=share)
        return self._made[key]


def _fits(spec: KvSpec, profile: Profile, layout: str) -> bool:
    """Whether the profile's layers are those of the space's blocks, each rank having its share of heads."""
    group = spec.cache_groups[0]
    if len(spec.cache_groups) > 1 or spec.pipeline_parallel > 1:
        return False
    if len(profile.layers) != group.layers:
        return False
    if len(raw.entries(spec, 0)) != group.layers * group.parts:
        return False

    def is_ours(part: Part) -> bool:
        ranks = group.shards if part.heads > 1 or group.shards == 1 else 1
        shape = (group.kv_heads * ranks, group.head_dim)
        return (part.heads, part.dim) == shape and knows(layout, part)

    return all(len(layer) == group.parts and all(map(is_ours, layer)) for layer in profile.layers)
