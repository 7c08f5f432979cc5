"""`kvtier install-service`: writes or removes the systemd units of the daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtier_daemon.cli.flags import Json, flag, print_json, value


def install_service(
    dry_run: Annotated[bool, flag("--dry-run", "Show the files, and write nothing.")] = False,
    uninstall: Annotated[
        bool, flag("--uninstall", "Remove the files that this command has written.")
    ] = False,
    root: Annotated[Path, value("DIR", "Write below this directory.")] = Path("/"),
    program: Annotated[
        Path | None, value("PATH", "The kvtier program of the units; default: this one.")
    ] = None,
    http: Annotated[
        bool, flag("--http", "Allow the daemon to listen on loopback, for [http].")
    ] = False,
    node: Annotated[
        list[int] | None, value("N", "A daemon for this NUMA node; repeatable.", min=0, max=1023)
    ] = None,
    json: Json = False,
) -> None:
    """Write systemd units, and print the commands to run afterwards.

    Starts nothing. An existing configuration determines what the sandbox allows. Files that this
    command did not write are not changed.
    """
    from kvtier.errors import ConfigError
    from kvtier_daemon.tools import install

    texts: dict[Path, str] = {}
    if uninstall:
        paths = install.ours(root)
        if not dry_run:
            install.remove(paths)
        verb, commands = "removed", install.after_removal()
    else:
        program = (program or install.own_program()).absolute()
        if why := install.hidden(program):
            if not dry_run:
                raise ConfigError(why)
            typer.echo(f"cannot install: {why}", err=True)
        found = install.plan(
            root, program, install.systemd_version(), http=http,
            nodes=node or (),
        )  # fmt: skip
        texts = found.files | found.once
        paths = list(texts) if dry_run else install.write(found)
        verb, commands = "written", found.commands
        if not any(place.exists() for place in (program, root / program.relative_to("/"))):
            typer.echo(
                f"{program} does not exist: install kvtier there before you start the service",
                err=True,
            )
    if json:
        files = [str(path) for path in paths]
        print_json({"files": files, "commands": list(commands), "dry_run": dry_run})
        return
    for path in paths:
        typer.echo(f"{f'to be {verb}:' if dry_run else verb} {path}")
        if dry_run and not uninstall:
            typer.echo("".join(f"    {line}\n" for line in texts[path].splitlines()))
    typer.echo("now run, as root:")
    for command in commands:
        typer.echo(f"    {command}")
