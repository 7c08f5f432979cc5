"""What the processor of this machine has, and vLLM's kernels need."""

from __future__ import annotations


def multiplies_tiles() -> bool:
    import torch

    return bool(torch.cpu._is_amx_tile_supported())


def has_avx512() -> bool:
    import torch

    return bool(torch.cpu._is_avx512_supported())
