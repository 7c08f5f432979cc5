"""Compresses blocks in memory, and decodes their frames into slots, in threads.

`catalog.compressed` decides which blocks have frames in memory, and `frame_memory` has the frames.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import mmap
import os
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from kvtier.frame import (
    DIGEST_BYTES,
    ELEMENTS,
    ENTRY,
    HEADER,
    NAMES,
    NAMES_AT,
    R32,
    RAW_DIGEST_AT,
    pages,
    stamp,
)
from kvtier_daemon.catalog import Catalog
from kvtier_daemon.catalog.blocks import DeferredPolicy
from kvtier_daemon.catalog.compressed import COOL_SHARE
from kvtier_daemon.catalog.spaces import IDENTITY
from kvtier_daemon.codec.choice import Average
from kvtier_daemon.planning import DiskLink
from kvtier_daemon.tiers.cold.coding_threads import CodingThreads, run_all
from kvtier_daemon.tiers.cold.encoder import THREADS_MOST, threads_here
from kvtier_daemon.tiers.cold.frame_memory import CompressedFrame, CompressedFrames
from kvtier_daemon.tiers.cold.frames import AllRead, Incoming, Outgoing, ids_of, outgoing, place_of
from kvtier_kernels import (
    FrameBatch,
    cpu_features,
    encode_frame,
    implementations,
    seal_frame,
)
from kvtier_kernels import Mapping as MappedExtent

log = logging.getLogger(__name__)

PLANES = 13  # no frame on disk has it


def codec_here(levels: Sequence[str], features: Mapping[str, object]) -> int:
    """The codec of frames in memory. `planes` is as small as `r32`, and decoded in less than half of the time
    by vectors and fast deposits of bits; without them, in up to ten times of it."""
    return PLANES if levels[0] != "scalar" and features["fast_pdep"] else R32


IN_MEMORY = codec_here(implementations("codec"), cpu_features())
GUESS_BYTES_S = 4e9  # decoded; assumed before the first read
PIECE_BYTES = 8 << 20  # of blocks that are compressed at once
PRESSURE = 3 / 4  # of the slots' memory, above which blocks are compressed
COOL_MOST = 2048  # blocks
CALM_S = 30.0  # after which as few blocks as before are compressed ahead
WORTH = 7 / 8  # a frame that is larger, relative to its block, is not kept
SKIP_AFTER = 16  # blocks of a kind in succession that are not worth it: others are not tried
TRY_S = 60.0  # until others are
KINDS_MOST = 4096
UNFIT_MOST = 65_536  # blocks
RATIO_BYTES = 64 << 20  # of blocks: older measurements have half of the weight
CHECK_S = 1.0
WAIT_S, PAUSE_S = 0.1, 0.02
CHUNK = 4  # blocks of a batch, for each thread that decodes it

ENDS = (errno.ECANCELED, 0, errno.EBADMSG)  # of a frame in a batch

MemoryFrame = tuple[int, bytes, int, memoryview | bytes, memoryview]  # as a batch takes it


class FrameThreads(CodingThreads):
    """The threads that compress and decode, for all tenants. It is the link and the lane of these reads."""

    is_on = True

    def __init__(self, mappings: Mapping[int, MappedExtent]) -> None:
        """Raises RuntimeError if there are no threads."""
        self.link = DiskLink(time.monotonic, GUESS_BYTES_S)
        self.reads = self
        self._mappings = mappings
        self.decoders = min(THREADS_MOST, len(os.sched_getaffinity(0)))
        super().__init__((threads_here(), "kvtier-compress"), (self.decoders, "kvtier-decompress"))

    def view(self, extent: int, offset: int, nbytes: int) -> memoryview:
        return memoryview(self._mappings[extent])[offset : offset + nbytes]

    def is_lost(self, extent: int) -> bool:
        """Whether a client has removed pages of the extent."""
        return self._mappings[extent].lost

    def encode(self, work: Callable[[], Any]) -> asyncio.Future[Any]:
        return self._submit(self._encoders, work)

    def read(self, blocks: Sequence[Incoming], done: AllRead) -> None:
        """Decode these frames into their slots; `done` gets some at a time, each with an errno or 0."""
        each = CHUNK * self.decoders
        for at in range(0, len(blocks), each):
            some = blocks[at : at + each]
            batch = FrameBatch([self._frame_of(block) for block in some])
            # The digest of a decoded block, which is that of the save, proves more than that of the payload.
            runs = [batch.run] * min(self.decoders, len(some))
            self._submit_all(self._decoders, runs, partial(self._have_read, some, batch, done))

    def _frame_of(self, block: Incoming) -> MemoryFrame:
        frame = block.compressed
        assert frame is not None
        slot = self.view(block.extent, block.offset, frame.block_bytes)
        if not _is_of(block, frame):
            return frame.element, b"", 0, b"", slot  # no frame at all
        if block.coding is not None:
            block.checksum = frame.raw_digest
        return frame.element, frame.header, frame.header_bytes, frame.payload(), slot

    def _have_read(
        self,
        blocks: Sequence[Incoming],
        batch: FrameBatch,
        done: AllRead,
        jobs: Sequence[Future[None]],
    ) -> None:
        """No thread decodes these now."""
        for job in jobs:
            if not job.cancelled() and (error := job.exception()):
                log.error("cold: cannot decode frames in memory; keeping them", exc_info=error)
        codes = [ENDS[end] for end in batch.ends()]
        lost = {extent for extent in {block.extent for block in blocks} if self.is_lost(extent)}
        try:
            done(
                blocks,
                [
                    errno.EFAULT if block.extent in lost else code
                    for block, code in zip(blocks, codes, strict=True)
                ],
            )
        except Exception:
            log.exception("cold: internal error after a read of compressed blocks")


class Compressor:
    """Compresses the blocks of one tenant that leave their slots next, in the background. `extents` has the
    cold tier's numbers of its extents; `blank` returns an unsealed header."""

    def __init__(
        self, catalog: Catalog, frames: CompressedFrames, threads: FrameThreads, quota_bytes: int,
        extents: Sequence[int], blank: Callable[[Outgoing], bytearray],
    ) -> None:  # fmt: skip
        self.frames = frames
        self._catalog = catalog
        self._threads = threads
        self._quota_bytes = quota_bytes
        self._extents = extents
        self._blank = blank
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        # How much more than usual is compressed ahead: requests take many slots at once.
        self._ahead = 1.0
        self._hasty_at = self._check_at = self._plan_at = 0.0
        # By the store's number of a space and the group: until when such blocks are not tried, and how many
        # were not worth it since one was.
        self._skips: dict[tuple[int, int], float] = {}
        self._unfit = Counter[tuple[int, int]]()
        self._ratio = Average(RATIO_BYTES, 1.0, 1.0)  # memory of frames by that of their blocks

    async def run(self) -> None:
        """Compress until the task is cancelled; then drop all frames. A failure disables nothing else."""
        self.frames.open(self._wake.set)
        try:
            await self._run()
        except Exception:
            log.exception("cold: compressed memory failed and is off until a restart")
        finally:
            await self.frames.close()

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            self._drop_away()
            await self._clear()
            while (blocks := self._plan()) and await self._compress(blocks):
                await self._clear()
            try:
                async with asyncio.timeout(WAIT_S):
                    await self._wake.wait()
            except TimeoutError:
                continue  # blocks may have got frames on disk
            await asyncio.sleep(PAUSE_S)

    async def _clear(self) -> None:
        """Give the memory of dropped frames to the system."""
        while self.frames.memory.clear():  # noqa: ASYNC110  # it waits for nothing
            await asyncio.sleep(0)

    def _drop_away(self) -> None:
        """Drop the frames of blocks that left their slots because an engine holds them, once in a while."""
        blocks, order, now = self._catalog.blocks, self.frames.order, self._loop.time()
        if not blocks.residency or now < self._check_at:
            return
        self._check_at = now + CHECK_S
        ids = array("I", order.paired).tobytes()
        away = array("I", blocks.store.clean(ids, in_memory=False))
        self.frames.counts["dropped"] += len(away)
        self.frames.drop(away)

    def _plan(self) -> list[Outgoing]:
        catalog, order = self._catalog, self.frames.order
        store, demotions, now = catalog.blocks.store, catalog.demotions, self._loop.time()
        if now < self._plan_at or store.counts()["bytes"]["ready"] < PRESSURE * self._quota_bytes:
            return []
        if isinstance(policy := catalog.blocks.policy, DeferredPolicy):
            policy.settle()
        cool = min(COOL_MOST, demotions.blocks_of(int(self._cool_bytes())))
        ids = store.clean(order.next_to_compress(cool), in_memory=True)
        limit, some = min(PIECE_BYTES, self.frames.capacity_bytes // 4), array("I")
        names = IDENTITY.iter_unpack(store.identities(ids))
        for one, (number, group, *_) in zip(array("I", ids), names, strict=True):
            space = catalog.spaces.at_index(number)
            if space.spec.dtype not in ELEMENTS or self._skips.get((number, group), 0.0) > now:
                continue
            limit -= space.block_bytes[group]
            if some and limit < 0:
                break
            some.append(one)
        if ids and not some:  # all are of kinds that are skipped: do not look at them all the time
            self._plan_at = now + CHECK_S
        packed = some.tobytes()
        plans = demotions.described(packed, store.slots(packed))
        blocks = [
            outgoing(one, plan, place_of(self._extents, plan.slot), False)
            for one, plan in zip(some, plans, strict=True)
        ]
        return [block for block in blocks if not self._threads.is_lost(block.extent)]

    def _cool_bytes(self) -> float:
        """How many bytes of the coldest blocks are to have frames: more after blocks left without one."""
        order, now = self.frames.order, self._loop.time()
        most = min(self._quota_bytes / 4, self.frames.capacity_bytes / 2)
        usual = min(most, max(COOL_SHARE * self._quota_bytes, PIECE_BYTES))
        if order.unprepared:
            self._ahead, self._hasty_at = min(2 * self._ahead, most / usual), now
        elif now - self._hasty_at > CALM_S:
            self._ahead, self._hasty_at = max(1.0, self._ahead / 2), now
        order.unprepared = 0
        return self._ahead * usual

    async def _compress(self, blocks: list[Outgoing]) -> bool:
        """Make frames of these blocks, unless those in memory are worth more. Return whether any was made."""
        each = int(self._ratio.value * max(block.block_bytes for block in blocks))
        coming = [block.id for block in blocks]
        needless = self.frames.make_room(each * len(blocks), coming, each)
        self.frames.memory.clear()  # what was dropped for these
        room = (self.frames.capacity_bytes - self.frames.used_bytes) // max(1, each)
        blocks = [block for block in blocks if block.id not in needless][: max(0, room)]
        if not blocks:
            return False
        places = []
        try:
            for block in blocks:
                places.append(self.frames.memory.take(block.block_bytes))
        except OSError:
            for block, place in zip(blocks, places, strict=False):
                self.frames.memory.give(place, block.block_bytes)
            raise
        # Their slots must not get other blocks while a thread reads them.
        self._catalog.blocks.hold_for_write(ids_of(blocks))
        try:
            jobs = [
                partial(
                    _encode, block, self._header(block),
                    self._threads.view(block.extent, block.offset, block.block_bytes), place,
                )
                for block, place in zip(blocks, places, strict=True)
            ]  # fmt: skip
            encoding = self._threads.encode(partial(run_all, jobs))
        except BaseException:
            self._keep(blocks, places, [(0, b"", b"")] * len(blocks), [])
            self._catalog.blocks.end_write(ids_of(blocks))
            raise
        made = list[bool]()
        # In a callback, because a thread reads the slots even if this task is cancelled.
        encoding.add_done_callback(partial(self._have_encoded, blocks, places, made))
        await asyncio.wait([encoding])
        return any(made)

    def _header(self, block: Outgoing) -> bytearray:
        header = self._blank(block)
        stamp(header, block.key, block.parent, 0, 0)
        return header

    def _have_encoded(
        self, blocks: Sequence[Outgoing], places: Sequence[tuple[mmap.mmap, int]], made: list[bool],
        encoding: asyncio.Future[list[tuple[int, bytes, bytes]]],
    ) -> None:  # fmt: skip
        """Keep the frames of blocks that still exist, and are worth it."""
        found: list[tuple[int, bytes, bytes]] = []
        if not encoding.cancelled():
            if error := encoding.exception():
                log.error("cold: internal error while compressing blocks", exc_info=error)
            else:
                found = encoding.result()
        try:
            self._keep(blocks, places, found or [(0, b"", b"")] * len(blocks), made)
        finally:
            self._catalog.blocks.end_write(ids_of(blocks))

    def _keep(
        self, blocks: Sequence[Outgoing], places: Sequence[tuple[mmap.mmap, int]],
        found: Sequence[tuple[int, bytes, bytes]], made: list[bool],
    ) -> None:  # fmt: skip
        store, memory, ids = self._catalog.blocks.store, self.frames.memory, ids_of(blocks)
        there = set(array("I", store.clean(ids, in_memory=True)))
        names = IDENTITY.iter_unpack(store.identities(ids))
        for block, place, name, one in zip(blocks, places, names, found, strict=True):
            nbytes, header, digest = one
            if nbytes and not digest and block.id in there:
                self._note_unfit(block.id, (name[0], name[1]))
            if not digest or block.id not in there or not self.frames.is_open:
                memory.give(place, block.block_bytes)
                continue
            space, group, shard, _, key, _ = name
            count = HEADER.unpack_from(header)[14]
            frame = CompressedFrame(
                block.id, (space, group, shard, key), block.block_bytes, ELEMENTS[block.spec.dtype],
                header[: HEADER.size + count * ENTRY.size], len(header), nbytes,
                header[RAW_DIGEST_AT : RAW_DIGEST_AT + DIGEST_BYTES], place,
            )  # fmt: skip
            self._unfit.pop((space, group), None)
            self._ratio.note(frame.used_bytes, frame.block_bytes)
            memory.trim(place, block.block_bytes, nbytes)
            if self.frames.add(frame):
                made.append(True)
            else:
                memory.give(place, block.block_bytes)
        if not self.frames.is_open:  # no task does it
            memory.clear()

    def _note_unfit(self, one: int, kind: tuple[int, int]) -> None:
        unfit = self.frames.order.unfit
        self.frames.counts["not_worth"] += one not in unfit
        if len(unfit) >= UNFIT_MOST:
            unfit.clear()
        unfit.add(one)
        self._unfit[kind] += 1
        if self._unfit[kind] >= SKIP_AFTER:
            self._skips[kind] = self._loop.time() + TRY_S
            del self._unfit[kind]
        for kinds in (self._skips, self._unfit):
            if len(kinds) > KINDS_MOST:
                kinds.clear()


def _is_of(block: Incoming, frame: CompressedFrame) -> bool:
    """Whether the frame is that of the block. Without `coding` the digest on disk is the block's."""
    key, _ = NAMES.unpack_from(frame.header, NAMES_AT)
    return key == frame.name[-1] and (block.coding is not None or block.digest == frame.raw_digest)


def _encode(
    block: Outgoing, header: bytearray, source: memoryview, place: tuple[mmap.mmap, int]
) -> tuple[int, bytes, bytes]:
    """Encode the block into its piece. Return the size of the payload, the header, and the digest of the
    payload; no digest if the frame is not worth its memory."""
    memory, at = place
    into = memoryview(memory)[at : at + block.block_bytes]
    nbytes = encode_frame(IN_MEMORY, ELEMENTS[block.spec.dtype], header, source, into)
    if pages(nbytes) > WORTH * block.block_bytes:
        return nbytes, b"", b""
    digest = seal_frame(header, into[:nbytes])
    return nbytes, bytes(header), digest
