"""Multi-turn chats over HTTP on one vLLM engine with a tiny cache, with and without kvtier alternately: on
the unchanged disk, on one of 200 MB/s, and on one of 20 MB/s that stops for a second from time to time.

A round is all chats from their first turn to their last; each chat asks its next turn when it has the answer
to the last one. The rounds of a pair have the same prompts; one of them says `"load": false, "save": false`
with every request. The engine's own prefix cache is emptied before each round.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import harness
from slow_disk import SlowDisk, Speed

VOCABULARY, FIRST = 2048, 3
BLOCK = 32
ENGINE_BLOCKS = 256  # of its own cache: six chats or so
SEATS, STEP_TOKENS = 8, 512
PATIENCE_MS = 1000
START_S, ANSWER_S = 600.0, 120.0
SPEEDS = (
    Speed("disk as is"),
    Speed("200 MB/s", 200_000_000),
    Speed("20 MB/s, stalls of 1 s", 20_000_000, stall_every_s=4.0, stall_s=1.0),
)
LEAST_RATIO = {SPEEDS[0].name: 1.5, SPEEDS[1].name: 0.98, SPEEDS[2].name: 0.98}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "auto", "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_SERVER_DEV_MODE": "1",
}  # fmt: skip
MODEL = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Size:
    chats: int
    turns: int
    prompt_tokens: int
    answer_tokens: int
    pairs: int
    warm: str


FULL = Size(28, 4, 256, 16, 2, "96MiB")
QUICK = Size(28, 3, 192, 8, 1, "48MiB")


def make_model(folder: Path) -> None:
    """Write a random Llama and a tokenizer of one token a word there."""
    import tokenizers
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, head_dim=64, max_position_embeddings=4096, initializer_range=0.05,
        torch_dtype="float32", **MODEL,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = {f"w{number}": number for number in range(VOCABULARY)}
    model = tokenizers.models.WordLevel(words, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", bos_token="w1", eos_token="w2"
    )
    fast.save_pretrained(folder)


@dataclass
class Told:
    """One answer."""

    first_s: float
    tokens: list[int]
    cached: int


class Engine:
    """`vllm.entrypoints.openai.api_server`, in a process of its own."""

    def __init__(self, model: Path, daemon: str, folder: Path) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        transfer = {
            "kv_connector": "KvtierConnector", "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"socket": daemon, "patience_ms": PATIENCE_MS},
        }  # fmt: skip
        options = {
            "model": model, "host": "127.0.0.1", "port": self.port, "dtype": "float32",
            "max-model-len": 4096, "block-size": BLOCK, "num-gpu-blocks-override": ENGINE_BLOCKS,
            "max-num-seqs": SEATS, "max-num-batched-tokens": STEP_TOKENS, "served-model-name": "m",
            "prefix-caching-hash-algo": "sha256_cbor", "kv-transfer-config": json.dumps(transfer),
        }  # fmt: skip
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        self.log = folder / "engine.log"
        with self.log.open("w") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words,
                 "--enforce-eager", "--enable-prompt-tokens-details"],
                stdout=sink, stderr=sink, env=os.environ | ENVIRONMENT,
            )  # fmt: skip
        deadline = time.monotonic() + START_S
        while not self._is_up():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"no engine: {self.log.read_text()[-3000:]}")
            time.sleep(0.5)

    def _is_up(self) -> bool:
        try:
            self._open("/health")
        except (urllib.error.URLError, OSError):
            return False
        return True

    def _open(self, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=ANSWER_S)

    def reset(self) -> None:
        """Nothing is in its own prefix cache."""
        self._open("/reset_prefix_cache", {}).read()

    def ask(self, prompt: list[int], tokens: int, kvtier: bool) -> Told:
        body = {
            "model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True,
        }  # fmt: skip
        if not kvtier:
            body["kv_transfer_params"] = {"kvtier": {"load": False, "save": False}}
        began, first_s, found, cached = time.monotonic(), 0.0, [], 0
        with self._open("/v1/completions", body) as lines:
            for line in lines:
                if not line.startswith(b"data: {"):
                    continue
                told = json.loads(line[6:])
                for choice in told["choices"]:
                    ids = choice.get("token_ids") or []
                    if ids and not found:
                        first_s = time.monotonic() - began
                    found += ids
                if told.get("usage"):
                    details = told["usage"].get("prompt_tokens_details") or {}
                    cached = details.get("cached_tokens") or 0
        assert len(found) == tokens, f"{len(found)} tokens came, {tokens} were asked for"
        return Told(first_s, found, cached)

    def metrics(self) -> dict[str, float]:
        """Those of kvtier, by name and labels but the engine's."""
        found = {}
        for line in self._open("/metrics").read().decode().splitlines():
            if line.startswith("vllm:kvtier_"):
                name, value = line.rsplit(" ", 1)
                plain = re.sub(r'(engine|model_name)="[^"]*",?', "", name).replace(",}", "}")
                found[plain] = float(value)
        return found

    def cpu_s(self) -> float:
        """Return the CPU seconds of it and its processes."""
        parents, seconds = {}, {}
        for entry in Path("/proc").glob("[0-9]*/stat"):
            try:
                words = entry.read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended since
            number = int(entry.parent.name)
            parents[number] = int(words[1])
            seconds[number] = (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
        mine = {self.process.pid}
        while more := {one for one, parent in parents.items() if parent in mine} - mine:
            mine |= more
        return sum(seconds.get(one, 0.0) for one in mine)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass
class Round:
    seconds: float
    first_s: list[float]
    cpu_s: float


@dataclass
class Arm:
    """The results of one speed of the disk."""

    ratios: list[float] = field(default_factory=list)  # seconds without kvtier, over those with it
    cpu: list[float] = field(default_factory=list)  # the same of the engine's CPU seconds
    first_with: list[float] = field(default_factory=list)
    first_without: list[float] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)


def drawn(seed: str, count: int) -> list[int]:
    return random.Random(seed).choices(range(FIRST, VOCABULARY), k=count)


def chat(engine: Engine, size: Size, name: str, kvtier: bool) -> list[float]:
    """All turns of one chat; how long each first token took."""
    said: list[int] = []
    first_s = []
    for turn in range(size.turns):
        said += drawn(f"{name} {turn}", size.prompt_tokens)
        told = engine.ask(said, size.answer_tokens, kvtier)
        said += told.tokens
        first_s.append(told.first_s)
    return first_s


def serve(engine: Engine, size: Size, name: str, kvtier: bool) -> Round:
    engine.reset()
    began, cpu_s = time.monotonic(), engine.cpu_s()
    with ThreadPoolExecutor(size.chats) as pool:
        chats = [
            pool.submit(chat, engine, size, f"{name} {at}", kvtier) for at in range(size.chats)
        ]
        first_s = [one for done in chats for one in done.result()]
    return Round(time.monotonic() - began, first_s, engine.cpu_s() - cpu_s)


def counted(engine: Engine, daemon: harness.Daemon) -> dict[str, float]:
    """Return all counters."""
    from kvtier import Client

    told = engine.metrics()
    with Client.connect(daemon.socket, populate=False) as client:
        stats = client.stats()
    cold = stats["tiers"]["cold"]
    waited = "vllm:kvtier_wait_seconds"
    found = {
        "read": cold["states"]["read"],
        "loaded": cold["states"]["loaded"],
        "loaded when read": told['vllm:kvtier_hit_tokens_total{tier="cold"}'] / BLOCK,
        "warm": told['vllm:kvtier_hit_tokens_total{tier="warm"}'] / BLOCK,
        "held": told[f"{waited}_count{{}}"] - told[f'{waited}_bucket{{le="1.0"}}'],
        "asked": told[f"{waited}_count{{}}"],
    }
    for part in ("answer", "disk", "scheduler"):
        found[f"wait {part} s"] = told[f"vllm:kvtier_wait_{part}_seconds_sum{{}}"]
    return found | {f"verdict {why}": count for why, count in cold["loads"].items()}


def check(engine: Engine, size: Size, daemon: harness.Daemon) -> None:
    """Check that the results are the same with and without kvtier, and that something is loaded."""
    prompt = drawn("check", 4 * size.prompt_tokens)
    answers = []
    for kvtier in (False, True, True):
        engine.reset()
        answers.append(engine.ask(prompt, size.answer_tokens, kvtier))
        time.sleep(0.5)  # what is saved is saved between steps
    plain, saved, loaded = answers
    assert plain.tokens == saved.tokens == loaded.tokens, "kvtier changes what comes out"
    assert plain.cached == 0 and loaded.cached > 3 * size.prompt_tokens, loaded.cached


def run(engine: Engine, size: Size, daemon: harness.Daemon, disk: SlowDisk, speed: Speed) -> Arm:
    disk.set(speed)
    arm = Arm()
    for pair in range(size.pairs):
        rounds: dict[bool, Round] = {}
        for kvtier in (True, False) if pair % 2 else (False, True):
            before = counted(engine, daemon)
            rounds[kvtier] = serve(engine, size, f"{speed.name} {pair}", kvtier)
            after = counted(engine, daemon)
            for name in after if kvtier else ():
                grown = after[name] - before.get(name, 0)
                arm.counts[name] = arm.counts.get(name, 0) + grown
        arm.ratios.append(rounds[False].seconds / rounds[True].seconds)
        arm.cpu.append(rounds[False].cpu_s / rounds[True].cpu_s)
        arm.first_with += rounds[True].first_s
        arm.first_without += rounds[False].first_s
        times = f"{rounds[False].seconds:.1f} s without, {rounds[True].seconds:.1f} s with"
        print(f"{speed.name}: pair {pair}: {times}", flush=True)
    disk.set(SPEEDS[0])
    return arm


def rows_of(speed: Speed, arm: Arm) -> list[harness.Row]:
    name, counts = speed.name, arm.counts
    low, high = harness.interval(arm.ratios)
    least, value = LEAST_RATIO[name], median(arm.ratios)
    p99 = [harness.percentile(times, 0.99) for times in (arm.first_with, arm.first_without)]
    p50 = [harness.percentile(times, 0.5) for times in (arm.first_with, arm.first_without)]
    read = counts["read"] / max(1.0, counts["loaded"])
    some = {one: count for one, count in counts.items() if count}
    return [
        harness.Row(f"{name}: throughput, with kvtier / without", value, "x", f">= {least}",
                    value >= least, low, high, {"CPU seconds without / with": median(arm.cpu)}),
        harness.at_most(f"{name}: p99 of first tokens, with / without", p99[0] / p99[1], "x", 1.05,
                        with_s=p99[0], without_s=p99[1], p50=p50[0] / p50[1]),
        harness.at_most(f"{name}: blocks read from disk for each of them loaded", read, "", 1.1, **some),
        harness.at_most(f"{name}: requests held beyond patience", counts["held"], "", 0),
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that it runs")
    parser.add_argument("--folder", help="where the model and segments lie; else a temporary one")
    parser.add_argument("--only", default="", help="speeds whose name has this in it")
    parser.add_argument("--make", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        make_model(Path(options.make))
        return 0
    size = QUICK if options.quick else FULL
    probes = [harness.noise()]
    rows: list[harness.Row] = []
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="chats-") as text:
        folder = Path(text).resolve()
        model, cold = folder / "model", folder / "cold"
        cold.mkdir()
        making = [sys.executable, __file__, "--make", str(model)]
        subprocess.run(making, check=True, capture_output=True, env=os.environ | ENVIRONMENT)
        disk = SlowDisk(folder, cold)
        disk.set(SPEEDS[1])
        throttled = disk.measure(cold)
        assert throttled < 1.1 * SPEEDS[1].bytes_s, f"the disk is not slowed down: {throttled:.3g}"
        disk.set(SPEEDS[0])
        more = f'[cold]\ndirectories = ["{cold}"]\nsize = "8GiB"\nengine = "threads"\n'
        os.environ |= disk.env
        try:
            daemon = harness.Daemon(folder, size.warm, more)
        finally:
            for name in disk.env:
                del os.environ[name]
        with daemon:
            daemon.wait_for_arena()
            engine = Engine(model, daemon.socket, folder)
            try:
                check(engine, size, daemon)
                for speed in (one for one in SPEEDS if options.only in one.name):
                    rows += rows_of(speed, run(engine, size, daemon, disk, speed))
            finally:
                engine.stop()
    probes.append(harness.noise())
    return harness.report("chats", rows, probes, options.out, chats=size.chats, turns=size.turns)


if __name__ == "__main__":
    sys.exit(main())
