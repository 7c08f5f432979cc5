"""Reads what is on disk again, slowly, so that damage is found before somebody wants what it hit.

From segment to segment, the one that was looked at longest ago first; each frame's header and payload, into
memory of our own. It waits for whoever wants blocks, and takes nothing of the warm tier. What it finds it
tells the catalog, which forgets the frame, and the block too if that is nowhere else.
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

from kvtier.catalog import Catalog
from kvtier.catalog.blocks import ID_BYTES
from kvtier.catalog.cold import Framed
from kvtier.codec import frame
from kvtier.codec.frame import PAGE, pages
from kvtier.errors import FrameError
from kvtier_daemon.moving.blocks import DAMAGED, FRAME
from kvtier_daemon.tiers.cold import ColdTier, Incoming
from kvtier_daemon.tiers.drive import Drive
from kvtier_daemon.tiers.log import Segment, Stage
from kvtier_daemon.tiers.segment import Head
from kvtier_daemon.tiers.shelf import Shelf

log = logging.getLogger(__name__)

PAUSE_S = 0.05
IDLE_S = 1.0
AT_ONCE = 32  # blocks that the catalog is asked about
TRIES = 2

Sleep = Callable[[float], Awaitable[None]]


class Pace:
    """Lets so many bytes a second go; what was not taken is not saved up."""

    def __init__(self, rate: int, clock: Callable[[], float], sleep: Sleep) -> None:
        self.rate = rate
        self._clock = clock
        self._sleep = sleep
        self._due = clock()

    async def take(self, nbytes: int) -> None:
        """Return when so many bytes may go."""
        while not self.rate:
            await self._sleep(IDLE_S)
        if (left := self._due - self._clock()) > 0:
            await self._sleep(left)
        self._due = max(self._due, self._clock()) + nbytes / self.rate


class Scrub:
    """One for all tenants. `dirty` is told whose blocks are in memory alone, as their frames were damaged."""

    def __init__(
        self,
        cold: ColdTier,
        catalogs: Mapping[str, Catalog],
        dirty: Callable[[str, bytes], None],
        rate: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.counts: Counter[str] = Counter(bytes=0, frames=0, damaged=0)
        self.last_round_s: float | None = None
        self.rate = rate
        self._cold = cold
        self._catalogs = catalogs
        self._dirty = dirty
        self._clock = clock
        self._sleep = sleep
        self._pace = Pace(rate, clock, sleep)
        self._looked: dict[int, tuple[Head, float]] = {}  # by segment: in which use of it, and when
        self._memory: tuple[int, int] | None = None

    def set_rate(self, rate: int) -> None:
        """Read so many bytes a second from now on; 0 is none."""
        self.rate = self._pace.rate = rate

    def stats(self) -> dict[str, Any]:
        return {**self.counts, "last_round_s": self.last_round_s, "rate": self.rate}

    async def run(self) -> None:
        """Read, for as long as the daemon lives."""
        while True:
            if self.rate:
                await self.round()
            await self._sleep(IDLE_S)

    async def round(self) -> int:
        """Look at every segment that is full now; how many there were."""
        began = self._clock()
        todo = sorted(self._cold.sealed(), key=lambda one: self._when(one[1]))
        for shelf, segment in todo:
            await self._look_at(shelf, segment)
            await asyncio.sleep(0)  # it may hold nothing that is anybody's
        if todo:
            self.last_round_s = round(self._clock() - began, 3)
        return len(todo)

    def _when(self, segment: Segment) -> float:
        head, at = self._looked.get(segment.number, (None, 0.0))
        return at if head is segment.head else float("-inf")

    async def _look_at(self, shelf: Shelf, segment: Segment) -> None:
        cold, head = self._catalogs[shelf.tenant].cold, segment.head
        if head is None:
            return
        ids = cold.in_segment(segment.number)
        for at in range(0, len(ids), AT_ONCE * ID_BYTES):
            for one in cold.still_in(ids[at : at + AT_ONCE * ID_BYTES], segment.number):
                damaged = await self._is_damaged(one, segment, head, shelf.drive)
                if not _lasts(segment, head) or not shelf.drive.reads.is_on:
                    return
                if damaged:
                    self._tell(shelf.tenant, one, segment)
        self._looked[segment.number] = (head, self._clock())

    async def _wait(self, one: Framed, drive: Drive) -> None:
        """Until there is time for this frame, and nobody waits for another."""
        await self._pace.take(_nbytes(one))
        while drive.reads.is_on and drive.disk.queued[0]:
            await self._sleep(PAUSE_S)

    async def _is_damaged(self, one: Framed, segment: Segment, head: Head, drive: Drive) -> bool:
        """Whether the frame is not what it should be, or can't be had. What a disk does not give once it may
        give later, and a disk that gives nothing at all says nothing of its frames."""
        code, good = 0, drive.reads.good
        for _ in range(TRIES):
            await self._wait(one, drive)
            if not _lasts(segment, head) or not drive.reads.is_on:
                return False
            code, header, payload = await self._read(one)
            self.counts["bytes"] += _nbytes(one)
            if not code:
                self.counts["frames"] += 1
                return payload in DAMAGED or not _names(header, head.epoch, one)
        return code == errno.EIO and drive.reads.good > good

    async def _read(self, one: Framed) -> tuple[int, bytes, int]:
        """What the disk says, 0 if all is well with it; the header; and what is wrong with the payload."""
        loop = asyncio.get_running_loop()
        header: asyncio.Future[tuple[int, bytes]] = loop.create_future()
        payload: asyncio.Future[int] = loop.create_future()

        def have_header(code: int, text: bytes) -> None:
            if not header.cancelled():
                header.set_result((code, text))

        def have_payload(_: Incoming, code: int) -> None:
            if not payload.cancelled():
                payload.set_result(code)

        segment, page, nbytes, _, header_pages, _, _ = FRAME.unpack(one.frame)
        block = Incoming(
            one.id, segment, page, header_pages, nbytes, one.digest, self._memory_of(nbytes), 0
        )
        self._cold.read_header(block, have_header)
        self._cold.read([block], have_payload, urgent=False)
        (head_code, text), code = await header, await payload
        if head_code == errno.ENODATA:
            return 0, b"", errno.ENODATA
        return head_code or (0 if code in DAMAGED else code), text, code

    def _tell(self, tenant: str, one: Framed, segment: Segment) -> None:
        ids = array("I", [one.id]).tobytes()
        forgotten, dirty = self._catalogs[tenant].cold.damaged(ids, one.frame)
        if not forgotten:
            return
        self.counts["damaged"] += 1
        again = "it is in memory, and is written again" if dirty else "its block is gone"
        page = FRAME.unpack(one.frame)[1]
        log.warning("cold: %s: the frame at page %d is damaged; %s", segment.path, page, again)
        if dirty:
            self._dirty(tenant, dirty)

    def _memory_of(self, nbytes: int) -> int:
        """Memory of our own, of so many bytes at least; its number with the cold tier."""
        if self._memory is None or self._memory[1] < nbytes:
            self._memory = self._cold.room(nbytes)
        return self._memory[0]


def _lasts(segment: Segment, head: Head) -> bool:
    """Whether it is full, and of this use yet; nothing here delays the next one. Its frames have places of
    their own for as long."""
    return segment.head is head and segment.stage is Stage.SEALED


def _nbytes(one: Framed) -> int:
    """What is read for this frame."""
    _, _, payload_bytes, _, header_pages, _, _ = FRAME.unpack(one.frame)
    return int(header_pages * PAGE + pages(payload_bytes))


def _names(header: bytes, epoch: int, one: Framed) -> bool:
    """Whether this is the header of this very frame."""
    try:
        found = frame.decode(header, epoch)
    except FrameError:
        return False
    return found.identity == one.identity and found.payload_digest == one.digest
