"""What segment files hold, found out after a start. Reads them; writes nothing; believes only what adds up.

Runs in a thread: each call is a few long ones without the GIL.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.codec import frame
from kvtier.codec.frame import PAGE, Frame, pages
from kvtier.errors import FrameError, TierError
from kvtier.layout import KvSpec
from kvtier_daemon.tiers.segment import (
    ENTRY,
    FIRST_FRAME,
    Head,
    Listed,
    Trailer,
    encode_row,
    end_of,
    page_of,
    space_of,
    split_rows,
)
from kvtier_kernels import xxh3_128


@dataclass(slots=True)
class Recovered:
    """A segment as it was found. Without a head it holds nothing that counts, and can be used as it is."""

    path: Path
    nbytes: int
    head: Head | None = None
    sealed: bool = False
    torn: bool = False  # it was sealed after a kill had left it open
    spaces: list[tuple[bytes, KvSpec]] = field(default_factory=list)
    rows: bytes = b""  # of frames that count
    table: bytes = b""  # of all
    parts: list[tuple[bytes, KvSpec, bytes]] = field(default_factory=list)  # rows by space
    left_out: tuple[int, ...] = ()
    end: int = FIRST_FRAME  # of the frames of one that is not sealed
    remark: str = ""
    used: bytes = b""  # pages of frames that were wanted, 4 bytes each, in ascending order

    def leave_out(self, pages: Iterable[int]) -> None:
        """The frames at these pages count no more."""
        self.left_out = tuple(pages)
        out = set(self.left_out)
        if out:
            self.rows = b"".join(row for row in split_rows(self.rows) if page_of(row) not in out)

    def split(self) -> None:
        """Sort the rows by their spaces. Long where there are several."""
        if len(self.spaces) == 1:
            self.parts = [(*self.spaces[0], self.rows)]
            return
        rows: dict[int, list[bytes]] = {}
        for row in split_rows(self.rows):
            rows.setdefault(space_of(row), []).append(row)
        self.parts = [
            (*self.spaces[number], b"".join(theirs))
            for number, theirs in rows.items()
            if number < len(self.spaces)
        ]


def recover(path: Path, tenant: bytes, described: Mapping[bytes, KvSpec]) -> Recovered:
    """What the file holds: by its footer, or frame by frame where it has none.

    `described` has the spaces that an open segment's frames may be of: one that is not described there is
    lost. Raises TierError if the file can't be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            found = Recovered(path, os.fstat(fd).st_size)
            _look(fd, found, tenant, described)
            found.table = found.rows
            # What was read here is not wanted again soon.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            return found
        finally:
            os.close(fd)
    except OSError as error:
        raise TierError(f"{path}: can't be read: {error.strerror}") from error


def _look(fd: int, found: Recovered, tenant: bytes, described: Mapping[bytes, KvSpec]) -> None:
    try:
        head = Head.decode(os.pread(fd, PAGE, 0))
    except FrameError as error:
        found.remark = f"no head: {error}"
        return
    if head.nbytes != found.nbytes or head.tenant != tenant:
        found.remark = "another length than its head says, or another tenant's"
        return
    found.head = head
    try:
        trailer = Trailer.decode(os.pread(fd, PAGE, head.nbytes - PAGE), head)
        table = os.pread(fd, trailer.table_bytes, trailer.table_at)
        found.spaces, found.rows = trailer.split(table)
        found.sealed, found.torn = True, trailer.torn
        found.end = end_of(found.rows)
        if len(found.rows) % ENTRY.size or len(found.rows) // ENTRY.size != trailer.entries:
            raise FrameError("a table of another length than its entries take")
    except FrameError as error:
        found.spaces, found.rows, found.sealed = [], b"", False
        found.remark = f"no footer: {error}"
        _walk(fd, found, head, described)


def _walk(fd: int, found: Recovered, head: Head, described: Mapping[bytes, KvSpec]) -> None:
    """Go from frame to frame, until one is none or its payload is not what its header says."""
    numbers: dict[bytes, int] = {}
    rows: list[bytes] = []
    while found.end < head.nbytes - PAGE:
        one = _frame_at(fd, found.end, head)
        if one is None:
            break
        space = one.identity.space
        if space in described:
            if space not in numbers:
                numbers[space] = len(numbers)
                found.spaces.append((space, described[space]))
            rows.append(encode_row(Listed.of(one, found.end // PAGE), numbers[space]))
        found.end += one.total_bytes
    found.rows = b"".join(rows)


def _frame_at(fd: int, at: int, head: Head) -> Frame | None:
    try:
        page = os.pread(fd, PAGE, at)
        size = frame.peek(page)
        text = page if size == PAGE else os.pread(fd, size, at)
        one = frame.decode(text, head.epoch)
    except FrameError:
        return None
    if at + one.total_bytes > head.nbytes:
        return None
    payload = os.pread(fd, one.payload_bytes, at + one.header_bytes)
    good = len(payload) == one.payload_bytes and xxh3_128(payload) == one.payload_digest
    return one if good else None


def entries_of(found: Recovered) -> int:
    """How many frames it lists."""
    return len(found.rows) // ENTRY.size


def free_bytes(found: Recovered) -> int:
    """What may still be written to it."""
    return found.nbytes - found.end - pages(len(found.rows)) - PAGE
