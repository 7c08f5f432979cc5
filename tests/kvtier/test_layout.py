"""Identity: two caches share blocks only if all their properties are equal."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvtier import Group, KvSpec, SpecError
from kvtier.layout import space_id
from support.specs import changed_value

SPEC = KvSpec.groups(
    [
        Group(layers=4, kv_heads=2, head_dim=64),
        Group(kind="window", layers=2, kv_heads=2, head_dim=64, window_tokens=64),
    ],
    model="m", dtype="bfloat16", block_tokens=16, weights="rev:1",
)  # fmt: skip

IDENTITY_OF_SPEC = "bd0f75f3c845266c8b79da8494a223e297087004bd968a1b94b0811368f958de"


@pytest.mark.parametrize("name", KvSpec.__struct_fields__)
def test_every_field_of_the_description_is_part_of_the_identity(name: str) -> None:
    other = msgspec.structs.replace(SPEC, **{name: changed_value(SPEC, name)})
    assert space_id(other, "t") != space_id(SPEC, "t")


@pytest.mark.parametrize("name", Group.__struct_fields__)
@pytest.mark.parametrize("place", [0, 1])
def test_every_field_of_every_group_is_part_of_the_identity(name: str, place: int) -> None:
    groups = list(SPEC.cache_groups)
    groups[place] = msgspec.structs.replace(
        groups[place], **{name: changed_value(groups[place], name)}
    )
    other = msgspec.structs.replace(SPEC, cache_groups=tuple(groups))
    assert space_id(other, "t") != space_id(SPEC, "t")


def test_the_tenant_and_the_order_of_groups_are_part_of_the_identity() -> None:
    assert space_id(SPEC, "t") != space_id(SPEC, "u")
    turned = msgspec.structs.replace(SPEC, cache_groups=SPEC.cache_groups[::-1])
    assert space_id(turned, "t") != space_id(SPEC, "t")


def test_text_can_not_move_between_fields() -> None:
    one = msgspec.structs.replace(SPEC, model="ab", weights="c")
    two = msgspec.structs.replace(SPEC, model="a", weights="bc")
    assert space_id(one, "t") != space_id(two, "t")


def test_identity_does_not_change_between_versions_by_accident() -> None:
    # Another value here makes all existing caches unusable: change IDENTITY_VERSION deliberately.
    assert space_id(SPEC, "t").hex() == IDENTITY_OF_SPEC


def dense(**changes: Any) -> KvSpec:
    fields: dict[str, Any] = {
        "model": "llama-3-8b", "layers": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16",
        "block_tokens": 16, "weights": "rev:5f0b02c",
    }  # fmt: skip
    return KvSpec.dense(**(fields | changes))


def test_an_8b_model_has_128_kib_a_token() -> None:
    assert dense().block_bytes == 16 * 128 * 1024


def test_ranks_have_their_share_of_heads() -> None:
    spec = dense(tensor_parallel=4)
    assert spec.block_bytes == dense().block_bytes // 4
    assert spec.cache_groups[0].shards == 4


def test_ranks_beyond_the_heads_share_shards() -> None:
    spec = dense(tensor_parallel=16)
    assert spec.cache_groups[0].shards == 8
    assert spec.cache_groups[0].kv_heads == 1


def test_pipeline_stages_are_shards() -> None:
    spec = dense(pipeline_parallel=2, tensor_parallel=2)
    assert spec.cache_groups[0].shards == 4
    assert spec.block_bytes * 4 == dense().block_bytes


def test_mla_has_one_latent_part_and_one_shard() -> None:
    spec = KvSpec.mla(
        model="ds", layers=61, latent_dim=512, rope_dim=64, dtype="bfloat16", block_tokens=64,
        weights="rev:1", tensor_parallel=8,
    )  # fmt: skip
    assert spec.block_bytes == 61 * 576 * 2 * 64
    assert spec.cache_groups[0].shards == 1


def test_states_do_not_grow_with_tokens() -> None:
    group = Group(kind="state", layers=24, state_bytes=4096)
    assert group.block_bytes("bfloat16", 16) == group.block_bytes("bfloat16", 256) == 24 * 4096


def test_needed_blocks_follow_the_kind() -> None:
    full = Group(layers=1, kv_heads=1, head_dim=8)
    window = Group(kind="window", layers=1, kv_heads=1, head_dim=8, window_tokens=33)
    state = Group(kind="state", layers=1, state_bytes=8)
    assert list(full.needed_blocks(16, 5)) == [0, 1, 2, 3, 4]
    assert list(window.needed_blocks(16, 5)) == [2, 3, 4]
    assert list(window.needed_blocks(16, 2)) == [0, 1]
    assert list(state.needed_blocks(16, 5)) == [4]
    assert list(state.needed_blocks(16, 0)) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"weights": ""}, {"weights": "  "}, {"model": ""}, {"dtype": "float4"}, {"layers": 0},
        {"kv_heads": 0}, {"block_tokens": 0}, {"block_tokens": -16}, {"tensor_parallel": 3},
        {"pipeline_parallel": 5}, {"layers": 1 << 40}, {"window_tokens": -1},
        {"block_tokens": 1 << 63}, {"window_tokens": 1 << 31}, {"strides": (1,) * 20_000},
        {"rope": "x" * 20_000}, {"kv_heads": 2048, "tensor_parallel": 2048},
    ],
    ids=str,
)  # fmt: skip
def test_invalid_descriptions_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        dense(**changes)
