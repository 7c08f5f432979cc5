"""A directory of the cold tier: whose it is, its index, its segment files.

DIRECTORY/kvtier.lock              held by the daemon that uses it
          kvtier.id                16 random bytes: segments of another directory are not used in this one
          index/                   LMDB
          segments/TENANT/000017   4096-byte pages, see segment.py
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import logging
import os
from pathlib import Path

import msgspec

from kvtier.errors import TierError
from kvtier.layout import KvSpec
from kvtier_daemon.claim import InUseError
from kvtier_daemon.index import CLOSE_S, FIRST_MAP_BYTES, Change, Index
from kvtier_daemon.index_process import Child, IndexProcess, lock
from kvtier_daemon.owned import distrust, distrust_cold
from kvtier_daemon.tiers.use import Uses

log = logging.getLogger(__name__)

LOCK = "kvtier.lock"
LOST = "what is written is not found by the next start: put it back, or restart"
SEGMENTS = "segments"
# What is not segments: lock, directories, and the index as far as it may grow.
INDEX_SHARE = 1 / 256
OTHER_BYTES = 1 << 20
NAME = "kvtier.id"
NAME_BYTES = 16
OWNER_DOMAIN = b"kvtier.segments.2\0"
# What every call on a file system fails with that was shut down, or whose device is gone.
DEAD = (errno.EIO, errno.ESHUTDOWN, errno.ENODEV, errno.ENXIO, errno.ENOTCONN)


class Volume:
    """Holds the directory's lock for as long as it lives. Raises TierError where it can't be had."""

    def __init__(
        self,
        directory: Path,
        size_bytes: int | None,
        child: Child | None = None,
        device: int | None = None,
        unwritten: Change | None = None,
    ) -> None:
        """`size_bytes` is what all in it may take; None for a reader. The process `child`
        opens the directory and its index; without one this process does. `device` is as for `claim`.
        `unwritten` is what an earlier index could not write."""
        self.directory = directory
        self.index_bytes, self.segments_bytes = shares_of(directory, size_bytes)
        self.index: Index | IndexProcess
        folder = directory / "index"
        # Who only looks may be root, and the directory the daemon's.
        owner = _owner(directory) if size_bytes is None else None
        self.uid = os.geteuid() if owner is None else owner
        with contextlib.ExitStack() as undo:
            if child is None:
                held = claim(directory, os.getpid(), device, owner)
            else:
                undo.callback(child.close)
                held = lock(child, directory, device)
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
        self.uses = Uses(self.index)

    def segment_path(self, tenant: str, number: int) -> Path:
        """What a segment file is called."""
        return self.directory / SEGMENTS / tenant / f"{number:06d}"

    def remove(self, tenant: str) -> int:
        """All that this tenant has here; how many files can't be removed. Waits for the disk."""
        left = 0
        for path in self.files(tenant):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                log.error("cold: %s can't be removed: %s", path, error)
                left += 1
        return left

    def tenants(self) -> list[str]:
        """Who has segments here."""
        folder = self.directory / SEGMENTS
        if not folder.is_dir():
            return []
        return sorted(path.name for path in folder.iterdir() if path.is_dir())

    def files(self, tenant: str) -> list[Path]:
        """The tenant's segment files, by number."""
        folder = self.directory / SEGMENTS / tenant
        if not folder.is_dir():
            return []
        files = (path for path in folder.iterdir() if path.name.isdecimal())
        return sorted(path for path in files if not path.is_dir())

    def lacks_bytes(self) -> int:
        """How much of what its segments may take the file system has not. Waits for the disk."""
        found = os.statvfs(self.directory)
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
        for name in path.relative_to(self.directory).parts:
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
            there = self.directory.stat()
            os.close(os.open(LOCK, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._folder_fd))
        except OSError as error:
            if error.errno in DEAD:
                raise
            return f"{self.directory}: {error.strerror}; {LOST}"
        if (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino):
            return ""
        return f"{self.directory} is another directory than at the start; {LOST}"


def is_volume(directory: Path) -> bool:
    """Whether a daemon has used this directory. Makes nothing in it."""
    return (directory / LOCK).is_file() and (directory / "index").is_dir()


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


def spaces_of(volume: Volume, tenant: str) -> dict[bytes, KvSpec]:
    """The spaces that the index describes."""
    start = tenant.encode() + b"\0"
    found = {}
    for key, text in volume.index.entries(b"spaces"):
        if key.startswith(start):
            # What can't be read is not known: its frames without a footer are misses.
            with contextlib.suppress(msgspec.MsgspecError, ValueError):  # text that is not UTF-8
                found[key[len(start) :]] = msgspec.msgpack.decode(text, type=KvSpec)
    return found


def _owner(directory: Path) -> int:
    try:
        return directory.stat().st_uid
    except OSError as error:
        raise TierError(f"cold: {directory} can't be used: {error.strerror}") from error


def _refuse_others(directory: Path, uid: int) -> None:
    """Raises TierError where another user could have put something into the directory."""
    why, fix = distrust_cold(directory, uid)
    if why:
        raise TierError(
            f"cold: {why}, so a segment may be another's; run `{fix}`, or name another directory"
        )


def _named(folder: int, directory: Path) -> bytes:
    """The random name of this directory, made at its first use and then on disk for good."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(NAME, os.O_RDONLY | flags, dir_fd=folder)
            with os.fdopen(fd, "rb") as file:
                name = file.read(NAME_BYTES + 1)
            if len(name) == NAME_BYTES:
                return name
            log.error(
                "cold: %s is damaged: a new one is made, and no segment counts", directory / NAME
            )
        name, new = os.urandom(NAME_BYTES), f"{NAME}.new"
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags, 0o600, dir_fd=folder)
        with os.fdopen(fd, "wb") as file:
            file.write(name)
            file.flush()
            os.fsync(fd)
        os.rename(new, NAME, src_dir_fd=folder, dst_dir_fd=folder)
        os.fsync(folder)
    except OSError as error:
        raise TierError(f"cold: {directory / NAME} can't be used: {error.strerror}") from error
    return name


def shares_of(directory: Path, size_bytes: int | None) -> tuple[int, int]:
    """What the index and the segments of a directory may take. Raises TierError where that is too little."""
    index_bytes = max(FIRST_MAP_BYTES, int((size_bytes or 0) * INDEX_SHARE))
    segments_bytes = (size_bytes or 0) - index_bytes - OTHER_BYTES
    if size_bytes is not None and segments_bytes < size_bytes // 2:
        least = 2 * (FIRST_MAP_BYTES + OTHER_BYTES)
        raise TierError(f"cold: {directory}: {size_bytes} bytes, and at least {least} are needed")
    return index_bytes, segments_bytes


def claim(
    directory: Path, pid: int, device: int | None = None, owner: int | None = None
) -> tuple[int, int, bytes]:
    """Lock the directory for the daemon `pid`; returns descriptors of the lock and of the directory, and the
    directory's name. With an `owner`, of whom the directory has to be, nothing is made and the name is empty.
    Where a `device` is given and the directory is on another one, it has to be a mount point: else its disk
    is not mounted."""
    fd, folder = _locked(directory, pid, device, os.geteuid() if owner is None else owner)
    try:
        name = _named(folder, directory) if owner is None else b""
        _tell_of_no_index(directory)
    except BaseException:
        os.close(fd)
        os.close(folder)
        raise
    return fd, folder, name


def _tell_of_no_index(directory: Path) -> None:
    segments = (directory / SEGMENTS).glob("*/[0-9]*")
    if not (directory / "index" / "data.mdb").exists() and any(segments):
        log.warning(
            "cold: %s has segments and no index: a new index is begun; forgotten blocks stay forgotten, the"
            " order of eviction and blocks in open segments may be lost", directory,
        )  # fmt: skip


def _locked(directory: Path, pid: int, device: int | None, uid: int) -> tuple[int, int]:
    with contextlib.ExitStack() as undo:
        try:
            if device not in (None, directory.stat().st_dev) and not directory.is_mount():
                raise TierError(
                    f"cold: {directory} is on another file system than before: mount the disk; or"
                    " `kvtier tier off cold` and `kvtier tier on cold`, to use it as it is"
                )
            folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            undo.callback(os.close, folder)
            _refuse_others(directory, uid)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(LOCK, flags, 0o600, dir_fd=folder)
            undo.callback(os.close, fd)
        except OSError as error:
            remedy = f"make it a directory that uid {os.geteuid()} may write to"
            text = f"cold: {directory} can't be used: {error.strerror}; {remedy}"
            raise TierError(text) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(fd, 20, 0).decode(errors="replace").strip()
            text = f"cold: {directory} is used by another daemon, pid {owner}"
            raise InUseError(text, int(owner) if owner.isdecimal() else 0) from error
        except OSError as error:
            text = f"cold: {directory / LOCK} can't be locked: {error.strerror}"
            raise TierError(text) from error
        name = f"{pid}\n".encode()
        try:
            os.pwrite(fd, name, 0)
            os.truncate(fd, len(name))
        except OSError as error:  # it is for others to read: a full disk is no reason not to start
            log.warning("cold: %s can't be written: %s", directory / LOCK, error.strerror)
        undo.pop_all()
    return fd, folder
