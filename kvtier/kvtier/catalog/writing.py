"""Saves: planned, committed, given up, and what becomes of those whose writer ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.catalog.blocks import ID_BYTES, Blocks, last_first
from kvtier.catalog.leases import NO_LEASE, LeaseId, Leases, SessionId
from kvtier.catalog.spaces import Space, Spaces
from kvtier.errors import Refused
from kvtier.wire import DIGEST_BYTES, GRANTED, NO_ROOM


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

    def still(self) -> bytes:
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


class Writing:
    def __init__(self, blocks: Blocks, spaces: Spaces, leases: Leases) -> None:
        self._blocks = blocks
        self._spaces = spaces
        self._leases = leases
        self._of: dict[LeaseId, WriteLease] = {}
        self._quarantined: dict[SessionId, bytes] = {}

    def __contains__(self, lease_id: LeaseId) -> bool:
        return lease_id in self._of

    def reserve(
        self, session: SessionId, space: Space, group: int, shard: int, parent: bytes, keys: bytes
    ) -> Granted:
        self._leases.check(session)
        if not keys:
            return Granted(NO_LEASE, b"", b"")
        self._spaces.settle(space)
        try:
            outcomes = self._outcomes(space, group, shard, keys)
            ids, slots = self._take(space, group, shard, parent, keys, outcomes)
        finally:
            self._spaces.unsettle(space)  # where it got nothing
        _refuse_beyond(outcomes, len(ids) // ID_BYTES)
        if not ids:
            return Granted(NO_LEASE, bytes(outcomes), b"")
        pending = bytearray(b"\1") * (len(ids) // ID_BYTES)
        lease_id = self._leases.make(session)
        self._of[lease_id] = WriteLease(lease_id, session, space, group, shard, ids, pending)
        return Granted(lease_id, bytes(outcomes), slots)

    def _outcomes(self, space: Space, group: int, shard: int, keys: bytes) -> bytearray:
        """Which keys are new, before anything is moved for them."""
        try:
            return bytearray(self._blocks.store.probe(space.index, group, shard, keys))
        except ValueError as error:
            raise Refused("bad_request", str(error)) from error

    def _take(
        self, space: Space, group: int, shard: int, parent: bytes, keys: bytes, outcomes: bytearray
    ) -> tuple[bytes, bytes]:
        """Blocks for the leading new keys, as far as there is room: (ids, slots)."""
        store, index = self._blocks.store, space.index
        # What is here of the chain is in use by this save: hold it while victims are chosen.
        here = store.present(index, group, shard, keys)
        above = store.ancestors(index, group, shard, parent, space.reach) if parent else b""
        self._blocks.lease([above, here])
        try:
            wanted = outcomes.count(GRANTED)
            if wanted:
                self._blocks.make_room(index, group, wanted)
            return store.reserve(index, group, shard, parent or None, keys, bytes(outcomes))
        finally:
            self._blocks.unlease(last_first(above) + here)

    def commit(
        self, session: SessionId, lease_id: LeaseId, first: int, count: int, checksums: bytes
    ) -> tuple[WriteLease, bytes]:
        """The lease, and the ids that are READY from now on."""
        lease = self._written(session, lease_id)
        total = len(lease.pending)
        if not (0 <= first < total and 0 < count <= total - first):
            raise Refused("bad_request", f"blocks {first}+{count} of a lease of {total}")
        if lease.pending.count(1, first, first + count) != count:
            raise Refused("bad_request", f"blocks {first}+{count}: some are committed already")
        if len(checksums) not in (0, count * DIGEST_BYTES):
            raise Refused("bad_request", f"{len(checksums)} bytes of checksums for {count} blocks")
        ids = lease.ids[first * ID_BYTES : (first + count) * ID_BYTES]
        self._blocks.commit(ids, checksums, is_new=lease.group == lease.shard == 0)
        # A block that is new makes all before it recent: a head outlives its tail, also where a chain is
        # saved block by block as it grows.
        store, space = self._blocks.store, lease.space
        last = store.keys_of(ids[-ID_BYTES:])
        above = store.ancestors(space.index, lease.group, lease.shard, last, space.reach)
        self._blocks.policy.refreshed(last_first(above))
        lease.pending[first : first + count] = bytes(count)
        if not any(lease.pending):
            self._end(lease)
        return lease, ids

    def abort(self, session: SessionId, lease_id: LeaseId) -> None:
        lease = self._written(session, lease_id)
        self._blocks.store.abort(lease.still())
        self._end(lease)

    def _written(self, session: SessionId, lease_id: LeaseId) -> WriteLease:
        lease = self._of.get(lease_id)
        if lease is None or lease.session != session:
            raise Refused("unknown_lease", f"lease {lease_id} is not this session's to write")
        return lease

    def _end(self, lease: WriteLease) -> None:
        del self._of[lease.id]
        self._leases.leave(lease.session, lease.id)
        self._leases.ended()

    def end_session(self, session: SessionId, leases: Sequence[LeaseId], gone: bool) -> bool:
        """What these leases have not committed is free, or quarantined unless the writer is gone: True
        if something is."""
        store, quarantined = self._blocks.store, b""
        for lease_id in leases:
            lease = self._of[lease_id]
            ids = lease.still()
            if gone:
                store.abort(ids)
            else:
                store.quarantine(ids)
                quarantined += ids
            self._end(lease)
        if quarantined:
            self._quarantined[session] = quarantined
        return bool(quarantined)

    def process_gone(self, session: SessionId) -> None:
        ids = self._quarantined.pop(session, b"")
        if ids:
            self._blocks.store.gone(ids)


def _refuse_beyond(outcomes: bytearray, granted: int) -> None:
    """Mark the new keys after the first `granted` as without room."""
    at = -1
    for _ in range(granted):
        at = outcomes.index(GRANTED, at + 1)
    outcomes[at + 1 :] = outcomes[at + 1 :].replace(bytes([GRANTED]), bytes([NO_ROOM]))
