"""An estimate of the time to recompute a prompt, learned from an engine's steps.

seconds = a * tokens + b * tokens * context: the second term is attention, which grows with the tokens before.
"""

from __future__ import annotations

from statistics import median

KEEP = 0.98  # weight of earlier steps after each new step
FIRST_STEPS = 5  # their median is used: an engine's first step is often many times as slow
OUTLIER = 2.0  # a step further off than this factor has less weight
SHARE_KEEP = 0.95


class Recompute:
    """Fits the two factors online, with exponentially decaying sums. The weight of an outlier is bounded: one
    pause of the machine does not spoil the fit, and a lasting change of its speed is still learned."""

    def __init__(self) -> None:
        self._first: list[tuple[float, float, float]] = []
        self._sums = [0.0] * 5
        self._share = 1.0
        self._fit = (0.0, 0.0)

    @property
    def known(self) -> bool:
        return bool(self._first)

    @property
    def fit(self) -> tuple[float, float]:
        """The factors a and b, in seconds."""
        return self._fit

    def stepped(self, tokens: int, context: float, seconds: float) -> None:
        """Add a step that computed `tokens` in `seconds`, with `context` tokens before each on average."""
        step = (float(tokens), tokens * context, seconds)
        if len(self._first) < FIRST_STEPS:
            self._first.append(step)
            if len(self._first) < FIRST_STEPS:
                self._fit = (median(t / x for x, _, t in self._first), 0.0)
                return
            middle = median(t / x for x, _, t in self._first)
            for x, y, t in self._first:
                self._add(x, y, t, _weight(t / x, middle))
        else:
            a, b = self._fit
            self._add(*step, _weight(seconds, a * step[0] + b * step[1]))
        self._fit = self._solved()

    def shared(self, own: int, total: int) -> None:
        """Add a step in which `own` of `total` tokens belonged to one request; the rest was for others."""
        self._share = SHARE_KEEP * self._share + (1 - SHARE_KEEP) * own / total

    def seconds(self, tokens: int, before: int, queued_s: float = 0.0) -> float:
        """Return how long these tokens take after `before` others, from now on: the time in the engine's
        queue, then the steps, which other requests share. Infinite until the first step is known."""
        if not self.known:
            return float("inf")
        return queued_s + predict(self._fit, tokens, before) / self._share

    def _add(self, x: float, y: float, t: float, weight: float) -> None:
        new = (x * x, x * y, y * y, x * t, y * t)
        self._sums = [KEEP * was + weight * now for was, now in zip(self._sums, new, strict=True)]

    def _solved(self) -> tuple[float, float]:
        xx, xy, yy, xt, yt = self._sums
        determinant = xx * yy - xy * xy
        if determinant > 1e-6 * xx * yy:
            a = (xt * yy - yt * xy) / determinant
            b = (yt * xx - xt * xy) / determinant
            if a >= 0 and b >= 0:
                return a, b
        return xt / xx, 0.0


def predict(fit: tuple[float, float], tokens: int, before: int) -> float:
    """Return how long these tokens take after `before` others, in steps without other requests."""
    a, b = fit
    return tokens * (a + b * (before + tokens / 2))


def _weight(seconds: float, expected: float) -> float:
    """Return 1 for a step close to its expected time; an outlier counts like a step at the limit."""
    if expected <= 0 or seconds <= 0:
        return 1.0
    off = max(seconds / expected, expected / seconds)
    return 1.0 if off <= OUTLIER else (OUTLIER / off) ** 2
