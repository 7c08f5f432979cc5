"""Reads blocks on disk into a device's memory, encoded as they are, and verifies and decodes them there.

    segment ──header──▶ processor: which block is it, in this use of the segment?
            ──payload─▶ ring on the device ──▶ digests of its parts ──▶ decoder ──▶ digest of the block

No byte of a block is used before all of this has succeeded and the daemon has confirmed that the block is
still stored. Everything else is a miss: damage, a torn frame, a segment that was reused, a block that was
forgotten during the read. The engine then loads the block through the daemon's memory, as it does without
this module.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier import FrameError, Keys, KvSpec, Space
from kvtier.direct import LOSSLESS, DirectFrame, DirectLease, codecs_for, read_directly
from kvtier.frame import ELEMENTS, ONCE, PAGE, RAW, ZERO_DIGEST, Frame, pages
from kvtier.wire import LIMIT_DIRECT_BLOCKS, DirectReadCalibrated
from kvtier_kernels.cuda import Driver
from kvtier_kernels.cuda.codecs import ENCODED_PART, Codecs, Coder, DeviceCalibration, calibration
from kvtier_kernels.cuda.digests import RANGE, Digester
from kvtier_plugins.payload_reads import (
    READERS,
    CuFileReads,
    DirectReadsError,
    PayloadReads,
    PinnedReads,
    direct_reads_fail,
    read_whole,
)

LEASE_MS = 2000
RING_BYTES = 64 << 20
DIGESTS = 4096  # in one batch


class ArrivedBlock(NamedTuple):
    """A block on the device, as it was saved. `at`: the place of its key."""

    at: int
    address: int


class Counts:
    """What a reader did with the frames that it was granted."""

    def __init__(self) -> None:
        self.read = 0  # blocks that arrived
        self.failed = 0  # frames that were not these blocks, or blocks that are no longer stored
        self.nbytes = 0  # of payloads that arrived


class Ring:
    """Places in the device's memory for a batch of blocks: payloads, and decoded blocks, in whole pages."""

    def __init__(self, driver: Driver, block_bytes: int, ring_bytes: int) -> None:
        self.place_bytes = pages(block_bytes)  # an encoded payload is smaller
        self.most = min(LIMIT_DIRECT_BLOCKS, ring_bytes // (2 * self.place_bytes))
        if self.most < 1:
            text = (
                f"a block has {block_bytes} bytes: a ring of {ring_bytes} bytes has no room for it"
            )
            raise DirectReadsError(text)
        self.nbytes = self.most * self.place_bytes  # of the payloads
        self._driver = driver
        self._memory = driver.device_memory(2 * self.nbytes + PAGE)
        self.payloads = pages(self._memory)
        self.blocks = self.payloads + self.nbytes

    def close(self) -> None:
        self._driver.free(self._memory)


class DirectReader:
    """Reads blocks of one group's size, in one thread. Its stream is its own."""

    def __init__(
        self,
        driver: Driver,
        spec: KvSpec,
        group: int,
        shard: int,
        ring_bytes: int = RING_BYTES,
        calibrated: DirectReadCalibrated | None = None,
    ) -> None:
        """`calibrated` is `kvtier.direct.calibration_of` the space. Raise DirectReadsError or CudaError if
        the device cannot do that."""
        self.driver = driver
        self.counts = Counts()
        self.codecs = codecs_for(spec)
        self._by: DeviceCalibration | None = None
        self._calibrated = calibrated
        self._known: dict[tuple[int, int], int] = {}
        self._place = group, shard
        self._block_bytes = spec.group_block_bytes(group)
        self._element = ELEMENTS.get(spec.dtype, 0)
        self._threads = ThreadPoolExecutor(READERS, "kvtier-headers")
        self._closing: list[Ring | Coder | Codecs | Digester | DeviceCalibration] = []
        self.stream = driver.stream()
        try:
            self.ring = Ring(driver, self._block_bytes, ring_bytes)
            self._closing.append(self.ring)
            self._digester = Digester(driver, DIGESTS)
            self._closing.append(self._digester)
            codecs = Codecs(driver)
            self._closing.append(codecs)
            self._coder = Coder(codecs)
            self._closing.append(self._coder)
            if calibrated is not None:
                self._calibrate(calibrated)
        except BaseException:
            self.close()
            raise

    def _calibrate(self, one: DirectReadCalibrated) -> None:
        """Decode frames of this calibrated codec, too."""
        self._by = calibration(
            self.driver, one.codec, one.level, one.group_tokens, one.ropes, one.parts
        )
        self._closing.append(self._by)
        self._known = {(layer, part): number for layer, part, number in one.numbers}
        self.codecs += bytes([one.codec])

    def close(self) -> None:
        """Free everything. No blocks of it may be in use."""
        self._threads.shutdown()
        self.driver.try_call("cuStreamSynchronize", self.stream)
        while self._closing:
            self._closing.pop().close()
        self.driver.try_call("cuStreamDestroy_v2", self.stream)

    def batches(
        self, space: Space, keys: Keys | Sequence[bytes], source: PayloadReads
    ) -> Iterator[list[ArrivedBlock]]:
        """Read those blocks that a load of these keys needs and that are only on disk. Each batch is valid
        until the next one is requested: copies from it must have ended by then. Raises Refused if the
        tenant's configuration does not permit this, and Unavailable if the daemon has ended."""
        packed, first = Keys.of(keys), 0
        group, shard = self._place
        while first < len(packed):
            lease = read_directly(
                space, packed, self.codecs, group, shard, LEASE_MS, first, self.ring.most
            )
            if not lease.frames:
                return
            first = 1 + max(frame.at for frame in lease.frames)
            yield self.read(lease, source)

    def read(self, lease: DirectLease, source: PayloadReads) -> list[ArrivedBlock]:
        """Read the frames of a lease, at most `ring.most`, and end it. Return the blocks that were verified
        and are still stored. If this raises, the lease ends at its deadline."""
        frames = lease.frames
        if len(frames) > self.ring.most:
            raise ValueError(f"lease: {len(frames)} frames, the ring has room for {self.ring.most}")
        headers = list(self._threads.map(self._header, frames))
        sound = np.array([header is not None for header in headers])
        places = self.ring.payloads + np.arange(len(frames)) * self.ring.place_bytes
        chosen = np.flatnonzero(sound)
        sound[chosen] = source.read(
            [frames[n] for n in chosen], [int(places[n]) for n in chosen], self.stream
        )
        parts = [
            (number, entry.offset, entry.nbytes, entry.digest)
            for number, header in enumerate(headers)
            if header is not None and sound[number]
            for entry in header.entries
        ]
        self._compare(
            sound, [(n, int(places[n]) + at, size, digest) for n, at, size, digest in parts]
        )
        blocks = self._decode(headers, sound, places)
        self._compare(
            sound,
            [
                (number, int(blocks[number]), self._block_bytes, header.raw_digest)
                for number, header in enumerate(headers)
                if header is not None and sound[number] and header.codec != RAW
            ],
        )
        valid = lease.end([bool(one) for one in sound])
        arrived = [
            ArrivedBlock(frame.at, int(address))
            for frame, address, good in zip(frames, blocks, valid, strict=True)
            if good
        ]
        self.counts.read += len(arrived)
        self.counts.failed += len(frames) - len(arrived)
        self.counts.nbytes += sum(
            frame.payload_bytes for frame, good in zip(frames, valid, strict=True) if good
        )
        return arrived

    def _header(self, frame: DirectFrame) -> Frame | None:
        """The verified header of a frame that the device can decode, or None."""
        if not frame.is_inside or frame.read_bytes > self.ring.place_bytes:
            return None
        # Anonymous memory, because reads without the page cache need whole pages of memory.
        with mmap.mmap(-1, frame.header_bytes) as memory, memoryview(memory) as view:
            if not read_whole(frame.file, view, frame.header_at):
                return None
            text = bytes(view)
        try:
            header = frame.verify(text, self._block_bytes)
        except FrameError:
            return None
        if header.codec not in self.codecs or not _is_decodable(header):
            return None
        one = self._calibrated
        wanted = one.profile if one is not None and header.codec == one.codec else ZERO_DIGEST
        return header if header.codec in LOSSLESS or header.profile == wanted else None

    def _compare(
        self, sound: npt.NDArray[np.bool_], ranges: Sequence[tuple[int, int, int, bytes]]
    ) -> None:
        """Mark the frames that have a range (frame, address, bytes, digest) with another digest."""
        for first in range(0, len(ranges), DIGESTS):
            some = ranges[first : first + DIGESTS]
            table = np.array([(address, nbytes) for _, address, nbytes, _ in some], RANGE)
            self._digester.start(table, self.stream)
            wanted = np.frombuffer(b"".join(digest for *_, digest in some), np.uint8)
            differs = (self._digester.finish() != wanted.reshape(len(some), -1)).any(axis=1)
            sound[[some[at][0] for at in np.flatnonzero(differs).tolist()]] = False

    def _decode(
        self, headers: Sequence[Frame | None], sound: npt.NDArray[np.bool_],
        places: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.int64]:  # fmt: skip
        """Decode the sound frames; return the addresses of the blocks, and mark frames that are damaged."""
        blocks = self.ring.blocks + np.arange(len(headers)) * self.ring.place_bytes
        by_codec: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
        for number, header in enumerate(headers):
            if header is None or not sound[number]:
                continue
            if header.codec == RAW:
                blocks[number] = places[number]  # the payload is the block
                continue
            at = int(blocks[number])
            for entry in header.entries:
                source = int(places[number]) + entry.offset
                known = self._known.get((entry.layer, entry.part), -1)
                part = (entry.codec, known, source, entry.nbytes, at, entry.raw_bytes)
                by_codec.setdefault(header.codec, []).append((number, part))
                at += entry.raw_bytes
        for codec, parts in by_codec.items():
            rows = np.array([part for _, part in parts], ENCODED_PART)
            one = self._calibrated
            if one is not None and codec == one.codec:
                self._coder.decode(
                    codec, self._element, rows, self.stream, self._by, one.heads_first
                )
            else:
                self._coder.decode(codec, self._element, rows, self.stream)
            bad = np.flatnonzero(self._coder.finish()["bad"]).tolist()
            sound[[parts[at][0] for at in bad]] = False
        return blocks


def _is_decodable(header: Frame) -> bool:
    """Whether the entries are parts of one codec, in order, and a lossy codec was applied only once."""
    if header.codec not in LOSSLESS and header.lossy_generation != ONCE:
        return False
    at = 0
    for entry in header.entries:
        if entry.codec not in (RAW, header.codec):
            return False
        if entry.codec == RAW and entry.nbytes != entry.raw_bytes:
            return False
        if header.codec == RAW and entry.offset != at:
            return False
        at += entry.raw_bytes
    return header.codec != RAW or at == header.payload_bytes


def open_source(
    mode: str, reader: DirectReader, frame: DirectFrame | None = None
) -> tuple[PayloadReads, str]:
    """The way to read for the option `gpu_direct`, with a text for the log. `auto` uses only kvikio, and only
    if a trial read of this frame proves that the disk writes to the device. `on` uses kvikio, or pinned
    memory if kvikio itself would go through the host's memory. Raises DirectReadsError with the reason."""
    ring = reader.ring
    try:
        cufile = CuFileReads(ring.payloads, ring.nbytes)
    except DirectReadsError as error:
        why = str(error)
    else:
        try:
            why = _not_direct(cufile, reader, frame if mode == "auto" else None)
        except BaseException:
            cufile.close()
            raise
        if not why:
            return cufile, "frames are read by kvikio"
        cufile.close()
    if mode == "auto":
        raise DirectReadsError(f"{why}; blocks on disk are loaded through the daemon's memory")
    source = PinnedReads(reader.driver, ring.payloads, ring.nbytes)
    return source, f"frames are read through pinned memory, because {why}"


def _not_direct(cufile: CuFileReads, reader: DirectReader, frame: DirectFrame | None) -> str:
    """Why kvikio does not read directly, or an empty text. Makes a trial read of the frame, if any."""
    if cufile.is_compatible_only:
        return "kvikio is in its compatibility mode"
    if frame is None:
        return ""
    try:
        return direct_reads_fail(
            lambda: cufile.read([frame], [reader.ring.payloads], reader.stream) == [True]
        )
    except DirectReadsError as error:
        return str(error)
