"""Accepts clients on the unix socket, keeps the sessions, and disconnects clients that do not respond."""

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
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from kvtier import wire
from kvtier_daemon.catalog import SessionId
from kvtier_daemon.config.members import Role
from kvtier_daemon.config.schema import Config
from kvtier_daemon.observing.audit import Actor, AuditLog, Order
from kvtier_daemon.observing.events import EventFeed
from kvtier_daemon.observing.histogram import Latencies
from kvtier_daemon.serving.context import Operated, Report
from kvtier_daemon.serving.peer import Mapper, Peer
from kvtier_daemon.serving.recorder import Recorder
from kvtier_daemon.serving.session import HALF_S, RECEIVE_FIRST_BYTES, ClientErrors, Session
from kvtier_daemon.serving.turns import Settling, Share, Turns
from kvtier_daemon.serving.writers import Writers
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.hot import HotTier
from kvtier_daemon.tiers.kept_arena import KeptArena

log = logging.getLogger(__name__)

RECEIVE_BYTES = 1 << 18
RUN_BYTES = 16
HELLO_S = 10.0
TAKE_S = 10.0  # how long a client that sends nothing may leave descriptors or answers unread
ACCEPTS_AT_ONCE = 4
PAUSE_S = 0.5
LIMIT_GHOSTS = 16
LIMIT_LISTED = 256
LIMIT_STRANGERS = 16  # clients of one tenant without a Hello; or its share of clients


class Server:
    """The listening socket and the sessions. `member_of` returns a peer's tenant and role; `stats` reports
    on one tenant or on all. Each tenant has an equal share of `max_clients`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        member_of: Callable[[Peer], tuple[Tenant | None, Role]],
        tenants: Mapping[str, Tenant],
        stats: Callable[[Tenant | None], Report],
        max_clients: int,
        recorder: Recorder,
        operated: Operated | None = None,
        clock: Callable[[], float] = time.monotonic,
        kept: KeptArena | None = None,
        audit: AuditLog | None = None,
        hot: HotTier | None = None,
    ) -> None:
        self.loop = loop
        self.audit = audit or AuditLog(clock, time.time)
        self.hot = hot or HotTier(tenants, {})
        self.writers = Writers(loop, kept)
        self.stats = stats
        self.clock = clock
        self.recorder = recorder
        self.operated = operated
        self.answering: set[asyncio.Task[None]] = set()  # deferred answers
        self.tenants = tenants
        self.events = EventFeed(time.time)
        self.run = secrets.token_bytes(RUN_BYTES)
        self.receive_buffer = memoryview(bytearray(RECEIVE_BYTES))
        self.receive_first = self.receive_buffer[:RECEIVE_FIRST_BYTES]
        # Root and the daemon's user have a share of their own if they have no tenant.
        self.turns = Turns(loop, dict.fromkeys(tenants, 1))
        for name, tenant in tenants.items():
            if tenant.uses is not None:
                share = self.turns.shares[name]
                share.settling = Settling(self.turns, share, tenant.uses, clock)
        self.sessions: set[Session] = set()
        self.ghosts: set[Session] = set()
        # Whose processes may have mapped the memory of a tenant: user, groups and role.
        self.mapped: dict[str, set[Mapper]] = {name: set() for name in tenants}
        self.errors = ClientErrors(clock)
        self.failures: Counter[str] = Counter(dict.fromkeys(wire.CODES, 0))
        self.latencies = Latencies()
        self._going_down = ""
        self._listener = listener
        self._member_of = member_of
        self.limit_clients(max_clients, {})
        # The kernel limits a user's descriptors in transit to its limit of open files.
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._parking = max(64, min(soft, 1 << 16) // 2)
        self._ids = itertools.count(self.writers.next_session)
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
                # The client stays in the backlog: pause, because the loop would report it again at once.
                log.error("cannot accept a client: %s", error.strerror)
                self.loop.remove_reader(self._listener.fileno())
                self.loop.call_later(PAUSE_S, self._resume)
                return
            sock.setblocking(False)
            if self._going_down:
                with sock, contextlib.suppress(OSError):
                    sock.send(wire.encode(wire.GoingDown(0, self._going_down)))
                continue
            try:
                peer = Peer.of(sock)
            except OSError as error:
                log.error("cannot watch a client's process: %s", error.strerror)
                self._turn_away(
                    sock,
                    "too_many",
                    "the daemon has no file descriptors left; raise its limit of open files",
                )
                continue
            peer.tenant, peer.role = self._member_of(peer)
            strangers = sum(
                not other.greeted and other.tenant is peer.tenant for other in self.sessions
            )
            if peer.tenant is None and not peer.privileged:
                peer.close()
                self.audit.note(Order("connect"), "no_tenant", Actor(peer.uid, peer.pid, ""))
                self._turn_away(sock, "no_tenant", f"no tenant is configured for uid {peer.uid}")
            elif strangers >= max(LIMIT_STRANGERS, self.clients_of(peer.tenant)):
                peer.close()
                self._turn_away(
                    sock,
                    "too_many",
                    f"{strangers} clients are connected without a Hello: try again",
                )
            else:
                self.sessions.add(Session(self, sock, peer, SessionId(next(self._ids))))

    def share_of(self, tenant: Tenant | None) -> Share:
        return self.turns.shares[tenant.name if tenant else ""]

    def refusal(self, peer: Peer, resumes: bytes) -> str:
        """The reason to refuse this client at its Hello, or "". Ghosts count, but not those it continues."""
        connected = [*(each for each in self.sessions if each.greeted), *self.ghosts]
        connected = [each for each in connected if not (resumes and each.token == resumes)]
        if len(connected) >= self._max_clients:
            return (
                f"{len(connected)} clients are connected, the limit is reached: raise max_clients"
            )
        theirs = [other for other in connected if other.tenant is peer.tenant]
        if len(theirs) >= (most := self.clients_of(peer.tenant)):
            return f"{most} clients of this tenant are already connected, its limit is reached"
        # Processes in another pid namespace all have number 0.
        if (
            peer.pid
            and sum(other in self.ghosts and other.peer.pid == peer.pid for other in theirs)
            >= LIMIT_GHOSTS
        ):
            return (
                f"{LIMIT_GHOSTS} connections of this process were lost and still hold "
                "slots: restart the process"
            )
        return ""

    def renew_members(self) -> int:
        """End the sessions whose user has another tenant or role now; return how many."""
        ended = 0
        for session in list(self.sessions):
            peer = session.peer
            if self._member_of(peer) != (peer.tenant, peer.role):
                text = f"the configuration has changed the tenant or the role of uid {peer.uid}"
                end = partial(session.fail, 0, "no_tenant", f"{text}: connect again", fatal=True)
                if peer.privileged:  # perhaps its request is being answered
                    self.loop.call_soon(end)
                else:
                    end()
                ended += 1
        return ended

    def lacks_member(self, tenant: Tenant) -> bool:
        """Whether a user that may have mapped the tenant's memory may not map it like that now."""
        for uid, groups, role in self.mapped[tenant.name]:
            found, now = self._member_of(Peer(0, uid, -1, groups=groups))
            if found is not tenant or (role >= Role.WRITE > now):
                return True
        return False

    def slots_retired(self, tenant: Tenant) -> None:
        """No present slot of the tenant is used again: free those whose writers have disconnected."""
        self.mapped[tenant.name] = {
            each.peer.mapper for each in self.sessions if each.greeted and each.tenant is tenant
        }
        self.writers.end_all(tenant)
        # Clients can write to the memory of GPUs that they have mapped: a holder that connects again
        # offers other memory.
        for name in self.hot.holders_for(tenant.name):
            for holder in [each for each in self.sessions if each.id == name]:
                holder.end("users have left a tenant")
        for session in list(self.ghosts):
            if session.tenant is tenant:
                session.end_for_good()

    def divide(self, config: Config) -> None:
        """Divide clients, time and memory for messages among the tenants."""
        own = {name: most for name, one in config.tenants.items() if (most := one.max_clients)}
        self.limit_clients(config.max_clients, own)
        self.turns.weigh({name: one.weight for name, one in config.tenants.items()})

    def limit_clients(self, max_clients: int, own: Mapping[str, int]) -> None:
        """Set the limit of connected clients, and those of some tenants; the other tenants have equal shares
        of the rest. Clients above a limit stay connected."""
        self._max_clients = max_clients
        others = max(1, len(self.tenants) - len(own))
        self._clients_each = max(1, (max_clients - sum(own.values())) // others)
        self._clients_of = own

    def clients_of(self, tenant: Tenant | None) -> int:
        """How many clients this tenant may have."""
        return self._clients_of.get(tenant.name if tenant else "", self._clients_each)

    def clients(self, tenant: Tenant | None) -> list[dict[str, Any]]:
        """The connected clients of one tenant or of all, the oldest first; at most LIMIT_LISTED."""
        now = self.clock()
        listed = [each for each in self.sessions if each.greeted and tenant in (None, each.tenant)]
        listed.sort(key=lambda each: each.opened_at)
        return [
            {
                "client": each.name,
                "tenant": each.tenant.name if each.tenant else "",
                "pid": each.peer.pid,
                "uid": each.peer.uid,
                "role": str(each.peer.role) if each.tenant else "",
                "spaces": len(each.requests.spaces.opened),
                "up_s": round(now - each.opened_at, 1),
            }
            for each in listed[:LIMIT_LISTED]
        ]

    def _turn_away(self, sock: socket.socket, code: str, text: str) -> None:
        self.failures[code] += 1
        with sock, contextlib.suppress(OSError):
            sock.send(wire.encode(wire.Failed(0, code, text, True)))

    def _resume(self) -> None:
        if self._listener.fileno() >= 0:
            self.loop.add_reader(self._listener.fileno(), self._accept)

    def may_park(self, session: Session, descriptors: int) -> bool:
        """Whether this many more descriptors may be in transit to this client. Above half of the limit, a
        client may have one extent in transit, so that one that receives nothing cannot block others."""
        if _parked(self.sessions) + descriptors > self._parking // 2:
            for other in self.sessions:
                if other.outbox.parked:
                    other.outbox.update_parked()
        parked = _parked(self.sessions)
        if parked + descriptors > self._parking:
            return False
        return not session.outbox.parked or parked + descriptors <= self._parking // 2

    def end_for_good(self, tenant: Tenant | None, token: bytes) -> None:
        """End the tenant's session with this token, which only its client knows, and free its slots."""
        self.writers.end_for_good(tenant, token)
        for session in [*self.ghosts, *self.sessions]:
            if session.token == token and session.tenant is tenant:
                session.end_for_good()

    def resume(self, session: Session, token: bytes) -> bool:
        """Give this session the slots that its client had for writing in the sessions with this token; return
        whether there are such sessions. Only a client that is the same process gets them."""
        tenant, pid = session.tenant, session.peer.pid
        assert tenant is not None
        others = [
            other
            for other in [*self.sessions, *self.ghosts]
            if (other.token, other.tenant, other.peer.pid) == (token, tenant, pid)
        ]
        earlier = self.writers.with_token(tenant, token, pid)
        if not others and not earlier:
            return False
        # The next daemon must know the session before slots are noted as its own.
        session.token = token
        session.device |= any(other.device for other in others)
        session.device |= any(self.writers.by_device(one) for one in earlier)
        self.writers.began(session.id, tenant, token, session.peer, session.device)
        for other in others:
            other.end("continued by its next connection")
            if other in self.ghosts:
                self.ghosts.discard(other)
                tenant.catalog.resume(other.id, session.id)
                other.quarantine.abandon()
        for one in earlier:
            tenant.catalog.resume(one, session.id)
            self.writers.take(one)
        return True

    def memory_grew(self) -> None:
        """Announce new extents to clients with a request that waits for memory, and answer it."""
        for session in list(self.sessions):
            feeds = session.requests.feeds
            if session.tenant is not None and feeds.growing:
                session.announce()
                feeds.send_growth(session.tenant, feeds.growing)

    def check_clients(self) -> None:
        """Disconnect clients that sent no Hello, sent half a request, or do not receive their answers."""
        now = self.clock()
        for session in list(self.sessions):
            if session.outbox.parked:
                session.outbox.update_parked()
            if not session.greeted and now - session.opened_at > HELLO_S:
                session.end("sent no Hello in time")
            elif session.inbox.is_overdue(now):
                text = f"a request was incomplete {HALF_S:.0f} s after it began: send it again"
                session.fail(0, "bad_frame", text, fatal=True)
            elif now - session.alive_at > TAKE_S and (
                session.outbox.is_blocked or session.outbox.parked
            ):
                session.end("does not read its answers")

    def disconnect(self, reason: str) -> None:
        """Disconnect all clients, and send those that connect from now on away."""
        self._going_down = reason
        for session in list(self.sessions):
            session.send(wire.GoingDown(0, reason))
            session.end(reason)
        self.writers.close()  # the next daemon must know the ghosts
        for session in list(self.ghosts):
            session.quarantine.abandon()
        self.ghosts.clear()

    def close(self, reason: str) -> None:
        """Disconnect all clients, and accept no others. The caller must close the listener."""
        self.disconnect(reason)
        self.loop.remove_reader(self._listener.fileno())


def _parked(sessions: Iterable[Session]) -> int:
    """How many descriptors are in transit to these clients."""
    return sum(session.outbox.parked for session in sessions)
