"""What benchmarks of disks share: the native worker and fio as arms, runs of them in turn, what came past
the page cache.

Each arm runs once a round, in alternating order, after a pause; what counts is the median of the rounds'
ratios, as a shared disk can be half as fast a minute later.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import mmap
import os
import random
import select
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import harness
from harness import Row
from kvtier_kernels import Disk, Mapping, xxh3_128
from models.kernels import OPERATION

MIB = 1 << 20
BLOCK = 2 * MIB
DIGEST = 2
HEADER = 4096
WRITES_A_SYNC = 64
PAIRS = 10
# Before each run: disks of virtual machines have a store of bytes that go faster, and refill it in time.
PAUSE_S = 1.0
# CPU seconds per GB: without and with registered memory, and what verifying may add.
PLAIN_CPU, FIXED_CPU, VERIFY_CPU = 0.07, 0.03, 0.06


@dataclass
class Arm:
    """Runs of one thing: seconds and CPU seconds of each."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def once(self) -> None:
        raise NotImplementedError

    def forget(self) -> None:
        """Discard the measurements so far, which were a warm-up."""
        self.seconds.clear()
        self.cpu.clear()


def in_turn(arms: Sequence[Arm], rounds: int, pause_s: float = PAUSE_S) -> None:
    """Run each arm once a round, in alternating order, and before that once for nothing."""
    for arm in arms:
        arm.once()
        arm.forget()
    for number in range(rounds):
        for arm in arms if number % 2 == 0 else reversed(arms):
            time.sleep(pause_s)
            arm.once()


def beside(one: Arm, other: Arm) -> list[float]:
    """Speed of `one` relative to `other`, a ratio a round."""
    return [theirs / ours for ours, theirs in zip(one.seconds, other.seconds, strict=True)]


def speed_row(
    name: str, one: Arm, other: Arm, nbytes: int, bar: float | None, label: str = "fio"
) -> Row:
    ratios = beside(one, other)
    low, high = harness.interval(ratios)
    value, gigabytes = median(ratios), nbytes / 1e9
    return Row(
        f"{name}: throughput relative to {label}", value, "x", f">= {bar:g}" if bar else "",
        value >= bar if bar else None, low, high,
        ({"settings": other.chosen} if isinstance(other, Fio) else {})
        | {"GB/s": gigabytes / median(one.seconds), f"{label} GB/s": gigabytes / median(other.seconds)},
    )  # fmt: skip


def cpu_row(name: str, arm: Arm, nbytes: int, bar: float | None, **more: Any) -> Row:
    spent = [cpu / (nbytes / 1e9) for cpu in arm.cpu]
    low, high = harness.interval(spent)
    value = median(spent)
    return Row(
        f"{name}: CPU", value, "s/GB", f"<= {bar:g}" if bar else "", value <= bar if bar else None,
        low, high, more,
    )  # fmt: skip


# --- the worker ---------------------------------------------------------------------------------


class Place:
    """A file of random blocks, their digests, and memory with a slot for each."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.blocks = nbytes // BLOCK
        self.nbytes = self.blocks * BLOCK
        self.read_file, self.write_file = folder / "blocks", folder / "records"
        self.digests = []
        with open(self.read_file, "wb") as file:
            for _ in range(self.blocks):
                block = random.randbytes(BLOCK)
                self.digests.append(xxh3_128(block))
                file.write(block)
            os.fsync(file.fileno())
        recycled(self.write_file, self.blocks * (BLOCK + HEADER))
        memory = os.memfd_create("bench")
        os.posix_fallocate(memory, 0, self.nbytes)
        self.mapping = Mapping(memory, self.nbytes, True)
        self.mapping.populate()
        os.close(memory)


def recycled(path: Path, nbytes: int) -> None:
    """Make a file that was written before, so that its blocks are there."""
    with open(path, "wb") as file:
        for at in range(0, nbytes, MIB):
            file.write(bytes(min(MIB, nbytes - at)))
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Worker(Arm):
    """The native worker alone, in this process."""

    def __init__(
        self, place: Place, engine: str, depth: int, fixed: bool, verify: bool, writes: bool
    ) -> None:
        super().__init__()
        self.place, self.verify, self.writes = place, verify, writes
        self.bell = os.eventfd(0, os.EFD_NONBLOCK)
        # As much in the kernel as fio has: writes have half the depth, reads all but an eighth.
        self.disk = Disk(self.bell, engine, depth * 2 if writes else depth + max(1, depth // 7))
        self.disk.register(place.mapping, fixed)
        while fixed and engine == "io_uring" and self.disk.registered_bytes < place.nbytes:
            time.sleep(0.001)
        path = place.write_file if writes else place.read_file
        self.fd = os.open(path, (os.O_RDWR if writes else os.O_RDONLY) | os.O_DIRECT)
        self.thread_cpu: list[float] = []

    def once(self) -> None:
        run = self._write if self.writes else self._read
        cpu, thread, started = time.process_time(), self.disk.cpu_s, time.perf_counter()
        run()
        self.seconds.append(time.perf_counter() - started)
        self.cpu.append(time.process_time() - cpu)
        self.thread_cpu.append(self.disk.cpu_s - thread)

    def forget(self) -> None:
        super().forget()
        self.thread_cpu.clear()

    def _wait(self, left: int) -> None:
        while left:
            select.select([self.bell], [], [])
            os.eventfd_read(self.bell)
            for token, error, _ in self.disk.done():
                if error:
                    raise OSError(error, f"operation {token}: {os.strerror(error)}")
                left -= 1

    def _read(self) -> None:
        place, flags = self.place, DIGEST if self.verify else 0
        ops = [
            OPERATION.pack(i, self.fd, flags, i * BLOCK, BLOCK, 0, 0, i * BLOCK, digest)
            for i, digest in enumerate(place.digests)
        ]
        self.disk.read(b"".join(ops))
        self._wait(place.blocks)

    def _write(self) -> None:
        place = self.place
        header_at = (0).to_bytes(8, "little") + HEADER.to_bytes(8, "little")
        record = BLOCK + HEADER
        waiting = 0
        for first in range(0, place.blocks, WRITES_A_SYNC):
            some = range(first, min(first + WRITES_A_SYNC, place.blocks))
            ops = [
                OPERATION.pack(i, self.fd, 0, i * record, BLOCK, 0, 0, i * BLOCK, header_at)
                for i in some
            ]
            self.disk.write(b"".join(ops), bytes(HEADER))
            self.disk.sync(place.blocks, self.fd)
            waiting += len(some) + 1
        self._wait(waiting)

    def close(self) -> None:
        self.disk.stop()
        os.close(self.fd)
        os.close(self.bell)


# --- fio ----------------------------------------------------------------------------------------


class Fio(Arm):
    """So many bytes by fio at its best: io_uring with registered buffers, and those depths, numbers of jobs
    and kinds of memory that its first run finds to be the fastest, in `chosen`. Depth 1 stays what it is.

    Its own seconds are counted, not those before its first operation. Of several files each run takes the
    next. `hole` bytes are left out between two blocks; `first` is where the first one lies.
    """

    def __init__(
        self, files: Iterable[Path], nbytes: int, block: int, depth: int, *, writes: bool = False,
        sync: int = 0, hole: int = 0, first: int = 0, at_random: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.latencies: list[float] = []  # the median of each run
        self._files = itertools.cycle(files)
        kind = ("rand" if at_random else "") + ("write" if writes else "read")
        self._command = [
            "fio", "--name=limit", f"--rw={kind}{f':{hole}' if hole else ''}", f"--bs={block}",
            f"--offset={first}", "--direct=1", "--ioengine=io_uring",
            "--fixedbufs=1", "--group_reporting=1", "--overwrite=1", "--allow_file_create=0",
            "--randrepeat=0", "--lat_percentiles=1", "--output-format=json",
            *([f"--fdatasync={sync}"] if sync else []),
            *(["--readonly"] if not writes else []),
        ]  # fmt: skip
        self._nbytes = nbytes
        self.chosen = ""
        self._settings = _fio_settings(nbytes, block, depth, split=not (hole or at_random or sync))

    def _choose(self) -> str:
        """The settings that are fastest here. Memory that the machine does not have is left out."""
        took: dict[str, float] = {}
        for settings in self._settings:
            try:
                self._run(settings)
            except subprocess.CalledProcessError:
                if "mmaphuge" not in settings:
                    raise
            else:
                took[settings] = self.seconds[-1]
        self.forget()
        return min(took, key=lambda settings: took[settings])

    def once(self) -> None:
        self.chosen = self.chosen or self._choose()
        self._run(self.chosen)

    def _run(self, settings: str) -> None:
        command = [*self._command, *settings.split(), f"--filename={next(self._files)}"]
        # Its buffers come from malloc, which takes huge pages where it is told to.
        environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        [job] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
        part = job["write"] if job["write"]["io_bytes"] else job["read"]
        assert part["io_bytes"] == self._nbytes, f"fio moved {part['io_bytes']}: {command}"
        seconds = part["runtime"] / 1e3
        self.seconds.append(seconds)
        self.cpu.append((job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds)
        self.latencies.append(part["lat_ns"]["percentile"]["50.000000"] / 1e9)

    def forget(self) -> None:
        super().forget()
        self.latencies.clear()


def _fio_settings(nbytes: int, block: int, depth: int, split: bool) -> list[str]:
    """What `Fio` tries: each depth with each kind of memory, and by two jobs where the bytes can be split."""
    depths = (depth,) if depth == 1 else (depth, 2 * depth, 4 * depth)
    found = [
        f"--iodepth={each} --io_size={nbytes}{memory}"
        for each in depths
        for memory in ("", " --mem=mmaphuge")
    ]
    half = nbytes // 2
    if split and depth > 1 and half % block == 0:
        found += [
            f"--iodepth={each} --io_size={half} --numjobs=2 --offset_increment={half}"
            for each in depths
        ]
    return found


# --- past the page cache ------------------------------------------------------------------------


def disk_bytes(pid: int | str = "self") -> tuple[int, int]:
    """Bytes that this process had disks read and write so far."""
    fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def cached_bytes(files: Iterable[Path]) -> int:
    """How much of these files the page cache has, by mincore."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    ]  # fmt: skip
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    found = 0
    for path in files:
        size = path.stat().st_size
        fd = os.open(path, os.O_RDONLY)
        at = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        os.close(fd)
        assert at != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
        pages = (ctypes.c_ubyte * (-(-size // mmap.PAGESIZE)))()
        assert libc.mincore(at, size, pages) == 0, os.strerror(ctypes.get_errno())
        libc.munmap(at, size)
        found += sum(page & 1 for page in bytes(pages)) * mmap.PAGESIZE
    return found
