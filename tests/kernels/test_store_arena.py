"""Spaces of different block sizes share an arena without wasting it."""

import random

import pytest

from kvtier_kernels import Lru, Store

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
    """A store with an LRU policy, planned as the catalog does it."""

    def __init__(self, arena_bytes, sizes):
        self.store, self.lru, self.sizes = Store(), Lru(), sizes
        self.store.add_extent(arena_bytes, bytearray(arena_bytes // 4096 * 8))
        self.spaces = [self.store.add_space([(0, 0, size)], [1]) for size in sizes]

    def save(self, keys, which):
        """Saves new keys, evicting the coldest; returns the bytes that it saved."""
        space, n = self.spaces[which], len(keys) // 32
        for _ in range(100):
            room = self.store.room(space, 0, n)
            if room == n:
                break
            evicted, orphans = self.store.make_room(space, 0, n, self.lru.victims(n - room))
            self.lru.removed(evicted)
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
        if rnd.random() < 0.02:  # the mix of traffic drifts
            weights = [rnd.random() ** 2 / size for size in sizes]
        which = rnd.choices(range(len(sizes)), weights)[0]
        n = rnd.randint(1, max(1, min(32, arena_bytes // (16 * sizes[which]))))
        saved += arena.save(rnd.randbytes(32 * n), which)
        if saved > 2 * arena_bytes:
            least = min(least, arena.store.counts()["bytes"]["ready"] / arena_bytes)
    arena.store.check()
    assert least >= 0.95


def test_a_class_that_nobody_wants_any_more_gives_its_vacant_slots():
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
    arena.lru.removed(pinned)
    for _ in range(60):
        arena.save(rnd.randbytes(32 * 8), 1)
    counts = arena.store.counts()
    assert len(arena.store.slots(pinned)) == 24 * 8
    assert counts["bytes"]["ready"] >= 0.85 * 256 * MIB
    for _ in range(60):
        arena.save(rnd.randbytes(32 * 8), 0)
    assert arena.store.counts()["bytes"]["ready"] >= 0.95 * 256 * MIB
    arena.store.check()
