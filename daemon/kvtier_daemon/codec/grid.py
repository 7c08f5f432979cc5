"""The layout of the parts of a block, for codecs that work on channels."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.layout import PAGE_MARK, KvSpec

# Known layouts: the tokens of a part, each with all its heads; or the heads, each with all tokens.
TOKENS_FIRST, HEADS_FIRST = "layer,part,token,head,dim", "layer,part,head,token,dim"
LATENT = "layer,token,latent="  # followed by the number of dims without and with RoPE
PAGES = f" {PAGE_MARK}latent="  # latents in the same layout, as pages
GROUP_CHANNELS = 64  # most channels of a token that share a step: the kernels use the same number


@dataclass(frozen=True, slots=True)
class Grid:
    """Matrices of `rows` tokens by `channels` in whole heads. A group that shares a step is the channels of
    a token within one head (V, whose tokens differ), or the tokens of a channel (K, whose channels differ).
    Small adjacent heads count as one; see `head_of`."""

    rows: int
    channels: int
    head: int
    by_token: bool


def head_of(heads: int, dim: int) -> int:
    """Return how many channels count as one head of V: of small heads, as many as fill a group and divide
    all of them. A step per small head would take more space than it saves."""
    most = max(1, GROUP_CHANNELS // dim)
    return dim * max(count for count in range(1, most + 1) if heads % count == 0)


def layout_of(spec: KvSpec) -> str:
    """Return a space's layout; for pages of latents, the layout of latents."""
    _, found, dims = spec.layout.rpartition(PAGES)
    return LATENT + dims if found else spec.layout


def is_known(spec: KvSpec, group: int) -> bool:
    """Return whether the layout of a group's parts is known: K and V, or a latent."""
    kind, layout = spec.cache_groups[group], layout_of(spec)
    latent = layout.startswith(LATENT) and kind.parts == 1
    known = layout in (TOKENS_FIRST, HEADS_FIRST) or latent
    return known and not (kind.kind == "state" or kind.opaque_bytes or spec.strides)


def grids(spec: KvSpec, group: int, ordered: bool = False) -> tuple[Grid, ...]:
    """Return a grid for each part of the group, in the order of `block_parts.entries`. Empty for an unknown
    layout, and for parts that are neither K nor V. `ordered` parts have the tokens first in all layouts."""
    kind = spec.cache_groups[group]
    if kind.parts != 2 or not (ordered or is_known(spec, group)):
        return ()
    heads = kind.kv_heads if ordered or spec.layout == TOKENS_FIRST else 1
    k, v = (
        Grid(spec.block_tokens, heads * kind.head_dim, head, by_token)
        for by_token, head in ((False, kind.head_dim), (True, head_of(heads, kind.head_dim)))
    )
    return (k, v) * kind.layers
