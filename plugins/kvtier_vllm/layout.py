"""The layout of an engine's cache: its groups, the places of its pages, and the order of elements in a
page.

A block consists of one page per layer of a group, for the same tokens; the content of a page is opaque.
Both sides of the connector read the layout from the same configuration; only a worker has the memory.

A lossy codec needs the order of elements. vLLM's CPU kernels transpose K, or put K and V into tiles,
depending on the processor, and the shapes of the tensors do not tell. `page_order` therefore runs the
engine's kernel and compares; an order that is not known is never assumed. The known GPU kernels write K,
then V, per head and token, and the strides of the tensors tell where.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from kvtier.layout import PAGE_MARK, Kind
from kvtier_plugins import Unsupported

log = logging.getLogger("vllm.kvtier")

FULL = ("FullAttentionSpec", "MLAAttentionSpec")
WINDOW = ("SlidingWindowSpec", "SlidingWindowMLASpec")
CHUNKED = ("ChunkedLocalAttentionSpec",)
STATE = ("MambaSpec",)
UNIFORM = "UniformTypeKVCacheSpecs"
HASHES = ("sha256_cbor", "sha256")
ORDER_MARK = f" {PAGE_MARK}"
NO_BACKENDS: Mapping[str, str] = {}

# The order of K and of V in heads, tokens and dims; `kvtier_daemon.codec.arranged` defines the notation.
VEC, AMX = "hpdt|hptd", "hpt/16d/2t%16d%2|hpd/16t/2d%16t%2"
BY_STRIDES = ("FLASH_ATTN", "FLASHINFER", "FLEX_ATTENTION", "TRITON_ATTN")
# One vector per token: a latent, and the dims with RoPE next to it.
LATENTS, LATENT = ("AMX_MLA", "CPU_MLA", "FLASH_ATTN_MLA", "TRITON_MLA"), "latent"
# Pages of other types contain scales between the elements.
FLOATS = ("torch.bfloat16", "torch.float16", "torch.float32")
LIMIT = 256  # integers that bf16 represents exactly
TILE = 16


@dataclass(frozen=True)
class Cached:
    """One KV-cache group of the engine that kvtier keeps. `group_id`: its number in the engine; `pages`: name
    and page size in bytes of each layer; `parts`: how many consecutive blocks of the engine are one block of
    kvtier, where groups have different block sizes."""

    group_id: int
    kind: Kind
    window_tokens: int
    pages: tuple[tuple[str, int], ...]
    parts: int = 1

    @property
    def block_bytes(self) -> int:
        return self.parts * sum(nbytes for _, nbytes in self.pages)

    def needed(self, blocks: int, block_tokens: int) -> int:
        """How many of these blocks a load copies: the last ones of a window, the last one of a state."""
        if self.kind == "full":
            return blocks
        return min(blocks, 1 if self.kind == "state" else -(-self.window_tokens // block_tokens))

    def left_behind(self, tokens: int, block_tokens: int) -> int:
        """How many leading blocks lack pages once the engine continues after this many tokens."""
        if self.kind != "window":
            return 0
        pages = max(0, tokens - self.window_tokens) * self.parts // block_tokens
        return -(-pages // self.parts)

    def whole(self, ids: Sequence[int], at: int) -> bool:
        """Whether the engine has all pages of this block."""
        return all(ids[at * self.parts : (at + 1) * self.parts])


@dataclass(frozen=True)
class Shards:
    """How the ranks divide a block: each pipeline stage has some of the layers, and each of its ranks a part
    of them. Ranks with equal pages share a shard; the first one saves it."""

    ranks: int
    replicas: int
    stages: int = 1

    @property
    def count(self) -> int:
        return self.ranks // self.replicas

    @property
    def per_stage(self) -> int:
        """The number of ranks in a pipeline stage."""
        return self.ranks // self.stages

    def of(self, rank: int) -> int:
        return rank // self.replicas

    def writes(self, rank: int) -> bool:
        return rank % self.replicas == 0


@dataclass(frozen=True)
class Layout:
    """The engine's cache without its identity: what is needed to find and copy blocks."""

    block_tokens: int
    hash_tokens: int
    groups: tuple[Cached, ...]
    shards: Shards

    @property
    def block_bytes(self) -> int:
        return sum(group.block_bytes for group in self.groups)

    def load_bytes(self, blocks: int) -> int:
        """The bytes that a rank copies to load this many blocks."""
        return sum(
            group.needed(blocks, self.block_tokens) * group.block_bytes for group in self.groups
        )

    @property
    def has_single_pages(self) -> bool:
        """Whether each block is one page, of one group, and its shards have equal sizes."""
        groups = self.groups
        single = len(groups) == self.shards.stages == 1
        return single and groups[0].kind == "full" and groups[0].parts == 1

    @property
    def whole_group(self) -> int:
        """The group whose tokens are counted: the first one with full attention, or the first."""
        kinds = [group.kind for group in self.groups]
        return kinds.index("full") if "full" in kinds else 0


def check_hashes(vllm_config: Any, environment: Mapping[str, str] = os.environ) -> str:
    """Raise ValueError if the engine's block hashes can be forged; return a warning about them, or ""."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm not in HASHES:
        raise ValueError(
            f"kvtier shares blocks by the engine's hashes, and {algorithm} can be forged:"
            " start the engine with --prefix-caching-hash-algo sha256_cbor"
        )
    # The engine computes the first hash of every chain from it.
    seed = environment.get("PYTHONHASHSEED")
    return (
        ""
        if seed is None
        else f"only engines with PYTHONHASHSEED={seed} share blocks with this one"
    )


def hashes_media(vllm_config: Any) -> bool:
    """Whether the engine's block hashes contain those of the content of images, videos and audio. Without its
    own caches, an engine numbers them instead, and every engine begins with the same number."""
    multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
    return (
        multimodal is None
        or getattr(multimodal, "mm_processor_cache_gb", 1) != 0
        or vllm_config.cache_config.enable_prefix_caching
    )


def read_layout(vllm_config: Any, kv_cache_config: Any) -> Layout:
    """The layout of this engine's cache. Raises Unsupported if kvtier cannot keep it."""
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise Unsupported(f"{name}={getattr(parallel, name)} is not supported yet")
    stages = parallel.pipeline_parallel_size
    executor = parallel.distributed_executor_backend if stages > 1 else ""
    if stages > 1 and executor != "mp":
        # Others pass on the reports of the last stage only: a load would never end.
        raise Unsupported(f"pipeline_parallel_size={stages} with the executor {executor}")
    if stages > 1 and getattr(parallel, "nnodes", 1) > 1:
        raise Unsupported(f"pipeline_parallel_size={stages} on several hosts")
    if getattr(getattr(vllm_config, "aux_output_config", None), "enabled", False):
        # It ends the engine if it has not computed a block itself.
        raise Unsupported(
            "--enable-return-routed-experts: blocks do not contain the experts of tokens"
        )
    ids = kv_cache_config.prefix_cacheable_group_ids
    if not ids:
        raise Unsupported("this model has no cache that a later request could reuse")
    specs = [kv_cache_config.kv_cache_groups[group_id] for group_id in ids]
    # If groups have blocks of different sizes, a block must be whole in all of them.
    block_tokens = math.lcm(*(spec.kv_cache_spec.block_size for spec in specs))
    hash_tokens = kv_cache_config.hash_block_size or block_tokens
    if block_tokens % hash_tokens:
        raise Unsupported(
            f"blocks of {block_tokens} tokens with hashes of {hash_tokens} tokens are not supported"
        )
    groups = tuple(
        _cached(group_id, spec, block_tokens) for group_id, spec in zip(ids, specs, strict=True)
    )
    supported = getattr(vllm_config.model_config, "is_prefix_caching_supported", True)
    caches = getattr(vllm_config, "cache_config", None)
    if not supported and not getattr(caches, "enable_prefix_caching", False):
        # Poolers that need the results of all tokens: CLS and MEAN end the engine if some are cached.
        raise Unsupported("vLLM does not support prefix caching for this model")
    ranks = parallel.tensor_parallel_size
    replicas = getattr(kv_cache_config, "kv_tp_replicas", 1)
    if ranks % replicas:
        raise Unsupported(
            f"{ranks} ranks, of which {replicas} hold the same pages, are not supported"
        )
    return Layout(block_tokens, hash_tokens, groups, Shards(ranks * stages, replicas, stages))


def _cached(group_id: int, group: Any, block_tokens: int) -> Cached:
    spec = group.kv_cache_spec
    of_layers = layer_specs(group)
    kinds = {_kind(layer) for layer in of_layers}
    if len(kinds) != 1:
        raise Unsupported(
            f"group {group_id} mixes layers of {len(kinds)} kinds, which is not supported"
        )
    kind, window = kinds.pop()
    if len(of_layers) == 1:
        of_layers *= len(group.layer_names)
    sizes = [layer.page_size_bytes for layer in of_layers]
    pages = tuple(zip(group.layer_names, sizes, strict=bool(group.layer_names)))
    parts = block_tokens // spec.block_size
    if kind == "state" and parts > 1:
        raise Unsupported(
            f"states every {spec.block_size} tokens with blocks of "
            f"{block_tokens} tokens are not supported"
        )
    return Cached(group_id, kind, window, pages, parts)


def _kind(spec: Any) -> tuple[Kind, int]:
    name = type(spec).__name__
    if getattr(spec, "non_causal", False):
        raise Unsupported("the content of a block depends on the tokens after it")
    if name in FULL:
        return "full", 0
    if name in WINDOW:
        # The next token attends to itself and to `window - 1` tokens before it.
        before = spec.sliding_window - 1 + getattr(spec, "extra_retained_tokens", 0)
        return "window", max(1, before)
    if name in CHUNKED:
        return "window", spec.attention_chunk_size
    if name in STATE:
        if spec.mamba_cache_mode != "align":
            raise Unsupported("states need the engine's prefix caching")
        if spec.num_speculative_blocks:
            raise Unsupported("states with speculative decoding are not supported yet")
        return "state", 0
    raise Unsupported(f"{name} caches are not supported yet")


def layer_specs(group: Any) -> list[Any]:
    """The engine's description of each layer of a group if layers differ; otherwise one for all of them."""
    spec = group.kv_cache_spec
    if type(spec).__name__ == UNIFORM:
        # A pipeline stage without layers of this group has the description of all layers.
        return [spec.kv_cache_specs[name] for name in group.layer_names or spec.kv_cache_specs]
    return [spec]


@dataclass(frozen=True)
class Page:
    """The place of one layer's pages in memory number `array`: block b at offset + b * stride."""

    array: int
    offset: int
    stride: int
    nbytes: int


@dataclass(frozen=True)
class Pages:
    """All pages of one worker, by group, in the order of the layers."""

    groups: tuple[tuple[Page, ...], ...]
    digest: str


def find_pages(
    layout: Layout,
    caches: Mapping[str, Any],
    blocks: int,
    backends: Mapping[str, str] = NO_BACKENDS,
) -> tuple[Pages, list[Any]]:
    """The places of the pages of these tensors, and the tensors' storages as plain bytes. The digest ends
    with the order of elements if it is known and the same in all pages. `backends`: the name of each layer's
    attention. Raises Unsupported if a page is not contiguous, or not all are on one supported device."""
    orders: set[str] = set()
    storages: dict[int, int] = {}
    arrays: list[Any] = []
    groups: list[tuple[Page, ...]] = []
    described: list[list[Any]] = []
    devices: set[str] = set()
    for group in layout.groups:
        if not group.pages:
            raise Unsupported(f"a pipeline stage has no layer of group {group.group_id}")
        if layout.shards.stages > 1:
            described.append([name for name, _ in group.pages])
        pages = []
        for name, nbytes in group.pages:
            tensor = caches[name]
            if not hasattr(tensor, "untyped_storage"):
                raise Unsupported(f"{name}: expected a tensor, got {type(tensor).__name__}")
            if tensor.device.type not in ("cpu", "cuda"):
                raise Unsupported(f"{name} is on {tensor.device}, which is not supported yet")
            devices.add(str(tensor.device))
            at = tensor.untyped_storage().data_ptr()
            if at not in storages:
                storages[at] = len(arrays)
                arrays.append(_bytes_of(tensor))
            pages.append(_page(storages[at], name, tensor, nbytes, blocks))
            orders.add(page_order(tensor, tensor.shape[0] // blocks, backends.get(name, "")))
            inner = [str(tensor.dtype), list(tensor.shape[1:]), list(tensor.stride()[1:])]
            described.append([tensor.device.type, tensor.shape[0] // blocks, nbytes, *inner])
        groups.append(tuple(pages))
    if len(devices) > 1:
        raise Unsupported(f"the caches are on several devices: {' and '.join(sorted(devices))}")
    digest = hashlib.sha256(json.dumps(described).encode()).hexdigest()[:32]
    order = orders.pop() if len(orders) == 1 else ""
    return Pages(tuple(groups), digest + (ORDER_MARK + order if order else "")), arrays


def _page(array: int, name: str, tensor: Any, nbytes: int, blocks: int) -> Page:
    # A block of the KV-cache manager may be several consecutive blocks of the attention kernel.
    parts, rest = divmod(tensor.shape[0], blocks)
    item = tensor.element_size()
    inner = zip(tensor.shape[1:], tensor.stride()[1:], strict=True)
    span = (1 + sum((size - 1) * step for size, step in inner)) * item
    stride = tensor.stride(0) * item
    if rest or span > nbytes // parts or (parts > 1 and stride * parts > nbytes):
        text = f"{tuple(tensor.shape)} of strides {tensor.stride()} for {blocks} blocks of {nbytes} bytes"
        raise Unsupported(f"{name}: {text}: a page is not contiguous")
    return Page(array, tensor.storage_offset() * item, stride * parts, nbytes)


def _bytes_of(tensor: Any) -> Any:
    import torch

    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def backends_of(vllm_config: Any) -> dict[str, str]:
    """The name of each layer's attention, if the engine has one."""
    try:
        layers = vllm_config.compilation_config.static_forward_context
        return {
            name: layer.attn_backend.get_name()
            for name, layer in layers.items()
            if hasattr(layer, "attn_backend")
        }
    except Exception as error:  # noqa: BLE001  # internals of any engine version
        log.info("kvtier: cannot determine the kind of attention: %s", str(error))
        return {}


def page_order(tensor: Any, kernel_blocks: int, backend: str = "") -> str:
    """The order of elements in the pages of a layer's tensor, [blocks, heads, tokens, 2 x dims] or latents;
    "" if unknown. A page consists of this many blocks of the attention kernel."""
    if backend in BY_STRIDES:
        return _by_strides(tensor, kernel_blocks)
    if backend in LATENTS:
        return LATENT if _is_by_tokens(tensor) else ""
    import torch

    if tensor.device.type != "cpu" or tensor.dim() != 4 or not tensor[0].is_contiguous():
        return ""
    _, heads, tokens, width = tensor.shape
    if tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32) or width % 2:
        return ""
    try:
        found = _kernel_order(heads, tokens, width // 2, tensor.dtype)
    except Exception as error:  # noqa: BLE001  # internals of any engine version
        log.info(
            "kvtier: cannot determine the order of elements in pages, so they are stored "
            "losslessly: %s",
            str(error),
        )
        return ""
    if not found or kernel_blocks == 1:
        return found
    # The kernel's blocks are consecutive; tokens that are already divided are not divided again.
    return "|".join(
        f"t/{tokens}{part.replace('t', f't%{tokens}')}" if found == VEC else ""
        for part in found.split("|")
    ).strip("|")


def _by_strides(tensor: Any, kernel_blocks: int) -> str:
    """The order by strides: heads, then tokens (vLLM's HND), or tokens, then heads (NHD)."""
    if len(tensor.shape) != 4 or str(tensor.dtype) not in FLOATS:
        return ""
    _, heads, tokens, width = tensor.shape
    found = list(zip(tensor.shape[1:], tensor.stride()[1:], strict=True))

    def has_strides(*steps: int) -> bool:
        return all(
            size == 1 or step == mine for (size, step), mine in zip(found, steps, strict=True)
        )

    if width % 2:
        return ""
    if has_strides(width, heads * width, 1):
        part = "thpd"  # consecutive blocks of the kernel are equal to one block
    elif has_strides(tokens * width, width, 1):
        part = "htpd" if kernel_blocks == 1 else f"t/{tokens}ht%{tokens}pd"
    else:
        return ""
    return f"{part}|{part}"


def _is_by_tokens(tensor: Any) -> bool:
    """Whether a page contains one vector per token without gaps, [blocks, (1,) tokens, dims]."""
    *heads, _, width = tensor.shape[1:]
    strides = tuple(tensor.stride()[-2:])
    return heads in ([], [1]) and str(tensor.dtype) in FLOATS and strides == (width, 1)


@cache
def _kernel_order(heads: int, tokens: int, dims: int, dtype: Any) -> str:
    """The known order that the engine's CPU kernel writes; "" if none matches."""
    import torch

    # An engine that has not loaded this module does not write pages with it.
    backend = sys.modules.get("vllm.v1.attention.backends.cpu_attn")
    if backend is None:
        return ""
    ops = backend.ops

    if max(tokens, dims) > LIMIT:
        return ""
    isa = backend._get_attn_isa(dtype, tokens, dims)
    shape = (tokens, heads, dims)
    numbers = [
        torch.arange(shape[axis])
        .reshape([-1 if at == axis else 1 for at in range(3)])
        .expand(shape)
        for axis in range(3)
    ]
    orders = {VEC, AMX}
    for number in numbers:
        source = number.to(dtype).contiguous()
        page = torch.zeros(1, heads, 2 * tokens, dims, dtype=dtype)
        keys, values = page.chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(
            source, source.clone(), keys, values, torch.arange(tokens), isa
        )
        orders = {
            order
            for order in orders
            if all(
                _equal(restore(half[0]), source)
                for restore, half in zip(RESTORERS[order], (keys, values), strict=True)
            )
        }
    return orders.pop() if len(orders) == 1 else ""


def _equal(found: Any, source: Any) -> bool:
    return found is not None and bool((found == source).all())


def _transposed(half: Any) -> Any:
    heads, tokens, dims = half.shape
    return half.reshape(heads, dims, tokens).permute(2, 0, 1)


def _plain(half: Any) -> Any:
    return half.permute(1, 0, 2)


def _tiles_of_tokens(half: Any) -> Any:
    heads, tokens, dims = half.shape
    if tokens % TILE or dims % 2:
        return None
    tiles = half.reshape(heads, tokens // TILE, dims // 2, TILE, 2)
    return tiles.permute(1, 3, 0, 2, 4).reshape(tokens, heads, dims)


def _tiles_of_dims(half: Any) -> Any:
    heads, tokens, dims = half.shape
    if dims % TILE or tokens % 2:
        return None
    tiles = half.reshape(heads, dims // TILE, tokens // 2, TILE, 2)
    return tiles.permute(2, 4, 0, 1, 3).reshape(tokens, heads, dims)


Restore = Callable[[Any], Any]
RESTORERS: dict[str, tuple[Restore, Restore]] = {
    VEC: (_transposed, _plain),
    AMX: (_tiles_of_tokens, _tiles_of_dims),
}
