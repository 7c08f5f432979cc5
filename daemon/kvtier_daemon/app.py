"""Puts the daemon together, runs it, and takes it down again."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVarTuple

import msgspec

import kvtier
from kvtier.catalog import Catalog
from kvtier.errors import ConfigError, TierError
from kvtier.policy.base import make
from kvtier.units import format_bytes
from kvtier_daemon import preflight, profiles
from kvtier_daemon.claim import claim_socket, inherited_socket, release_socket
from kvtier_daemon.config import Cold, Config, Loaded, settled, tenant_of
from kvtier_daemon.mover import Mover
from kvtier_daemon.notify import Notifier, watchdog_s
from kvtier_daemon.observing import web
from kvtier_daemon.observing.history import EVERY_S, History
from kvtier_daemon.observing.lag import Lag
from kvtier_daemon.observing.series import WARM_STATES
from kvtier_daemon.probe import DiskProbe, Probe
from kvtier_daemon.recorder import Recorder
from kvtier_daemon.reloading import changes, merged
from kvtier_daemon.scrub import Scrub
from kvtier_daemon.secrets import load_secrets
from kvtier_daemon.server import Report, Server
from kvtier_daemon.switching import Switching
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.cold import ColdTier
from kvtier_daemon.tiers.log import Segment
from kvtier_daemon.tiers.recovery import Recovered
from kvtier_daemon.tiers.segment import ENTRY
from kvtier_daemon.tiers.shelf import Shelf
from kvtier_daemon.tiers.warm import Extent, WarmTier
from kvtier_kernels import Mapping, Store

log = logging.getLogger(__name__)
Args = TypeVarTuple("Args")

TEND_S = 0.1
EXIT_HUNG = 75  # sysexits' EX_TEMPFAIL
RESTORE_ROWS = 4096  # in one go: about a millisecond
USE_S = 2.0
USE_BLOCKS, USE_PIECES = 1024, 64  # in one go: less than that
LAST_USE_S = 1.0
TELL_S = 5.0
WATCHDOG_PARTS = 3  # of the time after which the manager gives up
START_S, STOP_S = 120.0, 60.0


def run(loaded: Loaded) -> None:
    """Serve until SIGTERM or SIGINT. What can be known to fail, `preflight.require` has looked at before."""
    config = loaded.config
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    secrets = load_secrets(config.state, config.tenants)
    listener = inherited_socket(config.socket) or claim_socket(
        config.socket, config.socket_mode, config.socket_group
    )
    try:
        port = web.listen(*config.http.listen) if config.http is not None else None
        with asyncio.Runner(loop_factory=_uvloop_factory()) as runner:
            runner.run(App(loaded, secrets, listener, port).serve())
    finally:
        release_socket(listener)


class App:
    """The running daemon: its tenants, its warm tier, its server."""

    def __init__(
        self,
        loaded: Loaded,
        secrets: dict[str, bytes],
        listener: socket.socket,
        port: socket.socket | None = None,
    ) -> None:
        config = self.config = loaded.config
        self._loaded = loaded
        self._reloading = asyncio.Lock()
        self._started_at = time.monotonic()
        self._began_s = round(time.time(), 3)
        quotas = {name: tenant.quota_bytes for name, tenant in config.tenants.items()}
        self.losses = profiles.losses_of(config)
        self.tenants = {
            name: Tenant(
                name,
                secrets[name],
                quota,
                Catalog(Store(), make(config.warm.policy), config.history_bytes // len(quotas)),
                losses=self.losses,
            )
            for name, quota in quotas.items()
        }
        self.warm = WarmTier(
            quotas, config.warm.extent_bytes, config.warm.lock, config.warm.huge_pages
        )
        self.cold: ColdTier | None = None
        self._scrub: Scrub | None = None
        self._switching: Switching | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._moving: asyncio.Task[None] | None = None  # to and from the cold tier
        # What went wrong in looking after, and where.
        self._failed: set[tuple[type, str, int]] = set()
        self._unmapped = False  # an extent that the cold tier can't use, so none after it
        self._notifier = Notifier.from_environment()
        self._listener = listener
        self._port = port
        self._server: Server | None = None
        self._lag: Lag | None = None
        self._history = History(lambda: self.figures(None))
        self._stopping = False

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._unforeseen)
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopped.set)
        reload = asyncio.Event()
        loop.add_signal_handler(signal.SIGHUP, reload.set)
        recorder = Recorder(self.config.state, time.monotonic)
        self._server = Server(
            loop,
            self._listener,
            self._tenant_of,
            self.tenants,
            self.stats,
            self.config.max_clients,
            recorder,
            self,
        )
        if self.config.cold is not None:
            self._notifier.extend_timeout(START_S)  # its index may have to be read
            self._open_cold(loop, self.config.cold)
        loop.add_reader(self.warm.start(), self._extents_ready)
        self._say_whether_it_grows()
        self._lag = Lag(loop)
        looked_at = await self._show(loop)
        # What start-up made stays for good: a collection need not walk it again.
        gc.collect()
        gc.freeze()
        self._notifier.ready(f"serving on {self.config.socket}")
        log.info(
            "kvtier %s serves on %s: warm %s for %s",
            kvtier.__version__,
            self.config.socket,
            format_bytes(self.warm.capacity_bytes),
            ", ".join(f"{t.name} {format_bytes(t.quota_bytes)}" for t in self.tenants.values()),
        )
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self._tend(), name="tend"),
                tasks.create_task(recorder.run(), name="record"),
                tasks.create_task(self._reload_when(reload), name="reload"),
                tasks.create_task(self._tell_on(), name="tell"),
            ]
            if every_s := watchdog_s() / WATCHDOG_PARTS:
                running.append(tasks.create_task(self._show_life(every_s), name="watchdog"))
            if self.cold is not None:
                self._moving = tasks.create_task(self._run_cold(self.cold), name="cold")
            self._tasks = tasks
            if looked_at is not None:
                running.append(tasks.create_task(self._keep_history(), name="history"))
            await stopped.wait()
            for task in (*running, self._moving):
                if task is not None:
                    task.cancel()
        self._stopping = True
        self._notifier.stopping("writing what is to be found again")
        self._notifier.extend_timeout(STOP_S)
        log.info("going down")
        self._server.close("it was asked to stop")
        if self.cold is not None and self._cold_is_there:
            self._remember(self.cold)
            if not await self.cold.close():
                log.critical("a disk hangs, or a codec: what it was doing can't be waited for")
                release_socket(self._listener)
                logging.shutdown()
                os._exit(EXIT_HUNG)
        if looked_at is not None:
            looked_at.close()
        self._lag.stop()
        loop.remove_reader(self.warm.event_fd)
        self.warm.close()

    async def _show(self, loop: asyncio.AbstractEventLoop) -> web.Web | None:
        """Answer those who look, if that is configured."""
        if self._port is None:
            return None
        assert self.config.http is not None
        pages = web.Pages(lambda: self.figures(None), self._history.report, self.config.http.hosts)
        shown = web.Web(loop, pages, self._count_failure)
        await shown.listen(self._port)
        log.info("http://%s shows how it is", self._shown_at())
        return shown

    async def _keep_history(self) -> None:
        while True:
            self._try("the history", self._history.note)
            await asyncio.sleep(EVERY_S)

    def _shown_at(self) -> str:
        """Where, or nothing."""
        if self._port is None:
            return ""
        host, port, *_ = self._port.getsockname()
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _count_failure(self) -> None:
        assert self._server is not None
        self._server.failures["internal"] += 1

    def _open_cold(self, loop: asyncio.AbstractEventLoop, config: Cold) -> None:
        tier = self._another_cold()
        self._take_cold(tier)
        self._switching = Switching(
            loop, self.tenants, tier, self._another_cold, self._take_cold, self._stop_cold
        )

    def _another_cold(self) -> ColdTier:
        cold = self.config.cold
        assert cold is not None
        warm = self.config.warm.size_bytes
        shares = {name: tenant.quota_bytes / warm for name, tenant in self.tenants.items()}
        return ColdTier(
            asyncio.get_running_loop(), cold.directories, cold.size_bytes, cold.segment_bytes, shares,
            self._leaving, cold.engine,
        )  # fmt: skip

    def _take_cold(self, tier: ColdTier) -> None:
        """Have this cold tier used, and go on as with the one before."""
        cold = self.config.cold
        assert cold is not None
        self.cold = tier
        for name, tenant in self.tenants.items():
            before = tenant.mover
            tenant.mover = Mover(
                name, tenant.catalog, tier, tenant.quota_bytes, through=cold.write == "through",
                daily_bytes=int(cold.daily_bytes * tenant.quota_bytes / self.config.warm.size_bytes),
                admission=cold.admission, codec=cold.codec, codecs=cold.codecs,
                losses=self.losses,
            )  # fmt: skip
            if before is not None:
                tenant.mover.inherit(before)
        # In the order in which they came, so that each has the number that it would have had.
        for extent in self.warm.extents:
            self._map_for_cold(self.tenants[extent.tenant], extent)
        catalogs = {name: tenant.catalog for name, tenant in self.tenants.items()}
        scrub = Scrub(tier, catalogs, self._dirty, cold.scrub_bytes)
        if self._scrub is not None:
            scrub.counts.update(self._scrub.counts)
        self._scrub = scrub
        if self._tasks is not None:
            self._moving = self._tasks.create_task(self._run_cold(tier), name="cold")

    async def _stop_cold(self, tier: ColdTier) -> bool:
        """Have nothing moved any more, and the files closed; whether that went well."""
        tier.shut()
        if self._moving is not None:
            self._moving.cancel()
            await asyncio.wait([self._moving])
        self._remember(tier)
        return await tier.close()

    @property
    def _cold_is_there(self) -> bool:
        return self._switching is not None and self._switching.cold_is_there

    async def tier(self, tier: str, order: str) -> dict[str, Any]:
        """Drain a tier, switch it off or on, or say how it is. TierError where that can't be."""
        if self._switching is None:
            raise TierError(f"{tier}: the daemon has no cold tier: there is nothing to switch")
        return self._switching.order(tier, order)

    # --- configured again --------------------------------------------------------------------

    async def settings(self, order: str) -> dict[str, Any]:
        """The settled configuration ("show"), what its sources say otherwise now ("diff"), or that put into
        force as far as it can be without a restart ("reload"). ConfigError where they say what can't be."""
        async with self._reloading:
            if order == "show":
                file = self._loaded.file
                values = settled(self.config)
                origins = self._loaded.origins
                keys = {key: [value, origins.get(key, "default")] for key, value in values.items()}
                return {"file": str(file) if file else "", "keys": keys}
            if order == "reload":
                return await self._reload()
            loaded = await self._read_again()
            return {"changes": [one.as_dict() for one in changes(self.config, loaded.config)]}

    async def _read_again(self) -> Loaded:
        # A file may lie on a disk that hangs.
        loaded = await asyncio.to_thread(self._loaded.again)
        if not (finding := preflight.open_files(merged(self.config, loaded.config))).ok:
            raise ConfigError(str(finding))
        return loaded

    async def _reload(self) -> dict[str, Any]:
        """Swap what can be swapped; where what the sources say is wrong, nothing."""
        self._notifier.reloading()
        try:
            loaded = await self._read_again()
        except ConfigError as error:
            log.error("nothing was reloaded: %s", error)
            self._notifier.ready(f"not reloaded, and serving as before: {error}")
            raise
        found = changes(self.config, loaded.config)
        self._put_in_force(merged(self.config, loaded.config))
        origins = {one.key: loaded.origins[one.key] for one in found if one.live}
        self._loaded = replace(self._loaded, origins={**self._loaded.origins, **origins})
        restart = [one.key for one in found if not one.live]
        for one in found:
            if one.live:
                log.info("reloaded: %s is %s, was %s", one.key, one.files, one.running)
        if restart:
            log.warning("reloaded, but for what needs a restart: %s", ", ".join(restart))
        elif not origins:
            log.info("reloaded: nothing has changed")
        waits = f", and {', '.join(restart)} wait for a restart" if restart else ""
        self._notifier.ready(f"reloaded {len(origins)} values{waits}")
        return {"changes": [one.as_dict() for one in found]}

    def _put_in_force(self, config: Config) -> None:
        """Go on with this configuration, which differs in what can be swapped alone."""
        assert self._server is not None
        self.config = config
        logging.getLogger().setLevel(config.log_level.upper())
        self._server.limit_clients(config.max_clients)
        self._server.look_who_is_whose()
        if config.cold is None:
            return
        for tenant in self.tenants.values():
            if tenant.mover is not None:
                share = tenant.quota_bytes / config.warm.size_bytes
                tenant.mover.go_by(
                    through=config.cold.write == "through",
                    daily_bytes=int(config.cold.daily_bytes * share),
                    admission=config.cold.admission,
                    codec=config.cold.codec,
                    codecs=config.cold.codecs,
                )
        if self._scrub is not None:
            self._scrub.set_rate(config.cold.scrub_bytes)

    async def _reload_when(self, asked: asyncio.Event) -> None:
        """Reload at each SIGHUP."""
        while True:
            await asked.wait()
            asked.clear()
            with contextlib.suppress(ConfigError):  # it is in the log
                await self.settings("reload")

    # --- the service manager -----------------------------------------------------------------

    async def _tell_on(self) -> None:
        """Keep `systemctl status` up to date."""
        told = ""
        while True:
            await asyncio.sleep(TELL_S)
            line = self._status_line()
            if line != told:
                self._notifier.status(line)
                told = line

    def _status_line(self) -> str:
        """How it is, in a line."""
        assert self._server is not None
        counts = [tenant.catalog.counts() for tenant in self.tenants.values()]
        used = sum(count["bytes"]["ready"] for count in counts)
        parts = [f"warm {format_bytes(used)} of {format_bytes(self.warm.capacity_bytes)}"]
        if not self.warm.complete:
            parts[0] += f" ({format_bytes(self.warm.allocated_bytes)} allocated so far)"
        if self.cold is not None and self._switching is not None:
            framed = sum(count["framed_bytes"] for count in counts)
            state = self._switching.state("cold")
            parts.append(f"cold {format_bytes(framed)} of {format_bytes(self.cold.size_bytes)}")
            if state != "on":
                parts[-1] += f" ({state})"
            if self.cold.failure:
                parts.append(self.cold.failure)
        parts.append(f"clients {sum(session.greeted for session in self._server.sessions)}")
        return ", ".join(parts)

    async def _show_life(self, every_s: float) -> None:
        """Say that the daemon does what it is there for, as long as it does: a block goes into memory each
        time, and comes back. What disks do is looked at beside it: one that hangs switches its tier off."""
        probe, on_disks = Probe(), DiskProbe()
        while True:
            if self._try("a block put into memory and read again", probe.put_and_get):
                self._notifier.alive()
            if self.cold is not None and self._cold_is_there:
                self._try("pages put on disks and read again", on_disks.begin, self.cold)
            await asyncio.sleep(every_s)

    # --- the cold tier -----------------------------------------------------------------------

    def _dirty(self, tenant: str, ids: bytes) -> None:
        mover = self.tenants[tenant].mover
        assert mover is not None
        mover.saved(ids)

    def _leaving(self, shelf: Shelf, segment: Segment) -> None:
        mover = self.tenants[shelf.tenant].mover
        assert mover is not None
        mover.leave(shelf, segment)

    async def _run_cold(self, cold: ColdTier) -> None:
        """Move blocks for as long as the daemon lives. What goes wrong here is no end of the warm tier."""
        try:
            await self._move(cold)
        except Exception as error:
            log.exception("the cold tier failed: the daemon goes on without it")
            cold.give_up(f"it failed: {error!r}; the daemon's log says how")

    async def _move(self, cold: ColdTier) -> None:
        """Find what is there, then move blocks."""
        started = time.monotonic()
        found = 0

        async def restored(tenant: str, one: Recovered, segment: int) -> None:
            nonlocal found
            for identity, spec, rows in one.parts:
                catalog = self.tenants[tenant].catalog
                for at in range(0, len(rows), RESTORE_ROWS * ENTRY.size):
                    some = rows[at : at + RESTORE_ROWS * ENTRY.size]
                    found += catalog.cold.restore(identity, spec, some, segment, one.used)[0]
                    await asyncio.sleep(0)

        async def recover() -> None:
            await cold.recover(restored)
            seconds = time.monotonic() - started
            log.info("cold tier is there: %d blocks found in %.2f s", found, seconds)
            for tenant in self.tenants.values():
                assert tenant.mover is not None
                tenant.mover.forget_early()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(recover(), name="recover")
            for name, tenant in self.tenants.items():
                assert tenant.mover is not None
                tasks.create_task(tenant.mover.run(), name=f"mover {name}")
            if self._scrub is not None:
                tasks.create_task(self._scrub.run(), name="scrub")
            tasks.create_task(self._keep_use(cold), name="use")

    async def _keep_use(self, cold: ColdTier) -> None:
        """Have the index know what is wanted, a few seconds later at most."""
        while True:
            await asyncio.sleep(USE_S)
            while self._note_use(cold) or cold.write_use(USE_PIECES):  # noqa: ASYNC110
                await asyncio.sleep(0)  # others have their turn

    def _note_use(self, cold: ColdTier) -> bool:
        """Note some of what is newly wanted; False if nothing is. What fails of one tenant is noted of the
        others."""
        noted: list[bytes] = []

        def note(tenant: Tenant) -> None:
            if places := tenant.catalog.cold.take_used(USE_BLOCKS):
                cold.note_use(places)
                noted.append(places)

        for name, tenant in self.tenants.items():
            self._try(f"what is wanted of {name}", note, tenant)
            if noted:
                return True
        return False

    def _remember(self, cold: ColdTier) -> None:
        """Have the index know all that it should before the end, as far as there is time."""
        until = time.monotonic() + LAST_USE_S
        for tenant in self.tenants.values():
            if tenant.mover is not None:
                tenant.mover.bury()
        while time.monotonic() < until and (self._note_use(cold) or cold.write_use(USE_PIECES)):
            pass

    async def _tend(self) -> None:
        """What happens by itself: leases run out, silent strangers are shown the door."""
        assert self._server is not None
        while True:
            await asyncio.sleep(TEND_S)
            now = self._server.clock()
            for name, tenant in self.tenants.items():
                self._try(f"leases of {name}", tenant.catalog.expire, now)
                if tenant.mover is not None and self._cold_is_there:
                    self._try(f"blocks of {name}", tenant.mover.tend)
            cold = self.cold if self._cold_is_there else None
            if cold is not None and not self._try("the cold tier", cold.tend):
                cold.give_up("it could not be looked after; the daemon's log says how")
            self._try("clients", self._server.tend)
            self._try("events", self._server.events.sample, self.tenants.values(), self.cold)

    def _try(self, what: str, step: Callable[[*Args], object], *args: *Args) -> bool:
        """Do this; whether it went well. A bug of ours here is no end of the daemon, nor of what comes after:
        it is counted, and told the first time."""
        try:
            step(*args)
        except Exception as error:
            assert self._server is not None
            self._server.failures["internal"] += 1
            *_, (frame, line) = traceback.walk_tb(error.__traceback__)
            place = type(error), frame.f_code.co_filename, line
            if place not in self._failed:
                log.exception("%s could not be looked after; this is told once", what)
            self._failed.add(place)
            return False
        return True

    def _unforeseen(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Something that the loop called has failed: others are served all the same."""
        if self._server is not None:
            self._server.failures["internal"] += 1
        loop.default_exception_handler(context)

    def _tenant_of(self, uid: int) -> Tenant | None:
        name = tenant_of(self.config, uid)
        return self.tenants[name] if name is not None else None

    def _extents_ready(self) -> None:
        for extent in self.warm.ready():
            tenant = self.tenants[extent.tenant]
            tenant.add(extent)
            self._map_for_cold(tenant, extent)
            done = format_bytes(sum(e.nbytes for e in self.warm.extents))
            self._notifier.status(f"warm tier {done} of {format_bytes(self.warm.capacity_bytes)}")
        self._say_whether_it_grows()
        if self.warm.complete:
            log.info(
                "warm tier is there: %s, of it %s in huge pages",
                format_bytes(self.warm.allocated_bytes),
                format_bytes(self.warm.huge_bytes),
            )

    def _map_for_cold(self, tenant: Tenant, extent: Extent) -> None:
        if self.cold is None or tenant.mover is None or self._unmapped or self.cold.said_off:
            return
        try:
            mapping = Mapping(extent.fd, extent.nbytes, True)
            tenant.mover.extents.append(self.cold.register(mapping))
        except (OSError, MemoryError) as error:
            log.error("an extent can't be mapped for the cold tier: %s", error)
            self._unmapped = True
            self.cold.give_up(f"an extent can't be mapped: {error}")

    def _say_whether_it_grows(self) -> None:
        for tenant in self.tenants.values():
            tenant.catalog.growing = not self.warm.complete

    def _hits(self, catalogs: Sequence[Catalog]) -> dict[str, int]:
        hits = _sum(catalog.hit_tokens for catalog in catalogs)
        return hits if self.cold is not None else {"warm": hits["warm"]}

    def _cold_stats(self, cold: ColdTier, tenants: Sequence[Tenant]) -> dict[str, Any]:
        counts = [tenant.catalog.counts() for tenant in tenants]
        movers = [tenant.mover for tenant in tenants if tenant.mover is not None]
        share = _share(tenants, self.config.warm.size_bytes)
        assert self.config.cold is not None
        return {
            "capacity_bytes": int(cold.size_bytes * share),
            "used_bytes": sum(count["framed_bytes"] for count in counts),
            "blocks": sum(count["framed_blocks"] for count in counts),
            "states": _sum(mover.counts for mover in movers),
            "bytes": _sum(mover.bytes for mover in movers),
            "day_bytes": sum(mover.day_bytes for mover in movers),
            "day_limit_bytes": int(self.config.cold.daily_bytes * share),
            "loads": _sum(mover.verdicts for mover in movers),
            "unwritten": _sum(tenant.catalog.blocks.unwritten for tenant in tenants),
            "not_read": _sum(tenant.catalog.cold.failed for tenant in tenants),
            "reading": sum(tenant.catalog.cold.reading for tenant in tenants),
            "writing": sum(tenant.catalog.cold.writing for tenant in tenants),
            "leaving": cold.leaving,
            "coding": {
                "link_bytes_s": [round(link) for link in cold.bandwidths(tenants[0].name)],
                "failures": cold.coding.failures,
                "spaces": [one for mover in movers for one in mover.choice.report()],
            },
            "engine": cold.engine,
            "on": cold.is_on and cold.takes,
            "state": self._switching.state("cold") if self._switching is not None else "on",
            "given_up": cold.given_up,
            "faults": cold.faults,
            "failure": cold.failure,
            "scrub": self._scrub.stats() if self._scrub is not None else None,
        }

    # --- saying how it is --------------------------------------------------------------------

    def stats(self, tenant: Tenant | None) -> Report:
        """What `kvtier status --json` prints, packed."""
        body = self.figures(tenant)
        return {name: msgspec.Raw(msgspec.msgpack.encode(value)) for name, value in body.items()}

    def figures(self, tenant: Tenant | None) -> dict[str, Any]:
        """How it is: of one tenant, or of all."""
        assert self._server is not None and self._lag is not None
        tenants = list(self.tenants.values()) if tenant is None else [tenant]
        sessions = Counter(
            session.tenant.name
            for session in self._server.sessions
            if session.tenant and session.in_use
        )
        waiting: Counter[str] = Counter()
        coming: Counter[str] = Counter()
        for session in self._server.sessions:
            if session.tenant:
                lookups, tokens = session.owed
                waiting[session.tenant.name] += lookups
                coming[session.tenant.name] += tokens
        counts = [each.catalog.counts() for each in tenants]
        catalogs = [each.catalog for each in tenants]
        capacity = sum(each.quota_bytes for each in tenants)
        have = sum(count["capacity_bytes"] for count in counts)
        body: dict[str, Any] = {
            "version": kvtier.__version__,
            "pid": os.getpid(),
            "uptime_s": round(time.monotonic() - self._started_at, 3),
            "started_at_s": self._began_s,
            "stopping": self._stopping,
            "tiers": {
                "warm": {
                    "capacity_bytes": capacity,
                    "allocated_bytes": self.warm.allocated_bytes if tenant is None else have,
                    "used_bytes": sum(count["bytes"]["ready"] for count in counts),
                    "blocks": sum(count["blocks"]["ready"] for count in counts),
                    "policy": self.config.warm.policy,
                    "state": self._switching.state("warm") if self._switching is not None else "on",
                    "states": {
                        state: sum(count["blocks"][state] for count in counts)
                        for state in ("writing", "ready", "doomed", "quarantined")
                    },
                    "state_bytes": {
                        state: sum(count["bytes"][state] for count in counts)
                        for state in WARM_STATES
                    },
                    "failure": self.warm.failure,
                }
            },
            "lookup_tokens": sum(catalog.lookup_tokens for catalog in catalogs),
            "hit_tokens": self._hits(catalogs),
            "miss_tokens": _sum(catalog.miss_tokens for catalog in catalogs),
            "coming_tokens": sum(coming[each.name] for each in tenants),
            "waiting_lookups": sum(waiting[each.name] for each in tenants),
            "recompute_avoided_s": sum(catalog.avoided_s for catalog in catalogs),
            "saved_tokens": sum(catalog.saved_tokens for catalog in catalogs),
            "refused_tokens": _sum(catalog.refused_tokens for catalog in catalogs),
            "evicted_blocks": _sum(catalog.evicted_blocks for catalog in catalogs),
            "bytes": {
                "saved": sum(catalog.saved_bytes for catalog in catalogs),
                "loaded": sum(catalog.loaded_bytes for catalog in catalogs),
            },
            "notes_bytes": sum(catalog.notes_bytes for catalog in catalogs)
            + sum(each.mover.beaten.memory_bytes() for each in tenants if each.mover is not None),
            "catalog_bytes": sum(catalog.memory_bytes() for catalog in catalogs),
            "sessions": sum(sessions[each.name] for each in tenants),
            "failures": dict(self._server.failures) if tenant is None else {},
            "loop": self._lag.report(),
            "tenants": {
                each.name: {
                    "capacity_bytes": each.quota_bytes,
                    "used_bytes": count["bytes"]["ready"],
                    "blocks": count["blocks"]["ready"],
                    "spaces": each.catalog.spaces,
                    "sessions": sessions[each.name],
                    "leases": each.catalog.leases,
                    "pinned_bytes": each.catalog.pinned_bytes,
                    "lookup_tokens": each.catalog.lookup_tokens,
                    "hit_tokens": each.catalog.hit_tokens.total(),
                    "coming_tokens": coming[each.name],
                }
                for each, count in zip(tenants, counts, strict=True)
            },
        }
        if self.cold is not None:
            body["tiers"]["cold"] = self._cold_stats(self.cold, tenants)
        if tenant is None:
            body |= {
                "connections": len(self._server.sessions),
                "latencies": self._server.latencies.report(),
                "cpu_s": round(time.process_time(), 3),
                "http": self._shown_at(),
            }
        return body


def _share(tenants: Iterable[Tenant], warm_bytes: int) -> float:
    return sum(each.quota_bytes for each in tenants) / warm_bytes


def _sum(counters: Any) -> dict[str, int]:
    total: Counter[str] = Counter()
    for counter in counters:
        for name, count in counter.items():
            total[name] += count
    return dict(total)


def _uvloop_factory() -> Any:
    """uvloop's loop where it is installed; asyncio's own elsewhere."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
