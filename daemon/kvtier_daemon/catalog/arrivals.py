"""Slots for blocks that come from a store that hosts share, and their outcomes. No I/O.

Such a block is saved by the daemon itself: until it arrives it is WRITING, which no match finds, and a save
of the same block by a client is refused as in progress. It does not count as saved by a client.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from kvtier.key import KEY_BYTES
from kvtier.wire import GRANTED, SLOT
from kvtier_daemon.catalog.blocks import BlockTable
from kvtier_daemon.catalog.holds import Holds, Request
from kvtier_daemon.catalog.leases import LeaseId, SessionId
from kvtier_daemon.catalog.spaces import KnownSpace
from kvtier_daemon.catalog.writing import WriteLeases

# The owner of the slots. No client has this session, so the next daemon frees what this one left.
ARRIVING = SessionId((1 << 32) - 1)


@dataclass(slots=True, frozen=True)
class Arriving:
    """A block that has a slot and no content yet. `position` is that in the lease."""

    lease: LeaseId
    position: int
    id: int
    key: bytes
    extent: int
    offset: int


class Arrivals:
    """Of one tenant. Each block must be given to `arrived` or `failed`."""

    def __init__(self, blocks: BlockTable, writing: WriteLeases, holds: Holds) -> None:
        self._blocks = blocks
        self._writing = writing
        self._holds = holds

    def reserve(
        self, space: KnownSpace, group: int, shard: int, parent: bytes, keys: bytes
    ) -> tuple[list[Arriving], bytes]:
        """Take slots for those blocks of this chain that memory lacks, as far as there is room; return them,
        and the outcome for each key. Never evicts a block of this chain."""
        granted = self._writing.reserve(ARRIVING, space, group, shard, parent, keys, inf)
        if not granted.lease:
            return [], granted.outcomes
        places = [at for at, code in enumerate(granted.outcomes) if code == GRANTED]
        ids = array("I", self._writing.of[granted.lease].ids)
        slots = SLOT.iter_unpack(granted.slots)
        taken = [
            Arriving(
                granted.lease, position, one, keys[at * KEY_BYTES : (at + 1) * KEY_BYTES], slot[0], slot[2]
            )
            for position, (at, one, slot) in enumerate(zip(places, ids, slots, strict=True))
        ]  # fmt: skip
        return taken, granted.outcomes

    def arrived(
        self, block: Arriving, digest: bytes, waiting: Sequence[Request], now: float
    ) -> bytes:
        """The block is in its slot, verified: READY, and held for waiting requests. Return its id."""
        _, ids = self._writing.commit(ARRIVING, block.lease, block.position, 1, digest)
        self._blocks.reads.read(ids)
        self._holds.hold(ids, waiting, now)
        return ids

    def failed(self, block: Arriving) -> None:
        """The block does not come, and nothing may write to its slot: free it, for a save of this block."""
        self._writing.abort_one(ARRIVING, block.lease, block.position)
