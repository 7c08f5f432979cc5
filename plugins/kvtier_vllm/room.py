"""What the engine says of its own cache and of its limits, where its version does. No vLLM here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Room:
    """Of one engine. `block_sizes`: the tokens of a block, for each group of layers."""

    def __init__(
        self,
        manager: Any = None,
        block_sizes: Sequence[int] = (),
        seats: float = float("inf"),
        step_tokens: float = float("inf"),
    ) -> None:
        self.seats = seats
        self.step_tokens = step_tokens
        self._block_sizes = block_sizes
        self._manager = manager
        self._find = getattr(getattr(manager, "coordinator", None), "find_longest_cache_hit", None)
        pool = getattr(manager, "block_pool", None)
        self._free_blocks = getattr(pool, "get_num_free_blocks", None)

    def own_tokens(self, request: Any) -> int | None:
        """How many leading tokens the engine has in its own prefix cache; None where it does not say."""
        if self._find is None:
            return None
        enabled = getattr(self._manager, "prefix_cache_lookup_enabled", None)
        if enabled is not None and not enabled(request):
            return 0
        _, tokens, *_ = self._find(request.block_hashes, request.num_tokens - 1)
        return int(tokens)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks a request of this many tokens takes."""
        return sum(-(-tokens // size) for size in self._block_sizes)

    def free_blocks(self) -> float:
        """How many are free, or can be; without limit where the engine does not say."""
        return float("inf") if self._free_blocks is None else self._free_blocks()
