"""The disk of one directory: the native worker for its files, and whether it is usable.

Reads and writes are two lanes: a file system that is full, frozen or read-only is still read. A lane is off
while none of its operations completes, and for some time after several faults in a row.
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
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

from kvtier.frame import ELEMENTS, PAGE
from kvtier_daemon.codec.choice import LATELY_S, Average, Rates
from kvtier_daemon.planning import DiskLink
from kvtier_kernels import Disk, Mapping

log = logging.getLogger(__name__)
T = TypeVar("T")
Args = TypeVarTuple("Args")

# token, fd, flags, file offset, nbytes, extent, deadline, memory offset
OPERATION = struct.Struct("<QiIQQIIQ")
DIGEST_TAIL = struct.Struct("<16s")
HEADER_TAIL = struct.Struct("<QQ")
# Digest and bytes of the payload, bytes of the header, elements, a recipe's number, the number of the keys,
# and the identity.
FRAME_TAIL = struct.Struct("<16sQIHHI68s")
URGENT, DIGEST, SEAL = 1, 2, 4
READ_MS = 5000
# Of encoded blocks: on their way to all disks, and on their way from all disks.
STAGED_BYTES = 128 << 20
HANGS_S = 5.0  # without a completion while operations are pending
FAULTS_TO_OFF = 5
TURN_S = 0.001  # for callbacks in one iteration of the loop
POLL_S = 0.1
OFF_S, LONGEST_OFF_S = 5.0, 300.0
DTYPES = {number: dtype for dtype, number in ELEMENTS.items()}
# Errors that are no faults of the disk: too late, cancelled, wrong bytes, not decoded, no memory to read
# into, no page behind a slot, no key.
BENIGN = (
    errno.ETIMEDOUT, errno.ECANCELED, errno.EBADMSG, errno.ENODATA, errno.ENOTRECOVERABLE,
    errno.ENOMEM, errno.EFAULT, errno.ENOKEY,
)  # fmt: skip

Callback = Callable[[int, bytes | None], None]  # an errno or 0, and the bytes or the digest
StagedCallback = Callable[[int, memoryview | None], None]  # an errno or 0, and memory of the worker


class DiskLane:
    """The health of the reads, or of the writes, of one disk."""

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self.failure = ""
        self.hangs = False
        self.good = 0  # operations that succeeded
        self.faults = 0  # of the disk, not of the data
        self._name = name
        self._clock = clock
        self._pending = 0
        self._moved_at = 0.0  # time of the last completion, or of the first pending operation
        self._in_a_row = 0
        self._off_until = 0.0
        self._off_s = OFF_S

    @property
    def is_on(self) -> bool:
        return not self.hangs and (not self._off_until or self._clock() >= self._off_until)

    @property
    def given_up(self) -> bool:
        return self._off_until == float("inf")

    def began(self) -> None:
        if not self._pending:
            self._moved_at = self._clock()
        self._pending += 1

    def ended(self, code: int = 0) -> None:
        self._pending -= 1
        # An operation that timed out in the queue never reached the disk.
        if code != errno.ETIMEDOUT:
            self._moved_at = self._clock()

    def worked(self) -> None:
        self.good += 1
        self._in_a_row = 0
        if self._clock() < self._off_until:
            return  # it started before the fault
        if self.failure and not self.hangs:
            log.info("cold: %s: works again", self._name)
            self.failure = ""
        self._off_until, self._off_s = 0.0, OFF_S

    def fault(self, what: str, code: int) -> None:
        """Count and log a fault; several in a row turn the lane off."""
        self.faults += 1
        failure = f"{what}: {os.strerror(code)}"
        log.error("cold: %s", failure)
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

    def check(self) -> None:
        """Detect whether operations hang, or complete again."""
        hangs = self._pending > 0 and self._clock() - self._moved_at > HANGS_S
        if hangs and not self.hangs:
            self.failure = f"{self._name}: no request completed for {HANGS_S:.0f} s"
            log.error("cold: %s; not used until one completes", self.failure)
        elif self.hangs and not hangs:
            log.info("cold: %s: requests complete again", self._name)
            self.failure = ""
        self.hangs = hangs


class StoppedWorker:
    """Replaces a worker that was stopped. It does nothing; the disk cancels all operations."""

    queued = (0, 0, 0)

    def register(self, mapping: Mapping, fixed: bool = True) -> int:
        raise OSError(errno.ESHUTDOWN, "the disk was closed")

    def ignore(self, *_: Any, **__: Any) -> None:
        pass

    release = read = read_frames = read_bytes = write = sync = ignore

    def moved(self) -> tuple[int, float, dict[tuple[int, int], tuple[int, float]]]:
        return 0, 0.0, {}

    def done(self) -> list[tuple[int, int, bytes | None]]:
        return []

    def stop(self, timeout_s: float) -> int:
        return 0


class Operations:
    """The operations of a worker that have not ended. `failed` is called if a callback raises."""

    def __init__(self, loop: asyncio.AbstractEventLoop, failed: Callable[[], None]) -> None:
        self.is_stopped = False  # new operations are cancelled
        self._loop = loop
        self._failed = failed
        self._waiting: dict[int, tuple[DiskLane, Callable[[int, Any], None], bool]] = {}
        self._ended: deque[tuple[int, int, Any]] = deque()
        self._last_token = 0
        self._idle = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, lane: DiskLane, callback: Callable[[int, Any], None], proves: bool) -> int:
        """Return the token of a new operation. `proves`: its success proves that the lane works."""
        self._last_token = token = self._last_token + 1
        self._waiting[token] = lane, callback, proves
        lane.began()
        if self.is_stopped:
            self._ended.append((token, errno.ECANCELED, None))
            self._loop.call_soon(self.end, ())
        return token

    def end(self, results: Iterable[tuple[int, int, Any]] = ()) -> None:
        """Call the callbacks of ended operations, for one millisecond per iteration of the loop."""
        self._ended += results
        until = time.monotonic() + TURN_S
        while self._ended:
            token, code, extra = self._ended.popleft()
            lane, callback, proves = self._waiting.pop(token)
            lane.ended(code)
            try:
                if proves and not code:
                    lane.worked()
                callback(code, extra)
            except Exception:
                log.exception("cold: internal error while completing a read or write")
                self._failed()
            if self._ended and time.monotonic() >= until:
                self._loop.call_soon(self.end)
                return
        if not self._waiting:
            self._idle.set()

    async def wait(self, timeout_s: float) -> None:
        self._idle.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)


class FileThread:
    """Opens, creates and removes the files of one directory. Its calls count as writes of `lane`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str, lane: DiskLane) -> None:
        self._loop = loop
        self._lane = lane
        self._thread = ThreadPoolExecutor(1, f"kvtier-files {name}")
        self._jobs: set[Future[Any]] = set()

    @property
    def is_busy(self) -> bool:
        return bool(self._jobs)

    def run(self, work: Callable[[*Args], T], *args: *Args) -> asyncio.Future[T]:
        """Call `work` in the thread."""
        job = self._thread.submit(work, *args)
        self._jobs.add(job)
        self._lane.began()

        def ended(_: Future[T]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop may be closed
                self._loop.call_soon_threadsafe(self._lane.ended)

        job.add_done_callback(self._jobs.discard)
        job.add_done_callback(ended)
        return asyncio.wrap_future(job)

    def cancel(self) -> None:
        """Cancel the calls that have not started, and refuse new ones."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def join(self, timeout_s: float) -> bool:
        """Wait for the call that has started. False if it is still running."""
        return not wait(list(self._jobs), timeout_s).not_done


class DirectoryDisk:
    """The worker of one directory. Callbacks are called in the loop. Operations have a token, which
    `Operations` maps to their callback."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        name: str,
        engine: str,
        clock: Callable[[], float],
        decoders: int = 1,
        staged_bytes: int = STAGED_BYTES,
    ) -> None:
        self.reads = DiskLane(f"reading {name}", clock)
        self.writes = DiskLane(f"writing {name}", clock)
        self.link = DiskLink(clock)
        self.bandwidth = Average(LATELY_S)  # bytes read per second of disk time
        self._moved: tuple[int, float, dict[tuple[int, int], tuple[int, float]]] = (0, 0.0, {})
        self.short = ""  # why no more files can be created
        self.elsewhere = ""  # why the path no longer leads to the directory
        self._loop = loop
        self._clock = clock
        self.is_over = False  # new operations never complete
        self.lost = ""  # why its directory must be closed and opened again
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        worker = Disk(self._event_fd, engine, decoders=decoders, staged_bytes=staged_bytes)
        self.worker: Disk | StoppedWorker = worker
        self.engine = worker.engine
        # Number 0, for the daemon's own pages, which have no payload.
        self.worker.register(anonymous(PAGE), fixed=False)
        failure = "internal error, see the daemon's log; disabled until restart"
        self.operations = Operations(loop, partial(self.give_up, failure))
        self.files = FileThread(loop, name, self.writes)
        loop.add_reader(self._event_fd, self._completed)

    @property
    def failure(self) -> str:
        return self.writes.failure or self.reads.failure or self.elsewhere or self.short

    @property
    def faults(self) -> int:
        return self.reads.faults + self.writes.faults

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
        while self.operations or self.files.is_busy:
            await self.operations.wait(POLL_S)

    def check(self) -> None:
        self.reads.check()
        self.writes.check()

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
        callback: Callback,
    ) -> bytes:  # fmt: skip
        """Return an operation for `worker.read`."""
        token = self.operations.add(self.reads, callback, True)
        return OPERATION.pack(
            token, fd, DIGEST | URGENT if urgent else DIGEST, at, nbytes, extent, READ_MS, offset
        ) + DIGEST_TAIL.pack(digest)

    def encoded_op(
        self, fd: int, at: int, sizes: tuple[int, int, int], extent: int, offset: int, digest: bytes,
        element: int, recipe: int, urgent: bool, callback: Callback, keys: int = 0, identity: bytes = b"",
    ) -> bytes:  # fmt: skip
        """Return an operation for `worker.read_frames`; the sizes are those of header, payload and block.
        `recipe` is the number of its recipe from 1, or 0; `keys` that of an encrypted frame's keys."""
        token = self.operations.add(self.reads, callback, True)
        header_bytes, nbytes, block_bytes = sizes
        return OPERATION.pack(
            token, fd, URGENT if urgent else 0, at, block_bytes, extent, READ_MS, offset
        ) + FRAME_TAIL.pack(digest, nbytes, header_bytes, element, recipe, keys, identity)

    def read_text(self, fd: int, at: int, nbytes: int, callback: Callback) -> None:
        """Read bytes of this file, after all urgent reads."""
        token = self.operations.add(self.reads, callback, True)
        self.worker.read_bytes(token, fd, at, nbytes, False, READ_MS)

    def read_staged(
        self, fd: int, at: int, nbytes: int, callback: StagedCallback, urgent: bool
    ) -> None:
        """Read bytes for a codec into memory of the worker, which pauses reads of frames while much of it is
        in use. Keep no view of it."""
        token = self.operations.add(self.reads, callback, True)
        self.worker.read_bytes(token, fd, at, nbytes, urgent, READ_MS, staged=True)

    def frame_op(
        self, fd: int, at: int, nbytes: int, extent: int, offset: int, header: tuple[int, int],
        callback: Callback,
    ) -> bytes:  # fmt: skip
        """Return an operation for `write`; `header` has the offset and size of its header in the headers."""
        token = self.operations.add(self.writes, callback, False)
        return OPERATION.pack(
            token, fd, DIGEST | SEAL, at, nbytes, extent, 0, offset
        ) + HEADER_TAIL.pack(*header)

    def write(
        self, fd: int, ops: bytes | bytearray, headers: bytes | bytearray, callback: Callback
    ) -> None:
        """Write to this file, then sync it, without a deadline: the slots are in use until both have ended.
        `callback` gets the first error."""
        self.worker.write(ops, headers)
        self.worker.sync(self.operations.add(self.writes, callback, True), fd)

    def write_text(self, fd: int, at: int, text: bytes, callback: Callback) -> None:
        """Write these pages, and sync."""
        token = self.operations.add(self.writes, lambda *_: None, False)
        op = OPERATION.pack(token, fd, 0, at, 0, 0, 0, 0)
        self.write(fd, op + HEADER_TAIL.pack(0, len(text)), text, callback)

    def _completed(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event_fd)
            self.operations.end(self.worker.done())

    # --- end ---------------------------------------------------------------------------------

    async def close(self, timeout_s: float) -> bool:
        """Wait for all operations, then stop. False if the kernel still uses files or memory."""
        until = self._clock() + timeout_s
        if self.operations:
            await self.operations.wait(timeout_s)
        self._disconnect()
        return await asyncio.to_thread(self._end, max(0.0, until - self._clock()))

    def stop(self, timeout_s: float) -> bool:
        """Stop at once. False as in `close`."""
        self._disconnect()
        return self._end(timeout_s)

    def _disconnect(self) -> None:
        self.is_over = True
        self.files.cancel()
        self._loop.remove_reader(self._event_fd)

    def _end(self, timeout_s: float) -> bool:
        """Stop the worker, wait for its threads, and free it at once, with its kernel resources."""
        until = self._clock() + timeout_s
        left = self.worker.stop(timeout_s)
        if self._event_fd >= 0:
            os.close(self._event_fd)
            self._event_fd = -1
        if left:
            return False
        self.operations.is_stopped = True  # first: the loop may add an operation at any time
        self.worker = StoppedWorker()
        return self.files.join(max(0.0, until - self._clock()))


def anonymous(nbytes: int) -> Mapping:
    fd = os.memfd_create("kvtier-own", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        return Mapping(fd, nbytes, True)
    finally:
        os.close(fd)
