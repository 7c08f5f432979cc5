"""Daemons whose memory is kept, and chains of blocks in them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier import Client, Space
from kvtier_daemon.tiers.fd_store import KeeperStore
from support.daemons import Daemon, start_daemon
from support.specs import spec_of

KEEP_S = 120
BLOCKS = 48


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for daemons; ends their keeper process afterwards."""
    yield tmp_path
    store = KeeperStore(tmp_path / "kvtier.sock.keeper", KEEP_S)
    for name, fd in store.take().items():
        os.close(fd)
        store.remove(name)
    store.close()


def start(folder: Path, **options: object) -> Daemon:
    return start_daemon(folder, keep_s=KEEP_S, **options)  # type: ignore[arg-type]


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
