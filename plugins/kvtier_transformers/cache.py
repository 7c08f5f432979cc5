"""The cache: a DynamicCache of transformers that loads a saved prefix, and saves what is new."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import DynamicCache

from kvtier.errors import InvalidArgument, Unavailable
from kvtier_transformers.importance import Importance, meters
from kvtier_transformers.layers import FullLayer, replaced, states
from kvtier_transformers.layout import text_config
from kvtier_transformers.loads import PrefixLoad, Row
from kvtier_transformers.offload import Offload
from kvtier_transformers.options import CacheOptions, UnsupportedModel
from kvtier_transformers.saves import PrefixSave, Snapshot
from kvtier_transformers.store import ModelPlace, Store, Where, store_of


@dataclass(slots=True)
class PromptBatch:
    """The prompts of a batch: token ids with padding on the left, as `pads` tokens of each row."""

    ids: torch.Tensor
    pads: list[int]

    @classmethod
    def of(cls, ids: Any, attention_mask: torch.Tensor | None) -> PromptBatch:
        """Raises InvalidArgument unless the ids are a prompt, or several with padding on the left."""
        found = torch.as_tensor(ids, dtype=torch.int64, device="cpu").detach()
        found = found[None] if found.dim() == 1 else found
        if found.dim() != 2 or not found.numel():
            raise InvalidArgument(
                f"ids: expected a batch of prompts, got the shape {tuple(found.shape)}"
            )
        if attention_mask is None:
            return cls(found, [0] * len(found))
        mask = attention_mask.to("cpu", torch.int64)
        pads = mask.shape[-1] - mask.sum(-1)
        places = torch.arange(mask.shape[-1], device="cpu")
        if mask.shape != found.shape or not torch.equal(mask, (places >= pads[:, None]).long()):
            raise InvalidArgument(
                "attention_mask: expected zeros for padding on the left, then ones"
            )
        return cls(found, [int(pad) for pad in pads])


@dataclass(slots=True)
class Source:
    """Where a cache was loaded from, and is saved to. `kept`: leading blocks of each row that are saved."""

    store: Store
    place: ModelPlace
    prompt: PromptBatch
    kept: list[int]
    states: dict[int, Snapshot] = field(default_factory=dict)
    importance: Importance | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Source:
        return replace(self, kept=list(self.kept), states=dict(self.states))


class KvtierCache(DynamicCache):
    """A cache for `past_key_values` of `generate` or of a model's forward pass.

    `loaded_tokens` is the number of tokens that it had at the beginning, with padding.
    """

    def __init__(self, model: Any, window_history: int = 0) -> None:
        super().__init__(config=text_config(model))
        self.layers: list[Any] = [replaced(layer, window_history) for layer in self.layers]
        self.loaded_tokens = 0
        self._begun = 0  # tokens that it had when `generate` began
        self.source: Source | None = None
        self.offload: Offload | None = None

    @classmethod
    def from_prompt(
        cls,
        model: Any,
        ids: Any,
        client: Where = None,
        *,
        attention_mask: torch.Tensor | None = None,
        **options: Any,
    ) -> KvtierCache:
        """Return a cache with the longest saved prefix of these token ids: one prompt, or a batch with
        padding on the left and its `attention_mask`. It leaves at least the last token to compute.

        `client`: a `kvtier.Client`, or the socket of a daemon. `options`: see `CacheOptions`. If the daemon
        fails, or cannot keep the cache of this model, the cache is empty: generation works without kvtier.
        Raises InvalidArgument for wrong arguments.

        With the option `memory`, the blocks stay in the daemon, and the prompt, which has no padding, is
        computed here, except its last token. Raises UnsupportedModel, InvalidArgument if the context does not
        fit, Refused if it does not fit into the daemon, or Unavailable. Call `close` at the end.

        For a model with recurrent states, computes the prompt up to its last block end: a state can be saved
        only there.
        """
        try:
            chosen = CacheOptions(**options)
        except TypeError as error:
            raise InvalidArgument(str(error)) from error
        return cls.loaded(
            model, store_of(model, client, chosen), PromptBatch.of(ids, attention_mask)
        )

    @classmethod
    def loaded(
        cls, model: Any, store: Store, prompt: PromptBatch, repeats: int = 1, room: int = 0
    ) -> KvtierCache:
        """Return a cache with the longest prefix of the prompts that is in this store. `repeats`: how many
        answers each prompt gets, for which the library cannot copy recurrent states. `room`: how many tokens
        must fit into the option `memory`."""
        cache = cls(model, store.options.window_history)
        forget_positions(model)
        store.counts["prompt_tokens"] += prompt.ids.numel() - sum(prompt.pads)
        why = store.unsuited()
        place = None if why else store.place()
        if store.options.memory:
            cache._offload(model, store, why, place, prompt, room)
            return cache
        if place is not None:
            why = place.layout.declines(repeats, prompt.pads)
        if why:
            store.decline(why)
        if why or place is None:
            return cache
        source = Source(store, place, prompt, [0] * len(prompt.pads))
        has_failed = True
        with store.failing("load"):
            rows = cache._rows(source, prompt.ids)
            end = PrefixLoad(store, place, rows).run(cache.layers, prompt.ids.shape[1] - 1)
            cache.loaded_tokens = end
            size = store.options.block_tokens
            source.kept = [max(0, end - pad) // size for pad in prompt.pads]
            store.counts["loaded_tokens"] += sum(max(0, end - pad) for pad in prompt.pads)
            has_failed = False
        if has_failed:
            return cache
        cache.source = source
        if store.options.importance:
            cache._measure(model, source)
        if place.layout.has_states:
            cache._compute_to_block_end(model, prompt.ids)
        cache._begun = cache.get_seq_length()
        return cache

    def _offload(
        self,
        model: Any,
        store: Store,
        why: str,
        place: ModelPlace | None,
        prompt: PromptBatch,
        room: int,
    ) -> None:
        """Keep the blocks in the daemon, and compute the prompt."""
        if store.reason:
            raise UnsupportedModel(store.reason)
        if why:
            raise InvalidArgument(f"memory: a model with {why} cannot be offloaded")
        if place is None:
            raise Unavailable("memory: no daemon has the cache; the log contains the reason")
        if any(prompt.pads):
            raise InvalidArgument("memory: prompts with padding cannot be offloaded")
        self.offload = Offload(store, place, len(prompt.ids), self.layers)
        weakref.finalize(self, self.offload.close).atexit = False
        try:
            self.offload.prepare(model, self, prompt.ids, room)
        except BaseException:
            self.offload.close()
            raise
        self.loaded_tokens = self.offload.loaded

    def activate_past_recording(self) -> None:
        """Called when assisted decoding begins, which computes the whole prompt, also tokens that a cache
        has: so forgets these."""
        if self._begun and self.get_seq_length() == self._begun:
            self.reset()
            self._begun = self.loaded_tokens = 0
            if (source := self.source) is not None:
                source.kept = [0] * len(source.kept)
                source.states.clear()
        super().activate_past_recording()

    def close(self) -> None:
        """Release the blocks of a cache with the option `memory`, which cannot be used after it."""
        if self.offload is not None:
            self.offload.close()

    def _rows(self, source: Source, ids: torch.Tensor) -> list[Row]:
        salt, pads = source.store.options.salt, source.prompt.pads
        repeats = len(ids) // len(pads)
        return [
            Row(pad, source.place.space.keys(one[pad:].tolist(), salt, source.place.extras))
            for one, pad in zip(ids, (pad for pad in pads for _ in range(repeats)), strict=True)
        ]

    def _measure(self, model: Any, source: Source) -> None:
        source.importance = Importance(source.store.options.importance, source.prompt.pads)
        full = [at for at, layer in enumerate(self.layers) if isinstance(layer, FullLayer)]
        for index, meter in meters(model, full, source.importance).items():
            self.layers[index].meter = meter

    def _compute_to_block_end(self, model: Any, ids: torch.Tensor) -> None:
        """Compute the prompt up to its last block end, and keep the states there."""
        assert self.source is not None
        size = self.source.store.options.block_tokens
        end = (ids.shape[1] - 1) // size * size
        if end > self.loaded_tokens:
            some = ids[:, self.loaded_tokens : end].to(model.device)
            more = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
            with torch.no_grad():
                model(input_ids=some, past_key_values=self, use_cache=True, **more)
            self.keep_states(end)

    def keep_states(self, tokens: int) -> None:
        """Keep a copy of the recurrent states, which are those after this many tokens."""
        if self.source is not None:
            self.source.states[tokens] = {
                (index, name): one.clone()
                for index, layer in enumerate(self.layers)
                for name, one in states(layer).items()
            }

    def save(self, ids: Any = None) -> int:
        """Save the whole blocks that are new; return how many tokens of whole blocks are kept in all. `ids`:
        the tokens of the cache, such as the output of `generate`; without them only the prompt is saved.

        Does nothing if the daemon fails. Raises InvalidArgument if the ids do not begin with the prompt.
        """
        source = self.source
        if source is None:
            # Blocks of an offloaded cache are saved when they are whole.
            return self.offload.saved_tokens if self.offload is not None else 0
        prompt = source.prompt
        found = PromptBatch.of(prompt.ids if ids is None else ids, None).ids
        if ids is not None and self.get_seq_length() > found.shape[1]:
            raise InvalidArgument("ids: the cache has more tokens than these")
        repeats, rest = divmod(len(found), len(prompt.pads))
        begin = prompt.ids.repeat_interleave(max(1, repeats), 0)
        if rest or not torch.equal(found[:, : begin.shape[1]], begin):
            raise InvalidArgument("ids: expected the prompts of this cache, followed by new tokens")
        if repeats > 1:
            source.kept = [one for one in source.kept for _ in range(repeats)]
            source.prompt = PromptBatch(begin, [pad for pad in prompt.pads for _ in range(repeats)])
        with source.store.failing("save"):
            self._save(source, found)
        return sum(source.kept) * source.store.options.block_tokens

    def _save(self, source: Source, ids: torch.Tensor) -> None:
        length = self.get_seq_length()
        if source.place.layout.has_states:
            self.keep_states(length)
        save = PrefixSave(source.store, source.place, self.layers, length, source.states)
        for index, row in enumerate(self._rows(source, ids[:, :length])):
            source.kept[index] = save.row(index, row.pad, row.keys, source.kept[index])
            if source.importance is not None:
                found = source.importance.blocks(index, row.pad, source.store.options.block_tokens)
                save.hint(row.keys[: source.kept[index]], found)
        source.states.clear()


def forget_positions(model: Any) -> None:
    """Forget the positions of the images of the last prompt, which vision models would add to those of a
    prompt that a cache has the beginning of."""
    for module in model.modules():
        if vars(module).get("rope_deltas") is not None:
            module.rope_deltas = None
