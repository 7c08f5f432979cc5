"""Accepts clients on the unix socket and knows who is connected."""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable

import msgspec

from kvtier import wire
from kvtier.catalog import SessionId
from kvtier_daemon.session import Session
from kvtier_daemon.tenant import Tenant

log = logging.getLogger(__name__)

RECEIVE_BYTES = 1 << 18
HELLO_S = 10.0
ACCEPTS_AT_ONCE = 16
PAUSE_S = 0.5

Report = dict[str, msgspec.Raw]


class Server:
    """The listening socket and the sessions. `tenant_of` maps a peer's uid to its tenant; `stats` reports on
    one tenant, or on all."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        tenant_of: Callable[[int], Tenant | None],
        stats: Callable[[Tenant | None], Report],
        max_clients: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.loop = loop
        self.tenant_of = tenant_of
        self.stats = stats
        self.clock = clock
        self.receive_buffer = memoryview(bytearray(RECEIVE_BYTES))
        self.sessions: set[Session] = set()
        self.ghosts: set[Session] = set()
        self.failures: Counter[str] = Counter(dict.fromkeys(wire.CODES, 0))
        self._listener = listener
        self._max_clients = max_clients
        self._ids = itertools.count(1)
        loop.add_reader(listener.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                    raise
                # The waiting client stays in the backlog; don't spin on it.
                log.error("can't accept a client: %s", error.strerror)
                self.loop.remove_reader(self._listener.fileno())
                self.loop.call_later(PAUSE_S, self._resume)
                return
            sock.setblocking(False)
            if len(self.sessions) >= self._max_clients:
                text = f"{self._max_clients} clients are connected: raise max_clients"
                self.failures["too_many"] += 1
                with sock:
                    sock.send(wire.encode(wire.Failed(0, "too_many", text, True)))
                continue
            self.sessions.add(Session(self, sock, SessionId(next(self._ids))))

    def _resume(self) -> None:
        if self._listener.fileno() >= 0:
            self.loop.add_reader(self._listener.fileno(), self._accept)

    def forsworn(self, tenant: Tenant | None, token: bytes) -> None:
        """End the session of this token for good, if it is the tenant's. Knowing the token is the proof."""
        for session in [*self.ghosts, *self.sessions]:
            if session.token == token and session.tenant is tenant:
                session.forswear()

    def tend(self) -> None:
        """Hang up on those who connected and never said who they are."""
        now = self.clock()
        for session in list(self.sessions):
            if not session.greeted and now - session.opened_at > HELLO_S:
                session.end("said nothing")

    def announce(self) -> None:
        """Hand new extents to whom they belong."""
        for session in list(self.sessions):
            session.announce()

    def close(self, reason: str) -> None:
        """Say goodbye to everybody. The listener stays its owner's to close."""
        self.loop.remove_reader(self._listener.fileno())
        for session in list(self.sessions):
            session.send(wire.GoingDown(0, reason))
            session.end(reason)
        for session in list(self.ghosts):
            session.abandon()
        self.ghosts.clear()
