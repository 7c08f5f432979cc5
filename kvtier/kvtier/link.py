"""The state that the threads of one client share: the connection, its lock, and the mapped arena.

The locks are never taken in a forked child: the thread that held one may not exist there.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TypeAlias, TypeVar

from kvtier import wire
from kvtier.arena import Arena
from kvtier.connection import Connection, checked_frame
from kvtier.errors import ProtocolError, Unavailable
from kvtier_kernels import Mapping

LIMIT_DEFERRED = 4096
GROWTH_TURN_MS = 100  # how long one Grow request occupies the connection
GROWTH_PAUSE_S = 0.001

ReplyT = TypeVar("ReplyT", bound=wire.Message)
Mappings: TypeAlias = "Sequence[Mapping | None]"

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


class Link:
    """Serializes the requests of all threads on the connection. Maps new extents before it returns the reply
    that they arrived with."""

    def __init__(
        self,
        connection: Connection,
        arena: Arena,
        path: str,
        name: str,
        read_only: bool,
        engine: str = "",
        verify: bool = False,
    ) -> None:
        self.verify = verify
        self.connection = connection
        self.new_id = connection.new_id
        self.arena = arena
        self.lock = threading.RLock()
        self._pending: dict[int, type[wire.Message]] = {}
        self._path = path
        self._writing = 0
        self._deferred: deque[tuple[int, bytearray]] = deque()
        self._closed = False
        with _ended_lock:
            ended = _ended_tokens.get(path, [])[: wire.LIMIT_ENDED]
        hello = wire.Hello(connection.new_id(), wire.SCHEMA, name, read_only, ended, engine, verify)
        self.welcome = self.ask(hello, wire.Welcome)
        with _ended_lock:
            _ended_tokens[path] = [one for one in _ended_tokens.get(path, []) if one not in ended]

    @property
    def mappings(self) -> tuple[Mappings, Mappings]:
        """The extents and their tables, in lists that answers extend. Read this property before a request for
        slots: another thread may close the client before the answer is used."""
        return self.arena.extents, self.arena.tables

    def ask(self, request: wire.Message, expected: type[ReplyT]) -> ReplyT:
        """Send a request and wait for its answer. Raises Refused if the daemon refuses it."""
        self.connection.check_process()
        try:
            with self.lock:
                if self._deferred:
                    self._send_deferred()
                connection = self.connection
                sent = connection.send(request)
                try:
                    reply = connection.wait(sent)
                finally:
                    if connection.extents:
                        self._map_extents()
        finally:
            # Send what other threads deferred meanwhile, also if this request was refused. After a broken
            # connection their next call raises Unavailable.
            if self._deferred and not self.connection.broken:
                self._flush()
        if not isinstance(reply, expected):
            raise ProtocolError(
                f"the daemon answered {type(request).__name__} with {type(reply).__name__}"
            )
        return reply

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

    def tell(self, request: wire.Message) -> int:
        """Send a request without waiting, and return its id. While another thread uses the connection, the
        request is deferred and that thread sends it."""
        self.connection.check_process()
        # Validate now: the thread that sends a deferred frame must not get this request's error.
        frame = checked_frame(request)
        if len(self._deferred) >= LIMIT_DEFERRED:
            raise Unavailable(
                f"{len(self._deferred)} requests already wait for another thread's answer"
            )
        if request.id:
            self._pending[request.id] = type(request)
        self._deferred.append((request.id, frame))
        self._flush()
        return request.id

    def replies(self) -> dict[int, tuple[type[wire.Message], wire.Reply]]:
        """Return the answers that have arrived for requests of `tell`, each with the type of its request.
        Never waits; returns {} while another thread uses the connection."""
        self.connection.check_process()
        if not self.lock.acquire(blocking=False):
            return {}
        try:
            self._send_deferred()
            try:
                replies = self.connection.poll()
                return {
                    ticket: (self._pending.pop(ticket), reply) for ticket, reply in replies.items()
                }
            finally:
                self._map_extents()
        finally:
            self.lock.release()
            if self._deferred and not self.connection.broken:
                self._flush()

    @property
    def awaits(self) -> bool:
        """Whether a request of `tell` is not answered or not sent yet."""
        return bool(self._pending or self._deferred or self.connection.backlog_bytes)

    def begin_writing(self) -> None:
        """Count a save that may write to slots until `end_writing`."""
        self.connection.check_process()
        with self.lock:
            self._writing += 1

    def end_writing(self) -> None:
        """End one `begin_writing`. Does nothing in a forked child, because the parent may still write."""
        if self.connection.inherited:
            return
        with self.lock:
            self._writing -= 1
            if self._closed and not self._writing:
                self._keep_token()

    def close(self) -> None:
        """Close the connection and the arena. While a save is running, no Bye is sent: its slots stay
        quarantined until the save has ended and this process connects again."""
        if self.connection.inherited:
            self.connection.close(farewell=False)
            return
        with self.lock:
            if self._closed:
                return
            self._closed = True
            said = self.connection.close(farewell=not self._writing)
            if not said and not self._writing:
                self._keep_token()
            self.arena.close()

    def _keep_token(self) -> None:
        """Let the next client of this process declare this session's slots as unused."""
        with _ended_lock:
            _ended_tokens.setdefault(self._path, []).append(self.welcome.token)

    def _flush(self) -> None:
        """Send deferred requests, unless another thread holds the lock. That thread calls this after it
        releases the lock, so no request is left behind."""
        while self._deferred and self.lock.acquire(blocking=False):
            try:
                self._send_deferred()
            finally:
                self.lock.release()

    def _send_deferred(self) -> None:
        while self._deferred:
            self.connection.begin(*self._deferred.popleft())

    def _map_extents(self) -> None:
        extents = self.connection.extents
        while extents:
            try:
                self.arena.add(*extents.popleft())
            except Exception as error:
                # The daemon would grant slots in it that this client cannot access.
                raise self.connection.give_up(f"cannot map an extent: {error}") from error
            except BaseException:
                self.connection.give_up("mapping an extent was interrupted")
                raise
