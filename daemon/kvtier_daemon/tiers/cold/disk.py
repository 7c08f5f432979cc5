"""One directory's disk: the native worker for its files, and whether it is usable.

Reads and writes are two lanes: a file system that is full, frozen or read-only is still read. A lane is off
while
none of its operations completes, and for some time after several faults in a row.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar, TypeVarTuple

from kvtier_daemon.codec.base import ELEMENTS
from kvtier_daemon.codec.choice import LATELY_S, Average, Rates
from kvtier_daemon.codec.frame import PAGE
from kvtier_daemon.planning import DiskLink
from kvtier_daemon.tiers.cold.encode_buffer import STAGED_BYTES
from kvtier_kernels import Disk, Mapping, Recipe

log = logging.getLogger(__name__)
T = TypeVar("T")
Args = TypeVarTuple("Args")

# token, fd, flags, file offset, nbytes, extent, deadline, memory offset
OPERATION = struct.Struct("<QiIQQIIQ")
DIGEST_TAIL = struct.Struct("<16s")
HEADER_TAIL = struct.Struct("<QQ")
# Digest and bytes of the payload, bytes of the header, elements, a recipe's number.
FRAME_TAIL = struct.Struct("<16sQIHH")
URGENT, DIGEST, SEAL = 1, 2, 4
READ_MS = 5000
HANGS_S = 5.0  # without a completion while operations are pending
FAULTS_TO_OFF = 5
TURN_S = 0.001
TURN_OVER_S = 0.1
OFF_S, LONGEST_OFF_S = 5.0, 300.0
DTYPES = {number: dtype for dtype, number in ELEMENTS.items()}
# Errors that say nothing about the disk: too late, cancelled, wrong bytes, not decoded, no memory to read
# into, no page behind a slot.
BENIGN = (
    errno.ETIMEDOUT, errno.ECANCELED, errno.EBADMSG, errno.ENODATA, errno.ENOTRECOVERABLE,
    errno.ENOMEM, errno.EFAULT,
)  # fmt: skip

Over = Callable[[int, bytes | None], None]  # an errno or 0, and the bytes or the digest
Seen = Callable[[int, memoryview | None], None]  # the same, of bytes in the worker's memory


class DiskLane:
    """The health of the reads, or of the writes, of one disk."""

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self.failure = ""
        self.good = 0  # operations that succeeded
        self._name = name
        self._clock = clock
        self._pending = 0
        self._moved_at = 0.0  # time of the last completion, or of the first pending operation
        self._hangs = False
        self._in_a_row = 0
        self._off_until = 0.0
        self._off_s = OFF_S

    @property
    def hangs(self) -> bool:
        return self._hangs

    @property
    def is_on(self) -> bool:
        return not self._hangs and (not self._off_until or self._clock() >= self._off_until)

    @property
    def given_up(self) -> bool:
        return self._off_until == float("inf")

    def began(self) -> None:
        if not self._pending:
            self._moved_at = self._clock()
        self._pending += 1

    def ended(self, code: int = 0) -> None:
        self._pending -= 1
        # An operation that was too late never reached the disk.
        if code != errno.ETIMEDOUT:
            self._moved_at = self._clock()

    def worked(self) -> None:
        self.good += 1
        self._in_a_row = 0
        if self._clock() < self._off_until:
            return  # it started before the fault
        if self.failure and not self._hangs:
            log.info("cold: %s: works again", self._name)
            self.failure = ""
        self._off_until, self._off_s = 0.0, OFF_S

    def fault(self, failure: str) -> None:
        if self.given_up:
            return
        self.failure = failure
        self._in_a_row += 1
        if self._in_a_row % FAULTS_TO_OFF == 0:
            self._off_until = self._clock() + self._off_s
            log.error(
                "cold: %s: not used for %.0f s because of repeated faults", self._name, self._off_s
            )
            self._off_s = min(2 * self._off_s, LONGEST_OFF_S)

    def give_up(self, why: str) -> None:
        self._off_until = float("inf")
        self.failure = why

    def tend(self) -> None:
        """See whether it hangs, or has come back."""
        hangs = self._pending > 0 and self._clock() - self._moved_at > HANGS_S
        if hangs and not self._hangs:
            self.failure = f"{self._name}: no request completed for {HANGS_S:.0f} s"
            log.error("cold: %s; not used until one completes", self.failure)
        elif self._hangs and not hangs:
            log.info("cold: %s: requests complete again", self._name)
            self.failure = ""
        self._hangs = hangs


class StoppedWorker:
    """Replaces a worker that was stopped. It does nothing; the disk cancels all operations."""

    def register(self, mapping: Mapping, fixed: bool = True) -> int:
        raise OSError(errno.ESHUTDOWN, "the disk was closed")

    def read(self, ops: bytes | bytearray) -> None:
        pass

    def read_frames(self, ops: bytes | bytearray, recipes: Sequence[Recipe]) -> None:
        pass

    def read_bytes(
        self, token: int, fd: int, at: int, nbytes: int, urgent: bool, deadline_ms: int,
        staged: bool = False,
    ) -> None:  # fmt: skip
        pass

    def write(self, ops: bytes | bytearray, headers: bytes | bytearray) -> None:
        pass

    def sync(self, token: int, fd: int) -> None:
        pass

    def moved(self) -> tuple[int, float, dict[tuple[int, int], tuple[int, float]]]:
        return 0, 0.0, {}

    def done(self) -> list[tuple[int, int, bytes | None]]:
        return []

    @property
    def queued(self) -> tuple[int, int, int]:
        return 0, 0, 0

    def stop(self, timeout_s: float) -> int:
        return 0


class DirectoryDisk:
    """The worker of one directory. The callback `over` of an operation is called in the loop when it has
    ended."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        name: str,
        engine: str,
        clock: Callable[[], float],
        decoders: int = 1,
        staged_bytes: int = STAGED_BYTES,
    ) -> None:
        self.reads, self.writes = (
            DiskLane(f"reading {name}", clock),
            DiskLane(f"writing {name}", clock),
        )
        self.link = DiskLink(clock)
        self.bandwidth = Average(LATELY_S)  # bytes read per second of disk time
        self._moved: tuple[int, float, dict[tuple[int, int], tuple[int, float]]] = (0, 0.0, {})
        self.faults = 0
        self.short = ""  # why no more files can be created
        self.elsewhere = ""  # why the path no longer leads to the directory
        self._loop = loop
        self._clock = clock
        self._waiting: dict[int, tuple[DiskLane, Over]] = {}
        self._over: deque[tuple[int, int, bytes | None]] = deque()
        self._last_token = 0
        self._quiet = asyncio.Event()  # no operation is pending
        self.is_over = False  # new operations never complete
        self.lost = ""  # why its directory must be closed and opened again
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        worker = Disk(self._event_fd, engine, decoders=decoders, staged_bytes=staged_bytes)
        self.worker: Disk | StoppedWorker = worker
        self.engine = worker.engine
        self.worker.register(
            anonymous(PAGE), fixed=False
        )  # for the daemon's own pages, which have no payload
        loop.add_reader(self._event_fd, self._completed)
        self._thread = ThreadPoolExecutor(1, f"kvtier-files {name}")
        self._jobs: set[Future[Any]] = set()

    @property
    def failure(self) -> str:
        return self.writes.failure or self.reads.failure or self.elsewhere or self.short

    def give_up(self, why: str) -> None:
        """Stop all I/O until a restart."""
        self.reads.give_up(why)
        self.writes.give_up(why)

    def lose(self, why: str) -> None:
        """Stop all I/O until the directory is opened again, with another disk."""
        if not self.lost:
            log.error("cold: %s", why)
            self.lost = why
            self.give_up(why)

    async def quiet(self) -> None:
        """Wait until no operation is in flight, regardless of how long the disk hangs."""
        while self._waiting or self._jobs:
            self._quiet.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._quiet.wait(), TURN_OVER_S)

    def fault(self, lane: DiskLane, what: str, code: int) -> None:
        """Count and log a fault of the disk, not of the data."""
        self.faults += 1
        failure = f"{what}: {os.strerror(code)}"
        log.error("cold: %s", failure)
        lane.fault(failure)

    def write_fault(self, what: str, code: int) -> None:
        self.fault(self.writes, what, code)

    @property
    def hangs(self) -> bool:
        return self.reads.hangs or self.writes.hangs

    def tend(self) -> None:
        self.reads.tend()
        self.writes.tend()

    def measure(self, rates: Rates) -> None:
        """Note the read bandwidth and the decoding rates since the last call."""
        before, self._moved = self._moved, self.worker.moved()
        self.bandwidth.note(self._moved[0] - before[0], self._moved[1] - before[1])
        for kind, (nbytes, seconds) in self._moved[2].items():
            nbytes_before, seconds_before = before[2].get(kind, (0, 0.0))
            if nbytes > nbytes_before:
                codec, element = kind
                rates.decoded(
                    codec, DTYPES[element], nbytes - nbytes_before, seconds - seconds_before
                )

    # --- operations --------------------------------------------------------------------------

    def read_op(
        self, fd: int, at: int, nbytes: int, extent: int, offset: int, digest: bytes, urgent: bool,
        over: Over,
    ) -> bytes:  # fmt: skip
        """Return an operation for `read`."""
        flags = DIGEST | URGENT if urgent else DIGEST
        token = self._read_token(over)
        return OPERATION.pack(
            token, fd, flags, at, nbytes, extent, READ_MS, offset
        ) + DIGEST_TAIL.pack(digest)

    def encoded_op(
        self, fd: int, at: int, sizes: tuple[int, int, int], extent: int, offset: int, digest: bytes,
        element: int, recipe: int, urgent: bool, over: Over,
    ) -> bytes:  # fmt: skip
        """Return an operation for `read_encoded`; the sizes are those of the header, the payload and the
        block. `recipe` is the number of its recipe from 1, or 0."""
        token = self._read_token(over)
        header_bytes, nbytes, block_bytes = sizes
        return OPERATION.pack(
            token, fd, URGENT if urgent else 0, at, block_bytes, extent, READ_MS, offset
        ) + FRAME_TAIL.pack(digest, nbytes, header_bytes, element, recipe)

    def read_encoded(self, ops: bytes | bytearray, recipes: Sequence[Recipe]) -> None:
        self.worker.read_frames(ops, recipes)

    def read(self, ops: bytes | bytearray) -> None:
        self.worker.read(ops)

    def read_text(self, fd: int, at: int, nbytes: int, over: Over, urgent: bool = False) -> None:
        """Read bytes of this file, after all urgent reads unless it is urgent."""
        self.worker.read_bytes(self._read_token(over), fd, at, nbytes, urgent, READ_MS)

    def read_staged(self, fd: int, at: int, nbytes: int, over: Seen, urgent: bool) -> None:
        """Read bytes for a codec into memory of the worker, which reads no more frames while much of it is in
        use. Keep no view of it."""
        token = self._read_token(over)
        self.worker.read_bytes(token, fd, at, nbytes, urgent, READ_MS, staged=True)

    def frame_op(
        self, fd: int, at: int, nbytes: int, extent: int, offset: int, header: tuple[int, int],
        over: Over,
    ) -> bytes:  # fmt: skip
        """Return an operation for `write`; `header` has the offset and size of its header in the headers."""
        token = self._token(self.writes, over)
        return OPERATION.pack(
            token, fd, DIGEST | SEAL, at, nbytes, extent, 0, offset
        ) + HEADER_TAIL.pack(*header)

    def write(
        self, fd: int, ops: bytes | bytearray, headers: bytes | bytearray, over: Over
    ) -> None:
        """Write to this file, then sync it, without a deadline: the slots are in use until both have ended.
        `over` gets the first error."""

        def synced(code: int, extra: bytes | None) -> None:
            if not code:
                self.writes.worked()
            over(code, extra)

        self.worker.write(ops, headers)
        self.worker.sync(self._token(self.writes, synced), fd)

    def write_text(self, fd: int, at: int, text: bytes, over: Over) -> None:
        """Write these pages, and sync."""
        op = OPERATION.pack(self._token(self.writes, lambda *_: None), fd, 0, at, 0, 0, 0, 0)
        self.write(fd, op + HEADER_TAIL.pack(0, len(text)), text, over)

    @property
    def is_busy(self) -> bool:
        """Whether the file thread has work."""
        return bool(self._jobs)

    def run_in_thread(self, work: Callable[[*Args], T], *args: *Args) -> asyncio.Future[T]:
        """Run `work` in the thread for this directory's files."""
        job = self._thread.submit(work, *args)
        self._jobs.add(job)
        self.writes.began()

        def over(_: Future[T]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop may be closed by then
                self._loop.call_soon_threadsafe(self.writes.ended)

        job.add_done_callback(self._jobs.discard)
        job.add_done_callback(over)
        return asyncio.wrap_future(job)

    def _read_token(self, over: Callable[[int, Any], None]) -> int:
        def have_read(code: int, extra: Any) -> None:
            if not code:
                self.reads.worked()
            over(code, extra)

        return self._token(self.reads, have_read)

    def _token(self, lane: DiskLane, over: Over) -> int:
        self._last_token += 1
        self._waiting[self._last_token] = lane, over
        lane.began()
        if isinstance(self.worker, StoppedWorker):
            self._over.append((self._last_token, errno.ECANCELED, None))
            self._loop.call_soon(self._settle)
        return self._last_token

    def _completed(self) -> None:
        try:
            os.eventfd_read(self._event_fd)
        except BlockingIOError:
            return
        self._over += self.worker.done()
        self._settle()

    def _settle(self) -> None:
        """Call the callbacks of completed operations, for one millisecond per iteration of the loop."""
        until = time.monotonic() + TURN_S
        while self._over:
            token, code, extra = self._over.popleft()
            lane, over = self._waiting.pop(token)
            lane.ended(code)
            try:
                over(code, extra)
            except Exception:
                log.exception("cold: internal error while completing a read or write")
                self.give_up("internal error, see the daemon's log; disabled until restart")
            if self._over and time.monotonic() >= until:
                self._loop.call_soon(self._settle)
                return
        if not self._waiting:
            self._quiet.set()

    async def close(self, timeout_s: float) -> bool:
        """Wait for all operations, then stop. False if the kernel still uses files or memory."""
        until = self._clock() + timeout_s
        self._quiet.clear()
        if self._waiting:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._quiet.wait(), timeout_s)
        self._disconnect()
        return await asyncio.to_thread(self._end, max(0.0, until - self._clock()))

    def stop(self, timeout_s: float) -> bool:
        """Stop at once. False as in `close`."""
        self._disconnect()
        return self._end(timeout_s)

    def _disconnect(self) -> None:
        """Detach from the loop."""
        self.is_over = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._loop.remove_reader(self._event_fd)

    def _end(self, timeout_s: float) -> bool:
        """Stop the worker and wait for its threads. Frees a stopped worker at once, with its kernel
        resources."""
        until = self._clock() + timeout_s
        left = self.worker.stop(timeout_s)
        if self._event_fd >= 0:
            os.close(self._event_fd)
            self._event_fd = -1
        if left:
            return False
        self.worker = StoppedWorker()
        return not wait(list(self._jobs), max(0.0, until - self._clock())).not_done


def anonymous(nbytes: int) -> Mapping:
    """Return new memory that blocks can be read into."""
    fd = os.memfd_create("kvtier-own", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        return Mapping(fd, nbytes, True)
    finally:
        os.close(fd)
