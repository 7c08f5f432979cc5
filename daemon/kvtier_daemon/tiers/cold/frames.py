"""Blocks on their way between memory and disk: what the catalog says of them, as the cold tier wants it."""

from __future__ import annotations

import asyncio
import errno
import struct
from array import array
from collections.abc import Sequence

from kvtier.wire import DIGEST_BYTES
from kvtier_daemon.catalog.demotion import WritePlan as Described
from kvtier_daemon.codec.frame import LOSSY, PAGE, pages
from kvtier_daemon.tiers.cold.disk import HANGS_S
from kvtier_daemon.tiers.cold.tier import ColdTier
from kvtier_daemon.tiers.cold.transfers import Incoming, Landed, Outgoing, Wrote

SLOT = struct.Struct("<IIQQ")  # extent, zero, offset, generation
FRAME = struct.Struct("<IIIBBBB")  # segment, page, payload bytes, codec, header pages, flags, zero
NBYTES_AT, CODEC_AT, FLAGS_AT = 8, 12, 14
PLACE_BYTES = 8  # the first two
SETTLE_S = HANGS_S + 1
BEGIN_S, BEGIN_TRIES = 0.001, 50  # until the next segment is begun
WRITE_BLOCKS = 128  # planned in one go: each costs the loop some 20 us
DAMAGED = (errno.EBADMSG, errno.ENODATA)


def place_of(extents: Sequence[int], slot: bytes) -> tuple[int, int]:
    """Where this slot is: the number of its extent with the cold tier, and the offset in it."""
    extent, _, offset, _ = SLOT.unpack(slot)
    return extents[extent], offset


def incoming(
    number: int, frames: bytes, digests: bytes, at: int, place: tuple[int, int]
) -> Incoming:
    """The block of the frame at this place of the list, to be read to there."""
    segment, page, nbytes, _, header_pages, _, _ = FRAME.unpack_from(frames, at * FRAME.size)
    digest = digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]
    return Incoming(number, segment, page, header_pages, nbytes, digest, *place)


def outgoing(
    number: int, block: Described, place: tuple[int, int], lossy: bool, position: int = 0
) -> Outgoing:
    """A block to be written from there."""
    name = block.identity
    return Outgoing(
        number, name.space, block.space.spec, name.group, name.shard, name.key, block.parent, block.checksum,
        *place, lossy=lossy, position=position,
    )  # fmt: skip


def ids_of(blocks: Sequence[Outgoing]) -> bytes:
    return array("I", (block.id for block in blocks)).tobytes()


def frame_bytes(one: Landed) -> int:
    """What was written for it."""
    return one.header_pages * PAGE + pages(one.payload_bytes)


def frame_of(one: Landed) -> bytes:
    """Its frame, as the catalog has them."""
    flags = LOSSY if one.lossy else 0
    return FRAME.pack(
        one.segment, one.page, one.payload_bytes, one.codec, one.header_pages, flags, 0
    )


async def describe(cold: ColdTier, tenant: str, blocks: Sequence[Outgoing]) -> bool:
    """See to it that a start knows the spaces of these blocks."""
    for block in {block.space: block for block in blocks}.values():
        if not await cold.writer.describe(tenant, block.space, block.spec):
            return False
    return True


def begin(
    cold: ColdTier, tenant: str, blocks: Sequence[Outgoing], settle: Wrote
) -> tuple[int, asyncio.Future[bool]]:
    """Hand the leading blocks to the disk: how many, and, once `settle` was called, whether all of them
    are on it. What they were encoded to is let go then."""
    done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    begun: list[Outgoing] = []

    def over(landed: list[Landed], failed: list[int]) -> None:
        for block in begun:
            block.release()
        settle(landed, failed)
        if not done.done():
            done.set_result(not failed)

    count = cold.writer.write(tenant, blocks, over)
    begun += blocks[:count]
    return count, done


async def in_time(settled: asyncio.Future[bool]) -> bool:
    """Wait for what was handed to a disk, but not for one that hangs: what it has then, it has until it gives
    it back, and others are written elsewhere."""
    done, _ = await asyncio.wait([settled], timeout=SETTLE_S)
    return bool(done) and settled.result()
