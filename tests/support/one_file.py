"""A FUSE file system that consists of one file, for tests that answer the kernel's requests themselves.

A flush arrives as a request, whether a system call or io_uring made it; writeback without a flush does not.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct
from pathlib import Path

IN = struct.Struct("<IIQQIIIHH")  # length, opcode, unique, node, uid, gid, pid, extensions, padding
OUT = struct.Struct("<IiQ")  # length, error, unique
INIT_OUT = struct.Struct("<IIIIHHIIHHI28x")
ATTR_OUT = struct.Struct("<QII QQQ QQQ III IIIIII I")
AT = struct.Struct("<QQI")  # descriptor, offset, size: the start of a read or a write
WRITE_HEAD, SETATTR_SIZE = 40, struct.Struct("<IIQQ")
FORGET, GETATTR, SETATTR, OPEN, READ, WRITE, RELEASE, FSYNC, FLUSH = 2, 3, 4, 14, 15, 16, 18, 20, 25
INIT, INTERRUPT = 26, 36
ASYNC_READ, BIG_WRITES, ASYNC_DIRECT, MAX_PAGES = 1, 1 << 5, 1 << 15, 1 << 22
WITH_SIZE = 1 << 3
DIRECT_IO, PARALLEL_WRITES = 1, 1 << 6  # of an open file
MOST_BYTES = 1 << 20
MS_NOSUID, MS_NODEV, MNT_DETACH = 2, 4, 2


class NoMount(Exception):  # noqa: N818
    """This machine does not allow such a mount; the text is the reason."""


class OneFile:
    """The file `path`, from the constructor until `unmount`. Subclasses implement `size`, `resize`, `read`,
    `write` and `flush`; their errors are OSError. Nothing is kept in the page cache. `fence` makes all
    requests fail that come through descriptors from before."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = 1
        if os.geteuid() or not os.access("/dev/fuse", os.R_OK | os.W_OK):
            raise NoMount("needs root and /dev/fuse, to mount a file system of its own")
        path.touch()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        data = f"fd={self.fd},rootmode={stat.S_IFREG:o},user_id=0,group_id=0".encode()
        place = os.fsencode(path)
        if self._libc.mount(b"kvtier-test", place, b"fuse", MS_NOSUID | MS_NODEV, data):
            os.close(self.fd)
            raise NoMount(f"a FUSE file system can't be mounted: {os.strerror(ctypes.get_errno())}")

    def unmount(self) -> None:
        self._libc.umount2(os.fsencode(self.path), MNT_DETACH)

    def fence(self) -> None:
        self._descriptor += 1

    # --- the file ----------------------------------------------------------------------------

    @property
    def size(self) -> int:
        raise NotImplementedError

    def resize(self, size: int) -> None:
        raise OSError(errno.EPERM, "its size is fixed")

    def read(self, at: int, size: int) -> bytes:
        raise NotImplementedError

    def write(self, unique: int, at: int, data: memoryview) -> bool:
        """Write these bytes. False: `wrote` is called later."""
        raise NotImplementedError

    def flush(self) -> None:
        raise NotImplementedError

    # --- requests ----------------------------------------------------------------------------

    def serve(self) -> bool:
        """Wait for a request and answer it. False if the file was unmounted."""
        try:
            text = os.read(self.fd, MOST_BYTES + (1 << 16))
        except OSError as error:
            return error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN)
        _, opcode, unique, *_ = IN.unpack_from(text)
        if opcode in (FORGET, INTERRUPT):
            return True
        try:
            body = self._answer(opcode, unique, memoryview(text)[IN.size :])
        except OSError as error:
            self.answer(unique, b"", error.errno or errno.EIO)
        else:
            if body is not None:
                self.answer(unique, body)
        return True

    def wrote(self, unique: int, size: int, code: int = 0) -> None:
        """Answer a write."""
        self.answer(unique, b"" if code else struct.pack("<II", size, 0), code)

    def answer(self, unique: int, body: bytes, code: int = 0) -> None:
        with contextlib.suppress(FileNotFoundError):  # the caller was interrupted
            os.write(self.fd, OUT.pack(OUT.size + len(body), -code, unique) + body)

    def _answer(self, opcode: int, unique: int, body: memoryview) -> bytes | None:
        if opcode == INIT:
            flags = ASYNC_READ | BIG_WRITES | ASYNC_DIRECT | MAX_PAGES
            return INIT_OUT.pack(7, 31, 0, flags, 64, 48, MOST_BYTES, 1, MOST_BYTES >> 12, 0, 0)
        if opcode == SETATTR:
            valid, _, _, size = SETATTR_SIZE.unpack_from(body)
            if valid & WITH_SIZE:
                self.resize(size)
        if opcode in (GETATTR, SETATTR):
            size, mode = self.size, stat.S_IFREG | 0o600
            return ATTR_OUT.pack(
                0, 0, 0, 1, size, -(-size // 512), 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0
            )
        if opcode == OPEN:
            return struct.pack("<QII", self._descriptor, DIRECT_IO | PARALLEL_WRITES, 0)
        if opcode in (READ, WRITE, FSYNC):
            descriptor, at, size = AT.unpack_from(bytes(body[: AT.size]).ljust(AT.size))
            if descriptor != self._descriptor:
                raise OSError(errno.EIO, "opened before the fence")
        if opcode == READ:
            return self.read(at, size)
        if opcode == WRITE:
            if self.write(unique, at, body[WRITE_HEAD : WRITE_HEAD + size]):
                self.wrote(unique, size)
            return None
        if opcode == FSYNC:
            self.flush()
        elif opcode not in (RELEASE, FLUSH):
            raise OSError(errno.ENOSYS, "not implemented")
        return b""
