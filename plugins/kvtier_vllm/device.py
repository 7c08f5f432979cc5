"""A worker's copies from and to the pages of a CUDA device, on streams of their own that events order.

A copy begins after the work that was submitted to the engine's stream before it. If a step needs a load, the
engine's stream waits for it, and no thread does. Slots and pages may be reused only after the copy's event.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, Literal

from kvtier import KvtierError
from kvtier.client import Reader
from kvtier.hot import CopySlots
from kvtier.saving import Saving
from kvtier.wire import SLOT_BYTES
from kvtier_kernels.cuda import Copier, CopyLane, CudaError, DevicePieces, Driver, Event
from kvtier_plugins import Unsupported
from kvtier_plugins.hot import HotSide, pages_at, slots_at
from kvtier_plugins.layers import LayerParts
from kvtier_vllm.daemon import DaemonSession
from kvtier_vllm.layout import Pages
from kvtier_vllm.messages import ReadOrder
from kvtier_vllm.options import Options

if TYPE_CHECKING:
    from kvtier_plugins.direct_loads import DirectLoads

log = logging.getLogger("vllm.kvtier")

HOT_ENDS_S = 10.0  # for copies in memory of an earlier daemon's holder

Lane = Literal["load", "now"]


class DeviceCopyError(KvtierError):
    """The device has failed to copy."""


class SharedCopies:
    """Copies of blocks in the memory of the device that its holder shares: none before `join`."""

    def __init__(
        self, copier: Copier, lanes: Mapping[str, CopyLane], pieces: Sequence[DevicePieces]
    ) -> None:
        self._copier = copier
        self._lanes = lanes
        self._pieces = pieces
        self._hot: HotSide | None = None
        # The copies that the present load of a lane reads.
        self._used: dict[str, list[tuple[HotSide, bytes]]] = {"load": [], "now": []}

    def join(self, session: DaemonSession, shard: int) -> None:
        """Take part in the copies of this daemon. Waits for it."""
        if "kernel" not in self._copier.ways:
            # Within an H200, the batch call copies pieces of 64 KiB at a third of the speed of PCIe.
            log.info("kvtier: no copies on the GPU: they need gpu_copies=auto and a copy kernel")
            return
        run = session.reader.daemon_run
        if self._hot is not None:
            self.leave(self._hot.run)
        try:
            self._hot = HotSide(self._copier.driver, session.client, run, [shard])
        except KvtierError as error:
            log.info("kvtier: no copies on the GPU: %s", str(error))

    def leave(self, run: bytes) -> None:
        """Unmap the copies of this run of the daemon, and forget its connection, once no copy uses them."""
        hot = self._hot
        if hot is not None and hot.run == run:
            self._hot = None
            hot.close(HOT_ENDS_S)

    def of(self, run: bytes) -> HotSide | None:
        """The copies of this run of the daemon, if there is memory for them."""
        hot = self._hot
        return hot if hot is not None and hot.run == run and hot.has_memory else None

    def save(
        self,
        run: bytes,
        saving: Saving,
        group: int,
        block_ids: Sequence[int],
        turn: AbstractContextManager[object],
    ) -> None:
        """Copy the pages of blocks that were just saved. Logs what fails, except what `turn` raises."""
        hot, granted = self._hot, saving.granted
        if hot is None or hot.run != run or not granted:
            return
        parts = len(block_ids) // len(saving.outcomes)
        pages = pages_at(block_ids, granted, parts)
        try:
            hot.save(self._lanes["save"], self._pieces[group], saving.slots, pages, parts, turn)
        except (CudaError, KvtierError) as error:
            log.warning("kvtier: a copy on the GPU failed: %s", str(error))

    def start_keeping(
        self, run: bytes, reads: Sequence[ReadOrder], parts: Sequence[int]
    ) -> list[tuple[HotSide, CopySlots]]:
        """After the copies of a load in the lane `load`, copy those of its blocks that have no copy yet to
        the device's memory. Returns what `end_keeping` gets after `end`."""
        kept: list[tuple[HotSide, CopySlots]] = []
        if (hot := self.of(run)) is None:
            return kept
        lane = self._lanes["load"]
        try:
            for read in reads:
                many, ids, there = parts[read.group], read.block_ids, set(hot.known(read.hot))
                wanted = [
                    at
                    for at in range(len(read.slots) // SLOT_BYTES)
                    if at not in there and all(ids[at * many : (at + 1) * many])
                ]
                pages = pages_at(ids, wanted, many)
                if (copies := hot.reserve(slots_at(read.slots, wanted), again=True)) is not None:
                    # If this raises, its slots stay held until this process ends.
                    hot.start_save(lane, self._pieces[read.group], copies, pages, many, None)
                    kept.append((hot, copies))
        except (CudaError, KvtierError) as error:
            log.warning("kvtier: a copy on the GPU failed: %s", str(error))
        return kept

    def end_keeping(self, kept: Sequence[tuple[HotSide, CopySlots]], why: str) -> None:
        """The lane has ended; `why`: the reason if its pages do not have their blocks. If the device failed,
        the slots stay held until this process ends."""
        for hot, copies in kept if why != "error" else ():
            hot.done()
            with contextlib.suppress(KvtierError):
                copies.end(not why)

    def fill(self, reader: Reader, reads: Sequence[ReadOrder], nbytes: Sequence[int]) -> None:
        """Copy blocks that a step has loaded from the host's memory to that of the device. Waits."""
        if (hot := self.of(reader.daemon_run)) is None:
            return
        try:
            for read in reads:
                there = set(hot.known(read.hot))
                left = [at for at in range(len(read.slots) // SLOT_BYTES) if at not in there]
                hot.fill(reader, slots_at(read.slots, left), nbytes[read.group])
        except (CudaError, KvtierError) as error:
            log.warning("kvtier: a copy on the GPU failed: %s", str(error))

    def start_load(
        self, lane: Lane, run: bytes, read: ReadOrder, parts: int, after: Event | None
    ) -> tuple[bytes, list[int]]:
        """Start to copy the blocks that have a copy to their pages; return the slots and pages of the
        others. `end_load` must be called when the lane has finished."""
        hot = self.of(run) if read.hot else None
        if hot is None:
            return read.slots, read.block_ids
        slots, pages, used = hot.start_load(
            self._lanes[lane],
            self._pieces[read.group],
            read.slots,
            read.hot,
            read.block_ids,
            parts,
            after,
        )
        if used:
            self._used[lane].append((hot, used))
        return slots, pages

    def end_load(self, lane: Lane) -> bool:
        """The lane's copies have ended; return whether no slot of a copy was reused before."""
        used, self._used[lane] = self._used[lane], []
        fresh = all(hot.fresh(slots) for hot, slots in used)
        for hot, _ in used:
            hot.done()
        return fresh

    def close(self) -> None:
        """Unmap the memory. No other thread may be copying."""
        if self._hot is not None:
            self._hot.close()


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
        self._layers: LayerParts | None = None
        self.direct: DirectLoads | None = None
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
        self.shared = SharedCopies(copier, self._lanes, self._pieces)
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
        if self.direct is not None:
            self.direct.forget(reader)
        self.shared.leave(reader.daemon_run)
        self._copier.pins.forget(reader.mappings)

    def end_gather(self) -> None:
        """Return when the copies of `gather` have ended; also if this raises."""
        try:
            self._lanes["save"].finish()
        except CudaError as error:
            self._lanes["save"].drain()
            raise DeviceCopyError(str(error)) from error

    def hold_for_saves(self) -> None:
        """Let the engine's stream wait for the copies of `gather`; if the device fails, wait here."""
        lane = self._lanes["save"]
        try:
            lane.hold(self._engine_stream())
        except CudaError:
            lane.wait()

    def wait_for_saves(self) -> None:
        """Return when the copies that `gather` has started have ended."""
        self._lanes["save"].wait()

    def gather(
        self, saving: Saving, group: int, block_ids: Sequence[int], after: Event | None
    ) -> None:
        """Start to copy pages into the granted slots. If this raises, no copy is in progress."""
        if after is None:
            raise DeviceCopyError("no event to wait for")
        pieces, lane = self._pieces[group], self._lanes["save"]
        ids, slots = saving.placed(block_ids, pieces.block_bytes)
        try:
            lane.start(pieces, ids, saving.mappings, slots, True, after)
        except CudaError as error:
            raise DeviceCopyError(str(error)) from error

    # --- loads within a step, by layers -----------------------------------------------------------

    def divide(self, layers: Sequence[tuple[str, int]], least_bytes: int) -> None:
        """Copy later loads within a step, of the only group, by parts of at least this many bytes."""
        (pieces,) = self._pieces
        try:
            self._layers = LayerParts(self._copier, pieces, layers, least_bytes)
        except CudaError as error:
            log.warning("kvtier: loads are not divided by layers: %s", str(error))

    def begin_layers(
        self, loads: Sequence[tuple[Reader, ReadOrder]], parts: int, after: Event | None
    ) -> bool:
        """Start to copy slots into pages, `parts` per slot, layer by layer. The engine's stream
        waits for each layer in `wait_for_layer`. False if these loads are to be started by `begin`."""
        if self._layers is None or after is None or not loads:
            return False
        if any(read.hot and self.shared.of(reader.daemon_run) for reader, read in loads):
            return False  # a copy on the device is faster than what layers could overlap
        lane, copies = self._lanes["now"], []
        for reader, read in loads:
            nbytes = self._pieces[0].block_bytes
            ids, slots = reader.placed(read.slots, read.block_ids, nbytes, parts)
            copies.append((ids, reader.mappings, slots))
        try:
            return self._layers.start(lane, copies, after)
        except CudaError as error:
            raise DeviceCopyError(str(error)) from error

    def wait_for_layer(self, name: str) -> None:
        """Let the engine's stream wait for what this layer needs of the loads of `begin_layers`."""
        if self._layers is not None:
            try:
                self._layers.wait(name, self._engine_stream)
            except CudaError as error:
                # `end_layers` reports that this layer did not wait.
                log.warning("kvtier: the CUDA device failed: %s", str(error))

    def end_layers(self) -> bool:
        """Whether each layer has waited for its part of the loads of `begin_layers`. Otherwise what the step
        has computed is wrong; then no copy is in progress."""
        complete = self._layers is None or self._layers.end()
        if not complete:
            self._lanes["now"].drain()
        return complete

    def begin(
        self,
        lane: Lane,
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
                slots, pages = self.shared.start_load(
                    lane, reader.daemon_run, read, parts[read.group], after
                )
                ids, slots = reader.placed(slots, pages, pieces.block_bytes, parts[read.group])
                copies.start(pieces, ids, reader.mappings, slots, False, after)
            if lane == "now":
                copies.hold(self._engine_stream())
        except Exception as error:
            # Copies that have begun must end before another request gets the pages.
            copies.drain()
            self.shared.end_load(lane)
            if isinstance(error, CudaError):
                raise DeviceCopyError(str(error)) from error
            raise

    def end(self, lane: Lane, reader: Reader, reads: Sequence[ReadOrder]) -> bool:
        """Wait for the lane; return whether no slot was reused before the copies ended."""
        try:
            self._lanes[lane].finish()
        except CudaError as error:
            raise DeviceCopyError(str(error)) from error
        # The lease holds the copies too, so the slots of all blocks are checked.
        fresh = self.shared.end_load(lane)
        return fresh and all(
            reader.fresh(read.slots) * SLOT_BYTES == len(read.slots) for read in reads
        )

    def read_directly(self, options: Options, shard: int) -> None:
        """Let loads read blocks of the only group from disk themselves, as the options say."""
        from kvtier_plugins.direct_loads import DirectLoads, Times

        (pieces,) = self._pieces
        driver, lane = self._copier.driver, self._lanes["load"]
        times = Times(options.patience_ms, options.lease_ms)
        self.direct = DirectLoads(options.gpu_direct, times, driver, lane, pieces, shard)

    def close(self) -> None:
        """Wait for the copies, then free all resources. No other thread may be copying."""
        if self.direct is not None and not self.direct.close():
            return  # a read is in progress: everything stays until the process ends
        self.shared.close()
        if self._layers is not None:
            self._layers.close()
        self._copier.close()
        self._copier.driver.close()


def open_device(
    pages: Pages, arrays: Sequence[Any], options: Options, blocks: int
) -> DeviceSide | None:
    """The device of these tensors, which have `blocks` blocks; None for host memory. Raises Unsupported."""
    if not arrays or arrays[0].device.type == "cpu":
        return None
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
