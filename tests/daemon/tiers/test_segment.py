"""A segment's metadata pages: encoding and decoding return the same values, and other bytes are refused."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest

from kvtier.errors import FrameError
from kvtier.frame import PAGE, Identity
from kvtier_daemon.tiers.cold.segment import (
    ENTRY,
    FooterEntry,
    Head,
    Trailer,
    decode_entries,
    described_bytes,
    encode_footer,
    encode_row,
    footer_bytes,
    space_bytes,
)
from support.specs import spec_of

HEAD = Head(number=3, nbytes=256 * PAGE, epoch=0x1234_5678_9ABC_DEF0, sequence=9, owner=b"t" * 32)
SPACES = [(bytes([n]) * 32, spec_of(f"space {n}")) for n in range(3)]


def some_frames(count: int) -> list[FooterEntry]:
    chance = random.Random(count)
    return [
        FooterEntry(
            Identity(SPACES[n % 3][0], chance.randrange(4), chance.randrange(300), chance.randbytes(32)),
            chance.randbytes(32) if n % 2 else b"", 1 + n, 1, 1, 0, 3000, 3000, n, chance.randbytes(16),
        )
        for n in range(count)
    ]  # fmt: skip


def footer(frames: list[FooterEntry]) -> tuple[int, bytes]:
    numbers = [identity for identity, _ in SPACES]
    rows = b"".join(encode_row(one, numbers.index(one.identity.space)) for one in frames)
    return encode_footer(HEAD, SPACES, rows, (1 + len(frames)) * PAGE)


def test_a_decoded_head_equals_the_encoded_one() -> None:
    page = HEAD.encode()
    assert len(page) == PAGE
    assert Head.decode(page) == HEAD


@pytest.mark.parametrize("count", [0, 1, 31, 200])
def test_a_decoded_footer_equals_the_encoded_one_and_ends_with_the_segment(count: int) -> None:
    frames = some_frames(count)
    at, text = footer(frames)
    assert at + len(text) == HEAD.nbytes and len(text) == footer_bytes(
        described_bytes(sum(map(space_bytes, SPACES))), count
    )
    trailer = Trailer.decode(text[-PAGE:], HEAD)
    assert (trailer.table_at, trailer.entries) == (at, count)
    spaces, rows = trailer.split(text[:-PAGE])
    assert spaces == SPACES and len(rows) == count * ENTRY.size
    assert decode_entries(spaces, rows) == frames


def test_every_changed_byte_of_head_and_footer_is_detected() -> None:
    head = HEAD.encode()
    _, text = footer(some_frames(40))
    trailer = Trailer.decode(text[-PAGE:], HEAD)
    for at in range(PAGE):
        for page, decode in (
            (head, Head.decode),
            (text[-PAGE:], lambda page: Trailer.decode(page, HEAD)),
        ):
            wrong = bytearray(page)
            wrong[at] ^= 1 << at % 8
            with pytest.raises(FrameError):
                decode(bytes(wrong))
    for at in range(trailer.table_bytes):
        wrong = bytearray(text[:-PAGE])
        wrong[at] ^= 1 << at % 8
        with pytest.raises(FrameError):
            trailer.split(bytes(wrong))
    with pytest.raises(FrameError):
        trailer.split(text[: trailer.table_bytes - 1])


def test_a_trailer_of_an_earlier_use_seals_nothing() -> None:
    _, text = footer(some_frames(4))
    with pytest.raises(FrameError, match="reused"):
        Trailer.decode(text[-PAGE:], replace(HEAD, epoch=HEAD.epoch + 1))
    with pytest.raises(FrameError, match="in a segment of"):
        Trailer.decode(text[-PAGE:], replace(HEAD, nbytes=HEAD.nbytes + PAGE))


@pytest.mark.parametrize(
    "page", [b"", bytes(PAGE), os.urandom(PAGE)], ids=["none", "zeros", "noise"]
)
def test_pages_that_are_not_a_segment_are_refused(page: bytes) -> None:
    for decode in (Head.decode, lambda page: Trailer.decode(page, HEAD)):
        with pytest.raises(FrameError):
            decode(page)
