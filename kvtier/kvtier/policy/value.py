"""Expected reuse: a block is worth the hits to be expected for each second of its space, at the horizon at
which that is most. It is learned as it goes, for blocks of a kind and an age, from watched blocks; those that
left memory are watched too, so that it isn't fooled by its own size. Where that hits less than how often a
block was wanted, or how long ago, would have, the better of these is the order. Tails go before heads.

N. Beckmann, H. Chen, A. Cidon, "LHD: improving cache hit rate by maximizing hit density", NSDI 2018; the best
horizon is J. C. Gittins' index ("Bandit processes and dynamic allocation indices", 1979). Counts of what is
gone are kept as in G. Einziger, R. Friedman, B. Manes, "TinyLFU", ACM Trans. on Storage 13(4), 2017, between
their steps as in R. Morris, "Counting large numbers of events in small registers", CACM 21(10), 1978. The
watched are thinned as in C. Waldspurger et al., "Efficient MRC construction with SHARDS", FAST 2015; orders
are compared in small caches as in C. Waldspurger et al., "Cache modeling and optimization using miniature
simulations", USENIX ATC 2017.
`Value` is native, `ValueModel` the same in Python, to the last bit.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtier.policy.model import Ages, mix, short_name
from kvtier_kernels import Value

__all__ = ["Value", "ValueModel"]

# A kind is how often a block was wanted, whether it was the last of its request, how many came with it.
NEW_KINDS = 6
KINDS = 16 * 2 * NEW_KINDS
MOST_HITS, LAST, NEW_SHIFT = 127, 128, 8  # own bits
AGES = 36
ENDS = [int((1.4142135623730951 if at % 2 else 1.0) * 2.0 ** (at // 2 + 2)) for at in range(AGES)]
WIDTHS = [(end - start) / 4 for start, end in zip([0, *ENDS], ENDS, strict=False)]

MOST_WATCHED = (1 << 16) // 4 * 3
WATCHED_FOR = 3600 * 4  # in quarters of a second
FIRST_NEWS, MORE_SEEN = 64, 8  # of what was seen, one of so many more is news
MEMORY = 1 << 17  # a fit: what was seen so long ago counts 1/e
FEW, FEW_OF_NEW = 2.0, 50.0  # blocks that weigh as much as their relatives

COUNTERS, ROWS = 1 << 20, 4
STEPS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64, 96, 127)  # of a counter of 4 bits
WINDOW = COUNTERS // 4

LEARNED, LEAST_WANTED, OLDEST = range(3)  # orders
MOST_ROOM = 1 << 12  # in a cache
SLACK = 16  # of so many blocks' room, one more or less
JUDGEMENTS = 8  # while the caches are filled once
FEW_BLOCKS = 64
FADING = 0.98  # a judgement: half of it in four fillings
TO_LEAVE, BACK = 1.75, 1.0  # standard deviations

Row = list[float]


@dataclass
class Entry:
    """A name of the sample, the last of it before this one in its chain, and the caches that have it."""

    before: int = 0
    at: int = 0
    turn: int = 0
    kind: int = 0
    inside: set[int] = field(default_factory=set)


class Duel:
    """A small cache for each order, of a sample of names. The ranks are lower for what goes sooner."""

    def __init__(self, rank: Callable[[int, Entry], int]) -> None:
        self.best = LEARNED
        self._rank = rank
        self._entries: dict[int, Entry] = {}
        self._shift = 0  # of 2^this names one is in the sample
        self._turn = self._unjudged = 0
        self._head = self._tail = self._tail_before = 0  # of the batch, of the one before
        self._joined = False
        self._inside = [0] * 3
        self._hits = [0.0] * 3
        self._of_request = [0] * 3
        self._variance = {(a, b): 0.0 for a in range(3) for b in range(3)}

    def used(self, name: int, quarters: int, kind: int, held: int, first: bool) -> None:
        """A request used a block; the tier holds so many. Of a batch the last of its chain is the `first`
        that is told of, and the others follow from there to its head."""
        if first:
            self._end_batch()
        while held >> self._shift > MOST_ROOM:
            self._shift += 1
            self._entries = {one: at for one, at in self._entries.items() if self._samples(one)}
            self._inside = [
                sum(order in one.inside for one in self._entries.values()) for order in range(3)
            ]
        if not self._samples(name):
            return
        entry = self._entries.setdefault(name, Entry())
        entry.at, entry.turn, entry.kind = quarters, self._turn, kind
        self._turn += 1
        for order in range(3):
            hit = order in entry.inside
            self._hits[order] += hit
            self._of_request[order] += hit
            self._inside[order] += not hit
        entry.inside = {LEARNED, LEAST_WANTED, OLDEST}
        if self._head in self._entries:
            self._entries[self._head].before = name
        self._head = name
        self._tail = self._tail or name
        room = max(held >> self._shift, 1)
        for order in range(3):
            if self._inside[order] > room + room // SLACK:
                self._trim(order, room - room // SLACK)
        self._unjudged += 1
        if self._unjudged * JUDGEMENTS >= max(room, FEW_BLOCKS):
            self._judge()

    def joined(self) -> None:
        """This batch hangs on the one before it."""
        self._joined = True

    def corrected(self, name: int, kind: int) -> None:
        if name in self._entries:
            self._entries[name].kind = kind

    def _samples(self, name: int) -> bool:
        return name >> (32 - self._shift) == 0

    def _trim(self, order: int, room: int) -> None:
        """A block stays as long as the one behind it, which was used before it."""
        inside = [(name, one) for name, one in self._entries.items() if order in one.inside]
        inside.sort(key=lambda item: item[1].turn)
        least: dict[int, int] = {}
        ranked = []
        for name, one in inside:
            rank = max(least.get(name, 0), self._rank(order, one))
            ranked.append((rank, one.turn, one))
            least[one.before] = max(least.get(one.before, 0), rank)
        ranked.sort(key=lambda item: item[:2])
        for _, _, one in ranked[: len(inside) - room]:
            one.inside.remove(order)
        self._inside[order] = room
        self._entries = {name: one for name, one in self._entries.items() if one.inside}

    def _end_batch(self) -> None:
        for a, b in self._variance:
            self._variance[a, b] += (self._of_request[a] - self._of_request[b]) ** 2
        self._of_request = [0] * 3
        if self._joined and self._head in self._entries:
            self._entries[self._head].before = self._tail_before
        self._tail_before, self._head, self._tail, self._joined = self._tail, 0, 0, False

    def _judge(self) -> None:
        """Only requests in which two differ say which is better."""
        self._unjudged, top, most = 0, self.best, 0.0
        for order in range(3):
            more = self._hits[order] - self._hits[self.best]
            needed = BACK if order == LEARNED else TO_LEAVE
            times = more * more / (self._variance[order, self.best] + 1e-9)
            if more > 0 and times > needed * needed and times > most:
                top, most = order, times
        self.best = top
        self._hits = [one * FADING for one in self._hits]
        self._variance = {which: one * FADING for which, one in self._variance.items()}


@dataclass
class Seen:
    """A block that is watched, wherever it is."""

    at: int
    kind: int


class ValueModel(Ages):
    def __init__(self) -> None:
        super().__init__(KINDS)
        self._seen: dict[int, Seen] = {}
        self._sample = 0xFFFFFFFF  # names up to this are watched
        self._lasts: deque[tuple[int, int]] = deque(maxlen=64)  # of requests, the latest first
        self._hits = [[0.0] * AGES for _ in range(KINDS)]  # wanted again at this age
        self._ends = [[0.0] * AGES for _ in range(KINDS)]  # watched no longer
        self._ranks = [[0] * AGES for _ in range(KINDS)]
        self._news = self._fitted = 0
        self._enough_news = FIRST_NEWS
        self._sketch: dict[int, int] = {}
        self._sketched = 0
        self._requests = 0
        self._duel = Duel(lambda order, one: self._worth(order, one.kind, self.quarters - one.at))

    def now(self, seconds: float) -> None:
        super().now(seconds)
        if self._news >= self._enough_news:
            self._refit()

    def rank_of(self, kind: int, age: int, place: int) -> int:
        return 1 + ((self._worth(self._duel.best, kind, age) * 128 + place) * 256 + kind)

    def _worth(self, order: int, kind: int, age: int) -> int:
        """Of equals the oldest goes first."""
        if order == LEARNED:
            return self._ranks[kind][age_kind(age)]
        return kind // (2 * NEW_KINDS) if order == LEAST_WANTED else 0

    # Blocks.

    def kind_of(self, own: int) -> int:
        return (step_of(own & MOST_HITS) * 2 + bool(own & LAST)) * NEW_KINDS + (own >> NEW_SHIFT)

    def met(self, number: int, name: int, again: bool, batch: int, last: bool) -> None:
        """One that is forgotten was wanted as often as the sketch remembers."""
        own = self.blocks[number].own
        hits = (own & MOST_HITS) + 1 if again else self._times_known(name)
        self._become(number, name, hits, new_kind(batch), last)

    def used(self, number: int, name: int, last: bool) -> None:
        own = self.blocks[number].own
        self._become(number, name, (own & MOST_HITS) + 1, own >> NEW_SHIFT, last)

    def _become(self, number: int, name: int, hits: int, new: int, last: bool) -> None:
        own = min(hits, MOST_HITS) | (LAST if last else 0) | new << NEW_SHIFT
        self.blocks[number].own = own
        if last:
            self._lasts.appendleft((number, short_name(name)))
            self._requests += 1
        self._know(name, (own & MOST_HITS) + 1)
        called, kind = short_name(name), self.kind_of(own)
        self._watch(called, kind)
        self._duel.used(called, self.quarters, kind, self._in_memory(), last)

    def _in_memory(self) -> int:
        return sum(block.in_memory for block in self.blocks.values())

    def continued(self, number: int) -> None:
        """It was not the last of its request: the rest is only there now."""
        self._duel.joined()
        block = self.blocks[number]
        if not block.own & LAST:
            return
        block.own &= ~LAST
        called = next((called for one, called in self._lasts if one == number), None)
        if called is None:
            return
        self._duel.corrected(called, self.kind_of(block.own))
        if called in self._seen:
            self._seen[called].kind = self.kind_of(block.own)

    # Learning.

    def _watch(self, name: int, kind: int) -> None:
        if name > self._sample:
            return
        if len(self._seen) >= MOST_WATCHED:
            self._thin()
        if name > self._sample:
            return
        self._news += 1
        seen = self._seen.get(name)
        if seen is not None:
            self._hits[seen.kind][age_kind(self.quarters - seen.at)] += 1
        self._seen[name] = Seen(self.quarters, kind)

    def _thin(self) -> None:
        """Those go that were watched for long enough; where they are few, every other name."""
        kept = {}
        for name, seen in self._seen.items():
            if self.quarters - seen.at > WATCHED_FOR:
                self._ends[seen.kind][-1] += 1
            else:
                kept[name] = seen
        if len(kept) > MOST_WATCHED // 4 * 3:
            self._sample //= 2
            self._scale(0.5)  # what others did is not to outweigh what these are waited for
            kept = {name: seen for name, seen in kept.items() if name <= self._sample}
        self._seen = kept

    def _scale(self, by: float) -> None:
        for table in (self._hits, self._ends):
            for row in table:
                row[:] = [one * by for one in row]

    def _refit(self) -> None:
        self._enough_news = self._news + min(self._news, MEMORY) // MORE_SEEN + FIRST_NEWS
        ends = [row[:] for row in self._ends]
        for seen in self._seen.values():
            ends[seen.kind][age_kind(self.quarters - seen.at)] += 1
        every = range(KINDS)
        families = [range(first, first + NEW_KINDS) for first in range(0, KINDS, NEW_KINDS)]
        pool = chances(total(self._hits, every), total(ends, every), [0.0] * AGES, 1e-6)
        worth = []
        for family in families:
            near = chances(total(self._hits, family), total(ends, family), pool, FEW)
            for kind in family:
                own = chances(self._hits[kind], ends[kind], near, FEW_OF_NEW)
                worth.append([best_rate(own, first) for first in range(AGES)])
        order = {one: at for at, one in enumerate(sorted({one for row in worth for one in row}))}
        self._ranks = [[order[one] for one in row] for row in worth]
        self._scale(max(0.0, 1 - (self._news - self._fitted) / MEMORY))
        self._fitted = self._news

    # How often those were wanted that are gone.

    def _times_known(self, name: int) -> int:
        return STEPS[min(self._sketch.get(at, 0) for at in counters_of(name))]

    def _know(self, name: int, times: int) -> None:
        """All are halved when many were new. Between two steps a counter moves by chance, which is the same
        for all of a request: or else what is gone each time before it is wanted would stay at a step."""
        fresh = False
        known, step = step_of(self._times_known(name)), step_of(times)
        if step <= known:
            step = known
            if known + 1 < len(STEPS):
                step += mix(self._requests) % (STEPS[known + 1] - STEPS[known]) == 0
        for at in counters_of(name):
            was = self._sketch.get(at, 0)
            fresh |= was == 0
            self._sketch[at] = max(was, step)
        self._sketched += fresh
        if self._sketched >= WINDOW:
            self._sketched = 0
            self._sketch = {at: was // 2 for at, was in self._sketch.items()}


def total(table: list[Row], which: range) -> Row:
    found = [0.0] * AGES
    for kind in which:
        for at in range(AGES):
            found[at] += table[kind][at]
    return found


def chances(hits: Row, ends: Row, relatives: Row, weight: float) -> Row:
    """At each age, how likely those that got so old are wanted again before the next. Few observations say
    how much likelier than its relatives a kind is, and many at which age."""
    seen = [0.0] * AGES
    risk, got, expected = 0.0, 1.0, 1.0
    for at in reversed(range(AGES)):
        risk += hits[at] + ends[at]
        seen[at] = max(risk - ends[at] / 2, 0.0)
        got += hits[at]
        expected += seen[at] * relatives[at]
    likelier = got / expected
    found = []
    for at in range(AGES):
        chance = min(likelier * relatives[at], 0.999)
        found.append(min((hits[at] + weight * chance) / (seen[at] + weight), 0.999))
    return found


def best_rate(chance: Row, first: int) -> float:
    """From this age on, hits for each second of space at the horizon at which they are most."""
    left, got, spent, best = 1.0, 0.0, 0.0, 0.0
    for at in range(first, AGES):
        now = left * chance[at]
        got += now
        spent += (left - now / 2) * WIDTHS[at]
        left -= now
        best = max(best, got / spent)
    return best


def step_of(times: int) -> int:
    return bisect_right(STEPS, times) - 1


def new_kind(batch: int) -> int:
    return sum(batch >= least for least in (2, 3, 6, 16, 256))


def age_kind(quarters: int) -> int:
    return next((at for at, end in enumerate(ENDS) if quarters <= end), AGES - 1)


def counters_of(name: int) -> list[int]:
    found = []
    for row in range(ROWS):
        name = mix((name + row + 1) % 2**64)
        found.append(name % COUNTERS)
    return found
