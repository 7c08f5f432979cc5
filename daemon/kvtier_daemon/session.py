"""One client's connection: its requests in, its replies and descriptors out, and its end. What it is
answered is said in `answers`."""

from __future__ import annotations

import array
import errno
import fcntl
import logging
import os
import secrets
import socket
import struct
import termios
from collections import deque
from typing import TYPE_CHECKING

import kvtier
from kvtier import wire
from kvtier.catalog import SessionId
from kvtier.errors import ProtocolError, Refused, SpecError
from kvtier_daemon.answers import ANSWERS, WITHOUT_TENANT, Answers
from kvtier_daemon.observing.spans import Spans
from kvtier_daemon.peer import Peer
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.warm import Extent
from kvtier_daemon.turns import TURN_S

if TYPE_CHECKING:
    from kvtier_daemon.server import Server

log = logging.getLogger(__name__)

LIMIT_UNSENT_BYTES = 1 << 20  # of answers, beyond which no more requests are read
LIMIT_NAME = 64
TOKEN_BYTES = 16
RECEIVE_FIRST_BYTES = 1 << 16  # at once, while no memory is promised for more
HALF_S = 10.0  # how long a request may take to come
PARKED_PAUSE_S = 0.002
EXTENT_FDS = 2


class Session:
    """Reads when the loop says so, decides at once, answers. Nothing here waits."""

    def __init__(
        self, server: Server, sock: socket.socket, peer: Peer, session_id: SessionId
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
        self.read_only = False
        self._farewell = False
        self._closing = False
        self._reading = True
        self._share = server.share_of(peer.tenant)
        self._waits = False  # for its tenant's turn
        self._framer = wire.Framer(wire.LIMIT_HELLO_BYTES)
        self._next: bytes | None = None  # a request that has come
        self._half_since = 0.0  # when the unfinished request began to come
        self._promised = 0  # bytes of memory for the rest of it
        self._starved = False  # there is no memory for the rest of it
        self._unanswered = False  # until its tenant's clients take answers
        # An extent is queued as such: descriptors are made when they can go.
        self._unsent: deque[tuple[memoryview, Extent | None]] = deque()
        self._unsent_bytes = 0
        self._unsent_counted = 0  # by `turns`
        self._sent_bytes = 0
        self._announced = 0
        self._blocked = False
        self.parked = 0
        self._parked_at = 0  # of the bytes that were sent
        self.alive_at = self.opened_at  # when it last took or sent something, as far as can be seen
        self._answers = Answers(self, server)
        self._spans = Spans(server.latencies, server.clock)
        server.loop.add_reader(sock.fileno(), self._ready)
        if peer.pidfd >= 0:
            server.loop.add_reader(peer.pidfd, self._process_gone)

    # --- in ----------------------------------------------------------------------------------

    def _ready(self) -> None:
        """The socket has something to read, or room for answers."""
        if self._share.used_s >= TURN_S or self._share.waiting:
            self._wait_for_turn()
        else:
            self.turn()

    def _wait_for_turn(self) -> None:
        if not self._waits and not self._closing:
            self._waits = True
            self._read(False)
            self._server.loop.remove_writer(self._sock.fileno())
            self._server.turns.wait(self._share, self)

    def turn(self) -> None:
        """Send and receive what can be, serve what has come, for one turn and as long as answers are taken;
        and see to what is next."""
        self._waits = False
        if self._closing:
            return
        began = self._server.clock()
        try:
            if self._unsent:
                self._writable()
                self._count_unsent()
            if self._unsent_bytes <= LIMIT_UNSENT_BYTES and not self._share.is_unread:
                self._work(began)
        except ProtocolError as error:
            self.fail(0, "bad_frame", str(error), fatal=True)
        now = self._server.clock()
        if not self._closing:
            self._go_on(now)
        self._share.used_s += now - began
        if self._share.used_s >= TURN_S:
            self._server.turns.used_up(self._share)

    def _work(self, began: float) -> None:
        body: bytes | memoryview | None = self._next
        self._next = None
        if body is None:
            body = self._framer.take() if self._starved else self._receive(began)
        while body is not None and not self._closing:
            if self._half_since or self._promised:
                self._have_received()
            if not self._served(wire.decode_request(body)):
                return
            body = following = self._framer.take()
            if following is not None and (
                self._unsent_bytes > LIMIT_UNSENT_BYTES or self._server.clock() >= began + TURN_S
            ):
                self._next = following
                return

    def _receive(self, now: float) -> bytes | memoryview | None:
        """A request, if one is whole then; it may be a view of what the next call overwrites."""
        server = self._server
        # Who has memory promised for the rest of a request may send much at once.
        buffer = server.receive_buffer if self._promised else server.receive_first
        try:
            count = self._sock.recv_into(buffer)
        except (BlockingIOError, InterruptedError):
            return self._framer.take()
        except OSError:
            count = 0
        if count == 0:
            self.end("hung up")
            return None
        self.alive_at = now
        return self._framer.push_and_take(buffer[:count])

    def _go_on(self, now: float) -> None:
        """Wait for what is next: room for answers, another turn, or more of a request."""
        if self._unsent_bytes != self._unsent_counted:
            self._count_unsent()
        if self._unsent_bytes > LIMIT_UNSENT_BYTES or self._share.is_unread:
            self._read(False)
            self._half_since = 0.0  # that the rest of a request does not come is not its fault
            # It goes on when its own answers are taken, or those of its tenant's other clients.
            if self._unsent_bytes <= LIMIT_UNSENT_BYTES and not self._unanswered:
                self._unanswered = True
                self._share.unanswered.append(self)
        elif self._next is not None:
            self._wait_for_turn()
        elif not self._framer.held_bytes:
            if not self._reading:
                self._read(True)
        elif not self._starved:
            self._half_since = self._half_since or now
            if (self._needs_room and self._share.room_for) or not self.receive_rest():
                self._starved = True
                self._read(False)
                self._share.room_for.append(self)

    @property
    def _needs_room(self) -> bool:
        return not self._promised and self._framer.missing_bytes > RECEIVE_FIRST_BYTES

    def receive_rest(self) -> bool:
        """Receive the rest of a request if there is memory for it."""
        if self._closing:
            return True
        if self._needs_room:
            missing = self._framer.missing_bytes
            if not self._server.turns.may_receive(self._share, missing):
                return False
            self._promised = missing
        if self._starved:
            self._starved, self._half_since = False, self._server.clock()
        self._read(not self._waits)
        return True

    def _have_received(self) -> None:
        """What was promised for a request is free again."""
        promised, self._promised, self._half_since = self._promised, 0, 0.0
        if promised:
            self._server.turns.received(self._share, promised)

    def sends_half(self, now: float) -> bool:
        """Whether it has left a request unfinished for too long."""
        return self._half_since > 0 and not self._starved and now - self._half_since > HALF_S

    def answer_again(self) -> None:
        """Its tenant's clients have taken answers."""
        self._unanswered = False
        self._wait_for_turn()

    def _count_unsent(self) -> None:
        more, self._unsent_counted = self._unsent_bytes - self._unsent_counted, self._unsent_bytes
        self._server.turns.unsent(self._share, more)

    def _served(self, request: wire.Request) -> bool:
        try:
            self._serve(request)
        except Exception:
            log.exception("client %r: a request could not be served", self.name)
            self.fail(0, "internal", "the daemon failed; its log says how", fatal=True)
            return False
        return True

    def serve_later(self, request: wire.Request) -> None:
        """Answer now what was not answered when it came."""
        if self._closing:
            return
        began = self._server.clock()
        self._served(request)
        self._share.used_s += self._server.clock() - began
        self._server.turns.used_up(self._share)

    def _read(self, wanted: bool) -> None:
        if self._closing or wanted == self._reading:
            return
        self._reading = wanted
        if wanted:
            self._server.loop.add_reader(self._sock.fileno(), self._ready)
        else:
            self._server.loop.remove_reader(self._sock.fileno())

    def _serve(self, request: wire.Request) -> None:
        if type(request) not in ANSWERS:
            self._hello_or_bye(request)
            return
        if not self.greeted:
            self.fail(request.id, "bad_request", "Hello comes first", fatal=True)
            return
        self._announce()
        try:
            reply = self._answers.to(self._tenant_for(request), request)
        except Refused as error:
            self.fail(request.id, error.code, error.message)
            return
        except SpecError as error:
            self.fail(request.id, "bad_spec", str(error))
            return
        self._spans.answered(request, reply)
        if request.id and reply is not None:
            self.send(reply)
        if self.tenant is not None and self.tenant.uses is not None:
            self.tenant.uses.settle()  # the answer is on its way

    def _hello_or_bye(self, request: wire.Request) -> None:
        if isinstance(request, wire.Bye):
            self._farewell = True
            self.end("closed")
            return
        assert isinstance(request, wire.Hello)
        if self.greeted:
            self.fail(request.id, "bad_request", "Hello comes once", fatal=True)
        elif request.schema != wire.SCHEMA:
            version = kvtier.__version__
            text = f"the daemon is kvtier {version} and speaks another schema: use that version"
            self.fail(request.id, "wrong_schema", text, fatal=True)
        else:
            self.name = request.client[:LIMIT_NAME] or self.name
            self.engine = request.engine[:LIMIT_NAME] or self.engine
            for token in request.ended[: wire.LIMIT_ENDED]:
                self._server.forsworn(self.tenant, token)
            # Not before: what it has forsworn may have been in its own way.
            if refusal := self._server.refusal(self.peer):
                self.fail(request.id, "too_many", refusal, fatal=True)
                return
            self.greeted = True
            self._framer.limit = wire.LIMIT_FRAME_BYTES
            self.read_only = request.read_only
            self._announce()
            name = self.tenant.name if self.tenant else ""
            self._tell_client("came")
            welcome = wire.Welcome(
                request.id, kvtier.__version__, name, self.token, self._server.run
            )
            self.send(welcome)

    def _tenant_for(self, request: wire.Request) -> Tenant | None:
        if self.tenant is None and type(request) not in WITHOUT_TENANT:
            raise Refused("no_tenant", f"no tenant is configured for uid {self.peer.uid}")
        return self.tenant

    # --- out ---------------------------------------------------------------------------------

    def _announce(self) -> None:
        """Hand over the tenant's extents that this client has not got yet: before an answer, since who asks
        nothing reads nothing."""
        extents = self.tenant.extents if self.tenant else []
        for index in range(self._announced, len(extents)):
            added = wire.ExtentAdded(0, index, extents[index].nbytes)
            self._queue(wire.encode(added), extents[index])
        self._announced = len(extents)

    def send(self, message: wire.Message) -> None:
        self._queue(wire.encode(message))

    def fail(self, request_id: int, code: str, text: str, fatal: bool = False) -> None:
        assert code in wire.CODES, code
        self._server.failures[code] += 1
        self.send(wire.Failed(request_id, code, text, fatal))
        if fatal:
            log.warning("client %r (uid %d): %s: %s", self.name, self.peer.uid, code, text)
            self.end(code)

    def _queue(self, frame: bytes, extent: Extent | None = None) -> None:
        if self._closing:
            return
        self._unsent.append((memoryview(frame), extent))
        self._unsent_bytes += len(frame)
        if len(self._unsent) == 1:
            self._writable()

    def _writable(self) -> None:
        """Send what can be sent now; ask the loop to say when the rest can."""
        while self._unsent:
            data, extent = self._unsent[0]
            if extent and not self._server.may_park(self, EXTENT_FDS):
                self._pause()
                return
            try:
                sent = (
                    self._send_with_descriptors(data, extent) if extent else self._sock.send(data)
                )
            except OSError as error:
                self._stopped(error)
                return
            self.alive_at = self._server.clock()
            self._blocked = False
            self._sent_bytes += sent
            self._unsent_bytes -= sent
            if extent is not None:
                self.parked += EXTENT_FDS
                self._parked_at = self._sent_bytes
            if sent < len(data):
                self._unsent[0] = (data[sent:], None)
            else:
                self._unsent.popleft()
        self._server.loop.remove_writer(self._sock.fileno())

    def _stopped(self, error: OSError) -> None:
        """What stands in the way of sending more now."""
        if isinstance(error, (BlockingIOError, InterruptedError)):
            self._blocked = True
            self._server.loop.add_writer(self._sock.fileno(), self._ready)
        elif error.errno in (errno.ETOOMANYREFS, errno.EMFILE, errno.ENFILE):
            self._pause()
        else:
            self.end("hung up")

    def _send_with_descriptors(self, data: memoryview, extent: Extent) -> int:
        fds = extent.handles(self.read_only)
        try:
            control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("2i", *fds))]
            return self._sock.sendmsg([data], control)
        finally:
            for fd in fds:
                os.close(fd)

    def _pause(self) -> None:
        """No descriptors can go now: try again soon."""
        self._server.loop.remove_writer(self._sock.fileno())
        self._server.loop.call_later(PARKED_PAUSE_S, self._try_again)

    def _try_again(self) -> None:
        if not self._closing:
            self._ready()

    def memory_grew(self) -> None:
        """Tell a client that waits for it that its tenant has more extents, or has all that it gets."""
        if self.tenant is not None and self._answers.waits_for_memory:
            self._announce()
            self._answers.memory_grew(self.tenant)

    @property
    def in_use(self) -> bool:
        """Whether this is an engine's: somebody who only asks how things are has no space open."""
        return bool(self._answers.spaces)

    @property
    def owed(self) -> tuple[int, int]:
        """How many of its lookups wait for blocks on disk, and for how many tokens."""
        return self._answers.waiting, self._answers.owed_tokens

    @property
    def open_spaces(self) -> int:
        return len(self._answers.spaces)

    @property
    def waits_for_its_client(self) -> bool:
        """Whether something was sent that the client has yet to take."""
        return self._blocked or self.parked > 0

    def unpark(self) -> None:
        """See whether the client has taken the descriptors that were sent to it."""
        waiting = array.array("i", [0])
        try:
            fcntl.ioctl(self._sock.fileno(), termios.TIOCOUTQ, waiting)
        except OSError:
            return
        # What the kernel counts is at least what was not read: if that is no more than what was sent after
        # the descriptors, they have been read.
        if waiting[0] <= self._sent_bytes - self._parked_at:
            self.parked = 0

    # --- the end -----------------------------------------------------------------------------

    def end(self, why: str) -> None:
        """Hang up; free what this client held. Its unfinished slots wait until its process is gone, unless
        it said that it touches them no more."""
        if self._closing:
            return
        self._closing = True
        log.debug("client %r: %s", self.name, why)
        loop = self._server.loop
        loop.remove_reader(self._sock.fileno())
        loop.remove_writer(self._sock.fileno())
        self._sock.close()
        if self._unanswered:
            self._share.unanswered.remove(self)
        self._unsent.clear()
        self._unsent_bytes = 0
        self._count_unsent()
        self._framer = wire.Framer()
        self._next = None
        self._have_received()
        self.parked = 0
        self._server.sessions.discard(self)
        self._server.events.leave(self.id)
        if self.greeted:
            self._tell_client("went", why=why)
        if self.tenant is not None and self.tenant.mover is not None:
            try:
                self.tenant.mover.session_over(self.id)
            except Exception:
                # Its leases end all the same.
                self._server.failures["internal"] += 1
                log.exception("client %r: its reads could not be given back", self.name)
        gone = self._farewell or self.peer.gone
        if self.tenant is not None and self.tenant.catalog.end_session(self.id, gone):
            self._server.ghosts.add(self)
        else:
            self.abandon()

    def _tell_client(self, what: str, **more: object) -> None:
        if self._server.events.on:
            tenant = self.tenant.name if self.tenant else ""
            self._server.events.tell(
                "client", tenant, what=what, client=self.name, pid=self.peer.pid,
                uid=self.peer.uid, **more,
            )  # fmt: skip

    def forswear(self) -> None:
        """The client says, in another session, that nothing of this one touches a slot any more."""
        if self._closing:
            self._process_gone()
        else:
            self._farewell = True
            self.end("forsworn")

    def _process_gone(self) -> None:
        """The client's process is no more, whoever else may still have its socket."""
        self.end("its process ended")
        if self in self._server.ghosts:
            assert self.tenant is not None
            self._server.ghosts.discard(self)
            self.abandon()
            self.tenant.catalog.process_gone(self.id)

    def abandon(self) -> None:
        """Wait for the process no longer."""
        if self.peer.pidfd >= 0:
            self._server.loop.remove_reader(self.peer.pidfd)
        self.peer.close()
