"""Least frequently used: of the blocks that were wanted least often, the one that nobody wanted for longest.

E. J. O'Neil, P. E. O'Neil, G. Weikum, "The LRU-K page replacement algorithm for database disk buffering",
SIGMOD 1993, describe it with counts that age; here all are halved from time to time, and those of blocks
that left are remembered for a while. `Lfu` is native, `LfuModel` the same in Python.
"""

from itertools import chain

from kvtier.policy.model import Ghosts, Queued, Queues, pack
from kvtier_kernels import Lfu

__all__ = ["Lfu", "LfuModel"]

MOST_TIMES, REMEMBERED, USES, FEW = 255, 8, 4, 8192


class LfuModel(Queues):
    def __init__(self) -> None:
        super().__init__(1 + MOST_TIMES)
        self._ghosts = Ghosts()
        self._uses = 0

    def met(self, block: Queued) -> int:
        return self._count(block, 1 + self._ghosts.take(block.name))

    def used(self, block: Queued) -> int:
        return self._count(block, block.times + 1)

    def _count(self, block: Queued, times: int) -> int:
        self._uses += 1
        block.times = min(times, MOST_TIMES)
        return block.times

    def has_left(self, block: Queued) -> None:
        most = REMEMBERED * max(len(self.blocks), FEW)
        self._ghosts.add(block.name, block.times)
        self._ghosts.trim(most)
        if self._uses < USES * most:
            return
        self._uses = 0
        self._ghosts.halve()
        for queue in self.queues[2:]:
            for number in list(queue):
                self.take(number)
                block = self.blocks[number]
                block.queue = block.times = block.queue // 2
                self.push(number)

    def victims(self, n: int) -> bytes:
        return pack(list(chain(*self.queues))[:n])
