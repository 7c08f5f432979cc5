"""What encoded K and V do to a model: a prefix's are replaced by what decoding gives, what follows is scored.

`--model PATH` is a folder with a causal language model of Hugging Face; torch and transformers must be
installed. Of each of 24 sequences of text that were not used for calibration, 512 tokens are the prefix and
64 are scored: the KL of the predictions, and the change of perplexity, relative to the prefix without
encoding. Sizes are as stored. `--calibration` is a file of `kvtier calibrate`, or a text to make one from;
the default is calib.txt in the model's folder.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import exp, log
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

import harness
from draw_quality import drawn
from harness import Row
from kv import bf16, wide
from kvtier.frame import RAW, Entry
from kvtier_daemon.calibration.measuring import SEQUENCE, TRIALS, Trial, calibrate
from kvtier_daemon.calibration.model import Cached, Model, chunks
from kvtier_daemon.codec import profile as files
from kvtier_daemon.codec.base import Codec
from kvtier_daemon.codec.calibrated import Calibrated
from kvtier_daemon.codec.grid import Grid, head_of
from kvtier_daemon.codec.table import BY_NAME
from models.codecs import decode, encode

Floats = npt.NDArray[np.float32]
K, V = 0, 1
CDF_BYTES = 33 * 2  # CacheGen's code: of each channel in every chunk, whatever the bins
# Smaller by, at most this KL, at most this change of perplexity.
BARS = {
    "ecsq-hi": (4.4, 2e-3, 0.005),
    "ecsq-mid": (5.5, 5.5e-3, 0.007),
    "ecsq-lo": (6.8, 13e-3, 0.01),
    "cachegen-hi": (3.8, 4e-3, None),
    "cachegen-mid": (4.5, 11e-3, None),
}
RELEASED, SHARE = "CacheGen's code, 16 bins", 0.58


class Way(Protocol):
    """Encodes one part of a block and decodes it again."""

    def __call__(self, x: Floats, layer: int, part: int, position: int) -> tuple[float, Floats]:
        """Bytes, and what comes back of `[token, head, dim]`."""


def rounded(x: Floats) -> Floats:
    return wide(bf16(np.ascontiguousarray(x)))


# --- as others do it ---------------------------------------------------------------------------------


def raw(x: Floats, layer: int, part: int, position: int) -> tuple[float, Floats]:
    return 2.0 * x.size, x


@dataclass
class Grouped:
    """Whole numbers of a few bits: a group of a channel's tokens (K), or of a token's channels (V), shares a
    step, and with fewer than 8 bits its least value, in 16 bits each."""

    bits: int
    tokens: int
    channels: int

    def __call__(self, x: Floats, layer: int, part: int, position: int) -> tuple[float, Floats]:
        rows = x.reshape(len(x), -1) if part == V else x.reshape(len(x), -1).T
        size = self.channels if part == V else self.tokens
        nbytes, found = x.size * self.bits / 8, np.empty_like(rows)
        for first in range(0, rows.shape[1], size):
            group = rows[:, first : first + size]
            if self.bits == 8:
                step = rounded(np.abs(group).max(1, keepdims=True) / 127)
                base = np.zeros_like(step)
            else:
                base = rounded(group.min(1, keepdims=True))
                step = rounded((group.max(1, keepdims=True) - base) / ((1 << self.bits) - 1))
            step = np.maximum(step, np.float32(1e-30))
            low, high = (-127, 127) if self.bits == 8 else (0, (1 << self.bits) - 1)
            found[:, first : first + size] = (
                np.clip(np.rint((group - base) / step), low, high) * step + base
            )
            nbytes += len(group) * (2 if self.bits == 8 else 4)
        return nbytes, rounded((found if part == V else found.T).reshape(x.shape))


@dataclass
class Fp8:
    """e4m3, without a scale or with one for each part of a block."""

    scaled: bool

    def __call__(self, x: Floats, layer: int, part: int, position: int) -> tuple[float, Floats]:
        scale = max(float(np.abs(x).max()) / 448, 1e-30) if self.scaled else 1.0
        held = torch.from_numpy(np.clip(x / np.float32(scale), -448, 448))
        back = held.to(torch.float8_e4m3fn).float().numpy() * np.float32(scale)
        return x.size + 4.0 * self.scaled, rounded(back)


@dataclass
class Released:
    """CacheGen in the format of its released code: each token is scaled by its largest value, and each
    channel of a chunk has its own code table, which is stored with it. Counts bytes by entropy, plus the
    tables."""

    bins: int

    def __call__(self, x: Floats, layer: int, part: int, position: int) -> tuple[float, Floats]:
        reach = self.bins // 2 - 1
        rows = x.reshape(len(x), -1)
        most = np.maximum(rounded(np.abs(rows).max(1, keepdims=True)), np.float32(1e-30))
        numbers = np.rint(rows * (reach / most))
        nbytes = 2.0 * len(rows)  # each token's largest
        for channel in numbers.T:
            _, counts = np.unique(channel, return_counts=True)
            bits = float((counts * -np.log2(counts / len(channel))).sum())
            nbytes += -(-(bits + 2) // 8) + 4 + CDF_BYTES  # whole bytes, their number, the table
        return nbytes, rounded((numbers / reach * most).astype(np.float32).reshape(x.shape))


@dataclass
class Turbo:
    """TurboQuant for mean square errors: each token of a head is rotated by Hadamard's matrix with random
    signs, scaled to its norm (16 bits), and each coordinate takes the nearest of 2^bits numbers that are
    best for normal values."""

    bits: int

    def __post_init__(self) -> None:
        draws = np.sort(np.random.default_rng(0).standard_normal(1 << 16))
        levels = np.quantile(draws, (np.arange(1 << self.bits) + 0.5) / (1 << self.bits))
        for _ in range(200):  # Lloyd's algorithm
            nearest = np.searchsorted((levels[1:] + levels[:-1]) / 2, draws)
            levels = np.array([draws[nearest == n].mean() for n in range(len(levels))])
        self.levels = levels.astype(np.float32)

    def __call__(self, x: Floats, layer: int, part: int, position: int) -> tuple[float, Floats]:
        dim = x.shape[-1]
        matrix = np.ones((1, 1), np.float32)
        while len(matrix) < dim:
            matrix = np.block([[matrix, matrix], [matrix, -matrix]]) / np.float32(2**0.5)
        signs = np.random.default_rng(1).choice(np.array([-1, 1], np.float32), dim)
        turned = (x * signs) @ matrix
        norm = rounded(np.linalg.norm(x, axis=-1, keepdims=True))
        scale = np.maximum(norm, np.float32(1e-30)) / np.float32(dim**0.5)
        nearest = np.searchsorted((self.levels[1:] + self.levels[:-1]) / 2, turned / scale)
        back = (self.levels[nearest] * scale) @ matrix.T * signs
        return x.size * self.bits / 8 + 2.0 * norm.size, rounded(back.astype(np.float32))


@dataclass
class ByToken:
    """One of the product's codecs, with groups along the channels of a token for K as for V."""

    codec: Codec

    def __call__(self, x: Floats, layer: int, part: int, position: int) -> tuple[float, Floats]:
        return Ours(self.codec)(x, layer, V, position)


# --- as we do it -------------------------------------------------------------------------------------


@dataclass
class Ours:
    """One of the product's codecs, each part a block: real bytes."""

    codec: Codec

    def __call__(self, x: Floats, layer: int, part: int, position: int) -> tuple[float, Floats]:
        tokens, heads, dim = x.shape
        data = bf16(np.ascontiguousarray(x)).tobytes()
        back, text = bytearray(len(data)), bytearray(len(data))
        one = Entry(layer, part, RAW, 0, len(data), len(data))
        grid = Grid(tokens, heads * dim, head_of(heads, dim), part == V)
        [entry] = encode(self.codec, data, [one], "bfloat16", text, [grid], position)
        decode(self.codec, text, [entry], "bfloat16", back)
        return entry.nbytes, wide(np.frombuffer(back, "<u2")).reshape(x.shape)


@dataclass
class Exact:
    """Tokens from this position on stay exact."""

    way: Way
    first: int

    def __call__(self, x: Floats, layer: int, part: int, position: int) -> tuple[float, Floats]:
        count = min(max(self.first - position, 0), len(x))
        if count == 0:
            return raw(x, layer, part, position)
        nbytes, found = self.way(np.ascontiguousarray(x[:count]), layer, part, position)
        return nbytes + 2.0 * x[count:].size, np.concatenate([found, x[count:]])


# --- what it does ------------------------------------------------------------------------------------


@dataclass
class Found:
    """One way's bytes and errors, summed while the prefixes are replaced."""

    way: Way
    block_tokens: int
    nbytes: float = 0.0
    elements: int = 0
    errors: list[float] = field(default_factory=lambda: [0.0, 0.0])
    squares: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def replace(self, prefix: Cached) -> Cached:
        return [
            (self._replaced(k, layer, K), self._replaced(v, layer, V))
            for layer, (k, v) in enumerate(prefix)
        ]

    def _replaced(self, x: torch.Tensor, layer: int, part: int) -> torch.Tensor:
        whole = x.float().cpu().transpose(1, 2).numpy()
        back = np.empty_like(whole)
        for number, sequence in enumerate(whole):
            for first in range(0, len(sequence), self.block_tokens):
                block = sequence[first : first + self.block_tokens]
                nbytes, values = self.way(block, layer, part, first)
                back[number, first : first + len(block)] = values
                self.nbytes += nbytes
                self.elements += block.size
        self.errors[part] += float(((whole - back).astype(np.float64) ** 2).sum())
        self.squares[part] += float((whole.astype(np.float64) ** 2).sum())
        return torch.from_numpy(back).transpose(1, 2).to(x)

    @property
    def bits(self) -> float:
        return 8 * self.nbytes / self.elements

    def error(self, part: int) -> float:
        return float((self.errors[part] / self.squares[part]) ** 0.5)


def ways(profile: files.Profile) -> Iterator[tuple[str, Way]]:
    yield "raw", raw
    yield "q8", Ours(BY_NAME["q8"])
    yield "q4", Ours(BY_NAME["q4"])
    yield "q2", Ours(BY_NAME["q2"])
    for name in ("fp8", "e5m2", "nvfp4", "mxfp4"):
        yield name, Ours(BY_NAME[name])
    yield "nvfp4, K by token", ByToken(BY_NAME["nvfp4"])
    yield "3 bits, groups of q4", Grouped(3, 256, 64)
    for bits in (4, 3, 2):
        yield f"TurboQuant, {bits} bits", Turbo(bits)
    yield "KIVI-4, groups of 32", Grouped(4, 32, 32)
    yield "KIVI-2, groups of 32", Grouped(2, 32, 32)
    yield "fp8 unscaled", Fp8(False)
    yield "fp8 scaled", Fp8(True)
    yield "CacheGen's code, 32 bins", Released(32)
    yield RELEASED, Released(16)
    for level in files.CACHEGEN_LEVELS:
        yield f"cachegen-{level}", Ours(partial(Calibrated, "cachegen")(profile, level))
    for level in files.ECSQ_LEVELS:
        yield f"ecsq-{level}", Ours(partial(Calibrated, "ecsq")(profile, level))


def judged(name: str, found: Found, apart: float, change: float) -> list[Row]:
    """How much smaller, and what it costs; each with its bar where there is one."""
    more = {
        "bits": found.bits, "error K": found.error(K), "error V": found.error(V), "KL": apart,
        "perplexity": change,
    }  # fmt: skip
    ratio = 16 / found.bits
    if name not in BARS:
        return [Row(name, ratio, "x smaller", more=more), Row(f"{name} KL", apart, "")]
    smaller, most, most_change = BARS[name]
    rows = [
        harness.at_least(name, ratio, "x smaller", smaller, **more),
        harness.at_most(f"{name} KL", apart, "", most),
    ]
    if most_change is not None:
        rows.append(
            harness.at_most(
                f"{name} change of perplexity", abs(change) * 100, "%", most_change * 100
            )
        )
    return rows


def at_equal_loss(curve: Sequence[tuple[float, float]], apart: float) -> float | None:
    """Bits of a curve of (bits, KL) where its KL is this; None beyond its ends. KL is about a power of two in
    bits, so it is a line in the logarithm."""
    points = sorted(curve)
    for (bits, above), (more_bits, below) in pairwise(points):
        if below <= apart <= above:
            share = (log(above) - log(apart)) / (log(above) - log(below))
            return bits + share * (more_bits - bits)
    return None


def at_equal_bits(curve: Sequence[tuple[float, float]], bits: float) -> float:
    """The KL of a curve of (bits, KL) at these bits; beyond its ends, that of the line at the end."""
    pairs = list(pairwise(sorted(curve)))
    (one, above), (other, below) = next((pair for pair in pairs if bits <= pair[1][0]), pairs[-1])
    share = (bits - one) / (other - one)
    return exp(log(above) + share * (log(below) - log(above)))


def profile_of(model: Model, path: Path, given: Path | None) -> tuple[files.Profile, str]:
    source = given or path / "calib.txt"
    body = source.read_bytes()
    if body[:4] == files.MAGIC:
        return files.decode(body), source.name

    def told(what: str, done: int, total: int) -> None:
        print(f"\rcalibrating: {what} {done}/{total}\033[K", end="", file=sys.stderr, flush=True)

    made, _ = calibrate(
        model, body.decode(), name=path.name, weights="", tokens=65_536, progress=told
    )
    print(file=sys.stderr)
    return made, source.name


def measure(
    model: Model, profile: files.Profile, text: str, sequences: int, block_tokens: int
) -> tuple[list[Row], dict[str, Any]]:
    ids = chunks(model.tokens(text), SEQUENCE, sequences)
    trial = Trial(model, ids)
    rows: list[Row] = []
    curves: dict[str, tuple[float, float]] = {}
    for name, way in ways(profile):
        found = Found(way, block_tokens)
        apart, change = trial.run(found.replace)
        curves[name] = found.bits, apart
        for row in judged(name, found, apart, change):
            print(row.line(), flush=True)
            rows.append(row)
    assert rows[0].more["KL"] == 0 and rows[0].more["bits"] == 16, "raw is not what was there"
    ours = [curves[f"ecsq-{level}"] for level in files.ECSQ_LEVELS]
    released_bits, released_apart = curves[RELEASED]
    bits = at_equal_loss(ours, released_apart)
    if bits is not None:
        share = bits / released_bits
        rows.append(harness.at_most(f"ecsq's bytes of {RELEASED}, at its KL", share, "", SHARE))
    return rows, {"sequences": len(ids), "perplexity": exp(trial.surprise)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, help="what is scored; else valid.txt beside the model")
    parser.add_argument("--calibration", type=Path, help="a profile, or a text to make one from")
    parser.add_argument("--sequences", type=int, default=TRIALS)
    parser.add_argument("--block-tokens", type=int, default=256)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out")
    parser.add_argument("--plot", type=Path, help="rate against distortion, as SVG")
    arguments = parser.parse_args()
    model = Model(arguments.model, arguments.device)
    # For latents and their RoPE dims, the codecs take one part: as K and V they would stay raw.
    if getattr(model.config, "kv_lora_rank", None):
        raise SystemExit(
            f"{arguments.model}: K and V are measured here, and this caches latents (MLA):"
            " `kvtier calibrate` says what each level loses of them"
        )
    profile, source = profile_of(model, arguments.model, arguments.calibration)
    text = arguments.text or arguments.model / "valid.txt"
    rows, about = measure(
        model, profile, text.read_text(), arguments.sequences, arguments.block_tokens
    )
    code = harness.report(
        "quality", rows, [], arguments.out, model=arguments.model.name, calibrated=source,
        scored=text.name, profile=profile.name.hex(), block_tokens=arguments.block_tokens, **about,
    )  # fmt: skip
    if arguments.plot:
        arguments.plot.write_text(drawn([vars(row) for row in rows], arguments.model.name))
    return code


if __name__ == "__main__":
    sys.exit(main())
