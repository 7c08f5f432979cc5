"""Time per generated token of a cache that is 4 times as large as the memory given to it, relative to the
copy limit.

A random Llama of 135M parameters (30 layers, 3 KV heads), on the CPU, after 4,096 tokens with random K and V.
In each round, in changing order:

- *in memory*: one token with the whole cache in the process;
- *offloaded*: the same token with a quarter of that memory;
- *copy*: the bytes of all blocks, layer after layer, from a buffer of their size into two buffers of one
  layer. It is measured with three copies (memcpy, and streaming stores with one and two threads), and the
  fastest counts.

The copy limit is the time of *in memory* plus that of *copy*: each layer computes, and its bytes are copied
once. A machine on which computing and copying do not share processors and memory could reach the larger of
the two. The same is given for the CPU time of the process, which other work on the machine changes less.
Every token's logits are compared with those of *in memory*.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

import harness
from bench_transformers import BLOCK, ERROR, PREFIX, made
from harness import Row, at_least, at_most, interval
from kvtier import Client
from kvtier_kernels import copy, memcpy
from kvtier_transformers import KvtierCache
from support.tensors import tensor_bytes

LARGER = 4  # than its memory is the context
ROUNDS = 40  # more than the tokens of a block: one of them saves it
BAR = 0.8
COPIES: dict[str, Any] = {
    "memcpy": memcpy,
    "streaming, 1 thread": lambda to, of: copy(to, of, False, 1),
    "streaming, 2 threads": lambda to, of: copy(to, of, False, 2),
}


def timed(run: Any) -> tuple[float, float]:
    """The seconds that this takes, and those of the processors."""
    began, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - began, time.process_time() - cpu


class Copies:
    """Copies of all layers from a buffer of their size into two buffers of one layer."""

    def __init__(self, nbytes: int, layers: int) -> None:
        self.layer = nbytes // layers
        self.source = torch.zeros(nbytes, dtype=torch.uint8).numpy()
        self.targets = [torch.zeros(self.layer, dtype=torch.uint8).numpy() for _ in range(2)]
        self.source[:], self.targets[0][:], self.targets[1][:] = 1, 1, 1
        self.layers = layers

    def run(self, kind: str) -> None:
        for at in range(self.layers):
            COPIES[kind](self.targets[at % 2], self.source[at * self.layer : (at + 1) * self.layer])


def measure(folder: Path, dtype: str, rounds: int, with_prompt: bool) -> list[Row]:
    model = made(dtype)
    ids = torch.randint(3, 49152, (1, PREFIX + 1))
    with harness.Daemon(folder, "1GiB") as daemon, Client.connect(daemon.socket) as client:
        daemon.wait_for_arena()
        with torch.no_grad():
            own = filled(model, ids, client)
            nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in own.layers)
            memory = nbytes // LARGER
            cache = KvtierCache.from_prompt(model, ids, client, block_tokens=BLOCK, memory=memory)
            assert cache.loaded_tokens == PREFIX
            times, most = step(model, own, cache, ids[:, -1:], nbytes, rounds)
            cache.close()
            prefill = prompts(model, memory, client) if with_prompt else []
    assert most <= memory, f"{most} bytes of tensors, {memory} given"
    kind = min(COPIES, key=lambda one: median(wall for wall, _ in times[one]))
    limits = [
        [(own[at] + copied[at]) / took[at] for own, copied, took in
         zip(times["own"], times[kind], times["offloaded"], strict=True)]
        for at in (0, 1)
    ]  # fmt: skip
    bar = at_least("the copy limit, relative to offloaded", median(limits[0]), "x", BAR)
    cpu = Row("the same for CPU time", median(limits[1]), "x")
    for row, ratios in zip((bar, cpu), limits, strict=True):
        row.low, row.high = interval(ratios)
    own_s, copy_s, took_s = (
        median(wall for wall, _ in times[name]) for name in ("own", kind, "offloaded")
    )
    return [
        Row("a token with its cache in memory", own_s * 1e3, "ms", more={"KV MB": nbytes / 1e6}),
        Row(f"copy: {kind}", copy_s * 1e3, "ms", more={"GB/s": nbytes / 1e9 / copy_s}),
        Row("a token offloaded", took_s * 1e3, "ms"),
        bar,
        cpu,
        Row("the larger of computing and copying, relative to offloaded", max(own_s, copy_s) / took_s, "x"),
        at_most("tensors of the cache, relative to the memory given", most / memory, "x", 1.0,
                MiB=most / 2**20),
        *prefill,
    ]  # fmt: skip


def filled(model: Any, ids: Any, client: Client) -> Any:
    """Return a cache with random K and V of these tokens, except the last one, and save it: the time of a
    token does not depend on their values."""
    cache = KvtierCache.from_prompt(model, ids, client, block_tokens=BLOCK)
    config = model.config
    shape = 1, config.num_key_value_heads, PREFIX, config.hidden_size // config.num_attention_heads
    for layer in cache.layers:
        layer.update(torch.randn(shape, dtype=model.dtype), torch.randn(shape, dtype=model.dtype))
    assert cache.save() == PREFIX
    return cache


def prompts(model: Any, memory: int, client: Client) -> list[Row]:
    """Compute a prompt in one pass, and another one offloaded."""
    ids = torch.randint(3, 49152, (1, PREFIX + 1))
    whole, _ = timed(lambda: model(ids[:, :-1], use_cache=True, logits_to_keep=1))
    took, _ = timed(
        lambda: KvtierCache.from_prompt(
            model, ids, client, block_tokens=BLOCK, memory=memory
        ).close()
    )
    name = "the prompt offloaded, relative to one pass in memory"
    return [Row(name, took / whole, "x", more={"s": took})]


def step(
    model: Any, own: Any, cache: Any, token: Any, nbytes: int, rounds: int
) -> tuple[dict[str, list[tuple[float, float]]], int]:
    """Generate tokens with both caches; return the times, and the largest size of the offloaded one."""
    copies = Copies(nbytes, len(own.layers))
    logits: dict[str, Any] = {}
    most = 0

    def forward(name: str, past: Any) -> None:
        logits[name] = model(token, past_key_values=past, use_cache=True).logits[0, -1].float()

    arms: list[tuple[str, Any]] = [
        ("own", lambda: forward("own", own)),
        ("offloaded", lambda: forward("offloaded", cache)),
        *((kind, lambda kind=kind: copies.run(kind)) for kind in COPIES),
    ]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name, _ in arms}
    for number in range(-2, rounds):
        turn = number % len(arms)
        for name, run in arms[turn:] + arms[:turn]:
            took = timed(run)
            if number >= 0:
                times[name].append(took)
        error = (logits["own"] - logits["offloaded"]).abs().max() / logits["own"].abs().max()
        limit = 1e-4 if model.dtype == torch.float32 else ERROR
        assert error <= limit, f"the logits differ by {float(error):.2g}"
        token = logits["own"].argmax()[None, None]
        most = max(most, tensor_bytes(cache))
    return times, most


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--prompt", action="store_true", help="also measure a prompt: minutes")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    probes = [harness.noise()]
    with tempfile.TemporaryDirectory() as name:
        rows = measure(Path(name), options.dtype, options.rounds, options.prompt)
    probes.append(harness.noise())
    return harness.report(
        "offload", rows, probes, options.out, dtype=options.dtype,
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
