"""The messages of one session that the socket has not taken yet, and descriptors on their way."""

from __future__ import annotations

import array
import errno
import fcntl
import os
import socket
import struct
import termios
from collections import deque
from collections.abc import Callable, Sequence

from kvtier import wire
from kvtier_daemon.serving.turns import Share, Turns
from kvtier_daemon.tiers.base import Descriptors
from kvtier_daemon.tiers.warm import Extent

PAUSE_S = 0.002
MOST_FDS = 2  # of one message

SENT, BLOCKED, PAUSED, FAILED = range(4)  # results of `Outbox.flush`


class Outbox:
    """Sends in order. Only the session ends the connection."""

    def __init__(self, sock: socket.socket, may_park: Callable[[int], bool]) -> None:
        self._sock = sock
        self._may_park = may_park  # whether this many more descriptors may be in transit
        # An extent or a file is queued as such: its descriptors are created when they can be sent.
        self.unsent: deque[tuple[memoryview, Descriptors | None]] = deque()
        self.nbytes = 0
        self.counted = 0  # of `nbytes`, by `Turns`
        self.sent_bytes = 0
        self.announced = 0  # extents that the client has
        self.is_blocked = False
        self.parked = 0  # descriptors that the client has not received
        self._parked_at = 0  # `sent_bytes` after the last descriptor

    def queue(self, frame: memoryview, of: Descriptors | None = None) -> None:
        self.unsent.append((frame, of))
        self.nbytes += len(frame)

    def announces(self, extents: Sequence[Extent]) -> bool:
        """Queue the extents that the client does not have yet, except empty ones; return whether there were
        any. They precede the next answer, because a client that asks nothing reads nothing."""
        known, self.announced = self.announced, len(extents)
        some = [index for index in range(known, len(extents)) if not extents[index].is_empty]
        for index in some:
            added = wire.ExtentAdded(0, index, extents[index].nbytes)
            self.queue(memoryview(wire.encode(added)), extents[index])
        return bool(some)

    def flush(self, read_only: bool) -> int:
        """Send as much as the socket takes now."""
        while self.unsent:
            data, of = self.unsent[0]
            if of is not None and not self._may_park(MOST_FDS):
                return PAUSED
            try:
                if of is not None:
                    sent = self._send_with_descriptors(data, of, read_only)
                else:
                    sent = self._sock.send(data)
            except (BlockingIOError, InterruptedError):
                self.is_blocked = True
                return BLOCKED
            except OSError as error:
                full = (errno.ETOOMANYREFS, errno.EMFILE, errno.ENFILE)
                return PAUSED if error.errno in full else FAILED
            self.is_blocked = False
            self.sent_bytes += sent
            self.nbytes -= sent
            if of is not None:
                self.parked += MOST_FDS
                self._parked_at = self.sent_bytes
            if sent < len(data):
                self.unsent[0] = (data[sent:], None)
            else:
                self.unsent.popleft()
        return SENT

    def _send_with_descriptors(self, data: memoryview, of: Descriptors, read_only: bool) -> int:
        fds = of.handles(read_only)
        try:
            control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))]
            return self._sock.sendmsg([data], control)
        finally:
            for fd in fds:
                os.close(fd)

    def count(self, turns: Turns, share: Share) -> None:
        """Report the change of `nbytes` since the last call."""
        more, self.counted = self.nbytes - self.counted, self.nbytes
        if more:
            turns.unsent(share, more)

    def update_parked(self) -> None:
        """Check whether the client has received its descriptors."""
        waiting = array.array("i", [0])
        try:
            fcntl.ioctl(self._sock.fileno(), termios.TIOCOUTQ, waiting)
        except OSError:
            return
        # The kernel counts at least the bytes that were not read. If these are at most the bytes that were
        # sent after the descriptors, the descriptors have been read.
        if waiting[0] <= self.sent_bytes - self._parked_at:
            self.parked = 0

    def clear(self) -> None:
        self.unsent.clear()
        self.nbytes = self.parked = 0
