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

if TYPE_CHECKING:
    from kvtier_daemon.server import Server

log = logging.getLogger(__name__)

LIMIT_UNSENT_BYTES = 1 << 20  # of answers, beyond which no more requests are read
LIMIT_NAME = 64
TOKEN_BYTES = 16
TURN_S = 0.001  # how long one client is served before the others have their turn
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
        self._scheduled = False
        self._framer = wire.Framer()
        self._inbox: deque[bytes] = deque()
        # An extent is queued as such: descriptors are made when they can go.
        self._unsent: deque[tuple[memoryview, Extent | None]] = deque()
        self._unsent_bytes = 0
        self._sent_bytes = 0
        self._announced = 0
        self._blocked = False
        self.parked = 0
        self._parked_at = 0  # of the bytes that were sent
        self.alive_at = self.opened_at  # when it last took or sent something, as far as can be seen
        self._answers = Answers(self, server)
        self._spans = Spans(server.latencies, server.clock)
        server.loop.add_reader(sock.fileno(), self._readable)
        if peer.pidfd >= 0:
            server.loop.add_reader(peer.pidfd, self._process_gone)

    # --- in ----------------------------------------------------------------------------------

    def _readable(self) -> None:
        buffer = self._server.receive_buffer
        try:
            count = self._sock.recv_into(buffer)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            count = 0
        if count == 0:
            self.end("hung up")
            return
        self.alive_at = self._server.clock()
        try:
            self._inbox.extend(self._framer.feed(buffer[:count]))
        except ProtocolError as error:
            self._work()
            self.fail(0, "bad_frame", str(error), fatal=True)
            return
        self._work()

    def _work(self) -> None:
        """Serve what has come, for one turn and as long as answers are taken; reads no more while something
        is left."""
        until = self._server.clock() + TURN_S
        while self._inbox and not self._closing and self._unsent_bytes <= LIMIT_UNSENT_BYTES:
            try:
                request = wire.decode_request(self._inbox.popleft())
            except ProtocolError as error:
                self.fail(0, "bad_frame", str(error), fatal=True)
                return
            if not self._served(request):
                return
            if self._inbox and self._server.clock() >= until:
                self._schedule()
                break
        self._read(not self._inbox and self._unsent_bytes <= LIMIT_UNSENT_BYTES)

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
        if not self._closing:
            self._served(request)

    def _read(self, wanted: bool) -> None:
        if self._closing or wanted == self._reading:
            return
        self._reading = wanted
        if wanted:
            self._server.loop.add_reader(self._sock.fileno(), self._readable)
        else:
            self._server.loop.remove_reader(self._sock.fileno())

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._server.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._scheduled = False
        if not self._closing:
            self._work()

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
            if not self._reading and self._unsent_bytes <= LIMIT_UNSENT_BYTES:
                self._schedule()
        self._server.loop.remove_writer(self._sock.fileno())

    def _stopped(self, error: OSError) -> None:
        """What stands in the way of sending more now."""
        if isinstance(error, (BlockingIOError, InterruptedError)):
            self._blocked = True
            self._server.loop.add_writer(self._sock.fileno(), self._writable)
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
            self._writable()

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
        self._unsent.clear()
        self._inbox.clear()
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
