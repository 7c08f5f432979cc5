"""Extents that a store gives no slot of any longer, while blocks of several sizes are saved and evicted."""

from __future__ import annotations

import random
import struct

import pytest

from kvtier_kernels import Store
from support.stores import generation, key, pack, unpack

PAGE = 4096
EXTENT_BYTES = 96 * PAGE
SIZES = (PAGE, 3 * PAGE, 7 * PAGE)


class Filled:
    """A store with blocks of several sizes, of which some are leased, being written or on a disk."""

    def __init__(self, rnd: random.Random) -> None:
        self.store, self.rnd = Store(), rnd
        self.tables: list[bytearray] = []
        self.spaces = [self.store.add_space([(0, 0, size)], [1]) for size in SIZES]
        self.ready: list[int] = []
        self.writing: list[int] = []
        self.leased: list[int] = []
        self.saved = 0

    def grow(self) -> None:
        self.tables.append(bytearray(EXTENT_BYTES // PAGE * 8))
        self.store.add_extent(EXTENT_BYTES, self.tables[-1])

    def extent_of(self, block: int) -> int:
        return int(struct.unpack_from("<I", self.store.slots(pack(block)))[0])

    def save(self) -> int | None:
        """Save one block, evicting others in a random order; its id, or None without room."""
        store, space = self.store, self.rnd.choice(self.spaces)
        while not store.room(space, 0, 1):
            victims = self.rnd.sample(self.ready, len(self.ready))
            evicted, _, _ = store.make_room(space, 0, 1, pack(*victims))
            gone = set(unpack(evicted))
            self.ready = [one for one in self.ready if one not in gone]
            if not gone:
                return None
        self.saved += 1
        ids, _ = store.reserve(space, 0, 0, None, key(self.saved), bytes(1))
        (block,) = unpack(ids)
        self.writing.append(block)
        return block

    def step(self) -> None:
        store, act = self.store, self.rnd.random()
        if act < 0.5:
            self.save()
        elif act < 0.8 and self.writing:
            block = self.writing.pop(self.rnd.randrange(len(self.writing)))
            store.commit(pack(block), b"")
            self.ready.append(block)
        elif act < 0.9 and self.ready:
            block = self.ready.pop(self.rnd.randrange(len(self.ready)))
            store.lease(pack(block))
            self.leased.append(block)
        elif self.leased:
            block = self.leased.pop(self.rnd.randrange(len(self.leased)))
            store.unlease(pack(block))
            self.ready.append(block)


@pytest.mark.parametrize("seed", range(12))
def test_no_slot_of_a_retired_extent_is_given_to_a_block(seed: int) -> None:
    rnd = random.Random(seed)
    filled = Filled(rnd)
    store = filled.store
    for _ in range(3):
        filled.grow()
    for _ in range(400):
        filled.step()
    filled.grow()
    retired = {0, 2, 3}  # the last one is empty
    for extent in retired:
        store.retire(extent)
        store.retire(extent)  # twice is no error
        store.check()
    assert store.counts()["capacity_bytes"] == EXTENT_BYTES
    before = {
        block: store.slots(pack(block))
        for block in (*filled.ready, *filled.leased, *filled.writing)
        if filled.extent_of(block) in retired
    }
    assert before
    for turn in range(200):
        if turn == 50:
            filled.grow()
        if turn < 100:
            new = filled.save()
            assert new is None or filled.extent_of(new) not in retired
        filled.step()
        store.check()
    held = set(unpack(store.ready_in_retired()))
    assert held <= {*filled.ready, *filled.leased}
    evicted, _, below = store.leave_retired(False, 1000)
    assert not evicted and not below, "no block is on a disk"
    evicted, _, _ = store.leave_retired(True, 1)
    assert len(unpack(evicted)) <= 1
    evicted += store.leave_retired(True, 1000)[0]
    assert set(unpack(evicted)) == held - set(filled.leased)
    assert set(unpack(store.ready_in_retired())) == held & set(filled.leased)
    filled.ready = [one for one in filled.ready if one not in held]
    store.check()
    for block in filled.leased:
        store.unlease(pack(block))
    for block in filled.writing:
        store.commit(pack(block), b"")
    store.leave_retired(True, 1000)
    store.check()
    assert [store.retired_bytes(extent) for extent in sorted(retired)] == [0, 0, 0]
    for slot in before.values():
        extent, _, _, was = struct.unpack("<IIQQ", slot)
        assert generation(filled.tables[extent], slot) > was, "its readers notice that it left"
    left = store.counts()
    assert left["free_bytes"] + sum(left["bytes"].values()) >= left["capacity_bytes"]
    assert left["capacity_bytes"] == 2 * EXTENT_BYTES


def test_an_extent_that_does_not_exist_cannot_be_retired() -> None:
    with pytest.raises(ValueError, match="no such extent"):
        Store().retire(0)
