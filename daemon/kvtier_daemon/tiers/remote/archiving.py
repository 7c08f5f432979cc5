"""Writes blocks of the tier below memory to the store before their place there is reused. The reuse does not
wait for it: what is not written in time is lost, and counted."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
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
TRIES: Final = 3  # to write a block: the store may fail for a moment


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
        # By place: how often each block was tried. A place holds no new blocks until its next use.
        self._tries: dict[tuple[int, int], Counter[int]] = {}

    @property
    def _is_on(self) -> bool:
        return self.archive != NONE and self.accepts and self._driver.is_writable

    async def run(self) -> None:
        """Archive until the task is cancelled."""
        while True:
            await asyncio.sleep(ARCHIVE_S)
            if self._is_on:
                leaving = self._tenant.tier.leaving.next()
                tries = self._tries
                self._tries = {one.name: tries.get(one.name, Counter()) for one in leaving}
                for one in leaving:
                    await self._archive(one, self._tries[one.name])

    async def _archive(self, leaving: LeavingBlocks, tries: Counter[int]) -> None:
        """Write the blocks of this place that the store lacks and that were not tried too often."""
        ids = array("I", leaving.ids(self.archive == USED))
        left = array("I", islice((one for one in ids if tries[one] < TRIES), LIMIT_BLOCKS))

        def ended(number: int, is_there: bool) -> None:
            self.counts["archived"] += is_there
            if is_there:
                tries[number] = TRIES

        for at in range(0, len(left), LOOK_BLOCKS):
            plans = leaving.plans(left[at : at + LOOK_BLOCKS].tobytes())
            wanted = [one for one, plan in plans.items() if self._lacks(plan)]
            tries.update(dict.fromkeys(plans.keys() - set(wanted), TRIES))
            for begin in range(0, len(wanted), PORTION):
                some = wanted[begin : begin + PORTION]
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
