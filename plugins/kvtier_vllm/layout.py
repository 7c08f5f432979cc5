"""What an engine caches, in kvtier's words: a KvSpec of opaque pages, and where the pages lie.

A block is what every layer of one group keeps of the same tokens, one page after the other, whatever the
engine puts into a page. Both sides of the connector describe it from the same configuration; only a worker
sees memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier import Group, KvSpec
from kvtier.codec.grid import PAGE_MARK
from kvtier.layout import DTYPE_BYTES, Kind
from kvtier_vllm.identity import config_digest, weights_identity
from kvtier_vllm.options import Options, Unsupported
from kvtier_vllm.order import LATENT, page_order

FULL = ("FullAttentionSpec", "MLAAttentionSpec")
WINDOW = ("SlidingWindowSpec", "SlidingWindowMLASpec")
CHUNKED = ("ChunkedLocalAttentionSpec",)
STATE = ("MambaSpec",)
UNIFORM = "UniformTypeKVCacheSpecs"
HASHES = ("sha256_cbor", "sha256")
ORDER_MARK = f" {PAGE_MARK}"
NO_BACKENDS: Mapping[str, str] = {}


@dataclass(frozen=True)
class Cached:
    """One KV-cache group of the engine that is kept: its number there, and each layer's page in bytes.
    `parts`: how many of its blocks, one after the other, are one block here, where groups differ."""

    group_id: int
    kind: Kind
    window_tokens: int
    pages: tuple[tuple[str, int], ...]
    parts: int = 1

    @property
    def block_bytes(self) -> int:
        return self.parts * sum(nbytes for _, nbytes in self.pages)

    def needed(self, blocks: int, block_tokens: int) -> int:
        """How many of so many blocks a load brings: a window's last ones, and of a state the last."""
        if self.kind == "full":
            return blocks
        return min(blocks, 1 if self.kind == "state" else -(-self.window_tokens // block_tokens))

    def left_behind(self, tokens: int, block_tokens: int) -> int:
        """How many leading blocks the engine has not all pages of when it goes on after so many tokens."""
        if self.kind != "window":
            return 0
        pages = max(0, tokens - self.window_tokens) * self.parts // block_tokens
        return -(-pages // self.parts)

    def whole(self, ids: Sequence[int], at: int) -> bool:
        """Whether the engine has all pages of a block here."""
        return all(ids[at * self.parts : (at + 1) * self.parts])


@dataclass(frozen=True)
class Shards:
    """How the ranks of an engine divide a block. Ranks of like pages share a shard; the first writes it."""

    ranks: int
    replicas: int

    @property
    def count(self) -> int:
        return self.ranks // self.replicas

    def of(self, rank: int) -> int:
        return rank // self.replicas

    def writes(self, rank: int) -> bool:
        return rank % self.replicas == 0


@dataclass(frozen=True)
class Layout:
    """The engine's cache without its identity: what is needed to find blocks and to move them."""

    block_tokens: int
    hash_tokens: int
    groups: tuple[Cached, ...]
    shards: Shards

    @property
    def block_bytes(self) -> int:
        return sum(group.block_bytes for group in self.groups)

    def load_bytes(self, blocks: int) -> int:
        """What a rank copies to load so many blocks."""
        return sum(
            group.needed(blocks, self.block_tokens) * group.block_bytes for group in self.groups
        )

    @property
    def whole_group(self) -> int:
        """The first group that keeps every block, or the first: whose tokens are counted."""
        kinds = [group.kind for group in self.groups]
        return kinds.index("full") if "full" in kinds else 0


def check_hashes(vllm_config: Any, environment: Mapping[str, str] = os.environ) -> str:
    """ValueError if somebody could forge the engine's block hashes; what there is to say of them, or ""."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm not in HASHES:
        raise ValueError(
            f"kvtier shares blocks by the engine's hashes, and {algorithm} can be forged:"
            " start the engine with --prefix-caching-hash-algo sha256_cbor"
        )
    # The first hash of every chain is made from it.
    seed = environment.get("PYTHONHASHSEED")
    return (
        ""
        if seed is None
        else f"only engines with PYTHONHASHSEED={seed} share blocks with this one"
    )


def read_layout(vllm_config: Any, kv_cache_config: Any) -> Layout:
    """What this engine caches. Raises Unsupported where kvtier can't keep it."""
    parallel = vllm_config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size",
                 "prefill_context_parallel_size"):  # fmt: skip
        if getattr(parallel, name, 1) != 1:
            raise Unsupported(f"{name}={getattr(parallel, name)} is not supported yet")
    if vllm_config.model_config.enable_sleep_mode:
        # It gives up the pages' memory, and no connector is told before: a save would keep what comes after.
        raise Unsupported("sleep mode is not supported yet")
    ids = kv_cache_config.prefix_cacheable_group_ids
    if not ids:
        raise Unsupported("this model has nothing that a later request could use again")
    specs = [kv_cache_config.kv_cache_groups[group_id] for group_id in ids]
    # Where groups have blocks of different sizes, what all of them have whole can be found again.
    block_tokens = math.lcm(*(spec.kv_cache_spec.block_size for spec in specs))
    hash_tokens = kv_cache_config.hash_block_size or block_tokens
    if block_tokens % hash_tokens:
        raise Unsupported(f"blocks of {block_tokens} tokens with hashes of {hash_tokens}")
    groups = tuple(
        _cached(group_id, spec, block_tokens) for group_id, spec in zip(ids, specs, strict=True)
    )
    ranks = parallel.tensor_parallel_size
    replicas = getattr(kv_cache_config, "kv_tp_replicas", 1)
    if ranks % replicas:
        raise Unsupported(f"{ranks} ranks of which {replicas} hold the same pages")
    return Layout(block_tokens, hash_tokens, groups, Shards(ranks, replicas))


def _cached(group_id: int, group: Any, block_tokens: int) -> Cached:
    spec = group.kv_cache_spec
    if getattr(group, "is_eagle_group", False):
        raise Unsupported("draft layers that are cached with the model's are not supported yet")
    of_layers = _specs(group)
    if len(of_layers) == 1:
        of_layers *= len(group.layer_names)
    kinds = {_kind(layer) for layer in of_layers}
    if len(kinds) != 1:
        raise Unsupported(f"group {group_id} mixes layers of {len(kinds)} kinds")
    kind, window = kinds.pop()
    sizes = [layer.page_size_bytes for layer in of_layers]
    pages = tuple(zip(group.layer_names, sizes, strict=True))
    parts = block_tokens // spec.block_size
    if kind == "state" and parts > 1:
        raise Unsupported(f"states each {spec.block_size} tokens among blocks of {block_tokens}")
    return Cached(group_id, kind, window, pages, parts)


def _kind(spec: Any) -> tuple[Kind, int]:
    name = type(spec).__name__
    if name in FULL:
        return "full", 0
    if name in WINDOW:
        # The next token sees itself and one less than the window before it.
        before = spec.sliding_window - 1 + getattr(spec, "extra_retained_tokens", 0)
        return "window", max(1, before)
    if name in CHUNKED:
        return "window", spec.attention_chunk_size
    if name in STATE:
        if spec.mamba_cache_mode != "align":
            raise Unsupported("states are kept where the engine caches prefixes")
        if spec.num_speculative_blocks:
            raise Unsupported("states with speculative decoding are not supported yet")
        return "state", 0
    raise Unsupported(f"{name} caches can't be kept yet")


def describe(
    vllm_config: Any, kv_cache_config: Any, layout: Layout, pages: str, version: str,
    options: Options,
) -> KvSpec:  # fmt: skip
    """The identity of this engine's space. `pages` is what `Pages.digest` says of its workers' memory, and
    ends with the order of its pages if that is known: then a lossy codec can be had."""
    model = vllm_config.model_config
    weights = options.weights or weights_identity(model, str(vllm_config.load_config.load_format))
    spec = kv_cache_config.kv_cache_groups[layout.groups[0].group_id].kv_cache_spec
    dtype = str(getattr(spec, "dtype", "uint8")).removeprefix("torch.")
    pages += _latent_dims(model, pages)
    shapes = [_shape(group, kv_cache_config, layout, pages, dtype) for group in layout.groups]
    groups = [
        Group(
            kind=group.kind, layers=len(group.pages), window_tokens=group.window_tokens,
            shards=layout.shards.count, **shape,
        )
        for group, shape in zip(layout.groups, shapes, strict=True)
    ]  # fmt: skip
    return KvSpec.groups(
        groups,
        model=Path(model.model).name,
        dtype=dtype if dtype in DTYPE_BYTES else "uint8",
        block_tokens=layout.block_tokens,
        weights=weights,
        quantization=str(vllm_config.cache_config.cache_dtype),
        layout=f"{kv_cache_config.kv_cache_layout} {_states(kv_cache_config, layout)}{pages}",
        rope=f"config:{config_digest(model, vllm_config)}",
        engine="vllm",
        engine_layout=f"vllm {version}",
        tensor_parallel=layout.shards.ranks,
    )


def _specs(group: Any) -> list[Any]:
    """What the engine says of each layer of a group, where layers differ; else of all of them."""
    spec = group.kv_cache_spec
    if type(spec).__name__ == UNIFORM:
        return [spec.kv_cache_specs[name] for name in group.layer_names]
    return [spec]


def _states(kv_cache_config: Any, layout: Layout) -> str:
    """What the states of a model are made of: their pages are bytes to the engine, too."""
    groups = [
        kv_cache_config.kv_cache_groups[group.group_id]
        for group in layout.groups
        if group.kind == "state"
    ]
    told = [
        [str(spec.mamba_type), list(map(list, spec.shapes)), list(map(str, spec.dtypes))]
        for group in groups
        for spec in _specs(group)
    ]
    return f"states:{hashlib.sha256(json.dumps(told).encode()).hexdigest()[:32]} " if told else ""


def _latent_dims(model: Any, pages: str) -> str:
    """Of pages of latents: how many dims those have, and how many RoPE has turned beside them."""
    if not pages.endswith(ORDER_MARK + LATENT):
        return ""
    config = getattr(model, "hf_text_config", None)
    found = [getattr(config, name, None) for name in ("kv_lora_rank", "qk_rope_head_dim")]
    return "={}+{}".format(*found) if all(found) else ""


def _shape(
    group: Cached, kv_cache_config: Any, layout: Layout, pages: str, dtype: str
) -> dict[str, int]:
    """Heads and dims of a group whose pages lie in a known order, all alike; else how long its blocks are."""
    opaque = {"opaque_bytes": group.block_bytes}
    if ORDER_MARK not in pages or group.parts > 1 or dtype not in DTYPE_BYTES:
        return opaque
    specs = _specs(kv_cache_config.kv_cache_groups[group.group_id])
    found = {(getattr(one, "num_kv_heads", 0), getattr(one, "head_size", 0)) for one in specs}
    heads, dims = found.pop()
    _, _, order = pages.rpartition(ORDER_MARK)
    if order.startswith(LATENT):
        _, _, said = order.partition("=")
        parts, known = 1, heads == 1 and dims == sum(map(int, filter(None, said.split("+"))))
    else:
        parts, known = 2, True
    page_bytes = parts * layout.block_tokens * heads * dims * DTYPE_BYTES[dtype]
    if found or not known or {nbytes for _, nbytes in group.pages} != {page_bytes}:
        return opaque
    return {"kv_heads": heads, "head_dim": dims, "parts": parts}


@dataclass(frozen=True)
class Page:
    """Where one layer's pages lie in the memory number `array`: block b at offset + b * stride."""

    array: int
    offset: int
    stride: int
    nbytes: int


@dataclass(frozen=True)
class Pages:
    """All the pages of one worker, by group, in the order of the layers."""

    groups: tuple[tuple[Page, ...], ...]
    digest: str


def find_pages(
    layout: Layout,
    caches: Mapping[str, Any],
    blocks: int,
    backends: Mapping[str, str] = NO_BACKENDS,
) -> tuple[Pages, list[Any]]:
    """Where the pages of these tensors are, and the tensors' storages as plain bytes. Raises Unsupported
    where a page is not one run of bytes, or not in memory that can be reached, all of it on one device. Where
    the order of elements within all of them is known, the digest ends with it; `backends` are what layers'
    attention is called."""
    orders: set[str] = set()
    storages: dict[int, int] = {}
    arrays: list[Any] = []
    groups, told = [], []
    devices: set[str] = set()
    for group in layout.groups:
        pages = []
        for name, nbytes in group.pages:
            tensor = caches[name]
            if not hasattr(tensor, "untyped_storage"):
                raise Unsupported(f"{name}: {type(tensor).__name__} instead of a tensor")
            if tensor.device.type not in ("cpu", "cuda"):
                raise Unsupported(f"{name} is on {tensor.device}: can't be read yet")
            devices.add(str(tensor.device))
            at = tensor.untyped_storage().data_ptr()
            if at not in storages:
                storages[at] = len(arrays)
                arrays.append(_bytes_of(tensor))
            pages.append(_page(storages[at], name, tensor, nbytes, blocks))
            orders.add(page_order(tensor, tensor.shape[0] // blocks, backends.get(name, "")))
            inner = [str(tensor.dtype), list(tensor.shape[1:]), list(tensor.stride()[1:])]
            told.append([tensor.device.type, tensor.shape[0] // blocks, nbytes, *inner])
        groups.append(tuple(pages))
    if len(devices) > 1:
        raise Unsupported(f"the caches are on {' and '.join(sorted(devices))}")
    digest = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:32]
    order = orders.pop() if len(orders) == 1 else ""
    return Pages(tuple(groups), digest + (ORDER_MARK + order if order else "")), arrays


def _page(array: int, name: str, tensor: Any, nbytes: int, blocks: int) -> Page:
    # A block of the manager's may be several of the attention kernel's, one after the other.
    parts, rest = divmod(tensor.shape[0], blocks)
    item = tensor.element_size()
    inner = zip(tensor.shape[1:], tensor.stride()[1:], strict=True)
    span = (1 + sum((size - 1) * step for size, step in inner)) * item
    stride = tensor.stride(0) * item
    if rest or span > nbytes // parts or (parts > 1 and stride * parts > nbytes):
        text = f"{tuple(tensor.shape)} of strides {tensor.stride()} for {blocks} blocks of {nbytes} bytes"
        raise Unsupported(f"{name}: {text}: a page is not one run of bytes")
    return Page(array, tensor.storage_offset() * item, stride * parts, nbytes)


def _bytes_of(tensor: Any) -> Any:
    import torch

    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
