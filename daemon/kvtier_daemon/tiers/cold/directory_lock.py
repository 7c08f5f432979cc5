"""Locking a directory of the cold tier: of two daemons one gets it. Refuses a directory that another user
could have written to.

The process that opens the index calls this; see index_child.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from pathlib import Path

from kvtier.errors import TierError
from kvtier_daemon.claim import InUseError
from kvtier_daemon.tiers.cold.ownership import distrust_cold

log = logging.getLogger(__name__)

LOCK = "kvtier.lock"
NAME = "kvtier.id"
NAME_BYTES = 16
SEGMENTS = "segments"


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


def owner_of(directory: Path) -> int:
    try:
        return directory.stat().st_uid
    except OSError as error:
        raise TierError(f"cold: cannot use {directory}: {error.strerror}") from error


def _tell_of_no_index(directory: Path) -> None:
    segments = (directory / SEGMENTS).glob("*/[0-9]*")
    if not (directory / "index" / "data.mdb").exists() and any(segments):
        log.warning(
            "cold: %s has segments but no index: creating a new index; forgotten blocks stay "
            "forgotten, but the order of eviction and blocks in open segments may be lost", directory,
        )  # fmt: skip


def _locked(directory: Path, pid: int, device: int | None, uid: int) -> tuple[int, int]:
    with contextlib.ExitStack() as undo:
        try:
            if device not in (None, directory.stat().st_dev) and not directory.is_mount():
                raise TierError(
                    f"cold: {directory} is on another file system than before: mount the disk, "
                    "or run `kvtier tier off cold` and `kvtier tier on cold` to use the "
                    "directory as it is"
                )
            folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            undo.callback(os.close, folder)
            _refuse_others(directory, uid)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(LOCK, flags, 0o600, dir_fd=folder)
            undo.callback(os.close, fd)
        except OSError as error:
            remedy = f"create it as a directory that uid {os.geteuid()} may write to"
            text = f"cold: cannot use {directory}: {error.strerror}; {remedy}"
            raise TierError(text) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(fd, 20, 0).decode(errors="replace").strip()
            text = f"cold: {directory} is used by another daemon, pid {owner}"
            raise InUseError(text, int(owner) if owner.isdecimal() else 0) from error
        except OSError as error:
            text = f"cold: cannot lock {directory / LOCK}: {error.strerror}"
            raise TierError(text) from error
        name = f"{pid}\n".encode()
        try:
            os.pwrite(fd, name, 0)
            os.truncate(fd, len(name))
        except OSError as error:  # it is for others to read: a full disk is no reason not to start
            log.warning("cold: cannot write %s: %s", directory / LOCK, error.strerror)
        undo.pop_all()
    return fd, folder


def _refuse_others(directory: Path, uid: int) -> None:
    """Raises TierError where another user could have put something into the directory."""
    why, fix = distrust_cold(directory, uid)
    if why:
        raise TierError(
            f"cold: {why}, so another user may have put segments there; run `{fix}`, or use "
            "another directory"
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
                "cold: %s is damaged: creating a new one; no existing segment is used",
                directory / NAME,
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
        raise TierError(f"cold: cannot use {directory / NAME}: {error.strerror}") from error
    return name
