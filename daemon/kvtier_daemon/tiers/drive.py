"""One directory's disk: the native worker that reads and writes its files, and whether it is worth asking.

Reads and writes are two lanes: a file system without room, or frozen, or read-only, is still read. A lane is
off while nothing of it comes back, and for a while after several faults in a row.
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

from kvtier.codec.base import ELEMENTS
from kvtier.codec.choice import LATELY_S, Average, Rates
from kvtier.codec.frame import PAGE
from kvtier.planning import Link
from kvtier_daemon.tiers.staging import STAGED_BYTES
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
HANGS_S = 5.0  # without a completion, while there is something to complete
FAULTS_TO_OFF = 5
TURN_S = 0.001
TURN_OVER_S = 0.1
OFF_S, LONGEST_OFF_S = 5.0, 300.0
DTYPES = {number: dtype for dtype, number in ELEMENTS.items()}
# They say nothing of the disk: too late, called off, not the bytes that were asked for, not decoded, no
# memory of ours to read to, no page behind a slot.
BENIGN = (
    errno.ETIMEDOUT, errno.ECANCELED, errno.EBADMSG, errno.ENODATA, errno.ENOTRECOVERABLE,
    errno.ENOMEM, errno.EFAULT,
)  # fmt: skip

Over = Callable[[int, bytes | None], None]  # an errno or 0, and the bytes or the digest
Seen = Callable[[int, memoryview | None], None]  # the same, of bytes in the worker's memory


class Lane:
    """The reads, or the writes, of one disk: how they fare."""

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self.failure = ""
        self.good = 0  # what has worked so far
        self._name = name
        self._clock = clock
        self._pending = 0
        self._moved_at = 0.0  # when something last came back, or began to be waited for
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
        # One that was too late never was with the disk.
        if code != errno.ETIMEDOUT:
            self._moved_at = self._clock()

    def worked(self) -> None:
        self.good += 1
        self._in_a_row = 0
        if self._clock() < self._off_until:
            return  # begun before; what it shows is old
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
            log.error("cold: %s: off for %.0f s", self._name, self._off_s)
            self._off_s = min(2 * self._off_s, LONGEST_OFF_S)

    def give_up(self, why: str) -> None:
        self._off_until = float("inf")
        self.failure = why

    def tend(self) -> None:
        """See whether it hangs, or has come back."""
        hangs = self._pending > 0 and self._clock() - self._moved_at > HANGS_S
        if hangs and not self._hangs:
            self.failure = f"{self._name}: nothing has come back for {HANGS_S:.0f} s"
            log.error("cold: %s; off until it does", self.failure)
        elif self._hangs and not hangs:
            log.info("cold: %s: comes back", self._name)
            self.failure = ""
        self._hangs = hangs


class Ended:
    """In place of a worker that has ended: it moves nothing. The drive ends what is asked of it."""

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


class Drive:
    """The worker of one directory. `over` of an operation is called in the loop when it has ended."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        name: str,
        engine: str,
        clock: Callable[[], float],
        decoders: int = 1,
        staged_bytes: int = STAGED_BYTES,
    ) -> None:
        self.reads, self.writes = Lane(f"reading {name}", clock), Lane(f"writing {name}", clock)
        self.link = Link(clock)
        self.bandwidth = Average(LATELY_S)  # of the disk alone: bytes read, for seconds
        self._moved: tuple[int, float, dict[tuple[int, int], tuple[int, float]]] = (0, 0.0, {})
        self.faults = 0
        self.short = ""  # why there are no more files
        self.elsewhere = ""  # where the directory is not what it was any more
        self._loop = loop
        self._clock = clock
        self._waiting: dict[int, tuple[Lane, Over]] = {}
        self._over: deque[tuple[int, int, bytes | None]] = deque()
        self._last_token = 0
        self._quiet = asyncio.Event()  # nothing is under way
        self.is_over = False  # what is asked of it now is never heard of
        self.lost = ""  # why its directory is to be closed, and opened again
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        disk = Disk(self._event_fd, engine, decoders=decoders, staged_bytes=staged_bytes)
        self.disk: Disk | Ended = disk
        self.engine = disk.engine
        self.disk.register(anonymous(PAGE), fixed=False)  # for pages of ours, which are all header
        loop.add_reader(self._event_fd, self._completed)
        self._thread = ThreadPoolExecutor(1, f"kvtier-files {name}")
        self._jobs: set[Future[Any]] = set()

    @property
    def failure(self) -> str:
        return self.writes.failure or self.reads.failure or self.elsewhere or self.short

    def give_up(self, why: str) -> None:
        """Nothing moves any more, until a restart."""
        self.reads.give_up(why)
        self.writes.give_up(why)

    def lose(self, why: str) -> None:
        """Nothing moves until the directory was opened again, by another drive."""
        if not self.lost:
            log.error("cold: %s", why)
            self.lost = why
            self.give_up(why)

    async def quiet(self) -> None:
        """Wait until nothing is under way, however long a disk hangs."""
        while self._waiting or self._jobs:
            self._quiet.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._quiet.wait(), TURN_OVER_S)

    def fault(self, lane: Lane, what: str, code: int) -> None:
        """Something that has nothing to do with what the bytes are went wrong."""
        self.faults += 1
        failure = f"{what}: {os.strerror(code)}"
        log.error("cold: %s", failure)
        lane.fault(failure)

    @property
    def hangs(self) -> bool:
        return self.reads.hangs or self.writes.hangs

    def tend(self) -> None:
        self.reads.tend()
        self.writes.tend()

    def measure(self, rates: Rates) -> None:
        """Take note of how fast it has been since this was last asked, and how fast frames of it were
        decoded."""
        before, self._moved = self._moved, self.disk.moved()
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
        """A read for `read`."""
        flags = DIGEST | URGENT if urgent else DIGEST
        token = self._read_token(over)
        return OPERATION.pack(
            token, fd, flags, at, nbytes, extent, READ_MS, offset
        ) + DIGEST_TAIL.pack(digest)

    def encoded_op(
        self, fd: int, at: int, sizes: tuple[int, int, int], extent: int, offset: int, digest: bytes,
        element: int, recipe: int, urgent: bool, over: Over,
    ) -> bytes:  # fmt: skip
        """A frame for `read_encoded`; the sizes are of its header, its payload, and its block. `recipe` is
        which of those it may be of, from 1, or 0."""
        token = self._read_token(over)
        header_bytes, nbytes, block_bytes = sizes
        return OPERATION.pack(
            token, fd, URGENT if urgent else 0, at, block_bytes, extent, READ_MS, offset
        ) + FRAME_TAIL.pack(digest, nbytes, header_bytes, element, recipe)

    def read_encoded(self, ops: bytes | bytearray, recipes: Sequence[Recipe]) -> None:
        self.disk.read_frames(ops, recipes)

    def read(self, ops: bytes | bytearray) -> None:
        self.disk.read(ops)

    def read_text(self, fd: int, at: int, nbytes: int, over: Over, urgent: bool = False) -> None:
        """Read bytes of this file, after all that is urgent if it isn't itself."""
        self.disk.read_bytes(self._read_token(over), fd, at, nbytes, urgent, READ_MS)

    def read_staged(self, fd: int, at: int, nbytes: int, over: Seen, urgent: bool) -> None:
        """Read bytes that a codec is to decode. Their memory is the worker's, who reads no more frames
        while much of it is in use: no view of it is to be kept."""
        token = self._read_token(over)
        self.disk.read_bytes(token, fd, at, nbytes, urgent, READ_MS, staged=True)

    def frame_op(
        self, fd: int, at: int, nbytes: int, extent: int, offset: int, header: tuple[int, int],
        over: Over,
    ) -> bytes:  # fmt: skip
        """A frame for `write`; `header` says where in the headers its own is, and how long."""
        token = self._token(self.writes, over)
        return OPERATION.pack(
            token, fd, DIGEST | SEAL, at, nbytes, extent, 0, offset
        ) + HEADER_TAIL.pack(*header)

    def write(
        self, fd: int, ops: bytes | bytearray, headers: bytes | bytearray, over: Over
    ) -> None:
        """Write to this file, then sync it. Neither has a deadline: while a write may still happen, the
        slot that it is made from is its own. `over` has the first error of them all."""

        def synced(code: int, extra: bytes | None) -> None:
            if not code:
                self.writes.worked()
            over(code, extra)

        self.disk.write(ops, headers)
        self.disk.sync(self._token(self.writes, synced), fd)

    def write_text(self, fd: int, at: int, text: bytes, over: Over) -> None:
        """Write pages of ours, and sync."""
        op = OPERATION.pack(self._token(self.writes, lambda *_: None), fd, 0, at, 0, 0, 0, 0)
        self.write(fd, op + HEADER_TAIL.pack(0, len(text)), text, over)

    @property
    def is_busy(self) -> bool:
        """Whether something is done with its files."""
        return bool(self._jobs)

    def beside(self, work: Callable[[*Args], T], *args: *Args) -> asyncio.Future[T]:
        """Do something with this directory's files in a thread of its own."""
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

    def _token(self, lane: Lane, over: Over) -> int:
        self._last_token += 1
        self._waiting[self._last_token] = lane, over
        lane.began()
        if isinstance(self.disk, Ended):
            self._over.append((self._last_token, errno.ECANCELED, None))
            self._loop.call_soon(self._settle)
        return self._last_token

    def _completed(self) -> None:
        try:
            os.eventfd_read(self._event_fd)
        except BlockingIOError:
            return
        self._over += self.disk.done()
        self._settle()

    def _settle(self) -> None:
        """Tell of what is over, for one turn: clients wait too."""
        until = time.monotonic() + TURN_S
        while self._over:
            token, code, extra = self._over.popleft()
            lane, over = self._waiting.pop(token)
            lane.ended(code)
            try:
                over(code, extra)
            except Exception:
                log.exception("cold: what was read or written could not be settled")
                self.give_up("a bug; the daemon's log says which")
            if self._over and time.monotonic() >= until:
                self._loop.call_soon(self._settle)
                return
        if not self._waiting:
            self._quiet.set()

    async def close(self, timeout_s: float) -> bool:
        """Wait for what is under way, and end. False if the kernel keeps something: its files, and the
        memory, are to be left alone."""
        until = self._clock() + timeout_s
        self._quiet.clear()
        if self._waiting:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._quiet.wait(), timeout_s)
        self._let_go()
        return await asyncio.to_thread(self._end, max(0.0, until - self._clock()))

    def stop(self, timeout_s: float) -> bool:
        """End at once. False as `close` says."""
        self._let_go()
        return self._end(timeout_s)

    def _let_go(self) -> None:
        """The loop hears nothing of it any more."""
        self.is_over = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._loop.remove_reader(self._event_fd)

    def _end(self, timeout_s: float) -> bool:
        """Waits for threads. A worker that has ended goes at once, and what the kernel keeps for it."""
        until = self._clock() + timeout_s
        left = self.disk.stop(timeout_s)
        if self._event_fd >= 0:
            os.close(self._event_fd)
            self._event_fd = -1
        if left:
            return False
        self.disk = Ended()
        return not wait(list(self._jobs), max(0.0, until - self._clock())).not_done


def anonymous(nbytes: int) -> Mapping:
    """Memory of our own that blocks can be read to."""
    fd = os.memfd_create("kvtier-own", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        return Mapping(fd, nbytes, True)
    finally:
        os.close(fd)
