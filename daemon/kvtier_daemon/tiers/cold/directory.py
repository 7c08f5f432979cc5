"""A directory of the cold tier: its lock, its index, its segment files.

DIRECTORY/kvtier.lock              held by the daemon that uses it
          kvtier.id                16 random bytes: segments of another directory are not used in this one
          kvtier.forgets           see forget_count.py
          index/                   LMDB
          segments/TENANT/000017   4096-byte pages, see segment.py
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import logging
import mmap
import os
import re
from pathlib import Path

import msgspec

from kvtier.errors import TierError
from kvtier.layout import KvSpec
from kvtier_daemon.tiers.cold.access_log import AccessLog
from kvtier_daemon.tiers.cold.directory_lock import (
    LOCK,
    SEGMENTS,
    claim,
    distrust,
    opened_path,
    owner_of,
    rename,
)
from kvtier_daemon.tiers.cold.forget_count import ForgetCount
from kvtier_daemon.tiers.cold.index import CLOSE_S, FIRST_MAP_BYTES, Change, Index
from kvtier_daemon.tiers.cold.index_process import Child, IndexProcess, lock

log = logging.getLogger(__name__)

LOST = (
    "the next start will not find what is written now: restore the directory, or restart the daemon"
)
# Bytes that are not for segments: the index at its largest, the lock, and directories.
INDEX_SHARE = 1 / 256
OTHER_BYTES = 1 << 20
ZEROS_BYTES = 1 << 20
NAME = re.compile("[0-9]{6,9}")  # of a segment, and not of a copy of one, such as 20260504101112
OWNER_DOMAIN = b"kvtier.segments.2\0"
# Errors of all calls on a file system that was shut down, or whose device is gone.
DEAD = (errno.EIO, errno.ESHUTDOWN, errno.ENODEV, errno.ENXIO, errno.ENOTCONN)


class ColdDirectory:
    """Holds the lock of the directory until `close`. Its files are reached through one descriptor of the
    directory: `path` may lead to another directory since, which a mount or a rename has put there."""

    def __init__(
        self, path: Path, size_bytes: int | None, child: Child | None = None, device: int | None = None,
        unwritten: Change | None = None,
    ) -> None:  # fmt: skip
        """`size_bytes` is the limit for all files; None for a reader. The process `child` opens the directory
        and its index; without one this process does. `device` is that of `claim`. `unwritten` has changes
        that an earlier index could not write. Raises TierError."""
        self.path = path
        self.index_bytes, self.segments_bytes = shares_of(path, size_bytes)
        self.index: Index | IndexProcess
        folder = path / "index"
        # A reader may be root, while the directory belongs to the daemon's user.
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
                self.index = Index(folder, self.index_bytes, self.opened(folder))
            else:
                self.index = IndexProcess(child, folder, self.index_bytes, held[:2])
            undo.callback(self.index.close)
            try:
                is_elsewhere = self._is_elsewhere()
            except OSError as error:
                raise TierError(f"cold: cannot use {path}: {error.strerror}") from error
            if is_elsewhere:
                text = f"cold: {path} was replaced by another directory while it was opened"
                raise TierError(text)
            undo.pop_all()
        for (table, key), value in (unwritten or {}).items():
            if value is None:
                self.index.drop(table, key)
            else:
                self.index.put(table, key, value)
        self.access_log = AccessLog(self.index)
        self.forgets: ForgetCount | None = None  # before `refuse_older`, and in tools
        self.older = ""  # how `refuse_older` found that this was an older copy

    def opened(self, path: Path) -> Path:
        """Return a path that leads to this file of the directory as long as the directory is open."""
        # A start calls this for each file: `relative_to` takes ten times as long.
        within, name = f"{self.path}/", str(path)
        if not name.startswith(within):
            raise ValueError(f"{path} is not in {self.path}")
        return Path(f"{opened_path(self._folder_fd)}/{name[len(within) :]}")

    def open(self, path: Path, flags: int = 0) -> int:
        """Open a file of the directory as `open_direct` does."""
        return open_direct(path, flags, opened=self.opened(path))

    def segment_path(self, tenant: str, number: int) -> Path:
        return self.path / SEGMENTS / tenant / f"{number:06d}"

    def remove(self, tenant: str) -> int:
        """Remove the tenant's files; return how many cannot be removed. Waits for the disk."""
        left = 0
        for path in self.files(tenant):
            try:
                self.opened(path).unlink(missing_ok=True)
            except OSError as error:
                log.error("cold: cannot remove %s: %s", path, error)
                left += 1
        return left

    def tenants(self) -> list[str]:
        """Return the tenants that have a folder here."""
        return sorted(one.name for one in self._entries(self.path / SEGMENTS) if one.is_dir())

    def files(self, tenant: str) -> list[Path]:
        """Return the tenant's segment files in the order of their numbers."""
        folder = self.path / SEGMENTS / tenant
        entries = self._entries(folder)
        names = [one.name for one in entries if NAME.fullmatch(one.name) and not one.is_dir()]
        return [folder / name for name in sorted(names)]

    def _entries(self, folder: Path) -> list[os.DirEntry[str]]:
        """What this folder has, if it exists."""
        try:
            with os.scandir(self.opened(folder)) as found:
                return list(found)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def lacks_bytes(self) -> int:
        """Return how many bytes the file system lacks for the segments. Waits for the disk."""
        found = os.statvfs(self._folder_fd)
        files = (path for tenant in self.tenants() for path in self.files(tenant))
        used = sum(self.opened(path).stat().st_blocks * 512 for path in files)
        return max(0, self.segments_bytes - used - found.f_frsize * found.f_bavail)

    def owner(self, tenant: str, secret: bytes) -> bytes:
        """Return the owner in the heads of this tenant's segments. Segments that were written under another
        secret, or copied from another directory, have another one."""
        return hmac.digest(secret, OWNER_DOMAIN + self.name + tenant.encode(), "sha256")

    def refuse_older(self, state: Path) -> None:
        """Remove all segments if this is an older copy of itself. Waits for the disk. Raises TierError."""
        opened = opened_path(self._folder_fd)
        try:
            self.forgets = ForgetCount(self.path, opened, self.name, state)
            if self.forgets.is_older:
                # First: after a kill, the remaining segments belong to another directory.
                self.name = rename(self._folder_fd, self.path)
                removed = sum(len(self.files(tenant)) for tenant in self.tenants())
                removed -= sum(self.remove(tenant) for tenant in self.tenants())
                self.older = (
                    f"{self.path} was replaced by an older copy of itself, with {self.forgets.rounds} "
                    f"of {self.forgets.seen} rounds of forgets: removed its {removed} segments, "
                    "because forgotten blocks would return"
                )
                log.error("cold: %s", self.older)
                self.forgets = ForgetCount(self.path, opened, self.name, state)
        except OSError as error:
            text = f"cannot read {error.filename}: {error.strerror}"
            raise TierError(f"cold: cannot use {self.path}: {text}") from error
        self.forgets.advance(0)

    def read_index(self) -> None:
        """Load the access log. Waits for the disk."""
        self.access_log.load()

    def make(self, path: Path, nbytes: int) -> int:
        """Create and allocate a segment file; return its descriptor. Waits; a failure leaves no file."""
        # In the directory that is locked: its path may have been replaced since.
        folder = self._folder_of(path.parent)
        try:
            fd = open_direct(path.name, os.O_CREAT | os.O_EXCL, folder)
            try:
                _allocate(fd, nbytes)
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
        """Return a descriptor of this folder of the directory; create the folder if necessary."""
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
        """Close the index and release the lock. Waits for the disk; False, and still locked, if it hangs."""
        closed = self.index.close(timeout_s)
        # The child process has its own descriptors.
        if closed or isinstance(self.index, IndexProcess):
            os.close(self._lock_fd)
            os.close(self._folder_fd)
        return closed

    @property
    def not_counted(self) -> str:
        """Return why the last forgets were not counted, or an empty text."""
        return self.forgets.failure if self.forgets is not None else ""

    @property
    def unwritten(self) -> Change:
        return self.index.unwritten if isinstance(self.index, IndexProcess) else {}

    def elsewhere(self) -> str:
        """Return why the path no longer leads to the directory, or an empty text. Raises OSError if its file
        system has failed. Waits for the disk."""
        try:
            is_elsewhere = self._is_elsewhere()
            os.close(os.open(LOCK, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._folder_fd))
        except OSError as error:
            if error.errno in DEAD:
                raise
            return f"{self.path}: {error.strerror}; {LOST}"
        if not is_elsewhere:
            return ""
        return f"{self.path} was replaced by another directory since the start; {LOST}"

    def _is_elsewhere(self) -> bool:
        return not os.path.samestat(self.path.stat(), os.fstat(self._folder_fd))


def is_cold_directory(path: Path) -> bool:
    """Whether a daemon has used this directory. Creates nothing in it."""
    return (path / LOCK).is_file() and (path / "index").is_dir()


def space_key(tenant: str, identity: bytes) -> bytes:
    return tenant.encode() + b"\0" + identity


def open_direct(
    path: Path | str, flags: int = 0, folder: int | None = None, opened: Path | None = None
) -> int:
    """Open for reading and writing, without the page cache if the file system permits that. Raises
    PermissionError if another user created the file or can access it. `opened` is where the file is opened,
    if `path` only names it in messages."""
    flags |= os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    at = opened or path
    try:
        return _trusted(path, os.open(at, flags | os.O_DIRECT, 0o600, dir_fd=folder))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return _trusted(path, os.open(at, flags & ~os.O_EXCL, 0o600, dir_fd=folder))


def _allocate(fd: int, nbytes: int) -> None:
    """Give an empty file its room. Where the file system cannot, as ext3 and NFS before 4.2, write zeros:
    libc would write single bytes instead, which O_DIRECT refuses. Raises OSError."""
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        with mmap.mmap(-1, min(nbytes, ZEROS_BYTES)) as zeros:  # O_DIRECT needs whole pages
            at = 0
            while at < nbytes:
                at += os.pwrite(fd, memoryview(zeros)[: nbytes - at], at)


def _trusted(path: Path | str, fd: int) -> int:
    why, fix = distrust(Path(path), os.fstat(fd), file=True)
    if why:
        os.close(fd)
        raise PermissionError(errno.EPERM, f"{why}; run `{fix}`")
    return fd


def spaces_of(directory: ColdDirectory, tenant: str) -> dict[bytes, KvSpec]:
    """Return the tenant's spaces that the index describes."""
    start = tenant.encode() + b"\0"
    found = {}
    for key, text in directory.index.entries(b"spaces"):
        if key.startswith(start):
            # Without the description, the space's frames in a segment without a footer are misses.
            with contextlib.suppress(msgspec.MsgspecError, ValueError):  # text that is not UTF-8
                found[key[len(start) :]] = msgspec.msgpack.decode(text, type=KvSpec)
    return found


def shares_of(path: Path, size_bytes: int | None) -> tuple[int, int]:
    """Return the bytes for the index and for the segments. Raises TierError if they are too few."""
    index_bytes = max(FIRST_MAP_BYTES, int((size_bytes or 0) * INDEX_SHARE))
    segments_bytes = (size_bytes or 0) - index_bytes - OTHER_BYTES
    if size_bytes is not None and segments_bytes < size_bytes // 2:
        least = 2 * (FIRST_MAP_BYTES + OTHER_BYTES)
        raise TierError(
            f"cold: {path}: its part of cold.size is {size_bytes} bytes, at "
            f"least {least} are needed"
        )
    return index_bytes, segments_bytes
