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
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (POINTER(c_char), c_int, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
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
MULTIPROCESSORS = 16
CAPABILITY_MAJOR, CAPABILITY_MINOR, UNIFIED_ADDRESSING, REGISTERED_BY_HOST_POINTER = 75, 76, 41, 91
NON_BLOCKING = 1
BLOCKING_SYNC, NO_TIMING = 1, 2
PORTABLE, MAPPED, READ_ONLY = 1, 2, 8
RELAXED = 2
STREAM_ORDER = 1
OLDEST = (12, 0)  # of a driver, by the version of CUDA that it supports
# What a user can do about an error, by its number.
ADVICE = {
    3: "a process that was forked from one that uses CUDA cannot use it",
    46: "another process has this device in exclusive mode, or its mode forbids contexts (nvidia-smi -c 0)",
}


class CudaError(RuntimeError):
    """The driver or the compiler returned an error."""


class Architecture(str):
    """The name of an architecture, such as sm_90, and the version of CUDA that its driver supports."""

    cuda: tuple[int, int]


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
        driver.events.add(self)

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


class _Current(threading.local):
    """A thread's context, as far as a Driver has looked."""

    def __init__(self) -> None:
        self.depth = 0
        self.pushed = False
        self.found = c_void_p()
        self.place = byref(self.found)

    def look(self, driver: Driver) -> None:
        """Find out which context this thread has."""
        if driver.context is None:
            raise CudaError("the CUDA device was closed")
        driver.checked("cuCtxGetCurrent", self.place)


class _Inside:
    """Makes the device's context current in a `with` block, and restores the thread's own at its end.
    Blocks can be nested."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def __enter__(self) -> None:
        driver, thread = self._driver, self._driver.thread
        if thread.depth == 0:
            thread.look(driver)
            thread.pushed = thread.found.value != driver.context
            if thread.pushed:
                driver.checked("cuCtxPushCurrent_v2", driver.context)
        thread.depth += 1

    def __exit__(self, *_: object) -> None:
        thread = self._driver.thread
        thread.depth -= 1
        if thread.depth == 0 and thread.pushed:
            self._driver.checked("cuCtxPopCurrent_v2", thread.place)


class Driver:
    """One device and its primary context, which torch uses too. Thread-safe. A call leaves the thread's
    context as it was; several calls in a block `with driver.inside` look at it once."""

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
        self.has_batch = bool(self._batch)
        self.thread = _Current()
        self.inside = _Inside(self)
        self.context: int | None = None
        self.events: weakref.WeakSet[Event] = weakref.WeakSet()
        self._device = c_int()
        self.checked("cuInit", 0)
        number = c_int()
        self.checked("cuDriverGetVersion", byref(number))
        self.version = number.value // 1000, number.value % 1000 // 10
        if self.version < OLDEST:
            has, needs = (".".join(map(str, one)) for one in (self.version, OLDEST))
            raise CudaError(f"the driver supports CUDA {has}; kvtier needs {needs} or later")
        self.checked("cuDeviceGet", byref(self._device), device)
        context = c_void_p()
        self.checked("cuDevicePrimaryCtxRetain", byref(context), self._device)
        self.context = context.value
        # For functions that this class does not declare.
        self.library, self.device = self._library, self._device.value
        # A slot must have one address for both the host and the device.
        for attribute in (UNIFIED_ADDRESSING, REGISTERED_BY_HOST_POINTER):
            if not self.attribute(attribute):
                self.close()
                raise CudaError(f"{self.name}: cannot use host addresses ({attribute})")

    def close(self) -> None:
        """Free the events, and release the context. Later calls raise CudaError, except `try_call`; objects
        that still exist call nothing when they end."""
        if self.context is None:
            return
        for event in list(self.events):
            event.free()
        self.context = None
        self._library.cuDevicePrimaryCtxRelease_v2(self._device)  # a failed device may refuse it

    def checked(self, name: str, *arguments: Any) -> None:
        """Call a function that needs no context. Raise CudaError with the driver's name for the error."""
        result = getattr(self._library, name)(*arguments)
        if result:
            text = c_char_p()
            self._library.cuGetErrorName(result, byref(text))
            advice = f": {ADVICE[result]}" if result in ADVICE else ""
            raise CudaError(f"{name}: {(text.value or b'').decode() or result}{advice}")

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function in the device's context. Raise CudaError with the driver's name for the error."""
        thread = self.thread
        if thread.depth == 0:
            thread.look(self)
            if thread.found.value != self.context:
                with self.inside:
                    self.checked(name, *arguments)
                return
        self.checked(name, *arguments)

    def own_thread(self) -> None:
        """Let this thread of ours call the driver without effect on a graph that the engine records, and
        without a change of contexts: that of this device becomes the thread's own."""
        self.try_call("cuThreadExchangeStreamCaptureMode", byref(c_int(RELAXED)))
        if self.context is not None:
            self.checked("cuCtxSetCurrent", self.context)

    def try_call(self, name: str, *arguments: Any) -> None:
        """Free something where a failure could not be handled, and ignore errors."""
        try:
            self.call(name, *arguments)
        except CudaError:
            return

    def attribute(self, number: int) -> int:
        value = c_int()
        self.checked("cuDeviceGetAttribute", byref(value), number, self._device)
        return value.value

    @property
    def name(self) -> str:
        text = ctypes.create_string_buffer(256)
        self.checked("cuDeviceGetName", text, len(text), self._device)
        return text.value.decode()

    @property
    def architecture(self) -> Architecture:
        name = f"sm_{self.attribute(CAPABILITY_MAJOR)}{self.attribute(CAPABILITY_MINOR)}"
        found = Architecture(name)
        found.cuda = self.version
        return found

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

    def free(self, address: int) -> None:
        """Free memory on the device. This waits for all of the device's work, also for the engine's."""
        self.try_call("cuMemFree_v2", address)

    def pinned_memory(self, nbytes: int) -> ctypes.Array[ctypes.c_uint8]:
        """New memory of the host that the device can access. Free it with `free_pinned`."""
        address = c_void_p()
        self.call("cuMemHostAlloc", byref(address), nbytes, PORTABLE | MAPPED)
        assert address.value is not None
        return (ctypes.c_uint8 * nbytes).from_address(address.value)

    def free_pinned(self, memory: ctypes.Array[ctypes.c_uint8]) -> None:
        self.try_call("cuMemFreeHost", ctypes.addressof(memory))

    def register(self, address: int, nbytes: int, read_only: bool = False) -> None:
        """Pin memory of the host, and map it for the device. `read_only`: this process may not write it; not
        every device can read such memory, and CudaError is raised if it cannot."""
        flags = PORTABLE | MAPPED | (READ_ONLY if read_only else 0)
        self.call("cuMemHostRegister_v2", address, nbytes, flags)

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
