"""Where the pages of a host pool are in memory."""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvtier_kernels import Pieces
from kvtier_plugins import Unsupported
from kvtier_plugins.page_store import HostPages, PagePool

# What determines the order of the bytes in a page, as far as a pool has it.
SHAPE = (
    "layout", "dtype", "layer_num", "target_layer_num", "start_layer", "end_layer", "head_num", "head_dim",
    "v_head_dim", "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim", "head_group_num", "index_head_dim",
    "quant_block_size", "indexer_dtype", "indexer_page_stride_size", "storage_format_tag",
)  # fmt: skip


class _Indices(list[int]):
    """What a pool reads of a tensor of indices."""

    def tolist(self) -> list[int]:
        return list(self)


@dataclass(frozen=True, slots=True)
class PagePlaces:
    """Where the pages of a pool are: of each piece of a page the memory that contains it, as its address, its
    size and its bytes, the address of the first page's piece, the distance between pages, and its size."""

    memories: list[tuple[int, int, Any]]
    starts: list[int]
    strides: list[int]
    sizes: list[int]

    @property
    def offsets(self) -> list[int]:
        return [start - memory[0] for start, memory in zip(self.starts, self.memories, strict=True)]


class ServedPool(PagePool, Protocol):
    """The pages of one pool; `digest` is that of the order of their bytes."""

    @property
    def page_tokens(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def digest(self) -> str: ...


@dataclass(frozen=True, slots=True)
class PoolPages(HostPages):
    """The pages of one pool in the host's memory, which `pieces` keeps."""

    pieces: Pieces
    page_tokens: int
    layers: int
    dtype: str
    digest: str

    def numbers(self, indices: Any, count: int) -> list[int]:
        return page_numbers(indices, count, self.page_tokens)


def page_numbers(indices: Any, count: int, size: int) -> list[int]:
    """The pages of these token indices, of which each page has `size` consecutive ones."""
    if len(indices) != count * size:
        raise ValueError(f"{len(indices)} indices for {count} pages of {size} tokens")
    firsts = indices[::size].tolist()
    if any(first % size for first in firsts):
        raise ValueError("a page does not start at a multiple of its size")
    return [first // size for first in firsts]


def find_pages(pool: Any) -> PoolPages:
    """The pages of a pool in the host's memory. Raises Unsupported."""
    places = find_places(pool)
    pieces = Pieces(
        [memory for _, _, memory in places.memories], places.offsets, places.strides, places.sizes
    )
    size, layers, dtype, digest = described(pool, places)
    return PoolPages(pieces, size, layers, dtype, digest)


def described(pool: Any, places: PagePlaces) -> tuple[int, int, str, str]:
    """The tokens of a page, the layers, the type of the values, and the digest of their order."""
    size = int(getattr(pool, "page_size", 1))
    shape = {key: str(getattr(pool, key)) for key in SHAPE if hasattr(pool, key)}
    text = json.dumps([type(pool).__name__, size, places.sizes, shape])
    return (
        size,
        max(1, int(getattr(pool, "layer_num", 1))),
        str(getattr(pool, "dtype", "uint8")).removeprefix("torch."),
        hashlib.sha256(text.encode()).hexdigest()[:32],
    )


def find_places(pool: Any) -> PagePlaces:
    """Find the pieces of the pages from the addresses that the pool reports for its first, second and last
    page. Raises Unsupported if its pages have no addresses, or no constant distance."""
    size, name = int(getattr(pool, "page_size", 1)), type(pool).__name__
    last = int(getattr(pool, "size", 0)) // size - 1
    try:
        if last < 1:
            raise ValueError("it has fewer than two pages")
        if getattr(pool, "shared_allocation_domain", None) is not None:
            raise ValueError("SGLang moves them")
        if getattr(pool, "logical_size", pool.size) != pool.size or getattr(
            pool, "_layer_shard_enabled", False
        ):
            raise ValueError("its ranks hold different pages or layers")
        (first, sizes), (second, _), (end, _) = (
            _addresses(pool, at * size, size) for at in (0, 1, last)
        )
        memories = [_memory(tensor) for tensor in _tensors(pool)]
    except (ValueError, TypeError, AttributeError, NotImplementedError, AssertionError) as error:
        raise Unsupported(f"{name}: its pages have no addresses: {error}") from error
    strides = [there - here for here, there in zip(first, second, strict=True)]
    if end != [here + last * stride for here, stride in zip(first, strides, strict=True)]:
        raise Unsupported(f"{name}: the distance between its pages is not constant")
    found = []
    for start, stride, nbytes in zip(first, strides, sizes, strict=True):
        memory = next(
            (one for one in memories if one[0] <= start and start + last * stride + nbytes <= sum(one[:2])),
            None,
        )  # fmt: skip
        if memory is None:
            raise Unsupported(f"{name}: a page is not in the memory of the pool")
        found.append(memory)
    return PagePlaces(found, first, strides, sizes)


def _addresses(pool: Any, index: int, size: int) -> tuple[list[int], list[int]]:
    found = pool.get_page_buffer_meta(_Indices(range(index, index + size)))
    if not found or not found[0] or len(found[0]) != len(found[1]):
        raise ValueError("it reports none")
    return list(map(int, found[0])), list(map(int, found[1]))


def _tensors(pool: Any) -> Sequence[Any]:
    get = getattr(pool, "get_hybrid_pool_buffer", None)
    found = get() if get is not None else pool.kv_buffer
    return found if isinstance(found, (list, tuple)) else [found]


def _memory(tensor: Any) -> tuple[int, int, Any]:
    """The address, the size and the bytes of a tensor, whatever its type is. The bytes keep the tensor."""
    if not tensor.is_contiguous():
        raise ValueError("a tensor is not contiguous")
    start, nbytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()

    class TensorMemory(ctypes.Array[ctypes.c_uint8]):
        _type_ = ctypes.c_uint8
        _length_ = nbytes

    memory = TensorMemory.from_address(start)
    memory.tensor = tensor  # type: ignore[attr-defined]
    return start, nbytes, memory
