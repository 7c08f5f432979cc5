"""Requests that wait for reads, the order of all planned reads, and the queue of each disk."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from kvtier_daemon.planning.links import DiskLink

LIMIT_WAITS = 65_536
WHY = (
    "faster",  # the load is expected to end first
    "unknown",  # the client did not report how long recomputing takes
    "prefetch",  # no request waits for it
    "tried_load",  # it is expected to end last, by little; done to check the estimate
    "tried_compute",  # the same for computing
    "slower",  # recomputing is expected to end first
    "crowded",  # the disk has too many other reads before it
    "unreliable",  # the disk's last reads ended later than was forecast
    "late",  # the load was started and did not end in time
    "too_many",  # too many requests wait already
)
LOADS, COMPUTE = frozenset(WHY[:4]), frozenset(WHY[4:])
Position = tuple[bool, float, int]
NewRead = tuple[Hashable, DiskLink, int]  # block, the link it is read from, bytes


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to load, why, and how long loading and computing would take. `first`: this is the request's
    first verdict."""

    load: bool
    why: str
    load_s: float
    recompute_s: float
    first: bool = True


@dataclass(slots=True, eq=False)
class ReadRequest:
    """A request that waits until all its reads have ended or until its deadline."""

    name: Hashable
    number: int
    urgent: bool
    rank_at: float  # time that defines its position in the order
    deadline: float  # when it gives up
    recompute_s: float  # a load was promised within this time; infinite: no promise
    verdict: Verdict
    decided_at: float
    released_at: float = float("inf")
    bytes_left: Counter[DiskLink] = field(default_factory=Counter)  # read at its position
    announced: Counter[DiskLink] = field(default_factory=Counter)  # of `bytes_left`: not added yet
    reads: dict[PlannedRead, None] = field(default_factory=dict)  # that it waits for
    links: Counter[DiskLink] = field(default_factory=Counter)  # number of these reads per link
    open_lists: int = 0  # lists of reads that are not complete yet
    queued_reads: dict[DiskLink, deque[PlannedRead]] = field(default_factory=dict)
    queued_on: set[DiskLink] = field(default_factory=set)  # links whose queue contains it
    due_at: float = 0.0  # if its reads end later than this, the forecast failed

    @property
    def position(self) -> Position:
        return not self.urgent, self.rank_at, self.number

    @property
    def is_done(self) -> bool:
        """Whether it waits for nothing."""
        return not self.reads and not self.open_lists


@dataclass(slots=True, eq=False)
class PlannedRead:
    """A block to read, at the position of the first request that waits for it."""

    name: Hashable
    link: DiskLink
    nbytes: int
    number: int
    requests: list[ReadRequest] = field(default_factory=list)  # that wait for it, by position
    queued_in: list[ReadRequest] = field(default_factory=list)  # whose `queued_reads` contain it
    submitted: bool = False
    urgent: bool = False  # when it was submitted


class ReadSchedule:
    """Requests that wait, by position; their reads; and per disk the queue of requests with reads to submit.

    A read that several requests wait for is done at the position of the first one: only that request's
    `bytes_left` include it, and only that request's queue submits it."""

    def __init__(self) -> None:
        self.requests: list[ReadRequest] = []  # those that wait for something, by position
        self.reads: dict[Hashable, PlannedRead] = {}
        self.waits = 0  # pairs of a request and a read that it waits for
        self._numbers = count()
        self._queues: dict[tuple[DiskLink, bool], list[tuple[Position, ReadRequest]]] = {}
        self._urgent: Counter[DiskLink] = Counter()  # reads of urgent requests, queued or submitted

    def __len__(self) -> int:
        """How many reads are planned and have not ended."""
        return len(self.reads)

    def next_number(self) -> int:
        return next(self._numbers)

    def bytes_of(self, block: Hashable) -> int:
        """How many bytes the read of this block returns."""
        return self.reads[block].nbytes

    def after(self, request: ReadRequest) -> list[ReadRequest]:
        """The requests from this one's position on."""
        return self.requests[bisect_left(self.requests, request.position, key=position_of) :]

    def insert(self, request: ReadRequest) -> None:
        insort(self.requests, request, key=position_of)

    def remove(self, request: ReadRequest) -> None:
        """Remove a request that waits for nothing; does nothing if it is not in the order."""
        at = bisect_left(self.requests, request.position, key=position_of)
        if at < len(self.requests) and self.requests[at] is request:
            del self.requests[at]

    # --- requests and their reads --------------------------------------------------------------

    def add(self, request: ReadRequest, new: Sequence[NewRead], joined: Iterable[Hashable]) -> None:
        """Let the request wait for new reads, and for reads of other requests."""
        for block, link, nbytes in new:
            assert block not in self.reads, "a block is read twice"
            read = self.reads[block] = PlannedRead(block, link, nbytes, self.next_number())
            self._join(request, read)
        for block in joined:
            known = self.reads.get(block)
            if known is not None and known not in request.reads and self.waits < LIMIT_WAITS:
                self._join(request, known)

    def _join(self, request: ReadRequest, read: PlannedRead) -> None:
        first = read.requests[0] if read.requests else None
        insort(read.requests, request, key=position_of)
        request.reads[read] = None
        request.links[read.link] += 1
        self.waits += 1
        if read.requests[0] is request:
            if first is not None:
                self._uncharge(first, read)
            self._charge(request, read)

    def _charge(self, request: ReadRequest, read: PlannedRead) -> None:
        """Read this at the position of this request."""
        link = read.link
        request.bytes_left[link] += read.nbytes
        self._urgent[link] += request.urgent
        if read.submitted or request in read.queued_in:
            return
        read.queued_in.append(request)
        request.queued_reads.setdefault(link, deque()).append(read)
        if link not in request.queued_on:
            request.queued_on.add(link)
            queue = self._queues.setdefault((link, request.urgent), [])
            heapq.heappush(queue, (request.position, request))

    def _uncharge(self, request: ReadRequest, read: PlannedRead) -> None:
        request.bytes_left[read.link] -= read.nbytes
        self._urgent[read.link] -= request.urgent

    def _unlink(self, request: ReadRequest, read: PlannedRead) -> None:
        del request.reads[read]
        request.links[read.link] -= 1
        if not request.links[read.link]:
            del request.links[read.link]
        self.waits -= 1

    def leave(self, request: ReadRequest, read: PlannedRead) -> bool:
        """End the wait of a cancelled request for this read. True if the read is cancelled too: no other
        request waits for it, and it was not submitted."""
        was_first = read.requests[0] is request
        read.requests.remove(request)
        self._unlink(request, read)
        if was_first:
            self._uncharge(request, read)
        if read.requests:
            if was_first:
                self._charge(read.requests[0], read)
            return False
        if read.submitted:
            return False
        del self.reads[read.name]
        return True

    def ended(self, block: Hashable, good: bool) -> list[ReadRequest]:
        """A submitted read has ended, with its data or without; return the requests that waited for it."""
        read = self.reads.pop(block)
        read.link.ended(read.nbytes, good, read.urgent)
        if read.requests:
            self._uncharge(read.requests[0], read)
        for request in read.requests:
            self._unlink(request, read)
        return read.requests

    # --- disks ---------------------------------------------------------------------------------

    def take(self, link: DiskLink, most: int = 1 << 31) -> list[Hashable]:
        """The blocks to submit to this disk now, in order. `Planner.ended` must follow for each."""
        taken: list[Hashable] = []
        while len(taken) < most and link.has_room():
            read, prefetch = self._head(link, True), self._head(link, False)
            if read is None or (prefetch is not None and link.spend_prefetch(prefetch.nbytes)):
                read = prefetch
            if read is None:
                break
            read.submitted, read.urgent = True, read.requests[0].urgent
            link.began(read.nbytes, read.urgent)
            taken.append(read.name)
        return taken

    def _head(self, link: DiskLink, urgent: bool) -> PlannedRead | None:
        """The next read to submit."""
        queue = self._queues.get((link, urgent), [])
        while queue:
            request = queue[0][1]
            queued = request.queued_reads[link]
            while queued:
                read = queued[0]
                if not read.submitted and read.requests and read.requests[0] is request:
                    return read
                read.queued_in.remove(request)
                queued.popleft()
            heapq.heappop(queue)
            request.queued_on.discard(link)
        return None

    def may_write(self, link: DiskLink) -> bool:
        """Whether a write may be submitted to this disk now. While urgent reads wait, only a few may."""
        return not self._urgent[link] or link.may_write()

    def wrote(self, link: DiskLink, nbytes: int) -> None:
        """A write of this size was submitted."""
        if self._urgent[link]:
            link.wrote(nbytes)


def position_of(request: ReadRequest) -> Position:
    return request.position


def bytes_by_link(new: Sequence[NewRead]) -> Counter[DiskLink]:
    """How many bytes of these reads each link reads."""
    total: Counter[DiskLink] = Counter()
    for _, link, nbytes in new:
        total[link] += nbytes
    return total


def alone_s(nbytes: Mapping[DiskLink, int]) -> float:
    """How long these bytes take if nothing else is read."""
    return max((count / link.bytes_s for link, count in nbytes.items()), default=0.0)
