"""The content of blocks element by element: a number for each key, layer, K or V, head, token and dim. Where
an element is follows from the text of the order alone, computed here in another way than by the product."""

from __future__ import annotations

import re
import time
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier import Group, KvSpec
from kvtier.key import Keys
from kvtier.space import Space

DIGEST = "0123456789abcdef0123456789abcdef"  # vLLM's digest of shapes differs between ranks' numbers of heads
# All orders that `kvtier_vllm.layout.page_order` returns, for blocks of 32 tokens.
ORDERS = {
    "cpu": "hpdt|hptd",
    "cpu tiles": "hpt/16d/2t%16d%2|hpd/16t/2d%16t%2",
    "cpu, two blocks of the kernel": "t/16hpdt%16|t/16hpt%16d",
    "heads first": "htpd|htpd",
    "tokens first": "thpd|thpd",
    "heads first, two blocks of the kernel": "t/16ht%16pd|t/16ht%16pd",
    "parts first": "pthd|pthd",
    "parts, then heads": "phtd|phtd",
}
TYPES = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}
Words = npt.NDArray[Any]


def ranks_spec(
    ranks: int, *groups: dict[str, Any], order: str = "tokens first", **changes: Any
) -> KvSpec:
    """A model on this many ranks. `heads` of a group are those of all ranks; without `heads`, each rank has a
    copy of one latent."""
    kinds = []
    for one in groups or ({"heads": 4},):
        fields = {"layers": 2, "head_dim": 16} | one
        heads = fields.pop("heads", None)
        shards = 1 if heads is None else min(ranks, heads)
        kinds.append(Group(**fields, kv_heads=(heads or 1) // shards, shards=shards))
    digest = f"{DIGEST[:-2]}{ranks:02x}"
    fields = {
        "model": "ranks", "dtype": "bfloat16", "block_tokens": 32, "weights": "r", "tensor_parallel": ranks,
        "layout": f"LBHNC {digest} page:{ORDERS.get(order, order)}",
    } | changes  # fmt: skip
    return KvSpec.groups(kinds, **fields)


@cache
def places(text: str, part: int, heads: int, tokens: int, dims: int) -> Words:
    """Where the elements of K (0) or V (1) are in a page, by head, token and dim."""
    axes = re.findall(r"([hptd])(?:([/%])(\d+))?", text)
    sizes = {"h": heads, "p": 2, "t": tokens, "d": dims}

    def extent(axis: str, way: str, number: str) -> int:
        whole = sizes[axis]
        return whole if not way else whole // int(number) if way == "/" else int(number)

    found = np.zeros((heads, tokens, dims), np.int64)
    for head, token, dim in product(range(heads), range(tokens), range(dims)):
        at, value = 0, {"h": head, "p": part, "t": token, "d": dim}
        for axis, way, number in axes:
            digit = value[axis]
            if way:
                digit = digit // int(number) if way == "/" else digit % int(number)
            at = at * extent(axis, way, number) + digit
        found[head, token, dim] = at
    return found


def block(spec: KvSpec, group: int, shard: int, key: bytes) -> bytes:
    """The block of this key that a rank computes."""
    kind, item = spec.cache_groups[group], TYPES[spec.dtype]
    seed = int.from_bytes(key[:8], "little") + group
    order = spec.layout.rpartition("page:")[2]
    shape = kind.layers, 2, kind.kv_heads, spec.block_tokens, kind.head_dim
    numbers = np.arange(kind.layers * 2 * spec.block_tokens * kind.head_dim, dtype=np.uint64)
    numbers = numbers.reshape(kind.layers, 2, 1, spec.block_tokens, kind.head_dim)
    head = np.arange(kind.kv_heads, dtype=np.uint64) + np.uint64(shard * kind.kv_heads)
    with np.errstate(over="ignore"):
        mixed = (
            numbers * np.uint64(1024) + head.reshape(1, 1, -1, 1, 1) + np.uint64(1)
        ) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(seed & (1 << 63) - 1)
        words = (mixed >> np.uint64(29)).astype(item)
    if kind.parts == 1 or order.startswith("latent"):
        return words[:, 0].tobytes()
    assert words.shape == shape
    pages = np.zeros((kind.layers, words[0].size), item)
    for part, text in enumerate(order.split("|")):
        at = places(text, part, kind.kv_heads, spec.block_tokens, kind.head_dim)
        pages[:, at.ravel()] = words[:, part].reshape(kind.layers, -1)
    return pages.tobytes()


def save_ranks(space: Space, number: int, blocks: int) -> Keys:
    """Save a prompt as the ranks of an engine do."""
    keys = space.keys([number] * blocks * space.spec.block_tokens)
    for group, kind in enumerate(space.spec.cache_groups):
        for shard in range(kind.shards):
            space.save(
                keys,
                [block(space.spec, group, shard, key) for key in keys],
                group=group,
                shard=shard,
            )
    return keys


def load_ranks(space: Space, keys: Keys, wait_s: float = 0.0) -> int:
    """Load until the whole prompt is there, as the ranks of an engine do; return how many blocks came. Each
    byte of them must be the one that this engine would have saved."""
    until, least = time.monotonic() + wait_s, len(keys)
    while (found := space.match(keys)).ready < least and time.monotonic() < until:
        time.sleep(0.01)
    for group, kind in enumerate(space.spec.cache_groups):
        for shard in range(kind.shards):
            with space.load(keys[: found.ready], group=group, shard=shard) as ready:
                least = min(least, len(ready))
                for key, one in zip(keys, ready, strict=False):
                    assert one is None or bytes(one) == block(space.spec, group, shard, key)
    return least
