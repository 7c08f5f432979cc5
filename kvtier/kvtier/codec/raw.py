"""No encoding: the payload is the block as it lay in memory."""

from __future__ import annotations

from kvtier.codec import base
from kvtier.codec.frame import RAW, Entry
from kvtier.layout import KvSpec

CODEC: base.Codec = base.Native("raw", RAW)
LIMIT_LAYERS, LIMIT_PARTS = 1 << 16, 1 << 8
LIMIT_PIECES = 4096  # a header of 33 pages


def entries(spec: KvSpec, group: int) -> tuple[Entry, ...]:
    """One entry for each part of each layer; digests are still to come. What is opaque to us, and what can't
    be divided evenly, is one piece."""
    kind = spec.cache_groups[group]
    total = spec.group_block_bytes(group)
    parts = kind.parts if kind.kind != "state" else 1
    pieces = kind.layers * parts
    too_many = kind.layers > LIMIT_LAYERS or parts > LIMIT_PARTS or pieces > LIMIT_PIECES
    if kind.opaque_bytes or total % pieces or too_many:
        return (Entry(0, 0, RAW, 0, total, total),)
    size = total // pieces
    return tuple(
        Entry(number // parts, number % parts, RAW, number * size, size, size)
        for number in range(pieces)
    )
