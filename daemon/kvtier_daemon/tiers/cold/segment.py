"""The format of a segment file: head, tombstones, consecutive frames, and a footer when it is full.

     0        4096         first_frame                        table            last page
     ┌────────┬────────────┬────────┬─────┬────────┬────────┬────────────────┬─────────┐
     │ head   │ tombstones │ frame  │ ... │ frame  │ free   │ spaces, entries│ trailer │
     └────────┴────────────┴────────┴─────┴────────┴────────┴────────────────┴─────────┘

A segment is reused many times, each time with a new epoch. The epoch is in the head, in every frame, in the
tombstones and in the trailer, so bytes of an earlier use are recognized as invalid. The head is written
before the first frame, and the frames before the trailer. A segment whose trailer is valid and has the epoch
of the head is sealed: its table lists all frames. Otherwise it is open, and its frames are found by walking
from the first page to the first page that is not a frame. Flag 1 of a trailer means that no frames are added
to this segment: either a kill left it open, and unfinished writes of the same epoch may lie behind its last
frame, or frames of it were erased, and a walk would end at the first of these.

Head, "KVTs":     version u16 │ flags u16 │ number u32 │ bytes u64 │ epoch u64 │ sequence u64 │ owner 32
                  │ digest 16
Trailer, "KVTe":  version u16 │ flags u16 │ entries u32 │ table at u64 │ table bytes u64 │ epoch u64
                  │ table digest 16 │ digest 16

Tombstone page, "KVTt":  version u16 │ zero u16 │ number u32 │ zero u32 │ epoch u64 │ bits 4032 │ digest 16

Flag 1 of a head means that the file has held only encrypted frames since it was empty. `number` is the one in
the file's name. A file with another name is a copy and is not used, unless the file with that name is a
different segment. The owner is a digest of tenant, directory and the tenant's secret: without that secret the
segment is not used. Each of these pages is filled with zeros; its digest, the last
field, is the XXH3-128 of the page with a digest of zeros. A tombstone is a bit, set for the page where a
forgotten frame begins. There is one tombstone page for each 126 MiB of the segment. They are on disk before a
forget is answered. A start does not use frames whose tombstone page is damaged or has another epoch. The
table contains the identities and descriptions of the spaces (a length u32, then msgpack of [identity, KvSpec]
pairs, up to a multiple of 8 bytes) and then 128 bytes for each frame, in the order of the frames:

     key 32 │ parent 32 │ space u32 │ group u16 │ shard u16 │ page u32 │ pages u32 │ header pages u16
     │ codec u16 │ payload bytes u64 │ raw bytes u64 │ sequence u64 │ payload digest 16 │ flags u32

`space` is an index into the spaces of this table; `page` is where the frame begins, in pages of 4096 bytes.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from operator import add, le
from typing import Any, NamedTuple

import msgspec

from kvtier.errors import FrameError
from kvtier.frame import (
    DIGEST_BYTES,
    ENCRYPTED,
    HAS_PARENT,
    LOSSY,
    PAGE,
    ZERO_DIGEST,
    Frame,
    Identity,
    pages,
)
from kvtier.layout import KvSpec
from kvtier_kernels import xxh3_128

VERSION = 2  # of head, tombstones, table and trailer
TORN = 1
ENCRYPTED_SEGMENT = 1
BITS_BYTES = 4032
PAGES_EACH = 8 * BITS_BYTES  # of a segment, for one page of tombstones
HEAD = struct.Struct("<4sHHIQQQ32s")
TRAILER = struct.Struct("<4sHHIQQQ16s")
MARKS = struct.Struct(f"<4sHHIIQ{BITS_BYTES}s")
ENTRY = struct.Struct("<32s32sIHHIIHHQQQ16sI")
HEAD_MAGIC, TRAILER_MAGIC, MARKS_MAGIC = b"KVTs", b"KVTe", b"KVTt"
LIMIT_SEQUENCE = 1 << 62  # leaves room in the field for the numbers of later frames
CODEC_AT = 82  # in an entry: the low byte of the field; no codec has a number above 255
SPACES_LENGTH = struct.Struct("<I")
ARRAY_BYTES = 5  # the most that msgpack needs for the start of a list

# Positions in an entry, in words of 4 bytes and in halves of 2 bytes.
ENTRY_WORDS, SPACE_WORD, PAGE_WORD, SIZE_WORD, HEADER_HALF = 32, 16, 18, 21, 40

assert ENTRY.size == 4 * ENTRY_WORDS == 128


def digested_page(fields: bytes) -> bytes:
    """Return a page of these fields with its digest after them."""
    page = fields.ljust(PAGE, b"\0")
    digest = xxh3_128(page)
    return page[: len(fields)] + digest + page[len(fields) + DIGEST_BYTES :]


def checked_page(page: bytes, layout: struct.Struct, magic: bytes) -> tuple[Any, ...]:
    """Return the fields after magic, version and flags. Raises FrameError for a damaged or other page."""
    if len(page) != PAGE:
        raise FrameError(f"the page is incomplete: {len(page)} bytes")
    size = layout.size
    digest = page[size : size + DIGEST_BYTES]
    if xxh3_128(page[:size] + ZERO_DIGEST + page[size + DIGEST_BYTES :]) != digest:
        raise FrameError("page digest mismatch")
    found, version, *fields = layout.unpack_from(page)
    if found != magic:
        raise FrameError(f"found {found!r}, expected {magic!r}")
    if version != VERSION:
        raise FrameError(
            f"segment version is {version}, this daemon reads version {VERSION} only; its "
            "blocks are not used"
        )
    return tuple(fields)


def tombstone_pages(nbytes: int) -> int:
    """Return the number of tombstone pages of a segment of this size."""
    return -(-nbytes // (PAGES_EACH * PAGE))


class TombstonePages:
    """A segment's tombstones, as a set of pages. `dirty` has the tombstone pages that must be written."""

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
        return self._bits.count(0) < len(self._bits)

    def add(self, page: int) -> None:
        if page not in self:
            self._bits[page >> 3] |= 1 << (page & 7)
            self.dirty.add(page // PAGES_EACH)

    def encode(self, epoch: int, first: int, count: int) -> bytes:
        bits = (
            bytes(self._bits[number * BITS_BYTES : (number + 1) * BITS_BYTES])
            for number in range(first, first + count)
        )
        return b"".join(
            digested_page(MARKS.pack(MARKS_MAGIC, VERSION, 0, number, 0, epoch, part))
            for number, part in enumerate(bits, first)
        )

    @classmethod
    def decode(cls, text: bytes, epoch: int, nbytes: int) -> tuple[TombstonePages, list[int]]:
        """Return the tombstones of a segment, and the numbers of damaged tombstone pages: all frames that
        these cover count as forgotten."""
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
        """Return the first dirty page and the number of pages to the last one; they count as written."""
        first, last = min(self.dirty), max(self.dirty)
        self.dirty.clear()
        return first, last + 1 - first


def _bits_of(page: bytes, epoch: int, number: int) -> bytes:
    _, found_number, _, found_epoch, bits = checked_page(page, MARKS, MARKS_MAGIC)
    if (found_epoch, found_number) != (epoch, number):
        raise FrameError(
            f"tombstones are page {found_number} of epoch {found_epoch}, expected page {number} of "
            f"{epoch}"
        )
    return bytes(bits)


def without(rows: Sequence[bytes], pages: Sequence[int], forgotten: TombstonePages) -> list[bytes]:
    """Return the rows of the frames that were not forgotten; `pages` are where the frames begin."""
    return [row for row, page in zip(rows, pages, strict=True) if page not in forgotten]


@dataclass(frozen=True, slots=True)
class Head:
    """The content of the first page. `sequence` is the one of the first frame, and orders the segments."""

    number: int
    nbytes: int
    epoch: int
    sequence: int
    owner: bytes
    encrypted: bool = False

    def encode(self) -> bytes:
        fields = (self.number, self.nbytes, self.epoch, self.sequence, self.owner)
        flags = ENCRYPTED_SEGMENT if self.encrypted else 0
        return digested_page(HEAD.pack(HEAD_MAGIC, VERSION, flags, *fields))

    @classmethod
    def decode(cls, page: bytes) -> Head:
        """Raises FrameError if this is not the first page of a segment, or is damaged."""
        flags, *fields = checked_page(page, HEAD, HEAD_MAGIC)
        head = replace(cls(*fields), encrypted=bool(flags & ENCRYPTED_SEGMENT))
        if head.sequence > LIMIT_SEQUENCE:
            raise FrameError(f"sequence is {head.sequence}, at most {LIMIT_SEQUENCE} is possible")
        return head


@dataclass(frozen=True, slots=True)
class FooterEntry:
    identity: Identity
    parent: bytes
    page: int
    pages: int
    header_pages: int
    codec: int
    payload_bytes: int
    raw_bytes: int
    sequence: int
    payload_digest: bytes
    lossy: bool = False

    @classmethod
    def of(cls, frame: Frame, page: int) -> FooterEntry:
        return cls(
            frame.identity, frame.parent, page, frame.total_bytes // PAGE, frame.header_bytes // PAGE,
            frame.codec, frame.payload_bytes, frame.raw_bytes, frame.sequence, frame.payload_digest,
            frame.lossy_generation > 0,
        )  # fmt: skip


def space_bytes(space: tuple[bytes, KvSpec]) -> int:
    return len(msgspec.msgpack.encode(space))


def described_bytes(spaces: int) -> int:
    """Return the most bytes that the spaces of a table take, given the sum of their sizes."""
    return -(-(SPACES_LENGTH.size + ARRAY_BYTES + spaces) // 8) * 8


def footer_bytes(described: int, frames: int) -> int:
    """Return the size of table and trailer for this many frames, in whole pages."""
    return pages(described + frames * ENTRY.size) + PAGE


def pack_row(
    key: bytes, parent: bytes, space: int, group: int, shard: int, page: int, count: int,
    header_pages: int, codec: int, payload_bytes: int, raw_bytes: int, sequence: int, digest: bytes,
    lossy: bool,
) -> bytes:  # fmt: skip
    """Return an entry of the table; `space` is the index of its space."""
    return ENTRY.pack(
        key, parent, space, group, shard, page, count, header_pages, codec, payload_bytes, raw_bytes,
        sequence, digest, (HAS_PARENT if parent else 0) | (LOSSY if lossy else 0),
    )  # fmt: skip


def encode_row(entry: FooterEntry, space: int) -> bytes:
    """Return an entry of the table; `space` is the index of its space."""
    name = entry.identity
    return pack_row(
        name.key, entry.parent, space, name.group, name.shard, entry.page, entry.pages, entry.header_pages,
        entry.codec, entry.payload_bytes, entry.raw_bytes, entry.sequence, entry.payload_digest,
        entry.lossy,
    )  # fmt: skip


def first_frame(nbytes: int) -> int:
    """Return where the first frame of a segment of this size begins: after head and tombstones."""
    return PAGE + tombstone_pages(nbytes) * PAGE


def end_of(rows: bytes, nbytes: int) -> int:
    """Return where the last frame of a table ends, in a segment of this size."""
    if not rows:
        return first_frame(nbytes)
    fields = ENTRY.unpack_from(rows, len(rows) - ENTRY.size)
    return int(fields[5] + fields[6]) * PAGE


def split_rows(rows: bytes) -> list[bytes]:
    """Return a list of the entries of a table."""
    return [rows[at : at + ENTRY.size] for at in range(0, len(rows), ENTRY.size)]


def space_of(row: bytes) -> int:
    return int(ENTRY.unpack_from(row)[2])


def pages_of(rows: bytes) -> array[int]:
    return _words(rows)[PAGE_WORD::ENTRY_WORDS]


def one_space(rows: bytes) -> bool:
    """Whether all frames of a table belong to its first space."""
    return not any(_words(rows)[SPACE_WORD::ENTRY_WORDS])


def check_rows(rows: bytes, first: int, end: int) -> None:
    """Raise FrameError unless the frames of a table are in order between the bytes `first` and `end`, and
    their payloads end before `end`."""
    if not rows:
        return
    words = _words(rows)
    starts, counts = words[PAGE_WORD::ENTRY_WORDS], words[PAGE_WORD + 1 :: ENTRY_WORDS]
    inside = starts[0] * PAGE >= first and (starts[-1] + counts[-1]) * PAGE <= end
    if not (inside and _in_order(starts, counts)):
        raise FrameError("the table's frames are not in order, or are outside of the segment")
    sizes, above = words[SIZE_WORD::ENTRY_WORDS], words[SIZE_WORD + 1 :: ENTRY_WORDS]
    headers = array("H", rows)[HEADER_HALF :: 2 * ENTRY_WORDS]
    # For most frames it suffices that the longest payload would end in time.
    near = bisect_right(starts, end // PAGE - max(headers) - pages(max(sizes)) // PAGE)
    payloads = zip(starts[near:], headers[near:], sizes[near:], strict=True)
    if any(above) or any((at + header) * PAGE + size > end for at, header, size in payloads):
        raise FrameError("the table has a payload that ends outside of the segment")


def _in_order(starts: array[int], counts: array[int]) -> bool:
    """Whether each of these frames ends where the next one begins, or before."""
    # Usually each ends exactly there. Adding all as two long integers takes a tenth of the time.
    ends = int.from_bytes(starts.tobytes(), "little") + int.from_bytes(counts.tobytes(), "little")
    size = len(starts) * starts.itemsize
    if ends.bit_length() <= 8 * size and (
        ends.to_bytes(size, "little")[: -starts.itemsize] == starts.tobytes()[starts.itemsize :]
    ):
        return True
    return all(map(le, map(add, starts, counts), starts[1:]))


def _words(rows: bytes) -> array[int]:
    return array("I", rows)


def page_of(row: bytes) -> int:
    """Return the first page of an entry's frame."""
    return int(ENTRY.unpack_from(row)[5])


def rows_of_pages(
    spaces: Sequence[tuple[bytes, KvSpec]], rows: bytes, pages: Collection[int]
) -> tuple[list[tuple[bytes, KvSpec]], bytes]:
    """Return the entries whose frames begin at these pages, and their spaces."""
    kept = [list(fields) for fields in ENTRY.iter_unpack(rows) if fields[5] in pages]
    numbers = {old: new for new, old in enumerate(sorted({fields[2] for fields in kept}))}
    for fields in kept:
        fields[2] = numbers[fields[2]]
    return [spaces[old] for old in numbers], b"".join(ENTRY.pack(*fields) for fields in kept)


def codecs_of(rows: bytes) -> set[int]:
    return {codec & ~ENCRYPTED for codec in rows[CODEC_AT :: ENTRY.size]}


def all_encrypted(rows: bytes) -> bool:
    return min(rows[CODEC_AT :: ENTRY.size], default=ENCRYPTED) >= ENCRYPTED


def encode_footer(
    head: Head,
    spaces: Sequence[tuple[bytes, KvSpec]],
    rows: bytes | bytearray,
    end: int,
    torn: bool = False,
) -> tuple[int, bytes]:
    """Return the offset of the table, and the bytes from there to the end of the segment, whose frames end at
    `end`. `torn`: a kill left the segment open."""
    table = _described(spaces) + rows
    at = head.nbytes - PAGE - pages(len(table))
    assert end <= at, "no room was left for the footer"
    trailer = TRAILER.pack(
        TRAILER_MAGIC, VERSION, torn * TORN, len(rows) // ENTRY.size, at, len(table), head.epoch,
        xxh3_128(table),
    )  # fmt: skip
    return at, table.ljust(pages(len(table)), b"\0") + digested_page(trailer)


class Taken(NamedTuple):
    """The place of a frame: its page, the index of its space in the table, and the position of its entry."""

    page: int
    space: int
    at: int


class FrameTable:
    """The frames of a segment that is being written: `end`, where the next one begins, and the table of the
    future footer, which has an entry for each frame with a place."""

    __slots__ = ("_described", "_nbytes", "_number_of", "_rows", "end", "failed", "spaces")

    def __init__(
        self, nbytes: int, spaces: Sequence[tuple[bytes, KvSpec]] = (), rows: bytes = b"", end: int = 0
    ) -> None:  # fmt: skip
        self.end = end or first_frame(nbytes)
        self.failed = False  # a frame was not written
        self.spaces = list(spaces)
        self._nbytes = nbytes
        self._rows = bytearray(rows)
        self._number_of = {identity: number for number, (identity, _) in enumerate(spaces)}
        self._described = sum(map(space_bytes, spaces))

    def __len__(self) -> int:
        return len(self._rows) // ENTRY.size

    def take(self, frame_bytes: int, space: tuple[bytes, KvSpec]) -> Taken | None:
        """Return a place for a frame; None if it does not fit before the footer."""
        new = space[0] not in self._number_of
        described = self._described + space_bytes(space) if new else self._described
        footer = footer_bytes(described_bytes(described), len(self) + 1)
        if self.end + frame_bytes + footer > self._nbytes:
            return None
        if new:
            self._number_of[space[0]] = len(self.spaces)
            self.spaces.append(space)
            self._described = described
        taken = Taken(self.end // PAGE, self._number_of[space[0]], len(self._rows))
        self.end += frame_bytes
        self._rows += bytes(ENTRY.size)
        return taken

    def wrote(self, at: int, row: bytes) -> None:
        """Set the entry of a frame that is on disk."""
        self._rows[at : at + ENTRY.size] = row

    def footer(self, head: Head) -> tuple[int, bytes]:
        rows = bytes(self._rows)
        if self.failed:
            rows = b"".join(row for row in split_rows(rows) if page_of(row))
        return encode_footer(head, self.spaces, rows, self.end)


@dataclass(frozen=True, slots=True)
class Trailer:
    """The content of the last page: size and offset of the table."""

    entries: int
    table_at: int
    table_bytes: int
    epoch: int
    table_digest: bytes
    torn: bool

    @classmethod
    def decode(cls, page: bytes, head: Head) -> Trailer:
        """Raises FrameError unless this is the trailer of the segment that has this head."""
        flags, entries, at, nbytes, epoch, digest = checked_page(page, TRAILER, TRAILER_MAGIC)
        if epoch != head.epoch:
            raise FrameError("the trailer is of another epoch: the segment was reused")
        if at % PAGE or at < first_frame(head.nbytes) or at + pages(nbytes) != head.nbytes - PAGE:
            raise FrameError(
                f"invalid table of {nbytes} bytes at {at}, in a segment of {head.nbytes}"
            )
        return cls(entries, at, nbytes, epoch, digest, bool(flags & TORN))

    def split(self, table: bytes) -> tuple[list[tuple[bytes, KvSpec]], bytes]:
        """Return the spaces of the table, and its packed entries. Raises FrameError if a bit is wrong."""
        table = table[: self.table_bytes]
        if len(table) != self.table_bytes or xxh3_128(table) != self.table_digest:
            raise FrameError("table digest mismatch")
        rows = self.entries * ENTRY.size
        described = table[: self.table_bytes - rows]
        try:
            (length,) = SPACES_LENGTH.unpack_from(described)
            text = described[SPACES_LENGTH.size : SPACES_LENGTH.size + length]
            spaces = msgspec.msgpack.decode(text, type=list[tuple[bytes, KvSpec]])
        except (struct.error, msgspec.MsgspecError, ValueError) as error:  # text that is not UTF-8
            raise FrameError(f"cannot read the spaces of the table: {error}") from error
        return spaces, table[self.table_bytes - rows :]


def decode_entries(spaces: Sequence[tuple[bytes, KvSpec]], rows: bytes) -> list[FooterEntry]:
    """Return the entries of a table, unpacked."""
    listed = []
    for fields in ENTRY.iter_unpack(rows):
        (
            key, parent, space, group, shard, page, count, header_pages, codec, payload_bytes, raw_bytes,
            sequence, digest, flags,
        ) = fields  # fmt: skip
        if space >= len(spaces):
            raise FrameError(f"an entry names space {space}, the table has {len(spaces)}")
        identity = Identity(spaces[space][0], group, shard, key)
        has_parent = flags & HAS_PARENT
        listed.append(
            FooterEntry(
                identity, parent if has_parent else b"", page, count, header_pages, codec,
                payload_bytes, raw_bytes, sequence, digest, bool(flags & LOSSY),
            )
        )  # fmt: skip
    return listed


def _described(spaces: Sequence[tuple[bytes, KvSpec]]) -> bytes:
    text = msgspec.msgpack.encode(spaces)
    text = SPACES_LENGTH.pack(len(text)) + text
    return text.ljust(-(-len(text) // 8) * 8, b"\0")
