"""`kvtier reload`: the daemon reads its configuration again, as after SIGHUP."""

from __future__ import annotations

import typer

from kvtier_daemon.cli.flags import Json, Socket, print_json


def reload(json: Json = False, socket: Socket = None) -> None:
    """Apply the changes of the configuration that need no restart.

    Lists what it changed, what needs a restart, and the files with keys, which it reads again. If the
    configuration is invalid, it changes nothing and exits with 2. If a file with keys cannot be used, a
    tier that is on keeps its earlier keys, and the command exits with 1. Only for root and the daemon's user.
    """
    from kvtier_daemon.cli.config import ask_daemon, change_lines

    told = ask_daemon(socket, "reload")
    files = told["key_files"]
    if json:
        print_json(told)
    else:
        for line in change_lines(told["changes"], "done", "needs a restart"):
            typer.echo(line)
        if not told["changes"]:
            typer.echo("no setting has changed")
        for one in files:
            note = "" if one["ok"] else " (a tier that is on keeps its earlier keys)"
            typer.echo(one["text"] + note, err=not one["ok"])
    raise typer.Exit(0 if all(one["ok"] for one in files) else 1)
