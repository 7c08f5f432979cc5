"""A worker's copies from and to the pages of a CUDA device, on streams of their own that events order.

A copy begins after the work that was submitted to the engine's stream before it. If a step needs a load, the
engine's stream waits for it, and no thread does. Slots and pages may be reused only after the copy's event.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Literal

from kvtier import KvtierError
from kvtier.client import Reader
from kvtier.saving import Saving
from kvtier.wire import SLOT_BYTES
from kvtier_kernels.cuda import Copier, CudaError, Driver, Event
from kvtier_plugins import Unsupported
from kvtier_vllm.layout import Pages
from kvtier_vllm.messages import ReadOrder
from kvtier_vllm.options import Options

log = logging.getLogger("vllm.kvtier")


class DeviceCopyError(KvtierError):
    """The device has failed to copy."""


class DeviceSide:
    """Copies on one device. The step's thread asks `engine_stream` for the stream of the engine."""

    def __init__(
        self,
        copier: Copier,
        pages: Pages,
        memory: Sequence[tuple[int, int]],
        blocks: int,
        engine_stream: Callable[[], int],
    ) -> None:
        self._copier = copier
        self._engine_stream = engine_stream
        self._failed = False  # and that was logged
        self._lanes = {name: copier.lane() for name in ("save", "load", "now")}
        start = self.fence()
        self._pieces = [
            copier.pieces(
                [memory[page.array][0] for page in group],
                [memory[page.array][1] for page in group],
                [page.offset for page in group],
                [page.stride for page in group],
                [page.nbytes for page in group],
                blocks=blocks,
                after=start,
            )
            for group in pages.groups
        ]
        for number, pieces in enumerate(self._pieces):
            text = "kvtier: group %d, %d bytes a block: %s"
            log.info(text, number, pieces.block_bytes, "; ".join(pieces.told))

    def fence(self) -> Event | None:
        """An event after the work submitted to the engine's stream so far. None if the device has failed;
        then nothing is copied. Never raises: the step calls it."""
        try:
            return Event(self._copier.driver).record(self._engine_stream())
        except CudaError as error:
            if not self._failed:
                log.warning("kvtier: the CUDA device failed, disabling copies: %s", str(error))
            self._failed = True
            return None

    def prepare_thread(self) -> None:
        self._copier.driver.own_thread()

    def register(self, reader: Reader) -> None:
        """Register these extents with the device."""
        self._copier.pins.of(reader.mappings)

    def unregister(self, reader: Reader) -> None:
        """Unregister these extents once no copy uses them."""
        self._copier.pins.forget(reader.mappings)

    def gather(
        self, saving: Saving, group: int, block_ids: Sequence[int], after: Event | None
    ) -> None:
        """Copy pages into the granted slots. When this returns or raises, the copy has ended."""
        if after is None:
            raise DeviceCopyError("no event to wait for")
        pieces, lane = self._pieces[group], self._lanes["save"]
        ids, slots = saving.placed(block_ids, pieces.block_bytes)
        try:
            lane.start(pieces, ids, saving.mappings, slots, True, after)
            lane.finish()
        except CudaError as error:
            raise DeviceCopyError(str(error)) from error

    def begin(
        self,
        lane: Literal["load", "now"],
        reader: Reader,
        reads: Sequence[ReadOrder],
        parts: Sequence[int],
        after: Event | None,
    ) -> None:
        """Start to copy slots into pages, `parts` per slot. The engine's stream waits for lane `now`."""
        if after is None:
            raise DeviceCopyError("no event to wait for")
        copies = self._lanes[lane]
        try:
            for read in reads:
                pieces = self._pieces[read.group]
                ids, slots = reader.placed(
                    read.slots, read.block_ids, pieces.block_bytes, parts[read.group]
                )
                copies.start(pieces, ids, reader.mappings, slots, False, after)
            if lane == "now":
                copies.hold(self._engine_stream())
        except Exception as error:
            # Copies that have begun must end before another request gets the pages.
            copies.drain()
            if isinstance(error, CudaError):
                raise DeviceCopyError(str(error)) from error
            raise

    def end(self, lane: Literal["load", "now"], reader: Reader, reads: Sequence[ReadOrder]) -> bool:
        """Wait for the lane; return whether no slot was reused before the copies ended."""
        try:
            self._lanes[lane].finish()
        except CudaError as error:
            raise DeviceCopyError(str(error)) from error
        return all(reader.fresh(read.slots) * SLOT_BYTES == len(read.slots) for read in reads)

    def close(self) -> None:
        """Wait for the copies, then free all resources. No other thread may be copying."""
        self._copier.close()
        self._copier.driver.close()


def open_device(
    pages: Pages, arrays: Sequence[Any], options: Options, blocks: int, zeroes: bool
) -> DeviceSide | None:
    """The device of these tensors, or None if they are in the host's memory. `blocks`: the number of blocks;
    `zeroes`: the engine writes zeros into pages before it gives them to a request. Raises Unsupported."""
    if not arrays or arrays[0].device.type == "cpu":
        return None
    if zeroes:
        # It does so before the connector learns of the new request: a save would store zeros.
        raise Unsupported("pages on a GPU that the engine zeroes are not supported yet")
    import torch

    index = arrays[0].device.index
    memory = [(array.data_ptr(), array.numel()) for array in arrays]
    with ExitStack() as opened:  # closed if a later step fails
        try:
            driver = Driver(index)
            opened.callback(driver.close)
            copier = Copier(driver, options.gpu_copies)
            opened.callback(copier.close)
            stream = lambda: int(torch.cuda.current_stream(index).cuda_stream)  # noqa: E731
            side = DeviceSide(copier, pages, memory, blocks, stream)
        except CudaError as error:
            raise Unsupported(str(error)) from error
        opened.pop_all()
        return side
