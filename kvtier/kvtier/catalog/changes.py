"""What of a space came and went, and in which tier, for the sessions that watch it.

Nobody is waited for: a watch keeps so many changes and no more, and then says how many it has forgotten.
Whoever is told that knows nothing any more of what was there before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvtier.catalog.spaces import IDENTITY, IDENTITY_BYTES, Spaces
from kvtier.wire import CHANGE
from kvtier_kernels import Store

LIMIT_KEPT: Final = 16_384  # 40 bytes each


@dataclass(slots=True, eq=False)
class Watch:
    """One session's view of one space. `awake` is called when there is something to take."""

    awake: Callable[[], None]
    kept: bytearray = field(default_factory=bytearray)
    missed: int = 0

    def note(self, change: bytes) -> None:
        if len(self.kept) >= LIMIT_KEPT * CHANGE.size:
            self.missed += len(self.kept) // CHANGE.size
            self.kept.clear()
        self.kept += change
        if len(self.kept) == CHANGE.size:
            self.awake()

    def take(self, limit: int) -> tuple[int, bytes]:
        """How many changes were forgotten, and the oldest ones after those."""
        missed, self.missed = self.missed, 0
        taken = bytes(self.kept[: limit * CHANGE.size])
        del self.kept[: len(taken)]
        return missed, taken


class Changes:
    """Costs nothing where nobody watches."""

    def __init__(self, store: Store, spaces: Spaces) -> None:
        self._store = store
        self._spaces = spaces
        self._watched = False

    @property
    def watched(self) -> bool:
        """Whether anybody wants to know: ask before naming anything."""
        return self._watched

    def look(self) -> None:
        """Somebody watches from now on, or no more."""
        watched = self._spaces.watched
        if watched != self._watched:
            self._watched = watched
            self._store.note_evicted(watched)

    def name(self, ids: bytes) -> bytes:
        """What these blocks are called, to be told after they have gone."""
        return self._store.identities(ids) if self._watched and ids else b""

    def evicted(self) -> bytes:
        """What the blocks are called that left their slots since the last call."""
        return self._store.take_evicted() if self._watched else b""

    def tell(self, what: int, tier: int, names: bytes) -> None:
        """These came to this tier, or went."""
        for at in range(0, len(names), IDENTITY_BYTES):
            index, group, shard, _, key, _ = IDENTITY.unpack_from(names, at)
            watches = self._spaces.at_index(index).watches
            if watches:
                change = CHANGE.pack(what, tier, group, shard, key)
                for watch in watches.values():
                    watch.note(change)
