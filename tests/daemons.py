"""A real daemon for tests: a process of its own, on a socket under tmp_path."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier import Client, Unavailable
from kvtier_daemon.observing.series import SERIES

START_S = 60.0  # of a loaded machine
STOP_S = 15.0
SERVE = (sys.executable, "-m", "kvtier_daemon.cli", "serve")


@dataclass
class Daemon:
    """A running `kvtier serve`."""

    process: subprocess.Popen[bytes]
    socket: str
    log: Path

    def connect(self, **options: Any) -> Client:
        options.setdefault("populate", False)
        return Client.connect(self.socket, **options)

    def stats(self) -> dict[str, Any]:
        with self.connect() as client:
            stats = client.stats()
        # Whatever a test brings about: no reason and no state that the metrics call "other".
        for one in SERIES:
            unknown = one.read(stats).keys() - set(one.values) if one.values else set()
            assert not unknown, f"{one.name} knows no {one.label} {unknown}"
        return stats

    def wait_for(
        self, holds: Callable[[dict[str, Any]], bool], seconds: float = 10.0
    ) -> dict[str, Any]:
        """The first report of which `holds` is true."""
        deadline = time.monotonic() + seconds
        while True:
            stats = self.stats()
            if holds(stats):
                return stats
            assert time.monotonic() < deadline, f"still not so after {seconds} s: {stats}"
            time.sleep(0.02)

    def wait_for_arena(self) -> None:
        def complete(stats: dict[str, Any]) -> bool:
            warm = stats["tiers"]["warm"]
            return bool(warm["allocated_bytes"] == warm["capacity_bytes"])

        self.wait_for(complete)
        # The last extent is announced a moment after its last byte is allocated.
        time.sleep(0.02)

    def process_bytes(self) -> int:
        """Memory of its own, the arena not counted."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) * 1024

    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def wait_for_open_files(self, count: int, seconds: float = 10.0) -> None:
        """Wait until no more than `count` files are open: a hung-up client's go a moment after it."""
        deadline = time.monotonic() + seconds
        while self.open_files() > count:
            assert time.monotonic() < deadline, f"{self.open_files()} files open, not {count}"
            time.sleep(0.02)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"not gone after {STOP_S} s: {self.log.read_text()[-3000:]}"
            ) from None


def start_daemon(
    folder: Path,
    warm: str = "64MiB",
    config: str = "",
    wait: bool = True,
    command: Sequence[str] = SERVE,
    env: Mapping[str, str] | None = None,
) -> Daemon:
    """Start a daemon and wait until it takes clients and, if asked to, until its arena is there."""
    socket = str(folder / "kvtier.sock")
    text = f'socket = "{socket}"\nstate = "{folder / "state"}"\n{config}\n'
    if "[warm]" not in config:
        text += f'[warm]\nsize = "{warm}"\n'
    path = folder / "kvtier.toml"
    path.write_text(text)
    log = folder / "daemon.log"
    with log.open("ab") as sink:
        process = subprocess.Popen([*command, "--config", str(path)], stderr=sink, env=env)
    daemon = Daemon(process, socket, log)
    deadline = time.monotonic() + START_S
    while True:
        assert process.poll() is None, f"the daemon ended at start: {log.read_text()}"
        try:
            daemon.connect().close()
            break
        except Unavailable:
            assert time.monotonic() < deadline, f"no daemon after {START_S} s: {log.read_text()}"
            time.sleep(0.02)
    if wait:
        daemon.wait_for_arena()
    return daemon


def kvtier(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command, and wait for it."""
    command = [sys.executable, "-m", "kvtier_daemon.cli", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False,
        env=dict(os.environ, **environment),
    )  # fmt: skip
