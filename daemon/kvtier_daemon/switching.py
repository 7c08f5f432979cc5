"""Tiers drained, switched off and on again while the daemon serves. A restart knows nothing of it.

cold   drain  nothing more is written; what was being written ends; it is read as before
       off    its files are closed, so that the disk can go; what is there is a miss, and stays known
       on     opened again, looked through as at a start, and used
warm   drain  what is in memory alone is written to the disks, and from then on what is saved, at once
       on     as before
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from kvtier.errors import TierError
from kvtier_daemon.standing import (
    CLOSING,
    DRAINED,
    DRAINING,
    OFF,
    ON,
    OPENING,
    RECOVERING,
    SWITCHED_OFF,
)  # fmt: skip
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.cold import ColdTier

log = logging.getLogger(__name__)

LOOK_S = 0.02
CLOSE_S = SETTLE_S = 10.0
USED_BLOCKS = 65_536
DROP_SEGMENTS = 8  # in one go


class Switching:
    """Of a daemon that has a cold tier. `open_cold` makes another one, beside the loop, raising TierError;
    `take` has the tenants use it; `stop` ends what moves blocks to and from it, and closes it in so many
    seconds: whether that went well."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        tenants: Mapping[str, Tenant],
        cold: ColdTier,
        open_cold: Callable[[], Awaitable[ColdTier]],
        take: Callable[[ColdTier], None],
        stop: Callable[[ColdTier, float], Awaitable[bool]],
    ) -> None:
        self._loop = loop
        self._tenants = tenants
        self._cold = cold
        self._open_cold = open_cold
        self._take = take
        self._stop = stop
        self._states = {"warm": ON, "cold": ON}
        self._failures = {"warm": "", "cold": ""}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._hangs = False  # a disk that was to let go

    @property
    def cold_is_there(self) -> bool:
        """Whether it has files open, and may be looked after."""
        return self._states["cold"] not in (CLOSING, OFF, OPENING)

    async def settled(self, timeout_s: float) -> bool:
        """Wait until the cold tier is neither being opened nor being closed; False if that takes longer, or a
        disk has not let go of files, and perhaps memory, of ours."""
        if self._states["cold"] in (CLOSING, OPENING):
            await asyncio.wait([self._tasks["cold"]], timeout=timeout_s)
        return not self._hangs and self._states["cold"] not in (CLOSING, OPENING)

    def state(self, tier: str) -> str:
        state = self._states[tier]
        return RECOVERING if tier == "cold" and state == ON and self._is_recovering else state

    @property
    def _is_recovering(self) -> bool:
        return self._cold.recovering > 0 and not self._cold.given_up

    def report(self, tier: str) -> dict[str, Any]:
        """How it is, and how much is left to do of what was asked last."""
        movers = [tenant.mover for tenant in self._tenants.values()]
        moving = sum(
            tenant.catalog.cold.writing + tenant.catalog.cold.reading
            for tenant in self._tenants.values()
        )
        left = moving
        if tier == "warm":
            left = sum(mover.left_to_drain for mover in movers if mover is not None)
        return {
            "tier": tier,
            "state": self.state(tier),
            "left_blocks": left,
            "failure": self._failures[tier],
        }

    def order(self, tier: str, order: str) -> dict[str, Any]:
        """Begin what is asked for. Raises TierError where that makes no sense."""
        state = self.state(tier)
        if order != "status":
            if tier == "warm" and order == "off":
                raise TierError(
                    "warm: memory that engines have mapped can't be taken away: drain it, then stop"
                    " the daemon"
                )
            if state in (OPENING, CLOSING):
                raise TierError(f"{tier}: is {state}: wait until that is over")
            begin = getattr(self, f"_{order}_{tier}")
            self._failures[tier] = ""
            begin(state)
        return self.report(tier)

    def _begin(
        self, tier: str, state: str, work: Callable[[], Awaitable[None]], failed: str = ""
    ) -> None:
        """Go on with this instead of what was asked before; `failed` is the state that it fails to."""
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
                log.exception("%s tier: what was asked for failed", tier)
                self._failures[tier] = f"it failed: {error!r}; the daemon's log says how"
            else:
                return
            self._over(tier, failed or state)

        self._tasks[tier] = self._loop.create_task(run(), name=f"switch {tier}")

    def _over(self, tier: str, state: str) -> None:
        self._states[tier] = state
        log.info("%s tier: %s", tier, state)

    # --- warm --------------------------------------------------------------------------------

    def _drain_warm(self, state: str) -> None:
        if not (self.cold_is_there and self._cold.takes):
            why = self._cold.failure or f"it is {self.state('cold')}"
            raise TierError(
                f"warm: the cold tier takes nothing ({why}): there is nowhere to write to"
            )
        for tenant in self._tenants.values():
            assert tenant.mover is not None
            tenant.mover.drain(True)

        async def drained() -> None:
            while not self._is_drained():  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
            self._over("warm", DRAINED)

        self._begin("warm", DRAINING, drained)

    def _is_drained(self) -> bool:
        # They are others once the cold tier was off.
        movers = [tenant.mover for tenant in self._tenants.values()]
        return all(mover is None or mover.is_drained for mover in movers)

    def _on_warm(self, state: str) -> None:
        for tenant in self._tenants.values():
            assert tenant.mover is not None
            tenant.mover.drain(False)
        if (task := self._tasks.pop("warm", None)) is not None:
            task.cancel()
        self._over("warm", ON)

    # --- cold --------------------------------------------------------------------------------

    def _drain_cold(self, state: str) -> None:
        if state == OFF:
            raise TierError("cold: is off: nothing of it is left to drain")
        self._cold.accepts = False

        async def drained() -> None:
            for name in self._tenants:
                await self._cold.settled(name)
            colds = [tenant.catalog.cold for tenant in self._tenants.values()]
            while any(cold.writing for cold in colds):  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
            self._failures["cold"] = await self._cold.flush()
            self._over("cold", DRAINED)

        self._begin("cold", DRAINING, drained)

    def _off_cold(self, state: str) -> None:
        if state == OFF:
            return
        if self._is_recovering:
            raise TierError("cold: is still looking at what it has: try again when it is on")

        async def close() -> None:
            cold = self._cold
            cold.recovered.clear()  # what is forgotten from now on is so when it is on again
            cold.said_off = SWITCHED_OFF
            self._hangs = True  # until it has let go
            closed = await self._stop(cold, CLOSE_S)
            until = self._loop.time() + SETTLE_S
            # What is with a disk that has not let go is never heard of again.
            while closed and not self._nothing_moves() and self._loop.time() < until:  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
            # What is with the disk may come back yet, to files and memory that are ours.
            self._hangs = not (closed and self._nothing_moves())
            if self._hangs:
                self._failures["cold"] = (
                    "a disk hangs, so its files stay open; restart the daemon when it is mended"
                )
            self._over("cold", OFF)

        self._begin("cold", CLOSING, close, OFF)

    def _on_cold(self, state: str) -> None:
        if state in (DRAINING, DRAINED):
            self._tasks.pop("cold").cancel()
            self._cold.accepts = True
            self._over("cold", ON)
        if state != OFF:
            return
        if self._hangs:
            raise TierError("cold: a disk hangs with files of ours: restart the daemon")

        async def open_again() -> None:
            cold = None
            try:
                cold = await self._open_cold()
                await use(cold)
            except Exception as error:
                told = str(error).removeprefix("cold: ")
                why = told if isinstance(error, TierError) else "the daemon's log says why"
                self._cold.said_off = (
                    f"switched off, and not on again: {why}; `kvtier tier on cold` tries once more"
                )
                if cold is not None:
                    cold.said_off = self._cold.said_off
                    self._hangs = not await self._stop(cold, CLOSE_S)
                raise
            self._over("cold", ON)

        async def use(cold: ColdTier) -> None:
            for number in range(len(self._cold.segments)):
                for tenant in self._tenants.values():
                    tenant.catalog.cold.drop_segment(number)
                if number % DROP_SEGMENTS == 0:
                    await asyncio.sleep(0)
            for tenant in self._tenants.values():
                while tenant.catalog.cold.take_used(USED_BLOCKS):  # of segments with other numbers
                    pass
            self._take(cold)
            self._cold = cold

        self._begin("cold", OPENING, open_again, OFF)

    def _nothing_moves(self) -> bool:
        colds = [tenant.catalog.cold for tenant in self._tenants.values()]
        return not any(cold.reading or cold.writing for cold in colds)
