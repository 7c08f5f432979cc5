"""Reads parts of the block of a frame, by the classes of `kvtier.frame`."""

from collections.abc import Sequence

from kvtier.errors import FrameError
from kvtier.frame import ONCE, R32, RAW, Identity, decode
from kvtier_kernels import decode_parts, xxh3_128


def read_frame_parts(
    text: bytes,
    name: Identity,
    epoch: int,
    element: int,
    block_bytes: int,
    starts: Sequence[int],
    each: int,
) -> bytes | None:
    """The chosen bytes of the block of a frame, or None if what they need is damaged."""
    try:
        header = decode(text, epoch)
    except FrameError:
        return None
    if header.identity != name or header.raw_bytes != block_bytes:
        return None
    if header.codec > R32 and header.lossy_generation != ONCE:
        return None
    block, found = bytearray(block_bytes), [False] * block_bytes
    at = 0
    for entry in header.entries:
        end = at + entry.raw_bytes
        if entry.codec not in (RAW, header.codec):
            return None
        if any(start < end and at < start + each for start in starts):
            begin = header.header_bytes + entry.offset
            payload = text[begin : begin + entry.nbytes]
            if xxh3_128(payload) != entry.digest:
                return None
            raw = bytearray(entry.raw_bytes)
            places = [(entry.codec, 0, entry.nbytes, entry.raw_bytes)]
            if entry.codec == RAW:
                raw[:] = payload
            elif decode_parts(element, payload, places, raw) != 1:
                return None
            block[at:end] = raw
            found[at:end] = [True] * len(raw)
        at = end
    assert all(all(found[start : start + each]) for start in starts)
    return b"".join(block[start : start + each] for start in starts)
