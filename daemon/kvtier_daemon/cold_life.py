"""The cold tier's life in a daemon: opened, found again, used, looked after, switched, and closed.

What goes wrong here switches that tier off, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from kvtier.codec.losses import Losses
from kvtier.errors import TierError
from kvtier_daemon.config import Cold, Config
from kvtier_daemon.mover import Mover
from kvtier_daemon.scrub import Scrub
from kvtier_daemon.settings import Settings
from kvtier_daemon.standing import ON
from kvtier_daemon.switching import Switching
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.cold import ColdTier, open_volumes
from kvtier_daemon.tiers.log import Segment
from kvtier_daemon.tiers.recovery import Recovered
from kvtier_daemon.tiers.segment import ENTRY, codecs_of
from kvtier_daemon.tiers.shelf import Shelf
from kvtier_daemon.tiers.warm import Extent, WarmTier
from kvtier_daemon.unforeseen import Unforeseen
from kvtier_kernels import Mapping as MappedExtent

log = logging.getLogger(__name__)

RESTORE_ROWS = 4096  # in one go: about a millisecond
USE_S = 2.0
USE_BLOCKS, USE_PIECES = 1024, 64  # in one go: less than that
LAST_USE_S = 1.0
END_S = 10.0  # that an order has to be carried out in when the daemon ends; and then the tier to be closed


class ColdLife:
    """`tier` is None where the configuration has none; another one, once it was switched off and on."""

    def __init__(
        self,
        settings: Settings,
        tenants: Mapping[str, Tenant],
        warm: WarmTier,
        losses: Losses,
        unforeseen: Unforeseen,
    ) -> None:
        self.tier: ColdTier | None = None
        self.scrub: Scrub | None = None
        # By tenant: found on the disks, and of models that are stored otherwise now.
        self.unasked: Counter[str] = Counter()
        self._lost: Counter[str] = Counter()  # extents that clients took pages out of
        self._settings = settings
        self._tenants = tenants
        self._warm = warm
        self._losses = losses
        self._unforeseen = unforeseen
        self._switching: Switching | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._moving: asyncio.Task[None] | None = None
        self._unmapped = False  # an extent that the tier can't use, so none after it

    async def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Open its files, beside the loop. Nothing moves before `start`. Raises TierError."""
        tier = await self._another()
        self._take(tier)
        self._switching = Switching(
            loop, self._tenants, tier, self._another, self._take, self._stop
        )

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Move blocks, among these tasks, until `end_moving`."""
        self._tasks = tasks
        if self.tier is not None:
            self._move_of(self.tier)

    def end_moving(self) -> None:
        self._tasks = None  # nor does another one begin
        if self._moving is not None:
            self._moving.cancel()

    async def close(self) -> bool:
        """Have it known what is to be found again, and close the files; False where a disk hangs, now or when
        the tier was switched off or on."""
        if self._switching is None:
            return True
        let_go = await self._switching.settled(END_S)
        if self.tier is not None and self.is_there:
            self._remember(self.tier)
            let_go &= await self.tier.close(END_S)
        return let_go

    @property
    def is_there(self) -> bool:
        return self._switching is not None and self._switching.cold_is_there

    def state(self, tier: str) -> str:
        """In what state a tier is, of those that are switched."""
        return self._switching.state(tier) if self._switching is not None else ON

    def order(self, tier: str, order: str) -> dict[str, Any]:
        """Drain a tier, switch it off or on, or say how it is. TierError where that can't be."""
        if self._switching is None:
            raise TierError(f"{tier}: the daemon has no cold tier: there is nothing to switch")
        return self._switching.order(tier, order)

    def go_by(self, config: Config) -> None:
        """Go on with this configuration, which differs in what can be swapped alone."""
        if config.cold is None:
            return
        for tenant in self._tenants.values():
            if tenant.mover is not None:
                tenant.mover.go_by(**_ways(config, config.cold, tenant))
        if self.scrub is not None:
            self.scrub.set_rate(config.cold.scrub_bytes)

    def tend(self) -> None:
        """What has to be looked at now and then."""
        tier = self.tier
        if tier is None or not self.is_there:
            return
        for name, tenant in self._tenants.items():
            if tenant.mover is not None:
                self._unforeseen.tried(f"blocks of {name}", tenant.mover.tend)
                self._say_what_is_lost(name, tenant.mover, tier)
        if not self._unforeseen.tried("the cold tier", tier.tend):
            tier.give_up("it could not be looked after; the daemon's log says how")

    def _say_what_is_lost(self, tenant: str, mover: Mover, tier: ColdTier) -> None:
        lost = sum(map(tier.is_lost, mover.extents))
        if lost > self._lost[tenant]:
            log.error(
                "a client of tenant %s took pages out of the memory it shares with the daemon: the blocks in"
                " %d of its %d extents are neither written to disk nor read from it until the daemon is"
                " restarted", tenant, lost, len(mover.extents),
            )  # fmt: skip
        self._lost[tenant] = lost

    def map(self, tenant: Tenant, extent: Extent) -> None:
        """Have reads go into this extent, and writes come from it; in the order in which extents come."""
        tier = self.tier
        if tier is None or tenant.mover is None or self._unmapped or tier.said_off:
            return
        try:
            mapping = MappedExtent(extent.fd, extent.nbytes, True)
            mapping.guard()
            tenant.mover.extents.append(tier.register(mapping))
        except (OSError, MemoryError) as error:
            log.error("an extent can't be mapped for the cold tier: %s", error)
            self._unmapped = True
            tier.give_up(f"an extent can't be mapped: {error}")

    # --- one after the other -----------------------------------------------------------------

    async def _another(self) -> ColdTier:
        config = self._settings.config
        cold = config.cold
        assert cold is not None
        shares = {
            name: tenant.quota_bytes / config.warm.size_bytes
            for name, tenant in self._tenants.items()
        }
        volumes = await asyncio.to_thread(open_volumes, cold.directories, cold.size_bytes)
        return ColdTier(
            asyncio.get_running_loop(), volumes, cold.size_bytes, cold.segment_bytes, shares,
            self._leaving, cold.engine,
            secrets={name: tenant.secret for name, tenant in self._tenants.items()},
        )  # fmt: skip

    def _take(self, tier: ColdTier) -> None:
        """Have this cold tier used, and go on as with the one before; or, raising, leave all as it is."""
        config = self._settings.config
        cold = config.cold
        assert cold is not None
        movers = {
            name: Mover(
                name, tenant.catalog, tier, tenant.quota_bytes, losses=self._losses,
                **_ways(config, cold, tenant),
            )
            for name, tenant in self._tenants.items()
        }  # fmt: skip
        catalogs = {name: tenant.catalog for name, tenant in self._tenants.items()}
        scrub = Scrub(tier, catalogs, self._dirty, cold.scrub_bytes)
        if self.tier is not None:
            tier.inherit(self.tier)
        self.tier = tier
        for name, tenant in self._tenants.items():
            if tenant.mover is not None:
                movers[name].inherit(tenant.mover)
            tenant.mover = movers[name]
        if self.scrub is not None:
            scrub.counts.update(self.scrub.counts)
        self.scrub = scrub
        # In the order in which they came, so that each has the number that it would have had.
        self._unmapped = False
        for extent in self._warm.extents:
            self.map(self._tenants[extent.tenant], extent)
        if self._tasks is not None:
            self._move_of(tier)

    async def _stop(self, tier: ColdTier, timeout_s: float) -> bool:
        """Have nothing moved any more, and the files closed; whether that went well."""
        tier.shut()
        if self._moving is not None:
            self._moving.cancel()
            await asyncio.wait([self._moving])
        if tier is self.tier:  # else what is known has the numbers of the segments of another one
            self._remember(tier)
        return await tier.close(timeout_s)

    def _dirty(self, tenant: str, ids: bytes) -> None:
        mover = self._tenants[tenant].mover
        assert mover is not None
        mover.saved(ids)

    def _leaving(self, shelf: Shelf, segment: Segment) -> None:
        mover = self._tenants[shelf.tenant].mover
        assert mover is not None
        mover.leave(shelf, segment)

    # --- while it is there -------------------------------------------------------------------

    def _move_of(self, tier: ColdTier) -> None:
        assert self._tasks is not None
        self._moving = self._tasks.create_task(self._run(tier), name="cold")

    async def _run(self, tier: ColdTier) -> None:
        """Move blocks for as long as the daemon lives. What goes wrong here is no end of the warm tier."""
        try:
            await self._move(tier)
        except Exception as error:
            log.exception("the cold tier failed: the daemon goes on without it")
            tier.give_up(f"it failed: {error!r}; the daemon's log says how")

    async def _move(self, tier: ColdTier) -> None:
        """Find what is there, then move blocks."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._recover(tier), name="recover")
            for name, tenant in self._tenants.items():
                assert tenant.mover is not None
                tasks.create_task(tenant.mover.run(), name=f"mover {name}")
            if self.scrub is not None:
                tasks.create_task(self.scrub.run(), name="scrub")
            tasks.create_task(self._keep_use(tier), name="use")

    async def _recover(self, tier: ColdTier) -> None:
        started = time.monotonic()
        found, unasked = 0, Counter[str]()

        async def restored(name: str, one: Recovered, segment: int) -> None:
            nonlocal found
            tenant = self._tenants[name]
            for identity, spec, rows in one.parts:
                if not tenant.accepts(identity, spec, codecs_of(rows)):
                    log.error(
                        "cold: %s: the description of space %s does not have that identity: its %d frames are"
                        " misses", one.path, identity.hex()[:16], len(rows) // ENTRY.size,
                    )  # fmt: skip
                    continue
                asked = identity == tenant.identity_of(spec)
                for at in range(0, len(rows), RESTORE_ROWS * ENTRY.size):
                    some = rows[at : at + RESTORE_ROWS * ENTRY.size]
                    made = tenant.catalog.cold.restore(identity, spec, some, segment, one.used)[0]
                    found += made
                    unasked[name] += 0 if asked else made
                    await asyncio.sleep(0)

        await tier.recover(restored)
        seconds = time.monotonic() - started
        log.info("cold tier is there: %d blocks found in %.2f s", found, seconds)
        self.unasked = unasked
        if count := unasked.total():
            log.warning(
                "cold: %d blocks of them are stored otherwise than cold.codecs has their models stored now:"
                " nobody can ask for them, and they go with their segments", count,
            )  # fmt: skip
        for tenant in self._tenants.values():
            assert tenant.mover is not None
            tenant.mover.forget_early()

    async def _keep_use(self, tier: ColdTier) -> None:
        """Have the index know what is wanted, a few seconds later at most."""
        while True:
            await asyncio.sleep(USE_S)
            while self._note_use(tier) or tier.write_use(USE_PIECES):  # noqa: ASYNC110
                await asyncio.sleep(0)  # others have their turn

    def _note_use(self, tier: ColdTier) -> bool:
        """Note some of what is newly wanted; False if nothing is. What fails of one tenant is noted of the
        others."""
        noted: list[bytes] = []

        def note(tenant: Tenant) -> None:
            if places := tenant.catalog.cold.take_used(USE_BLOCKS):
                tier.note_use(places)
                noted.append(places)

        for name, tenant in self._tenants.items():
            self._unforeseen.tried(f"what is wanted of {name}", note, tenant)
            if noted:
                return True
        return False

    def _remember(self, tier: ColdTier) -> None:
        """Have the index know all that it should before the end, as far as there is time."""
        until = time.monotonic() + LAST_USE_S
        for tenant in self._tenants.values():
            if tenant.mover is not None:
                tenant.mover.bury()
        while time.monotonic() < until and (self._note_use(tier) or tier.write_use(USE_PIECES)):
            pass


class _Ways(TypedDict):
    through: bool
    daily_bytes: int
    admission: str
    codec: str
    codecs: Sequence[tuple[str, str]]


def _ways(config: Config, cold: Cold, tenant: Tenant) -> _Ways:
    """How and what is written of this tenant: what a mover is made with, and may be told anew."""
    return {
        "through": cold.write == "through",
        "daily_bytes": int(cold.daily_bytes * tenant.quota_bytes / config.warm.size_bytes),
        "admission": cold.admission,
        "codec": cold.codec,
        "codecs": cold.codecs,
    }
