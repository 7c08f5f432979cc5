"""What moves between memory and disk, and what goes: plans, and what became of them. No I/O here.

A plan holds what it needs until its owner says how it ended, so each must be ended, in as many parts as the
owner likes: a promotion by `promoted`, `unpromoted` or `spoilt`, a demotion by `demoted` or `not_demoted`.
Segments are numbers that the owner chooses.
"""

from __future__ import annotations

import struct
from array import array
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from itertools import compress, islice

from kvtier.catalog.blocks import ID_BYTES, Blocks
from kvtier.catalog.departures import LOST, SPOILT
from kvtier.catalog.leases import NOBODY
from kvtier.catalog.spaces import IDENTITY, Space, Spaces
from kvtier.codec.frame import PAGE, Identity, pages
from kvtier.key import KEY_BYTES
from kvtier.layout import KvSpec
from kvtier.wire import CAME, DIGEST_BYTES, DISK, MEMORY, SLOT_BYTES, WENT

COLD, PROMOTING = 5, 6  # what `Store.states` says of a block, after the wire's outcomes
FRAME = struct.Struct("<IIIBBBB")  # segment, page, payload bytes, codec, header pages, flags, 0
FRAME_BYTES = FRAME.size
ROW_BYTES = 128  # of a footer's entry
PLACE_BYTES = 8  # of which the first two say where it lies
USED, ONLY_THERE = 1, 2  # what `Store.in_segment` says
WANTED = bytes(flag == USED | ONLY_THERE for flag in range(256))
FEW_VICTIMS = 64
SWEEP_IDS, SWEEP_TURNS = 4096, 8  # looked at in one go: a millisecond
LEAST_RECORD_BYTES = 32  # a block's record takes more
LOOK_BLOCKS = 4096  # at most, for some that deserve to be written
MOST_VICTIMS = 16_384  # looked at in one go: a millisecond

Missing = tuple[int, int, bytes, bytes]  # group, shard, COLD ids, PROMOTING ids


@dataclass(slots=True, frozen=True)
class Promotion:
    """Blocks to read into their slots, in the order in which they are wanted.

    The ids in `joined` are on their way by an earlier plan; `left_out` more are on disk, for which there
    was no room or too much in flight, or which are out of reach."""

    ids: bytes = b""
    slots: bytes = b""
    frames: bytes = b""
    digests: bytes = b""
    joined: bytes = b""
    left_out: int = 0
    sizes: Sequence[int] = ()  # of the blocks


@dataclass(slots=True, frozen=True)
class Survey:
    """What a promotion would read, by its frames, and the ids of what is being read already."""

    frames: bytes
    joined: bytes


@dataclass(slots=True, frozen=True)
class Outgoing:
    """A block to write, with all that its frame says of it; no `parent` at a root, and no `checksum`
    where the writer gave none."""

    space: Space
    identity: Identity
    parent: bytes
    checksum: bytes
    slot: bytes


@dataclass(slots=True, frozen=True)
class Demotion:
    """Blocks to write to the disk. They stay where they are until that has ended."""

    ids: bytes
    blocks: tuple[Outgoing, ...]


@dataclass(slots=True, frozen=True)
class Rescue:
    """Frames to copy out of a segment before it is used again."""

    ids: bytes
    frames: bytes
    digests: bytes


@dataclass(slots=True, frozen=True)
class Framed:
    """A block's frame, and what it has to say."""

    id: int
    frame: bytes
    digest: bytes
    identity: Identity


class Cold:
    def __init__(self, blocks: Blocks, spaces: Spaces) -> None:
        self._blocks = blocks
        self._spaces = spaces
        self._writing: dict[int, bool] = {}  # of demotions, and whether as victims
        self.reading = 0  # blocks
        self.failed: Counter[str] = Counter()  # blocks that a read did not bring, by reason

    def _name(self, ids: bytes) -> bytes:
        return self._blocks.changes.name(ids)

    def _tell(self, what: int, tier: int, names: bytes) -> None:
        self._blocks.changes.tell(what, tier, names)

    @property
    def writing(self) -> int:
        return len(self._writing)

    # --- from the disk -----------------------------------------------------------------------

    def plan_promotion(
        self,
        space: Space,
        keys: bytes,
        limit_blocks: int,
        out_of_reach: Set[int] = frozenset(),
        accept: Callable[[Survey], bool] | None = None,
    ) -> Promotion:
        """Take slots for what a match of these keys would need from the disk, if `accept` agrees; it is asked
        where there is something to read or to wait for.

        Of a prefix that would put more than `limit_blocks` in flight, or that needs something of the
        segments that are `out_of_reach`, a shorter one. Never evicts a block of this very chain. A block
        that is being read already is not read twice.
        """
        space.check_keys(keys)
        if space.index < 0:
            return Promotion()
        store = self._blocks.store
        ready, whole, _ = store.match(space.index, keys)
        if ready == whole:
            return Promotion()
        wanted = store.cold(space.index, keys, whole)
        asked = sum(len(cold) + len(promoting) for _, _, cold, promoting in wanted) // ID_BYTES
        limit_blocks = max(0, limit_blocks - self.reading)
        prefix, wanted = self._within(space, keys, whole, wanted, limit_blocks, out_of_reach)
        moving = any(cold for _, _, cold, _ in wanted)
        if accept is not None and wanted:
            there = b"".join(cold for _, _, cold, _ in wanted)
            on_its_way = b"".join(promoting for _, _, _, promoting in wanted)
            if (there or on_its_way) and not accept(Survey(store.frames(there)[0], on_its_way)):
                return Promotion(left_out=asked)
        here = self._here(space, keys[: prefix * KEY_BYTES]) if moving else []
        ids, joined, sizes = b"", b"", array("I")
        self._blocks.lease(here)
        try:
            for group, _, cold, promoting in wanted:
                joined += promoting
                if cold:
                    self._blocks.make_room(space.index, group, len(cold) // ID_BYTES)
                    promoted = store.promote(cold)[0]
                    ids += promoted
                    size = space.spec.group_block_bytes(group)
                    sizes += array("I", [size]) * (len(promoted) // ID_BYTES)
        finally:
            for held in reversed(here):
                self._blocks.unlease(held)
        taken = len(ids) // ID_BYTES
        self.reading += taken
        frames, digests = store.frames(ids)
        left_out = asked - taken - len(joined) // ID_BYTES
        return Promotion(ids, store.slots(ids), frames, digests, joined, left_out, sizes)

    def _here(self, space: Space, keys: bytes) -> list[bytes]:
        """What of this prefix is READY, for each shard of each group."""
        return [
            self._blocks.store.present(space.index, at, shard, keys)
            for at, group in enumerate(space.spec.cache_groups)
            for shard in range(group.shards)
        ]

    def _within(
        self,
        space: Space,
        keys: bytes,
        prefix: int,
        wanted: list[Missing],
        limit_blocks: int,
        out_of_reach: Set[int],
    ) -> tuple[int, list[Missing]]:
        """This prefix and what it needs, or a shorter one that needs no more than so many blocks, and
        nothing that is out of reach."""
        store = self._blocks.store

        def fits(parts: list[Missing]) -> bool:
            if sum(len(cold) for _, _, cold, _ in parts) > limit_blocks * ID_BYTES:
                return False
            ids = b"".join(cold + promoting for _, _, cold, promoting in parts if out_of_reach)
            segments = {one[0] for one in struct.iter_unpack("<I12x", store.frames(ids)[0])}
            return segments.isdisjoint(out_of_reach)

        if fits(wanted):
            return prefix, wanted
        best: tuple[int, list[Missing]] = (0, [])
        low, high = 0, prefix
        enough = 1 if out_of_reach else 1 + limit_blocks // 8
        while high - low > enough:
            middle = (low + high) // 2
            shorter = store.match(space.index, keys[: middle * KEY_BYTES])[1]
            parts = store.cold(space.index, keys, shorter)
            if fits(parts):
                low, best = middle, (shorter, parts)
            else:
                high = middle
        return best

    def promoted(self, ids: bytes) -> bytes:
        """These are in their slots, verified: which of them are READY, the others were forgotten."""
        ready, gone = self._blocks.store.promoted(ids)
        self._tell(CAME, MEMORY, self._name(ready))
        self._blocks.came(ready)
        self._blocks.gone(gone, "forgotten")
        self.reading -= len(ids) // ID_BYTES
        return ready

    def unpromoted(self, ids: bytes, reason: str) -> None:
        """These were not read, and their frames may be good: on disk as before."""
        self._blocks.departures.note(self._blocks.store.keys_of(ids), LOST)  # if they go
        gone, orphans = self._blocks.store.unpromoted(ids)
        self._not_read(ids, reason, orphans)
        self._blocks.gone(gone, "lost")

    def spoilt(self, ids: bytes, reason: str) -> None:
        """The frames of these are not what they should be: they are nowhere any more."""
        names = self._name(ids)
        self._blocks.departures.note(self._blocks.store.keys_of(ids), SPOILT)
        gone, orphans, died = self._blocks.store.spoilt(ids)
        self._tell(WENT, DISK, names)
        self._not_read(ids, reason, orphans)
        self._blocks.gone(gone, "spoilt")
        self._blocks.died += died

    def _not_read(self, ids: bytes, reason: str, orphans: bytes) -> None:
        self._blocks.policy.demoted(orphans)
        self.failed[reason] += len(ids) // ID_BYTES
        self.reading -= len(ids) // ID_BYTES

    # --- to the disk -------------------------------------------------------------------------

    def plan_demotion(
        self, limit_bytes: int, watermark_bytes: int, limit_blocks: int = 1 << 31
    ) -> Demotion:
        """Of the `watermark_bytes` that would be evicted first, what is in memory alone; about so much of it
        as the limits allow, the coldest first. No more than MOST_VICTIMS are looked at."""
        counts = self._blocks.store.counts()
        blocks = max(1, counts["blocks"]["ready"])
        nbytes = max(1, counts["bytes"]["ready"])
        admission = self._blocks.admission
        if admission.shut:  # more is looked at than is taken
            limit_blocks = min(limit_blocks, max(1, limit_bytes * blocks // nbytes))
            limit_bytes = LOOK_BLOCKS * nbytes // blocks
        else:
            limit_bytes = min(limit_bytes, limit_blocks * nbytes // blocks)
        most = min(blocks, MOST_VICTIMS)
        ask = FEW_VICTIMS + watermark_bytes * blocks // nbytes
        while True:
            victims = self._blocks.policy.victims(min(ask, most))
            ids, enough = self._blocks.store.coldest(victims, watermark_bytes, limit_bytes)
            if enough or ask >= most:
                ids = admission.filter(ids, self._blocks.store.keys_of)
                if admission.shut:
                    ids = ids[: limit_blocks * ID_BYTES]
                self._blocks.hold(ids)
                return self._demotion(ids, victims=True)
            ask *= 2

    def plan_write_through(self, ids: bytes, limit_blocks: int | None = None) -> Demotion:
        """What of these is in memory alone and not being written, such as a commit's."""
        new = array("I", self._blocks.store.dirty(ids))
        fresh = (one for one in new if one not in self._writing)
        ids = array("I", islice(fresh, limit_blocks)).tobytes()
        ids = self._blocks.admission.filter(ids, self._blocks.store.keys_of)
        self._blocks.lease([ids])
        return self._demotion(ids, victims=False)

    def _demotion(self, ids: bytes, victims: bool) -> Demotion:
        self._writing.update(dict.fromkeys(array("I", ids), victims))
        return Demotion(ids, tuple(self.described(ids, self._blocks.store.slots(ids))))

    def described(self, ids: bytes, slots: bytes = b"") -> list[Outgoing]:
        """All that a frame says of these blocks, for as long as the ids are theirs."""
        store = self._blocks.store
        digests, has_digest = store.checksums(ids)
        blocks = []
        names = IDENTITY.iter_unpack(store.identities(ids))
        for at, (index, group, shard, has_parent, key, parent) in enumerate(names):
            space = self._spaces.at_index(index)
            digest = digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]
            blocks.append(
                Outgoing(
                    space, Identity(space.identity, group, shard, key),
                    parent if has_parent else b"", digest if has_digest[at] else b"",
                    slots[at * SLOT_BYTES : (at + 1) * SLOT_BYTES],
                )
            )  # fmt: skip
        return blocks

    def demoted(self, ids: bytes, frames: bytes, digests: bytes = b"") -> int:
        """These are on disk from now on; how many of them were forgotten meanwhile.

        The digests are those of the payloads. They may be left out where all have a checksum and the
        payloads are the blocks themselves.
        """
        assert all(one in self._writing for one in array("I", ids)), "not of a demotion"
        late = self._blocks.store.framed(ids, frames, digests)
        if self._blocks.changes.watched:
            gone = set(array("I", late))
            kept = array("I", (one for one in array("I", ids) if one not in gone))
            self._tell(CAME, DISK, self._name(kept.tobytes()))
        self._bury(ids, late, frames)
        self._end_writes(ids)
        return len(late) // ID_BYTES

    def not_demoted(self, ids: bytes) -> None:
        """These could not be written: in memory alone, as before."""
        self._end_writes(ids)

    def _bury(self, ids: bytes, late: bytes, frames: bytes) -> None:
        """Note the frames that were written for nothing."""
        gone = set(array("I", late))
        for at, one in enumerate(array("I", ids) if gone else ()):
            if one in gone:
                self._blocks.died += frames[at * FRAME_BYTES : at * FRAME_BYTES + PLACE_BYTES]

    def _end_writes(self, ids: bytes) -> None:
        ended = array("I", ids)
        victims = array("I", (one for one in ended if self._writing[one]))
        others = array("I", (one for one in ended if not self._writing[one]))
        for one in ended:
            del self._writing[one]
        self._blocks.let_go(victims.tobytes())
        self._blocks.unlease(others.tobytes())

    @property
    def in_memory_alone(self) -> int:
        """How many blocks are READY and have no frame."""
        counts = self._blocks.store.counts()
        blocks = counts["blocks"]
        clean = counts["framed_blocks"] - blocks["cold"] - blocks["promoting"]
        return max(0, blocks["ready"] - clean)

    def sweep(self, begin: int, limit_blocks: int) -> tuple[Demotion, int, bytes]:
        """Some of what is in memory alone, wanted or not, in no order of eviction; where to go
        on, 0 where that was the last of it; and which blocks on the way are being written already. Looks at
        a bounded number at once."""
        store = self._blocks.store
        most = store.memory_bytes() // LEAST_RECORD_BYTES
        found, writing, at = array("I"), array("I"), begin
        for _ in range(SWEEP_TURNS):
            step = min(SWEEP_IDS, max(1, limit_blocks - len(found)) * 8)
            new = array("I", store.dirty(array("I", range(at, at + step)).tobytes()))
            fresh = [one for one in new if one not in self._writing][: limit_blocks - len(found)]
            found.extend(fresh)
            at = found[-1] + 1 if len(found) == limit_blocks else at + step
            writing.extend(one for one in new if one < at and one in self._writing)
            if at >= most or len(found) == limit_blocks:
                break
        ids = found.tobytes()
        self._blocks.lease([ids])
        plan = self._demotion(ids, victims=False)
        return plan, at if at < most else 0, writing.tobytes()

    # --- segments ----------------------------------------------------------------------------

    def in_segment(self, segment: int) -> bytes:
        """The ids of the blocks that have a frame in this segment, in the order in which they lie."""
        return self._blocks.store.in_segment(segment)[0]

    def frames_in(self, segment: int) -> dict[int, int]:
        """Where the frames of this segment that blocks have begin, and how many pages each takes."""
        store = self._blocks.store
        frames, _ = store.frames(store.still(store.in_segment(segment)[0], segment))
        return {
            page: header_pages + pages(payload_bytes) // PAGE
            for _, page, payload_bytes, _, header_pages, _, _ in FRAME.iter_unpack(frames)
        }

    def dirty(self, ids: bytes) -> bytes:
        """Those of these blocks that are in memory alone, and not forgotten."""
        return self._blocks.store.dirty(ids)

    def lossy(self, ids: bytes) -> bytes:
        """Those of these blocks whose bytes in memory were decoded from less than was saved."""
        return self._blocks.store.lossy(ids)

    def depths(self, ids: bytes) -> bytes:
        """How many keys are before each of these blocks, as far as is known; 4 bytes each."""
        return self._blocks.store.depths(ids)

    def still(self, ids: bytes, segment: int) -> bytes:
        """Those of these blocks whose frames are in this segment, and that are not forgotten."""
        return self._blocks.store.still(ids, segment)

    def described_in(self, ids: bytes, segment: int) -> dict[int, Outgoing]:
        """All that a frame says of those of these blocks whose frames are in this segment yet."""
        ids = self._blocks.store.still(ids, segment)
        return dict(zip(array("I", ids), self.described(ids), strict=True))

    def still_in(self, ids: bytes, segment: int) -> list[Framed]:
        """Those of these blocks whose frames are in this segment yet."""
        ids = self._blocks.store.still(ids, segment)
        frames, digests = self._blocks.store.frames(ids)
        return [
            Framed(
                number, frames[at * FRAME_BYTES : (at + 1) * FRAME_BYTES],
                digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES], block.identity,
            )
            for at, (number, block) in enumerate(
                zip(array("I", ids), self.described(ids), strict=True)
            )
        ]  # fmt: skip

    def damaged(self, ids: bytes, frames: bytes) -> tuple[int, bytes]:
        """These frames are not what they should be: of those that are their blocks' yet, how many were
        forgotten; and which of the blocks are in memory alone. What is being read from such a frame is left
        to that read."""
        store = self._blocks.store
        names = b""
        if self._blocks.changes.watched:
            names = self._name(
                b"".join(
                    store.still(array("I", [one]).tobytes(), segment)
                    for one, (segment,) in zip(
                        array("I", ids), struct.iter_unpack("<I12x", frames), strict=True
                    )
                )
            )
        for segment in {one[0] for one in struct.iter_unpack("<I12x", frames)}:
            here = store.still(ids, segment)
            self._blocks.departures.note(store.keys_of(here), SPOILT)
        gone, orphans, died = store.damaged(ids, frames)
        self._tell(WENT, DISK, names if died else b"")
        self._blocks.gone(gone, "spoilt")
        self._blocks.policy.demoted(orphans)
        self._blocks.died += died
        return len(died) // PLACE_BYTES, store.dirty(ids) if died else b""

    def take_used(self, limit: int) -> bytes:
        """Segment and page, 4 bytes each, of frames whose blocks were wanted for the first time since they
        were written; those since the last call, and of so many blocks at most."""
        return self._blocks.store.take_used(limit)

    def reclaim(self, segment: int, keep: int) -> Rescue:
        """What of this segment deserves a second chance: the first `keep` blocks, in the order in which
        they were written, that are there alone and were wanted since, or in three rounds before and not
        spared for that yet. What is in memory too needs none.
        Their use is forgotten. The segment is dropped after `rescued`, or they go with it."""
        store = self._blocks.store
        ids, flags = store.in_segment(segment, True)
        wanted = compress(array("I", ids), flags.translate(WANTED))
        kept = array("I", islice(wanted, keep)).tobytes()
        return Rescue(kept, *store.frames(kept))

    def rescued(self, ids: bytes, before: bytes, frames: bytes) -> int:
        """Copies of the frames `before` are on disk from now on, elsewhere; how many of these blocks have
        gone, or got another frame, meanwhile."""
        late = self._blocks.store.moved(ids, before, frames)
        self._bury(ids, late, frames)
        return len(late) // ID_BYTES

    def drop_segment(self, segment: int) -> int:
        """The segment is about to be used again: what was there alone is gone; how many blocks."""
        store, ids = self._blocks.store, self.in_segment(segment)
        self._blocks.departures.note(store.keys_of(ids), LOST)
        names = self._name(ids if self._blocks.changes.watched else b"")
        gone, orphans = store.drop_segment(segment)
        self._tell(WENT, DISK, names)
        self._blocks.gone(gone, "lost")
        self._blocks.policy.demoted(orphans)
        return len(gone) // ID_BYTES

    def restore(
        self, identity: bytes, spec: KvSpec, rows: bytes, segment: int, used: bytes = b""
    ) -> tuple[int, int]:
        """Know what a segment's footer lists of this space: (blocks that are on disk now and were not, rows
        that are none of its blocks). Of two frames of a block the one restored later counts; one in memory
        that has none gets this one. `used` has the pages, 4 bytes each in ascending order, of frames whose
        blocks were wanted since they were written. Where the space is open under another description than the
        footer's, none of the rows is its."""
        known = self._spaces.named(identity)
        if known is not None and known.spec != spec:
            return 0, len(rows) // ROW_BYTES
        space = self._spaces.open(identity, spec, NOBODY)
        try:
            self._spaces.settle(space)
            made, unfit, died = self._blocks.store.restore(space.index, rows, segment, used)
            self._blocks.died += died
            return made, unfit
        finally:
            self._spaces.leave_one(NOBODY, space)

    def take_died(self) -> bytes:
        """Segment and page, 4 bytes each, of the frames that are nothing any more since the last call:
        their blocks were forgotten, or they are damaged. Those of dropped segments are not among them."""
        died = bytes(self._blocks.died)
        self._blocks.died.clear()
        return died
