"""The audit log: who ordered what, and how it ended. It contains no prompts and no whole keys.

An entry is a line of JSON. It goes to the daemon's log, whatever the log level is, and to the file
`audit.path` if that is configured.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import queue
import stat
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from kvtier.errors import ConfigError

log = logging.getLogger(__name__)
log.setLevel(logging.INFO)  # whatever the level of the daemon's log is

WINDOW_S: Final = 10.0
LIMIT_ENTRIES: Final = 20  # of one user in a window; further ones are summed by order and outcome
LIMIT_QUEUED: Final = 4096  # entries that wait for the file
CLOSE_S: Final = 1.0
NOT_OWN: Final = "it is not a regular file that only the daemon's user can write to"


class Actor(NamedTuple):
    """Who gives an order: a client, or the service manager with a signal."""

    uid: int
    pid: int
    client: str


class Order(NamedTuple):
    """What is ordered. `what` is a detail of it; space -1 is no space."""

    name: str
    tenant: str = ""
    what: str = ""
    space: int = -1


@dataclass(slots=True)
class Repeated:
    """Orders that equal an entry of the window that lasts until `until`."""

    until: float
    actor: Actor
    orders: int = 0
    numbers: Counter[str] = field(default_factory=Counter)


class AuditLog:
    """Writes the first order of a kind at once, and sums those of WINDOW_S: no client can fill the disk."""

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._clock = clock
        self._wall = wall
        self._windows: dict[tuple[Order, str, int], Repeated] = {}
        self._file = AuditFile()

    @property
    def lost(self) -> int:
        """Entries that the file does not have, because writing failed."""
        return self._file.lost

    def open(self, path: Path | None) -> None:
        """Write to this file from now on. Raises ConfigError if it cannot be used."""
        try:
            self._file.start(path)
        except OSError as error:
            raise ConfigError(f"audit.path: {error.strerror or error}: {path}") from error

    def reopen(self, path: Path | None) -> None:
        """Close the file and open this one, which may be the same path: a rotation has renamed it."""
        self._file.reopen(path)

    def note(self, order: Order, outcome: str, actor: Actor, key: str = "", **numbers: int) -> None:
        """Note an order. `key` is the beginning of the first key that it names."""
        window = self._windows.get((order, outcome, actor.uid))
        if window is None:
            own = sum(uid == actor.uid for _, _, uid in self._windows)
            if own >= LIMIT_ENTRIES:
                order, key = Order(order.name, what="several"), ""
                window = self._windows.get((order, outcome, actor.uid))
        if window is not None:
            window.actor = actor
            window.orders += 1
            window.numbers.update(numbers)
            return
        until = self._clock() + WINDOW_S
        self._windows[order, outcome, actor.uid] = Repeated(until, actor)
        self._write(order, outcome, actor, numbers, key=key)

    def flush(self, all_of_them: bool = False) -> None:
        """Write the sums of the windows that have ended."""
        now = self._clock()
        for name, window in list(self._windows.items()):
            if window.until > now and not all_of_them:
                continue
            del self._windows[name]
            order, outcome, _ = name
            if window.orders:
                self._windows[name] = Repeated(now + WINDOW_S, window.actor)
                self._write(order, outcome, window.actor, window.numbers, orders=window.orders)

    def close(self) -> None:
        self.flush(all_of_them=True)
        self._file.close()

    def _write(
        self, order: Order, outcome: str, actor: Actor, numbers: dict[str, int], **more: str | int
    ) -> None:
        time = datetime.fromtimestamp(self._wall(), UTC).isoformat(timespec="milliseconds")
        fields: dict[str, object] = {"order": order.name, "outcome": outcome}
        fields |= {"uid": actor.uid, "pid": actor.pid, "client": actor.client}
        fields |= {"tenant": order.tenant, "what": order.what, **more}
        fields = {name: value for name, value in fields.items() if value != ""}
        if order.space >= 0:
            fields["space"] = order.space
        line = json.dumps(fields | numbers)
        log.info("audit: %s", line)
        self._file.put(json.dumps({"time": time, **fields, **numbers}))


class AuditFile:
    """Appends lines to a file in a thread, because a disk may hang. Lines that cannot be written are counted,
    and the first failure is logged."""

    def __init__(self) -> None:
        self.lost = 0
        self._fd = -1
        self._path: Path | None = None
        self._is_failing = False
        self._is_torn = False  # the last line was written in part
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(LIMIT_QUEUED)
        self._thread: threading.Thread | None = None

    def start(self, path: Path | None) -> None:
        """Use this file, or none. Raises OSError."""
        self._path = path
        self._open(path)

    def reopen(self, path: Path | None) -> None:
        """Use this file, or none, after the lines so far."""
        if path is not None or self._path is not None:
            self._path = path
            self._do(partial(self._open, path))

    def put(self, line: str) -> None:
        if self._path is not None:
            self._do(partial(self._append, line.encode() + b"\n"))

    def close(self) -> None:
        """Write what waits, unless the disk hangs."""
        if self._thread is not None:
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(None)
            self._thread.join(CLOSE_S)

    def _do(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvtier-audit", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(work)
        except queue.Full:
            self.lost += 1

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
                self._is_failing = False
            except OSError as error:
                if not self._is_failing:
                    log.error("the audit log cannot be written to its file: %s", error)
                self._is_failing = True

    def _open(self, path: Path | None) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        if path is not None:
            self._fd, self._is_torn = _opened(path), False

    def _append(self, line: bytes) -> None:
        written = -1
        data = b"\n" + line if self._is_torn else line
        try:
            written = os.write(self._fd, data)
            if written < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self.lost += 1
            raise
        finally:
            self._is_torn = 0 < written < len(data) or (self._is_torn and written <= 0)


def _opened(path: Path) -> int:
    """Open a file to append to, which only this user may write to. Raises OSError."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    if is_own(os.fstat(fd)):
        return fd
    os.close(fd)
    raise OSError(errno.EPERM, NOT_OWN)


def is_own(found: os.stat_result) -> bool:
    """Return whether this is a regular file that only this user can write to."""
    is_regular = stat.S_ISREG(found.st_mode)
    return is_regular and found.st_uid == os.geteuid() and not found.st_mode & 0o022
