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


class SystemdStore:
    """systemd's descriptor store. It keeps descriptors over restarts of the service, and closes them when the
    service is stopped."""

    def __init__(self, notifier: Notifier, inherited: Mapping[str, int]) -> None:
        self._notifier = notifier
        self._inherited = inherited

    def take(self) -> Mapping[str, int]:
        return self._inherited

    def put(self, name: str, fd: int) -> None:
        if not self._notifier.store(name, fd):
            log.warning("systemd did not take a descriptor: warm blocks will not survive a restart")

    def remove(self, name: str) -> None:
        self._notifier.unstore(name)

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

    def put(self, name: str, fd: int) -> None:
        self._send(keeper.PUT + name.encode(), [fd])

    def remove(self, name: str) -> None:
        self._send(keeper.REMOVE + name.encode())

    def close(self) -> None:
        if self._daemon is not None:
            self._daemon.close()
            self._daemon = None

    def _send(self, message: bytes, fds: Sequence[int] = ()) -> None:
        if self._daemon is None:
            return
        try:
            socket.send_fds(self._daemon, [message], fds)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        log.warning(
            "no keeper process: %s; warm blocks will not survive a restart of the daemon", error
        )
        self.close()


class QueuedStore:
    """Passes descriptors to a store in a thread, in order: the daemon serves while the store hangs."""

    def __init__(self, store: FdStore) -> None:
        self._store = store
        self._queue: queue.SimpleQueue[tuple[str, int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvtier-keep", daemon=True)

    def take(self) -> Mapping[str, int]:
        return self._store.take()

    def put(self, name: str, fd: int) -> None:
        self._enqueue(name, os.dup(fd))

    def remove(self, name: str) -> None:
        self._enqueue(name, -1)

    def close(self) -> None:
        """Wait for what was passed on before, but not for a store that hangs."""
        if self._thread.ident is not None:
            self._queue.put(None)
            self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._store.close()

    def _enqueue(self, name: str, fd: int) -> None:
        if self._thread.ident is None:
            self._thread.start()
        self._queue.put((name, fd))

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            name, fd = task
            if fd < 0:
                self._store.remove(name)
            else:
                self._store.put(name, fd)
                os.close(fd)


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
