"""Loads: find a prefix that every row of a batch has, and copy it into the layers of a cache.

Blocks of full attention are copied while later ones are read from disk. The layers get nothing before all
is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvtier import Keys, wire
from kvtier.errors import SpoiltBlocks, StaleLease
from kvtier.loading import Lease, Reader
from kvtier.space import copy_threads
from kvtier_transformers.device import TensorCopies
from kvtier_transformers.layers import ROOM_TOKENS, WindowLayer, fill_state
from kvtier_transformers.layout import CachedGroup, CachedTensor
from kvtier_transformers.options import log
from kvtier_transformers.store import REQUESTS, ModelPlace, Store


@dataclass(slots=True)
class Row:
    """A row of a batch: `pad` tokens, then those of `keys`. `lease`: of the blocks to load, of which the
    first `warm` were in memory. The first `copied` blocks of full attention are copied already."""

    pad: int
    keys: Keys
    lease: Lease | None = None
    warm: int = 0
    copied: int = 0

    @property
    def ready(self) -> int:
        return 0 if self.lease is None else self.lease.ready

    def blocks(self, end: int, block_tokens: int) -> int:
        """How many blocks have tokens before this place."""
        return max(0, -(-(end - self.pad) // block_tokens))

    def release(self, warm_tokens: int = 0, nbytes: int = 0, cold_tokens: int = 0) -> None:
        if self.lease is not None:
            self.lease.release(warm_tokens, nbytes, cold_tokens)
            self.lease = None


class LoadTensors:
    """New tensors for all parts of a group, from the token `first` of each row on: on their GPU, or else in
    host memory."""

    def __init__(
        self, number: int, group: CachedGroup, rows: int, first: int, room: int,
        device: TensorCopies | None,
    ) -> None:  # fmt: skip
        self.first = first
        self.tensors = [_empty(part, group, rows, room, device is None) for part in group.parts]
        self._number = number
        self._group = group
        self._device = device

    def copy(self, lease: Lease, row: int, token: int, blocks: range, block_tokens: int) -> None:
        """Copy these of the leased blocks, of which the first one begins at `token` of this row."""
        if not blocks:
            return
        part = lease.part(self._number, 0)
        slots = part.slots[blocks.start * wire.SLOT_BYTES : blocks.stop * wire.SLOT_BYTES]
        digests = part.digests[blocks.start * wire.DIGEST_BYTES : blocks.stop * wire.DIGEST_BYTES]
        at = [(one, -self.first) for one in self.tensors]
        try:
            good = self._copy(lease.reader(), at, row, token, block_tokens, slots, blocks, digests)
        except SpoiltBlocks:
            lease.recheck()
            raise
        if good < len(blocks):
            raise StaleLease("the lease expired during the copy")

    def _copy(
        self, reader: Reader, at: Sequence[tuple[torch.Tensor, int]], row: int, token: int,
        block_tokens: int, slots: bytes, blocks: range, digests: bytes,
    ) -> int:  # fmt: skip
        """Return how many leading blocks were not reused during the copy."""
        if self._device is None:
            pieces = self._group.pieces(at, row, token, block_tokens)
            threads = copy_threads(pieces.block_bytes * len(blocks))
            return reader.scatter(slots, pieces, list(blocks), threads, digests=digests)
        places = self._group.places(at, row, token, block_tokens)
        self._device.copy(places, list(blocks), reader.mappings, slots, False)
        if digests:
            reader.verify(slots, digests, sum(places[2]))
        return reader.fresh(slots)


class PrefixLoad:
    """One load of the prompts of a batch."""

    def __init__(self, store: Store, place: ModelPlace, rows: Sequence[Row]) -> None:
        self._store = store
        self._space, _, self._layout, self._copies = place
        self._rows = rows
        self._tokens = store.options.block_tokens
        self._ahead: LoadTensors | None = None  # of full attention, with the blocks that came first
        self._most = 0

    def run(self, layers: Sequence[Any], most: int) -> int:
        """Fill these empty layers with at most `most` tokens, with padding; return how many they have now."""
        end, self._most = 0, most
        try:
            end = self._find()
            if end:
                self._copy(layers, end)
        except SpoiltBlocks:
            self._store.counts["spoilt"] += 1
            end = 0
        except StaleLease:
            self._store.counts["stale"] += 1
            end = 0
        finally:
            for row in self._rows:
                used = row.blocks(end, self._tokens) if end else 0
                cold = max(0, used - row.warm) * self._tokens
                nbytes = used * self._space.block_bytes
                row.release(used * self._tokens - cold, nbytes, cold)
                self._store.counts["disk_tokens"] += cold
        return end

    def _find(self) -> int:
        """Lease a prefix of each row, so that all rows end at the same place; return it, 0 for nothing."""
        size, layout = self._tokens, self._layout
        for index, row in enumerate(self._rows):
            row.lease = self._lease(index, row)
        while True:
            end = min([self._most, *(row.pad + row.ready * size for row in self._rows)])
            if layout.has_states:
                end -= end % size
            if all(row.pad >= end for row in self._rows):
                return 0
            is_short = False
            for row in self._rows:
                blocks = row.blocks(end, size)
                if blocks < row.ready and (layout.has_states or layout.has_windows or not blocks):
                    # Windows and states of a longer prefix are others.
                    row.release()
                    if blocks:
                        row.lease = self._space.lease(
                            row.keys[:blocks], self._store.options.lease_ms
                        )
                    is_short |= row.ready < blocks
            if not is_short:
                return end

    def _lease(self, index: int, row: Row) -> Lease | None:
        """Hold the longest prefix. Waits for blocks from disk, at most `patience_ms`."""
        space, options = self._space, self._store.options
        keys, request = row.keys[: space.most_keys()], next(REQUESTS)
        if not keys:
            return None
        match = space.match(keys, request=request, within_ms=options.patience_ms)
        row.warm, lease = match.ready, None
        if match.coming:
            lease = space.lease(
                keys, options.lease_ms, wait_ms=options.patience_ms, request=request,
                meanwhile=partial(self._copy_ahead, index, row, match.ready + match.coming),
            )  # fmt: skip
            self._note_missing(lease.ready, len(keys), "late" if lease.coming else lease.why)
        else:
            if match.ready:
                lease = space.lease(keys[: match.ready], options.lease_ms)
            self._note_missing(match.ready, len(keys), match.why)
        if lease is not None and not lease.ready:
            lease.release()
            return None
        return lease

    def _note_missing(self, ready: int, blocks: int, why: str) -> None:
        """Count and log why blocks on disk are not loaded."""
        if ready < blocks and why:
            self._store.counts[why if why == "late" else f"disk:{why}"] += 1
            log.info(
                "kvtier: loading %d of %d blocks; the next ones are on disk and are not loaded: %s",
                ready, blocks, why,
            )  # fmt: skip

    def _copy_ahead(self, index: int, row: Row, blocks: int, lease: Lease) -> None:
        """Copy the blocks of a row that are in memory, of `blocks` that will be."""
        group, size = self._layout.groups[0], self._tokens
        if group.kind != "full":
            return
        if self._ahead is None:
            self._most = min(self._most, row.pad + blocks * size)
            self._ahead = self._made(0, group, 0, self._most)
        ready = min(lease.ready, row.blocks(self._most, size))
        self._ahead.copy(lease, index, row.pad, range(row.copied, ready), size)
        row.copied = max(row.copied, ready)

    def _copy(self, layers: Sequence[Any], end: int) -> None:
        filled = [
            (group, self._filled(number, group, end))
            for number, group in enumerate(self._layout.groups)
        ]
        # Only now: a failed copy leaves the layers empty.
        for group, host in filled:
            moved = [_moved(one, part) for one, part in zip(host.tensors, group.parts, strict=True)]
            if group.kind == "state":
                for part, one in zip(group.parts, moved, strict=True):
                    fill_state(layers[part.layer], part.name, one)
                continue
            for part, keys, values in zip(group.parts[::2], moved[::2], moved[1::2], strict=True):
                layer = layers[part.layer]
                layer.lazy_initialization(keys[:, :, :0], values[:, :, :0])
                layer.fill(keys, values, 0, end - host.first)
                if isinstance(layer, WindowLayer):
                    layer.cumulative_length = end

    def _made(self, number: int, group: CachedGroup, first: int, end: int) -> LoadTensors:
        """Tensors with room for the blocks of all rows up to `end`."""
        last = max(row.pad + row.blocks(end, self._tokens) * self._tokens for row in self._rows)
        room = max(last, end) - first + ROOM_TOKENS
        return LoadTensors(number, group, len(self._rows), first, room, self._copies)

    def _filled(self, number: int, group: CachedGroup, end: int) -> LoadTensors:
        """Copy the blocks of a group that are not copied yet."""
        size = self._tokens
        leased = [
            (index, row, row.lease, row.lease.part(number, 0).first)
            for index, row in enumerate(self._rows)
            if row.lease is not None
        ]
        begins = {index: row.pad + first * size for index, row, _, first in leased}
        first = 0
        if group.kind == "window":
            first = max(0, min([end - group.window, *begins.values()]))
        host = self._ahead if number == 0 else None
        host = host or self._made(number, group, first, end)
        if group.kind != "state":
            for index in range(len(self._rows)):
                if (begin := begins.get(index, end) - first) > 0:
                    for one in host.tensors:
                        one[index, :, :begin] = 0
        for index, row, lease, skipped in leased:
            count = 1 if group.kind == "state" else row.blocks(end, size) - skipped
            copied = row.copied if number == 0 else 0
            host.copy(lease, index, begins[index], range(copied, count), size)
        return host


def _empty(
    part: CachedTensor, group: CachedGroup, rows: int, room: int, is_on_host: bool
) -> torch.Tensor:
    shape = part.shape if group.kind == "state" else (part.shape[0], room, part.shape[1])
    device = torch.device("cpu") if is_on_host else part.device
    return torch.empty(
        (rows, *shape), dtype=part.dtype, device=device,
        pin_memory=is_on_host and part.device.type == "cuda",
    )  # fmt: skip


def _moved(tensor: torch.Tensor, part: CachedTensor) -> torch.Tensor:
    """The tensor on the device of the layer. From pinned memory the copy runs in order with the device's
    work, and the memory is not used again before its end."""
    return tensor.to(part.device, non_blocking=True)
