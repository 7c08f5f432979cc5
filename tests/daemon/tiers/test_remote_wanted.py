"""The lists of wanted blocks that hosts leave in the store."""

from __future__ import annotations

import random
from array import array

import pytest

from kvtier.errors import FrameError
from kvtier_daemon.catalog.spaces import KnownSpace
from kvtier_daemon.tiers.remote import wanted
from kvtier_daemon.tiers.remote.wanted import (
    HALF_LIFE_S,
    MOST_BLOCKS,
    MOST_BYTES,
    MergedLists,
    WantedBlocks,
    WantedList,
    decode_list,
    encode_list,
    in_turn,
    list_identity,
    list_name,
    list_of,
    lists_of,
    load_host,
)
from kvtier_daemon.tiers.remote.warming import leaves
from support.specs import spec_of

SPACE, HOST, SECRET = bytes([1]) * 32, bytes([2]) * 32, bytes([3]) * 32
NOW = 1_800_000_000.0
OF = list_identity(SPACE, HOST)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def chain(*numbers: int) -> bytes:
    return b"".join(map(key, numbers))


def space_of(identity: bytes = SPACE) -> KnownSpace:
    spec = spec_of("wanted")
    return KnownSpace(1, identity, spec, spec.places, (spec.block_bytes,))


def found(*prefixes: tuple[bytes, int]) -> list[WantedList]:
    """The lists after each of these prefixes was found some times."""
    blocks, space = WantedBlocks(), space_of()
    for keys, times in prefixes:
        for _ in range(times):
            blocks.note(space, keys, NOW)
    return lists_of(blocks.prefixes(), NOW)


def merged(lists: list[WantedList]) -> list[WantedList]:
    both = MergedLists()
    for one in lists:
        both.add(one)
    return both.lists()


def test_a_block_has_the_weights_of_all_prefixes_with_it_and_comes_after_its_parent() -> None:
    (one,) = found((chain(1, 2, 3), 1), (chain(1, 2, 4), 3), (chain(9), 2))
    assert one.keys == (key(1), key(2), key(4), key(9), key(3))
    assert list(one.weights) == [4, 4, 3, 2, 1]
    assert [one.chain(row) for row in range(5)] == [
        chain(1), chain(1, 2), chain(1, 2, 4), chain(9), chain(1, 2, 3),
    ]  # fmt: skip
    assert list(leaves(one, 5)) == [2, 3, 4]
    assert list(leaves(one, 2)) == [1]


def test_lists_of_lookups_that_begin_inside_a_chain_can_be_read() -> None:
    """Such a block may weigh more than its parent, and comes before it."""
    (one,) = lists = found((chain(2, 3, 4), 1), (chain(1, 2, 3), 1))
    for other in (one, *merged([*lists, *found((chain(4, 5), 3))])):
        assert decode_list(OF, SECRET, encode_list(other, HOST, SECRET, NOW), NOW) == other
        for row, name in enumerate(other.keys):
            whole = other.chain(row)
            assert whole.endswith(name) and whole in chain(1, 2, 3, 4, 5)


def test_what_was_forgotten_is_wanted_no_longer() -> None:
    blocks, space, other = WantedBlocks(), space_of(), space_of(bytes([9]) * 32)
    for keys in (chain(1, 2, 3), chain(1, 2), chain(4)):
        blocks.note(space, keys, NOW)
    blocks.note(other, chain(8), NOW)
    assert blocks.forget(space, chain(5, 3)) == chain(1, 2, 3)
    assert [one.keys for one in blocks.prefixes()] == [chain(1, 2), chain(4), chain(8)]
    assert blocks.forget(space) == chain(1, 2, 4) and blocks._keys == 1
    assert [one.space for one in blocks.prefixes()] == [other]


def test_a_prefix_that_was_found_long_ago_weighs_less() -> None:
    blocks, space = WantedBlocks(), space_of()
    for _ in range(3):
        blocks.note(space, chain(1), NOW)
    blocks.note(space, chain(2), NOW + 2 * HALF_LIFE_S)
    (one,) = lists_of(blocks.prefixes(), NOW + 2 * HALF_LIFE_S)
    assert one.keys == (key(2), key(1)) and list(one.weights) == [1, 0.75]


def test_a_clock_that_steps_back_makes_no_weight_larger() -> None:
    blocks, space = WantedBlocks(), space_of()
    for at_s in (NOW, NOW - 1e7):
        blocks.note(space, chain(1), at_s)
    (one,) = lists_of(blocks.prefixes(), NOW - 2e7)
    assert list(one.weights) == [2]


def test_what_is_remembered_is_bounded() -> None:
    blocks, space = WantedBlocks(), space_of()
    for number in range(2000):
        blocks.note(space, chain(*range(1000 * number, 1000 * number + 1 + number % 90)), NOW)
    assert len(blocks.prefixes()) <= wanted.MOST_PREFIXES
    assert sum(len(one.keys) for one in blocks.prefixes()) <= wanted.MOST_KEYS * 32
    (one,) = lists_of(blocks.prefixes(), NOW)
    assert len(encode_list(one, HOST, SECRET, NOW)) < MOST_BYTES
    assert key(1999 * 1000) in one.keys and key(0) not in one.keys


def test_the_largest_list_fits_an_object() -> None:
    count = MOST_BLOCKS
    one = WantedList(
        SPACE, spec_of("wanted"), tuple(map(key, range(count))), array("d", [1.0]) * count,
        array("I", [0]) * count,
    )  # fmt: skip
    text = encode_list(one, HOST, SECRET, NOW)
    assert len(text) < MOST_BYTES
    assert decode_list(OF, SECRET, text, NOW).keys == one.keys


def test_a_list_is_read_as_it_was_written() -> None:
    (one,) = found((chain(1, 2, 3), 1), (chain(1, 2, 4), 3))
    assert decode_list(OF, SECRET, encode_list(one, HOST, SECRET, NOW), NOW) == one
    assert list_of(SECRET, list_name(SECRET, OF)) == OF
    assert list_name(SECRET, OF) != list_name(bytes(32), OF)


def test_a_list_has_one_name() -> None:
    """Otherwise copies of it in the store would add up."""
    of = list_identity(bytes([0xAB]) * 32, HOST)
    folder, _, last = (name := list_name(SECRET, of)).rpartition("/")
    assert list_of(SECRET, name) == of
    for other in (
        f"{folder}/{last.upper()}", f"{folder}/{last[:2]} {last[2:]}", f"{folder}/copy/{last}",
        f"{folder}/{last}-", list_name(bytes(32), of), last, f"{folder}/not-a-list", "",
    ):  # fmt: skip
        assert list_of(SECRET, other) is None, other


def test_each_space_gets_its_share_of_the_lists_that_are_read() -> None:
    many = [list_identity(SPACE, key(number)) for number in range(1000)]
    few = [list_identity(bytes([space]) * 32, HOST) for space in range(2, 9)]
    names = [list_name(SECRET, of) for of in many + few]
    random.Random(1).shuffle(names)
    some = in_turn([(name, of) for name in names if (of := list_of(SECRET, name))], 100)
    assert len(some) == len(set(some)) == 100
    assert {of for _, of in some} >= set(few)


@pytest.mark.parametrize("late_s", [-wanted.AHEAD_S - 2, wanted.OLD_S + 2])
def test_an_old_list_and_one_of_the_future_are_refused(late_s: float) -> None:
    (one,) = found((chain(1, 2), 1))
    text = encode_list(one, HOST, SECRET, NOW)
    with pytest.raises(FrameError, match="s old"):
        decode_list(OF, SECRET, text, NOW + late_s)


def test_a_list_of_another_fleet_host_or_space_is_refused() -> None:
    (one,) = found((chain(1, 2), 1))
    text = encode_list(one, HOST, SECRET, NOW)
    for of, secret in (
        (OF, bytes(32)),
        (list_identity(SPACE, bytes(32)), SECRET),
        (list_identity(bytes(32), HOST), SECRET),
    ):
        with pytest.raises(FrameError, match="no host of this fleet"):
            decode_list(of, secret, text, NOW)


def test_a_list_with_any_changed_byte_is_refused() -> None:
    (one,) = found((chain(1, 2, 3), 1), (chain(1, 5), 1))
    text = encode_list(one, HOST, SECRET, NOW)
    for at in range(len(text)):
        changed = bytearray(text)
        changed[at] ^= 1 << random.Random(at).randrange(8)
        with pytest.raises(FrameError):
            decode_list(OF, SECRET, bytes(changed), NOW)
    for size in (0, 1, 31, 32, 33, len(text) - 1):
        with pytest.raises(FrameError):
            decode_list(OF, SECRET, text[:size], NOW)


@pytest.mark.parametrize(
    ("weights", "parents"),
    [
        ([1.0, 1.0], [1, 1]),
        ([1.0, float("nan")], [0, 0]),
        ([1.0, float("inf")], [0, 0]),
        ([1.0, -1.0], [0, 0]),
        ([1.0, 1.0], [0, 9]),
    ],
)
def test_a_senseless_list_of_a_host_of_the_fleet_is_refused(
    weights: list[float], parents: list[int]
) -> None:
    one = WantedList(
        SPACE, spec_of("wanted"), (key(1), key(2)), array("d", weights), array("I", parents)
    )
    with pytest.raises(FrameError, match="is not a list"):
        decode_list(OF, SECRET, encode_list(one, HOST, SECRET, NOW), NOW)


def test_lists_of_several_hosts_are_one_with_the_sum_of_their_weights() -> None:
    first, second = found((chain(1, 2), 2)), found((chain(1, 3), 3), (chain(7), 1))
    other = WantedList(
        bytes(32), first[0].spec, *(getattr(first[0], n) for n in ("keys", "weights", "parents"))
    )
    both, alone = merged([*first, *second, other])
    assert both.keys == (key(1), key(3), key(2), key(7)) and list(both.weights) == [5, 3, 2, 1]
    assert [both.chain(row) for row in range(4)] == [chain(1), chain(1, 3), chain(1, 2), chain(7)]
    assert alone.space == bytes(32)


def test_of_many_lists_the_blocks_with_the_largest_weights_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wanted, "MOST_MERGED", most := 500)
    both = MergedLists()
    for host in range(40):
        for space in range(2):
            keys = tuple(key(1000 * host + number) for number in range(100))
            weight = array("d", [1.0 + host]) * 100
            one = WantedList(
                bytes([space]) * 32, spec_of("wanted"), keys, weight, array("I", range(100))
            )
            both.add(one)
            assert len(both) <= 2 * most + 100
    lists = both.lists()
    assert [one.space for one in lists] == [bytes(32), bytes([1]) * 32]
    assert sum(len(one.keys) for one in lists) == most
    assert all(min(one.weights) > 37 for one in lists)


def test_lists_that_contradict_each_other_do_not_make_an_endless_chain() -> None:
    first, second = found((chain(1, 2, 3), 1)), found((chain(3, 2, 1), 1))
    for one in merged([*first, *second]):
        assert all(len(one.chain(row)) <= len(one.keys) * 32 for row in range(len(one.keys)))


def test_a_host_keeps_its_name(tmp_path) -> None:
    assert load_host(tmp_path) == load_host(tmp_path)
    assert load_host(tmp_path / "absent") != load_host(tmp_path / "absent")
    (tmp_path / "fleet-host").write_bytes(b"short")
    assert len(load_host(tmp_path)) == 32
