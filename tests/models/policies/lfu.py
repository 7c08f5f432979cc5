"""Least frequently used: among the least used blocks, the least recently used one.

E. J. O'Neil, P. E. O'Neil, G. Weikum, "The LRU-K page replacement algorithm for database disk
buffering", SIGMOD 1993, describe it with counts that age. Here all counts are halved periodically,
and those of evicted blocks are remembered for a while. `Lfu` is native, `LfuModel` the same in
Python.
"""

from itertools import chain

from models.policies.model import FEW, Ghosts, Queued, Queues, pack
from models.policies.native import Lfu

__all__ = ["Lfu", "LfuModel"]

MOST_TIMES = 255
USES_OF_EACH, FEW_USES = 32, 8192


class LfuModel(Queues):
    """A block's count is the number of its queue."""

    def __init__(self) -> None:
        super().__init__(1 + MOST_TIMES)
        self._ghosts = Ghosts()
        self._uses = 0

    def met(self, block: Queued) -> int:
        return self._count(1 + (self._ghosts.take(block.name) or 0))

    def used(self, block: Queued) -> int:
        return self._count(block.queue + 1)

    def _count(self, times: int) -> int:
        self._uses += 1
        return min(times, MOST_TIMES)

    def has_left(self, block: Queued) -> None:
        self._ghosts.add(block.name, block.queue)
        self._ghosts.trim(max(FEW, len(self.blocks) // 2))
        if self._uses >= USES_OF_EACH * max(len(self.blocks), FEW_USES):
            self._uses = 0
            self._ghosts.halve()
            self.fold()

    def victims(self, n: int) -> bytes:
        return pack(list(chain(*self.queues))[:n])
