"""Makes a forget durable: writes tombstones, and answers when they are on disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvtier.errors import TierError
from kvtier_daemon.catalog import Catalog, KnownSpace
from kvtier_daemon.tiers.cold.frames import PLACE_BYTES
from kvtier_daemon.tiers.cold.segment_log import NOT_FREE_YET, Segment
from kvtier_daemon.tiers.cold.tier import ColdTier

FORGET_S = 3.0
ERASE_S = 8.0
EARLY_BYTES = 64 << 20


class TombstoneWriter:
    """Writes one tenant's tombstones."""

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

    def inherit(self, other: TombstoneWriter) -> None:
        """Take over the forgets that an earlier writer could not make durable."""
        self._early, self._early_bytes = other._early, other._early_bytes
        self._catalog.segments.take_dead_frames()  # of segments that have other numbers now

    def forget(self, space: KnownSpace, keys: bytes, over: Callable[[str], None] | None) -> None:
        """Make durable that these blocks are forgotten; the catalog has forgotten them already. Then `over`
        gets the failure, or an empty text."""
        if not self._cold.recovery.complete.is_set():
            if self._early_bytes + len(keys) > EARLY_BYTES:
                if over is not None:
                    over("the cold tier is still reading its segments")
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
                    await self._cold.recovery.complete.wait()
                    self.repeat_early_forgets()
                    self.tombstone()
                    await self._cold.writer.settled(self._tenant)
                    self.tombstone()  # what has landed since
                    failure = await self._cold.flush() or self._cold.directories.unknown
            except TimeoutError:
                failure = self._cold.failure or (
                    f"the disk did not confirm it within {FORGET_S:.0f} s"
                )
            for over in some:
                over(failure)
        self._forgetting = None

    def erase(self, first: int, over: Callable[[str, int, int], None]) -> None:
        """Erase bytes that no block uses, in one portion of files; then `over` gets the failure or an empty
        text, where to continue (0 at the end), and the number of files."""
        erasing = asyncio.create_task(self._erase_on(first, over), name="erase")
        self._erasing.add(erasing)
        erasing.add_done_callback(self._erasing.discard)

    async def _erase_on(self, first: int, over: Callable[[str, int, int], None]) -> None:
        after, files = 0, 0
        try:
            async with asyncio.timeout(ERASE_S):
                after, files = await self._cold.erase(
                    self._tenant, first, self._catalog.segments.frames_in
                )
            failure = self._cold.directories.unknown
        except TimeoutError:
            failure = self._cold.failure or (f"the disk did not confirm it within {ERASE_S:.0f} s")
        except (OSError, TierError) as error:
            failure = str(error)
        over(failure, after, files)

    def repeat_early_forgets(self) -> None:
        """Forget again the blocks that were forgotten before the scan found them."""
        for identity, keys in self._early:
            if (space := self._catalog.spaces.named(identity)) is not None:
                self._catalog.forget(space, keys)
        self._early, self._early_bytes = [], 0

    def copied(self, segment: Segment, before: bytes, after: bytes) -> None:
        """Note that the frame `before` of a segment that is reclaimed was copied to `after`."""
        self._copies.setdefault(segment, {})[after] = before

    def tombstone(self) -> None:
        """Set the tombstones of frames that no block uses."""
        died = self._catalog.segments.take_dead_frames()
        # Once a segment is free its pages are others'.
        for segment in [one for one in self._copies if one.stage not in NOT_FREE_YET]:
            del self._copies[segment]
        for copies in self._copies.values():
            for at in range(0, len(died), PLACE_BYTES):
                died += copies.get(died[at : at + PLACE_BYTES], b"")
        self._cold.table.tombstone(died)
