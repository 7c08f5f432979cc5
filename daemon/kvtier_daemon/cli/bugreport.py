"""`kvtier bugreport`: what somebody needs to see to understand a fault, and nothing that is not theirs to
see."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from kvtier_daemon.cli.flags import Json, Socket


def bugreport(
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FILE", help="A .tar.gz; else kvtier-bugreport-TIME, here."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", readable=False, help="The daemon's.")
    ] = None,
    log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Its log: the last 256 KiB go in.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go in, and write nothing.")
    ] = False,
    json: Json = False,
    socket: Socket = None,
) -> None:
    """Collect in one file what a report of a fault needs.

    Versions, configuration, status, doctor, kernel and mounts. No keys, no tokens, no
    prompts; secrets, names of models and of users are taken out.
    """
    from datetime import UTC, datetime

    from kvtier_daemon.beside import reporting

    parts = dict(_parts(config, log, socket))
    path = out or Path(f"kvtier-bugreport-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.tar.gz")
    if not dry_run:
        reporting.write(path, parts)
    told = {
        "path": None if dry_run else str(path),
        "files": {name: len(text.encode()) for name, text in parts.items()},
    }
    if json:
        from json import dumps

        typer.echo(dumps(told, indent=2))
        return
    for name, text in parts.items():
        typer.echo(f"  {name:<20}{len(text.encode()):>9,} bytes")
    typer.echo("nothing was written" if dry_run else f"{path}: read it before you send it")


def _parts(config: Path | None, log: Path | None, socket: Path | None) -> Iterator[tuple[str, str]]:
    from json import dumps

    from kvtier_daemon.beside import reporting
    from kvtier_daemon.beside.doctor import DAEMON
    from kvtier_daemon.cli.doctor import as_json, examined

    names = reporting.Names()
    yield "versions.json", dumps(reporting.versions(), indent=2)
    yield "machine.txt", reporting.machine()
    yield "environment.json", dumps(reporting.environment(names), indent=2)
    if config is not None:
        yield "config.toml", reporting.configuration(config, names)
    found, stats = examined(config, vllm=False, socket=socket)
    if stats:
        yield "status.json", names.redacted(dumps(reporting.status(stats, names), indent=2))
    else:
        said = next(one for one in found if one.name == DAEMON)
        yield "status.txt", names.redacted(f"{said.value}; {said.fix}")
    told = [as_json(one) for one in found]
    yield "doctor.json", names.redacted(dumps(told, indent=2))
    if log is not None:
        yield "log.txt", reporting.tail(log, names)
