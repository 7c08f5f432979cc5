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
from kvtier.errors import InvalidArgument, KvtierError, ProtocolError, Refused, Unavailable

RECEIVE_BYTES = 1 << 18
LIMIT_FDS = 64
LIMIT_BACKLOG_BYTES = 1 << 20
Clock = Callable[[], float]


class Connection:
    """Sends requests and takes replies in any order. Not locked: its owner is.

    After an error of the connection itself (`Unavailable`, `ProtocolError`) it is `broken` for good.
    """

    def __init__(self, sock: socket.socket, clock: Clock, timeout_s: float) -> None:
        self._sock = sock
        self.clock = clock
        self.timeout_s = timeout_s
        self._waits_s: float | None = None  # as the socket was told last
        self._pid = os.getpid()
        self._framer = wire.Framer()
        self._backlog = bytearray()
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
        """Write one request; its id is what `wait` and `poll` know the answer by. Raises InvalidArgument
        for one that no daemon would understand."""
        self._check_usable()
        frame = checked_frame(message)
        try:
            self._wait_at_most(self.timeout_s)
            self._flush()
            self._sock.sendall(frame)
        except TimeoutError as error:
            raise self.give_up(f"the daemon took no request for {self.timeout_s} s") from error
        except OSError as error:
            raise self._lost(error) from error
        except BaseException:
            self.give_up("a request was interrupted half-way")
            raise
        if message.id:
            self._expected.add(message.id)
        return message.id

    def begin(self, request_id: int, frame: bytes) -> None:
        """Write one request, as `checked_frame` made it, without waiting: what the socket does not take now
        goes with the next call.
        A daemon that takes nothing for too long breaks the connection."""
        self._check_usable()
        # One frame may wait whatever its size: the limit is for a daemon that takes none.
        if len(self._backlog) > LIMIT_BACKLOG_BYTES:
            self.push()
            if len(self._backlog) > LIMIT_BACKLOG_BYTES:
                raise self.give_up(
                    f"the daemon left {len(self._backlog)} bytes of requests waiting"
                )
        self._backlog += frame
        if request_id:
            self._expected.add(request_id)
        self.push()

    @property
    def backlog_bytes(self) -> int:
        """What `begin` left."""
        return len(self._backlog)

    def push(self) -> None:
        """Send what `begin` left, as far as the socket takes it now."""
        try:
            if self._backlog:
                self._wait_at_most(0)
                self._flush()
        except BlockingIOError:
            pass
        except OSError as error:
            raise self._lost(error) from error
        except BaseException:
            self.give_up("a request was interrupted half-way")
            raise

    def _wait_at_most(self, seconds: float) -> None:
        # Telling it is a call into the kernel, which an engine's every step would make.
        if seconds != self._waits_s:
            self._sock.settimeout(seconds)
            self._waits_s = seconds

    def _flush(self) -> None:
        while self._backlog:
            sent = self._sock.send(self._backlog)
            del self._backlog[:sent]

    def _lost(self, error: OSError) -> Unavailable:
        # The daemon may have said why before it hung up.
        with contextlib.suppress(Unavailable, ProtocolError, BlockingIOError):
            while True:
                self._receive(0)
        return self.give_up(self.broken or f"the connection is gone: {error}")

    def wait(self, request_id: int) -> wire.Reply:
        """The reply to this request. Raises Refused if the daemon says no."""
        deadline = self.clock() + self.timeout_s
        try:
            while request_id not in self._replies:
                left = deadline - self.clock()
                if left <= 0:
                    raise self.give_up(f"no answer for {self.timeout_s} s")
                self._receive(left)
        except (KvtierError, OSError):
            raise
        except BaseException:
            # Nobody will ever ask for this answer: what it grants ends with the connection.
            self.give_up("a request was interrupted")
            raise
        reply = self._replies.pop(request_id)
        if isinstance(reply, wire.Failed):
            raise Refused(reply.code, reply.text)
        return reply

    def poll(self) -> dict[int, wire.Reply]:
        """Every reply that has come and that nobody waits for. Never blocks."""
        self._check_usable()
        self.push()
        try:
            while True:
                self._receive(0)
        except BlockingIOError:
            pass
        except (KvtierError, OSError):
            raise
        except BaseException:
            # Part of an answer may be lost with it.
            self.give_up("a look for answers was interrupted")
            raise
        replies, self._replies = self._replies, {}
        return replies

    def _receive(self, timeout_s: float) -> None:
        self._check_usable()
        try:
            self._wait_at_most(timeout_s)
            count, control, flags, _ = self._sock.recvmsg_into(
                [self._buffer], socket.CMSG_SPACE(LIMIT_FDS * 4), socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            raise
        except TimeoutError as error:
            raise self.give_up(f"no answer for {self.timeout_s} s") from error
        except OSError as error:
            raise self.give_up(f"the connection is gone: {error}") from error
        for level, kind, data in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                whole = len(data) - len(data) % struct.calcsize("i")
                self._fds.extend(array.array("i", data[:whole]))
        if flags & socket.MSG_CTRUNC:
            raise self.give_up("descriptors were lost: the limit of open files is too low")
        if count == 0:
            raise self.give_up("the daemon hung up")
        try:
            for body in self._framer.feed(self._buffer[:count]):
                self._take(wire.decode_reply(body))
        except ProtocolError as error:
            self.give_up(str(error))
            raise

    def _take(self, reply: wire.Reply) -> None:
        if isinstance(reply, wire.ExtentAdded):
            if len(self._fds) < 2:
                raise ProtocolError(f"extent {reply.index} came without its descriptors")
            self.extents.append(
                (reply.index, reply.bytes, self._fds.popleft(), self._fds.popleft())
            )
        elif isinstance(reply, wire.GoingDown):
            self.give_up(f"the daemon is going down: {reply.reason}")
        elif isinstance(reply, wire.Failed) and reply.fatal:
            self.give_up(reply.text)
            self._replies[reply.id] = reply
        elif reply.id in self._expected:
            self._expected.discard(reply.id)
            self._replies[reply.id] = reply

    @property
    def inherited(self) -> bool:
        """This is a forked child, and the connection its parent's."""
        return self._pid != os.getpid()

    def check_process(self) -> None:
        """Raise Unavailable in a forked child. Needs no lock: a thread of the parent may have held it."""
        if self.inherited:
            raise Unavailable("connected before a fork: connect again in the child")

    def _check_usable(self) -> None:
        self.check_process()
        if self.broken:
            raise Unavailable(self.broken)

    def give_up(self, why: str) -> Unavailable:
        """The connection is of no more use, and this is why; the error to raise."""
        self.broken = self.broken or why
        with contextlib.suppress(OSError):
            # The daemon need not wait for a close to know that this session is over.
            self._sock.shutdown(socket.SHUT_RDWR)
        return Unavailable(why)

    def close(self, farewell: bool) -> bool:
        """Hang up. `farewell` promises the daemon that nothing here touches a slot any more; True if that
        was sent, or is not this process's to send."""
        said = False
        # After half a frame a goodbye would be taken for its rest.
        if farewell and not self.broken and not self.inherited and not self._backlog:
            with contextlib.suppress(OSError):
                self._wait_at_most(0)
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
        return said or self.inherited


def checked_frame(message: wire.Message) -> bytes:
    """The frame of a request; InvalidArgument if a field has a type or a size that the wire does not take."""
    try:
        frame = wire.encode(message)
        wire.decode_request(memoryview(frame)[wire.LENGTH.size :])
    except (ProtocolError, OverflowError, TypeError, ValueError) as error:
        raise InvalidArgument(f"{type(message).__name__}: {error}") from error
    return frame
