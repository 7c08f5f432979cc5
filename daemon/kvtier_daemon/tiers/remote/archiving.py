"""Writes blocks of the tier below memory to the store before their place there is reused. The reuse does not
wait for it: what is not written in time is lost, and counted."""

from __future__ import annotations

import asyncio
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

ARCHIVE_S: Final = 1.0
LIMIT_BLOCKS: Final = 1 << 16  # of one place that wait; the last ones are dropped
LOOK_BLOCKS: Final = 64  # that are described at once: about a millisecond of the loop
PORTION: Final = 4  # blocks that are read and encoded at once
PORTION_BYTES: Final = 8 << 20  # of these, unless it is one block
AGAIN: Final = 10  # looks until a place that was looked at is looked at again
TRIES: Final = 3  # to write a block: the store may fail for a moment


@dataclass(slots=True)
class LeavingPlace:
    """What was done about a place. It gets no new blocks until its next use. `done`: its blocks that the
    store has or does not take, or that were tried too often."""

    done: set[int] = field(default_factory=set)
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
        self._tenant = tenant
        self._driver = driver
        self._known = known
        self._places = places
        self._writer = writer
        self._places_of: dict[tuple[int, int], LeavingPlace] = {}

    @property
    def _is_on(self) -> bool:
        return self.archive != NONE and self.accepts and self._driver.is_writable

    async def run(self) -> None:
        """Archive until the task is cancelled."""
        while True:
            await asyncio.sleep(ARCHIVE_S)
            if self._is_on:
                leaving, before = self._tenant.tier.leaving.next(), self._places_of
                self._places_of = {
                    one.name: before.get(one.name, LeavingPlace()) for one in leaving
                }
                for one in leaving:
                    place = self._places_of[one.name]
                    if place.looks % AGAIN == 0:
                        await self._archive(one, place)
                    place.looks += 1

    async def _archive(self, leaving: LeavingBlocks, place: LeavingPlace) -> None:
        """Write the blocks of this place that the store lacks."""
        done, tries = place.done, place.tries
        ids = array("I", leaving.ids(self.archive == USED))
        left = array("I", islice((one for one in ids if one not in done), LIMIT_BLOCKS))

        def ended(number: int, is_there: bool) -> None:
            self.counts["archived"] += is_there
            if is_there or tries[number] >= TRIES:
                done.add(number)

        for at in range(0, len(left), LOOK_BLOCKS):
            plans = leaving.plans(left[at : at + LOOK_BLOCKS].tobytes())
            wanted = [one for one, plan in plans.items() if self._lacks(plan)]
            done.update(plans.keys() - set(wanted))
            largest = max((max(plan.space.block_bytes) for plan in plans.values()), default=1)
            portion = max(1, min(PORTION, PORTION_BYTES // largest))
            for begin in range(0, len(wanted), portion):
                some = wanted[begin : begin + portion]
                if not self._is_on:
                    return
                if not leaving.is_there:
                    self.counts["not_archived"] += len(left) - at - begin
                    return
                tries.update(some)
                await self._writer.copy(leaving, array("I", some).tobytes(), ended)
            await asyncio.sleep(0)

    def _lacks(self, plan: WritePlan) -> bool:
        """Whether the store lacks this block, and takes such blocks."""
        of, places = plan.identity, self._places.of(plan.space)
        if not places:
            return False
        mask = places[plan.space.place_of(of.group, of.shard)].mask
        return not any(self._known.good(names_of(of.key, mask)))
