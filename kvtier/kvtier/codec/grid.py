"""How the parts of a block lie, for codecs that look at channels."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.layout import KvSpec

# Layouts that we know: a part's tokens, each with all its heads, or its heads, each with all tokens.
TOKENS_FIRST, HEADS_FIRST = "layer,part,token,head,dim", "layer,part,head,token,dim"
LATENT = "layer,token,latent="  # and of how many dims, those that RoPE has turned at last
PAGE_MARK = "page:"  # begins the last word of a layout, which says how an engine has its pages
PAGES = f" {PAGE_MARK}latent="  # latents, as those
GROUP_CHANNELS = 64  # of a token at most, that share a step: as the kernels have it


@dataclass(frozen=True, slots=True)
class Grid:
    """Matrices of so many rows, a token each, of so many channels in whole heads. A group that shares a step
    is a token's channels within one head (V, whose tokens differ), or a channel's tokens (K, whose channels
    do). Small heads that lie side by side count as one, see `head_of`."""

    rows: int
    channels: int
    head: int
    by_token: bool


def head_of(heads: int, dim: int) -> int:
    """How many channels count as one head of V, of so many heads side by side: of small ones, as many as
    fill a group and divide them all. Steps of their own would cost more room than they save."""
    most = max(1, GROUP_CHANNELS // dim)
    return dim * max(count for count in range(1, most + 1) if heads % count == 0)


def layout_of(spec: KvSpec) -> str:
    """A space's layout; of pages of latents, that of latents."""
    _, found, dims = spec.layout.rpartition(PAGES)
    return LATENT + dims if found else spec.layout


def is_known(spec: KvSpec, group: int) -> bool:
    """Whether we know how a group's parts lie: K and V as above, or a latent."""
    kind, layout = spec.cache_groups[group], layout_of(spec)
    latent = layout.startswith(LATENT) and kind.parts == 1
    known = layout in (TOKENS_FIRST, HEADS_FIRST) or latent
    return known and not (kind.kind == "state" or kind.opaque_bytes or spec.strides)


def grids(spec: KvSpec, group: int, ordered: bool = False) -> tuple[Grid, ...]:
    """One for each of the group's parts, as `raw.entries` lists them; none where the layout is opaque to us,
    and where a part is neither K nor V. Parts that were `ordered` before are by tokens in every layout."""
    kind = spec.cache_groups[group]
    if kind.parts != 2 or not (ordered or is_known(spec, group)):
        return ()
    heads = kind.kv_heads if ordered or spec.layout == TOKENS_FIRST else 1
    k, v = (
        Grid(spec.block_tokens, heads * kind.head_dim, head, by_token)
        for by_token, head in ((False, kind.head_dim), (True, head_of(heads, kind.head_dim)))
    )
    return (k, v) * kind.layers
