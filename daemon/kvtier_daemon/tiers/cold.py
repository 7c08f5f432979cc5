"""The cold tier: blocks in segment files on disks. Moves what it is told to, keeps the files within their
cap.

The loop plans and native workers move: nothing here waits for a disk. Each directory has a drive, each tenant
a shelf in it, and blocks go to the shelves in turn. A disk that fails or hangs takes what is on it away, and
nothing else.

A read goes straight into its slot, and is checked against the digest of what was saved under that name.
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
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvtier.codec.base import ELEMENTS, ZSTD, Codec
from kvtier.codec.frame import PAGE, pages
from kvtier.errors import KvtierError, TierError
from kvtier.layout import KvSpec
from kvtier.units import format_bytes
from kvtier_daemon.index import Change
from kvtier_daemon.index_process import Child
from kvtier_daemon.tiers.batch import Outgoing, Wrote
from kvtier_daemon.tiers.coding import Coding, threads_here
from kvtier_daemon.tiers.drive import BENIGN, HANGS_S, Drive, Over, anonymous
from kvtier_daemon.tiers.log import NOT_FREE_YET, Segment
from kvtier_daemon.tiers.reads import Reads
from kvtier_daemon.tiers.recovery import Recovered
from kvtier_daemon.tiers.shelf import Numbering, Shelf
from kvtier_daemon.tiers.staging import STAGED_BYTES, Staging
from kvtier_daemon.tiers.tombstones import Tombstones
from kvtier_daemon.tiers.use import Uses
from kvtier_daemon.tiers.volume import Volume, space_key
from kvtier_kernels import Mapping as MappedExtent
from kvtier_kernels import Recipe

log = logging.getLogger(__name__)

BURIED = struct.Struct("<II")
DOUBTED_MOST = FITS_MOST = 4096
ROOM_LEAST = 8 << 20
ERASED_AT_ONCE = 8
LOOK_S, LOOK_FAILED_S = 10.0, 1.0
DETACH_S = 10.0
GIVEN_BACK_S = 0.01
INDEX_S = 1.0  # that an index has to be written and closed in, at least
NOWHERE: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Decoding:
    """How the frame of a block is encoded, what it decodes to, and what that costs its link. `lossy` is the
    one lossy codec that it may be of."""

    codec: int
    spec: KvSpec
    block_bytes: int
    load_bytes: int
    lossy: Codec | None = None


@dataclass(frozen=True, slots=True)
class Incoming:
    """A block to be read into a slot."""

    id: int
    segment: int
    page: int
    header_pages: int
    payload_bytes: int
    digest: bytes
    extent: int
    offset: int
    coding: Decoding | None = None  # without one the payload is brought as it is

    @property
    def load_bytes(self) -> int:
        """What it costs its link."""
        return self.coding.load_bytes if self.coding is not None else self.payload_bytes


Read = Callable[[Incoming, int], None]  # and an errno or 0
Restored = Callable[[str, Recovered, int], Awaitable[None]]


def open_volumes(
    directories: Sequence[Path],
    size_bytes: int,
    child: Child | None = None,
    device: int | None = None,
    unwritten: Change | None = None,
) -> list[Volume]:
    """The directories, which share that size. Waits for the disks; TierError if one can't be used. The other
    arguments are those of `Volume`."""
    with contextlib.ExitStack() as undo:
        volumes = []
        each = size_bytes // len(directories)
        for directory in directories:
            try:
                volumes.append(Volume(directory, each, child, device, unwritten))
            except RuntimeError as error:
                raise TierError(f"cold: no threads can be had: {error}") from error
            undo.callback(volumes[-1].close)
            _tell_of_room(volumes[-1])
        undo.pop_all()
    return volumes


def _refuse_copy(new: Volume, others: Sequence[Volume]) -> None:
    """Two directories of one name hold the same segments, and one may have blocks forgotten in the other."""
    for other in others:
        if other.name == new.name:
            text = (
                f"cold: {new.directory} is a copy of {other.directory}: take one of them out of"
                " cold.directories, or empty it"
            )
            raise TierError(text)


def _tell_of_room(volume: Volume) -> None:
    """A file system that is too small is used as far as it goes, but nobody may have meant that."""
    with contextlib.suppress(OSError):
        if lacks := volume.lacks_bytes():
            log.warning(
                "cold: %s: cold.size has %s for it that its file system has not: what there is has to do,"
                " and others' files may take of it", volume.directory, format_bytes(lacks),
            )  # fmt: skip


def segments_of(
    directory: Path, segments_bytes: int, segment_bytes: int, shares: dict[str, float]
) -> dict[str, int]:
    """How many segments each tenant may have in a directory. Raises TierError where those are too few."""
    most = {name: int(segments_bytes * share) // segment_bytes for name, share in shares.items()}
    for tenant, segments in most.items():
        if segments < 3:
            text = f"tenant {tenant} would have {segments} segments of {segment_bytes} bytes"
            raise TierError(f"cold: {directory}: {text}, and three are needed")
    return most


class ColdTier:
    """Closes the volumes, also where it raises TierError as it can't use them. `missing` are
    directories that are not used, and why; `attach` and `detach` change which are. `leaving(shelf, segment)`
    is called when the oldest segment of a shelf is to be used again: the callee brings away what
    deserves it, and then says `left`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        volumes: Sequence[Volume],
        size_bytes: int,
        segment_bytes: int,
        shares: dict[str, float],
        leaving: Callable[[Shelf, Segment], None],
        engine: str = "auto",
        clock: Callable[[], float] = time.monotonic,
        secrets: Mapping[str, bytes] | None = None,
        missing: dict[Path, str] | None = None,
    ) -> None:
        self._loop = loop
        self._clock = clock
        self.size_bytes = size_bytes
        self.recovered = asyncio.Event()  # all that there is on all the directories is known
        self.recovering = len(volumes)  # directories that are being looked into
        self.missing = dict(missing or {})
        self.shelves: dict[str, list[Shelf]] = {tenant: [] for tenant in shares}
        self.drives: list[Drive] = []
        self._volumes: list[Volume] = []
        self._segment_bytes = segment_bytes
        self._shares = shares
        self._leaving = leaving
        self._secrets = secrets or {}
        self._engine = engine
        self._threads = threads_here()
        self._staged_bytes = STAGED_BYTES // max(1, len(volumes) + len(self.missing))
        self._fixed: set[int] = set()  # of the mappings, by number
        self._faults_before = 0  # of drives that are closed
        self._detached: dict[Volume, asyncio.Task[None]] = {}  # and not closed yet
        self._looking: set[asyncio.Task[None]] = set()
        self._numbering = Numbering()
        self._described: dict[tuple[Volume, str, bytes], asyncio.Future[bool]] = {}
        self._described_bytes: Counter[tuple[Volume, str]] = Counter()
        self._fits: dict[tuple[str, bytes, int], bool] = {}
        self._flushing: dict[int, tuple[Volume, asyncio.Future[str]]] = {}
        self._last_token = 0
        # By epoch and page: frames that could not be read, and how much else had been by then.
        self._doubted: dict[tuple[int, int], int] = {}
        self._turn = 0
        self.reads = Reads(loop, self, clock)
        self._mappings: dict[int, MappedExtent] = {}
        self._looks_at = clock() + LOOK_S
        self._closing = False
        self.accepts = True  # what is to be written
        self.said_off = ""  # by those who run the daemon: why nothing is served
        with contextlib.ExitStack() as undo:
            for volume in volumes:
                undo.callback(volume.close)
            try:
                self.coding = Coding(
                    loop,
                    self._mappings.__getitem__,
                    Staging(loop, self.room),
                    self._numbering.blank,
                    self._threads,
                )
            except RuntimeError as error:
                raise TierError(f"cold: no threads can be had: {error}") from error
            undo.callback(self.coding.stop)
            for volume in volumes:
                undo.enter_context(self._added(volume))
            undo.pop_all()

    def _added(self, volume: Volume) -> contextlib.ExitStack:
        """Use this directory: a drive, and a shelf for each tenant. What it returns takes that back, but for
        the volume itself. Raises TierError."""
        _refuse_copy(volume, self._volumes)
        most = segments_of(
            volume.directory, volume.segments_bytes, self._segment_bytes, self._shares
        )
        with contextlib.ExitStack() as undo:
            try:
                drive = Drive(
                    self._loop, str(volume.directory), self._engine, self._clock, self._threads,
                    self._staged_bytes,
                )  # fmt: skip
                undo.callback(drive.stop, 0)
                for number, mapping in self._mappings.items():
                    drive.disk.register(mapping, number in self._fixed)
            except (OSError, RuntimeError) as error:
                text = f"cold: {volume.directory}: no worker can be had ({self._engine}): {error}"
                raise TierError(text) from error
            self._volumes.append(volume)
            self.drives.append(drive)
            self._loop.add_reader(volume.index.event_fd, self._index_done, volume, drive)
            undo.callback(self._loop.remove_reader, volume.index.event_fd)
            for tenant, segments in most.items():
                self.shelves[tenant].append(
                    Shelf(
                        self._loop, tenant, volume, drive, self._numbering, self._segment_bytes,
                        segments, self._leaving, self.is_lost, self._clock, self._secrets.get(tenant, b""),
                    )
                )  # fmt: skip
            return undo.pop_all()
        raise AssertionError("unreachable: nothing here is suppressed")

    def probed(self) -> list[tuple[Path, Drive]]:
        """Each directory, and the worker that reads and writes in it."""
        return [
            (one.directory, drive) for one, drive in zip(self._volumes, self.drives, strict=True)
        ]

    @property
    def segments(self) -> list[Segment]:
        return self._numbering.segments

    def register(self, mapping: MappedExtent, fixed: bool = True) -> int:
        """Make an extent known; its number in what is to be read and written. A `fixed` one is the kernel's,
        too, for good."""
        number = len(self._mappings) + 1  # 0 is a drive's own
        for drive in self.drives:
            if drive.disk.register(mapping, fixed) != number:
                raise TierError("cold: the disks count memory differently")
        self._mappings[number] = mapping
        if fixed:
            self._fixed.add(number)
        return number

    def is_lost(self, extent: int) -> bool:
        """Whether pages were taken out of this extent: what was read from it is not what was saved, and
        what was written to it no client sees."""
        return self._mappings[extent].lost

    def mappings(self) -> list[MappedExtent]:
        """All memory that the disks read to and write from."""
        return list(self._mappings.values())

    def room(self, nbytes: int) -> tuple[int, int]:
        """Memory that is no slot, for so many bytes at least: its number, and how many it has. Nothing of it
        is ever given back, so who needs more gets twice as much."""
        nbytes = max(ROOM_LEAST, 1 << (pages(nbytes) - 1).bit_length())
        return self.register(anonymous(nbytes), fixed=False), nbytes

    def inherit(self, other: ColdTier) -> None:
        """Count on from where another one of the same directories ended."""
        self.coding.failures += other.coding.failures
        self.coding.staging.waited += other.coding.staging.waited
        self.coding.staging.refused += other.coding.staging.refused
        self._faults_before += other._faults_before + sum(drive.faults for drive in other.drives)

    @property
    def engine(self) -> str:
        return self.drives[0].engine if self.drives else self._engine

    # --- health ------------------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        """Whether anything can be read. Off, it forgets nothing, and is tried again later."""
        return not self._closing and any(drive.reads.is_on for drive in self.drives)

    @property
    def takes(self) -> bool:
        """Whether anything can be written."""
        return (
            self.accepts and not self._closing and any(drive.writes.is_on for drive in self.drives)
        )

    @property
    def faults(self) -> int:
        unreadable = sum(shelf.unreadable for shelf in self._all_shelves())
        return unreadable + self._faults_before + sum(drive.faults for drive in self.drives)

    @property
    def unknown(self) -> str:
        """What could not be looked into at the start, if anything: nobody knows what blocks it has."""
        given_up = [drive.failure for drive in self.drives if drive.reads.given_up]
        if given_up or self.missing:
            return "; ".join([*self.missing.values(), *given_up])
        files = sum(shelf.unreadable for shelf in self._all_shelves())
        return f"{files} files could not be read at the start" if files else ""

    @property
    def failure(self) -> str:
        """What is wrong now, of each directory."""
        if self.said_off:
            return self.said_off
        failures = (drive.failure for drive in self.drives if drive.failure)
        return "; ".join([*self.missing.values(), *failures])

    def out_of_reach(self) -> frozenset[int]:
        """The segments that can't be read now."""
        if all(drive.reads.is_on for drive in self.drives) and not self._detached:
            return NOWHERE
        shelves = enumerate(self._numbering.shelves)
        return frozenset(number for number, shelf in shelves if not shelf.drive.reads.is_on)

    def give_up(self, why: str) -> None:
        """Nothing moves any more, until a restart."""
        for drive in self.drives:
            drive.give_up(why)

    @property
    def given_up(self) -> bool:
        """Whether something of it is off until a restart."""
        return any(drive.writes.given_up and not drive.lost for drive in self.drives)

    def tend(self) -> None:
        """What has to be looked at now and then."""
        self.reads.tend()
        for drive in self.drives:
            drive.tend()
            drive.measure(self.coding.rates)
        for shelf in self._all_shelves():
            shelf.note_again()
        if self._clock() >= self._looks_at and not self._closing:
            fails = any(drive.reads.failure or drive.writes.failure for drive in self.drives)
            self._looks_at = self._clock() + (LOOK_FAILED_S if fails else LOOK_S)
            for volume, drive in zip(self._volumes, self.drives, strict=True):
                if not drive.is_busy and not drive.lost:
                    looking = self._loop.create_task(self._look_where_it_is(volume, drive))
                    self._looking.add(looking)
                    looking.add_done_callback(self._looking.discard)

    async def _look_where_it_is(self, volume: Volume, drive: Drive) -> None:
        try:
            elsewhere = await drive.beside(volume.elsewhere)
        except OSError as error:
            drive.lose(f"{volume.directory}: its file system has failed: {error.strerror}")
            self.recovered.clear()  # what is forgotten from now on is forgotten again once it is back
            return
        if elsewhere and not drive.elsewhere:
            log.error("cold: %s", elsewhere)
        drive.elsewhere = elsewhere

    # --- the index ---------------------------------------------------------------------------

    async def describe(self, tenant: str, space: bytes, spec: KvSpec) -> bool:
        """See to it that a start knows this space, whose frames are in a segment without a footer yet; False
        where none of the directories that take something has it."""
        while True:
            waiting = []
            for volume, drive in zip(self._volumes, self.drives, strict=True):
                known = self._described.get((volume, tenant, space))
                if known is None and drive.writes.is_on:
                    known = self._describe_in(volume, tenant, space, spec, drive)
                if known is not None and known.done():
                    if not known.result():
                        del self._described[volume, tenant, space]
                        self._described_bytes[volume, tenant] -= _description_bytes(space, spec)
                    elif drive.writes.is_on:
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
        self, volume: Volume, tenant: str, space: bytes, spec: KvSpec, drive: Drive
    ) -> asyncio.Future[bool] | None:
        """Describe a space in one index, if there is room for what this tenant has."""
        taken = self._described_bytes[volume, tenant] + _description_bytes(space, spec)
        if taken > volume.index_bytes // 4 // len(self.shelves):
            log.error("cold: %s: tenant %s has too many spaces", volume.directory, tenant)
            return None
        known = self._note_description(volume, tenant, space, spec)
        volume.index.put(b"spaces", space_key(tenant, space), msgspec.msgpack.encode(spec))
        flushing = self._loop.create_task(self._flushed(volume, drive))
        flushing.add_done_callback(lambda task: _pass_on(task, known))
        return known

    def _note_description(
        self, volume: Volume, tenant: str, space: bytes, spec: KvSpec
    ) -> asyncio.Future[bool]:
        """An index has this description, or is to have it; to be resolved with whether it does."""
        self._described_bytes[volume, tenant] += _description_bytes(space, spec)
        known: asyncio.Future[bool] = self._loop.create_future()
        self._described[volume, tenant, space] = known
        return known

    def _is_described(self, volume: Volume, tenant: str, space: bytes) -> bool:
        known = self._described.get((volume, tenant, space))
        return known is not None and known.done() and known.result()

    async def settled(self, tenant: str) -> None:
        """Wait until what this tenant writes now is on disk, or is not to be, and what it had in segments
        that nothing names any more can't be found there."""
        shelves = self.shelves[tenant]
        going = [batch.settled for shelf in shelves for batch in shelf.going]
        going += [free for shelf in shelves for free in shelf.parting.values()]
        if going:
            await asyncio.wait(going)

    async def flush(self) -> str:
        """Wait until all tombstones are on disk; what went wrong, or nothing."""
        failures = await asyncio.gather(*(shelf.noted() for shelf in self._all_shelves()))
        return "; ".join(failure for failure in failures if failure)

    async def _flushed(self, volume: Volume, drive: Drive) -> str:
        done: asyncio.Future[str] = self._loop.create_future()
        self._last_token += 1
        self._flushing[self._last_token] = volume, done
        drive.writes.began()
        volume.index.flush(self._last_token)
        return await done

    def _index_done(self, volume: Volume, drive: Drive) -> None:
        for token, failure in volume.index.done():
            drive.writes.ended()
            _, done = self._flushing.pop(token)
            if not done.done():
                done.set_result(failure)

    def bury(self, places: bytes) -> None:
        """These frames, segment and page of each, are nothing any more, after a start neither."""
        touched = set()
        for number, page in BURIED.iter_unpack(places):
            shelf = self._numbering.shelves[number]
            shelf.bury(self.segments[number], page)
            touched.add(shelf)
        for shelf in touched:
            shelf.note()

    def note_use(self, places: bytes) -> None:
        """The blocks of these frames, segment and page of each, are wanted for the first time."""
        pages: dict[int, array[int]] = {}
        for number, page in BURIED.iter_unpack(places):
            if number not in pages:
                head = self.segments[number].head
                assert head is not None, "a frame of a segment without a head"
                pages[number] = self._numbering.shelves[number].volume.uses.add(head.epoch)
            pages[number].append(page)

    def write_use(self, limit: int) -> int:
        """Give the index so many pieces of what is new of that; how many there were."""
        return sum(volume.uses.write(limit) for volume in self._volumes)

    # --- reading and writing -----------------------------------------------------------------

    def read(self, blocks: Iterable[Incoming], done: Read, urgent: bool = True) -> None:
        """Bring blocks into their slots; `done` is told of each, with EBADMSG where it is not what it should
        be."""
        ops: dict[Drive, bytearray] = {}
        encoded: dict[Drive, tuple[bytearray, list[Recipe]]] = {}
        for block in blocks:
            segment = self.segments[block.segment]
            shelf = self._numbering.shelves[block.segment]
            segment.reading += 1
            if block.coding is not None:
                over = self._read_one(shelf, segment, block, done)
                theirs, recipes = encoded.setdefault(shelf.drive, (bytearray(), []))
                theirs += self._read_encoded(
                    shelf.drive, segment, block, block.coding, recipes, urgent, over
                )
                continue
            ops.setdefault(shelf.drive, bytearray()).extend(
                shelf.drive.read_op(
                    segment.fd, (block.page + block.header_pages) * PAGE, block.payload_bytes,
                    block.extent, block.offset, block.digest, urgent,
                    self._read_one(shelf, segment, block, done),
                )
            )  # fmt: skip
        for drive, raw in ops.items():
            drive.read(raw)
        for drive, (theirs, recipes) in encoded.items():
            drive.read_encoded(theirs, recipes)

    def _read_encoded(
        self, drive: Drive, segment: Segment, block: Incoming, how: Decoding, recipes: list[Recipe],
        urgent: bool, over: Over,
    ) -> bytes:  # fmt: skip
        """The operation that reads and decodes this, by one of the recipes if by any; nothing where a thread
        beside the loop has to decode it."""
        at, header_bytes = block.page * PAGE, block.header_pages * PAGE
        element = ELEMENTS.get(how.spec.dtype)
        if how.codec != ZSTD and element is not None:
            recipe = how.lossy.recipe if how.lossy is not None else None
            if recipe is not None and recipe not in recipes:
                recipes.append(recipe)
            number = recipes.index(recipe) + 1 if recipe is not None else 0
            sizes = (header_bytes, block.payload_bytes, how.block_bytes)
            return drive.encoded_op(
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

        drive.read_staged(segment.fd, at, header_bytes + block.payload_bytes, have_read, urgent)
        return b""

    def hold(self, segment: int, blocks: int) -> None:
        """This segment is not used again while so many of its blocks wait to be read."""
        self.segments[segment].reading += blocks

    def let_go(self, block: Incoming) -> None:
        """It waits no more."""
        self._numbering.shelves[block.segment].not_read(self.segments[block.segment])

    def read_header(self, block: Incoming, done: Callable[[int, bytes], None]) -> None:
        """The header of a block's frame, after all that is urgent; `done` is told an errno or 0."""
        segment, shelf = self.segments[block.segment], self._numbering.shelves[block.segment]
        segment.reading += 1

        def over(code: int, text: bytes | None) -> None:
            has = self._read_one(shelf, segment, block, lambda _, code: done(code, text or b""))
            has(code, None)

        at, nbytes = block.page * PAGE, block.header_pages * PAGE
        shelf.drive.read_text(segment.fd, at, nbytes, over)

    def _read_one(self, shelf: Shelf, segment: Segment, block: Incoming, done: Read) -> Over:
        def over(code: int, _: bytes | None) -> None:
            if not code and self.is_lost(block.extent):
                code = errno.EFAULT
            if code and code not in BENIGN:
                what = f"{segment.path} at {block.page * PAGE}: a read failed"
                shelf.drive.fault(shelf.drive.reads, what, code)
            if (code or self._doubted) and self._is_lost(shelf, segment, block, code):
                code = errno.ENODATA
            try:
                done(block, code)
            finally:
                shelf.not_read(segment)

        return over

    def _is_lost(self, shelf: Shelf, segment: Segment, block: Incoming, code: int) -> bool:
        """Whether the disk has failed to give this twice, and gave other things in between: one that gives
        nothing at all says nothing of its blocks."""
        place = (segment.head.epoch if segment.head else 0, block.page)
        before = self._doubted.pop(place, None)
        if code != errno.EIO:
            return False
        if before is not None and shelf.drive.reads.good > before:
            return True
        if len(self._doubted) < DOUBTED_MOST:
            self._doubted[place] = shelf.drive.reads.good if before is None else before
        return False

    def write(self, tenant: str, blocks: Sequence[Outgoing], done: Wrote) -> int:
        """Write the leading blocks, as many as have a place now; how many. `done` is told when they are on
        disk for good, or are not to be."""
        if self._closing or not self.accepts:
            return 0
        shelves = self.shelves[tenant]
        spaces = {block.space for block in blocks}
        for _ in shelves:
            self._turn += 1
            shelf = shelves[self._turn % len(shelves)]
            known = all(self._is_described(shelf.volume, tenant, space) for space in spaces)
            if known and shelf.drive.writes.is_on and (count := shelf.write(blocks, done)):
                nbytes = sum(block.payload_bytes for block in blocks[:count])
                self.reads.planner.wrote(shelf.drive.link, nbytes)
                return count
        return 0

    def has_place(self, tenant: str) -> bool:
        """Whether one of the disks has a place for something now."""
        return not self._closing and any(
            shelf.drive.writes.is_on and shelf.has_place() for shelf in self.shelves[tenant]
        )

    def may_write(self, tenant: str) -> bool:
        """Whether a write may go to one of the disks now: urgent reads are before it."""
        may = self.reads.planner.may_write
        return any(may(shelf.drive.link) for shelf in self.shelves[tenant])

    def bandwidths(self, tenant: str) -> list[float]:
        """How fast each disk of a tenant has been read lately; 0 where that is not known."""
        return [shelf.drive.bandwidth.value for shelf in self.shelves[tenant]]

    def drive_of(self, segment: int) -> Drive:
        """The worker that reads this segment."""
        return self._numbering.shelves[segment].drive

    def fits(self, tenant: str, block: Outgoing) -> bool:
        """Whether a segment can have such a block at all."""
        kind = (tenant, block.space, block.group)
        fits = self._fits.get(kind)
        if fits is None:
            if len(self._fits) >= FITS_MOST:
                self._fits.clear()
            fits = self._fits[kind] = all(shelf.fits(block) for shelf in self.shelves[tenant])
        return fits

    def sealed(self) -> list[tuple[Shelf, Segment]]:
        """Each segment that is full and not to be used again yet, if it can be read now."""
        return [
            (shelf, segment)
            for shelf in self._all_shelves()
            if shelf.drive.reads.is_on
            for segment in shelf.log.sealed
        ]

    @property
    def leaving(self) -> int:
        """How many segments are on their way to being free."""
        return sum(one.stage in NOT_FREE_YET for one in self.segments)

    def left(self, shelf: Shelf, segment: Segment) -> None:
        """Nothing names this segment any more."""
        shelf.left(segment)

    async def erase(
        self, tenant: str, first: int, live: Callable[[int], dict[int, int]]
    ) -> tuple[int, int]:
        """Erase what no block owns from some of this tenant's segments: where to go on, 0 at the end, and how
        many files that were. `live` has the frames of a segment by page, and how many pages each has. Raises
        OSError or TierError."""
        shelves = self.shelves[tenant]
        if self._closing or not all(one.ready and one.drive.writes.is_on for one in shelves):
            raise TierError(self.failure or "the cold tier is not ready")
        # Before one of them is begun, and has to be sealed to be erased.
        free = [(one, each) for one in shelves for each in one.log.free if each.leftover]
        for shelf, segment in free[:ERASED_AT_ONCE]:
            await shelf.erase(segment, live)
        if free:
            return max(1, first), len(free[:ERASED_AT_ONCE])
        theirs = [
            (shelf, self.segments[number])
            for number, shelf in enumerate(self._numbering.shelves)
            if number >= first - 1 and shelf in shelves
        ]
        for shelf, segment in theirs[:ERASED_AT_ONCE]:
            await shelf.erase(segment, live)
        rest = theirs[ERASED_AT_ONCE:]
        return rest[0][1].number + 1 if rest else 0, len(theirs) - len(rest)

    # --- start and end -----------------------------------------------------------------------

    async def recover(self, restored: Restored) -> None:
        """Find out what the files hold, oldest first; `restored` is told of each, with its segment's number.
        A directory that can't be looked into, or hangs, takes no other one along."""
        pairs = zip(self._volumes, self.drives, strict=True)
        self.recovering = len(self._volumes)
        await asyncio.gather(*(self._recover(*pair, restored) for pair in pairs))
        self.recovering = 0
        self._perhaps_recovered()

    def _perhaps_recovered(self) -> None:
        lost = any(drive.lost for drive in self.drives)
        if not (lost or self.missing or self.recovering):
            self.recovered.set()

    async def attach(self, volume: Volume, restored: Restored) -> None:
        """Use this directory too. Closes it where it raises TierError."""
        try:
            with self._added(volume) as undo:
                undo.pop_all()
        except TierError:
            await asyncio.to_thread(volume.close)
            raise
        self._fits.clear()
        del self.missing[volume.directory]
        self.recovering += 1
        try:
            await self._recover(volume, self.drives[-1], restored)
        finally:
            self.recovering -= 1
        self._perhaps_recovered()

    def lost(self, directory: Path) -> Volume | None:
        """This directory, if it is to be closed and opened again."""
        for volume, drive in zip(self._volumes, self.drives, strict=True):
            if volume.directory == directory and drive.lost:
                return volume
        return None

    async def detach(self, volume: Volume) -> list[tuple[str, int]]:
        """Stop using a directory that was lost, when no operation on it is under way; returns the tenants and
        numbers of its segments. It is closed after that: `closed` waits for it."""
        at = self._volumes.index(volume)
        drive = self.drives[at]
        self.recovered.clear()
        shelves = [shelf for shelf in self._all_shelves() if shelf.drive is drive]
        for shelf in shelves:
            shelf.closing = True
        await drive.quiet()
        theirs = [
            one
            for one, shelf in zip(self._numbering.segments, self._numbering.shelves, strict=True)
            if shelf.drive is drive
        ]
        while any(one.reading for one in theirs):  # given back, as the disk is off
            self.reads.pump(drive)
            await asyncio.sleep(GIVEN_BACK_S)
        at = self._volumes.index(volume)
        del self._volumes[at], self.drives[at]
        self.missing[volume.directory] = drive.lost
        self._faults_before += drive.faults
        self._fits.clear()
        for shelf in shelves:
            self.shelves[shelf.tenant].remove(shelf)
            for parting in shelf.parting.values():
                parting.cancel()
        for known in [one for one in self._described if one[0] is volume]:
            del self._described[known]
        for taken in [one for one in self._described_bytes if one[0] is volume]:
            del self._described_bytes[taken]
        for one in theirs:  # their numbers stay, and another one of each comes with the directory
            one.tombstones = Tombstones(0)
        self._detached[volume] = self._loop.create_task(self._close_one(volume, drive, shelves))
        shelf_of = self._numbering.shelves
        return [(shelf_of[one.number].tenant, one.number) for one in theirs]

    async def _close_one(self, volume: Volume, drive: Drive, shelves: Sequence[Shelf]) -> None:
        while not await drive.close(DETACH_S):
            await drive.quiet()
        self._loop.remove_reader(volume.index.event_fd)
        await asyncio.to_thread(self._close_files, volume, shelves)
        volume.uses = Uses(volume.index)
        self._not_flushed(volume)

    async def closed(self, volume: Volume) -> None:
        """Wait until a directory that was detached is closed, and its blocks are forgotten."""
        await asyncio.shield(self._detached[volume])
        del self._detached[volume]

    def _close_files(self, volume: Volume, shelves: Sequence[Shelf]) -> None:
        """Waits for the disk."""
        for shelf in shelves:
            shelf.close_files()
        volume.close()

    def _not_flushed(self, volume: Volume) -> None:
        for token, (one, flushing) in list(self._flushing.items()):
            if one is volume:
                del self._flushing[token]
                if not flushing.done():
                    flushing.set_result("the cold tier was closed before its index answered")

    async def _recover(self, volume: Volume, drive: Drive, restored: Restored) -> None:
        shelves = [shelf for shelf in self._all_shelves() if shelf.drive is drive]
        try:
            await drive.beside(volume.read_index)
            await self._remove_strangers(volume, drive, shelves)
            # All of them before anything is made: what is too much of one may be the place of another.
            looked = [(shelf, await shelf.look()) for shelf in shelves]
        except Exception as error:
            log.exception("cold: %s can't be looked into: nothing of it is used", volume.directory)
            drive.lose(f"{volume.directory} can't be looked into: {error}")
            return
        found = [(shelf, one) for shelf, all_ in looked for one in all_]
        found.sort(key=lambda pair: pair[1].head.sequence if pair[1].head else -1)
        for shelf, one in found:
            try:
                # To open a file may wait for the disk.
                fd = await drive.beside(shelf.open_found, one)
                segment = shelf.take_up(one, fd)
                if one.head is not None:
                    await restored(shelf.tenant, one, segment.number)
            except (KvtierError, OSError, ValueError, struct.error) as error:
                shelf.not_taken_up(one, error)
        volume.uses.keep_only({one.head.epoch for _, one in found if one.head is not None})
        for shelf in shelves:
            for identity, spec in shelf.described.items():
                self._note_description(volume, shelf.tenant, identity, spec).set_result(True)
            shelf.resume([one for other, one in found if other is shelf])
            shelf.ready = True
            shelf.prepare()

    async def _remove_strangers(
        self, volume: Volume, drive: Drive, shelves: Sequence[Shelf]
    ) -> None:
        for stranger in set(await drive.beside(volume.tenants)) - set(self.shelves):
            log.warning("cold: %s: tenant %s is none any more", volume.directory, stranger)
            left = await drive.beside(volume.remove, stranger)
            # They take room that the cap has to know of.
            for at in range(left):
                shelves[at % len(shelves)].has_less()

    def shut(self) -> None:
        """Nothing is begun any more; what waits to be read is given back."""
        self._closing = True
        self.reads.shut()

    async def close(self, timeout_s: float = 10.0) -> bool:
        """Write footers, so that a start finds everything at once, and let the files go. False if a disk
        hangs, or a codec: something is under way that has a file, and perhaps memory, of ours."""
        self._closing = True
        for shelf in self._all_shelves():
            shelf.closing = True
            if shelf.log.open is not None and shelf.drive.writes.is_on:
                shelf.seal()
        until = self._clock() + timeout_s
        ended = await asyncio.gather(*(drive.close(timeout_s) for drive in self.drives))
        # What was read last may be decoded still.
        decoded = await self.coding.close(max(0.0, until - self._clock()))
        for drive, is_over in zip(self.drives, ended, strict=True):
            for shelf in self._all_shelves():
                if is_over and shelf.drive is drive:
                    shelf.close_files()
        for volume in self._volumes:
            self._loop.remove_reader(volume.index.event_fd)
        left_s = max(INDEX_S, until - self._clock())
        closing = [
            self._loop.create_task(asyncio.to_thread(volume.close, left_s))
            for volume in self._volumes
        ]
        waited = [*closing, *self._detached.values()]
        # To close the files of an index may wait for a disk for longer than what is written to it may.
        hang = (await asyncio.wait(waited, timeout=left_s + INDEX_S))[1] if waited else set()
        closed = not hang and all(one.result() for one in closing)
        for volume in self._volumes:
            self._not_flushed(volume)
        if all(ended) and decoded:
            # A tenth of a second for each GiB of the arena; a collection would do it in the loop, some day.
            await asyncio.to_thread(self._mappings.clear)
        return all(ended) and decoded and closed

    def _all_shelves(self) -> list[Shelf]:
        return [shelf for shelves in self.shelves.values() for shelf in shelves]


def _description_bytes(space: bytes, spec: KvSpec) -> int:
    return len(space) + len(msgspec.msgpack.encode(spec))


def _pass_on(flushing: asyncio.Future[str], known: asyncio.Future[bool]) -> None:
    if not known.done():
        known.set_result(not flushing.cancelled() and not flushing.result())
