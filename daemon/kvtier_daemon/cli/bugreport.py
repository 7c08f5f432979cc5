"""`kvtier bugreport`: what somebody needs to see to understand a fault, and nothing that is not theirs to
see."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier_daemon.cli.flags import Json, Socket

if TYPE_CHECKING:
    from kvtier_daemon.beside.reporting import Names


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
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Its log: the last 256 KiB go in. Else the journal of its service, or the last"
            " 1,000 lines, which it keeps itself.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go in, and write nothing.")
    ] = False,
    json: Json = False,
    socket: Socket = None,
) -> None:
    """Collect in one file what a report of a fault needs.

    Versions, configuration (what the daemon runs with, too), status, doctor, log, kernel
    and mounts. No keys, no tokens, no prompts; secrets, names of models and of users are
    taken out.
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
    if stats:
        yield "config-in-force.txt", _in_force(socket, config, names)
    yield "doctor.json", names.redacted(dumps(told, indent=2))
    if log is not None:
        yield "log.txt", reporting.tail(log, names)
    elif stats:
        yield "log.txt", _log(socket, config, int(stats.get("pid", 0)), names)


def _where(socket: Path | None, config: Path | None) -> Path | None:
    """The socket that `doctor` has asked."""
    from kvtier.errors import ConfigError
    from kvtier_daemon.config import load

    if socket is not None or config is None:
        return socket
    try:
        return load(config).config.socket
    except ConfigError:
        return None


def _in_force(socket: Path | None, config: Path | None, names: Names) -> str:
    """What the daemon runs with."""
    from kvtier.errors import KvtierError
    from kvtier_daemon.beside import reporting
    from kvtier_daemon.cli.config import ask_daemon

    try:
        return reporting.in_force(ask_daemon(_where(socket, config), "show")["keys"], names)
    except KvtierError as error:
        return f"the daemon does not tell it: {reporting.scrubbed(str(error), names)}\n"


def _log(socket: Path | None, config: Path | None, pid: int, names: Names) -> str:
    """The journal's of the service that the daemon is, or the last lines that it keeps itself."""
    from kvtier.errors import KvtierError
    from kvtier_daemon.beside import reporting
    from kvtier_daemon.cli.config import ask_daemon

    unit = reporting.unit_of(pid)
    if unit and (text := reporting.journal(unit)):
        return f"journalctl --unit {unit}\n{reporting.log_text(text.splitlines(), names)}"
    try:
        lines = ask_daemon(_where(socket, config), "log")["lines"]
    except KvtierError as error:
        return f"the daemon does not tell it: {reporting.scrubbed(str(error), names)}\n"
    return f"the last {len(lines)} lines that the daemon keeps\n{reporting.log_text(lines, names)}"
