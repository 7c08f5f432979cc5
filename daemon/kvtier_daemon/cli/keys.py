"""`kvtier keys`: lists the spaces and their contents by tier, or the keys of a space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtier_daemon.cli.flags import Json, Socket, Space, print_json, value

if TYPE_CHECKING:
    from kvtier_daemon.cli.listing import Block

SHOWN_DIGITS = 16


def keys(
    space: Space = "",
    tenant: Annotated[
        str, value("NAME", "Another tenant; only for root and the daemon's user.")
    ] = "",
    limit: Annotated[int, value("N", "Show at most N keys.", min=1)] = 20,
    json: Json = False,
    socket: Socket = None,
) -> None:
    """List the spaces and what they hold, or the keys of one. Exits with 3 if no daemon answers."""
    from kvtier_daemon.cli import listing
    from kvtier_daemon.cli.connecting import connected

    found: list[Block] = []
    with connected(socket, "keys") as client:
        if space:
            told = listing.spaces(client, tenant)
            one = listing.find_space(told, space)
            found = list(islice(listing.blocks(client, tenant, one["space"]), limit))
            report: dict[str, Any] = {"tenant": told["tenant"]} | one
            report["keys"] = [_as_json(block) for block in found]
        else:
            tenants = [listing.spaces(client, tenant)] if tenant else listing.all_tenants(client)
            report = {"tenants": {each["tenant"]: each["spaces"] for each in tenants}}
    if json:
        print_json(report)
    elif space:
        _show_keys(found, report, limit)
    else:
        _show_spaces(report["tenants"])


def _as_json(block: Block) -> dict[str, Any]:
    return {
        "key": block.key.hex(),
        "group": block.group,
        "shard": block.shard,
        "state": block.state,
        "tiers": block.tiers,
        "frame_bytes": block.frame_bytes,
        "leases": block.leases,
        "wanted": block.wanted,
        "rounds": block.rounds,
    }


def _show_spaces(tenants: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    from kvtier.units import format_bytes
    from kvtier_daemon.cli.tables import print_fitting, row, table_of

    table = table_of(
        ">space", "tenant~", "model~", ">block", ">warm", ">cold", ">bytes", ">used by"
    )
    for name, spaces in tenants.items():
        for space in spaces:
            row(
                table, str(space["space"]), name, space["model"],
                format_bytes(space["block_bytes"]), f"{space['memory_blocks']:,}",
                f"{space['disk_blocks']:,}",
                format_bytes(space["memory_bytes"] + space["disk_bytes"]), str(space["sessions"]),
            )  # fmt: skip
    if table.row_count:
        print_fitting(table)
    else:
        typer.echo("no spaces yet: no client has opened one")


def _show_keys(found: Sequence[Block], space: Mapping[str, Any], limit: int) -> None:
    from kvtier.units import format_bytes
    from kvtier_daemon.cli.tables import print_fitting, row, table_of

    typer.echo(
        f"space {space['space']} of {space['tenant']}, {space['model']}: {space['memory_blocks']:,}"
        f" blocks in memory, {space['disk_blocks']:,} on disk, each {format_bytes(space['block_bytes'])}"
    )
    if not found:
        return
    table = table_of("key", ">group", ">shard", "tier", "state", ">on disk", ">leases", "wanted")
    for block in found:
        row(
            table, block.key.hex()[:SHOWN_DIGITS], str(block.group), str(block.shard), block.tiers,
            block.state, format_bytes(block.frame_bytes) if block.on_disk else "-",
            str(block.leases), "yes" if block.wanted else "-",
        )  # fmt: skip
    print_fitting(table)
    if len(found) == limit:
        typer.echo(f"the first {limit:,}; --limit sets how many, --json prints whole keys")
