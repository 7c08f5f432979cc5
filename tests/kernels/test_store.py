"""What the store promises."""

import struct

import pytest

from kvtier_kernels import Store
from support.stores import (
    FULL,
    PAGE,
    STATE,
    WINDOW,
    generation,
    key,
    keys,
    open_arena,
    pack,
    save,
    unpack,
)

MIB = 1 << 20


@pytest.fixture
def store():
    return Store()


def matched(store, space, keys):
    return store.match(space, keys)[0]


def test_a_block_is_matched_once_it_is_committed(store):
    open_arena(store)
    space = store.add_space([(FULL, 0, PAGE)], [1])
    ids, _ = store.reserve(space, 0, 0, None, keys(1, 2, 3), bytes(3))
    assert matched(store, space, keys(1, 2, 3)) == 0
    store.commit(ids[:8], b"")
    assert matched(store, space, keys(1, 2, 3)) == 2
    assert store.probe(space, 0, 0, keys(1, 2, 3, 4)) == bytes([1, 1, 2, 0])
    blocks = dict.fromkeys(("doomed", "quarantined", "promoting"), 0)
    assert store.counts()["blocks"] == {"writing": 1, "ready": 2} | blocks


@pytest.mark.parametrize(
    "order", [range(1, 41), range(40, 0, -1), [*range(2, 41, 2), *range(1, 41, 2)]]
)
def test_a_match_ends_at_the_first_key_that_is_missing_whatever_the_order_of_the_saves(
    store, order
):
    open_arena(store, 128 * PAGE)
    other, space = (store.add_space([(FULL, 0, PAGE)], [1]) for _ in range(2))
    ids = {number: save(store, space, [number]) for number in order}
    save(store, other, [*range(101, 141)])
    chain = list(range(1, 41))
    assert store.match(space, keys(*chain, 101))[:2] == (
        40,
        40,
    )  # the next record is the other space's
    for ready in range(40):
        for missing in (999, 100 + chain[ready]):
            asked = [*chain[:ready], missing, *chain[ready + 1 :]]
            found = store.match(space, keys(*asked))
            assert found[:2] == (ready, ready)
            assert [part[3] for part in found[2]] == (
                [b"".join(ids[one] for one in chain[:ready])] if ready else []
            )
    writing, _ = store.reserve(space, 0, 0, None, keys(41), bytes(1))
    assert store.match(space, keys(*chain, 41))[:2] == (40, 40)
    store.commit(writing, b"")
    store.forget(ids[20])
    assert store.match(space, keys(*chain, 41))[:2] == (19, 19)
    save(store, space, [20])
    assert store.match(space, keys(*chain, 41))[:2] == (41, 41)


def test_spaces_share_no_keys(store):
    open_arena(store)
    one, other = (store.add_space([(FULL, 0, PAGE)], [1]) for _ in range(2))
    save(store, one, [1, 2])
    assert matched(store, one, keys(1, 2)) == 2
    assert matched(store, other, keys(1, 2)) == 0


def test_the_number_of_an_empty_space_is_reused(store):
    open_arena(store)
    one, other = (store.add_space([(FULL, 0, PAGE)], [1]) for _ in range(2))
    ids = save(store, one, [1, 2])
    save(store, other, [1, 2])
    assert not store.drop_space(one)
    store.forget(ids)
    assert store.drop_space(one)
    for call in (store.match, store.resident, store.states):
        with pytest.raises(IndexError):
            call(one, key(1))
    with pytest.raises(IndexError):
        store.drop_space(one)
    assert store.add_space([(FULL, 0, 5000), (STATE, 0, 300)], [2, 1]) == one
    store.check()
    assert matched(store, one, keys(1, 2)) == 0
    assert matched(store, other, keys(1, 2)) == 2
    assert [store.slot_bytes(one, group) for group in (0, 1)] == [2 * PAGE, PAGE]


def test_a_block_has_the_same_name_by_its_key_as_by_its_id(store):
    open_arena(store)
    store.add_space([(FULL, 0, PAGE)], [1])
    space = store.add_space([(FULL, 0, PAGE), (FULL, 0, PAGE)], [2, 1])
    for place, (group, shard) in enumerate([(0, 0), (0, 1), (1, 0)]):
        ids, _ = store.reserve(space, group, shard, None, keys(1, 2), bytes(2))
        assert store.names(ids) == store.names_of_keys(keys(1, 2), place)
    assert store.names_of_keys(keys(1), 0) != store.names_of_keys(keys(1), 1)


def test_removed_spaces_leave_no_memory():
    store = Store()
    open_arena(store, 2 * MIB)
    for turn in range(2000):
        groups = [(FULL, 0, PAGE + 64 * (turn * 8 + group)) for group in range(8)]
        space = store.add_space(groups, [turn % 50 + 1] * 8)
        save(store, space, [turn])
        assert not store.drop_space(space)
        store.forget(store.resident(space, key(turn)))
        assert store.drop_space(space)
        if turn == 100:
            before = store.memory_bytes()
    assert store.memory_bytes() < before + 10_000


def test_sizes_of_blocks_are_bounded(store):
    open_arena(store)
    for i in range(16):
        store.add_space([(FULL, 0, PAGE * (64 * i + j + 1)) for j in range(64)], [1] * 64)
    with pytest.raises(ValueError, match="sizes"):
        store.add_space([(FULL, 0, PAGE), (FULL, 0, 1025 * PAGE)], [1, 2])
    assert store.add_space([(FULL, 0, PAGE)], [1]) == 16
    assert store.drop_space(3)
    assert store.add_space([(FULL, 0, PAGE), (FULL, 0, 1025 * PAGE)], [1, 2]) == 3
    store.check()


def test_a_block_is_ready_when_all_its_shards_are(store):
    open_arena(store)
    space = store.add_space([(FULL, 0, PAGE)], [2])
    save(store, space, [1, 2], shard=0)
    assert matched(store, space, keys(1, 2)) == 0
    save(store, space, [1], shard=1)
    assert matched(store, space, keys(1, 2)) == 1


def test_a_window_needs_only_its_trailing_blocks(store):
    open_arena(store)
    space = store.add_space([(FULL, 0, PAGE), (WINDOW, 2, PAGE)], [1, 1])
    save(store, space, [1, 2, 3, 4], group=0)
    assert matched(store, space, keys(1, 2, 3, 4)) == 0
    save(store, space, [3, 4], group=1, parent=2)
    assert matched(store, space, keys(1, 2, 3, 4)) == 4
    assert matched(store, space, keys(1, 2, 3)) == 0


def test_a_match_names_the_blocks_that_it_needs(store):
    open_arena(store)
    space = store.add_space([(FULL, 0, PAGE), (WINDOW, 2, PAGE), (STATE, 0, PAGE)], [2, 1, 1])
    ids = [save(store, space, [1, 2, 3, 4], group, shard) for group, shard in
           [(0, 1), (2, 0), (0, 0), (1, 0)]]  # fmt: skip
    parts = [(0, 0, 0, ids[2]), (0, 1, 0, ids[0]), (1, 0, 2, ids[3][8:]), (2, 0, 3, ids[1][12:])]
    assert store.match(space, keys(1, 2, 3, 4, 5)) == (4, 4, parts)
    assert store.match(space, keys(5)) == (0, 0, [])


def test_the_blocks_of_a_key_in_all_groups_are_named_once(store):
    open_arena(store)
    space = store.add_space([(FULL, 0, PAGE), (STATE, 0, PAGE)], [2, 1])
    first, second = save(store, space, [1, 2]), save(store, space, [2, 3], group=1)
    store.reserve(space, 0, 1, None, key(2), bytes(1))
    everywhere = store.resident(space, keys(2, 9, 1, 2, 3))
    assert everywhere == first[4:] + second[:4] + first[:4] + second[4:]
    assert store.states(space, key(2)) == bytes([1, 2, 1])
    assert store.states(space, key(9)) == bytes(3)


def test_a_window_longer_than_the_prefix_needs_all_of_it(store):
    open_arena(store)
    space = store.add_space([(WINDOW, 3, PAGE)], [1])
    save(store, space, [1, 2])
    assert matched(store, space, keys(1, 2)) == 2
    assert matched(store, space, keys(9, 1, 2)) == 0


def test_a_state_is_restored_from_the_last_block_that_has_one(store):
    open_arena(store)
    space = store.add_space([(FULL, 0, PAGE), (STATE, 0, 5000)], [1, 1])
    save(store, space, [1, 2, 3], group=0)
    assert store.make_room(space, 1, 1, b"") == (
        b"",
        b"",
        b"",
    )  # vacant slots change their class
    save(store, space, [2], group=1, parent=1)
    assert matched(store, space, keys(1, 2, 3)) == 2


def test_reserve_grants_the_leading_keys_if_room_is_short(store):
    open_arena(store, 4 * PAGE)
    space = store.add_space([(FULL, 0, PAGE)], [1])
    assert store.room(space, 0, 100) == 4
    ids, slots = store.reserve(space, 0, 0, None, keys(*range(6)), bytes(6))
    assert (len(ids), len(slots)) == (4 * 4, 4 * 24)
    assert store.room(space, 0, 100) == 0


def test_a_probe_refuses_a_key_that_is_given_twice(store):
    open_arena(store)
    space = store.add_space([(FULL, 0, PAGE)], [1])
    save(store, space, [1])
    for names in ([1, 1], [2, 3, 2], [*range(1000), 999]):
        with pytest.raises(ValueError):
            store.probe(space, 0, 0, keys(*names))
    assert store.probe(space, 0, 0, b"") == b""


def test_neighbours_of_a_chain_get_adjacent_slots(store):
    open_arena(store)
    space = store.add_space([(FULL, 0, PAGE)], [1])
    _, slots = store.reserve(space, 0, 0, None, keys(*range(5)), bytes(5))
    assert [slot[2] for slot in struct.iter_unpack("<IIQQ", slots)] == [i * PAGE for i in range(5)]


def test_reserve_grants_nothing_if_a_key_exists(store):
    open_arena(store)
    space = store.add_space([(FULL, 0, PAGE)], [1])
    save(store, space, [1])
    for names in ([2, 1], [2, 2]):
        with pytest.raises(ValueError):
            store.reserve(space, 0, 0, None, keys(*names), bytes(2))
    store.check()
    assert store.counts()["nodes"] == 1
    assert store.counts()["blocks"]["writing"] == 0


def test_a_generation_changes_when_its_block_leaves(store):
    table = open_arena(store)
    space = store.add_space([(FULL, 0, PAGE)], [1])
    for leave in (store.abort, lambda ids: (store.quarantine(ids), store.gone(ids))):
        ids, slot = store.reserve(space, 0, 0, None, key(1), bytes(1))
        assert generation(table, slot) == struct.unpack("<IIQQ", slot)[3]
        leave(ids)
        assert generation(table, slot) == struct.unpack("<IIQQ", slot)[3] + 1
    for leave in (store.evict, store.forget):
        ids = save(store, space, [1])
        slot = store.slots(ids)
        leave(ids)
        assert generation(table, slot) == struct.unpack("<IIQQ", slot)[3] + 1


def test_a_used_generation_table_continues_from_its_values(store):
    table = bytearray(struct.pack("<4Q", 7, 0, 9, 0))
    store.add_extent(4 * PAGE, table)
    assert struct.unpack("<4Q", table) == (7, 1, 9, 1)


def test_evict_refuses_leased_blocks(store):
    open_arena(store)
    space = store.add_space([(FULL, 0, PAGE)], [1])
    ids = save(store, space, [1, 2])
    store.lease(ids[4:])
    with pytest.raises(ValueError):
        store.evict(ids)
    assert matched(store, space, keys(1, 2)) == 2
    assert store.unlease(ids[4:]) == (ids[4:], b"")
    store.evict(ids)
    assert store.counts()["nodes"] == 0


def test_make_room_skips_leased_blocks(store):
    open_arena(store, 4 * PAGE)
    space = store.add_space([(FULL, 0, PAGE)], [1])
    ids = save(store, space, [1, 2, 3, 4])
    store.lease(ids[:8])
    evicted, _, _ = store.make_room(space, 0, 3, ids)
    assert evicted == ids[8:]
    assert store.room(space, 0, 3) == 2


def test_names_of_evicted_blocks_are_returned_on_request(store):
    open_arena(store, 4 * PAGE)
    space = store.add_space(
        [(FULL, 0, PAGE)],
        [
            1,
        ],
    )
    ids = save(store, space, [1, 2, 3, 4])
    store.make_room(space, 0, 1, ids[12:])
    assert store.take_evicted() == b""
    store.note_evicted(True)
    names = store.identities(ids[4:12])
    store.make_room(space, 0, 3, ids[4:12])
    taken = store.take_evicted()
    assert (taken[:48], taken[80:128]) == (
        names[:12] + bytes(4) + key(2),
        names[80:92] + bytes(4) + key(3),
    )
    assert len(taken) == 160 and store.take_evicted() == b""


def test_a_forgotten_block_is_removed_with_its_last_lease(store):
    open_arena(store)
    space = store.add_space([(FULL, 0, PAGE)], [1])
    ids = save(store, space, [1, 2])
    for _ in range(2):
        store.lease(ids[:4])
    assert store.forget(ids) == (ids[4:], b"", b"")
    assert matched(store, space, keys(1)) == 0
    assert store.probe(space, 0, 0, keys(1)) == bytes([3])
    assert store.unlease(ids[:4]) == (b"", b"")
    assert store.unlease(ids[:4]) == (b"", ids[:4])
    assert store.counts()["nodes"] == 0


def test_leases_saturate_instead_of_wrapping(store):
    open_arena(store)
    space = store.add_space([(FULL, 0, PAGE)], [1])
    ids = save(store, space, [1, 2])
    for _ in range(65534):
        store.lease(ids[:4])
    with pytest.raises(OverflowError):
        store.lease(ids[4:] + ids[:4])
    store.unlease(ids[:4] * 65534)
    store.evict(ids)  # the second lease was undone


def test_blocks_below_a_gap_are_orphans_until_the_gap_is_filled(store):
    open_arena(store)
    space = store.add_space([(FULL, 0, PAGE)], [1])
    ids = save(store, space, [1, 2, 3])
    branch = save(store, space, [4], parent=2)
    store.lease(branch)
    assert set(unpack(store.evict(ids[:4]))) == set(unpack(ids[4:]))
    assert store.evict(ids[4:8]) == b""  # the blocks below it were already cut off
    assert store.counts()["ghosts"] == 2
    save(store, space, [1, 2])
    assert matched(store, space, keys(1, 2, 3)) == 3
    assert store.evict(store.present(space, 0, 0, key(2))) == ids[8:]


def test_a_ghost_is_removed_with_its_last_child(store):
    open_arena(store)
    space = store.add_space([(FULL, 0, PAGE)], [1])
    save(store, space, [2], parent=1)
    assert store.counts()["ghosts"] == 1
    save(store, space, [1])
    assert store.counts()["ghosts"] == 0
    store.evict(store.present(space, 0, 0, key(1)))
    assert store.counts()["ghosts"] == 1
    store.evict(store.present(space, 0, 0, key(2)))
    assert (store.counts()["nodes"], store.counts()["ghosts"]) == (0, 0)


@pytest.fixture
def frugal():
    """It keeps no ghost that a single child hangs on."""
    return Store(0)


def test_there_are_at_most_as_many_ghosts_as_blocks(frugal):
    open_arena(frugal)
    space = frugal.add_space([(FULL, 0, PAGE)], [1])
    ids = save(frugal, space, range(40))
    save(frugal, space, [100], parent=19)
    frugal.forget(ids[:-4])
    frugal.check()
    assert frugal.counts()["nodes"] - frugal.counts()["ghosts"] == 2
    assert frugal.counts()["ghosts"] <= 2
    frugal.forget(frugal.present(space, 0, 0, key(100)))
    assert (frugal.counts()["nodes"], frugal.counts()["ghosts"]) == (1, 0)


def test_a_block_is_linked_again_when_its_removed_parent_is_saved(frugal):
    open_arena(frugal)
    space = frugal.add_space([(FULL, 0, PAGE)], [1])
    ids = save(frugal, space, [1, 2, 3, 4])
    frugal.forget(ids[4:8])
    assert unpack(frugal.ancestors(space, 0, 0, key(4), 9)) == unpack(ids)[:1:-1]
    for parent, names, statuses in ((1, [2, 3], [0, 1]), (1, [2, 3], [1, 1])):
        new, _ = frugal.reserve(space, 0, 0, key(parent), keys(*names), bytes(statuses))
        frugal.commit(new, b"")
        frugal.check()
    assert len(frugal.ancestors(space, 0, 0, key(4), 9)) == 4 * 4
    assert matched(frugal, space, keys(1, 2, 3, 4)) == 4
    # The linked blocks can be cut off again, and are reported again.
    assert set(unpack(frugal.evict(frugal.present(space, 0, 0, key(2))))) == set(unpack(ids)[2:])


def test_an_unknown_parent_makes_no_ghost_beyond_the_limit(frugal):
    open_arena(frugal)
    space = frugal.add_space([(FULL, 0, PAGE)], [1])
    save(frugal, space, [2, 3], parent=1)
    assert frugal.counts()["ghosts"] == 0
    save(frugal, space, [1])
    frugal.reserve(space, 0, 0, key(1), keys(2), bytes([1]))
    frugal.check()
    assert len(frugal.ancestors(space, 0, 0, key(3), 9)) == 3 * 4
    frugal.reserve(space, 0, 0, None, keys(2), bytes([1]))  # a linked block stays where it is
    assert len(frugal.ancestors(space, 0, 0, key(3), 9)) == 3 * 4


def test_remains_of_long_chains_use_memory_only_for_their_blocks():
    store = Store()
    open_arena(store, 20_001 * PAGE)
    space = store.add_space([(FULL, 0, PAGE)], [1])
    lasts = b""
    for turn in range(10):
        names = [f"{turn} {i}" for i in range(20_000)]
        ids, _ = store.reserve(space, 0, 0, None, keys(*names), bytes(20_000))
        store.commit(ids, b"")
        store.forget(ids[:-4])
        lasts += ids[-4:]
    assert store.counts()["ghosts"] <= 65536 + 10
    store.forget(lasts)
    assert store.counts()["nodes"] == 0


def test_one_call_removes_a_limited_number_of_ghosts():
    """A chain of ghosts with a leaf each: the end of one leaf would remove all of them."""
    store, n = Store(0), 100_000
    open_arena(store, 3 * n * PAGE)
    space = store.add_space([(FULL, 0, PAGE)], [1])
    spine, _ = store.reserve(space, 0, 0, None, keys(*range(n)), bytes(n))
    store.commit(spine, b"")
    leaves = [store.reserve(space, 0, 0, key(i), key(f"leaf {i}"), bytes(1))[0] for i in range(n)]
    store.commit(b"".join(leaves), b"")
    store.forget(spine)  # the last one has only a leaf, so it is removed, then the one above, ...
    assert store.counts()["ghosts"] == n - 65537
    store.forget(leaves[n - 1])
    assert store.counts()["ghosts"] == 0
    store.forget(b"".join(leaves[: n - 1]))
    assert store.counts()["nodes"] == 0


def test_wrong_parents_never_form_a_cycle(store):
    open_arena(store)
    space = store.add_space([(FULL, 0, PAGE)], [1])
    save(store, space, [1], parent=1)
    save(store, space, [3], parent=2)
    save(store, space, [4], parent=3)
    save(store, space, [2], parent=4)  # 2 is above 3, above 4
    store.check()
    assert unpack(store.ancestors(space, 0, 0, key(4), 100)) == unpack(
        store.present(space, 0, 0, keys(4, 3, 2))
    )


def test_ancestors_are_returned_nearest_first(store):
    open_arena(store)
    space = store.add_space([(FULL, 0, PAGE)], [1])
    ids = unpack(save(store, space, [1, 2, 3]))
    assert unpack(store.ancestors(space, 0, 0, key(3), 2)) == [ids[2], ids[1]]
    assert store.ancestors(space, 0, 0, key(9), 2) == b""


def test_a_chain_of_a_hundred_thousand_needs_no_recursion():
    store = Store()
    open_arena(store, 100_000 * PAGE)
    space = store.add_space([(FULL, 0, PAGE)], [1])
    ids, _ = store.reserve(space, 0, 0, None, keys(*range(100_000)), bytes(100_000))
    store.commit(ids, b"")
    assert matched(store, space, keys(*range(100_000))) == 100_000
    orphans = store.evict(ids[:4])
    assert len(orphans) // 4 == 65536  # a walk is bounded
    store.evict(ids[4:])
    store.evict(b"")  # the next call continues the work
    assert store.counts()["nodes"] == 0


def test_a_match_ends_where_a_long_chain_was_cut_off(store):
    open_arena(store)
    one, other = (store.add_space([(FULL, 0, PAGE)], [1]) for _ in range(2))
    chain = keys(*range(30))
    ids = save(store, one, range(30))
    assert matched(store, other, chain) == 0
    save(store, other, range(12))
    store.evict(ids[4 * 20 :])
    assert matched(store, one, chain) == 20
    assert matched(store, other, chain) == 12
    assert matched(store, one, chain[: 32 * 15] + chain[: 32 * 15]) == 30
    save(store, other, range(12, 20), parent=11)  # in the records that the chain used
    assert matched(store, one, chain) == 20
    assert matched(store, other, chain) == 20


def test_checksums_are_kept_and_a_reused_block_has_none(store):
    open_arena(store)
    space = store.add_space([(FULL, 0, PAGE)], [1])
    ids, _ = store.reserve(space, 0, 0, None, keys(1, 2), bytes(2))
    store.commit(ids[:4], b"0123456789abcdef")
    store.commit(ids[4:], b"")
    assert store.checksums(ids) == (b"0123456789abcdef" + bytes(16), bytes([1, 0]))
    store.evict(ids)
    assert store.checksums(save(store, space, [3, 4]))[1] == bytes(2)


def test_a_slab_is_reshaped_while_a_leased_block_lives_on_in_it(store):
    table = open_arena(store, 12 * MIB)
    small = store.add_space([(FULL, 0, 2 * MIB)], [1])
    large = store.add_space([(FULL, 0, 3 * MIB)], [1])
    ids = save(store, small, range(6))
    leased = ids[8:12]
    slot = store.slots(leased)
    store.lease(leased)
    evicted, _, _ = store.make_room(large, 0, 4, ids)
    assert set(unpack(evicted)) == set(unpack(ids)) - set(unpack(leased))
    save(store, large, range(10, 13))
    store.check()
    assert store.room(large, 0, 4) == 0
    assert store.slots(leased) == slot
    assert generation(table, slot) == struct.unpack("<IIQQ", slot)[3]
    store.unlease(leased)
    store.evict(leased)
    assert store.room(large, 0, 4) == 1


@pytest.mark.parametrize(
    ("block_bytes", "pitch"),
    [(1, 4096), (4096, 4096), (5000, 8192), (8100, 8192), (131_073, 135_168), (131_000, 131_072)],
)
def test_slots_are_whole_pages(store, block_bytes, pitch):
    open_arena(store, 256 * PAGE)
    space = store.add_space([(FULL, 0, block_bytes)], [1])
    _, slots = store.reserve(space, 0, 0, None, keys(1, 2), bytes(2))
    assert [slot[2] for slot in struct.iter_unpack("<IIQQ", slots)] == [0, pitch]


def test_an_extent_may_be_added_later(store):
    open_arena(store, 2 * PAGE)
    space = store.add_space([(FULL, 0, PAGE)], [1])
    save(store, space, [1, 2])
    assert store.room(space, 0, 9) == 0
    assert store.add_extent(3 * PAGE, bytearray(24)) == 1
    assert store.room(space, 0, 9) == 3


def test_bad_arguments_raise_and_change_nothing(store):
    open_arena(store)
    space = store.add_space([(FULL, 0, PAGE)], [1])
    ids = save(store, space, [1])
    before = store.counts()
    with pytest.raises(ValueError):
        store.match(space, b"short")
    with pytest.raises(IndexError):
        store.match(space + 1, key(1))
    with pytest.raises(IndexError):
        store.room(space, 1, 1)
    with pytest.raises(IndexError):
        store.probe(space, 0, 1, key(1))
    with pytest.raises(ValueError):
        store.reserve(space, 0, 0, None, keys(2), b"")
    with pytest.raises(ValueError):
        store.reserve(space, 0, 0, b"short", keys(2), bytes(1))
    with pytest.raises(ValueError):
        store.commit(ids, b"")
    with pytest.raises(ValueError):
        store.make_room(space, 0, 100, pack(77))
    for stale in (77, 2**31, 2**32 - 1):
        for call in (store.abort, store.evict, store.forget, store.lease, store.unlease):
            with pytest.raises(ValueError):
                call(ids + pack(stale))
        with pytest.raises(ValueError):
            store.slots(pack(stale))
    with pytest.raises(ValueError):
        store.evict(ids + ids)
    for bad in ([], [(3, 0, 1)], [(FULL, 0, 0)], [(WINDOW, 0, 1)], [(FULL, 0, 1 << 50)]):
        with pytest.raises(ValueError):
            store.add_space(bad, [1] * len(bad))
    with pytest.raises(ValueError):
        store.add_extent(2 * PAGE, bytearray(8))
    with pytest.raises(ValueError, match="generations"):
        store.add_extent(PAGE, bytes(8))
    assert store.counts() == before
    store.check()


@pytest.mark.parametrize("call", ["forget", "lease"])
def test_a_batch_that_names_an_id_twice_is_refused(store, call):
    open_arena(store)
    space = store.add_space([(FULL, 0, PAGE)], [1])
    ids = save(store, space, [1, 2, 3])
    for batch in (ids[:4] * 2, ids + ids, ids[8:] + ids[:8] + ids[8:]):
        with pytest.raises(ValueError):
            getattr(store, call)(batch)
    assert matched(store, space, keys(1, 2, 3)) == 3
    store.evict(ids)


@pytest.mark.parametrize(
    ("groups", "shards"),
    [
        ([(FULL, 0, PAGE)], [(1 << 22) + 1]),
        ([(FULL, 0, PAGE)] * 2, [1 << 23, (1 << 23) + 1]),
        ([(FULL, 0, PAGE)], [1 << 64]),
        ([(WINDOW, 1 << 32, PAGE)], [1]),
        ([(WINDOW, 1 << 64, PAGE)], [1]),
        ([(FULL, 0, 1 << 64)], [1]),
        ([(FULL, 0, -(1 << 64))], [1]),
    ],
)
def test_a_space_with_too_many_groups_and_shards_is_refused(store, groups, shards):
    with pytest.raises(ValueError):
        store.add_space(groups, shards)
    assert store.add_space([(FULL, 0, PAGE)], [1]) == 0
