"""A daemon under full load keeps its memory and its descriptors: clients save, load, forget, pin, connect
and disconnect without a pause. SOAK_SECONDS=N lasts N seconds."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kvtier_daemon.claim import keeper_of
from kvtier_daemon.tiers.fd_store import KeeperStore
from kvtier_daemon.tiers.kept_arena import clear
from support import soaking
from support.daemons import Daemon, start_daemon
from support.effort import effort

SECONDS = float(os.environ.get("SOAK_SECONDS", effort(30, 30, 1800)))
EVERY_S = min(5.0, SECONDS / 60)
WARM_UP = 1 / 2  # before it, as a share of the time
CLIENTS = 3
KEEP_S = 600
REST_S = 3.0  # in which the connection of the last look is closed
LIMIT_MB_H = 1.0
LEAST_S = 1800  # the history of the status page is full after 15 minutes, which are the warm-up
CONFIDENCE_Z = 1.96


@dataclass
class Sample:
    at: float
    rss_bytes: int  # of the daemon and of its index's process, without shared memory
    files: int  # descriptors, without those of segments
    threads: int


def sampled(daemon: Daemon) -> Sample:
    pid = daemon.process.pid
    rss = sum(private_bytes(one) for one in (pid, *children_of(pid)))
    threads = len(os.listdir(f"/proc/{pid}/task"))
    return Sample(time.monotonic(), rss, files_of(pid), threads)


def children_of(pid: int) -> list[str]:
    """The children of all threads: the index's process is started by a thread."""
    found: list[str] = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(FileNotFoundError):  # the thread has ended
            found += Path(f"/proc/{pid}/task/{task}/children").read_text().split()
    return found


def files_of(pid: int) -> int:
    count = 0
    for file in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            count += "/segments/" not in os.readlink(file.path)
    return count


def private_bytes(pid: int | str) -> int:
    """The anonymous memory of a process; its arena is shared memory."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(rollup.partition("Pss_Anon:")[2].split()[0]) * 1024


def slope(at: Sequence[float], values: Sequence[float]) -> tuple[float, float, float]:
    """The Theil-Sen slope, the median of the slopes between all pairs, with the ends of its confidence
    interval of 95% (Sen 1968)."""
    first, second = np.triu_indices(len(at), 1)
    x, y = np.asarray(at), np.asarray(values, float)
    slopes = np.sort((y[second] - y[first]) / (x[second] - x[first]))
    n, pairs = len(at), len(slopes)
    spread = CONFIDENCE_Z * np.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    low, high = int((pairs - spread) // 2), int((pairs + spread) // 2) + 1
    ends = slopes[max(low, 0)], slopes[min(high, pairs - 1)]
    return float(np.median(slopes)), float(ends[0]), float(ends[1])


def test_a_slope_is_found_in_spite_of_peaks() -> None:
    at = list(range(100))
    values = [3.0 * one + (1000 if one % 9 == 0 else one % 7) for one in at]
    middle, low, high = slope(at, values)
    assert 2.9 < low < middle < high < 3.1
    assert slope(at, [one % 5 for one in at])[1] <= 0.0


@pytest.mark.slow
def test_memory_and_descriptors_do_not_grow_under_load(tmp_path: Path) -> None:
    (tmp_path / "cold").mkdir()
    daemon = start_daemon(
        tmp_path,
        config=f'[warm]\nsize = "32MiB"\n[cold]\ndirectories = ["{tmp_path / "cold"}"]\n'
        f'size = "192MiB"\nsegment = "2MiB"\nscrub = "16MiB"\n[http]\nlisten = "127.0.0.1:0"\n',
        keep_s=KEEP_S, own_children=True,
    )  # fmt: skip
    try:
        assert children_of(daemon.process.pid), "the index's process is not measured"
        loaded(daemon, SECONDS * WARM_UP)
        before = at_rest(daemon)
        samples = loaded(daemon, SECONDS)
        after = at_rest(daemon, before.files)
        stats = daemon.stats()
        print({name: stats["tiers"]["cold"]["states"][name] for name in ("written", "read")})
        judge(samples, before, after)
        assert "Traceback" not in daemon.log.read_text(), daemon.log.read_text()
    finally:
        daemon.stop()
        clear(KeeperStore(keeper_of(Path(daemon.socket)), 0))


def loaded(daemon: Daemon, seconds: float) -> list[Sample]:
    """Let clients use the daemon for this long; return samples of it."""
    clients = [start_client(daemon, number) for number in range(CLIENTS)]
    samples, until = [], time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            time.sleep(EVERY_S)
            samples.append(sampled(daemon))
            assert all(client.poll() is None for client in clients), "a client ended"
    finally:
        for client in clients:
            assert client.stdin is not None
            client.stdin.close()
        codes = [client.wait(60) for client in clients]
    assert codes == [0] * CLIENTS
    return samples


def start_client(daemon: Daemon, number: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, soaking.__file__, daemon.socket, str(number)]
    env = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    return subprocess.Popen(command, stdin=subprocess.PIPE, env=env)


def at_rest(daemon: Daemon, most_files: int = 0) -> Sample:
    """A sample without clients, once at most this many descriptors are left, or they are no longer closed."""
    daemon.wait_for(lambda stats: stats["connections"] == 1)
    until = time.monotonic() + REST_S
    now = sampled(daemon)
    while time.monotonic() < until and now.files > most_files:
        time.sleep(0.2)
        now = sampled(daemon)
    return now


def judge(samples: list[Sample], before: Sample, after: Sample) -> None:
    at = [one.at for one in samples]
    middle, low, high = (
        one * 3600 / 1e6 for one in slope(at, [float(one.rss_bytes) for one in samples])
    )
    print(
        f"{len(samples)} samples in {at[-1] - at[0]:.0f} s: private memory {middle:+.2f} MB/h"
        f" (95%: {low:+.2f} to {high:+.2f}), {samples[-1].rss_bytes / 1e6:.1f} MB at the end;"
        f" without clients {before.rss_bytes / 1e6:.1f} MB before, {after.rss_bytes / 1e6:.1f} MB after;"
        f" {max(one.files for one in samples)} descriptors at most, without clients {before.files} before,"
        f" {after.files} after; {max(one.threads for one in samples)} threads at most"
    )
    assert after.files <= before.files
    assert after.threads <= max(one.threads for one in samples[: len(samples) // 2])
    if SECONDS >= LEAST_S:
        assert low <= LIMIT_MB_H
