"""Paged requests of commands: spaces, blocks, and purges."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from kvtier import Client, wire

STATES = ("absent", "writing", "ready", "doomed", "quarantined", "cold", "promoting")
ON_DISK, WANTED = 1, 2
EVERY_SPACE = -1  # a tally of each space

T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class Block:
    """A block of one group and shard."""

    key: bytes
    group: int
    shard: int
    state: str
    on_disk: bool
    frame_bytes: int
    leases: int
    wanted: bool  # requested again since its frame was written
    rounds: int  # how often its segment was reclaimed and the block was kept

    @property
    def tiers(self) -> str:
        memory = self.state in ("ready", "writing", "doomed")
        return "+".join(["warm"] * memory + ["cold"] * self.on_disk) or "-"


def spaces(client: Client, tenant: str = "") -> dict[str, Any]:
    """Return all spaces of a tenant; for root and the daemon's user also the tenants and clients."""

    def ask(first: int) -> tuple[dict[str, Any], int]:
        report = client.link.ask(wire.Spaces(client.link.new_id(), tenant, first), wire.Report)
        piece = {name: msgspec.msgpack.decode(raw) for name, raw in report.stats.items()}
        return piece, piece.pop("next")

    told: dict[str, Any] = {}
    for piece in _pieces(ask):
        told = piece | {"spaces": [*told.get("spaces", []), *piece["spaces"]]}
    held = _tally(client, tenant)
    for space in told["spaces"]:
        names = ("memory_blocks", "disk_blocks", "other_blocks", "memory_bytes", "disk_bytes")
        space |= dict(zip(names, held.get(space.pop("index"), [0] * 5), strict=True))
    return told


def _tally(client: Client, tenant: str) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(lambda: [0] * 5)
    for rows in _pieces(lambda first: _listed(client, tenant, EVERY_SPACE, first)):
        for index, *counts in wire.TALLY.iter_unpack(rows):
            found[index] = [a + b for a, b in zip(found[index], counts, strict=True)]
    return dict(found)


def blocks(client: Client, tenant: str, space: int) -> Iterator[Block]:
    """Yield the blocks of a space. Requests them page by page during the iteration."""
    for rows in _pieces(lambda first: _listed(client, tenant, space, first)):
        for row in wire.LISTED.iter_unpack(rows):
            _, group, shard, payload, leases, state, flags, _, rounds, key = row
            yield Block(
                key, group, shard, STATES[state], bool(flags & ON_DISK), payload, leases,
                bool(flags & WANTED), rounds,
            )  # fmt: skip


def forget_space(client: Client, tenant: str, space: int) -> Iterator[int]:
    """Forget a space, page by page during the iteration. Yields how many blocks each page had."""

    def ask(first: int) -> tuple[int, int]:
        piece = client.link.ask(wire.Purge(client.link.new_id(), tenant, space, first), wire.Purged)
        return piece.blocks, piece.next

    return _pieces(ask)


def erase_unused(client: Client, tenant: str) -> Iterator[int]:
    """Erase the bytes on disk that belong to no block of this tenant. Yields how many files each page had."""
    return forget_space(client, tenant, EVERY_SPACE)


def _listed(client: Client, tenant: str, space: int, first: int) -> tuple[bytes, int]:
    piece = client.link.ask(wire.List(client.link.new_id(), tenant, space, first), wire.Listed)
    return piece.rows, piece.next


def _pieces(ask: Callable[[int], tuple[T, int]]) -> Iterator[T]:
    """Yield all pages. `ask` takes the start of a page; returns the page and the next start, or 0."""
    first = 0
    while True:
        piece, first = ask(first)
        yield piece
        if not first:
            return


def all_tenants(client: Client) -> list[dict[str, Any]]:
    """Return `spaces` of this user's tenant, and of all others if this user may see them."""
    own = spaces(client)
    others = [name for name in own.get("tenants", []) if name != own["tenant"]]
    return [own, *(spaces(client, name) for name in others)]


def find_space(told: dict[str, Any], text: str) -> dict[str, Any]:
    """Return the space with this number, or with an identity that begins with this text."""
    from kvtier.errors import ConfigError

    found: list[dict[str, Any]] = [
        space
        for space in told["spaces"]
        if (text.isdecimal() and space["space"] == int(text))
        or (len(text) >= 6 and space["identity"].startswith(text.lower()))
    ]
    if len(found) != 1:
        what = f"{len(found)} spaces match" if found else "no such space"
        raise ConfigError(f"--space {text}: {what}; `kvtier keys` lists all spaces")
    return found[0]
