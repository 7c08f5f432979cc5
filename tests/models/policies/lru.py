"""Least recently used.

R. L. Mattson, J. Gecsei, D. R. Slutz, I. L. Traiger, "Evaluation techniques for storage
hierarchies", IBM Systems Journal 9(2), 1970. `Lru` is native, 8 bytes per block; `LruModel` is the
same in Python.
"""

from collections import OrderedDict
from itertools import islice

from models.policies.model import pack, unpack
from models.policies.native import Lru

__all__ = ["Lru", "LruModel"]


class LruModel:
    """The executable specification of `Lru`: an ordered dict, coldest first."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()
        self._held: set[int] = set()

    def now(self, seconds: float) -> None:
        """Ignored: only the order matters."""

    def added(self, ids: bytes, names: bytes = b"", parents: bytes = b"") -> None:
        for block in reversed(unpack(ids)):
            self._held.discard(block)
            self._order[block] = None
            self._order.move_to_end(block)

    def wanted(self, ids: bytes, names: bytes = b"") -> None:
        self.refreshed(ids)

    def refreshed(self, ids: bytes) -> None:
        for block in reversed(unpack(ids)):
            if block in self._order:
                self._order.move_to_end(block)

    def held(self, ids: bytes) -> None:
        for block in unpack(ids):
            if block in self._order:
                del self._order[block]
                self._held.add(block)

    def freed(self, ids: bytes) -> None:
        """Freed blocks were in use until now: they are recent."""
        for block in reversed(unpack(ids)):
            if block in self._held:
                self._held.discard(block)
                self._order[block] = None

    def left(self, ids: bytes) -> None:
        self.gone(ids)

    def gone(self, ids: bytes) -> None:
        for block in unpack(ids):
            self._order.pop(block, None)
            self._held.discard(block)

    def demoted(self, ids: bytes) -> None:
        for block in reversed(unpack(ids)):
            if block in self._order:
                self._order.move_to_end(block, last=False)

    def hinted(self, ids: bytes, importance: float, names: bytes = b"") -> None:
        unpack(ids)  # only recency matters

    def victims(self, n: int) -> bytes:
        return pack(list(islice(self._order, n)))

    def __len__(self) -> int:
        return len(self._order)

    def memory_bytes(self) -> int:
        return 100 * (len(self._order) + len(self._held))
