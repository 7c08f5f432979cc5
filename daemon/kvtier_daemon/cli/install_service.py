"""`kvtier install-service`: write the units that run the daemon under systemd, or remove them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtier_daemon.cli.flags import Json


def install_service(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be written, and write nothing.")
    ] = False,
    uninstall: Annotated[
        bool, typer.Option("--uninstall", help="Remove what this has written.")
    ] = False,
    root: Annotated[Path, typer.Option(metavar="DIR", help="Write below it.")] = Path("/"),
    program: Annotated[
        Path | None, typer.Option(metavar="PATH", help="The kvtier that is to run; this one.")
    ] = None,
    http: Annotated[
        bool, typer.Option("--http", help="Let it listen on loopback: for [http].")
    ] = False,
    node: Annotated[
        list[int] | None,
        typer.Option(min=0, max=1023, metavar="N", help="A daemon for this NUMA node; repeat."),
    ] = None,
    json: Json = False,
) -> None:
    """Write systemd's units, and say what to run then.

    Starts nothing. The configuration that is there already says what its sandbox has to let through. A file
    that somebody else wrote is left alone.
    """
    from kvtier.errors import ConfigError
    from kvtier_daemon.beside import installing

    if uninstall:
        paths = installing.ours(root)
        if not dry_run:
            installing.remove(paths)
        verb, commands = "removed", installing.after_removal()
    else:
        program = (program or installing.own_program()).absolute()
        if why := installing.hidden(program):
            if not dry_run:
                raise ConfigError(why)
            typer.echo(f"not possible as it is: {why}", err=True)
        found = installing.plan(
            root, program, installing.systemd_version(), http=http,
            nodes=node or (),
        )  # fmt: skip
        paths = [*found.files, *found.once] if dry_run else installing.write(found)
        verb, commands = "written", found.commands
        if not any(place.exists() for place in (program, root / program.relative_to("/"))):
            typer.echo(
                f"{program} does not exist: install kvtier there before you start the service",
                err=True,
            )
    if json:
        from json import dumps

        told = {
            "files": [str(path) for path in paths],
            "commands": list(commands),
            "dry_run": dry_run,
        }
        typer.echo(dumps(told, indent=2))
        return
    for path in paths:
        typer.echo(f"{f'to be {verb}:' if dry_run else verb} {path}")
        if dry_run and not uninstall:
            typer.echo("".join(f"    {line}\n" for line in _text(found, path).splitlines()))
    typer.echo("now run, as root:")
    for command in commands:
        typer.echo(f"    {command}")


def _text(found: object, path: Path) -> str:
    from kvtier_daemon.beside.installing import Installation

    assert isinstance(found, Installation)
    return (found.files | found.once)[path]
