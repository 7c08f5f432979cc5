"""What it costs to measure the importance of a prompt's blocks, and what such hints add to a cache's hits.

`--model PATH` is a folder with a causal language model of Hugging Face and a `valid.txt`; torch and
transformers must be installed. `--trace PATH` is a trace of requests, for hints about reuse.

Cost: the CPU time of the measurement relative to that of the prompt, with that model and with a random Llama
of 135M parameters.

Value: requests with real text and the model's real attention are replayed on caches of the same size, with
and without hints. A request is a system prompt, a document, and turns about it; documents are popular or
asked once; there are three such sets of requests. A hit is a block before which all blocks hit. Its value is
one, or the share of the attention that the last 16 queries of its request pay to it.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
import transformers

import harness
from harness import Row, at_most, interval
from kvtier_daemon.catalog.policy import make
from kvtier_daemon.sim.plot import draw
from kvtier_kernels import Optimum, Replay, Trace
from kvtier_transformers.importance import Importance, meters
from kvtier_transformers.layers import replaced
from kvtier_transformers.layout import library_cache
from traces import read_timed

BAR_COST = 0.02
BLOCK, MOST_TOKENS = 16, 1008
SYSTEMS, DOCUMENTS, REQUESTS = 3, 60, 400
ONCE, GOES_ON = (
    0.4,
    0.6,
)  # sessions about a document that is asked once; turns that are followed by another
SIZES = 0.02, 0.05, 0.1, 0.2, 0.4  # of all blocks
SHOWN = 0.1
CHECKED = 10  # prompts whose sampled attention is compared with all of it
WRONG = 0.2
SEEDS = 1, 2, 3
POLICIES = "attention", "auto"
LLAMA: dict[str, Any] = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
    "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def prefill(model: Any, ids: torch.Tensor, importance: Importance | None = None) -> None:
    cache = library_cache(model)
    cache.layers = [replaced(layer, 0) for layer in cache.layers]
    full = list(range(len(cache.layers)))
    for index, meter in meters(model, full, importance).items() if importance else ():
        cache.layers[index].meter = meter
    with torch.no_grad():
        model(ids, past_key_values=cache, logits_to_keep=1)


# --- cost --------------------------------------------------------------------------------------------


class Timed(Importance):
    """Adds up the CPU time of its notes."""

    seconds = 0.0

    def note(self, *what: Any) -> None:
        began = time.thread_time()
        super().note(*what)
        self.seconds += time.thread_time() - began


def cost(name: str, model: Any, tokens: int, rounds: int) -> list[Row]:
    """The CPU time of the measurement relative to the rest of the same prompt, and the ratio of the least CPU
    times of prompts with and without it, in changing order. With one thread: waiting ones use CPU time."""
    ids = torch.randint(1, 4096, (1, tokens))
    shares: dict[str, list[float]] = {"last": [], "accumulated": []}
    times: dict[str, list[float]] = {"": [], "last": [], "accumulated": []}
    for number in range(-1, rounds):
        arms = list(times)
        random.Random(number).shuffle(arms)
        for how in arms:
            importance = Timed(how, [0]) if how else None
            began = time.thread_time()
            prefill(model, ids, importance)
            if importance is not None:
                more = time.thread_time()
                assert len(importance.blocks(0, 0, BLOCK)) == tokens // BLOCK
                importance.seconds += time.thread_time() - more
            took = time.thread_time() - began
            if number >= 0:
                times[how].append(took)
                if importance is not None:
                    shares[how].append(importance.seconds / (took - importance.seconds))
    rows = []
    for how in shares:
        row = at_most(
            f"{name}, {tokens:,} tokens: measuring `{how}`", median(shares[how]), "of the prompt", BAR_COST,
            **{"prompt ms": median(times[""]) * 1e3, "with / without": min(times[how]) / min(times[""])},
        )  # fmt: skip
        row.low, row.high = interval(shares[how])
        rows.append(row)
    return rows


# --- value -------------------------------------------------------------------------------------------


@dataclass
class Ask:
    """A request: its blocks, and what the last queries pay to each; hints by the way they were made."""

    names: list[int]
    value: np.ndarray
    hints: dict[str, list[float]] = field(default_factory=dict)


def prompts(tokens: list[int], seed: int) -> list[list[int]]:
    """Sessions about documents: each turn has all of the turns before it."""
    chance, at = random.Random(seed), 0

    def text(length: int) -> list[int]:
        nonlocal at
        at += length
        assert at <= len(tokens), "the text is too short"
        return tokens[at - length : at]

    systems = [text(96) for _ in range(SYSTEMS)]
    documents = [text(chance.randint(160, 560)) for _ in range(DOCUMENTS)]
    weights = [1 / (rank + 1) for rank in range(DOCUMENTS)]
    found: list[tuple[float, list[int]]] = []
    seconds = 0.0
    while len(found) < REQUESTS:
        seconds += chance.expovariate(1 / 20)
        document = chance.choices(documents, weights)[0]
        if chance.random() < ONCE:
            document = text(chance.randint(160, 560))
        prompt, when = systems[chance.randrange(SYSTEMS)] + document, seconds
        while True:
            prompt = prompt + text(chance.randint(24, 64))
            if len(prompt) > MOST_TOKENS:
                break
            found.append((when, prompt))
            if chance.random() > GOES_ON:
                break
            prompt, when = prompt + text(chance.randint(24, 64)), when + chance.uniform(10, 240)
    return [prompt for _, prompt in sorted(found)[:REQUESTS]]


def measured(model: Any, every: list[list[int]]) -> list[Ask]:
    """The requests with the real attention of this model."""
    known: dict[tuple[int, ...], int] = {}
    asks = []
    for prompt in every:
        ways = [Importance("last", [0]), Importance("accumulated", [0])]
        for way in ways:
            prefill(model, torch.tensor([prompt]), way)
        blocks = len(prompt) // BLOCK
        names = [
            known.setdefault(tuple(prompt[: (at + 1) * BLOCK]), len(known)) for at in range(blocks)
        ]
        ask = Ask(names, ways[0].shares(0, 0, BLOCK)[0].numpy())
        ask.hints = {
            "last queries": ways[0].blocks(0, 0, BLOCK),
            "accumulated": ways[1].blocks(0, 0, BLOCK),
        }
        asks.append(ask)
    return asks


def add_other_hints(asks: list[Ask], seed: int) -> None:
    """Controls and other hints: the same values at random blocks; for each block the most important one of
    those that need it; whether each block is used again; whether the end of the request is, and this with
    errors."""
    chance = random.Random(seed)
    later: set[int] = set()
    for ask in reversed(asks):
        # The last block of a published trace may be an incomplete one, which no other request has.
        goes_on = not later.isdisjoint(ask.names[-2:])
        wrong = chance.random() < WRONG
        ask.hints["reuse of blocks"] = [0.9 if name in later else 0.1 for name in ask.names]
        later.update(ask.names)
        ask.hints["reuse"] = [0.9 if goes_on else 0.1] * len(ask.names)
        ask.hints["reuse, 20% wrong"] = [0.9 if goes_on != wrong else 0.1] * len(ask.names)
        if "last queries" in ask.hints:
            last = ask.hints["last queries"]
            ask.hints["shuffled"] = chance.sample(last, len(last))
            ask.hints["needed by"] = [max(last[at:]) for at in range(len(last))]


def replayed(asks: list[Ask], policy: str, blocks: int, how: str) -> tuple[float, float, list[int]]:
    """The share of blocks that hit, the mean share of the attention that they get, and all hits."""
    names, lengths = array("Q"), array("I")
    seconds, hints = array("d"), array("d")

    def add(some: Sequence[int], at: float, importance: float) -> None:
        names.extend(some)
        lengths.append(len(some))
        seconds.append(at)
        hints.append(importance)

    for at, ask in enumerate(asks):
        add(ask.names, at * 10.0, -1)
        for low, high in ((0, 1 / 3), (1 / 3, 2 / 3), (2 / 3, 2)) if how else ():
            told = zip(ask.names, ask.hints[how], strict=True)
            if found := [(name, one) for name, one in told if low <= one < high]:
                add([name for name, _ in found], at * 10.0, mean(one for _, one in found))
    trace = Trace(names.tobytes(), lengths.tobytes(), seconds.tobytes(), hints.tobytes())
    run = Optimum(trace, blocks) if policy == "optimum" else Replay(trace, make(policy), blocks)  # type: ignore[arg-type]
    every = array("I", run.run(1 << 30))
    hits = [hit for hit, hint in zip(every, hints, strict=True) if hint < 0]
    share = sum(hits) / sum(len(ask.names) for ask in asks)
    paid = [float(ask.value[:hit].sum()) for hit, ask in zip(hits, asks, strict=True)]
    return share, mean(paid), hits


def single_blocks(asks: list[Ask], room: int, how: str) -> tuple[float, float]:
    """A cache that evicts single blocks, the oldest relative to their importance first: the share of blocks
    that are there, and of those that hit."""
    used: dict[int, float] = {}
    weight: dict[int, float] = {}
    there = hits = 0
    for at, ask in enumerate(asks):
        present = [name in used for name in ask.names]
        there += sum(present)
        hits += next((n for n, one in enumerate(present) if not one), len(present))
        for name, importance in zip(ask.names, ask.hints[how], strict=True):
            used[name] = at
            weight[name] = 1 / 8 if importance < 1 / 3 else 1 if importance < 2 / 3 else 8
        if len(used) > room:
            order = sorted(used, key=lambda name: -(at + 1 - used[name]) / weight[name])
            for name in order[: len(used) - room]:
                del used[name]
    blocks = sum(len(ask.names) for ask in asks)
    return there / blocks, hits / blocks


def ranks(values: Sequence[float]) -> np.ndarray:
    return np.argsort(np.argsort(values)).astype(float)


def tells_reuse(asks: list[Ask], how: str) -> float:
    """The probability that a block that is used again is more important than one that is not, among the new
    blocks of requests. 0.5: importance says nothing."""
    later: set[int] = set()
    values: dict[bool, list[float]] = {False: [], True: []}
    first: dict[int, int] = {}
    for at, ask in enumerate(asks):
        for name in ask.names:
            first.setdefault(name, at)
    for at, ask in reversed(list(enumerate(asks))):
        for name, one in zip(ask.names, ask.hints[how], strict=True):
            if first[name] == at:
                values[name in later].append(one)
        later.update(ask.names)
    yes, no = values[True], values[False]
    both = ranks([*yes, *no])
    return float((both[: len(yes)].sum() - len(yes) * (len(yes) - 1) / 2) / (len(yes) * len(no)))


def sampled_well(model: Any, every: list[list[int]]) -> dict[str, float]:
    """The rank correlation of what some layers say with what all layers and, accumulated, all queries say."""
    found: dict[str, list[float]] = {"last": [], "accumulated": []}
    for prompt in random.Random(3).sample(every, CHECKED):
        for how, values in found.items():
            some = Importance(how, [0])
            most = Importance(how, [0], 0 if how == "last" else 1 << 20)
            most.layers = len(library_cache(model).layers)
            for one in (some, most):
                prefill(model, torch.tensor([prompt]), one)
            both = [ranks(one.blocks(0, 0, BLOCK)) for one in (some, most)]
            values.append(float(np.corrcoef(*both)[0, 1]))
    return {how: median(values) for how, values in found.items()}


def study(model: Any, tokens: list[int], seed: int, picture: Path | None) -> list[Row]:
    every = prompts(tokens, seed)
    asks = measured(model, every)
    add_other_hints(asks, seed)
    unique = len({name for ask in asks for name in ask.names})
    rows = []
    for how, value in sampled_well(model, every).items():
        rows.append(Row(f"`{how}`: rank correlation with all layers, and all queries", value, ""))
    for how in asks[0].hints:
        spread = [one for ask in asks for one in ask.hints[how]]
        more = {
            "little": mean(one < 1 / 3 for one in spread),
            "much": mean(one >= 2 / 3 for one in spread),
        }
        rows.append(
            Row(f"{how}: used again if more important", tells_reuse(asks, how), "", more=more)
        )
    lines: dict[str, list[tuple[float, float]]] = {}
    for part in SIZES:
        blocks = max(1, int(unique * part))
        for policy in ("lru", "optimum", *POLICIES):
            for how in ("", *asks[0].hints) if policy in POLICIES else ("",):
                share, paid, _ = replayed(asks, policy, blocks, how)
                name = f"{policy}, {how or 'no hints'}" if policy in POLICIES else policy
                if how in ("", "last queries", "reuse") and policy != "lru":
                    lines.setdefault(name, []).append((blocks, paid))
                rows.append(
                    Row(f"{part:.0%} of blocks: {name}: hits", share, "", more={"attention": paid})
                )
        for how in ("last queries", "accumulated"):
            there, hit = single_blocks(asks, blocks, how)
            name = f"{part:.0%} of blocks: single blocks by {how}: hits"
            rows.append(Row(name, hit, "", more={"in the cache": there}))
    if picture is not None:
        labels = {
            float(max(1, int(unique * part))): f"{int(unique * part):,} ({part:.0%})"
            for part in SIZES
        }
        title = "Attention to what hits, of the last 16 queries"
        picture.write_text(draw(title, "blocks of the cache", lines, labels))
    return rows


def averaged(sets: Sequence[list[Row]]) -> list[Row]:
    """The mean of each row, and its range."""
    rows = []
    for some in zip(*sets, strict=True):
        values = [row.value for row in some]
        more = {name: mean(row.more[name] for row in some) for name in some[0].more}
        rows.append(
            Row(some[0].name, mean(values), "", low=min(values), high=max(values), more=more)
        )
    return rows


def reuse(path: Path) -> list[Row]:
    """Hints about reuse on a trace of a service."""
    asks = [Ask(names, np.zeros(1)) for _, names in read_timed(path) if names]
    add_other_hints(asks, seed=2)
    unique = len({name for ask in asks for name in ask.names})
    rows = []
    for part in SIZES:
        for policy in POLICIES:
            for how in ("", *asks[0].hints):
                share, _, _ = replayed(asks, policy, max(1, int(unique * part)), how)
                rows.append(
                    Row(f"trace, {part:.0%}: {policy}, {how or 'no hints'}: hits", share, "")
                )
        share, _, _ = replayed(asks, "optimum", max(1, int(unique * part)), "")
        rows.append(Row(f"trace, {part:.0%}: optimum: hits", share, ""))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--only", choices=["cost", "value"])
    parser.add_argument(
        "--tokens", type=int, default=1024, help="of the prompts of the random Llama"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    load: Callable[..., Any] = transformers.AutoModelForCausalLM.from_pretrained
    model = load(options.model, dtype=torch.float32).eval()
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(options.model)
    probes = [harness.noise()]
    rows = []
    if options.only != "value":
        config = transformers.LlamaConfig(**LLAMA)
        random_llama = transformers.AutoModelForCausalLM.from_config(config).eval()
        rows += cost(options.model.name, model, 1024, 5 * options.rounds)
        rows += cost("Llama of 135M parameters", random_llama, options.tokens, options.rounds)
    if options.only != "cost":
        text = (options.model / "valid.txt").read_text()
        tokens = tokenizer(text)["input_ids"]
        rows += averaged(
            [study(model, tokens, seed, options.picture if seed == 1 else None) for seed in SEEDS]
        )
        rows += reuse(options.trace) if options.trace else []
    probes.append(harness.noise())
    return harness.report(
        "attention-value" if options.only == "value" else "attention", rows, probes, options.out,
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
