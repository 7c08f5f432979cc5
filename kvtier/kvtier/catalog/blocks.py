"""The blocks of one tenant: the store, which knows them, and the policy, which says who goes first, in step.

Which blocks the policy may name: exactly those that may be evicted, READY and held by no lease; and those
that nothing but a write to the disk holds.
"""

from __future__ import annotations

from array import array
from collections import Counter
from itertools import compress

from kvtier.admission import Admission
from kvtier.catalog.changes import Changes
from kvtier.catalog.departures import (
    EVICTED,
    FORGOTTEN,
    GONE,
    ONCE,
    SLOW_DISK,
    UNWRITTEN,
    Departures,
)  # fmt: skip
from kvtier.errors import Refused
from kvtier.key import Keys
from kvtier.policy.base import Policy
from kvtier.wire import CAME, DISK, MEMORY, WENT
from kvtier_kernels import Store

ID_BYTES = 4
WHY_EVICTED = (
    "capacity",  # dropped for others, as it was nowhere else
    "demoted",  # left memory for others, and is on disk
    "forgotten",
    "lost",  # was on disk alone, in a segment that is used again
    "spoilt",  # was on disk alone, and its frame is damaged
)


class Blocks:
    def __init__(
        self, store: Store, policy: Policy, changes: Changes, departures: Departures
    ) -> None:
        self.store = store
        self.changes = changes
        self.policy = policy
        self.evicted: Counter[str] = Counter(dict.fromkeys(WHY_EVICTED, 0))
        self.departures = departures
        self.admission = Admission()
        self.unwritten: Counter[str] = Counter(
            dict.fromkeys(UNWRITTEN, 0)
        )  # evicted, and on no disk
        self.keeps_back = EVICTED  # why what is evicted was not written; so: there is no disk
        self._writing: set[int] = set()  # held by a write to the disk, and the policy wasn't told
        self.died = bytearray()  # segment and page of frames that are nothing any more

    def lease(self, batches: list[bytes]) -> None:
        """Hold the blocks of every batch, or of none. One batch names no block twice."""
        taken: list[bytes] = []
        try:
            for ids in batches:
                self.store.lease(ids)
                taken.append(ids)
        except (OverflowError, ValueError) as error:
            for ids in taken:
                self.store.unlease(ids)
            if isinstance(error, ValueError):
                raise Refused("bad_request", "a key is given twice") from error
            raise Refused("too_many", "a block is held by too many leases") from error
        for ids in taken:
            self.policy.held(ids)
            self._not_writing(ids)

    def _not_writing(self, ids: bytes) -> None:
        if self._writing:
            self._writing.difference_update(array("I", ids))

    def unlease(self, ids: bytes) -> None:
        evictable, freed = self.store.unlease(ids)
        self.policy.freed(evictable)
        self.gone(freed, "forgotten")

    def gone(self, ids: bytes, why: str) -> None:
        """These are nowhere any more."""
        self.policy.gone(ids)
        self.evicted[why] += len(ids) // ID_BYTES

    def hold(self, victims: bytes) -> None:
        """Keep these, which the policy named, while they are written to the disk. They keep their places
        in its order, so that the coldest are the coldest after, too."""
        self.store.lease(victims)
        self._writing.update(array("I", victims))

    def let_go(self, ids: bytes) -> None:
        """These are written. What was read meanwhile comes back to the policy as recent, in the order in
        which it was to go: the tails of chains first."""
        evictable, freed = self.store.unlease(ids)
        read = array("I", (one for one in array("I", evictable) if one not in self._writing))
        self._writing.difference_update(array("I", ids))
        read.reverse()
        self.policy.freed(read.tobytes())
        self.gone(freed, "forgotten")

    def commit(self, ids: bytes, checksums: bytes, is_new: bool = True) -> None:
        """These are written. `is_new` for one place of each key: the others are the same save."""
        self.store.commit(ids, checksums)
        self.changes.tell(CAME, MEMORY, self.changes.name(ids))
        if self.admission.is_on and is_new:
            self.admission.saved(self.store.keys_of(ids))
        self.came(ids)

    def came(self, ids: bytes) -> None:
        """These are READY from now on."""
        self.policy.added(ids, self.store.names(ids), self.store.parents(ids))

    def forget(self, ids: bytes) -> bool:
        """They match no more; those that are leased or being read from the disk go when that ends: True
        if there are any."""
        names = self.changes.name(ids)
        self.departures.note(self.store.keys_of(ids), FORGOTTEN)
        freed, orphans, died = self.store.forget(ids)
        for tier in (MEMORY, DISK):
            self.changes.tell(WENT, tier, names)
        self._not_writing(ids)
        self.policy.held(ids)  # those that go later are no victims until then
        self.gone(freed, "forgotten")
        self.policy.demoted(orphans)
        self.died += died
        return len(freed) < len(ids)

    def _note_victims(self, victims: bytes) -> dict[int, int]:
        """Note why these are nowhere, if they go; of each that is in memory alone, where it is not the same
        for all."""
        if self.keeps_back != ONCE:
            self.departures.note(self.store.keys_of(victims), self.keeps_back)
            return {}
        dirty = self.store.dirty(victims)
        keys = self.store.keys_of(dirty)
        again = self.admission.admitted(keys)
        self.departures.note(keys, ONCE)
        self.departures.note(b"".join(compress(Keys(keys), again)), SLOW_DISK)
        codes = (SLOW_DISK if one else ONCE for one in again)
        return dict(zip(array("I", dirty), codes, strict=True))

    def _count_unwritten(self, dirty: dict[int, int], evicted: bytes, dropped: int) -> None:
        if self.keeps_back == EVICTED or not dropped:
            return
        if self.keeps_back != ONCE:
            self.unwritten[GONE[self.keeps_back]] += dropped
            return
        self.unwritten.update(GONE[dirty[one]] for one in array("I", evicted) if one in dirty)

    def make_room(self, space: int, group: int, wanted: int) -> None:
        """Evict, coldest first, until `wanted` slots are free or nothing more may go."""
        store, policy = self.store, self.policy
        victims = b""  # at first: what other spaces left empty costs nobody anything
        while (short := wanted - store.room(space, group, wanted)) > 0:
            dirty = self._note_victims(victims) if victims else {}
            evicted, orphans, cold = store.make_room(space, group, wanted, victims)
            self.changes.tell(WENT, MEMORY, self.changes.evicted())
            policy.left(cold)
            policy.gone(_without(evicted, cold))
            policy.demoted(orphans)
            self.evicted["capacity"] += (len(evicted) - len(cold)) // ID_BYTES
            self.evicted["demoted"] += len(cold) // ID_BYTES
            self._count_unwritten(dirty, evicted, (len(evicted) - len(cold)) // ID_BYTES)
            if victims and not evicted:
                break
            victims = policy.victims(short + len(self._writing))
            if not victims:
                break


def _without(ids: bytes, some: bytes) -> bytes:
    if not some:
        return ids
    left_out = set(array("I", some))
    return array("I", (one for one in array("I", ids) if one not in left_out)).tobytes()


def last_first(ids: bytes) -> bytes:
    """The same ids, last first: what is found from a chain's tail on, as a policy takes it."""
    if len(ids) <= ID_BYTES:
        return ids
    order = array("I", ids)
    order.reverse()
    return order.tobytes()
