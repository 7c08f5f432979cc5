"""One tenant's segments in one directory, by stage. No I/O, no clock.

     FREE ──begin──▶ BEGINNING ──begun──▶ OPEN ──seal──▶ SEALING ──sealed──▶ SEALED
      ▲ (FREE ──hold_back──▶ FREEING: while it is erased)                      │
      └──freed── FREEING ◀──when no block and no read uses it── LEAVING ◀──reclaim──┘

Segments are reclaimed in the order in which they were begun. Blocks that were requested since their write are
copied to another segment before that.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from pathlib import PurePath

from kvtier_daemon.tiers.cold.segment import FrameTable, Head, TombstonePages


class Stage(Enum):
    """The use of a segment."""

    FREE = "free"
    BEGINNING = "beginning"
    OPEN = "open"
    SEALING = "sealing"
    SEALED = "sealed"
    LEAVING = "leaving"
    FREEING = "freeing"


NOT_FREE_YET = (Stage.LEAVING, Stage.FREEING)


@dataclass(slots=True, eq=False)
class Segment:
    """A segment file. `number` is unique in the daemon."""

    number: int
    path: str
    fd: int
    nbytes: int
    stage: Stage = Stage.FREE
    head: Head | None = None
    writing: int = 0
    reading: int = 0
    leftover: bool = True  # it may hold bytes of an earlier use
    noting: bool = False  # its tombstones are being written
    table: FrameTable = field(init=False)  # of the frames that are being written
    tombstones: TombstonePages = field(init=False)  # of frames that were forgotten

    def __post_init__(self) -> None:
        self.empty()
        self.tombstones = TombstonePages(self.nbytes)

    @property
    def idle(self) -> bool:
        return not (self.writing or self.reading or self.noting)

    @property
    def file_number(self) -> int:
        name = PurePath(self.path).name
        return int(name) if name.isdecimal() else self.number

    def empty(self) -> None:
        self.table = FrameTable(self.nbytes)


class SegmentLog:
    """The segments by stage."""

    def __init__(self) -> None:
        self.free: deque[Segment] = deque()
        self.open: Segment | None = None
        self.sealed: deque[Segment] = deque()
        self.others: set[Segment] = set()  # beginning, sealing, leaving, freeing

    def __len__(self) -> int:
        held = len(self.free) + len(self.sealed) + len(self.others)
        return held + (self.open is not None)

    @property
    def has_place(self) -> bool:
        """Whether blocks can be written now or soon without a reclaimed segment."""
        beginning = any(one.stage is Stage.BEGINNING for one in self.others)
        return self.open is not None or bool(self.free) or beginning

    def add(self, segment: Segment) -> None:
        segment.stage = Stage.FREE
        self.free.append(segment)

    def add_sealed(self, segment: Segment) -> None:
        """Add a sealed segment that a start found; the oldest first."""
        segment.stage = Stage.SEALED
        self.sealed.append(segment)

    def begin(self, epoch: int, sequence: int, owner: bytes, encrypted: bool = False) -> Segment:
        """Take a free segment, whose head must then be written; `begun` follows."""
        segment = self.free.popleft()
        _step(segment, Stage.FREE, Stage.BEGINNING)
        assert segment.idle
        segment.head = Head(segment.file_number, segment.nbytes, epoch, sequence, owner, encrypted)
        segment.tombstones = TombstonePages(segment.nbytes)
        segment.empty()
        self.others.add(segment)
        return segment

    def not_begun(self, segment: Segment) -> None:
        """Free a segment whose head could not be written."""
        _step(segment, Stage.BEGINNING, Stage.FREE)
        self.others.discard(segment)
        self.free.append(segment)

    def begun(self, segment: Segment) -> None:
        assert self.open is None
        _step(segment, Stage.BEGINNING, Stage.OPEN)
        self.others.discard(segment)
        self.open = segment

    def resume(self, segment: Segment) -> None:
        """Continue to write to a segment that an earlier daemon wrote."""
        assert self.sealed[-1] is segment
        self.sealed.pop()
        segment.stage = Stage.BEGINNING
        self.others.add(segment)

    def seal(self) -> Segment:
        """Close the open segment for writing; its footer is written after its frames."""
        segment = self.open
        assert segment is not None
        _step(segment, Stage.OPEN, Stage.SEALING)
        self.open = None
        self.others.add(segment)
        return segment

    def now_sealed(self, segment: Segment) -> None:
        """Note that the footer is on disk, and free the memory of the table."""
        _step(segment, Stage.SEALING, Stage.SEALED)
        segment.empty()
        self.others.discard(segment)
        self.sealed.append(segment)

    def reclaim(self) -> Segment | None:
        """Return the oldest sealed segment, which is to be reused; None if no segment is sealed."""
        if not self.sealed:
            return None
        segment = self.sealed.popleft()
        _step(segment, Stage.SEALED, Stage.LEAVING)
        self.others.add(segment)
        return segment

    def freeing(self, segment: Segment) -> None:
        """Start to free a segment that no block and no read uses."""
        assert segment.idle
        _step(segment, Stage.LEAVING, Stage.FREEING)

    def not_freed(self, segment: Segment) -> None:
        """Note that its head could not be zeroed."""
        _step(segment, Stage.FREEING, Stage.LEAVING)

    def hold_back(self, segment: Segment) -> None:
        """Keep a free segment from being begun until `freed`."""
        _step(segment, Stage.FREE, Stage.FREEING)
        self.free.remove(segment)
        self.others.add(segment)

    def freed(self, segment: Segment) -> None:
        _step(segment, Stage.FREEING, Stage.FREE)
        segment.leftover = True
        self.others.discard(segment)
        self.free.append(segment)

    def retired(self, segment: Segment) -> None:
        """Note that its file is removed."""
        _step(segment, Stage.FREEING, Stage.FREE)
        self.others.discard(segment)

    def failed(self, segment: Segment) -> None:
        """Seal a segment that could not be begun or sealed: it is read, and reclaimed in its turn."""
        self.others.discard(segment)
        if self.open is segment:
            self.open = None
        segment.stage = Stage.SEALED
        segment.empty()
        self.sealed.append(segment)


def _step(segment: Segment, before: Stage, after: Stage) -> None:
    assert segment.stage is before, (segment.path, segment.stage, after)
    segment.stage = after
