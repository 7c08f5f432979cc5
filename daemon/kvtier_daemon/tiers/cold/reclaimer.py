"""Reclaims segments: copies the blocks that were requested again, then releases the segment."""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from kvtier import frame
from kvtier.errors import FrameError
from kvtier.frame import pages
from kvtier_daemon.catalog import Catalog
from kvtier_daemon.catalog.frames import PLACE_BYTES, FramedBlocks, StoredFrame
from kvtier_daemon.tiers.cold.attached import ReadMemory
from kvtier_daemon.tiers.cold.frames import (
    BEGIN_S,
    SETTLE_S,
    WRITE_BLOCKS,
    Incoming,
    Outgoing,
    begin,
    describe,
    ids_of,
    in_time,
    outgoing,
)
from kvtier_daemon.tiers.cold.segment_log import Segment
from kvtier_daemon.tiers.cold.segment_store import SegmentStore
from kvtier_daemon.tiers.cold.tier import ColdTier
from kvtier_daemon.tiers.cold.tombstones import TombstoneWriter
from kvtier_daemon.tiers.cold.write_budget import WriteBudget

log = logging.getLogger(__name__)

KEEP_MOST = 1 << 20
COPY_BYTES = 8 << 20  # of a segment, at a time


class Reclaimer:
    """Reclaims one tenant's segments. `idle` is set while no segment waits."""

    def __init__(
        self, tenant: str, catalog: Catalog, cold: ColdTier, budget: WriteBudget,
        tombstones: TombstoneWriter, counts: Counter[str], nbytes: Counter[str],
    ) -> None:  # fmt: skip
        self.idle = asyncio.Event()
        self.idle.set()
        self.counts = counts
        self.bytes = nbytes
        self._tenant = tenant
        self._catalog = catalog
        self._cold = cold
        self._budget = budget
        self._tombstones = tombstones
        self._queue: asyncio.Queue[tuple[SegmentStore, Segment]] = asyncio.Queue()
        self._memory = ReadMemory(cold.memory)
        self._clock = time.monotonic

    def reclaim(self, store: SegmentStore, segment: Segment) -> None:
        self._queue.put_nowait((store, segment))
        self.idle.clear()

    async def run(self) -> None:
        while True:
            store, segment = await self._queue.get()
            try:
                await self._copy_wanted(segment)
            except Exception:
                log.exception(
                    "cold: internal error while copying wanted blocks out of %s; it is reclaimed without "
                    "the rest", segment.path,
                )  # fmt: skip
            # Before the segment gets another epoch.
            self._tombstones.tombstone()
            self._catalog.segments.drop_segment(segment.number)
            store.release_segment(segment)
            if self._queue.empty():
                self.idle.set()

    async def _copy_wanted(self, segment: Segment) -> None:
        """Copy the blocks of a segment that were requested again and are only in it."""
        catalog = self._catalog
        found = catalog.segments.reclaim(segment.number, KEEP_MOST)
        blocks = list(found)
        at = 0
        while (
            at < len(blocks)
            and self._budget.second_chance_bytes > 0
            and self._cold.reader.is_on
            and self._cold.writer.is_on
        ):
            end, nbytes = at, 0
            while end < min(len(blocks), at + WRITE_BLOCKS) and nbytes < COPY_BYTES:
                nbytes += pages(StoredFrame.unpack(blocks[end][1]).payload_bytes)
                end += 1
            if not await self._copy(segment, blocks[at:end], nbytes):
                break
            at = end

    async def _copy(
        self, segment: Segment, framed: Sequence[tuple[int, bytes, bytes]], nbytes: int
    ) -> bool:
        """Copy these blocks out of a segment. False if there is no place for them, and thus for no others."""
        extent, offset = self._memory.of(nbytes), 0
        # Some blocks may be forgotten, and their ids given to other blocks.
        named = self._catalog.segments.described_in(
            array("I", (number for number, _, _ in framed)).tobytes(), segment.number
        )
        reading, writing, encoded, before = [], {}, {}, {}
        for number, packed, digest in framed:
            if plan := named.get(number):
                stored = StoredFrame.unpack(packed)
                size = stored.payload_bytes
                reading.append(
                    Incoming(
                        number, stored.segment, stored.page, stored.header_pages, size, digest, extent,
                        offset, size,
                    )
                )  # fmt: skip
                writing[number] = outgoing(number, plan, (extent, offset), stored.is_lossy)
                before[number] = packed
                if stored.codec:
                    encoded[number] = stored.codec
                offset += pages(size)
        if not reading:
            return True
        if not (
            await self._read_all(reading, writing)
            and await self._attach_headers(reading, writing, encoded)
        ):
            self._memory.leave()
            return False

        def settle(landed: FramedBlocks, _: list[int]) -> None:
            self._rescued(segment, landed, before)

        blocks, deadline = list(writing.values()), 0.0
        while blocks and await describe(self._cold.writer, self._tenant, blocks):
            there = set(
                array("I", self._catalog.blocks.store.still(ids_of(blocks), segment.number))
            )
            blocks = [block for block in blocks if block.id in there]
            if not blocks:
                break
            count, settled = begin(self._cold.writer, self._tenant, blocks, settle)
            blocks = blocks[count:]
            if count:
                if not await in_time(settled):
                    self._memory.leave()
                    return False
                deadline = 0.0
            else:
                attached = self._cold.directories.attached
                on = [one.stores[self._tenant].log for one in attached if one.disk.writes.is_on]
                now = self._clock()
                # Not fewer seconds than a disk gets for a write: a segment whose disk is slow is not begun
                # sooner.
                deadline = deadline or now + SETTLE_S
                # Without places, only the release of this segment makes one.
                if now >= deadline or not any(log.has_place for log in on):
                    break
                await asyncio.sleep(BEGIN_S)
        return not blocks

    async def _read_all(self, blocks: Sequence[Incoming], wanted: dict[int, Outgoing]) -> bool:
        """Read these blocks; remove those that are damaged from `wanted`. False if the disk hangs."""
        left = len(blocks)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def ended(block: Incoming, code: int) -> None:
            nonlocal left
            left -= 1
            if code:
                del wanted[block.id]
            if not left and not done.done():
                done.set_result(None)

        self._cold.reader.read(blocks, ended)
        return bool((await asyncio.wait([done], timeout=SETTLE_S))[0])

    async def _attach_headers(
        self, blocks: Sequence[Incoming], wanted: dict[int, Outgoing], encoded: dict[int, int]
    ) -> bool:
        """Read the headers of encoded frames, so that they are copied without decoding; remove frames with
        damaged headers from `wanted`. False if the disk hangs."""
        left = [block for block in blocks if block.id in encoded and block.id in wanted]
        if not left:
            return True
        waiting = {block.id for block in left}
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def ended(block: Incoming, code: int, text: bytes) -> None:
            one = wanted.pop(block.id)
            if not code and (header := _header_of(text, one, block)):
                wanted[block.id] = replace(
                    one, codec=encoded[block.id], header=header, payload_bytes=block.payload_bytes,
                    encoded_at=(block.extent, block.offset),
                )  # fmt: skip
            waiting.discard(block.id)
            if not waiting and not done.done():
                done.set_result(None)

        for block in left:
            self._cold.reader.read_header(block, partial(ended, block))
        return bool((await asyncio.wait([done], timeout=SETTLE_S))[0])

    def _rescued(self, segment: Segment, landed: FramedBlocks, before: dict[int, bytes]) -> None:
        nbytes, numbers = landed.nbytes, array("I", landed.ids)
        self._budget.spend_again(nbytes)
        self.counts["written_again"] += len(numbers)
        self.bytes["written_again"] += nbytes
        for number, after, _ in landed:
            self._tombstones.copied(segment, before[number][:PLACE_BYTES], after[:PLACE_BYTES])
        frames = b"".join(before[number] for number in numbers)
        self._catalog.segments.rescued(landed.ids, frames, landed.frames)


def _header_of(text: bytes, block: Outgoing, read: Incoming) -> bytes:
    """Return the header of this frame, to be stamped again; empty if it is damaged or of another frame."""
    try:
        one = frame.decode(text)
    except FrameError:
        return b""
    name = frame.Identity(block.space, block.group, block.shard, block.key)
    same = one.identity == name and one.payload_digest == read.digest
    return text if same and one.payload_bytes == read.payload_bytes else b""
