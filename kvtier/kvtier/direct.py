"""Read blocks on disk without the daemon: it grants the places of their frames.

The bytes of a granted frame prove nothing. A reader verifies the header, which names the block, and the
digests of the bytes in the place where it uses them; then `DirectLease.end` says which blocks are still
stored. With a lease, it asks the daemon. Without one, the blocks are still stored if the read was short, the
daemon lives, and no block was forgotten meanwhile, which the client sees in memory of the daemon; otherwise
they count as not stored.
A block that fails any of this is a miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from kvtier import wire
from kvtier.connection import is_quiet
from kvtier.errors import FrameError, KvtierError, ProtocolError
from kvtier.frame import (
    E5M2,
    ELEMENTS,
    FIX4,
    FP8,
    MXFP4,
    NVFP4,
    PAGE,
    Q2,
    Q4,
    Q8,
    R32,
    RAW,
    Frame,
    Identity,
    decode,
    pages,
)
from kvtier.key import KEY_BYTES, Keys
from kvtier.layout import PAGE_MARK, KvSpec
from kvtier.link import Link
from kvtier.read_file import UNKNOWN, ReadFile

LEASE_MS = 2000  # the longest that the daemon permits
UNLEASED_S = 0.1  # the longest read without a lease: shorter than the start of another daemon
LOSSLESS, LOSSY = (RAW, FIX4, R32), (Q8, Q4, Q2, FP8, E5M2, NVFP4, MXFP4)
FLOATS = ("bfloat16", "float16", "float32")


class OpenSpace(Protocol):
    """A space, as direct reads see it."""

    link: Link
    index: int
    identity: bytes


@dataclass(slots=True, frozen=True)
class DirectFrame:
    """Where the frame of a block is. `at`: the place of the block's key among the requested ones."""

    at: int
    name: Identity
    file: ReadFile
    page: int
    payload_bytes: int
    codec: int
    header_pages: int
    epoch: int
    digest: bytes

    @property
    def header_at(self) -> int:
        return self.page * PAGE

    @property
    def header_bytes(self) -> int:
        return self.header_pages * PAGE

    @property
    def payload_at(self) -> int:
        return self.header_at + self.header_bytes

    @property
    def read_bytes(self) -> int:
        """The bytes to read for the payload: whole pages."""
        return pages(self.payload_bytes)

    @property
    def is_inside(self) -> bool:
        return self.payload_at + self.read_bytes <= self.file.nbytes

    def verify(self, header: bytes, block_bytes: int) -> Frame:
        """Return the content of the header pages. Raises FrameError unless they are of this block, in this
        use of the file, and of this payload."""
        found = decode(header, self.epoch)
        if found.identity != self.name:
            raise FrameError("the frame is of another block")
        described = (found.codec, found.payload_bytes, found.header_bytes, found.payload_digest)
        granted = (self.codec, self.payload_bytes, self.header_bytes, self.digest)
        if described != granted or found.raw_bytes != block_bytes:
            raise FrameError("the frame is another one of the same block")
        return found


def codecs_for(spec: KvSpec) -> bytes:
    """The numbers of the codecs that the kernels decode for this space without a calibration. The daemon
    decodes `zstd`, encrypted frames, and lossy ones of pages with an order of their own."""
    if spec.dtype not in ELEMENTS:
        return bytes([RAW])
    lossy = spec.dtype in FLOATS and PAGE_MARK not in spec.layout
    return bytes([*LOSSLESS, *(LOSSY if lossy else ())])


class DirectLease:
    """Frames that are not reused before the lease ends or its deadline passes, unless the daemon ends; or,
    without a lease (0), frames that may be reused at any time."""

    def __init__(
        self, link: Link, space: OpenSpace, lease: int, frames: tuple[DirectFrame, ...],
        forgets: int = UNKNOWN, until: float = 0.0,
    ) -> None:  # fmt: skip
        """`forgets`: that of the daemon at the grant."""
        self.frames = frames
        self._space = space
        self._link = link
        self._connection = link.connection
        self._lease = lease
        self._forgets = forgets
        self._until = until

    def _is_unchanged(self) -> bool:
        """Whether certainly no block was forgotten since the grant."""
        forgets, self._forgets = self._forgets, UNKNOWN
        connection = self._connection
        is_same = forgets != UNKNOWN and connection.files.forgets == forgets
        # Only after that: the daemon that lives now would have counted it, and no other one has started.
        is_here = connection is self._link.connection and is_quiet(connection)
        return is_same and is_here and connection.clock() < self._until

    def end(self, sound: Sequence[bool], used: tuple[int, int] | None = None) -> list[bool]:
        """End the lease, with which frames were verified. Return which of these blocks are still stored: no
        other block may be used. `used`: the tokens and bytes of each block that count as used, if not all.
        Raises Unavailable if the daemon has ended."""
        lease, self._lease = self._lease, 0
        if not lease:
            known = self._is_unchanged()
            if known and self.frames:
                self._count(sum(map(bool, sound)), used)
            return [known and bool(one) for one in sound[: len(self.frames)]]
        failed = bytes(not one for one in sound)
        valid: list[bytes] = []

        def take(checked: wire.DirectReadChecked, _: object) -> None:
            # Another connection has other leases.
            if self._link.connection is self._connection:
                valid.append(checked.valid)

        self._link.ask(
            lambda id_: wire.DirectReadEnd(id_, lease, failed, *(used or ())),
            wire.DirectReadChecked,
            take,
        )
        if not valid or len(valid[0]) != len(self.frames):
            return [False] * len(self.frames)
        return [bool(one) and good for one, good in zip(valid[0], sound, strict=True)]

    def _count(self, good: int, used: tuple[int, int] | None) -> None:
        """Let the daemon count what was read without a lease."""
        name, bad = self.frames[0].name, len(self.frames) - good
        with suppress(KvtierError):
            self._link.tell(
                wire.DirectReadUsed(
                    0, self._space.index, name.group, name.shard, good, bad, *(used or ())
                ),
                at_once=False,
            )


def calibration_of(
    space: OpenSpace, group: int = 0, shard: int = 0
) -> wire.DirectReadCalibrated | None:
    """Get the calibration that frames of this group and shard need, or None. Raises Refused if the
    configuration of the tenant does not permit direct reads."""
    found = space.link.ask(
        lambda id_: wire.DirectReadCodec(id_, space.index, group, shard), wire.DirectReadCalibrated
    )
    return found if found.codec else None


def read_directly(
    space: OpenSpace, keys: Keys | Sequence[bytes], codecs: bytes, group: int = 0, shard: int = 0,
    deadline_ms: int = LEASE_MS, first: int = 0, most: int = wire.LIMIT_DIRECT_BLOCKS,
) -> DirectLease:  # fmt: skip
    """Get the frames of blocks that a load of these keys needs and that are only on disk, if their codec is
    one of `codecs`: the first `most` of them from the key `first` on. The daemon limits the deadline to
    2 s. If it is 0 there is no lease, if this connection sees whether blocks are forgotten. Raises Refused if
    the configuration of the tenant does not permit it."""
    packed, link = Keys.of(keys).packed, space.link
    leases: list[DirectLease] = []
    until = 0.0

    def ask(request_id: int) -> wire.Message:
        nonlocal until
        files = link.connection.files
        files.close_oldest()
        until = link.connection.clock() + UNLEASED_S
        within_ms = LEASE_MS if not deadline_ms and files.forgets == UNKNOWN else deadline_ms
        closed = files.closed[: wire.LIMIT_DIRECT_FILES]
        return wire.DirectRead(
            request_id, space.index, group, shard, packed, codecs, within_ms, first, most, closed
        )

    def take(granted: wire.DirectReadGranted, _: object) -> None:
        files, frames = link.connection.files, []
        del files.closed[: wire.LIMIT_DIRECT_FILES]
        for row in wire.DIRECT_ROW.iter_unpack(granted.rows):
            at, number, page, nbytes, codec, header_pages, epoch, digest = row
            file = files.use(number)
            key = packed[at * KEY_BYTES : (at + 1) * KEY_BYTES]
            name = Identity(space.identity, group, shard, key)
            if file is None or len(key) != KEY_BYTES:
                raise ProtocolError(
                    f"a direct read of block {at} in file {number}: both must be known"
                )
            frames.append(
                DirectFrame(at, name, file, page, nbytes, codec, header_pages, epoch, digest)
            )
        forgets = UNKNOWN if granted.lease else granted.forgets
        leases.append(DirectLease(link, space, granted.lease, tuple(frames), forgets, until))

    link.ask(ask, wire.DirectReadGranted, take)
    return leases[0]
