"""Verifies every frame in a cold directory that no daemon uses, and can repair the footers of segments.

To a daemon a damaged frame is a miss in any case; this reports it earlier, and removes it from the footers.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvtier import frame
from kvtier.errors import FrameError, TierError
from kvtier.frame import ENCRYPTED, PAGE
from kvtier.layout import KvSpec
from kvtier_daemon.codec.encryption import FrameCipher, UnknownKeyError
from kvtier_daemon.tiers.cold.directory import ColdDirectory, spaces_of
from kvtier_daemon.tiers.cold.recovery import Recovered, recover
from kvtier_daemon.tiers.cold.segment import (
    FooterEntry,
    decode_entries,
    encode_footer,
    page_of,
    split_rows,
)
from kvtier_kernels import xxh3_128


@dataclass(slots=True)
class FsckReport:
    """The results. `wrong` counts frames and segments by their problem."""

    segments: int = 0
    frames: int = 0
    payload_bytes: int = 0
    encrypted: int = 0
    unknown_keys: int = 0  # encrypted frames that no given key decrypts
    wrong: Counter[str] = field(default_factory=Counter)
    remarks: list[str] = field(default_factory=list)
    repaired: int = 0

    @property
    def is_clean(self) -> bool:
        return not self.wrong

    def note(self, kind: str, remark: str) -> None:
        self.wrong[kind] += 1
        self.remarks.append(remark)


def check(volume: ColdDirectory, repair: bool = False, keys: Sequence[bytes] = ()) -> FsckReport:
    """Read everything in the locked directory. `repair`: write footers that list only sound frames. Encrypted
    frames are also decrypted if there are keys of a key file."""
    report = FsckReport()
    for tenant in volume.tenants():
        described = spaces_of(volume, tenant)
        cipher = FrameCipher.of(keys, tenant) if keys else None
        for path in volume.files(tenant):
            _check_segment(path, described, report, repair, volume.uid, cipher)
    return report


def _check_segment(
    path: Path, described: dict[bytes, KvSpec], report: FsckReport, repair: bool, uid: int,
    cipher: FrameCipher | None,
) -> None:  # fmt: skip
    report.segments += 1
    try:
        found = recover(path, None, described, uid)
    except TierError as error:
        report.note("file", str(error))
        return
    if found.head is None:
        # A file that was created and never written also has no head.
        with path.open("rb") as file:
            if any(file.read(PAGE)):
                report.note("head", f"{path}: {found.remark}")
        return
    rows = split_rows(found.rows)
    good = []
    with path.open("rb") as file:
        for row in rows:
            report.frames += 1
            wrong, nbytes = _wrong_with(file.fileno(), row, found, cipher, report)
            report.payload_bytes += nbytes
            if wrong:
                report.note(wrong, f"{path}: page {page_of(row)}: {wrong}")
            else:
                good.append(row)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if not found.sealed:
        # The state after a daemon was killed; the next one finds its frames.
        report.remarks.append(f"{path}: {found.remark}; {len(good)} frames")
    if repair and len(good) < len(rows):
        _rewrite(path, found, good)
        report.repaired += 1


def _wrong_with(
    fd: int, row: bytes, found: Recovered, cipher: FrameCipher | None, report: FsckReport
) -> tuple[str, int]:
    """Return the problem of this row's frame, or an empty string, and the size of its payload."""
    assert found.head is not None
    try:
        (listed,) = decode_entries(found.spaces, row)
    except FrameError:
        return "entry", 0
    report.encrypted += bool(listed.codec & ENCRYPTED)
    try:
        wrong = _wrong_at(fd, listed.page * PAGE, listed, found.head.epoch, cipher)
    except OSError:
        wrong = "unreadable"
    except UnknownKeyError:
        wrong = ""
        report.unknown_keys += 1
    return wrong, listed.payload_bytes


def _wrong_at(fd: int, at: int, listed: FooterEntry, epoch: int, cipher: FrameCipher | None) -> str:
    header = os.pread(fd, listed.header_pages * PAGE, at)
    try:
        one = frame.decode(header, epoch)
    except FrameError:
        return "header"
    if one.identity != listed.identity or one.payload_digest != listed.payload_digest:
        return "identity"
    payload = os.pread(fd, one.payload_bytes, at + one.header_bytes)
    if len(payload) != one.payload_bytes or xxh3_128(payload) != one.payload_digest:
        return "payload"
    if cipher is not None and one.codec & ENCRYPTED:
        try:
            cipher.decrypt(header, payload, one.identity, bytearray(len(payload)))
        except UnknownKeyError:
            raise
        except FrameError:
            return "encryption"
    return ""


def _rewrite(path: Path, found: Recovered, rows: list[bytes]) -> None:
    """Write a footer that lists only these frames."""
    assert found.head is not None
    torn = found.torn or not found.sealed
    at, text = encode_footer(found.head, found.spaces, b"".join(rows), found.end, torn)
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(fd, text, at)
        os.fdatasync(fd)
    finally:
        os.close(fd)
