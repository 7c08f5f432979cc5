"""Computes XXH3-128 of ranges of a device's memory, the digest that frames contain.

The kernel (kernels/cuda/digest.cu) is compiled when a Digester is created. This module needs NumPy.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from kvtier_kernels.cuda.compiler import compile_kernel, source
from kvtier_kernels.cuda.driver import Driver, Event

KERNEL, KERNEL_FILE = "kvtier_digest", "digest.cu"
# The layout of the kernel, which asserts the size. An address needs no alignment.
RANGE = np.dtype([("address", "<u8"), ("nbytes", "<u8")])
DIGEST_BYTES = 16
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
        self._event = Event(driver)
        nbytes = most * (RANGE.itemsize + DIGEST_BYTES)
        self._host = driver.pinned_memory(nbytes)
        self._device = driver.device_memory(nbytes)
        self._under_way = -1

    def close(self) -> None:
        """Wait for the batch in progress, and free everything."""
        if self._under_way >= 0:
            self._driver.try_call("cuEventSynchronize", self._event._handle)
        self._under_way = -1
        self._driver.free_pinned(self._host)
        self._driver.try_call("cuMemFree_v2", self._device)
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
        host, table = ctypes.addressof(self._host), np.ascontiguousarray(ranges, RANGE)
        ctypes.memmove(host, table.ctypes.data, table.nbytes)
        digests = self._device + table.nbytes
        arguments = [
            ctypes.c_uint64(self._device), ctypes.c_uint32(count), ctypes.c_uint64(digests),
        ]  # fmt: skip
        grid = min(MOST_GRID, -(-count // WARPS))
        try:
            self._driver.copy(self._device, host, table.nbytes, stream)
            self._driver.launch(self._function, grid, THREADS, arguments, stream)
            self._driver.copy(host + table.nbytes, digests, count * DIGEST_BYTES, stream)
            self._event.record(stream)
        except BaseException:
            self._driver.try_call("cuStreamSynchronize", stream)
            raise
        self._under_way = count

    def finish(self) -> Digests:
        """Sleep until the batch is done. Return 16 bytes for each range, as `xxh3_128` returns them."""
        assert self._under_way >= 0, "nothing was started"
        count, self._under_way = self._under_way, -1
        self._event.wait()
        start, end = count * RANGE.itemsize, count * (RANGE.itemsize + DIGEST_BYTES)
        found = np.frombuffer(memoryview(self._host)[start:end], np.uint8)
        return found.reshape(count, DIGEST_BYTES).copy()
