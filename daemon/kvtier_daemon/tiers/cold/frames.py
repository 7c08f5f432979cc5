"""Blocks on their way between memory and disk.

A write has three forms: the catalog plans a `WritePlan`, the disk writes an `Outgoing`, and the catalog
stores the packed frame of `FramedBlocks`. A read is an `Incoming`."""

from __future__ import annotations

import asyncio
import errno
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtier.frame import RAW, Identity
from kvtier.layout import KvSpec
from kvtier.wire import SLOT
from kvtier_daemon.catalog.demotion import WritePlan
from kvtier_daemon.catalog.frames import FramedBlocks
from kvtier_daemon.codec.base import Codec
from kvtier_daemon.codec.encryption import FrameCipher
from kvtier_daemon.tiers.cold.disk import HANGS_S
from kvtier_daemon.tiers.cold.frame_memory import CompressedFrame

SETTLE_S = HANGS_S + 1
BEGIN_S, BEGIN_TRIES = 0.001, 50  # between tries to write while the next segment is begun
WRITE_BLOCKS = 128  # planned at once: each takes about 20 us of the loop
LINK = (1 << 32) - 1  # in the place of a segment's number: a frame in memory
DAMAGED = (errno.EBADMSG, errno.ENODATA, errno.ENOKEY)


@dataclass(frozen=True, slots=True)
class Decoding:
    """The codec of a frame, and the block that it decodes to. `lossy` is the only lossy codec that the frame
    may have. An encrypted frame is decrypted as the block `name`; without `cipher` there are no keys."""

    codec: int
    spec: KvSpec
    block_bytes: int
    lossy: Codec | None = None
    cipher: FrameCipher | None = None
    name: Identity | None = None


# The forms of blocks are not frozen: thousands are created at once, and that would take longer.
@dataclass(slots=True, eq=False)
class Incoming:
    """A block to read into a slot. `load_bytes` is what the read costs its link. Without `coding`, the
    payload is not decoded; otherwise `checksum` is that of the decoded block, after the read. With
    `compressed`, it is read from that frame, which is in memory."""

    id: int
    segment: int
    page: int
    header_pages: int
    payload_bytes: int
    digest: bytes
    extent: int
    offset: int
    load_bytes: int
    coding: Decoding | None = None
    checksum: bytes = b""
    compressed: CompressedFrame | None = None


CipherNow = Callable[[], FrameCipher | None]  # a reload may change the keys


def no_cipher() -> None:
    """The cipher of a tier without keys."""


Read = Callable[[Incoming, int], None]  # the block, and an errno or 0
AllRead = Callable[[Sequence[Incoming], Sequence[int]], None]  # the same of several blocks


def keep() -> None:
    """The `release` of blocks whose payload needs none."""


@dataclass(slots=True, eq=False)
class Outgoing:
    """A block to write, and its slot. `digest` is empty if it is unknown. `lossy`: the block was decoded from
    a lossy frame. `position` is that of its first token, if a codec needs it.

    An encoded block also has an unsealed header, and its payload is at `encoded_at`. `release` frees that
    memory: it must be called when the block was written, or will not be written."""

    id: int
    space: bytes
    spec: KvSpec
    group: int
    shard: int
    key: bytes
    parent: bytes
    digest: bytes
    block_bytes: int
    extent: int
    offset: int
    lossy: bool = False
    position: int = 0
    codec: int = RAW
    header: bytes = b""
    payload_bytes: int = 0  # by default those of the block
    encoded_at: tuple[int, int] | None = None
    release: Callable[[], None] = keep

    def __post_init__(self) -> None:
        self.payload_bytes = self.payload_bytes or self.block_bytes


Wrote = Callable[[FramedBlocks, list[int]], None]  # what is on disk, and the ids that are not


def place_of(extents: Sequence[int], slot: bytes) -> tuple[int, int]:
    """Return the cold tier's number of this slot's extent, and the offset in it."""
    extent, _, offset, _ = SLOT.unpack(slot)
    return extents[extent], offset


def outgoing(
    number: int, plan: WritePlan, place: tuple[int, int], lossy: bool, position: int = 0
) -> Outgoing:
    """Return the block that the catalog planned to write from this place."""
    name = plan.identity
    return Outgoing(
        number, name.space, plan.space.spec, name.group, name.shard, name.key, plan.parent, plan.checksum,
        plan.space.block_bytes[name.group], *place, lossy, position,
    )  # fmt: skip


def ids_of(blocks: Sequence[Outgoing]) -> bytes:
    return array("I", (block.id for block in blocks)).tobytes()


class WritesBlocks(Protocol):
    """The part of the cold tier that writes."""

    async def describe(self, tenant: str, space: bytes, spec: KvSpec) -> bool: ...
    def write(self, tenant: str, blocks: Sequence[Outgoing], done: Wrote) -> int: ...


async def describe(cold: WritesBlocks, tenant: str, blocks: Sequence[Outgoing]) -> bool:
    """Make sure that a start finds the descriptions of these blocks' spaces."""
    for block in {block.space: block for block in blocks}.values():
        if not await cold.describe(tenant, block.space, block.spec):
            return False
    return True


def begin(
    cold: WritesBlocks, tenant: str, blocks: Sequence[Outgoing], settle: Wrote
) -> tuple[int, asyncio.Future[bool]]:
    """Start to write the leading blocks; return their number. The future is done after `settle` was called
    and the memory of encoded blocks was released; its result says whether all blocks are on disk."""
    done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    begun: list[Outgoing] = []

    def wrote(landed: FramedBlocks, failed: list[int]) -> None:
        for block in begun:
            block.release()
        settle(landed, failed)
        if not done.done():
            done.set_result(not failed)

    count = cold.write(tenant, blocks, wrote)
    begun += blocks[:count]
    return count, done


async def in_time(settled: asyncio.Future[bool]) -> bool:
    """Wait for a write, but not for a disk that hangs: its blocks stay in use until it returns them, and
    others are written to other disks."""
    done, _ = await asyncio.wait([settled], timeout=SETTLE_S)
    return bool(done) and settled.result()
