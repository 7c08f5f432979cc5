"""The format of index records: the value, then a digest over table, key and value.

Records that fail their digest are dropped. The index contains no data whose loss could return a wrong block:
a dropped record costs a hint, or the blocks of an open segment whose space no other segment describes."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

from kvtier_kernels import xxh3_128

FORMAT: Final = b"2"
DIGEST_BYTES: Final = 16
LENGTHS: Final = struct.Struct("<II")


def seal(table: bytes, key: bytes, value: bytes) -> bytes:
    """Return the value in the form that the index stores."""
    return value + _digest(table, key, value)


def unseal(table: bytes, key: bytes, text: bytes) -> bytes | None:
    """Return the value, or None if a bit of the record is wrong."""
    value = text[:-DIGEST_BYTES]
    is_valid = len(text) >= DIGEST_BYTES and text[-DIGEST_BYTES:] == _digest(table, key, value)
    return value if is_valid else None


def split(
    table: bytes, stored: Iterable[tuple[bytes, bytes]]
) -> tuple[list[tuple[bytes, bytes]], list[bytes]]:
    """Return the valid records of a table, and the keys of the damaged ones."""
    valid, damaged = [], []
    for key, text in stored:
        value = unseal(table, key, text)
        if value is None:
            damaged.append(key)
        else:
            valid.append((key, value))
    return valid, damaged


def _digest(table: bytes, key: bytes, value: bytes) -> bytes:
    # With the lengths, the digest also detects a byte that moved from the key to the value.
    return bytes(xxh3_128(LENGTHS.pack(len(table), len(key)) + table + key + value))
