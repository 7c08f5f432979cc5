"""A daemon with a cold tier that writes nothing until a test creates a file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.daemons import Daemon

WRITE_BLOCKS = 16  # of one write

SERVE_WITHOUT_WRITES = """
import asyncio, os, sys
folders, gate, full, held, blocks = (sys.argv.pop(1) for _ in range(5))
sys.path[:0] = folders.split(":")
from kvtier_daemon.tiers.cold import flusher

has_place = flusher.Flusher._has_place_soon

async def when_open(self):
    while not os.path.exists(gate):
        await asyncio.sleep(0.001)
        if full == "True":
            return False
    return await has_place(self)

in_time = flusher.in_time

async def ended(write):
    in_its_time = await in_time(write)
    while held == "True" and not os.path.exists(gate + ".ends"):
        await asyncio.sleep(0.001)
    return in_its_time

flusher.in_time = ended
flusher.WRITE_BLOCKS = int(blocks)
flusher.Flusher._has_place_soon = when_open
from kvtier_daemon.cli import main
main()
"""


def gated_daemon(
    daemon_of: Callable[..., Daemon],
    folder: Path,
    memory_bytes: int,
    full: bool = False,
    held: bool = False,
) -> tuple[Daemon, Path]:
    """Return the daemon, and the file that lets it write. `full`: there is no segment for the next write, so
    the flusher pauses. `held`: the first write of each writer ends when the file with the suffix `.ends`
    exists."""
    gate = folder / "gate"
    config = (
        f"[warm]\nsize = {memory_bytes}\n"
        f'[cold]\ndirectories = ["{folder}/disk"]\nsize = "96MiB"\nsegment = "1MiB"\n'
    )
    (folder / "disk").mkdir()
    folders = ":".join(sys.path)
    flags = (str(full), str(held), str(WRITE_BLOCKS))
    command = (sys.executable, "-c", SERVE_WITHOUT_WRITES, folders, str(gate), *flags, "serve")
    daemon = daemon_of(config=config, command=command)
    daemon.wait_for_disks()
    return daemon, gate


def unwritten(stats: dict[str, Any]) -> int:
    return sum(stats["tiers"]["cold"]["unwritten"].values())
