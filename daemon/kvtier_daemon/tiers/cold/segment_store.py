"""The segments of one tenant in one directory: writes blocks to the open segment, and prepares the next one.

A write puts header and payload into the open segment, then calls fdatasync; only then is the block reported
as written. `SegmentLog` has the stages of the segments."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

from kvtier.errors import TierError
from kvtier.frame import ENCRYPTED, GENERATION_AT, LOSSY, ONCE, PAGE, RAW, Template, pages, stamp
from kvtier_daemon.catalog.frames import FRAME, PLACE, FramedBlocks
from kvtier_daemon.codec.block_parts import entries
from kvtier_daemon.tiers.cold.directory import ColdDirectory, spaces_of
from kvtier_daemon.tiers.cold.disk import Callback, DirectoryDisk
from kvtier_daemon.tiers.cold.eraser import erase
from kvtier_daemon.tiers.cold.frames import Outgoing, Wrote
from kvtier_daemon.tiers.cold.recovery import Recovered, entries_of, free_bytes
from kvtier_daemon.tiers.cold.segment import (
    FrameTable,
    Taken,
    described_bytes,
    encode_footer,
    first_frame,
    footer_bytes,
    pack_row,
    space_bytes,
)
from kvtier_daemon.tiers.cold.segment_files import LEAST_SEGMENTS, SegmentFiles
from kvtier_daemon.tiers.cold.segment_log import NOT_FREE_YET, Segment, SegmentLog, Stage
from kvtier_kernels import Mapping as MappedExtent

log = logging.getLogger(__name__)

RETRY_GROW_S = 30.0
RETRY_S = 1.0
TEMPLATES_BYTES = 8 << 20
MOST_BATCHES = 4  # in flight, if the disk is too slow for anything to wait for it
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
BEFORE_ERASE = (Stage.BEGINNING, Stage.OPEN, Stage.SEALING, Stage.FREEING)
ERASE_POLL_S = 0.005
AHEAD_SHARE = 8  # of the segments are about to be reused
RESUME_SHARE = 4  # writing to a segment is resumed if a fourth of it is free


@dataclass(slots=True, eq=False)
class WriteBatch:
    """Writes that one sync makes durable."""

    segment: Segment
    done: Wrote
    settled: asyncio.Future[None]
    ops: int = 0
    # Of the blocks whose frames were written so far.
    ids: array[int] = field(default_factory=lambda: array("I"))
    frames: bytearray = field(default_factory=bytearray)
    digests: bytearray = field(default_factory=bytearray)
    nbytes: int = 0
    rows: list[tuple[int, bytes]] = field(default_factory=list)  # position in the table, and entry
    failed: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)  # a client removed the page behind their slot
    unused: list[int] = field(default_factory=list)  # pages of the frames of failed and lost blocks


class SegmentTable:
    """The segments of all stores by their numbers, and the headers that frames of one kind share."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.stores: list[SegmentStore] = []  # of each segment
        self.opened: dict[str, Callable[[], None]] = {}  # by tenant: there is a place for writes
        self.sequence = 1
        self._templates: dict[tuple[bytes, int, int], Template] = {}
        self._templates_bytes = 0

    def add(self, store: SegmentStore, segment: Segment) -> None:
        segment.number = len(self.segments)
        self.segments.append(segment)
        self.stores.append(store)

    @property
    def reclaiming(self) -> int:
        """Number of segments that are being reclaimed."""
        return sum(segment.stage in NOT_FREE_YET for segment in self.segments)

    def tombstone(self, places: bytes) -> None:
        """Set and write the tombstones of these frames, given by segment and page."""
        touched = set()
        for number, page in PLACE.iter_unpack(places):
            store = self.stores[number]
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
                pages[number] = self.stores[number].directory.access_log.add(head.epoch)
            pages[number].append(page)

    def template(self, block: Outgoing) -> Template:
        """Return the header that all frames of this kind share."""
        key = (block.space, block.group, block.shard)
        kind = self._templates.get(key)
        if kind is None:
            pieces = entries(block.spec, block.group)
            kind = Template(block.space, block.group, block.shard, RAW, pieces)
            self._templates_bytes += kind.header_bytes
            if self._templates_bytes > TEMPLATES_BYTES:
                self._templates, self._templates_bytes = {}, kind.header_bytes
            self._templates[key] = kind
        return kind

    def blank(self, block: Outgoing) -> bytearray:
        """Return a header for this block, without its place."""
        text = self.template(block).blank(block.digest)
        if block.lossy:
            text[GENERATION_AT] = ONCE
        return text

    def fits(self, block: Outgoing, segment_bytes: int) -> bool:
        """Whether an empty segment of this size has room for the block."""
        footer = footer_bytes(described_bytes(space_bytes((block.space, block.spec))), 1)
        frame_bytes = self.template(block).total_bytes
        return first_frame(segment_bytes) + frame_bytes + footer <= segment_bytes

    def close_files(self, store: SegmentStore) -> None:
        """Close the files of this store's segments."""
        for segment, other in zip(self.segments, self.stores, strict=True):
            if other is store and segment.fd >= 0:
                os.close(segment.fd)


class SegmentTombstones:
    """Writes a store's tombstones. `unused` gets a segment when a write to it has ended."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, disk: DirectoryDisk, unused: Callable[[Segment], None],
    ) -> None:  # fmt: skip
        self._loop = loop
        self._disk = disk
        self._unused = unused
        self._clock = time.monotonic
        self._writing: dict[Segment, asyncio.Future[None]] = {}
        self._dirty: dict[Segment, None] = {}  # tombstones that are not written yet
        self._failed: dict[Segment, str] = {}  # why the last write failed
        self._retry_at = 0.0

    def add(self, segment: Segment, page: int) -> None:
        """Set the tombstone of this frame in memory; `write` writes it."""
        if segment.head is not None:
            segment.tombstones.add(page)
            self._dirty[segment] = None

    def write(self) -> None:
        """Start to write all dirty tombstones, except of segments whose head is being zeroed: those need
        none, unless that fails."""
        for segment in list(self._dirty):
            if segment not in self._writing and segment.stage is not Stage.FREEING:
                self._write_segment(segment)

    def retry(self) -> None:
        """Write again what failed, once per `RETRY_S`."""
        if self._dirty and self._disk.writes.is_on and self._clock() >= self._retry_at:
            self.write()

    async def flush(self) -> str:
        """Wait until all tombstones are on disk; return the failure, or an empty text."""
        self.write()
        for segment in list(self._writing):
            # The write in progress may lack the last tombstone; the next write has it.
            for _ in range(2):
                if writing := self._writing.get(segment):
                    await asyncio.shield(writing)
        return next(iter(self._failed.values()), "")

    def drop(self, segment: Segment) -> None:
        """Forget the tombstones of a segment that is reused."""
        self._dirty.pop(segment, None)
        self._failed.pop(segment, None)

    def _write_segment(self, segment: Segment) -> None:
        del self._dirty[segment]
        marks, head = segment.tombstones, segment.head
        if not marks.dirty or head is None:
            return
        first, count = marks.take_dirty()
        done = self._writing[segment] = self._loop.create_future()
        segment.noting = True

        def written(code: int, _: bytes | None) -> None:
            segment.noting = False
            del self._writing[segment]
            self._failed.pop(segment, None)
            if code:
                what = f"{segment.path}: cannot write its tombstones"
                self._disk.writes.fault(what, code)
                self._failed[segment] = f"{what}: {os.strerror(code)}"
                marks.dirty.update(range(first, first + count))
                self._dirty[segment] = None
                self._retry_at = self._clock() + RETRY_S
            elif segment in self._dirty:
                self._write_segment(segment)
            done.set_result(None)
            self._unused(segment)

        text = marks.encode(head.epoch, first, count)
        self._disk.write_text(segment.fd, PAGE + first * PAGE, text, written)


class SegmentStore:
    """`reclaim(store, segment)` is called when the oldest segment is to be reused: the callee copies the
    blocks that were requested again, then calls `release_segment`. `encrypted`: only encrypted blocks are
    written. `readers`: the group that may read the files."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, tenant: str, directory: ColdDirectory, disk: DirectoryDisk,
        table: SegmentTable, segment_bytes: int, most: int,
        reclaim: Callable[[SegmentStore, Segment], None], mappings: Mapping[int, MappedExtent],
        secret: bytes = b"", encrypted: bool = False,
        readers: int | None = None,
    ) -> None:  # fmt: skip
        self.tenant = tenant
        self.owner = directory.owner(tenant, secret)
        self.directory = directory
        self.disk = disk
        self.in_flight: set[WriteBatch] = set()
        self.releasing: dict[Segment, asyncio.Future[None]] = {}  # no block uses them; not free yet
        self.closing = False
        self.ready = False  # its files have been scanned
        self.log = SegmentLog()
        self.files = SegmentFiles(
            tenant, directory, disk, segment_bytes, most, self.owner, encrypted, readers
        )
        self.tombstones = SegmentTombstones(loop, disk, self.free_if_unused)
        self._loop = loop
        self._table = table
        self._reclaim = reclaim
        self._mappings = mappings
        self._encrypted = encrypted
        self._clock = time.monotonic
        self._creating = False
        self._full = False  # a segment is being reclaimed
        self._grows_at = 0.0  # after a file system without room for another file
        self._tries_at = 0.0  # after another failure

    # --- writing -----------------------------------------------------------------------------

    def has_place(self) -> bool:
        """Whether the open segment accepts a batch now. Without an open segment, prepares one."""
        if self.log.open is None:
            self.prepare()
            return False
        return len(self.in_flight) < MOST_BATCHES

    def write(self, blocks: Sequence[Outgoing], done: Wrote) -> int:
        """Start to write as many of the leading blocks as have a place now; return their number."""
        segment = self.log.open
        if not self.has_place() or segment is None or segment.head is None:
            return 0
        batch = WriteBatch(segment, done, self._loop.create_future())
        ops, headers, full = bytearray(), bytearray(), False
        for block in blocks:
            assert block.codec & ENCRYPTED or not self._encrypted, "a block that is not encrypted"
            kind, nbytes = self._table.template(block), block.payload_bytes
            frame_bytes = kind.header_bytes + pages(nbytes)
            taken = segment.table.take(frame_bytes, (block.space, block.spec))
            if taken is None:
                full = True
                break
            sequence = self._table.sequence
            self._table.sequence += 1
            header = bytearray(block.header) if block.header else self._table.blank(block)
            lossy = header[GENERATION_AT] > 0
            stamp(header, block.key, block.parent, segment.head.epoch, sequence)
            ops += self.disk.frame_op(
                segment.fd, taken.page * PAGE, nbytes, *(block.encoded_at or (block.extent, block.offset)),
                (len(headers), len(header)),
                _frame_done(batch, block, kind, taken, sequence, lossy, self._mappings),
            )  # fmt: skip
            headers += header
            batch.ops += 1
        if batch.ops:
            segment.writing += 1
            self.in_flight.add(batch)
            self.disk.write(segment.fd, ops, headers, self._wrote_all(batch))
        if full:
            self.seal()
        return batch.ops

    def _wrote_all(self, batch: WriteBatch) -> Callback:
        def written(code: int, _: bytes | None) -> None:
            segment = batch.segment
            segment.writing -= 1
            landed = FramedBlocks(
                batch.ids.tobytes(), bytes(batch.frames), bytes(batch.digests), batch.nbytes
            )
            if code or batch.failed:
                if code != errno.EFAULT:  # that is a page of the slot, not the disk
                    self.disk.writes.fault(f"{segment.path}: write failed", code or errno.EIO)
                batch.failed += batch.ids
                batch.unused += (page for _, page, *_ in FRAME.iter_unpack(batch.frames))
                landed = FramedBlocks()
                segment.table.failed = True
                if segment.stage is Stage.OPEN:
                    self.log.failed(segment)
            elif segment.stage in (Stage.OPEN, Stage.SEALING):
                for at, row in batch.rows:
                    segment.table.wrote(at, row)
            # They may be on the disk all the same, and a scan would find them, also after a forget.
            for page in batch.unused:
                self.tombstones.add(segment, page)
            self.in_flight.discard(batch)
            try:
                batch.done(landed, batch.failed + batch.lost)
            finally:
                batch.settled.set_result(None)
            self.prepare()
            self.free_if_unused(segment)
            if segment.stage is Stage.SEALING and not segment.writing:
                self._write_footer(segment)

        return written

    def leaves_next(self) -> list[Segment]:
        """Return the segments that are reused next, in order, if a new file would be one too many."""
        may_grow = self.files.has_room and self._clock() >= self._grows_at
        if may_grow or len(self.log) < LEAST_SEGMENTS:
            return []
        return list(islice(self.log.sealed, max(1, len(self.log) // AHEAD_SHARE)))

    # --- segments ----------------------------------------------------------------------------

    def seal(self) -> None:
        """Close the open segment for writing, and prepare the next one."""
        segment = self.log.seal()
        if not segment.writing:
            self._write_footer(segment)
        self.prepare()

    def _write_footer(self, segment: Segment) -> None:
        assert segment.head is not None
        at, text = segment.table.footer(segment.head)
        what = f"{segment.path}: cannot write its footer"
        self.disk.write_text(
            segment.fd, at, text, self._stage_done(segment, self.log.now_sealed, what)
        )

    def _stage_done(self, segment: Segment, good: Callable[[Segment], None], what: str) -> Callback:
        """Return the callback of a write after which the segment has its next stage."""

        def written(code: int, _: bytes | None) -> None:
            if code:
                self.disk.writes.fault(what, code)
                self.log.failed(segment)
            else:
                good(segment)
            self.prepare()

        return written

    def prepare(self) -> None:
        """Begin a segment unless one is open, and get one more: a new file, or the oldest segment."""
        if self.closing or not self.ready or not self.disk.writes.is_on:
            return  # the next write calls it again
        if self._clock() < self._tries_at:
            return
        for releasing in list(self.releasing):
            self.free_if_unused(releasing)
        beginning = any(segment.stage is Stage.BEGINNING for segment in self.log.others)
        if self.log.free and self.log.open is None and not beginning:
            self._begin()
        if self.log.free or self._creating or self._full:
            return
        if self.files.has_room and self._clock() >= self._grows_at:
            self._create()
        elif len(self.log) >= LEAST_SEGMENTS and (segment := self.log.reclaim()) is not None:
            self._full = True
            self._reclaim(self, segment)

    def _begin(self) -> None:
        epoch = secrets.randbits(64)
        segment = self.log.begin(epoch, self._table.sequence, self.owner, self._encrypted)
        assert segment.head is not None
        marks = segment.tombstones

        def written(code: int, _: bytes | None) -> None:
            if code:
                self.disk.writes.fault(f"{segment.path}: cannot write its head", code)
                self.log.not_begun(segment)
            else:
                self._begun(segment)
                self.prepare()

        text = segment.head.encode() + marks.encode(epoch, 0, marks.count)
        self.disk.write_text(segment.fd, 0, text, written)

    def _begun(self, segment: Segment) -> None:
        self.log.begun(segment)
        if self.closing:
            self.seal()
        elif self.tenant in self._table.opened:
            self._table.opened[self.tenant]()

    def _create(self) -> None:
        """Create a file for one more segment."""
        self._creating = True
        path, creating = self.files.create()

        def created(future: asyncio.Future[int]) -> None:
            if future.cancelled():
                return
            self._creating = False
            error = future.exception()
            if error is not None:
                code = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
                self._create_failed(path, code)
            elif self.closing:
                os.close(future.result())
            else:
                self.disk.short = ""
                new = Segment(
                    0, str(path), future.result(), self.files.segment_bytes, leftover=False
                )
                self.files.hold(new)
                self._table.add(self, new)
                self.log.add(new)
            self.prepare()

        creating.add_done_callback(created)

    def _create_failed(self, path: Path, code: int) -> None:
        """Retry later. Without room, the existing segments are reused until then."""
        what = f"cannot create {path}"
        if code in NO_ROOM:
            self.disk.writes.faults += 1
            self.disk.short = f"{what}: {os.strerror(code)}"
            text = "cold: %s; reusing existing segments, retrying in %.0f s"
            log.error(text, self.disk.short, RETRY_GROW_S)
            self._grows_at = self._clock() + RETRY_GROW_S
        else:
            self.disk.writes.fault(what, code)
            self._tries_at = self._clock() + RETRY_S

    def release_segment(self, segment: Segment) -> None:
        """Free this segment, which no block uses, as soon as no read uses it."""
        self.releasing[segment] = self._loop.create_future()
        self.free_if_unused(segment)

    def free_if_unused(self, segment: Segment) -> None:
        """Free a released segment after its last read or write."""
        if segment not in self.releasing or not segment.idle or segment.stage is not Stage.LEAVING:
            return
        self.log.freeing(segment)

        def cleared(code: int, _: bytes | None) -> None:
            if code:
                # A start would still find its frames, so it is not free.
                self.disk.writes.fault(
                    f"{segment.path}: cannot clear its head, so it cannot be reused yet", code
                )
                self._tries_at = self._clock() + RETRY_S
                self.log.not_freed(segment)
                return
            self._recycle(segment)

        # Otherwise a start would find its frames, also those that were forgotten.
        self.disk.write_text(segment.fd, 0, bytes(PAGE), cleared)

    def _recycle(self, segment: Segment) -> None:
        """Use the file again; replace it if new files have another size."""
        assert segment.head is not None
        self.tombstones.drop(segment)
        self.directory.access_log.drop(segment.head.epoch)
        if segment.nbytes == self.files.segment_bytes:
            self.log.freed(segment)
        else:
            self.log.retired(segment)
            self.files.remove(segment)
        self.releasing.pop(segment).set_result(None)
        self._full = False
        self.prepare()

    # --- erasing -----------------------------------------------------------------------------

    async def erase(self, segment: Segment, live: Callable[[int], dict[int, int]]) -> None:
        """Erase all bytes of the segment's file except the frames `live`: pages of each frame, by first page.
        The segment is not reused meanwhile. Raises OSError or TierError."""
        # A write in progress may be of frames that no block has yet, or of a footer that lists all frames.
        while segment.stage in BEFORE_ERASE or segment.writing:
            if segment.stage is Stage.OPEN:
                if _is_clean(segment, live):
                    return
                self.seal()
            await asyncio.sleep(ERASE_POLL_S)
        if segment.fd < 0:
            return  # its file was removed
        if self.disk.is_over:
            raise TierError(f"{self.directory.path} was closed meanwhile")
        was_free = segment.stage is Stage.FREE
        if was_free:
            self.log.hold_back(segment)
        else:
            segment.reading += 1
        head, pages_of = (None, {}) if was_free else (segment.head, live(segment.number))
        job = self.disk.files.run(
            erase, Path(segment.path), segment.fd, head, pages_of,
            partial(spaces_of, self.directory, self.tenant),
        )  # fmt: skip

        def erased(done: asyncio.Future[None]) -> None:
            if not was_free:
                segment.reading -= 1
                self.free_if_unused(segment)
                return
            self.log.freed(segment)
            segment.leftover = done.cancelled() or done.exception() is not None
            self.prepare()

        job.add_done_callback(erased)
        await asyncio.shield(job)  # the caller may time out; the writes go on

    # --- start -------------------------------------------------------------------------------

    def adopt(self, one: Recovered, fd: int) -> Segment:
        """Add a segment that the scan found; `fd` is its file."""
        segment = Segment(0, str(one.path), fd, one.nbytes)
        self.files.hold(segment)
        self._table.add(self, segment)
        if one.head is None:
            self.log.add(segment)
            return segment
        segment.head = one.head
        self.log.add_sealed(segment)
        self._table.sequence = max(self._table.sequence, one.head.sequence + entries_of(one) + 1)
        segment.tombstones = one.tombstones
        if not one.sealed:
            self._write_late_footer(segment, one)
        return segment

    def _write_late_footer(self, segment: Segment, one: Recovered) -> None:
        """Write the footer that a killed daemon did not write, so that the next start walks no frames."""
        if free_bytes(one) < described_bytes(sum(map(space_bytes, one.spaces))):
            return
        assert one.head is not None
        at, text = encode_footer(one.head, one.spaces, one.table, one.end, torn=True)
        segment.writing += 1

        def written(code: int, _: bytes | None) -> None:
            segment.writing -= 1
            if code:
                self.disk.writes.fault(f"{segment.path}: cannot write its footer", code)
            self.free_if_unused(segment)

        self.disk.write_text(segment.fd, at, text, written)

    def resume(self, found: Sequence[Recovered]) -> None:
        """Continue to write to the newest segment, if a fourth of it is free. Never to one that a killed
        daemon left open: unfinished writes of the same epoch lie behind its last good frame."""
        newest = self.log.sealed[-1] if self.log.sealed else None
        one = next((one for one in found if newest and str(one.path) == newest.path), None)
        if newest is None or one is None or not one.sealed or one.torn:
            return
        if one.head is None or one.head.encrypted != self._encrypted:
            return
        if free_bytes(one) < one.nbytes // RESUME_SHARE:
            return
        newest.table = FrameTable(newest.nbytes, one.spaces, one.table, one.end)
        self.log.resume(newest)
        what = f"{newest.path}: cannot continue to write"
        # With a footer, a start would not look for frames that the footer does not list.
        self.disk.write_text(
            newest.fd, newest.nbytes - PAGE, bytes(PAGE),
            self._stage_done(newest, self._begun, what),
        )  # fmt: skip


def _is_clean(segment: Segment, live: Callable[[int], dict[int, int]]) -> bool:
    """Whether the file of an open segment holds only frames of blocks."""
    clean = not segment.leftover and not segment.writing and not segment.table.failed
    return clean and len(segment.table) == len(live(segment.number))


def _frame_done(
    batch: WriteBatch, block: Outgoing, kind: Template, taken: Taken, sequence: int, lossy: bool,
    mappings: Mapping[int, MappedExtent],
) -> Callback:  # fmt: skip
    """Return the callback of one frame's write, which notes the frame in the batch."""

    def written(code: int, digest: bytes | None) -> None:
        if code or digest is None:
            batch.failed.append(block.id)
            batch.unused.append(taken.page)
            return
        if mappings[block.extent].lost:  # a client removed pages: the frame is not the block
            batch.lost.append(block.id)
            batch.unused.append(taken.page)
            return
        header_pages, nbytes = kind.header_bytes // PAGE, block.payload_bytes
        row = pack_row(
            block.key, block.parent, taken.space, block.group, block.shard, taken.page,
            header_pages + pages(nbytes) // PAGE, header_pages, block.codec, nbytes, kind.raw_bytes,
            sequence, digest, lossy,
        )  # fmt: skip
        batch.rows.append((taken.at, row))
        batch.ids.append(block.id)
        number, flags = batch.segment.number, LOSSY if lossy else 0
        batch.frames += FRAME.pack(number, taken.page, nbytes, block.codec, header_pages, flags)
        batch.digests += digest
        batch.nbytes += kind.header_bytes + pages(nbytes)

    return written
