"""Calls of a CUDA driver by name, for what the product itself does not call."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any

MIB = 1 << 20
SHAREABLE = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
NO_ACCESS, READ, READ_WRITE = 0, 1, 3


class Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class AllocationFlags(ctypes.Structure):
    _fields_ = (("compression", c_ubyte), ("rdma", c_ubyte), ("usage", ctypes.c_ushort),
                ("reserved", c_ubyte * 4))  # fmt: skip


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (("type", c_int), ("handles", c_int), ("location", Location), ("windows", c_void_p),
                ("flags", AllocationFlags))  # fmt: skip


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", c_int))


class CallError(Exception):
    """A call has returned an error: its name."""


class Calls:
    """The library of a driver. Each method raises CallError with the name of the driver's error."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self("cuInit", 0)

    def __call__(self, name: str, *arguments: Any) -> None:
        if result := getattr(self.library, name)(*arguments):
            text = ctypes.c_char_p()
            self.library.cuGetErrorName(result, byref(text))
            raise CallError((text.value or b"").decode() or str(result))

    def enter(self, device: int = 0) -> int:
        """Make the device's context current in this thread, and return it."""
        context = c_void_p()
        self("cuDevicePrimaryCtxRetain", byref(context), device)
        self("cuCtxSetCurrent", context)
        assert context.value is not None
        return context.value

    def leave(self, device: int = 0) -> None:
        self("cuDevicePrimaryCtxRelease_v2", device)
        self("cuCtxSetCurrent", None)

    def stream(self, flags: int = 0) -> c_void_p:
        stream = c_void_p()
        self("cuStreamCreate", byref(stream), c_uint(flags))
        return stream

    def event(self) -> c_void_p:
        event = c_void_p()
        self("cuEventCreate", byref(event), c_uint(2))
        return event

    def allocate(self, nbytes: int) -> int:
        address = c_uint64()
        self("cuMemAlloc_v2", byref(address), c_size_t(nbytes))
        return address.value

    def free(self, address: int) -> None:
        self("cuMemFree_v2", c_uint64(address))

    def host_memory(self, nbytes: int) -> ctypes.Array[c_ubyte]:
        address = c_void_p()
        self("cuMemHostAlloc", byref(address), c_size_t(nbytes), c_uint(3))
        assert address.value is not None
        return (c_ubyte * nbytes).from_address(address.value)

    def free_host(self, memory: ctypes.Array[c_ubyte]) -> None:
        self("cuMemFreeHost", c_void_p(ctypes.addressof(memory)))

    # --- allocations that processes share ---------------------------------------------------------

    def create(self, nbytes: int, device: int = 0, shareable: bool = True) -> int:
        handle = c_uint64()
        wanted = Properties(1, SHAREABLE if shareable else 0, Location(ON_DEVICE, device))
        self("cuMemCreate", byref(handle), c_size_t(nbytes), byref(wanted), c_uint64(0))
        return handle.value

    def release(self, handle: int) -> None:
        self("cuMemRelease", c_uint64(handle))

    def export(self, handle: int) -> int:
        found = c_int(-1)
        self("cuMemExportToShareableHandle", byref(found), c_uint64(handle), SHAREABLE, c_uint64(0))
        return found.value

    def import_(self, descriptor: int) -> int:
        handle = c_uint64()
        self("cuMemImportFromShareableHandle", byref(handle), c_void_p(descriptor), SHAREABLE)
        return handle.value

    def reserve(self, nbytes: int) -> int:
        address = c_uint64()
        self(
            "cuMemAddressReserve",
            byref(address),
            c_size_t(nbytes),
            c_size_t(0),
            c_uint64(0),
            c_uint64(0),
        )
        return address.value

    def unreserve(self, address: int, nbytes: int) -> None:
        self("cuMemAddressFree", c_uint64(address), c_size_t(nbytes))

    def map(self, address: int, nbytes: int, handle: int) -> None:
        self(
            "cuMemMap",
            c_uint64(address),
            c_size_t(nbytes),
            c_size_t(0),
            c_uint64(handle),
            c_uint64(0),
        )

    def unmap(self, address: int, nbytes: int) -> None:
        self("cuMemUnmap", c_uint64(address), c_size_t(nbytes))

    def allow(self, address: int, nbytes: int, flags: int, device: int = 0) -> None:
        wanted = Access(Location(ON_DEVICE, device), flags)
        self("cuMemSetAccess", c_uint64(address), c_size_t(nbytes), byref(wanted), c_size_t(1))

    def open_mapping(self, handle: int, nbytes: int, flags: int = READ_WRITE) -> int:
        """Reserve addresses, map the allocation there and allow the device's access."""
        address = self.reserve(nbytes)
        self.map(address, nbytes, handle)
        if flags != NO_ACCESS:
            self.allow(address, nbytes, flags)
        return address

    def close_mapping(self, address: int, nbytes: int) -> None:
        self.unmap(address, nbytes)
        self.unreserve(address, nbytes)

    def attribute(self, which: int, address: int, kind: Any = c_uint64) -> int:
        found = kind()
        self("cuPointerGetAttribute", byref(found), which, c_uint64(address))
        return int(found.value)

    # --- streams ---------------------------------------------------------------------------------

    def copy(self, to: int, source: int, nbytes: int, stream: c_void_p | None) -> None:
        self("cuMemcpyAsync", c_uint64(to), c_uint64(source), c_size_t(nbytes), stream)

    def record(self, event: c_void_p, stream: c_void_p | None) -> None:
        self("cuEventRecord", event, stream)

    def wait(self, stream: c_void_p | None, event: c_void_p) -> None:
        self("cuStreamWaitEvent", stream, event, 0)

    def reached(self, event: c_void_p) -> bool:
        """Ask whether a stream has reached the event."""
        try:
            self("cuEventQuery", event)
        except CallError as error:
            if str(error) != "CUDA_ERROR_NOT_READY":
                raise
            return False
        return True

    def begin_capture(self, stream: c_void_p, mode: int) -> None:
        self("cuStreamBeginCapture_v2", stream, c_int(mode))

    def end_capture(self, stream: c_void_p) -> c_void_p:
        graph = c_void_p()
        self("cuStreamEndCapture", stream, byref(graph))
        return graph

    def thread_mode(self, mode: int) -> None:
        self("cuThreadExchangeStreamCaptureMode", byref(c_int(mode)))
