"""What a step costs, learned from the steps so far: recomputing or loading, whichever ends sooner."""

from __future__ import annotations

from collections import deque
from statistics import median

from kvtier.planning import Recompute

KEEP = 0.98  # of what is known, with each load
LOAD_BYTES_S = 2e9  # until one was measured
STEPS = 32
LIMIT_BEGUN = 64  # steps whose start is remembered, for engines that have several at once
LEAST_TOKENS = 16  # a step of fewer is decoding: its time says little of prefill
LIMIT_UNLEARNED = 16  # steps at once: together they take as long as one whose code is in no cache


class Forecast:
    """What recomputing and loading took so far."""

    def __init__(self) -> None:
        self._recompute = Recompute()
        self._load = [0.0, 0.0]
        self._steps: deque[float] = deque(maxlen=STEPS)
        self._begun: deque[tuple[int, float, int, float]] = deque(maxlen=LIMIT_BEGUN)
        self._unlearned: list[tuple[int, float, float]] = []

    def step_began(self, number: int, now: float, tokens: int, context: float) -> None:
        """A step computes so many tokens, each of them after `context` others on average."""
        self._begun.append((number, now, tokens, context))

    def step_ended(self, number: int, now: float) -> None:
        """This one is over, and so are those before it."""
        while self._begun and self._begun[0][0] <= number:
            begun, began, tokens, context = self._begun.popleft()
            if begun == number and tokens:
                self.stepped(tokens, context, now - began)

    def stepped(self, tokens: int, context: float, seconds: float) -> None:
        """A step took so long for so many tokens, each of them after `context` others."""
        self._steps.append(seconds)
        if tokens >= LEAST_TOKENS:
            self._unlearned.append((tokens, context, seconds))
            if len(self._unlearned) >= LIMIT_UNLEARNED:
                self._learn()

    def _learn(self) -> Recompute:
        """What the steps so far say. Not at each one's end, which the engine waits for."""
        for tokens, context, seconds in self._unlearned:
            self._recompute.stepped(tokens, context, seconds)
        self._unlearned.clear()
        return self._recompute

    @property
    def prefill(self) -> tuple[float, float]:
        """Seconds for each token, and for each token before it: 0 while nothing is known."""
        return self._learn().fit

    def loaded(self, nbytes: int, seconds: float) -> None:
        self._load = [KEEP * self._load[0] + nbytes, KEEP * self._load[1] + seconds]

    def step_s(self) -> float:
        """What a step takes: the median of the last ones, 0 before the first."""
        return median(self._steps) if self._steps else 0.0

    def longest_step_s(self) -> float:
        """The longest of the last steps, 0 before the first."""
        return max(self._steps, default=0.0)

    def recompute_s(self, tokens: int, before: int) -> float | None:
        """How long these tokens would take after `before` others; None while nothing is known."""
        learned = self._learn()
        return learned.seconds(tokens, before) if learned.known else None

    def load_s(self, nbytes: int) -> float:
        loaded, seconds = self._load
        return nbytes / (loaded / seconds if seconds else LOAD_BYTES_S)
