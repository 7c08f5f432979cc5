"""Assembles the daemon, runs it, and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import functools
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

import kvtier
from kvtier.errors import ConfigError
from kvtier.units import format_bytes
from kvtier_daemon import shutdown
from kvtier_daemon.catalog import Catalog
from kvtier_daemon.catalog.blocks import ID_BYTES, DeferredPolicy
from kvtier_daemon.catalog.compressed import CompressedOrder
from kvtier_daemon.catalog.policy import AUTO, make
from kvtier_daemon.claim import claim_socket, inherited_fds, inherited_socket, release_socket
from kvtier_daemon.config import profiles
from kvtier_daemon.config.current import CurrentConfig
from kvtier_daemon.config.members import Role, labelled_users, member_of
from kvtier_daemon.config.reload import left_tenants
from kvtier_daemon.config.schema import Config, LoadedConfig
from kvtier_daemon.config.values import address_text
from kvtier_daemon.internal_errors import InternalErrors
from kvtier_daemon.notify import LogFormatter, Notifier, to_journal, watchdog_s
from kvtier_daemon.observing import hints, web
from kvtier_daemon.observing.audit import Actor, AuditLog, Order
from kvtier_daemon.observing.history import EVERY_S, History
from kvtier_daemon.observing.loop_lag import LoopLag
from kvtier_daemon.observing.recent_log import RECENT
from kvtier_daemon.observing.status import StatusFigures
from kvtier_daemon.probe import Probe
from kvtier_daemon.secrets import load_accepted, load_secrets
from kvtier_daemon.serving.peer import Peer
from kvtier_daemon.serving.recorder import Recorder
from kvtier_daemon.serving.server import Server
from kvtier_daemon.serving.writers import Writers
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers import renewing
from kvtier_daemon.tiers.base import LowerTier
from kvtier_daemon.tiers.cold.lifecycle import END_S, ColdLifecycle
from kvtier_daemon.tiers.fd_store import fd_store
from kvtier_daemon.tiers.hot import HotTier
from kvtier_daemon.tiers.kept_arena import KeptArena, clear, owner_of
from kvtier_daemon.tiers.memory_check import check_memory
from kvtier_daemon.tiers.remote.tier import RemoteTier
from kvtier_daemon.tiers.tier_keys import key_files
from kvtier_daemon.tiers.warm import Extent, WarmTier
from kvtier_kernels import Store, trim_heaps

log = logging.getLogger(__name__)

TEND_S = 0.1
TRIM_S = 600.0  # free parts of the heaps would grow by 2 MB an hour under load
REMOTE = "remote"
EXIT_HUNG = 75  # sysexits' EX_TEMPFAIL
MakeLowerTier = Callable[[CurrentConfig, Mapping[str, Tenant], WarmTier, InternalErrors], LowerTier]
TELL_S = 5.0
WATCHDOG_PARTS = 3  # of the watchdog timeout
START_S = 60.0  # per extension of the start timeout
STOP_S = 25.0  # less than the unit's TimeoutStopSec


def run(loaded: LoadedConfig, with_process: int | None = None) -> None:
    """Serve until SIGTERM, SIGINT, or the end of the process with this number, after `preflight.require`."""
    config = loaded.config
    owner = None
    if with_process is not None:
        try:
            owner = os.pidfd_open(with_process)
        except ProcessLookupError:
            raise ConfigError(f"--with-process: no process has the number {with_process}") from None
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter(to_journal(2)))
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler])
    logging.getLogger().addHandler(RECENT)
    secrets = load_secrets(config.state, config.tenants)
    accepted = load_accepted(config.state, secrets)
    sockets, stored = inherited_fds()
    listener = inherited_socket(config.socket, sockets) or claim_socket(
        config.socket, config.socket_mode, config.socket_group, origin=loaded.origins["socket"]
    )
    try:
        port = web.listen(*config.http.listen) if config.http is not None else None
        with asyncio.Runner(loop_factory=_uvloop_factory()) as runner:
            app = App(loaded, secrets, listener, port, stored, accepted=accepted)
            runner.run(app.serve(owner))
    finally:
        release_socket(listener)


class App:
    """The running daemon: its tenants, its tiers, its server. `lower` makes the tier below memory."""

    def __init__(
        self,
        loaded: LoadedConfig,
        secrets: dict[str, bytes],
        listener: socket.socket,
        port: socket.socket | None = None,
        stored: Mapping[str, int] = MappingProxyType({}),
        lower: MakeLowerTier = ColdLifecycle,
        accepted: Mapping[str, tuple[bytes, ...]] = MappingProxyType({}),
    ) -> None:
        config = loaded.config
        quotas = {name: tenant.quota_bytes for name, tenant in config.tenants.items()}
        losses = profiles.losses_of(config)
        policy = AUTO if config.warm.policy == "auto" else config.warm.policy
        compresses = config.warm.compressed_bytes > 0
        uses = {
            name: DeferredPolicy(
                CompressedOrder(make(policy), make("lru")) if compresses else make(policy)
            )
            for name in quotas
        }
        self.tenants = {
            name: Tenant(
                name,
                secrets[name],
                quota,
                Catalog(Store(), uses[name], config.history_bytes // len(quotas), policy),
                losses=losses,
                uses=uses[name],
                direct_reads=config.tenants[name].direct_reads,
                accepted=accepted.get(name, ()),
            )
            for name, quota in quotas.items()
        }
        self._notifier = Notifier.from_environment()
        self._kept: KeptArena | None = None
        store = fd_store(self._notifier, stored, config.socket, config.warm.keep_s)
        if config.warm.keep_s:
            owners = _owners(config, self.tenants)
            self._kept = KeptArena(store, owners, config.warm.huge_pages)
        else:
            clear(store)
        self.warm = WarmTier(
            quotas, config.warm.extent_bytes, config.warm.lock, config.warm.huge_pages, self._kept
        )
        self._settings = CurrentConfig(
            loaded, self._notifier, self._swap, self._count_failure, key_files
        )
        self._audit = AuditLog(time.monotonic, time.time)
        self._audit.open(config.audit.path)
        self._unforeseen = InternalErrors(self._count_failure)
        self.lower = lower(self._settings, self.tenants, self.warm, self._unforeseen)
        self.remote = RemoteTier(self._settings, self.tenants)
        self.hot = HotTier(self.tenants, dict(config.hot.sizes))
        self.tiers: Collection[str] = ("warm", self.lower.name, REMOTE)
        self._in_force = config
        self._renewing: dict[str, asyncio.Task[None]] = {}
        self._listener = listener
        self._port = port
        self._server: Server | None = None
        self._stand_in: shutdown.StandIn | None = None
        self._figures = StatusFigures(
            self._settings,
            self.tenants,
            self.warm,
            self.lower,
            self.remote,
            self.hot,
            _address(self._port),
        )
        self._history = History(lambda: self._figures.of(None))
        self._told = ""  # the status line

    @property
    def config(self) -> Config:
        return self._settings.config

    async def serve(self, owner: int | None = None) -> None:
        """Serve until a signal, or until the process of the pidfd `owner` ends."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._unforeseen.of_loop)
        stopped, hurried = asyncio.Event(), asyncio.Event()

        def terminated() -> None:
            (hurried if stopped.is_set() else stopped).set()

        def interrupted() -> None:
            # An operator at a terminal expects the memory to be free, at once.
            if self._kept is not None:
                self._kept.drop()
            stopped.set()
            hurried.set()

        loop.add_signal_handler(signal.SIGTERM, terminated)
        loop.add_signal_handler(signal.SIGINT, interrupted)
        if owner is not None:

            def owner_ended(pidfd: int) -> None:
                loop.remove_reader(pidfd)  # it stays readable
                stopped.set()

            loop.add_reader(owner, owner_ended, owner)
        reload = asyncio.Event()

        def note_reload(outcome: str, changed: str) -> None:
            actor = Actor(os.geteuid(), 0, "SIGHUP")
            self._audit.note(Order("reload", what=changed), outcome, actor)

        loop.add_signal_handler(signal.SIGHUP, reload.set)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # blocked by `kvtier serve`
        # The objects so far live as long as the daemon: exclude them from garbage collection.
        gc.collect()
        gc.freeze()
        await self._open_lower(loop, stopped)
        self.remote.open()
        recorder = Recorder(self.config.state, time.monotonic)
        self._server = Server(
            loop,
            self._listener,
            self._member_of,
            self.tenants,
            self._figures.packed,
            self.config.max_clients,
            recorder,
            self,
            kept=self._kept,
            audit=self._audit,
            hot=self.hot,
        )
        self._server.divide(self.config)
        lag = LoopLag(loop)
        self._figures.serving(self._server, lag)
        taken_over: dict[str, bytes] = {}
        if self._kept is not None:
            taken_over = _take_over(
                self._kept, self.warm, self.tenants, self._map, self._server.writers
            )
        loop.add_reader(self.warm.start(), self._extents_ready)
        self._update_growing()
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
                tasks.create_task(self._run_periodically(), name="tend"),
                tasks.create_task(recorder.run(), name="record"),
                tasks.create_task(self._settings.reload_when(reload, note_reload), name="reload"),
            ]
            repeated: list[tuple[float, str, Callable[[], object]]] = [
                (TELL_S, "status line", self._update_status_line),
                (hints.EVERY_S, "hints", self._note_hints),
                (TRIM_S, "free memory", functools.partial(loop.run_in_executor, None, trim_heaps)),
            ]
            if looked_at is not None:
                self._unforeseen.tried("history", self._history.note)
                repeated.append((EVERY_S, "history", self._history.note))
            running += [tasks.create_task(self._repeat(*one), name=one[1]) for one in repeated]
            if every_s := watchdog_s() / WATCHDOG_PARTS:
                running.append(tasks.create_task(self._feed_watchdog(every_s), name="watchdog"))
            if self._notifier.is_heard:
                running.append(tasks.create_task(self._replace_while_hung(), name="stand in"))
            self.lower.start(tasks)
            self.remote.start(tasks)
            running += [
                tasks.create_task(check_memory(self.tenants[name], ids), name=f"check {name}")
                for name, ids in taken_over.items()
            ]
            await stopped.wait()
            self._figures.stopping = True
            log.info("stopping")
            self._server.disconnect("the daemon was told to stop")
            await self._end_sharing(hurried)
            await self._end_moving(hurried)
            for task in (*running, *self._renewing.values()):
                task.cancel()
        self._notifier.stopping("completing the writes to disk that have started")
        self._limit_stop(STOP_S)
        self._server.close("the daemon was told to stop")
        self._audit.close()
        loop.remove_reader(self.warm.event_fd)  # further extents are not used
        if not await self.lower.close():
            self._leave("a disk or a codec hangs: ending without waiting for it")
        if looked_at is not None:
            looked_at.close()
        lag.stop()
        self.hot.close()
        self.warm.close()
        if self._kept is not None:
            self._kept.close()
        if self._stand_in is not None:
            loop.remove_reader(self._stand_in.ended)
            self._stand_in.end(0)

    async def _end_sharing(self, hurried: asyncio.Event) -> None:
        """Let the remote tier write what waits, until that has ended or `hurried` is set, and end it."""
        remote = self.config.remote
        if remote is not None and remote.stop_s:
            self._limit_stop(STOP_S + remote.stop_s)
            self._notifier.extend_timeout(STOP_S + remote.stop_s)
            await _until_hurried(self.remote.write_last(), hurried)
        await self.remote.end()

    async def _end_moving(self, hurried: asyncio.Event) -> None:
        """Let the tier below memory write what is only in memory, until it has ended or `hurried` is set."""

        def told(progress: str) -> None:
            self._notifier.stopping(progress)
            self._notifier.extend_timeout(STOP_S)

        cold = self.config.cold
        self._limit_stop(STOP_S + (cold.stop_s if cold is not None else 0))
        await _until_hurried(self.lower.end_moving(told), hurried)

    def _limit_stop(self, seconds: float) -> None:
        self._notifier.extend_timeout(STOP_S)
        # If the stop hangs, log where, and end. Where no thread can be started, the stop has no limit.
        with contextlib.suppress(RuntimeError):
            if sys.stderr is not None:
                faulthandler.dump_traceback_later(seconds, exit=True)

    async def _open_lower(self, loop: asyncio.AbstractEventLoop, stopped: asyncio.Event) -> None:
        """Open the tier below memory; this may take long, for a large index or a slow disk."""
        opening, stopping = (
            loop.create_task(self.lower.open(loop)),
            loop.create_task(stopped.wait()),
        )
        while not (opening.done() or stopping.done()):
            self._notifier.extend_timeout(START_S)
            await asyncio.wait(
                [opening, stopping], timeout=START_S / 2, return_when=asyncio.FIRST_COMPLETED
            )
        stopping.cancel()
        if not opening.done():
            opening.cancel()  # closes what was opened, except what hangs
            await asyncio.wait([opening], timeout=END_S)
        if not opening.done():
            self._leave(
                "told to stop while a disk hangs during opening: ending without waiting for it"
            )
        if not opening.cancelled():
            await opening

    def _leave(self, why: str) -> NoReturn:
        """End at once. The process may stay until the disk answers, because requests use its files and
        memory; it frees its socket and its memory before."""
        log.critical("%s", why)
        release_socket(self._listener)
        if self._notifier.is_heard:
            try:
                (self._stand_in or shutdown.StandIn()).end(EXIT_HUNG)
            except (OSError, subprocess.SubprocessError) as error:
                log.error(
                    "cannot start the process that reports the exit code to the service "
                    "manager: %s",
                    error,
                )
        mappings = [*self.lower.mappings(), *(extent.table for extent in self.warm.extents)]
        self.warm.close()
        shutdown.unmap(mappings)
        logging.shutdown()
        os._exit(EXIT_HUNG)

    # --- orders of an operator -------------------------------------------------------

    async def settings(self, order: str) -> dict[str, Any]:
        """See `CurrentConfig.answer`; "log" returns the last lines of the log."""
        if order == "log":
            return {"pid": os.getpid(), "lines": list(RECENT.lines)}
        return await self._settings.answer(order)

    async def tier(self, tier: str, order: str) -> dict[str, Any]:
        """See `LowerTier.order`."""
        if tier == REMOTE:
            return self.remote.order(order)
        return self.lower.order(tier, order)

    def _swap(self, config: Config) -> None:
        """Apply this configuration, which differs only in settings that can change at run time."""
        assert self._server is not None
        before, self._in_force = self._in_force, config
        if config.log_level != before.log_level:
            logging.getLogger().setLevel(config.log_level.upper())
        self._server.divide(config)
        self._audit.reopen(config.audit.path)
        self.lower.reconfigure(config)
        self.remote.reconfigure(config.remote)
        self._renew(left_tenants(before, config))
        if self._kept is not None:
            self._kept.keep_owners(_owners(config, self.tenants))

    def _renew(self, left: set[str]) -> None:
        """End the sessions of users whose tenant or role changed; replace the memory of tenants they left."""
        assert self._server is not None
        ended = self._server.renew_members()
        for name, tenant in self.tenants.items():
            if name not in left and not self._server.lacks_member(tenant):
                continue
            nbytes = renewing.retire(tenant, self.warm)
            self._server.slots_retired(tenant)
            self._update_growing()
            log.warning(
                "users have left tenant %s, or may only read now: its %s of memory are replaced; %d clients "
                "were disconnected", name, format_bytes(nbytes), ended,
            )  # fmt: skip
            if (task := self._renewing.get(name)) is not None:
                task.cancel()
            work = renewing.renew(
                tenant,
                self.warm,
                self._update_growing,
                lambda: self.lower.state("warm") != "on",
                task,
            )
            self._renewing[name] = asyncio.get_running_loop().create_task(work)

    # --- status -------------------------------------------------------------------

    async def _show(self, loop: asyncio.AbstractEventLoop) -> web.Web | None:
        """Serve the status page and the metrics if they are configured."""
        if self._port is None:
            return None
        assert self.config.http is not None
        pages = web.HttpPages(
            lambda: self._figures.of(None), self._history.report, self.config.http.hosts
        )
        shown = web.Web(loop, pages, self._count_failure)
        await shown.listen(self._port)
        log.info("status page and metrics: http://%s", _address(self._port))
        return shown

    async def _repeat(self, every_s: float, what: str, work: Callable[[], object]) -> None:
        while True:
            await asyncio.sleep(every_s)
            self._unforeseen.tried(what, work)

    def _note_hints(self) -> None:
        self._figures.hints.note(self._figures.of(None))

    def _update_status_line(self) -> None:
        """Keep `systemctl status` up to date."""
        line = self._figures.line()
        if line != self._told:
            self._notifier.status(line)
            self._told = line

    async def _feed_watchdog(self, every_s: float) -> None:
        """Notify the watchdog as long as a block can be saved to memory and loaded again. The disks are
        probed separately: a disk that hangs switches its tier off."""
        probe = Probe()
        while True:
            if self._unforeseen.tried("watchdog probe of memory", probe.put_and_get):
                self._notifier.alive()
            self._unforeseen.tried("watchdog probe of disks", self.lower.probe)
            await asyncio.sleep(every_s)

    async def _replace_while_hung(self) -> None:
        """Make another process the service's main one while a disk hangs: this one may be unable to end."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TEND_S)
            if self.lower.hangs and self._stand_in is None:
                try:
                    self._stand_in = await asyncio.to_thread(shutdown.StandIn)
                except (OSError, subprocess.SubprocessError) as error:
                    log.error(
                        "cannot start the process that replaces this one as the "
                        "service's main process: %s",
                        error,
                    )
                    return
                log.info(
                    "a disk hangs: another process is the service's main process until it answers"
                )
                loop.add_reader(self._stand_in.ended, os._exit, EXIT_HUNG)
            elif not self.lower.hangs and self._stand_in is not None:
                stand_in, self._stand_in = self._stand_in, None
                loop.remove_reader(stand_in.ended)
                await asyncio.to_thread(stand_in.give_back)  # waits for the service manager

    # --- periodic work --------------------------------------------------------------------

    async def _run_periodically(self) -> None:
        """End expired leases, forget expired blocks, disconnect clients that do not respond."""
        assert self._server is not None
        tried, events = self._unforeseen.tried, self._server.events
        while True:
            await asyncio.sleep(TEND_S)
            now = self._server.clock()
            for name, tenant in self.tenants.items():
                tried(f"leases of tenant {name}", tenant.catalog.expire_leases, now)
                tried(f"expired blocks of tenant {name}", tenant.catalog.forget_expired, now)
            self.lower.run_periodic()
            tried("remote tier", self.remote.run_periodic)
            tried("clients", self._server.check_clients)
            tried("events", events.sample, self.tenants.values(), self.lower)
            tried("audit log", self._audit.flush)

    def _count_failure(self) -> None:
        if self._server is not None:
            self._server.failures["internal"] += 1

    def _member_of(self, peer: Peer) -> tuple[Tenant | None, Role]:
        """The peer's tenant and role by the configuration in force."""
        member = member_of(self.config, peer.uid, peer.groups)
        return (self.tenants[member.tenant], member.role) if member else (None, Role.READ)

    def _extents_ready(self) -> None:
        for extent in self.warm.ready():
            tenant = self.tenants[extent.tenant]
            tenant.add(extent)
            self._map(extent)
            done = format_bytes(sum(e.nbytes for e in self.warm.extents))
            self._notifier.status(f"warm tier {done} of {format_bytes(self.warm.capacity_bytes)}")
        self._update_growing()
        if self._server is not None:
            self._server.memory_grew()
        if self.warm.complete:
            log.info(
                "warm tier is complete: %s, of which %s in huge pages",
                format_bytes(self.warm.allocated_bytes),
                format_bytes(self.warm.huge_bytes),
            )

    def _map(self, extent: Extent) -> None:
        self.lower.map(extent)
        self.remote.map(extent)

    def _update_growing(self) -> None:
        for tenant in self.tenants.values():
            retired = any(one.is_retired and not one.is_empty for one in tenant.extents)
            tenant.catalog.growing = not self.warm.complete or retired


async def _until_hurried(work: Coroutine[Any, Any, None], hurried: asyncio.Event) -> None:
    """Do this until it has ended, or is cancelled because `hurried` is set."""
    ways = [asyncio.create_task(work), asyncio.create_task(hurried.wait())]
    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    for way in ways:
        way.cancel()
    await asyncio.wait(ways)
    if not ways[0].cancelled():
        ways[0].result()


def _owners(config: Config, tenants: Mapping[str, Tenant]) -> dict[str, bytes]:
    return {
        name: owner_of(tenants[name].secret, labelled_users(tenant))
        for name, tenant in config.tenants.items()
    }


def _take_over(
    kept: KeptArena, warm: WarmTier, tenants: Mapping[str, Tenant], use: Callable[[Extent], None],
    writers: Writers,
) -> dict[str, bytes]:  # fmt: skip
    """Take over what an earlier daemon left in memory; return its ids by tenant. `use` gets each extent."""
    started = time.monotonic()
    noted: dict[str, list[tuple[int, int, int]]] = {name: [] for name in tenants}
    for extent in warm.taken_over():
        number = tenants[extent.tenant].add(extent)
        use(extent)
        noted[extent.tenant] += [(number, first, pages) for first, pages in extent.noted]
    taken, dropped = {}, 0
    for name, tenant in tenants.items():
        blocks = tenant.catalog.kept
        taken[name], sessions, lost = blocks.adopt(kept.spaces(name), noted[name])
        dropped += lost
        writers.watch(tenant, sessions)
        blocks.adopt_pins(kept.pins(name), started)
        blocks.keep_pins(functools.partial(kept.keep_pins, name))
        blocks.keep_spaces(functools.partial(kept.keep_spaces, name))
    writers.forget_others()
    kept.settle()
    if kept.kept_bytes:
        log.info(
            "took over %s of memory with %d blocks from the earlier daemon in %.2f s; %d blocks were dropped",
            format_bytes(kept.kept_bytes), sum(map(len, taken.values())) // ID_BYTES,
            time.monotonic() - started, dropped,
        )  # fmt: skip
    return taken


def _address(port: socket.socket | None) -> str:
    """The address of the status page; empty without one."""
    if port is None:
        return ""
    host, number, *_ = port.getsockname()
    return address_text(host, number)


def _uvloop_factory() -> Any:
    """uvloop's event loop if it is installed, otherwise None for asyncio's."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
