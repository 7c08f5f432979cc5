"""One file on its own FUSE file system, which records the kernel's requests.

A flush arrives as a request, whether a system call or io_uring made it; writeback without a flush does not.
Other files of the process are not recorded.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

IN = struct.Struct("<IIQQIIIHH")  # length, opcode, unique, node, uid, gid, pid, extensions, padding
OUT = struct.Struct("<IiQ")  # length, error, unique
INIT_OUT = struct.Struct("<IIIIHHIIHHI28x")
ATTR_OUT = struct.Struct("<QII QQQ QQQ III IIIIII I")
AT = struct.Struct("<QQI")  # descriptor, offset, size: the start of a read or a write
WRITE_HEAD, SETATTR_SIZE = 40, struct.Struct("<IIQQ")
FORGET, GETATTR, SETATTR, OPEN, READ, WRITE, RELEASE, FSYNC, FLUSH = 2, 3, 4, 14, 15, 16, 18, 20, 25
INIT, INTERRUPT = 26, 36
BIG_WRITES, MAX_PAGES, DIRECT_IO, WITH_SIZE = 1 << 5, 1 << 22, 1, 1 << 3
MOST_BYTES = 1 << 20
MS_NOSUID, MS_NODEV, MNT_DETACH = 2, 4, 2


class Noted:
    """`requests` has writes (offset, bytes) and flushes in order; `flush_error` answers the next flushes."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.text = bytearray()
        self.requests: list[str | tuple[int, int]] = []
        self.flush_error = 0
        self._fd = fd
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        while True:
            try:
                text = os.read(self._fd, MOST_BYTES + (1 << 16))
            except OSError as error:
                if error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                    continue
                return  # it was unmounted
            _, opcode, unique, *_ = IN.unpack_from(text)
            if opcode in (FORGET, INTERRUPT):
                continue
            code, answer = self._answer(opcode, memoryview(text)[IN.size :])
            with contextlib.suppress(FileNotFoundError):  # the caller was interrupted
                os.write(self._fd, OUT.pack(OUT.size + len(answer), -code, unique) + answer)

    def _answer(self, opcode: int, body: memoryview) -> tuple[int, bytes]:
        if opcode == INIT:
            flags = BIG_WRITES | MAX_PAGES
            return 0, INIT_OUT.pack(7, 31, 0, flags, 16, 12, MOST_BYTES, 1, MOST_BYTES >> 12, 0, 0)
        if opcode == SETATTR:
            valid, _, _, size = SETATTR_SIZE.unpack_from(body)
            if valid & WITH_SIZE:
                self._resize(size)
        if opcode in (GETATTR, SETATTR):
            size, mode = len(self.text), stat.S_IFREG | 0o600
            return 0, ATTR_OUT.pack(
                0, 0, 0, 1, size, -(-size // 512), 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0
            )
        if opcode == OPEN:
            return 0, struct.pack("<QII", 1, DIRECT_IO, 0)
        if opcode == READ:
            _, at, size = AT.unpack_from(body)
            return 0, bytes(self.text[at : at + size])
        if opcode == WRITE:
            _, at, size = AT.unpack_from(body)
            self._resize(max(len(self.text), at + size))
            self.text[at : at + size] = body[WRITE_HEAD : WRITE_HEAD + size]
            self.requests.append((at, size))
            return 0, struct.pack("<II", size, 0)
        if opcode == FSYNC:
            self.requests.append("flush")
            return self.flush_error, b""
        return (0, b"") if opcode in (RELEASE, FLUSH) else (errno.ENOSYS, b"")

    def _resize(self, size: int) -> None:
        self.text = self.text[:size].ljust(size, b"\0")


@contextlib.contextmanager
def noted(folder: Path) -> Iterator[Noted]:
    path = folder / "noted"
    path.touch()
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("needs root and /dev/fuse, to mount a file system of its own")
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    data = f"fd={fd},rootmode={stat.S_IFREG:o},user_id=0,group_id=0".encode()
    if libc.mount(b"kvtier-noted", os.fsencode(path), b"fuse", MS_NOSUID | MS_NODEV, data):
        why = os.strerror(ctypes.get_errno())
        os.close(fd)
        pytest.skip(f"a FUSE file system can't be mounted: {why}")
    file = Noted(path, fd)
    try:
        yield file
    finally:
        libc.umount2(os.fsencode(path), MNT_DETACH)
        file.join()
        os.close(fd)
