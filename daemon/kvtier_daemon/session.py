"""One client's connection: its requests in, its replies and descriptors out, and its end."""

from __future__ import annotations

import array
import errno
import fcntl
import logging
import math
import os
import secrets
import socket
import struct
import termios
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

import kvtier
from kvtier import wire
from kvtier.catalog import Found, LeaseId, SessionId, Space, Watch
from kvtier.errors import ProtocolError, Refused, SpecError
from kvtier.key import KEY_BYTES
from kvtier.layout import LIMIT_SHARDS
from kvtier.planning import COMPUTE, PATIENCE_S
from kvtier_daemon.explaining import explain
from kvtier_daemon.peer import Peer
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.warm import Extent

if TYPE_CHECKING:
    from kvtier_daemon.server import Server

log = logging.getLogger(__name__)

LIMIT_UNSENT_BYTES = 1 << 20  # of answers, beyond which no more requests are read
LIMIT_NAME = 64
Lookup = tuple[int, int, bytes]
NO_LOOKUP: Lookup = (-1, 0, b"")
LIMIT_SESSION_SPACES = 256
LIMIT_SESSION_WATCHES = 4
LIMIT_WAITING = 4096
LONGEST_WAIT_S = 60.0
TOKEN_BYTES = 16
TURN_S = 0.001  # how long one client is served before the others have their turn
PARKED_PAUSE_S = 0.002
WATCH_S = 0.01
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
        self.opened_at = server.clock()
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.greeted = False
        self._read_only = False
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
        self._spaces: set[bytes] = set()
        self._watched: set[int] = set()
        self._watching: dict[int, int] = {}  # of spaces, the request that is to be answered
        self._waiting: dict[
            LeaseId, int
        ] = {}  # the requests that wait for more than their leases have
        self._counted: Lookup = NO_LOOKUP
        self._coming: Lookup = NO_LOOKUP  # the last one, if something of it was on its way
        self._promised: tuple[Lookup, int, int] = (
            NO_LOOKUP,
            0,
            0,
        )  # blocks there, and of those coming
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
            self._fail(0, "bad_frame", str(error), fatal=True)
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
                self._fail(0, "bad_frame", str(error), fatal=True)
                return
            try:
                self._serve(request)
            except Exception:
                log.exception("client %r: a request could not be served", self.name)
                self._fail(0, "internal", "the daemon failed; its log says how", fatal=True)
                return
            if self._inbox and self._server.clock() >= until:
                self._schedule()
                break
        self._read(not self._inbox and self._unsent_bytes <= LIMIT_UNSENT_BYTES)

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
        answer = ANSWERS.get(type(request))
        if answer is None:
            self._hello_or_bye(request)
            return
        if not self.greeted:
            self._fail(request.id, "bad_request", "Hello comes first", fatal=True)
            return
        self._announce()
        try:
            reply = answer(self, self._tenant_for(request), request)
        except Refused as error:
            self._fail(request.id, error.code, error.message)
            return
        except SpecError as error:
            self._fail(request.id, "bad_spec", str(error))
            return
        if request.id and reply is not None:
            self.send(reply)

    def _hello_or_bye(self, request: wire.Request) -> None:
        if isinstance(request, wire.Bye):
            self._farewell = True
            self.end("closed")
            return
        assert isinstance(request, wire.Hello)
        if self.greeted:
            self._fail(request.id, "bad_request", "Hello comes once", fatal=True)
        elif request.schema != wire.SCHEMA:
            version = kvtier.__version__
            text = f"the daemon is kvtier {version} and speaks another schema: use that version"
            self._fail(request.id, "wrong_schema", text, fatal=True)
        else:
            self.name = request.client[:LIMIT_NAME] or self.name
            for token in request.ended[: wire.LIMIT_ENDED]:
                self._server.forsworn(self.tenant, token)
            # Not before: what it has forsworn may have been in its own way.
            if refusal := self._server.refusal(self.peer):
                self._fail(request.id, "too_many", refusal, fatal=True)
                return
            self.greeted = True
            self._read_only = request.read_only
            self._announce()
            name = self.tenant.name if self.tenant else ""
            welcome = wire.Welcome(
                request.id, kvtier.__version__, name, self.token, self._server.run
            )
            self.send(welcome)

    def _tenant_for(self, request: wire.Request) -> Tenant | None:
        if self.tenant is None and type(request) not in WITHOUT_TENANT:
            raise Refused("no_tenant", f"no tenant is configured for uid {self.peer.uid}")
        return self.tenant

    # --- answers -----------------------------------------------------------------------------

    def _open(self, tenant: Tenant, request: wire.Open) -> wire.Reply:
        spec = request.spec.checked()
        identity = tenant.identity_of(spec)
        if identity not in self._spaces and len(self._spaces) >= LIMIT_SESSION_SPACES:
            raise Refused("too_many", f"this session has {LIMIT_SESSION_SPACES} spaces already")
        space = tenant.catalog.open(identity, spec, self.id)
        self._spaces.add(identity)
        return wire.Opened(request.id, space.number, identity, tenant.secret_of(identity))

    def _match(self, tenant: Tenant, request: wire.Match | wire.Prefetch) -> wire.Reply:
        space = tenant.catalog.space(request.space)
        # Who asks again how far it is asks nothing new.
        lookup = _lookup(request)
        asks = isinstance(request, wire.Match)
        count = asks and self._coming != lookup
        found = tenant.catalog.match(space, request.keys, count, tenant.brings)
        if count:
            self._counted = lookup
            self._record(tenant, space, request.keys)
        coming, eta_ms, why = self._bring(tenant, space, request, found)
        if asks:
            self._coming = lookup if coming else NO_LOOKUP
            self._promise(tenant, space, request.keys, lookup, found, count, why)
        return wire.Matched(request.id, found.ready, coming, eta_ms, why)

    def _load(self, tenant: Tenant, request: wire.Load) -> wire.Reply:
        space = tenant.catalog.space(request.space)
        _check_shards(request.shards)
        _check_answered(request)
        if request.deadline_ms < 1:
            raise Refused("bad_request", f"a deadline of {request.deadline_ms} ms")
        # A load right after a match of the same keys is the same lookup, counted once.
        count = self._counted != _lookup(request)
        self._counted = NO_LOOKUP
        if count:
            self._record(tenant, space, request.keys)
        found = tenant.catalog.load(
            self.id, space, request.keys, request.deadline_ms / 1000, request.shards,
            self._server.clock(), count, tenant.brings,
        )  # fmt: skip
        coming, eta_ms, why = self._bring(tenant, space, request, found)
        self._promise(tenant, space, request.keys, _lookup(request), found, count, why)
        if coming and found.lease and request.request:
            if len(self._waiting) >= LIMIT_WAITING:
                self._waiting.clear()
            self._waiting[found.lease] = request.request
        return _loaded(request.id, found, coming, eta_ms, why)

    def _bring(
        self, tenant: Tenant, space: Space, request: wire.Match | wire.Load | wire.Prefetch, found: Found
    ) -> tuple[int, float, str]:  # fmt: skip
        """Begin to bring what is on disk, if that is the sooner way to have it: how many blocks are to be
        expected, in how many milliseconds, and why."""
        if not found.coming:
            return 0, 0.0, ""
        if tenant.mover is None:
            return 0, 0.0, "off"
        name = (self.id, _lookup(request))
        if isinstance(request, wire.Prefetch):
            return tenant.mover.promote(
                space, request.keys, found.coming, request=name, urgent=False
            )
        within_s = request.within_ms / 1000 if request.within_ms > 0 else PATIENCE_S
        queued_s = max(0, request.queued_ms) / 1000
        return tenant.mover.promote(
            space, request.keys, found.coming,
            request=(self.id, request.request) if request.request else name,
            within_s=min(within_s, LONGEST_WAIT_S),
            recompute_s=queued_s + space.recompute_s(found.coming, found.ready),
        )  # fmt: skip

    def _promise(
        self,
        tenant: Tenant,
        space: Space,
        keys: bytes,
        lookup: Lookup,
        found: Found,
        counted: bool,
        why: str,
    ) -> None:
        """Note what was counted as coming: as far as it is lost by the time that is asked about again, it was
        a miss."""
        coming = found.coming if tenant.brings else 0
        if counted and why in COMPUTE:
            tenant.catalog.count_lost(space, coming, why)
            coming = 0
        if counted:
            self._note_lookup(tenant, space, keys, found, coming, why)
        if not counted:
            promised, there, of_it_coming = self._promised
            if promised != lookup:
                return
            tenant.catalog.count_lost(
                space, max(0, min(there - found.ready - coming, of_it_coming))
            )
        self._promised = lookup, found.ready + coming, coming

    def _note_lookup(
        self, tenant: Tenant, space: Space, keys: bytes, found: Found, coming: int, why: str
    ) -> None:
        """Remember what was answered, for whoever wants to know why."""
        got = found.ready + coming
        missing = keys[got * KEY_BYTES : (got + 1) * KEY_BYTES]
        reason = "" if not missing else why if why in COMPUTE else tenant.catalog.last_miss or why
        tenant.catalog.lookups.note(
            self._server.clock(), self.name, space, len(keys) // KEY_BYTES, found.ready,
            coming, reason, missing,
        )  # fmt: skip

    def _explain(self, tenant: Tenant, request: wire.Explain) -> wire.Reply:
        told = explain(
            tenant.catalog, request.lookup, request.keys, self._server.clock(), tenant.brings
        )
        fields = {name: msgspec.Raw(msgspec.msgpack.encode(value)) for name, value in told.items()}
        return wire.Report(request.id, fields)

    def _adopt(self, tenant: Tenant, request: wire.Adopt) -> wire.Reply:
        _check_shards(request.shards)
        _check_answered(request)
        return _loaded(request.id, tenant.catalog.adopt(self.id, request.token, request.shards))

    def _release(self, tenant: Tenant, request: wire.Release) -> wire.Reply:
        tenant.catalog.release(self.id, LeaseId(request.lease))
        waits = self._waiting.pop(LeaseId(request.lease), 0)
        if waits and tenant.mover is not None:
            tenant.mover.released((self.id, waits))
        return wire.Done(request.id)

    def _reserve(self, tenant: Tenant, request: wire.Reserve) -> wire.Reply:
        self._check_may_write()
        _check_answered(request)
        space = tenant.catalog.space(request.space)
        granted = tenant.catalog.reserve(
            self.id, space, request.group, request.shard, request.parent, request.keys
        )
        if (request.group, request.shard) == (0, 0):
            self._server.recorder.saved(
                tenant.name, space.number, space.spec.block_tokens, request.parent, request.keys
            )
        return wire.Reserved(request.id, granted.lease, granted.outcomes, granted.slots)

    def _commit(self, tenant: Tenant, request: wire.Commit) -> wire.Reply:
        ids = tenant.catalog.commit(
            self.id, LeaseId(request.lease), request.first, request.count, request.checksums
        )
        if tenant.mover is not None:
            tenant.mover.saved(ids)
        return wire.Done(request.id)

    def _abort(self, tenant: Tenant, request: wire.Abort) -> wire.Reply:
        tenant.catalog.abort(self.id, LeaseId(request.lease))
        return wire.Done(request.id)

    def _pin(self, tenant: Tenant, request: wire.Pin) -> wire.Reply:
        self._check_may_write()
        space = tenant.catalog.space(request.space)
        if request.ttl_ms < 1:
            raise Refused("bad_request", f"a pin for {request.ttl_ms} ms")
        now = self._server.clock()
        blocks = tenant.catalog.pin(space, request.keys, request.ttl_ms / 1000, now)
        return wire.Counted(request.id, blocks)

    def _unpin(self, tenant: Tenant, request: wire.Unpin) -> wire.Reply:
        self._check_may_write()
        space = tenant.catalog.space(request.space)
        return wire.Counted(request.id, tenant.catalog.unpin(space, request.keys))

    def _cancel(self, tenant: Tenant, request: wire.Cancel) -> wire.Reply:
        if tenant.mover is not None:
            tenant.mover.cancel((self.id, request.request))
        return wire.Done(request.id)

    def _prefill(self, tenant: Tenant, request: wire.Prefill) -> wire.Reply:
        space = tenant.catalog.space(request.space)
        fit = (request.token_s, request.context_s)
        if not (all(map(math.isfinite, fit)) and min(fit) >= 0 and max(fit) > 0):
            raise Refused("bad_request", f"computing takes {fit} seconds")
        space.prefill = fit
        return wire.Done(request.id)

    def _hint(self, tenant: Tenant, request: wire.Hint) -> wire.Reply:
        self._check_may_write()
        space = tenant.catalog.space(request.space)
        if not 0.0 <= request.importance <= 1.0:
            raise Refused("bad_request", f"an importance of {request.importance}: 0 to 1")
        blocks = tenant.catalog.hint(space, request.keys, request.importance)
        return wire.Counted(request.id, blocks)

    def _forget(self, tenant: Tenant, request: wire.Forget) -> wire.Reply | None:
        self._check_may_write()
        space = tenant.catalog.space(request.space)
        count = tenant.catalog.forget(space, request.keys)
        if tenant.mover is None:
            return wire.Counted(request.id, count)

        def over(failure: str) -> None:
            if failure:
                text = f"forgotten in memory; after a restart it may be back from disk: {failure}"
                self._fail(request.id, "disk_failed", text)
            else:
                self.send(wire.Counted(request.id, count))

        tenant.mover.forget(space, request.keys, over if request.id else None)
        return None

    def _watch(self, tenant: Tenant, request: wire.Watch) -> None:
        _check_answered(request)
        space = tenant.catalog.space(request.space)
        if request.space in self._watching:
            raise Refused("bad_request", f"space {request.space} is being watched already")
        if len(self._watched - {request.space}) >= LIMIT_SESSION_WATCHES:
            raise Refused(
                "too_many", f"this session watches {LIMIT_SESSION_WATCHES} spaces already"
            )

        def awake() -> None:
            # What comes together is told together.
            self._server.loop.call_later(WATCH_S, self._tell, request.space, watch)

        watch = tenant.catalog.watch(self.id, space, awake)
        self._watched.add(request.space)
        self._watching[request.space] = request.id
        self._tell(request.space, watch)

    def _tell(self, space: int, watch: Watch) -> None:
        """Answer who watches, if somebody waits for it: whoever has yet to take the last answer has no other
        sent."""
        if watch.kept and space in self._watching:
            missed, changes = watch.take(wire.LIMIT_CHANGES)
            self.send(wire.Changed(self._watching.pop(space), missed, changes))

    def _check_may_write(self) -> None:
        if self._read_only:
            raise Refused("read_only", "this session said that it only reads")

    def _stats(self, tenant: Tenant | None, request: wire.Stats) -> wire.Reply:
        return wire.Report(request.id, self._server.stats(None if self.peer.privileged else tenant))

    def _record(self, tenant: Tenant, space: Space, keys: bytes) -> None:
        self._server.recorder.looked_up(tenant.name, space.number, space.spec.block_tokens, keys)

    def _recording(self, tenant: Tenant | None, request: wire.Record) -> wire.Reply:
        if not self.peer.privileged:
            text = "recordings are for root, and for the user that the daemon runs as"
            raise Refused("no_tenant", text)
        recorder = self._server.recorder
        if request.limit_bytes < 0:
            raise Refused("bad_request", f"a trace of {request.limit_bytes} bytes")
        if request.stop:
            stats = recorder.stop()
        elif request.limit_bytes:
            stats = recorder.start(request.limit_bytes)
        else:
            stats = recorder.stats()
        body = {name: msgspec.Raw(msgspec.msgpack.encode(value)) for name, value in stats.items()}
        return wire.Report(request.id, body)

    def _ping(self, tenant: Tenant | None, request: wire.Ping) -> wire.Reply:
        return wire.Done(request.id)

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

    def _fail(self, request_id: int, code: str, text: str, fatal: bool = False) -> None:
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
        fds = extent.handles(self._read_only)
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
        return bool(self._spaces)

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
        if self.tenant is not None and self.tenant.mover is not None:
            self.tenant.mover.session_over(self.id)
        gone = self._farewell or self.peer.gone
        if self.tenant is not None and self.tenant.catalog.end_session(self.id, gone):
            self._server.ghosts.add(self)
        else:
            self.abandon()

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


Answer = Callable[[Session, Any, Any], wire.Reply | None]  # None: the answer comes later
WITHOUT_TENANT = (wire.Stats, wire.Record, wire.Ping)
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
    wire.Watch: Session._watch,
    wire.Stats: Session._stats,
    wire.Record: Session._recording,
    wire.Ping: Session._ping,
    wire.Cancel: Session._cancel,
    wire.Prefill: Session._prefill,
    wire.Unpin: Session._unpin,
    wire.Explain: Session._explain,
}


def _loaded(
    request_id: int, found: Found, coming: int = 0, eta_ms: float = 0.0, why: str = ""
) -> wire.Loaded:
    return wire.Loaded(
        request_id, found.ready, coming, eta_ms, found.lease, found.token, list(found.parts), why
    )


def _lookup(request: wire.Match | wire.Load | wire.Prefetch) -> Lookup:
    """What tells a lookup from another: the last key of a chain names all before it."""
    return request.space, len(request.keys), request.keys[-KEY_BYTES:]


def _check_shards(shards: list[int]) -> None:
    if len(shards) > LIMIT_SHARDS:
        raise Refused("bad_request", f"{len(shards)} shards asked for")


def _check_answered(request: wire.Message) -> None:
    if not request.id:
        raise Refused("bad_request", "a request for a lease whose answer nobody reads")
