"""`kvtier doctor`: what is well, what is not, and the command that mends it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtier_daemon.cli import EXIT_UNAVAILABLE
from kvtier_daemon.cli.flags import Json, Socket

if TYPE_CHECKING:
    from kvtier_daemon.beside.doctor import Found
    from kvtier_daemon.config import Loaded

EXIT_WARNED = 1
EXIT_FAILED = 2


class Kind(StrEnum):
    vllm = "vllm"


def doctor(
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            readable=False,
            help="The daemon's; else /etc/kvtier/kvtier.toml if that is there.",
        ),
    ] = None,
    engine: Annotated[
        Kind | None, typer.Option(metavar="vllm", help="Look at this engine's side, too.")
    ] = None,
    json: Json = False,
    socket: Socket = None,
) -> None:
    """Examine this machine, the configuration and the daemon.

    Exits with 1 for warnings, with 2 for failures, and with 3 where nothing fails
    but that no daemon answers: so it is before the first start.
    """
    from kvtier_daemon.beside.doctor import DAEMON, Level

    found, stats = examined(config, engine is not None, socket)
    if json:
        from json import dumps

        typer.echo(dumps([as_json(one) for one in found], indent=2))
    else:
        _show(found)
    levels = {one.level for one in found if stats or one.name != DAEMON}
    if Level.fail in levels:
        raise typer.Exit(EXIT_FAILED)
    if not stats:
        raise typer.Exit(EXIT_UNAVAILABLE)
    raise typer.Exit(EXIT_WARNED if Level.warn in levels else 0)


def examined(
    config: Path | None, vllm: bool, socket: Path | None
) -> tuple[list[Found], Mapping[str, Any]]:
    """What all checks found, and what the daemon said, which is nothing if none answered."""
    from kvtier_daemon.beside import doctor as checks
    from kvtier_daemon.beside import doctor_vllm

    world = checks.World()
    loaded, trouble = _loaded(config)
    stats, why = _stats(socket or (loaded.config.socket if config and loaded else None))
    if config is None and stats is not None and (trouble is None or trouble.level != "fail"):
        loaded, trouble = _in_force(socket, loaded, trouble)
    found = checks.examine(world, loaded, stats, why)
    found.append(checks.io_uring())
    if trouble is not None:
        found.insert(0, trouble)
    return found + (doctor_vllm.examine(world) if vllm else []), stats or {}


def as_json(found: Found) -> dict[str, str]:
    return {"name": found.name, "level": found.level, "value": found.value, "fix": found.fix}


def _loaded(config: Path | None) -> tuple[Loaded | None, Found | None]:
    """The configuration, or what is wrong with it; neither where there is none."""
    import os

    from kvtier.errors import ConfigError
    from kvtier_daemon.beside.doctor import Found, Level
    from kvtier_daemon.config import load, system_file

    file = config or system_file()
    if file is None and not any(name.startswith("KVTIER_WARM") for name in os.environ):
        value = "none: what depends on it was not looked at"
        return None, Found("configuration", Level.ok, value)
    try:
        loaded = load(file)
    except ConfigError as error:
        return None, Found("configuration", Level.fail, str(error), "mend it, then try again")
    return loaded, Found("configuration", Level.ok, f"{file or 'environment'} is understood")


def _in_force(
    socket: Path | None, local: Loaded | None, found: Found | None
) -> tuple[Loaded | None, Found | None]:
    """What the daemon that answers runs with, or, where it does not tell that, what was found here."""
    from kvtier.errors import ConfigError, KvtierError
    from kvtier_daemon.beside.doctor import Found, Level
    from kvtier_daemon.cli.config import ask_daemon, loaded_of

    try:
        told = ask_daemon(socket, "show")
        loaded = loaded_of(told["keys"])
    except ConfigError as error:
        return local, Found("configuration", Level.warn, str(error), "give it by --config FILE")
    except KvtierError as error:
        if local is not None:
            return local, found
        value = f"the daemon does not tell the one that it runs with: {error}"
        fix = "run this as root or as the daemon's user, or give it by --config FILE"
        return None, Found("configuration", Level.warn, value, fix)
    source = told["file"] or "flags and environment"
    return loaded, Found("configuration", Level.ok, f"in force in the daemon, from {source}")


def _stats(socket: Path | None) -> tuple[Mapping[str, Any] | None, str]:
    from kvtier.client import default_socket
    from kvtier.errors import KvtierError
    from kvtier_daemon.cli.status import connected

    try:
        with connected(Path(socket or default_socket()), "doctor") as client:
            return client.stats(), ""
    except KvtierError as error:
        return None, " ".join(str(error).split())


def _show(found: list[Found]) -> None:
    from rich.text import Text

    from kvtier_daemon.beside.doctor import Level
    from kvtier_daemon.cli.drawing import console_of, row, table_of

    colour = {Level.ok: "green", Level.warn: "yellow", Level.fail: "bold red"}
    table = table_of("", "~", "~")
    for one in found:
        text = Text(one.value)
        if one.fix:
            text.append(f"\n→ {one.fix}", "bold")
        row(table, Text(one.level, colour[one.level]), one.name, text)
    console = console_of()
    console.print(table)
    counts = {level: sum(one.level is level for one in found) for level in Level}
    console.print(", ".join(f"{n} {level}" for level, n in counts.items() if n))
