"""The engine's own cache on top of the simulated tiers: whole blocks, the least recently used leave first."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import islice


class EngineCache:
    """Of all engines together. A block counts only if all blocks before it in its request do."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._held: dict[int, None] = {}  # the least recently used first
        self.leave_first: dict[int, None] = {}  # in memory and on disk, and the engine holds them
        self.away: set[int] = set()  # of these, those that left memory: the policy holds them
        # Of these, those that are being read: the engine dropped them.
        self.returning: set[int] = set()

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
        left = list(islice(self._held, max(0, len(self._held) - self.blocks)))
        for node in left:
            del self._held[node]
        return entered, left

    def victims(self, count: int, leased: Container[int]) -> list[int]:
        """Up to this many blocks leave memory because the engine holds them."""
        first = list(islice((one for one in self.leave_first if one not in leased), count))
        for one in first:
            del self.leave_first[one]
        self.away.update(first)
        return first

    def drop_away(self, nodes: Iterable[int]) -> list[int]:
        """These blocks are no longer away; return those that were."""
        were = [node for node in nodes if node in self.away]
        self.away.difference_update(were)
        self.returning.difference_update(were)
        return were
