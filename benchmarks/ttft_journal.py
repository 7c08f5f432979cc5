"""What happened when in the processes of an engine: written by them without a call into the kernel."""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

EVENT = struct.Struct("<IIdd")  # what, how much, from, until
COUNT = struct.Struct("<Q")
LIMIT_EVENTS = 1 << 20
WHAT = (
    "queued", "matched", "allocated", "build", "output", "finished", "begin", "start_load", "saved",
    "results", "report", "copy", "save",
)  # fmt: skip


class Journal:
    """Events of one process, in a file that others read while it is written. No call into the kernel."""

    def __init__(self, folder: Path) -> None:
        path = folder / f"{os.getpid()}.events"
        size = COUNT.size + LIMIT_EVENTS * EVENT.size
        with path.open("w+b") as file:
            file.truncate(size)
            self._memory = mmap.mmap(file.fileno(), size)
        self._count = 0
        self._lock = threading.Lock()

    def write(self, what: str, much: int, began: float, ended: float) -> None:
        with self._lock:
            at = COUNT.size + self._count % LIMIT_EVENTS * EVENT.size
            EVENT.pack_into(self._memory, at, WHAT.index(what), much, began, ended)
            self._count += 1
            COUNT.pack_into(self._memory, 0, self._count)

    def timed(self, what: str, call: Callable[[], Any], much: int = 0) -> Any:
        began = time.perf_counter()
        try:
            return call()
        finally:
            self.write(what, much, began, time.perf_counter())


def events(folder: Path) -> list[tuple[str, int, float, float]]:
    """What all processes have written so far, in the order of time."""
    found = []
    for path in folder.glob("*.events"):
        data = path.read_bytes()
        (count,) = COUNT.unpack_from(data)
        assert count <= LIMIT_EVENTS
        for what, much, began, ended in EVENT.iter_unpack(
            data[COUNT.size : COUNT.size + count * EVENT.size]
        ):
            found.append((WHAT[what], much, began, ended))
    return sorted(found, key=lambda event: event[2])
