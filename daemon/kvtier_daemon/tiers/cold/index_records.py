"""How the index encodes a record: the value, then a digest over table, key and value.

A record that fails its digest is dropped. Nothing in the index is the only copy of what promise 1 needs: a
dropped record costs a hint, or the blocks of an open segment whose space no other segment describes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

from kvtier_kernels import xxh3_128

FORMAT: Final = b"2"
DIGEST_BYTES: Final = 16
LENGTHS: Final = struct.Struct("<II")


def seal(table: bytes, key: bytes, value: bytes) -> bytes:
    """The value as the index stores it."""
    return value + _digest(table, key, value)


def unseal(table: bytes, key: bytes, text: bytes) -> bytes | None:
    """The value; None where a bit of the record is wrong."""
    value = text[:-DIGEST_BYTES]
    sound = len(text) >= DIGEST_BYTES and text[-DIGEST_BYTES:] == _digest(table, key, value)
    return value if sound else None


def split(
    table: bytes, stored: Iterable[tuple[bytes, bytes]]
) -> tuple[list[tuple[bytes, bytes]], list[bytes]]:
    """The sound records of a table, and the keys of the others."""
    sound, damaged = [], []
    for key, text in stored:
        value = unseal(table, key, text)
        if value is None:
            damaged.append(key)
        else:
            sound.append((key, value))
    return sound, damaged


def _digest(table: bytes, key: bytes, value: bytes) -> bytes:
    # The lengths keep a byte that moves from the key to the value from going unnoticed.
    return bytes(xxh3_128(LENGTHS.pack(len(table), len(key)) + table + key + value))
