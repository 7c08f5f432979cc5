"""A real GPU. Without one, a message says so and the tests are skipped."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvtier_kernels.cuda import CudaError, Driver
from support.device_engine import Bytes

MEMORY_TYPE, OF_DEVICE = 2, 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_MEMORYTYPE_DEVICE
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class RealGpu:
    """The first device."""

    def __init__(self) -> None:
        self._driver = Driver(0)
        self._kept: list[Any] = []
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
        call = HOST_FUNCTION(lambda _: work())
        self._kept.append(call)
        with self._driver.inside:
            assert self._library.cuLaunchHostFunc(ctypes.c_void_p(stream), call, None) == 0

    def forget(self) -> None:
        for one in self._kept:
            if isinstance(one, np.ndarray):
                self._driver.call("cuMemHostUnregister", one.ctypes.data)
        self._kept = []
        self._driver.close()


@pytest.fixture
def gpu() -> Iterator[RealGpu]:
    try:
        real = RealGpu()
    except CudaError as error:
        pytest.skip(f"{error}: NOTHING IS RUN ON A GPU HERE")
    yield real
    real.forget()
