"""The driver without a device, continued: streams, captured graphs, several devices, memory that is used up.
The rules are those of NVIDIA's documentation of the driver API."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_size_t, c_uint, c_uint64, c_void_p

import pytest

from support.cuda_calls import MIB, CallError, Calls
from support.fake_cuda import FakeCuda, soon

SIZE = 4096
BLOCKING, NON_BLOCKING = 0, 1
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2


@pytest.fixture
def calls(fake_cuda: FakeCuda) -> Iterator[Calls]:
    fake_cuda.devices(2)
    calls = Calls(fake_cuda.library)
    calls.enter()
    yield calls
    fake_cuda.hold(False)
    fake_cuda.mend()
    calls.leave()


class Memory:
    """Memory of a device and pinned memory, and a stream."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.device, self.pinned = calls.allocate(SIZE), calls.host_memory(SIZE)
        self.here = ctypes.addressof(self.pinned)
        self.stream = calls.stream(NON_BLOCKING)

    def bytes(self) -> bytes:
        self.calls("cuStreamSynchronize", self.stream)
        return ctypes.string_at(self.device, SIZE)

    def close(self) -> None:
        self.calls("cuStreamDestroy_v2", self.stream)
        self.calls.free(self.device)
        self.calls.free_host(self.pinned)


@pytest.fixture
def memory(calls: Calls, fake_cuda: FakeCuda) -> Iterator[Memory]:
    memory = Memory(calls)
    yield memory
    fake_cuda.hold(False)
    memory.close()


def refused(error: str) -> pytest.RaisesExc[CallError]:
    return pytest.raises(CallError, match=f"^CUDA_ERROR_{error}$")


def in_thread(work: Callable[[], None]) -> None:
    """Run this in another thread, and raise what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again below
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


@contextmanager
def paused(fake: FakeCuda, stream: c_void_p) -> Iterator[None]:
    gate = threading.Event()
    assert stream.value is not None
    fake.later(stream.value, lambda: bool(gate.wait(60)))
    try:
        yield
    finally:
        gate.set()


# --- order -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [BLOCKING, NON_BLOCKING])
def test_the_legacy_stream_waits_for_blocking_streams_only(
    fake_cuda: FakeCuda, calls: Calls, flags: int
) -> None:
    """And blocking streams wait for it."""
    stream, other = calls.stream(flags), calls.stream(flags)
    legacy, later = calls.event(), calls.event()
    with paused(fake_cuda, stream):
        calls.record(legacy, None)
        calls.record(later, other)
        if flags == NON_BLOCKING:
            soon(lambda: calls.reached(legacy) and calls.reached(later))
        else:
            for _ in range(20):
                assert not calls.reached(legacy) and not calls.reached(later)
    for event in (legacy, later):
        calls("cuEventSynchronize", event)
        assert calls.reached(event)
        calls("cuEventDestroy_v2", event)
    for one in (stream, other):
        calls("cuStreamDestroy_v2", one)


def test_an_event_that_was_never_recorded_is_reached(calls: Calls) -> None:
    event = calls.event()
    assert calls.reached(event)
    calls("cuEventDestroy_v2", event)
    with refused("INVALID_HANDLE"):
        calls.reached(event)


def test_pageable_memory_is_staged_and_pinned_memory_is_not(
    fake_cuda: FakeCuda, calls: Calls, memory: Memory
) -> None:
    """A pageable source may change when the call has returned; a pinned one is read later."""
    pageable = ctypes.create_string_buffer(b"1" * SIZE, SIZE)
    ctypes.memset(memory.here, ord("1"), SIZE)
    for source in (ctypes.addressof(pageable), memory.here):
        ctypes.memset(memory.device, 0, SIZE)
        fake_cuda.hold()
        calls.copy(memory.device, source, SIZE, memory.stream)
        ctypes.memset(source, ord("2"), SIZE)
        assert ctypes.string_at(memory.device, SIZE) == bytes(SIZE), (
            "the call has waited for the device"
        )
        fake_cuda.hold(False)
        assert memory.bytes() == (b"2" if source == memory.here else b"1") * SIZE
    # Into pageable memory, the call returns when the bytes are there.
    ctypes.memset(pageable, 0, SIZE)
    calls.copy(ctypes.addressof(pageable), memory.device, SIZE, memory.stream)
    assert pageable.raw == b"2" * SIZE


# --- graphs ----------------------------------------------------------------------------------------

UNSAFE: dict[str, Callable[[Calls, Memory], None]] = {
    "cuMemAlloc": lambda calls, memory: calls.free(calls.allocate(64)),
    "cuMemFree": lambda calls, memory: calls.free(1),
    "cuMemHostAlloc": lambda calls, memory: calls.free_host(calls.host_memory(64)),
    "cuMemHostUnregister": lambda calls, memory: calls("cuMemHostUnregister", c_void_p(4096)),
    "a copy that waits": lambda calls, memory: calls(
        "cuMemcpyHtoD_v2", c_uint64(memory.device), c_void_p(memory.here), c_size_t(SIZE)
    ),
    "cuCtxSynchronize": lambda calls, memory: calls("cuCtxSynchronize"),
    "cuEventQuery": lambda calls, memory: calls("cuEventDestroy_v2", queried(calls)),
}


def queried(calls: Calls) -> c_void_p:
    event = calls.event()
    try:
        calls.reached(event)
    except CallError:
        calls("cuEventDestroy_v2", event)
        raise
    return event


@pytest.mark.parametrize("name", UNSAFE)
@pytest.mark.parametrize(
    ("capture", "thread", "allowed"),
    [(GLOBAL, GLOBAL, False), (GLOBAL, THREAD_LOCAL, True), (GLOBAL, RELAXED, True),
     (THREAD_LOCAL, GLOBAL, True), (RELAXED, GLOBAL, True)],
)  # fmt: skip
def test_unsafe_calls_of_other_threads_during_a_capture(
    calls: Calls, memory: Memory, name: str, capture: int, thread: int, allowed: bool
) -> None:
    """A refused call invalidates the capture."""
    engine = calls.stream(NON_BLOCKING)
    calls.begin_capture(engine, capture)
    errors: list[str] = []

    def call() -> None:
        calls("cuCtxSetCurrent", c_void_p(context))
        calls.thread_mode(thread)
        try:
            UNSAFE[name](calls, memory)
        except CallError as error:
            errors.append(str(error))

    context = calls.enter()
    in_thread(call)
    assert ("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED" in errors) == (not allowed)
    if allowed:
        calls("cuGraphDestroy", calls.end_capture(engine))
    else:
        with refused("STREAM_CAPTURE_INVALIDATED"):
            calls.end_capture(engine)
    calls("cuDevicePrimaryCtxRelease_v2", 0)
    calls("cuStreamDestroy_v2", engine)


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL])
def test_unsafe_calls_of_the_capturing_thread_are_refused(calls: Calls, mode: int) -> None:
    engine = calls.stream(NON_BLOCKING)
    calls.begin_capture(engine, mode)
    with refused("STREAM_CAPTURE_UNSUPPORTED"):
        calls.allocate(64)
    with refused("STREAM_CAPTURE_INVALIDATED"):
        calls.end_capture(engine)
    calls.begin_capture(engine, mode)
    with refused("STREAM_CAPTURE_UNSUPPORTED"):
        calls("cuStreamSynchronize", engine)
    with refused("STREAM_CAPTURE_INVALIDATED"):
        calls.end_capture(engine)
    calls("cuStreamDestroy_v2", engine)


@pytest.mark.parametrize("flags", [BLOCKING, NON_BLOCKING])
def test_the_legacy_stream_during_the_capture_of_a_blocking_stream(
    calls: Calls, memory: Memory, flags: int
) -> None:
    """Also in a relaxed thread: the stream would have to wait for the capture."""
    engine = calls.stream(flags)
    calls.begin_capture(engine, RELAXED)
    calls.thread_mode(RELAXED)
    try:
        if flags == BLOCKING:
            with refused("STREAM_CAPTURE_IMPLICIT"):
                calls.copy(memory.device, memory.here, SIZE, None)
            with refused("STREAM_CAPTURE_INVALIDATED"):
                calls.end_capture(engine)
        else:
            calls.copy(memory.device, memory.here, SIZE, None)
            calls("cuGraphDestroy", calls.end_capture(engine))
    finally:
        calls.thread_mode(GLOBAL)
    calls("cuCtxSynchronize")
    calls("cuStreamDestroy_v2", engine)


def test_captured_work_runs_when_its_graph_is_launched(calls: Calls, memory: Memory) -> None:
    """Also the work of a stream that an event brought into the capture and back."""
    engine, side = memory.stream, calls.stream(NON_BLOCKING)
    fork, join = calls.event(), calls.event()
    ctypes.memset(memory.device, 0, SIZE)
    ctypes.memset(memory.here, ord("3"), SIZE)
    half = SIZE // 2
    calls.begin_capture(engine, GLOBAL)
    calls.copy(memory.device, memory.here, half, engine)
    calls.record(fork, engine)
    calls.wait(side, fork)
    calls.copy(memory.device + half, memory.here + half, half, side)
    with refused("CAPTURED_EVENT"):
        calls.thread_mode(RELAXED)
        calls.reached(fork)
    calls.thread_mode(GLOBAL)
    calls.record(join, side)
    calls.wait(engine, join)
    graph, runnable = calls.end_capture(engine), c_void_p()
    assert ctypes.string_at(memory.device, SIZE) == bytes(SIZE)
    calls("cuGraphInstantiateWithFlags", byref(runnable), graph, c_uint64(0))
    for content in (b"4", b"5"):
        ctypes.memset(memory.here, ord(content), SIZE)
        calls("cuGraphLaunch", runnable, engine)
        assert memory.bytes() == content * SIZE
    calls("cuGraphExecDestroy", runnable)
    calls("cuGraphDestroy", graph)
    for event in (fork, join):
        calls("cuEventDestroy_v2", event)
    calls("cuStreamDestroy_v2", side)


def test_captures_that_can_not_end(calls: Calls, memory: Memory) -> None:
    engine, side, event = memory.stream, calls.stream(NON_BLOCKING), calls.event()

    def elsewhere() -> None:
        calls.enter()
        try:
            calls.end_capture(engine)
        finally:
            calls.leave()

    calls.begin_capture(engine, GLOBAL)
    calls.record(event, engine)
    calls.wait(side, event)
    with refused("STREAM_CAPTURE_UNMATCHED"):
        calls.end_capture(side)
    with refused("STREAM_CAPTURE_WRONG_THREAD"):
        in_thread(elsewhere)
    with refused("STREAM_CAPTURE_UNJOINED"):
        calls.end_capture(engine)
    # An event of work outside of the capture.
    calls.record(event, side)
    calls.begin_capture(engine, GLOBAL)
    with refused("STREAM_CAPTURE_ISOLATION"):
        calls.wait(engine, event)
    with refused("STREAM_CAPTURE_INVALIDATED"):
        calls.end_capture(engine)
    calls("cuEventDestroy_v2", event)
    calls("cuStreamDestroy_v2", side)


# --- devices and memory ----------------------------------------------------------------------------


def test_objects_of_one_device_are_refused_by_another(calls: Calls, memory: Memory) -> None:
    """Copies and waits are allowed across devices; kernels and records of events are not."""
    module, function = c_void_p(), c_void_p()
    calls("cuModuleLoadData", byref(module), b"host\0")
    calls("cuModuleGetFunction", byref(function), module, b"kvtier_copy_blocks")
    event, zero = calls.event(), calls.enter()
    calls.enter(1)
    elsewhere, stream = calls.allocate(SIZE), calls.stream(NON_BLOCKING)
    for target in (stream, memory.stream):
        with refused("INVALID_HANDLE"):
            calls("cuLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, target, None, None)
    with refused("INVALID_HANDLE"):
        calls.record(event, stream)
    calls.record(event, memory.stream)
    calls.wait(stream, event)
    ctypes.memset(memory.here, ord("6"), SIZE)
    calls.copy(memory.device, memory.here, SIZE, memory.stream)
    memory.bytes()
    calls.copy(elsewhere, memory.device, SIZE, stream)
    calls("cuStreamSynchronize", stream)
    assert ctypes.string_at(elsewhere, SIZE) == b"6" * SIZE
    calls.free(elsewhere)
    calls("cuStreamDestroy_v2", stream)
    calls.leave(1)
    calls("cuCtxSetCurrent", c_void_p(zero))
    calls("cuDevicePrimaryCtxRelease_v2", 0)
    calls("cuEventDestroy_v2", event)
    calls("cuModuleUnload", module)


def test_objects_are_gone_with_their_context(calls: Calls, fake_cuda: FakeCuda) -> None:
    """A driver would use freed memory; this one refuses the call, and counts the object as left."""
    calls.enter(1)
    event = calls.event()
    calls.leave(1)
    with refused("CONTEXT_IS_DESTROYED"):
        calls("cuEventDestroy_v2", event)
    assert fake_cuda.live()["events"] == 1
    fake_cuda.library.fake_forget_objects()


def test_overlapping_registrations_are_refused(calls: Calls) -> None:
    memory = ctypes.create_string_buffer(4 * SIZE)
    start = ctypes.addressof(memory)

    def register(offset: int, nbytes: int) -> None:
        calls("cuMemHostRegister_v2", c_void_p(start + offset), c_size_t(nbytes), c_uint(3))

    register(SIZE, SIZE)
    for offset, nbytes in (
        (SIZE, SIZE),
        (0, 4 * SIZE),
        (0, SIZE + 1),
        (2 * SIZE - 1, SIZE),
        (SIZE + 8, 8),
    ):
        with refused("HOST_MEMORY_ALREADY_REGISTERED"):
            register(offset, nbytes)
    register(2 * SIZE, SIZE)
    for offset in (SIZE, 2 * SIZE):
        calls("cuMemHostUnregister", c_void_p(start + offset))
    with refused("HOST_MEMORY_NOT_REGISTERED"):
        calls("cuMemHostUnregister", c_void_p(start))


def test_a_device_has_a_certain_amount_of_memory(calls: Calls, fake_cuda: FakeCuda) -> None:
    fake_cuda.memory(10 * MIB)
    free, total = c_size_t(), c_size_t()
    handle = calls.create(4 * MIB)
    address = calls.allocate(5 * MIB)
    calls("cuMemGetInfo_v2", byref(free), byref(total))
    assert (free.value, total.value) == (1 * MIB, 10 * MIB)
    for work in (lambda: calls.create(2 * MIB), lambda: calls.allocate(2 * MIB)):
        with refused("OUT_OF_MEMORY"):
            work()
    mapped = calls.open_mapping(handle, 4 * MIB)
    calls.release(handle)
    with refused("OUT_OF_MEMORY"):  # a mapping keeps it
        calls.allocate(2 * MIB)
    calls.close_mapping(mapped, 4 * MIB)
    calls.free(calls.allocate(2 * MIB))
    calls.free(address)
