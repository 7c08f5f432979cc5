"""`kvtier record`: records lookups and saves as a trace for `kvtier sim`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvtier_daemon.cli.flags import Json, Socket, print_json, value

if TYPE_CHECKING:
    from kvtier import Client

END_S = 10.0  # for the last records to be written


def record(
    order: Annotated[
        Literal["start", "stop", "status"], typer.Argument(metavar="start|stop|status")
    ],
    size: Annotated[str, value("SIZE", "Stop when the trace has this size.")] = "64MiB",
    json: Json = False,
    socket: Socket = None,
) -> None:
    """Record lookups as a trace for kvtier sim.

    A trace contains names of blocks that mean nothing elsewhere, and no text. The daemon writes into
    traces/ of its state directory. Only for root and the daemon's user.
    """

    from kvtier_daemon.cli.connecting import connected
    from kvtier_daemon.cli.flags import amount

    limit = amount("--size", size)
    if order == "start" and limit < 1:
        raise typer.BadParameter("--size: must be above 0")
    with connected(socket, "record") as client:
        if order == "start":
            told = client.record(limit_bytes=limit)
        elif order == "stop":
            told = _ended(client)
        else:
            told = client.record()
    if json:
        print_json(told)
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
        typer.echo("no trace is being recorded")
        return
    state = "records into" if told["recording"] else "recorded into"
    typer.echo(
        f"{state} {told['path']}: {told['requests']:,} requests, {format_bytes(told['bytes'])} of"
        f" {format_bytes(told['limit_bytes'])}"
    )
    if told["left_out"]:
        typer.echo(f"  {told['left_out']:,} left out{': it is full' if told['full'] else ''}")
    if told["failure"]:
        typer.echo(f"  recording failed: {told['failure']}")
