"""Divides a range of the buffer. Not thread-safe."""

from __future__ import annotations

from kvtier_daemon.codec.frame import pages


class BufferSpace:
    def __init__(self, at: int, nbytes: int) -> None:
        self.size = nbytes
        self.used = 0
        self._holes = {at: nbytes}  # sizes by place

    def take(self, nbytes: int) -> int | None:
        """Return the place of this many bytes, or None if no hole is large enough."""
        nbytes = pages(nbytes)
        for at, size in self._holes.items():
            if size >= nbytes:
                del self._holes[at]
                if size > nbytes:
                    self._holes[at + nbytes] = size - nbytes
                self.used += nbytes
                return at
        return None

    def give(self, at: int, nbytes: int) -> None:
        """Return what `take` gave."""
        nbytes = pages(nbytes)
        self.used -= nbytes
        for hole, size in list(self._holes.items()):
            if hole + size == at:
                at, nbytes = hole, nbytes + size
                del self._holes[hole]
            elif at + nbytes == hole:
                nbytes += size
                del self._holes[hole]
        self._holes[at] = nbytes
