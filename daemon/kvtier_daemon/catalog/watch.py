"""The changes of one space that a session has not taken yet: a bounded queue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvtier.wire import CHANGE

LIMIT_KEPT: Final = 16_384  # 40 bytes each


@dataclass(slots=True, eq=False)
class SpaceWatch:
    """One session's queue. `wake` is called when the first change arrives."""

    wake: Callable[[], None]
    kept: bytearray = field(default_factory=bytearray)
    missed: int = 0

    def note(self, change: bytes) -> None:
        if len(self.kept) >= LIMIT_KEPT * CHANGE.size:
            self.missed += len(self.kept) // CHANGE.size
            self.kept.clear()
        self.kept += change
        if len(self.kept) == CHANGE.size:
            self.wake()

    def take(self, limit: int) -> tuple[int, bytes]:
        """How many changes were dropped, and the oldest changes after those."""
        missed, self.missed = self.missed, 0
        taken = bytes(self.kept[: limit * CHANGE.size])
        del self.kept[: len(taken)]
        return missed, taken
