"""The engine's own cache on top of the simulated tiers: whole blocks, the least recently used leave first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class EngineCache:
    """Of all engines together. A block counts only if all blocks before it in its request do."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._held: dict[int, None] = {}  # the least recently used first

    def __contains__(self, node: int) -> bool:
        return node in self._held

    def prefix(self, nodes: Sequence[int]) -> int:
        """How many leading blocks the engine has."""
        at = 0
        while at < len(nodes) and nodes[at] in self._held:
            at += 1
        return at

    def use(self, nodes: Sequence[int]) -> tuple[list[int], list[int]]:
        """A request has ended, and the engine has its blocks: return those that entered, and those that left
        for them. The tail of a request leaves first."""
        entered = [node for node in nodes if node not in self._held]
        for node in reversed(nodes):
            self._held.pop(node, None)
            self._held[node] = None
        left = list(_first(self._held, len(self._held) - self.blocks))
        for node in left:
            del self._held[node]
        return entered, left


def _first(items: Iterable[int], count: int) -> Iterable[int]:
    for _, item in zip(range(max(0, count)), items, strict=False):
        yield item
