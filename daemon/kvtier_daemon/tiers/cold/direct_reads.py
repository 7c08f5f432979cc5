"""Frames of one tenant that its clients read from the segments themselves.

A client gets descriptors of whole segments, and verifies each frame: identity, epoch and digests. The lease
on the segments only avoids that they are reused meanwhile. When the read has ended, the client asks whether
the blocks are still stored, because others may have been forgotten.
"""

from __future__ import annotations

import os
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import count

from kvtier.errors import Refused, bad_request
from kvtier.key import KEY_BYTES
from kvtier_daemon.catalog import Catalog, KnownSpace
from kvtier_daemon.catalog.frames import FRAME, FramedBlocks
from kvtier_daemon.tiers.base import DirectFile, DirectGrant, GrantedFrame
from kvtier_daemon.tiers.cold.segment_log import Segment, Stage
from kvtier_daemon.tiers.cold.tier import ColdTier

LIMIT_DIRECT_S = 2.0  # a full disk waits until its oldest segment can be reused
LIMIT_LEASES = 16  # of one session
OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC
# A segment that is continued after a start is BEGINNING, with frames.
READABLE = (Stage.BEGINNING, Stage.OPEN, Stage.SEALING, Stage.SEALED)

_leases = count(1)  # of all tenants and tiers: a number is never used again


class OpenedSegment:
    """A descriptor of a segment that can only read. Closed with the last reference."""

    def __init__(self, segment: Segment) -> None:
        # No I/O: the file is open, so its inode is in memory. Not a duplicate of the daemon's descriptor,
        # because the client can change the flags of the open file.
        path = f"/proc/self/fd/{segment.fd}"
        try:
            self._fd = os.open(path, OPEN_FLAGS | os.O_DIRECT)
        except OSError:
            self._fd = os.open(path, OPEN_FLAGS)
        weakref.finalize(self, os.close, self._fd)

    def handles(self, read_only: bool) -> tuple[int, ...]:
        return (os.dup(self._fd),)


@dataclass(slots=True, frozen=True)
class SegmentFile:
    """A segment as requests see it. Equal if it is the same file."""

    segment: Segment

    @property
    def nbytes(self) -> int:
        return self.segment.nbytes

    def open(self) -> OpenedSegment:
        return OpenedSegment(self.segment)


@dataclass(slots=True, frozen=True)
class SegmentLease:
    """Blocks that a session reads. `segments`: how many of them each segment has."""

    session: int
    until: float
    space: KnownSpace
    place: tuple[int, int]  # group and shard
    keys: bytes
    blocks: FramedBlocks
    segments: Counter[Segment]


class SegmentReads:
    """The `DirectReads` of one tenant."""

    def __init__(
        self, catalog: Catalog, cold: ColdTier, counts: Counter[str], clock: Callable[[], float]
    ) -> None:
        self._catalog = catalog
        self._cold = cold
        self._counts = counts
        self._clock = clock
        self._leases: dict[int, SegmentLease] = {}

    def grant(
        self, session: int, space: KnownSpace, group: int, shard: int, keys: bytes,
        codecs: Collection[int], within_s: float, may_use: Callable[[DirectFile], bool], first: int,
        most: int,
    ) -> DirectGrant:  # fmt: skip
        if (
            within_s
            and sum(lease.session == session for lease in self._leases.values()) >= LIMIT_LEASES
        ):
            text = f"this session has {LIMIT_LEASES} direct reads already: end one of them first"
            raise Refused("too_many", text)
        if not self._cold.reader.is_on:
            return DirectGrant()
        found, places = self._catalog.direct.find(space, group, shard, keys, codecs, first, most)
        ids, frames, digests = array("I"), bytearray(), bytearray()
        wanted, segments = bytearray(), Counter[Segment]()
        rows: list[GrantedFrame] = []
        usable: dict[int, SegmentFile | None] = {}  # by the number of the segment
        for at, (number, packed, digest) in zip(places, found, strict=True):
            where, page, nbytes, codec, header_pages, _ = FRAME.unpack(packed)
            segment = self._cold.table.segments[where]
            if where not in usable:
                file = SegmentFile(segment)
                usable[where] = file if self._is_open(segment) and may_use(file) else None
            if (file_of := usable[where]) is None or segment.head is None:
                continue
            rows.append(
                GrantedFrame(
                    at, file_of, page, nbytes, codec, header_pages, segment.head.epoch, digest
                )
            )
            ids.append(number)
            frames += packed
            digests += digest
            wanted += keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]
            segments[segment] += 1
        if not rows:
            return DirectGrant()
        if not within_s:
            return DirectGrant(0, tuple(rows))
        for segment, blocks in segments.items():
            segment.reading += blocks
        lease = next(_leases)
        until = self._clock() + min(within_s, LIMIT_DIRECT_S)
        granted = FramedBlocks(ids.tobytes(), bytes(frames), bytes(digests))
        self._leases[lease] = SegmentLease(
            session, until, space, (group, shard), bytes(wanted), granted, segments
        )
        return DirectGrant(lease, tuple(rows))

    def end(self, session: int, lease: int, failed: bytes, tokens: int, nbytes: int) -> bytes:
        held = self._leases.get(lease)
        if held is None or held.session != session:
            return bytes(len(failed))
        blocks = len(held.keys) // KEY_BYTES
        if len(failed) != blocks:
            raise bad_request(f"failed has {len(failed)} bytes, the lease has {blocks} blocks")
        self._release(lease)
        if self._clock() > held.until:
            return bytes(blocks)
        still = self._catalog.direct.still(held.space, held.keys, held.blocks)
        valid = bytes(there and not bad for there, bad in zip(still, failed, strict=True))
        good = sum(valid)
        self.count(held.space, held.place, good, blocks - good, tokens, nbytes)
        return valid

    def count(
        self, space: KnownSpace, place: tuple[int, int], good: int, bad: int, tokens: int, nbytes: int
    ) -> None:  # fmt: skip
        # All parts of a block contain the same tokens, so only the first part counts tokens.
        tokens = min(tokens, space.spec.block_tokens) * (place == (0, 0))
        nbytes = min(nbytes, space.block_bytes[place[0]])
        self._catalog.usage.count_used(space, 0, good * tokens, good * nbytes)
        self._counts["direct"] += good
        self._counts["not_direct"] += bad

    def session_ended(self, session: int) -> None:
        for lease in [one for one, held in self._leases.items() if held.session == session]:
            self._release(lease)

    def expire(self) -> None:
        now = self._clock()
        for lease in [one for one, held in self._leases.items() if held.until < now]:
            self._release(lease)

    def _is_open(self, segment: Segment) -> bool:
        """Whether its descriptor is that of its file, with frames."""
        store = self._cold.table.stores[segment.number]
        in_use = segment.stage in READABLE and segment.head is not None and segment.fd >= 0
        return in_use and store.disk.reads.is_on and not store.closing

    def _release(self, lease: int) -> None:
        for segment, blocks in self._leases.pop(lease).segments.items():
            segment.reading -= blocks
            if segment.stage is Stage.LEAVING:
                self._cold.table.stores[segment.number].free_if_unused(segment)
