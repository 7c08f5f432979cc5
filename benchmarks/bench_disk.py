"""The disk worker against fio: blocks of 2 MiB between one file and memory, past the page cache.

Each row pairs short runs of the worker with runs of fio of the same block size, depth and bytes, in
alternating order; what counts is the median of the pairs' ratios, as a shared disk can be half as fast a
minute later. CPU seconds are those of the whole process, the kernel's own workers among them; for fio the
user and system seconds that it reports. The files are written beforehand and recycled.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import median

import disks
import harness
from disks import (
    BLOCK,
    FIXED_CPU,
    HEADER,
    MIB,
    PAIRS,
    PLAIN_CPU,
    VERIFY_CPU,
    WRITES_A_SYNC,
    Fio,
    Place,
    Worker,
)
from harness import Row


def check(place: Place) -> None:
    """Every byte comes from the disk, and is the right one."""
    for engine in ("io_uring", "threads"):
        worker = Worker(place, engine, 8, True, True, False)
        before, _ = disks.disk_bytes()
        worker.once()
        found = disks.disk_bytes()[0] - before
        worker.close()
        assert found >= place.nbytes, f"{engine}: {found} of {place.nbytes} bytes from the disk"


def fio_of(place: Place, depth: int, writes: bool) -> Fio:
    """The same bytes as the worker's."""
    if not writes:
        return Fio([place.read_file], place.nbytes, BLOCK, depth)
    record = BLOCK + HEADER
    return Fio(
        [place.write_file], place.blocks * record, record, depth, writes=True, sync=WRITES_A_SYNC
    )


def row(
    place: Place, name: str, engine: str, depth: int, fixed: bool, verify: bool, writes: bool,
    pairs: int, cpu_bar: float | None,
) -> list[Row]:  # fmt: skip
    worker, fio = Worker(place, engine, depth, fixed, verify, writes), fio_of(place, depth, writes)
    disks.in_turn([worker, fio], pairs)
    worker.close()
    gigabytes = place.nbytes / 1e9
    return [
        disks.speed_row(name, worker, fio, place.nbytes, 0.95),
        disks.cpu_row(
            name, worker, place.nbytes, cpu_bar,
            **{"of it in our threads": median(worker.thread_cpu) / gigabytes,
               "fio": median(fio.cpu) / gigabytes},
        ),
    ]  # fmt: skip


def depths(place: Place, pairs: int) -> list[Row]:
    """Measure each depth relative to a depth of 32."""
    rows = []
    for engine in ("io_uring", "threads"):
        most = Worker(place, engine, 32, True, False, False)
        for depth in (1, 2, 4, 8, 16):
            worker = Worker(place, engine, depth, True, False, False)
            most.forget()
            disks.in_turn([worker, most], pairs)
            worker.close()
            ratios = disks.beside(worker, most)
            low, high = harness.interval(ratios)
            name = f"reads, {engine}: depth {depth} relative to 32"
            rows.append(Row(name, median(ratios), "x", low=low, high=high))
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
