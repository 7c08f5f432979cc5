"""Gives a tenant new memory after a user has left it, because a mapping cannot be taken back.

The store gives no slot of the retired extents to a block from then on. Their blocks leave memory: those on
disk at once, the others after a drain, or after KEEP_S. When an extent has no blocks, its pages are freed and
an extent of the same size is allocated.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from kvtier.units import format_bytes
from kvtier_daemon.catalog import Catalog
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.warm import WarmTier

log = logging.getLogger(__name__)

PORTION = 2048  # blocks that are evicted at once
KEEP_S = 30.0  # for the writes of blocks that are only in memory
POLL_S, LONGEST_POLL_S = 0.02, 1.0


def retire(tenant: Tenant, warm: WarmTier) -> int:
    """Use no slot of the tenant's present extents from now on. Return their bytes."""
    store, nbytes = tenant.catalog.blocks.store, 0
    for number, extent in enumerate(tenant.extents):
        if not extent.is_retired:
            store.retire(number)
            extent.is_retired = True
            nbytes += extent.nbytes
    warm.forget_kept(tenant.name)
    tenant.end_forget_count()
    return nbytes


def _leave(catalog: Catalog, is_over: bool) -> bool:
    """Evict some blocks from retired extents; return whether there may be more. With `is_over`, no match
    finds those that a lease holds; they stay until it ends."""
    more, left = catalog.blocks.leave_retired(is_over, PORTION)
    if is_over and not more and left:
        catalog.forget_ids(left)
    return more


async def renew(
    tenant: Tenant, warm: WarmTier, grows: Callable[[], None], drains: Callable[[], bool],
    before: asyncio.Task[None] | None = None,
) -> None:  # fmt: skip
    """Replace the retired extents, after the end of an earlier call that was cancelled. `grows` is called
    when memory is about to be allocated; `drains` tells whether the operator drains memory."""
    if before is not None:
        await asyncio.wait([before])
    try:
        await _renew(tenant, warm, grows, drains)
    except Exception:
        log.exception("internal error: tenant %s has less memory until a restart", tenant.name)


async def _renew(
    tenant: Tenant, warm: WarmTier, grows: Callable[[], None], drains: Callable[[], bool]
) -> None:
    store = tenant.catalog.blocks.store
    left = {
        number: extent
        for number, extent in enumerate(tenant.extents)
        if extent.is_retired and not extent.is_empty
    }
    tenant.tier.writes.drain.begin()
    until, pause_s, is_over = time.monotonic() + KEEP_S, POLL_S, False

    def end_drain() -> None:
        if not drains():
            tenant.tier.writes.drain.end()

    try:
        while left:
            if not is_over and (tenant.tier.writes.drain.is_done or time.monotonic() >= until):
                is_over = True
                end_drain()
            while _leave(tenant.catalog, is_over):  # noqa: ASYNC110
                await asyncio.sleep(0)
            empty = [number for number in left if not store.retired_bytes(number)]
            for number in empty:
                extent = left.pop(number)
                tenant.tier.release(number)
                await asyncio.to_thread(extent.free)
                warm.replace(extent)
                grows()
                log.info(
                    "warm: freed %s that users who left tenant %s may have mapped",
                    format_bytes(extent.nbytes), tenant.name,
                )  # fmt: skip
            await asyncio.sleep(pause_s)
            pause_s = POLL_S if empty else min(LONGEST_POLL_S, 2 * pause_s)
    finally:
        if not is_over:
            end_drain()
