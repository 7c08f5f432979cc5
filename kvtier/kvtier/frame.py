"""The frame: a block in a segment or a remote store, with its identity and checksums.

     ┌───────┬───┬───┬───────┬───────┬───────────────┬───────────────┐
   0 │  KVTf │ver│cod│ header│ flags │ payload bytes │   raw bytes   │
     ├───────┴───┴───┼───────┴───────┼───────────────┴───────────────┤
  32 │     epoch     │    sequence   │           space ...           │
     ├───────────────┴───────────────┼───────────────────────────────┤
  64 │           ... space           │            key ...            │
     ├───────────────────────────────┼───────────────────────────────┤
  96 │            ... key            │           parent ...          │
     ├───────────────────────────────┼───┬───┬───────┬───────────────┤
 128 │           ... parent          │grp│shd│entries│ raw digest ...│
     ├───────────────┬───────────────┴───┴───┴───────┼───────────────┤
 160 │ ... raw digest│         payload digest        │   nonce ...   │
     ├───────┬───────┴───────────────────────┬───────┴───────────────┤
 192 │ nonce │              tag              │g│zero │    key id     │
     ├───────┴───────────────────────┬───────┴─┴─────┴───────────────┤
 224 │            profile            │             digest            │
     ├───┬─┬─┬───────┬───────┬───────┼───────────────────────────────┤
 256 │lay│p│c│ offset│ bytes │  raw  │             digest            │
     └───┴─┴─┴───────┴───────┴───────┴───────────────────────────────┘  and so on, an entry after the other

Numbers are little-endian. Header and entries fill whole pages. The payload begins on the next page; a writer
fills its last page with zeros, and a reader ignores these. The digest at 240 is the XXH3-128 of all header
pages with that field zero, so it covers identity, epoch, lengths and the digests of the entries. The digest
of an entry covers its piece of the payload, the payload digest the whole payload, and the raw digest the
block in memory. In `raw` frames the raw digest equals the payload digest. The profile is the name of the
profile that decoding needs, or zero. `g` counts how often the block in memory has been through a lossy codec:
1 if this frame's codec is lossy (a lossy codec is never applied twice), or if the block was decoded from such
a frame and is written again. Lists of frames have the flag LOSSY for these.

In encrypted frames the codec contains ENCRYPTED; nonce, tag and key id are those of AES-256-GCM, and zero
otherwise. Payload and raw digest are encrypted, in this order; the digests of payload and entries cover the
encrypted bytes, because a digest of the block would confirm a guessed prompt. `codec/encryption.py` describes
the keys. The tag covers the rest of the header except flags, epoch, sequence, parent and digests, which
change when a frame is copied.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtier.errors import FrameError
from kvtier_kernels import xxh3_128

PAGE = 4096
MAGIC = b"KVTf"
VERSION = 1
HAS_PARENT, LOSSY = 1, 2
FLAGS = HAS_PARENT  # flags of a header
HEADER = struct.Struct("<4sHHIIQQQQ32s32s32sHHI16s16s12s16sB3x8s16s16s")
ENTRY = struct.Struct("<HBBIII16s")
# Codecs, and the kernels' numbers of element types. Other types have no exponent to encode.
RAW, FIX4, R32, ZSTD, Q8, Q4, Q2, ECSQ, CACHEGEN, FP8, E5M2, NVFP4, MXFP4 = range(13)
ELEMENTS = {"bfloat16": 0, "float16": 1, "float32": 2, "float8_e4m3fn": 3, "float8_e5m2": 4}
ONCE = 1  # the generation of a frame that has been through a lossy codec
ENCRYPTED = 0x80  # in the codec of a frame
FLAGS_AT, FLAGS_FIELD = 12, struct.Struct("<I")
TIME_AT, TIME = 32, struct.Struct("<QQ")
IDENTITY = struct.Struct("<32s32sHH")
NAMES_AT, NAMES = 80, struct.Struct("<32s32s")
RAW_DIGEST_AT = 152
GENERATION_AT = 212
DIGEST_AT = 240
DIGEST_BYTES = 16
NONCE_BYTES, KEY_ID_BYTES = 12, 8
ZERO_DIGEST = bytes(DIGEST_BYTES)
LIMIT_ENTRIES = 1 << 16
LIMIT_PAYLOAD_BYTES = (1 << 32) - PAGE

assert HEADER.size == DIGEST_AT + DIGEST_BYTES
assert ENTRY.size == 32


def pages(nbytes: int) -> int:
    """Return `nbytes`, rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a block. Blocks that differ in any field are never returned for each other."""

    space: bytes
    group: int
    shard: int
    key: bytes

    def encode(self) -> bytes:
        """Return the identity as encryption uses it."""
        return IDENTITY.pack(self.space, self.key, self.group, self.shard)


class Entry(NamedTuple):
    """One part of one layer: the place of its bytes in the payload, and their decoded size."""

    layer: int
    part: int
    codec: int
    offset: int
    nbytes: int
    raw_bytes: int
    digest: bytes = ZERO_DIGEST


@dataclass(frozen=True, slots=True)
class Frame:
    """The content of a frame's header."""

    identity: Identity
    parent: bytes
    codec: int
    payload_bytes: int
    raw_bytes: int
    epoch: int
    sequence: int
    raw_digest: bytes
    payload_digest: bytes
    entries: tuple[Entry, ...]
    nonce: bytes = bytes(NONCE_BYTES)
    tag: bytes = ZERO_DIGEST
    profile: bytes = ZERO_DIGEST  # the name of the profile
    lossy_generation: int = 0
    key_id: bytes = bytes(KEY_ID_BYTES)

    @property
    def header_bytes(self) -> int:
        return header_bytes(len(self.entries))

    @property
    def total_bytes(self) -> int:
        """The size of the frame in a segment."""
        return self.header_bytes + pages(self.payload_bytes)

    def encode(self) -> bytes:
        """Return the header pages."""
        one = self.identity
        size = self.header_bytes
        header = HEADER.pack(
            MAGIC, VERSION, self.codec, size, HAS_PARENT if self.parent else 0, self.payload_bytes,
            self.raw_bytes, self.epoch, self.sequence, one.space, one.key, self.parent, one.group, one.shard,
            len(self.entries), self.raw_digest, self.payload_digest, self.nonce, self.tag,
            self.lossy_generation, self.key_id, self.profile, ZERO_DIGEST,
        )  # fmt: skip
        body = b"".join(
            ENTRY.pack(e.layer, e.part, e.codec, e.offset, e.nbytes, e.raw_bytes, e.digest)
            for e in self.entries
        )
        text = bytearray((header + body).ljust(size, b"\0"))
        text[DIGEST_AT : HEADER.size] = xxh3_128(text)
        return bytes(text)


class Template:
    """Headers of one kind of frame. They differ only in identity, epoch, sequence and digests."""

    def __init__(
        self, space: bytes, group: int, shard: int, codec: int, entries: tuple[Entry, ...]
    ) -> None:
        size = sum(entry.nbytes for entry in entries)
        raw_bytes = sum(entry.raw_bytes for entry in entries)
        nothing = Frame(
            Identity(space, group, shard, bytes(32)), b"", codec, size, raw_bytes, 0, 0, ZERO_DIGEST,
            ZERO_DIGEST, entries,
        )  # fmt: skip
        self.payload_bytes = size
        self.raw_bytes = raw_bytes
        self._text = nothing.encode()
        self.total_bytes = nothing.total_bytes
        self.header_bytes = nothing.header_bytes

    def blank(self, raw_digest: bytes) -> bytearray:
        """Return a header without an identity: encode with it, then call `stamp`."""
        text = bytearray(self._text)
        text[RAW_DIGEST_AT : RAW_DIGEST_AT + DIGEST_BYTES] = raw_digest or ZERO_DIGEST
        return text


def stamp(text: bytearray, key: bytes, parent: bytes, epoch: int, sequence: int) -> None:
    """Set identity, epoch and sequence in an unsealed header."""
    FLAGS_FIELD.pack_into(text, FLAGS_AT, HAS_PARENT if parent else 0)
    TIME.pack_into(text, TIME_AT, epoch, sequence)
    NAMES.pack_into(text, NAMES_AT, key, parent)


def header_bytes(entries: int) -> int:
    """Return the size of a header with `entries` entries, in whole pages."""
    return pages(HEADER.size + entries * ENTRY.size)


def peek(page: bytes) -> int:
    """Return the length of the header that begins with this page. Verifies no digest."""
    if len(page) < HEADER.size or page[:4] != MAGIC:
        raise FrameError("no frame begins here")
    fields = HEADER.unpack_from(page)
    version, size, entries = fields[1], fields[3], fields[14]
    if version != VERSION:
        raise FrameError(f"frame version is {version}, this build reads {VERSION}")
    if entries > LIMIT_ENTRIES or size != header_bytes(entries):
        raise FrameError(f"a header of {size} bytes for {entries} entries")
    return int(size)


def decode(text: bytes, epoch: int | None = None) -> Frame:
    """Return the frame of these header pages. Raises FrameError if they are damaged or have another epoch."""
    size = peek(text)
    if len(text) < size:
        raise FrameError(f"header is incomplete: {len(text)} of {size} bytes")
    copy = bytearray(text[:size])
    copy[DIGEST_AT : HEADER.size] = ZERO_DIGEST
    if xxh3_128(copy) != text[DIGEST_AT : HEADER.size]:
        raise FrameError("header digest mismatch")
    (
        _, _, codec, _, flags, payload_bytes, raw_bytes, found_epoch, sequence, space, key, parent, group,
        shard, count, raw_digest, payload_digest, nonce, tag, lossy_generation, key_id, profile, _,
    ) = HEADER.unpack_from(text)  # fmt: skip
    if epoch is not None and found_epoch != epoch:
        raise FrameError("the frame is of another epoch: the segment was reused")
    if flags & ~FLAGS or payload_bytes > LIMIT_PAYLOAD_BYTES:
        raise FrameError(
            f"flags {flags:#x}, a payload of {payload_bytes} bytes: not of this version"
        )
    rows = text[HEADER.size : HEADER.size + count * ENTRY.size]
    entries = tuple(map(Entry._make, ENTRY.iter_unpack(rows)))
    frame = Frame(
        Identity(space, group, shard, key), parent if flags & HAS_PARENT else b"", codec, payload_bytes,
        raw_bytes, found_epoch, sequence, raw_digest, payload_digest, entries, nonce, tag, profile,
        lossy_generation, key_id,
    )  # fmt: skip
    check_entries(entries, payload_bytes, raw_bytes)
    return frame


def check_entries(entries: Sequence[Entry], payload_bytes: int, raw_bytes: int) -> None:
    """Raise FrameError unless the pieces are in order within the payload and make up the block."""
    at = 0
    for number, entry in enumerate(entries):
        if entry.offset < at or entry.offset + entry.nbytes > payload_bytes:
            raise FrameError(
                f"entry {number} is outside of the payload or overlaps the previous one"
            )
        at = entry.offset + entry.nbytes
    if sum(entry.raw_bytes for entry in entries) != raw_bytes:
        raise FrameError("the entries do not add up to the block")
