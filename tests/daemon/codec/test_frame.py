"""Frames: encoding and decoding return the same values, and other bytes are refused."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier import frame
from kvtier.errors import FrameError
from kvtier.frame import Entry, Frame, Identity, Template
from kvtier.layout import Group, KvSpec
from kvtier_daemon.codec import block_parts
from kvtier_kernels import seal_frame, xxh3_128
from models.codecs import header as header_of
from models.codecs import seal
from support.specs import spec_of

DIGESTS = st.binary(min_size=16, max_size=16)
KEYS = st.binary(min_size=32, max_size=32)


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    sizes = draw(st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 9000)), max_size=300))
    entries, at = [], 0
    for number, (nbytes, raw_bytes) in enumerate(sizes):
        at += draw(st.integers(0, 3))
        entries.append(Entry(number, number % 2, 7, at, nbytes, raw_bytes, draw(DIGESTS)))
        at += nbytes
    one = Identity(draw(KEYS), draw(st.integers(0, 65535)), draw(st.integers(0, 65535)), draw(KEYS))
    return Frame(
        one, draw(st.one_of(st.just(b""), KEYS)), draw(st.integers(0, 65535)), at,
        sum(entry.raw_bytes for entry in entries), draw(st.integers(0, 2**64 - 1)),
        draw(st.integers(0, 2**64 - 1)), draw(DIGESTS), draw(DIGESTS), tuple(entries), profile=draw(DIGESTS),
        lossy_generation=draw(st.integers(0, 255)),
    )  # fmt: skip


@given(frames())
def test_a_decoded_frame_equals_the_encoded_one(one: Frame) -> None:
    text = one.encode()
    assert len(text) == one.header_bytes == frame.peek(text)
    assert len(text) % frame.PAGE == 0
    assert frame.decode(text, one.epoch) == one
    assert frame.decode(text + b"payload") == one


def example() -> Frame:
    spec = spec_of("frame")
    total = spec.block_bytes
    return Frame(
        Identity(b"s" * 32, 1, 2, b"k" * 32), b"p" * 32, 0, total, total, 77, 5, b"r" * 16, b"d" * 16,
        block_parts.entries(spec, 0),
    )  # fmt: skip


def test_every_flipped_bit_of_a_header_is_detected() -> None:
    text = example().encode()
    for at in range(len(text)):
        for bit in (1, 128):
            wrong = bytearray(text)
            wrong[at] ^= bit
            with pytest.raises(FrameError):
                frame.decode(bytes(wrong))


def test_a_frame_of_another_epoch_is_refused() -> None:
    with pytest.raises(FrameError, match="reused"):
        frame.decode(example().encode(), epoch=78)


@pytest.mark.parametrize("size", [0, 3, 255, 256, 4095])
def test_a_truncated_header_is_refused(size: int) -> None:
    with pytest.raises(FrameError):
        frame.decode(example().encode()[:size])


def test_headers_consist_of_whole_pages() -> None:
    assert frame.header_bytes(0) == frame.header_bytes(120) == 4096
    assert frame.header_bytes(121) == 8192


@pytest.mark.parametrize(
    "entries",
    [
        (Entry(0, 0, 0, 0, 10, 10), Entry(0, 1, 0, 9, 10, 10)),
        (Entry(0, 0, 0, 0, 10, 10), Entry(0, 1, 0, 10, 11, 10)),
        (Entry(0, 0, 0, 0, 10, 10),),
        (Entry(0, 0, 0, 10, 10, 10), Entry(0, 1, 0, 0, 10, 10)),
    ],
    ids=["overlap", "beyond", "too little", "out of order"],
)
def test_inconsistent_entries_are_refused(entries: tuple[Entry, ...]) -> None:
    one = Frame(
        Identity(bytes(32), 0, 0, bytes(32)), b"", 0, 20, 20, 1, 1, bytes(16), bytes(16), entries
    )
    with pytest.raises(FrameError):
        frame.decode(one.encode())


def test_a_raw_block_has_an_entry_for_each_layer_and_part() -> None:
    spec = KvSpec.groups(
        [
            Group(layers=3, kv_heads=2, head_dim=8),
            Group(kind="state", layers=4, state_bytes=100),
            Group(layers=2, kv_heads=1, head_dim=8, parts=1),
            Group(layers=5, opaque_bytes=1001),
        ],
        model="m", dtype="float16", block_tokens=16, weights="w",
    )  # fmt: skip
    counts = [len(block_parts.entries(spec, group)) for group in range(4)]
    assert counts == [6, 4, 2, 1]
    for group in range(4):
        entries = block_parts.entries(spec, group)
        total = spec.group_block_bytes(group)
        frame.check_entries(entries, total, total)
        assert sum(entry.nbytes for entry in entries) == total
    assert [(e.layer, e.part) for e in block_parts.entries(spec, 0)] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1),
    ]  # fmt: skip


@given(frames(), st.booleans(), st.integers(0, 2**32))
def test_the_native_seal_equals_that_of_the_model(one: Frame, known: bool, seed: int) -> None:
    payload = random.Random(seed).randbytes(one.payload_bytes)
    zeros = bytes(16)
    for codec in (frame.RAW, 3):
        header = replace(one, codec=codec, raw_digest=b"r" * 16 if known else zeros).encode()
        expected = seal(header, payload)
        native = bytearray(header)
        digest = seal_frame(native, payload)
        assert native == expected
        assert digest == frame.decode(expected).payload_digest


def test_a_header_of_another_payload_is_not_sealed() -> None:
    header = example().encode()
    payload = bytes(example().payload_bytes)
    beyond = replace(example(), entries=(Entry(0, 0, 0, len(payload) - 4, 8, len(payload)),))
    for text, body in (
        (header, payload[1:]), (header, payload + b"x"), (b"no frame" + header[8:], payload),
        (header[:200], payload), (header[:300], payload), (beyond.encode(), payload),
    ):  # fmt: skip
        native = bytearray(text)
        with pytest.raises(ValueError, match="does not describe this payload"):
            seal_frame(native, body)
        assert native == text


@pytest.mark.parametrize("known", [True, False])
def test_a_sealed_template_equals_the_encoded_frame(known: bool) -> None:
    spec = spec_of("sealed")
    payload = random.Random(4).randbytes(spec.block_bytes)
    digest = xxh3_128(payload)
    kind = Template(b"s" * 32, 0, 1, frame.RAW, block_parts.entries(spec, 0))
    header = header_of(kind, b"k" * 32, b"p" * 32, 7, 8, digest if known else b"")
    assert len(header) == kind.header_bytes
    sealed = frame.decode(seal(header, payload + b"what lies after it"), 7)
    assert sealed.identity == Identity(b"s" * 32, 0, 1, b"k" * 32)
    assert (sealed.parent, sealed.sequence) == (b"p" * 32, 8)
    assert sealed.raw_digest == sealed.payload_digest == digest
    assert sealed.total_bytes == kind.total_bytes
    for entry in sealed.entries:
        assert entry.digest == xxh3_128(payload[entry.offset : entry.offset + entry.nbytes])
    root = frame.decode(seal(header_of(kind, b"k" * 32, b"", 7, 8, b""), payload))
    assert root.parent == b""
