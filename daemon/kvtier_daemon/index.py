"""What a restart wants to know and the segments can't say: which blocks were forgotten, how each was used,
what spaces there are. In LMDB, written by one thread, so that the loop never waits for a disk.

Nothing in it is believed where it matters: a block that it calls forgotten is a miss, and its use is a hint
for who goes first. Lost, it costs the order of eviction and may bring back what was forgotten; never wrong
bytes.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeAlias

import lmdb

from kvtier.errors import TierError

log = logging.getLogger(__name__)

FORMAT: Final = b"1"
TABLES: Final = (b"meta", b"spaces", b"segments", b"forgotten")
FIRST_MAP_BYTES: Final = 16 << 20
RESERVE_BYTES: Final = 1 << 20
# LMDB copies every page that it changes; a transaction may need as many pages again as it has entries.
PAGES_PER_ENTRY: Final = 4
COALESCED: Final = 4096

Entry: TypeAlias = tuple[bytes, bytes, bytes | None]
Table: TypeAlias = Any  # what lmdb makes of a table's name; it has no public type


class Index:
    """Tables of bytes. `put` and `drop` return at once; `flush` tells by `done` when they are on disk.

    `limit_bytes` is what its file may grow to. Raises TierError if the folder can't be used; a file that is
    damaged or of another format is moved out of the way and a new one begun.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder = folder
        self.failure = ""
        self._limit_bytes = limit_bytes
        self._env, self._tables = _opened(folder, min(FIRST_MAP_BYTES, limit_bytes - RESERVE_BYTES))
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._queue: queue.SimpleQueue[Entry | int | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="kvtier-index", daemon=True)
        self._thread.start()

    @property
    def reserved_bytes(self) -> int:
        """What its files may take without asking again."""
        return int(self._env.info()["map_size"])

    def entries(self, table: bytes) -> list[tuple[bytes, bytes]]:
        """All of a table, in the order of its keys. Waits for the disk: at start only."""
        with self._env.begin() as reading, reading.cursor(self._tables[table]) as cursor:
            return list(cursor)

    def put(self, table: bytes, key: bytes, value: bytes) -> None:
        self._queue.put((table, key, value))

    def drop(self, table: bytes, key: bytes) -> None:
        self._queue.put((table, key, None))

    def flush(self, token: int) -> None:
        """`done` has this token when all that was put before is on disk, or can't be."""
        self._queue.put(token)

    def done(self) -> Iterator[tuple[int, str]]:
        """Tokens since the last call, each with what went wrong since the one before it, or nothing.
        `event_fd` is readable if there are any."""
        try:
            os.eventfd_read(self.event_fd)
        except BlockingIOError:
            return
        while True:
            try:
                yield self._done.get_nowait()
            except queue.Empty:
                return

    def close(self, timeout_s: float = 10.0) -> bool:
        """Write what is left, and close. Waits for the disk; False if that was for nothing."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._env.close()
        os.close(self.event_fd)
        return True

    def __enter__(self) -> Index:
        return self

    def __exit__(
        self, _k: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None
    ) -> None:
        self.close()

    # --- the thread --------------------------------------------------------------------------

    def _write(self) -> None:
        more, since = True, ""  # what failed since the last token
        while more:
            changes: dict[tuple[bytes, bytes], bytes | None] = {}
            tokens: list[int] = []
            more = self._take(self._queue.get(), changes, tokens)
            while more and len(changes) < COALESCED:
                try:
                    more = self._take(self._queue.get_nowait(), changes, tokens)
                except queue.Empty:
                    break
            if changes:
                self.failure = self._commit(changes)
                since = since or self.failure
            for token in tokens:
                self._done.put((token, since))
            if tokens:
                since = ""
                os.eventfd_write(self.event_fd, 1)

    def _take(
        self,
        item: Entry | int | None,
        changes: dict[tuple[bytes, bytes], bytes | None],
        tokens: list[int],
    ) -> bool:
        """Add an item to the batch; False if it is the last there will be."""
        if item is None:
            return False
        if isinstance(item, int):
            tokens.append(item)
        else:
            table, key, value = item
            changes[table, key] = value
        return True

    def _commit(self, changes: dict[tuple[bytes, bytes], bytes | None]) -> str:
        """Write the batch in one transaction; what went wrong, or nothing."""
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
                log.error("the index %s can't be written: %s", self.folder, error)
            return f"the index {self.folder} can't be written: {error}"
        return ""

    def _grow(self, wanted: int, only_drops: bool) -> None:
        """Room for so many bytes more, before they are written. To drop something takes room too: some is
        kept for that."""
        limit = self._limit_bytes - (0 if only_drops else RESERVE_BYTES)
        info, page = self._env.info(), self._env.stat()["psize"]
        used, size = (info["last_pgno"] + 1) * page, info["map_size"]
        if used + wanted <= size or size >= limit:
            return
        while size < used + wanted:
            size *= 2
        self._env.set_mapsize(min(size, limit))


def _opened(folder: Path, map_bytes: int) -> tuple[lmdb.Environment, dict[bytes, Table]]:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            return _open(folder, map_bytes)
        except lmdb.Error as error:
            # What has no class of its own is an error of the system: it says nothing of the file.
            of_the_system = (lmdb.LockError, lmdb.ReadonlyError, lmdb.DiskError, lmdb.MemoryError)
            if type(error) is lmdb.Error or isinstance(error, of_the_system):
                raise
            log.error("the index %s is damaged (%s): a new one is begun", folder, error)
            (folder / "data.mdb").replace(folder / "data.mdb.damaged")
            return _open(folder, map_bytes)
    except (lmdb.Error, OSError) as error:
        raise TierError(f"the index {folder} can't be opened: {error}") from error


def _open(folder: Path, map_bytes: int) -> tuple[lmdb.Environment, dict[bytes, Table]]:
    # Without `metasync` a power cut, or a file system that becomes read-only, loses the last commit: a forget
    # that was answered, or the only description of what an open segment holds. Without `sync` a file opens
    # cleanly after one and has wrong values.
    env = lmdb.open(
        str(folder), map_size=map_bytes, max_dbs=len(TABLES), metasync=True, sync=True, mode=0o600,
        max_readers=4, readahead=False,
    )  # fmt: skip
    try:
        have = (folder / "data.mdb").stat().st_size
        if have < (env.info()["last_pgno"] + 1) * env.stat()["psize"]:
            # To read what is mapped and not there would be the end of this process.
            raise lmdb.CorruptedError(f"cut short to {have} bytes")
        tables = {name: env.open_db(name) for name in TABLES}
        with env.begin(write=True) as writing:
            version = writing.get(b"format", db=tables[b"meta"])
            if version is None:
                writing.put(b"format", FORMAT, db=tables[b"meta"])
            elif version != FORMAT:
                raise lmdb.VersionMismatchError(f"format {version!r}, this is {FORMAT!r}")
    except BaseException:
        env.close()
        raise
    return env, tables
