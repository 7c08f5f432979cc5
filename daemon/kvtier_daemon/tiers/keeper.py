"""A process that holds a daemon's descriptors while no daemon runs: `python keeper.py PATH SECONDS`.

It listens at PATH for daemons of its own user. A daemon puts descriptors under names; the next daemon takes all
of them. When no daemon has been connected for SECONDS, the process ends, and the kernel frees the memory behind
the descriptors. It imports the standard library only, so that it needs little memory and no installed package.
"""

import contextlib
import os
import select
import signal
import socket
import struct
import sys
import time

MESSAGE_BYTES = 256
LIMIT_FDS = 16_000
PEER = struct.Struct("=iII")  # struct ucred: pid, uid, gid
PUT, REMOVE, TAKE, END = b"P", b"R", b"T", b"E"


class Keeper:
    def __init__(self, listener: socket.socket, idle_s: float) -> None:
        self._listener = listener
        self._idle_s = idle_s
        self._held: dict[bytes, int] = {}
        self._daemons: set[socket.socket] = set()
        self._idle_since = time.monotonic()

    def run(self) -> None:
        """Serve until no daemon has been connected for `idle_s`."""
        while True:
            left_s = self._idle_since + self._idle_s - time.monotonic()
            if not self._daemons and left_s <= 0:
                return
            timeout_s = None if self._daemons else left_s
            readable, _, _ = select.select([self._listener, *self._daemons], [], [], timeout_s)
            for one in readable:
                if one is self._listener:
                    self._accept()
                else:
                    self._serve(one)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            daemon, _ = self._listener.accept()
            credentials = daemon.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
            if PEER.unpack(credentials)[1] == os.geteuid():
                self._daemons.add(daemon)
            else:
                daemon.close()

    def _serve(self, daemon: socket.socket) -> None:
        try:
            message, fds, _, _ = socket.recv_fds(daemon, MESSAGE_BYTES, 1)
            verb, name = message[:1], message[1:]
            if verb == PUT and fds and len(self._held) < LIMIT_FDS:
                self._remove(name)
                self._held[name] = fds.pop()
            elif verb == REMOVE:
                self._remove(name)
            elif verb == TAKE:
                for held, fd in self._held.items():
                    socket.send_fds(daemon, [PUT + held], [fd])
                daemon.send(END)
            for fd in fds:
                os.close(fd)
            if message:
                return
        except OSError:
            pass
        self._daemons.discard(daemon)
        daemon.close()
        self._idle_since = time.monotonic()

    def _remove(self, name: bytes) -> None:
        fd = self._held.pop(name, -1)
        if fd >= 0:
            os.close(fd)


def main() -> None:
    path, seconds = sys.argv[1], float(sys.argv[2])
    listener = socket.socket(fileno=0)  # bound by the daemon, so that it can connect at once
    if os.fork():
        os._exit(0)  # the daemon waits for the parent only
    os.setsid()
    os.chdir("/")
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    own = os.stat(path).st_ino
    Keeper(listener, seconds).run()
    with contextlib.suppress(OSError):
        if os.stat(path).st_ino == own:
            os.unlink(path)


if __name__ == "__main__":
    main()
