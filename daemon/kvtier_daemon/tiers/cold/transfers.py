"""Blocks on their way to a disk and from one, and what became of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtier.layout import KvSpec
from kvtier_daemon.codec.base import Codec
from kvtier_daemon.codec.frame import RAW
from kvtier_daemon.tiers.cold.segment_log import Segment


@dataclass(frozen=True, slots=True)
class Decoding:
    """How the frame of a block is encoded, what it decodes to, and what that costs its link. `lossy` is the
    one lossy codec that it may be of."""

    codec: int
    spec: KvSpec
    block_bytes: int
    load_bytes: int
    lossy: Codec | None = None


@dataclass(frozen=True, slots=True)
class Incoming:
    """A block to be read into a slot."""

    id: int
    segment: int
    page: int
    header_pages: int
    payload_bytes: int
    digest: bytes
    extent: int
    offset: int
    coding: Decoding | None = None  # without one the payload is brought as it is

    @property
    def load_bytes(self) -> int:
        """What it costs its link."""
        return self.coding.load_bytes if self.coding is not None else self.payload_bytes


Read = Callable[[Incoming, int], None]  # and an errno or 0  # and an errno or 0


@dataclass(frozen=True, slots=True)
class Coded:
    """What a block is encoded to: where that lies, and a header that is still to be stamped and sealed.
    `release` is called once it is written, or is not to be."""

    header: bytes
    codec: int
    payload_bytes: int
    extent: int
    offset: int
    release: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A block to be written: what it is, and the slot that has it. `digest` is empty where none is known.
    Where it has a `coded`, that is written. A `lossy` one was decoded from less than was saved; `position` is
    its first token's, where that is wanted."""

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
    coded: Coded | None = None
    lossy: bool = False
    position: int = 0

    @property
    def block_bytes(self) -> int:
        return self.spec.group_block_bytes(self.group)

    @property
    def codec(self) -> int:
        return self.coded.codec if self.coded is not None else RAW

    @property
    def payload_bytes(self) -> int:
        """What is written, but for the header; that lies in `place`."""
        return self.coded.payload_bytes if self.coded is not None else self.block_bytes

    @property
    def place(self) -> tuple[int, int]:
        lies = self.coded if self.coded is not None else self
        return lies.extent, lies.offset

    def release(self) -> None:
        """It is written, or is not to be."""
        if self.coded is not None:
            self.coded.release()


@dataclass(frozen=True, slots=True)
class Landed:
    """A block that is on disk, and where."""

    id: int
    segment: int
    page: int
    header_pages: int
    payload_bytes: int
    digest: bytes
    codec: int = RAW
    lossy: bool = False  # less is there than was saved


Wrote = Callable[[list[Landed], list[int]], None]


@dataclass(slots=True, eq=False)
class WriteBatch:
    """Writes that one fdatasync makes durable."""

    segment: Segment
    done: Wrote
    settled: asyncio.Future[None]
    ops: int = 0
    landed: list[Landed] = field(default_factory=list)
    rows: list[tuple[int, bytes]] = field(default_factory=list)  # where in the table, and what
    failed: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)  # ids whose memory had no page any longer
