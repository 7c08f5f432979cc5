"""One connection to the daemon: frames, replies and descriptors. Every blocking call has a deadline."""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable

from kvtier import wire
from kvtier.errors import InvalidArgument, KvtierError, ProtocolError, Refused, Unavailable
from kvtier.read_file import ReadFile, ReadFiles

RECEIVE_BYTES = 1 << 18
LIMIT_FDS = 64
LIMIT_BACKLOG_BYTES = 1 << 20
LONGEST_WAIT_S = 2_000_000.0  # in one poll(), whose timeout is milliseconds in 31 bits
CONNECT_PAUSE_S = 0.005
# How long to look for an answer without sleeping, because waking a thread takes as long as a short answer.
# After an answer that took longer, some requests sleep at once; more after each further one.
LOOK_S, MOST_RESTS = 200e-6, 64
FIRST_WAIT_S = 0.002  # in recvmsg(), then in poll(): each signal starts the time of recvmsg() again
ANCILLARY_BYTES = socket.CMSG_SPACE(LIMIT_FDS * 4)
# Plain integers: operators of the socket module's flags take a microsecond each.
CLOSE_ON_EXEC = int(socket.MSG_CMSG_CLOEXEC)
DONT_WAIT = int(socket.MSG_DONTWAIT)
TRUNCATED = int(socket.MSG_CTRUNC)
TIMEVAL = struct.Struct("@ll")  # seconds, microseconds
# May arrive without a request.
UNSOLICITED = (
    wire.ExtentAdded, wire.DirectReadFile, wire.GoingDown, wire.Failed, wire.HotAdded, wire.HotGone,
)  # fmt: skip
Clock = Callable[[], float]

_process = os.getpid()  # kept, because asking for it is a system call


def _note_fork() -> None:
    global _process
    _process = os.getpid()


os.register_at_fork(after_in_child=_note_fork)


class Connection:
    """Sends requests and receives replies in any order. Contains no lock: its owner holds one, and calls
    `check_process` before each use.

    After an error of the connection itself (`Unavailable`, `ProtocolError`) it stays `broken`.
    """

    def __init__(self, sock: socket.socket, clock: Clock, timeout_s: float) -> None:
        self._sock = sock
        # Blocking, with a limit in the kernel: a timeout of Python's socket costs a system call more.
        sock.setblocking(True)
        limit = TIMEVAL.pack(0, int(min(timeout_s, FIRST_WAIT_S) * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._readable = _poll_of(sock, select.POLLIN)
        self._writable = _poll_of(sock, select.POLLOUT)
        self.clock = clock
        self.timeout_s = timeout_s
        self._process = _process
        self._framer = wire.Framer()
        self._frame = bytearray(wire.LENGTH.size)  # the request that is being sent
        self._backlog = bytearray()
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._buffers = [self._buffer]
        self._fds: deque[int] = deque()
        self._replies: dict[int, wire.Reply] = {}
        self._expected: set[int] = set()
        self._delayed: set[int] = set()  # requests whose answers `poll` leaves to `look_for`
        self._rests = self._next_rests = 0  # requests that sleep at once
        self.broken: str = ""
        # Broken by the daemon's end, because it did not answer, or by an interrupt: connect again.
        self.is_lost = False
        self.extents: deque[tuple[int, int, int, int]] = deque()
        # Memory of a GPU, with two descriptors; or the index of such memory that is gone.
        self.hot: deque[tuple[int, str, int, int, int] | int] = deque()
        self.files = ReadFiles()

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when `poll` has something to receive."""
        return self._sock.fileno()

    def send(self, message: wire.Message) -> int:
        """Send one request and return its id, by which `wait` and `poll` identify the answer. Raises
        InvalidArgument for a request that is not valid on the wire."""
        self._check_usable()
        frame = checked_frame(message, self._frame)
        try:
            if self._backlog:
                self._backlog += frame
                self._send_all(self._backlog)
                self._backlog.clear()
            elif (sent := self._send(frame)) < len(frame):
                self._send_all(frame, sent)
        except TimeoutError as error:
            raise self.give_up(
                f"the daemon did not read a request within {self.timeout_s} s", lost=True
            ) from error
        except OSError as error:
            raise self._lost(error) from error
        except BaseException:
            self.give_up("sending a request was interrupted", lost=True)
            raise
        request_id = message.id
        if request_id:
            self._expected.add(request_id)
        return request_id

    def send_descriptor(self, message: wire.Message, fd: int) -> int:
        """Send one small request with a descriptor, and return its id, as `send` does."""
        self._check_usable()
        frame = checked_frame(message)
        try:
            sent = socket.send_fds(self._sock, [frame], [fd])
            self._send_all(frame, sent)
        except OSError as error:
            raise self._lost(error) from error
        self._expected.add(message.id)
        return message.id

    def _send(self, data: bytearray | memoryview) -> int:
        """Send what the socket accepts now. Returns how many bytes that is."""
        try:
            return self._sock.send(data, DONT_WAIT)
        except BlockingIOError:
            return 0

    def _send_all(self, data: bytearray, sent: int = 0) -> None:
        """Send the data after its first `sent` bytes. Raises TimeoutError at the deadline."""
        deadline = self.clock() + self.timeout_s
        with memoryview(data) as whole:
            while sent < len(whole):
                left_s = deadline - self.clock()
                if left_s <= 0 or not self._writable.poll(min(left_s, LONGEST_WAIT_S) * 1000):
                    raise TimeoutError
                with whole[sent:] as rest:
                    sent += self._send(rest)

    def begin(self, request_id: int, frame: bytearray) -> None:
        """Send one frame of `checked_frame` without waiting. What the socket does not accept now is sent by
        later calls. If the backlog exceeds its limit, the connection is broken."""
        self._check_usable()
        # One frame of any size may wait: the limit detects a daemon that does not read.
        if len(self._backlog) > LIMIT_BACKLOG_BYTES:
            self.push()
            if len(self._backlog) > LIMIT_BACKLOG_BYTES:
                raise self.give_up(
                    f"the daemon does not read: {len(self._backlog)} bytes of requests are waiting"
                )
        self._backlog += frame
        if request_id:
            self._expected.add(request_id)
        self.push()

    @property
    def backlog_bytes(self) -> int:
        """Bytes that `begin` has not sent yet."""
        return len(self._backlog)

    def push(self) -> None:
        """Send as much of the backlog as the socket accepts now."""
        try:
            while self._backlog:
                sent = self._sock.send(self._backlog, DONT_WAIT)
                del self._backlog[:sent]
        except BlockingIOError:
            pass
        except OSError as error:
            raise self._lost(error) from error
        except BaseException:
            self.give_up("sending a request was interrupted", lost=True)
            raise

    def _lost(self, error: OSError) -> Unavailable:
        # The daemon may have sent the reason before it disconnected.
        with contextlib.suppress(Unavailable, ProtocolError):
            while self._receive(DONT_WAIT):
                pass
        return self.give_up(self.broken or f"connection lost: {error}", lost=True)

    def wait(self, request_id: int) -> wire.Reply:
        """Wait for the reply to this request and return it. Raises Refused if the daemon refuses it."""
        deadline = self.clock() + self.timeout_s
        try:
            if request_id not in self._replies and not _came_soon(self, request_id):
                self._receive(0)  # usually all of the reply
            while request_id not in self._replies:
                left_s = deadline - self.clock()
                if left_s <= 0 or not self._readable.poll(min(left_s, LONGEST_WAIT_S) * 1000):
                    raise self.give_up(
                        f"the daemon did not answer within {self.timeout_s} s", lost=True
                    )
                self._receive(DONT_WAIT)
        except (KvtierError, OSError):
            raise
        except BaseException:
            # No caller will take this answer. Closing the connection ends what the answer grants.
            self.give_up("waiting for an answer was interrupted", lost=True)
            raise
        reply = self._replies.pop(request_id)
        if isinstance(reply, wire.Failed):
            raise Refused(reply.code, reply.text)
        return reply

    def poll(self) -> dict[int, wire.Reply]:
        """Return the replies that have arrived and that `wait` has not taken. Never blocks."""
        self._check_usable()
        self.push()
        try:
            while self._receive(DONT_WAIT):
                pass
        except (KvtierError, OSError):
            raise
        except BaseException:
            # Part of an answer may be lost.
            self.give_up("polling for answers was interrupted", lost=True)
            raise
        replies, self._replies = self._replies, {}
        for request_id in self._delayed & replies.keys():
            self._replies[request_id] = replies.pop(request_id)
        return replies

    def _receive(self, flags: int) -> bool:
        """Receive and decode what has arrived, at once or within FIRST_WAIT_S; whether anything had."""
        self._check_usable()
        try:
            count, control, flags, _ = self._sock.recvmsg_into(
                self._buffers, ANCILLARY_BYTES, CLOSE_ON_EXEC | flags
            )
        except BlockingIOError:
            return False
        except OSError as error:
            raise self.give_up(f"connection lost: {error}", lost=True) from error
        for level, kind, data in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                whole = len(data) - len(data) % struct.calcsize("i")
                self._fds.extend(array.array("i", data[:whole]))
        if flags & TRUNCATED:
            raise self.give_up("file descriptors were lost: raise the limit of open files")
        if count == 0:
            raise self.give_up("the daemon closed the connection", lost=True)
        framer = self._framer
        try:
            body: bytes | memoryview | None = framer.push_and_take(self._buffer[:count])
            while body is not None:
                self._take(wire.decode_reply(body))
                body = framer.take()
        except ProtocolError as error:
            self.give_up(str(error))
            raise
        return True

    def _take(self, reply: wire.Reply) -> None:
        if reply.id in self._expected and type(reply) is not wire.Failed:
            self._expected.discard(reply.id)
            self._replies[reply.id] = reply
        elif isinstance(reply, UNSOLICITED):
            self._take_unsolicited(reply)

    def _take_unsolicited(
        self,
        reply: wire.ExtentAdded
        | wire.DirectReadFile
        | wire.GoingDown
        | wire.Failed
        | wire.HotAdded
        | wire.HotGone,
    ) -> None:
        if isinstance(reply, wire.ExtentAdded | wire.HotAdded):
            if len(self._fds) < 2:
                raise ProtocolError(f"extent {reply.index} arrived without its file descriptors")
            fds = self._fds.popleft(), self._fds.popleft()
            if isinstance(reply, wire.HotAdded):
                self.hot.append((reply.index, reply.gpu, reply.bytes, *fds))
            else:
                self.extents.append((reply.index, reply.bytes, *fds))
        elif isinstance(reply, wire.HotGone):
            self.hot.append(reply.index)
        elif isinstance(reply, wire.DirectReadFile):
            if not self._fds:
                raise ProtocolError(f"file {reply.file} arrived without its file descriptor")
            self.files.add(ReadFile(reply.file, reply.bytes, self._fds.popleft()))
        elif isinstance(reply, wire.GoingDown):
            self.give_up(f"the daemon is stopping: {reply.reason}", lost=True)
        elif reply.fatal:
            self.give_up(reply.text)
            self._replies[reply.id] = reply
        elif reply.id in self._expected:
            self._expected.discard(reply.id)
            self._replies[reply.id] = reply

    @property
    def inherited(self) -> bool:
        """Whether this process is a forked child, and the connection belongs to its parent."""
        return self._process != _process

    def check_process(self) -> None:
        """Raise Unavailable in a forked child. Takes no lock: a thread of the parent may have held it."""
        if self._process != _process:
            raise Unavailable("connected before a fork: connect again in the child")

    def _check_usable(self) -> None:
        if self.broken:
            raise Unavailable(self.broken)

    def give_up(self, why: str, lost: bool = False) -> Unavailable:
        """Mark the connection as broken for this reason, and return the error to raise."""
        self.is_lost = self.is_lost or (lost and not self.broken)
        self.broken = self.broken or why
        with contextlib.suppress(OSError):
            # The daemon ends the session now, not when the socket is closed.
            self._sock.shutdown(socket.SHUT_RDWR)
        return Unavailable(why)

    def close(self, farewell: bool) -> bool:
        """Close the connection. `farewell` sends Bye, a promise that no thread of this client accesses a slot
        from now on. Returns True if it was sent, or if this is a forked child, which must not send it."""
        said = False
        # After part of a frame, the daemon would read a Bye as the rest of that frame.
        if farewell and not self.broken and not self.inherited and not self._backlog:
            with contextlib.suppress(OSError):
                bye = wire.encode(wire.Bye(0))
                said = self._sock.send(bye, DONT_WAIT) == len(bye)
        self.broken, self.is_lost = self.broken or "closed", False
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        for _, _, extent_fd, table_fd in self.extents:
            os.close(extent_fd)
            os.close(table_fd)
        self.extents.clear()
        for event in self.hot:
            for fd in () if isinstance(event, int) else event[3:]:
                os.close(fd)
        self.hot.clear()
        self.files.clear()
        self._sock.close()
        return said or self.inherited


def is_quiet(connection: Connection) -> bool:
    """Whether the daemon has this connection, and has sent nothing that was not received."""
    try:
        connection._sock.recv(1, socket.MSG_PEEK | DONT_WAIT)
    except BlockingIOError:
        return not connection.broken
    except OSError:
        pass
    return False


def _came_soon(connection: Connection, request_id: int) -> bool:
    """Look for the answer without sleeping, for a short time; return whether it came. Never yields the
    processor: on a busy machine it would come back milliseconds later."""
    if connection._rests:
        connection._rests -= 1
        return False
    until = time.perf_counter() + LOOK_S
    while not connection._receive(DONT_WAIT) or request_id not in connection._replies:
        if time.perf_counter() >= until:
            connection._rests = connection._next_rests = min(
                2 * connection._next_rests + 1, MOST_RESTS
            )
            return False
    connection._next_rests = 0
    return True


def begin_delayed(connection: Connection, message: wire.Message) -> select.poll:
    """Send one request, whose answer only `look_for` returns. What this returns becomes readable when the
    answer may have arrived; a thread without the lock may use it."""
    connection._delayed.add(message.id)
    try:
        connection.send(message)
    except BaseException:
        connection._delayed.discard(message.id)
        raise
    return _poll_of(connection._sock, select.POLLIN)


def look_for(connection: Connection, request_id: int) -> wire.Reply | None:
    """Return the answer to a request of `begin_delayed`, if it has arrived. Never blocks. Raises Refused if
    the daemon refuses the request."""
    connection._check_usable()
    while request_id not in connection._replies and connection._receive(DONT_WAIT):
        pass
    reply = connection._replies.pop(request_id, None)
    if reply is not None:
        connection._delayed.discard(request_id)
    if isinstance(reply, wire.Failed):
        raise Refused(reply.code, reply.text)
    return reply


def connect(path: str, timeout_s: float, clock: Clock) -> socket.socket:
    """Return a socket that is connected to the daemon at this path. Raises Unavailable at the time limit."""
    if "\0" in path:
        raise InvalidArgument(f"socket: {path!r} has a zero byte")
    if (nbytes := len(os.fsencode(path))) > wire.LIMIT_SOCKET_PATH:
        most = wire.LIMIT_SOCKET_PATH
        text = f"{path} has {nbytes} bytes, a socket's path has at most {most}: use a shorter one"
        raise Unavailable(text)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    deadline = clock() + timeout_s
    try:
        sock.settimeout(timeout_s)
        while True:
            try:
                sock.connect(path)
                return sock
            except BlockingIOError:
                # The daemon runs, but its backlog of connections is full.
                if clock() >= deadline:
                    raise
                time.sleep(CONNECT_PAUSE_S)
    except OSError as error:
        sock.close()
        if isinstance(error, PermissionError):
            text = (
                f"uid {os.geteuid()} may not connect to {path}: `kvtier status` says what to change"
            )
        else:
            reason = error.strerror or str(error)
            text = f"no daemon at {path}: {reason}; is `kvtier serve` running?"
        raise Unavailable(text) from error


def checked_frame(message: wire.Message, frame: bytearray | None = None) -> bytearray:
    """Return the frame of a request, in this buffer or a new one. Raises InvalidArgument if a field has a
    type or a size that is not valid on the wire."""
    frame = bytearray(wire.LENGTH.size) if frame is None else frame
    try:
        wire.encode_into(message, frame)
        if not wire.is_plain(message):
            with memoryview(frame) as whole, whole[wire.LENGTH.size :] as body:
                wire.decode_request(body)
    except (ProtocolError, OverflowError, TypeError, ValueError) as error:
        raise InvalidArgument(f"{type(message).__name__}: {error}") from error
    return frame


def _poll_of(sock: socket.socket, event: int) -> select.poll:
    poll = select.poll()
    poll.register(sock, event)
    return poll
