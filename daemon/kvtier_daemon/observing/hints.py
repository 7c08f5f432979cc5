"""Hints from the last minutes: blocks lost to slow or full disks, late loads, a falling hit rate."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvtier_daemon.observing.metrics import hits, lookups
from kvtier_daemon.planning import LOADS

EVERY_S: Final = 10.0
SPAN_S: Final = 300.0
LEAST_TOKENS: Final = 10_000  # looked up; with fewer tokens the hit rate has no meaning
FELL: Final = 0.5  # below this share of the earlier hit rate
LEAST_LOADS: Final = 20
LATE: Final = 0.05  # share of the loads that were started
SLOW_DISK: Final = (
    "saves are faster than the disk: add or use a faster disk, or a codec that stores less"
)
LOST: Final = {
    "slow_disk": SLOW_DISK,
    "off": "the disks do not accept writes: `kvtier status` says why",
    "budget": "cold.daily_writes is spent: raise it if the drive is rated for more",
}


@dataclass(frozen=True, slots=True)
class HintCounts:
    """Counters at one time."""

    at_s: float
    lookups: int
    hits: int
    lost: Mapping[str, int]
    loads: int  # that were started
    late: int

    @classmethod
    def of(cls, figures: Mapping[str, Any]) -> HintCounts:
        cold = figures["tiers"].get("cold", {})
        loads = cold.get("loads", {})
        unwritten = cold.get("unwritten", {})
        return cls(
            figures["uptime_s"], lookups(figures), sum(hits(figures).values()),
            {why: unwritten.get(why, 0) for why in LOST},
            sum(loads.get(why, 0) for why in LOADS), loads.get("late", 0),
        )  # fmt: skip


NOTHING: Final = HintCounts(0.0, 0, 0, dict.fromkeys(LOST, 0), 0, 0)


class Hints:
    """The hints of one daemon."""

    def __init__(self) -> None:
        self._noted: deque[HintCounts] = deque([NOTHING])

    def note(self, figures: Mapping[str, Any]) -> None:
        """Store the counters of now. Call it every EVERY_S."""
        now = HintCounts.of(figures)
        self._noted.append(now)
        while len(self._noted) > 1 and self._noted[1].at_s <= now.at_s - SPAN_S:
            self._noted.popleft()

    def of(self, figures: Mapping[str, Any]) -> list[str]:
        """Return what happened in the last minutes and what to do about it; empty if there is no problem."""
        return list(_told(self._noted[0], HintCounts.of(figures)))


def _told(then: HintCounts, now: HintCounts) -> Iterator[str]:
    span = f"in the last {max(1, round((now.at_s - then.at_s) / 60))} min"
    for why, advice in LOST.items():
        if lost := now.lost[why] - then.lost[why]:
            yield (
                f"{lost:,} blocks were evicted before they were written to disk {span} "
                f"({why}); {advice}"
            )
    loads, late = now.loads - then.loads, now.late - then.late
    if loads >= LEAST_LOADS and late > LATE * loads:
        yield (
            f"{late:,} of {loads:,} loads from disk were late {span}; the disk is slower "
            "than measured"
        )
    looked, before = now.lookups - then.lookups, then.lookups
    if looked < LEAST_TOKENS or before < LEAST_TOKENS:
        return
    rate, was = (now.hits - then.hits) / looked, then.hits / before
    if rate < FELL * was:
        yield (
            f"the hit rate is {rate:.0%} {span}, before it was {was:.0%}; `kvtier explain` "
            "says what is missed"
        )
