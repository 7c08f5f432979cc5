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
CHECK_PADDING = 3
CHECK_ERROR = 1e-4  # relative to the largest logit, in float32
CHECK_ERROR_SHORT = 0.05  # in shorter types
# Relative to K and V of a token. In shorter types, rounding can select other experts.
CHECK_DIFFERENCE = 1e-3
CHECK_DIFFERENCE_SHORT = 0.15


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
        shapes = {(*part.shape, part.dtype) for part in self.parts}
        if self.kind != "state" and len(shapes) == 1 and len(self.parts) == 2 * layers:
            heads, dim, _ = shapes.pop()
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
            shape = tensor.shape[1:] if self.kind == "state" else tensor.shape[1:4:2]
            if (tensor.dtype, shape) != (part.dtype, part.shape):
                raise ValueError(f"{part} is a tensor {tensor.dtype} {tuple(tensor.shape)} now")
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
    dtype: str  # of the first K; autocast computes K and V of different types
    takes_padding: bool = True  # K and V of a prompt are the same behind padding

    @property
    def has_states(self) -> bool:
        return any(group.kind == "state" for group in self.groups)

    @property
    def has_windows(self) -> bool:
        return any(group.kind == "window" for group in self.groups)

    def declines(self, repeats: int, pads: Sequence[int]) -> str:
        """Why a batch with these pads, and this many rows for each prompt, is not served; empty if it is."""
        if self.has_states and (repeats > 1 or any(pads)):
            return "states"
        return "padding" if any(pads) and not self.takes_padding else ""

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


def _inner(model: Any) -> Any:
    """The model without what PEFT puts around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def library_cache(model: Any) -> DynamicCache:
    return DynamicCache(config=text_config(model))


def find_layout(model: Any) -> CacheLayout:
    """Run the model on one token; return what it caches. Raises UnsupportedModel if kvtier cannot keep it."""
    _check_model(model)
    cache = _empty_cache(model)
    if not cache.layers:
        raise UnsupportedModel(
            f"{type(model).__name__}: the library does not know the layers of its cache"
        )
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
    dtype = str(groups[0].parts[0].dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise UnsupportedModel(f"K has the type {dtype}")
    if state:
        groups.append(CachedGroup("state", tuple(state)))
    dtypes = {part.dtype for group in groups for part in group.parts}
    return CacheLayout(tuple(groups), dtype, _check_prefixes(model, bool(state), dtypes))


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
    if (getattr(model, "_tp_size", None) or 1) > 1:
        raise UnsupportedModel("the tensors are distributed over processes")
    if "past_key_values" not in signature(_inner(model).forward).parameters:
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


def _run_padded(model: Any, ids: torch.Tensor, cache: DynamicCache, first: int) -> None:
    """Compute the tokens from `first` on of a prompt behind padding, as `generate` does if the cache has
    those before."""
    inner, ids = _inner(model), ids.to(model.device)
    mask = (torch.arange(ids.shape[1], device=ids.device)[None] >= CHECK_PADDING).long()
    more: dict[str, Any] = {"past_key_values": cache, "attention_mask": mask, "use_cache": True}
    if "position_ids" in signature(inner.forward).parameters:
        more["position_ids"] = inner._prepare_position_ids_for_generation(ids, more)
    left = ids.shape[1] - first
    with torch.no_grad():
        inner(
            **inner.prepare_inputs_for_generation(
                ids, next_sequence_length=left, is_first_iteration=True, **more
            )
        )


def _empty_cache(model: Any) -> DynamicCache:
    cache = library_cache(model)
    cache.layers = [replaced(layer, 0) for layer in cache.layers]
    return cache


def _check_prefixes(model: Any, has_states: bool, dtypes: set[torch.dtype]) -> bool:
    """Raise UnsupportedModel unless K and V of a prefix are those of the whole prompt, and the model
    continues them, and its states, exactly. Return whether they are also the same behind padding."""
    vocabulary = text_config(model).vocab_size
    ids = (torch.arange(CHECK_TOKENS, device="cpu")[None] * 7 + 1) % vocabulary
    is_short = dtypes != {torch.float32}
    half, most = CHECK_TOKENS // 2, CHECK_DIFFERENCE_SHORT if is_short else CHECK_DIFFERENCE
    wanted, cache = _empty_cache(model), _empty_cache(model)
    whole = _run(model, ids, wanted)
    _run(model, ids[:, :half], cache)
    if not _difference(wanted, cache, 0, half) <= most:
        raise UnsupportedModel("K and V of a prefix depend on the tokens after it")
    continued = _run(model, ids[:, half:], cache)
    error = (whole - continued).abs().max() / whole.abs().max().clamp(min=1e-6)
    if has_states and not error <= (CHECK_ERROR_SHORT if is_short else CHECK_ERROR):
        text = "the library does not continue the states of this model exactly"
        raise UnsupportedModel(f"{text}: the logits differ by {float(error):.2g}")
    if not _difference(wanted, cache, half, CHECK_TOKENS) <= most:
        raise UnsupportedModel("the library does not continue K and V of this model exactly")
    if has_states:
        return False
    pad, cache = torch.zeros(1, CHECK_PADDING, dtype=torch.long, device="cpu"), _empty_cache(model)
    ids = torch.cat([pad, ids], 1)
    _run_padded(model, ids[:, :half], cache, 0)
    _run_padded(model, ids, cache, half)
    return _difference(wanted, cache, 0, CHECK_TOKENS) <= most


def _difference(one: DynamicCache, other: DynamicCache, first: int, end: int) -> float:
    """The largest of the layers' differences of K and V between these tokens of `one` and the same ones of
    `other`, which can be behind padding: of half of the tokens at least."""
    found = [0.0]
    for layer, copy in zip(one.layers, other.layers, strict=True):
        if not isinstance(layer, RoomyLayer) or layer.keys is None or not layer.keys.numel():
            continue
        for name in ("keys", "values"):
            a, b = (
                getattr(each, name)[0].float().transpose(0, 1).flatten(1) for each in (layer, copy)
            )
            skipped = max(0, len(b) - CHECK_TOKENS)
            a, b = a[first:end], b[first + skipped : end + skipped]
            differences = (a - b).norm(dim=1) / a.norm(dim=1).clamp(min=1e-6)
            found.append(float(differences.median()))
    return max(found)
