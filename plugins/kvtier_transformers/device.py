"""Copies of blocks between the daemon's memory and tensors on a GPU, without a copy in host memory.

All stores of a process share the driver, the copy kernel and a stream of each GPU. A copy follows the work of
torch's current stream, and has ended when the call returns.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from kvtier_kernels import Mapping
from kvtier_kernels.cuda import Copier, CudaError, DevicePieces, Driver, Event
from kvtier_transformers.layout import Places
from kvtier_transformers.options import log

Extents = Sequence[Mapping | None]


class SharedDevice:
    """What the stores of a process share of one GPU. Raises CudaError if it cannot be used."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.Lock()  # held by the thread that uses the lane
        self.driver = Driver(device.index)
        try:
            self.copier = Copier(self.driver)
            self.lane = self.copier.lane()
        except CudaError:
            self.driver.close()
            raise

    def stream(self) -> int:
        """The stream that this thread submits torch's work to."""
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def placed(self, table: npt.NDArray[np.uint8]) -> torch.Tensor:
        """These bytes in the memory of the device."""
        return torch.from_numpy(table).to(self.device)

    def close(self) -> None:
        self.copier.close()
        self.driver.close()


class DeviceCopies:
    """The copies of one store. The memory of a daemon that it no longer uses is unregistered."""

    def __init__(self, shared: SharedDevice) -> None:
        self._shared = shared
        self._extents: Extents | None = None

    def copy(
        self, places: Places, ids: Sequence[int], extents: Extents, slots: bytes, inwards: bool
    ) -> None:
        """Copy these blocks of tensors into slots, or slots into them."""
        if not ids:
            return
        shared = self._shared
        arrays, offsets, sizes = places
        pieces = DevicePieces(
            [one.data_ptr() for one in arrays], [one.numel() for one in arrays], offsets, sizes, sizes,
            blocks=max(ids) + 1,
        )  # fmt: skip
        table = shared.placed(pieces.split().view(np.uint8))
        pieces.described(table.data_ptr(), shared.copier.ways[0])
        with shared.lock:
            self._use(extents)
            begin = Event(shared.driver).record(shared.stream())
            shared.lane.start(pieces, ids, extents, slots, inwards, begin)
            shared.lane.finish()

    def _use(self, extents: Extents) -> None:
        if extents is not self._extents:
            self._forget()
            self._extents = extents

    def _forget(self) -> None:
        if self._extents is not None:
            self._shared.copier.pins.forget(self._extents)
            self._extents = None

    def close(self) -> None:
        """Unregister the daemon's memory."""
        with self._shared.lock:
            self._forget()


@cache
def shared_device(device: torch.device) -> SharedDevice | None:
    """The GPU, or None if blocks must be copied through host memory."""
    try:
        return SharedDevice(device)
    except CudaError as error:
        log.warning("kvtier: copying through host memory: %s", str(error))
        return None


def copies_on(devices: set[torch.device]) -> DeviceCopies | None:
    """Copies for a cache on these devices; None if it is not on one GPU alone."""
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        return None
    shared = shared_device(*devices)
    return None if shared is None else DeviceCopies(shared)
