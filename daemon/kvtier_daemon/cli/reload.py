"""`kvtier reload`: the daemon reads its configuration again, as after SIGHUP."""

from __future__ import annotations

import typer

from kvtier_daemon.cli.flags import Json, Socket, print_json


def reload(json: Json = False, socket: Socket = None) -> None:
    """Apply the changes of the configuration that need no restart.

    Lists what it changed, and what needs a restart. If the configuration is invalid, it changes nothing
    and exits with 2. Only for root and the daemon's user.
    """
    from kvtier_daemon.cli.config import ask_daemon, change_lines

    told = ask_daemon(socket, "reload")
    if json:
        print_json(told)
        return
    for line in change_lines(told["changes"], "done", "needs a restart"):
        typer.echo(line)
    if not told["changes"]:
        typer.echo("nothing has changed")
