"""Where the threads beside an engine on a CPU may run: it binds those that it computes with to a core
each, and all others of the process come from the first of these."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

NODES = Path("/sys/devices/system/node")


def spread() -> None:
    """Have this thread, and those that it starts, run where the process that began this one may, as far as
    that is near the same memory."""
    bound = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, around(bound, os.sched_getaffinity(os.getppid()), _nodes()))


def around(bound: set[int], allowed: set[int], nodes: Iterable[set[int]]) -> set[int]:
    """These cores, and the allowed ones that share a node of memory with them."""
    near = {core for node in nodes if node & bound for core in node}
    return bound | (allowed & near if near else allowed)


def _nodes() -> list[set[int]]:
    with contextlib.suppress(OSError):
        return [_cores(path.read_text()) for path in NODES.glob("node[0-9]*/cpulist")]
    return []


def _cores(text: str) -> set[int]:
    """0-3,8: as the kernel writes them."""
    ranges = [part.partition("-") for part in text.split(",") if part.strip()]
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}
