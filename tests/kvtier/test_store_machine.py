"""The native store and its twin, driven by the same random operations, and an oracle.

Every call goes to both, and both must answer alike, errors and slots included. The oracle knows
only what was committed and what left; it says what a match may promise, which bytes are taken, and
that a slot's generation moved on when its block left.
"""

import os
import struct
from hashlib import sha256
from itertools import pairwise

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier_kernels import Lru, Store
from kvtier_kernels.reference.store import Store as Twin

FULL, WINDOW, STATE = 0, 1, 2
LONG = bool(os.environ.get("KVTIER_FAULTS"))
KEYS = [sha256(bytes([i])).digest() for i in range(48)]
CALLS_WITH_IDS = ["abort", "quarantine", "gone", "evict", "forget", "lease", "unlease"]
CALLS_WITH_IDS += ["ready", "slots", "checksums", "keys_of"]
# Two scales: slots in one slab of small pages; and slabs that must share an arena of a few MiB.
MIB = 1 << 20
SMALL = [100, 4096, 6000, 12288, 40000], st.integers(8 * 4096, 200 * 4096)
LARGE = [640 << 10, MIB, 3 * MIB, 5 * MIB + 64], st.integers(8 * MIB, 40 * MIB)


def path_to(leaf):
    """The keys from a root to this one, in a forest of binary trees and one long chain."""
    path = [leaf]
    while path[0] not in (0, 1, 24):
        at = path[0]
        path.insert(0, at - 1 if at > 24 else at // 2)
    return [KEYS[i] for i in path]


def pack(ids):
    return b"".join(struct.pack("<I", i) for i in ids)


def unpack(ids):
    return [i for (i,) in struct.iter_unpack("<I", ids)]


def attempt(call, *arguments):
    try:
        return call(*arguments)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        return type(error)


leaves = st.integers(0, len(KEYS) - 1)
groups = st.tuples(st.sampled_from([FULL, FULL, WINDOW, STATE]), st.integers(1, 3))
numbers = st.integers(0, 10_000)


class StoreMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.native, self.twin, self.lru = Store(), Twin(), Lru()
        self.ghosts = 65536
        self.tables = []  # generation tables, native's and twin's
        self.spaces = {}  # of each: groups, shards
        self.states = {}  # id -> state
        self.names = {}  # id -> (space, group, shard, key)
        self.places = {}  # id -> (extent, offset, generation, length)
        self.leases = {}
        self.left = []  # places of blocks that left

    def both(self, name, *arguments):
        native = attempt(getattr(self.native, name), *arguments)
        twin = attempt(getattr(self.twin, name), *arguments)
        assert native == twin, f"{name}{arguments}: native {native!r}, twin {twin!r}"
        return native

    def of(self, *states):
        return sorted(i for i, state in self.states.items() if state in states)

    def choose(self, ids, picks):
        """Some of the ids, each once; picks are any numbers."""
        return list(dict.fromkeys(ids[pick % len(ids)] for pick in picks)) if ids else []

    def gone(self, ids):
        for i in ids:
            del self.states[i], self.names[i]
            self.left.append(self.places.pop(i))
            self.leases.pop(i, None)
        self.lru.removed(pack(ids))

    def demote(self, orphans):
        """Orphans must be READY, unleased and of a full group."""
        for i in unpack(orphans):
            assert self.states[i] == "ready" and not self.leases.get(i)
            space, group, _, _ = self.names[i]
            assert self.spaces[space][0][group][0] == FULL
        self.lru.demoted(orphans)

    @initialize(large=st.booleans(), ghosts=st.sampled_from([0, 2, 65536]), data=st.data())
    def open(self, large, ghosts, data):
        self.native, self.twin, self.ghosts = Store(ghosts), Twin(ghosts), ghosts
        self.sizes, self.lengths = LARGE if large else SMALL
        self.add_extent(data.draw(self.lengths))
        self.add_space(data.draw(st.lists(groups, min_size=1, max_size=3)), data)

    def add_extent(self, nbytes):
        tables = [bytearray(nbytes // 4096 * 8) for _ in range(2)]
        native = self.native.add_extent(nbytes, tables[0])
        assert native == self.twin.add_extent(nbytes, tables[1]) == len(self.tables)
        self.tables.append(tables)

    def add_space(self, kinds, data):
        sizes = st.sampled_from(self.sizes)
        specs = [(kind, window, data.draw(sizes)) for kind, window in kinds]
        shards = [data.draw(st.sampled_from([1, 1, 2])) for _ in kinds]
        number = self.both("add_space", specs, shards)
        assert number not in self.spaces and number <= 4
        self.spaces[number] = specs, shards
        for group, (_, _, size) in enumerate(specs):
            assert size <= self.both("slot_bytes", number, group) < size * 1.04 + 4096

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
        dropped = self.both("drop_space", space)
        assert dropped == all(name[0] != space for name in self.names.values())
        if dropped:
            del self.spaces[space]
            assert self.both("match", space, KEYS[0]) is IndexError

    def place(self, pick):
        space = sorted(self.spaces)[pick % len(self.spaces)]
        specs, shards = self.spaces[space]
        group = pick // 7 % len(specs)
        return space, group, pick // 31 % shards[group]

    def reserve(self, place, parent, keys, statuses):
        answer = self.both("reserve", *place, parent, b"".join(keys), statuses)
        if isinstance(answer, type):
            return []
        ids, slots = unpack(answer[0]), list(struct.iter_unpack("<IIQQ", answer[1]))
        wanted = [key for key, status in zip(keys, statuses, strict=True) if status == 0]
        length = self.spaces[place[0]][0][place[1]][2]
        for i, key, (extent, _, offset, generation) in zip(ids, wanted, slots, strict=False):
            assert i not in self.states
            self.states[i] = "writing"
            self.names[i] = (*place, key)
            self.places[i] = extent, offset, generation, length
        assert len(ids) <= len(wanted)
        return ids

    def commit(self, ids, with_checksums):
        checksums = b"".join(sha256(pack([i])).digest()[:16] for i in ids if with_checksums)
        assert self.both("commit", pack(ids), checksums) is None
        for i in ids:
            self.states[i] = "ready"
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

    # Saving is what makes all else possible, so it comes up three times as often.
    saves = rule(
        pick=numbers,
        some_leaves=st.lists(leaves, min_size=1, max_size=4),
        every_place=st.sampled_from([True, True, False]),
        fifths=st.sampled_from([5, 5, 5, 3, 0]),
    )
    save_some, save_others, save_again = saves(save), saves(save), saves(save)

    def save_to(self, place, path, fifths):
        statuses = self.both("probe", *place, b"".join(path))
        new = statuses.count(0)
        for _ in range(4):
            room = self.both("room", *place[:2], new)
            victims = self.lru.victims(new - room)
            if room == new or not victims:
                break
            evicted, orphans = self.both("make_room", *place[:2], new, victims)
            evicted = unpack(evicted)
            assert all(self.states[i] == "ready" and not self.leases.get(i) for i in evicted)
            self.gone(evicted)
            self.demote(orphans)
        room = self.both("room", *place[:2], new)
        ids = self.reserve(place, None, path, statuses)
        assert len(ids) == room
        self.commit(ids[: len(ids) * fifths // 5], with_checksums=fifths % 2 == 0)

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
        assert self.both("abort", pack(ids)) is None
        self.gone(ids)

    @precondition(lambda self: self.of("writing"))
    @rule(picks=st.lists(numbers, min_size=1, max_size=3))
    def quarantine_some(self, picks):
        ids = self.choose(self.of("writing"), picks)
        assert self.both("quarantine", pack(ids)) is None
        self.states.update(dict.fromkeys(ids, "quarantined"))

    @precondition(lambda self: self.of("quarantined"))
    @rule(picks=st.lists(numbers, min_size=1, max_size=4))
    def the_quarantined_are_gone(self, picks):
        ids = self.choose(self.of("quarantined"), picks)
        assert self.both("gone", pack(ids)) is None
        self.gone(ids)

    @precondition(lambda self: self.of("ready"))
    @rule(picks=st.lists(numbers, min_size=1, max_size=5))
    def evict_some(self, picks):
        ids = [i for i in self.choose(self.of("ready"), picks) if not self.leases.get(i)]
        orphans = self.both("evict", pack(ids))
        self.gone(ids)
        self.demote(orphans)

    @precondition(lambda self: self.of("ready"))
    @rule(picks=st.lists(numbers, min_size=1, max_size=5))
    def forget_some(self, picks):
        ids = self.choose(self.of("ready"), picks)
        freed, orphans = self.both("forget", pack(ids))
        assert unpack(freed) == [i for i in ids if not self.leases.get(i)]
        self.states.update(dict.fromkeys(ids, "doomed"))
        self.gone(unpack(freed))
        self.demote(orphans)

    def lease(self, picks):
        ready = self.of("ready", "doomed")
        ids = [ready[pick % len(ready)] for pick in picks] if ready else []
        if len(set(ids)) < len(ids):
            assert self.both("lease", pack(ids)) is ValueError
            ids = self.choose(ids, range(len(ids)))
        assert self.both("lease", pack(ids)) is None
        for i in ids:
            self.leases[i] = self.leases.get(i, 0) + 1
        self.lru.removed(pack(ids))

    leases_of = rule(picks=st.lists(numbers, min_size=1, max_size=6))
    lease_some, lease_others = leases_of(lease), leases_of(lease)

    @precondition(lambda self: any(self.leases.values()))
    @rule(picks=st.lists(numbers, min_size=1, max_size=12))
    def unlease_some(self, picks):
        ids = self.choose(sorted(i for i, n in self.leases.items() if n), picks)
        evictable, freed = map(unpack, self.both("unlease", pack(ids)))
        for i in ids:
            self.leases[i] -= 1
        ended = [i for i in ids if not self.leases[i]]
        assert evictable == [i for i in ended if self.states[i] == "ready"]
        assert freed == [i for i in ended if self.states[i] == "doomed"]
        self.gone(freed)
        self.lru.added(pack(evictable))

    @rule(
        call=st.sampled_from(CALLS_WITH_IDS),
        good=st.lists(numbers, max_size=3),
        bad=st.lists(st.integers(0, 60) | st.integers(0, 2**32 - 1), min_size=1, max_size=3),
    )
    def use_wrong_ids(self, call, good, bad):
        """One bad id spoils the batch, and the good ones stay as they were."""
        right = {
            "abort": ["writing"],
            "quarantine": ["writing"],
            "gone": ["quarantined"],
            "evict": ["ready"],
            "forget": ["ready"],
            "lease": ["ready", "doomed"],
        }.get(call, ["writing", "ready", "doomed", "quarantined"])
        allowed = set(self.of(*right))
        if call == "unlease":
            allowed = {i for i, n in self.leases.items() if n}
        if call == "evict":
            allowed -= {i for i, n in self.leases.items() if n}
        wrong = [i for i in bad if i not in allowed]
        if wrong:
            ids = [*self.choose(sorted(allowed), good), *wrong]
            assert self.both(call, pack(ids)) is ValueError
            assert self.both("commit", pack([*self.of("writing"), 2**32 - 1]), b"") is ValueError

    @rule(pick=numbers, leaf=leaves, limit=st.integers(0, 5))
    def look(self, pick, leaf, limit):
        space, group, shard = self.place(pick)
        path = b"".join(path_to(leaf))
        ids = self.both("present", space, group, shard, path)
        for i in unpack(ids):
            assert self.states[i] == "ready"
            assert self.names[i][:3] == (space, group, shard) and self.names[i][3] in path
        self.lru.touched(ids)
        self.both("states", space, path[-32:])
        self.both("states", space, path[1:32])
        self.both("ancestors", space, group, shard, path[-32:], limit)
        self.both("ancestors", space, group, shard, path[-32:], 1000)
        self.both("match", space + 4, path)
        self.both("probe", space, group + 4, shard, path)
        self.both("probe", space, group, shard, path[1:])
        self.both("probe", space, group, shard, path + path[-32:])

    @rule(some_leaves=st.lists(leaves, min_size=2, max_size=6))
    def match(self, some_leaves):
        for leaf in some_leaves:
            self.match_path(path_to(leaf))

    def match_path(self, path):
        for space, (specs, shards) in self.spaces.items():
            ready, parts = self.both("match", space, b"".join(path))
            assert ready == self.restorable(space, specs, shards, path)
            for group, shard, first, ids in parts:
                names = [(space, group, shard, key) for key in path[first:ready]]
                assert [self.names[i] for i in unpack(ids)] == names
            here = unpack(self.both("resident", space, b"".join(path + path[:1])))
            assert sorted(here) == [
                i
                for i in self.of("ready")
                if self.names[i][0] == space and self.names[i][3] in path
            ]

    def restorable(self, space, specs, shards, path):
        """By definition, from what was committed and did not leave: no index, no tree."""
        here = {self.names[i] for i in self.of("ready")}

        def has(group, key):
            return all((space, group, shard, key) in here for shard in range(shards[group]))

        def restores(group, length):
            kind, window, _ = specs[group]
            first = {FULL: 0, WINDOW: max(0, length - window), STATE: length - 1}[kind]
            return all(has(group, key) for key in path[first:length])

        return next(
            length
            for length in range(len(path), -1, -1)
            if length == 0 or all(restores(group, length) for group in range(len(specs)))
        )

    @invariant()
    def both_hold(self):
        self.native.check()
        self.twin.check()
        counts = self.both("counts")
        assert sum(counts["blocks"].values()) == len(self.states)
        assert counts["ghosts"] <= len(self.states) + self.ghosts
        ids = sorted(self.states)
        slots = list(struct.iter_unpack("<IIQQ", self.both("slots", pack(ids))))
        assert slots == [(e, 0, o, g) for e, o, g, _ in (self.places[i] for i in ids)]
        self.both("checksums", pack(ids))
        assert self.both("ready", pack(ids)) == len(self.of("ready"))
        assert self.both("keys_of", pack(ids)) == b"".join(self.names[i][3] for i in ids)
        assert all(native == twin for native, twin in self.tables)

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
        """What is not held can be used: the space of the smallest blocks gets nearly all of it."""
        if not self.states:
            return
        size, space, group = min(
            (size, space, group)
            for space, (specs, _) in self.spaces.items()
            for group, (_, _, size) in enumerate(specs)
        )
        plan = space, group, 10**6, pack(self.states)  # a held block among the victims is skipped
        evicted, _ = self.both("make_room", *plan)
        self.gone(unpack(evicted))
        self.native.check()
        pitch = -(-size // 4096) * 4096
        # Around each held block two slots may be cut, and its slab and the run after it end in one.
        lost = sum(length + 4096 + 4 * pitch for *_, length in self.places.values())
        capacity = self.native.counts()["capacity_bytes"] - lost - pitch * len(self.tables)
        assert self.both("room", *plan[:3]) * pitch >= capacity


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=2000 if LONG else 300,
    stateful_step_count=100 if LONG else 50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
