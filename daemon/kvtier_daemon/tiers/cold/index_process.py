"""A directory's index, in a process of its own: what ends that process, or hangs it, costs this one nothing.

`IndexProcess` is used as an `Index` is. Where its process ends, what was not on disk yet is given to the next
one; until then every `flush` fails, and says why.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final

import msgspec

from kvtier.errors import TierError
from kvtier_daemon.claim import InUseError
from kvtier_daemon.tiers.cold.index import (
    CLOSE_S,
    COALESCED,
    KEPT,
    RETRY_S,
    Change,
    ChangeQueue,
    Entry,
)
from kvtier_daemon.tiers.cold.index_child import (
    ROWS,
    Channel,
    CloseIndex,
    IndexDone,
    IndexRows,
    LockIndex,
    OpenIndex,
    ReadIndex,
    Request,
    WriteIndex,
)

log = logging.getLogger(__name__)

# -P: no module is taken from the working directory, which may be another user's.
COMMAND: Final = (sys.executable, "-P", "-m", "kvtier_daemon.tiers.cold.index_child")
LONGEST_RETRY_S: Final = 30.0
END_S: Final = 1.0  # for a process that was told to end


class Child:
    """The process, and the requests to it, one at a time. Raises EOFError where it has ended."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            # A group of its own: a terminal's Ctrl-C is for the daemon, which says what is left to write.
            self._process = subprocess.Popen(
                [*COMMAND, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
            undo.pop_all()
        self._channel = Channel(ours)
        self._turn = threading.Lock()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, request: Request, fds: tuple[int, ...] = ()) -> tuple[IndexDone, list[int]]:
        with self._turn:
            self._channel.send(request, fds)
            text, came = self._channel.receive()
        return msgspec.msgpack.decode(text, type=IndexDone), came

    def read(self, table: bytes) -> list[tuple[bytes, bytes]]:
        rows: list[tuple[bytes, bytes]] = []
        with self._turn:
            self._channel.send(ReadIndex(table))
            while True:
                text, _ = self._channel.receive()
                some = msgspec.msgpack.decode(text, type=IndexRows).rows
                rows += some
                if len(some) < ROWS:
                    return rows

    def kill(self) -> None:
        """Who waits for it is told at once. Its own end may wait for a disk: nothing waits for that."""
        self._channel.shut()
        self._process.kill()

    def close(self) -> None:
        """End it, and close the socket to it."""
        self._process.kill()
        self.end()

    def end(self) -> str:
        """Close the socket to a process that should have ended; return how it did."""
        self._channel.shut()
        self._channel.close()
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return "does not end"
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"


class IndexProcess(ChangeQueue):
    """`limit_bytes` is what its file may grow to. `child` is to use it, and `lock_fd` is the lock of the
    directory, which each process holds. Raises TierError if the index can't be opened, and where the process
    ends meanwhile."""

    def __init__(self, child: Child, folder: Path, limit_bytes: int, lock_fd: int) -> None:
        self.folder = folder
        self.failure = ""
        self.reserved_bytes = 0
        self.unwritten: Change = {}  # once it is closed
        self._limit_bytes = limit_bytes
        self._lock_fd = lock_fd
        self._child: Child | None = child
        self._open(child)
        self._closing = False
        self._tries_at, self._retry_s = 0.0, RETRY_S
        super().__init__(self._pass_on)

    def entries(self, table: bytes) -> list[tuple[bytes, bytes]]:
        """All of a table, in the order of its keys. Waits for the disk: at start only."""
        child = self._child
        try:
            if child is not None:
                return child.read(table)
        except EOFError:
            pass
        raise TierError(
            f"cannot read the index {self.folder}: {self.failure or 'its process ended'}"
        )

    def put(self, table: bytes, key: bytes, value: bytes) -> None:
        self._queue.put((table, key, value))

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Write what is left, and close. False where that takes longer than `timeout_s`, or fails: then the
        process is left to itself, and nothing in this one waits for the disk."""
        self._closing = True
        self._queue.put(None)
        self._thread.join(timeout_s)
        is_over = not self._thread.is_alive()
        if child := self._child:
            child.kill()
            self._thread.join(END_S)
            child.close()
        # A thread that is alive may write to this number, which could then be another file's.
        if not self._thread.is_alive():
            os.close(self.event_fd)
        return is_over

    # --- the thread --------------------------------------------------------------------------

    def _pass_on(self) -> None:
        unwritten: Change = {}  # what is not known to be on disk
        more, lost = True, ""
        while more:
            tokens: list[int] = []
            new: list[Entry] = []
            more = self._take(new, tokens, bool(unwritten))
            unwritten.update({(table, key): value for table, key, value in new})
            failure = self._written(unwritten, new) if unwritten or tokens else ""
            if not failure:
                unwritten.clear()
            elif len(unwritten) > KEPT:
                lost = (
                    f"the index {self.folder} could not be written for too long: the oldest "
                    "changes are lost"
                )
                for name in list(unwritten)[: len(unwritten) - KEPT]:
                    del unwritten[name]
            self.failure = lost or failure
            for token in tokens:
                self._done.put((token, self.failure))
            if tokens:
                os.eventfd_write(self.event_fd, 1)
        self.unwritten = unwritten
        if (child := self._child) is not None:
            with contextlib.suppress(EOFError):
                child.ask(CloseIndex())

    def _take(self, new: list[Entry], tokens: list[int], is_behind: bool) -> bool:
        """What there is to pass on; False if it is the last."""
        with contextlib.suppress(queue.Empty):
            item = self._queue.get(timeout=RETRY_S if is_behind else None)
            while item is not None:
                if isinstance(item, int):
                    tokens.append(item)
                else:
                    new.append(item)
                if len(new) + len(tokens) > COALESCED:
                    return True
                item = self._queue.get_nowait()
            return False
        return True

    def _written(self, unwritten: Change, new: list[Entry]) -> str:
        """Have the process write what is new, or a new one write all that is left; what went wrong."""
        try:
            if self._child is None:
                if self._closing or time.monotonic() < self._tries_at:
                    return self.failure
                self._restart()
                new = [(table, key, value) for (table, key), value in unwritten.items()]
            assert self._child is not None
            said, _ = self._child.ask(WriteIndex(new))
        except TierError as error:
            return str(error)
        except OSError as error:
            return (
                f"cannot write the index {self.folder}: cannot start its process: {error.strerror}"
            )
        except EOFError:
            return self._ended()
        self.reserved_bytes = said.reserved_bytes
        self._retry_s = RETRY_S
        return said.failure

    def _ended(self) -> str:
        child, self._child = self._child, None
        assert child is not None
        failure = f"cannot write the index {self.folder}: its process {child.end()}"
        log.error("%s", failure)
        return failure

    def _restart(self) -> None:
        """Another process for the same index. The one before it may have ended because the disk failed."""
        self._tries_at = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, LONGEST_RETRY_S)
        child = self._child = Child()  # which `close` ends where it hangs
        try:
            self._open(child)
        except TierError:
            self._child = None
            child.close()
            raise
        log.info("restarted the process of the index %s, pid %d", self.folder, child.pid)

    def _open(self, child: Child) -> None:
        try:
            said, _ = child.ask(OpenIndex(str(self.folder), self._limit_bytes), (self._lock_fd,))
        except EOFError as error:
            text = f"cannot open the index {self.folder}: its process {child.end()}"
            raise TierError(text) from error
        if said.failure:
            raise TierError(said.failure)
        self.reserved_bytes = said.reserved_bytes


def lock(child: Child, directory: Path, device: int | None) -> tuple[int, int, bytes]:
    """Have the process lock this directory, on this device if one is given; returns descriptors of the lock
    and of the directory, and its name. Raises TierError, InUseError where another daemon has it."""
    try:
        said, fds = child.ask(LockIndex(str(directory), os.getpid(), device))
    except EOFError as error:
        text = f"cold: cannot use {directory}: the process that opens it {child.end()}"
        raise TierError(text) from error
    if said.holder:
        raise InUseError(said.failure, said.holder)
    if said.failure:
        raise TierError(said.failure)
    lock_fd, folder_fd = fds
    return lock_fd, folder_fd, said.name
