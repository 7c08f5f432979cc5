"""Leases on blocks that were read for waiting requests, from the end of the read to the next answer.

A waiting request has a lease on the blocks that were ready at its last answer, and asks again between two
steps of its engine. Without a hold, no lease covers the blocks that arrive in between: the policy may evict
them before they are loaded, and they are read again.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvtier_daemon.catalog.blocks import BlockTable
from kvtier_daemon.catalog.leases import SessionId
from kvtier_daemon.catalog.spaces import IDENTITY

HOLD_S: Final = 5.0  # after the last block was read
HOLD_SHARE: Final = 0.5  # of the tenant's memory
# Blocks times requests that hold them; ending all takes some milliseconds.
LIMIT_HELD: Final = 1 << 14

Request = tuple[int, Hashable]  # a session, and the name of its request


@dataclass(slots=True)
class Hold:
    """The blocks that one request holds, until `until` at the latest."""

    until: float = 0.0
    ids: array[int] = field(default_factory=lambda: array("I"))


class Holds:
    """The holds of one tenant. A hold ends when its request is answered, is cancelled or does not ask again,
    when its session ends, and when one of its blocks is forgotten. Blocks above the limits are not held."""

    def __init__(self, blocks: BlockTable) -> None:
        self._blocks = blocks
        self.of: OrderedDict[Request, Hold] = OrderedDict()  # the first one expires first
        self._requests: Counter[int] = Counter()  # how many requests hold a block
        self._sizes: dict[int, int] = {}  # in bytes, of the held blocks
        self._held = 0
        self._most_bytes = 0.0
        self.nbytes = 0

    def __len__(self) -> int:
        """How many blocks are held."""
        return len(self._sizes)

    def hold(self, ids: bytes, requests: Sequence[Request], now: float) -> None:
        """Lease these blocks, which were just read, for each request that waits for them."""
        if not requests:
            return
        store, sizes, left = self._blocks.store, dict[int, int](), LIMIT_HELD - self._held
        names, total = IDENTITY.iter_unpack(store.identities(ids)), 0
        for one, (space, group, *_) in zip(array("I", ids), names, strict=True):
            nbytes, left = store.slot_bytes(space, group), left - len(requests)
            if not self._has_room(total + nbytes) or left < 0:
                break
            sizes[one] = nbytes
            total += nbytes
        if not sizes:
            return
        self._blocks.lease([array("I", sizes).tobytes()])
        self.nbytes += total
        self._held += len(requests) * len(sizes)
        for one, nbytes in sizes.items():
            self._sizes[one] = nbytes
            self._requests[one] = len(requests)
        for request in requests:
            hold = self.of.setdefault(request, Hold())
            hold.until = now + HOLD_S
            hold.ids.extend(sizes)
            self.of.move_to_end(request)

    def _has_room(self, nbytes: int) -> bool:
        """Whether this many more bytes may be held. The limit is read again only when needed: that takes
        longer than the rest, and the tenant's memory only grows."""
        if self.nbytes + nbytes > self._most_bytes:
            self._most_bytes = self._blocks.store.counts()["capacity_bytes"] * HOLD_SHARE
        return self.nbytes + nbytes <= self._most_bytes

    def end(self, request: Request) -> None:
        """End the request's hold: it does not wait, or it has a lease on its blocks."""
        if (hold := self.of.pop(request, None)) is not None:
            self._release(hold)

    def end_session(self, session: SessionId) -> None:
        for request in [one for one in self.of if one[0] == session]:
            self.end(request)

    def end_forgotten(self) -> None:
        """End the holds with a block that is not READY: forgetting has priority."""
        ready = self._blocks.store.ready
        for request, hold in list(self.of.items()):
            if ready(hold.ids.tobytes()) < len(hold.ids):
                self.end(request)

    def expire(self, now: float) -> None:
        while self.of and (first := next(iter(self.of.items())))[1].until <= now:
            self.end(first[0])

    def _release(self, hold: Hold) -> None:
        free = array("I")
        self._held -= len(hold.ids)
        for one in hold.ids:
            self._requests[one] -= 1
            if not self._requests[one]:
                del self._requests[one]
                self.nbytes -= self._sizes.pop(one)
                free.append(one)
        self._blocks.unlease(free.tobytes())
