"""The places of a space, and which of its blocks a prefix needs."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.frame import Identity
from kvtier.layout import Group
from kvtier_daemon.catalog import KnownSpace
from kvtier_daemon.tiers.remote.known import place_mask
from kvtier_daemon.tiers.remote.objects import Headers

LIMIT_SPACES = 256  # the oldest are dropped, and computed again


@dataclass(slots=True, frozen=True)
class Place:
    """One shard of one group. `mask` makes names of objects from keys."""

    group: int
    shard: int
    mask: bytes
    kind: Group
    headers: Headers
    block_bytes: int

    def needed(self, space: KnownSpace, prefix: int) -> range:
        """The blocks that a prefix of this length needs."""
        return self.kind.needed_blocks(space.spec.block_tokens, prefix)

    def identity(self, space: KnownSpace, key: bytes) -> Identity:
        return Identity(space.identity, self.group, self.shard, key)


class Places:
    """`object_bytes` is the size of the largest object. A space with larger ones is not shared."""

    def __init__(self, object_bytes: int) -> None:
        self._object_bytes = object_bytes
        self._of: dict[bytes, list[Place]] = {}

    def limit(self, object_bytes: int) -> None:
        """The largest object has this size from now on."""
        if object_bytes != self._object_bytes:
            self._object_bytes = object_bytes
            self._of.clear()

    def every(self, space: KnownSpace) -> list[Place]:
        """The places also of a space that is not shared: hosts with a larger buffer may share it."""
        return self.of(space) or _places_of(space)

    def of(self, space: KnownSpace) -> list[Place]:
        found = self._of.get(space.identity)
        if found is None:
            if len(self._of) >= LIMIT_SPACES:
                del self._of[next(iter(self._of))]
            found = _places_of(space)
            if max(place.headers.most_bytes for place in found) > self._object_bytes:
                found = []
            self._of[space.identity] = found
        return found


def _places_of(space: KnownSpace) -> list[Place]:
    return [
        Place(
            group, shard, place_mask(space.identity, group, shard), kind,
            Headers(space.spec, space.identity, group, shard), space.block_bytes[group],
        )
        for group, kind in enumerate(space.spec.cache_groups)
        for shard in range(kind.shards)
    ]  # fmt: skip


def restorable(space: KnownSpace, places: list[Place], has: list[bytes], first: int) -> int:
    """Return how many blocks from `first` on can be restored. `has` tells for each place which of them exist;
    the blocks before `first` restore the prefix until there."""
    most = len(has[0])
    for place, flags in zip(places, has, strict=True):
        if place.kind.kind == "full":
            run = flags.find(0)
            most = min(most, run if run >= 0 else len(flags))
    for count in range(most, 0, -1):
        for place, flags in zip(places, has, strict=True):
            need = place.needed(space, first + count)
            begin = max(0, need.start - first)
            if flags.count(1, begin, count) < count - begin:
                break
        else:
            return count
    return 0
