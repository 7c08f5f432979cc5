"""When reads will end, whether a load is worth it, and whether earlier forecasts were right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping

from kvtier_daemon.planning.links import DiskLink
from kvtier_daemon.planning.read_order import Position, ReadRequest, ReadSchedule, alone_s

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
        if alone_s(self._own_bytes(request, new, shared)) > request.recompute_s:
            return "slower"
        if not all(link.is_reliable for link, nbytes in new.items() if nbytes):
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
