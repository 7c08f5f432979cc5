"""Memory that blocks are encoded to and written from: one piece of it for all tenants, of which each has what
it needs, and for which they wait in turn.

The disks' workers know it for good, so it is made once, and nothing of it is given back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from kvtier_daemon.codec.frame import pages

STAGED_BYTES = 128 << 20
PATIENCE_S = 6.0  # a disk that hangs keeps what it has


class EncodeBuffer:
    """`room(nbytes)` makes memory: its number with the disks, and its size. What is asked for and larger than
    all of it has a piece of its own, one at a time."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        room: Callable[[int], tuple[int, int]],
        most: int = STAGED_BYTES,
    ) -> None:
        self.most = most
        self.used = 0
        self.waited = 0  # who found none free
        self.refused = 0  # and got none
        self._stuck = False  # somebody waited in vain, and nothing was given back since
        self._loop = loop
        self._room = room
        self._holes: dict[int, dict[int, int]] = {}  # by extent: offsets, and sizes
        self._sizes: dict[int, int] = {}
        self._waiting: deque[tuple[int, asyncio.Future[tuple[int, int]]]] = deque()

    async def take(self, nbytes: int) -> tuple[int, int] | None:
        """So many bytes in whole pages, uncleared: an extent and the offset in it. None where nothing became
        free in time; who comes after that waits no more, until something does: what a disk that hangs has may
        be all there is. Raises OSError where memory can't be made."""
        nbytes = pages(nbytes)
        if not self._waiting and (place := self._cut(nbytes)) is not None:
            return place
        self.waited += 1
        if self._stuck:
            self.refused += 1
            return None
        mine: asyncio.Future[tuple[int, int]] = self._loop.create_future()
        self._waiting.append((nbytes, mine))
        try:
            await asyncio.wait([mine], timeout=PATIENCE_S)
        except asyncio.CancelledError:
            if not self._leave(nbytes, mine) and not mine.exception():
                self.give(*mine.result(), nbytes)
            raise
        if self._leave(nbytes, mine):
            self.refused += 1
            self._stuck = True
            return None
        return mine.result()

    def _leave(self, nbytes: int, mine: asyncio.Future[tuple[int, int]]) -> bool:
        """Wait no more; False where there is an answer by now."""
        if mine.done():
            return False
        self._waiting.remove((nbytes, mine))
        self._serve()
        return True

    def give(self, extent: int, offset: int, nbytes: int) -> None:
        """Nobody touches these pages any more."""
        if not nbytes:
            return
        holes = self._holes[extent]
        self._stuck = False
        self.used -= nbytes
        for at, size in list(holes.items()):
            if at + size == offset:
                offset, nbytes = at, size + nbytes
                del holes[at]
            elif at == offset + nbytes:
                nbytes += size
                del holes[at]
        holes[offset] = nbytes
        self._serve()

    def _serve(self) -> None:
        """In their turn: a large one would wait for ever behind small ones."""
        while self._waiting:
            nbytes, theirs = self._waiting[0]
            try:
                place = self._cut(nbytes)
            except OSError as error:
                theirs.set_exception(error)
            else:
                if place is None:
                    return
                theirs.set_result(place)
            self._waiting.popleft()

    def _make(self, nbytes: int) -> None:
        """See to it that there is memory for so many bytes, used or not."""
        wanted = nbytes if nbytes > self.most else self.most
        if not any(size >= wanted for size in self._sizes.values() if self._suits(size, nbytes)):
            extent, size = self._room(wanted)
            size = size if wanted > self.most else wanted
            self._sizes[extent], self._holes[extent] = size, {0: size}

    def _suits(self, size: int, nbytes: int) -> bool:
        return (size > self.most) == (nbytes > self.most)

    def _cut(self, nbytes: int) -> tuple[int, int] | None:
        """From the smallest hole that does."""
        self._make(nbytes)
        found = [
            (size, extent, at)
            for extent, holes in self._holes.items()
            for at, size in holes.items()
            if size >= nbytes and self._suits(self._sizes[extent], nbytes)
        ]
        if not found:
            return None
        size, extent, at = min(found)
        del self._holes[extent][at]
        if size > nbytes:
            self._holes[extent][at + nbytes] = size - nbytes
        self.used += nbytes
        return extent, at
