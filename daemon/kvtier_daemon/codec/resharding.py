"""Families of spaces that differ in tensor parallelism only, and which bytes of blocks of one make a block of
another one. No I/O.

Of all heads, shard `i` of `n` has the heads from `i / n` to `(i + 1) / n`. In a page, the bytes of a range of
heads are runs of equal length at equal distances, if the order of elements is known (`arranged`) and does not
divide the heads.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

import msgspec

from kvtier.layout import DTYPE_BYTES, PAGE_MARK, KvSpec
from kvtier_daemon.codec.arranged import order_of
from kvtier_daemon.codec.grid import PAGES
from kvtier_kernels import copy_runs

FAMILY = b"kvtier.family.1\0"
# vLLM's digest of the tensors' shapes, which depends on the heads of a rank.
SHAPES = re.compile(rf" [0-9a-f]{{32}}(?= {PAGE_MARK}\S+$)")
TOKENS_JOINED = re.compile(r"t/(\d+)t%\1(?!\d)")
HEADS_DIVIDED = re.compile(rf"(?:^| ){PAGE_MARK}\S*h[/%]\S*$")


@dataclass(slots=True, frozen=True)
class Runs:
    """`count` runs of `nbytes` bytes: where the first one is, and how far it is to the next one."""

    count: int
    nbytes: int
    source_at: int
    source_step: int
    target_at: int
    target_step: int

    def copy(self, source: memoryview, target: memoryview) -> None:
        copy_runs(
            target, source, self.count, self.nbytes, self.target_at, self.target_step, self.source_at,
            self.source_step,
        )  # fmt: skip


def why_not(spec: KvSpec) -> str:
    """Return the field that prevents resharding of this space's blocks, and the reason; empty if none."""
    if spec.pipeline_parallel > 1:
        return "pipeline_parallel: a shard is not a range of heads of all layers"
    if spec.strides:
        return "strides: the place of a head in a page is not known"
    known = set[tuple[int, int, int]]()  # models have many groups with pages of one shape
    for number, kind in enumerate(spec.cache_groups):
        shape = kind.kv_heads * kind.shards, kind.head_dim, kind.parts
        if kind.kind == "state":
            return f"cache_groups[{number}].kind: a state has no heads"
        if kind.opaque_bytes:
            return (
                f"cache_groups[{number}].opaque_bytes: the place of a head in a page is not known"
            )
        if not (shape in known or _is_latent(spec, number) or head_bytes(spec, number)):
            return "layout: the place of a head in a page is not known"
        known.add(shape)
    return ""


def _is_latent(spec: KvSpec, group: int) -> bool:
    return PAGES in spec.layout and spec.cache_groups[group].parts == 1


def head_bytes(spec: KvSpec, group: int) -> int:
    """Return how far it is from one head to the next in a page; 0 if that is not known."""
    order = order_of(_whole(spec), group)
    if order is None or HEADS_DIVIDED.search(spec.layout):
        return 0
    kind = spec.cache_groups[group]
    if (heads := kind.kv_heads * kind.shards) == 1:
        return spec.group_block_bytes(group) // kind.layers
    places = memoryview(order.heads).cast("I")  # of K, then of V
    steps = {places[at + 1] - places[at] for at in (0, heads)}
    return steps.pop() * DTYPE_BYTES[spec.dtype] if len(steps) == 1 else 0


def _whole(spec: KvSpec) -> KvSpec:
    """The space as it is without tensor parallelism."""
    replace = msgspec.structs.replace
    groups = (
        replace(kind, shards=1, kv_heads=kind.kv_heads * kind.shards) for kind in spec.cache_groups
    )
    layout = SHAPES.sub("", spec.layout)
    return replace(spec, tensor_parallel=1, layout=layout, cache_groups=tuple(groups))


def _without_heads(layout: str) -> str:
    """The order of elements without the place of the heads. For a rank with one head, any place is true."""
    before, mark, order = layout.rpartition(PAGE_MARK)
    return before + mark + TOKENS_JOINED.sub("t", order.replace("h", ""))


def family_of(spec: KvSpec, tenant: str) -> bytes:
    """Return what the spaces of a tenant have in common that differ in tensor parallelism only: 32 bytes, or
    none if blocks of this space cannot be resharded."""
    if why_not(spec):
        return b""
    whole = _whole(spec)
    whole = msgspec.structs.replace(whole, layout=_without_heads(whole.layout))
    described = msgspec.json.encode({"tenant": tenant, "spec": whole})
    return hashlib.sha256(FAMILY + described).digest()


def why_not_from(source: KvSpec, target: KvSpec) -> str:
    """As `why_not`, for two spaces of one family."""
    pairs = zip(source.cache_groups, target.cache_groups, strict=True)
    for number, (theirs, ours) in enumerate(pairs):
        few, many = sorted((theirs.shards, ours.shards))
        if many % few or (few < many and _is_latent(target, number)):
            return f"cache_groups[{number}].shards: {theirs.shards} cannot become {ours.shards}"
        has_heads = theirs.kv_heads > 1 and ours.kv_heads > 1
        if has_heads and _whole(source).layout != _whole(target).layout:
            return f"layout: {source.layout} has heads at another place than {target.layout}"
    return ""


def sources(source: KvSpec, target: KvSpec, group: int, shard: int) -> range:
    """Return the shards of the source that have bytes of this shard of the target."""
    theirs, ours = source.cache_groups[group].shards, target.cache_groups[group].shards
    first = shard * theirs // ours
    return range(first, first + max(1, theirs // ours))


def runs_of(source: KvSpec, target: KvSpec, group: int) -> dict[tuple[int, int], Runs]:
    """Return which bytes of a block of each shard of the source are where in a block of each shard of the
    target; only those pairs that have bytes in common."""
    theirs, ours = source.cache_groups[group], target.cache_groups[group]
    nbytes = target.group_block_bytes(group)
    # Where the heads are is told by a rank that has several.
    head = head_bytes(target if ours.kv_heads > 1 else source, group)
    found: dict[tuple[int, int], Runs] = {}
    for shard in range(ours.shards):
        for other in sources(source, target, group, shard):
            if theirs.shards == ours.shards:
                found[other, shard] = Runs(1, nbytes, 0, nbytes, 0, nbytes)
                continue
            first, begin = other * theirs.kv_heads, shard * ours.kv_heads
            low = max(first, begin)
            heads = min(first + theirs.kv_heads, begin + ours.kv_heads) - low
            found[other, shard] = Runs(
                nbytes // (ours.kv_heads * head), heads * head, (low - first) * head,
                theirs.kv_heads * head, (low - begin) * head, ours.kv_heads * head,
            )  # fmt: skip
    return found
