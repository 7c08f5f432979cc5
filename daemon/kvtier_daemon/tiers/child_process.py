"""Processes of the daemon for code that may crash, hang or leak. Each ends when its socket is closed."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from typing import Final

# -P: no module is taken from the working directory, which may be another user's.
MODULE: Final = (sys.executable, "-P", "-m")


def start_child(
    command: tuple[str, ...], *fds: int
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Run this command with its end of a socket and these descriptors as further arguments."""
    own_end, child_end = socket.socketpair()
    with child_end, contextlib.ExitStack() as undo:
        undo.callback(own_end.close)
        inherited = [child_end.fileno(), *fds]
        # In its own group: a terminal's Ctrl-C is for the daemon, which then ends its processes.
        process = subprocess.Popen(
            [*command, *map(str, inherited)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=inherited,
            process_group=0,
        )
        undo.pop_all()
    return process, own_end
