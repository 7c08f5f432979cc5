"""The copies of pages on a CUDA device: a stream for each direction, each used by one thread."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from kvtier.loading import Reader
from kvtier.saving import Saving
from kvtier_kernels.cuda import Copier, CopyLane, CudaError, DevicePieces, Driver
from kvtier_plugins import Unsupported
from kvtier_sglang.pages import described, find_places, page_numbers


class DevicePages:
    """The pages of one pool on the device."""

    def __init__(self, pool: Any, pieces: DevicePieces, load: CopyLane, save: CopyLane) -> None:
        self.page_tokens, self.layers, self.dtype, self.digest = described(pool, find_places(pool))
        self.block_bytes = pieces.block_bytes
        self._pieces, self._load, self._save = pieces, load, save

    def numbers(self, indices: Any, count: int) -> list[int]:
        return page_numbers(indices, count, self.page_tokens)

    def scatter(
        self, reader: Reader, slots: bytes, numbers: Sequence[int], threads: int, digests: bytes
    ) -> int:
        ids, within = reader.placed(slots, numbers, self.block_bytes, 1)
        self._load.copy(self._pieces, ids, reader.mappings, within, False, None)
        if digests:
            reader.verify(slots, digests, self.block_bytes)
        return reader.fresh(slots)

    def gather(self, saving: Saving, numbers: Sequence[int]) -> None:
        ids, within = saving.placed(numbers, self.block_bytes)
        self._save.copy(self._pieces, ids, saving.mappings, within, True, None)


class DeviceCopies:
    """What the pools of one device share."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        with ExitStack() as made:
            made.callback(driver.close)
            self._copier = Copier(driver)
            made.callback(self._copier.close)
            self._load, self._save = self._copier.lane(), self._copier.lane()
            made.pop_all()

    @classmethod
    def of(cls, device: Any) -> DeviceCopies | None:
        """The copies on this device; None if that is the host's memory. Raises Unsupported."""
        if device.type == "cpu":
            return None
        if device.type != "cuda":
            raise Unsupported(f"pages on a device of type {device.type}")
        try:
            return cls(Driver(device.index))
        except CudaError as error:
            raise Unsupported(str(error)) from error

    def pages(self, pool: Any) -> DevicePages:
        """Measure the ways to copy the pages of a pool, whose bytes stay the same. Raises Unsupported."""
        places = find_places(pool)
        try:
            pieces = self._copier.pieces(
                [address for address, _, _ in places.memories],
                [nbytes for _, nbytes, _ in places.memories],
                places.offsets, places.strides, places.sizes, blocks=pool.size // pool.page_size,
            )  # fmt: skip
        except (CudaError, ValueError) as error:
            raise Unsupported(str(error)) from error
        return DevicePages(pool, pieces, self._load, self._save)

    def close(self) -> None:
        """Wait for the copies, and free all resources. No other thread may be copying."""
        self._copier.close()
        self.driver.close()
