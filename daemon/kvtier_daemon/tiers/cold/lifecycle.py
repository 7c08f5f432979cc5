"""The life of the cold tier in a daemon: open, recover, serve, switch off and on, close.

A failure here disables the cold tier and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

from kvtier.errors import TierError
from kvtier_daemon.catalog.blocks import DeferredPolicy
from kvtier_daemon.catalog.compressed import CompressedOrder
from kvtier_daemon.claim import InUseError, is_alive
from kvtier_daemon.config.current import CurrentConfig
from kvtier_daemon.config.schema import ColdConfig, Config
from kvtier_daemon.internal_errors import InternalErrors
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.base import summed
from kvtier_daemon.tiers.cold.attached import (
    AttachedDirectory,
    Restored,
    StoreOptions,
    open_directory,
)
from kvtier_daemon.tiers.cold.directory import ColdDirectory, shares_of
from kvtier_daemon.tiers.cold.disk import STAGED_BYTES
from kvtier_daemon.tiers.cold.disk_probe import DiskProbe
from kvtier_daemon.tiers.cold.frame_memory import CompressedFrames
from kvtier_daemon.tiers.cold.index import Change
from kvtier_daemon.tiers.cold.index_process import Child
from kvtier_daemon.tiers.cold.last_writes import LastWrites
from kvtier_daemon.tiers.cold.mover import Mover
from kvtier_daemon.tiers.cold.recovery import Recovered
from kvtier_daemon.tiers.cold.scrub import Scrubber
from kvtier_daemon.tiers.cold.segment import ENTRY, codecs_of
from kvtier_daemon.tiers.cold.tier import ColdTier
from kvtier_daemon.tiers.states import ON
from kvtier_daemon.tiers.switching import Switching
from kvtier_daemon.tiers.tier_keys import TierKeys
from kvtier_daemon.tiers.warm import Extent, WarmTier
from kvtier_kernels import Mapping as MappedExtent

log = logging.getLogger(__name__)

ACCESS_LOG_S = 2.0
ACCESSES, PIECES = 1024, 64  # per iteration of the loop: less than a millisecond
LAST_NOTES_S = 1.0
THREADS = 16  # directories that are opened at once
OPEN_S = 5.0  # longest time that a start waits for directories to be opened; the others follow
AGAIN_S, LONGEST_AGAIN_S = 1.0, 30.0  # until a directory that could not be used is tried again
POLL_S = 0.2  # until the next check whether a directory was lost
RESTORE_ROWS = 4096  # per iteration of the loop: about a millisecond
DROP_SEGMENTS = 8  # per iteration of the loop
END_S = 10.0  # longest time at the end of the daemon for an order, and then for closing the tier


class DirectoryOpener:
    """Opens each directory in a process of its own, so that a disk that hangs delays no other directory."""

    def __init__(self, settings: CurrentConfig, keys: TierKeys) -> None:
        self._settings = settings
        self._keys = keys
        self._threads = ThreadPoolExecutor(THREADS, "kvtier-open")
        self._openings: dict[Path, asyncio.Task[ColdDirectory]] = {}
        self._devices: dict[Path, int] = {}  # that the directories were on
        self._unwritten: dict[Path, Change] = {}  # changes that the closed indexes could not write

    async def open_all(
        self, paths: Sequence[Path], is_start: bool
    ) -> tuple[list[ColdDirectory], dict[Path, str]]:
        """Return the directories that are open in time, and why the others are not; those continue to open,
        or are retried. Except at the start it waits for at least one. Raises TierError if another daemon uses
        a directory at the start, and other exceptions that are bugs."""
        self._devices.clear()
        for path in paths:
            self._openings[path] = asyncio.create_task(self._open(path))
        await self._wait(is_start)
        for opening in self._openings.values():  # before any is taken: the others are to be closed
            error = opening.exception() if opening.done() else None
            # A killed process may hold the lock while it waits for a disk.
            in_use = isinstance(error, InUseError) and is_alive(error.holder)
            if error and (not isinstance(error, TierError) or (is_start and in_use)):
                raise error
        directories: list[ColdDirectory] = []
        missing: dict[Path, str] = {}
        for path in paths:
            if not self._openings[path].done():
                missing[path] = f"{path}: is still being opened: the disk is slow or hangs"
                log.warning("cold: %s; serving without it until then", missing[path])
                continue
            opening = self._openings.pop(path)
            if error := opening.exception():
                missing[path] = str(error).removeprefix("cold: ")
                log.error("%s; retrying in the background", error)
            else:
                directories.append(opening.result())
        return directories, missing

    async def _wait(self, is_start: bool) -> None:
        """Wait until all directories are open or cannot be opened, but not longer than permitted."""
        clock = asyncio.get_running_loop().time
        until = clock() + OPEN_S
        while pending := {one for one in self._openings.values() if not one.done()}:
            opened = [one for one in self._openings.values() if one.done() and not one.exception()]
            left_s = until - clock()
            if left_s <= 0 and (is_start or opened):
                break
            timeout = max(left_s, 0.0) if is_start or opened else None
            await asyncio.wait(pending, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)

    async def open(self, path: Path) -> ColdDirectory | None:
        """Open this directory, or wait for its opening; None if cancelled. Raises TierError and OSError."""
        opening = self._openings.get(path)
        if opening is None:
            opening = self._openings[path] = asyncio.create_task(self._open(path))
        await asyncio.wait([opening])
        if opening.cancelled():
            return None
        del self._openings[path]
        return opening.result()

    async def _open(self, path: Path) -> ColdDirectory:
        config = self._settings.config
        cold = config.cold
        assert cold is not None
        await asyncio.to_thread(self._keys.load)
        child = await asyncio.to_thread(Child)
        opening = self._threads.submit(
            open_directory, path, cold.size_bytes // len(cold.directories),
            child, self._devices.get(path), self._unwritten.get(path), config.state,
        )  # fmt: skip
        try:
            directory = await asyncio.wrap_future(opening)
        except asyncio.CancelledError:
            child.kill()
            opening.add_done_callback(_close_opened)  # in its thread, which may outlive the loop
            raise
        self._devices[path] = directory.device
        self._unwritten.pop(path, None)
        return directory

    def keep_unwritten(self, directory: ColdDirectory) -> None:
        """Keep the changes that the index of a closed directory could not write, for its next opening."""
        self._unwritten[directory.path] = directory.unwritten

    def cancel(self) -> None:
        for opening in self._openings.values():
            opening.cancel()
            opening.add_done_callback(_close_opened)
        self._openings.clear()


@dataclass(slots=True)
class DirectoryKeeper:
    """Finds the blocks in the directories of a tier, and keeps the directories attached. `unfindable` has the
    number of found blocks that no request can find, by tenant: their models are stored otherwise now."""

    tier: ColdTier
    opener: DirectoryOpener
    tenants: Mapping[str, Tenant]
    movers: Mapping[str, Mover]
    unfindable: Counter[str] = field(default_factory=Counter)

    async def keep(self, path: Path) -> None:
        """Keep a directory attached: close it when it is lost, and retry to open it."""
        directories, again_s = self.tier.directories, AGAIN_S
        while True:
            if path in directories.missing:
                if not await self.try_attach(path):
                    await asyncio.sleep(again_s)
                    again_s = min(2 * again_s, LONGEST_AGAIN_S)
                elif directories.lost(path) is None:  # it may have been lost during the scan
                    again_s = AGAIN_S
            elif (lost := directories.lost(path)) is not None:
                await self.detach(lost)
                await asyncio.sleep(again_s)
                again_s = min(2 * again_s, LONGEST_AGAIN_S)
            else:
                await asyncio.sleep(POLL_S)

    async def try_attach(self, path: Path) -> bool:
        """Open this directory and recover its blocks; False if it cannot be used now."""
        missing = self.tier.directories.missing
        try:
            directory = await self.opener.open(path)
            if directory is None:
                return False
            log.info("cold: %s is available again, reading its segments", path)
            await self.restore(lambda restored: self.tier.directories.attach(directory, restored))
        except (TierError, OSError) as error:
            why = str(error).removeprefix("cold: ")
            if missing.get(path) != why:
                log.error("cold: %s; retrying in the background", why)
            missing[path] = why
            return False
        return True

    async def detach(self, one: AttachedDirectory) -> None:
        """Close a lost directory; its blocks are misses until it is opened again."""
        directories, directory = self.tier.directories, one.directory
        segments = await directories.detach(one, self.tier.reads.pump)
        for count, (tenant, segment) in enumerate(segments):
            self.tenants[tenant].catalog.segments.drop_segment(segment)
            if count % DROP_SEGMENTS == 0:
                await asyncio.sleep(0)
        await directories.closed(directory)
        self.opener.keep_unwritten(directory)
        text = "cold: %s is closed: it can be unmounted; retrying to open it in the background"
        log.info(text, directory.path)

    async def restore(self, scan: Callable[[Restored], Awaitable[None]]) -> None:
        """Add the blocks that `scan` finds to the catalogs."""
        started = time.monotonic()
        found, unfindable = 0, Counter[str]()

        async def restored(name: str, file: Recovered, segment: int) -> None:
            nonlocal found
            tenant = self.tenants[name]
            for identity, spec, rows in file.parts:
                if not tenant.accepts(identity, spec, codecs_of(rows)):
                    log.error(
                        "cold: %s: the description of space %s does not match its identity: "
                        "its %d frames are misses", file.path, identity.hex()[:16], len(rows) // ENTRY.size,
                    )  # fmt: skip
                    continue
                can_be_found = identity == tenant.identity_of(spec)
                for at in range(0, len(rows), RESTORE_ROWS * ENTRY.size):
                    some = rows[at : at + RESTORE_ROWS * ENTRY.size]
                    blocks, *_ = tenant.catalog.segments.restore(
                        identity, spec, some, segment, file.used
                    )
                    found += blocks
                    unfindable[name] += 0 if can_be_found else blocks
                    await asyncio.sleep(0)

        await scan(restored)
        seconds = time.monotonic() - started
        is_complete = self.tier.recovery.is_complete
        ready = "cold tier is ready" if is_complete else "cold: some directories are not in use"
        log.info("%s: %d blocks found in %.2f s", ready, found, seconds)
        self.unfindable += unfindable
        if count := unfindable.total():
            log.warning(
                "cold: %d of the found blocks were stored with another cold.codecs setting "
                "for their model: no request can find them; they are removed with their "
                "segments, or restore that setting", count,
            )  # fmt: skip
        if not is_complete:
            return  # blocks that were forgotten may be found in another directory later
        for mover in self.movers.values():
            mover.forgets.end_early_forgets()


@dataclass(frozen=True, slots=True)
class AccessNotes:
    """Notes the first uses of blocks in the access logs, for each tenant independently."""

    tier: ColdTier
    tenants: Mapping[str, Tenant]
    unforeseen: InternalErrors

    async def run(self) -> None:
        """Write all notes to the indexes every few seconds, until the task is cancelled."""
        while True:
            await asyncio.sleep(ACCESS_LOG_S)
            while self.write_some():  # noqa: ASYNC110
                await asyncio.sleep(0)

    def write_some(self) -> bool:
        """Note or write a portion of the new accesses; False if there is nothing to write."""
        noted: list[bytes] = []

        def note(tenant: Tenant) -> None:
            if places := tenant.catalog.segments.take_used(ACCESSES):
                self.tier.table.note_access(places)
                noted.append(places)

        for name, tenant in self.tenants.items():
            self.unforeseen.tried(f"access log of tenant {name}", note, tenant)
            if noted:
                return True
        attached = self.tier.directories.attached
        return sum(one.directory.access_log.write(PIECES) for one in attached) > 0


class ExtentMaps:
    """Maps the tenants' extents for the disks, in their order. After a failure no more extents are mapped:
    they would get wrong numbers."""

    def __init__(self, tier: ColdTier, movers: Mapping[str, Mover]) -> None:
        self._tier = tier
        self._movers = movers
        self._lost: Counter[str] = Counter()  # extents of which clients removed pages
        self.failed = False

    def map(self, extent: Extent) -> None:
        """Register this extent with the disks, unless the tier is off."""
        if self.failed or self._tier.off_reason:
            return
        try:
            mapping = MappedExtent(extent.fd, extent.nbytes, True)
            mapping.guard()
            number = self._tier.memory.register(mapping, fixed=not extent.is_empty)
            self._movers[extent.tenant].extents.append(number)
        except (OSError, MemoryError) as error:
            log.error(
                "cannot map an extent for the cold tier, which is disabled until restart: %s", error
            )
            self.failed = True
            self._tier.directories.give_up(f"cannot map an extent: {error}")

    def log_lost(self, tenant: str) -> None:
        """Log an error if a client has removed pages from more extents."""
        extents, mappings = self._movers[tenant].extents, self._tier.memory.mappings
        lost = sum(mappings[number].lost for number in extents)
        if lost > self._lost[tenant]:
            log.error(
                "a client of tenant %s removed pages from the memory that it shares with the "
                "daemon: blocks in %d of its %d extents are not written to disk or read from "
                "it; restart the daemon to use them again", tenant, lost, len(extents),
            )  # fmt: skip
        self._lost[tenant] = lost


class ColdLifecycle:
    """The `LowerTier` of disks. `tier` is None without a configured cold tier; it is another object after the
    tier was switched off and on, as are `scrub`, `keeper` and `extents`, which belong to it."""

    def __init__(
        self, settings: CurrentConfig, tenants: Mapping[str, Tenant], warm: WarmTier,
        unforeseen: InternalErrors,
    ) -> None:  # fmt: skip
        self.name = "cold"
        self.tier: ColdTier | None = None
        self.scrub: Scrubber | None = None
        self.keeper: DirectoryKeeper | None = None
        self.extents: ExtentMaps | None = None
        self._movers: dict[str, Mover] = {}  # by tenant, from the first `_use` on
        self._settings = settings
        self._tenants = tenants
        self._warm = warm
        self._unforeseen = unforeseen
        self._probe = DiskProbe()
        self._keys = TierKeys("cold", settings, tenants)
        self._opener = DirectoryOpener(settings, self._keys)
        self._switching: Switching | None = None
        self._tasks: asyncio.TaskGroup | None = None  # None before `start` and after `end_moving`
        self._moving: asyncio.Task[None] | None = None
        self._ended = False

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
        self._tasks = tasks
        if self.tier is not None:
            self._moving = tasks.create_task(self._move(self.tier), name="cold")

    async def end_moving(self, told: Callable[[str], None]) -> None:
        config = self._settings.config
        try:
            if self.tier is not None and config.cold is not None:
                last = LastWrites(self.tier, self._tenants, self._movers)
                otherwise = "left in memory" if config.warm.keep_s else "lost"
                await last.run(config.cold.stop_s, otherwise, told)
        except Exception:
            log.exception("cold: internal error while writing blocks before the stop")
        finally:
            self._tasks = None
            self._ended = True
            if self._moving is not None:
                self._moving.cancel()

    async def close(self) -> bool:
        """Write the last notes and close the files; False if a disk hangs, now or when it was switched."""
        if self._switching is None:
            return True
        release = await self._switching.settled(END_S)
        self._opener.cancel()
        if self.tier is not None and self.is_open:
            self._write_last_notes(self.tier)
            release &= await self.tier.close(END_S)
        return release

    @property
    def hangs(self) -> bool:
        """Whether a disk hangs: threads that wait for it cannot be stopped."""
        attached = self.tier.directories.attached if self.tier is not None else ()
        return any(one.disk.reads.hangs or one.disk.writes.hangs for one in attached)

    @property
    def is_open(self) -> bool:
        return self._switching is not None and self._switching.cold_is_open

    def state(self, tier: str) -> str:
        return self._switching.state(tier) if self._switching is not None else ON

    def order(self, tier: str, order: str) -> dict[str, Any]:
        if self._switching is None:
            raise TierError(f"{tier}: the daemon has no cold tier, so tiers cannot be switched")
        return self._switching.order(tier, order)

    def reconfigure(self, config: Config) -> None:
        if config.cold is None:
            return
        for name, mover in self._movers.items():
            mover.reconfigure(**_write_options(config, config.cold, self._tenants[name]))
        if self.scrub is not None:
            self.scrub.set_rate(config.cold.scrub_bytes)
        if self._tasks is not None:
            self._tasks.create_task(asyncio.to_thread(self._keys.reload), name="keys")

    def report(self, tenants: Collection[str]) -> dict[str, Any]:
        tier, keeper, config = self.tier, self.keeper, self._settings.config
        assert tier is not None and keeper is not None and config.cold is not None
        parts = [self._tenants[name] for name in tenants]
        movers = [self._movers[name] for name in tenants]
        counts = [tenant.catalog.counts() for tenant in parts]
        stats = [mover.stats() for mover in movers]
        share = sum(each.quota_bytes for each in parts) / config.warm.size_bytes
        directories, staging = tier.directories, tier.coding.staging
        attached = directories.attached
        files = [store.files for store in directories.stores()]
        return {
            "capacity_bytes": int(tier.size_bytes * share),
            "used_bytes": sum(count["framed_bytes"] for count in counts),
            "blocks": sum(count["framed_blocks"] for count in counts),
            "states": summed(each.counts for each in stats),
            "bytes": summed(each.moved_bytes for each in stats),
            "day_bytes": sum(each.day_bytes for each in stats),
            "day_limit_bytes": int(config.cold.daily_bytes * share),
            "loads": summed(each.verdicts for each in stats),
            "unasked": sum(keeper.unfindable[name] for name in tenants),
            "unwritten": summed(tenant.catalog.blocks.unwritten for tenant in parts),
            "not_read": summed(tenant.catalog.promotions.failed for tenant in parts),
            "reading": sum(tenant.catalog.promotions.reading for tenant in parts),
            "writing": sum(tenant.catalog.demotions.writing for tenant in parts),
            "dirty": sum(tenant.catalog.demotions.in_memory_alone for tenant in parts),
            "leaving": tier.table.reclaiming,
            "coding": {
                "link_bytes_s": [round(link) for link in tier.reader.bandwidths()],
                "failures": tier.coding.failures,
                "staged_bytes": staging.used,
                "staged_limit_bytes": staging.most,
                "waited": staging.waited,
                "refused": staging.refused,
                "spaces": [one for mover in movers for one in mover.choice.report()],
            },
            "engine": attached[0].disk.engine if attached else config.cold.engine,
            "on": tier.reader.is_on and tier.writer.is_on,
            "state": self.state("cold"),
            "given_up": directories.given_up,
            "faults": tier.faults,
            "refused": {
                "files": sum(one.unreadable for one in files),
                "bytes": sum(one.unreadable_bytes for one in files),
            },
            "failure": tier.failure,
            "older_copies": [one.directory.older for one in attached if one.directory.older],
            "not_counted": "; ".join(filter(None, (one.directory.not_counted for one in attached))),
            "scrub": self.scrub.stats() if self.scrub is not None else None,
        }

    def probe(self) -> None:
        if self.tier is not None and self.is_open:
            self._probe.begin(self.tier)

    def mappings(self) -> list[MappedExtent]:
        return list(self.tier.memory.mappings.values()) if self.tier is not None else []

    def run_periodic(self) -> None:
        tier = self.tier
        if tier is None or self.extents is None or not self.is_open:
            return
        for name, mover in self._movers.items():
            self._unforeseen.tried(f"blocks of tenant {name}", mover.tend)
            self.extents.log_lost(name)
        if not self._unforeseen.tried("cold tier", tier.run_periodic):
            tier.directories.give_up("periodic work failed, see the daemon's log")

    def map(self, extent: Extent) -> None:
        """Register this extent with the disks. Call it in the order of the extents."""
        if self.extents is not None and not self._ended:
            self.extents.map(extent)

    # --- opening and closing a tier ----------------------------------------------------------

    async def _open_tier(self, is_start: bool = False) -> ColdTier:
        """Open another cold tier with the directories that can be used. Raises TierError if no directory can
        be used and this is not the start, or if another daemon uses one at the start."""
        config = self._settings.config
        assert config.cold is not None
        cold, options = config.cold, _store_options(config, config.cold, self._tenants)
        try:
            directories, missing = await self._opener.open_all(cold.directories, is_start)
            if not directories and not is_start:
                raise TierError("; ".join(missing.values()))
            return ColdTier(
                asyncio.get_running_loop(),
                directories,
                options,
                lambda store, segment: self._movers[store.tenant].reclaimer.reclaim(store, segment),
                missing,
                compresses=config.warm.compressed_bytes > 0,
            )
        except BaseException:
            self._opener.cancel()
            raise

    def _use(self, tier: ColdTier) -> None:
        """Replace the cold tier by this one. Changes nothing if it raises."""
        config = self._settings.config
        cold = config.cold
        assert cold is not None
        movers = {
            name: Mover(
                name, tenant.catalog, tier, tenant.quota_bytes, losses=tenant.losses,
                cipher=partial(self._keys.of, name), compressed=_frames_of(config, tenant),
                **_write_options(config, cold, tenant),
            )
            for name, tenant in self._tenants.items()
        }  # fmt: skip
        catalogs = {name: tenant.catalog for name, tenant in self._tenants.items()}
        scrub = Scrubber(
            tier,
            catalogs,
            lambda tenant, ids: self._movers[tenant].writes.saved(ids),
            cold.scrub_bytes,
        )
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
        self.keeper = DirectoryKeeper(tier, self._opener, self._tenants, movers)
        # In the order in which they were made, so that each has the number that it had with the last tier.
        self.extents = ExtentMaps(tier, movers)
        for extent in self._warm.extents:
            self.map(extent)
        if self._tasks is not None:
            self._moving = self._tasks.create_task(self._move(tier), name="cold")

    async def _stop(self, tier: ColdTier, timeout_s: float) -> bool:
        """Stop all transfers and close the files; return whether that succeeded."""
        tier.shut()
        if self._moving is not None:
            self._moving.cancel()
            await asyncio.wait([self._moving])
        self._opener.cancel()
        if tier is self.tier:  # otherwise the notes have the numbers of segments of another tier
            self._write_last_notes(tier)
        return await tier.close(timeout_s)

    def _write_last_notes(self, tier: ColdTier) -> None:
        """Write tombstones and accesses before the end, as far as time permits."""
        until = time.monotonic() + LAST_NOTES_S
        for mover in self._movers.values():
            mover.forgets.tombstone()
        notes = AccessNotes(tier, self._tenants, self._unforeseen)
        while time.monotonic() < until and notes.write_some():
            pass

    async def _move(self, tier: ColdTier) -> None:
        """Recover blocks, then move them, until cancelled. A failure disables only the cold tier."""
        cold, keeper, scrub = self._settings.config.cold, self.keeper, self.scrub
        assert cold is not None and keeper is not None and scrub is not None
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(keeper.restore(tier.directories.recover), name="recover")
                for name, mover in self._movers.items():
                    tasks.create_task(mover.run(), name=f"mover {name}")
                tasks.create_task(scrub.run(), name="scrub")
                notes = AccessNotes(tier, self._tenants, self._unforeseen)
                tasks.create_task(notes.run(), name="access log")
                for path in cold.directories:
                    tasks.create_task(keeper.keep(path), name=f"keep {path}")
        except Exception as error:
            log.exception(
                "the cold tier failed and is disabled until restart; the warm tier still serves"
            )
            tier.directories.give_up(f"internal error: {error!r}; see the daemon's log")


def _close_opened(opening: asyncio.Future[ColdDirectory] | Future[ColdDirectory]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close(0)


def _store_options(config: Config, cold: ColdConfig, tenants: Mapping[str, Tenant]) -> StoreOptions:
    """Return how a directory is divided. Raises TierError if a tenant's share is too small."""
    count = len(cold.directories)
    options = StoreOptions(
        cold.size_bytes,
        cold.segment_bytes,
        {name: tenant.quota_bytes / config.warm.size_bytes for name, tenant in tenants.items()},
        cold.engine,
        {name: tenant.secret for name, tenant in tenants.items()},
        STAGED_BYTES // count,
        cold.encryption != "off",
        {name: tenant.direct_group for name, tenant in config.tenants.items()},
    )
    for path in cold.directories:
        _, nbytes = shares_of(path, cold.size_bytes // count)
        options.segments_of(path, nbytes)
    return options


def _frames_of(config: Config, tenant: Tenant) -> CompressedFrames | None:
    """Return the tenant's part of compressed memory, if that is configured."""
    policy = tenant.catalog.blocks.policy
    order = policy.policy if isinstance(policy, DeferredPolicy) else policy
    if not config.warm.compressed_bytes or not isinstance(order, CompressedOrder):
        return None
    share = tenant.quota_bytes / config.warm.size_bytes
    return CompressedFrames(order, int(config.warm.compressed_bytes * share))


class _WriteOptions(TypedDict):
    through: bool
    daily_bytes: int
    admission: str
    codec: str
    codecs: Sequence[tuple[str, str]]


def _write_options(config: Config, cold: ColdConfig, tenant: Tenant) -> _WriteOptions:
    """Return the options of writes of this tenant, for a new mover and for `Mover.reconfigure`."""
    return {
        "through": cold.write == "through",
        "daily_bytes": int(cold.daily_bytes * tenant.quota_bytes / config.warm.size_bytes),
        "admission": cold.admission,
        "codec": cold.codec,
        "codecs": cold.codecs,
    }
