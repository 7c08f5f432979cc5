"""A client's mappings of its tenant's extents and of their generation tables."""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import threading
import weakref
from collections.abc import Sequence

from kvtier import wire
from kvtier.errors import ProtocolError
from kvtier_kernels import Mapping

LIMIT_EXTENTS = 65_536

# The mappings of this process, by their memory and its table. A client that connects again, to the same
# daemon or to one that took the memory over, maps and populates nothing again. The kernel never gives two
# memfds one inode number, except those of huge pages; their tables are ordinary, so a pair is unique.
_Memory = tuple[bool, bool, int, int, int, int]
_extents: weakref.WeakValueDictionary[_Memory, Mapping] = weakref.WeakValueDictionary()
_tables: weakref.WeakValueDictionary[_Memory, Mapping] = weakref.WeakValueDictionary()


class Arena:
    """The extents that the daemon has announced, mapped. Grows while in use, never shrinks.

    A thread faults new mappings in, one call without the GIL each, so that the first copy into a slot
    does not pay a page fault per 4 KiB.
    """

    def __init__(self, read_only: bool, populate: bool) -> None:
        self.extents: list[Mapping | None] = []
        self.tables: list[Mapping | None] = []
        self._read_only = read_only
        self._populates = populate
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
            writable = not self._read_only and access == os.O_RDWR
            memory, sized = os.fstat(extent_fd), os.fstat(table_fd)
            name = (
                writable, self._populates,
                memory.st_dev, memory.st_ino, sized.st_dev, sized.st_ino,
            )  # fmt: skip
            extent, table = _extents.get(name), _tables.get(name)
            if extent is None or table is None or extent.size != nbytes:
                extent = _extents[name] = Mapping(extent_fd, nbytes, writable)
                table = _tables[name] = Mapping(table_fd, sized.st_size, False)
                if self._unpopulated is not None:
                    self._unpopulated.put(extent)
        finally:
            os.close(extent_fd)
            os.close(table_fd)
        for mappings, mapping in ((self.extents, extent), (self.tables, table)):
            mappings.extend([None] * (index + 1 - len(mappings)))
            mappings[index] = mapping

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


def same_slots(
    before: Sequence[Mapping | None], slots: bytes, now: Sequence[Mapping | None], others: bytes
) -> bool:
    """Whether these packed slots are the same memory in the mappings of two connections."""
    if len(slots) != len(others):
        return False
    return all(
        (offset, generation) == (offset2, generation2)
        and extent < len(before)
        and extent2 < len(now)
        and before[extent] is now[extent2]
        and now[extent2] is not None
        for (extent, _, offset, generation), (extent2, _, offset2, generation2) in zip(
            wire.SLOT.iter_unpack(slots), wire.SLOT.iter_unpack(others), strict=True
        )
    )
