"""The driver without a device refuses what a device's driver refuses, so that tests which pass over it say
something about a GPU. The rules are those of NVIDIA's documentation of the driver API."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path

import pytest

from support.cuda_calls import MIB, NO_ACCESS, READ, READ_WRITE, CallError, Calls
from support.fake_cuda import FakeCuda, environment

SIZE = 2 * MIB
HERE = Path(__file__).parents[1]


@pytest.fixture
def calls(fake_cuda: FakeCuda) -> Iterator[Calls]:
    calls = Calls(fake_cuda.library)
    calls.enter()
    yield calls
    fake_cuda.hold(False)
    fake_cuda.mend()
    calls.leave()


def refused(error: str) -> pytest.RaisesExc[CallError]:
    return pytest.raises(CallError, match=f"^CUDA_ERROR_{error}$")


def run(
    program: str, folder: Path, library: Path, *arguments: str, **settings: int
) -> subprocess.Popen[bytes]:
    """Start a Python program that finds the driver as libcuda.so.1."""
    variables = environment(folder, library, **settings)
    variables["PYTHONPATH"] = str(HERE)
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments], env=variables, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, pass_fds=[int(one) for one in arguments],
    )  # fmt: skip


# --- memory that processes share -----------------------------------------------------------------

EXPORTER = """
import ctypes, os, socket, sys, time
from support.cuda_calls import *
calls = Calls(ctypes.CDLL("libcuda.so.1"))
handle = calls.create(4 * MIB)
descriptor = calls.export(handle)
calls.enter()
address = calls.open_mapping(handle, 4 * MIB)
ctypes.memmove(address + 3 * MIB, b"of the exporter", 15)
with socket.socket(fileno=int(sys.argv[1])) as to:
    socket.send_fds(to, [b"x"], [descriptor])
    print(calls.library.fake_live(7), flush=True)
    sys.stdin.read()
"""


def test_an_exported_allocation_outlives_its_process(
    calls: Calls, cuda_library: Path, tmp_path: Path
) -> None:
    """Another process maps the same bytes, and still has them when the exporter was killed."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        exporter = run(EXPORTER, tmp_path, cuda_library, str(theirs.fileno()))
        theirs.close()
        _, [descriptor], _, _ = socket.recv_fds(ours, 1, 1)
    handle = calls.import_(descriptor)
    os.close(descriptor)
    address = calls.open_mapping(handle, 4 * MIB)
    calls.release(handle)  # the mapping keeps the memory
    assert ctypes.string_at(address + 3 * MIB, 15) == b"of the exporter"
    exporter.kill()
    assert exporter.wait() == -signal.SIGKILL
    assert exporter.stdout is not None and exporter.stdin is not None
    exporter.stdout.close()
    exporter.stdin.close()
    assert ctypes.string_at(address + 3 * MIB, 15) == b"of the exporter"
    calls.close_mapping(address, 4 * MIB)


def test_two_mappings_of_an_allocation_show_the_same_bytes(calls: Calls) -> None:
    handle = calls.create(SIZE)
    descriptor = calls.export(handle)
    other = calls.import_(descriptor)
    os.close(descriptor)
    first, second = (calls.open_mapping(one, SIZE) for one in (handle, other))
    ctypes.memmove(first + 100, b"bytes", 5)
    assert first != second and ctypes.string_at(second + 100, 5) == b"bytes"
    for one in (handle, other):
        calls.release(one)
    for address in (first, second):
        calls.close_mapping(address, SIZE)


def test_a_device_reaches_only_mapped_memory_that_it_was_given_access_to(calls: Calls) -> None:
    memory = calls.host_memory(SIZE)
    here, stream = ctypes.addressof(memory), calls.stream()

    def copy(to: int, source: int, nbytes: int = SIZE) -> None:
        calls("cuMemcpyAsync", c_uint64(to), c_uint64(source), c_size_t(nbytes), stream)

    handle = calls.create(SIZE)
    address = calls.reserve(2 * SIZE)
    for step in ("reserved", "mapped", "without access"):
        if step == "mapped":
            calls.map(address, SIZE, handle)
        if step == "without access":
            calls.allow(address, SIZE, READ_WRITE)
            calls.allow(address, SIZE, NO_ACCESS)
        with refused("INVALID_VALUE"):
            copy(address, here)
    calls.allow(address, SIZE, READ)
    with refused("INVALID_VALUE"):
        copy(address, here)
    copy(here, address)
    calls.allow(address, SIZE, READ_WRITE)
    copy(address, here)
    with refused("INVALID_VALUE"):
        copy(address, here, SIZE + 1)
    # A second allocation next to it: one copy may cross the border.
    calls.map(address + SIZE, SIZE, handle)
    calls.allow(address, 2 * SIZE, READ_WRITE)
    copy(address + MIB, here)
    calls("cuStreamSynchronize", stream)
    calls.unmap(address, 2 * SIZE)
    with refused("INVALID_VALUE"):
        copy(here, address)
    calls.unreserve(address, 2 * SIZE)
    calls.release(handle)
    calls("cuStreamDestroy_v2", stream)
    calls.free_host(memory)


TOUCH = """
import ctypes, sys
from support.cuda_calls import *
calls = Calls(ctypes.CDLL("libcuda.so.1"))
calls.enter()
kind = sys.stdin.readline().strip()
if kind == "freed":
    address = calls.allocate(100)
    ctypes.string_at(address, 100)
    calls.free(address)
else:
    handle = calls.create(2 * MIB)
    address = calls.open_mapping(handle, 2 * MIB, READ if kind == "only read" else NO_ACCESS)
if kind == "only read":
    ctypes.string_at(address, 1)
    ctypes.memset(address, 1, 1)
ctypes.string_at(address, 1)
"""


@pytest.mark.parametrize("kind", ["freed", "no access", "only read"])
def test_code_that_uses_memory_without_access_crashes(
    cuda_library: Path, tmp_path: Path, kind: str
) -> None:
    process = run(TOUCH, tmp_path, cuda_library)
    process.communicate(kind.encode())
    assert process.returncode == -signal.SIGSEGV


def test_calls_for_shared_memory_are_refused_as_by_a_driver(
    calls: Calls, fake_cuda: FakeCuda
) -> None:
    handle, private = calls.create(SIZE), calls.create(SIZE, shareable=False)
    address = calls.reserve(2 * SIZE)
    with refused("INVALID_VALUE"):
        calls.create(SIZE + 4096)  # not a multiple of the granularity
    with refused("INVALID_DEVICE"):
        calls.create(SIZE, device=1)
    with refused("INVALID_VALUE"):
        calls.export(private)
    with refused("INVALID_VALUE"):
        calls.import_(0)
    for at, nbytes in ((address + 4096, SIZE), (address + SIZE, 2 * SIZE), (address - SIZE, SIZE)):
        with refused("INVALID_VALUE"):
            calls.map(at, nbytes, handle)
    calls.map(address, SIZE, handle)
    with refused("INVALID_VALUE"):
        calls.map(address, SIZE, private)  # mapped already
    with refused("INVALID_VALUE"):
        calls.unmap(address, MIB)  # a part of a mapping
    with refused("INVALID_VALUE"):
        calls.unreserve(address, 2 * SIZE)  # still mapped
    calls.unmap(address, SIZE)
    calls.unreserve(address, 2 * SIZE)
    for one in (handle, private):
        calls.release(one)
    with refused("INVALID_VALUE"):
        calls.release(handle)


# --- what a pointer is ---------------------------------------------------------------------------

CONTEXT, MEMORY_TYPE, DEVICE_POINTER, HOST_POINTER, ORDINAL, START, RANGE = 1, 2, 3, 4, 9, 11, 12
OF_HOST, OF_DEVICE = 1, 2


def test_a_pointer_s_attributes(calls: Calls) -> None:
    address, memory = calls.allocate(1000), calls.host_memory(500)
    handle = calls.create(SIZE)
    mapped = calls.open_mapping(handle, SIZE)
    here = ctypes.addressof(memory)
    for inside, start, size, kind in (
        (address + 999, address, 1000, OF_DEVICE), (here + 1, here, 500, OF_HOST),
        (mapped + MIB, mapped, SIZE, OF_DEVICE),
    ):  # fmt: skip
        assert calls.attribute(MEMORY_TYPE, inside, c_uint) == kind
        assert calls.attribute(DEVICE_POINTER, inside) == inside
        assert calls.attribute(ORDINAL, inside, c_int) == 0
        assert (calls.attribute(START, inside), calls.attribute(RANGE, inside)) == (start, size)
        found, nbytes = c_uint64(), c_size_t()
        calls("cuMemGetAddressRange_v2", byref(found), byref(nbytes), c_uint64(inside))
        assert (found.value, nbytes.value) == (start, size)
    assert calls.attribute(HOST_POINTER, here) == here
    for beyond in (address + 1000, mapped + SIZE):
        with refused("INVALID_VALUE"):
            calls.attribute(MEMORY_TYPE, beyond)
    # The call for many attributes says that nothing is known, and is no error.
    which, kinds = (c_int * 2)(MEMORY_TYPE, HOST_POINTER), (c_uint(7), c_uint64(7))
    places = (c_void_p * 2)(*(ctypes.addressof(one) for one in kinds))
    calls("cuPointerGetAttributes", 2, which, places, c_uint64(address + 1000))
    assert [one.value for one in kinds] == [0, 0]
    calls.close_mapping(mapped, SIZE)
    calls.release(handle)
    calls.free_host(memory)
    calls.free(address)


# --- kvikio --------------------------------------------------------------------------------------

KVIKIO = """
import ctypes, os, sys
try:
    import rapids_logger
except ImportError:
    sys.exit(77)
rapids_logger.load_library()
from support.cuda_calls import *
calls = Calls(ctypes.CDLL("libcuda.so.1"))
calls.enter()
import kvikio, kvikio.defaults as defaults

class Memory:
    def __init__(self, address, nbytes):
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None}

size, path = 20 * MIB, sys.stdin.readline().strip()
content = os.urandom(size + 4096)
open(path, "wb").write(content)
handle = calls.create(size)
for address in (calls.allocate(size), calls.open_mapping(handle, size)):
    for direct in (False, True):
        with defaults.set({"auto_direct_io_read": direct, "num_threads": 2}):
            ctypes.memset(address, 0, size)
            with kvikio.CuFile(path, "r") as file:
                assert file.pread(Memory(address, size), size=size, file_offset=4096).get() == size
                assert ctypes.string_at(address, size) == content[4096:]
                assert file.read(Memory(address + 5, 1000), file_offset=77) == 1000
                assert ctypes.string_at(address + 5, 1000) == content[77:1077]
"""


def test_the_real_kvikio_reads_into_device_memory(cuda_library: Path, tmp_path: Path) -> None:
    process = run(KVIKIO, tmp_path, cuda_library)
    process.communicate(str(tmp_path / "file").encode())
    if process.returncode == 77:
        pytest.skip("kvikio is not installed: IT IS NOT RUN OVER THE DRIVER HERE")
    assert process.returncode == 0
