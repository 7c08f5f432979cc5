"""Writes the blocks that are only in memory before the daemon stops."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from kvtier.units import format_bytes
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.cold.flusher import UNFIT
from kvtier_daemon.tiers.cold.mover import Mover
from kvtier_daemon.tiers.cold.tier import ColdTier

log = logging.getLogger(__name__)

POLL_S = 0.01
TOLD_S = 1.0
STALLS_S = 10.0
SPARE_SEGMENTS = 2  # of a tenant in a directory: the open one, and the one that is reused next
HURRIED = "the daemon was told to end at once"
FULL = "the cold tier has no room for them"
STALLED = f"no block was written for {STALLS_S:.0f} s"


class LastWrites:
    """The last writes of a daemon that serves no clients. Like a drain, they ignore the daily budget and the
    admission. Blocks with a TTL are not written and do not count."""

    def __init__(
        self, tier: ColdTier, tenants: Mapping[str, Tenant], movers: Mapping[str, Mover]
    ) -> None:
        self._tier = tier
        self._catalogs = [tenant.catalog for tenant in tenants.values()]
        self._movers = movers
        self._clock = asyncio.get_running_loop().time
        self._began = self._wrote_at = self._clock()
        self._before = self._left
        self._bytes_before = {name: mover.bytes["written"] for name, mover in movers.items()}

    @property
    def _written(self) -> int:
        return sum(mover.counts["written"] for mover in self._movers.values())

    @property
    def _left(self) -> int:
        return sum(
            one.demotions.in_memory_alone - len(one.blocks.expiring) for one in self._catalogs
        )

    @property
    def _is_done(self) -> bool:
        """Whether no write is left, not even one that is planned and not submitted: a stop would drop it."""
        drains = (mover.writes.drain for mover in self._movers.values())
        return all(drain.is_done for drain in drains) and not any(
            one.demotions.writing for one in self._catalogs
        )

    async def run(self, most_s: float, otherwise: str, told: Callable[[str], None]) -> None:
        """Write for at most this long; `told` gets the progress. Then log how many blocks were kept, how many
        were not (`otherwise` says what happens to them), and why. A cancellation ends it at once."""
        why = HURRIED
        try:
            why = await self._write(most_s, told)
        finally:
            # The stop also completes the writes that are submitted; they count as left.
            nbytes = sum(self._new_bytes(name) for name in self._movers)
            left = max(0, self._left)
            kept = max(0, self._before - left)
            if kept or left:
                log.log(
                    logging.WARNING if left else logging.INFO,
                    "cold: before the stop, %s were written to disk in %.1f s: kept %d blocks, %s %d%s",
                    format_bytes(nbytes), self._clock() - self._began, kept, otherwise, left,
                    f": {why}" if left else "",
                )  # fmt: skip
            else:
                log.info("cold: before the stop, nothing was written: no block was only in memory")

    async def _write(self, most_s: float, told: Callable[[str], None]) -> str:
        """Return why blocks are left, if any are."""
        if not most_s:
            return "cold.stop_s is 0"
        why, written = "", -1
        # The writes reuse segments, and blocks in memory lose their frames there: they are written next.
        while not why and self._left > 0 and written < self._written:
            written = self._written
            for name, mover in self._movers.items():
                mover.writes.drain.begin_last(self._room(name))
            why = await self._round(most_s, told)
        unfit = any(mover.writes.drain.unfit for mover in self._movers.values())
        return why or (UNFIT if unfit else FULL)

    async def _round(self, most_s: float, told: Callable[[str], None]) -> str:
        told_at, written = -TOLD_S, self._written
        while not self._is_done:
            now = self._clock()
            if self._written > written:
                written, self._wrote_at = self._written, now
            if not self._tier.writer.is_on:
                return f"the disks do not accept writes ({self._tier.failure or 'drained'})"
            if now > self._wrote_at + STALLS_S:
                return STALLED
            if now > self._began + most_s:
                return f"the {most_s:g} s of cold.stop_s are over"
            if now > told_at + TOLD_S:
                told_at = now
                told(f"writing {self._left} blocks that are only in memory")
            await asyncio.sleep(POLL_S)
        return ""

    def _new_bytes(self, name: str) -> int:
        return self._movers[name].bytes["written"] - self._bytes_before[name]

    def _room(self, name: str) -> int:
        """How many bytes of this tenant have room, without reusing a segment that was written since."""
        files = [one.stores[name].files for one in self._tier.directories.attached]
        room = sum(one.usable_bytes - SPARE_SEGMENTS * one.segment_bytes for one in files)
        return max(0, room - self._new_bytes(name))
