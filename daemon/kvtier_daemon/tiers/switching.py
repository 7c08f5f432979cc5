"""Drains tiers and switches them off and on while the daemon serves. A restart resets all tiers to `on`.

cold   drain  refuse new writes; finish those in progress; continue to read
       off    close the files, so that the disk can be removed; its blocks are misses and stay known
       on     open the directories again, scan them as at a start, and use them
warm   drain  write all blocks that are only in memory; write new blocks when they are saved
       on     end the drain
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from kvtier.errors import TierError
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.cold.flusher import UNFIT
from kvtier_daemon.tiers.cold.tier import ColdTier
from kvtier_daemon.tiers.states import (
    CLOSING,
    DRAINED,
    DRAINING,
    OFF,
    ON,
    OPENING,
    RECOVERING,
    SWITCHED_OFF,
)  # fmt: skip

log = logging.getLogger(__name__)

POLL_S = 0.02
CLOSE_S = SETTLE_S = 10.0
USED_BLOCKS = 65_536
DROP_SEGMENTS = 8  # per iteration of the loop


class Switching:
    """Switches the tiers of a daemon with a cold tier. `open_cold` opens another cold tier, or raises
    TierError; `take` makes the tenants use it; `stop` ends its transfers and closes it within a time, and
    returns whether that succeeded."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, tenants: Mapping[str, Tenant], cold: ColdTier,
        open_cold: Callable[[], Awaitable[ColdTier]], take: Callable[[ColdTier], None],
        stop: Callable[[ColdTier, float], Awaitable[bool]],
    ) -> None:  # fmt: skip
        self._loop = loop
        self._tenants = tenants
        self._cold = cold
        self._open_cold = open_cold
        self._use = take
        self._stop = stop
        self._states = {"warm": ON, "cold": ON}
        self._failures = {"warm": "", "cold": ""}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._hangs = False  # a disk still holds files that were to be closed

    @property
    def cold_is_open(self) -> bool:
        return self._states["cold"] not in (CLOSING, OFF, OPENING)

    async def settled(self, timeout_s: float) -> bool:
        """Wait until the cold tier is neither being opened nor being closed; False if that takes longer, or
        if a disk that hangs still uses files, and perhaps memory."""
        if self._states["cold"] in (CLOSING, OPENING):
            await asyncio.wait([self._tasks["cold"]], timeout=timeout_s)
        return not self._hangs and self._states["cold"] not in (CLOSING, OPENING)

    def state(self, tier: str) -> str:
        state = self._states[tier]
        return RECOVERING if tier == "cold" and state == ON and self._is_recovering else state

    @property
    def _is_recovering(self) -> bool:
        return self._cold.recovery.scanning > 0 and not self._cold.directories.given_up

    def report(self, tier: str) -> dict[str, Any]:
        """Return the state of a tier, and how many blocks its last order has yet to move."""
        moving = sum(
            tenant.catalog.demotions.writing + tenant.catalog.promotions.reading
            for tenant in self._tenants.values()
        )
        left = moving
        if tier == "warm":
            left = sum(tenant.tier.writes.drain.left_blocks for tenant in self._tenants.values())
        return {
            "tier": tier,
            "state": self.state(tier),
            "left_blocks": left,
            "failure": self._failures[tier],
        }

    def order(self, tier: str, order: str) -> dict[str, Any]:
        """Start to carry out an order. Raises TierError if the state does not permit it."""
        state = self.state(tier)
        if order in ("hand-over", "warm-up"):
            raise TierError(
                f"{tier}: only the remote tier can do that: `kvtier tier {order} remote`"
            )
        if order != "status":
            if tier == "warm" and order == "off":
                raise TierError(
                    "warm: cannot be switched off, because engines have mapped its memory: "
                    "drain it, then stop the daemon"
                )
            if state in (OPENING, CLOSING):
                raise TierError(f"{tier}: is {state}: wait until that has ended, then try again")
            begin = getattr(self, f"_{order}_{tier}")
            self._failures[tier] = ""
            begin(state)
        return self.report(tier)

    def _begin(
        self, tier: str, state: str, work: Callable[[], Awaitable[None]], failed: str = ""
    ) -> None:
        """Replace the previous order by this one; `failed` is the state after a failure."""
        if (before := self._tasks.pop(tier, None)) is not None:
            before.cancel()
        self._states[tier] = state
        log.info("%s tier: %s", tier, state)

        async def run() -> None:
            try:
                await work()
            except TierError as error:
                log.error("%s", error)
                self._failures[tier] = str(error).removeprefix(f"{tier}: ")
            except Exception as error:
                log.exception("%s tier: switching failed", tier)
                self._failures[tier] = f"internal error: {error!r}; see the daemon's log"
            else:
                return
            self._enter(tier, failed or state)

        self._tasks[tier] = self._loop.create_task(run(), name=f"switch {tier}")

    def _enter(self, tier: str, state: str) -> None:
        self._states[tier] = state
        log.info("%s tier: %s", tier, state)

    # --- warm --------------------------------------------------------------------------------

    def _drain_warm(self, state: str) -> None:
        if not (self.cold_is_open and self._cold.writer.is_on):
            why = self._cold.failure or f"it is {self.state('cold')}"
            raise TierError(
                f"warm: cannot be drained, because the cold tier does not accept writes ({why})"
            )
        for tenant in self._tenants.values():
            tenant.tier.writes.drain.begin()

        async def drained() -> None:
            # Asked each time: the movers are replaced when the cold tier is switched on.
            while not all(one.tier.writes.drain.is_done for one in self._tenants.values()):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
            unfit = sum(len(tenant.tier.writes.drain.unfit) for tenant in self._tenants.values())
            if unfit:
                self._failures["warm"] = f"{unfit:,} blocks stay only in memory: {UNFIT}"
                log.warning("warm tier: %s", self._failures["warm"])
            self._enter("warm", DRAINED)

        self._begin("warm", DRAINING, drained)

    def _on_warm(self, state: str) -> None:
        for tenant in self._tenants.values():
            tenant.tier.writes.drain.end()
        if (task := self._tasks.pop("warm", None)) is not None:
            task.cancel()
        self._enter("warm", ON)

    # --- cold --------------------------------------------------------------------------------

    def _drain_cold(self, state: str) -> None:
        if state == OFF:
            raise TierError("cold: is off, so it cannot be drained")
        self._cold.writer.accepts = False

        async def drained() -> None:
            for name in self._tenants:
                await self._cold.writer.settled(name)
            catalogs = [tenant.catalog for tenant in self._tenants.values()]
            while any(catalog.demotions.writing for catalog in catalogs):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
            self._failures["cold"] = await self._cold.flush()
            self._enter("cold", DRAINED)

        self._begin("cold", DRAINING, drained)

    def _off_cold(self, state: str) -> None:
        if state == OFF:
            return
        if self._is_recovering:
            raise TierError("cold: is still reading its segments: try again when it is on")

        async def close() -> None:
            cold = self._cold
            cold.recovery.complete.clear()  # later forgets are repeated after the next scan
            cold.off_reason = SWITCHED_OFF
            self._hangs = True  # until its files are closed
            closed = await self._stop(cold, CLOSE_S)
            until = self._loop.time() + SETTLE_S
            # Transfers of a disk that hangs never complete.
            while closed and not self._nothing_moves() and self._loop.time() < until:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
            # A transfer may still complete, and use files and memory of the daemon.
            self._hangs = not (closed and self._nothing_moves())
            if self._hangs:
                self._failures["cold"] = (
                    "a disk hangs, so its files stay open; repair it, then restart the daemon"
                )
            self._enter("cold", OFF)

        self._begin("cold", CLOSING, close, OFF)

    def _on_cold(self, state: str) -> None:
        if state in (DRAINING, DRAINED):
            self._tasks.pop("cold").cancel()
            self._cold.writer.accepts = True
            self._enter("cold", ON)
        if state != OFF:
            return
        if self._hangs:
            raise TierError(
                "cold: a hanging disk still holds files of the daemon: restart the daemon"
            )

        async def open_again() -> None:
            cold = None
            try:
                cold = await self._open_cold()
                await use(cold)
            except Exception as error:
                told = str(error).removeprefix("cold: ")
                why = told if isinstance(error, TierError) else "see the daemon's log"
                self._cold.off_reason = (
                    f"switched off, and switching it on failed: {why}; run `kvtier tier on "
                    "cold` to retry"
                )
                if cold is not None:
                    cold.off_reason = self._cold.off_reason
                    self._hangs = not await self._stop(cold, CLOSE_S)
                raise
            self._enter("cold", ON)

        async def use(cold: ColdTier) -> None:
            for number in range(len(self._cold.table.segments)):
                for tenant in self._tenants.values():
                    tenant.catalog.segments.drop_segment(number)
                if number % DROP_SEGMENTS == 0:
                    await asyncio.sleep(0)
            for tenant in self._tenants.values():
                while tenant.catalog.segments.take_used(
                    USED_BLOCKS
                ):  # of segments with other numbers; drop them
                    pass
            self._use(cold)
            self._cold = cold

        self._begin("cold", OPENING, open_again, OFF)

    def _nothing_moves(self) -> bool:
        catalogs = [tenant.catalog for tenant in self._tenants.values()]
        return not any(one.promotions.reading or one.demotions.writing for one in catalogs)
