"""The calibrated codecs compared with their models, on every processor level, and with invalid input."""

from __future__ import annotations

import math
import os
import random
import struct
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvtier_kernels as kernels
from models.codecs import inverses, steps
from models.kernels import lossy
from models.kernels.lossy import DamagedError, Quantizer, Rope, Shape
from support.effort import ALL, effort

ECSQ, CACHEGEN = 7, 8
CODECS = [ECSQ, CACHEGEN]
ROUNDS = int(os.environ.get("KVTIER_CODEC_ROUNDS", effort(100, 250, 250)))
BF16, FP16, FP32 = ELEMENTS = range(3)
LEVELS = kernels.implementations("codec")
TABLE = bytes([4, 20, 60, 88, 60, 20, 3, 1])  # from -3 to 3, and the escape
WIDE = bytes([*range(1, 16), 15, *range(15, 0, -1), 1])  # from -15 to 15
Floats = npt.NDArray[np.float32]


class RopeSaid(NamedTuple):
    turns: bytes
    interleaved: bool


@cache
def exponents_of(count: int) -> bytes:
    return bytes(random.Random(count).choices(range(142, 161), k=count))


@dataclass(frozen=True)
class Part:
    """A part's entry in a profile, for kernels and models."""

    shape: Shape
    rope: RopeSaid | None = None
    table: bytes = TABLE
    group: int = 10
    level: int = 1
    exponents: bytes = b""
    anchors: bytes = b""
    means: bytes = b""

    def __post_init__(self) -> None:
        count = self.shape.channels
        unsaid = {
            "exponents": exponents_of(count),
            "anchors": bytes([120] * count),
            "means": np.linspace(-2, 2, count, dtype="<f4").tobytes(),
        }
        for name, made in unsaid.items():
            object.__setattr__(self, name, getattr(self, name) or made)

    def native(self, codec: int) -> kernels.Calibration:
        ropes = [self.rope] if self.rope else []
        said = (
            *self.shape, 0 if self.rope else -1, self.means, self.anchors, self.exponents, self.table,
        )  # fmt: skip
        return kernels.Calibration(codec, self.level, self.group, ropes, [said])

    def turned(self) -> Rope | None:
        if self.rope is None:
            return None
        return Rope(np.frombuffer(self.rope.turns, "<u8"), self.rope.interleaved)


# The models are slow, so each result is computed once and compared with all levels.
@cache
def encoded_by_twin(
    part: Part, codec: int, element: int, position: int, data: bytes
) -> bytes | None:
    if codec == ECSQ:
        means = np.frombuffer(part.means, "<f4")
        return lossy.encode_ecsq(
            part.shape, part.level, means, quantizer(part.exponents), list(part.table),
            part.turned(), element, position, data,
        )  # fmt: skip
    return lossy.encode_cachegen(
        part.shape, part.level, part.group, quantizer(part.anchors), quantizer(part.exponents),
        list(part.table), element, data,
    )  # fmt: skip


@cache
def decoded_by_twin(part: Part, codec: int, element: int, text: bytes, raw_bytes: int) -> bytes:
    if codec == ECSQ:
        means = np.frombuffer(part.means, "<f4")
        return lossy.decode_ecsq(
            part.shape, part.level, means, quantizer(part.exponents), list(part.table),
            part.turned(), element, text, raw_bytes,
        )  # fmt: skip
    return lossy.decode_cachegen(
        part.shape, part.level, part.group, quantizer(part.anchors), quantizer(part.exponents),
        list(part.table), element, text, raw_bytes,
    )  # fmt: skip


def quantizer(exponents: bytes) -> Quantizer:
    return Quantizer(np.array(steps(exponents), "f4"), np.array(inverses(exponents), "f4"))


def rope_of(pairs: int, interleaved: bool = False) -> RopeSaid:
    angles = [10_000 ** (-pair / pairs) for pair in range(pairs)]
    turns = [round(angle / (2 * math.pi) * 2**64) for angle in angles]
    return RopeSaid(np.array(turns, "<u8").tobytes(), interleaved)


@lru_cache(64)
def drawn(tokens: int, shape: Shape, element: int, seed: int = 0) -> bytes:
    values = np.random.default_rng(seed).standard_normal(tokens * shape.heads * shape.dim)
    return lossy.narrowed(element, values.astype(np.float32))


def heads_first(shape: Shape, element: int, data: bytes) -> bytes:
    """The same part in the order of engines with pages of heads, each with its tokens."""
    words = np.frombuffer(data, np.uint8).reshape(-1, shape.heads, shape.dim * lossy.WIDTH[element])
    return np.ascontiguousarray(words.transpose(1, 0, 2)).tobytes()


def encoded(
    native: kernels.Calibration, element: int, position: int, data: bytes, by_heads: bool = False
) -> tuple[int, bytes]:
    into = bytearray(len(data))
    [(taken, size)] = kernels.encode_calibrated(
        native, element, data, [(0, len(data))], by_heads, position, into
    )
    return taken, bytes(into[:size])


def decoded(
    native: kernels.Calibration, codec: int, element: int, text: bytes, raw_bytes: int,
    by_heads: bool = False,
) -> bytes | None:  # fmt: skip
    back = bytearray(raw_bytes)
    place = (0, codec, 0, len(text), raw_bytes)
    sound = kernels.decode_calibrated(native, element, text, [place], by_heads, back)
    return bytes(back) if sound else None


def same(codec: int, part: Part, element: int, position: int, data: bytes) -> bytes | None:
    """The encoded bytes if kernel and model agree, in both orders, and both decode them to the same
    values; None if the part is raw."""
    native, shape = part.native(codec), part.shape
    twin = encoded_by_twin(part, codec, element, position, data)
    taken, text = encoded(native, element, position, data)
    if twin is None or len(twin) >= len(data):
        assert (taken, text) == (0, data)
        return None
    assert (taken, text) == (codec, twin)
    back = decoded_by_twin(part, codec, element, twin, len(data))
    assert decoded(native, codec, element, text, len(data)) == back
    turned = heads_first(shape, element, data)
    assert encoded(native, element, position, turned, True) == (codec, twin)
    found = decoded(native, codec, element, text, len(data), True)
    assert found == heads_first(shape, element, back)
    return twin


SHAPES = [
    (1, Shape(2, 64)), (1, Shape(64, 128)), (15, Shape(3, 5)), (16, Shape(8, 128)), (17, Shape(1, 80)),
    (256, Shape(2, 64)), (300, Shape(3, 72)), (40, Shape(1, 40, 8)), (33, Shape(4, 576, 64)),
    (700, Shape(2, 65, 1)), (3, Shape(40, 4096)), (1, Shape(1, 1)), (5, Shape(1, 3)),
]  # fmt: skip


@pytest.mark.sampled(9)
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("codec", CODECS)
def test_kernel_and_model_encode_and_decode_identically(level, codec, element):
    coded = 0
    for tokens, shape in SHAPES:
        pairs = shape.coded // 4  # not all dims are rotated
        ropes = [(None, 0), (rope_of(pairs), 7), (rope_of(pairs, True), 1_000_003)] if pairs else []
        if (element != BF16 or tokens * shape.channels > 1 << 16) and not ALL:
            ropes = ropes[
                2:
            ]  # the model of a large part takes long, and turns floats of any element
        for rope, position in ropes[: 3 if codec == ECSQ else 1] or [(None, 0)]:
            part = Part(shape, rope)
            coded += same(codec, part, element, position, drawn(tokens, shape, element)) is not None
    assert coded >= 10


# Sometimes numbers that are not finite, very large, or very small.
SPECIALS = {
    BF16: [0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x7F80, 0xFF80, 0x7FC1, 0x7F7F, 0xFF7F, 0x4700, 0xC700],
    FP16: [0x0000, 0x8000, 0x0001, 0x83FF, 0x7C00, 0xFC00, 0x7E01, 0x7BFF, 0xFBFF, 0x7000, 0xF400],
    FP32: [0, 0x80000000, 1, 0x807FFFFF, 0x7F800000, 0xFF800000, 0x7FC00001, 0x7F7FFFFF, 0x46FFFF00],
}  # fmt: skip


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, Part, int, int, bytes]:
    codec, element = draw(st.sampled_from(CODECS)), draw(st.sampled_from(ELEMENTS))
    dim = draw(st.sampled_from([1, 2, 3, 15, 16, 17, 31, 33, 40, 64, 80, 96, 127, 128]))
    exact = draw(st.sampled_from([0, 0, 0, 1, dim // 2]))
    shape = Shape(draw(st.integers(1, 5)), dim, exact if exact < dim else 0)
    tokens = draw(st.sampled_from([1, 2, 9, 10, 11, 21, 64, 130]))
    pairs = draw(st.integers(0, shape.coded // 2))
    rope = rope_of(pairs, draw(st.booleans())) if pairs else None
    table = draw(st.sampled_from([TABLE, WIDE, bytes([1, 1, 253, 1])]))
    position = draw(st.sampled_from([0, 1, 4096, 2**20 - 3, 2**31 - 1, 2**31, 2**32 - tokens]))
    chance = np.random.default_rng(draw(st.integers(0, 99)))
    count = shape.channels
    part = Part(
        shape, rope, table, draw(st.sampled_from([1, 2, 10, 256])), draw(st.integers(0, 2)),
        bytes(chance.integers(*draw(st.sampled_from([(120, 165), (0, 256)])), count).tolist()),
        bytes(chance.integers(*draw(st.sampled_from([(100, 125), (0, 256)])), count).tolist()),
        (chance.uniform(-4, 4, count) * draw(st.sampled_from([0, 1, 2.0**30]))).astype("<f4").tobytes(),
    )  # fmt: skip
    kind = draw(st.sampled_from(["normal", "constant", "specials", "denormal"]))
    words = np.frombuffer(
        drawn(tokens, shape, element, draw(st.integers(0, 99))), f"<u{lossy.WIDTH[element]}"
    )
    words = words.copy()
    if kind == "constant":
        words[:] = words[0]
    elif kind == "denormal":
        words &= {BF16: 0x807F, FP16: 0x83FF, FP32: 0x807FFFFF}[element]
    elif kind == "specials":
        for _ in range(draw(st.integers(1, 3))):
            words[draw(st.integers(0, len(words) - 1))] = draw(st.sampled_from(SPECIALS[element]))
    return codec, part, element, position, words.tobytes()


@settings(max_examples=ROUNDS, deadline=None)
@given(cases())
def test_any_part_is_encoded_and_decoded_as_by_its_model(case) -> None:
    for name in LEVELS:
        kernels.force("codec", name)
        try:
            same(*case)
        finally:
            kernels.force("codec", "auto")


def test_the_largest_numbers_are_escapes_and_one_more_is_raw(level) -> None:
    shape = Shape(2, 64)
    for codec in CODECS:
        part = Part(
            shape, exponents=bytes([160] * 128), anchors=bytes([160] * 128), means=bytes(512)
        )
        values = np.zeros((256, 128), "<f4")
        for number in (32767, -32767, 32767.49, -32767.49, 0.5, 1.5, 2.5, -2.5, 16383.5):
            values[11, 69] = number
            assert same(codec, part, FP32, 0, values.tobytes()) is not None, number
        for number in (32767.5, -32767.5, 32768, 65536, 2.0**31, 2.0**32, 3e38, np.inf, np.nan):
            for token in (10, 11):  # an anchor, and another token
                values[:] = 0
                values[token, 69] = number
                assert same(codec, part, FP32, 0, values.tobytes()) is None, number


def test_any_escapes_are_decoded(level) -> None:
    shape = Shape(3, 43)  # tokens cross streams
    for codec in CODECS:
        part = Part(
            shape, exponents=bytes([120] * 129), anchors=bytes([120] * 129), means=bytes(516)
        )
        for share in (0.0005, 0.1, 0.25):
            chance = np.random.default_rng(3)
            numbers = chance.integers(-3, 4, (700, 129))
            numbers[chance.random((700, 129)) < share] = 0
            far = chance.random((700, 129)) < share
            numbers[far] = chance.integers(-15000, 15000, int(far.sum()))
            values = (numbers * 2.0**-5).astype("<f4")
            text = same(codec, part, FP32, 0, values.tobytes())
            assert text is not None
            back = decoded_by_twin(part, codec, FP32, text, values.nbytes)
            assert (np.frombuffer(back, "<f4").reshape(700, 129) == values).all()


@pytest.mark.sampled(2)
def test_each_part_of_a_block_can_be_decoded_alone(level) -> None:
    """The decoder processes streams of different parts together, in groups of four and in the remainder."""
    chance = random.Random(7)
    rope = rope_of(16)
    for codec in CODECS:
        for round_ in range(effort(4, 8, 8)):
            shapes = [
                chance.choice([s for _, s in SHAPES[:8]]) for _ in range(chance.randrange(1, 9))
            ]
            said, parts, texts = [], [], []
            for number, shape in enumerate(shapes):
                turned = shape.coded >= 32 and number % 2 == 0
                part = Part(shape, rope if turned else None)
                said.append(
                    (*shape, 0 if turned else -1, part.means, part.anchors, part.exponents, TABLE)
                )  # fmt: skip
                data = drawn(chance.choice([1, 16, 300]), shape, BF16, number)
                if chance.random() < 0.2:
                    data = data[:-2] + b"\x80\x7f"  # infinite, so this part is raw
                twin = encoded_by_twin(part, codec, BF16, 77, data)
                parts.append(data)
                raw = twin is None or len(twin) >= len(data)
                texts.append((0, data) if raw or twin is None else (codec, twin))
            native = kernels.Calibration(codec, 1, 10, [rope], said)
            block, sizes = b"".join(parts), [(n, len(part)) for n, part in enumerate(parts)]
            into = bytearray(len(block))
            found = kernels.encode_calibrated(native, BF16, block, sizes, False, 77, into)
            assert found == [(taken, len(text)) for taken, text in texts], round_
            payload = b"".join(text for _, text in texts)
            assert into[: len(payload)] == payload
            places, at = [], 0
            for number, (taken, text) in enumerate(texts):
                places.append((number, taken, at, len(text), len(parts[number])))
                at += len(text)
            back = bytearray(len(block))
            assert kernels.decode_calibrated(native, BF16, payload, places, False, back) == len(
                parts
            )
            start = 0
            for number, place in enumerate(places):
                alone = bytearray(len(parts[number]))
                assert kernels.decode_calibrated(native, BF16, payload, [place], False, alone) == 1
                assert alone == back[start : start + len(alone)]
                start += len(alone)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("codec", CODECS)
def test_large_blocks_written_past_the_caches_are_the_same(level, guarded, codec) -> None:
    """From 1 MiB on, whole cache lines are written, at any alignment."""
    shape = Shape(2, 64)
    for element, tokens, by_heads in ((BF16, 4100, False), (FP32, 2050, False), (FP16, 4100, True)):
        part = Part(shape, rope_of(20))
        native = part.native(codec)
        data = drawn(tokens, shape, element)
        assert len(data) >= 1 << 20
        twin = encoded_by_twin(part, codec, element, 5, data)
        assert twin is not None
        back = decoded_by_twin(part, codec, element, twin, len(data))
        if by_heads:
            data, back = (heads_first(shape, element, one) for one in (data, back))
        for offset in (0, 1, 8, 63):
            target = guarded(len(data), offset)
            found = kernels.encode_calibrated(
                native, element, data, [(0, len(data))], by_heads, 5, target.array
            )
            assert found == [(codec, len(twin))] and target.intact()
            assert target.array[: len(twin)].tobytes() == twin
            out = guarded(len(data), offset)
            place = (0, codec, 0, len(twin), len(data))
            assert (
                kernels.decode_calibrated(native, element, twin, [place], by_heads, out.array) == 1
            )
            assert out.array.tobytes() == back and out.intact()


def test_encoding_and_decoding_stay_within_their_buffers(level, guarded) -> None:
    for codec in CODECS:
        for element in ELEMENTS:
            for tokens, shape in (
                (1, Shape(2, 64)),
                (16, Shape(3, 41)),
                (256, Shape(2, 64)),
                (21, Shape(1, 9, 2)),
            ):
                part = Part(shape, rope_of(3, True))
                native, data = part.native(codec), drawn(tokens, shape, element)
                source, target = guarded(len(data), 4096 - len(data) % 4096), guarded(len(data), 3)
                source.array[:] = np.frombuffer(data, np.uint8)
                [(taken, size)] = kernels.encode_calibrated(
                    native, element, source.array, [(0, len(data))], False, 9, target.array
                )  # fmt: skip
                assert target.intact()
                payload, back = guarded(size, 4096 - size % 4096), guarded(len(data), 7)
                payload.array[:] = target.array[:size]
                place = (0, taken, 0, size, len(data))
                assert kernels.decode_calibrated(
                    native, element, payload.array, [place], False, back.array
                ) == 1  # fmt: skip
                assert back.intact()


def damaged(chance: random.Random, text: bytes) -> bytes:
    copy = bytearray(text)
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        near = chance.randrange(min(64, len(copy))) if copy else 0
        at = near if chance.random() < 0.4 else chance.randrange(len(copy)) if copy else 0
        way = chance.randrange(5)
        if way == 0:
            copy[at] ^= 1 << chance.randrange(8)
        elif way == 1:
            copy[at] = chance.choice([0, 1, 127, 128, 255])
        elif way == 2:
            del copy[at : at + chance.randrange(1, 60)]
        elif way == 3:
            copy[at:at] = chance.randbytes(chance.randrange(1, 60))
        elif near + 4 <= len(copy):
            number = chance.choice([0, 1, 0x7FFFFFFF, 0xFFFFFFFF, chance.randrange(1 << 20)])
            struct.pack_into("<I", copy, near // 4 * 4 if len(copy) >= 4 else 0, number)
        if not copy:
            break
    return bytes(copy)


def test_damaged_parts_are_refused_like_by_the_models(level, guarded) -> None:
    """Or decoded to the same bytes: some damage is undetectable here, such as that of an escape."""
    chance = random.Random(13)
    refused = 0
    for number in range(ROUNDS):
        codec, element = chance.choice(CODECS), chance.choice(ELEMENTS)
        tokens, shape = chance.choice(
            [(21, Shape(2, 33)), (40, Shape(1, 40, 8)), (64, Shape(2, 64))]
        )
        part = Part(shape, rope_of(12), anchors=bytes([chance.choice([90, 120])] * shape.channels))
        native, data = part.native(codec), drawn(tokens, shape, element, number)
        text = encoded_by_twin(part, codec, element, 3, data)
        assert text is not None
        other = damaged(chance, text)
        source, target = (
            guarded(len(other), 4096 - len(other) % 4096),
            guarded(len(data), number % 9),
        )
        source.array[:] = np.frombuffer(other, np.uint8)
        place = (0, codec, 0, len(other), len(data))
        sound = kernels.decode_calibrated(
            native, element, source.array, [place], False, target.array
        )
        assert target.intact()
        try:
            twin = decoded_by_twin(part, codec, element, other, len(data))
        except DamagedError:
            twin = None
        assert (target.array.tobytes() if sound else None) == twin
        refused += not sound
    assert ROUNDS / 3 < refused < ROUNDS


def test_a_last_row_with_other_padding_is_refused(level) -> None:
    shape = Shape(3, 5)
    part = Part(shape)
    text = encoded_by_twin(part, ECSQ, BF16, 0, drawn(15, shape, BF16))
    assert text is not None
    numbers, _ = lossy._read_streams(text, 8, 225, 1, list(TABLE))  # and 31 more that fill the row
    for filling in (0, 1):
        _, lengths, body = lossy._write_streams(np.append(numbers, [filling] * 31), list(TABLE))
        found = decoded(part.native(ECSQ), ECSQ, BF16, text[:8] + lengths + body, 450)
        assert (found is None) == (filling == 1)


def test_an_escape_too_many_or_too_few_is_refused(level) -> None:
    shape = Shape(2, 64)
    for codec in CODECS:
        part = Part(shape, anchors=bytes([90] * 128))  # with anchors far away
        data = drawn(21, shape, BF16)
        text = encoded_by_twin(part, codec, BF16, 0, data)
        assert text is not None
        native, anchors_end = part.native(codec), 16 + 3 * 128
        places = [(12, len(text))]
        if codec == CACHEGEN:
            (far,) = struct.unpack_from("<I", text, 4)
            assert far > 9
            places.append((4, anchors_end + 2 * far))
        for count_at, end in places:
            (count,) = struct.unpack_from("<I", text, count_at)
            assert count > 9
            for more, middle in ((1, b"\1\0"), (-1, b"")):
                other = bytearray(text[: end - 2 * (more < 0)] + middle + text[end:])
                struct.pack_into("<I", other, count_at, count + more)
                assert decoded(native, codec, BF16, bytes(other), len(data)) is None
                with pytest.raises(DamagedError):
                    decoded_by_twin(part, codec, BF16, bytes(other), len(data))


def test_infinities_of_fp16_are_not_encoded_as_numbers(level) -> None:
    """With steps so large that 65,536 would be only a few of them."""
    shape = Shape(2, 64)
    for codec in CODECS:
        for rope in (None, rope_of(20), rope_of(20, True)):
            part = Part(shape, rope, exponents=bytes([200] * 128), anchors=bytes([200] * 128))
            words = np.frombuffer(drawn(64, shape, FP16), "<u2").copy()
            assert same(codec, part, FP16, 3, words.tobytes()) is not None
            for at in (0, 3000, 3045, 3063):
                for odd in (0x7C00, 0xFC00, 0x7E01, 0xFFFF):
                    wrong = words.copy()
                    wrong[at] = odd
                    assert same(codec, part, FP16, 3, wrong.tobytes()) is None


def test_a_damaged_part_among_valid_ones_is_named(level) -> None:
    shape = Shape(2, 64)
    part = Part(shape)
    said = (*shape, -1, part.means, part.anchors, part.exponents, TABLE)
    for codec in CODECS:
        native = kernels.Calibration(codec, 1, 10, [], [said] * 9)
        texts = [
            encoded_by_twin(part, codec, BF16, 0, drawn(256, shape, BF16, seed))
            for seed in range(9)
        ]
        payload = b"".join(text or b"" for text in texts)
        places, at = [], 0
        for number, text in enumerate(texts):
            assert text is not None
            places.append((number, codec, at, len(text), 256 * 256))
            at += len(text)
        back = bytearray(9 * 256 * 256)
        for number, (_, _, at, size, raw_bytes) in enumerate(places):
            for where in (0, 1, 2, 8, 12, size - 1):
                text = bytearray(payload)
                text[at + where] ^= 1
                known = size - 1 if texts[number][-2:] else 0
                if where == known and _escaped(codec, texts[number]):
                    continue  # in an escape
                assert kernels.decode_calibrated(native, BF16, text, places, False, back) == number
            short = [*places]
            short[number] = (number, codec, at, size - 1, raw_bytes)
            assert kernels.decode_calibrated(native, BF16, payload, short, False, back) == number
            short[number] = (-1, codec, at, size, raw_bytes)  # a part with an unknown place
            assert kernels.decode_calibrated(native, BF16, payload, short, False, back) == number


def _escaped(codec: int, text: bytes | None) -> bool:
    assert text is not None
    return lossy.STREAM.unpack_from(text, 8)[1] > 0


def test_inconsistent_calibrations_and_calls_are_refused() -> None:
    part = Part(Shape(2, 64), rope_of(16))
    rope, sound = part.rope, (2, 64, 0, 0, part.means, part.anchors, part.exponents, TABLE)

    def made(codec: int = ECSQ, group: int = 10, **changes: object) -> kernels.Calibration:
        names = ("heads", "dim", "exact", "rope", "means", "anchors", "exponents", "table")
        said = tuple(changes.get(name, one) for name, one in zip(names, sound, strict=True))
        return kernels.Calibration(codec, 0, group, [rope], [said])

    wrong: list[tuple[dict[str, object], str]] = [
        ({"codec": 6}, "codec"), ({"codec": 9}, "codec"), ({"group": 0}, "group"), ({"group": 257}, "group"),
        ({"heads": 0}, "heads"), ({"heads": 1025}, "heads"), ({"dim": 4097}, "channels"),
        ({"exact": 64}, "channels"), ({"dim": 31}, "rotate"), ({"exact": 33}, "rotate"),
        ({"rope": 1}, "rope"), ({"rope": -2}, "rope"), ({"heads": 3}, "steps"),
        ({"means": bytes(8)}, "means"), ({"means": part.means + b"x"}, "means"),
        ({"means": b"\0\0\xc0\x7f" * 128}, "mean"),
        ({"means": b"\0\0\0\x50" * 128}, "mean"), ({"table": TABLE[:-1]}, "table"),
        ({"table": bytes([255, 1])}, "table"), ({"table": TABLE + bytes(2)}, "table"),
        ({"table": bytes([5]) + TABLE[1:]}, "table"), ({"table": bytes([8]) * 34}, "table"),
        ({"codec": CACHEGEN, "anchors": b"x"}, "anchors"),
    ]  # fmt: skip
    for changes, what in wrong:
        with pytest.raises(ValueError, match=what):
            made(**changes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="turns"):
        kernels.Calibration(ECSQ, 0, 10, [(b"", False)], [])
    with pytest.raises(ValueError, match="turns"):
        kernels.Calibration(ECSQ, 0, 10, [(bytes(9), False)], [])
    native, data = made(), drawn(16, part.shape, BF16)
    with pytest.raises(ValueError, match="part"):
        kernels.encode_calibrated(native, 0, data, [(1, 16)], False, 0, bytearray(len(data)))
    with pytest.raises(ValueError, match="sizes"):
        kernels.encode_calibrated(native, 0, data, [(0, len(data) + 1)], False, 0, bytearray(9999))
    with pytest.raises(ValueError, match="bound"):
        kernels.encode_calibrated(native, 0, data, [(0, len(data))], False, 0, bytearray(9))
    with pytest.raises(ValueError, match="codec"):
        kernels.decode_calibrated(native, 0, data, [(0, CACHEGEN, 0, 9, 9)], False, bytearray(9))
    with pytest.raises(ValueError, match="too small"):
        kernels.decode_calibrated(native, 0, data, [(0, ECSQ, 0, 9, 10)], False, bytearray(9))
    assert (
        kernels.decode_calibrated(native, 0, data, [(0, 0, 4090, 9, 9)], False, bytearray(9)) == 0
    )


def test_parts_without_channels_stay_raw(level) -> None:
    shape = Shape(2, 64)
    for codec in CODECS:
        native, data = Part(shape).native(codec), drawn(16, shape, BF16)
        into = bytearray(len(data))
        assert encoded(native, BF16, 0, data)[0] == codec
        for element, cut, number in ((BF16, 2, 0), (BF16, 0, -1), (3, 0, 0), (4, 0, 0)):
            part = data[: len(data) - cut]
            sizes = [(number, len(part))]
            found = kernels.encode_calibrated(native, element, part, sizes, False, 0, into)
            assert found == [(0, len(part))] and into[: len(part)] == part
        assert encoded(native, BF16, 0, b"") == (0, b"")
