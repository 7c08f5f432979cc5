"""The codecs beside memcpy and zstd in one run: bits an element, errors, and GB/s of raw bytes on one core.

`--model PATH` measures on the K and V of a Llama-like checkpoint, made by a forward pass; without it on
normal values with deviations of their own for each channel. A part is 256 tokens of 128 channels. Timed are
the kernels, as native workers call them, a block at a time, and another block's copy beside each; checked is
the codec. Times are the thread's own, which another process on its core does not lengthen; memcpy's buffers
are those of the codec, larger than the caches.
"""

from __future__ import annotations

import argparse
import mmap
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import zstandard

import harness
import kvtier_kernels as kernels
from harness import Arm, Row
from kv import Floats, Llama, bf16, exponent_bits, synthetic, wide
from kvtier.codec.base import ELEMENTS, Codec
from kvtier.codec.frame import Entry
from kvtier.codec.grid import Grid
from kvtier.codec.known import BY_NAME
from kvtier.layout import DTYPE_BYTES

MIB = 1 << 20
TOKENS, CHANNELS, HEAD = 256, 128, 64
PART = TOKENS * CHANNELS
LAYERS = 24  # what is moved at once: 3 MiB of bf16
# Of memcpy (encode, decode) and of zstd-1, for bf16 with the widest instructions; AVX2's decode of zstd-1's.
OF_MEMCPY = {
    "fix4": (0.85, 0.85),
    "r32": (0.33, 0.45),
    "q8": (0.4, 0.8),
    "q4": (0.4, 0.8),
    "q2": (None, None),
}
OF_ZSTD = {("r32", "avx512vbmi"): (4.0, 3.5), ("r32", "avx2"): (None, 1.6)}
RATIO = {"fix4": 1.33, "r32": 1.48, "q8": 1.95, "q4": 3.6}
# Relative errors of K and V, as the small model's were measured.
ERROR = {"q8": (0.006, 0.007), "q4": (0.08, 0.1), "q2": (0.4, 0.5)}


def real(path: Path, text: Path | None, blocks: int) -> Floats:
    """K and V of so many blocks of consecutive tokens, layer by layer in each."""
    model = Llama(path)
    source = text or next(iter(sorted(path.glob("*.txt"))))
    letters = source.read_text()
    found = []
    for number in range(-(-blocks // 4)):
        tokens = model.tokens(letters[number * 40_000 :], 4 * TOKENS)
        assert len(tokens) == 4 * TOKENS, f"{source} is too short for {blocks} blocks"
        parts = [part for layer in model.kv(tokens) for part in layer]
        for first in range(0, 4 * TOKENS, TOKENS):
            found += [part[first : first + TOKENS].reshape(-1) for part in parts]
    return np.concatenate(found)


def inputs(arguments: argparse.Namespace) -> Iterator[tuple[str, str, bytes]]:
    """Name, type and bytes of what is encoded: some MiB, repeated."""
    name, values = "drawn", synthetic(LAYERS * 2 * PART * 4)
    if arguments.model:
        name, values = "real", real(arguments.model, arguments.text, 32)
    print(f"{name}: {exponent_bits(bf16(values)):.2f} bits of exponent in all")
    yield name, "bfloat16", bf16(values).tobytes()
    yield name, "float16", values.astype(np.float16).tobytes()
    yield name, "float32", values.tobytes()
    half = values.astype(np.float16).view(np.uint16)
    yield name, "float8_e5m2", (half + 0x80 >> 8).astype(np.uint8).tobytes()
    yield name, "float8_e4m3fn", e4m3(values)


def e4m3(values: Floats) -> bytes:
    """Rounded to the nearest e4m3, at most 448: fp16 with a mantissa of 3 bits, its exponent less by 8."""
    small = np.clip(values, -448, 448) * np.float32(
        2**-8
    )  # where fp16's denormals begin, e4m3's do
    half = small.astype(np.float16).view(np.uint16).astype(np.uint32)
    size = (half & 0x7FFF) + 0x3F + (half >> 7 & 1) >> 7
    return (size | half >> 8 & 0x80).astype(np.uint8).tobytes()


def entries(block_bytes: int, dtype: str) -> tuple[Entry, ...]:
    size = PART * DTYPE_BYTES[dtype]
    return tuple(Entry(n // 2, n % 2, 0, n * size, size, size) for n in range(block_bytes // size))


def floats(dtype: str, data: memoryview) -> Floats:
    if dtype == "bfloat16":
        return wide(np.frombuffer(data, np.uint16))
    return np.frombuffer(data, dtype).astype(np.float32)


def on_pages(nbytes: int) -> memoryview:
    """Memory that begins where a page does, as slots do; all of it there."""
    view = memoryview(mmap.mmap(-1, nbytes))
    view[::4096] = b"x" * len(view[::4096])
    return view


class Work:
    """Blocks of one input, to be encoded and decoded by one codec."""

    def __init__(self, dtype: str, data: bytes, mib: int) -> None:
        self.dtype = dtype
        self.block_bytes = LAYERS * 2 * PART * DTYPE_BYTES[dtype]
        whole = len(data) // self.block_bytes * self.block_bytes
        times = max(1, mib * MIB // whole)
        self.raw = on_pages(whole * times)
        self.raw[:] = data[:whole] * times
        self.out = on_pages(len(self.raw))
        self.packed = on_pages(len(self.raw))
        self.places = range(0, len(self.raw), self.block_bytes)
        self.parts = entries(self.block_bytes, dtype)
        self.grids = [Grid(TOKENS, CHANNELS, HEAD, by_token) for by_token in (False, True)] * LAYERS
        self.errors: tuple[float, ...] = ()
        self.found: list[tuple[Entry, ...]] = []
        self.lists: list[list[tuple[int, int, int, int]]] = []

    def block(self, of: memoryview, at: int) -> memoryview:
        return of[at : at + self.block_bytes]

    def copy(self, number: int) -> None:
        """Of another block, as far away as there are any: no cache has it."""
        at = self.places[(number + len(self.places) // 2) % len(self.places)]
        kernels.memcpy(self.block(self.out, at), self.block(self.raw, at))

    def encode(self, codec: Codec, number: int) -> None:
        at = self.places[number]
        block, into = self.block(self.raw, at), self.block(self.packed, at)
        if codec.name in OF_MEMCPY:
            sizes = [part.raw_bytes for part in self.parts]
            lies = [(one.rows, one.channels, one.head, one.by_token) for one in self.grids]
            kernels.encode_parts(codec.number, ELEMENTS[self.dtype], block, sizes, into, lies)
        else:
            codec.encode(block, self.parts, self.dtype, into, self.grids)

    def decode(self, codec: Codec, number: int) -> None:
        at = self.places[number]
        packed, into = self.block(self.packed, at), self.block(self.out, at)
        if codec.name in OF_MEMCPY:
            found = self.lists[number]
            assert kernels.decode_parts(ELEMENTS[self.dtype], packed, found, into) == len(found)
        else:
            codec.decode(packed, self.found[number], self.dtype, into)

    def encode_entries(self, codec: Codec) -> None:
        self.found = [
            codec.encode(
                self.block(self.raw, at), self.parts, self.dtype, self.block(self.packed, at), self.grids
            )
            for at in self.places
        ]  # fmt: skip
        self.lists = [
            [(one.codec, one.offset, one.nbytes, one.raw_bytes) for one in found]
            for found in self.found
        ]

    def decode_entries(self, codec: Codec) -> None:
        for at, found in zip(self.places, self.found, strict=True):
            codec.decode(self.block(self.packed, at), found, self.dtype, self.block(self.out, at))

    def check(self, codec: Codec) -> float:
        """The raw bytes for each encoded one, once they have come back."""
        self.encode_entries(codec)
        self.out[:] = bytes(len(self.out))
        self.decode_entries(codec)
        if codec.lossy and self.dtype in ("bfloat16", "float16", "float32"):
            self.errors = self._errors()
            bars = ERROR[codec.name]
            assert all(found <= bar for found, bar in zip(self.errors, bars, strict=True)), (
                self.errors
            )
        else:
            assert self.out == self.raw, f"{codec.name}: {self.dtype} did not come back"
        nbytes = sum(found[-1].offset + found[-1].nbytes for found in self.found)
        return len(self.raw) / nbytes

    def _errors(self) -> tuple[float, ...]:
        """Of K, and of V."""
        was, off = (
            floats(self.dtype, view).reshape(-1, 2, PART).transpose(1, 0, 2).reshape(2, -1)
            for view in (self.raw, self.out)
        )
        return tuple(
            float(np.linalg.norm(off[part] - was[part]) / np.linalg.norm(was[part]))
            for part in (0, 1)
        )


class Plain:
    """zstd-1 of whole blocks, as they are."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.texts: list[bytes] = []

    def encode(self, number: int) -> bytes:
        at = self.work.places[number]
        return zstandard.ZstdCompressor(level=1).compress(self.work.block(self.work.raw, at))

    def encode_all(self) -> None:
        self.texts = [self.encode(number) for number in range(len(self.work.places))]

    def decode(self, number: int) -> None:
        at = self.work.places[number]
        text = zstandard.ZstdDecompressor().decompress(self.texts[number])
        self.work.block(self.work.out, at)[:] = text


def ratios(
    run: Callable[[int], object], other: Callable[[int], object], blocks: int, rounds: int
) -> tuple[list[float], Arm, Arm]:
    """Times of the other for each of ours, a ratio a round: block by block in turn, and what is added up is
    each one's time in the thread."""
    arms = Arm(lambda: None), Arm(lambda: None)
    found = []
    for turn in range(rounds + 1):
        spent = [0.0, 0.0]
        for number in range(blocks):
            for which in (0, 1) if (turn + number) % 2 else (1, 0):
                started = time.thread_time()
                (run, other)[which](number)
                spent[which] += time.thread_time() - started
        if turn:
            found.append(spent[1] / spent[0])
            for arm, seconds in zip(arms, spent, strict=True):
                arm.seconds.append(seconds)
                arm.cpu_seconds.append(seconds)
    return found, *arms


def ways(
    name: str, work: Work, codec: Codec, level: str, plain: Plain, rounds: int, best: str
) -> Iterator[Row]:
    """Encoding and decoding, each beside memcpy and beside zstd-1, in turn."""
    bf16 = work.dtype == "bfloat16"
    memcpy = OF_MEMCPY.get(codec.name, (None, None)) if bf16 and level == best else (None, None)
    zstd = OF_ZSTD.get((codec.name, level), (None, None)) if bf16 else (None, None)
    arms: list[tuple[str, Callable[[int], None], Callable[[int], object], float | None, float | None]] = [
        ("encode", partial(work.encode, codec), plain.encode, memcpy[0], zstd[0]),
        ("decode", partial(work.decode, codec), plain.decode, memcpy[1], zstd[1]),
    ]  # fmt: skip
    blocks = len(work.places)
    for way, run, other, of_memcpy, of_zstd in arms:
        found, one, copy = ratios(run, work.copy, blocks, rounds)
        yield harness.ratio_row(
            f"{name} {codec.name} {level} {way} / memcpy",
            found,
            of_memcpy,
            len(work.raw),
            one,
            copy,
        )
        if of_zstd or level == best:
            found, one, theirs = ratios(run, other, blocks, max(3, rounds // 3))
            yield harness.ratio_row(
                f"{name} {codec.name} {level} {way} / zstd-1",
                found,
                of_zstd,
                len(work.raw),
                one,
                theirs,
            )


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    levels = kernels.implementations("codec")
    for source, dtype, data in inputs(arguments):
        work = Work(dtype, data, arguments.mib)
        plain, name = Plain(work), f"{source} {dtype}"
        plain.encode_all()
        bits = 8 * DTYPE_BYTES[dtype]
        ratio = len(work.raw) / sum(map(len, plain.texts))
        yield Row(f"{name} zstd-1 ratio", ratio, "x", more={"bits/element": bits / ratio})
        for codec in BY_NAME.values():
            if codec.name not in arguments.codecs:
                continue
            if codec.lossy and dtype.startswith("float8"):
                continue
            native = codec.name in OF_MEMCPY
            for level in levels if native else levels[:1]:
                kernels.force("codec", level)
                ratio = work.check(codec)
                if level == levels[0]:
                    more = {"bits/element": bits / ratio}
                    if codec.lossy:
                        more |= dict(zip(("error of K", "error of V"), work.errors, strict=True))
                    bar = RATIO.get(codec.name) if dtype == "bfloat16" else None
                    row = harness.at_least(
                        f"{name} {codec.name} ratio", ratio, "x", bar or 0, **more
                    )
                    yield row if bar else Row(row.name, ratio, "x", more=more)
                if native or level == levels[0]:
                    yield from ways(name, work, codec, level, plain, arguments.rounds, levels[0])
            kernels.force("codec", "auto")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a Llama-like checkpoint in bf16")
    parser.add_argument("--text", type=Path, help="what it reads; else a text file beside it")
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=harness.ROUNDS)
    parser.add_argument("--codecs", nargs="+", default=list(BY_NAME)[1:])
    parser.add_argument("--out")
    arguments = parser.parse_args()
    probes = [harness.noise()]
    rows = []
    for row in measure(arguments):
        print(row.line(), flush=True)
        rows.append(row)
    probes.append(harness.noise())
    return harness.report("codec", rows, probes, arguments.out)


if __name__ == "__main__":
    sys.exit(main())
