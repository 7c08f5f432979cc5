"""Models of loads and of a disk with their own clock, for tests, benchmarks and the simulator."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from kvtier_daemon.planning import DiskLink, Planner, Verdict

BLOCK = 2 << 20
RATE = 3e9
NEVER = float("inf")
TEND_S = 0.1
DEPTH = 8
WRITE_BATCH = 16


@dataclass(slots=True)
class Operation:
    left: float
    nbytes: int
    block: Hashable = None
    writes: bool = False


class Disk:
    """Shares its bandwidth among `DEPTH` operations; the others wait, reads before writes, as in
    the native worker. With `write_bytes`, writes of this size never stop."""

    def __init__(
        self,
        planner: Planner,
        link: DiskLink,
        bytes_s: float,
        write_bytes: int = 0,
        start: float = 0.0,
    ) -> None:
        self.now = start
        self.written = 0
        self.came: list[tuple[Hashable, float]] = []  # since the last call that took them
        self._planner = planner
        self._link = link
        self._bytes_s = bytes_s
        self._write_bytes = write_bytes
        self._reads: deque[Operation] = deque()
        self._writes: deque[Operation] = deque()
        self._has: list[Operation] = []

    def next_s(self) -> float:
        """The time of the next completion, if no operation is added."""
        self._fill()
        if not self._has:
            return float("inf")
        return self.now + min(one.left for one in self._has) * len(self._has) / self._bytes_s

    def run_until(self, then: float) -> None:
        """Advance to `then` or to the next completion, whichever is first."""
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
        for block in self._planner.order.take(self._link):
            nbytes = self._planner.order.bytes_of(block)
            self._reads.append(Operation(nbytes, nbytes, block))
        if self._write_bytes and not self._writes and self._planner.order.may_write(self._link):
            for _ in range(WRITE_BATCH):
                self._writes.append(Operation(self._write_bytes, self._write_bytes, writes=True))
            self._planner.order.wrote(self._link, WRITE_BATCH * self._write_bytes)
        while len(self._has) < DEPTH:
            if self._reads:
                self._has.append(self._reads.popleft())
            elif self._writes and sum(one.writes for one in self._has) < DEPTH // 2:
                self._has.append(self._writes.popleft())
            else:
                break


@dataclass
class Load:
    """A request of a workload, and its result."""

    name: str
    at: float
    blocks: list[str]
    recompute_s: float = NEVER
    gone_at: float = NEVER
    verdict: Verdict | None = None
    left: set[str] = field(default_factory=set)
    over_at: float = NEVER
    urgent: bool = True


class World:
    """Requests, a planner and a disk, in simulated time. A block whose read was cancelled stays on
    disk; a block that was read is in memory."""

    def __init__(self, rate: float = RATE, writes: bool = False, known: bool = True) -> None:
        self.now = 0.0
        self.planner = Planner(lambda: self.now, dice=lambda: 1.0)
        self.link = DiskLink(lambda: self.now)
        if known:  # its speed was measured before
            for at in range(100):
                self.link.began(BLOCK, urgent=False)
                self.now = (at + 1) * BLOCK / rate
                self.link.ended(BLOCK, BLOCK, urgent=False)
        self.disk = Disk(self.planner, self.link, rate, BLOCK if writes else 0, self.now)
        self.start = self.now
        self.reads: Counter[str] = Counter()
        self.in_memory: set[str] = set()
        self.reading: set[str] = set()
        self.most_waiting = 0

    def ask(self, load: Load, nbytes: int = BLOCK) -> None:
        fresh = [b for b in load.blocks if b not in self.in_memory and b not in self.reading]
        joined = [b for b in load.blocks if b in self.reading]
        total = len(fresh) * nbytes
        load.verdict = self.planner.weigh(
            load.name, {self.link: total} if total else {}, joined,
            urgent=load.urgent, recompute_s=load.recompute_s,
        )  # fmt: skip
        if load.verdict.load:
            self.planner.add(load.name, [(b, self.link, nbytes) for b in fresh], joined)
            self.reading.update(fresh)
            load.left = {*fresh, *joined}
            if not load.left:
                load.over_at = 0.0

    def gone(self, blocks: list[object]) -> None:
        for block in blocks:
            assert isinstance(block, str)
            self.reading.discard(block)

    def run(self, loads: list[Load], until: float = NEVER) -> None:
        """Run these loads until all have ended, or until the time is over."""
        events = sorted([(self.start + load.at, 0, load) for load in loads]
                        + [(self.start + load.gone_at, 1, load) for load in loads
                           if load.gone_at < NEVER], key=lambda event: event[:2])  # fmt: skip
        waiting: defaultdict[str, list[Load]] = defaultdict(list)
        tended = self.now
        while True:
            next_event = events[0][0] if events else NEVER
            then = min(next_event, self.disk.next_s(), tended + TEND_S)
            if (not events and not len(self.planner.order)) or then > self.start + until:
                break
            self.now = max(self.now, then)
            self.disk.run_until(self.now)
            for block, at in self.disk.came:
                assert isinstance(block, str)
                self.planner.ended(block, good=True)
                self.reading.discard(block)
                self.in_memory.add(block)
                self.reads[block] += 1
                for load in waiting.pop(block, ()):
                    if block in load.left:
                        load.left.discard(block)
                        if not load.left:
                            load.over_at = at - self.start - load.at
            self.disk.came.clear()
            while events and events[0][0] <= self.now:
                _, ends, load = events.pop(0)
                if ends:
                    load.left = set()
                    self.gone(self.planner.cancel(load.name))
                else:
                    self.ask(load)
                    for block in load.left:
                        waiting[block].append(load)
            if self.now >= tended + TEND_S:
                tended = self.now
                self.gone(self.planner.expire())
            self.most_waiting = max(self.most_waiting, len(self.planner.order))
