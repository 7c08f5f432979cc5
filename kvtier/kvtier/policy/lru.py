"""Least recently used: the block that nobody wanted for longest goes first.

R. L. Mattson, J. Gecsei, D. R. Slutz, I. L. Traiger, "Evaluation techniques for storage
hierarchies", IBM Systems Journal 9(2), 1970. `Lru` is native, 8 bytes a block; `LruModel` is the
same in Python, for tests to hold it against.
"""

from collections import OrderedDict
from itertools import islice

from kvtier_kernels import Lru

__all__ = ["Lru", "LruModel"]


class LruModel:
    """The executable specification of `Lru`: an ordered dict, coldest first."""

    def __init__(self) -> None:
        self._ids: OrderedDict[int, None] = OrderedDict()

    def added(self, ids: bytes) -> None:
        for block in unpack(ids):
            self._ids[block] = None
            self._ids.move_to_end(block)

    def touched(self, ids: bytes) -> None:
        for block in unpack(ids):
            if block in self._ids:
                self._ids.move_to_end(block)

    def removed(self, ids: bytes) -> None:
        for block in unpack(ids):
            self._ids.pop(block, None)

    def demoted(self, ids: bytes) -> None:
        for block in reversed(unpack(ids)):
            if block in self._ids:
                self._ids.move_to_end(block, last=False)

    def hinted(self, ids: bytes, importance: float) -> None:
        unpack(ids)  # recency is all that counts here

    def victims(self, n: int) -> bytes:
        return b"".join(block.to_bytes(4, "little") for block in islice(self._ids, n))

    def __len__(self) -> int:
        return len(self._ids)

    def memory_bytes(self) -> int:
        return 100 * len(self._ids)


def unpack(ids: bytes) -> list[int]:
    """The ids of a batch. Raises ValueError where it isn't a whole number of them."""
    if len(ids) % 4:
        raise ValueError("ids are 4 bytes each")
    return [int.from_bytes(ids[at : at + 4], "little") for at in range(0, len(ids), 4)]
