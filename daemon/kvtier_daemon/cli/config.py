"""`kvtier config`: what a configuration comes to, what is wrong with it, what a reload would change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kvtier_daemon.cli.flags import Json, Socket, plain

if TYPE_CHECKING:
    from kvtier_daemon.config import Loaded

EXIT_WRONG: Final = 2
AMOUNTS: Final = frozenset(
    {"size", "extent", "segment", "history", "quota", "daily_writes", "scrub"}
)

app = plain(help="Check, show and compare configurations.", no_args_is_help=True)

File = Annotated[
    Path | None, typer.Argument(metavar="[FILE]", help="As kvtier serve --config has it.")
]


@app.command()
def check(
    file: File = None,
    user: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Check as this user would start it; needs root."),
    ] = None,
    json: Json = False,
) -> None:
    """Say everything that would stop a start with this configuration. Exits with 2 if something would.

    Without FILE it checks /etc/kvtier/kvtier.toml if that exists; conf.d and the environment count too. When
    root checks a file in /etc/kvtier it is checked as the service's user, kvtier.
    """
    from kvtier_daemon.beside import checking
    from kvtier_daemon.config import system_file

    file = file or system_file()
    user = user or checking.user_of(file)
    problems = checking.problems(file, user)
    if json:
        from json import dumps

        typer.echo(dumps({"file": str(file or ""), "problems": problems}, indent=2))
    else:
        for problem in problems:
            typer.echo(problem, err=True)
        if not problems:
            typer.echo(
                f"{file or 'the environment'}: all right{f' for user {user}' if user else ''}"
            )
    raise typer.Exit(EXIT_WRONG if problems else 0)


@app.command()
def show(
    file: File = None,
    origin: Annotated[bool, typer.Option("--origin", help="And where each was written.")] = False,
    json: Json = False,
    socket: Socket = None,
) -> None:
    """Show every value: of FILE with its conf.d and the environment, or what the daemon runs with. As TOML
    that says the same.

    A daemon tells root, and the user that it runs as. In JSON, amounts are bytes.
    """
    if file is not None:
        from kvtier_daemon.config import load, settled

        loaded = load(file)
        keys = {
            key: [value, loaded.origins.get(key, "default")]
            for key, value in settled(loaded.config).items()
        }
        told: Mapping[str, Any] = {"file": str(file), "keys": keys}
    else:
        told = ask_daemon(socket, "show")
    if json:
        from json import dumps

        typer.echo(dumps(told, indent=2))
        return
    for line in _lines(told["keys"], origin):
        typer.echo(line)


@app.command()
def diff(json: Json = False, socket: Socket = None) -> None:
    """Say what the daemon's configuration says otherwise than what it runs with. Exits with 1 if something.

    The daemon reads its files again, and the environment and flags that it was started with.
    """
    told = ask_daemon(socket, "diff")
    changes = told["changes"]
    if json:
        from json import dumps

        typer.echo(dumps(told, indent=2))
    else:
        for line in change_lines(changes, "a reload does it", "needs a restart"):
            typer.echo(line)
        if not changes:
            typer.echo("the daemon runs with what its configuration says")
    raise typer.Exit(1 if changes else 0)


def ask_daemon(socket: Path | None, order: str) -> dict[str, Any]:
    """Return what the daemon says of its settings."""
    from kvtier.client import default_socket
    from kvtier_daemon.cli.status import connected

    with connected(Path(socket or default_socket()), "config") as client:
        return client.settings(order)


def change_lines(changes: Iterable[Mapping[str, Any]], live: str, restart: str) -> Iterator[str]:
    """Yield a line for each change: what it was, what it is to be, and what that takes."""
    for one in changes:
        how = live if one["live"] else restart
        was, will = (_shown(one["key"], one[which]) for which in ("running", "files"))
        yield f"{one['key']}: {was} -> {will} ({how})"


def loaded_of(keys: Mapping[str, tuple[object, str]]) -> Loaded:
    """The configuration that a daemon says it runs with. Raises ConfigError where this version can't read
    it."""
    import tomllib

    from kvtier_daemon.config import load
    from kvtier_daemon.sources import flatten

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
    """Return it as a person would write it into the file: amounts with a unit, where that is exact."""
    from json import dumps

    from kvtier.units import format_bytes, parse_bytes
    from kvtier_daemon.values import address_text

    last = key.rpartition(".")[2]
    if last in AMOUNTS and isinstance(value, int):
        named = format_bytes(value)
        value = named if value and parse_bytes(named) == value else value
    elif last == "listen" and value is not None:
        value = address_text(*value)
    elif last == "codecs" and value is not None:
        value = [f"{model}={codec}" for model, codec in value]
    return "nothing" if value is None else dumps(value)
