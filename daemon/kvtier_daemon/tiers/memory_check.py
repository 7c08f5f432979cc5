"""Checks blocks in memory against the digests of their saves, slowly, while clients use them: blocks that
were taken over, and blocks that a client doubts."""

from __future__ import annotations

import asyncio
import logging
from array import array

from kvtier.units import MIB
from kvtier.wire import SLOT
from kvtier_daemon.catalog.blocks import ID_BYTES
from kvtier_daemon.catalog.demotion import WritePlan
from kvtier_daemon.tenant import Tenant
from kvtier_kernels import Mapping, xxh3_128

log = logging.getLogger(__name__)

RATE = 1024 * MIB  # bytes per second, of some 20 GiB that one core checks
PORTION = 16  # blocks


async def check_memory(tenant: Tenant, ids: bytes) -> None:
    """Forget those of these blocks whose bytes do not match their digest, if they have one. No block is held:
    one that has left meanwhile has another generation. A failure is logged."""
    try:
        await _check(tenant, ids)
    except Exception:
        log.exception(
            "warm: internal error: the blocks of tenant %s are not all checked", tenant.name
        )


async def _check(tenant: Tenant, ids: bytes) -> None:
    mappings = [Mapping(extent.fd, extent.nbytes, False) for extent in tenant.extents]
    for mapping in mappings:
        mapping.guard()
    for at in range(0, len(ids), PORTION * ID_BYTES):
        blocks = {
            one: block
            for one in array("I", ids[at : at + PORTION * ID_BYTES])
            if (block := _block(tenant, one)) is not None
            and block.checksum
            and SLOT.unpack(block.slot)[0] < len(mappings)
        }
        nbytes = sum(_nbytes(block) for block in blocks.values())
        bad = await asyncio.to_thread(_differing, mappings, blocks)
        gone = array("I", (one for one in bad if _block(tenant, one) == blocks[one]))
        if gone:
            tenant.catalog.forget_spoilt(gone.tobytes())
            tenant.spoilt_blocks += len(gone)
            log.error(
                "warm: %d blocks of tenant %s were changed after their save: forgotten", len(gone),
                tenant.name,
            )  # fmt: skip
        await asyncio.sleep(nbytes / RATE)


def _block(tenant: Tenant, one: int) -> WritePlan | None:
    """The block with this id, if it is in memory."""
    packed, catalog = array("I", (one,)).tobytes(), tenant.catalog
    try:
        if not catalog.blocks.store.ready(packed):
            return None
        (block,) = catalog.demotions.described(packed, catalog.blocks.store.slots(packed))
    except (ValueError, IndexError):  # no block has this id
        return None
    return block


def _nbytes(block: WritePlan) -> int:
    return block.space.block_bytes[block.identity.group]


def _differing(mappings: list[Mapping], blocks: dict[int, WritePlan]) -> list[int]:
    """The ids of the blocks whose bytes do not match their digest."""
    bad = []
    for one, block in blocks.items():
        extent, _, offset, _ = SLOT.unpack(block.slot)
        view = memoryview(mappings[extent])[offset : offset + _nbytes(block)]
        if xxh3_128(view) != block.checksum:
            bad.append(one)
    return bad
