"""Where and when the driver is called: the context of each call, the end of a driver, captures, failed
devices and forked processes. Over a driver without a device."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from ctypes import byref, c_int, c_void_p
from pathlib import Path

import numpy as np
import pytest

from kvtier_kernels import Mapping
from kvtier_kernels.cuda import CudaError, Driver, Event, ExtentPins
from kvtier_kernels.cuda.codecs import ECSQ, PAYLOAD, RAW_PART, Codecs, Coder, calibration
from support.cuda_calls import MIB, Calls
from support.fake_cuda import FakeCuda, environment, soon

ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
GLOBAL, RELAXED = 0, 2


@pytest.fixture
def calls(fake_cuda: FakeCuda) -> Iterator[Calls]:
    yield Calls(fake_cuda.library)
    fake_cuda.library.cuCtxSetCurrent(None)


def current(calls: Calls) -> int | None:
    found = c_void_p()
    calls("cuCtxGetCurrent", byref(found))
    return found.value


# --- contexts ------------------------------------------------------------------------------------


def test_each_driver_calls_its_own_device(fake_cuda: FakeCuda, calls: Calls) -> None:
    """Also alternately, in one thread and in others."""
    fake_cuda.devices(2)
    drivers = [fake_cuda.driver(0), fake_cuda.driver(1)]
    found: list[tuple[int, int]] = []

    def allocate() -> None:
        for number in (0, 1, 1, 0):
            address = drivers[number].device_memory(64)
            found.append((number, calls.attribute(ORDINAL, address, c_int)))
            drivers[number].free(address)

    allocate()
    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
    assert found == [(number, number) for number in (0, 1, 1, 0) * 2]
    for driver in drivers:
        driver.close()


def test_a_call_leaves_the_context_of_the_engine_s_thread(
    fake_cuda: FakeCuda, calls: Calls
) -> None:
    fake_cuda.devices(2)
    engine = calls.enter(1)
    driver = fake_cuda.driver(0)
    address = driver.device_memory(64)
    assert current(calls) == engine and calls.attribute(ORDINAL, address, c_int) == 0
    with pytest.raises(CudaError, match="INVALID_VALUE"), driver.inside:
        assert current(calls) != engine
        driver.call("cuMemFree_v2", 5)
    assert current(calls) == engine
    driver.free(address)
    driver.close()
    calls.leave(1)


def test_a_call_in_the_device_s_context_pushes_nothing(fake_cuda: FakeCuda, calls: Calls) -> None:
    """As in an engine's threads, where torch has made this context current."""
    driver = fake_cuda.driver()
    calls.enter()
    before = fake_cuda.calls()
    with driver.inside:
        for _ in range(5):
            driver.attribute(16)
            driver.call("cuStreamIsCapturing", None, byref(c_int()))
    assert fake_cuda.calls() == before + 11
    assert fake_cuda.calls("cuCtxPushCurrent_v2") == fake_cuda.calls("cuCtxPopCurrent_v2")
    calls.leave()
    driver.close()


# --- the end of a driver -------------------------------------------------------------------------


def test_an_event_that_outlives_its_driver_calls_nothing(fake_cuda: FakeCuda) -> None:
    driver = fake_cuda.driver()
    kept, stream = Event(driver), driver.stream()
    kept.record(stream)
    driver.call("cuStreamDestroy_v2", stream)
    driver.close()
    assert fake_cuda.live()["events"] == 0
    before = fake_cuda.calls()
    with pytest.raises(CudaError, match="closed"):
        kept.wait()
    del kept
    gc.collect()
    driver.close()
    assert fake_cuda.calls() == before


def test_closing_does_not_wait_for_queued_registrations(
    fake_cuda: FakeCuda, make_mapping: Callable[..., Mapping], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may take seconds, and an engine that stops waits for the end."""
    driver = fake_cuda.driver()
    pins = ExtentPins(driver)
    begun, go = threading.Event(), threading.Event()
    register = driver.register
    done: list[int] = []

    def slowly(address: int, nbytes: int) -> None:
        begun.set()
        assert go.wait(60)
        register(address, nbytes)
        done.append(address)

    monkeypatch.setattr(driver, "register", slowly)
    extents: list[Mapping | None] = [make_mapping(4096) for _ in range(20)]
    arena = pins.of(extents)
    assert begun.wait(60)
    closing = threading.Thread(target=pins.close)
    closing.start()
    soon(lambda: pins._closing)
    go.set()
    closing.join(60)
    assert len(done) == 1 and fake_cuda.live()["registered"] == 0
    assert arena.ready == {0}  # still referred to, but its registration has ended
    driver.close()


# --- captures ------------------------------------------------------------------------------------


def test_a_calibration_is_copied_while_an_engine_captures(
    fake_cuda: FakeCuda, calls: Calls
) -> None:
    """Not by the legacy stream, which would invalidate the capture."""
    driver = fake_cuda.driver()
    calls.enter()
    engine = calls.stream()
    calls("cuStreamBeginCapture_v2", engine, GLOBAL)
    said = (
        2,
        32,
        0,
        0,
        bytes(4 * 64),
        bytes(64),
        bytes([148] * 64),
        bytes([4, 20, 60, 88, 60, 20, 3, 1]),
    )

    failed: list[CudaError] = []

    def load() -> None:
        driver.own_thread()
        try:
            calibration(driver, ECSQ, 1, 8, [(bytes(32), False)], [said]).close()
        except CudaError as error:
            failed.append(error)

    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    assert not failed
    graph = c_void_p()
    calls("cuStreamEndCapture", engine, byref(graph))
    calls("cuGraphDestroy", graph)
    calls("cuStreamDestroy_v2", engine)
    calls.leave()
    driver.close()


# --- scratch memory ------------------------------------------------------------------------------


def test_a_growing_batch_does_not_wait_for_the_device(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Freeing memory would wait for all streams, also for the engine's."""
    from kvtier_kernels.cuda import codecs

    monkeypatch.setattr(codecs, "compile_kernel", lambda text, architecture: b"host\0")
    driver = fake_cuda.driver()
    compiled = Codecs(driver)
    coder = Coder(compiled)
    engine, stream = driver.stream(), driver.stream()
    gate = threading.Event()
    fake_cuda.later(engine, lambda: bool(gate.wait(60)))
    sizes = (1 << 12, 1 << 18, 1 << 20)
    memory = [(driver.device_memory(size), driver.device_memory(size)) for size in sizes]
    ended = threading.Event()

    def encode() -> None:
        for size, (source, into) in zip(sizes, memory, strict=True):
            rows = np.array([(source, size, 0, -1, 0, 0, 0, 0)], RAW_PART)
            coder.encode(codecs.R32, 0, rows, np.array([(into, size)], PAYLOAD), stream)
            coder.finish()
        ended.set()

    thread = threading.Thread(target=encode)
    thread.start()
    waited = not ended.wait(60)
    gate.set()
    thread.join()
    assert not waited, "waited for the engine's stream"
    coder.close()
    compiled.close()
    for pair in memory:
        for address in pair:
            driver.free(address)
    for one in (engine, stream):
        driver.call("cuStreamDestroy_v2", one)
    driver.close()


def test_scratch_memory_has_a_budget(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier_kernels.cuda import codecs

    monkeypatch.setattr(codecs, "compile_kernel", lambda text, architecture: b"host\0")
    driver = fake_cuda.driver()
    compiled = Codecs(driver, scratch_bytes=1 * MIB)
    coder = Coder(compiled)
    stream = driver.stream()
    size = 8 * MIB
    source, into = driver.device_memory(size), driver.device_memory(size)
    for part, fits in ((size, False), (1 << 14, True)):
        rows = np.array([(source, part, 0, -1, 0, 0, 0, 0)], RAW_PART)
        payloads = np.array([(into, part)], PAYLOAD)
        if fits:
            coder.encode(codecs.R32, 0, rows, payloads, stream)
            coder.finish()
        else:
            with pytest.raises(CudaError, match=r"scratch_bytes is 1048576.*fewer parts"):
                coder.encode(codecs.R32, 0, rows, payloads, stream)
    coder.close()
    compiled.close()
    driver.free(source)
    driver.free(into)
    driver.call("cuStreamDestroy_v2", stream)
    driver.close()


# --- devices that fail ---------------------------------------------------------------------------


def test_no_driver_and_no_device_are_said(fake_cuda: FakeCuda, tmp_path: Path) -> None:
    with pytest.raises(CudaError, match=r"no CUDA driver: .*nowhere"):
        Driver(0, str(tmp_path / "nowhere.so"))
    fake_cuda.devices(0)  # as with MIG and no instance
    with pytest.raises(CudaError, match="cuInit: CUDA_ERROR_NO_DEVICE"):
        fake_cuda.driver()
    fake_cuda.devices(1)
    with pytest.raises(CudaError, match="cuDeviceGet: CUDA_ERROR_INVALID_DEVICE"):
        fake_cuda.driver(1)


def test_an_old_driver_is_said(fake_cuda: FakeCuda) -> None:
    fake_cuda.library.fake_version(11040)
    with pytest.raises(CudaError, match=r"the driver supports CUDA 11\.4; .* 12\.0 or later"):
        fake_cuda.driver()
    assert fake_cuda.live()["contexts"] == 0


def test_a_device_that_another_process_has_to_itself_is_said(fake_cuda: FakeCuda) -> None:
    fake_cuda.library.fake_taken(0, 1)
    with pytest.raises(CudaError, match=r"DEVICE_UNAVAILABLE.*exclusive"):
        fake_cuda.driver()


def test_a_device_without_free_memory_is_said(fake_cuda: FakeCuda) -> None:
    driver = fake_cuda.driver()
    fake_cuda.memory(1 * MIB)
    with pytest.raises(CudaError, match="cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY"):
        driver.device_memory(2 * MIB)
    driver.close()


def test_a_lost_device_fails_every_call_and_no_wait_hangs(fake_cuda: FakeCuda) -> None:
    driver = fake_cuda.driver()
    pinned, address = driver.pinned_memory(64), driver.device_memory(64)
    stream, event = driver.stream(), Event(driver)
    fake_cuda.hold()
    driver.copy(address, ctypes.addressof(pinned), 64, stream)
    event.record(stream)
    failed: list[str] = []

    def wait() -> None:
        try:
            event.wait()
        except CudaError as error:
            failed.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    soon(lambda: fake_cuda.held == 1)
    fake_cuda.lose()
    waiting.join(60)
    assert failed == ["cuEventSynchronize: CUDA_ERROR_UNKNOWN"]
    with pytest.raises(CudaError, match="UNKNOWN"):
        driver.copy(address, ctypes.addressof(pinned), 64, stream)
    with pytest.raises(CudaError, match="UNKNOWN"):
        fake_cuda.driver()
    # Everything can be freed, and nothing is raised or waited for.
    driver.try_call("cuStreamDestroy_v2", stream)
    driver.free(address)
    driver.free_pinned(pinned)
    event.free()
    driver.close()
    fake_cuda.mend()


FORKED = """
import os, sys
from kvtier_kernels.cuda import CudaError, Driver, Event
driver = Driver(0)
event = Event(driver)
if os.fork() == 0:
    for work in (lambda: Driver(0), event.wait, lambda: driver.device_memory(64)):
        try:
            work()
            os._exit(1)
        except CudaError as error:
            print(error, flush=True)
    event.free()
    driver.close()
    os._exit(0)
assert os.wait()[1] == 0
driver.free(driver.device_memory(64))
driver.close()
"""


def test_a_forked_child_is_told_that_it_has_no_device(cuda_library: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED], env=environment(tmp_path, cuda_library), capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert len(told) == 3 and all("forked" in line for line in told), told
