"""`kvtier purge`: forget what a space or a tenant has, in memory and on disk, piece by piece."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtier_daemon.cli.drawing import count
from kvtier_daemon.cli.flags import Json, Socket, Space

if TYPE_CHECKING:
    from kvtier import Client

ANSWER_S = 10.0  # the last answer of a space comes when its end is on disk
EXIT_INTERRUPTED = 130


def purge(
    space: Space = "",
    tenant: Annotated[
        str, typer.Option(metavar="NAME", help="All of it, or whose the space is.")
    ] = "",
    everything: Annotated[bool, typer.Option("--all", help="Of every tenant.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask.")] = False,
    json: Json = False,
    socket: Socket = None,
) -> None:
    """Forget blocks, for good: those on disk are erased, too.

    Can be interrupted without harm, and run again. What engines save meanwhile stays. What a disk keeps of
    erased blocks is in docs/security.md.
    """
    from kvtier.client import default_socket
    from kvtier_daemon.cli import asking
    from kvtier_daemon.cli.status import connected

    if everything + bool(space or tenant) != 1:
        raise typer.BadParameter("say what: --space, --tenant, or --all")
    with connected(Path(socket or default_socket()), "purge", ANSWER_S) as client:
        tenants = asking.everywhere(client) if everything else [asking.spaces(client, tenant)]
        chosen = [
            (each["tenant"], one)
            for each in tenants
            for one in ([asking.named(each, space)] if space else each["spaces"])
        ]
        _confirm(chosen, yes or json)
        report = _forget(client, chosen, [each["tenant"] for each in tenants])
    if json:
        from json import dumps

        typer.echo(dumps(report, indent=2))
    else:
        typer.echo(_said(report))
    if report["interrupted"]:
        raise typer.Exit(EXIT_INTERRUPTED)


def _confirm(chosen: Sequence[tuple[str, dict[str, Any]]], yes: bool) -> None:
    from kvtier.errors import ConfigError

    if yes:
        return
    memory, disk = (
        sum(space[where] for _, space in chosen) for where in ("memory_blocks", "disk_blocks")
    )
    names = ", ".join(sorted({tenant for tenant, _ in chosen})) or "nobody"
    text = (
        f"{memory:,} blocks in memory and {disk:,} on disk, in {count(len(chosen), 'space')} of {names},"
        " would be forgotten"
    )
    if not sys.stdin.isatty():
        raise ConfigError(f"{text}: say --yes if that is meant")
    try:
        meant = typer.confirm(f"{text}. Do it?")
    except typer.Abort:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if not meant:
        raise typer.Exit(1)


def _forget(
    client: Client, chosen: Sequence[tuple[str, dict[str, Any]]], tenants: Sequence[str]
) -> dict[str, Any]:
    from kvtier_daemon.cli import asking
    from kvtier_daemon.cli.progress import progress

    report: dict[str, Any] = {"spaces": 0, "blocks": 0, "erased_files": 0, "interrupted": False}
    try:
        with progress() as bar:
            most = sum(max(space["memory_blocks"], space["disk_blocks"]) for _, space in chosen)
            task = bar.add_task("purge", total=most)
            for tenant, space in chosen:
                for blocks in asking.forgotten(client, tenant, space["space"]):
                    report["blocks"] += blocks
                    bar.update(task, completed=report["blocks"])
                report["spaces"] += 1
            task = bar.add_task("erase", total=None)
            for tenant in tenants:
                for files in asking.erased(client, tenant):
                    report["erased_files"] += files
                    bar.update(task, completed=report["erased_files"])
    except KeyboardInterrupt:
        report["interrupted"] = True
    return report


def _said(report: dict[str, Any]) -> str:
    done = f"{report['blocks']:,} blocks in {count(report['spaces'], 'space')} are forgotten"
    if report["interrupted"]:
        return (
            f"interrupted: {report['blocks']:,} blocks are forgotten in memory; of the last space some may be"
            " back from disk after a restart, and not all is erased from the disk. Run it again to end it"
        )
    if report["erased_files"]:
        done += f", and erased from the disk: {count(report['erased_files'], 'file')} gone through"
    return done
