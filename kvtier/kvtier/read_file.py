"""A file of the daemon's disks that this process may read."""

from __future__ import annotations

import os
import weakref

LIMIT_READ_FILES = 128  # that a connection keeps open


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

    def add(self, file: ReadFile) -> None:
        self._of[file.number] = file

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
