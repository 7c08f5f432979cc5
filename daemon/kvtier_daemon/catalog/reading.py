"""Finds stored prefixes, holds them with read leases, and logs the lookups."""

from __future__ import annotations

import heapq
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from kvtier.errors import Refused, bad_request
from kvtier.key import KEY_BYTES
from kvtier.wire import LIMIT_TOLD_SLOTS, SLOT_BYTES, Part, told_slots
from kvtier_daemon.catalog.blocks import ID_BYTES, BlockTable, DeferredPolicy
from kvtier_daemon.catalog.leases import NOBODY, LeaseId, Leases, SessionId
from kvtier_daemon.catalog.miss_log import EXPIRED
from kvtier_daemon.catalog.spaces import KnownSpace
from kvtier_kernels import Store

LIMIT_HELD_IDS = 1 << 24  # over all leases of a tenant: 64 MiB
LIMIT_ENDED_IDS = 1 << 17  # that one call of `expire` or `end_session` releases: some milliseconds
LIMIT_LOOKUPS = 1024
TOKEN_BYTES = 16
TOKENS_AT_ONCE = 64


class Held(NamedTuple):
    """The blocks of one group and shard under a lease. `first` is their place in the prefix."""

    group: int
    shard: int
    first: int
    ids: bytes


_NEW = tuple.__new__  # a named tuple's own constructor is a Python function


@dataclass(slots=True)
class ReadLease:
    """The right to read blocks until every session has released it or the deadline has passed."""

    id: LeaseId
    token: bytes
    deadline: float
    holders: dict[SessionId, int]  # how many times each session joined
    space: KnownSpace
    parts: list[Held]
    prefix_blocks: int


class Lookup(msgspec.Struct, gc=False):
    """A match or a load and its answer. `missing` is the first block that it did not get; `used` is the
    number of blocks that the client has reported as used since. What it refers to must be part of no cycle:
    the garbage collector does not look into it."""

    number: int
    at: float
    client: str
    space: KnownSpace
    blocks: int
    ready: int
    coming: int
    why: str
    missing: bytes
    used: int = 0


class Lookups:
    """The last lookups of a tenant, for `kvtier explain`."""

    def __init__(self) -> None:
        self._last: deque[Lookup] = deque(maxlen=LIMIT_LOOKUPS)
        self._numbers = 0

    def note(
        self, at: float, client: str, space: KnownSpace, blocks: int, ready: int, coming: int, why: str,
        missing: bytes,
    ) -> Lookup:  # fmt: skip
        self._numbers += 1
        one = Lookup(self._numbers, at, client, space, blocks, ready, coming, why, missing)
        self._last.append(one)
        return one

    def last(self, count: int) -> list[Lookup]:
        """The last lookups, the newest first."""
        return list(self._last)[: -count - 1 : -1]

    def numbered(self, number: int) -> Lookup | None:
        at = number - self._numbers - 1
        return self._last[at] if -len(self._last) <= at < 0 else None


class ReadLeases:
    """The read leases of one tenant."""

    def __init__(self, blocks: BlockTable, leases: Leases) -> None:
        self._blocks = blocks
        self._leases = leases
        self._of: dict[LeaseId, ReadLease] = {}
        self._by_token: dict[bytes, ReadLease] = {}
        self._tokens: list[bytes] = []  # random, for the next leases
        self._deadlines: list[tuple[float, LeaseId]] = []
        self._left: deque[tuple[SessionId, LeaseId]] = deque()  # of ended sessions
        self._held_ids = 0

    def find(self, space: KnownSpace, keys: bytes) -> tuple[int, int, list[Held]]:
        """How many leading blocks are ready, how many more on disk, and what restores the ready prefix."""
        if space.index < 0 or self._blocks.expiring.late:
            return 0, 0, []
        ready, restorable, parts = self._blocks.store.match(space.index, keys)
        return ready, restorable - ready, [_NEW(Held, part) for part in parts]

    def find_after(self, space: KnownSpace, keys: bytes, first: int) -> tuple[int, int, list[Held]]:
        """The same for a client that has the blocks before `first` itself: they count as ready."""
        ready, coming, parts = self.find(space, keys[first * KEY_BYTES :])
        return first + ready, coming, [held._replace(first=first + held.first) for held in parts]

    def slots_of(self, parts: Sequence[Held], shards: Sequence[int]) -> tuple[Part, ...]:
        told: list[Part] = []
        slots, slots_of = 0, self._blocks.store.slots
        for group, shard, first, ids in parts:
            if shard in shards:
                slots += len(ids) // ID_BYTES
                if slots <= LIMIT_TOLD_SLOTS:
                    told.append(Part(group, shard, first, slots_of(ids)))
        if slots > LIMIT_TOLD_SLOTS:
            raise bad_request(
                f"{slots} slots in one reply, at most {LIMIT_TOLD_SLOTS}: ask "
                "for fewer shards at once"
            )
        return tuple(told)

    def digests(self, lease_id: LeaseId, parts: Sequence[Part]) -> list[Part]:
        """These parts of a lease with checksums. Raises Refused, without an effect, if they do not fit."""
        slots = sum(len(part.slots) for part in parts) // SLOT_BYTES
        if slots > (most := told_slots(verify=True)):
            raise bad_request(
                f"{slots} slots with checksums in one reply, at most {most}: ask for fewer blocks or shards"
            )
        ids = self.ids_of(lease_id)
        checksums = self._blocks.store.checksums
        return [
            msgspec.structs.replace(part, digests=checksums(ids[part.group, part.shard])[0])
            for part in parts
        ]

    def ids_of(self, lease_id: LeaseId) -> dict[tuple[int, int], bytes]:
        """The blocks of a lease by group and shard."""
        return {(held.group, held.shard): held.ids for held in self._of[lease_id].parts}

    def held(self, session: SessionId, lease_id: LeaseId) -> bytes:
        """The ids of all blocks of this session's lease; none if the lease has ended."""
        lease = self._of.get(lease_id)
        if lease is None or session not in lease.holders:
            return b""
        return b"".join(held.ids for held in lease.parts)

    def note_use(self, space: KnownSpace, parts: Sequence[Held], keys: bytes, is_new: bool) -> None:
        """Tell the policy that a request used these blocks; without `is_new`, one that was counted before."""
        policy = self._blocks.policy
        for group, shard, first, ids in parts:
            if is_new:
                theirs = keys[first * KEY_BYTES : (first + len(ids) // ID_BYTES) * KEY_BYTES]
                place = space.place_of(group, shard)
                if isinstance(policy, DeferredPolicy):
                    policy.wanted_keys(ids, theirs, place)
                else:
                    policy.wanted(ids, Store.names_of_keys(theirs, place))
            else:
                policy.refreshed(ids)

    # --- leases ------------------------------------------------------------------------------

    def hold(
        self,
        session: SessionId,
        space: KnownSpace,
        parts: list[Held],
        prefix_blocks: int,
        deadline: float,
    ) -> ReadLease:
        self._leases.check(session)
        ids_held = _ids_in(parts)
        if self._held_ids + ids_held > LIMIT_HELD_IDS:
            raise Refused(
                "too_many",
                f"this tenant's leases hold {self._held_ids} blocks "
                f"already, at most {LIMIT_HELD_IDS}",
            )
        self._blocks.lease([held.ids for held in parts])
        self._held_ids += ids_held
        lease = ReadLease(
            self._leases.make(session), self._new_token(), deadline, {session: 1}, space,
            parts, prefix_blocks,
        )  # fmt: skip
        self._of[lease.id] = lease
        self._by_token[lease.token] = lease
        heapq.heappush(self._deadlines, (deadline, lease.id))
        return lease

    def _new_token(self) -> bytes:
        if not self._tokens:
            random = os.urandom(TOKENS_AT_ONCE * TOKEN_BYTES)  # a system call
            self._tokens = [
                random[at : at + TOKEN_BYTES] for at in range(0, len(random), TOKEN_BYTES)
            ]
        return self._tokens.pop()

    def with_token(self, token: bytes) -> ReadLease:
        lease = self._by_token.get(token)
        if lease is None:
            raise Refused(
                "unknown_lease", "no lease has this token: the lease ended or never existed"
            )
        return lease

    def join(self, session: SessionId, lease: ReadLease) -> None:
        lease.holders[session] = lease.holders.get(session, 0) + 1
        self._leases.join(session, lease.id)

    def release(self, session: SessionId, lease_id: LeaseId) -> KnownSpace | None:
        """End the session's part of this lease; return its space. An expired lease is no error."""
        lease = self._of.get(lease_id)
        if lease is None:
            if not self._leases.existed(lease_id):
                raise Refused("unknown_lease", f"lease {lease_id} never existed")
            return None
        if session not in lease.holders:
            raise Refused("unknown_lease", f"lease {lease_id} belongs to another session")
        self._leave(session, lease)
        return lease.space

    def note_loaded(self, lease_id: LeaseId) -> None:
        """A client has used blocks under this lease."""
        if (lease := self._of.get(lease_id)) is not None:
            for held in lease.parts:
                self._blocks.reads.used(held.ids)

    def expire(self, now: float) -> int:
        """End the leases whose deadline has passed, and those of ended sessions; return how many expired. A
        client that still reads detects by the generation that its slot was reused.

        One call releases a limited number of blocks; the next call continues.
        """
        self._blocks.miss_log.now = now
        least = self._held_ids - LIMIT_ENDED_IDS
        self._end_left(least)
        ended = 0
        while self._deadlines and self._deadlines[0][0] <= now and self._held_ids > least:
            _, lease_id = heapq.heappop(self._deadlines)
            lease = self._of.get(lease_id)
            if lease is not None:
                if NOBODY in lease.holders:  # a pin
                    ids = b"".join(held.ids for held in lease.parts)
                    self._blocks.miss_log.note(self._blocks.store.keys_of(ids), EXPIRED)
                self.end(lease)
                ended += 1
        return ended

    def end_session(self, session: SessionId, leases: Sequence[LeaseId]) -> None:
        """Release these leases of an ended session, up to the limit of one call; `expire` continues."""
        self._left += [(session, lease_id) for lease_id in leases]
        self._end_left(self._held_ids - LIMIT_ENDED_IDS)

    def _end_left(self, least: int) -> None:
        """Release the leases of ended sessions while more than `least` blocks are held."""
        while self._left and self._held_ids > least:
            session, lease_id = self._left.popleft()
            lease = self._of.get(lease_id)
            if lease is not None and session in lease.holders:
                self._leave(session, lease, lease.holders[session])

    def _leave(self, session: SessionId, lease: ReadLease, times: int = 1) -> None:
        lease.holders[session] -= times
        if lease.holders[session] <= 0:
            del lease.holders[session]
            self._leases.leave(session, lease.id)
        if not lease.holders:
            self.end(lease)

    def end(self, lease: ReadLease) -> None:
        """End this lease for all its sessions."""
        del self._of[lease.id], self._by_token[lease.token]
        for session in lease.holders:
            self._leases.leave(session, lease.id)
        lease.holders.clear()
        self._leases.ended()
        for held in lease.parts:
            self._held_ids -= len(held.ids) // ID_BYTES
            self._blocks.unlease(held.ids)
        # A released lease leaves its deadline in the heap: clean up before these are the majority.
        if len(self._deadlines) > 64 + 2 * len(self._of):
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._of]
            heapq.heapify(self._deadlines)


def _ids_in(parts: Sequence[Held]) -> int:
    """How many ids these have. A loop: each load does this twice, and a generator takes a microsecond."""
    nbytes = 0
    for held in parts:
        nbytes += len(held.ids)
    return nbytes // ID_BYTES
