"""Blocks that a client reads from disk itself: which ones, and whether they are still stored. No I/O."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from itertools import compress

from kvtier.key import KEY_BYTES
from kvtier_daemon.catalog.blocks import ID_BYTES, BlockTable
from kvtier_daemon.catalog.frames import CODECS, FRAME_BYTES, PLACE_BYTES, FramedBlocks
from kvtier_daemon.catalog.spaces import KnownSpace

AT_ONCE = 4096 * ID_BYTES  # blocks whose codecs are compared together


class DirectBlocks:
    """Decides for one tenant; keeps no state."""

    def __init__(self, blocks: BlockTable) -> None:
        self._blocks = blocks

    def find(
        self, space: KnownSpace, group: int, shard: int, keys: bytes, codecs: Collection[int],
        first: int, most: int,
    ) -> tuple[FramedBlocks, list[int]]:  # fmt: skip
        """The blocks of this group and shard that a load of these keys needs, that are only on disk and have
        one of these codecs, with the places of their keys: from the key `first` on, at most `most`. The keys
        count as requested."""
        space.check_keys(keys)
        space.check_place(group, shard)
        if space.index < 0 or self._blocks.expiring.late:
            return FramedBlocks(), []
        store = self._blocks.store
        prefix = store.match(space.index, keys)[1]
        if first >= prefix:
            return FramedBlocks(), []
        keys = keys[first * KEY_BYTES : prefix * KEY_BYTES]
        ids, usable = b"", bytearray(256)
        for number in codecs:
            usable[number] = 1
        for one, part, below, _ in store.missing(space.index, keys, prefix - first):
            if (one, part) == (group, shard):
                ids = below
                break
        chosen = array("I")  # in the order of the keys
        for start in range(0, len(ids), AT_ONCE):
            if len(chosen) >= most:
                break
            some = ids[start : start + AT_ONCE]
            frames = store.frames(some)[0]
            chosen.extend(compress(array("I", some), frames[CODECS].translate(usable)))
        ids = chosen[: max(0, most)].tobytes()
        frames, digests = store.frames(ids)
        places = [first + at for at in _places(keys, store.keys_of(ids))]
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


def _places(keys: bytes, some: bytes) -> list[int]:
    """The places among `keys` of some of them, which are in the same order."""
    places: list[int] = []
    at = 0
    for start in range(0, len(some), KEY_BYTES):
        key = some[start : start + KEY_BYTES]
        if keys[at : at + KEY_BYTES] != key:
            at = keys.index(key, at)
            while at % KEY_BYTES:  # a part of two keys
                at = keys.index(key, at + 1)
        places.append(at // KEY_BYTES)
        at += KEY_BYTES
    return places
