"""The limits of this machine: the fastest copies in memory and direct reads of a file.

Saves and loads are compared with these limits. The best settings depend on the machine, so several are
tried.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from statistics import median
from typing import Final

from kvtier_kernels import memcpy, nt_loops

Step = Callable[[], None]
COPY_THREADS: Final = (1, 2)
READ_THREADS: Final = (4, 8, 16, 32)
TRIALS: Final = 3
PARTS: Final = 4  # of the work of a thread


def huge(nbytes: int) -> memoryview:
    """Return anonymous memory, in huge pages if possible, so that page faults limit nothing."""
    memory = mmap.mmap(-1, nbytes)
    with contextlib.suppress(OSError):  # the kernel does not have them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def best(
    steps: Mapping[str, Step], trials: int = TRIALS, clock: Callable[[], float] = time.perf_counter
) -> tuple[str, Step]:
    """Return the fastest step and its name. The steps run alternately, after a warm-up of each."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(trials + 1):
        for name, step in steps.items():
            started = clock()
            step()
            if number:
                seconds[name].append(clock() - started)
    name = min(seconds, key=lambda one: median(seconds[one]))
    return name, steps[name]


def copies(
    targets: Sequence[memoryview],
    sources: Sequence[memoryview],
    most_threads: int = COPY_THREADS[-1],
) -> dict[str, Step]:
    """Return copies of these blocks: with memcpy and with streaming stores, on one core and on two."""
    cores = min(most_threads, len(os.sched_getaffinity(0)))
    return {
        f"{name}, {threads} thread{'s' * (threads > 1)}": partial(_copy, copy, threads, targets, sources)
        for name, copy in (("memcpy", _memcpy), ("streaming stores", nt_loops))
        for threads in COPY_THREADS
        if threads <= cores
    }  # fmt: skip


def _copy(
    copy: Callable[[Sequence[memoryview], Sequence[memoryview]], None],
    threads: int,
    targets: Sequence[memoryview],
    sources: Sequence[memoryview],
) -> None:
    if threads == 1:
        copy(targets, sources)
        return
    parts = threads * PARTS  # a thread that is delayed does fewer of them
    for _ in _pool(threads).map(
        lambda first: copy(targets[first::parts], sources[first::parts]), range(parts)
    ):
        pass


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads that are kept: to start them takes as long as copying megabytes."""
    return ThreadPoolExecutor(threads)


def _memcpy(targets: Sequence[memoryview], sources: Sequence[memoryview]) -> None:
    for target, source in zip(targets, sources, strict=True):
        memcpy(target, source)


def reads(fd: int, blocks: Sequence[memoryview]) -> dict[str, Step]:
    """Return sequential reads of the blocks of a file, with several numbers of threads."""
    return {f"{threads} threads": partial(_read, fd, blocks, threads) for threads in READ_THREADS}


def _read(fd: int, blocks: Sequence[memoryview], threads: int) -> None:
    def read(at: int) -> None:
        os.preadv(fd, [blocks[at]], at * len(blocks[at]))

    for _ in _pool(threads).map(read, range(len(blocks))):
        pass
