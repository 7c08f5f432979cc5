"""S3-FIFO: new blocks enter a small queue and are evicted unless they are used there. Other blocks
are in a main queue, and circulate while they are used. Blocks that left the small queue and return
enter the main queue.

J. Yang, Y. Zhang, Z. Qiu, Y. Yue, R. Vinayak, "FIFO queues are all you need for cache eviction",
SOSP 2023. Here its capacity is the number of blocks in memory. `S3Fifo` is native, `S3FifoModel`
the same in Python.
"""

from collections import deque

from models.policies.model import Ghosts, Queued, Queues, pack
from models.policies.native import S3Fifo

__all__ = ["S3Fifo", "S3FifoModel"]

SMALL, MAIN = 1, 2
MOST_TIMES, TO_MAIN = 3, 2
TENTH = 10


class S3FifoModel(Queues):
    by_recency = False

    def __init__(self) -> None:
        super().__init__(3)
        self._ghosts = Ghosts()

    def met(self, block: Queued) -> int:
        return SMALL if self._ghosts.take(block.name) is None else MAIN

    def used(self, block: Queued) -> int:
        block.times = min(block.times + 1, MOST_TIMES)
        return block.queue

    def leaving(self, number: int) -> None:
        """The blocks that were passed over pay for it when a block leaves before them."""
        gone = self.blocks[number]
        if gone.held or gone.demoted:
            return
        queue = gone.queue
        for passed in list(self.queues[queue]):
            block = self.blocks[passed]
            if passed == number or block.times < (TO_MAIN if queue == SMALL else 1):
                return
            self.take(passed)
            block.queue, block.times = MAIN, 0 if queue == SMALL else block.times - 1
            self.push(passed)

    def has_left(self, block: Queued) -> None:
        if block.queue == SMALL:
            self._ghosts.add(block.name)
        self._ghosts.trim(len(self.blocks))

    def victims(self, n: int) -> bytes:
        """Simulates the evictions one by one: blocks that are passed over move to another queue,
        or to the end of theirs."""
        named = list(self.queues[0])
        small = deque(self.queues[SMALL])
        main = deque((number, self.blocks[number].times) for number in self.queues[MAIN])
        while small or main:
            if small and (TENTH * len(small) >= len(small) + len(main) or not main):
                number = small.popleft()
                if self.blocks[number].times >= TO_MAIN:
                    main.append((number, 0))
                else:
                    named.append(number)
                continue
            number, times = main.popleft()
            if times:
                main.append((number, times - 1))
            else:
                named.append(number)
        return pack(named[:n])
