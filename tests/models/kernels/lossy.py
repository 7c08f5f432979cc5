"""The calibrated lossy codecs for one part; docs/formats.md describes the format.

Every operation on float32 is an IEEE operation, rounded to nearest, ties to even, with denormals
kept and without fused multiply-add: so CPUs and GPUs produce the same bits.
"""

import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier_kernels.cuda.cosines import COSINES, SINES
from models.kernels.codec import LANES, Numbers, rans_decode, rans_encode

Floats = npt.NDArray[np.float32]
BF16, FP16, FP32 = 0, 1, 2  # these codecs support no other types
WIDTH = (2, 2, 4)
STREAM_SYMBOLS = 32_768
HEADER = struct.Struct(
    "<BBHI"
)  # element, level, streams; ecsq's position, cachegen's escaped anchors
STREAM = struct.Struct("<II")  # words, escapes
STATES_BYTES = 4 * LANES
MOST = 32_767  # the maximum that an escape holds
ANCHOR_MOST, ANCHOR_ESCAPE = 127, -128
GREATEST = tuple(
    np.array(bits, np.uint32).view(np.float32) for bits in (0x7F7F0000, 0x477FE000, 0x7F7FFFFF)
)

RADIANS = np.float32(2 * np.pi / 2**34)
SIXTH = np.float32(1 / 6)
HALF = np.float32(0.5)


class DamagedError(ValueError):
    """The input is not valid for these codecs."""


class Shape(NamedTuple):
    """A part: tokens of `heads` heads of `dim` dims, of which the last `exact` are stored
    unchanged."""

    heads: int
    dim: int
    exact_dims: int = 0

    @property
    def coded(self) -> int:
        return self.dim - self.exact_dims

    @property
    def channels(self) -> int:
        return self.heads * self.coded


class Rope(NamedTuple):
    """How K is rotated: pair j by position times `turns[j]`, in units of 2^-64 turns."""

    turns: npt.NDArray[np.uint64]
    interleaved: bool


class Quantizer(NamedTuple):
    """A channel's step, and the factor that an encoder multiplies by."""

    steps: Floats
    inverses: Floats


# --- elements ------------------------------------------------------------------------------------


def widened(element: int, data: bytes) -> Floats:
    if element == BF16:
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    found: Floats = np.frombuffer(data, "<f2" if element == FP16 else "<f4").astype(np.float32)
    return found


def narrowed(element: int, values: Floats) -> bytes:
    """Rounded to the nearest value of the type, ties to even, never to infinity."""
    held = np.clip(values, -GREATEST[element], GREATEST[element])
    if element == FP16:
        return held.astype("<f2").tobytes()
    bits = held.view(np.uint32)
    if element == FP32:
        return bits.astype("<u4").tobytes()
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()


# --- rotation ------------------------------------------------------------------------------------


def angles(rope: Rope, position: int, tokens: int) -> tuple[Floats, Floats]:
    """Cosines and sines, `[token, pair]`: those of the nearest 1,024th of a turn, rotated by the
    rest."""
    at = (np.arange(tokens, dtype=np.uint64) + np.uint64(position))[:, None]
    phase = at * rope.turns.astype(np.uint64)  # modulo 2^64
    nearest = (phase + np.uint64(1 << 53)) >> np.uint64(54)
    left = (phase - (nearest << np.uint64(54))).view(np.int64) >> 30  # 24 bits and a sign
    t = left.astype(np.float32) * RADIANS
    square = t * t
    sine, versine = t - t * (square * SIXTH), square * HALF
    c, s = COSINES[nearest & np.uint64(1023)], SINES[nearest & np.uint64(1023)]
    return c - (c * versine + s * sine), s + (c * sine - s * versine)


def rotated(values: Floats, rope: Rope, position: int, back: bool = False) -> Floats:
    """`[token, head, dim]`, with each head's first dims rotated."""
    cos, sin = (table[:, None] for table in angles(rope, position, len(values)))
    pairs = len(rope.turns)
    low = np.s_[..., 0 : 2 * pairs : 2] if rope.interleaved else np.s_[..., :pairs]
    high = np.s_[..., 1 : 2 * pairs : 2] if rope.interleaved else np.s_[..., pairs : 2 * pairs]
    one, other, found = values[low], values[high], values.copy()
    if back:
        found[low], found[high] = one * cos + other * sin, other * cos - one * sin
    else:
        found[low], found[high] = one * cos - other * sin, other * cos + one * sin
    return found


# --- symbols -------------------------------------------------------------------------------------


def _quantized(values: Floats, inverses: Floats) -> Numbers | None:
    """The nearest steps; None if one is too far for an escape, or is NaN."""
    found = np.rint(values * inverses)
    if not (np.abs(found) <= MOST).all():
        return None
    whole: Numbers = found.astype(np.int64)
    return whole


def _write_streams(numbers: Numbers, table: list[int]) -> tuple[int, bytes, bytes]:
    """The number of streams, their lengths, and their bytes."""
    reach, escape = len(table) // 2 - 1, len(table) - 1
    flat = numbers.ravel()
    lengths, bodies = b"", []
    for first in range(0, len(flat), STREAM_SYMBOLS):
        mine = flat[first : first + STREAM_SYMBOLS]
        symbols = np.full(-(-len(mine) // LANES) * LANES, reach)
        symbols[: len(mine)] = np.where(np.abs(mine) <= reach, mine + reach, escape)
        escapes = mine[np.abs(mine) > reach].astype("<i2").tobytes()
        states, words = rans_encode(symbols.reshape(-1, LANES), table)
        lengths += STREAM.pack(len(words) // 2, len(escapes) // 2)
        bodies.append(states + words + escapes)
    return len(bodies), lengths, b"".join(bodies)


def _read_streams(
    text: bytes, at: int, count: int, streams: int, table: list[int]
) -> tuple[Numbers, int]:
    """`count` numbers, and the end of their streams."""
    if streams != -(-count // STREAM_SYMBOLS) or len(text) < at + streams * STREAM.size:
        raise DamagedError("another number of streams")
    reach, escape = len(table) // 2 - 1, len(table) - 1
    lengths = [STREAM.unpack_from(text, at + number * STREAM.size) for number in range(streams)]
    at += streams * STREAM.size
    found = np.zeros(count, np.int64)
    for number, (words, escaped) in enumerate(lengths):
        middle, end = at + STATES_BYTES + 2 * words, at + STATES_BYTES + 2 * words + 2 * escaped
        if end > len(text):
            raise DamagedError("a stream beyond the end")
        mine = found[number * STREAM_SYMBOLS :][:STREAM_SYMBOLS]
        rows = -(-len(mine) // LANES)
        states = text[at : at + STATES_BYTES]
        try:
            symbols = rans_decode(rows, states, text[at + STATES_BYTES : middle], table).ravel()
        except (AssertionError, ValueError) as error:
            raise DamagedError("a stream that does not end as it began") from error
        mine[:] = symbols[: len(mine)] - reach
        where = symbols[: len(mine)] == escape
        if (symbols[len(mine) :] != reach).any() or int(where.sum()) != escaped:
            raise DamagedError("another number of escapes, or a row filled up otherwise")
        mine[where] = np.frombuffer(text[middle:end], "<i2")
        at = end
    return found, at


def _parted(shape: Shape, element: int, data: bytes) -> tuple[Floats, bytes] | None:
    """`[token, head, dim]` of the encoded values, and the exact bytes; None if tokens do not fit."""
    width = WIDTH[element]
    if not data or len(data) % (width * shape.heads * shape.dim):
        return None
    whole = np.frombuffer(data, np.uint8).reshape(-1, shape.heads, shape.dim * width)
    coded = np.ascontiguousarray(whole[..., : shape.coded * width])
    values = widened(element, coded.tobytes()).reshape(-1, shape.heads, shape.coded)
    return values, whole[..., shape.coded * width :].tobytes()


def _joined(shape: Shape, element: int, values: Floats, exact: bytes) -> bytes:
    width = WIDTH[element]
    coded = np.frombuffer(narrowed(element, values), np.uint8)
    both = [
        coded.reshape(len(values), shape.heads, shape.coded * width),
        np.frombuffer(exact, np.uint8).reshape(len(values), shape.heads, shape.exact_dims * width),
    ]
    return np.concatenate(both, axis=-1).tobytes()


def _opened(
    element: int, level: int, shape: Shape, encoded: bytes, raw_bytes: int
) -> tuple[int, int, int]:
    """Tokens, streams and the header's last number."""
    tokens, odd = divmod(raw_bytes, WIDTH[element] * shape.heads * shape.dim)
    if odd or not tokens or len(encoded) < HEADER.size:
        raise DamagedError("no such part")
    found, at_level, streams, last = HEADER.unpack_from(encoded)
    if (found, at_level) != (element, level):
        raise DamagedError("of another type, or another level")
    return tokens, streams, last


# --- ecsq ----------------------------------------------------------------------------------------


def encode_ecsq(
    shape: Shape, level: int, means: Floats, quantizer: Quantizer, table: list[int], rope: Rope | None,
    element: int, position: int, data: bytes,
) -> bytes | None:  # fmt: skip
    """Encode the part `[token, head, dim]` whose first token has this position; None if it must be
    stored raw. If the result is not shorter, the caller should store it raw as well."""
    parted = _parted(shape, element, data)
    if parted is None:
        return None
    values, exact = parted
    with np.errstate(over="ignore", invalid="ignore"):
        if rope is not None:
            values = rotated(values, rope, position, back=True)
        numbers = _quantized(values.reshape(-1, shape.channels) - means, quantizer.inverses)
    if numbers is None:
        return None
    streams, lengths, bodies = _write_streams(numbers, table)
    return HEADER.pack(element, level, streams, position) + lengths + bodies + exact


def decode_ecsq(
    shape: Shape, level: int, means: Floats, quantizer: Quantizer, table: list[int], rope: Rope | None,
    element: int, encoded: bytes, raw_bytes: int,
) -> bytes:  # fmt: skip
    """Decode a part approximately. Raise DamagedError if the input is not an encoded part."""
    tokens, streams, position = _opened(element, level, shape, encoded, raw_bytes)
    count = tokens * shape.channels
    numbers, at = _read_streams(encoded, HEADER.size, count, streams, table)
    if len(encoded) - at != tokens * shape.heads * shape.exact_dims * WIDTH[element]:
        raise DamagedError("more or less than was encoded")
    steps = numbers.reshape(tokens, -1).astype(np.float32) * quantizer.steps
    values = (steps + means).reshape(tokens, shape.heads, shape.coded)
    if rope is not None:
        values = rotated(values, rope, position)
    return _joined(shape, element, values, encoded[at:])


# --- cachegen ------------------------------------------------------------------------------------


def encode_cachegen(
    shape: Shape, level: int, group: int, anchors: Quantizer, deltas: Quantizer, table: list[int],
    element: int, data: bytes,
) -> bytes | None:  # fmt: skip
    """Encode the part `[token, head, dim]`: every `group`-th token in bytes, others by their
    difference from it; None if it must be stored raw."""
    parted = _parted(shape, element, data)
    if parted is None:
        return None
    values, exact = parted[0].reshape(-1, shape.channels), parted[1]
    with np.errstate(over="ignore", invalid="ignore"):
        firsts = _quantized(values[::group], anchors.inverses)
        if firsts is None:
            return None
        bases = np.repeat(firsts.astype(np.float32) * anchors.steps, group, axis=0)[: len(values)]
        others = np.arange(len(values)) % group != 0
        numbers = _quantized((values - bases)[others], deltas.inverses)
    if numbers is None:
        return None
    far = np.abs(firsts) > ANCHOR_MOST
    escapes = firsts[far].astype("<i2").tobytes()
    kept = np.where(far, ANCHOR_ESCAPE, firsts).astype(np.int8).tobytes()
    streams, lengths, bodies = _write_streams(numbers, table)
    header = HEADER.pack(element, level, streams, len(escapes) // 2)
    return b"".join((header, lengths, kept, escapes, bodies, exact))


def decode_cachegen(
    shape: Shape, level: int, group: int, anchors: Quantizer, deltas: Quantizer, table: list[int],
    element: int, encoded: bytes, raw_bytes: int,
) -> bytes:  # fmt: skip
    """Decode a part approximately. Raise DamagedError if the input is not an encoded part."""
    tokens, streams, escaped = _opened(element, level, shape, encoded, raw_bytes)
    groups = -(-tokens // group)
    lengths_end = HEADER.size + streams * STREAM.size
    middle = lengths_end + groups * shape.channels
    begin = middle + 2 * escaped
    if begin > len(encoded):
        raise DamagedError("anchors beyond the end")
    firsts = np.frombuffer(encoded[lengths_end:middle], np.int8).astype(np.int64)
    far = firsts == ANCHOR_ESCAPE
    if int(far.sum()) != escaped:
        raise DamagedError("another number of escaped anchors")
    firsts[far] = np.frombuffer(encoded[middle:begin], "<i2")
    streamed = encoded[HEADER.size : lengths_end] + encoded[begin:]
    count = (tokens - groups) * shape.channels
    numbers, at = _read_streams(streamed, 0, count, streams, table)
    if len(streamed) - at != tokens * shape.heads * shape.exact_dims * WIDTH[element]:
        raise DamagedError("more or less than was encoded")
    bases = firsts.reshape(groups, -1).astype(np.float32) * anchors.steps
    values = np.repeat(bases, group, axis=0)[:tokens]
    others = np.arange(tokens) % group != 0
    values[others] += numbers.reshape(-1, shape.channels).astype(np.float32) * deltas.steps
    return _joined(shape, element, values.reshape(tokens, shape.heads, -1), streamed[at:])
