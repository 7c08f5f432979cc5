"""The order of all planned reads, and the queue of each disk."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence
from itertools import count

from kvtier_daemon.planning.links import DiskLink
from kvtier_daemon.planning.read_requests import (
    NewRead,
    PlannedRead,
    Position,
    ReadRequest,
    position_of,
)

LIMIT_WAITS = 65_536


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
