"""Measures the store by reading a few objects, for no request, and dropping them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvtier_daemon.planning import DiskLink
from kvtier_daemon.planning.planner import LATE_S, LATE_TIMES
from kvtier_daemon.tiers.remote.driver import StoreDriver, StoreProcess
from kvtier_daemon.tiers.remote.messages import DONE, Answer, GetObject

OBJECTS: Final = 4


@dataclass(slots=True)
class ProbeReads:
    """Reads that have begun: how many have not ended, and when they are late."""

    left: int
    due_at: float
    is_good: bool = True


class StoreProbes:
    """`pump` is called when memory for reads is free again."""

    def __init__(
        self, driver: StoreDriver, link: DiskLink, pump: Callable[[], None], clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._driver = driver
        self._link = link
        self._pump = pump
        self._clock = clock
        self._reading = 0

    def __len__(self) -> int:
        """How many objects are being read."""
        return self._reading

    def begin(self, names: Sequence[str], room: int) -> None:
        """Read some of these objects, of at most `room` bytes, if the speed of the store is not known or old,
        or its last reads were late. At most once a second."""
        child, link, names = self._driver.child, self._link, names[:OBJECTS]
        if child is None or not self._driver.is_on:
            return
        places: list[int] = []
        while len(places) < len(names) and (at := child.reads.take(room)) is not None:
            places.append(at)
        if not places or not link.may_probe():
            for at in places:
                child.reads.give(at, room)
            return
        late_s = LATE_TIMES * len(places) * room / link.bytes_s + LATE_S
        probe = ProbeReads(len(places), self._clock() + late_s)
        self._reading += len(places)
        for name, at in zip(names, places, strict=False):
            link.began(room, False)
            request = GetObject(self._driver.next_id(), name, at, room)
            self._driver.ask(request, partial(self._ended, child, probe, at, room))

    def _ended(
        self, child: StoreProcess, probe: ProbeReads, at: int, room: int, answer: Answer
    ) -> None:
        child.reads.give(at, room)
        self._reading -= 1
        is_good = answer.outcome == DONE and 0 < answer.nbytes <= room
        self._link.ended(room, answer.nbytes if is_good else 0, False)
        probe.is_good &= is_good
        probe.left -= 1
        if not (probe.left or self._link.is_reliable):
            self._link.forecast_ended(probe.is_good and self._clock() <= probe.due_at)
        self._pump()
