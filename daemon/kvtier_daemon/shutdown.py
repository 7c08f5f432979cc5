"""Ends the daemon while a disk hangs: a stand-in process reports to the service manager, and memory is freed.

A thread in an uninterruptible wait for a disk cannot be ended. After `_exit` its process stays until the disk
answers, with its files and its memory, and a parent that waits for the process waits for the disk.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterable

from kvtier_daemon.stand_in import GIVE_BACK
from kvtier_kernels import Mapping

log = logging.getLogger(__name__)


class StandIn:
    """Another process as the service's main one. `ended` becomes readable when it is killed."""

    def __init__(self) -> None:
        told, self._tell = os.pipe()
        self.ended, held = os.pipe()
        try:
            # The command starts a child, and ends.
            command = [sys.executable, "-P", "-m", "kvtier_daemon.stand_in"]
            subprocess.run(
                [*command, str(os.getpid()), str(told), str(held)],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[told, held], check=True,
            )  # fmt: skip
        finally:
            os.close(told)
            os.close(held)

    def end(self, status: int) -> None:
        """End the stand-in with this exit status, without waiting for the end of the daemon."""
        try:
            os.write(self._tell, bytes([status]))
        except BrokenPipeError:
            return
        os.read(self.ended, 1)  # until it has ended

    def give_back(self) -> None:
        """Make this process the main one again."""
        self.end(GIVE_BACK)
        os.close(self._tell)
        os.close(self.ended)


def unmap(mappings: Iterable[Mapping]) -> None:
    """Free this memory. The process must not touch it afterwards: call this directly before its end."""
    try:
        import ctypes  # makes executable memory, with an old libffi: a sandbox may refuse that
    except (ImportError, MemoryError) as error:
        log.error("cannot free the arena's memory before the disk answers: %s", error)
        return
    unmap_ = ctypes.CDLL(None, use_errno=True).munmap
    unmap_.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    for mapping in mappings:
        view = memoryview(mapping)
        unmap_(ctypes.addressof(ctypes.c_char.from_buffer(view)), view.nbytes)
