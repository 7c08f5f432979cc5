"""A directory of the cold tier: whose it is, its index, its segment files.

DIRECTORY/kvtier.lock              held by the daemon that uses it
          kvtier.id                16 random bytes: segments of another directory are not used in this one
          index/                   LMDB
          segments/TENANT/000017   4096-byte pages, see segment.py
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import logging
import os
from pathlib import Path

import msgspec

from kvtier.errors import TierError
from kvtier.layout import KvSpec
from kvtier_daemon.tiers.cold.access_log import AccessLog
from kvtier_daemon.tiers.cold.directory_lock import LOCK, SEGMENTS, claim, owner_of
from kvtier_daemon.tiers.cold.index import CLOSE_S, FIRST_MAP_BYTES, Change, Index
from kvtier_daemon.tiers.cold.index_process import Child, IndexProcess, lock
from kvtier_daemon.tiers.cold.ownership import distrust

log = logging.getLogger(__name__)

LOST = (
    "the next start will not find what is written now: restore the directory, or restart the daemon"
)
# What is not segments: lock, directories, and the index as far as it may grow.
INDEX_SHARE = 1 / 256
OTHER_BYTES = 1 << 20
OWNER_DOMAIN = b"kvtier.segments.2\0"
# What every call on a file system fails with that was shut down, or whose device is gone.
DEAD = (errno.EIO, errno.ESHUTDOWN, errno.ENODEV, errno.ENXIO, errno.ENOTCONN)


class ColdDirectory:
    """Holds the directory's lock for as long as it lives. Raises TierError where it can't be had."""

    def __init__(
        self,
        path: Path,
        size_bytes: int | None,
        child: Child | None = None,
        device: int | None = None,
        unwritten: Change | None = None,
    ) -> None:
        """`size_bytes` is what all in it may take; None for a reader. The process `child`
        opens the directory and its index; without one this process does. `device` is as for `claim`.
        `unwritten` is what an earlier index could not write."""
        self.path = path
        self.index_bytes, self.segments_bytes = shares_of(path, size_bytes)
        self.index: Index | IndexProcess
        folder = path / "index"
        # Who only looks may be root, and the directory the daemon's.
        owner = owner_of(path) if size_bytes is None else None
        self.uid = os.geteuid() if owner is None else owner
        with contextlib.ExitStack() as undo:
            if child is None:
                held = claim(path, os.getpid(), device, owner)
            else:
                undo.callback(child.close)
                held = lock(child, path, device)
            self._lock_fd, self._folder_fd, self.name = held
            for fd in held[:2]:
                undo.callback(os.close, fd)
            self.device = os.fstat(self._folder_fd).st_dev
            if child is None:
                self.index = Index(folder, self.index_bytes)
            else:
                self.index = IndexProcess(child, folder, self.index_bytes, self._lock_fd)
            undo.pop_all()
        for (table, key), value in (unwritten or {}).items():
            if value is None:
                self.index.drop(table, key)
            else:
                self.index.put(table, key, value)
        self.uses = AccessLog(self.index)

    def segment_path(self, tenant: str, number: int) -> Path:
        """What a segment file is called."""
        return self.path / SEGMENTS / tenant / f"{number:06d}"

    def remove(self, tenant: str) -> int:
        """All that this tenant has here; how many files can't be removed. Waits for the disk."""
        left = 0
        for path in self.files(tenant):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                log.error("cold: cannot remove %s: %s", path, error)
                left += 1
        return left

    def tenants(self) -> list[str]:
        """Who has segments here."""
        folder = self.path / SEGMENTS
        if not folder.is_dir():
            return []
        return sorted(path.name for path in folder.iterdir() if path.is_dir())

    def files(self, tenant: str) -> list[Path]:
        """The tenant's segment files, by number."""
        folder = self.path / SEGMENTS / tenant
        if not folder.is_dir():
            return []
        files = (path for path in folder.iterdir() if path.name.isdecimal())
        return sorted(path for path in files if not path.is_dir())

    def lacks_bytes(self) -> int:
        """How much of what its segments may take the file system has not. Waits for the disk."""
        found = os.statvfs(self.path)
        files = (path for tenant in self.tenants() for path in self.files(tenant))
        there = sum(path.stat().st_blocks * 512 for path in files)
        return max(0, self.segments_bytes - there - found.f_frsize * found.f_bavail)

    def owner(self, tenant: str, secret: bytes) -> bytes:
        """What the heads of this tenant's segments here say whose they are by. Segments of another
        secret, or copied from another directory, do not match it."""
        return hmac.digest(secret, OWNER_DOMAIN + self.name + tenant.encode(), "sha256")

    def read_index(self) -> None:
        """Learn from the index what was wanted. Waits for the disk."""
        self.uses.load()

    def make(self, path: Path, nbytes: int) -> int:
        """A descriptor of a new segment file that has all its blocks. Waits for the disk; leaves nothing
        behind where it fails."""
        # From the directory that is locked: its path may lead elsewhere by now.
        folder = self._folder_of(path.parent)
        try:
            fd = open_direct(path.name, os.O_CREAT | os.O_EXCL, folder)
            try:
                os.posix_fallocate(fd, 0, nbytes)
                os.fsync(fd)
                os.fsync(folder)
            except OSError:
                os.close(fd)
                os.unlink(path.name, dir_fd=folder)
                raise
        finally:
            os.close(folder)
        return fd

    def _folder_of(self, path: Path) -> int:
        """A descriptor of this folder of the directory, made if it has to be."""
        folder = os.dup(self._folder_fd)
        for name in path.relative_to(self.path).parts:
            above = folder
            try:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=above)
                folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=above)
            finally:
                os.close(above)
        return folder

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Waits for the disk; False if it doesn't let go: the directory stays locked."""
        closed = self.index.close(timeout_s)
        # A process that does not end has descriptors of its own.
        if closed or isinstance(self.index, IndexProcess):
            os.close(self._lock_fd)
            os.close(self._folder_fd)
        return closed

    @property
    def unwritten(self) -> Change:
        """What the index could not write before it was closed."""
        return self.index.unwritten if isinstance(self.index, IndexProcess) else {}

    def elsewhere(self) -> str:
        """What has become of the directory, if its path no longer leads to it. Raises OSError where its
        file system answers nothing but errors. Waits for the disk."""
        ours = os.fstat(self._folder_fd)
        try:
            there = self.path.stat()
            os.close(os.open(LOCK, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._folder_fd))
        except OSError as error:
            if error.errno in DEAD:
                raise
            return f"{self.path}: {error.strerror}; {LOST}"
        if (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino):
            return ""
        return f"{self.path} was replaced by another directory since the start; {LOST}"


def is_cold_directory(path: Path) -> bool:
    """Whether a daemon has used this directory. Makes nothing in it."""
    return (path / LOCK).is_file() and (path / "index").is_dir()


def space_key(tenant: str, identity: bytes) -> bytes:
    """How the index names a description."""
    return tenant.encode() + b"\0" + identity


def open_direct(path: Path | str, flags: int = 0, folder: int | None = None) -> int:
    """Open for reading and writing past the page cache, where the file system can."""
    flags |= os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return _ours(path, os.open(path, flags | os.O_DIRECT, 0o600, dir_fd=folder))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return _ours(path, os.open(path, flags & ~os.O_EXCL, 0o600, dir_fd=folder))


def _ours(path: Path | str, fd: int) -> int:
    """The same descriptor, unless another user has put the file there or has it too: PermissionError."""
    why, fix = distrust(Path(path), os.fstat(fd), file=True)
    if why:
        os.close(fd)
        raise PermissionError(errno.EPERM, f"{why}; run `{fix}`")
    return fd


def spaces_of(directory: ColdDirectory, tenant: str) -> dict[bytes, KvSpec]:
    """The spaces that the index describes."""
    start = tenant.encode() + b"\0"
    found = {}
    for key, text in directory.index.entries(b"spaces"):
        if key.startswith(start):
            # What can't be read is not known: its frames without a footer are misses.
            with contextlib.suppress(msgspec.MsgspecError, ValueError):  # text that is not UTF-8
                found[key[len(start) :]] = msgspec.msgpack.decode(text, type=KvSpec)
    return found


def shares_of(path: Path, size_bytes: int | None) -> tuple[int, int]:
    """What the index and the segments of a directory may take. Raises TierError where that is too little."""
    index_bytes = max(FIRST_MAP_BYTES, int((size_bytes or 0) * INDEX_SHARE))
    segments_bytes = (size_bytes or 0) - index_bytes - OTHER_BYTES
    if size_bytes is not None and segments_bytes < size_bytes // 2:
        least = 2 * (FIRST_MAP_BYTES + OTHER_BYTES)
        raise TierError(
            f"cold: {path}: its part of cold.size is {size_bytes} bytes, at "
            f"least {least} are needed"
        )
    return index_bytes, segments_bytes
