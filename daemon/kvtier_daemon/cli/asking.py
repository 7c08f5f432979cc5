"""Requests that only commands make: what spaces and blocks there are, piece by piece."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from kvtier import Client, wire

STATES = ("absent", "writing", "ready", "doomed", "quarantined", "cold", "promoting")
ON_DISK, WANTED = 1, 2
EVERY_SPACE = -1  # a tally, of each

T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class Block:
    """A block of one group and shard, as the daemon lists it."""

    key: bytes
    group: int
    shard: int
    state: str
    on_disk: bool
    frame_bytes: int
    leases: int
    wanted: bool  # since its frame was written
    rounds: int  # in which it was wanted, of its segments

    @property
    def tiers(self) -> str:
        memory = self.state in ("ready", "writing", "doomed")
        return "+".join(["warm"] * memory + ["cold"] * self.on_disk) or "-"


def spaces(client: Client, tenant: str = "") -> dict[str, Any]:
    """All spaces of a tenant, each with what it has; and which tenants and clients there are, for who may
    know."""

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
    """The blocks of a space, as far as they are asked for."""
    for rows in _pieces(lambda first: _listed(client, tenant, space, first)):
        for row in wire.LISTED.iter_unpack(rows):
            _, group, shard, payload, leases, state, flags, _, rounds, key = row
            yield Block(
                key, group, shard, STATES[state], bool(flags & ON_DISK), payload, leases,
                bool(flags & WANTED), rounds,
            )  # fmt: skip


def forgotten(client: Client, tenant: str, space: int) -> Iterator[int]:
    """Forget a space, as far as this is iterated: how many blocks each piece had."""

    def ask(first: int) -> tuple[int, int]:
        piece = client.link.ask(wire.Purge(client.link.new_id(), tenant, space, first), wire.Purged)
        return piece.blocks, piece.next

    return _pieces(ask)


def erased(client: Client, tenant: str) -> Iterator[int]:
    """Erase from the disks what no block of this tenant owns: how many files each piece had."""
    return forgotten(client, tenant, EVERY_SPACE)


def _listed(client: Client, tenant: str, space: int, first: int) -> tuple[bytes, int]:
    piece = client.link.ask(wire.List(client.link.new_id(), tenant, space, first), wire.Listed)
    return piece.rows, piece.next


def _pieces(ask: Callable[[int], tuple[T, int]]) -> Iterator[T]:
    """All that `ask` has from 0 on: it returns a piece, and where the next begins or 0 after the last."""
    first = 0
    while True:
        piece, first = ask(first)
        yield piece
        if not first:
            return


def everywhere(client: Client) -> list[dict[str, Any]]:
    """What `spaces` tells of one's own tenant, and of the others for who may know."""
    own = spaces(client)
    others = [name for name in own.get("tenants", []) if name != own["tenant"]]
    return [own, *(spaces(client, name) for name in others)]


def named(told: dict[str, Any], text: str) -> dict[str, Any]:
    """The space of this number, or whose identity begins so."""
    from kvtier.errors import ConfigError

    found: list[dict[str, Any]] = [
        space
        for space in told["spaces"]
        if (text.isdecimal() and space["space"] == int(text))
        or (len(text) >= 6 and space["identity"].startswith(text.lower()))
    ]
    if len(found) != 1:
        what = f"{len(found)} spaces begin so" if found else "there is no such space"
        raise ConfigError(f"--space {text}: {what}; `kvtier keys` lists them")
    return found[0]
