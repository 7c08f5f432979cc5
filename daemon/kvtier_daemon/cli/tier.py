"""`kvtier tier`: drain a tier, switch it off or on, while the daemon serves."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtier_daemon.cli.flags import Json, Socket

if TYPE_CHECKING:
    from kvtier import Client

EXIT_NOT_YET = 1
LOOK_S = 0.1
GOES_ON = ("draining", "closing", "opening", "recovering")


class Order(StrEnum):
    drain = "drain"
    off = "off"
    on = "on"
    status = "status"


class Name(StrEnum):
    cold = "cold"
    warm = "warm"


def tier(
    order: Annotated[Order, typer.Argument(metavar="drain|off|on|status")],
    name: Annotated[Name, typer.Argument(metavar="cold|warm")],
    timeout: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Wait no longer; 0: don't.")
    ] = 600.0,
    json: Json = False,
    socket: Socket = None,
) -> None:
    """Drain a tier, switch it off or on. What was asked goes on if this is interrupted.

    drain cold: write no more, read as before. off cold: close its files; what is there is a miss until it is
    on again. drain warm: write what is in memory alone to the disks, and what is saved from then on, so that
    a restart loses nothing. on: as before. A restart follows the configuration.
    Exits with 1 if it is not done in time, with 2 if it can't be. For root, and who runs the daemon.
    """
    from pathlib import Path

    from kvtier.client import default_socket
    from kvtier_daemon.cli.status import connected

    with connected(Path(socket or default_socket()), "tier") as client:
        told = client.tier(name.value, order.value)
        if order is not Order.status:
            told = _waited(client, told, timeout)
    if json:
        from json import dumps

        typer.echo(dumps(told, indent=2))
    else:
        left = f", {told['left_blocks']:,} blocks to go" if told["state"] in GOES_ON else ""
        typer.echo(f"{told['tier']}: {told['state']}{left}")
        if told["failure"]:
            typer.echo(f"kvtier: {told['tier']}: {told['failure']}", err=True)
    if told["failure"]:
        raise typer.Exit(2)
    raise typer.Exit(EXIT_NOT_YET if order is not Order.status and _goes_on(told) else 0)


def _goes_on(told: dict[str, Any]) -> bool:
    return told["state"] in GOES_ON and not told["failure"]


def _waited(client: Client, told: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """What it has come to when it is over, or time is."""
    from time import monotonic, sleep

    from kvtier_daemon.cli.progress import progress

    until = monotonic() + timeout_s
    with progress() as bar:
        most = told["left_blocks"]
        task = bar.add_task(told["state"], total=most or None, visible=sys.stderr.isatty())
        while _goes_on(told) and monotonic() < until:
            sleep(min(LOOK_S, max(0.0, until - monotonic())))
            told = client.tier(told["tier"])
            most = max(most, told["left_blocks"])
            bar.update(
                task, description=told["state"], total=most or None,
                completed=most - told["left_blocks"],
            )  # fmt: skip
    return told
