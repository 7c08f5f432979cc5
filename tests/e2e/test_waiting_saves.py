"""Saves that need the room of blocks that are not on disk yet."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier import Space
from kvtier.key import Keys
from support.daemons import Daemon
from support.gated import gated_daemon, unwritten
from support.specs import spec_of

BLOCKS = 256  # of the memory


@pytest.mark.parametrize("full", [False, True])
def test_a_save_waits_for_the_disk_as_long_as_its_caller_permits(
    daemon_of: Callable[..., Daemon], tmp_path: Path, full: bool
) -> None:
    spec = spec_of("waiting")
    daemon, gate = gated_daemon(daemon_of, tmp_path, BLOCKS * spec.block_bytes, full)
    with daemon.connect() as client:
        space = client.open(spec)

        def save(number: int, wait_s: float) -> int:
            keys = keys_of(space, number)
            nbytes = bytes(len(keys) * space.block_bytes)
            return space.save(keys, nbytes, checksum=False, wait_s=wait_s).stored

        client.wait_ready()
        half = BLOCKS // 2
        assert [save(number, 60) for number in range(2)] == [half, half], "memory has room"
        assert save(2, 0) == half and unwritten(daemon.stats()) == half
        assert not daemon.stats()["refused_tokens"]["writing"]
        assert save(3, 0.05) == half and unwritten(daemon.stats()) == 2 * half
        asked = daemon.stats()["refused_tokens"]["writing"]
        assert asked

        stored: list[int] = []
        waiting = threading.Thread(target=lambda: stored.append(save(4, 60)))
        waiting.start()
        daemon.wait_for(lambda stats: stats["refused_tokens"]["writing"] > asked)
        client.ping()  # other threads can use the connection
        assert not stored and unwritten(daemon.stats()) == 2 * half
        gate.touch()
        waiting.join(60)
        assert stored == [half] and unwritten(daemon.stats()) == 2 * half


def keys_of(space: Space, number: int) -> Keys:
    tokens = space.spec.block_tokens * BLOCKS // 2
    return space.keys(list(range(number * tokens, (number + 1) * tokens)))
