"""What a model caches: found by running it once on one token, and described as groups of kvtier.

A block contains, layer by layer, K and then V of its tokens, each head by head. A block of a state group
contains the states of all layers after its last token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from transformers import DynamicCache

from kvtier import Group
from kvtier.layout import DTYPE_BYTES, Kind
from kvtier_kernels import Pieces
from kvtier_transformers.layers import RoomyLayer, WindowLayer, replaced, states
from kvtier_transformers.options import UnsupportedModel

# The factors of these depend on the length of the prompt, so a token's K does too.
UNSTABLE_ROPE = ("dynamic", "longrope")
CHECK_TOKENS = 12
CHECK_ERROR = 1e-4  # relative to the largest logit, in float32
CHECK_ERROR_SHORT = 0.05  # in shorter types


# The bytes of tensors, and of each the place of block 0 and the size of a block; a block follows the one
# before it.
Places = tuple[list[torch.Tensor], list[int], list[int]]


@dataclass(frozen=True, slots=True)
class CachedTensor:
    """A tensor of a layer, for each row of a batch: [heads, tokens, dim], or a state of this `shape`."""

    layer: int
    name: str
    shape: tuple[int, ...]  # of K and V without the tokens
    dtype: torch.dtype
    device: torch.device

    def nbytes(self, tokens: int) -> int:
        """The bytes of this many tokens; of a state with tokens=1."""
        return math.prod(self.shape) * int(self.dtype.itemsize) * tokens


@dataclass(frozen=True, slots=True)
class CachedGroup:
    """Layers that are cached in the same way. `window`: how many tokens before a token it sees."""

    kind: Kind
    parts: tuple[CachedTensor, ...]
    window: int = 0

    def described(self, block_tokens: int) -> Group:
        """The group as kvtier knows it. A window has more tokens than the layers need, because a prefix may
        end at any token of its last block."""
        layers = len({part.layer for part in self.parts})
        window = self.window + block_tokens - 1 if self.kind == "window" else 0
        shapes = {part.shape for part in self.parts}
        if self.kind != "state" and len(shapes) == 1 and len(self.parts) == 2 * layers:
            heads, dim = shapes.pop()
            return Group(
                kind=self.kind, layers=layers, kv_heads=heads, head_dim=dim, window_tokens=window
            )
        tokens = 1 if self.kind == "state" else block_tokens
        nbytes = sum(part.nbytes(tokens) for part in self.parts)
        return Group(kind=self.kind, layers=layers, opaque_bytes=nbytes, window_tokens=window)

    def pieces(
        self, tensors: Sequence[tuple[torch.Tensor, int]], row: int, token: int, block_tokens: int
    ) -> Pieces:
        """Where the blocks of a row are in these tensors of the host's memory; see `places`."""
        arrays, offsets, sizes = self.places(tensors, row, token, block_tokens)
        return Pieces(arrays, offsets, sizes, sizes)

    def places(
        self, tensors: Sequence[tuple[torch.Tensor, int]], row: int, token: int, block_tokens: int
    ) -> Places:
        """Where the blocks of a row are in these dense tensors, one per part: block 0 begins at `token`. The
        number next to a tensor is the place of token 0 in it, which may be negative."""
        arrays, offsets, sizes = [], [], []
        for part, (tensor, zero) in zip(self.parts, tensors, strict=True):
            flat = tensor.view(torch.uint8).reshape(-1)
            each = flat.numel() // tensor.shape[0]
            heads, nbytes, at = 1, each, 0
            if self.kind != "state":
                heads, dim = part.shape
                token_bytes = dim * part.dtype.itemsize
                nbytes, at = block_tokens * token_bytes, (zero + token) * token_bytes
            for head in range(heads):
                arrays.append(flat)
                offsets.append(row * each + head * (each // heads) + at)
                sizes.append(nbytes)
        return arrays, offsets, sizes


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The groups of a model's cache; the first one is full attention, or a window if there is none."""

    groups: tuple[CachedGroup, ...]
    dtype: str

    @property
    def has_states(self) -> bool:
        return any(group.kind == "state" for group in self.groups)

    @property
    def has_windows(self) -> bool:
        return any(group.kind == "window" for group in self.groups)

    def text(self) -> str:
        """All that is cached, for the identity of the space."""
        return repr(
            [
                (
                    group.kind,
                    group.window,
                    [(p.layer, p.name, p.shape, p.dtype) for p in group.parts],
                )
                for group in self.groups
            ]
        )


def text_config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


def library_cache(model: Any) -> DynamicCache:
    return DynamicCache(config=text_config(model))


def find_layout(model: Any) -> CacheLayout:
    """Run the model on one token; return what it caches. Raises UnsupportedModel if kvtier cannot keep it."""
    _check_model(model)
    cache = library_cache(model)
    if not cache.layers:
        raise UnsupportedModel(
            f"{type(model).__name__}: the library does not know the layers of its cache"
        )
    cache.layers = [replaced(layer, 0) for layer in cache.layers]
    _run(model, torch.zeros(1, 1, dtype=torch.long, device="cpu"), cache)
    full: list[CachedTensor] = []
    state: list[CachedTensor] = []
    windows: dict[int, list[CachedTensor]] = {}
    for index, layer in enumerate(cache.layers):
        found = states(layer)
        state += [_part(index, name, one, one.shape[1:]) for name, one in found.items()]
        if isinstance(layer, RoomyLayer):
            if layer.keys is None or layer.keys.numel() == 0:
                continue  # it uses the cache of another layer
            parts = full
            if isinstance(layer, WindowLayer):
                parts = windows.setdefault(layer.sliding_window - 1, [])
            for name in ("keys", "values"):
                tensor = getattr(layer, name)
                parts.append(_part(index, name, tensor, (tensor.shape[1], tensor.shape[3])))
        elif not found and getattr(layer, "keys", None) is not None:
            raise UnsupportedModel(f"layer {index} has a cache of type {type(layer).__name__}")
    groups = [CachedGroup("full", tuple(full))] if full else []
    groups += [CachedGroup("window", tuple(parts), size) for size, parts in sorted(windows.items())]
    if not groups:
        raise UnsupportedModel("no layer has attention")
    dtypes = {part.dtype for group in groups for part in group.parts}
    dtype = str(dtypes.pop()).removeprefix("torch.")
    if dtypes or dtype not in DTYPE_BYTES:
        raise UnsupportedModel(f"K and V have the types {sorted(map(str, dtypes)) or dtype}")
    if state:
        groups.append(CachedGroup("state", tuple(state)))
        _check_states(model, next(model.parameters()).dtype)
    return CacheLayout(tuple(groups), dtype)


def _part(layer: int, name: str, tensor: torch.Tensor, shape: Sequence[int]) -> CachedTensor:
    return CachedTensor(layer, name, tuple(shape), tensor.dtype, tensor.device)


def _check_model(model: Any) -> None:
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(f"{name} has an encoder and a decoder")
    if not model._supports_default_dynamic_cache():
        raise UnsupportedModel(f"{name} has a cache of its own")
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise UnsupportedModel("the adapter puts tokens before the prompt")
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if "past_key_values" not in signature(inner.forward).parameters:
        raise UnsupportedModel(
            f"{name} has states only, which the library does not continue in `generate`"
        )
    if found := _rope_types(getattr(text_config(model), "rope_parameters", None)) & {
        *UNSTABLE_ROPE
    }:
        raise UnsupportedModel(
            f"with RoPE of type {found.pop()!r}, K depends on the length of the prompt"
        )


def _rope_types(parameters: Any) -> set[str]:
    if not isinstance(parameters, dict):
        return set()
    inner = [_rope_types(value) for value in parameters.values()]
    own = {str(parameters["rope_type"])} if "rope_type" in parameters else set()
    return own.union(*inner)


def _run(model: Any, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    with torch.no_grad():
        ids = ids.to(model.device)
        logits: torch.Tensor = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
    return logits[:, -1].float()


def _check_states(model: Any, dtype: torch.dtype) -> None:
    """Raise UnsupportedModel unless the model continues its states with several tokens exactly."""
    vocabulary = text_config(model).vocab_size
    ids = (torch.arange(CHECK_TOKENS, device="cpu")[None] * 7 + 1) % vocabulary
    whole = _run(model, ids, library_cache(model))
    cache = library_cache(model)
    _run(model, ids[:, : CHECK_TOKENS // 2], cache)
    continued = _run(model, ids[:, CHECK_TOKENS // 2 :], cache)
    error = (whole - continued).abs().max() / whole.abs().max().clamp(min=1e-6)
    if not error <= (CHECK_ERROR if dtype == torch.float32 else CHECK_ERROR_SHORT):
        text = "the library does not continue the states of this model exactly"
        raise UnsupportedModel(f"{text}: the logits differ by {float(error):.2g}")
