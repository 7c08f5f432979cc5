"""A process can end in every state of its other threads."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import threading
from kvtier_kernels import memcpy
target, source = bytearray(1 << 20), bytes(1 << 20)
begun = threading.Event()
def copy():
    while True:
        begun.set()
        memcpy(target, source)
threading.Thread(target=copy, daemon=True).start()
begun.wait()
"""


def test_a_thread_in_a_kernel_does_not_abort_a_process_that_ends() -> None:
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr


def test_every_kernel_releases_the_gil_with_unlocked() -> None:
    for path in (ROOT / "kernels" / "cpu").glob("*.cpp"):
        assert "gil_scoped_release" not in path.read_text(), f"{path.name}: Unlocked"


DISK = """
import os, sys
import kvtier_kernels
disk = kvtier_kernels.Disk(os.eventfd(0), sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
del disk
print("gone", flush=True)
"""
ATTACH, DETACH, WALL = 16, 17, 0x40000000


@pytest.mark.parametrize("engine", ["threads", "io_uring"])
def test_a_disk_is_deleted_while_one_of_its_threads_is_stopped(engine: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with subprocess.Popen(
        [sys.executable, "-c", DISK, engine], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        tasks = [int(path.name) for path in Path(f"/proc/{process.pid}/task").iterdir()]
        worker = next(task for task in tasks if task != process.pid)
        if libc.ptrace(ATTACH, worker, None, None) != 0:
            process.kill()
            pytest.skip(f"a thread can't be stopped here: {os.strerror(ctypes.get_errno())}")
        os.waitpid(worker, WALL)
        print(file=process.stdin, flush=True)
        line = process.stdout.readline()
        if libc.ptrace(DETACH, worker, None, None) != 0:
            os.waitpid(worker, WALL)  # it ends with its process, which does not end before it
        _, errors = process.communicate(timeout=60)
    assert line == "gone\n", errors
    assert process.returncode == 0, errors
