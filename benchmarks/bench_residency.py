"""What it is worth that the daemon knows the engine's own cache, and what it costs a step.

    python benchmarks/bench_residency.py [--trace FILE] [--out FILE]

Simulates memory of 1, 2 and 4 times the engine's cache, which has 5% of a trace's blocks, on chats, turns
and, if given, a trace. The disk has room for every block. Then it measures a step of the plugin's scheduler
side without changes, and with 32 new blocks. `tests/engines/test_vllm_residency.py` makes the same comparison
with a real engine; `--engine` adds its result.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import traces
from harness import environment
from kvtier_daemon.sim.tiers import RESIDENCY, Machine, Simulation
from kvtier_daemon.sim.trace import TraceRequests, read
from kvtier_daemon.tools.sizing import PrefillCost
from kvtier_plugins.residency import EngineBlocks
from kvtier_vllm.layout import Cached, Layout, Shards
from kvtier_vllm.scheduler import EngineResidency

SHARE = 0.05
TIMES = (1, 2, 4)
TOKEN_BYTES = 1000
RUNNING = 8
STEPS = 2000


def written(name: str, timed: list[traces.Timed]) -> TraceRequests:
    lines = [
        {
            "timestamp": when * 1000,
            "input_length": 512 * len(ids),
            "output_length": 1,
            "hash_ids": ids,
        }
        for when, ids in timed
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_text("\n".join(map(json.dumps, lines)))
        return read(path)


def compared(requests: TraceRequests, policy: str, times: int) -> dict[str, Any]:
    block = TOKEN_BYTES * requests.block_tokens
    hbm = int(SHARE * requests.native.unique)
    fast, stored = {}, {}
    for known in RESIDENCY:
        machine = Machine(
            memory_bytes=times * hbm * block, nvme_bytes=2 * requests.native.unique * block,
            token_bytes=TOKEN_BYTES, policy=policy, prefill=PrefillCost(1e-4, 0.0),
            hbm_bytes=hbm * block, residency=known,
        )  # fmt: skip
        hits = Simulation(requests, machine).run().hit_blocks
        fast[known], stored[known] = hits["hbm"] + hits["memory"], hits.total()
    total = requests.looked_up_blocks
    return {
        "policy": policy, "memory_of_hbm": times,
        "hit_rate_in_memory": {known: fast[known] / total for known in RESIDENCY},
        "hit_rate": {known: stored[known] / total for known in RESIDENCY},
        "fewer_misses": {
            known: (fast[known] - fast["off"]) / (total - fast["off"]) for known in ("on", "lazy")
        },
        "fewer_misses_of_blocks_seen_before": {
            known: (fast[known] - fast["off"]) / (stored["off"] - fast["off"])
            for known in ("on", "lazy")
        },
    }  # fmt: skip


class Told:
    """Takes the place of the thread that sends, which is not part of a step."""

    def __init__(self) -> None:
        self.blocks = 0

    def add(self, blocks: EngineBlocks) -> None:
        self.blocks += len(blocks.take_changes())


def steps() -> dict[str, float]:
    """Microseconds of the engine's thread for a step of RUNNING requests: median of STEPS."""
    layout = Layout(16, 16, (Cached(0, "full", 0, (("0", 4096),)),), Shards(1, 1))
    session = object()
    keys = [number.to_bytes(32, "big") for number in range(100_000)]
    side = EngineResidency(
        layout, SimpleNamespace(session=session),  # type: ignore[arg-type]
        SimpleNamespace(of=lambda prompt, session: keys[50_000:]), lambda page: True,  # type: ignore[arg-type]
    )  # fmt: skip
    side.reports.close()
    told = Told()
    side.reports = told  # type: ignore[assignment]
    for page in range(1, 20_000):
        side.blocks.filled(0, keys[page], (page,))
    side.blocks.take_changes()
    names = [str(number) for number in range(RUNNING)]
    prompts: dict[str, Any] = {
        name: SimpleNamespace(
            request=SimpleNamespace(request_id=name, num_computed_tokens=1600), resident=100
        )
        for name in names
    }
    pages = [list(range(30_000, 30_400))]
    scheduled = SimpleNamespace(
        num_scheduled_tokens=dict.fromkeys(names, 1),
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: pages),
    )
    empty, full = [], []
    for _ in range(STEPS):
        began = time.perf_counter()
        side.step(set(), scheduled, prompts)
        empty.append(time.perf_counter() - began)
    assert told.blocks == 0
    scheduled.num_scheduled_tokens = {"0": 512}
    for turn in range(STEPS):
        prompts["0"].resident = 100
        pages[0] = list(range(30_000 + 400 * (turn % 40), 30_400 + 400 * (turn % 40)))
        began = time.perf_counter()
        side.step(set(pages[0][100:132]), scheduled, prompts)
        full.append(time.perf_counter() - began)
    assert told.blocks > 0
    return {
        "empty_us": statistics.median(empty) * 1e6,
        "blocks_32_us": statistics.median(full) * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, help="a trace in Mooncake's format")
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument(
        "--engine", help="tokens of the engine's test: total, and blind and known of each place"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    every = {
        "chat": written("chat", traces.chat(arguments.requests)),
        "turns": written("turns", traces.turns(arguments.requests)),
    }
    if arguments.trace:
        every[arguments.trace.stem] = read(arguments.trace)
    runs = []
    for name, requests in every.items():
        for policy in ("lru", "auto"):
            for times in TIMES:
                run = {"trace": name, **compared(requests, policy, times)}
                assert run["hit_rate_in_memory"]["on"] > run["hit_rate_in_memory"]["off"], run
                runs.append(run)
                print(
                    f"{name:<20}{policy:<6}{times} x  in memory {run['hit_rate_in_memory']['off']:.1%} ->"
                    f" {run['hit_rate_in_memory']['on']:.1%} (lazy {run['hit_rate_in_memory']['lazy']:.1%}),"
                    f" fewer misses {run['fewer_misses']['on']:.1%}, of blocks seen before"
                    f" {run['fewer_misses_of_blocks_seen_before']['on']:.1%}"
                )
    medians = {
        policy: {
            what: statistics.median(run[what]["on"] for run in runs if run["policy"] == policy)
            for what in ("fewer_misses", "fewer_misses_of_blocks_seen_before")
        }
        for policy in ("lru", "auto")
    }
    cost = steps()
    print(f"medians {medians}\na step {cost}")
    if arguments.out:
        found = {"environment": environment(), "runs": runs, "medians": medians, "step": cost}
        if arguments.engine:
            found["engine"] = json.loads(arguments.engine)
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
