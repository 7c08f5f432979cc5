"""What one tenant has, where, and who may touch it. Synchronous and pure: it decides, others act.

The store (native) knows blocks, slots and the prefix tree; the policy knows who goes first; the catalog
puts them together and keeps the leases. No clock: every call that needs one is given `now`, in seconds
of a monotonic clock. No call awaits, so decisions cannot interleave.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvtier.catalog.blocks import ID_BYTES, Blocks, last_first
from kvtier.catalog.changes import Changes, Watch
from kvtier.catalog.cold import COLD, PROMOTING, Cold
from kvtier.catalog.departures import BY_POLICY, NOTES_BYTES, Departures, Lookups, near
from kvtier.catalog.leases import NO_LEASE, NOBODY, LeaseId, Leases, SessionId
from kvtier.catalog.reading import Held, Reading
from kvtier.catalog.spaces import Space, Spaces
from kvtier.catalog.writing import Granted, Writing
from kvtier.errors import Refused
from kvtier.key import KEY_BYTES
from kvtier.layout import KvSpec
from kvtier.planning import COMPUTE
from kvtier.policy.base import Policy
from kvtier.policy.deferred import Deferred
from kvtier.wire import GRANTED, GROWING, IN_PROGRESS, NO_ROOM, OUTCOMES, Part
from kvtier_kernels import Store

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from kvtier_kernels._native import Counts

LIMIT_LEASE_S = 3600.0
WHY_MISSED = (
    "absent",
    "incomplete",  # some part of the block is not here
    "in_progress",  # being saved
    "cold",  # on disk, and not to be brought
    "promoting",  # on its way, and not to be waited for
    "not_read",  # was on its way, and did not come
    *sorted(COMPUTE),  # on disk, and computing is sooner
)
WHERE = ("in_memory", "coming", "on_disk", "in_progress", "incomplete")

__all__ = ["Catalog", "Found", "Granted", "LeaseId", "SessionId", "Space", "Watch"]


@dataclass(slots=True, frozen=True)
class Found:
    """`coming` more blocks after the ready ones are on disk, or on their way from it. The first `skipped`
    ones count as ready because the client holds them itself."""

    ready: int
    coming: int
    lease: LeaseId = NO_LEASE
    token: bytes = b""
    parts: tuple[Part, ...] = ()
    skipped: int = 0


class Catalog:
    """Everything of one tenant. Another tenant has another catalog, so nothing crosses."""

    def __init__(self, store: Store, policy: Policy, notes_bytes: int = NOTES_BYTES) -> None:
        self._store = store
        self._policy = policy
        own = policy.policy if isinstance(policy, Deferred) else policy
        self._policy_name = type(own).__name__.lower()
        self._spaces = Spaces(store)
        self._changes = Changes(store, self._spaces)
        self.blocks = Blocks(store, policy, self._changes, Departures(notes_bytes))
        self._leases = Leases()
        self._reading = Reading(self.blocks, self._leases)
        self._writing = Writing(self.blocks, self._spaces, self._leases)
        self.cold = Cold(self.blocks, self._spaces)
        self.lookup_tokens = 0
        self.hit_tokens: Counter[str] = Counter(warm=0, cold=0)
        self.miss_tokens: Counter[str] = Counter()
        self.last_miss = ""  # why the last lookup that was counted did not find all
        self.lookups = Lookups()
        self.saved_tokens = 0
        self.saved_bytes = 0
        self.used_tokens: Counter[str] = Counter(
            warm=0, cold=0
        )  # of those found, as clients report
        self.loaded_bytes = 0  # likewise
        self.avoided_s = 0.0  # of computing, by what was found, where a client said what that takes
        self.refused_tokens: Counter[str] = Counter(dict.fromkeys(OUTCOMES[1:], 0))
        self.growing = False  # more extents come by themselves

    # --- spaces and room ---------------------------------------------------------------------

    def add_extent(self, nbytes: int, generations: Buffer) -> int:
        """Room for more blocks, usable from this call on; `generations` is its table."""
        return self._store.add_extent(nbytes, generations)

    def open(self, identity: bytes, spec: KvSpec, session: SessionId = NOBODY) -> Space:
        """The space of this identity, made on first sight."""
        return self._spaces.open(identity, spec, session)

    def space(self, number: int) -> Space:
        """The space of this number, which is told once and never another's."""
        return self._spaces.at(number)

    # --- looking and reading -----------------------------------------------------------------

    def match(self, space: Space, keys: bytes, count: bool = True, brings: bool = False) -> Found:
        """The longest prefix that every group can restore; it counts as used from now. Without `count` it is
        a lookup that was told already. `brings` says that what is on disk will be brought, and so is no
        miss."""
        space.check_keys(keys)
        ready, coming, parts = self._reading.find(space, keys)
        self._use(space, parts, keys, count)
        if count:
            self._count_lookup(space, keys, ready, coming if brings else 0)
        return Found(ready, coming)

    def load(
        self,
        session: SessionId,
        space: Space,
        keys: bytes,
        deadline_s: float,
        shards: Sequence[int],
        now: float,
        count: bool = True,
        brings: bool = False,
        first: int = 0,
    ) -> Found:
        """Match, and a lease on what is ready. With nothing ready there is no lease (id 0). The client holds
        the blocks before `first` itself: where some of them are on disk, they count as ready."""
        space.check_keys(keys)
        ready, coming, held = self._reading.find(space, keys)
        skipped = first if ready < first < ready + coming else 0
        if skipped:
            self._use(space, held, keys, count)
            ready, coming, held = self._reading.find_after(space, keys, skipped)
        parts = self._reading.tell(held, shards)
        self._policy.now(now)
        self._use(space, held, keys, count)
        if count:
            self._count_lookup(space, keys, ready, coming if brings else 0)
        if not held:
            return Found(ready, coming, skipped=skipped)
        deadline = now + min(deadline_s, LIMIT_LEASE_S)
        lease = self._reading.hold(session, space, held, ready, deadline)
        return Found(ready, coming, lease.id, lease.token, parts, skipped)

    def _use(self, space: Space, parts: Sequence[Held], keys: bytes, count: bool) -> None:
        """The one place that says that a request used what it found."""
        for held in parts:
            if count:
                first, blocks = held.first, len(held.ids) // ID_BYTES
                theirs = keys[first * KEY_BYTES : (first + blocks) * KEY_BYTES]
                place = space.place_of(held.group, held.shard)
                self._policy.wanted(held.ids, Store.names_of_keys(theirs, place))
            else:
                self._policy.refreshed(held.ids)

    def adopt(self, session: SessionId, token: bytes, shards: Sequence[int]) -> Found:
        """Join the lease with this token. The lease lasts until all who joined it let go."""
        lease = self._reading.with_token(token)
        parts = self._reading.tell(lease.parts, shards)
        self._reading.join(session, lease)
        return Found(lease.prefix_blocks, 0, lease.id, lease.token, parts)

    def release(
        self, session: SessionId, lease_id: LeaseId, warm: int = 0, cold: int = 0, nbytes: int = 0
    ) -> None:
        """End the session's reading under this lease, of which it used `warm` tokens from memory, `cold` ones
        from disk, and `nbytes`. A lease that ran out is no error."""
        if lease_id in self._writing:
            raise Refused("unknown_lease", f"lease {lease_id} is one to write")
        space = self._reading.release(session, lease_id)
        if not nbytes:
            return
        self.used_tokens["warm"] += warm
        self.used_tokens["cold"] += cold
        self.loaded_bytes += nbytes
        if space is not None:
            space.used_tokens += warm + cold
            space.loaded_bytes += nbytes

    # --- writing -----------------------------------------------------------------------------

    def reserve(
        self, session: SessionId, space: Space, group: int, shard: int, parent: bytes, keys: bytes
    ) -> Granted:
        """Plan a save: which keys are new, which slots they get, who goes for them.

        Keeps the leading new keys if not all have room. Never evicts a block of this very chain.
        """
        space.check_keys(keys)
        space.check_place(group, shard)
        if len(parent) not in (0, KEY_BYTES):
            raise Refused("bad_request", f"a parent of {len(parent)} bytes")
        granted = self._writing.reserve(session, space, group, shard, parent, keys)
        if self.growing:
            outcomes = granted.outcomes.replace(bytes((NO_ROOM,)), bytes((GROWING,)))
            granted = replace(granted, outcomes=outcomes)
        for code, reason in enumerate(OUTCOMES):
            if code != GRANTED:
                blocks = granted.outcomes.count(code)
                self.refused_tokens[reason] += blocks * space.spec.block_tokens
        return granted

    def commit(
        self, session: SessionId, lease_id: LeaseId, first: int, count: int, checksums: bytes = b""
    ) -> bytes:
        """Blocks [first, first + count) of the lease are READY from now on; their ids, for whoever
        writes them through to the disk."""
        lease, ids = self._writing.commit(session, lease_id, first, count, checksums)
        spec = lease.space.spec
        self.saved_tokens += count * spec.block_tokens
        self.saved_bytes += count * spec.group_block_bytes(lease.group)
        return ids

    def abort(self, session: SessionId, lease_id: LeaseId) -> None:
        """What the lease has not committed is free again: its writer says that it writes no more."""
        self._writing.abort(session, lease_id)

    # --- the other wishes --------------------------------------------------------------------

    def pin(self, space: Space, keys: bytes, ttl_s: float, now: float) -> int:
        """Keep the ready prefix for `ttl_s`, as far as pins may go; how many blocks that is."""
        space.check_keys(keys)
        return self._reading.pin(space, keys, ttl_s, now)

    def unpin(self, space: Space, keys: bytes) -> int:
        """End the pins that hold nothing but blocks of this prefix; how many blocks they held."""
        space.check_keys(keys)
        return self._reading.unpin(space, keys)

    @property
    def pinned_bytes(self) -> int:
        return self._reading.pinned_bytes

    def hint(self, space: Space, keys: bytes, importance: float) -> int:
        """Tell the policy how much these blocks matter, 0 (gone first) to 1."""
        ids = self._resident(space, keys)
        if importance > 0:
            self._policy.hinted(ids, importance)
        else:
            self._policy.demoted(last_first(ids))
        return len(ids) // ID_BYTES

    def forget(self, space: Space, keys: bytes) -> int:
        """These blocks match no more from now on, on disk neither; those being read go when their
        readers do."""
        ids = self._resident(space, keys)
        if ids and self.blocks.forget(ids):
            self._reading.unpin_forgotten()
        return len(ids) // ID_BYTES

    def forget_again(self, identity: bytes, keys: bytes) -> None:
        """Forget what has been found since, whoever has this space by now."""
        space = self._spaces.named(identity)
        if space is not None:
            self.forget(space, keys)

    def _resident(self, space: Space, keys: bytes) -> bytes:
        """The ids of these keys' blocks in every group and shard, in memory and on disk, each once."""
        space.check_keys(keys)
        return self._store.resident(space.index, keys) if space.index >= 0 else b""

    def watch(self, session: SessionId, space: Space, awake: Callable[[], None]) -> Watch:
        """What comes to this space and goes is kept for the session until it takes it, up to a limit."""
        watch = space.watches.get(session)
        if watch is None:
            if session not in space.users:
                raise Refused("bad_request", f"space {space.number} is not open in this session")
            watch = space.watches[session] = Watch(awake)
            self._changes.look()
        return watch

    # --- why ---------------------------------------------------------------------------------

    def explain(self, key: bytes, space: Space | None = None) -> dict[str, Any]:
        """Where this block is, or why it is nowhere; in this space, or in whichever has it."""
        spaces = [space] if space is not None else list(self._spaces)
        best: tuple[str, Space | None] = ("", space)
        for one in spaces:
            where = self._where(one, key)
            if where and (not best[0] or WHERE.index(where) < WHERE.index(best[0])):
                best = where, one
        told: dict[str, Any] = {"key": key.hex(), "why": best[0]}
        if best[1] is not None:
            told["space"] = best[1].number
        if best[0] in ("", "incomplete"):
            why, ago = self.blocks.departures.of(key)
            if why:
                told |= {"why": why, "ago_s": round(ago, 1)}
                if why in BY_POLICY:
                    told["policy"] = self._policy_name
            elif not best[0]:
                told["why"] = "never_stored"
                if space is not None and (others := near(space, list(self._spaces))):
                    told["near"] = others
                    if space.index < 0:
                        told["why"] = "other_identity"
        return told

    def _where(self, space: Space, key: bytes) -> str:
        """What there is of this block in this space; empty for nothing."""
        if space.index < 0:
            return ""
        states = set(self._store.states(space.index, key))
        if IN_PROGRESS in states:
            return "in_progress"
        if not states - {GRANTED}:
            return ""
        if GRANTED in states:
            return "incomplete"
        if COLD in states:
            return "on_disk"
        return "coming" if PROMOTING in states else "in_memory"

    # --- ends --------------------------------------------------------------------------------

    def expire(self, now: float) -> int:
        """End the read leases whose deadline has passed, some at a time; how many there were. Whoever
        still reads under one sees the slot's generation change if the slot is given away."""
        self._policy.now(now)
        return self._reading.expire(now)

    def end_session(self, session: SessionId, gone: bool) -> bool:
        """The session is over. Its reads end, now or at the next calls of `expire`; its unfinished writes
        are free at once if its process is `gone` or has promised to touch nothing, else quarantined.
        True if something stays so."""
        leases = self._leases.of(session)
        written = [lease_id for lease_id in leases if lease_id in self._writing]
        quarantined = self._writing.end_session(session, written, gone)
        self._reading.end_session(session, self._leases.of(session))
        self._spaces.leave(session)
        self._changes.look()
        return quarantined

    def process_gone(self, session: SessionId) -> None:
        """The process behind an ended session exists no more: nothing can write its slots."""
        self._writing.process_gone(session)

    # --- saying how it is --------------------------------------------------------------------

    def counts(self) -> Counts:
        return self._store.counts()

    @property
    def spaces(self) -> int:
        return len(self._spaces)

    @property
    def leases(self) -> int:
        return len(self._leases)

    @property
    def evicted_blocks(self) -> Counter[str]:
        return self.blocks.evicted

    def each_space(self) -> Sequence[Space]:
        """Every space, in the order of their numbers."""
        return list(self._spaces)

    def tally(self, first: int, look: int) -> tuple[int, bytes]:
        """How many blocks each space has among these records, by `Space.index`; where to go on, 0 at the end
        (see wire.TALLY)."""
        return self._store.tally(first, look)

    def listed(self, space: Space, first: int, look: int, limit: int) -> tuple[int, bytes]:
        """The space's blocks among these records, as many as `limit`, forgotten ones that somebody reads too;
        where to go on, 0 at the end (see wire.LISTED)."""
        if space.index < 0:
            return 0, b""
        return self._store.listed(space.index, first, look, limit)

    def memory_bytes(self) -> int:
        return self._store.memory_bytes() + self._policy.memory_bytes()

    @property
    def notes_bytes(self) -> int:
        """What is kept of blocks that went, and of what was wanted: the same however many there are."""
        return self.blocks.departures.memory_bytes() + self.blocks.admission.memory_bytes()

    def _count_lookup(self, space: Space, keys: bytes, ready: int, brought: int) -> None:
        tokens = space.spec.block_tokens
        blocks = len(keys) // KEY_BYTES
        self.lookup_tokens += blocks * tokens
        self.hit_tokens["warm"] += ready * tokens
        self.hit_tokens["cold"] += brought * tokens
        self.count_came(space, ready)
        found = ready + brought
        if self.blocks.admission.is_on:
            self.blocks.admission.found(keys[: found * KEY_BYTES])
        self.last_miss = ""
        if found < blocks:
            self.last_miss = self._why_missing(space, keys, found)
            self.miss_tokens[self.last_miss] += (blocks - found) * tokens

    def count_lost(self, space: Space, blocks: int, why: str = "not_read") -> None:
        """So many blocks that were counted as coming will not come."""
        if not blocks:
            return
        tokens = blocks * space.spec.block_tokens
        self.hit_tokens["cold"] -= tokens
        self.miss_tokens[why] += tokens

    def count_came(self, space: Space, blocks: int, before: int = 0) -> None:
        """So many blocks, after others, need not be computed."""
        if blocks and space.prefill is not None:
            self.avoided_s += space.recompute_s(blocks, before)

    def _why_missing(self, space: Space, keys: bytes, at: int) -> str:
        """Why the prefix ends at block `at`: the worst state that this block has in any part."""
        if space.index < 0:
            return "absent"
        states = self._store.states(space.index, keys[at * KEY_BYTES : (at + 1) * KEY_BYTES])
        if IN_PROGRESS in states:
            return "in_progress"
        if GRANTED in states:
            return "absent"
        if COLD in states:
            return "cold"
        return "promoting" if PROMOTING in states else "incomplete"
