"""A worker's side: copies between the engine's pages and the arena, without the GIL.

One thread loads, another one saves. Neither a step nor a load waits for the daemon; a save does, in its
thread, and so does a load between steps that copies its blocks to the memory of a GPU's holder. If the pages
are on a device, `device` copies; the result of a load within a step is then checked after the engine has
submitted the step's computation.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from kvtier import Keys, KvSpec, KvtierError
from kvtier.client import Reader
from kvtier.errors import SpoiltBlocks
from kvtier.key import KEY_BYTES
from kvtier.space import copy_threads
from kvtier.wire import SLOT_BYTES
from kvtier_kernels import Pieces
from kvtier_vllm.daemon import DaemonSession, Reconnect, use_nearby_cores
from kvtier_vllm.layout import Layout, Pages
from kvtier_vllm.messages import (
    Copied,
    DirectOrder,
    Hole,
    LoadOrder,
    RankMapping,
    RankReport,
    Save,
    Step,
    WriteOrder,
)
from kvtier_vllm.options import Options

if TYPE_CHECKING:
    from kvtier_kernels.cuda import Event
    from kvtier_vllm.device import DeviceSide

log = logging.getLogger("vllm.kvtier")

DRAIN_S = 0.5
LOADS_S, POLL_S = 60.0, 0.002  # how long, and how often, to wait for loads that cannot be cancelled
# How long an idle step waits for a load. An engine that continues at once takes CPU time from the copying
# threads, and checks for loads again only after a sleep and another step.
IDLE_WAIT_S = 0.005
# How long a step waits for saves of pages that windows left behind and that it is about to overwrite: a share
# of the time since the last step. Such pages are often reused at once, however long the step took.
CANCEL_SHARE, CANCEL_MOST_S = 0.02, 0.02
# An engine without a step for this long is idle: it has received all loads that it was promised.
IDLE_AFTER_S = 1.0
# How long the thread of a rank's saves waits for the daemon's disk in one save. Saves behind it wait too.
SAVE_WAIT_S = 1.0
# Of copies during a step that computes: they use the CPU time that the engine leaves.
NICE = 10
# Reasons why blocks of a save are missing, and the reasons that would occur again.
DROPS = ("drop:error", "drop:no_daemon", "drop:overwritten", "drop:lost")
FINAL = ("drop:error", "not_saved:no_room")
GROWING = "not_saved:growing"
HOLES = (*DROPS, "not_saved:no_room", "not_saved:leaving", "not_saved:writing", GROWING)

Lane = Literal["load", "now"]


@dataclass(slots=True, eq=False)
class RankState:
    """What the parts of a worker's side share. `lock` protects the fields below it. `tasks` run in the thread
    that saves; `device` copies unless the pages are in the host's memory, which `pieces` describes."""

    layout: Layout
    options: Options
    rank: int
    device: DeviceSide | None
    pieces: list[Pieces]
    shard: int
    # Of a block, by group; the pages of a smaller pipeline stage are shorter.
    shard_bytes: list[int]
    tasks: queue.SimpleQueue[Callable[[], None] | None] = field(default_factory=queue.SimpleQueue)
    idle: bool = False  # this step computes nothing
    lock: threading.Lock = field(default_factory=threading.Lock)
    report: RankReport = field(default_factory=RankReport)
    pending_loads: Counter[bytes] = field(default_factory=Counter)  # by the run of the daemon
    within_step: bool = False
    step_ended: float = float("-inf")

    def fills_shard(self, group: int) -> bool:
        """Whether the pages of a block of this group are its whole shard."""
        return self.layout.groups[group].block_bytes == self.shard_bytes[group]

    def prepare_thread(self) -> None:
        """This thread copies, and does nothing else."""
        if self.device is not None:
            self.device.prepare_thread()
        else:
            use_nearby_cores()


class DaemonMappings:
    """The connection of a rank, and its arenas: those of the scheduler's daemon, with all extents."""

    def __init__(self, state: RankState) -> None:
        self.connection: Reconnect | None = None
        self.readers: dict[bytes, Reader] = {}  # by the run of the daemon
        self._state = state
        # Run, extents, and whether it reads directly.
        self._reported: tuple[bytes, int, bool] | None = None
        self._unwanted: set[bytes] = set()  # runs to unmap with the next step
        self._scheduler_run = b""
        self._pinging = False
        self._joined: DaemonSession | None = None  # takes part in copies on the GPU

    @property
    def session(self) -> DaemonSession | None:
        return self.connection.session if self.connection is not None else None

    def follow(self, step: Step) -> None:
        """Connect with the first step that has the KvSpec; then map what the scheduler uses."""
        if self.connection is None and step.spec:
            engine, spec = msgspec.msgpack.decode(step.spec, type=tuple[str, KvSpec])
            groups = range(len(spec.cache_groups))
            self._state.shard_bytes[:] = [spec.group_block_bytes(group) for group in groups]
            name = f"vllm rank {self._state.rank} {os.getpid()}"
            self.connection = Reconnect(
                self._state.options.socket, spec, name, populate=True, engine=engine,
                on_idle=self.on_idle, device=self._state.device is not None,
            )  # fmt: skip
        if self.connection is not None:
            self._follow(step, self.connection)

    def _follow(self, step: Step, connection: Reconnect) -> None:
        session = connection.session
        changed, self._scheduler_run = step.daemon_run != self._scheduler_run, step.daemon_run
        if session is None:
            if changed:
                connection.retry_now()
        else:
            reader = session.reader
            if self.readers.get(reader.daemon_run) is not reader:
                self._unmap(reader.daemon_run)
                self.readers[reader.daemon_run] = reader
            if self._state.device is not None:
                self._state.device.register(reader)
                self._join_hot(session, self._state.device)
                if self._state.device.direct is not None:
                    self._state.device.direct.follow(session)
            behind = reader.daemon_run != step.daemon_run or reader.extents < step.extents
            # If the scheduler has lost its daemon, this rank's daemon may be gone too.
            if (behind if step.daemon_run else changed) and not self._pinging:
                self._pinging = True
                self._state.tasks.put(self._ping)
        if len(self.readers) > (session is not None):
            # The scheduler uses slots of its own run only, except in loads that it has promised before.
            wanted = {step.daemon_run, *(load.daemon_run for load in step.loads)}
            if session is not None:
                wanted.add(session.reader.daemon_run)
            with self._state.lock:
                wanted |= self._state.pending_loads.keys()
            # The scheduler may promise their slots until it has the report of this step.
            unwanted = self.readers.keys() - wanted
            for run in unwanted & self._unwanted:
                self._unmap(run)
            self._unwanted = unwanted & self.readers.keys()
        else:
            self._unwanted = set()

    def _join_hot(self, session: DaemonSession, device: DeviceSide) -> None:
        """Take part in copies on the GPU, once, if the daemon has memory for them. They are not verified."""
        hot = session.client.link.welcome.hot and not self._state.options.verify
        if session is not self._joined and hot:
            self._joined = session
            self._state.tasks.put(partial(device.shared.join, session, self._state.shard))

    def on_idle(self, session: DaemonSession | None) -> None:
        """If the engine is idle, do the next step's work in the connection's thread: register the daemon's
        memory with the device, and unmap that of daemons that ended, which the next daemon may need."""
        run = session.reader.daemon_run if session is not None else b""
        state = self._state
        with state.lock:
            ended_s = time.monotonic() - state.step_ended
            if state.within_step or state.pending_loads or ended_s < IDLE_AFTER_S:
                return
            for old in self.readers.keys() - {run}:
                self._unmap(old)
        if state.device is not None and session is not None:
            state.device.register(session.reader)

    def _unmap(self, run: bytes) -> None:
        """Unmap an arena in the thread that saves: a large one takes seconds."""
        if self._joined is not None and self._joined.reader.daemon_run == run:
            self._joined = None  # it would keep the arena mapped
        if run in self.readers:
            self._state.tasks.put(partial(self._drop, [self.readers.pop(run)]))

    def _drop(self, readers: list[Reader]) -> None:
        """Drop the last reference to the reader, or let the device do so once its copies have ended."""
        if self._state.device is not None:
            self._state.device.unregister(readers[0])
        readers.clear()

    def _ping(self) -> None:
        """Ping, because the daemon announces new extents before its answer."""
        session = self.session
        if session is not None:
            try:
                session.client.ping()
            except KvtierError as error:
                self.lost(session, error)
        self._pinging = False

    def lost(self, session: DaemonSession, error: KvtierError) -> None:
        """Reconnect if the connection is broken. A daemon that refused a request is still connected."""
        if session.client.link.connection.broken and self.connection is not None:
            self.connection.lost(session, str(error))

    def changed(self) -> RankMapping | None:
        """The mapping that loads use, if it differs from the last one that this returned. No run: none."""
        session, reported = self.session, self._reported
        if session is not None and self.readers.get(session.reader.daemon_run) is session.reader:
            now, identity = session.reader, session.space.identity
            device = self._state.device
            direct = device is not None and device.direct is not None and device.direct.is_on
            self._reported = now.daemon_run, now.extents, direct
        elif reported and (reported[0] not in self.readers or reported[0] in self._unwanted):
            identity, self._reported = b"", (b"", 0, False)
        if self._reported is None or self._reported == reported:
            return None
        run, extents, direct = self._reported
        return RankMapping(run, identity, extents, direct)


@dataclass(slots=True)
class DeviceLoad:
    """A load that a device has started. `why`: the reason if it failed."""

    order: LoadOrder
    reader: Reader | None
    started: float
    why: str = ""
    direct_why: str = ""  # the same of the blocks that the rank reads itself


class RankLoads:
    """The loads of a rank: those within a step in the step's thread, the others in the thread that loads."""

    def __init__(self, state: RankState, mappings: DaemonMappings) -> None:
        self.failed_in_step = False  # what the step computes is not to be saved
        self._state = state
        self._mappings = mappings
        self._started: list[DeviceLoad] = []  # within this step
        self._by_layers = False  # the loads of this step
        self._arrived = threading.Condition(state.lock)
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._bad_blocks: set[int] = set()
        self.orders: queue.SimpleQueue[tuple[LoadOrder, Event | None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="kvtier-load", daemon=True)
        self.thread.start()

    def start(self, loads: Sequence[LoadOrder], by_layers: bool = False) -> None:
        """Execute the loads that this step needs; pass the others to the thread. `by_layers`: the step calls
        `wait_for_layer` for each layer."""
        device = self._state.device
        after = device.fence() if device is not None and loads else None
        if by_layers and device is not None:
            self._start_layers(device, [load for load in loads if load.now], after)
        for load in loads:
            if not load.now:
                with self._state.lock:
                    self._state.pending_loads[load.daemon_run] += 1
                self.orders.put((load, after))
            elif device is not None:
                if not self._by_layers:
                    self._started.append(self._start_device(load, after, "now"))
            else:
                self._end_in_step(load, self._load(load))

    def _start_layers(
        self, device: DeviceSide, loads: Sequence[LoadOrder], after: Event | None
    ) -> None:
        """Start all loads within this step layer by layer, if that is possible. Never raises."""
        state, begun = self._state, time.monotonic()
        readers = [self._mappings.readers.get(load.daemon_run) for load in loads]
        reads = [
            (reader, read)
            for load, reader in zip(loads, readers, strict=True)
            for read in load.shards[state.shard]
            if reader is not None
        ]
        why = ""
        if None not in readers:
            try:
                self._by_layers = device.begin_layers(reads, state.layout.groups[0].parts, after)
            except Exception as error:  # noqa: BLE001  # becomes a cache miss
                log.warning("kvtier: a load failed: %s", str(error))
                self._by_layers, why = True, "error"
        if self._by_layers:
            self._started += [
                DeviceLoad(load, reader, begun, why)
                for load, reader in zip(loads, readers, strict=True)
            ]

    def wait_for_layer(self, name: str) -> None:
        """Let the engine's stream wait for the pages of this layer, which computes next."""
        if self._state.device is not None:
            self._state.device.wait_for_layer(name)

    def _end_in_step(self, load: LoadOrder, good: bool) -> None:
        if not good:
            blocks = [page for read in load.shards[self._state.shard] for page in read.block_ids]
            self._bad_blocks.update(blocks)
            self.failed_in_step = True
        self._ended(load)

    def end_in_step(self) -> None:
        """Check the device's loads within this step. The engine has already submitted its computation."""
        if not self._started:
            return
        started, self._started = self._started, []
        device, by_layers, self._by_layers = self._state.device, self._by_layers, False
        if by_layers and device is not None and not device.end_layers():
            log.warning(
                "kvtier: a layer did not wait for its load, loading whole blocks from now on"
            )
            for one in started:
                one.why = one.why or "error"
        for one in started:
            self._end_in_step(one.order, self._end_device(one, "now"))
            self._fill_hot(one)

    def _fill_hot(self, load: DeviceLoad) -> None:
        """Copy what a step loaded to the device's memory, in the thread that saves: the step does not wait
        for the daemon, and may give the pages away."""
        device, reader = self._state.device, load.reader
        if (
            load.why
            or device is None
            or reader is None
            or device.shared.of(reader.daemon_run) is None
        ):
            return
        reads = load.order.shards[self._state.shard]
        sizes = [group.block_bytes for group in self._state.layout.groups]
        self._state.tasks.put(partial(device.shared.fill, reader, reads, sizes))

    def received(self) -> tuple[set[str], set[str]]:
        """The requests whose load between steps ended, and which failed. An idle step waits a moment."""
        idle = self._state.idle
        if not (idle or self._received):
            return set(), set()
        with self._arrived:
            if idle and self._state.pending_loads:
                self._arrived.wait_for(lambda: bool(self._received), IDLE_WAIT_S)
            received, self._received = self._received, set()
            failed, self._failed = self._failed, set()
        return received, failed

    def bad_blocks(self) -> set[int]:
        """The engine's blocks that a load within this step did not fill."""
        self.end_in_step()
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def _run(self) -> None:
        self._state.prepare_thread()
        while (task := self.orders.get()) is not None:
            load, after = task
            if self._state.device is None:
                good = self._load(load)
            else:
                good = self._load_by_device(self._state.device, load, after)
            self._ended(load)
            with self._arrived:
                self._state.pending_loads -= Counter((load.daemon_run,))
                self._received.add(load.request_id)
                if not good:
                    self._failed.add(load.request_id)
                self._arrived.notify()

    def _load_by_device(self, device: DeviceSide, load: LoadOrder, after: Event | None) -> bool:
        """Load between steps. The pages are the request's until this has ended, so they can be copied on."""
        started = self._start_device(load, after, "load")
        parts = [group.parts for group in self._state.layout.groups]
        reads = load.shards[self._state.shard] if not started.why else ()
        kept = device.shared.start_keeping(load.daemon_run, reads, parts)
        if load.direct is not None and not started.why:
            started.direct_why = self._read_directly(device, load.direct, after)
        good = self._end_device(started, "load")
        device.shared.end_keeping(kept, started.why)
        return good

    def _read_directly(self, device: DeviceSide, order: DirectOrder, after: Event | None) -> str:
        """Fill pages with blocks on disk; return why that failed, or an empty text."""
        state, began = self._state, time.monotonic()
        direct, keys = device.direct, Keys(order.keys, order.parent)
        why = direct.load(keys, order.block_ids, after) if direct is not None else "error"
        with state.lock:
            for outcome, blocks in direct.take_counts() if direct is not None else ():
                state.report.count({f"direct:{outcome}": blocks})
            if not why:
                nbytes = state.layout.groups[0].block_bytes * len(order.block_ids)
                state.report.direct_bytes += nbytes
                state.report.direct_s += time.monotonic() - began
        return why

    def _load(self, load: LoadOrder) -> bool:
        """Copy this rank's shard; return whether every page has its content. Never raises."""
        started = time.monotonic()
        try:
            why, nbytes = self._copy(load)
        except Exception as error:  # noqa: BLE001  # becomes a cache miss
            log.warning("kvtier: a load failed: %s", str(error))
            why, nbytes = "error", 0
        return self._count(load, why, nbytes, started)

    def _copy(self, load: LoadOrder) -> tuple[str, int]:
        state = self._state
        reader = self._mappings.readers.get(load.daemon_run)
        if reader is None:
            return "no_daemon", 0
        moved = 0
        for read in load.shards[state.shard]:
            pieces = state.pieces[read.group]
            nbytes = pieces.block_bytes * len(read.block_ids)
            threads = copy_threads(nbytes, state.options.copy_threads)
            if not read.block_ids:
                continue
            parts = state.layout.groups[read.group].parts
            nice = 0 if load.now or state.idle else NICE
            digests = read.digests if state.fills_shard(read.group) else b""
            try:
                fresh = reader.scatter(
                    read.slots, pieces, read.block_ids, threads, nice, parts, digests
                )
                if read.digests and not digests:
                    reader.verify(read.slots, read.digests, state.shard_bytes[read.group])
            except SpoiltBlocks:
                return "spoilt", 0
            if fresh * SLOT_BYTES < len(read.slots):
                return "stale", 0
            moved += nbytes
        return "", moved

    def _start_device(self, load: LoadOrder, after: Event | None, lane: Lane) -> DeviceLoad:
        """Start the device's copy of this rank's shard. Never raises."""
        device = self._state.device
        assert device is not None
        reader = self._mappings.readers.get(load.daemon_run)
        started = DeviceLoad(
            load, reader, time.monotonic(), "" if reader is not None else "no_daemon"
        )
        if reader is not None:
            parts = [group.parts for group in self._state.layout.groups]
            try:
                device.begin(lane, reader, load.shards[self._state.shard], parts, after)
            except Exception as error:  # noqa: BLE001  # becomes a cache miss
                log.warning("kvtier: a load failed: %s", str(error))
                started.why = "error"
        return started

    def _end_device(self, started: DeviceLoad, lane: Lane) -> bool:
        """Wait for the copy; return whether every page has its content. Never raises."""
        device = self._state.device
        assert device is not None
        reads, why, nbytes = started.order.shards[self._state.shard], started.why, 0
        groups = self._state.layout.groups
        if not why and started.reader is not None:
            try:
                why = "" if device.end(lane, started.reader, reads) else "stale"
                for read in reads if not why else ():
                    if read.digests:  # the device's copy computes none
                        nbytes = self._state.shard_bytes[read.group]
                        started.reader.verify(read.slots, read.digests, nbytes)
            except SpoiltBlocks:
                why = "spoilt"
            except KvtierError as error:
                log.warning("kvtier: a load failed: %s", str(error))
                why = "error"
            slots = {read.group: len(read.slots) // SLOT_BYTES for read in reads}
            nbytes = sum(groups[group].block_bytes * count for group, count in slots.items())
        started.why = why = why or started.direct_why
        return self._count(started.order, why, nbytes, started.started)

    def _count(self, load: LoadOrder, why: str, nbytes: int, started: float) -> bool:
        """Report the end of a copy; return whether it was good."""
        state = self._state
        ended = time.monotonic()
        seconds = 0.0 if load.direct is not None else ended - started
        slots = 0 if why else sum(len(read.slots) for read in load.shards[state.shard])
        blocks = slots // SLOT_BYTES
        copied = Copied(load.number, state.rank, started, ended, nbytes, not why, blocks)
        with state.lock:
            state.report.loaded.append(copied)
            if why:
                state.report.count({f"load_failed:{why}": 1})
                state.report.failed.add(load.number)
            elif seconds:
                state.report.load_bytes += nbytes
                state.report.load_s += seconds
        return not why

    def _ended(self, load: LoadOrder) -> None:
        with self._state.lock:
            self._state.report.loads[load.number] = 1


class Overwritten(Exception):  # noqa: N818
    """The pages of a save belong to another request now."""


class SaveCopy:
    """The copy of one save, shared by its thread and the step. It is copied in pieces: `cancel` waits for the
    piece that is being copied, some milliseconds, and no further piece begins. A piece never includes a
    request to the daemon. A device's piece only starts its copy: `cancel` then lets the engine's stream wait
    for it. `fleeting`: a window may soon give the pages away."""

    def __init__(
        self, save: Save, after: Event | None, fleeting: bool, device: DeviceSide | None = None
    ) -> None:
        self.save = save
        self.after = after
        self._device = device
        self._ended = threading.Event() if fleeting else None
        self._cancelled = False
        self._started = 0  # writes that the device has
        self.wait_until = 0.0
        self._piece = threading.Lock()

    def __enter__(self) -> None:
        self._piece.acquire()
        if self._cancelled:
            self._piece.release()
            raise Overwritten

    def __exit__(self, *_: object) -> None:
        self._piece.release()

    def cancel(self, within_s: float = 0.0) -> None:
        """Return when the engine may overwrite these pages, with work of its stream. A fleeting save gets
        this much time to end first, once."""
        if self._ended is not None and not self._cancelled and within_s > 0.0:
            self._ended.wait(within_s)
        self._cancelled = True
        with self._piece:
            on_device = self._started > 0
        if on_device and self._device is not None:
            self._device.hold_for_saves()

    def started(self) -> None:
        """The device has the copy of one more write; the save's thread will wait for it. Within a piece."""
        self._started += 1
        if self._ended is not None and self._started == len(self.save.writes):
            self._ended.set()

    def waits(self) -> Callable[[], bool] | None:
        """Whether the save may still wait for the daemon's disk: not when the engine needs its pages. None
        for a fleeting save: a step may wait for it."""
        return (
            None
            if self._ended
            else lambda: not self._cancelled and time.monotonic() < self.wait_until
        )

    def ended(self) -> None:
        """The save has ended, with or without success."""
        self._cancelled = True
        if self._ended is not None:
            self._ended.set()


class RankSaves:
    """The saves of a rank, in a thread that also executes the other tasks of the rank."""

    def __init__(self, state: RankState, mappings: DaemonMappings) -> None:
        self.pending: dict[int, SaveCopy] = {}
        self._state = state
        self._mappings = mappings
        self._windows = [group.kind == "window" for group in state.layout.groups]
        self.thread = threading.Thread(target=self._run, name="kvtier-save", daemon=True)
        self.thread.start()

    def start(self, saves: Sequence[Save], cancelled: bool) -> None:
        """The pages of these saves are written: pass them to the thread. `cancelled`: copy none of them."""
        device = self._state.device
        after = device.fence() if device is not None and saves else None
        for save in saves:
            fleeting = any(self._windows[write.group] for write in save.writes)
            copy = self.pending[save.number] = SaveCopy(save, after, fleeting, device)
            if cancelled:
                copy.cancel()
            self._state.tasks.put(partial(self._save, copy))

    def copying(self) -> bool:
        """Whether a save has not ended."""
        with self._state.lock:
            return not self.pending.keys() <= self._state.report.saves.keys()

    def cancel(self, numbers: Sequence[int], until: float) -> None:
        """Return when the engine may overwrite these saves' pages. Fleeting saves have time until then."""
        for number in numbers:
            copy = self.pending.get(number)
            if copy is not None:
                copy.cancel(until - time.monotonic())

    def _run(self) -> None:
        self._state.prepare_thread()
        while (task := self._state.tasks.get()) is not None:
            task()
            del task  # its objects are not kept while the thread waits for the next task

    def _save(self, copy: SaveCopy) -> None:
        state = self._state
        begun = time.monotonic()
        counts = self._store(copy)
        copy.ended()
        number, nbytes = copy.save.number, counts["saved_bytes"]
        ended, blocks = time.monotonic(), counts["saved"]
        copied = Copied(number, state.rank, begun, ended, nbytes, nbytes > 0, blocks)
        with state.lock:
            state.report.saved.append(copied)
            state.report.saves[number] = 1
            hole = take_hole(counts)
            if hole is not None:
                state.report.holes[number] = hole
            state.report.count(counts)

    def _store(self, copy: SaveCopy) -> Counter[str]:
        """Store the blocks; return their outcomes, counted. Never raises."""
        blocks = sum(len(write.keys) for write in copy.save.writes) // KEY_BYTES
        if not self._state.layout.shards.writes(self._state.rank):
            return Counter()
        connection = self._mappings.connection
        session = connection.wait_first() if connection is not None else None
        if session is None:
            return Counter({"drop:no_daemon": blocks})
        counts: Counter[str] = Counter()
        copy.wait_until = time.monotonic() + SAVE_WAIT_S
        try:
            for write in copy.save.writes:
                counts += self._copy(session, write, copy)
                blocks -= len(write.keys) // KEY_BYTES
        except Overwritten:
            counts["drop:overwritten"] = blocks
        except KvtierError as error:
            counts["drop:lost"] = blocks
            self._mappings.lost(session, error)
        except Exception as error:  # noqa: BLE001  # the thread has other saves
            log.warning("kvtier: a save failed: %s", str(error))
            counts["drop:error"] = blocks
        return counts

    def _copy(self, session: DaemonSession, write: WriteOrder, copy: SaveCopy) -> Counter[str]:
        state, keys, ttl_s = self._state, Keys(write.keys, write.parent), copy.save.ttl_s
        # The thread may wait, the engine never does: it cancels a save whose pages it needs.
        with session.space.reserve(
            keys, write.group, state.shard, wait_s=0, ttl_s=ttl_s, waits=copy.waits()
        ) as saving:
            if saving.slots:
                if state.device is not None:
                    with copy:
                        state.device.gather(saving, write.group, write.block_ids, copy.after)
                        copy.started()
                    state.device.end_gather()
                else:
                    pieces = state.pieces[write.group]
                    # The checksum is one of the whole shard.
                    whole = state.fills_shard(write.group)
                    saving.gather(pieces, write.block_ids, checksum=whole, nice=NICE, turn=copy)
                saving.commit(len(saving))
                if state.device is not None:
                    run = session.reader.daemon_run
                    # The blocks are saved, whoever gets their pages now.
                    with contextlib.suppress(Overwritten):
                        state.device.shared.save(run, saving, write.group, write.block_ids, copy)
        nbytes = len(saving) * state.layout.groups[write.group].block_bytes
        counts = Counter({"saved": len(saving), "saved_bytes": nbytes})
        if write.group == state.layout.whole_group and state.shard == 0:
            counts["saved_tokens"] = len(saving) * state.layout.block_tokens
        counts.update(f"not_saved:{why}" for why in saving.refused.values())
        return counts


def take_hole(counts: Counter[str]) -> Hole | None:
    """The hole that a save with these counts left. Removes its drops from the counts."""
    if not any(counts[why] for why in HOLES):
        return None
    again = not any(counts[why] for why in FINAL)
    growing = not any(counts[why] for why in HOLES if why != GROWING)
    drops = Counter({why: counts.pop(why) for why in list(counts) if why in DROPS})
    return Hole(again, drops, growing)


class WorkerSide:
    """One per rank. `arrays`: the memory that contains the pages; `device` copies if it is a device's."""

    def __init__(
        self,
        layout: Layout,
        options: Options,
        rank: int,
        pages: Pages,
        arrays: Sequence[Any],
        device: DeviceSide | None = None,
    ) -> None:
        pieces = [] if device else [_pieces(group, arrays) for group in pages.groups]
        sizes = [group.block_bytes for group in layout.groups]
        self.state = RankState(layout, options, rank, device, pieces, layout.shards.of(rank), sizes)
        self.mappings = DaemonMappings(self.state)
        if device is not None and options.layerwise_bytes and len(layout.groups) == 1:
            device.divide(layout.groups[0].pages, options.layerwise_bytes)
        if device is not None and options.gpu_direct != "off" and layout.has_single_pages:
            device.read_directly(options, self.state.shard)
        self.loads = RankLoads(self.state, self.mappings)
        self.saves = RankSaves(self.state, self.mappings)
        self._step = 0
        self._begun: Step | None = None
        self._began = float("-inf")  # the last step

    def begin(self, step: Step) -> None:
        """A step begins, before it writes any page: end the copies from pages of other requests now. Called
        twice for a step that the model runner announces itself."""
        if step is self._begun:
            return
        state, self._begun = self.state, step
        with state.lock:
            state.within_step = True
        self._step, state.idle = step.number, step.idle
        self.loads.failed_in_step = False
        began, self._began = self._began, time.monotonic()
        until = self._began + min(CANCEL_SHARE * (self._began - began), CANCEL_MOST_S)
        self.saves.cancel(step.overwritten, until)
        self.mappings.follow(step)

    def start_saves(self, saves: Sequence[Save]) -> None:
        """The step has written the pages of these saves. If a load within the step failed, they are
        cancelled: the step computed from unfilled pages."""
        self.loads.end_in_step()
        self.saves.start(saves, cancelled=self.loads.failed_in_step)

    def report(self) -> RankReport:
        """The events since the last report. Ends the step."""
        state = self.state
        with state.lock:
            report, state.report = state.report, RankReport()
            state.within_step, state.step_ended = False, time.monotonic()
        report.step = self._step
        for number in report.saves:
            self.saves.pending.pop(number, None)
        mapping = self.mappings.changed()
        if mapping is not None:
            report.mappings[state.rank] = mapping
        return report

    def end_copies(self) -> None:
        """Return when no copy uses the engine's pages, whose memory is about to be discarded: saves have a
        moment to end, then they are cancelled. Raises TimeoutError if a load does not end."""
        state, began = self.state, time.monotonic()
        while self.saves.copying() and time.monotonic() < began + DRAIN_S:
            time.sleep(POLL_S)
        self.saves.cancel(list(self.saves.pending), 0.0)
        if state.device is not None:
            state.device.wait_for_saves()
        while state.pending_loads:
            if time.monotonic() > began + LOADS_S:
                raise TimeoutError(f"{len(state.pending_loads)} loads still fill pages")
            time.sleep(POLL_S)

    def close(self) -> None:
        """Finish pending saves for a moment, then close the connection, even if the daemon hangs."""
        state, threads = self.state, (self.loads.thread, self.saves.thread)
        self.loads.orders.put(None)
        state.tasks.put(None)
        until = time.monotonic() + DRAIN_S
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        self.saves.cancel(list(self.saves.pending), 0.0)
        if state.device is not None:
            state.device.wait_for_saves()
        self.loads.end_in_step()
        # The memory of a copy that has not ended stays mapped until the process ends.
        if state.device is not None and not any(thread.is_alive() for thread in threads):
            state.device.close()
        if self.mappings.connection is not None:
            self.mappings.connection.close()


def _pieces(group: Sequence[Any], arrays: Sequence[Any]) -> Pieces:
    return Pieces(
        [arrays[page.array] for page in group],
        [page.offset for page in group],
        [page.stride for page in group],
        [page.nbytes for page in group],
    )
