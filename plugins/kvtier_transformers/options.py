"""The options of `KvtierCache.from_prompt` and `attach`."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from kvtier.arguments import Checking, whole
from kvtier.errors import InvalidArgument
from kvtier.layout import LIMIT_BLOCK_TOKENS
from kvtier.units import parse_bytes

log = logging.getLogger("kvtier.transformers")

LIMIT_MS = 24 * 3600 * 1000
LAST, ACCUMULATED = "last", "accumulated"
IMPORTANCE = ("", LAST, ACCUMULATED)


class UnsupportedModel(ValueError):  # noqa: N818
    """kvtier cannot keep the cache of this model: it generates without kvtier, after one warning."""


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """`salt`: prompts with different salts share nothing. `block_tokens`: the tokens of a block.
    `patience_ms`: the longest wait for blocks from disk. `lease_ms`: the longest time of a copy.
    `window_history`: how many tokens before their window the layers with a window keep until they are saved.
    `weights`: a name of the weights, if kvtier cannot identify them. `importance`: measure how much attention
    the blocks of a prompt get, by its `last` queries or `accumulated` over all, and send it as hints.
    `memory`: the bytes that the tensors of a cache may use, such as "256MiB"; the rest stays in the daemon.
    0: no limit."""

    salt: bytes = b""
    block_tokens: int = 32
    patience_ms: int = 1000
    lease_ms: int = 60_000
    window_history: int = 4096
    weights: str = ""
    importance: str = ""
    memory: int | str = 0

    def checked(self) -> CacheOptions:
        """Return the same with `memory` in bytes. Raises InvalidArgument if it is not valid."""
        whole("block_tokens", self.block_tokens, 1, LIMIT_BLOCK_TOKENS)
        whole("patience_ms", self.patience_ms, 0, LIMIT_MS)
        whole("lease_ms", self.lease_ms, 1, LIMIT_MS)
        whole("window_history", self.window_history, 0, 1 << 30)
        if self.importance not in IMPORTANCE:
            raise InvalidArgument(
                f"importance: expected one of {IMPORTANCE}, got {self.importance!r}"
            )
        with Checking("memory"):
            memory = parse_bytes(self.memory)
        if memory and self.importance:
            raise InvalidArgument("importance: not measured in a cache with a limit of `memory`")
        return replace(self, memory=memory)
