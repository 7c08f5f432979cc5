"""A worker's side: copies between the engine's pages and the arena, without the GIL.

Two threads: one loads, one saves. Neither the step nor a load ever asks the daemon; a save does, in its
thread. Where the pages are a device's, `device` copies; a load that the step needs is then looked after when
the engine has told its device what to compute.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from kvtier import Keys, KvSpec, KvtierError
from kvtier.client import Reader
from kvtier.key import KEY_BYTES
from kvtier.wire import SLOT_BYTES
from kvtier_kernels import Pieces
from kvtier_vllm.copying import Copying, Overwritten, take_hole
from kvtier_vllm.cores import spread
from kvtier_vllm.layout import Layout, Pages
from kvtier_vllm.line import Line, Session
from kvtier_vllm.messages import Copied, Load, Report, Save, Seat, Step, Write
from kvtier_vllm.options import Options

if TYPE_CHECKING:
    from kvtier_kernels.cuda import Event
    from kvtier_vllm.device import DeviceSide

log = logging.getLogger("vllm.kvtier")

LARGE_COPY_BYTES = 32 << 20
DRAIN_S = 0.5
# How long a step that computes nothing waits for a load to end: an engine that goes on at once takes the time
# of the copying threads, and looks again only when it has slept and been through another step.
IDLE_WAIT_S = 0.005
# How long a step waits for saves of what windows have left behind and it is about to overwrite, of the time
# since the last one: that is often given away at once, however long that one took.
END_SHARE, END_MOST_S = 0.02, 0.02
# Of copies beside a step that computes: they take what the engine leaves of the cores.
NICE = 10


@dataclass(slots=True)
class Begun:
    """A load of a device's that this step needs, and what is known of it: `why` it has failed."""

    load: Load
    reader: Reader | None
    started: float
    why: str = ""


class WorkerSide:
    """One for each rank. `arrays` is the memory that the pages lie in, and `device` copies where that is not
    the host's."""

    def __init__(
        self,
        layout: Layout,
        options: Options,
        rank: int,
        pages: Pages,
        arrays: Sequence[Any],
        clock: Callable[[], float] = time.monotonic,
        device: DeviceSide | None = None,
    ) -> None:
        self._layout = layout
        self._windows = [group.kind == "window" for group in layout.groups]
        self._options = options
        self._rank = rank
        self._shard = layout.shards.of(rank)
        self._device = device
        self._pieces = [] if device else [_pieces(group, arrays) for group in pages.groups]
        self._begun: list[Begun] = []
        self._clock = clock
        self._line: Line | None = None
        self._readers: dict[bytes, Reader] = {}
        self._sat: tuple[bytes, int] | None = None  # the run and extents that the scheduler knows
        self._step = 0
        self._began = float("-inf")  # the last step
        self._copying: dict[int, Copying] = {}
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._on_their_way: Counter[bytes] = Counter()  # loads, by the run that they are of
        self._idle = False
        self._report = Report()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._looking = False
        self._heard_of = b""
        self._spoilt = False
        self._to_load: queue.SimpleQueue[tuple[Load, Event | None] | None] = queue.SimpleQueue()
        self._to_save: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._load_all, name="kvtier-load", daemon=True),
            threading.Thread(target=self._save_all, name="kvtier-save", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # --- a step ------------------------------------------------------------------------------

    def begin(self, step: Step) -> None:
        """Before any page is written: end the copies from pages that are somebody else's now."""
        self._step, self._idle = step.number, step.idle
        self._spoilt = False
        began, self._began = self._began, self._clock()
        until = self._began + min(END_SHARE * (self._began - began), END_MOST_S)
        for number in step.overwritten:
            copying = self._copying.get(number)
            if copying is not None:
                copying.end(until - self._clock())
        if self._line is None and step.spec:
            engine, spec = msgspec.msgpack.decode(step.spec, type=tuple[str, KvSpec])
            name = f"vllm rank {self._rank} {os.getpid()}"
            self._line = Line(self._options.socket, spec, name, populate=True, engine=engine)
        if self._line is not None:
            self._sit(step, self._line)

    def _sit(self, step: Step, line: Line) -> None:
        """Be with the same run of the daemon as the scheduler, and have all its extents mapped."""
        session = line.session
        changed, self._heard_of = step.daemon_run != self._heard_of, step.daemon_run
        if session is None:
            if changed:
                line.hurry()
        else:
            reader = session.reader
            if self._readers.get(reader.daemon_run) is not reader:
                self._let_go(reader.daemon_run)
                self._readers[reader.daemon_run] = reader
            if self._device is not None:
                self._device.see(reader)
            behind = reader.daemon_run != step.daemon_run or reader.extents < step.extents
            # Where the scheduler has lost its daemon, this one may be gone as well.
            if (behind if step.daemon_run else changed) and not self._looking:
                self._looking = True
                self._to_save.put(self._look)
        if len(self._readers) > (session is not None):
            # The scheduler names slots of its own run only, but for what it has promised until now.
            wanted = {step.daemon_run, *(load.daemon_run for load in step.loads)}
            if session is not None:
                wanted.add(session.reader.daemon_run)
            with self._lock:
                wanted |= self._on_their_way.keys()
            for run in self._readers.keys() - wanted:
                self._let_go(run)

    def _let_go(self, run: bytes) -> None:
        """Have what nobody reads any more unmapped. Much memory takes seconds, so no step does it."""
        if run in self._readers:
            self._to_save.put(partial(self._drop, [self._readers.pop(run)]))

    def start_loads(self, loads: Sequence[Load]) -> None:
        """Carry out those that this step needs; the others go to their thread."""
        after = self._device.fence() if self._device is not None and loads else None
        for load in loads:
            if not load.now:
                with self._lock:
                    self._on_their_way[load.daemon_run] += 1
                self._to_load.put((load, after))
            elif self._device is not None:
                self._begun.append(self._begin_load(load, after, "now"))
            else:
                self._now_over(load, self._load(load))

    def _now_over(self, load: Load, good: bool) -> None:
        if not good:
            blocks = [page for read in load.shards[self._shard] for page in read.block_ids]
            self._bad_blocks.update(blocks)
            self._spoilt = True
        self._over(load)

    def _end_loads(self) -> None:
        """The engine has told its device what to compute from these: were they what they should be?"""
        if not self._begun:
            return
        begun, self._begun = self._begun, []
        for one in begun:
            self._now_over(one.load, self._end_load(one, "now"))

    def start_saves(self, saves: Sequence[Save]) -> None:
        """The pages of these are written: hand them to their thread. Not where a load that the step needed
        has failed: what was computed from it is nothing to keep."""
        self._end_loads()
        after = self._device.fence() if self._device is not None and saves else None
        for save in saves:
            fleeting = any(self._windows[write.group] for write in save.writes)
            copying = self._copying[save.number] = Copying(save, after, fleeting)
            if self._spoilt:
                copying.end()
            self._to_save.put(partial(self._save, copying))

    def received(self) -> tuple[set[str], set[str]]:
        """The requests whose load between steps is over, and those of them that it failed. In a step that
        computes nothing it waits a moment for one."""
        if not (self._idle or self._received):
            return set(), set()
        with self._arrived:
            if self._idle and self._on_their_way:
                self._arrived.wait_for(lambda: bool(self._received), IDLE_WAIT_S)
            received, self._received = self._received, set()
            failed, self._failed = self._failed, set()
        return received, failed

    def bad_blocks(self) -> set[int]:
        """The engine's blocks that a load within this step did not fill."""
        self._end_loads()
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def report(self) -> Report:
        """What has happened since the last one."""
        with self._lock:
            report, self._report = self._report, Report()
        report.step = self._step
        for number in report.saves:
            self._copying.pop(number, None)
        session = self._line.session if self._line is not None else None
        if session is not None:
            run, extents = session.reader.daemon_run, session.reader.extents
            if self._sat != (run, extents):
                self._sat = run, extents
                report.seats[self._rank] = Seat(run, session.space.identity, extents)
        return report

    def close(self) -> None:
        """Save what waits, for a moment, and hang up: whatever the daemon does."""
        self._to_load.put(None)
        self._to_save.put(None)
        until = self._clock() + DRAIN_S
        for thread in self._threads:
            thread.join(max(0.0, until - self._clock()))
        for copying in list(self._copying.values()):
            copying.end()
        self._end_loads()
        # Memory under a copy that has not ended stays until the process does.
        if self._device is not None and not any(thread.is_alive() for thread in self._threads):
            self._device.close()
        if self._line is not None:
            self._line.close()

    # --- loads -------------------------------------------------------------------------------

    def _own_thread(self) -> None:
        """This thread copies, and nothing else."""
        if self._device is not None:
            self._device.own_thread()
        else:
            spread()

    def _load_all(self) -> None:
        self._own_thread()
        while (task := self._to_load.get()) is not None:
            load, after = task
            if self._device is None:
                good = self._load(load)
            else:
                good = self._end_load(self._begin_load(load, after, "load"), "load")
            self._over(load)
            with self._arrived:
                self._on_their_way -= Counter((load.daemon_run,))
                self._received.add(load.request_id)
                if not good:
                    self._failed.add(load.request_id)
                self._arrived.notify()

    def _load(self, load: Load) -> bool:
        """Copy this rank's shard; whether every page holds what it should. Never raises: it is an edge."""
        started = self._clock()
        try:
            why, nbytes = self._copy_out(load)
        except Exception as error:  # noqa: BLE001  # an edge
            log.warning("kvtier: a load failed: %s", error)
            why, nbytes = "error", 0
        return self._loaded(load, why, nbytes, started)

    def _loaded(self, load: Load, why: str, nbytes: int, started: float) -> bool:
        ended = self._clock()
        seconds = ended - started
        copied = Copied(load.number, self._rank, started, ended, nbytes, not why)
        with self._lock:
            self._report.loaded.append(copied)
            if why:
                self._report.count({f"load_failed:{why}": 1})
                self._report.failed.add(load.number)
            else:
                self._report.load_bytes += nbytes
                self._report.load_s += seconds
        return not why

    def _copy_out(self, load: Load) -> tuple[str, int]:
        reader = self._readers.get(load.daemon_run)
        if reader is None:
            return "no_daemon", 0
        # Those that a copy starts have the cores of its thread, and an engine's own may be bound to one.
        most = min(self._options.copy_threads, len(os.sched_getaffinity(0)))
        moved = 0
        for read in load.shards[self._shard]:
            pieces = self._pieces[read.group]
            nbytes = pieces.block_bytes * len(read.block_ids)
            threads = most if nbytes >= LARGE_COPY_BYTES else 1
            if not read.block_ids:
                continue
            parts = self._layout.groups[read.group].parts
            nice = 0 if load.now or self._idle else NICE
            fresh = reader.scatter(read.slots, pieces, read.block_ids, threads, nice, parts)
            if fresh * SLOT_BYTES < len(read.slots):
                return "stale", 0
            moved += nbytes
        return "", moved

    def _begin_load(self, load: Load, after: Event | None, lane: Literal["load", "now"]) -> Begun:
        """Have a device copy this rank's shard. Never raises: it is an edge."""
        assert self._device is not None
        reader = self._readers.get(load.daemon_run)
        begun = Begun(load, reader, self._clock(), "" if reader is not None else "no_daemon")
        if reader is not None:
            parts = [group.parts for group in self._layout.groups]
            try:
                self._device.begin(lane, reader, load.shards[self._shard], parts, after)
            except Exception as error:  # noqa: BLE001  # an edge
                log.warning("kvtier: a load failed: %s", str(error))
                begun.why = "error"
        return begun

    def _end_load(self, begun: Begun, lane: Literal["load", "now"]) -> bool:
        """Wait for it; whether every page holds what it should. Never raises: it is an edge."""
        assert self._device is not None
        reads, why, nbytes = begun.load.shards[self._shard], begun.why, 0
        if not why and begun.reader is not None:
            try:
                why = "" if self._device.end(lane, begun.reader, reads) else "stale"
            except KvtierError as error:
                log.warning("kvtier: a load failed: %s", str(error))
                why = "error"
            groups = self._layout.groups
            slots = {read.group: len(read.slots) // SLOT_BYTES for read in reads}
            nbytes = sum(groups[group].block_bytes * count for group, count in slots.items())
        return self._loaded(begun.load, why, nbytes, begun.started)

    def _over(self, load: Load) -> None:
        with self._lock:
            self._report.loads[load.number] = 1

    # --- saves -------------------------------------------------------------------------------

    def _save_all(self) -> None:
        self._own_thread()
        while (task := self._to_save.get()) is not None:
            task()
            del task  # waiting for the next one must not keep what it had

    def _drop(self, readers: list[Reader]) -> None:
        """Unmap them, here, or where the device has them, when it has let them go."""
        if self._device is not None:
            self._device.let_go(readers[0])
        readers.clear()

    def _look(self) -> None:
        """Ask for nothing: extents that were added come before the answer."""
        session = self._line.session if self._line is not None else None
        if session is not None:
            try:
                session.client.ping()
            except KvtierError as error:
                self._lost(session, error)
        self._looking = False

    def _save(self, copying: Copying) -> None:
        begun = self._clock()
        counts = self._saved(copying)
        copying.over()
        number, nbytes = copying.save.number, counts["saved_bytes"]
        copied = Copied(number, self._rank, begun, self._clock(), nbytes, nbytes > 0)
        with self._lock:
            self._report.saved.append(copied)
            self._report.saves[number] = 1
            hole = take_hole(counts)
            if hole is not None:
                self._report.holes[number] = hole
            self._report.count(counts)

    def _saved(self, copying: Copying) -> Counter[str]:
        """What became of the blocks, counted. Never raises: the engine's edge."""
        blocks = sum(len(write.keys) for write in copying.save.writes) // KEY_BYTES
        if not self._layout.shards.writes(self._rank):
            return Counter()
        session = self._line.first() if self._line is not None else None
        if session is None:
            return Counter({"drop:no_daemon": blocks})
        counts: Counter[str] = Counter()
        try:
            for write in copying.save.writes:
                counts += self._copy_in(session, write, copying)
                blocks -= len(write.keys) // KEY_BYTES
        except Overwritten:
            counts["drop:overwritten"] = blocks
        except KvtierError as error:
            counts["drop:lost"] = blocks
            self._lost(session, error)
        except Exception as error:  # noqa: BLE001  # an edge: the thread has others to save
            log.warning("kvtier: a save failed: %s", error)
            counts["drop:error"] = blocks
        return counts

    def _copy_in(self, session: Session, write: Write, copying: Copying) -> Counter[str]:
        keys = Keys(write.keys, write.parent)
        # An engine never waits for the daemon's memory.
        with session.space.reserve(keys, write.group, self._shard, wait_s=0) as saving:
            if saving.slots:
                if self._device is not None:
                    with copying:
                        self._device.gather(saving, write.group, write.block_ids, copying.after)
                else:
                    pieces = self._pieces[write.group]
                    saving.gather(pieces, write.block_ids, nice=NICE, turn=copying)
                saving.commit(len(saving))
        nbytes = len(saving) * self._layout.groups[write.group].block_bytes
        counts = Counter({"saved": len(saving), "saved_bytes": nbytes})
        if write.group == self._layout.whole_group and self._shard == 0:
            counts["saved_tokens"] = len(saving) * self._layout.block_tokens
        counts.update(f"not_saved:{why}" for why in saving.refused.values())
        return counts

    def _lost(self, session: Session, error: KvtierError) -> None:
        # A daemon that says no is there.
        if session.client.link.connection.broken and self._line is not None:
            self._line.lost(session, str(error))


def _pieces(group: Sequence[Any], arrays: Sequence[Any]) -> Pieces:
    return Pieces(
        [arrays[page.array] for page in group],
        [page.offset for page in group],
        [page.stride for page in group],
        [page.nbytes for page in group],
    )
