"""The daemon on the simulated machine: which of its parts are replaced, and how it starts, stops and is
killed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import weakref
from array import array
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from . import virtual  # first: it replaces the clocks
from .clients import FIRST_READER
from .loop import NumberedTask, SimulatedLoop, wrapped
from .machine import (
    MACHINE,
    Child,
    DiskWorker,
    FaultyFiles,
    Index,
    KeptDescriptors,
    Listener,
    Machine,
    Prefaulter,
    Process,
    ViolationError,
)
from .plan import TENANTS, SimulatedConfig

# isort: split
from kvtier_daemon import app as app_module
from kvtier_daemon.app import App
from kvtier_daemon.catalog import admission, blocks, demotion, expiring, reading
from kvtier_daemon.config.schema import ColdConfig, Config, LoadedConfig, TenantConfig, WarmConfig
from kvtier_daemon.observing import loop_lag
from kvtier_daemon.planning import recomputed
from kvtier_daemon.serving import listing
from kvtier_daemon.serving import peer as peer_module
from kvtier_daemon.serving.session import Session
from kvtier_daemon.tiers import switching, warm
from kvtier_daemon.tiers.cold import (
    coding_threads,
    compressor,
    direct_reads,
    directory,
    directory_lock,
    disk,
    encoder,
    eraser,
    flusher,
    frame_memory,
    lifecycle,
    mover,
    read_queue,
    reclaimer,
    recovery,
    scrub,
    segment_store,
    tier,
    tombstones,
)  # fmt: skip
from kvtier_daemon.tiers.cold.segment_log import Segment

PAGE = 4096
FIRST_UID, FIRST_GUEST = 1001, 2001
STOP_S = 60.0  # in which a daemon must stop
INDEX_BYTES = 64 << 10


# --- replaced parts ------------------------------------------------------------------------------


class Origins(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return "file"


class LoadedHere(LoadedConfig):
    """A configuration whose files are what the machine says."""

    def again(self) -> LoadedConfig:
        return loaded(MACHINE.now)


class Failures(logging.Handler):
    """An internal error in the log of the daemon is a violation."""

    def emit(self, record: logging.LogRecord) -> None:
        machine = MACHINE.now
        if machine is None:  # what is left of a simulation that has ended
            return
        if record.exc_info and not isinstance(record.exc_info[1], ViolationError):
            with contextlib.suppress(ViolationError):
                text = logging.Formatter().formatException(record.exc_info)
                machine.violate(f"internal error: {record.getMessage()}\n{text}")
        elif "never retrieved" in (text := record.getMessage()) or "destroyed" in text:
            with contextlib.suppress(ViolationError):
                machine.violate(text)


def _wait(jobs: Iterable[Future[Any]], timeout_s: float) -> SimpleNamespace:
    """Wait for calls in threads, without waiting."""
    machine, jobs = MACHINE.now, list(jobs)
    if machine.disk.hangs_for() <= timeout_s:
        for threads in machine.all_threads:
            if threads.runs_one_of(jobs):
                threads.finish()
    return SimpleNamespace(not_done=[job for job in jobs if not job.done()])


def _peer_of(cls: type[peer_module.Peer], sock: Any) -> peer_module.Peer:
    process: Process = sock.process
    return cls(process.pid, process.uid, os.dup(process.pidfd))


def _pidfd_open(pid: int) -> int:
    process = MACHINE.now.processes.get(pid)
    if process is None or not process.is_alive:
        raise ProcessLookupError
    return os.dup(process.pidfd)


def _finalize(owner: object, call: Any, *args: Any) -> None:
    """Make the call at the end of the owner, or at that of the process, which closes its descriptors."""
    MACHINE.now.finalizers.append(weakref.finalize(owner, call, *args))


class LeftError(BaseException):
    """The daemon ends at once, because a disk hangs. Not an Exception: nothing of it may go on."""


def _leave(app: App, why: str) -> NoReturn:
    MACHINE.now.has_left = True
    raise LeftError(why)


def install() -> None:
    """Replace what must not run here: threads, processes, native I/O, the order of sets."""
    app_module.gc = SimpleNamespace(collect=lambda: None, freeze=lambda: None)
    app_module.faulthandler = SimpleNamespace(dump_traceback_later=lambda *_, **__: None)
    app_module.fd_store = lambda *_: KeptDescriptors(MACHINE.now)
    app_module.TEND_S = 0.5
    lifecycle.POLL_S = 1.0
    flusher.PAUSE_S = 0.2
    flusher.BEGIN_S, flusher.BEGIN_TRIES, reclaimer.BEGIN_S = 0.01, 5, 0.01
    App._leave = _leave
    loop_lag.TICK_S = 5.0
    disk.Disk = DiskWorker
    disk.ThreadPoolExecutor = lambda *_: MACHINE.now.make_threads(waits_for_disk=True)
    disk.wait = _wait
    lifecycle.ThreadPoolExecutor = lambda *_: MACHINE.now.make_threads(waits_for_disk=True)
    lifecycle.Child = Child
    directory.IndexProcess = Index
    directory.lock = Child.lock
    directory.FIRST_MAP_BYTES, directory.OTHER_BYTES = INDEX_BYTES, 0
    coding_threads.started = lambda *_: MACHINE.now.make_threads()
    compressor.WAIT_S, compressor.PRESSURE = 0.5, 0.2
    compressor.WORTH = 1.0  # frames of one page are no smaller than their blocks
    tier.threads_here = lambda: 1
    # The user and the permissions of files are those of this process.
    directory_lock.distrust_cold = lambda *_: ("", "")
    directory_lock._warn_of_missing_index = lambda *_: None
    directory._trusted = lambda _, fd: fd
    directory.ColdDirectory.lacks_bytes = lambda _: 0
    admission.NOTES_BYTES = recomputed.NOTES_BYTES = 4096
    recovery.os = eraser.os = FaultyFiles()
    recovery.distrust = lambda *_, **__: ("", "")
    warm.Prefaulter = Prefaulter
    demotion.SWEEP_IDS = 512
    peer_module.Peer.of = classmethod(_peer_of)
    os.pidfd_open = _pidfd_open
    asyncio.wrap_future = wrapped
    warm.weakref = direct_reads.weakref = SimpleNamespace(finalize=_finalize)
    for module, name, _ in PORTIONS:
        WHOLE[module.__name__, name] = getattr(module, name)
    # Sets of these have the order in which they were filled, and not that of their addresses.
    for kind in (
        Session,
        Segment,
        segment_store.SegmentStore,
        segment_store.WriteBatch,
        disk.DirectoryDisk,
        compressor.FrameThreads,
    ):
        kind.__hash__ = lambda _: 0
    # Nobody reads where a line was logged, and by which thread.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    log = logging.getLogger()
    log.handlers = [Failures()]
    log.setLevel(logging.WARNING)


# Limits of work that is done at once. With a small block count, most would never be reached.
PORTIONS = (
    (flusher, "WRITE_BLOCKS", 3), (reclaimer, "WRITE_BLOCKS", 2), (read_queue, "READ_BLOCKS", 2),
    (read_queue, "ADD_BLOCKS", 2), (read_queue, "GIVE_BACK_BLOCKS", 2), (lifecycle, "RESTORE_ROWS", 2),
    (lifecycle, "DROP_SEGMENTS", 1), (lifecycle, "ACCESSES", 2), (lifecycle, "PIECES", 1),
    (tier, "ERASED_AT_ONCE", 1), (listing, "PURGE_BLOCKS", 3), (reading, "LIMIT_ENDED_IDS", 2),
    (expiring, "LIMIT_DUE_IDS", 2), (flusher, "LIMIT_SAVED", 2), (segment_store, "MOST_BATCHES", 2),
    (scrub, "AT_ONCE", 2), (mover, "READING_BLOCKS", 8), (encoder, "PIECE_BYTES", 8192),
    (compressor, "PIECE_BYTES", 8192), (compressor, "CHUNK", 1), (frame_memory, "GIVE_BYTES", 8192),
    (frame_memory, "DROP_FRAMES", 2),
    (blocks, "LIMIT_QUEUED", 4), (tombstones, "EARLY_BYTES", 256), (switching, "USED_BLOCKS", 2),
)  # fmt: skip
WHOLE: dict[tuple[str, str], int] = {}


def set_portions(are_small: bool) -> None:
    for module, name, small in PORTIONS:
        setattr(module, name, small if are_small else WHOLE[module.__name__, name])


install()

# --- configuration -------------------------------------------------------------------------------


def loaded(machine: Machine) -> LoadedConfig:
    """The configuration of the machine at this time."""
    how: SimulatedConfig = machine.config
    names = TENANTS[: how.tenants]
    warm_bytes = how.memory_pages * PAGE * how.tenants
    cold = None
    if how.directories:
        size = how.directories * (
            how.segments * how.tenants * how.segment_pages * PAGE + INDEX_BYTES
        )
        cold = ColdConfig(
            directories=tuple(machine.folder / f"disk{at}" for at in range(how.directories)),
            size_bytes=size, segment_bytes=how.segment_pages * PAGE, write=how.write,
            admission=how.admission, codec=how.codec, scrub_bytes=how.scrub_bytes,
        )  # fmt: skip
    config = Config(
        socket=Path("/simulated/kvtier.sock"), state=machine.folder, log_level="warning",
        max_clients=32, history_bytes=64 << 10,
        warm=WarmConfig(
            size_bytes=warm_bytes, extent_bytes=min(how.extent_pages, how.memory_pages) * PAGE,
            policy=how.policy, keep_s=how.keep_s,
            compressed_bytes=how.compressed_pages * PAGE * how.tenants,
        ),
        cold=cold,
        tenants={
            name: TenantConfig(
                uids=(FIRST_UID + at, FIRST_GUEST + at)[: 1 + how.has_guests],
                readers=(FIRST_READER + at,),
                quota_bytes=warm_bytes // how.tenants,
                direct_reads=how.has_direct_reads,
            )
            for at, name in enumerate(names)
        },
    )  # fmt: skip
    return LoadedHere(config, Origins())


class Daemon:
    """One run of the daemon."""

    def __init__(self, machine: Machine, number: int) -> None:
        self.machine = machine
        self.number = number
        self.is_up = True
        self.is_stopping = False
        self.connections: list[socket.socket] = []
        machine.begin_daemon()
        set_portions(machine.config.is_portioned)
        machine.loop = self.loop = SimulatedLoop(machine)
        asyncio._set_running_loop(self.loop)  # all the time: clients have no loop
        machine.has_left = False
        self.listener = Listener()
        secrets = {
            name: bytes([at]) * 32 for at, name in enumerate(TENANTS[: machine.config.tenants])
        }
        self.app = machine.app = App(loaded(machine), secrets, self.listener)
        self.main = self.loop.create_task(self.app.serve())
        self.main.add_done_callback(self._ended)
        machine.trace("daemon starts", number)

    def _ended(self, main: NumberedTask) -> None:
        if not main.cancelled() and (error := main.exception()) is not None:
            if isinstance(error, LeftError):
                return
            raise error

    @property
    def is_serving(self) -> bool:
        return self.is_up and not self.is_stopping and self.app._server is not None

    def connect(self, process: Process) -> socket.socket:
        client, connection = self.listener.connect(process, self.machine.config.send_buffer)
        self.connections.append(connection)
        return client

    def check_answered(self, tenant: int, token: bytes, request: int) -> None:
        """This request got all that it waited for: nothing is held for it any longer."""
        if self.is_serving:
            held = self.app.tenants[TENANTS[tenant]].catalog.holds.of
            for session in self.app._server.sessions:
                if session.token == token and (session.id, request) in held:
                    self.machine.violate(f"blocks are held for the answered request {request}")

    def stop(self) -> None:
        """Ask it to stop."""
        self.is_stopping = True
        self.loop.raise_signal(signal.SIGTERM)

    def wait_stopped(self) -> None:
        until = virtual.CLOCK.now + STOP_S
        machine = self.machine
        while not self.main.done():
            if not machine.step(until):
                machine.violate(f"the daemon did not stop in {STOP_S:.0f} s")
        if machine.has_left:
            self.kill()
            return
        self.main.result()
        self._close()
        machine.trace("daemon stopped", self.number)

    def kill(self) -> None:
        """End it at once, as SIGKILL does."""
        machine = self.machine
        machine.trace("daemon killed", self.number)
        for worker in machine.workers:
            worker.killed()
        for replaced in (*machine.index_processes, *machine.prefaulters):
            replaced.killed()
        for threads in machine.all_threads:
            threads.killed(machine.chance.random() < 0.5)
        for task in _tasks_of(self.loop):
            task._log_destroy_pending = False
            with contextlib.suppress(RuntimeError):
                task.get_coro().close()
        self._close()

    def _close(self) -> None:
        """Nothing of the daemon runs any longer: close its descriptors."""
        machine = self.machine
        self.is_up = False
        machine.app = None
        for fd in [*self.loop.readers]:
            self.loop.remove_reader(fd)
        for fd in [*self.loop.writers]:
            self.loop.remove_writer(fd)
        asyncio._set_running_loop(None)
        self.loop.close()
        machine.loop = None
        for connection in self.connections:
            connection.close()
        self.listener.close()
        for tenant in self.app.tenants.values():  # the process does not close its mapping before
            tenant.catalog.blocks.forgets, tenant.forget_count = array("Q", (0,)), None
        for finalizer in machine.finalizers:
            finalizer()


def _tasks_of(loop: SimulatedLoop) -> list[Any]:
    return sorted(asyncio.all_tasks(loop), key=lambda task: task.number)
