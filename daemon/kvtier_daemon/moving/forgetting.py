"""What was forgotten stays so: the index is told of frames that are nothing any more, and who forgot is
answered when that is on disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvtier.catalog import Catalog, Space
from kvtier.errors import TierError
from kvtier_daemon.moving.blocks import PLACE_BYTES
from kvtier_daemon.tiers.cold import ColdTier
from kvtier_daemon.tiers.log import NOT_FREE_YET, Segment

FORGET_S = 3.0
ERASE_S = 8.0
EARLY_BYTES = 64 << 20


class Forgetting:
    """One tenant's."""

    def __init__(self, tenant: str, catalog: Catalog, cold: ColdTier) -> None:
        self._tenant = tenant
        self._catalog = catalog
        self._cold = cold
        # Of segments that leave: where frames are copied to, and what from. Both are there for a while.
        self._copies: dict[Segment, dict[bytes, bytes]] = {}
        self._forgotten: list[Callable[[str], None]] = []  # who waits until it is so on disk
        self._forgetting: asyncio.Task[None] | None = None
        self._erasing: set[asyncio.Task[None]] = set()
        self._early: list[tuple[bytes, bytes]] = []  # forgotten before all was found that there is
        self._early_bytes = 0

    def inherit(self, other: Forgetting) -> None:
        """Forget what another one could not see to."""
        self._early, self._early_bytes = other._early, other._early_bytes
        self._catalog.cold.take_died()  # of segments that have other numbers now

    def forget(self, space: Space, keys: bytes, over: Callable[[str], None] | None) -> None:
        """See to it that these blocks, which the catalog has forgotten, are so after a start too; then `over`
        is told what went wrong, or nothing."""
        if not self._cold.recovered.is_set():
            if self._early_bytes + len(keys) > EARLY_BYTES:
                if over is not None:
                    over("the cold tier is still looking at what it has")
                return
            self._early.append((space.identity, keys))
            self._early_bytes += len(keys)
        if over is None:
            return
        self._forgotten.append(over)
        if self._forgetting is None:
            self._forgetting = asyncio.create_task(self._forget_on(), name="forget")

    async def _forget_on(self) -> None:
        while self._forgotten:
            some, self._forgotten = self._forgotten, []
            try:
                async with asyncio.timeout(FORGET_S):
                    await self._cold.recovered.wait()
                    self.forget_early()
                    self.bury()
                    await self._cold.settled(self._tenant)
                    self.bury()  # what has landed since
                    failure = await self._cold.flush() or self._cold.unknown
            except TimeoutError:
                failure = self._cold.failure or f"nothing was heard of it for {FORGET_S:.0f} s"
            for over in some:
                over(failure)
        self._forgetting = None

    def erase(self, first: int, over: Callable[[str, int, int], None]) -> None:
        """Erase from the disks what no block owns, some of it; then `over` is told what went wrong, or
        nothing, where to go on (0 at the end), and how many files were gone through."""
        erasing = asyncio.create_task(self._erase_on(first, over), name="erase")
        self._erasing.add(erasing)
        erasing.add_done_callback(self._erasing.discard)

    async def _erase_on(self, first: int, over: Callable[[str, int, int], None]) -> None:
        after, files = 0, 0
        try:
            async with asyncio.timeout(ERASE_S):
                after, files = await self._cold.erase(
                    self._tenant, first, self._catalog.cold.frames_in
                )
            failure = self._cold.unknown
        except TimeoutError:
            failure = self._cold.failure or f"nothing was heard of it for {ERASE_S:.0f} s"
        except (OSError, TierError) as error:
            failure = str(error)
        over(failure, after, files)

    def forget_early(self) -> None:
        """What was forgotten may have been found since."""
        for identity, keys in self._early:
            self._catalog.forget_again(identity, keys)
        self._early, self._early_bytes = [], 0

    def copied(self, segment: Segment, before: bytes, after: bytes) -> None:
        """The frame at this place of a segment that leaves is at that one, too."""
        self._copies.setdefault(segment, {})[after] = before

    def bury(self) -> None:
        """Tell the index of the frames that are nothing any more."""
        died = self._catalog.cold.take_died()
        # Once a segment is free its pages are others'.
        for segment in [one for one in self._copies if one.stage not in NOT_FREE_YET]:
            del self._copies[segment]
        for copies in self._copies.values():
            for at in range(0, len(died), PLACE_BYTES):
                died += copies.get(died[at : at + PLACE_BYTES], b"")
        self._cold.bury(died)
