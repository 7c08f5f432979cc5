"""Host pools with SGLang's layouts and addresses, in numpy arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

PAGE_TOKENS = 4


class Tensor:
    """The methods of a torch tensor that give its memory."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def is_contiguous(self) -> bool:
        return self.array.flags.c_contiguous

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def numel(self) -> int:
        return self.array.size

    def element_size(self) -> int:
        return self.array.itemsize


class HostPool:
    """K and V of `layers` layers, like MHATokenToKVPoolHost."""

    def __init__(
        self, layout: str = "layer_first", pages: int = 16, layers: int = 3, width: int = 32
    ) -> None:
        self.layout, self.layer_num, self.page_size = layout, layers, PAGE_TOKENS
        self.size, self.dtype, self.head_num, self.head_dim = (
            pages * PAGE_TOKENS,
            "torch.float16",
            1,
            width,
        )
        shape = (layers, self.size) if layout == "layer_first" else (self.size, layers)
        self.kv_buffer = Tensor(np.zeros((2, *shape, width), np.float16))

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        """As SGLang computes it: an address for K and V of each layer, or for K and V of all layers."""
        row = self.head_num * self.head_dim * 2
        base, found = self.kv_buffer.data_ptr(), []
        by_layer = self.layout == "layer_first"
        for index in indices.tolist()[:: self.page_size]:
            for layer in range(self.layer_num if by_layer else 1):
                at = (
                    base + (layer * self.size + index if by_layer else index * self.layer_num) * row
                )
                found += [at, at + self.layer_num * self.size * row]
        nbytes = self.page_size * row * (1 if by_layer else self.layer_num)
        return found, [nbytes] * len(found)

    def page(self, number: int) -> np.ndarray[Any, Any]:
        """A view of K and V of one page."""
        tokens = slice(number * self.page_size, (number + 1) * self.page_size)
        array = self.kv_buffer.array
        return array[:, :, tokens] if self.layout == "layer_first" else array[:, tokens]

    def fill(self, numbers: Sequence[int], seed: int) -> list[bytes]:
        """Write other values to each of these pages, and return them."""
        chance = np.random.default_rng(seed)
        for number in numbers:
            self.page(number)[...] = chance.random(self.page(number).shape)
        return self.read(numbers)

    def read(self, numbers: Sequence[int]) -> list[bytes]:
        return [self.page(number).tobytes() for number in numbers]


class IndexerPool:
    """The keys of a DSA indexer, like DSAIndexerPoolHost: one row per page, with all layers."""

    page_size, layout, layer_num, dtype = PAGE_TOKENS, "page_first", 2, "torch.uint8"

    def __init__(self, pages: int = 16) -> None:
        self.size = pages * PAGE_TOKENS
        self.rows = Tensor(np.zeros((pages, 2 * 24), np.uint8))

    def get_hybrid_pool_buffer(self) -> list[Tensor]:
        return [self.rows]

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        base, size = self.rows.data_ptr(), self.rows.array.shape[1]
        found = [base + index // PAGE_TOKENS * size for index in indices.tolist()[::PAGE_TOKENS]]
        return found, [size] * len(found)


def indices_of(numbers: Sequence[int], size: int = PAGE_TOKENS) -> np.ndarray[Any, Any]:
    """The indices of the tokens of these pages."""
    return np.array([number * size + at for number in numbers for at in range(size)], np.int64)


def hashes(count: int, prompt: str = "a prompt") -> list[str]:
    """A chain of SGLang's names of pages."""
    found = [hashlib.sha256(prompt.encode()).hexdigest()]
    while len(found) < count:
        found.append(hashlib.sha256(bytes.fromhex(found[-1])).hexdigest())
    return found[:count]
