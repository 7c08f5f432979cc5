"""Divides a range of the buffer. Not thread-safe."""

from __future__ import annotations

from kvtier.frame import pages


class BufferSpace:
    def __init__(self, at: int, nbytes: int) -> None:
        self.size = nbytes
        self.used = 0
        self._holes = {at: nbytes}  # sizes by place
        self._ends = {at + nbytes: at}  # the same holes

    def take(self, nbytes: int) -> int | None:
        """Return the place of this many bytes, or None if no hole is large enough."""
        nbytes = pages(nbytes)
        for at, size in self._holes.items():
            if size >= nbytes:
                self._remove(at)
                if size > nbytes:
                    self._add(at + nbytes, size - nbytes)
                self.used += nbytes
                return at
        return None

    def give(self, at: int, nbytes: int) -> None:
        """Return what `take` gave."""
        nbytes = pages(nbytes)
        self.used -= nbytes
        if (before := self._ends.get(at)) is not None:
            at, nbytes = before, nbytes + self._remove(before)
        if at + nbytes in self._holes:
            nbytes += self._remove(at + nbytes)
        self._add(at, nbytes)

    def _add(self, at: int, nbytes: int) -> None:
        self._holes[at] = nbytes
        self._ends[at + nbytes] = at

    def _remove(self, at: int) -> int:
        nbytes = self._holes.pop(at)
        del self._ends[at + nbytes]
        return nbytes
