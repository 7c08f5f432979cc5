"""Copies of a tenant's blocks in the memory of GPUs: who may write them, and which slots a load gets.

A copy exists beside the block's slot in memory, never without it, so an eviction of a copy loses nothing. A
lease on a block holds its copies too. While the memory of a GPU has room, every copy is accepted; after that
only copies of blocks that were loaded again, in place of those that were not used for the longest time.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from kvtier.errors import Refused, bad_request
from kvtier.wire import GRANTED, LEAVING, LIMIT_TOLD_SLOTS, SLOT_BYTES, Part
from kvtier_daemon.catalog.blocks import ID_BYTES, BlockTable
from kvtier_daemon.catalog.leases import NO_LEASE, LeaseId, Leases, SessionId

if TYPE_CHECKING:
    from typing_extensions import Buffer

NONE = 0xFFFFFFFF  # in a list of ids: no block
OUTCOMES = ("stored", "refused", "aborted")


@dataclass(slots=True)
class HotArena:
    """The memory of one GPU that belongs to the tenant. Slots name it by its number."""

    gpu: str
    number: int
    nbytes: int
    counts: Counter[str] = field(default_factory=Counter)  # blocks of saves, by outcome
    found: int = 0  # blocks of loads on this GPU that had a copy
    absent: int = 0  # and those that had none


@dataclass(slots=True)
class CopyLease:
    """The right to write copies of these blocks, which a lease holds until its end."""

    id: LeaseId
    session: SessionId
    arena: HotArena
    ids: bytes


@dataclass(slots=True, frozen=True)
class GrantedCopies:
    lease: LeaseId
    outcomes: bytes
    slots: bytes


class HotCopies:
    """The copies of one tenant, on all GPUs."""

    def __init__(self, blocks: BlockTable, leases: Leases) -> None:
        self._blocks = blocks
        self._leases = leases
        self.arenas: dict[str, HotArena] = {}  # by GPU
        self._open: dict[LeaseId, CopyLease] = {}
        self._quarantined: dict[SessionId, list[CopyLease]] = {}
        self._joined: dict[SessionId, tuple[str, str, tuple[int, ...]]] = {}  # engine, GPU, shards
        self._gpu_of: dict[str, dict[int, str]] = {}  # by engine and shard

    # --- memory --------------------------------------------------------------------------------

    def add(self, gpu: str, nbytes: int, table: Buffer) -> HotArena:
        """Use this memory of a GPU, which has none of the tenant's yet."""
        assert gpu not in self.arenas
        number = self._blocks.store.add_hot(nbytes, table)
        arena = self.arenas[gpu] = HotArena(gpu, number, nbytes)
        return arena

    def remove(self, gpu: str) -> None:
        """Forget all copies on this GPU, whose memory is never used again: clients may still write to it."""
        arena = self.arenas.pop(gpu, None)
        if arena is None:
            return
        for lease in [*self._open.values()]:
            if lease.arena is arena:
                self._close(lease)
        for session, leases in [*self._quarantined.items()]:
            left = [lease for lease in leases if lease.arena is not arena]
            if left:
                self._quarantined[session] = left
            else:
                del self._quarantined[session]
            for lease in leases:
                if lease.arena is arena:
                    self._blocks.unlease(lease.ids)
        self._blocks.store.drop_hot(arena.number)

    # --- loads ---------------------------------------------------------------------------------

    def join(self, session: SessionId, engine: str, gpu: str, shards: Sequence[int]) -> None:
        """This session copies blocks of these shards from and to this GPU. All sessions of its engine get
        slots on that GPU for these shards."""
        self.leave(session)
        self._joined[session] = engine, gpu, tuple(shards)
        self._gpu_of.setdefault(engine, {}).update(dict.fromkeys(shards, gpu))

    def leave(self, session: SessionId) -> None:
        """Undo `join`."""
        joined = self._joined.pop(session, None)
        if joined is None:
            return
        engine = joined[0]
        gpu_of = {
            shard: gpu
            for name, gpu, shards in self._joined.values()
            if name == engine
            for shard in shards
        }
        if gpu_of:
            self._gpu_of[engine] = gpu_of
        else:
            self._gpu_of.pop(engine, None)  # sessions may have joined without shards

    @property
    def is_used(self) -> bool:
        return bool(self._gpu_of and self.arenas)

    def with_copies(
        self, engine: str, parts: Sequence[Part], ids_of: dict[tuple[int, int], bytes]
    ) -> list[Part]:
        """These parts of a lease with the slots of their copies on the engine's GPUs; zeros for a block
        without a copy. The copies count as used."""
        gpu_of = self._gpu_of.get(engine, {})
        if 2 * sum(len(part.slots) for part in parts) > LIMIT_TOLD_SLOTS * SLOT_BYTES:
            return list(parts)  # they fill a reply
        found = []
        for part in parts:
            arena = self.arenas.get(gpu_of.get(part.shard, ""))
            if arena is None:
                found.append(part)
                continue
            ids = ids_of[part.group, part.shard]
            slots = self._blocks.store.copies(arena.number, ids, True)
            # A generation is never 0, and it is the last field.
            copies = sum(map(bool, memoryview(slots).cast("Q")[2::3]))
            arena.found += copies
            arena.absent += len(ids) // ID_BYTES - copies
            found.append(msgspec.structs.replace(part, hot=slots) if copies else part)
        return found

    # --- saves ---------------------------------------------------------------------------------

    def reserve(self, session: SessionId, slots: bytes, again: bool) -> GrantedCopies:
        """Get slots for copies of the blocks in these slots of memory. `again`: the blocks were loaded, so
        copies of others may be dropped for them. LEAVING: a slot that has another block now."""
        if len(slots) % SLOT_BYTES:
            raise bad_request(f"slots: {len(slots)} bytes, expected {SLOT_BYTES} each")
        self._leases.check(session)
        arena = self._arena_of(session)
        store = self._blocks.store
        ids = array("I", store.at(slots))
        known = array("I", (one for one in ids if one != NONE)).tobytes()
        self._blocks.lease([known])
        codes, places = store.reserve_copies(arena.number, known, again)
        granted, left = bytearray(), bytearray()
        for at, code in enumerate(codes):
            one = known[at * ID_BYTES : (at + 1) * ID_BYTES]
            (left if code else granted).extend(one)
        if left:
            self._blocks.unlease(bytes(left))
        answers = iter(codes)
        outcomes = bytes(LEAVING if one == NONE else next(answers) for one in ids)
        arena.counts["refused"] += len(ids) - outcomes.count(GRANTED)
        if not granted:
            return GrantedCopies(NO_LEASE, outcomes, b"")
        lease = CopyLease(self._leases.make(session), session, arena, bytes(granted))
        self._open[lease.id] = lease
        return GrantedCopies(lease.id, outcomes, places)

    def end(self, session: SessionId, lease_id: LeaseId, good: bool) -> None:
        """The copies of this lease are complete, or nobody writes them any longer."""
        lease = self._open.get(lease_id)
        if lease is None or lease.session != session:
            text = f"lease {lease_id} is not a lease on copies of this session, or its GPU's memory is gone"
            raise Refused("unknown_lease", text)
        self._blocks.store.end_copies(lease.arena.number, lease.ids, good)
        lease.arena.counts["stored" if good else "aborted"] += len(lease.ids) // ID_BYTES
        self._close(lease)

    def _arena_of(self, session: SessionId) -> HotArena:
        joined = self._joined.get(session)
        if joined is None:
            raise bad_request("this session has joined no GPU: send HotJoin first")
        arena = self.arenas.get(joined[1])
        if arena is None:
            text = (
                f"this tenant has no memory on GPU {joined[1]} now: is `kvtier hold-gpu` running?"
            )
            raise Refused("unknown_lease", text)
        return arena

    def _close(self, lease: CopyLease) -> None:
        del self._open[lease.id]
        self._leases.leave(lease.session, lease.id)
        self._leases.ended()
        self._blocks.unlease(lease.ids)

    # --- the end of writers --------------------------------------------------------------------

    def end_session(self, session: SessionId, gone: bool) -> bool:
        """Free the slots that this session may still write to if nothing writes to them any longer; otherwise
        quarantine them until `process_gone`. True if any are quarantined."""
        self.leave(session)
        mine = [lease for lease in self._open.values() if lease.session == session]
        for lease in mine:
            del self._open[lease.id]
            self._leases.leave(session, lease.id)
            self._leases.ended()
        if mine:
            self._quarantined[session] = self._quarantined.get(session, []) + mine
        if gone:
            self.process_gone(session)
        return session in self._quarantined

    def resume(self, before: SessionId, session: SessionId) -> None:
        """The client of an ended session has this one now, and may still write to its slots there."""
        if leases := self._quarantined.pop(before, None):
            self._quarantined[session] = self._quarantined.get(session, []) + leases

    def process_gone(self, session: SessionId) -> None:
        """Nothing writes these copies any longer: free their slots."""
        for lease in self._quarantined.pop(session, ()):
            self._blocks.store.end_copies(lease.arena.number, lease.ids, False)
            lease.arena.counts["aborted"] += len(lease.ids) // ID_BYTES
            self._blocks.unlease(lease.ids)

    # --- observing -----------------------------------------------------------------------------

    def quarantined_blocks(self, arena: HotArena) -> int:
        """How many copies have writers that disconnected, and may still write."""
        return sum(
            len(one.ids) // ID_BYTES
            for leases in self._quarantined.values()
            for one in leases
            if one.arena is arena
        )

    def gpus_with(self, ids: bytes) -> list[str]:
        """The GPUs that have a copy of one of these blocks."""
        return [
            gpu
            for gpu, arena in self.arenas.items()
            if any(self._blocks.store.copies(arena.number, ids, False))
        ]
