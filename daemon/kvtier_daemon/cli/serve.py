"""`kvtier serve`: run the daemon in the foreground."""

import signal
from pathlib import Path
from typing import Annotated

from kvtier_daemon.cli.flags import Socket, value


def serve(
    config: Annotated[
        Path | None,
        value(
            "FILE",
            "Configuration in TOML; conf.d/*.toml in its directory is read too.",
            readable=False,
        ),
    ] = None,
    socket: Socket = None,
    warm_size: Annotated[str | None, value("SIZE", "Memory for the arena, such as 64GiB.")] = None,
    log_level: Annotated[
        str | None, value("LEVEL", "Lowest severity to log: debug, info, warning or error.")
    ] = None,
    with_process: Annotated[
        int | None, value("PID", "End when this process, which started the daemon, ends.", min=1)
    ] = None,
) -> None:
    """Run the daemon until it is stopped.

    Flags take precedence over the environment (KVTIER_WARM__SIZE), and the environment over the file.
    """
    # A reload during the start would end the process: the signal waits for `App.serve`.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})

    from kvtier_daemon.config import preflight
    from kvtier_daemon.config.schema import load

    flags = {
        "socket": None if socket is None else str(socket),
        "warm.size": warm_size,
        "log_level": log_level,
    }
    loaded = load(config, flags)
    preflight.require(loaded)

    from kvtier_daemon.app import run
    from kvtier_daemon.cli import collect_as_usual

    collect_as_usual()
    run(loaded, with_process)
