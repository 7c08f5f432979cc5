"""How the elements of an engine's pages lie: lossy codecs want to know.

vLLM's CPU kernels turn K around, or put K and V into tiles, as suits the processor; the shapes of the tensors
don't say so. What is written is looked at, and nothing is believed of what fits no order that we know. Those
of a GPU that we know write of each head and token K, then V, and where those lie the tensors' strides say.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

log = logging.getLogger("vllm.kvtier")

# Of K and of V, as layouts say it (`kvtier.codec.arranged`): by their heads, tokens and dims.
VEC, AMX = "hpdt|hptd", "hpt/16d/2t%16d%2|hpd/16t/2d%16t%2"
BY_STRIDES = ("FLASH_ATTN", "FLASHINFER", "FLEX_ATTENTION", "TRITON_ATTN")
# Of one vector for each token: a latent, and beside it what RoPE has turned.
LATENTS, LATENT = ("AMX_MLA", "CPU_MLA", "FLASH_ATTN_MLA", "TRITON_MLA"), "latent"
# Others keep scales among the elements.
FLOATS = ("torch.bfloat16", "torch.float16", "torch.float32")
LIMIT = 256  # whole numbers that bf16 tells apart
TILE = 16


@cache
def _known(heads: int, tokens: int, dims: int, dtype: Any) -> str:
    return _written(heads, tokens, dims, dtype)


def backends_of(vllm_config: Any) -> dict[str, str]:
    """What each layer's attention is called, where the engine says it."""
    try:
        layers = vllm_config.compilation_config.static_forward_context
        return {
            name: layer.attn_backend.get_name()
            for name, layer in layers.items()
            if hasattr(layer, "attn_backend")
        }
    except Exception as error:  # noqa: BLE001  # the engine's own, in whatever version
        log.info("kvtier: what attention there is can't be found out: %s", error)
        return {}


def page_order(tensor: Any, kernel_blocks: int, backend: str = "") -> str:
    """The order of the pages of a layer's tensor, [blocks, heads, tokens, 2 x dims] or of latents, of which
    each is so many of the attention kernel's blocks; empty where nobody knows."""
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
        found = _known(heads, tokens, width // 2, tensor.dtype)
    except Exception as error:  # noqa: BLE001  # the engine's own, in whatever version
        log.info(
            "kvtier: how pages lie can't be found out, so they are stored without loss: %s", error
        )
        return ""
    if not found or kernel_blocks == 1:
        return found
    # The kernel's blocks follow one another; tokens that are divided already are not divided again.
    return "|".join(
        f"t/{tokens}{part.replace('t', f't%{tokens}')}" if found == VEC else ""
        for part in found.split("|")
    ).strip("|")


def _by_strides(tensor: Any, kernel_blocks: int) -> str:
    """Each head's tokens one after the other (vLLM's HND), or each token's heads (NHD)."""
    if len(tensor.shape) != 4 or str(tensor.dtype) not in FLOATS:
        return ""
    _, heads, tokens, width = tensor.shape
    found = list(zip(tensor.shape[1:], tensor.stride()[1:], strict=True))

    def lies(*steps: int) -> bool:
        return all(
            size == 1 or step == mine for (size, step), mine in zip(found, steps, strict=True)
        )

    if width % 2:
        return ""
    if lies(width, heads * width, 1):
        part = "thpd"  # the kernel's blocks follow one another: as if they were one
    elif lies(tokens * width, width, 1):
        part = "htpd" if kernel_blocks == 1 else f"t/{tokens}ht%{tokens}pd"
    else:
        return ""
    return f"{part}|{part}"


def _is_by_tokens(tensor: Any) -> bool:
    """Whether a page is one vector after the other, [blocks, (1,) tokens, dims]."""
    *heads, _, width = tensor.shape[1:]
    apart = tuple(tensor.stride()[-2:])
    return heads in ([], [1]) and str(tensor.dtype) in FLOATS and apart == (width, 1)


def _written(heads: int, tokens: int, dims: int, dtype: Any) -> str:
    """Which of the orders the engine's own kernel writes."""
    import torch

    # Where the engine has not loaded it, nothing is written by it.
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
                _equal(look(half[0]), source)
                for look, half in zip(LOOKS[order], (keys, values), strict=True)
            )
        }
    return orders.pop() if len(orders) == 1 else ""


def _equal(found: Any, source: Any) -> bool:
    return found is not None and bool((found == source).all())


def _turned(half: Any) -> Any:
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


Look = Callable[[Any], Any]
LOOKS: dict[str, tuple[Look, Look]] = {
    VEC: (_turned, _plain),
    AMX: (_tiles_of_tokens, _tiles_of_dims),
}
