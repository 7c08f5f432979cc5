"""Cache results that depend only on files and commands, from one run of the tests to the next.

The name of a result is a digest of all its inputs, so no stale result is found. The results are in
build/cache, or in the folder KVTIER_TEST_CACHE. Removing that folder is safe.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
UNUSED_S = 14 * 24 * 3600  # a result that was not used in this time is removed


def folder() -> Path:
    place = Path(os.environ.get("KVTIER_TEST_CACHE") or ROOT / "build" / "cache")
    place.mkdir(parents=True, exist_ok=True)
    return place


def digest(*parts: str | bytes | Path) -> str:
    """Return a name for a result with these inputs: text, and files by name and content, not by folder."""
    sums = hashlib.sha256()
    for part in parts:
        named = part.name.encode() if isinstance(part, Path) else b""
        text = part.read_bytes() if isinstance(part, Path) else part
        text = text.encode() if isinstance(text, str) else text
        for one in (named, text):
            sums.update(len(one).to_bytes(8, "little") + one)
    return sums.hexdigest()


def files_in(*folders: Path, suffixes: Iterable[str] = (".h",)) -> list[Path]:
    wanted = tuple(suffixes)
    return sorted(
        path for folder in folders for path in folder.rglob("*") if path.name.endswith(wanted)
    )


@cache
def compiler(command: str) -> str:
    """Return the version of a compiler and of the C library whose headers it reads."""
    option = "--version" if command.endswith("nvcc") else "-v"
    done = subprocess.run([command, option], capture_output=True, text=True, check=True)
    return "\n".join((done.stdout, done.stderr, *platform.libc_ver()))


@cache
def processor() -> str:
    """Return the instruction sets of this processor, for programs that select one at run time."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """Return the file of this name; `make` writes it the first time. Nothing is kept if `make` raises."""
    place = folder() / name
    # Tests in other processes wait for the first one instead of making the same file.
    with (folder() / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            with tempfile.TemporaryDirectory(dir=folder(), prefix="making-") as room:
                made = Path(room) / name
                make(made)
                made.rename(place)
            _remove_unused()
    os.utime(place)
    return place


def _remove_unused() -> None:
    oldest = time.time() - UNUSED_S
    for path in folder().iterdir():
        if path.is_file() and path.stat().st_mtime < oldest:
            path.unlink(missing_ok=True)
