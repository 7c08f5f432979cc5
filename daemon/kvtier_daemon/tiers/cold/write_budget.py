"""Limits the bytes that are written in a day, because writes wear disks out. No I/O, no clock of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

SCARCE, PLENTY = 1 / 2, 3 / 4  # of an hour's budget
SECOND_CHANCE = 0.25  # of the bytes that are written first may be written again
SECOND_CHANCE_MOST = 4 << 30
DAY_S = 86_400.0
HOUR_S = 3600.0


class WriteBudget:
    """The bytes that may be written per day. Unused bytes add up for at most an hour. A part of them may be
    copies of blocks that were requested again (`second_chance_bytes`)."""

    def __init__(self, daily_bytes: int, clock: Callable[[], float]) -> None:
        self._rate = daily_bytes / DAY_S
        self._most = daily_bytes / 24
        self._clock = clock
        self._left = self._most
        self._at = clock()
        self.second_chance_bytes = 0.0
        self._hours: deque[tuple[int, int]] = deque()  # number of the hour, bytes

    def limit(self, daily_bytes: int) -> None:
        """Set the limit. The bytes left for this hour stay, as far as the new limit permits."""
        before = self._most
        left = self.left() if before else float("inf")
        self._rate, self._most = daily_bytes / DAY_S, daily_bytes / 24
        self._left = min(left, self._most)
        self._at = self._clock()

    def inherit(self, other: WriteBudget) -> None:
        """Continue the account of an earlier budget."""
        self._left, self._at = min(other._left, self._most), other._at
        self._hours = other._hours

    @property
    def is_limited(self) -> bool:
        return self._rate > 0

    @property
    def scarce(self) -> float:
        """If fewer bytes than this are left, only some blocks should be written."""
        return self._most * SCARCE

    @property
    def plenty(self) -> float:
        """If more bytes than this are left, blocks may be written that are not close to eviction."""
        return self._most * PLENTY

    def left(self) -> float:
        """How many bytes may be written now."""
        if not self._rate:
            return float("inf")
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._at) * self._rate)
        self._at = now
        return self._left

    def spend(self, nbytes: int) -> None:
        """Note first writes of blocks."""
        second = self.second_chance_bytes + SECOND_CHANCE * nbytes
        self.second_chance_bytes = min(second, SECOND_CHANCE_MOST)
        self._spend(nbytes)

    def spend_again(self, nbytes: int) -> None:
        """Note copies of blocks that were requested again."""
        self.second_chance_bytes -= nbytes
        self._spend(nbytes)

    def _spend(self, nbytes: int) -> None:
        if self._rate:
            self._left -= nbytes
        hour, spent = int(self._clock() // HOUR_S), 0
        if self._hours and self._hours[-1][0] == hour:
            _, spent = self._hours.pop()
        self._hours.append((hour, spent + nbytes))

    def day_bytes(self) -> int:
        """How many bytes were written in this hour and the 23 before it."""
        while self._hours and self._hours[0][0] <= self._clock() // HOUR_S - 24:
            self._hours.popleft()
        return sum(nbytes for _, nbytes in self._hours)
