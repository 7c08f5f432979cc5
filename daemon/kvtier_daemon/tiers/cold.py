"""The cold tier: blocks in segment files on disks. Moves what it is told to, keeps the files within their
cap.

The loop plans and the native worker moves: nothing here waits for a disk. One `Shelf` is what a tenant has in
one directory. Blocks go to the shelves in turn.

A write: header and payload to the open segment, then fdatasync of it, and only then is the block said to be
on disk. A read: the payload straight into its slot, checked against the digest of what was saved under that
name."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvtier.codec.frame import PAGE, RAW, Identity, Template
from kvtier.codec.raw import entries
from kvtier.errors import KvtierError, TierError
from kvtier.layout import KvSpec
from kvtier_daemon.tiers.log import Log, Segment, Stage
from kvtier_daemon.tiers.recovery import Recovered, entries_of, free_bytes, recover
from kvtier_daemon.tiers.segment import (
    FIRST_FRAME,
    Listed,
    described_bytes,
    encode_footer,
    encode_row,
    footer_bytes,
    page_of,
    split_rows,
)
from kvtier_daemon.tiers.volume import (
    Volume,
    buried_key,
    open_direct,
    spaces_of,
    tenant_digest,
)
from kvtier_kernels import Disk, Mapping

log = logging.getLogger(__name__)

# token, fd, flags, file offset, nbytes, extent, deadline, memory offset
OPERATION = struct.Struct("<QiIQQIIQ")
DIGEST_TAIL = struct.Struct("<16s")
BURIED = struct.Struct("<II")
HEADER_TAIL = struct.Struct("<QQ")
URGENT, DIGEST, SEAL = 1, 2, 4
READ_MS = 2000
FAULTS_TO_OFF = 5
OFF_S, LONGEST_OFF_S = 5.0, 300.0
GROW_AGAIN_S = 30.0
LEAST_TO_LEAVE = 3
RESUME_LEAST = 4  # a segment is written on if a fourth of it is free
BENIGN = (errno.ETIMEDOUT, errno.ECANCELED, errno.EBADMSG, errno.ENODATA)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A block to be written: what it is, and the slot that has it. `digest` is empty where none is known."""

    id: int
    space: bytes
    spec: KvSpec
    group: int
    shard: int
    key: bytes
    parent: bytes
    digest: bytes
    extent: int
    offset: int


@dataclass(frozen=True, slots=True)
class Landed:
    """A block that is on disk, and where."""

    id: int
    segment: int
    page: int
    header_pages: int
    payload_bytes: int
    digest: bytes


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


Wrote = Callable[[list[Landed], list[int]], None]
Read = Callable[[Incoming, int], None]  # and an errno or 0


@dataclass(slots=True, eq=False)
class Shelf:
    """A tenant's log in one directory."""

    tenant: str
    volume: Volume
    segment_bytes: int
    most: int
    log: Log = field(default_factory=Log)
    making: bool = False
    next_file: int = 0
    full: bool = False  # said once to the owner, until something has left
    grows_at: float = 0.0  # after a file that could not be made


@dataclass(slots=True, eq=False)
class Batch:
    """Writes that one fdatasync makes durable."""

    shelf: Shelf
    segment: Segment
    done: Wrote
    ops: int = 0
    landed: list[Landed] = field(default_factory=list)
    rows: list[tuple[int, bytes]] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)


class ColdTier:
    """Raises TierError where a directory can't be used. `leaving(shelf, segment)` is called when the oldest
    segment of a shelf is to be used again: whoever is told brings away what deserves it, and then says
    `left`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        directories: Sequence[Path],
        size_bytes: int,
        segment_bytes: int,
        shares: dict[str, float],
        leaving: Callable[[Shelf, Segment], None],
        engine: str = "auto",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop = loop
        self._leaving = leaving
        self._clock = clock
        self.size_bytes = size_bytes
        self.segments: list[Segment] = []
        self.shelves: dict[str, list[Shelf]] = {tenant: [] for tenant in shares}
        self._volumes: list[Volume] = []
        self._templates: dict[tuple[bytes, int, int], Template] = {}
        self._described: set[tuple[str, bytes]] = set()
        self._flushing: dict[int, asyncio.Future[str]] = {}
        self._shelf_of: dict[int, Shelf] = {}  # of segments that leave
        self._waiting: dict[int, Callable[[int, bytes | None], None]] = {}
        self._last_token = 0
        self._quiet = asyncio.Event()  # nothing is under way
        self._sequence = 1
        self._turn = 0
        self._closing = False
        self.faults = 0
        self.failure = ""
        self._off_until = 0.0
        self._off_s = OFF_S
        try:
            for directory in directories:
                volume = Volume(directory, size_bytes // len(directories))
                self._volumes.append(volume)
                for tenant, share in shares.items():
                    most = int(volume.segments_bytes * share) // segment_bytes
                    if most < 3:
                        text = (
                            f"tenant {tenant} would have {most} segments of {segment_bytes} bytes"
                        )
                        raise TierError(f"cold: {directory}: {text}, and three are needed")
                    self.shelves[tenant].append(Shelf(tenant, volume, segment_bytes, most))
        except BaseException:
            for volume in self._volumes:
                volume.close()
            raise
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.disk = Disk(self._event_fd, engine)
        self.disk.register(anonymous(PAGE), fixed=False)  # for pages of ours, which are all header
        loop.add_reader(self._event_fd, self._completed)
        for volume in self._volumes:
            loop.add_reader(volume.index.event_fd, self._index_done, volume)

    def register(self, mapping: Mapping) -> int:
        """Make an extent known; its number in what is to be read and written."""
        return self.disk.register(mapping)

    async def describe(self, tenant: str, space: bytes, spec: KvSpec) -> None:
        """See to it that a start knows this space, whose frames are in a segment without a footer yet."""
        if (tenant, space) in self._described:
            return
        text = msgspec.msgpack.encode(spec)
        for volume in self._volumes:
            volume.index.put(b"spaces", tenant.encode() + b"\0" + space, text)
        await asyncio.gather(*(self._flushed(volume) for volume in self._volumes))
        self._described.add((tenant, space))

    async def _flushed(self, volume: Volume) -> None:
        done: asyncio.Future[str] = self._loop.create_future()
        self._last_token += 1
        self._flushing[self._last_token] = done
        volume.index.flush(self._last_token)
        await done

    def _index_done(self, volume: Volume) -> None:
        for token, failure in volume.index.done():
            done = self._flushing.pop(token)
            if not done.cancelled():
                done.set_result(failure)

    def bury(self, places: bytes) -> None:
        """These frames, segment and page of each, are nothing any more, after a start neither."""
        for number, page in BURIED.iter_unpack(places):
            segment = self.segments[number]
            if segment.head is not None:
                segment.buried.append(page)
                key = buried_key(segment.head, page)
                self._volume_of(segment).index.put(b"forgotten", key, b"")

    def _dig_up(self, segment: Segment) -> None:
        """The segment is used again: what was nothing in it is not to be remembered."""
        for page in segment.buried:
            assert segment.head is not None
            key = buried_key(segment.head, page)
            self._volume_of(segment).index.drop(b"forgotten", key)
        segment.buried = []

    def _volume_of(self, segment: Segment) -> Volume:
        return next(one for one in self._volumes if segment.path.startswith(one.prefix))

    # --- health ------------------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        """Whether it is worth asking. Off, it forgets nothing, and is tried again later."""
        if self._closing:
            return False
        return not self._off_until or self._clock() >= self._off_until

    def give_up(self, why: str) -> None:
        """Nothing moves any more, until a restart."""
        self._off_until = float("inf")
        self.failure = why

    def _fault(self, what: str, code: int) -> None:
        self.faults += 1
        self.failure = f"{what}: {os.strerror(code)}"
        log.error("cold: %s", self.failure)
        if self.faults % FAULTS_TO_OFF == 0 or self.disk.overdue():
            self._off_until = self._clock() + self._off_s
            log.error("cold: off for %.0f s after %d faults", self._off_s, self.faults)
            self._off_s = min(2 * self._off_s, LONGEST_OFF_S)

    def _worked(self) -> None:
        if self._off_until and self._clock() >= self._off_until:
            log.info("cold: works again")
            self._off_until, self._off_s, self.failure = 0.0, OFF_S, ""

    # --- reading -----------------------------------------------------------------------------

    def read(self, blocks: Iterable[Incoming], done: Read) -> None:
        """Bring blocks into their slots; `done` is told of each, with EBADMSG where it is not what it should
        be."""
        ops = bytearray()
        for block in blocks:
            segment = self.segments[block.segment]
            segment.reading += 1
            token = self._token(self._read_one(segment, block, done))
            at = (block.page + block.header_pages) * PAGE
            ops += OPERATION.pack(
                token, segment.fd, URGENT | DIGEST, at, block.payload_bytes, block.extent, READ_MS,
                block.offset,
            ) + DIGEST_TAIL.pack(block.digest)  # fmt: skip
        if ops:
            self.disk.read(ops)

    def _read_one(
        self, segment: Segment, block: Incoming, done: Read
    ) -> Callable[[int, bytes | None], None]:
        def over(code: int, _: bytes | None) -> None:
            segment.reading -= 1
            if not code:
                self._worked()
            elif code not in BENIGN:
                self._fault(f"{segment.path} at {block.page * PAGE}: a read failed", code)
            done(block, code)
            self._perhaps_freed(segment)

        return over

    # --- writing -----------------------------------------------------------------------------

    def write(self, tenant: str, blocks: Sequence[Outgoing], done: Wrote) -> int:
        """Write the leading blocks, as many as have a place now; how many. `done` is told when they are on
        disk for good, or are not to be."""
        shelves = self.shelves[tenant]
        for _ in shelves:
            self._turn += 1
            shelf = shelves[self._turn % len(shelves)]
            count = self._write_to(shelf, blocks, done)
            if count:
                return count
        return 0

    def fits(self, tenant: str, block: Outgoing) -> bool:
        """Whether a segment can have such a block at all."""
        kind = self._template(block)
        footer = footer_bytes(described_bytes([(block.space, block.spec)]), 1)
        least = min(shelf.segment_bytes for shelf in self.shelves[tenant])
        return FIRST_FRAME + kind.total_bytes + footer <= least

    def _write_to(self, shelf: Shelf, blocks: Sequence[Outgoing], done: Wrote) -> int:
        segment = shelf.log.open
        if segment is None or segment.head is None:
            self._prepare(shelf)
            return 0
        batch = Batch(shelf, segment, done)
        ops, headers, full = bytearray(), bytearray(), False
        for block in blocks:
            kind = self._template(block)
            place = segment.take(kind.total_bytes, (block.space, block.spec))
            if place is None:
                full = True
                break
            page, number = place
            header = kind.header(
                block.key, block.parent, segment.head.epoch, self._sequence, block.digest
            )
            token = self._token(self._wrote_one(batch, block, kind, page, number, self._sequence))
            self._sequence += 1
            ops += OPERATION.pack(
                token, segment.fd, DIGEST | SEAL, page * PAGE, kind.payload_bytes, block.extent, 0,
                block.offset,
            ) + HEADER_TAIL.pack(len(headers), len(header))  # fmt: skip
            headers += header
            batch.ops += 1
        if batch.ops:
            segment.writing += 1
            self.disk.write(ops, headers)
            # Without a deadline: it ends after the writes before it, and until then their slots are theirs.
            self.disk.sync(self._token(self._wrote_all(batch)), segment.fd)
        if full:
            self._seal(shelf)
        return batch.ops

    def _template(self, block: Outgoing) -> Template:
        key = (block.space, block.group, block.shard)
        kind = self._templates.get(key)
        if kind is None:
            pieces = entries(block.spec, block.group)
            kind = Template(block.space, block.group, block.shard, RAW, pieces)
            self._templates[key] = kind
        return kind

    def _wrote_one(
        self, batch: Batch, block: Outgoing, kind: Template, page: int, number: int, sequence: int
    ) -> Callable[[int, bytes | None], None]:
        def over(code: int, digest: bytes | None) -> None:
            if code or digest is None:
                batch.failed.append(block.id)
                return
            header_pages = kind.header_bytes // PAGE
            listed = Listed(
                Identity(block.space, block.group, block.shard, block.key), block.parent, page,
                kind.total_bytes // PAGE, header_pages, RAW, kind.payload_bytes, kind.payload_bytes,
                sequence, digest,
            )  # fmt: skip
            batch.rows.append((page, encode_row(listed, number)))
            batch.landed.append(
                Landed(
                    block.id, batch.segment.number, page, header_pages, kind.payload_bytes, digest
                )
            )

        return over

    def _wrote_all(self, batch: Batch) -> Callable[[int, bytes | None], None]:
        def over(code: int, _: bytes | None) -> None:
            segment, log_ = batch.segment, batch.shelf.log
            segment.writing -= 1
            if code or batch.failed:
                self._fault(f"{segment.path}: a write failed", code or errno.EIO)
                batch.failed += [one.id for one in batch.landed]
                batch.landed = []
                if segment.stage is Stage.OPEN:
                    log_.failed(segment)
            else:
                segment.rows += batch.rows
                self._worked()
            batch.done(batch.landed, batch.failed)
            self._prepare(batch.shelf)
            self._perhaps_freed(segment)
            if segment.stage is Stage.SEALING and not segment.writing:
                self._write_footer(batch.shelf, segment)

        return over

    # --- segments ----------------------------------------------------------------------------

    def _seal(self, shelf: Shelf) -> None:
        segment = shelf.log.seal()
        if not segment.writing:
            self._write_footer(shelf, segment)
        self._prepare(shelf)

    def _write_footer(self, shelf: Shelf, segment: Segment) -> None:
        assert segment.head is not None
        rows = [row for _, row in sorted(segment.rows)]
        at, text = encode_footer(segment.head, segment.spaces, rows, segment.end)
        what = f"{segment.path}: its footer can't be written"
        self._write_text(
            segment, at, text, self._moved_on(shelf, segment, shelf.log.now_sealed, what)
        )

    def _moved_on(
        self, shelf: Shelf, segment: Segment, good: Callable[[Segment], None], what: str
    ) -> Callable[[int, bytes | None], None]:
        """What follows a write that brings a segment to its next stage."""

        def over(code: int, _: bytes | None) -> None:
            if code:
                self._fault(what, code)
                shelf.log.failed(segment)
            else:
                good(segment)
            self._prepare(shelf)

        return over

    def _prepare(self, shelf: Shelf) -> None:
        """See to it that there is a segment to write to, and one more to come after it."""
        books = shelf.log
        if not self.is_on:
            return  # a write asks again
        beginning = any(one.stage is Stage.BEGINNING for one in books.others)
        if books.free and books.open is None and not beginning:
            self._begin(shelf)
        if books.free or shelf.making or shelf.full:
            return
        if len(books) < shelf.most and self._clock() >= shelf.grows_at:
            self._make(shelf)
        elif len(books) >= LEAST_TO_LEAVE and (segment := books.leave()) is not None:
            shelf.full = True
            self._leaving(shelf, segment)

    def _begin(self, shelf: Shelf) -> None:
        epoch = secrets.randbits(64)
        segment = shelf.log.begin(epoch, self._sequence, tenant_digest(shelf.tenant))
        assert segment.head is not None

        def over(code: int, _: bytes | None) -> None:
            if code:
                self._fault(f"{segment.path}: its head can't be written", code)
                shelf.log.not_begun(segment)
            else:
                shelf.log.begun(segment)
                self._prepare(shelf)

        self._write_text(segment, 0, segment.head.encode(), over)

    def _write_text(
        self, segment: Segment, at: int, text: bytes, over: Callable[[int, bytes | None], None]
    ) -> None:
        """Write pages of ours, and sync."""
        op = OPERATION.pack(self._token(lambda *_: None), segment.fd, 0, at, 0, 0, 0, 0)
        self.disk.write(op + HEADER_TAIL.pack(0, len(text)), text)
        self.disk.sync(self._token(over), segment.fd)

    def _make(self, shelf: Shelf) -> None:
        """A new file, made beside the loop."""
        shelf.making = True
        number, shelf.next_file = shelf.next_file, shelf.next_file + 1
        path = shelf.volume.segment_path(shelf.tenant, number)
        making = self._loop.run_in_executor(None, shelf.volume.make, path, shelf.segment_bytes)

        def made(future: asyncio.Future[int]) -> None:
            shelf.making = False
            error = future.exception()
            if error is not None:
                code = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
                self._fault(f"{path} can't be made", code)
                # For a while what is there has to do.
                shelf.grows_at = self._clock() + GROW_AGAIN_S
            else:
                self._add(shelf, Segment(0, str(path), future.result(), shelf.segment_bytes))
            self._prepare(shelf)

        making.add_done_callback(made)

    def _add(self, shelf: Shelf, segment: Segment) -> Segment:
        segment.number = len(self.segments)
        self.segments.append(segment)
        shelf.log.add(segment)
        return segment

    def left(self, shelf: Shelf, segment: Segment) -> None:
        """Nothing names this segment any more: it is used again once nothing reads it."""
        segment.gone = True
        self._shelf_of[segment.number] = shelf
        self._perhaps_freed(segment)

    def _perhaps_freed(self, segment: Segment) -> None:
        if segment.gone and segment.idle and segment.stage is Stage.LEAVING:
            shelf = self._shelf_of.pop(segment.number)
            segment.gone = False

            def over(code: int, _: bytes | None) -> None:
                if code:
                    self._fault(f"{segment.path}: its head can't be taken back", code)
                else:
                    self._dig_up(segment)
                shelf.log.freed(segment)
                shelf.full = False
                self._prepare(shelf)

            # A start would find its frames, those that were forgotten since among them.
            self._write_text(segment, 0, bytes(PAGE), over)

    # --- start and end -----------------------------------------------------------------------

    async def recover(
        self,
        restored: Callable[[str, Recovered, int], Awaitable[None]],
    ) -> None:
        """Find out what the files hold, oldest first; `restored` is told of each, with its segment's
        number."""
        for volume in self._volumes:
            for stranger in set(volume.tenants()) - set(self.shelves):
                log.warning("cold: %s: tenant %s is none any more", volume.directory, stranger)
                await self._loop.run_in_executor(None, volume.remove, stranger)
        for tenant, shelves in self.shelves.items():
            found: list[tuple[Shelf, Recovered]] = []
            for shelf in shelves:
                described = spaces_of(shelf.volume, tenant)
                for path in shelf.volume.files(tenant):
                    shelf.next_file = max(shelf.next_file, int(path.name) + 1)
                    try:
                        one = await self._loop.run_in_executor(
                            None, recover, path, tenant_digest(tenant), described
                        )
                    except TierError as error:
                        # It takes room that the cap has to know of, and holds nothing that can be had.
                        log.error("cold: %s", error)
                        self.faults += 1
                        shelf.most -= 1
                        continue
                    found.append((shelf, one))
            found.sort(key=lambda pair: pair[1].head.sequence if pair[1].head else -1)
            left = Counter(id(shelf) for shelf, _ in found)
            for shelf, one in found:
                try:
                    if one.nbytes != shelf.segment_bytes or left[id(shelf)] > shelf.most:
                        log.warning("cold: %s goes: there is no place for it any more", one.path)
                        one.path.unlink()
                        left[id(shelf)] -= 1
                    else:
                        await self._take_up(shelf, one, restored)
                except (KvtierError, OSError, struct.error) as error:
                    log.error("cold: %s can't be taken up: %s", one.path, error)
                    self.faults += 1
            for shelf in shelves:
                self._resume(shelf, [one for other, one in found if other is shelf])
                self._prepare(shelf)

    async def _take_up(
        self,
        shelf: Shelf,
        one: Recovered,
        restored: Callable[[str, Recovered, int], Awaitable[None]],
    ) -> None:
        segment = Segment(0, str(one.path), open_direct(one.path), one.nbytes)
        self._add(shelf, segment)
        if one.head is None:
            return
        shelf.log.free.remove(segment)
        segment.head = one.head
        shelf.log.add_sealed(segment)
        self._sequence = max(self._sequence, one.head.sequence + entries_of(one) + 1)
        segment.buried = shelf.volume.buried(one.head)
        one.leave_out(segment.buried)
        await restored(shelf.tenant, one, segment.number)

    def _resume(self, shelf: Shelf, found: Sequence[Recovered]) -> None:
        """Go on writing to the newest segment, if a good part of it is free. One without a footer is not
        written on: what a kill has left behind its last good frame is of the same epoch."""
        newest = shelf.log.sealed[-1] if shelf.log.sealed else None
        one = next((one for one in found if newest and str(one.path) == newest.path), None)
        if newest is None or one is None or not one.sealed:
            return
        if free_bytes(one) < one.nbytes // RESUME_LEAST:
            return
        rows = [(page_of(row), row) for row in split_rows(one.rows)]
        newest.resume(one.spaces, rows, one.end)
        shelf.log.resume(newest)
        what = f"{newest.path}: can't be written on"
        over = self._moved_on(shelf, newest, shelf.log.begun, what)
        # As long as it has a footer, a start would not look for what comes after what that lists.
        self._write_text(newest, newest.nbytes - PAGE, bytes(PAGE), over)

    async def close(self, timeout_s: float = 10.0) -> None:
        """Write footers, so that a start finds everything at once, and let the files go."""
        until = self._clock() + timeout_s
        on, self._closing = self.is_on, True
        for shelves in self.shelves.values():
            for shelf in shelves:
                if shelf.log.open is not None and on:
                    self._seal(shelf)
        self._quiet.clear()
        if self._waiting:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._quiet.wait(), timeout_s)
        self._loop.remove_reader(self._event_fd)
        left = self.disk.stop(max(0.0, until - self._clock()))
        if not left:
            for segment in self.segments:
                os.close(segment.fd)
        for volume in self._volumes:
            self._loop.remove_reader(volume.index.event_fd)
            volume.close()
        os.close(self._event_fd)

    # --- the worker --------------------------------------------------------------------------

    def _token(self, over: Callable[[int, bytes | None], None]) -> int:
        self._last_token += 1
        self._waiting[self._last_token] = over
        return self._last_token

    def _completed(self) -> None:
        try:
            os.eventfd_read(self._event_fd)
        except BlockingIOError:
            return
        for token, code, extra in self.disk.done():
            try:
                self._waiting.pop(token)(code, extra)
            except Exception:
                log.exception("cold: what was read or written could not be settled")
                self.give_up("a bug; the daemon's log says which")
        if not self._waiting:
            self._quiet.set()


def anonymous(nbytes: int) -> Mapping:
    """Memory of our own that blocks can be read to."""
    fd = os.memfd_create("kvtier-own", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        return Mapping(fd, nbytes, True)
    finally:
        os.close(fd)
