"""Forecasts of the time to recompute tokens and to load blocks, learned from the steps and loads so far."""

from __future__ import annotations

from collections import deque
from statistics import median

from kvtier.recompute import Recompute

KEEP = 0.98  # of the weight of earlier loads, with each load
LOAD_BYTES_S = 2e9  # until one was measured
STEPS = 32
LIMIT_BEGUN = 64  # pending steps, for engines that run several at once
LEAST_TOKENS = 16  # a step with fewer is decoding: its time tells little about prefill
LIMIT_UNLEARNED = 16  # steps learned at once: this takes as long as learning one with cold caches


class Forecast:
    """The measured times of one engine's steps and loads."""

    def __init__(self) -> None:
        self._recompute = Recompute()
        self._load = [0.0, 0.0]
        self._direct = [0.0, 0.0]
        self._steps: deque[float] = deque(maxlen=STEPS)
        self._begun: deque[tuple[int, float, int, float]] = deque(maxlen=LIMIT_BEGUN)
        self._unlearned: list[tuple[int, float, float]] = []

    def step_began(self, number: int, now: float, tokens: int, context: float) -> None:
        """A step computes this many tokens, each after `context` tokens on average."""
        self._begun.append((number, now, tokens, context))

    def step_ended(self, number: int, now: float) -> None:
        """This step and all before it have ended."""
        while self._begun and self._begun[0][0] <= number:
            begun, began, tokens, context = self._begun.popleft()
            if begun == number and tokens:
                self.stepped(tokens, context, now - began)

    def stepped(self, tokens: int, context: float, seconds: float) -> None:
        """Add the time of a step for this many tokens, each after `context` tokens."""
        self._steps.append(seconds)
        if tokens >= LEAST_TOKENS:
            self._unlearned.append((tokens, context, seconds))
            if len(self._unlearned) >= LIMIT_UNLEARNED:
                self._learn()

    def _learn(self) -> Recompute:
        """Learn from the steps so far, not at the end of each: the engine waits for that."""
        for tokens, context, seconds in self._unlearned:
            self._recompute.stepped(tokens, context, seconds)
        self._unlearned.clear()
        return self._recompute

    @property
    def prefill(self) -> tuple[float, float]:
        """Seconds per token, and per token before it; 0 while unknown."""
        return self._learn().fit

    def loaded(self, nbytes: int, seconds: float) -> None:
        self._load = [KEEP * self._load[0] + nbytes, KEEP * self._load[1] + seconds]

    def read_directly(self, nbytes: int, seconds: float) -> None:
        """Add the time of a rank's own reads from disk."""
        self._direct = [KEEP * self._direct[0] + nbytes, KEEP * self._direct[1] + seconds]

    def direct_s(self, nbytes: int) -> float:
        """The time until a rank has read this many bytes itself, 0 before the first reads."""
        read, seconds = self._direct
        return nbytes * seconds / read if read else 0.0

    def step_s(self) -> float:
        """The median time of the last steps, 0 before the first."""
        return median(self._steps) if self._steps else 0.0

    def longest_step_s(self) -> float:
        """The longest time of the last steps, 0 before the first."""
        return max(self._steps, default=0.0)

    def recompute_s(self, tokens: int, before: int) -> float | None:
        """The time to recompute these tokens after `before` others; None while unknown."""
        learned = self._learn()
        return learned.seconds(tokens, before) if learned.known else None

    def load_s(self, nbytes: int) -> float:
        loaded, seconds = self._load
        return nbytes / (loaded / seconds if seconds else LOAD_BYTES_S)
