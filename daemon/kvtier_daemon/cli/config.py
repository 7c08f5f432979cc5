"""`kvtier config`: checks a configuration, shows its values, and lists what a reload would change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kvtier_daemon.cli.flags import Json, Socket, flag, plain, print_json, value

if TYPE_CHECKING:
    from kvtier_daemon.config.schema import LoadedConfig

EXIT_WRONG: Final = 2
AMOUNTS: Final = frozenset(
    {"size", "extent", "compressed", "segment", "history", "quota", "daily_writes", "scrub"}
)

app = plain(help="Check, show and compare configurations.", no_args_is_help=True)

File = Annotated[
    Path | None, typer.Argument(metavar="[FILE]", help="The file for kvtier serve --config.")
]


@app.command()
def check(
    file: File = None,
    user: Annotated[str | None, value("NAME", "Check as this user; needs root.")] = None,
    json: Json = False,
) -> None:
    """List every error that would prevent a start. Exits with 2 if there is one.

    Without FILE it checks /etc/kvtier/kvtier.toml if that exists; conf.d and the environment count too.
    If root checks a file in /etc/kvtier, it is checked as the service's user, kvtier.
    """
    from kvtier_daemon.config.schema import system_file
    from kvtier_daemon.tools import config_check

    file = file or system_file()
    user = user or config_check.user_of(file)
    problems = config_check.problems(file, user)
    if json:
        print_json({"file": str(file or ""), "problems": problems})
    else:
        for problem in problems:
            typer.echo(problem, err=True)
        if not problems:
            typer.echo(f"{file or 'the environment'}: ok{f' for user {user}' if user else ''}")
    raise typer.Exit(EXIT_WRONG if problems else 0)


@app.command()
def show(
    file: File = None,
    origin: Annotated[bool, flag("--origin", "Also show where each value was set.")] = False,
    json: Json = False,
    socket: Socket = None,
) -> None:
    """Show every value: of FILE with conf.d and the environment, or in force.

    Without FILE it shows the values in force, for root and the daemon's user. The output is TOML with
    the same meaning. In JSON, amounts are in bytes.
    """
    if file is not None:
        from kvtier_daemon.config.schema import load, settled

        loaded = load(file)
        keys = {
            key: [value, loaded.origins.get(key, "default")]
            for key, value in settled(loaded.config).items()
        }
        told: Mapping[str, Any] = {"file": str(file), "keys": keys}
    else:
        told = ask_daemon(socket, "show")
    if json:
        print_json(told)
        return
    for line in _lines(told["keys"], origin):
        typer.echo(line)


@app.command()
def diff(json: Json = False, socket: Socket = None) -> None:
    """Show where the files differ from the values in force. Exits with 1 if they do.

    The daemon reads its files again, with the environment and the flags of its start.
    """
    told = ask_daemon(socket, "diff")
    changes = told["changes"]
    if json:
        print_json(told)
    else:
        for line in change_lines(changes, "a reload applies it", "needs a restart"):
            typer.echo(line)
        if not changes:
            typer.echo("the daemon runs with the configuration as it is written")
    raise typer.Exit(1 if changes else 0)


def ask_daemon(socket: Path | None, order: str) -> dict[str, Any]:
    """Return the daemon's answer about its settings."""
    from kvtier_daemon.cli.connecting import connected

    with connected(socket, "config") as client:
        return client.settings(order)


def change_lines(changes: Iterable[Mapping[str, Any]], live: str, restart: str) -> Iterator[str]:
    """Yield a line for each change: the old value, the new value, and what it takes to apply it."""
    for one in changes:
        how = live if one["live"] else restart
        was, will = (_shown(one["key"], one[which]) for which in ("running", "files"))
        yield f"{one['key']}: {was} -> {will} ({how})"


def loaded_of(keys: Mapping[str, tuple[object, str]]) -> LoadedConfig:
    """Return the configuration that a daemon reports. Raises ConfigError if this version cannot read it."""
    import tomllib

    from kvtier_daemon.config.schema import load
    from kvtier_daemon.config.sources import flatten

    tree = tomllib.loads("\n".join(_lines(keys, origin=False)))
    flags = {".".join(path): value for path, value in flatten(tree)}
    return load(None, flags, environ={})


def _lines(keys: Mapping[str, tuple[object, str]], origin: bool) -> Iterator[str]:
    lines = {
        key: f"{'# ' * (value in (None, [], ()))}{key} = {_shown(key, value)}"
        for key, (value, _) in keys.items()
    }
    width = max(map(len, lines.values()), default=0)
    for key, line in lines.items():
        yield f"{line:{width}}  # {keys[key][1]}" if origin else line


def _shown(key: str, value: Any) -> str:
    """Return the value in the notation of the file; amounts have a unit if that is exact."""
    from json import dumps

    from kvtier.units import format_bytes, parse_bytes
    from kvtier_daemon.config.values import address_text

    last = key.rpartition(".")[2]
    if last in AMOUNTS and isinstance(value, int):
        named = format_bytes(value)
        value = named if value and parse_bytes(named) == value else value
    elif last == "listen" and value is not None:
        value = address_text(*value)
    elif last == "codecs" and value is not None:
        value = [f"{model}={codec}" for model, codec in value]
    return "nothing" if value is None else dumps(value)
