"""An engine's pages on a device, filled by direct reads: the stand-in for a plugin's worker."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier import Keys, KvSpec, Space
from kvtier.wire import DirectReadCalibrated
from kvtier_kernels.cuda import Copier, Driver
from kvtier_plugins.direct import ArrivedBlock, DirectReader
from kvtier_plugins.payload_reads import PayloadReads, PinnedReads

UNTOUCHED = 0xA5


class DirectEngine:
    """A page of each layer for each of `blocks` blocks, interleaved as an engine does: a layer's pages are
    consecutive."""

    def __init__(
        self, driver: Driver, copier: Copier, spec: KvSpec, blocks: int, ring_bytes: int, group: int = 0,
        calibrated: DirectReadCalibrated | None = None,
    ) -> None:  # fmt: skip
        self.driver = driver
        self.block_bytes = spec.group_block_bytes(group)
        self.blocks = blocks
        layers = spec.cache_groups[group].layers
        self.page = self.block_bytes // layers
        self.nbytes = blocks * self.block_bytes
        self.memory = driver.device_memory(self.nbytes)
        self._stream = driver.stream()
        self._host = driver.pinned_memory(self.nbytes)
        self.clear()
        starts = [layer * blocks * self.page for layer in range(layers)]
        self.pieces = copier.pieces(
            [self.memory] * layers, [self.nbytes] * layers, starts, [self.page] * layers,
            [self.page] * layers, blocks,
        )  # fmt: skip
        self.lane = copier.lane()
        self.reader = DirectReader(driver, spec, group, 0, ring_bytes, calibrated)

    def pinned(self) -> PinnedReads:
        ring = self.reader.ring
        return PinnedReads(self.driver, ring.payloads, ring.nbytes)

    def load(
        self, space: Space, keys: Keys, source: PayloadReads, pages: Sequence[int] | None = None
    ) -> list[int]:
        """Load into page `pages[at]` of each layer, by default page `at`. Return the loaded blocks."""
        loaded: list[int] = []
        for batch in self.reader.batches(space, keys, source):
            self.write(batch, pages)
            loaded += [block.at for block in batch]
        return loaded

    def write(self, batch: Sequence[ArrivedBlock], pages: Sequence[int] | None = None) -> None:
        ids = [pages[block.at] if pages is not None else block.at for block in batch]
        addresses = np.array([block.address for block in batch], np.uint64)
        self.lane.start_at(self.pieces, ids, addresses, False, None)
        self.lane.finish()

    def block(self, number: int) -> bytes:
        """The content of the pages of a block."""
        return self.content()[:, number].tobytes()

    def content(self) -> npt.NDArray[np.uint8]:
        """All pages: by layer, block and byte."""
        self._copy(ctypes.addressof(self._host), self.memory)
        return np.frombuffer(bytes(self._host), np.uint8).reshape(-1, self.blocks, self.page)

    def clear(self) -> None:
        ctypes.memset(self._host, UNTOUCHED, self.nbytes)
        self._copy(self.memory, ctypes.addressof(self._host))

    def _copy(self, to: int, source: int) -> None:
        self.driver.copy(to, source, self.nbytes, self._stream)
        self.driver.call("cuStreamSynchronize", self._stream)

    def close(self) -> None:
        self.reader.close()
        self.driver.try_call("cuMemFree_v2", self.memory)
        self.driver.try_call("cuStreamDestroy_v2", self._stream)
        self.driver.free_pinned(self._host)
