"""What one tenant has in one directory: writes blocks to the open segment, sees to it that there is one.

A write: header and payload to the open segment, then fdatasync of it, and only then is the block said to be
on disk. Segments come and go as their log says.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from kvtier.codec.frame import GENERATION_AT, PAGE, RAW, Identity, Template, pages, stamp
from kvtier.codec.framing import ONCE
from kvtier.codec.raw import entries
from kvtier.errors import TierError
from kvtier.layout import KvSpec
from kvtier_daemon.tiers.batch import Batch, Landed, Outgoing, Wrote
from kvtier_daemon.tiers.drive import Drive, Over
from kvtier_daemon.tiers.erasing import erase
from kvtier_daemon.tiers.log import Log, Segment, Stage, Taken
from kvtier_daemon.tiers.recovery import Recovered, entries_of, free_bytes, recover, refuse_copies
from kvtier_daemon.tiers.segment import (
    Listed,
    described_bytes,
    encode_footer,
    encode_row,
    first_frame,
    footer_bytes,
    space_bytes,
)
from kvtier_daemon.tiers.volume import (
    Volume,
    open_direct,
    space_key,
    spaces_of,
)

log = logging.getLogger(__name__)

GROW_AGAIN_S = 30.0
TRY_AGAIN_S = 1.0
TEMPLATES_BYTES = 8 << 20
GOING_MOST = 4  # batches under way, where a disk is so slow that nobody waits for it
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LEAST_TO_LEAVE = 3
BEFORE_ERASE = (Stage.BEGINNING, Stage.OPEN, Stage.SEALING, Stage.FREEING)
ERASE_LOOK_S = 0.005
RESUME_LEAST = 4  # a segment is written on if a fourth of it is free


class Numbering:
    """What all shelves of a daemon count together."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.shelves: list[Shelf] = []  # of each segment
        self.sequence = 1
        self._templates: dict[tuple[bytes, int, int], Template] = {}
        self._templates_bytes = 0

    def add(self, shelf: Shelf, segment: Segment) -> None:
        segment.number = len(self.segments)
        self.segments.append(segment)
        self.shelves.append(shelf)

    def template(self, block: Outgoing) -> Template:
        """The header that all frames of this kind share."""
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
        """A header for this block that is nobody's yet."""
        text = self.template(block).blank(block.digest)
        if block.lossy:
            text[GENERATION_AT] = ONCE
        return text


class Shelf:
    """`leaving(shelf, segment)` is called when the oldest segment is to be used again: whoever is told brings
    away what deserves it, and then says `left`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        tenant: str,
        volume: Volume,
        drive: Drive,
        numbering: Numbering,
        segment_bytes: int,
        most: int,
        leaving: Callable[[Shelf, Segment], None],
        is_lost: Callable[[int], bool],
        clock: Callable[[], float] = time.monotonic,
        secret: bytes = b"",
    ) -> None:
        self.tenant = tenant
        self.owner = volume.owner(tenant, secret)
        self.volume = volume
        self.drive = drive
        self.described: dict[bytes, KvSpec] = {}  # spaces that a start has found
        self.unreadable = 0  # files that are no use and can't be removed
        self._segment_bytes = segment_bytes
        self._most_bytes = most * segment_bytes
        self._held_bytes = 0  # of its files
        self._next_file = 0
        self.going: set[Batch] = set()
        self.parting: dict[Segment, asyncio.Future[None]] = {}  # named no more, and not free yet
        self.closing = False
        self.ready = False  # what was there is known
        self.log = Log()
        self._loop = loop
        self._numbering = numbering
        self._leaving = leaving
        self._is_lost = is_lost
        self._clock = clock
        self._making = False
        self._full = False  # said once to the owner, until something has left
        self._grows_at = 0.0  # after a file for which there was no room
        self._tries_at = 0.0  # after one that could not be made at all
        self._noting: dict[Segment, asyncio.Future[None]] = {}  # their tombstones are being written
        self._to_note: dict[Segment, None] = {}  # theirs are to be written
        self._not_noted: dict[Segment, str] = {}  # why theirs could not be
        self._notes_at = 0.0  # after some that could not be written

    # --- writing -----------------------------------------------------------------------------

    def fits(self, block: Outgoing) -> bool:
        """Whether a segment can have such a block at all."""
        kind = self._numbering.template(block)
        footer = footer_bytes(described_bytes(space_bytes((block.space, block.spec))), 1)
        first = first_frame(self._segment_bytes)
        return first + kind.total_bytes + footer <= self._segment_bytes

    def has_place(self) -> bool:
        """Whether there is an open segment that may be written to; sees to it that there is one to come."""
        if self.log.open is None:
            self.prepare()
            return False
        return len(self.going) < GOING_MOST

    def write(self, blocks: Sequence[Outgoing], done: Wrote) -> int:
        """Write the leading blocks, as many as have a place now; how many."""
        segment = self.log.open
        if not self.has_place() or segment is None or segment.head is None:
            return 0
        batch = Batch(segment, done, self._loop.create_future())
        ops, headers, full = bytearray(), bytearray(), False
        for block in blocks:
            kind, coded, nbytes = self._numbering.template(block), block.coded, block.payload_bytes
            frame_bytes = kind.header_bytes + pages(nbytes)
            taken = segment.take(frame_bytes, (block.space, block.spec))
            if taken is None:
                full = True
                break
            sequence = self._numbering.sequence
            self._numbering.sequence += 1
            header = bytearray(coded.header) if coded is not None else self._numbering.blank(block)
            lossy = header[GENERATION_AT] > 0
            stamp(header, block.key, block.parent, segment.head.epoch, sequence)
            ops += self.drive.frame_op(
                segment.fd, taken.page * PAGE, nbytes, *block.place, (len(headers), len(header)),
                self._wrote_one(batch, block, kind, taken, sequence, lossy),
            )  # fmt: skip
            headers += header
            batch.ops += 1
        if batch.ops:
            segment.writing += 1
            self.going.add(batch)
            self.drive.write(segment.fd, ops, headers, self._wrote_all(batch))
        if full:
            self.seal()
        return batch.ops

    def _wrote_one(
        self, batch: Batch, block: Outgoing, kind: Template, taken: Taken, sequence: int, lossy: bool
    ) -> Over:  # fmt: skip
        def over(code: int, digest: bytes | None) -> None:
            if code or digest is None:
                batch.failed.append(block.id)
                return
            if self._is_lost(block.extent):
                batch.lost.append(block.id)  # what was written is not the block: nothing names it
                return
            header_pages, nbytes = kind.header_bytes // PAGE, block.payload_bytes
            listed = Listed(
                Identity(block.space, block.group, block.shard, block.key), block.parent, taken.page,
                header_pages + pages(nbytes) // PAGE, header_pages, block.codec, nbytes, kind.raw_bytes,
                sequence, digest, lossy,
            )  # fmt: skip
            batch.rows.append((taken.at, encode_row(listed, taken.space)))
            number = batch.segment.number
            batch.landed.append(
                Landed(
                    block.id, number, taken.page, header_pages, nbytes, digest, block.codec, lossy
                )
            )  # fmt: skip

        return over

    def _wrote_all(self, batch: Batch) -> Over:
        def over(code: int, _: bytes | None) -> None:
            segment = batch.segment
            segment.writing -= 1
            if code or batch.failed:
                if code != errno.EFAULT:  # that is a page of the slot, not the disk
                    self._fault(f"{segment.path}: a write failed", code or errno.EIO)
                batch.failed += [one.id for one in batch.landed]
                batch.landed = []
                segment.failed = True
                if segment.stage is Stage.OPEN:
                    self.log.failed(segment)
            elif segment.stage in (Stage.OPEN, Stage.SEALING):
                for at, row in batch.rows:
                    segment.list_frame(at, row)
            self.going.discard(batch)
            try:
                batch.done(batch.landed, batch.failed + batch.lost)
            finally:
                batch.settled.set_result(None)
            self.prepare()
            self._perhaps_freed(segment)
            if segment.stage is Stage.SEALING and not segment.writing:
                self._write_footer(segment)

        return over

    # --- segments ----------------------------------------------------------------------------

    def seal(self) -> None:
        """The open segment takes no more."""
        segment = self.log.seal()
        if not segment.writing:
            self._write_footer(segment)
        self.prepare()

    def _write_footer(self, segment: Segment) -> None:
        assert segment.head is not None
        rows = segment.rows() if segment.failed else bytes(segment.table)
        at, text = encode_footer(segment.head, segment.spaces, rows, segment.end)
        what = f"{segment.path}: its footer can't be written"
        self.drive.write_text(
            segment.fd, at, text, self._moved_on(segment, self.log.now_sealed, what)
        )

    def _moved_on(self, segment: Segment, good: Callable[[Segment], None], what: str) -> Over:
        """What follows a write that brings a segment to its next stage."""

        def over(code: int, _: bytes | None) -> None:
            if code:
                self._fault(what, code)
                self.log.failed(segment)
            else:
                good(segment)
            self.prepare()

        return over

    def prepare(self) -> None:
        """See to it that there is a segment to write to, and one more to come after it."""
        books = self.log
        if self.closing or not self.ready or not self.drive.writes.is_on:
            return  # a write asks again
        if self._clock() < self._tries_at:
            return
        for parting in list(self.parting):
            self._perhaps_freed(parting)
        beginning = any(one.stage is Stage.BEGINNING for one in books.others)
        if books.free and books.open is None and not beginning:
            self._begin()
        if books.free or self._making or self._full:
            return
        room = self._held_bytes + self._segment_bytes <= self._most_bytes
        if room and self._clock() >= self._grows_at:
            self._make()
        elif len(books) >= LEAST_TO_LEAVE and (segment := books.leave()) is not None:
            self._full = True
            self._leaving(self, segment)

    def _begin(self) -> None:
        epoch = secrets.randbits(64)
        segment = self.log.begin(epoch, self._numbering.sequence, self.owner)
        assert segment.head is not None
        marks = segment.tombstones

        def over(code: int, _: bytes | None) -> None:
            if code:
                self._fault(f"{segment.path}: its head can't be written", code)
                self.log.not_begun(segment)
            else:
                self._begun(segment)
                self.prepare()

        text = segment.head.encode() + marks.encode(epoch, 0, marks.count)
        self.drive.write_text(segment.fd, 0, text, over)

    def _begun(self, segment: Segment) -> None:
        self.log.begun(segment)
        if self.closing:
            self.seal()

    def _make(self) -> None:
        """A new file, made beside the loop."""
        self._making = True
        number, self._next_file = self._next_file, self._next_file + 1
        path = self.volume.segment_path(self.tenant, number)
        making = self.drive.beside(self.volume.make, path, self._segment_bytes)

        def made(future: asyncio.Future[int]) -> None:
            if future.cancelled():
                return
            self._making = False
            error = future.exception()
            if error is not None:
                code = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
                self._not_made(path, code)
            elif self.closing:
                os.close(future.result())
            else:
                self.drive.short = ""
                new = Segment(0, str(path), future.result(), self._segment_bytes, leftover=False)
                self._add(new)
            self.prepare()

        making.add_done_callback(made)

    def _not_made(self, path: Path, code: int) -> None:
        """What is there has to do for a while; or, where nothing can be written at all, stays."""
        what = f"{path} can't be made"
        if code in NO_ROOM:
            self.drive.faults += 1
            self.drive.short = f"{what}: {os.strerror(code)}"
            log.error("cold: %s; what is there has to do for a while", self.drive.short)
            self._grows_at = self._clock() + GROW_AGAIN_S
        else:
            self._fault(what, code)
            self._tries_at = self._clock() + TRY_AGAIN_S

    def _add(self, segment: Segment) -> None:
        self._held_bytes += segment.nbytes
        self._numbering.add(self, segment)
        self.log.add(segment)

    def left(self, segment: Segment) -> None:
        """Nothing names this segment any more: it is used again once nothing reads it."""
        self.parting[segment] = self._loop.create_future()
        self._perhaps_freed(segment)

    def not_read(self, segment: Segment) -> None:
        """A read of it has ended."""
        segment.reading -= 1
        self._perhaps_freed(segment)

    def _perhaps_freed(self, segment: Segment) -> None:
        if segment not in self.parting or not segment.idle or segment.stage is not Stage.LEAVING:
            return
        self.log.freeing(segment)

        def over(code: int, _: bytes | None) -> None:
            if code:
                # As long as a start would find its frames it is not free.
                self._fault(f"{segment.path}: its head can't be taken back", code)
                self._tries_at = self._clock() + TRY_AGAIN_S
                self.log.not_freed(segment)
                return
            self._used_again(segment)
            if segment.nbytes == self._segment_bytes:
                self.log.freed(segment)
            else:
                self._retire(segment)
            self.parting.pop(segment).set_result(None)
            self._full = False
            self.prepare()

        # A start would find its frames, those that were forgotten since among them.
        self.drive.write_text(segment.fd, 0, bytes(PAGE), over)

    def _retire(self, segment: Segment) -> None:
        """Remove the file of one that has another size than new ones: those take its place."""
        self.log.retired(segment)
        self._held_bytes -= segment.nbytes
        fd, segment.fd = segment.fd, -1

        def remove() -> None:
            os.close(fd)
            self._remove(Path(segment.path))

        self.drive.beside(remove)  # before a new file is made there

    # --- what was forgotten ------------------------------------------------------------------

    def bury(self, segment: Segment, page: int) -> None:
        """Set the tombstone of this frame; `note` writes it to the disk."""
        if segment.head is not None:
            segment.tombstones.add(page)
            self._to_note[segment] = None

    def note(self) -> None:
        """Begin to write the tombstones that are not on disk. A segment whose head is being zeroed needs
        none, unless that fails."""
        for segment in list(self._to_note):
            if segment not in self._noting and segment.stage is not Stage.FREEING:
                self._note(segment)

    def note_again(self) -> None:
        """The same, of those that could not be written, now and then."""
        if self._to_note and self.drive.writes.is_on and self._clock() >= self._notes_at:
            self.note()

    async def noted(self) -> str:
        """Wait until all tombstones until now are on disk; what went wrong, or nothing."""
        self.note()
        for segment in list(self._noting):
            # The write under way may have begun before the last tombstone: the next one has it.
            for _ in range(2):
                if writing := self._noting.get(segment):
                    await asyncio.shield(writing)
        return next(iter(self._not_noted.values()), "")

    def _note(self, segment: Segment) -> None:
        del self._to_note[segment]
        marks, head = segment.tombstones, segment.head
        if not marks.dirty or head is None:
            return
        first, count = marks.take_dirty()
        done = self._noting[segment] = self._loop.create_future()
        segment.noting = True

        def over(code: int, _: bytes | None) -> None:
            segment.noting = False
            del self._noting[segment]
            self._not_noted.pop(segment, None)
            if code:
                what = f"{segment.path}: its tombstones can't be written"
                self._fault(what, code)
                self._not_noted[segment] = f"{what}: {os.strerror(code)}"
                marks.not_written(range(first, first + count))
                self._to_note[segment] = None
                self._notes_at = self._clock() + TRY_AGAIN_S
            elif segment in self._to_note:
                self._note(segment)
            done.set_result(None)
            self._perhaps_freed(segment)

        text = marks.encode(head.epoch, first, count)
        self.drive.write_text(segment.fd, PAGE + first * PAGE, text, over)

    def _used_again(self, segment: Segment) -> None:
        """Nothing of it is to be remembered."""
        assert segment.head is not None
        self._to_note.pop(segment, None)
        self._not_noted.pop(segment, None)
        self.volume.uses.drop(segment.head.epoch)

    # --- erasing -----------------------------------------------------------------------------

    async def erase(self, segment: Segment, live: Callable[[int], dict[int, int]]) -> None:
        """Have nothing in this segment's file but `live` frames, by page, and how many pages each. It is not
        used again meanwhile. Raises OSError or TierError."""
        # What is being written may be frames that no block has yet, or a footer that lists all frames.
        while segment.stage in BEFORE_ERASE or segment.writing:
            if segment.stage is Stage.OPEN:
                if self._is_clean(segment, live):
                    return
                self.seal()
            await asyncio.sleep(ERASE_LOOK_S)
        if segment.fd < 0:
            return  # its file is removed
        if self.drive.is_over:
            raise TierError(f"{self.volume.directory} was closed meanwhile")
        was_free = segment.stage is Stage.FREE
        if was_free:
            self.log.hold_back(segment)
        else:
            segment.reading += 1
        head, pages_of = (None, {}) if was_free else (segment.head, live(segment.number))
        job = self.drive.beside(
            erase, Path(segment.path), segment.fd, head, pages_of,
            partial(spaces_of, self.volume, self.tenant),
        )  # fmt: skip

        def over(done: asyncio.Future[None]) -> None:
            if not was_free:
                self.not_read(segment)
                return
            self.log.freed(segment)
            segment.leftover = done.cancelled() or done.exception() is not None
            self.prepare()

        job.add_done_callback(over)
        await asyncio.shield(job)  # a caller that gives up does not stop the writes

    def _is_clean(self, segment: Segment, live: Callable[[int], dict[int, int]]) -> bool:
        """Whether an open segment has nothing but frames of blocks."""
        clean = not segment.leftover and not segment.writing and not segment.failed
        return clean and segment.taken == len(live(segment.number))

    def close_files(self) -> None:
        for segment, shelf in zip(self._numbering.segments, self._numbering.shelves, strict=True):
            if shelf is self and segment.fd >= 0:
                os.close(segment.fd)

    def _fault(self, what: str, code: int) -> None:
        self.drive.fault(self.drive.writes, what, code)

    # --- start -------------------------------------------------------------------------------

    async def look(self) -> list[Recovered]:
        """What the files hold, oldest first, as many as there is a place for; the others go before anything
        is made."""
        described = await self.drive.beside(spaces_of, self.volume, self.tenant)
        found = []
        for path in await self.drive.beside(self.volume.files, self.tenant):
            self._next_file = max(self._next_file, int(path.name) + 1)
            if (one := await self._look_into(path, None)) is not None:
                found.append(one)
        found = refuse_copies(found)
        # What the index has lost may be described by a sealed segment.
        footers = {identity: spec for one in found for identity, spec in one.spaces}
        for at, one in enumerate(found):
            if one.head is not None and not one.sealed:
                found[at] = await self._look_into(one.path, footers | described) or one
        found.sort(key=lambda one: one.head.sequence if one.head else -1)
        stay = self._fitting(found)
        kept = {one.path for one in stay}
        if others := sum(one.nbytes != self._segment_bytes for one in stay):
            log.warning(
                "cold: %s: %d segments of tenant %s have another size than cold.segment says now (%d bytes):"
                " they are used as they are until it is their turn to be reused",
                self.volume.directory, others, self.tenant, self._segment_bytes,
            )  # fmt: skip
        for one in found:
            if one.warning:
                log.warning("cold: %s: %s", one.path, one.warning)
            if one.path not in kept:
                await self.drive.beside(self._remove, one.path)
        self.described = self._still_described(described, stay)
        return stay

    def _fitting(self, found: Sequence[Recovered]) -> list[Recovered]:
        """Those that there is room for, the newest first. One of another size than new ones is kept for what
        it holds, unless there is no room for three such: then it could never leave."""
        stay, room = [], self._most_bytes
        for one in reversed(found):
            other = one.nbytes != self._segment_bytes
            unfit = other and (one.head is None or one.nbytes > self._most_bytes // LEAST_TO_LEAVE)
            if not (one.foreign or unfit) and one.nbytes <= room:
                stay.append(one)
                room -= one.nbytes
        return stay[::-1]

    async def _look_into(
        self, path: Path, described: Mapping[bytes, KvSpec] | None
    ) -> Recovered | None:
        """What a file holds; None where that can't be known."""
        try:
            return await self.drive.beside(self._recover, path, described)
        except TierError as error:
            # It takes room that the cap has to know of, and holds nothing that can be had.
            log.error("cold: %s", error)
            self.has_less(path)
            return None

    def _recover(self, path: Path, described: Mapping[bytes, KvSpec] | None) -> Recovered:
        one = recover(path, self.owner, described)
        if one.head is not None:
            one.used = self.volume.uses.pages(one.head.epoch)
            one.split()
        return one

    def _still_described(
        self, described: Mapping[bytes, KvSpec], found: Sequence[Recovered]
    ) -> dict[bytes, KvSpec]:
        """Those spaces that something is there of; the others' descriptions go, if nothing can be found of
        them later: in a file that could not be read, or behind a frame that is damaged."""
        if self.unreadable or not all(one.sealed for one in found if one.head is not None):
            return dict(described)
        there = {identity for one in found for identity, _ in one.spaces}
        for identity in described.keys() - there:
            self.volume.index.drop(b"spaces", space_key(self.tenant, identity))
        return {identity: spec for identity, spec in described.items() if identity in there}

    def _remove(self, path: Path) -> None:
        log.warning("cold: %s is removed: it is not used, or cold.size has no room for it", path)
        try:
            path.unlink()
        except OSError as error:
            log.error("cold: %s can't be removed: %s", path, error)
            self.has_less(path)

    def has_less(self, path: Path | None = None) -> None:
        """A file takes the place of one of its segments, and is no use."""
        self.unreadable += 1
        nbytes = self._segment_bytes
        if path is not None:
            with contextlib.suppress(OSError):
                nbytes = max(nbytes, path.lstat().st_size)
        self._most_bytes -= nbytes

    def not_taken_up(self, one: Recovered, error: Exception) -> None:
        log.error("cold: %s can't be taken up: %s", one.path, error)
        self.has_less(one.path)

    def open_found(self, one: Recovered) -> int:
        """A descriptor of a segment that a start has found. Waits for the disk."""
        return open_direct(one.path)

    def take_up(self, one: Recovered, fd: int) -> Segment:
        """A segment that a start has found, open at `fd`."""
        segment = Segment(0, str(one.path), fd, one.nbytes)
        self._add(segment)
        if one.head is None:
            return segment
        self.log.free.remove(segment)
        segment.head = one.head
        self.log.add_sealed(segment)
        self._numbering.sequence = max(
            self._numbering.sequence, one.head.sequence + entries_of(one) + 1
        )
        segment.tombstones = one.tombstones
        if not one.sealed:
            self._seal_late(segment, one)
        return segment

    def _seal_late(self, segment: Segment, one: Recovered) -> None:
        """A kill has left it without a footer. With one, the next start need not walk it."""
        if free_bytes(one) < described_bytes(sum(map(space_bytes, one.spaces))):
            return
        assert one.head is not None
        at, text = encode_footer(one.head, one.spaces, one.table, one.end, torn=True)
        segment.writing += 1

        def over(code: int, _: bytes | None) -> None:
            segment.writing -= 1
            if code:
                self._fault(f"{segment.path}: its footer can't be written", code)
            self._perhaps_freed(segment)

        self.drive.write_text(segment.fd, at, text, over)

    def resume(self, found: Sequence[Recovered]) -> None:
        """Go on writing to the newest segment, if a good part of it is free. One that a kill has left open is
        not written on: what it was writing lies behind the last good frame, and is of the same epoch."""
        newest = self.log.sealed[-1] if self.log.sealed else None
        one = next((one for one in found if newest and str(one.path) == newest.path), None)
        if newest is None or one is None or not one.sealed or one.torn:
            return
        if free_bytes(one) < one.nbytes // RESUME_LEAST:
            return
        newest.resume(one.spaces, one.table, one.end)
        self.log.resume(newest)
        what = f"{newest.path}: can't be written on"
        # As long as it has a footer, a start would not look for what comes after what that lists.
        self.drive.write_text(
            newest.fd, newest.nbytes - PAGE, bytes(PAGE),
            self._moved_on(newest, self._begun, what),
        )  # fmt: skip
