"""The frames of compressed memory. They are lossless, and never leave the daemon.

A block with a frame here is on disk too. It has left its slot, or will soon. A read of it does not read the
disk, but is planned only while the disk is on.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
from array import array
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from kvtier.frame import pages
from kvtier_daemon.catalog.compressed import CompressedOrder, nothing
from kvtier_daemon.catalog.spaces import IDENTITY
from kvtier_kernels import Store

log = logging.getLogger(__name__)

RESERVED_BYTES = 64 << 20  # of addresses, at once
GIVE_BYTES = 32 << 20  # of pieces that are given to the system at once: 2 or 3 ms
GIVE_LEAST = 128 << 10  # what a smaller piece counts as
DROP_FRAMES = 256  # at once
NOTES_BYTES = 812  # of all objects of a frame, without its header; measured

Name = tuple[int, int, int, bytes]  # the number of a space in the store, a group, a shard, a key


@dataclass(slots=True, eq=False)
class CompressedFrame:
    """A frame, and its piece of memory, which has the size of the block. `header` is without the zeros at its
    end. `raw_digest` is the block's. `reads` are in progress."""

    id: int
    name: Name
    block_bytes: int
    element: int
    header: bytes
    header_bytes: int
    nbytes: int
    raw_digest: bytes
    place: tuple[mmap.mmap, int]
    reads: int = 0
    is_dropped: bool = False

    @property
    def used_bytes(self) -> int:
        return pages(self.nbytes) + len(self.header) + NOTES_BYTES

    def payload(self) -> memoryview:
        memory, at = self.place
        return memoryview(memory)[at : at + self.nbytes]


class FrameMemory:
    """Memory for frames. A piece has addresses for a whole block, and uses only the pages of its frame: all
    others belong to the system, which clears them. So frames of any sizes leave no holes, and nothing remains
    of a frame that was given back."""

    def __init__(self) -> None:
        self._free: dict[int, list[tuple[mmap.mmap, int]]] = {}  # by the size of the pieces
        self._rest: dict[int, tuple[mmap.mmap, int]] = {}  # from here on, never used
        self._leaving = deque[tuple[tuple[mmap.mmap, int], int]]()

    def take(self, nbytes: int) -> tuple[mmap.mmap, int]:
        """Return a piece. Raises OSError."""
        size = pages(nbytes)
        if free := self._free.get(size):
            return free.pop()
        memory, at = self._rest.get(size, (None, 0))
        if memory is None or at + size > len(memory):
            memory = mmap.mmap(-1, max(size, RESERVED_BYTES), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(mmap.MADV_NOHUGEPAGE)  # otherwise unused pages would be filled
            memory.madvise(mmap.MADV_DONTDUMP)
            at = 0
        self._rest[size] = memory, at + size
        return memory, at

    def trim(self, place: tuple[mmap.mmap, int], nbytes: int, used: int) -> None:
        """Give the pages behind the first `used` bytes of a piece to the system."""
        memory, at = place
        if rest := pages(nbytes) - pages(used):
            memory.madvise(mmap.MADV_DONTNEED, at + pages(used), rest)

    def give(self, place: tuple[mmap.mmap, int], nbytes: int) -> None:
        """Give a piece back. It is free when `clear` has given its pages to the system."""
        self._leaving.append((place, nbytes))

    def clear(self) -> bool:
        """Give the next pages of pieces that were given back to the system. Return whether there are more."""
        left = GIVE_BYTES
        while self._leaving and left > 0:
            place, nbytes = self._leaving.popleft()
            self.trim(place, nbytes, 0)
            self._free.setdefault(pages(nbytes), []).append(place)
            left -= max(nbytes, GIVE_LEAST)
        return bool(self._leaving)


class CompressedFrames:
    """The frames of one tenant, of at most `capacity_bytes`."""

    def __init__(self, order: CompressedOrder, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.is_open = False
        self.used_bytes = 0
        self.order = order
        self.memory = FrameMemory()
        self.counts = Counter(compressed=0, read=0, spoilt=0, dropped=0, not_worth=0)
        self._of: dict[int, CompressedFrame] = {}
        self._busy: set[int] = set()  # frames that are being read

    def __len__(self) -> int:
        return len(self._of)

    def find(self, store: Store, ids: bytes) -> dict[int, CompressedFrame]:
        """The frames of these blocks, by their ids."""
        if not self._of:
            return {}
        found = {one: self._of[one] for one in array("I", ids) if one in self._of}
        if not found:
            return {}
        names = IDENTITY.iter_unpack(store.identities(array("I", found).tobytes()))
        for one, (space, group, shard, _, key, _) in zip(list(found), names, strict=True):
            if found[one].name != (space, group, shard, key):
                log.error("cold: internal error: a compressed block has another name; dropping it")
                self.drop([one])
                del found[one]
        return found

    def add(self, frame: CompressedFrame) -> bool:
        """Keep this frame, if there is room for it."""
        assert frame.id not in self._of, "a block has two frames in memory"
        self.make_room(frame.used_bytes, (), 0)
        if self.used_bytes + frame.used_bytes > self.capacity_bytes:
            return False
        self._of[frame.id] = frame
        self.used_bytes += frame.used_bytes
        self.counts["compressed"] += 1
        self.order.compressed(frame.id, frame.block_bytes)
        return True

    def make_room(self, nbytes: int, coming: Sequence[int], block_bytes: int) -> set[int]:
        """Drop frames until there is room for `nbytes`, as far as possible. Return those of the `coming`
        blocks that are worth less than the frames, and need no room."""
        short = self.used_bytes + nbytes - self.capacity_bytes
        if short <= 0:
            return set()
        frames, needless = self.order.make_room(
            short, lambda one: self._of[one].used_bytes, self._busy, coming, block_bytes
        )
        self.counts["dropped"] += len(frames)
        self.drop(frames)
        return needless

    def drop(self, ids: Sequence[int]) -> None:
        """Drop the frames of these blocks, which exist elsewhere."""
        self.order.dropped(ids)
        self.lost(ids)

    def lost(self, ids: Sequence[int]) -> None:
        """These blocks exist in no tier now: give the memory of their frames back."""
        for one in ids:
            frame = self._of.pop(one)
            frame.is_dropped = True
            self.used_bytes -= frame.used_bytes
            if not frame.reads:
                self.memory.give(frame.place, frame.block_bytes)

    def open(self, stirred: Callable[[], None]) -> None:
        """Follow the blocks' events from now on. `stirred` is called after blocks got slots."""
        self.is_open = True
        self.order.lost, self.order.stirred = self.lost, stirred

    async def close(self) -> None:
        """Drop all frames, in portions."""
        self.is_open = False
        try:
            while self.memory.clear() or self._of:
                self.drop(list(islice(self._of, DROP_FRAMES)))
                await asyncio.sleep(0)
        finally:  # without pauses if the task is cancelled again
            self.drop(list(self._of))
            while self.memory.clear():
                pass
            self.order.lost = self.order.stirred = nothing

    # --- reads -------------------------------------------------------------------------------

    def hold(self, frames: Sequence[CompressedFrame]) -> None:
        for frame in frames:
            frame.reads += 1
            self._busy.add(frame.id)

    def release(self, frame: CompressedFrame, was_read: bool) -> None:
        """End a hold, after the frame was read or not."""
        self.counts["read"] += was_read
        frame.reads -= 1
        if frame.reads:
            return
        if frame.is_dropped:
            self.memory.give(frame.place, frame.block_bytes)
            if not self.is_open:  # no task does it
                self.memory.clear()
        if (now := self._of.get(frame.id)) is None or not now.reads:
            self._busy.discard(frame.id)

    def spoilt(self, frame: CompressedFrame) -> None:
        """The frame is damaged: drop it."""
        self.counts["spoilt"] += 1
        log.error("cold: a compressed block in memory is damaged; dropping it")
        if not frame.is_dropped:
            self.drop([frame.id])

    def stats(self) -> Mapping[str, int]:
        return {
            "used_bytes": self.used_bytes,
            "spare_bytes": sum(
                self._of[one].used_bytes for one in self.order.paired if one not in self.order.cool
            ),
            "blocks": len(self._of),
            "block_bytes": self.order.alone_bytes,
            **self.counts,
        }
