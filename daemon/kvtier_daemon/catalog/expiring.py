"""Blocks with an expiry time, and which of them are due. They are in memory only.

An expiry time is rounded down by at most a thousandth of the TTL, so that there are at most 2,048 different
times for each power of two of a TTL.
"""

from __future__ import annotations

import heapq
import math
from array import array
from itertools import compress, islice

LIMIT_IDS = 1 << 18  # blocks of a tenant that have an expiry time
LIMIT_DUE_IDS = 1 << 14  # per call: some milliseconds
TIMES_PER_TTL = 1024


class Expiring:
    """The expiry times of one tenant's blocks. Only this class changes `time_of` and `times`."""

    def __init__(self) -> None:
        self.time_of: dict[int, float] = {}
        self._at: dict[float, dict[int, None]] = {}
        self.times: list[float] = []  # a heap of the keys of `_at`
        self.late = False  # more blocks are due than one call returned

    def __len__(self) -> int:
        return len(self.time_of)

    def add(self, ids: bytes, expires_at: float) -> None:
        """These new blocks are due at that time."""
        if expires_at not in self._at:
            self._at[expires_at] = {}
            heapq.heappush(self.times, expires_at)
        new = array("I", ids)
        self._at[expires_at].update(dict.fromkeys(new))
        self.time_of.update(dict.fromkeys(new, expires_at))

    def drop(self, ids: bytes) -> None:
        """These blocks are gone or forgotten; their ids may be reused."""
        for one in array("I", ids) if self.time_of else ():
            if (at := self.time_of.pop(one, None)) is not None:
                del self._at[at][one]

    def lasting(self, ids: bytes) -> bytes:
        """The blocks of these that have no expiry time."""
        if not self.time_of:
            return ids
        mine = array("I", ids)
        return array("I", compress(mine, (one not in self.time_of for one in mine))).tobytes()

    def take_due(self, now: float) -> bytes:
        """Some of the blocks that are due. `late` tells whether more are due."""
        due = array("I")
        while self.times and self.times[0] <= now and len(due) < LIMIT_DUE_IDS:
            blocks = self._at[self.times[0]]
            some = array("I", islice(blocks, LIMIT_DUE_IDS - len(due)))
            self.drop(some.tobytes())
            due += some
            if not blocks:
                del self._at[heapq.heappop(self.times)]
        self.late = bool(self.times) and self.times[0] <= now
        return due.tobytes()


def expiry_time(now: float, ttl_s: float) -> float:
    """When blocks that are saved now expire: at the end of the TTL, or slightly earlier."""
    step = 2.0 ** math.floor(math.log2(ttl_s / TIMES_PER_TTL))
    return math.floor((now + ttl_s) / step) * step
