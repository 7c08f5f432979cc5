"""Keys: a name for all tokens up to the end of a block, which cannot be computed without the secret."""

from __future__ import annotations

from array import array

import blake3
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.key import Key, Keys, chain_root, hash_keys, space_secret, token_keys

SECRET = bytes(range(32))
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=80)


@given(tokens, st.integers(1, 17))
def test_one_key_for_each_whole_block(ids: list[int], block: int) -> None:
    assert len(token_keys(SECRET, ids, block)) == len(ids) // block


@given(tokens, tokens)
def test_keys_are_equal_exactly_for_the_common_prefix(one: list[int], two: list[int]) -> None:
    first, second = token_keys(SECRET, one, 4), token_keys(SECRET, two, 4)
    for at, (a, b) in enumerate(zip(first, second, strict=False)):
        assert (a == b) == (one[: at * 4 + 4] == two[: at * 4 + 4])


def test_lists_arrays_and_numpy_make_the_same_keys() -> None:
    ids = list(range(100_000, 100_064))
    expected = token_keys(SECRET, ids, 16)
    assert token_keys(SECRET, array("I", ids), 16) == expected
    assert token_keys(SECRET, array("q", ids), 16) == expected
    assert token_keys(SECRET, np.array(ids, dtype=np.int64), 16) == expected
    assert token_keys(SECRET, np.array(ids, dtype=np.uint32), 16) == expected


@pytest.mark.parametrize("bad", [-1, 2**32, 2**70])
def test_a_token_out_of_range_is_an_error(bad: int) -> None:
    with pytest.raises((ValueError, OverflowError)):
        token_keys(SECRET, [bad] * 16, 16)


def test_different_salts_extras_and_secrets_give_different_keys() -> None:
    ids = list(range(64))
    chains = [
        token_keys(SECRET, ids, 16),
        token_keys(SECRET, ids, 16, salt=b"a"),
        token_keys(SECRET, ids, 16, salt=b"b"),
        token_keys(SECRET, ids, 16, extras=b"a"),
        token_keys(SECRET, ids, 16, extras=b"ab"),
        token_keys(bytes(32), ids, 16),
    ]
    every = [key for chain in chains for key in chain]
    assert len(set(every)) == len(every)


def test_keys_of_hashes_form_chains_and_differ_from_keys_of_tokens() -> None:
    hashes = [bytes([n]) * 32 for n in range(4)]
    keys = hash_keys(SECRET, hashes)
    assert len(keys) == 4
    assert hash_keys(SECRET, hashes[:2]) == keys[:2]
    alone = hash_keys(SECRET, hashes, b"salt", accepted=[bytes(32)], alone=True)
    single = [hash_keys(SECRET, [one], b"salt", accepted=[bytes(32)]) for one in hashes]
    assert alone.packed == b"".join(one.packed for one in single)
    assert alone.others == (b"".join(one.others[0] for one in single),)
    as_tokens = token_keys(SECRET, array("I", b"".join(hashes)), 8)
    assert not set(keys) & set(as_tokens)


def test_roots_and_space_secrets_are_keyed_blake3() -> None:
    assert chain_root(SECRET, b"s") == blake3.blake3(b"kvtier.salt.1\0s", key=SECRET).digest()
    expected = blake3.blake3(b"kvtier.space-key.1\0" + b"i" * 32, key=SECRET).digest()
    assert space_secret(SECRET, b"i" * 32) == expected


def test_a_slice_knows_its_place_in_the_chain() -> None:
    keys = token_keys(SECRET, list(range(160)), 16)
    assert keys[0:].parent == b""
    assert keys[3:].parent == keys[2]
    assert keys[3:][2:].parent == keys[4]
    assert list(keys[3:5]) == [keys[3], keys[4]]
    assert keys[-1] == keys[9]
    assert len(keys[4:2]) == 0


def test_only_contiguous_slices_are_possible() -> None:
    keys = token_keys(SECRET, list(range(160)), 16)
    with pytest.raises(ValueError, match="chain"):
        keys[::2]
    with pytest.raises(IndexError):
        keys[10]
    with pytest.raises(ValueError):
        Keys(b"short")


def test_plain_lists_of_keys_are_accepted() -> None:
    keys = token_keys(SECRET, list(range(64)), 16)
    assert Keys.of([Key(key) for key in keys]) == keys
    assert Keys.of(keys) is keys


def test_an_extended_chain_has_the_keys_of_the_whole_prompt() -> None:
    hashes = [bytes([n]) * 32 for n in range(6)]
    whole = hash_keys(SECRET, hashes, b"salt", b"extras")
    head = hash_keys(SECRET, hashes[:4], b"salt", b"extras")
    tail = hash_keys(SECRET, hashes[4:], b"salt", b"extras", head)
    assert head.packed + tail.packed == whole.packed
    assert tail.parent == whole[3]
    nothing = hash_keys(SECRET, [], b"salt")
    assert hash_keys(SECRET, hashes, b"salt", b"extras", nothing) == whole
