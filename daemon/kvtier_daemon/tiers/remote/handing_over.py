"""Writes all blocks of one tenant to the store, at an operator's order: a host that retires leaves them to
the others. Blocks that are only on disk are read to memory for it, a few at a time, as prefetches are."""

from __future__ import annotations

import asyncio
from array import array
from typing import Final, NamedTuple

from kvtier.wire import LISTED
from kvtier_daemon.catalog import KnownSpace
from kvtier_daemon.catalog.blocks import ID_BYTES
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.remote.archiving import Archiver
from kvtier_daemon.tiers.remote.known import KnownObjects, names_of
from kvtier_daemon.tiers.remote.places import Place, Places
from kvtier_daemon.tiers.remote.writing import ObjectWriter

# Records that are looked at in one turn of the loop: a millisecond or two.
LOOK_RECORDS: Final = 65_536
PORTION: Final = 16  # blocks
READ_S: Final = 2.0  # for a portion that is only on disk; what has not come then stays there
TRIES: Final = 3  # of such a portion: a disk that is busy refuses prefetches
POLL_S: Final = 0.01


class BlocksToWrite(NamedTuple):
    """Blocks of one place of a space."""

    space: KnownSpace
    place: Place
    keys: bytes
    ids: bytes


class HandingOver:
    """`left` counts the blocks that are neither written nor given up; `kept` those that were given up,
    because they could not be read or written, or are not shared. The archive pauses meanwhile."""

    def __init__(
        self, tenant: Tenant, places: Places, known: KnownObjects, writer: ObjectWriter,
        archiver: Archiver,
    ) -> None:  # fmt: skip
        self.left = self.kept = 0
        self._tenant = tenant
        self._places = places
        self._known = known
        self._writer = writer
        self._archiver = archiver

    async def run(self) -> None:
        """Write all blocks that the store lacks, as far as it accepts them. Saves and loads go on."""
        self.kept = 0
        self._archiver.is_paused = True
        try:
            spaces = [one for one in self._tenant.catalog.spaces if self._places.of(one)]
            todo: list[BlocksToWrite] = []
            for space in spaces:
                first = -1
                while first:
                    first, found = self._listed(space, max(0, first))
                    todo += found
                    await asyncio.sleep(0)
            self.left = sum(len(one.ids) // ID_BYTES for one in todo)
            for one in todo:
                await self._write(one)
                self.left -= len(one.ids) // ID_BYTES
        finally:
            self.left = 0
            self._archiver.is_paused = False

    def _listed(self, space: KnownSpace, first: int) -> tuple[int, list[BlocksToWrite]]:
        """Some blocks of this space that the store lacks, in portions; and where to continue."""
        if space.index < 0:
            return 0, []
        store = self._tenant.catalog.blocks.store
        after, rows = store.listed(space.index, first, LOOK_RECORDS, LOOK_RECORDS)
        of: dict[tuple[int, int], tuple[list[bytes], array[int]]] = {}
        for number, group, shard, _, _, _, _, _, _, key in LISTED.iter_unpack(rows):
            keys, ids = of.setdefault((group, shard), ([], array("I")))
            keys.append(key)
            ids.append(number)
        found = []
        for (group, shard), (keys, ids) in of.items():
            place = self._places.of(space)[space.place_of(group, shard)]
            good = self._known.good(names_of(b"".join(keys), place.mask))
            lacks = [at for at, is_good in enumerate(good) if not is_good]
            for begin in range(0, len(lacks), PORTION):
                some = lacks[begin : begin + PORTION]
                found.append(
                    BlocksToWrite(
                        space, place, b"".join(keys[at] for at in some),
                        array("I", (ids[at] for at in some)).tobytes(),
                    )
                )  # fmt: skip
        return after, found

    async def _write(self, one: BlocksToWrite) -> None:
        """Write these blocks; those that were evicted or forgotten meanwhile are gone."""
        wanted = len(one.ids) // ID_BYTES
        for _ in range(TRIES):
            if missing := self._missing(one):
                self._tenant.tier.reads.read(one.space, missing)
                await self._arrived(one)
            ids = self._present(one)
            await self._writer.share(ids)
            if len(ids) // ID_BYTES == wanted or not self._missing(one):
                break
        names = names_of(one.keys, one.place.mask)
        await self._writer.settled(names)
        self.kept += wanted - sum(self._known.good(names))

    async def _arrived(self, one: BlocksToWrite) -> None:
        """Wait until the blocks that are being read are in memory."""
        loop = asyncio.get_running_loop()
        until, wanted = loop.time() + READ_S, len(one.ids) // ID_BYTES
        while len(self._present(one)) // ID_BYTES < wanted and loop.time() < until:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)

    def _present(self, one: BlocksToWrite) -> bytes:
        """The ids of these blocks that are in memory."""
        store, space, place = self._tenant.catalog.blocks.store, one.space, one.place
        if space.index < 0:
            return b""
        return store.present(space.index, place.group, place.shard, one.keys)

    def _missing(self, one: BlocksToWrite) -> bytes:
        """The ids of these blocks that are only on disk, and not being read."""
        return self._tenant.catalog.blocks.store.clean(one.ids, in_memory=False)
