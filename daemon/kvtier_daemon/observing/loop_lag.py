"""Delays of the daemon's event loop, measured by a timer."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from kvtier_daemon.observing.histogram import LAG_S, Histogram

TICK_S: Final = 0.05  # 20 times per second, 3 us each
KEPT_S: Final = 60
RECENT_S: Final = 10


class LoopLag:
    """How late the timer of the event loop fired. A delay shorter than a tick may be missed."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._loop = loop
        # the clock of the loop has milliseconds, and does not advance during a callback
        self._clock = clock
        self._histogram = Histogram(LAG_S)
        # For each second in which a tick happened.
        self._most: deque[tuple[int, float]] = deque(maxlen=KEPT_S)
        self._set()

    def _tick(self) -> None:
        now = self._clock()
        late = max(0.0, now - self._due)
        self._histogram.note(late)
        second = int(now)
        if self._most and self._most[-1][0] == second:
            late = max(late, self._most.pop()[1])
        self._most.append((second, late))
        self._set()

    def _set(self) -> None:
        self._due = self._clock() + TICK_S
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def most(self, within_s: int) -> float:
        """Return the longest delay in the last seconds, including a tick that is late now."""
        now = self._clock()
        lates = [late for second, late in self._most if second > now - within_s]
        return max([*lates, now - self._due, 0.0])

    def report(self) -> dict[str, Any]:
        return {
            **self._histogram.report(),
            "most_s": {str(seconds): self.most(seconds) for seconds in (RECENT_S, KEPT_S)},
        }

    def stop(self) -> None:
        self._timer.cancel()
