"""The order of blocks of which some have frames in memory: two policies, and what they are told."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable

import pytest
from tests.conformance.policy_tests import PolicyTests

from kvtier_daemon.catalog.compressed import CompressedOrder
from kvtier_daemon.catalog.policy import NO_PARENT, make

SIZE, FRAME = 1000, 600


class TestCompressedOrder(PolicyTests):
    def make_policy(self) -> CompressedOrder:
        return CompressedOrder(make("value"), make("lru"))


def ids(numbers: Iterable[int]) -> bytes:
    return array("I", numbers).tobytes()


def names(numbers: Iterable[int]) -> bytes:
    return array("Q", (number * 0x9E3779B97F4A7C15 % 2**64 for number in numbers)).tobytes()


def order_of(policy: str = "lru") -> CompressedOrder:
    return CompressedOrder(make(policy), make("lru"))


def add(order: CompressedOrder, numbers: list[int]) -> None:
    order.added(ids(numbers), names(numbers), ids([NO_PARENT] * len(numbers)))


def victims(packed: bytes) -> list[int]:
    return array("I", packed).tolist()


def make_room(
    order: CompressedOrder,
    frames: int,
    coming: list[int],
    busy: set[int] = frozenset(),  # type: ignore[assignment]
) -> tuple[list[int], set[int]]:
    return order.make_room(frames * FRAME, lambda _: FRAME, busy, coming, FRAME)


def compress(order: CompressedOrder, numbers: Iterable[int]) -> None:
    for number in numbers:
        order.compressed(number, SIZE)


def test_a_block_that_leaves_its_slot_keeps_its_place_among_all_blocks() -> None:
    order = order_of()
    for number in range(6):
        add(order, [number])
    compress(order, [0, 1])
    order.left(ids([0, 1, 2]))  # 2 has no frame: it is only on disk
    assert victims(order.victims(9)) == [3, 4, 5], "the slots"
    assert victims(order._whole.victims(9)) == [0, 1, 3, 4, 5], "all of memory"
    assert order.alone_bytes == 2 * SIZE


def test_of_blocks_that_are_about_as_cold_those_with_frames_leave_their_slots_first() -> None:
    order = order_of()
    for number in range(20):
        add(order, [number])
    compress(order, [2, 5, 12])
    assert victims(order.victims(1)) == [2]
    assert victims(order.victims(3)) == [2, 5, 0], "12 is not among the 12 coldest"
    assert victims(order.victims(20)) == [2, 5, 12, *sorted(set(range(20)) - {2, 5, 12})]


def test_frames_are_dropped_in_the_order_of_the_policy_and_not_while_they_are_read() -> None:
    order = order_of()
    for number in range(6):
        add(order, [number])
    compress(order, range(4))
    order.left(ids(range(4)))
    order.wanted(ids([0]), names([0]))  # a request reads its frame
    assert make_room(order, 2, [4], {1}) == ([2, 3], set())
    assert make_room(order, 3, [], {1}) == ([2, 3, 0], set())


def test_a_block_that_is_worth_less_than_all_frames_gets_none() -> None:
    order = order_of()
    for number in range(4):
        add(order, [number])
    compress(order, [2])
    order.left(ids([2]))
    assert make_room(order, 1, [0, 1]) == ([], {0})
    assert make_room(order, 3, [0, 1]) == ([2], {0, 1})


def test_frames_of_blocks_that_got_their_slots_back_leave_first() -> None:
    order = order_of()
    for number in range(4):
        add(order, [number])
    compress(order, range(3))
    order.left(ids(range(3)))
    add(order, [1])
    assert order.alone_bytes == 2 * SIZE
    assert make_room(order, 1, [3]) == ([1], set())
    order.dropped([1])
    assert victims(order._whole.victims(9)) == [0, 1, 2, 3], "it is in memory still"
    order.dropped([0])
    assert victims(order._whole.victims(9)) == [1, 2, 3], "it is only on disk now"


def test_a_block_that_cools_again_keeps_its_frame() -> None:
    order = order_of()
    for number in range(4):
        add(order, [number])
    compress(order, [0])
    order.left(ids([0]))
    add(order, [0])
    order.wanted(ids([1, 2, 3]), names([1, 2, 3]))
    assert victims(order.next_to_compress(4)) == [3, 2, 1]
    assert make_room(order, 1, [])[0] == [], "it is about to leave its slot"


def test_the_frames_of_blocks_that_are_gone_are_reported() -> None:
    order, lost = order_of(), list[int]()
    order.lost = lost.extend
    add(order, [0, 1, 2])
    compress(order, [0, 1])
    order.left(ids([0]))
    order.gone(ids([0, 1, 2]))
    assert lost == [0, 1] and not order.alone_bytes
    assert not order._whole.victims(9) and not order.victims(9)
    add(order, [0])  # another block
    assert victims(order._whole.victims(9)) == [0]


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "prefix", "value"])
@pytest.mark.parametrize("seed", range(5))
def test_both_orders_have_exactly_the_blocks_that_may_leave(policy: str, seed: int) -> None:
    order, chance = order_of(policy), random.Random(seed)
    slots, framed, held = set[int](), set[int](), set[int]()

    def lost(numbers: Iterable[int]) -> None:
        framed.difference_update(numbers)

    order.lost = lost
    for step in range(400):
        order.now(step)
        free = sorted(slots - held)
        some = chance.sample(free, min(len(free), chance.randint(1, 4)))
        match chance.randrange(8):
            case 0 | 1:
                new = [one for one in chance.sample(range(40), 4) if one not in slots]
                if any(one in framed for one in new):
                    order.wanted(ids(new), names(new))
                add(order, new)
                slots.update(new)
            case 2:
                order.left(ids(some))
                slots.difference_update(some)
            case 3:
                order.gone(ids(some))
                slots.difference_update(some)
                assert framed.isdisjoint(some)
            case 4:
                order.held(ids(some))
                held.update(some)
            case 5:
                order.freed(ids(held))
                held.clear()
            case 6:
                cool = [one for one in victims(order.next_to_compress(5)) if one not in framed]
                compress(order, cool)
                framed.update(cool)
            case 7:
                frames, _ = make_room(order, 2, [])
                assert framed.issuperset(frames)
                order.dropped(frames)
                framed.difference_update(frames)
        alone = framed - slots
        assert set(victims(order.victims(99))) == slots - held
        assert set(victims(order._whole.victims(99))) == (slots | framed) - held
        assert order.alone_bytes == SIZE * len(alone)


def test_frames_of_blocks_that_are_used_again_in_their_slots_leave_first() -> None:
    """Otherwise each block that was cool once would keep its frame while it has its slot."""
    order = order_of()
    for number in range(6):
        add(order, [number])
    cool = victims(order.next_to_compress(2))
    assert cool == [0, 1]
    compress(order, cool)
    order.wanted(ids([0]), names([0]))
    assert victims(order.next_to_compress(2)) == [2]
    assert make_room(order, 3, [])[0] == [0], "1 leaves its slot next"


def test_blocks_that_do_not_shrink_are_not_compressed_again() -> None:
    order = order_of()
    for number in range(3):
        add(order, [number])
    order.unfit.add(1)
    assert victims(order.next_to_compress(3)) == [0, 2]
    order.left(ids([0, 1]))
    assert order.unprepared == 1
    add(order, [1])
    assert victims(order.next_to_compress(3)) == [2]
    order.gone(ids([1]))
    add(order, [1])  # another block
    assert victims(order.next_to_compress(3)) == [2, 1]


def test_without_frames_the_policy_selects_what_leaves_memory() -> None:
    plain, order = make("lfu"), order_of("lfu")
    for each in (plain, order):
        for number in range(8):
            each.added(ids([number]), names([number]), ids([NO_PARENT]))
        for number in [0] * 20 + list(range(1, 8)):
            each.wanted(ids([number]), names([number]))
        each.held(ids([3]))
    assert victims(order.victims(8)) == victims(plain.victims(8)) != list(range(8))
    assert victims(plain.victims(8))[-1] == 0
    compress(order, [5])
    order.left(ids([5]))
    order.dropped([5])
    plain.left(ids([5]))
    assert victims(order.victims(8)) == victims(plain.victims(8))


def test_the_policy_selects_among_blocks_that_have_no_frames() -> None:
    order = order_of("lfu")
    for number in range(8):
        add(order, [number])
    compress(order, [6, 7])
    order.left(ids([7]))
    for number in [0] * 20 + list(range(1, 8)):
        order.wanted(ids([number]), names([number]))
    assert victims(order.victims(3)) == [6, 1, 2], "0 is the oldest, and used most"
    assert set(victims(order.victims(8))) == set(range(7)), "7 has no slot"
