"""The cold tier: blocks in segment files on disks.

The event loop plans, and native workers do the I/O: no call here waits for a disk. A block is read directly
into its slot, and is verified against the digest of the save; writes alternate among the directories.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from kvtier.errors import TierError
from kvtier.frame import ELEMENTS, ENCRYPTED, PAGE, RAW
from kvtier.layout import KvSpec
from kvtier_daemon.codec.table import BY_NUMBER
from kvtier_daemon.planning import DiskLink
from kvtier_daemon.planning.read_order import ReadSchedule
from kvtier_daemon.tiers.cold.attached import AttachedDirectories, AttachedDirectory, StoreOptions
from kvtier_daemon.tiers.cold.compressor import FrameThreads
from kvtier_daemon.tiers.cold.directory import ColdDirectory
from kvtier_daemon.tiers.cold.disk import BENIGN, HANGS_S, Callback, DirectoryDisk
from kvtier_daemon.tiers.cold.encoder import EncodeBuffer, Encoder, threads_here
from kvtier_daemon.tiers.cold.frames import LINK, AllRead, Decoding, Incoming, Outgoing, Read, Wrote
from kvtier_daemon.tiers.cold.read_queue import ReadQueue
from kvtier_daemon.tiers.cold.segment_log import Segment, Stage
from kvtier_daemon.tiers.cold.segment_store import SegmentStore, SegmentTable
from kvtier_kernels import FrameKeys, Recipe
from kvtier_kernels import Mapping as MappedExtent

MOST_UNREADABLE = MOST_KINDS = 4096
ERASED_AT_ONCE = 8
NOWHERE: frozenset[int] = frozenset()


class FrameReader:
    """Reads frames. A segment is not reused while one of its frames is read."""

    def __init__(
        self, attached: Sequence[AttachedDirectory], table: SegmentTable,
        mappings: Mapping[int, MappedExtent], coding: Encoder, memory: FrameThreads | None = None,
    ) -> None:  # fmt: skip
        self.is_shut = False
        self._memory = memory
        self._attached = attached
        self._table = table
        self._mappings = mappings
        self._coding = coding
        # By epoch and page: frames whose read failed, and the number of good reads of the disk at that time.
        self._unreadable_once: dict[tuple[int, int], int] = {}

    @property
    def is_on(self) -> bool:
        """Whether blocks can be read from any disk. If not, no block is forgotten."""
        return not self.is_shut and any(one.disk.reads.is_on for one in self._attached)

    def bandwidths(self) -> list[float]:
        """Return the recent bandwidth of each disk; 0 if it is unknown."""
        return [one.disk.bandwidth.value for one in self._attached]

    def source_of(self, segment: int) -> DirectoryDisk | FrameThreads:
        if segment == LINK:
            assert self._memory is not None
            return self._memory
        return self._table.stores[segment].disk

    def hold(self, segment: int, blocks: int) -> None:
        """Keep this segment from being reused until `release` was called for this many of its blocks."""
        self._table.segments[segment].reading += blocks

    def release(self, block: Incoming) -> None:
        segment = self._table.segments[block.segment]
        segment.reading -= 1
        if segment.stage is Stage.LEAVING:
            self._table.stores[block.segment].free_if_unused(segment)

    def decode(self, blocks: Sequence[Incoming], done: AllRead) -> None:
        """Decode frames in memory into their slots; `done` gets some at a time, each with an errno or 0."""
        assert self._memory is not None
        self._memory.read(blocks, done)

    def read(self, blocks: Iterable[Incoming], done: Read, urgent: bool = True) -> None:
        """Read blocks into their slots; `done` gets each with an errno or 0, EBADMSG for a wrong digest."""
        raw: dict[DirectoryDisk, bytearray] = {}
        encoded: dict[DirectoryDisk, tuple[bytearray, list[Recipe], list[FrameKeys]]] = {}
        for block in blocks:
            segment = self._table.segments[block.segment]
            store = self._table.stores[block.segment]
            segment.reading += 1
            over = self._have_read(store, segment, block, done)
            if block.coding is not None:
                ops, recipes, keys = encoded.setdefault(store.disk, (bytearray(), [], []))
                ops += self._read_encoded(
                    store.disk, segment, block, block.coding, recipes, keys, urgent, over
                )
                continue
            raw.setdefault(store.disk, bytearray()).extend(
                store.disk.read_op(
                    segment.fd, (block.page + block.header_pages) * PAGE, block.payload_bytes,
                    block.extent, block.offset, block.digest, urgent, over,
                )
            )  # fmt: skip
        for disk, ops in raw.items():
            disk.worker.read(ops)
        for disk, (ops, recipes, keys) in encoded.items():
            disk.worker.read_frames(ops, recipes, keys)

    def _read_encoded(
        self, disk: DirectoryDisk, segment: Segment, block: Incoming, how: Decoding, recipes: list[Recipe],
        keys: list[FrameKeys], urgent: bool, over: Callback,
    ) -> bytes:  # fmt: skip
        """Return the operation that reads and decodes this frame in the worker. Empty if a thread of the
        daemon decodes it: then the read is started here."""
        at, header_bytes = block.page * PAGE, block.header_pages * PAGE
        element = ELEMENTS.get(how.spec.dtype)
        number = how.codec & ~ENCRYPTED
        codec = BY_NUMBER.get(number)  # None for a calibrated codec, which `how` has
        if number == RAW:
            element = 0  # nothing is decoded
        if (codec is None or codec.native) and element is not None:
            recipe = how.lossy.recipe if how.lossy is not None else None
            if recipe is not None and recipe not in recipes:
                recipes.append(recipe)
            by = recipes.index(recipe) + 1 if recipe is not None else 0
            if how.cipher is not None and how.cipher.keys not in keys:
                keys.append(how.cipher.keys)
            opens = keys.index(how.cipher.keys) + 1 if how.cipher is not None else 0
            name = how.name.encode() if how.name is not None else b""
            sizes = (header_bytes, block.payload_bytes, how.block_bytes)
            return disk.encoded_op(
                segment.fd, at, sizes, block.extent, block.offset, block.digest, element, by, urgent, over,
                opens, name,
            )  # fmt: skip

        def have_read(code: int, text: memoryview | None) -> None:
            if code or text is None:
                over(code, None)
                return
            self._coding.decode(
                how, text, header_bytes, block.digest, block.extent, block.offset, over
            )

        disk.read_staged(segment.fd, at, header_bytes + block.payload_bytes, have_read, urgent)
        return b""

    def read_header(self, block: Incoming, done: Callable[[int, bytes], None]) -> None:
        """Read the header of a block's frame, after all urgent reads; `done` gets an errno or 0."""
        segment, store = self._table.segments[block.segment], self._table.stores[block.segment]
        segment.reading += 1

        def over(code: int, text: bytes | None) -> None:
            ended = self._have_read(store, segment, block, lambda _, code: done(code, text or b""))
            ended(code, None)

        at, nbytes = block.page * PAGE, block.header_pages * PAGE
        store.disk.read_text(segment.fd, at, nbytes, over)

    def _have_read(
        self, store: SegmentStore, segment: Segment, block: Incoming, done: Read
    ) -> Callback:
        def over(code: int, checksum: bytes | None) -> None:
            block.checksum = checksum or b""
            if not code and self._mappings[block.extent].lost:
                code = errno.EFAULT
            if code and code not in BENIGN:
                what = f"{segment.path} at {block.page * PAGE}: read failed"
                store.disk.reads.fault(what, code)
            unreadable = self._unreadable_once
            if (code or unreadable) and self._is_unreadable(store, segment, block, code):
                code = errno.ENODATA
            try:
                done(block, code)
            finally:
                self.release(block)

        return over

    def _is_unreadable(
        self, store: SegmentStore, segment: Segment, block: Incoming, code: int
    ) -> bool:
        """Whether the disk failed twice to read this frame and read others in between. A disk that fails all
        reads says nothing about its blocks."""
        place = (segment.head.epoch if segment.head else 0, block.page)
        before = self._unreadable_once.pop(place, None)
        if code != errno.EIO:
            return False
        if before is not None and store.disk.reads.good > before:
            return True
        if len(self._unreadable_once) < MOST_UNREADABLE:
            self._unreadable_once[place] = store.disk.reads.good if before is None else before
        return False


class BlockWriter:
    """Writes blocks to the directories in turn. `accepts` is False in a drain and after the end."""

    def __init__(
        self, attached: Sequence[AttachedDirectory], table: SegmentTable, schedule: ReadSchedule,
        segment_bytes: int, mappings: Mapping[int, MappedExtent],
    ) -> None:  # fmt: skip
        self.accepts = True
        self._attached = attached
        self._table = table
        self._schedule = schedule
        self._segment_bytes = segment_bytes
        self._mappings = mappings
        self._fits: dict[tuple[bytes, int], bool] = {}
        self._turn = 0

    @property
    def is_on(self) -> bool:
        """Whether anything can be written."""
        return self.accepts and any(one.disk.writes.is_on for one in self._attached)

    async def describe(self, tenant: str, space: bytes, spec: KvSpec) -> bool:
        """Make sure that a start finds the description of this space, whose frames are in a segment without a
        footer. False if no writable directory has it."""
        name, pending = (tenant, space), set[asyncio.Future[str]]()
        for one in self._attached:
            if name not in one.descriptions.on_disk:
                writing = one.descriptions.describe(tenant, space, spec)
                if writing is not None:
                    pending.add(writing)
            elif one.disk.writes.is_on:
                return True
        while pending:
            done, pending = await asyncio.wait(
                pending, timeout=HANGS_S, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                return False
            for one in self._attached:
                if name in one.descriptions.on_disk and one.disk.writes.is_on:
                    return True
        return False

    def write(self, tenant: str, blocks: Sequence[Outgoing], done: Wrote) -> int:
        """Start to write as many of the leading blocks as have a place now; return their number. `done` is
        called when their writes have ended. A block is written only where its space is described."""
        if not self.accepts:
            return 0
        spaces = {(tenant, block.space) for block in blocks}
        for _ in self._attached:
            self._turn += 1
            one = self._attached[self._turn % len(self._attached)]
            if not (one.disk.writes.is_on and spaces <= one.descriptions.on_disk):
                continue
            if count := one.stores[tenant].write(blocks, done):
                nbytes = sum(block.payload_bytes for block in blocks[:count])
                self._schedule.wrote(one.disk.link, nbytes)
                return count
        return 0

    def has_place(self, tenant: str) -> bool:
        """Whether a disk accepts a write now."""
        return self.accepts and any(
            one.disk.writes.is_on and one.stores[tenant].has_place() for one in self._attached
        )

    def capacity_bytes(self, tenant: str) -> int:
        """How many bytes the segments of a tenant may take."""
        return sum(one.stores[tenant].files.most_bytes for one in self._attached)

    def may_write(self) -> bool:
        """Whether a write may be submitted to a disk now: urgent reads go first."""
        return any(self._schedule.may_write(one.disk.link) for one in self._attached)

    def fits(self, block: Outgoing) -> bool:
        """Whether an empty segment has room for such a block, and no client removed pages of its extent."""
        if self._mappings[block.extent].lost:
            return False
        kind = (block.space, block.group)
        fits = self._fits.get(kind)
        if fits is None:
            if len(self._fits) >= MOST_KINDS:
                self._fits.clear()
            fits = self._fits[kind] = self._table.fits(block, self._segment_bytes)
        return fits

    async def settled(self, tenant: str) -> None:
        """Wait until all of this tenant's writes in flight have ended, and its released segments are free."""
        stores = [one.stores[tenant] for one in self._attached]
        in_flight = [batch.settled for store in stores for batch in store.in_flight]
        in_flight += [free for store in stores for free in store.releasing.values()]
        if in_flight:
            await asyncio.wait(in_flight)


class ColdTier:
    """Closes the directories on `close`, and also if the constructor raises TierError. `missing` has the
    configured directories that are not open, and why. `reclaim` is that of `AttachedDirectories`."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, directories: Sequence[ColdDirectory],
        options: StoreOptions, reclaim: Callable[[SegmentStore, Segment], None],
        missing: Mapping[Path, str] | None = None, compresses: bool = False,
    ) -> None:  # fmt: skip
        self.off_reason = ""  # why an operator switched it off
        self.size_bytes = options.size_bytes
        self.table = SegmentTable()
        self.directories = AttachedDirectories(loop, options, self.table, reclaim, missing or {})
        self.memory = self.directories.memory
        self.recovery = self.directories.recovery
        attached, mappings = self.directories.attached, self.memory.mappings
        with contextlib.ExitStack() as undo:
            for directory in directories:
                undo.callback(directory.close)
            try:
                staging = EncodeBuffer(loop, self.memory.allocate)
                self.coding = Encoder(
                    loop, mappings.__getitem__, staging, self.table.blank, threads_here()
                )
                undo.callback(self.coding.stop)
                self.frame_threads = FrameThreads(mappings) if compresses else None
            except RuntimeError as error:
                raise TierError(f"cold: cannot start threads: {error}") from error
            if self.frame_threads is not None:
                undo.callback(self.frame_threads.stop)
            for directory in directories:
                undo.callback(self.directories.add(directory).discard)
            undo.pop_all()
        self.recovery.began(len(directories))
        self.reader = FrameReader(attached, self.table, mappings, self.coding, self.frame_threads)
        self.reads = ReadQueue(loop, self.reader, time.monotonic)
        self.writer = BlockWriter(
            attached, self.table, self.reads.planner.order, options.segment_bytes, mappings
        )

    def inherit(self, other: ColdTier) -> None:
        """Continue the counters of an earlier tier with the same directories."""
        self.coding.failures += other.coding.failures
        self.coding.staging.waited += other.coding.staging.waited
        self.coding.staging.refused += other.coding.staging.refused
        self.directories.inherit(other.directories)

    def links(self) -> list[DiskLink]:
        """Return the links of the disks, and of the frames in memory."""
        links = [one.disk.link for one in self.directories.attached]
        return links + ([self.frame_threads.link] if self.frame_threads is not None else [])

    @property
    def failure(self) -> str:
        """Why the tier is off, or the current failures of all directories."""
        directories = self.directories
        failures = (one.disk.failure for one in directories.attached if one.disk.failure)
        return self.off_reason or "; ".join([*directories.missing.values(), *failures])

    @property
    def faults(self) -> int:
        return self.directories.faults

    def unreadable_segments(self) -> frozenset[int]:
        """Return the segments that cannot be read now."""
        directories = self.directories
        if all(one.disk.reads.is_on for one in directories.attached) and not directories.closing:
            return NOWHERE
        stores = enumerate(self.table.stores)
        return frozenset(number for number, store in stores if not store.disk.reads.is_on)

    def run_periodic(self) -> None:
        """Do periodic work: check queued reads, disks and directories, and write tombstones that failed."""
        self.reads.pending.expire()
        self.directories.run_periodic()
        for one in self.directories.attached:
            one.disk.measure(self.coding.rates)

    async def flush(self) -> str:
        """Wait until all tombstones are on disk; return the failures, or an empty text."""
        stores = self.directories.stores()
        failures = await asyncio.gather(*(store.tombstones.flush() for store in stores))
        return "; ".join(failure for failure in failures if failure)

    async def count_forgets(self) -> None:
        """Count a round of forgets, which are durable, in all directories that can be written."""
        counting = [
            one.disk.files.run(one.directory.forgets.advance)
            for one in self.directories.attached
            if one.directory.forgets is not None and one.disk.writes.is_on and not one.disk.is_over
        ]
        # A disk that is closed meanwhile cancels its call.
        await asyncio.gather(*counting, return_exceptions=True)

    def sealed(self) -> list[tuple[SegmentStore, Segment]]:
        """Return the sealed segments that can be read now."""
        return [
            (store, segment)
            for store in self.directories.stores()
            if store.disk.reads.is_on
            for segment in store.log.sealed
        ]

    async def erase(
        self, tenant: str, first: int, live: Callable[[int], dict[int, int]]
    ) -> tuple[int, int]:
        """Erase all bytes that no block uses in a portion of this tenant's segments; return where to continue
        (0 at the end), and the number of files. `live` returns the pages of each frame of a segment, by first
        page. Raises OSError or TierError."""
        stores = [one.stores[tenant] for one in self.directories.attached]
        is_ready = all(store.ready and store.disk.writes.is_on for store in stores)
        if self.reader.is_shut or not is_ready:
            raise TierError(self.failure or "the cold tier is not ready")
        # First, before they are begun: an open segment must be sealed before it is erased.
        free = [
            (store, segment) for store in stores for segment in store.log.free if segment.leftover
        ]
        for store, segment in free[:ERASED_AT_ONCE]:
            await store.erase(segment, live)
        if free:
            return max(1, first), len(free[:ERASED_AT_ONCE])
        used = [
            (store, self.table.segments[number])
            for number, store in enumerate(self.table.stores)
            if number >= first - 1 and store in stores
        ]
        for store, segment in used[:ERASED_AT_ONCE]:
            await store.erase(segment, live)
        rest = used[ERASED_AT_ONCE:]
        return rest[0][1].number + 1 if rest else 0, len(used) - len(rest)

    def shut(self) -> None:
        """Start no more I/O, and cancel all waiting reads."""
        self.reader.is_shut, self.writer.accepts = True, False
        self.reads.pending.shut()

    async def close(self, timeout_s: float = 10.0) -> bool:
        """Stop the disks, then close all files. False if a disk or a codec hangs, and still uses them."""
        self.reader.is_shut, self.writer.accepts = True, False
        until = time.monotonic() + timeout_s
        stopped = await self.directories.stop_disks(timeout_s)
        # The last reads may still be decoded.
        decoded = await self.coding.close(max(0.0, until - time.monotonic()))
        if self.frame_threads is not None:
            decoded &= await self.frame_threads.close(max(0.0, until - time.monotonic()))
        closed = await self.directories.close(until - time.monotonic())
        if stopped and decoded:
            # Takes 0.1 s per GiB of the arena; otherwise a collection would do it in the loop.
            await asyncio.to_thread(self.memory.mappings.clear)
        return stopped and decoded and closed
