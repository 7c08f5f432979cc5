"""What the store promises of blocks in a tier below memory."""

from __future__ import annotations

import random
import struct
import time

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

FRAME = struct.Struct("<IIIBBBB")
ROW = struct.Struct("<32s32sIHHIIHHQQQ16sI")


@pytest.fixture
def store():
    return Store()


def digest(name):
    return key(name)[:16]


def write(store, ids, segment=1, first_page=1, codec=0, flags=1):
    """Give each block a frame, at consecutive positions."""
    frames = [
        FRAME.pack(segment, first_page + 2 * at, PAGE, codec, 1, flags, 0)
        for at in range(len(ids) // 4)
    ]
    sums = b"".join(digest(i) for i in unpack(ids))
    late = store.framed(1, ids, b"".join(frames), sums)
    store.check()
    return late


def move(store, one, segment):
    """Move its frame into another segment."""
    before, _ = store.frames(one)
    assert store.moved(one, before, FRAME.pack(segment, 1, *FRAME.unpack(before)[2:])) == b""


def saved_cold(store, space, names, **where):
    """A chain that is only on disk."""
    ids = save(store, space, names)
    assert write(store, ids, **where) == b""
    assert store.evict(ids) == b""
    store.check()
    return ids


def lengths(store, space, named):
    return store.match(space, named)[:2]


def row(name, parent=b"", group=0, shard=0, page=1, codec=0, payload=PAGE, header_pages=1, flags=0):
    return ROW.pack(
        key(name), parent, 99, group, shard, page, 2, header_pages, codec, payload, PAGE, 1,
        digest(name), bool(parent) | flags,
    )  # fmt: skip


@pytest.fixture
def plain(store):
    open_arena(store)
    return store.add_space([(FULL, 0, PAGE)], [1])


def test_a_block_with_a_frame_stays_on_disk_when_it_is_evicted(store, plain):
    free = store.counts()["free_bytes"]
    ids = saved_cold(store, plain, [1, 2, 3])
    counts = store.counts()
    assert (counts["below"], counts["framed_bytes"]) == ([3, 0, 0], 3 * 2 * PAGE)
    assert counts["blocks"]["ready"] == 0 and counts["free_bytes"] == free
    assert store.match(plain, keys(1, 2, 3, 4)) == (0, 3, [])
    assert store.probe(plain, 0, 0, keys(1, 4)) == bytes([1, 0])
    assert store.states(plain, key(1)) == bytes([17])
    assert store.resident(plain, keys(1, 2, 3)) == ids
    assert store.present(plain, 0, 0, keys(1, 2, 3)) == b""
    with pytest.raises(ValueError):
        store.slots(ids)
    with pytest.raises(ValueError):
        store.lease(ids)


def test_the_place_of_a_block_is_the_number_of_a_tier(store, plain):
    ids = save(store, plain, [1, 2])
    frames = [FRAME.pack(segment, 1, PAGE, 0, 1, 1, 0) for segment in (1, 2)]
    for tier in (0, 4):
        with pytest.raises(ValueError):
            store.framed(tier, ids[:4], frames[0], digest(1))
        with pytest.raises(ValueError):
            store.restore(tier, plain, row(3), 3)
    assert store.framed(1, ids[:4], frames[0], digest(1)) == b""
    assert store.framed(3, ids[4:], frames[1], digest(2)) == b""
    store.evict(ids)
    store.check()
    assert store.counts()["below"] == [1, 0, 1]
    assert [store.states(plain, key(name)) for name in (1, 2)] == [b"\x11", b"\x13"]
    assert store.missing(plain, keys(1, 2), 2) == [(0, 0, ids, b"")]
    # A frame that is restored later is the newer one, wherever it is.
    assert store.restore(2, plain, row(2, key(1)), 3)[0] == 0
    store.check()
    assert store.counts()["below"] == [1, 1, 0]
    assert store.promote(ids)[0] == ids
    assert store.counts()["below"] == [0, 0, 0]
    assert store.unpromoted(ids[:4]) == (b"", b"")
    assert store.promoted(ids[4:]) == (ids[4:], b"")
    assert store.states(plain, key(1)) == b"\x11"
    store.evict(ids[4:])
    assert store.counts()["below"] == [1, 1, 0]
    store.check()


def test_make_room_returns_the_blocks_that_stay_on_disk(store, plain):
    clean, dirty = save(store, plain, [1, 2]), save(store, plain, [3, 4])
    write(store, clean)
    evicted, orphans, cold = store.make_room(plain, 0, 64, clean + dirty)
    assert (evicted, orphans, cold) == (clean + dirty, b"", clean)
    assert store.counts()["below"][0] == 2
    store.check()


def test_children_of_a_block_on_disk_are_not_orphans(store, plain):
    ids = save(store, plain, [1, 2, 3])
    write(store, ids[:4])
    assert store.evict(ids[:4]) == b""
    assert store.match(plain, keys(1, 2, 3)) == (0, 3, [])
    store.check()
    freed, orphans = store.drop_segment(1)
    assert (freed, set(unpack(orphans))) == (ids[:4], set(unpack(ids[4:])))
    assert lengths(store, plain, keys(1, 2, 3)) == (0, 0)
    store.check()


def test_a_promoted_block_is_read_into_a_new_slot_and_ready_again(store):
    table = open_arena(store)
    space = store.add_space([(FULL, 0, PAGE)], [1])
    ids = save(store, space, [1, 2])
    old = store.slots(ids)
    write(store, ids)
    store.evict(ids)
    assert store.missing(space, keys(1, 2), 2) == [(0, 0, ids, b"")]
    taken, slots = store.promote(ids)
    assert taken == ids and slots == store.slots(ids)
    assert generation(table, old[:24]) > struct.unpack("<IIQQ", old[:24])[3]
    assert generation(table, slots[:24]) == struct.unpack("<IIQQ", slots[:24])[3]
    assert store.states(space, key(1)) == bytes([6])
    assert store.missing(space, keys(1, 2), 2) == [(0, 0, b"", ids)]
    assert lengths(store, space, keys(1, 2)) == (0, 2)
    frames, sums = store.frames(ids)
    assert len(frames) == 32 and sums == b"".join(map(digest, unpack(ids)))
    assert store.promoted(ids) == (ids, b"")
    assert lengths(store, space, keys(1, 2)) == (2, 2)
    assert store.dirty(ids) == b""
    store.check()


def test_the_leading_blocks_are_promoted_if_room_is_short(store):
    open_arena(store, 4 * PAGE)
    space = store.add_space([(FULL, 0, PAGE)], [1])
    ids = saved_cold(store, space, [1, 2, 3, 4])
    other = save(store, space, ["a", "b", "c"])
    taken, _ = store.promote(ids)
    assert taken == ids[:4]
    assert store.promote(ids[4:]) == (b"", b"")
    # No other block can get its slot during the read.
    evicted, _, _ = store.make_room(space, 0, 4, ids + other)
    assert evicted == other
    assert store.room(space, 0, 4) == 3
    with pytest.raises(ValueError):
        store.lease(taken)
    assert store.unpromoted(taken) == (b"", b"")
    assert store.counts()["below"][0] == 4
    assert store.room(space, 0, 4) == 4
    store.check()


def test_a_block_promoted_from_a_lossy_frame_is_lossy_until_its_eviction(store, plain):
    ids = save(store, plain, [1, 2, 3])
    write(store, ids[:8], flags=3, codec=7)
    write(store, ids[8:], segment=2)
    assert store.lossy(ids) == b""  # the saved bytes are still in memory
    store.evict(ids)
    store.promote(ids)
    assert store.drop_segment(1) == (b"", b"")  # its frames are dropped while they are read
    store.promoted(ids)
    assert store.lossy(ids) == ids[:8] and store.dirty(ids) == ids[:8]
    write(store, ids[:8], segment=3, flags=3)  # stored raw, so that the loss mark is known again
    store.evict(ids[:8])
    assert store.lossy(ids) == b""
    assert store.promote(ids[:4])[0] == ids[:4]
    assert store.lossy(ids) == ids[:4]
    store.unpromoted(ids[:4])
    assert store.lossy(ids) == b""
    store.forget(ids)
    again = save(store, plain, [1, 2, 3])
    assert store.lossy(again) == b""
    store.check()


def test_blocks_restored_from_lossy_frames_are_lossy(store, plain):
    store.restore(1, plain, row(1, flags=2, codec=7) + row(2, key(1), page=3), 7)
    ids = store.resident(plain, keys(1, 2))
    store.promote(ids)
    assert store.promoted(ids)[0] == ids
    assert store.lossy(ids) == ids[:4]


def test_the_depth_of_a_block_is_returned(store, plain):
    ids = save(store, plain, [1, 2, 3])
    other = save(store, plain, [4])
    assert unpack(store.depths(other + ids[8:] + ids)) == [0, 2, 0, 1, 2]
    store.forget(ids[:4])
    assert unpack(store.depths(ids[4:])) == [1, 2]  # a ghost is a key too
    assert store.depths(b"") == b""


def test_depths_are_returned_for_blocks_in_any_order(store, plain):
    stem = save(store, plain, range(20))
    twig = save(store, plain, range(100, 110), parent=9)
    lies = dict(zip(unpack(stem + twig), [*range(20), *range(10, 20)], strict=True))
    for seed in range(20):
        some = random.Random(seed).choices(list(lies), k=12)
        assert unpack(store.depths(pack(*some))) == [lies[one] for one in some]
    last_first = unpack(stem + twig)[::-1]
    assert unpack(store.depths(pack(*last_first))) == [lies[one] for one in last_first]


def took(work):
    """The least CPU time of several tries."""
    times = []
    for _ in range(5):
        begun = time.thread_time()
        work()
        times.append(time.thread_time() - begun)
    return min(times)


def test_depths_of_blocks_in_reverse_order_take_no_longer():
    store, count = Store(), 16_384
    open_arena(store, count * PAGE)
    space = store.add_space([(FULL, 0, PAGE)], [1])
    ids, _ = store.reserve(space, 0, 0, None, keys(*range(count)), bytes(count))
    one, some = ids[-4:], pack(*unpack(ids)[:-129:-1])
    # One walk up the chain for all blocks, not one for each.
    assert took(lambda: store.depths(some)) < 32 * took(lambda: store.depths(one))


def test_counting_many_spaces_takes_no_longer_than_one():
    one, many, count = Store(), Store(), 16_384
    for store, spaces in ((one, 1), (many, 4096)):
        open_arena(store, count * PAGE)
        each = count // spaces
        for number in range(spaces):
            space = store.add_space([(FULL, 0, PAGE)], [1])
            names = keys(*range(number * each, (number + 1) * each))
            store.reserve(space, 0, 0, None, names, bytes(each))
    assert len(many.tally(0, count)[1]) == 4096 * len(one.tally(0, count)[1])
    assert took(lambda: many.tally(0, count)) < 30 * took(lambda: one.tally(0, count))


def test_a_block_with_a_bad_frame_is_removed(store, plain):
    ids = saved_cold(store, plain, [1, 2, 3])
    below = ids[4:]
    store.promote(ids)
    store.promoted(below)
    freed, orphans, died = store.spoilt(ids[:4])
    assert freed == ids[:4] and set(unpack(orphans)) == set(unpack(below))
    assert died == struct.pack("<II", 1, 1)
    assert store.probe(plain, 0, 0, key(1)) == b"\0"
    store.check()


def test_a_damaged_frame_is_dropped_and_its_block_only_if_it_is_not_in_memory(store, plain):
    ids = save(store, plain, [1, 2, 3])
    write(store, ids)
    frames, _ = store.frames(ids)
    store.evict(ids[:4])
    freed, orphans, died = store.damaged(ids[:8], frames[:32])
    assert freed == ids[:4] and set(unpack(orphans)) == set(unpack(ids[4:]))
    assert died == struct.pack("<IIII", 1, 1, 1, 3)
    assert store.dirty(ids) == ids[4:8]
    assert store.checksums(ids[4:8]) == (digest(unpack(ids)[1]), b"\1")
    assert store.in_segment(1)[0] == ids[8:]
    store.check()


def test_damage_of_an_earlier_frame_of_a_block_is_ignored(store, plain):
    ids = saved_cold(store, plain, [1, 2])
    frames, _ = store.frames(ids)
    elsewhere = FRAME.pack(2, 1, PAGE, 0, 1, 1, 0)
    store.moved(ids[:4], frames[:16], elsewhere)
    store.promote(ids[4:])
    assert store.damaged(ids + pack(999), frames + frames[:16]) == (b"", b"", b"")
    assert store.promoted(ids[4:]) == (ids[4:], b"")
    assert store.frames(ids)[0] == elsewhere + frames[16:]
    with pytest.raises(ValueError):
        store.damaged(ids, frames[:16])
    store.check()


def test_still_returns_the_blocks_with_a_frame_in_the_segment(store, plain):
    ids = save(store, plain, [1, 2, 3])
    write(store, ids[:8])
    move(store, ids[4:8], 2)
    assert store.still(ids + pack(999), 1) == ids[:4]
    assert store.still(ids, 2) == ids[4:8]


def test_a_block_forgotten_while_it_is_read_keeps_its_slot_until_the_read_ends(store, plain):
    for end in ("promoted", "unpromoted", "spoilt"):
        ids = saved_cold(store, plain, [end, "2"])
        store.promote(ids)
        assert store.forget(ids) == (b"", b"", struct.pack("<IIII", 1, 1, 1, 3))
        assert lengths(store, plain, keys(end)) == (0, 0)
        assert store.probe(plain, 0, 0, key(end)) == bytes([2])
        with pytest.raises(ValueError):
            store.gone(ids)  # this call is for slots whose writer was another process
        assert store.counts()["free_bytes"] == 62 * PAGE
        gone = getattr(store, end)(ids)[1 if end == "promoted" else 0]
        assert gone == ids
        assert store.counts()["free_bytes"] == 64 * PAGE
        assert store.counts()["nodes"] == 0
        store.check()


def test_a_read_ends_only_for_blocks_that_are_promoting(store, plain):
    ready = save(store, plain, [1])
    cold = saved_cold(store, plain, [2])
    written, _ = store.reserve(plain, 0, 0, None, key(3), b"\0")
    store.quarantine(written)
    for end in (store.promoted, store.unpromoted, store.spoilt):
        for ids in (ready, cold, written, pack(999)):
            with pytest.raises(ValueError):
                end(ids)
    with pytest.raises(ValueError):
        store.promote(cold + ready)
    with pytest.raises(ValueError):
        store.promote(cold + cold)
    assert store.counts()["below"][0] == 1
    store.check()


def test_a_forget_returns_the_dropped_frames(store, plain):
    ids = saved_cold(store, plain, [1])
    held = save(store, plain, [2])
    dirty = save(store, plain, [3])
    write(store, held, segment=2, first_page=9)
    store.lease(held)
    freed, _, died = store.forget(ids + held + dirty)
    assert freed == ids + dirty
    assert died == struct.pack("<IIII", 1, 1, 2, 9)
    assert store.in_segment(2) == (b"", b"")
    assert store.unlease(held) == (b"", held)
    store.check()


def test_a_frame_that_is_written_too_late_is_dropped(store, plain):
    ids = save(store, plain, [1, 2])
    store.lease(ids)
    store.forget(ids[:4])
    assert write(store, ids) == ids[:4]
    assert store.in_segment(1)[0] == ids[4:]
    with pytest.raises(ValueError):
        write(store, pack(500))


def test_a_frame_without_a_digest_uses_the_checksum_of_its_block(store, plain):
    ids, _ = store.reserve(plain, 0, 0, None, keys(1, 2), bytes(2))
    store.commit(ids[:4], b"x" * 16)
    store.commit(ids[4:], b"")
    raw, coded = (FRAME.pack(1, 1, 99, codec, 1, 1, 0) for codec in (0, 3))
    for one, frame in ((ids[4:], raw), (ids[:4], coded)):
        with pytest.raises(ValueError, match="digest"):
            store.framed(1, one, frame, b"")
    assert store.framed(1, ids[:4], raw, b"") == b""
    assert store.frames(ids[:4]) == (raw, b"x" * 16)
    with pytest.raises(ValueError):
        store.frames(ids[4:])


def test_a_block_with_an_encoded_frame_keeps_its_own_checksum(store, plain):
    """In memory, and in memory again if the tier returns the checksum of the decoded block."""
    ids, _ = store.reserve(plain, 0, 0, None, keys(1, 2), bytes(2))
    store.commit(ids[:4], b"x" * 16)
    store.commit(ids[4:], b"")
    write(store, ids, codec=3)
    assert store.checksums(ids) == (b"x" * 16 + bytes(16), b"\1\0")
    assert store.frames(ids)[1] == b"".join(map(digest, unpack(ids)))
    store.make_room(plain, 0, 64, ids)
    for checksums, known in ((b"y" * 32, b"\1\1"), (b"", b"\0\0")):
        assert store.promote(ids)[0] == ids
        assert store.checksums(ids)[1] == b"\0\0"
        store.promoted(ids, checksums)
        assert store.checksums(ids) == (checksums or bytes(32), known)
        store.make_room(plain, 0, 64, ids)
    store.promote(ids)
    store.promoted(ids, b"z" * 32)
    store.drop_segment(1)
    assert store.checksums(ids) == (b"z" * 32, b"\1\1")
    assert store.dirty(ids) == ids


def test_windows_and_states_need_only_trailing_blocks(store):
    open_arena(store, 256 * PAGE)
    space = store.add_space([(FULL, 0, PAGE), (WINDOW, 2, PAGE), (STATE, 0, PAGE)], [1, 2, 1])
    names = [1, 2, 3, 4]
    ids = {
        (group, shard): save(store, space, names, group, shard)
        for group, shard in ((0, 0), (1, 0), (1, 1), (2, 0))
    }
    for at, one in enumerate(ids.values()):
        write(store, one, segment=at)
    assert lengths(store, space, keys(*names)) == (4, 4)
    store.evict(ids[0, 0][12:] + ids[1, 0] + ids[2, 0])
    assert lengths(store, space, keys(*names)) == (0, 4)
    missing = store.missing(space, keys(*names), 4)
    assert missing == [
        (0, 0, ids[0, 0][12:], b""), (1, 0, ids[1, 0][8:], b""), (2, 0, ids[2, 0][12:], b""),
    ]  # fmt: skip
    reads = b"".join(cold for _, _, cold, _ in missing)
    store.promote(reads)
    store.promoted(reads)
    assert lengths(store, space, keys(*names)) == (4, 4)
    with pytest.raises(ValueError):
        store.missing(space, keys(*names), 5)
    store.check()


def test_blocks_in_memory_may_follow_a_prefix_on_disk(store, plain):
    ids = save(store, plain, [1, 2, 3])
    write(store, ids)
    store.evict(ids[4:8])
    ready, restorable, parts = store.match(plain, keys(1, 2, 3))
    assert (ready, restorable, parts) == (1, 3, [(0, 0, 0, ids[:4])])


def test_matched_blocks_count_as_used_until_the_segments_round_ends(store, plain):
    ids = save(store, plain, [1, 2, 3])
    write(store, ids)
    assert store.in_segment(1) == (ids, bytes(3))
    store.evict(ids[8:])
    store.match(plain, keys(1))
    assert store.in_segment(1) == (ids, bytes([1, 0, 2]))
    store.match(plain, keys(1, 2, 3))
    assert store.in_segment(1, look=True) == (ids, bytes([1, 1, 3]))
    assert store.in_segment(1) == (ids, bytes([4, 4, 6])), "4: used in an earlier round"
    store.match(plain, keys(1, 2, 3))
    move(store, ids[:4], 2)
    assert store.in_segment(2) == (ids[:4], b"\4")
    assert store.in_segment(1) == (ids[4:], bytes([5, 7]))


def test_a_block_used_in_three_rounds_is_spared_once(store, plain):
    ids = save(store, plain, [1])

    def round_over(segment, wanted):
        """Its segment is reused, so its frame is copied into another."""
        before, _ = store.frames(ids)
        if wanted:
            store.match(plain, keys(1))
        _, flags = store.in_segment(segment, look=True)
        assert store.frames(ids)[0] == before, "who reads frames sees nothing of it"
        store.moved(ids, before, FRAME.pack(segment + 1, 1, PAGE, 0, 1, 0, 9))
        return flags[0] & 1

    write(store, ids)
    wanted = [True, False, True, False, True, False, False, True, False, False]
    assert [round_over(1 + at, one) for at, one in enumerate(wanted)] == [
        1, 0, 1, 0, 1, 1, 0, 1, 1, 0,
    ]  # fmt: skip
    store.drop_segment(1 + len(wanted))
    write(store, ids, segment=20)
    assert [round_over(20 + at, not at) for at in range(2)] == [1, 0], "another frame, another life"


def test_use_is_returned_once_and_only_for_existing_frames(store, plain):
    ids = save(store, plain, [1, 2, 3, 4])
    store.match(plain, keys(1, 2, 3, 4))
    assert store.take_used(9) == b"", "what has no frame has no use"
    write(store, ids)
    store.match(plain, keys(1, 2))
    store.match(plain, keys(1, 2, 3))
    assert store.take_used(1) == struct.pack("<II", 1, 5)
    move(store, ids[4:8], 2)
    assert store.take_used(9) == struct.pack("<II", 1, 1)
    store.match(plain, keys(1, 2, 3, 4))
    store.forget(ids[12:])
    assert store.take_used(9) == struct.pack("<II", 2, 1)


def test_use_is_restored_after_a_restart(store, plain):
    rows = row(1) + row(2, key(1), page=3) + row(3, key(2), page=5)
    used = struct.pack("<III", 3, 4, 900)
    assert store.restore(1, plain, rows, 7, used) == (3, 0, b"")
    ids = store.resident(plain, keys(1, 2, 3))
    assert store.in_segment(7) == (ids, bytes([2, 3, 2]))
    assert store.take_used(9) == b"", "its owner knows"
    # A newer frame counts as used only if that frame was used.
    assert store.restore(1, plain, row(2, key(1), page=3), 8)[0] == 0
    assert store.in_segment(8) == (ids[4:8], b"\2")
    for wrong in (struct.pack("<II", 4, 3), b"abc"):
        with pytest.raises(ValueError):
            store.restore(1, plain, row(4), 7, wrong)
    store.check()


def test_reusing_a_segment_removes_blocks_that_were_only_there(store, plain):
    ids = save(store, plain, [1, 2, 3])
    write(store, ids)
    store.evict(ids[4:])
    store.promote(ids[4:8])
    freed, orphans = store.drop_segment(1)
    assert (freed, orphans) == (ids[8:], b"")
    assert store.dirty(ids[:8]) == ids[:4]
    assert store.promoted(ids[4:8]) == (ids[4:8], b"")
    assert store.dirty(ids[:8]) == ids[:8]
    assert store.drop_segment(1) == (b"", b"")
    store.check()


def test_a_failed_read_from_a_reused_segment_removes_the_block(store, plain):
    ids = saved_cold(store, plain, [1])
    store.promote(ids)
    store.drop_segment(1)
    assert store.unpromoted(ids) == (ids, b"")
    assert store.counts()["nodes"] == 0
    store.check()


def test_a_frame_is_moved_only_from_its_current_place(store, plain):
    ids = saved_cold(store, plain, [1, 2])
    before, sums = store.frames(ids)
    after = b"".join(FRAME.pack(2, page, PAGE, 0, 1, 1, 0) for page in (1, 3))
    store.forget(ids[4:])
    again = saved_cold(store, plain, [3], segment=5, first_page=1)
    assert again == ids[4:], "the number is another block's"
    assert store.moved(ids, before, after) == ids[4:]
    assert store.frames(ids[:4]) == (after[:16], sums[:16])
    assert store.drop_segment(1) == (b"", b"")
    assert store.in_segment(2)[0] == ids[:4]
    store.check()


def test_blocks_that_must_be_written_are_found_among_the_coldest(store, plain):
    ids = save(store, plain, range(8))
    write(store, ids[4:8])
    assert store.dirty(ids[:12]) == ids[:4] + ids[8:12]
    assert store.coldest(ids, 4 * PAGE, 100 * PAGE) == (ids[:4] + ids[8:16], True)
    assert store.coldest(ids, 100 * PAGE, 100 * PAGE) == (ids[:4] + ids[8:], False)
    assert store.coldest(ids, 100 * PAGE, 2 * PAGE) == (ids[:4] + ids[8:12], True)
    assert store.coldest(ids, 0, 100) == (b"", True)


def test_identities_equal_the_names_of_frames(store):
    open_arena(store)
    store.add_space([(FULL, 0, PAGE)], [1])
    space = store.add_space([(FULL, 0, PAGE), (FULL, 0, PAGE)], [1, 2])
    save(store, space, [1, 2])
    ids = save(store, space, [1, 2], 1, 1)
    first, second = struct.iter_unpack("<IIIB3x32s32s", store.identities(ids))
    assert first == (space, 1, 1, 0, key(1), bytes(32))
    assert second == (space, 1, 1, 1, key(2), key(1))


def test_a_segment_is_restored_after_a_restart(store, plain):
    rows = row(1) + row(2, key(1), page=3) + row(4, key(3), page=5)
    assert store.restore(1, plain, rows, 7) == (3, 0, b"")
    store.check()
    assert lengths(store, plain, keys(1, 2)) == (0, 2)
    ids = store.resident(plain, keys(1, 2, 4))
    assert store.in_segment(7) == (ids, bytes([3, 3, 2]))
    assert store.frames(ids[4:8]) == (FRAME.pack(7, 3, PAGE, 0, 1, 1, 0), digest(2))
    assert store.counts()["ghosts"] == 1
    assert store.restore(1, plain, row(3, page=1), 8) == (1, 0, b"")
    assert store.counts()["ghosts"] == 0
    # If a block already has a frame, the one that is restored later is the newer.
    assert store.restore(1, plain, row(2, key(1), page=9), 9) == (0, 0, struct.pack("<II", 7, 3))
    assert store.in_segment(7)[0] == ids[:4] + ids[8:]
    assert store.in_segment(9)[0] == ids[4:8]
    store.check()


def test_a_block_in_memory_gets_its_frame_back(store, plain):
    """As after its disk was switched off and on: no block has to be written again."""
    ids = save(store, plain, [1, 2])
    frames = FRAME.pack(7, 1, PAGE, 0, 1, 0, 0) + FRAME.pack(7, 3, 9, 3, 1, 1, 0)
    assert store.framed(1, ids, frames, digest(1) + digest(2)) == b""
    store.drop_segment(7)
    assert store.dirty(ids) == ids
    rows = row(1, page=5) + row(2, key(1), page=7, codec=3)
    assert store.restore(1, plain, rows, 8, pack(7)) == (2, 0, b"")
    assert store.dirty(ids) == b"" and store.in_segment(8) == (ids, bytes([0, 1]))
    assert store.checksums(ids) == (digest(1) + bytes(16), bytes([1, 0]))
    # A forget can report only one of the two frames.
    assert store.restore(1, plain, row(1, page=9), 9) == (0, 0, struct.pack("<II", 9, 9))
    assert write(store, ids[:4], segment=9) == ids[:4]
    assert store.forget(ids[:4])[2] == struct.pack("<II", 8, 5)
    store.check()


@pytest.mark.parametrize("checksums", [b"", bytes(16)], ids=["unknown", "others"])
def test_a_raw_frame_with_other_bytes_is_not_given_to_a_block_in_memory(store, plain, checksums):
    """Its digest would become the checksum of the bytes in memory."""
    ids, _ = store.reserve(plain, 0, 0, None, keys(1), bytes(1))
    store.commit(ids, checksums)
    assert store.restore(1, plain, row(1, page=5), 7) == (0, 0, struct.pack("<II", 7, 5))
    assert store.dirty(ids) == ids
    assert store.in_segment(7) == (b"", b"")
    assert store.checksums(ids) == (bytes(16), bytes([bool(checksums)]))


def test_rows_with_wrong_parents_form_no_cycle(store, plain):
    rows = row(1, key(1)) + row(2, key(3), page=3) + row(3, key(2), page=5)
    assert store.restore(1, plain, rows, 7) == (3, 0, b"")
    store.check()
    assert lengths(store, plain, keys(1, 2, 3)) == (0, 3)
    assert len(store.drop_segment(7)[0]) == 3 * 4
    assert store.counts()["nodes"] == 0


def test_rows_that_fit_no_block_are_counted_and_ignored(store, plain):
    rows = [
        row(1, group=1), row(2, shard=1), row(3, payload=PAGE - 1), row(4, payload=1 << 32, codec=3),
        row(5, codec=256), row(6, header_pages=256), row(7, codec=3, payload=5),
    ]  # fmt: skip
    assert store.restore(1, plain, b"".join(rows), 7) == (1, 6, b"")
    assert lengths(store, plain, key(7)) == (0, 1)
    with pytest.raises(ValueError):
        store.restore(1, plain, rows[0][1:], 7)
    with pytest.raises(IndexError):
        store.restore(1, plain + 1, rows[6], 7)
    store.check()


def test_a_frame_uses_little_memory():
    store = Store()
    n = 1 << 17
    space = store.add_space([(FULL, 0, PAGE)], [1])
    before = store.memory_bytes()
    for segment in range(8):
        rows = b"".join(row((segment, at), page=1 + 2 * at) for at in range(n // 8))
        assert store.restore(1, space, rows, segment) == (n // 8, 0, b"")
    assert (store.memory_bytes() - before) / n < 150  # in whole chunks of memory; 115 at a million
