"""Flags and options that several commands share."""

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


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
PrefillRate = Annotated[
    float,
    typer.Option(
        min=1e-3, metavar="TOKENS", help="Tokens computed per second, at the start of a prompt."
    ),
]
PrefillGrowth = Annotated[
    float,
    typer.Option(
        min=0,
        metavar="TOKENS",
        help="Context length at which a token takes twice as long; 0: ignore.",
    ),
]

Space = Annotated[
    str,
    typer.Option(metavar="SPACE", help="Number of a space, or the first digits of its identity."),
]


def print_json(value: Any) -> None:
    from json import dumps

    typer.echo(dumps(value, indent=2))


def amount(flag: str, text: str) -> int:
    """Return the bytes of a flag's value. Errors name the flag."""
    from kvtier.units import parse_bytes

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


Socket = Annotated[
    Path | None, typer.Option(metavar="PATH", parser=_from_here, help="The daemon's socket.")
]
