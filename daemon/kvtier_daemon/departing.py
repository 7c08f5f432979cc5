"""How the daemon ends while a disk hangs: what the service manager is told, and what is given up first.

A thread in an uninterruptible wait for a disk can't be ended. After `_exit` its process stays until the disk
answers, with its files and its memory, and a parent that waits for the process waits for the disk.
"""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
from collections.abc import Iterable

from kvtier_daemon.stand_in import GIVE_BACK
from kvtier_kernels import Mapping

log = logging.getLogger(__name__)


class StandIn:
    """Another process as the service's main one. `ended` is readable if that is killed."""

    def __init__(self) -> None:
        told, self._tell = os.pipe()
        self.ended, held = os.pipe()
        try:
            # It goes on in a child, and ends.
            command = [sys.executable, "-P", "-m", "kvtier_daemon.stand_in"]
            subprocess.run(
                [*command, str(os.getpid()), str(told), str(held)],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[told, held], check=True,
            )  # fmt: skip
        finally:
            os.close(told)
            os.close(held)

    def end(self, status: int) -> None:
        """Have it end with this exit status: the daemon's own end is not waited for."""
        try:
            os.write(self._tell, bytes([status]))
        except BrokenPipeError:
            return
        os.read(self.ended, 1)  # until it has ended

    def give_back(self) -> None:
        """This process is the main one again."""
        self.end(GIVE_BACK)
        os.close(self._tell)
        os.close(self.ended)


def unmap(mappings: Iterable[Mapping]) -> None:
    """Give up this memory, which nothing of this process may touch any more: only right before its end."""
    unmap_ = ctypes.CDLL(None, use_errno=True).munmap
    unmap_.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    for mapping in mappings:
        view = memoryview(mapping)
        unmap_(ctypes.addressof(ctypes.c_char.from_buffer(view)), view.nbytes)
