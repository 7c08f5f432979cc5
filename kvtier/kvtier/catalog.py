"""What one tenant has, where, and who may touch it. Synchronous and pure: it decides, others act.

The store (native) knows blocks, slots and the prefix tree; the policy knows who goes first; this page
puts them together and keeps the leases. No clock: every call that needs one is given `now`, in seconds
of a monotonic clock. No call awaits, so decisions cannot interleave.

Which blocks the policy knows: exactly those that may be evicted, READY and held by no lease.
"""

from __future__ import annotations

import heapq
import secrets
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NewType

from kvtier.errors import Refused
from kvtier.key import KEY_BYTES
from kvtier.layout import KINDS, KvSpec
from kvtier.policy.base import Policy
from kvtier.wire import (
    DIGEST_BYTES,
    GRANTED,
    IN_PROGRESS,
    LIMIT_KEYS,
    NO_ROOM,
    OUTCOMES,
    Part,
)
from kvtier_kernels import Store

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from kvtier_kernels._native import Counts

LeaseId = NewType("LeaseId", int)
SessionId = NewType("SessionId", int)

ID_BYTES = 4
LIMIT_SPACES = 4096
LIMIT_LEASES = 32_768  # the store counts no more than 65,534 on a block
LIMIT_SESSION_LEASES = 4096
LIMIT_HELD_IDS = 1 << 24  # over all leases of a tenant: 64 MiB
LIMIT_TOLD_SLOTS = 160_000  # in one reply: what fits into a frame
LIMIT_LOOKS = 1 << 20  # keys times places of one request: some 10 ms
LIMIT_LEASE_S = 3600.0
LIMIT_PIN_S = 7 * 24 * 3600.0
PIN_SHARE = 0.25
TOKEN_BYTES = 16
NOBODY = SessionId(0)


@dataclass(slots=True)
class Space:
    """One model configuration of this tenant. `number` is its name on the wire and never another's; `index` the
    store's, while something is kept there."""

    number: int
    identity: bytes
    spec: KvSpec
    places: int
    users: set[SessionId]
    index: int = -1

    @property
    def reach(self) -> int:
        """How far up a chain one look may go."""
        return min(LIMIT_KEYS, LIMIT_LOOKS // self.places)


@dataclass(slots=True, frozen=True)
class Held:
    """The blocks of one group and shard under a lease, `first` being their place in the prefix."""

    group: int
    shard: int
    first: int
    ids: bytes


@dataclass(slots=True)
class ReadLease:
    """The right to read what it holds, until every holder let go or the deadline passed."""

    id: LeaseId
    token: bytes
    deadline: float
    holders: Counter[SessionId]
    space: Space
    parts: list[Held]
    prefix_blocks: int
    bytes: int = 0


@dataclass(slots=True)
class WriteLease:
    """The right to write slots that nobody else can see. It has no deadline: only a commit, an abort
    or the writer's death ends it, so that a late copy can't land in somebody else's block."""

    id: LeaseId
    session: SessionId
    space: Space
    group: int
    shard: int
    ids: bytes
    pending: bytearray


@dataclass(slots=True, frozen=True)
class Found:
    ready: int
    coming: int
    lease: LeaseId = LeaseId(0)
    token: bytes = b""
    parts: tuple[Part, ...] = ()


@dataclass(slots=True, frozen=True)
class Granted:
    lease: LeaseId
    outcomes: bytes
    slots: bytes


class Catalog:
    """Everything of one tenant. Another tenant has another catalog, so nothing crosses."""

    def __init__(self, store: Store, policy: Policy) -> None:
        self._store = store
        self._policy = policy
        self._spaces: dict[int, Space] = {}
        self._next_space = 0
        self._space_of: dict[bytes, Space] = {}
        self._reading: dict[LeaseId, ReadLease] = {}
        self._writing: dict[LeaseId, WriteLease] = {}
        self._by_token: dict[bytes, ReadLease] = {}
        self._of_session: dict[SessionId, set[LeaseId]] = {}
        self._quarantined: dict[SessionId, bytes] = {}
        self._deadlines: list[tuple[float, LeaseId]] = []
        self._next_lease = 1
        self._pinned_bytes = 0
        self._pins: set[LeaseId] = set()
        self._held_ids = 0
        self.lookup_tokens = 0
        self.hit_tokens = 0
        self.miss_tokens: Counter[str] = Counter()
        self.saved_tokens = 0
        self.saved_bytes = 0
        self.loaded_bytes = 0
        self.refused_tokens: Counter[str] = Counter(dict.fromkeys(OUTCOMES[1:], 0))
        self.evicted_blocks: Counter[str] = Counter(capacity=0, forgotten=0)

    # --- spaces and room ---------------------------------------------------------------------

    def add_extent(self, nbytes: int, generations: Buffer) -> int:
        """Room for more blocks, usable from this call on; `generations` is its table."""
        return self._store.add_extent(nbytes, generations)

    def open(self, identity: bytes, spec: KvSpec, session: SessionId = NOBODY) -> Space:
        """The space of this identity, made on first sight."""
        space = self._space_of.get(identity)
        if space is None:
            if len(self._spaces) >= LIMIT_SPACES:
                self._retire(list(self._spaces.values()))
            if len(self._spaces) >= LIMIT_SPACES:
                raise Refused("too_many", f"this tenant has {LIMIT_SPACES} spaces already")
            space = Space(self._next_space, identity, spec, spec.places, set())
            self._next_space += 1
            self._spaces[space.number] = space
            self._space_of[identity] = space
        space.users.add(session)
        return space

    def space(self, number: int) -> Space:
        space = self._spaces.get(number)
        if space is None:
            raise Refused("unknown_space", f"space {number} was never opened, or nobody used it")
        return space

    def _settle(self, space: Space) -> None:
        """Give the space its place in the store: something is about to be saved to it."""
        spec = space.spec
        sizes = map(spec.group_block_bytes, range(len(spec.cache_groups)))
        groups = [
            (KINDS.index(group.kind), group.window_blocks(spec.block_tokens), nbytes)
            for group, nbytes in zip(spec.cache_groups, sizes, strict=True)
        ]
        try:
            space.index = self._store.add_space(
                groups, [group.shards for group in spec.cache_groups]
            )
        except ValueError as error:
            raise Refused("too_many", f"this tenant's spaces: {error}") from error

    def _unsettle(self, space: Space) -> bool:
        """The store knows the space no more, if it holds nothing there."""
        if space.index >= 0 and self._store.drop_space(space.index):
            space.index = -1
        return space.index < 0

    def _leave(self, session: SessionId) -> None:
        """The session uses its spaces no more."""
        left = [space for space in self._spaces.values() if session in space.users]
        for space in left:
            space.users.discard(session)
        self._retire(left)

    def _retire(self, spaces: list[Space]) -> None:
        """Those go that nobody uses and that hold nothing."""
        for space in spaces:
            if not space.users and self._unsettle(space):
                del self._spaces[space.number], self._space_of[space.identity]

    # --- looking and reading -----------------------------------------------------------------

    def match(self, space: Space, keys: bytes, count: bool = True) -> Found:
        """The longest prefix that every group can restore; it counts as used from now."""
        self._check_keys(space, keys)
        ready, parts = self._find(space, keys)
        for held in parts:
            self._policy.touched(_reversed(held.ids))
        if count:
            self._count_lookup(space, keys, ready)
        return Found(ready, 0)

    def load(
        self,
        session: SessionId,
        space: Space,
        keys: bytes,
        deadline_s: float,
        shards: Sequence[int],
        now: float,
        count: bool = True,
    ) -> Found:
        """Match, and a lease on what is ready. With nothing ready there is no lease (id 0)."""
        self._check_keys(space, keys)
        ready, parts = self._find(space, keys)
        told = sum(len(held.ids) // ID_BYTES for held in parts if held.shard in shards)
        if told > LIMIT_TOLD_SLOTS:
            raise Refused("bad_request", f"{told} slots in one reply: ask for fewer shards at once")
        if count:
            self._count_lookup(space, keys, ready)
        if ready == 0:
            return Found(0, 0)
        lease = self._hold(session, space, parts, ready, now + min(deadline_s, LIMIT_LEASE_S))
        return Found(ready, 0, lease.id, lease.token, self._tell(lease, shards))

    def adopt(self, session: SessionId, token: bytes, shards: Sequence[int]) -> Found:
        """Join the lease with this token. The lease lasts until all who joined it let go."""
        lease = self._by_token.get(token)
        if lease is None:
            raise Refused("unknown_lease", "no lease has this token: it ended, or never was")
        lease.holders[session] += 1
        self._of_session.setdefault(session, set()).add(lease.id)
        parts = self._tell(lease, shards)
        return Found(lease.prefix_blocks, 0, lease.id, lease.token, parts)

    def release(self, session: SessionId, lease_id: LeaseId) -> None:
        """The session reads no more under this lease. One that ran out is no error."""
        lease = self._reading.get(lease_id)
        if lease is None:
            if not 0 < lease_id < self._next_lease or lease_id in self._writing:
                raise Refused("unknown_lease", f"lease {lease_id} is none to release")
            return
        if session not in lease.holders:
            raise Refused("unknown_lease", f"lease {lease_id} is not this session's")
        self._let_go(session, lease)

    def _hold(
        self,
        session: SessionId,
        space: Space,
        parts: list[Held],
        prefix_blocks: int,
        deadline: float,
    ) -> ReadLease:
        if len(self._reading) >= LIMIT_LEASES:
            raise Refused("too_many", f"this tenant has {LIMIT_LEASES} leases already")
        self._check_share(session)
        ids_held = sum(len(held.ids) for held in parts) // ID_BYTES
        if self._held_ids + ids_held > LIMIT_HELD_IDS:
            raise Refused("too_many", f"this tenant's leases hold {self._held_ids} blocks already")
        self._lease([held.ids for held in parts])
        self._held_ids += ids_held
        lease = ReadLease(
            self._new_lease_id(), secrets.token_bytes(TOKEN_BYTES), deadline, Counter({session: 1}), space,
            parts, prefix_blocks,
        )  # fmt: skip
        self._reading[lease.id] = lease
        self._by_token[lease.token] = lease
        self._of_session.setdefault(session, set()).add(lease.id)
        heapq.heappush(self._deadlines, (deadline, lease.id))
        return lease

    def _let_go(self, session: SessionId, lease: ReadLease, times: int = 1) -> None:
        lease.holders[session] -= times
        if lease.holders[session] <= 0:
            del lease.holders[session]
            self._of_session.get(session, set()).discard(lease.id)
        if not lease.holders:
            self._end_reading(lease)

    def _end_reading(self, lease: ReadLease) -> None:
        del self._reading[lease.id], self._by_token[lease.token]
        for session in lease.holders:
            self._of_session.get(session, set()).discard(lease.id)
        self._pinned_bytes -= lease.bytes
        self._pins.discard(lease.id)
        for held in lease.parts:
            self._held_ids -= len(held.ids) // ID_BYTES
            self._unlease(held.ids)
        # A lease that was released leaves its deadline behind; sweep before they outnumber the living.
        if len(self._deadlines) > 64 + 2 * len(self._reading):
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._reading]
            heapq.heapify(self._deadlines)

    def _lease(self, batches: list[bytes]) -> None:
        """Hold the blocks of every batch, or of none. One batch names no block twice."""
        taken: list[bytes] = []
        try:
            for ids in batches:
                self._store.lease(ids)
                taken.append(ids)
        except (OverflowError, ValueError) as error:
            for ids in taken:
                self._unlease(ids)
            if isinstance(error, ValueError):
                raise Refused("bad_request", "a key is given twice") from error
            raise Refused("too_many", "a block is held by too many leases") from error
        for ids in taken:
            self._policy.removed(ids)

    def _unlease(self, ids: bytes) -> None:
        evictable, _freed = self._store.unlease(ids)
        self._policy.added(_reversed(evictable))

    def _find(self, space: Space, keys: bytes) -> tuple[int, list[Held]]:
        """How much of the prefix is ready, and the blocks that it is restored from."""
        if space.index < 0:
            return 0, []
        ready, parts = self._store.match(space.index, keys)
        return ready, [Held(*part) for part in parts]

    def _tell(self, lease: ReadLease, shards: Sequence[int]) -> tuple[Part, ...]:
        parts = []
        for held in lease.parts:
            if held.shard in shards:
                slots = self._store.slots(held.ids)
                parts.append(Part(held.group, held.shard, held.first, slots))
                nbytes = lease.space.spec.group_block_bytes(held.group)
                self.loaded_bytes += len(held.ids) // ID_BYTES * nbytes
        return tuple(parts)

    # --- writing -----------------------------------------------------------------------------

    def reserve(
        self, session: SessionId, space: Space, group: int, shard: int, parent: bytes, keys: bytes
    ) -> Granted:
        """Plan a save: which keys are new, which slots they get, who goes for them.

        Keeps the leading new keys if not all have room. Never evicts a block of this very chain.
        """
        self._check_keys(space, keys)
        self._check_place(space, group, shard)
        if len(parent) not in (0, KEY_BYTES):
            raise Refused("bad_request", f"a parent of {len(parent)} bytes")
        if len(self._writing) >= LIMIT_LEASES:
            raise Refused("too_many", f"this tenant has {LIMIT_LEASES} leases already")
        self._check_share(session)
        if not keys:
            return Granted(LeaseId(0), b"", b"")
        if space.index < 0:
            self._settle(space)
        try:
            outcomes = bytearray(self._store.probe(space.index, group, shard, keys))
            ids, slots = self._plan(space, group, shard, parent, keys, outcomes)
        except ValueError as error:
            raise Refused("bad_request", str(error)) from error
        finally:
            self._unsettle(space)
        _refuse_beyond(outcomes, len(ids) // ID_BYTES)
        self._count_refused(space, outcomes)
        if not ids:
            return Granted(LeaseId(0), bytes(outcomes), b"")
        pending = bytearray(b"\1") * (len(ids) // ID_BYTES)
        lease = WriteLease(self._new_lease_id(), session, space, group, shard, ids, pending)
        self._writing[lease.id] = lease
        self._of_session.setdefault(session, set()).add(lease.id)
        return Granted(lease.id, bytes(outcomes), slots)

    def _plan(
        self, space: Space, group: int, shard: int, parent: bytes, keys: bytes, outcomes: bytearray
    ) -> tuple[bytes, bytes]:
        """Slots for the keys that are new, as far as there is room."""
        store, index = self._store, space.index
        # What is here of the chain is in use by this save: hold it while victims are chosen, and let it
        # go last-block-first, so that a tail always leaves before its head.
        here = store.present(index, group, shard, keys)
        above = store.ancestors(index, group, shard, parent, space.reach) if parent else b""
        self._lease([above, here])
        try:
            wanted = outcomes.count(GRANTED)
            if wanted:
                self._make_room(index, group, wanted)
            return store.reserve(index, group, shard, parent or None, keys, bytes(outcomes))
        finally:
            self._unlease(_reversed(above) + here)

    def commit(
        self, session: SessionId, lease_id: LeaseId, first: int, count: int, checksums: bytes = b""
    ) -> None:
        """Blocks [first, first + count) of the lease are READY from now on."""
        lease = self._written(session, lease_id)
        total = len(lease.pending)
        if not (0 <= first < total and 0 < count <= total - first):
            raise Refused("bad_request", f"blocks {first}+{count} of a lease of {total}")
        if lease.pending.count(1, first, first + count) != count:
            raise Refused("bad_request", f"blocks {first}+{count}: some are committed already")
        if len(checksums) not in (0, count * DIGEST_BYTES):
            raise Refused("bad_request", f"{len(checksums)} bytes of checksums for {count} blocks")
        ids = lease.ids[first * ID_BYTES : (first + count) * ID_BYTES]
        self._store.commit(ids, checksums)
        self._policy.added(ids)
        # A block that is new makes all before it recent, nearest first: a head outlives its tail, also
        # where a chain is saved block by block as it grows.
        last = self._store.keys_of(ids[-ID_BYTES:])
        space, spec = lease.space, lease.space.spec
        self._policy.touched(
            self._store.ancestors(space.index, lease.group, lease.shard, last, space.reach)
        )
        lease.pending[first : first + count] = bytes(count)
        self.saved_tokens += count * spec.block_tokens
        self.saved_bytes += count * spec.group_block_bytes(lease.group)
        if not any(lease.pending):
            self._forget_writing(lease)

    def abort(self, session: SessionId, lease_id: LeaseId) -> None:
        """What the lease has not committed is free again: its writer says that it writes no more."""
        lease = self._written(session, lease_id)
        self._store.abort(_still(lease))
        self._forget_writing(lease)

    def _written(self, session: SessionId, lease_id: LeaseId) -> WriteLease:
        lease = self._writing.get(lease_id)
        if lease is None or lease.session != session:
            raise Refused("unknown_lease", f"lease {lease_id} is not this session's to write")
        return lease

    def _forget_writing(self, lease: WriteLease) -> None:
        del self._writing[lease.id]
        self._of_session.get(lease.session, set()).discard(lease.id)

    def _make_room(self, space: int, group: int, wanted: int) -> None:
        """Evict, coldest first, until `wanted` slots are free or nothing more may go."""
        store, policy = self._store, self._policy
        victims = b""  # at first: what other spaces left empty costs nobody anything
        while (short := wanted - store.room(space, group, wanted)) > 0:
            evicted, orphans = store.make_room(space, group, wanted, victims)
            policy.removed(evicted)
            policy.demoted(orphans)
            self.evicted_blocks["capacity"] += len(evicted) // ID_BYTES
            if victims and not evicted:
                break
            victims = policy.victims(short)
            if not victims:
                break

    # --- the other wishes --------------------------------------------------------------------

    def pin(self, space: Space, keys: bytes, ttl_s: float, now: float) -> int:
        """Keep the ready prefix for `ttl_s`, as far as pins may go; how many blocks that is."""
        self._check_keys(space, keys)
        ready, parts = self._find(space, keys)
        self._end_pins_within(parts)
        budget = self._store.counts()["capacity_bytes"] * PIN_SHARE - self._pinned_bytes
        per_block = sum(
            space.spec.group_block_bytes(index) * group.shards
            for index, group in enumerate(space.spec.cache_groups)
        )
        blocks = max(0, min(ready, int(budget // per_block)))
        if blocks < ready:
            # A shorter prefix may need blocks that the longer one did without: what of it is restorable?
            blocks, parts = self._find(space, keys[: blocks * KEY_BYTES])
        if not blocks:
            return 0
        lease = self._hold(NOBODY, space, parts, blocks, now + min(ttl_s, LIMIT_PIN_S))
        lease.bytes = per_block * blocks
        self._pinned_bytes += lease.bytes
        self._pins.add(lease.id)
        return blocks

    def _end_pins_within(self, parts: list[Held]) -> None:
        """End the pins that hold nothing but these blocks: a new one takes their place."""
        blocks = set(array("I", b"".join(held.ids for held in parts)))
        for lease_id in list(self._pins):
            lease = self._reading[lease_id]
            if all(blocks.issuperset(array("I", held.ids)) for held in lease.parts):
                self._end_reading(lease)

    def hint(self, space: Space, keys: bytes, importance: float) -> int:
        """Tell the policy how much these blocks matter, 0 (gone first) to 1."""
        ids = self._resident(space, keys)
        if importance > 0:
            self._policy.hinted(ids, importance)
        else:
            self._policy.demoted(_reversed(ids))
        return len(ids) // ID_BYTES

    def forget(self, space: Space, keys: bytes) -> int:
        """These blocks match no more from now on; those being read go when their readers do."""
        ids = self._resident(space, keys)
        self._unpin(ids)
        freed, orphans = self._store.forget(ids)
        self._policy.removed(ids)
        self._policy.demoted(orphans)
        self.evicted_blocks["forgotten"] += len(freed) // ID_BYTES
        return len(ids) // ID_BYTES

    def _resident(self, space: Space, keys: bytes) -> bytes:
        """The ids of these keys' READY blocks in every group and shard, each once."""
        self._check_keys(space, keys)
        return self._store.resident(space.index, keys) if space.index >= 0 else b""

    def _unpin(self, ids: bytes) -> None:
        """End the pins that hold one of these blocks: forgetting outweighs keeping."""
        gone = set(array("I", ids))
        for lease_id in list(self._pins):
            lease = self._reading[lease_id]
            if any(not gone.isdisjoint(array("I", held.ids)) for held in lease.parts):
                self._end_reading(lease)

    # --- ends --------------------------------------------------------------------------------

    def expire(self, now: float) -> int:
        """End the read leases whose deadline has passed; how many there were. Whoever still reads under
        one sees the slot's generation change if the slot is given away."""
        ended = 0
        while self._deadlines and self._deadlines[0][0] <= now:
            _, lease_id = heapq.heappop(self._deadlines)
            lease = self._reading.get(lease_id)
            if lease is not None:
                self._end_reading(lease)
                ended += 1
        return ended

    def end_session(self, session: SessionId, gone: bool) -> bool:
        """The session is over. Its reads end; its unfinished writes are free at once if its process is
        `gone` or has promised to touch nothing, else quarantined. True if something stays so."""
        quarantined = b""
        self._leave(session)
        for lease_id in sorted(self._of_session.pop(session, ())):
            reading = self._reading.get(lease_id)
            if reading is not None:
                self._let_go(session, reading, reading.holders[session])
            writing = self._writing.pop(lease_id, None)
            if writing is not None:
                ids = _still(writing)
                if gone:
                    self._store.abort(ids)
                else:
                    self._store.quarantine(ids)
                    quarantined += ids
        if quarantined:
            self._quarantined[session] = quarantined
        return bool(quarantined)

    def process_gone(self, session: SessionId) -> None:
        """The process behind an ended session exists no more: nothing can write its slots."""
        ids = self._quarantined.pop(session, b"")
        if ids:
            self._store.gone(ids)

    # --- saying how it is --------------------------------------------------------------------

    def counts(self) -> Counts:
        return self._store.counts()

    @property
    def spaces(self) -> int:
        return len(self._spaces)

    @property
    def leases(self) -> int:
        return len(self._reading) + len(self._writing)

    def memory_bytes(self) -> int:
        return self._store.memory_bytes() + self._policy.memory_bytes()

    # --- small things ------------------------------------------------------------------------

    def _new_lease_id(self) -> LeaseId:
        lease_id = LeaseId(self._next_lease)
        self._next_lease += 1
        return lease_id

    def _check_keys(self, space: Space, keys: bytes) -> None:
        if len(keys) % KEY_BYTES or len(keys) > LIMIT_KEYS * KEY_BYTES:
            text = f"{len(keys)} bytes of keys: {KEY_BYTES} each, at most {LIMIT_KEYS} keys"
            raise Refused("bad_request", text)
        looks = len(keys) // KEY_BYTES * space.places
        if looks > LIMIT_LOOKS:
            text = f"{looks} keys times groups times shards, at most {LIMIT_LOOKS}: ask in parts"
            raise Refused("bad_request", text)

    def _check_share(self, session: SessionId) -> None:
        if session != NOBODY and len(self._of_session.get(session, ())) >= LIMIT_SESSION_LEASES:
            raise Refused("too_many", f"this session has {LIMIT_SESSION_LEASES} leases already")

    def _check_place(self, space: Space, group: int, shard: int) -> None:
        groups = space.spec.cache_groups
        if not (0 <= group < len(groups) and 0 <= shard < groups[group].shards):
            raise Refused("bad_request", f"the space has no group {group}, shard {shard}")

    def _count_lookup(self, space: Space, keys: bytes, ready: int) -> None:
        tokens = space.spec.block_tokens
        blocks = len(keys) // KEY_BYTES
        self.lookup_tokens += blocks * tokens
        self.hit_tokens += ready * tokens
        if ready < blocks:
            self.miss_tokens[self._why_missing(space, keys, ready)] += (blocks - ready) * tokens

    def _why_missing(self, space: Space, keys: bytes, at: int) -> str:
        """Why the prefix ends at block `at`: the worst state that this block has in any part."""
        if space.index < 0:
            return "absent"
        key = keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]
        states = self._store.states(space.index, key)
        if IN_PROGRESS in states:
            return "in_progress"
        return "absent" if GRANTED in states else "incomplete"

    def _count_refused(self, space: Space, outcomes: bytearray) -> None:
        for code, reason in enumerate(OUTCOMES):
            if code != GRANTED:
                blocks = outcomes.count(code)
                if blocks:
                    self.refused_tokens[reason] += blocks * space.spec.block_tokens


def _reversed(ids: bytes) -> bytes:
    """The same ids, last first: a policy takes the later ones of a batch as the more recent, and the head
    of a chain has to outlive its tail."""
    if len(ids) <= ID_BYTES:
        return ids
    order = array("I", ids)
    order.reverse()
    return order.tobytes()


def _still(lease: WriteLease) -> bytes:
    """The ids of a write lease that are not committed."""
    if all(lease.pending):
        return lease.ids
    ids = lease.ids
    return b"".join(
        ids[at * ID_BYTES : (at + 1) * ID_BYTES] for at, open_ in enumerate(lease.pending) if open_
    )


def _refuse_beyond(outcomes: bytearray, granted: int) -> None:
    """Mark the new keys after the first `granted` as without room."""
    at = -1
    for _ in range(granted):
        at = outcomes.index(GRANTED, at + 1)
    outcomes[at + 1 :] = outcomes[at + 1 :].replace(bytes([GRANTED]), bytes([NO_ROOM]))
