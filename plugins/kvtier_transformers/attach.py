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
from kvtier_transformers.options import CacheOptions, log
from kvtier_transformers.store import Store, Where

# Arguments of `generate`, in their order, that K and V do not depend on. All others may change them.
PLAIN = (
    "inputs", "generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn",
    "streamer", "input_ids", "attention_mask", "tokenizer", "trust_remote_code",
)  # fmt: skip
BY_PLACE = 4  # of these, the ones that may be passed without their names
# Settings of `generate` with which it needs a cache of its own, computes the prompt several times, or returns
# values of each of its tokens.
OWN_CACHE = (
    "cache_implementation", "prefill_chunk_size", "prompt_lookup_num_tokens", "token_healing",
    "guidance_scale", "assistant_early_exit", "use_mtp", "penalty_alpha", "dola_layers", "num_beam_groups",
    "constraints", "force_words_ids", "output_attentions", "output_hidden_states",
)  # fmt: skip
NEUTRAL = {"guidance_scale": 1, "num_beam_groups": 1}


class Attachment:
    """What `attach` returns. `counts`: tokens, blocks, and calls without kvtier by their reason. Use it as a
    context manager, or call `detach`."""

    def __init__(self, model: Any, store: Store) -> None:
        self._model = model
        self._store = store  # none in a copy
        self._generate = model.generate
        # A compiled model keeps its attributes in the original one.
        self._before = vars(getattr(model, "_orig_mod", model)).get("generate")
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
        if self._model.generate == self._run:
            del self._model.generate
            if self._before is not None:
                self._model.generate = self._before
        self._store.close()

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the model generates without kvtier."""
        return vars(self) | {"_store": None}

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self._store is None or self._store.is_closed:
            return self._generate(*args, **kwargs)
        try:
            call = Call(self._model, args, kwargs)
        except Exception:  # noqa: BLE001  # no exception of kvtier reaches `generate`, which raises its own
            self._store.decline("arguments")
            return self._generate(*args, **kwargs)
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
                [*(call.given.get("stopping_criteria") or ()), watch]
            ),
        }
        args = args[: PLAIN.index("stopping_criteria")]
        output = self._generate(*args, **kwargs | more)
        try:
            # The rows of beams are not those of the output.
            cache.save(None if call.has_beams else getattr(output, "sequences", output))
        except InvalidArgument as error:
            self._store.counts["failed:save"] += 1
            log.warning("kvtier: an answer is not saved: %s", str(error))
        return output

    def _run_offloaded(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Generate with a cache that is in the daemon. Raises exceptions: nothing can take its place."""
        why = call.why_not() or ("several answers" if call.repeats > 1 else "")
        if why:
            raise InvalidArgument(f"memory: a call with {why} cannot be offloaded")
        prompt = PromptBatch.of(call.ids, call.mask)
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
                prompt = PromptBatch.of(call.ids, call.mask)
                return KvtierCache.loaded(self._model, self._store, prompt, call.repeats)
            except InvalidArgument:
                why = "mask"
        self._store.decline(why)
        return None


class Call:
    """The arguments of one `generate`: `given`, by name."""

    def __init__(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._has_more = len(args) > BY_PLACE
        self.given: dict[str, Any] = {**dict(zip(PLAIN, args, strict=False)), **kwargs}
        found = self.given.get("inputs")
        self.ids = self.given.get("input_ids") if found is None else found
        self.mask = self.given.get("attention_mask")
        named = {name: value for name, value in self.given.items() if name != "generation_config"}
        self._config, self._rest = model._prepare_generation_config(
            self.given.get("generation_config"), **named
        )

    @property
    def has_beams(self) -> bool:
        return bool(self._config.num_beams > 1)

    @property
    def repeats(self) -> int:
        """How many rows of the cache each prompt has."""
        return int(max(self._config.num_beams, self._config.num_return_sequences))

    def most_tokens(self, prompt: int) -> int:
        """How many tokens of each row the cache gets, if the answer to this many tokens is as long as the
        call allows; 0 if it has no limit of its own."""
        new, length = self._config.max_new_tokens, self.given.get("max_length")
        # The last token of an answer is not computed.
        return int(prompt + new if new else length or 1) - 1

    def why_not(self) -> str:
        """Why this call runs without kvtier; empty if it runs with it."""
        if self._has_more or not isinstance(self.ids, torch.Tensor) or self.ids.dim() != 2:
            return "arguments"
        if self.given.get("synced_gpus"):
            return "synced_gpus"
        for name, value in self._rest.items():
            if name not in (*PLAIN, "synced_gpus") and value is not None:
                return str(name)
        for name in OWN_CACHE:
            if getattr(self._config, name, None) not in (None, False, NEUTRAL.get(name)):
                return name
        if not self._config.use_cache:
            return "use_cache"
        if self._has_padding() if self.mask is None else not isinstance(self.mask, torch.Tensor):
            return "mask"
        return ""

    def _has_padding(self) -> bool:
        """Whether `generate` makes a mask of its own."""
        pad, ends = self._config.pad_token_id, self._config.eos_token_id
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
            if not source.place.layout.has_states:
                self._store.computed(source.place.space, tokens - before, before, seconds)
        elif source.place.layout.has_states and tokens % self._store.options.block_tokens == 0:
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
