"""Queues reads, and submits them to the disks in the planner's order."""

from __future__ import annotations

import asyncio
import errno
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, repeat
from typing import Protocol, cast

from kvtier_daemon.catalog.frames import PAYLOAD_SIZES, SEGMENTS
from kvtier_daemon.catalog.holds import Request
from kvtier_daemon.planning import DiskLink, Planner, Verdict
from kvtier_daemon.tiers.cold.frames import LINK, AllRead, Incoming, Read

# Blocks, an errno or 0, and the urgent requests that waited for them.
Done = Callable[[Sequence[Incoming], int, Sequence[Request]], None]

READ_BLOCKS = 32  # submitted at once: each takes about 20 us of the loop
ADD_BLOCKS = 128  # added at once: 6 us each
GIVE_BACK_BLOCKS = 256  # cancelled at once
LIMIT_SESSION = 256  # waiting requests of one session

Name = tuple[str, int]  # a tenant, and the id of one of its blocks


@dataclass(slots=True)
class WaitingBatch:
    """The part of a request's reads that the planner does not have yet."""

    tenant: str
    blocks: Iterator[Incoming]
    joined: Iterator[Name]
    done: Done


class Lane(Protocol):
    @property
    def is_on(self) -> bool: ...


class ReadSource(Protocol):
    """What blocks are read from: a disk, or the memory with frames."""

    @property
    def link(self) -> DiskLink: ...
    @property
    def reads(self) -> Lane: ...


class Disks(Protocol):
    """The cold tier, as its queue of reads sees it. `LINK` stands for frames in memory."""

    @property
    def is_on(self) -> bool: ...
    def source_of(self, segment: int) -> ReadSource: ...
    def hold(self, segment: int, blocks: int) -> None: ...
    def release(self, block: Incoming) -> None: ...
    def decode(self, blocks: Sequence[Incoming], done: AllRead) -> None: ...
    def read(self, blocks: Iterable[Incoming], done: Read, urgent: bool = True) -> None: ...


class NextTurn:
    """Calls `work` once in the next iteration of the loop, however often `request` is called before."""

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> None:
        self._loop = loop
        self._work = work
        self._requested = False

    def request(self) -> None:
        if not self._requested:
            self._requested = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        self._requested = False
        self._work()


class CancelledReads:
    """Ends cancelled reads with ECANCELED, a portion in each iteration of the loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, end: Callable[[Incoming, Done, int], None]
    ) -> None:
        self._loop = loop
        self._end = end
        self._lists: deque[Iterator[tuple[Incoming, Done]]] = deque()

    def add(self, reads: Iterator[tuple[Incoming, Done]]) -> None:
        self._lists.append(reads)
        if len(self._lists) == 1:
            self._end_some()

    def _end_some(self) -> None:
        """End a portion of the reads. An exception of one callback does not stop the others."""
        reads, failed = self._lists[0], []
        for _ in range(GIVE_BACK_BLOCKS):
            try:
                read = next(reads, None)
                if read is None:
                    self._lists.popleft()
                    break
                self._end(*read, errno.ECANCELED)
            except Exception as error:  # noqa: BLE001  # a bug of ours
                failed.append(error)
        if self._lists:
            self._loop.call_soon(self._end_some)
        if failed:
            text = f"cold: internal error while ending {len(failed)} reads; the first one"
            self._loop.call_exception_handler({"message": text, "exception": failed[0]})


class PendingRequests:
    """The requests that wait for reads, by session, and the calls to make when they wait no longer.
    `end_reads` is called after requests were cancelled, with the blocks that need not be read."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        planner: Planner,
        end_reads: Callable[[list[Name]], None],
    ) -> None:
        self._planner = planner
        self._end_reads = end_reads
        self._of_session: dict[int, set[Request]] = {}
        self._to_cancel: deque[Request] = deque()  # requests of ended sessions
        self._calls: dict[Request, Callable[[], None]] = {}
        self._notifying = NextTurn(loop, self._notify)
        self._cancelling = NextTurn(loop, self._cancel_some)

    def has_room(self, request: Request) -> bool:
        """Whether the session of this request may have one more, or the request is known."""
        few = len(self._of_session.get(request[0], ())) < LIMIT_SESSION
        return few or self._planner.knows(request)

    def add(self, request: Request) -> None:
        self._of_session.setdefault(request[0], set()).add(request)

    # --- notifications -------------------------------------------------------------------------

    def call_when_read(self, request: Request, then: Callable[[], None]) -> bool:
        if not self._planner.is_waiting(request):
            return False
        self._calls[request] = then
        return True

    def cancel_calls(self, request: Request) -> None:
        self._calls.pop(request, None)

    def notify(self) -> None:
        """Make the calls of requests that wait no longer, in the next iteration of the loop."""
        if self._calls:
            self._notifying.request()

    def _notify(self) -> None:
        for request in [each for each in self._calls if not self._planner.is_waiting(each)]:
            # A call may have cancelled another one.
            if (then := self._calls.pop(request, None)) is not None:
                then()

    # --- cancelling ----------------------------------------------------------------------------

    def cancel(self, request: Request) -> None:
        self._of_session.get(request[0], set()).discard(request)
        self._cancelled(self._planner.cancel(request, GIVE_BACK_BLOCKS))

    def end_reads(self, request: Request) -> None:
        if self._planner.is_waiting(request):
            self.cancel(request)

    def released(self, request: Request) -> None:
        self._planner.released(request)

    def session_ended(self, session: int) -> None:
        self._to_cancel.extend(self._of_session.pop(session, ()))
        self._cancel_some()

    def shut(self) -> None:
        """Cancel all pending reads."""
        for session in list(self._of_session):
            self.session_ended(session)

    def expire(self) -> None:
        """Drop requests that wait for nothing, and cancel reads that are too late."""
        for session, requests in list(self._of_session.items()):
            kept = {each for each in requests if self._planner.is_waiting(each)}
            self._of_session[session] = kept
            if not kept:
                del self._of_session[session]
        self._cancelled(self._planner.expire(GIVE_BACK_BLOCKS))

    def _cancel_some(self) -> None:
        """Cancel some reads of cancelled requests; the others in the next iterations of the loop."""
        names = self._planner.continue_cancel(GIVE_BACK_BLOCKS)
        left = GIVE_BACK_BLOCKS - len(names)
        while self._to_cancel and left > 0 and not self._planner.is_cancelling:
            more = self._planner.cancel(self._to_cancel.popleft(), left)
            left -= 1 + len(more)
            names += more
        self._cancelled(names)

    def _cancelled(self, names: Sequence[object]) -> None:
        self._end_reads(cast(list[Name], names))
        self.notify()
        if self._to_cancel or self._planner.is_cancelling:
            self._cancelling.request()


class ReadQueue:
    def __init__(
        self, loop: asyncio.AbstractEventLoop, cold: Disks, clock: Callable[[], float]
    ) -> None:
        self.planner = Planner(clock)
        self.pending = PendingRequests(loop, self.planner, self._end_reads)
        self._loop = loop
        self._cold = cold
        self._waiting: dict[Name, tuple[Incoming, Done]] = {}
        self._pumping: set[ReadSource] = set()
        self._batches: deque[tuple[Request, WaitingBatch]] = deque()  # to be added
        self._adding = NextTurn(loop, self._add_next)
        self._cancelled = CancelledReads(loop, self._end)

    def link_of(self, segment: int) -> DiskLink:
        return self._cold.source_of(segment).link

    def weigh(
        self,
        request: Request,
        fresh: Mapping[DiskLink, int],
        joined: Iterable[Name],
        urgent: bool,
        within_s: float,
        recompute_s: float,
    ) -> Verdict:
        """Ask the planner whether to read these blocks for this request. If so, `add` must follow."""
        if not self.pending.has_room(request):
            return Verdict(False, "too_many", 0.0, recompute_s)
        verdict = self.planner.weigh(
            request, fresh, joined, urgent=urgent, within_s=within_s, recompute_s=recompute_s
        )
        if verdict.first and verdict.load:
            self.pending.add(request)
        return verdict

    def bytes_of(self, frames: bytes) -> Counter[DiskLink]:
        """Return the bytes of these frames' payloads for each link."""
        words = memoryview(frames).cast("I")
        sizes, links = words[PAYLOAD_SIZES].tolist(), Counter[DiskLink]()
        if len(set(sizes)) == 1:  # fast path for thousands of equal blocks
            for number, count in Counter(words[SEGMENTS].tolist()).items():
                links[self.link_of(number)] += count * sizes[0]
        else:
            for number, nbytes in zip(words[SEGMENTS], sizes, strict=True):
                links[self.link_of(number)] += nbytes
        return links

    # --- adding --------------------------------------------------------------------------------

    def add(
        self,
        request: Request,
        tenant: str,
        frames: bytes,
        loads: bytes,
        blocks: Iterator[Incoming],
        joined: Iterator[Name],
        done: Done,
    ) -> int:
        """Queue the reads of these blocks, and wait for the `joined` blocks, whose reads were queued by other
        requests. `loads` are the frames with what the reads cost, and where. `done` gets each block, with
        ECANCELED if its read was cancelled. Returns the number of bytes.

        Each block takes a few microseconds, so the blocks are added in portions."""
        segments = Counter(memoryview(frames).cast("I")[SEGMENTS].tolist())
        for segment, count in segments.items():
            # Until they end. The tier also holds the segment while a read is submitted.
            self._cold.hold(segment, count)
        more = self.bytes_of(loads)
        batch = WaitingBatch(tenant, blocks, joined, done)
        self.planner.add(request, (), (), more)
        if not self._add_some(request, batch):
            self._batches.append((request, batch))
            self._adding.request()
        return sum(more.values())

    def _add_some(self, request: Request, batch: WaitingBatch) -> bool:
        """Add the next portion; return whether it was the last."""
        blocks = list(islice(batch.blocks, ADD_BLOCKS))
        joined = list(islice(batch.joined, ADD_BLOCKS - len(blocks)))
        fresh: list[tuple[Name, DiskLink, int]] = []
        disks: dict[int, ReadSource] = {}
        for block in blocks:
            number = block.segment if block.compressed is None else LINK
            disk = disks.get(number)
            if disk is None:
                disk = disks[number] = self._cold.source_of(number)
                self.pump(disk)
            name = batch.tenant, block.id
            self._waiting[name] = block, batch.done
            fresh.append((name, disk.link, block.load_bytes))
        is_all = len(blocks) + len(joined) < ADD_BLOCKS
        self.planner.add_more(request, fresh, joined, is_all)
        return is_all

    def _add_next(self) -> None:
        """Add a portion of the next batch; the batches take turns."""
        if self._batches:
            request, batch = self._batches.popleft()
            if not self._add_some(request, batch):
                self._batches.append((request, batch))
        if self._batches:
            self._adding.request()

    # --- submitting ----------------------------------------------------------------------------

    def pump(self, disk: ReadSource) -> None:
        """Submit the reads that wait for this disk, or cancel them if it is off, in the next iteration."""
        if disk not in self._pumping:
            self._pumping.add(disk)
            self._loop.call_soon(self._submit, disk)

    def _submit(self, disk: ReadSource) -> None:
        self._pumping.discard(disk)
        names = cast(list[Name], self.planner.order.take(disk.link, READ_BLOCKS))
        if names and not (disk.reads.is_on and self._cold.is_on):
            for name in names:
                self.planner.ended(name, False)
            self._cancelled.add(map(self._waiting.pop, names))
            self.pending.notify()
            self.pump(disk)
            return
        reading: dict[str, list[Incoming]] = {}
        for name in names:
            reading.setdefault(name[0], []).append(self._waiting[name][0])
        for tenant, blocks in reading.items():
            if blocks[0].compressed is not None:  # then all of this link are
                self._cold.decode(blocks, partial(self._have_read_all, tenant, disk))
            else:
                self._cold.read(blocks, partial(self._have_read, tenant, disk))
        if len(names) == READ_BLOCKS:
            self.pump(disk)

    def _have_read(self, tenant: str, disk: ReadSource, block: Incoming, code: int) -> None:
        self._have_read_all(tenant, disk, [block], [code])

    def _have_read_all(
        self, tenant: str, disk: ReadSource, blocks: Sequence[Incoming], codes: Sequence[int]
    ) -> None:
        """These reads have ended, each with an errno or 0. A request's blocks are handled at once."""
        self.pump(disk)
        self.pending.notify()
        alike: dict[tuple[Done, int, bool, tuple[Request, ...]], list[Incoming]] = {}
        for block, code in zip(blocks, codes, strict=True):
            name = tenant, block.id
            waited = cast(list[Request], self.planner.ended(name, not code))
            _, done = self._waiting.pop(name)
            key = done, code, bool(block.checksum), tuple(waited)
            alike.setdefault(key, []).append(block)
        failed: list[Exception] = []
        for (done, code, _, those), some in alike.items():
            try:
                self._end_all(some, done, code, those)
            except Exception as error:  # noqa: BLE001  # a bug of ours; the others are handled
                failed.append(error)
        if failed:
            raise failed[0]

    def _end(self, block: Incoming, done: Done, code: int) -> None:
        self._end_all([block], done, code, ())

    def _end_all(
        self, blocks: Sequence[Incoming], done: Done, code: int, waited: Sequence[Request]
    ) -> None:
        try:
            done(blocks, code, waited)
        finally:
            for block in blocks:
                self._cold.release(block)

    def _end_reads(self, names: list[Name]) -> None:
        """End cancelled reads, and the batches of requests that wait no longer."""
        if names:
            self._cancelled.add(map(self._waiting.pop, names))
        kept: deque[tuple[Request, WaitingBatch]] = deque()
        for request, batch in self._batches:
            if self.planner.is_waiting(request):
                kept.append((request, batch))
            else:
                self._cancelled.add(zip(batch.blocks, repeat(batch.done)))
        self._batches = kept
