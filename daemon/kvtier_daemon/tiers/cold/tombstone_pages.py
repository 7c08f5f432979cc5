"""The tombstones of a segment: one bit for each of its pages, set where a forgotten frame begins.

They lie after the segment's head, in as many pages as its length needs (one for each 126 MiB), and are on
disk before a forget is answered. A start believes no frame whose tombstone page is damaged or of another
epoch.

A tombstone page, "KVTt":  version u16 │ zero u16 │ number u32 │ zero u32 │ epoch u64 │ bits 4032
                           │ digest 16 │ zeros
The digest is that of the page, as for a segment's head.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence

from kvtier.errors import FrameError
from kvtier_daemon.codec.frame import DIGEST_BYTES, PAGE, ZERO_DIGEST
from kvtier_kernels import xxh3_128

VERSION = 2  # of segments: head, tombstones, table and trailer
BITS_BYTES = 4032
PAGES_EACH = 8 * BITS_BYTES  # of a segment, that one page of tombstones covers
MARKS = struct.Struct(f"<4sHHIIQ{BITS_BYTES}s")
MAGIC = b"KVTt"


def digested_page(fields: bytes) -> bytes:
    """A page of these fields, its digest after them."""
    page = fields.ljust(PAGE, b"\0")
    digest = xxh3_128(page)
    return page[: len(fields)] + digest + page[len(fields) + DIGEST_BYTES :]


def checked_page(page: bytes, size: int) -> bytes:
    """The same page, whose fields take `size` bytes. Raises FrameError if its digest is wrong."""
    if len(page) != PAGE:
        raise FrameError(f"the page is incomplete: {len(page)} bytes")
    digest = page[size : size + DIGEST_BYTES]
    if xxh3_128(page[:size] + ZERO_DIGEST + page[size + DIGEST_BYTES :]) != digest:
        raise FrameError("page digest mismatch")
    return page


def expect(magic: bytes, expected: bytes, version: int) -> None:
    if magic != expected:
        raise FrameError(f"found {magic!r}, expected {expected!r}")
    if version != VERSION:
        raise FrameError(
            f"segment version is {version}, this daemon reads version {VERSION} only; its "
            "blocks are not used"
        )


def tombstone_pages(nbytes: int) -> int:
    """How many pages of tombstones a segment of this size has."""
    return -(-nbytes // (PAGES_EACH * PAGE))


class TombstonePages:
    """Pages of a segment; `dirty` has the numbers of the tombstone pages that are to be written."""

    def __init__(self, nbytes: int) -> None:
        self.count = tombstone_pages(nbytes)
        self.dirty: set[int] = set()
        self._bits = bytearray(self.count * BITS_BYTES)

    def __contains__(self, page: int) -> bool:
        at = page >> 3
        return at >= len(self._bits) or bool(self._bits[at] >> (page & 7) & 1)

    def __len__(self) -> int:
        return int.from_bytes(self._bits, "little").bit_count()

    def __bool__(self) -> bool:
        return any(self._bits)

    def add(self, page: int) -> None:
        if page not in self:
            self._bits[page >> 3] |= 1 << (page & 7)
            self.dirty.add(page // PAGES_EACH)

    def encode(self, epoch: int, first: int, count: int) -> bytes:
        """The bytes of `count` tombstone pages, from number `first` on."""
        return b"".join(
            digested_page(MARKS.pack(MAGIC, VERSION, 0, number, 0, epoch, self._part(number)))
            for number in range(first, first + count)
        )

    @classmethod
    def decode(cls, text: bytes, epoch: int, nbytes: int) -> tuple[TombstonePages, list[int]]:
        """The tombstones of a segment, and which of their pages are damaged: all of what those cover is taken
        to be forgotten."""
        found, damaged = cls(nbytes), []
        for number in range(found.count):
            try:
                bits = _bits_of(text[number * PAGE : (number + 1) * PAGE], epoch, number)
            except FrameError:
                damaged.append(number)
                bits = b"\xff" * BITS_BYTES
            found._bits[number * BITS_BYTES : (number + 1) * BITS_BYTES] = bits
        return found, damaged

    def take_dirty(self) -> tuple[int, int]:
        """The first of the pages to be written, and how many up to the last; they count as written."""
        first, last = min(self.dirty), max(self.dirty)
        self.dirty.clear()
        return first, last + 1 - first

    def not_written(self, numbers: Collection[int]) -> None:
        self.dirty.update(numbers)

    def _part(self, number: int) -> bytes:
        return bytes(self._bits[number * BITS_BYTES : (number + 1) * BITS_BYTES])


def without(rows: Sequence[bytes], pages: Sequence[int], forgotten: TombstonePages) -> list[bytes]:
    """The rows of the frames that were not forgotten; `pages` are where they begin."""
    return [row for row, page in zip(rows, pages, strict=True) if page not in forgotten]


def _bits_of(page: bytes, epoch: int, number: int) -> bytes:
    magic, version, _, own_number, _, own_epoch, bits = MARKS.unpack_from(
        checked_page(page, MARKS.size)
    )
    expect(magic, MAGIC, version)
    if (own_epoch, own_number) != (epoch, number):
        raise FrameError(
            f"tombstones are page {own_number} of epoch {own_epoch}, expected page {number} of "
            f"{epoch}"
        )
    return bytes(bits)
