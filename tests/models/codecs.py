"""The codecs and frames of the kernels, part by part: what the kernels do with a whole block in one call."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from kvtier import frame
from kvtier.errors import FrameError
from kvtier.frame import (
    DIGEST_AT,
    DIGEST_BYTES,
    ELEMENTS,
    ENTRY,
    HEADER,
    ONCE,
    RAW,
    RAW_DIGEST_AT,
    ZERO_DIGEST,
    Entry,
    Frame,
    Template,
    stamp,
)
from kvtier.layout import DTYPE_BYTES
from kvtier_daemon.codec import framing
from kvtier_daemon.codec.arranged import PARTS, Arranged
from kvtier_daemon.codec.base import Codec, damaged, expect, placed
from kvtier_daemon.codec.calibrated import Calibrated
from kvtier_daemon.codec.grid import Grid
from kvtier_kernels import (
    decode_calibrated,
    encode_calibrated,
    encode_parts,
    reorder_pages,
    xxh3_128,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

NO_ELEMENT = 3  # element types that the kernels of the calibrated codecs leave raw
PAYLOAD_DIGEST_AT, PROFILE_AT = 168, 224

# 2^(i/8), rounded to float32: with powers of two, all that the step of an exponent needs.
EIGHTHS = tuple(
    float.fromhex(text)
    for text in (
        "0x1p+0", "0x1.172b84p+0", "0x1.306fep+0", "0x1.4bfdaep+0",
        "0x1.6a09e6p+0", "0x1.8ace54p+0", "0x1.ae89fap+0", "0x1.d5818ep+0",
    )
)  # fmt: skip
EXPONENT_BIAS, EXPONENTS_AN_OCTAVE = 160, 8


# --- codecs ------------------------------------------------------------------------------------------


def encode(
    codec: Codec,
    block: Buffer,
    parts: Sequence[Entry],
    dtype: str,
    into: Buffer,
    grids: Sequence[Grid] = (),
    position: int = 0,
) -> tuple[Entry, ...]:
    """Do with any codec what `Codec.encode` does. `grids` has one grid per part, or is empty. `position` is
    the position of the first token, if it is known: a wrong one only costs K more bits."""
    if isinstance(codec, Arranged):
        ordered = bytearray(len(memoryview(block).cast("B")))
        _reorder(codec, dtype, block, ordered, back=False)
        return encode(codec.codec, ordered, parts, dtype, into, grids, position)
    if isinstance(codec, Calibrated):
        known = [(codec.number_of(part), part.raw_bytes) for part in parts]
        element = ELEMENTS.get(dtype, NO_ELEMENT)
        return placed(parts, encode_calibrated(
            codec.calibration, element, block, known, codec.heads_first, position, into
        ))  # fmt: skip
    if codec.native:
        number = codec.number if dtype in ELEMENTS else RAW
        sizes = [part.raw_bytes for part in parts]
        lies = [(one.rows, one.channels, one.head, one.by_token) for one in grids]
        found = encode_parts(number, ELEMENTS.get(dtype, 0), block, sizes, into, lies)
        return placed(parts, found)
    return codec.encode(block, parts, dtype, into)


def decode(
    codec: Codec, payload: Buffer, entries: Sequence[Entry], dtype: str, into: Buffer
) -> None:
    """Do with any codec what `Codec.decode` does."""
    if isinstance(codec, Arranged):
        size = sum(entry.raw_bytes for entry in entries)
        layers = [entry.layer for entry in entries]
        if layers[::PARTS] != layers[1::PARTS]:
            raise FrameError("only some of a page's parts are present")
        ordered = bytearray(size)
        decode(codec.codec, payload, entries, dtype, ordered)
        _reorder(codec, dtype, ordered, memoryview(into).cast("B")[:size], back=True)
    elif isinstance(codec, Calibrated):
        expect(entries, codec.number)
        places = [
            (codec.number_of(one), one.codec, one.offset, one.nbytes, one.raw_bytes)
            for one in entries
        ]
        element = ELEMENTS.get(dtype, NO_ELEMENT)
        sound = decode_calibrated(
            codec.calibration, element, payload, places, codec.heads_first, into
        )
        if sound != len(entries):
            raise damaged(entries[sound], codec.name)
    else:
        codec.decode(payload, entries, dtype, into)


def _reorder(codec: Arranged, dtype: str, source: Buffer, into: Buffer, back: bool) -> None:
    order = codec.order
    width = DTYPE_BYTES[dtype]
    reorder_pages(width, PARTS, order.heads, order.tokens, order.dims, source, into, back)


def profile_name(codec: Codec) -> bytes:
    """Return the name of the profile that the codec was made for; zeros if it needs none."""
    if isinstance(codec, Arranged):
        return profile_name(codec.codec)
    return codec.profile if isinstance(codec, Calibrated) else ZERO_DIGEST


def step_of(exponent: int) -> float:
    """Return the step of an exponent, exactly a float32."""
    octaves, eighth = divmod(exponent - EXPONENT_BIAS, EXPONENTS_AN_OCTAVE)
    return EIGHTHS[eighth] * 2.0**octaves


def inverse_of(exponent: int) -> float:
    """Return the factor of an encoder: exactly a float32, and not exactly the inverse of the step."""
    return step_of(2 * EXPONENT_BIAS - exponent)


@cache
def steps(exponents: bytes) -> array[float]:
    """Return the steps of these exponents, as float32."""
    return array("f", map(step_of, exponents))


@cache
def inverses(exponents: bytes) -> array[float]:
    """Return the factors of an encoder for these exponents, as float32."""
    return array("f", map(inverse_of, exponents))


# --- frames ------------------------------------------------------------------------------------------


def header(
    kind: Template, key: bytes, parent: bytes, epoch: int, sequence: int, raw_digest: bytes
) -> bytes:
    """Return an unsealed header; `raw_digest` is empty if it is unknown."""
    text = kind.blank(raw_digest)
    stamp(text, key, parent, epoch, sequence)
    return bytes(text)


def seal(header: bytes, payload: bytes | memoryview) -> bytes:
    """Return the header with the digests of this payload: of the entries, of the payload, of the header, and
    the raw digest if the payload is the block and its digest was unknown. The disk worker does this before a
    write."""
    text = bytearray(header)
    fields = HEADER.unpack_from(text)
    codec, payload_bytes, count, raw_digest = fields[2], fields[5], fields[14], fields[15]
    body = memoryview(payload)[:payload_bytes]
    for number in range(count):
        at = HEADER.size + number * ENTRY.size
        *_, offset, nbytes, _, _ = ENTRY.unpack_from(text, at)
        text[at + ENTRY.size - DIGEST_BYTES : at + ENTRY.size] = xxh3_128(
            body[offset : offset + nbytes]
        )
    if codec != RAW or raw_digest == ZERO_DIGEST:
        digest = xxh3_128(body)
        text[PAYLOAD_DIGEST_AT : PAYLOAD_DIGEST_AT + DIGEST_BYTES] = digest
        if codec == RAW:
            text[RAW_DIGEST_AT : RAW_DIGEST_AT + DIGEST_BYTES] = digest
    else:
        text[PAYLOAD_DIGEST_AT : PAYLOAD_DIGEST_AT + DIGEST_BYTES] = raw_digest
    text[DIGEST_AT : HEADER.size] = ZERO_DIGEST
    text[DIGEST_AT : HEADER.size] = xxh3_128(text)
    return bytes(text)


def encode_by(codec: Codec, dtype: str, header: bytearray, block: Buffer, into: Buffer) -> int:
    """Do what `framing.encode` does, part by part."""
    found = encode(codec, block, framing.entries_of(header), dtype, into)
    return framing.describe(header, codec, block, found)


def decode_frame_by(
    text: Buffer,
    header_bytes: int,
    digest: bytes,
    dtype: str,
    into: Buffer,
    lossy: Codec | None = None,
) -> None:
    """Do what `framing.decode` does, also with a frame of this lossy codec."""
    source, target = memoryview(text).cast("B"), memoryview(into).cast("B")
    one = frame.decode(bytes(source[:header_bytes]))
    if lossy is None or one.codec != lossy.number:
        framing.decode(text, header_bytes, digest, dtype, into)
        return
    payload = source[header_bytes : header_bytes + one.payload_bytes]
    whole = len(payload) == one.payload_bytes and one.payload_digest == digest
    if not whole or xxh3_128(payload) != digest:
        raise FrameError("payload digest mismatch: the frame is damaged")
    if one.raw_bytes != len(target):
        raise FrameError(f"block has {one.raw_bytes} bytes, expected {len(target)}")
    decode(_checked(one, lossy), payload, one.entries, dtype, target)
    if xxh3_128(target) != one.raw_digest:
        raise FrameError("block digest mismatch after decoding")


def layer(one: Frame, number: int) -> tuple[Entry, ...]:
    """Return the entries of a layer, which are consecutive in the payload."""
    found = tuple(entry for entry in one.entries if entry.layer == number)
    if not found:
        raise FrameError(f"the frame has no layer {number}")
    return found


def decode_entries(
    one: Frame,
    entries: Sequence[Entry],
    piece: Buffer,
    dtype: str,
    into: Buffer,
    codec: Codec,
) -> None:
    """Write the decoded bytes of consecutive entries of a frame. `piece` is the payload from the first to
    the last of them; the rest need not be read. Raises FrameError if a digest differs."""
    view, start, at = memoryview(piece).cast("B"), entries[0].offset, 0
    moved = []
    for entry in entries:
        text = view[entry.offset - start : entry.offset - start + entry.nbytes]
        if xxh3_128(text) != entry.digest:
            raise FrameError(f"layer {entry.layer}, part {entry.part}: digest mismatch")
        moved.append(
            Entry(entry.layer, entry.part, entry.codec, entry.offset - start, entry.nbytes, entry.raw_bytes)
        )  # fmt: skip
        at += entry.raw_bytes
    decode(_checked(one, codec), view, moved, dtype, memoryview(into).cast("B")[:at])


def _checked(one: Frame, codec: Codec) -> Codec:
    """Return the codec. Raises FrameError unless it may decode the frame."""
    if codec.lossy and (one.profile != profile_name(codec) or one.lossy_generation != ONCE):
        raise FrameError(
            f"the frame was encoded by {codec.name} with another profile, or more than once"
        )
    return codec
