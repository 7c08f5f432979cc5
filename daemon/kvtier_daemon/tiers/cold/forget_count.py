"""Counts the forgets of a cold directory, in the directory and in the state folder, so that a start detects a
directory that was replaced by an older copy of itself: blocks that were forgotten since would return with it.

DIRECTORY/kvtier.forgets   rounds u64 │ digest 16
STATE/cold/ID              the same; ID is the content of kvtier.id in hex

A round is all forgets that one sync makes durable. It advances the count of the directory, then that of the
state folder, and is answered after that. An older copy has a smaller count than the state folder. A kill
between the two steps leaves the larger count in the directory, which is no reason for doubt. The digest
contains the ID; a count that fails it is missing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
from pathlib import Path
from typing import Final

from kvtier_daemon.secrets import sync_folder
from kvtier_daemon.tiers.cold.directory_lock import FORGETS, NAME
from kvtier_kernels import xxh3_128

log = logging.getLogger(__name__)

FOLDER: Final = "cold"
ROUNDS: Final = struct.Struct("<Q")
DOMAIN: Final = b"kvtier.forgets.1\0"


class ForgetCount:
    """`failure` says why the last round was not counted, or is empty. The methods wait for disks."""

    def __init__(self, directory: Path, opened: Path, name: bytes, state: Path) -> None:
        """`opened` is where files of the directory are opened; `name` is the content of its kvtier.id."""
        self.failure = ""
        self._directory = directory
        self._name = name
        self._files = opened / FORGETS, state / FOLDER / name.hex()
        own, seen = (_read(file, name) for file in self._files)
        self.rounds, self.seen = own or 0, seen or 0
        if own and seen is None:
            log.warning(
                "cold: the state folder %s does not know %s: it cannot be detected whether this "
                "directory is an older copy", state, directory,
            )  # fmt: skip

    @property
    def is_older(self) -> bool:
        """Whether the directory lacks rounds that the state folder has seen."""
        return self.rounds < self.seen

    def advance(self, rounds: int = 1) -> None:
        """Count this many more rounds durably; with 0, create the files if they are missing."""
        self.rounds += rounds
        failure = ""
        for file in self._files:  # in this order: see above
            try:
                _write(file, self._name, self.rounds)
            except OSError as error:
                failure = (
                    f"{self._directory}: cannot count forgets in {file}: {error.strerror}; an older "
                    "copy of this directory may not be detected"
                )
                break
        if failure and failure != self.failure:
            log.error("cold: %s", failure)
        self.failure = failure


def lost_rounds(directory: Path, state: Path) -> int:
    """Return how many rounds of forgets a directory lacks, by the state folder. Changes nothing."""
    try:
        name = (directory / NAME).read_bytes()
    except FileNotFoundError:
        return 0
    own, seen = (_read(file, name) for file in (directory / FORGETS, state / FOLDER / name.hex()))
    return max(0, (seen or 0) - (own or 0))


def _record(name: bytes, rounds: int) -> bytes:
    text = ROUNDS.pack(rounds)
    return text + bytes(xxh3_128(DOMAIN + name + text))


def _read(file: Path, name: bytes) -> int | None:
    """Return the count in a file; None if it is missing or damaged. Raises OSError."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb") as opened:
        text = opened.read(64)
    rounds = int.from_bytes(text[: ROUNDS.size], "little")
    return rounds if text == _record(name, rounds) else None


def _write(file: Path, name: bytes, rounds: int) -> None:
    """Write the count with one durable write of a few bytes, which disks do not tear."""
    flags = os.O_WRONLY | os.O_DSYNC | os.O_CLOEXEC | os.O_NOFOLLOW
    with contextlib.suppress(FileNotFoundError):
        _put(os.open(file, flags), name, rounds)
        return
    if not file.parent.exists():
        file.parent.mkdir(mode=0o700, parents=True)
        sync_folder(file.parent.parent)
    _put(os.open(file, flags | os.O_CREAT, 0o600), name, rounds)
    sync_folder(file.parent)


def _put(fd: int, name: bytes, rounds: int) -> None:
    try:
        os.pwrite(fd, _record(name, rounds), 0)
    finally:
        os.close(fd)
