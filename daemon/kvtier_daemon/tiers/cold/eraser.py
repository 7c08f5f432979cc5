"""Erases the bytes of a segment file that belong to no block: forgotten frames, and remains of earlier uses.

A footer that lists only the remaining frames is written first, then everything else is punched out. A crash
between the two leaves a segment that holds more bytes than it lists, and never one that lists erased frames.
Runs in a thread: it waits for the disk.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from kvtier.errors import TierError
from kvtier.frame import PAGE
from kvtier.layout import KvSpec
from kvtier_daemon.tiers.cold.recovery import recover
from kvtier_daemon.tiers.cold.segment import (
    Head,
    described_bytes,
    encode_footer,
    first_frame,
    footer_bytes,
    rows_of_pages,
    space_bytes,
    split_rows,
)

KEEP_SIZE, PUNCH_HOLE = 1, 2  # FALLOC_FL_*
NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS)
ZEROS_BYTES = 1 << 20


def erase(
    path: Path, daemon_fd: int, head: Head | None, live: Mapping[int, int],
    described: Callable[[], Mapping[bytes, KvSpec]],
) -> None:  # fmt: skip
    """Keep only the head, the tombstones, the `live` frames (first page, and number of pages) and a footer
    that lists them; without a head, keep nothing. `daemon_fd` is the descriptor that the daemon uses. Raises
    OSError or TierError; then some bytes may not be erased."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if not os.path.sameopenfile(fd, daemon_fd):
            raise TierError(f"{path} was replaced by another file since the daemon opened it")
        keep = [(page * PAGE, (page + count) * PAGE) for page, count in sorted(live.items())]
        nbytes = os.fstat(fd).st_size
        if head is not None:
            first = first_frame(head.nbytes)
            end = keep[-1][1] if keep else first
            footer = _write_footer(fd, path, head, live, end, described)
            keep = [(0, first), *keep, (footer, nbytes)]
        for at, until in _gaps(keep, nbytes):
            _zero(fd, at, until - at)
        os.fsync(fd)
    finally:
        os.close(fd)


def erase_all(path: Path) -> None:
    """Erase all bytes of a file that no daemon uses. Raises TierError."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            _zero(fd, 0, os.fstat(fd).st_size)
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise TierError(f"{path}: cannot be erased: {error.strerror}") from error


def _write_footer(
    fd: int, path: Path, head: Head, live: Mapping[int, int], end: int,
    described: Callable[[], Mapping[bytes, KvSpec]],
) -> int:  # fmt: skip
    """Write and sync a footer that lists only the live frames; return its offset. Its flag says that nothing
    may be added to the segment: a walk over its frames would end at the first erased one."""
    found = recover(path, head.owner, None)
    if not found.sealed:
        found = recover(path, head.owner, described())
    if found.head is None or found.head.epoch != head.epoch:
        raise TierError(f"{path}: its header is damaged ({found.remark})")
    spaces, rows = rows_of_pages(found.spaces, found.table, live.keys())
    size = footer_bytes(described_bytes(sum(map(space_bytes, spaces))), len(split_rows(rows)))
    if end + size > head.nbytes:
        # The segment has no footer and gets none: a start finds no frame behind an erased one.
        return head.nbytes
    at, text = encode_footer(head, spaces, rows, end, torn=True)
    _write(fd, at, text)
    os.fsync(fd)
    return at


def _gaps(keep: Iterable[tuple[int, int]], nbytes: int) -> Iterator[tuple[int, int]]:
    """Return the ranges of a file between these ranges, which are in ascending order."""
    at = 0
    for begin, end in keep:
        if begin > at:
            yield at, begin
        at = end
    if nbytes > at:
        yield at, nbytes


def _zero(fd: int, at: int, nbytes: int) -> None:
    """Make these bytes zeros: the file system frees their blocks, and allocates new ones, so that the file
    keeps its room. If it does not support that, write zeros."""
    if _fallocate(fd, PUNCH_HOLE | KEEP_SIZE, at, nbytes) == 0:
        with suppress(OSError):  # another program has taken the room: a later write fails
            os.posix_fallocate(fd, at, nbytes)
        return
    code = ctypes.get_errno()
    if code not in NOT_SUPPORTED:
        raise OSError(code, os.strerror(code))
    zeros = bytes(min(nbytes, ZEROS_BYTES))
    for done in range(0, nbytes, ZEROS_BYTES):
        _write(fd, at + done, zeros[: nbytes - done])


def _fallocate(fd: int, mode: int, at: int, nbytes: int) -> int:
    """Call fallocate of libc, which is not opened at import; return 0, or -1 and set the errno of ctypes."""
    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return int(call(fd, mode, at, nbytes))


def _write(fd: int, at: int, text: bytes) -> None:
    while text:
        count = os.pwrite(fd, text, at)
        at, text = at + count, text[count:]
