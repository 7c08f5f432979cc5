"""Copies of blocks in the memory of a GPU that a holder shares: an engine's process maps it, loads from it,
and copies its own blocks to it. It uses the driver only after the daemon has said that there is such memory.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import numpy.typing as npt

from kvtier import KvtierError, wire
from kvtier.client import Client, Reader
from kvtier.errors import Refused
from kvtier.hot import CopySlots, HotClient
from kvtier_kernels.cuda import CopyLane, CudaError, DevicePieces, Driver, Event
from kvtier_kernels.gpu_memory import GpuMemoryError, MappedGpuMemory, uuid_of

log = logging.getLogger("kvtier")

SLOT = np.dtype([("extent", "<u4"), ("reserved", "<u4"), ("offset", "<u8"), ("generation", "<u8")])


def slots_at(slots: bytes, positions: Sequence[int]) -> bytes:
    size = wire.SLOT_BYTES
    return b"".join(slots[at * size : (at + 1) * size] for at in positions)


def pages_at(block_ids: Sequence[int], positions: Sequence[int], parts: int) -> list[int]:
    if parts == 1:
        return [block_ids[at] for at in positions]
    return [block for at in positions for block in block_ids[at * parts : (at + 1) * parts]]


class HotSide:
    """The copies on one device, for one connection to one run of the daemon. A device that cannot map the
    memory is logged once, and has no copies from then on."""

    def __init__(self, driver: Driver, client: Client, run: bytes, shards: Sequence[int]) -> None:
        """Raises KvtierError if the daemon does not let this client take part."""
        self.run = run
        self._driver = driver
        self._client = HotClient(client)
        self._memory: dict[int, MappedGpuMemory] = {}
        self._gone: dict[int, MappedGpuMemory] = {}
        self._uses = 0  # copies in progress
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._following = threading.Lock()
        self._stream = 0
        self._is_off = False
        try:
            self.gpu = uuid_of(driver)
        except (CudaError, GpuMemoryError) as error:
            self.gpu = ""
            self._turn_off(error)
            return
        self._client.join(self.gpu, shards)
        self.follow()

    @property
    def has_memory(self) -> bool:
        return bool(self._memory)

    def _turn_off(self, error: Exception) -> None:
        self._is_off = True
        text = (
            "kvtier: loading only from the host's memory, because this GPU's cannot be shared: %s"
        )
        log.warning(text, str(error))

    def follow(self) -> None:
        """Map memory that was added, and unmap what is gone and no copy uses. May wait for the device."""
        with self._following:
            self._map_arrived()
        self._unmap()

    def _map_arrived(self) -> None:
        for event in self._client.arrived():
            if isinstance(event, int):
                with self._lock:
                    if (gone := self._memory.pop(event, None)) is not None:
                        self._gone[event] = gone
                continue
            try:
                mapped = MappedGpuMemory(self._driver, event.fd, event.nbytes)
            except (CudaError, GpuMemoryError) as error:
                if not self._is_off:
                    self._turn_off(error)
                continue
            with self._lock:
                self._memory[event.number] = mapped

    def _unmap(self) -> None:
        with self._lock:
            if self._uses:
                return
            gone, self._gone = self._gone, {}
        for number, one in gone.items():
            one.close()
            self._client.forget(number)

    def close(self, within_s: float = 0.0) -> None:
        """Unmap everything, after the copies in progress; if they do not end in this time, it stays mapped
        until the process ends. Nothing else is copied from now on."""
        self._is_off = True  # a thread that still has this side reserves nothing
        with self._lock:
            self._gone |= self._memory
            self._memory = {}
            self._idle.wait_for(lambda: not self._uses, within_s)
        self._unmap()
        stream, self._stream = self._stream, 0
        if stream:
            self._driver.try_call("cuStreamDestroy_v2", stream)

    # --- places --------------------------------------------------------------------------------

    def known(self, slots: bytes) -> list[int]:
        """The positions of the slots that are in mapped memory. The others are zeros, or on another GPU."""
        packed = np.frombuffer(slots, SLOT)
        there = np.isin(packed["extent"], np.array(sorted(self._memory), np.uint32))
        found: list[int] = np.flatnonzero(there & (packed["generation"] != 0)).tolist()
        return found

    def _addresses(self, slots: bytes, parts: int, nbytes: int) -> npt.NDArray[np.uint64]:
        """The address of each page, `parts` per slot. Raises KvtierError for a slot that does not fit."""
        packed = np.frombuffer(slots, SLOT)
        bases = np.zeros(len(packed), np.uint64)
        for number in np.unique(packed["extent"]).tolist():
            memory = self._memory.get(number)
            mine = packed["extent"] == number
            if memory is None:
                raise KvtierError(f"memory {number} of GPU {self.gpu} is not mapped")
            if int(packed["offset"][mine].max()) + parts * nbytes > memory.nbytes:
                raise KvtierError(f"a slot exceeds memory {number} of GPU {self.gpu}")
            bases[mine] = memory.address
        steps = np.arange(parts, dtype=np.uint64) * np.uint64(nbytes)
        places: npt.NDArray[np.uint64] = (bases + packed["offset"])[:, None] + steps
        return places.ravel()

    def _start(
        self,
        lane: CopyLane,
        pieces: DevicePieces,
        slots: bytes,
        pages: Sequence[int],
        parts: int,
        inwards: bool,
        after: Event | None,
    ) -> None:
        """Start a copy. `done` must be called when it has ended, unless this raises."""
        with self._lock:
            self._uses += 1
            try:
                addresses = self._addresses(slots, parts, pieces.block_bytes)
            except BaseException:
                self._uses -= 1
                raise
        try:
            ids = np.fromiter(pages, np.int64, len(pages))
            if not inwards and parts > 1:
                wanted = ids != 0
                ids, addresses = ids[wanted], addresses[wanted]
            lane.start_at(pieces, ids, addresses, inwards, after)
        except BaseException:
            self.done()
            raise

    def done(self, times: int = 1) -> None:
        """This many copies have ended."""
        with self._lock:
            self._uses -= times
            if not self._uses:
                self._idle.notify_all()

    # --- loads ---------------------------------------------------------------------------------

    def start_load(
        self,
        lane: CopyLane,
        pieces: DevicePieces,
        slots: bytes,
        hot: bytes,
        pages: Sequence[int],
        parts: int,
        after: Event | None,
    ) -> tuple[bytes, list[int], bytes]:
        """Start to copy the blocks that have a copy here into their pages. Return the slots and the pages of
        the others, and the slots of the copies: call `fresh` and `done` when the lane has finished."""
        here = self.known(hot)
        if not here:
            return slots, list(pages), b""
        used = slots_at(hot, here)
        self._start(lane, pieces, used, pages_at(pages, here, parts), parts, False, after)
        left = sorted(set(range(len(slots) // wire.SLOT_BYTES)) - set(here))
        return slots_at(slots, left), pages_at(pages, left, parts), used

    def fresh(self, used: bytes) -> bool:
        """Whether no slot of these copies was reused until now."""
        return self._client.fresh(used) * wire.SLOT_BYTES == len(used)

    # --- saves ---------------------------------------------------------------------------------

    def reserve(self, slots: bytes, again: bool) -> CopySlots | None:
        """Get slots for copies of these blocks; None without a free one. Waits for the daemon."""
        if self._is_off or not slots:
            return None
        self.follow()
        if not self._memory:
            return None
        try:
            copies = self._client.reserve(slots, again)
        except Refused as error:
            log.debug("kvtier: no slots on GPU %s: %s", self.gpu, str(error))
            copies = None
        self.follow()
        if copies is not None and len(self.known(copies.slots)) < len(copies.granted):
            copies.end(False)  # in memory that this process could not map
            copies = None
        return copies

    def start_save(
        self,
        lane: CopyLane,
        pieces: DevicePieces,
        copies: CopySlots,
        pages: Sequence[int],
        parts: int,
        after: Event | None,
    ) -> None:
        """Start to copy pages, `parts` for each slot that `reserve` was called with. When the lane has
        finished, call `done`, then `copies.end`."""
        theirs = pages_at(pages, copies.granted, parts)
        self._start(lane, pieces, copies.slots, theirs, parts, True, after)

    def save(
        self,
        lane: CopyLane,
        pieces: DevicePieces,
        slots: bytes,
        pages: Sequence[int],
        parts: int,
        turn: AbstractContextManager[object],
    ) -> None:
        """Copy pages of blocks that are in these slots of the arena. Enters `turn` while it starts to copy;
        the engine must not overwrite the pages before the lane has ended. If the device fails, the slots
        stay held until this process ends."""
        copies = self.reserve(slots, again=False)
        if copies is None:
            return
        try:
            with turn:
                self.start_save(lane, pieces, copies, pages, parts, None)
        except CudaError:
            raise
        except BaseException:
            copies.end(False)
            raise
        lane.finish()
        self.done()
        copies.end(True)

    def fill(self, reader: Reader, slots: bytes, nbytes: int) -> None:
        """Copy blocks that were loaded from these slots of the arena to this GPU. May wait."""
        copies = self.reserve(slots, again=True)
        if copies is None:
            return
        theirs = np.frombuffer(slots_at(slots, copies.granted), SLOT)
        try:
            addresses = self._addresses(copies.slots, 1, nbytes)
            extents = reader.mappings
            sources = [
                mapping.address + int(offset)
                for extent, offset in zip(theirs["extent"], theirs["offset"], strict=True)
                if (mapping := extents[extent]) is not None
            ]
        except (KvtierError, IndexError):
            copies.end(False)
            raise
        with self._lock:
            self._uses += 1
        if not self._stream:
            self._stream = self._driver.stream()
        for to, source in zip(addresses.tolist(), sources, strict=True):
            self._driver.copy(to, source, nbytes, self._stream)
        self._driver.call("cuStreamSynchronize", self._stream)
        self.done()
        # The blocks were leased meanwhile, so their slots cannot have been reused.
        copies.end(True)
