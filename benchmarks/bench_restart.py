"""Time to first token of the first request after the daemon was restarted, on a vLLM engine that was idle for
5 s meanwhile.

Each round asks for a prompt that kvtier has in five situations: the daemon was restarted, or was not, with
the prompt on disk alone or in memory, after 5 s without a request or right after another one. What counts is
the median of the rounds' ratios of the first situation to another one. A request counts if the metrics
say that its whole prefix was loaded from the expected tier, and its tokens are those that the engine computes
without kvtier.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import bench_chats
import harness
from bench_chats import ENVIRONMENT, Engine, drawn

PREFIX, TAIL, TOKENS = 896, 16, 4
KV_BYTES = 16 << 10  # of a token, of the model of bench_chats
PROMPTS = 3
WARM_PROMPTS = 1.5  # have room in memory: of prompts in turn, the next one is on disk alone
IDLE_S = 5.0
TOLD_S = 10.0  # until the metrics have what a request has loaded
RESTARTED, IDLE_COLD, IDLE_WARM, BUSY_COLD, BUSY_WARM = ARMS = (
    "restarted", "idle, on disk", "idle, in memory", "busy, on disk", "busy, in memory"
)  # fmt: skip
RATIO = 1.10
PARTS = ("wait_answer", "wait_disk", "wait_scheduler", "load")


@dataclass
class One:
    """A request: its time, what was loaded for it, and the milliseconds that the plugin counted for it."""

    first_s: float
    warm: int
    cold: int
    parts_ms: dict[str, float]

    @property
    def loaded(self) -> int:
        return self.warm + self.cold


@dataclass
class Arm:
    ones: list[One] = field(default_factory=list)

    @property
    def ms(self) -> list[float]:
        return [one.first_s * 1e3 for one in self.ones]

    def parts(self) -> dict[str, float]:
        return {f"{part} ms": median(one.parts_ms[part] for one in self.ones) for part in PARTS}


class Scene:
    """One engine, and consecutive daemons on the same disk."""

    def __init__(self, folder: Path, warm: str, rounds: int) -> None:
        self.folder, self.warm, self.rounds = folder, warm, rounds
        self.arms = {name: Arm() for name in ARMS}
        self.daemon = self._daemon()
        self.at = 0
        try:
            self.engine = Engine(folder / "model", self.daemon.socket, folder)
        except BaseException:
            self._stop_daemon()
            raise

    def _daemon(self) -> harness.Daemon:
        cold = self.folder / "cold"
        more = f'[cold]\ndirectories = ["{cold}"]\nsize = "8GiB"\nwrite = "through"\nscrub = 0\n'
        return harness.Daemon(self.folder, self.warm, more, policy="lru")

    def _stop_daemon(self) -> None:
        self.daemon.__exit__()

    def close(self) -> None:
        self.engine.stop()
        self._stop_daemon()

    def prompt(self, number: int) -> list[int]:
        return drawn(f"restart {number % PROMPTS}", PREFIX + TAIL)

    def fill(self) -> None:
        """Compute each prompt without kvtier, save it, and have it on disk."""
        self.daemon.wait_for_arena()
        self.tokens = []
        for number in range(PROMPTS):
            prompt = self.prompt(number)
            self.engine.reset()
            self.tokens.append(self.engine.ask(prompt, TOKENS, kvtier=False).tokens)
            self.engine.reset()
            assert self.engine.ask(prompt, TOKENS, kvtier=True).tokens == self.tokens[-1]
            self._wait_for_written((number + 1) * PREFIX // bench_chats.BLOCK)

    def _wait_for_written(self, blocks: int) -> None:
        from kvtier import Client

        until = time.monotonic() + 60
        with Client.connect(self.daemon.socket, populate=False) as client:
            while (found := client.stats()["tiers"]["cold"]["blocks"]) < blocks:
                assert time.monotonic() < until, f"{found} of {blocks} blocks are on disk"
                time.sleep(0.02)

    def round(self, counts: bool) -> None:
        for name in ARMS:
            if not name.endswith("memory"):
                self.at += 1  # the next prompt: it is not in memory
            self._before(name)
            one = self._ask(self.at)
            print(f"{name}: {one}", file=sys.stderr, flush=True)
            if name != RESTARTED:
                expected = (PREFIX, 0) if name.endswith("memory") else (0, PREFIX)
                assert (one.warm, one.cold) == expected, (name, one)
            if counts:
                self.arms[name].ones.append(one)

    def _before(self, name: str) -> None:
        self.engine.reset()
        self.before = self._counted()
        if name == RESTARTED:
            self._stop_daemon()
            self.daemon = self._daemon()
        if name.startswith("busy"):
            self.engine.ask(drawn(f"other {time.monotonic()}", 64), TOKENS, kvtier=False)
        else:
            time.sleep(IDLE_S)

    def _ask(self, number: int) -> One:
        told = self.engine.ask(self.prompt(number), TOKENS, kvtier=True)
        assert told.tokens == self.tokens[number % PROMPTS], "kvtier changes what comes out"
        until = time.monotonic() + TOLD_S
        while True:
            now = self._counted()
            grown = {name: now[name] - self.before[name] for name in now}
            loaded = grown["warm"] + grown["cold"]
            # vLLM counts what is to be loaded when it begins, the plugin when all of it was loaded.
            if loaded >= told.cached or time.monotonic() > until:
                break
            time.sleep(0.05)
        assert loaded == told.cached, f"the engine says {told.cached} tokens, kvtier {loaded}"
        parts = {name: grown[name] * 1e3 for name in PARTS}
        return One(told.first_s, int(grown["warm"]), int(grown["cold"]), parts)

    def _counted(self) -> dict[str, float]:
        metrics = self.engine.metrics()
        found = {
            tier: metrics[f'vllm:kvtier_hit_tokens_total{{tier="{tier}"}}']
            for tier in ("warm", "cold")
        }
        return found | {part: metrics[f"vllm:kvtier_{part}_seconds_sum{{}}"] for part in PARTS}


def rows_of(arms: dict[str, Arm]) -> list[harness.Row]:
    first = arms[RESTARTED]
    hits = [one.loaded / PREFIX for one in first.ones]
    rows = [
        harness.at_least("restarted: share of the prefix that was loaded, least of all rounds",
                         min(hits), "", 1.0, rounds=len(hits), whole=hits.count(1.0)),
    ]  # fmt: skip
    for name in ARMS[1:]:
        ratios = [one / other for one, other in zip(first.ms, arms[name].ms, strict=True)]
        bar = RATIO if name == IDLE_COLD else None
        rows.append(_ratio(f"first token, restarted / {name}", ratios, bar))
    for name, arm in arms.items():
        low, high = harness.interval(arm.ms)
        more = arm.parts() | {"least": min(arm.ms), "most": max(arm.ms)}
        rows.append(
            harness.Row(f"first token, {name}", median(arm.ms), "ms", "", None, low, high, more)
        )
    return rows


def _ratio(name: str, ratios: Sequence[float], bar: float | None) -> harness.Row:
    low, high = harness.interval(ratios)
    value = median(ratios)
    verdict = None if bar is None else value <= bar
    return harness.Row(name, value, "x", f"<= {bar:g}" if bar else "", verdict, low, high)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that it runs")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--folder", help="where the model and segments lie; else a temporary one")
    options = parser.parse_args()
    rounds = 3 if options.quick else options.rounds
    probes = [harness.noise()]
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="restart-") as text:
        folder = Path(text).resolve()
        (folder / "cold").mkdir()
        making = [sys.executable, bench_chats.__file__, "--make", str(folder / "model")]
        subprocess.run(making, check=True, capture_output=True, env=os.environ | ENVIRONMENT)
        warm = str(int(WARM_PROMPTS * PREFIX * KV_BYTES))
        scene = Scene(folder, warm, rounds)
        try:
            scene.fill()
            for number in range(-1, rounds):
                scene.round(counts=number >= 0)
        finally:
            scene.close()
    probes.append(harness.noise())
    return harness.report("restart", rows_of(scene.arms), probes, options.out, rounds=rounds)


if __name__ == "__main__":
    sys.exit(main())
