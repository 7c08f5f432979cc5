"""A daemon with 4 GiB and 100,000 blocks in memory is killed, stopped or upgraded, and started again.

The time counts from the signal to the first warm hit of a whole prefix by a new connection, the start of the
process included. Then every block is loaded and compared with what was saved.

The same with three clients that save and load all the time and check every byte: how long their longest call
took, and how many failed.
"""

from __future__ import annotations

import argparse
import json
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import harness
from harness import Row, at_least, at_most
from kvtier import Client, KvSpec, Space, Unavailable
from kvtier.client import RECONNECT_S
from kvtier_daemon.tiers.fd_store import KeeperStore

CHAINS, CHAIN = 100, 1000
WARM = "4300MiB"
KEEP_S = 600
ROUNDS = 3
BAR_S = 1.0
CLIENTS, TURNS = 3, 50
LOADING = Path(__file__).parents[1] / "tests/support/loading_client.py"
SPEC = KvSpec.dense(
    model="takeover", layers=5, kv_heads=1, head_dim=128, dtype="bfloat16", block_tokens=16, weights="rev:1"
)  # fmt: skip
UPGRADED = "import kvtier; kvtier.__version__ = '99.0.0'; from kvtier_daemon.cli import app; app()"
WAYS = {
    "killed (SIGKILL)": (signal.SIGKILL, ["-m", "kvtier_daemon.cli"]),
    "stopped (SIGTERM)": (signal.SIGTERM, ["-m", "kvtier_daemon.cli"]),
    "upgraded": (signal.SIGTERM, ["-c", UPGRADED]),
}


def started(config: Path, program: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, *program, "serve", "--config", str(config)])


def connected(socket: str) -> Client:
    while True:
        try:
            return Client.connect(socket, populate=False)
        except Unavailable:
            time.sleep(0.002)


class Loading:
    """A process that saves and loads in a loop."""

    def __init__(self, socket: str, seed: int) -> None:
        command = [sys.executable, str(LOADING), socket, str(seed), str(RECONNECT_S)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def wait_for_turns(self, count: int) -> None:
        assert self._process.stdout is not None
        for _ in range(count):
            assert self._process.stdout.readline()

    def stop(self) -> dict[str, Any]:
        told, _ = self._process.communicate(timeout=60)
        return json.loads(told.splitlines()[-1])  # type: ignore[no-any-return]


def tokens(chain: int) -> list[int]:
    return [chain, *range(1, CHAIN * SPEC.block_tokens)]


def block(chain: int, at: int) -> bytes:
    return struct.pack("<II", chain, at) * (SPEC.block_bytes // 8)


def fill(space: Space) -> None:
    for chain in range(CHAINS):
        data = b"".join(block(chain, at) for at in range(CHAIN))
        stored = space.save(space.keys(tokens(chain)), data).stored
        assert stored == CHAIN, f"{stored} of {CHAIN} blocks stored"


def compare(space: Space) -> tuple[int, int]:
    """The number of blocks that are found, and of those that differ."""
    found = wrong = 0
    for chain in range(CHAINS):
        with space.load(space.keys(tokens(chain))) as views:
            found += len(views)
            wrong += sum(view != block(chain, at) for at, view in enumerate(views))
    return found, wrong


def measure(folder: Path) -> list[Row]:
    socket, config = str(folder / "s"), folder / "kvtier.toml"
    config.write_text(
        f'socket = "{socket}"\nstate = "{folder / "state"}"\nlog_level = "warning"\n'
        f'[warm]\nsize = "{WARM}"\nkeep_s = {KEEP_S}\n'
    )
    rows = []
    daemon = started(config, ["-m", "kvtier_daemon.cli"])
    with connected(socket) as client:
        client.wait_ready(120)
        fill(client.open(SPEC))
    for name, (how, program) in WAYS.items():
        times, least, wrong = [], CHAINS * CHAIN, 0
        for round_ in range(ROUNDS):
            began = time.perf_counter()
            daemon.send_signal(how)
            daemon.wait(60)
            daemon = started(config, program)
            with connected(socket) as client:
                space = client.open(SPEC)
                keys = space.keys(tokens(round_))
                while space.match(keys).ready < CHAIN:
                    assert time.perf_counter() - began < 60, "no warm hit after a minute"
                times.append(time.perf_counter() - began)
                found, differing = compare(space)
                least, wrong = min(least, found), wrong + differing
        rows += [
            at_most(f"{name}: until the first warm hit", median(times), "s", BAR_S, worst=max(times)),
            at_least(f"{name}: blocks found, least of {ROUNDS} rounds", least, "", CHAINS * CHAIN),
            at_most(f"{name}: wrong blocks", wrong, "", 0),
        ]  # fmt: skip
    for name, (how, program) in WAYS.items():
        connected(socket).close()
        clients = [Loading(socket, seed) for seed in range(1, CLIENTS + 1)]
        for _ in range(ROUNDS):
            for client in clients:
                client.wait_for_turns(TURNS)
            daemon.send_signal(how)
            daemon.wait(60)
            daemon = started(config, program)
        for client in clients:
            client.wait_for_turns(TURNS)
        ends = [client.stop() for client in clients]
        calls = sum(one["calls"] for one in ends)
        longest = [one["longest_s"] for one in ends]
        text = f"{name}, {CLIENTS} clients, {calls} calls"
        rows += [
            at_most(f"{text}: the longest call", max(longest), "s", BAR_S, least=min(longest)),
            at_most(f"{text}: failed calls", sum(one["failed"] for one in ends), "", 0),
            at_most(f"{text}: reads of evicted blocks", sum(one["stale"] for one in ends), "", 0),
            at_most(f"{text}: wrong blocks", sum(one["wrong"] for one in ends), "", 0),
            at_most(f"{text}: forgotten blocks found", sum(one["returned"] for one in ends), "", 0),
            at_least(f"{text}: blocks loaded", sum(one["loaded"] for one in ends), "", 1),
        ]  # fmt: skip
    daemon.send_signal(signal.SIGINT)
    daemon.wait(60)
    KeeperStore(Path(f"{socket}.keeper"), 0).close()  # holds nothing: ends at once
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    options = parser.parse_args()
    probes = [harness.noise()]
    with tempfile.TemporaryDirectory() as name:
        rows = measure(Path(name))
    probes.append(harness.noise())
    return harness.report("takeover", rows, probes, options.out)


if __name__ == "__main__":
    sys.exit(main())
