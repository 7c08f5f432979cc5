"""The parts of a raw block: where the bytes of each layer are."""

from __future__ import annotations

from kvtier.frame import RAW, Entry
from kvtier.layout import KvSpec

LIMIT_LAYERS, LIMIT_PARTS = 1 << 16, 1 << 8
LIMIT_PIECES = 4096  # their header has 33 pages


def entries(spec: KvSpec, group: int) -> tuple[Entry, ...]:
    """Return an entry without a digest for each part; a block that cannot be divided has one."""
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
