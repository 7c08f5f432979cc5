"""Copies of blocks between the daemon's memory and tensors on a GPU, without a copy in host memory.

All stores of a process share the driver, the copy kernel and a stream of each GPU. A copy follows the work of
torch's current stream, and has ended when the call returns.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from kvtier_kernels.cuda import Copier, CudaError, DevicePieces, Driver, Event
from kvtier_kernels.cuda.pins import Extents
from kvtier_transformers.layout import Places
from kvtier_transformers.options import log


class SharedDevice:
    """What the stores of a process share of one GPU. Raises CudaError if it cannot be used."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.Lock()  # held by the thread that uses the lane
        self.driver = Driver(device.index)
        with ExitStack() as made:  # what was made is closed if a later call fails
            made.callback(self.driver.close)
            self.copier = Copier(self.driver)
            made.callback(self.copier.close)
            self.lane = self.copier.lane()
            made.pop_all()

    def stream(self) -> int:
        """The stream that this thread submits torch's work to."""
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def placed(self, table: npt.NDArray[np.uint8]) -> torch.Tensor:
        """These bytes in the memory of the device."""
        return torch.from_numpy(table).to(self.device)


class TensorCopies:
    """The copies of one store. The memory of a daemon that it no longer uses is unregistered, also if the
    store is deleted and not closed."""

    def __init__(self, shared: SharedDevice) -> None:
        self._shared = shared
        self._used: list[Extents] = []  # none or one
        self._is_closed = False
        weakref.finalize(self, shared.copier.pins.forget_soon, self._used).atexit = False

    def copy(
        self, places: Places, ids: Sequence[int], extents: Extents, slots: bytes, inwards: bool
    ) -> None:
        """Copy these blocks of tensors into slots, or slots into them."""
        if not ids:
            return
        shared = self._shared
        arrays, offsets, sizes = places
        if found := {str(one.device) for one in arrays if one.device != shared.device}:
            raise ValueError(f"tensors on {', '.join(found)}, copies on {shared.device}")
        pieces = DevicePieces(
            [one.data_ptr() for one in arrays], [one.numel() for one in arrays], offsets, sizes, sizes,
            blocks=max(ids) + 1,
        )  # fmt: skip
        units = pieces.split()
        table = shared.placed(units.view(np.uint8))
        pieces.described(table.data_ptr(), len(units), shared.copier.ways[0])
        with shared.lock:
            self._use(extents)
            begin = Event(shared.driver).record(shared.stream())
            try:
                shared.lane.copy(pieces, ids, extents, slots, inwards, begin)
            finally:
                if self._is_closed:
                    self._forget()

    def _use(self, extents: Extents) -> None:
        if not any(one is extents for one in self._used):
            self._forget()
            self._used.append(extents)

    def _forget(self) -> None:
        while self._used:
            self._shared.copier.pins.forget(self._used.pop())

    def forget(self) -> None:
        """Unregister the daemon's memory. A later copy registers what it uses."""
        with self._shared.lock:
            self._forget()

    def close(self) -> None:
        """As `forget`, also after each later copy: another thread may not have ended."""
        self._is_closed = True
        self.forget()


_making = threading.Lock()


@cache
def shared_device(device: torch.device) -> SharedDevice | None:
    """The GPU, or None if blocks must be copied through host memory."""
    try:
        return SharedDevice(device)
    except CudaError as error:
        log.warning("kvtier: copying through host memory: %s", str(error))
        return None


def copies_on(devices: set[torch.device]) -> TensorCopies | None:
    """Copies for a cache on these devices; None if it is not on one GPU alone."""
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        return None
    with _making:
        shared = shared_device(*devices)
    return None if shared is None else TensorCopies(shared)
