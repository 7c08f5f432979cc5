"""The last minutes for the status page: some counters, sampled every two seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from kvtier_daemon.catalog import WHY_MISSED
from kvtier_daemon.observing.metrics import ROUTES, hits, lookups, routes

EVERY_S: Final = 2.0
KEPT: Final = 450  # 15 minutes

Point = tuple[float, int, int, int, tuple[int, ...], tuple[int, ...], int]


class History:
    """The samples of one daemon. Times are its uptime."""

    def __init__(self, figures: Callable[[], Mapping[str, Any]]) -> None:
        self._figures = figures
        self._points: deque[Point] = deque(maxlen=KEPT)

    def note(self) -> None:
        """Add a sample of now."""
        figures = self._figures()
        found, misses, moved = hits(figures), figures["miss_tokens"], routes(figures)
        self._points.append(
            (
                figures["uptime_s"], lookups(figures), found["warm"], found["cold"],
                tuple(misses.get(reason, 0) for reason in WHY_MISSED),
                tuple(moved[route] for route in ROUTES),
                found["remote"],
            )
        )  # fmt: skip

    def report(self, after_s: float) -> dict[str, Any]:
        """Return the samples since `after_s`. Each has its time, the tokens looked up, found in warm and in
        cold, missed by `reasons`, the bytes by `routes`, and the tokens found in remote, as counters."""
        return {
            "every_s": EVERY_S,
            "reasons": WHY_MISSED,
            "routes": ROUTES,
            "points": [point for point in self._points if point[0] > after_s],
        }
