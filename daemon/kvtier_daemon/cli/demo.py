"""`kvtier demo`: a small daemon, two engines, and a table that shows what they gain."""

from typing import Annotated

import typer


def demo(
    seconds: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long the workload runs.")
    ] = 15.0,
    warm: Annotated[str, typer.Option(metavar="SIZE", help="Size of the warm tier.")] = "512MiB",
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON only.")] = False,
) -> None:
    """Watch a made-up chat service gain by a small daemon.

    Needs no GPU and no root, and leaves nothing behind.
    """
    from kvtier_daemon.beside.demo import run

    if not run(seconds, warm, json):
        raise typer.Exit(1)
