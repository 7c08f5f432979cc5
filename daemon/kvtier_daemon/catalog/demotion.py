"""Plans to write blocks from memory to disk, and their outcomes. No I/O.

Planned blocks cannot be evicted until they are reported, in any number of parts, to `demoted` or
`not_demoted`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import inf

from kvtier.frame import Identity
from kvtier.wire import CAME, DIGEST_BYTES, DISK, SLOT_BYTES
from kvtier_daemon.catalog.blocks import ID_BYTES, BlockTable
from kvtier_daemon.catalog.frames import FRAME_BYTES, PLACE_BYTES
from kvtier_daemon.catalog.spaces import IDENTITY, KnownSpace, SpaceTable

FEW_VICTIMS = 64
SWEEP_IDS, SWEEP_TURNS = 4096, 8  # ids per step, and steps per call of `sweep`: a millisecond
LOOK_BLOCKS = 4096  # most blocks to search for some that admission accepts
MOST_VICTIMS = 16_384  # most victims to search in one call: a millisecond
ALL_BYTES = 1 << 62


@dataclass(slots=True, frozen=True)
class WritePlan:
    """A block to write, with the content of its frame's header. `parent` is empty at a root, and `checksum`
    if the writer sent none. `lossy`: its bytes in memory were decoded from a lossy frame."""

    space: KnownSpace
    identity: Identity
    parent: bytes
    checksum: bytes
    slot: bytes
    lossy: bool


@dataclass(slots=True, frozen=True)
class Demotion:
    """Blocks to write to the disk. They stay in memory until the write has ended."""

    ids: bytes
    blocks: tuple[WritePlan, ...]


class Demotions:
    """The writes of one tenant."""

    def __init__(self, blocks: BlockTable, spaces: SpaceTable) -> None:
        self._blocks = blocks
        self._spaces = spaces
        self._writing: dict[int, bool] = {}  # planned blocks; True: it could be a victim

    @property
    def writing(self) -> int:
        return len(self._writing)

    def plan(self, limit_bytes: int, watermark_bytes: int, limit_blocks: int = 1 << 31) -> Demotion:
        """Select blocks that are only in memory, among the `watermark_bytes` that would be evicted first,
        coldest first. The limits are approximate. Searches at most MOST_VICTIMS blocks."""
        counts = self._blocks.store.counts()
        blocks = max(1, counts["blocks"]["ready"])
        nbytes = max(1, counts["bytes"]["ready"])
        admission, expiring = self._blocks.admission, self._blocks.expiring
        if admission.strict:  # search more blocks than are taken
            limit_blocks = min(limit_blocks, max(1, limit_bytes * blocks // nbytes))
            limit_bytes = LOOK_BLOCKS * nbytes // blocks
        else:
            limit_bytes = min(limit_bytes, limit_blocks * nbytes // blocks)
        most = min(blocks, MOST_VICTIMS)
        ask = FEW_VICTIMS + watermark_bytes * blocks // nbytes
        while True:
            victims = self._blocks.policy.victims(min(ask, most))
            if expiring.time_of:
                victims = expiring.lasting(victims)
            ids, enough = self._blocks.store.coldest(victims, watermark_bytes, limit_bytes)
            if enough or ask >= most:
                if admission.strict:
                    ids = admission.filter(ids, self._blocks.store.keys_of)
                    ids = ids[: limit_blocks * ID_BYTES]
                return self._planned(ids)
            ask *= 2

    def plan_write_through(self, ids: bytes, limit_blocks: int | None = None) -> Demotion:
        """Select the blocks of these that are only in memory and not being written, in this order. Never
        selects blocks that expire."""
        new = self._lasting(self._blocks.store.dirty(ids))
        # An id may be given twice: its first block was evicted, and another one has it now.
        fresh = dict.fromkeys(one for one in array("I", new) if one not in self._writing)
        ids = array("I", islice(fresh, limit_blocks)).tobytes()
        if self._blocks.admission.strict:
            ids = self._blocks.admission.filter(ids, self._blocks.store.keys_of)
        return self._planned(ids)

    def _lasting(self, ids: bytes) -> bytes:
        return self._blocks.expiring.lasting(ids) if self._blocks.expiring.time_of else ids

    def _planned(self, ids: bytes) -> Demotion:
        """Hold these blocks until the end of their writes. Those that could be victims keep their places in
        the order of the policy: a write is no use."""
        store = self._blocks.store
        victims, _ = store.coldest(ids, ALL_BYTES, ALL_BYTES)
        places = frozenset(array("I", victims))
        self._blocks.hold_for_write(victims)
        self._blocks.lease(
            [array("I", (one for one in array("I", ids) if one not in places)).tobytes()]
        )
        self._writing.update((one, one in places) for one in array("I", ids))
        self._blocks.planned_writes = len(self._writing)
        return Demotion(ids, tuple(self.described(ids, store.slots(ids), store.lossy(ids))))

    def described(self, ids: bytes, slots: bytes = b"", lossy: bytes = b"") -> list[WritePlan]:
        """The content of these blocks' headers; the ids are in use. `lossy`: those from lossy frames."""
        store = self._blocks.store
        digests, has_digest = store.checksums(ids)
        lossy_ids = frozenset(array("I", lossy))
        blocks = []
        names = IDENTITY.iter_unpack(store.identities(ids))
        for at, (number, (index, group, shard, has_parent, key, parent)) in enumerate(
            zip(array("I", ids), names, strict=True)
        ):
            space = self._spaces.at_index(index)
            digest = digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]
            blocks.append(
                WritePlan(
                    space, Identity(space.identity, group, shard, key),
                    parent if has_parent else b"", digest if has_digest[at] else b"",
                    slots[at * SLOT_BYTES : (at + 1) * SLOT_BYTES], number in lossy_ids,
                )
            )  # fmt: skip
        return blocks

    def demoted(self, ids: bytes, frames: bytes, digests: bytes = b"") -> int:
        """These blocks have these frames from now on; return how many were forgotten during the write.

        The digests are those of the payloads. They may be omitted if all blocks have a checksum and the
        payloads are the blocks themselves.
        """
        assert all(one in self._writing for one in array("I", ids)), (
            "a block is not part of a demotion"
        )
        late = self._blocks.store.framed(DISK, ids, frames, digests)
        changes = self._blocks.changes
        if changes.watched:
            gone = set(array("I", late))
            kept = array("I", (one for one in array("I", ids) if one not in gone))
            changes.add(CAME, DISK, changes.name(kept.tobytes()))
        note_dead_frames(self._blocks, ids, late, frames)
        self._end_writes(ids)
        self._blocks.residency.framed(ids)
        return len(late) // ID_BYTES

    def not_demoted(self, ids: bytes) -> None:
        """These blocks could not be written: they stay only in memory."""
        self._end_writes(ids)

    def _end_writes(self, ids: bytes) -> None:
        ended = array("I", ids)
        victims = array("I", (one for one in ended if self._writing[one]))
        others = array("I", (one for one in ended if not self._writing[one]))
        for one in ended:
            del self._writing[one]
        self._blocks.planned_writes = len(self._writing)
        self._blocks.end_write(victims.tobytes())
        self._blocks.unlease(others.tobytes())

    @property
    def in_memory_alone(self) -> int:
        """How many blocks are READY and have no frame."""
        counts = self._blocks.store.counts()
        blocks = counts["blocks"]
        clean = counts["framed_blocks"] - sum(counts["below"]) - blocks["promoting"]
        return max(0, blocks["ready"] - clean)

    def sweep(self, begin: int, limit_blocks: int) -> tuple[Demotion, int, bytes]:
        """Select some blocks that are only in memory, in no particular order, from record `begin` on. Return
        the plan; where to continue, 0 at the end; and blocks on the way that are being written already.
        Searches a bounded number of records."""
        store = self._blocks.store
        most = store.id_limit()
        found, writing, at = array("I"), array("I"), begin
        for _ in range(SWEEP_TURNS):
            step = min(SWEEP_IDS, max(1, limit_blocks - len(found)) * 8)
            dirty = store.dirty(array("I", range(at, min(at + step, most))).tobytes())
            new = array("I", self._lasting(dirty))
            fresh = [one for one in new if one not in self._writing][: limit_blocks - len(found)]
            found.extend(fresh)
            at = found[-1] + 1 if len(found) == limit_blocks else at + step
            writing.extend(one for one in new if one < at and one in self._writing)
            if at >= most or len(found) == limit_blocks:
                break
        plan = self._planned(found.tobytes())
        return plan, at if at < most else 0, writing.tobytes()

    def last_to_keep(self, limit_bytes: int) -> bytes:
        """The blocks that are only in memory, up to about this many bytes: first those that are held, then
        those that would be evicted last, so the head of a chain comes before the blocks below it. Takes 0.1 s
        for 100,000 blocks: only for a daemon that serves no clients."""
        store, policy = self._blocks.store, self._blocks.policy
        most = store.id_limit()
        dirty = self._lasting(store.dirty(array("I", range(most)).tobytes()))
        victims = array("I", policy.victims(len(policy)))
        places = {one: at for at, one in enumerate(victims)}
        order = sorted(array("I", dirty), key=lambda one: -places.get(one, inf))
        return array("I", self._within(order, limit_bytes)).tobytes()

    def _within(self, ids: list[int], limit_bytes: int) -> Iterator[int]:
        """The leading blocks of these that have at most this many bytes."""
        names = IDENTITY.iter_unpack(self._blocks.store.identities(array("I", ids).tobytes()))
        for one, (index, group, *_) in zip(ids, names, strict=True):
            limit_bytes -= self._spaces.at_index(index).spec.group_block_bytes(group)
            if limit_bytes < 0:
                return
            yield one

    def blocks_of(self, nbytes: int) -> int:
        """About how many blocks have this many bytes, at least one."""
        counts = self._blocks.store.counts()
        return max(1, nbytes * counts["blocks"]["ready"] // max(1, counts["bytes"]["ready"]))


def note_dead_frames(blocks: BlockTable, ids: bytes, late: bytes, frames: bytes) -> None:
    """Note the frames of the blocks that are in `late`: they were written and are not used."""
    gone = set(array("I", late))
    for at, one in enumerate(array("I", ids) if gone else ()):
        if one in gone:
            blocks.dead_frames += frames[at * FRAME_BYTES : at * FRAME_BYTES + PLACE_BYTES]
