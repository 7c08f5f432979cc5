"""`kvtier hold-gpu`: holds memory of a GPU for copies of blocks."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtier_daemon.cli.flags import Socket, amount, value


def hold_gpu(
    size: Annotated[str, value("SIZE", "Memory to hold, such as 8GiB.")],
    gpu: Annotated[str, value("GPU", "Index or UUID of the GPU, or UUID of a part (MIG).")] = "0",
    socket: Socket = None,
) -> None:
    """Hold memory of one GPU for copies of blocks, until interrupted.

    The daemon divides it among the tenants as [hot] sizes says, and engines copy blocks to it and from
    it. It outlives engines; the daemon's end empties it. Only for root and the daemon's user.
    """
    import logging
    import os
    import signal
    from pathlib import Path

    from kvtier.client import default_socket
    from kvtier_daemon.notify import LogFormatter, to_journal
    from kvtier_daemon.tools.gpu_holder import hold

    nbytes = amount("--size", size)
    if nbytes < 1:
        raise typer.BadParameter("--size: must be above 0")
    stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os.eventfd_write(stop, 1))
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter(to_journal(2)))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    hold(gpu, nbytes, Path(socket or default_socket()), stop)
