"""Probes for the watchdog: write bytes to the places of clients' blocks, and read them back.

In memory this uses a catalog with an extent of its own, which counts for no tenant; on a disk an unnamed file
of one page, which the worker of the directory writes, syncs and reads.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import time
from functools import partial
from pathlib import Path

from kvtier.errors import TierError
from kvtier.key import KEY_BYTES
from kvtier.layout import KvSpec, space_id
from kvtier.wire import SLOT
from kvtier_daemon.catalog import Catalog, SessionId
from kvtier_daemon.catalog.policy import make
from kvtier_daemon.tiers.cold.directory import open_direct
from kvtier_daemon.tiers.cold.disk import DirectoryDisk
from kvtier_daemon.tiers.cold.segment_store import NO_ROOM
from kvtier_daemon.tiers.cold.tier import ColdTier
from kvtier_daemon.tiers.warm import table_bytes
from kvtier_kernels import Mapping, Store

PAGE = 4096
EXTENT_BYTES = 16 * PAGE  # a slab
LEASE_S = 10.0
# These do not show that a disk fails: segments have their space already on a full file system, and a queue
# may be long or ended.
NOT_ITS_FAULT = (*NO_ROOM, errno.ETIMEDOUT, errno.ECANCELED)
WHO = SessionId(1)
NO_TENANT = "."  # not a valid name of a tenant
SPEC = KvSpec.dense(
    model="kvtier-probe", layers=1, kv_heads=1, head_dim=64, dtype="bfloat16", block_tokens=16,
    weights="rev:probe",
)  # fmt: skip


class Probe:
    """Of memory: the store, the policy, leases, slots, generations."""

    def __init__(self) -> None:
        self._catalog = Catalog(Store(), make("lru"), 0)
        self._memory, self._table = _mapped(EXTENT_BYTES), _mapped(table_bytes(EXTENT_BYTES))
        self._catalog.add_extent(EXTENT_BYTES, self._table)
        self._space = self._catalog.open(space_id(SPEC, NO_TENANT), SPEC, WHO)

    def put_and_get(self) -> None:
        """Save a block, find it, read it and forget it. TierError if the bytes differ."""
        key, block = secrets.token_bytes(KEY_BYTES), secrets.token_bytes(SPEC.block_bytes)
        memory = memoryview(self._memory)
        granted = self._catalog.reserve(WHO, self._space, 0, 0, b"", key)
        if len(granted.slots) != SLOT.size:
            raise TierError("warm: the watchdog's probe found no room in its own memory")
        _, _, at, _ = SLOT.unpack(granted.slots)
        memory[at : at + len(block)] = block
        self._catalog.commit(WHO, granted.lease, 0, 1, b"")
        found = self._catalog.load(WHO, self._space, key, LEASE_S, [0], time.monotonic(), False)
        slots = b"".join(part.slots for part in found.parts)
        if found.ready != 1 or len(slots) != SLOT.size:
            raise TierError("warm: the watchdog's probe did not find its block")
        _, _, at, _ = SLOT.unpack(slots)
        if memory[at : at + len(block)] != block:
            raise TierError("warm: the watchdog's probe loaded other bytes than it saved")
        self._catalog.release(WHO, found.lease)
        self._catalog.forget(self._space, key)


class DiskProbe:
    """Probes the disks independently: a disk that hangs does not delay the probes of others."""

    def __init__(self) -> None:
        self._asked: set[DirectoryDisk] = set()

    def begin(self, cold: ColdTier) -> None:
        """Begin to write and read a page in each directory that accepts writes and has no probe running. The
        results count as those of other writes and reads."""
        for one in cold.directories.attached:
            directory, drive = one.directory.path, one.disk
            if drive not in self._asked and drive.writes.is_on and drive.reads.is_on:
                self._asked.add(drive)
                opening = drive.run_in_thread(open_direct, str(directory), os.O_TMPFILE)
                opening.add_done_callback(partial(self._opened, directory, drive))

    def _opened(self, directory: Path, drive: DirectoryDisk, opening: asyncio.Future[int]) -> None:
        if opening.cancelled() or opening.exception() is not None:
            # Not every file system has files without names; others say what is wrong by other means.
            self._asked.discard(drive)
            return
        fd, page = opening.result(), secrets.token_bytes(PAGE)
        if drive.is_over:
            os.close(fd)
            self._asked.discard(drive)
            return

        def over(lane_is_reads: bool, code: int) -> None:
            os.close(fd)
            self._asked.discard(drive)
            if code and code not in NOT_ITS_FAULT:
                lane = drive.reads if lane_is_reads else drive.writes
                drive.fault(lane, f"{directory}: the disk probe failed", code)

        def wrote(code: int, _: bytes | None) -> None:
            if code:
                over(False, code)
            else:
                drive.read_text(fd, 0, PAGE, read)

        def read(code: int, text: bytes | None) -> None:
            over(True, code or (0 if text == page else errno.EBADMSG))

        drive.write_text(fd, 0, page, wrote)


def _mapped(nbytes: int) -> Mapping:
    fd = os.memfd_create("kvtier-probe", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        return Mapping(fd, nbytes, True)
    finally:
        os.close(fd)
