"""The life of the cold tier in a daemon: open, recover, serve, switch off and on, close.

A failure here disables the cold tier and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypedDict

from kvtier.errors import TierError
from kvtier_daemon.claim import InUseError, is_alive
from kvtier_daemon.config.current import CurrentConfig
from kvtier_daemon.config.schema import ColdConfig, Config
from kvtier_daemon.internal_errors import InternalErrors
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.base import summed
from kvtier_daemon.tiers.cold.directory import ColdDirectory, shares_of
from kvtier_daemon.tiers.cold.disk_probe import DiskProbe
from kvtier_daemon.tiers.cold.index import Change
from kvtier_daemon.tiers.cold.index_process import Child
from kvtier_daemon.tiers.cold.mover import Mover
from kvtier_daemon.tiers.cold.recovery import Recovered
from kvtier_daemon.tiers.cold.scrub import Scrubber
from kvtier_daemon.tiers.cold.segment import ENTRY, codecs_of
from kvtier_daemon.tiers.cold.segment_log import Segment
from kvtier_daemon.tiers.cold.segment_store import SegmentStore
from kvtier_daemon.tiers.cold.tier import ColdTier, Restored, open_directories, segments_of
from kvtier_daemon.tiers.states import ON
from kvtier_daemon.tiers.switching import Switching
from kvtier_daemon.tiers.warm import Extent, WarmTier
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


class ColdLifecycle:
    """The `LowerTier` of disks. `tier` is None without a configured cold tier; it is another object after the
    tier was switched off and on."""

    def __init__(
        self,
        settings: CurrentConfig,
        tenants: Mapping[str, Tenant],
        warm: WarmTier,
        unforeseen: InternalErrors,
    ) -> None:
        self.name = "cold"
        self.tier: ColdTier | None = None
        self.scrub: Scrubber | None = None
        # By tenant: found on the disks, and of models that are stored otherwise now.
        self.unasked: Counter[str] = Counter()
        self._lost: Counter[str] = Counter()  # extents that clients took pages out of
        self._movers: dict[str, Mover] = {}  # by tenant, from the first `_use` on
        self._settings = settings
        self._tenants = tenants
        self._warm = warm
        self._unforeseen = unforeseen
        self._probe = DiskProbe()
        self._switching: Switching | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._moving: asyncio.Task[None] | None = None
        self._unmapped = False  # an extent that the tier can't use, so none after it
        self._ended = False
        self._openings: dict[Path, asyncio.Task[ColdDirectory]] = {}
        self._openers = ThreadPoolExecutor(OPENERS, "kvtier-open")
        # Of directories that were lost: on which device they were, what their indexes could not write.
        self._devices: dict[Path, int] = {}
        self._unwritten: dict[Path, Change] = {}

    async def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Open the directories in threads, for at most `OPEN_S`; `start` continues with the others. Starts no
        transfers. Raises TierError if the configuration is wrong."""
        if self._settings.config.cold is None:
            return
        tier = await self._open_tier(is_start=True)
        self._use(tier)
        self._switching = Switching(
            loop, self._tenants, tier, self._open_tier, self._use, self._stop
        )

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Start to move blocks in these tasks."""
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
        """Write the last notes to the indexes and close the files; False if a disk hangs, now or when the
        tier was switched."""
        if self._switching is None:
            return True
        release = await self._switching.settled(END_S)
        self._cancel_openings()
        if self.tier is not None and self.is_there:
            self._write_last_notes(self.tier)
            release &= await self.tier.close(END_S)
        return release

    def mappings(self) -> list[MappedExtent]:
        """Return the arena's memory as the disks map it."""
        return self.tier.mappings() if self.tier is not None else []

    @property
    def hangs(self) -> bool:
        """Whether a disk hangs: threads that wait for it cannot be stopped."""
        return self.tier is not None and any(disk.hangs for disk in self.tier.disks)

    @property
    def is_there(self) -> bool:
        return self._switching is not None and self._switching.cold_is_there

    def state(self, tier: str) -> str:
        """Return the state of a tier."""
        return self._switching.state(tier) if self._switching is not None else ON

    def order(self, tier: str, order: str) -> dict[str, Any]:
        """Drain a tier, switch it off or on, or report its state. Raises TierError if that is not
        possible."""
        if self._switching is None:
            raise TierError(f"{tier}: the daemon has no cold tier, so tiers cannot be switched")
        return self._switching.order(tier, order)

    def reconfigure(self, config: Config) -> None:
        """Apply this configuration, which differs only in keys that can be reloaded."""
        if config.cold is None:
            return
        for name, mover in self._movers.items():
            mover.reconfigure(**_write_options(config, config.cold, self._tenants[name]))
        if self.scrub is not None:
            self.scrub.set_rate(config.cold.scrub_bytes)

    def report(self, tenants: Collection[str]) -> dict[str, Any]:
        tier, config = self.tier, self._settings.config
        assert tier is not None and config.cold is not None
        parts = [self._tenants[name] for name in tenants]
        movers = [self._movers[name] for name in tenants]
        counts = [tenant.catalog.counts() for tenant in parts]
        stats = [mover.stats() for mover in movers]
        share = sum(each.quota_bytes for each in parts) / config.warm.size_bytes
        return {
            "capacity_bytes": int(tier.size_bytes * share),
            "used_bytes": sum(count["framed_bytes"] for count in counts),
            "blocks": sum(count["framed_blocks"] for count in counts),
            "states": summed(each.counts for each in stats),
            "bytes": summed(each.moved_bytes for each in stats),
            "day_bytes": sum(each.day_bytes for each in stats),
            "day_limit_bytes": int(config.cold.daily_bytes * share),
            "loads": summed(each.verdicts for each in stats),
            "unasked": sum(self.unasked[name] for name in tenants),
            "unwritten": summed(tenant.catalog.blocks.unwritten for tenant in parts),
            "not_read": summed(tenant.catalog.promotions.failed for tenant in parts),
            "reading": sum(tenant.catalog.promotions.reading for tenant in parts),
            "writing": sum(tenant.catalog.demotions.writing for tenant in parts),
            "leaving": tier.leaving,
            "coding": {
                "link_bytes_s": [round(link) for link in tier.bandwidths(next(iter(tenants)))],
                "failures": tier.coding.failures,
                "staged_bytes": tier.coding.staging.used,
                "staged_limit_bytes": tier.coding.staging.most,
                "waited": tier.coding.staging.waited,
                "refused": tier.coding.staging.refused,
                "spaces": [one for mover in movers for one in mover.choice.report()],
            },
            "engine": tier.engine,
            "on": tier.is_on and tier.takes,
            "state": self.state("cold"),
            "given_up": tier.given_up,
            "faults": tier.faults,
            "failure": tier.failure,
            "scrub": self.scrub.stats() if self.scrub is not None else None,
        }

    def probe(self) -> None:
        if self.tier is not None and self.is_there:
            self._probe.begin(self.tier)

    def run_periodic(self) -> None:
        """Do periodic work."""
        tier = self.tier
        if tier is None or not self.is_there:
            return
        for name, mover in self._movers.items():
            self._unforeseen.tried(f"blocks of tenant {name}", mover.tend)
            self._log_lost_extents(name, mover, tier)
        if not self._unforeseen.tried("cold tier", tier.tend):
            tier.give_up("periodic work failed, see the daemon's log")

    def _log_lost_extents(self, tenant: str, mover: Mover, tier: ColdTier) -> None:
        lost = sum(map(tier.is_lost, mover.extents))
        if lost > self._lost[tenant]:
            log.error(
                "a client of tenant %s removed pages from the memory that it shares with the "
                "daemon: blocks in %d of its %d extents are not written to disk or read from "
                "it; restart the daemon to use them again", tenant, lost, len(mover.extents),
            )  # fmt: skip
        self._lost[tenant] = lost

    def map(self, extent: Extent) -> None:
        """Register this extent with the disks. Call it in the order of the extents."""
        tier, mover = self.tier, self._movers.get(extent.tenant)
        if tier is None or mover is None or self._unmapped or tier.off_reason or self._ended:
            return
        try:
            mapping = MappedExtent(extent.fd, extent.nbytes, True)
            mapping.guard()
            mover.extents.append(tier.register(mapping))
        except (OSError, MemoryError) as error:
            log.error(
                "cannot map an extent for the cold tier, which is disabled until restart: %s", error
            )
            self._unmapped = True
            tier.give_up(f"cannot map an extent: {error}")

    # --- one after the other -----------------------------------------------------------------

    async def _open_tier(self, is_start: bool = False) -> ColdTier:
        """Open another cold tier with the directories that can be used. Raises TierError if there are none
        and this is not the start, or if another daemon uses one at the start."""
        cold, shares = self._shares()
        self._devices.clear()
        for path in cold.directories:
            self._openings[path] = self._loop.create_task(self._open_directory(path))
        try:
            directories, missing = await self._wait_for_directories(cold.directories, is_start)
            if not directories and not is_start:
                raise TierError("; ".join(missing.values()))
            return ColdTier(
                self._loop, directories, cold.size_bytes, cold.segment_bytes, shares, self._reclaim,
                cold.engine, missing=missing,
                secrets={name: tenant.secret for name, tenant in self._tenants.items()},
            )  # fmt: skip
        except BaseException:
            self._cancel_openings()
            raise

    def _shares(self) -> tuple[ColdConfig, dict[str, float]]:
        """Return the configuration and each tenant's share. Raises TierError if a share is too small."""
        config = self._settings.config
        cold = config.cold
        assert cold is not None
        shares = {
            name: tenant.quota_bytes / config.warm.size_bytes
            for name, tenant in self._tenants.items()
        }
        for path in cold.directories:
            _, nbytes = shares_of(path, cold.size_bytes // len(cold.directories))
            segments_of(path, nbytes, cold.segment_bytes, shares)
        return cold, shares

    async def _wait_for_directories(
        self, paths: Sequence[Path], is_start: bool
    ) -> tuple[list[ColdDirectory], dict[Path, str]]:
        """Return the directories that are open in time, and why the others are not; those continue to open,
        or are retried. Except at the start it waits for at least one."""
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
        directories: list[ColdDirectory] = []
        missing: dict[Path, str] = {}
        for path in paths:
            opening = self._openings[path]
            if not opening.done():
                missing[path] = f"{path}: is still being opened: the disk is slow or hangs"
            elif error := opening.exception():
                del self._openings[path]
                missing[path] = str(error).removeprefix("cold: ")
                log.error("%s; retrying in the background", error)
            else:
                del self._openings[path]
                directories.append(opening.result())
        return directories, missing

    async def _open_directory(self, path: Path) -> ColdDirectory:
        """Open this directory in its own process, so that a disk that hangs delays no other directory."""
        config = self._settings.config.cold
        assert config is not None
        child = await asyncio.to_thread(Child)
        opening = self._loop.run_in_executor(
            self._openers, open_directories, [path], config.size_bytes // len(config.directories),
            child, self._devices.get(path), self._unwritten.get(path),
        )  # fmt: skip
        try:
            (directory,) = await asyncio.shield(opening)
        except asyncio.CancelledError:
            child.kill()
            opening.add_done_callback(_close_all)
            raise
        self._devices[path] = directory.device
        self._unwritten.pop(path, None)
        return directory

    def _cancel_openings(self) -> None:
        """Stop to open directories."""
        for opening in self._openings.values():
            opening.cancel()
            opening.add_done_callback(_close_one)
        self._openings.clear()

    def _use(self, tier: ColdTier) -> None:
        """Replace the cold tier by this one. Changes nothing if it raises."""
        config = self._settings.config
        cold = config.cold
        assert cold is not None
        movers = {
            name: Mover(
                name, tenant.catalog, tier, tenant.quota_bytes, losses=tenant.losses,
                **_write_options(config, cold, tenant),
            )
            for name, tenant in self._tenants.items()
        }  # fmt: skip
        catalogs = {name: tenant.catalog for name, tenant in self._tenants.items()}
        scrub = Scrubber(tier, catalogs, self._dirty, cold.scrub_bytes)
        if self.tier is not None:
            tier.inherit(self.tier)
        self.tier = tier
        for name, tenant in self._tenants.items():
            if name in self._movers:
                movers[name].inherit(self._movers[name])
            tenant.tier = movers[name]
        self._movers = movers
        if self.scrub is not None:
            scrub.counts.update(self.scrub.counts)
        self.scrub = scrub
        # In the order in which they came, so that each has the number that it would have had.
        self._unmapped = False
        for extent in self._warm.extents:
            self.map(extent)
        if self._tasks is not None:
            self._move_of(tier)

    async def _stop(self, tier: ColdTier, timeout_s: float) -> bool:
        """Stop all transfers and close the files; return whether that succeeded."""
        tier.shut()
        if self._moving is not None:
            self._moving.cancel()
            await asyncio.wait([self._moving])
        self._cancel_openings()
        if tier is self.tier:  # else what is known has the numbers of the segments of another one
            self._write_last_notes(tier)
        return await tier.close(timeout_s)

    def _dirty(self, tenant: str, ids: bytes) -> None:
        self._movers[tenant].writes.saved(ids)

    def _reclaim(self, store: SegmentStore, segment: Segment) -> None:
        self._movers[store.tenant].reclaimer.reclaim(store, segment)

    # --- while it is there -------------------------------------------------------------------

    def _move_of(self, tier: ColdTier) -> None:
        assert self._tasks is not None
        self._moving = self._tasks.create_task(self._run(tier), name="cold")

    async def _run(self, tier: ColdTier) -> None:
        """Move blocks until the task is cancelled. A failure disables the cold tier, never the warm tier."""
        try:
            await self._move(tier)
        except Exception as error:
            log.exception(
                "the cold tier failed and is disabled until restart; the warm tier still serves"
            )
            tier.give_up(f"internal error: {error!r}; see the daemon's log")

    async def _move(self, tier: ColdTier) -> None:
        """Recover blocks, then move them."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._recover(tier), name="recover")
            for name, mover in self._movers.items():
                tasks.create_task(mover.run(), name=f"mover {name}")
            if self.scrub is not None:
                tasks.create_task(self.scrub.run(), name="scrub")
            tasks.create_task(self._keep_access_log(tier), name="use")
            cold = self._settings.config.cold
            for path in cold.directories if cold is not None else ():
                tasks.create_task(self._keep_attached(tier, path), name=f"keep {path}")

    async def _keep_attached(self, tier: ColdTier, path: Path) -> None:
        """Keep a directory in use: close it when it is lost, and retry to open it."""
        again_s = AGAIN_S
        while True:
            if path in tier.missing:
                if not await self._try_attach(tier, path):
                    await asyncio.sleep(again_s)
                    again_s = min(2 * again_s, LONGEST_AGAIN_S)
                elif tier.lost(path) is None:  # it may have been, while it was looked into
                    again_s = AGAIN_S
            elif (directory := tier.lost(path)) is not None:
                await self._detach(tier, directory)
                await asyncio.sleep(again_s)
                again_s = min(2 * again_s, LONGEST_AGAIN_S)
            else:
                await asyncio.sleep(LOST_S)

    async def _try_attach(self, tier: ColdTier, path: Path) -> bool:
        """Open this directory and recover its blocks; False if it cannot be used now."""
        opening = self._openings.get(path)
        if opening is None:
            opening = self._openings[path] = self._loop.create_task(self._open_directory(path))
        await asyncio.wait([opening])
        if opening.cancelled():
            return False
        del self._openings[path]
        try:
            directory = opening.result()
            log.info("cold: %s is available again, reading its segments", path)
            await self._restore(tier, lambda restored: tier.attach(directory, restored))
        except (TierError, OSError) as error:
            why = str(error).removeprefix("cold: ")
            if tier.missing.get(path) != why:
                log.error("cold: %s; retrying in the background", why)
            tier.missing[path] = why
            return False
        return True

    async def _detach(self, tier: ColdTier, directory: ColdDirectory) -> None:
        """Close a lost directory; its blocks are misses until it is opened again."""
        gone = await tier.detach(directory)
        for count, (name, segment) in enumerate(gone):
            self._tenants[name].catalog.segments.drop_segment(segment)
            if count % DROP_SEGMENTS == 0:
                await asyncio.sleep(0)
        await tier.closed(directory)
        self._unwritten[directory.path] = directory.unwritten
        log.info(
            "cold: %s is closed: it can be unmounted; retrying to open it in the background",
            directory.path,
        )

    async def _recover(self, tier: ColdTier) -> None:
        self.unasked = Counter()
        await self._restore(tier, tier.recover)

    async def _restore(self, tier: ColdTier, look: Callable[[Restored], Awaitable[None]]) -> None:
        """Add the blocks that `look` finds to the catalogs."""
        started = time.monotonic()
        found, unasked = 0, Counter[str]()

        async def restored(name: str, one: Recovered, segment: int) -> None:
            nonlocal found
            tenant = self._tenants[name]
            for identity, spec, rows in one.parts:
                if not tenant.accepts(identity, spec, codecs_of(rows)):
                    log.error(
                        "cold: %s: the description of space %s does not match its identity: "
                        "its %d frames are misses", one.path, identity.hex()[:16], len(rows) // ENTRY.size,
                    )  # fmt: skip
                    continue
                asked = identity == tenant.identity_of(spec)
                for at in range(0, len(rows), RESTORE_ROWS * ENTRY.size):
                    some = rows[at : at + RESTORE_ROWS * ENTRY.size]
                    made = tenant.catalog.segments.restore(identity, spec, some, segment, one.used)[
                        0
                    ]
                    found += made
                    unasked[name] += 0 if asked else made
                    await asyncio.sleep(0)

        await look(restored)
        seconds = time.monotonic() - started
        log.info("cold tier is ready: %d blocks found in %.2f s", found, seconds)
        self.unasked += unasked
        if count := unasked.total():
            log.warning(
                "cold: %d of the found blocks were stored with another cold.codecs setting "
                "for their model: no request can find them; they are removed with their "
                "segments, or restore that setting", count,
            )  # fmt: skip
        if not tier.recovered.is_set():
            return  # what was forgotten may yet be found in another directory
        for mover in self._movers.values():
            mover.forgets.repeat_early_forgets()

    async def _keep_access_log(self, tier: ColdTier) -> None:
        """Write the access log to the indexes every few seconds."""
        while True:
            await asyncio.sleep(USE_S)
            while self._note_access(tier) or tier.write_accesses(USE_PIECES):  # noqa: ASYNC110
                await asyncio.sleep(0)  # others have their turn

    def _note_access(self, tier: ColdTier) -> bool:
        """Note a portion of the new accesses; False if there are none. A failure for one tenant does not
        affect the others."""
        noted: list[bytes] = []

        def note(tenant: Tenant) -> None:
            if places := tenant.catalog.segments.take_used(USE_BLOCKS):
                tier.note_access(places)
                noted.append(places)

        for name, tenant in self._tenants.items():
            self._unforeseen.tried(f"access log of tenant {name}", note, tenant)
            if noted:
                return True
        return False

    def _write_last_notes(self, tier: ColdTier) -> None:
        """Write tombstones and accesses before the end, as far as time permits."""
        until = time.monotonic() + LAST_USE_S
        for mover in self._movers.values():
            mover.forgets.tombstone()
        while time.monotonic() < until and (
            self._note_access(tier) or tier.write_accesses(USE_PIECES)
        ):
            pass


def _is_alive(error: TierError) -> bool:
    """Whether a live process uses the directory. A killed process holds the lock while it waits for a
    disk."""
    return isinstance(error, InUseError) and is_alive(error.holder)


def _close_all(opening: asyncio.Future[list[ColdDirectory]]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        for directory in opening.result():
            directory.close(0)


def _close_one(opening: asyncio.Task[ColdDirectory]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close(0)


class _WriteOptions(TypedDict):
    through: bool
    daily_bytes: int
    admission: str
    codec: str
    codecs: Sequence[tuple[str, str]]


def _write_options(config: Config, cold: ColdConfig, tenant: Tenant) -> _WriteOptions:
    """Return how blocks of this tenant are written: the options of a new mover, and of
    `Mover.reconfigure`."""
    return {
        "through": cold.write == "through",
        "daily_bytes": int(cold.daily_bytes * tenant.quota_bytes / config.warm.size_bytes),
        "admission": cold.admission,
        "codec": cold.codec,
        "codecs": cold.codecs,
    }
