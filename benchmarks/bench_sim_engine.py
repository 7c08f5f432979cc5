"""What `kvtier sim` predicts, relative to a real vLLM engine that runs the same trace.

Chats with a common system prompt, one request at a time, on a daemon whose memory has room for some of them
and whose disk has room for all. The engine's own cache is emptied before each request. The inputs of the
simulation are measured first and again afterwards, with other prompts: the time to compute a prompt, and the
rates of memory and disk. The trace that is simulated has the times at which the requests really began.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import harness
from bench_ttft import BLOCK, KV_BYTES, Engine, fresh, progress
from disks import disk_bytes
from harness import Daemon, Row, percentile
from kvtier import Client
from kvtier_daemon.sim.prices import cost_of, read_prices

HERE = Path(__file__).parent
MODEL = "189M"
CHATS, SYSTEM_BLOCKS, TURN_BLOCKS, MOST_BLOCKS = 10, 4, (2, 6), 32
TAIL = 64  # tokens after the last whole block: they are never stored
THINK_S = (0.05, 0.4)
MEMORY_BLOCKS = 120
NVME_BYTES = 4 << 30
CALIBRATED = (512, 1536, 2560, 4096)  # tokens
CALIBRATIONS = 3
PRICES = "gpu-hour=2.5,memory-gib=4,nvme-gib=0.1"
BAR = 0.10


@dataclass(frozen=True)
class Asked:
    """A request: its blocks by number, which are also the seeds of their tokens."""

    blocks: tuple[int, ...]
    tail: int  # its seed

    @property
    def parts(self) -> list[tuple[int, int]]:
        return [*((one, BLOCK) for one in self.blocks), (self.tail, TAIL)]

    @property
    def tokens(self) -> int:
        return len(self.blocks) * BLOCK + TAIL


def chats(requests: int, seed: int) -> list[Asked]:
    """Requests of chats that grow. A recent chat is more likely to go on; a full one is replaced."""
    chance = random.Random(seed)
    system = tuple(next(fresh) for _ in range(SYSTEM_BLOCKS))
    open_chats: list[tuple[int, ...]] = [system for _ in range(CHATS)]
    asked = []
    for _ in range(requests):
        at = min(int(chance.expovariate(3 / CHATS)), CHATS - 1)
        chat = open_chats.pop(at)
        chat += tuple(next(fresh) for _ in range(chance.randint(*TURN_BLOCKS)))
        if len(chat) > MOST_BLOCKS:
            chat = system + chat[-chance.randint(*TURN_BLOCKS) :]
        open_chats.insert(0, chat)
        asked.append(Asked(chat, next(fresh)))
    return asked


@dataclass
class Inputs:
    """What a user measures before a simulation."""

    computed: list[tuple[int, float]] = field(default_factory=list)  # tokens, seconds
    memory: list[tuple[int, float]] = field(default_factory=list)
    disk: list[tuple[int, float]] = field(default_factory=list)

    def prefill(self) -> tuple[float, float]:
        """The seconds per token, and per token and token before it, with the least relative squares."""
        rows = np.array([(n, n * n / 2) for n, _ in self.computed], float)
        seconds = np.array([s for _, s in self.computed])
        (token_s, context_s), *_ = np.linalg.lstsq(
            rows / seconds[:, None], np.ones(len(rows)), rcond=None
        )
        return (
            (token_s, context_s) if context_s > 0 else (float(np.median(seconds / rows[:, 0])), 0.0)
        )

    def flags(self) -> list[str]:
        token_s, context_s = self.prefill()
        tail_s = TAIL * token_s

        def rate(found: list[tuple[int, float]]) -> float:
            """Bytes per second of the time that is not the tail's."""
            return median(
                n * KV_BYTES[MODEL] / max(s - tail_s - context_s * TAIL * n, 1e-4) for n, s in found
            )

        growth = ["--prefill-growth", f"{token_s / context_s:.0f}"] if context_s else []
        return [
            "--prefill-rate", f"{1 / token_s:.1f}", *growth, "--memory-rate", f"{rate(self.memory):.0f}",
            "--nvme-read", f"{rate(self.disk):.0f}",
        ]  # fmt: skip


@dataclass
class Host:
    """An engine, and its daemon, which writes all blocks to disk when memory needs their room."""

    engine: Engine
    daemon: Daemon
    client: Client

    def first_token(self, parts: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """Let the engine run this request with an empty cache of its own; how long its token took, and how
        many bytes came from the disk."""
        self.engine.reset()
        before = disk_bytes(self.daemon.process.pid)[0]
        [found] = self.engine.run([{"parts": parts, "tokens": 1}])
        found["seconds"] = found["times"][0] - found["began"]
        found["disk_bytes"] = disk_bytes(self.daemon.process.pid)[0] - before
        return found

    def settle(self) -> None:
        """Wait until the disk is idle."""
        until = time.monotonic() + 60
        while self.client.stats()["tiers"]["cold"]["writing"]:
            assert time.monotonic() < until, "the disk still writes after 60 s"
            time.sleep(0.02)


def calibrate(host: Host, inputs: Inputs) -> None:
    """Compute prompts, request each again at once, and the long ones later, when only the disk has them."""
    long = []
    for _ in range(CALIBRATIONS):
        for tokens in CALIBRATED:
            parts = [(next(fresh), tokens), (next(fresh), TAIL)]
            inputs.computed.append((tokens + TAIL, host.first_token(parts)["seconds"]))
            host.settle()
            again = host.first_token([parts[0], (next(fresh), TAIL)])
            if again["cached"] == tokens and not again["disk_bytes"]:
                inputs.memory.append((tokens, again["seconds"]))
            if tokens == CALIBRATED[-1]:
                long.append(parts[0])
    for part in long:
        found = host.first_token([part, (next(fresh), TAIL)])
        if found["cached"] == part[1] and found["disk_bytes"] >= part[1] * KV_BYTES[MODEL]:
            inputs.disk.append((part[1], found["seconds"]))
        host.settle()


@dataclass
class Measured:
    """What the engine did."""

    seconds: list[float] = field(default_factory=list)
    found_blocks: int = 0
    disk_blocks: float = 0.0
    lines: list[dict[str, Any]] = field(default_factory=list)


def measured(host: Host, asked: Sequence[Asked], seed: int) -> Measured:
    chance, result, began = random.Random(seed), Measured(), 0.0
    for number, one in enumerate(asked):
        found = host.first_token(one.parts)
        began = began or found["began"]
        result.seconds.append(found["seconds"])
        result.found_blocks += found["cached"] // BLOCK
        result.disk_blocks += found["disk_bytes"] / (BLOCK * KV_BYTES[MODEL])
        result.lines.append({
            "timestamp": (found["began"] - began) * 1e3, "input_length": one.tokens, "output_length": 1,
            "hash_ids": one.blocks,
        })  # fmt: skip
        if number % 10 == 9:
            progress(f"{number + 1} of {len(asked)} requests")
        time.sleep(chance.uniform(*THINK_S))
    return result


def predicted(trace: Path, inputs: Inputs, memory_blocks: int) -> dict[str, Any]:
    """What the command prints for this trace."""
    block_bytes = BLOCK * KV_BYTES[MODEL]
    command = [
        str(Path(sys.executable).parent / "kvtier"), "sim", str(trace), "--policy", "lru", "--block-tokens",
        str(BLOCK), "--token-bytes", str(KV_BYTES[MODEL]), "--memory", f"{memory_blocks * block_bytes}B",
        "--nvme", f"{NVME_BYTES}B", "--admission", "all", "--engines", "1", "--prices", PRICES, "--json",
        *inputs.flags(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found.get("runs", [found])[0] | {
        "command": " ".join(command[1:]).replace(str(trace), trace.name)
    }


def compared(
    name: str, predicted: float, measured: float, bar: float | None = BAR, **more: Any
) -> Row:
    value = predicted / measured
    return Row(
        name, value, "x", f"{1 - bar:g} to {1 + bar:g}" if bar else "",
        abs(value - 1) <= bar if bar else None, more={"predicted": predicted, "measured": measured} | more,
    )  # fmt: skip


def rows_of(
    asked: Sequence[Asked], real: Measured, run: dict[str, Any], memory_blocks: int
) -> list[Row]:
    span_s = real.lines[-1]["timestamp"] / 1e3
    tokens = sum(one.tokens for one in asked)
    looked_up = sum(len(one.blocks) for one in asked)
    cost = cost_of(
        read_prices(PRICES), tokens, span_s, sum(real.seconds), memory_blocks * BLOCK * KV_BYTES[MODEL],
        NVME_BYTES, 0,
    )  # fmt: skip
    ranked, said = sorted(real.seconds), run["cost"]
    return [
        compared("blocks found", run["hit_rate"], real.found_blocks / looked_up, command=run["command"]),
        compared("of them on disk", run["hit_rate_by_tier"]["nvme"], real.disk_blocks / looked_up, None),
        *(
            compared(f"first token, p{share}, ms", run["ttft_ms"][f"p{share}"],
                     percentile(ranked, share / 100) * 1e3)
            for share in (50, 90)
        ),
        compared("a million prompt tokens, cost of GPUs", said["gpu_per_million"], cost.gpu_per_million),
        compared("a million prompt tokens, cost", said["per_million"], cost.per_million),
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    parser.add_argument("--folder", help="on the disk to use")
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--memory-blocks", type=int, default=MEMORY_BLOCKS)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    probes = [harness.noise()]
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        subprocess.run(
            [sys.executable, str(HERE / "ttft_engine.py"), "make", MODEL, str(folder / MODEL)],
            check=True,
        )
        (folder / "cold").mkdir()
        cold = (
            f'[cold]\ndirectories = ["{folder / "cold"}"]\nsize = "{NVME_BYTES >> 20}MiB"\nscrub = 0\n'
            'codec = "raw"\nadmission = "all"\n'
        )
        warm = f"{options.memory_blocks * BLOCK * KV_BYTES[MODEL] >> 20}MiB"
        inputs = Inputs()
        with Daemon(folder, warm, cold, policy="lru") as daemon:
            daemon.wait_for_arena()
            transfer = {
                "kv_connector": "KvtierConnector", "kv_connector_module_path": "kvtier_vllm.connector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"socket": daemon.socket, "patience_ms": 5000},
            }  # fmt: skip
            with (
                Engine(folder, MODEL, daemon.socket, kv_transfer_config=transfer) as engine,
                Client.connect(daemon.socket) as client,
            ):
                host = Host(engine, daemon, client)
                host.first_token([(next(fresh), 512)])
                calibrate(host, inputs)
                asked = chats(options.requests, options.seed)
                real = measured(host, asked, options.seed)
                calibrate(host, inputs)
        trace = folder / "trace.jsonl"
        trace.write_text("".join(json.dumps(line) + "\n" for line in real.lines))
        run = predicted(trace, inputs, options.memory_blocks)
    probes.append(harness.noise())
    rows = rows_of(asked, real, run, options.memory_blocks)
    return harness.report(
        "sim-engine", rows, probes, options.out, model=MODEL, requests=options.requests
    )


if __name__ == "__main__":
    sys.exit(main())
