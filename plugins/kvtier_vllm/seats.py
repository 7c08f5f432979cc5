"""Which ranks can read what the daemon would promise."""

from __future__ import annotations

from kvtier.client import Lease
from kvtier_vllm.line import Session
from kvtier_vllm.messages import Seat


class Seats:
    """Where the ranks of an engine are, as they report it."""

    def __init__(self, ranks: int) -> None:
        self.by_rank: dict[int, Seat] = {}
        self._ranks = ranks
        self._away_since: float | None = None

    @property
    def taken(self) -> bool:
        """Whether every rank has had one."""
        return len(self.by_rank) == self._ranks

    def read(self, session: Session, lease: Lease) -> bool:
        """Whether every rank can read these slots."""
        if not self.taken:
            return False
        seats, run = self.by_rank.values(), session.reader.daemon_run
        if any(seat.daemon_run != run for seat in seats):
            return False
        least = min(seat.extents for seat in seats)
        return least >= session.reader.extents or least >= lease.extents

    def here(self) -> None:
        """All can read what is to be read."""
        self._away_since = None

    def away_s(self, now: float) -> float:
        """How long some rank could not read what was to be read: it can't now."""
        if self._away_since is None:
            self._away_since = now
        return now - self._away_since
