"""`kvtier hold-gpu` in a process, and the engine of the tests that copies to the memory of a GPU.

As a program, an engine that saves a prompt, prints that it has copies, and waits to be killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.daemons import Daemon
from support.device_engine import DeviceEngine
from support.fake_cuda import soon
from support.fake_engine import BLOCK

PROMPT = range(8 * BLOCK + 3)


class HoldGpu:
    """A running `kvtier hold-gpu`."""

    def __init__(
        self, folder: Path, socket: str, environment: Mapping[str, str], size: str = "8MiB"
    ) -> None:
        self.log = folder / "holder.log"
        command = [
            sys.executable,
            "-m",
            "kvtier_daemon.cli",
            "hold-gpu",
            "--size",
            size,
            "--socket",
            socket,
        ]
        with self.log.open("ab") as sink:
            self.process = subprocess.Popen(command, stderr=sink, env=environment)

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)


def arena(daemon: Daemon) -> dict[str, Any]:
    found: dict[str, Any] = daemon.stats()["hot"]["arena"]
    return found


def joined(engine: DeviceEngine) -> bool:
    sides = [one.state.device.shared._hot for one in engine.workers if one.state.device is not None]
    return len(sides) == len(engine.workers) and all(one and one.has_memory for one in sides)


def start(engine: DeviceEngine) -> None:
    """Serve until the ranks have mapped the memory of the GPU."""
    first = [10_000]

    def served() -> bool:
        first[0] += BLOCK
        engine.serve(range(first[0], first[0] + BLOCK))
        return joined(engine)

    engine.until(served)


def ended_tasks(engine: DeviceEngine) -> None:
    """Wait for the engine's saves and copies."""
    engine.settle()
    for worker in engine.workers:
        done: list[bool] = []
        worker.state.tasks.put(lambda done=done: done.append(True))  # type: ignore[misc]
        soon(lambda done=done: bool(done))  # type: ignore[misc]


def settled(daemon: Daemon, engine: DeviceEngine) -> None:
    """Wait for the engine's saves and copies, and for the daemon to know of them."""
    ended_tasks(engine)
    daemon.wait_for(lambda stats: not stats["hot"]["arena"]["writing"])


def main() -> None:
    from support.real_gpu import RealGpu

    engine = DeviceEngine(RealGpu(), sys.argv[1])
    start(engine)
    engine.serve(PROMPT)
    ended_tasks(engine)
    print("saved", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
