"""A block into a frame and back: headers that say how each part is encoded, whole blocks, single layers.

Frames of all codecs but `zstd` are made and read by the kernels in one call without the GIL; the same in
Python is for that one, and their twin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtier.codec import frame
from kvtier.codec.base import ELEMENTS, FIX4, R32, Codec
from kvtier.codec.frame import (
    DIGEST_BYTES,
    RAW_DIGEST_AT,
    ZERO_DIGEST,
    Entry,
    Frame,
)
from kvtier.codec.grid import Grid
from kvtier.codec.known import BY_NUMBER
from kvtier.errors import FrameError
from kvtier_kernels import encode_frame, encode_lossy_frame, xxh3_128

if TYPE_CHECKING:
    from typing_extensions import Buffer

NATIVE = (FIX4, R32)
ONCE = 1  # been through a lossy codec: never again


def suits(codec: Codec, dtype: str) -> bool:
    """Whether this codec can make anything of such elements."""
    return codec.number not in NATIVE or dtype in ELEMENTS


def encode(codec: Codec, dtype: str, header: bytearray, block: Buffer, into: Buffer) -> int:
    """Encode a block by its blank header, which says afterwards how: the payload's bytes, at the front of
    `into`. As many as the block's where nothing shrinks: then both mean nothing."""
    if codec.number in NATIVE:
        return encode_frame(codec.number, ELEMENTS[dtype], header, block, into)
    return encode_by(codec, dtype, header, block, into)


def encode_by(codec: Codec, dtype: str, header: bytearray, block: Buffer, into: Buffer) -> int:
    """The same by a codec's own means."""
    size = len(memoryview(block).cast("B"))
    found = codec.encode(block, entries_of(header), dtype, into)
    nbytes = sum(entry.nbytes for entry in found)
    if nbytes >= size:
        return size
    describe(header, codec, found)
    if header[RAW_DIGEST_AT : RAW_DIGEST_AT + DIGEST_BYTES] == ZERO_DIGEST:
        header[RAW_DIGEST_AT : RAW_DIGEST_AT + DIGEST_BYTES] = xxh3_128(block)
    return nbytes


def encode_lossy(
    codec: Codec,
    dtype: str,
    header: bytearray,
    block: Buffer,
    into: Buffer,
    grids: Sequence[Grid],
    position: int,
) -> int:
    """The same by a lossy codec: the frame is of what comes back, so the raw digest is of that, and decoding
    it is part of this. What is not what its header's digest says is not encoded: it would be sound then."""
    assert codec.recipe is not None, "a lossless codec"
    lies = [(one.rows, one.channels, one.head, one.by_token) for one in grids]
    element = ELEMENTS[dtype]
    return encode_lossy_frame(codec.recipe, element, header, block, into, lies, position)


def describe(header: bytearray, codec: Codec, found: Sequence[Entry]) -> None:
    """Say in a header how its block is encoded."""
    fields = list(frame.HEADER.unpack_from(header))
    fields[2], fields[5] = codec.number, sum(entry.nbytes for entry in found)
    frame.HEADER.pack_into(header, 0, *fields)
    for number, e in enumerate(found):
        at = frame.HEADER.size + number * frame.ENTRY.size
        frame.ENTRY.pack_into(
            header, at, e.layer, e.part, e.codec, e.offset, e.nbytes, e.raw_bytes, e.digest
        )


def entries_of(header: bytes | bytearray) -> tuple[Entry, ...]:
    """What a header says of its parts, unchecked."""
    count = frame.HEADER.unpack_from(header)[14]
    return tuple(
        Entry(*frame.ENTRY.unpack_from(header, frame.HEADER.size + number * frame.ENTRY.size))
        for number in range(count)
    )


def decode(
    text: Buffer,
    header_bytes: int,
    digest: bytes,
    dtype: str,
    into: Buffer,
    lossy: Codec | None = None,
) -> None:
    """Write the block of a frame, header and payload one after the other, to `into`, which has its size.
    Raises FrameError if a bit is not what it should be, or if its codec is lossy and not the one that is
    given; `digest` is the payload's. Then `into` holds anything."""
    source, target = memoryview(text).cast("B"), memoryview(into).cast("B")
    one = frame.decode(bytes(source[:header_bytes]))
    payload = source[header_bytes : header_bytes + one.payload_bytes]
    whole = len(payload) == one.payload_bytes and one.payload_digest == digest
    if not whole or xxh3_128(payload) != digest:
        raise FrameError("the payload is not that which was written")
    if one.raw_bytes != len(target):
        raise FrameError(f"a block of {one.raw_bytes} bytes, not {len(target)}")
    _codec_of(one, lossy).decode(payload, one.entries, dtype, target)
    if xxh3_128(target) != one.raw_digest:
        raise FrameError("the block is not that which was encoded")


def layer(one: Frame, number: int) -> tuple[Entry, ...]:
    """The parts of a layer, which lie one after the other in the payload."""
    found = tuple(entry for entry in one.entries if entry.layer == number)
    if not found:
        raise FrameError(f"a frame without a layer {number}")
    return found


def decode_entries(
    one: Frame,
    entries: Sequence[Entry],
    piece: Buffer,
    dtype: str,
    into: Buffer,
    lossy: Codec | None = None,
) -> None:
    """Write what some of a frame's entries, one after the other, hold. `piece` is the payload from the first
    of them on, and as far as the last; the rest need not be read. Raises FrameError if a digest differs."""
    view, start, at = memoryview(piece).cast("B"), entries[0].offset, 0
    moved = []
    for entry in entries:
        text = view[entry.offset - start : entry.offset - start + entry.nbytes]
        if xxh3_128(text) != entry.digest:
            raise FrameError(f"layer {entry.layer}, part {entry.part}: not what was written")
        moved.append(
            Entry(entry.layer, entry.part, entry.codec, entry.offset - start, entry.nbytes, entry.raw_bytes)
        )  # fmt: skip
        at += entry.raw_bytes
    _codec_of(one, lossy).decode(view, moved, dtype, memoryview(into).cast("B")[:at])


def _codec_of(one: Frame, lossy: Codec | None) -> Codec:
    """By which the frame is decoded: a lossy codec only if it is asked for, and has the profile."""
    if lossy is not None and one.codec == lossy.number:
        if one.profile != lossy.profile or one.lossy_generation != ONCE:
            raise FrameError(f"a frame of {lossy.name} by another profile, or more than once")
        return lossy
    codec = BY_NUMBER.get(one.codec)
    if codec is None or codec.lossy:
        raise FrameError(f"a frame of codec {one.codec}, which nobody asked for")
    return codec
