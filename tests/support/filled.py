"""Folders that daemons have filled once: each test gets a copy, in a tenth of the CPU time."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Hashable
from functools import cache
from pathlib import Path
from typing import Any

from support.daemons import Daemon, start_daemon

_made: dict[Hashable, Path] = {}


@cache
def _place() -> Path:
    folder = tempfile.mkdtemp(prefix="kvtier-filled-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def filled(
    folder: Path, what: Hashable, fill: Callable[[Path, Callable[..., Daemon]], None]
) -> None:
    """Copy to `folder` what daemons have written to another one: once in this process for each `what`. `fill`
    gets that folder, which is to contain their state and their disk, and a function that starts them."""
    if what not in _made:
        source, running = _place() / str(len(_made)), list[Daemon]()

        def start(**options: Any) -> Daemon:
            running.append(start_daemon(**options))
            return running[-1]

        try:
            fill(source, start)
        finally:
            for daemon in running:
                daemon.stop()
        _made[what] = source
    shutil.copytree(_made[what], folder, dirs_exist_ok=True)
