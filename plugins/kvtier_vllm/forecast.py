"""What a step costs, learned from the steps so far: recomputing or loading, whichever ends sooner."""

from __future__ import annotations

from collections import deque
from statistics import median

KEEP = 0.98  # of what is known, with each step
LOAD_BYTES_S = 2e9  # until one was measured
STEPS = 32
LEAST_TOKENS = 16  # a step of fewer is decoding: its time says little of prefill


class Forecast:
    """Fits step time = a * tokens + b * tokens * context, and remembers how fast loads were."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5
        self._load = [0.0, 0.0]
        self._steps: deque[float] = deque(maxlen=STEPS)

    def stepped(self, tokens: int, context: float, seconds: float) -> None:
        """A step took so long for so many tokens, each of them after `context` others on average."""
        self._steps.append(seconds)
        if tokens < LEAST_TOKENS:
            return
        x, y = float(tokens), tokens * context
        new = (x * x, x * y, y * y, x * seconds, y * seconds)
        self._sums = [KEEP * was + now for was, now in zip(self._sums, new, strict=True)]

    def loaded(self, nbytes: int, seconds: float) -> None:
        self._load = [KEEP * self._load[0] + nbytes, KEEP * self._load[1] + seconds]

    def step_s(self) -> float:
        """What a step takes: the median of the last ones, 0 before the first."""
        return median(self._steps) if self._steps else 0.0

    def recompute_s(self, tokens: int, before: int) -> float | None:
        """How long these tokens would take after `before` others; None while nothing is known."""
        xx, xy, yy, xt, yt = self._sums
        if not xx:
            return None
        context = before + tokens / 2
        determinant = xx * yy - xy * xy
        if determinant > 1e-6 * xx * yy:
            a = (xt * yy - yt * xy) / determinant
            b = (yt * xx - xt * xy) / determinant
            if a >= 0 and b >= 0:
                return tokens * (a + b * context)
        return tokens * xt / xx

    def load_s(self, nbytes: int) -> float:
        loaded, seconds = self._load
        return nbytes / (loaded / seconds if seconds else LOAD_BYTES_S)
