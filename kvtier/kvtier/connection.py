"""One connection to the daemon: frames out, replies and descriptors in. Blocking, with a deadline on each."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Callable

from kvtier import wire
from kvtier.errors import ProtocolError, Refused, Unavailable

RECEIVE_BYTES = 1 << 18
LIMIT_FDS = 64
Clock = Callable[[], float]


class Connection:
    """Sends requests and takes replies in any order. Not locked: its owner is.

    After an error of the connection itself (`Unavailable`, `ProtocolError`) it is `broken` for good.
    """

    def __init__(self, sock: socket.socket, clock: Clock, timeout_s: float) -> None:
        self._sock = sock
        self._clock = clock
        self._timeout_s = timeout_s
        self._pid = os.getpid()
        self._framer = wire.Framer()
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._fds: deque[int] = deque()
        self._replies: dict[int, wire.Reply] = {}
        self._expected: set[int] = set()
        self._next_id = 1
        self.broken: str = ""
        self.extents: deque[tuple[int, int, int, int]] = deque()

    def fileno(self) -> int:
        """To wait on, with select or epoll, for something to `poll`."""
        return self._sock.fileno()

    def new_id(self) -> int:
        request_id = self._next_id
        self._next_id = request_id % 0xFFFF_FFFF + 1
        return request_id

    def send(self, message: wire.Message) -> int:
        """Write one request; its id is what `wait` and `poll` know the answer by."""
        self._check_usable()
        frame = wire.encode(message)
        try:
            self._sock.settimeout(self._timeout_s)
            self._sock.sendall(frame)
        except TimeoutError as error:
            raise self._break(f"the daemon took no request for {self._timeout_s} s") from error
        except OSError as error:
            # The daemon may have said why before it hung up.
            with contextlib.suppress(Unavailable, ProtocolError, BlockingIOError):
                while True:
                    self._receive(0)
            raise self._break(self.broken or f"the connection is gone: {error}") from error
        if message.id:
            self._expected.add(message.id)
        return message.id

    def wait(self, request_id: int) -> wire.Reply:
        """The reply to this request. Raises Refused if the daemon says no."""
        deadline = self._clock() + self._timeout_s
        while request_id not in self._replies:
            left = deadline - self._clock()
            if left <= 0:
                raise self._break(f"no answer for {self._timeout_s} s")
            self._receive(left)
        reply = self._replies.pop(request_id)
        if isinstance(reply, wire.Failed):
            raise Refused(reply.code, reply.text)
        return reply

    def poll(self) -> dict[int, wire.Reply]:
        """Every reply that has come and that nobody waits for. Never blocks."""
        self._check_usable()
        with contextlib.suppress(BlockingIOError):
            while True:
                self._receive(0)
        replies, self._replies = self._replies, {}
        return replies

    def _receive(self, timeout_s: float) -> None:
        self._check_usable()
        try:
            self._sock.settimeout(timeout_s)
            count, control, flags, _ = self._sock.recvmsg_into(
                [self._buffer], socket.CMSG_SPACE(LIMIT_FDS * 4), socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            raise
        except TimeoutError as error:
            raise self._break(f"no answer for {self._timeout_s} s") from error
        except OSError as error:
            raise self._break(f"the connection is gone: {error}") from error
        for level, kind, data in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                whole = len(data) - len(data) % struct.calcsize("i")
                self._fds.extend(array.array("i", data[:whole]))
        if flags & socket.MSG_CTRUNC:
            raise self._break("descriptors were lost: the limit of open files is too low")
        if count == 0:
            raise self._break("the daemon hung up")
        try:
            for body in self._framer.feed(self._buffer[:count]):
                self._take(wire.decode_reply(body))
        except ProtocolError as error:
            self._break(str(error))
            raise

    def _take(self, reply: wire.Reply) -> None:
        if isinstance(reply, wire.ExtentAdded):
            if len(self._fds) < 2:
                raise ProtocolError(f"extent {reply.index} came without its descriptors")
            self.extents.append(
                (reply.index, reply.bytes, self._fds.popleft(), self._fds.popleft())
            )
        elif isinstance(reply, wire.GoingDown):
            self._break(f"the daemon is going down: {reply.reason}")
        elif isinstance(reply, wire.Failed) and reply.fatal:
            self._break(reply.text)
            self._replies[reply.id] = reply
        elif reply.id in self._expected:
            self._expected.discard(reply.id)
            self._replies[reply.id] = reply

    def _check_usable(self) -> None:
        if self._pid != os.getpid():
            raise Unavailable("connected before a fork: connect again in the child")
        if self.broken:
            raise Unavailable(self.broken)

    def _break(self, why: str) -> Unavailable:
        self.broken = self.broken or why
        return Unavailable(why)

    def close(self, farewell: bool) -> bool:
        """Hang up. `farewell` promises the daemon that nothing here touches a slot any more; True if that
        was sent, or is not this process's to send."""
        inherited = self._pid != os.getpid()
        said = False
        if farewell and not self.broken and not inherited:
            with contextlib.suppress(OSError):
                self._sock.settimeout(0)
                self._sock.sendall(wire.encode(wire.Bye(0)))
                said = True
        self.broken = self.broken or "closed"
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        for _, _, extent_fd, table_fd in self.extents:
            os.close(extent_fd)
            os.close(table_fd)
        self.extents.clear()
        self._sock.close()
        return said or inherited
