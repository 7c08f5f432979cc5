"""Locks a directory of the cold tier, so that only one daemon uses it. Refuses a directory to which another
user could have written.

The process that opens the index calls this; see index_child.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
from pathlib import Path

from kvtier.errors import TierError
from kvtier_daemon.claim import InUseError

log = logging.getLogger(__name__)

LOCK = "kvtier.lock"
NAME = "kvtier.id"
NAME_BYTES = 16
FORGETS = "kvtier.forgets"
SEGMENTS = "segments"
OWN = "kvtier"  # a directory in a shared one
FILES = (LOCK, NAME, FORGETS, "index/data.mdb", "index/lock.mdb")


def distrust(
    path: Path, found: os.stat_result, *, file: bool = False, uid: int | None = None
) -> tuple[str, str]:
    """Return why a user other than root and `uid` (by default that of the process) could have written to a
    directory or file, and the command that prevents it; two empty texts if no other user could."""
    if not (stat.S_ISREG(found.st_mode) if file else stat.S_ISDIR(found.st_mode)):
        return f"{path}: is not a {'regular file' if file else 'directory'}", f"rm {path}"
    uid, mode = os.geteuid() if uid is None else uid, stat.S_IMODE(found.st_mode)
    if found.st_uid not in (0, uid):
        value = f"{path}: belongs to uid {found.st_uid} and not to the daemon's {uid} or root"
        return value, f"chown {uid} {path}"
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path}: has mode {mode:04o}: others can write to it", f"chmod go-w {path}"
    if file and found.st_nlink > 1:
        return f"{path}: has {found.st_nlink} hard links: other users may have access", f"rm {path}"
    return "", ""


def opened_path(fd: int) -> Path:
    """Return a path that leads to this directory as long as it is open, whatever is renamed or mounted."""
    return Path(f"/proc/self/fd/{fd}")


def distrust_cold(
    directory: Path, uid: int | None = None, opened: Path | None = None
) -> tuple[str, str]:
    """Check a cold directory, its folders, and its files except segments, as `distrust` does. Missing files
    are no reason for distrust. `opened` is the `opened_path` of the directory, if it is open."""
    opened = opened or directory
    names = ["", "index", SEGMENTS]
    if (opened / SEGMENTS).is_dir():
        names += sorted(f"{SEGMENTS}/{path.name}" for path in (opened / SEGMENTS).iterdir())
    for name in (*names, *FILES):
        try:
            found = (opened / name).lstat() if name else opened.stat()
        except FileNotFoundError:
            continue
        if (why := distrust(directory / name, found, file=name in FILES, uid=uid))[0]:
            if not name and found.st_mode & stat.S_ISVTX:  # shared, as /tmp, and must stay open
                return why[0], f"mkdir -m 700 {directory}/{OWN}"
            return why
    return "", ""


def claim(
    directory: Path, pid: int, device: int | None = None, owner: int | None = None
) -> tuple[int, int, bytes]:
    """Lock the directory for the daemon `pid`; return descriptors of the lock and of the directory, and the
    name of the directory. With an `owner`, to whom the directory must belong, nothing is created and the name
    is empty. A directory that is not on `device` must be a mount point: otherwise its disk is not mounted.
    Raises TierError, and InUseError if another daemon has the lock."""
    fd, folder = _locked(directory, pid, device, os.geteuid() if owner is None else owner)
    try:
        name = _named(folder, directory) if owner is None else b""
        _warn_of_missing_index(directory, opened_path(folder))
    except BaseException:
        os.close(fd)
        os.close(folder)
        raise
    return fd, folder, name


def owner_of(directory: Path) -> int:
    try:
        return directory.stat().st_uid
    except OSError as error:
        raise TierError(f"cold: cannot use {directory}: {error.strerror}") from error


def _warn_of_missing_index(directory: Path, opened: Path) -> None:
    segments = (opened / SEGMENTS).glob("*/[0-9]*")
    if not (opened / "index" / "data.mdb").exists() and any(segments):
        log.warning(
            "cold: %s has segments but no index: creating a new index; forgotten blocks stay "
            "forgotten, but the order of eviction and blocks in open segments may be lost", directory,
        )  # fmt: skip


def _locked(directory: Path, pid: int, device: int | None, uid: int) -> tuple[int, int]:
    with contextlib.ExitStack() as undo:
        try:
            folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            undo.callback(os.close, folder)
            if device not in (None, os.fstat(folder).st_dev) and not directory.is_mount():
                raise TierError(
                    f"cold: {directory} is on another file system than before: mount the disk, "
                    "or run `kvtier tier off cold` and `kvtier tier on cold` to use the "
                    "directory as it is"
                )
            why, fix = distrust_cold(directory, uid, opened_path(folder))
            if why:
                raise TierError(
                    f"cold: {why}, so another user may have put segments there; run `{fix}`"
                    f"{' and use that' if fix.endswith(f'/{OWN}') else ', or use another'} directory"
                )
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(LOCK, flags, 0o600, dir_fd=folder)
            undo.callback(os.close, fd)
        except OSError as error:
            remedy = f"create it as a directory that uid {os.geteuid()} may write to"
            if error.errno == errno.EROFS:
                remedy = "mount its file system read-write"
            text = f"cold: cannot use {directory}: {error.strerror}; {remedy}"
            raise TierError(text) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(fd, 20, 0).decode(errors="replace").strip()
            text = (
                f"cold: {directory} is used by this daemon already, pid {owner}; if another of "
                "cold.directories is the same directory, remove one"
                if owner == str(pid)
                else f"cold: {directory} is used by another daemon, pid {owner}: stop that one, or use "
                "another directory"
            )
            raise InUseError(text, int(owner) if owner.isdecimal() else 0) from error
        except OSError as error:
            text = f"cold: cannot lock {directory / LOCK}: {error.strerror}"
            raise TierError(text) from error
        name = f"{pid}\n".encode()
        try:
            os.pwrite(fd, name, 0)
            os.truncate(fd, len(name))
        except OSError as error:  # only messages need it, so a full disk does not prevent the start
            log.warning("cold: cannot write %s: %s", directory / LOCK, error.strerror)
        undo.pop_all()
    return fd, folder


def _named(folder: int, directory: Path) -> bytes:
    """Return the random name of this directory, which its first use creates on disk."""
    try:
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=folder)
            with os.fdopen(fd, "rb") as file:
                name = file.read(NAME_BYTES + 1)
            if len(name) == NAME_BYTES:
                return name
            log.error(
                "cold: %s is damaged: creating a new one; no existing segment is used",
                directory / NAME,
            )
    except OSError as error:
        raise TierError(f"cold: cannot use {directory / NAME}: {error.strerror}") from error
    return rename(folder, directory)


def rename(folder: int, directory: Path) -> bytes:
    """Give this directory another random name on disk, and return it: no existing segment belongs to the
    directory any more. Raises TierError."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        name, new = os.urandom(NAME_BYTES), f"{NAME}.new"
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags, 0o600, dir_fd=folder)
        with os.fdopen(fd, "wb") as file:
            file.write(name)
            file.flush()
            os.fsync(fd)
        os.rename(new, NAME, src_dir_fd=folder, dst_dir_fd=folder)
        os.fsync(folder)
    except OSError as error:
        raise TierError(f"cold: cannot use {directory / NAME}: {error.strerror}") from error
    return name
