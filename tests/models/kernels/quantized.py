"""The codecs with a fixed rate for one part; docs/formats.md describes the format."""

import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.signedinteger[Any]]
Q8, Q4, Q2, FP8, E5M2, NVFP4, MXFP4 = 4, 5, 6, 9, 10, 11, 12
BITS = {Q8: 8, Q4: 4, Q2: 2, FP8: 8, E5M2: 8, NVFP4: 4, MXFP4: 4}
# In a header; and the largest groups: tokens of a channel, channels of a token.
SAID = {Q8: 8, Q4: 4, Q2: 2, FP8: 8 + 16, E5M2: 8 + 32, NVFP4: 4 + 16, MXFP4: 4 + 32}
GROUPS = {NVFP4: (16, 16), MXFP4: (32, 32)}
HEADER = struct.Struct("<BBBxIII")  # element, bits, by token, rows, channels, head
UNIT, GROUP_TOKENS, GROUP_CHANNELS = 64, 256, 64
GROUP = GROUP_TOKENS, GROUP_CHANNELS
WIDTHS = (2, 2, 4)


def _float(bits: int) -> np.float32:
    value: np.float32 = np.uint32(bits).view(np.float32)
    return value


LARGEST = [_float(bits) for bits in (0x7F7F0000, 0x477FE000, 0x7F7FFFFF)]
LEAST_STEP = _float(0x00800000)
# By code; the last one is NaN, and never written.
E4M3 = np.array(
    [(8 * (code > 7) + code % 8) * 2.0 ** (max(code // 8, 1) - 10) for code in range(128)],
    np.float32,
)
E5M2_SIZES = np.array(
    [(4 * (code > 3) + code % 4) * 2.0 ** (max(code // 4, 1) - 17) for code in range(124)]
)
E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)  # steps


class Grid(NamedTuple):
    """The layout of a part's elements: matrices of `rows` rows, each the channels of a token, in
    whole heads. A group is the channels of a token, or the tokens of a channel."""

    rows: int
    channels: int
    head: int
    by_token: bool

    def group_sizes(self, most: int) -> list[int]:
        """The sizes of a row's groups, if by token."""
        size = -(-self.head // -(-self.head // most))
        head = [min(size, self.head - at) for at in range(0, self.head, size)]
        return head * (self.channels // self.head)

    def span_rows(self, most: int) -> list[int]:
        """The sizes of a matrix's groups, if by channel."""
        return [min(most, self.rows - at) for at in range(0, self.rows, most)]


def encode_quantized(codec: int, element: int, part: bytes, grid: Grid) -> bytes | None:
    """None if the part would not shrink, or cannot be encoded."""
    bits = BITS[codec]
    if element >= len(WIDTHS) or not grid.rows or not part:
        return None
    if len(part) % (grid.rows * grid.channels * WIDTHS[element]):
        return None
    order = _turned(np.frombuffer(part, f"<i{WIDTHS[element]}").reshape(-1, grid.channels))
    matrices = len(order) // grid.rows
    tokens, channels = GROUPS.get(codec, GROUP)
    header = HEADER.pack(element, SAID[codec], grid.by_token, *grid[:3])
    if codec == E5M2:
        sizes = np.abs(_widened(element, _turned(order)))
        if not np.all(sizes < 61440):
            return None
        codes = _nearest(E5M2_SIZES, sizes) + np.where(order < 0, 128, 0)
        text = header + _pack(bits, codes.astype(np.uint8).reshape(-1))
        return text if len(text) < len(part) else None
    if grid.by_token:
        starts = np.cumsum([0, *grid.group_sizes(channels)[:-1]])
        least = np.minimum.reduceat(order, starts, axis=1)
        most = np.maximum.reduceat(order, starts, axis=1)
    else:
        starts = np.cumsum([0, *(grid.span_rows(tokens) * matrices)[:-1]])
        least = np.minimum.reduceat(order, starts, axis=0)
        most = np.maximum.reduceat(order, starts, axis=0)
    limits = [_widened(element, _turned(limit)) for limit in (least, most)]
    if codec in GROUPS:
        return _encode_small(codec, element, part, grid, header, order, limits)
    with np.errstate(all="ignore"):
        found = _steps(bits, LARGEST[element], codec == FP8, limits[0], limits[1])
        if found is None:
            return None
        base, step = found
        inverse = np.where(step > 0, np.float32(1) / step, np.float32(0))
        values = _widened(element, _turned(order))
        scaled = (values - _spread(base, grid, GROUP)) * _spread(inverse, grid, GROUP)
        codes = _e4m3(scaled) if codec == FP8 else (scaled + np.float32(0.5)).astype(np.int32)
    params = _upper(step) if bits == 8 else _upper(np.stack([base, step], axis=1))
    text = header + params + _pack(bits, codes.astype(np.uint8).reshape(-1))
    return text if len(text) < len(part) else None


def _encode_small(
    codec: int, element: int, part: bytes, grid: Grid, header: bytes, order: Integers, limits: list[Floats]
) -> bytes | None:  # fmt: skip
    """Floats of 4 bits, in groups with a step. `limits`: the least and largest value of each group."""
    sizes = np.maximum(np.abs(limits[0]), np.abs(limits[1]))
    if not np.all(sizes <= LARGEST[element]):
        return None
    with np.errstate(all="ignore"):
        if codec == NVFP4:
            scale = np.maximum(sizes.max() / np.float32(2688), np.float32(2.0**-100))
            steps = _nearest(E4M3[:127], sizes * (np.float32(1) / (scale * np.float32(6))))
            params, top = scale.tobytes(), np.float32(448)
        else:
            mantissa, exponent = np.frexp(sizes)  # from a half to 1
            steps = np.where(sizes > 0, exponent + 124 + (mantissa > 0.875), 2)
            steps, scale = np.maximum(steps, 2), np.float32(0)
            params, top = b"", steps.max()
        if not _small_step(codec, scale, np.array([top])) * np.float32(12) <= LARGEST[element]:
            return None
        step = _small_step(codec, scale, E4M3[steps] if codec == NVFP4 else steps)
        inverse = np.where(step > 0, np.float32(1) / step, np.float32(0)).astype(np.float32)
        size = np.abs(_widened(element, _turned(order))) * _spread(inverse, grid, GROUPS[codec])
        half, quarter = size * np.float32(0.5) + 2, size * np.float32(0.25) + 4
        codes = np.rint(np.minimum(np.minimum(size, half), np.minimum(quarter, 7)))
    packed = _pack(4, np.where(order < 0, codes + 8, codes).astype(np.uint8).reshape(-1))
    text = header + params + steps.astype(np.uint8).tobytes() + packed
    return text if len(text) < len(part) else None


def _small_step(codec: int, scale: np.float32, steps: npt.NDArray[Any]) -> Floats:
    """Steps, of numbers of the part's scale or of powers of two."""
    if codec == NVFP4:
        return steps.astype(np.float32) * np.float32(0.5) * scale
    known = np.where(steps < 2, 0.0, 2.0 ** (np.minimum(steps, 254) - 128.0))
    return known.astype(np.float32)


def decode_quantized(encoded: bytes, raw_bytes: int) -> bytes:
    """Decode a part approximately. Does not validate its input."""
    element, said, by_token, rows, channels, head = HEADER.unpack_from(encoded)
    codec = next(one for one, number in SAID.items() if number == said)
    bits, groups = BITS[codec], GROUPS.get(codec, GROUP)
    grid = Grid(rows, channels, head, bool(by_token))
    count = raw_bytes // WIDTHS[element]
    matrices = count // channels // rows
    lines, each = matrices * len(grid.span_rows(groups[0])), channels
    if by_token:
        lines, each = matrices * rows, len(grid.group_sizes(groups[1]))
    at = HEADER.size
    if codec == E5M2:
        codes = _unpack(bits, encoded[at:], count)
        sizes = np.append(E5M2_SIZES, [2.0**16, 1.25 * 2**16, 1.5 * 2**16, 1.75 * 2**16])
        values = sizes[codes & 127].astype(np.float32) * np.where(codes & 128, -1, 1).astype("f4")
        return _narrowed(element, values).tobytes()
    if codec in GROUPS:
        scale = np.float32(0)
        if codec == NVFP4:
            [scale], at = np.frombuffer(encoded[at : at + 4], "<f4"), at + 4
        stored = np.frombuffer(encoded[at : at + lines * each], np.uint8).reshape(lines, each)
        numbers = E4M3[stored & 127] if codec == NVFP4 else stored.astype(np.float32)
        step = _small_step(codec, scale, numbers)
        codes = _unpack(bits, encoded[at + lines * each :], count).reshape(-1, channels)
        return _narrowed(element, E2M1[codes] * _spread(step, grid, groups)).tobytes()
    kinds = 1 if bits == 8 else 2
    end = HEADER.size + lines * kinds * each * 2
    params = np.frombuffer(encoded[HEADER.size : end], "<i2").reshape(lines, kinds, each)
    step = _widened(0, params[:, -1])
    base = np.float32(-127) * step if bits == 8 else _widened(0, params[:, 0])
    packed = _unpack(bits, encoded[end:], count).reshape(-1, channels)
    if codec == FP8:
        values = E4M3[packed & 127] * np.where(packed & 128, np.float32(-1), np.float32(1))
        return _narrowed(element, values * _spread(step, grid, groups)).tobytes()
    floats = packed.astype(np.float32) * _spread(step, grid, groups)
    return _narrowed(element, _spread(base, grid, groups) + floats).tobytes()


def _spread(numbers: Floats, grid: Grid, groups: tuple[int, int]) -> Floats:
    """The number of each element's group."""
    if grid.by_token:
        return np.repeat(numbers, grid.group_sizes(groups[1]), axis=1)
    spans = grid.span_rows(groups[0])
    return np.repeat(numbers, spans * (len(numbers) // len(spans)), axis=0)


def _nearest(known: npt.NDArray[Any], sizes: Floats) -> Integers:
    """The codes of the nearest of these numbers, ties to even."""
    wide = known.astype(np.float64)
    sizes = np.minimum(sizes, wide[-1]).astype(np.float64)
    above = np.clip(np.searchsorted(wide, sizes), 1, len(wide) - 1)
    down, up = sizes - wide[above - 1], wide[above] - sizes
    found: Integers = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, above - 1)
    return found


def _e4m3(values: Floats) -> Integers:
    """The nearest e4m3 codes."""
    return _nearest(E4M3[:127], np.abs(values)) + np.where(np.signbit(values), 128, 0)


def _steps(
    bits: int, largest: np.float32, floating: bool, least: Floats, most: Floats
) -> tuple[Floats, Floats] | None:
    if not (np.all(least >= -largest) and np.all(most <= largest)):
        return None
    if floating:
        greatest = np.where(-least > most, -least, most) / np.float32(448)
        low = (greatest > 0) & (greatest < LEAST_STEP)
        step = _cut(np.where(low, LEAST_STEP, greatest), np.full(greatest.shape, 0xFFFF))
        return (np.zeros_like(step), step) if np.all(step * np.float32(448) <= largest) else None
    levels = np.float32(254 if bits == 8 else (1 << bits) - 1)
    base = _cut(least, np.where(least < 0, 0xFFFF, 0))
    size = np.where(-least > most, -least, most)
    wide: Floats = (size / np.float32(127) if bits == 8 else (most - base) / levels).astype("f4")
    wide[(wide > 0) & (wide < LEAST_STEP)] = LEAST_STEP
    step = _cut(wide, np.full(wide.shape, 0xFFFF))
    if bits == 8:
        base = np.float32(-127) * step
    sound = np.all(base >= -largest) and np.all(base + step * levels <= largest)
    return (base, step) if sound else None


def _cut(values: Floats, more: npt.NDArray[np.int64]) -> Floats:
    """The upper halves of floats, after an addition."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.int64) + more
    return (bits & 0xFFFF0000).astype(np.uint32).view(np.float32)


def _upper(values: Floats) -> bytes:
    return (values.view(np.uint32) >> 16).astype("<u2").tobytes()


def _turned(bits: Integers) -> Integers:
    """The bits of floats as integers with the same order; its own inverse."""
    size = 8 * bits.itemsize - 1
    turned: Integers = bits ^ ((bits >> size) & ((1 << size) - 1))
    return turned


def _widened(element: int, bits: Integers) -> Floats:
    if element == 2:
        return bits.view(np.float32)
    if element == 0:
        return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    words = bits.view(np.uint16).astype(np.uint32)
    size = ((words & 0x7FFF) << 13).view(np.float32) * _float(0x77800000)  # 2^112: no NaNs here
    return (size.view(np.uint32) | (words & 0x8000) << 16).view(np.float32)


def _narrowed(element: int, values: Floats) -> npt.NDArray[Any]:
    if element == 2:
        return values
    if element == 1:
        return values.astype(np.float16)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")


def _pack(bits: int, codes: Codes) -> bytes:
    units = np.zeros(-(-len(codes) // UNIT) * UNIT, np.uint8)
    units[: len(codes)] = codes
    parts = units.reshape(-1, 8 // bits, UNIT * bits // 8)
    shifts = np.arange(8 // bits, dtype=np.uint8)[:, None] * np.uint8(bits % 8)
    packed: Codes = np.bitwise_or.reduce(parts << shifts, axis=1)
    return packed.tobytes()


def _unpack(bits: int, packed: bytes, count: int) -> Codes:
    parts = np.frombuffer(packed, np.uint8).reshape(-1, 1, UNIT * bits // 8)
    shifts = np.arange(8 // bits, dtype=np.uint8)[:, None] * np.uint8(bits % 8)
    return (parts >> shifts & np.uint8((1 << bits) - 1)).reshape(-1)[:count]
