"""Loads: find a prefix that every row of a batch has, and copy it into the layers of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvtier import Keys, wire
from kvtier.errors import SpoiltBlocks, StaleLease
from kvtier.loading import Lease
from kvtier.space import Match, Space
from kvtier_transformers.layers import ROOM_TOKENS, WindowLayer, fill_state
from kvtier_transformers.layout import CachedGroup, CachedTensor
from kvtier_transformers.options import log
from kvtier_transformers.store import REQUESTS, Store

LARGE_COPY_BYTES = 8 << 20
COPY_THREADS = 2


def copy_threads(nbytes: int) -> int:
    return COPY_THREADS if nbytes >= LARGE_COPY_BYTES else 1


@dataclass(slots=True)
class Row:
    """A row of a batch: `pad` tokens, then those of `keys`. `lease`: of the blocks to load, of which the
    first `warm` were in memory."""

    pad: int
    keys: Keys
    lease: Lease | None = None
    warm: int = 0

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


class PrefixLoad:
    """One load of the prompts of a batch."""

    def __init__(self, store: Store, space: Space, rows: Sequence[Row]) -> None:
        self._store = store
        self._space = space
        self._rows = rows
        self._tokens = store.options.block_tokens

    def run(self, layers: Sequence[Any], most: int) -> int:
        """Fill these empty layers with at most `most` tokens, with padding; return how many they have now."""
        end = 0
        try:
            end = self._find(most)
            if end:
                self._copy(layers, end)
        except SpoiltBlocks:
            self._store.counts["spoilt"] += 1
            end = 0
            for row in self._rows:
                if row.lease is not None:
                    row.lease.recheck()
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

    def _find(self, most: int) -> int:
        """Lease a prefix of each row, so that all rows end at the same place; return it, 0 for nothing."""
        size, layout = self._tokens, self._store.layout
        for row in self._rows:
            row.lease = self._lease(row)
        while True:
            end = min([most, *(row.pad + row.ready * size for row in self._rows)])
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

    def _lease(self, row: Row) -> Lease | None:
        """Hold the longest prefix. Waits for blocks from disk, at most `patience_ms`."""
        space, options = self._space, self._store.options
        keys, request = row.keys[: space.most_keys()], next(REQUESTS)
        if not keys:
            return None
        match = space.match(keys, request=request, within_ms=options.patience_ms)
        row.warm, waits = match.ready, match.coming > 0
        if waits:
            match = space.wait(keys, options.patience_ms, request=request)
        lease = space.lease(keys[: match.ready], options.lease_ms) if match.ready else None
        if waits:
            # Only now: until the lease exists, the daemon holds what it has read for this request. Otherwise
            # it does so for seconds, and the next prompt lacks the memory.
            space.cancel(request)
        self._note_missing(match, len(keys))
        return lease

    def _note_missing(self, match: Match, blocks: int) -> None:
        """Count and log why blocks on disk are not loaded."""
        why = "late" if match.coming else f"disk:{match.why}" if match.why else ""
        if why:
            self._store.counts[why] += 1
            log.info(
                "kvtier: loading %d of %d blocks; the next ones are on disk and are not loaded: %s",
                match.ready, blocks, why.removeprefix("disk:"),
            )  # fmt: skip

    def _copy(self, layers: Sequence[Any], end: int) -> None:
        filled = [
            (group, *self._tensors(number, group, end))
            for number, group in enumerate(self._store.layout.groups)
        ]
        # Only now: a failed copy leaves the layers empty.
        for group, first, tensors in filled:
            moved = [_moved(one, part) for one, part in zip(tensors, group.parts, strict=True)]
            if group.kind == "state":
                for part, one in zip(group.parts, moved, strict=True):
                    fill_state(layers[part.layer], part.name, one)
                continue
            for part, keys, values in zip(group.parts[::2], moved[::2], moved[1::2], strict=True):
                layer = layers[part.layer]
                layer.lazy_initialization(keys[:, :, :0], values[:, :, :0])
                layer.fill(keys, values, 0, end - first)
                if isinstance(layer, WindowLayer):
                    layer.cumulative_length = end

    def _tensors(self, number: int, group: CachedGroup, end: int) -> tuple[int, list[torch.Tensor]]:
        """Copy the blocks of a group into new tensors in host memory, and return them and their first
        token."""
        size = self._tokens
        leased = [
            (index, row, row.lease.part(number, 0))
            for index, row in enumerate(self._rows)
            if row.lease is not None
        ]
        begins = {index: row.pad + part.first * size for index, row, part in leased}
        first = 0
        if group.kind == "window":
            first = max(0, min([end - group.window, *begins.values()]))
        last = max(row.pad + row.blocks(end, size) * size for row in self._rows)
        room = max(last, end) - first + ROOM_TOKENS
        tensors = [_empty(part, group, len(self._rows), room) for part in group.parts]
        if group.kind != "state":
            for index in range(len(self._rows)):
                if (begin := begins.get(index, end) - first) > 0:
                    for one in tensors:
                        one[index, :, :begin] = 0
        for index, row, part in leased:
            assert row.lease is not None
            count = 1 if group.kind == "state" else row.blocks(end, size) - part.first
            slots = part.slots[: count * wire.SLOT_BYTES]
            digests = part.digests[: count * wire.DIGEST_BYTES]
            pieces = group.pieces([(one, -first) for one in tensors], index, begins[index], size)
            threads = copy_threads(pieces.block_bytes * count)
            good = row.lease.reader().scatter(
                slots, pieces, list(range(count)), threads, digests=digests
            )
            if good < count:
                raise StaleLease("the lease expired during the copy")
        return first, tensors


def _empty(part: CachedTensor, group: CachedGroup, rows: int, room: int) -> torch.Tensor:
    shape = part.shape if group.kind == "state" else (part.shape[0], room, part.shape[1])
    return torch.empty((rows, *shape), dtype=part.dtype, pin_memory=part.device.type == "cuda")


def _moved(tensor: torch.Tensor, part: CachedTensor) -> torch.Tensor:
    """The tensor on the device of the layer. From pinned memory the copy runs in order with the device's
    work, and the memory is not used again before its end."""
    return tensor.to(part.device, non_blocking=True)
