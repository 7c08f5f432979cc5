"""Expected reuse: a block is worth the hits to be expected for each second of its space, at the horizon at
which that is most. It is learned as it goes, for blocks of a kind and an age, from watched blocks; those that
left memory are watched too, so that it isn't fooled by its own size. Tails go before heads.

N. Beckmann, H. Chen, A. Cidon, "LHD: improving cache hit rate by maximizing hit density", NSDI 2018; the best
horizon is J. C. Gittins' index ("Bandit processes and dynamic allocation indices", 1979). Counts of what is
gone are kept as in G. Einziger, R. Friedman, B. Manes, "TinyLFU", ACM Trans. on Storage 13(4), 2017, and the
watched are thinned as in C. Waldspurger et al., "Efficient MRC construction with SHARDS", FAST 2015.
`Value` is native, `ValueModel` the same in Python, to the last bit.
"""

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass

from kvtier.policy.model import Ages
from kvtier_kernels import Value

__all__ = ["Value", "ValueModel"]

# A kind is how often a block was wanted, whether it was the last of its request, how many came with it.
NEW_KINDS = 5
KINDS = 8 * 2 * NEW_KINDS
MOST_HITS, LAST, NEW_SHIFT = 127, 128, 8  # own bits
AGES = 36
ENDS = [int((1.4142135623730951 if at % 2 else 1.0) * 2.0 ** (at // 2 + 2)) for at in range(AGES)]
WIDTHS = [(end - start) / 4 for start, end in zip([0, *ENDS], ENDS, strict=False)]

MOST_WATCHED = (1 << 16) // 4 * 3
WATCHED_FOR = 3600 * 4  # in quarters of a second
REFIT = 60 * 4
DECAY = 0.99  # a refit
FEW, FEW_OF_NEW = 2.0, 50.0  # blocks that weigh as much as their relatives

COUNTERS, ROWS = 1 << 20, 4
STEPS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64, 96, 127)  # of a counter of 4 bits
WINDOW = COUNTERS // 4

Row = list[float]


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
        self._fitted = 0
        self._sketch: dict[int, int] = {}
        self._sketched = 0

    def now(self, seconds: float) -> None:
        super().now(seconds)
        if self.quarters - self._fitted >= REFIT:
            self._refit()

    def rank_of(self, kind: int, age: int, place: int) -> int:
        return 1 + ((self._ranks[kind][age_kind(age)] * 128 + place) * 128 + kind)

    # Blocks.

    def kind_of(self, own: int) -> int:
        return (hit_kind(own & MOST_HITS) * 2 + bool(own & LAST)) * NEW_KINDS + (own >> NEW_SHIFT)

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
        self._know(name, (own & MOST_HITS) + 1)
        self._watch(short_name(name), self.kind_of(own))

    def continued(self, number: int) -> None:
        """It was not the last of its request: the rest is only there now."""
        block = self.blocks[number]
        if not block.own & LAST:
            return
        block.own &= ~LAST
        called = next((called for one, called in self._lasts if one == number), None)
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
        self._fitted = self.quarters
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
        self._scale(DECAY)

    # How often those were wanted that are gone.

    def _times_known(self, name: int) -> int:
        return STEPS[min(self._sketch.get(at, 0) for at in counters_of(name))]

    def _know(self, name: int, times: int) -> None:
        """All are halved when many were new."""
        fresh = False
        step = bisect_right(STEPS, times) - 1
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
    """At each age, how likely those that got so old are wanted again before the next."""
    found = [0.0] * AGES
    risk = 0.0
    for at in reversed(range(AGES)):
        risk += hits[at] + ends[at]
        seen = max(risk - ends[at] / 2, 0.0)
        found[at] = min((hits[at] + weight * relatives[at]) / (seen + weight), 0.999)
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


def hit_kind(hits: int) -> int:
    return hits.bit_length()


def new_kind(batch: int) -> int:
    return sum(batch >= least for least in (2, 3, 6, 16))


def age_kind(quarters: int) -> int:
    return next((at for at, end in enumerate(ENDS) if quarters <= end), AGES - 1)


def mix(name: int) -> int:
    name = (name ^ name >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    name = (name ^ name >> 27) * 0x94D049BB133111EB % 2**64
    return name ^ name >> 31


def short_name(name: int) -> int:
    return mix(name) >> 32 | 1


def counters_of(name: int) -> list[int]:
    found = []
    for row in range(ROWS):
        name = mix((name + row + 1) % 2**64)
        found.append(name % COUNTERS)
    return found
