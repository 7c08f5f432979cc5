"""A disk as a model, under a clock of its own: what the simulator and the tests read from."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

from kvtier.planning import Link, Planner

DEPTH = 8
WRITE_BATCH = 16


@dataclass(slots=True)
class Operation:
    left: float
    nbytes: int
    block: Hashable = None
    writes: bool = False


class Disk:
    """Shares its bandwidth among the operations that it has, `DEPTH` of them; the others wait, reads before
    writes, as with the native worker. Writes without end, where `write_bytes` says how much each."""

    def __init__(
        self, planner: Planner, link: Link, bytes_s: float, write_bytes: int = 0, start: float = 0.0
    ) -> None:
        self.now = start
        self.written = 0
        self.came: list[tuple[Hashable, float]] = []  # since somebody took them
        self._planner = planner
        self._link = link
        self._bytes_s = bytes_s
        self._write_bytes = write_bytes
        self._reads: deque[Operation] = deque()
        self._writes: deque[Operation] = deque()
        self._has: list[Operation] = []

    def next_s(self) -> float:
        """When something is over next, if nothing comes on top."""
        self._fill()
        if not self._has:
            return float("inf")
        return self.now + min(one.left for one in self._has) * len(self._has) / self._bytes_s

    def run_until(self, then: float) -> None:
        """Go on until then, or until something is over, whichever is first."""
        at = min(then, self.next_s())
        moved = (at - self.now) * self._bytes_s / max(1, len(self._has))
        self.now = at
        for one in self._has:
            one.left -= moved
        over = [one for one in self._has if one.left < 1]
        self._has = [one for one in self._has if one.left >= 1]
        for one in over:
            if one.writes:
                self.written += one.nbytes
            else:
                self.came.append((one.block, at))

    def _fill(self) -> None:
        for block in self._planner.take(self._link):
            nbytes = self._planner.bytes_of(block)
            self._reads.append(Operation(nbytes, nbytes, block))
        if self._write_bytes and not self._writes and self._planner.may_write(self._link):
            for _ in range(WRITE_BATCH):
                self._writes.append(Operation(self._write_bytes, self._write_bytes, writes=True))
            self._planner.wrote(self._link, WRITE_BATCH * self._write_bytes)
        while len(self._has) < DEPTH:
            if self._reads:
                self._has.append(self._reads.popleft())
            elif self._writes and sum(one.writes for one in self._has) < DEPTH // 2:
                self._has.append(self._writes.popleft())
            else:
                break
