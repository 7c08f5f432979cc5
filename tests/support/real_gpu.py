"""The first GPU, for the engine of the tests."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from kvtier_kernels.cuda import Driver
from support import host_functions
from support.device_engine import Bytes

MEMORY_TYPE, OF_DEVICE = 2, 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_MEMORYTYPE_DEVICE


class RealGpu:
    """The first device."""

    def __init__(self) -> None:
        self._driver = Driver(0)
        self._kept: list[Bytes] = []
        self._library = ctypes.CDLL("libcuda.so.1")

    def driver(self) -> Driver:
        return Driver(0)

    def pin(self, array: Bytes) -> None:
        self._driver.register(array.ctypes.data, array.nbytes)
        self._kept.append(array)

    def on_device(self, address: int) -> bool:
        """Return whether this is memory of the device, and not of the host."""
        kind = ctypes.c_uint()
        with self._driver.inside:
            place = ctypes.c_uint64(address)
            assert self._library.cuPointerGetAttribute(ctypes.byref(kind), MEMORY_TYPE, place) == 0
        return kind.value == OF_DEVICE

    def copy(self, stream: int, to: int, source: int, nbytes: int) -> None:
        self._driver.copy(to, source, nbytes, stream)

    def later(self, stream: int, work: Callable[[], None]) -> None:
        kept = host_functions.kept(work)
        with self._driver.inside:
            handle = ctypes.c_void_p(stream)
            assert self._library.cuLaunchHostFunc(handle, host_functions.call, kept) == 0

    def forget(self) -> None:
        for one in self._kept:
            self._driver.call("cuMemHostUnregister", one.ctypes.data)
        self._kept = []
        self._driver.close()
