"""Calibration profiles: a file is read as it was written, or refused."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvtier.errors import ProfileError
from kvtier_daemon.codec import profile as files
from kvtier_daemon.codec.profile import HEADER, Profile, decode, encode
from models.codecs import inverse_of, inverses, step_of, steps
from support.effort import effort
from support.profiles import profile_of


def sealed(body: bytes) -> bytes:
    """A file with a valid digest over this body."""
    return HEADER.pack(files.MAGIC, files.VERSION, len(body), hashlib.sha256(body).digest()) + body


@pytest.mark.parametrize("seed", range(4))
def test_a_profile_is_read_as_it_was_written(seed: int) -> None:
    profile = profile_of(seed)
    text = encode(profile)
    assert decode(text) == profile
    assert profile.name == text[16:32] == hashlib.sha256(text[48:]).digest()[:16]


def test_any_change_of_a_profile_changes_its_name() -> None:
    profile = profile_of()
    more = msgspec.structs.replace(profile, tokens=profile.tokens + 1)
    assert more.name != profile.name


@pytest.mark.parametrize("seed", range(3))
def test_every_changed_byte_is_detected(seed: int) -> None:
    text = bytearray(encode(profile_of(seed)))
    for at in range(len(text)):
        text[at] ^= 1 << at % 8
        with pytest.raises(ProfileError):
            decode(bytes(text))
        text[at] ^= 1 << at % 8
    for end in (0, 3, HEADER.size - 1, HEADER.size, len(text) - 1):
        with pytest.raises(ProfileError):
            decode(bytes(text[:end]))
    with pytest.raises(ProfileError):
        decode(bytes(text) + b"\0")


def test_a_body_with_a_valid_digest_is_refused_or_is_the_only_text_of_its_profile() -> None:
    """An attacker who can write a file can write its digest. A profile that is accepted must be usable,
    and have only one possible text."""
    chance = random.Random(7)
    read = 0
    rounds = effort(800, 3000, 3000)
    for number in range(rounds):
        body = bytearray(encode(profile_of(number % 4))[HEADER.size :])
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(body)) if chance.random() < 0.5 else chance.randrange(64)
            if chance.random() < 0.6:
                body[at] = chance.choice([0, 1, 0x7F, 0x80, 0xC0, 0xFF, chance.randrange(256)])
            elif chance.random() < 0.5:
                del body[at : at + chance.randint(1, 9)]
            else:
                body[at:at] = chance.randbytes(chance.randint(1, 9))
        try:
            found = decode(sealed(bytes(body)))
        except ProfileError:
            continue
        read += 1
        assert encode(found) == sealed(bytes(body))
        for layer, parts in enumerate(found.layers):
            for part in range(len(parts)):
                table = found.level("ecsq", layer, part, "mid").table
                assert sum(table) == 256 and min(table) > 0 and len(table) <= 32
    assert rounds // 30 < read < rounds - rounds // 30  # both results occur


def part_with(**changes: Any) -> Callable[[Profile], Profile]:
    def change(profile: Profile) -> Profile:
        first = msgspec.structs.replace(profile.layers[0][0], **changes)
        layers = ((first, *profile.layers[0][1:]), *profile.layers[1:])
        return msgspec.structs.replace(profile, layers=layers)

    return change


def table_with(table: bytes) -> Callable[[Profile], Profile]:
    def change(profile: Profile) -> Profile:
        levels = profile.layers[0][0].ecsq
        first = msgspec.structs.replace(levels[0], table=table)
        return part_with(ecsq=(first, *levels[1:]))(profile)

    return change


def whole_with(**changes: Any) -> Callable[[Profile], Profile]:
    return lambda profile: msgspec.structs.replace(profile, **changes)


def rope_with(**changes: Any) -> Callable[[Profile], Profile]:
    return lambda profile: msgspec.structs.replace(
        profile, ropes=(msgspec.structs.replace(profile.ropes[0], **changes),)
    )


MEAN = struct.pack("<f", 1.0)
WRONG: list[tuple[str, Callable[[Profile], Profile]]] = [
    ("model", whole_with(model="m" * 1025)),
    ("group_tokens", whole_with(group_tokens=0)),
    ("group_tokens", whole_with(group_tokens=257)),
    ("layers", whole_with(layers=())),
    (r"layers\[0\]", whole_with(layers=((),))),
    (r"ropes\[0\].turns", rope_with(turns=bytes(12))),
    (r"ropes\[0\].turns", rope_with(turns=b"")),
    (r"ropes\[0\].theta", rope_with(theta=float("nan"))),
    (r"ropes\[1\].turns", lambda p: whole_with(
        ropes=(*p.ropes, files.Rope(bytes(8 * 2049), False, 1.0, "")))(p)),
    ("rotated", rope_with(turns=bytes(8 * 4))),
    (r"layers\[0\]\[0\].rope", part_with(rope=1)),
    (r"layers\[0\]\[0\].rope", part_with(rope=-2)),
    (r"layers\[0\]\[0\].heads", part_with(heads=0)),
    (r"layers\[0\]\[0\].exact_dims", part_with(exact_dims=6)),
    ("means or anchors", part_with(heads=3)),
    ("means or anchors", part_with(anchors=bytes(11))),
    (r"layers\[0\]\[0\].means", part_with(means=MEAN * 11 + struct.pack("<f", float("nan")))),
    (r"layers\[0\]\[0\].means", part_with(means=MEAN * 11 + struct.pack("<f", 5e9))),
    ("2 levels", lambda p: part_with(ecsq=p.layers[0][0].ecsq[:2])(p)),
    ("4 levels", lambda p: part_with(cachegen=p.layers[0][0].cachegen + p.layers[0][0].ecsq[:1])(p)),
    ("table of 5", table_with(bytes([1, 1, 1, 1, 252]))),
    ("table of 34", table_with(bytes([1] * 33 + [223]))),
    ("table of 2", table_with(bytes([128, 128]))),
    ("sum to 255", table_with(bytes([1, 1, 1, 252]))),
    ("without a 0", table_with(bytes([0, 2, 2, 252]))),
    ("does not match the channels", lambda p: part_with(
        ecsq=(files.Level(bytes(3), bytes([64] * 4)), *p.layers[0][0].ecsq[1:]))(p)),
]  # fmt: skip


@pytest.mark.parametrize(("place", "change"), WRONG, ids=[str(n) for n in range(len(WRONG))])
def test_an_unusable_field_is_refused_by_name(
    place: str, change: Callable[[Profile], Profile]
) -> None:
    wrong = change(profile_of())
    for refusing in (lambda: encode(wrong), lambda: decode(sealed(msgspec.msgpack.encode(wrong)))):
        with pytest.raises(ProfileError, match=place):
            refusing()


def test_a_second_text_of_the_same_profile_is_refused() -> None:
    body = encode(profile_of())[HEADER.size :]
    assert body[0] == 0x97  # 7 fields; the longer form of msgpack encodes the same
    with pytest.raises(ProfileError, match="not in canonical form"):
        decode(sealed(b"\xdc\x00\x07" + body[1:]))


def test_a_body_longer_than_the_limit_is_not_even_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = encode(profile_of())
    monkeypatch.setattr(files, "LIMIT_BODY_BYTES", len(text) - HEADER.size - 1)
    with pytest.raises(ProfileError, match="bytes"):
        decode(text)
    with pytest.raises(ProfileError, match="at most"):
        encode(profile_of())


def test_a_deep_body_is_refused() -> None:
    with pytest.raises(ProfileError):
        decode(sealed(b"\x91" * 100_000))


def test_steps_are_float32_and_increase_by_an_eighth_of_an_octave() -> None:
    for exponent in range(256):
        exact = 2 ** ((exponent - 160) / 8)
        for found, wanted in (
            (step_of(exponent), exact),
            (inverse_of(exponent), 1 / exact),
        ):
            assert found == struct.unpack("<f", struct.pack("<f", wanted))[0]
    assert steps(bytes([160, 168, 152])).tolist() == [1, 2, 0.5]
    assert inverses(bytes([160, 168, 152])).tolist() == [1, 0.5, 2]


def test_unknown_levels_are_named() -> None:
    profile = profile_of()
    assert profile.level("ecsq", 0, 1, "lo") is profile.layers[0][1].ecsq[2]
    assert profile.level("cachegen", 0, 0, "mid") is profile.layers[0][0].cachegen[1]
    with pytest.raises(ProfileError, match="no level 'ultra'"):
        profile.level("ecsq", 0, 0, "ultra")
    for layer, part in ((2, 0), (-1, 0), (1, 1), (0, -1)):
        with pytest.raises(ProfileError, match=f"no layer {layer}, part {part}"):
            profile.level("ecsq", layer, part, "hi")
