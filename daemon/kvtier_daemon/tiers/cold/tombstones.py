"""Makes a forget durable: writes tombstones, and reports when they are on disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvtier.errors import TierError
from kvtier_daemon.catalog import Catalog, KnownSpace
from kvtier_daemon.catalog.frames import PLACE_BYTES
from kvtier_daemon.tiers.cold.segment_log import NOT_FREE_YET, Segment
from kvtier_daemon.tiers.cold.tier import ColdTier

FORGET_S = 3.0  # shorter than the deadline of most clients
PURGE_S = 30.0  # a disk that is busy with other writes can take seconds to sync
EARLY_BYTES = 16 << 20  # of keys; in memory, each takes three times as much


class TombstoneWriter:
    """The `TierForgets` of one tenant: writes tombstones."""

    def __init__(self, tenant: str, catalog: Catalog, cold: ColdTier) -> None:
        self._tenant = tenant
        self._catalog = catalog
        self._cold = cold
        # For each segment that is reclaimed, by the place of a copy: the place of the original. For a while
        # both exist.
        self._copies: dict[Segment, dict[bytes, bytes]] = {}
        # Called when the tombstones are on disk, or at this time.
        self._forgotten: list[tuple[Callable[[str], None], float]] = []
        self._forgetting: asyncio.Task[None] | None = None
        self._erasing: set[asyncio.Task[None]] = set()
        self._early_bytes = 0  # of keys that were forgotten before the scan has ended

    def inherit(self, other: TombstoneWriter) -> None:
        """Take over the forgets that an earlier writer could not make durable."""
        self._early_bytes = other._early_bytes
        self._catalog.segments.take_dead_frames()  # drop those: the segments have other numbers now

    def forget(
        self, space: KnownSpace, keys: bytes, done: Callable[[str], None] | None, patient: bool = False
    ) -> bool:  # fmt: skip
        if not self._cold.recovery.complete.is_set():
            if self._early_bytes + len(keys) > EARLY_BYTES:
                if done is not None:
                    done("the cold tier is still reading its segments")
                return True
            self._catalog.segments.leave_out(space.identity, keys)
            self._early_bytes += len(keys)
        if done is not None:
            now = asyncio.get_running_loop().time()
            self._forgotten.append((done, now + (PURGE_S if patient else FORGET_S)))
            if self._forgetting is None:
                self._forgetting = asyncio.create_task(self._forget_on(), name="forget")
        return True

    async def _forget_on(self) -> None:
        loop = asyncio.get_running_loop()
        while self._forgotten:
            some, self._forgotten = self._forgotten, []
            try:
                # Not for longer than FORGET_S: others arrive meanwhile.
                first = min(until for _, until in some)
                async with asyncio.timeout_at(min(first, loop.time() + FORGET_S)):
                    await self._cold.recovery.complete.wait()
                    self.end_early_forgets()
                    self.tombstone()
                    await self._cold.writer.settled(self._tenant)
                    self.tombstone()  # what has landed since
                    failure = await self._cold.flush()
                    if not failure:
                        await self._cold.count_forgets()
                        failure = self._cold.directories.unknown
            except TimeoutError:
                failure = self._cold.failure
                if not failure:
                    now = loop.time()
                    self._forgotten += [one for one in some if one[1] > now]
                    some = [one for one in some if one[1] <= now]
                    failure = "the disk did not confirm it in time"
            for done, _ in some:
                done(failure)
        self._forgetting = None

    def erase(self, first: int, done: Callable[[str, int, int], None]) -> bool:
        erasing = asyncio.create_task(self._erase_on(first, done), name="erase")
        self._erasing.add(erasing)
        erasing.add_done_callback(self._erasing.discard)
        return True

    async def _erase_on(self, first: int, done: Callable[[str, int, int], None]) -> None:
        after, files = 0, 0
        try:
            async with asyncio.timeout(PURGE_S):
                after, files = await self._cold.erase(
                    self._tenant, first, self._catalog.segments.frames_in
                )
                if not after:
                    await self._cold.count_forgets()
            failure = self._cold.directories.unknown
        except TimeoutError:
            failure = self._cold.failure or (f"the disk did not confirm it within {PURGE_S:.0f} s")
        except (OSError, TierError) as error:
            failure = str(error)
        done(failure, after, files)

    def end_early_forgets(self) -> None:
        """The scan has ended: it finds no more frames of blocks that were forgotten before."""
        self._catalog.segments.all_found()
        self._early_bytes = 0

    def copied(self, segment: Segment, before: bytes, after: bytes) -> None:
        """Note that the frame `before` of a segment that is reclaimed was copied to `after`."""
        self._copies.setdefault(segment, {})[after] = before

    def tombstone(self) -> None:
        """Set the tombstones of frames that no block uses."""
        dead = self._catalog.segments.take_dead_frames()
        # The pages of a free segment get other frames.
        for segment in [one for one in self._copies if one.stage not in NOT_FREE_YET]:
            del self._copies[segment]
        for copies in self._copies.values():
            for at in range(0, len(dead), PLACE_BYTES):
                dead += copies.get(dead[at : at + PLACE_BYTES], b"")
        self._cold.table.tombstone(dead)
