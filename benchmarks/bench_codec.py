"""The lossless codecs beside memcpy and zstd in one run: bits an element, and GB/s of raw bytes on one core.

`--model PATH` measures on the K and V of a Llama-like checkpoint, made by a forward pass; without it on
normal values with deviations of their own for each channel. A part is 256 tokens of 128 channels. Timed are
the kernels, as native workers call them, some blocks at a time; checked is the codec.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import zstandard

import harness
import kvtier_kernels as kernels
from harness import Arm, Row, pairs
from kv import Floats, Llama, bf16, exponent_bits, synthetic
from kvtier.codec.base import ELEMENTS, Codec
from kvtier.codec.frame import Entry
from kvtier.codec.known import BY_NAME
from kvtier.layout import DTYPE_BYTES

MIB = 1 << 20
TOKENS, CHANNELS = 256, 128
PART = TOKENS * CHANNELS
LAYERS = 24  # what is moved at once: 3 MiB of bf16
# Of memcpy (encode, decode) and of zstd-1, for bf16 with the widest instructions; AVX2's decode of zstd-1's.
OF_MEMCPY = {"fix4": (0.85, 0.85), "r32": (0.33, 0.45)}
OF_ZSTD = {("r32", "avx512vbmi"): (4.0, 3.5), ("r32", "avx2"): (None, 1.6)}
RATIO = {"fix4": 1.33, "r32": 1.48}


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


def entries(block_bytes: int, dtype: str) -> tuple[Entry, ...]:
    size = PART * DTYPE_BYTES[dtype]
    return tuple(Entry(n // 2, n % 2, 0, n * size, size, size) for n in range(block_bytes // size))


class Work:
    """Blocks of one input, to be encoded and decoded by one codec."""

    def __init__(self, dtype: str, data: bytes, mib: int) -> None:
        self.dtype = dtype
        self.block_bytes = LAYERS * 2 * PART * DTYPE_BYTES[dtype]
        whole = len(data) // self.block_bytes * self.block_bytes
        times = max(1, mib * MIB // whole)
        self.raw = memoryview(bytearray(data[:whole] * times))
        self.out = memoryview(bytearray(len(self.raw)))
        self.packed = memoryview(bytearray(len(self.raw)))
        self.places = range(0, len(self.raw), self.block_bytes)
        self.parts = entries(self.block_bytes, dtype)
        self.found: list[tuple[Entry, ...]] = []
        self.lists: list[list[tuple[int, int, int, int]]] = []

    def block(self, of: memoryview, at: int) -> memoryview:
        return of[at : at + self.block_bytes]

    def copy(self) -> None:
        for at in self.places:
            kernels.memcpy(self.block(self.out, at), self.block(self.raw, at))

    def encode(self, codec: Codec) -> None:
        if codec.name not in OF_MEMCPY:
            return self.encode_entries(codec)
        element = ELEMENTS[self.dtype]
        sizes = [part.raw_bytes for part in self.parts]
        for at in self.places:
            block, into = self.block(self.raw, at), self.block(self.packed, at)
            kernels.encode_parts(codec.number, element, block, sizes, into)
        return None

    def decode(self, codec: Codec) -> None:
        if codec.name not in OF_MEMCPY:
            return self.decode_entries(codec)
        element = ELEMENTS[self.dtype]
        for at, found in zip(self.places, self.lists, strict=True):
            packed, into = self.block(self.packed, at), self.block(self.out, at)
            assert kernels.decode_parts(element, packed, found, into) == len(found)
        return None

    def encode_entries(self, codec: Codec) -> None:
        self.found = [
            codec.encode(self.block(self.raw, at), self.parts, self.dtype, self.block(self.packed, at))
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
        assert self.out == self.raw, f"{codec.name}: {self.dtype} did not come back"
        nbytes = sum(found[-1].offset + found[-1].nbytes for found in self.found)
        return len(self.raw) / nbytes


class Plain:
    """zstd-1 of whole blocks, as they are."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.texts: list[bytes] = []

    def encode(self) -> None:
        compressor = zstandard.ZstdCompressor(level=1)
        self.texts = [
            compressor.compress(self.work.block(self.work.raw, at)) for at in self.work.places
        ]

    def decode(self) -> None:
        decompressor = zstandard.ZstdDecompressor()
        for at, text in zip(self.work.places, self.texts, strict=True):
            self.work.block(self.work.out, at)[:] = decompressor.decompress(text)


def ways(
    name: str, work: Work, codec: Codec, level: str, plain: Plain, rounds: int, best: str
) -> Iterator[Row]:
    """Encoding and decoding, each beside memcpy and beside zstd-1, in turn."""
    bf16 = work.dtype == "bfloat16"
    memcpy = OF_MEMCPY.get(codec.name, (None, None)) if bf16 and level == best else (None, None)
    zstd = OF_ZSTD.get((codec.name, level), (None, None)) if bf16 else (None, None)
    arms: list[tuple[str, Callable[[], None], Callable[[], None], float | None, float | None]] = [
        ("encode", partial(work.encode, codec), plain.encode, memcpy[0], zstd[0]),
        ("decode", partial(work.decode, codec), plain.decode, memcpy[1], zstd[1]),
    ]
    for way, run, other, of_memcpy, of_zstd in arms:
        one, copy, theirs = Arm(run), Arm(work.copy), Arm(other)
        row = harness.ratio_row(
            f"{name} {codec.name} {level} {way} / memcpy",
            pairs(one, copy, rounds), of_memcpy, len(work.raw), one, copy,
        )  # fmt: skip
        row.more["of CPU time"] = median(copy.cpu_seconds) / median(one.cpu_seconds)
        yield row
        if of_zstd or level == best:
            yield harness.ratio_row(
                f"{name} {codec.name} {level} {way} / zstd-1",
                pairs(one, theirs, max(3, rounds // 3)), of_zstd, len(work.raw), one, theirs,
            )  # fmt: skip


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    levels = kernels.implementations("codec")
    for source, dtype, data in inputs(arguments):
        work = Work(dtype, data, arguments.mib)
        plain, name = Plain(work), f"{source} {dtype}"
        plain.encode()
        bits = 8 * DTYPE_BYTES[dtype]
        ratio = len(work.raw) / sum(map(len, plain.texts))
        yield Row(f"{name} zstd-1 ratio", ratio, "x", more={"bits/element": bits / ratio})
        for codec in BY_NAME.values():
            if codec.name not in arguments.codecs:
                continue
            native = codec.name in OF_MEMCPY
            for level in levels if native else levels[:1]:
                kernels.force("codec", level)
                ratio = work.check(codec)
                if level == levels[0]:
                    more = {"bits/element": bits / ratio}
                    bar = RATIO.get(codec.name) if dtype == "bfloat16" else None
                    row = harness.at_least(
                        f"{name} {codec.name} ratio", ratio, "x", bar or 0, **more
                    )
                    yield row if bar else Row(row.name, ratio, "x", more=more)
                if level == levels[0] or dtype == "bfloat16":
                    yield from ways(name, work, codec, level, plain, arguments.rounds, levels[0])
            kernels.force("codec", "auto")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a Llama-like checkpoint in bf16")
    parser.add_argument("--text", type=Path, help="what it reads; else a text file beside it")
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=harness.ROUNDS)
    parser.add_argument("--codecs", nargs="+", default=["fix4", "r32", "zstd"])
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
