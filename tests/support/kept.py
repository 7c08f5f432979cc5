"""Daemons whose memory is kept, and chains of blocks in them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvtier import Client, Space
from kvtier_daemon.claim import owner_of
from kvtier_daemon.tiers.fd_store import KeeperStore
from support.daemons import Daemon, start_daemon
from support.specs import spec_of

KEEP_S = 120
WAIT_S = 60.0
LOADING = Path(__file__).with_name("loading_client.py")
BLOCKS = 48


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for daemons; ends their keeper process afterwards."""
    yield tmp_path
    if owner := owner_of(tmp_path / "kvtier.sock"):  # of a test that failed
        os.kill(owner, signal.SIGKILL)
    store = KeeperStore(tmp_path / "kvtier.sock.keeper", KEEP_S)
    for name, fd in store.take().items():
        os.close(fd)
        store.remove(name)
    store.close()


class Held:
    """A store of descriptors in this process."""

    def __init__(self) -> None:
        self.fds: dict[str, int] = {}

    def take(self) -> Mapping[str, int]:
        return {name: os.dup(fd) for name, fd in self.fds.items()}

    def put(self, name: str, fd: int) -> None:
        self.fds[name] = os.dup(fd)

    def remove(self, name: str) -> None:
        os.close(self.fds.pop(name))

    def close(self) -> None:
        pass


@pytest.fixture
def held() -> Iterator[Held]:
    store = Held()
    yield store
    for fd in store.fds.values():
        os.close(fd)


def start(folder: Path, keep_s: int = KEEP_S, **options: object) -> Daemon:
    return start_daemon(folder, keep_s=keep_s, **options)  # type: ignore[arg-type]


def payload(space: Space, number: int) -> bytes:
    return number.to_bytes(4, "little") * (space.spec.block_bytes // 4)


def save(client: Client, first: int = 0, count: int = BLOCKS, model: str = "test") -> list[bytes]:
    """Save a chain of blocks whose bytes are their numbers; return them."""
    space = client.open(spec_of(model))
    keys = space.keys(tokens(space, first, count))
    blocks = [payload(space, first + at) for at in range(count)]
    assert space.save(keys, b"".join(blocks)).stored == count
    return blocks


def tokens(space: Space, first: int, count: int) -> list[int]:
    return [first, *range(1, count * space.spec.block_tokens)]


def loaded(client: Client, first: int = 0, count: int = BLOCKS, model: str = "test") -> list[bytes]:
    space = client.open(spec_of(model))
    with space.load(space.keys(tokens(space, first, count))) as blocks:
        return [bytes(one) for one in blocks if one is not None]


def end(daemon: Daemon, how: signal.Signals) -> None:
    daemon.process.send_signal(how)
    daemon.process.wait(30)


def quarantined(daemon: Daemon) -> int:
    return int(daemon.stats()["tiers"]["warm"]["states"]["quarantined"])


class Loading:
    """A process of `loading_client.py`."""

    def __init__(self, socket: str, seed: int) -> None:
        self.turns = 0
        self._process = subprocess.Popen(
            [sys.executable, str(LOADING), socket, str(seed), str(WAIT_S)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._lines: list[str] = []
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._lines.append(line)
            else:
                self.turns = int(line)

    def wait_for_turns(self, count: int) -> None:
        wanted, deadline = self.turns + count, time.monotonic() + WAIT_S
        while self.turns < wanted:
            assert time.monotonic() < deadline and self._process.poll() is None, "no progress"
            time.sleep(0.005)

    def stop(self) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(WAIT_S)
        self._reading.join(WAIT_S)
        self._process.stdout.close()
        (line,) = self._lines
        return json.loads(line)  # type: ignore[no-any-return]


@pytest.fixture
def loading() -> Iterator[Callable[[str, int], list[Loading]]]:
    running: list[Loading] = []

    def begin(socket: str, count: int) -> list[Loading]:
        running.extend(Loading(socket, seed) for seed in range(1, count + 1))
        return running

    yield begin
    for one in running:
        if one._process.poll() is None:
            one._process.kill()
            one._process.wait()
