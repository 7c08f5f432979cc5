"""The vLLM plugin with `gpu_direct`: its ranks read blocks on disk themselves, with a CUDA driver without a
device. The engine checks every page that it reads."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvtier.direct import DirectFrame, read_directly
from kvtier.frame import PAGE
from kvtier_kernels.cuda import CopyLane, blocks, codecs, digests
from kvtier_plugins import direct, direct_thread
from kvtier_plugins.direct import DirectReader
from kvtier_plugins.direct_loads import Times
from kvtier_plugins.payload_reads import CuFileReads, DirectReadsError, PinnedReads
from kvtier_vllm.forecast import Forecast
from kvtier_vllm.worker import WorkerSide
from support.daemons import Daemon
from support.device_engine import DeviceEngine
from support.fake_cuda import FakeCuda, soon
from support.fake_engine import BLOCK, LAYERS, PAGE_BYTES, layout_of, spec_for

BLOCKS = 8
PROMPT = range(BLOCKS * BLOCK + 3)
BYTES = LAYERS * PAGE_BYTES
WARM_BLOCKS = (2 << 20) // BYTES
OTHERS = count(1_000_000)  # tokens of other prompts
BY_KVIKIO = os.environ.get("TESTED_READS") == "kvikio"  # set by test_direct_kvikio.py
EngineOf = Callable[..., DeviceEngine]


@pytest.fixture
def daemon_on(daemon_of: Callable[..., Daemon], tmp_path: Path) -> Callable[..., Daemon]:
    """A daemon with a disk, which is written to immediately."""

    def start(codec: str = "raw", permits: bool = True) -> Daemon:
        cold = tmp_path / "cold"
        cold.mkdir(exist_ok=True)
        return daemon_of(
            folder=tmp_path / "daemon",
            haste={"LIMIT_DIRECT_S": 60.0},  # a busy machine is slow
            config=f'[warm]\nsize = "2MiB"\n[cold]\ndirectories = ["{cold}"]\nsize = "64MiB"\n'
            f'segment = "1MiB"\nwrite = "through"\nscrub = 0\ncodec = "{codec}"\n'
            f'[tenants.default]\nuids = ["*"]\ndirect_reads = {str(permits).lower()}\n',
        )  # fmt: skip

    return start


@pytest.fixture
def engine_of(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineOf]:
    for module in (blocks, codecs, digests):
        monkeypatch.setattr(module, "compile_kernel", lambda text, architecture: b"host\0")
    monkeypatch.setattr(direct, "LEASE_MS", 60_000)
    monkeypatch.setattr(direct_thread, "RING_BYTES", 6 * BYTES)  # batches of three blocks
    monkeypatch.setattr(Forecast, "recompute_s", lambda *_: float("inf"))
    monkeypatch.setattr(Forecast, "prefill", (0.0, 0.0))
    if BY_KVIKIO:
        monkeypatch.setattr(direct_thread, "open_source", by_kvikio)
    engines: list[DeviceEngine] = []

    def make(daemon: Daemon, *args: Any, **options: Any) -> DeviceEngine:
        options = {"gpu_direct": "on", "patience_ms": 20_000, "lease_ms": 60_000} | options
        engines.append(DeviceEngine(fake_cuda, daemon.socket, *args, **options))
        return engines[-1]

    yield make
    fake_cuda.hold(False)
    for engine in engines:
        engine.close()
    assert not fake_cuda.broken, "a copy used memory that the device cannot access"


def by_kvikio(mode: str, reader: DirectReader) -> tuple[CuFileReads, str]:
    """Read by the real kvikio. Without a device it is in its compatibility mode, which `on` would refuse."""
    import rapids_logger

    rapids_logger.load_library()  # libkvikio needs it, and does not find it itself
    ring = reader.ring
    return CuFileReads(ring.payloads, ring.nbytes), "frames are read by kvikio"


def stored(daemon: Daemon, engine: DeviceEngine) -> None:
    """Save the prompt, and put other blocks into its place in memory."""
    engine.serve(PROMPT)
    crowd_out(daemon, engine)


def crowd_out(daemon: Daemon, engine: DeviceEngine) -> None:
    written(daemon, BLOCKS * engine.layout.shards.count)
    daemon.wait_for(lambda stats: not stats["tenants"]["default"]["leases"])  # they keep blocks
    with daemon.connect() as client:
        space = client.open(spec_for(engine.layout))
        for _ in range(3):
            keys = space.keys([next(OTHERS)] * (BLOCK * WARM_BLOCKS // 2))
            space.save(keys, bytes(len(keys) * BYTES))
    written(daemon)  # while the disk is busy, the daemon may decline to read


def written(daemon: Daemon, blocks: int = 0) -> None:
    """Wait until all blocks are on disk, and there are at least this many."""

    def holds(stats: dict[str, Any]) -> bool:
        cold = stats["tiers"]["cold"]
        return cold["blocks"] >= blocks and not cold["dirty"]

    daemon.wait_for(holds)


def start(engine: DeviceEngine, on: bool = True) -> None:
    """Serve until the scheduler is connected and knows that all ranks read directly, or that they do not."""
    first = [10_000]

    def served() -> bool:
        first[0] += BLOCK
        engine.serve(range(first[0], first[0] + BLOCK))
        known = engine.scheduler._decisions.ranks
        if engine.scheduler._daemon.session is None:
            return False
        return all(map(_is_open, engine.workers)) and known.reported and known.read_directly == on

    engine.until(served)


def _is_open(worker: WorkerSide) -> bool:
    """Whether its thread has prepared the device for the present session, or has found that it cannot."""
    device, session = worker.state.device, worker.mappings.session
    side = device.direct if device is not None else None
    return (
        side is not None and session is not None and side._session is session and _is_settled(side)
    )


def _is_settled(side: Any) -> bool:
    thread = side._thread
    return bool(thread._begun and thread._begun == thread._ended)


def counts(engine: DeviceEngine) -> tuple[int, int]:
    found = engine.scheduler.counts
    return found["direct:read"], found["direct:through_memory"]


def states(daemon: Daemon) -> dict[str, int]:
    found: dict[str, int] = daemon.stats()["tiers"]["cold"]["states"]
    return found


@pytest.mark.parametrize(
    ("ranks", "way"),
    [
        (1, "batch"), (2, "kernel"),
        pytest.param(1, "kernel", marks=pytest.mark.slow), pytest.param(2, "batch", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_blocks_on_disk_are_read_by_the_ranks(
    daemon_on: Callable[..., Daemon], engine_of: EngineOf, fake_cuda: FakeCuda, ranks: int, way: str
) -> None:
    daemon = daemon_on()
    engine = engine_of(daemon, layout_of(ranks=ranks), gpu_copies=way)
    start(engine)
    stored(daemon, engine)
    fake_cuda.delay(500)
    before = states(daemon)["read"]
    request = engine.serve(PROMPT)
    assert (request.cached, request.failed, engine.early) == (BLOCKS * BLOCK, False, [])
    assert counts(engine) == (ranks * BLOCKS, 0)
    assert states(daemon)["direct"] == ranks * BLOCKS and states(daemon)["read"] == before
    assert engine.scheduler.counts["hit_tokens:cold"] == BLOCKS * BLOCK
    engine.settle()


def test_nothing_is_read_while_pages_are_copied_from_the_ring(
    daemon_on: Callable[..., Daemon], engine_of: EngineOf, fake_cuda: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    daemon = daemon_on()
    engine = engine_of(daemon)
    start(engine)
    stored(daemon, engine)
    read, reads, waits = PinnedReads.read, list[int](), list[int]()
    start_at, finish = CopyLane.start_at, CopyLane.finish

    def count_read(*arguments: Any) -> list[bool]:
        reads.append(1)
        return read(*arguments)

    def held(*arguments: Any) -> None:
        fake_cuda.hold()
        start_at(*arguments)

    def wait(lane: CopyLane) -> None:
        waits.append(len(reads))
        finish(lane)

    monkeypatch.setattr(PinnedReads, "read", count_read)
    monkeypatch.setattr(CopyLane, "start_at", held)
    monkeypatch.setattr(CopyLane, "finish", wait)
    request = engine.add(PROMPT)
    engine.until(lambda: fake_cuda.held >= 1)
    monkeypatch.setattr(CopyLane, "start_at", start_at)
    engine.until(lambda: 1 in waits or len(reads) > 1)
    assert len(reads) == 1, "the next batch was read into memory that a copy reads"
    fake_cuda.hold(False)
    engine.run(request)
    assert len(reads) == 3 and not request.failed and not engine.early
    engine.finish(request)
    engine.settle()


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_pages_are_written_after_the_engine_has_zeroed_them(
    daemon_on: Callable[..., Daemon], engine_of: EngineOf, fake_cuda: FakeCuda, codec: str
) -> None:
    """Read directly, and through the daemon's memory."""
    daemon = daemon_on(codec)
    engine = engine_of(daemon)
    start(engine)
    stored(daemon, engine)
    engine.zeroes = True
    fake_cuda.later(engine.stream, lambda: time.sleep(0.5))
    request = engine.serve(PROMPT)
    assert (request.cached, request.failed, engine.early) == (BLOCKS * BLOCK, False, [])
    assert counts(engine) == ((BLOCKS, 0) if codec == "raw" else (0, BLOCKS))
    engine.settle()


def test_a_slot_that_is_reused_before_its_copy_fails_the_load(
    daemon_on: Callable[..., Daemon], engine_of: EngineOf, fake_cuda: FakeCuda
) -> None:
    """A block that came through the daemon's memory, whose lease has ended."""
    daemon = daemon_on("zstd")
    engine = engine_of(daemon)
    start(engine)
    stored(daemon, engine)
    device = engine.workers[0].state.device
    assert device is not None and device.direct is not None
    device.direct.times = Times(20_000, 1)
    request = engine.add(PROMPT)
    fake_cuda.hold()
    engine.until(lambda: fake_cuda.held == 1)
    crowd_out(daemon, engine)
    fake_cuda.hold(False)
    engine.run(request)
    assert request.failed and engine.scheduler.counts["load_failed:stale"] == 1
    assert not engine.wrong_pages(request)
    engine.finish(request)
    engine.settle()


def test_blocks_in_memory_and_on_disk_are_loaded_together(
    daemon_on: Callable[..., Daemon], engine_of: EngineOf
) -> None:
    """The first ones and one in between are in memory."""
    daemon = daemon_on()
    engine = engine_of(daemon)
    start(engine)
    stored(daemon, engine)
    keys = _keys(daemon, engine)
    with daemon.connect() as client:
        space = client.open(spec_for(engine.layout))
        for some in (keys[:3], keys[5:6]):
            assert space.wait(some, 20_000).ready == len(some)
    request = engine.serve(PROMPT)
    assert (request.cached, engine.early) == (BLOCKS * BLOCK, [])
    assert counts(engine) == (4, 1)
    found = engine.scheduler.counts
    assert (found["hit_tokens:warm"], found["hit_tokens:cold"]) == (3 * BLOCK, 5 * BLOCK)
    engine.settle()
    used = daemon.stats()["used_tokens"]
    assert (used["warm"], used["cold"]) == (3 * BLOCK, 5 * BLOCK), "each block is counted once"


def _keys(daemon: Daemon, engine: DeviceEngine) -> Any:
    """The keys of the prompt's blocks."""
    request = engine.add(PROMPT)
    engine.waiting.remove(request)
    prompt = engine.scheduler._prompts[request.request_id]
    keys = engine.scheduler._keys.of(prompt, engine.scheduler._daemon.session)  # type: ignore[arg-type]
    engine.scheduler.finished(request)
    return keys[:BLOCKS]


def test_frames_that_the_device_cannot_decode_come_through_the_daemons_memory(
    daemon_on: Callable[..., Daemon], engine_of: EngineOf
) -> None:
    daemon = daemon_on("zstd")
    engine = engine_of(daemon)
    start(engine)
    stored(daemon, engine)
    request = engine.serve(PROMPT)
    assert (request.cached, request.failed, engine.early) == (BLOCKS * BLOCK, False, [])
    assert counts(engine) == (0, BLOCKS)
    engine.settle()


@pytest.mark.parametrize(("place", "failed"), [(0, False), (PAGE + 100, True)])
def test_a_damaged_block_is_not_read(
    daemon_on: Callable[..., Daemon], engine_of: EngineOf, tmp_path: Path, place: int, failed: bool
) -> None:
    """In its header, which the daemon does not need, or in its payload: then the request is computed."""
    daemon = daemon_on()
    engine = engine_of(daemon)
    start(engine)
    stored(daemon, engine)
    damage(tmp_path / "cold", _frame_of(engine, daemon, 4) + place)
    request = engine.run(engine.add(PROMPT))
    assert request.failed == failed and not engine.wrong_pages(request) and not engine.early
    assert counts(engine) == (BLOCKS - 1, not failed)
    engine.finish(request)
    engine.settle()


def _frame_of(engine: DeviceEngine, daemon: Daemon, block: int) -> int:
    """The place of a block's frame in the only file of the disk."""
    keys = _keys(daemon, engine)
    with daemon.connect() as client:
        space = client.open(spec_for(engine.layout))
        lease = read_directly(space, keys, bytes([0]))
        frame = lease.frames[block]
        found = frame.header_at
        lease.end([True] * len(lease.frames))
    return found


def damage(folder: Path, at: int) -> None:
    for path in folder.rglob("*"):
        if path.is_file() and path.name.isdecimal():
            with path.open("r+b") as file:
                file.seek(at)
                found = file.read(1)
                if found:
                    file.seek(at)
                    file.write(bytes([found[0] ^ 0x55]))


def test_a_block_that_is_forgotten_during_the_read_is_computed(
    daemon_on: Callable[..., Daemon], engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = daemon_on()
    engine = engine_of(daemon)
    start(engine)
    stored(daemon, engine)
    keys, decode = _keys(daemon, engine), DirectReader._decode

    def forget(*arguments: Any) -> Any:
        with daemon.connect() as client:
            client.open(spec_for(engine.layout)).forget(keys[7:8])
        return decode(*arguments)

    monkeypatch.setattr(DirectReader, "_decode", forget)
    request = engine.run(engine.add(PROMPT))
    assert request.failed and not engine.wrong_pages(request) and not engine.early
    engine.finish(request)
    engine.settle()


def test_a_disk_that_does_not_answer_stops_no_load(
    daemon_on: Callable[..., Daemon], engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The blocks come through the daemon's memory; once the late read has ended, others are read directly."""
    daemon = daemon_on()
    engine = engine_of(daemon, patience_ms=300)
    start(engine)
    stored(daemon, engine)
    read, hanging, released = PinnedReads.read, threading.Event(), threading.Event()

    def hang(*arguments: Any) -> list[bool]:
        hanging.set()
        assert released.wait(60)
        return read(*arguments)

    monkeypatch.setattr(PinnedReads, "read", hang)
    device = engine.workers[0].state.device
    assert device is not None and device.direct is not None
    device.direct.times = Times(20_000, 60_000)  # of the load through memory
    device.direct._thread.batches = _impatient(device.direct._thread)  # type: ignore[method-assign]
    request = engine.serve(PROMPT)
    assert hanging.is_set() and not request.failed and counts(engine) == (0, BLOCKS)
    crowd_out(daemon, engine)
    hanging.clear()
    request = engine.serve(PROMPT)  # the first read still hangs
    assert not hanging.is_set() and counts(engine) == (0, 2 * BLOCKS)
    assert len([one for one in caplog.messages if "has not ended within" in one]) == 1
    released.set()
    monkeypatch.setattr(PinnedReads, "read", read)
    soon(lambda: _is_settled(device.direct))
    del device.direct._thread.batches  # type: ignore[method-assign]  # a busy machine is slow
    crowd_out(daemon, engine)
    assert engine.serve(PROMPT).cached == BLOCKS * BLOCK
    assert counts(engine) == (BLOCKS, 2 * BLOCKS) and not engine.early
    engine.settle()


def _impatient(thread: Any) -> Callable[..., Any]:
    batches = thread.batches
    return lambda space, keys, within_s: batches(space, keys, 0.2 if within_s > 1 else within_s)


def test_an_engine_ends_while_a_read_hangs(
    daemon_on: Callable[..., Daemon], engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = daemon_on()
    engine = engine_of(daemon)
    start(engine)
    stored(daemon, engine)
    hanging, released = threading.Event(), threading.Event()

    def hang(*_: Any) -> list[bool]:
        hanging.set()
        assert released.wait(60)
        return [False] * BLOCKS

    monkeypatch.setattr(PinnedReads, "read", hang)
    request = engine.add(PROMPT)
    engine.until(hanging.is_set)
    began = time.monotonic()
    engine.workers[0].close()
    assert time.monotonic() - began < 20
    released.set()
    engine.finish(request)


def test_a_daemon_that_ends_during_a_read_costs_a_computation(
    daemon_on: Callable[..., Daemon], engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = daemon_on()
    engine = engine_of(daemon, patience_ms=2_000)
    start(engine)
    stored(daemon, engine)
    decode = DirectReader._decode

    def end(*arguments: Any) -> Any:
        if daemon.process.poll() is None:
            daemon.process.kill()
            daemon.process.wait()
        return decode(*arguments)

    monkeypatch.setattr(DirectReader, "_decode", end)
    request = engine.run(engine.add(PROMPT))
    assert request.failed and not engine.wrong_pages(request) and not engine.early
    engine.finish(request)


def test_an_engine_follows_a_new_daemon(
    daemon_on: Callable[..., Daemon], engine_of: EngineOf
) -> None:
    daemon = daemon_on()
    engine = engine_of(daemon)
    start(engine)
    stored(daemon, engine)
    session = engine.workers[0].mappings.session
    assert session is not None
    extent = weakref.ref(session.reader.mappings[0])  # type: ignore[type-var]
    del session
    daemon.stop()
    engine.until(
        lambda: extent() is None
    )  # the memory of the daemon that ended is not mapped any longer
    again = daemon_on()
    again.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] >= BLOCKS)
    start(engine)
    request = engine.serve(PROMPT)
    assert (request.cached, request.failed, engine.early) == (BLOCKS * BLOCK, False, [])
    assert counts(engine) == (BLOCKS, 0) and states(again)["direct"] == BLOCKS
    engine.settle()


@pytest.mark.parametrize(
    ("mode", "permits", "said"),
    [
        ("auto", True, "nvidia-fs is not loaded"),
        ("on", False, "does not permit direct reads"),
    ],
)
def test_one_line_says_why_there_are_no_direct_reads(
    daemon_on: Callable[..., Daemon], engine_of: EngineOf, caplog: pytest.LogCaptureFixture,
    mode: str, permits: bool, said: str,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO, "kvtier")
    daemon = daemon_on(permits=permits)
    engine = engine_of(daemon, gpu_direct=mode)
    start(engine, on=False)
    stored(daemon, engine)
    request = engine.serve(PROMPT)
    assert (request.cached, request.failed) == (BLOCKS * BLOCK, False)
    assert counts(engine) == (0, 0) and states(daemon)["direct"] == 0
    lines = [one for one in caplog.messages if "direct reads" in one]
    assert len(lines) == 1 and said in lines[0], lines
    engine.settle()


@pytest.mark.parametrize("proven", [True, False])
def test_auto_reads_directly_once_a_trial_read_has_proven_it(
    daemon_on: Callable[..., Daemon], engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, proven: bool,
) -> None:  # fmt: skip
    """The trial reads a frame that the daemon grants. What it proves is decided for this test."""
    tried: list[str] = []

    def open_source(mode: str, reader: DirectReader, frame: DirectFrame | None = None) -> Any:
        assert mode == "auto" and frame is not None and reader._header(frame) is not None
        tried.append(mode)
        if not proven:
            raise DirectReadsError("nvidia-fs has not counted the trial read")
        ring = reader.ring
        return PinnedReads(reader.driver, ring.payloads, ring.nbytes), "frames are read"

    monkeypatch.setattr(direct_thread, "open_source", open_source)
    monkeypatch.setattr(direct_thread, "not_counted", lambda: "")
    daemon = daemon_on()
    engine = engine_of(daemon, gpu_direct="auto")
    start(engine)
    for served in (1, 2):
        stored(daemon, engine) if served == 1 else crowd_out(daemon, engine)
        request = engine.serve(PROMPT)
        assert (request.cached, request.failed, engine.early) == (BLOCKS * BLOCK, False, [])
        assert counts(engine) == ((served * BLOCKS, 0) if proven else (0, BLOCKS))
    assert tried == ["auto"]
    lines = [one for one in caplog.messages if "no direct reads" in one]
    assert len(lines) == (not proven), lines
    engine.settle()


@pytest.mark.parametrize("mode", ["off", "auto"])
def test_without_direct_reads_the_driver_gets_the_same_calls(
    daemon_on: Callable[..., Daemon], engine_of: EngineOf, fake_cuda: FakeCuda,
    monkeypatch: pytest.MonkeyPatch, mode: str,
) -> None:  # fmt: skip
    """Where a trial read cannot prove anything, `auto` only sets the context of its thread."""
    made: list[int] = []
    monkeypatch.setattr(DirectReader, "__init__", lambda *_: made.append(1))
    daemon = daemon_on()
    engine = engine_of(daemon, gpu_direct=mode, gpu_copies="batch")
    allocated = [fake_cuda.calls("cuMemAlloc_v2"), fake_cuda.calls("cuStreamCreate")]
    if mode == "auto":
        start(engine, on=False)
    stored(daemon, engine)
    assert engine.serve(PROMPT).cached == BLOCKS * BLOCK
    assert [fake_cuda.calls("cuMemAlloc_v2"), fake_cuda.calls("cuStreamCreate")] == allocated
    assert not made and states(daemon)["direct"] == 0
    device = engine.workers[0].state.device
    assert device is not None and (device.direct is None) == (mode == "off")
    engine.settle()


def test_a_device_without_memory_for_the_ring_reads_nothing(
    daemon_on: Callable[..., Daemon], engine_of: EngineOf, fake_cuda: FakeCuda,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(direct_thread, "RING_BYTES", 64 << 30)
    monkeypatch.setattr(direct, "LIMIT_DIRECT_BLOCKS", 1 << 22)
    daemon = daemon_on()
    engine = engine_of(daemon)
    start(engine, on=False)
    stored(daemon, engine)
    assert engine.serve(PROMPT).cached == BLOCKS * BLOCK
    assert counts(engine) == (0, 0)
    assert [one for one in caplog.messages if "no direct reads" in one and "MEMORY" in one]
    engine.settle()


def test_a_lost_device_ends_no_engine(
    daemon_on: Callable[..., Daemon], engine_of: EngineOf, fake_cuda: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    daemon = daemon_on()
    engine = engine_of(daemon)
    start(engine)
    stored(daemon, engine)
    decode = DirectReader._decode

    def lose(*arguments: Any) -> Any:
        fake_cuda.lose()
        return decode(*arguments)

    monkeypatch.setattr(DirectReader, "_decode", lose)
    request = engine.add(PROMPT)
    engine.until(lambda: request.failed)
    fake_cuda.mend()
    engine.finish(request)
