"""Copies in the memory of a GPU: `kvtier hold-gpu`, a daemon, and the vLLM plugin's worker, each with a CUDA
driver without a device. The engine checks every page that it reads."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier_kernels.cuda import blocks
from kvtier_kernels.gpu_memory import GpuMemoryError, HeldGpu
from kvtier_plugins import hot
from support.daemons import Daemon
from support.device_engine import DeviceEngine
from support.fake_cuda import FakeCuda, build, environment, soon
from support.fake_engine import BLOCK, LAYERS, layout_of

PROMPT = range(8 * BLOCK + 3)
OTHER = range(500, 500 + 8 * BLOCK + 3)
CONFIG = '[hot]\nsizes = ["default=4MiB"]\n'
SHAPES = {
    "one group": layout_of(),
    "two ranks of like pages": layout_of(ranks=2, replicas=2),
    "blocks of two pages": layout_of([0, 20], parts=[1, 2]),
    "six groups": layout_of([0, 20, 20, 0, 40, 20], ranks=2),
}
EngineOf = Callable[..., DeviceEngine]


class HoldGpu:
    """A running `kvtier hold-gpu`."""

    def __init__(self, folder: Path, socket: str, size: str = "8MiB", **settings: int) -> None:
        self.log = folder / "holder.log"
        command = [
            sys.executable,
            "-m",
            "kvtier_daemon.cli",
            "hold-gpu",
            "--size",
            size,
            "--socket",
            socket,
        ]
        with self.log.open("ab") as sink:
            self.process = subprocess.Popen(
                command, stderr=sink, env=environment(folder, build(), **settings)
            )

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)


@pytest.fixture
def engine_of(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineOf]:
    monkeypatch.setattr(blocks, "compile_kernel", lambda text, architecture: b"host\0")
    engines: list[DeviceEngine] = []

    def make(daemon: Daemon | str, *args: Any, **options: Any) -> DeviceEngine:
        socket = daemon if isinstance(daemon, str) else daemon.socket
        engines.append(DeviceEngine(fake_cuda, socket, *args, **options))
        return engines[-1]

    yield make
    fake_cuda.hold(False)
    for engine in engines:
        if engine not in ended:
            engine.close()


ended: list[DeviceEngine] = []  # by their tests


@pytest.fixture
def daemon(daemon_of: Callable[..., Daemon]) -> Daemon:
    return daemon_of(warm="16MiB", config=CONFIG)


@pytest.fixture
def holder(daemon: Daemon, tmp_path: Path) -> Iterator[HoldGpu]:
    held = HoldGpu(tmp_path, daemon.socket)
    daemon.wait_for(lambda stats: stats["hot"]["arena"]["capacity_bytes"] > 0)
    yield held
    assert held.end() == 0, held.log.read_text()


def arena(daemon: Daemon) -> dict[str, Any]:
    found: dict[str, Any] = daemon.stats()["hot"]["arena"]
    return found


def joined(engine: DeviceEngine) -> bool:
    devices = [worker.state.device for worker in engine.workers]
    return all(one is not None and one.hot is not None and one.hot.has_memory for one in devices)


def start(engine: DeviceEngine) -> None:
    """Serve until the ranks have mapped the memory of the GPU."""
    first = [10_000]

    def served() -> bool:
        first[0] += BLOCK
        engine.serve(range(first[0], first[0] + BLOCK))
        return joined(engine)

    engine.until(served)


@pytest.mark.parametrize(
    ("shape", "load", "way"),
    [("one group", "sync", "batch"), *((shape, "async", "kernel") for shape in SHAPES)],
)
def test_a_prompt_is_loaded_from_the_copies_of_its_save(
    daemon: Daemon, holder: HoldGpu, engine_of: EngineOf, fake_cuda: FakeCuda, shape: str, load: str,
    way: str,
) -> None:  # fmt: skip
    fake_cuda.delay(500)
    engine = engine_of(daemon, SHAPES[shape], load=load, gpu_copies=way)
    start(engine)
    engine.serve(PROMPT)
    settled(daemon, engine)
    before = arena(daemon)
    assert before["blocks"] > 0
    request = engine.serve(PROMPT)
    assert (request.cached, engine.early) == (8 * BLOCK, [])
    after = arena(daemon)
    assert after["found"] > before["found"] and after["absent"] == before["absent"]
    engine.settle()


def settled(daemon: Daemon, engine: DeviceEngine) -> None:
    """Wait for the engine's saves and copies."""
    engine.settle()
    for worker in engine.workers:
        done: list[bool] = []
        worker.state.tasks.put(lambda done=done: done.append(True))  # type: ignore[misc]
        soon(lambda done=done: bool(done))  # type: ignore[misc]
    daemon.wait_for(lambda stats: not stats["hot"]["arena"]["writing"])


def memory_of(engine: DeviceEngine) -> Any:
    """The memory of the GPU that the first rank has mapped: the driver's memory is the host's."""
    device = engine.workers[0].state.device
    assert device is not None and device.hot is not None
    ((_, mapped),) = device.hot._memory.items()
    return (ctypes.c_ubyte * mapped.nbytes).from_address(mapped.address)


@pytest.mark.parametrize("load", ["sync", "async"])
def test_a_load_reads_the_copies_and_not_the_memory_of_the_host(
    daemon: Daemon, holder: HoldGpu, engine_of: EngineOf, load: str
) -> None:
    """Bytes that the test writes there arrive in the engine's pages."""
    engine = engine_of(daemon, load=load)
    start(engine)
    engine.serve(PROMPT)
    settled(daemon, engine)
    memory = memory_of(engine)
    ctypes.memset(memory, 0x5A, len(memory))
    request = engine.run(engine.add(PROMPT))
    wrong = engine.wrong_pages(request)
    assert len(wrong) == 8 * LAYERS
    engine.finish(request)


@pytest.mark.parametrize("load", ["sync", "async"])
def test_blocks_without_a_copy_come_from_the_host_and_get_one(
    daemon: Daemon, engine_of: EngineOf, request: pytest.FixtureRequest, load: str
) -> None:
    engine = engine_of(daemon, load=load)
    engine.serve(PROMPT)
    engine.settle()
    request.getfixturevalue("holder")
    start(engine)
    settled(daemon, engine)
    before = arena(daemon)["blocks"]
    assert engine.serve(PROMPT).cached == 8 * BLOCK
    settled(daemon, engine)
    assert arena(daemon)["blocks"] == before + 8
    found = arena(daemon)["found"]
    longer = [*PROMPT[: 8 * BLOCK], *range(900, 900 + 4 * BLOCK)]
    assert engine.serve(longer).cached == 8 * BLOCK and not engine.early
    assert arena(daemon)["found"] == found + 8
    engine.settle()


def test_an_engine_that_starts_again_finds_its_copies(
    daemon: Daemon, holder: HoldGpu, engine_of: EngineOf
) -> None:
    first = engine_of(daemon)
    start(first)
    first.serve(PROMPT)
    settled(daemon, first)
    kept = arena(daemon)["blocks"]
    first.close()
    ended.append(first)
    assert arena(daemon)["blocks"] == kept
    again = engine_of(daemon)
    start(again)
    settled(daemon, again)
    before = arena(daemon)
    assert again.serve(PROMPT).cached == 8 * BLOCK
    assert arena(daemon)["found"] == before["found"] + 8
    again.settle()


def test_pages_that_are_given_away_during_a_copy_are_not_stored_under_the_block(
    daemon: Daemon, holder: HoldGpu, engine_of: EngineOf, fake_cuda: FakeCuda
) -> None:
    """The step that reuses the pages waits for the copy, or the copy does not begin."""
    engine = engine_of(daemon, pages=10)
    start(engine)
    settled(daemon, engine)
    fake_cuda.delay(2000)
    for number in range(6):
        engine.serve(range(number * 10_000, number * 10_000 + 8 * BLOCK + 3))
    fake_cuda.delay(0)
    settled(daemon, engine)
    for number in range(6):
        request = engine.serve(range(number * 10_000, number * 10_000 + 8 * BLOCK + 3))
        assert request.cached in (0, 8 * BLOCK) or request.cached % BLOCK == 0
    assert not engine.early, "a page was not that of its block"
    engine.settle()


@pytest.mark.parametrize("load", ["sync", "async"])
def test_a_killed_holder_costs_no_request_and_the_next_one_is_used(
    daemon: Daemon, engine_of: EngineOf, tmp_path: Path, load: str
) -> None:
    holder = HoldGpu(tmp_path, daemon.socket)
    try:
        daemon.wait_for(lambda stats: stats["hot"]["arena"]["capacity_bytes"] > 0)
        engine = engine_of(daemon, load=load)
        start(engine)
        engine.serve(PROMPT)
        settled(daemon, engine)
        assert holder.end(signal.SIGKILL) == -signal.SIGKILL
        assert engine.serve(PROMPT).cached == 8 * BLOCK
        daemon.wait_for(lambda stats: not stats["hot"]["arena"]["gpus"])
        assert engine.serve(PROMPT).cached == 8 * BLOCK
        engine.serve(OTHER)
        engine.settle()
        holder = HoldGpu(tmp_path, daemon.socket)
        daemon.wait_for(lambda stats: stats["hot"]["arena"]["capacity_bytes"] > 0)
        start(engine)
        settled(daemon, engine)
        before = arena(daemon)["found"]
        for _ in range(2):
            assert engine.serve(PROMPT).cached == 8 * BLOCK
            settled(daemon, engine)
        assert arena(daemon)["found"] == before + 8 and not engine.early
    finally:
        holder.end()


def test_a_killed_daemon_is_followed_by_holder_and_engine(
    daemon_of: Callable[..., Daemon], engine_of: EngineOf, tmp_path: Path
) -> None:
    folder = tmp_path / "again"
    daemon = daemon_of(folder=folder, warm="16MiB", config=CONFIG)
    holder = HoldGpu(tmp_path, daemon.socket)
    try:
        engine = engine_of(daemon)
        start(engine)
        engine.serve(PROMPT)
        settled(daemon, engine)
        before = memory_of(engine)
        daemon.process.kill()
        daemon.process.wait()
        assert engine.serve(PROMPT).cached == 0
        daemon = daemon_of(folder=folder, warm="16MiB", config=CONFIG)
        daemon.wait_for(lambda stats: stats["hot"]["arena"]["capacity_bytes"] > 0)
        assert arena(daemon)["blocks"] == 0
        engine.until(lambda: engine.serve(PROMPT).cached > 0)
        start(engine)
        assert ctypes.addressof(memory_of(engine)) != ctypes.addressof(before)
        settled(daemon, engine)
        for _ in range(2):
            assert engine.serve(PROMPT).cached == 8 * BLOCK
        assert not engine.early
    finally:
        assert holder.end() == 0


def test_without_the_section_the_driver_gets_no_other_call(
    daemon_of: Callable[..., Daemon], engine_of: EngineOf, fake_cuda: FakeCuda
) -> None:
    """The same work, with the hook and without it, takes the same calls; and none of the shared memory."""
    functions = ("cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuDeviceGetUuid_v2",
                 "cuMemSetAccess", "cuMemCreate", "cuMemRelease")  # fmt: skip
    counted = []
    for config in ("", ""):
        engine = engine_of(daemon_of(warm="16MiB", config=config), gpu_copies="batch", load="sync")
        before = {name: fake_cuda.calls(name) for name in functions}
        copies = fake_cuda.calls("cuMemcpyBatchAsync_v2") + fake_cuda.calls("cuMemcpyAsync")
        engine.serve(PROMPT)
        engine.settle()
        assert engine.serve(PROMPT).cached == 8 * BLOCK
        engine.settle()
        counted.append(
            fake_cuda.calls("cuMemcpyBatchAsync_v2") + fake_cuda.calls("cuMemcpyAsync") - copies
        )
        assert {name: fake_cuda.calls(name) for name in functions} == before
    assert counted == [2, 2], "one call for the save and one for the load"


def test_a_gpu_whose_memory_cannot_be_mapped_is_off_with_one_line(
    daemon: Daemon, holder: HoldGpu, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def refuse(*_: object) -> None:
        raise blocks.CudaError("cuMemImportFromShareableHandle: CUDA_ERROR_NOT_SUPPORTED")

    monkeypatch.setattr(hot, "MappedGpuMemory", refuse)
    engine = engine_of(daemon)
    for _ in range(2):
        assert engine.serve(PROMPT).cached in (0, 8 * BLOCK)
        settled(daemon, engine)
    assert engine.serve(PROMPT).cached == 8 * BLOCK
    assert arena(daemon)["blocks"] == 0
    lines = [one.getMessage() for one in caplog.records if "cannot be shared" in one.getMessage()]
    assert len(lines) == 1 and "NOT_SUPPORTED" in lines[0]


# --- the holder ----------------------------------------------------------------------------------


def test_a_holder_waits_for_a_daemon_and_ends_when_told(tmp_path: Path) -> None:
    holder = HoldGpu(tmp_path, str(tmp_path / "none.sock"))
    soon(lambda: "trying again" in holder.log.read_text())
    assert holder.end() == 0
    assert holder.log.read_text().count("trying again") == 1


@pytest.mark.parametrize(
    ("size", "settings", "why"),
    [
        ("8MiB", {"devices": 0}, "cannot hold memory of GPU 0: "),
        ("1KiB", {}, "allocates in units of"),
    ],
    ids=["no device", "too small"],
)
def test_a_holder_that_cannot_work_says_why(
    daemon: Daemon, tmp_path: Path, size: str, settings: dict[str, int], why: str
) -> None:
    holder = HoldGpu(tmp_path, daemon.socket, size, **settings)
    assert holder.process.wait(30) == 2
    assert why in holder.log.read_text()


def test_a_holder_without_free_memory_tries_again(daemon: Daemon, tmp_path: Path) -> None:
    holder = HoldGpu(tmp_path, daemon.socket, bytes=1 << 20)
    soon(lambda: "cannot allocate 4 MiB" in holder.log.read_text())
    assert not arena(daemon)["gpus"] or not arena(daemon)["capacity_bytes"]
    assert holder.end() == 0


def test_a_holder_makes_no_context_and_names_its_gpu(fake_cuda: FakeCuda) -> None:
    contexts = fake_cuda.live()["contexts"]
    calls = fake_cuda.calls("cuDevicePrimaryCtxRetain")
    mapped = fake_cuda.calls("cuMemMap")
    fake_cuda.devices(2)
    second = HeldGpu("1", fake_cuda.path)
    for name in (second.uuid, f"GPU-{second.uuid}", f"MIG-{second.uuid}"):
        assert HeldGpu(name, fake_cuda.path).uuid == second.uuid
    with pytest.raises(GpuMemoryError, match="neither"):
        HeldGpu("first", fake_cuda.path)
    with pytest.raises(GpuMemoryError, match="there is no GPU"):
        HeldGpu("7", fake_cuda.path)
    handle, fd = second.allocate(2 * second.unit_bytes)
    assert os.fstat(fd).st_size == 2 * second.unit_bytes
    os.close(fd)
    second.release(handle)
    assert fake_cuda.live()["contexts"] == contexts
    assert fake_cuda.calls("cuDevicePrimaryCtxRetain") == calls
    assert fake_cuda.calls("cuMemMap") == mapped
