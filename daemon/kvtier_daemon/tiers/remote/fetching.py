"""Reads objects into memory for requests, in the planner's order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple, cast

from kvtier.errors import FrameError, Refused
from kvtier.frame import Identity
from kvtier.key import KEY_BYTES
from kvtier.wire import GRANTED, PRESENT
from kvtier_daemon.catalog import KnownSpace
from kvtier_daemon.catalog.arrivals import Arriving
from kvtier_daemon.catalog.holds import Request
from kvtier_daemon.codec.encryption import FrameCipher, UnknownKeyError
from kvtier_daemon.planning import PATIENCE_S, WHY, DiskLink, Planner
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.base import Outlook
from kvtier_daemon.tiers.cold.read_queue import Name, PendingRequests
from kvtier_daemon.tiers.remote.driver import StoreDriver, StoreProcess
from kvtier_daemon.tiers.remote.known import KnownObjects, each_of, names_of
from kvtier_daemon.tiers.remote.messages import (
    ABSENT,
    BROKEN,
    DONE,
    LOST,
    TOO_LARGE,
    Answer,
    GetObject,
)
from kvtier_daemon.tiers.remote.objects import decode, object_name
from kvtier_daemon.tiers.remote.places import Place, Places, restorable
from kvtier_daemon.tiers.remote.probing import OBJECTS, StoreProbes
from kvtier_daemon.tiers.remote.questions import Questions
from kvtier_daemon.tiers.remote.resharding import Exchange, Sibling
from kvtier_kernels import Mapping, Store

log = logging.getLogger(__name__)

GUESS_BYTES_S = 1e8  # of a store, before the first read
LATENCY_SHARE = 0.2  # weight of the last read in the average
LOOK_BLOCKS = 1024  # of a prefix that are looked up at once
LIMIT_PARTS = 512  # one request takes slots for at most as many parts of blocks: some milliseconds
LIMIT_BYTES = 256 << 20  # in flight, of a tenant
PORTION = 64  # parts that are submitted or ended at once: a millisecond or two of the loop
LONGEST_S = 60.0  # until the first byte
LOG_S = 10.0  # between messages about damaged objects
SPOILT, UNKNOWN_KEY, CANCELLED, NOT_READ = "spoilt", "unknown_key", "cancelled", "not_read"


@dataclass(slots=True, eq=False)
class ArrivingPart:
    """An object that is read: its place, and of which block it is. `decode` writes to slots, in a thread.
    `ended` gets whether that was good and what it returned, and returns the blocks whose objects have all
    been read, with the digests of those that are good. `into`: the space, if it is not that of the object."""

    fetcher: Fetcher
    name: bytes
    place: Place
    of: Identity
    decode: Callable[[FrameCipher | None, memoryview], bytes]
    ended: Callable[[bool, bytes], Iterable[tuple[Arriving, bytes]]]
    into: bytes = b""
    is_forgotten: bool = False

    @property
    def id(self) -> Name:
        return self.fetcher.id_of(self.name, self.into)


SourceObjects = tuple[Place, bytes, bytes]  # of a sibling: their place, keys and names


class WantedParts(NamedTuple):
    """The parts of blocks at one place that a prefix needs, from the block `begin` on. The objects have the
    keys `sources`, which are under another accepted secret where the store has only that, and `names`.
    `made_of`: the objects of a sibling that can be used instead."""

    place: Place
    begin: int
    parent: bytes
    keys: bytes
    sources: bytes
    names: bytes
    made_of: Sequence[SourceObjects]


def objects_there(
    known: KnownObjects, space: KnownSpace, wanted: Sequence[WantedParts], sibling: Sibling | None
) -> Iterator[tuple[Place, str]]:
    """Return the places and names of those of these objects that are in the store."""
    for one in wanted:
        sources = [(one.place, space, one.sources, one.names)]
        if sibling is not None:
            sources += [(place, sibling.space, keys, names) for place, keys, names in one.made_of]
        for place, of, keys, names in sources:
            for at, name in enumerate(each_of(names)):
                if known.present(name):
                    yield place, object_name(place.identity(of, at_of(keys, at)))


def at_of(packed: bytes, at: int) -> bytes:
    """The key or name at this position."""
    return packed[at * KEY_BYTES : (at + 1) * KEY_BYTES]


def ended_alone(block: Arriving, is_good: bool, digest: bytes) -> list[tuple[Arriving, bytes]]:
    return [(block, digest if is_good else b"")]


def within(store: Store, space: KnownSpace, places: Sequence[Place], keys: bytes, room: int) -> int:
    """How many of these blocks this room suffices for. Those whose parts of full attention all have slots
    need none: they are being read or written, or are in memory."""
    full = [one for one in places if space.index >= 0 and one.kind.kind == "full"]
    codes = list[bytes]()
    with contextlib.suppress(ValueError):  # a key is given twice
        codes = [store.probe(space.index, one.group, one.shard, keys) for one in full]
    for at, each in enumerate(zip(*codes, strict=True)):
        room -= not all(each)
        if room < 0:
            return at
    return len(keys) // KEY_BYTES if codes else room


class FetchQueue:
    """The reads of all tenants."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, driver: StoreDriver, known: KnownObjects,
        threads: ThreadPoolExecutor, clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self.driver = driver
        self.known = known
        self.clock = clock
        self.planner = Planner(clock)
        self.link = DiskLink(clock, GUESS_BYTES_S, is_remote=True)
        self.probes = StoreProbes(driver, self.link, self.pump, clock)
        self.pending = PendingRequests(loop, self.planner, self._cancelled)
        self.parts: dict[Name, ArrivingPart] = {}
        self.names: dict[tuple[str, bytes], set[bytes]] = {}  # of these, by tenant and `into`
        self.sizes: Counter[int] = Counter()  # of the largest objects of these parts
        self.latency_s = 0.0  # until the first byte of an object arrives, on average
        self._loop = loop
        self._threads = threads
        self._is_pumping = False
        self._logged_at = float("-inf")

    def cost(self, nbytes: int) -> dict[DiskLink, int]:
        """What a request for this many bytes costs: also the latency."""
        return {self.link: nbytes + int(self.latency_s * self.link.bytes_s)} if nbytes else {}

    def pump(self) -> None:
        """Submit reads, or cancel them if the store is off, in the next iteration of the loop."""
        if not self._is_pumping:
            self._is_pumping = True
            self._loop.call_soon(self._submit)

    def _submit(self) -> None:
        """Submit a portion of the reads, or end one if the store is off."""
        self._is_pumping = False
        child = self.driver.child
        if child is None or not self.driver.is_on:
            names = self.planner.order.take(self.link, PORTION)
            for name in names:
                self._end(self.parts[cast(Name, name)], NOT_READ)
            return
        for _ in range(PORTION):
            room = max(self.sizes, default=0)
            if not room or (at := child.reads.take(room)) is None:
                return
            names = self.planner.order.take(self.link, 1)
            if not names:
                child.reads.give(at, room)
                return
            part = self.parts[cast(Name, names[0])]
            request = GetObject(self.driver.next_id(), object_name(part.of), at, room)
            self.driver.ask(request, partial(self._answered, child, part, at, room))
        self.pump()

    def add(self, part: ArrivingPart) -> Name:
        """Expect this part; return the planner's name of it."""
        self.parts[part.id] = part
        self.names.setdefault((part.fetcher.tenant, part.into), set()).add(part.name)
        self.sizes[part.place.headers.most_bytes] += 1
        return part.id

    def _pop(self, name: Name) -> ArrivingPart:
        part = self.parts.pop(name)
        of = part.fetcher.tenant, part.into
        self.names[of].discard(part.name)
        if not self.names[of]:
            del self.names[of]
        size = part.place.headers.most_bytes
        self.sizes[size] -= 1
        if not self.sizes[size]:
            del self.sizes[size]
        return part

    def _answered(
        self, child: StoreProcess, part: ArrivingPart, at: int, room: int, answer: Answer
    ) -> None:
        def give() -> None:
            child.reads.give(at, room)

        is_sound = 0 <= answer.nbytes <= room  # the process of the store may be damaged
        if answer.outcome != DONE or not is_sound:
            give()
            outcomes = {ABSENT: ABSENT, TOO_LARGE: SPOILT}
            if answer.outcome == BROKEN:  # its connection, or the object if that repeats itself
                outcomes[BROKEN] = SPOILT if self.known.doubt(part.name) else NOT_READ
            if answer.outcome == LOST:  # it may return: ask again later
                self.known.note(part.name, False)
            self._end(part, outcomes.get(answer.outcome, NOT_READ))
            return
        self.known.trust(part.name)
        first_s = min(max(0.0, answer.first_s), LONGEST_S)  # it may be NaN
        self.latency_s += LATENCY_SHARE * (first_s - self.latency_s)
        text = memoryview(child.buffer)[at : at + answer.nbytes]
        cipher = self.driver.keys.of(part.fetcher.tenant)
        work = self._loop.run_in_executor(self._threads, part.decode, cipher, text)
        work.add_done_callback(partial(self._decoded, part, give, answer.nbytes))

    def _decoded(
        self, part: ArrivingPart, give: Callable[[], None], nbytes: int, work: asyncio.Future[bytes]
    ) -> None:
        give()
        error = work.exception()
        if error is None:
            self._end(part, DONE, work.result(), nbytes)
            return
        if not isinstance(error, FrameError):
            self._loop.call_exception_handler({"message": "decoding", "exception": error})
            self._end(part, NOT_READ)
            return
        if self.clock() >= self._logged_at + LOG_S:
            self._logged_at = self.clock()
            log.warning("remote: %s cannot be used: %s; it is a miss", object_name(part.of), error)
        self._end(part, UNKNOWN_KEY if isinstance(error, UnknownKeyError) else SPOILT)

    def _end(self, part: ArrivingPart, outcome: str, digest: bytes = b"", nbytes: int = 0) -> None:
        self._pop(part.id)
        waited = cast(list[Request], self.planner.ended(part.id, outcome == DONE))
        if outcome in (ABSENT, SPOILT, UNKNOWN_KEY):  # the next share of its block replaces it
            self.known.note(part.name, False)
        try:
            part.fetcher.ended(part, outcome, digest, nbytes, waited)
        finally:
            self.pending.notify()
            self.pump()

    def _cancelled(self, names: list[Name]) -> None:
        for name in names:
            part = self._pop(name)
            part.fetcher.ended(part, CANCELLED, b"", 0, ())


class Fetcher:
    """The reads of one tenant. `memory` has its extents, in their order."""

    def __init__(
        self, tenant: Tenant, queue: FetchQueue, places: Places, questions: Questions,
        memory: Sequence[Mapping],
    ) -> None:  # fmt: skip
        self.tenant = tenant.name
        self.counts: Counter[str] = Counter(
            read=0, absent=0, spoilt=0, unknown_key=0, not_read=0, cancelled=0, resharded=0
        )
        self.bytes_read = 0
        self.verdicts: Counter[str] = Counter(dict.fromkeys(WHY, 0))
        self._tenant = tenant
        self._queue = queue
        self._places = places
        self._questions = questions
        self._memory = memory
        self._reading_bytes = 0
        # Gets the ids of blocks that the store had under another secret only.
        self.renamed: Callable[[bytes], None] = lambda ids: None
        # The siblings of a space whose objects can be used. It gets the keys that a lookup missed.
        self.siblings: Callable[[KnownSpace, bytes], Sequence[Sibling]] = lambda space, keys: ()

    def id_of(self, name: bytes, into: bytes = b"") -> Name:
        """The planner's name of a part; `into` is the space, if it is not that of the object."""
        return self._tenant.name, int.from_bytes(names_of(name, into) if into else name, "little")

    def _slot(self, block: Arriving, place: Place) -> memoryview:
        return memoryview(self._memory[block.extent])[
            block.offset : block.offset + place.block_bytes
        ]

    def _is_reading(self, name: bytes, into: bytes = b"") -> bool:
        return name in self._queue.names.get((self.tenant, into), ())

    # --- what is there -------------------------------------------------------------------------

    def beyond(
        self, space: KnownSpace, keys: bytes, first: int, others: Sequence[bytes] = (), asks: bool = True
    ) -> int:  # fmt: skip
        """Return how many blocks of this prefix from `first` on are known to be in the store, or are being
        read from it. Asks in the background about those of which nothing is known."""
        rest, *more = (
            chain[first * KEY_BYTES : (first + LOOK_BLOCKS) * KEY_BYTES]
            for chain in (keys, *others)
        )
        if not (rest and self._queue.driver.is_on):
            return 0
        places = self._places.of(space)
        if not places:
            return 0
        siblings = self._siblings(space, rest if asks else b"")
        if places[0].kind.kind == "full":  # fast path for blocks that no host has
            chains, into = [chain for chain in (rest, *more) if chain], space.identity
            has_first = [self._has_first(space, places[0], chain, asks) for chain in chains]
            siblings = [  # a sum: each chain is asked about
                one for one in siblings
                if sum(
                    self._has_first(one.space, self._made_of(one, places[0])[0], chain, asks, into)
                    for chain in chains
                )
            ]  # fmt: skip
            if not (any(has_first) or siblings):
                return 0
        count, _ = self._found(space, places, keys, others, first, LOOK_BLOCKS, siblings)
        for chain in (rest, *more) if asks else ():
            if left := chain[count * KEY_BYTES :]:
                self._has_first(space, places[0], left, True)
                for one in siblings:
                    self._has_first(one.space, self._made_of(one, places[0])[0], left, True)
        return count

    def _siblings(self, space: KnownSpace, missed: bytes = b"") -> Sequence[Sibling]:
        siblings = self.siblings(space, missed)
        return [one for one in siblings if self._places.of(one.space)] if siblings else ()

    def _made_of(self, sibling: Sibling, place: Place) -> list[Place]:
        """The places of a sibling of whose objects the blocks of this place are made."""
        theirs, space = self._places.of(sibling.space), sibling.space
        shards = sibling.sources(place.group, place.shard)
        return [theirs[space.place_of(place.group, shard)] for shard in shards]

    def _has_first(
        self, space: KnownSpace, place: Place, keys: bytes, asks: bool, into: bytes = b""
    ) -> bool:
        """Whether the first of these blocks exists or is being read. Asks about them if that is unknown."""
        head = names_of(keys[:KEY_BYTES], place.mask)
        is_present = self._queue.known.is_present(head)
        if is_present is None and asks and not self._is_reading(head, into):
            self._questions.ask(space, keys)
        return is_present or self._is_reading(head, into)

    def _found(
        self, space: KnownSpace, places: list[Place], keys: bytes, others: Sequence[bytes], first: int,
        most: int, siblings: Sequence[Sibling],
    ) -> tuple[int, Sibling | None]:  # fmt: skip
        """Return how many blocks of this chain from `first` on, at most `most`, can be restored, and the
        sibling whose objects are needed for that, if any is."""
        keys, *others = (
            chain[first * KEY_BYTES : (first + most) * KEY_BYTES] for chain in (keys, *others)
        )
        stops = space.places == 1 and places[0].kind.kind == "full" and not siblings
        has = [self._has(space, place, keys, others, stops) for place in places]
        count, chosen = restorable(space, places, has, first), None
        for one in siblings:
            if count * KEY_BYTES == len(keys):
                break
            both = self._or_made(space, one, places, has, keys, others, count)
            if (more := restorable(space, places, both, first)) > count:
                count, chosen = more, one
        return count, chosen

    def _or_made(
        self, space: KnownSpace, sibling: Sibling, places: Sequence[Place], has: Sequence[bytes],
        keys: bytes, others: Sequence[bytes], count: int,
    ) -> list[bytes]:  # fmt: skip
        """Return `has`, and a 1 for each block of which the store has all objects of this sibling: at most
        until the first gap. The first `count` blocks can be restored without it. Each object is looked up
        once, although several places are made of it."""
        both, seen, end = list(has), dict[bytes, bytes](), len(has[0])
        for at in sorted(range(len(places)), key=lambda at: places[at].kind.kind != "full"):
            is_full = places[at].kind.kind == "full"
            begin = count if is_full else 0
            some, *more = (chain[begin * KEY_BYTES : end * KEY_BYTES] for chain in (keys, *others))
            made = -1
            for source in self._made_of(sibling, places[at]):
                if source.mask not in seen:
                    found = self._flags(
                        source, self._sources(source, some, more), into=space.identity
                    )
                    seen[source.mask] = bytes(begin) + found
                made &= int.from_bytes(seen[source.mask][:end], "little")
            mine = int.from_bytes(both[at][:end], "little")
            both[at] = (made | mine).to_bytes(end, "little")
            if is_full and (gap := both[at].find(0)) >= 0:
                end = gap
                if end <= count:
                    break
        return [flags[:end] for flags in both]

    def _sources(self, place: Place, keys: bytes, others: Sequence[bytes]) -> bytes:
        """The keys under which the store has this part of these blocks: those of another accepted secret for
        blocks that it does not have under these."""
        for other in others:
            own = self._flags(place, keys[: len(other)])
            if 0 in own:
                there = self._flags(place, other)
                keys = (
                    b"".join(
                        (other if there[at] and not own[at] else keys)[
                            at * KEY_BYTES : (at + 1) * KEY_BYTES
                        ]
                        for at in range(len(own))
                    )
                    + keys[len(other) :]
                )
        return keys

    def _flags(
        self, place: Place, keys: bytes, stops: bool = False, into: bytes = b""
    ) -> bytearray:
        """Return a byte for each block: whether this part of it exists in the store, or is being read. With
        `stops`, what comes after the first that does not is not looked up."""
        names = names_of(keys, place.mask)
        flags = bytearray(self._queue.known.which(names))
        reading = self._queue.names.get((self.tenant, into))
        at = flags.find(0) if reading else -1
        while reading and at >= 0:
            flags[at] = at_of(names, at) in reading
            if stops and not flags[at]:
                break
            at = flags.find(0, at + 1)
        return flags

    def _has(
        self, space: KnownSpace, place: Place, keys: bytes, others: Sequence[bytes], stops: bool
    ) -> bytes:
        """Return a byte for each block: whether this part exists in the store or in memory, or is read."""
        flags = self._flags(place, self._sources(place, keys, others), stops)
        if space.index >= 0 and space.places > 1:
            store = self._tenant.catalog.blocks.store
            with contextlib.suppress(ValueError):  # a key is given twice
                for at, code in enumerate(store.probe(space.index, place.group, place.shard, keys)):
                    flags[at] |= code == PRESENT
        return bytes(flags)

    # --- reads ---------------------------------------------------------------------------------

    def fetch(
        self, space: KnownSpace, keys: bytes, first: int, count: int, *, request: Request | None = None,
        urgent: bool = True, within_s: float = PATIENCE_S, recompute_s: float = float("inf"),
        others: Sequence[bytes] = (),
    ) -> Outlook:  # fmt: skip
        """Start to read `count` blocks from `first` on, if the planner expects that to be faster than
        computing. Return how many of them to expect, in how many milliseconds, and the reason."""
        queue, places = self._queue, self._places.of(space)
        if request is None:
            request = (0, (self._tenant.name, space.number, keys))
        room = max(0, LIMIT_BYTES - self._reading_bytes) // sum(space.block_bytes)
        few = min(count, max(1, LIMIT_PARTS // space.places))
        if room < few:
            some = keys[first * KEY_BYTES : (first + few) * KEY_BYTES]
            few = within(self._tenant.catalog.blocks.store, space, places, some, room)
        siblings, sibling = self._siblings(space), None
        if few and (
            siblings or (few < count and any(place.kind.kind != "full" for place in places))
        ):
            few, sibling = self._found(space, places, keys, others, first, few, siblings)
            most = max(1, LIMIT_PARTS // sibling.space.places) if sibling is not None else few
            if few > most:  # the sibling has more objects than the blocks have parts
                siblings = [one for one in siblings if one is sibling]
                few, sibling = self._found(space, places, keys, others, first, most, siblings)
        if not (count := few):
            return 0, 0.0, "too_many"
        wanted = [
            self._wanted(space, place, keys, first, count, others, sibling) for place in places
        ]
        fresh, joined, made_of = 0, list[Name](), dict[Name, int]()
        for one in wanted:
            for at, name in enumerate(each_of(one.names)):
                if self._is_reading(name):
                    joined.append(self.id_of(name))
                elif queue.known.present(name):
                    fresh += one.place.block_bytes
                else:
                    for source, _, names in one.made_of:
                        made_of[self.id_of(at_of(names, at), space.identity)] = source.block_bytes
        joined += [id_ for id_ in made_of if id_ in queue.parts]
        fresh += sum(nbytes for id_, nbytes in made_of.items() if id_ not in queue.parts)
        if not queue.pending.has_room(request):
            return 0, 0.0, "too_many"
        verdict = queue.planner.weigh(
            request, queue.cost(fresh), joined, urgent=urgent, within_s=within_s,
            recompute_s=recompute_s,
        )  # fmt: skip
        if verdict.first:
            self.verdicts[verdict.why] += 1
            if verdict.load:
                queue.pending.add(request)
            elif verdict.why in ("unreliable", "slower", "crowded"):
                there = list(islice(objects_there(queue.known, space, wanted, sibling), OBJECTS))
                room = max((place.headers.most_bytes for place, _ in there), default=0)
                queue.probes.begin([name for _, name in there], room)
        if verdict.load:
            coming = self._start(request, space, first, count, wanted, joined, sibling)
        else:
            coming = count if not verdict.first and queue.planner.eta_s(request) else 0
        if not coming:
            return 0, 0.0, verdict.why if not verdict.load else "not_read"
        return coming, max(queue.planner.eta_s(request), verdict.load_s) * 1000, verdict.why

    def _wanted(
        self, space: KnownSpace, place: Place, keys: bytes, first: int, count: int,
        others: Sequence[bytes], sibling: Sibling | None,
    ) -> WantedParts:  # fmt: skip
        need = place.needed(space, first + count)
        begin, end = max(first, need.start), need.stop * KEY_BYTES
        some, *more = (chain[begin * KEY_BYTES : end] for chain in (keys, *others))
        parent = keys[(begin - 1) * KEY_BYTES : begin * KEY_BYTES] if begin else b""
        sources = self._sources(place, some, more)
        made_of = []
        for source in self._made_of(sibling, place) if sibling is not None else ():
            theirs = self._sources(source, some, more)
            made_of.append((source, theirs, names_of(theirs, source.mask)))
        names = names_of(sources, place.mask)
        return WantedParts(place, begin, parent, some, sources, names, made_of)

    def _start(
        self, request: Request, space: KnownSpace, first: int, count: int,
        wanted: Sequence[WantedParts], joined: Sequence[Name], sibling: Sibling | None,
    ) -> int:  # fmt: skip
        """Take slots and queue the reads; return how many of the leading blocks will be there."""
        queue, coming, arrivals = self._queue, count, self._tenant.catalog.arrivals
        new: list[tuple[Hashable, DiskLink, int]] = []
        made: dict[tuple[int, int, int], list[tuple[WantedParts, Arriving]]] = {}
        for one in wanted:
            place = one.place
            try:
                taken, outcomes = arrivals.reserve(
                    space, place.group, place.shard, one.parent, one.keys
                )
            except Refused:  # a limit of leases or spaces, or a key is given twice
                coming = 0
                break
            left = iter(taken)
            for at, code in enumerate(outcomes):
                name = at_of(one.names, at)
                if code == GRANTED:
                    block = next(left)
                    if one.made_of and not queue.known.present(name):
                        key = place.group, one.made_of[0][0].shard, one.begin + at
                        made.setdefault(key, []).append((one, block))
                        continue
                    if not self._is_reading(name):
                        of = place.identity(space, at_of(one.sources, at))
                        put = partial(decode, of, space.spec.dtype, into=self._slot(block, place))
                        ended = partial(ended_alone, block)
                        new.append(self._expect(ArrivingPart(self, name, place, of, put, ended)))
                        continue
                    arrivals.failed(block)  # the object is read for another block
                elif code == PRESENT or any(
                    self._is_reading(at_of(names, at), into)
                    for names, into in (
                        (one.names, b""), *((names, space.identity) for _, _, names in one.made_of),
                    )
                ):  # fmt: skip
                    continue
                coming = min(coming, one.begin + at - first)
        for (group, _, number), parts in made.items():
            assert sibling is not None
            if objects := self._made(sibling, group, number, parts):
                new += map(self._expect, objects)
            else:
                coming = min(coming, number - first)
        queue.planner.add(request, new, joined)
        queue.pump()
        return max(0, coming)

    def _expect(self, part: ArrivingPart) -> tuple[Hashable, DiskLink, int]:
        nbytes = part.place.block_bytes
        self._reading_bytes += nbytes
        return self._queue.add(part), self._queue.link, nbytes

    def _made(
        self, sibling: Sibling, group: int, number: int, parts: Sequence[tuple[WantedParts, Arriving]]
    ) -> list[ArrivingPart]:  # fmt: skip
        """The reads of the objects of which these parts of a block are made; none if one is already read."""
        into, objects = sibling.target.identity, list[ArrivingPart]()
        slots = [(block, one.place.shard, self._slot(block, one.place)) for one, block in parts]
        wanted, at = parts[0][0], number - parts[0][0].begin
        exchange = Exchange(sibling, group, slots, len(wanted.made_of))
        for place, keys, names in wanted.made_of:
            name, of = at_of(names, at), place.identity(sibling.space, at_of(keys, at))
            if self._is_reading(name, into):
                for _, block in parts:
                    self._tenant.catalog.arrivals.failed(block)
                return []
            decode = partial(exchange.decode, of, place.block_bytes)
            objects.append(ArrivingPart(self, name, place, of, decode, exchange.ended, into))
        return objects

    def forget(self, names: bytes, into: bytes = b"") -> None:
        """These objects were forgotten: what is read of them, into this space, is dropped."""
        if self._queue.parts:
            for name in each_of(names):
                part = self._queue.parts.get(self.id_of(name, into))
                if part is not None:
                    part.is_forgotten = True

    def ended(
        self,
        part: ArrivingPart,
        outcome: str,
        digest: bytes,
        nbytes: int,
        waited: Sequence[Request],
    ) -> None:
        """The read of this part has ended."""
        catalog = self._tenant.catalog
        self._reading_bytes -= part.place.block_bytes
        self.bytes_read += nbytes
        if outcome != DONE:
            self.counts[outcome] += 1
        is_good = outcome == DONE and not part.is_forgotten
        for block, each in part.ended(is_good, digest):
            if not each:
                catalog.arrivals.failed(block)
                continue
            self.counts["read"] += 1
            self.counts["resharded"] += bool(part.into)
            ids = catalog.arrivals.arrived(block, each, waited, self._queue.clock())
            self._tenant.tier.writes.saved(ids)
            if part.of.key != block.key:
                self.renamed(ids)
