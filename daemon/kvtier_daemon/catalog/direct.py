"""Blocks that a client reads from disk itself: which ones, and whether they are still stored. No I/O."""

from __future__ import annotations

from array import array

from kvtier.key import KEY_BYTES
from kvtier_daemon.catalog.blocks import BlockTable
from kvtier_daemon.catalog.frames import FRAME_BYTES, PLACE_BYTES, FramedBlocks
from kvtier_daemon.catalog.spaces import KnownSpace


class DirectBlocks:
    """Decides for one tenant; keeps no state."""

    def __init__(self, blocks: BlockTable) -> None:
        self._blocks = blocks

    def find(
        self, space: KnownSpace, group: int, shard: int, keys: bytes
    ) -> tuple[FramedBlocks, list[int]]:
        """The blocks of this group and shard that a load of these keys needs and that are only on disk, with
        the places of their keys. They count as requested."""
        space.check_keys(keys)
        space.check_place(group, shard)
        if space.index < 0 or self._blocks.expiring.late:
            return FramedBlocks(), []
        store = self._blocks.store
        prefix = store.match(space.index, keys)[1]
        ids = b""
        for one, part, below, _ in store.missing(space.index, keys, prefix):
            if (one, part) == (group, shard):
                ids = below
                break
        packed = store.keys_of(ids)
        place_of = {
            keys[at : at + KEY_BYTES]: at // KEY_BYTES for at in range(0, len(keys), KEY_BYTES)
        }
        places = [place_of[packed[at : at + KEY_BYTES]] for at in range(0, len(packed), KEY_BYTES)]
        frames, digests = store.frames(ids)
        return FramedBlocks(ids, frames, digests), places

    def still(self, space: KnownSpace, keys: bytes, granted: FramedBlocks) -> bytes:
        """A byte for each of these blocks, which have these keys: 1 if it is stored in the same place. No
        segment of them may have been reused since."""
        store = self._blocks.store
        if space.index < 0 or self._blocks.expiring.late:
            return bytes(len(granted.frames) // FRAME_BYTES)
        resident = store.resident(space.index, keys)
        framed = set(array("I", resident)) - set(array("I", store.dirty(resident)))
        ids = array("I", granted.ids)
        known = array("I", [one for one in ids if one in framed])
        now, _ = store.frames(known.tobytes())
        place_of = {
            one: now[at * FRAME_BYTES : at * FRAME_BYTES + PLACE_BYTES]
            for at, one in enumerate(known)
        }
        return bytes(
            place_of.get(one) == granted.frames[at * FRAME_BYTES : at * FRAME_BYTES + PLACE_BYTES]
            for at, one in enumerate(ids)
        )
