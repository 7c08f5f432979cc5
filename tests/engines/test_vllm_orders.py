"""The order of elements in a vLLM page on a CPU: data that its own kernel writes is found at the
positions of the order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engines.processor import need_tiles
from kvtier import Group, KvSpec
from kvtier_daemon.codec.arranged import order_of
from kvtier_kernels import reorder_pages
from kvtier_vllm.layout import AMX, LATENT, VEC, _kernel_order, page_order

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
# The modules that vLLM imports.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

HEADS, TOKENS, DIMS = 2, 32, 64


@pytest.fixture(autouse=True)
def anew() -> None:
    _kernel_order.cache_clear()


@pytest.mark.parametrize("isa, order", [("vec", VEC), ("vec16", VEC), ("amx", AMX)])
def test_an_order_gives_the_positions_that_the_kernel_writes(
    monkeypatch: pytest.MonkeyPatch, isa: str, order: str
) -> None:
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends import cpu_attn

    if isa == "amx":
        need_tiles()
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_, **__: isa)
    tensor = torch.zeros(3, HEADS, TOKENS, 2 * DIMS, dtype=torch.bfloat16)
    assert page_order(tensor, 1) == order
    keys, values = (torch.randn(TOKENS, HEADS, DIMS).bfloat16() for _ in range(2))
    view = tensor.view(3, HEADS, 2 * TOKENS, DIMS)
    slots = torch.arange(TOKENS) + TOKENS  # in the second block
    ops.cpu_attn_reshape_and_cache(keys, values, *view.chunk(2, dim=2), slots, isa)
    group = Group(layers=1, kv_heads=HEADS, head_dim=DIMS)
    spec = KvSpec.groups(
        [group],
        model="m",
        dtype="bfloat16",
        block_tokens=TOKENS,
        weights="w",
        layout=f"x page:{order}",
    )
    found = order_of(spec, 0)
    assert found is not None
    page = _bytes_of(tensor[1])
    into = bytearray(len(page))
    reorder_pages(2, 2, found.heads, found.tokens, found.dims, page, into, False)
    assert bytes(into) == _bytes_of(torch.stack([keys, values]))


@pytest.mark.parametrize("backend", ["CPU_MLA", "AMX_MLA"])
def test_latents_and_rope_dims_are_adjacent(backend: str) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if backend == "AMX_MLA":
        need_tiles()
    cache = torch.zeros(3, 16, 512 + 64, dtype=torch.bfloat16)
    assert page_order(cache, 1, backend) == page_order(cache[:, None], 1, backend) == LATENT
    latents, turned = torch.randn(16, 512).bfloat16(), torch.randn(16, 1, 64).bfloat16()
    slots = torch.arange(16) + 16  # in the second block
    kernel = AttentionBackendEnum[backend].get_class().get_impl_cls()
    kernel.do_kv_cache_update(None, latents, turned, cache, slots, "auto", torch.ones(1))
    assert _bytes_of(cache[1]) == _bytes_of(torch.cat([latents, turned[:, 0]], dim=-1))


def _bytes_of(tensor: Any) -> bytes:
    found: bytes = np.ascontiguousarray(tensor.contiguous().view(torch.int16).numpy()).tobytes()
    return found


def test_unknown_layouts_have_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends import cpu_attn

    whole = torch.zeros(3, HEADS, TOKENS, 2 * DIMS, dtype=torch.bfloat16)
    assert page_order(whole, 1)
    assert page_order(whole.transpose(1, 2), 1) == ""
    assert page_order(whole.view(torch.int16), 1) == ""
    assert page_order(torch.zeros(3, 1, 512, 128), 1) == "", "more tokens than bf16 tells apart"

    def gone(*_: Any) -> str:
        raise AttributeError("gone")

    _kernel_order.cache_clear()
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", gone)
    assert page_order(whole, 1) == ""
