"""What the commands cost: their own time, and the daemon's loop while somebody looks, with many blocks in it.

    python benchmarks/bench_operator_cli.py [--blocks N]

The daemon's loop is probed by pings of another client, once quiet and once beside each command; its
processor time is read from /proc. Blocks are of 4 KiB, so that a million take 4 GiB.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from harness import Row, at_most, noise, percentile, report
from kvtier import Client, KvSpec, wire
from kvtier_daemon.cli import asking

COMMAND = [sys.executable, "-m", "kvtier_daemon.cli"]
SPEC = KvSpec.dense(
    model="bench",
    layers=1,
    kv_heads=1,
    head_dim=1024,
    dtype="bfloat16",
    block_tokens=1,
    weights="a",
)
CHAIN = 8192


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=1_000_000)
    blocks = parser.parse_args().blocks
    before = noise()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/kvtier.sock"
        arena = blocks * SPEC.block_bytes * 5 // 4
        daemon = subprocess.Popen(
            [
                *COMMAND,
                "serve",
                "--socket",
                path,
                "--warm-size",
                str(arena),
                "--log-level",
                "warning",
            ],
            env=dict(os.environ, KVTIER_STATE=folder),
        )
        try:
            rows = measured(path, daemon.pid, blocks)
        finally:
            daemon.terminate()
            daemon.wait(30)
    return report("operator_cli", rows, [before, noise()], None)


def connected(path: str) -> Client:
    for _ in range(500):
        try:
            return Client.connect(path, populate=False)
        except Exception:  # noqa: BLE001 - it is starting
            time.sleep(0.02)
    return Client.connect(path, populate=False)


def measured(path: str, pid: int, blocks: int) -> list[Row]:
    rows: list[Row] = []
    with connected(path) as client:
        space = client.open(SPEC)
        data = [bytes(SPEC.block_bytes)] * CHAIN
        for first in range(0, blocks, CHAIN):
            while (
                client.stats()["tiers"]["warm"]["allocated_bytes"]
                < (first + CHAIN) * SPEC.block_bytes
            ):
                time.sleep(0.05)
            space.save(space.keys([first] * CHAIN), data)
        held = client.stats()["tiers"]["warm"]["blocks"]
        rows.append(Row("blocks", held, ""))

        start = min(
            timed(lambda: subprocess.run([sys.executable, "-c", ""], check=True)) for _ in range(9)
        )
        for name in (["--help"], ["status"], ["status", "--json"], ["keys"]):
            place = [] if name == ["--help"] else ["--socket", path]
            took = min(timed(lambda w=[*name, *place]: run(w)) for _ in range(9))  # type: ignore[misc]
            bar = {"--help": 150.0, "status": 100.0}.get(" ".join(name))
            more = {"bare python ms": start * 1e3}
            label = f"kvtier {' '.join(name)}: whole process"
            if bar:
                rows.append(at_most(label, took * 1e3, "ms", bar, **more))
            else:
                rows.append(Row(label, took * 1e3, "ms", more=more))
        rows.append(
            Row(
                "status: answered by the daemon in",
                min(timed(client.stats) for _ in range(50)) * 1e3,
                "ms",
            )
        )

        quiet = lateness(path, lambda: time.sleep(3))
        rows.append(
            Row("ping, nobody looks: worst", max(quiet) * 1e3, "ms", more={"p99": p99(quiet)})
        )
        listed = lateness(path, lambda: deque(asking.blocks(client, "", space.index), maxlen=0))
        rows.append(
            at_most(
                "ping while every key is listed: p99",
                p99(listed),
                "ms",
                2.0,
                worst=max(listed) * 1e3,
            )
        )

        for name, step in (("monitor", monitored(path)), ("top", topped(path))):
            used = cpu(pid)
            began = time.perf_counter()
            step()
            share = (cpu(pid) - used) / (time.perf_counter() - began)
            rows.append(at_most(f"{name}: the daemon's processor time", share * 100, "%", 1.0))
        purged = lateness(path, lambda: run(["purge", "--all", "--yes", "--socket", path]))
        rows.append(
            at_most(
                "ping while all is purged: p99", p99(purged), "ms", 2.0, worst=max(purged) * 1e3
            )
        )
        pieces = client.stats()["tiers"]["warm"]["blocks"]
        assert pieces == 0
    return rows


def monitored(path: str) -> Callable[[], None]:
    def step() -> None:
        command = [*COMMAND, "monitor", "--socket", path]
        watching = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        time.sleep(10)
        watching.terminate()
        watching.wait()

    return step


def topped(path: str) -> Callable[[], None]:
    """What `top` asks for once a second, for ten seconds."""

    def step() -> None:
        for _ in range(10):
            with Client.connect(path, populate=False, name="top") as client:
                client.stats()
                client.link.ask(wire.Spaces(client.link.new_id(), "", -1), wire.Report)
            time.sleep(1)

    return step


def run(words: list[str]) -> None:
    subprocess.run([*COMMAND, *words], check=True, capture_output=True, stdin=subprocess.DEVNULL)


def timed(step: Callable[[], object]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def lateness(path: str, step: Callable[[], object]) -> list[float]:
    """How long pings of another client took while this ran."""
    over = threading.Event()
    took: list[float] = []

    def ping() -> None:
        with connected(path) as client:
            while not over.is_set():
                took.append(timed(client.ping))
                time.sleep(0.001)

    thread = threading.Thread(target=ping)
    thread.start()
    try:
        step()
    finally:
        over.set()
        thread.join()
    return took


def p99(took: list[float]) -> float:
    return percentile(took, 0.99) * 1e3


def cpu(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
