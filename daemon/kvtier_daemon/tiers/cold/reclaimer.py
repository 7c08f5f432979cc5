"""Reclaims segments: copies the blocks that were requested again to the open segment, then releases the
segment."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from kvtier.errors import FrameError
from kvtier_daemon.catalog import Catalog
from kvtier_daemon.catalog.segment_frames import Rescue
from kvtier_daemon.codec import frame
from kvtier_daemon.codec.frame import pages
from kvtier_daemon.tiers.cold.frames import (
    BEGIN_S,
    BEGIN_TRIES,
    CODEC_AT,
    FLAGS_AT,
    FRAME,
    PLACE_BYTES,
    SETTLE_S,
    WRITE_BLOCKS,
    begin,
    describe,
    frame_bytes,
    frame_of,
    ids_of,
    in_time,
    incoming,
    outgoing,
)
from kvtier_daemon.tiers.cold.segment_log import Segment
from kvtier_daemon.tiers.cold.segment_store import SegmentStore
from kvtier_daemon.tiers.cold.tier import ColdTier
from kvtier_daemon.tiers.cold.tombstones import TombstoneWriter
from kvtier_daemon.tiers.cold.transfers import Coded, Incoming, Landed, Outgoing
from kvtier_daemon.tiers.cold.write_budget import WriteBudget

log = logging.getLogger(__name__)

SECOND_CHANCE = 0.25  # of what is written may be written a second time
SECOND_CHANCE_MOST = 4 << 30
KEEP_MOST = 1 << 20
COPY_BYTES = 8 << 20  # of a segment that leaves, at a time


class Reclaimer:
    """Reclaims one tenant's segments. `over` is set while no segment waits."""

    def __init__(
        self,
        tenant: str,
        catalog: Catalog,
        cold: ColdTier,
        budget: WriteBudget,
        forgetting: TombstoneWriter,
        counts: Counter[str],
        nbytes: Counter[str],
    ) -> None:
        self.over = asyncio.Event()
        self.over.set()
        self.second_chance_bytes = 0.0  # that may be written a second time
        self.counts = counts
        self.bytes = nbytes
        self._tenant = tenant
        self._catalog = catalog
        self._cold = cold
        self._budget = budget
        self._tombstones = forgetting
        self._queue: asyncio.Queue[tuple[SegmentStore, Segment]] = asyncio.Queue()
        self._copy_memory: tuple[int, int] | None = None

    def wrote(self, nbytes: int) -> None:
        """Note this many bytes of first writes: a part of them may be copied."""
        self.second_chance_bytes = min(
            self.second_chance_bytes + SECOND_CHANCE * nbytes, SECOND_CHANCE_MOST
        )

    def reclaim(self, store: SegmentStore, segment: Segment) -> None:
        """Queue this segment."""
        self._queue.put_nowait((store, segment))
        self.over.clear()

    async def run(self) -> None:
        """Reclaim queued segments until the task is cancelled."""
        while True:
            store, segment = await self._queue.get()
            try:
                await self._copy_wanted(segment)
            except Exception:
                log.exception(
                    "cold: internal error while copying wanted blocks out of %s; it "
                    "is reclaimed without the rest",
                    segment.path,
                )
            # As long as the segment has its epoch.
            self._tombstones.tombstone()
            self._catalog.segments.drop_segment(segment.number)
            store.release_segment(segment)
            if self._queue.empty():
                self.over.set()

    async def _copy_wanted(self, segment: Segment) -> None:
        """Copy the blocks of a segment that were requested again and are only in it."""
        catalog = self._catalog
        found = catalog.segments.reclaim(segment.number, KEEP_MOST)
        frames = [
            found.frames[at : at + FRAME.size] for at in range(0, len(found.frames), FRAME.size)
        ]
        at = 0
        while (
            at < len(frames)
            and self.second_chance_bytes > 0
            and self._cold.reader.is_on
            and self._cold.writer.is_on
        ):
            count, nbytes = 0, 0
            while (
                at + count < len(frames)
                and count < WRITE_BLOCKS
                and (not count or nbytes < COPY_BYTES)
            ):
                nbytes += pages(FRAME.unpack(frames[at + count])[2])
                count += 1
            if not await self._copy(segment, found, frames, range(at, at + count), nbytes):
                break
            at += count

    async def _copy(
        self,
        segment: Segment,
        found: Rescue,
        frames: Sequence[bytes],
        which: range,
        nbytes: int,
    ) -> bool:
        """Copy these frames of a segment; False if there is no place for them, and so for no others."""
        ids, extent, offset = array("I", found.ids), self._copy_memory_of(nbytes), 0
        # Some may be gone by now, and their ids others'.
        named = self._catalog.segments.described_in(
            ids[which.start : which.stop].tobytes(), segment.number
        )
        reading, writing, encoded = [], {}, {}
        for at in which:
            if block := named.get(ids[at]):
                place = (extent, offset)
                one = incoming(ids[at], found.frames, found.digests, at, place)
                reading.append(one)
                lossy = bool(frames[at][FLAGS_AT] & frame.LOSSY)
                writing[ids[at]] = outgoing(ids[at], block, place, lossy)
                if codec := frames[at][CODEC_AT]:
                    encoded[ids[at]] = codec
                offset += pages(one.payload_bytes)
        if not reading:
            return True
        if not (
            await self._read_all(reading, writing)
            and await self._attach_headers(reading, writing, encoded)
        ):
            self._copy_memory = None  # the disk's until it gives it back
            return False
        before = dict(zip((ids[at] for at in which), frames[which.start : which.stop], strict=True))

        def settle(landed: list[Landed], _: list[int]) -> None:
            for one in landed:
                self._rescued(segment, one, before[one.id])

        blocks, tries = list(writing.values()), 0
        while blocks and tries < BEGIN_TRIES and await describe(self._cold, self._tenant, blocks):
            there = set(array("I", self._catalog.segments.still(ids_of(blocks), segment.number)))
            blocks = [block for block in blocks if block.id in there]
            if not blocks:
                break
            count, settled = begin(self._cold, self._tenant, blocks, settle)
            blocks = blocks[count:]
            if count:
                if not await in_time(settled):
                    self._copy_memory = None
                    return False
            else:
                attached = self._cold.directories.attached
                if not any(one.stores[self._tenant].log.has_place for one in attached):
                    break  # it is this segment's leaving that makes a place, for these and all others
                tries += 1
                await asyncio.sleep(BEGIN_S)
        return not blocks

    async def _read_all(self, blocks: Sequence[Incoming], wanted: dict[int, Outgoing]) -> bool:
        """Read these blocks; remove those that are damaged from `wanted`. False if the disk hangs."""
        left = len(blocks)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def over(block: Incoming, code: int) -> None:
            nonlocal left
            left -= 1
            if code:
                del wanted[block.id]
            if not left and not done.done():
                done.set_result(None)

        self._cold.reader.read(blocks, over)
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

        def over(block: Incoming, code: int, text: bytes) -> None:
            one = wanted.pop(block.id)
            if not code and (header := _header_of(text, one, block)):
                coded = Coded(
                    header, encoded[block.id], block.payload_bytes, block.extent, block.offset, _keep_memory
                )  # fmt: skip
                wanted[block.id] = replace(one, coded=coded)
            waiting.discard(block.id)
            if not waiting and not done.done():
                done.set_result(None)

        for block in left:
            self._cold.reader.read_header(block, partial(over, block))
        return bool((await asyncio.wait([done], timeout=SETTLE_S))[0])

    def _rescued(self, segment: Segment, one: Landed, before: bytes) -> None:
        nbytes = frame_bytes(one)
        self.second_chance_bytes -= nbytes
        self._budget.spend(nbytes)
        self.counts["written_again"] += 1
        self.bytes["written_again"] += nbytes
        after = frame_of(one)
        self._tombstones.copied(segment, before[:PLACE_BYTES], after[:PLACE_BYTES])
        self._catalog.segments.rescued(array("I", [one.id]).tobytes(), before, after)

    def _copy_memory_of(self, nbytes: int) -> int:
        """Return the number of memory outside the arena with at least this size."""
        if self._copy_memory is None or self._copy_memory[1] < nbytes:
            self._copy_memory = self._cold.memory.allocate(nbytes)
        return self._copy_memory[0]


def _header_of(text: bytes, block: Outgoing, read: Incoming) -> bytes:
    """Return the header of this frame, to be stamped again; empty if it is damaged or of another frame."""
    try:
        one = frame.decode(text)
    except FrameError:
        return b""
    name = frame.Identity(block.space, block.group, block.shard, block.key)
    same = one.identity == name and one.payload_digest == read.digest
    return text if same and one.payload_bytes == read.payload_bytes else b""


def _keep_memory() -> None:
    """The memory that is read to is kept for the next ones."""
