"""The disk worker against fio: blocks of 2 MiB between one file and memory, past the page cache.

Each row pairs short runs of the worker with runs of fio of the same block size, depth and bytes, in
alternating order; what counts is the median of the pairs' ratios, as a shared disk can be half as fast a
minute later. CPU seconds are those of the whole process, the kernel's own workers among them; for fio the
user and system seconds that it reports. The files are written beforehand and recycled.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import harness
from harness import Row
from kvtier_kernels import Disk, Mapping, xxh3_128
from kvtier_kernels.reference import OPERATION

MIB = 1 << 20
BLOCK = 2 * MIB
DIGEST = 2
WRITES_A_SYNC = 64
LOOPS = 1  # passes over the file in a run
# Before each run: disks of virtual machines have a store of bytes that go faster, and refill it in time.
PAUSE_S = 1.0
HEADER = 4096
PAIRS = 10
# CPU seconds per GB: without and with registered memory, and what verifying may add.
PLAIN_CPU, FIXED_CPU, VERIFY_CPU = 0.07, 0.03, 0.06


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
        with open(self.write_file, "wb") as file:
            for _ in range(self.blocks):
                file.write(bytes(BLOCK + HEADER))
            os.fsync(file.fileno())
        memory = os.memfd_create("bench")
        os.posix_fallocate(memory, 0, self.nbytes)
        self.mapping = Mapping(memory, self.nbytes, True)
        self.mapping.populate()
        os.close(memory)


@dataclass
class Arm:
    """Runs of one thing: seconds and CPU seconds of each."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


class Worker(Arm):
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
        if self.writes:
            return self._timed(self._write)
        return self._timed(self._read)

    def _timed(self, run: Any) -> None:
        cpu, thread, started = time.process_time(), self.disk.cpu_s, time.perf_counter()
        run()
        self.seconds.append(time.perf_counter() - started)
        self.cpu.append(time.process_time() - cpu)
        self.thread_cpu.append(self.disk.cpu_s - thread)

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
        for _ in range(LOOPS):
            self.disk.read(b"".join(ops))
        self._wait(place.blocks * LOOPS)

    def _write(self) -> None:
        place = self.place
        header_at = (0).to_bytes(8, "little") + HEADER.to_bytes(8, "little")
        record = BLOCK + HEADER
        waiting = 0
        for first in [*range(0, place.blocks, WRITES_A_SYNC)] * LOOPS:
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


class Fio(Arm):
    """The same bytes by fio at its best, io_uring with registered buffers; its own seconds are counted,
    not those before its first read."""

    def __init__(self, place: Place, depth: int, writes: bool) -> None:
        super().__init__()
        size = BLOCK + HEADER if writes else BLOCK
        path = place.write_file if writes else place.read_file
        self.command = [
            "fio", "--name=limit", f"--filename={path}", f"--rw={'write' if writes else 'read'}",
            f"--bs={size}", f"--size={place.blocks * size}", f"--loops={LOOPS}", "--direct=1",
            "--ioengine=io_uring", f"--iodepth={depth}", "--fixedbufs=1", "--overwrite=1",
            "--allow_file_create=0", "--output-format=json",
            *([f"--fdatasync={WRITES_A_SYNC}"] if writes else []),
        ]  # fmt: skip

    def once(self) -> None:
        done = subprocess.run(self.command, capture_output=True, text=True, check=True)
        [job] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
        part = job["write"] if job["write"]["io_bytes"] else job["read"]
        seconds = part["runtime"] / 1e3
        self.seconds.append(seconds)
        self.cpu.append((job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds)


def disk_reads() -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes"):
            return int(line.split()[1])
    raise RuntimeError("no read_bytes")


def check(place: Place) -> None:
    """Every byte comes from the disk, and is the right one."""
    for engine in ("io_uring", "threads"):
        worker = Worker(place, engine, 8, True, True, False)
        before = disk_reads()
        worker.once()
        found = disk_reads() - before
        worker.close()
        assert found >= place.nbytes, f"{engine}: {found} of {place.nbytes} bytes from the disk"


def row(
    place: Place, name: str, engine: str, depth: int, fixed: bool, verify: bool, writes: bool,
    pairs: int, cpu_bar: float | None,
) -> list[Row]:  # fmt: skip
    worker = Worker(place, engine, depth, fixed, verify, writes)
    fio = Fio(place, depth, writes)
    worker.once()
    fio.once()
    for arm in (worker, fio):
        arm.seconds.clear()
        arm.cpu.clear()
    worker.thread_cpu.clear()
    ratios = []
    for number in range(pairs):
        for arm in (worker, fio) if number % 2 == 0 else (fio, worker):
            time.sleep(PAUSE_S)
            arm.once()
        ratios.append(fio.seconds[-1] / worker.seconds[-1])
    worker.close()
    gigabytes = place.nbytes * LOOPS / 1e9
    low, high = harness.interval(ratios)
    value = median(ratios)
    rows = [
        Row(
            f"{name}: throughput beside fio", value, "x", ">= 0.95", value >= 0.95, low, high,
            {"GB/s": gigabytes / median(worker.seconds), "fio GB/s": gigabytes / median(fio.seconds)},
        )
    ]  # fmt: skip
    spent = [cpu / gigabytes for cpu in worker.cpu]
    low, high = harness.interval(spent)
    cpu = median(spent)
    rows.append(
        Row(
            f"{name}: CPU", cpu, "s/GB", f"<= {cpu_bar:g}" if cpu_bar else "",
            cpu <= cpu_bar if cpu_bar else None, low, high,
            {
                "of it in our threads": median(worker.thread_cpu) / gigabytes,
                "fio": median(fio.cpu) / gigabytes,
            },
        )
    )  # fmt: skip
    return rows


def depths(place: Place, pairs: int) -> list[Row]:
    """Each depth beside a depth of 32, for the choice of one."""
    rows = []
    for engine in ("io_uring", "threads"):
        most = Worker(place, engine, 32, True, False, False)
        for depth in (1, 2, 4, 8, 16):
            worker = Worker(place, engine, depth, True, False, False)
            ratios = []
            for number in range(pairs + 1):
                for arm in (worker, most) if number % 2 == 0 else (most, worker):
                    time.sleep(PAUSE_S)
                    arm.once()
                ratios.append(most.seconds[-1] / worker.seconds[-1])
            worker.close()
            low, high = harness.interval(ratios[1:])
            name = f"reads, {engine}: depth {depth} beside 32"
            rows.append(Row(name, median(ratios[1:]), "x", low=low, high=high))
        most.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where the files go: on the disk in question")
    parser.add_argument("--mib", type=int, default=1024, help="bytes a run")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--only", default="", help="rows whose name has this")
    parser.add_argument("--depths", action="store_true", help="compare depths instead")
    parser.add_argument("--out")
    given = parser.parse_args()
    if shutil.which("fio") is None:
        print("skipped: there is no fio here")
        return 0
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        place = Place(Path(folder), given.mib * MIB)
        check(place)
        probes = [harness.noise()]
        rows: list[Row] = []
        if given.depths:
            rows += depths(place, given.pairs)
        else:
            for name, engine, fixed, verify, writes, bar in [
                ("reads, io_uring, registered", "io_uring", True, False, False, FIXED_CPU),
                ("reads, io_uring, registered, verified", "io_uring", True, True, False,
                 FIXED_CPU + VERIFY_CPU),
                ("reads, io_uring", "io_uring", False, False, False, PLAIN_CPU),
                ("reads, io_uring, verified", "io_uring", False, True, False,
                 PLAIN_CPU + VERIFY_CPU),
                ("reads, threads", "threads", False, False, False, PLAIN_CPU),
                ("reads, threads, verified", "threads", False, True, False,
                 PLAIN_CPU + VERIFY_CPU),
                ("records written and synced, io_uring", "io_uring", True, False, True, None),
                ("records written and synced, threads", "threads", False, False, True, None),
            ]:  # fmt: skip
                if given.only not in name:
                    continue
                found = row(
                    place, name, engine, given.depth, fixed, verify, writes, given.pairs, bar
                )
                rows += found
                print(*(line.line() for line in found), sep="\n", flush=True)
        probes.append(harness.noise())
        return harness.report("disk_depths" if given.depths else "disk", rows, probes, given.out)


if __name__ == "__main__":
    sys.exit(main())
