"""The model of a disk in simulated time: executes the planner's reads, and writes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvtier_daemon.planning import DiskLink, Planner

DEPTH = 8
WRITES = DEPTH // 2


@dataclass(slots=True)
class Operation:
    block: int
    nbytes: int
    left: float  # remaining seconds, without other operations
    writes: bool


class SimDisk:
    """Divides its bandwidth among its operations: at most `DEPTH`, of which at most half are writes."""

    def __init__(
        self,
        planner: Planner,
        link: DiskLink,
        read_bytes_s: float,
        write_bytes_s: float,
        start: float,
    ) -> None:
        self._planner, self._link = planner, link
        self._read_bytes_s, self._write_bytes_s = read_bytes_s, write_bytes_s
        self._now = start
        self._has: list[Operation] = []
        self._reads: deque[Operation] = deque()
        self._writes: deque[Operation] = deque()
        self._came: list[tuple[int, bool]] = []
        self._written: list[int] = []

    def write(self, block: int, nbytes: int) -> None:
        self._writes.append(Operation(block, nbytes, nbytes / self._write_bytes_s, True))

    def next_s(self) -> float:
        """Return when the next operation ends, unless one is added."""
        self._fill()
        if not self._has:
            return float("inf")
        return self._now + min(one.left for one in self._has) * len(self._has)

    def run_until(self, then: float) -> None:
        """Advance to `then`; no operation may end before it."""
        share_s = (then - self._now) / max(1, len(self._has))
        self._now = then
        still = []
        for one in self._has:
            one.left -= share_s
            if one.left > 1e-9:
                still.append(one)
            elif one.writes:
                self._written.append(one.block)
            else:
                self._came.append((one.block, True))
        self._has = still

    def take_come(self) -> list[tuple[int, bool]]:
        came, self._came = self._came, []
        return came

    def take_written(self) -> list[int]:
        written, self._written = self._written, []
        return written

    def _fill(self) -> None:
        for block in self._planner.order.take(self._link):
            assert isinstance(block, int)
            nbytes = self._planner.order.bytes_of(block)
            self._reads.append(Operation(block, nbytes, nbytes / self._read_bytes_s, False))
        writes = sum(one.writes for one in self._has)
        while len(self._has) < DEPTH:
            if self._reads:
                self._has.append(self._reads.popleft())
            elif self._writes and writes < WRITES and self._planner.order.may_write(self._link):
                one = self._writes.popleft()
                self._planner.order.wrote(self._link, one.nbytes)
                self._has.append(one)
                writes += 1
            else:
                break
