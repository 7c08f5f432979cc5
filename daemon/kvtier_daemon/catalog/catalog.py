"""The catalog of one tenant: which blocks exist, where they are, who uses them. Synchronous, without I/O.

The store (native) has blocks, slots and the prefix tree; the policy selects victims; the catalog connects
them and keeps the leases. It has no clock: calls that need the time get `now`, in seconds of a monotonic
clock. No call awaits, so decisions cannot interleave.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from kvtier.errors import Refused, bad_request
from kvtier.key import KEY_BYTES
from kvtier.wire import GRANTED, GROWING, IN_PROGRESS, NO_ROOM, OUTCOMES, Part
from kvtier_daemon.catalog.arrivals import Arrivals
from kvtier_daemon.catalog.awaited import AwaitedWrites
from kvtier_daemon.catalog.blocks import BELOW, ID_BYTES, PROMOTING, TIERS, BlockTable, last_first
from kvtier_daemon.catalog.changes import ChangeFeed
from kvtier_daemon.catalog.demotion import Demotions
from kvtier_daemon.catalog.direct import DirectBlocks
from kvtier_daemon.catalog.explain import find_reason
from kvtier_daemon.catalog.holds import Holds
from kvtier_daemon.catalog.hot import HotCopies
from kvtier_daemon.catalog.kept_blocks import KeptBlocks
from kvtier_daemon.catalog.leases import NO_LEASE, LeaseId, Leases, SessionId
from kvtier_daemon.catalog.miss_log import NOTES_BYTES, SPOILT, MissLog
from kvtier_daemon.catalog.pins import PinnedPrefixes
from kvtier_daemon.catalog.policy import Policy
from kvtier_daemon.catalog.promotion import Promotions
from kvtier_daemon.catalog.reading import Held, Lookups, ReadLeases
from kvtier_daemon.catalog.segment_frames import SegmentFrames
from kvtier_daemon.catalog.spaces import KnownSpace, SpaceTable
from kvtier_daemon.catalog.watch import SpaceWatch
from kvtier_daemon.catalog.writing import Granted, WriteLeases
from kvtier_daemon.planning import COMPUTE
from kvtier_kernels import Store

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from kvtier_kernels._native import Counts

LIMIT_LEASE_S = 3600.0
WHY_MISSED = (
    "absent",
    "incomplete",  # a part of the block is missing
    "in_progress",  # it is being saved
    "cold",  # it is on disk, and is not read
    "promoting",  # it is being read, and the request does not wait
    "not_read",  # it was being read, and the read failed
    *sorted(COMPUTE),  # it is on disk, and computing is faster
)


class Found(msgspec.Struct, frozen=True, gc=False):
    """The answer of a match. `coming` blocks after the `ready` ones are on disk or being read. The first
    `skipped` blocks count as ready because the client has them."""

    ready: int
    coming: int
    lease: LeaseId = NO_LEASE
    token: bytes = b""
    parts: tuple[Part, ...] = ()
    skipped: int = 0


class Usage:
    """What clients of one tenant looked up, found, saved and used."""

    def __init__(self, blocks: BlockTable) -> None:
        self._blocks = blocks
        self.lookup_tokens = 0
        self.hit_tokens: Counter[str] = Counter(warm=0, cold=0, remote=0)
        self.miss_tokens: Counter[str] = Counter()
        self.last_miss = ""  # why the last counted lookup did not find all blocks
        self.saved_tokens = 0
        self.saved_bytes = 0
        # The tokens of hits that clients report as used, and their bytes.
        self.used_tokens: Counter[str] = Counter(warm=0, cold=0)
        self.loaded_bytes = 0
        self.avoided_s = 0.0  # time to compute the hits, if clients reported it
        self.refused_tokens: Counter[str] = Counter(dict.fromkeys(OUTCOMES[1:], 0))

    def count_lookup(
        self, space: KnownSpace, keys: bytes, ready: int, from_disk: int = 0, shared: int = 0,
        awaited: int = 0,
    ) -> None:  # fmt: skip
        """Count an answer: `ready` blocks of memory, and `from_disk` blocks that will be read, `shared` of
        them from the store that hosts share. `awaited` blocks are being written to memory."""
        tokens = space.spec.block_tokens
        blocks = len(keys) // KEY_BYTES
        self.lookup_tokens += blocks * tokens
        self.hit_tokens["warm"] += (ready + awaited) * tokens
        self.hit_tokens["cold"] += (from_disk - shared) * tokens
        self.hit_tokens["remote"] += shared * tokens
        if space.prefill is not None:
            self.count_avoided(space, ready)
        found = ready + from_disk + awaited
        self._blocks.admission.found(keys, found)
        self.last_miss = ""
        if found < blocks:
            self.last_miss = self._why_missing(space, keys, found)
            self.miss_tokens[self.last_miss] += (blocks - found) * tokens

    def count_lost(
        self, space: KnownSpace, blocks: int, why: str = "not_read", shared: int = 0
    ) -> None:
        """Count blocks as missed that were counted as coming and will not come."""
        if not blocks:
            return
        tokens = blocks * space.spec.block_tokens
        self.hit_tokens["cold"] -= tokens - shared * space.spec.block_tokens
        self.hit_tokens["remote"] -= shared * space.spec.block_tokens
        self.miss_tokens[why] += tokens

    def count_not_written(self, tokens: int) -> None:
        """Count tokens as missed that were counted as hits because others were writing them."""
        self.hit_tokens["warm"] -= tokens
        self.miss_tokens["in_progress"] += tokens

    def count_avoided(self, space: KnownSpace, blocks: int, before: int = 0) -> None:
        """Count the time to compute these blocks, which follow `before` others, as avoided."""
        if blocks and space.prefill is not None:
            self.avoided_s += space.recompute_s(blocks, before)

    def count_used(self, space: KnownSpace | None, warm: int, cold: int, nbytes: int) -> None:
        """A client used `warm` tokens from memory and `cold` ones from disk, of this many bytes."""
        self.used_tokens["warm"] += warm
        self.used_tokens["cold"] += cold
        self.loaded_bytes += nbytes
        if space is not None:
            space.used_tokens += warm + cold
            space.loaded_bytes += nbytes

    def _why_missing(self, space: KnownSpace, keys: bytes, at: int) -> str:
        """Why the prefix ends at block `at`: the worst state of its parts."""
        if space.index < 0:
            return "absent"
        states = self._blocks.store.states(space.index, keys[at * KEY_BYTES : (at + 1) * KEY_BYTES])
        if IN_PROGRESS in states:
            return "in_progress"
        if GRANTED in states:
            return "absent"
        if (lowest := max(states)) > BELOW:
            return TIERS[lowest - BELOW]
        return "promoting" if PROMOTING in states else "incomplete"


class Catalog:
    """The records of one tenant. Another tenant has another catalog; they share nothing."""

    def __init__(
        self, store: Store, policy: Policy, notes_bytes: int = NOTES_BYTES, policy_name: str = ""
    ) -> None:
        """`policy_name` is what `explain` calls the policy."""
        self._store = store
        self._policy = policy
        self._policy_name = policy_name
        self.spaces = SpaceTable(store)
        self._changes = ChangeFeed(store, self.spaces)
        self.blocks = BlockTable(store, policy, self._changes, MissLog(notes_bytes))
        self.leases = Leases()
        self.reading = ReadLeases(self.blocks, self.leases)
        self.awaited = AwaitedWrites(store)
        self._writing = WriteLeases(self.blocks, self.spaces, self.leases, self.awaited)
        self.hot = HotCopies(self.blocks, self.leases)
        self.pins = PinnedPrefixes(self.blocks, self.reading)
        self.kept = KeptBlocks(self.blocks, self.spaces, self._writing, self.pins)
        self.holds = Holds(self.blocks)
        self.promotions = Promotions(self.blocks, self.holds)
        self.arrivals = Arrivals(self.blocks, self._writing, self.holds)
        self.demotions = Demotions(self.blocks, self.spaces)
        self.direct = DirectBlocks(self.blocks)
        self.segments = SegmentFrames(self.blocks, self.spaces, self.demotions)
        self.usage = Usage(self.blocks)
        self.lookups = Lookups()
        self.growing = False  # the tenant's memory will grow

    def add_extent(self, nbytes: int, generations: Buffer, notes: Buffer | None = None) -> int:
        """Add memory for blocks. `generations` is its generation table, `notes` are for the next daemon."""
        return self._store.add_extent(nbytes, generations, notes)

    def counts(self) -> Counts:
        return self._store.counts()

    # --- reading -------------------------------------------------------------------------------

    def match(self, space: KnownSpace, keys: bytes, is_new: bool = True) -> Found:
        """Find the longest prefix that every group can restore, and mark it as used; without `is_new`, the
        request marked it before. `usage.count_lookup` counts the answer."""
        found, held = self.find(space, keys)
        self.reading.note_use(space, held, keys, is_new)
        return found

    def find(self, space: KnownSpace, keys: bytes) -> tuple[Found, Sequence[Held]]:
        """The same without marking; also return the blocks that `reading.note_use` gets."""
        space.check_keys(keys)
        ready, coming, held = self.reading.find(space, keys)
        return Found(ready, coming), held

    def located(self, space: KnownSpace, keys: bytes) -> Found:
        """Find the same prefix, and mark nothing as used."""
        ready, coming, _ = self.reading.find(space, keys)
        return Found(ready, coming)

    def load(
        self,
        session: SessionId,
        space: KnownSpace,
        keys: bytes,
        deadline_s: float,
        shards: Sequence[int],
        now: float,
        is_new: bool = True,
        first: int = 0,
    ) -> Found:
        """Match, and take a lease on the ready blocks. Without a ready block, there is no lease (id 0). The
        client has the blocks before `first` itself: if some of them are on disk, they count as ready."""
        space.check_keys(keys)
        ready, coming, held = self.reading.find(space, keys)
        skipped = first if ready < first < ready + coming else 0
        if first and coming and self.blocks.residency:
            self._note_own(space, keys, min(first, ready + coming), is_new)
        if skipped:
            self.reading.note_use(space, held, keys, is_new)
            ready, coming, held = self.reading.find_after(space, keys, skipped)
        parts = self.reading.slots_of(held, shards)
        self._policy.now(now)
        self.reading.note_use(space, held, keys, is_new)
        if not held:
            return Found(ready, coming, skipped=skipped)
        deadline = now + min(deadline_s, LIMIT_LEASE_S)
        lease = self.reading.hold(session, space, held, ready, deadline)
        return Found(ready, coming, lease.id, lease.token, parts, skipped)

    def _note_own(self, space: KnownSpace, keys: bytes, first: int, is_new: bool) -> None:
        """A request uses the blocks before `first` from its engine's own cache: tell the policy of those that
        have left memory because the engine holds them."""
        away = self.blocks.residency.away_of(space, keys[: first * KEY_BYTES])
        if away and is_new:
            self._policy.wanted(away, self._store.names(away))
        elif away:
            self._policy.refreshed(away)

    def adopt(self, session: SessionId, token: bytes, shards: Sequence[int]) -> Found:
        """Join the lease with this token. It lasts until all sessions that joined it have released it."""
        lease = self.reading.with_token(token)
        parts = self.reading.slots_of(lease.parts, shards)
        self.reading.join(session, lease)
        return Found(lease.prefix_blocks, 0, lease.id, lease.token, parts)

    def with_copies(self, engine: str, lease_id: LeaseId, parts: Sequence[Part]) -> list[Part]:
        """Return these parts of a read lease with the slots of their copies on the engine's GPUs."""
        return self.hot.with_copies(engine, parts, self.reading.ids_of(lease_id))

    def release(
        self, session: SessionId, lease_id: LeaseId, warm: int = 0, cold: int = 0, nbytes: int = 0
    ) -> None:
        """End the session's part of this lease. It used `warm` tokens from memory and `cold` ones from disk,
        of `nbytes`. An expired lease is no error."""
        if lease_id in self._writing.of:
            raise Refused("unknown_lease", f"lease {lease_id} is a write lease, not a read lease")
        if nbytes:
            self.reading.note_loaded(lease_id)
        space = self.reading.release(session, lease_id)
        if nbytes:
            self.usage.count_used(space, warm, cold, nbytes)

    # --- writing -------------------------------------------------------------------------------

    def reserve(
        self, session: SessionId, space: KnownSpace, group: int, shard: int, parent: bytes, keys: bytes,
        expires_at: float = math.inf, waits: bool = False,
    ) -> Granted:  # fmt: skip
        """Find out which keys are new, and reserve slots for them; evict if necessary.

        If not all new keys have room, the leading ones get slots. Never evicts a block of this chain. Blocks
        that expire stay in memory only; `forget_expired` forgets them. With `waits`, no key gets a slot while
        blocks would be evicted that are being written to disk.
        """
        space.check_keys(keys)
        space.check_place(group, shard)
        if len(parent) not in (0, KEY_BYTES):
            raise bad_request(f"parent: got {len(parent)} bytes, expected {KEY_BYTES} or none")
        granted = self._writing.reserve(
            session, space, group, shard, parent, keys, expires_at, waits
        )
        if self.growing:
            outcomes = granted.outcomes.replace(bytes((NO_ROOM,)), bytes((GROWING,)))
            granted = replace(granted, outcomes=outcomes)
        # A client that waits for memory reserves all keys again.
        again = waits and GROWING in granted.outcomes
        for code, reason in enumerate(OUTCOMES):
            if code != GRANTED and not again:
                blocks = granted.outcomes.count(code)
                self.usage.refused_tokens[reason] += blocks * space.spec.block_tokens
        return granted

    def resume(self, before: SessionId, session: SessionId) -> None:
        """The client of an ended session continues with this one: its slots are kept for `regain`."""
        self._writing.resume(before, session)
        self.hot.resume(before, session)

    def regain(
        self, session: SessionId, space: KnownSpace, group: int, shard: int, keys: bytes,
        expires_at: float = math.inf,
    ) -> Granted:  # fmt: skip
        """Return a lease on the slots that an earlier session of this client had for these keys."""
        space.check_keys(keys)
        space.check_place(group, shard)
        return self._writing.regain(session, space, group, shard, keys, expires_at)

    def commit(
        self, session: SessionId, lease_id: LeaseId, first: int, count: int, checksums: bytes = b""
    ) -> bytes:
        """Make the blocks [first, first + count) of the lease READY; return their ids, for write-through."""
        lease, ids = self._writing.commit(session, lease_id, first, count, checksums)
        self.usage.saved_tokens += count * lease.space.spec.block_tokens
        self.usage.saved_bytes += count * lease.space.block_bytes[lease.group]
        return ids

    def abort(self, session: SessionId, lease_id: LeaseId) -> None:
        """Free the slots that the lease has not committed. The writer must not write to them from now on."""
        self._writing.abort(session, lease_id)

    # --- hints, and the end of blocks ----------------------------------------------------------

    def hint(self, space: KnownSpace, keys: bytes, importance: float) -> int:
        """Tell policy and admission how important these blocks are, from 0 (evict first) to 1."""
        ids = self.blocks.resident(space, keys)
        self.blocks.admission.hint(keys, importance)
        self._policy.hinted(ids, importance, self.blocks.store.names(ids))
        if not importance:
            self._policy.demoted(last_first(ids))
        return len(ids) // ID_BYTES

    def forget(self, space: KnownSpace, keys: bytes) -> int:
        """Forget these blocks in memory and on disk; those that are being read stay until the read ends."""
        ids = self.blocks.resident(space, keys)
        self.forget_ids(ids)
        return len(ids) // ID_BYTES

    def forget_ids(self, ids: bytes) -> None:
        """The same for blocks that may be on disk, given by their ids."""
        self._forget(ids)
        self.blocks.forgets[0] += 1  # also if the blocks were dropped before

    def _forget(self, ids: bytes) -> None:
        if ids and self.blocks.forget(ids):
            self.pins.unpin_forgotten()
            self.holds.end_forgotten()
        if ids:
            self.awaited.given_up()

    def purge(self, space: KnownSpace, keys: bytes, erase: Callable[[bytes, int], None]) -> int:
        """Forget these blocks, as `forget` does. `erase` is called with the slot and the bytes of each block
        in memory when its slot has become free, before another block can get the slot."""
        store = self.blocks.store
        ids = array("I", self.blocks.resident(space, keys))
        warm = array(
            "I", (one for one in ids if store.ready(array("I", (one,)).tobytes()))
        ).tobytes()
        blocks = self.demotions.described(warm, store.slots(warm))
        erasures = [
            partial(erase, block.slot, block.space.block_bytes[block.identity.group])
            for block in blocks
        ]
        self.blocks.erase_when_gone(warm, erasures)
        return self.forget(space, keys)

    def forget_spoilt(self, ids: bytes) -> None:
        """Forget these blocks, whose bytes are not those of their saves."""
        keys = self.blocks.store.keys_of(ids)
        self.forget_ids(ids)
        self.blocks.miss_log.note(keys, SPOILT)

    def forget_expired(self, now: float) -> None:
        """Forget some of the expired blocks. Until all are forgotten, no match finds any block."""
        expiring = self.blocks.expiring
        if not expiring.times or expiring.times[0] > now:
            return
        self._forget(expiring.take_due(now))  # these are only in memory

    # --- observing -----------------------------------------------------------------------------

    def watch(self, session: SessionId, space: KnownSpace, wake: Callable[[], None]) -> SpaceWatch:
        """Keep changes of this space for the session until it takes them, up to a limit."""
        if session not in space.users:
            raise bad_request(f"space {space.number} is not open in this session")
        watches = self.spaces.watches.setdefault(space.number, {})
        watch = watches.get(session)
        if watch is None:
            watch = watches[session] = SpaceWatch(wake)
            self._changes.update()
        return watch

    def explain(self, key: bytes, space: KnownSpace | None = None) -> dict[str, Any]:
        """Where this block is, or why it is not stored; in this space or in any."""
        found = find_reason(self.blocks, self.spaces, self._policy_name, key, space)
        if self.hot.arenas and "space" in found:
            index = self.spaces.at(found["space"]).index
            ids = self._store.resident(index, key) if index >= 0 else b""
            if gpus := self.hot.gpus_with(ids):
                found["gpus"] = gpus
        return found

    # --- sessions and deadlines ----------------------------------------------------------------

    def expire_leases(self, now: float) -> int:
        """End some of the read leases whose deadline has passed; return how many. A client that still reads
        detects by the generation that its slot was reused."""
        self._policy.now(now)
        self.holds.expire(now)
        self.blocks.residency.check()
        return self.reading.expire(now)

    def end_session(self, session: SessionId, gone: bool) -> bool:
        """End the session's leases: those for reading now or in the next calls of `expire_leases`. Its
        uncommitted slots are freed at once if its process is `gone` or has declared that it does not write;
        otherwise they are quarantined. True if any are."""
        copying = self.hot.end_session(session, gone)
        leases = self.leases.of(session)
        written = [lease_id for lease_id in leases if lease_id in self._writing.of]
        quarantined = self._writing.end_session(session, written, gone)
        self.reading.end_session(session, self.leases.of(session))
        self.blocks.residency.end_session(session)
        self.holds.end_session(session)
        self.spaces.leave(session)
        self._changes.update()
        return quarantined or copying

    def process_gone(self, session: SessionId) -> None:
        """Free the quarantined slots of an ended session: its process has ended."""
        self._writing.process_gone(session)
        self.hot.process_gone(session)
