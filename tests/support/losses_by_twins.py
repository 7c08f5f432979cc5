"""The results of lossy codecs by their reference models, with profiles and blocks for small models."""

from __future__ import annotations

import struct
import zlib
from functools import cache, lru_cache

import numpy as np

from kvtier import KvSpec
from kvtier.frame import (
    DIGEST_BYTES,
    GENERATION_AT,
    ONCE,
    RAW_DIGEST_AT,
    ZERO_DIGEST,
)
from kvtier_daemon.codec import block_parts, framing, grid
from kvtier_daemon.codec.base import Codec
from kvtier_daemon.codec.grid import Grid
from kvtier_daemon.codec.losses import CALIBRATED, FIXED, Loss, Losses
from kvtier_daemon.codec.profile import (
    CACHEGEN_LEVELS,
    ECSQ_LEVELS,
    Level,
    Profile,
    ProfilePart,
    Rope,
)
from kvtier_kernels import xxh3_128
from models.codecs import PROFILE_AT, decode, encode, inverses, profile_name, steps
from models.kernels import decode_quantized, encode_quantized, lossy, quantized

TABLE = bytes([4, 20, 60, 88, 60, 20, 3, 1])  # from -3 to 3, and the escape symbol
STEP = {"hi": 154, "mid": 158, "lo": 162}  # 0.6 of a standard deviation, and more
GROUP = 10
NORMAL = 100_003  # a prime number: no part of a large block equals the one before


@lru_cache(1024)
def block_of(key: bytes, spec: KvSpec) -> bytes:
    """Return plausible K and V that are different for each key."""
    name, count = zlib.crc32(key), spec.block_bytes // 2
    values = np.resize(np.roll(normal_values(), name % NORMAL), count)
    values[:32] ^= np.array([name >> at & 1 for at in range(32)], np.uint16)  # the lowest bits
    return values.tobytes()


@cache
def normal_values() -> np.ndarray[tuple[int, ...], np.dtype[np.uint16]]:
    """Values in bfloat16. Blocks and their parts begin at different ones: each number takes 10 ns to make."""
    chance = np.random.default_rng(NORMAL)
    return np.frombuffer(bf16(chance.standard_normal(NORMAL, np.float32)), np.uint16)


def bf16(values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> bytes:
    return (values.view(np.uint32) >> 16).astype("<u2").tobytes()


def floats_of(block: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return (np.frombuffer(block, "<u2").astype(np.uint32) << 16).view(np.float32)


def profile_of(spec: KvSpec, weights: str = "", step: int = 0, exact_dims: int = 0) -> Profile:
    """Return a profile of a model whose channels have equal statistics and whose K is rotated."""
    group = spec.cache_groups[0]
    heads, dim = group.kv_heads * group.shards, group.head_dim
    count = heads * (dim - exact_dims)
    turns = struct.pack(f"<{dim // 2}Q", *(int(2**64 / (7 + 9 * at)) for at in range(dim // 2)))

    def part(rope: int) -> ProfilePart:
        levels = [Level(bytes([STEP[name] + step] * count), TABLE) for name in ECSQ_LEVELS]
        return ProfilePart(
            heads=heads, dim=dim, exact_dims=exact_dims, rope=rope, means=bytes(4 * count),
            ecsq=tuple(levels), anchors=bytes([136] * count),
            cachegen=tuple(levels[: len(CACHEGEN_LEVELS)]),
        )  # fmt: skip

    layer = (part(0), part(-1)) if group.parts == 2 else (part(-1),)
    return Profile(
        model=spec.model, weights=weights, dtype=spec.dtype, tokens=1, group_tokens=GROUP,
        ropes=(Rope(turns, False, 1e4, "none"),), layers=(layer,) * group.layers,
    )  # fmt: skip


def once_lost(asked: str, spec: KvSpec, position: int, block: bytes, step: int = 0) -> bytes:
    """Encode and decode a block part by part, for one rank with the profile of `profile_of`."""
    found, at = b"", 0
    for number, entry in enumerate(block_parts.entries(spec, 0)):
        part = block[at : at + entry.raw_bytes]
        at += entry.raw_bytes
        if asked in FIXED:
            found += _fixed(FIXED[asked].number, grid.grids(spec, 0)[number], part)
        else:
            found += _calibrated(asked, spec, entry.part, position, part, step)
    return found


@cache
def once_lost_soon(asked: str, spec: KvSpec, position: int, block: bytes) -> bytes:
    """Do the same with the kernels."""
    loss = Losses([(spec.model, asked)], [profile_of(spec)]).find(spec)
    assert isinstance(loss, Loss)
    codec = loss.codec(0, 0)
    assert codec is not None
    into, back = bytearray(len(block)), bytearray(len(block))
    parts, lies = block_parts.entries(spec, 0), grid.grids(spec, 0)
    entries = encode(codec, block, parts, spec.dtype, into, lies, position)
    decode(codec, into, entries, spec.dtype, back)
    return bytes(back)


def _fixed(codec: int, lies: grid.Grid, part: bytes) -> bytes:
    shape = quantized.Grid(lies.rows, lies.channels, lies.head, lies.by_token)
    encoded = encode_quantized(codec, 0, part, shape)
    return part if encoded is None else decode_quantized(encoded, len(part))


def _calibrated(
    asked: str, spec: KvSpec, number: int, position: int, part: bytes, step: int
) -> bytes:
    name, level = CALIBRATED[asked]
    said = profile_of(spec, step=step)
    (rope,), of = said.ropes, said.layers[0][number]
    shape = lossy.Shape(of.heads, of.dim, of.exact_dims)
    one = said.level(name, 0, number, level)
    quantizer = lossy.Quantizer(*_both(one.exponents))
    means = np.frombuffer(of.means, "<f4")
    turned = (
        lossy.Rope(np.frombuffer(rope.turns, "<u8"), rope.interleaved) if of.rope >= 0 else None
    )
    names = ECSQ_LEVELS if name == "ecsq" else CACHEGEN_LEVELS
    place, table = names.index(level), list(one.table)
    if name == "ecsq":
        encoded = lossy.encode_ecsq(
            shape, place, means, quantizer, table, turned, 0, position, part
        )
        if encoded is None or len(encoded) >= len(part):
            return part
        return lossy.decode_ecsq(
            shape, place, means, quantizer, table, turned, 0, encoded, len(part)
        )
    anchors = lossy.Quantizer(*_both(of.anchors))
    encoded = lossy.encode_cachegen(shape, place, GROUP, anchors, quantizer, table, 0, part)
    if encoded is None or len(encoded) >= len(part):
        return part
    return lossy.decode_cachegen(
        shape, place, GROUP, anchors, quantizer, table, 0, encoded, len(part)
    )


def _both(exponents: bytes) -> tuple[lossy.Floats, lossy.Floats]:
    return np.array(steps(exponents), np.float32), np.array(inverses(exponents), np.float32)


def encode_lossy_by(
    codec: Codec,
    dtype: str,
    header: bytearray,
    block: bytes,
    into: bytearray,
    lies: list[Grid],
    position: int,
) -> int:
    """Do what `framing.encode_lossy` does with the methods of a codec."""
    if header[RAW_DIGEST_AT : RAW_DIGEST_AT + DIGEST_BYTES] not in (ZERO_DIGEST, xxh3_128(block)):
        return len(block)
    found = encode(codec, block, framing.entries_of(header), dtype, into, lies, position)
    nbytes, back = sum(entry.nbytes for entry in found), bytearray(len(block))
    if nbytes >= len(block):
        return len(block)
    decode(codec, memoryview(into)[:nbytes], found, dtype, back)
    framing.describe(header, codec, block, found)
    header[RAW_DIGEST_AT : RAW_DIGEST_AT + DIGEST_BYTES] = xxh3_128(back)
    header[PROFILE_AT : PROFILE_AT + DIGEST_BYTES] = profile_name(codec)
    header[GENERATION_AT] = ONCE
    return nbytes
