"""A client that reads frames from the segment files itself, with a lease of the daemon or without one."""

from __future__ import annotations

import os
import random
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtier import wire
from kvtier.direct import LEASE_MS, UNLEASED_S, DirectFrame, codecs_for
from kvtier.errors import FrameError
from kvtier.frame import ELEMENTS, RAW, Identity
from kvtier.read_file import COUNT_ENDED
from kvtier_kernels import Mapping, decode_frame, xxh3_128

from .plan import SPECS, block_bytes, places
from .virtual import CLOCK

if TYPE_CHECKING:
    from .clients import Link

COUNT = struct.Struct("<Q")


@dataclass(slots=True)
class File:
    """A file of which the daemon sent a descriptor."""

    fd: int
    nbytes: int


class DirectFiles:
    """The files of one connection, and its memory that counts the forgets of its tenant."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._files: dict[int, File] = {}
        self._count: Mapping | None = None

    def add(self, message: wire.DirectReadFile, fd: int) -> None:
        if message.file:
            self._files[message.file] = File(fd, message.bytes)
            self._link.machine.client_fds.add(fd)
        else:
            self._count = Mapping(fd, message.bytes, False)
            os.close(fd)

    def close(self) -> None:
        for file in self._files.values():
            self._link.machine.client_fds.discard(file.fd)
            os.close(file.fd)
        self._files.clear()

    @property
    def forgets(self) -> int:
        """A number that changes when a block of the tenant is forgotten; -1 if it is not known."""
        (count,) = COUNT.unpack_from(memoryview(self._count)) if self._count is not None else (-1,)
        return -1 if count == COUNT_ENDED else count

    def of(self, number: int) -> File:
        if number not in self._files:
            self._link.machine.violate(f"a frame is in file {number}, which was not sent")
        return self._files[number]


class DirectRead:
    """One read. The first step asks for the places of frames, the second reads them, and the third finds out
    which blocks are still stored."""

    def __init__(self, link: Link, space: int, keys: list[bytes], chance: random.Random) -> None:
        self._link = link
        self._machine = link.machine
        self._space = space
        self._keys = keys
        self._identity = link.identities[space]
        self._chance = chance
        self._group, self._shard = chance.choice(places(space))
        self._is_leased = chance.random() < 0.6
        self._frames: list[DirectFrame] = []
        self._blocks: list[bytes | None] = []  # None: the frame is not that of the block
        self._asked_at = CLOCK.now

    def begin(self) -> None:
        most = self._chance.choice((1, 3, wire.LIMIT_DIRECT_BLOCKS))
        first = self._chance.choice((0, 0, 0, 2))
        read = wire.DirectRead(
            0, self._link.spaces[self._space], self._group, self._shard, b"".join(self._keys),
            codecs_for(SPECS[self._space]), LEASE_MS if self._is_leased else 0, first, most,
        )  # fmt: skip
        self._link.ask(read, self._granted)

    def _granted(self, reply: wire.DirectReadGranted) -> None:
        if bool(reply.lease) != (self._is_leased and bool(reply.rows)):
            self._machine.violate(f"lease {reply.lease} for {len(reply.rows)} bytes of rows")
        for row in wire.DIRECT_ROW.iter_unpack(reply.rows):
            at, number, page, nbytes, codec, header_pages, epoch, digest = row
            name = Identity(self._identity, self._group, self._shard, self._keys[at])
            file: Any = self._link.direct.of(number)
            frame = DirectFrame(at, name, file, page, nbytes, codec, header_pages, epoch, digest)
            if not frame.is_inside:
                self._machine.violate(f"a frame is outside of its file: {frame}")
            self._frames.append(frame)
        self._machine.count("direct frames", len(self._frames))
        delay = self._chance.choice((0.0, 0.0, 0.005, 0.05, 1.0))
        self._machine.after(delay, self._read, reply)

    def _read(self, reply: wire.DirectReadGranted) -> None:
        if not self._link.is_open:
            return
        self._blocks = [self._block(frame) for frame in self._frames]
        delay = self._chance.choice((0.0, 0.0, 0.02, 0.5))
        end = self._end_lease if reply.lease else self._end
        self._machine.after(delay, end, reply)

    def _block(self, frame: DirectFrame) -> bytes | None:
        """The bytes of the block; None if its frame is not there."""
        nbytes = block_bytes(self._space, self._group)
        fd, into = frame.file.fd, bytearray(nbytes)
        header = os.pread(fd, frame.header_bytes, frame.header_at)
        payload = os.pread(fd, frame.payload_bytes, frame.payload_at)
        try:
            frame.verify(header, nbytes)
        except (FrameError, struct.error):
            return None
        if frame.codec == RAW:
            return payload if xxh3_128(payload) == frame.digest else None
        element = ELEMENTS[SPECS[self._space].dtype]
        right = decode_frame(element, bytearray(header), payload, frame.digest, into)
        return bytes(into) if right else None

    def _end_lease(self, reply: wire.DirectReadGranted) -> None:
        """Ask which blocks are stored in the same places. Under the lease, these were not written to."""
        if not self._link.is_open:
            return
        self._asked_at = CLOCK.now
        # A client that says of no frame that it is damaged must not find any, except where a disk rots.
        says = self._chance.random() < 0.5
        failed = bytes(says and block is None for block in self._blocks)

        def checked(reply: wire.DirectReadChecked) -> None:
            if len(reply.valid) != len(failed):
                self._machine.violate(f"{len(reply.valid)} answers for {len(failed)} frames")
            for at, is_valid in enumerate(reply.valid):
                if is_valid and self._blocks[at] is None and not self._machine.counts["rot"]:
                    self._machine.violate(f"a frame was reused under a lease: {self._frames[at]}")
            self._use(reply.valid)

        self._link.ask(wire.DirectReadEnd(0, reply.lease, failed), checked)

    def _end(self, reply: wire.DirectReadGranted) -> None:
        """Without a lease: no block was forgotten if the number is the same, and the daemon lives."""
        link = self._link
        if not link.is_open or not link.daemon.is_up or not self._frames:
            return
        is_short = CLOCK.now - self._asked_at < UNLEASED_S
        if not is_short or link.direct.forgets != reply.forgets:
            return
        self._asked_at = CLOCK.now
        good = sum(block is not None for block in self._blocks)
        self._use(bytes(block is not None for block in self._blocks))
        bad = len(self._blocks) - good
        link.tell(
            wire.DirectReadUsed(0, link.spaces[self._space], self._group, self._shard, good, bad)
        )

    def _use(self, valid: bytes) -> None:
        for frame, block, is_valid in zip(self._frames, self._blocks, valid, strict=True):
            if is_valid and block is not None:
                place = (
                    self._link.client.tenant, self._space, self._group, self._shard, frame.name.key,
                )  # fmt: skip
                how = "read with a lease" if self._is_leased else "read without a lease"
                self._machine.count(how, 1)
                self._link.oracle.check_block(
                    block, place, self._asked_at, self._link.daemon.number, how
                )
