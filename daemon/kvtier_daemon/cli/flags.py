"""Flags that several commands have, and what all of them take alike."""

from pathlib import Path
from typing import Annotated, Any

import typer


def plain(**options: Any) -> typer.Typer:
    """Return an app whose help is plain text, by -h too: rich would be imported for more."""
    return typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        **options,
    )


def _from_here(text: str) -> Path:
    """Return an absolute path: on the command line one may begin where one is, or at a home.

    A file and the environment outlive the shell they were written in, so there it must be absolute.
    """
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        raise typer.BadParameter(f"{text}: whose home is that?") from None
    if not text or "\0" in text:
        raise typer.BadParameter("it is no path")
    return path.absolute()


Json = Annotated[bool, typer.Option("--json", help="One JSON object.")]
PrefillRate = Annotated[
    float,
    typer.Option(min=1e-3, metavar="TOKENS", help="Computed a second, at a prompt's start."),
]
PrefillGrowth = Annotated[
    float,
    typer.Option(
        min=0, metavar="TOKENS", help="Context at which a token takes twice as long; 0: none."
    ),
]

Space = Annotated[
    str, typer.Option(metavar="SPACE", help="Its number, or the first digits of its identity.")
]


def amount(flag: str, text: str) -> int:
    """Return the bytes that a flag says; the error names the flag."""
    from kvtier.units import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(f"{flag}: {error}") from None


def items(flag: str, text: str) -> list[str]:
    """Return what a flag lists with commas between; the error names the flag."""
    found = [item.strip() for item in text.split(",")]
    if not all(found):
        raise typer.BadParameter(f"{flag}: {text!r} is no list with commas between")
    return found


def numbers(flag: str, text: str) -> list[float]:
    """Return the numbers above 0 that a flag lists, with commas between; the error names the flag."""
    try:
        found = [float(item) for item in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < number < float("inf") for number in found):
        raise typer.BadParameter(f"{flag}: {text!r} is no list of numbers above 0, such as 3,7")
    return found


Socket = Annotated[
    Path | None,
    typer.Option(metavar="PATH", parser=_from_here, help="Where the daemon listens."),
]
