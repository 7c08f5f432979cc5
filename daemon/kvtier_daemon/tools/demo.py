"""The demo: a small daemon, two engines, and a table that shows the gain."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any

from kvtier import Client, ConfigError
from kvtier.units import MIB, format_bytes, parse_bytes
from kvtier_daemon.tools.temporary_daemon import temporary_daemon, temporary_folder
from kvtier_daemon.tools.workload import SPEC, ChatStep

ENGINES = 2
REDRAW_S = 0.25
BAR = 28
SECONDS_MIN, SECONDS_MAX = 1, 24 * 3600
WARM_MIN_BYTES = 256 * MIB  # the longest prompt has 112 blocks of 2 MiB


@dataclass(slots=True)
class DemoTotals:
    """The sum of the engines' reports. Written by the threads that read their pipes."""

    turns: int = 0
    sums: ChatStep = field(default_factory=ChatStep)
    load_ms: deque[float] = field(default_factory=lambda: deque(maxlen=4096))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, step: dict[str, Any]) -> None:
        with self.lock:
            self.turns += 1
            for name, value in step.items():
                setattr(self.sums, name, getattr(self.sums, name) + value)
            if step["loaded_bytes"]:
                self.load_ms.append(step["load_s"] * 1e3)


def run(seconds: float, warm: str, as_json: bool) -> bool:
    """Run a daemon and engines, and print the results. Returns False if anything was wrong."""
    if not SECONDS_MIN <= seconds <= SECONDS_MAX:  # false for nan
        raise ConfigError(f"--seconds: expected {SECONDS_MIN} to {SECONDS_MAX}, got {seconds:g}")
    try:
        warm_bytes = parse_bytes(warm)
    except ValueError as error:
        raise ConfigError(f"--warm: {error}") from error
    if warm_bytes < WARM_MIN_BYTES:
        raise ConfigError(
            f"--warm: {format_bytes(warm_bytes)} is less than {format_bytes(WARM_MIN_BYTES)}, "
            "so one conversation would not fit"
        )
    with (
        temporary_folder("kvtier-demo-") as folder,
        temporary_daemon(folder, warm_bytes, "demo") as (client, _),
    ):
        summary = _watch(client, seconds, quiet=as_json)
    if as_json:
        print(json.dumps(summary, indent=2))
    else:
        _print_summary(summary)
    return not summary["wrong_blocks"] and not summary["engines_failed"]


def _watch(client: Client, seconds: float, quiet: bool) -> dict[str, Any]:
    """Run the engines and redraw the table until they end. Returns the summary."""
    from rich.console import Console
    from rich.live import Live

    totals = DemoTotals()
    command = [sys.executable, "-P", "-m", "kvtier_daemon.tools.workload", client.socket]
    engines = [
        subprocess.Popen([*command, str(number), str(seconds)], stdout=subprocess.PIPE)
        for number in range(ENGINES)
    ]
    readers = [threading.Thread(target=_read, args=(process, totals)) for process in engines]
    for reader in readers:
        reader.start()
    started = time.monotonic()
    try:
        with Live(console=Console(stderr=quiet, quiet=quiet), refresh_per_second=8) as live:
            while any(reader.is_alive() for reader in readers):
                time.sleep(REDRAW_S)
                live.update(_table(client.stats(), totals, time.monotonic() - started, seconds))
    except BaseException:  # the engines end before their daemon, of which each would complain
        for process in engines:
            process.kill()
        raise
    failed = sum(process.wait(10) != 0 for process in engines)
    return _summary(client.stats(), totals, time.monotonic() - started, failed)


def _read(process: subprocess.Popen[bytes], totals: DemoTotals) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        totals.add(json.loads(line))


def _summary(
    stats: dict[str, Any], totals: DemoTotals, elapsed_s: float, failed: int
) -> dict[str, Any]:
    sums = totals.sums
    latency = sorted(totals.load_ms)
    cuts = quantiles(latency, n=100) if len(latency) > 1 else [0.0] * 99
    return {
        "engines": ENGINES,
        "engines_failed": failed,
        "seconds": round(elapsed_s, 2),
        "turns": totals.turns,
        "prompt_tokens": sums.prompt_tokens,
        "hit_tokens": sums.hit_tokens,
        "hit_rate": round(sums.hit_tokens / max(1, sums.prompt_tokens), 4),
        "saved_blocks": sums.saved_blocks,
        "evicted_blocks": stats["evicted_blocks"]["capacity"],
        "wrong_blocks": sums.wrong_blocks,
        "loaded_bytes": sums.loaded_bytes,
        "saved_bytes": sums.saved_bytes,
        "load_gb_s": round(sums.loaded_bytes / max(sums.load_s, 1e-9) / 1e9, 2),
        "save_gb_s": round(sums.saved_bytes / max(sums.save_s, 1e-9) / 1e9, 2),
        "load_ms_p50": round(cuts[49], 3),
        "load_ms_p99": round(cuts[98], 3),
        "warm_used_bytes": stats["tiers"]["warm"]["used_bytes"],
        "warm_capacity_bytes": stats["tiers"]["warm"]["capacity_bytes"],
    }


def _table(stats: dict[str, Any], totals: DemoTotals, elapsed_s: float, seconds: float) -> Any:
    from rich import box
    from rich.table import Table

    with totals.lock:
        now = _summary(stats, totals, elapsed_s, 0)
    used, capacity = now["warm_used_bytes"], now["warm_capacity_bytes"]
    table = Table(
        title=f"kvtier demo: {ENGINES} engines, {min(elapsed_s, seconds):.0f} of {seconds:.0f} s",
        box=box.ROUNDED, show_header=False, min_width=64,
    )  # fmt: skip
    table.add_column(style="bold")
    table.add_column()
    table.add_row(
        "warm tier", f"{_bar(used / capacity)} {format_bytes(used)} of {format_bytes(capacity)}"
    )
    table.add_row("hit rate", f"{_bar(now['hit_rate'])} {now['hit_rate']:.1%} of prompt tokens")
    table.add_row("turns served", f"{now['turns']:,}")
    table.add_row(
        "load",
        f"{now['load_gb_s']:.1f} GB/s   p50 {now['load_ms_p50']:.2f} ms   p99 {now['load_ms_p99']:.2f} ms",
    )
    table.add_row(
        "save",
        f"{now['save_gb_s']:.1f} GB/s   {now['saved_blocks']:,} blocks, {now['evicted_blocks']:,} evicted",
    )
    table.add_row(
        "wrong bytes", "none" if not now["wrong_blocks"] else f"[red]{now['wrong_blocks']} blocks"
    )
    return table


def _bar(share: float) -> str:
    filled = round(BAR * min(share, 1.0))
    return f"[green]{'━' * filled}[/][dim]{'┄' * (BAR - filled)}[/]"


def _print_summary(summary: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    checked = summary["hit_tokens"] // SPEC.block_tokens
    verdict = "all right" if not summary["wrong_blocks"] else f"{summary['wrong_blocks']} WRONG"
    loaded = format_bytes(summary["loaded_bytes"])
    compared = f"Every byte of {checked:,} loaded blocks was compared: {verdict}."
    if not checked:
        compared = "No prompt came a second time: the machine is busy. Use --seconds 40."
    lines = (
        "",
        f"[bold]{summary['hit_rate']:.0%}[/] of {summary['prompt_tokens']:,} prompt tokens were loaded "
        "instead of computed again:",
        f"{loaded} of KV cache at {summary['load_gb_s']} GB/s, "
        f"{summary['load_ms_p50']} ms per prompt (median).",
        compared,
        "",
    )
    for line in lines:
        console.print(line, soft_wrap=True)
    console.print("Next (in this folder: . .venv/bin/activate):")
    console.print("  kvtier serve --warm-size 8GiB         a daemon of your own, on this machine")
    console.print(
        "  kvtier status                         what it holds, hits and misses by reason"
    )
    console.print("  kvtier demo --warm 2GiB --seconds 40  the same service with more room")
