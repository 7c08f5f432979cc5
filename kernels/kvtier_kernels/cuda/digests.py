"""Computes XXH3-128 of ranges of a device's memory, the digest that frames contain.

The kernel (kernels/cuda/digest.cu) is compiled when a Digester is created. This module needs NumPy.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier_kernels.cuda.compiler import compile_kernel, source
from kvtier_kernels.cuda.driver import Driver, Event

KERNEL, RUNS_KERNEL, KERNEL_FILE = "kvtier_digest", "kvtier_digest_runs", "digest.cu"
# An address needs no alignment.
RANGE = np.dtype([("address", "<u8"), ("nbytes", "<u8")])
# The layouts of the kernels: a range with the address for the sums of its runs; runs that one warp adds up.
TABLE = np.dtype([*RANGE.descr, ("sums", "<u8")])
UNIT = np.dtype([("range", "<u4"), ("first", "<u4"), ("end", "<u4")])
DIGEST_BYTES, RUN_BYTES, SUM_BYTES = 16, 1024, 64
UNIT_RUNS = 64
LONG_RUNS = 2 * UNIT_RUNS  # a range with fewer has one warp
SUMS_BYTES = 8 << 20  # for the long ranges of a batch, 128 MiB of them; others have one warp
MOST_UNITS = 2 * SUMS_BYTES // (SUM_BYTES * UNIT_RUNS)
THREADS, WARPS = 128, 4
MOST_GRID = 8192

Records = npt.NDArray[np.void]
Digests = npt.NDArray[np.uint8]


class Digester:
    """Digests one batch of ranges at a time, on any stream: start it, do something else, `finish` it.
    Its memory is allocated once, for `most` ranges. Not thread-safe."""

    def __init__(self, driver: Driver, most: int = 4096) -> None:
        """Raise CudaError if the kernel cannot be compiled."""
        self._driver, self._most = driver, most
        binary = compile_kernel(source(KERNEL_FILE), driver.architecture)
        self._module, self._function = driver.load(binary, KERNEL)
        self._runs_function = driver.function(self._module, RUNS_KERNEL)
        self._event = Event(driver)
        nbytes = most * (TABLE.itemsize + DIGEST_BYTES) + MOST_UNITS * UNIT.itemsize
        self._host = driver.pinned_memory(nbytes)
        self._device = driver.device_memory(nbytes)
        self._sums = driver.device_memory(SUMS_BYTES)
        self._under_way, self._digests_at = -1, 0

    def close(self) -> None:
        """Wait for the batch in progress, and free everything."""
        if self._under_way >= 0:
            self._driver.try_call("cuEventSynchronize", self._event._handle)
        self._under_way = -1
        self._driver.free_pinned(self._host)
        self._driver.free(self._device)
        self._driver.free(self._sums)
        self._event.free()
        self._driver.try_call("cuModuleUnload", self._module)

    def start(self, ranges: Records, stream: int) -> None:
        """Queue the digests of ranges (RANGE) behind the earlier work of this stream. The ranges must
        not change before `finish` returns; the batch is their copy."""
        assert self._under_way < 0, "a batch is under way"
        count = len(ranges)
        if count > self._most:
            raise ValueError(
                f"ranges: {count}, at most {self._most} fit: pass them in several batches"
            )
        if count == 0:
            self._event.record(stream)
            self._under_way = 0
            return
        table, units = self._tables(ranges)
        host, device = ctypes.addressof(self._host), self._device
        ctypes.memmove(host, table.ctypes.data, table.nbytes)
        ctypes.memmove(host + table.nbytes, units.ctypes.data, units.nbytes)
        at = table.nbytes + units.nbytes
        try:
            self._driver.copy(device, host, at, stream)
            given = [
                ctypes.c_uint64(device),
                ctypes.c_uint64(device + table.nbytes),
                ctypes.c_uint32(len(units)),
            ]
            if len(units):
                self._launch(self._runs_function, len(units), given, stream)
            given = [ctypes.c_uint64(device), ctypes.c_uint32(count), ctypes.c_uint64(device + at)]
            self._launch(self._function, count, given, stream)
            self._driver.copy(host + at, device + at, count * DIGEST_BYTES, stream)
            self._event.record(stream)
        except BaseException:
            self._driver.try_call("cuStreamSynchronize", stream)
            raise
        self._digests_at = at
        self._under_way = count

    def finish(self) -> Digests:
        """Sleep until the batch is done. Return 16 bytes for each range, as `xxh3_128` returns them."""
        assert self._under_way >= 0, "nothing was started"
        self._event.wait()
        count, self._under_way = self._under_way, -1
        end = self._digests_at + count * DIGEST_BYTES
        found = np.frombuffer(memoryview(self._host)[self._digests_at : end], np.uint8)
        return found.reshape(count, DIGEST_BYTES).copy()

    def _tables(self, ranges: Records) -> tuple[Records, Records]:
        """The ranges, long ones with memory for their sums as far as it lasts; and their units."""
        table = np.zeros(len(ranges), TABLE)
        table["address"], table["nbytes"] = ranges["address"], ranges["nbytes"]
        if ranges["nbytes"].max() <= LONG_RUNS * RUN_BYTES:
            return table, np.zeros(0, UNIT)
        runs = np.maximum(ranges["nbytes"].astype(np.int64) - 1, 0) // RUN_BYTES
        needs = np.where(runs >= LONG_RUNS, runs * SUM_BYTES, 0)
        ends = np.cumsum(needs)
        split = (needs > 0) & (ends <= SUMS_BYTES)
        table["sums"] = np.where(split, self._sums + ends - needs, 0)
        counts = np.where(split, -(-runs // UNIT_RUNS), 0)
        units = np.zeros(int(counts.sum()), UNIT)
        units["range"] = np.repeat(np.arange(len(ranges)), counts)
        number = np.arange(len(units)) - np.repeat(np.cumsum(counts) - counts, counts)
        units["first"] = number * UNIT_RUNS
        units["end"] = np.minimum((number + 1) * UNIT_RUNS, runs[units["range"]])
        return table, units

    def _launch(self, function: int, count: int, arguments: list[Any], stream: int) -> None:
        grid = min(MOST_GRID, -(-count // WARPS))
        self._driver.launch(function, grid, THREADS, arguments, stream)
