"""Encodes a block into a frame, and decodes lossless frames. The kernels do this for native codecs, in one
call without the GIL; disk workers decode their frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtier import frame
from kvtier.errors import FrameError
from kvtier.frame import (
    DIGEST_BYTES,
    ELEMENTS,
    ENCRYPTED,
    RAW_DIGEST_AT,
    ZERO_DIGEST,
    Entry,
    Identity,
)
from kvtier_daemon.codec.base import Codec
from kvtier_daemon.codec.encryption import FrameCipher, UnknownKeyError
from kvtier_daemon.codec.grid import Grid
from kvtier_daemon.codec.table import BY_NUMBER
from kvtier_kernels import encode_frame, encode_lossy_frame, xxh3_128

if TYPE_CHECKING:
    from typing_extensions import Buffer


def suits(codec: Codec, dtype: str) -> bool:
    """Return whether this codec can encode elements of this type."""
    return not codec.native or dtype in ELEMENTS


def encode(codec: Codec, dtype: str, header: bytearray, block: Buffer, into: Buffer) -> int:
    """Encode a block losslessly into the front of `into`, describe that in its blank header, and return the
    payload's size. If that is not less than the block's, header and payload are undefined."""
    if codec.native:
        return encode_frame(codec.number, ELEMENTS[dtype], header, block, into)
    return describe(header, codec, block, codec.encode(block, entries_of(header), dtype, into))


def encode_lossy(
    codec: Codec,
    dtype: str,
    header: bytearray,
    block: Buffer,
    into: Buffer,
    grids: Sequence[Grid],
    position: int,
) -> int:
    """Do the same with a lossy codec. The frame describes the decoded block, so its raw digest is of that
    block, and this includes decoding. A block that does not have the digest in its header is not encoded,
    because the frame would make it look undamaged."""
    assert codec.recipe is not None, "a lossless codec"
    lies = [(one.rows, one.channels, one.head, one.by_token) for one in grids]
    element = ELEMENTS[dtype]
    return encode_lossy_frame(codec.recipe, element, header, block, into, lies, position)


def describe(header: bytearray, codec: Codec, block: Buffer, found: Sequence[Entry]) -> int:
    """Write into a header how its block is encoded. Returns as `encode`."""
    size, nbytes = len(memoryview(block).cast("B")), sum(entry.nbytes for entry in found)
    if nbytes >= size:
        return size
    fields = list(frame.HEADER.unpack_from(header))
    fields[2], fields[5] = codec.number, nbytes
    frame.HEADER.pack_into(header, 0, *fields)
    for number, e in enumerate(found):
        at = frame.HEADER.size + number * frame.ENTRY.size
        frame.ENTRY.pack_into(
            header, at, e.layer, e.part, e.codec, e.offset, e.nbytes, e.raw_bytes, e.digest
        )
    if header[RAW_DIGEST_AT : RAW_DIGEST_AT + DIGEST_BYTES] == ZERO_DIGEST:
        header[RAW_DIGEST_AT : RAW_DIGEST_AT + DIGEST_BYTES] = xxh3_128(block)
    return nbytes


def entries_of(header: bytes | bytearray) -> tuple[Entry, ...]:
    """Return the entries of a header. Does not check them."""
    count = frame.HEADER.unpack_from(header)[14]
    return tuple(
        Entry(*frame.ENTRY.unpack_from(header, frame.HEADER.size + number * frame.ENTRY.size))
        for number in range(count)
    )


def decode(
    text: Buffer, header_bytes: int, digest: bytes, dtype: str, into: Buffer,
    cipher: FrameCipher | None = None, name: Identity | None = None,
) -> bytes:  # fmt: skip
    """Write the block of a lossless frame (its header, then its payload) to `into`, which has its size.
    Return the block's digest. Raises FrameError if the frame is damaged or has another codec; `into` is then
    undefined. `digest` is the payload's. Decrypts an encrypted frame as the block `name`."""
    source, target = memoryview(text).cast("B"), memoryview(into).cast("B")
    header = source[:header_bytes]
    one = frame.decode(bytes(header))
    payload = source[header_bytes : header_bytes + one.payload_bytes]
    whole = len(payload) == one.payload_bytes and one.payload_digest == digest
    if not whole or xxh3_128(payload) != digest:
        raise FrameError("payload digest mismatch: the frame is damaged")
    if one.raw_bytes != len(target):
        raise FrameError(f"block has {one.raw_bytes} bytes, expected {len(target)}")
    number, raw_digest = one.codec & ~ENCRYPTED, one.raw_digest
    if one.codec & ENCRYPTED:
        if cipher is None or name is None:
            raise UnknownKeyError("the frame is encrypted, and no key is configured")
        decrypted = memoryview(bytearray(one.payload_bytes))
        raw_digest = cipher.decrypt(header, payload, name, decrypted)
        payload = decrypted
    codec = BY_NUMBER.get(number)
    if codec is None or codec.lossy:
        raise FrameError(f"the frame has codec {number}, which this space does not use")
    codec.decode(payload, one.entries, dtype, target)
    if xxh3_128(target) != raw_digest:
        raise FrameError("block digest mismatch after decoding")
    return raw_digest
