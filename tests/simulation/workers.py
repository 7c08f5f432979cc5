"""Runs many seeds in processes that are forked once the daemon's modules are imported."""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .virtual import real_time

BATCH = 50  # seeds that a process is given at once
BATCHES_MOST = 400  # of one process: what leaks ends with it
TOLD_S = 60.0
ROOT = Path(__file__).parents[2]
RunBatch = Callable[[range], dict[str, Any]]  # its "failed" has the seeds that failed


class Worker:
    """A process that runs one batch after another. The parent's end of its socket is `sock`."""

    def __init__(self, run: RunBatch, others: Iterable[Worker]) -> None:
        self.batch = range(0)
        self.given = 0
        self.sock, theirs = socket.socketpair()
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            # With a copy of these, the other processes would not see that the parent has closed its own.
            for one in others:
                one.close()
            self.sock.close()
            _serve(theirs, run)
        theirs.close()
        self._lines = self.sock.makefile("r")

    def give(self, batch: range) -> None:
        self.batch = batch
        self.given += 1
        self.sock.sendall(f"{batch.start} {batch.stop}\n".encode())

    def result(self) -> dict[str, Any]:
        """What became of the batch. A process that has died says nothing: then all seeds of it failed."""
        line = self._lines.readline()
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        text = f"a process ended with {os.waitstatus_to_exitcode(status)} in {_named(self.batch)}"
        return {"failed": list(self.batch), "text": text, "cpu_s": 0.0}

    def close(self) -> None:
        self._lines.close()  # it keeps the socket open
        self.sock.close()

    def end(self) -> None:
        self.close()
        if self.pid:
            os.waitpid(self.pid, 0)


def _serve(sock: socket.socket, run: RunBatch) -> None:
    """Run batches until the parent closes the socket. Never returns."""
    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM):  # the parent ends it
            signal.signal(number, signal.SIG_IGN)
        for line in sock.makefile("r"):
            first, stop = map(int, line.split())
            before = os.times()
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                found = run(range(first, stop))
            after = os.times()
            found["cpu_s"] = after.user + after.system - before.user - before.system
            found["text"] = said.getvalue()
            sock.sendall(json.dumps(found).encode() + b"\n")
        code = 0
    except BaseException:  # noqa: BLE001  # nothing of the parent may run in this process
        traceback.print_exc()
    finally:
        os._exit(code)


@dataclass
class Progress:
    """What was run of a range of seeds."""

    seeds: range
    began: float = field(default_factory=real_time)
    done: int = 0
    cpu_s: float = 0.0
    failed: list[int] = field(default_factory=list)
    unfinished: dict[int, range] = field(default_factory=dict)  # by its first seed
    next: int = 0

    def batches(self) -> Iterator[range]:
        for start in range(self.seeds.start, self.seeds.stop, BATCH):
            self.next = min(start + BATCH, self.seeds.stop)
            self.unfinished[start] = range(start, self.next)
            yield self.unfinished[start]

    def ended(self, batch: range, found: dict[str, Any]) -> None:
        del self.unfinished[batch.start]
        self.done += len(batch)
        self.cpu_s += found["cpu_s"]
        self.failed += found["failed"]

    @property
    def covered(self) -> range:
        """The seeds from the first one on that were all run."""
        return range(self.seeds.start, min((*self.unfinished, self.next or self.seeds.start)))

    def __str__(self) -> str:
        seconds = real_time() - self.began
        each = self.cpu_s / max(1, self.done)
        return (
            f"{self.done} of {len(self.seeds)} seeds after {seconds:.0f} s, {len(self.failed)} failed, "
            f"{1000 * each:.1f} ms of a processor each"
        )


def run_all(seeds: range, jobs: int, run: RunBatch) -> Progress:
    """Run the seeds in this many processes; print failures and, once in a while, the progress. After SIGINT
    or SIGTERM, the batches in progress are the last ones."""
    progress = Progress(seeds)
    batches, told, stopped = progress.batches(), real_time(), list[int]()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.append(1))
    poll, running = select.poll(), dict[int, Worker]()

    def begin() -> None:
        if not stopped and (batch := next(batches, None)) is not None:
            worker = Worker(run, running.values())
            running[worker.sock.fileno()] = worker
            poll.register(worker.sock.fileno(), select.POLLIN)
            worker.give(batch)

    for _ in range(jobs):
        begin()
    while running:
        for fd, _ in poll.poll(1000):
            worker = running[fd]
            found = worker.result()
            progress.ended(worker.batch, found)
            if found["failed"]:
                print(f"--- {_named(worker.batch)}\n{found['text']}", flush=True)
            lasts = worker.pid and worker.given < BATCHES_MOST and not stopped
            if lasts and (batch := next(batches, None)) is not None:
                worker.give(batch)
                continue
            poll.unregister(fd)
            del running[fd]
            worker.end()
            begin()
        if real_time() - told > TOLD_S:
            told = real_time()
            print(progress, flush=True)
    return progress


def _named(batch: range) -> str:
    return f"seeds {batch.start} to {batch.stop - 1}"


# --- the record ----------------------------------------------------------------------------------


def commit() -> str:
    """The commit of this tree; with "-dirty" if files were changed since."""
    asked = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def recorded_end(record: Path) -> int:
    """The seed after the last one that the record has."""
    lines = record.read_text().splitlines() if record.exists() else []
    return max((json.loads(line)["seeds"][1] for line in lines), default=0)


def note(record: Path, of: str, progress: Progress) -> None:
    """Append a line about the seeds that were run."""
    covered = progress.covered
    row = {
        "commit": of, "seeds": [covered.start, covered.stop], "run": progress.done,
        "failed": sorted(progress.failed), "cpu_s": round(progress.cpu_s),
    }  # fmt: skip
    with record.open("a") as file:
        file.write(json.dumps(row) + "\n")
