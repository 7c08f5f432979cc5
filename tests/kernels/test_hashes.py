"""Checksums and names compared with their models and with the published packages."""

import random
from array import array
from functools import cache

import blake3
import numpy as np
import pytest
import xxhash

import kvtier_kernels as kernels
from models import kernels as reference

DATA = random.Random(1).randbytes(1 << 20)
AROUND_PAGES = [n + d for n in (2048, 3072, 4096, 8192, 65536) for d in (-65, -1, 0, 1, 63, 64, 65)]


@pytest.fixture(params=kernels.implementations("xxh3"))
def xxh3(request):
    kernels.force("xxh3", request.param)
    yield request.param
    kernels.force("xxh3", "auto")


@pytest.fixture(params=kernels.implementations("blake3"))
def names(request):
    kernels.force("blake3", request.param)
    yield request.param
    kernels.force("blake3", "auto")


@pytest.mark.parametrize("seed", [0, 1, 0x9E3779B97F4A7C15, 2**64 - 1])
def test_xxh3_matches_the_package_at_all_sizes(xxh3, seed):
    for size in [*range(1101), *AROUND_PAGES, len(DATA)]:
        expected = xxhash.xxh3_128_digest(DATA[:size], seed)
        assert kernels.xxh3_128(DATA[:size], seed) == expected, size


@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_the_xxh3_model_matches_the_package(seed):
    for size in [*range(1101), 4096, 5000]:
        expected = xxhash.xxh3_128_digest(DATA[:size], seed)
        assert reference.xxh3_128(DATA[:size], seed) == expected, size


def test_xxh3_reads_from_any_address(xxh3):
    for shift in range(70):
        part = memoryview(DATA)[shift : shift + 3000]
        assert kernels.xxh3_128(part) == xxhash.xxh3_128_digest(part)


def test_blake3_matches_the_package_at_all_sizes(names):
    for size in [*range(1101), *AROUND_PAGES, 102400, len(DATA)]:
        data = DATA[:size]
        assert kernels.blake3(data) == blake3.blake3(data).digest(), size
        assert kernels.blake3(data, DATA[:32]) == blake3.blake3(data, key=DATA[:32]).digest(), size


def test_the_blake3_model_matches_the_package():
    for size in (0, 1, 31, 32, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025, 2048, 2049, 3073, 5121):
        data = DATA[:size]
        assert reference.blake3(data) == blake3.blake3(data).digest(), size
        assert reference.blake3(data, DATA[:32]) == blake3.blake3(data, key=DATA[:32]).digest()


def test_blake3_refuses_a_key_of_another_length():
    with pytest.raises(ValueError, match="32 bytes"):
        kernels.blake3(b"", b"short")


SECRET, PARENT = DATA[:32], DATA[32:64]
TOKENS = [random.Random(2).randrange(2**32) for _ in range(100)] + [
    0,
    1,
    2**30 - 1,
    2**30,
    2**32 - 1,
]


@cache
def by_model(tokens, block_tokens, extras):
    return reference.chain_keys(SECRET, PARENT, tokens, block_tokens, extras)


@pytest.mark.parametrize("block_tokens", [1, 7, 8, 16, 64, 300])
@pytest.mark.parametrize("extras", [b"", b"salt", bytes(range(200)) * 8])
def test_chain_keys_matches_its_model(names, block_tokens, extras):
    tokens = TOKENS * 4
    expected = by_model(tuple(tokens), block_tokens, extras)
    assert kernels.chain_keys(SECRET, PARENT, tokens, block_tokens, extras) == expected
    assert len(expected) == len(tokens) // block_tokens * 32


def test_chain_keys_is_a_chain_of_keyed_blake3(names):
    tokens = list(range(48))
    parent, expected = PARENT, b""
    for start in (0, 16, 32):
        content = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + 16])
        parent = blake3.blake3(parent + b"\0" + content + b"x", key=SECRET).digest()
        expected += parent
    assert kernels.chain_keys(SECRET, PARENT, tokens, 16, b"x") == expected


def test_chain_keys_continues_from_a_key():
    whole = kernels.chain_keys(SECRET, PARENT, TOKENS[:64], 16)
    rest = kernels.chain_keys(SECRET, whole[32:64], TOKENS[32:64], 16)
    assert whole[64:] == rest


class OnlyDlpack:
    """A tensor with only the DLPack protocol, like those of torch."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_chain_keys_takes_tokens_in_any_integer_form():
    expected = kernels.chain_keys(SECRET, PARENT, TOKENS, 16)
    small = [token % 2**31 for token in TOKENS]
    assert kernels.chain_keys(SECRET, PARENT, tuple(TOKENS), 16) == expected
    for form in (
        array("I", TOKENS),
        array("q", TOKENS),
        np.array(TOKENS, np.uint32),
        np.array(TOKENS, np.int64),
        np.array(TOKENS, np.uint64),
        OnlyDlpack(np.array(TOKENS, np.int64)),
        [np.int64(token) for token in TOKENS],
    ):
        assert kernels.chain_keys(SECRET, PARENT, form, 16) == expected
    expected = kernels.chain_keys(SECRET, PARENT, small, 16)
    for form in (array("i", small), OnlyDlpack(np.array(small, np.int32))):
        assert kernels.chain_keys(SECRET, PARENT, form, 16) == expected


@pytest.mark.parametrize(
    "tokens",
    [
        [0] * 15 + [-1],
        [2**32],
        [2**70],
        np.array([-1], np.int32),
        np.array([2**32], np.int64),
        np.array([2**63], np.uint64),
    ],
)
def test_chain_keys_refuses_tokens_outside_32_bits(tokens):
    with pytest.raises(ValueError, match="outside"):
        kernels.chain_keys(SECRET, PARENT, tokens, 16)


@pytest.mark.parametrize(
    "tokens", [[1.0], ["1"], b"12345678", np.zeros(4), np.zeros(4, np.int16), 7, np.zeros(4, ">u4")]
)
def test_chain_keys_refuses_values_that_are_not_tokens(tokens):
    with pytest.raises(TypeError, match="tokens"):
        kernels.chain_keys(SECRET, PARENT, tokens, 1)


def test_chain_keys_survives_a_list_that_changes_during_the_call():
    class Shrinks:
        def __index__(self):
            tokens.clear()
            return 1

    tokens = [Shrinks(), *range(1000)]
    with pytest.raises(TypeError, match="tokens"):
        kernels.chain_keys(SECRET, PARENT, tokens, 16)


def test_chain_keys_refuses_wrong_lengths():
    with pytest.raises(ValueError, match="secret"):
        kernels.chain_keys(b"x", PARENT, [], 16)
    with pytest.raises(ValueError, match="parent"):
        kernels.chain_keys(SECRET, b"x", [], 16)
    with pytest.raises(ValueError, match="block_tokens"):
        kernels.chain_keys(SECRET, PARENT, [], 0)


def test_chain_hashes_matches_its_model(names):
    hashes = [DATA[i : i + size] for i, size in enumerate((16, 20, 32, 33, 63, 64))]
    for extras in (b"", b"adapter"):
        expected = reference.chain_hashes(SECRET, PARENT, hashes, extras)
        assert kernels.chain_hashes(SECRET, PARENT, hashes, extras) == expected


def test_chain_hashes_alone_have_the_same_parent(names):
    hashes = [DATA[i : i + size] for i, size in enumerate((16, 64, 20, 20, 33))]
    each = [kernels.chain_hashes(SECRET, PARENT, [one], b"adapter") for one in hashes]
    assert kernels.chain_hashes(SECRET, PARENT, hashes, b"adapter", True) == b"".join(each)


@pytest.mark.parametrize("size", [0, 15, 65])
def test_chain_hashes_refuses_hashes_of_odd_length(size):
    with pytest.raises(ValueError, match="16 to 64"):
        kernels.chain_hashes(SECRET, PARENT, [bytes(size)])


def test_chain_hashes_and_chain_keys_never_give_equal_keys():
    content = DATA[:32]
    tokens = array("I", content)
    assert kernels.chain_keys(SECRET, PARENT, tokens, 8) != kernels.chain_hashes(
        SECRET, PARENT, [content]
    )


def test_force_refuses_unavailable_levels():
    with pytest.raises(ValueError, match="unknown kind"):
        kernels.force("sorting", "auto")
    with pytest.raises(ValueError, match="no implementation"):
        kernels.force("copy", "quantum")
    assert "scalar" in kernels.implementations("copy")
