"""The fake engine on a device: its pages are in device memory, and its own stream computes asynchronously."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvtier_kernels.cuda import Copier, Driver
from kvtier_vllm.device import DeviceSide
from kvtier_vllm.layout import Pages
from kvtier_vllm.messages import Step
from kvtier_vllm.worker import WorkerSide
from support.fake_engine import BLOCK, LAYERS, FakeEngine, FakeRequest

Bytes = npt.NDArray[np.uint8]


class Gpu(Protocol):
    """A device, real or fake."""

    def driver(self) -> Driver: ...
    def pin(self, array: Bytes) -> None:
        """Let copies of the engine read and write this host memory without waiting for it."""
        ...

    def copy(self, stream: int, to: int, source: int, nbytes: int) -> None:
        """Enqueue a copy of the engine's own in a stream. Tests never hold it."""
        ...

    def later(self, stream: int, work: Callable[[], None]) -> None:
        """Enqueue a function in a stream, as an engine does with a kernel."""
        ...


class DeviceEngine(FakeEngine):
    """Pages in device memory for every rank, and a stream that computes, in the memory of the host:
    `memory` has what it copied from the pages, and what it writes there is copied to the pages. `early`
    lists the pages that it read before they were loaded."""

    def __init__(self, gpu: Gpu, socket: str, *args: Any, **options: Any) -> None:
        self.gpu = gpu
        self.driver = gpu.driver()
        self.stream = self.driver.stream()
        self.early: list[tuple[int, int, int, int]] = []
        self.addresses: list[int] = []  # of each rank's pages
        # Whether it zeroes pages that change hands, and whether it announces the step before that.
        self.zeroes, self.announces = False, True
        super().__init__(socket, *args, **options)

    def worker(self, rank: int, pages: Pages) -> WorkerSide:
        memory = self.memory[rank].reshape(-1)
        self.gpu.pin(memory)
        address = self.driver.device_memory(memory.nbytes)
        self.addresses.append(address)
        self.gpu.copy(self.stream, address, memory.ctypes.data, memory.nbytes)
        copier = Copier(self.gpu.driver(), self.options.gpu_copies)
        where = [(address, memory.nbytes)]
        device = DeviceSide(copier, pages, where, self.memory[rank].shape[2], lambda: self.stream)
        return WorkerSide(self.layout, self.options, rank, pages, [], device=device)

    def touch_pages(self, step: Step) -> None:
        """As the second model runner of vLLM does, with `wrap_model_runner` and without."""
        fresh, self.fresh = self.fresh, []
        if not self.zeroes:
            return
        for worker in self.workers if self.announces else ():
            worker.begin(step)

        def zero() -> None:
            for memory in self.memory:
                memory[:, :, fresh] = 0

        self.gpu.later(self.stream, zero)
        for rank, memory in enumerate(self.memory):
            for group, layer, page in itertools.product(*map(range, memory.shape[:2]), fresh):
                self._copy((rank, group, layer, page), to_device=True)

    def compute(self, request: FakeRequest, start: int, stop: int) -> None:
        """Enqueue the work in the stream, which runs it later."""
        for layer in range(LAYERS):
            for worker in self.workers if self.by_layers and stop else ():
                for group in range(len(self.layout.groups)):
                    self.call_layer(worker, f"{group}.{layer}")
            self.compute_layer(layer, request, start, stop)

    def call_layer(self, worker: WorkerSide, name: str) -> None:
        worker.loads.wait_for_layer(name)

    def compute_layer(self, layer: int, request: FakeRequest, start: int, stop: int) -> None:
        found, written = [], []
        for rank, group in np.ndindex(len(self.memory), len(self.layout.groups)):
            parts = self.parts(group)
            for at in range(stop // BLOCK * parts):
                if page := request.pages[group][at]:
                    data = self.content(rank, group, layer, request, at)
                    known = at < start // BLOCK * parts
                    (found if known else written).append(((rank, group, layer, page), data))

        for place, _ in found:
            self._copy(place, to_device=False)

        def later() -> None:
            time.sleep(0.002)
            self.early += [
                place for place, data in found if bytes(self.memory[place[0]][place[1:]]) != data
            ]
            for place, data in written:
                self.memory[place[0]][place[1:]] = np.frombuffer(data, np.uint8)

        self.gpu.later(self.stream, later)
        for place, _ in written:
            self._copy(place, to_device=True)

    def _copy(self, place: tuple[int, int, int, int], to_device: bool) -> None:
        """Enqueue the copy of a page."""
        memory = self.memory[place[0]]
        page = memory[place[1:]]
        here = page.ctypes.data
        there = self.addresses[place[0]] + here - memory.ctypes.data
        to, source = (there, here) if to_device else (here, there)
        self.gpu.copy(self.stream, to, source, page.nbytes)

    def wrong_pages(self, request: FakeRequest) -> list[tuple[int, int, int, int]]:
        for memory, address in zip(self.memory, self.addresses, strict=True):
            self.gpu.copy(self.stream, memory.ctypes.data, address, memory.nbytes)
        self.driver.call("cuStreamSynchronize", self.stream)
        return super().wrong_pages(request)

    def close(self) -> None:
        super().close()
        self.driver.try_call("cuStreamSynchronize", self.stream)
        self.driver.try_call("cuStreamDestroy_v2", self.stream)
        for address in self.addresses:
            self.driver.free(address)
        self.driver.close()
