"""Memory of a GPU that processes share by descriptors: a holder allocates it, others map it.

The holder needs no context and no CUDA package. Nothing is opened before a HeldGpu is made, and no symbol of
the driver is looked up before this module is used.
"""

from __future__ import annotations

import ctypes
import os
import uuid
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint64, c_void_p
from typing import Any, Protocol

LIBRARY = "libcuda.so.1"
PINNED, DEVICE, DESCRIPTOR, READ_WRITE = 1, 1, 1, 3
RECOMMENDED = 1
MAPS_MEMORY, SHARES_DESCRIPTORS = 102, 103  # attributes of cuda.h
UUID_BYTES = 16


class GpuMemoryError(RuntimeError):
    """The driver cannot provide memory that processes share."""


class _Place(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Flags(ctypes.Structure):
    _fields_ = (("compression", c_ubyte), ("rdma", c_ubyte), ("usage", ctypes.c_ushort),
                ("reserved", c_ubyte * 4))  # fmt: skip


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (("type", c_int), ("handles", c_int), ("location", _Place), ("windows", c_void_p),
                ("flags", _Flags))  # fmt: skip


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Place), ("flags", c_int))


_HOLDER: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetUuid_v2": (POINTER(c_ubyte * UUID_BYTES), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(_Properties), c_int),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(_Properties), c_uint64),
    "cuMemExportToShareableHandle": (c_void_p, c_uint64, c_int, c_uint64),
    "cuMemRelease": (c_uint64,),
}
_USER: dict[str, tuple[Any, ...]] = {
    "cuDeviceGetUuid_v2": (POINTER(c_ubyte * UUID_BYTES), c_int),
    "cuMemImportFromShareableHandle": (POINTER(c_uint64), c_void_p, c_int),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(_Access), c_size_t),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemRelease": (c_uint64,),
}


def _declare(library: ctypes.CDLL, functions: dict[str, tuple[Any, ...]]) -> None:
    for name, arguments in functions.items():
        function = getattr(library, name, None)
        if function is None:
            raise GpuMemoryError(f"the CUDA driver is too old: it has no {name}")
        function.argtypes, function.restype = arguments, c_int


def plain_uuid(text: str) -> str:
    """Return the name of a GPU, or of a part of one (MIG), as this module writes it: without the prefix that
    nvidia-smi prints."""
    for prefix in ("GPU-", "MIG-"):
        text = text.removeprefix(prefix)
    return str(uuid.UUID(text))


class HeldGpu:
    """One GPU, by its index or its UUID. Creates no context."""

    def __init__(self, name: str, library: str = LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise GpuMemoryError(f"no CUDA driver: {error}") from error
        _declare(self._library, _HOLDER)
        self._call("cuInit", 0)
        self._device, self.uuid = self._find(name)
        for attribute in (MAPS_MEMORY, SHARES_DESCRIPTORS):
            value = c_int()
            self._call("cuDeviceGetAttribute", byref(value), attribute, self._device)
            if not value.value:
                raise GpuMemoryError(
                    f"GPU {self.uuid} cannot share memory by descriptors (attribute {attribute})"
                )
        unit = c_size_t()
        asked = byref(self._properties())
        self._call("cuMemGetAllocationGranularity", byref(unit), asked, RECOMMENDED)
        self.unit_bytes = unit.value

    def _call(self, name: str, *arguments: Any) -> None:
        if result := getattr(self._library, name)(*arguments):
            text = c_char_p()
            self._library.cuGetErrorName(result, byref(text))
            raise GpuMemoryError(f"{name}: {(text.value or b'').decode() or result}")

    def _find(self, name: str) -> tuple[c_int, str]:
        count = c_int()
        self._call("cuDeviceGetCount", byref(count))
        found = []
        for index in range(count.value):
            device, packed = c_int(), (c_ubyte * UUID_BYTES)()
            self._call("cuDeviceGet", byref(device), index)
            self._call("cuDeviceGetUuid_v2", byref(packed), device)
            found.append((device, str(uuid.UUID(bytes=bytes(packed)))))
        if name.isdecimal():
            if int(name) < len(found):
                return found[int(name)]
        else:
            try:
                wanted = plain_uuid(name)
            except ValueError:
                raise GpuMemoryError(f"{name!r} is neither an index nor a UUID of a GPU") from None
            for one in found:
                if one[1] == wanted:
                    return one
        there = ", ".join(one for _, one in found) or "none"
        raise GpuMemoryError(f"there is no GPU {name}; this process sees {there}")

    def _properties(self) -> _Properties:
        location = _Place(DEVICE, self._device.value)
        return _Properties(PINNED, DESCRIPTOR, location, None, _Flags())

    def allocate(self, nbytes: int) -> tuple[int, int]:
        """Allocate memory, a multiple of `unit_bytes`. Return its handle for `release`, and a descriptor that
        the caller closes."""
        handle, fd = c_uint64(), c_int(-1)
        self._call("cuMemCreate", byref(handle), nbytes, byref(self._properties()), 0)
        try:
            self._call("cuMemExportToShareableHandle", byref(fd), handle, DESCRIPTOR, 0)
        except GpuMemoryError:
            self.release(handle.value)
            raise
        return handle.value, fd.value

    def release(self, handle: int) -> None:
        """Give memory back. It is free when no process has it mapped."""
        self._call("cuMemRelease", handle)


class ContextDriver(Protocol):
    """A driver with a context."""

    library: ctypes.CDLL
    device: int

    def call(self, name: str, *arguments: Any) -> None: ...
    def try_call(self, name: str, *arguments: Any) -> None: ...


def uuid_of(driver: ContextDriver) -> str:
    """Return the name of the driver's GPU."""
    _declare(driver.library, _USER)
    packed = (c_ubyte * UUID_BYTES)()
    driver.call("cuDeviceGetUuid_v2", byref(packed), driver.device)
    return str(uuid.UUID(bytes=bytes(packed)))


class MappedGpuMemory:
    """Memory of a holder, mapped for the driver's device until `close`. Closes the descriptor in any case."""

    def __init__(self, driver: ContextDriver, fd: int, nbytes: int) -> None:
        self.address, self.nbytes = 0, nbytes
        self._driver = driver
        self._handle = c_uint64()
        self._is_mapped = False
        address = c_uint64()
        try:
            _declare(driver.library, _USER)
            driver.call(
                "cuMemImportFromShareableHandle", byref(self._handle), c_void_p(fd), DESCRIPTOR
            )
            driver.call("cuMemAddressReserve", byref(address), nbytes, 0, 0, 0)
            self.address = address.value
            driver.call("cuMemMap", self.address, nbytes, 0, self._handle, 0)
            self._is_mapped = True
            access = _Access(_Place(DEVICE, driver.device), READ_WRITE)
            driver.call("cuMemSetAccess", self.address, nbytes, byref(access), 1)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(fd)

    def close(self) -> None:
        """Unmap it. No copy may use it."""
        if self._is_mapped:
            self._driver.try_call("cuMemUnmap", self.address, self.nbytes)
        if self.address:
            self._driver.try_call("cuMemAddressFree", self.address, self.nbytes)
        if self._handle.value:
            self._driver.try_call("cuMemRelease", self._handle)
        self.address, self._is_mapped, self._handle = 0, False, c_uint64()
