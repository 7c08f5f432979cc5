"""The reads that requests wait for, their order, and the links between memory and the disks."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

GUESS_BYTES_S = 2e9  # assumed before the first read
BUSY_S = 1.0  # of reading: the earlier average is halved
STALE_S = 30.0  # without a read: a low average is not used, that of a store weighs little
STALE_BUSY_S = 0.01
WINDOW_S = 0.01  # of work submitted at once; a later read waits no longer than this
WINDOW_READS, WINDOW_MOST = 16, 1024
SIDE_SHARE = 1 / 16  # of a busy link, for writes; the same for prefetches
SURE = 0.8
FORECAST_SHARE = 0.25  # weight of the last forecast in the average
# Two failures in a row make a link unreliable; three successes make it reliable again.
UNRELIABLE, RELIABLE = 0.6, 0.8
# Between prefetches that test an unreliable link; doubled after each late one.
PROBE_S, LONGEST_PROBE_S = 1.0, 30.0
LIMIT_WAITS = 65_536
WHY = (
    "faster",  # the load is expected to end first
    "unknown",  # the client did not report how long recomputing takes
    "prefetch",  # no request waits for it
    "tried_load",  # it is expected to end last, by little; done to check the estimate
    "tried_compute",  # the same for computing
    "slower",  # recomputing is expected to end first
    "crowded",  # the disk has too many other reads before it
    "unreliable",  # the last reads ended later than was forecast, or a store's speed is not known
    "late",  # the load was started and did not end in time
    "too_many",  # too many requests wait already
)
LOADS, COMPUTE = frozenset(WHY[:4]), frozenset(WHY[4:])
Position = tuple[bool, float, int]
NewRead = tuple[Hashable, "DiskLink", int]  # block, the link it is read from, bytes


class DiskLink:
    """The average bandwidth of submitted reads, which run in parallel: bytes divided by the time during which
    at least one was running. After the first urgent read, only times with urgent reads count, because writes
    are not limited while only prefetches run. A link that `is_remote` has no such limit, and its speed can be
    anything: prefetches count too, and nothing is promised from an assumption."""

    def __init__(
        self, clock: Callable[[], float], guess_bytes_s: float = GUESS_BYTES_S, is_remote: bool = False
    ) -> None:  # fmt: skip
        self._guess_bytes_s = guess_bytes_s  # assumed without measurements
        self._is_remote = is_remote
        self.reading = self.reading_bytes = 0  # submitted and not ended
        self._urgent = 0  # of these
        self._was_urgent = False  # ever
        self._clock = clock
        self._busy_s = self._read_bytes = 0.0  # recently
        self._at = 0.0  # `_busy_s` includes the time until then
        self._last_at = clock()
        self._writes = self._prefetches = 0.0  # bytes allowed while urgent reads run
        self._kept = 1.0  # share of recent forecasts that were right
        self._probed_at = float("-inf")
        self._probe_s = PROBE_S
        self.is_reliable = True

    @property
    def bytes_s(self) -> float:
        if not self._read_bytes or not self._busy_s:
            return self._guess_bytes_s
        rate = self._read_bytes / self._busy_s
        assumes = self._is_stale and not self._is_remote
        return max(rate, self._guess_bytes_s) if assumes else rate

    @property
    def _is_stale(self) -> bool:
        return not self.reading and self._clock() - self._last_at > STALE_S

    @property
    def is_guessed(self) -> bool:
        """Whether `bytes_s` is an assumption from which nothing is promised."""
        return self._is_remote and not (self._read_bytes and self._busy_s)

    @property
    def sure_bytes_s(self) -> float:
        """The bandwidth that urgent reads can rely on: writes and prefetches share the average."""
        return self.bytes_s * SURE

    def began(self, nbytes: int, urgent: bool) -> None:
        """A read was submitted to the disk."""
        now = self._clock()
        if self._is_remote and self._is_stale and self._busy_s > STALE_BUSY_S:
            share = STALE_BUSY_S / self._busy_s
            self._busy_s, self._read_bytes = STALE_BUSY_S, self._read_bytes * share
        self._count_busy(now)
        self._urgent += urgent
        self.reading += 1
        self.reading_bytes += nbytes
        if self._busy_s > BUSY_S:
            self._busy_s, self._read_bytes = self._busy_s / 2, self._read_bytes / 2
        if urgent:
            # At most one read's worth, so that none follow each other directly.
            side = nbytes * SIDE_SHARE
            self._writes = min(nbytes, self._writes + side)
            self._prefetches = min(nbytes, self._prefetches + side)

    def ended(self, nbytes: int, read_bytes: int, urgent: bool) -> None:
        """A submitted read has ended, with these bytes or none."""
        now = self._clock()
        if self._count_busy(now):
            self._last_at = now
            self._read_bytes += read_bytes
        self.reading -= 1
        self.reading_bytes -= nbytes
        self._urgent -= urgent
        self._was_urgent |= urgent

    def forecast_ended(self, kept: bool) -> None:
        """The forecast for a request was right (`kept`) or wrong."""
        self._kept += FORECAST_SHARE * (kept - self._kept)
        if not self.is_reliable:
            self._probe_s = PROBE_S if kept else min(2 * self._probe_s, LONGEST_PROBE_S)
        self.is_reliable = self._kept > (UNRELIABLE if self.is_reliable else RELIABLE)

    def may_probe(self) -> bool:
        """Whether to start a prefetch that tests an unreliable or remote link now. True counts."""
        now, is_old = self._clock(), self._is_remote and self._is_stale
        is_known = self.is_reliable and not (self.is_guessed or is_old)
        if is_known or now - self._probed_at < self._probe_s:
            return False
        self._probed_at = now
        return True

    def _count_busy(self, now: float) -> bool:
        """Count the time since the last call if it was busy; return whether it was."""
        is_limited = self._was_urgent and not self._is_remote
        counts = self._urgent > 0 or (self.reading > 0 and not is_limited)
        if counts:
            self._busy_s += now - self._at
        self._at = now
        return counts

    def has_room(self) -> bool:
        """Whether one more read may be submitted: enough to keep the disk busy, not more."""
        if self.reading < WINDOW_READS:
            return True
        return self.reading < WINDOW_MOST and self.reading_bytes < WINDOW_S * self.bytes_s

    def spend_prefetch(self, nbytes: int) -> bool:
        """Whether a prefetch may be submitted while urgent reads run. True counts as submitted."""
        if self._prefetches <= 0:
            return False
        self._prefetches -= nbytes
        return True

    def may_write(self) -> bool:
        """Whether a write may be submitted while urgent reads run."""
        return self._writes > 0

    def wrote(self, nbytes: int) -> None:
        """A write was submitted while urgent reads run."""
        self._writes -= nbytes


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to load, why, and how long both ways take. `first`: the request had no verdict before."""

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
        read.link.ended(read.nbytes, read.nbytes if good else 0, read.urgent)
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
