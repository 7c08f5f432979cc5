"""Copies blocks into slots and out of them, with NumPy arrays of bytes as mappings."""

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from models.kernels.xxh3 import xxh3_128

Bytes = npt.NDArray[np.uint8]
SLOT = struct.Struct("<IIQQ")  # extent, reserved, offset, generation
PAGE = 4096


def places(mappings: Sequence[Bytes], slots: bytes, nbytes: int) -> list[Bytes]:
    return [
        mappings[extent][offset : offset + nbytes]
        for extent, _, offset, _ in SLOT.iter_unpack(slots)
    ]


def copy(dst: Bytes, src: Bytes) -> bytes:
    """Copies and returns the digest."""
    dst[:] = src
    return xxh3_128(src.tobytes())


def copy_runs(
    dst: Bytes, src: Bytes, count: int, nbytes: int, dst_at: int, dst_step: int, src_at: int,
    src_step: int,
) -> None:  # fmt: skip
    """Copies runs one by one."""
    for number in range(count):
        to, at = dst_at + number * dst_step, src_at + number * src_step
        dst[to : to + nbytes] = src[at : at + nbytes]


def copy_in(
    mappings: Sequence[Bytes], slots: bytes, nbytes: int, sources: Sequence[Bytes]
) -> bytes:
    """Copies each source into its slot and returns the digests."""
    at = places(mappings, slots, nbytes)
    return b"".join(copy(slot, source) for slot, source in zip(at, sources, strict=True))


def copy_out(
    mappings: Sequence[Bytes], slots: bytes, nbytes: int, targets: Sequence[Bytes]
) -> bytes:
    """Copies each slot into its target and returns the digests."""
    at = places(mappings, slots, nbytes)
    return b"".join(copy(target, slot) for slot, target in zip(at, targets, strict=True))


class Pieces:
    """The positions of the pieces of an engine's paged blocks."""

    def __init__(
        self,
        arrays: Sequence[Bytes],
        offsets: Sequence[int],
        strides: Sequence[int],
        piece_bytes: Sequence[int],
    ) -> None:
        self.rows = list(zip(arrays, offsets, strides, piece_bytes, strict=True))
        self.block_bytes = sum(piece_bytes)

    def of(self, block: int) -> list[Bytes]:
        return [
            array[offset + block * stride : offset + block * stride + size]
            for array, offset, stride, size in self.rows
        ]


def gather(
    pieces: Pieces, block_ids: Sequence[int], mappings: Sequence[Bytes], slots: bytes
) -> bytes:
    """Copies the pieces of each engine block into its slot and returns the slots' digests."""
    at = places(mappings, slots, pieces.block_bytes)
    return b"".join(
        copy(slot, np.concatenate(pieces.of(block)))
        for slot, block in zip(at, block_ids, strict=True)
    )


def scatter(
    pieces: Pieces, block_ids: Sequence[int], mappings: Sequence[Bytes], slots: bytes
) -> bytes:
    """Copies each slot into the pieces of its engine block and returns the slots' digests."""
    digests = []
    for slot, block in zip(places(mappings, slots, pieces.block_bytes), block_ids, strict=True):
        start = 0
        for piece in pieces.of(block):
            piece[:] = slot[start : start + len(piece)]
            start += len(piece)
        digests.append(xxh3_128(slot.tobytes()))
    return b"".join(digests)


def fresh(tables: Sequence[npt.NDArray[np.uint64]], slots: bytes) -> int:
    """Counts the leading slots whose generation has not changed."""
    count = 0
    for extent, _, offset, generation in SLOT.iter_unpack(slots):
        if int(tables[extent][offset // PAGE]) != generation:
            break
        count += 1
    return count


def copy_parts(
    mappings: Sequence[Bytes],
    slots: bytes,
    starts: Sequence[int],
    each: int,
    targets: Sequence[Bytes],
) -> None:
    """Copies parts of each slot, one after another, into its target."""
    at = places(mappings, slots, max(starts) + each)
    for slot, target in zip(at, targets, strict=True):
        target[:] = np.concatenate([slot[start : start + each] for start in starts])


def copy_tokens(
    mappings: Sequence[Bytes],
    slots: bytes,
    starts: Sequence[int],
    each: int,
    tokens: Sequence[int],
    block_tokens: int,
    first: int,
    targets: Sequence[Bytes],
) -> bool:
    """Copies tokens from each of `starts` in their slots into one target."""
    at = places(mappings, slots, max(starts) + each * block_tokens)
    if any(not first <= token < first + len(at) * block_tokens for token in tokens):
        return False
    for start, target in zip(starts, targets, strict=True):
        for number, token in enumerate(tokens):
            block, within = divmod(token - first, block_tokens)
            place = start + within * each
            target[number * each : (number + 1) * each] = at[block][place : place + each]
    return True
