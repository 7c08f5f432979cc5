"""Copies in the memory of a GPU: `kvtier hold-gpu`, a daemon, and the vLLM plugin's worker, each with a CUDA
driver without a device. The engine checks every page that it reads."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.client import Lease
from kvtier.hot import HotClient
from kvtier_kernels.cuda import blocks
from kvtier_kernels.gpu_memory import GpuMemoryError, HeldGpu
from kvtier_plugins import hot
from support.daemons import Daemon
from support.device_engine import DeviceEngine
from support.fake_cuda import FakeCuda, build, environment, soon
from support.fake_engine import BLOCK, LAYERS, layout_of, spec_for
from support.hold_gpu import PROMPT, HoldGpu, arena, settled, start

OTHER = range(500, 500 + 8 * BLOCK + 3)
CONFIG = '[hot]\nsizes = ["default=4MiB"]\n'
SHAPES = {
    "one group": layout_of(),
    "two ranks of like pages": layout_of(ranks=2, replicas=2),
    "blocks of two pages": layout_of([0, 20], parts=[1, 2]),
    "six groups": layout_of([0, 20, 20, 0, 40, 20], ranks=2),
}
EngineOf = Callable[..., DeviceEngine]


def held(folder: Path, socket: str, size: str = "8MiB", **settings: int) -> HoldGpu:
    return HoldGpu(folder, socket, environment(folder, build(), **settings), size)


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
    one = held(tmp_path, daemon.socket)
    daemon.wait_for(lambda stats: stats["hot"]["arena"]["capacity_bytes"] > 0)
    yield one
    assert one.end() == 0, one.log.read_text()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("shape", "load", "way"),
    [("one group", "sync", "auto"), *((shape, "async", "kernel") for shape in SHAPES)],
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


def test_without_the_copy_kernel_there_are_no_copies(
    daemon: Daemon, holder: HoldGpu, engine_of: EngineOf, caplog: pytest.LogCaptureFixture
) -> None:
    """The driver's call for many copies is slower within the device than from the host's memory."""
    caplog.set_level("INFO")
    engine = engine_of(daemon, gpu_copies="batch")
    for cached in (0, 8 * BLOCK):
        assert engine.serve(PROMPT).cached == cached
        engine.settle()
    assert arena(daemon)["blocks"] == 0
    told = [one.message for one in caplog.records if "no copies on the GPU" in one.message]
    assert told and all("gpu_copies=auto" in one for one in told)


def memory_of(engine: DeviceEngine) -> Any:
    """The memory of the GPU that the first rank has mapped: the driver's memory is the host's."""
    device = engine.workers[0].state.device
    assert device is not None and device.shared._hot is not None
    ((_, mapped),) = device.shared._hot._memory.items()
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


def test_pages_are_not_given_away_while_a_copy_reads_them(
    daemon: Daemon, holder: HoldGpu, engine_of: EngineOf, fake_cuda: FakeCuda
) -> None:
    """The save has ended, and its copy on the GPU has begun: the engine's stream waits for it."""
    engine = engine_of(daemon, pages=10)
    start(engine)
    settled(daemon, engine)
    device = engine.workers[0].state.device
    assert device is not None and device.shared._hot is not None
    start_save = device.shared._hot.start_save

    def held(*arguments: Any) -> None:
        fake_cuda.hold()
        start_save(*arguments)

    device.shared._hot.start_save = held  # type: ignore[method-assign]
    engine.finish(engine.run(engine.add(PROMPT)))
    soon(lambda: fake_cuda.held == 1)
    device.shared._hot.start_save = start_save  # type: ignore[method-assign]
    second, computed = engine.add(OTHER), threading.Event()
    engine.run(second)
    assert fake_cuda.held == 1, "the copy has not ended, and the step has"
    fake_cuda.later(engine.stream, computed.set)
    assert not computed.wait(0.1), "computed into pages that were being copied"
    fake_cuda.hold(False)
    assert computed.wait(60)
    engine.finish(second)
    settled(daemon, engine)
    before = arena(daemon)["found"]
    for tokens in (PROMPT, OTHER):
        assert engine.serve(tokens).cached == 8 * BLOCK
    assert arena(daemon)["found"] == before + 16 and not engine.early


def test_a_copy_whose_pages_were_given_away_before_it_began_is_not_stored(
    daemon: Daemon, holder: HoldGpu, engine_of: EngineOf
) -> None:
    engine = engine_of(daemon, pages=10)
    start(engine)
    settled(daemon, engine)
    device = engine.workers[0].state.device
    assert device is not None and device.shared._hot is not None
    reserve, reserved, go = device.shared._hot.reserve, threading.Event(), threading.Event()

    def waits(*arguments: Any, **more: Any) -> Any:
        copies = reserve(*arguments, **more)
        reserved.set()
        assert go.wait(60)
        return copies

    device.shared._hot.reserve = waits  # type: ignore[method-assign]
    engine.finish(engine.run(engine.add(PROMPT)))
    assert reserved.wait(60)
    second = engine.run(engine.add(OTHER))
    device.shared._hot.reserve = reserve  # type: ignore[method-assign]
    go.set()
    engine.until(lambda: not engine.scheduler.in_flight["saves"])
    assert engine.scheduler.counts["drop:overwritten"] == 0, "the save had ended"
    engine.finish(second)
    settled(daemon, engine)
    assert arena(daemon)["counts"]["aborted"] == 8
    before = arena(daemon)
    assert engine.serve(PROMPT).cached == 8 * BLOCK
    assert (
        arena(daemon)["found"] == before["found"]
        and arena(daemon)["absent"] == before["absent"] + 8
    )


@pytest.mark.parametrize("load", ["sync", "async"])
def test_a_copy_that_is_replaced_under_a_load_fails_the_load(
    daemon: Daemon, holder: HoldGpu, engine_of: EngineOf, fake_cuda: FakeCuda, load: str
) -> None:
    """The block is still in memory, and its slot there is the same: only the generation of the copy tells."""
    engine = engine_of(daemon, load=load)
    start(engine)
    engine.serve(PROMPT)
    settled(daemon, engine)
    request = engine.add([*PROMPT, *range(40)])
    while engine.scheduler.matched(request, 0)[0] is None:
        engine.carry_out({}, {}, [])
    lease = engine.scheduler._prompts[request.request_id].lookup.lease
    assert isinstance(lease, Lease) and lease.parts[0].hot
    lease.release()
    fake_cuda.hold()
    running = threading.Thread(target=engine.run, args=(request,))
    running.start()
    soon(lambda: fake_cuda.held == 1)
    with daemon.connect() as client:
        space = client.open(spec_for(engine.layout))
        many = (4 << 20) // space.block_bytes
        keys = space.keys(list(range(10**6, 10**6 + many * BLOCK)))
        assert space.save(keys, bytes(many * space.block_bytes)).stored == many
        side = HotClient(client)
        gpu = HeldGpu("0", fake_cuda.path).uuid
        side.join(gpu, [0])
        others = space.lease(keys)
        copies = side.reserve(others.part(0, 0).slots, again=True)
        assert copies is not None and len(copies.granted) > many - 16
        copies.end(False)
        others.release()
        for event in side.arrived():
            assert not isinstance(event, int)
            os.close(event.fd)
    fake_cuda.hold(False)
    running.join(60)
    assert engine.scheduler.counts["load_failed:stale"] == 1
    assert request.failed if load == "async" else engine.bad_pages
    engine.finish(request)
    engine.settle()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("load", ["async", "sync"])
def test_a_killed_holder_costs_no_request_and_the_next_one_is_used(
    daemon: Daemon, engine_of: EngineOf, tmp_path: Path, load: str
) -> None:
    holder = held(tmp_path, daemon.socket)
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
        holder = held(tmp_path, daemon.socket)
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
    holder = held(tmp_path, daemon.socket)
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


def test_the_memory_of_a_daemon_that_ended_is_unmapped(
    daemon: Daemon, holder: HoldGpu, engine_of: EngineOf
) -> None:
    """Of the host, and the copies: the next daemon may need both before this engine is connected to it."""
    engine = engine_of(daemon)
    start(engine)
    engine.serve(PROMPT)
    settled(daemon, engine)
    session = engine.workers[0].mappings.session
    assert session is not None
    extent = weakref.ref(session.reader.mappings[0])  # type: ignore[type-var]
    del session
    daemon.process.kill()
    daemon.process.wait()
    engine.until(lambda: extent() is None)


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
    holder = held(tmp_path, str(tmp_path / "none.sock"))
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
    holder = held(tmp_path, daemon.socket, size, **settings)
    assert holder.process.wait(30) == 2
    assert why in holder.log.read_text()


def test_a_holder_without_free_memory_tries_again(daemon: Daemon, tmp_path: Path) -> None:
    holder = held(tmp_path, daemon.socket, bytes=1 << 20)
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
