"""A store takes over the blocks of another one from notes in shared memory, wherever that one was killed."""

from __future__ import annotations

import mmap
import os
import random
import signal
import struct
from typing import NamedTuple

import pytest

from kvtier_kernels import Store
from support.effort import effort
from support.stores import FULL, PAGE, key, keys, pack, unpack

NOTE = struct.Struct(
    "<QIIIIII32s32s16sQQ"
)  # generation, space, group, shard, 0, owner, state and flags, ...
IDENTITY = struct.Struct("<IIIB3x32s32s")
LISTED_BYTES = 56
READY = 2
PAGES = 3072  # three slabs
# By name: bytes of a block and number of shards, for each group.
SPACES = {7: ((PAGE, 1),), 9: ((3 * PAGE, 1), (PAGE, 2))}
EVERYWHERE = [(0, 0, PAGES)]


class Block(NamedTuple):
    space: int
    group: int
    shard: int
    key: bytes
    parent: bytes


class Memory:
    """The shared memory of one extent: its generations and its notes."""

    def __init__(self) -> None:
        self.generations = mmap.mmap(-1, PAGES * 8)
        self.notes = mmap.mmap(-1, PAGES * NOTE.size)

    def store(self) -> tuple[Store, dict[int, int]]:
        """A store of this memory without blocks, and its spaces by name."""
        store = Store()
        store.add_extent(PAGES * PAGE, self.generations, self.notes)
        return store, {
            name: store.add_space([(FULL, 0, nbytes) for nbytes, _ in groups], [n for _, n in groups], name)
            for name, groups in SPACES.items()
        }  # fmt: skip

    def adopted(self, names: tuple[int, ...] = tuple(SPACES)) -> Adopted:
        store, spaces = self.store()
        ready, expires, writing, owners, dropped = store.adopt(
            EVERYWHERE, [(name, spaces[name]) for name in names]
        )
        store.check()
        return Adopted(store, spaces, ready, expires, writing, owners, dropped)

    def note(self, page: int) -> list[object]:
        return list(NOTE.unpack_from(self.notes, page * NOTE.size))

    def write_note(self, page: int, fields: list[object]) -> None:
        NOTE.pack_into(self.notes, page * NOTE.size, *fields)

    def close(self) -> None:
        self.generations.close()
        self.notes.close()


class Adopted(NamedTuple):
    store: Store
    spaces: dict[int, int]
    ready: bytes
    expires_ms: list[int]
    writing: bytes
    owners: list[int]
    dropped: int


@pytest.fixture
def memory():
    return Memory()


def save(store, space, names, *, group=0, shard=0, parent=None, summed=True, **more):
    named = keys(*names)
    above = None if parent is None else key(parent)
    ids, _ = store.reserve(space, group, shard, above, named, bytes(len(names)), **more)
    store.commit(ids, b"".join(key(one)[:16] for one in names) if summed else b"")
    return ids


def ready_ids(store, space):
    rows = store.listed(space, 0, 1 << 20, 1 << 20)[1]
    ids = (rows[at : at + 4] for at in range(0, len(rows), LISTED_BYTES))
    return [one for one in ids if store.ready(one)]


def blocks(store, spaces):
    """The slot and the checksum of each READY block."""
    found = {}
    for name, space in spaces.items():
        for one in ready_ids(store, space):
            _, group, shard, _, own, parent = IDENTITY.unpack(store.identities(one))
            found[Block(name, group, shard, own, parent)] = store.slots(one), store.checksums(one)
    return found


def test_a_store_takes_over_what_another_one_committed_in_the_same_slots(memory):
    store, spaces = memory.store()
    save(store, spaces[7], ("a", "b", "c"))
    save(store, spaces[7], ("d",), parent="b", summed=False)
    save(store, spaces[9], ("a", "b"))
    save(store, spaces[9], ("a", "b"), group=1, shard=1)
    before = blocks(store, spaces)
    adopted = memory.adopted()
    assert blocks(adopted.store, adopted.spaces) == before and len(before) == 8
    assert adopted.dropped == 0 and not adopted.writing
    assert adopted.store.match(adopted.spaces[7], keys("a", "b", "c"))[:2] == (3, 3)
    assert adopted.store.match(adopted.spaces[7], keys("a", "b", "d"))[:2] == (3, 3)
    assert adopted.store.counts() == store.counts()


def test_blocks_are_returned_in_the_order_in_which_they_were_reserved(memory):
    store, spaces = memory.store()
    first = save(store, spaces[9], ("x", "y"))
    save(store, spaces[7], ("a",))
    store.evict(first[-4:])
    save(store, spaces[7], ("b", "c"))
    adopted = memory.adopted()
    assert adopted.store.keys_of(adopted.ready) == keys("x", "a", "b", "c")
    # The order continues.
    save(adopted.store, adopted.spaces[7], ("d",))
    again = memory.adopted()
    assert again.store.keys_of(again.ready) == keys("x", "a", "b", "c", "d")


def test_what_was_evicted_forgotten_or_aborted_does_not_come_back(memory):
    store, spaces = memory.store()
    ids = save(store, spaces[7], ("evicted", "forgotten", "leased and forgotten", "stays"))
    store.evict(ids[:4])
    store.lease(ids[8:12])
    store.forget(ids[4:12])
    aborted, _ = store.reserve(spaces[7], 0, 0, None, keys("aborted"), bytes(1))
    store.abort(aborted)
    adopted = memory.adopted()
    assert adopted.store.keys_of(adopted.ready) == keys("stays") and not adopted.writing


def test_a_slot_that_was_being_written_is_held_until_its_writer_has_ended(memory):
    store, spaces = memory.store()
    _, slots = store.reserve(spaces[7], 0, 0, None, keys("a"), bytes(1), owner=42)
    adopted = memory.adopted()
    assert not adopted.ready and adopted.owners == [42]
    assert adopted.store.keys_of(adopted.writing) == keys("a")
    assert adopted.store.match(adopted.spaces[7], keys("a"))[:2] == (0, 0)
    taken, others = adopted.store.reserve(
        adopted.spaces[7], 0, 0, None, keys(*range(PAGES)), bytes(PAGES)
    )
    assert len(taken) // 4 == PAGES - 1 and slots[8:16] not in [
        others[at + 8 : at + 16] for at in range(0, len(others), 24)
    ]
    adopted.store.gone(adopted.writing)
    adopted.store.check()
    assert adopted.store.room(adopted.spaces[7], 0, 1) == 1


def test_an_expiry_is_kept(memory):
    store, spaces = memory.store()
    save(store, spaces[7], ("a",))
    save(store, spaces[7], ("b",), expires_ms=1234)
    assert memory.adopted().expires_ms == [0, 1234]


def test_a_block_of_an_unknown_space_is_dropped_for_ever(memory):
    store, spaces = memory.store()
    save(store, spaces[7], ("a",))
    save(store, spaces[9], ("b",))
    adopted = memory.adopted(names=(7,))
    assert adopted.store.keys_of(adopted.ready) == keys("a") and adopted.dropped == 1
    again = memory.adopted()
    assert again.store.keys_of(again.ready) == keys("a") and again.dropped == 0


def test_a_block_that_was_read_from_disk_is_noted(memory):
    store, spaces = memory.store()
    ids = save(store, spaces[7], ("a", "b"))
    frames = b"".join(struct.pack("<IIIBBBB", 1, page, PAGE, 0, 1, 1, 0) for page in (1, 3))
    assert store.framed(1, ids, frames, b"") == b""
    store.evict(ids)
    assert not memory.adopted().ready
    taken, _ = store.promote(ids)
    store.promoted(taken)
    adopted = memory.adopted()
    assert blocks(adopted.store, adopted.spaces) == blocks(store, spaces)
    assert adopted.store.keys_of(adopted.ready) == keys("a", "b")


def test_a_block_that_was_read_from_a_lossy_frame_is_still_lossy(memory):
    """Otherwise it would be encoded a second time with a loss."""
    store, spaces = memory.store()
    ids = save(store, spaces[7], ("lossy", "raw"))
    frames = b"".join(
        struct.pack("<IIIBBBB", 1, page, PAGE, 0, 1, flags, 0) for page, flags in ((1, 3), (3, 1))
    )
    store.framed(1, ids, frames, bytes(32))
    store.evict(ids)
    store.promote(ids)
    store.promoted(ids)
    assert store.lossy(ids) == ids[:4]
    adopted = memory.adopted()
    assert adopted.store.keys_of(adopted.store.lossy(adopted.ready)) == key("lossy")


@pytest.mark.parametrize("ends", ["killed", "forgotten"])
def test_a_slot_that_a_disk_was_reading_into_is_never_given_out_again(memory, ends):
    store, spaces = memory.store()
    ids = save(store, spaces[7], ("a",))
    store.framed(1, ids, struct.pack("<IIIBBBB", 1, 1, PAGE, 0, 1, 1, 0), b"")
    store.evict(ids)
    _, slots = store.promote(ids)
    if ends == "forgotten":
        store.forget(ids)
    page = struct.unpack("<IIQQ", slots)[2] // PAGE
    for _ in range(2):  # the next daemon may be killed, too
        adopted = memory.adopted()
        assert not adopted.ready and adopted.owners == [0] and adopted.dropped == 0
        own, spaces = adopted.store, adopted.spaces
        assert own.match(spaces[7], keys("a"))[:2] == (0, 0)
    # The block can be saved again, elsewhere.
    again = save(own, spaces[7], ("a",))
    assert struct.unpack("<IIQQ", own.slots(again))[2] // PAGE != page
    taken, others = own.reserve(spaces[7], 0, 0, None, keys(*range(PAGES)), bytes(PAGES))
    assert len(unpack(taken)) == PAGES - 2
    assert page not in {
        struct.unpack_from("<IIQQ", others, at)[2] // PAGE for at in range(0, len(others), 24)
    }


@pytest.mark.parametrize("damage", ["overlap", "group", "extent", "state"])
def test_a_note_that_contradicts_another_or_the_memory_costs_blocks_and_nothing_else(
    memory, damage
):
    store, spaces = memory.store()
    save(store, spaces[9], ("x", "y"))  # at pages 0 and 3
    save(store, spaces[9], ("z",), parent="y")
    dropped = {key("y")}
    if damage == "overlap":
        memory.write_note(4, [*memory.note(3)[:7], key("w"), *memory.note(3)[8:]])
        memory.generations[4 * 8 : 5 * 8] = memory.generations[3 * 8 : 4 * 8]
        dropped.add(key("z"))  # it begins in the last page of the other one
    elif damage == "extent":
        memory.write_note(PAGES - 1, memory.note(3))
        memory.generations[-8:] = memory.generations[3 * 8 : 4 * 8]
        dropped = set()
    else:
        note = memory.note(3)
        if damage == "group":
            note[2] = 2
        else:
            note[6] &= ~3
        memory.write_note(3, note)
    adopted = memory.adopted()
    found = {one.key for one in blocks(adopted.store, adopted.spaces)}
    assert found == {key("x"), key("y"), key("z")} - dropped
    again = memory.adopted()
    assert {one.key for one in blocks(again.store, again.spaces)} == found and not again.dropped


def test_any_bit_of_a_note_that_changed_is_noticed(memory):
    """Except for the checksum of a block that has none, and of one that is being written."""
    store, spaces = memory.store()
    save(store, spaces[7], ("a", "b"))
    save(store, spaces[9], ("c",), parent="x", summed=False, expires_ms=77)
    ids, _ = store.reserve(spaces[7], 0, 0, None, keys("d"), bytes(1), owner=5)
    store.quarantine(ids)
    store.own(ids, 6)
    stays = save(store, spaces[7], ("leased",))
    store.lease(stays)
    store.forget(stays)
    assert Store.damaged_notes(memory.notes) == 0
    pages = [page for page in range(PAGES) if memory.note(page)[0]]
    assert len(pages) == 5
    unused = (PAGES - 1) * NOTE.size  # a note that was never written
    places = [*(page * NOTE.size + at for page in pages for at in range(NOTE.size))]
    places += range(unused, unused + NOTE.size)
    noticed = 0
    for place in places:
        flags = memory.note(place // NOTE.size)[6]
        in_checksum = 96 <= place % NOTE.size < 112
        for bit in range(8):
            memory.notes[place] ^= 1 << bit
            damaged = Store.damaged_notes(memory.notes)
            memory.notes[place] ^= 1 << bit
            is_summed = flags & 3 == READY and flags & 8
            assert damaged or (in_checksum and place < unused and not is_summed), place
            noticed += damaged
    assert noticed > 7 * len(places) and Store.damaged_notes(memory.notes) == 0


def test_memory_that_was_taken_over_is_used_like_any_other(memory):
    chance = random.Random(5)
    store, spaces = memory.store()
    for seed in range(effort(12, 100, 500)):
        act(store, spaces, random.Random(seed), 300, lambda *_: None)
        before = blocks(store, spaces)
        assert Store.damaged_notes(memory.notes) == 0
        adopted = memory.adopted()
        assert blocks(adopted.store, adopted.spaces) == before
        assert len(unpack(adopted.ready)) == len(before) and adopted.dropped == 0
        if chance.random() < 0.3:
            adopted.store.gone(adopted.writing)
            adopted.store.check()
        store, spaces = adopted.store, adopted.spaces


def act(store, spaces, chance, rounds, tell):
    """Do random things with a store. `tell` is called with a verb and identities: "going" before blocks may
    go, "left" after they have left, "saved" after they were committed."""
    for _ in range(rounds):
        name = chance.choice(list(spaces))
        space, groups = spaces[name], SPACES[name]
        group = chance.randrange(len(groups))
        shard = chance.randrange(groups[group][1])
        verb = chance.choice(["save", "save", "save", "abort", "forget", "evict", "die"])
        if verb in ("forget", "evict"):
            some = ready_ids(store, space)
            some = chance.sample(some, min(len(some), 3))
            named = identities(store, some)
            tell("going", named)
            (store.forget if verb == "forget" else store.evict)(b"".join(some))
            tell("left", named)
            continue
        # The first key is often one that exists.
        named = keys(chance.randrange(200), *(chance.randrange(200, 10**6) for _ in range(3)))
        statuses = store.probe(space, group, shard, named)
        wanted = statuses.count(0)
        if store.room(space, group, wanted) < wanted:
            victims = [one for each in spaces.values() for one in ready_ids(store, each)]
            chance.shuffle(victims)
            tell("going", identities(store, victims))
            store.make_room(space, group, wanted, b"".join(victims))
        taken, _ = store.reserve(space, group, shard, None, named, statuses, owner=3)
        if verb == "save":
            store.commit(taken, b"".join(one.to_bytes(16, "little") for one in unpack(taken)))
            tell("saved", identities(store, [pack(one) for one in unpack(taken)]))
        elif verb == "abort":
            store.abort(taken)
        else:
            store.quarantine(taken[:4])
            store.abort(taken[4:])
        store.check()


def identities(store, some):
    """The number of the space in the store, the group, the shard and the key of each block."""
    packed = store.identities(b"".join(some))
    return b"".join(
        packed[at : at + 12] + packed[at + 16 : at + 48]
        for at in range(0, len(packed), IDENTITY.size)
    )


def test_a_store_that_was_killed_anywhere_leaves_what_it_said_it_had(memory):
    """A child tells what it committed and what it may give up, until it is killed. Every block that it had
    committed for good must be found, with the checksum of its last commit."""
    chance = random.Random(1)
    for seed in range(effort(8, 100, 500)):
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.close(read)
            try:
                store, spaces = memory.store()
                store.adopt(EVERYWHERE, [(name, spaces[name]) for name in spaces])

                def tell(verb, some, write=write):
                    os.write(write, verb[:1].encode() + struct.pack("<I", len(some)) + some)

                tell("saved", b"")
                act(store, spaces, random.Random(seed), 10**6, tell)
            finally:
                os._exit(1)
        os.close(write)
        with os.fdopen(read, "rb") as told:
            log = bytearray(told.read(5))
            left = chance.randrange(1, 60_000)
            while left > 0 and (some := told.read(min(left, 4096))):
                log += some
                left -= len(some)
            os.kill(child, signal.SIGKILL)
            log += told.read()
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, "the child failed by itself"
        kept: set[bytes] = set()
        left_for_good: set[bytes] = set()
        at = 0
        while at + 5 <= len(log):
            (length,) = struct.unpack_from("<I", log, at + 1)
            if at + 5 + length > len(log):
                break
            some = {bytes(log[i : i + 44]) for i in range(at + 5, at + 5 + length, 44)}
            kept = kept | some if log[at] == ord("s") else kept - some
            left_for_good = left_for_good | some if log[at] == ord("l") else left_for_good - some
            at += 5 + length
        assert Store.damaged_notes(memory.notes) == 0, "a kill damages none"
        adopted = memory.adopted()
        packed = identities(adopted.store, [adopted.ready])
        found = {packed[i : i + 44] for i in range(0, len(packed), 44)}
        assert kept <= found, (
            f"seed {seed}: {len(kept - found)} of {len(kept)} committed blocks are lost"
        )
        # A block that left may have been saved again, without the time to tell.
        assert len(left_for_good & found) <= 4 and adopted.dropped == 0
