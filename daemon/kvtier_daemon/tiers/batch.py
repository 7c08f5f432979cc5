"""Blocks on their way to a disk, and what became of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtier.layout import KvSpec
from kvtier_daemon.tiers.log import Segment


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A block to be written: what it is, and the slot that has it. `digest` is empty where none is known."""

    id: int
    space: bytes
    spec: KvSpec
    group: int
    shard: int
    key: bytes
    parent: bytes
    digest: bytes
    extent: int
    offset: int


@dataclass(frozen=True, slots=True)
class Landed:
    """A block that is on disk, and where."""

    id: int
    segment: int
    page: int
    header_pages: int
    payload_bytes: int
    digest: bytes


Wrote = Callable[[list[Landed], list[int]], None]


@dataclass(slots=True, eq=False)
class Batch:
    """Writes that one fdatasync makes durable."""

    segment: Segment
    done: Wrote
    settled: asyncio.Future[None]
    ops: int = 0
    landed: list[Landed] = field(default_factory=list)
    rows: list[tuple[int, bytes]] = field(default_factory=list)  # where in the table, and what
    failed: list[int] = field(default_factory=list)
