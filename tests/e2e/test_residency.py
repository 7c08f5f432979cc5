"""Blocks that an engine reports as its own, with a real daemon and a real disk."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier import Client, Keys, Space
from support.daemons import Daemon
from support.specs import spec_of

SPEC = spec_of("resident", layers=2, kv_heads=8, head_dim=128)
COLD = """[warm]
size = "16MiB"
policy = "lru"
[cold]
directories = ["{}"]
size = "256MiB"
segment = "2MiB"
codec = "raw"
"""
MANY = (16 << 20) // SPEC.block_bytes  # blocks that fill memory


@pytest.fixture
def daemon(daemon_of: Callable[..., Daemon], tmp_path: Path) -> Daemon:
    disk = tmp_path / "disk"
    disk.mkdir()
    daemon = daemon_of(config=COLD.format(disk))
    daemon.wait_for_disks()
    return daemon


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with daemon.connect(name="engine", engine="e") as client:
        yield client


def content(at: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(at).integers(0, 256, SPEC.block_bytes, np.uint8)


def save(space: Space, chain: int, blocks: int) -> Keys:
    keys = space.keys(list(range(chain * 10**6, chain * 10**6 + 16 * blocks)))
    space.save(keys, [content(chain * 1000 + at) for at in range(blocks)])
    return keys


def written(daemon: Daemon, blocks: int) -> None:
    daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] >= blocks)


def resident(daemon: Daemon, **wanted: int) -> dict[str, Any]:
    return daemon.wait_for(lambda stats: wanted.items() <= stats["hot"]["resident"].items())


def test_a_block_of_an_engine_leaves_memory_first_and_returns_with_its_bytes(
    daemon: Daemon, client: Client
) -> None:
    space = client.open(SPEC)
    keys = save(space, 1, MANY - 4)
    mine = save(space, 3, 4)  # the newest, which lru would evict last
    written(daemon, MANY)
    space.tell_resident(0, entered=mine)
    resident(daemon, blocks=4, engines=1, bytes=4 * SPEC.block_bytes)
    others = save(space, 2, 4)
    written(daemon, MANY + 4)
    resident(daemon, away_blocks=4, evicted_blocks=4)
    found = client.explain(keys=mine.packed)["keys"]
    assert {(one["why"], one["engines"]) for one in found} == {("on_disk", 1)}
    assert space.match(keys).ready == MANY - 4 and space.match(others).ready == 4
    space.tell_resident(0, left=mine)
    resident(daemon, blocks=0, away_blocks=0, returned_blocks=4)
    with space.load(mine) as blocks:
        assert len(blocks) == 4
        for at, block in enumerate(blocks):
            assert block is not None and bytes(block) == content(3000 + at).tobytes()
    assert space.match(keys).ready == MANY - 8  # the tail of the oldest chain made room


def test_nothing_is_read_back_for_an_engine_that_is_gone(daemon: Daemon, client: Client) -> None:
    space = client.open(SPEC)
    keys = save(space, 1, MANY)
    written(daemon, MANY)
    with daemon.connect(name="other") as other:
        other.open(SPEC).tell_resident(0, entered=keys[MANY - 4 :])
        resident(daemon, blocks=4)
        save(space, 2, 4)
        resident(daemon, away_blocks=4)
    stats = resident(daemon, blocks=0, engines=0, away_blocks=0, returned_blocks=0)
    assert stats["tiers"]["cold"]["blocks"] >= MANY
    assert space.match(keys[MANY - 4 :]).coming == 4 or space.match(keys).coming


def test_the_row_hot_shows_what_engines_hold(daemon: Daemon, client: Client) -> None:
    space = client.open(SPEC)
    keys = save(space, 1, 4)
    space.tell_resident(0, entered=keys)
    resident(daemon, blocks=4)
    command = [sys.executable, "-m", "kvtier_daemon.cli"]
    shown = subprocess.run(
        [*command, "status", "--socket", daemon.socket], capture_output=True, text=True, check=True
    ).stdout
    row = next(line.split() for line in shown.splitlines() if line.split()[:1] == ["hot"])
    assert row[-2:] == ["4", "blocks"]
    told = subprocess.run(
        [*command, "explain", keys[0].hex(), "--socket", daemon.socket],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert "; 1 engine holds it" in told


def test_too_many_or_wrong_keys_are_refused_and_change_nothing(
    daemon: Daemon, client: Client
) -> None:
    space = client.open(SPEC)
    space.tell_resident(0, entered=Keys(bytes(32 * 4097)))
    space.tell_resident(5, entered=Keys(bytes(32)))
    client.ping()
    stats = daemon.stats()
    assert stats["hot"]["resident"]["entered_blocks"] == 0
    assert stats["failures"]["bad_request"] == 2
