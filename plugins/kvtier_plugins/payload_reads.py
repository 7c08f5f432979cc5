"""Two ways to bring payloads of frames from files into a device's memory: through pinned memory, and by
kvikio, which lets the disk write to the device if the machine can do that."""

from __future__ import annotations

import ctypes
import os
import re
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from kvtier.direct import DirectFrame
from kvtier.errors import KvtierError
from kvtier.read_file import ReadFile
from kvtier_kernels.cuda import Driver

READERS = 8  # threads, which wait for the disk
STATS = Path("/proc/driver/nvidia-fs/stats")
COUNTED_READS = re.compile(r"^Reads\s*:.*\bn=(\d+)", re.MULTILINE)


class DirectReadsError(KvtierError):
    """Frames cannot be read into the device's memory here."""


class PayloadReads(Protocol):
    """Reads of one batch at a time, by one thread."""

    name: str

    def read(
        self, frames: Sequence[DirectFrame], addresses: Sequence[int], stream: int
    ) -> list[bool]:
        """Read each payload, in whole pages, to its address on the device. Return which of them were read as
        a whole; they are there for all later work of the stream. Verifies nothing."""

    def close(self) -> None:
        """No read may be in progress."""


class PinnedReads:
    """Reads into pinned memory of `nbytes`, without the page cache where the file system permits that, and
    copies from there. `base`: the device's address that its first byte is copied to."""

    name = "pinned memory"

    def __init__(self, driver: Driver, base: int, nbytes: int) -> None:
        self._driver = driver
        self._base = base
        self._memory = driver.pinned_memory(nbytes)
        self._bytes = memoryview(self._memory).cast("B")
        self._threads = ThreadPoolExecutor(READERS, "kvtier-direct")

    def read(
        self, frames: Sequence[DirectFrame], addresses: Sequence[int], stream: int
    ) -> list[bool]:
        reads: list[Future[bool]] = [
            self._threads.submit(self._read, frame, address - self._base)
            for frame, address in zip(frames, addresses, strict=True)
        ]
        arrived = [False] * len(frames)
        host = ctypes.addressof(self._memory)
        try:
            for at, (read, frame, address) in enumerate(zip(reads, frames, addresses, strict=True)):
                if read.result():
                    self._driver.copy(
                        address, host + address - self._base, frame.read_bytes, stream
                    )
                    arrived[at] = True
        finally:
            # The memory is used again by the next batch.
            for read in reads:
                read.exception()
        return arrived

    def _read(self, frame: DirectFrame, at: int) -> bool:
        return read_whole(frame.file, self._bytes[at : at + frame.read_bytes], frame.payload_at)

    def close(self) -> None:
        self._threads.shutdown()
        self._bytes.release()
        self._driver.free_pinned(self._memory)


class _DeviceBytes:
    """A range of the device's memory, as kvikio takes it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


class CuFileReads:
    """Reads by kvikio. Whether it reads directly depends on the machine: see `direct_reads_fail`."""

    name = "kvikio"

    def __init__(self, base: int, nbytes: int) -> None:
        try:
            import kvikio
            import kvikio.defaults
        except ImportError as error:
            text = (
                f"kvikio is not installed ({error}); install kvikio-cu13, the extra gds of kvtier"
            )
            raise DirectReadsError(text) from error
        self._kvikio = kvikio
        self._open: weakref.WeakKeyDictionary[ReadFile, Any] = weakref.WeakKeyDictionary()
        self._memory = _DeviceBytes(base, nbytes)
        self._register("memory_register")

    @property
    def is_compatible_only(self) -> bool:
        """Whether kvikio reads into the host's memory and copies."""
        return bool(self._kvikio.defaults.is_compat_mode_preferred())

    def read(
        self, frames: Sequence[DirectFrame], addresses: Sequence[int], stream: int
    ) -> list[bool]:
        reads: list[Any] = []
        try:
            for frame, address in zip(frames, addresses, strict=True):
                reads.append(self._begin(frame, address))
        finally:
            arrived = [_read_bytes(one) for one in reads]
        return [count == frame.read_bytes for count, frame in zip(arrived, frames, strict=True)]

    def _begin(self, frame: DirectFrame, address: int) -> Any:
        file = self._open.get(frame.file)
        try:
            if file is None:
                # kvikio takes no descriptor. This path leads to its file, whatever is renamed.
                path = f"/proc/self/fd/{frame.file.fd}"
                os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))  # kvikio's errors have no type
                file = self._kvikio.CuFile(path, "r")
                self._open[frame.file] = file
            return file.pread(
                _DeviceBytes(address, frame.read_bytes), frame.read_bytes, frame.payload_at
            )
        except PermissionError as error:
            text = "kvikio may not open the segment again; set tenants.NAME.direct_group"
            raise DirectReadsError(f"{text}: {error}") from error
        except (OSError, RuntimeError):
            return None

    def _register(self, name: str) -> None:
        """Register the memory with cuFile, or end that. Does nothing without cuFile."""
        if not self.is_compatible_only:
            getattr(self._kvikio, name)(self._memory)

    def close(self) -> None:
        self._open.clear()
        self._register("memory_deregister")


def _read_bytes(read: Any) -> int:
    """Wait for a read; 0 if it failed."""
    try:
        return int(read.get()) if read is not None else 0
    except (OSError, RuntimeError):
        return 0


def read_whole(file: ReadFile, into: memoryview, at: int) -> bool:
    """Read these bytes of a file; False if they cannot be read, or if the file is shorter. Without a page
    cache, place and size are whole pages."""
    done = 0
    while done < len(into):
        try:
            count = os.preadv(file.fd, [into[done:]], at + done)
        except OSError:
            return False
        if count == 0:
            return False
        done += count
    return True


def counted_reads(stats: Path = STATS) -> int | None:
    """How many reads nvidia-fs has counted; None if it counts none."""
    try:
        found = COUNTED_READS.search(stats.read_text())
    except OSError:
        return None
    return int(found[1]) if found else None


def not_counted(stats: Path = STATS) -> str:
    """Return why nvidia-fs counts no reads, so that nothing can be proven; an empty text if it does."""
    if counted_reads(stats) is not None:
        return ""
    if not stats.exists():
        return f"{stats} does not exist: the kernel module nvidia-fs is not loaded"
    return f"{stats} counts no reads: write 1 to /sys/module/nvidia_fs/parameters/rw_stats_enabled"


def direct_reads_fail(read: Callable[[], bool], stats: Path = STATS) -> str:
    """Make a trial read, and return why it does not prove that the disk writes to the device; an empty text
    if nvidia-fs has counted it."""
    if why := not_counted(stats):
        return why
    before = counted_reads(stats)
    if before is None or not read():
        return "the trial read failed"
    after = counted_reads(stats)
    if after is None or after <= before:
        return f"nvidia-fs has not counted the trial read ({before} reads): it went through the host's memory"
    return ""
