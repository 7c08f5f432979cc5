"""The blocks of one tenant: keeps the store, which has their records, and the policy in step.

The policy may select exactly the blocks that may be evicted: those that are READY and that no lease holds. It
may also select blocks that only a write to the disk holds.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import Any

from kvtier.errors import Refused, bad_request
from kvtier.key import Keys
from kvtier.wire import CAME, DISK, MEMORY, WENT
from kvtier_daemon.catalog.admission import Admission
from kvtier_daemon.catalog.changes import ChangeFeed
from kvtier_daemon.catalog.expiring import Expiring
from kvtier_daemon.catalog.miss_log import (
    EVICTED,
    FORGOTTEN,
    GONE,
    ONCE,
    SLOW_DISK,
    UNWRITTEN,
    MissLog,
)  # fmt: skip
from kvtier_daemon.catalog.policy import Policy
from kvtier_daemon.catalog.residency import Residency
from kvtier_daemon.catalog.spaces import KnownSpace
from kvtier_kernels import Store

ID_BYTES = 4
LOOK_AHEAD = 4  # victims to look at for each that is wanted, if some are not on disk yet
TIERS = "warm", "cold"  # the names of the tiers, by their numbers: memory, and those below it
# States that `Store.states` returns in addition to the wire's outcomes; BELOW + n: only in tier n.
PROMOTING, BELOW = 6, 16
LIMIT_QUEUED = 1 << 18  # blocks and events; above this, the policy gets all of them at once
PORTION_BLOCKS = 8192  # that the policy gets in one step: some 0.6 ms
WHY_EVICTED = (
    "capacity",  # evicted for other blocks; it was only in memory
    "demoted",  # evicted for other blocks; it is on disk
    "forgotten",
    "lost",  # was only on disk, in a segment that is reused
    "spoilt",  # was only on disk, and its frame is damaged
)


class DeferredPolicy:
    """A Policy that passes the events of lookups and commits to another one after these were answered.

    The policy takes longer for them than the rest of the request, and no answer depends on it. So these
    events are queued until `settle` or `settle_portion`; every other call passes the queue on first. The
    policy gets the same events in the same order; one of more than PORTION_BLOCKS blocks arrives as several.
    Each event contains the names of its blocks, so it stays correct if an id is reused in between."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._now = policy.now
        self._queue: deque[tuple[int, Callable[..., None], tuple[Any, ...]]] = deque()
        self._queued = 0

    def settle(self) -> None:
        """Pass the queue to the policy, oldest event first."""
        while not self.settle_portion():
            pass

    def settle_short(self) -> bool:
        """Pass the queue on unless it is longer than a portion. Return whether it is empty."""
        return self._queued <= PORTION_BLOCKS and self.settle_portion()

    def settle_portion(self) -> bool:
        """Pass on the oldest events, of some PORTION_BLOCKS blocks. Return whether the queue is empty."""
        queue, passed = self._queue, 0
        while queue and passed < PORTION_BLOCKS:
            weight, event, arguments = queue.popleft()
            passed += weight
            self._queued -= weight
            event(*arguments)
        return not queue

    def _later(self, blocks: int, event: Callable[..., None], *arguments: Any) -> None:
        for size, some in (
            ((blocks, arguments),) if blocks <= PORTION_BLOCKS else _portions(blocks, arguments)
        ):
            self._queue.append((1 + size, event, some))
            self._queued += 1 + size
        if self._queued > LIMIT_QUEUED:
            self.settle()

    # Events of lookups and commits.

    def now(self, seconds: float) -> None:
        queue = self._queue
        if queue and queue[-1][1] is self._now:  # idle tenants have no other events
            queue[-1] = (1, self._now, (seconds,))
        else:
            self._later(0, self._now, seconds)

    def wanted(self, ids: bytes, names: bytes = b"") -> None:
        self._later(len(ids) // ID_BYTES, self.policy.wanted, ids, names)

    def wanted_keys(self, ids: bytes, keys: bytes, place: int) -> None:
        """The same for the blocks with these keys. Their names are computed later too."""
        self._later(len(ids) // ID_BYTES, self._wanted_keys, ids, keys, place)

    def _wanted_keys(self, ids: bytes, keys: bytes, place: int) -> None:
        self.policy.wanted(ids, Store.names_of_keys(keys, place))

    def refreshed(self, ids: bytes) -> None:
        self._later(len(ids) // ID_BYTES, self.policy.refreshed, ids)

    def held(self, ids: bytes) -> None:
        self._later(len(ids) // ID_BYTES, self.policy.held, ids)

    def freed(self, ids: bytes) -> None:
        self._later(len(ids) // ID_BYTES, self.policy.freed, ids)

    def added(self, ids: bytes, names: bytes = b"", parents: bytes = b"") -> None:
        self._later(len(ids) // ID_BYTES, self.policy.added, ids, names, parents)

    # Events of evictions and forgets.

    def left(self, ids: bytes) -> None:
        self.settle()
        self.policy.left(ids)

    def gone(self, ids: bytes) -> None:
        if ids:
            self.settle()
            self.policy.gone(ids)

    def demoted(self, ids: bytes) -> None:
        self.settle()
        self.policy.demoted(ids)

    def hinted(self, ids: bytes, importance: float, names: bytes = b"") -> None:
        self.settle()
        self.policy.hinted(ids, importance, names)

    def victims(self, n: int) -> bytes:
        self.settle()
        return self.policy.victims(n)

    def __len__(self) -> int:
        self.settle()
        return len(self.policy)

    def memory_bytes(self) -> int:
        return self.policy.memory_bytes()


def _portions(blocks: int, arguments: tuple[Any, ...]) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Divide the arguments of an event. The last blocks are first: a policy reads a chain from its end."""
    for end in range(blocks, 0, -PORTION_BLOCKS):
        first = max(0, end - PORTION_BLOCKS)
        yield (
            end - first,
            tuple(
                each[first * (width := len(each) // blocks) : end * width]
                if isinstance(each, bytes)
                else each
                for each in arguments
            ),
        )


class ReadBlocks:
    """Counts the blocks that were read from disk, not from compressed memory, and then used by a client."""

    def __init__(self) -> None:
        self.loaded = 0
        self.loaded_again = 0  # of them, those that were read because they were recomputed
        self._unused: set[int] = set()
        self._compressed: set[int] = set()  # of them, those whose frames were in memory
        self._recomputed: set[int] = set()

    def recomputed(self, ids: bytes) -> None:
        """These blocks are being read because they were recomputed."""
        self._recomputed.update(array("I", ids))

    def read(self, ids: bytes, compressed: bool = False) -> None:
        self._unused.update(array("I", ids))
        if compressed:
            self._compressed.update(array("I", ids))

    def used(self, ids: bytes) -> None:
        """A client has used these blocks. Each counts once for each read."""
        if self._unused:
            used = self._unused.intersection(array("I", ids))
            self.loaded += len(used - self._compressed)
            self.loaded_again += len(used & self._recomputed)
            self._unused -= used
            self._recomputed -= used
            self._compressed -= used

    def left(self, ids: bytes) -> None:
        """These blocks are no longer in memory, or will not be read."""
        for blocks in (self._unused, self._recomputed, self._compressed):
            if blocks:
                blocks.difference_update(array("I", ids))


class BlockTable:
    """Changes store and policy together. `miss_log` gets the reason for each block that goes."""

    def __init__(
        self, store: Store, policy: Policy, changes: ChangeFeed, miss_log: MissLog
    ) -> None:
        self.store = store
        self.changes = changes
        self.policy = policy
        self.evicted: Counter[str] = Counter(dict.fromkeys(WHY_EVICTED, 0))
        self.miss_log = miss_log
        self.admission = Admission()
        self.expiring = Expiring()
        # Blocks that were evicted without a write to disk, by reason.
        self.unwritten: Counter[str] = Counter(dict.fromkeys(UNWRITTEN, 0))
        self.why_unwritten = EVICTED  # the reason now; EVICTED: there is no disk
        self.spares_unwritten = True  # evict blocks that are on disk first
        self.writes_go_on = False  # the last blocks to write were written, or have no place yet
        self.planned_writes = 0  # blocks of writes to the disk that have not ended
        # Those of them that only their write holds: the policy knows them.
        self._writing: set[int] = set()
        self.reads = ReadBlocks()
        self.residency = Residency(store, policy)
        self.dead_frames = bytearray()  # segment and page of frames that no block uses
        # For clients that read frames: changes when blocks that may be on disk are forgotten, and
        # when blocks lose their frames.
        self.forgets: array[int] | memoryview[int] = array("Q", (0,))
        # Of purged blocks that still have a slot.
        self._erasures: dict[int, Callable[[], None]] = {}

    def lease(self, batches: list[bytes]) -> None:
        """Hold the blocks of all batches, or of none. A batch must not contain a block twice."""
        taken: list[bytes] = []
        try:
            for ids in batches:
                self.store.lease(ids)
                taken.append(ids)
        except (OverflowError, ValueError) as error:
            for ids in taken:
                self.store.unlease(ids)
            if isinstance(error, ValueError):
                raise bad_request("a key is given twice") from error
            raise Refused("too_many", "a block is held by too many leases") from error
        for ids in taken:
            self.policy.held(ids)
            if self._writing:
                self._end_write_holds(ids)

    def _end_write_holds(self, ids: bytes) -> None:
        self._writing.difference_update(array("I", ids))

    def unlease(self, ids: bytes) -> None:
        evictable, freed = self.store.unlease(ids)
        self.policy.freed(evictable)
        if freed:
            self.gone(freed, "forgotten")

    def gone(self, ids: bytes, why: str) -> None:
        """These blocks are neither in memory nor on disk now."""
        if self.expiring.time_of:
            self.expiring.drop(ids)
        if self._erasures:
            for one in array("I", ids):
                if erase := self._erasures.pop(one, None):
                    erase()
        self.policy.gone(ids)
        self.residency.gone(ids)
        self.reads.left(ids)
        self.evicted[why] += len(ids) // ID_BYTES

    def hold_for_write(self, victims: bytes) -> None:
        """Hold victims while they are written to the disk. They keep their places in the order."""
        self.store.lease(victims)
        self._writing.update(array("I", victims))

    def end_write(self, ids: bytes) -> None:
        """End such holds. Blocks that were read meanwhile return to the policy, tails of chains first."""
        evictable, freed = self.store.unlease(ids)
        read = array("I", (one for one in array("I", evictable) if one not in self._writing))
        self._writing.difference_update(array("I", ids))
        read.reverse()
        self.policy.freed(read.tobytes())
        self.gone(freed, "forgotten")

    def commit(self, ids: bytes, checksums: bytes, is_new: bool = True) -> None:
        """The slots of these blocks are written: make them READY. `is_new` is set for one group and shard of
        each key, so that a save counts once."""
        self.store.commit(ids, checksums)
        if self.changes.watched:
            self.changes.add(CAME, MEMORY, self.changes.name(ids))
        if self.admission.is_on and is_new:
            self.admission.note(self.store.keys_of(ids))
        self.came(ids)

    def came(self, ids: bytes) -> None:
        """These blocks are READY from now on."""
        added = self.residency.came(ids)
        if added:
            self.policy.added(added, self.store.names(added), self.store.parents(added))
        self.residency.framed(ids)

    def forget(self, ids: bytes) -> bool:
        """No match finds these blocks from now on. The caller counts it, unless they are only in memory. True
        if some of them stay until their lease, or their read from the disk, ends."""
        names = self.changes.name(ids) if self.changes.watched else b""
        self.miss_log.note(self.store.keys_of(ids), FORGOTTEN)
        freed, orphans, dead = self.store.forget(ids)
        self.expiring.drop(ids)
        for tier in (MEMORY, DISK):
            self.changes.add(WENT, tier, names)
        self._end_write_holds(ids)
        self.policy.held(ids)  # those that stay must not be selected
        self.gone(freed, "forgotten")
        self.policy.demoted(orphans)
        self.dead_frames += dead
        return len(freed) < len(ids)

    def erase_when_gone(self, ids: bytes, erasures: Sequence[Callable[[], None]]) -> None:
        """Call each of these once, in the call that frees the slot of its block. The blocks are in memory,
        and are to be forgotten now: some stay until a lease ends."""
        self._erasures.update(zip(array("I", ids), erasures, strict=True))

    def _note_victims(self, victims: bytes) -> dict[int, int]:
        """Log the reason for the case that these are evicted, without those that stay on disk. Where the
        reasons differ, return the reason of each block that is only in memory."""
        lasting = victims
        if self.expiring.time_of:
            lasting = self.expiring.lasting(victims)
            self.miss_log.note(self.store.keys_of(_without(victims, lasting)), EVICTED)
        dirty = lasting if self.why_unwritten == EVICTED else self.store.dirty(lasting)
        if not dirty:
            return {}
        keys = self.store.keys_of(dirty)
        if self.why_unwritten != ONCE:
            self.miss_log.note(keys, self.why_unwritten)
            return {}
        again = self.admission.admitted(keys)
        self.miss_log.note(keys, ONCE)
        self.miss_log.note(b"".join(compress(Keys(keys), again)), SLOW_DISK)
        codes = (SLOW_DISK if one else ONCE for one in again)
        return dict(zip(array("I", dirty), codes, strict=True))

    def _count_unwritten(self, dirty: dict[int, int], evicted: bytes, below: bytes) -> None:
        """Count evicted blocks that should have been written. Blocks that expire are never written."""
        lasting = self.expiring.lasting(evicted) if self.expiring.time_of else evicted
        dropped = max(0, len(lasting) - len(below)) // ID_BYTES
        if self.why_unwritten == EVICTED or not dropped:
            return
        if self.why_unwritten != ONCE:
            self.unwritten[GONE[self.why_unwritten]] += dropped
            return
        self.unwritten.update(GONE[dirty[one]] for one in array("I", evicted) if one in dirty)

    def make_room(
        self, space: int, group: int, wanted: int, spare: bool = False, clean: bool = False
    ) -> bool:
        """Evict until `wanted` slots are free or no other block may be evicted: first blocks that an engine
        holds and that are on disk, then the coldest. With `spare`, and while blocks are being written to the
        disk, or with `clean`, evict only blocks that are on it; return whether others were spared and would
        make room."""
        store = self.store
        spare = spare and (self.writes_go_on or self.planned_writes > 0)
        victims: bytes | None = None
        while (short := wanted - store.room(space, group, wanted)) > 0:
            if victims is None:
                victims = b""  # the first pass uses slots that other spaces left empty
            else:
                most = short + len(self._writing)
                victims, unwritten = self._victims(most)
                if clean:
                    victims, unwritten = self.store.clean(victims, in_memory=True), b""
                elif unwritten and not spare:
                    victims, unwritten = (victims + unwritten)[: most * ID_BYTES], b""
                victims = self.residency.victims(short) + victims
                if not victims:
                    return bool(unwritten)
            dirty = self._note_victims(victims) if victims else {}
            evicted, orphans, below = store.make_room(space, group, wanted, victims)
            self._evicted(evicted, orphans, below, dirty)
            if victims and not evicted:
                break
        return False

    def _victims(self, wanted: int) -> tuple[bytes, bytes]:
        """The next victims of the policy. While the disk writes what was saved, those that are already on it,
        and the others, which would be lost."""

        def unwritten(ids: bytes) -> bytes:
            dirty = self.store.dirty(ids)
            return self.expiring.lasting(dirty) if self.expiring.time_of else dirty

        victims = self.policy.victims(wanted)
        spares = self.spares_unwritten and self.why_unwritten == SLOW_DISK
        if not spares or not unwritten(victims):
            return victims, b""
        victims = self.policy.victims(wanted * LOOK_AHEAD)
        last = unwritten(victims)
        return _without(victims, last)[: wanted * ID_BYTES], last

    def leave_retired(self, is_over: bool, limit: int) -> tuple[bool, bytes]:
        """Evict at most `limit` blocks of retired extents: those that are on disk too, or with `is_over` all
        that no lease holds. Return whether there may be more, and the READY blocks that are left."""
        ready = self.store.ready_in_retired()[: limit * ID_BYTES]
        dirty = self._note_victims(ready) if is_over else {}
        evicted, orphans, below = self.store.leave_retired(is_over, limit)
        self._evicted(evicted, orphans, below, dirty)
        return len(evicted) == limit * ID_BYTES, self.store.ready_in_retired()

    def _evicted(self, evicted: bytes, orphans: bytes, below: bytes, dirty: dict[int, int]) -> None:
        """The store has evicted these blocks; those `below` are still on disk."""
        if self.changes.watched:
            self.changes.add(WENT, MEMORY, self.changes.evicted())
        self.policy.left(self.residency.evicted(evicted, below))
        self.policy.gone(_without(evicted, below))
        self.policy.demoted(orphans)
        self.evicted["capacity"] += (len(evicted) - len(below)) // ID_BYTES
        self.evicted["demoted"] += len(below) // ID_BYTES
        self._count_unwritten(dirty, evicted, below)
        self.reads.left(evicted)
        if self.expiring.time_of:
            self.expiring.drop(evicted)

    def resident(self, space: KnownSpace, keys: bytes) -> bytes:
        """The ids of these keys' blocks in every group and shard, in memory and on disk, each once."""
        space.check_keys(keys)
        return self.store.resident(space.index, keys) if space.index >= 0 else b""

    def memory_bytes(self) -> int:
        return self.store.memory_bytes() + self.policy.memory_bytes()

    @property
    def notes_bytes(self) -> int:
        """The memory for notes on evicted and on requested blocks: constant, however many there are."""
        return self.miss_log.memory_bytes() + self.admission.memory_bytes()


def _without(ids: bytes, some: bytes) -> bytes:
    if not some:
        return ids
    left_out = set(array("I", some))
    return array("I", (one for one in array("I", ids) if one not in left_out)).tobytes()


def last_first(ids: bytes) -> bytes:
    """The same ids in reverse order. A policy expects the tail of a chain first."""
    if len(ids) <= ID_BYTES:
        return ids
    order = array("I", ids)
    order.reverse()
    return order.tobytes()
