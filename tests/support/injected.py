"""Run a script of cold-tier operations in a process in which one chosen system call fails or kills it."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import random
import shutil
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import KvtierError
from kvtier_daemon.tiers.cold.segment_log import Segment
from kvtier_daemon.tiers.cold.segment_store import SegmentStore
from support.cold_bench import BLOCK, MIB, Bench, key
from support.hasty import hurry
from support.specs import pattern

SIZE = 40 * MIB
SHARE = 0.22  # five segments: they are reused soon
BATCHES, BATCH = 7, 8  # in each of two runs
SCRIPT_S = 4.0  # for a run; a disk that fails permanently makes it wait in vain
WHOLE_S = 60.0  # for one without a fault, on a busy machine
PATIENCE_S = 40.0

CALLS = (
    "openat", "pread64", "preadv", "pwrite64", "pwritev", "fdatasync", "fsync", "fallocate", "unlink",
    "mkdir", "ftruncate", "flock", "mmap", "io_uring_setup", "io_uring_enter", "io_uring_register",
)  # fmt: skip
GROWS = ("openat", "pwrite64", "pwritev", "fdatasync", "fsync", "fallocate", "mkdir", "ftruncate")


class Telling(Bench):
    """Reports each operation before the disk can lose it."""

    def __init__(
        self, folder: Path, engine: str, share: float, tell: Connection | None = None
    ) -> None:
        self.tell = tell
        super().__init__([folder], SIZE, engine, share, "r32")

    def leave(self, shelf: SegmentStore, segment: Segment) -> None:
        gone = [n for n, one in self.on_disk.items() if one.segment == segment.number]
        if self.tell is not None:
            self.tell.send(("lost", gone))
        super().leave(shelf, segment)

    async def forget(self, number: int) -> None:
        """Report twice: before the forget (the block may be lost) and after it (it must not come back)."""
        one = self.on_disk.pop(number)
        assert self.tell is not None
        self.tell.send(("lost", [number]))
        self.tier.table.tombstone(
            one.segment.to_bytes(4, "little") + one.page.to_bytes(4, "little")
        )
        if not await self.tier.flush():
            self.tell.send(("forgotten", [number]))

    async def wrong(self, numbers: list[int]) -> list[int]:
        """Return the blocks that come back with wrong bytes; an error is a miss."""
        found = [(number, await self.read(number)) for number in numbers if number in self.on_disk]
        return [n for n, got in found if isinstance(got, bytes) and got != pattern(key(n), BLOCK)]


async def life(folder: Path, engine: str, tell: Connection, first: int, seconds: float) -> None:
    """Start, write, read, forget, stop: about a hundred operations."""
    chance = random.Random(first)
    bench = Telling(folder, engine, SHARE, tell)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await bench.recover()
                tell.send(("wrong", await bench.wrong(sorted(bench.on_disk)[-8:])))
                for at in range(first, first + BATCHES * BATCH, BATCH):
                    await bench.write(range(at, at + BATCH))
                    tell.send(("landed", [n for n in bench.on_disk if n >= at]))
                    some = chance.sample(sorted(bench.on_disk), min(5, len(bench.on_disk)))
                    tell.send(("wrong", await bench.wrong(some)))
                    if some and some[0] in bench.on_disk:
                        await bench.forget(some[0])
    finally:
        await bench.tier.close()


def script(folder: Path, engine: str, tell: Connection, seconds: float) -> None:
    """Run the script twice in the child, and report each run and its exceptions."""
    hurry(OFF_S=0.02, LONGEST_OFF_S=0.1, RETRY_GROW_S=0.05)
    tell.send(("ready", []))
    tell.recv()
    for number in range(2):
        try:
            asyncio.run(life(folder, engine, tell, number * 1000, seconds))
        except (KvtierError, OSError, MemoryError, RuntimeError) as error:
            tell.send(("raised", [f"{type(error).__name__}: {error}"]))
    tell.send(("finished", []))


@dataclass
class Outcome:
    """The reports of a child, and how it ended."""

    landed: set[int] = field(default_factory=set)
    forgotten: list[int] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)
    raised: list[str] = field(default_factory=list)
    finished: bool = False
    exit_code: int | None = None
    missing: list[int] = field(
        default_factory=list
    )  # by a start, of the blocks that it reported as on disk
    back: list[int] = field(
        default_factory=list
    )  # by a start, of the blocks that it reported as forgotten
    calls: Counter[str] = field(default_factory=Counter)

    @property
    def kind(self) -> str:
        if self.exit_code is None:
            return "hung"
        if self.wrong:
            return "wrong bytes"
        if self.missing:
            return "missing"
        if self.back:
            return "forgotten, and back"
        if not self.finished:
            return f"ended: {self.exit_code}"
        return "raised: " + "; ".join(self.raised) if self.raised else "went on"

    def hear(self, tell: Connection, deadline: float) -> None:
        """Read reports until the other end is closed."""
        with contextlib.suppress(EOFError):
            while tell.poll(max(0.0, deadline - time.monotonic())):
                what, numbers = tell.recv()
                if what == "landed":
                    self.landed |= set(numbers)
                elif what == "lost":
                    self.landed -= set(numbers)
                elif what == "finished":
                    self.finished = True
                else:
                    getattr(self, what).extend(numbers)


def traced(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    return not status.partition("TracerPid:")[2].lstrip().startswith("0")


def run_one(folder: Path, engine: str, *how: str, counts: Path | None = None) -> Outcome:
    """Run the script under strace with the options `how`, then start a tier on its files."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.injected"])
    outcome = Outcome()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    parent_end, child_end = context.Pipe()
    seconds = WHOLE_S if counts else SCRIPT_S
    child = context.Process(target=script, args=(folder, engine, child_end, seconds))
    child.start()
    child_end.close()
    deadline = time.monotonic() + PATIENCE_S + 2 * seconds
    assert parent_end.recv() == ("ready", [])
    output = ["-c", "-o", str(counts)] if counts else ["-o", os.devnull]
    tracer = subprocess.Popen(
        ["strace", "-f", "-qq", *output, *how, "-p", str(child.pid)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        while not traced(child.pid):
            if tracer.poll() is not None:
                assert tracer.stderr is not None
                pytest.skip(f"strace can't trace: {tracer.stderr.read().decode()}")
            time.sleep(0.002)
        parent_end.send("go")
        outcome.hear(parent_end, deadline)
        child.join(max(0.0, deadline - time.monotonic()))
        outcome.exit_code = child.exitcode
    finally:
        if child.exitcode is None:
            child.kill()
            child.join()
        parent_end.close()
        tracer.wait(PATIENCE_S)
        assert tracer.stderr is not None
        tracer.stderr.close()
    child.close()
    if counts:
        rows = [line.split() for line in counts.read_text().splitlines()]
        outcome.calls = Counter({row[-1]: int(row[3]) for row in rows if row and row[-1] in CALLS})
    asyncio.run(verify(folder, outcome))
    return outcome


async def verify(folder: Path, outcome: Outcome) -> None:
    """Start a tier on the files: it must find all blocks that were reported as on disk, with their bytes."""
    bench = Telling(folder, "threads", 1.0)  # with room for more, so that no segment is reused
    await bench.recover()
    outcome.missing = sorted(outcome.landed - set(bench.on_disk))
    outcome.back = sorted(set(outcome.forgotten) & set(bench.on_disk))
    outcome.wrong += await bench.wrong(sorted(bench.on_disk))
    unread = [n for n in outcome.landed if bench.codes.get(n)]
    outcome.missing += unread
    await bench.tier.close()


def points(calls: Counter[str]) -> list[tuple[str, ...]]:
    """Return the options of strace for every fault at every call."""
    found: list[tuple[str, ...]] = []
    for call, count in sorted(calls.items()):
        codes = ["EIO", "EINTR"] if call != "mmap" else ["ENOMEM"]
        if call in GROWS:
            codes.append("ENOSPC")
        faults = [f"error={code}" for code in codes] + ["signal=KILL"]
        for fault in faults:
            for number in range(1, count + 1):
                found.append(("-e", f"trace={call}", "-e", f"inject={call}:{fault}:when={number}"))
    return found


def everything() -> tuple[str, str]:
    return "-e", "trace=" + ",".join(f"?{call}" for call in CALLS)
