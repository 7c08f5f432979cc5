"""`kvtier reload`: have the daemon read its configuration again, as SIGHUP does."""

from __future__ import annotations

import typer

from kvtier_daemon.cli.flags import Json, Socket


def reload(json: Json = False, socket: Socket = None) -> None:
    """Put what the configuration says now into force.

    As far as that goes without a restart: says what it changed, and what needs one. Where something is wrong
    nothing is changed, and the exit code is 2. For root, and the user that the daemon runs as.
    """
    from kvtier_daemon.cli.config import ask_daemon, change_lines

    told = ask_daemon(socket, "reload")
    if json:
        from json import dumps

        typer.echo(dumps(told, indent=2))
        return
    for line in change_lines(told["changes"], "done", "needs a restart"):
        typer.echo(line)
    if not told["changes"]:
        typer.echo("nothing has changed")
