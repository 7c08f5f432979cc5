"""Segments after a start: only consistent frames are found."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from kvtier import frame
from kvtier.errors import TierError
from kvtier.frame import PAGE, Template
from kvtier_daemon.codec import block_parts
from kvtier_daemon.tiers.cold.recovery import entries_of, recover
from kvtier_daemon.tiers.cold.segment import (
    FooterEntry,
    Head,
    TombstonePages,
    decode_entries,
    encode_footer,
    encode_row,
    first_frame,
)
from models.codecs import header, seal
from support.specs import pattern, spec_of

SPEC = spec_of("recovery", layers=1, kv_heads=1)
SPACE = b"s" * 32
TENANT = b"t" * 32
SEGMENT = 64 * PAGE
FIRST_FRAME = first_frame(SEGMENT)
KIND = Template(SPACE, 0, 0, frame.RAW, block_parts.entries(SPEC, 0))


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def text_of(number: int, epoch: int) -> bytes:
    """A complete frame."""
    payload = pattern(key(number), SPEC.block_bytes)
    parent = key(number - 1) if number else b""
    sealed = seal(header(KIND, key(number), parent, epoch, number, b""), payload)
    return sealed + payload.ljust(frame.pages(len(payload)), b"\0")


def segment(path: Path, count: int, epoch: int = 5, sealed: bool = False) -> bytes:
    """A file with `count` frames, written over the frames of an earlier use."""
    head = Head(1, SEGMENT, epoch, 0, TENANT)
    old = b"".join(text_of(100 + number, epoch - 1) for number in range(20))
    new = b"".join(text_of(number, epoch) for number in range(count))
    text = head.encode() + TombstonePages(SEGMENT).encode(epoch, 0, 1) + new + old[len(new) :]
    text = text.ljust(SEGMENT, b"\xaa")
    if sealed:
        rows = [
            encode_row(
                FooterEntry.of(
                    frame.decode(text_of(n, epoch)), (FIRST_FRAME + n * KIND.total_bytes) // PAGE
                ),
                0,
            )
            for n in range(count)
        ]
        at, footer = encode_footer(head, [(SPACE, SPEC)], b"".join(rows), FIRST_FRAME + len(new))
        text = text[:at] + footer
    path.write_bytes(text)
    return text


def found(path: Path) -> list[int]:
    one = recover(path, TENANT, {SPACE: SPEC})
    return [int.from_bytes(e.identity.key, "big") for e in decode_entries(one.spaces, one.rows)]


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("count", [0, 1, 12])
def test_all_frames_are_found_and_none_of_an_earlier_use(
    tmp_path: Path, count: int, sealed: bool
) -> None:
    segment(tmp_path / "a", count, sealed=sealed)
    one = recover(tmp_path / "a", TENANT, {SPACE: SPEC})
    assert one.sealed == sealed and entries_of(one) == count
    listed = decode_entries(one.spaces, one.rows)
    for number, entry in enumerate(listed):
        assert entry.identity == frame.Identity(SPACE, 0, 0, key(number))
        assert entry.parent == (key(number - 1) if number else b"")
        text = (tmp_path / "a").read_bytes()[entry.page * PAGE :]
        payload = text[entry.header_pages * PAGE :][: entry.payload_bytes]
        assert payload == pattern(key(number), SPEC.block_bytes)
    if not sealed:
        assert one.end == FIRST_FRAME + count * KIND.total_bytes


def test_frames_that_a_killed_daemon_may_not_have_synced_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise blocks that count as written would be lost with the power."""
    synced: list[str] = []

    def fdatasync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        if fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    segment(tmp_path / "open", 3)
    segment(tmp_path / "sealed", 3, sealed=True)
    fails = False
    assert found(tmp_path / "open") == found(tmp_path / "sealed") == [0, 1, 2]
    assert synced == [str(tmp_path / "open")]
    fails = True
    with pytest.raises(TierError, match="open: cannot be read: Input/output error"):
        found(tmp_path / "open")


def test_a_frame_that_is_torn_ends_the_walk(tmp_path: Path) -> None:
    text = segment(tmp_path / "a", 12)
    chance = random.Random(3)
    for number in range(12):
        start = FIRST_FRAME + number * KIND.total_bytes
        for at in [
            start,
            start + 240,
            *(start + chance.randrange(5 * PAGE // 4) for _ in range(4)),
        ]:
            wrong = bytearray(text)
            wrong[at : at + 64] = bytes(byte ^ 255 for byte in text[at : at + 64])
            (tmp_path / "b").write_bytes(wrong)
            assert found(tmp_path / "b") in (list(range(number)), list(range(12)))
    torn = text[: FIRST_FRAME + 3 * KIND.total_bytes + PAGE + 100]
    (tmp_path / "c").write_bytes(torn.ljust(SEGMENT, b"\0"))
    assert found(tmp_path / "c") == [0, 1, 2]


def test_a_frame_that_is_copied_over_another_is_detected_by_its_digests(tmp_path: Path) -> None:
    """A walk identifies frames by their content: a copy is found with the identity in it, not with that
    of the overwritten frame."""
    text = bytearray(segment(tmp_path / "a", 6))
    size = KIND.total_bytes
    text[FIRST_FRAME + 2 * size : FIRST_FRAME + 3 * size] = text[FIRST_FRAME : FIRST_FRAME + size]
    (tmp_path / "b").write_bytes(text)
    assert found(tmp_path / "b") == [0, 1, 0, 3, 4, 5]


def test_a_damaged_footer_is_ignored(tmp_path: Path) -> None:
    text = segment(tmp_path / "a", 12, sealed=True)
    for at in (SEGMENT - PAGE, SEGMENT - 1, SEGMENT - 2 * PAGE, SEGMENT - 2 * PAGE + 1000):
        wrong = bytearray(text)
        wrong[at] ^= 1
        (tmp_path / "b").write_bytes(wrong)
        one = recover(tmp_path / "b", TENANT, {SPACE: SPEC})
        assert not one.sealed and "no footer" in one.remark
        assert found(tmp_path / "b") == list(range(12))


@pytest.mark.parametrize("size", [0, 100, PAGE, SEGMENT - PAGE, SEGMENT + PAGE])
def test_a_file_of_another_length_is_empty(tmp_path: Path, size: int) -> None:
    segment(tmp_path / "a", 12, sealed=True)
    os.truncate(tmp_path / "a", size)
    one = recover(tmp_path / "a", TENANT, {SPACE: SPEC})
    assert one.head is None and not one.rows and one.remark


def test_a_segment_of_another_tenant_is_empty(tmp_path: Path) -> None:
    segment(tmp_path / "a", 12, sealed=True)
    assert recover(tmp_path / "a", b"o" * 32, {SPACE: SPEC}).head is None


def test_frames_of_a_space_without_a_description_are_ignored(tmp_path: Path) -> None:
    segment(tmp_path / "a", 12)
    one = recover(tmp_path / "a", TENANT, {})
    assert not one.rows and one.end == FIRST_FRAME + 12 * KIND.total_bytes


def test_a_file_that_can_not_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TierError, match="cannot be read"):
        recover(tmp_path / "missing", TENANT, {})


@pytest.mark.parametrize(
    ("row", "at", "value"),
    [(0, 72, 0), (0, 72, 1), (3, 72, 1 << 31), (5, 76, 1 << 20), (5, 72, 4), (11, 84, 1 << 20), (2, 88, 1)],
    ids=["page 0", "tombstones", "far away", "too long", "out of order", "payload", "4 GiB"],
)  # fmt: skip
def test_a_table_with_wrong_frame_positions_is_refused(
    tmp_path: Path, row: int, at: int, value: int
) -> None:
    """Its digest is valid, because the author of a forged table can compute it."""
    text = bytearray(segment(tmp_path / "a", 12, sealed=True))
    one = recover(tmp_path / "a", TENANT, {SPACE: SPEC})
    assert one.head is not None
    rows = bytearray(one.rows)
    rows[128 * row + at : 128 * row + at + 4] = value.to_bytes(4, "little")
    place, footer = encode_footer(one.head, one.spaces, bytes(rows), one.end)
    (tmp_path / "b").write_bytes(text[:place] + footer)
    forged = recover(tmp_path / "b", TENANT, {SPACE: SPEC})
    assert not forged.sealed and "no footer" in forged.remark
    assert found(tmp_path / "b") == list(range(12)), "the frames are unchanged"
