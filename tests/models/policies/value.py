"""Expected reuse: a block is worth its expected hits per second of its space, at the best horizon.
The policy learns this for blocks with a kind and an age from watched blocks. It also watches blocks
that left memory, so that its own size does not bias it. If use counts or recency would have hit
more, it uses that order instead. Tails are evicted before heads.

N. Beckmann, H. Chen, A. Cidon, "LHD: improving cache hit rate by maximizing hit density", NSDI
2018; the best horizon is J. C. Gittins' index ("Bandit processes and dynamic allocation indices",
1979). Counts of evicted names are kept as in G. Einziger, R. Friedman, B. Manes, "TinyLFU", ACM
Trans. on Storage 13(4), 2017, and between their steps as in R. Morris, "Counting large numbers of
events in small registers", CACM 21(10), 1978. Watched blocks are sampled as in C. Waldspurger et
al., "Efficient MRC construction with SHARDS", FAST 2015; orders are compared in small caches as in
C. Waldspurger et al., "Cache modeling and optimization using miniature simulations", USENIX ATC
2017. `Value` is native, `ValueModel` the same in Python, bit for bit.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from models.policies.model import Ages, hint_of, mix, short_name, unpack, unpack_names
from models.policies.native import Value

__all__ = ["Value", "ValueModel"]

# A kind is the use count of a block (a family, and six parts of it), and whether it was the last
# of its request. While the count is low, its part is the number of blocks of the same batch.
FAMILIES, PARTS, SELDOM = 16, 6, 4
PLAIN = FAMILIES * 2 * PARTS
# Blocks with a hint have kinds of their own, one for each family, hint and last or not. So the policy
# learns what hints are worth; until then, a factor is assumed.
KINDS = PLAIN + 3 * 2 * FAMILIES
WORTH = {1: 1 / 8, 2: 1.0, 3: 8.0}  # little, medium, much
UNSEEN = 1e-6
WANTED, LAST = 255, 256  # own bits
AGES = 36
ENDS = [int((1.4142135623730951 if at % 2 else 1.0) * 2.0 ** (at // 2 + 2)) for at in range(AGES)]
WIDTHS = [(end - start) / 4 for start, end in zip([0, *ENDS], ENDS, strict=False)]

MOST_WATCHED = (1 << 16) // 4 * 3
WATCHED_FOR = 3600 * 4  # in quarters of a second
# A fit runs when the observations have grown by one part in this many.
FIRST_NEWS, MORE_SEEN = 64, 8
MEMORY = 1 << 17  # the decay of observations: counts 1/e after this many blocks, at most
FEW = 20.0  # the number of runs that weigh as much as those of related kinds

COUNTERS, ROWS = 3 << 18, 4
WINDOW = COUNTERS // 4
TOLD_AGAIN = 16  # one of this many requests writes its counts to the sketch again

# Levels of use counts: exact up to 40, then in steps of a twentieth, up to about 2,000; the steps
# to the next level are that much rarer.
LAST_LEVEL = 127
TIMES_MORE: list[int] = []
while len(TIMES_MORE) < LAST_LEVEL:
    TIMES_MORE.append(max(1, sum(TIMES_MORE) // 20))

LEARNED, LEAST_WANTED, OLDEST = range(3)  # orders
MOST_ROOM = 1 << 12  # of a cache
MOST_ENTRIES = 4 * MOST_ROOM
SLACK = 16  # the margin of room, one in this many blocks
JUDGEMENTS = 8  # at most, while the caches are filled once
FEW_BLOCKS, SOME_BATCHES = 64, 4
BATCHES = 64
FADING = 0.98  # per judgement: half of it in four fillings
TO_LEAVE, BACK = 1.0, 0.7  # standard deviations

Row = list[float]


@dataclass
class Entry:
    """A name of the sample, the previous sampled name of its chain, and the caches that contain
    it."""

    before: int = 0
    at: int = 0
    turn: int = 0
    kind: int = 0
    inside: set[int] = field(default_factory=set)


@dataclass
class Batch:
    """Its last name; the last sampled name, and the number of sampled names."""

    last: int = 0
    tail: int = 0
    length: int = 0


class PolicySelector:
    """A small cache for each order, over a sample of names. Lower ranks are evicted first."""

    def __init__(self, rank: Callable[[int, Entry], int]) -> None:
        self.best = LEARNED
        self._rank = rank
        self._entries: dict[int, Entry] = {}
        self._shift = 0  # one in 2^this names is in the sample
        self._turn = self._unjudged = self._unjudged_batches = 0
        self._room = 1
        self._head = self._joined = 0
        self._batch = Batch()
        self._batches = [Batch() for _ in range(BATCHES)]  # the latest ones
        self._batches_at = 0
        self._inside = [0] * 3
        self._hits = [0.0] * 3
        self._of_request = [0] * 3
        self._variance = {(a, b): 0.0 for a in range(3) for b in range(3)}

    def used(self, name: int, quarters: int, kind: int, held: int, first: bool) -> None:
        """A request used a block; the tier has `held` blocks. The last block of a batch is
        reported `first`, and the others follow from there to the head."""
        if first:
            self._end_batch()
            self._batch.last = name
            while held >> self._shift > MOST_ROOM:
                self._thin()
            self._room = max(held >> self._shift, 1)
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
        self._batch.tail = self._batch.tail or name
        self._batch.length += 1
        self._unjudged += 1
        if len(self._entries) == MOST_ENTRIES:
            self._trim_all()

    def joined(self, last: int) -> None:
        """This batch follows an earlier one whose last block has this name."""
        self._joined = last

    def corrected(self, name: int, kind: int) -> None:
        if name in self._entries:
            self._entries[name].kind = kind

    def _samples(self, name: int) -> bool:
        return name >> (32 - self._shift) == 0

    def _thin(self) -> None:
        self._shift += 1
        self._entries = {one: at for one, at in self._entries.items() if self._samples(one)}
        for order in range(3):
            self._inside[order] = sum(order in one.inside for one in self._entries.values())

    def _trim_all(self) -> None:
        """Evict after the whole request: blocks that are used together hit together, even if they
        exceed the room."""
        for order in range(3):
            if self._inside[order] > self._room + self._room // SLACK:
                self._trim(order, self._room - self._room // SLACK)

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
        self._unjudged_batches += 1
        enough = self._unjudged * JUDGEMENTS >= max(self._room, FEW_BLOCKS)
        if enough and self._unjudged_batches >= SOME_BATCHES:
            self._judge()
        if self._joined:
            self._join()
        self._trim_all()
        self._batches[self._batches_at % BATCHES] = self._batch
        self._batches_at += 1
        self._batch, self._head, self._joined = Batch(), 0, 0

    def _join(self) -> None:
        """Blocks above are as recent as those that follow them, and are evicted later."""
        found = next((one for one in self._batches if one.last == self._joined), None)
        if found is None:
            return
        if self._head in self._entries:
            self._entries[self._head].before = found.tail
        name = found.tail
        for _ in range(found.length):
            if name not in self._entries:
                break
            self._entries[name].turn = self._turn
            self._turn += 1
            name = self._entries[name].before
        self._batch.tail = self._batch.tail or found.tail
        self._batch.length += found.length
        found.last = 0

    def _judge(self) -> None:
        """Judge only requests in which two orders differ, and only complete requests."""
        self._unjudged = self._unjudged_batches = 0
        top, most = self.best, 0.0
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
    """A watched block, in any tier."""

    at: int
    kind: int


class ValueModel(Ages):
    def __init__(self) -> None:
        super().__init__(KINDS)
        self._seen: dict[int, Seen] = {}
        self._hints: dict[int, int] = {}
        self._sample = 0xFFFFFFFF  # names up to this are watched
        # The last blocks of requests, the latest first.
        self._lasts: deque[tuple[int, int]] = deque(maxlen=64)
        self._hits = [[0.0] * AGES for _ in range(KINDS)]  # used again at this age
        self._ends = [[0.0] * AGES for _ in range(KINDS)]  # watched no longer
        # Runs: consecutive blocks with the same kind in one request. The number of blocks, and the sum of
        # the squares of the runs' lengths.
        self._blocks, self._squares = [0.0] * KINDS, [0.0] * KINDS
        self._run, self._run_of = 0, (0, 0)  # its kind and request
        self._ranks = [[0] * AGES for _ in range(KINDS)]
        self._news = self._fitted = 0
        self._enough_news = FIRST_NEWS
        self._sketch: dict[int, int] = {}
        self._sketched = 0
        self._requests = 0
        self._selector = PolicySelector(
            lambda order, one: self._worth(order, one.kind, self.quarters - one.at)
        )

    def now(self, seconds: float) -> None:
        super().now(seconds)
        if self._news >= self._enough_news:
            self._refit()

    def rank_of(self, kind: int, age: int, place: int) -> int:
        return 1 + ((self._worth(self._selector.best, kind, age) * 128 + place) * 512 + kind)

    def _worth(self, order: int, kind: int, age: int) -> int:
        """Among equals the oldest is evicted first."""
        if order == LEARNED:
            return self._ranks[kind][age_kind(age)]
        if order != LEAST_WANTED:
            return 0
        family = both_of(kind) // 2
        return family * PARTS + (0 if family < SELDOM or kind >= PLAIN else kind % PARTS)

    # Blocks.

    def hinted(self, ids: bytes, importance: float, names: bytes = b"") -> None:
        is_first, numbers = not self._hints, unpack(ids)
        for number, name in zip(numbers, unpack_names(names, numbers), strict=True):
            if number not in self.blocks or self.blocks[number].where == "nowhere":
                continue
            self._hints[number] = hint_of(importance)
            called, kind = short_name(name), self.kind_of(number)
            if called in self._seen:
                self._seen[called].kind = kind
            self._selector.corrected(called, kind)
            if self.blocks[number].listed > 0:
                self.relist(number)
        if is_first and self._hints and self._news:
            self._refit()  # no kind with a hint has a rank yet

    def kind_of(self, number: int) -> int:
        own, hint = self.blocks[number].own, self._hints.get(number, 0)
        family, part = divmod(own & WANTED, PARTS)
        if family >= SELDOM:
            family, part = divmod(step_of(level_of(own)), PARTS)
            family += SELDOM
        both = family * 2 + bool(own & LAST)
        return PLAIN + (hint - 1) * 2 * FAMILIES + both if hint else both * PARTS + part

    def met(self, number: int, name: int, again: bool, batch: int, last: bool) -> None:
        """A forgotten block has the count that the sketch remembers."""
        if again:
            self.used(number, name, last)
            return
        if number in self._hints:
            self._hints[number] = 0
        self._requests += last
        before = self._known(name)
        level = self._more(before - 1) if before else 0
        self._know(name, level)
        self._become(number, name, level, new_kind(batch), last)

    def used(self, number: int, name: int, last: bool) -> None:
        self._requests += last
        own = self.blocks[number].own
        came_with = (own & WANTED) % PARTS if (own & WANTED) < SELDOM * PARTS else 0
        level = self._more(level_of(own))
        # The sketch answers for evicted blocks. A block that stays at its level is written to it
        # periodically, because counters are halved in between.
        if level != level_of(own) or (mix(self._requests) >> 32) % TOLD_AGAIN == 0:
            self._know(name, level)
        self._become(number, name, level, came_with, last)

    def _become(self, number: int, name: int, level: int, came_with: int, last: bool) -> None:
        wanted = level * PARTS + came_with if level < SELDOM else SELDOM * PARTS + level - SELDOM
        own = wanted | (LAST if last else 0)
        self.blocks[number].own = own
        called, kind = short_name(name), self.kind_of(number)
        if last:
            self._lasts.appendleft((number, called))
        self._watch(called, kind)
        self._selector.used(called, self.quarters, kind, self.inside, last)

    def _more(self, level: int) -> int:
        """A level that stands for several uses rises randomly, with the same random number for a
        whole request."""
        stays = level == LAST_LEVEL or mix(self._requests) % TIMES_MORE[level]
        return level if stays else level + 1

    def continued(self, number: int) -> None:
        """It was not the last of its request: the rest has only arrived now."""
        block = self.blocks[number]
        if not block.own & LAST:
            return
        block.own &= ~LAST
        called = next((called for one, called in self._lasts if one == number), None)
        if called is None:
            return
        self._selector.corrected(called, self.kind_of(number))
        self._selector.joined(called)
        if called in self._seen:
            self._seen[called].kind = self.kind_of(number)

    # Learning.

    def _watch(self, name: int, kind: int) -> None:
        if name > self._sample:
            return
        if len(self._seen) >= MOST_WATCHED:
            self._thin()
        if name > self._sample:
            return
        self._news += 1
        self._run = self._run + 1 if self._run_of == (kind, self._requests) else 1
        self._run_of = (kind, self._requests)
        self._blocks[kind] += 1
        self._squares[kind] += 2 * self._run - 1
        seen = self._seen.get(name)
        if seen is not None:
            self._hits[seen.kind][age_kind(self.quarters - seen.at)] += 1
        self._seen[name] = Seen(self.quarters, kind)

    def _thin(self) -> None:
        """Drop what was watched long enough; if that is little, drop every other name."""
        kept = {}
        for name, seen in self._seen.items():
            if self.quarters - seen.at > WATCHED_FOR:
                self._ends[seen.kind][-1] += 1
            else:
                kept[name] = seen
        if len(kept) > MOST_WATCHED // 4 * 3:
            self._sample //= 2
            self._scale(0.5)  # halve the counts, which come from twice as many names
            kept = {name: seen for name, seen in kept.items() if name <= self._sample}
        self._seen = kept

    def _scale(self, by: float) -> None:
        for row in (*self._hits, *self._ends, self._blocks, self._squares):
            row[:] = [one * by for one in row]

    def _mean_run(self, which: Sequence[int]) -> float:
        """The average length of the runs of these kinds, weighted by blocks."""
        blocks = squares = 0.0
        for kind in which:
            blocks += self._blocks[kind]
            squares += self._squares[kind]
        return squares / blocks if blocks else 1.0

    def _refit(self) -> None:
        self._enough_news = self._news + min(self._news, MEMORY) // MORE_SEEN + FIRST_NEWS
        ends = [row[:] for row in self._ends]
        for seen in self._seen.values():
            ends[seen.kind][age_kind(self.quarters - seen.at)] += 1
        every = range(KINDS)
        families = [
            [kind for kind in every if both_of(kind) == both] for both in range(2 * FAMILIES)
        ]
        pool = chances(total(self._hits, every), total(ends, every), [0.0] * AGES, 1e-6, 1.0)
        if self._hints:  # so that hints count before the first hit
            pool = [max(one, UNSEEN) for one in pool]
        near: list[Row] = []
        chances_of: dict[int, Row] = {}
        for family in families:
            relatives = pool
            # The prior of a family is derived from an earlier family, scaled up: more uses make
            # another one likelier.
            if len(near) > 1:
                more = 1 + 1 / min(len(near) // 2, SELDOM - 1)
                relatives = [min(one * more, 0.999) for one in near[-2]]
            run = self._mean_run(family)
            near.append(
                chances(total(self._hits, family), total(ends, family), relatives, FEW, run)
            )
            for kind in family:
                relatives = near[-1]
                if kind >= PLAIN:
                    if not self._hints:
                        continue
                    factor = WORTH[1 + (kind - PLAIN) // (2 * FAMILIES)]
                    relatives = [min(one * factor, 0.999) for one in relatives]
                run = self._mean_run([kind])
                chances_of[kind] = chances(self._hits[kind], ends[kind], relatives, FEW, run)
        worth = best_rates(chances_of)
        every_worth = sorted({one for row in worth.values() for one in row})
        order = {one: at for at, one in enumerate(every_worth)}
        for kind, row in worth.items():
            self._ranks[kind] = [order[one] for one in row]
        # The first observations, when all blocks were new, become outdated quickly.
        self._scale(max(0.0, 1 - (self._news - self._fitted) / min(MEMORY, self._news)))
        self._fitted = self._news

    # The use counts of evicted blocks.

    def _known(self, name: int) -> int:
        """The level plus one, or 0."""
        return min(self._sketch.get(at, 0) for at in counters_of(name))

    def _know(self, name: int, level: int) -> None:
        """Halve all counts when many names were new."""
        fresh = False
        for at in counters_of(name):
            was = self._sketch.get(at, 0)
            fresh |= was == 0
            self._sketch[at] = max(was, level + 1)
        self._sketched += fresh
        if self._sketched >= WINDOW:
            self._sketched = 0
            self._sketch = {at: was // 2 for at, was in self._sketch.items()}


def both_of(kind: int) -> int:
    """Twice the family, plus one if the block was the last of its request."""
    return kind // PARTS if kind < PLAIN else (kind - PLAIN) % (2 * FAMILIES)


def total(table: list[Row], which: Sequence[int]) -> Row:
    found = [0.0] * AGES
    for kind in which:
        for at in range(AGES):
            found[at] += table[kind][at]
    return found


def chances(hits: Row, ends: Row, relatives: Row, few: float, run: float) -> Row:
    """At each age, the probability that a block of this age is used again before the next age.
    With few observations this is a factor on the values of related kinds; many observations
    determine it per age. The blocks of a run hit together: they count as one observation."""
    seen = [0.0] * AGES
    weight = few * run
    risk, got, expected = 0.0, run, run
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


def best_rates(chances_of: dict[int, Row]) -> dict[int, Row]:
    """For each kind, from each age on: the hits per second of space at the best horizon. All kinds and first
    ages at once: one at a time takes half of the time of all tests of this model."""
    chance = np.array([*chances_of.values()])
    left = np.ones((len(chance), AGES))
    got, spent, best = (np.zeros_like(left) for _ in range(3))
    for at in range(AGES):
        begun = np.s_[:, : at + 1]  # those whose first age was reached
        now = left[begun] * chance[:, at, None]
        got[begun] += now
        spent[begun] += (left[begun] - now / 2) * WIDTHS[at]
        left[begun] -= now
        best[begun] = np.maximum(best[begun], got[begun] / spent[begun])
    return dict(zip(chances_of, best.tolist(), strict=True))


def level_of(own: int) -> int:
    wanted = own & WANTED
    return wanted // PARTS if wanted < SELDOM * PARTS else wanted - SELDOM * PARTS + SELDOM


def step_of(level: int) -> int:
    """For blocks that are used often: two levels in one from 24 on."""
    return level - 4 if level < 24 else 20 + (level - 24) // 2


def new_kind(batch: int) -> int:
    return sum(batch >= least for least in (2, 3, 6, 16, 256))


def age_kind(quarters: int) -> int:
    return min(bisect_left(ENDS, quarters), AGES - 1)


def counters_of(name: int) -> list[int]:
    found = []
    for row in range(ROWS):
        name = mix((name + row + 1) % 2**64)
        found.append(name % COUNTERS)
    return found
