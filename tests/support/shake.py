"""Run a command, such as the tests, while processes of it are stopped at random, as a busy machine does: a
test that fails then depends on times or on an order. Run as a program: `shake.py SEED COMMAND ...`."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

EVERY_S = 0.15  # a process is stopped, on average
PAUSE_S, LONGEST_S = 0.13, 0.4
AT_ONCE = 3


class Processes:
    """Those of a command, also if the ones that started them have ended."""

    def __init__(self, pid: int) -> None:
        self._known = {pid: _started(pid)}

    def all(self) -> list[int]:
        todo, found = list(self._known), dict[int, str]()
        while todo:
            pid = todo.pop()
            started = _started(pid)
            if pid not in found and started and self._known.get(pid, started) == started:
                found[pid] = started
                todo += _children(pid)
        self._known = found
        return sorted(found)


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _started(pid: int) -> str:
    stat = _stat(pid)
    return stat[19] if stat and stat[0] not in "ZX" else ""


def _children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(one) for task in tasks for one in (task / "children").read_text().split()]
    except OSError:
        return []


def shake(command: list[str], seed: int) -> int:
    """Return the exit status of the command."""
    chance, stopped, count = random.Random(seed), dict[int, float](), 0
    process = subprocess.Popen(command)
    processes, next_at = Processes(process.pid), time.monotonic()

    def go_on(until: float) -> None:
        for pid in [pid for pid, ends_at in stopped.items() if ends_at <= until]:
            del stopped[pid]
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    while process.poll() is None:
        now = time.monotonic()
        go_on(now)
        if now >= next_at and len(stopped) < AT_ONCE:
            next_at = now + chance.expovariate(1 / EVERY_S)
            pid = chance.choice(processes.all() or [process.pid])
            # Not one that a test has stopped, or that ended.
            if pid not in stopped and (_stat(pid) or ["T"])[0] not in "TtZX":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
                stopped[pid] = now + min(LONGEST_S, chance.expovariate(1 / PAUSE_S))
                count += 1
        time.sleep(0.01)
    go_on(float("inf"))
    print(f"{count} pauses with seed {seed}", file=sys.stderr)
    return process.returncode


if __name__ == "__main__":
    sys.exit(shake(sys.argv[2:], int(sys.argv[1])))
