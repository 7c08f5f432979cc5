"""The common parts of the policy models: batches as lists, blocks in queues, chains, and epochs of
time."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from kvtier_daemon.catalog.policy import ID_BYTES, NAME_BYTES, NO_PARENT


def unpack(ids: bytes) -> list[int]:
    """The ids of a batch. Raise ValueError if their bytes are incomplete."""
    if len(ids) % ID_BYTES:
        raise ValueError("ids have 4 bytes each")
    return array("I", ids).tolist()


def pack(ids: Sequence[int]) -> bytes:
    return array("I", ids).tobytes()


def unpack_names(names: bytes, ids: Sequence[int]) -> list[int]:
    """Without names, the name of a block is its id."""
    if len(names) not in (0, len(ids) * NAME_BYTES):
        raise ValueError("need 8 bytes of name per id, or no names")
    return array("Q", names).tolist() if names else list(ids)


def unpack_parents(parents: bytes, ids: Sequence[int]) -> list[int]:
    above = unpack(parents)
    if above and len(above) != len(ids):
        raise ValueError("need one parent per id, or no parents")
    return above or [NO_PARENT] * len(ids)


def mix(name: int) -> int:
    """splitmix64, because clients choose names."""
    name = (name ^ name >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    name = (name ^ name >> 27) * 0x94D049BB133111EB % 2**64
    return name ^ name >> 31


def short_name(name: int) -> int:
    return mix(name) >> 32 | 1


FEW = 1 << 16


def hint_of(importance: float) -> int:
    """1: little, 2: medium, 3: much. 0 is no hint."""
    return 1 if importance < 1 / 3 else 2 if importance < 2 / 3 else 3


# --- blocks in queues ----------------------------------------------------------------------------


@dataclass
class Queued:
    """A block in `Queues`, with its short name."""

    name: int
    queue: int = 0
    times: int = 0
    held: bool = False
    demoted: bool = False


class Ghosts:
    """Unique short names in the order of their insertion, each with its number of uses."""

    def __init__(self) -> None:
        self._times: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._times)

    def add(self, name: int, times: int = 1) -> None:
        self._times[name] = times
        self._times.move_to_end(name)

    def take(self, name: int) -> int | None:
        return self._times.pop(name, None)

    def trim(self, most: int) -> None:
        while len(self._times) > most:
            self._times.popitem(last=False)

    def halve(self) -> None:
        for name in self._times:
            self._times[name] //= 2


def half_of_many(blocks: int) -> int:
    """As many ghosts as blocks; in large tiers half as many, because a ghost costs as much memory."""
    return max(min(blocks, FEW), blocks // 2)


class Queues:
    """Blocks in queues, each an ordered dict, coldest first; the first one contains demoted
    blocks."""

    by_recency = True

    def __init__(self, queues: int) -> None:
        self.blocks: dict[int, Queued] = {}
        self.queues: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(queues)]

    # Implemented by policies: the queue for a new block, and for a used block.

    def met(self, block: Queued) -> int:
        raise NotImplementedError

    def used(self, block: Queued) -> int:
        raise NotImplementedError

    def leaving(self, number: int) -> None:
        """Called before it leaves its queue, if it may be evicted."""

    def has_left(self, block: Queued) -> None:
        """Called after the block left."""

    # The interface of a policy.

    def now(self, seconds: float) -> None:
        """Ignored: only the order matters."""

    def added(self, ids: bytes, names: bytes = b"", parents: bytes = b"") -> None:
        numbers = unpack(ids)
        unpack_parents(parents, numbers)
        for number, name in reversed(list(zip(numbers, unpack_names(names, numbers), strict=True))):
            if number in self.blocks:
                self._move(number, self.used(self.blocks[number]))
                continue
            block = Queued(short_name(name))
            block.queue = self.met(block)
            self.blocks[number] = block
            self.push(number)

    def wanted(self, ids: bytes, names: bytes = b"") -> None:
        for number in reversed(unpack(ids)):
            if number in self.blocks:
                self._move(number, self.used(self.blocks[number]))

    def refreshed(self, ids: bytes) -> None:
        for number in reversed(unpack(ids)):
            if number in self.blocks:
                self._move(number, self.blocks[number].queue)

    def held(self, ids: bytes) -> None:
        for number in unpack(ids):
            if number in self.blocks and not self.blocks[number].held:
                self.take(number)
                self.blocks[number].held = True

    def freed(self, ids: bytes) -> None:
        for number in reversed(unpack(ids)):
            if number in self.blocks and self.blocks[number].held:
                self.blocks[number].held = False
                self.push(number)

    def left(self, ids: bytes) -> None:
        self.gone(ids)

    def gone(self, ids: bytes) -> None:
        for number in unpack(ids):
            if number not in self.blocks:
                continue
            self.leaving(number)
            if not self.blocks[number].held:
                self.take(number)
            self.has_left(self.blocks.pop(number))

    def demoted(self, ids: bytes) -> None:
        for number in reversed(unpack(ids)):
            if number in self.blocks and not self.blocks[number].held:
                self.take(number)
                self.blocks[number].demoted = True
                self.push(number)
                self.queues[0].move_to_end(number, last=False)

    def hinted(self, ids: bytes, importance: float, names: bytes = b"") -> None:
        unpack(ids)  # these policies ignore hints

    def __len__(self) -> int:
        return sum(map(len, self.queues))

    def memory_bytes(self) -> int:
        return 200 * len(self.blocks)

    # Used by policies.

    def push(self, number: int) -> None:
        """Append to the hot end of its queue."""
        block = self.blocks[number]
        self.queues[0 if block.demoted else block.queue][number] = None

    def take(self, number: int) -> None:
        block = self.blocks[number]
        del self.queues[0 if block.demoted else block.queue][number]

    def fold(self) -> None:
        """Append each queue q >= 2 to the hot end of queue q / 2, in this order."""
        for at, queue in enumerate(self.queues[2:], 2):
            self.queues[at // 2].update(queue)
            queue.clear()
        for block in self.blocks.values():
            block.queue = max(block.queue // 2, min(block.queue, 1))

    def _move(self, number: int, to: int) -> None:
        """Move to the hot end, except within the same queue if the queue is ordered by arrival."""
        block = self.blocks[number]
        if block.queue == to and not block.demoted and not self.by_recency:
            return
        if not block.held:
            self.take(number)
        block.queue, block.demoted = to, False
        if not block.held:
            self.push(number)


# --- chains --------------------------------------------------------------------------------------


@dataclass
class Link:
    """A block of `Chains`. `where` is "nowhere" when it is gone; its children are still counted."""

    where: str = "nowhere"  # or: here, held, away
    parent: int = NO_PARENT
    kids: int = 0  # in memory
    listed: int = -1
    demoted: bool = False
    stamp: int = 0  # the tick of its last use
    own: int = 0  # the policy's bits

    @property
    def in_memory(self) -> bool:
        return self.where in ("here", "held")


class Chains:
    """Blocks in chains. Evictable blocks without children are in lists, each an ordered dict,
    coldest first, by the number of the list. List 0 contains demoted blocks."""

    def __init__(self) -> None:
        self.blocks: dict[int, Link] = {}
        self.lists: dict[int, OrderedDict[int, None]] = {}
        self.seconds = 0.0
        self.ticks = 0  # the time stamps of blocks
        self.inside = 0  # blocks in memory

    # Implemented by policies.

    def began(self, blocks: int) -> None:
        """A report about `blocks` blocks of a request begins."""

    def met(self, number: int, name: int, again: bool, batch: int, last: bool) -> None:
        """A block was added, for the first time or `again`; it may be the last of its batch."""

    def used(self, number: int, name: int, last: bool) -> None:
        """A block was used."""

    def continued(self, number: int) -> None:
        """A new block follows it."""

    def list_of(self, number: int) -> int:
        raise NotImplementedError

    def rank(self, number: int) -> int:
        """Lists with higher ranks are evicted later."""
        raise NotImplementedError

    # The interface of a policy.

    def now(self, seconds: float) -> None:
        self.seconds = max(self.seconds, seconds)

    def added(self, ids: bytes, names: bytes = b"", parents: bytes = b"") -> None:
        numbers = unpack(ids)
        called, above = unpack_names(names, numbers), unpack_parents(parents, numbers)
        self.began(len(numbers))
        for at in reversed(range(len(numbers))):
            number, last = numbers[at], at + 1 == len(numbers)
            block = self.blocks.setdefault(number, Link())
            block.stamp, block.demoted = self.ticks, False
            if block.in_memory:
                self.used(number, called[at], last)
            else:
                again = block.where == "away"
                if not again:
                    block.own = 0
                    block.parent = NO_PARENT if above[at] == number else above[at]
                block.where = "here"
                self.inside += 1
                if block.parent != NO_PARENT:
                    parent = self.blocks.setdefault(block.parent, Link())
                    self._unlist(block.parent)
                    parent.kids += 1
                    if parent.in_memory:
                        self.continued(block.parent)
                self.met(number, called[at], again, len(numbers), last)
            self.relist(number)

    def wanted(self, ids: bytes, names: bytes = b"") -> None:
        numbers = unpack(ids)
        called = unpack_names(names, numbers)
        self.began(len(numbers))
        for at in reversed(range(len(numbers))):
            if self._use(numbers[at]):
                self.used(numbers[at], called[at], at + 1 == len(numbers))
                self.relist(numbers[at])

    def refreshed(self, ids: bytes) -> None:
        for number in reversed(unpack(ids)):
            if self._use(number):
                self.relist(number)

    def _use(self, number: int) -> bool:
        block = self.blocks.get(number)
        if block is None or not block.in_memory:
            return False
        block.stamp, block.demoted = self.ticks, False
        return True

    def held(self, ids: bytes) -> None:
        for number in unpack(ids):
            if self._is_here(number):
                self._unlist(number)
                self.blocks[number].where = "held"

    def freed(self, ids: bytes) -> None:
        for number in reversed(unpack(ids)):
            if number in self.blocks and self.blocks[number].where == "held":
                self.blocks[number].where = "here"
                self.relist(number)

    def left(self, ids: bytes) -> None:
        self._leave(ids, "away")

    def gone(self, ids: bytes) -> None:
        self._leave(ids, "nowhere")

    def _leave(self, ids: bytes, to: str) -> None:
        for number in unpack(ids):
            block = self.blocks.get(number)
            if block is None or block.where == "nowhere":
                continue
            was, block.where = block.where, to
            if was == "away":
                continue
            self.inside -= 1
            self._unlist(number)
            if block.parent != NO_PARENT:
                self.blocks[block.parent].kids -= 1
                self._list(block.parent, hot=False)

    def demoted(self, ids: bytes) -> None:
        for number in reversed(unpack(ids)):
            if self._is_here(number):
                was_listed = self.blocks[number].listed >= 0
                self._unlist(number)
                self.blocks[number].demoted = True
                if was_listed:
                    self._list(number, hot=False)

    def hinted(self, ids: bytes, importance: float, names: bytes = b"") -> None:
        unpack(ids)

    def victims(self, n: int) -> bytes:
        """Simulates the evictions: a parent that loses its last child is evicted at the turn of
        its list, or at once if that has passed."""
        named: list[int] = []
        below: dict[int, int] = {}
        waiting: list[tuple[int, int, int]] = []

        def name(number: int) -> None:
            named.append(number)
            above = self.blocks[number].parent
            if above == NO_PARENT or self.blocks[above].listed >= 0:
                return
            below[above] = below.get(above, self.blocks[above].kids) - 1
            if below[above] == 0 and self.blocks[above].where == "here":
                at = self._own_list(above)
                heappush(waiting, (self._turn(at), len(named), above))

        def name_waiting(turn: float) -> None:
            while waiting and waiting[0][0] <= turn:
                name(heappop(waiting)[2])

        turns = sorted((self._turn(at), at) for at, some in self.lists.items() if some)
        if not turns or turns[0][1] != 0:
            turns.insert(0, (0, 0))
        for turn, at in turns:
            name_waiting(turn)
            for number in list(self.lists.get(at, ())):
                name(number)
                name_waiting(turn)
        name_waiting(float("inf"))
        seen = set(named)
        named += [one for one in sorted(self.blocks) if self._is_here(one) and one not in seen]
        return pack(named[:n])

    def __len__(self) -> int:
        return sum(block.where == "here" for block in self.blocks.values())

    def memory_bytes(self) -> int:
        return 300 * len(self.blocks)

    # Used by policies.

    def relist(self, number: int) -> None:
        """Append to the hot end of its list, if it may be evicted."""
        self._unlist(number)
        self._list(number, hot=True)

    def splice(self, older: int, newer: int) -> None:
        """Move the blocks of one list to the cold end of another."""
        if not self.lists.get(older):
            return
        moved = self.lists.pop(older, OrderedDict())
        for number in moved:
            self.blocks[number].listed = newer
        moved.update(self.lists.get(newer, {}))
        self.lists[newer] = moved

    def _is_here(self, number: int) -> bool:
        return number in self.blocks and self.blocks[number].where == "here"

    def _turn(self, at: int) -> int:
        return self.rank(at) if at else 0

    def _own_list(self, number: int) -> int:
        return 0 if self.blocks[number].demoted else self.list_of(number)

    def _list(self, number: int, hot: bool) -> None:
        block = self.blocks[number]
        if block.where == "here" and block.kids == 0:
            block.listed = self._own_list(number)
            some = self.lists.setdefault(block.listed, OrderedDict())
            some[number] = None
            some.move_to_end(number, last=hot)

    def _unlist(self, number: int) -> None:
        block = self.blocks[number]
        if block.listed >= 0:
            del self.lists[block.listed][number]
            block.listed = -1


EPOCHS, NARROW = 128, 5
TOLD_PART, TOLD_LEAST = 64, 16


class Ages(Chains):
    """Chains in lists by kind and age. Time is divided into epochs, which are merged as they grow
    old."""

    def __init__(self, kinds: int) -> None:
        super().__init__()
        self.kinds = kinds
        self._epochs: list[tuple[int, int, int]] = []  # first tick, quarters, slot; oldest first
        self._told = 0  # blocks reported in this tick
        self._spare = list(reversed(range(EPOCHS)))
        self._open()

    def kind_of(self, number: int) -> int:
        raise NotImplementedError

    def rank_of(self, kind: int, age: int, place: int) -> int:
        """Lists with lower ranks are evicted first. Ages are quarters of a second; the oldest
        place is 0."""
        raise NotImplementedError

    @property
    def quarters(self) -> int:
        return int(self.seconds * 4)

    def now(self, seconds: float) -> None:
        """One tick per quarter of a second."""
        before = self.quarters
        super().now(seconds)
        if self.quarters > before:
            self.ticks += self.quarters - before
            self._open()

    def began(self, blocks: int) -> None:
        """Also one tick per reported 64th of the blocks in memory, because the clock may be too
        coarse."""
        self._told += blocks
        if self._told >= max(self.inside // TOLD_PART, TOLD_LEAST):
            self.ticks += 1
            self._open()

    def _open(self) -> None:
        """Merge two adjacent epochs if their common length is small compared with their age."""
        self._told = 0
        kept: list[tuple[int, int, int]] = []
        ends = [start for start, _, _ in self._epochs[1:]] + [self.ticks]
        for at, ((start, quarters, slot), end) in enumerate(zip(self._epochs, ends, strict=False)):
            crowded = at == 1 and not self._spare
            if kept and (crowded or NARROW * (end - kept[-1][0]) <= self.ticks - end):
                older, when, old_slot = kept[-1]
                for kind in range(self.kinds):
                    self.splice(1 + old_slot * self.kinds + kind, 1 + slot * self.kinds + kind)
                self._spare.append(old_slot)
                kept[-1] = (older, when, slot)
            else:
                kept.append((start, quarters, slot))
        self._epochs = [*kept, (self.ticks, self.quarters, self._spare.pop())]

    def list_of(self, number: int) -> int:
        block = self.blocks[number]
        slot = self._epochs[0][2]
        for start, _, at in self._epochs:
            if start <= block.stamp:
                slot = at
        return 1 + slot * self.kinds + self.kind_of(number)

    def rank(self, number: int) -> int:
        slot, kind = divmod(number - 1, self.kinds)
        place = next(place for place, (_, _, at) in enumerate(self._epochs) if at == slot)
        return self.rank_of(kind, self.quarters - self._epochs[place][1], place)
