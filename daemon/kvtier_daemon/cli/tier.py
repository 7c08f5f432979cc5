"""`kvtier tier`: drains a tier, switches it off or on, while the daemon serves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvtier_daemon.cli.flags import Json, Socket, print_json, value

if TYPE_CHECKING:
    from kvtier import Client

EXIT_NOT_YET = 1
LOOK_S = 0.1
GOES_ON = ("draining", "closing", "opening", "recovering", "handing-over", "warming-up")


def tier(
    order: Annotated[
        Literal["drain", "off", "on", "status", "hand-over", "warm-up"],
        typer.Argument(metavar="drain|off|on|status|hand-over|warm-up"),
    ],
    name: Annotated[Literal["cold", "warm", "remote"], typer.Argument(metavar="cold|warm|remote")],
    timeout: Annotated[
        float, value("SECONDS", "Wait at most this long; 0: do not wait.", min=0)
    ] = 600.0,
    json: Json = False,
    socket: Socket = None,
) -> None:
    """Drain a tier, switch it off or on. The daemon continues if this command is interrupted.

    drain cold: stop writing; reads continue. off cold: close the files; their blocks are misses until
    the tier is on. drain warm: write the blocks that are only in memory to the disks, and new saves at
    once, so that a restart loses nothing. drain remote: write what waits for the store, then write
    nothing more; reads continue. off remote: do not use the store; blocks that are only there are
    misses. hand-over remote: write all blocks in memory and on disk to the store, before this host
    retires. warm-up remote: read the blocks that other hosts want most to memory, until it has
    remote.warm_up_percent. on: end drain, off, hand-over or warm-up. A restart follows the configuration.
    Exits with 1 if it has not ended in time, and with 2 if it is not possible. Only for root and the
    daemon's user.
    """

    from kvtier_daemon.cli.connecting import connected

    with connected(socket, "tier") as client:
        told = client.tier(name, order)
        if order != "status":
            told = _waited(client, told, timeout)
    if json:
        print_json(told)
    else:
        left = f", {told['left_blocks']:,} blocks left" if told["state"] in GOES_ON else ""
        typer.echo(f"{told['tier']}: {told['state']}{left}")
        if told["failure"]:
            typer.echo(f"kvtier: {told['tier']}: {told['failure']}", err=True)
    if told["failure"]:
        raise typer.Exit(2)
    raise typer.Exit(EXIT_NOT_YET if order != "status" and _goes_on(told) else 0)


def _goes_on(told: dict[str, Any]) -> bool:
    return told["state"] in GOES_ON and not told["failure"]


def _waited(client: Client, told: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Wait until the order has ended or failed, at most `timeout_s`. Returns the last status."""
    from time import monotonic, sleep

    from kvtier_daemon.cli.progress import progress

    until = monotonic() + timeout_s
    with progress() as bar:
        most = told["left_blocks"]
        task = bar.add_task(told["state"], total=most or None)
        while _goes_on(told) and monotonic() < until:
            sleep(min(LOOK_S, max(0.0, until - monotonic())))
            told = client.tier(told["tier"])
            most = max(most, told["left_blocks"])
            bar.update(
                task, description=told["state"], total=most or None,
                completed=most - told["left_blocks"],
            )  # fmt: skip
    return told
