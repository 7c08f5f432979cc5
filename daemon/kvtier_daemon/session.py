"""One client's connection: its requests in, its replies and descriptors out, and its end."""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import kvtier
from kvtier import wire
from kvtier.catalog import Found, LeaseId, SessionId
from kvtier.errors import ProtocolError, Refused, SpecError
from kvtier.layout import LIMIT_SHARDS
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.warm import Extent

if TYPE_CHECKING:
    from kvtier_daemon.server import Server

log = logging.getLogger(__name__)

SO_PEERPIDFD = 77  # Linux 6.5; not yet a name in the socket module
LIMIT_UNSENT_BYTES = 16 << 20
LIMIT_NAME = 64
LIMIT_SESSION_SPACES = 256
LIMIT_ENDED = 64
TOKEN_BYTES = 16


class Session:
    """Reads when the loop says so, decides at once, answers. Nothing here waits."""

    def __init__(self, server: Server, sock: socket.socket, session_id: SessionId) -> None:
        self._server = server
        self._sock = sock
        self.id = session_id
        pid, self.uid, _ = struct.unpack(
            "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        )
        self.pid = pid
        self.name = f"pid {pid}"
        self._pidfd = _peer_pidfd(sock, pid)
        self.tenant: Tenant | None = None
        self.opened_at = server.clock()
        self._read_only = False
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._greeted = False
        self._farewell = False
        self._closing = False
        self._framer = wire.Framer()
        self._unsent: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._unsent_bytes = 0
        self._announced = 0
        self._spaces: set[int] = set()
        self._counted: tuple[int, bytes] = (-1, b"")
        server.loop.add_reader(sock.fileno(), self._readable)

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
        try:
            for body in self._framer.feed(buffer[:count]):
                self._serve(wire.decode_request(body))
                if self._closing:
                    return
        except ProtocolError as error:
            self._fail(0, "bad_frame", str(error), fatal=True)

    def _serve(self, request: wire.Request) -> None:
        answer = ANSWERS.get(type(request))
        if answer is None:
            self._hello_or_bye(request)
            return
        if not self._greeted:
            self._fail(request.id, "bad_request", "Hello comes first", fatal=True)
            return
        try:
            reply = answer(self, self._tenant_for(request), request)
        except Refused as error:
            self._fail(request.id, error.code, error.message)
            return
        except SpecError as error:
            self._fail(request.id, "bad_spec", str(error))
            return
        if request.id:
            self.send(reply)

    def _hello_or_bye(self, request: wire.Request) -> None:
        if isinstance(request, wire.Bye):
            self._farewell = True
            self.end("closed")
            return
        assert isinstance(request, wire.Hello)
        if self._greeted:
            self._fail(request.id, "bad_request", "Hello comes once", fatal=True)
        elif request.schema != wire.SCHEMA:
            text = f"the daemon is kvtier {kvtier.__version__} and speaks another schema: use that version"
            self._fail(request.id, "wrong_schema", text, fatal=True)
        else:
            tenant = self._server.tenant_of(self.uid)
            if tenant is None and not self.privileged:
                text = f"no tenant is configured for uid {self.uid}"
                self._fail(request.id, "no_tenant", text, fatal=True)
                return
            self._greeted = True
            self.tenant = tenant
            self.name = request.client[:LIMIT_NAME] or self.name
            self._read_only = request.read_only
            for token in request.ended[:LIMIT_ENDED]:
                self._server.forsworn(tenant, token)
            self.announce()
            name = tenant.name if tenant else ""
            self.send(wire.Welcome(request.id, kvtier.__version__, name, self.token))

    @property
    def privileged(self) -> bool:
        """Root and the daemon's own user may ask how it is, tenant or not, and about every tenant."""
        return self.uid in (0, os.getuid())

    @property
    def greeted(self) -> bool:
        return self._greeted

    def _tenant_for(self, request: wire.Request) -> Tenant | None:
        if self.tenant is None and type(request) not in WITHOUT_TENANT:
            raise Refused("no_tenant", f"no tenant is configured for uid {self.uid}")
        return self.tenant

    # --- answers -----------------------------------------------------------------------------

    def _open(self, tenant: Tenant, request: wire.Open) -> wire.Reply:
        if len(self._spaces) >= LIMIT_SESSION_SPACES:
            raise Refused("too_many", f"this session has {LIMIT_SESSION_SPACES} spaces already")
        spec = request.spec.checked()
        identity = tenant.identity_of(spec)
        space = tenant.catalog.open(identity, spec)
        self._spaces.add(space.index)
        return wire.Opened(request.id, space.index, identity, tenant.secret_of(identity))

    def _match(self, tenant: Tenant, request: wire.Match | wire.Prefetch) -> wire.Reply:
        space = tenant.catalog.space(request.space)
        count = isinstance(request, wire.Match)
        found = tenant.catalog.match(space, request.keys, count)
        if count:
            self._counted = (request.space, request.keys)
        return wire.Matched(request.id, found.ready, found.coming, 0.0)

    def _load(self, tenant: Tenant, request: wire.Load) -> wire.Reply:
        space = tenant.catalog.space(request.space)
        _check_shards(request.shards)
        if request.deadline_ms < 1:
            raise Refused("bad_request", f"a deadline of {request.deadline_ms} ms")
        # A load right after a match of the same keys is the same lookup, counted once.
        count = self._counted != (request.space, request.keys)
        self._counted = (-1, b"")
        found = tenant.catalog.load(
            self.id, space, request.keys, request.deadline_ms / 1000, request.shards,
            self._server.clock(), count,
        )  # fmt: skip
        return _loaded(request.id, found)

    def _adopt(self, tenant: Tenant, request: wire.Adopt) -> wire.Reply:
        _check_shards(request.shards)
        return _loaded(request.id, tenant.catalog.adopt(self.id, request.token, request.shards))

    def _release(self, tenant: Tenant, request: wire.Release) -> wire.Reply:
        tenant.catalog.release(self.id, LeaseId(request.lease))
        return wire.Done(request.id)

    def _reserve(self, tenant: Tenant, request: wire.Reserve) -> wire.Reply:
        if self._read_only:
            raise Refused("read_only", "this session said that it only reads")
        if not request.id:
            raise Refused("bad_request", "a reserve whose answer nobody reads")
        space = tenant.catalog.space(request.space)
        granted = tenant.catalog.reserve(
            self.id, space, request.group, request.shard, request.parent, request.keys
        )
        return wire.Reserved(request.id, granted.lease, granted.outcomes, granted.slots)

    def _commit(self, tenant: Tenant, request: wire.Commit) -> wire.Reply:
        tenant.catalog.commit(
            self.id, LeaseId(request.lease), request.first, request.count, request.checksums
        )
        return wire.Done(request.id)

    def _abort(self, tenant: Tenant, request: wire.Abort) -> wire.Reply:
        tenant.catalog.abort(self.id, LeaseId(request.lease))
        return wire.Done(request.id)

    def _pin(self, tenant: Tenant, request: wire.Pin) -> wire.Reply:
        space = tenant.catalog.space(request.space)
        if request.ttl_ms < 1:
            raise Refused("bad_request", f"a pin for {request.ttl_ms} ms")
        now = self._server.clock()
        blocks = tenant.catalog.pin(space, request.keys, request.ttl_ms / 1000, now)
        return wire.Counted(request.id, blocks)

    def _hint(self, tenant: Tenant, request: wire.Hint) -> wire.Reply:
        space = tenant.catalog.space(request.space)
        if not 0.0 <= request.importance <= 1.0:
            raise Refused("bad_request", f"an importance of {request.importance}: 0 to 1")
        blocks = tenant.catalog.hint(space, request.keys, request.importance)
        return wire.Counted(request.id, blocks)

    def _forget(self, tenant: Tenant, request: wire.Forget) -> wire.Reply:
        if self._read_only:
            raise Refused("read_only", "this session said that it only reads")
        space = tenant.catalog.space(request.space)
        return wire.Counted(request.id, tenant.catalog.forget(space, request.keys))

    def _stats(self, tenant: Tenant | None, request: wire.Stats) -> wire.Reply:
        return wire.Report(request.id, self._server.stats(None if self.privileged else tenant))

    def _ping(self, tenant: Tenant | None, request: wire.Ping) -> wire.Reply:
        return wire.Done(request.id)

    # --- out ---------------------------------------------------------------------------------

    def announce(self) -> None:
        """Hand over the tenant's extents that this client has not got yet."""
        if self.tenant is None:
            return
        for index in range(self._announced, len(self.tenant.extents)):
            extent: Extent = self.tenant.extents[index]
            # The queue owns its descriptors: one that waits must outlive what it was copied from.
            fd = extent.read_only_fd() if self._read_only else os.dup(extent.fd)
            fds = (fd, os.dup(extent.table_fd))
            self._queue(wire.encode(wire.ExtentAdded(0, index, extent.nbytes)), fds)
        self._announced = len(self.tenant.extents)

    def send(self, message: wire.Message) -> None:
        self._queue(wire.encode(message), ())

    def _fail(self, request_id: int, code: str, text: str, fatal: bool = False) -> None:
        assert code in wire.CODES, code
        self._server.failures[code] += 1
        self.send(wire.Failed(request_id, code, text, fatal))
        if fatal:
            log.warning("client %s (uid %d): %s: %s", self.name, self.uid, code, text)
            self.end(code)

    def _queue(self, frame: bytes, fds: tuple[int, ...]) -> None:
        if self._closing:
            for fd in fds:
                os.close(fd)
            return
        self._unsent.append((memoryview(frame), fds))
        self._unsent_bytes += len(frame)
        if len(self._unsent) == 1:
            self._writable()
        if self._unsent_bytes > LIMIT_UNSENT_BYTES and not self._closing:
            self.end(f"{self._unsent_bytes} bytes of answers were not read")

    def _writable(self) -> None:
        """Send what can be sent now; ask the loop to say when the rest can."""
        while self._unsent:
            data, fds = self._unsent[0]
            control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))]
            try:
                sent = self._sock.sendmsg([data], control if fds else [])
            except (BlockingIOError, InterruptedError):
                self._server.loop.add_writer(self._sock.fileno(), self._writable)
                return
            except OSError:
                self.end("hung up")
                return
            for fd in fds:
                os.close(fd)
            self._unsent_bytes -= sent
            if sent < len(data):
                self._unsent[0] = (data[sent:], ())
            else:
                self._unsent.popleft()
        self._server.loop.remove_writer(self._sock.fileno())

    # --- the end -----------------------------------------------------------------------------

    def end(self, why: str) -> None:
        """Hang up; free what this client held. Its unfinished slots wait until its process is gone, unless
        it said that it touches them no more."""
        if self._closing:
            return
        self._closing = True
        log.debug("client %s: %s", self.name, why)
        loop = self._server.loop
        loop.remove_reader(self._sock.fileno())
        loop.remove_writer(self._sock.fileno())
        self._sock.close()
        for _, fds in self._unsent:
            for fd in fds:
                os.close(fd)
        self._unsent.clear()
        self._server.sessions.discard(self)
        gone = self._farewell or _is_gone(self._pidfd)
        if self.tenant is not None and self.tenant.catalog.end_session(self.id, gone):
            self._server.ghosts.add(self)
            loop.add_reader(self._pidfd, self._process_gone)
        else:
            self._close_pidfd()

    def forswear(self) -> None:
        """The client says, in another session, that nothing of this one touches a slot any more."""
        if self._closing:
            self._process_gone()
        else:
            self._farewell = True
            self.end("forsworn")

    def _process_gone(self) -> None:
        assert self.tenant is not None
        self._server.loop.remove_reader(self._pidfd)
        self._server.ghosts.discard(self)
        self._close_pidfd()
        self.tenant.catalog.process_gone(self.id)

    def abandon(self) -> None:
        """Stop waiting for the process: the daemon ends and its arena with it."""
        self._server.loop.remove_reader(self._pidfd)
        self._close_pidfd()

    def _close_pidfd(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


Answer = Callable[[Session, Any, Any], wire.Reply]
WITHOUT_TENANT = (wire.Stats, wire.Ping)
ANSWERS: dict[type[wire.Message], Answer] = {
    wire.Open: Session._open,
    wire.Match: Session._match,
    wire.Load: Session._load,
    wire.Adopt: Session._adopt,
    wire.Release: Session._release,
    wire.Reserve: Session._reserve,
    wire.Commit: Session._commit,
    wire.Abort: Session._abort,
    wire.Prefetch: Session._match,
    wire.Pin: Session._pin,
    wire.Hint: Session._hint,
    wire.Forget: Session._forget,
    wire.Stats: Session._stats,
    wire.Ping: Session._ping,
}


def _loaded(request_id: int, found: Found) -> wire.Loaded:
    return wire.Loaded(
        request_id, found.ready, found.coming, 0.0, found.lease, found.token, list(found.parts)
    )


def _check_shards(shards: list[int]) -> None:
    if len(shards) > LIMIT_SHARDS:
        raise Refused("bad_request", f"{len(shards)} shards asked for")


def _peer_pidfd(sock: socket.socket, pid: int) -> int:
    """A descriptor that becomes readable when the peer's process ends; -1 if it has ended already."""
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, struct.calcsize("i"))
        return cast(int, struct.unpack("i", raw)[0])
    except OSError:
        pass  # a kernel before 6.5, or a peer that is no more: the next line tells which
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def _is_gone(pidfd: int) -> bool:
    if pidfd < 0:
        return True
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
