"""Time to the first token of a transformers model whose prompt is in memory or on disk, relative to having
its cache in the process, and to recomputing it.

A random Llama of 135M parameters (30 layers, 3 KV heads), on the CPU. Each prompt has 4,096 tokens that are
kept, and 16 new ones. In each round a prompt is loaded from disk, then from memory, and generated with a
cache that the process has; the order changes. Memory has room for 1.5 prompts, so the prompt of the next
round is on disk alone. A request counts if all its kept tokens were loaded from the expected tier, and if its
logits are those of the process's own cache.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

import harness
from harness import Row, at_most, interval
from kvtier import Client
from kvtier_transformers import KvtierCache, attach

PREFIX, TAIL, BLOCK = 4096, 16, 32
PROMPTS = 3
WARM_PROMPTS = 1.5
ROUNDS, RECOMPUTED = 9, 3
BAR_WARM, BAR_COLD = 1.05, 1.15
ERROR = 0.05  # of the logits in bfloat16, relative to the largest one; in float32 1e-4
SIZES: dict[str, Any] = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
    "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def made(dtype: str) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES)
    return transformers.AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype)).eval()


@dataclass
class Scene:
    """The model, its plain `generate`, and the prompts, which differ in their first token."""

    model: Any
    plain: Any
    ids: torch.Tensor
    computed: Any
    times: dict[str, list[float]] = field(default_factory=dict)
    wanted: torch.Tensor | None = None

    def prompt(self, number: int) -> torch.Tensor:
        ids = self.ids.clone()
        ids[0, 0] = number
        return ids

    def run(self, arm: str, number: int) -> None:
        """Generate the first token, and compare its logits."""
        more: dict[str, Any] = {}
        if arm == "own":
            # Refers to the tensors: nothing is copied before the first forward pass.
            cache = transformers.DynamicCache(config=self.model.config)
            for layer, (keys, values) in zip(cache.layers, self.computed, strict=True):
                layer.lazy_initialization(keys[:, :, :0], values[:, :, :0])
                layer.keys, layer.values = keys, values
            more["past_key_values"] = cache
        generate = self.plain if arm in ("own", "recomputed") else self.model.generate
        began = time.perf_counter()
        output = generate(
            self.prompt(number if arm != "recomputed" else 0), max_new_tokens=1, do_sample=False,
            return_dict_in_generate=True, output_logits=True, **more,
        )  # fmt: skip
        took = time.perf_counter() - began
        self.times.setdefault(arm, []).append(took)
        print(f"{arm}: {took * 1e3:.0f} ms", file=sys.stderr, flush=True)
        logits = output.logits[0]
        if self.wanted is None:
            self.wanted = logits
        error = (logits - self.wanted).abs().max() / self.wanted.abs().max()
        limit = 1e-4 if self.model.dtype == torch.float32 else ERROR
        assert error <= limit, f"{arm}: the logits differ by {float(error):.2g}"


def fill(scene: Scene, client: Client) -> None:
    """Save the same computed cache as that of every prompt: the time of a load does not depend on it."""
    for number in range(PROMPTS):
        ids = scene.prompt(number)[:, :PREFIX]
        cache = KvtierCache.from_prompt(scene.model, ids, client, block_tokens=BLOCK)
        assert not cache.loaded_tokens
        for layer, (keys, values) in zip(cache.layers, scene.computed, strict=True):
            layer.keys, layer.values, layer.is_initialized = keys, values, True
        assert cache.save() == PREFIX
        until = time.monotonic() + 60
        while (found := client.stats()["tiers"]["cold"]["blocks"]) < (number + 1) * PREFIX // BLOCK:
            assert time.monotonic() < until, f"only {found} blocks are on disk"
            time.sleep(0.02)


def measure(folder: Path, dtype: str, rounds: int) -> list[Row]:
    model = made(dtype)
    scene = Scene(model, model.generate, torch.randint(PROMPTS, 49152, (1, PREFIX + TAIL)), None)
    with torch.no_grad():
        cache = transformers.DynamicCache(config=model.config)
        model(scene.prompt(0)[:, :PREFIX], past_key_values=cache, logits_to_keep=1)
    scene.computed = [(layer.keys, layer.values) for layer in cache.layers]
    nbytes = sum(one.nbytes for pair in scene.computed for one in pair)
    (folder / "cold").mkdir()
    cold = f'[cold]\ndirectories = ["{folder / "cold"}"]\nsize = "8GiB"\nwrite = "through"\nscrub = 0\n'
    warm = f"{int(nbytes * WARM_PROMPTS) >> 20}MiB"
    with harness.Daemon(folder, warm, cold, policy="lru") as daemon:
        daemon.wait_for_arena()
        with Client.connect(daemon.socket) as client:
            fill(scene, client)
            with attach(model, client, block_tokens=BLOCK, patience_ms=10_000) as attached:
                scene.run("own", 0)
                for number in range(-1, rounds):  # the first round warms up
                    if number == 0:
                        scene.times.clear()
                    arms = [("disk", 1), ("memory", 0)]
                    arms.insert(number % 3, ("own", 0))
                    for arm, is_cold in arms:
                        before = attached.counts.copy()
                        scene.run(arm, (number + 1) % PROMPTS)
                        loaded = attached.counts - before
                        wanted = (0, 0) if arm == "own" else (PREFIX, PREFIX * is_cold)
                        found = loaded["loaded_tokens"], loaded["disk_tokens"]
                        assert found == wanted, f"{arm}: loaded {found}, not {wanted}: {loaded}"
                for _ in range(RECOMPUTED):
                    scene.run("recomputed", 0)
    own = scene.times["own"]

    def ratio(name: str, arm: str, bar: float) -> Row:
        ratios = [one / two for one, two in zip(scene.times[arm], own, strict=True)]
        low, high = interval(ratios)
        row = at_most(name, median(ratios), "x", bar, ms=median(scene.times[arm]) * 1e3)
        row.low, row.high = low, high
        return row

    recomputed = median(scene.times["recomputed"])
    return [
        Row("its cache in the process: first token", median(own) * 1e3, "ms", more={"KV MB": nbytes / 1e6}),
        ratio("in memory, relative to that", "memory", BAR_WARM),
        ratio("on disk, relative to that", "disk", BAR_COLD),
        Row("recomputed: first token", recomputed * 1e3, "ms",
            more={"relative to disk": recomputed / median(scene.times["disk"])}),
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    parser.add_argument("--folder", help="on the disk to measure")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    probes = [harness.noise()]
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        rows = measure(Path(name), options.dtype, options.rounds)
    probes.append(harness.noise())
    return harness.report(
        "transformers", rows, probes, options.out, dtype=options.dtype,
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
