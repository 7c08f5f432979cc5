"""The process of a client, as the kernel reports it."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from dataclasses import dataclass

from kvtier_daemon.tenant import Tenant

SO_PEERPIDFD = 77  # Linux 6.5; not yet a name in the socket module
UCRED = struct.Struct("iII")  # pid, uid, gid


@dataclass(slots=True)
class Peer:
    """A process. `pidfd` becomes readable when it ends; it is -1 if the process has ended."""

    pid: int
    uid: int
    pidfd: int
    tenant: Tenant | None = None

    @classmethod
    def of(cls, sock: socket.socket) -> Peer:
        """The process that connected. Raises OSError if its end cannot be detected: such a client must not be
        served, because it would be unknown when its slots are free."""
        pid, uid, _ = UCRED.unpack(
            sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED.size)
        )
        return cls(pid, uid, _pidfd(sock, pid))

    @property
    def privileged(self) -> bool:
        """Root and the daemon's user may ask about every tenant, and need no tenant."""
        return self.uid in (0, os.getuid())

    @property
    def gone(self) -> bool:
        if self.pidfd < 0:
            return True
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def _pidfd(sock: socket.socket, pid: int) -> int:
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, struct.calcsize("i"))
        (pidfd,) = struct.unpack("i", raw)
        return int(pidfd)
    except OSError as error:
        if error.errno not in (errno.ENOPROTOOPT, errno.ENODATA, errno.EINVAL, errno.ESRCH):
            raise
    # A kernel before 6.5, or a process that has ended.
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return -1
