"""One client's connection: receives requests, answers them in turns, and frees what the client held."""

from __future__ import annotations

import array
import asyncio
import logging
import os
import secrets
import socket
from collections import deque
from collections.abc import Callable
from typing import Protocol

import kvtier
from kvtier import wire
from kvtier.errors import ProtocolError, Refused, SpecError, bad_request
from kvtier.layout import CONTROLS
from kvtier_daemon.catalog import SessionId
from kvtier_daemon.config.members import Role
from kvtier_daemon.observing.audit import AuditLog
from kvtier_daemon.serving.context import Handler, Host
from kvtier_daemon.serving.orders import AUDITED, Orders
from kvtier_daemon.serving.peer import Mapper, Peer
from kvtier_daemon.serving.requests import ANSWERED, NEEDED, WITHOUT_TENANT, Requests, check_role
from kvtier_daemon.serving.sending import BLOCKED, FAILED, PAUSE_S, PAUSED, Outbox
from kvtier_daemon.serving.turns import Share, Turns
from kvtier_daemon.serving.writers import DEVICE_HOLD_S, Writers
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.base import Descriptors

log = logging.getLogger(__name__)

LIMIT_UNSENT_BYTES = 1 << 20  # of answers; above this, no requests are read
LIMIT_NAME = 64
TOKEN_BYTES = 16
LIMIT_DESCRIPTORS = 16  # that a client may send ahead
ANCILLARY_BYTES = socket.CMSG_SPACE(LIMIT_DESCRIPTORS * 4)
RECEIVE_FIRST_BYTES = 1 << 16  # received at once without reserved memory
HALF_S = 10.0  # how long a request may take to arrive
ERRORS_S = 10.0  # between two lines about errors of a user with the same code


class ClientErrors:
    """Logs errors that end sessions. Of each user and code one line in ERRORS_S is logged, so that no client
    can fill the log or drive other lines out of it; `Server.failures` counts all."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # When the last line was logged, and how many errors were not since.
        self._logged: dict[tuple[int, str], tuple[float, int]] = {}

    def log(self, client: str, uid: int, code: str, text: str) -> None:
        now = self._clock()
        at, silent = self._logged.get((uid, code), (-ERRORS_S, 0))
        if now < at + ERRORS_S:
            self._logged[uid, code] = at, silent + 1
            return
        self._logged[uid, code] = now, 0
        more = f"; {silent} others of uid {uid} were not logged" if silent else ""
        log.warning("client %r (uid %d): %s: %s%s", client, uid, code, text, more)


class Listener(Host, Protocol):
    """The parts of the server that sessions use."""

    turns: Turns
    writers: Writers
    run: bytes  # names this start of the daemon
    receive_buffer: memoryview
    receive_first: memoryview
    audit: AuditLog
    errors: ClientErrors
    sessions: set[Session]
    mapped: dict[str, set[Mapper]]
    ghosts: set[Session]  # ended, but their processes may still write to slots

    def share_of(self, tenant: Tenant | None) -> Share: ...
    def refusal(self, peer: Peer, resumes: bytes) -> str: ...
    def resume(self, session: Session, token: bytes) -> bool: ...
    def may_park(self, session: Session, descriptors: int) -> bool: ...
    def end_for_good(self, tenant: Tenant | None, token: bytes) -> None: ...


class Inbox:
    """The requests of one session that have arrived, whole or in part."""

    def __init__(self, server: Listener, sock: socket.socket, ready: Callable[[], None]) -> None:
        self._server = server
        self._sock = sock
        self._ready = ready
        self.is_reading = True
        self.framer = wire.Framer(wire.LIMIT_HELLO_BYTES)
        self.next: bytes | None = None  # a whole request for a later turn
        self.half_since = 0.0  # when the incomplete request began to arrive
        self.reserved = 0  # bytes of memory for the rest of it
        self.received = server.receive_first[:0]  # by the last call of `receive`
        self.is_starved = False  # there is no memory for the rest of it
        self.descriptors: deque[int] | None = None  # that arrived; None: they are not received
        server.loop.add_reader(sock.fileno(), ready)

    def accept_descriptors(self) -> None:
        """Receive descriptors from now on."""
        self.descriptors = deque()

    def take_descriptor(self) -> int | None:
        """The next descriptor that arrived; None: there is none. The caller closes it."""
        return self.descriptors.popleft() if self.descriptors else None

    def read(self, wanted: bool) -> None:
        """Start or stop reading from the socket."""
        if wanted != self.is_reading:
            self.is_reading = wanted
            if wanted:
                self._server.loop.add_reader(self._sock.fileno(), self._ready)
            else:
                self._server.loop.remove_reader(self._sock.fileno())

    def receive(self) -> int:
        """Receive some bytes: how many; 0 if the connection has ended, -1 if nothing is there. `framer` may
        then have a request, which may be a view of memory that the next call overwrites."""
        server = self._server
        # A session with reserved memory may receive much at once.
        buffer = server.receive_buffer if self.reserved else server.receive_first
        try:
            if self.descriptors is None:
                count = self._sock.recv_into(buffer)
            else:
                count = _receive_with(self._sock, buffer, self.descriptors)
        except (BlockingIOError, InterruptedError):
            return -1
        except OSError:
            return 0
        self.received = buffer[:count]
        return count

    def close_descriptors(self) -> None:
        """Close what arrived and was not taken."""
        while self.descriptors:
            os.close(self.descriptors.popleft())

    @property
    def needs_memory(self) -> bool:
        return not self.reserved and self.framer.missing_bytes > RECEIVE_FIRST_BYTES

    def reserve(self, share: Share) -> bool:
        """Reserve memory for the rest of a request if it is large; return whether it can be received."""
        if self.needs_memory:
            missing = self.framer.missing_bytes
            if not self._server.turns.may_receive(share, missing):
                return False
            self.reserved = missing
        if self.is_starved:
            self.is_starved, self.half_since = False, self._server.clock()
        return True

    def end_request(self, share: Share) -> None:
        """The request is complete, or never will be: free its memory."""
        reserved, self.reserved, self.half_since = self.reserved, 0, 0.0
        if reserved:
            self._server.turns.received(share, reserved)

    def is_overdue(self, now: float) -> bool:
        """Whether a request has been incomplete for too long."""
        return self.half_since > 0 and not self.is_starved and now - self.half_since > HALF_S


def _receive_with(sock: socket.socket, buffer: memoryview, descriptors: deque[int]) -> int:
    """Receive bytes, and the descriptors that come with them. Raises OSError if some were lost."""
    count, control, flags, _ = sock.recvmsg_into([buffer], ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds = array.array("i", data[: len(data) - len(data) % array.array("i").itemsize])
            descriptors.extend(fds)
    if flags & socket.MSG_CTRUNC or len(descriptors) > LIMIT_DESCRIPTORS:
        raise OSError("too many descriptors arrived")
    return count


class Quarantine:
    """The slots of an ended session that its process, or a device of it, may still write to."""

    def __init__(self, session: Session, server: Listener) -> None:
        self._session = session
        self._server = server
        self._freeing: asyncio.TimerHandle | None = None

    def free_later(self) -> None:
        """Free the slots when no copy of the ended process's device can be in progress."""
        if self._freeing is None:
            loop, pidfd = self._server.loop, self._session.peer.pidfd
            if pidfd >= 0:
                loop.remove_reader(pidfd)  # it stays readable
            self._freeing = loop.call_later(DEVICE_HOLD_S, self.free)

    def free(self) -> None:
        """Free the slots: nothing writes to them."""
        session = self._session
        if session in self._server.ghosts:
            assert session.tenant is not None
            self._server.ghosts.discard(session)
            self.abandon()
            session.tenant.catalog.process_gone(session.id)

    def abandon(self) -> None:
        """Stop waiting for the end of the process."""
        self._server.writers.ended(self._session.id)
        if self._freeing is not None:
            self._freeing.cancel()
        if self._session.peer.pidfd >= 0:
            self._server.loop.remove_reader(self._session.peer.pidfd)
        self._session.peer.close()


class Session:
    """Reads when the loop reports the socket, decides at once, and answers. It never waits."""

    def __init__(
        self, server: Listener, sock: socket.socket, peer: Peer, session_id: SessionId
    ) -> None:
        self._server = server
        self._sock = sock
        self.id = session_id
        self.peer = peer
        self.tenant = peer.tenant
        self.name = f"pid {peer.pid}"
        self.engine = f"session {session_id}"
        self.opened_at = server.clock()
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.greeted = False
        self.read_only = False  # by its own choice
        self.verifies = False
        self.device = False  # a device writes to the slots of this client
        self.quarantine = Quarantine(self, server)
        self._farewell = False  # the client has declared that it does not write
        self._closing = False
        self._share = server.share_of(peer.tenant)
        self._waits = False  # for its tenant's turn
        self._unanswered = False  # it waits until its tenant's clients receive answers
        self.inbox = Inbox(server, sock, self._ready)
        self.outbox = Outbox(sock, lambda count: server.may_park(self, count))
        self.alive_at = self.opened_at  # when the client last sent or received something
        self.requests = Requests(self, server)
        self.orders = Orders(server.audit, self)
        if peer.pidfd >= 0:
            server.loop.add_reader(peer.pidfd, self._process_gone)

    @property
    def writes(self) -> bool:
        """Whether this session may write to slots."""
        return not self.read_only and self.peer.role >= Role.WRITE

    # --- turns ---------------------------------------------------------------------------------

    def _ready(self) -> None:
        """The socket has data, or room for answers."""
        if self._share.used_s >= self._share.turn_s or self._share.waiting:
            self._wait_for_turn()
        elif not self._closing:
            self.turn()

    def _wait_for_turn(self) -> None:
        if not self._waits and not self._closing:
            self._waits = True
            self.inbox.read(False)
            self._server.loop.remove_writer(self._sock.fileno())
            self._server.turns.wait(self._share, self)

    def turn(self) -> None:
        """Send and receive what the socket allows, and answer requests, for one turn at most."""
        self._waits = False
        if self._closing:
            return
        began = self._server.clock()
        try:
            if self.outbox.unsent:
                self._flush()
                self.outbox.count(self._server.turns, self._share)
            if self.outbox.nbytes <= LIMIT_UNSENT_BYTES and not self._share.is_unread:
                self._work(began)
        except ProtocolError as error:
            self.fail(0, "bad_frame", str(error), fatal=True)
        if (settling := self._share.settling) is not None:
            settling.settle()
        now = self._server.clock()
        if not self._closing:
            self._go_on(now)
        self._server.turns.spend(self._share, now - began)

    def _work(self, began: float) -> None:
        """Answer requests until the turn ends or no request is complete."""
        inbox = self.inbox
        body: bytes | memoryview | None = inbox.next
        inbox.next = None
        if body is None and inbox.is_starved:
            body = inbox.framer.take()
        elif body is None:
            count = inbox.receive()
            if count == 0:
                self.end("hung up")
                return
            if count > 0:
                self.alive_at = began
                body = inbox.framer.push_and_take(inbox.received)
            else:
                body = inbox.framer.take()
        while body is not None and not self._closing:
            if inbox.half_since or inbox.reserved:
                inbox.end_request(self._share)
            if not self._served(wire.decode_request(body)):
                return
            body = following = inbox.framer.take()
            if following is not None and (
                self.outbox.nbytes > LIMIT_UNSENT_BYTES
                or self._server.clock() >= began + self._share.turn_s
            ):
                inbox.next = following
                return

    def _go_on(self, now: float) -> None:
        """Wait for what is next: room for answers, another turn, or more of a request."""
        inbox, outbox = self.inbox, self.outbox
        if outbox.nbytes != outbox.counted:
            outbox.count(self._server.turns, self._share)
        if outbox.nbytes > LIMIT_UNSENT_BYTES or self._share.is_unread:
            inbox.read(False)
            inbox.half_since = 0.0  # the client cannot send the rest now
            # It continues when its client, or its tenant's other clients, receive answers.
            if outbox.nbytes <= LIMIT_UNSENT_BYTES and not self._unanswered:
                self._unanswered = True
                self._share.unanswered.append(self)
        elif inbox.next is not None:
            self._wait_for_turn()
        elif not inbox.framer.held_bytes:
            if not inbox.is_reading:
                inbox.read(True)
        elif not inbox.is_starved:
            inbox.half_since = inbox.half_since or now
            if (inbox.needs_memory and self._share.room_for) or not self.receive_rest():
                inbox.is_starved = True
                inbox.read(False)
                self._share.room_for.append(self)

    def receive_rest(self) -> bool:
        """Receive the rest of a request if there is memory for it."""
        if self._closing:
            return True
        if not self.inbox.reserve(self._share):
            return False
        self.inbox.read(not self._waits)
        return True

    def answer_again(self) -> None:
        """Continue, because the tenant's clients have received answers."""
        self._unanswered = False
        self._wait_for_turn()

    # --- requests ------------------------------------------------------------------------------

    def _served(self, request: wire.Request) -> bool:
        try:
            handler = self.requests.handlers.get(type(request))
            if handler is not None:
                self._serve(request, handler)
                if self.requests.later:
                    self.requests.settle()
            elif isinstance(request, wire.Hello):
                _greet(self, self._server, request)
            else:
                assert isinstance(request, wire.Bye)
                self._farewell = True
                self.end("closed")
        except Exception:
            log.exception("client %r: internal error while serving a request", self.name)
            self.fail(0, "internal", "internal error in the daemon, see its log", fatal=True)
            return False
        return True

    def serve_later(self, request: wire.Request) -> None:
        """Answer a request whose answer was deferred."""
        if self._closing:
            return
        began = self._server.clock()
        self._served(request)
        if (settling := self._share.settling) is not None:
            settling.settle()
        self._server.turns.spend(self._share, self._server.clock() - began)

    def _serve(self, request: wire.Request, handler: Handler) -> None:
        if not self.greeted:
            self.fail(request.id, "bad_request", "the first message must be Hello", fatal=True)
            return
        tenant = self.tenant
        if tenant is not None and self.outbox.announced < len(tenant.extents):
            self.announce()
        if tenant is not None and self.requests.hot.gpu:
            self.requests.hot.announce(tenant)
        try:
            if tenant is not None:
                if tenant.catalog.blocks.expiring.times:
                    tenant.catalog.forget_expired(self._server.clock())
            elif type(request) not in WITHOUT_TENANT:
                raise Refused("no_tenant", f"no tenant is configured for uid {self.peer.uid}")
            if type(request) in AUDITED:
                self.orders.begin(request, tenant.name if tenant else "")
            if not request.id and type(request) in ANSWERED:
                raise bad_request("this request needs an id, as its answer must be read")
            needed = NEEDED.get(type(request))
            if needed is not None and (self.read_only or self.peer.role < needed):
                check_role(self.peer, self.read_only, needed)
            reply = handler(tenant, request)  # None: it is sent later
        except Refused as error:
            self.fail(request.id, error.code, error.message)
            return
        except SpecError as error:
            self.fail(request.id, "bad_spec", str(error))
            return
        if request.id and reply is not None:
            self.send(reply)
        elif type(request) in AUDITED:
            self.orders.served()

    # --- answers -------------------------------------------------------------------------------

    def announce(self) -> None:
        """Send the tenant's extents that the client does not have yet."""
        if self._closing or self.tenant is None:
            return
        waits = bool(self.outbox.unsent)
        if self.outbox.announces(self.tenant.extents) and not waits:
            self._flush()

    def send(self, message: wire.Message) -> None:
        """Send this after all earlier messages. The rest that the socket does not take now is sent later."""
        if self._closing:
            return
        if self.orders.begun and message.id in self.orders.begun:
            self.orders.answered(message)
        frame, outbox = wire.encode(message), self.outbox
        sent, waits = 0, bool(outbox.unsent)
        if not waits:
            try:
                sent = self._sock.send(frame)
            except OSError:
                sent = 0  # `_flush` sends again, and handles the error
            else:
                self.alive_at = self._server.clock()
                outbox.sent_bytes += sent
        if sent < len(frame):
            outbox.queue(memoryview(frame)[sent:])
            if not waits:
                self._flush()

    def send_with(self, message: wire.Message, of: Descriptors) -> None:
        if not self._closing:
            waits = bool(self.outbox.unsent)
            self.outbox.queue(memoryview(wire.encode(message)), of)
            if not waits:
                self._flush()

    def _flush(self) -> None:
        """Send what the socket takes now, and arrange that the rest is sent later."""
        loop, before = self._server.loop, self.outbox.sent_bytes
        result = self.outbox.flush(not self.writes)
        if self.outbox.sent_bytes != before:
            self.alive_at = self._server.clock()
        if result == FAILED:
            self.end("hung up")
        elif result == BLOCKED:
            loop.add_writer(self._sock.fileno(), self._ready)
        else:
            loop.remove_writer(self._sock.fileno())
            if result == PAUSED:  # no descriptors can be sent now
                loop.call_later(PAUSE_S, self._ready)

    def fail(self, request_id: int, code: str, text: str, fatal: bool = False) -> None:
        assert code in wire.CODES, code
        self._server.failures[code] += 1
        if self.tenant is not None and not self.peer.privileged:
            text = self.tenant.may_see(text)
        self.send(wire.Failed(request_id, code, text, fatal))
        if fatal:
            self._server.errors.log(self.name, self.peer.uid, code, text)
            self.end(code)

    # --- the end -------------------------------------------------------------------------------

    def end(self, why: str) -> None:
        """Close the connection, and free what this client held. Uncommitted slots are quarantined until its
        process ends, unless the client has declared that it does not write to them."""
        if self._closing:
            return
        self._closing = True
        self.orders.end()
        log.debug("client %r: %s", self.name, why)
        loop = self._server.loop
        loop.remove_reader(self._sock.fileno())
        loop.remove_writer(self._sock.fileno())
        self._sock.close()
        if self._unanswered:
            self._share.unanswered.remove(self)
        self.outbox.clear()
        self.outbox.count(self._server.turns, self._share)
        self.inbox.framer = wire.Framer()
        self.inbox.next = None
        self.inbox.end_request(self._share)
        self.inbox.close_descriptors()
        self.requests.hot.session_ended(why)
        self._server.sessions.discard(self)
        self._server.events.leave(self.id)
        if self.greeted:
            _tell_client(self, self._server, "went", why=why)
        if self.tenant is not None:
            try:
                self.requests.lookups.counted.end(self.tenant.catalog)
                self.requests.lookups.deferred.end()
                self.tenant.pending.session_ended(self.id)
                self.tenant.tier.direct.session_ended(self.id)
            except Exception:
                # Its leases must end.
                self._server.failures["internal"] += 1
                log.exception("client %r: internal error while cancelling its reads", self.name)
        gone = self.peer.gone
        free = self._farewell or (gone and not self.device)
        if self.tenant is not None and self.tenant.catalog.end_session(self.id, free):
            self._server.ghosts.add(self)
            if gone:
                self.quarantine.free_later()
        else:
            self.quarantine.abandon()

    def end_for_good(self) -> None:
        """The client declares in another session that no thread of it writes to slots of this one."""
        if self._closing:
            self.quarantine.free()
        else:
            self._farewell = True
            self.end("ended by its next connection")

    def _process_gone(self) -> None:
        """The client's process has ended, even if another process has its socket."""
        self.end("its process ended")
        if self.device and self in self._server.ghosts:
            self.quarantine.free_later()
        else:
            self.quarantine.free()


def _shown(name: str) -> str:
    """A client's name without characters that would control the terminal of an operator who is shown it."""
    return CONTROLS.sub("?", name[:LIMIT_NAME])


def _greet(session: Session, server: Listener, request: wire.Hello) -> None:
    """Accept the client, or end the session with the reason."""
    if session.greeted:
        session.fail(request.id, "bad_request", "Hello must be sent only once", fatal=True)
        return
    if request.schema != wire.SCHEMA:
        version = kvtier.__version__
        text = (
            f"the daemon is kvtier {version} and uses another schema: use the same "
            "version for the client"
        )
        session.fail(request.id, "wrong_schema", text, fatal=True)
        return
    session.name = _shown(request.client) or session.name
    session.engine = request.engine[:LIMIT_NAME] or session.engine
    for token in request.ended[: wire.LIMIT_ENDED]:
        server.end_for_good(session.tenant, token)
    # After that, because its earlier connections count against the limit.
    if refusal := server.refusal(session.peer, request.resumes):
        session.fail(request.id, "too_many", refusal, fatal=True)
        return
    session.greeted = True
    session.inbox.framer.limit = wire.LIMIT_FRAME_BYTES
    session.read_only, session.verifies = request.read_only, request.verify
    session.device = request.device
    if session.tenant is not None and session.writes:
        resumes = bool(request.resumes) and server.resume(session, request.resumes)
        if not resumes:
            server.writers.began(
                session.id, session.tenant, session.token, session.peer, session.device
            )
    if session.tenant is not None:
        server.mapped[session.tenant.name].add(session.peer.mapper)
    session.announce()
    _tell_client(session, server, "came")
    name = session.tenant.name if session.tenant else ""
    hot = name in server.hot.sizes and session.writes
    session.send(wire.Welcome(request.id, kvtier.__version__, name, session.token, server.run, hot))


def _tell_client(session: Session, server: Listener, what: str, **more: object) -> None:
    if server.events.on:
        tenant = session.tenant.name if session.tenant else ""
        server.events.tell(
            "client", tenant, what=what, client=session.name, pid=session.peer.pid,
            uid=session.peer.uid, **more,
        )  # fmt: skip
