"""A cache in kvtier's blocks, for contexts that are larger than the memory of the device.

The device has buffers for two layers, and of each layer the tokens after the last whole block. While a layer
computes, the blocks of the next one are fetched. Blocks are saved layer by layer as they become whole. Each
row holds leases of its blocks; those that are gone nevertheless are computed again.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from kvtier import Keys
from kvtier.errors import InvalidArgument, KvtierError, StaleLease
from kvtier.units import format_bytes
from kvtier_transformers.held import HeldBlocks, LayerwiseSave
from kvtier_transformers.layers import ROOM_TOKENS
from kvtier_transformers.layout import CachedGroup, CacheLayout
from kvtier_transformers.options import UnsupportedModel
from kvtier_transformers.ring import LayerRing, Rows
from kvtier_transformers.store import ModelPlace, Store

PREFILL_TOKENS = 1024  # that are computed at once
# Arguments of the model that K and V do not depend on.
OTHER_ARGUMENTS = ("input_ids", "past_key_values", "labels", "logits_to_keep")

GONE = (
    "memory: blocks of the cache were evicted again while they were computed, or another client has been"
    " writing them for longer than patience_ms"
)


class OffloadedLayer(DynamicLayer):
    """A layer of a cache whose blocks are in the daemon. It has the tokens after them itself."""

    is_croppable = False

    def __init__(self, offload: Offload, number: int) -> None:
        super().__init__()
        self.number = number
        self.tails: list[torch.Tensor] = []
        self._offload = offload

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        with torch.inference_mode(False):
            self.tails = [
                one.new_empty((*one.shape[:2], self._offload.block_tokens, one.shape[3]))
                for one in (key_states.detach(), value_states.detach())
            ]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._offload.update(self, key_states, value_states)

    def get_seq_length(self) -> int:
        # Not those of a pass that has not ended: it may fail.
        return self._offload.tokens

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise InvalidArgument("memory: the rows and tokens of this cache cannot be changed")

    crop = reorder_cache = batch_repeat_interleave = batch_select_indices = reset = _refuse


class Offload:
    """The blocks of one cache: `length` tokens of each row, of which `loaded` were found at the beginning.
    `layers` are those of the cache, which it replaces. `length` is less than the tokens of `_ids` until those
    that are gone have been computed again; only a pass that succeeds changes `_ids`.

    Raises UnsupportedModel for a model that has not only layers with full attention, all of one shape.
    """

    def __init__(self, store: Store, place: ModelPlace, rows: int, layers: list[Any]) -> None:
        group, self.block_tokens = _group(place.layout), store.options.block_tokens
        self._store, self._space, self._extras = store, place.space, place.extras
        self._count = len(group.parts) // 2
        first = replace(group, parts=group.parts[:2])
        self._token_bytes = rows * sum(part.nbytes(1) for part in first.parts)
        self._ring = LayerRing(first, rows, self.block_tokens)
        self._held = [HeldBlocks(place.space, store.options, self._count) for _ in range(rows)]
        self._layers = [OffloadedLayer(self, number) for number in range(self._count)]
        for part, layer in zip(group.parts[::2], self._layers, strict=True):
            layers[part.layer] = layer
        self.length = self.loaded = 0
        self._ids = torch.empty(rows, 0, dtype=torch.int64, device="cpu")
        self._new = self._ids  # with the tokens of the forward pass that runs
        self._pending = self._done = 0  # tokens of that pass, and how many layers have them
        self._save: LayerwiseSave | None = None
        self._keys: list[Keys] = []
        self._rows: Rows = ()
        self._hooks: list[Any] = []
        self._has_failed = self._is_repairing = False

    @property
    def tokens(self) -> int:
        """How many tokens are before those of the next pass."""
        return self.length if self._is_repairing else self._ids.shape[1]

    @property
    def blocks(self) -> int:
        """How many whole blocks each row has."""
        return self.length // self.block_tokens

    @property
    def saved_tokens(self) -> int:
        """Of all rows."""
        return len(self._held) * self.blocks * self.block_tokens

    @property
    def most_tokens(self) -> int:
        """How many tokens fit into the memory."""
        tails = self._count * self.block_tokens
        return (int(self._store.options.memory) // self._token_bytes - tails) // 2

    def prepare(self, model: Any, cache: Any, ids: torch.Tensor, room: int) -> None:
        """Load the longest prefix of these prompts, and compute the rest of them, except the last token.
        Raises InvalidArgument if there is not `room` for this many tokens."""
        self._check_room(max(room, ids.shape[1]))
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._hooks = [
            inner.register_forward_pre_hook(self._before, with_kwargs=True),
            inner.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]
        end = (ids.shape[1] - 1) // self.block_tokens
        self._keys = self._keys_of(ids)
        for keys, held in zip(self._keys, self._held, strict=True):
            warm = self._space.match(keys[:end]).ready
            held.hold(keys[:end], warm)
            self._store.counts["disk_tokens"] += max(0, held.blocks - warm) * self.block_tokens
        self._truncate()
        self._ids = ids[:, : self.length]
        self.loaded = self.length
        self._store.counts["loaded_tokens"] += len(ids) * self.loaded
        self._compute(inner, cache, ids[:, :-1])

    def close(self) -> None:
        """Release the blocks and the memory. The cache cannot be used after it."""
        self._end_failed()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._ring.close()
        for held in self._held:
            held.release()
        for layer in self._layers:
            layer.tails = []

    # --- a forward pass -----------------------------------------------------------------------

    def _before(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        """The model is called: note the tokens, and get room and slots for them."""
        # While a thread adds or removes this hook, torch may call it without kwargs in another thread, which
        # has another cache.
        cache = None if kwargs is None else kwargs.get("past_key_values")
        if kwargs is None or getattr(cache, "offload", None) is not self:
            return
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is None or len(ids) != len(self._ids):
            raise InvalidArgument("memory: call the model with input_ids, one row for each prompt")
        if len(args) > 1:
            raise InvalidArgument("memory: pass all arguments after input_ids by name")
        self._check_values(ids, kwargs)
        self._repair(module, cache)
        end = self.length + ids.shape[1]
        self._check_room(end)
        self._new = torch.cat([self._ids[:, : self.length], ids.detach().to("cpu", torch.int64)], 1)
        self._ring.make_room(min(self.most_tokens, end + ROOM_TOKENS))
        if end // self.block_tokens > self.blocks:
            self._keys = self._keys_of(self._new)
            self._save = LayerwiseSave(
                self._space, self._keys, self.blocks, end // self.block_tokens, self._count
            )
        self._pending, self._done = ids.shape[1], 0

    def _check_values(self, ids: torch.Tensor, kwargs: dict[str, Any]) -> None:
        """The names of blocks are made of tokens and the model, so refuse all else that changes K and V."""
        if not self._store.describes(self._space, self._extras):
            text = "the model's tensors, adapters or autocast have changed since this cache began"
            raise InvalidArgument(f"memory: {text}")
        for name, value in kwargs.items():
            # Of vision models, {} without an image.
            is_plain = value is None or value == {} or isinstance(value, (bool, int, float, str))
            if not (is_plain or name in OTHER_ARGUMENTS or self._is_usual(name, value, ids)):
                text = f"with this {name} cannot be offloaded: its blocks would not be those of its tokens"
                raise InvalidArgument(f"memory: a call {text}")

    def _is_usual(self, name: str, value: Any, ids: torch.Tensor) -> bool:
        """Whether this argument contains what the model uses without it."""
        if not isinstance(value, torch.Tensor):
            return False
        start, end = self.tokens, self.tokens + ids.shape[1]
        if name == "attention_mask":
            return value.shape == (len(ids), end) and bool((value == 1).all())
        if name not in ("position_ids", "cache_position") or value.shape[-1:] != (end - start,):
            return False
        return bool((value == torch.arange(start, end, device=value.device)).all())

    def _after(self, _: Any, __: Any, *of_call: Any) -> None:
        """The call has ended, or has failed: then some layers have other tokens than others."""
        kwargs, output = of_call if len(of_call) == 2 else ({}, None)  # as in `_before`
        # Other threads call the model with other caches.
        if getattr(kwargs.get("past_key_values"), "offload", None) is not self:
            return
        if output is None or self._done < self._count:
            self._end_failed()
            if output is not None:
                raise InvalidArgument("memory: the model did not compute all of its layers")
            return
        self.length, self._pending = self._new.shape[1], 0
        if not self._is_repairing:
            self._ids = self._new
        # The call has its output, so the next one raises what fails here.
        with contextlib.suppress(KvtierError):
            if self._is_held():
                self._ring.fetch(0, self._rows)

    def _end_failed(self) -> None:
        """The pass that runs has failed, if there is one."""
        self._has_failed |= self._pending > 0
        self._pending = 0
        save, self._save = self._save, None
        if save is not None:
            save.abort()

    def update(
        self, layer: OffloadedLayer, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of all tokens of a layer, of which these are the last ones."""
        number = layer.number
        if (keys.shape[-2], number) != (self._pending, self._done) or keys.requires_grad:
            text = (
                "call the model of the cache, with the cache as past_key_values, without gradients"
            )
            raise InvalidArgument(f"memory: {text}")
        start, end = self.length, self.length + self._pending
        begin, whole = (one // self.block_tokens * self.block_tokens for one in (start, end))
        buffer = self._ring.take(number, self._rows)
        if number + 1 < self._count:
            self._ring.fetch(number + 1, self._rows)
        found = []
        for ours, tail, new in zip(
            (buffer.keys, buffer.values), layer.tails, (keys, values), strict=True
        ):
            ours[:, :, begin:start] = tail[:, :, : start - begin]
            ours[:, :, start:end] = new
            kept = max(begin, whole)
            tail[:, :, : end - kept] = ours[:, :, kept:end]
            found.append(ours[:, :, :end])
        if (save := self._save) is not None:
            for row in range(len(self._held)):
                save.write(row, number, *buffer.blocks_of(row, save.first, save.end))
            if number + 1 == self._count:
                self._store.counts["saved_blocks"] += save.commit()
                self._save = None
        self._done += 1
        return found[0], found[1]

    # --- blocks -------------------------------------------------------------------------------

    def _is_held(self) -> bool:
        """Hold all whole blocks of all rows. Return whether they are all there."""
        for held, keys in zip(self._held, self._keys, strict=True):
            held.hold(keys[: self.blocks])
        self._rows = tuple(held.runs for held in self._held)
        return all(held.blocks == self.blocks for held in self._held)

    def _repair(self, model: Any, cache: Any) -> None:
        """Compute the tokens again whose blocks are gone, and those that a failed pass has left undefined."""
        self._end_failed()  # An interrupt ends a call without `_after`.
        if self._is_held() and not self._has_failed and self.length == self.tokens:
            return
        if self._is_repairing:
            raise StaleLease(GONE)
        before = self.length
        self._truncate()
        self._store.counts["recomputed_tokens"] += len(self._ids) * (before - self.length)
        self._is_repairing = True
        try:
            self._compute(model, cache, self._ids)
        finally:
            self._is_repairing = False
        if not self._is_held():
            raise StaleLease(GONE)

    def _compute(self, model: Any, cache: Any, ids: torch.Tensor) -> None:
        """Compute the tokens that the cache does not have, and report how long it takes."""
        more = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
        chunk = max(1, PREFILL_TOKENS // self.block_tokens)
        while (first := self.length) < ids.shape[1]:
            end = min(ids.shape[1], (self.blocks + chunk) * self.block_tokens)
            began = time.monotonic()
            with torch.no_grad():
                some = ids[:, first:end].to(model.device)
                model(input_ids=some, past_key_values=cache, use_cache=True, **more)
            self._store.computed(self._space, end - first, first, time.monotonic() - began)

    def _truncate(self) -> None:
        """Have only those tokens whose blocks are held in all rows."""
        blocks = min(held.blocks for held in self._held)
        self.length, self._has_failed = blocks * self.block_tokens, False
        for held in self._held:
            held.keep(blocks)
        self._rows = tuple(held.runs for held in self._held)

    def _keys_of(self, ids: torch.Tensor) -> list[Keys]:
        salt = self._store.options.salt
        return [self._space.keys(row.tolist(), salt, self._extras) for row in ids]

    def _check_room(self, tokens: int) -> None:
        if tokens > self.most_tokens:
            tails = self._count * self.block_tokens
            least = format_bytes((2 * tokens + tails) * self._token_bytes)
            raise InvalidArgument(
                f"memory: {tokens} tokens need {least}, for two layers and the last block of each;"
                f" {format_bytes(int(self._store.options.memory))} have room for {max(0, self.most_tokens)}"
            )


def _group(layout: CacheLayout) -> CachedGroup:
    """The only group of a cache that can be offloaded."""
    group = layout.groups[0]
    shapes = {(part.name, part.shape, part.dtype, part.device) for part in group.parts}
    if len(layout.groups) > 1 or group.kind != "full" or len(shapes) != 2:
        raise UnsupportedModel(
            "memory: only models whose layers all have full attention, of one shape, on one device"
        )
    return group
