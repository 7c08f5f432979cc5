"""`attach`: load and save prefixes in every `generate` of a model."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from kvtier.errors import InvalidArgument
from kvtier_transformers.cache import KvtierCache, PromptBatch
from kvtier_transformers.options import CacheOptions
from kvtier_transformers.store import Store, Where

# Arguments of `generate` with which it needs a cache of its own, or computes other values.
OWN_CACHE = (
    "past_key_values", "cache_params", "inputs_embeds", "assistant_model", "custom_generate",
    "cache_implementation", "prefill_chunk_size", "prompt_lookup_num_tokens", "token_healing",
    "guidance_scale", "assistant_early_exit", "use_mtp",
)  # fmt: skip


class Attachment:
    """What `attach` returns. `counts`: tokens, blocks, and calls without kvtier by their reason. Use it as a
    context manager, or call `detach`."""

    def __init__(self, model: Any, store: Store) -> None:
        self._model = model
        self._store = store
        self._generate = model.generate
        model.generate = self._run

    @property
    def counts(self) -> Counter[str]:
        return self._store.counts

    @property
    def reason(self) -> str:
        """Why the cache of this model cannot be kept; empty if it can."""
        return self._store.reason

    def detach(self) -> None:
        """Let the model generate without kvtier. A second call does nothing."""
        if self._model.__dict__.get("generate") == self._run:
            del self._model.generate
        self._store.close()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        call = Call(self._model, args, kwargs)
        if self._store.options.memory:
            return self._run_offloaded(call, args, kwargs)
        cache = self._load(call)
        if cache is None or cache.source is None:
            return self._generate(*args, **kwargs)
        if call.repeats > 1 and cache.loaded_tokens:
            cache.batch_repeat_interleave(call.repeats)
        watch = GenerationWatch(cache, self._store)
        more = {
            "past_key_values": cache,
            "stopping_criteria": StoppingCriteriaList(
                [*(call.value("stopping_criteria") or ()), watch]
            ),
        }
        output = self._generate(*args, **kwargs | more)
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        with self._store.failing("save"):
            # The rows of beams are not those of the output.
            cache.save(None if call.has_beams else sequences)
        return output

    def _run_offloaded(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Generate with a cache that is in the daemon. Raises exceptions: nothing can take its place."""
        why = call.why_not() or ("several answers" if call.repeats > 1 else "")
        if why:
            raise InvalidArgument(f"memory: a call with {why} cannot be offloaded")
        prompt = PromptBatch.of(call.ids, call.value("attention_mask"))
        room = call.most_tokens(prompt.ids.shape[1])
        cache = KvtierCache.loaded(self._model, self._store, prompt, room=room)
        with contextlib.closing(cache):
            return self._generate(*args, **kwargs | {"past_key_values": cache})

    def _load(self, call: Call) -> KvtierCache | None:
        if self._store.reason:
            return None
        why = call.why_not()
        if not why:
            try:
                prompt = PromptBatch.of(call.ids, call.value("attention_mask"))
                return KvtierCache.loaded(self._model, self._store, prompt, call.repeats)
            except InvalidArgument:
                why = "mask"
        self._store.counts[f"declined:{why}"] += 1
        return None


class Call:
    """The arguments of one `generate`."""

    def __init__(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._config = kwargs.get("generation_config") or getattr(model, "generation_config", None)
        self._kwargs = kwargs
        self._args = args
        found = args[0] if args else kwargs.get("inputs")
        self.ids = kwargs.get("input_ids") if found is None else found

    def value(self, name: str, default: Any = None) -> Any:
        """An argument, or else that of the model's configuration of `generate`."""
        if name in self._kwargs:
            return self._kwargs[name]
        found = getattr(self._config, name, None)
        return default if found is None else found

    @property
    def has_beams(self) -> bool:
        return bool(self.value("num_beams", 1) > 1)

    @property
    def repeats(self) -> int:
        """How many rows of the cache each prompt has."""
        return int(max(self.value("num_beams", 1), self.value("num_return_sequences", 1)))

    def most_tokens(self, prompt: int) -> int:
        """How many tokens of each row the cache gets, if the answer to this many tokens is as long as the
        call allows; 0 if it has no limit of its own."""
        new, length = self.value("max_new_tokens"), self._kwargs.get("max_length")
        # The last token of an answer is not computed.
        return int(prompt + new if new else length or 1) - 1

    def why_not(self) -> str:
        """Why this call runs without kvtier; empty if it runs with it."""
        tensors = [
            name
            for name, value in self._kwargs.items()
            if isinstance(value, torch.Tensor)
            and name not in ("inputs", "input_ids", "attention_mask")
        ]
        own = [name for name in OWN_CACHE if self.value(name)]
        if len(self._args) > 1 or not isinstance(self.ids, torch.Tensor):
            return "arguments"
        if tensors or own:
            return (tensors or own)[0]
        if self.value("use_cache", True) is False:
            return "use_cache"
        if self.value("attention_mask") is None and self._has_padding():
            return "mask"
        return ""

    def _has_padding(self) -> bool:
        """Whether `generate` makes a mask of its own."""
        pad, ends = self.value("pad_token_id"), self.value("eos_token_id")
        ends = ends if isinstance(ends, (list, tuple)) else [ends]
        return pad is not None and pad not in ends and bool((self.ids == pad).any())


class GenerationWatch(StoppingCriteria):
    """Stops nothing. Measures the time of the prompt, and keeps the recurrent states at block ends."""

    def __init__(self, cache: KvtierCache, store: Store) -> None:
        self._cache = cache
        self._store = store
        self._began = time.monotonic()
        self._is_first = True

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        source, tokens = self._cache.source, input_ids.shape[1] - 1
        assert source is not None
        if self._is_first:
            self._is_first = False
            before = self._cache.loaded_tokens
            seconds = time.monotonic() - self._began
            if not self._store.layout.has_states:
                self._store.computed(source.space, tokens - before, before, seconds)
        elif self._store.layout.has_states and tokens % self._store.options.block_tokens == 0:
            # Only the last one: each is as large as the states of all layers.
            for older in [one for one in source.states if one >= source.prompt.ids.shape[1]]:
                del source.states[older]
            self._cache.keep_states(tokens)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def attach(model: Any, client: Where = None, **options: Any) -> Attachment:
    """Load the longest saved prefix at the beginning of each `generate` of this model, and save its prompt
    and its answer at the end.

    `client`: a `kvtier.Client`, or the socket of a daemon; None: as `Client.connect`. `options`: see
    `CacheOptions`. A model or a call that kvtier cannot serve generates without it, and so do all calls while
    the daemon is away. Raises InvalidArgument for wrong options.

    With the option `memory`, the daemon has the cache, and a call raises what `KvtierCache.from_prompt` does.
    """
    try:
        chosen = CacheOptions(**options).checked()
    except TypeError as error:
        raise InvalidArgument(str(error)) from error
    return Attachment(model, Store(model, client, chosen))
