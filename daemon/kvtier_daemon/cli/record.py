"""`kvtier record`: have the daemon write what is looked up and saved as a trace for `kvtier sim`."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtier_daemon.cli.flags import Json, Socket

if TYPE_CHECKING:
    from kvtier import Client

END_S = 10.0  # for what was noted to be written


class Order(StrEnum):
    start = "start"
    stop = "stop"
    status = "status"


def record(
    order: Annotated[Order, typer.Argument(metavar="start|stop|status")],
    size: Annotated[
        str, typer.Option(metavar="SIZE", help="At most; the trace ends there.")
    ] = "64MiB",
    json: Json = False,
    socket: Socket = None,
) -> None:
    """Record what is looked up, as a trace for kvtier sim.

    Blocks by names that mean nothing elsewhere, and no text.
    The daemon writes into traces/ of its state directory. For root, and the user that it runs as.
    """
    from pathlib import Path

    from kvtier.client import default_socket
    from kvtier_daemon.cli.flags import amount
    from kvtier_daemon.cli.status import connected

    limit = amount("--size", size)
    if order is Order.start and limit < 1:
        raise typer.BadParameter("--size: a trace of nothing")
    with connected(Path(socket or default_socket()), "record") as client:
        if order is Order.start:
            told = client.record(limit_bytes=limit)
        elif order is Order.stop:
            told = _ended(client)
        else:
            told = client.record()
    if json:
        from json import dumps

        typer.echo(dumps(told, indent=2))
    else:
        _show(told)


def _ended(client: Client) -> dict[str, Any]:
    from time import monotonic, sleep

    told = client.record(stop=True)
    until = monotonic() + END_S
    while told["writing"] and monotonic() < until:
        sleep(0.05)
        told = client.record()
    return told


def _show(told: dict[str, Any]) -> None:
    from kvtier.units import format_bytes

    if "path" not in told:
        typer.echo("nothing is recorded")
        return
    state = "records into" if told["recording"] else "recorded into"
    typer.echo(
        f"{state} {told['path']}: {told['requests']:,} requests, {format_bytes(told['bytes'])} of"
        f" {format_bytes(told['limit_bytes'])}"
    )
    if told["left_out"]:
        typer.echo(f"  {told['left_out']:,} left out{': it is full' if told['full'] else ''}")
    if told["failure"]:
        typer.echo(f"  it failed: {told['failure']}")
