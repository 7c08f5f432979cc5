"""What every benchmark here shares: arms interleaved in pairs, a noise probe in the same run, honest output.

A row compares kvtier with a physical limit (memcpy, a streaming loop, an echo): both run in every round, in
alternating order, and the result is the median of the rounds' ratios. Times of separate runs are never
compared, because these machines are shared.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))  # `models`

ROUNDS = 9
BOOTSTRAPS = 1000
# Beyond these the machine is too disturbed for a verdict, good or bad.
LIMIT_LATENESS_P99_MS = 3.0
LIMIT_MEMCPY_SPREAD = 0.30


@dataclass
class Row:
    """One line of the result: a measured value, its bar, and whether it holds."""

    name: str
    value: float
    unit: str
    bar: str = ""
    ok: bool | None = None
    low: float | None = None
    high: float | None = None
    more: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        verdict = {True: "ok", False: "MISSED", None: ""}[self.ok]
        interval = f" [{self.low:.3g}, {self.high:.3g}]" if self.low is not None else ""
        more = "  ".join(f"{key} {_short(value)}" for key, value in self.more.items())
        return (
            f"{verdict:7}{self.name:58}{self.value:9.4g} {self.unit}{interval}  {self.bar}  {more}"
        )


@dataclass
class Arm:
    """One timed thing. `run` does it once; seconds are measured around it, CPU seconds of the process too."""

    run: Callable[[], None]
    before: Callable[[], None] = lambda: None
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    def once(self) -> float:
        self.before()
        cpu, started = time.process_time(), time.perf_counter()
        self.run()
        took = time.perf_counter() - started
        self.seconds.append(took)
        self.cpu_seconds.append(time.process_time() - cpu)
        return took


def pairs(one: Arm, other: Arm, rounds: int = ROUNDS, warmups: int = 1) -> list[float]:
    """Speed of `one` relative to `other` (other's time / one's time), a ratio a round."""
    for _ in range(warmups):
        one.once()
        other.once()
    del one.seconds[:], other.seconds[:], one.cpu_seconds[:], other.cpu_seconds[:]
    ratios = []
    for number in range(rounds):
        first, second = (one, other) if number % 2 == 0 else (other, one)
        first.once()
        second.once()
        ratios.append(other.seconds[-1] / one.seconds[-1])
    return ratios


def ratio_row(
    name: str, ratios: Sequence[float], bar: float | None, nbytes: int, one: Arm, other: Arm
) -> Row:
    """The median ratio with its interval, and the throughput and CPU time of both arms."""
    low, high = interval(ratios)
    value = median(ratios)
    gigabytes = nbytes / 1e9
    return Row(
        name, value, "x", f">= {bar}" if bar else "", value >= bar if bar else None, low, high,
        {
            "GB/s": gigabytes / median(one.seconds),
            "limit GB/s": gigabytes / median(other.seconds),
            "cpu s/GB": median(one.cpu_seconds) / gigabytes,
        },
    )  # fmt: skip


def at_most(name: str, value: float, unit: str, bar: float, **more: Any) -> Row:
    return Row(name, value, unit, f"<= {bar:g}", value <= bar, more=more)


def at_least(name: str, value: float, unit: str, bar: float, **more: Any) -> Row:
    return Row(name, value, unit, f">= {bar:g}", value >= bar, more=more)


def interval(values: Sequence[float], share: float = 0.95) -> tuple[float, float]:
    """A bootstrap interval of the median."""
    chance = random.Random(0)
    medians = sorted(median(chance.choices(values, k=len(values))) for _ in range(BOOTSTRAPS))
    edge = (1 - share) / 2
    return medians[int(edge * BOOTSTRAPS)], medians[int((1 - edge) * BOOTSTRAPS) - 1]


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


# --- the machine --------------------------------------------------------------------------------


def noise() -> dict[str, Any]:
    """How disturbed the machine is now: lateness of an empty event loop, spread of one memcpy."""
    from kvtier_kernels import memcpy

    async def tick() -> list[float]:
        late = []
        for _ in range(400):
            due = time.perf_counter() + 0.001
            await asyncio.sleep(0.001)
            late.append(time.perf_counter() - due)
        return late

    late = asyncio.run(tick())
    source, target = bytearray(32 << 20), bytearray(32 << 20)
    source[::4096] = target[::4096] = b"x" * (len(source) // 4096)
    copies = []
    for _ in range(25):
        started = time.perf_counter()
        memcpy(target, source)
        copies.append(time.perf_counter() - started)
    spread = (percentile(copies, 0.75) - percentile(copies, 0.25)) / median(copies)
    found = {
        "loop_lateness_p99_ms": percentile(late, 0.99) * 1e3,
        "memcpy_spread": spread,
        "memcpy_gb_s": len(source) / median(copies) / 1e9,
    }
    found["disturbed"] = (
        found["loop_lateness_p99_ms"] > LIMIT_LATENESS_P99_MS or spread > LIMIT_MEMCPY_SPREAD
    )
    return found


def environment() -> dict[str, Any]:
    cpu = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    # In a copy of this tree without Git, as tools/gpu_run.sh knows them.
    commit, changed, _ = os.environ.get("GPU_COMMIT", "").partition("-dirty")
    if not commit:
        commit = git("rev-parse", "--short", "HEAD")
        changed = git("status", "--porcelain", "--", "kvtier", "daemon", "kernels", "plugins")
    from kvtier_kernels import cpu_features

    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "libc": " ".join(platform.libc_ver()),
        "features": cpu_features(),
        "commit": commit,
        "uncommitted": bool(changed),
    }


def git(*arguments: str) -> str:
    """The output of a command of Git; empty if it fails, or if Git is not installed."""
    try:
        done = subprocess.run(
            ["git", *arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parent.parent,
        )
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


# --- the daemon ---------------------------------------------------------------------------------


class Daemon:
    """A `kvtier serve` of its own for a benchmark."""

    def __init__(self, folder: Path, warm: str, more: str = "", policy: str = "") -> None:
        # Without a policy the line is left out: a tree's own default, in trees that know fewer policies too.
        chosen = f'policy = "{policy}"\n' if policy else ""
        self.socket = str(folder / "kvtier.sock")
        config = folder / "kvtier.toml"
        config.write_text(
            f'socket = "{self.socket}"\nstate = "{folder / "state"}"\nlog_level = "warning"\n'
            f'{more}\n[warm]\nsize = "{warm}"\n{chosen}'
        )
        self.started = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvtier_daemon.cli", "serve", "--config", str(config)]
        )
        self.ready_s = self._wait_until_it_serves()

    def _wait_until_it_serves(self) -> float:
        from kvtier import Client, Unavailable

        while True:
            try:
                Client.connect(self.socket, populate=False).close()
                return time.perf_counter() - self.started
            except Unavailable:
                if self.process.poll() is not None or time.perf_counter() - self.started > 60:
                    raise
                time.sleep(0.005)

    def wait_for_arena(self) -> None:
        from kvtier import Client

        with Client.connect(self.socket, populate=False) as client:
            while True:
                warm = client.stats()["tiers"]["warm"]
                if warm["allocated_bytes"] == warm["capacity_bytes"]:
                    break
                time.sleep(0.05)
        time.sleep(0.05)

    def anonymous_bytes(self) -> int:
        """Memory of the daemon that is its own, the arena aside."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024
        raise RuntimeError("no RssAnon")

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGINT)  # which frees its memory at once
        self.process.wait(20)


# --- output -------------------------------------------------------------------------------------


def report(
    name: str, rows: list[Row], probes: list[dict[str, Any]], out: str | None, **more: Any
) -> int:
    """Print the rows, write the JSON with `more` in its environment; 1 if a bar was missed on a quiet
    machine, 0 otherwise."""
    disturbed = any(probe["disturbed"] for probe in probes)
    for row in rows:
        print(row.line())
    print(f"noise: {[{k: _short(v) for k, v in probe.items()} for probe in probes]}")
    if disturbed:
        print("INVALID: the machine was disturbed during this run; run it again")
    path = Path(out) if out else Path(__file__).parent / "results" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    body = {
        "benchmark": name,
        "valid": not disturbed,
        "environment": environment() | more,
        "noise": probes,
        "rows": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(body, indent=1) + "\n")
    print(f"written to {path}")
    return int(not disturbed and any(row.ok is False for row in rows))


def _short(value: Any) -> Any:
    return f"{value:.3g}" if isinstance(value, float) else value
