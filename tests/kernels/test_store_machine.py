"""The native store, driven by random operations, and the invariants of its answers.

The machine knows only what was committed, written to a tier below and read from it, and what left; it says
what a match may promise, which bytes are taken, and that a slot's generation moved on when its block left.
The model of the tree says which keys are known, and which blocks a match cannot reach.
"""

import struct
from hashlib import sha256
from itertools import pairwise

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtier_kernels import Store
from models.kernels.store import Tree, name_of
from models.policies.native import Lru
from support.effort import effort

FULL, WINDOW, STATE = 0, 1, 2
KEYS = [sha256(bytes([i])).digest() for i in range(48)]
CALLS_WITH_IDS = ["abort", "quarantine", "gone", "regain", "evict", "forget", "lease", "unlease"]
CALLS_WITH_IDS += [
    "ready",
    "slots",
    "checksums",
    "keys_of",
    "identities",
    "frames",
    "names",
    "parents",
]
CALLS_WITH_IDS += ["promote", "promoted", "unpromoted", "spoilt"]
CALLS_WITH_ORPHANS = ["make_room", "evict", "forget", "unpromoted", "spoilt", "damaged"]
CALLS_WITH_ORPHANS += ["drop_segment"]
RESTORABLE = "ready", "cold", "promoting"  # here "cold" is READY in a tier below
FRAME = struct.Struct("<IIIBBBB")
ROW = struct.Struct("<32s32sIHHIIHHQQQ16sI")
LISTED, TALLY = struct.Struct("<IIIIHBBBB2x32s"), struct.Struct("<IIIIQQ")
STATES = "absent", "writing", "ready", "doomed", "quarantined", "cold", "promoting"
SEGMENTS = st.integers(7, 9)
# Two scales: slots in one slab of small pages; and slabs that share an arena of a few MiB.
MIB = 1 << 20
SMALL = [100, 4096, 6000, 12288, 40000], st.integers(8 * 4096, 200 * 4096)
LARGE = [640 << 10, MIB, 3 * MIB, 5 * MIB + 64], st.integers(8 * MIB, 40 * MIB)


def path_to(leaf):
    """The keys from a root to this leaf, in a forest of binary trees and one long chain."""
    path = [leaf]
    while path[0] not in (0, 1, 24):
        at = path[0]
        path.insert(0, at - 1 if at > 24 else at // 2)
    return [KEYS[i] for i in path]


def pack(ids):
    return b"".join(struct.pack("<I", i) for i in ids)


def unpack(ids):
    return [i for (i,) in struct.iter_unpack("<I", ids)]


def chunks(items, size):
    return [items[at : at + size] for at in range(0, len(items), size)]


def attempt(call, *arguments):
    try:
        return call(*arguments)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        return type(error)


leaves = st.integers(0, len(KEYS) - 1)
groups = st.tuples(st.sampled_from([FULL, FULL, WINDOW, STATE]), st.integers(1, 3))
numbers = st.integers(0, 10_000)


class StoreMachine(RuleBasedStateMachine):
    ANY = "writing", "ready", "doomed", "quarantined", "cold", "promoting"

    def __init__(self):
        super().__init__()
        self.native, self.lru = Store(), Lru()
        self.ghosts = 65536
        self.tree = Tree(self.ghosts, self.is_restorable)
        self.was_cut = set()  # nodes, before the call
        self.tables = []  # generation tables, and what is in them
        self.spaces = {}  # of each: groups, shards
        self.states = {}  # id -> state
        self.names = {}  # id -> (space, group, shard, key)
        self.places = {}  # id -> (extent, offset, generation, length)
        self.leases = {}
        self.left = []  # places of removed blocks
        self.summed = {}  # id -> which checksum of its own bytes it has
        self.frames = {}  # id -> frame
        self.rounds = {}  # id -> rounds with a request for its frame, at most 3; whether it was spared
        self.used = set()  # ids with a frame that a match found since its write
        self.filling = set()  # ids whose slots a read fills
        self.fresh = set()  # used ids that `take_used` has not returned yet
        self.next_page = 1  # common to all segments; page numbers only increase

    def ask(self, name, *arguments):
        if name in CALLS_WITH_ORPHANS:
            self.was_cut = self.tree.cut()
        return attempt(getattr(self.native, name), *arguments)

    def is_restorable(self, i):
        return self.states[i] in RESTORABLE

    def of(self, *states):
        return sorted(i for i, state in self.states.items() if state in states)

    def choose(self, ids, picks):
        """Some of the ids, each once. `picks` are arbitrary numbers."""
        return list(dict.fromkeys(ids[pick % len(ids)] for pick in picks)) if ids else []

    def gone(self, ids):
        for i in ids:
            space, group, shard, key = self.names.pop(i)
            self.tree.leave(space, (group, shard), key)
            del self.states[i]
            self.vacate(i)
            self.leases.pop(i, None)
            self.summed.pop(i, None)
            self.unframe(i)
        self.lru.gone(pack(ids))

    def vacate(self, i):
        if i in self.places:
            extent, offset, *_ = place = self.places.pop(i)
            self.left.append(place)
            self.tables[extent][1][offset // 4096] += 1
        self.filling.discard(i)

    def unframe(self, i):
        """The position of the frame, or None."""
        self.unuse(i)
        self.rounds.pop(i, None)
        died = self.frames.pop(i, None)
        return FRAME.pack(*died)[:8] if died else b""

    def evicted(self, ids):
        """Blocks with a frame stay on disk. Returns their ids."""
        cold = [i for i in ids if i in self.frames]
        for i in cold:
            self.states[i] = "cold"
            self.vacate(i)
        self.lru.left(pack(cold))
        self.gone([i for i in ids if i not in self.frames])
        return cold

    def unuse(self, i):
        self.used.discard(i)
        self.fresh.discard(i)

    def is_evictable(self, i):
        return self.states[i] == "ready" and not self.leases.get(i)

    def demote(self, orphans):
        """Orphans are the evictable blocks of full groups that no match can reach since this call."""
        found = unpack(orphans)
        assert len(set(found)) == len(found)
        assert set(found) == {
            i
            for node in self.tree.cut() - self.was_cut
            for place, i in node.blocks.items()
            if place in self.tree.full[node.space] and self.is_evictable(i)
        }
        self.lru.demoted(orphans)

    @initialize(large=st.booleans(), ghosts=st.sampled_from([0, 2, 65536]), data=st.data())
    def open(self, large, ghosts, data):
        self.native, self.ghosts = Store(ghosts), ghosts
        self.tree = Tree(ghosts, self.is_restorable)
        self.ask("note_evicted", True)
        self.sizes, self.lengths = LARGE if large else SMALL
        self.add_extent(data.draw(self.lengths))
        self.add_space(data.draw(st.lists(groups, min_size=1, max_size=3)), data)

    def add_extent(self, nbytes):
        pages = nbytes // 4096
        table = bytearray(pages * 8)
        assert self.native.add_extent(nbytes, table) == len(self.tables)
        self.tables.append((table, [1] * pages))

    def add_space(self, kinds, data):
        sizes = st.sampled_from(self.sizes)
        specs = [(kind, window, data.draw(sizes)) for kind, window in kinds]
        shards = [data.draw(st.sampled_from([1, 1, 2])) for _ in kinds]
        number = self.ask("add_space", specs, shards)
        assert number not in self.spaces and number <= 4
        self.spaces[number] = specs, shards
        full = [group for group, (kind, *_) in enumerate(specs) if kind == FULL]
        self.tree.full[number] = {(g, shard) for g in full for shard in range(shards[g])}
        for group, (_, _, size) in enumerate(specs):
            assert size <= self.ask("slot_bytes", number, group) < size * 1.04 + 4096

    @precondition(lambda self: len(self.tables) < 3)
    @rule(data=st.data())
    def a_late_extent(self, data):
        self.add_extent(data.draw(self.lengths))

    @precondition(lambda self: len(self.spaces) < 4)
    @rule(kinds=st.lists(groups, min_size=1, max_size=3), data=st.data())
    def another_space(self, kinds, data):
        self.add_space(kinds, data)

    @precondition(lambda self: len(self.spaces) > 1)
    @rule(pick=numbers)
    def drop_a_space(self, pick):
        space, _, _ = self.place(pick)
        dropped = self.ask("drop_space", space)
        assert dropped == all(name[0] != space for name in self.names.values())
        if dropped:
            del self.spaces[space]
            assert self.ask("match", space, KEYS[0]) is IndexError

    def place(self, pick):
        space = sorted(self.spaces)[pick % len(self.spaces)]
        specs, shards = self.spaces[space]
        group = pick // 7 % len(specs)
        return space, group, pick // 31 % shards[group]

    def reserve(self, place, parent, keys, statuses):
        space, *at = place
        room = self.ask("room", *place[:2], len(keys))
        answer = self.ask("reserve", *place, parent, b"".join(keys), statuses)
        tree = space, tuple(at), parent, keys, statuses
        if isinstance(answer, type):
            assert answer is attempt(self.tree.reserve, *tree, range(-room, 0)) is ValueError
            self.slots_were_taken()
            return []
        ids, slots = unpack(answer[0]), list(struct.iter_unpack("<IIQQ", answer[1]))
        if self.tree.reserve(*tree, ids):
            assert len(ids) == room
        wanted = [key for key, status in zip(keys, statuses, strict=True) if status == 0]
        length = self.spaces[place[0]][0][place[1]][2]
        for i, key, (extent, _, offset, generation) in zip(ids, wanted, slots, strict=False):
            assert i not in self.states
            self.states[i] = "writing"
            self.names[i] = (*place, key)
            self.places[i] = extent, offset, generation, length
        assert len(ids) <= len(wanted)
        return ids

    def slots_were_taken(self):
        """And given back: which ones is unknown, but they have new generations."""
        for table, known in self.tables:
            now = list(struct.unpack(f"<{len(known)}Q", table))
            assert all(after >= before for after, before in zip(now, known, strict=True))
            known[:] = now

    def commit(self, ids, with_checksums):
        sums = {i: sha256(self.names[i][3]).digest()[:16] for i in ids if with_checksums}
        assert self.ask("commit", pack(ids), b"".join(sums.values())) is None
        for i in ids:
            self.states[i] = "ready"
        self.summed.update(sums)
        self.lru.added(pack(ids))

    def save(self, pick, some_leaves, every_place, fifths):
        space, group, shard = self.place(pick)
        places = [(space, group, shard)]
        if every_place:
            specs, shards = self.spaces[space]
            places = [(space, g, s) for g in range(len(specs)) for s in range(shards[g])]
        for leaf in some_leaves:
            for place in places:
                self.save_to(place, path_to(leaf), fifths)
            self.match_path(path_to(leaf))

    # Most other operations need saved blocks, so saves are three times as frequent.
    saves = rule(
        pick=numbers,
        some_leaves=st.lists(leaves, min_size=1, max_size=4),
        every_place=st.sampled_from([True, True, False]),
        fifths=st.sampled_from([5, 5, 5, 3, 0]),
    )
    save_some, save_others, save_again = saves(save), saves(save), saves(save)

    def save_to(self, place, path, fifths):
        statuses = self.ask("probe", *place, b"".join(path))
        new = statuses.count(0)
        for _ in range(4):
            room = self.ask("room", *place[:2], new)
            victims = self.lru.victims(new - room + 2)  # more than are needed
            if room == new or not victims:
                break
            self.make_room(place, new, victims)
        room = self.ask("room", *place[:2], new)
        ids = self.reserve(place, None, path, statuses)
        assert len(ids) == room
        self.commit(ids[: len(ids) * fifths // 5], with_checksums=fifths % 2 == 0)

    def make_room(self, place, n, victims):
        room = self.ask("room", *place[:2], n)
        due = [i for i in unpack(victims) if self.is_evictable(i)][: n - room]
        evicted, orphans, cold = self.ask("make_room", *place[:2], n, victims)
        evicted = unpack(evicted)
        assert room < n or not evicted
        if len({self.pitch(*at) for at in self.all_groups()}) == 1:
            assert evicted == due
        names = struct.iter_unpack("<IIIB3x32s32s", self.ask("take_evicted"))
        told = [(space, group, shard, key) for space, group, shard, _, key, _ in names]
        assert told == [self.names[i] for i in evicted]
        assert all(self.states[i] == "ready" and not self.leases.get(i) for i in evicted)
        assert self.evicted(evicted) == unpack(cold)
        self.demote(orphans)

    def all_groups(self):
        return [(space, g) for space, (specs, _) in self.spaces.items() for g in range(len(specs))]

    def pitch(self, space, group):
        return -(-self.spaces[space][0][group][2] // 4096) * 4096

    @rule(
        pick=numbers,
        parent=st.none() | leaves,
        keys=st.lists(leaves, max_size=4),
        statuses=st.binary(min_size=4, max_size=4),
    )
    def reserve_what_a_liar_says(self, pick, parent, keys, statuses):
        statuses = bytes(status & 1 for status in statuses[: len(keys)])
        above = None if parent is None else KEYS[parent]
        self.reserve(self.place(pick), above, [KEYS[key] for key in keys], statuses)

    @precondition(lambda self: self.of("writing"))
    @rule(picks=st.lists(numbers, min_size=1, max_size=6), with_checksums=st.booleans())
    def commit_some(self, picks, with_checksums):
        self.commit(self.choose(self.of("writing"), picks), with_checksums)

    @precondition(lambda self: self.of("writing"))
    @rule(picks=st.lists(numbers, min_size=1, max_size=4))
    def abort_some(self, picks):
        ids = self.choose(self.of("writing"), picks)
        assert self.ask("abort", pack(ids)) is None
        self.gone(ids)

    @precondition(lambda self: self.of("writing"))
    @rule(picks=st.lists(numbers, min_size=1, max_size=3))
    def quarantine_some(self, picks):
        ids = self.choose(self.of("writing"), picks)
        assert self.ask("quarantine", pack(ids)) is None
        self.states.update(dict.fromkeys(ids, "quarantined"))

    def left_behind(self):
        return [i for i in self.of("quarantined") if i not in self.filling]

    @precondition(lambda self: self.left_behind())
    @rule(picks=st.lists(numbers, min_size=1, max_size=4))
    def the_quarantined_are_gone(self, picks):
        ids = self.choose(self.left_behind(), picks)
        assert self.ask("gone", pack(ids)) is None
        self.gone(ids)

    @precondition(lambda self: self.left_behind())
    @rule(picks=st.lists(numbers, min_size=1, max_size=4))
    def regain_some(self, picks):
        ids = self.choose(self.left_behind(), picks)
        assert self.ask("regain", pack(ids)) is None
        self.states.update(dict.fromkeys(ids, "writing"))

    @precondition(lambda self: self.of("ready"))
    @rule(picks=st.lists(numbers, min_size=1, max_size=5))
    def evict_some(self, picks):
        self.evict([i for i in self.choose(self.of("ready"), picks) if not self.leases.get(i)])

    def evict(self, ids):
        orphans = self.ask("evict", pack(ids))
        self.evicted(ids)
        self.demote(orphans)

    @precondition(lambda self: self.of(*RESTORABLE))
    @rule(picks=st.lists(numbers, min_size=1, max_size=5), held=st.booleans())
    def forget_some(self, picks, held):
        ids = self.choose(self.of(*RESTORABLE), picks)
        if held:
            self.hold([i for i in ids[:2] if self.states[i] == "ready"])
        self.forget(ids)

    def forget(self, ids):
        freed, orphans, died = self.ask("forget", pack(ids))
        held = [i for i in ids if self.leases.get(i) or self.states[i] == "promoting"]
        assert unpack(freed) == [i for i in ids if i not in held]
        assert died == b"".join(map(self.unframe, ids))
        for i in held:
            self.states[i] = "quarantined" if self.states[i] == "promoting" else "doomed"
        self.gone(unpack(freed))
        self.demote(orphans)

    # The disk.

    def page(self):
        self.next_page += 1
        return self.next_page

    frames_of = rule(
        picks=st.lists(numbers, min_size=1, max_size=8),
        segment=SEGMENTS,
        codec=st.sampled_from([0, 0, 0, 3]),
        with_digests=st.sampled_from([True, True, False]),
        clear=st.booleans(),
    )

    def write_frames(self, picks, segment, codec, with_digests, clear):
        ids = self.choose(self.of("ready"), picks[1:] * 4)
        ids += self.choose([i for i in self.of(*self.ANY) if i not in ids], picks[:1])
        self.frame(ids, segment, codec, with_digests)
        if clear:
            ids = [i for i in ids if self.states[i] == "ready" and not self.leases.get(i)]
            self.evict(ids)

    write_some, write_others = frames_of(write_frames), frames_of(write_frames)

    def frame(self, ids, segment, codec, with_digests):
        frames = {i: (segment, self.page(), 77 + i, codec, 1, 1, 0) for i in ids}
        packed = b"".join(FRAME.pack(*frame) for frame in frames.values())
        digests = [sha256(frame[:16]).digest()[:16] for frame in chunks(packed, 16)]
        sums = b"".join(digests) if with_digests else b""
        answer = self.ask("framed", 1, pack(ids), packed, sums)
        ready = [i for i in ids if self.states[i] == "ready" and i not in self.frames]
        if not with_digests and ((ready and codec) or not self.summed.keys() >= set(ready)):
            assert answer is ValueError
            return
        assert unpack(answer) == [i for i in ids if i not in ready]
        for i in ready:
            self.frames[i] = frames[i]
            self.unuse(i)
            self.sum(i, codec, digests[ids.index(i)] if with_digests else None)

    @rule(picks=st.lists(numbers, min_size=1, max_size=4), segment=SEGMENTS, stale=st.booleans())
    def move_frames(self, picks, segment, stale):
        ids = self.choose(self.of(*self.ANY), picks)
        before = [list(self.frames.get(i, (8, 0, 0, 0, 0, 0, 0))) for i in ids]
        after = [[segment, self.page(), *frame[2:]] for frame in before]
        if stale:
            before[0:1] = [[frame[0], frame[1] + 1, *frame[2:]] for frame in before[:1]]
        packed = [b"".join(FRAME.pack(*frame) for frame in each) for each in (before, after)]
        late = unpack(self.ask("moved", pack(ids), *packed))
        assert late == [
            i for at, i in enumerate(ids) if i not in self.frames or (stale and at == 0)
        ]
        for i, frame in zip(ids, after, strict=True):
            if i not in late:
                self.frames[i] = tuple(frame)
                self.unuse(i)

    # Most other operations on the disk need these two, as they need saves.
    promotions = rule(
        picks=st.lists(numbers, min_size=1, max_size=6),
        ends=st.lists(st.sampled_from(["promoted", "unpromoted", "spoilt"]), max_size=3),
        between=st.sampled_from(["", "forget", "drop_segment"]),
    )

    def promote_some(self, picks, ends, between):
        taken = self.promote(self.choose(self.of("cold"), picks))
        if taken and between == "forget":
            self.forget(taken[:1])
        elif taken and between == "drop_segment":
            self.use_again(self.frames[taken[-1]][0])
        for end, i in zip(ends, taken, strict=False):
            self.end(end, [i])

    promote_these, promote_those = promotions(promote_some), promotions(promote_some)

    def promote(self, ids):
        taken, slots = self.ask("promote", pack(ids))
        taken = unpack(taken)
        assert taken == ids[: len(taken)]
        for i, slot in zip(taken, struct.iter_unpack("<IIQQ", slots), strict=True):
            self.states[i] = "promoting"
            self.filling.add(i)
            if self.frames[i][3]:  # the bytes will be those that are decoded
                self.summed.pop(i, None)
            space, group, _, _ = self.names[i]
            extent, _, offset, generation = slot
            self.places[i] = extent, offset, generation, self.spaces[space][0][group][2]
        if len(taken) < len(ids):
            space, group, _, _ = self.names[ids[len(taken)]]
            assert self.ask("room", space, group, 1) == 0
        return taken

    @precondition(lambda self: self.filling)
    @rule(
        picks=st.lists(numbers, min_size=1, max_size=6),
        end=st.sampled_from(["promoted", "promoted", "unpromoted", "spoilt"]),
    )
    def end_reads(self, picks, end):
        self.end(end, self.choose(sorted(self.filling), picks))

    def end(self, end, ids):
        first, second, *died = self.ask(end, pack(ids))
        alive = [i for i in ids if self.states[i] == "promoting"]
        if end == "promoted":
            assert unpack(first) == alive
            assert unpack(second) == [i for i in ids if i not in alive]
            for i in alive:
                self.states[i] = "ready"
                self.filling.discard(i)
            self.lru.added(first)
            self.gone(unpack(second))
            return
        kept = [i for i in alive if i in self.frames and end == "unpromoted"]
        assert unpack(first) == [i for i in ids if i not in kept]
        assert died == ([b"".join(map(self.unframe, ids))] if end == "spoilt" else [])
        for i in kept:
            self.states[i] = "cold"
            self.vacate(i)
        self.gone(unpack(first))
        self.demote(second)

    @rule(segment=SEGMENTS, look=st.booleans())
    def look_at_a_segment(self, segment, look):
        ids, flags = self.ask("in_segment", segment, look)
        assert unpack(ids) == self.in_segment(segment)
        cold = self.of("cold")
        wanted = {i for i in unpack(ids) if i in self.used}
        if look:
            for i in unpack(ids):
                rounds, spared = self.rounds.get(i, (0, False))
                if i in self.used:
                    self.rounds[i] = min(3, rounds + 1), False
                elif rounds == 3 and not spared:
                    self.rounds[i] = 3, True
                    wanted.add(i)
        before = set() if look else self.rounds.keys() & set(unpack(ids))
        assert flags == bytes(
            (i in wanted) + 2 * (i in cold) + 4 * (i in before) for i in unpack(ids)
        )
        if look:
            self.used.difference_update(unpack(ids))
            self.fresh &= self.used

    def in_segment(self, segment):
        return sorted(
            (i for i, frame in self.frames.items() if frame[0] == segment),
            key=lambda i: self.frames[i][1],
        )

    @rule(picks=st.lists(numbers, min_size=1, max_size=6), stale=st.booleans())
    def find_frames_damaged(self, picks, stale):
        ids = self.choose(self.of(*self.ANY), picks)
        frames = [list(self.frames.get(i, (8, 0, 0, 0, 0, 0, 0))) for i in ids]
        if stale:
            frames[0:1] = [[frame[0], frame[1] + 1, *frame[2:]] for frame in frames[:1]]
        bad = [
            i
            for i, frame in zip(ids, frames, strict=True)
            if self.frames.get(i) == tuple(frame) and self.states[i] != "promoting"
        ]
        packed = b"".join(FRAME.pack(*frame) for frame in frames)
        freed, orphans, died = self.ask("damaged", pack(ids), packed)
        assert unpack(freed) == [i for i in bad if self.states[i] == "cold"]
        assert died == b"".join(map(self.unframe, bad))
        self.gone(unpack(freed))
        self.demote(orphans)
        kept = [i for i in bad if i in self.states]
        assert unpack(self.ask("dirty", pack(kept))) == kept

    @rule(limit=st.sampled_from([1, 3, 1000]))
    def take_what_is_used(self, limit):
        taken = self.ask("take_used", limit)
        told = set(chunks(taken, 8))
        of = {FRAME.pack(*self.frames[i])[:8]: i for i in self.used}
        assert told <= set(of) and len(taken) <= 8 * limit
        self.fresh -= {of[place] for place in told}
        assert limit < 1000 or not self.fresh

    @rule(picks=st.lists(numbers, min_size=1, max_size=6), segment=SEGMENTS)
    def ask_what_is_still_there(self, picks, segment):
        ids = self.choose(self.of(*self.ANY), picks)
        found = self.ask("still", pack(ids), segment)
        assert unpack(found) == [
            i for i in ids if i in self.frames and self.frames[i][0] == segment
        ]

    @rule(segment=SEGMENTS)
    def use_a_segment_again(self, segment):
        self.use_again(segment)

    def use_again(self, segment):
        there = self.in_segment(segment)
        freed, orphans = self.ask("drop_segment", segment)
        assert unpack(freed) == [i for i in there if self.states[i] == "cold"]
        for i in there:
            self.unframe(i)
        self.gone(unpack(freed))
        self.demote(orphans)
        assert self.ask("in_segment", segment) == (b"", b"")

    @rule(
        pick=numbers,
        some_leaves=st.lists(leaves, min_size=1, max_size=3),
        segment=SEGMENTS,
        unfit=st.sampled_from(["", "", "group", "shard", "bytes", "codec"]),
        order=st.sampled_from([1, 1, -1]),
        codec=st.sampled_from([0, 0, 3]),
        wanted=st.booleans(),
        every_place=st.booleans(),
    )
    def restore_a_segment(self, pick, every_place, **rows):
        space, group, shard = self.place(pick)
        specs, shards = self.spaces[space]
        for at in range(len(specs)):
            for one in range(shards[at]):
                if every_place or (at, one) == (group, shard):
                    self.restore((space, at, one), **rows)

    def restore(self, place, some_leaves, segment, unfit, order, codec, wanted):
        space, group, shard = place
        size = self.spaces[space][0][group][2]
        rows, made, wrong = [], [], 0
        of = {self.names[i]: i for i in self.states}
        named, adopted = {}, []
        for leaf in some_leaves:
            path = path_to(leaf)
            for parent, key in list(zip([b"", *path], path, strict=False))[::order]:
                spoil = unfit if not rows else ""
                frame = (segment, self.page(), size if codec == 0 else 5, codec, 1, bool(parent), 0)
                row = [
                    key, parent, 99, group, shard, frame[1], 1, 1, codec, frame[2], size, 1,
                    sha256(key).digest()[:16], bool(parent),
                ]  # fmt: skip
                if spoil:
                    change = {
                        "group": (3, 4),
                        "shard": (4, 2),
                        "bytes": (9, 1 << 32),
                        "codec": (8, 256),
                    }
                    row[change[spoil][0]] = change[spoil][1]
                    wrong += 1
                else:
                    made.append(((space, group, shard, key), frame))
                rows.append(ROW.pack(*row))
        used = [frame[1] for _, frame in made[::2]] if wanted else []
        answer = self.ask("restore", 1, space, b"".join(rows), segment, pack(used))
        died = []
        for name, frame in made:
            if name not in of:
                died += [named[name]] if name in named else []
                named[name] = frame
            elif self.states[of[name]] == "cold":
                died.append(self.frames[of[name]])
                self.reframe(of[name], frame, used)
            elif (
                self.states[of[name]] == "ready"
                and of[name] not in self.frames
                and (codec or self.summed.get(of[name]) == sha256(name[3]).digest()[:16])
            ):
                adopted.append(name)
                self.reframe(of[name], frame, used)
            else:
                died.append(frame)
        places = b"".join(struct.pack("<II", *frame[:2]) for frame in died)
        assert answer == (len(named) + len(adopted), wrong, places)
        found = self.ask("present", space, group, shard, b"".join(name[3] for name in named))
        assert found == b""
        new = {}
        for i in unpack(self.ask("in_segment", segment)[0]):
            if i not in self.states:
                key = self.ask("keys_of", pack([i]))
                name = space, group, shard, key
                self.states[i], self.names[i] = "cold", name
                self.reframe(i, named.pop(name), used)
                new[key] = i
        assert not named
        for row in rows:
            key, parent, _, *at, _, _, _, codec, nbytes, _, _, _, has_parent = ROW.unpack(row)
            fits = tuple(at) == (group, shard) and codec < 256 and nbytes <= size
            if fits and (i := new.pop(key, None)) is not None:
                self.tree.add(space, (group, shard), key, parent if has_parent else None, i)
        assert not new

    def reframe(self, i, frame, used):
        self.frames[i] = frame
        self.unuse(i)
        if frame[1] in used:
            self.used.add(i)
        self.sum(i, frame[3], sha256(self.names[i][3]).digest()[:16])

    def sum(self, i, codec, digest):
        """Record a frame with this digest of its payload: that of the block if it is raw. None keeps the
        previous digest, as does an encoded frame."""
        if not codec and digest is not None:
            self.summed[i] = digest

    @rule(leaf=leaves)
    def promote_a_prefix(self, leaf):
        """Promote all missing blocks of a prefix while its other blocks are held: then it is READY."""
        path = path_to(leaf)
        for space in self.spaces:
            _, restorable = self.match_in(space, path)
            here = unpack(self.ask("resident", space, b"".join(path)))
            held = [i for i in here if self.states[i] == "ready"]
            self.hold(held)
            reads, whole = [], True
            for group, shard, cold, promoting in self.ask(
                "missing", space, b"".join(path), restorable
            ):
                cold, promoting = unpack(cold), unpack(promoting)
                assert all(self.states[i] == "cold" for i in cold)
                assert all(self.states[i] == "promoting" for i in promoting)
                names = [self.names[i] for i in cold + promoting]
                assert all(name[:3] == (space, group, shard) for name in names)
                self.make_room((space, group), len(cold), self.lru.victims(len(cold)))
                taken = self.promote(cold)
                whole = whole and taken == cold
                reads += taken + promoting
            self.end("promoted", reads)
            self.let_go(held)
            if whole:
                assert self.match_in(space, path) == (restorable, restorable)

    def lease(self, picks):
        ready = self.of("ready", "doomed")
        ids = [ready[pick % len(ready)] for pick in picks] if ready else []
        if len(set(ids)) < len(ids):
            assert self.ask("lease", pack(ids)) is ValueError
            ids = self.choose(ids, range(len(ids)))
        self.hold(ids)

    def hold(self, ids):
        assert self.ask("lease", pack(ids)) is None
        for i in ids:
            self.leases[i] = self.leases.get(i, 0) + 1
        self.lru.held(pack(ids))

    leases_of = rule(picks=st.lists(numbers, min_size=1, max_size=6))
    lease_some, lease_others = leases_of(lease), leases_of(lease)

    @precondition(lambda self: any(self.leases.values()))
    @rule(picks=st.lists(numbers, min_size=1, max_size=12))
    def unlease_some(self, picks):
        self.let_go(self.choose(sorted(i for i, n in self.leases.items() if n), picks))

    def let_go(self, ids):
        evictable, freed = map(unpack, self.ask("unlease", pack(ids)))
        for i in ids:
            self.leases[i] -= 1
        ended = [i for i in ids if not self.leases[i]]
        assert evictable == [i for i in ended if self.states[i] == "ready"]
        assert freed == [i for i in ended if self.states[i] == "doomed"]
        self.gone(freed)
        self.lru.freed(pack(evictable))

    @rule(
        call=st.sampled_from(CALLS_WITH_IDS),
        good=st.lists(numbers, max_size=3),
        bad=st.lists(st.integers(0, 60) | st.integers(0, 2**32 - 1), min_size=1, max_size=3),
    )
    def use_wrong_ids(self, call, good, bad):
        """One invalid id makes the call fail, and the valid ones stay unchanged."""
        right = {
            "abort": ["writing"],
            "quarantine": ["writing"],
            "gone": ["quarantined"],
            "regain": ["quarantined"],
            "evict": ["ready"],
            "forget": ["ready", "cold", "promoting"],
            "lease": ["ready", "doomed"],
            "promote": ["cold"],
        }.get(call, self.ANY)
        allowed = set(self.of(*right))
        if call in ("gone", "regain"):
            allowed -= self.filling
        if call in ("promoted", "unpromoted", "spoilt"):
            allowed = self.filling
        if call == "slots":
            allowed &= self.places.keys()
        if call == "frames":
            allowed &= self.frames.keys()
        if call == "unlease":
            allowed = {i for i, n in self.leases.items() if n}
        if call == "evict":
            allowed -= {i for i, n in self.leases.items() if n}
        wrong = [i for i in bad if i not in allowed]
        if wrong:
            ids = [*self.choose(sorted(allowed), good), *wrong]
            assert self.ask(call, pack(ids)) is ValueError
            assert self.ask("commit", pack([*self.of("writing"), 2**32 - 1]), b"") is ValueError

    @rule(pick=numbers, leaf=leaves, limit=st.integers(0, 5))
    def look(self, pick, leaf, limit):
        space, group, shard = self.place(pick)
        path = b"".join(path_to(leaf))
        blocks = [self.tree.block(space, (group, shard), key) for key in chunks(path, 32)]
        ids = self.ask("present", space, group, shard, path)
        assert unpack(ids) == [i for i in blocks if self.states.get(i) == "ready"]
        self.lru.refreshed(ids)
        codes = bytes(map(self.outcome, blocks))
        assert self.ask("probe", space, group, shard, path) == codes
        lost = [self.states.get(i) == "quarantined" for i in blocks]
        live = bytes(3 if out else code for out, code in zip(lost, codes, strict=True))
        assert self.ask("probe", space, group, shard, path, True) == live
        here = [self.tree.block(space, at, path[-32:]) for at in self.places_of(space)]
        assert self.ask("states", space, path[-32:]) == bytes(
            {"cold": 17, "promoting": 6}.get(self.states.get(i)) or self.outcome(i) for i in here
        )
        node = self.tree.nodes.get((space, path[-32:]))
        above = [one.blocks.get((group, shard)) for one in node.above()] if node else []
        for most in (limit, 1000):
            ready = [i for i in above[:most] if self.states.get(i) == "ready"]
            assert unpack(self.ask("ancestors", space, group, shard, path[-32:], most)) == ready
        assert self.ask("match", space + 4, path) is IndexError
        assert self.ask("probe", space, group + 4, shard, path) is IndexError
        for bad in (path[1:], path + path[-32:]):
            assert self.ask("probe", space, group, shard, bad) is ValueError
        assert self.ask("states", space, path[1:32]) is ValueError

    def outcome(self, i):
        outcomes = {"writing": 2, "quarantined": 2, "doomed": 3}
        return 0 if i is None else outcomes.get(self.states[i], 1)

    def places_of(self, space):
        _, shards = self.spaces[space]
        return [(group, shard) for group, count in enumerate(shards) for shard in range(count)]

    @rule(some_leaves=st.lists(leaves, min_size=2, max_size=6))
    def match(self, some_leaves):
        for leaf in some_leaves:
            self.match_path(path_to(leaf))

    def match_in(self, space, path):
        ready, restorable, parts = self.ask("match", space, b"".join(path))
        assert ready == self.restorable(space, path, "ready") <= restorable
        assert restorable == self.restorable(space, path, *RESTORABLE)
        for group, shard, first, ids in parts:
            names = [(space, group, shard, key) for key in path[first:ready]]
            assert [self.names[i] for i in unpack(ids)] == names
        needed = {
            name for length in (ready, restorable) for name in self.needed(space, path, length)
        }
        found = {i for i in self.frames if self.names[i] in needed}
        self.fresh |= found - self.used
        self.used |= found
        return ready, restorable

    def match_path(self, path):
        for space in self.spaces:
            self.match_in(space, path)
            here = unpack(self.ask("resident", space, b"".join(path + path[:1])))
            assert sorted(here) == [
                i
                for i in self.of(*RESTORABLE)
                if self.names[i][0] == space and self.names[i][3] in path
            ]

    def restorable(self, space, path, *states):
        """Computed by definition from commits and removals, without an index or a tree."""
        here = {self.names[i] for i in self.of(*states)}
        lengths = range(len(path), -1, -1)
        return next(
            length for length in lengths if here.issuperset(self.needed(space, path, length))
        )

    def needed(self, space, path, length):
        """The names of all blocks that are needed to restore a prefix of this length."""
        specs, shards = self.spaces[space]
        for group, (kind, window, _) in enumerate(specs):
            first = {FULL: 0, WINDOW: max(0, length - window), STATE: max(0, length - 1)}[kind]
            for key in path[first:length]:
                for shard in range(shards[group]):
                    yield space, group, shard, key

    @invariant()
    def every_answer_is_what_was_done(self):
        self.native.check()
        counts = self.ask("counts")
        for state, blocks in counts["blocks"].items():
            assert blocks == len(self.of(state))
        sizes = [self.spaces[self.names[i][0]][0][self.names[i][1]][2] for i in self.of("ready")]
        assert counts["bytes"]["ready"] == sum(sizes)
        assert counts["below"] == [len(self.of("cold")), 0, 0]
        assert counts["framed_blocks"] == len(self.frames)
        pages = sum(frame[4] + -(-frame[2] // 4096) for frame in self.frames.values())
        assert counts["framed_bytes"] == pages * 4096
        assert (counts["nodes"], counts["ghosts"]) == (len(self.tree.nodes), self.tree.ghosts())
        assert counts["ghosts"] <= len(self.states) + self.ghosts
        taken = sum(self.pitch(*self.names[i][:2]) for i in self.places)
        assert counts["free_bytes"] == counts["capacity_bytes"] - taken
        for at in self.all_groups():
            assert self.ask("room", *at, 10**6) * self.pitch(*at) <= counts["free_bytes"]
        assert set(self.places) == set(self.states) - set(self.of("cold"))
        ids = sorted(self.places)
        slots = list(struct.iter_unpack("<IIQQ", self.ask("slots", pack(ids))))
        assert slots == [(e, 0, o, g) for e, o, g, _ in (self.places[i] for i in ids)]
        ids = sorted(self.states)
        _, has = self.ask("checksums", pack(ids))
        assert has == bytes(i in self.summed for i in ids)
        assert self.ask("dirty", pack(ids)) == pack(
            i for i in self.of("ready") if i not in self.frames
        )
        for place in ("ready", "cold"):
            framed = [i for i in self.of(place) if i in self.frames]
            assert unpack(self.ask("clean", pack(ids), place == "ready")) == framed
        frames, _ = self.ask("frames", pack(self.frames))
        assert frames == b"".join(FRAME.pack(*frame) for frame in self.frames.values())
        names, parents, identities, depths = [], [], [], []
        for space, group, shard, key in map(self.names.get, ids):
            node = self.tree.nodes[space, key]
            above = node.parent
            names.append(name_of(key, self.places_of(space).index((group, shard))))
            parents.append(above.blocks.get((group, shard), 2**32 - 1) if above else 2**32 - 1)
            identities.append(
                (space, group, shard, bool(above), key, above.key if above else bytes(32))
            )
            depths.append(sum(1 for _ in node.above()) - 1)
        assert self.ask("names", pack(ids)) == b"".join(names)
        assert unpack(self.ask("parents", pack(ids))) == parents
        told = struct.iter_unpack("<IIIB3x32s32s", self.ask("identities", pack(ids)))
        assert list(told) == identities
        assert unpack(self.ask("depths", pack(ids))) == depths
        assert self.ask("coldest", pack(ids), 100_000, 50_000) == self.coldest(ids, 100_000, 50_000)
        assert self.ask("ready", pack(ids)) == len(self.of("ready"))
        assert self.ask("keys_of", pack(ids)) == b"".join(self.names[i][3] for i in ids)
        for table, known in self.tables:
            assert list(struct.unpack(f"<{len(known)}Q", table)) == known

    def coldest(self, ids, within, limit):
        """Those to be written: dirty, unleased, among the first of together `within` bytes."""
        found, seen, taken = [], 0, 0
        for i in ids:
            if seen >= within:
                break
            size = self.spaces[self.names[i][0]][0][self.names[i][1]][2]
            seen += size
            if self.is_evictable(i) and i not in self.frames:
                if taken and taken + size > limit:
                    return pack(found), True
                taken += size
                found.append(i)
        return pack(found), seen >= within

    @invariant()
    def what_is_listed_is_what_there_is(self):
        found = {}
        for space in self.spaces:
            for row in LISTED.iter_unpack(self.walked("listed", space, look=61, limit=7)):
                id_, group, shard, _, leases, state, flags, _, _, key = row
                found[id_] = (space, group, shard, key), leases, STATES[state], flags & 1
        assert found == {
            i: (self.names[i], self.leases.get(i, 0), state, i in self.frames)
            for i, state in self.states.items()
        }
        tallied = [0] * 3
        for _, memory, disk, other, _, _ in TALLY.iter_unpack(self.walked("tally", look=83)):
            tallied = [a + b for a, b in zip(tallied, (memory, disk, other), strict=True)]
        memory = len(self.of("ready"))
        other = sum(i not in self.frames for i in self.of(*self.ANY) if self.states[i] != "ready")
        assert tallied == [memory, len(self.frames), other]

    def walked(self, name, *arguments, look, **more):
        first, rows = 0, b""
        while True:
            first, some = self.ask(name, *arguments, first, look, *more.values())
            rows += some
            if not first:
                return rows

    @invariant()
    def the_policy_knows_what_may_be_evicted(self):
        evictable = [i for i in self.of("ready") if not self.leases.get(i)]
        assert sorted(unpack(self.lru.victims(10**6))) == evictable

    @invariant()
    def no_two_live_slots_overlap(self):
        spans = sorted(
            (e, offset, offset + length) for e, offset, _, length in self.places.values()
        )
        for (extent, _, end), (other, first, _) in pairwise(spans):
            assert extent != other or end <= first
        for extent, _, end in spans:
            assert end <= len(self.tables[extent][0]) // 8 * 4096

    @invariant()
    def a_reader_sees_that_a_block_left(self):
        for extent, offset, generation, _ in self.left:
            (now,) = struct.unpack_from("<Q", self.tables[extent][0], offset // 4096 * 8)
            assert now > generation

    def teardown(self):
        """All memory that is not held can be used: the space with the smallest blocks gets nearly all
        of it."""
        if not self.states:
            return
        size, space, group = min(
            (size, space, group)
            for space, (specs, _) in self.spaces.items()
            for group, (_, _, size) in enumerate(specs)
        )
        plan = space, group, 10**6, pack(self.states)  # a held block among the victims is skipped
        evicted, _, _ = self.ask("make_room", *plan)
        self.evicted(unpack(evicted))
        self.native.check()
        pitch = -(-size // 4096) * 4096
        # Each held block may waste two slots, and its slab and the next run end within one slot.
        lost = sum(length + 4096 + 4 * pitch for *_, length in self.places.values())
        capacity = self.native.counts()["capacity_bytes"] - lost - pitch * len(self.tables)
        assert self.ask("room", *plan[:3]) * pitch >= capacity


def test_every_answer_follows_from_what_was_done():
    rounds = settings(
        max_examples=effort(60, 600, 4000),
        stateful_step_count=effort(50, 50, 100),
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(StoreMachine, settings=rounds)
