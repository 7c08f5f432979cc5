"""The memory of blocks in plain Python: the executable specification of the native slabs.

An extent is a line of 4096-byte pages; it is divided into slabs of equal slots. A slab is
*reshaped* for another size class by laying a new slab over its bytes: the old blocks stay in place
below, and a new slot is free when no old block overlaps it. Every choice is identical to the
native one, including the slot.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

PAGE = 4096
MIB = 1 << 20
MAX_SLOTS = 65535
DONORS_ASKED = 8
LAID, TOO_SHORT, HELD = "laid", "too short", "held"


class Tenant(Protocol):
    """The interface of a block for the slabs."""

    def evictable(self) -> bool: ...


@dataclass(eq=False)
class SizeClass:
    pitch: int
    users: int = 0
    available: list[Slab] = field(default_factory=list)  # with free slots, the latest first
    reshaped: list[Slab] = field(default_factory=list)  # with old blocks below, oldest first

    @property
    def slab_slots(self) -> int:
        return max(1, min(max(16 * self.pitch, 4 * MIB), 64 * MIB) // self.pitch)

    @property
    def slab_pages(self) -> int:
        return pages_for(self.slab_slots * self.pitch)

    def carvable(self, pages: int) -> int:
        whole, rest = divmod(pages, self.slab_pages)
        return whole * self.slab_slots + rest * PAGE // self.pitch


@dataclass(eq=False)
class Slab:
    size_class: SizeClass
    extent: int
    start: int
    pages: int
    table: list[Tenant | None]
    free: list[int] = field(default_factory=list)  # the last one is used first
    covered: list[int] | None = None  # old blocks that overlap each slot, while there are any
    under: list[Slab] = field(default_factory=list)
    over: Slab | None = None
    cursor: int = 0
    stuck_round: int = 0
    exhausted_round: int = 0

    def span(self, slot: int) -> tuple[int, int]:
        first = self.start * PAGE + slot * self.size_class.pitch
        return first, first + self.size_class.pitch

    def used(self) -> int:
        return sum(block is not None for block in self.table)

    def evictable(self) -> Tenant | None:
        return next((block for block in self.table if block and block.evictable()), None)

    def any_evictable(self) -> bool:
        return any(slab.evictable() for slab in [self, *self.under])

    def live(self) -> Iterator[tuple[int, int, Tenant]]:
        """First byte, end and block of every live slot."""
        for slot, block in enumerate(self.table):
            if block is not None:
                yield *self.span(slot), block


def pages_for(nbytes: int) -> int:
    return -(-nbytes // PAGE)


def pitch_for(block_bytes: int) -> int:
    """The distance of slots: whole pages, because disks read and write whole pages."""
    return -(-block_bytes // PAGE) * PAGE


class Slabs:
    def __init__(self) -> None:
        self.extents: list[tuple[int, memoryview]] = []  # pages, generations
        self.classes: list[SizeClass] = []
        self.runs: list[tuple[int, int, int]] = []  # free: (pages, extent, start), sorted
        self.slabs: dict[tuple[int, int], Slab] = {}  # uppermost: (extent, start) -> slab
        self.round = 0

    def add_extent(self, nbytes: int, generations: memoryview) -> int:
        pages = nbytes // PAGE
        for page in range(pages):
            generations[page] = generations[page] or 1
        self.extents.append((pages, generations))
        self.add_run(len(self.extents) - 1, 0, pages)
        return len(self.extents) - 1

    def join_class(self, block_bytes: int) -> SizeClass:
        """The class for blocks of this size, with one more user.

        A class without users and slabs is replaced by the next new one.
        """
        pitch = pitch_for(block_bytes)
        lives = self.living()
        for size_class, alive in zip(self.classes, lives, strict=True):
            if alive and size_class.pitch == pitch:
                size_class.users += 1
                return size_class
        at = lives.index(False) if False in lives else len(lives)
        self.classes[at : at + 1] = [SizeClass(pitch, users=1)]
        return self.classes[at]

    def living(self) -> list[bool]:
        used = [slab.size_class for slab in self.layouts()]
        return [size_class.users > 0 or size_class in used for size_class in self.classes]

    def room(self, size_class: SizeClass) -> int:
        in_slabs = sum(len(slab.free) for slab in size_class.available)
        return in_slabs + sum(size_class.carvable(pages) for pages, _, _ in self.runs)

    # Free runs.

    def add_run(self, extent: int, start: int, pages: int) -> None:
        if pages == 0:
            return
        for run in list(self.runs):
            length, where, first = run
            if where == extent and (first + length == start or start + pages == first):
                self.runs.remove(run)
                start, pages = min(start, first), pages + length
        self.runs.append((pages, extent, start))
        self.runs.sort()

    def runs_beside(self, extent: int, start: int, end: int) -> tuple[int, int]:
        """The range from start to end, with the adjacent free runs."""
        for pages, where, first in self.runs:
            if where == extent and first + pages == start:
                start = first
            elif where == extent and first == end:
                end += pages
        return start, end

    # Slots.

    def push_free(self, slab: Slab, slot: int) -> None:
        slab.free.append(slot)
        if len(slab.free) == 1:
            slab.size_class.available.insert(0, slab)

    def carve(self, size_class: SizeClass) -> None:
        """Make a slab of the shortest run that holds a whole one, or else of the longest run."""
        at = bisect_left(self.runs, (size_class.slab_pages, 0, 0))
        length, extent, start = self.runs.pop(min(at, len(self.runs) - 1))
        slots = min(size_class.slab_slots, length * PAGE // size_class.pitch)
        pages = pages_for(slots * size_class.pitch)
        if length > pages:
            self.runs.append((length - pages, extent, start + pages))
            self.runs.sort()
        slab = Slab(size_class, extent, start, pages, [None] * slots)
        self.slabs[extent, start] = slab
        for slot in reversed(range(slots)):
            self.push_free(slab, slot)

    def take(self, size_class: SizeClass, block: Tenant) -> tuple[Slab, int]:
        """Give the block a slot; there must be room."""
        if not size_class.available:
            self.carve(size_class)
        slab = size_class.available[0]
        slot = slab.free.pop()
        slab.table[slot] = block
        if not slab.free:
            size_class.available.remove(slab)
        return slab, slot

    def release(self, slab: Slab, slot: int) -> None:
        """Free the slot, and increment its generation, so that readers of the old block detect it."""
        first, end = slab.span(slot)
        self.extents[slab.extent][1][first // PAGE] += 1
        slab.table[slot] = None
        top = slab.over
        if top is None:
            self.push_free(slab, slot)
            self.settle(slab)
            return
        if not slab.used():
            top.under.remove(slab)
        assert top.covered is not None
        for over in range(len(top.table)):
            over_first, over_end = top.span(over)
            if over_first < end and first < over_end:
                top.covered[over] -= 1
                if top.covered[over] == 0:
                    self.push_free(top, over)
        self.settle(top)

    def settle(self, slab: Slab) -> None:
        """End a reshaping whose last old block left; an empty slab becomes a free run."""
        if slab.under:
            return
        if slab.covered is not None:
            slab.covered = None
            slab.size_class.reshaped.remove(slab)
            if slab.used():
                pages = pages_for(len(slab.table) * slab.size_class.pitch)
                self.add_run(slab.extent, slab.start + pages, slab.pages - pages)
                slab.pages = pages
        if not slab.used():
            self.lift(slab)
            self.add_run(slab.extent, slab.start, slab.pages)

    def lift(self, slab: Slab) -> None:
        """Remove the slab from the lists of uppermost slabs."""
        del self.slabs[slab.extent, slab.start]
        if slab.free:
            slab.size_class.available.remove(slab)
            slab.free = []
        if slab.covered is not None:
            slab.size_class.reshaped.remove(slab)
            slab.covered = None

    def address(self, slab: Slab, slot: int) -> tuple[int, int, int]:
        first, _ = slab.span(slot)
        return slab.extent, first, self.extents[slab.extent][1][first // PAGE]

    # Reshaping.

    def clearable(self, size_class: SizeClass) -> list[Tenant] | None:
        """The blocks that overlap the next slot of a reshaped slab, or None."""
        for slab in size_class.reshaped:
            assert slab.covered is not None
            if slab.stuck_round == self.round:
                continue
            for _ in range(len(slab.table)):
                slot = slab.cursor
                slab.cursor = (slot + 1) % len(slab.table)
                if slab.covered[slot] == 0:
                    continue
                first, end = slab.span(slot)
                blocks = [
                    block
                    for old in slab.under
                    for old_first, old_end, block in old.live()
                    if old_first < end and first < old_end
                ]
                if all(block.evictable() for block in blocks):
                    return blocks
            slab.stuck_round = self.round
        return None

    def reshape(self, slab: Slab, size_class: SizeClass) -> str:
        """Lay the class over this slab and its neighbours of other classes, up to the length of a
        whole slab.

        Return LAID, or TOO_SHORT for a slot, or HELD if held blocks overlap every slot.
        """
        if slab.exhausted_round == self.round:
            return HELD
        start, end = self.runs_beside(slab.extent, slab.start, slab.start + slab.pages)
        slabs = [slab]
        while end - start < size_class.slab_pages:
            right = self.slabs.get((slab.extent, end))
            left = next(
                (
                    other
                    for (extent, _), other in self.slabs.items()
                    if extent == slab.extent and other.start + other.pages == start
                ),
                None,
            )
            if right is not None and right.size_class is not size_class:
                slabs.append(right)
                end += right.pages
            elif left is not None and left.size_class is not size_class:
                slabs.insert(0, left)
                start = left.start
            else:
                break
            start, end = self.runs_beside(slab.extent, start, end)
        covered = self.cover(slabs, start, end, size_class)
        if not covered:
            return TOO_SHORT
        if all(self.cover(slabs, start, end, size_class, held=True)):
            for barren in slabs:
                barren.exhausted_round = self.round
            return HELD
        self.lay(slabs, start, end, size_class, covered)
        return LAID

    def reshape_vacant(self, size_class: SizeClass, n: int, thorough: bool) -> None:
        """Reshape slabs of other classes where that frees a slot at once, until n have room.

        Only slabs that are half vacant, or that contain nothing evictable.
        """
        for other in self.classes:
            if other is size_class:
                continue
            asked = 0
            for slab in list(other.available):
                if self.room(size_class) >= n:
                    return
                if not thorough and asked == DONORS_ASKED:
                    break
                may = len(slab.free) * 2 >= len(slab.table) or not slab.any_evictable()
                if not may or not self.release_vacant(slab, size_class):
                    asked += 1
            for slab in list(other.reshaped):
                if self.room(size_class) >= n:
                    return
                if not slab.any_evictable():
                    self.release_vacant(slab, size_class)

    def release_vacant(self, slab: Slab, size_class: SizeClass) -> bool:
        """Lay the class over this slab if that frees a slot at once."""
        start, end = self.runs_beside(slab.extent, slab.start, slab.start + slab.pages)
        covered = self.cover([slab], start, end, size_class)
        if 0 not in covered:
            return False
        self.lay([slab], start, end, size_class, covered)
        return True

    def find_clearable(self, size_class: SizeClass) -> list[Tenant] | None:
        """The blocks that overlap any slot that can be freed, by address; None if no slot can."""
        blocks = self.clearable(size_class)
        if blocks is not None:
            return blocks
        for _, slab in sorted(self.slabs.items(), key=lambda item: item[0]):
            if slab.exhausted_round == self.round:
                continue
            if slab.size_class is not size_class:
                before = self.room(size_class)
                if self.reshape(slab, size_class) != LAID:
                    continue
                blocks = self.clearable(size_class)
                if blocks is not None:
                    return blocks
                return [] if self.room(size_class) > before else None
            block = slab.evictable()
            if block is not None:
                return [block]
            slab.exhausted_round = self.round
        return None

    def cover(
        self, slabs: list[Slab], start: int, end: int, size_class: SizeClass, held: bool = False
    ) -> list[int]:
        """The number of live (or held) blocks that overlap each slot that the class would have."""
        slots = min(MAX_SLOTS, (end - start) * PAGE // size_class.pitch)
        covered = [0] * slots
        for slab in slabs:
            for layout in [*slab.under, slab]:
                for first, last, block in layout.live():
                    if held and block.evictable():
                        continue
                    low = (first - start * PAGE) // size_class.pitch
                    high = -(-(last - start * PAGE) // size_class.pitch)
                    for slot in range(low, min(high, slots)):
                        covered[slot] += 1
        return covered

    def lay(
        self, slabs: list[Slab], start: int, end: int, size_class: SizeClass, covered: list[int]
    ) -> None:
        extent = slabs[0].extent
        laid = Slab(size_class, extent, start, end - start, [None] * len(covered))
        for slab in slabs:
            self.lift(slab)
            laid.under += slab.under
            if slab.used():
                laid.under.append(slab)
            slab.under = []
        for old in laid.under:
            old.over = laid
        self.runs = [run for run in self.runs if run[1] != extent or not start <= run[2] < end]
        laid.covered = covered
        self.slabs[extent, start] = laid
        for slot in reversed(range(len(covered))):
            if covered[slot] == 0:
                self.push_free(laid, slot)
        size_class.reshaped.append(laid)

    def layouts(self) -> Iterator[Slab]:
        """All slabs, uppermost or not."""
        for slab in self.slabs.values():
            yield slab
            yield from slab.under

    def check(self) -> None:
        """Raise AssertionError if pages are lost or live slots overlap."""
        for extent, (pages, _) in enumerate(self.extents):
            line = [(start, length) for length, where, start in self.runs if where == extent]
            line += [
                (slab.start, slab.pages) for slab in self.slabs.values() if slab.extent == extent
            ]
            at = 0
            for start, length in sorted(line):
                assert start == at, "pages are missing or listed twice"
                at += length
            assert at == pages, "pages are missing at the end"
            spans = [
                span for slab in self.layouts() if slab.extent == extent for span in slab.live()
            ]
            spans.sort(key=lambda span: span[0])
            for (_, left_end, _), (right_first, _, _) in pairwise(spans):
                assert left_end <= right_first, "two live slots overlap"
