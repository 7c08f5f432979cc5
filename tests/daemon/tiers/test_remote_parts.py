"""Parts of the remote tier, alone: what is known, objects, the places of a prefix, credentials."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path
from typing import cast

import pytest

from kvtier import Group, KvSpec, frame
from kvtier.errors import FrameError, TierError
from kvtier.frame import Identity
from kvtier_daemon.catalog.spaces import KnownSpace
from kvtier_daemon.codec.encryption import FrameCipher, UnknownKeyError
from kvtier_daemon.codec.table import BY_NAME
from kvtier_daemon.config import preflight
from kvtier_daemon.config.schema import RemoteConfig
from kvtier_daemon.tiers.remote.child import store_of
from kvtier_daemon.tiers.remote.driver import StoreDriver, credentials
from kvtier_daemon.tiers.remote.known import ABSENT_S, KnownObjects, names_of, place_mask
from kvtier_daemon.tiers.remote.messages import OpenPool, StoreFailedError
from kvtier_daemon.tiers.remote.objects import (
    Headers,
    decode,
    encode,
    identity_of,
    keys_of,
    object_name,
)
from kvtier_daemon.tiers.remote.places import Places, restorable
from kvtier_daemon.tiers.remote.questions import Questions
from kvtier_daemon.tiers.remote.space_in_buffer import BufferSpace
from kvtier_kernels import seal_frame, xxh3_128
from support.effort import effort
from support.specs import spec_of

SPACE = bytes(range(32))
OLD, NEW = bytes([1]) * 32, bytes([2]) * 32
CIPHER = FrameCipher.of([OLD], "t")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


# --- what is known ---------------------------------------------------------------------------------


def test_what_is_known_takes_16_bytes_a_block_and_is_bounded() -> None:
    known, blocks = KnownObjects(1 << 20, Clock()), 1 << 16
    assert known.memory_bytes() == 16 * blocks
    keys = random.Random(1).randbytes(32 * 4 * blocks)
    known.note(keys, True)
    assert known.memory_bytes() == 16 * blocks
    kept = sum(known.which(keys))
    assert kept == len(known) <= blocks
    assert kept > 0.9 * blocks
    few = KnownObjects(1 << 20, Clock())
    few.note(keys[: 32 * blocks // 2], True)
    assert sum(few.which(keys[: 32 * blocks // 2])) > 0.9 * blocks // 2


def test_absence_is_forgotten_and_presence_is_not() -> None:
    clock = Clock()
    known = KnownObjects(1 << 20, clock)
    here, gone, unknown = bytes([1]) * 32, bytes([2]) * 32, bytes([3]) * 32
    known.note(here, True)
    known.note(gone, False)
    assert [known.is_present(one) for one in (here, gone, unknown)] == [True, False, None]
    clock.now += 2 * ABSENT_S
    assert [known.is_present(one) for one in (here, gone, unknown)] == [True, None, None]
    assert known.present(here + gone) == 1


def test_an_object_that_is_being_deleted_is_absent_whatever_an_answer_says() -> None:
    known = KnownObjects(1 << 20, Clock())
    one, other = bytes([1]) * 32, bytes([2]) * 32
    known.note(one + other, True)
    known.begin_delete(one)
    known.begin_delete(one)
    for _ in range(2):
        known.note(one + other, True)
        assert (known.is_present(one), known.is_present(other)) == (False, True)
        known.end_delete(one)
    assert known.is_present(one) is False
    known.note(one, True)
    assert known.is_present(one)


def test_names_of_a_key_differ_by_space_group_and_shard() -> None:
    places = {(SPACE, 0, 0), (SPACE, 0, 1), (SPACE, 1, 0), (SPACE[::-1], 0, 0)}
    keys = os.urandom(3 * 32)
    names = {names_of(keys, place_mask(*place)) for place in places}
    assert len(names) == len(places)
    for name in names:
        assert names_of(keys[32:64], bytes(a ^ b for a, b in zip(keys, name, strict=True))[:32])


# --- objects ---------------------------------------------------------------------------------------


def block_of(spec: KvSpec, seed: int) -> bytes:
    """Numbers near zero, as a model has, so that codecs shrink them."""
    chance = random.Random(seed)
    return b"".join(
        bytes([chance.randrange(256), 0x3C + chance.randrange(2)])
        for _ in range(spec.block_bytes // 2)
    )


@pytest.mark.parametrize("cipher", [None, CIPHER], ids=["plain", "encrypted"])
@pytest.mark.parametrize("codec", ["raw", "fix4", "r32", "zstd"])
def test_an_object_gives_back_its_block(codec: str, cipher: FrameCipher | None) -> None:
    spec = spec_of(layers=2, kv_heads=1)
    headers, block = Headers(spec, SPACE, 0, 0), block_of(spec, 1)
    into = memoryview(bytearray(headers.most_bytes))
    of, digest = Identity(SPACE, 0, 0, bytes([9]) * 32), xxh3_128(block)
    args = (of.key, bytes(32), digest, memoryview(block), into)
    nbytes = encode(headers, BY_NAME[codec], cipher, *args)
    assert (nbytes < headers.most_bytes) == (codec != "raw")
    out = memoryview(bytearray(len(block)))
    assert decode(of, spec.dtype, cipher, into[:nbytes].toreadonly(), out) == digest
    assert out == block


@pytest.mark.parametrize("cipher", [None, CIPHER], ids=["plain", "encrypted"])
@pytest.mark.parametrize("codec", ["raw", "r32", "zstd"])
def test_no_changed_object_is_accepted(codec: str, cipher: FrameCipher | None) -> None:
    spec = spec_of(layers=1, kv_heads=1)
    headers, block, chance = Headers(spec, SPACE, 0, 0), block_of(spec, 2), random.Random(3)
    into = memoryview(bytearray(headers.most_bytes))
    of, digest = Identity(SPACE, 0, 0, bytes([9]) * 32), xxh3_128(block)
    args = (of.key, b"", digest, memoryview(block), into)
    nbytes = encode(headers, BY_NAME[codec], cipher, *args)
    good, out = bytes(into[:nbytes]), memoryview(bytearray(len(block)))

    def refused(text: bytes, identity: Identity = of) -> None:
        with pytest.raises(FrameError):
            decode(identity, spec.dtype, cipher, memoryview(text), out)

    for _ in range(effort(200, 2000, 20_000)):
        bad = bytearray(good)
        bad[chance.randrange(nbytes)] ^= 1 << chance.randrange(8)
        refused(bytes(bad))
    for size in (0, 1, 100, 4095, 4096, nbytes - 1):
        refused(good[:size])
    refused(good + b"\0")
    refused(bytes(nbytes))
    for other in (
        Identity(SPACE[::-1], 0, 0, of.key), Identity(SPACE, 1, 0, of.key),
        Identity(SPACE, 0, 1, of.key), Identity(SPACE, 0, 0, bytes(32)),
    ):  # fmt: skip
        refused(good, other)


@pytest.mark.parametrize("codec", ["raw", "r32", "zstd"])
def test_an_encrypted_object_and_its_memory_contain_nothing_of_the_block(codec: str) -> None:
    spec = spec_of(layers=1, kv_heads=1)
    headers, block = Headers(spec, SPACE, 0, 0), block_of(spec, 2)
    into = memoryview(bytearray(headers.most_bytes))
    args = (bytes(32), b"", xxh3_128(block), memoryview(block), into)
    before = []

    def nonce(nbytes: int) -> bytes:
        before.append(bytes(into))
        return bytes(nbytes)

    assert encode(headers, BY_NAME[codec], FrameCipher(CIPHER.keys, random=nonce), *args)
    assert before == [bytes(len(into))], "it is encoded elsewhere"
    encrypted = bytes(into)
    assert encode(headers, BY_NAME[codec], None, *args)
    plain, begin = bytes(into), headers.template.header_bytes
    runs = {plain[at : at + 8] for at in range(begin, len(plain) - 7)} - {bytes(8)}
    assert not any(encrypted[at : at + 8] in runs for at in range(begin, len(encrypted) - 7))
    assert xxh3_128(block) in plain and xxh3_128(block) not in encrypted


@pytest.mark.parametrize("codec", ["raw", "r32"])
def test_whoever_writes_to_the_bucket_without_the_key_makes_misses(codec: str) -> None:
    spec = spec_of(layers=1, kv_heads=1)
    headers, block = Headers(spec, SPACE, 0, 0), block_of(spec, 2)
    of, size = Identity(SPACE, 0, 0, bytes([9]) * 32), headers.template.header_bytes
    out = memoryview(bytearray(len(block)))

    def made(cipher: FrameCipher | None, key: bytes = of.key) -> bytearray:
        into = memoryview(bytearray(headers.most_bytes))
        args = (key, b"", xxh3_128(block), memoryview(block), into)
        return bytearray(into[: encode(headers, BY_NAME[codec], cipher, *args)])

    def loads(text: bytearray, cipher: FrameCipher | None = CIPHER) -> bool:
        decode(of, spec.dtype, cipher, memoryview(text), out)
        return out == block

    def forged(text: bytearray) -> bytearray:
        """With the digests of what it is now."""
        header = bytearray(text[:size])
        seal_frame(header, text[size:])
        return header + text[size:]

    assert loads(forged(made(CIPHER)))
    other = made(CIPHER, bytes(32))
    frame.NAMES.pack_into(other, frame.NAMES_AT, of.key, bytes(32))
    with pytest.raises(FrameError):
        loads(forged(other))
    for at in (size, -1, frame.RAW_DIGEST_AT, frame.GENERATION_AT - 1):
        text = made(CIPHER)
        text[at] ^= 1
        with pytest.raises(FrameError):
            loads(forged(text))
    with pytest.raises(FrameError, match="not encrypted"):
        loads(made(None))
    with pytest.raises(FrameError, match="damaged, or of another block"):
        loads(made(FrameCipher.of([OLD], "u")))
    # A cipher that only decrypts accepts both.
    reader = FrameCipher.of([OLD], "t", encrypts=False)
    assert loads(made(None), reader) and loads(made(CIPHER), reader)
    assert made(reader)[size:] == made(None)[size:]


def test_the_first_key_encrypts_and_all_decrypt() -> None:
    spec = spec_of(layers=1, kv_heads=1)
    headers, block = Headers(spec, SPACE, 0, 0), block_of(spec, 2)
    of, out = Identity(SPACE, 0, 0, bytes([9]) * 32), memoryview(bytearray(len(block)))
    rotated, new = FrameCipher.of([NEW, OLD], "t"), FrameCipher.of([NEW], "t")

    def accepted(writer: FrameCipher, reader: FrameCipher | None) -> bool:
        into = memoryview(bytearray(headers.most_bytes))
        args = (of.key, b"", xxh3_128(block), memoryview(block), into)
        nbytes = encode(headers, BY_NAME["r32"], writer, *args)
        try:
            decode(of, spec.dtype, reader, into[:nbytes], out)
        except UnknownKeyError:
            return False
        return out == block

    assert accepted(CIPHER, rotated) and accepted(rotated, rotated) and accepted(rotated, new)
    assert not accepted(rotated, CIPHER) and not accepted(CIPHER, new)
    assert not accepted(CIPHER, None)


def test_a_block_that_was_overwritten_in_memory_is_not_shared() -> None:
    spec = spec_of(layers=1, kv_heads=1)
    headers, block = Headers(spec, SPACE, 0, 0), block_of(spec, 2)
    into = memoryview(bytearray(headers.most_bytes))
    for codec in ("raw", "r32"):
        for digest in (bytes(16), xxh3_128(block[::-1])):
            args = (bytes(32), b"", digest, memoryview(block), into)
            assert encode(headers, BY_NAME[codec], None, *args) == 0
            assert encode(headers, BY_NAME[codec], CIPHER, *args) == 0


def test_names_of_objects_are_parsed_and_others_are_refused() -> None:
    of = Identity(SPACE, 3, 7, bytes([5]) * 32)
    assert identity_of(object_name(of)) == of
    for name in (
        "",
        "v1",
        "v1/ab/cd-0-0",
        "x/y/z",
        object_name(of) + "x",
        "v2" + object_name(of)[2:],
    ):
        assert identity_of(name) is None


def test_the_keys_of_a_list_are_those_of_its_names() -> None:
    chance = random.Random(4)
    good = [
        Identity(SPACE, chance.randrange(2), chance.randrange(3), chance.randbytes(32))
        for _ in range(300)
    ]
    name = object_name(good[0])
    bad = [
        "", "v1", f"x{name}", f"{name}x", name[:-1], name.replace("-", "_"), name.upper(), f"{name}/a",
        name.replace(SPACE.hex(), bytes(32).hex()), name[:80] + " " + name[81:], f"{name[:-1]}256",
        name.replace("v1", "v2"), f"v1/{SPACE.hex()}/{'g' * 64}-0-0",
    ]  # fmt: skip
    names = [f"fleet/{object_name(one)}" for one in good[:150]] + [
        object_name(one) for one in good[150:]
    ]
    mixed = names + bad
    chance.shuffle(mixed)
    expected: dict[tuple[int, int], set[bytes]] = {}
    for one in map(identity_of, mixed):
        if one is not None and one.space == SPACE:
            expected.setdefault((one.group, one.shard), set()).add(one.key)
    found = {
        place: {keys[at : at + 32] for at in range(0, len(keys), 32)}
        for place, keys in keys_of(SPACE, mixed).items()
    }
    assert found == expected
    assert sum(map(len, found.values())) == len(good)
    assert not keys_of(SPACE, bad)


# --- which blocks a prefix needs -------------------------------------------------------------------


def test_a_window_needs_its_last_blocks_only() -> None:
    spec = KvSpec.groups(
        [
            Group(layers=1, kv_heads=1, head_dim=8),
            Group(kind="window", layers=1, kv_heads=1, head_dim=8, window_tokens=32),
        ],
        model="m", dtype="bfloat16", block_tokens=16, weights="w",
    )  # fmt: skip
    space = KnownSpace(0, SPACE, spec, spec.places, (256, 256))
    assert Places(1000).of(space) == []
    places = Places(1 << 20).of(space)
    assert restorable(space, places, [b"\1\1\1\1", b"\0\0\1\1"], 4) == 4
    assert restorable(space, places, [b"\1\1\1\1", b"\1\1\0\1"], 4) == 2
    assert restorable(space, places, [b"\1\1\0\1", b"\1\1\1\1"], 4) == 2
    assert restorable(space, places, [b"\1\1\1\1", b"\0\1\0\0"], 4) == 0
    assert restorable(space, places, [b"\0\1", b"\1\1"], 0) == 0


def test_an_object_in_doubt_can_be_read_and_is_written_again() -> None:
    known = KnownObjects(1 << 20, Clock())
    other = bytes(32)
    known.note(SPACE + other, True)
    assert known.good(SPACE + other) == b"\1\1"
    assert not known.doubt(SPACE)
    assert known.which(SPACE + other) == b"\1\1"
    assert known.good(SPACE + other) == b"\0\1"
    assert known.doubt(SPACE), "it broke twice"
    known.trust(SPACE)
    assert known.good(SPACE + other) == b"\1\1"


def test_nothing_is_asked_about_blocks_that_a_smaller_buffer_does_not_hold() -> None:
    spec = spec_of("asked")
    space = KnownSpace(0, SPACE, spec, spec.places, (spec.block_bytes,))
    places = Places(1 << 30)
    assert places.of(space)

    async def ask() -> None:
        no_driver = cast(StoreDriver, None)
        questions = Questions(no_driver, KnownObjects(1 << 20, Clock()), places)
        places.limit(1)  # a reload, while the question waits
        await questions.find(space, bytes(32))

    asyncio.run(ask())


def test_the_buffer_is_divided_without_overlap_and_becomes_one_hole_again() -> None:
    space, chance, taken = BufferSpace(8192, 1 << 20), random.Random(5), dict[int, int]()
    for _ in range(2000):
        if taken and chance.random() < 0.5:
            at = chance.choice(list(taken))
            space.give(at, taken.pop(at))
        elif (at := space.take(size := chance.randrange(1, 100_000))) is not None:
            end = at + -(-size // 4096) * 4096
            assert at >= 8192 and end <= 8192 + (1 << 20)
            for other, nbytes in taken.items():
                assert end <= other or other + -(-nbytes // 4096) * 4096 <= at
            taken[at] = size
    for at, size in taken.items():
        space.give(at, size)
    assert (space.used, space.take(1 << 20)) == (0, 8192)


# --- credentials -----------------------------------------------------------------------------------


def test_credentials_come_from_a_file_that_only_its_owner_can_read(tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    config = RemoteConfig(bucket="b", credentials=file)
    for text, problem in (
        (None, "No such file"),
        ("[default]\naws_access_key_id = a\n", "needs aws_access_key_id and"),
        ("nothing", "not a credentials file"),
        ("[default]\naws_access_key_id = a\naws_secret_access_key = s%\n", ""),
    ):
        if text is not None:
            file.write_text(text)
            file.chmod(0o600)
        if problem:
            with pytest.raises(TierError, match=problem):
                credentials(config)
    assert credentials(config) == {"access_key_id": "a", "secret_access_key": "s%"}
    file.chmod(0o640)
    with pytest.raises(TierError, match="chmod 600"):
        credentials(config)


def test_credentials_of_the_service_manager_are_used_without_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RemoteConfig(bucket="b")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert credentials(config) == {}
    file = tmp_path / "kvtier-remote"
    file.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    file.chmod(0o400)
    assert credentials(config)["access_key_id"] == "a"


def test_a_missing_library_of_the_client_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    request = OpenPool("127.0.0.1:1", "p", "P2PHANDSHAKE", "tcp", "", "", 0, 1.0)
    # None in sys.modules makes an import fail, as the missing library does.
    monkeypatch.setitem(sys.modules, "kvtier_daemon.tiers.remote.mooncake", None)
    monkeypatch.setattr(preflight, "VERBS", "libnone.so.1")
    with pytest.raises(StoreFailedError, match=r"libnone\.so\.1, which Mooncake's client needs"):
        store_of(request, memoryview(bytearray(1)))
