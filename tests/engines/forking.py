"""Engine processes that need not import vLLM: they are forked from a process that has imported it.

The import takes most of the start of a small engine. Each of its three processes imports vLLM in
sequence, and a fourth one when the architecture of a model is looked up. A forked engine behaves like
any other."""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

MESSAGE = 1 << 20
IMPORT_S = 240.0
ACTIVE_S = 1.0  # vLLM's processes wait actively for this long after a message
LOOK_MS = 1  # in place of that: they look whether there is another one
IMPORTED = (
    "vllm.lora.request", "vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
)  # fmt: skip


class Forked:
    """A forked process with the part of the interface of `subprocess.Popen` that its users need."""

    def __init__(self, handle: int, stdin: IO[str], stdout: IO[str]) -> None:
        self._handle = handle
        self.stdin = stdin
        self.stdout = stdout

    def wait(self, timeout: float | None = None) -> None:
        if not select.select([self._handle], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)

    def kill(self) -> None:
        signal.pidfd_send_signal(self._handle, signal.SIGKILL)


class Forks:
    """A process that has imported vLLM, and runs scripts in forks of itself."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._orders, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with child_end:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(child_end.fileno())],
                stdin=subprocess.DEVNULL, pass_fds=[child_end.fileno()], env=dict(environment),
            )  # fmt: skip
        self._orders.settimeout(IMPORT_S)

    def start(self, script: Path, *arguments: str, log: IO[str], **environment: str) -> Forked:
        """Start a script with these additional environment variables."""
        given, stdin = os.pipe()
        stdout, said = os.pipe()
        order = {"script": str(script), "arguments": arguments, "environment": environment}
        try:
            socket.send_fds(self._orders, [json.dumps(order).encode()], [given, said, log.fileno()])
            answer, (handle,), _, _ = socket.recv_fds(self._orders, MESSAGE, 1)
        finally:
            os.close(given)
            os.close(said)
        assert answer == b"begun"
        return Forked(handle, os.fdopen(stdin, "w"), os.fdopen(stdout))

    def run(self, script: Path, *arguments: str, log: Path, seconds: float) -> str:
        """Run a script to its end. Returns its output."""
        with log.open("w") as sink:
            process = self.start(script, *arguments, log=sink)
        process.wait(seconds)
        with process.stdin, process.stdout as replies:
            said = replies.read()
        assert said, log.read_text()[-4000:]
        return said

    def stop(self) -> None:
        self._orders.close()
        self._process.wait(60)


def prepare() -> None:
    """Import the modules that an engine's processes import, and make vLLM fork its processes."""
    import multiprocessing

    import vllm
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.model_executor.models import registry
    from vllm.utils import system_utils

    for module in IMPORTED:
        importlib.import_module(module)
    assert vllm.LLM  # a lazy import

    class Contexts:
        """On CPUs vLLM requests spawned processes, so that each may have its own OpenMP settings. Here
        all have the same."""

        @staticmethod
        def get_context(_: str) -> Any:
            return multiprocessing.get_context("fork")

    system_utils.multiprocessing = Contexts
    wait = SpinCondition.wait

    def sleep(condition: Any, timeout_ms: int | None = None) -> None:
        """On few processors, a process that waits actively delays the one that it waits for."""
        is_active = time.monotonic() <= condition.last_read + ACTIVE_S
        wait(condition, LOOK_MS if is_active else timeout_ms)

    SpinCondition.__init__.__defaults__ = (0.0,)  # for vLLM, it is never active
    SpinCondition.wait = sleep
    # vLLM uses another process here only to avoid initializing a GPU.
    registry._run_in_subprocess = lambda look_up: look_up()


def serve(orders: socket.socket) -> dict[str, Any] | None:
    """Fork for each order. Returns the order, in the forked process."""
    while True:
        body, files, _, _ = socket.recv_fds(orders, MESSAGE, 3)
        if not body:
            return None
        process = os.fork()
        if process == 0:
            for target, file in enumerate(files):
                os.dup2(file, target)
                os.close(file)
            order: dict[str, Any] = json.loads(body)
            return order
        handle = os.pidfd_open(process)
        socket.send_fds(orders, [b"begun"], [handle])
        for file in (handle, *files):
            os.close(file)


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as orders:
        prepare()
        gc.collect()
        gc.freeze()  # a collection in a fork would copy what it visits
        gc.unfreeze = lambda: None  # which an engine does at its end
        tasks = os.listdir("/proc/self/task")
        assert len(tasks) == 1, f"forked with {len(tasks)} threads"
        order = serve(orders)
    if order is not None:
        os.environ.update(order["environment"])
        sys.argv = [order["script"], *order["arguments"]]
        runpy.run_path(order["script"], run_name="__main__")
        # Free no objects: that would copy the memory that forks share.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
