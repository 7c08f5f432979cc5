"""Encodes and decodes parts of blocks on a device; the results are identical to those of the other
implementations.

Kernels (kernels/cuda/codec_*.cu) are compiled when a codec is first used. Inputs and outputs are
in the device's memory. This module needs NumPy.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier_kernels._native import Calibration, DeviceBatch
from kvtier_kernels.cuda.compiler import compile_kernel, source
from kvtier_kernels.cuda.cosines import COSINES, SINES
from kvtier_kernels.cuda.driver import CudaError, Driver, Event

RAW, FIX4, R32, Q8, Q4, Q2, ECSQ, CACHEGEN, FP8, E5M2, NVFP4, MXFP4 = 0, 1, 2, *range(4, 13)

# The layouts of the kernels (codec/part.h, codec_calibrated.cu), which assert the sizes.
RESULT = np.dtype([("bytes", "<u8"), ("offset", "<u8"), ("kept", "<u4"), ("bad", "<u4")])
KNOWN = np.dtype([
    ("means", "<u8"), ("exponents", "<u8"), ("anchors", "<u8"), ("turns", "<u8"), ("cosines", "<u8"),
    ("sines", "<u8"), ("heads", "<u4"), ("dim", "<u4"), ("exact", "<u4"), ("group", "<u4"), ("level", "<u4"),
    ("symbols", "<u4"), ("pairs", "<u4"), ("interleaved", "<u4"), ("anchored", "<u4"), ("reserved", "<u4"),
    ("frequencies", "u1", 32),
])  # fmt: skip
MEASURE_BYTES = 16

ROW, STREAM_ROWS = 64, 512  # elements; a stream's rows: see codec/lossless.h
THREADS, WARPS = 128, 4
MOST_GRID = 8192
SCRATCH_BYTES = 256 << 20  # for all batches of a device that are in progress
LEAST_ROOM = 64 << 10


class Kernels(NamedTuple):
    """The kernels of a codec: the source file, and the functions for decoding and encoding."""

    file: str
    decode: tuple[str, ...]
    begin: tuple[str, ...]
    place: str


_QUANTIZED = Kernels(
    "codec_quantized.cu", ("kvtier_quantized_decode",), ("kvtier_quantized_measure",),
    "kvtier_quantized_place",
)  # fmt: skip
_CALIBRATED = Kernels(
    "codec_calibrated.cu", ("kvtier_calibrated_numbers", "kvtier_calibrated_values"),
    ("kvtier_calibrated_measure",), "kvtier_calibrated_place",
)  # fmt: skip
KERNELS = {
    FIX4: Kernels("codec_lossless.cu", ("kvtier_fix4_count", "kvtier_fix4_decode"),
                  ("kvtier_fix4_begin", "kvtier_fix4_measure"), "kvtier_fix4_place"),
    R32: Kernels("codec_lossless.cu", ("kvtier_r32_decode",),
                 ("kvtier_r32_begin", "kvtier_r32_measure"), "kvtier_r32_place"),
    ECSQ: _CALIBRATED, CACHEGEN: _CALIBRATED,
    **dict.fromkeys((Q8, Q4, Q2, FP8, E5M2, NVFP4, MXFP4), _QUANTIZED),
}  # fmt: skip
SETTLE = "kvtier_settle"

# Parts to encode: the address, the known part, and the index of the payload; payloads: the
# address, and room for all of their parts unencoded. Parts to decode: source and destination.
# `known` is a part's number in the calibration, or -1.
RAW_PART = np.dtype([
    ("address", "<u8"), ("nbytes", "<u8"), ("payload", "<u4"), ("known", "<i4"), ("rows", "<u4"),
    ("channels", "<u4"), ("head", "<u4"), ("by_token", "<u4"),
])  # fmt: skip
PAYLOAD = np.dtype([("into", "<u8"), ("room", "<u8")])
ENCODED_PART = np.dtype([
    ("codec", "<u4"), ("known", "<i4"), ("address", "<u8"), ("nbytes", "<u8"), ("into", "<u8"),
    ("raw_bytes", "<u8"),
])  # fmt: skip
# A part of a calibration: its shape, and the address of its KNOWN.
KNOWN_PART = np.dtype([("heads", "<u8"), ("dim", "<u8"), ("exact", "<u8"), ("address", "<u8")])
Records = npt.NDArray[np.void]
Bytes = npt.NDArray[np.uint8]
NONE_KNOWN: Records = np.zeros(0, KNOWN_PART)


@dataclass(slots=True)
class DeviceCalibration:
    """One level of ecsq or cachegen, on the device. Its creator closes it after its last use."""

    codec: int
    parts: Records  # KNOWN_PART
    group: int
    _driver: Driver
    _memory: int

    def close(self) -> None:
        self._driver.free(self._memory)


def _upload(driver: Driver, to: int, content: bytearray) -> None:
    """Copy these bytes to the device, on a stream of its own: neither the engine's work nor a graph that it
    records is affected. When this returns, they are there."""
    source = (ctypes.c_uint8 * len(content)).from_buffer(content)
    stream = driver.stream()
    try:
        driver.copy(to, ctypes.addressof(source), len(content), stream)
        driver.call("cuStreamSynchronize", stream)
    finally:
        driver.try_call("cuStreamDestroy_v2", stream)


def calibration(
    driver: Driver,
    codec: int,
    level: int,
    group_tokens: int,
    ropes: Sequence[tuple[bytes, bool]],
    parts: Sequence[tuple[int, int, int, int, bytes, bytes, bytes, bytes]],
) -> DeviceCalibration:
    """Copy the parameters of a `Calibration` to the device. Raise ValueError if they are inconsistent."""
    Calibration(codec, level, group_tokens, ropes, parts)
    texts = [COSINES.astype("<f4").tobytes(), SINES.astype("<f4").tobytes()]
    texts += [turns for turns, _ in ropes]
    for _, _, _, _, means, anchors, exponents, _ in parts:
        texts += [means, anchors, exponents]
    places, at = [], len(parts) * KNOWN.itemsize
    for text in texts:
        at = -(-at // 8) * 8
        places.append(at)
        at += len(text)
    memory = driver.device_memory(at)
    found = [memory + place for place in places]
    known = np.zeros(len(parts), KNOWN)
    for number, (heads, dim, exact, rope, _, _, _, table) in enumerate(parts):
        mine = found[2 + len(ropes) + 3 * number :]
        turned = rope >= 0 and codec == ECSQ
        frequencies = np.zeros(32, np.uint8)
        frequencies[: len(table)] = np.frombuffer(table, np.uint8)
        known[number] = (
            mine[0], mine[2], mine[1], found[2 + rope] if turned else 0, found[0], found[1], heads, dim,
            exact, group_tokens, level, len(table), len(ropes[rope][0]) // 8 if turned else 0,
            turned and ropes[rope][1], codec == CACHEGEN, 0, frequencies,
        )  # fmt: skip
    whole = bytearray(at)
    whole[: known.nbytes] = known.tobytes()
    for place, text in zip(places, texts, strict=True):
        whole[place : place + len(text)] = text
    try:
        _upload(driver, memory, whole)
    except CudaError:
        driver.free(memory)
        raise
    shapes = [(*part[:3], memory + number * KNOWN.itemsize) for number, part in enumerate(parts)]
    return DeviceCalibration(codec, np.array(shapes, KNOWN_PART), group_tokens, driver, memory)


@dataclass(slots=True)
class ScratchRoom:
    """Memory that a batch uses alone."""

    address: int
    nbytes: int
    pinned: ctypes.Array[ctypes.c_uint8] | None


class Scratch:
    """Memory for the batches of several coders, on the device and pinned, up to `limit` bytes of each.
    Memory that a coder returns is kept for the next one, because freeing it would wait for all work on
    the device. Thread-safe."""

    def __init__(self, driver: Driver, limit: int) -> None:
        self._driver, self._limit = driver, limit
        self._lock = threading.Lock()
        self._used = {True: 0, False: 0}
        self._idle: list[ScratchRoom] = []

    def take(self, nbytes: int, pinned: bool) -> ScratchRoom:
        """Memory of at least this size. Raise CudaError if the limit or the device has too little."""
        with self._lock:
            fits = [
                one
                for one in self._idle
                if (one.pinned is not None) == pinned and one.nbytes >= nbytes
            ]
            if fits:
                found = min(fits, key=lambda one: one.nbytes)
                self._idle.remove(found)
                return found
            # Room to grow: up to an eighth of the next power of two more.
            step = max(LEAST_ROOM, (1 << (nbytes - 1).bit_length()) // 8)
            size = -(-nbytes // step) * step
            if self._used[pinned] + size > self._limit:
                size = -(-nbytes // LEAST_ROOM) * LEAST_ROOM
            if self._used[pinned] + size > self._limit:
                self._free_idle()
            if self._used[pinned] + size > self._limit:
                raise CudaError(
                    f"a batch of codecs needs {nbytes} bytes of scratch memory, {self._used[pinned]} are "
                    f"in use and scratch_bytes is {self._limit}: start fewer parts at once"
                )
            memory = self._driver.pinned_memory(size) if pinned else None
            address = (
                self._driver.device_memory(size) if memory is None else ctypes.addressof(memory)
            )
            self._used[pinned] += size
            return ScratchRoom(address, size, memory)

    def give(self, block: ScratchRoom) -> None:
        """Return memory that no work on the device uses."""
        with self._lock:
            self._idle.append(block)

    def close(self) -> None:
        """Free what was returned. This waits for the device."""
        with self._lock:
            self._free_idle()

    def _free_idle(self) -> None:
        idle, self._idle = self._idle, []
        for block in idle:
            self._used[block.pinned is not None] -= block.nbytes
            if block.pinned is None:
                self._driver.free(block.address)
            else:
                self._driver.free_pinned(block.pinned)


class Codecs:
    """The kernels of one device, compiled on demand. Thread-safe."""

    def __init__(self, driver: Driver, scratch_bytes: int = SCRATCH_BYTES) -> None:
        self.driver = driver
        self.scratch = Scratch(driver, scratch_bytes)
        self._lock = threading.Lock()
        self._modules: dict[str, int] = {}
        self._functions: dict[tuple[str, str], int] = {}

    def function(self, file: str, name: str) -> int:
        """A kernel. Raise CudaError if it cannot be compiled."""
        with self._lock:
            found = self._functions.get((file, name))
            if found is None:
                if file not in self._modules:
                    binary = compile_kernel(source(file), self.driver.architecture)
                    self._modules[file], _ = self.driver.load(binary, SETTLE)
                found = self.driver.function(self._modules[file], name)
                self._functions[file, name] = found
        return found

    def close(self) -> None:
        """Unload the kernels, and free the memory of the batches; no Coder may use them."""
        self.scratch.close()
        for module in self._modules.values():
            self.driver.try_call("cuModuleUnload", module)
        self._modules, self._functions = {}, {}


class _Room:
    """Memory of one batch after another, which grows."""

    def __init__(self, scratch: Scratch, pinned: bool) -> None:
        self._scratch, self._pinned = scratch, pinned
        self._block: ScratchRoom | None = None
        self.address, self.nbytes = 0, 0

    def fit(self, nbytes: int) -> None:
        """Have this many bytes. Earlier addresses are no longer valid."""
        if nbytes > self.nbytes:
            self.free()
            self._block = self._scratch.take(nbytes, self._pinned)
            self.address, self.nbytes = self._block.address, self._block.nbytes

    def free(self) -> None:
        if self._block is not None:
            self._scratch.give(self._block)
        self._block = None
        self.address, self.nbytes = 0, 0


class _Layout(NamedTuple):
    """The number of units and of payloads, the places of a batch's tables, and the memory that they need."""

    units: int
    payloads: int
    results_at: int
    firsts_at: int
    owners_at: int
    nbytes: int
    scratch_bytes: int


class Coder:
    """Runs one batch at a time, on any stream: start it, do something else, `finish` it. Not thread-safe."""

    def __init__(self, codecs: Codecs) -> None:
        self._codecs, self._driver = codecs, codecs.driver
        self._event = Event(self._driver)
        self._host = _Room(codecs.scratch, pinned=True)
        self._table = _Room(codecs.scratch, pinned=False)
        self._scratch = _Room(codecs.scratch, pinned=False)
        # The results, as bytes: to copy records takes ten times as long.
        self._under_way: Bytes | None = None

    def close(self) -> None:
        """Wait for the batch in progress, and return its memory to the codecs."""
        if self._under_way is not None:
            self._driver.try_call("cuEventSynchronize", self._event._handle)
        for room in (self._host, self._table, self._scratch):
            room.free()
        self._event.free()

    def decode(
        self,
        codec: int,
        element: int,
        parts: Records,
        stream: int,
        by: DeviceCalibration | None = None,
        heads_first: bool = False,
    ) -> None:
        """Queue the decoding of parts (ENCODED_PART); of a damaged part the output is undefined."""
        kernels = KERNELS[codec]
        batch = _batch(codec, element, by, heads_first, 0)
        said = np.ascontiguousarray(parts, ENCODED_PART)
        steps = [(name, False) for name in kernels.decode]
        self._start(
            kernels, steps, len(said), stream,
            lambda: batch.to_decode(said, self._host.address, self._host.nbytes),
        )  # fmt: skip

    def encode(
        self,
        codec: int,
        element: int,
        parts: Records,
        payloads: Records,
        stream: int,
        by: DeviceCalibration | None = None,
        heads_first: bool = False,
        position: int = 0,
    ) -> None:
        """Queue the encoding of parts (RAW_PART, in the order of their payloads) into payloads
        (PAYLOAD). `position` is that of the first token, for codecs that use it."""
        kernels = KERNELS[codec]
        batch = _batch(codec, element, by, heads_first, position)
        said = np.ascontiguousarray(parts, RAW_PART)
        into = np.ascontiguousarray(payloads, PAYLOAD)
        steps = [(name, False) for name in kernels.begin]
        steps += [(SETTLE, True), (kernels.place, False)]
        self._start(
            kernels, steps, len(said), stream,
            lambda: batch.to_encode(
                said, into, self._host.address, self._host.nbytes, self._scratch.address
            ),
        )  # fmt: skip

    def finish(self) -> Records:
        """Sleep until the batch is done. For each part return `bad`, or the encoded size `bytes`
        at `offset` of its payload, and `kept` if the part is stored raw."""
        assert self._under_way is not None, "nothing was started"
        self._event.wait()
        results, self._under_way = self._under_way, None
        return results.copy().view(RESULT)

    def _start(
        self, kernels: Kernels, steps: list[tuple[str, bool]], count: int, stream: int,
        write: Callable[[], tuple[int, ...]],
    ) -> None:  # fmt: skip
        """Queue these kernels. `write` writes the tables as far as the memory has room for them."""
        assert self._under_way is None, "a batch is under way"
        if not count:
            self._under_way = np.zeros(0, np.uint8)
            self._event.record(stream)
            return
        lies = _Layout(*write())
        functions = [(self._codecs.function(kernels.file, name), whole) for name, whole in steps]
        if lies.nbytes > self._host.nbytes or lies.scratch_bytes > self._scratch.nbytes:
            self._host.fit(lies.nbytes)
            self._scratch.fit(lies.scratch_bytes)
            write()
        self._table.fit(lies.nbytes + MEASURE_BYTES * lies.units)  # the measures follow the tables
        host, table = self._host.address, self._table.address
        results = count * RESULT.itemsize
        try:
            with self._driver.inside:
                self._driver.copy(table, host, lies.nbytes, stream)
                for function, whole in functions:
                    warps = lies.payloads if whole else lies.units
                    arguments = [
                        ctypes.c_uint64(table),
                        ctypes.c_uint64(table + (lies.firsts_at if whole else lies.owners_at)),
                        ctypes.c_uint32(warps), ctypes.c_uint64(table + lies.nbytes),
                        ctypes.c_uint64(table + lies.results_at),
                    ]  # fmt: skip
                    grid = min(MOST_GRID, -(-warps // WARPS))
                    self._driver.launch(function, grid, THREADS, arguments, stream)
                self._driver.copy(host + lies.results_at, table + lies.results_at, results, stream)
                self._event.record(stream)
        except BaseException:
            self._driver.try_call("cuStreamSynchronize", stream)
            raise
        told = (ctypes.c_uint8 * results).from_address(host + lies.results_at)
        self._under_way = np.frombuffer(memoryview(told), np.uint8)


def _batch(
    codec: int, element: int, by: DeviceCalibration | None, heads_first: bool, position: int
) -> DeviceBatch:
    if by is not None and by.codec != codec:
        raise ValueError(f"codec: {codec} with a calibration for {by.codec}")
    known, group = (NONE_KNOWN, 0) if by is None else (by.parts, by.group)
    return DeviceBatch(codec, element, heads_first, position, known, group)
