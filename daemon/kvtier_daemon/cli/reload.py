"""`kvtier reload`: the daemon reads its configuration again, as after SIGHUP."""

from __future__ import annotations

import typer

from kvtier_daemon.cli.flags import Json, Socket, print_json


def reload(json: Json = False, socket: Socket = None) -> None:
    """Apply the changes of the configuration that need no restart.

    Lists what it changed, what needs a restart, the files with keys, which it reads again, and the file of
    the audit log, which it opens again. If the configuration is invalid, it changes nothing and exits with
    2. If one of these files cannot be used, it exits with 1; a tier that is on then keeps its earlier keys,
    and the audit log is only in the daemon's log. Only for root and the daemon's user.
    """
    from kvtier_daemon.cli.config import ask_daemon, change_lines

    told = ask_daemon(socket, "reload")
    files = told["files"]
    if json:
        print_json(told)
    else:
        for line in change_lines(told["changes"], "done", "needs a restart"):
            typer.echo(line)
        if not told["changes"]:
            typer.echo("no setting has changed")
        for one in files:
            lacks_keys = not one["ok"] and one["text"].startswith("keys of")
            note = " (a tier that is on keeps its earlier keys)" if lacks_keys else ""
            typer.echo(one["text"] + note, err=not one["ok"])
    raise typer.Exit(0 if all(one["ok"] for one in files) else 1)
