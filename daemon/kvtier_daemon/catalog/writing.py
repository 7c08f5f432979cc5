"""Saves: reserved, committed, aborted, and quarantined if their session ends."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtier.errors import Refused, bad_request
from kvtier.key import KEY_BYTES
from kvtier.wire import DIGEST_BYTES, GRANTED, NO_ROOM, PRESENT, WRITING
from kvtier_daemon.catalog.awaited import AwaitedWrites
from kvtier_daemon.catalog.blocks import ID_BYTES, BlockTable, last_first
from kvtier_daemon.catalog.expiring import LIMIT_IDS
from kvtier_daemon.catalog.leases import NO_LEASE, LeaseId, Leases, SessionId
from kvtier_daemon.catalog.spaces import IDENTITY, KnownSpace, SpaceTable


@dataclass(slots=True)
class WriteLease:
    """The right to write slots that no other client can find. It has no deadline: only a commit, an abort or
    the end of the writer's process ends it, so that a late copy never overwrites another block."""

    id: LeaseId
    session: SessionId
    space: KnownSpace
    group: int
    shard: int
    ids: bytes
    pending: bytearray
    expires_at: float = math.inf

    def uncommitted(self) -> bytes:
        """The ids that are not committed."""
        if all(self.pending):
            return self.ids
        ids = self.ids
        return b"".join(
            ids[at * ID_BYTES : (at + 1) * ID_BYTES]
            for at, open_ in enumerate(self.pending)
            if open_
        )


@dataclass(slots=True, frozen=True)
class Granted:
    lease: LeaseId
    outcomes: bytes
    slots: bytes


class WriteLeases:
    def __init__(
        self, blocks: BlockTable, spaces: SpaceTable, leases: Leases, awaited: AwaitedWrites
    ) -> None:
        self._blocks = blocks
        self._awaited = awaited
        self._spaces = spaces
        self._leases = leases
        self.of: dict[LeaseId, WriteLease] = {}
        self._quarantined: dict[SessionId, bytes] = {}

    def reserve(
        self, session: SessionId, space: KnownSpace, group: int, shard: int, parent: bytes, keys: bytes,
        expires_at: float, waits: bool = False,
    ) -> Granted:  # fmt: skip
        self._leases.check(session)
        if not keys:
            return Granted(NO_LEASE, b"", b"")
        self._spaces.settle(space)
        try:
            outcomes = self._outcomes(space, group, shard, keys)
            if expires_at < math.inf:
                _refuse_beyond(outcomes, max(0, LIMIT_IDS - len(self._blocks.expiring)))
            ids, slots = self._take(
                space, group, shard, parent, keys, outcomes, session, expires_at, waits
            )
        finally:
            self._spaces.unsettle(space)  # if it got no blocks
        _refuse_beyond(outcomes, len(ids) // ID_BYTES)
        if not ids:
            return Granted(NO_LEASE, bytes(outcomes), b"")
        lease = self._lease(session, space, group, shard, ids, expires_at)
        return Granted(lease, bytes(outcomes), slots)

    def _outcomes(self, space: KnownSpace, group: int, shard: int, keys: bytes) -> bytearray:
        """Which keys are new; evicts nothing."""
        try:
            return bytearray(self._blocks.store.probe(space.index, group, shard, keys))
        except ValueError as error:
            raise bad_request(str(error)) from error

    def _take(
        self,
        space: KnownSpace,
        group: int,
        shard: int,
        parent: bytes,
        keys: bytes,
        outcomes: bytearray,
        session: SessionId,
        expires_at: float,
        waits: bool,
    ) -> tuple[bytes, bytes]:
        """Take blocks for the leading new keys, as far as there is room: (ids, slots). With `waits`, none if
        a write to disk will make room."""
        store, index = self._blocks.store, space.index
        # Hold the present blocks of the chain while victims are selected.
        present = store.present(index, group, shard, keys)
        above = store.ancestors(index, group, shard, parent, space.reach) if parent else b""
        self._blocks.lease([above, present])
        try:
            wanted = outcomes.count(GRANTED)
            if wanted and self._blocks.make_room(index, group, wanted, spare=waits):
                outcomes[:] = outcomes.replace(bytes([GRANTED]), bytes([WRITING]))
                return b"", b""
            expires_ms = int(expires_at * 1000) if expires_at < math.inf else 0
            return store.reserve(
                index, group, shard, parent or None, keys, bytes(outcomes), session, expires_ms
            )
        finally:
            self._blocks.unlease(last_first(above) + present)

    def commit(
        self, session: SessionId, lease_id: LeaseId, first: int, count: int, checksums: bytes
    ) -> tuple[WriteLease, bytes]:
        """The lease, and the ids that are READY from now on."""
        lease = self._lease_of(session, lease_id)
        total = len(lease.pending)
        if not (0 <= first < total and 0 < count <= total - first):
            raise bad_request(f"blocks {first}+{count} exceed the lease's {total} blocks")
        if lease.pending.count(1, first, first + count) != count:
            raise bad_request(f"blocks {first}+{count}: some are committed already")
        if len(checksums) not in (0, count * DIGEST_BYTES):
            raise bad_request(f"checksums: got {len(checksums)} bytes for {count} blocks")
        ids = lease.ids[first * ID_BYTES : (first + count) * ID_BYTES]
        self._blocks.commit(ids, checksums, is_new=lease.group == lease.shard == 0)
        if lease.expires_at < math.inf:
            self._blocks.expiring.add(ids, lease.expires_at)
        # A new block makes all blocks before it recent, so that the head of a chain outlives its tail even if
        # the chain is saved block by block.
        store, space = self._blocks.store, lease.space
        last = store.keys_of(ids[-ID_BYTES:])
        above = store.ancestors(space.index, lease.group, lease.shard, last, space.reach)
        self._blocks.policy.refreshed(last_first(above))
        lease.pending[first : first + count] = bytes(count)
        if not any(lease.pending):
            self._end(lease)
        self._awaited.written(ids)
        return lease, ids

    def abort(self, session: SessionId, lease_id: LeaseId) -> None:
        lease = self._lease_of(session, lease_id)
        self._blocks.store.abort(lease.uncommitted())
        self._end(lease)
        self._awaited.given_up(lease.space.index)

    def abort_one(self, session: SessionId, lease_id: LeaseId, position: int) -> None:
        """Free the slot of one block of the lease that is not committed."""
        lease = self._lease_of(session, lease_id)
        self._blocks.store.abort(lease.ids[position * ID_BYTES : (position + 1) * ID_BYTES])
        lease.pending[position] = 0
        if not any(lease.pending):
            self._end(lease)
        self._awaited.given_up(lease.space.index)

    def _lease_of(self, session: SessionId, lease_id: LeaseId) -> WriteLease:
        lease = self.of.get(lease_id)
        if lease is None or lease.session != session:
            raise Refused("unknown_lease", f"lease {lease_id} is not a write lease of this session")
        return lease

    def _end(self, lease: WriteLease) -> None:
        del self.of[lease.id]
        self._leases.leave(lease.session, lease.id)
        self._leases.ended()

    def end_session(self, session: SessionId, leases: Sequence[LeaseId], gone: bool) -> bool:
        """Free these leases' uncommitted slots if the writer is gone, or quarantine them. True if any are."""
        if gone:
            self.process_gone(session)
        store, quarantined = self._blocks.store, self._quarantined.pop(session, b"")
        for lease_id in leases:
            lease = self.of[lease_id]
            ids = lease.uncommitted()
            if gone:
                store.abort(ids)
            else:
                store.quarantine(ids)
                quarantined += ids
            self._end(lease)
            self._awaited.given_up(lease.space.index)
        if quarantined:
            self._quarantined[session] = quarantined
        return bool(quarantined)

    def quarantine(self, held: Mapping[SessionId, bytes]) -> None:
        """Sessions of an earlier daemon may write to the slots of these blocks until `process_gone`."""
        self._quarantined.update(held)

    def resume(self, before: SessionId, session: SessionId) -> None:
        """The client of an ended session has this one now, and may still write to its slots there."""
        ids = self._quarantined.pop(before, b"")
        if ids:
            self._blocks.store.own(ids, session)
            self._quarantined[session] = self._quarantined.get(session, b"") + ids

    def regain(
        self, session: SessionId, space: KnownSpace, group: int, shard: int, keys: bytes,
        expires_at: float,
    ) -> Granted:  # fmt: skip
        """Return a lease on those slots that an earlier session of this client had for these keys."""
        self._leases.check(session)
        store, held = self._blocks.store, self._quarantined.get(session, b"")
        mine: dict[bytes, bytes] = {}
        if space.index >= 0 and held:
            rows = IDENTITY.iter_unpack(store.identities(held))
            for at, (index, of, rank, _, key, _) in enumerate(rows):
                if (index, of, rank) == (space.index, group, shard):
                    mine[key] = held[at * ID_BYTES : (at + 1) * ID_BYTES]
        outcomes = bytearray([NO_ROOM]) * (len(keys) // KEY_BYTES)
        if space.index >= 0:
            known = self._outcomes(space, group, shard, keys)
            outcomes = bytearray(PRESENT if code == PRESENT else NO_ROOM for code in known)
        regained = []
        for at in range(len(outcomes)):
            one = mine.pop(keys[at * KEY_BYTES : (at + 1) * KEY_BYTES], b"")
            if one:
                outcomes[at] = GRANTED
                regained.append(one)
        if not regained:
            return Granted(NO_LEASE, bytes(outcomes), b"")
        ids = b"".join(regained)
        store.regain(ids)
        again = set(array("I", ids))
        left = array("I", (one for one in array("I", held) if one not in again))
        self._quarantined[session] = left.tobytes()
        lease = self._lease(session, space, group, shard, ids, expires_at)
        return Granted(lease, bytes(outcomes), store.slots(ids))

    def _lease(
        self, session: SessionId, space: KnownSpace, group: int, shard: int, ids: bytes,
        expires_at: float,
    ) -> LeaseId:  # fmt: skip
        pending = bytearray(b"\1") * (len(ids) // ID_BYTES)
        lease_id = self._leases.make(session)
        self.of[lease_id] = WriteLease(
            lease_id, session, space, group, shard, ids, pending, expires_at
        )
        return lease_id

    def process_gone(self, session: SessionId) -> None:
        ids = self._quarantined.pop(session, b"")
        if ids:
            self._blocks.store.gone(ids)


def _refuse_beyond(outcomes: bytearray, granted: int) -> None:
    """Mark the new keys after the first `granted` as without room."""
    at = -1
    for _ in range(min(granted, outcomes.count(GRANTED))):
        at = outcomes.index(GRANTED, at + 1)
    outcomes[at + 1 :] = outcomes[at + 1 :].replace(bytes([GRANTED]), bytes([NO_ROOM]))
