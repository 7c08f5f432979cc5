"""What blocks hold, the same in a client of each system, so that what comes back can be compared."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

TOKENS = 16  # of a block, or chunk
PAGE_WORDS = 512
Words = npt.NDArray[np.int64]


class Blocks:
    """Return memory for `blocks` blocks to store from, and as much to retrieve into."""

    def __init__(self, nbytes: int, blocks: int) -> None:
        assert nbytes % (8 * PAGE_WORDS) == 0
        self.nbytes, self.blocks = nbytes, blocks
        base = np.random.default_rng(1).integers(-(2**62), 2**62, nbytes // 8, np.int64)
        self.sources: Words = np.empty((blocks, nbytes // 8), np.int64)
        self.sources[:] = base
        self.targets: Words = np.zeros_like(self.sources)

    def fill(self, prompt: int) -> None:
        """Random bytes that no disk can make less of; each page of each block of each prompt differs."""
        pages = self.nbytes // 8 // PAGE_WORDS
        stamps = np.arange(self.blocks * pages, dtype=np.int64) + (prompt << 32)
        self.sources[:, ::PAGE_WORDS] = stamps.reshape(self.blocks, pages)

    def wrong(self, blocks: int) -> int:
        """How many of the first blocks are not what was filled in last."""
        return sum(not np.array_equal(self.sources[n], self.targets[n]) for n in range(blocks))

    def begins(self, block: int) -> bytes:
        """Its first 64 bytes, which no other block has."""
        return self.sources[block, :8].tobytes()


def tokens_of(prompt: int, blocks: int) -> list[int]:
    return [prompt] * TOKENS + list(range(TOKENS * (blocks - 1)))
