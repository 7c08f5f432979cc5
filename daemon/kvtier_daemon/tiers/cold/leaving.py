"""The segments that are reused next, and copies of their blocks for another tier.

A copy delays the reuse of a segment as little as the scrub does: no copy begins after the segment was queued
for reuse, and few are read at once, after all urgent reads.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping, Sequence
from typing import Final

from kvtier.frame import ENCRYPTED, RAW, pages
from kvtier_daemon.catalog import Catalog
from kvtier_daemon.catalog.demotion import WritePlan
from kvtier_daemon.catalog.frames import FramedBlocks, StoredFrame
from kvtier_daemon.tiers.base import CopiedBlock
from kvtier_daemon.tiers.cold.attached import ReadMemory
from kvtier_daemon.tiers.cold.frames import SETTLE_S, CipherNow, Decoding, Incoming
from kvtier_daemon.tiers.cold.segment import Head
from kvtier_daemon.tiers.cold.segment_log import Segment, Stage
from kvtier_daemon.tiers.cold.segment_store import SegmentStore
from kvtier_daemon.tiers.cold.tier import ColdTier

PAUSE_S: Final = 0.02  # while requests wait for reads
PATIENCE_S: Final = 2.0  # a disk that is always busy still reads a few blocks


class LeavingSegments:
    """The `TierLeaving` of one tenant."""

    def __init__(self, tenant: str, catalog: Catalog, cold: ColdTier, cipher: CipherNow) -> None:
        self.catalog = catalog
        self.cold = cold
        self.cipher = cipher
        self._tenant = tenant
        self.memory = ReadMemory(cold.memory)

    def next(self) -> Sequence[LeavingSegment]:
        stores = (one.stores[self._tenant] for one in self.cold.directories.attached)
        return [
            LeavingSegment(self, store, segment, segment.head)
            for store in stores
            for segment in store.leaves_next()
            if segment.head is not None
        ]


class LeavingSegment:
    """The `LeavingBlocks` of a sealed segment."""

    def __init__(
        self, of: LeavingSegments, store: SegmentStore, segment: Segment, head: Head
    ) -> None:
        self._of = of
        self._store = store
        self._segment = segment
        self._head = head

    @property
    def name(self) -> tuple[int, int]:
        return self._segment.number, self._head.epoch

    @property
    def is_there(self) -> bool:
        segment = self._segment
        is_sealed = segment.head is self._head and segment.stage is Stage.SEALED
        return is_sealed and self._store.disk.reads.is_on and not self._of.cold.reader.is_shut

    def ids(self, used: bool) -> bytes:
        return self._of.catalog.segments.alone_in(self._segment.number, used)

    def plans(self, ids: bytes) -> dict[int, WritePlan]:
        catalog, number = self._of.catalog, self._segment.number
        if not self.is_there:
            return {}
        found = catalog.segments.described_in(ids, number)  # others may have been forgotten since
        lossy = array("I", catalog.blocks.store.lossy(array("I", found).tobytes()))
        for one in lossy:
            del found[one]
        return found

    async def read(self, plans: Mapping[int, WritePlan]) -> dict[int, CopiedBlock]:
        disk, waited_s = self._store.disk, 0.0
        while disk.worker.queued[0] and waited_s < PATIENCE_S:
            await asyncio.sleep(PAUSE_S)
            waited_s += PAUSE_S
        blocks = self._incoming(plans)
        if not blocks:
            return {}
        left, good = len(blocks), list[Incoming]()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def ended(block: Incoming, code: int) -> None:
            nonlocal left
            left -= 1
            if not code:
                good.append(block)
            if not left and not done.done():
                done.set_result(None)

        self._of.cold.reader.read(blocks, ended, urgent=False)
        try:
            await asyncio.wait([done], timeout=SETTLE_S)
        finally:
            if not done.done():
                self._of.memory.leave()
        if not done.done():
            return {}
        still = self._of.catalog.segments.described_in(
            array("I", (block.id for block in good)).tobytes(), self._segment.number
        )
        memory = memoryview(self._of.cold.memory.mappings[blocks[0].extent])
        return {
            block.id: CopiedBlock(
                memory[block.offset : block.offset + _block_bytes(plans[block.id])],
                block.checksum if block.coding is not None else block.digest,
            )
            for block in good
            if block.id in still and still[block.id].identity == plans[block.id].identity
        }

    def _incoming(self, plans: Mapping[int, WritePlan]) -> list[Incoming]:
        """Those of these blocks that are still there, each with a place in memory."""
        if not self.is_there:
            return []
        store, number = self._of.catalog.blocks.store, self._segment.number
        ids = store.still(array("I", plans).tobytes(), number)
        memory = self._of.memory.of(sum(pages(_block_bytes(one)) for one in plans.values()))
        offset, blocks = 0, list[Incoming]()
        named = self._of.catalog.segments.described_in(ids, number)
        for one, packed, digest in FramedBlocks(ids, *store.frames(ids)):
            plan, stored = plans[one], StoredFrame.unpack(packed)
            if named[one].identity != plan.identity or stored.is_lossy:
                continue
            coding, nbytes = None, _block_bytes(plan)
            if stored.codec != RAW:
                cipher = self._of.cipher() if stored.codec & ENCRYPTED else None
                coding = Decoding(
                    stored.codec, plan.space.spec, nbytes, None, cipher, plan.identity
                )  # fmt: skip
            blocks.append(
                Incoming(
                    one, stored.segment, stored.page, stored.header_pages, stored.payload_bytes, digest,
                    memory, offset, stored.payload_bytes, coding,
                )
            )  # fmt: skip
            offset += pages(nbytes)
        return blocks


def _block_bytes(plan: WritePlan) -> int:
    return plan.space.block_bytes[plan.identity.group]
