"""What to read from the disks for whom, in which order, and what not to read at all. Pure: it has no clock of
its own, does no I/O, and names blocks and requests by whatever its owner likes.

A request that asks is weighed once: a load that would end after its blocks had been computed, or that would
make another one end so, is not begun. What is begun goes by deadline, some milliseconds' worth at a time, so
that who comes later with less time is served first; a prefetch, and writes, have a small share beside it. The
reads of a request that is gone are called back, unless another waits for them too.
"""

from __future__ import annotations

import heapq
import random
import time
from bisect import bisect_left, insort
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice

from kvtier.planning.links import Link
from kvtier.planning.recompute import Recompute, predict

__all__ = [
    "COMPUTE",
    "LIMIT_ASKS",
    "LIMIT_WAITS",
    "PATIENCE_S",
    "WHY",
    "Link",
    "Planner",
    "Recompute",
    "Verdict",
    "predict",
]

LIMIT_ASKS = 2048
LIMIT_REFUSED = 4096  # of whom it is remembered; beyond that older ones may ask anew
LIMIT_WAITS = 65_536
PATIENCE_S = 5.0  # of who does not say how long it waits
EACH_S = 8.0  # and its place is that of one who has so many times what its load takes alone
PREFETCH_S = 30.0
HASTE_S = 0.005  # a load that has less than this to spare is not begun
SLACK = 0.05  # of what recomputing takes: a load may be late by so much
EXPLORE = 0.01
EXPLORE_DEARER = 2.0  # computing is tried where it takes no more than so many times the load
GONE_S = 0.2  # without a word, after a lease was released
LATE_TIMES, LATE_S = 2.0, 0.05  # a forecast failed that is exceeded by more than both
LAPSE_S = 5.0  # what was said against a load is thought over, however often it is asked for

WHY = (
    "faster",  # the load is expected first
    "unknown",  # what recomputing takes was never told
    "prefetch",  # nobody waits for it
    "tried_load",  # it is expected last, by little: to know whether that is still so
    "tried_compute",  # the same
    "slower",  # recomputing is expected first
    "crowded",  # the disk has too much to do until then
    "unreliable",  # the disk's last reads came later than was forecast
    "late",  # the load was begun, and its time is over
    "too_many",  # requests wait already
)
LOADS, COMPUTE = frozenset(WHY[:4]), frozenset(WHY[4:])
Place = tuple[bool, float, int]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to load, why, and what the two would take. `first`: it was not said before."""

    load: bool
    why: str
    load_s: float
    recompute_s: float
    first: bool = True


@dataclass(slots=True, eq=False)
class Ask:
    """A request that waits, until all that it waits for is over or its time is."""

    name: Hashable
    number: int
    urgent: bool
    by: float  # its place in the order
    end: float  # when it is given up
    recompute_s: float  # within which a load was promised; without limit: nothing was
    verdict: Verdict
    said_at: float
    released_at: float = float("inf")
    left: Counter[Link] = field(default_factory=Counter)  # bytes that are read in its place
    more: Counter[Link] = field(default_factory=Counter)  # of those, that are to be added yet
    reads: dict[Read, None] = field(default_factory=dict)  # that it waits for
    links: Counter[Link] = field(default_factory=Counter)  # how many of them
    open: int = 0  # lists of what it waits for that have more to come
    waiting: dict[Link, deque[Read]] = field(default_factory=dict)
    queued: set[Link] = field(default_factory=set)  # in whose queue it is
    due: float = 0.0  # later than this its reads came later than was forecast

    @property
    def place(self) -> Place:
        return not self.urgent, self.by, self.number

    @property
    def is_over(self) -> bool:
        """Whether it waits for nothing."""
        return not self.reads and not self.open


@dataclass(slots=True, eq=False)
class Read:
    """A block that is to be read, in the place of the first of those who wait for it."""

    name: Hashable
    link: Link
    nbytes: int
    number: int
    asks: list[Ask] = field(default_factory=list)
    queued: list[Ask] = field(default_factory=list)  # among whose waiting ones it is
    begun: bool = False
    urgent: bool = False  # when it began


Shared = Mapping[Ask, Mapping[Link, int]]
Fresh = tuple[Hashable, Link, int]  # a block, where it is read from, and its bytes


def _place(ask: Ask) -> Place:
    return ask.place


def _bytes(fresh: Sequence[Fresh]) -> Counter[Link]:
    """How much of these is read from each link."""
    total: Counter[Link] = Counter()
    for _, link, nbytes in fresh:
        total[link] += nbytes
    return total


def _alone_s(nbytes: Mapping[Link, int]) -> float:
    """How long these take if nothing else is read."""
    return max((count / link.bytes_s for link, count in nbytes.items()), default=0.0)


class Planner:
    """`dice` returns numbers from 0 to 1."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        dice: Callable[[], float] = random.random,
    ) -> None:
        self._clock = clock
        self._dice = dice
        self._numbers = count()
        self._asks: dict[Hashable, Ask] = {}
        self._refused: OrderedDict[Hashable, Ask] = (
            OrderedDict()
        )  # who had better compute, the oldest first
        self._order: list[Ask] = []  # those with something to wait for, by place
        self._going: deque[Ask] = deque()  # whose name is free, and who are in the order yet
        self._reads: dict[Hashable, Read] = {}
        self._queues: dict[tuple[Link, bool], list[tuple[Place, Ask]]] = {}
        self._urgent: Counter[Link] = Counter()  # reads of urgent requests, waiting or begun
        self.waits = 0  # by so many, each for one read
        self.late = 0  # loads that were begun and not ended in time

    # --- asking ------------------------------------------------------------------------------

    def weigh(
        self,
        name: Hashable,
        fresh: Mapping[Link, int],
        joined: Iterable[Hashable] = (),
        *,
        urgent: bool = True,
        within_s: float = PATIENCE_S,
        recompute_s: float = float("inf"),
    ) -> Verdict:
        """Load, or compute again? `fresh` has the bytes that would be read from each link, `joined` blocks
        that are being read for others. Where it is to be a load, `add` is to follow. Who asked before, by
        this name, is told what was said, and how far it is."""
        now = self._clock()
        if (refused := self._refused.get(name)) is not None:
            return self._again(refused, False)
        before = self._asks.get(name)
        if before is not None:
            before.released_at = float("inf")
            if not any(fresh.values()):
                return self._again(before, True)
        elif len(self._asks) >= LIMIT_ASKS:
            return Verdict(False, "too_many", 0.0, recompute_s)
        ask = before or self._new(name, urgent, within_s, recompute_s, now)
        promised = ask.recompute_s < float("inf")
        shared = self._shared(joined)
        if before is None and urgent and not promised:
            # A short one goes before a long one.
            ask.by = now + min(within_s, EACH_S * _alone_s(fresh))
        why = self._why(ask, fresh, shared, now)
        if why == "crowded" and not promised:
            ask.by = ask.end if before is None else ask.by
            why = self._why(ask, fresh, shared, now)
        load_s = self._load_s(ask, fresh, shared)
        if before is not None:
            return self._again(before, why in LOADS)
        if promised and self._dice() < EXPLORE:
            if why in LOADS:
                if recompute_s <= EXPLORE_DEARER * load_s:
                    why = "tried_compute"
            elif why != "unreliable":
                ask.by = ask.end
                if self._fits(ask, fresh, shared, now):
                    why = "tried_load"
        ask.verdict = Verdict(why in LOADS, why, load_s, recompute_s)
        if ask.verdict.load:
            self._asks[name] = ask
        else:
            self._refuse(ask)
        return ask.verdict

    def add(
        self,
        name: Hashable,
        fresh: Sequence[Fresh],
        joined: Iterable[Hashable] = (),
        more: Mapping[Link, int] | None = None,
    ) -> None:
        """The request waits for these: blocks to be read from now on, and blocks that others wait for. `more`
        says that this is not all: `add_more` follows, and brings so many bytes from each link."""
        ask = self._asks[name]
        if ask.is_over:
            insort(self._order, ask, key=_place)
        if more is not None:
            ask.open += 1
            ask.more.update(more)
            ask.left.update(more)
        self._add(ask, fresh, joined)
        self._forecast(ask, more or _bytes(fresh))

    def add_more(
        self, name: Hashable, fresh: Sequence[Fresh], joined: Iterable[Hashable], is_all: bool
    ) -> None:
        """What was announced to a request that waits, or some of it."""
        ask = self._asks[name]
        for _, link, nbytes in fresh:
            ask.left[link] -= nbytes
            ask.more[link] -= nbytes
        ask.open -= is_all
        self._add(ask, fresh, joined)

    def _add(self, ask: Ask, fresh: Sequence[Fresh], joined: Iterable[Hashable]) -> None:
        for block, link, nbytes in fresh:
            assert block not in self._reads, "a block is read twice"
            read = self._reads[block] = Read(block, link, nbytes, next(self._numbers))
            self._join(ask, read)
        for block in joined:
            known = self._reads.get(block)
            if known is not None and known not in ask.reads and self.waits < LIMIT_WAITS:
                self._join(ask, known)
        if ask.is_over:
            self._leave(ask)

    def _new(
        self, name: Hashable, urgent: bool, within_s: float, recompute_s: float, now: float
    ) -> Ask:
        patience = PREFETCH_S
        if urgent:
            patience = min(within_s, recompute_s)
        else:
            recompute_s = float("inf")
        slack = SLACK * patience if recompute_s < float("inf") else 0.0
        said = Verdict(True, "", 0.0, recompute_s)
        by, end = now + patience, now + patience + slack
        return Ask(name, next(self._numbers), urgent, by, end, recompute_s, said, now)

    def _refuse(self, ask: Ask) -> None:
        if len(self._refused) >= LIMIT_REFUSED:
            self._refused.popitem(last=False)
        self._refused[ask.name] = ask

    def _again(self, ask: Ask, load: bool) -> Verdict:
        """What was said, and how long it takes yet. `load`: whether what came on top is to be read, too."""
        said, load_s = ask.verdict, self._finish_s(ask)
        return Verdict(said.load and load, said.why, load_s, said.recompute_s, False)

    def _shared(self, joined: Iterable[Hashable]) -> Shared:
        """What is read for others, by who is the first of them: the bytes of it that are not with a disk."""
        shared: dict[Ask, dict[Link, int]] = {}
        for block in joined:
            read = self._reads.get(block)
            if read is not None and read.asks:
                waiting = shared.get(read.asks[0])
                if waiting is None:
                    waiting = shared[read.asks[0]] = {}
                if not read.begun:
                    waiting[read.link] = waiting.get(read.link, 0) + read.nbytes
        return shared

    def _why(self, ask: Ask, fresh: Mapping[Link, int], shared: Shared, now: float) -> str:
        if not ask.urgent:
            return "prefetch"
        if _alone_s(self._moved(ask, fresh, shared)) > ask.recompute_s:
            return "slower"
        if not all(link.is_reliable for link, nbytes in fresh.items() if nbytes):
            return "unreliable"
        if not self._fits(ask, fresh, shared, now):
            return "crowded"
        return "faster" if ask.recompute_s < float("inf") else "unknown"

    def _fits(self, ask: Ask, fresh: Mapping[Link, int], shared: Shared, now: float) -> bool:
        """Whether this ends in time, and everyone to whom that was promised does, too."""
        most = ask.by if ask.recompute_s < float("inf") else ask.end
        if now + self._joined_s(ask, shared) > most:
            return False
        for link, nbytes in self._moved(ask, fresh, shared).items():
            rate = link.sure_bytes_s
            # What the disk has is not called back, and it may have writes, too.
            start = now + HASTE_S + link.reading_bytes / rate
            ahead = 0
            for other in self._order:
                if not other.urgent or other.place > ask.place:
                    break
                ahead += other.left[link]
            if start + (ahead + nbytes) / rate > most:
                return False
            for other in self._order[bisect_left(self._order, ask.place, key=_place) :]:
                if not other.urgent:
                    break
                ahead += other.left[link]
                in_time = (
                    other.recompute_s < float("inf") and now + ahead / link.bytes_s <= other.end
                )
                if in_time and other.left[link] and start + (ahead + nbytes) / rate > other.end:
                    return False
        return True

    def _moved(self, ask: Ask, fresh: Mapping[Link, int], shared: Shared) -> Mapping[Link, int]:
        """The bytes that would be read at this one's place, and are not so yet."""
        moved = Counter(fresh)
        for owner, waiting in shared.items():
            if ask.place < owner.place:
                moved.update(waiting)
        return moved

    def _load_s(self, ask: Ask, fresh: Mapping[Link, int], shared: Shared) -> float:
        own = self._ends_s(ask.place, self._moved(ask, fresh, shared))
        return max(own, self._joined_s(ask, shared))

    def _joined_s(self, ask: Ask, shared: Shared) -> float:
        """How long those take that are read for others before this one's turn."""
        before = (owner for owner in shared if owner.place < ask.place)
        return max(map(self._finish_s, before), default=0.0)

    def _finish_s(self, ask: Ask) -> float:
        """How long what it waits for takes yet."""
        return self._ends_s(ask.place, dict.fromkeys(ask.links | ask.more, 0))

    def _ends_s(self, place: Place, fresh: Mapping[Link, int]) -> float:
        """How long so many more bytes take in this place of the order, after those before it."""
        longest = 0.0
        for link, nbytes in fresh.items():
            ahead = 0
            for other in self._order:
                if other.place > place:
                    break
                ahead += other.left[link]
            longest = max(longest, (ahead + nbytes) / link.bytes_s)
        return longest

    def eta_s(self, name: Hashable) -> float:
        """How long what this request waits for takes yet; 0 if it waits for nothing."""
        ask = self._asks.get(name)
        return self._finish_s(ask) if ask is not None else 0.0

    def knows(self, name: Hashable) -> bool:
        """Whether this request waits, or what was said of it is remembered."""
        return name in self._asks or name in self._refused

    def is_waiting(self, name: Hashable) -> bool:
        """Whether this request waits."""
        return name in self._asks

    def bytes_of(self, block: Hashable) -> int:
        """What the read of this block brings."""
        return self._reads[block].nbytes

    @property
    def waiting(self) -> int:
        """How many reads are asked for, and not over."""
        return len(self._reads)

    # --- who waits for what ------------------------------------------------------------------

    def _join(self, ask: Ask, read: Read) -> None:
        """Wait for this; it is read in the place of the first of those who do."""
        leader = read.asks[0] if read.asks else None
        insort(read.asks, ask, key=_place)
        ask.reads[read] = None
        ask.links[read.link] += 1
        self.waits += 1
        if read.asks[0] is ask:
            if leader is not None:
                self._unlead(leader, read)
            self._lead(ask, read)

    def _lead(self, ask: Ask, read: Read) -> None:
        link = read.link
        ask.left[link] += read.nbytes
        self._urgent[link] += ask.urgent
        if read.begun or ask in read.queued:
            return
        read.queued.append(ask)
        ask.waiting.setdefault(link, deque()).append(read)
        if link not in ask.queued:
            ask.queued.add(link)
            heapq.heappush(self._queues.setdefault((link, ask.urgent), []), (ask.place, ask))

    def _unlead(self, ask: Ask, read: Read) -> None:
        ask.left[read.link] -= read.nbytes
        self._urgent[read.link] -= ask.urgent

    def _part(self, ask: Ask, read: Read) -> None:
        """It waits for this no more."""
        leads = read.asks[0] is ask
        read.asks.remove(ask)
        self._let_go(ask, read)
        if leads:
            self._unlead(ask, read)

    def _let_go(self, ask: Ask, read: Read) -> None:
        del ask.reads[read]
        ask.links[read.link] -= 1
        if not ask.links[read.link]:
            del ask.links[read.link]
        self.waits -= 1

    def _leave(self, ask: Ask) -> None:
        """It waits for nothing any more."""
        at = bisect_left(self._order, ask.place, key=_place)
        assert self._order[at] is ask
        del self._order[at]
        if self._asks.get(ask.name) is ask:
            del self._asks[ask.name]

    # --- reading -----------------------------------------------------------------------------

    def take(self, link: Link, most: int = 1 << 31) -> list[Hashable]:
        """What is to be handed to this disk now, in order; each is to be told of by `over`."""
        taken: list[Hashable] = []
        while len(taken) < most and link.has_room():
            read, side = self._head(link, True), self._head(link, False)
            if read is None or (side is not None and link.spend_prefetch(side.nbytes)):
                read = side
            if read is None:
                break
            read.begun, read.urgent = True, read.asks[0].urgent
            link.began(read.nbytes, read.urgent)
            taken.append(read.name)
        return taken

    def _head(self, link: Link, urgent: bool) -> Read | None:
        """The read that is to begin first."""
        queue = self._queues.get((link, urgent), [])
        while queue:
            ask = queue[0][1]
            waiting = ask.waiting[link]
            while waiting:
                read = waiting[0]
                if not read.begun and read.asks and read.asks[0] is ask:
                    return read
                read.queued.remove(ask)
                waiting.popleft()
            heapq.heappop(queue)
            ask.queued.discard(link)
        return None

    def over(self, block: Hashable, good: bool) -> None:
        """A read that was handed over has ended, and brought what it should or not."""
        read = self._reads.pop(block)
        read.link.ended(read.nbytes, good, read.urgent)
        if read.asks:
            self._unlead(read.asks[0], read)  # the others never led it
        for ask in read.asks:
            self._let_go(ask, read)
            if ask.is_over:
                if good and self._asks.get(ask.name) is ask:
                    self._judge(ask, True)
                self._leave(ask)

    def _forecast(self, ask: Ask, nbytes: Mapping[Link, int]) -> None:
        """Note until when what this one waits for is to come, now that this much is read in its place;
        what is read after it comes later."""
        ask.due = max(ask.due, self._clock() + LATE_TIMES * self._finish_s(ask) + LATE_S)
        later_s = LATE_TIMES * _alone_s(nbytes)
        for other in self._order[bisect_left(self._order, ask.place, key=_place) :]:
            other.due += later_s if other is not ask else 0.0

    def _judge(self, ask: Ask, came: bool) -> None:
        """All that a request waited for has come, or it has stopped waiting: was its forecast kept? For
        prefetches that counts where no urgent reads go before them."""
        if ask.recompute_s == float("inf") and (
            ask.urgent or all(link.is_reliable for link in ask.left)
        ):
            return
        late = self._clock() > ask.due
        if came or late:
            for link in ask.left:
                link.forecast_ended(not late)

    def may_write(self, link: Link) -> bool:
        """Whether a write may be handed to this disk now: where urgent reads wait, only a few."""
        return not self._urgent[link] or link.may_write()

    def wrote(self, link: Link, nbytes: int) -> None:
        """So much is being written there."""
        if self._urgent[link]:
            link.wrote(nbytes)

    # --- requests that go --------------------------------------------------------------------

    def cancel(self, name: Hashable, most: int = 1 << 31) -> list[Hashable]:
        """The request is gone: the blocks that are not to be read any more, of so many reads at most.
        `call_back` goes on with the others."""
        self._refused.pop(name, None)
        ask = self._asks.pop(name, None)
        if ask is not None:
            self._judge(ask, False)
            self._going.append(ask)
        return self.call_back(most)

    def call_back(self, most: int = 1 << 31) -> list[Hashable]:
        """Of what requests that are gone waited for, so many reads: the blocks that are not to be read any
        more."""
        blocks: list[Hashable] = []
        while self._going and most > 0:
            ask = self._going[0]
            some = list(islice(ask.reads, most))
            most -= 1 + len(some)
            for read in some:
                if self._leave_read(ask, read):
                    blocks.append(read.name)
            if not ask.reads:
                self._going.popleft()
                at = bisect_left(self._order, ask.place, key=_place)
                if at < len(self._order) and self._order[at] is ask:
                    del self._order[at]
        return blocks

    @property
    def is_calling_back(self) -> bool:
        """Whether requests that are gone hold reads yet."""
        return bool(self._going)

    def released(self, name: Hashable) -> None:
        """Its lease was released: it is gone, unless it asks again soon."""
        if (ask := self._asks.get(name)) is not None:
            ask.released_at = self._clock()

    def tend(self, most: int = 1 << 31) -> list[Hashable]:
        """The blocks that are not to be read any more, as those who wait for them are gone, or their time is
        over; of so many reads at most, as of `cancel`."""
        now = self._clock()
        while self._refused and now - next(iter(self._refused.values())).said_at > LAPSE_S:
            self._refused.popitem(last=False)
        for ask in list(self._asks.values()):
            gone = now - ask.released_at > GONE_S
            if not gone and now <= ask.end:
                continue
            del self._asks[ask.name]
            self._judge(ask, False)
            self._going.append(ask)
            if not gone:
                self.late += 1
                ask.verdict = Verdict(False, "late", ask.verdict.load_s, ask.recompute_s)
                ask.said_at = now
                self._refuse(ask)
        return self.call_back(most)

    def _leave_read(self, ask: Ask, read: Read) -> bool:
        """One that is gone waits for this no more; whether nobody does, and it had not begun."""
        if len(read.asks) > 1:
            led = read.asks[0] is ask
            self._part(ask, read)
            if led:
                self._lead(read.asks[0], read)
            return False
        read.asks.clear()
        self._unlead(ask, read)
        self._let_go(ask, read)
        if read.begun:
            return False
        del self._reads[read.name]
        return True
