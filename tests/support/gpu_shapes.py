"""Shapes of paged caches, and the places of a block's bytes in them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Shape:
    """Layer n's page of block b at n * layer_stride + b * block_stride, `shift` bytes into the pool."""

    layers: int
    page_bytes: int
    blocks: int
    moved: int
    together: bool = False
    gap: int = 0
    shift: int = 0

    @property
    def block_bytes(self) -> int:
        return self.layers * self.page_bytes

    @property
    def strides(self) -> tuple[int, int]:
        page = self.page_bytes + self.gap
        return (page, page * self.layers) if self.together else (page * self.blocks, page)

    @property
    def pool_bytes(self) -> int:
        return self.shift + (self.page_bytes + self.gap) * self.layers * self.blocks

    def where(self, address: int) -> tuple[list[int], list[int], list[int], list[int], list[int]]:
        layer, block = self.strides
        offsets = [self.shift + n * layer for n in range(self.layers)]
        return ([address] * self.layers, [self.pool_bytes] * self.layers, offsets,
                [block] * self.layers, [self.page_bytes] * self.layers)  # fmt: skip

    def _parts(self, block: int) -> list[slice]:
        layer, step = self.strides
        starts = [self.shift + n * layer + block * step for n in range(self.layers)]
        return [slice(start, start + self.page_bytes) for start in starts]

    def block(self, pool: Bytes, block: int) -> bytes:
        return b"".join(pool[part].tobytes() for part in self._parts(block))

    def put(self, pool: Bytes, block: int, data: bytes) -> None:
        for n, part in enumerate(self._parts(block)):
            at = n * self.page_bytes
            pool[part] = np.frombuffer(data[at : at + self.page_bytes], np.uint8)


SHAPES = {
    "layers apart": Shape(16, 32 << 10, 24, 16),
    "layers together": Shape(16, 32 << 10, 24, 16, together=True),
    "together with gaps": Shape(5, 4096, 40, 30, together=True, gap=256),
    "one large page": Shape(1, 1 << 20, 6, 5),
    "many small pages": Shape(32, 1152, 70, 61),
    "eight bytes aligned": Shape(3, 4104, 20, 11, gap=8, shift=8),
    "four bytes aligned": Shape(3, 1364, 20, 11, shift=4),
    "odd": Shape(2, 1001, 20, 11, gap=3, shift=1),
}
