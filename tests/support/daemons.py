"""Start real daemons for tests, each in its own process, with a socket under tmp_path."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

from kvtier import Client, Unavailable
from kvtier_daemon.observing.metrics import SERIES
from kvtier_daemon.tiers.child_process import start_child
from kvtier_daemon.tiers.cold.index_process import COMMAND as INDEX_COMMAND
from kvtier_daemon.tiers.remote.driver import COMMAND as STORE_COMMAND
from support import forked, hasty

START_S = 60.0  # on a busy machine
BUSY_S = 60.0  # for an answer, on a busy machine
STOP_S = 20.0  # less than the limit of the daemon's own stop
SERVE = (sys.executable, "-m", "kvtier_daemon.cli", "serve")
TESTS = str(Path(__file__).parents[1])
server = cache(forked.started)


def start_forked(command: tuple[str, ...], *fds: int) -> Any:
    """Start a process of a tier of this process: a fork, unless a test has its own command."""
    which = {INDEX_COMMAND: forked.INDEX, STORE_COMMAND: forked.STORE}.get(command)
    return server().start_child(which, {}, *fds) if which else start_child(command, *fds)


def checked(stats: dict[str, Any]) -> dict[str, Any]:
    """Return the report; no reason and no state in it may be one that the metrics call "other"."""
    for one in SERIES:
        unknown = one.read(stats).keys() - set(one.values) if one.values else set()
        assert not unknown, f"{one.name} knows no {one.label} {unknown}"
    return stats


@dataclass
class Daemon:
    """A running `kvtier serve`."""

    process: subprocess.Popen[bytes] | forked.Process
    socket: str
    log: Path

    def connect(self, **options: Any) -> Client:
        options.setdefault("populate", False)
        options.setdefault("timeout_s", BUSY_S)
        return Client.connect(self.socket, **options)

    def stats(self) -> dict[str, Any]:
        with self.connect() as client:
            return checked(client.stats())

    def wait_for(
        self, holds: Callable[[dict[str, Any]], bool], seconds: float = 60.0,
        of: Client | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Wait until `holds` is true for a report, which the client `of` asks for; return that report."""
        deadline, pause_s = time.monotonic() + seconds, 0.002
        with nullcontext(of) if of else self.connect() as client:
            while not holds(stats := checked(client.stats())):
                assert time.monotonic() < deadline, f"still not so after {seconds} s: {stats}"
                time.sleep(pause_s)
                pause_s = min(1.5 * pause_s, 0.1)
        return stats

    def wait_for_start(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            assert self.process.poll() is None, f"ended at its start: {self.log.read_text()}"
            try:
                self.connect().close()
                return
            except Unavailable:
                assert time.monotonic() < deadline, (
                    f"no daemon after {START_S} s: {self.log.read_text()}"
                )
                time.sleep(0.01)

    def wait_for_arena(self) -> None:
        def complete(stats: dict[str, Any]) -> bool:
            warm = stats["tiers"]["warm"]
            return bool(warm["allocated_bytes"] == warm["capacity_bytes"])

        with self.connect() as client:
            client.wait_ready(START_S)  # all of this tenant's memory is announced
            self.wait_for(complete, of=client)

    def wait_for_disks(self) -> None:
        """Wait until the cold tier has opened and read its directories: a start does not wait for a directory
        that takes longer than 5 s."""

        def found(stats: dict[str, Any]) -> bool:
            cold = stats["tiers"]["cold"]
            return cold["state"] == "on" and "still being opened" not in cold["failure"]

        self.wait_for(found)

    def process_bytes(self) -> int:
        """Return the anonymous memory of the process, without the arena."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) * 1024

    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def wait_for_open_files(self, count: int, seconds: float = 60.0) -> None:
        """Wait until at most `count` files are open: those of a disconnected client close later."""
        deadline = time.monotonic() + seconds
        while self.open_files() > count:
            assert time.monotonic() < deadline, f"{self.open_files()} files open, not {count}"
            time.sleep(0.02)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(how)
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"not gone after {STOP_S} s: {self.log.read_text()[-3000:]}"
            ) from None

    def end(self) -> None:
        """Stop as Ctrl-C does, without writing to disk what is only in memory: nothing reads it later."""
        self.stop(signal.SIGINT)
        assert "Traceback" not in self.log.read_text(), self.log.read_text()


def hasty_command(haste: Mapping[str, float]) -> tuple[str, ...]:
    """The command `kvtier serve` with other values of these constants."""
    return sys.executable, str(Path(hasty.__file__)), json.dumps(haste), "serve"


def start_daemon(
    folder: Path,
    warm: str = "4MiB",
    config: str = "",
    wait: bool = True,
    command: Sequence[str] = SERVE,
    env: Mapping[str, str] | None = None,
    keep_s: int | None = 0,
    haste: Mapping[str, float] | None = None,
    own_children: bool = False,
    forks: forked.Server | None = None,
) -> Daemon:
    """Start a daemon and wait until it accepts clients and, with `wait`, until its arena is complete. A
    keeper process holds its memory for `keep_s` after its end, or for the default with None. `haste`: values
    of the daemon's constants. `own_children`: its processes are its children. `forks`: starts it, in place of
    the usual one or of an exec with `env`."""
    socket = str(folder / "kvtier.sock")
    text = f'socket = "{socket}"\nstate = "{folder / "state"}"\n{config}\n'
    if "[warm]" not in config:
        text += f'[warm]\nsize = "{warm}"\n'
    if keep_s is not None and "keep_s" not in config:
        text = text.replace("[warm]\n", f"[warm]\nkeep_s = {keep_s}\n")
    path = folder / "kvtier.toml"
    path.write_text(text)
    log = folder / "daemon.log"
    with log.open("ab") as sink:
        process: subprocess.Popen[bytes] | forked.Process
        if command is SERVE and (env is None or forks is not None):
            process = (forks or server()).start(
                ["serve", "--config", str(path)], 1, sink.fileno(), env or os.environ, haste,
                own_children=own_children,
            )  # fmt: skip
        else:
            command = hasty_command(haste) if haste else command
            process = subprocess.Popen([*command, "--config", str(path)], stderr=sink, env=env)
    daemon = Daemon(process, socket, log)
    try:
        daemon.wait_for_start()
        if wait:
            daemon.wait_for_arena()
    except BaseException:
        process.kill()
        process.wait()
        raise
    return daemon


def kvtier(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command `kvtier` and wait until it ends."""
    return server().run(list(arguments), dict(os.environ, **environment))


@contextmanager
def running(program: str, *arguments: str) -> Iterator[tuple[forked.Process, IO[str]]]:
    """Run a Python program, which may import from the folder of the tests; yield it and its output. It is
    killed at the end."""
    path = "import sys\nsys.path.insert(0, sys.argv.pop(1))\n"
    reading, writing = os.pipe()
    with open(reading) as output:
        process = server().start([TESTS, *arguments], writing, 2, program=path + program)
        os.close(writing)
        try:
            yield process, output
        finally:
            process.kill()
            process.wait()
