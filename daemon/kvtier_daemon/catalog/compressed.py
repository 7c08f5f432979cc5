"""Which blocks are compressed in memory, and which of these leave it first. No I/O.

There are two orders. The configured policy orders all blocks in memory: those in slots, and those of which
memory has a frame. It selects the frames that are dropped, so memory keeps the blocks that a larger memory
would keep, and what leaves the slots without a frame. The least recently used blocks in slots are compressed
first, and leave their slots first.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import compress

from kvtier_daemon.catalog.policy import ID_BYTES, Policy

COOL_SHARE = 1 / 16  # of the slots: the blocks that are compressed before they leave them
# Blocks of the policy's order that one search looks at, at first and at most.
FEW, MOST = 64, 16_384
SEARCH = 4096  # of them, for blocks without frames: 0.2 ms
LOOK_AHEAD = 4  # blocks to look at for each that leaves its slot
UNFIT_BYTES = 60  # of the note about one block


def nothing(*_: object) -> None:
    """What an order without frames calls."""


class CompressedOrder:
    """The `Policy` of a tenant with compressed memory. `whole` orders all blocks in memory, `slots` those in
    slots. `lost` is called with blocks that exist in no tier now, of which there are frames; `stirred` after
    blocks got slots. The owner of the frames reports them to `compressed` and `dropped`."""

    def __init__(self, whole: Policy, slots: Policy) -> None:
        self.lost: Callable[[Sequence[int]], None] = nothing
        self.stirred: Callable[[], None] = nothing
        self._whole = whole
        self._slots = slots
        self.alone_bytes = 0  # of the blocks without a slot, in slots
        self.unprepared = 0  # blocks that left their slots, are only on disk now, and had no frame
        self.framed: dict[int, int] = {}  # the blocks with a frame, and their sizes in slots
        self.alone: set[int] = set()  # those of them without a slot
        self.paired: dict[int, None] = {}  # the others; oldest first
        self.unfit: set[int] = set()  # blocks that do not shrink; the owner of the frames adds them
        self.cool: frozenset[int] = frozenset()  # blocks that leave their slots next

    # --- events --------------------------------------------------------------------------------

    def now(self, seconds: float) -> None:
        self._whole.now(seconds)
        self._slots.now(seconds)

    def added(self, ids: bytes, names: bytes = b"", parents: bytes = b"") -> None:
        """Blocks got slots. Those with a frame were in memory before; `wanted` has reported the use."""
        self._slots.added(ids, names, parents)
        self.stirred()
        back = _within(ids, self.framed)
        self._leave_alone(back)
        self.paired.update(dict.fromkeys(back))
        if not back:
            self._whole.added(ids, names, parents)
        elif len(back) < len(ids) // ID_BYTES:
            fresh = [one not in self.framed for one in array("I", ids)]
            some = (array("I", ids), array("Q", names), array("I", parents))
            self._whole.added(
                *(array(each.typecode, compress(each, fresh)).tobytes() for each in some)
            )

    def wanted(self, ids: bytes, names: bytes = b"") -> None:
        self._whole.wanted(ids, names)
        self._slots.wanted(ids, names)

    def refreshed(self, ids: bytes) -> None:
        self._whole.refreshed(ids)
        self._slots.refreshed(ids)

    def held(self, ids: bytes) -> None:
        self._whole.held(ids)
        self._slots.held(ids)

    def freed(self, ids: bytes) -> None:
        self._whole.freed(ids)
        self._slots.freed(ids)

    def left(self, ids: bytes) -> None:
        """Blocks have no slot now. Those with a frame keep their places in the policy's order."""
        self._slots.left(ids)
        kept = _within(ids, self.framed)
        for one in kept:
            if one not in self.alone:
                self.alone.add(one)
                self.alone_bytes += self.framed[one]
            self.paired.pop(one, None)
        self._whole.freed(kept.tobytes())  # they may have been away
        others = ids if not kept else _without(ids, self.framed)
        self.unprepared += len(others) // ID_BYTES - len(_within(others, self.unfit))
        self._whole.left(others)

    def gone(self, ids: bytes) -> None:
        self._whole.gone(ids)
        self._slots.gone(ids)
        self.unfit.difference_update(_within(ids, self.unfit))
        if lost := _within(ids, self.framed):
            self._forget(lost)
            self.lost(lost)

    def demoted(self, ids: bytes) -> None:
        self._whole.demoted(ids)
        self._slots.demoted(ids)

    def hinted(self, ids: bytes, importance: float, names: bytes = b"") -> None:
        self._whole.hinted(ids, importance, names)
        self._slots.hinted(ids, importance, names)

    # --- decisions -----------------------------------------------------------------------------

    def victims(self, n: int) -> bytes:
        """Blocks with a frame come before others, if they are about as cold by their last uses. The policy
        selects among the others, which leave memory; among all without frames."""
        if not self.framed:
            return self._whole.victims(n)
        coldest = array("I", self._slots.victims(n * LOOK_AHEAD))
        found = array("I", (one for one in coldest if one in self.framed))
        if len(found) < n:
            others = dict.fromkeys(_first_without(self.framed, self._whole, n - len(found)))
            others.update(dict.fromkeys(one for one in coldest if one not in self.framed))
            found.extend(others)
        return found[:n].tobytes()

    def __len__(self) -> int:
        return len(self._slots)

    def next_to_compress(self, most: int) -> bytes:
        """Of the `most` blocks that leave their slots next, those without a frame, in this order, except
        those that do not shrink."""
        cool = array("I", self._slots.victims(most))
        self.cool = frozenset(cool)
        done, unfit = self.framed, self.unfit
        return array("I", (one for one in cool if one not in done and one not in unfit)).tobytes()

    def make_room(
        self, nbytes: int, size_of: Callable[[int], int], busy: Collection[int],
        coming: Sequence[int], coming_bytes: int,
    ) -> tuple[list[int], set[int]]:  # fmt: skip
        """Select the frames to drop for `nbytes`. Return them, and those of the `coming` blocks (of
        `coming_bytes` each) that are worth less: they need no room. Frames of blocks with a slot go
        first, unless they leave it next. Never selects `busy` frames."""
        frames, needless, left = list[int](), set[int](), nbytes
        for one in self.paired:
            if left <= 0:
                return frames, needless
            if one not in busy and one not in self.cool:
                frames.append(one)
                left -= size_of(one)
        ask, seen, fresh = FEW, 0, set(coming)
        while left > 0:
            victims = array("I", self._whole.victims(ask))
            for one in victims[seen:]:
                if left <= 0:
                    break
                if one in fresh:
                    needless.add(one)
                    left -= coming_bytes
                elif one in self.alone and one not in busy:
                    frames.append(one)
                    left -= size_of(one)
            if len(victims) < ask or ask >= MOST:
                break
            ask, seen = ask * 4, len(victims)
        return frames, needless

    # --- frames --------------------------------------------------------------------------------

    def compressed(self, one: int, nbytes: int) -> None:
        """There is a frame of this block of `nbytes`, which still has a slot."""
        self.framed[one] = nbytes
        self.paired[one] = None

    def dropped(self, ids: Sequence[int]) -> None:
        """There are no frames of these blocks now."""
        left = array("I", (one for one in ids if one in self.alone))
        self._forget([one for one in ids if one in self.framed])
        if left:
            self._whole.left(left.tobytes())

    def _forget(self, ids: Sequence[int]) -> None:
        self._leave_alone(ids)
        for one in ids:
            self.paired.pop(one, None)
            del self.framed[one]

    def _leave_alone(self, ids: Iterable[int]) -> None:
        for one in ids:
            if one in self.alone:
                self.alone.remove(one)
                self.alone_bytes -= self.framed[one]

    def memory_bytes(self) -> int:
        """The notes about frames count as memory of the frames."""
        notes = UNFIT_BYTES * len(self.unfit)
        return self._whole.memory_bytes() + self._slots.memory_bytes() + notes


def _first_without(framed: Collection[int], policy: Policy, n: int) -> list[int]:
    """The first of the policy's victims that have no frame: `n`, or fewer after a search of some time."""
    ask = FEW + n
    while True:
        victims = array("I", policy.victims(ask))
        found = [one for one in victims if one not in framed]
        if len(found) >= n or len(victims) < ask or ask >= SEARCH + n:
            return found[:n]
        ask = min(4 * ask, SEARCH + n)


def _within(ids: bytes, some: Collection[int]) -> array[int]:
    return array("I", (one for one in array("I", ids) if one in some) if some else ())


def _without(ids: bytes, some: Collection[int]) -> bytes:
    return array("I", (one for one in array("I", ids) if one not in some)).tobytes()
