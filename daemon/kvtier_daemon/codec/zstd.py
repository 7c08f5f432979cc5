"""Lossless: bytes of equal weight are grouped into planes, and each plane is compressed by zstd. For
comparisons, and for element types without an exponent.

     ┌───────┬───────┬───────┬─
   0 │ bytes │ bytes │ bytes │ ...  one length, of 4 bytes, for each plane, the lowest bytes first
     ├───────┴───────┴───────┴─
     │ planes ...                   those whose length is that of the plane are not compressed
     ├─────
     │ odd bytes
     └─────

Elements are rotated left by one bit, so that the exponent of a float fills its plane.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import zstandard

from kvtier.frame import RAW, ZSTD, Entry
from kvtier.layout import DTYPE_BYTES
from kvtier_daemon.codec import base
from kvtier_kernels import join_planes, split_planes

if TYPE_CHECKING:
    from typing_extensions import Buffer

LEVEL = 1


class Zstd(base.Codec):
    name = "zstd"
    number = ZSTD
    native = False

    def encode(
        self, block: Buffer, parts: Sequence[Entry], dtype: str, into: Buffer
    ) -> tuple[Entry, ...]:
        compressor = zstandard.ZstdCompressor(level=LEVEL)
        whole, target = memoryview(block).cast("B"), memoryview(into).cast("B")
        found, start, at = [], 0, 0
        for part in parts:
            raw = whole[start : start + part.raw_bytes]
            start += part.raw_bytes
            text = _encoded(compressor, raw, DTYPE_BYTES[dtype])
            codec = self.number if len(text) < len(raw) else RAW
            kept = text if codec != RAW else raw
            target[at : at + len(kept)] = kept
            at += len(kept)
            found.append((codec, len(kept)))
        return base.placed(parts, found)

    def decode(self, payload: Buffer, entries: Sequence[Entry], dtype: str, into: Buffer) -> None:
        base.expect(entries, self.number)
        decompressor = zstandard.ZstdDecompressor()
        source, target = memoryview(payload).cast("B"), memoryview(into).cast("B")
        at = 0
        for entry in entries:
            text = source[entry.offset : entry.offset + entry.nbytes]
            out = target[at : at + entry.raw_bytes]
            at += entry.raw_bytes
            try:
                if entry.codec == RAW:
                    out[:] = text
                else:
                    _decode(decompressor, text, DTYPE_BYTES[dtype], out)
            except (ValueError, struct.error, zstandard.ZstdError) as error:
                raise base.damaged(entry, self.name) from error


def _encoded(compressor: zstandard.ZstdCompressor, raw: memoryview, width: int) -> bytes:
    size = len(raw) // width
    planes = bytearray(size * width)
    split_planes(width, raw[: size * width], planes)
    view = memoryview(planes)
    texts: list[bytes | memoryview] = []
    for number in range(width):
        plane = view[number * size : (number + 1) * size]
        text = compressor.compress(plane)
        texts.append(text if len(text) < size else plane)
    lengths = struct.pack(f"<{width}I", *map(len, texts))
    return b"".join((lengths, *texts, raw[size * width :]))


def _decode(
    decompressor: zstandard.ZstdDecompressor, text: memoryview, width: int, out: memoryview
) -> None:
    size = len(out) // width
    lengths = struct.unpack_from(f"<{width}I", text)
    at = 4 * width
    planes: list[bytes | memoryview] = []
    for length in lengths:
        plane = text[at : at + length]
        at += length
        if length == size:
            planes.append(plane)
            continue
        # Check the size first: zstd would allocate the size that the frame states.
        if zstandard.frame_content_size(plane) != size:
            raise ValueError("a plane has the wrong size")
        planes.append(decompressor.decompress(plane))
    if any(len(plane) != size for plane in planes):
        raise ValueError("a plane has the wrong size")
    join_planes(width, b"".join(planes), out[: size * width])
    out[size * width :] = text[at:]
