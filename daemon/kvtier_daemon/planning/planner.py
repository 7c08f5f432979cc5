"""Decides per request whether to load or to recompute, and cancels reads that no request needs.

Each request gets one verdict. A load is not started if it would end after its blocks had been computed, or if
it would make another promised load end too late. Started loads are ordered by deadline and submitted a few
milliseconds of work at a time, so that a later request with an earlier deadline is served first. Prefetches
and writes get a small share of a busy disk. Does no I/O, and does not interpret names of blocks and requests.
"""

from __future__ import annotations

import random
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import islice

from kvtier_daemon.planning.read_order import (
    LOADS,
    DiskLink,
    NewRead,
    Position,
    ReadRequest,
    ReadSchedule,
    Verdict,
    alone_s,
    bytes_by_link,
)

LIMIT_REQUESTS = 2048
LIMIT_DECLINED = 4096  # verdicts that are remembered; an older request is weighed again
PATIENCE_S = 5.0  # of a request that does not tell how long it waits
RANK_TIMES = 8.0  # a request without a promise is ranked at this multiple of its own load time
PREFETCH_S = 30.0
SLACK = 0.05  # of the time to recompute: how late a load may be
EXPLORE = 0.01
EXPLORE_DEARER = 2.0  # computing is tried only if it takes at most this multiple of the load
# A request that released its lease and does not ask again within this time is cancelled.
GONE_S = 0.2
FORGET_S = 5.0  # a verdict against a load is forgotten after this time
SUBMIT_S = 0.005  # a load is not started if less than this time would be left
LATE_TIMES, LATE_S = 2.0, 0.05  # a forecast failed if the time exceeds it by this factor and margin

Shared = Mapping[ReadRequest, Mapping[DiskLink, int]]


class LoadForecast:
    """Estimates over the present order of reads. It changes no order."""

    def __init__(self, order: ReadSchedule) -> None:
        self._order = order

    def shared(self, joined: Iterable[Hashable]) -> Shared:
        """The bytes of other requests' reads that are not submitted, by the first request that waits."""
        shared: dict[ReadRequest, dict[DiskLink, int]] = {}
        for block in joined:
            read = self._order.reads.get(block)
            if read is not None and read.requests:
                waiting = shared.get(read.requests[0])
                if waiting is None:
                    waiting = shared[read.requests[0]] = {}
                if not read.submitted:
                    waiting[read.link] = waiting.get(read.link, 0) + read.nbytes
        return shared

    def reason(
        self, request: ReadRequest, new: Mapping[DiskLink, int], shared: Shared, now: float
    ) -> str:
        """The verdict's reason, one of WHY."""
        if not request.urgent:
            return "prefetch"
        links = [link for link, nbytes in new.items() if nbytes]
        if request.recompute_s < float("inf") and any(link.is_guessed for link in links):
            return "unreliable"
        if alone_s(self._own_bytes(request, new, shared)) > request.recompute_s:
            return "slower"
        if not all(link.is_reliable for link in links):
            return "unreliable"
        if not self.fits(request, new, shared, now):
            return "crowded"
        return "faster" if request.recompute_s < float("inf") else "unknown"

    def fits(
        self, request: ReadRequest, new: Mapping[DiskLink, int], shared: Shared, now: float
    ) -> bool:
        """Whether this request ends in time, and with it every request to which a load was promised."""
        limit = request.rank_at if request.recompute_s < float("inf") else request.deadline
        if now + self._joined_s(request, shared) > limit:
            return False
        for link, nbytes in self._own_bytes(request, new, shared).items():
            rate = link.sure_bytes_s
            # Submitted reads are not cancelled, and the disk may have writes too.
            start = now + SUBMIT_S + link.reading_bytes / rate
            ahead = 0
            for other in self._order.requests:
                if not other.urgent or other.position > request.position:
                    break
                ahead += other.bytes_left[link]
            if start + (ahead + nbytes) / rate > limit:
                return False
            for other in self._order.after(request):
                if not other.urgent:
                    break
                left = other.bytes_left[link]
                ahead += left
                in_time = (
                    other.recompute_s < float("inf")
                    and now + ahead / link.bytes_s <= other.deadline
                )
                if in_time and left and start + (ahead + nbytes) / rate > other.deadline:
                    return False
        return True

    def load_s(self, request: ReadRequest, new: Mapping[DiskLink, int], shared: Shared) -> float:
        """How long this request would wait for its reads."""
        own = self._ends_s(request.position, self._own_bytes(request, new, shared))
        return max(own, self._joined_s(request, shared))

    def finish_s(self, request: ReadRequest) -> float:
        """How much longer the reads of this request take."""
        return self._ends_s(request.position, dict.fromkeys(request.links | request.announced, 0))

    def _own_bytes(
        self, request: ReadRequest, new: Mapping[DiskLink, int], shared: Shared
    ) -> Mapping[DiskLink, int]:
        """The bytes that would be read at this request's position: its own, and those that move forward."""
        moved = Counter(new)
        for owner, waiting in shared.items():
            if request.position < owner.position:
                moved.update(waiting)
        return moved

    def _joined_s(self, request: ReadRequest, shared: Shared) -> float:
        """How long the reads of earlier requests take that this one waits for too."""
        before = (owner for owner in shared if owner.position < request.position)
        return max(map(self.finish_s, before), default=0.0)

    def _ends_s(self, position: Position, more: Mapping[DiskLink, int]) -> float:
        """How long this many additional bytes take at this position, after the reads before it."""
        longest = 0.0
        for link, nbytes in more.items():
            ahead = 0
            for other in self._order.requests:
                if other.position > position:
                    break
                ahead += other.bytes_left[link]
            longest = max(longest, (ahead + nbytes) / link.bytes_s)
        return longest

    def expect(self, request: ReadRequest, nbytes: Mapping[DiskLink, int], now: float) -> None:
        """Note when the reads of this request are due, now that these bytes are read at its position. The
        reads of later requests are due later."""
        due_at = now + LATE_TIMES * self.finish_s(request) + LATE_S
        request.due_at = max(request.due_at, due_at)
        later_s = LATE_TIMES * alone_s(nbytes)
        for other in self._order.after(request):
            other.due_at += later_s if other is not request else 0.0

    def judge(self, request: ReadRequest, all_read: bool, now: float) -> None:
        """Record whether the forecast was right, at the end of all reads or of the wait. A prefetch counts
        only if no urgent reads went before it."""
        if request.recompute_s == float("inf") and (
            request.urgent or all(link.is_reliable for link in request.bytes_left)
        ):
            return
        late = now > request.due_at
        if all_read or late:
            for link in request.bytes_left:
                link.forecast_ended(not late)


class Planner:
    """`dice` returns numbers from 0 to 1."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, dice: Callable[[], float] = random.random
    ) -> None:
        self.order = ReadSchedule()
        self.late = 0  # loads that were started and did not end in time
        self._clock = clock
        self._dice = dice
        self._forecast = LoadForecast(self.order)
        self._requests: dict[Hashable, ReadRequest] = {}
        # Requests that should compute, the oldest first.
        self._declined: OrderedDict[Hashable, ReadRequest] = OrderedDict()
        self._cancelled: deque[ReadRequest] = deque()  # they still have reads

    def weigh(
        self,
        name: Hashable,
        new: Mapping[DiskLink, int],
        joined: Iterable[Hashable] = (),
        *,
        urgent: bool = True,
        within_s: float = PATIENCE_S,
        recompute_s: float = float("inf"),
    ) -> Verdict:
        """Decide whether to load or to compute. `new` has the bytes to read from each link, `joined` blocks
        that are being read for other requests. If the verdict is to load, `add` must follow. A request of a
        known name gets its earlier verdict again, with the remaining time."""
        now = self._clock()
        if (declined := self._declined.get(name)) is not None:
            return self._repeated(declined, False)
        known = self._requests.get(name)
        if known is not None:
            known.released_at = float("inf")
            if not any(new.values()):
                return self._repeated(known, True)
        elif len(self._requests) >= LIMIT_REQUESTS:
            return Verdict(False, "too_many", 0.0, recompute_s)
        request = known or self._new(name, urgent, within_s, recompute_s, now)
        promised = request.recompute_s < float("inf")
        shared = self._forecast.shared(joined)
        if known is None and urgent and not promised:
            # A short load is read before a long one.
            request.rank_at = now + min(within_s, RANK_TIMES * alone_s(new))
        why = self._forecast.reason(request, new, shared, now)
        if why == "crowded" and not promised:
            request.rank_at = request.deadline if known is None else request.rank_at
            why = self._forecast.reason(request, new, shared, now)
        load_s = self._forecast.load_s(request, new, shared)
        if known is not None:
            return self._repeated(known, why in LOADS)
        if promised and self._dice() < EXPLORE:
            if why in LOADS:
                if recompute_s <= EXPLORE_DEARER * load_s:
                    why = "tried_compute"
            elif why != "unreliable":
                request.rank_at = request.deadline
                if self._forecast.fits(request, new, shared, now):
                    why = "tried_load"
        request.verdict = Verdict(why in LOADS, why, load_s, recompute_s)
        if request.verdict.load:
            self._requests[name] = request
        else:
            self._decline(request)
        return request.verdict

    def add(
        self,
        name: Hashable,
        new: Sequence[NewRead],
        joined: Iterable[Hashable] = (),
        announced: Mapping[DiskLink, int] | None = None,
    ) -> None:
        """Let the request wait for new reads, and for blocks that are read for other requests. `announced`:
        `add_more` follows with this many bytes from each link."""
        request = self._requests[name]
        if request.is_done:
            self.order.insert(request)
        if announced is not None:
            request.open_lists += 1
            request.announced.update(announced)
            request.bytes_left.update(announced)
        self._add(request, new, joined)
        self._forecast.expect(request, announced or bytes_by_link(new), self._clock())

    def add_more(
        self, name: Hashable, new: Sequence[NewRead], joined: Iterable[Hashable], is_all: bool
    ) -> None:
        """Add reads that were announced; `is_all`: no more follow."""
        request = self._requests[name]
        for _, link, nbytes in new:
            request.bytes_left[link] -= nbytes
            request.announced[link] -= nbytes
        request.open_lists -= is_all
        self._add(request, new, joined)

    def _add(
        self, request: ReadRequest, new: Sequence[NewRead], joined: Iterable[Hashable]
    ) -> None:
        self.order.add(request, new, joined)
        if request.is_done:
            self._finish(request)

    def _new(
        self, name: Hashable, urgent: bool, within_s: float, recompute_s: float, now: float
    ) -> ReadRequest:
        patience = PREFETCH_S
        if urgent:
            patience = min(within_s, recompute_s)
        else:
            recompute_s = float("inf")
        slack = SLACK * patience if recompute_s < float("inf") else 0.0
        verdict = Verdict(True, "", 0.0, recompute_s)
        rank_at, deadline = now + patience, now + patience + slack
        number = self.order.next_number()
        return ReadRequest(name, number, urgent, rank_at, deadline, recompute_s, verdict, now)

    def _decline(self, request: ReadRequest) -> None:
        if len(self._declined) >= LIMIT_DECLINED:
            self._declined.popitem(last=False)
        self._declined[request.name] = request

    def _repeated(self, request: ReadRequest, load: bool) -> Verdict:
        """The earlier verdict with the remaining time. `load`: whether to read additional blocks too."""
        verdict, load_s = request.verdict, self._forecast.finish_s(request)
        return Verdict(verdict.load and load, verdict.why, load_s, verdict.recompute_s, False)

    # --- waiting requests ----------------------------------------------------------------------

    def eta_s(self, name: Hashable) -> float:
        """How much longer the reads of this request take; 0 if it waits for nothing."""
        request = self._requests.get(name)
        return self._forecast.finish_s(request) if request is not None else 0.0

    def knows(self, name: Hashable) -> bool:
        """Whether this request waits, or its verdict is remembered."""
        return name in self._requests or name in self._declined

    def is_waiting(self, name: Hashable) -> bool:
        return name in self._requests

    def ended(self, block: Hashable, good: bool) -> list[Hashable]:
        """A submitted read has ended, with its data or without; return the urgent requests that waited."""
        requests = self.order.ended(block, good)
        waited = [one.name for one in requests if one.urgent and self._is_current(one)]
        for request in requests:
            if request.is_done:
                if good and self._is_current(request):
                    self._forecast.judge(request, True, self._clock())
                self._finish(request)
        return waited

    def _is_current(self, request: ReadRequest) -> bool:
        return self._requests.get(request.name) is request

    def _finish(self, request: ReadRequest) -> None:
        """The request waits for nothing."""
        self.order.remove(request)
        if self._is_current(request):
            del self._requests[request.name]

    # --- requests that end early ---------------------------------------------------------------

    def cancel(self, name: Hashable, most: int = 1 << 31) -> list[Hashable]:
        """Cancel the request; return the blocks that need not be read. Handles at most this many reads;
        `continue_cancel` handles the rest."""
        self._declined.pop(name, None)
        request = self._requests.pop(name, None)
        if request is not None:
            self._forecast.judge(request, False, self._clock())
            self._cancelled.append(request)
        return self.continue_cancel(most)

    def continue_cancel(self, most: int = 1 << 31) -> list[Hashable]:
        """Handle at most this many reads of cancelled requests; return the blocks that need not be read."""
        blocks: list[Hashable] = []
        while self._cancelled and most > 0:
            request = self._cancelled[0]
            some = list(islice(request.reads, most))
            most -= 1 + len(some)
            blocks += [read.name for read in some if self.order.leave(request, read)]
            if not request.reads:
                self._cancelled.popleft()
                self.order.remove(request)
        return blocks

    @property
    def is_cancelling(self) -> bool:
        """Whether cancelled requests still have reads."""
        return bool(self._cancelled)

    def released(self, name: Hashable) -> None:
        """The request's lease was released: cancel the request unless it asks again soon."""
        if (request := self._requests.get(name)) is not None:
            request.released_at = self._clock()

    def expire(self, most: int = 1 << 31) -> list[Hashable]:
        """Cancel requests past their deadline, and those whose lease was released. Returns as `cancel`."""
        now = self._clock()
        while self._declined and now - next(iter(self._declined.values())).decided_at > FORGET_S:
            self._declined.popitem(last=False)
        for request in list(self._requests.values()):
            gone = now - request.released_at > GONE_S
            if not gone and now <= request.deadline:
                continue
            del self._requests[request.name]
            self._forecast.judge(request, False, now)
            self._cancelled.append(request)
            if not gone:
                self.late += 1
                load_s = request.verdict.load_s
                request.verdict = Verdict(False, "late", load_s, request.recompute_s)
                request.decided_at = now
                self._decline(request)
        return self.continue_cancel(most)
