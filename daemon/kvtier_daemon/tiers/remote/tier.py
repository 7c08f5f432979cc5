"""The remote tier in a daemon: its parts, its life and its figures. A failure disables nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

from kvtier.errors import TierError
from kvtier_daemon.catalog import KnownSpace
from kvtier_daemon.catalog.blocks import ID_BYTES
from kvtier_daemon.codec.table import BY_NAME
from kvtier_daemon.config.current import CurrentConfig
from kvtier_daemon.config.schema import RemoteConfig
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.base import PendingReads, summed
from kvtier_daemon.tiers.remote.archiving import Archiver
from kvtier_daemon.tiers.remote.deleting import Deleter, note_purged, take_purged
from kvtier_daemon.tiers.remote.driver import StoreDriver, place_of
from kvtier_daemon.tiers.remote.families import Families
from kvtier_daemon.tiers.remote.fetching import Fetcher, FetchQueue
from kvtier_daemon.tiers.remote.handing_over import HandingOver
from kvtier_daemon.tiers.remote.known import KnownObjects
from kvtier_daemon.tiers.remote.messages import be_nice
from kvtier_daemon.tiers.remote.places import Places
from kvtier_daemon.tiers.remote.questions import Questions
from kvtier_daemon.tiers.remote.sharing import Sharer
from kvtier_daemon.tiers.remote.wanted import load_host
from kvtier_daemon.tiers.remote.warming import Warming
from kvtier_daemon.tiers.remote.writing import ObjectWriter
from kvtier_daemon.tiers.states import (
    CLOSING,
    DRAINED,
    DRAINING,
    HANDING_OVER,
    OFF,
    ON,
    OPENING,
    WARMING_UP,
)
from kvtier_daemon.tiers.tier_keys import TierKeys
from kvtier_daemon.tiers.warm import Extent
from kvtier_kernels import Mapping as MappedExtent

log = logging.getLogger(__name__)

DECODERS: Final = 2  # threads
POLL_S: Final = 0.02
FOUND_S: Final = 180.0  # the first warm-up waits for the end of recovery, at most so long
WORK: Final = {"hand-over": HANDING_OVER, "warm-up": WARMING_UP}
ENCODER_NICE: Final = 10  # saves and loads of engines go before writes to the store


class SharedBlocks:
    """The `SharedTier` of one tenant."""

    def __init__(self, tenant: Tenant, remote: OpenRemote) -> None:
        self.memory: list[MappedExtent] = []
        self._tenant = tenant
        self._places = remote.places
        config = remote.config
        self.fetcher = Fetcher(tenant, remote.queue, remote.places, remote.questions, self.memory)
        self.writer = ObjectWriter(
            tenant, remote.driver, remote.known, remote.places, BY_NAME[config.codec], remote.encoder,
            self.memory,
        )  # fmt: skip
        self.warming = Warming(
            tenant, remote.driver, remote.places, remote.questions, remote.queue, self.fetcher,
            remote.encoder, config.warm_up_percent / 100, remote.host,
        )  # fmt: skip
        self.sharer = Sharer(
            tenant, remote.driver, remote.known, remote.places, self.writer, config.write
        )
        self.archiver = Archiver(
            tenant, remote.driver, remote.known, remote.places, self.writer, config.archive
        )
        self.handing_over = HandingOver(
            tenant, remote.places, remote.known, self.writer, self.archiver
        )
        self._deleter = Deleter(remote.driver, remote.known, self.writer, self.warming)
        self._note_purged = partial(note_purged, remote.state)
        self._purges: set[asyncio.Task[None]] = set()  # and forgets
        self.pending: PendingReads = remote.queue.pending
        self._saved = 0  # blocks since the start
        tenant.reshards = config.reshard
        self.families = Families(tenant, remote.driver, self.warming.objects, remote.questions)
        self.fetcher.siblings = self.families.siblings_of
        self.writer.must_describe = self.families.must_describe
        self.writer.is_described = self.families.is_described
        self.writer.describe = self.families.describe
        self.fetcher.renamed = self.sharer.renamed
        self.beyond, self.fetch = self.fetcher.beyond, self.fetcher.fetch

    def reconfigure(self, config: RemoteConfig) -> None:
        """Use this configuration for what is written from now on."""
        self.writer.codec = BY_NAME[config.codec]
        self.sharer.write, self.archiver.archive = config.write, config.archive
        self.warming.share = config.warm_up_percent / 100

    def accept(self, accepts: bool) -> None:
        """Write what is saved, used or about to leave the disk from now on, or none of it."""
        self.sharer.accepts = self.archiver.accepts = accepts

    @property
    def left(self) -> int:
        """How many blocks and prefixes are not written yet, at least; 0 if none is."""
        return self.sharer.left + self.handing_over.left

    def saved(self, ids: bytes) -> None:
        self._saved += len(ids) // ID_BYTES
        self.sharer.saved(ids)

    def used(self, space: KnownSpace, keys: bytes) -> None:
        self.sharer.used(space, keys)
        self.warming.used(space, keys)

    @property
    def is_found(self) -> bool:
        """Whether the blocks from before the start are known."""
        return self._tenant.tier.recovery.is_complete

    @property
    def began_empty(self) -> bool:
        """Whether the blocks in memory and on disk are only those since the start."""
        counts = self._tenant.catalog.blocks.store.counts()
        blocks = counts["blocks"]["ready"] + counts["blocks"]["promoting"] + sum(counts["below"])
        return blocks <= self._saved + self.fetcher.counts["read"]

    def forget(self, space: KnownSpace, keys: bytes, done: Callable[[str], None] | None) -> bool:
        if not keys:
            return False
        self._delete(space, keys, done, [self.warming.forget(space, keys)])
        return True

    def _delete(
        self, space: KnownSpace, keys: bytes, done: Callable[[str], None] | None, lists: Sequence[str] = ()
    ) -> None:  # fmt: skip
        """Delete the objects of these blocks and these lists. No lookup of this space reads them from now on,
        and none reads those of siblings under the same keys, which are deleted too."""
        self.sharer.forgotten()
        kin, ended = self.families.kin(space), list[asyncio.Future[str]]()

        def delete(one: KnownSpace, into: bytes) -> None:
            if one is not space and not keys:
                return
            ended.append(asyncio.get_running_loop().create_future())
            told = lists if one is space else ()
            names = self._deleter.forget(
                one, self._places.every(one), keys, ended[-1].set_result, told
            )
            self.fetcher.forget(names, into)

        if kin is None:
            names = self._deleter.forget(space, self._places.every(space), keys, done, lists)
            self.fetcher.forget(names)
            return
        delete(space, b"")
        known = set(kin.others)
        for name in known:
            delete(kin.others[name], space.identity)
        kin.forgets += 1

        async def delete_in_family() -> None:
            try:
                failure = await self.families.read(kin)
                for name in kin.others.keys() - known:
                    delete(kin.others[name], space.identity)
            finally:
                kin.forgets -= 1
            failures = [failure, *[await one for one in ended]]
            if done is not None:
                done(next(filter(None, failures), ""))

        self._run(delete_in_family(), "remote forget")

    def _run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._purges.add(task)
        task.add_done_callback(self._purges.discard)

    def purge(self, space: KnownSpace, keys: bytes, done: Callable[[str], None] | None) -> bool:
        self.warming.skipped.add(space.identity)
        deleted: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._delete(space, keys, deleted.set_result)

        async def purge_wanted() -> None:
            try:
                await asyncio.to_thread(self._note_purged, space.identity)
            except OSError as error:
                log.warning(
                    "remote: a warm-up at the next start may read a purged space: %s", error
                )
            wanted = await self.warming.purge(space)
            if (failure := await deleted) and done is not None:
                done(failure)  # the list stays for the next attempt
                return
            self._delete(space, wanted, done, [self.warming.forget(space, wanted)])

        self._run(purge_wanted(), "remote purge")
        return True


class OpenRemote:
    """The parts that all tenants share."""

    def __init__(
        self, config: RemoteConfig, keys: TierKeys, state: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:  # fmt: skip
        loop = asyncio.get_running_loop()
        self.config = config
        self.state = state
        self.host = load_host(state)
        self.known = KnownObjects(config.known_bytes, clock)
        self.places = Places(config.buffer_bytes // 2)
        self.decoders = ThreadPoolExecutor(DECODERS, "kvtier-remote")
        self.encoder = ThreadPoolExecutor(1, "kvtier-share", be_nice, (ENCODER_NICE,))
        self.driver = StoreDriver(config, keys, lambda: self.queue.pump())
        self.questions = Questions(self.driver, self.known, self.places)
        self.queue = FetchQueue(loop, self.driver, self.known, self.decoders, clock)
        self.questions.found = self.queue.probes.begin

    def reconfigure(self, config: RemoteConfig) -> None:
        """Use this configuration, which differs only in keys that can be reloaded."""
        self.config = config
        # A larger buffer is there with the next process.
        self.places.limit(config.buffer_bytes // 2)
        self.driver.reconfigure(config)


class RemoteTier:
    """The life of the remote tier. Without a configuration it does nothing."""

    def __init__(self, settings: CurrentConfig, tenants: Mapping[str, Tenant]) -> None:
        self._settings = settings
        self._tenants = tenants
        self._remote: OpenRemote | None = None
        self._of: dict[str, SharedBlocks] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._group: asyncio.TaskGroup | None = None  # None before `start` and after `end`
        self._accepts = True  # False after a drain
        self._state = HANDING_OVER  # while `_work` goes on
        self._work: asyncio.Task[None] | None = None  # a hand-over or a warm-up

    @property
    def is_configured(self) -> bool:
        return self._remote is not None

    def open(self) -> None:
        """Set `Tenant.shared` of each tenant, if the tier is configured. Waits for nothing."""
        config = self._settings.config.remote
        if config is None:
            return
        keys, state = TierKeys("remote", self._settings, self._tenants), self._settings.config.state
        self._remote, purged = OpenRemote(config, keys, state), take_purged(state)
        for name, tenant in self._tenants.items():
            tenant.shared = self._of[name] = SharedBlocks(tenant, self._remote)
            self._of[name].warming.skipped |= purged

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Use the store until `end`."""
        if self._remote is not None:
            self._group = tasks
            self._tasks = [
                tasks.create_task(self._remote.driver.run(), name="remote"),
                tasks.create_task(self._remote.questions.run(), name="remote questions"),
                *(
                    tasks.create_task(run(), name=f"remote writes {name}")
                    for name, one in self._of.items()
                    for run in (one.sharer.run, one.archiver.run, one.families.run)
                ),
                tasks.create_task(self._warm(), name="remote warm-up"),
            ]

    def map(self, extent: Extent) -> None:
        """Use this extent of a tenant's memory. It is called once for each, in their order."""
        if self._remote is not None:
            mapping = MappedExtent(extent.fd, extent.nbytes, True)
            mapping.guard()
            self._of[extent.tenant].memory.append(mapping)

    def reconfigure(self, config: RemoteConfig | None) -> None:
        """Use this configuration, which differs only in keys that can be reloaded, and read the key file
        again. While the store is off, each attempt to open it does that."""
        if self._remote is None or config is None:
            return
        self._remote.reconfigure(config)
        for one in self._of.values():
            one.reconfigure(config)
        if self._group is not None and self._remote.driver.is_on:
            reading = asyncio.to_thread(self._remote.driver.keys.reload)
            self._group.create_task(reading, name="remote keys")

    def run_periodic(self) -> None:
        """Cancel reads that are too late."""
        if self._remote is not None:
            self._remote.queue.pending.expire()

    # --- orders of an operator ---------------------------------------------------------------

    def order(self, order: str) -> dict[str, Any]:
        """Drain, switch, hand over or warm up, or report the state. Raises TierError if impossible."""
        remote = self._remote
        if remote is None:
            raise TierError(
                "remote: the daemon has no remote tier; add [remote] to its configuration"
            )
        if order == "drain" and not remote.driver.is_wanted:
            raise TierError("remote: is off, so it cannot be drained")
        if order == "warm-up":
            for one in self._of.values():
                one.warming.skipped.clear()
        if order in WORK:
            self._begin(remote, order, self._of.values())
        elif order != "status" and self._work is not None:
            self._work.cancel()
            self._work = None
        if order in ("off", "on"):
            remote.driver.switch(order == "on")
        if order in ("drain", "on"):
            self._accept(order == "on")
        if order != "status":
            log.info("remote tier: %s", self.state())
        off = remote.driver.failure if remote.driver.is_wanted else ""
        return {
            "tier": "remote",
            "state": self.state(),
            "left_blocks": self._left() + sum(one.warming.left for one in self._of.values()),
            "failure": "" if remote.driver.is_opening else off or self._unfinished(),
        }

    def _begin(self, remote: OpenRemote, order: str, of: Iterable[SharedBlocks]) -> None:
        """Start to write all blocks in memory and on disk to the store, or to read what other hosts want."""
        if order == "hand-over" and not (remote.driver.is_writable and self._accepts):
            raise TierError("remote: the store cannot be written now; see `kvtier status`")
        if order == "warm-up" and not remote.config.warm_up_percent:
            raise TierError("remote: set remote.warm_up_percent to the share of memory to fill")
        if not remote.driver.is_on or self._group is None:
            raise TierError("remote: the store cannot be read now; see `kvtier status`")
        if self._work is not None and not self._work.done():
            if self._state != WORK[order]:
                raise TierError(f"remote: is {self._state}: wait until that has ended")
            return
        self._state = WORK[order]
        self._work = self._group.create_task(self._do(order, of), name=order)

    async def _do(self, order: str, of: Iterable[SharedBlocks]) -> None:
        for one in of:
            try:
                await (one.handing_over if order == "hand-over" else one.warming).run()
            except Exception:
                log.exception("remote: internal error in %s; order it again", order)

    def _unfinished(self) -> str:
        """What the last hand-over could not write, or that a warm-up found nothing, if it has ended."""
        if self._work is None or not self._work.done():
            return ""
        if self._state == WARMING_UP:
            lists = sum(one.warming.lists for one in self._of.values())
            return "" if lists else "no list of a host was found that can be used"
        if not (kept := sum(one.handing_over.kept for one in self._of.values())):
            return ""
        return f"{kept} blocks were not handed over: they could not be read or written, or are not shared"

    async def _warm(self) -> None:
        """Tell other hosts what this one wants, and warm up once those tenants that began without blocks."""
        remote = self._remote
        assert remote is not None
        while not remote.driver.is_on:  # noqa: ASYNC110  # it may be off for long
            await asyncio.sleep(10 * POLL_S)
        host = await asyncio.to_thread(load_host, self._settings.config.state)
        async with asyncio.TaskGroup() as tasks:
            for one in self._of.values():
                tasks.create_task(one.warming.tell(host), name="remote lists")
            with contextlib.suppress(TimeoutError):  # a directory is missing, or very large
                async with asyncio.timeout(FOUND_S):
                    while not remote.driver.is_on or not all(  # noqa: ASYNC110
                        one.is_found for one in self._of.values()
                    ):
                        await asyncio.sleep(10 * POLL_S)
            try:  # the configuration, the store and orders may have changed since
                some = [one for one in self._of.values() if one.began_empty]
                is_free = self._work is None and self._accepts
                if some and is_free and remote.config.warm_up_percent:
                    self._begin(remote, "warm-up", some)
            except TierError as error:
                log.warning("%s; this host is not warmed up", error)
            except Exception:
                log.exception("remote: internal error at the start of the warm-up")

    def state(self) -> str:
        """Return one of `states`."""
        remote = self._remote
        if remote is None:
            return OFF
        driver = remote.driver
        if not driver.is_wanted:
            return CLOSING if driver.child is not None else OFF
        if not self._accepts:
            return DRAINING if self._left() else DRAINED
        if self._work is not None and not self._work.done():
            return self._state
        return ON if driver.is_on else OPENING if driver.is_opening else OFF

    def _left(self) -> int:
        return sum(one.left for one in self._of.values())

    def _accept(self, accepts: bool) -> None:
        self._accepts = accepts
        for one in self._of.values():
            one.accept(accepts)

    async def write_last(self) -> None:
        """Write what waits to be written, for at most `remote.stop_s`, and while the store accepts it."""
        remote = self._remote
        if remote is None or self._group is None:
            return
        self._accept(False)
        before = self._left()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(remote.config.stop_s):
                while self._left() and remote.driver.is_writable:  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)
        if before:
            log.info(
                "remote: %d of the last writes have ended, %d are not done", before, self._left()
            )

    async def end(self) -> None:
        """Stop to use the store. What still waits to be written is not written."""
        self._group = None
        tasks = [*self._tasks, *([self._work] if self._work is not None else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._remote is not None:
            await asyncio.to_thread(self._remote.decoders.shutdown)
            await asyncio.to_thread(self._remote.encoder.shutdown)

    def summary(self) -> str:
        """Return a few words for `systemctl status`; empty without the tier."""
        if self._remote is None:
            return ""
        return "remote on" if self._remote.driver.is_on else f"remote off: {self.failure}"

    @property
    def failure(self) -> str:
        return self._remote.driver.failure if self._remote is not None else ""

    def report(self, tenants: Collection[str]) -> dict[str, Any]:
        """Return the status of the tier, with the figures of these tenants."""
        remote = self._remote
        assert remote is not None
        driver, queue = remote.driver, remote.queue
        child = driver.child
        parts = [self._of[name] for name in tenants]
        return {
            "store": place_of(remote.config),
            "on": driver.is_on,
            "writable": driver.is_writable,
            "state": self.state(),
            "failure": driver.failure,
            "faults": driver.faults,
            "restarts": driver.restarts,
            "pid": driver.pid,
            "write": remote.config.write,
            "archive": remote.config.archive,
            "reshard": remote.config.reshard,
            "siblings": sum(one.families.siblings for one in parts),
            "warm_up": {
                name: sum(getattr(one.warming, name) for one in parts)
                for name in ("lists", "ignored", "blocks")
            },
            "codec": remote.config.codec,
            "states": summed(
                counter
                for one in parts
                for counter in (
                    one.writer.counts,
                    one.sharer.counts,
                    one.archiver.counts,
                    one.fetcher.counts,
                    one.families.counts,
                )
            ),
            "bytes": {
                "written": sum(one.writer.bytes_written for one in parts),
                "read": sum(one.fetcher.bytes_read for one in parts),
            },
            "loads": summed(one.fetcher.verdicts for one in parts),
            "queued": sum(one.sharer.queued for one in parts),
            "writing": sum(one.writer.sending for one in parts),
            "reading": len(queue.parts),
            "asking": len(remote.questions) + len(queue.probes),
            "known_objects": len(remote.known),
            "known_bytes": remote.known.memory_bytes(),
            "buffer_bytes": remote.config.buffer_bytes,
            "buffer_used_bytes": child.reads.used + child.writes.used if child else 0,
            "read_bytes_s": round(queue.link.bytes_s),
            "latency_s": round(queue.latency_s, 6),
        }
