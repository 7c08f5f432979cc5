"""Synthetic calibration profiles."""

from __future__ import annotations

import random
import struct

from kvtier_daemon.codec.profile import (
    CACHEGEN_LEVELS,
    ECSQ_LEVELS,
    Level,
    Profile,
    ProfilePart,
    Rope,
)


def table_of(chance: random.Random, symbols: int) -> bytes:
    """Return frequencies that sum to 256."""
    found = [1] * symbols
    for symbol in chance.choices(range(symbols), k=256 - symbols):
        found[symbol] += 1
    return bytes(found)


def part_of(
    chance: random.Random, heads: int, dim: int, rope: int, exact_dims: int = 0
) -> ProfilePart:
    channels = heads * (dim - exact_dims)

    def levels(count: int) -> tuple[Level, ...]:
        return tuple(
            Level(chance.randbytes(channels), table_of(chance, 2 * chance.randint(2, 16)))
            for _ in range(count)
        )

    means = [chance.gauss(0, 1) for _ in range(channels)]
    return ProfilePart(
        heads=heads, dim=dim, exact_dims=exact_dims, rope=rope, means=struct.pack(f"<{channels}f", *means),
        ecsq=levels(len(ECSQ_LEVELS)), anchors=chance.randbytes(channels),
        cachegen=levels(len(CACHEGEN_LEVELS)),
    )  # fmt: skip


def profile_of(seed: int = 0, layers: int = 2, heads: int = 2, dim: int = 6) -> Profile:
    """Return a profile with K and V in each layer but the last, which has a latent with exact dimensions."""
    chance = random.Random(seed)
    rope = Rope(chance.randbytes(8 * (dim // 2)), bool(seed % 2), 10_000.0, "default")
    both = [
        (part_of(chance, heads, dim, 0), part_of(chance, heads, dim, -1)) for _ in range(layers - 1)
    ]
    return Profile(
        model="made-up", weights="w", dtype="bfloat16", tokens=1000, group_tokens=16, ropes=(rope,),
        layers=(*both, (part_of(chance, 1, dim + 3, -1, 3),)),
    )  # fmt: skip
