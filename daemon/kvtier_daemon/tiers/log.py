"""One tenant's segments in one directory: which is written to, which comes next. No I/O, no clock.

     FREE ──begin──▶ BEGINNING ──begun──▶ OPEN ──seal──▶ SEALING ──sealed──▶ SEALED
      ▲ (FREE ──hold_back──▶ FREEING: while it is erased)                      │
      └──freed── FREEING ◀──when nothing names or reads it── LEAVING ◀──leave──┘

Segments are used again in the order in which they were begun: the oldest leaves first, and what of it was
wanted since it was written is written again, elsewhere, before that.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from pathlib import PurePath
from typing import NamedTuple

from kvtier.codec.frame import PAGE
from kvtier.layout import KvSpec
from kvtier_daemon.tiers.segment import (
    ENTRY,
    Head,
    described_bytes,
    first_frame,
    footer_bytes,
    page_of,
    space_bytes,
    split_rows,
)
from kvtier_daemon.tiers.tombstones import Tombstones


class Stage(Enum):
    """What a segment is being used for."""

    FREE = "free"
    BEGINNING = "beginning"
    OPEN = "open"
    SEALING = "sealing"
    SEALED = "sealed"
    LEAVING = "leaving"
    FREEING = "freeing"


class Taken(NamedTuple):
    """A place for a frame: its page, the number of its space in the table, and where in that its entry is."""

    page: int
    space: int
    at: int


NOT_FREE_YET = (Stage.LEAVING, Stage.FREEING)


@dataclass(slots=True, eq=False)
class Segment:
    """A file of a log. `number` is its own among all that the daemon has."""

    number: int
    path: str
    fd: int
    nbytes: int
    stage: Stage = Stage.FREE
    head: Head | None = None
    end: int = 0  # where the next frame goes
    table: bytearray = field(default_factory=bytearray)  # to come: an entry for each frame
    failed: bool = False  # something was not written
    spaces: list[tuple[bytes, KvSpec]] = field(default_factory=list)  # of the table
    number_of: dict[bytes, int] = field(default_factory=dict)
    described: int = 0  # bytes that describing them takes, one by one
    writing: int = 0
    reading: int = 0
    leftover: bool = True  # it may hold bytes of an earlier use
    noting: bool = False  # its tombstones are being written
    tombstones: Tombstones = field(init=False)  # of frames that were forgotten

    def __post_init__(self) -> None:
        self.end = first_frame(self.nbytes)
        self.tombstones = Tombstones(self.nbytes)

    @property
    def idle(self) -> bool:
        return not (self.writing or self.reading or self.noting)

    @property
    def file_number(self) -> int:
        """What its file is called."""
        name = PurePath(self.path).name
        return int(name) if name.isdecimal() else self.number

    @property
    def taken(self) -> int:
        """How many frames there is room for."""
        return len(self.table) // ENTRY.size

    def take(self, frame_bytes: int, space: tuple[bytes, KvSpec]) -> Taken | None:
        """Where a frame goes; None if it does not fit before the footer."""
        assert self.stage is Stage.OPEN
        new = space[0] not in self.number_of
        described = self.described + space_bytes(space) if new else self.described
        footer = footer_bytes(described_bytes(described), self.taken + 1)
        if self.end + frame_bytes + footer > self.nbytes:
            return None
        if new:
            self.number_of[space[0]] = len(self.spaces)
            self.spaces.append(space)
            self.described = described
        taken = Taken(self.end // PAGE, self.number_of[space[0]], len(self.table))
        self.end += frame_bytes
        self.table += bytes(ENTRY.size)
        return taken

    def list_frame(self, at: int, row: bytes) -> None:
        """This frame is on disk: its entry, for a place that was taken."""
        assert self.stage in (Stage.OPEN, Stage.SEALING)
        self.table[at : at + ENTRY.size] = row

    def rows(self) -> bytes:
        """The table, without places that were taken in vain."""
        return b"".join(row for row in split_rows(bytes(self.table)) if page_of(row))

    def resume(self, spaces: list[tuple[bytes, KvSpec]], rows: bytes, end: int) -> None:
        """Go on where another life has stopped."""
        self.end, self.table, self.spaces = end, bytearray(rows), list(spaces)
        self.number_of = {identity: number for number, (identity, _) in enumerate(spaces)}
        self.described = sum(map(space_bytes, spaces))

    def empty(self) -> None:
        """Forget what was written to it."""
        self.end, self.described, self.failed = first_frame(self.nbytes), 0, False
        self.table, self.spaces, self.number_of = bytearray(), [], {}


class Log:
    """The segments, by what they are for."""

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
        """Whether something can be written, now or soon, without a segment leaving first."""
        beginning = any(one.stage is Stage.BEGINNING for one in self.others)
        return self.open is not None or bool(self.free) or beginning

    def add(self, segment: Segment) -> None:
        """One that holds nothing yet."""
        segment.stage = Stage.FREE
        self.free.append(segment)

    def add_sealed(self, segment: Segment) -> None:
        """One that a restart found full; to be added oldest first."""
        segment.stage = Stage.SEALED
        self.sealed.append(segment)

    def begin(self, epoch: int, sequence: int, owner: bytes) -> Segment:
        """Take a free segment; its head is to be written, and `begun` to be said when that is on disk."""
        segment = self.free.popleft()
        _step(segment, Stage.FREE, Stage.BEGINNING)
        assert segment.idle
        segment.head = Head(segment.file_number, segment.nbytes, epoch, sequence, owner)
        segment.tombstones = Tombstones(segment.nbytes)
        segment.empty()
        self.others.add(segment)
        return segment

    def not_begun(self, segment: Segment) -> None:
        """Its head could not be written: it is free as before."""
        _step(segment, Stage.BEGINNING, Stage.FREE)
        self.others.discard(segment)
        self.free.append(segment)

    def begun(self, segment: Segment) -> None:
        assert self.open is None
        _step(segment, Stage.BEGINNING, Stage.OPEN)
        self.others.discard(segment)
        self.open = segment

    def resume(self, segment: Segment) -> None:
        """The newest one is written on, as if it were just begun: `begun` is to be said when its disk
        knows."""
        assert self.sealed[-1] is segment
        self.sealed.pop()
        segment.stage = Stage.BEGINNING
        self.others.add(segment)

    def seal(self) -> Segment:
        """The open segment takes no more; its footer is to be written when its frames are on disk."""
        segment = self.open
        assert segment is not None
        _step(segment, Stage.OPEN, Stage.SEALING)
        self.open = None
        self.others.add(segment)
        return segment

    def now_sealed(self, segment: Segment) -> None:
        """Its footer is on disk: what the table would need is not kept in memory any more."""
        _step(segment, Stage.SEALING, Stage.SEALED)
        segment.empty()
        self.others.discard(segment)
        self.sealed.append(segment)

    def leave(self) -> Segment | None:
        """The oldest sealed segment, which is to be used again once what deserves it was brought away."""
        if not self.sealed:
            return None
        segment = self.sealed.popleft()
        _step(segment, Stage.SEALED, Stage.LEAVING)
        self.others.add(segment)
        return segment

    def freeing(self, segment: Segment) -> None:
        """Nothing names it any more, and nothing reads it: its head is to be taken back."""
        assert segment.idle
        _step(segment, Stage.LEAVING, Stage.FREEING)

    def not_freed(self, segment: Segment) -> None:
        """Its head could not be taken back: that is still to be done."""
        _step(segment, Stage.FREEING, Stage.LEAVING)

    def hold_back(self, segment: Segment) -> None:
        """A free one is not to be begun until `freed` is said of it."""
        _step(segment, Stage.FREE, Stage.FREEING)
        self.free.remove(segment)
        self.others.add(segment)

    def freed(self, segment: Segment) -> None:
        _step(segment, Stage.FREEING, Stage.FREE)
        segment.leftover = True
        self.others.discard(segment)
        self.free.append(segment)

    def retired(self, segment: Segment) -> None:
        """Its file goes."""
        _step(segment, Stage.FREEING, Stage.FREE)
        self.others.discard(segment)

    def failed(self, segment: Segment) -> None:
        """It could not be begun or sealed: what it holds may be read, and it leaves like a full one."""
        self.others.discard(segment)
        if self.open is segment:
            self.open = None
        segment.stage = Stage.SEALED
        segment.empty()
        self.sealed.append(segment)


def _step(segment: Segment, before: Stage, after: Stage) -> None:
    assert segment.stage is before, (segment.path, segment.stage, after)
    segment.stage = after
