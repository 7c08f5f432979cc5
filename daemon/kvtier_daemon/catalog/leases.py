"""Which session has which leases, for reading and for writing, and their limits."""

from __future__ import annotations

from typing import NewType

from kvtier.errors import Refused

LeaseId = NewType("LeaseId", int)
SessionId = NewType("SessionId", int)

LIMIT_LEASES = 32_768  # the store counts no more than 65,534 on a block
LIMIT_SESSION_LEASES = 4096
NOBODY = SessionId(0)  # the session of pins
NO_LEASE = LeaseId(0)


class Leases:
    """Numbers and counts the leases of one tenant. A lease can have several sessions."""

    def __init__(self) -> None:
        self._of: dict[SessionId, set[LeaseId]] = {}
        self._last = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def check(self, session: SessionId) -> None:
        """Raise Refused if another lease would exceed a limit."""
        if self._count >= LIMIT_LEASES:
            raise Refused("too_many", f"this tenant has {LIMIT_LEASES} leases already")
        if session != NOBODY and len(self._of.get(session, ())) >= LIMIT_SESSION_LEASES:
            raise Refused("too_many", f"this session has {LIMIT_SESSION_LEASES} leases already")

    def make(self, session: SessionId) -> LeaseId:
        self._last += 1
        self._count += 1
        self.join(session, LeaseId(self._last))
        return LeaseId(self._last)

    def join(self, session: SessionId, lease: LeaseId) -> None:
        self._of.setdefault(session, set()).add(lease)

    def leave(self, session: SessionId, lease: LeaseId) -> None:
        """The session no longer has this lease."""
        leases = self._of.get(session)
        if leases is not None:
            leases.discard(lease)
            if not leases:
                del self._of[session]

    def ended(self) -> None:
        self._count -= 1

    def existed(self, lease: LeaseId) -> bool:
        return 0 < lease <= self._last

    def of(self, session: SessionId) -> list[LeaseId]:
        return sorted(self._of.get(session, ()))
