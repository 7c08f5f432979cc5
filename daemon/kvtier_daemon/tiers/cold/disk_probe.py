"""The watchdog's probe of disks: the directory's worker writes, syncs and reads an unnamed page."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
from functools import partial
from pathlib import Path

from kvtier.frame import PAGE
from kvtier_daemon.tiers.cold.disk import DirectoryDisk
from kvtier_daemon.tiers.cold.segment_store import NO_ROOM
from kvtier_daemon.tiers.cold.tier import ColdTier

# These do not show that a disk fails: segments have their space already on a full file system, and a queue
# may be long or ended.
NOT_ITS_FAULT = (*NO_ROOM, errno.ETIMEDOUT, errno.ECANCELED)


class DiskProbe:
    """Probes the disks independently: a disk that hangs does not delay the probes of others."""

    def __init__(self) -> None:
        self._probing: set[DirectoryDisk] = set()

    def begin(self, cold: ColdTier) -> None:
        """Begin to write and read a page in each directory that is on and has no probe running. The results
        count as those of other writes and reads."""
        for one in cold.directories.attached:
            directory, disk = one.directory.path, one.disk
            if disk not in self._probing and disk.writes.is_on and disk.reads.is_on:
                self._probing.add(disk)
                opening = disk.files.run(one.directory.open, directory, os.O_TMPFILE)
                opening.add_done_callback(partial(self._opened, directory, disk))

    def _opened(self, directory: Path, disk: DirectoryDisk, opening: asyncio.Future[int]) -> None:
        if opening.cancelled() or opening.exception() is not None:
            # Some file systems do not support unnamed files. Other faults are reported by other operations.
            self._probing.discard(disk)
            return
        fd, page = opening.result(), secrets.token_bytes(PAGE)
        if disk.is_over:
            os.close(fd)
            self._probing.discard(disk)
            return

        def over(lane_is_reads: bool, code: int) -> None:
            os.close(fd)
            self._probing.discard(disk)
            if code and code not in NOT_ITS_FAULT:
                lane = disk.reads if lane_is_reads else disk.writes
                lane.fault(f"{directory}: the disk probe failed", code)

        def wrote(code: int, _: bytes | None) -> None:
            if code:
                over(False, code)
            else:
                disk.read_text(fd, 0, PAGE, read)

        def read(code: int, text: bytes | None) -> None:
            over(True, code or (0 if text == page else errno.EBADMSG))

        disk.write_text(fd, 0, page, wrote)
