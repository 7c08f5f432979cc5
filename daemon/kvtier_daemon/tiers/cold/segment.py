"""A segment file: head and tombstones, its frames one after the other, and its footer once it is full.

     0        4096         first_frame                        table            last page
     ┌────────┬────────────┬────────┬─────┬────────┬────────┬────────────────┬─────────┐
     │ head   │ tombstones │ frame  │ ... │ frame  │ free   │ spaces, entries│ trailer │
     └────────┴────────────┴────────┴─────┴────────┴────────┴────────────────┴─────────┘

A segment is used again and again, each time with a new epoch, which is in the head, in every frame and in
the trailer: what an earlier use left behind is of another epoch, and so is nothing. The head is on disk
before the first frame is written; the frames are before the trailer. A segment with a good trailer of its
head's epoch is sealed, and the table says all that is in it; without one it is open, and its frames are found
by walking from the first page until one is no frame. Flag 1 of a trailer: nothing is added to this
segment. Either a kill has left it open, and what was being written then may lie behind its last frame, of the
same epoch; or frames of it were erased, and a walk would end at the first of them.

Head, "KVTs":     version u16 │ zero u16 │ number u32 │ bytes u64 │ epoch u64 │ sequence u64 │ owner 32
                  │ digest 16
Trailer, "KVTe":  version u16 │ flags u16 │ entries u32 │ table at u64 │ table bytes u64 │ epoch u64
                  │ table digest 16 │ digest 16

`number` is that in the file's name: a file of another name is a copy and not used, unless the file of that
name is another segment. The owner is a digest of tenant, directory and the tenant's secret: without that
secret nothing of the segment counts. Tombstones are drawn in tombstones.py. Head and trailer fill a page with
zeros, and their digest, the last field, is the XXH3-128 of that page with it zero.
The table is the identities and descriptions of the spaces (a length u32, then msgpack of [identity, KvSpec]
pairs, up to a multiple of 8 bytes) and then 128 bytes for each frame, in the order in which they lie:

     key 32 │ parent 32 │ space u32 │ group u16 │ shard u16 │ page u32 │ pages u32 │ header pages u16
     │ codec u16 │ payload bytes u64 │ raw bytes u64 │ sequence u64 │ payload digest 16 │ flags u32

`space` counts the spaces of this table, `page` is where the frame begins, in pages of 4096 bytes.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import add, le

import msgspec

from kvtier.errors import FrameError
from kvtier.layout import KvSpec
from kvtier_daemon.codec.frame import (
    HAS_PARENT,
    LOSSY,
    PAGE,
    Frame,
    Identity,
    pages,
)
from kvtier_daemon.tiers.cold.tombstone_pages import (
    VERSION,
    checked_page,
    digested_page,
    expect,
    tombstone_pages,
)  # fmt: skip
from kvtier_kernels import xxh3_128

TORN = 1
HEAD = struct.Struct("<4sHHIQQQ32s")
TRAILER = struct.Struct("<4sHHIQQQ16s")
ENTRY = struct.Struct("<32s32sIHHIIHHQQQ16sI")
HEAD_MAGIC, TRAILER_MAGIC = b"KVTs", b"KVTe"
LIMIT_SEQUENCE = 1 << 62  # numbers after it are to fit their field too
CODEC_AT = 82  # in an entry; the field's low byte, and no codec has a number above 255
SPACES_LENGTH = struct.Struct("<I")
ARRAY_BYTES = 5  # how msgpack begins a list, at most

# In an entry, counted in words of 4 and halves of 2 bytes.
ENTRY_WORDS, SPACE_WORD, PAGE_WORD, SIZE_WORD, HEADER_HALF = 32, 16, 18, 21, 40

assert ENTRY.size == 4 * ENTRY_WORDS == 128


@dataclass(frozen=True, slots=True)
class Head:
    """What the first page says. `sequence` is its first frame's: segments follow each other by it."""

    number: int
    nbytes: int
    epoch: int
    sequence: int
    owner: bytes

    def encode(self) -> bytes:
        fields = (self.number, self.nbytes, self.epoch, self.sequence, self.owner)
        return digested_page(HEAD.pack(HEAD_MAGIC, VERSION, 0, *fields))

    @classmethod
    def decode(cls, page: bytes) -> Head:
        """Raises FrameError if this is no segment's first page, or damaged."""
        magic, version, _, *fields = HEAD.unpack_from(checked_page(page, HEAD.size))
        expect(magic, HEAD_MAGIC, version)
        head = cls(*fields)
        if head.sequence > LIMIT_SEQUENCE:
            raise FrameError(f"sequence is {head.sequence}, at most {LIMIT_SEQUENCE} is possible")
        return head


@dataclass(frozen=True, slots=True)
class FooterEntry:
    """A frame as the table lists it."""

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
    """What one space takes of a table."""
    return len(msgspec.msgpack.encode(space))


def described_bytes(spaces: int) -> int:
    """The most that spaces take of a table that take so many bytes one by one."""
    return -(-(SPACES_LENGTH.size + ARRAY_BYTES + spaces) // 8) * 8


def footer_bytes(described: int, frames: int) -> int:
    """What table and trailer take of a segment with so many frames, in whole pages."""
    return pages(described + frames * ENTRY.size) + PAGE


def encode_row(one: FooterEntry, space: int) -> bytes:
    """An entry of the table; `space` is the number that its space has there."""
    name = one.identity
    return ENTRY.pack(
        name.key, one.parent, space, name.group, name.shard, one.page, one.pages, one.header_pages,
        one.codec, one.payload_bytes, one.raw_bytes, one.sequence, one.payload_digest,
        (HAS_PARENT if one.parent else 0) | (LOSSY if one.lossy else 0),
    )  # fmt: skip


def first_frame(nbytes: int) -> int:
    """Where the first frame of a segment of this size begins: after head and tombstones."""
    return PAGE + tombstone_pages(nbytes) * PAGE


def end_of(rows: bytes, nbytes: int) -> int:
    """Where the last frame of a table ends, in a segment of this size."""
    if not rows:
        return first_frame(nbytes)
    fields = ENTRY.unpack_from(rows, len(rows) - ENTRY.size)
    return int(fields[5] + fields[6]) * PAGE


def split_rows(rows: bytes) -> list[bytes]:
    """The entries of a table, one by one."""
    return [rows[at : at + ENTRY.size] for at in range(0, len(rows), ENTRY.size)]


def space_of(row: bytes) -> int:
    """The number that an entry's space has in its table."""
    return int(ENTRY.unpack_from(row)[2])


def pages_of(rows: bytes) -> array[int]:
    """Where the frames of a table begin."""
    return _words(rows)[PAGE_WORD::ENTRY_WORDS]


def one_space(rows: bytes) -> bool:
    """Whether all frames of a table are of its first space."""
    return not any(_words(rows)[SPACE_WORD::ENTRY_WORDS])


def check_rows(rows: bytes, first: int, end: int) -> None:
    """Raises FrameError unless the frames of a table lie one after the other from byte `first` to `end`, with
    payloads that end there too."""
    if not rows:
        return
    words = _words(rows)
    starts, counts = words[PAGE_WORD::ENTRY_WORDS], words[PAGE_WORD + 1 :: ENTRY_WORDS]
    inside = starts[0] * PAGE >= first and (starts[-1] + counts[-1]) * PAGE <= end
    if not (inside and _in_order(starts, counts)):
        raise FrameError("the table's frames are not in order, or are outside of the segment")
    sizes, above = words[SIZE_WORD::ENTRY_WORDS], words[SIZE_WORD + 1 :: ENTRY_WORDS]
    headers = array("H", rows)[HEADER_HALF :: 2 * ENTRY_WORDS]
    # Of most frames it is enough to know that the longest payload would end in time.
    near = bisect_right(starts, end // PAGE - max(headers) - pages(max(sizes)) // PAGE)
    payloads = zip(starts[near:], headers[near:], sizes[near:], strict=True)
    if any(above) or any((at + header) * PAGE + size > end for at, header, size in payloads):
        raise FrameError("the table has a payload that ends outside of the segment")


def _in_order(starts: array[int], counts: array[int]) -> bool:
    """Whether each of these frames ends where the next one begins, or before."""
    # Most often each ends exactly there; to add them all as two long numbers takes a tenth of the time.
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
    """Where the frame of an entry begins."""
    return int(ENTRY.unpack_from(row)[5])


def rows_of_pages(
    spaces: Sequence[tuple[bytes, KvSpec]], rows: bytes, pages: Collection[int]
) -> tuple[list[tuple[bytes, KvSpec]], bytes]:
    """The entries whose frames begin at these pages, and the spaces that they are of."""
    kept = [list(fields) for fields in ENTRY.iter_unpack(rows) if fields[5] in pages]
    numbers = {old: new for new, old in enumerate(sorted({fields[2] for fields in kept}))}
    for fields in kept:
        fields[2] = numbers[fields[2]]
    return [spaces[old] for old in numbers], b"".join(ENTRY.pack(*fields) for fields in kept)


def codecs_of(rows: bytes) -> set[int]:
    """The codecs of a table's frames."""
    return set(rows[CODEC_AT :: ENTRY.size])


def encode_footer(
    head: Head,
    spaces: Sequence[tuple[bytes, KvSpec]],
    rows: bytes | bytearray,
    end: int,
    torn: bool = False,
) -> tuple[int, bytes]:
    """Where the table goes, and the bytes from there to the segment's end; its frames go up to `end`. `torn`
    says that a kill has left it open."""
    table = _described(spaces) + rows
    at = head.nbytes - PAGE - pages(len(table))
    assert end <= at, "no room was left for the footer"
    trailer = TRAILER.pack(
        TRAILER_MAGIC, VERSION, torn * TORN, len(rows) // ENTRY.size, at, len(table), head.epoch,
        xxh3_128(table),
    )  # fmt: skip
    return at, table.ljust(pages(len(table)), b"\0") + digested_page(trailer)


@dataclass(frozen=True, slots=True)
class Trailer:
    """What the last page says: how long the table is and where."""

    entries: int
    table_at: int
    table_bytes: int
    epoch: int
    table_digest: bytes
    torn: bool

    @classmethod
    def decode(cls, page: bytes, head: Head) -> Trailer:
        """Raises FrameError unless this seals the segment that has this head."""
        fields = TRAILER.unpack_from(checked_page(page, TRAILER.size))
        magic, version, flags, entries, at, nbytes, epoch, digest = fields
        expect(magic, TRAILER_MAGIC, version)
        if epoch != head.epoch:
            raise FrameError("the trailer is of another epoch: the segment was reused")
        if at % PAGE or at < first_frame(head.nbytes) or at + pages(nbytes) != head.nbytes - PAGE:
            raise FrameError(
                f"invalid table of {nbytes} bytes at {at}, in a segment of {head.nbytes}"
            )
        return cls(entries, at, nbytes, epoch, digest, bool(flags & TORN))

    def split(self, table: bytes) -> tuple[list[tuple[bytes, KvSpec]], bytes]:
        """The spaces of the table, and its entries as they are. Raises FrameError if a bit is wrong."""
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
    """What a table lists, one by one."""
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
