"""Notes for the next daemon which processes may write to slots, and watches those of earlier daemons."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvtier_daemon.catalog import SessionId
from kvtier_daemon.serving.peer import Peer
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.kept_arena import KeptArena, KeptSession

# How long slots that a device writes to stay in quarantine after the end of the process. A child that has
# inherited its descriptors keeps the device's work alive: queued copies still run, for milliseconds.
DEVICE_HOLD_S = 2.0


@dataclass(slots=True)
class EarlierSession:
    """Of an earlier daemon. `pidfd` is -1 if the end of its process cannot be detected, or if it has ended.
    `freeing`: it has ended, and its device may still write."""

    tenant: Tenant
    noted: KeptSession
    pidfd: int
    freeing: asyncio.TimerHandle | None = None


class Writers:
    """Without `kept`, no memory survives this daemon, and nothing is noted."""

    def __init__(self, loop: asyncio.AbstractEventLoop, kept: KeptArena | None = None) -> None:
        self._loop = loop
        self._kept = kept
        self._pid_namespace = Path("/proc/self/ns/pid").stat().st_ino if kept is not None else 0
        self.next_session = kept.next_session if kept is not None else 1
        self._earlier: dict[SessionId, EarlierSession] = {}

    def began(
        self, session: SessionId, tenant: Tenant, token: bytes, peer: Peer, device: bool
    ) -> None:
        """The session may write from now on."""
        if self._kept is not None:
            process = os.fstat(peer.pidfd).st_ino if peer.pidfd >= 0 else 0
            noted = KeptSession(tenant.name, token, peer.pid, self._pid_namespace, process, device)
            self._kept.session_began(session, noted)

    def ended(self, session: SessionId) -> None:
        """The session does not write any longer."""
        if self._kept is not None:
            self._kept.session_ended(session)

    def watch(self, tenant: Tenant, sessions: Iterable[SessionId]) -> None:
        """These sessions of earlier daemons hold slots of the tenant: free them when their processes end."""
        assert self._kept is not None
        for session in sessions:
            noted = before = self._kept.earlier_sessions.get(session)
            pidfd = -1
            # 0 is a process outside the daemon's pid namespace. Another daemon's namespace has other numbers.
            if noted is not None and noted.pid and noted.pid_namespace == self._pid_namespace:
                try:
                    pidfd = os.pidfd_open(noted.pid)
                except ProcessLookupError:
                    noted = None
                else:
                    # Since Linux 6.9 each process has a number of its own there: the pid has another one now.
                    if os.fstat(pidfd).st_ino != noted.process:
                        os.close(pidfd)
                        noted = None
            if noted is None and before is not None and before.device:
                # Perhaps it ended just now.
                self._earlier[session] = EarlierSession(tenant, before, -1)
                self._process_ended(session)
                continue
            if noted is None:
                tenant.catalog.process_gone(session)
                continue
            self._earlier[session] = EarlierSession(tenant, noted, pidfd)
            if pidfd >= 0:
                self._loop.add_reader(pidfd, self._process_ended, session)

    def forget_others(self) -> None:
        """Let the next manifest contain only the earlier sessions that hold slots."""
        assert self._kept is not None
        self._kept.forget_sessions(self._kept.earlier_sessions.keys() - self._earlier.keys())

    def end_for_good(self, tenant: Tenant | None, token: bytes) -> None:
        """A client declares that no thread of it writes to slots of the session with this token."""
        for session in self._with(tenant, token):
            self._gone(session)

    def with_token(self, tenant: Tenant, token: bytes, pid: int) -> list[SessionId]:
        """Return the earlier sessions with this token, of this process."""
        return [
            session
            for session in self._with(tenant, token)
            if self._earlier[session].noted.pid == pid
            and self._earlier[session].noted.pid_namespace == self._pid_namespace
        ]

    def take(self, session: SessionId) -> None:
        """Another session has the slots of this earlier one."""
        self._stop_watching(session)
        self.ended(session)

    def end_all(self, tenant: Tenant) -> None:
        """No slot of the tenant that such a process may write to is used again."""
        for session, one in list(self._earlier.items()):
            if one.tenant is tenant:
                self._gone(session)

    def close(self) -> None:
        """Watch no process any longer, and leave the notes as they are."""
        self._kept = None
        for session in list(self._earlier):
            self._stop_watching(session)

    def _with(self, tenant: Tenant | None, token: bytes) -> list[SessionId]:
        return [
            session
            for session, one in self._earlier.items()
            if one.noted.token == token and one.tenant is tenant
        ]

    def by_device(self, session: SessionId) -> bool:
        """Whether a device writes to the slots of this earlier session."""
        return self._earlier[session].noted.device

    def _process_ended(self, session: SessionId) -> None:
        one = self._earlier[session]
        if not one.noted.device:
            self._gone(session)
            return
        if one.pidfd >= 0:
            self._loop.remove_reader(one.pidfd)  # it stays readable
        one.freeing = self._loop.call_later(DEVICE_HOLD_S, self._gone, session)

    def _gone(self, session: SessionId) -> None:
        tenant = self._stop_watching(session)
        tenant.catalog.process_gone(session)
        self.ended(session)

    def _stop_watching(self, session: SessionId) -> Tenant:
        one = self._earlier.pop(session)
        if one.freeing is not None:
            one.freeing.cancel()
        if one.pidfd >= 0:
            self._loop.remove_reader(one.pidfd)
            os.close(one.pidfd)
        return one.tenant
