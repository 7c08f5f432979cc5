"""Specs for tests, and the content of their blocks."""

from __future__ import annotations

from typing import Any

from kvtier import Group, KvSpec


def spec_of(name: str = "test", **changes: Any) -> KvSpec:
    """Return the spec of a small model with blocks of 64 KiB."""
    fields: dict[str, Any] = {
        "model": name, "layers": 4, "kv_heads": 4, "head_dim": 64, "dtype": "bfloat16",
        "block_tokens": 16, "weights": "rev:1",
    }  # fmt: skip
    return KvSpec.dense(**(fields | changes))


def pattern(key: bytes, nbytes: int) -> bytes:
    """Return the content of the block with this key; blocks of other keys differ."""
    return (key * (nbytes // len(key) + 1))[:nbytes]


OTHER = {
    "dtype": "float16",
    "kind": "state",
    "strides": (1, 2),
}


def changed_value(struct: Any, name: str) -> Any:
    """Return another value of the same type."""
    value = getattr(struct, name)
    if name in OTHER:
        return OTHER[name]
    if name == "cache_groups":
        return (*value, Group(layers=1, kv_heads=1, head_dim=8))
    return value + 1 if isinstance(value, int) else value + "x"
