"""The models of the calibrated codecs: the largest errors of decoded values, and input that is never
encoded."""

from __future__ import annotations

import hashlib
import math
import random

import numpy as np
import pytest

from models.codecs import inverses, steps
from models.kernels import lossy
from models.kernels.lossy import DamagedError, Floats, Quantizer, Rope, Shape
from support.effort import effort

BF16, FP16, FP32 = range(3)
ELEMENTS = [BF16, FP16, FP32]
TABLE = [4, 20, 60, 88, 60, 20, 3, 1]  # from -3 to 3, and the escape
SHAPES = [
    (1, Shape(1, 1)),
    (1, Shape(2, 64)),
    (15, Shape(3, 5)),
    (16, Shape(8, 128)),
    (17, Shape(1, 80)),
    (256, Shape(2, 64)),
    (300, Shape(3, 72)),
    (40, Shape(1, 40, 8)),
]
HEADER_AND_STATES = 8 + 8 + 128


def rope_of(pairs: int, interleaved: bool = False) -> Rope:
    angles = [10_000 ** (-pair / pairs) for pair in range(pairs)]
    turns = [round(angle / (2 * math.pi) * 2**64) for angle in angles]
    return Rope(np.array(turns, np.uint64), interleaved)


def quantizer_of(channels: int, seed: int = 0) -> Quantizer:
    """Steps from a fifth to one."""
    exponents = random.Random(seed).choices(range(142, 161), k=channels)
    return Quantizer(
        np.frombuffer(steps(bytes(exponents)), np.float32),
        np.frombuffer(inverses(bytes(exponents)), np.float32),
    )


def anchors_of(channels: int) -> Quantizer:
    exponents = bytes([120] * channels)
    return Quantizer(np.array(steps(exponents), "f4"), np.array(inverses(exponents), "f4"))


def means_of(channels: int) -> Floats:
    return np.linspace(-2, 2, channels).astype(np.float32)


def drawn(tokens: int, shape: Shape, element: int, seed: int = 0) -> bytes:
    values = np.random.default_rng(seed).standard_normal(tokens * shape.heads * shape.dim)
    return lossy.narrowed(element, values.astype(np.float32))


class Ecsq:
    """A part's codec, without the part."""

    def __init__(self, shape: Shape, element: int, rope: Rope | None = None, position: int = 0):
        self.fixed = (shape, 1, means_of(shape.channels), quantizer_of(shape.channels), TABLE, rope)
        self.element, self.position = element, position

    def encode(self, data: bytes) -> bytes | None:
        return lossy.encode_ecsq(*self.fixed, self.element, self.position, data)

    def decode(self, text: bytes, raw_bytes: int) -> bytes:
        return lossy.decode_ecsq(*self.fixed, self.element, text, raw_bytes)


class Cachegen:
    def __init__(self, shape: Shape, element: int, group: int = 16):
        self.fixed = (
            shape, 2, group, anchors_of(shape.channels), quantizer_of(shape.channels), TABLE, element,
        )  # fmt: skip

    def encode(self, data: bytes) -> bytes | None:
        return lossy.encode_cachegen(*self.fixed, data)

    def decode(self, text: bytes, raw_bytes: int) -> bytes:
        return lossy.decode_cachegen(*self.fixed, text, raw_bytes)


def encoded(codec: Ecsq | Cachegen, data: bytes) -> bytes:
    text = codec.encode(data)
    assert text is not None
    return text


def values_of(shape: Shape, element: int, data: bytes) -> Floats:
    return lossy.widened(element, data).reshape(-1, shape.heads, shape.dim)


def rounding(element: int, values: Floats) -> Floats:
    """Half of the last place of each value."""
    digits = {BF16: 8, FP16: 11, FP32: 24}[element]
    found: Floats = np.abs(values) * np.float32(2.0**-digits) + np.float32(2.0**-25)
    return found


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize(("tokens", "shape"), SHAPES)
def test_ecsq_is_within_half_a_step_before_rotation(
    element: int, tokens: int, shape: Shape
) -> None:
    pairs = shape.coded // 4  # not all dims are rotated
    for rope, position in ((None, 0), (rope_of(pairs), 7), (rope_of(pairs, True), 1_000_003)):
        if rope is not None and not pairs:
            continue
        codec = Ecsq(shape, element, rope, position)
        data = drawn(tokens, shape, element)
        text = encoded(codec, data)
        back = codec.decode(text, len(data))
        one, other = values_of(shape, element, data), values_of(shape, element, back)
        assert (one[..., shape.coded :] == other[..., shape.coded :]).all()
        one, other = one[..., : shape.coded], other[..., : shape.coded]
        slack = rounding(element, other) * 2
        if rope is not None:
            slack = np.full_like(slack, slack.max())
            one, other = (lossy.rotated(x, rope, position, back=True) for x in (one, other))
        bound = codec.fixed[3].steps.reshape(shape.heads, shape.coded) / 2
        apart = np.abs(one - other)
        assert (apart <= bound * 1.00001 + slack).all()
        # At least this coarse: the step is used as configured.
        assert tokens < 200 or apart.max() > 0.45 * bound.max()


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize(("tokens", "shape"), SHAPES)
def test_cachegen_is_within_half_a_step(element: int, tokens: int, shape: Shape) -> None:
    codec = Cachegen(shape, element)
    data = drawn(tokens, shape, element)
    back = codec.decode(encoded(codec, data), len(data))
    one, other = values_of(shape, element, data), values_of(shape, element, back)
    assert (one[..., shape.coded :] == other[..., shape.coded :]).all()
    one, other = one[..., : shape.coded], other[..., : shape.coded]
    bound = np.repeat(codec.fixed[4].steps.reshape(1, shape.heads, -1) / 2, tokens, axis=0)
    bound[::16] = codec.fixed[3].steps.reshape(shape.heads, -1) / 2
    assert (np.abs(one - other) <= bound * 1.00001 + rounding(element, other) * 2).all()


def test_anchors_far_from_zero_are_escaped() -> None:
    shape = Shape(2, 64)
    values = values_of(shape, FP32, drawn(64, shape, FP32)).copy()
    values[16, 0, 3], values[32, 1, 9], values[0, 0, 0] = 700.0, -800.0, -4.0  # with steps of 1/32
    codec = Cachegen(shape, FP32)
    text = encoded(codec, values.tobytes())
    assert lossy.HEADER.unpack_from(text)[3] == 3
    back = values_of(shape, FP32, codec.decode(text, values.nbytes))
    assert np.abs(back - values)[::16].max() <= 1 / 64 + 1e-4
    assert np.abs(back - values).max() <= 0.51


def test_numbers_beyond_the_table_are_encoded_as_escapes() -> None:
    shape = Shape(2, 64)
    codec = Ecsq(shape, FP32)
    quantizer, means = codec.fixed[3], codec.fixed[2]
    numbers = np.random.default_rng(1).choice([-32767, -5, -4, -3, 0, 3, 4, 5, 32767], (300, 128))
    values = (numbers.astype(np.float32) * quantizer.steps + means).astype(np.float32)
    text = encoded(codec, values.tobytes())
    back = lossy.widened(FP32, codec.decode(text, values.nbytes)).reshape(300, 128)
    assert (np.rint((back - means) * quantizer.inverses) == numbers).all()
    # 300 tokens of 128 channels are two streams.
    lengths = [lossy.STREAM.unpack_from(text, 8 + 8 * number) for number in range(2)]
    assert sum(escapes for _, escapes in lengths) == int((np.abs(numbers) > 3).sum())


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_a_part_with_a_number_that_is_not_finite_is_raw(element: int, odd: float) -> None:
    shape = Shape(2, 64)
    values = lossy.widened(element, drawn(64, shape, element)).copy()
    sound = lossy.narrowed(element, values)
    codecs = (Ecsq(shape, element), Ecsq(shape, element, rope_of(16), 5), Cachegen(shape, element))
    for codec in codecs:
        assert codec.encode(sound) is not None
    for at in (0, 5000):  # in an anchor, and in another token
        with np.errstate(invalid="ignore"):
            changed = values.copy()
        changed[at] = odd
        if element == BF16:
            text = (changed.view(np.uint32) >> 16).astype("<u2").tobytes()
        else:
            text = changed.astype("<f2" if element == FP16 else "<f4").tobytes()
        for codec in codecs:
            assert codec.encode(text) is None


def test_a_value_too_many_steps_away_makes_the_part_raw() -> None:
    shape = Shape(2, 64)
    values = values_of(shape, FP32, drawn(64, shape, FP32)).copy()
    ecsq, cachegen = Ecsq(shape, FP32), Cachegen(shape, FP32)
    means, ecsq_steps = ecsq.fixed[2][69], ecsq.fixed[3].steps[69]
    for sign in (-1, 1):
        values[3, 1, 5] = sign * np.float32(32_767) * ecsq_steps + means
        assert ecsq.encode(values.tobytes()) is not None
        values[3, 1, 5] = sign * np.float32(32_768) * ecsq_steps + means
        assert ecsq.encode(values.tobytes()) is None
        values[3, 1, 5] = sign * 32_768 * cachegen.fixed[4].steps[69] + values[0, 1, 5]
        assert cachegen.encode(values.tobytes()) is None
        values[3, 1, 5], values[16, 0, 0] = 0, sign * 1024.0  # an anchor with steps of 1/32
        assert cachegen.encode(values.tobytes()) is None
        values[16, 0, 0] = 0
    # Twice this value is infinite, as the rotation of two such values would be.
    values[3, 1, 5] = 3e38
    values[3, 1, 21] = 3e38
    assert Ecsq(shape, FP32, rope_of(16), 5).encode(values.tobytes()) is None


@pytest.mark.parametrize("element", ELEMENTS)
def test_denormals_zeros_and_constants_are_encoded_like_other_values(element: int) -> None:
    shape = Shape(2, 64)
    size = 128 * lossy.WIDTH[element]
    constant = lossy.narrowed(element, np.full(128, 1.5, np.float32))
    for row in (bytes(size), b"\1" + bytes(size - 1), constant):
        for codec in (Ecsq(shape, element, rope_of(32), 9), Cachegen(shape, element)):
            data = row * 256
            text = codec.encode(data)
            assert text is not None
            one, other = (lossy.widened(element, x) for x in (data, codec.decode(text, len(data))))
            assert np.isfinite(other).all() and np.abs(one - other).max() <= 0.75


def test_parts_that_are_not_tokens_are_raw() -> None:
    shape = Shape(2, 64)
    for codec in (Ecsq(shape, BF16), Cachegen(shape, BF16)):
        assert codec.encode(b"") is None
        assert codec.encode(drawn(16, shape, BF16)[:-2]) is None


def test_one_stream_has_the_documented_size() -> None:
    for tokens, shape, bits in ((16, Shape(8, 128), 0.0703), (256, Shape(1, 128), 0.0352)):
        codec = Ecsq(shape, BF16)
        data = drawn(tokens, shape, BF16)
        text = codec.encode(data)
        assert text is not None
        words, escapes = lossy.STREAM.unpack_from(text, 8)
        assert len(text) - 2 * words - 2 * escapes == HEADER_AND_STATES
        assert abs(HEADER_AND_STATES * 8 / (len(data) / 2) - bits) < 1e-4
        assert lossy.HEADER.unpack_from(text)[2] == 1


def pinned(count: int) -> bytes:
    """Sums of three uniform numbers in bf16, computed only with integers."""
    i = np.arange(count, dtype=np.uint64)
    parts = [
        (i * np.uint64(odd) % np.uint64(1 << 32)) >> np.uint64(24)
        for odd in (2654435761, 40503, 97)
    ]
    values = (sum(part.astype(np.int64) for part in parts) - 382).astype(np.float32) / 128
    return lossy.narrowed(BF16, values)


@pytest.mark.parametrize(
    ("make", "text_digest", "back_digest"),
    [
        (lambda s: Ecsq(s, BF16), "50147f7543700643", "09b7afc4ed28922f"),
        (lambda s: Ecsq(s, BF16, rope_of(32), 70_000), "0a52103787387f3b", "40800697550b1298"),
        (lambda s: Ecsq(s, BF16, rope_of(20, True), 3), "780af065a00baea4", "e1396094790c0f0e"),
        (lambda s: Cachegen(s, BF16, 10), "a8584c812010ddd1", "ccce727f44ee33ee"),
    ],
)
def test_encoded_bytes_do_not_change_between_versions(make, text_digest, back_digest) -> None:
    shape = Shape(2, 64)
    data = pinned(300 * 128)
    codec = make(shape)
    text = codec.encode(data)
    assert hashlib.sha256(text).hexdigest()[:16] == text_digest
    assert hashlib.sha256(codec.decode(text, len(data))).hexdigest()[:16] == back_digest


def test_the_last_bits_of_the_arithmetic_do_not_change_between_versions() -> None:
    """A fused multiply-add, a quotient instead of an inverse, or another series would change these bits."""
    cos, sin = lossy.angles(rope_of(32), 123_456, 256)
    assert hashlib.sha256(cos.tobytes() + sin.tobytes()).hexdigest()[:16] == "09501500df1fe139"
    shape, count = Shape(2, 64), 256 * 128
    values = lossy.widened(BF16, pinned(count)) + np.arange(count, dtype=np.float32) / 3e4
    for codec, digest in (
        (Ecsq(shape, FP32, rope_of(32), 5), "a28fee8f821c3745"),
        (Cachegen(shape, FP32), "c831864bc2b9f255"),
    ):
        back = codec.decode(encoded(codec, values.tobytes()), values.nbytes)
        assert hashlib.sha256(back).hexdigest()[:16] == digest


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_encoding_of_k_does_not_depend_on_its_position(interleaved: bool) -> None:
    shape, tokens = Shape(2, 64), 64
    rope = rope_of(32, interleaved)
    codec = Ecsq(shape, FP32)
    numbers = np.random.default_rng(4).integers(-4, 5, (tokens, shape.channels))
    # Not between two steps, where the last bit would decide.
    plain = ((numbers + np.float32(0.2)) * codec.fixed[3].steps + codec.fixed[2]).astype(np.float32)
    plain = plain.reshape(tokens, shape.heads, shape.dim)
    texts, backs = [], []
    for position in (0, 1, 4096, 1_000_000, (1 << 32) - tokens):
        at = Ecsq(shape, FP32, rope, position)
        rotated = lossy.rotated(plain, rope, position)
        text = at.encode(rotated.tobytes())
        assert text is not None and lossy.HEADER.unpack_from(text)[3] == position
        texts.append(text[8:])
        back = values_of(shape, FP32, at.decode(text, rotated.nbytes))
        backs.append(lossy.rotated(back, rope, position, back=True))
    assert all(text == texts[0] for text in texts)
    assert all(np.abs(back - backs[0]).max() < 1e-5 for back in backs)
    assert np.abs(backs[0] - plain).max() > 0.1  # the rotated encoding was not exact
    elsewhere = Ecsq(shape, FP32, rope, 1).encode(lossy.rotated(plain, rope, 0).tobytes())
    assert elsewhere is not None and elsewhere[8:] != texts[0]


@pytest.mark.parametrize("position", [0, 1, 1000, 131_072, 10_000_000, (1 << 32) - 64])
def test_angles_are_right_at_any_position(position: int) -> None:
    rope = rope_of(32)
    cos, sin = lossy.angles(rope, position, 64)
    for token in range(64):
        for pair, turn in enumerate(rope.turns.tolist()):
            angle = 2 * math.pi * (((position + token) * turn % 2**64) / 2**64)
            assert abs(cos[token, pair] - math.cos(angle)) < 7e-8
            assert abs(sin[token, pair] - math.sin(angle)) < 7e-8


def test_the_table_of_rotations_does_not_depend_on_the_libm() -> None:
    for k in range(1024):
        for found, exact in (
            (lossy.COSINES[k], math.cos(2 * math.pi * k / 1024)),
            (lossy.SINES[k], math.sin(2 * math.pi * k / 1024)),
        ):
            place = float(np.spacing(abs(found)))
            if k % 256 == 0:
                assert float(found) == round(exact)
                assert np.signbit(found) == (round(exact) < 0)
            else:
                # Only an error far larger than the last bits of a double could change the result.
                assert abs(float(found) - exact) < (0.5 - 1e-4) * place


def test_elements_are_rounded_to_nearest_even_and_never_to_infinity() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0xFF7FFFFF, 0x00008000], "<u4")
    found = np.frombuffer(lossy.narrowed(BF16, bits.view("<f4")), "<u2")
    assert found.tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7F7F, 0xFF7F, 0x0000]
    halves = np.array([1 + 2**-11, 1 + 3 * 2**-11, 65520, -1e9, 2**-25, 2**-25 * 1.01], "<f4")
    found = np.frombuffer(lossy.narrowed(FP16, halves), "<u2")
    assert found.tolist() == [0x3C00, 0x3C02, 0x7BFF, 0xFBFF, 0, 1]
    every = np.arange(1 << 16, dtype="<u2")
    for element, finite in ((BF16, every & 0x7F80 != 0x7F80), (FP16, every & 0x7C00 != 0x7C00)):
        words = every[finite].tobytes()
        assert lossy.narrowed(element, lossy.widened(element, words)) == words


@pytest.mark.parametrize(
    "make", [lambda s: Ecsq(s, BF16, rope_of(16), 3), lambda s: Cachegen(s, BF16)]
)
def test_damaged_parts_are_refused_or_have_their_size(make) -> None:
    shape = Shape(1, 40, 8)
    codec = make(shape)
    data = drawn(64, shape, BF16)
    text = codec.encode(data)
    assert text is not None
    chance = random.Random(5)
    refused = 0
    rounds = effort(500, 1500, 1500)
    for _ in range(rounds):
        other = bytearray(text)
        where = chance.randrange(32) if chance.random() < 0.4 else chance.randrange(len(other))
        kind = chance.random()
        if kind < 0.6:
            other[where] ^= 1 << chance.randrange(8)
        elif kind < 0.8:
            del other[where : where + chance.randint(1, 40)]
        else:
            other[where:where] = chance.randbytes(chance.randint(1, 40))
        try:
            back = codec.decode(bytes(other), len(data))
        except DamagedError:
            refused += 1
            continue
        assert len(back) == len(data)
        assert np.isfinite(lossy.widened(BF16, back).reshape(64, 40)[:, :32]).all()
    assert refused > rounds * 7 // 15
    for wrong in (len(data) - 80, len(data) - 2, 0, 2 * len(data)):
        with pytest.raises(DamagedError):
            codec.decode(text, wrong)
    for end in range(0, len(text), 7):
        with pytest.raises(DamagedError):
            codec.decode(text[:end], len(data))


def test_encoders_multiply_by_inverses_and_do_not_divide() -> None:
    shape = Shape(2, 64)
    codec = Ecsq(shape, FP32)
    halves = np.random.default_rng(6).integers(-40, 40, (256, 128)).astype(np.float32) + np.float32(
        0.5
    )
    plain = halves * codec.fixed[3].steps + codec.fixed[2]
    away = plain - codec.fixed[2]
    numbers, _ = lossy._read_streams(encoded(codec, plain.tobytes()), 8, plain.size, 1, TABLE)
    assert (numbers.reshape(256, 128) == np.rint(away * codec.fixed[3].inverses)).all()
    assert (numbers.reshape(256, 128) != np.rint(away / codec.fixed[3].steps)).any()


def test_a_last_row_with_other_padding_is_refused() -> None:
    shape = Shape(3, 5)
    codec = Ecsq(shape, BF16)
    text = encoded(codec, drawn(15, shape, BF16))  # 225 numbers, and 31 more that fill the row
    numbers, _ = lossy._read_streams(text, 8, 225, 1, TABLE)
    for filling in (0, 1):
        _, lengths, body = lossy._write_streams(np.append(numbers, [filling] * 31), TABLE)
        other = text[:8] + lengths + body
        if filling:
            with pytest.raises(DamagedError, match="filled up"):
                codec.decode(other, 450)
        else:
            assert other == text


def test_exact_dims_are_kept_for_any_content() -> None:
    shape = Shape(1, 40, 8)
    words = np.frombuffer(drawn(64, shape, BF16), "<u2").reshape(64, 40).copy()
    words[:, 32:] = 0x7FC1  # NaNs
    words[:, 36:] = np.random.default_rng(0).integers(0, 1 << 16, (64, 4))
    for codec in (Ecsq(shape, BF16), Cachegen(shape, BF16)):
        text = codec.encode(words.tobytes())
        assert text is not None
        back = np.frombuffer(codec.decode(text, words.nbytes), "<u2").reshape(64, 40)
        assert (back[:, 32:] == words[:, 32:]).all()
        assert (back[:, :32] != words[:, :32]).any()
