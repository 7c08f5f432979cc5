"""Count the files and functions of the product that one save and one load enter, in client and daemon.

    python tools/walk.py             four walks, how many files each enters, and its limit
    python tools/walk.py --files     their names, too, in the order in which they are entered
    python tools/walk.py --functions their functions, too
    python tools/walk.py --check     status 1 where a walk enters more files than its limit

A daemon of its own is started, warmed up, and recorded while one request is served. A walk is what both sides
call from the request until its work is done; timers that run anyway are subtracted, as an idle daemon calls
them too. The walks in memory are recorded while the cold tier is drained, so that no write begins meanwhile.
Each walk is recorded several times, and only functions that were called each time count: on a busy machine a
turn of the daemon may take too long.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import kvtier
from kvtier import Client, Group, KvSpec, Space

PACKAGES = ("kvtier", "kvtier_daemon", "kvtier_kernels")
LIMITS = {"warm save": 16, "warm load": 15, "save through to disk": 26, "load from disk": 22}
IDLE_S, SETTLE_S = 11.0, 1.0
ROUNDS, RELEASE_S = 5, 0.02  # the daemon serves the release of a load after the load has returned
DISK_ROUNDS = 3
WARM_BLOCKS = 8
BLOCK = 256 << 10
# Runs in the daemon: records what is called between SIGUSR1 and SIGUSR2.
RECORDER = """
import json, os, signal, sys, threading, time
from kvtier_daemon.serving import turns
turns.TURN_S = 1.0
called, out, on = {}, sys.argv.pop(1), [False]
def note(frame, event, argument):
    if on[0] and event == "call" and frame.f_code not in called:
        called[frame.f_code] = time.monotonic_ns()
def begin(*_):
    called.clear()
    on[0] = True
def end(*_):
    on[0] = False
    rows = [(code.co_filename, code.co_qualname, at) for code, at in called.items()]
    with open(out + ".new", "w") as file:
        json.dump(rows, file)
    os.replace(out + ".new", out)
signal.signal(signal.SIGUSR1, begin)
signal.signal(signal.SIGUSR2, end)
threading.setprofile(note)
sys.setprofile(note)
from kvtier_daemon.cli import app
app()
"""

Rows = dict[tuple[str, str], int]  # file and function, and when it was called first


class Walker:
    """Records both sides."""

    def __init__(self, daemon: subprocess.Popen[bytes], out: Path) -> None:
        self._daemon = daemon
        self._out = out
        self._own: dict[CodeType, int] = {}

    @contextmanager
    def recorded(self, found: Rows) -> Iterator[None]:
        self._out.unlink(missing_ok=True)
        self._daemon.send_signal(signal.SIGUSR1)
        time.sleep(0.05)
        self._own.clear()
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            self._daemon.send_signal(signal.SIGUSR2)
            while not self._out.exists():
                time.sleep(0.01)
        theirs = json.loads(self._out.read_text())
        own = [(code.co_filename, code.co_qualname, at) for code, at in self._own.items()]
        for path, name, at in sorted([*theirs, *own], key=lambda row: row[2]):
            found.setdefault((path, name), at)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code not in self._own:
            self._own[frame.f_code] = time.monotonic_ns()


def in_product(rows: Rows) -> Rows:
    """Return the rows of the product's modules, with paths that begin with their package."""
    found: Rows = {}
    for (path, name), time_ns in rows.items():
        parts = Path(path).parts
        package = next((each for each in PACKAGES if each in parts), None)
        if package is not None:
            at = len(parts) - 1 - parts[::-1].index(package)
            found.setdefault(("/".join(parts[at:]), name), time_ns)
    return found


def in_all(rounds: list[Rows]) -> Rows:
    """Return the rows of the last round that are in all others, too."""
    return {row: at for row, at in rounds[-1].items() if all(row in rows for rows in rounds)}


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError("the daemon did not get that far in a minute")
        time.sleep(0.02)


def cold(client: Client) -> dict[str, Any]:
    return dict(client.stats()["tiers"]["cold"])


def walks(folder: Path) -> dict[str, Rows]:
    config = folder / "kvtier.toml"
    disk = folder / "cold"
    disk.mkdir(mode=0o700)
    text = (
        f'socket = "{folder}/socket"\nstate = "{folder}/state"\n'
        f'[warm]\nsize = "64MiB"\n[cold]\ndirectories = ["{disk}"]\nsize = "256MiB"\n'
        'scrub = 0\nwrite = "through"\n'
    )
    config.write_text(text)
    out = folder / "called.json"
    command = [sys.executable, "-c", RECORDER, str(out), "serve", "--config", str(config)]
    daemon = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        return measured(connected(folder), Walker(daemon, out))
    finally:
        daemon.terminate()
        daemon.wait()


def connected(folder: Path) -> Client:
    found: list[Client] = []

    def connect() -> bool:
        try:
            found.append(Client.connect(str(folder / "socket")))
        except kvtier.KvtierError:
            return False
        return True

    until(connect)
    found[0].wait_ready()
    return found[0]


def measured(client: Client, walker: Walker) -> dict[str, Rows]:
    spec = KvSpec.groups(
        [Group(layers=8, kv_heads=8, head_dim=64)],
        model="walk", weights="none", dtype="bfloat16", block_tokens=BLOCK // (2 * 8 * 8 * 64 * 2),
    )  # fmt: skip
    space = client.open(spec)
    data = bytearray(os.urandom(space.group_block_bytes(0)))

    def keys(number: int) -> Any:
        return space.keys([number] * spec.block_tokens)

    def save(number: int, space: Space = space) -> None:
        with space.reserve(keys(number)) as slots:
            for slot in slots.values():
                slot[:] = data

    def load(number: int) -> int:
        with space.load(keys(number), deadline_ms=5000) as blocks:
            return sum(block is not None for block in blocks)

    def written() -> int:
        return int(cold(client)["blocks"])

    def wait_written(blocks: int) -> None:
        until(lambda: written() >= blocks)

    def wait_all_written() -> None:
        """Wait until no write has ended for some time."""
        before = -1
        while before != (before := written()):
            time.sleep(2 * SETTLE_S)

    for number in range(WARM_BLOCKS):  # warm up both sides
        save(number)
        assert load(number) == 1
    wait_written(WARM_BLOCKS)
    idle: Rows = {}
    time.sleep(SETTLE_S)  # until the last request is over
    with walker.recorded(idle):
        time.sleep(IDLE_S)
    rounds: dict[str, list[Rows]] = {name: [] for name in LIMITS}

    @contextmanager
    def one_round(walk: str) -> Iterator[None]:
        rounds[walk].append({})
        with walker.recorded(rounds[walk][-1]):
            yield

    new = range(WARM_BLOCKS, WARM_BLOCKS + DISK_ROUNDS)
    for number in new:
        with one_round("save through to disk"):
            save(number)
            time.sleep(SETTLE_S)
        busy = "the save was not on disk in time: the machine is too busy for this"
        assert written() == number + 1, busy
    client.tier("cold", "drain")
    until(lambda: client.tier("cold")["state"] == "drained")
    for number in range(ROUNDS):
        with one_round("warm save"):
            save(1000 + number)
        with one_round("warm load"):
            assert load(number) == 1
            time.sleep(RELEASE_S)
    client.tier("cold", "on")
    # Push blocks that were never used out of memory, then read them back.
    for number in range(2000, 2000 + (64 << 20) // len(data) + 128):
        until(lambda number=number: save(number) or space.match(keys(number)).ready)  # type: ignore[misc]
    wait_all_written()
    for number in new:
        with one_round("load from disk"):
            assert load(number) == 0
            time.sleep(SETTLE_S)
            busy = "the block was not read in time: the machine is too busy for this"
            assert load(number) == 1, busy
    idle = in_product(idle)
    found = {name: in_product(in_all(walk)) for name, walk in rounds.items()}
    return {
        name: {row: at for row, at in rows.items() if row not in idle}
        for name, rows in found.items()
    }


def main(arguments: list[str]) -> int:
    exceeded = False
    with tempfile.TemporaryDirectory() as name:
        found = walks(Path(name))
    for walk, limit in LIMITS.items():
        files: dict[str, list[str]] = {}
        for path, name in sorted(found[walk], key=found[walk].__getitem__):
            files.setdefault(path, []).append(name)
        exceeded |= len(files) > limit
        mark = "  EXCEEDED" if len(files) > limit else ""
        print(
            f"{walk:<24}{len(files):>4} files {len(found[walk]):>4} functions  (limit {limit}){mark}"
        )
        if "--files" in arguments or "--functions" in arguments:
            for path, names in files.items():
                print(f"    {path}")
                if "--functions" in arguments:
                    print(*(f"        {name}" for name in names), sep="\n")
    return int("--check" in arguments and exceeded)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
