"""Segments that are to be used again: what of them was wanted is written again, elsewhere, the rest goes."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from kvtier.catalog import Catalog
from kvtier.catalog.cold import Rescue
from kvtier.codec import frame
from kvtier.codec.frame import pages
from kvtier.errors import FrameError
from kvtier_daemon.moving.blocks import (
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
from kvtier_daemon.moving.budget import Budget
from kvtier_daemon.moving.forgetting import Forgetting
from kvtier_daemon.tiers.batch import Coded, Landed, Outgoing
from kvtier_daemon.tiers.cold import ColdTier, Incoming
from kvtier_daemon.tiers.log import Segment
from kvtier_daemon.tiers.shelf import Shelf

log = logging.getLogger(__name__)

SECOND_CHANCE = 0.25  # of what is written may be written a second time
SECOND_CHANCE_MOST = 4 << 30
KEEP_MOST = 1 << 20
COPY_BYTES = 8 << 20  # of a segment that leaves, at a time


class Leaving:
    """One tenant's. `over` is set while nothing is to be brought away."""

    def __init__(
        self,
        tenant: str,
        catalog: Catalog,
        cold: ColdTier,
        budget: Budget,
        forgetting: Forgetting,
        counts: Counter[str],
        nbytes: Counter[str],
    ) -> None:
        self.over = asyncio.Event()
        self.over.set()
        self.again_bytes = 0.0  # that may be written a second time
        self.counts = counts
        self.bytes = nbytes
        self._tenant = tenant
        self._catalog = catalog
        self._cold = cold
        self._budget = budget
        self._forgetting = forgetting
        self._leaving: asyncio.Queue[tuple[Shelf, Segment]] = asyncio.Queue()
        self._bounce: tuple[int, int] | None = None

    def wrote(self, nbytes: int) -> None:
        """So much was written a first time."""
        self.again_bytes = min(self.again_bytes + SECOND_CHANCE * nbytes, SECOND_CHANCE_MOST)

    def leave(self, shelf: Shelf, segment: Segment) -> None:
        """This segment is to be used again, once what deserves it was brought away."""
        self._leaving.put_nowait((shelf, segment))
        self.over.clear()

    async def run(self) -> None:
        """Bring away, for as long as the daemon lives."""
        while True:
            shelf, segment = await self._leaving.get()
            try:
                await self._bring_away(segment)
            except Exception:
                log.exception("cold: %s could not be brought away", segment.path)
            # As long as the segment has its epoch.
            self._forgetting.bury()
            self._catalog.cold.drop_segment(segment.number)
            self._cold.left(shelf, segment)
            if self._leaving.empty():
                self.over.set()

    async def _bring_away(self, segment: Segment) -> None:
        """Write again, elsewhere, what was wanted since it was written and is nowhere else."""
        cold = self._catalog.cold
        found = cold.reclaim(segment.number, KEEP_MOST)
        frames = [
            found.frames[at : at + FRAME.size] for at in range(0, len(found.frames), FRAME.size)
        ]
        at = 0
        while at < len(frames) and self.again_bytes > 0 and self._cold.is_on and self._cold.takes:
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
        """Write these frames of a segment that leaves again; False if there is no place for them, as there
        will be none for others."""
        ids, extent, offset = array("I", found.ids), self._bounce_of(nbytes), 0
        # Some may be gone by now, and their ids others'.
        named = self._catalog.cold.described_in(
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
            and await self._as_they_are(reading, writing, encoded)
        ):
            self._bounce = None  # the disk's until it gives it back
            return False
        before = dict(zip((ids[at] for at in which), frames[which.start : which.stop], strict=True))

        def settle(landed: list[Landed], _: list[int]) -> None:
            for one in landed:
                self._rescued(segment, one, before[one.id])

        blocks, tries = list(writing.values()), 0
        while blocks and tries < BEGIN_TRIES and await describe(self._cold, self._tenant, blocks):
            there = set(array("I", self._catalog.cold.still(ids_of(blocks), segment.number)))
            blocks = [block for block in blocks if block.id in there]
            if not blocks:
                break
            count, settled = begin(self._cold, self._tenant, blocks, settle)
            blocks = blocks[count:]
            if count:
                if not await in_time(settled):
                    self._bounce = None
                    return False
            else:
                if not any(shelf.log.has_place for shelf in self._cold.shelves[self._tenant]):
                    break  # it is this segment's leaving that makes a place, for these and all others
                tries += 1
                await asyncio.sleep(BEGIN_S)
        return not blocks

    async def _read_all(self, blocks: Sequence[Incoming], wanted: dict[int, Outgoing]) -> bool:
        """Read these; take those that are not good out of what is wanted. Who asks for them next will be
        told. False if the disk hangs."""
        left = len(blocks)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def over(block: Incoming, code: int) -> None:
            nonlocal left
            left -= 1
            if code:
                del wanted[block.id]
            if not left and not done.done():
                done.set_result(None)

        self._cold.read(blocks, over)
        return bool((await asyncio.wait([done], timeout=SETTLE_S))[0])

    async def _as_they_are(
        self, blocks: Sequence[Incoming], wanted: dict[int, Outgoing], encoded: dict[int, int]
    ) -> bool:
        """Have the encoded ones written again as they are, by what their headers say; take those out whose
        headers are damaged. False if the disk hangs."""
        left = [block for block in blocks if block.id in encoded and block.id in wanted]
        if not left:
            return True
        waiting = {block.id for block in left}
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def over(block: Incoming, code: int, text: bytes) -> None:
            one = wanted.pop(block.id)
            if not code and (header := _header_of(text, one, block)):
                coded = Coded(
                    header, encoded[block.id], block.payload_bytes, block.extent, block.offset, _kept
                )  # fmt: skip
                wanted[block.id] = replace(one, coded=coded)
            waiting.discard(block.id)
            if not waiting and not done.done():
                done.set_result(None)

        for block in left:
            self._cold.read_header(block, partial(over, block))
        return bool((await asyncio.wait([done], timeout=SETTLE_S))[0])

    def _rescued(self, segment: Segment, one: Landed, before: bytes) -> None:
        nbytes = frame_bytes(one)
        self.again_bytes -= nbytes
        self._budget.spend(nbytes)
        self.counts["written_again"] += 1
        self.bytes["written_again"] += nbytes
        after = frame_of(one)
        self._forgetting.copied(segment, before[:PLACE_BYTES], after[:PLACE_BYTES])
        self._catalog.cold.rescued(array("I", [one.id]).tobytes(), before, after)

    def _bounce_of(self, nbytes: int) -> int:
        """Memory of our own, of so many bytes at least; its number with the cold tier."""
        if self._bounce is None or self._bounce[1] < nbytes:
            self._bounce = self._cold.room(nbytes)
        return self._bounce[0]


def _header_of(text: bytes, block: Outgoing, read: Incoming) -> bytes:
    """The header of this very frame, to be stamped anew; empty where it is another's, or damaged."""
    try:
        one = frame.decode(text)
    except FrameError:
        return b""
    name = frame.Identity(block.space, block.group, block.shard, block.key)
    same = one.identity == name and one.payload_digest == read.digest
    return text if same and one.payload_bytes == read.payload_bytes else b""


def _kept() -> None:
    """The memory that is read to is kept for the next ones."""
