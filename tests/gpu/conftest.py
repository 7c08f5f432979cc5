"""A real GPU. Without one, a message says so and the tests are skipped."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvtier_kernels.cuda import CudaError, Driver
from support.device_engine import Bytes

HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class RealGpu:
    """The first device. Host memory that is passed to it is registered: kernels and copies use it like
    device memory, and tests can read it."""

    def __init__(self) -> None:
        self._driver = Driver(0)
        self._kept: list[Any] = []
        self._library = ctypes.CDLL("libcuda.so.1")

    def driver(self) -> Driver:
        return Driver(0)

    def device(self, array: Bytes) -> Bytes:
        self._driver.register(array.ctypes.data, array.nbytes)
        self._kept.append(array)
        return array

    def later(self, stream: int, work: Callable[[], None]) -> None:
        call = HOST_FUNCTION(lambda _: work())
        self._kept.append(call)
        self._driver.call("cuCtxSetCurrent", self._driver._context)
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
