"""A process ends whatever its other threads are at."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def test_no_kernel_lets_the_lock_go_otherwise() -> None:
    for path in (ROOT / "kernels" / "cpu").glob("*.cpp"):
        assert "gil_scoped_release" not in path.read_text(), f"{path.name}: Unlocked"
