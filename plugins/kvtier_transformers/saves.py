"""Saves: copy the new whole blocks of a cache into the daemon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from kvtier import Keys, wire
from kvtier.saving import Saving
from kvtier.space import GOES_ON, copy_threads
from kvtier_kernels import Pieces
from kvtier_transformers.layers import Room
from kvtier_transformers.layout import CachedGroup, Places
from kvtier_transformers.store import ModelPlace, Store

LEAST_IMPORTANCE = 0.01  # 0 would evict blocks at once
ROOM_WAIT_S = 1.0  # how long a save waits while the daemon's memory grows

# The states of all layers by layer and name, after a number of tokens.
Snapshot = Mapping[tuple[int, str], torch.Tensor]


class PrefixSave:
    """One save of a cache of `length` tokens, with padding."""

    def __init__(
        self, store: Store, place: ModelPlace, layers: Sequence[Any], length: int,
        states: Mapping[int, Snapshot],
    ) -> None:  # fmt: skip
        self._store = store
        self._space, _, self._layout, copies = place
        self._copies = store.save_copies(copies)
        self._layers = layers
        self._length = length
        self._states = states
        self._sources: dict[int, tuple[int, list[tuple[torch.Tensor, int]]]] = {}

    def row(self, index: int, pad: int, keys: Keys, first: int) -> int:
        """Save the blocks of a row from `first` on; return how many leading blocks are kept now."""
        kept = len(keys)
        for number, group in enumerate(self._layout.groups):
            if group.kind == "state":
                self._save_states(number, group, index, keys[:kept])
            elif first < kept:
                begin, tensors = self._tensors(number, group, pad + first * self._tokens)
                at = max(first, -(-(begin - pad) // self._tokens))
                end = self._save(number, group, tensors, index, pad, keys[:kept], at)
                kept = end if group.kind == "full" else kept
        return kept

    def hint(self, keys: Keys, importance: Sequence[float]) -> None:
        """Report the importance of the first of these blocks: one message for little, much, and neither."""
        some = list(zip(keys, importance, strict=False))
        self._store.counts["hinted_blocks"] += len(some)
        for low, high in pairwise((0, 1 / 3, 2 / 3, 2)):
            found = [(key, one) for key, one in some if low <= one < high]
            if found:
                mean = sum(one for _, one in found) / len(found)
                self._space.begin_hint([key for key, _ in found], max(mean, LEAST_IMPORTANCE))

    @property
    def _tokens(self) -> int:
        return self._store.options.block_tokens

    def _tensors(
        self, number: int, group: CachedGroup, begin: int
    ) -> tuple[int, list[tuple[torch.Tensor, int]]]:
        """The first token that all layers of a group have, and their tensors: where they are if their GPU
        copies blocks itself, or else in host memory."""
        if number not in self._sources:
            found = [
                self._source(self._layers[part.layer], part.name, begin) for part in group.parts
            ]
            first = max(first for first, _, _ in found)
            self._sources[number] = first, [(tensor, zero) for _, tensor, zero in found]
        return self._sources[number]

    def _source(self, layer: Any, name: str, begin: int) -> tuple[int, torch.Tensor, int]:
        """The first token in a layer's tensor, a dense tensor with its tokens, and the place of token 0."""
        shown = getattr(layer, name)
        first = self._length - shown.shape[-2]
        room: Room | None = layer.key_room if name == "keys" else layer.value_room
        if shown.device.type != "cpu" and self._copies is None:
            new = shown[:, :, max(0, begin - first) :].to("cpu")
            return max(first, begin), new.contiguous(), -max(first, begin)
        if room is not None and room.shown is shown:
            return first, room.tensor, room.first - first
        return first, shown.contiguous(), -first

    def _save(
        self, number: int, group: CachedGroup, tensors: Sequence[tuple[torch.Tensor, int]], index: int,
        pad: int, keys: Keys, first: int,
    ) -> int:  # fmt: skip
        """Save blocks of one group; return how many leading blocks are kept."""
        if first >= len(keys):
            return len(keys)
        places = group.places(tensors, index, pad + first * self._tokens, self._tokens)
        for at in range(first, len(keys), wire.LIMIT_RESERVED):
            some = keys[at : at + wire.LIMIT_RESERVED]
            with self._space.reserve(some, number, wait_s=ROOM_WAIT_S) as saving:
                if saving.slots:
                    ids = list(range(at - first, at - first + len(some)))
                    self._gather(saving, places, ids)
                    saving.commit(len(saving))
            self._store.counts["saved_blocks"] += len(saving)
            for place, outcome in enumerate(saving.outcomes):
                if outcome not in GOES_ON:
                    self._store.counts[f"refused:{wire.OUTCOMES[outcome]}"] += 1
                    return at + place
        return len(keys)

    def _gather(self, saving: Saving, places: Places, ids: Sequence[int]) -> None:
        arrays, offsets, sizes = places
        if (copies := self._copies) is not None:
            ids, slots = saving.placed(ids, sum(sizes))
            copies.copy(places, ids, saving.mappings, slots, True)
        else:
            pieces = Pieces(arrays, offsets, sizes, sizes)
            saving.gather(pieces, ids, copy_threads(pieces.block_bytes * len(saving)))

    def _save_states(self, number: int, group: CachedGroup, index: int, keys: Keys) -> None:
        for tokens, snapshot in self._states.items():
            blocks = tokens // self._tokens
            if tokens and tokens % self._tokens == 0 and blocks <= len(keys):
                found = [snapshot[part.layer, part.name] for part in group.parts]
                on_host = self._copies is None
                tensors = [((one.cpu() if on_host else one).contiguous(), 0) for one in found]
                self._save(number, group, tensors, index, 0, keys[:blocks], blocks - 1)
