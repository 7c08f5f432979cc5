"""A worker's copies where the pages are a CUDA device's: on streams beside the engine's, ordered by events.

A copy begins after what the engine's stream was told before it; where the engine needs a load in this step,
its stream waits for it, and no thread does. A thread may use slots, or give pages away, when the copy's event
has come, and not before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

from kvtier import KvtierError
from kvtier.client import Reader
from kvtier.saving import Saving
from kvtier.wire import SLOT_BYTES
from kvtier_kernels.cuda import Copier, CudaError, Driver, Event
from kvtier_vllm.layout import Pages
from kvtier_vllm.messages import Read
from kvtier_vllm.options import Options, Unsupported

log = logging.getLogger("vllm.kvtier")


class DeviceCopyError(KvtierError):
    """The device did not copy."""


class DeviceSide:
    """`engine_stream` is called by the step's thread, and says what its kernels are told to."""

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
        """What the engine's stream was told so far. None where the device no longer says: then nothing is
        copied any more. Never raises: the step calls it."""
        try:
            return Event(self._copier.driver).record(self._engine_stream())
        except CudaError as error:
            log.warning("kvtier: the device fails: %s", str(error))
            return None

    def own_thread(self) -> None:
        self._copier.driver.own_thread()

    def see(self, reader: Reader) -> None:
        """Have these extents registered."""
        self._copier.pins.of(reader.mappings)

    def let_go(self, reader: Reader) -> None:
        """Have these extents registered no more, as soon as no copy uses them."""
        self._copier.pins.forget(reader.mappings)

    def gather(
        self, saving: Saving, group: int, block_ids: Sequence[int], after: Event | None
    ) -> None:
        """Copy pages into the slots that were granted. Nothing is copied any more when this returns, or
        raises."""
        if after is None:
            raise DeviceCopyError("there is no event to begin after")
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
        reads: Sequence[Read],
        parts: Sequence[int],
        after: Event | None,
    ) -> None:
        """Start to copy slots into pages, as many for a slot as `parts` says of its group. The engine's
        stream waits for what goes the lane `now`."""
        if after is None:
            raise DeviceCopyError("there is no event to begin after")
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
            # Whatever it was: what has begun must be over before the pages are somebody else's.
            copies.drain()
            if isinstance(error, CudaError):
                raise DeviceCopyError(str(error)) from error
            raise

    def end(self, lane: Literal["load", "now"], reader: Reader, reads: Sequence[Read]) -> bool:
        """Wait for the lane, then tell whether all these slots were what they should be until then."""
        try:
            self._lanes[lane].finish()
        except CudaError as error:
            raise DeviceCopyError(str(error)) from error
        return all(reader.fresh(read.slots) * SLOT_BYTES == len(read.slots) for read in reads)

    def close(self) -> None:
        """Wait for the copies, and free everything. No other thread may be copying."""
        self._copier.close()
        self._copier.driver.close()


def open_device(
    pages: Pages, arrays: Sequence[Any], options: Options, blocks: int, zeroes: bool
) -> DeviceSide | None:
    """The device that these tensors are on, or None where they are the host's. `blocks`: how many there
    are. `zeroes`: the engine writes zeros into pages that it gives to somebody. Raises Unsupported."""
    if not arrays or arrays[0].device.type == "cpu":
        return None
    if zeroes:
        # A runner does that before it says whose the pages were: a save would keep zeros.
        raise Unsupported("pages on a GPU that the engine zeroes can't be kept yet")
    import torch

    index = arrays[0].device.index
    memory = [(array.data_ptr(), array.numel()) for array in arrays]
    try:
        copier = Copier(Driver(index), options.gpu_copies)
        return DeviceSide(
            copier, pages, memory, blocks, lambda: int(torch.cuda.current_stream(index).cuda_stream)
        )
    except CudaError as error:
        raise Unsupported(str(error)) from error
