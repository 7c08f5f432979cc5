"""A tenant: the users that share a cache, and everything that belongs to them."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial

from kvtier.errors import SpecError
from kvtier.frame import CACHEGEN, ECSQ
from kvtier.key import space_secret
from kvtier.layout import KvSpec, space_id
from kvtier.read_file import COUNT_ENDED
from kvtier_daemon.catalog import Catalog, KnownSpace
from kvtier_daemon.catalog.blocks import DeferredPolicy
from kvtier_daemon.codec.calibrated import Calibrated
from kvtier_daemon.codec.losses import Losses
from kvtier_daemon.codec.resharding import family_of
from kvtier_daemon.tiers.base import (
    JoinedReads,
    NullTier,
    PendingReads,
    SharedTier,
    TenantTier,
    forget_in,
)
from kvtier_daemon.tiers.warm import Extent, SharedCounter

FOLDER = re.compile(r"/segments/([a-z0-9_-]+)")  # of a tenant, in a directory of the cold tier
CALIBRATED_NUMBERS = frozenset({ECSQ, CACHEGEN})


@dataclass(slots=True)
class Tenant:
    """The parts of one tenant. No other tenant can reach them."""

    name: str
    secret: bytes
    quota_bytes: int
    catalog: Catalog
    tier: TenantTier = field(default_factory=NullTier)  # below memory
    shared: SharedTier = field(default_factory=NullTier)  # with other hosts
    extents: list[Extent] = field(default_factory=list)
    losses: Losses = field(default_factory=Losses)
    uses: DeferredPolicy | None = None  # events that its policy gets after the answer
    spoilt_blocks: int = 0  # that differed in memory from the checksums of their saves
    rechecking: bool = False  # blocks are being compared with their checksums
    reshards: bool = False  # keys are those of the family of a space, if it has one
    direct_reads: bool = False  # its clients may read the files of its tier below memory
    forget_count: SharedCounter | None = None  # that clients see which read these files
    # Other secrets: the store of several hosts may have blocks under them.
    accepted: tuple[bytes, ...] = ()

    def add(self, extent: Extent) -> int:
        """Add this extent for the life of the daemon; return its number among the tenant's."""
        index = self.catalog.add_extent(extent.nbytes, extent.table, extent.notes)
        assert index == len(self.extents)
        self.extents.append(extent)
        return index

    def count_forgets(self) -> SharedCounter:
        """Count the forgets of blocks from now on, so that clients see whether there was one."""
        if self.forget_count is None:
            self.forget_count = SharedCounter(f"kvtier-{self.name}-forgets")
            self.forget_count.word[0] = self.catalog.blocks.forgets[0]
            self.catalog.blocks.forgets = self.forget_count.word
        return self.forget_count

    def end_forget_count(self) -> None:
        """Clients that have mapped the number see no further forgets, and ask after each read."""
        if (ended := self.forget_count) is not None:
            self.catalog.blocks.forgets = array("Q", (ended.word[0] + 1,))
            ended.word[0] = COUNT_ENDED
            self.forget_count = None

    @property
    def pending(self) -> PendingReads:
        """The requests that wait for reads of any tier."""
        if isinstance(self.shared, NullTier):
            return self.tier.pending
        return JoinedReads(self.tier.pending, self.shared.pending)

    def forget(
        self, space: KnownSpace, keys: bytes, done: Callable[[str], None] | None,
        others: Sequence[bytes] = (),
    ) -> bool:  # fmt: skip
        """Make durable that these blocks are forgotten, in all tiers, as `TierForgets.forget`. `others` are
        their keys under other accepted secrets."""
        tiers = self.tier.forgets, self.shared
        spaces = space, *self.siblings_of(space)
        parts = [partial(tier.forget, one, keys) for one in spaces for tier in tiers]
        parts += [partial(self.shared.forget, space, one) for one in others]
        return forget_in(parts, done)

    def may_see(self, text: str) -> str:
        """Return a text about the tier below memory, which all tenants share, without names of others."""
        return FOLDER.sub(lambda at: at[0] if at[1] == self.name else "/segments/*", text)

    def identity_of(self, spec: KvSpec) -> bytes:
        return self.losses.identity(spec, self.name)

    def accepts(self, identity: bytes, spec: KvSpec, codecs: Set[int]) -> bool:
        """Whether a description from disk belongs to this identity. This cannot be checked for a space with
        frames of a calibrated codec whose profile is missing: it is accepted, and cannot be opened with
        another description."""
        try:
            described = self.losses.describes(identity, spec.checked(), self.name)
        except SpecError:
            return False
        return described or not codecs.isdisjoint(CALIBRATED_NUMBERS)

    def calibration(self, space: KnownSpace, group: int, shard: int) -> Calibrated | None:
        """The calibrated codec of this part of a space, if its pages are in the order of the profile."""
        loss = self.losses.of(space.identity, space.spec, self.name)
        codec = loss.codec(group, shard) if loss is not None else None
        return codec if isinstance(codec, Calibrated) else None

    def can_open(self, space: KnownSpace) -> bool:
        """Whether a client can open this space: not if the configuration has changed its identity."""
        return space.identity == self.identity_of(space.spec)

    def stored(self, space: KnownSpace) -> str:
        """How its blocks are stored on disk, in a word or two."""
        return self.losses.stored(space.identity, space.spec, self.name)

    def family_of(self, space: KnownSpace) -> bytes:
        """The family of this space; None if blocks of it, or of this tenant, cannot be resharded."""
        if not self.reshards:
            return b""
        if space.family is None:
            has_loss = space.identity != space_id(space.spec, self.name)
            space.family = b"" if has_loss else family_of(space.spec, self.name)
        return space.family

    def siblings_of(self, space: KnownSpace) -> list[KnownSpace]:
        """The other spaces of its family on this host: their blocks have the same keys."""
        if not (family := self.family_of(space)):
            return []
        return [
            one for one in self.catalog.spaces
            if one is not space and self.family_of(one) == family
        ]  # fmt: skip

    def secret_of(self, space: KnownSpace) -> bytes:
        """The secret with which clients of that space compute keys: the same for all spaces of a family."""
        return space_secret(self.secret, self.family_of(space) or space.identity)

    def accepted_of(self, space: KnownSpace) -> list[bytes]:
        """The same for the other accepted secrets."""
        named = self.family_of(space) or space.identity
        return [space_secret(one, named) for one in self.accepted]
