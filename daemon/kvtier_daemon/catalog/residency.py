"""Which blocks the engines hold in their own caches, as their plugins report it. No I/O.

A block that an engine holds, and that has a frame on disk, leaves memory first: the engine's own copy serves
the engine, so the slot is better used for a block that no engine has. The policy holds such a block while it
is *away*. If the engine drops it, it is read back; until then its place in the policy's order is kept.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterable
from itertools import islice

from kvtier.key import KEY_BYTES
from kvtier_daemon.catalog.leases import SessionId
from kvtier_daemon.catalog.policy import Policy
from kvtier_daemon.catalog.spaces import KnownSpace
from kvtier_kernels import Store

NAME_BYTES = 8
LIMIT_NAMES = 1 << 18  # of one tenant: about 25 MB
CHECK_IDS = 1 << 14  # that one call of `check` looks at: about 2 ms


class HeldNames:
    """The blocks that one session's engine holds, by their short names, and their size."""

    def __init__(self) -> None:
        self.names: set[int] = set()
        self.nbytes = 0


class Residency:
    """The engines' blocks of one tenant. A name counts in all shards, because an engine has all of them."""

    def __init__(self, store: Store, policy: Policy) -> None:
        self.is_on = True  # blocks can be read back
        self.counts = Counter(entered=0, left=0, refused=0, left_first=0, returned=0)
        self._store = store
        self._policy = policy
        self._of: dict[SessionId, HeldNames] = {}
        self._held = 0  # names of all sessions
        self._leave_first: dict[int, None] = {}  # in memory and on disk; the oldest first
        self._away: set[int] = set()
        self._returning: set[int] = set()  # away, and being read back
        self._unchecked: deque[int] = deque()  # of ended sessions

    def __bool__(self) -> bool:
        return bool(self._of or self._away or self._leave_first)

    # --- what engines report -----------------------------------------------------------------

    def entered(self, session: SessionId, space: KnownSpace, group: int, keys: bytes) -> None:
        """The session's engine holds these blocks. Above LIMIT_NAMES they are `refused`: not noted."""
        names = self._names(space, group, keys)
        mine = self._of.setdefault(session, HeldNames())
        fresh = set(names) - mine.names
        if self._held + len(fresh) > LIMIT_NAMES:
            self.counts["refused"] += len(keys) // KEY_BYTES
            return
        mine.names |= fresh
        mine.nbytes += len(fresh) * space.block_bytes[group]
        self._held += len(fresh)
        self.counts["entered"] += len(fresh)
        ids = array("I", self._ids(space, keys, fresh)).tobytes()
        for one in array("I", self._store.clean(ids, in_memory=True)):
            self._leave_first.setdefault(one)

    def left(self, session: SessionId, space: KnownSpace, group: int, keys: bytes) -> bytes:
        """The session's engine has dropped these blocks. Return those that are to be read back: no engine
        holds them, and they are only on disk because one did."""
        mine = self._of.get(session)
        if mine is None:
            return b""
        gone = mine.names.intersection(self._names(space, group, keys))
        mine.names -= gone
        mine.nbytes -= len(gone) * space.block_bytes[group]
        self._held -= len(gone)
        self.counts["left"] += len(gone)
        gone = {name for name in gone if not self._is_held(name)}
        back = array("I")
        for one in self._ids(space, keys, gone):
            self._leave_first.pop(one, None)
            if one in self._away and one not in self._returning:
                back.append(one)
        return self._store.clean(back.tobytes(), in_memory=False)

    def end_session(self, session: SessionId) -> None:
        """The session has ended: its engine is not known to hold anything. `check` does the rest."""
        mine = self._of.pop(session, None)
        if mine is not None:
            self._held -= len(mine.names)
            self._unchecked = deque([*self._away, *self._leave_first])

    def check(self) -> None:
        """Look at some of the blocks that engines of ended sessions may have held."""
        ids = array("I", islice(self._unchecked, CHECK_IDS))
        for _ in ids:
            self._unchecked.popleft()
        known = array("I", (one for one in ids if one in self._away or one in self._leave_first))
        if not known:
            return
        alone = [one for one, name in self._named(known) if not self._is_held(name)]
        for one in alone:
            self._leave_first.pop(one, None)
        self.stay_below(one for one in alone if one not in self._returning)

    # --- what happens to blocks ----------------------------------------------------------------

    def framed(self, ids: bytes) -> None:
        """These blocks may be in memory and on disk now."""
        if self._of:
            known = self._named(array("I", self._store.clean(ids, in_memory=True)))
            self._leave_first.update((one, None) for one, name in known if self._is_held(name))

    def victims(self, wanted: int) -> bytes:
        """The next blocks to evict because an engine holds them. The store skips those that are leased."""
        if not (self._leave_first and self.is_on):
            return b""
        first = list(islice(self._leave_first, wanted))
        # If a lease holds them, others are tried the next time.
        for one in first:
            del self._leave_first[one]
        # Never the only copy.
        clean = self._store.clean(array("I", first).tobytes(), in_memory=True)
        self._leave_first.update(dict.fromkeys(array("I", clean)))
        return clean

    def evicted(self, evicted: bytes, below: bytes) -> bytes:
        """These blocks have left memory; those `below` are on disk. Return the part of `below` that no longer
        has a place in the policy's order."""
        if not self._leave_first:
            return below
        others = array("I")
        for one in array("I", below):
            if one in self._leave_first and self.is_on:
                self._away.add(one)
                self.counts["left_first"] += 1
            else:
                others.append(one)
        for one in array("I", evicted):
            self._leave_first.pop(one, None)
        if len(others) * others.itemsize == len(below):
            return below
        kept = set(others)
        self._policy.held(
            array("I", (one for one in array("I", below) if one not in kept)).tobytes()
        )
        return others.tobytes()

    def gone(self, ids: bytes) -> None:
        """These blocks exist in no tier now."""
        for one in array("I", ids) if self._away or self._leave_first else ():
            self._leave_first.pop(one, None)
            self._away.discard(one)
            self._returning.discard(one)

    def reading_back(self, ids: bytes) -> None:
        """These blocks are being read because their engine dropped them."""
        self._returning.update(array("I", ids))

    def came(self, ids: bytes) -> bytes:
        """These blocks were read into memory. Return those that the policy gets as added; those that were
        read back return to their places."""
        if not self._away:
            return ids
        back = array("I", (one for one in array("I", ids) if one in self._returning))
        added = array("I", (one for one in array("I", ids) if one not in self._returning))
        self._away.difference_update(back)
        self._returning.difference_update(back)
        self.stay_below(added)  # a request reads them: they come as any block from the disk
        self.counts["returned"] += len(back)
        if back:
            self._policy.freed(back.tobytes())
        return added.tobytes()

    def stay_below(self, ids: Iterable[int]) -> None:
        """These blocks are only on disk, and are not read back."""
        away = array("I", (one for one in ids if one in self._away))
        if away:
            self._away.difference_update(away)
            self._returning.difference_update(away)
            self._policy.left(away.tobytes())

    def away_of(self, space: KnownSpace, keys: bytes) -> bytes:
        """The blocks of these keys that left memory because an engine holds them."""
        if not self._away or space.index < 0:
            return b""
        ids = array("I", self._store.resident(space.index, keys))
        return array("I", (one for one in ids if one in self._away)).tobytes()

    # --- figures -------------------------------------------------------------------------------

    def engines(self, space: KnownSpace, key: bytes) -> int:
        """How many engines hold a part of this block."""
        names = {
            name
            for group in range(len(space.block_bytes))
            for name in self._names(space, group, key)
        }
        return sum(not names.isdisjoint(one.names) for one in self._of.values())

    def report(self) -> dict[str, int]:
        """The figures of one tenant, for the status. Blocks of several engines count for each of them."""
        return {
            "engines": sum(bool(one.names) for one in self._of.values()),
            "blocks": self._held,
            "bytes": sum(one.nbytes for one in self._of.values()),
            "leave_first_blocks": len(self._leave_first),
            "away_blocks": len(self._away),
            "entered_blocks": self.counts["entered"],
            "left_blocks": self.counts["left"],
            "refused_blocks": self.counts["refused"],
            "evicted_blocks": self.counts["left_first"],
            "returned_blocks": self.counts["returned"],
        }

    # --- names ---------------------------------------------------------------------------------

    def _is_held(self, name: int) -> bool:
        return any(name in one.names for one in self._of.values())

    def _names(self, space: KnownSpace, group: int, keys: bytes) -> array[int]:
        names = array("Q")
        for shard in range(space.spec.cache_groups[group].shards):
            names.frombytes(self._store.names_of_keys(keys, space.place_of(group, shard)))
        return names

    def _named(self, ids: array[int]) -> Iterable[tuple[int, int]]:
        return zip(ids, array("Q", self._store.names(ids.tobytes())), strict=True)

    def _ids(self, space: KnownSpace, keys: bytes, names: set[int]) -> list[int]:
        """The ids of the blocks of these keys that have one of these names."""
        if space.index < 0 or not names:
            return []
        ids = array("I", self._store.resident(space.index, keys))
        return [one for one, name in self._named(ids) if name in names]
