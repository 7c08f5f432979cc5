"""A client's mappings of its tenant's extents and of their generation tables."""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import threading
import weakref

from kvtier.errors import ProtocolError
from kvtier_kernels import Mapping

LIMIT_EXTENTS = 65_536


class Arena:
    """The extents that the daemon has announced, mapped. Grows while in use, never shrinks.

    A thread faults new mappings in, one call without the GIL each, so that the first copy into a slot
    does not pay a page fault per 4 KiB.
    """

    def __init__(self, read_only: bool, populate: bool) -> None:
        self.extents: list[Mapping | None] = []
        self.tables: list[Mapping | None] = []
        self._read_only = read_only
        self._unpopulated: queue.SimpleQueue[Mapping | None] | None = None
        if populate:
            self._unpopulated = queue.SimpleQueue()
            threading.Thread(
                target=_populate, args=(self._unpopulated,), name="kvtier-populate", daemon=True
            ).start()
            # If `close` is never called, the thread ends when the arena is garbage-collected.
            weakref.finalize(self, self._unpopulated.put, None).atexit = False

    def add(self, index: int, nbytes: int, extent_fd: int, table_fd: int) -> None:
        """Map an extent and its table. Always closes the descriptors, also after an error."""
        try:
            if not 0 <= index < LIMIT_EXTENTS:
                raise ProtocolError(f"extent {index}: at most {LIMIT_EXTENTS} are possible")
            # A user that may only read gets a read-only descriptor.
            access = fcntl.fcntl(extent_fd, fcntl.F_GETFL) & os.O_ACCMODE
            extent = Mapping(extent_fd, nbytes, not self._read_only and access == os.O_RDWR)
            table = Mapping(table_fd, os.fstat(table_fd).st_size, False)
        finally:
            os.close(extent_fd)
            os.close(table_fd)
        for mappings, mapping in ((self.extents, extent), (self.tables, table)):
            mappings.extend([None] * (index + 1 - len(mappings)))
            mappings[index] = mapping
        if self._unpopulated is not None:
            self._unpopulated.put(extent)

    @property
    def nbytes(self) -> int:
        return sum(extent.size for extent in self.extents if extent is not None)

    def close(self) -> None:
        """Drop the mappings. Memory that a view refers to stays mapped until that view is deleted."""
        self.extents = []
        self.tables = []
        if self._unpopulated is not None:
            with contextlib.suppress(queue.Empty):
                while True:
                    self._unpopulated.get_nowait()
            self._unpopulated.put(None)
            self._unpopulated = None


def _populate(unpopulated: queue.SimpleQueue[Mapping | None]) -> None:
    while (mapping := unpopulated.get()) is not None:
        mapping.populate()
        del mapping  # or it would stay mapped while this thread waits for the next one
