"""Creates a profile from a model and a text: measures K and V, the effect of errors in them, and the loss of
each level.

A level is defined by its loss: its steps are chosen so that the predictions of the model after a prefix with
encoded K and V diverge by that amount from the predictions without encoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvtier.errors import ConfigError
from kvtier_daemon.calibration import rate
from kvtier_daemon.calibration.model import (
    Cached,
    Model,
    Rotation,
    chunks,
    divergence,
    surprise,
    turns,
)
from kvtier_daemon.codec import profile as files

PREFIX, NEXT = 512, 64  # tokens whose K and V are encoded, and tokens that are predicted after them
SEQUENCE = PREFIX + NEXT + 1
TRIALS = 24  # sequences on which a level is tried, at most
TRIAL_SHARE = 4  # one in this many sequences, if the text is short
BATCH = 8
GROUP = 16  # tokens of a cachegen group: the block of vLLM
KEPT_TOKENS = 12_288  # of each part, for the choice of steps
KEPT_VALUES = 1 << 28
# Mean KL of a prediction, and when the search for it ends.
ECSQ_LOSS = {"hi": 1.2e-3, "mid": 2.8e-3, "lo": 5.6e-3}
CACHEGEN_LOSS = {"hi": 2.4e-3, "mid": 6.5e-3, "lo": 16e-3}
NEAR = 0.95
TRIES = 12
FIRST_PRICE = 3e-7
DEPTHS = (0.8, 1.0, 1.25)  # cachegen: relative steps, in thirds of the layers
ANCHOR_ROOM = 1.25  # of the largest value seen

Codec = Callable[[Cached], Cached]
Parts = list[list[rate.MeasuredPart]]
Steps = list[list[rate.Chosen]]


class Progress(Protocol):
    def __call__(self, what: str, done: int, total: int) -> None:
        """Report progress."""


@dataclass(frozen=True)
class Measurement:
    """The results of one level on the trials, which are used for nothing else. Bits are those of symbols and
    escapes by the tables; streams and headers are not counted."""

    codec: str
    level: str
    bits: float
    divergence: float
    perplexity_change: float


@dataclass
class _Layer:
    """Samples of K and V of one layer, or of its latents with the dims that are not encoded."""

    rotation: Rotation | None
    heads: tuple[int, ...]
    dims: tuple[int, ...]
    exact_dims: int
    means: list[npt.NDArray[np.float32]]
    plain: list[rate.MeasuredPart]
    deltas: list[rate.MeasuredPart]
    anchors: list[npt.NDArray[np.uint8]]


def calibrate(
    model: Model, text: str, *, name: str, weights: str, tokens: int, progress: Progress
) -> tuple[files.Profile, list[Measurement]]:
    """Measure the model on `tokens` tokens, spread evenly over the text. Deterministic on one machine."""
    ids = chunks(model.tokens(text), SEQUENCE, max(1, tokens // SEQUENCE))
    trials = min(TRIALS, len(ids) // TRIAL_SHARE)
    if not trials:
        raise ConfigError(
            f"the text has {len(ids) * SEQUENCE} tokens, at least {TRIAL_SHARE * SEQUENCE} are "
            "needed"
        )
    # Spread over the text, as the others are.
    tried = torch.zeros(len(ids), dtype=torch.bool)
    tried[[number * len(ids) // trials for number in range(trials)]] = True
    layers = _measure(model, ids[~tried], progress)
    trial = Trial(model, ids[tried])
    outcomes: list[Measurement] = []
    chosen: dict[str, list[Steps]] = {}
    for codec, targets in (("ecsq", ECSQ_LOSS), ("cachegen", CACHEGEN_LOSS)):
        parts = [layer.plain if codec == "ecsq" else layer.deltas for layer in layers]
        chosen[codec], price = [], FIRST_PRICE
        for number, (level, target) in enumerate(targets.items()):
            progress(f"{codec}-{level}", number, len(targets))
            steps, price, outcome = _search(trial, layers, codec, level, parts, target, price)
            chosen[codec].append(steps)
            outcomes.append(outcome)
    return _profile(model, layers, chosen, name, weights, int((~tried).sum()) * SEQUENCE), outcomes


# --- what K and V are like -------------------------------------------------------------------------


def _measure(model: Model, ids: Tensor, progress: Progress) -> list[_Layer]:
    first_tokens = model.prefix(ids[:1, :1])
    exact_dims = model.exact_dims(first_tokens)
    rotations = [None] * len(first_tokens) if exact_dims else model.rotations(ids)
    chance = torch.Generator().manual_seed(0)
    wanted = max(GROUP, min(KEPT_TOKENS, KEPT_VALUES // _channels(first_tokens)))
    one_in = max(1, -(-len(ids) * PREFIX // wanted))
    kept: list[list[list[npt.NDArray[np.float32]]]] = [[[], [], []] for _ in rotations]
    costs = [[np.zeros(1) for _ in range(3)] for _ in rotations]
    shapes: list[tuple[tuple[int, int], tuple[int, int]]] = []
    for first in range(0, len(ids), BATCH):
        progress("measured", first, len(ids))
        batch = ids[first : first + BATCH]
        prefix = model.prefix(batch[:, :PREFIX])
        slopes = model.sensitivity(prefix, batch[:, PREFIX : PREFIX + NEXT], chance)
        shapes = [((k.shape[1], v.shape[1]), (k.shape[3], v.shape[3])) for k, v in prefix]
        for layer, (rotation, values, gradients) in enumerate(
            zip(rotations, prefix, slopes, strict=True)
        ):
            seen = _three(rotation, *values)
            for part, (value, slope) in enumerate(
                zip(seen, _three(rotation, *gradients), strict=True)
            ):
                squares = slope.double().square().mean((0, 2)).flatten().cpu().numpy()
                costs[layer][part] = costs[layer][part] + squares * len(batch)
                groups = value.transpose(1, 2).flatten(2).unflatten(1, (-1, GROUP)).flatten(0, 1)
                mine = groups[first % one_in :: one_in].flatten(0, 1)
                kept[layer][part].append(mine.float().cpu().numpy())
    parts = 1 if exact_dims else 2
    found = []
    for layer, rotation in enumerate(rotations):
        progress("steps", layer, len(rotations))
        depth = DEPTHS[len(DEPTHS) * layer // len(rotations)]
        before, after, late = (np.concatenate(pieces) for pieces in kept[layer])
        weights = [cost / len(ids) for cost in costs[layer]]
        plain = [(before, weights[0]), (late, weights[2])][:parts]
        turned = [(after, weights[1] / depth**2), (late, weights[2] / depth**2)][:parts]
        means = [_mean(values) for values, _ in plain]
        anchors = [_anchor_exponents(values) for values, _ in turned]
        heads, dims = shapes[layer]
        found.append(
            _Layer(
                rotation, heads[:parts], dims[:parts], exact_dims, means,
                [
                    rate.measure(values - mean, cost)
                    for (values, cost), mean in zip(plain, means, strict=True)
                ],
                [
                    rate.measure(_deltas(values, anchor), cost)
                    for (values, cost), anchor in zip(turned, anchors, strict=True)
                ],
                anchors,
            )
        )  # fmt: skip
    return found


def _channels(prefix: Cached) -> int:
    return sum(x.shape[1] * x.shape[3] for pair in prefix for x in pair)


def _three(
    rotation: Rotation | None, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return K before rotation, K after it, and V; gradients are rotated back as vectors are."""
    return (rotation.turn(keys, 0, True) if rotation else keys), keys, values


def _mean(samples: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    found: npt.NDArray[np.float32] = samples.mean(0, dtype=np.float64).astype(np.float32)
    return found


def _anchor_exponents(samples: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    greatest = np.maximum(np.abs(samples).max(0).astype(np.float64), 1e-5) * ANCHOR_ROOM / 127
    found = np.ceil(np.log2(greatest) * rate.EIGHTHS) + rate.BIAS
    held: npt.NDArray[np.uint8] = np.clip(found, 0, rate.LAST).astype(np.uint8)
    return held


def _deltas(
    samples: npt.NDArray[np.float32], anchors: npt.NDArray[np.uint8]
) -> npt.NDArray[np.float32]:
    groups = samples.reshape(-1, GROUP, samples.shape[1])
    steps = rate.steps(anchors).astype(np.float32)
    bases = np.rint(groups[:, :1] / steps) * steps
    found: npt.NDArray[np.float32] = (groups[:, 1:] - bases).reshape(-1, samples.shape[1])
    return found


# --- what a level comes to -------------------------------------------------------------------------


class Trial:
    """Sequences whose prefix is replaced by its decoded form, to measure the effect on the predictions."""

    def __init__(self, model: Model, ids: Tensor) -> None:
        self.model = model
        self._batches = []
        base = 0.0
        for first in range(0, len(ids), BATCH):
            batch = ids[first : first + BATCH]
            prefix = model.prefix(batch[:, :PREFIX])
            with torch.no_grad():
                logs = model.scores(prefix, batch[:, PREFIX : PREFIX + NEXT])
            self._batches.append((batch, prefix, logs))
            base += surprise(logs, batch[:, PREFIX + 1 :]) * len(batch)
        self.sequences = len(ids)
        self.surprise = base / len(ids)

    def run(self, codec: Codec) -> tuple[float, float]:
        """Return the mean KL of a prediction, and the relative change of perplexity."""
        apart, surprised = 0.0, 0.0
        for batch, prefix, logs in self._batches:
            with torch.no_grad():
                found = self.model.scores(codec(prefix), batch[:, PREFIX : PREFIX + NEXT])
            apart += divergence(logs, found) * len(batch)
            surprised += surprise(found, batch[:, PREFIX + 1 :]) * len(batch)
        change = float(np.exp(surprised / self.sequences - self.surprise)) - 1
        return apart / self.sequences, change


def _search(
    trial: Trial, layers: list[_Layer], codec: str, level: str, parts: Parts, target: float, price: float
) -> tuple[Steps, float, Measurement]:  # fmt: skip
    """Return the steps that cause this loss, or slightly less."""
    low, high = 0.0, float("inf")
    best: tuple[Steps, float, Measurement] | None = None
    for _ in range(TRIES):
        steps = [[rate.choose(part, price) for part in layer] for layer in parts]
        lost, change = trial.run(_as_if(trial.model, layers, codec, steps))
        bits = float(np.average(
            [_bits(codec, one) for layer in steps for one in layer],
            weights=[len(one.exponents) for layer in steps for one in layer],
        ))  # fmt: skip
        if lost <= target:
            low = max(low, price)
            if best is None or bits < best[2].bits:
                best = steps, price, Measurement(codec, level, bits, lost, change)
            if lost >= NEAR * target:
                break
        else:
            high = min(high, price)
        guess = price * min(max(target * (1 + NEAR) / 2 / max(lost, 1e-12), 1 / 32), 32.0)
        inside = low < guess < high
        price = guess if inside else (low * high) ** 0.5 if low else high / 8
    if best is None:
        raise ConfigError(f"{codec}-{level}: no step size reaches a divergence of {target:g}")
    return best


def _bits(codec: str, one: rate.Chosen) -> float:
    return one.bits if codec == "ecsq" else 8 / GROUP + one.bits * (GROUP - 1) / GROUP


def _as_if(model: Model, layers: list[_Layer], codec: str, steps: Steps) -> Codec:
    """Return what decoding would return, almost exactly."""

    def replaced(prefix: Cached) -> Cached:
        found = []
        for layer, chosen, pair in zip(layers, steps, prefix, strict=True):
            both = []
            for part, x in enumerate(pair[: len(chosen)]):
                rotation = layer.rotation if part == 0 else None
                step = _along(x, rate.steps(chosen[part].exponents))
                if codec == "ecsq":
                    mean = _along(x, layer.means[part])
                    plain = rotation.turn(x, 0, True) if rotation else x
                    near = torch.round((plain - mean) / step) * step + mean
                    both.append(model.rounded(rotation.turn(near, 0) if rotation else near))
                else:
                    fine = _along(x, rate.steps(layer.anchors[part]))
                    bases = (torch.round(x[:, :, ::GROUP] / fine) * fine).repeat_interleave(
                        GROUP, 2
                    )
                    near = bases + torch.round((x - bases) / step) * step
                    near[:, :, ::GROUP] = bases[:, :, ::GROUP]
                    both.append(model.rounded(near))
            found.append((both[0], both[1] if len(both) > 1 else pair[1]))
        return found

    return replaced


def _along(x: Tensor, channels: npt.NDArray[np.float64] | npt.NDArray[np.float32]) -> Tensor:
    """Return one number per channel, in a shape that multiplies `[sequence, head, token, dim]`."""
    return torch.from_numpy(channels).to(x).reshape(x.shape[1], 1, x.shape[3])


# --- the file --------------------------------------------------------------------------------------


def _profile(
    model: Model, layers: Sequence[_Layer], chosen: dict[str, list[Steps]], name: str, weights: str,
    tokens: int,
) -> files.Profile:  # fmt: skip
    ropes: list[files.Rope] = []
    found = []
    for number, layer in enumerate(layers):
        rope = -1
        if layer.rotation is not None:
            words = np.array(turns(layer.rotation.angles), "<u8").tobytes()
            one = files.Rope(words, layer.rotation.interleaved, *model.rope_origin(layer.rotation))
            if one not in ropes:
                ropes.append(one)
            rope = ropes.index(one)
        found.append(tuple(
            files.ProfilePart(
                heads=layer.heads[part], dim=layer.dims[part] + layer.exact_dims, exact_dims=layer.exact_dims,
                rope=rope if part == 0 else -1, means=layer.means[part].astype("<f4").tobytes(),
                ecsq=_levels(chosen["ecsq"], number, part),
                anchors=layer.anchors[part].tobytes(),
                cachegen=_levels(chosen["cachegen"], number, part),
            )
            for part in range(len(layer.means))
        ))  # fmt: skip
    made = files.Profile(
        model=name, weights=weights, dtype=str(model.kept).removeprefix("torch."), tokens=tokens,
        group_tokens=GROUP, ropes=tuple(ropes), layers=tuple(found),
    )  # fmt: skip
    files.check(made)
    return made


def _levels(chosen: list[Steps], layer: int, part: int) -> tuple[files.Level, ...]:
    found = [steps[layer][part] for steps in chosen]
    return tuple(files.Level(one.exponents.tobytes(), one.table) for one in found)
