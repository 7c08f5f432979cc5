"""Paged caches on a GPU, copied to a real arena and back: every byte is compared with one large copy of
the pool."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtier import Client, Group, KvSpec
from kvtier_kernels.cuda import Copier, CudaError, Driver, Event
from kvtier_vllm.device import open_device
from kvtier_vllm.layout import Page, Pages
from kvtier_vllm.options import Options
from support.daemons import Daemon
from support.device_engine import Bytes, DeviceEngine
from support.fake_cuda import soon
from support.fake_engine import BLOCK, layout_of
from support.gpu_limits import PAGES_S
from support.gpu_shapes import SHAPES, Shape

pytestmark = pytest.mark.gpu
WAYS = ("batch", "kernel")


@pytest.fixture(scope="module")
def client(shared_daemon: Daemon) -> Iterator[Client]:
    with shared_daemon.connect(populate=True) as client:
        yield client


class Pool:
    """All pages of a shape in the device's memory, and one large pinned copy of them."""

    def __init__(self, driver: Driver, shape: Shape) -> None:
        self.driver, self.shape = driver, shape
        self.address = driver.device_memory(shape.pool_bytes)
        self.pinned = driver.pinned_memory(shape.pool_bytes)
        self.shown: Bytes = np.frombuffer(self.pinned, np.uint8)
        self.stream = driver.stream()

    def write(self, content: Bytes) -> None:
        self.shown[:] = content
        self._copy(self.address, ctypes.addressof(self.pinned))

    def read(self) -> Bytes:
        self.shown[:] = 0
        self._copy(ctypes.addressof(self.pinned), self.address)
        return self.shown.copy()

    def _copy(self, to: int, source: int) -> None:
        self.driver.copy(to, source, self.shape.pool_bytes, self.stream)
        self.driver.call("cuStreamSynchronize", self.stream)

    def close(self) -> None:
        self.driver.try_call("cuStreamDestroy_v2", self.stream)
        self.driver.try_call("cuMemFree_v2", self.address)
        self.driver.free_pinned(self.pinned)


@dataclass
class Rig:
    copier: Copier
    pool: Pool


@pytest.fixture(params=WAYS)
def rig_of(request: pytest.FixtureRequest, gpu: Any) -> Any:
    made: list[Rig] = []

    def make(shape: Shape) -> Rig:
        driver = gpu.driver()
        made.append(Rig(Copier(driver, request.param), Pool(driver, shape)))
        return made[-1]

    yield make
    for rig in made:
        rig.pool.close()
        rig.copier.close()
        rig.copier.driver.close()


@pytest.mark.parametrize("registered", [True, False], ids=["registered", "staged"])
@pytest.mark.parametrize("name", SHAPES)
def test_pages_are_restored(
    client: Client, rig_of: Callable[[Shape], Rig], name: str, registered: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    shape = SHAPES[name]
    rig = rig_of(shape)
    if not registered:
        monkeypatch.setattr(rig.copier.pins, "_driver", SimpleNamespace(register=refuse))
    content = np.frombuffer(os.urandom(shape.pool_bytes), np.uint8)
    rig.pool.write(content)
    pieces = rig.copier.pieces(*shape.where(rig.pool.address), blocks=shape.blocks)
    assert np.array_equal(rig.pool.read(), content), (
        "choosing a way has left something in the pages"
    )
    group = Group(kind="full", layers=shape.layers, opaque_bytes=shape.block_bytes)
    spec = KvSpec.groups([group], model=f"gpu-{name}-{registered}-{pieces.ways[True]}", dtype="uint8",
                         block_tokens=1, weights="rev:1")  # fmt: skip
    space = client.open(spec)
    reader = client.reader()
    if registered:
        soon(lambda: len(rig.copier.pins.of(reader.mappings).ready) == reader.extents)
    ids = np.random.default_rng(3).permutation(shape.blocks)[: shape.moved].tolist()
    keys = space.keys(list(range(shape.moved)))
    lane = rig.copier.lane()
    with space.reserve(keys) as saving:
        assert len(saving) == len(ids), saving.refused
        lane.start(pieces, ids, saving.mappings, saving.slots, True, None)
        lane.finish()
        saving.commit(len(saving))
    with space.load(keys) as blocks:
        for block, view in zip(ids, blocks, strict=True):
            assert view is not None and bytes(view) == shape.block(content, block)
        del view

    # Into other pages of a pool with other bytes: no other page changes.
    other = np.frombuffer(os.urandom(shape.pool_bytes), np.uint8)
    rig.pool.write(other)
    lease = space.lease(keys, 10_000)
    slots = lease.part(0, 0).slots
    targets = list(reversed(ids))
    lane.start(pieces, targets, reader.mappings, slots, False, None)
    lane.finish()
    assert reader.fresh(slots) == len(ids)
    lease.release()
    wanted = other.copy()
    for source, target in zip(ids, targets, strict=True):
        shape.put(wanted, target, shape.block(content, source))
    assert np.array_equal(rig.pool.read(), wanted)
    if not registered:
        assert not rig.copier.pins.of(reader.mappings).ready


def refuse(address: int, nbytes: int) -> None:
    raise CudaError("refused by the test")


def test_a_copy_waits_for_its_event_and_signals_its_end(
    gpu: Any, client: Client, rig_of: Callable[[Shape], Rig]
) -> None:
    """The engine's stream is paused; the save includes what it writes afterwards."""
    shape = SHAPES["layers apart"]
    rig = rig_of(shape)
    pieces = rig.copier.pieces(*shape.where(rig.pool.address), blocks=shape.blocks)
    rig.pool.write(np.zeros(shape.pool_bytes, np.uint8))
    content = np.frombuffer(os.urandom(shape.pool_bytes), np.uint8)
    rig.pool.shown[:] = content
    group = Group(kind="full", layers=shape.layers, opaque_bytes=shape.block_bytes)
    spec = KvSpec.groups([group], model=f"order-{pieces.ways[True]}", dtype="uint8", block_tokens=1,
                         weights="rev:1")  # fmt: skip
    space = client.open(spec)
    keys = space.keys([1, 2])
    engine, gate = rig.pool.stream, threading.Event()
    gpu.later(engine, lambda: bool(gate.wait(60)))
    driver = rig.copier.driver
    driver.copy(rig.pool.address, ctypes.addressof(rig.pool.pinned), shape.pool_bytes, engine)
    after = Event(driver).record(engine)
    lane = rig.copier.lane()
    soon(lambda: len(rig.copier.pins.of(client.reader().mappings).ready) > 0)
    with space.reserve(keys) as saving:
        lane.start(pieces, [3, 0], saving.mappings, saving.slots, True, after)
        over = threading.Event()
        waiting = threading.Thread(target=lambda: (lane.finish(), over.set()))
        waiting.start()
        assert not over.wait(0.1)
        gate.set()
        assert over.wait(60)
        waiting.join()
        saving.commit(len(saving))
    with space.load(keys) as blocks:
        for block, view in zip((3, 0), blocks, strict=True):
            assert view is not None and bytes(view) == shape.block(content, block)
        del view


@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize("way", [*WAYS, "auto"])
def test_an_engine_s_prompt_is_loaded_as_it_was_saved(
    gpu: Any, daemon_of: Callable[..., Daemon], way: str, load: str
) -> None:
    """The complete worker, with the device's own streams and events."""
    daemon = daemon_of(warm="16MiB")
    engines = []
    for cached in (0, 8 * BLOCK):
        layout = layout_of([0, 20], ranks=2)
        engines.append(DeviceEngine(gpu, daemon.socket, layout, load=load, gpu_copies=way))
        assert all(gpu.on_device(address) for address in engines[-1].addresses)
        request = engines[-1].serve(range(8 * BLOCK + 3))
        assert (request.cached, engines[-1].early) == (cached, [])
        engines[-1].settle()
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 2, 3)], ids=str)
def test_tensors_of_torch_are_found_and_copied(
    gpu: Any, client: Client, order: tuple[int, ...]
) -> None:
    """Pages of four layers in one tensor, ordered by block or by layer."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA: ITS TENSORS ARE NOT TESTED HERE")
    blocks, layers, heads, inner = 12, 4, 2, 512
    sizes = (blocks, layers, heads, inner)
    memory = torch.randint(0, 256, [sizes[at] for at in order], dtype=torch.uint8, device="cuda")
    whole = memory.permute([order.index(at) for at in range(4)])
    item = whole.stride(0)
    pages = Pages(
        (tuple(Page(0, n * whole.stride(1), item, heads * inner) for n in range(layers)),), "torch"
    )
    flat = memory.reshape(-1)
    side = open_device(pages, [flat], Options(), blocks)
    assert side is not None
    group = Group(kind="full", layers=layers, opaque_bytes=layers * heads * inner)
    spec = KvSpec.groups([group], model=f"torch-{order}", dtype="uint8", block_tokens=1,
                         weights="rev:1")  # fmt: skip
    space = client.open(spec)
    keys = space.keys([1, 2, 3])
    before = whole.clone()
    with space.reserve(keys) as saving:
        side.gather(saving, 0, [5, 1, 11], side.fence())
        side.end_gather()
        saving.commit(len(saving))
    with space.load(keys) as found:
        for block, view in zip((5, 1, 11), found, strict=True):
            assert view is not None and bytes(view) == before[block].cpu().numpy().tobytes()
        del view
    side.close()


def test_a_sanitizer_finds_nothing(gpu: Any) -> None:
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not os.access(sanitizer, os.X_OK):
        pytest.skip("no compute-sanitizer: THE KERNELS ARE NOT RUN UNDER IT HERE")
    command = [sanitizer, "--error-exitcode", "7", "--target-processes", "application-only",
               sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__,
               "-k", "restored and registered and kernel"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PAGES_S)
    output = done.stdout[-3000:] + done.stderr[-1000:]
    assert done.returncode == 0 and "ERROR SUMMARY: 0 errors" in output and "passed" in output, (
        output
    )
