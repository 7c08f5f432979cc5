"""Encrypted frames: the kernels compared with another library, and every change of a frame is detected."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from conformance.codec_tests import kv
from kvtier.errors import FrameError
from kvtier.frame import (
    ELEMENTS,
    ENCRYPTED,
    ENTRY,
    HEADER,
    PAGE,
    RAW,
    Entry,
    Identity,
    Template,
    decode,
    stamp,
)
from kvtier_daemon.codec import block_parts, encryption, framing
from kvtier_daemon.codec.encryption import FrameCipher, UnknownKeyError
from kvtier_daemon.codec.table import BY_NAME
from kvtier_kernels import FrameKeys, decode_frame, seal_frame, xxh3_128
from models.kernels import encryption as model
from support.effort import effort
from support.specs import spec_of

FIRST, SECOND = bytes(range(32)), bytes(range(1, 33))
NAME = Identity(b"s" * 32, 3, 1, b"k" * 32)
NONCE = b"n" * 12
DTYPE = "bfloat16"
SIZES = (16, 1000, PAGE, (1 << 18) - 1, (1 << 18) + 17, 600_000)


def one_part(size: int, name: Identity = NAME, digest: bytes = b"") -> bytearray:
    """The stamped header of a raw block of this size."""
    kind = Template(name.space, name.group, name.shard, RAW, (Entry(0, 0, RAW, 0, size, size),))
    header = kind.blank(digest)
    stamp(header, name.key, b"p" * 32, 7, 8)
    return header


def cipher_of(*keys: bytes, tenant: str = "t", nonce: bytes | None = None) -> FrameCipher:
    made = FrameCipher.of(keys or (FIRST,), tenant)
    return FrameCipher(made.keys, random=lambda _: nonce) if nonce is not None else made


class Made:
    """An encrypted frame, and the block in it."""

    def __init__(
        self, codec: str = "raw", size: int = 0, cipher: FrameCipher | None = None, name: Identity = NAME
    ) -> None:  # fmt: skip
        spec = spec_of(dtype=DTYPE)
        self.block = random.Random(size).randbytes(size) if size else kv(DTYPE, spec.block_bytes)
        self.header, payload = one_part(len(self.block), name), bytearray(self.block)
        if not size:
            pieces = block_parts.entries(spec, 0)
            self.header = Template(name.space, name.group, name.shard, RAW, pieces).blank(b"")
            stamp(self.header, name.key, b"", 7, 8)
        if codec != "raw":
            nbytes = framing.encode(BY_NAME[codec], DTYPE, self.header, self.block, payload)
            assert nbytes < len(payload)
            del payload[nbytes:]
        self.plain = bytes(payload)
        (cipher or cipher_of()).encrypt(self.header, payload, payload)
        self.payload = bytes(payload)
        self.digest = seal_frame(self.header, self.payload)

    def opens(self, cipher: FrameCipher | None = None, name: Identity = NAME) -> bytes | None:
        """The block, by both ways to decode a frame; None if it is refused."""
        cipher = cipher or cipher_of()
        text, found, size = bytes(self.header) + self.payload, [], len(self.block)
        into = bytearray(size)
        try:
            framing.decode(text, len(self.header), self.digest, DTYPE, into, cipher, name)
            found.append(bytes(into))
        except FrameError:
            found.append(None)
        if int.from_bytes(self.header[6:8], "little") & ~ENCRYPTED != BY_NAME["zstd"].number:
            rng = random.Random(size)
            arrived = sorted(rng.randrange(len(self.payload) + 1) for _ in range(3))
            into, header = bytearray(size), bytearray(self.header)
            works = decode_frame(
                ELEMENTS[DTYPE], header, bytearray(self.payload), self.digest, into, None, arrived,
                cipher.keys, name.encode(),
            )  # fmt: skip
            assert header == self.header
            found.append(bytes(into) if works else None)
        assert len(set(found)) == 1, "the two ways differ"
        return found[0]


# McGrew and Viega, "The Galois/Counter Mode of Operation", test cases 14 and 16; the vectors of NIST have
# them too. They show that the model is AES-256-GCM.
VECTORS = [
    ("00" * 32, "00" * 12, "00" * 16, "", "cea7403d4d606b6e074ec5d3baf39d18d0d1c8a799996bf0265b98b5d48ab919"),
    (
        "feffe9928665731c6d6a8f9467308308" * 2, "cafebabefacedbaddecaf888",
        "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a721c3c0c95956809532fcf0e2449a6b525"
        "b16aedf5aa0de657ba637b39",
        "feedfacedeadbeeffeedfacedeadbeefabaddad2",
        "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa8cb08e48590dbb3da7b08b1056828838"
        "c5f61e6393ba7a0abcc9f66276fc6ece0f4e1768cddf8853bb2d551b",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("key", "nonce", "text", "header", "expected"), VECTORS)
def test_the_model_is_that_of_the_published_vectors(
    key: str, nonce: str, text: str, header: str, expected: str
) -> None:
    key, nonce, text, header = map(bytes.fromhex, (key, nonce, text, header))  # type: ignore[assignment]
    assert AESGCM(key).encrypt(nonce, text, header).hex() == expected  # type: ignore[arg-type]


def test_keys_derive_as_in_rfc_5869() -> None:
    root = encryption.extract(bytes(range(13)), b"\x0b" * 22)
    assert root.hex() == "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5"
    info = bytes(range(0xF0, 0xFA))
    expected = "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"
    assert encryption.expand(root, info).hex() == expected
    for tenant in ("t", "zürich"):
        assert encryption.tenant_key(FIRST, tenant) == model.tenant_key(FIRST, tenant)
    assert encryption.key_id(FIRST) == model.key_id(FIRST) != encryption.key_id(SECOND)


@pytest.mark.parametrize("size", SIZES)
def test_the_kernel_and_the_model_encrypt_alike(size: int) -> None:
    block = random.Random(size).randbytes(size)
    for digest in (b"", xxh3_128(block)):
        ours, theirs, into = (
            one_part(size, digest=digest),
            one_part(size, digest=digest),
            bytearray(size),
        )
        cipher_of(nonce=NONCE).encrypt(ours, block, into)
        assert model.encrypt(FIRST, "t", theirs, block, NONCE) == into
        assert ours == theirs
        assert xxh3_128(block) not in ours
        found = bytearray(size)
        assert cipher_of().decrypt(ours, into, NAME, found) == xxh3_128(block)
        assert found == block


@pytest.mark.parametrize("codec", ["raw", "fix4", "r32", "zstd"])
def test_a_frame_decodes_to_its_block(codec: str) -> None:
    made = Made(codec)
    assert made.opens() == made.block
    one = decode(bytes(made.header), 7)
    assert one.identity == NAME and one.codec == BY_NAME[codec].number | ENCRYPTED
    assert one.key_id == encryption.key_id(FIRST) and one.payload_digest == xxh3_128(made.payload)
    assert made.plain[:64] not in bytes(made.header) + made.payload


def test_a_block_of_any_size_decodes_in_any_steps() -> None:
    for size in SIZES:
        made = Made(size=size)
        assert made.opens() == made.block


def seal_again(made: Made) -> None:
    """Make the digests right, like an attacker who changes a frame."""
    made.digest = seal_frame(made.header, made.payload)


def test_no_byte_can_be_changed() -> None:
    """Also if all digests are computed again; fields that are not covered do not matter for the block."""
    rng = random.Random(3)
    size = 300
    free = {
        *range(12, 16), *range(32, 48), *range(112, 144), *range(168, 184), *range(240, 256),
        *range(HEADER.size + 16, HEADER.size + ENTRY.size),
    }  # fmt: skip
    places = [*range(HEADER.size + ENTRY.size), *(PAGE + at for at in range(size))]
    for at in rng.sample(places, effort(120, len(places), len(places))):
        made = Made(size=size)
        change = 1 << rng.randrange(8)
        if at < PAGE:
            made.header[at] ^= change
        else:
            changed = bytearray(made.payload)
            changed[at - PAGE] ^= change
            made.payload = bytes(changed)
        try:
            seal_again(made)
        except ValueError:  # no header any more
            continue
        if at < PAGE and (at in free):
            assert made.opens() in (None, made.block), at
        else:
            assert made.opens() is None, at


def other(field: str) -> Identity:
    parts: dict[str, Any] = {
        "space": NAME.space, "group": NAME.group, "shard": NAME.shard, "key": NAME.key
    }  # fmt: skip
    changed = parts[field] + 1 if isinstance(parts[field], int) else bytes(32)
    return Identity(**parts | {field: changed})


@pytest.mark.parametrize("field", ["space", "group", "shard", "key"])
def test_a_frame_is_no_other_block(field: str) -> None:
    """Neither as it is, nor with the names of the other block in its header."""
    made = Made()
    assert made.opens(name=other(field)) is None
    asked = Made(name=other(field))
    made.header[48:112], made.header[144:148] = asked.header[48:112], asked.header[144:148]
    seal_again(made)
    assert made.opens(name=other(field)) is None


def test_the_payload_of_another_frame_of_the_same_block_is_refused() -> None:
    one, two = Made(), Made()
    assert one.payload != two.payload and one.plain == two.plain
    one.payload = two.payload
    seal_again(one)
    assert one.opens() is None


def test_a_truncated_frame_is_refused() -> None:
    made = Made(size=5000)
    for size in (0, 1, 4096, 4999):
        with pytest.raises(FrameError):
            cipher_of().decrypt(made.header, made.payload[:size], NAME, bytearray(5000))
        with pytest.raises(FrameError):
            text = bytes(made.header) + made.payload[:size]
            framing.decode(text, PAGE, made.digest, DTYPE, bytearray(5000), cipher_of(), NAME)


def test_other_keys_are_refused_and_older_ones_decrypt() -> None:
    old = Made(cipher=cipher_of(FIRST))
    assert old.opens(cipher_of(SECOND, FIRST)) == old.block
    new = Made(cipher=cipher_of(SECOND, FIRST))
    assert new.opens(cipher_of(SECOND)) == new.block
    into = bytearray(len(old.payload))
    for cipher in (cipher_of(SECOND), None):
        with pytest.raises(UnknownKeyError):
            text = bytes(old.header) + old.payload
            framing.decode(
                text, len(old.header), old.digest, DTYPE, bytearray(len(old.block)), cipher, NAME
            )
    assert cipher_of(SECOND).keys.decrypt(old.header, old.payload, NAME.encode(), into) == (
        errno.ENOKEY,
        b"",
    )
    assert old.opens(cipher_of(FIRST, tenant="u")) is None


def test_a_plain_frame_is_not_an_encrypted_one() -> None:
    made = Made()
    plain, block = one_part(len(made.block)), bytearray(made.block)
    digest = seal_frame(plain, block)
    into = bytearray(len(block))
    assert decode_frame(0, plain, block, digest, into)
    assert not decode_frame(
        0, plain, block, digest, into, keys=cipher_of().keys, identity=NAME.encode()
    )
    assert not decode_frame(0, made.header, made.payload, made.digest, into)


def test_nonces_differ() -> None:
    nonces = {bytes(Made(size=64).header[184:196]) for _ in range(64)}
    assert len(nonces) == 64


@pytest.mark.parametrize(
    "call",
    [
        lambda keys: FrameKeys([]),
        lambda keys: FrameKeys([(b"short", FIRST)]),
        lambda keys: FrameKeys([(b"i" * 8, b"short")]),
        lambda keys: keys.encrypt(one_part(16), bytes(16), bytearray(16), b"short"),
        lambda keys: keys.encrypt(one_part(16), bytes(17), bytearray(17), NONCE),
        lambda keys: keys.encrypt(one_part(16), bytes(16), bytearray(15), NONCE),
        lambda keys: keys.encrypt(Made(size=16).header, bytes(16), bytearray(16), NONCE),
        lambda keys: keys.decrypt(one_part(16), bytes(16), b"short", bytearray(16)),
        lambda keys: keys.decrypt(one_part(16), bytes(16), NAME.encode(), bytearray(15)),
    ],
)
def test_wrong_arguments_are_refused(call: Callable[[FrameKeys], object]) -> None:
    with pytest.raises(ValueError, match=r"."):
        call(cipher_of().keys)
