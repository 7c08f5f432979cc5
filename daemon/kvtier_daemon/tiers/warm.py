"""The memory of the warm tier: extents in memfds. Each belongs to one tenant for the life of the daemon. They
are faulted in while others are in use."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass

from kvtier.units import format_bytes
from kvtier_kernels import Mapping, Prefaulter

log = logging.getLogger(__name__)

PAGE = 4096
HUGE_PAGE = 2 << 20
GENERATION_BYTES = 8
# They forbid to resize an extent and to add seals. F_SEAL_FUTURE_WRITE is not set: under it, a client that
# connects later could not map the arena for writing. Without it, a client can punch holes in its extents
# (measured on Linux 6.18: only that seal makes the kernel refuse fallocate and MADV_REMOVE).
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def table_bytes(extent_bytes: int) -> int:
    """Size of an extent's table of generations, which has one for each page that a slot can start on."""
    return -(-extent_bytes // PAGE) * GENERATION_BYTES


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
    """A piece of the arena. `table_fd` is a read-only reopening: clients never write generations."""

    tenant: str
    nbytes: int
    fd: int
    table_fd: int
    table: Mapping

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
    ) -> None:
        self._lock = lock
        self._huge_pages = huge_pages
        page = HUGE_PAGE if huge_pages else PAGE
        self._plan = plan_extents(quotas, extent_bytes, page)
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Reserved huge pages are not faulted in.
        self._prefaulter = Prefaulter(self.event_fd, not huge_pages)
        self._files: list[tuple[int, int]] = []
        self._finished = 0
        self.extents: list[Extent] = []
        self.capacity_bytes = sum(nbytes for _, nbytes in self._plan)
        self.failure = ""

    def start(self) -> int:
        """Begin to allocate. Return the descriptor that becomes readable when `ready` has new extents."""
        for place, (tenant, nbytes) in enumerate(self._plan):
            fd = _memfd(f"kvtier-{tenant}-{place}", nbytes, self._huge_pages)
            table_fd = _memfd(f"kvtier-{tenant}-{place}-generations", table_bytes(nbytes))
            self._files.append((fd, table_fd))
            # The table first: an extent cannot be used without it.
            self._prefaulter.add(table_fd, table_bytes(nbytes))
            self._prefaulter.add(fd, nbytes, self._lock)
        return self.event_fd

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

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the arena that are allocated so far."""
        return sum(done for done, _ in self._prefaulter.progress()[1::2])

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
        for extent in self.extents:
            extent.close()
        for fd, table_fd in self._files[len(self.extents) :]:
            os.close(fd)
            os.close(table_fd)
        self.extents.clear()
        self._files.clear()
        os.close(self.event_fd)

    def _finish(self, tenant: str, nbytes: int, fd: int, table_fd: int) -> Extent:
        for each in (fd, table_fd):
            fcntl.fcntl(each, fcntl.F_ADD_SEALS, SEALS)
        table = Mapping(table_fd, table_bytes(nbytes), True)
        read_only = os.open(f"/proc/self/fd/{table_fd}", os.O_RDONLY | os.O_CLOEXEC)
        os.close(table_fd)  # the mapping stays
        return Extent(tenant, nbytes, fd, read_only, table)

    def _give_up(self, code: int, nbytes: int) -> None:
        have = format_bytes(sum(extent.nbytes for extent in self.extents))
        self.failure = (
            f"the arena stays at {have} of {format_bytes(self.capacity_bytes)}: cannot "
            f"allocate an extent of {format_bytes(nbytes)} ({os.strerror(code)}, "
            f"{errno.errorcode.get(code, code)})"
        )
        log.error("%s", self.failure)


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
