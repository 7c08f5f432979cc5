"""The lossless codecs for one part; docs/formats.md describes the format."""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
RAW, FIX4, R32, PLANES = 0, 1, 2, 13
ROW, LANES, SYMBOLS, SCALE = 64, 32, 32, 256
STATE_LEAST, STATE_END = 1 << 15, 1 << 31
STREAM_ROWS = 512
HEADER = struct.Struct("<BBBxI")  # element, top, symbols, escapes (fix4) or streams (r32)
STREAM = struct.Struct("<II")  # words, escapes
# Of planes: the element, the bytes of the second and of the third level, escapes, the codes of the numbers
PLANES_HEADER = struct.Struct("<B3xIII16s")
NUMBERS = (0, 1, 2, 5, 6, 7, *range(8, 15))


class Form(NamedTuple):
    """The bytes of an element and the bits of its exponent; the other bits are its rest."""

    nbytes: int
    exponent_bits: int

    @property
    def rest_bits(self) -> int:
        return 8 * self.nbytes - self.exponent_bits

    @property
    def rest_row(self) -> int:
        return ROW * self.rest_bits // 8


FORMS = (Form(2, 8), Form(2, 5), Form(4, 8), Form(1, 4), Form(1, 5))


def encode_parts(codec: int, element: int, parts: Sequence[bytes]) -> list[tuple[int, bytes]]:
    """Each part's codec and encoded bytes; a part that would not shrink is stored raw."""
    found = []
    for part in parts:
        form = FORMS[element]
        encoded = None
        if codec != RAW and len(part) // form.nbytes >= ROW:
            encoded = ENCODERS[codec](element, part)
        kept = encoded is None or len(encoded) >= len(part)
        found.append((RAW, part) if kept or encoded is None else (codec, encoded))
    return found


def decode_part(codec: int, element: int, encoded: bytes, raw_bytes: int) -> bytes:
    """Decode a part. Does not validate its input."""
    if codec == RAW:
        return encoded
    return DECODERS[codec](element, encoded, raw_bytes)


def split_planes(width: int, data: bytes) -> bytes:
    """Elements rotated left by a bit, with bytes of equal weight together, the lowest first."""
    bits, words = 8 * width, np.frombuffer(data, f"<u{width}").astype(np.uint64)
    turned = (words << np.uint64(1)) | (words >> np.uint64(bits - 1))
    return turned.astype(f"<u{width}").view(np.uint8).reshape(-1, width).T.tobytes()


# --- elements ------------------------------------------------------------------------------------


def _split(form: Form, data: bytes) -> tuple[Numbers, Numbers]:
    """Exponents and rests: each element is rotated left by a bit and divided after its exponent."""
    bits = 8 * form.nbytes
    words = np.frombuffer(data, f"<u{form.nbytes}").astype(np.int64)
    turned = ((words << 1) | (words >> (bits - 1))) & ((1 << bits) - 1)
    return turned >> form.rest_bits, turned & ((1 << form.rest_bits) - 1)


def _join(form: Form, exponents: Numbers, rests: Numbers) -> bytes:
    bits = 8 * form.nbytes
    turned = (exponents << form.rest_bits) | rests
    words = (turned >> 1) | ((turned & 1) << (bits - 1))
    return words.astype(f"<u{form.nbytes}").tobytes()


def _rows(numbers: Numbers, filling: int) -> Numbers:
    rows = -(-len(numbers) // ROW)
    full = np.full(rows * ROW, filling, np.int64)
    full[: len(numbers)] = numbers
    return full.reshape(rows, ROW)


def _nibbles(rows: Numbers) -> npt.NDArray[np.uint8]:
    return (rows[:, :32] | rows[:, 32:] << 4).astype(np.uint8)


def _write_rests(form: Form, rows: Numbers) -> bytes:
    planes = [(rows >> (8 * k) & 255).astype(np.uint8) for k in range(form.rest_bits // 8)]
    left, upper = form.rest_bits % 8, rows >> (form.rest_bits // 8 * 8)
    if left == 4:
        planes.append(_nibbles(upper))
    for bit in range(left if left != 4 else 0):
        planes.append(np.packbits((upper >> bit & 1).astype(np.uint8), axis=1, bitorder="little"))
    return np.concatenate(planes, axis=1).tobytes()


def _read_rests(form: Form, text: bytes) -> Numbers:
    rows = np.frombuffer(text, np.uint8).reshape(-1, form.rest_row)
    whole, left = divmod(form.rest_bits, 8)
    rests = np.zeros((len(rows), ROW), np.int64)
    for byte in range(whole):
        rests |= rows[:, ROW * byte : ROW * (byte + 1)].astype(np.int64) << (8 * byte)
    upper = rows[:, ROW * whole :]
    if left == 4:
        rests |= np.concatenate([upper & 15, upper >> 4], axis=1).astype(np.int64) << (8 * whole)
    for bit in range(left if left != 4 else 0):
        plane = np.unpackbits(upper[:, 8 * bit : 8 * bit + 8], axis=1, bitorder="little")
        rests |= plane.astype(np.int64) << (8 * whole + bit)
    return rests


def _codes(exponents: Numbers, top: int, last: int) -> Numbers:
    codes: Numbers = np.minimum((top - exponents) & 255, last)
    return codes


def _exponents(codes: Numbers, top: int, last: int, escapes: bytes) -> Numbers:
    exponents: Numbers = (top - codes) & 255
    exponents[codes == last] = np.frombuffer(escapes, np.uint8)
    return exponents


# --- what is counted -----------------------------------------------------------------------------


def _counts(exponents: Numbers, least: int, one_in: int) -> list[int]:
    whole = len(exponents) // ROW
    rows = min(max(whole // one_in, least), 1024, whole)
    scattered = (i * 0x9E3779B9 % (1 << 32) * whole >> 32 for i in range(rows))
    chosen = range(whole) if rows == whole else list(scattered)
    sample = exponents[: whole * ROW].reshape(whole, ROW)[chosen]
    counts: list[int] = np.bincount(sample.ravel(), minlength=256).tolist()
    return counts


def _best_top(counts: list[int], width: int) -> int:
    held = [sum(counts[max(0, top - width + 1) : top + 1]) for top in range(256)]
    top = held.index(max(held))
    return top + 1 if top < 255 and held[top + 1] == held[top] else top


def frequencies(counts: list[int]) -> tuple[int, list[int]]:
    """The top, and each symbol's share of 256; the escape's share is last."""
    high = _best_top(counts, SYMBOLS - 1)
    low, total = max(0, high - (SYMBOLS - 2)), sum(counts)
    while high > low and counts[high] * 1024 < total:
        high -= 1
    while low < high and counts[low] * 1024 < total:
        low += 1
    hits = counts[low : high + 1][::-1]
    hits.append(total - sum(hits))
    shares = [max(1, (hit * SCALE + total // 2) // total) for hit in hits]
    symbols = range(len(hits))
    while sum(shares) > SCALE:
        shares[
            min((i for i in symbols if shares[i] > 1), key=lambda i: hits[i] / (2 * shares[i] - 1))
        ] -= 1
    while sum(shares) < SCALE:
        shares[max(symbols, key=lambda i: hits[i] / (2 * shares[i] + 1))] += 1
    return high, shares


# --- fix4 ----------------------------------------------------------------------------------------


def _encode_fix4(element: int, data: bytes) -> bytes:
    form = FORMS[element]
    whole = len(data) // form.nbytes * form.nbytes
    exponents, rests = _split(form, data[:whole])
    top = _best_top(_counts(exponents, 8, 64), 15)
    # Filled up with elements whose exponent may not be as large as `top`.
    rows = _rows(exponents, top & ((1 << form.exponent_bits) - 1))
    codes = _codes(rows, top, 15)
    escapes = rows[codes == 15].astype(np.uint8).tobytes()
    return b"".join(
        (
            HEADER.pack(element, top, 0, len(escapes)),
            _nibbles(codes).tobytes(),
            _write_rests(form, _rows(rests, 0)),
            escapes,
            data[whole:],
        )
    )


def _decode_fix4(element: int, encoded: bytes, raw_bytes: int) -> bytes:
    form = FORMS[element]
    count, odd = divmod(raw_bytes, form.nbytes)
    rows = -(-count // ROW)
    _, top, _, escaped = HEADER.unpack_from(encoded)
    at = HEADER.size + rows * ROW // 2
    nibbles = np.frombuffer(encoded[HEADER.size : at], np.uint8).reshape(rows, 32)
    codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=1).astype(np.int64)
    rests = _read_rests(form, encoded[at : at + rows * form.rest_row])
    at += rows * form.rest_row
    exponents = _exponents(codes, top, 15, encoded[at : at + escaped])
    elements = _join(form, exponents.ravel(), rests.ravel())
    return elements[: count * form.nbytes] + encoded[len(encoded) - odd :]


# --- r32 -----------------------------------------------------------------------------------------


def _encode_r32(element: int, data: bytes) -> bytes:
    form = FORMS[element]
    whole = len(data) // form.nbytes * form.nbytes
    exponents, rests = _split(form, data[:whole])
    top, shares = frequencies(_counts(exponents, 32, 16))
    rows = _rows(exponents, top)
    codes = _codes(rows, top, len(shares) - 1)
    table, streams = b"", []
    for first in range(0, len(rows), STREAM_ROWS):
        mine = codes[first : first + STREAM_ROWS]
        states, words = rans_encode(mine.reshape(-1, LANES), shares)
        escapes = rows[first : first + STREAM_ROWS][mine == len(shares) - 1].astype(np.uint8)
        table += STREAM.pack(len(words) // 2, len(escapes))
        streams.append(states + words + escapes.tobytes())
    return b"".join(
        (
            HEADER.pack(element, top, len(shares), len(streams)),
            bytes(shares).ljust(SYMBOLS, b"\0"),
            table,
            _write_rests(form, _rows(rests, 0)),
            *streams,
            data[whole:],
        )
    )


def rans_encode(rows: Numbers, shares: list[int]) -> tuple[bytes, bytes]:
    """The final states and the words of these rows of 32 symbols, encoded from the last row to the
    first."""
    frequency = np.array(shares)
    start = np.cumsum(frequency) - frequency
    state = np.full(LANES, STATE_LEAST, np.int64)
    words = [state[:0]]
    for f, s in zip(frequency[rows[::-1]], start[rows[::-1]], strict=True):
        full = state >= f << 23
        words.append(state[full])
        turns, rest = np.divmod(np.where(full, state >> 16, state), f)
        state = (turns << 8) + rest + s
    return state.astype("<u4").tobytes(), np.concatenate(words[::-1]).astype("<u2").tobytes()


def rans_decode(rows: int, states: bytes, words: bytes, shares: list[int]) -> Numbers:
    """Decode `rows` rows of symbols."""
    frequency = np.array(shares)
    start = np.cumsum(frequency) - frequency
    symbol_of = np.repeat(np.arange(len(shares)), frequency)
    share_of, place_of = frequency[symbol_of], np.arange(len(symbol_of)) - start[symbol_of]
    state = np.frombuffer(states, "<u4").astype(np.int64)
    left = np.frombuffer(words, "<u2").astype(np.int64)
    found = np.zeros((rows, LANES), np.int64)
    for slot in found:
        slot[:] = state & 255
        state = share_of[slot] * (state >> 8) + place_of[slot]
        hungry = state < STATE_LEAST
        count = np.count_nonzero(hungry)
        state[hungry] = state[hungry] << 16 | left[:count]
        left = left[count:]
    assert not len(left) and (state == STATE_LEAST).all()
    return symbol_of[found]


def _decode_r32(element: int, encoded: bytes, raw_bytes: int) -> bytes:
    form = FORMS[element]
    count, odd = divmod(raw_bytes, form.nbytes)
    rows = -(-count // ROW)
    _, top, symbols, streams = HEADER.unpack_from(encoded)
    shares = list(encoded[HEADER.size : HEADER.size + symbols])
    table = HEADER.size + SYMBOLS
    at = table + streams * STREAM.size
    rests = _read_rests(form, encoded[at : at + rows * form.rest_row])
    at += rows * form.rest_row
    exponents = []
    for number in range(streams):
        words, escaped = STREAM.unpack_from(encoded, table + number * STREAM.size)
        mine = min(STREAM_ROWS, rows - number * STREAM_ROWS)
        begin, middle = at + 4 * LANES, at + 4 * LANES + 2 * words
        codes = rans_decode(2 * mine, encoded[at:begin], encoded[begin:middle], shares)
        at = middle + escaped
        exponents.append(_exponents(codes.ravel(), top, symbols - 1, encoded[middle:at]))
    elements = _join(form, np.concatenate(exponents), rests.ravel())
    return elements[: count * form.nbytes] + encoded[len(encoded) - odd :]


# --- planes --------------------------------------------------------------------------------------


def _bits_of(numbers: Numbers, bits: int) -> list[Numbers]:
    return [numbers >> bit & 1 for bit in range(bits)]


def _packed(planes: list[Numbers]) -> bytes:
    bits = np.concatenate([np.zeros(0, np.int64), *planes]).astype(np.uint8)
    return np.packbits(bits, bitorder="little").tobytes()


def _encode_planes(element: int, data: bytes) -> bytes:
    form = FORMS[element]
    whole = len(data) // form.nbytes * form.nbytes
    exponents, rests = _split(form, data[:whole])
    counts = _counts(exponents, 32, 16)
    codes = 255 - _rows(exponents, (1 << form.exponent_bits) - 1)
    order = sorted(
        filter(lambda code: counts[255 - code], range(256)), key=lambda code: -counts[255 - code]
    )
    table, number_of = bytearray(16), np.full(256, 15, np.int64)
    for number, code in zip(NUMBERS, order, strict=False):
        table[number], number_of[code] = code, number
    first: list[Numbers] = []
    second: list[Numbers] = []
    third: list[Numbers] = []
    for row in number_of[codes]:
        first += _bits_of(np.where(row < 4, row, 3), 2)
        others = row[row >= 4]
        second += _bits_of(np.where(others < 8, 7 - others, 3), 2)
        third += _bits_of(row[row >= 8] ^ 4, 3)
    levels = [_packed(planes) for planes in (first, second, third)]
    escapes = codes[number_of[codes] == 15].astype(np.uint8).tobytes()
    header = PLANES_HEADER.pack(element, *map(len, (*levels[1:], escapes)), bytes(table))
    return b"".join((header, *levels, _write_rests(form, _rows(rests, 0)), escapes, data[whole:]))


def _decode_planes(element: int, encoded: bytes, raw_bytes: int) -> bytes:
    form = FORMS[element]
    count, odd = divmod(raw_bytes, form.nbytes)
    rows = -(-count // ROW)
    _, *sizes, table = PLANES_HEADER.unpack_from(encoded)
    at, levels = PLANES_HEADER.size, []
    for size in (rows * ROW // 4, *sizes[:2]):
        text = np.frombuffer(encoded[at : at + size], np.uint8)
        levels.append(np.unpackbits(text, bitorder="little").astype(np.int64))
        at += size
    rests = _read_rests(form, encoded[at : at + rows * form.rest_row])
    at += rows * form.rest_row
    places, numbers = [0, 0, 0], []

    def taken(level: int, elements: int) -> Numbers:
        bits = 3 if level == 2 else 2
        found = levels[level][places[level] :][: bits * elements].reshape(bits, elements)
        places[level] += bits * elements
        return sum((plane << bit for bit, plane in enumerate(found)), np.zeros(elements, np.int64))

    for _ in range(rows):
        row = taken(0, ROW)
        row[row == 3] = 7 - taken(1, int((row == 3).sum()))
        row[row == 4] = 8 + (taken(2, int((row == 4).sum())) ^ 4)
        numbers.append(row)
    found = np.concatenate([np.zeros(0, np.int64), *numbers])
    codes = np.frombuffer(table, np.uint8).astype(np.int64)[found]
    codes[found == 15] = np.frombuffer(encoded[at : at + sizes[2]], np.uint8)
    elements = _join(form, 255 - codes, rests.ravel())
    return elements[: count * form.nbytes] + encoded[len(encoded) - odd :]


ENCODERS = {FIX4: _encode_fix4, R32: _encode_r32, PLANES: _encode_planes}
DECODERS = {FIX4: _decode_fix4, R32: _decode_r32, PLANES: _decode_planes}
