"""The calibration profile: the measurements of a model that the lossy codecs need.

     ┌───────┬───────┬───────────────┐
   0 │  KVTp │version│   body bytes  │
     ├───────┴───────┴───────────────┤
  16 │            digest             │  SHA-256 of the body
     │                               │
     ├───────────────────────────────┤
  48 │ body ...                      │  msgpack: a Profile, and only as `encode` writes it
     └───────────────────────────────┘

Frames name a profile by the first 16 bytes of its digest. Arrays in the body are bytes: numbers of 4 or 8
bytes, little-endian, for the dims of each head, head by head. An exponent is a byte: the step of its channel
is 2^((exponent - 160) / 8), rounded to float32, from 2^-20 to almost 2^12; so all machines compute the same
step. A table contains the frequencies of an odd number of symbols, the middle one zero, and of the escape.
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
LIMIT_BODY_BYTES = 64 << 20
LIMIT_FILE_BYTES = HEADER.size + LIMIT_BODY_BYTES
LIMIT_LAYERS, LIMIT_HEADS, LIMIT_DIM, LIMIT_ROPES = 1024, 1024, 4096, 64
LIMIT_PARTS = 2
LIMIT_TEXT = 1024
LIMIT_MEAN = 2.0**32
LIMIT_GROUP_TOKENS = 256
LIMIT_SYMBOLS = 32  # including the escape
SCALE = 256

Name = Literal["ecsq", "cachegen"]


class Rope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How K is rotated: pair j of each head by position times `turns[j]`, where 2^64 is one turn.

    `theta` and `scaling` document the origin and have no effect.
    """

    turns: bytes  # 8 bytes per pair
    interleaved: bool  # pairs are dims 2j and 2j + 1; otherwise j and j + half of the rotated dims
    theta: float
    scaling: str

    @property
    def dims(self) -> int:
        return len(self.turns) // 4


class Level(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One level for one part: a step for each channel, and the frequencies of its symbols."""

    exponents: bytes
    table: bytes


class ProfilePart(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """K, V or a latent of one layer. The last `exact_dims` of each head are not encoded and have no channels
    here (the RoPE dims of MLA, which follow its latent)."""

    heads: int
    dim: int
    exact_dims: int
    rope: int  # index of the rope; -1: none
    means: bytes  # float32, before RoPE
    ecsq: tuple[Level, ...]
    anchors: bytes  # exponents of cachegen for anchor tokens
    cachegen: tuple[Level, ...]

    @property
    def channels(self) -> int:
        return self.heads * (self.dim - self.exact_dims)


class Profile(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The profile of one model. `weights` is as in `KvSpec`, or empty if it is unknown."""

    model: str
    weights: str
    dtype: str
    tokens: int  # that were measured
    group_tokens: int  # of cachegen: an anchor, and the tokens that are encoded relative to it
    ropes: tuple[Rope, ...]
    layers: tuple[tuple[ProfilePart, ...], ...]

    @property
    def name(self) -> bytes:
        """The name of the profile in frames."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).digest()[:NAME_BYTES]

    def level(self, codec: Name, layer: int, part: int, level: str) -> Level:
        """Return a level of this codec for this part. Raises ProfileError if the profile lacks it."""
        names = ECSQ_LEVELS if codec == "ecsq" else CACHEGEN_LEVELS
        if level not in names:
            raise ProfileError(f"{codec} has no level {level!r}; it has {', '.join(names)}")
        if not 0 <= layer < len(self.layers) or not 0 <= part < len(self.layers[layer]):
            raise ProfileError(f"the profile of {self.model} has no layer {layer}, part {part}")
        one = self.layers[layer][part]
        return (one.ecsq if codec == "ecsq" else one.cachegen)[names.index(level)]


def encode(profile: Profile) -> bytes:
    """Return the file of a profile. Raises ProfileError if `decode` would refuse it."""
    check(profile)
    body = msgspec.msgpack.encode(profile)
    if len(body) > LIMIT_BODY_BYTES:
        raise ProfileError(
            f"the profile has {len(body)} bytes, at most {LIMIT_BODY_BYTES} are possible"
        )
    return HEADER.pack(MAGIC, VERSION, len(body), hashlib.sha256(body).digest()) + body


def decode(text: bytes) -> Profile:
    """Return the profile in a file. Raises ProfileError if the file is damaged."""
    if len(text) < HEADER.size or text[:4] != MAGIC:
        raise ProfileError("not a calibration profile")
    _, version, size, digest = HEADER.unpack_from(text)
    if version != VERSION:
        raise ProfileError(f"profile version is {version}, this build reads {VERSION}")
    if size > LIMIT_BODY_BYTES or size != len(text) - HEADER.size:
        raise ProfileError(f"body of {size} bytes does not match a file of {len(text)}")
    body = text[HEADER.size :]
    if hashlib.sha256(body).digest() != digest:
        raise ProfileError("profile digest mismatch: the file is damaged")
    try:
        profile = msgspec.msgpack.decode(body, type=Profile)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProfileError(f"the profile's body: {error}") from error
    check(profile)
    # Frames name a profile by its bytes, so one profile must have one encoding.
    if msgspec.msgpack.encode(profile) != body:
        raise ProfileError("the profile's body is not in canonical form")
    return profile


def check(profile: Profile) -> None:
    """Raise ProfileError, which names the place, unless all of the profile can be used."""
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
            raise ProfileError(f"{where}.theta is not a number")
        if not rope.turns or len(rope.turns) % 8 or rope.dims > LIMIT_DIM:
            raise ProfileError(f"{where}.turns: {len(rope.turns)} bytes are not valid")
    for number, layer in enumerate(profile.layers):
        _within(f"layers[{number}]", len(layer), 1, LIMIT_PARTS)
        for index, part in enumerate(layer):
            _check_part(f"layers[{number}][{index}]", part, profile.ropes)


def _check_part(where: str, part: ProfilePart, ropes: tuple[Rope, ...]) -> None:
    _within(f"{where}.heads", part.heads, 1, LIMIT_HEADS)
    _within(f"{where}.dim", part.dim, 1, LIMIT_DIM)
    _within(f"{where}.exact_dims", part.exact_dims, 0, part.dim - 1)
    _within(f"{where}.rope", part.rope, -1, len(ropes) - 1)
    if part.rope >= 0 and ropes[part.rope].dims > part.dim - part.exact_dims:
        raise ProfileError(f"{where}: more dims are rotated than are encoded")
    if len(part.means) != 4 * part.channels or len(part.anchors) != part.channels:
        raise ProfileError(f"{where}: number of means or anchors does not match the channels")
    means = array("f", part.means)
    if sys.byteorder == "big":
        means.byteswap()
    if not all(-LIMIT_MEAN <= mean <= LIMIT_MEAN for mean in means):
        raise ProfileError(f"{where}.means: above {LIMIT_MEAN:g}, or not a number")
    for name, found, names in (
        ("ecsq", part.ecsq, ECSQ_LEVELS),
        ("cachegen", part.cachegen, CACHEGEN_LEVELS),
    ):
        if len(found) != len(names):
            raise ProfileError(f"{where}.{name}: {len(found)} levels, expected {len(names)}")
        for level, one in zip(names, found, strict=True):
            if len(one.exponents) != part.channels:
                raise ProfileError(
                    f"{where}.{name}-{level}: number of steps does not match the channels"
                )
            _check_table(f"{where}.{name}-{level}", one.table)


def _check_table(where: str, table: bytes) -> None:
    if len(table) % 2 or not 4 <= len(table) <= LIMIT_SYMBOLS:
        raise ProfileError(f"{where}: invalid table of {len(table)} symbols")
    if 0 in table or sum(table) != SCALE:
        raise ProfileError(
            f"{where}: frequencies sum to {sum(table)}, expected {SCALE}, without a 0"
        )


def _within(where: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ProfileError(f"{where}: {value} is outside {least} to {most}")
