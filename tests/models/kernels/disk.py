"""The disk worker as plain calls: an operation completes during its submission."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable
from typing import Any

from models.kernels.xxh3 import xxh3_128

# token, fd, flags, file offset, nbytes, extent, deadline in ms, memory offset, digest or position
# of the header
OPERATION = struct.Struct("<QiIQQIIQ16s")
_HEADER = struct.Struct("<QQ")
URGENT, DIGEST = 1, 2
PAGE = 4096


class Disk:
    """Performs each operation at once, in the given order, and keeps its result for `done`. Has no
    queue, so neither priorities nor deadlines."""

    def __init__(self, digest: Any = xxh3_128) -> None:
        self._extents: list[memoryview] = []
        self._done: list[tuple[int, int, bytes | None]] = []
        self._failed: dict[int, int] = {}
        self._digest = digest

    def register(self, memory: Any) -> int:
        self._extents.append(memoryview(memory))
        return len(self._extents) - 1

    def read(self, ops: bytes) -> None:
        for token, fd, flags, offset, nbytes, memory, digest in self._checked(ops):
            error = self._try(self._read, fd, offset, nbytes, memory)
            if not error and flags & DIGEST and self._digest(memory[:nbytes]) != digest:
                error = errno.EBADMSG
            self._done.append((token, error, None))

    def write(self, ops: bytes, headers: bytes = b"") -> None:
        checked = self._checked(ops)
        for *_, place in checked:
            at, nbytes = _HEADER.unpack(place)
            if at + nbytes > len(headers):
                raise IndexError("a header is not in the headers")
        for token, fd, flags, offset, nbytes, memory, place in checked:
            at, header_bytes = _HEADER.unpack(place)
            header = headers[at : at + header_bytes].ljust(_whole_pages(header_bytes), b"\0")
            record = header + bytes(memory)
            error = self._try(self._write, fd, offset, record)
            if error:
                self._failed.setdefault(fd, error)
            made = None if error or not flags & DIGEST else self._digest(memory[:nbytes])
            self._done.append((token, error, made))

    def sync(self, token: int, fd: int) -> None:
        error = self._try(os.fdatasync, fd)
        self._done.append((token, self._failed.pop(fd, 0) or error, None))

    def read_bytes(self, token: int, fd: int, offset: int, nbytes: int) -> None:
        found = bytearray(nbytes)
        error = self._try(self._read, fd, offset, nbytes, memoryview(found))
        self._done.append((token, error, None if error else bytes(found)))

    def done(self) -> list[tuple[int, int, bytes | None]]:
        found, self._done = self._done, []
        return found

    def _checked(self, ops: bytes) -> list[tuple[Any, ...]]:
        found = []
        for token, fd, flags, offset, nbytes, extent, _, at, rest in OPERATION.iter_unpack(ops):
            memory = self._extents[extent]
            end = at + _whole_pages(nbytes)
            if end > len(memory):
                raise IndexError(f"{nbytes} bytes at {at} of an extent of {len(memory)}")
            if not nbytes or at % PAGE or offset % PAGE:
                raise ValueError("no bytes, or not whole pages")
            found.append((token, fd, flags, offset, nbytes, memory[at:end], rest))
        return found

    @staticmethod
    def _try(call: Callable[..., None], *given: Any) -> int:
        try:
            call(*given)
        except OSError as error:
            return error.errno or errno.EIO
        return 0

    @staticmethod
    def _read(fd: int, offset: int, nbytes: int, memory: memoryview) -> None:
        moved = 0
        while moved < nbytes:
            count = os.preadv(fd, [memory[moved:]], offset + moved)
            if count == 0:
                raise OSError(errno.ENODATA, "the file ends before")
            moved += count

    @staticmethod
    def _write(fd: int, offset: int, record: bytes) -> None:
        moved = 0
        while moved < len(record):
            moved += os.pwritev(fd, [record[moved:]], offset + moved)


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
