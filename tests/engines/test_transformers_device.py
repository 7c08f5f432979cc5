"""Caches of transformers models on a GPU: blocks are copied between the daemon's memory and its tensors.

The driver without a device takes the place of a GPU, and memory of the host that of the device: torch's
tensors are known to this driver only while they are copied.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from engines.tiny import prompt, tiny_model  # noqa: E402
from kvtier import Client  # noqa: E402
from kvtier.errors import SpoiltBlocks  # noqa: E402
from kvtier.loading import Reader  # noqa: E402
from kvtier_kernels.cuda import Copier, CudaError  # noqa: E402
from kvtier_transformers import KvtierCache, attach, device, store  # noqa: E402
from support.daemons import Daemon  # noqa: E402
from support.fake_cuda import FakeCuda, soon  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
BLOCK = 16
KINDS = ("llama", "gpt2", "gemma2", "deepseek3", "qwen3_next")


class FakeDevice(device.SharedDevice):
    """The driver without a device; torch's memory of the host is that of its device."""

    def __init__(self, fake: FakeCuda, copier: Copier) -> None:
        self.device, self.lock = torch.device("cpu"), threading.Lock()
        self.fake, self.copier, self.driver = fake, copier, copier.driver
        self.lane, self.own = copier.lane(), copier.driver.stream()
        self.tables = fake.device(np.zeros(1 << 20, np.uint8))
        self.copied = {True: 0, False: 0}  # blocks, into slots and out of them

    def stream(self) -> int:
        return self.own

    def placed(self, table: Any) -> Any:
        self.tables[: table.nbytes] = table
        return torch.from_numpy(self.tables)

    @contextmanager
    def known(self, tensors: Sequence[Any]) -> Iterator[None]:
        """These tensors are memory of the device."""
        library, spans = self.fake.library, {(one.data_ptr(), one.nbytes) for one in tensors}
        for address, nbytes in spans:
            library.fake_device_memory(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))
        try:
            yield
        finally:
            for address, _ in spans:
                library.fake_forget_memory(ctypes.c_void_p(address))


class FakeCopies(device.TensorCopies):
    def __init__(self, shared: FakeDevice) -> None:
        super().__init__(shared)
        self.fake = shared

    def copy(self, places: Any, ids: Any, extents: Any, slots: bytes, inwards: bool) -> None:
        self.fake.copied[inwards] += len(ids)
        with self.fake.known(places[0]):
            super().copy(places, ids, extents, slots, inwards)


@pytest.fixture(params=["kernel", "batch"])
def gpu(
    request: pytest.FixtureRequest, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeDevice]:
    """Stores that are made in this test copy on this device, until `host` is called."""
    shared = FakeDevice(fake_cuda, fake_cuda.copier(monkeypatch, request.param))
    monkeypatch.setattr(store, "copies_on", lambda devices: FakeCopies(shared))
    yield shared
    shared.driver.call("cuStreamDestroy_v2", shared.own)
    shared.copier.close()
    shared.driver.close()


@pytest.fixture
def client(daemon_of: Callable[..., Daemon]) -> Iterator[Client]:
    with daemon_of(warm="64MiB").connect(device=True) as connected:
        yield connected


def greedy(model: Any, ids: Any, **more: Any) -> Any:
    return model.generate(ids, max_new_tokens=12, do_sample=False, **more)


def through_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "copies_on", lambda devices: None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", ["gpu", "host"])
def test_blocks_are_those_of_copies_through_the_host(
    gpu: FakeDevice, client: Client, monkeypatch: pytest.MonkeyPatch, kind: str, first: str
) -> None:
    """What one way has saved, the other one loads."""
    model, ids = tiny_model(kind), prompt(100)
    wanted = greedy(model, ids)
    for turn, way in enumerate((first, "host" if first == "gpu" else "gpu")):
        with monkeypatch.context() as patch:
            if way == "host":
                through_host(patch)
            before = dict(gpu.copied)
            with attach(model, client, block_tokens=BLOCK) as attached:
                assert torch.equal(greedy(model, ids), wanted)
                assert not [name for name in attached.counts if name.startswith("failed")]
                assert attached.counts["loaded_tokens"] == 96 * turn, attached.counts
            inwards = turn == 0
            assert (gpu.copied[inwards] > before[inwards]) == (way == "gpu")


def test_the_rows_of_a_batch_with_padding(gpu: FakeDevice, client: Client) -> None:
    model, ids = tiny_model("llama"), prompt(100, rows=3)
    mask = torch.ones_like(ids)
    for row, pad in enumerate((0, 7, 40)):
        mask[row, :pad], ids[row, :pad] = 0, 0
    wanted = greedy(model, ids, attention_mask=mask)
    with attach(model, client, block_tokens=BLOCK) as attached:
        for _ in range(2):
            assert torch.equal(greedy(model, ids, attention_mask=mask), wanted)
        # All rows end where the shortest one does.
        assert attached.counts["loaded_tokens"] > 3 * 40, attached.counts


def test_a_client_that_declares_no_device_saves_through_host_memory(
    gpu: FakeDevice, daemon_of: Callable[..., Daemon], caplog: pytest.LogCaptureFixture
) -> None:
    """The daemon would not wait for copies of a process that was killed."""
    model, ids = tiny_model("llama"), prompt(100)
    daemon = daemon_of(warm="64MiB")
    caplog.set_level("INFO")
    with daemon.connect() as client, attach(model, client, block_tokens=BLOCK) as attached:
        wanted = [greedy(model, one) for one in (ids, prompt(40, seed=2), ids)]
        assert gpu.copied == {True: 0, False: 6} and torch.equal(wanted[0], wanted[2])
        assert attached.counts["loaded_tokens"] == 96
    told = [one.message for one in caplog.records if "device=True" in one.message]
    assert len(told) == 1
    with attach(model, daemon.socket, block_tokens=BLOCK):
        greedy(model, prompt(40, seed=3))
    assert gpu.copied[True] == 3  # its own connection declares the device


def test_a_copy_follows_the_work_of_the_model(gpu: FakeDevice, client: Client) -> None:
    """The blocks contain what work that was submitted before the save writes."""
    model, ids = tiny_model("llama"), prompt(100)
    with attach(model, client, block_tokens=BLOCK) as attached:
        greedy(model, prompt(20, seed=2))
        soon(lambda: gpu.fake.live()["registered"] > 0)  # otherwise a start waits for the work
        over, may_write = threading.Event(), threading.Event()
        gpu.fake.later(gpu.own, lambda: bool(may_write.wait(60)))
        real = gpu.lane.finish

        def finish() -> None:
            waiting = threading.Thread(target=lambda: (real(), over.set()))
            waiting.start()
            assert not over.wait(0.05)
            may_write.set()
            assert over.wait(60)
            waiting.join()

        gpu.lane.finish = finish
        greedy(model, ids)
        gpu.lane.finish = real
        assert attached.counts["saved_blocks"] == 1 + 6, attached.counts


def test_a_reused_slot_is_a_miss(
    gpu: FakeDevice, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = tiny_model("llama"), prompt(100)
    wanted = greedy(model, ids)
    with attach(model, client, block_tokens=BLOCK) as attached:
        assert torch.equal(greedy(model, ids), wanted)
        # As if the lease had expired during the copy, and other blocks had been saved there.
        monkeypatch.setattr(Reader, "fresh", lambda reader, slots: 2)
        assert torch.equal(greedy(model, ids), wanted)
        assert (attached.counts["stale"], attached.counts["loaded_tokens"]) == (1, 0)


def test_a_damaged_block_is_found_if_the_daemon_has_checksums(
    gpu: FakeDevice, daemon_of: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = tiny_model("llama"), prompt(100)
    wanted = greedy(model, ids)
    daemon = daemon_of(warm="64MiB")
    with daemon.connect(verify=True, device=True) as client:
        with monkeypatch.context() as patch:
            through_host(patch)
            with attach(model, client, block_tokens=BLOCK):
                greedy(model, ids)
        with attach(model, client, block_tokens=BLOCK) as attached:
            assert torch.equal(greedy(model, ids), wanted)
            assert attached.counts["loaded_tokens"] == 96
            assert gpu.copied[False] == 6
            monkeypatch.setattr(Reader, "verify", spoilt)
            assert torch.equal(greedy(model, ids), wanted)
            assert attached.counts["spoilt"] == 1, attached.counts


def spoilt(reader: Reader, slots: bytes, digests: bytes, nbytes: int) -> None:
    raise SpoiltBlocks("a slot has other bytes")


def test_a_lost_device_is_a_miss(gpu: FakeDevice, client: Client) -> None:
    model, ids = tiny_model("llama"), prompt(100)
    wanted = greedy(model, ids)
    with attach(model, client, block_tokens=BLOCK) as attached:
        assert torch.equal(greedy(model, ids), wanted)
        gpu.fake.lose()
        assert torch.equal(greedy(model, ids), wanted)
        gpu.fake.mend()
        assert attached.counts["failed:load"] == 1, attached.counts


def test_memory_of_a_daemon_that_is_not_used_any_more_is_unregistered(
    gpu: FakeDevice, client: Client
) -> None:
    model, ids = tiny_model("llama"), prompt(100)
    with attach(model, client, block_tokens=BLOCK):
        greedy(model, ids)
        soon(lambda: gpu.fake.live()["registered"] > 0)
    soon(lambda: gpu.fake.live()["registered"] == 0)


def test_memory_of_a_daemon_that_has_ended_is_unregistered(
    gpu: FakeDevice, daemon_of: Callable[..., Daemon]
) -> None:
    """Otherwise it would be kept until another daemon answers."""
    model, daemon = tiny_model("llama"), daemon_of(warm="64MiB")
    with attach(model, daemon.socket, block_tokens=BLOCK) as attached:
        greedy(model, prompt(100))
        soon(lambda: gpu.fake.live()["registered"] > 0)
        daemon.end()
        greedy(model, prompt(100))
        assert attached.counts["failed:load"] == 1, attached.counts
        soon(lambda: gpu.fake.live()["registered"] == 0)


def test_memory_of_a_deleted_model_is_unregistered(gpu: FakeDevice, client: Client) -> None:
    model, ids = tiny_model("llama"), prompt(100)
    cache = KvtierCache.from_prompt(model, ids, client, block_tokens=BLOCK)
    greedy(model, ids, past_key_values=cache)
    assert cache.save() == 96
    soon(lambda: gpu.fake.live()["registered"] > 0)
    del model, cache
    gc.collect()
    soon(lambda: gpu.fake.live()["registered"] == 0)


def test_a_copy_after_the_end_of_a_store_leaves_no_memory_registered(
    gpu: FakeDevice, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may generate while a model is detached."""
    model, ids, calls = tiny_model("llama"), prompt(100), list[Any]()
    copy = FakeCopies.copy

    def noted(copies: FakeCopies, *arguments: Any) -> None:
        calls.append((copies, arguments))
        copy(copies, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(FakeCopies, "copy", noted)
        with attach(model, client, block_tokens=BLOCK):
            greedy(model, ids)
            soon(lambda: gpu.fake.live()["registered"] > 0)
    soon(lambda: gpu.fake.live()["registered"] == 0)
    before = gpu.fake.calls("cuMemHostRegister_v2")
    copies, arguments = calls[-1]
    copy(copies, *arguments)
    soon(lambda: gpu.fake.calls("cuMemHostRegister_v2") > before)
    soon(lambda: gpu.fake.live()["registered"] == 0)


def test_an_interrupt_waits_for_the_copy(
    gpu: FakeDevice, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon would give the slots to others while the GPU writes them."""
    model, wait = tiny_model("llama"), gpu.lane.wait
    with attach(model, client, block_tokens=BLOCK):
        greedy(model, prompt(20, seed=2))
        soon(lambda: gpu.fake.live()["registered"] > 0)  # otherwise a start waits for the work
        written, may_write = threading.Event(), threading.Event()

        def write() -> None:
            may_write.wait(60)
            written.set()

        def interrupted() -> None:
            raise KeyboardInterrupt

        def waited() -> None:
            may_write.set()
            wait()

        gpu.fake.later(gpu.own, write)
        with monkeypatch.context() as patch:
            patch.setattr(gpu.lane, "finish", interrupted)
            patch.setattr(gpu.lane, "wait", waited)
            with pytest.raises(KeyboardInterrupt):
                greedy(model, prompt(100))
        assert written.is_set()


def test_tensors_elsewhere_are_refused(gpu: FakeDevice) -> None:
    """The copy kernel would end the context of the device, or not wait for the work of another one."""
    elsewhere = torch.empty(64, dtype=torch.uint8, device="meta")
    with pytest.raises(ValueError, match="on meta"):
        device.TensorCopies(gpu).copy(([elsewhere], [0], [64]), [0], [], b"", True)


def test_threads_share_a_device(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    made, began, may_end = list[int](), threading.Event(), threading.Event()

    def driver(number: int) -> Any:
        made.append(number)
        began.set()
        may_end.wait(60)
        raise CudaError("no CUDA driver")

    monkeypatch.setattr(device, "Driver", driver)
    here = {torch.device("cuda", 3)}
    threads = [threading.Thread(target=device.copies_on, args=(here,)) for _ in range(2)]
    threads[0].start()
    assert began.wait(60)
    threads[1].start()
    threads[1].join(0.2)  # without a lock it would create the device too
    may_end.set()
    for one in threads:
        one.join()
    device.shared_device.cache_clear()
    assert made == [3]


def test_a_device_without_memory_for_a_lane_is_closed(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(copier: Copier) -> None:
        raise CudaError("out of memory")

    made = fake_cuda.copier(monkeypatch)  # with the kernel for the host
    made.close()
    made.driver.close()
    monkeypatch.setattr(device, "Driver", fake_cuda.driver)
    monkeypatch.setattr(Copier, "lane", full)
    assert device.copies_on({torch.device("cuda", 0)}) is None
    device.shared_device.cache_clear()
    assert not any(fake_cuda.live().values()), fake_cuda.live()


def test_without_a_driver_blocks_are_copied_through_host_memory(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(number: int | None) -> None:
        raise CudaError("no CUDA driver")

    monkeypatch.setattr(device, "Driver", missing)
    here = {torch.device("cuda", 3)}
    assert device.copies_on(here) is None and device.copies_on(here) is None
    assert [one.message for one in caplog.records] == [
        "kvtier: copying through host memory: no CUDA driver"
    ]
    device.shared_device.cache_clear()
    assert device.copies_on({torch.device("cpu")}) is None
    assert device.copies_on({torch.device("cuda", 0), torch.device("cuda", 1)}) is None
