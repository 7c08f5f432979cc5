"""The identity of an engine's cache: its KvSpec, its weights and adapters, and the keys of its blocks."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvtier import Group, Keys, KvSpec
from kvtier.layout import DTYPE_BYTES
from kvtier_plugins import Unsupported
from kvtier_plugins.weights import (
    ADAPTER_CONFIG,
    cached_file,
    folder_digest,
    model_name,
    model_weights,
)
from kvtier_vllm.daemon import DaemonSession
from kvtier_vllm.events import KvEvents
from kvtier_vllm.layout import LATENT, ORDER_MARK, Cached, Layout, layer_specs
from kvtier_vllm.messages import RankPages
from kvtier_vllm.options import Options
from kvtier_vllm.prompt import Prompt

log = logging.getLogger("vllm.kvtier")

CHANGED = b""  # never the name of an adapter
GENERATION_BYTES = 16
LIMIT_HASHES = 2048  # that become keys in one call: about one millisecond
VOLATILE = ("_name_or_path", "transformers_version")
# How images, videos and audio become embeddings: files next to the weights, and options of the engine.
PROCESSOR_FILES = (
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
PROCESSING = (
    "mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate", "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
)  # fmt: skip
LLAMA4_TOKENS = 32_768


def weights_identity(model_config: Any, load_format: str) -> str:
    """The name of the weights that this engine loads: a commit of a hub, or a digest of the files."""
    if load_format == "dummy":
        return f"dummy:{model_config.seed}"
    return model_weights(model_config.model, getattr(model_config, "revision", None))


def config_digest(model_config: Any, vllm_config: Any) -> str:
    """A digest of the other inputs of a cache's values: the model's configuration with RoPE and scaling, the
    quantization, the data type of the computation, how media become embeddings, and what adapters adapt."""
    config = {
        name: value
        for name, value in model_config.hf_config.to_dict().items()
        if name not in VOLATILE
    }
    types = [str(model_config.dtype), str(model_config.quantization)]
    longest = getattr(model_config, "max_model_len", 0)
    adapters = getattr(vllm_config, "lora_config", None)
    options = {
        "longer than": sorted(limit for limit in _length_limits(config) if longest > limit),
        "quantization": getattr(model_config, "quantization_config", None),
        "media": _media_digest(model_config),
        "adapted": sorted(getattr(adapters, "target_modules", None) or ()),
        "adapted media": getattr(adapters, "enable_tower_connector_lora", False),
    }
    others = [{name: value for name, value in options.items() if value}]
    text = json.dumps([config, types, *filter(None, others)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _length_limits(config: Any) -> Iterator[int]:
    """The values of `max_model_len` up to which the engine computes all tokens in one way, and above which in
    another one: LongRoPE has factors for both, Llama-4 has temperatures of attention only above."""
    if not isinstance(config, dict):
        return
    if config.get("rope_type", config.get("type")) == "longrope":
        yield int(config.get("original_max_position_embeddings") or 0)
    if str(config.get("model_type")).startswith("llama4"):
        yield LLAMA4_TOKENS
    for value in config.values():
        yield from _length_limits(value)


def _media_digest(model_config: Any) -> str:
    """A digest of what determines the embeddings of media besides their content, whose hashes are in the
    engine's block hashes; "" for a model without media."""
    multimodal = getattr(model_config, "multimodal_config", None)
    if multimodal is None:
        return ""
    text = json.dumps(
        [getattr(multimodal, name, None) for name in PROCESSING], sort_keys=True, default=str
    )
    digest = hashlib.sha256(text.encode())
    for path in (Path(model_config.model) / name for name in PROCESSOR_FILES):
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def _weights(vllm_config: Any, name: str) -> str:
    """The identity of the model's weights, for which the option `name` may stand, and of those of a draft
    model whose layers are cached too."""
    model, load = vllm_config.model_config, vllm_config.load_config
    weights = name or weights_identity(model, str(load.load_format))
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None or not speculative.uses_draft_kv_cache():
        return weights
    draft = speculative.draft_model_config
    load = getattr(speculative, "draft_load_config", None) or load
    try:
        found = weights_identity(draft, str(load.load_format))
    except Unsupported:
        if not name:
            raise
        found = "named"  # the option stands for both
    return f"{weights} draft {found} {config_digest(draft, vllm_config)}"


def whole_cache(own: Layout, ranks: Mapping[int, RankPages]) -> tuple[Layout, str]:
    """The layout of the engine's whole cache, and the digest of its pages. Pipeline stages may have different
    numbers of layers: all shards are as large as the largest one. Raises Unsupported."""
    found: list[set[tuple[Layout | None, str]]] = [set() for _ in range(own.shards.stages)]
    for rank, pages in ranks.items():
        if pages.why_not:
            raise Unsupported(pages.why_not)
        found[rank // own.shards.per_stage].add((pages.layout, pages.digest))
    stages = [of_stage.pop() for of_stage in found if len(of_stage) == 1]
    layouts = [layout for layout, _ in stages if layout is not None]
    if len(layouts) != len(found) or len(ranks) != own.shards.ranks:
        raise Unsupported("the ranks' caches differ")
    if len({_without_pages(layout) for layout in (own, *layouts)}) != 1:
        raise Unsupported("the pipeline stages divide blocks in different ways")
    if len(stages) == 1:
        return layouts[0], stages[0][1]
    by_group = zip(*(layout.groups for layout in layouts), strict=True)
    groups = [max(parts, key=lambda one: one.block_bytes) for parts in by_group]
    digests, _, orders = zip(*(digest.partition(ORDER_MARK) for _, digest in stages), strict=True)
    digest = hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:32]
    # The end of a smaller shard is undefined, which only a lossless codec can keep.
    equal = len({layout.block_bytes for layout in layouts}) == len(set(orders)) == 1
    order = ORDER_MARK + orders[0] if equal and orders[0] else ""
    return replace(own, groups=tuple(groups)), digest + order


def _without_pages(layout: Layout) -> Layout:
    return replace(layout, groups=tuple(replace(group, pages=()) for group in layout.groups))


def describe(
    vllm_config: Any, kv_cache_config: Any, layout: Layout, pages: str, version: str,
    options: Options,
) -> KvSpec:  # fmt: skip
    """The KvSpec of this engine's cache. `pages`: the `Pages.digest` of its workers, which ends with the
    order of the pages if it is known; only then can a lossy codec be used."""
    model = vllm_config.model_config
    weights = _weights(vllm_config, options.weights)
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
        model=model_name(model.model),
        dtype=dtype if dtype in DTYPE_BYTES else "uint8",
        block_tokens=layout.block_tokens,
        weights=weights,
        quantization=str(vllm_config.cache_config.cache_dtype),
        layout=f"{kv_cache_config.kv_cache_layout} {_states(kv_cache_config, layout)}{pages}",
        rope=f"config:{config_digest(model, vllm_config)}",
        engine="vllm",
        engine_layout=f"vllm {version}",
        tensor_parallel=layout.shards.per_stage,
        pipeline_parallel=layout.shards.stages,
    )


def _states(kv_cache_config: Any, layout: Layout) -> str:
    """A digest of the shapes and types of a model's states: the engine's pages of states are plain bytes."""
    groups = [
        kv_cache_config.kv_cache_groups[group.group_id]
        for group in layout.groups
        if group.kind == "state"
    ]
    states = [
        [str(spec.mamba_type), list(map(list, spec.shapes)), list(map(str, spec.dtypes))]
        for group in groups
        for spec in layer_specs(group)
    ]
    return (
        f"states:{hashlib.sha256(json.dumps(states).encode()).hexdigest()[:32]} " if states else ""
    )


def _latent_dims(model: Any, pages: str) -> str:
    """For pages of latents: the dims of a latent, and the dims with RoPE next to it."""
    if not pages.endswith(ORDER_MARK + LATENT):
        return ""
    config = getattr(model, "hf_text_config", None)
    found = [getattr(config, name, None) for name in ("kv_lora_rank", "qk_rope_head_dim")]
    return "={}+{}".format(*found) if all(found) else ""


def _shape(
    group: Cached, kv_cache_config: Any, layout: Layout, pages: str, dtype: str
) -> dict[str, int]:
    """The heads and dims of a group whose pages are equal and in a known order; otherwise its block size."""
    opaque = {"opaque_bytes": group.block_bytes}
    if ORDER_MARK not in pages or group.parts > 1 or dtype not in DTYPE_BYTES:
        return opaque
    specs = layer_specs(kv_cache_config.kv_cache_groups[group.group_id])
    found = {(getattr(one, "num_kv_heads", 0), getattr(one, "head_size", 0)) for one in specs}
    heads, dims = found.pop()
    _, _, order = pages.rpartition(ORDER_MARK)
    if order.startswith(LATENT):
        _, _, latent_dims = order.partition("=")
        parts, known = 1, heads == 1 and dims == sum(map(int, filter(None, latent_dims.split("+"))))
    else:
        parts, known = 2, True
    page_bytes = parts * layout.block_tokens * heads * dims * DTYPE_BYTES[dtype]
    if found or not known or {nbytes for _, nbytes in group.pages} != {page_bytes}:
        return opaque
    return {"kv_heads": heads, "head_dim": dims, "parts": parts}


class Adapters:
    """Digests of LoRA adapters by content, computed again when a file has changed.

    The engine may read an adapter's files at any time, and its own hashes identify an adapter by name and
    path. An adapter whose digest differs from its first digest is therefore rejected from then on: it is
    unknown which content the engine computes with, even if the first content is restored.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Path, tuple[tuple[str, int, int], ...]], bytes] = {}
        self._first: dict[str, bytes] = {}
        self._logged: set[str] = set()

    def extras(self, lora: Any) -> bytes | None:
        """The extras of the keys of requests with this adapter; None if it cannot be identified."""
        if lora is None:
            return b""
        path = lora.lora_path
        try:
            known = self._digest(path)
            if self._first.setdefault(path, known) == known:
                return known
            self._first[path] = CHANGED
            why = "its files have changed while the engine ran: restart it"
        except (OSError, Unsupported) as error:
            why = str(error)
        if path not in self._logged:
            self._logged.add(path)
            log.warning(
                "kvtier: loading and saving no blocks of the adapter %s: %s: %s",
                lora.lora_name, path, why,
            )  # fmt: skip
        return None

    def _digest(self, path: str) -> bytes:
        """The digest of the folder that the engine reads for this path. Raises OSError, Unsupported."""
        folder = Path(path).expanduser()
        try:
            seen = _seen(folder)
        except FileNotFoundError:
            config = None if folder.is_absolute() else cached_file(path, "main", ADAPTER_CONFIG)
            if config is None:
                raise
            folder = config.parent  # of a repository of a hub
            seen = _seen(folder)
        known = self._known.get((folder, seen))
        if known is None:
            known = b"lora:" + folder_digest(folder).encode()
            self._known[folder, seen] = known
        return known


def _seen(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Names, times and sizes of a folder's files."""
    # Runs per request on the scheduler's thread: with Path it takes nearly twice as long.
    with os.scandir(folder) as entries:
        stats = [(entry.name, entry.stat()) for entry in entries]
    return tuple(sorted((name, s.st_mtime_ns, s.st_size) for name, s in stats))


class BlockKeys:
    """Derives the keys of requests' blocks, and reports them to `events`. One per engine."""

    def __init__(self, layout: Layout, events: KvEvents | None) -> None:
        self._ratio = layout.block_tokens // layout.hash_tokens
        self._events = events
        self._generation = b""

    def of(self, prompt: Prompt, session: DaemonSession) -> Keys:
        """The keys of the request's whole blocks so far. A call adds at most `LIMIT_HASHES` keys."""
        prompt.use_session(session)
        ratio, keys = self._ratio, prompt.keys
        done = 0 if keys is None else len(keys)
        hashes = prompt.request.block_hashes
        if keys is None or len(hashes) // ratio > done:
            new = hashes[done * ratio + ratio - 1 : (done + LIMIT_HASHES) * ratio : ratio]
            more = session.space.keys_of_hashes(new, self._generation, prompt.extras, keys)
            keys = prompt.keys = keys.then(more) if keys else Keys(more.packed, b"", more.others)
            if self._events is not None:
                self._events.name(prompt.request, keys, done)
        return keys

    def new_generation(self) -> None:
        """From now on the same blocks have other keys."""
        self._generation = os.urandom(GENERATION_BYTES)
