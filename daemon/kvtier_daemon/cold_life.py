"""The cold tier's life in a daemon: opened, found again, used, looked after, switched, and closed.

What goes wrong here switches that tier off, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypedDict

from kvtier.codec.losses import Losses
from kvtier.errors import TierError
from kvtier_daemon.claim import InUseError, is_alive
from kvtier_daemon.config import Cold, Config
from kvtier_daemon.index import Change
from kvtier_daemon.index_process import Child
from kvtier_daemon.mover import Mover
from kvtier_daemon.scrub import Scrub
from kvtier_daemon.settings import Settings
from kvtier_daemon.standing import ON
from kvtier_daemon.switching import Switching
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.cold import ColdTier, Restored, open_volumes, segments_of
from kvtier_daemon.tiers.log import Segment
from kvtier_daemon.tiers.recovery import Recovered
from kvtier_daemon.tiers.segment import ENTRY, codecs_of
from kvtier_daemon.tiers.shelf import Shelf
from kvtier_daemon.tiers.volume import Volume, shares_of
from kvtier_daemon.tiers.warm import Extent, WarmTier
from kvtier_daemon.unforeseen import Unforeseen
from kvtier_kernels import Mapping as MappedExtent

log = logging.getLogger(__name__)

RESTORE_ROWS = 4096  # in one go: about a millisecond
USE_S = 2.0
USE_BLOCKS, USE_PIECES = 1024, 64  # in one go: less than that
LAST_USE_S = 1.0
OPENERS = 16  # directories that are opened at once
OPEN_S = 5.0  # that a start waits for directories to be opened; the others follow
AGAIN_S, LONGEST_AGAIN_S = 1.0, 30.0  # until a directory that could not be used is tried again
LOST_S = 0.2  # how often it is looked whether a directory was lost
DROP_SEGMENTS = 8  # in one go
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
        self._ended = False
        self._openings: dict[Path, asyncio.Task[Volume]] = {}
        self._openers = ThreadPoolExecutor(OPENERS, "kvtier-open")
        # Of directories that were lost: on which device they were, what their indexes could not write.
        self._devices: dict[Path, int] = {}
        self._unwritten: dict[Path, Change] = {}

    async def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Open its files, outside the loop, as far as that goes in `OPEN_S`: `start` goes on. Nothing moves
        before that. Raises TierError where the configuration is wrong."""
        tier = await self._another(is_start=True)
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
        self._ended = True
        if self._moving is not None:
            self._moving.cancel()

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    async def close(self) -> bool:
        """Have it known what is to be found again, and close the files; False where a disk hangs, now or when
        the tier was switched off or on."""
        if self._switching is None:
            return True
        let_go = await self._switching.settled(END_S)
        self._call_off()
        if self.tier is not None and self.is_there:
            self._remember(self.tier)
            let_go &= await self.tier.close(END_S)
        return let_go

    def mappings(self) -> list[MappedExtent]:
        """The arena's memory, as the disks have it."""
        return self.tier.mappings() if self.tier is not None else []

    @property
    def hangs(self) -> bool:
        """Whether a disk does: what waits for it can't be ended."""
        return self.tier is not None and any(drive.hangs for drive in self.tier.drives)

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
        if tier is None or tenant.mover is None or self._unmapped or tier.said_off or self._ended:
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

    async def _another(self, is_start: bool = False) -> ColdTier:
        """Another cold tier, of the directories that can be used. Raises TierError where none of them
        can and this is no start, and where a start finds one that another daemon uses."""
        cold, shares = self._shares()
        self._devices.clear()
        for directory in cold.directories:
            self._openings[directory] = self._loop.create_task(self._opened(directory))
        try:
            volumes, missing = await self._open_some(cold.directories, is_start)
            if not volumes and not is_start:
                raise TierError("; ".join(missing.values()))
            return ColdTier(
                self._loop, volumes, cold.size_bytes, cold.segment_bytes, shares, self._leaving,
                cold.engine, missing=missing,
                secrets={name: tenant.secret for name, tenant in self._tenants.items()},
            )  # fmt: skip
        except BaseException:
            self._call_off()
            raise

    def _shares(self) -> tuple[Cold, dict[str, float]]:
        """What is configured, and each tenant's share of it. Raises TierError where that is too little."""
        config = self._settings.config
        cold = config.cold
        assert cold is not None
        shares = {
            name: tenant.quota_bytes / config.warm.size_bytes
            for name, tenant in self._tenants.items()
        }
        for directory in cold.directories:
            _, nbytes = shares_of(directory, cold.size_bytes // len(cold.directories))
            segments_of(directory, nbytes, cold.segment_bytes, shares)
        return cold, shares

    async def _open_some(
        self, directories: Sequence[Path], is_start: bool
    ) -> tuple[list[Volume], dict[Path, str]]:
        """Those that are opened in time, and why the others are not: each goes on being opened, or is tried
        again. What is no start waits for one of them at least."""
        until = self._loop.time() + OPEN_S
        while pending := {one for one in self._openings.values() if not one.done()}:
            opened = [one for one in self._openings.values() if one.done() and not one.exception()]
            left_s = until - self._loop.time()
            if left_s <= 0 and (is_start or opened):
                break
            timeout = max(left_s, 0.0) if is_start or opened else None
            await asyncio.wait(pending, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for opening in self._openings.values():  # before any is taken: the others are to be closed
            error = opening.exception() if opening.done() else None
            if error and (not isinstance(error, TierError) or (is_start and _is_alive(error))):
                raise error
        volumes: list[Volume] = []
        missing: dict[Path, str] = {}
        for directory in directories:
            opening = self._openings[directory]
            if not opening.done():
                missing[directory] = (
                    f"{directory}: is still being opened: the disk is slow, or hangs"
                )
            elif error := opening.exception():
                del self._openings[directory]
                missing[directory] = str(error).removeprefix("cold: ")
                log.error("%s; it is tried again", error)
            else:
                del self._openings[directory]
                volumes.append(opening.result())
        return volumes, missing

    async def _opened(self, directory: Path) -> Volume:
        """This directory, opened by a process of its own: only that one is held up by a disk that hangs."""
        config = self._settings.config.cold
        assert config is not None
        child = await asyncio.to_thread(Child)
        opening = self._loop.run_in_executor(
            self._openers, open_volumes, [directory], config.size_bytes // len(config.directories),
            child, self._devices.get(directory), self._unwritten.get(directory),
        )  # fmt: skip
        try:
            (volume,) = await asyncio.shield(opening)
        except asyncio.CancelledError:
            child.kill()
            opening.add_done_callback(_close_all)
            raise
        self._devices[directory] = volume.device
        self._unwritten.pop(directory, None)
        return volume

    def _call_off(self) -> None:
        """Stop opening directories."""
        for opening in self._openings.values():
            opening.cancel()
            opening.add_done_callback(_close_one)
        self._openings.clear()

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
        self._call_off()
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
            cold = self._settings.config.cold
            for directory in cold.directories if cold is not None else ():
                tasks.create_task(self._keep(tier, directory), name=f"keep {directory}")

    async def _keep(self, tier: ColdTier, directory: Path) -> None:
        """Have a directory used for as long as it can be, and opened again when it can be again."""
        again_s = AGAIN_S
        while True:
            if directory in tier.missing:
                if not await self._attached(tier, directory):
                    await asyncio.sleep(again_s)
                    again_s = min(2 * again_s, LONGEST_AGAIN_S)
                elif tier.lost(directory) is None:  # it may have been, while it was looked into
                    again_s = AGAIN_S
            elif (volume := tier.lost(directory)) is not None:
                await self._detach(tier, volume)
                await asyncio.sleep(again_s)
                again_s = min(2 * again_s, LONGEST_AGAIN_S)
            else:
                await asyncio.sleep(LOST_S)

    async def _attached(self, tier: ColdTier, directory: Path) -> bool:
        """Open this directory, and find its blocks; False where it can't be used now."""
        opening = self._openings.get(directory)
        if opening is None:
            opening = self._openings[directory] = self._loop.create_task(self._opened(directory))
        await asyncio.wait([opening])
        if opening.cancelled():
            return False
        del self._openings[directory]
        try:
            volume = opening.result()
            log.info("cold: %s can be used: it is looked into", directory)
            await self._find(tier, lambda restored: tier.attach(volume, restored))
        except (TierError, OSError) as error:
            why = str(error).removeprefix("cold: ")
            if tier.missing.get(directory) != why:
                log.error("cold: %s; it is tried again", why)
            tier.missing[directory] = why
            return False
        return True

    async def _detach(self, tier: ColdTier, volume: Volume) -> None:
        """Close a directory that was lost: blocks that it alone has can't be had until it is opened again."""
        gone = await tier.detach(volume)
        for count, (name, segment) in enumerate(gone):
            self._tenants[name].catalog.cold.drop_segment(segment)
            if count % DROP_SEGMENTS == 0:
                await asyncio.sleep(0)
        await tier.closed(volume)
        self._unwritten[volume.directory] = volume.unwritten
        log.info("cold: %s is closed: it can be unmounted, and is tried again", volume.directory)

    async def _recover(self, tier: ColdTier) -> None:
        self.unasked = Counter()
        await self._find(tier, tier.recover)

    async def _find(self, tier: ColdTier, look: Callable[[Restored], Awaitable[None]]) -> None:
        """Have the catalogs know what `look` finds."""
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

        await look(restored)
        seconds = time.monotonic() - started
        log.info("cold tier is there: %d blocks found in %.2f s", found, seconds)
        self.unasked += unasked
        if count := unasked.total():
            log.warning(
                "cold: %d blocks of them are stored otherwise than cold.codecs has their models stored now:"
                " nobody can ask for them, and they go with their segments", count,
            )  # fmt: skip
        if not tier.recovered.is_set():
            return  # what was forgotten may yet be found in another directory
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


def _is_alive(error: TierError) -> bool:
    """Whether a live process uses the directory. One that was ended keeps the lock while it waits for a
    disk."""
    return isinstance(error, InUseError) and is_alive(error.holder)


def _close_all(opening: asyncio.Future[list[Volume]]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        for volume in opening.result():
            volume.close(0)


def _close_one(opening: asyncio.Task[Volume]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close(0)


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
