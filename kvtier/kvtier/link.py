"""The state that the threads of one client share: the connection, its lock, and the mapped arena.

If the daemon ends, the connection is made again, and what the client has goes on in it: its spaces, the slots
that it writes to, its leases, and the requests without an answer.

The locks are never taken in a forked child: the thread that held one may not exist there.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from kvtier import wire
from kvtier.arena import Arena
from kvtier.connection import Clock, Connection, begin_delayed, checked_frame, connect, look_for
from kvtier.errors import KvtierError, ProtocolError, Refused, Unavailable
from kvtier.layout import KvSpec
from kvtier_kernels import Mapping

LIMIT_DEFERRED = 4096
LIMIT_LATER = 16  # requests that wait for the next one
GROWTH_TURN_MS = 100  # how long one Grow request occupies the connection
GROWTH_PAUSE_S = 0.001
DELAYED_LOOK_MS = 1  # between two looks for a delayed answer
RETRY_S = 0.005  # between attempts to connect again
AWAY_S = 0.25  # for one attempt, once no daemon has come back in time
PAUSES = 4  # after such an attempt, in times that it took

ReplyT = TypeVar("ReplyT", bound=wire.Message)
Mappings: TypeAlias = "Sequence[Mapping | None]"
BothMappings: TypeAlias = tuple[Mappings, Mappings]
# Makes the request with this id, from what the client knows of the present connection.
Make: TypeAlias = Callable[[int], wire.Message]

# By socket: tokens of closed clients that write to no slot, but could not send Bye. The next client of this
# process declares them in its Hello, and the daemon then reuses the slots that those clients had for writing.
_ended_tokens: dict[str, list[bytes]] = {}
_ended_lock = threading.Lock()


def _drop_parent_tokens() -> None:
    """In a forked child: only the parent knows whether its clients still write."""
    global _ended_lock
    _ended_lock = threading.Lock()
    _ended_tokens.clear()


os.register_at_fork(after_in_child=_drop_parent_tokens)


@dataclass(slots=True, frozen=True)
class Caller:
    """How a client connects. `reconnect_s`: how long a call waits for a daemon that ended; 0: never."""

    path: str
    clock: Clock
    timeout_s: float
    reconnect_s: float
    read_only: bool
    populate: bool
    name: str
    engine: str
    verify: bool
    device: bool


class OpenedSpace(Protocol):
    spec: KvSpec

    def reopened(self, opened: wire.Opened) -> Iterable[wire.Message]:
        """The space has this number now; return what else the daemon must know of it. Raises Refused if it is
        not the same space."""


class SlotUser(Protocol):
    """A save or a load that has slots."""

    def again(self, request_id: int) -> wire.Message | None:
        """The request for the same slots in a new connection; None if there is nothing to ask for."""

    def taken(self, reply: wire.Reply, mappings: BothMappings) -> None:
        """The answer to it."""


class Writer(SlotUser, Protocol):
    """A save. `is_lost`: it may write to slots that it did not get in a later connection."""

    is_lost: bool


class KeptLeases(dict[int, "weakref.ref[SlotUser]"]):
    """Leases that are taken again if the connection is made again: by identity, until they are released or
    deleted. A WeakValueDictionary takes a microsecond longer for each."""

    _most = LIMIT_DEFERRED

    def keep(self, lease: SlotUser) -> None:
        if len(self) >= self._most:
            for key in [key for key, one in list(self.items()) if one() is None]:
                self.pop(key, None)
            self._most = 2 * len(self) + LIMIT_DEFERRED
        self[id(lease)] = weakref.ref(lease)


class NewConnection:
    """A connection that is not in use yet."""

    def __init__(self, caller: Caller, timeout_s: float) -> None:
        sock = connect(caller.path, timeout_s, caller.clock)
        self.connection = Connection(sock, caller.clock, timeout_s)
        self.arena = Arena(caller.read_only, caller.populate)

    def ask(self, request: wire.Message, expected: type[ReplyT]) -> ReplyT:
        """Send a request and wait for its answer."""
        sent = self.connection.send(request)
        try:
            reply = self.connection.wait(sent)
        finally:
            _map_extents(self.connection, self.arena)
        return _expected(request, reply, expected)

    def close(self) -> None:
        self.connection.close(farewell=False)
        self.arena.close()


class Link:
    """Serializes all threads' requests. Maps new extents before it returns the reply they came with."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.lock = threading.RLock()
        self.spaces: weakref.WeakSet[OpenedSpace] = weakref.WeakSet()
        self.leases = KeptLeases()
        self._pending: dict[int, tuple[type[wire.Message], Make]] = {}
        self._writing: dict[int, Writer] = {}  # by identity
        self._deferred: deque[tuple[int, bytearray]] = deque()
        self.is_closed = False
        self._away = False  # no daemon has come back in time
        self._retry_at = 0.0
        self._last_id = 0
        self._reconnecting: threading.Thread | None = None
        new = NewConnection(caller, caller.timeout_s)
        try:
            self.welcome = self._greet(new, b"")
        except BaseException:
            new.close()
            raise
        self.connection, self.arena = new.connection, new.arena

    def new_id(self) -> int:
        self._last_id = self._last_id % 0xFFFF_FFFF + 1
        return self._last_id

    @property
    def mappings(self) -> BothMappings:
        """The extents and their tables, in lists that answers extend."""
        return self.arena.extents, self.arena.tables

    def ask(
        self,
        request: wire.Message | Make,
        expected: type[ReplyT],
        take: Callable[[ReplyT, BothMappings], object] | None = None,
    ) -> ReplyT:
        """Send a request and wait for its answer. Raises Refused if the daemon refuses it. If the daemon ends
        meanwhile, connect again, and send the request again: pass a function that makes it if it names a
        space or a lease. `take` gets the answer and the mappings of its slots before another connection can
        be made."""
        self.connection.check_process()
        until = self.connection.clock() + self.connection.timeout_s
        try:
            with self.lock:
                while True:
                    try:
                        reply = self._ask_once(request, expected, take)
                        break
                    except Unavailable:
                        if not self._reconnected(until):
                            raise
        finally:
            # Send what other threads deferred meanwhile, also if this request was refused. After a broken
            # connection their next call raises Unavailable.
            if self._deferred and not self.connection.broken:
                self._flush()
        return reply

    def _ask_once(
        self,
        request: wire.Message | Make,
        expected: type[ReplyT],
        take: Callable[[ReplyT, BothMappings], object] | None,
    ) -> ReplyT:
        connection, mappings = self.connection, self.mappings  # `close` replaces the lists
        if self._deferred:
            self._send_deferred()
        message = request if isinstance(request, wire.Message) else request(self.new_id())
        sent = connection.send(message)
        try:
            reply = connection.wait(sent)
        finally:
            if connection.extents:
                _map_extents(connection, self.arena)
        answer = _expected(message, reply, expected)
        if take is not None:
            take(answer, mappings)
        return answer

    def wait_for_growth(self, until: float) -> bool:
        """Wait until the daemon's memory has grown or is complete, at most until `until` by the connection's
        clock. Returns whether it still grows. Other threads can use the connection in between."""
        extents = len(self.arena.extents)
        while True:
            left_s = max(0.0, until - self.connection.clock())
            # The answer must arrive within the deadline of a request.
            turn_ms = int(min(left_s * 1000, GROWTH_TURN_MS, self.connection.timeout_s * 500))
            asked = wire.Grow(self.new_id(), extents, turn_ms)
            grown = self.ask(asked, wire.Grown)
            if grown.extents > extents or not grown.growing or self.connection.clock() >= until:
                return grown.growing
            time.sleep(GROWTH_PAUSE_S)

    def tell(self, request: wire.Message | Make, at_once: bool = True) -> int:
        """Send a request without waiting, and return its id. While another thread uses the connection, the
        request is deferred and that thread sends it. With a function, the request is answered, and is sent
        again if the connection is made again; see `ask`. If not `at_once`, it is sent with the next one, or
        by `close`: that saves the time in which the kernel wakes the daemon."""
        self.connection.check_process()
        message = request if isinstance(request, wire.Message) else request(self.new_id())
        # Validate now: the thread that sends a deferred frame must not get this request's error.
        frame = checked_frame(message)
        if len(self._deferred) >= LIMIT_DEFERRED:
            raise Unavailable(
                f"{len(self._deferred)} requests already wait for another thread's answer"
            )
        if message.id:
            make = _always(request) if isinstance(request, wire.Message) else request
            self._pending[message.id] = type(message), make
        self._deferred.append((message.id, frame))
        if at_once or len(self._deferred) > LIMIT_LATER:
            try:
                self._flush()
            except (KvtierError, OSError):
                raise
            except BaseException:
                self._pending.pop(message.id, None)  # no caller knows its ticket
                raise
        return message.id

    def replies(self) -> dict[int, tuple[type[wire.Message], wire.Reply]]:
        """Return the answers that have arrived for requests of `tell`, each with the type of its request.
        Never waits; returns {} while another thread uses the connection."""
        return self.poll()[0]

    def poll(self) -> tuple[dict[int, tuple[type[wire.Message], wire.Reply]], BothMappings]:
        """Return the same, and the mappings of the slots in the answers."""
        self.connection.check_process()
        mappings = self.mappings
        if not self.lock.acquire(blocking=False):
            return {}, mappings
        try:
            mappings = self.mappings
            if self.connection.is_lost and self._reconnects_in_background():
                return {}, mappings
            self._send_deferred()
            try:
                replies = self.connection.poll()
            finally:
                _map_extents(self.connection, self.arena)
            return {
                ticket: (self._pending.pop(ticket)[0], reply) for ticket, reply in replies.items()
            }, mappings
        except Unavailable:
            if self.connection.is_lost and self._reconnects_in_background():
                return {}, mappings
            raise
        finally:
            self.lock.release()
            if self._deferred and not self.connection.broken:
                self._flush()

    @property
    def awaits(self) -> bool:
        """Whether a request of `tell` is not answered or not sent yet."""
        return bool(self._pending or self._deferred or self.connection.backlog_bytes)

    def begin_writing(self, save: Writer) -> None:
        """This save may write to slots until `end_writing`."""
        self.connection.check_process()
        with self.lock:
            self._writing[id(save)] = save

    def end_writing(self, save: Writer) -> None:
        """End a `begin_writing`. Does nothing in a forked child, because the parent may still write."""
        if self.connection.inherited:
            return
        with self.lock:
            self._writing.pop(id(save), None)
            if self.is_closed and not self._writing:
                self._keep_token()

    def close(self) -> None:
        """Close the connection and the arena. While a save is running, no Bye is sent: its slots stay
        quarantined until the save has ended and this process connects again."""
        if self.connection.inherited:
            self.connection.close(farewell=False)
            return
        with self.lock:
            if self.is_closed:
                return
            self.is_closed = True
            with contextlib.suppress(Unavailable):
                self._send_deferred()
            said = self.connection.close(farewell=not self._writing)
            if not said and not self._writing:
                self._keep_token()
            self.arena.close()

    def _keep_token(self) -> None:
        """Let the next client of this process declare this session's slots as unused."""
        with _ended_lock:
            _ended_tokens.setdefault(self.caller.path, []).append(self.welcome.token)

    def _flush(self) -> None:
        """Send deferred requests, unless another thread holds the lock. That thread calls this after it
        releases the lock, so no request is left behind."""
        while self._deferred and self.lock.acquire(blocking=False):
            try:
                self._send_deferred()
            except Unavailable:
                if not (self.connection.is_lost and self._reconnects_in_background()):
                    raise
                return  # the requests with an answer are sent again
            finally:
                self.lock.release()

    def _send_deferred(self) -> None:
        while self._deferred:
            self.connection.begin(*self._deferred.popleft())

    # --- connecting again --------------------------------------------------------------------

    def _reconnected(self, until: float) -> bool:
        """If the daemon has ended, connect again until then; return whether there is a connection. Once no
        daemon has come back in time, later calls try only once."""
        clock, caller = self.caller.clock, self.caller
        if not self.connection.is_lost or self.is_closed or not caller.reconnect_s:
            return False
        now = began = clock()
        if self._away and now < self._retry_at:
            return False
        until = min(until, now + (AWAY_S if self._away else caller.reconnect_s))
        while now < until:
            try:
                self._reconnect(until - now)
                self._away = False
                return True
            except (Unavailable, Refused) as error:
                if isinstance(error, Refused) and error.code != "too_many":
                    raise
            if self._away:
                break
            time.sleep(RETRY_S)
            now = clock()
        self._away = True
        # A daemon that hangs delays few calls.
        self._retry_at = clock() + PAUSES * (clock() - began)
        return False

    def _reconnect(self, timeout_s: float) -> None:
        """Connect, and go on there with what this client has."""
        new = NewConnection(self.caller, timeout_s)
        try:
            token = b"" if self.caller.read_only else self.welcome.token
            welcome = self._greet(new, token)
            for space in list(self.spaces):
                opened = new.ask(wire.Open(self.new_id(), space.spec), wire.Opened)
                for message in space.reopened(opened):
                    new.connection.send(message)
            mappings = new.arena.extents, new.arena.tables
            writing = list(self._writing.values())
            for save in writing:
                if (request := save.again(self.new_id())) is not None:
                    save.taken(new.ask(request, wire.Reserved), mappings)
            # Otherwise threads may write to other slots of the last session.
            if token and not any(save.is_lost for save in writing):
                new.ask(wire.Abort(self.new_id(), 0), wire.Done)
            for kept in list(self.leases.values()):
                lease = kept()
                if lease is not None and (request := lease.again(self.new_id())) is not None:
                    with contextlib.suppress(Refused):
                        lease.taken(new.ask(request, wire.Loaded), mappings)
            # Hints and releases of the last session are not sent again.
            self._deferred.clear()
            for ticket, (_, make) in self._pending.items():
                new.connection.begin(ticket, checked_frame(make(ticket)))
        except BaseException:
            new.close()
            raise
        new.connection.timeout_s = self.caller.timeout_s
        old, self.connection = self.connection, new.connection
        arena, self.arena = self.arena, new.arena
        self.welcome = welcome
        old.close(farewell=False)
        arena.close()

    def _greet(self, new: NewConnection, token: bytes) -> wire.Welcome:
        path = self.caller.path
        with _ended_lock:
            ended = _ended_tokens.get(path, [])[: wire.LIMIT_ENDED]
        hello = wire.Hello(
            self.new_id(), wire.SCHEMA, self.caller.name, self.caller.read_only, ended,
            self.caller.engine, self.caller.verify, token, self.caller.device,
        )  # fmt: skip
        welcome = new.ask(hello, wire.Welcome)
        with _ended_lock:
            _ended_tokens[path] = [one for one in _ended_tokens.get(path, []) if one not in ended]
        return welcome

    def _reconnects_in_background(self) -> bool:
        """For calls that never wait: let a thread connect again. Return False if no daemon has come back."""
        if self.is_closed or not self.caller.reconnect_s:
            return False
        if self._reconnecting is None or not self._reconnecting.is_alive():
            pause_s = AWAY_S if self._away else 0.0  # the caller may poll often

            def reconnect() -> None:
                time.sleep(pause_s)
                with self.lock, contextlib.suppress(Unavailable, Refused, ProtocolError):
                    self._reconnected(self.caller.clock() + self.caller.reconnect_s)

            self._reconnecting = threading.Thread(
                target=reconnect, name="kvtier-reconnect", daemon=True
            )
            self._reconnecting.start()
        return not self._away


def ask_delayed(
    link: Link,
    request: wire.Message | Make,
    expected: type[ReplyT],
    take: Callable[[ReplyT, BothMappings], object],
) -> None:
    """As `Link.ask`, for an answer that the daemon delays: other threads use the connection meanwhile."""
    link.connection.check_process()
    clock, timeout_s = link.connection.clock, link.connection.timeout_s
    until = clock() + timeout_s  # of connecting again
    used: Connection | None = None  # has the request, and its answer was not taken
    try:
        while True:
            with link.lock:
                try:
                    connection, mappings = link.connection, link.mappings
                    link._send_deferred()  # also of threads that found the lock held
                    if used is not connection:
                        message = (
                            request if isinstance(request, wire.Message) else request(link.new_id())
                        )
                        used = connection
                        readable = begin_delayed(connection, message)
                        answer_by = clock() + timeout_s
                    try:
                        reply = look_for(connection, message.id)
                    finally:
                        _map_extents(connection, link.arena)
                    if reply is not None:
                        used = None
                        take(_expected(message, reply, expected), mappings)
                        return
                    if clock() >= answer_by:
                        text = f"the daemon did not answer within {timeout_s} s"
                        raise connection.give_up(text, lost=True)
                except Unavailable:
                    if not link._reconnected(until):
                        raise
                    continue
            # Another thread may receive the answer, so this one looks from time to time.
            readable.poll(DELAYED_LOOK_MS)
    except (KvtierError, OSError):
        raise
    except BaseException:
        # No caller will take this answer. Closing the connection ends what the answer grants.
        if used is not None:
            used.give_up("waiting for an answer was interrupted", lost=True)
        raise
    finally:
        if link._deferred and not link.connection.broken:
            link._flush()


def _map_extents(connection: Connection, arena: Arena) -> None:
    extents = connection.extents
    while extents:
        try:
            arena.add(*extents.popleft())
        except Exception as error:
            # The daemon would grant slots in it that this client cannot access.
            raise connection.give_up(f"cannot map an extent: {error}") from error
        except BaseException:
            connection.give_up("mapping an extent was interrupted", lost=True)
            raise


def _expected(request: wire.Message, reply: wire.Reply, expected: type[ReplyT]) -> ReplyT:
    if not isinstance(reply, expected):
        raise ProtocolError(
            f"the daemon answered {type(request).__name__} with {type(reply).__name__}"
        )
    return reply


def _always(message: wire.Message) -> Make:
    return lambda _: message
