"""Saves that need the room of blocks that are not on disk yet.

The daemon writes nothing until the test creates a file."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier import Space
from kvtier.key import Keys
from support.daemons import Daemon
from support.specs import spec_of

BLOCKS = 256  # of the memory
SERVE_WITHOUT_WRITES = """
import asyncio, os, sys
folders, gate, full = sys.argv.pop(1), sys.argv.pop(1), sys.argv.pop(1) == "True"
sys.path[:0] = folders.split(":")
from kvtier_daemon.tiers.cold import flusher

has_place = flusher.Flusher._has_place_soon

async def when_open(self):
    while not os.path.exists(gate):
        await asyncio.sleep(0.001)
        if full:
            return False
    return await has_place(self)

flusher.WRITE_BLOCKS = 16
flusher.Flusher._has_place_soon = when_open
from kvtier_daemon.cli import main
main()
"""


def unwritten(stats: dict[str, Any]) -> int:
    return sum(stats["tiers"]["cold"]["unwritten"].values())


@pytest.mark.parametrize("full", [False, True])
def test_a_save_waits_for_the_disk_as_long_as_its_caller_permits(
    daemon_of: Callable[..., Daemon], tmp_path: Path, full: bool
) -> None:
    """`full`: there is no segment for the next write, so the flusher pauses."""
    spec, gate = spec_of("waiting"), tmp_path / "gate"
    config = (
        f"[warm]\nsize = {BLOCKS * spec.block_bytes}\n"
        f'[cold]\ndirectories = ["{tmp_path}/disk"]\nsize = "96MiB"\nsegment = "1MiB"\n'
    )
    (tmp_path / "disk").mkdir()
    code, folders = SERVE_WITHOUT_WRITES, ":".join(sys.path)
    command = (sys.executable, "-c", code, folders, str(gate), str(full), "serve")
    daemon = daemon_of(config=config, command=command)
    daemon.wait_for_disks()
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
