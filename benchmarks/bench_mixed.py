"""Some tokens of a prefix stored more finely than others, and dropping tokens, at equal bytes.

As in bench_quality.py, the K and V of prefixes of 512 tokens are replaced, and the predictions of the next
64 tokens are compared. A choice selects blocks of 16 tokens that are stored with one level; the others are
stored with another one. The KL is compared with that of `ecsq` with one level for all tokens, at the same
bits: interpolated between levels. The bits of a level are those of blocks of 256 tokens. `--model PATH` as
there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache

import harness
from bench_quality import Exact, Found, Ours, Way, at_equal_bits, profile_of
from harness import Row
from kvtier_daemon.calibration.measuring import NEXT, PREFIX, SEQUENCE, TRIALS, Trial
from kvtier_daemon.calibration.model import Cached, Model, chunks, divergence
from kvtier_daemon.codec import profile as files
from kvtier_daemon.codec.calibrated import Calibrated
from kvtier_daemon.codec.table import BY_NAME

BLOCK = 16
TURN = 128  # tokens: the tail of each turn was the end of a prompt once
SINKS = 4
BAR_IMPORTANCE, BAR_WINDOW = 0.7, 0.045
WINDOW = 128  # tokens: KIVI's


class Shortened(Model):
    """A model whose prefixes may lack tokens: what follows always has the positions after 512 tokens."""

    def scores(self, prefix: Cached, ids: Tensor) -> Tensor:
        cache = DynamicCache()
        for number, (keys, values) in enumerate(prefix):
            cache.update(keys, values, number)
        at = torch.arange(PREFIX, PREFIX + ids.shape[1], device=self.device)[None]
        found = self.module(
            ids.to(self.device), past_key_values=cache, use_cache=True,
            position_ids=at.expand(ids.shape),
        )  # fmt: skip
        return torch.log_softmax(found.logits.float(), -1)

    def attention(self, ids: Tensor) -> Tensor:
        """The probabilities of each layer and head: `[layer, sequence, head, query, token]`."""
        with torch.no_grad():
            found = self.module(ids.to(self.device), output_attentions=True, use_cache=False)
        return torch.stack(found.attentions)


@dataclass
class Prefix:
    """The prefixes of a batch, with each level, and the attention to their tokens."""

    exact: Cached
    levels: dict[str, Cached]
    accumulated: Tensor  # of all queries: [layer, sequence, head of K, token]
    last: Tensor  # of the last 16 queries


def of_blocks(importance: Tensor) -> Tensor:
    """`[sequence, block]`: the share of all layers and heads."""
    return importance.sum((0, 2)).unflatten(-1, (-1, BLOCK)).sum(-1)


def best(importance: Tensor, count: int) -> Tensor:
    """`[sequence, token]`: whether a token is in one of the `count` most important blocks."""
    found = torch.zeros_like(importance, dtype=torch.bool)
    found.scatter_(1, importance.topk(count, 1).indices, True)
    return found.repeat_interleave(BLOCK, 1)


def where(fine: Tensor, one: Cached, other: Cached) -> Cached:
    """The tokens of the one, and of the other."""
    mask = fine[:, None, :, None]
    return [
        (torch.where(mask, a[0], b[0]), torch.where(mask, a[1], b[1]))
        for a, b in zip(one, other, strict=True)
    ]


def kept(cached: Cached, chosen: Tensor) -> Cached:
    """Only the tokens `chosen[layer, sequence, head of K, number]`, in their order."""
    found = []
    for layer, (keys, values) in enumerate(cached):
        at = chosen[layer].sort(-1).values[..., None]
        found.append((
            keys.gather(2, at.expand(*at.shape[:3], keys.shape[3])),
            values.gather(2, at.expand(*at.shape[:3], values.shape[3])),
        ))  # fmt: skip
    return found


def tail(like: Tensor, count: int) -> Tensor:
    """The last `count` blocks."""
    return torch.arange(PREFIX).expand(len(like), -1) >= PREFIX - count * BLOCK


def tails(like: Tensor, count: int) -> Tensor:
    """The last `count / turns` blocks of each turn: what was the tail of a prompt when it was stored."""
    each = max(1, round(count * TURN / PREFIX)) * BLOCK
    return torch.arange(PREFIX).expand(len(like), -1) % TURN >= TURN - each


def first(like: Tensor, count: int) -> Tensor:
    return torch.arange(PREFIX).expand(len(like), -1) < count * BLOCK


Choice = Callable[[Prefix, int], Tensor]
CHOICES: dict[str, Choice] = {
    "the last blocks": lambda one, count: tail(one.last[0], count),
    "the first block and the last ones": lambda one, count: (
        first(one.last[0], 1) | tail(one.last[0], count - 1)
    ),
    "the first blocks": lambda one, count: first(one.last[0], count),
    "the last blocks of each turn of 128 tokens": lambda one, count: tails(one.last[0], count),
    "heavy hitters (all queries)": lambda one, count: best(of_blocks(one.accumulated), count),
    "heavy hitters (last 16 queries)": lambda one, count: best(of_blocks(one.last), count),
}

# Of one block these make none, or four.
ROUNDED = ("the first block and the last ones", "the last blocks of each turn of 128 tokens")


def level_of(name: str, one: Prefix) -> Cached:
    return one.levels[name]


@dataclass
class Mixed:
    """The chosen blocks with `level`, the others with ecsq-lo. `share`: of the tokens, that were chosen."""

    choose: Choice
    count: int
    level: str
    share: float = 0.0

    def __call__(self, one: Prefix) -> Cached:
        fine = self.choose(one, self.count)
        self.share = float(fine.double().mean())
        finer = one.exact if self.level == "exact" else one.levels[self.level]
        return where(fine, finer, one.levels["ecsq-lo"])


def read(
    trial: Trial, model: Shortened, profile: files.Profile
) -> tuple[dict[int, Prefix], dict[str, float]]:
    ways = {
        f"ecsq-{level}": Found(Ours(Calibrated("ecsq", profile, level)), 256)
        for level in files.ECSQ_LEVELS
    }
    known = {}
    for batch, prefix, _ in trial._batches:
        seen = model.attention(batch[:, :PREFIX])
        heads = prefix[0][0].shape[1]
        grouped = seen.unflatten(2, (heads, -1)).sum(3)
        known[id(prefix)] = Prefix(
            prefix, {name: way.replace(prefix) for name, way in ways.items()}, grouped.sum(-2),
            grouped[..., -16:, :].sum(-2),
        )  # fmt: skip
    return known, {name: way.bits for name, way in ways.items()} | {"exact": 16.0}


def measure(model: Shortened, profile: files.Profile, ids: Tensor) -> Iterator[Row]:
    trial = Trial(model, ids)
    known, bits = read(trial, model, profile)
    blocks = PREFIX // BLOCK

    def run(choose: Callable[[Prefix], Cached]) -> float:
        return trial.run(lambda prefix: choose(known[id(prefix)]))[0]

    curve = []
    for level in files.ECSQ_LEVELS:
        name = f"ecsq-{level}"
        apart = run(partial(level_of, name))
        curve.append((bits[name], apart))
        yield Row(f"{name} KL", apart, "", more={"bits": bits[name]})
    low, middle = bits["ecsq-lo"], bits["ecsq-mid"]
    for level in ("ecsq-hi", "exact"):
        count = max(1, round(blocks * (middle - low) / (bits[level] - low)))
        for name, choose in CHOICES.items():
            if level == "exact" and count < 2 and name in ROUNDED:
                continue
            mixed = Mixed(choose, count, level)
            apart = run(mixed)
            share = mixed.share
            rate = share * bits[level] + (1 - share) * low
            plain = at_equal_bits(curve, rate)
            yield Row(
                f"{level} for {name}, ecsq-lo for others: KL of plain ecsq's", apart / plain, "",
                more={"bits": rate, "KL": apart, "plain": plain, "share": share},
            )  # fmt: skip
    # Dropping, at the bytes of ecsq-mid.
    room = round(PREFIX * middle / 16)
    recent = torch.arange(PREFIX - room + SINKS, PREFIX)
    streaming = torch.cat([torch.arange(SINKS), recent])

    def streamed(one: Prefix) -> Cached:
        shape = one.last.shape
        return kept(one.exact, streaming.expand(*shape[:3], room))

    def hitters(one: Prefix) -> Cached:
        window = torch.arange(PREFIX - room // 2, PREFIX).expand(*one.last.shape[:3], -1)
        most = one.accumulated[..., : PREFIX - room // 2].topk(room - room // 2, -1).indices
        return kept(one.exact, torch.cat([most, window], -1))

    for name, choose_tokens in (("StreamingLLM", streamed), ("H2O", hitters)):
        apart = run(choose_tokens)
        plain = at_equal_bits(curve, 16 * room / PREFIX)
        yield Row(
            f"{name} drops tokens: KL of plain ecsq's", apart / plain, "",
            more={"bits": 16 * room / PREFIX, "KL": apart, "tokens": room},
        )  # fmt: skip
    # KIVI's residual window: the last tokens stay exact, or the model computes them again.
    for name in ("q2", "nvfp4"):
        for window in (0, 16, 32, 64, WINDOW):
            way = Found(Exact(Ours(BY_NAME[name]), PREFIX - window), 256)
            apart = trial.run(way.replace)[0]
            row = f"{name}, the last {window} tokens exact: KL" if window else f"{name}: KL"
            if name == "q2" and window == WINDOW:
                yield harness.at_most(row, apart, "", BAR_WINDOW, bits=way.bits)
            else:
                yield Row(row, apart, "", more={"bits": way.bits})
    for window in (one for one in (16, 32, 64, WINDOW) if one < PREFIX):
        apart = again(model, trial, window, Ours(BY_NAME["q2"]))
        row = f"q2, the last {window} tokens computed again: KL"
        if window == WINDOW:
            yield harness.at_most(row, apart, "", BAR_WINDOW)
        else:
            yield Row(row, apart, "")
        for level in files.ECSQ_LEVELS:
            apart = again(model, trial, window, Ours(Calibrated("ecsq", profile, level)))
            plain = dict(curve)[bits[f"ecsq-{level}"]]
            row = f"ecsq-{level}, the last {window} tokens computed again: KL of plain ecsq's"
            if window == WINDOW:
                yield harness.at_most(row, apart / plain, "", BAR_IMPORTANCE, KL=apart)
            else:
                yield Row(row, apart / plain, "", more={"KL": apart})


def again(model: Shortened, trial: Trial, window: int, way: Way) -> float:
    """The KL if the last tokens of the prefix are computed after the others were replaced."""
    apart = 0.0
    for batch, prefix, logs in trial._batches:
        short = [(k[:, :, :-window], v[:, :, :-window]) for k, v in prefix]
        replaced = Found(way, 256).replace(short)
        with torch.no_grad():
            found = Model.scores(model, replaced, batch[:, PREFIX - window : PREFIX + NEXT])
        apart += divergence(logs, found[:, window:]) * len(batch)
    return apart / trial.sequences


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, help="what is scored; else valid.txt beside the model")
    parser.add_argument("--calibration", type=Path, help="a profile, or a text to make one from")
    parser.add_argument("--sequences", type=int, default=TRIALS)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    model = Shortened(arguments.model, arguments.device)
    profile, source = profile_of(model, arguments.model, arguments.calibration)
    text = (arguments.text or arguments.model / "valid.txt").read_text()
    rows = []
    for row in measure(model, profile, chunks(model.tokens(text), SEQUENCE, arguments.sequences)):
        print(row.line(), flush=True)
        rows.append(row)
    return harness.report(
        "mixed", rows, [], arguments.out, model=arguments.model.name, calibrated=source,
        predicted=NEXT, profile=profile.name.hex(),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
