"""Direct reads of one rank in a thread of their own: a load waits for each batch only for a limited time, so
that a disk that does not answer stops no load of other blocks.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvtier import Keys, Space
from kvtier.direct import calibration_of, read_directly
from kvtier.wire import DirectReadCalibrated
from kvtier_kernels.cuda import CudaError, Driver
from kvtier_plugins.direct import LEASE_MS, RING_BYTES, ArrivedBlock, DirectReader, open_source
from kvtier_plugins.payload_reads import DirectReadsError, PayloadReads, not_counted

log = logging.getLogger("kvtier")

CLOSE_S = 0.5

Answer = list[ArrivedBlock] | Exception | None


class Task(NamedTuple):
    """Work for the thread, and where its result goes."""

    run: Callable[[], Answer]
    answers: queue.SimpleQueue[Answer]


class DirectThread:
    """Reads blocks of group 0 and one shard. `mode` is `auto` or `on`, as for `open_source`. What cannot work
    is logged once, in one line; from then on `is_on` is false."""

    def __init__(self, driver: Driver, mode: str, shard: int) -> None:
        self._driver = driver
        self._mode = mode
        self._shard = shard
        self._reader: DirectReader | None = None
        self._source: PayloadReads | None = None
        self._calibrated: DirectReadCalibrated | None = None
        self._is_off = False
        self._begun = self._ended = 0  # tasks
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvtier-direct", daemon=True)
        self._thread.start()

    @property
    def is_on(self) -> bool:
        """Whether the device is prepared. With `auto` the first load makes the trial read."""
        return self._reader is not None and not self._is_off

    def open(self, space: Space) -> None:
        """Prepare the device for this space, in the thread. Compiles kernels, which takes seconds."""
        self._do(lambda: self._open(space))

    def batches(self, space: Space, keys: Keys, within_s: float) -> Iterator[list[ArrivedBlock]]:
        """Read those blocks that are only on disk, as `DirectReader.batches`. If a batch does not arrive
        within this time, this ends, the late batch is not used, and nothing is read before it has arrived.
        Raises KvtierError or CudaError."""
        reads = self._batches(space, keys)
        while self._begun == self._ended:
            try:
                answer = self._do(lambda: _next(reads)).get(timeout=within_s)
            except queue.Empty:
                log.warning("kvtier: a direct read has not ended within %.1f s", within_s)
                return
            if isinstance(answer, Exception):
                raise answer
            if answer is None:
                return
            yield answer

    def close(self) -> bool:
        """Free everything; false if a read is still in progress: its memory stays until the process ends."""
        self._is_off = True
        self._do(self._free)
        self._tasks.put(None)
        self._thread.join(CLOSE_S)
        return not self._thread.is_alive()

    # --- in the thread ------------------------------------------------------------------------

    def _do(self, task: Callable[[], Answer]) -> queue.SimpleQueue[Answer]:
        self._begun += 1
        answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._tasks.put(Task(task, answers))
        return answers

    def _run(self) -> None:
        self._driver.own_thread()
        while (task := self._tasks.get()) is not None:
            answer = task.run()
            self._ended += 1
            task.answers.put(answer)
            del task, answer  # nothing is kept while the thread waits for the next task

    def _open(self, space: Space) -> None:
        if self._is_off:
            return
        try:
            calibrated = calibration_of(space, 0, self._shard)
            if self._reader is not None and calibrated == self._calibrated:
                return
            if self._mode == "auto" and (why := not_counted()):
                raise DirectReadsError(
                    f"{why}; blocks on disk are loaded through the daemon's memory"
                )
            self._free()
            self._calibrated = calibrated
            spec = space.spec
            reader = DirectReader(self._driver, spec, 0, self._shard, RING_BYTES, calibrated)
            self._reader = reader
            if self._mode == "on":
                self._source, text = open_source(self._mode, reader)
                log.info("kvtier: direct reads: %s", text)
        except Exception as error:  # noqa: BLE001  # a rank does not need it
            self._turn_off(error)

    def _batches(self, space: Space, keys: Keys) -> Iterator[list[ArrivedBlock]]:
        reader = self._reader
        if reader is None or self._is_off:
            return
        if self._source is None and not self._try(reader, space, keys):
            return
        assert self._source is not None
        try:
            yield from reader.batches(space, keys, self._source)
        except (CudaError, DirectReadsError) as error:
            self._turn_off(error)
            raise

    def _try(self, reader: DirectReader, space: Space, keys: Keys) -> bool:
        """Make the trial read of `auto`, with the first frame that the daemon grants."""
        lease = read_directly(space, keys, reader.codecs, 0, self._shard, LEASE_MS, 0, 1)
        if not lease.frames:
            return False
        try:
            self._source, text = open_source("auto", reader, lease.frames[0])
        except (CudaError, DirectReadsError) as error:
            self._turn_off(error)
            return False
        finally:
            lease.end([False])
        log.info("kvtier: direct reads: %s", text)
        return True

    def _turn_off(self, error: Exception) -> None:
        if not self._is_off:
            log.warning("kvtier: no direct reads: %s", str(error))
        self._is_off = True
        self._free()

    def _free(self) -> None:
        reader, self._reader = self._reader, None
        source, self._source = self._source, None
        if source is not None:
            if reader is not None:
                self._driver.try_call("cuStreamSynchronize", reader.stream)
            source.close()
        if reader is not None:
            reader.close()


def _next(reads: Iterator[list[ArrivedBlock]]) -> Answer:
    try:
        return next(reads, None)
    except Exception as error:  # noqa: BLE001  # raised in the other thread
        return error
