"""No encoding: the payload is the block as it lay in memory."""

from __future__ import annotations

from kvtier.codec.frame import RAW, Entry
from kvtier.layout import KvSpec


def entries(spec: KvSpec, group: int) -> tuple[Entry, ...]:
    """One entry for each part of each layer; digests are still to come. What is opaque to us, and what can't
    be divided evenly, is one piece."""
    kind = spec.cache_groups[group]
    total = spec.group_block_bytes(group)
    parts = kind.parts if kind.kind != "state" else 1
    pieces = kind.layers * parts
    if kind.opaque_bytes or total % pieces:
        return (Entry(0, 0, RAW, 0, total, total),)
    size = total // pieces
    return tuple(
        Entry(number // parts, number % parts, RAW, number * size, size, size)
        for number in range(pieces)
    )
