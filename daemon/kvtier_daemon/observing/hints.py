"""What the last minutes say that no single figure does: blocks lost because a disk is too slow or takes
nothing, loads that a disk did not bring in time, a hit rate that fell."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvtier.planning import LOADS
from kvtier_daemon.observing.series import hits, lookups

EVERY_S: Final = 10.0
SPAN_S: Final = 300.0
LEAST_TOKENS: Final = 10_000  # looked up, or the hit rate says little
FELL: Final = 0.5  # of what it was before
LEAST_LOADS: Final = 20
LATE: Final = 0.05  # of the loads that were begun
SLOW_DISK: Final = (
    "saves outrun the disk: a faster disk or another one, or a codec that stores less"
)
LOST: Final = {
    "slow_disk": SLOW_DISK,
    "off": "the disks take nothing: `kvtier status` says why",
    "budget": "cold.daily_writes is spent: raise it if the drive is rated for more",
}


@dataclass(frozen=True, slots=True)
class Counted:
    """Counters at one time."""

    at_s: float
    lookups: int
    hits: int
    lost: Mapping[str, int]
    loads: int  # that were begun
    late: int

    @classmethod
    def of(cls, figures: Mapping[str, Any]) -> Counted:
        cold = figures["tiers"].get("cold", {})
        loads = cold.get("loads", {})
        unwritten = cold.get("unwritten", {})
        return cls(
            figures["uptime_s"], lookups(figures), sum(hits(figures).values()),
            {why: unwritten.get(why, 0) for why in LOST},
            sum(loads.get(why, 0) for why in LOADS), loads.get("late", 0),
        )  # fmt: skip


NOTHING: Final = Counted(0.0, 0, 0, dict.fromkeys(LOST, 0), 0, 0)


class Hints:
    """Of one daemon."""

    def __init__(self) -> None:
        self._noted: deque[Counted] = deque([NOTHING])

    def note(self, figures: Mapping[str, Any]) -> None:
        """Remember how it is now; to be called every EVERY_S."""
        now = Counted.of(figures)
        self._noted.append(now)
        while len(self._noted) > 1 and self._noted[1].at_s <= now.at_s - SPAN_S:
            self._noted.popleft()

    def of(self, figures: Mapping[str, Any]) -> list[str]:
        """What to look into: what happened in the last minutes, and what to do. Empty if all is well."""
        return list(_told(self._noted[0], Counted.of(figures)))


def _told(then: Counted, now: Counted) -> Iterator[str]:
    span = f"in the last {max(1, round((now.at_s - then.at_s) / 60))} min"
    for why, advice in LOST.items():
        if lost := now.lost[why] - then.lost[why]:
            yield f"{lost:,} blocks evicted before they were written to disk {span} ({why}); {advice}"
    loads, late = now.loads - then.loads, now.late - then.late
    if loads >= LEAST_LOADS and late > LATE * loads:
        yield f"the disk was late for {late:,} of {loads:,} loads {span}; it is slower than it was measured"
    looked, before = now.lookups - then.lookups, then.lookups
    if looked < LEAST_TOKENS or before < LEAST_TOKENS:
        return
    rate, was = (now.hits - then.hits) / looked, then.hits / before
    if rate < FELL * was:
        yield (
            f"the hit rate is {rate:.0%} {span}, and was {was:.0%} before;"
            " `kvtier explain` says what is missed"
        )
