"""The machine under the daemon: time, descriptors, threads, processes, disks with power cuts, and memory."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import random
import select
import socket
import struct
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, NoReturn

from kvtier.errors import TierError
from kvtier_daemon.tiers.cold.directory_lock import claim
from kvtier_kernels import decode_frame, seal_frame, xxh3_128

from .virtual import CLOCK

log = logging.getLogger(__name__)

PAGE, SECTOR = 4096, 512
DEVICE_S = 1.9  # for which the device of a process that ended still writes
OPERATION = struct.Struct("<QiIQQIIQ")
URGENT, DIGEST, SEAL = 1, 2, 4
NEVER = float("inf")
POLLNVAL, READABLE = select.POLLNVAL, ~select.POLLOUT
WRITABLE = select.POLLOUT | select.POLLERR | select.POLLHUP


class ViolationError(Exception):
    """Something that the daemon must never do."""


@dataclass(eq=False)
class Process:
    """A process of a client. `pidfd` becomes readable when it ends. `device`: a device writes to its slots,
    until `DEVICE_S` after the end of the process."""

    pid: int
    uid: int
    device: bool = False
    pidfd: int = field(default_factory=lambda: os.eventfd(0, os.EFD_CLOEXEC))
    is_alive: bool = True
    writes_until: float = float("inf")

    def end(self) -> None:
        self.is_alive = False
        self.writes_until = CLOCK.now + (DEVICE_S if self.device else 0.0)
        notify(self.pidfd)

    @property
    def writes(self) -> bool:
        return self.is_alive or CLOCK.now < self.writes_until


class Connection(socket.socket):
    """The daemon's end of a connection, with the process at the other end."""

    process: Process

    def send(self, *args: Any) -> int:
        MACHINE.now.may_be_ready = True
        return super().send(*args)

    def sendmsg(self, *args: Any) -> int:
        MACHINE.now.may_be_ready = True
        return super().sendmsg(*args)

    def close(self) -> None:
        MACHINE.now.may_be_ready = True
        super().close()


def notify(fd: int) -> None:
    """Make an eventfd readable."""
    MACHINE.now.may_be_ready = True
    os.eventfd_write(fd, 1)


class Listener:
    """A listening socket whose clients are in the same process."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waiting: deque[Connection] = deque()

    def fileno(self) -> int:
        return self._fd

    def connect(self, process: Process, buffer_bytes: int) -> tuple[socket.socket, Connection]:
        client, accepted = socket.socketpair()
        client.setblocking(False)
        # With the kind, which the class would ask the kernel for.
        kind = accepted.family, accepted.type, accepted.proto
        connection = Connection(*kind, fileno=accepted.detach())
        connection.process = process
        if buffer_bytes:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        self._waiting.append(connection)
        notify(self._fd)
        return client, connection

    def accept(self) -> tuple[Connection, None]:
        os.eventfd_read(self._fd)
        return self._waiting.popleft(), None

    def close(self) -> None:
        for connection in self._waiting:
            connection.close()
        self._waiting.clear()
        os.close(self._fd)
        self._fd = -1


class Job(Future[Any]):
    """A call in a thread. It needs no lock: there is one thread."""

    def __init__(self) -> None:
        self._calls: list[Callable[[Future[Any]], object]] = []
        self._is_running = self._is_done = self._is_cancelled = False
        self._value: Any = None
        self._error: BaseException | None = None

    def cancel(self) -> bool:
        if self._is_running or (self._is_done and not self._is_cancelled):
            return False
        if not self._is_done:
            self._is_cancelled = True
            self._end()
        return True

    def cancelled(self) -> bool:
        return self._is_cancelled

    def done(self) -> bool:
        return self._is_done

    def set_running_or_notify_cancel(self) -> bool:
        self._is_running = not self._is_cancelled
        return self._is_running

    def set_result(self, result: Any) -> None:
        self._value = result
        self._end()

    def set_exception(self, exception: BaseException | None) -> None:
        self._error = exception
        self._end()

    def result(self, timeout: float | None = None) -> Any:
        if (error := self.exception(timeout)) is not None:
            raise error
        return self._value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if self._is_cancelled:
            raise CancelledError
        assert self._is_done, "the simulation never waits"
        return self._error

    def add_done_callback(self, call: Callable[[Future[Any]], object]) -> None:
        if self._is_done:
            self._call(call)
        else:
            self._calls.append(call)

    def _end(self) -> None:
        self._is_done, self._is_running = True, False
        calls, self._calls = self._calls, []
        for call in calls:
            self._call(call)

    def _call(self, call: Callable[[Future[Any]], object]) -> None:
        try:
            call(self)
        except Exception:
            log.exception("a callback of a thread has failed")


class FaultyFiles:
    """Replaces `os` where segments are scanned and erased: reads and syncs may fail."""

    def __getattr__(self, name: str) -> Any:
        right = getattr(os, name)
        setattr(self, name, right)
        return right

    def pread(self, fd: int, nbytes: int, at: int) -> bytes:
        disk = MACHINE.now.disk
        if disk.is_failing("read"):
            raise OSError(disk.code, os.strerror(disk.code))
        return os.pread(fd, nbytes, at)

    def fdatasync(self, fd: int) -> None:
        disk = MACHINE.now.disk
        if disk.is_failing("sync"):
            raise OSError(disk.code, os.strerror(disk.code))
        disk.sync(fd)

    fsync = fdatasync


class Threads:
    """An executor without threads: each call runs at a virtual time, one after the other. A call of which
    the disk hangs does not end."""

    def __init__(self, machine: Machine, waits_for_disk: bool) -> None:
        self._machine = machine
        self._waits_for_disk = waits_for_disk
        self._queue: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._running: tuple[Future[Any], Callable[[], Any]] | None = None
        self._is_over = False

    def submit(self, work: Callable[..., Any], *args: Any, **named: Any) -> Future[Any]:
        if self._is_over:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future = Job()
        self._queue.append((future, lambda: work(*args, **named)))
        if self._running is None:
            self._next()
        return future

    def _next(self) -> None:
        self._running = None
        while self._queue:
            job = self._queue.popleft()
            if job[0].set_running_or_notify_cancel():
                self._running = job
                delay = (
                    self._machine.disk.latency() if self._waits_for_disk else self._machine.lag()
                )
                self._machine.after(delay, self._end, job)
                return

    def _end(self, job: tuple[Future[Any], Callable[[], Any]]) -> None:
        if self._running is not job:
            return  # it was ended early
        if self._waits_for_disk and self._machine.disk.hangs:
            self._machine.after(self._machine.disk.hangs_for() + 1e-3, self._end, job)
            return
        self.finish()

    def runs_one_of(self, jobs: list[Future[Any]]) -> bool:
        return self._running is not None and self._running[0] in jobs

    def finish(self) -> None:
        """Run the call that has started."""
        if self._running is None:
            return
        future, work = self._running
        try:
            result = work()
        except Exception as error:  # noqa: BLE001  # as a thread of an executor does
            future.set_exception(error)
        else:
            future.set_result(result)
        self._next()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._is_over = True
        if cancel_futures:
            while self._queue:
                self._queue.popleft()[0].cancel()

    def killed(self, finishes: bool) -> None:
        """The process was killed: the call that has started runs to its end, or never began."""
        if self._running is not None and finishes:
            with contextlib.suppress(Exception):  # no task gets it
                self._running[1]()
        self._running = None
        self._queue.clear()
        self._is_over = True


@dataclass(eq=False)
class DiskOperation:
    token: int
    fd: int
    inode: int
    kind: str
    begin: Callable[[], None]
    end: Callable[[bool], tuple[int, Any]]  # gets whether it fails; returns an errno and the result
    deadline: float = NEVER
    has_begun: bool = False
    failed: int = 0  # of a sync: the errno of a write before it, which it reports


class Disk:
    """The disk that all directories are on: its speed, its faults, and what a power cut loses."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.slow_s = 0.0005
        self.fails: dict[str, float] = {}  # the share of operations that fail, by kind
        self.hangs_until = 0.0
        self.code = errno.EIO
        # By file, the pages whose content is not on disk: what they had at the last sync.
        self.unsynced: dict[int, dict[int, bytes]] = {}

    def heal(self) -> None:
        self.slow_s, self.fails, self.hangs_until = 0.0005, {}, 0.0

    @property
    def hangs(self) -> bool:
        return CLOCK.now < self.hangs_until

    def hangs_for(self) -> float:
        return max(0.0, self.hangs_until - CLOCK.now)

    def latency(self) -> float:
        chance = self._machine.chance
        slow = self.slow_s * (20.0 if chance.random() < 0.05 else 1.0)
        return self.hangs_for() + slow * chance.random()

    def is_failing(self, kind: str) -> bool:
        share = self.fails.get(kind, 0.0)
        return bool(share) and self._machine.chance.random() < share

    def write(self, fd: int, at: int, data: bytes | bytearray) -> None:
        """Write to the cache of the disk."""
        kept = self.unsynced.setdefault(os.fstat(fd).st_ino, {})
        for page in range(at // PAGE, -(-(at + len(data)) // PAGE)):
            if page not in kept:
                kept[page] = os.pread(fd, PAGE, page * PAGE)
        os.pwrite(fd, data, at)

    def sync(self, fd: int) -> None:
        self.unsynced.pop(os.fstat(fd).st_ino, None)

    def cut_power(self, folder: Path) -> None:
        """Each page that was not synced is on disk, is not, or is there in part."""
        chance = self._machine.chance
        for path in _segments(folder) if any(self.unsynced.values()) else ():
            kept = self.unsynced.get(path.stat().st_ino)
            if not kept:
                continue
            with path.open("r+b", buffering=0) as file:
                for page, before in sorted(kept.items()):
                    now = os.pread(file.fileno(), PAGE, page * PAGE)
                    fate = chance.random()
                    if fate < 0.4:
                        now = before
                    elif fate < 0.6:
                        cut = SECTOR * chance.randrange(1, PAGE // SECTOR)
                        now = now[:cut] + before[cut:]
                    os.pwrite(file.fileno(), now, page * PAGE)
        self.unsynced.clear()

    def rot(self, folder: Path, chance: random.Random) -> None:
        """Change a bit of a segment file."""
        if paths := _segments(folder):
            with chance.choice(paths).open("r+b", buffering=0) as file:
                at = chance.randrange(os.fstat(file.fileno()).st_size)
                byte = os.pread(file.fileno(), 1, at)[0] ^ (1 << chance.randrange(8))
                os.pwrite(file.fileno(), bytes([byte]), at)


def _segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/segments/*/*"))


class DiskWorker:
    """Replaces the native worker of a directory. Operations end in a random order, except that a sync waits
    for the writes before it, and reports their failures. A block is read from memory, or written to it, at
    any time until its end."""

    engine = "simulated"
    queued = 0, 0, 0

    def __init__(
        self, notify_fd: int, engine: str = "auto", decoders: int = 1, staged_bytes: int = 0
    ) -> None:
        self._machine = machine = MACHINE.now
        self._notify = os.dup(notify_fd)
        self._mappings: list[Any] = []
        self._running: dict[int, DiskOperation] = {}
        self._done: list[tuple[int, int, Any]] = []
        self._writing: dict[int, set[int]] = {}  # by descriptor, writes that have not ended
        self._failed: dict[int, int] = {}
        self._syncs: list[tuple[set[int], DiskOperation]] = []
        self.is_over = False
        machine.workers.append(self)

    def register(self, mapping: Any, fixed: bool = True) -> int:
        self._mappings.append(mapping)
        return len(self._mappings) - 1

    def release(self, extent: int) -> None:
        self._mappings[extent] = None

    def moved(self) -> tuple[int, float, dict[Any, Any]]:
        return 0, 0.0, {}

    def done(self) -> list[tuple[int, int, Any]]:
        done, self._done = self._done, []
        return done

    def stop(self, timeout_s: float) -> int:
        """Cancel what waits; return how many operations hang."""
        left = 0
        if self._machine.disk.hangs_for() > timeout_s:
            left = sum(one.has_begun for one in self._running.values())
        else:
            for one in list(self._running.values()):
                if one.has_begun:
                    one.end(False)
        if not left:
            self._close()
        return left

    def _close(self) -> None:
        if not self.is_over:
            self.is_over = True
            self._running.clear()
            os.close(self._notify)

    def killed(self) -> None:
        """The process was killed: what has begun is complete, or not."""
        for one in list(self._running.values()):
            if one.has_begun and one.kind == "write" and self._machine.chance.random() < 0.5:
                one.end(False)
        self.is_over = True
        self._running.clear()

    # --- operations --------------------------------------------------------------------------

    def read(self, ops: bytes | bytearray) -> None:
        for at in range(0, len(ops), 64):
            token, fd, _, file_at, nbytes, extent, ms, offset = OPERATION.unpack_from(ops, at)
            digest = bytes(ops[at + 48 : at + 64])
            into = memoryview(self._mappings[extent])[offset : offset + nbytes]

            def begin(into: memoryview = into, token: int = token) -> None:
                # A disk may write a part of the block at any time.
                into[: len(into) // 2] = bytes([token & 255]) * (len(into) // 2)

            def end(
                fails: bool, fd: int = fd, file_at: int = file_at, into: memoryview = into,
                digest: bytes = digest,
            ) -> tuple[int, Any]:  # fmt: skip
                if fails:
                    return self._machine.disk.code, None
                data = os.pread(fd, len(into), file_at)
                if len(data) < len(into):
                    return errno.ENODATA, None
                into[:] = data
                return (0 if xxh3_128(data) == digest else errno.EBADMSG), None

            self._submit(token, fd, "read", begin, end, ms)

    def read_frames(self, ops: bytes | bytearray, recipes: Any, keys: Any) -> None:
        assert not keys, "the simulation does not encrypt"
        for at in range(0, len(ops), 152):
            token, fd, _, file_at, nbytes, extent, ms, offset = OPERATION.unpack_from(ops, at)
            digest = bytes(ops[at + 48 : at + 64])
            payload_bytes, header_bytes, element, recipe = struct.unpack_from("<QIHH", ops, at + 64)
            into = memoryview(self._mappings[extent])[offset : offset + nbytes]
            lossy = recipes[recipe - 1] if recipe else None

            def end(
                fails: bool, fd: int = fd, file_at: int = file_at, into: memoryview = into,
                digest: bytes = digest, sizes: tuple[int, int] = (header_bytes, payload_bytes),
                element: int = element, lossy: Any = lossy,
            ) -> tuple[int, Any]:  # fmt: skip
                if fails:
                    return self._machine.disk.code, None
                data = os.pread(fd, sum(sizes), file_at)
                if len(data) < sum(sizes):
                    return errno.ENODATA, None
                header, payload = bytearray(data[: sizes[0]]), data[sizes[0] :]
                good = decode_frame(element, header, payload, digest, into, lossy)
                return (0, xxh3_128(into)) if good else (errno.EBADMSG, None)

            self._submit(token, fd, "read", lambda: None, end, ms)

    def read_bytes(
        self, token: int, fd: int, at: int, nbytes: int, urgent: bool, deadline_ms: int,
        staged: bool = False,
    ) -> None:  # fmt: skip
        def end(fails: bool) -> tuple[int, Any]:
            if fails:
                return self._machine.disk.code, None
            data = os.pread(fd, nbytes, at)
            if len(data) < nbytes:
                return errno.ENODATA, None
            return 0, memoryview(bytearray(data)) if staged else data

        self._submit(token, fd, "read", lambda: None, end, deadline_ms)

    def write(self, ops: bytes | bytearray, headers: bytes | bytearray = b"") -> None:
        for at in range(0, len(ops), 64):
            token, fd, flags, file_at, nbytes, extent, _, offset = OPERATION.unpack_from(ops, at)
            header_at, header_bytes = struct.unpack_from("<QQ", ops, at + 48)
            header = bytearray(headers[header_at : header_at + header_bytes])
            header += bytes(-len(header) % PAGE)
            source = memoryview(self._mappings[extent])[offset : offset + nbytes]
            digests: list[bytes] = []

            def begin(
                flags: int = flags, header: bytearray = header, source: memoryview = source,
                digests: list[bytes] = digests,
            ) -> None:  # fmt: skip
                if flags & SEAL:
                    digests.append(seal_frame(header, source))
                elif flags & DIGEST:
                    digests.append(xxh3_128(source))

            def end(
                fails: bool, fd: int = fd, file_at: int = file_at, header: bytearray = header,
                source: memoryview = source, digests: list[bytes] = digests,
            ) -> tuple[int, Any]:  # fmt: skip
                text = header + source
                text += bytes(-len(text) % PAGE)
                if fails:
                    chance = self._machine.chance
                    self._machine.disk.write(fd, file_at, text[: PAGE * chance.randrange(2)])
                    return self._machine.disk.code, None
                self._machine.disk.write(fd, file_at, text)
                return 0, digests[0] if digests else None

            self._writing.setdefault(fd, set()).add(token)
            self._submit(token, fd, "write", begin, end, 0)

    def sync(self, token: int, fd: int, deadline_ms: int = 0) -> None:
        def end(fails: bool) -> tuple[int, Any]:
            if fails:
                return self._machine.disk.code, None
            self._machine.disk.sync(fd)
            return one.failed, None

        one = self._made(token, fd, "sync", lambda: None, end, 0)
        one.failed = self._failed.pop(fd, 0)
        waits_for = set(self._writing.get(fd, ()))
        if waits_for:
            self._syncs.append((waits_for, one))
        else:
            self._start(one)

    def forget(self, fd: int) -> None:
        self._failed.pop(fd, None)

    def _submit(
        self, token: int, fd: int, kind: str, begin: Callable[[], None],
        end: Callable[[bool], tuple[int, Any]], deadline_ms: int,
    ) -> None:  # fmt: skip
        self._start(self._made(token, fd, kind, begin, end, deadline_ms))

    def _made(
        self, token: int, fd: int, kind: str, begin: Callable[[], None],
        end: Callable[[bool], tuple[int, Any]], deadline_ms: int,
    ) -> DiskOperation:  # fmt: skip
        if self.is_over:
            self._machine.violate("an operation was submitted to a worker that was stopped")
        deadline = CLOCK.now + deadline_ms / 1000 if deadline_ms else NEVER
        one = DiskOperation(token, fd, os.fstat(fd).st_ino, kind, begin, end, deadline)
        self._running[token] = one
        return one

    def _start(self, one: DiskOperation) -> None:
        machine = self._machine
        if machine.chance.random() < 0.7 and not machine.disk.hangs:
            self._begin(one)
        else:
            machine.after(machine.disk.latency(), self._begin, one)

    def _begin(self, one: DiskOperation) -> None:
        if self.is_over:
            return
        if one.deadline <= CLOCK.now:
            self._completed(one, errno.ETIMEDOUT, None)
            return
        one.has_begun = True
        one.begin()
        self._machine.after(self._machine.disk.latency(), self._end, one)

    def _end(self, one: DiskOperation) -> None:
        if self.is_over:
            return
        machine = self._machine
        if machine.disk.hangs:
            machine.after(machine.disk.hangs_for() + 1e-3 * machine.chance.random(), self._end, one)
            return
        try:
            same = os.fstat(one.fd).st_ino == one.inode
        except OSError:
            same = False
        if not same:
            machine.violate(f"a descriptor was closed during a {one.kind}")
        self._completed(one, *one.end(machine.disk.is_failing(one.kind)))

    def _completed(self, one: DiskOperation, code: int, extra: Any) -> None:
        del self._running[one.token]
        self._machine.trace("disk", one.kind, one.token, code)
        self._machine.count(f"disk {one.kind} {errno.errorcode.get(code, '')}".strip(), 1)
        if one.kind == "write":
            self._writing[one.fd].discard(one.token)
            is_reported = not code
            waiting, self._syncs = self._syncs, []
            for waits_for, sync in waiting:
                if not is_reported and one.token in waits_for:
                    sync.failed = sync.failed or code
                    is_reported = True
                waits_for.discard(one.token)
                if waits_for:
                    self._syncs.append((waits_for, sync))
                else:
                    self._start(sync)
            if not is_reported:
                self._failed[one.fd] = code
        self._done.append((one.token, code, extra))
        if len(self._done) == 1:
            notify(self._notify)


class Index:
    """Replaces the process of an index. Changes reach the disk in order, in transactions, which no power cut
    tears."""

    damaged = 0

    def __init__(self, child: Any, folder: Path, limit_bytes: int, lock_fd: int) -> None:
        self.folder = folder
        self.failure = ""
        self.unwritten: dict[tuple[bytes, bytes], bytes | None] = {}
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._machine = MACHINE.now
        self._tables = self._machine.indexes.setdefault(str(folder), {})
        self._queue: list[Any] = []
        self._done: list[tuple[int, str]] = []
        self._is_busy = self._is_over = False
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / "data.mdb").touch(mode=0o600)
        self._machine.index_processes.append(self)

    def entries(self, table: bytes) -> list[tuple[bytes, bytes]]:
        return sorted(self._tables.get(table, {}).items())

    def put(self, table: bytes, key: bytes, value: bytes) -> None:
        self._add((table, key, value))

    def drop(self, table: bytes, key: bytes) -> None:
        self._add((table, key, None))

    def flush(self, token: int) -> None:
        self._add(token)

    def done(self) -> list[tuple[int, str]]:
        try:
            os.eventfd_read(self.event_fd)
        except BlockingIOError:
            return []
        done, self._done = self._done, []
        return done

    def _add(self, item: Any) -> None:
        self._queue.append(item)
        if not self._is_busy:
            self._is_busy = True
            self._machine.after(self._machine.disk.latency(), self._commit)

    def _commit(self) -> None:
        if self._is_over:
            return
        machine = self._machine
        if machine.disk.hangs:
            machine.after(machine.disk.hangs_for() + 1e-3, self._commit)
            return
        self._is_busy = False
        failing = machine.disk.is_failing("index")
        self.failure = "the index cannot be written" if failing else ""
        tokens = [one for one in self._queue if isinstance(one, int)]
        if failing:
            self._queue = [one for one in self._queue if not isinstance(one, int)]
            self._is_busy = True
            machine.after(1.0, self._commit)
        else:
            self._apply(len(self._queue))
        machine.trace("index", len(tokens), failing)
        self._done += [(token, self.failure) for token in tokens]
        if tokens:
            notify(self.event_fd)

    def _apply(self, count: int) -> None:
        for one in self._queue[:count]:
            if not isinstance(one, int):
                table, key, value = one
                rows = self._tables.setdefault(table, {})
                if value is None:
                    rows.pop(key, None)
                else:
                    rows[key] = value
        del self._queue[:count]

    def close(self, timeout_s: float = 0.0) -> bool:
        hangs = self._machine.disk.hangs_for() > timeout_s
        if not hangs:
            self._apply(len(self._queue))
        self.unwritten = {
            (one[0], one[1]): one[2] for one in self._queue if not isinstance(one, int)
        }
        self._is_over = True
        os.close(self.event_fd)
        return not hangs

    def killed(self) -> None:
        if not self._is_over:
            self._apply(self._machine.chance.randrange(len(self._queue) + 1))
            self._is_over = True


class Prefaulter:
    """Replaces the native thread that allocates memory."""

    def __init__(self, notify_fd: int, huge: bool = False) -> None:
        self._machine = MACHINE.now
        self._notify = os.dup(notify_fd)
        self._files: list[tuple[int, int]] = []
        self._progress: list[tuple[int, int]] = []
        self._is_over, self._is_busy = False, False
        self._machine.prefaulters.append(self)

    def add(self, fd: int, size: int, lock: bool = False) -> int:
        self._files.append((fd, size))
        self._progress.append((0, 0))
        if not self._is_busy:
            self._is_busy = True
            self._machine.after(self._machine.lag(), self._step, len(self._files) - 1)
        return len(self._files) - 1

    def _step(self, at: int) -> None:
        if self._is_over:
            return
        fd, size = self._files[at]
        os.posix_fallocate(fd, 0, size)
        self._progress[at] = size, 0
        notify(self._notify)
        self._is_busy = at + 1 < len(self._files)
        if self._is_busy:
            slow = self._machine.config.memory_s * self._machine.chance.random()
            self._machine.after(slow, self._step, at + 1)

    def progress(self) -> list[tuple[int, int]]:
        return list(self._progress)

    def huge_bytes(self) -> int:
        return 0

    def stop(self) -> None:
        if not self._is_over:
            self._is_over = True
            os.close(self._notify)

    def killed(self) -> None:
        self._is_over = True


class KeptDescriptors:
    """A descriptor store that outlives the daemon; not the machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def take(self) -> Mapping[str, int]:
        return {name: os.dup(fd) for name, fd in self._machine.kept.items()}

    def put(self, name: str, fd: int) -> None:
        self.remove(name)
        self._machine.kept[name] = os.dup(fd)

    def remove(self, name: str) -> None:
        if (fd := self._machine.kept.pop(name, -1)) >= 0:
            os.close(fd)

    def close(self) -> None:
        pass


class Child:
    """Replaces the process that opens an index."""

    pid = 1
    is_killed = False

    def close(self) -> None:
        self.is_killed = True

    kill = close

    def lock(self, path: Path, device: int | None) -> tuple[int, int, bytes]:
        if self.is_killed:
            raise TierError(f"cold: cannot use {path}: the process that opens it was killed")
        return claim(path, os.getpid(), device)


class Current:
    """The machine of this simulation."""

    now: Any  # None between two simulations


MACHINE = Current


class Machine:
    """The time, and everything that happens outside of the daemon's code."""

    def __init__(self, seed: object, config: Any, folder: Path, is_traced: bool) -> None:
        MACHINE.now = self
        self.is_traced = is_traced
        self.config = config
        self.folder = folder
        self.chance = random.Random(f"schedule {seed}")
        self._random = self.chance.random
        self.hash = blake2b(digest_size=16)
        self.lines: list[str] | None = None
        self.disk = Disk(self)
        self.indexes: dict[str, dict[bytes, dict[bytes, bytes]]] = {}
        self.kept: dict[str, int] = {}
        self.processes: dict[int, Process] = {}
        self.steps = 0
        self.violations: list[str] = []
        self.has_left = False
        self.client_fds: set[int] = set()
        self.counts: Counter[str] = Counter()
        self.clients: list[Any] = []
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._poll = select.poll()
        self._watched: set[int] = set()
        self.may_be_ready = True  # a descriptor, since none was
        self.client_readers: dict[int, Callable[[], None]] = {}
        self.begin_daemon()

    def begin_daemon(self) -> None:
        self.app: Any = None
        self.loop: Any = None
        self.workers: list[DiskWorker] = []
        self.index_processes: list[Index] = []
        self.prefaulters: list[Prefaulter] = []
        self.all_threads: list[Threads] = []
        self.finalizers: list[Callable[[], object]] = []
        self.threads = self.make_threads()

    def make_threads(self, waits_for_disk: bool = False) -> Threads:
        threads = Threads(self, waits_for_disk)
        self.all_threads.append(threads)
        return threads

    def trace(self, *what: Any) -> None:
        if not self.is_traced:
            return
        text = f"{CLOCK.now:.9f} {what!r}".replace(str(self.folder), "FOLDER")
        self.hash.update(text.encode())
        if self.lines is not None:
            self.lines.append(text)

    def count(self, what: str, number: int) -> None:
        self.counts[what] += number

    # --- time --------------------------------------------------------------------------------

    def lag(self) -> float:
        """The delay of a thread."""
        return 0.002 * self.chance.random() ** 4

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        heappush(self._events, (CLOCK.now + delay_s, next(self._numbers), call, args))

    def watch(self, fd: int) -> None:
        """Note that a task waits for this descriptor, or no longer."""
        loop = self.loop
        wanted = 0
        self.may_be_ready = True
        if fd in self.client_readers or (loop is not None and fd in loop.readers):
            wanted |= select.POLLIN
        if loop is not None and fd in loop.writers:
            wanted |= select.POLLOUT
        if wanted:
            self._poll.register(fd, wanted)
            self._watched.add(fd)
        elif fd in self._watched:
            self._poll.unregister(fd)
            self._watched.discard(fd)

    def step(self, until: float) -> bool:
        """Let something happen; False if nothing happens before `until`."""
        if self.violations:
            raise ViolationError(self.violations[0])
        self.steps += 1
        loop, events, now = self.loop, self._events, CLOCK.now
        draw = self._random()
        due = events[0][0] if events else NEVER
        if due <= now and draw < 0.5:
            _, _, call, args = heappop(events)
            call(*args)
            return True
        loop_at = NEVER if loop is None else 0.0 if loop._ready else loop.next_at
        is_idle = due > now and loop_at > now
        for_daemon: Sequence[Any] = ()
        if is_idle or (self.may_be_ready and (loop_at > 0.0 or draw < 0.8)):
            for_daemon, for_clients = self._ready()
            if for_clients and (not for_daemon or draw < 0.4):
                self.chance.choice(for_clients)()
                return True
            if len(for_daemon) > 1:
                self.chance.shuffle(for_daemon)
        if for_daemon or loop_at <= now:
            CLOCK.now = now + draw * self.config.iteration_s
            loop.run_once(for_daemon)
        elif due <= now:
            _, _, call, args = heappop(events)
            call(*args)
        else:
            then = min(due, loop_at)
            if then > until:
                CLOCK.now = max(now, until)
                return False
            CLOCK.now = then
        return True

    def _ready(self) -> tuple[list[Any], list[Callable[[], None]]]:
        """The callbacks of descriptors that are ready: the daemon's, and those of clients."""
        found = self._poll.poll(0)
        if not found:
            self.may_be_ready = False
            return [], []
        self.may_be_ready = True
        loop = self.loop
        for_daemon: list[Any] = []
        for_clients: list[Callable[[], None]] = []
        for fd, what in found:
            if what & POLLNVAL:
                self.violate(f"descriptor {fd} is watched and is closed")
            if (reader := self.client_readers.get(fd)) is not None:
                for_clients.append(reader)
                continue
            if what & READABLE and fd in loop.readers:
                for_daemon.append(loop.readers[fd])
            if what & WRITABLE and fd in loop.writers:
                for_daemon.append(loop.writers[fd])
        return for_daemon, for_clients

    def run(self, until: float) -> None:
        step = self.step
        while step(until):
            pass

    def violate(self, text: str) -> NoReturn:
        """Note a violation; the simulation ends with it even if the daemon catches the exception."""
        if not self.violations:
            self.violations.append(f"at {CLOCK.now:.3f}: {text}")
        raise ViolationError(text)
