"""The positions of pages: with real tensors, in the layouts of vLLM, and with its own descriptions of
caches."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier_kernels import Mapping, Pieces, gather
from kvtier_plugins import Unsupported
from kvtier_vllm.layout import Cached, Layout, Shards, find_pages

torch = pytest.importorskip("torch")

BLOCKS, HEADS, TOKENS, WIDTH, LAYERS = 6, 2, 16, 32, 3
PAGE_BYTES = HEADS * TOKENS * WIDTH * 4
ORDERS = {"LBHNC": (0, 1, 2, 3, 4), "LBNHC": (0, 1, 3, 2, 4), "BLHNC": (1, 0, 2, 3, 4)}


def layout() -> Layout:
    pages = tuple((f"layer.{n}", PAGE_BYTES) for n in range(LAYERS))
    return Layout(TOKENS, TOKENS, (Cached(0, "full", 0, pages),), Shards(1, 1))


def caches(order: tuple[int, ...]) -> dict[str, Any]:
    """A view [blocks, heads, tokens, width] for each layer of one memory with this order."""
    shape = (LAYERS, BLOCKS, HEADS, TOKENS, WIDTH)
    memory = torch.randn([shape[axis] for axis in order])
    back = [order.index(axis) for axis in range(5)]
    whole = memory.permute(back)
    return {f"layer.{n}": whole[n] for n in range(LAYERS)}


@pytest.mark.parametrize("order", ORDERS)
def test_a_block_consists_of_its_layers_pages_in_sequence(order: str) -> None:
    tensors = caches(ORDERS[order])
    pages, arrays = find_pages(layout(), tensors, BLOCKS)
    (group,) = pages.groups
    pieces = Pieces(
        [arrays[page.array] for page in group], [page.offset for page in group],
        [page.stride for page in group], [page.nbytes for page in group],
    )  # fmt: skip
    assert pieces.block_bytes == LAYERS * PAGE_BYTES and pieces.blocks >= BLOCKS
    fd = os.memfd_create("slots")
    os.ftruncate(fd, 1 << 16)
    mapping = Mapping(fd, 1 << 16, True)
    os.close(fd)
    gather(pieces, [4], [mapping], bytes(24))
    for number, tensor in enumerate(tensors.values()):
        page = tensor[4] if order != "LBNHC" else tensor[4].transpose(0, 1)
        want = page.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        assert bytes(memoryview(mapping)[number * PAGE_BYTES : (number + 1) * PAGE_BYTES]) == want


def test_similar_layouts_have_different_digests() -> None:
    digests = {find_pages(layout(), caches(order), BLOCKS)[0].digest for order in ORDERS.values()}
    # The positions of the layers do not belong to a page: only the order within it does.
    assert len(digests) == 2


def test_kernel_blocks_are_taken_together() -> None:
    halves = {name: tensor.reshape(BLOCKS * 2, HEADS, TOKENS // 2, WIDTH)
              for name, tensor in caches(ORDERS["LBHNC"]).items()}  # fmt: skip
    (group,) = find_pages(layout(), halves, BLOCKS)[0].groups
    assert {(page.stride, page.nbytes) for page in group} == {(PAGE_BYTES, PAGE_BYTES)}


def test_pages_that_are_not_contiguous_are_refused() -> None:
    shape = (BLOCKS, HEADS, LAYERS, TOKENS, WIDTH)
    memory = torch.randn(shape)
    tensors = {f"layer.{n}": memory[:, :, n] for n in range(LAYERS)}
    with pytest.raises(Unsupported, match="not contiguous"):
        find_pages(layout(), tensors, BLOCKS)


def test_memory_that_can_t_be_reached_is_refused() -> None:
    tensors = {name: tensor.to("meta") for name, tensor in caches(ORDERS["LBHNC"]).items()}
    with pytest.raises(Unsupported, match=r"layer\.0 is on meta"):
        find_pages(layout(), tensors, BLOCKS)


def test_caches_on_two_devices_are_refused() -> None:
    class Elsewhere:
        device = torch.device("cuda:1")

        def __init__(self, tensor: Any) -> None:
            self._tensor = tensor

        def __getattr__(self, name: str) -> Any:
            return getattr(self._tensor, name)

    tensors = caches(ORDERS["LBHNC"])
    tensors["layer.1"] = Elsewhere(tensors["layer.1"])
    with pytest.raises(Unsupported, match="cpu and cuda:1"):
        find_pages(layout(), tensors, BLOCKS)


def test_the_engine_s_own_descriptions_are_understood() -> None:
    """vLLM's current classes: their names, and their descriptions of a page."""
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    from kvtier_vllm.layout import read_layout

    fields = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
    specs = [
        interface.FullAttentionSpec(**fields),
        interface.SlidingWindowSpec(**fields, sliding_window=100),
        interface.ChunkedLocalAttentionSpec(**fields, attention_chunk_size=64),
        interface.MambaSpec(
            block_size=16, shapes=((3, 64), (64, 32)), dtypes=(torch.float32, torch.float32),
            page_size_padded=16384, mamba_cache_mode="align",
        ),
    ]  # fmt: skip
    groups = [interface.KVCacheGroupSpec([f"layer.{n}"], spec) for n, spec in enumerate(specs)]
    config = interface.KVCacheConfig(4, [], groups, hash_block_size=16)
    parallel = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
    model = SimpleNamespace(enable_sleep_mode=False)
    found = read_layout(SimpleNamespace(parallel_config=parallel, model_config=model), config)
    assert [(group.kind, group.window_tokens) for group in found.groups] == [
        ("full", 0), ("window", 99), ("window", 64), ("state", 0),
    ]  # fmt: skip
    assert {group.block_bytes for group in found.groups} == {2 * 16 * 2 * 64 * 4}
