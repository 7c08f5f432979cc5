"""Notes for the next daemon which processes may write to slots, and watches those of earlier daemons."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable

from kvtier_daemon.catalog import SessionId
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.kept_arena import KeptArena, KeptSession


class Writers:
    """Without `kept`, no memory survives this daemon, and nothing is noted."""

    def __init__(self, loop: asyncio.AbstractEventLoop, kept: KeptArena | None = None) -> None:
        self._loop = loop
        self._kept = kept
        self.next_session = kept.next_session if kept is not None else 1
        self._earlier: dict[SessionId, tuple[Tenant, bytes, int]] = {}  # tenant, token, pidfd or -1

    def began(self, session: SessionId, tenant: Tenant, token: bytes, pid: int) -> None:
        """The session may write from now on."""
        if self._kept is not None:
            self._kept.session_began(session, KeptSession(tenant.name, token, pid))

    def ended(self, session: SessionId) -> None:
        """The session does not write any longer."""
        if self._kept is not None:
            self._kept.session_ended(session)

    def watch(self, tenant: Tenant, sessions: Iterable[SessionId]) -> None:
        """These sessions of earlier daemons hold slots of the tenant: free them when their processes end."""
        assert self._kept is not None
        for session in sessions:
            known = self._kept.earlier_sessions.get(session)
            pidfd = -1
            if known is not None and known.pid:  # 0: a process in another pid namespace
                try:
                    pidfd = os.pidfd_open(known.pid)
                except ProcessLookupError:
                    known = None
            if known is None:
                tenant.catalog.process_gone(session)
                continue
            self._earlier[session] = tenant, known.token, pidfd
            if pidfd >= 0:
                self._loop.add_reader(pidfd, self._gone, session)

    def forget_others(self) -> None:
        """Note only the earlier sessions that hold slots."""
        assert self._kept is not None
        for session in self._kept.earlier_sessions.keys() - self._earlier.keys():
            self._kept.session_ended(session)

    def end_for_good(self, tenant: Tenant | None, token: bytes) -> None:
        """A client declares that no thread of it writes to slots of the session with this token."""
        for session, (owner, own, _) in list(self._earlier.items()):
            if own == token and owner is tenant:
                self._gone(session)

    def end_all(self, tenant: Tenant) -> None:
        """No slot of the tenant that such a process may write to is used again."""
        for session, (owner, _, _) in list(self._earlier.items()):
            if owner is tenant:
                self._gone(session)

    def close(self) -> None:
        """Watch no process any longer, and leave the notes as they are."""
        self._kept = None
        for _, _, pidfd in self._earlier.values():
            if pidfd >= 0:
                self._loop.remove_reader(pidfd)
                os.close(pidfd)
        self._earlier.clear()

    def _gone(self, session: SessionId) -> None:
        tenant, _, pidfd = self._earlier.pop(session)
        if pidfd >= 0:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
        tenant.catalog.process_gone(session)
        self.ended(session)
