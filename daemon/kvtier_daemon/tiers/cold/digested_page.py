"""Pages of a segment that are not frames: fields, then a digest of the whole page, then zeros."""

from __future__ import annotations

from kvtier.errors import FrameError
from kvtier_daemon.codec.frame import DIGEST_BYTES, PAGE, ZERO_DIGEST
from kvtier_kernels import xxh3_128

VERSION = 2  # of segments: head, tombstones, table and trailer


def digested_page(fields: bytes) -> bytes:
    """A page of these fields, its digest after them."""
    page = fields.ljust(PAGE, b"\0")
    digest = xxh3_128(page)
    return page[: len(fields)] + digest + page[len(fields) + DIGEST_BYTES :]


def checked_page(page: bytes, size: int) -> bytes:
    """The same page, whose fields take `size` bytes. Raises FrameError if its digest is wrong."""
    if len(page) != PAGE:
        raise FrameError(f"the page is incomplete: {len(page)} bytes")
    digest = page[size : size + DIGEST_BYTES]
    if xxh3_128(page[:size] + ZERO_DIGEST + page[size + DIGEST_BYTES :]) != digest:
        raise FrameError("page digest mismatch")
    return page


def expect(magic: bytes, expected: bytes, version: int) -> None:
    if magic != expected:
        raise FrameError(f"found {magic!r}, expected {expected!r}")
    if version != VERSION:
        raise FrameError(
            f"segment version is {version}, this daemon reads version {VERSION} only; its "
            "blocks are not used"
        )
