"""Spaces with different block sizes share an arena without waste."""

import random

import pytest

from kvtier_kernels import Store
from models.policies.native import Lru

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
MIXES = [
    (256 * MIB, (2 * MIB, 3 * MIB)),
    (256 * MIB, (1 * MIB, 5 * MIB // 2)),
    (1 * GIB, (2 * MIB, 3 * MIB)),
    (1 * GIB, (2 * MIB, 31 * MIB // 10)),
    (1 * GIB, (192 * KIB, 2 * MIB)),
    (1 * GIB, (8 * MIB, 12 * MIB)),
    (1 * GIB, (1 * MIB, 3 * MIB, 5 * MIB)),
    (2 * GIB, (2 * MIB, 32 * MIB)),
]


class Arena:
    """A store with an LRU policy, planned as by the catalog."""

    def __init__(self, arena_bytes, sizes):
        self.store, self.lru, self.sizes = Store(), Lru(), sizes
        self.store.add_extent(arena_bytes, bytearray(arena_bytes // 4096 * 8))
        self.spaces = [self.store.add_space([(0, 0, size)], [1]) for size in sizes]

    def save(self, keys, which):
        """Save new keys, evicting the coldest blocks. Returns the number of saved bytes."""
        space, n = self.spaces[which], len(keys) // 32
        for _ in range(100):
            room = self.store.room(space, 0, n)
            if room == n:
                break
            evicted, orphans, _ = self.store.make_room(space, 0, n, self.lru.victims(n - room))
            self.lru.gone(evicted)
            self.lru.demoted(orphans)
        ids, _ = self.store.reserve(space, 0, 0, None, keys, bytes(n))
        assert len(ids) == 4 * n, "everything can be evicted, so there must be room"
        self.store.commit(ids, b"")
        self.lru.added(ids)
        return n * self.sizes[which]


def name(mix):
    arena, sizes = mix
    return f"{arena // MIB}MiB of " + "+".join(f"{size / MIB:.3g}" for size in sizes)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mix", MIXES, ids=name)
def test_at_steady_state_95_percent_of_the_arena_is_ready(mix, seed):
    arena_bytes, sizes = mix
    rnd = random.Random(seed)
    arena = Arena(arena_bytes, sizes)
    saved, least = 0, 1.0
    weights = [1 / size for size in sizes]
    while saved < 8 * arena_bytes:
        if rnd.random() < 0.02:  # the mix of traffic changes slowly
            weights = [rnd.random() ** 2 / size for size in sizes]
        which = rnd.choices(range(len(sizes)), weights)[0]
        n = rnd.randint(1, max(1, min(32, arena_bytes // (16 * sizes[which]))))
        saved += arena.save(rnd.randbytes(32 * n), which)
        if saved > 2 * arena_bytes:
            least = min(least, arena.store.counts()["bytes"]["ready"] / arena_bytes)
    arena.store.check()
    assert least >= 0.95


def test_vacant_slots_of_an_unused_class_are_given_to_others():
    arena = Arena(256 * MIB, (2 * MIB, 32 * MIB))
    rnd = random.Random(1)
    arena.save(rnd.randbytes(32), 1)  # its slab has another slot
    arena.save(rnd.randbytes(32 * 112), 0)
    counts = arena.store.counts()
    assert counts["blocks"]["ready"] == 113
    assert counts["bytes"]["ready"] == 256 * MIB


def test_a_pinned_block_does_not_keep_its_slab_from_the_others():
    arena = Arena(256 * MIB, (2 * MIB, 3 * MIB))
    rnd = random.Random(2)
    for _ in range(4):
        arena.save(rnd.randbytes(32 * 32), 0)
    # One block of each slab of 32 MiB stays leased.
    pinned = b"".join(arena.lru.victims(128)[4 * i : 4 * i + 4] for i in range(5, 128, 16))
    arena.store.lease(pinned)
    arena.lru.held(pinned)
    for _ in range(60):
        arena.save(rnd.randbytes(32 * 8), 1)
    counts = arena.store.counts()
    assert len(arena.store.slots(pinned)) == 24 * 8
    assert counts["bytes"]["ready"] >= 0.85 * 256 * MIB
    for _ in range(60):
        arena.save(rnd.randbytes(32 * 8), 0)
    assert arena.store.counts()["bytes"]["ready"] >= 0.95 * 256 * MIB
    arena.store.check()


class Held:
    """A full arena of small blocks, some of them leased; saves may be refused here."""

    def __init__(self, arena_bytes, held, sizes):
        self.store, self.lru = Store(), Lru()
        self.store.add_extent(arena_bytes, bytearray(arena_bytes // 4096 * 8))
        self.spaces = [self.store.add_space([(0, 0, size)], [1]) for size in sizes]
        self.rnd = random.Random(len(held))
        self.blocks = arena_bytes // sizes[0]
        assert self.save(0, self.blocks) == self.blocks
        ids = self.lru.victims(self.blocks)
        self.leased = b"".join(ids[4 * i : 4 * i + 4] for i in held)
        self.store.lease(self.leased)
        self.lru.held(self.leased)

    def ready(self):
        return self.store.counts()["blocks"]["ready"]

    def save(self, which, n):
        """Save as many of n new blocks as the store has room for, as the catalog does."""
        space, victims = self.spaces[which], b""
        while (short := n - self.store.room(space, 0, n)) > 0:
            evicted, orphans, _ = self.store.make_room(space, 0, n, victims)
            self.lru.gone(evicted)
            self.lru.demoted(orphans)
            if victims and not evicted:
                break
            victims = self.lru.victims(short)
            if not victims:
                break
        ids, _ = self.store.reserve(space, 0, 0, None, self.rnd.randbytes(32 * n), bytes(n))
        self.store.commit(ids, b"")
        self.lru.added(ids)
        self.store.check()
        return len(ids) // 4


def test_a_save_without_room_because_of_held_blocks_evicts_nothing():
    arena = Held(16 * MIB, range(16, 256, 32), [64 * KIB, 4 * MIB])
    assert arena.save(1, 2) == 0
    assert arena.ready() == 256
    assert arena.save(0, 248) == 248


def test_a_save_with_too_little_room_evicts_only_what_it_can_use():
    arena = Held(16 * MIB, [16, 80, 144], [64 * KIB, 4 * MIB])
    assert arena.save(1, 4) == 1
    assert arena.ready() == 256 - 64 + 1


def test_a_block_longer_than_any_extent_evicts_nothing():
    arena = Held(4 * MIB, [], [64 * KIB, 5 * MIB])
    assert arena.save(1, 1) == 0
    assert arena.ready() == 64


@pytest.mark.parametrize("seed", range(6))
def test_memory_around_held_blocks_stays_usable(seed):
    rnd = random.Random(seed)
    held = sorted(rnd.sample(range(256), rnd.randint(1, 8)))
    arena = Held(16 * MIB, held, [64 * KIB, 4 * MIB, 48 * KIB, MIB])
    for which in [1, *rnd.choices(range(4), k=6)]:
        arena.save(which, rnd.choice([1, 2, 20, 300]))
    # Large blocks, some of them held, are saved and evicted around the small ones.
    arena.save(1, 4)
    big = arena.lru.victims(1000)
    arena.store.lease(big)
    arena.lru.held(big)
    arena.save(0, 256)
    arena.store.unlease(big)
    arena.lru.freed(big)
    # A held block overlaps at most two slots if layouts have different phases.
    for _ in range(2):
        assert arena.save(0, 256) >= 256 - 2 * len(held) - 4
    arena.store.unlease(arena.leased)
    arena.lru.freed(arena.leased)
    arena.save(0, 256)
    assert arena.save(0, 256) >= 250
