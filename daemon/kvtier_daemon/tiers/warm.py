"""The memory of the warm tier: extents in memfds. Each belongs to one tenant for the life of the daemon. They
are faulted in while others are in use. Extents that a user who left the tenant may have mapped are retired,
and replaced by others (see `renewing`)."""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from kvtier.units import format_bytes
from kvtier_daemon.tiers.kept_arena import (
    NOTE_BYTES,
    PAGE,
    SEALS,
    ExtentFiles,
    KeptArena,
    noted_pages,
    part_bytes,
)
from kvtier_kernels import Mapping, Prefaulter

log = logging.getLogger(__name__)

HUGE_PAGE = 2 << 20


def table_bytes(extent_bytes: int) -> int:
    """Size of an extent's table of generations, which has one for each page that a slot can start on."""
    return part_bytes(extent_bytes)[1]


def plan_extents(
    quotas: dict[str, int], extent_bytes: int, page: int = PAGE
) -> list[tuple[str, int]]:
    """Return each extent's tenant and size, in the order in which they are faulted in: one of each tenant in
    turn, so that all tenants have memory soon. The sizes of a tenant sum to its quota, in whole pages."""
    left = {tenant: quota - quota % page for tenant, quota in quotas.items()}
    extent_bytes = max(page, extent_bytes - extent_bytes % page)
    order: list[tuple[str, int]] = []
    while any(left.values()):
        for tenant, remaining in left.items():
            if remaining:
                nbytes = min(extent_bytes, remaining)
                left[tenant] -= nbytes
                order.append((tenant, nbytes))
    return order


@dataclass(slots=True)
class Extent:
    """A piece of the arena. `table_fd` is a read-only reopening: clients never write generations. `notes`
    describes the blocks in its slots for the next daemon; `noted` are the runs of pages with older notes."""

    tenant: str
    nbytes: int
    fd: int
    table_fd: int
    table: Mapping
    notes: Mapping | None = None
    noted: tuple[tuple[int, int], ...] = ()
    is_retired: bool = False  # no further blocks get slots in it
    is_empty: bool = False  # and its pages are freed

    def handles(self, read_only: bool) -> tuple[int, int]:
        """Return new descriptors of the extent and of its table; the caller closes both. A read-only one
        cannot be mapped for writing."""
        path = f"/proc/self/fd/{self.fd}"
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if read_only else os.dup(self.fd)
        try:
            return fd, os.dup(self.table_fd)
        except OSError:
            os.close(fd)
            raise

    def free(self) -> None:
        """Free its pages, although other processes have it mapped: they read zeros."""
        with mmap.mmap(self.fd, self.nbytes) as mapped:
            mapped.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        os.close(self.fd)
        os.close(self.table_fd)


class WarmTier:
    """Creates the extents in sequence in a native thread, and reports each when it can be used.

    `posix_fallocate` allocates the memory: without it, a lack of memory would be a SIGBUS later.
    """

    def __init__(
        self,
        quotas: dict[str, int],
        extent_bytes: int,
        lock: bool = False,
        huge_pages: bool = False,
        kept: KeptArena | None = None,
    ) -> None:
        self._lock = lock
        self._kept = kept
        self._earlier: deque[Extent] = deque()  # not yet returned by `taken_over`
        self._huge_pages = huge_pages
        page = HUGE_PAGE if huge_pages else PAGE
        left = dict(quotas)
        for tenant, quota in quotas.items():
            for files in kept.take(tenant, quota) if kept is not None else ():
                left[tenant] -= files.nbytes
                self._earlier.append(_take_over(tenant, files))
        self._earlier_bytes = sum(extent.nbytes for extent in self._earlier)
        self._plan = plan_extents(left, extent_bytes, page)
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Reserved huge pages are not faulted in.
        self._prefaulter = Prefaulter(self.event_fd, not huge_pages)
        self._files: list[tuple[int, int]] = []
        self._finished = 0
        self._freed_bytes = 0  # of retired extents
        self.extents: list[Extent] = []
        self.capacity_bytes = self._earlier_bytes + sum(nbytes for _, nbytes in self._plan)
        self.failure = ""

    def start(self) -> int:
        """Begin to allocate. Return the descriptor that becomes readable when `ready` has new extents."""
        for tenant, nbytes in self._plan:
            self._allocate(tenant, nbytes)
        return self.event_fd

    def _allocate(self, tenant: str, nbytes: int) -> None:
        place = len(self._files)
        fd = _memfd(f"kvtier-{tenant}-{place}", nbytes, self._huge_pages)
        table_fd = _memfd(f"kvtier-{tenant}-{place}-generations", table_bytes(nbytes))
        self._files.append((fd, table_fd))
        # The table first: an extent cannot be used without it.
        self._prefaulter.add(table_fd, table_bytes(nbytes))
        self._prefaulter.add(fd, nbytes, self._lock)

    def forget_kept(self, tenant: str) -> None:
        """Leave the present extents of this tenant to no other daemon."""
        if self._kept is not None:
            self._kept.retire(tenant)

    def replace(self, extent: Extent) -> None:
        """Allocate another extent instead of this one, whose pages are freed."""
        extent.is_empty = True
        self._freed_bytes += extent.nbytes
        self._plan.append((extent.tenant, extent.nbytes))
        self._allocate(extent.tenant, extent.nbytes)

    def ready(self) -> Iterator[Extent]:
        """Yield the extents that have become usable since the last call."""
        try:
            os.eventfd_read(self.event_fd)
        except BlockingIOError:
            return
        progress = self._prefaulter.progress()
        while self._finished < len(self._plan) and not self.failure:
            pair = progress[2 * self._finished : 2 * self._finished + 2]
            tenant, nbytes = self._plan[self._finished]
            code = next((code for _, code in pair if code), 0)
            if code:
                self._give_up(code, nbytes)
                return
            if pair[1][0] < nbytes:
                return
            try:
                extent = self._finish(tenant, nbytes, *self._files[self._finished])
            except OSError as error:
                self._give_up(error.errno or errno.EIO, nbytes)
                return
            self._finished += 1
            self.extents.append(extent)
            yield extent

    def taken_over(self) -> Iterator[Extent]:
        """The extents of the earlier daemon, once each. They need no allocation."""
        while self._earlier:
            extent = self._earlier.popleft()
            self.extents.append(extent)
            yield extent

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the arena that are allocated so far."""
        done = sum(done for done, _ in self._prefaulter.progress()[1::2])
        return self._earlier_bytes + done - self._freed_bytes

    @property
    def huge_bytes(self) -> int:
        """Bytes of the arena that are in huge pages."""
        return self._prefaulter.huge_bytes()

    @property
    def complete(self) -> bool:
        return self._finished == len(self._plan) or bool(self.failure)

    def close(self) -> None:
        self._prefaulter.stop()
        del self._prefaulter  # it owns descriptors and locks
        for extent in (*self.extents, *self._earlier):
            extent.close()
        for fd, table_fd in self._files[self._finished :]:
            os.close(fd)
            os.close(table_fd)
        self.extents.clear()
        self._files.clear()
        os.close(self.event_fd)

    def _finish(self, tenant: str, nbytes: int, fd: int, table_fd: int) -> Extent:
        for each in (fd, table_fd):
            fcntl.fcntl(each, fcntl.F_ADD_SEALS, SEALS)
        if self._kept is None:
            return _extent(tenant, nbytes, fd, table_fd, None)
        # Not allocated: the pages between the first pages of slots are never written.
        notes_fd = _memfd(f"kvtier-{tenant}-notes", nbytes // PAGE * NOTE_BYTES)
        try:
            fcntl.fcntl(notes_fd, fcntl.F_ADD_SEALS, SEALS)
            self._kept.keep(tenant, ExtentFiles(nbytes, fd, table_fd, notes_fd))
            notes = Mapping(notes_fd, nbytes // PAGE * NOTE_BYTES, True)
        finally:
            os.close(notes_fd)
        return _extent(tenant, nbytes, fd, table_fd, notes)

    def _give_up(self, code: int, nbytes: int) -> None:
        have = format_bytes(sum(extent.nbytes for extent in self.extents))
        self.failure = (
            f"the arena stays at {have} of {format_bytes(self.capacity_bytes)}: cannot "
            f"allocate an extent of {format_bytes(nbytes)} ({os.strerror(code)}, "
            f"{errno.errorcode.get(code, code)})"
        )
        log.error("%s", self.failure)


def _extent(tenant: str, nbytes: int, fd: int, table_fd: int, notes: Mapping | None) -> Extent:
    table = Mapping(table_fd, table_bytes(nbytes), True)
    read_only = os.open(f"/proc/self/fd/{table_fd}", os.O_RDONLY | os.O_CLOEXEC)
    os.close(table_fd)  # the mapping stays
    return Extent(tenant, nbytes, fd, read_only, table, notes)


def generation_table(name: str, nbytes: int) -> tuple[Mapping, int]:
    """A new table of generations for memory that is not the daemon's, and a read-only descriptor of it."""
    fd = _memfd(f"{name}-generations", table_bytes(nbytes))
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        table = Mapping(fd, table_bytes(nbytes), True)
        return table, os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(fd)


class SharedCounter:
    """A number in memory that clients can map read-only."""

    def __init__(self, name: str) -> None:
        fd = _memfd(name, PAGE)
        try:
            os.posix_fallocate(fd, 0, PAGE)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            self.word = memoryview(mmap.mmap(fd, PAGE)).cast("Q")
            self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(fd)
        weakref.finalize(self, os.close, self._fd)

    def handles(self, read_only: bool) -> tuple[int, ...]:
        return (os.dup(self._fd),)


def _take_over(tenant: str, files: ExtentFiles) -> Extent:
    """Map an extent of the earlier daemon."""
    noted = tuple(noted_pages(files.notes_fd, NOTE_BYTES))
    notes = Mapping(files.notes_fd, files.nbytes // PAGE * NOTE_BYTES, True)
    os.close(files.notes_fd)
    extent = _extent(tenant, files.nbytes, files.fd, files.table_fd, notes)
    extent.noted = noted
    return extent


def _memfd(name: str, nbytes: int, huge_pages: bool = False) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if huge_pages:
        flags |= os.MFD_HUGETLB | os.MFD_HUGE_2MB
    fd = os.memfd_create(name, flags)
    # A memfd is created with mode 0777. With that mode, a read-only descriptor could be reopened for writing
    # through /proc.
    os.fchmod(fd, 0o600)
    os.ftruncate(fd, nbytes)
    return fd
