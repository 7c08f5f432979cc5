"""The buffers of an offloaded cache: K and V of two layers, one that computes and one that is fetched."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from kvtier_kernels import Pieces
from kvtier_transformers.held import Run
from kvtier_transformers.layout import CachedGroup

# The runs of blocks of each row, in the order of the prefix.
Rows = tuple[tuple[Run, ...], ...]


class LayerBuffer:
    """K and V of the layer that was fetched last, [rows, heads, room, dim] on its device. For a GPU they are
    fetched into pinned memory, and copied from there on a stream of their own."""

    def __init__(self, layer: CachedGroup, rows: int, room: int, block_tokens: int) -> None:
        self._layer, self._block_tokens = layer, block_tokens
        self._device = layer.parts[0].device
        with torch.inference_mode(False):
            self.keys, self.values = self._host = self._empty(rows, room, self._device)
            if self._device.type == "cuda":
                self._host = self._empty(rows, room, torch.device("cpu"))
                self._stream = torch.cuda.Stream(self._device)
                self._copied, self._read = torch.cuda.Event(), torch.cuda.Event()
        self._pieces = [self._of(row, self._host) for row in range(rows)]

    def _empty(self, rows: int, room: int, device: torch.device) -> list[torch.Tensor]:
        pinned = device != self._device
        return [
            torch.empty((rows, part.shape[0], room, part.shape[1]), dtype=part.dtype, device=device,
                        pin_memory=pinned)
            for part in self._layer.parts
        ]  # fmt: skip

    def _of(self, row: int, tensors: Sequence[torch.Tensor]) -> Pieces:
        return self._layer.pieces([(one, 0) for one in tensors], row, 0, self._block_tokens)

    @property
    def is_gpu(self) -> bool:
        return str(self._device.type) == "cuda"

    def may_overwrite(self) -> None:
        """The work that was submitted until now is the last that reads this buffer."""
        if self.is_gpu:
            self._read.record(torch.cuda.current_stream(self._device))

    def fill(self, number: int, rows: Rows) -> None:
        """Fetch the blocks of layer `number` of all rows. Raises StaleLease if one of them is gone."""
        if self.is_gpu:
            self._copied.synchronize()
        for pieces, runs in zip(self._pieces, rows, strict=True):
            for run in runs:
                run.copy_layer(number, pieces)
        if self.is_gpu:
            tokens = sum(run.blocks for run in rows[0]) * self._block_tokens
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(self._read)
                for ours, host in zip((self.keys, self.values), self._host, strict=True):
                    for to, of in zip(ours.flatten(0, 1), host.flatten(0, 1), strict=True):
                        to[:tokens].copy_(of[:tokens], non_blocking=True)
                self._copied.record(self._stream)

    def filled(self) -> None:
        """What is submitted from now on waits for the copies."""
        if self.is_gpu:
            torch.cuda.current_stream(self._device).wait_event(self._copied)

    def blocks_of(self, row: int, first: int, end: int) -> tuple[Pieces, list[int]]:
        """Where these blocks of a row are in host memory: their pieces, and their numbers there."""
        if not self.is_gpu:
            return self._pieces[row], list(range(first, end))
        tokens = slice(first * self._block_tokens, end * self._block_tokens)
        host = [one[:, :, tokens].to("cpu").contiguous() for one in (self.keys, self.values)]
        return self._of(row, host), list(range(end - first))


class LayerRing:
    """`take` returns the buffer with a layer, which is valid until the next `take`; meanwhile `fetch` fills
    the other one in a thread.

    If the layers compute with all processors, the thread would take one of them from threads that wait for
    each other. Then `fetch` does nothing, and `take` copies.
    """

    def __init__(self, layer: CachedGroup, rows: int, block_tokens: int) -> None:
        self._made_of = layer, rows, block_tokens
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kvtier fetch")
        is_gpu = layer.parts[0].device.type == "cuda"
        self._ahead = is_gpu or len(os.sched_getaffinity(0)) > torch.get_num_threads()
        self._buffers: list[LayerBuffer] = []
        self._current = 0
        self._coming: tuple[int, Rows, Future[None]] | None = None
        self.room = 0

    def make_room(self, tokens: int) -> None:
        """Have room for this many tokens. What was fetched before is gone: `take` fetches it again."""
        if tokens > self.room:
            layer, rows, block_tokens = self._made_of
            self.drop()
            self._buffers = [LayerBuffer(layer, rows, tokens, block_tokens) for _ in range(2)]
            self.room = tokens

    def fetch(self, number: int, rows: Rows) -> None:
        """Begin to fetch a layer into the buffer that is not in use."""
        self._wait()
        buffer = self._buffers[1 - self._current]
        buffer.may_overwrite()
        if self._ahead:
            self._coming = number, rows, self._pool.submit(buffer.fill, number, rows)

    def take(self, number: int, rows: Rows) -> LayerBuffer:
        """Wait for this layer, fetching it if it does not come. Raises StaleLease if a block is gone."""
        coming, buffer = self._coming, self._buffers[1 - self._current]
        if coming is not None and coming[:2] == (number, rows):
            # An interrupt of this wait must not forget that a thread writes into the buffer.
            self._wait()
            coming[2].result()
        else:
            self._wait()
            buffer.may_overwrite()
            buffer.fill(number, rows)
        self._current = 1 - self._current
        buffer.filled()
        return buffer

    def drop(self) -> None:
        """Free the memory."""
        self._wait()
        self._buffers, self.room = [], 0

    def close(self) -> None:
        """Free the memory without waiting for a fetch: its own thread may delete the cache."""
        self._coming, self._buffers, self.room = None, [], 0
        self._pool.shutdown(wait=False)

    def _wait(self) -> None:
        if self._coming is not None:
            self._coming[2].exception()
            self._coming = None
