"""How the store packs the frames of blocks. The layouts are defined here and, in C++, in `record.h` alone.

     frame   segment u32 │ page u32 │ payload bytes u32 │ codec u8 │ header pages u8 │ flags u8 │ zero u8
     place   segment u32 │ page u32

The cold tier numbers the segments; `page` is where the frame begins. A place is the start of a packed frame,
and identifies it. `kvtier.wire` defines the layout of slots.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvtier.frame import LOSSY, PAGE, pages
from kvtier.wire import DIGEST_BYTES

FRAME = struct.Struct("<IIIBBBx")
PLACE = struct.Struct("<II")
FRAME_BYTES, PLACE_BYTES = FRAME.size, PLACE.size
# Columns of packed frames: of their 4-byte words, and of their bytes.
SEGMENTS, PAYLOAD_SIZES = slice(0, None, FRAME_BYTES // 4), slice(2, None, FRAME_BYTES // 4)
CODECS = slice(12, None, FRAME_BYTES)


class StoredFrame(NamedTuple):
    """A frame, unpacked."""

    segment: int
    page: int
    payload_bytes: int
    codec: int
    header_pages: int
    flags: int

    @classmethod
    def unpack(cls, packed: bytes) -> StoredFrame:
        return cls(*FRAME.unpack(packed))

    @property
    def nbytes(self) -> int:
        """The size on disk, in whole pages."""
        return self.header_pages * PAGE + pages(self.payload_bytes)

    @property
    def is_lossy(self) -> bool:
        return bool(self.flags & LOSSY)


@dataclass(slots=True, frozen=True)
class FramedBlocks:
    """Blocks that are on disk: their ids, their packed frames, and the digests of the payloads. `nbytes` is
    the size of frames that were just written."""

    ids: bytes = b""
    frames: bytes = b""
    digests: bytes = b""
    nbytes: int = 0

    def __iter__(self) -> Iterator[tuple[int, bytes, bytes]]:
        """The id, packed frame and digest of each block."""
        for at, number in enumerate(array("I", self.ids)):
            yield (
                number,
                self.frames[at * FRAME_BYTES : (at + 1) * FRAME_BYTES],
                self.digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES],
            )


def segments_of(frames: bytes) -> set[int]:
    return set(memoryview(frames).cast("I")[SEGMENTS])
