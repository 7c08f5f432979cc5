"""The fixed-rate codecs compared with their model, on every processor level, and with invalid input."""

from __future__ import annotations

import os
import random
import struct

import numpy as np
import numpy.typing as npt
import pytest

import kvtier_kernels as kernels
from models import kernels as reference
from models.kernels.quantized import (
    BITS,
    E2M1,
    E4M3,
    E5M2,
    E5M2_SIZES,
    FP8,
    GROUP,
    GROUPS,
    MXFP4,
    NVFP4,
    Q2,
    Q4,
    Q8,
    WIDTHS,
    Grid,
)
from support.effort import effort

BF16, FP16, FP32 = ELEMENTS = range(3)
Floats = npt.NDArray[np.float32]
# One token, an odd number of heads, heads of several groups, more tokens than a group, several
# matrices (the last number).
SHAPES = [
    (Grid(256, 128, 64, False), 1), (Grid(256, 128, 64, True), 1), (Grid(1, 64, 64, True), 1),
    (Grid(1, 4096, 128, True), 1), (Grid(1, 8, 1, False), 1), (Grid(7, 67, 67, True), 3),
    (Grid(7, 67, 67, False), 3), (Grid(300, 33, 11, False), 2), (Grid(300, 160, 80, True), 2),
    (Grid(16, 4, 4, False), 8), (Grid(31, 5000, 500, False), 1), (Grid(31, 5000, 500, True), 1),
    (Grid(16, 1024, 128, False), 2), (Grid(515, 64, 64, False), 1),
]  # fmt: skip


def drawn(grid: Grid, matrices: int, seed: int = 0) -> Floats:
    """Values like those of K and V: channels with different deviations, and some far from zero."""
    chance = np.random.default_rng(seed)
    rows = grid.rows * matrices
    deviation = np.exp(chance.normal(0, 0.6, grid.channels))
    middle = np.where(chance.random(grid.channels) < 0.1, chance.normal(0, 8, grid.channels), 0)
    values = chance.standard_normal((rows, grid.channels)) * deviation + middle
    return values.astype(np.float32)


def bytes_of(element: int, values: Floats) -> bytes:
    if element == BF16:
        return (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    return values.astype("<f2" if element == FP16 else "<f4").tobytes()


def floats_of(element: int, text: bytes) -> Floats:
    if element == BF16:
        return (np.frombuffer(text, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(text, "<f2" if element == FP16 else "<f4").astype(np.float32)


def encoded(codec: int, element: int, part: bytes, grid: Grid) -> tuple[int, bytes]:
    into = bytearray(len(part))
    [(taken, size)] = kernels.encode_parts(codec, element, part, [len(part)], into, [grid])
    return taken, bytes(into[:size])


def decoded(codec: int, element: int, text: bytes, raw_bytes: int) -> bytes | None:
    back = bytearray(raw_bytes)
    sound = kernels.decode_parts(element, text, [(codec, 0, len(text), raw_bytes)], back)
    return bytes(back) if sound else None


def same(codec: int, element: int, part: bytes, grid: Grid) -> bytes | None:
    """The decoded values if kernel and model agree on all bytes; None if both store the part raw."""
    taken, text = encoded(codec, element, part, grid)
    twin = reference.encode_quantized(codec, element, part, grid)
    if twin is None:
        assert (taken, text) == (0, part)
        return None
    assert taken == codec and text == twin
    back = decoded(codec, element, text, len(part))
    assert back == reference.decode_quantized(twin, len(part))
    return back


@pytest.mark.sampled(17)
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("codec", BITS)
def test_bytes_equal_those_of_the_model_in_every_shape(level, codec, element):
    encoded_shapes = 0
    for grid, matrices in SHAPES:
        back = same(codec, element, bytes_of(element, drawn(grid, matrices)), grid)
        encoded_shapes += back is not None
    assert encoded_shapes > len(SHAPES) // 2  # a part of one token per channel may not shrink


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("codec", BITS)
def test_errors_are_at_most_half_a_step(level, codec, by_token):
    grid = Grid(256, 128, 64, by_token)
    values = drawn(grid, 1)
    for element in ELEMENTS:
        part = bytes_of(element, values)
        back = same(codec, element, part, grid)
        assert back is not None
        was, now = (floats_of(element, text).reshape(256, 128) for text in (part, back))
        if codec == E5M2:
            assert (np.abs(now - was) <= np.maximum(np.abs(was) / 8, 2.0**-17)).all()
            continue
        size = GROUPS.get(codec, GROUP)[by_token]
        groups = was.reshape(256, -1, size) if by_token else was.T.reshape(128, -1, size)
        if codec in GROUPS:
            # Half of the distance between the two largest floats, after a step was rounded.
            most = np.abs(groups).max(-1, keepdims=True)
            error = np.abs(now - was)
            error = error.reshape(256, -1, size) if by_token else error.T.reshape(128, -1, size)
            limit = most / (3.5 if codec == MXFP4 else 5.5) + most / 250
            assert (error <= limit + np.abs(was).max() / 448 / 64).all()
            continue
        groups = was.reshape(256, 2, 64) if by_token else was.T
        if codec == FP8:
            step = np.abs(groups).max(-1) / 448
            step = (step[..., None] if by_token else step[:, None]) * 1.01
            error = np.abs(now - was)
            error = error.reshape(256, 2, 64) if by_token else error.T
            assert (error <= np.maximum(np.abs(groups) / 15.9, step * 2**-9)).all()
            continue
        wide = np.abs(groups).max(-1) * 2 if codec == Q8 else groups.max(-1) - groups.min(-1)
        step = wide / (2 ** BITS[codec] - (2 if codec == Q8 else 1))
        error = np.abs(now - was)
        worst = error.reshape(256, 2, 64).max(-1) if by_token else error.T.max(-1)
        # A step and the least value are rounded to 8 bits, the decoded values to those of their
        # type.
        assert (worst <= step * 0.52 + np.abs(groups).max(-1) / 100).all()


def test_errors_and_sizes_are_as_measured(level):
    grid = {name: Grid(256, 128, 64, name == "v") for name in "kv"}
    values = drawn(grid["k"], 1)
    part = bytes_of(BF16, values - values.mean(0))
    for codec, error, ratio in (
        (Q8, 0.01, 1.95),
        (FP8, 0.04, 1.95),
        (Q4, 0.16, 3.6),
        (Q2, 0.8, 6.8),
        (E5M2, 0.08, 1.99),
        (NVFP4, 0.16, 3.5),
        (MXFP4, 0.2, 3.7),
    ):
        texts = [encoded(codec, BF16, part, one)[1] for one in grid.values()]
        assert 2 * len(part) / sum(map(len, texts)) >= ratio
        for text in texts:
            was, back = floats_of(BF16, part), decoded(codec, BF16, text, len(part))
            assert back is not None
            off = np.linalg.norm(floats_of(BF16, back) - was) / np.linalg.norm(was)
            assert error / 4 < off < error, (codec, off)


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("element", ELEMENTS)
def test_constants_and_zeros_of_both_signs_are_restored(level, element, by_token):
    grid = Grid(64, 64, 64, by_token)
    for codec in BITS:
        assert same(codec, element, bytes(64 * 64 * WIDTHS[element]), grid) == bytes(
            64 * 64 * WIDTHS[element]
        )
        signs = bytes_of(element, np.where(np.arange(4096) % 3 == 0, -0.0, 0.0).astype(np.float32))
        back = same(codec, element, signs, grid)
        assert back is not None and not floats_of(element, back).any()
        for number in (1.5, -1.5, 1e-4, -3.0):
            part = bytes_of(element, np.full((64, 64), number, np.float32))
            back = same(codec, element, part, grid)
            assert back is not None
            was = floats_of(element, part)
            # e5m2 and mxfp4 have no step that depends on the number.
            most = {E5M2: 1 / 8, MXFP4: 1 / 7}.get(codec, 2**-7)
            assert np.abs(floats_of(element, back) / was - 1).max() <= most


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("element", ELEMENTS)
def test_parts_with_nan_or_too_large_values_are_stored_raw(level, element, by_token):
    grid = Grid(64, 64, 64, by_token)
    largest = {BF16: 3.38e38, FP16: 65504.0, FP32: 3.4e38}[element]
    for codec in BITS:
        for bad in (np.nan, -np.nan, np.inf, -np.inf, [largest, -largest, -largest]):
            values = drawn(grid, 1)
            values.ravel()[[100, 101, 164]] = bad  # adjacent in a row, and in a channel
            with np.errstate(invalid="ignore"):
                back = same(codec, element, bytes_of(element, values), grid)
            if codec == NVFP4 and isinstance(bad, list):  # its largest value is exact
                assert back is not None and np.isfinite(floats_of(element, back)).all()
            else:
                assert back is None


@pytest.mark.parametrize("element", ELEMENTS)
def test_the_smallest_numbers_have_defined_steps(level, element):
    chance = np.random.default_rng(3)
    integer = f"<u{WIDTHS[element]}"
    for by_token in (False, True):
        grid = Grid(64, 64, 64, by_token)
        small = chance.integers(0, 100, 4096).astype(integer)
        signs = chance.integers(0, 2, 4096).astype(integer) << (8 * WIDTHS[element] - 1)
        for codec in BITS:
            back = same(codec, element, (small | signs.astype(integer)).tobytes(), grid)
            assert back is not None and np.isfinite(floats_of(element, back)).all()


def test_every_fp16_is_converted_through_8_bits_like_its_float(level):
    """Both conversions of fp16, including denormals: one number per group, and its step with 8 bits."""
    words = np.arange(1, 0x7800).astype("<u2").repeat(64)
    part = words.tobytes()
    grid = Grid(1, 64, 64, True)
    back = same(Q8, FP16, part, grid)
    assert back is not None
    was, now = floats_of(FP16, part), floats_of(FP16, back)
    assert np.abs(now - was).max() > 0 and (np.abs(now - was) <= was * 2**-7 + 2**-24).all()


def test_every_code_of_fp8_is_the_nearest_one(level):
    """Each of its numbers, each midpoint between two, and their neighbours, in a group with the largest
    number."""
    known = E4M3[:127]
    middles = (known[1:] + known[:-1]) / 2
    numbers = np.concatenate([known, middles])
    near = np.concatenate([numbers, np.nextafter(numbers, 500), np.nextafter(numbers, 0)])
    near = near[(near <= 448) & (near >= 0)].astype(np.float32)
    values = np.zeros((-(-len(near) // 31), 64), np.float32)
    values[:, 0] = 448  # so a step is 1
    flat = np.resize(near, (len(values), 31))
    values[:, 1:32], values[:, 33:] = flat, -flat
    back = same(FP8, FP32, values.tobytes(), Grid(len(values), 64, 64, True))
    assert back is not None
    now = floats_of(FP32, back).reshape(values.shape)
    away = np.abs(np.abs(values)[..., None] - known).min(-1)
    assert (np.abs(now - values) == away).all()
    assert (np.signbit(now) == np.signbit(values)).all()
    halves = np.isin(np.abs(values), middles)
    assert halves.any() and (np.searchsorted(known, np.abs(now[halves])) % 2 == 0).all()


def test_every_code_of_e5m2_is_the_nearest_one(level):
    """Each of its numbers, each midpoint between two, and their neighbours of each type."""
    numbers = np.concatenate([E5M2_SIZES, (E5M2_SIZES[1:] + E5M2_SIZES[:-1]) / 2]).astype("f4")
    for element in ELEMENTS:
        words = np.frombuffer(bytes_of(element, numbers), f"<u{WIDTHS[element]}").astype(np.int64)
        near = np.concatenate([words, words + 1, np.maximum(words - 1, 0)])
        text = np.resize(near, (-(-len(near) // 67), 67)).astype(f"<u{WIDTHS[element]}").tobytes()
        values = floats_of(element, text).reshape(-1, 67)
        values[:, ::2] *= -1
        back = same(E5M2, element, bytes_of(element, values), Grid(len(values), 67, 67, False))
        assert back is not None
        now = floats_of(element, back).reshape(values.shape)
        away = np.abs(np.abs(values)[..., None] - E5M2_SIZES).min(-1)
        assert (np.abs(now - values) == away).all()
        assert (np.signbit(now) == np.signbit(values)).all()


def test_values_that_round_to_the_infinity_of_e5m2_are_stored_raw(level):
    grid = Grid(64, 64, 64, True)
    for element in ELEMENTS:
        for number, stored in ((57344, True), (61184, True), (61440, False), (65280, False)):
            values = drawn(grid, 1)
            values[63, 63] = -number
            back = same(E5M2, element, bytes_of(element, values), grid)
            assert (back is not None) == stored
            assert back is None or floats_of(element, back)[-1] == -57344


@pytest.mark.parametrize("codec", [NVFP4, MXFP4])
def test_every_code_of_e2m1_is_the_nearest_one(level, codec):
    """Also of midpoints, which go to the even code, and of both signs; in groups whose step is a half."""
    sizes = np.sort(np.abs(E2M1[:8])) / 2
    numbers = np.concatenate([sizes, (sizes[1:] + sizes[:-1]) / 2])
    near = np.concatenate([numbers, numbers * (1 + 2**-7), numbers * (1 - 2**-7)])
    values = np.full((8, 64), 6, np.float32)
    values[:, 1:8], values[:, 17:24] = np.resize(near, (8, 7)), -np.resize(near[::-1], (8, 7))
    values[:, 33:48], values[:, 49:] = np.resize(near[:-2], (8, 15)), -np.resize(near, (8, 15))
    values = np.minimum(np.maximum(values, -6), 6)
    back = same(codec, BF16, bytes_of(BF16, values), Grid(8, 64, 64, True))
    assert back is not None
    was, now = floats_of(BF16, bytes_of(BF16, values)), floats_of(BF16, back)
    away = np.abs(np.abs(was)[:, None] - sizes).min(-1)
    assert np.abs(np.abs(now - was) - away).max() < 2**-7
    assert len(set(np.abs(now).tolist())) == 8


def test_the_scales_of_nvfp4_are_relative_to_the_part(level):
    """A group that is small relative to the part loses precision, and is zero at last."""
    values = np.ones((4, 64), np.float32)
    values[0, :16], values[1, :16] = 2688, 2.0**-9 * 6 * 1.125
    values[2, :16], values[3, :16] = 2.0**-9 * 6, 2.0**-12
    back = same(NVFP4, FP32, values.tobytes(), Grid(4, 64, 64, True))
    assert back is not None
    now = floats_of(FP32, back).reshape(values.shape)[:, 0]
    assert now.tolist() == [2688, 2.0**-9 * 6, 2.0**-9 * 6, 0]


def test_invalid_scales_of_nvfp4_are_refused(level):
    grid = Grid(64, 64, 64, True)
    for element in ELEMENTS:
        part = bytes_of(element, drawn(grid, 1))
        _, text = encoded(NVFP4, element, part, grid)
        for scale in (np.nan, np.inf, -1.0, 1e36):
            lie = bytearray(text)
            struct.pack_into("<f", lie, 16, scale)
            assert decoded(NVFP4, element, bytes(lie), len(part)) is None


@pytest.mark.sampled(2)
def test_large_blocks_are_the_same_at_any_alignment(level, guarded):
    """Large enough to be written past the caches, in whole cache lines."""
    grid, odd = Grid(256, 128, 64, False), Grid(9, 67, 67, True)
    for codec in BITS:
        for element in ELEMENTS:
            parts = [bytes_of(element, drawn(one, 1, n)) for n, one in enumerate([grid, odd] * 18)]
            grids = [grid, odd] * 18
            block = b"".join(parts)
            assert len(block) > 1 << 20
            alone = [
                encoded(codec, element, part, one) for part, one in zip(parts, grids, strict=True)
            ]
            target = guarded(len(block), 24)
            sizes = [len(part) for part in parts]
            found = kernels.encode_parts(codec, element, block, sizes, target.array, grids)
            assert found == [(taken, len(text)) for taken, text in alone] and target.intact()
            payload = target.array[: sum(size for _, size in found)].tobytes()
            assert payload == b"".join(text for _, text in alone)
            places, at = [], 0
            for (taken, size), part in zip(found, parts, strict=True):
                places.append((taken, at, size, len(part)))
                at += size
            back = guarded(len(block), 40)
            assert kernels.decode_parts(element, payload, places, back.array) == len(parts)
            assert back.intact() and back.array.tobytes() == b"".join(
                decoded(taken, element, text, len(part)) or b""
                for (taken, text), part in zip(alone, parts, strict=True)
            )


def test_parts_without_a_fitting_grid_are_stored_raw(level):
    part = bytes_of(BF16, drawn(Grid(16, 64, 64, True), 1))
    for grid in (
        Grid(0, 64, 64, True), Grid(16, 0, 64, True), Grid(16, 64, 0, True), Grid(15, 64, 64, True),
        Grid(16, 64, 48, True), Grid(1 << 31, 1 << 31, 64, True),
    ):  # fmt: skip
        assert encoded(Q8, BF16, part, grid) == (0, part)
    into = bytearray(len(part))
    assert kernels.encode_parts(Q8, BF16, part, [len(part)], into) == [(0, len(part))]
    assert encoded(Q8, 3, part, Grid(16, 128, 64, True)) == (0, part)


def test_wrong_headers_are_refused(level):
    grid = Grid(64, 64, 32, False)
    part = bytes_of(BF16, drawn(grid, 1))
    for codec in BITS:
        _, text = encoded(codec, BF16, part, grid)
        assert decoded(codec, BF16, text, len(part)) is not None
        lies = [
            (0, FP16),
            (1, 3),
            (2, 2),
            (3, 1),
            (4, 63),
            (4, 0),
            (8, 0),
            (8, 65),
            (12, 0),
            (12, 33),
        ]
        for at, value in lies:
            lie = bytearray(text)
            lie[at] = value
            assert decoded(codec, BF16, bytes(lie), len(part)) is None, (codec, at, value)
        huge = bytearray(text)
        struct.pack_into("<II", huge, 4, 0xFFFFFFFF, 0xFFFFFFFF)
        assert decoded(codec, BF16, bytes(huge), len(part)) is None
        for other in (text[:-1], text + b"x", text[:15], b""):
            assert decoded(codec, BF16, other, len(part)) is None
        for raw_bytes in (0, len(part) - 2, len(part) + 2, 2 * len(part)):
            assert decoded(codec, BF16, text, raw_bytes) is None


def test_damage_is_an_error_or_bytes_and_touches_no_other_memory(level, guarded):
    chance = random.Random(5)
    refused, rounds = 0, int(os.environ.get("KVTIER_CODEC_ROUNDS", effort(120, 300, 300)))
    for number in range(rounds):
        codec, element = chance.choice(list(BITS)), chance.choice(ELEMENTS)
        grid, matrices = chance.choice(SHAPES[:11])
        part = bytes_of(element, drawn(grid, matrices))
        taken, text = encoded(codec, element, part, grid)
        copy = bytearray(text)
        for _ in range(chance.choice([1, 2, 9])):
            at = chance.randrange(16 if chance.random() < 0.6 else len(copy))
            copy[at] = chance.choice([0, 1, 255, chance.randrange(256)])
        if chance.random() < 0.2:
            del copy[chance.randrange(len(copy)) :]
        source, target = guarded(len(copy), 8), guarded(len(part), number % 9)
        source.array[:] = np.frombuffer(copy, np.uint8)
        places = [(taken or codec, 0, len(copy), len(part))]
        refused += kernels.decode_parts(element, source.array, places, target.array) == 0
        assert target.intact() and source.intact()
    assert refused > rounds / 4
