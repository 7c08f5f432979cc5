"""Skip tests of vLLM's kernels that the processor of this machine cannot run."""

from __future__ import annotations

import pytest


def need_tiles() -> None:
    import torch

    if not torch.cpu._is_amx_tile_supported():
        pytest.skip("needs a processor with AMX")


def need_avx512() -> None:
    import torch

    if not torch.cpu._is_avx512_supported():
        pytest.skip("needs a processor with AVX-512")
