"""Which bytes of the blocks of a space make the blocks of another one, compared element by element."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier import Group, KvSpec
from kvtier.key import space_secret
from kvtier_daemon.catalog import KnownSpace
from kvtier_daemon.catalog.spaces import sizes_of
from kvtier_daemon.codec.losses import Losses
from kvtier_daemon.codec.resharding import family_of, runs_of, sources, why_not, why_not_from
from kvtier_daemon.tenant import Tenant
from support.heads import DIGEST, ORDERS, block, ranks_spec
from support.specs import spec_of

KEY = bytes(range(32))
replace = msgspec.structs.replace


def made(source: KvSpec, target: KvSpec, group: int, shard: int) -> bytes:
    """A block of the target, of the blocks of the source. No byte is written twice or left out."""
    runs, nbytes = runs_of(source, target, group), target.group_block_bytes(group)
    found, counts = bytearray(nbytes), bytearray(nbytes)
    for other in sources(source, target, group, shard):
        one = runs[other, shard]
        text = block(source, group, other, KEY)
        one.copy(memoryview(text), memoryview(found))
        for number in range(one.count):
            for at in range(
                one.target_at + number * one.target_step,
                one.target_at + number * one.target_step + one.nbytes,
            ):
                counts[at] += 1
    assert counts == bytes([1]) * nbytes
    return bytes(found)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("theirs", "ours"), [(4, 2), (2, 4), (4, 1), (1, 4), (2, 1), (8, 2)])
def test_each_element_is_where_the_other_engine_expects_it(
    order: str, theirs: int, ours: int
) -> None:
    group = {"heads": 8, "head_dim": 16, "layers": 2}
    source, target = (ranks_spec(ranks, group, order=order) for ranks in (theirs, ours))
    assert not why_not(source) and not why_not_from(source, target)
    for shard in range(target.cache_groups[0].shards):
        assert made(source, target, 0, shard) == block(target, 0, shard, KEY)


@settings(max_examples=60, deadline=None)
@given(
    order=st.permutations("hptd").map("".join),
    split=st.sampled_from(["", "t", "d", "td"]),
    heads=st.sampled_from([1, 2, 3, 4, 6, 12]),
    ranks=st.tuples(*[st.sampled_from([1, 2, 3, 4, 6, 12])] * 2),
    layers=st.integers(1, 3),
    dims=st.sampled_from([2, 4, 16]),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    place=st.integers(0, 3),
)
def test_any_order_that_does_not_divide_heads(
    order: str, split: str, heads: int, ranks: tuple[int, int], layers: int, dims: int, dtype: str,
    place: int,
) -> None:  # fmt: skip
    """Also those that no engine has. K and V in one order, as the distance of both is the same then. Ranks
    with one head may tell any place of the heads."""
    for axis in split:
        order = order.replace(axis, f"{axis}/2") + f"{axis}%2"
    group = {"heads": heads, "head_dim": dims, "layers": layers}
    if any(heads % min(heads, one) for one in ranks):
        return
    axes = [axis for axis in re.findall(r"[hptd](?:[/%]\d)?", order) if axis != "h"]
    moved = "".join([*axes[:place], "h", *axes[place:]])
    orders = [moved if heads // min(heads, one) == 1 else order for one in ranks]
    source, target = (
        ranks_spec(one, group, order=f"{text}|{text}", dtype=dtype, block_tokens=4)
        for one, text in zip(ranks, orders, strict=True)
    )
    few, many = sorted(one.cache_groups[0].shards for one in (source, target))
    if many % few:
        assert "cache_groups[0].shards" in why_not_from(source, target)
        return
    assert why_not(source) == why_not(target) == why_not_from(source, target) == ""
    assert family_of(source, "a") == family_of(target, "a") != b""
    for shard in range(target.cache_groups[0].shards):
        assert made(source, target, 0, shard) == block(target, 0, shard, KEY)


@pytest.mark.parametrize(
    "order", ["heads first", "tokens first", "heads first, two blocks of the kernel"]
)
def test_a_rank_with_one_head_has_the_bytes_of_each_order_by_strides(order: str) -> None:
    """vLLM's plugin cannot see where the heads are then."""
    for few in (4, 2, 1):
        one = ranks_spec(8, {"heads": 8}, order="tokens first")
        more = ranks_spec(few, {"heads": 8}, order=order)
        assert family_of(one, "a") == family_of(more, "a") != b""
        for source, target in ((one, more), (more, one)):
            assert not why_not_from(source, target)
            for shard in range(target.cache_groups[0].shards):
                assert made(source, target, 0, shard) == block(target, 0, shard, KEY)


@pytest.mark.parametrize("ranks", [(4, 2), (2, 2)])
def test_ranks_with_heads_at_different_places_are_refused(ranks: tuple[int, int]) -> None:
    one, other = (
        ranks_spec(count, {"heads": 8}, order=order)
        for count, order in zip(ranks, ("heads first", "tokens first"), strict=True)
    )
    for pair in ((one, other), (other, one)):
        assert why_not_from(*pair).startswith("layout: ")


def test_copies_and_latents_are_whole_blocks_and_each_group_has_its_own_heads() -> None:
    """A model with a window and a draft model whose group has fewer heads than ranks; and latents."""
    groups = (
        {"heads": 8}, {"heads": 8, "kind": "window", "window_tokens": 64}, {"heads": 2, "layers": 1},
    )  # fmt: skip
    source, target = ranks_spec(4, *groups), ranks_spec(2, *groups)
    assert [kind.shards for kind in source.cache_groups] == [4, 4, 2]
    assert family_of(source, "a") == family_of(target, "a") and not why_not_from(source, target)
    for group, shard in product(range(3), range(2)):
        assert made(source, target, group, shard) == block(target, group, shard, KEY)
    latent = {"parts": 1, "head_dim": 48}
    order = "latent=32+16"
    source, target = ranks_spec(4, latent, order=order), ranks_spec(1, latent, order=order)
    assert family_of(source, "a") == family_of(target, "a") != b""
    assert made(source, target, 0, 0) == block(target, 0, 0, KEY)


@dataclass
class Refused:
    field: str
    group: dict[str, Any]
    changes: dict[str, Any]


@pytest.mark.parametrize(
    "one",
    [
        Refused("pipeline_parallel", {}, {"pipeline_parallel": 2}),
        Refused("strides", {}, {"strides": (1, 2)}),
        Refused("cache_groups[1].kind", {"kind": "state", "state_bytes": 64}, {}),
        Refused("cache_groups[1].opaque_bytes", {"opaque_bytes": 4096}, {}),
        Refused("layout", {}, {"layout": "LBHNC"}),
        Refused("layout", {}, {"layout": "layer,part,token,head,dim"}),
        Refused("layout", {}, {"layout": "x page:h/2pth%2d|h/2pth%2d"}),
        Refused("layout", {}, {"layout": "x page:hptd|pthd"}),
        Refused("layout", {}, {"layout": "x page:phtd|pthd"}),
        Refused("layout", {}, {"layout": "x page:htpd"}),
        Refused("layout", {"parts": 3}, {}),
    ],
    ids=str,
)
def test_what_cannot_be_resharded_is_refused_with_its_field(one: Refused) -> None:
    spec = ranks_spec(2, {"heads": 4}, {"heads": 4} | one.group, **one.changes)
    assert why_not(spec).startswith(f"{one.field}: ")
    assert family_of(spec, "a") == b""


def test_latents_of_which_ranks_hold_different_ones_are_refused() -> None:
    group = Group(layers=1, kv_heads=2, head_dim=48, parts=1)
    one = replace(ranks_spec(1, order="latent=32+16"), cache_groups=(group,))
    two = replace(one, cache_groups=(replace(group, kv_heads=1, shards=2),), tensor_parallel=2)
    assert family_of(one, "a") == family_of(two, "a") != b""
    assert why_not_from(one, two).startswith("cache_groups[0].shards: ")


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"}, {"weights": "other"}, {"dtype": "float16"}, {"block_tokens": 64}, {"rope": "x"},
        {"quantization": "x"}, {"attention": "x"}, {"engine": "x"}, {"engine_layout": "x"},
        {"layout": f"LBHNC {DIGEST} page:hptd|hptd"}, {"layout": f"BLHNC {DIGEST} page:thpd|thpd"},
        {"layout": f"LBHNC x{DIGEST} page:thpd|thpd"},
    ],
    ids=str,
)  # fmt: skip
def test_spaces_that_differ_in_anything_else_have_another_family(change: dict[str, Any]) -> None:
    two, four = ranks_spec(2), ranks_spec(4)
    assert family_of(two, "a") == family_of(four, "a")
    assert family_of(two, "a") != family_of(two, "b")
    assert family_of(two, "a") != family_of(replace(four, **change), "a")
    group = four.cache_groups[0]
    for name in ("layers", "head_dim", "kv_heads", "shards"):
        other = replace(four, cache_groups=(replace(group, **{name: 2 * getattr(group, name)}),))
        assert family_of(other, "a") != family_of(two, "a")
    window = replace(group, kind="window", window_tokens=64)
    assert family_of(replace(four, cache_groups=(window,)), "a") != family_of(two, "a")


def test_only_spaces_with_a_family_of_a_tenant_that_reshards_have_keys_in_common() -> None:
    plain, lossy, off = (
        Tenant("a", bytes(32), 0, None, losses=Losses(codecs), reshards=on)  # type: ignore[arg-type]
        for codecs, on in (([], True), ([("ranks", "fp8")], True), ([], False))
    )
    for tenant in (plain, lossy, off):
        tenant.accepted = (bytes(31) + b"1",)

        def opened(spec: KvSpec, tenant: Tenant = tenant) -> KnownSpace:
            return KnownSpace(0, tenant.identity_of(spec), spec, spec.places, sizes_of(spec))

        two, four, other = map(opened, (ranks_spec(2), ranks_spec(4), spec_of()))
        for space in (two, four, other):
            has_own = tenant is not plain or space is other
            named = space.identity if has_own else family_of(space.spec, "a")
            assert tenant.secret_of(space) == space_secret(bytes(32), named)
            assert tenant.accepted_of(space) == [space_secret(bytes(31) + b"1", named)]
        assert (tenant.secret_of(two) == tenant.secret_of(four)) == (tenant is plain)
    assert lossy.identity_of(ranks_spec(2)) != plain.identity_of(ranks_spec(2))
