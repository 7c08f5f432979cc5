"""The process of a client, as the kernel reports it."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from dataclasses import dataclass

from kvtier_daemon.config.members import Role
from kvtier_daemon.tenant import Tenant

SO_PEERGROUPS, SO_PEERPIDFD = 59, 77  # Linux 4.13 and 6.5; not names in the socket module
GROUP = struct.Struct("=I")
GROUPS_BYTES = 1024  # the most that Python's getsockopt returns: 256 groups
UCRED = struct.Struct("iII")  # pid, uid, gid


Mapper = tuple[int, tuple[int, ...], Role]  # user, groups and role


@dataclass(slots=True)
class Peer:
    """A process. `pidfd` becomes readable when it ends; it is -1 if the process has ended."""

    pid: int
    uid: int
    pidfd: int
    tenant: Tenant | None = None
    role: Role = Role.READ  # in its tenant
    groups: tuple[int, ...] = ()

    @classmethod
    def of(cls, sock: socket.socket) -> Peer:
        """The process that connected. Raises OSError if its end cannot be detected: such a client must not be
        served, because it would be unknown when its slots are free."""
        pid, uid, gid = UCRED.unpack(
            sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED.size)
        )
        return cls(pid, uid, _pidfd(sock, pid), groups=(gid, *_groups(sock)))

    @property
    def privileged(self) -> bool:
        """Root and the daemon's user may ask about every tenant, and need no tenant."""
        return self.uid in (0, os.getuid())

    @property
    def mapper(self) -> Mapper:
        return self.uid, self.groups, self.role

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


def _groups(sock: socket.socket) -> tuple[int, ...]:
    """The supplementary groups of the process when it connected; none if the kernel cannot tell, or if there
    are too many: then only its user and its primary group count."""
    try:
        packed = sock.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, GROUPS_BYTES)
    except OSError:
        return ()
    return tuple(group for (group,) in GROUP.iter_unpack(packed))


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
