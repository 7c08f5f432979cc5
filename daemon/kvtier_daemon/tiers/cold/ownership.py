"""Whether others could have put something where the daemon reads and writes: owner, mode, names."""

from __future__ import annotations

import os
import stat
from pathlib import Path

FILES = ("kvtier.lock", "kvtier.id", "index/data.mdb", "index/lock.mdb")


def distrust(
    path: Path, found: os.stat_result, *, file: bool = False, uid: int | None = None
) -> tuple[str, str]:
    """Why a directory, or a file, could be another user's than root's and this uid's, or the process's where
    none is given; and the command that mends it. Two empty texts where it could not."""
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


def distrust_cold(directory: Path, uid: int | None = None) -> tuple[str, str]:
    """The same of a cold directory, its folders, and the files in it that are not segments. One that is
    missing is not distrusted."""
    segments = directory / "segments"
    folders = [directory, directory / "index", segments]
    if segments.is_dir():
        folders += sorted(segments.iterdir())
    files = [directory / name for name in FILES]
    for path in (*folders, *files):
        try:
            found = path.stat() if path == directory else path.lstat()
        except FileNotFoundError:
            continue
        if (why := distrust(path, found, file=path in files, uid=uid))[0]:
            return why
    return "", ""
