"""The writer's side of frames. `kvtier.frame` defines the layout, because workers of engines read frames
too; its names are also here."""

from __future__ import annotations

from kvtier.frame import (
    DIGEST_AT,
    DIGEST_BYTES,
    ENCRYPTED,
    ENTRY,
    FLAGS,
    FLAGS_AT,
    FLAGS_FIELD,
    GENERATION_AT,
    HAS_PARENT,
    HEADER,
    IDENTITY,
    KEY_ID_BYTES,
    LIMIT_ENTRIES,
    LIMIT_PAYLOAD_BYTES,
    LOSSY,
    MAGIC,
    NAMES,
    NAMES_AT,
    NONCE_BYTES,
    PAGE,
    RAW,
    RAW_DIGEST_AT,
    TIME,
    TIME_AT,
    VERSION,
    ZERO_DIGEST,
    Entry,
    Frame,
    Identity,
    check_entries,
    decode,
    header_bytes,
    pages,
    peek,
)

__all__ = [
    "DIGEST_AT",
    "DIGEST_BYTES",
    "ENCRYPTED",
    "ENTRY",
    "FLAGS",
    "FLAGS_AT",
    "FLAGS_FIELD",
    "GENERATION_AT",
    "HAS_PARENT",
    "HEADER",
    "IDENTITY",
    "KEY_ID_BYTES",
    "LIMIT_ENTRIES",
    "LIMIT_PAYLOAD_BYTES",
    "LOSSY",
    "MAGIC",
    "NAMES",
    "NAMES_AT",
    "NONCE_BYTES",
    "PAGE",
    "RAW",
    "RAW_DIGEST_AT",
    "TIME",
    "TIME_AT",
    "VERSION",
    "ZERO_DIGEST",
    "Entry",
    "Frame",
    "Identity",
    "Template",
    "check_entries",
    "decode",
    "header_bytes",
    "pages",
    "peek",
    "stamp",
]


class Template:
    """Headers of one kind of frame. They differ only in identity, epoch, sequence and digests."""

    def __init__(
        self,
        space: bytes,
        group: int,
        shard: int,
        codec: int,
        entries: tuple[Entry, ...],
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
