"""Reads frames again, slowly, to find damage before a request does.

It reads header and payload of each frame into its own memory, starting with the segment whose last scrub is
the oldest. It pauses while requests wait for reads. The catalog forgets a damaged frame, and its block if
there is no other copy.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from kvtier import frame
from kvtier.errors import FrameError
from kvtier_daemon.catalog import Catalog
from kvtier_daemon.catalog.blocks import ID_BYTES
from kvtier_daemon.catalog.frames import StoredFrame
from kvtier_daemon.catalog.segment_frames import Framed
from kvtier_daemon.tiers.cold.attached import ReadMemory
from kvtier_daemon.tiers.cold.disk import DirectoryDisk
from kvtier_daemon.tiers.cold.frames import DAMAGED, Incoming
from kvtier_daemon.tiers.cold.segment import Head
from kvtier_daemon.tiers.cold.segment_log import Segment, Stage
from kvtier_daemon.tiers.cold.segment_store import SegmentStore
from kvtier_daemon.tiers.cold.tier import ColdTier

log = logging.getLogger(__name__)

PAUSE_S = 0.05
IDLE_S = 1.0
AT_ONCE = 32  # blocks per query of the catalog
TRIES = 2

Sleep = Callable[[float], Awaitable[None]]


class Pace:
    """Limits a rate in bytes per second; unused time is not saved up."""

    def __init__(self, rate: int, clock: Callable[[], float], sleep: Sleep) -> None:
        self.rate = rate
        self._clock = clock
        self._sleep = sleep
        self._due = clock()

    async def take(self, nbytes: int) -> None:
        """Return when this many bytes may be read."""
        while not self.rate:
            await self._sleep(IDLE_S)
        if (left := self._due - self._clock()) > 0:
            await self._sleep(left)
        self._due = max(self._due, self._clock()) + nbytes / self.rate


class Scrubber:
    """Scrubs the segments of all tenants. `dirty` gets blocks that lost their damaged frames."""

    def __init__(
        self, cold: ColdTier, catalogs: Mapping[str, Catalog], dirty: Callable[[str, bytes], None],
        rate: int, clock: Callable[[], float] = time.monotonic, sleep: Sleep = asyncio.sleep,
    ) -> None:  # fmt: skip
        self.counts: Counter[str] = Counter(bytes=0, frames=0, damaged=0)
        self.last_round_s: float | None = None
        self.rate = rate
        self._cold = cold
        self._catalogs = catalogs
        self._dirty = dirty
        self._clock = clock
        self._sleep = sleep
        self._pace = Pace(rate, clock, sleep)
        # By segment: its head and the time of its last scrub.
        self._scrubbed: dict[int, tuple[Head, float]] = {}
        self._memory = ReadMemory(cold.memory)

    def set_rate(self, rate: int) -> None:
        """Read this many bytes per second from now on; 0 stops the scrub."""
        self.rate = self._pace.rate = rate

    def stats(self) -> dict[str, Any]:
        return {**self.counts, "last_round_s": self.last_round_s, "rate": self.rate}

    async def run(self) -> None:
        while True:
            if self.rate:
                await self.round()
            await self._sleep(IDLE_S)

    async def round(self) -> int:
        """Scrub every sealed segment; return their number."""
        began = self._clock()
        todo = sorted(self._cold.sealed(), key=lambda one: self._last_scrub(one[1]))
        for store, segment in todo:
            await self._scrub_segment(store, segment)
            await asyncio.sleep(0)  # it may hold no blocks
        if todo:
            self.last_round_s = round(self._clock() - began, 3)
        return len(todo)

    def _last_scrub(self, segment: Segment) -> float:
        head, at = self._scrubbed.get(segment.number, (None, 0.0))
        return at if head is segment.head else float("-inf")

    async def _scrub_segment(self, store: SegmentStore, segment: Segment) -> None:
        segments, head = self._catalogs[store.tenant].segments, segment.head
        if head is None:
            return
        ids = segments.in_segment(segment.number)
        for at in range(0, len(ids), AT_ONCE * ID_BYTES):
            for one in segments.still_in(ids[at : at + AT_ONCE * ID_BYTES], segment.number):
                damaged = await self._is_damaged(one, segment, head, store.disk)
                if not _is_unchanged(segment, head) or not store.disk.reads.is_on:
                    return
                if damaged:
                    self._report(store.tenant, one, segment)
        self._scrubbed[segment.number] = (head, self._clock())

    async def _wait(self, one: Framed, disk: DirectoryDisk) -> None:
        """Wait until the rate permits this frame, and no request waits for a read."""
        await self._pace.take(StoredFrame.unpack(one.frame).nbytes)
        while disk.reads.is_on and disk.worker.queued[0]:
            await self._sleep(PAUSE_S)

    async def _is_damaged(
        self, one: Framed, segment: Segment, head: Head, disk: DirectoryDisk
    ) -> bool:
        """Whether the frame is damaged or cannot be read. A failed read is repeated; a disk that fails all
        reads says nothing about its frames."""
        code, good = 0, disk.reads.good
        for _ in range(TRIES):
            await self._wait(one, disk)
            if not _is_unchanged(segment, head) or not disk.reads.is_on:
                return False
            code, header, payload = await self._read(one)
            self.counts["bytes"] += StoredFrame.unpack(one.frame).nbytes
            if not code:
                self.counts["frames"] += 1
                return payload in DAMAGED or not _is_header_of(header, head.epoch, one)
        return code == errno.EIO and disk.reads.good > good

    async def _read(self, one: Framed) -> tuple[int, bytes, int]:
        """Return the error of the disk or 0, the header, and the error of the payload."""
        loop = asyncio.get_running_loop()
        header: asyncio.Future[tuple[int, bytes]] = loop.create_future()
        payload: asyncio.Future[int] = loop.create_future()

        def have_header(code: int, text: bytes) -> None:
            if not header.cancelled():
                header.set_result((code, text))

        def have_payload(_: Incoming, code: int) -> None:
            if not payload.cancelled():
                payload.set_result(code)

        stored = StoredFrame.unpack(one.frame)
        nbytes = stored.payload_bytes
        block = Incoming(
            one.id, stored.segment, stored.page, stored.header_pages, nbytes, one.digest,
            self._memory.of(nbytes), 0, nbytes,
        )  # fmt: skip
        self._cold.reader.read_header(block, have_header)
        self._cold.reader.read([block], have_payload, urgent=False)
        (head_code, text), code = await header, await payload
        if head_code == errno.ENODATA:
            return 0, b"", errno.ENODATA
        return head_code or (0 if code in DAMAGED else code), text, code

    def _report(self, tenant: str, one: Framed, segment: Segment) -> None:
        ids = array("I", [one.id]).tobytes()
        forgotten, dirty = self._catalogs[tenant].segments.damaged(ids, one.frame)
        if not forgotten:
            return
        self.counts["damaged"] += 1
        again = "the block is in memory and is written again" if dirty else "the block is lost"
        page = StoredFrame.unpack(one.frame).page
        log.warning("cold: %s: the frame at page %d is damaged; %s", segment.path, page, again)
        if dirty:
            self._dirty(tenant, dirty)


def _is_unchanged(segment: Segment, head: Head) -> bool:
    """Whether the segment is sealed and was not reused. The scrub does not keep it from being reused."""
    return segment.head is head and segment.stage is Stage.SEALED


def _is_header_of(header: bytes, epoch: int, one: Framed) -> bool:
    try:
        found = frame.decode(header, epoch)
    except FrameError:
        return False
    return found.identity == one.identity and found.payload_digest == one.digest
