"""The clock and the randomness of the simulation. Import it before the daemon: it replaces those of the
process."""

from __future__ import annotations

import os
import random
import time

START_S = 1000.0
EPOCH_S = 1_700_000_000.0


class Clock:
    """`now` is the time; `tick_s` is how much passes at each look at the clock, as code takes time."""

    def __init__(self) -> None:
        self.now = START_S
        self.tick_s = 0.0

    def monotonic(self) -> float:
        self.now += self.tick_s
        return self.now

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now

    def time(self) -> float:
        return EPOCH_S + self.now


CLOCK = Clock()
SOURCE = random.Random()  # of all random bytes and numbers of the daemon
real_time = time.monotonic


def _random_bytes(count: int) -> bytes:
    return SOURCE.randbytes(count)


def reset(seed: object, tick_s: float) -> None:
    CLOCK.now, CLOCK.tick_s = START_S, tick_s
    SOURCE.seed(f"source {seed}")


def install() -> None:
    time.monotonic, time.perf_counter, time.time = CLOCK.monotonic, CLOCK.perf_counter, CLOCK.time
    os.urandom = _random_bytes
    random._urandom = _random_bytes  # type: ignore[attr-defined]  # of SystemRandom, which `secrets` uses
    random.random = lambda: SOURCE.random()


install()
