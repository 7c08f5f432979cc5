"""The segment files of one tenant in one directory, and the bytes that they may take."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvtier.errors import TierError
from kvtier.layout import KvSpec
from kvtier_daemon.tiers.cold.directory import ColdDirectory, space_key, spaces_of
from kvtier_daemon.tiers.cold.disk import DirectoryDisk
from kvtier_daemon.tiers.cold.eraser import erase_all
from kvtier_daemon.tiers.cold.recovery import Recovered, recover, refuse_copies
from kvtier_daemon.tiers.cold.segment import all_encrypted
from kvtier_daemon.tiers.cold.segment_log import Segment

log = logging.getLogger(__name__)

FREE_NUMBERS = 500_000_000  # those from here on are for new files
LEAST_SEGMENTS = 3  # with fewer, none can be reclaimed while others are written


class SegmentFiles:
    """Creates, finds and removes the files; never reads or writes a segment that is in use. If `encrypted`,
    files that may hold unencrypted frames are erased. `readers`: the group that may read the files."""

    def __init__(
        self, tenant: str, directory: ColdDirectory, disk: DirectoryDisk, segment_bytes: int, most: int,
        owner: bytes, encrypted: bool = False, readers: int | None = None,
    ) -> None:  # fmt: skip
        self.erased = 0  # files that were not encrypted
        self.segment_bytes = segment_bytes
        self.most_bytes = most * segment_bytes
        self.described: dict[bytes, KvSpec] = {}  # spaces that the scan found
        self.unreadable = 0  # files that can neither be used nor be removed
        self.unreadable_bytes = 0  # the room that they take
        self._tenant = tenant
        self._directory = directory
        self._disk = disk
        self._owner = owner
        self._encrypted = encrypted
        self._readers = readers
        self._warned = False
        self._held_bytes = 0
        self._next_number = 0

    @property
    def has_room(self) -> bool:
        """Whether one more file fits."""
        return self._held_bytes + self.segment_bytes <= self.most_bytes

    @property
    def usable_bytes(self) -> int:
        """How many bytes all files can have: those that they have if the file system is full."""
        return self._held_bytes if self._disk.short else self.most_bytes

    def hold(self, segment: Segment) -> None:
        """Count this segment's file."""
        self._held_bytes += segment.nbytes

    def create(self) -> tuple[Path, asyncio.Future[int]]:
        """Start to create a file of the configured size; the future has its descriptor."""
        number, self._next_number = self._next_number, self._next_number + 1
        path = self._directory.segment_path(self._tenant, number)
        return path, self._disk.files.run(self._make, path)

    def _make(self, path: Path) -> int:
        return self._shown(path, self._directory.make(path, self.segment_bytes))

    def open(self, path: Path) -> int:
        """Open a file that the scan found; return its descriptor. Waits for the disk."""
        return self._shown(path, self._directory.open(path))

    def _shown(self, path: Path, fd: int) -> int:
        """Let the group of readers, and no other, read a file. Without permission for that it is used too."""
        mode = 0o600 if self._readers is None else 0o640
        try:
            found = os.fstat(fd)
            if self._readers is not None and found.st_gid != self._readers:
                os.fchown(fd, -1, self._readers)
            if found.st_mode & 0o777 != mode:
                os.fchmod(fd, mode)
        except OSError as error:
            if not self._warned:
                log.warning(
                    "cold: %s: cannot let group %s read it (%s), so kvikio cannot: make uid %d a member of "
                    "that group", path, self._readers, error.strerror, os.geteuid(),
                )  # fmt: skip
            self._warned = True
        return fd

    def remove(self, segment: Segment) -> None:
        """Close and remove the file of a segment, in the thread that also creates files."""
        self._held_bytes -= segment.nbytes
        fd, segment.fd = segment.fd, -1

        def remove() -> None:
            with contextlib.suppress(OSError):
                # A client may have a descriptor, and would keep the disk's space.
                os.ftruncate(fd, 0)
            os.close(fd)
            self._unlink(Path(segment.path))

        self._disk.files.run(remove)

    def lose_room(self, path: Path | None = None) -> None:
        """Count a file that takes room and cannot be used."""
        self.unreadable += 1
        nbytes = self.segment_bytes
        if path is not None:
            with contextlib.suppress(OSError):
                nbytes = max(nbytes, self._directory.opened(path).lstat().st_size)
        self.unreadable_bytes += nbytes
        self.most_bytes -= nbytes

    async def scan(self) -> list[Recovered]:
        """Return the content of the files that fit, oldest first; remove the other files."""
        described = await self._disk.files.run(spaces_of, self._directory, self._tenant)
        found = []
        for path in await self._disk.files.run(self._directory.files, self._tenant):
            if (number := int(path.name)) < FREE_NUMBERS:  # otherwise its name is not one of ours
                self._next_number = max(self._next_number, number + 1)
            if (file := await self._scan_file(path, None)) is not None:
                found.append(file)
        found = refuse_copies(found)
        # A footer may describe a space whose description the index has lost.
        footers = {identity: spec for file in found for identity, spec in file.spaces}
        walked: list[Recovered] = []
        for file in found:
            known: Recovered | None = file
            if file.head is not None and not file.sealed:
                # One that cannot be read now is no empty segment: it would get a footer without its frames.
                known = await self._scan_file(file.path, footers | described)
            if known is not None:
                walked.append(known)
        found = walked
        if self.erased:
            log.warning(
                "cold: %s: erased %d segment files of tenant %s that were not encrypted, because "
                "cold.encryption is on", self._directory.path, self.erased, self._tenant,
            )  # fmt: skip
        found.sort(key=lambda file: file.head.sequence if file.head else -1)
        kept = self._select_fitting(found)
        paths = {file.path for file in kept}
        if others := sum(file.nbytes != self.segment_bytes for file in kept):
            log.warning(
                "cold: %s: %d segments of tenant %s have another size than cold.segment (%d "
                "bytes): each is used until it would be reused, then replaced",
                self._directory.path, others, self._tenant, self.segment_bytes,
            )  # fmt: skip
        for file in found:
            if file.warning:
                log.warning("cold: %s: %s", file.path, file.warning)
            if file.path not in paths:
                await self._disk.files.run(self._unlink, file.path)
        self.described = self._drop_unused(described, kept)
        return kept

    def _select_fitting(self, found: Sequence[Recovered]) -> list[Recovered]:
        """Return the newest files that fit. A file of another size is kept for its blocks, unless fewer than
        three of that size fit: then it could never be reclaimed."""
        kept, room = [], self.most_bytes
        for file in reversed(found):
            other = file.nbytes != self.segment_bytes
            unfit = other and (file.head is None or file.nbytes > self.most_bytes // LEAST_SEGMENTS)
            if not (file.foreign or unfit) and file.nbytes <= room:
                kept.append(file)
                room -= file.nbytes
        return kept[::-1]

    async def _scan_file(
        self, path: Path, described: Mapping[bytes, KvSpec] | None
    ) -> Recovered | None:
        """Return the content of a file; None if it cannot be read."""
        try:
            return await self._disk.files.run(self._recover, path, described)
        except TierError as error:
            log.error("cold: %s", error)
            self.lose_room(path)
            return None

    def _recover(self, path: Path, described: Mapping[bytes, KvSpec] | None) -> Recovered:
        opened = self._directory.opened(path)
        file = recover(path, self._owner, described, opened=opened)
        encrypted = file.head is not None and file.head.encrypted and all_encrypted(file.table)
        if self._encrypted and not encrypted:
            erase_all(opened)
            self.erased += file.head is not None or bool(file.warning)
            return Recovered(path, file.nbytes, foreign=file.foreign)
        if file.head is not None:
            file.used = self._directory.access_log.pages(file.head.epoch)
            file.split()
        return file

    def _drop_unused(
        self, described: Mapping[bytes, KvSpec], found: Sequence[Recovered]
    ) -> dict[bytes, KvSpec]:
        """Return the descriptions of spaces that have frames, and drop the others from the index. Drops none
        if more frames may be found later: in an unreadable file, or behind a damaged frame."""
        if self.unreadable or not all(file.sealed for file in found if file.head is not None):
            return dict(described)
        used = {identity for file in found for identity, _ in file.spaces}
        for identity in described.keys() - used:
            self._directory.index.drop(b"spaces", space_key(self._tenant, identity))
        return {identity: spec for identity, spec in described.items() if identity in used}

    def _unlink(self, path: Path) -> None:
        log.warning("cold: removing %s: it is unusable, or cold.size has no room for it", path)
        try:
            self._directory.opened(path).unlink()
        except OSError as error:
            log.error("cold: cannot remove %s: %s", path, error)
            self.lose_room(path)
