"""`kvtier doctor`: examines the machine, and prints a command for each problem."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvtier_daemon.cli import EXIT_UNAVAILABLE
from kvtier_daemon.cli.flags import Socket, flag, print_json, value

if TYPE_CHECKING:
    from kvtier_daemon.config.schema import LoadedConfig
    from kvtier_daemon.tools.doctor import Finding

EXIT_WARNED = 1
EXIT_FAILED = 2
NAME = "configuration"  # of the check of it


def doctor(
    config: Annotated[
        Path | None,
        value(
            "FILE",
            "The daemon's configuration; default: /etc/kvtier/kvtier.toml if it exists.",
            readable=False,
        ),
    ] = None,
    engine: Annotated[
        Literal["vllm"] | None, value("vllm", "Also examine the plugin of this engine.")
    ] = None,
    json: Annotated[bool, flag("--json", "Print the checks as a JSON list.")] = False,
    socket: Socket = None,
) -> None:
    """Examine this machine, the configuration and the daemon.

    Exits with 1 for warnings and with 2 for failures. Exits with 3 if the only failure is that no
    daemon answers, for example before the first start.
    """
    from kvtier_daemon.tools.doctor import DAEMON, Severity

    found, stats = examined(config, engine is not None, socket)
    if json:
        print_json([as_json(one) for one in found])
    else:
        _show(found)
    levels = {one.level for one in found if stats or one.name != DAEMON}
    if Severity.fail in levels:
        raise typer.Exit(EXIT_FAILED)
    if not stats:
        raise typer.Exit(EXIT_UNAVAILABLE)
    raise typer.Exit(EXIT_WARNED if Severity.warn in levels else 0)


def examined(
    config: Path | None, vllm: bool, socket: Path | None
) -> tuple[list[Finding], Mapping[str, Any]]:
    """Return the findings of all checks, and the daemon's status, which is empty if none answered."""
    from kvtier_daemon.tools import doctor as checks
    from kvtier_daemon.tools import doctor_vllm

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


def as_json(found: Finding) -> dict[str, str]:
    return {"name": found.name, "level": found.level, "value": found.value, "fix": found.fix}


def _loaded(config: Path | None) -> tuple[LoadedConfig | None, Finding | None]:
    """Return the configuration, or the error in it; neither if there is no file."""
    import os

    from kvtier.errors import ConfigError
    from kvtier_daemon.config.schema import load, system_file
    from kvtier_daemon.tools.doctor import fail, ok

    file = config or system_file()
    if file is None and not any(name.startswith("KVTIER_WARM") for name in os.environ):
        return None, ok(NAME, "none: checks that depend on it were skipped")
    try:
        loaded = load(file)
    except ConfigError as error:
        return None, fail(NAME, str(error), "correct it, then try again")
    return loaded, ok(NAME, f"{file or 'environment'} is valid")


def _in_force(
    socket: Path | None, local: LoadedConfig | None, found: Finding | None
) -> tuple[LoadedConfig | None, Finding | None]:
    """Return the configuration in force; if the daemon does not reveal it, the one found here."""
    from kvtier.errors import ConfigError, KvtierError
    from kvtier_daemon.cli.config import ask_daemon, loaded_of
    from kvtier_daemon.tools.doctor import ok, warn

    try:
        told = ask_daemon(socket, "show")
        loaded = loaded_of(told["keys"])
    except ConfigError as error:
        return local, warn(NAME, str(error), "give the file with --config FILE")
    except KvtierError as error:
        if local is not None:
            return local, found
        value = f"the daemon does not report its configuration: {error}"
        fix = "run this as root or as the daemon's user, or give the file with --config FILE"
        return None, warn(NAME, value, fix)
    source = told["file"] or "flags and environment"
    return loaded, ok(NAME, f"in force in the daemon, from {source}")


def _stats(socket: Path | None) -> tuple[Mapping[str, Any] | None, str]:
    from kvtier.errors import KvtierError
    from kvtier_daemon.cli.connecting import connected

    try:
        with connected(socket, "doctor") as client:
            return client.stats(), ""
    except KvtierError as error:
        return None, " ".join(str(error).split())


def _show(found: list[Finding]) -> None:
    from rich.text import Text

    from kvtier_daemon.cli.tables import console_of, row, table_of
    from kvtier_daemon.tools.doctor import Severity

    colour = {Severity.ok: "green", Severity.warn: "yellow", Severity.fail: "bold red"}
    console = console_of()
    arrow = "->" if console.options.ascii_only else "→"
    table = table_of("", "~", "~")
    for one in found:
        text = Text(one.value)
        if one.fix:
            text.append(f"\n{arrow} {one.fix}", "bold")
        row(table, Text(one.level, colour[one.level]), one.name, text)
    console.print(table)
    counts = {level: sum(one.level is level for one in found) for level in Severity}
    console.print(", ".join(f"{n} {level}" for level, n in counts.items() if n))
