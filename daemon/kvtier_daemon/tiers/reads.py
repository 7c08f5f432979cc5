"""Reads that were asked for, handed to the disks in the planner's order as there is room."""

from __future__ import annotations

import asyncio
import errno
import functools
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, repeat
from typing import TYPE_CHECKING

from kvtier.catalog.cold import FRAME_BYTES
from kvtier.planning import Link, Planner, Verdict

if TYPE_CHECKING:
    from kvtier_daemon.tiers.cold import ColdTier, Incoming, Read
    from kvtier_daemon.tiers.drive import Drive

READ_BLOCKS = 32  # handed over in one go: each costs the loop some 20 us
ADD_BLOCKS = 128  # added in one go: 6 us each
GIVE_BACK_BLOCKS = 256
LIMIT_SESSION = 256  # requests of one session that wait

Request = tuple[int, Hashable]  # a session, and what tells its requests apart
Name = tuple[str, int]  # a tenant, and the id of one of its blocks


@dataclass(slots=True)
class Batch:
    """What a request waits for, as far as it is not with the planner."""

    tenant: str
    blocks: Iterator[Incoming]
    joined: Iterator[Name]
    done: Read


class Reads:
    """For all tenants: a disk knows none."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, cold: ColdTier, clock: Callable[[], float]
    ) -> None:
        self.planner = Planner(clock)
        self._loop = loop
        self._cold = cold
        self._waiting: dict[Name, tuple[Incoming, Read]] = {}
        self._requests: dict[int, set[Request]] = {}  # of each session, that wait
        self._pumping: set[Drive] = set()
        self._batches: deque[tuple[Request, Batch]] = deque()  # to be added
        self._adding = False
        self._gone: deque[Request] = deque()  # of sessions that are over
        self._to_tell: dict[Request, Callable[[], None]] = {}  # when they wait for nothing any more
        self._telling = False
        self._letting_go = False
        self._given_back: deque[Iterator[tuple[Incoming, Read]]] = deque()

    def link_of(self, segment: int) -> Link:
        return self._cold.drive_of(segment).link

    def weigh(
        self,
        request: Request,
        fresh: Mapping[Link, int],
        joined: Iterable[Name],
        urgent: bool,
        within_s: float,
        recompute_s: float,
    ) -> Verdict:
        """Whether these are to be read for this request; then `add` them."""
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

    def bytes_of(self, frames: bytes) -> Mapping[Link, int]:
        """What these frames are to be read from, and how much of it."""
        return self._sum(frames)[1]

    def add(
        self,
        request: Request,
        tenant: str,
        frames: bytes,
        blocks: Iterator[Incoming],
        joined: Iterator[Name],
        done: Read,
    ) -> int:
        """Read these, of such frames, in time; and wait for what is read for others. `done` is told of each,
        with ECANCELED where nobody wants it any more. How many bytes that is.

        Each costs the loop some microseconds, so they are looked at some at a time."""
        segments, more = self._sum(frames)
        for segment, count in segments.items():
            # Until they are over. While one is with the disk, the tier holds it, too.
            self._cold.hold(segment, count)
        batch = Batch(tenant, blocks, joined, done)
        self.planner.add(request, (), (), more)
        if not self._add_some(request, batch):
            self._batches.append((request, batch))
            self._add_soon()
        return sum(more.values())

    def _sum(self, frames: bytes) -> tuple[Counter[int], Counter[Link]]:
        """How many of these frames each segment has; the bytes of their payloads by link."""
        words = memoryview(frames).cast("I")
        numbers = words[0 :: FRAME_BYTES // 4].tolist()
        sizes = words[2 :: FRAME_BYTES // 4].tolist()
        segments, links = Counter(numbers), Counter[Link]()
        if len(set(sizes)) == 1:  # thousands of blocks that are all alike are summed soon
            for number, count in segments.items():
                links[self.link_of(number)] += count * sizes[0]
        else:
            for number, nbytes in zip(numbers, sizes, strict=True):
                links[self.link_of(number)] += nbytes
        return segments, links

    def _add_some(self, request: Request, batch: Batch) -> bool:
        """Add the next ones; whether those are all."""
        blocks = list(islice(batch.blocks, ADD_BLOCKS))
        joined = list(islice(batch.joined, ADD_BLOCKS - len(blocks)))
        fresh: list[tuple[Name, Link, int]] = []
        for block in blocks:
            name, drive = (batch.tenant, block.id), self._cold.drive_of(block.segment)
            self._waiting[name] = block, batch.done
            fresh.append((name, drive.link, block.load_bytes))
            self._pump_soon(drive)
        is_all = len(blocks) + len(joined) < ADD_BLOCKS
        self.planner.add_more(request, fresh, joined, is_all)
        return is_all

    def _add_soon(self) -> None:
        if not self._adding:
            self._adding = True
            self._loop.call_soon(self._add_on)

    def _add_on(self) -> None:
        """Go on with what is to be added, one after the other; those whose request is gone are not."""
        self._adding = False
        if self._batches:
            request, batch = self._batches.popleft()
            if not self._add_some(request, batch):
                self._batches.append((request, batch))
        if self._batches:
            self._add_soon()

    # --- who is told -------------------------------------------------------------------------

    def tell_when_over(self, request: Request, then: Callable[[], None]) -> bool:
        """Call this once nothing is on its way any more that this request asked for. False where that is so
        now."""
        if not self.planner.is_waiting(request):
            return False
        self._to_tell[request] = then
        return True

    def tell_no_more(self, request: Request) -> None:
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

    # --- who goes ----------------------------------------------------------------------------

    def cancel(self, request: Request) -> None:
        """Nobody waits for this request any more."""
        self._requests.get(request[0], set()).discard(request)
        self._called_back(self.planner.cancel(request, GIVE_BACK_BLOCKS))
        self._leave_out()
        if self.planner.is_calling_back:
            self._let_go_soon()

    def session_over(self, session: int) -> None:
        self._gone.extend(self._requests.pop(session, ()))
        self._let_go()

    def shut(self) -> None:
        """Nobody gets anything any more."""
        for session in list(self._requests):
            self.session_over(session)

    def _let_go_soon(self) -> None:
        if not self._letting_go:
            self._letting_go = True
            self._loop.call_soon(self._let_go)

    def _let_go(self) -> None:
        """Of requests that are gone, call back some reads; the others a turn later."""
        self._letting_go = False
        names = self.planner.call_back(GIVE_BACK_BLOCKS)
        left = GIVE_BACK_BLOCKS - len(names)
        while self._gone and left > 0 and not self.planner.is_calling_back:
            more = self.planner.cancel(self._gone.popleft(), left)
            left -= 1 + len(more)
            names += more
        self._called_back(names)
        self._leave_out()
        if self._gone or self.planner.is_calling_back:
            self._let_go_soon()

    def tend(self) -> None:
        """Give up what is too late."""
        for session in list(self._requests):
            kept = {one for one in self._requests[session] if self.planner.is_waiting(one)}
            self._requests[session] = kept
            if not kept:
                del self._requests[session]
        self._give_up()

    def _give_up(self) -> None:
        self._called_back(self.planner.tend(GIVE_BACK_BLOCKS))
        self._leave_out()
        if self.planner.is_calling_back:
            self._let_go_soon()

    def _leave_out(self) -> None:
        """What was to be added to a request that waits no more is not to be read, and who waits for such a
        request is told."""
        self._tell_soon()
        left = deque(one for one in self._batches if self.planner.is_waiting(one[0]))
        for request, batch in self._batches if len(left) < len(self._batches) else ():
            if not self.planner.is_waiting(request):
                self._give_back(zip(batch.blocks, repeat(batch.done)))
        self._batches = left

    def _called_back(self, names: list[Hashable]) -> None:
        if names:
            self._give_back(map(self._no_longer, names))

    def _no_longer(self, name: Hashable) -> tuple[Incoming, Read]:
        assert isinstance(name, tuple)
        return self._waiting.pop(name)

    def _give_back(self, blocks: Iterator[tuple[Incoming, Read]]) -> None:
        """These are not to be read any more."""
        self._given_back.append(blocks)
        if len(self._given_back) == 1:
            self._give_back_on()

    def _give_back_on(self) -> None:
        """Tell of some, and of the others later: each costs a microsecond or two. Where one can't be told of,
        the others are all the same."""
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
            text = f"cold: {len(failed)} reads could not be given back; of the first"
            self._loop.call_exception_handler({"message": text, "exception": failed[0]})

    # --- to the disks ------------------------------------------------------------------------

    def pump(self, drive: Drive) -> None:
        """Hand over what waits for this disk; give it back where the disk is off."""
        self._pump_soon(drive)

    def _pump_soon(self, drive: Drive) -> None:
        if drive not in self._pumping:
            self._pumping.add(drive)
            self._loop.call_soon(self._pump, drive)

    def _pump(self, drive: Drive) -> None:
        """Hand over what there is room for, some at a time."""
        self._pumping.discard(drive)
        names = self.planner.take(drive.link, READ_BLOCKS)
        if names and not (drive.reads.is_on and self._cold.is_on):
            for name in names:
                self.planner.over(name, False)
            self._called_back(names)
            self._tell_soon()
            self._pump_soon(drive)
            return
        reading: dict[str, list[Incoming]] = {}
        for name in names:
            assert isinstance(name, tuple)
            reading.setdefault(name[0], []).append(self._waiting[name][0])
        for tenant, blocks in reading.items():
            self._cold.read(blocks, functools.partial(self._have_read, tenant, drive))
        if len(names) == READ_BLOCKS:
            self._pump_soon(drive)

    def _have_read(self, tenant: str, drive: Drive, block: Incoming, code: int) -> None:
        self._over((tenant, block.id), drive, code)

    def _over(self, name: Name, drive: Drive, code: int) -> None:
        self.planner.over(name, not code)
        self._pump_soon(drive)
        self._tell_soon()
        self._end(*self._waiting.pop(name), code)

    def _end(self, block: Incoming, done: Read, code: int) -> None:
        try:
            done(block, code)
        finally:
            self._cold.let_go(block)
