"""The frames of one tenant's blocks in each segment: which are used, damaged, copied, dropped or restored.

Segments are numbers that the cold tier assigns. No I/O.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import compress, islice
from struct import Struct

from kvtier.frame import PAGE, Identity
from kvtier.key import KEY_BYTES
from kvtier.layout import KvSpec
from kvtier.wire import DISK, WENT
from kvtier_daemon.catalog.blocks import ID_BYTES, BlockTable
from kvtier_daemon.catalog.demotion import Demotions, WritePlan, note_dead_frames
from kvtier_daemon.catalog.frames import (
    FRAME,
    PLACE,
    PLACE_BYTES,
    SEGMENTS,
    FramedBlocks,
    StoredFrame,
    segments_of,
)
from kvtier_daemon.catalog.leases import NOBODY
from kvtier_daemon.catalog.miss_log import LOST, SPOILT
from kvtier_daemon.catalog.spaces import SpaceTable

ROW_BYTES, PAGE_AT = 128, 72  # of a footer's entry; it begins with the key
PAGE_NUMBER = Struct("<I")
USED, ONLY_THERE, USED_BEFORE = 1, 2, 4  # flags of `Store.in_segment`
ALONE = bytes(bool(flag & ONLY_THERE) for flag in range(256))
USED_ALONE = bytes(flag > ONLY_THERE and bool(flag & ONLY_THERE) for flag in range(256))
WANTED = bytes(flag == USED | ONLY_THERE for flag in range(256))


@dataclass(slots=True, frozen=True)
class Framed:
    """A block's packed frame, and the names in its header."""

    id: int
    frame: bytes
    digest: bytes
    identity: Identity


class SegmentFrames:
    def __init__(self, blocks: BlockTable, spaces: SpaceTable, demotions: Demotions) -> None:
        self._blocks = blocks
        self._spaces = spaces
        self._described = demotions.described
        self._left_out: dict[bytes, set[bytes]] = {}  # keys by identity of their space

    def in_segment(self, segment: int) -> bytes:
        """The ids of the blocks with a frame in this segment, in the order of the frames."""
        return self._blocks.store.in_segment(segment)[0]

    def alone_in(self, segment: int, used: bool) -> bytes:
        """The ids of the blocks that are only in this segment, in the order of the frames; with `used`, only
        those that were requested since their write, also if they were copied to this segment later."""
        ids, flags = self._blocks.store.in_segment(segment)
        alone = flags.translate(USED_ALONE if used else ALONE)
        return array("I", compress(array("I", ids), alone)).tobytes()

    def frames_in(self, segment: int) -> dict[int, int]:
        """The first page of each used frame in this segment, and its number of pages."""
        store = self._blocks.store
        frames, _ = store.frames(store.still(store.in_segment(segment)[0], segment))
        stored = (StoredFrame(*fields) for fields in FRAME.iter_unpack(frames))
        return {frame.page: frame.nbytes // PAGE for frame in stored}

    def described_in(self, ids: bytes, segment: int) -> dict[int, WritePlan]:
        """The header content of the blocks of these whose frames are still in this segment."""
        ids = self._blocks.store.still(ids, segment)
        return dict(zip(array("I", ids), self._described(ids), strict=True))

    def still_in(self, ids: bytes, segment: int) -> list[Framed]:
        """The blocks of these whose frames are still in this segment."""
        ids = self._blocks.store.still(ids, segment)
        framed = FramedBlocks(ids, *self._blocks.store.frames(ids))
        return [
            Framed(*stored, block.identity)
            for stored, block in zip(framed, self._described(ids), strict=True)
        ]

    def damaged(self, ids: bytes, frames: bytes) -> tuple[int, bytes]:
        """These frames are damaged: forget those that their blocks still use. Return how many these were, and
        which of the blocks are only in memory now. A block that is being read is left to its read."""
        store, changes = self._blocks.store, self._blocks.changes
        names = b""
        if changes.watched:
            names = changes.name(
                b"".join(
                    store.still(array("I", [number]).tobytes(), segment)
                    for number, segment in zip(
                        array("I", ids), array("I", frames)[SEGMENTS], strict=True
                    )
                )
            )
        for segment in segments_of(frames):
            used = store.still(ids, segment)
            self._blocks.miss_log.note(store.keys_of(used), SPOILT)
        gone, orphans, dead = store.damaged(ids, frames)
        self._blocks.forgets[0] += 1
        changes.add(WENT, DISK, names if dead else b"")
        self._blocks.gone(gone, "spoilt")
        self._blocks.policy.demoted(orphans)
        self._blocks.dead_frames += dead
        return len(dead) // PLACE_BYTES, store.dirty(ids) if dead else b""

    def take_used(self, limit: int) -> bytes:
        """Segment and page, 4 bytes each, of frames whose blocks were requested for the first time since
        their write. Returns each once, and at most `limit` per call."""
        return self._blocks.store.take_used(limit)

    def reclaim(self, segment: int, keep: int) -> FramedBlocks:
        """Select the frames of this segment for a second chance: the first `keep` blocks, in the order of
        their frames, that are only on disk and were requested since their write, or that were requested in
        three rounds before and got no second chance for that yet, or that an engine calls important. Resets
        these records of use. `drop_segment` must follow after `rescued`."""
        store = self._blocks.store
        ids, flags = store.in_segment(segment, True)
        only_there = array("I", compress(array("I", ids), flags.translate(ALONE)))
        used = bytes(compress(flags.translate(WANTED), flags.translate(ALONE)))
        used = self._blocks.admission.worth_copying(only_there.tobytes(), used, store.keys_of)
        wanted = compress(only_there, used)
        kept = array("I", islice(wanted, keep)).tobytes()
        return FramedBlocks(kept, *store.frames(kept))

    def rescued(self, ids: bytes, before: bytes, frames: bytes) -> int:
        """The frames `before` are copied to `frames`; how many blocks have gone or got another frame."""
        late = self._blocks.store.moved(ids, before, frames)
        note_dead_frames(self._blocks, ids, late, frames)
        return len(late) // ID_BYTES

    def drop_segment(self, segment: int) -> int:
        """The segment is about to be reused: drop its frames; return how many blocks were only there."""
        store, ids = self._blocks.store, self.in_segment(segment)
        self._blocks.miss_log.note(store.keys_of(ids), LOST)
        names = self._blocks.changes.name(ids)
        gone, orphans = store.drop_segment(segment)
        self._blocks.forgets[0] += 1
        self._blocks.changes.add(WENT, DISK, names)
        self._blocks.gone(gone, "lost")
        self._blocks.policy.demoted(orphans)
        return len(gone) // ID_BYTES

    def restore(
        self, identity: bytes, spec: KvSpec, rows: bytes, segment: int, used: bytes = b""
    ) -> tuple[int, int]:
        """Restore the blocks of this space that a segment's footer lists. Return (blocks that were not on
        disk before, rows that do not fit the space).

        If a block has two frames, the one restored later is used; a block in memory without a frame gets this
        one. `used` has the pages, 4 bytes each in ascending order, of frames whose blocks were requested
        since their write. If the space is open with another description, none of the rows fits. Rows that
        `leave_out` names are not restored."""
        known = self._spaces.named(identity)
        if known is not None and known.spec != spec:
            return 0, len(rows) // ROW_BYTES
        if forgotten := self._left_out.get(identity):
            rows = self._without(rows, forgotten, segment)
        space = self._spaces.open(identity, spec, NOBODY)
        try:
            self._spaces.settle(space)
            made, unfit, dead = self._blocks.store.restore(DISK, space.index, rows, segment, used)
            self._blocks.dead_frames += dead
            return made, unfit
        finally:
            self._spaces.leave_one(NOBODY, space)

    def leave_out(self, identity: bytes, keys: bytes) -> None:
        """These blocks were forgotten, and a scan may find their frames: `restore` leaves those out, until
        `all_found`. A block that is saved again in between stays in memory."""
        left_out = self._left_out.setdefault(identity, set())
        left_out.update(keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES))

    def all_found(self) -> None:
        """The scan has ended."""
        self._left_out.clear()

    def _without(self, rows: bytes, keys: set[bytes], segment: int) -> bytes:
        """The rows of other keys. The frames of these keys are dead."""
        kept = []
        for at in range(0, len(rows), ROW_BYTES):
            if rows[at : at + KEY_BYTES] in keys:
                (page,) = PAGE_NUMBER.unpack_from(rows, at + PAGE_AT)
                self._blocks.dead_frames += PLACE.pack(segment, page)
            else:
                kept.append(rows[at : at + ROW_BYTES])
        return b"".join(kept)

    def take_dead_frames(self) -> bytes:
        """Segment and page, 4 bytes each, of the frames that became unused since the last call: their blocks
        were forgotten, or they are damaged. Frames of dropped segments are not included."""
        dead = bytes(self._blocks.dead_frames)
        self._blocks.dead_frames.clear()
        return dead
