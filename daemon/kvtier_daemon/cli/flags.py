"""Flags and options that several commands share."""

from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import typer


def plain(**options: Any) -> typer.Typer:
    """Return an app with plain-text help and -h: formatted help would import rich."""
    return typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        **options,
    )


def _from_here(text: str) -> Path:
    """Return an absolute path; a relative path and ~ are allowed on the command line.

    Paths in files and in the environment must be absolute, because those outlive the shell.
    """
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        raise typer.BadParameter(f"{text}: unknown user") from None
    if not text or "\0" in text:
        raise typer.BadParameter("not a path")
    return path.absolute()


def flag(name: str, help: str) -> Any:
    """Return an option without a value."""
    return typer.Option(name, help=help)


def value(metavar: str, help: str, **more: Any) -> Any:
    """Return an option with a value. Its name is that of the parameter."""
    return typer.Option(metavar=metavar, help=help, callback=_finite, **more)


def _finite(given: Any) -> Any:
    """Return what was given, unless it is infinite or not a number: these pass every limit of a flag."""
    if isinstance(given, float) and not isfinite(given):
        raise typer.BadParameter(f"{given} is not a finite number")
    return given


Json = Annotated[bool, flag("--json", "Print one JSON object.")]
PrefillRate = Annotated[
    float, value("TOKENS", "Tokens computed per second, at the start of a prompt.", min=1e-3)
]
PrefillGrowth = Annotated[
    float, value("TOKENS", "Context length at which a token takes twice as long; 0: ignore.", min=0)
]

Space = Annotated[str, value("SPACE", "Number of a space, or the first digits of its identity.")]


def print_json(value: Any) -> None:
    from json import dumps

    typer.echo(dumps(value, indent=2))


def amount(flag: str, text: str) -> int:
    """Return the bytes of a flag's value. Errors name the flag."""
    from kvtier.units import MIB, parse_bytes

    if text.strip().isdecimal() and 0 < int(text) < MIB:
        raise typer.BadParameter(
            f"{flag}: {text!r} has no unit; write {text.strip()}GiB if that is intended"
        )
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(f"{flag}: {error}") from None


def items(flag: str, text: str) -> list[str]:
    """Return the items of a comma-separated list. Errors name the flag."""
    found = [item.strip() for item in text.split(",")]
    if not all(found):
        raise typer.BadParameter(f"{flag}: {text!r} is not a comma-separated list")
    return found


def numbers(flag: str, text: str) -> list[float]:
    """Return the numbers of a comma-separated list, all above 0. Errors name the flag."""
    try:
        found = [float(item) for item in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < number < float("inf") for number in found):
        raise typer.BadParameter(f"{flag}: {text!r} is not a list of numbers above 0, such as 3,7")
    return found


Socket = Annotated[Path | None, value("PATH", "The daemon's socket.", parser=_from_here)]
