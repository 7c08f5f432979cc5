"""Puts the daemon together, runs it, and takes it down again."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any, NoReturn

import kvtier
from kvtier.catalog import Catalog
from kvtier.policy.base import make
from kvtier.policy.deferred import Deferred
from kvtier.units import format_bytes
from kvtier_daemon import departing, profiles
from kvtier_daemon.claim import claim_socket, inherited_socket, release_socket
from kvtier_daemon.cold_life import END_S, ColdLife
from kvtier_daemon.config import Config, Loaded, tenant_of
from kvtier_daemon.notify import LogFormatter, Notifier, to_journal, watchdog_s
from kvtier_daemon.observing import hints, web
from kvtier_daemon.observing.figures import Figures
from kvtier_daemon.observing.history import EVERY_S, History
from kvtier_daemon.observing.lag import Lag
from kvtier_daemon.observing.recent import RECENT
from kvtier_daemon.probe import DiskProbe, Probe
from kvtier_daemon.recorder import Recorder
from kvtier_daemon.secrets import load_secrets
from kvtier_daemon.server import Server
from kvtier_daemon.settings import Settings
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.cold import ColdTier
from kvtier_daemon.tiers.warm import WarmTier
from kvtier_daemon.unforeseen import Unforeseen
from kvtier_daemon.values import address_text
from kvtier_kernels import Store

log = logging.getLogger(__name__)

TEND_S = 0.1
EXIT_HUNG = 75  # sysexits' EX_TEMPFAIL
TELL_S = 5.0
WATCHDOG_PARTS = 3  # of the time after which the manager gives up
START_S = 60.0  # for which more time is asked, again and again
STOP_S = 25.0  # less than the unit's TimeoutStopSec


def run(loaded: Loaded) -> None:
    """Serve until SIGTERM or SIGINT. What can be known to fail, `preflight.require` has looked at before."""
    config = loaded.config
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter(to_journal(2)))
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler])
    logging.getLogger().addHandler(RECENT)
    secrets = load_secrets(config.state, config.tenants)
    listener = inherited_socket(config.socket) or claim_socket(
        config.socket, config.socket_mode, config.socket_group, origin=loaded.origins["socket"]
    )
    try:
        port = web.listen(*config.http.listen) if config.http is not None else None
        with asyncio.Runner(loop_factory=_uvloop_factory()) as runner:
            runner.run(App(loaded, secrets, listener, port).serve())
    finally:
        release_socket(listener)


class App:
    """The running daemon: its tenants, its tiers, its server."""

    def __init__(
        self,
        loaded: Loaded,
        secrets: dict[str, bytes],
        listener: socket.socket,
        port: socket.socket | None = None,
    ) -> None:
        config = loaded.config
        quotas = {name: tenant.quota_bytes for name, tenant in config.tenants.items()}
        losses = profiles.losses_of(config)
        uses = {name: Deferred(make(config.warm.policy)) for name in quotas}
        self.tenants = {
            name: Tenant(
                name,
                secrets[name],
                quota,
                Catalog(Store(), uses[name], config.history_bytes // len(quotas)),
                losses=losses,
                uses=uses[name],
            )
            for name, quota in quotas.items()
        }
        self.warm = WarmTier(
            quotas, config.warm.extent_bytes, config.warm.lock, config.warm.huge_pages
        )
        self._notifier = Notifier.from_environment()
        self._settings = Settings(loaded, self._notifier, self._swap, self._count_failure)
        self._unforeseen = Unforeseen(self._count_failure)
        self._cold = ColdLife(self._settings, self.tenants, self.warm, losses, self._unforeseen)
        self._listener = listener
        self._port = port
        self._server: Server | None = None
        self._stand_in: departing.StandIn | None = None
        self._figures = Figures(
            self._settings, self.tenants, self.warm, self._cold, self._shown_at()
        )
        self._history = History(lambda: self._figures.of(None))

    @property
    def config(self) -> Config:
        return self._settings.config

    @property
    def cold(self) -> ColdTier | None:
        return self._cold.tier

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._unforeseen.of_loop)
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopped.set)
        reload = asyncio.Event()
        loop.add_signal_handler(signal.SIGHUP, reload.set)
        # What was made so far stays for good: a collection need not walk it again. A cold tier goes when it
        # is switched off.
        gc.collect()
        gc.freeze()
        if self.config.cold is not None:
            await self._open_cold(loop, stopped)
        recorder = Recorder(self.config.state, time.monotonic)
        self._server = Server(
            loop,
            self._listener,
            self._tenant_of,
            self.tenants,
            self._figures.packed,
            self.config.max_clients,
            recorder,
            self,
        )
        lag = Lag(loop)
        self._figures.serving(self._server, lag)
        loop.add_reader(self.warm.start(), self._extents_ready)
        self._say_whether_it_grows()
        looked_at = await self._show(loop)
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
                tasks.create_task(self._settings.reload_when(reload), name="reload"),
                tasks.create_task(self._tell_on(), name="tell"),
                tasks.create_task(self._keep_hints(), name="hints"),
            ]
            if every_s := watchdog_s() / WATCHDOG_PARTS:
                running.append(tasks.create_task(self._show_life(every_s), name="watchdog"))
            if self._notifier.is_heard:
                running.append(tasks.create_task(self._stand_in_while_it_hangs(), name="stand in"))
            self._cold.start(tasks)
            if looked_at is not None:
                running.append(tasks.create_task(self._keep_history(), name="history"))
            await stopped.wait()
            for task in running:
                task.cancel()
            self._cold.end_moving()
        self._figures.stopping = True
        self._notifier.stopping("writing what is to be found again")
        self._notifier.extend_timeout(STOP_S)
        log.info("going down")
        if sys.stderr is not None:
            # Whatever else hangs, it says where it was, and ends.
            faulthandler.dump_traceback_later(STOP_S, exit=True)
        self._server.close("it was asked to stop")
        loop.remove_reader(self.warm.event_fd)  # an extent that comes now is of no use
        if not await self._cold.close():
            self._leave("a disk hangs, or a codec: what it was doing can't be waited for")
        if looked_at is not None:
            looked_at.close()
        lag.stop()
        self.warm.close()
        if self._stand_in is not None:
            loop.remove_reader(self._stand_in.ended)
            self._stand_in.end(0)

    async def _open_cold(self, loop: asyncio.AbstractEventLoop, stopped: asyncio.Event) -> None:
        """Open the cold tier, for as long as that takes: an index may be long, or its disk slow."""
        opening, stopping = (
            loop.create_task(self._cold.open(loop)),
            loop.create_task(stopped.wait()),
        )
        while not (opening.done() or stopping.done()):
            self._notifier.extend_timeout(START_S)
            await asyncio.wait(
                [opening, stopping], timeout=START_S / 2, return_when=asyncio.FIRST_COMPLETED
            )
        stopping.cancel()
        if not opening.done():
            opening.cancel()  # what was opened is closed, and what hangs is left to itself
            await asyncio.wait([opening], timeout=END_S)
        if not opening.done():
            self._leave("it is to stop, and a disk hangs while its files are opened")
        if not opening.cancelled():
            await opening

    def _leave(self, why: str) -> NoReturn:
        """End at once. What is under way has files, and perhaps memory, of ours: this process may stay until
        the disk answers, without its socket and its memory."""
        log.critical("%s", why)
        release_socket(self._listener)
        if self._notifier.is_heard:
            try:
                (self._stand_in or departing.StandIn()).end(EXIT_HUNG)
            except (OSError, subprocess.SubprocessError) as error:
                log.error("no process can tell the manager of the end: %s", error)
        mappings = [*self._cold.mappings(), *(extent.table for extent in self.warm.extents)]
        self.warm.close()
        departing.unmap(mappings)
        logging.shutdown()
        os._exit(EXIT_HUNG)

    # --- what those who run it ask for -------------------------------------------------------

    async def settings(self, order: str) -> dict[str, Any]:
        """As `Settings.answer`; or the last lines of the log ("log")."""
        if order == "log":
            return {"pid": os.getpid(), "lines": list(RECENT.lines)}
        return await self._settings.answer(order)

    async def tier(self, tier: str, order: str) -> dict[str, Any]:
        """As `ColdLife.order`."""
        return self._cold.order(tier, order)

    def _swap(self, config: Config) -> None:
        """Go on with this configuration, which differs in what can be swapped alone."""
        assert self._server is not None
        logging.getLogger().setLevel(config.log_level.upper())
        self._server.limit_clients(config.max_clients)
        self._cold.go_by(config)

    # --- showing how it is -------------------------------------------------------------------

    async def _show(self, loop: asyncio.AbstractEventLoop) -> web.Web | None:
        """Answer those who look, if that is configured."""
        if self._port is None:
            return None
        assert self.config.http is not None
        pages = web.Pages(
            lambda: self._figures.of(None), self._history.report, self.config.http.hosts
        )
        shown = web.Web(loop, pages, self._count_failure)
        await shown.listen(self._port)
        log.info("http://%s shows how it is", self._shown_at())
        return shown

    def _shown_at(self) -> str:
        """Where, or nothing."""
        if self._port is None:
            return ""
        host, port, *_ = self._port.getsockname()
        return address_text(host, port)

    async def _keep_history(self) -> None:
        while True:
            self._unforeseen.tried("the history", self._history.note)
            await asyncio.sleep(EVERY_S)

    async def _keep_hints(self) -> None:
        def note() -> None:
            self._figures.hints.note(self._figures.of(None))

        while True:
            await asyncio.sleep(hints.EVERY_S)
            self._unforeseen.tried("the hints", note)

    async def _tell_on(self) -> None:
        """Keep `systemctl status` up to date."""
        told = ""

        def tell() -> None:
            nonlocal told
            line = self._figures.line()
            if line != told:
                self._notifier.status(line)
                told = line

        while True:
            await asyncio.sleep(TELL_S)
            self._unforeseen.tried("the status line", tell)

    async def _show_life(self, every_s: float) -> None:
        """Say that the daemon does what it is there for, as long as it does: a block goes into memory each
        time, and comes back. What disks do is looked at beside it: one that hangs switches its tier off."""
        probe, on_disks = Probe(), DiskProbe()
        while True:
            if self._unforeseen.tried("a block put into memory and read again", probe.put_and_get):
                self._notifier.alive()
            if self.cold is not None and self._cold.is_there:
                self._unforeseen.tried(
                    "pages put on disks and read again", on_disks.begin, self.cold
                )
            await asyncio.sleep(every_s)

    async def _stand_in_while_it_hangs(self) -> None:
        """Name another process as the service's main one while a disk hangs: this one may be unable to end
        then."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TEND_S)
            if self._cold.hangs and self._stand_in is None:
                try:
                    self._stand_in = await asyncio.to_thread(departing.StandIn)
                except (OSError, subprocess.SubprocessError) as error:
                    log.error("no process can stand in for this one: %s", error)
                    return
                log.info("a disk hangs: another process is the service's main one until it is over")
                loop.add_reader(self._stand_in.ended, os._exit, EXIT_HUNG)
            elif not self._cold.hangs and self._stand_in is not None:
                stand_in, self._stand_in = self._stand_in, None
                loop.remove_reader(stand_in.ended)
                await asyncio.to_thread(stand_in.give_back)  # waits for the manager

    # --- looking after it --------------------------------------------------------------------

    async def _tend(self) -> None:
        """What happens by itself: leases run out, silent strangers are shown the door."""
        assert self._server is not None
        tried, events = self._unforeseen.tried, self._server.events
        while True:
            await asyncio.sleep(TEND_S)
            now = self._server.clock()
            for name, tenant in self.tenants.items():
                tried(f"leases of {name}", tenant.catalog.expire, now)
            self._cold.tend()
            tried("clients", self._server.tend)
            tried("events", events.sample, self.tenants.values(), self.cold)

    def _count_failure(self) -> None:
        if self._server is not None:
            self._server.failures["internal"] += 1

    def _tenant_of(self, uid: int) -> Tenant | None:
        name = tenant_of(self.config, uid)
        return self.tenants[name] if name is not None else None

    def _extents_ready(self) -> None:
        for extent in self.warm.ready():
            tenant = self.tenants[extent.tenant]
            tenant.add(extent)
            self._cold.map(tenant, extent)
            done = format_bytes(sum(e.nbytes for e in self.warm.extents))
            self._notifier.status(f"warm tier {done} of {format_bytes(self.warm.capacity_bytes)}")
        self._say_whether_it_grows()
        if self._server is not None:
            for session in list(self._server.sessions):
                session.memory_grew()
        if self.warm.complete:
            log.info(
                "warm tier is there: %s, of it %s in huge pages",
                format_bytes(self.warm.allocated_bytes),
                format_bytes(self.warm.huge_bytes),
            )

    def _say_whether_it_grows(self) -> None:
        for tenant in self.tenants.values():
            tenant.catalog.growing = not self.warm.complete


def _uvloop_factory() -> Any:
    """uvloop's loop where it is installed; asyncio's own elsewhere."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
