"""The blocks that came to a tier of a space or left it, for the sessions that watch the space.

A watch keeps a limited number of changes, and counts those it dropped. A client that missed changes must
discard what it knows about the space.
"""

from __future__ import annotations

from kvtier.wire import CHANGE
from kvtier_daemon.catalog.spaces import IDENTITY, IDENTITY_BYTES, SpaceTable
from kvtier_kernels import Store


class ChangeFeed:
    """Callers check `watched` first, so that it costs nothing if no session watches."""

    def __init__(self, store: Store, spaces: SpaceTable) -> None:
        self._store = store
        self._spaces = spaces
        self.watched = False

    def update(self) -> None:
        """A watch was added or removed."""
        watched = self._spaces.watched
        if watched != self.watched:
            self.watched = watched
            self._store.note_evicted(watched)

    def name(self, ids: bytes) -> bytes:
        """The identities of these blocks, taken before they go."""
        return self._store.identities(ids) if self.watched and ids else b""

    def evicted(self) -> bytes:
        """The identities of the blocks that left their slots since the last call."""
        return self._store.take_evicted() if self.watched else b""

    def add(self, what: int, tier: int, names: bytes) -> None:
        """Add these blocks to the watches: they came to this tier, or left it."""
        for at in range(0, len(names), IDENTITY_BYTES):
            index, group, shard, _, key, _ = IDENTITY.unpack_from(names, at)
            watches = self._spaces.watches.get(self._spaces.at_index(index).number)
            if watches:
                change = CHANGE.pack(what, tier, group, shard, key)
                for watch in watches.values():
                    watch.note(change)
