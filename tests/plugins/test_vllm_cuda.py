"""The vLLM plugin with pages on a GPU: both sides with a real daemon, and a CUDA driver without a
device.

The engine computes on its own stream, which executes later, and checks there which data was loaded for
it."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvtier.client import Lease
from kvtier_kernels.cuda import Event, ExtentPins, blocks
from kvtier_plugins import Unsupported, layers
from kvtier_plugins.layers import LayerParts
from kvtier_vllm import device
from kvtier_vllm.device import open_device
from kvtier_vllm.forecast import Forecast
from kvtier_vllm.layout import Pages
from kvtier_vllm.messages import LoadOrder, ReadOrder, Save, WriteOrder
from kvtier_vllm.options import Options
from kvtier_vllm.worker import SaveCopy, WorkerSide
from support.daemons import Daemon
from support.device_engine import DeviceEngine
from support.fake_cuda import FakeCuda, soon
from support.fake_engine import (
    BLOCK,
    FakeRequest,
    in_stages,
    layout_of,
    smaller_stage,
    spec_for,
)

PROMPT = range(8 * BLOCK + 3)
OTHER = range(500, 500 + 8 * BLOCK + 3)
SHAPES = {
    "one group": layout_of(),
    "two ranks of like pages": layout_of(ranks=2, replicas=2),
    "blocks of two pages": layout_of([0, 20], parts=[1, 2]),
    "six groups": layout_of([0, 20, 20, 0, 40, 20], ranks=2),
}


EngineOf = Callable[..., DeviceEngine]


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
        engine.close()


@pytest.fixture
def daemon(shared: Daemon) -> Daemon:
    return shared


class StagesEngine(DeviceEngine):
    """Two pipeline stages, of which the second one has only the first layer of each group."""

    def worker(self, rank: int, pages: Pages) -> WorkerSide:
        whole = self.layout
        if rank == 1:
            self.layout, pages = smaller_stage(whole, pages)
        try:
            return super().worker(rank, pages)
        finally:
            self.layout = whole

    def wrong_pages(self, request: FakeRequest) -> list[tuple[int, int, int, int]]:
        return [place for place in super().wrong_pages(request) if place[0] == 0 or place[2] == 0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", ["kernel", "batch"])
def test_a_smaller_stage_has_a_part_of_its_shard(
    daemon_of: Callable[..., Daemon], fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path, way: str,
) -> None:  # fmt: skip
    """Its pages come from disk too, with a checksum of the whole shard."""
    monkeypatch.setattr(blocks, "compile_kernel", lambda text, architecture: b"host\0")
    monkeypatch.setattr(Forecast, "recompute_s", lambda *_: float("inf"))
    layout = in_stages(layout_of([20, 0], ranks=2))
    options: dict[str, Any] = {"gpu_copies": way, "verify": True, "patience_ms": 20_000}
    (tmp_path / "cold").mkdir()
    cold = f'[cold]\ndirectories = ["{tmp_path / "cold"}"]\nsize = "256MiB"\n'
    for cached in (0, 8 * BLOCK):
        daemon = daemon_of(folder=tmp_path, config='[warm]\nsize = "4MiB"\n' + cold)
        daemon.wait_for_disks()
        for found in (cached, 8 * BLOCK):
            engine = StagesEngine(fake_cuda, daemon.socket, layout, **options)
            try:
                assert engine.serve(PROMPT).cached == found
                engine.settle()
                assert not [place for place in engine.early if place[0] == 0 or place[2] == 0]
                assert not any("failed" in what for what in +engine.scheduler.counts)
            finally:
                engine.close()
        daemon.stop()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("registered", [True, False], ids=["registered", "staged"])
@pytest.mark.parametrize("way", ["batch", "kernel"])
@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_prompt_is_loaded_as_it_was_saved(
    daemon: Daemon,
    engine_of: EngineOf,
    fake_cuda: FakeCuda,
    shape: str,
    load: str,
    way: str,
    registered: bool,
) -> None:
    if not registered:
        fake_cuda.library.fake_refuse_registration(100)
    fake_cuda.delay(2000)
    for cached in (0, 8 * BLOCK):
        engine = engine_of(daemon, SHAPES[shape], load=load, gpu_copies=way)
        request = engine.serve(PROMPT)
        assert (request.cached, engine.early) == (cached, [])
        engine.settle()
    assert bool(fake_cuda.live()["registered"]) == registered


def test_many_concurrent_prompts_are_loaded_correctly(
    daemon: Daemon, engine_of: EngineOf, fake_cuda: FakeCuda
) -> None:
    fake_cuda.delay(2000)
    engine = engine_of(daemon, layout_of([0, 20], ranks=2), pages=512)
    prompts = [[*range(4 * BLOCK), *range(n * 100, n * 100 + 40)] for n in range(1, 9)]
    for cached in (0, 6 * BLOCK):
        requests = [engine.add(prompt) for prompt in prompts]
        for request in requests:
            engine.run(request)
            assert not engine.wrong_pages(request)
        engine.until(lambda: not engine.scheduler.in_flight["saves"])
        for request in requests:
            engine.finish(request)
        assert min(request.cached for request in requests) >= cached
    assert not engine.early
    engine.settle()


def known(daemon: Daemon, engine: DeviceEngine, request: FakeRequest) -> int:
    """The number of blocks of the request that the daemon returns to any client."""
    keys = engine.scheduler._prompts[request.request_id].keys
    assert keys is not None
    with daemon.connect() as client:
        return client.open(spec_for(engine.layout)).match(keys).ready


def saving(engine: DeviceEngine, fake: FakeCuda) -> FakeRequest:
    """A request whose save began, and does not end before the device continues."""
    engine.serve(range(1000, 1000 + BLOCK))
    fake.hold()
    request = engine.run(engine.add(PROMPT))
    soon(lambda: fake.held == 1)
    return request


@pytest.mark.parametrize("registered", [True, False], ids=["registered", "staged"])
def test_no_slot_is_committed_before_its_copy_has_ended(
    daemon: Daemon, engine_of: EngineOf, fake_cuda: FakeCuda, registered: bool
) -> None:
    if not registered:
        fake_cuda.library.fake_refuse_registration(100)
    engine = engine_of(daemon)
    request = saving(engine, fake_cuda)
    for _ in range(5):
        engine.carry_out({}, {}, [])
    assert known(daemon, engine, request) == 0 and engine.scheduler.in_flight["saves"] == 1
    fake_cuda.hold(False)
    engine.until(lambda: not engine.scheduler.in_flight["saves"])
    assert known(daemon, engine, request) == 8


def test_a_step_that_reuses_pages_under_a_copy_waits_on_the_device_only(
    daemon: Daemon, engine_of: EngineOf, fake_cuda: FakeCuda
) -> None:
    """The step's thread launches its computation, which runs after the copy: the saved data is that of the
    first request."""
    engine = engine_of(daemon, pages=10)
    engine.until(lambda: bool(pins_of(engine)._arenas and pins_of(engine)._arenas[0].ready))
    engine.finish(saving(engine, fake_cuda))
    second, computed = engine.add(OTHER), threading.Event()
    engine.run(second)
    assert fake_cuda.held == 1, "the copy has not ended, and the step has"
    fake_cuda.later(engine.stream, computed.set)
    assert not computed.wait(0.1), "computed into pages that were being saved"
    fake_cuda.hold(False)
    assert computed.wait(60)
    engine.until(lambda: not engine.scheduler.in_flight["saves"])
    assert engine.scheduler.counts["drop:overwritten"] == 0
    engine.finish(second)
    for tokens in (PROMPT, OTHER):
        assert engine.serve(tokens).cached == 8 * BLOCK
    assert not engine.early


def test_a_step_that_reuses_pages_under_a_staged_copy_waits_for_it(
    daemon: Daemon, engine_of: EngineOf, fake_cuda: FakeCuda
) -> None:
    """Without registered memory the thread that saves copies by parts, so the step's thread waits for it."""
    fake_cuda.library.fake_refuse_registration(100)
    engine = engine_of(daemon, pages=10)
    engine.finish(saving(engine, fake_cuda))
    second, over = engine.add(OTHER), threading.Event()
    step = threading.Thread(target=lambda: (engine.run(second), over.set()))
    step.start()
    assert not over.wait(0.1), "computed into pages that were being saved"
    fake_cuda.hold(False)
    assert over.wait(60)
    step.join()
    engine.until(lambda: not engine.scheduler.in_flight["saves"])
    engine.finish(second)
    for tokens in (PROMPT, OTHER):
        assert engine.serve(tokens).cached == 8 * BLOCK


def test_a_step_waits_for_a_window_only_until_the_device_has_its_copies() -> None:
    waited: list[int] = []
    device: Any = SimpleNamespace(hold_for_saves=lambda: waited.append(1))
    writes = [WriteOrder(0, [1], b"", b""), WriteOrder(1, [2], b"", b"")]
    copy = SaveCopy(Save(1, writes), None, True, device)
    for _ in writes:
        with copy:
            copy.started()
    copy.cancel(threading.TIMEOUT_MAX)
    assert waited


def test_a_failing_device_is_waited_for_before_pages_change_hands(
    daemon: Daemon, engine_of: EngineOf, fake_cuda: FakeCuda
) -> None:
    engine = engine_of(daemon, pages=10)
    saving(engine, fake_cuda)
    device = engine.workers[0].state.device
    assert device is not None
    lane = device._lanes["save"]
    lane.hold = lambda _: (_ for _ in ()).throw(blocks.CudaError("no"))  # type: ignore[method-assign]
    over = threading.Event()
    waiting = threading.Thread(target=lambda: (device.hold_for_saves(), over.set()))
    waiting.start()
    assert not over.wait(0.1), "the copy has not ended"
    fake_cuda.hold(False)
    assert over.wait(60)
    waiting.join()
    engine.until(lambda: not engine.scheduler.in_flight["saves"])


def test_a_copy_that_has_not_begun_is_cancelled(
    daemon: Daemon, engine_of: EngineOf, fake_cuda: FakeCuda
) -> None:
    engine = engine_of(daemon, pages=10)
    engine.serve(range(1000, 1000 + BLOCK))
    held = threading.Event()
    engine.workers[0].state.tasks.put(lambda: bool(held.wait(60)))
    engine.finish(engine.run(engine.add(PROMPT)))
    second = engine.run(engine.add(OTHER))
    held.set()
    engine.until(lambda: not engine.scheduler.in_flight["saves"])
    assert engine.scheduler.counts["drop:overwritten"] == 8
    engine.finish(second)
    assert engine.serve(PROMPT).cached == 0


@pytest.mark.parametrize("load", ["sync", "async"])
def test_a_slot_that_is_given_away_under_a_copy_fails_the_load(
    daemon: Daemon, engine_of: EngineOf, fake_cuda: FakeCuda, load: str
) -> None:
    """The slot is reused before the device executes the copy: only the check after the copy can detect it."""
    engine = engine_of(daemon, load=load)
    engine.serve(PROMPT)
    request = engine.add([*PROMPT, *range(40)])
    while engine.scheduler.matched(request, 0)[0] is None:
        engine.carry_out({}, {}, [])
    lease = engine.scheduler._prompts[request.request_id].lookup.lease
    keys = engine.scheduler._prompts[request.request_id].keys
    assert isinstance(lease, Lease) and keys is not None
    lease.release()
    fake_cuda.hold()
    running = threading.Thread(target=engine.run, args=(request,))
    running.start()
    soon(lambda: fake_cuda.held == 1)
    with daemon.connect() as client:
        space = client.open(spec_for(engine.layout))
        assert space.forget(keys[:8]) == 8
        space.save(space.keys(list(range(100 * BLOCK))), bytes(100 * space.block_bytes))
    fake_cuda.hold(False)
    running.join(60)
    assert engine.scheduler.counts["load_failed:stale"] == 1
    if load == "async":
        assert request.failed and not engine.wrong_pages(request)
    else:
        assert engine.bad_pages == {page for pages in request.pages for page in pages[:8]}
        engine.until(lambda: not engine.scheduler.in_flight["saves"])
        assert engine.scheduler.counts["saved"] == 8, "kept what was computed from it"
    engine.finish(request)
    engine.settle()


def test_a_step_does_not_wait_for_a_load_that_it_needs(
    daemon: Daemon, engine_of: EngineOf, fake_cuda: FakeCuda
) -> None:
    """Its kernels are queued on the stream, which waits while the copy has not begun."""
    engine = engine_of(daemon, load="sync")
    engine.serve(PROMPT)
    queued = threading.Event()
    fake_cuda.hold()
    compute = engine.compute
    engine.compute = lambda *args: (compute(*args), queued.set())[0]  # type: ignore[method-assign]
    request = engine.add(PROMPT)
    running = threading.Thread(target=engine.run, args=(request,))
    running.start()
    assert queued.wait(60)
    soon(lambda: fake_cuda.held == 1)
    fake_cuda.hold(False)
    running.join(60)
    assert request.cached == 8 * BLOCK and not engine.early and not engine.wrong_pages(request)


def layered(engine_of: EngineOf, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> DeviceEngine:
    """An engine whose layers wait for their parts of a load, which it has saved before."""
    monkeypatch.setattr(layers, "LEAST_PIECE_BYTES", 1)
    engine = engine_of(daemon, load="sync", by_layers=True, layerwise=1)
    engine.serve(PROMPT)
    engine.until(lambda: bool(pins_of(engine)._arenas[0].ready))
    return engine


def parts_of(engine: DeviceEngine) -> LayerParts:
    device = engine.workers[0].state.device
    assert device is not None and device._layers is not None
    return device._layers


def starts_of(engine: DeviceEngine) -> list[bool]:
    """Whether each following load within a step was started by parts."""
    device, started = engine.workers[0].state.device, []
    assert device is not None
    lane = device._lanes["now"]
    start_parts = lane.start_parts

    def start(*args: Any) -> bool:
        started.append(start_parts(*args))
        return started[-1]

    lane.start_parts = start  # type: ignore[method-assign]
    return started


@pytest.mark.parametrize("registered", [True, False], ids=["registered", "staged"])
@pytest.mark.parametrize("way", ["batch", "kernel"])
def test_prompts_are_loaded_layer_by_layer_as_they_were_saved(
    daemon: Daemon,
    engine_of: EngineOf,
    fake_cuda: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    registered: bool,
) -> None:
    monkeypatch.setattr(layers, "LEAST_PIECE_BYTES", 1)
    if not registered:
        fake_cuda.library.fake_refuse_registration(100)
    fake_cuda.delay(2000)
    engine = engine_of(daemon, load="sync", by_layers=True, layerwise=1, gpu_copies=way, pages=256)
    prompts = [PROMPT, OTHER, range(900, 900 + 3 * BLOCK + 1)]
    for prompt in prompts:
        engine.serve(prompt)
    if registered:
        engine.until(lambda: bool(pins_of(engine)._arenas[0].ready))
    started = starts_of(engine)
    requests = [engine.add(prompt) for prompt in prompts]
    for request in requests:
        engine.run(request)
        assert not engine.wrong_pages(request)
    assert [request.cached for request in requests] == [8 * BLOCK, 8 * BLOCK, 3 * BLOCK]
    assert started and all(one == registered for one in started)
    assert not engine.early and not engine.scheduler.counts["load_failed:error"]
    for request in requests:
        engine.finish(request)
    engine.settle()


def test_a_layer_computes_while_the_next_one_is_copied(
    daemon: Daemon, engine_of: EngineOf, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = layered(engine_of, daemon, monkeypatch)
    paused, computed = threading.Event(), [threading.Event(), threading.Event()]
    first = parts_of(engine)._events[0]
    record, compute_layer = first.record, engine.compute_layer

    def recorded(stream: int | None) -> Event:
        assert stream is not None
        record(stream)
        fake_cuda.later(stream, lambda: bool(paused.wait(20)))  # type: ignore[arg-type,return-value]
        return first

    def computing(layer: int, request: FakeRequest, start: int, stop: int) -> None:
        compute_layer(layer, request, start, stop)
        if stop:
            fake_cuda.later(engine.stream, computed[layer].set)

    first.record = recorded  # type: ignore[method-assign]
    engine.compute_layer = computing  # type: ignore[method-assign]
    request = engine.add(PROMPT)
    running = threading.Thread(target=engine.run, args=(request,))
    running.start()
    assert computed[0].wait(60), "waited for all layers"
    assert not computed[1].wait(0.1), "computed from a layer that is not copied yet"
    paused.set()
    running.join(60)
    assert request.cached == 8 * BLOCK and not engine.early and not engine.wrong_pages(request)


def test_a_slot_that_is_given_away_under_the_copy_of_a_layer_fails_the_whole_load(
    daemon: Daemon, engine_of: EngineOf, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = layered(engine_of, daemon, monkeypatch)
    request = engine.add([*PROMPT, *range(40)])
    while engine.scheduler.matched(request, 0)[0] is None:
        engine.carry_out({}, {}, [])
    lease = engine.scheduler._prompts[request.request_id].lookup.lease
    keys = engine.scheduler._prompts[request.request_id].keys
    assert isinstance(lease, Lease) and keys is not None
    lease.release()
    started = starts_of(engine)
    fake_cuda.hold()
    running = threading.Thread(target=engine.run, args=(request,))
    running.start()
    soon(lambda: fake_cuda.held == 1 and bool(started))
    assert started == [True]
    with daemon.connect() as client:
        space = client.open(spec_for(engine.layout))
        assert space.forget(keys[7:8]) == 1
        space.save(space.keys(list(range(3000 * BLOCK))), bytes(3000 * space.block_bytes))
    fake_cuda.hold(False)
    running.join(60)
    assert engine.scheduler.counts["load_failed:stale"] == 1
    assert engine.bad_pages == {page for pages in request.pages for page in pages[:8]}
    engine.until(lambda: not engine.scheduler.in_flight["saves"])
    assert engine.scheduler.counts["saved"] == 8, "kept what was computed from it"
    engine.finish(request)
    engine.settle()


def test_a_layer_that_does_not_wait_fails_the_load_and_ends_loads_by_layers(
    daemon: Daemon, engine_of: EngineOf, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that replays a graph of the whole model calls no layer."""
    engine = layered(engine_of, daemon, monkeypatch)
    call_layer = engine.call_layer
    engine.call_layer = lambda *_: None  # type: ignore[method-assign]
    request = engine.run(engine.add(PROMPT))
    assert engine.scheduler.counts["load_failed:error"] == 1
    assert engine.bad_pages == {page for pages in request.pages for page in pages[:8]}
    engine.finish(request)
    engine.call_layer = call_layer  # type: ignore[method-assign]
    engine.early.clear()
    assert engine.serve(PROMPT).cached == 8 * BLOCK
    assert not engine.early and parts_of(engine)._ways == {}
    engine.settle()


@pytest.mark.parametrize("load", ["sync", "async"])
def test_a_failing_device_fails_only_its_copies(
    daemon: Daemon, engine_of: EngineOf, fake_cuda: FakeCuda, load: str
) -> None:
    engine = engine_of(daemon, load=load)
    engine.serve(PROMPT)
    (worker,) = engine.workers
    assert worker.state.device is not None
    lane = worker.state.device._lanes["now" if load == "sync" else "load"]
    lane.move = lambda *_: (_ for _ in ()).throw(blocks.CudaError("no"))  # type: ignore[method-assign]
    request = engine.run(engine.add(PROMPT))
    assert engine.scheduler.counts["load_failed:error"] == 1
    assert request.failed or engine.bad_pages
    engine.finish(request)
    lane = worker.state.device._lanes["save"]
    lane.move = lambda *_: (_ for _ in ()).throw(blocks.CudaError("no"))  # type: ignore[method-assign]
    engine.finish(engine.run(engine.add(OTHER)))
    engine.settle()
    assert engine.scheduler.counts["drop:lost"] == 8


def test_a_device_error_does_not_fail_a_step(
    daemon: Daemon, engine_of: EngineOf, fake_cuda: FakeCuda
) -> None:
    engine = engine_of(daemon)
    engine.serve(PROMPT)
    (worker,) = engine.workers
    (run,) = worker.mappings.readers
    keys = engine.writes[0].keys
    fake_cuda.library.fake_break()
    loads = [
        LoadOrder(7 + now, "r", run, bool(now), [[ReadOrder(0, [1], bytes(24))]]) for now in (0, 1)
    ]
    worker.loads.start(loads)
    worker.start_saves([Save(9, [WriteOrder(0, [1], bytes(len(keys) // 8), b"")])])
    assert worker.loads.bad_blocks() == {1}
    soon(lambda: "r" in worker.loads._failed and worker.state.report.saves.get(9) == 1)
    report = worker.report()
    assert (report.loads[7], report.loads[8]) == (1, 1)
    assert report.counts["load_failed:error"] == 2
    fake_cuda.library.fake_mend()


def test_a_lost_device_is_a_line_in_the_log_and_misses(
    daemon: Daemon, engine_of: EngineOf, fake_cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    """Each step goes on, nothing is saved or loaded, and the end of the engine waits for nothing."""
    engine = engine_of(daemon)
    engine.serve(PROMPT)
    fake_cuda.lose()
    for prompt in (OTHER, PROMPT):
        (worker,) = engine.workers
        assert worker.state.device is not None and worker.state.device.fence() is None
        request = engine.run(engine.add(prompt))
        engine.finish(request)
    engine.until(lambda: not any(engine.scheduler.in_flight.values()))
    lines = [one.getMessage() for one in caplog.records if "CUDA device failed" in one.getMessage()]
    assert len(lines) == 1 and "CUDA_ERROR_UNKNOWN" in lines[0]
    counts = engine.scheduler.counts
    assert counts["load_failed:error"] >= 1
    # The pages of a save can be given to the next request before a thread looks at the device.
    assert counts["drop:lost"] + counts["drop:overwritten"] >= 8
    engine.close()
    fake_cuda.mend()


FAILURES: dict[str, tuple[Callable[[FakeCuda], object], str]] = {
    "no device": (lambda fake: fake.devices(0), "CUDA_ERROR_NO_DEVICE"),
    "a number beyond the devices": (lambda fake: None, "CUDA_ERROR_INVALID_DEVICE"),
    "an old driver": (lambda fake: fake.library.fake_version(11080), "kvtier needs 12.0 or later"),
    "exclusive mode": (lambda fake: fake.library.fake_taken(1, 1), "exclusive mode"),
    "no free memory": (lambda fake: fake.memory(100_000, 1), "CUDA_ERROR_OUT_OF_MEMORY"),
    "a lost device": (lambda fake: fake.lose(1), "CUDA_ERROR_UNKNOWN"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_device_that_can_not_be_used_is_said_and_nothing_is_left(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    """The engine goes on without kvtier; the second device of a machine, as for a second rank."""
    monkeypatch.setattr(blocks, "compile_kernel", lambda text, architecture: b"host\0")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    monkeypatch.setattr("kvtier_vllm.device.Driver", fake_cuda.driver)
    fail, text = FAILURES[failure]
    fake_cuda.devices(1 if failure == "a number beyond the devices" else 2)
    fail(fake_cuda)
    tensor = SimpleNamespace(
        device=SimpleNamespace(type="cuda", index=1), data_ptr=lambda: 0, numel=lambda: 0
    )
    with pytest.raises(Unsupported, match=text):
        open_device(Pages((), "fake"), [tensor], Options(), 1)
    fake_cuda.mend()
    assert not any(fake_cuda.live().values()), fake_cuda.live()


def test_the_memory_of_a_restarted_daemon_is_registered(
    daemon_of: Callable[..., Daemon], tmp_path: Any, engine_of: EngineOf, fake_cuda: FakeCuda
) -> None:
    folder = tmp_path / "again"
    daemon = daemon_of(folder=folder, warm="4MiB")
    engine = engine_of(daemon)
    engine.serve(PROMPT)
    before = fake_cuda.live()["registered"]
    assert before
    gone = weakref.ref(pins_of(engine)._arenas[0])
    daemon.process.kill()
    daemon.process.wait()
    assert engine.serve(PROMPT).cached == 0
    daemon_of(folder=folder, warm="4MiB")
    engine.until(lambda: engine.serve(PROMPT).cached > 0)
    soon(lambda: gone() is None and fake_cuda.live()["registered"] == before)
    engine.settle()


def pins_of(engine: DeviceEngine) -> ExtentPins:
    device = engine.workers[0].state.device
    assert device is not None
    return device._copier.pins


def test_extents_are_registered_before_anything_is_copied(
    daemon: Daemon, engine_of: EngineOf, fake_cuda: FakeCuda
) -> None:
    engine = engine_of(daemon)
    engine.until(lambda: fake_cuda.live()["registered"] == 1)


def test_no_driver_is_opened_by_the_scheduler_or_an_import() -> None:
    """Only processes with pages on a GPU create a context."""
    code = (
        "import ctypes, sys; ctypes.CDLL = None\n"
        "import kvtier_vllm.scheduler, kvtier_vllm.worker\n"
        "assert 'kvtier_kernels.cuda' not in sys.modules\n"
        "import kvtier_vllm.device, kvtier_daemon.app\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unsupported_device_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def tensor(kind: str) -> Any:
        where = SimpleNamespace(type=kind, index=0)
        return SimpleNamespace(device=where, data_ptr=lambda: 0, numel=lambda: 0)

    def failing(*_: Any) -> None:
        raise blocks.CudaError("no CUDA driver")

    pages = Pages((), "")
    assert open_device(pages, [tensor("cpu")], Options(), 1) is None
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    monkeypatch.setattr(device, "Driver", failing)
    with pytest.raises(Unsupported, match="no CUDA driver"):
        open_device(pages, [tensor("cuda")], Options(), 1)


@pytest.mark.parametrize("announces", [True, False], ids=["announced", "not announced"])
def test_pages_that_the_engine_zeroes_are_saved_as_they_were(
    daemon: Daemon, engine_of: EngineOf, fake_cuda: FakeCuda, announces: bool
) -> None:
    """The engine zeroes pages that change hands before it hands the step to the connector. If it announces
    the step, the zeroing waits for the copy. The control shows that zeros would be saved otherwise."""
    engine = engine_of(daemon, pages=10)
    engine.until(lambda: bool(pins_of(engine)._arenas and pins_of(engine)._arenas[0].ready))
    first = saving(engine, fake_cuda)
    engine.zeroes, engine.announces = True, announces
    engine.finish(first)
    second, over = engine.add(OTHER), threading.Event()
    engine.run(second)
    fake_cuda.later(engine.stream, over.set)
    assert not over.wait(0.1)
    assert engine.memory[0][0, 0, first.pages[0][:8]].any() == announces
    fake_cuda.hold(False)
    engine.until(lambda: not engine.scheduler.in_flight["saves"])
    engine.finish(second)
    request = engine.run(engine.add(PROMPT))
    assert request.cached == 8 * BLOCK
    assert bool(engine.wrong_pages(request)) is not announces
    engine.finish(request)


@pytest.mark.parametrize("load", ["sync", "async"])
def test_prompts_of_an_engine_that_zeroes_pages_are_loaded_as_they_were_saved(
    daemon: Daemon, engine_of: EngineOf, fake_cuda: FakeCuda, load: str
) -> None:
    """Few pages, so that each step reuses some under a copy, with groups of windows and random delays."""
    fake_cuda.delay(2000)
    engine = engine_of(daemon, layout_of([0, 20]), load=load, pages=44)
    engine.zeroes = True
    for tokens in (PROMPT, OTHER, range(2000, 2000 + 8 * BLOCK + 3), PROMPT, OTHER, PROMPT):
        request = engine.run(engine.add(tokens))
        assert not engine.wrong_pages(request)
        engine.finish(request)
    for cached in (None, 8 * BLOCK):
        request = engine.serve(PROMPT)
        assert cached is None or request.cached == cached
    engine.settle()
    assert not engine.early


def test_arenas_of_earlier_daemons_are_unmapped(
    daemon_of: Callable[..., Daemon], engine_of: EngineOf, tmp_path: Path
) -> None:
    folder = tmp_path / "again"
    engine = engine_of(str(folder / "kvtier.sock"))
    pins = pins_of(engine)

    def arenas() -> int:
        maps = Path("/proc/self/maps").read_text()
        return len({line.split()[4] for line in maps.splitlines() if "memfd:" in line})

    before = arenas()
    for _ in range(2):
        daemon = daemon_of(folder=folder, warm="4MiB")
        engine.until(lambda: engine.serve(PROMPT).cached > 0)
        assert arenas() > before and len(pins._arenas) == 1
        daemon.process.kill()
        daemon.process.wait()
        engine.until(lambda: arenas() == before)
        assert pins._arenas == []
