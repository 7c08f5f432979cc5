"""Adaptive replacement: blocks seen once and blocks seen more often, each in a list by recency;
returning ghosts decide which list shrinks.

N. Megiddo, D. S. Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003. Here its
capacity is the number of blocks in memory. `Arc` is native, `ArcModel` the same in Python.
"""

from models.policies.model import Ghosts, Queued, Queues, half_of_many, pack
from models.policies.native import Arc

__all__ = ["Arc", "ArcModel"]

ONCE, OFTEN = 1, 2


class ArcModel(Queues):
    def __init__(self) -> None:
        super().__init__(3)
        self._once, self._often = Ghosts(), Ghosts()
        self._room = 0.0  # of the queue of blocks used once

    def met(self, block: Queued) -> int:
        once, often = len(self._once), len(self._often)
        if self._once.take(block.name) is not None:
            self._room = min(self._room + max(1.0, often / once), len(self.blocks) + 1)
            return OFTEN
        if self._often.take(block.name) is not None:
            self._room = max(self._room - max(1.0, once / often), 0.0)
            return OFTEN
        return ONCE

    def used(self, block: Queued) -> int:
        return OFTEN

    def has_left(self, block: Queued) -> None:
        (self._once if block.queue == ONCE else self._often).add(block.name)
        for ghosts in (self._once, self._often):
            ghosts.trim(half_of_many(len(self.blocks) + 1))

    def victims(self, n: int) -> bytes:
        named = list(self.queues[0])
        once, often = list(self.queues[ONCE]), list(self.queues[OFTEN])
        while once or often:
            from_once = bool(once) and (len(once) > self._room or not often)
            named.append((once if from_once else often).pop(0))
        return pack(named[:n])
