"""Reads segment files after a start. Changes nothing, and uses only contents that pass all checks.

Runs in a thread: a call consists of a few long calls without the GIL.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvtier import frame
from kvtier.errors import FrameError, TierError
from kvtier.frame import PAGE, Frame, pages
from kvtier.layout import KvSpec
from kvtier_daemon.tiers.cold.directory_lock import distrust
from kvtier_daemon.tiers.cold.segment import (
    ENTRY,
    FooterEntry,
    Head,
    TombstonePages,
    Trailer,
    check_rows,
    encode_row,
    end_of,
    first_frame,
    one_space,
    pages_of,
    space_of,
    split_rows,
    without,
)
from kvtier_kernels import xxh3_128


@dataclass(slots=True)
class Recovered:
    """The content of a segment file. One without a head has no usable content, and can be reused at once."""

    path: Path
    nbytes: int
    head: Head | None = None
    sealed: bool = False
    torn: bool = False  # its footer was written after a kill had left it open
    spaces: list[tuple[bytes, KvSpec]] = field(default_factory=list)
    rows: bytes = b""  # of frames without a tombstone
    table: bytes = b""  # of all frames
    parts: list[tuple[bytes, KvSpec, bytes]] = field(default_factory=list)  # rows by space
    tombstones: TombstonePages = field(default_factory=lambda: TombstonePages(0))
    end: int = 0  # of the frames
    remark: str = ""
    warning: str = ""  # why some content that a daemon wrote is not used
    foreign: bool = False  # of another secret, tenant or directory: its content is never used
    used: bytes = b""  # pages of accessed frames, 4 bytes each, in ascending order

    def split(self) -> None:
        """Divide the rows by their spaces. Slow if there are several spaces."""
        if len(self.spaces) == 1 and one_space(self.rows):
            self.parts = [(*self.spaces[0], self.rows)]
            return
        rows: dict[int, list[bytes]] = {}
        for row in split_rows(self.rows):
            rows.setdefault(space_of(row), []).append(row)
        self.parts = [
            (*self.spaces[number], b"".join(of_space))
            for number, of_space in rows.items()
            if number < len(self.spaces)
        ]


def recover(
    path: Path, owner: bytes | None, described: Mapping[bytes, KvSpec] | None, uid: int | None = None,
    opened: Path | None = None,
) -> Recovered:  # fmt: skip
    """Return the content of the file without forgotten frames: from its footer, or frame by frame if it has
    no footer.

    A segment of another owner is foreign; None accepts all owners. `described` has the known spaces: frames
    of other spaces in an open segment are lost. With None, open segments are not read. `uid` is the user that
    may own the file besides root, by default that of the process. `opened` is where the file is opened, if
    `path` only names it. Raises TierError if the file cannot be read, or if another user could have written
    to it.
    """
    try:
        fd = os.open(opened or path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            why, fix = distrust(path, status := os.fstat(fd), file=True, uid=uid)
            if why:
                raise TierError(f"{why}; not using this file: run `{fix}`")
            found = Recovered(path, status.st_size)
            _read_head(fd, found, owner, described)
            found.table = found.rows
            if found.tombstones:
                rows = split_rows(found.rows)
                found.rows = b"".join(without(rows, pages_of(found.rows), found.tombstones))
            # These pages of the file are not read again soon.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            return found
        finally:
            os.close(fd)
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
        if error.errno == errno.ELOOP:  # of O_NOFOLLOW
            why = f"is a symbolic link: other users may have access; not using it: run `rm {path}`"
        raise TierError(f"{path}: {why}") from error


def _read_head(
    fd: int, found: Recovered, owner: bytes | None, described: Mapping[bytes, KvSpec] | None
) -> None:
    page = os.pread(fd, PAGE, 0)
    try:
        head = Head.decode(page)
    except FrameError as error:
        found.remark = f"no head: {error}"
        found.warning = f"{found.remark}; its blocks are not used" if any(page) else ""
        return
    found.warning = _refused(found, head, owner)
    if found.warning:
        found.remark = found.warning
        return
    found.head, found.end = head, first_frame(head.nbytes)
    text = os.pread(fd, found.end - PAGE, PAGE)
    found.tombstones, damaged = TombstonePages.decode(text, head.epoch, head.nbytes)
    if damaged:
        found.warning = (
            f"tombstone pages {damaged} are damaged; not using the blocks that they cover"
        )
    _read_footer(fd, found, head, described)


def _refused(found: Recovered, head: Head, owner: bytes | None) -> str:
    """Return why no content of this segment is used, or an empty text."""
    if head.nbytes != found.nbytes:
        return (
            f"the file has {found.nbytes} bytes, its head says {head.nbytes}; its blocks are "
            "not used"
        )
    if owner is not None and head.owner != owner:
        found.foreign = True
        return (
            "it was written under another secret, or in another directory; its blocks are not used"
        )
    return ""


def refuse_copies(found: Sequence[Recovered]) -> list[Recovered]:
    """Return these segments of one tenant and directory, copies without their content: a copy may have blocks
    that were forgotten since. A renamed file is no copy if the file with its old name has another segment."""
    numbers = {int(one.path.name): one.head.number for one in found if one.head is not None}
    return [
        Recovered(
            one.path, one.nbytes,
            warning=f"it is a copy of segment {one.head.number}; its blocks are not used",
        )
        if one.head is not None
        and one.head.number != int(one.path.name)
        and numbers.get(one.head.number, one.head.number) == one.head.number
        else one
        for one in found
    ]  # fmt: skip


def _read_footer(
    fd: int, found: Recovered, head: Head, described: Mapping[bytes, KvSpec] | None
) -> None:
    try:
        trailer = Trailer.decode(os.pread(fd, PAGE, head.nbytes - PAGE), head)
        table = os.pread(fd, trailer.table_bytes, trailer.table_at)
        spaces, rows = trailer.split(table)
        if len(rows) % ENTRY.size or len(rows) // ENTRY.size != trailer.entries:
            raise FrameError("the table's length does not match its entries")
        check_rows(rows, found.end, trailer.table_at)
        found.spaces, found.rows = spaces, rows
        found.sealed, found.torn = True, trailer.torn
        found.end = end_of(rows, head.nbytes)
    except FrameError as error:
        found.remark = f"no footer: {error}"
        if described is not None:
            _read_frames(fd, found, head, described)


def _read_frames(fd: int, found: Recovered, head: Head, described: Mapping[bytes, KvSpec]) -> None:
    """Read frame after frame, up to the first that is damaged, and sync them: a killed daemon may not have
    done so, and from now on they count as written."""
    numbers: dict[bytes, int] = {}
    rows: list[bytes] = []
    while found.end < head.nbytes - PAGE:
        current = _frame_at(fd, found.end, head)
        if current is None:
            break
        space = current.identity.space
        if space in described:
            if space not in numbers:
                numbers[space] = len(numbers)
                found.spaces.append((space, described[space]))
            rows.append(encode_row(FooterEntry.of(current, found.end // PAGE), numbers[space]))
        found.end += current.total_bytes
    found.rows = b"".join(rows)
    if rows:
        os.fdatasync(fd)


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
    return len(found.rows) // ENTRY.size


def free_bytes(found: Recovered) -> int:
    return found.nbytes - found.end - pages(len(found.rows)) - PAGE
