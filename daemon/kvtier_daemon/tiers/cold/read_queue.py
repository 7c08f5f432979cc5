"""Queues reads, and submits them to the disks in the planner's order."""

from __future__ import annotations

import asyncio
import errno
import functools
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Protocol, cast

from kvtier_daemon.catalog.blocks import FRAME_BYTES
from kvtier_daemon.catalog.holds import Request
from kvtier_daemon.planning import DiskLink, Planner, Verdict
from kvtier_daemon.tiers.cold.disk import DirectoryDisk
from kvtier_daemon.tiers.cold.transfers import Incoming, Read

# A block, an errno or 0, and the urgent requests that waited for it.
Done = Callable[[Incoming, int, Sequence[Request]], None]

READ_BLOCKS = 32  # submitted at once: each takes about 20 us of the loop
ADD_BLOCKS = 128  # added at once: 6 us each
GIVE_BACK_BLOCKS = 256
LIMIT_SESSION = 256  # waiting requests of one session

Name = tuple[str, int]  # a tenant, and the id of one of its blocks


@dataclass(slots=True)
class WaitingBatch:
    """The part of a request's reads that the planner does not have yet."""

    tenant: str
    blocks: Iterator[Incoming]
    joined: Iterator[Name]
    done: Done


class Disks(Protocol):
    """The cold tier, as its queue of reads sees it."""

    @property
    def is_on(self) -> bool: ...
    def disk_of(self, segment: int) -> DirectoryDisk: ...
    def hold(self, segment: int, blocks: int) -> None: ...
    def release(self, block: Incoming) -> None: ...
    def read(self, blocks: Iterable[Incoming], done: Read, urgent: bool = True) -> None: ...


class ReadQueue:
    """The queue of all tenants."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, cold: Disks, clock: Callable[[], float]
    ) -> None:
        self.planner = Planner(clock)
        self._loop = loop
        self._cold = cold
        self._waiting: dict[Name, tuple[Incoming, Done]] = {}
        self._requests: dict[int, set[Request]] = {}  # waiting requests of each session
        self._pumping: set[DirectoryDisk] = set()
        self._batches: deque[tuple[Request, WaitingBatch]] = deque()  # to be added
        self._adding = False
        self._cancelled: deque[Request] = deque()  # requests of ended sessions
        self._to_tell: dict[Request, Callable[[], None]] = {}  # called when they wait for nothing
        self._telling = False
        self._calling_back = False
        self._given_back: deque[Iterator[tuple[Incoming, Done]]] = deque()

    def link_of(self, segment: int) -> DiskLink:
        return self._cold.disk_of(segment).link

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
        if len(self._requests.get(request[0], ())) >= LIMIT_SESSION and not self.planner.knows(
            request
        ):
            return Verdict(False, "too_many", 0.0, recompute_s)
        verdict = self.planner.weigh(
            request, fresh, joined, urgent=urgent, within_s=within_s, recompute_s=recompute_s
        )
        if verdict.first and verdict.load:
            self._requests.setdefault(request[0], set()).add(request)
        return verdict

    def bytes_of(self, frames: bytes) -> Mapping[DiskLink, int]:
        """Return the bytes of these frames for each link."""
        return self._sum(frames)[1]

    def add(
        self,
        request: Request,
        tenant: str,
        frames: bytes,
        blocks: Iterator[Incoming],
        joined: Iterator[Name],
        done: Done,
    ) -> int:
        """Queue the reads of these blocks, and wait for the `joined` blocks, whose reads were queued by other
        requests. `done` gets each block, with ECANCELED if its read was cancelled. Returns the number of
        bytes.

        Each block takes a few microseconds, so the blocks are added in portions."""
        segments, more = self._sum(frames)
        for segment, count in segments.items():
            # Until they end. The tier also holds the segment while a read is submitted.
            self._cold.hold(segment, count)
        batch = WaitingBatch(tenant, blocks, joined, done)
        self.planner.add(request, (), (), more)
        if not self._add_some(request, batch):
            self._batches.append((request, batch))
            self._add_soon()
        return sum(more.values())

    def _sum(self, frames: bytes) -> tuple[Counter[int], Counter[DiskLink]]:
        """Return the number of these frames in each segment, and the bytes of their payloads for each
        link."""
        words = memoryview(frames).cast("I")
        numbers = words[0 :: FRAME_BYTES // 4].tolist()
        sizes = words[2 :: FRAME_BYTES // 4].tolist()
        segments, links = Counter(numbers), Counter[DiskLink]()
        if len(set(sizes)) == 1:  # fast path for thousands of equal blocks
            for number, count in segments.items():
                links[self.link_of(number)] += count * sizes[0]
        else:
            for number, nbytes in zip(numbers, sizes, strict=True):
                links[self.link_of(number)] += nbytes
        return segments, links

    def _add_some(self, request: Request, batch: WaitingBatch) -> bool:
        """Add the next portion; return whether it was the last."""
        blocks = list(islice(batch.blocks, ADD_BLOCKS))
        joined = list(islice(batch.joined, ADD_BLOCKS - len(blocks)))
        fresh: list[tuple[Name, DiskLink, int]] = []
        for block in blocks:
            name, disk = (batch.tenant, block.id), self._cold.disk_of(block.segment)
            self._waiting[name] = block, batch.done
            fresh.append((name, disk.link, block.load_bytes))
            self._pump_soon(disk)
        is_all = len(blocks) + len(joined) < ADD_BLOCKS
        self.planner.add_more(request, fresh, joined, is_all)
        return is_all

    def _add_soon(self) -> None:
        if not self._adding:
            self._adding = True
            self._loop.call_soon(self._add_on)

    def _add_on(self) -> None:
        """Add portions of all waiting batches in turn."""
        self._adding = False
        if self._batches:
            request, batch = self._batches.popleft()
            if not self._add_some(request, batch):
                self._batches.append((request, batch))
        if self._batches:
            self._add_soon()

    # --- notifications -------------------------------------------------------------------------

    def call_when_read(self, request: Request, then: Callable[[], None]) -> bool:
        """Call `then` once when all reads of this request have ended. False, without a call, if none is
        pending."""
        if not self.planner.is_waiting(request):
            return False
        self._to_tell[request] = then
        return True

    def cancel_calls(self, request: Request) -> None:
        self._to_tell.pop(request, None)

    def _tell_soon(self) -> None:
        if self._to_tell and not self._telling:
            self._telling = True
            self._loop.call_soon(self._tell)

    def _tell(self) -> None:
        self._telling = False
        for request in [one for one in self._to_tell if not self.planner.is_waiting(one)]:
            if (then := self._to_tell.pop(request, None)) is not None:  # one may end another
                then()

    # --- cancelled reads ----------------------------------------------------------------------------

    def cancel(self, request: Request) -> None:
        """Cancel the reads that only this request waits for."""
        self._requests.get(request[0], set()).discard(request)
        self._called_back(self.planner.cancel(request, GIVE_BACK_BLOCKS))
        self._drop_waiting()
        if self.planner.is_cancelling:
            self._call_back_soon()

    def released(self, request: Request) -> None:
        self.planner.released(request)

    def session_ended(self, session: int) -> None:
        """Cancel the reads that only this session waits for."""
        self._cancelled.extend(self._requests.pop(session, ()))
        self._let_go()

    def shut(self) -> None:
        """Cancel all pending reads."""
        for session in list(self._requests):
            self.session_ended(session)

    def _call_back_soon(self) -> None:
        if not self._calling_back:
            self._calling_back = True
            self._loop.call_soon(self._let_go)

    def _let_go(self) -> None:
        """Cancel some reads of cancelled requests; the others in the next iterations of the loop."""
        self._calling_back = False
        names = self.planner.continue_cancel(GIVE_BACK_BLOCKS)
        left = GIVE_BACK_BLOCKS - len(names)
        while self._cancelled and left > 0 and not self.planner.is_cancelling:
            more = self.planner.cancel(self._cancelled.popleft(), left)
            left -= 1 + len(more)
            names += more
        self._called_back(names)
        self._drop_waiting()
        if self._cancelled or self.planner.is_cancelling:
            self._call_back_soon()

    def tend(self) -> None:
        """Drop requests that wait for nothing, and cancel reads that are too late."""
        for session in list(self._requests):
            kept = {one for one in self._requests[session] if self.planner.is_waiting(one)}
            self._requests[session] = kept
            if not kept:
                del self._requests[session]
        self._give_up()

    def _give_up(self) -> None:
        self._called_back(self.planner.expire(GIVE_BACK_BLOCKS))
        self._drop_waiting()
        if self.planner.is_cancelling:
            self._call_back_soon()

    def _drop_waiting(self) -> None:
        """Cancel the waiting batches of requests that wait for nothing."""
        self._tell_soon()
        left = deque(one for one in self._batches if self.planner.is_waiting(one[0]))
        for request, batch in self._batches if len(left) < len(self._batches) else ():
            if not self.planner.is_waiting(request):
                self._give_back(zip(batch.blocks, repeat(batch.done)))
        self._batches = left

    def _called_back(self, names: list[Hashable]) -> None:
        if names:
            self._give_back(map(self._pop_waiting, names))

    def _pop_waiting(self, name: Hashable) -> tuple[Incoming, Done]:
        assert isinstance(name, tuple)
        return self._waiting.pop(name)

    def _give_back(self, blocks: Iterator[tuple[Incoming, Done]]) -> None:
        """End these reads with ECANCELED."""
        self._given_back.append(blocks)
        if len(self._given_back) == 1:
            self._give_back_on()

    def _give_back_on(self) -> None:
        """End a portion of the cancelled reads. An exception of one callback does not stop the others."""
        blocks, failed = self._given_back[0], []
        for _ in range(GIVE_BACK_BLOCKS):
            try:
                one = next(blocks, None)
                if one is None:
                    self._given_back.popleft()
                    break
                self._end(*one, errno.ECANCELED)
            except Exception as error:  # noqa: BLE001  # a bug of ours
                failed.append(error)
        if self._given_back:
            self._loop.call_soon(self._give_back_on)
        if failed:
            text = f"cold: internal error while ending {len(failed)} reads; the first one"
            self._loop.call_exception_handler({"message": text, "exception": failed[0]})

    # --- submitted reads ------------------------------------------------------------------------

    def pump(self, disk: DirectoryDisk) -> None:
        """Submit the reads that wait for this disk, or cancel them if the disk is off."""
        self._pump_soon(disk)

    def _pump_soon(self, disk: DirectoryDisk) -> None:
        if disk not in self._pumping:
            self._pumping.add(disk)
            self._loop.call_soon(self._pump, disk)

    def _pump(self, disk: DirectoryDisk) -> None:
        """Submit a portion of the reads that wait for this disk."""
        self._pumping.discard(disk)
        names = self.planner.order.take(disk.link, READ_BLOCKS)
        if names and not (disk.reads.is_on and self._cold.is_on):
            for name in names:
                self.planner.ended(name, False)
            self._called_back(names)
            self._tell_soon()
            self._pump_soon(disk)
            return
        reading: dict[str, list[Incoming]] = {}
        for name in names:
            assert isinstance(name, tuple)
            reading.setdefault(name[0], []).append(self._waiting[name][0])
        for tenant, blocks in reading.items():
            self._cold.read(blocks, functools.partial(self._have_read, tenant, disk))
        if len(names) == READ_BLOCKS:
            self._pump_soon(disk)

    def _have_read(self, tenant: str, disk: DirectoryDisk, block: Incoming, code: int) -> None:
        self._over((tenant, block.id), disk, code)

    def _over(self, name: Name, disk: DirectoryDisk, code: int) -> None:
        waited = cast(list[Request], self.planner.ended(name, not code))
        self._pump_soon(disk)
        self._tell_soon()
        self._end(*self._waiting.pop(name), code, waited)

    def _end(self, block: Incoming, done: Done, code: int, waited: Sequence[Request] = ()) -> None:
        try:
            done(block, code, waited)
        finally:
            self._cold.release(block)
