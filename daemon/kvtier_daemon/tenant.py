"""A tenant: who shares a cache, and everything that is theirs alone."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from kvtier.catalog import Catalog, Space
from kvtier.codec.base import CACHEGEN, ECSQ
from kvtier.codec.losses import Losses
from kvtier.errors import SpecError
from kvtier.key import space_secret
from kvtier.layout import KvSpec
from kvtier.policy.deferred import Deferred
from kvtier_daemon.mover import Mover
from kvtier_daemon.tiers.warm import Extent

CALIBRATED_NUMBERS = frozenset({ECSQ, CACHEGEN})


@dataclass(slots=True)
class Tenant:
    """Its own catalog, its own extents, its own secret: nothing here is reachable from another one."""

    name: str
    secret: bytes
    quota_bytes: int
    catalog: Catalog
    mover: Mover | None = None
    extents: list[Extent] = field(default_factory=list)
    losses: Losses = field(default_factory=Losses)
    uses: Deferred | None = None  # what its policy has yet to hear of

    @property
    def brings(self) -> bool:
        """Whether what is on disk can be had now."""
        return self.mover is not None and self.mover.is_on

    def add(self, extent: Extent) -> int:
        """Take this extent for life; its number among the tenant's."""
        index = self.catalog.add_extent(extent.nbytes, extent.table)
        assert index == len(self.extents)
        self.extents.append(extent)
        return index

    def identity_of(self, spec: KvSpec) -> bytes:
        return self.losses.identity(spec, self.name)

    def accepts(self, identity: bytes, spec: KvSpec, codecs: Set[int]) -> bool:
        """Whether a description found on disk is that of this identity. Of a space that has frames of a
        calibrated codec whose profile is not here this can't be told: such a one is accepted, and opened
        under no other description."""
        try:
            described = self.losses.describes(identity, spec.checked(), self.name)
        except SpecError:
            return False
        return described or not codecs.isdisjoint(CALIBRATED_NUMBERS)

    def asks_for(self, space: Space) -> bool:
        """Whether anybody can: it may be of a configuration that was another."""
        return space.identity == self.identity_of(space.spec)

    def stored(self, space: Space) -> str:
        """How its blocks are stored on disks, in a word or two."""
        return self.losses.stored(space.identity, space.spec, self.name)

    def secret_of(self, identity: bytes) -> bytes:
        """What a client of that space names its blocks with."""
        return space_secret(self.secret, identity)
