"""The lossless codecs compared with their models, on every processor level, and with invalid input."""

import os
import random
import struct
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

import kvtier_kernels as kernels
from models import kernels as reference
from models.kernels.codec import FIX4, FORMS, PLANES, R32, RAW, frequencies
from support.cuda_codecs import DEVICE
from support.effort import effort

CODECS = [FIX4, R32, PLANES]


def codecs_of(level: str) -> list[int]:
    """Frames in planes never leave the memory of a host."""
    return CODECS[:2] if level == DEVICE else CODECS


ELEMENTS = range(5)
BF16, FP16, FP32, E4M3, E5M2 = ELEMENTS
ITEM = [2, 2, 4, 1, 1]
# In elements: around the size of a row, a tile, a stream and several streams.
COUNTS = [0, 1, 2, 31, 63, 64, 65, 200, 1000, 4097, 8192 + 64, 32767, 32768, 32769, 70001, 140000]


def normal(element: int, count: int, seed: int = 0) -> bytes:
    """Normal values, like those of K and V; e4m3 and e5m2 are derived from fp16."""
    drawn = np.random.default_rng(seed).standard_normal(count).astype(np.float32)
    if element == FP32:
        return drawn.tobytes()
    if element == BF16:
        return (drawn.view(np.uint32) >> 16).astype("<u2").tobytes()
    half = drawn.astype(np.float16).view(np.uint16)
    if element == FP16:
        return half.tobytes()
    if element == E5M2:
        return (half >> 8).astype(np.uint8).tobytes()
    sign, exponent, mantissa = half >> 15, (half >> 10 & 31).astype(int) - 8, half >> 7 & 7
    return (sign << 7 | np.clip(exponent, 0, 15) << 3 | mantissa).astype(np.uint8).tobytes()


def specials(element: int, count: int) -> bytes:
    """Normal values with zeros of both signs, denormals, infinities and NaNs with any payload among them."""
    width, exponent_bits = FORMS[element]
    bits, most = 8 * width, (1 << exponent_bits) - 1
    fraction = bits - 1 - exponent_bits
    words = np.frombuffer(normal(element, count), f"<u{width}").copy()
    rests = (0, 1, (1 << fraction) - 1)
    signs = (0, 1 << (bits - 1))
    values = [sign | exponent << fraction | rest
              for sign in signs for exponent in (0, most) for rest in rests]  # fmt: skip
    chance = np.random.default_rng(1)
    where = chance.integers(0, count, count // 9)
    words[where] = chance.choice(np.array(values, f"<u{width}"), len(where))
    return words.tobytes()


def noise(element: int, count: int) -> bytes:
    return random.Random(count).randbytes(count * ITEM[element])


def constant(element: int, count: int) -> bytes:
    return bytes(range(1, ITEM[element] + 1)) * count


def zeros(element: int, count: int) -> bytes:
    return bytes(count * ITEM[element])


def infinite(element: int, count: int) -> bytes:
    """Only the largest exponent: the best range for it could extend beyond the last exponent."""
    width, exponent_bits = FORMS[element]
    word = ((1 << exponent_bits) - 1) << (8 * width - 1 - exponent_bits)
    return word.to_bytes(width, "little") * count


def spread(element: int, count: int) -> bytes:
    """All exponents with equal frequency."""
    return (
        (np.arange(count * ITEM[element] // 2 + 1) * 25033)
        .astype("<u2")
        .tobytes()[: count * ITEM[element]]
    )


def hidden(element: int, count: int) -> bytes:
    """The rows that the encoder counts have few exponents; in the others nearly all values are escapes."""
    row = constant(element, 64)
    rows = [row if i % 64 == 0 else noise(element, 64) for i in range(count // 64)]
    return b"".join(rows) + zeros(element, count % 64)


KINDS: list[Callable[[int, int], bytes]] = [
    normal,
    specials,
    noise,
    constant,
    zeros,
    infinite,
    spread,
    hidden,
]


# The models are slow, so each result is computed once and compared with all levels.
@cache
def encoded_by_twin(codec: int, element: int, part: bytes) -> tuple[int, bytes]:
    [found] = reference.encode_parts(codec, element, [part])
    return found


decoded_by_twin = cache(reference.decode_part)


def encoded(codec: int, element: int, parts: list[bytes]) -> tuple[list[tuple[int, int]], bytes]:
    block = b"".join(parts)
    into = bytearray(len(block))
    found = kernels.encode_parts(codec, element, block, [len(part) for part in parts], into)
    return found, bytes(into[: sum(size for _, size in found)])


def places(found: list[tuple[int, int]], parts: list[bytes]) -> list[tuple[int, int, int, int]]:
    at, result = 0, []
    for (codec, size), part in zip(found, parts, strict=True):
        result.append((codec, at, size, len(part)))
        at += size
    return result


@pytest.mark.sampled(14)
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("codec", CODECS)
def test_encoded_bytes_equal_those_of_the_model_and_are_decoded(level, codec, element):
    if codec not in codecs_of(level):
        return
    for kind in KINDS:
        for count in COUNTS if kind is normal else COUNTS[:12]:
            parts = [kind(element, count) if count else b""]
            found, payload = encoded(codec, element, parts)
            twin_codec, twin = encoded_by_twin(codec, element, parts[0])
            assert (found, payload) == ([(twin_codec, len(twin))], twin), (kind.__name__, count)
            assert decoded_by_twin(twin_codec, element, twin, len(parts[0])) == parts[0]
            back = bytearray(len(parts[0]))
            assert kernels.decode_parts(element, payload, places(found, parts), back) == 1
            assert back == parts[0], (kind.__name__, count)


@pytest.mark.parametrize("lane", [3, 20])  # in each half of a row
def test_a_state_that_is_just_full_writes_its_word_at_once(level, lane):
    """The first symbol's share is 1 in 256, so that it takes a new state, 2^15, to 2^23, which is just
    too large: its word is written before that of another lane, a row later."""
    words = np.full((64, 32), 120 << 7, "<u2")
    words[[-1, -2], lane] = words[[-2, -3], lane + 2] = 121 << 7
    parts = [words.tobytes()]
    [(codec, twin)] = reference.encode_parts(R32, BF16, parts)
    assert codec == R32 and twin[8] == 1  # the expected frequency
    assert encoded(R32, BF16, parts) == ([(R32, len(twin))], twin)


@pytest.mark.sampled(14)
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("codec", CODECS)
def test_each_part_of_a_block_can_be_decoded_alone_for_any_size(level, codec, element):
    """The decoder processes streams of different parts together, in groups of four and in the remainder."""
    if codec not in codecs_of(level):
        return
    chance = random.Random(7)
    for _ in range(12):
        parts = []
        for number in range(chance.randrange(1, 12)):
            kind = chance.choice(KINDS)
            part = kind(element, chance.choice([0, 3, 64, 700, 5000, 33000, 70000]))
            parts.append(part + bytes(chance.randrange(3)) if number % 2 else part)
        found, payload = encoded(codec, element, parts)
        twins = [encoded_by_twin(codec, element, part) for part in parts]
        assert found == [(taken, len(text)) for taken, text in twins]
        assert payload == b"".join(text for _, text in twins)
        back = bytearray(sum(map(len, parts)))
        assert kernels.decode_parts(element, payload, places(found, parts), back) == len(parts)
        assert back == b"".join(parts)
        number = chance.randrange(len(parts))
        alone = bytearray(len(parts[number]))
        assert kernels.decode_parts(element, payload, [places(found, parts)[number]], alone) == 1
        assert alone == parts[number]


def test_every_bf16_value_is_restored(level):
    words = np.arange(1 << 16).astype("<u2")
    parts = [np.tile(words[(words >> 10 & 31) == eight], 4).tobytes() for eight in range(32)]
    for codec in codecs_of(level):
        found, payload = encoded(codec, BF16, parts)
        assert {taken for taken, _ in found} == {codec}
        back = bytearray(4 << 17)
        assert kernels.decode_parts(BF16, payload, places(found, parts), back) == 32
        assert back == b"".join(parts)


def test_compression_ratios_are_as_expected(level):
    part = normal(BF16, 32768)
    for codec, element, least in (
        (FIX4, BF16, 1.33), (FIX4, FP16, 1.05), (FIX4, FP32, 1.13), (R32, BF16, 1.48), (PLANES, BF16, 1.48),
        (R32, FP16, 1.15), (R32, FP32, 1.19), (R32, E4M3, 1.1), (R32, E5M2, 1.3),
    ):  # fmt: skip
        if codec not in codecs_of(level):
            continue
        part = normal(element, 32768)
        [(taken, size)], _ = encoded(codec, element, [part])
        assert taken == codec and len(part) / size >= least, (codec, element, len(part) / size)


def test_heads_of_different_sizes_are_all_counted(level):
    """Rows come from 16 heads in turn: a sample at equal steps would contain only one head."""
    rows = np.frombuffer(normal(BF16, 64 * 256), "<u2").reshape(256, 64).copy()
    larger = np.arange(256) % 16 // 4 * 4  # by powers of two
    rows += (larger << 7).astype("<u2")[:, None]
    for codec, least in ((FIX4, 1.2), (R32, 1.3)):
        [(taken, size)], _ = encoded(codec, BF16, [rows.tobytes()])
        assert taken == codec and rows.nbytes / size >= least, (codec, rows.nbytes / size)


def test_incompressible_parts_are_stored_raw_within_their_size(level, guarded):
    for codec in codecs_of(level):
        for element in ELEMENTS:
            part = noise(element, 9999)
            target = guarded(len(part), 5)
            found = kernels.encode_parts(codec, element, part, [len(part)], target.array)
            assert found == [(RAW, len(part))] and target.array.tobytes() == part
            assert target.intact()


def test_encoding_and_decoding_stay_within_their_buffers(level, guarded):
    for codec in codecs_of(level):
        for element in ELEMENTS:
            for count in (64, 65, 127, 1000, 8191, 33001):
                part = normal(element, count) + b"odd"[: ITEM[element] - 1]
                target = guarded(len(part), 3)
                [(taken, size)] = kernels.encode_parts(
                    codec, element, part, [len(part)], target.array
                )
                assert target.intact()
                payload, back = guarded(size, 4096 - size % 4096), guarded(len(part), 7)
                payload.array[:] = target.array[:size]
                where = [(taken, 0, size, len(part))]
                assert kernels.decode_parts(element, payload.array, where, back.array) == 1
                assert back.array.tobytes() == part and back.intact()


@pytest.mark.sampled(14)
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("codec", CODECS)
def test_large_blocks_written_past_the_caches_are_the_same(level, guarded, codec, element):
    """Whole cache lines are written, at any alignment. Both ends have special cases."""
    if codec not in codecs_of(level):
        return
    counts = [33000, 64, 65, 32768, 100, 128 * 64 + 1]
    parts = [normal(element, count, seed) for seed, count in enumerate(counts)]
    parts.append(noise(element, 500))
    block_bytes = sum(map(len, parts))
    parts += [normal(element, (1 << 20) // ITEM[element], 9), b"odd"]
    alone = [encoded(codec, element, [part]) for part in parts]
    payload = b"".join(text for _, text in alone)
    found = [one for [one], _ in alone]
    assert block_bytes < 1 << 20
    if (codec, element) != (FIX4, E4M3):  # this codec cannot shrink e4m3
        assert {codec, RAW} == {taken for taken, _ in found}
    block = b"".join(parts)
    for offset in (0, 1, 8, 63):
        target = guarded(len(block), offset)
        sizes = [len(part) for part in parts]
        assert kernels.encode_parts(codec, element, block, sizes, target.array) == found
        assert target.array[: len(payload)].tobytes() == payload and target.intact()
        back = guarded(len(block), offset)
        where = places(found, parts)
        assert kernels.decode_parts(element, payload, where, back.array) == len(parts)
        assert back.array.tobytes() == block and back.intact()


def damaged(chance: random.Random, text: bytes) -> bytes:
    """Flipped bits, other bytes, a piece removed, inserted or cut off at the end, another number."""
    copy = bytearray(text)
    for _ in range(chance.choice([1, 1, 1, 2, 5, 40])):
        at = chance.randrange(len(copy)) if copy else 0
        near = chance.randrange(min(64, len(copy))) if copy else 0
        way = chance.randrange(7)
        if way == 0 and copy:
            copy[at] ^= 1 << chance.randrange(8)
        elif way == 1 and copy:
            copy[near] = chance.choice([0, 1, 2, 31, 32, 127, 128, 255, chance.randrange(256)])
        elif way == 2:
            del copy[at : at + chance.randrange(1, 200)]
        elif way == 3:
            copy[at:at] = chance.randbytes(chance.randrange(1, 200))
        elif way == 4:
            del copy[at:]
        elif way == 5 and len(copy) >= 8:
            number = chance.choice([0, 1, 0x7FFFFFFF, 0xFFFFFFFF, chance.randrange(1 << 20)])
            struct.pack_into("<I", copy, near // 4 * 4 if near + 4 <= len(copy) else 0, number)
        elif copy:
            copy[near] ^= 1 << chance.randrange(8)
    return bytes(copy)


def test_damaged_parts_are_an_error_or_bytes_and_touch_no_other_memory(level, guarded):
    """Every bit is checked except r32's escapes and rests, which the frame's digest protects."""
    chance = random.Random(11)
    rounds = int(os.environ.get("KVTIER_CODEC_ROUNDS", effort(120, 300, 300)))
    refused = 0
    for number in range(rounds):
        codec, element = chance.choice(codecs_of(level)), chance.choice(ELEMENTS)
        count = chance.choice([64, 65, 500, 4000, 33000])
        part = chance.choice([normal, specials])(element, count)
        found, payload = encoded(codec, element, [part])
        text = damaged(chance, payload) if number % 8 else chance.randbytes(len(payload))
        source, target = guarded(len(text), 4096 - len(text) % 4096), guarded(len(part), number % 9)
        source.array[:] = np.frombuffer(text, np.uint8)
        wanted = chance.choice([found[0][0], codec])
        where = [(wanted, 0, len(text), len(part))]
        refused += kernels.decode_parts(element, source.array, where, target.array) == 0
        assert target.intact() and source.intact()
    assert refused > rounds / 2  # parts with other lengths and numbers are always refused


def test_a_damaged_part_among_valid_ones_is_named(level):
    parts = [normal(BF16, 5000, seed) for seed in range(9)]
    for codec in codecs_of(level):
        found, payload = encoded(codec, BF16, parts)
        where = places(found, parts)
        for number, (_, at, size, _) in enumerate(where):
            text = bytearray(payload)
            text[at + (4 if codec == FIX4 else 8)] ^= 1  # an escape too many; a table of 257
            assert kernels.decode_parts(BF16, text, where, bytearray(90000)) == number
            short = [*where[:number], (codec, at, size - 1, 10000), *where[number + 1 :]]
            assert kernels.decode_parts(BF16, payload, short, bytearray(90000)) == number


def test_a_stream_whose_final_state_is_wrong_is_refused(level):
    """Every word and every state affects the final states."""
    part = normal(BF16, 20000)
    [(codec, size)], payload = encoded(R32, BF16, [part])
    where, states = [(codec, 0, size, len(part))], 8 + 32 + 8 + -(-20000 // 64) * 64
    for at in [*range(states, states + 128, 5), *range(states + 128, size, 97)]:
        text = bytearray(payload)
        text[at] ^= 0x10
        # Escapes are at the end, and raw.
        (escaped,) = struct.unpack_from("<I", payload, 44)
        kept = kernels.decode_parts(BF16, text, where, bytearray(len(part)))
        assert kept == (1 if at >= size - escaped else 0), at


def test_wrong_headers_of_otherwise_valid_parts_are_refused(level):
    part = constant(BF16, 4096)
    for codec in codecs_of(level):
        [(taken, size)], payload = encoded(codec, BF16, [part])
        where, back = [(taken, 0, size, len(part))], bytearray(len(part))
        assert kernels.decode_parts(BF16, payload, where, back) == 1
        lies = [{0: FP16}]
        if codec == R32:
            assert payload[2] == 2 and payload[8:11] == bytes([255, 1, 0])
            # One more symbol, which does not occur in the stream; one without a share; one fewer.
            lies += [{2: 3, 10: 1}, {2: 3}, {2: 1}, {11: 1}]
        for lie in lies:
            text = bytearray(payload)
            for at, value in lie.items():
                text[at] = value
            assert kernels.decode_parts(BF16, text, where, back) == 0, (codec, lie)
        count = {FIX4: 4, R32: 44, PLANES: 12}[codec]
        more = bytearray(payload + b"x")  # an escape without a use
        more[count] += 1
        assert kernels.decode_parts(BF16, more, [(taken, 0, size + 1, len(part))], back) == 0


def test_inconsistent_calls_are_refused():
    with pytest.raises(ValueError, match="codec"):
        kernels.encode_parts(3, 0, b"", [], bytearray())
    with pytest.raises(ValueError, match="grids"):
        kernels.encode_parts(4, 0, b"four", [4], bytearray(4), [(1, 1, 1, False)] * 2)
    with pytest.raises(ValueError, match="element"):
        kernels.encode_parts(FIX4, 5, b"", [], bytearray())
    with pytest.raises(ValueError, match="sizes"):
        kernels.encode_parts(FIX4, 0, b"four", [5], bytearray(9))
    with pytest.raises(ValueError, match="bound"):
        kernels.encode_parts(FIX4, 0, b"four", [4], bytearray(3))
    with pytest.raises(ValueError, match="too small"):
        kernels.decode_parts(0, b"four", [(RAW, 0, 4, 4)], bytearray(3))
    with pytest.raises(ValueError, match="codec"):
        kernels.decode_parts(0, b"four", [(200, 0, 4, 4)], bytearray(4))
    assert kernels.decode_parts(0, b"four", [(RAW, 0, 4, 4), (RAW, 3, 2, 2)], bytearray(6)) == 1
    assert kernels.decode_parts(0, b"four", [(RAW, 0, 4, 3)], bytearray(6)) == 0


def test_frequencies_always_sum_to_256():
    chance = random.Random(5)
    for _ in range(500):
        counts = [0] * 256
        for _ in range(chance.choice([1, 2, 10, 40, 256])):
            counts[chance.randrange(256)] = chance.choice([1, 2, 50, 10_000])
        _, shares = frequencies(counts)
        assert sum(shares) == 256 and min(shares) >= 1 and 2 <= len(shares) <= 32


@pytest.mark.parametrize("plane", range(3))
def test_planes_that_end_early_are_damaged_on_every_level(plane: int) -> None:
    """The sizes of the planes in the header change, but not their sum."""
    part = b"".join(normal(BF16, 60, n) + random.Random(n).randbytes(8) for n in range(64))
    ((codec, size),), text = encoded(PLANES, BF16, [part])
    assert codec == PLANES
    sizes = list(struct.unpack_from("<3I", text, 4))
    assert all(each >= 8 for each in sizes)
    sizes[plane] -= 8
    sizes[(plane + 1) % 3] += 8
    odd = text[:4] + struct.pack("<3I", *sizes) + text[16:]
    try:
        for level in kernels.implementations("codec"):
            kernels.force("codec", level)
            back = bytearray(len(part))
            assert kernels.decode_parts(BF16, odd, [(PLANES, 0, size, len(part))], back) == 0
    finally:
        kernels.force("codec", "auto")
