"""A file of the daemon's disks that this process may read."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from contextlib import suppress

LIMIT_READ_FILES = 128  # that a connection keeps open
UNKNOWN = -1
COUNT_ENDED = (1 << 64) - 1  # the daemon counts forgets elsewhere


class ReadFile:
    """Closed with the last reference, so a read in another thread never uses a closed descriptor."""

    __slots__ = ("__weakref__", "fd", "nbytes", "number")

    def __init__(self, number: int, nbytes: int, fd: int) -> None:
        self.number = number
        self.nbytes = nbytes
        self.fd = fd
        weakref.finalize(self, os.close, fd)


class ReadFiles:
    """The files of one connection by their numbers. `closed` must be reported with the next request."""

    def __init__(self) -> None:
        self._of: dict[int, ReadFile] = {}  # the last used last
        self.closed: list[int] = []
        self._forgets: Sequence[int] = (UNKNOWN,)

    def add(self, file: ReadFile) -> None:
        if file.number:
            self._of[file.number] = file
        else:
            with suppress(OSError):  # without memory or descriptors, there is a lease for each read
                mapped = mmap.mmap(file.fd, file.nbytes, prot=mmap.PROT_READ)
                self._forgets = memoryview(mapped).cast("Q")

    @property
    def forgets(self) -> int:
        """A number that changes when a block of the tenant is forgotten, or UNKNOWN."""
        count = self._forgets[0]
        return UNKNOWN if count == COUNT_ENDED else count

    def use(self, number: int) -> ReadFile | None:
        file = self._of.pop(number, None)
        if file is not None:
            self._of[number] = file
        return file

    def close_oldest(self) -> None:
        """Close those beyond the limit, except for reads that still use them."""
        for number in list(self._of)[: max(0, len(self._of) - LIMIT_READ_FILES)]:
            del self._of[number]
            self.closed.append(number)

    def clear(self) -> None:
        self._of.clear()
