"""Flags that several commands have."""

from pathlib import Path
from typing import Annotated

import typer


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


Socket = Annotated[
    Path | None,
    typer.Option(metavar="PATH", parser=_from_here, help="Where the daemon listens."),
]
