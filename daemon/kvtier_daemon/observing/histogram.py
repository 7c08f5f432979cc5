"""Histograms of seconds, with fixed buckets, and those of the latencies that clients see."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final

# A load of one block from memory takes 0.1 ms; a request may wait for a disk for seconds.
LATENCY_S: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
    30.0,
)  # fmt: skip
LAG_S: Final = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Histogram:
    """A histogram of durations. Adding one costs a binary search and no memory."""

    __slots__ = ("_bounds", "_counts", "_sum_s")

    def __init__(self, bounds: Sequence[float] = LATENCY_S) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum_s = 0.0

    def note(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum_s += seconds

    def report(self) -> dict[str, Any]:
        """Return the bounds `le_s`, and the cumulative `counts`, which end with the total."""
        return {
            "le_s": self._bounds,
            "counts": list(accumulate(self._counts)),
            "sum_s": self._sum_s,
        }


@dataclass(slots=True)
class Latencies:
    """The histograms of all clients: loads from the answer with the lease to its release, saves from the
    grant of the slots to the last commit, and waits for blocks that are being read."""

    load: Histogram = field(default_factory=Histogram)
    save: Histogram = field(default_factory=Histogram)
    wait: Histogram = field(default_factory=Histogram)

    def report(self) -> dict[str, Any]:
        return {"load": self.load.report(), "save": self.save.report(), "wait": self.wait.report()}
