"""The index of a directory: facts that a restart needs and sealed segments lack, which are the access log and
the spaces of frames in open segments. In LMDB, written by one thread, so that the loop never waits for a
disk.

A record is a value and a digest over table, key and value; one that fails its digest is dropped. A lost index
costs the order of eviction, and the blocks of an open segment whose space no other segment describes; it
never causes wrong bytes, and never brings back a forgotten block: tombstones are in the segments.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import mmap
import os
import queue
import resource
import select
import signal
import struct
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

import lmdb

from kvtier.errors import TierError
from kvtier_daemon.tiers.cold import index_pages
from kvtier_kernels import xxh3_128

log = logging.getLogger(__name__)

FORMAT: Final = b"2"
DIGEST_BYTES: Final = 16
LENGTHS: Final = struct.Struct("<II")
TABLES: Final = (b"meta", b"spaces", b"segments")
FIRST_MAP_BYTES: Final = 16 << 20
RESERVE_BYTES: Final = 1 << 20
LOCK_BYTES: Final = 4096
# LMDB copies every page that it changes; a transaction may need as many pages again as it has entries.
PAGES_PER_ENTRY: Final = 4
COALESCED: Final = 4096
KEPT: Final = 262_144
RETRY_S: Final = 1.0
CLOSE_S: Final = 10.0
CHECK_S: Final = 10.0
CHECK_BYTES_PER_S: Final = 8 << 20
# Exit codes of the process that checks a file, besides errnos.
SOUND: Final = 0
DAMAGED: Final = 255
NO_ANSWER: Final = 254
DEATHS: Final = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)
# An error without a class of its own also comes from the system: it says nothing about the file.
OF_THE_SYSTEM: Final = (lmdb.LockError, lmdb.ReadonlyError, lmdb.DiskError, lmdb.MemoryError)
# Of a first page: bytes of a page, and the last page's number.
META: Final = struct.Struct("<40xI92xQ")
# Of the file, and still an error without a class of its own.
UNKNOWN_FORMAT: Final = "LMDB data format"

Change: TypeAlias = dict[tuple[bytes, bytes], bytes | None]
Entry: TypeAlias = tuple[bytes, bytes, bytes | None]
Table: TypeAlias = Any  # what lmdb makes of a table's name; it has no public type


def seal(table: bytes, key: bytes, value: bytes) -> bytes:
    return value + _digest(table, key, value)


def unseal(table: bytes, key: bytes, text: bytes) -> bytes | None:
    """Return the value of a record; None if a bit of the record is wrong."""
    value = text[:-DIGEST_BYTES]
    sound = len(text) >= DIGEST_BYTES and text[-DIGEST_BYTES:] == _digest(table, key, value)
    return value if sound else None


def split(
    table: bytes, stored: Iterable[tuple[bytes, bytes]]
) -> tuple[list[tuple[bytes, bytes]], list[bytes]]:
    """Return the sound entries of a table, and the keys of the others."""
    sound, damaged = [], []
    for key, text in stored:
        value = unseal(table, key, text)
        if value is None:
            damaged.append(key)
        else:
            sound.append((key, value))
    return sound, damaged


def _digest(table: bytes, key: bytes, value: bytes) -> bytes:
    # The lengths keep a byte that moves from the key to the value from going unnoticed.
    return bytes(xxh3_128(LENGTHS.pack(len(table), len(key)) + table + key + value))


class ChangeQueue:
    """The changes of tables of bytes that one thread, `work`, is to write, and the answers of that thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failure = ""
        self._lost = ""
        self._queue: queue.SimpleQueue[Entry | int | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()

    def _start(self, work: Callable[[], None]) -> None:
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=work, name="kvtier-index", daemon=True)
        self._thread.start()

    def drop(self, table: bytes, key: bytes) -> None:
        self._queue.put((table, key, None))

    def flush(self, token: int) -> None:
        """Make `done` return this token when all earlier changes are on disk, or cannot be written."""
        self._queue.put(token)

    def done(self) -> Iterator[tuple[int, str]]:
        """Return the new tokens, each with the failure of the changes before it, or an empty text. `event_fd`
        is readable if there are new tokens."""
        try:
            os.eventfd_read(self.event_fd)
        except BlockingIOError:
            return
        while True:
            try:
                yield self._done.get_nowait()
            except queue.Empty:
                return

    # --- the thread --------------------------------------------------------------------------

    def _take(self, is_behind: bool) -> tuple[list[Entry], list[int], bool]:
        """Return queued changes and tokens, and whether more will follow. Waits for them, but not for long if
        the thread `is_behind` with earlier ones."""
        changes: list[Entry] = []
        tokens: list[int] = []
        with contextlib.suppress(queue.Empty):
            for number in range(COALESCED + 1):
                item = self._queue.get(number == 0, RETRY_S if is_behind else None)
                if item is None:
                    return changes, tokens, False
                if isinstance(item, int):
                    tokens.append(item)
                else:
                    changes.append(item)
        return changes, tokens, True

    def _answer(self, tokens: list[int], failure: str, unwritten: Change) -> None:
        """Answer the tokens with this failure. Of too many unwritten changes, the oldest are lost."""
        if len(unwritten) > KEPT:
            if not self._lost:
                self._lost = (
                    f"the index {self.folder} could not be written for too long: the oldest "
                    "changes are lost"
                )
                log.error("%s", self._lost)
            for name in list(unwritten)[: len(unwritten) - KEPT]:
                del unwritten[name]
        self.failure = self._lost or failure
        for token in tokens:
            self._done.put((token, self.failure))
        if tokens:
            os.eventfd_write(self.event_fd, 1)


class Index(ChangeQueue):
    """Tables of bytes. `put` and `drop` return at once; `flush` and `done` tell when they are on disk.

    `limit_bytes` is the maximum size of its file. Raises TierError if the folder cannot be used; a file that
    is damaged or has another format is replaced. A change that cannot be written is kept and retried.
    `opened` is where the folder is opened, if `folder` only names it in messages.
    """

    def __init__(self, folder: Path, limit_bytes: int, opened: Path | None = None) -> None:
        super().__init__(folder)
        self.damaged = 0  # records that failed their digests and were dropped
        self._limit_bytes = limit_bytes
        map_bytes = min(FIRST_MAP_BYTES, limit_bytes - RESERVE_BYTES)
        self._env, self._tables = _opened(folder, opened or folder, map_bytes)
        self._start(self._write)

    def entries(self, table: bytes) -> list[tuple[bytes, bytes]]:
        """Return the sound entries of a table by key, and drop the damaged ones. Waits for the disk."""
        with self._env.begin() as reading, reading.cursor(self._tables[table]) as cursor:
            sound, damaged = split(table, cursor)
        for key in damaged:
            self.drop(table, key)
        if damaged:
            self.damaged += len(damaged)
            log.error(
                "the index %s: %d records of table %s fail their digests and are dropped; if "
                "this repeats, check the disk with smartctl, and check the memory",
                self.folder, len(damaged), table.decode(),
            )  # fmt: skip
        return sound

    def put(self, table: bytes, key: bytes, value: bytes) -> None:
        self._queue.put((table, key, seal(table, key, value)))

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Write the last changes, and close. Waits for the disk; False if that takes too long."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._env.close()
        os.close(self.event_fd)
        return True

    # --- the thread --------------------------------------------------------------------------

    def _write(self) -> None:
        kept: Change = {}  # that are not on disk yet
        more, failed, again_at = True, "", 0.0
        while more:
            new, tokens, more = self._take(bool(kept))
            kept.update({(table, key): value for table, key, value in new})
            if kept and (tokens or not more or not failed or time.monotonic() >= again_at):
                failed = self._commit_all(kept)
                again_at = time.monotonic() + RETRY_S
            self._answer(tokens, failed, kept)

    def _commit_all(self, kept: Change) -> str:
        """Write the kept changes, and keep those that cannot be written; return the failure, or ""."""
        parts = [list(kept)]
        if self.failure:  # perhaps there is no room: drops make some
            parts = [
                [name for name in kept if (kept[name] is None) is drops] for drops in (True, False)
            ]
        for part in parts:
            for first in range(0, len(part), COALESCED):
                batch = {name: kept[name] for name in part[first : first + COALESCED]}
                failure = self._commit(batch)
                if failure:
                    return failure
                for name in batch:
                    del kept[name]
        return ""

    def _commit(self, changes: Change) -> str:
        nbytes = sum(len(key) + len(value or b"") for (_, key), value in changes.items())
        try:
            only_drops = all(value is None for value in changes.values())
            self._grow(nbytes + 4096 * PAGES_PER_ENTRY * len(changes), only_drops)
            with self._env.begin(write=True) as writing:
                for (table, key), value in changes.items():
                    if value is None:
                        writing.delete(key, db=self._tables[table])
                    else:
                        writing.put(key, value, db=self._tables[table])
        except (lmdb.Error, OSError) as error:
            if not self.failure:
                log.error("cannot write the index %s: %s", self.folder, error)
            return f"cannot write the index {self.folder}: {error}"
        return ""

    def _grow(self, wanted: int, only_drops: bool) -> None:
        """Make room for `wanted` more bytes before a write. Some is reserved for drops, which need it too."""
        limit = self._limit_bytes - (0 if only_drops else RESERVE_BYTES)
        info, page = self._env.info(), self._env.stat()["psize"]
        used, size = (info["last_pgno"] + 1) * page, info["map_size"]
        if used + wanted <= size or size >= limit:
            return
        while size < used + wanted:
            size *= 2
        self._env.set_mapsize(min(size, limit))


def _opened(
    name: Path, folder: Path, map_bytes: int
) -> tuple[lmdb.Environment, dict[bytes, Table]]:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            _check(folder, map_bytes)
            return _open(folder, map_bytes)
        except lmdb.Error as error:
            if _of_the_system(error):
                raise
            log.error("the index %s is damaged (%s): replacing it with a new one", name, error)
            (folder / "data.mdb").unlink()
            return _open(folder, map_bytes)
    except (lmdb.Error, OSError) as error:
        raise TierError(f"cannot open the index {name}: {error}") from error


def _of_the_system(error: lmdb.Error) -> bool:
    if type(error) is lmdb.Error:
        return UNKNOWN_FORMAT not in str(error)
    return isinstance(error, OF_THE_SYSTEM)


def _check(folder: Path, map_bytes: int) -> None:
    """Check the file in a child process: LMDB ends the process that meets some kinds of damage. Raises
    CorruptedError if it did, OSError if the check was not possible."""
    try:
        size = (folder / "data.mdb").stat().st_size
    except FileNotFoundError:
        return
    with warnings.catch_warnings():
        # Of fork with threads: the child uses nothing of the threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
        if child == 0:
            _run_check(folder, map_bytes)
    watched = os.pidfd_open(child)
    try:
        over = select.poll()
        over.register(watched, select.POLLIN)
        limit_s = CHECK_S + size / CHECK_BYTES_PER_S
        if not over.poll(limit_s * 1000):
            os.kill(child, signal.SIGKILL)
            # Its end may wait for the disk too.
            threading.Thread(target=os.waitpid, args=(child, 0), daemon=True).start()
            raise TimeoutError(
                f"the disk is too slow: the file was not read within {limit_s:.0f} s"
            )
    finally:
        os.close(watched)
    result = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if -result in DEATHS:
        raise lmdb.CorruptedError(f"reading it ended a process with {signal.Signals(-result).name}")
    if result == DAMAGED:
        raise lmdb.CorruptedError("its entries are damaged")
    if result < 0 or result == NO_ANSWER:
        raise OSError(f"the process that checks it was ended ({result})")
    if result != SOUND:
        raise OSError(result, os.strerror(result))


def _run_check(folder: Path, map_bytes: int) -> NoReturn:
    """Check the file in the child, which uses only LMDB: the parent may have threads. Ends the child."""
    result = NO_ANSWER
    try:
        gc.disable()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGINT, signal.SIGTERM})
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        result = _check_result(folder, map_bytes)
    except OSError as error:
        result = error.errno or NO_ANSWER
    finally:
        os._exit(result)


def _check_result(folder: Path, map_bytes: int) -> int:
    # A page that the disk cannot read is an error here, but a signal where it is mapped.
    fd = os.open(folder / "data.mdb", os.O_RDONLY | os.O_CLOEXEC)
    first, size = b"", 0
    while part := os.read(fd, 1 << 20):
        first, size = first or part, size + len(part)
    if _outgrown(first, size):
        return DAMAGED
    if size:
        with mmap.mmap(fd, size, prot=mmap.PROT_READ) as text:
            if not index_pages.fit_together(text):
                return DAMAGED
    try:
        # Without a lock: its file is mapped, and a write to it ends the process if the disk is full.
        env, tables = _open(folder, map_bytes, lock=False)
    except lmdb.Error:
        return SOUND  # the parent gets the same error
    try:
        with env.begin() as reading:
            for table in tables.values():
                before, count = b"", 0
                for key, _ in reading.cursor(table):
                    if key <= before:
                        return DAMAGED
                    before, count = key, count + 1
                if count != reading.stat(table)["entries"]:
                    return DAMAGED
        # These read all lists of free pages, as a write does.
        env.copyfd(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), compact=True)
        with env.begin(write=True) as writing:
            writing.put(b"format", FORMAT, db=tables[b"meta"])
    except lmdb.MapFullError:
        return SOUND
    except lmdb.Error as error:
        return SOUND if _of_the_system(error) else DAMAGED
    return SOUND


def _outgrown(text: bytes, size: int) -> bool:
    """Whether one of the first two pages claims pages beyond the end of the file: LMDB would map them, and
    fail as if there were too little memory."""
    if len(text) < META.size:
        return False
    page = META.unpack_from(text)[0]
    places = (0, page) if len(text) >= page + META.size else (0,)
    return any((META.unpack_from(text, at)[1] + 1) * page > size for at in places)


def _reserve(path: Path) -> None:
    """Allocate the page of LMDB's lock file, which LMDB maps: a write to a page for which a full disk has no
    room ends the process."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, LOCK_BYTES)
    finally:
        os.close(fd)


def _open(
    folder: Path, map_bytes: int, *, lock: bool = True
) -> tuple[lmdb.Environment, dict[bytes, Table]]:
    # Without `metasync` a power cut, or a file system that becomes read-only, loses the last commit: a forget
    # that was answered, or the only description of a space in an open segment. Without `sync` the file opens
    # cleanly after that and has wrong values.
    if lock:
        _reserve(folder / "lock.mdb")
    env = lmdb.open(
        str(folder), map_size=map_bytes, max_dbs=len(TABLES), metasync=True, sync=True, mode=0o600,
        max_readers=4, readahead=False, lock=lock,
    )  # fmt: skip
    try:
        have = (folder / "data.mdb").stat().st_size
        if have < (env.info()["last_pgno"] + 1) * env.stat()["psize"]:
            # A read of a mapped page behind the end of the file ends the process.
            raise lmdb.CorruptedError(f"truncated to {have} bytes")
        tables = {name: env.open_db(name) for name in TABLES}
        with env.begin(write=True) as writing:
            version = writing.get(b"format", db=tables[b"meta"])
            if version is None:
                writing.put(b"format", FORMAT, db=tables[b"meta"])
            elif version != FORMAT:
                raise lmdb.VersionMismatchError(
                    f"format is {version!r}, this build uses {FORMAT!r}"
                )
    except BaseException:
        env.close()
        raise
    return env, tables
