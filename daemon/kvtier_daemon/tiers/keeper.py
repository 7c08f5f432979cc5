"""A process that holds a daemon's descriptors while no daemon runs: `python keeper.py PATH SECONDS`.

It listens at PATH for daemons of its own user. A daemon puts descriptors under names; the next daemon takes
all of them. The process ends when no daemon has been connected for SECONDS, or when it holds nothing for the
next one; then the kernel frees the memory behind the descriptors. It imports the standard library only, so
that it needs little memory itself.
"""

import contextlib
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from pathlib import Path

MESSAGE_BYTES = 256
LIMIT_FDS = 16_000
PATIENCE_S = 5.0
PEER = struct.Struct("=iII")  # struct ucred: pid, uid, gid
PUT, REMOVE, TAKE, END = b"P", b"R", b"T", b"E"


class Keeper:
    def __init__(self, listener: socket.socket, idle_s: float) -> None:
        self._listener = listener
        self._idle_s = idle_s
        self._held: dict[bytes, int] = {}
        self._daemons: dict[int, socket.socket] = {}
        self._poll = select.poll()  # select() refuses descriptors from 1024 on
        self._poll.register(listener, select.POLLIN)
        self._idle_since = time.monotonic()
        self._is_new = True  # no daemon has been connected

    def run(self) -> None:
        """Serve until no daemon has been connected for `idle_s`."""
        while self._daemons or self._held or self._is_new:
            left_s = max(0.0, self._idle_since + self._idle_s - time.monotonic())
            if not (ready := self._poll.poll(None if self._daemons else left_s * 1000)):
                return
            # All messages of an earlier daemon, which may have ended, before those of a later one.
            for daemon in list(self._daemons.values()):
                while self._serve(daemon):
                    pass
            if any(fd == self._listener.fileno() for fd, _ in ready):
                self._accept()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            daemon, _ = self._listener.accept()
            credentials = daemon.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
            if PEER.unpack(credentials)[1] == os.geteuid():
                daemon.setblocking(False)
                self._daemons[daemon.fileno()] = daemon
                self._poll.register(daemon, select.POLLIN)
                self._is_new = False
            else:
                daemon.close()

    def _serve(self, daemon: socket.socket) -> bool:
        """Carry out one message; return whether there may be more."""
        try:
            message, fds, _, _ = socket.recv_fds(daemon, MESSAGE_BYTES, 1)
            verb, name = message[:1], message[1:]
            if verb == PUT and fds and len(self._held) < LIMIT_FDS:
                self._remove(name)
                self._held[name] = fds.pop()
            elif verb == REMOVE:
                self._remove(name)
            elif verb == TAKE:
                daemon.settimeout(PATIENCE_S)
                for held, fd in self._held.items():
                    socket.send_fds(daemon, [PUT + held], [fd])
                daemon.send(END)
                daemon.setblocking(False)
            for fd in fds:
                os.close(fd)
            if message:
                return True
        except BlockingIOError:
            return False
        except OSError:
            pass
        self._poll.unregister(daemon)
        del self._daemons[daemon.fileno()]
        daemon.close()
        self._idle_since = time.monotonic()
        return False

    def _remove(self, name: bytes) -> None:
        fd = self._held.pop(name, -1)
        if fd >= 0:
            os.close(fd)


def main() -> None:
    path, seconds = Path(sys.argv[1]), float(sys.argv[2])
    listener = socket.socket(fileno=0)  # bound by the daemon, so that it can connect at once
    if os.fork():
        os._exit(0)  # the daemon waits for the parent only
    os.setsid()
    os.chdir("/")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    own = path.stat().st_ino
    Keeper(listener, seconds).run()
    with contextlib.suppress(OSError):
        if path.stat().st_ino == own:
            path.unlink()


if __name__ == "__main__":
    main()
