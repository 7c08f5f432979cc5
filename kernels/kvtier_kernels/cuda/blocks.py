"""Copies whole blocks between an engine's pages on a device and slots, as opaque bytes, on
separate streams.

There are two ways, and a measurement when the engine starts selects one: `batch`, the driver's
call for many copies, and `kernel`, which copies all blocks in one launch
(kernels/cuda/copy_blocks.cu). Copies within the device's memory are always by the kernel, if there is
one. Copies of slots in unregistered extents use a staging buffer. This module needs NumPy, which is
always installed with a library for device tensors.
"""

from __future__ import annotations

import copy
import ctypes
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvtier_kernels._native import Buffers, copy_in, copy_out, placed_blocks
from kvtier_kernels.cuda.compiler import compile_kernel, source
from kvtier_kernels.cuda.driver import MULTIPROCESSORS, CudaError, Driver, Event
from kvtier_kernels.cuda.pins import ExtentPins, Extents, PinnedExtent

log = logging.getLogger(__name__)

Way = Literal["batch", "kernel"]
Numbers = npt.NDArray[np.uint64]
SLOT = np.dtype([("extent", "<u4"), ("reserved", "<u4"), ("offset", "<u8"), ("generation", "<u8")])
PIECE = np.dtype([("base", "<u8"), ("stride", "<u8"), ("start", "<u8"), ("nbytes", "<u8")])

KERNEL_FILE, KERNEL = "copy_blocks.cu", "kvtier_copy_blocks"
KERNEL_THREADS = 256
# Thread blocks: enough for the bandwidth to the host, and few of the engine's processors; within the
# device's memory, a number for each of its processors.
KERNEL_GRID = 16
DEVICE_GRID = 4
KERNEL_UNIT_BYTES = 16 << 10
# The kernel occupies processors of the engine, so it is selected only if it is this much faster.
KERNEL_GAIN = 1.25
TABLE_BLOCKS = 16_384
ENTRY_BYTES = 12  # of a table: the addresses of the slots, then the numbers of the blocks
BATCH_COPIES = 65_536
# One stream copies one range after another with gaps between them, so a large batch is divided among
# several.
BATCH_STREAMS = 4
DIVIDED_BYTES = 4 << 20
STAGING_BYTES = 16 << 20
TRIAL_BYTES = 16 << 20
TRIALS = 3


class DevicePieces:
    """The positions of the pieces of an engine's paged blocks on the device: like Pieces, with
    addresses. A Copier creates it for `blocks` blocks. `ways`: how to copy out of the pages and
    into them; `told`: the measured reason."""

    def __init__(
        self,
        addresses: Sequence[int],
        sizes: Sequence[int],
        offsets: Sequence[int],
        strides: Sequence[int],
        piece_bytes: Sequence[int],
        blocks: int,
    ) -> None:
        rows: list[list[int]] = []
        self.block_bytes, self.blocks = 0, blocks
        for number, (address, size, offset, stride, nbytes) in enumerate(
            zip(addresses, sizes, offsets, strides, piece_bytes, strict=True)
        ):
            if stride < nbytes:
                raise ValueError(
                    f"piece {number}: stride {stride} is smaller than the piece "
                    f"({nbytes} bytes), so blocks would overlap"
                )
            if offset < 0 or nbytes < 1 or offset + (blocks - 1) * stride + nbytes > size:
                raise ValueError(
                    f"piece {number}: {blocks} blocks of {nbytes} bytes at offset {offset} do "
                    f"not fit into {size} bytes"
                )
            base = address + offset
            last = rows[-1] if rows else [0, 0, 0, 0]
            if last[0] + last[3] == base and last[1] == stride:
                last[3] += nbytes  # contiguous in the page too: one piece
            else:
                rows.append([base, stride, self.block_bytes, nbytes])
            self.block_bytes += nbytes
        if not rows:
            raise ValueError("pieces: at least one is needed")
        self.rows = np.array([tuple(row) for row in rows], PIECE)
        self.ways: dict[bool, Way] = {}
        self.told: list[str] = []
        self.table, self.units = 0, 0

    def part(self, first: int, stop: int) -> DevicePieces:
        """The bytes [first, stop) of each block, with the same places in a slot."""
        part = copy.copy(self)
        rows = []
        for base, stride, start, nbytes in self.rows.tolist():
            begin, end = max(start, first), min(start + nbytes, stop)
            if begin < end:
                rows.append((base + begin - start, stride, begin, end - begin))
        part.rows = np.array(rows, PIECE)
        part.table, part.units = 0, 0
        return part

    def described(self, table: int, units: int, way: Way) -> None:
        """Copy this way. `table` is the device's address of what `split` returns, which has this number of
        units and stays there until the last copy ends."""
        self.ways = {True: way, False: way}
        self.table, self.units = table, units

    def split(self) -> npt.NDArray[np.void]:
        """The same pieces, divided to fit the unit of a thread block."""
        parts = []
        for base, stride, start, nbytes in self.rows.tolist():
            for at in range(0, nbytes, KERNEL_UNIT_BYTES):
                part = min(KERNEL_UNIT_BYTES, nbytes - at)
                parts.append((base + at, stride, start + at, part))
        return np.array(parts, PIECE)


def _at(memory: Any, offset: int = 0) -> int:
    return ctypes.addressof(memory) + offset


class LaneStreams:
    """The stream of a lane, and more for the parts of a large batch, each with the event of its end."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._forked = Event(driver)  # freed by itself if a stream cannot be made
        self.stream = driver.stream()
        self.branches: list[tuple[int, Event]] = []

    @property
    def all(self) -> list[int]:
        return [self.stream, *(stream for stream, _ in self.branches)]

    def fork(self) -> None:
        """Let the work of more streams follow what is queued on the lane's stream."""
        while len(self.branches) < BATCH_STREAMS - 1:
            self.branches.append((self._driver.stream(), Event(self._driver)))
        self._forked.record(self.stream)
        for stream, _ in self.branches:
            self._forked.hold(stream)

    def join(self) -> None:
        """Let the lane's stream wait for what was queued on the others."""
        for stream, event in self.branches:
            event.record(stream).hold(self.stream)

    def wait(self) -> None:
        """Wait for all that was queued. Errors of the device end the wait."""
        for stream in self.all:
            self._driver.try_call("cuStreamSynchronize", stream)

    def close(self) -> None:
        """Wait, and free everything."""
        self.wait()
        for stream in self.all:
            self._driver.try_call("cuStreamDestroy_v2", stream)
        for event in (self._forked, *(event for _, event in self.branches)):
            event.free()


class CopyLane:
    """A stream for one direction, used by one thread at a time: `start` copies, `finish` them,
    start others. If `start` raises, it has no copies in progress."""

    def __init__(self, copier: Copier) -> None:
        self._driver = copier.driver
        self._copier = copier
        with ExitStack() as made:  # what was made is freed if a later call fails
            self._device_table = self._driver.device_memory(TABLE_BLOCKS * ENTRY_BYTES)
            made.callback(self._driver.free, self._device_table)
            self._table = self._driver.pinned_memory(TABLE_BLOCKS * ENTRY_BYTES)
            made.callback(self._driver.free_pinned, self._table)
            self.streams = LaneStreams(self._driver)
            made.callback(self.streams.close)
            self._event = Event(self._driver)
            made.pop_all()
        self.stream = self.streams.stream
        self._used = 0
        self._staging: Any = None
        self._users: list[PinnedExtent] = []

    def close(self) -> None:
        """Wait for copies in progress, and free everything."""
        self.streams.close()
        self._driver.free(self._device_table)
        self._driver.free_pinned(self._table)
        if self._staging is not None:
            self._driver.free_pinned(self._staging)
        self._event.free()
        self._users = []

    def start(
        self,
        pieces: DevicePieces,
        block_ids: Sequence[int],
        extents: Extents,
        slots: bytes,
        inwards: bool,
        after: Event | None,
    ) -> None:
        """Start to copy blocks into slots or out of them, after this event; check all bounds before."""
        with self._driver.inside:
            ids, addresses, ready, pinned = self._located(
                pieces, block_ids, extents, slots, inwards
            )
            with self._starting(after):
                self._users.append(pinned)
                way = pieces.ways[inwards]
                if ready is None:
                    self.move(pieces, ids, addresses, inwards, way)
                    return
                self.move(pieces, ids[ready], addresses[ready], inwards, way)
                places = np.frombuffer(slots, SLOT)[~ready]
                self._staged(pieces, ids[~ready], extents, places, inwards)

    @contextmanager
    def _starting(self, after: Event | None) -> Iterator[None]:
        """Start copies after this event. After an error wait for those that were started."""
        try:
            if after is not None:
                after.hold(self.stream)
            yield
            self._event.record(self.stream)
        except BaseException:
            self.drain()
            raise

    def _located(
        self, pieces: DevicePieces, block_ids: Sequence[int], extents: Extents, slots: bytes, inwards: bool
    ) -> tuple[npt.NDArray[np.uint32], Numbers, npt.NDArray[np.bool_] | None, PinnedExtent]:  # fmt: skip
        """The ids, the addresses of the slots, which of them are in registered extents (None: all), and
        these. Raise IndexError or ValueError for blocks and slots that do not exist."""
        pinned = self._copier.pins.of(extents)
        ids, addresses, ready = placed_blocks(
            block_ids, pieces.blocks, extents, slots, pieces.block_bytes, inwards, list(pinned.ready)
        )  # fmt: skip
        which = None if ready is None else np.frombuffer(ready, np.bool_)
        return np.frombuffer(ids, np.uint32), np.frombuffer(addresses, np.uint64), which, pinned

    def start_at(
        self, pieces: DevicePieces, block_ids: Sequence[int] | npt.NDArray[np.int64], addresses: Numbers,
        inwards: bool, after: Event | None,
    ) -> None:  # fmt: skip
        """Start to copy blocks to addresses of the device's memory or from them, after this event and
        after what this lane has started."""
        ids = np.asarray(block_ids, np.int64)
        if len(ids) != len(addresses) or (
            len(ids) and not 0 <= ids.min() <= ids.max() < pieces.blocks
        ):
            raise IndexError(
                f"block_ids: {len(ids)} for {len(addresses)} addresses, each of {pieces.blocks} blocks"
            )
        way: Way = "kernel" if "kernel" in self._copier.ways else "batch"
        with self._starting(after):
            self.move(pieces, ids.astype(np.uint32), addresses, inwards, way, self._copier.grid)

    def start_parts(
        self,
        parts: Sequence[DevicePieces],
        copies: Sequence[tuple[Sequence[int], Extents, bytes]],
        after: Event | None,
        events: Sequence[Event],
    ) -> bool:
        """Start to copy slots into pages, after this event: a part of all blocks, then the next one, and
        record the event of each part. `copies`: the blocks, extents and slots. False if that is not possible,
        because some extents are not registered or the blocks are too many: nothing is started."""
        placed: list[tuple[npt.NDArray[np.uint32], Numbers]] = []
        users = []
        for block_ids, extents, slots in copies:
            ids, addresses, ready, pinned = self._located(
                parts[0], block_ids, extents, slots, False
            )
            if ready is not None:
                return False
            placed.append((ids, addresses))
            users.append(pinned)
        # Room for all tables: `_place_table` waits for the device if there is none.
        if sum(len(ids) + 1 for ids, _ in placed) > TABLE_BLOCKS or self._used:
            return False
        with self._starting(after):
            self._users += users
            by_kernel = parts[0].ways[False] == "kernel"
            tables = [self._place_table(ids, slots) for ids, slots in placed if by_kernel]
            for part, event in zip(parts, events, strict=True):
                for at, (ids, addresses) in enumerate(placed):
                    if by_kernel:
                        self._launch(part, tables[at], len(ids), False)
                    else:
                        self.move(part, ids, addresses, False, "batch")
                event.record(self.stream)
        return True

    def hold(self, stream: int | None) -> None:
        """Let all later work of this stream wait for the copies that were started."""
        self._event.hold(stream)

    def wait(self) -> None:
        """Wait for the copies that were started, in any thread. Errors of the device end the wait."""
        self.streams.wait()

    def drain(self) -> None:
        """Wait for started copies after an error, because their slots and pages will be reused."""
        self.wait()
        self._forget()

    def copy(
        self, pieces: DevicePieces, block_ids: Sequence[int], extents: Extents, slots: bytes, inwards: bool,
        after: Event | None,
    ) -> None:  # fmt: skip
        """`start` and `finish`. If this raises, also by an interrupt, no copy is in progress: slots and pages
        will be used again."""
        try:
            self.start(pieces, block_ids, extents, slots, inwards, after)
            self.finish()
        except BaseException:
            self.drain()
            raise

    def finish(self) -> None:
        """Sleep until everything that was started is copied."""
        try:
            self._event.wait()
        finally:
            self._forget()

    def _forget(self) -> None:
        users, self._users, self._used = self._users, [], 0
        self._copier.pins.drop(users)

    def move(
        self, pieces: DevicePieces, ids: npt.NDArray[np.uint32], slots: Numbers, inwards: bool, way: Way,
        grid: int = KERNEL_GRID,
    ) -> None:  # fmt: skip
        """Queue copies between pages and these addresses on the stream."""
        if way == "kernel":
            for first in range(0, len(ids), TABLE_BLOCKS):
                some = ids[first : first + TABLE_BLOCKS]
                table = self._place_table(some, slots[first : first + TABLE_BLOCKS])
                self._launch(pieces, table, len(some), inwards, grid)
            return
        most = max(1, BATCH_COPIES // len(pieces.rows))
        for first in range(0, len(ids), most):
            part = slice(first, first + most)
            self._batch(pieces, ids[part], slots[part], inwards)

    def _batch(
        self, pieces: DevicePieces, ids: npt.NDArray[np.uint32], slots: Numbers, inwards: bool
    ) -> None:
        rows = pieces.rows
        pages = rows["base"] + ids.astype(np.uint64)[:, None] * rows["stride"]
        into = slots[:, None] + rows["start"]
        to, of = (into, pages) if inwards else (pages, into)
        sizes = np.broadcast_to(rows["nbytes"], pages.shape).copy()
        streams = [self.stream]
        if int(sizes.sum()) >= DIVIDED_BYTES:
            self.streams.fork()
            streams = self.streams.all
        each = -(-pages.size // len(streams))
        for number, stream in enumerate(streams):
            first = number * each
            if (count := min(each, pages.size - first)) > 0:
                at = 8 * first
                self._driver.copy_batch(
                    to.ctypes.data + at, of.ctypes.data + at, sizes.ctypes.data + at, count, stream
                )  # fmt: skip
        if len(streams) > 1:
            self.streams.join()

    def _place_table(self, ids: npt.NDArray[np.uint32], slots: Numbers) -> int:
        """The address on the device of a new table of these slots and blocks."""
        count = len(ids)
        start = -(-self._used // 8) * 8
        if start + count * ENTRY_BYTES > len(self._table):
            self._driver.call("cuStreamSynchronize", self.stream)
            start = 0
        self._used = start + count * ENTRY_BYTES
        table = slots.astype(np.uint64).tobytes() + ids.tobytes()
        ctypes.memmove(_at(self._table, start), table, len(table))
        on_device = self._device_table + start
        self._driver.copy(on_device, _at(self._table, start), len(table), self.stream)
        return on_device

    def _launch(
        self, pieces: DevicePieces, on_device: int, count: int, inwards: bool, grid: int = KERNEL_GRID
    ) -> None:  # fmt: skip
        arguments = [
            ctypes.c_uint64(pieces.table), ctypes.c_uint32(pieces.units), ctypes.c_uint64(on_device),
            ctypes.c_uint64(on_device + 8 * count), ctypes.c_uint32(count), ctypes.c_uint32(inwards),
        ]  # fmt: skip
        grid = min(grid, count * pieces.units)
        self._driver.launch(self._copier.function, grid, KERNEL_THREADS, arguments, self.stream)

    def staging(self, block_bytes: int) -> Any:
        """Memory for at least one block that both the host and the device can access."""
        if self._staging is None or len(self._staging) < block_bytes:
            if self._staging is not None:
                self._driver.call("cuStreamSynchronize", self.stream)
                self._driver.free_pinned(self._staging)
            self._staging = self._driver.pinned_memory(max(STAGING_BYTES, block_bytes))
        return self._staging

    def _staged(
        self,
        pieces: DevicePieces,
        ids: npt.NDArray[np.uint32],
        extents: Extents,
        places: npt.NDArray[np.void],
        inwards: bool,
    ) -> None:
        size = pieces.block_bytes
        memory = self.staging(size)
        at_once = len(memory) // size
        steps = _at(memory) + np.arange(at_once, dtype=np.uint64) * np.uint64(size)
        for first in range(0, len(ids), at_once):
            part = slice(first, first + at_once)
            count, slots = len(ids[part]), places[part].tobytes()
            if not inwards:
                copy_out(extents, slots, Buffers(memory, 0, count, size, True, False))
            self.move(pieces, ids[part], steps[:count], inwards, pieces.ways[inwards])
            self._driver.call("cuStreamSynchronize", self.stream)
            if inwards:
                copy_in(extents, slots, Buffers(memory, 0, count, size, False, False))


class Copier:
    """The common state of a worker's copies on one device: the kernel, the registered extents,
    tables. `way` is the way to use; `auto` selects the faster one for these pieces in each
    direction."""

    def __init__(self, driver: Driver, way: Way | Literal["auto"] = "auto") -> None:
        self.driver = driver
        self.function = 0
        self._module = 0
        self.grid = DEVICE_GRID * driver.attribute(MULTIPROCESSORS)
        self._tables: list[int] = []
        self._open: list[CopyLane] = []
        why = ""
        try:
            binary = compile_kernel(source(KERNEL_FILE), driver.architecture)
            self._module, self.function = driver.load(binary, KERNEL)
        except CudaError as error:
            why = str(error)
        has: dict[Way, bool] = {"kernel": bool(self.function), "batch": driver.has_batch}
        self.ways = [one for one in has if has[one] and way in ("auto", one)]
        if not self.ways:
            batch = "" if driver.has_batch else "; batch copies need a driver for CUDA 12.8"
            raise CudaError(
                f"{driver.name}: cannot copy: {why or 'gpu_copies excludes the kernel'}{batch}"
            )
        if why:
            log.warning(
                "kvtier: copying by the driver only, because the copy kernel is not available: %s",
                why,
            )
        self.pins = ExtentPins(driver)

    def lane(self) -> CopyLane:
        """A new, independent stream."""
        self._open.append(CopyLane(self))
        return self._open[-1]

    def close(self) -> None:
        """Wait for the lanes and free everything. No other thread may be copying."""
        for lane in self._open:
            lane.close()
        self._open = []
        self.pins.close()
        for table in self._tables:
            self.driver.free(table)
        self._tables = []
        if self._module:
            self.driver.try_call("cuModuleUnload", self._module)

    def pieces(
        self,
        addresses: Sequence[int],
        sizes: Sequence[int],
        offsets: Sequence[int],
        strides: Sequence[int],
        piece_bytes: Sequence[int],
        blocks: int,
        after: Event | None = None,
    ) -> DevicePieces:
        """Create DevicePieces and select the way to copy. Writes to their pages, and restores them."""
        pieces = DevicePieces(addresses, sizes, offsets, strides, piece_bytes, blocks)
        lane = CopyLane(self)
        try:
            self._describe(pieces, lane)
            if after is not None:
                after.wait()
            self._choose(lane, pieces)
        finally:
            lane.close()
        return pieces

    def parts(self, pieces: DevicePieces, bounds: Sequence[int]) -> list[DevicePieces]:
        """The parts of these pieces that end at these bytes of a block; the last bound is the block's end."""
        lane = CopyLane(self)
        try:
            parts = [
                pieces.part(first, stop)
                for first, stop in zip([0, *bounds[:-1]], bounds, strict=True)
            ]
            for part in parts:
                self._describe(part, lane)
        finally:
            lane.close()
        return parts

    def _describe(self, pieces: DevicePieces, lane: CopyLane) -> None:
        """Copy the kernel's description of these pieces to the device."""
        if self.function:
            units = pieces.split()
            pieces.units, pieces.table = len(units), self.driver.device_memory(units.nbytes)
            self._tables.append(pieces.table)
            self.driver.copy(pieces.table, units.ctypes.data, units.nbytes, lane.stream)
            self.driver.call("cuStreamSynchronize", lane.stream)

    def _choose(self, lane: CopyLane, pieces: DevicePieces) -> None:
        """Measure both ways, and check that each reads what the other wrote."""
        size = pieces.block_bytes
        memory = lane.staging(size)
        count = min(pieces.blocks, max(1, min(TRIAL_BYTES, len(memory)) // size))
        ids = np.arange(count, dtype=np.uint32)
        steps = _at(memory) + np.arange(count, dtype=np.uint64) * np.uint64(size)
        shown = np.frombuffer(memory, np.uint8)[: count * size]

        def move(inwards: bool, way: Way) -> float:
            started = time.perf_counter()
            lane.move(pieces, ids, steps, inwards, way)
            self.driver.call("cuStreamSynchronize", lane.stream)
            return time.perf_counter() - started

        first, last = self.ways[0], self.ways[-1]
        move(True, last)
        before = shown.copy()
        took: dict[tuple[bool, Way], float] = {}
        for writer, reader in dict.fromkeys(((first, last), (last, first))):
            pattern = np.frombuffer(os.urandom(len(shown)), np.uint8)
            shown[:] = pattern
            took[False, writer] = min(move(False, writer) for _ in range(TRIALS))
            shown[:] = 0
            took[True, reader] = min(move(True, reader) for _ in range(TRIALS))
            if not np.array_equal(shown, pattern):
                text = f"{writer} and {reader} copied different bytes"
                raise CudaError(f"{self.driver.name}: {text}: set gpu_copies to one of them")
        shown[:] = before
        move(False, last)
        for inwards in (True, False):
            speeds = {way: count * size / took[inwards, way] for way in self.ways}
            gain = KERNEL_GAIN if len(self.ways) > 1 else 0
            fast = speeds.get("kernel", 0) > gain * speeds.get("batch", 0)
            pieces.ways[inwards] = "kernel" if fast else "batch"
            told = ", ".join(f"{way} {speed / 1e9:.1f} GB/s" for way, speed in speeds.items())
            pieces.told.append(
                f"{'save' if inwards else 'load'} by {pieces.ways[inwards]} ({told})"
            )
