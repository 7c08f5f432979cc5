"""Selects steps and tables: the least loss at a number of bits, part by part.

Chou, Lookabaugh and Gray, "Entropy-constrained vector quantization" (1989), in one dimension: each channel
takes the step with the least weighted sum of loss and bits under its part's table, then the table is counted
again. The loss is weighted by how much the model's predictions depend on the channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Samples = npt.NDArray[np.float32]
REACH = 15  # symbols on either side of zero, at most
SCALE = 256
ESCAPE_BITS = 16
BIAS, EIGHTHS, LAST = 160, 8, 255  # the step of an exponent is 2^((exponent - BIAS) / EIGHTHS)
FINEST, COARSEST = -32, 12  # eighths of octaves around the standard deviation of a channel
ROUNDS = 12
RARE = 1 / 2000


@dataclass(frozen=True)
class MeasuredPart:
    """One part of one layer: the effect of each step on each channel."""

    exponents: npt.NDArray[np.int64]  # [channel, candidate]
    # [channel, candidate, symbol]: from -REACH to REACH, and the others.
    counts: npt.NDArray[np.float64]
    losses: Floats  # [channel, candidate]: weighted mean square error


@dataclass(frozen=True)
class Chosen:
    exponents: npt.NDArray[np.uint8]
    table: bytes
    bits: float  # per element
    loss: float


def steps(exponents: npt.NDArray[np.int64] | npt.NDArray[np.uint8]) -> Floats:
    found: Floats = 2.0 ** ((exponents.astype(np.float64) - BIAS) / EIGHTHS)
    return found


def measure(samples: Samples, weights: Floats) -> MeasuredPart:
    """Measure samples `[token, channel]` around 0. `weights`: the cost of a squared error per channel."""
    tokens, channels = samples.shape
    deviation = np.maximum(np.sqrt(np.mean(samples.astype(np.float64) ** 2, axis=0)), 1e-5)
    middle = np.round(np.log2(deviation) * EIGHTHS).astype(np.int64) + BIAS
    exponents = np.clip(middle[:, None] + np.arange(FINEST, COARSEST + 1), 0, LAST)
    counts = np.empty((*exponents.shape, 2 * REACH + 2))
    losses = np.empty(exponents.shape)
    offsets = np.arange(channels) * (2 * REACH + 2)
    for number in range(exponents.shape[1]):
        step = steps(exponents[:, number]).astype(np.float32)
        found = np.rint(samples / step)
        losses[:, number] = np.mean((samples - found * step) ** 2, axis=0, dtype=np.float64)
        symbols = np.where(np.abs(found) <= REACH, found + REACH, 2 * REACH + 1).astype(np.int64)
        counts[:, number] = np.bincount(
            (symbols + offsets).ravel(), minlength=channels * (2 * REACH + 2)
        ).reshape(channels, -1)
    floor = max(float(weights.mean()) * 1e-4, 1e-30)
    return MeasuredPart(exponents, counts / tokens, losses * np.maximum(weights, floor)[:, None])


def choose(part: MeasuredPart, price: float) -> Chosen:
    """Return the best steps if one bit is worth `price` of loss."""
    channels, candidates, _ = part.counts.shape
    every = np.arange(channels)
    picked = np.full(channels, candidates // 2)
    table = b""
    for _ in range(ROUNDS):
        counts = part.counts[every, picked].sum(axis=0)
        table = tabled(counts)
        costs = part.losses + price * (part.counts @ lengths(table))
        now = np.argmin(costs, axis=1)
        if (now == picked).all():
            break
        picked = now
    counts = part.counts[every, picked].sum(axis=0)
    table = tabled(counts)
    bits = float(counts @ lengths(table)) / channels
    return Chosen(
        part.exponents[every, picked].astype(np.uint8),
        table,
        bits,
        float(part.losses[every, picked].sum()),
    )


def tabled(counts: Floats) -> bytes:
    """Return the frequencies of the useful symbols, the escape last, from counts as in `Measured`."""
    total = float(counts.sum())
    reach = REACH
    while reach > 1 and counts[REACH - reach] + counts[REACH + reach] < RARE * total:
        reach -= 1
    hits = counts[REACH - reach : REACH + reach + 1].tolist()
    return shares([*hits, max(total - sum(hits), 0.0)])


def shares(hits: Sequence[float]) -> bytes:
    """Return the frequencies that encode these counts in the fewest bits: from 1 to 255, 256 in sum."""
    found = [1] * len(hits)
    # The next unit of the 256 goes to the symbol where it saves most.
    while sum(found) < SCALE:
        gains = [
            hit * float(np.log2((share + 1) / share))
            for hit, share in zip(hits, found, strict=True)
        ]
        found[gains.index(max(gains))] += 1
    return bytes(min(share, 255) for share in found)


def lengths(table: bytes) -> Floats:
    """Return the bits of each symbol from -REACH to REACH, and of all others, by this table."""
    bits = np.log2(SCALE) - np.log2(np.frombuffer(table, np.uint8).astype(np.float64))
    reach = len(table) // 2 - 1
    found = np.full(2 * REACH + 2, bits[-1] + ESCAPE_BITS)
    found[REACH - reach : REACH + reach + 1] = bits[:-1]
    return found
