"""Accepts clients on the unix socket; knows who is connected, and whose slots wait for a process to end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import resource
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from kvtier import wire
from kvtier.catalog import SessionId
from kvtier_daemon.observing.events import Events
from kvtier_daemon.observing.spans import Latencies
from kvtier_daemon.peer import Peer
from kvtier_daemon.recorder import Recorder
from kvtier_daemon.session import HALF_S, RECEIVE_FIRST_BYTES, Session
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.turns import Share, Turns

log = logging.getLogger(__name__)

RECEIVE_BYTES = 1 << 18
RUN_BYTES = 16
HELLO_S = 10.0
TAKE_S = (
    10.0  # how long a client that sends nothing may leave its descriptors, or its answers, unread
)
ACCEPTS_AT_ONCE = 4
PAUSE_S = 0.5
LIMIT_GHOSTS = 16
LIMIT_TOLD = 256
LIMIT_STRANGERS = 16  # of one tenant, who have not said hello; or its share of clients

Report = dict[str, msgspec.Raw]


class Operated(Protocol):
    """What those who run the daemon may ask of it. Raises KvtierError where that can't be done."""

    async def settings(self, order: str) -> dict[str, Any]: ...
    async def tier(self, tier: str, order: str) -> dict[str, Any]: ...


class Server:
    """The listening socket and the sessions. `tenant_of` maps a peer's uid to its tenant; `stats` reports on
    one tenant, or on all. Each of the tenants may have an equal share of `max_clients`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        tenant_of: Callable[[int], Tenant | None],
        tenants: Mapping[str, Tenant],
        stats: Callable[[Tenant | None], Report],
        max_clients: int,
        recorder: Recorder,
        operated: Operated | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.loop = loop
        self.stats = stats
        self.clock = clock
        self.recorder = recorder
        self.operated = operated
        self.answering: set[asyncio.Task[None]] = set()  # what takes a while
        self.tenants = tenants
        self.events = Events(time.time)
        self.run = secrets.token_bytes(RUN_BYTES)
        self.receive_buffer = memoryview(bytearray(RECEIVE_BYTES))
        self.receive_first = self.receive_buffer[:RECEIVE_FIRST_BYTES]
        # Those who run the daemon and have no tenant have a share of their own.
        self.turns = Turns(loop, len(tenants) + 1)
        self._shares: dict[str, Share] = {}
        self.sessions: set[Session] = set()
        self.ghosts: set[Session] = set()
        self.failures: Counter[str] = Counter(dict.fromkeys(wire.CODES, 0))
        self.latencies = Latencies()
        self._listener = listener
        self._tenant_of = tenant_of
        self.limit_clients(max_clients)
        # The kernel lets a user have as many descriptors on their way as it may have open.
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._parking = max(64, min(soft, 1 << 16) // 2)
        self._ids = itertools.count(1)
        loop.add_reader(listener.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                    raise
                # The waiting client stays in the backlog; don't spin on it.
                log.error("can't accept a client: %s", error.strerror)
                self.loop.remove_reader(self._listener.fileno())
                self.loop.call_later(PAUSE_S, self._resume)
                return
            sock.setblocking(False)
            try:
                peer = Peer.of(sock)
            except OSError as error:
                log.error("can't watch a client's process: %s", error.strerror)
                self._turn_away(sock, "too_many", "the daemon has no descriptors left")
                continue
            peer.tenant = self._tenant_of(peer.uid)
            strangers = sum(
                not other.greeted and other.tenant is peer.tenant for other in self.sessions
            )
            if peer.tenant is None and not peer.privileged:
                peer.close()
                self._turn_away(sock, "no_tenant", f"no tenant is configured for uid {peer.uid}")
            elif strangers >= max(LIMIT_STRANGERS, self._clients_each):
                peer.close()
                self._turn_away(sock, "too_many", f"{strangers} clients have yet to say hello")
            else:
                self.sessions.add(Session(self, sock, peer, SessionId(next(self._ids))))

    def share_of(self, tenant: Tenant | None) -> Share:
        return self._shares.setdefault(tenant.name if tenant else "", Share())

    def refusal(self, peer: Peer) -> str:
        """Why this client, which has said hello, may not stay. A ghost counts as the client that it was."""
        everybody = [*(each for each in self.sessions if each.greeted), *self.ghosts]
        if len(everybody) >= self._max_clients:
            return f"{len(everybody)} clients are connected: raise max_clients"
        theirs = [other for other in everybody if other.tenant is peer.tenant]
        if len(theirs) >= self._clients_each:
            return f"{self._clients_each} clients of this tenant are connected already"
        # In another pid namespace every process is number 0.
        if (
            peer.pid
            and sum(other in self.ghosts and other.peer.pid == peer.pid for other in theirs)
            >= LIMIT_GHOSTS
        ):
            return f"{LIMIT_GHOSTS} connections of this process ended without a goodbye; slots wait for it"
        return ""

    def limit_clients(self, max_clients: int) -> None:
        """So many may be connected from now on; who is stays."""
        self._max_clients = max_clients
        self._clients_each = max(1, max_clients // max(1, len(self.tenants)))

    def clients(self, tenant: Tenant | None) -> list[dict[str, Any]]:
        """Who is connected, of one tenant or of all; the longest first, and no more than LIMIT_TOLD."""
        now = self.clock()
        there = [each for each in self.sessions if each.greeted and tenant in (None, each.tenant)]
        there.sort(key=lambda each: each.opened_at)
        return [
            {
                "client": each.name,
                "tenant": each.tenant.name if each.tenant else "",
                "pid": each.peer.pid,
                "uid": each.peer.uid,
                "spaces": each.open_spaces,
                "up_s": round(now - each.opened_at, 1),
            }
            for each in there[:LIMIT_TOLD]
        ]

    def _turn_away(self, sock: socket.socket, code: str, text: str) -> None:
        self.failures[code] += 1
        with sock, contextlib.suppress(OSError):
            sock.send(wire.encode(wire.Failed(0, code, text, True)))

    def _resume(self) -> None:
        if self._listener.fileno() >= 0:
            self.loop.add_reader(self._listener.fileno(), self._accept)

    def may_park(self, session: Session, descriptors: int) -> bool:
        """Whether so many descriptors more may be on their way to this client. One that doesn't take its own
        can hold up nobody else: beyond half the room a client has one extent on its way at most."""
        if self._parked() + descriptors > self._parking // 2:
            for other in self.sessions:
                if other.parked:
                    other.unpark()
        parked = self._parked()
        if parked + descriptors > self._parking:
            return False
        return not session.parked or parked + descriptors <= self._parking // 2

    def _parked(self) -> int:
        return sum(session.parked for session in self.sessions)

    def forsworn(self, tenant: Tenant | None, token: bytes) -> None:
        """End the session of this token for good, if it is the tenant's. Knowing the token is the proof."""
        for session in [*self.ghosts, *self.sessions]:
            if session.token == token and session.tenant is tenant:
                session.forswear()

    def tend(self) -> None:
        """Hang up on those who never said who they are, and on those who don't take what they are sent."""
        now = self.clock()
        for session in list(self.sessions):
            if session.parked:
                session.unpark()
            if not session.greeted and now - session.opened_at > HELLO_S:
                session.end("said nothing")
            elif session.sends_half(now):
                text = f"a request was not complete {HALF_S:.0f} s after it began: send it again"
                session.fail(0, "bad_frame", text, fatal=True)
            elif session.waits_for_its_client and now - session.alive_at > TAKE_S:
                session.end("takes nothing")

    def close(self, reason: str) -> None:
        """Say goodbye to everybody. The listener stays its owner's to close."""
        self.loop.remove_reader(self._listener.fileno())
        for session in list(self.sessions):
            session.send(wire.GoingDown(0, reason))
            session.end(reason)
        for session in list(self.ghosts):
            session.abandon()
        self.ghosts.clear()
