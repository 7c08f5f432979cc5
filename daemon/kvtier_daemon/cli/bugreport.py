"""`kvtier bugreport`: collects the data for the diagnosis of a fault, without secrets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier_daemon.cli.flags import Json, Socket, flag, print_json, value

if TYPE_CHECKING:
    from kvtier_daemon.tools.bug_report import Redactor

SERVICE = "kvtierd.service"


def bugreport(
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="The .tar.gz to write; default: kvtier-bugreport-TIME in this directory.",
        ),
    ] = None,
    config: Annotated[
        Path | None, value("FILE", "The daemon's configuration.", readable=False)
    ] = None,
    log: Annotated[
        Path | None,
        value(
            "FILE",
            "Log file, of which the last 256 KiB are included. Default: the journal of the "
            "service, or the last 1,000 lines that the daemon keeps.",
        ),
    ] = None,
    dry_run: Annotated[bool, flag("--dry-run", "List the content, and write nothing.")] = False,
    json: Json = False,
    socket: Socket = None,
) -> None:
    """Collect the data for a bug report in one file.

    Contains versions, the configuration in the file and in force, status, doctor, log, kernel and
    mounts. Contains no keys, no tokens and no prompts; secrets and the names of models and users are
    removed.
    """
    from datetime import UTC, datetime

    from kvtier_daemon.tools import bug_report

    if config is not None and not config.exists():
        raise typer.BadParameter(f"--config: {config} does not exist")
    parts = dict(_parts(config, log, socket))
    path = out or Path(f"kvtier-bugreport-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.tar.gz")
    if not dry_run:
        bug_report.write(path, parts)
    told = {
        "path": None if dry_run else str(path),
        "files": {name: len(text.encode()) for name, text in parts.items()},
    }
    if json:
        print_json(told)
        return
    for name, text in parts.items():
        typer.echo(f"  {name:<20}{len(text.encode()):>9,} bytes")
    typer.echo("nothing was written" if dry_run else f"{path}: read it before you send it")


def _parts(config: Path | None, log: Path | None, socket: Path | None) -> Iterator[tuple[str, str]]:
    from json import dumps

    from kvtier_daemon.cli.doctor import as_json, examined
    from kvtier_daemon.tools import bug_report
    from kvtier_daemon.tools.doctor import DAEMON

    names = bug_report.Redactor()
    yield "versions.json", dumps(bug_report.versions(), indent=2)
    yield "machine.txt", bug_report.machine()
    yield "environment.json", dumps(bug_report.environment(names), indent=2)
    if config is not None:
        yield "config.toml", bug_report.configuration(config, names)
    found, stats = examined(config, vllm=False, socket=socket)
    if stats:
        yield "status.json", names.redacted(dumps(bug_report.status(stats, names), indent=2))
    else:
        said = next(one for one in found if one.name == DAEMON)
        yield "status.txt", names.redacted(f"{said.value}; {said.fix}")
    told = [as_json(one) for one in found]
    if stats:
        yield "config-in-force.txt", _in_force(socket, config, names)
    yield "doctor.json", names.redacted(dumps(told, indent=2))
    if log is not None:
        yield "log.txt", bug_report.tail(log, names)
    elif stats:
        yield "log.txt", _log(socket, config, int(stats.get("pid", 0)), names)
    elif socket is None and (text := _journal(SERVICE, names)):  # why it does not start
        yield "log.txt", text


def _where(socket: Path | None, config: Path | None) -> Path | None:
    """Return the socket of the daemon that `doctor` examined."""
    from kvtier.errors import ConfigError
    from kvtier_daemon.config.schema import load

    if socket is not None or config is None:
        return socket
    try:
        return load(config).config.socket
    except ConfigError:
        return None


def _in_force(socket: Path | None, config: Path | None, names: Redactor) -> str:
    from kvtier.errors import KvtierError
    from kvtier_daemon.cli.config import ask_daemon
    from kvtier_daemon.tools import bug_report

    try:
        return bug_report.in_force(ask_daemon(_where(socket, config), "show")["keys"], names)
    except KvtierError as error:
        return f"not available from the daemon: {bug_report.scrubbed(str(error), names)}\n"


def _journal(unit: str, names: Redactor) -> str:
    """Return the journal of this service, redacted; empty if there is no such service, or no journal."""
    from kvtier_daemon.tools import bug_report

    text = bug_report.journal(unit) if unit else ""
    lines = bug_report.log_text(text.splitlines(), names) if text else ""
    return lines and f"journalctl --unit {unit}\n{lines}"


def _log(socket: Path | None, config: Path | None, pid: int, names: Redactor) -> str:
    """Return the journal of the daemon's service, or the last lines that the daemon keeps itself."""
    from kvtier.errors import KvtierError
    from kvtier_daemon.cli.config import ask_daemon
    from kvtier_daemon.tools import bug_report

    if text := _journal(bug_report.unit_of(pid), names):
        return text
    try:
        lines = ask_daemon(_where(socket, config), "log")["lines"]
    except KvtierError as error:
        return f"not available from the daemon: {bug_report.scrubbed(str(error), names)}\n"
    return f"the last {len(lines)} lines that the daemon keeps\n{bug_report.log_text(lines, names)}"
