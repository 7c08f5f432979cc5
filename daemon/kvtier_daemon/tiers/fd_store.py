"""Holds the daemon's memory beyond its end: descriptors under names, with systemd or a keeper process.

`take` returns what an earlier daemon stored. A store that fails costs the next restart its warm blocks and
nothing else, so no method raises.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from kvtier_daemon.claim import keeper_of
from kvtier_daemon.notify import Notifier
from kvtier_daemon.tiers import keeper

log = logging.getLogger(__name__)

PATIENCE_S = 10.0  # on a busy machine; the keeper answers at once
CLOSE_S = 10.0  # on a busy machine
SOON_S = 0.02  # how long the daemon itself waits for a store


class FdStore(Protocol):
    """Holds descriptors by name, also after the end of this process."""

    def take(self) -> Mapping[str, int]:
        """Return the descriptors of earlier daemons; the caller closes them. The store still holds them."""

    def put(self, name: str, fd: int) -> None:
        """Hold a duplicate of this descriptor."""

    def remove(self, name: str) -> None:
        """Hold it no longer."""

    def close(self) -> None:
        """This process stores nothing more."""


class NoStore:
    """Holds nothing: the memory ends with the daemon."""

    def take(self) -> Mapping[str, int]:
        return {}

    def put(self, name: str, fd: int) -> None:
        pass

    def remove(self, name: str) -> None:
        pass

    def close(self) -> None:
        pass


class Receiver(Protocol):
    """Where a `QueuedStore` puts descriptors. `put` and `remove` wait at most `within_s`, and return False if
    the message has to be sent again."""

    def take(self) -> Mapping[str, int]: ...

    def put(self, name: str, fd: int, within_s: float = PATIENCE_S) -> bool: ...

    def remove(self, name: str, within_s: float = PATIENCE_S) -> bool: ...

    def close(self) -> None: ...


class SystemdStore:
    """systemd's descriptor store: outlives restarts of the service, and ends with its stop."""

    def __init__(self, notifier: Notifier, inherited: Mapping[str, int]) -> None:
        self._notifier = notifier
        self._inherited = inherited

    def take(self) -> Mapping[str, int]:
        return self._inherited

    def put(self, name: str, fd: int, within_s: float = PATIENCE_S) -> bool:
        if self._notifier.store(name, fd, within_s):
            return True
        if within_s < PATIENCE_S:
            return False
        log.warning("systemd did not take a descriptor: warm blocks will not survive a restart")
        return True

    def remove(self, name: str, within_s: float = PATIENCE_S) -> bool:
        return self._notifier.unstore(name, within_s) or within_s >= PATIENCE_S

    def close(self) -> None:
        pass


class KeeperStore:
    """A keeper process next to the daemon's socket, started when none listens there."""

    def __init__(self, path: Path, idle_s: float) -> None:
        self._path = path
        self._daemon: socket.socket | None = None
        try:
            # Without a time it only looks for one that runs.
            self._daemon = _connected(path) or (_started(path, idle_s) if idle_s else None)
        except (OSError, subprocess.SubprocessError) as error:
            self._fail(error)

    def take(self) -> Mapping[str, int]:
        taken: dict[str, int] = {}
        if self._daemon is None:
            return taken
        try:
            self._daemon.send(keeper.TAKE)
            while True:
                message, fds, _, _ = socket.recv_fds(self._daemon, keeper.MESSAGE_BYTES, 1)
                if message == keeper.END:
                    return taken
                if message[:1] != keeper.PUT or not fds:
                    raise ConnectionError("the keeper process did not return all descriptors")
                taken[message[1:].decode()] = fds[0]
        except OSError as error:
            # All or nothing. No later daemon may find what this one did not take over: it would have the
            # blocks that were forgotten meanwhile.
            for fd in taken.values():
                os.close(fd)
            self._path.unlink(missing_ok=True)
            self._fail(error)
        return {}

    def put(self, name: str, fd: int, within_s: float = PATIENCE_S) -> bool:
        return self._send(keeper.PUT + name.encode(), within_s, [fd])

    def remove(self, name: str, within_s: float = PATIENCE_S) -> bool:
        return self._send(keeper.REMOVE + name.encode(), within_s)

    def close(self) -> None:
        if self._daemon is not None:
            self._daemon.close()
            self._daemon = None

    def _send(self, message: bytes, within_s: float, fds: Sequence[int] = ()) -> bool:
        if self._daemon is None:
            return True
        try:
            self._daemon.settimeout(within_s)
            socket.send_fds(self._daemon, [message], fds)
            self._daemon.settimeout(PATIENCE_S)
        except OSError as error:
            if isinstance(error, TimeoutError) and within_s < PATIENCE_S:
                return False
            self._fail(error)
        return True

    def _fail(self, error: Exception) -> None:
        log.warning(
            "no keeper process: %s; warm blocks will not survive a restart of the daemon", error
        )
        self.close()


class QueuedStore:
    """Passes descriptors to a store: at once if the store takes them, so that a daemon that is killed then
    has stored them. Otherwise in a thread, in order: the daemon serves while the store hangs."""

    def __init__(self, store: Receiver) -> None:
        self._store = store
        self._queue: queue.SimpleQueue[tuple[str, int] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._queued = 0  # by the thread and in the queue
        self._thread = threading.Thread(target=self._run, name="kvtier-keep", daemon=True)

    def take(self) -> Mapping[str, int]:
        return self._store.take()

    def put(self, name: str, fd: int) -> None:
        if self._queued or not self._store.put(name, fd, SOON_S):
            self._enqueue(name, os.dup(fd))

    def remove(self, name: str) -> None:
        if self._queued or not self._store.remove(name, SOON_S):
            self._enqueue(name, -1)

    def close(self) -> None:
        """Wait for what was passed on before, but not for a store that hangs."""
        if self._thread.ident is not None:
            self._queue.put(None)
            self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._store.close()

    def _enqueue(self, name: str, fd: int) -> None:
        with self._lock:
            self._queued += 1
        self._queue.put((name, fd))
        if self._thread.ident is None:
            self._thread.start()

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            name, fd = task
            if fd < 0:
                self._store.remove(name)
            else:
                self._store.put(name, fd)
                os.close(fd)
            with self._lock:
                self._queued -= 1


def fd_store(
    notifier: Notifier, inherited: Mapping[str, int], socket_path: Path, idle_s: float
) -> FdStore:
    """Return systemd's store if the unit has one ($FDSTORE is its size), otherwise a keeper process; with 0
    seconds only one that runs."""
    if inherited or (notifier.is_heard and os.environ.get("FDSTORE", "0") != "0"):
        return QueuedStore(SystemdStore(notifier, inherited))
    return QueuedStore(KeeperStore(keeper_of(socket_path), idle_s))


def _connected(path: Path) -> socket.socket | None:
    """Connect to a keeper of this user; None if none listens."""
    daemon = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    daemon.settimeout(PATIENCE_S)
    try:
        daemon.connect(os.fspath(path))
    except (ConnectionRefusedError, FileNotFoundError):
        daemon.close()
        return None
    credentials = daemon.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, keeper.PEER.size)
    if (owner := keeper.PEER.unpack(credentials)[1]) != os.geteuid():
        daemon.close()
        raise PermissionError(f"{path} belongs to uid {owner}")
    return daemon


def _started(path: Path, idle_s: float) -> socket.socket | None:
    """Start a keeper that listens at this path, and connect to it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as listener:
        path.unlink(missing_ok=True)
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(os.fspath(path))
        listener.listen()
        subprocess.run(
            [sys.executable, "-I", "-S", keeper.__file__, os.fspath(path), str(idle_s)],
            stdin=listener.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            check=True,
        )  # fmt: skip
    return _connected(path)
