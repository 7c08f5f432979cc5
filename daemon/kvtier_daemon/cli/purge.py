"""`kvtier purge`: forgets the blocks of a space or a tenant in memory and on disk, page by page."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtier_daemon.cli.flags import Json, Socket, Space, flag, print_json, value
from kvtier_daemon.cli.tables import count

if TYPE_CHECKING:
    from kvtier import Client

ANSWER_S = 40.0  # the last answer for a space arrives when the change is durable
EXIT_INTERRUPTED = 130


def purge(
    space: Space = "",
    tenant: Annotated[
        str, value("NAME", "All blocks of this tenant, or the tenant of the space.")
    ] = "",
    everything: Annotated[bool, flag("--all", "All blocks of every tenant.")] = False,
    yes: Annotated[bool, flag("--yes", "Do not ask for confirmation.")] = False,
    json: Json = False,
    socket: Socket = None,
) -> None:
    """Forget blocks permanently, and erase them from the disks.

    It can be interrupted and run again. Blocks that engines save during the purge stay.
    docs/security.md describes which copies a disk may keep.
    """
    from kvtier_daemon.cli import listing
    from kvtier_daemon.cli.connecting import connected

    if everything + bool(space or tenant) != 1:
        raise typer.BadParameter("choose what to purge: --space, --tenant or --all")
    with connected(socket, "purge", ANSWER_S) as client:
        tenants = listing.all_tenants(client) if everything else [listing.spaces(client, tenant)]
        chosen = [
            (each["tenant"], one)
            for each in tenants
            for one in ([listing.find_space(each, space)] if space else each["spaces"])
        ]
        _confirm(chosen, yes)
        report = _forget(client, chosen, [each["tenant"] for each in tenants])
    if json:
        print_json(report)
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
    names = ", ".join(sorted({tenant for tenant, _ in chosen}))
    text = (
        "no space has blocks; data of forgotten blocks would be erased from disk"
        if not chosen
        else (
            f"{memory:,} blocks in memory and {disk:,} on disk, in {count(len(chosen), 'space')} of {names},"
            " would be forgotten"
        )
    )
    if not sys.stdin.isatty():
        raise ConfigError(f"{text}: add --yes to confirm")
    try:
        meant = typer.confirm(f"{text}. Continue?", err=True)
    except typer.Abort:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if not meant:
        raise typer.Exit(1)


def _forget(
    client: Client, chosen: Sequence[tuple[str, dict[str, Any]]], tenants: Sequence[str]
) -> dict[str, Any]:
    from kvtier_daemon.cli import listing
    from kvtier_daemon.cli.progress import progress

    report: dict[str, Any] = {"spaces": 0, "blocks": 0, "erased_files": 0, "interrupted": False}
    try:
        with progress() as bar:
            most = sum(max(space["memory_blocks"], space["disk_blocks"]) for _, space in chosen)
            task = bar.add_task("purge", total=most)
            for tenant, space in chosen:
                for blocks in listing.forget_space(client, tenant, space["space"]):
                    report["blocks"] += blocks
                    bar.update(task, completed=report["blocks"])
                report["spaces"] += 1
            task = bar.add_task("erase", total=None)
            for tenant in tenants:
                for files in listing.erase_unused(client, tenant):
                    report["erased_files"] += files
                    bar.update(task, completed=report["erased_files"])
    except KeyboardInterrupt:
        report["interrupted"] = True
    return report


def _said(report: dict[str, Any]) -> str:
    done = f"{report['blocks']:,} blocks in {count(report['spaces'], 'space')} are forgotten"
    if report["interrupted"]:
        return (
            f"interrupted: {report['blocks']:,} blocks are forgotten in memory; some of the "
            "last space may return from disk after a restart, and not all is erased from "
            "disk. Run it again to finish"
        )
    if report["erased_files"]:
        done += f", and erased from disk ({count(report['erased_files'], 'file')} processed)"
    return done
