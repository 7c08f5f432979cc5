"""The calibration profile: what the lossy codecs know of a model before they see its K and V.

     ┌───────┬───────┬───────────────┐
   0 │  KVTp │version│   body bytes  │
     ├───────┴───────┴───────────────┤
  16 │            digest             │  SHA-256 of the body
     │                               │
     ├───────────────────────────────┤
  48 │ body ...                      │  msgpack: a Profile, and only as `encode` writes it
     └───────────────────────────────┘

Frames name a profile by the first 16 bytes of its digest. Arrays in the body are bytes: numbers of 4 or 8
bytes, little-endian, for the dims of each head, head after head. An exponent is a byte: the step of its
channel is 2^((exponent - 160) / 8), rounded to float32, from 2^-20 to nearly 2^12; so nobody computes a step
otherwise than others do. A table has the frequencies of an odd number of symbols, the middle one zero, and of
the escape.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from math import isfinite
from typing import Literal

import msgspec

from kvtier.errors import ProfileError

MAGIC = b"KVTp"
VERSION = 1
HEADER = struct.Struct("<4sIQ32s")
NAME_BYTES = 16
ECSQ_LEVELS = ("hi", "mid", "lo")
CACHEGEN_LEVELS = ("hi", "mid", "lo")
EXPONENT_BIAS, EXPONENTS_AN_OCTAVE = 160, 8
LIMIT_BODY_BYTES = 64 << 20
LIMIT_FILE_BYTES = HEADER.size + LIMIT_BODY_BYTES
LIMIT_LAYERS, LIMIT_HEADS, LIMIT_DIM, LIMIT_ROPES = 1024, 1024, 4096, 64
LIMIT_PARTS = 2
LIMIT_TEXT = 1024
LIMIT_MEAN = 2.0**32
LIMIT_GROUP_TOKENS = 256
LIMIT_SYMBOLS = 32  # the escape among them
SCALE = 256

# 2^(i/8), rounded to float32: all that an exponent's step needs beside a power of two.
EIGHTHS = tuple(
    float.fromhex(text)
    for text in (
        "0x1p+0", "0x1.172b84p+0", "0x1.306fep+0", "0x1.4bfdaep+0",
        "0x1.6a09e6p+0", "0x1.8ace54p+0", "0x1.ae89fap+0", "0x1.d5818ep+0",
    )
)  # fmt: skip

Name = Literal["ecsq", "cachegen"]


class Rope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How K is rotated: pair j of each head by position times `turns[j]`, where 2^64 are one turn.

    `theta` and `scaling` say where that came from and decide nothing.
    """

    turns: bytes  # 8 bytes a pair
    interleaved: bool  # pairs are dims 2j and 2j + 1; else j and j + half of all that are rotated
    theta: float
    scaling: str

    @property
    def dims(self) -> int:
        return len(self.turns) // 4


class Level(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one level makes of one part: a step for each channel, and the frequencies of its symbols."""

    exponents: bytes
    table: bytes


class Part(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """K, V or a latent part of one layer. The last `exact_dims` of each head are not encoded, and have no
    channels here (what MLA keeps of RoPE beside its latent)."""

    heads: int
    dim: int
    exact_dims: int
    rope: int  # which of the ropes; -1 for none
    means: bytes  # float32, before RoPE
    ecsq: tuple[Level, ...]
    anchors: bytes  # cachegen's exponents for anchor tokens
    cachegen: tuple[Level, ...]

    @property
    def channels(self) -> int:
        return self.heads * (self.dim - self.exact_dims)


class Profile(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One model's. `weights` is as in `KvSpec`, or empty where nobody said it."""

    model: str
    weights: str
    dtype: str
    tokens: int  # how many it was measured on
    group_tokens: int  # cachegen: an anchor, and those that are told from it
    ropes: tuple[Rope, ...]
    layers: tuple[tuple[Part, ...], ...]

    @property
    def name(self) -> bytes:
        """What frames name it by."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).digest()[:NAME_BYTES]

    def level(self, codec: Name, layer: int, part: int, level: str) -> Level:
        """What this codec's level is for that part; raises ProfileError if there is none."""
        names = ECSQ_LEVELS if codec == "ecsq" else CACHEGEN_LEVELS
        if level not in names:
            raise ProfileError(f"{codec} has levels {', '.join(names)}, and no {level!r}")
        if not 0 <= layer < len(self.layers) or not 0 <= part < len(self.layers[layer]):
            raise ProfileError(f"the profile of {self.model} has no layer {layer}, part {part}")
        one = self.layers[layer][part]
        return (one.ecsq if codec == "ecsq" else one.cachegen)[names.index(level)]


def step_of(exponent: int) -> float:
    """The step of an exponent; exactly a float32."""
    octaves, eighth = divmod(exponent - EXPONENT_BIAS, EXPONENTS_AN_OCTAVE)
    return EIGHTHS[eighth] * 2.0**octaves


def inverse_of(exponent: int) -> float:
    """What an encoder multiplies by; exactly a float32, and not quite the step's inverse."""
    return step_of(2 * EXPONENT_BIAS - exponent)


def steps(exponents: bytes) -> array[float]:
    """The steps of these exponents, as float32."""
    return array("f", map(step_of, exponents))


def inverses(exponents: bytes) -> array[float]:
    """What an encoder multiplies by for these exponents, as float32."""
    return array("f", map(inverse_of, exponents))


def encode(profile: Profile) -> bytes:
    """The file of a profile. Raises ProfileError where `decode` would refuse it."""
    check(profile)
    body = msgspec.msgpack.encode(profile)
    if len(body) > LIMIT_BODY_BYTES:
        raise ProfileError(f"a profile of {len(body)} bytes: at most {LIMIT_BODY_BYTES}")
    return HEADER.pack(MAGIC, VERSION, len(body), hashlib.sha256(body).digest()) + body


def decode(text: bytes) -> Profile:
    """The profile of a file. Raises ProfileError if a bit of it is wrong."""
    if len(text) < HEADER.size or text[:4] != MAGIC:
        raise ProfileError("no calibration profile")
    _, version, size, digest = HEADER.unpack_from(text)
    if version != VERSION:
        raise ProfileError(f"a profile of version {version}: this is {VERSION}")
    if size > LIMIT_BODY_BYTES or size != len(text) - HEADER.size:
        raise ProfileError(f"a body of {size} bytes in a file of {len(text)}")
    body = text[HEADER.size :]
    if hashlib.sha256(body).digest() != digest:
        raise ProfileError("the profile's digest is not that of its bytes")
    try:
        profile = msgspec.msgpack.decode(body, type=Profile)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProfileError(f"the profile's body: {error}") from error
    check(profile)
    # Frames name profiles by their bytes, so one profile must not have two texts.
    if msgspec.msgpack.encode(profile) != body:
        raise ProfileError("the profile's body is not as it would be written")
    return profile


def check(profile: Profile) -> None:
    """Raises ProfileError, naming the place, unless everything in it can be used as it is."""
    for name in ("model", "weights", "dtype"):
        _within(name, len(getattr(profile, name).encode(errors="replace")), 0, LIMIT_TEXT)
    _within("tokens", profile.tokens, 0, 1 << 62)
    _within("group_tokens", profile.group_tokens, 1, LIMIT_GROUP_TOKENS)
    _within("ropes", len(profile.ropes), 0, LIMIT_ROPES)
    _within("layers", len(profile.layers), 1, LIMIT_LAYERS)
    for number, rope in enumerate(profile.ropes):
        where = f"ropes[{number}]"
        _within(f"{where}.scaling", len(rope.scaling.encode(errors="replace")), 0, LIMIT_TEXT)
        if not isfinite(rope.theta):
            raise ProfileError(f"{where}.theta is no number")
        if not rope.turns or len(rope.turns) % 8 or rope.dims > LIMIT_DIM:
            raise ProfileError(f"{where}.turns: {len(rope.turns)} bytes")
    for number, layer in enumerate(profile.layers):
        _within(f"layers[{number}]", len(layer), 1, LIMIT_PARTS)
        for index, part in enumerate(layer):
            _check_part(f"layers[{number}][{index}]", part, profile.ropes)


def _check_part(where: str, part: Part, ropes: tuple[Rope, ...]) -> None:
    _within(f"{where}.heads", part.heads, 1, LIMIT_HEADS)
    _within(f"{where}.dim", part.dim, 1, LIMIT_DIM)
    _within(f"{where}.exact_dims", part.exact_dims, 0, part.dim - 1)
    _within(f"{where}.rope", part.rope, -1, len(ropes) - 1)
    if part.rope >= 0 and ropes[part.rope].dims > part.dim - part.exact_dims:
        raise ProfileError(f"{where}: more dims are rotated than are encoded")
    if len(part.means) != 4 * part.channels or len(part.anchors) != part.channels:
        raise ProfileError(f"{where}: means or anchors for another number of channels")
    means = array("f", part.means)
    if sys.byteorder == "big":
        means.byteswap()
    if not all(-LIMIT_MEAN <= mean <= LIMIT_MEAN for mean in means):
        raise ProfileError(f"{where}.means: more than {LIMIT_MEAN:g}, or no number")
    for name, found, names in (
        ("ecsq", part.ecsq, ECSQ_LEVELS),
        ("cachegen", part.cachegen, CACHEGEN_LEVELS),
    ):
        if len(found) != len(names):
            raise ProfileError(f"{where}.{name}: {len(found)} levels, not {len(names)}")
        for level, one in zip(names, found, strict=True):
            if len(one.exponents) != part.channels:
                raise ProfileError(f"{where}.{name}-{level}: steps for another number of channels")
            _check_table(f"{where}.{name}-{level}", one.table)


def _check_table(where: str, table: bytes) -> None:
    if len(table) % 2 or not 4 <= len(table) <= LIMIT_SYMBOLS:
        raise ProfileError(f"{where}: a table of {len(table)} symbols")
    if 0 in table or sum(table) != SCALE:
        raise ProfileError(f"{where}: frequencies that sum to {sum(table)}, or one of 0")


def _within(where: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ProfileError(f"{where}: {value}; {least} to {most} are possible")
