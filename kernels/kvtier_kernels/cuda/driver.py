"""The required functions of the CUDA driver through ctypes, without toolkit and torch.

No library is opened before a Driver is created. A Driver creates a context, so only processes that
hold a cache on the device may create one. Every call releases the GIL.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

LIBRARY = "libcuda.so.1"

# The functions of the driver, as cuda.h declares them.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (POINTER(c_char), c_int, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxSetCurrent": (c_void_p,),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventDestroy_v2": (c_void_p,),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemHostAlloc": (POINTER(c_void_p), c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuModuleLoadData": (POINTER(c_void_p), c_void_p),
    "cuModuleUnload": (c_void_p,),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuLaunchKernel": (
        c_void_p, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_void_p,
        POINTER(c_void_p), POINTER(c_void_p),
    ),
}  # fmt: skip
BATCH_ARGUMENTS = (
    c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_size_t, c_void_p,
)  # fmt: skip
# By driver version: since 13.0; since 12.8, which also returns the index of a wrong copy.
BATCH: dict[str, tuple[Any, ...]] = {
    "cuMemcpyBatchAsync_v2": BATCH_ARGUMENTS,
    "cuMemcpyBatchAsync": (*BATCH_ARGUMENTS, c_void_p),
}

# Attributes and flags of cuda.h.
CAPABILITY_MAJOR, CAPABILITY_MINOR, UNIFIED_ADDRESSING, REGISTERED_BY_HOST_POINTER = 75, 76, 41, 91
NON_BLOCKING = 1
BLOCKING_SYNC, NO_TIMING = 1, 2
PORTABLE, MAPPED = 1, 2
RELAXED = 2
STREAM_ORDER = 1


class CudaError(RuntimeError):
    """The driver or the compiler returned an error."""


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (("order", c_int), ("source", _Location), ("target", _Location), ("flags", c_uint))


class Event:
    """A point in a stream."""

    def __init__(self, driver: Driver) -> None:
        handle = c_void_p()
        driver.call("cuEventCreate", byref(handle), BLOCKING_SYNC | NO_TIMING)
        self._driver = driver
        self._handle = handle
        # The driver keeps the event while a stream waits for it.
        self.free = weakref.finalize(self, driver.try_call, "cuEventDestroy_v2", handle)
        self.free.atexit = False

    def record(self, stream: int | None) -> Event:
        """Set this to the current end of the stream."""
        self._driver.call("cuEventRecord", self._handle, stream)
        return self

    def wait(self) -> None:
        """Sleep until the stream has reached it. Raise errors of earlier work on the device."""
        self._driver.call("cuEventSynchronize", self._handle)

    def hold(self, stream: int | None) -> None:
        """Let all later work of this stream wait for the event."""
        self._driver.call("cuStreamWaitEvent", stream, self._handle, 0)


class Driver:
    """One device and its primary context, which torch uses too. Thread-safe."""

    def __init__(self, device: int, library: str = LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise CudaError(f"no CUDA driver: {error}") from error
        self._batch = ""
        for name, arguments in (ARGUMENTS | BATCH).items():
            function = getattr(self._library, name, None)
            if function is None and name in BATCH:
                continue
            if function is None:
                raise CudaError(f"the CUDA driver is too old: it has no {name}")
            function.argtypes, function.restype = arguments, c_int
            self._batch = self._batch or (name if name in BATCH else "")
        self._thread = threading.local()
        self._context = c_void_p()
        self._device = c_int()
        self._checked("cuInit", 0)
        self._checked("cuDeviceGet", byref(self._device), device)
        self._checked("cuDevicePrimaryCtxRetain", byref(self._context), self._device)
        # For functions that this class does not declare.
        self.library, self.device = self._library, self._device.value
        # A slot must have one address for both the host and the device.
        for attribute in (UNIFIED_ADDRESSING, REGISTERED_BY_HOST_POINTER):
            if not self.attribute(attribute):
                self.close()
                raise CudaError(f"{self.name}: cannot use host addresses ({attribute})")

    def close(self) -> None:
        """Release the context. Objects created by this driver become unusable."""
        self._checked("cuDevicePrimaryCtxRelease_v2", self._device)

    def _checked(self, name: str, *arguments: Any) -> None:
        result = getattr(self._library, name)(*arguments)
        if result:
            text = c_char_p()
            self._library.cuGetErrorName(result, byref(text))
            raise CudaError(f"{name}: {(text.value or b'').decode() or result}")

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function in the device's context. Raise CudaError with the driver's name for the error."""
        if not getattr(self._thread, "ready", False):
            self._checked("cuCtxSetCurrent", self._context)
            self._thread.ready = True
        self._checked(name, *arguments)

    def own_thread(self) -> None:
        """Allow this thread to call the driver, without effect on a graph that the engine records."""
        self.try_call("cuThreadExchangeStreamCaptureMode", byref(c_int(RELAXED)))

    def try_call(self, name: str, *arguments: Any) -> None:
        """Free something where a failure could not be handled, and ignore errors."""
        try:
            self.call(name, *arguments)
        except CudaError:
            return

    def attribute(self, number: int) -> int:
        value = c_int()
        self._checked("cuDeviceGetAttribute", byref(value), number, self._device)
        return value.value

    @property
    def name(self) -> str:
        text = ctypes.create_string_buffer(256)
        self._checked("cuDeviceGetName", text, len(text), self._device)
        return text.value.decode()

    @property
    def architecture(self) -> str:
        return f"sm_{self.attribute(CAPABILITY_MAJOR)}{self.attribute(CAPABILITY_MINOR)}"

    @property
    def has_batch(self) -> bool:
        return bool(self._batch)

    def stream(self) -> int:
        """A new non-blocking stream."""
        handle = c_void_p()
        self.call("cuStreamCreate", byref(handle), NON_BLOCKING)
        assert handle.value is not None
        return handle.value

    def device_memory(self, nbytes: int) -> int:
        """The address of new memory on the device."""
        address = c_uint64()
        self.call("cuMemAlloc_v2", byref(address), nbytes)
        return address.value

    def pinned_memory(self, nbytes: int) -> ctypes.Array[ctypes.c_uint8]:
        """New memory of the host that the device can access. Free it with `free_pinned`."""
        address = c_void_p()
        self.call("cuMemHostAlloc", byref(address), nbytes, PORTABLE | MAPPED)
        assert address.value is not None
        return (ctypes.c_uint8 * nbytes).from_address(address.value)

    def free_pinned(self, memory: ctypes.Array[ctypes.c_uint8]) -> None:
        self.try_call("cuMemFreeHost", ctypes.addressof(memory))

    def register(self, address: int, nbytes: int) -> None:
        """Pin memory of the host, and map it for the device."""
        self.call("cuMemHostRegister_v2", address, nbytes, PORTABLE | MAPPED)

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        self.call("cuMemcpyAsync", to, source, nbytes, stream)

    def copy_batch(self, to: int, sources: int, sizes: int, count: int, stream: int) -> None:
        """Copy many ranges with one call; the arguments are addresses of three arrays of 64-bit
        numbers, read before it returns. The copies have no order among themselves, and follow all
        earlier work of the stream."""
        attributes, first = _Attributes(order=STREAM_ORDER), c_size_t(0)
        arguments = [to, sources, sizes, count, byref(attributes), byref(first), 1]
        if len(BATCH[self._batch]) > len(BATCH_ARGUMENTS):
            arguments.append(byref(c_size_t()))
        self.call(self._batch, *arguments, stream)

    def load(self, binary: bytes, name: str) -> tuple[int, int]:
        """A module of machine code, and a kernel in it."""
        module = c_void_p()
        self.call("cuModuleLoadData", byref(module), binary)
        assert module.value is not None
        return module.value, self.function(module.value, name)

    def function(self, module: int, name: str) -> int:
        """Another kernel of a module."""
        function = c_void_p()
        self.call("cuModuleGetFunction", byref(function), module, name.encode())
        assert function.value is not None
        return function.value

    def launch(
        self, function: int, grid: int, threads: int, arguments: list[Any], stream: int
    ) -> None:
        """Run a one-dimensional kernel; its arguments are ctypes numbers."""
        places = (c_void_p * len(arguments))(*(ctypes.addressof(one) for one in arguments))
        self.call(
            "cuLaunchKernel", function, grid, 1, 1, threads, 1, 1, 0, stream, places, None
        )  # fmt: skip
