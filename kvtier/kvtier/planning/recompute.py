"""What computing a prompt again would take, learned from an engine's steps.

seconds = a * tokens + b * tokens * context: the second term is attention, which grows with what came before.
"""

from __future__ import annotations

from statistics import median

KEEP = 0.98  # of what is known, with each step
FIRST_STEPS = (
    5  # of which the middle one is believed: an engine's first step is often many times as slow
)
OUTLIER = 2.0  # a step that takes so many times what it should, or less, counts for less
SHARE_KEEP = 0.95


class Recompute:
    """Fitted online, by sums that forget. A step that is far off has a bounded say, so that a pause of the
    machine spoils nothing and a change of its speed is still learned."""

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
        """a and b, in seconds."""
        return self._fit

    def stepped(self, tokens: int, context: float, seconds: float) -> None:
        """A step computed so many tokens, each after `context` others on average, in this time."""
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
        """Of a step's tokens, so many were of one request that is being computed: the rest of its time was
        others'."""
        self._share = SHARE_KEEP * self._share + (1 - SHARE_KEEP) * own / total

    def seconds(self, tokens: int, before: int, queued_s: float = 0.0) -> float:
        """How long these tokens take after `before` others, from now on: first those that are ahead in the
        engine's queue, then its own, beside those of others in the same steps. Without limit while nothing
        is known."""
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
    """How long these tokens take after `before` others."""
    a, b = fit
    return tokens * (a + b * (before + tokens / 2))


def _weight(seconds: float, expected: float) -> float:
    """1 for what is about as expected; what is far off pulls no more than what is just too far off."""
    if expected <= 0 or seconds <= 0:
        return 1.0
    off = max(seconds / expected, expected / seconds)
    return 1.0 if off <= OUTLIER else (OUTLIER / off) ** 2
