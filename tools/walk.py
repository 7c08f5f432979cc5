"""Count the files and functions of the product that one save and one load enter, in client and daemon.

    python tools/walk.py             four walks, how many files each enters, and its limit
    python tools/walk.py --files     their names, too
    python tools/walk.py --check     status 1 where a walk enters more files than its limit

A daemon of its own is started, warmed up, and recorded while one request is served. A walk is what both sides
call from the request until its work is done; timers that run anyway are subtracted, as an idle daemon calls
them too. The walks in memory are recorded with `cold.write = "back"`, so that no write to disk begins
meanwhile, ROUNDS times each, and only functions that were called each time count: on a busy machine a turn of
the daemon may take too long.
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
BLOCK = 256 << 10
# Runs in the daemon: records what is called between SIGUSR1 and SIGUSR2.
RECORDER = """
import json, os, signal, sys, threading
called, out, on = set(), sys.argv.pop(1), [False]
def note(frame, event, argument):
    if on[0] and event == "call":
        called.add(frame.f_code)
def begin(*_):
    called.clear()
    on[0] = True
def end(*_):
    on[0] = False
    rows = sorted({(code.co_filename, code.co_qualname) for code in called})
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

Rows = set[tuple[str, str]]


class Walker:
    """Records both sides."""

    def __init__(self, daemon: subprocess.Popen[bytes], out: Path) -> None:
        self._daemon = daemon
        self._out = out
        self._own: set[CodeType] = set()

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
        found |= {tuple(row) for row in json.loads(self._out.read_text())}
        found |= {(code.co_filename, code.co_qualname) for code in self._own}

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            self._own.add(frame.f_code)


def in_product(rows: Rows) -> Rows:
    """Return the rows of the product's modules, with paths that begin with their package."""
    found = set()
    for path, name in rows:
        parts = Path(path).parts
        package = next((each for each in PACKAGES if each in parts), None)
        if package is not None:
            at = len(parts) - 1 - parts[::-1].index(package)
            found.add(("/".join(parts[at:]), name))
    return found


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
        "scrub = 0\nwrite = "
    )
    config.write_text(text + '"through"\n')
    out = folder / "called.json"
    command = [sys.executable, "-c", RECORDER, str(out), "serve", "--config", str(config)]
    daemon = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        client = connected(folder)

        def write(mode: str) -> None:
            config.write_text(f'{text}"{mode}"\n')
            client.settings("reload")

        return measured(client, Walker(daemon, out), write)
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


def measured(client: Client, walker: Walker, write: Callable[[str], None]) -> dict[str, Rows]:
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

    for number in range(8):  # warm up both sides
        save(number)
        assert load(number) == 1
    wait_written(8)
    idle: Rows = set()
    with walker.recorded(idle):
        time.sleep(IDLE_S)
    found: dict[str, Rows] = {name: set() for name in LIMITS}
    with walker.recorded(found["save through to disk"]):
        save(150)
        time.sleep(SETTLE_S)
    assert written() == 9, "the save was not on disk in time: the machine is too busy for this"
    write("back")
    saves: list[Rows] = [set() for _ in range(ROUNDS)]
    for number, rows in enumerate(saves):
        with walker.recorded(rows):
            save(100 + number)
    loads: list[Rows] = [set() for _ in range(ROUNDS)]
    for number, rows in enumerate(loads):
        with walker.recorded(rows):
            assert load(number) == 1
            time.sleep(RELEASE_S)
    found["warm save"], found["warm load"] = set.intersection(*saves), set.intersection(*loads)
    write("through")
    # Push a block that was never used out of memory, then read it back.
    for number in range(200, 200 + (64 << 20) // len(data) + 128):
        until(lambda number=number: save(number) or space.match(keys(number)).ready)  # type: ignore[misc]
    wait_written(9 + (64 << 20) // len(data))
    time.sleep(SETTLE_S)
    with walker.recorded(found["load from disk"]):
        assert load(150) == 0
        time.sleep(SETTLE_S)
        assert load(150) == 1, "the block was not read in time: the machine is too busy for this"
    idle = in_product(idle)
    return {name: in_product(rows) - idle for name, rows in found.items()}


def main(arguments: list[str]) -> int:
    exceeded = False
    with tempfile.TemporaryDirectory() as name:
        found = walks(Path(name))
    for walk, limit in LIMITS.items():
        files = sorted({path for path, _ in found[walk]})
        exceeded |= len(files) > limit
        mark = "  EXCEEDED" if len(files) > limit else ""
        print(
            f"{walk:<24}{len(files):>4} files {len(found[walk]):>4} functions  (limit {limit}){mark}"
        )
        if "--files" in arguments:
            for path in files:
                print(f"    {path}")
    return int("--check" in arguments and exceeded)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
