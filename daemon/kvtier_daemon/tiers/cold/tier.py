"""The cold tier: blocks in segment files on disks.

The event loop plans, and native workers do the I/O: no call here waits for a disk. Each directory has a
`DirectoryDisk`, and each tenant has a `SegmentStore` in it; writes alternate among the stores. A disk that
fails or
hangs disables only what is on it. A read goes directly into its slot, and is verified against the digest of
the save.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import struct
import time
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from kvtier.errors import KvtierError, TierError
from kvtier.layout import KvSpec
from kvtier.units import format_bytes
from kvtier_daemon.codec.base import ELEMENTS
from kvtier_daemon.codec.frame import PAGE, pages
from kvtier_daemon.codec.table import BY_NUMBER
from kvtier_daemon.tiers.cold.access_log import AccessLog
from kvtier_daemon.tiers.cold.directory import ColdDirectory, open_direct, space_key
from kvtier_daemon.tiers.cold.disk import BENIGN, HANGS_S, DirectoryDisk, Over, anonymous
from kvtier_daemon.tiers.cold.encode_buffer import STAGED_BYTES, EncodeBuffer
from kvtier_daemon.tiers.cold.encoder import Encoder, threads_here
from kvtier_daemon.tiers.cold.index import Change
from kvtier_daemon.tiers.cold.index_process import Child
from kvtier_daemon.tiers.cold.read_queue import ReadQueue
from kvtier_daemon.tiers.cold.recovery import Recovered
from kvtier_daemon.tiers.cold.segment_log import NOT_FREE_YET, Segment
from kvtier_daemon.tiers.cold.segment_store import SegmentNumbers, SegmentStore
from kvtier_daemon.tiers.cold.tombstone_pages import TombstonePages
from kvtier_daemon.tiers.cold.transfers import Decoding, Incoming, Outgoing, Read, Wrote
from kvtier_kernels import Mapping as MappedExtent
from kvtier_kernels import Recipe

log = logging.getLogger(__name__)

PLACE = struct.Struct("<II")
DOUBTED_MOST = FITS_MOST = 4096
ROOM_LEAST = 8 << 20
ERASED_AT_ONCE = 8
LOOK_S, LOOK_FAILED_S = 10.0, 1.0
DETACH_S = 10.0
GIVEN_BACK_S = 0.01
INDEX_S = 1.0  # least time for an index to be written and closed
FIND_S = 2.0  # longest time that requests wait for the scan of a directory
NOWHERE: frozenset[int] = frozenset()


Restored = Callable[[str, Recovered, int], Awaitable[None]]


def open_directories(
    paths: Sequence[Path],
    size_bytes: int,
    child: Child | None = None,
    device: int | None = None,
    unwritten: Change | None = None,
) -> list[ColdDirectory]:
    """Open the directories, which share `size_bytes`. Waits for the disks. Raises TierError if one cannot be
    used. The other arguments are those of `ColdDirectory`."""
    with contextlib.ExitStack() as undo:
        directories = []
        each = size_bytes // len(paths)
        for path in paths:
            try:
                directories.append(ColdDirectory(path, each, child, device, unwritten))
            except RuntimeError as error:
                raise TierError(f"cold: cannot start threads: {error}") from error
            undo.callback(directories[-1].close)
            _tell_of_room(directories[-1])
        undo.pop_all()
    return directories


def _refuse_copy(new: ColdDirectory, others: Sequence[ColdDirectory]) -> None:
    """Raise TierError if a directory is a copy of another one: a copy may hold blocks that were forgotten in
    the other."""
    for other in others:
        if other.name == new.name:
            text = (
                f"cold: {new.path} is a copy of {other.path}: remove one of them "
                "from cold.directories, or empty it"
            )
            raise TierError(text)


def _tell_of_room(directory: ColdDirectory) -> None:
    """Log a warning if the file system is smaller than the part of cold.size that it should hold."""
    with contextlib.suppress(OSError):
        if lacks := directory.lacks_bytes():
            log.warning(
                "cold: %s: its file system has %s less than its part of cold.size: using what "
                "is available, which files of others may reduce; lower cold.size or free space",
                directory.path, format_bytes(lacks),
            )  # fmt: skip


def segments_of(
    path: Path, segments_bytes: int, segment_bytes: int, shares: dict[str, float]
) -> dict[str, int]:
    """Return the number of segments that each tenant may have in a directory. Raises TierError if it is below
    three."""
    most = {name: int(segments_bytes * share) // segment_bytes for name, share in shares.items()}
    for tenant, segments in most.items():
        if segments < 3:
            text = f"tenant {tenant} would have {segments} segments of {segment_bytes} bytes"
            raise TierError(f"cold: {path}: {text}, at least three are needed")
    return most


class ColdTier:
    """Closes the directories on `close`, and also if the constructor raises TierError. `missing` has the
    directories that are not in use, and why; `attach` and `detach` change them. `reclaim(store, segment)` is
    called when the oldest segment of a store is to be reused."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        directories: Sequence[ColdDirectory],
        size_bytes: int,
        segment_bytes: int,
        shares: dict[str, float],
        reclaim: Callable[[SegmentStore, Segment], None],
        engine: str = "auto",
        clock: Callable[[], float] = time.monotonic,
        secrets: Mapping[str, bytes] | None = None,
        missing: dict[Path, str] | None = None,
    ) -> None:
        self._loop = loop
        self._clock = clock
        self.size_bytes = size_bytes
        self.recovered = asyncio.Event()  # the blocks of all directories are known
        self.recovering = len(directories)  # directories that are being scanned
        self._requests_wait_until = clock() + FIND_S
        self._when_recovered: dict[Hashable, Callable[[], None]] = {}
        self.missing = dict(missing or {})
        self.stores: dict[str, list[SegmentStore]] = {tenant: [] for tenant in shares}
        self.disks: list[DirectoryDisk] = []
        self._directories: list[ColdDirectory] = []
        self._segment_bytes = segment_bytes
        self._shares = shares
        self._reclaim = reclaim
        self._secrets = secrets or {}
        self._engine = engine
        self._threads = threads_here()
        self._staged_bytes = STAGED_BYTES // max(1, len(directories) + len(self.missing))
        self._fixed: set[int] = set()  # numbers of mappings
        self._faults_before = 0  # of disks that are closed
        self._detached: dict[ColdDirectory, asyncio.Task[None]] = {}  # that are being closed
        self._checking: set[asyncio.Task[None]] = set()
        self._numbering = SegmentNumbers()
        self._described: dict[tuple[ColdDirectory, str, bytes], asyncio.Future[bool]] = {}
        self._described_bytes: Counter[tuple[ColdDirectory, str]] = Counter()
        self._fits: dict[tuple[str, bytes, int], bool] = {}
        self._flushing: dict[int, tuple[ColdDirectory, asyncio.Future[str]]] = {}
        self._last_token = 0
        # By epoch and page: frames whose read failed, and the number of good reads of the disk at that time.
        self._unreadable_once: dict[tuple[int, int], int] = {}
        self._turn = 0
        self.reads = ReadQueue(loop, self, clock)
        self._mappings: dict[int, MappedExtent] = {}
        self._checks_at = clock() + LOOK_S
        self._closing = False
        self.accepts = True  # writes
        self.off_reason = ""  # why an operator switched it off
        with contextlib.ExitStack() as undo:
            for directory in directories:
                undo.callback(directory.close)
            try:
                self.coding = Encoder(
                    loop,
                    self._mappings.__getitem__,
                    EncodeBuffer(loop, self.room),
                    self._numbering.blank,
                    self._threads,
                )
            except RuntimeError as error:
                raise TierError(f"cold: cannot start threads: {error}") from error
            undo.callback(self.coding.stop)
            for directory in directories:
                undo.enter_context(self._added(directory))
            undo.pop_all()

    def _added(self, directory: ColdDirectory) -> contextlib.ExitStack:
        """Use this directory: create its disk, and a store for each tenant. The returned stack undoes that;
        it never closes the directory. Raises TierError."""
        _refuse_copy(directory, self._directories)
        most = segments_of(
            directory.path, directory.segments_bytes, self._segment_bytes, self._shares
        )
        with contextlib.ExitStack() as undo:
            try:
                disk = DirectoryDisk(
                    self._loop, str(directory.path), self._engine, self._clock, self._threads,
                    self._staged_bytes,
                )  # fmt: skip
                undo.callback(disk.stop, 0)
                for number, mapping in self._mappings.items():
                    disk.worker.register(mapping, number in self._fixed)
            except (OSError, RuntimeError) as error:
                text = (
                    f"cold: {directory.path}: cannot start an I/O worker ({self._engine}): {error}"
                )
                raise TierError(text) from error
            self._directories.append(directory)
            self.disks.append(disk)
            self._loop.add_reader(directory.index.event_fd, self._index_done, directory, disk)
            undo.callback(self._loop.remove_reader, directory.index.event_fd)
            for tenant, segments in most.items():
                self.stores[tenant].append(
                    SegmentStore(
                        self._loop, tenant, directory, disk, self._numbering, self._segment_bytes,
                        segments, self._reclaim, self.is_lost, self._clock, self._secrets.get(tenant, b""),
                    )
                )  # fmt: skip
            return undo.pop_all()
        raise AssertionError("unreachable: nothing here is suppressed")

    def probed(self) -> list[tuple[Path, DirectoryDisk]]:
        """Return each directory and its disk."""
        return [(one.path, disk) for one, disk in zip(self._directories, self.disks, strict=True)]

    @property
    def segments(self) -> list[Segment]:
        return self._numbering.segments

    def register(self, mapping: MappedExtent, fixed: bool = True) -> int:
        """Register an extent with all disks; return its number. A `fixed` extent is registered with the
        kernel until the tier is closed."""
        number = len(self._mappings) + 1  # 0 is the disk's own page
        for disk in self.disks:
            if disk.worker.register(mapping, fixed) != number:
                raise TierError("cold: the disks number extents differently")
        self._mappings[number] = mapping
        if fixed:
            self._fixed.add(number)
        return number

    def is_lost(self, extent: int) -> bool:
        """Whether a client removed pages from this extent: reads into it and writes from it are invalid."""
        return self._mappings[extent].lost

    def mappings(self) -> list[MappedExtent]:
        """Return all memory that the disks read into and write from."""
        return list(self._mappings.values())

    def room(self, nbytes: int) -> tuple[int, int]:
        """Allocate at least this much memory outside the arena; return its number and size. It is never
        freed, so the size is doubled at each call."""
        nbytes = max(ROOM_LEAST, 1 << (pages(nbytes) - 1).bit_length())
        return self.register(anonymous(nbytes), fixed=False), nbytes

    def inherit(self, other: ColdTier) -> None:
        """Continue the counters of an earlier tier with the same directories."""
        self.coding.failures += other.coding.failures
        self.coding.staging.waited += other.coding.staging.waited
        self.coding.staging.refused += other.coding.staging.refused
        self._faults_before += other._faults_before + sum(disk.faults for disk in other.disks)

    @property
    def engine(self) -> str:
        return self.disks[0].engine if self.disks else self._engine

    # --- health ------------------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        """Whether blocks can be read from any disk. If not, no block is forgotten."""
        return not self._closing and any(disk.reads.is_on for disk in self.disks)

    @property
    def takes(self) -> bool:
        """Whether anything can be written."""
        return self.accepts and not self._closing and any(disk.writes.is_on for disk in self.disks)

    @property
    def faults(self) -> int:
        unreadable = sum(store.files.unreadable for store in self._all_stores())
        return unreadable + self._faults_before + sum(disk.faults for disk in self.disks)

    @property
    def unknown(self) -> str:
        """Why some blocks on the disks may be unknown, or an empty text: directories and files that could not
        be read."""
        given_up = [disk.failure for disk in self.disks if disk.reads.given_up]
        if given_up or self.missing:
            return "; ".join([*self.missing.values(), *given_up])
        files = sum(store.files.unreadable for store in self._all_stores())
        return f"{files} files could not be read at the start" if files else ""

    @property
    def failure(self) -> str:
        """The current failures of all directories."""
        if self.off_reason:
            return self.off_reason
        failures = (disk.failure for disk in self.disks if disk.failure)
        return "; ".join([*self.missing.values(), *failures])

    def unreadable_segments(self) -> frozenset[int]:
        """Return the segments that cannot be read now."""
        if all(disk.reads.is_on for disk in self.disks) and not self._detached:
            return NOWHERE
        stores = enumerate(self._numbering.stores)
        return frozenset(number for number, store in stores if not store.disk.reads.is_on)

    def give_up(self, why: str) -> None:
        """Stop all I/O until a restart."""
        for disk in self.disks:
            disk.give_up(why)

    @property
    def given_up(self) -> bool:
        """Whether part of the tier is disabled until a restart."""
        return any(disk.writes.given_up and not disk.lost for disk in self.disks)

    def tend(self) -> None:
        """Do periodic work: check disks and directories, and write tombstones that failed."""
        self.reads.tend()
        for disk in self.disks:
            disk.tend()
            disk.measure(self.coding.rates)
        for store in self._all_stores():
            store.tombstones.retry()
        if self._clock() >= self._checks_at and not self._closing:
            fails = any(disk.reads.failure or disk.writes.failure for disk in self.disks)
            self._checks_at = self._clock() + (LOOK_FAILED_S if fails else LOOK_S)
            for directory, disk in zip(self._directories, self.disks, strict=True):
                if not disk.is_busy and not disk.lost:
                    looking = self._loop.create_task(self._check_location(directory, disk))
                    self._checking.add(looking)
                    looking.add_done_callback(self._checking.discard)

    async def _check_location(self, directory: ColdDirectory, disk: DirectoryDisk) -> None:
        try:
            elsewhere = await disk.run_in_thread(directory.elsewhere)
        except OSError as error:
            disk.lose(f"{directory.path}: its file system has failed: {error.strerror}")
            self.recovered.clear()  # later forgets are repeated after the next scan
            return
        if elsewhere and not disk.elsewhere:
            log.error("cold: %s", elsewhere)
        disk.elsewhere = elsewhere

    # --- the index ---------------------------------------------------------------------------

    async def describe(self, tenant: str, space: bytes, spec: KvSpec) -> bool:
        """Make sure that a start finds the description of this space, whose frames are in a segment without a
        footer. False if no writable directory has it."""
        while True:
            waiting = []
            for directory, disk in zip(self._directories, self.disks, strict=True):
                known = self._described.get((directory, tenant, space))
                if known is None and disk.writes.is_on:
                    known = self._describe_in(directory, tenant, space, spec, disk)
                if known is not None and known.done():
                    if not known.result():
                        del self._described[directory, tenant, space]
                        self._described_bytes[directory, tenant] -= _description_bytes(space, spec)
                    elif disk.writes.is_on:
                        return True
                elif known is not None:
                    waiting.append(known)
            if not waiting:
                return False
            done, _ = await asyncio.wait(
                waiting, timeout=HANGS_S, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                return False

    def _describe_in(
        self, directory: ColdDirectory, tenant: str, space: bytes, spec: KvSpec, disk: DirectoryDisk
    ) -> asyncio.Future[bool] | None:
        """Write the description of a space to one index, if the tenant's part of the index has room for
        it."""
        taken = self._described_bytes[directory, tenant] + _description_bytes(space, spec)
        if taken > directory.index_bytes // 4 // len(self.stores):
            log.error(
                "cold: %s: tenant %s has too many spaces for the index; blocks of new "
                "ones are not written there",
                directory.path,
                tenant,
            )
            return None
        known = self._note_description(directory, tenant, space, spec)
        directory.index.put(b"spaces", space_key(tenant, space), msgspec.msgpack.encode(spec))
        flushing = self._loop.create_task(self._flushed(directory, disk))
        flushing.add_done_callback(lambda task: _pass_on(task, known))
        return known

    def _note_description(
        self, directory: ColdDirectory, tenant: str, space: bytes, spec: KvSpec
    ) -> asyncio.Future[bool]:
        """Note that an index has this description, or will have it; the result of the future says whether it
        does."""
        self._described_bytes[directory, tenant] += _description_bytes(space, spec)
        known: asyncio.Future[bool] = self._loop.create_future()
        self._described[directory, tenant, space] = known
        return known

    def _is_described(self, directory: ColdDirectory, tenant: str, space: bytes) -> bool:
        known = self._described.get((directory, tenant, space))
        return known is not None and known.done() and known.result()

    async def settled(self, tenant: str) -> None:
        """Wait until all of this tenant's writes in flight have ended, and its released segments are free."""
        stores = self.stores[tenant]
        in_flight = [batch.settled for store in stores for batch in store.in_flight]
        in_flight += [free for store in stores for free in store.releasing.values()]
        if in_flight:
            await asyncio.wait(in_flight)

    async def flush(self) -> str:
        """Wait until all tombstones are on disk; return the failures, or an empty text."""
        failures = await asyncio.gather(*(store.tombstones.flush() for store in self._all_stores()))
        return "; ".join(failure for failure in failures if failure)

    async def _flushed(self, directory: ColdDirectory, disk: DirectoryDisk) -> str:
        done: asyncio.Future[str] = self._loop.create_future()
        self._last_token += 1
        self._flushing[self._last_token] = directory, done
        disk.writes.began()
        directory.index.flush(self._last_token)
        return await done

    def _index_done(self, directory: ColdDirectory, disk: DirectoryDisk) -> None:
        for token, failure in directory.index.done():
            disk.writes.ended()
            _, done = self._flushing.pop(token)
            if not done.done():
                done.set_result(failure)

    def tombstone(self, places: bytes) -> None:
        """Set and write the tombstones of these frames, given by segment and page."""
        touched = set()
        for number, page in PLACE.iter_unpack(places):
            store = self._numbering.stores[number]
            store.tombstones.add(self.segments[number], page)
            touched.add(store)
        for store in touched:
            store.tombstones.write()

    def note_access(self, places: bytes) -> None:
        """Note the first use of the blocks of these frames, given by segment and page."""
        pages: dict[int, array[int]] = {}
        for number, page in PLACE.iter_unpack(places):
            if number not in pages:
                head = self.segments[number].head
                assert head is not None, "a frame of a segment without a head"
                pages[number] = self._numbering.stores[number].directory.uses.add(head.epoch)
            pages[number].append(page)

    def write_accesses(self, limit: int) -> int:
        """Write up to `limit` pieces of the access log to the indexes; return their number."""
        return sum(directory.uses.write(limit) for directory in self._directories)

    # --- reading and writing -----------------------------------------------------------------

    def read(self, blocks: Iterable[Incoming], done: Read, urgent: bool = True) -> None:
        """Read blocks into their slots; `done` gets each block and an errno or 0, EBADMSG if its digest does
        not match."""
        ops: dict[DirectoryDisk, bytearray] = {}
        encoded: dict[DirectoryDisk, tuple[bytearray, list[Recipe]]] = {}
        for block in blocks:
            segment = self.segments[block.segment]
            store = self._numbering.stores[block.segment]
            segment.reading += 1
            if block.coding is not None:
                over = self._read_one(store, segment, block, done)
                theirs, recipes = encoded.setdefault(store.disk, (bytearray(), []))
                theirs += self._read_encoded(
                    store.disk, segment, block, block.coding, recipes, urgent, over
                )
                continue
            ops.setdefault(store.disk, bytearray()).extend(
                store.disk.read_op(
                    segment.fd, (block.page + block.header_pages) * PAGE, block.payload_bytes,
                    block.extent, block.offset, block.digest, urgent,
                    self._read_one(store, segment, block, done),
                )
            )  # fmt: skip
        for disk, raw in ops.items():
            disk.read(raw)
        for disk, (theirs, recipes) in encoded.items():
            disk.read_encoded(theirs, recipes)

    def _read_encoded(
        self, disk: DirectoryDisk, segment: Segment, block: Incoming, how: Decoding, recipes: list[Recipe],
        urgent: bool, over: Over,
    ) -> bytes:  # fmt: skip
        """Return the operation that reads and decodes this frame in the worker. Empty if a thread of the
        daemon decodes it: then the read is started here."""
        at, header_bytes = block.page * PAGE, block.header_pages * PAGE
        element = ELEMENTS.get(how.spec.dtype)
        codec = BY_NUMBER.get(how.codec)  # None for a calibrated codec, which `how` has
        if (codec is None or codec.native) and element is not None:
            recipe = how.lossy.recipe if how.lossy is not None else None
            if recipe is not None and recipe not in recipes:
                recipes.append(recipe)
            number = recipes.index(recipe) + 1 if recipe is not None else 0
            sizes = (header_bytes, block.payload_bytes, how.block_bytes)
            return disk.encoded_op(
                segment.fd, at, sizes, block.extent, block.offset, block.digest, element, number, urgent,
                over,
            )  # fmt: skip

        def have_read(code: int, text: memoryview | None) -> None:
            if code or text is None:
                over(code, None)
                return
            self.coding.decode(
                how.codec, text, header_bytes, block.digest, how.spec, block.extent, block.offset,
                how.block_bytes, lambda code: over(code, None),
            )  # fmt: skip

        disk.read_staged(segment.fd, at, header_bytes + block.payload_bytes, have_read, urgent)
        return b""

    def hold(self, segment: int, blocks: int) -> None:
        """Keep this segment from being reused while this many of its blocks wait for their reads."""
        self.segments[segment].reading += blocks

    def release(self, block: Incoming) -> None:
        """End the hold of one block."""
        self._numbering.stores[block.segment].read_ended(self.segments[block.segment])

    def read_header(self, block: Incoming, done: Callable[[int, bytes], None]) -> None:
        """Read the header of a block's frame, after all urgent reads; `done` gets an errno or 0."""
        segment, store = self.segments[block.segment], self._numbering.stores[block.segment]
        segment.reading += 1

        def over(code: int, text: bytes | None) -> None:
            has = self._read_one(store, segment, block, lambda _, code: done(code, text or b""))
            has(code, None)

        at, nbytes = block.page * PAGE, block.header_pages * PAGE
        store.disk.read_text(segment.fd, at, nbytes, over)

    def _read_one(self, store: SegmentStore, segment: Segment, block: Incoming, done: Read) -> Over:
        def over(code: int, _: bytes | None) -> None:
            if not code and self.is_lost(block.extent):
                code = errno.EFAULT
            if code and code not in BENIGN:
                what = f"{segment.path} at {block.page * PAGE}: read failed"
                store.disk.fault(store.disk.reads, what, code)
            if (code or self._unreadable_once) and self._is_lost(store, segment, block, code):
                code = errno.ENODATA
            try:
                done(block, code)
            finally:
                store.read_ended(segment)

        return over

    def _is_lost(self, store: SegmentStore, segment: Segment, block: Incoming, code: int) -> bool:
        """Whether the disk failed twice to read this frame and read others in between. A disk that fails all
        reads says nothing about its blocks."""
        place = (segment.head.epoch if segment.head else 0, block.page)
        before = self._unreadable_once.pop(place, None)
        if code != errno.EIO:
            return False
        if before is not None and store.disk.reads.good > before:
            return True
        if len(self._unreadable_once) < DOUBTED_MOST:
            self._unreadable_once[place] = store.disk.reads.good if before is None else before
        return False

    def write(self, tenant: str, blocks: Sequence[Outgoing], done: Wrote) -> int:
        """Start to write as many of the leading blocks as have a place now; return their number. `done` is
        called when their writes have ended."""
        if self._closing or not self.accepts:
            return 0
        stores = self.stores[tenant]
        spaces = {block.space for block in blocks}
        for _ in stores:
            self._turn += 1
            store = stores[self._turn % len(stores)]
            known = all(self._is_described(store.directory, tenant, space) for space in spaces)
            if known and store.disk.writes.is_on and (count := store.write(blocks, done)):
                nbytes = sum(block.payload_bytes for block in blocks[:count])
                self.reads.planner.order.wrote(store.disk.link, nbytes)
                return count
        return 0

    def has_place(self, tenant: str) -> bool:
        """Whether a disk accepts a write now."""
        return not self._closing and any(
            store.disk.writes.is_on and store.has_place() for store in self.stores[tenant]
        )

    def may_write(self, tenant: str) -> bool:
        """Whether a write may be submitted to a disk now: urgent reads go first."""
        may = self.reads.planner.order.may_write
        return any(may(store.disk.link) for store in self.stores[tenant])

    def bandwidths(self, tenant: str) -> list[float]:
        """Return the recent read bandwidth of each of the tenant's disks; 0 if it is unknown."""
        return [store.disk.bandwidth.value for store in self.stores[tenant]]

    def disk_of(self, segment: int) -> DirectoryDisk:
        """Return the disk of this segment."""
        return self._numbering.stores[segment].disk

    def fits(self, tenant: str, block: Outgoing) -> bool:
        """Whether an empty segment has room for such a block."""
        kind = (tenant, block.space, block.group)
        fits = self._fits.get(kind)
        if fits is None:
            if len(self._fits) >= FITS_MOST:
                self._fits.clear()
            fits = self._fits[kind] = self._numbering.fits(block, self._segment_bytes)
        return fits

    def sealed(self) -> list[tuple[SegmentStore, Segment]]:
        """Return the sealed segments that can be read now."""
        return [
            (store, segment)
            for store in self._all_stores()
            if store.disk.reads.is_on
            for segment in store.log.sealed
        ]

    @property
    def leaving(self) -> int:
        """Number of segments that are being reclaimed."""
        return sum(one.stage in NOT_FREE_YET for one in self.segments)

    async def erase(
        self, tenant: str, first: int, live: Callable[[int], dict[int, int]]
    ) -> tuple[int, int]:
        """Erase all bytes that no block uses in a portion of this tenant's segments; return where to continue
        (0 at the end), and the number of files. `live` returns the pages of each frame of a segment, by first
        page. Raises OSError or TierError."""
        stores = self.stores[tenant]
        if self._closing or not all(one.ready and one.disk.writes.is_on for one in stores):
            raise TierError(self.failure or "the cold tier is not ready")
        # First, before they are begun: an open segment must be sealed before it is erased.
        free = [(one, each) for one in stores for each in one.log.free if each.leftover]
        for store, segment in free[:ERASED_AT_ONCE]:
            await store.erase(segment, live)
        if free:
            return max(1, first), len(free[:ERASED_AT_ONCE])
        theirs = [
            (store, self.segments[number])
            for number, store in enumerate(self._numbering.stores)
            if number >= first - 1 and store in stores
        ]
        for store, segment in theirs[:ERASED_AT_ONCE]:
            await store.erase(segment, live)
        rest = theirs[ERASED_AT_ONCE:]
        return rest[0][1].number + 1 if rest else 0, len(theirs) - len(rest)

    # --- start and end -----------------------------------------------------------------------

    async def recover(self, restored: Restored) -> None:
        """Find the blocks in the files, oldest first; `restored` gets each file with its segment number. A
        directory that fails or hangs does not delay the others."""
        pairs = zip(self._directories, self.disks, strict=True)
        self.recovering = len(self._directories)
        await asyncio.gather(*(self._recover(*pair, restored) for pair in pairs))
        self.recovering = 0
        self._note_recovered()

    def _note_recovered(self) -> None:
        lost = any(disk.lost for disk in self.disks)
        if not (lost or self.missing or self.recovering):
            self.recovered.set()
        if not self.recovering:
            while self._when_recovered:
                _, then = self._when_recovered.popitem()
                self._loop.call_soon(then)

    @property
    def is_awaited(self) -> bool:
        """Whether a directory is being scanned, and requests may wait for the result: a scan that takes long
        is not waited for."""
        return self.recovering > 0 and self._clock() < self._requests_wait_until

    @property
    def is_complete(self) -> bool:
        """Whether the blocks of all directories are known."""
        return self.recovered.is_set()

    def call_when_ended(self, name: Hashable, then: Callable[[], None]) -> None:
        """Call `then` once when no directory is being scanned."""
        self._when_recovered[name] = then

    def cancel_calls(self, name: Hashable) -> None:
        self._when_recovered.pop(name, None)

    async def attach(self, directory: ColdDirectory, restored: Restored) -> None:
        """Start to use this directory. Closes it if it raises TierError."""
        try:
            with self._added(directory) as undo:
                undo.pop_all()
        except TierError:
            await asyncio.to_thread(directory.close)
            raise
        del self.missing[directory.path]
        self.recovering += 1
        self._requests_wait_until = self._clock() + FIND_S
        try:
            await self._recover(directory, self.disks[-1], restored)
        finally:
            self.recovering -= 1
        self._note_recovered()

    def lost(self, path: Path) -> ColdDirectory | None:
        """Return this directory if it has to be closed and opened again."""
        for directory, disk in zip(self._directories, self.disks, strict=True):
            if directory.path == path and disk.lost:
                return directory
        return None

    async def detach(self, directory: ColdDirectory) -> list[tuple[str, int]]:
        """Stop to use a lost directory after its last operation has ended; return the tenants and numbers of
        its segments. Then it is closed in the background: `closed` waits for that."""
        at = self._directories.index(directory)
        disk = self.disks[at]
        self.recovered.clear()
        stores = [store for store in self._all_stores() if store.disk is disk]
        for store in stores:
            store.closing = True
        await disk.quiet()
        theirs = [
            one
            for one, store in zip(self._numbering.segments, self._numbering.stores, strict=True)
            if store.disk is disk
        ]
        while any(one.reading for one in theirs):  # they are cancelled, because the disk is off
            self.reads.pump(disk)
            await asyncio.sleep(GIVEN_BACK_S)
        at = self._directories.index(directory)
        del self._directories[at], self.disks[at]
        self.missing[directory.path] = disk.lost
        self._faults_before += disk.faults
        for store in stores:
            self.stores[store.tenant].remove(store)
            for releasing in store.releasing.values():
                releasing.cancel()
        for known in [one for one in self._described if one[0] is directory]:
            del self._described[known]
        for taken in [one for one in self._described_bytes if one[0] is directory]:
            del self._described_bytes[taken]
        for one in theirs:  # their numbers are not used again
            one.tombstones = TombstonePages(0)
        self._detached[directory] = self._loop.create_task(self._close_one(directory, disk, stores))
        shelf_of = self._numbering.stores
        return [(shelf_of[one.number].tenant, one.number) for one in theirs]

    async def _close_one(
        self, directory: ColdDirectory, disk: DirectoryDisk, stores: Sequence[SegmentStore]
    ) -> None:
        while not await disk.close(DETACH_S):
            await disk.quiet()
        self._loop.remove_reader(directory.index.event_fd)
        await asyncio.to_thread(self._close_files, directory, stores)
        directory.uses = AccessLog(directory.index)
        self._not_flushed(directory)

    async def closed(self, directory: ColdDirectory) -> None:
        """Wait until a detached directory is closed."""
        await asyncio.shield(self._detached[directory])
        del self._detached[directory]

    def _close_files(self, directory: ColdDirectory, stores: Sequence[SegmentStore]) -> None:
        """Close the directory and the files of its stores. Waits for the disk."""
        for store in stores:
            self._numbering.close_files(store)
        directory.close()

    def _not_flushed(self, directory: ColdDirectory) -> None:
        for token, (one, flushing) in list(self._flushing.items()):
            if one is directory:
                del self._flushing[token]
                if not flushing.done():
                    flushing.set_result("the cold tier was closed before its index was written")

    async def _recover(
        self, directory: ColdDirectory, disk: DirectoryDisk, restored: Restored
    ) -> None:
        stores = [store for store in self._all_stores() if store.disk is disk]
        try:
            await disk.run_in_thread(directory.read_index)
            await self._remove_other_tenants(directory, disk, stores)
            # Scan all stores before a file is created: files that one store removes make room for another.
            looked = [(store, await store.files.scan()) for store in stores]
        except Exception as error:
            log.exception(
                "cold: internal error while reading %s: not using this directory", directory.path
            )
            disk.lose(f"cannot read the segments of {directory.path}: {error}")
            return
        found = [(store, one) for store, all_ in looked for one in all_]
        found.sort(key=lambda pair: pair[1].head.sequence if pair[1].head else -1)
        for store, one in found:
            try:
                # Opening a file may wait for the disk.
                fd = await disk.run_in_thread(open_direct, one.path)
                segment = store.adopt(one, fd)
                if one.head is not None:
                    await restored(store.tenant, one, segment.number)
            except (KvtierError, OSError, ValueError, struct.error) as error:
                log.error("cold: cannot use %s: %s", one.path, error)
                store.files.lose_room(one.path)
        directory.uses.keep_only({one.head.epoch for _, one in found if one.head is not None})
        for store in stores:
            for identity, spec in store.files.described.items():
                self._note_description(directory, store.tenant, identity, spec).set_result(True)
            store.resume([one for other, one in found if other is store])
            store.ready = True
            store.prepare()

    async def _remove_other_tenants(
        self, directory: ColdDirectory, disk: DirectoryDisk, stores: Sequence[SegmentStore]
    ) -> None:
        for tenant in set(await disk.run_in_thread(directory.tenants)) - set(self.stores):
            log.warning(
                "cold: %s: removing data of tenant %s, which is no longer configured",
                directory.path,
                tenant,
            )
            left = await disk.run_in_thread(directory.remove, tenant)
            # They take room and cannot be used.
            for at in range(left):
                stores[at % len(stores)].files.lose_room()

    def shut(self) -> None:
        """Start no more I/O, and cancel all waiting reads."""
        self._closing = True
        self.reads.shut()

    async def close(self, timeout_s: float = 10.0) -> bool:
        """Write footers, so that the next start is fast, then close all files. False if a disk or a codec
        hangs: it still uses files, and perhaps memory."""
        self._closing = True
        for store in self._all_stores():
            store.closing = True
            if store.log.open is not None and store.disk.writes.is_on:
                store.seal()
        until = self._clock() + timeout_s
        ended = await asyncio.gather(*(disk.close(timeout_s) for disk in self.disks))
        # The last reads may still be decoded.
        decoded = await self.coding.close(max(0.0, until - self._clock()))
        for disk, is_over in zip(self.disks, ended, strict=True):
            for store in self._all_stores():
                if is_over and store.disk is disk:
                    self._numbering.close_files(store)
        for directory in self._directories:
            self._loop.remove_reader(directory.index.event_fd)
        left_s = max(INDEX_S, until - self._clock())
        closing = [
            self._loop.create_task(asyncio.to_thread(directory.close, left_s))
            for directory in self._directories
        ]
        waited = [*closing, *self._detached.values()]
        # Closing the files of an index may take longer than its last write.
        hang = (await asyncio.wait(waited, timeout=left_s + INDEX_S))[1] if waited else set()
        closed = not hang and all(one.result() for one in closing)
        for directory in self._directories:
            self._not_flushed(directory)
        if all(ended) and decoded:
            # Takes 0.1 s per GiB of the arena; otherwise a collection would do it in the loop.
            await asyncio.to_thread(self._mappings.clear)
        return all(ended) and decoded and closed

    def _all_stores(self) -> list[SegmentStore]:
        return [store for stores in self.stores.values() for store in stores]


def _description_bytes(space: bytes, spec: KvSpec) -> int:
    return len(space) + len(msgspec.msgpack.encode(spec))


def _pass_on(flushing: asyncio.Future[str], known: asyncio.Future[bool]) -> None:
    if not known.done():
        known.set_result(not flushing.cancelled() and not flushing.result())
