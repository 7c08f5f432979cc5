"""`kvtier demo`: a small daemon, two engines, and a table that shows the gain."""

from typing import Annotated

import typer

from kvtier_daemon.cli.flags import flag, value


def demo(
    seconds: Annotated[float, value("SECONDS", "How long the workload runs.")] = 15.0,
    warm: Annotated[str, value("SIZE", "Size of the warm tier.")] = "512MiB",
    fleet: Annotated[
        str, value("s3|mooncake", "Show two hosts that share blocks through this store instead.")
    ] = "",
    json: Annotated[bool, flag("--json", "Print only the summary, as JSON.")] = False,
) -> None:
    """Run a sample chat service with a small daemon, and show the gain.

    Needs no GPU and no root, and leaves no files behind.
    """
    if fleet:
        from kvtier_daemon.tools.demo_fleet import run as run_fleet

        if not run_fleet(fleet, json):
            raise typer.Exit(1)
        return
    from kvtier_daemon.tools.demo import run

    if not run(seconds, warm, json):
        raise typer.Exit(1)
