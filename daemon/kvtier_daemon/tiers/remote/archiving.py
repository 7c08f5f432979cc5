"""Writes blocks of the tier below memory to the store before their place there is reused. The reuse does not
wait for it: what is not written in time is lost, and counted."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from kvtier_daemon.catalog.demotion import WritePlan
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.base import LeavingBlocks
from kvtier_daemon.tiers.remote.driver import StoreDriver
from kvtier_daemon.tiers.remote.known import KnownObjects, names_of
from kvtier_daemon.tiers.remote.places import Places
from kvtier_daemon.tiers.remote.sharing import NONE, USED
from kvtier_daemon.tiers.remote.writing import ObjectWriter

log = logging.getLogger(__name__)

ARCHIVE_S: Final = 1.0
FAILED_S: Final = 10.0  # after an internal error
LIMIT_BLOCKS: Final = 1 << 16  # of one place that wait; the last ones are dropped
LOOK_BLOCKS: Final = 64  # that are described at once: about a millisecond of the loop
PORTION: Final = 4  # blocks that are read and encoded at once
PORTION_BYTES: Final = 8 << 20  # of these, unless it is one block
AGAIN: Final = 10  # looks until a place that was looked at is looked at again
TRIES: Final = 3  # to write a block: the store may fail for a moment


@dataclass(slots=True)
class LeavingPlace:
    """What was done about a place. It gets no new blocks until its next use. `ids`: its blocks, when it was
    looked at. `done`: those that the store has or does not take, or that were tried too often. `on_its_way`:
    those whose write has not ended, which also goes on after the place is gone."""

    ids: array[int] | None = None
    done: set[int] = field(default_factory=set)
    on_its_way: set[int] = field(default_factory=set)
    is_gone: bool = False
    tries: Counter[int] = field(default_factory=Counter)
    looks: int = 0


class Archiver:
    """The archive of one tenant. `archive` and `accepts` may change at any time."""

    def __init__(
        self, tenant: Tenant, driver: StoreDriver, known: KnownObjects, places: Places,
        writer: ObjectWriter, archive: str,
    ) -> None:  # fmt: skip
        self.counts: Counter[str] = Counter(archived=0, not_archived=0)
        self.archive = archive  # which blocks
        self.accepts = True
        self.is_paused = False
        self._tenant = tenant
        self._driver = driver
        self._known = known
        self._places = places
        self._writer = writer
        self._places_of: dict[tuple[int, int], LeavingPlace] = {}

    @property
    def _is_on(self) -> bool:
        accepts = self.accepts and not self.is_paused
        return self.archive != NONE and accepts and self._driver.is_writable

    async def run(self) -> None:
        """Archive until the task is cancelled."""
        while True:
            await asyncio.sleep(ARCHIVE_S)
            try:
                await self._look()
            except Exception:
                log.exception("remote: internal error in the archive, which goes on")
                await asyncio.sleep(FAILED_S)

    async def _look(self) -> None:
        """Count what the places that are gone have lost, and archive those that are reused next."""
        if self.archive == NONE:
            self._places_of.clear()
            return
        leaving, before = self._tenant.tier.leaving.next(), self._places_of
        self._places_of = {one.name: before.pop(one.name, LeavingPlace()) for one in leaving}
        for gone in before.values():
            gone.is_gone = True
            kept = gone.done | gone.on_its_way
            self.counts["not_archived"] += sum(one not in kept for one in gone.ids or ())
        for one in leaving:  # also while nothing is written, and before writes that may take long
            place = self._places_of[one.name]
            if place.ids is None and one.is_there:
                place.ids = array("I", one.ids(self.archive == USED))
                await asyncio.sleep(0)
        for one in leaving:
            if not self._is_on:
                return
            place = self._places_of[one.name]
            is_due = place.looks % AGAIN == 0
            place.looks += 1
            if is_due and one.is_there:
                await self._archive(one, place)

    async def _archive(self, leaving: LeavingBlocks, place: LeavingPlace) -> None:
        """Write the blocks of this place that the store lacks."""
        done, tries, on_its_way = place.done, place.tries, place.on_its_way
        place.ids = ids = array("I", leaving.ids(self.archive == USED))
        left = array("I", islice((one for one in ids if one not in done), LIMIT_BLOCKS))

        def ended(number: int, written: bool | None) -> None:
            self.counts["archived"] += written is True
            if written is not False or tries[number] >= TRIES:
                done.add(number)
            elif place.is_gone and number in on_its_way:
                self.counts["not_archived"] += 1
            on_its_way.discard(number)

        for at in range(0, len(left), LOOK_BLOCKS):
            seen = left[at : at + LOOK_BLOCKS]
            if not leaving.is_there:
                return
            plans = leaving.plans(seen.tobytes())
            wanted = [one for one, plan in plans.items() if self._lacks(plan)]
            done.update(set(seen) - set(wanted))
            largest = max((max(plan.space.block_bytes) for plan in plans.values()), default=1)
            portion = max(1, min(PORTION, PORTION_BYTES // largest))
            for begin in range(0, len(wanted), portion):
                some = wanted[begin : begin + portion]
                if not (self._is_on and leaving.is_there):
                    return
                tries.update(some)
                on_its_way.update(some)
                try:
                    await self._writer.copy(leaving, array("I", some).tobytes(), ended)
                except Exception:  # says nothing about these blocks
                    tries.subtract(some)
                    on_its_way.difference_update(some)
                    raise
            await asyncio.sleep(0)

    def _lacks(self, plan: WritePlan) -> bool:
        """Whether the store lacks this block, and takes such blocks."""
        of, places = plan.identity, self._places.of(plan.space)
        if not places:
            return False
        mask = places[plan.space.place_of(of.group, of.shard)].mask
        return not any(self._known.good(names_of(of.key, mask)))
