"""Blocks that are saved with a TTL, through a client and a real daemon with a disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier import InvalidArgument, Refused, wire
from kvtier.space import Space
from support.daemons import Daemon
from support.specs import spec_of

BLOCKS = 8
SPEC = spec_of("ttl", layers=1, kv_heads=1, head_dim=64)


@pytest.fixture
def start(daemon_of: Callable[..., Daemon], tmp_path: Path) -> Callable[[], Daemon]:
    """A daemon that writes to its disk immediately; a second call starts a later run of it."""
    cold = tmp_path / "cold"
    cold.mkdir()
    config = f'[cold]\ndirectories = ["{cold}"]\nsize = "64MiB"\nwrite = "through"\n'
    return lambda: daemon_of(config='[warm]\nsize = "16MiB"\n' + config, folder=tmp_path / "d")


def saved(space: Space, start: int, **ttl: Any) -> Any:
    keys = space.keys([start] * (BLOCKS * SPEC.block_tokens))
    assert space.save(keys, bytes(BLOCKS * space.block_bytes), **ttl).stored == BLOCKS
    return keys


def test_blocks_with_a_ttl_expire_and_others_stay(start: Callable[[], Daemon]) -> None:
    daemon = start()
    with daemon.connect() as client:
        space = client.open(SPEC)
        began = time.monotonic()
        short = saved(space, 0, ttl_s=1.0)
        ended = time.monotonic()
        long, none = saved(space, 1, ttl_s=604_800.0), saved(space, 2)
        found = []
        while not found or found[-1][1]:
            found.append((time.monotonic(), space.match(short).ready, time.monotonic()))
        for asked, ready, answered in found:
            assert ready == 0 or asked <= ended + 1.0, "not found once its time is over"
            assert ready == BLOCKS or answered >= began + 0.99, "nor gone before"
        assert space.match(long).ready == space.match(none).ready == BLOCKS
        assert space.forget(long) == BLOCKS


def test_blocks_with_a_ttl_are_never_on_disk(start: Callable[[], Daemon]) -> None:
    daemon = start()
    with daemon.connect() as client:
        space = client.open(SPEC)
        short, long = saved(space, 1, ttl_s=3600.0), saved(space, 2)
        daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] == BLOCKS)
        third = saved(space, 3)
        daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] == 2 * BLOCKS)
        assert space.kept() == (3 * BLOCKS, 2 * BLOCKS)
    assert daemon.stop() == 0
    daemon = start()
    with daemon.connect() as client:
        space = client.open(SPEC)
        daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] == 2 * BLOCKS)
        for keys, coming in ((short, 0), (long, BLOCKS), (third, BLOCKS)):
            found = space.match(keys)
            assert found.ready + found.coming == coming


@pytest.mark.parametrize("ttl_s", [0, -1, "60", True, float("nan")], ids=repr)
def test_an_invalid_ttl_saves_nothing(shared_daemon: Daemon, ttl_s: Any) -> None:
    with shared_daemon.connect() as client:
        space = client.open(SPEC)
        keys = space.keys([9] * SPEC.block_tokens)
        with pytest.raises(InvalidArgument):
            space.save(keys, bytes(space.block_bytes), ttl_s=ttl_s)
        assert space.match(keys).ready == 0


def test_a_ttl_of_more_than_a_week_is_refused(shared_daemon: Daemon) -> None:
    with shared_daemon.connect() as client:
        space = client.open(SPEC)
        keys = space.keys([10] * SPEC.block_tokens)
        with pytest.raises(InvalidArgument, match="a week"):
            space.save(keys, bytes(space.block_bytes), ttl_s=604_801.0)
        longer = wire.Reserve(
            client.link.new_id(), space.index, 0, 0, b"", keys.packed, ttl_ms=604_801_000
        )
        with pytest.raises(Refused, match="a week"):
            client.link.ask(longer, wire.Reserved)
        assert space.match(keys).ready == 0
