"""A directory's index in a child process: damage or a disk that ends or hangs that process does not affect
the daemon.

`IndexProcess` is used like `Index`. If its process ends, a new one gets the changes that were not on disk;
until then each `flush` fails.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Final

import msgspec

from kvtier.errors import TierError
from kvtier_daemon.claim import InUseError
from kvtier_daemon.tiers.child_process import MODULE, start_child
from kvtier_daemon.tiers.cold.index import CLOSE_S, RETRY_S, Change, ChangeQueue, Entry
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

COMMAND: Final = (*MODULE, "kvtier_daemon.tiers.cold.index_child")
LONGEST_RETRY_S: Final = 30.0
END_S: Final = 1.0  # for a process that was told to end


class Child:
    """The process, and the requests to it, one at a time. Raises EOFError if it has ended."""

    def __init__(self) -> None:
        self._process, own_end = start_child(COMMAND)
        self._channel = Channel(own_end)
        self._turn = threading.Lock()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, request: Request, fds: tuple[int, ...] = ()) -> tuple[IndexDone, list[int]]:
        with self._turn:
            self._channel.send(request, fds)
            text, received = self._channel.receive()
        return msgspec.msgpack.decode(text, type=IndexDone), received

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
        """Kill the process without waiting for its end, which may need a disk; pending requests fail at
        once."""
        self._channel.shut()
        self._process.kill()

    def close(self) -> None:
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
    """`limit_bytes` is the maximum size of its file. `child` opens it. `fds` are descriptors of the lock,
    which the process holds too, and of the directory. Raises TierError if the index cannot be opened, or if
    the process ends meanwhile."""

    def __init__(self, child: Child, folder: Path, limit_bytes: int, fds: tuple[int, int]) -> None:
        super().__init__(folder)
        self.unwritten: Change = {}  # after `close`
        self._limit_bytes = limit_bytes
        self._fds = fds
        self._child: Child | None = child
        self._open(child)
        self._closing = False
        self._tries_at, self._retry_s = 0.0, RETRY_S
        self._start(self._pass_on)

    def entries(self, table: bytes) -> list[tuple[bytes, bytes]]:
        """Return the entries of a table in the order of their keys. Waits for the disk."""
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
        """Write the last changes, and close. False if that takes too long or fails; then nothing in this
        process waits for the disk."""
        self._closing = True
        self._queue.put(None)
        self._thread.join(timeout_s)
        is_over = not self._thread.is_alive()
        if child := self._child:
            child.kill()
            self._thread.join(END_S)
            child.close()
        # A thread that is alive may still write to this descriptor.
        if not self._thread.is_alive():
            os.close(self.event_fd)
        return is_over

    # --- the thread --------------------------------------------------------------------------

    def _pass_on(self) -> None:
        unwritten: Change = {}  # that may not be on disk
        more = True
        while more:
            new, tokens, more = self._take(bool(unwritten))
            unwritten.update({(table, key): value for table, key, value in new})
            failure = self._written(unwritten, new) if unwritten or tokens else ""
            if not failure:
                unwritten.clear()
            self._answer(tokens, failure, unwritten)
        self.unwritten = unwritten
        if (child := self._child) is not None:
            with contextlib.suppress(EOFError):
                child.ask(CloseIndex())

    def _written(self, unwritten: Change, new: list[Entry]) -> str:
        """Let the process write the new changes, or a new process all unwritten ones; return the failure."""
        try:
            if self._child is None:
                if self._closing or time.monotonic() < self._tries_at:
                    return self.failure
                self._restart()
                new = [(table, key, value) for (table, key), value in unwritten.items()]
            assert self._child is not None
            answer, _ = self._child.ask(WriteIndex(new))
        except TierError as error:
            return str(error)
        except OSError as error:
            return (
                f"cannot write the index {self.folder}: cannot start its process: {error.strerror}"
            )
        except EOFError:
            return self._ended()
        self._retry_s = RETRY_S
        return answer.failure

    def _ended(self) -> str:
        child, self._child = self._child, None
        assert child is not None
        failure = f"cannot write the index {self.folder}: its process {child.end()}"
        log.error("%s", failure)
        return failure

    def _restart(self) -> None:
        """Start another process for the index, with a growing delay: the disk may have failed."""
        self._tries_at = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, LONGEST_RETRY_S)
        child = self._child = Child()  # set before it opens the index, so that `close` can end it
        try:
            self._open(child)
        except TierError:
            self._child = None
            child.close()
            raise
        log.info("restarted the process of the index %s, pid %d", self.folder, child.pid)

    def _open(self, child: Child) -> None:
        try:
            answer, _ = child.ask(OpenIndex(str(self.folder), self._limit_bytes), self._fds)
        except EOFError as error:
            text = f"cannot open the index {self.folder}: its process {child.end()}"
            raise TierError(text) from error
        if answer.failure:
            raise TierError(answer.failure)


def lock(child: Child, directory: Path, device: int | None) -> tuple[int, int, bytes]:
    """Let the process lock this directory as `claim` does, with its results and exceptions."""
    try:
        answer, fds = child.ask(LockIndex(str(directory), os.getpid(), device))
    except EOFError as error:
        text = f"cold: cannot use {directory}: the process that opens it {child.end()}"
        raise TierError(text) from error
    if answer.holder:
        raise InUseError(answer.failure, answer.holder)
    if answer.failure:
        raise TierError(answer.failure)
    lock_fd, folder_fd = fds
    return lock_fd, folder_fd, answer.name
