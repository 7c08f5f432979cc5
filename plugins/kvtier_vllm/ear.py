"""Listening for the daemon on the engine's own thread: for moments that are counted."""

from __future__ import annotations

import select
import time
from collections.abc import Callable

# A warm match is answered in 0.1 to 0.3 ms; without its answer a request waits for the next step, which is
# 2.6 ms away when the engine is idle and a whole step when it is not.
STEP_S = 0.001


class Ear:
    """Waits for an answer between two steps, for `STEP_S` in all. After an answer that did not come in that
    time it waits no more before one has come."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left_s = STEP_S
        self._deaf = False

    def next_step(self) -> None:
        self._left_s = STEP_S

    def heard(self) -> None:
        """Something has come: whoever sent it can be waited for."""
        self._deaf = False

    def wait(self, fd: int, most_s: float = 0.0) -> bool:
        """Whether there is something to read, at once or within what is left, or within `most_s`."""
        left_s = max(self._left_s, most_s)
        if self._deaf or left_s <= 0:
            return False
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        began = self._clock()
        ready = bool(poll.poll(left_s * 1000))
        self._left_s -= self._clock() - began
        self._deaf = not ready
        return ready
