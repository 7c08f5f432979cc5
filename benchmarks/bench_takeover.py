"""A daemon with 4 GiB and 100,000 blocks in memory is killed, stopped or upgraded, and started again.

The time counts from the signal to the first warm hit of a whole prefix by a new connection, the start of the
process included. Then every block is loaded and compared with what was saved.
"""

from __future__ import annotations

import argparse
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import harness
from harness import Row, at_least, at_most
from kvtier import Client, KvSpec, Space, Unavailable
from kvtier_daemon.tiers.fd_store import KeeperStore

CHAINS, CHAIN = 100, 1000
WARM = "4300MiB"
KEEP_S = 600
ROUNDS = 3
BAR_S = 1.0
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
