"""What the threads of one client share: the connection, whose turn it is, and the mapped arena.

Its locks are never taken in a forked child: the thread that held one may not be there to let go.
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
GROWTH_TURN_MS = 100  # how long one request for growth keeps the connection from other threads
GROWTH_PAUSE_S = 0.001

ReplyT = TypeVar("ReplyT", bound=wire.Message)
Mappings: TypeAlias = "Sequence[Mapping | None]"

# By socket: tokens of closed clients that could not tell their daemon that they touch nothing any more. The
# next client of this process does, so that slots which a lost connection had for writing are free again.
_unsaid: dict[str, list[bytes]] = {}
_unsaid_lock = threading.Lock()


def _forget_the_parents() -> None:
    """In a forked child: what the parent's clients touch is the parent's to say."""
    global _unsaid_lock
    _unsaid_lock = threading.Lock()
    _unsaid.clear()


os.register_at_fork(after_in_child=_forget_the_parents)


class Link:
    """Requests take turns on the connection; replies that came with extents have them mapped first."""

    def __init__(
        self,
        connection: Connection,
        arena: Arena,
        path: str,
        name: str,
        read_only: bool,
        engine: str = "",
    ) -> None:
        self.connection = connection
        self.arena = arena
        self.lock = threading.RLock()
        self._told: dict[int, type[wire.Message]] = {}
        self._path = path
        self._writing = 0
        self._deferred: deque[tuple[int, bytes]] = deque()
        self._closed = False
        with _unsaid_lock:
            ended = _unsaid.get(path, [])[: wire.LIMIT_ENDED]
        hello = wire.Hello(connection.new_id(), wire.SCHEMA, name, read_only, ended, engine)
        self.welcome = self.ask(hello, wire.Welcome)
        with _unsaid_lock:
            _unsaid[path] = [token for token in _unsaid.get(path, []) if token not in ended]

    @property
    def mappings(self) -> tuple[Mappings, Mappings]:
        """The extents and their tables, in lists that grow with every answer. Whoever asks for slots takes
        them before: after a close they are not to be had, and the answer may be older than it."""
        return self.arena.extents, self.arena.tables

    def new_id(self) -> int:
        return self.connection.new_id()

    def ask(self, request: wire.Message, expected: type[ReplyT]) -> ReplyT:
        """Send, and wait for the answer. Raises Refused if the daemon says no."""
        self.connection.check_process()
        try:
            with self.lock:
                self._send_deferred()
                sent = self.connection.send(request)
                try:
                    reply = self.connection.wait(sent)
                finally:
                    self._map_extents()
        finally:
            # What other threads began meanwhile goes even if this one was refused; a connection that
            # broke tells them at their next call.
            if self._deferred and not self.connection.broken:
                self._flush()
        if not isinstance(reply, expected):
            raise ProtocolError(f"{type(request).__name__} was answered by {type(reply).__name__}")
        return reply

    def wait_for_growth(self, until: float) -> bool:
        """Wait until the daemon's memory has grown, or is complete, or it is `until` by the connection's
        clock; whether it still grows. Other threads have the connection in between."""
        extents = len(self.arena.extents)
        while True:
            left_s = max(0.0, until - self.connection.clock())
            # An answer must be able to come within the deadline of a request.
            turn_ms = int(min(left_s * 1000, GROWTH_TURN_MS, self.connection.timeout_s * 500))
            asked = wire.Grow(self.new_id(), extents, turn_ms)
            grown = self.ask(asked, wire.Grown)
            if grown.extents > extents or not grown.growing or self.connection.clock() >= until:
                return grown.growing
            time.sleep(GROWTH_PAUSE_S)

    def tell(self, request: wire.Message) -> int:
        """Send without waiting: not for the daemon, and not for another thread's request in flight, after
        which it goes then."""
        self.connection.check_process()
        # Before it is deferred: another thread, which may send it, is not to be told of its faults.
        frame = checked_frame(request)
        if len(self._deferred) >= LIMIT_DEFERRED:
            raise Unavailable(f"{len(self._deferred)} requests wait for another thread's answer")
        if request.id:
            self._told[request.id] = type(request)
        self._deferred.append((request.id, frame))
        self._flush()
        return request.id

    def replies(self) -> dict[int, tuple[type[wire.Message], wire.Reply]]:
        """What has come and nobody waits for, and what it answers. Never waits, not for the daemon and not
        for another thread: then there is nothing yet."""
        self.connection.check_process()
        if not self.lock.acquire(blocking=False):
            return {}
        try:
            self._send_deferred()
            try:
                replies = self.connection.poll()
                return {
                    ticket: (self._told.pop(ticket), reply) for ticket, reply in replies.items()
                }
            finally:
                self._map_extents()
        finally:
            self.lock.release()
            if self._deferred and not self.connection.broken:
                self._flush()

    @property
    def awaits(self) -> bool:
        """Something that `tell` sent is still to be answered, or waits to be sent."""
        return bool(self._told or self._deferred or self.connection.backlog_bytes)

    def begin_writing(self) -> None:
        """Until `end_writing` somebody here may touch slots of the arena."""
        self.connection.check_process()
        with self.lock:
            self._writing += 1

    def end_writing(self) -> None:
        """Nothing touches the slots of one save any more. In a forked child that is not ours to say."""
        if self.connection.inherited:
            return
        with self.lock:
            self._writing -= 1
            if self._closed and not self._writing:
                self._leave_unsaid()

    def close(self) -> None:
        """Hang up. While a save is running the daemon is not told that its slots are free."""
        if self.connection.inherited:
            self.connection.close(farewell=False)
            return
        with self.lock:
            if self._closed:
                return
            self._closed = True
            said = self.connection.close(farewell=not self._writing)
            if not said and not self._writing:
                self._leave_unsaid()
            self.arena.close()

    def _leave_unsaid(self) -> None:
        with _unsaid_lock:
            _unsaid.setdefault(self._path, []).append(self.welcome.token)

    def _flush(self) -> None:
        """Send what is deferred, unless another thread has the connection: it will. It looks once more
        after letting go, so nothing is left behind."""
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
                # Slots in it would be asked for and not found: this client is of no use.
                raise self.connection.give_up(f"an extent can't be mapped: {error}") from error
            except BaseException:
                self.connection.give_up("an extent's mapping was interrupted")
                raise
