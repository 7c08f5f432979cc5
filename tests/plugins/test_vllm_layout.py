"""From an engine's configuration to an identity: equal for equal caches, different for all others."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from kvtier import KvSpec
from kvtier.layout import space_id
from kvtier_daemon.codec.arranged import order_of
from kvtier_daemon.codec.losses import Loss, Losses
from kvtier_kernels import reorder_pages
from kvtier_plugins import Unsupported
from kvtier_plugins.weights import folder_digest
from kvtier_vllm.identity import Adapters, describe, weights_identity, whole_cache
from kvtier_vllm.layout import (
    BY_STRIDES,
    LATENTS,
    backends_of,
    check_hashes,
    find_pages,
    hashes_media,
    page_order,
    read_layout,
)
from kvtier_vllm.messages import RankPages
from kvtier_vllm.options import Options
from support.losses_by_twins import profile_of


class FullAttentionSpec(SimpleNamespace):
    """Has the name of vLLM's class: the plugin recognizes kinds by class name."""


class MLAAttentionSpec(SimpleNamespace):
    pass


class SlidingWindowSpec(SimpleNamespace):
    pass


class UniformTypeKVCacheSpecs(SimpleNamespace):
    pass


class MambaSpec(SimpleNamespace):
    pass


def full(**more: Any) -> FullAttentionSpec:
    fields: dict[str, Any] = {"block_size": 16, "page_size_bytes": 4096, "dtype": "torch.bfloat16"}
    return FullAttentionSpec(**(fields | more))


def window(tokens: int, **more: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(**vars(full(**more)), sliding_window=tokens)


def state(**more: Any) -> MambaSpec:
    fields: dict[str, Any] = {
        "block_size": 16, "page_size_bytes": 4096, "mamba_cache_mode": "align", "mamba_type": "gdn",
        "num_speculative_blocks": 0, "shapes": ((3, 64), (64, 16)), "dtypes": ("bf16", "float32"),
    }  # fmt: skip
    return MambaSpec(**(fields | more))


def engine(*specs: Any, **changes: Any) -> tuple[Any, Any]:
    """The two configuration objects of an engine with these KV-cache groups."""
    groups = [
        SimpleNamespace(layer_names=[f"layers.{n}.{k}" for k in range(2)], kv_cache_spec=spec,
                        is_eagle_group=False)
        for n, spec in enumerate(specs or (full(),))
    ]  # fmt: skip
    caches = SimpleNamespace(
        kv_cache_groups=groups, prefix_cacheable_group_ids=tuple(range(len(groups))),
        hash_block_size=changes.pop("hash_tokens", 16), kv_cache_layout="LBHNC",
        kv_tp_replicas=changes.pop("replicas", 1),
    )  # fmt: skip
    parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    model = {
        "model": "/models/tiny", "dtype": "bfloat16", "quantization": None, "seed": 0,
        "revision": "5" * 40, "enable_sleep_mode": False,
        "hf_config": SimpleNamespace(to_dict=lambda: {"rope_theta": changes.get("rope", 1.0)}),
    }  # fmt: skip
    config = SimpleNamespace(
        model_config=SimpleNamespace(**(model | changes.get("model", {}))),
        cache_config=SimpleNamespace(
            cache_dtype=changes.get("cache_dtype", "auto"),
            prefix_caching_hash_algo=changes.get("hash", "sha256_cbor"),
        ),
        load_config=SimpleNamespace(load_format="auto"),
        parallel_config=SimpleNamespace(**(parallel | changes.get("parallel", {}))),
    )
    return config, caches


def described(*specs: Any, pages: str = "p", version: str = "1", **changes: Any) -> KvSpec:
    config, caches = engine(*specs, **changes)
    layout = read_layout(config, caches)
    return describe(config, caches, layout, pages, version, Options())


def test_the_same_engine_has_the_same_identity() -> None:
    assert space_id(described(), "t") == space_id(described(), "t")


CHANGES: dict[str, Callable[[], KvSpec]] = {
    "page bytes": lambda: described(full(page_size_bytes=8192)),
    "block tokens": lambda: described(full(block_size=32)),
    "a window": lambda: described(window(100)),
    "another group": lambda: described(full(), full()),
    "memory layout": lambda: described(pages="q"),
    "engine version": lambda: described(version="2"),
    "rope": lambda: described(rope=2.0),
    "cache type": lambda: described(cache_dtype="fp8"),
    "compute type": lambda: described(model={"dtype": "float32"}),
    "quantization": lambda: described(model={"quantization": "awq"}),
    "its options": lambda: described(model={"quantization_config": {"ignore": ["lm_head"]}}),
    "revision": lambda: described(model={"revision": "6" * 40}),
    "model": lambda: described(model={"model": "/models/other"}),
    "ranks": lambda: described(parallel={"tensor_parallel_size": 2}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_another_engine_has_another_identity(what: str) -> None:
    assert space_id(CHANGES[what](), "t") != space_id(described(), "t")


LONGROPE = {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 4096}}


@pytest.mark.parametrize(
    ("config", "limit"),
    [(LONGROPE, 4096), ({"text_config": LONGROPE}, 4096), ({"model_type": "llama4"}, 32_768)],
)
def test_the_longest_context_belongs_to_the_identity_where_values_depend_on_it(
    config: dict[str, Any], limit: int
) -> None:
    def of(longest: int, config: dict[str, Any]) -> bytes:
        model = {"max_model_len": longest, "hf_config": SimpleNamespace(to_dict=lambda: config)}
        return space_id(described(model=model), "t")

    assert of(limit, config) == of(limit // 2, config) != of(limit + 1, config)
    assert of(limit + 1, config) == of(2 * limit, config)
    assert of(limit, {}) == of(limit + 1, {})


def test_the_processing_of_media_belongs_to_the_identity(tmp_path: Path) -> None:
    """The engine's hashes of an image contain its content, not the engine's options and files."""

    def of(**options: Any) -> bytes:
        media = SimpleNamespace(mm_processor_kwargs=None, media_io_kwargs={}, **options)
        return space_id(described(model={"model": str(tmp_path), "multimodal_config": media}), "t")

    weights(tmp_path, a=1)
    found = [space_id(described(model={"model": str(tmp_path)}), "t"), of()]
    found += [of(video_pruning_rate=0.5), of(mm_encoder_attn_dtype="fp8")]
    for text in ('{"max_pixels": 100}', '{"max_pixels": 200}'):
        (tmp_path / "preprocessor_config.json").write_text(text)
        found.append(of())
    assert len(set(found)) == 6 and of() == found[-1]


def test_what_adapters_change_belongs_to_the_identity() -> None:
    def of(**options: Any) -> bytes:
        config, caches = engine()
        config.lora_config = SimpleNamespace(**{"target_modules": None} | options)
        return space_id(
            describe(config, caches, read_layout(config, caches), "p", "1", Options()), "t"
        )

    plain = space_id(described(), "t")
    found = [of(target_modules=["k_proj"]), of(target_modules=["k_proj", "v_proj"])]
    found += [of(enable_tower_connector_lora=True), plain]
    assert len(set(found)) == 4 and of() == plain
    assert of(target_modules=["v_proj", "k_proj"]) == found[1]


ORDERED = "0123 page:hpdt|hptd"
HEADS = {"num_kv_heads": 2, "head_size": 32, "page_size_bytes": 2 * 16 * 2 * 32 * 2}


def test_pages_in_a_known_order_have_heads_and_dims() -> None:
    spec = described(full(**HEADS), window(100, **HEADS), pages=ORDERED)
    for group in spec.cache_groups:
        assert (group.kv_heads, group.head_dim, group.opaque_bytes) == (2, 32, 0)
    assert spec.group_block_bytes(0) == described(full(**HEADS)).group_block_bytes(0)
    assert order_of(spec, 0) is not None and order_of(spec, 1) is not None
    assert isinstance(Losses([("tiny", "q8")]).find(spec), Loss)


@pytest.mark.parametrize(
    "spec",
    [
        lambda: described(full(**HEADS), pages="0123"),
        lambda: described(full(**HEADS | {"page_size_bytes": 8192}), pages=ORDERED),
        lambda: described(full(), pages=ORDERED),
        lambda: described(full(**HEADS, dtype="torch.something"), pages=ORDERED),
        lambda: described(full(**HEADS), full(block_size=32), pages=ORDERED),
    ],
)
def test_pages_of_an_unknown_order_or_size_are_opaque(spec: Callable[[], KvSpec]) -> None:
    found = spec()
    assert all(group.opaque_bytes and not group.kv_heads for group in found.cache_groups)
    assert Losses([("tiny", "q8")]).find(found) in ("opaque", "dtype")


LATENT_DIMS = {"kv_lora_rank": 48, "qk_rope_head_dim": 16}


def latent(
    dims: dict[str, int] = LATENT_DIMS, pages: str = "0123 page:latent", **more: Any
) -> KvSpec:
    sizes = {"num_kv_heads": 1, "head_size": 64, "page_size_bytes": 16 * 64 * 2} | more
    spec = MLAAttentionSpec(**vars(full(**sizes)))
    ranks = {"parallel": {"tensor_parallel_size": 2}, "replicas": 2}
    config = {"hf_text_config": SimpleNamespace(**dims)}
    return described(spec, pages=pages, model=config, **ranks)


def test_pages_of_latents_have_dims_and_those_that_are_exact() -> None:
    """Codecs with a profile accept them; codecs for K and V do not."""
    spec = latent()
    (group,) = spec.cache_groups
    assert (group.kv_heads, group.head_dim, group.parts, group.shards) == (1, 64, 1, 1)
    assert spec.block_bytes == 2 * 16 * 64 * 2
    profile = profile_of(spec, exact_dims=16)
    assert isinstance(Losses([("tiny", "ecsq-mid")], [profile]).find(spec), Loss)
    assert Losses([("tiny", "q8")]).find(spec) == "opaque"
    other = profile_of(spec, exact_dims=8)
    assert Losses([("tiny", "ecsq-mid")], [other]).find(spec) == "shape"


@pytest.mark.parametrize(
    "spec",
    [
        lambda: latent(pages="0123"),
        lambda: latent({}),
        lambda: latent({"kv_lora_rank": 48}),
        lambda: latent(LATENT_DIMS | {"qk_rope_head_dim": 8}),
        lambda: latent(page_size_bytes=16 * 64 * 2 + 512),
        lambda: latent(num_kv_heads=2, page_size_bytes=2 * 16 * 64 * 2),
        lambda: latent(dtype="torch.uint8"),
    ],
)
def test_latents_of_other_dims_or_sizes_are_opaque(spec: Callable[[], KvSpec]) -> None:
    found = spec()
    (group,) = found.cache_groups
    assert group.opaque_bytes and not group.kv_heads
    profile = profile_of(latent(), exact_dims=16)
    assert Losses([("tiny", "ecsq-mid")], [profile]).find(found) in ("opaque", "dtype")


def test_a_window_needs_what_the_next_token_sees() -> None:
    """A token attends to itself and the previous tokens of the window: 17 tokens need one block of 16,
    18 need two."""
    for tokens, blocks in ((17, 1), (18, 2), (33, 2), (1, 1)):
        group = described(window(tokens)).cache_groups[0]
        assert (group.kind, group.window_blocks(16)) == ("window", blocks)


def test_similar_layers_that_the_engine_combines_are_one_group() -> None:
    layers = {"layers.0.0": full(), "layers.0.1": full(page_size_bytes=8192)}
    mixed = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=layers)
    assert described(mixed).cache_groups[0].opaque_bytes == 4096 + 8192


def test_groups_of_different_block_sizes_use_a_common_block() -> None:
    """Smaller pages hold fewer tokens: several of them form one block."""
    config, caches = engine(full(), window(100, block_size=48), full(block_size=32))
    layout = read_layout(config, caches)
    assert layout.block_tokens == 96 and layout.hash_tokens == 16
    assert [group.parts for group in layout.groups] == [6, 2, 3]
    assert [group.block_bytes for group in layout.groups] == [6 * 8192, 2 * 8192, 3 * 8192]
    assert [group.whole([1, 2, 3, 0, 5, 6], 0) for group in layout.groups] == [False, True, True]


TWO_STAGES = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}


def stages(*layers: int, ranks: int = 1, pages: str = "p", **more: Any) -> dict[int, RankPages]:
    """What the ranks report of pipeline stages with these numbers of layers."""
    parallel = TWO_STAGES | {"pipeline_parallel_size": len(layers), "tensor_parallel_size": ranks}
    found = {}
    for rank in range(len(layers) * ranks):
        config, caches = engine(full(**more), parallel=parallel)
        count = layers[rank // ranks]
        caches.kv_cache_groups[0].layer_names = [f"{rank // ranks}.{at}" for at in range(count)]
        digest = f"{count} layers of {pages}"
        found[rank] = RankPages(digest, layout=read_layout(config, caches))
    return found


def of_stages(reports: dict[int, RankPages], **more: Any) -> KvSpec:
    """The KvSpec of pipeline stages; the scheduler has the configuration of the first one."""
    own = reports[0].layout
    assert own is not None
    parallel = {"tensor_parallel_size": own.shards.per_stage, **TWO_STAGES}
    config, caches = engine(full(**more), parallel=parallel)
    layout, digest = whole_cache(own, reports)
    return describe(config, caches, layout, digest, "1", Options())


def test_each_rank_of_each_pipeline_stage_has_a_shard() -> None:
    reports = stages(2, 2, ranks=2)
    spec = of_stages(reports)
    assert (spec.tensor_parallel, spec.pipeline_parallel) == (2, 2)
    assert (spec.cache_groups[0].shards, spec.group_block_bytes(0)) == (4, 2 * 4096)
    shards = reports[0].layout.shards  # type: ignore[union-attr]
    assert [shards.of(rank) for rank in range(4)] == [0, 1, 2, 3]


def test_shards_are_as_large_as_the_largest_pipeline_stage() -> None:
    """With an undefined end in the smaller ones, which no lossy codec may read."""
    assert of_stages(stages(1, 3, pages=ORDERED, **HEADS), **HEADS).block_bytes == 3 * 4096
    even, uneven = (
        of_stages(stages(*layers, pages=ORDERED, **HEADS), **HEADS) for layers in ((2, 2), (1, 3))
    )
    assert (even.cache_groups[0].kv_heads, uneven.cache_groups[0].kv_heads) == (2, 0)
    assert isinstance(Losses([("tiny", "q8")]).find(even), Loss)
    assert Losses([("tiny", "q8")]).find(uneven) == "opaque"


def test_engines_that_divide_layers_in_other_ways_share_no_blocks() -> None:
    found = [of_stages(stages(*layers)) for layers in ((1, 3), (3, 1), (2, 2))]
    assert len({space_id(spec, "t") for spec in found}) == 3


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda ranks: ranks.pop(3), "the ranks' caches differ"),
        (lambda ranks: ranks.update({3: stages(2, 2, ranks=2, pages="q")[3]}), "caches differ"),
        (lambda ranks: ranks.update({2: RankPages("", "no driver")}), "no driver"),
        (
            lambda ranks: ranks.update(
                {at: stages(2, 2, ranks=2, block_size=32)[at] for at in (2, 3)}
            ),
            "in different ways",
        ),
    ],
    ids=["missing", "other pages", "refused", "other blocks"],
)
def test_pipeline_stages_that_do_not_fit_are_refused(
    change: Callable[[dict[int, RankPages]], object], why: str
) -> None:
    """A block of which one rank cannot have its part could not be loaded."""
    reports = stages(2, 2, ranks=2)
    change(reports)
    with pytest.raises(Unsupported, match=why):
        of_stages(reports)


def test_a_pipeline_stage_without_layers_of_a_group_is_refused() -> None:
    layers = {"layers.1.0": full(), "layers.1.1": full(page_size_bytes=8192)}
    mixed = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=layers)
    for other in (window(100), mixed):
        config, caches = engine(full(), other, parallel=TWO_STAGES)
        caches.kv_cache_groups[1].layer_names = []
        layout = read_layout(config, caches)
        assert layout.groups[1].pages == ()
        first = replace(layout, groups=layout.groups[1:])
        with pytest.raises(Unsupported, match="a pipeline stage has no layer of group 1"):
            find_pages(first, {}, 4)


def with_draft(
    folder: Path, cached: bool = True, name: str = "", formats: tuple[str, str] = ("auto", ""),
    **config: Any,
) -> KvSpec:  # fmt: skip
    """The KvSpec of an engine with a draft model. `name`: the option `weights`; `formats`: of the files of
    the model, and of those of the draft model."""
    vllm_config, caches = engine()
    vllm_config.load_config.load_format, of_draft = formats
    draft = SimpleNamespace(
        model=str(folder), dtype="bfloat16", quantization=None, seed=0,
        hf_config=SimpleNamespace(to_dict=lambda: config),
    )  # fmt: skip
    vllm_config.speculative_config = SimpleNamespace(
        draft_model_config=draft, uses_draft_kv_cache=lambda: cached,
        draft_load_config=SimpleNamespace(load_format=of_draft) if of_draft else None,
    )  # fmt: skip
    layout = read_layout(vllm_config, caches)
    return describe(vllm_config, caches, layout, "p", "1", Options(weights=name))


def test_the_weights_of_cached_draft_layers_belong_to_the_identity(tmp_path: Path) -> None:
    """Their pages are parts of the blocks. Speculation without such layers changes nothing."""
    one, two = weights(tmp_path / "one", a=1), weights(tmp_path / "two", a=2)
    found = [with_draft(one), with_draft(two), with_draft(one, rope=2), described()]
    assert len({space_id(spec, "t") for spec in found}) == 4
    assert space_id(with_draft(weights(tmp_path / "same", a=1)), "t") == space_id(found[0], "t")
    assert space_id(with_draft(one, cached=False), "t") == space_id(described(), "t")


def test_a_name_of_the_weights_does_not_stand_for_a_draft_model_with_files(tmp_path: Path) -> None:
    one, two = weights(tmp_path / "one", a=1), weights(tmp_path / "two", a=2)
    found = [with_draft(one, name="n"), with_draft(two, name="n"), with_draft(one, name="m")]
    found += [with_draft(one), with_draft(one, name="n", cached=False)]
    assert len({space_id(spec, "t") for spec in found}) == 5
    # Without files and without a commit the name stands for both.
    (tmp_path / "empty").mkdir()
    with pytest.raises(Unsupported, match="no weight files"):
        with_draft(tmp_path / "empty")
    assert with_draft(tmp_path / "empty", name="n").weights.startswith("n draft named ")


def test_a_draft_model_is_identified_by_what_the_engine_loads(tmp_path: Path) -> None:
    """Its format may be another one than the model's."""
    one, two = weights(tmp_path / "one", a=1), weights(tmp_path / "two", a=2)
    files = ("dummy", "auto")
    assert with_draft(one, formats=files).weights != with_draft(two, formats=files).weights
    for formats in (("auto", "dummy"), ("dummy", "")):
        assert with_draft(one, formats=formats).weights == with_draft(two, formats=formats).weights


def test_replicated_ranks_share_a_shard() -> None:
    spec = described(parallel={"tensor_parallel_size": 4}, replicas=2)
    assert spec.cache_groups[0].shards == 2
    config, caches = engine(parallel={"tensor_parallel_size": 4}, replicas=2)
    shards = read_layout(config, caches).shards
    assert [shards.of(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert [shards.writes(rank) for rank in range(4)] == [True, False, True, False]


@pytest.mark.parametrize(
    "specs, changes, why",
    [
        ((SimpleNamespace(block_size=16, page_size_bytes=4096),), {}, "SimpleNamespace caches"),
        ((state(mamba_cache_mode="none"),), {}, "the engine's prefix caching"),
        ((state(num_speculative_blocks=1),), {}, "speculative decoding"),
        ((state(), full(block_size=32)), {}, "states every 16 tokens with blocks of 32"),
        (
            (full(),),
            {"parallel": TWO_STAGES | {"distributed_executor_backend": "ray"}},
            "pipeline_parallel_size=2 with the executor ray",
        ),
        ((full(),), {"parallel": TWO_STAGES | {"nnodes": 2}}, "pipeline_.* on several hosts"),
        ((full(),), {"parallel": {"decode_context_parallel_size": 2}}, "decode_context_parallel"),
        ((full(),), {"hash_tokens": 24}, "hashes of 24"),
    ],
)
def test_unsupported_caches_are_refused_with_a_reason(
    specs: tuple[Any, ...], changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(Unsupported, match=why):
        read_layout(*engine(*specs, **changes))


def test_only_the_last_state_is_needed() -> None:
    spec = described(full(block_size=32), state(block_size=32))
    assert [group.kind for group in spec.cache_groups] == ["full", "state"]
    assert list(spec.cache_groups[1].needed_blocks(32, 5)) == [4]


def test_states_of_other_types_have_another_identity() -> None:
    """Their pages have equal lengths, and the engine's own tensors treat both as bytes."""
    one = described(full(), state())
    for changes in ({"dtypes": ("fp16", "float32")}, {"shapes": ((64, 3), (64, 16))}):
        other = described(full(), state(**changes))
        assert space_id(one, "t") != space_id(other, "t")


def test_forgeable_hashes_are_refused_with_the_option_to_set() -> None:
    config, _ = engine(hash="xxhash_cbor")
    with pytest.raises(ValueError, match="--prefix-caching-hash-algo sha256_cbor"):
        check_hashes(config, {})
    for algorithm in ("sha256", "sha256_cbor"):
        config, _ = engine(hash=algorithm)
        assert check_hashes(config, {}) == ""
        assert "PYTHONHASHSEED=7" in check_hashes(config, {"PYTHONHASHSEED": "7"})


def weights(folder: Path, body: bytes = bytes(1 << 20), **header: Any) -> Path:
    folder.mkdir(exist_ok=True)
    head = json.dumps(header).encode()
    data = len(head).to_bytes(8, "little") + head + body
    (folder / "model.safetensors").write_bytes(data)
    return folder


def test_weights_are_identified_by_content_not_by_path(tmp_path: Path) -> None:
    one = folder_digest(weights(tmp_path / "one", a=1))
    assert folder_digest(weights(tmp_path / "two", a=1)) == one
    body = bytearray(1 << 20)
    body[-1] = 1
    for number, other in enumerate(
        (
            weights(tmp_path / "header", a=2),
            weights(tmp_path / "last byte", bytes(body), a=1),
            weights(tmp_path / "size", bytes((1 << 20) + 1), a=1),
            weights(tmp_path / "scaled", b"\1" * (1 << 20), a=1),
        )
    ):
        assert folder_digest(other) != one, number


def test_a_change_of_any_tensor_changes_the_identity_of_the_weights(tmp_path: Path) -> None:
    """Training may change a small part of a model: some tensors, or rows at the end of one."""
    tensors, nbytes = 200, 20_000
    header = {
        f"{at}": {"dtype": "U8", "data_offsets": [at * nbytes, (at + 1) * nbytes]}
        for at in range(tensors)
    }
    body = np.random.default_rng(0).integers(0, 256, (tensors, nbytes), dtype=np.uint8)
    found = [folder_digest(weights(tmp_path, body.tobytes(), **header))]
    for tensor in range(7, tensors, 31):
        for changed in (slice(None), slice(nbytes - 100, None)):
            other = body.copy()
            other[tensor, changed] += 1
            found.append(folder_digest(weights(tmp_path, other.tobytes(), **header)))
    assert len(set(found)) == len(found) == 15


def test_a_folder_of_a_hub_s_cache_has_the_identity_of_its_repository(tmp_path: Path) -> None:
    """With HF_HUB_OFFLINE, vLLM replaces the one by the other."""
    commit = "5" * 40  # of `described`
    folder = tmp_path / "models--someone--tiny" / "snapshots" / commit
    folder.mkdir(parents=True)
    weights(folder, a=1)
    offline = described(model={"model": str(folder), "revision": None})
    online = described(model={"model": "someone/tiny"})
    assert offline.model == "tiny" and offline.weights == f"rev:{commit}"
    assert space_id(offline, "t") == space_id(online, "t")
    other = shutil.copytree(folder, tmp_path / commit)
    copied = described(model={"model": str(other)})
    assert copied.model == commit and copied.weights.startswith("files:")


def test_weights_without_an_identity_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="no weight files"):
        folder_digest(tmp_path)
    model = SimpleNamespace(model="nobody/nothing", revision="main", seed=3)
    with pytest.raises(Unsupported, match="'weights'"):
        weights_identity(model, "auto")
    assert weights_identity(model, "dummy") == "dummy:3"


def test_an_adapter_is_identified_by_content(tmp_path: Path) -> None:
    adapters = Adapters()

    def extras(folder: Path | None) -> bytes | None:
        lora = folder and SimpleNamespace(lora_path=str(folder), lora_name="a")
        return adapters.extras(lora)

    assert extras(None) == b""
    one = extras(weights(tmp_path / "one", a=1))
    assert one and extras(weights(tmp_path / "two", a=1)) == one
    assert extras(weights(tmp_path / "three", a=22)) not in (one, None)
    assert extras(tmp_path / "missing") is None
    # The engine caches these files by path, so either content is possible.
    assert extras(weights(tmp_path / "one", a=22)) is None
    assert extras(tmp_path / "one") is None and extras(tmp_path / "two") == one
    assert extras(weights(tmp_path / "one", a=1)) is None, "it may have what came between"
    adapters = Adapters()
    assert extras(weights(tmp_path / "one", a=22)) == extras(tmp_path / "three")
    adapters = Adapters()
    (tmp_path / "one" / "adapter_config.json").write_text('{"lora_alpha": 8}')
    scaled = extras(tmp_path / "one")
    assert scaled not in (None, extras(tmp_path / "three"))
    (tmp_path / "one" / "adapter_config.json").write_text('{"lora_alpha": 16}')
    assert extras(tmp_path / "one") is None
    adapters = Adapters()
    assert extras(tmp_path / "one") not in (None, scaled)


def test_an_adapter_is_found_where_the_engine_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    adapters = Adapters()
    weights(tmp_path / "mine", a=1)

    def extras(path: str) -> bytes | None:
        lora = SimpleNamespace(lora_path=path, lora_name="sql")
        return adapters.extras(lora)

    found = extras(str(tmp_path / "mine"))
    assert found and extras("~/mine") == found
    assert not caplog.records
    for _ in range(2):
        assert extras("someone/else") is None
    (record,) = caplog.records
    assert "no blocks of the adapter sql: someone/else: " in record.getMessage()


@pytest.mark.parametrize("name", ["named", "numbered"])
def test_media_that_the_engine_only_numbers_are_not_identified(name: str) -> None:
    config, _ = engine()
    assert hashes_media(config)
    size = 0 if name == "numbered" else 4
    config.model_config.multimodal_config = SimpleNamespace(mm_processor_cache_gb=size)
    config.cache_config.enable_prefix_caching = False
    assert hashes_media(config) is (name == "named")
    config.cache_config.enable_prefix_caching = True
    assert hashes_media(config)


def test_caches_that_no_later_request_could_use_are_refused() -> None:
    config, caches = engine()
    config.model_config.is_prefix_caching_supported = False
    with pytest.raises(Unsupported, match="does not support prefix caching for this model"):
        read_layout(config, caches)
    config.cache_config.enable_prefix_caching = True  # its user insists
    assert read_layout(config, caches).block_tokens == 16
    config.aux_output_config = SimpleNamespace(enabled=True)
    with pytest.raises(Unsupported, match="--enable-return-routed-experts"):
        read_layout(config, caches)
    with pytest.raises(Unsupported, match="depends on the tokens after it"):
        read_layout(*engine(full(non_causal=True)))


@pytest.mark.parametrize("error", [AttributeError, ValueError, AssertionError, KeyError])
def test_pages_of_unknown_order_are_stored_without_loss(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """The exception may be any of those that the engine's own calls raise in other versions."""

    def says(*_: object) -> str:
        raise error("changed")

    types = {name: name for name in ("bfloat16", "float16", "float32")}
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(**types))
    backend = SimpleNamespace(ops=None, _get_attn_isa=says)
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.cpu_attn", backend)
    tensor = MagicMock(device=SimpleNamespace(type="cpu"), shape=(8, 2, 16, 128), dtype="bfloat16")
    tensor.dim.return_value = 4
    assert page_order(tensor, 1) == ""
    assert tensor.dim.called


class Strided:
    """The attributes of a GPU tensor that the plugin reads. Strides count elements."""

    def __init__(self, array: Any, dtype: str = "torch.bfloat16") -> None:
        self.shape, self.dtype = array.shape, dtype
        self._strides = tuple(step // array.itemsize for step in array.strides)

    def stride(self) -> tuple[int, ...]:
        return self._strides


BLOCKS, KV_HEADS, TOKENS, DIMS = 3, 2, 16, 8


def cache_of(layout: str, kernel_blocks: int = 1, heads: int = KV_HEADS) -> Any:
    """An engine's view, [blocks, heads, tokens, K and V], of memory in this layout; a kernel's block
    has fewer tokens."""
    sizes = {"b": BLOCKS * kernel_blocks, "h": heads, "n": TOKENS // kernel_blocks, "c": 2 * DIMS}
    memory = np.zeros([sizes[axis] for axis in layout], np.uint16)
    return memory.transpose([layout.index(axis) for axis in "bhnc"])


@pytest.mark.parametrize("backend", BY_STRIDES)
@pytest.mark.parametrize("kernel_blocks", [1, 4])
@pytest.mark.parametrize("heads", [1, KV_HEADS])
@pytest.mark.parametrize("layout", ["bhnc", "bnhc"])
def test_the_order_of_gpu_pages_is_derived_from_strides(
    layout: str, heads: int, kernel_blocks: int, backend: str
) -> None:
    """K and V that the engine's kernels write are found at the positions of the order."""
    cache = cache_of(layout, kernel_blocks, heads)
    order = page_order(Strided(cache), kernel_blocks, backend)
    sizes = HEADS | {
        "num_kv_heads": heads, "head_size": DIMS, "page_size_bytes": 2 * TOKENS * heads * DIMS * 2,
    }  # fmt: skip
    spec = described(full(**sizes), pages=f"0123 page:{order}")
    found = order_of(spec, 0)
    assert found is not None and spec.block_tokens == TOKENS
    # The mapping that `reshape_and_cache_flash` gets.
    k, v = np.split(cache.transpose(0, 2, 1, 3), 2, axis=-1)
    numbers = np.arange(2 * TOKENS * heads * DIMS, dtype=np.uint16).reshape(2, TOKENS, heads, DIMS)
    block = slice(kernel_blocks, 2 * kernel_blocks)
    for half, values in zip((k, v), numbers, strict=True):
        half[block] = values.reshape(kernel_blocks, -1, heads, DIMS)
    memory = cache.base if cache.base is not None else cache
    page = memory[block].tobytes()
    ordered = bytearray(len(page))
    reorder_pages(2, 2, found.heads, found.tokens, found.dims, page, ordered, False)
    assert ordered == numbers.tobytes()


@pytest.mark.parametrize(
    ("tensor", "backend"),
    [
        (Strided(cache_of("bhcn")), "FLASH_ATTN"),
        (Strided(cache_of("hbnc")[:, :, :, ::2]), "FLASH_ATTN"),
        (Strided(cache_of("bhnc"), "torch.uint8"), "FLASH_ATTN"),
        (Strided(cache_of("bhnc"), "torch.float8_e4m3fn"), "FLASHINFER"),
        (Strided(cache_of("bhnc")[:, 0]), "FLASH_ATTN"),
        (Strided(cache_of("bhnc")[..., :15]), "FLASH_ATTN"),
    ],
)
def test_other_strides_or_types_have_no_known_order(tensor: Strided, backend: str) -> None:
    assert page_order(tensor, 1, backend) == ""


@pytest.mark.parametrize("backend", LATENTS)
def test_latents_are_ordered_by_token_or_have_no_known_order(backend: str) -> None:
    memory = np.zeros((BLOCKS, TOKENS, 2 * DIMS), np.uint16)
    for cache in (memory, memory[:, None]):
        assert page_order(Strided(cache), 1, backend) == "latent"
    for other in (
        Strided(memory, "torch.uint8"),
        Strided(memory[:, :, :-1]),
        Strided(memory.transpose(0, 2, 1)),
        Strided(memory.reshape(BLOCKS, 2, -1, 2 * DIMS)),
    ):
        assert page_order(other, 1, backend) == ""


def test_the_kind_of_attention_is_read_from_the_engine() -> None:
    backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN")
    layers = {"a": SimpleNamespace(attn_backend=backend), "b": SimpleNamespace()}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    assert backends_of(config) == {"a": "FLASH_ATTN"}
    assert backends_of(SimpleNamespace()) == {}
