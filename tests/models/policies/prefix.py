"""Least recently used by chains: never a parent before its children. The age of blocks that
several chains share counts an eighth, so that system prompts outlive generations.

L. Zheng et al., "SGLang: efficient execution of structured language model programs", NeurIPS 2024:
the leaves of the tree of prefixes are evicted first, by recency. `Prefix` is native, `PrefixModel`
the same in Python.
"""

from kvtier_daemon.catalog.policy import NO_PARENT
from models.policies.model import EPOCHS, Ages
from models.policies.native import Prefix

__all__ = ["Prefix", "PrefixModel"]

CONTINUED, SHARED, LEVEL_SHIFT = 1, 2, 2  # own bits
LONGER = 8  # how much longer shared blocks stay
OLDEST = 0x7FFFFFFF


class PrefixModel(Ages):
    eighths: tuple[int, ...] = (8,)  # per level: how much longer it stays than others

    def __init__(self) -> None:
        super().__init__(2 * len(self.eighths))

    def continued(self, number: int) -> None:
        """The path to a fork is shared too."""
        if not self.blocks[number].own & CONTINUED:
            self.blocks[number].own |= CONTINUED
            return
        while number != NO_PARENT:
            block = self.blocks[number]
            if block.where == "nowhere" or block.own & SHARED:
                return
            block.own |= SHARED
            number = block.parent

    def kind_of(self, number: int) -> int:
        own = self.blocks[number].own
        return (own >> LEVEL_SHIFT) * 2 + bool(own & SHARED)

    def rank_of(self, kind: int, age: int, place: int) -> int:
        weight = self.eighths[kind // 2] * (LONGER if kind % 2 else 1)
        return (OLDEST + 1 - min(OLDEST, (age + 1) * 512 // weight)) * EPOCHS + place
