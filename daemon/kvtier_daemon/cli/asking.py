"""Requests that only commands make: what spaces and blocks there are, piece by piece."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from kvtier import Client, wire

STATES = ("absent", "writing", "ready", "doomed", "quarantined", "cold", "promoting")
ON_DISK, WANTED = 1, 2


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
    told: dict[str, Any] = {}
    first = 0
    while True:
        asked = wire.Spaces(client.link.new_id(), tenant, first)
        report = client.link.ask(asked, wire.Report)
        piece = {name: msgspec.msgpack.decode(raw) for name, raw in report.stats.items()}
        told = piece | {"spaces": [*told.get("spaces", []), *piece["spaces"]]}
        first = told.pop("next")
        if not first:
            break
    held = _tally(client, tenant)
    for space in told["spaces"]:
        names = ("memory_blocks", "disk_blocks", "other_blocks", "memory_bytes", "disk_bytes")
        space |= dict(zip(names, held.get(space.pop("index"), [0] * 5), strict=True))
    return told


def _tally(client: Client, tenant: str) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(lambda: [0] * 5)
    first = 0
    while True:
        piece = client.link.ask(wire.List(client.link.new_id(), tenant, -1, first), wire.Listed)
        for index, *counts in wire.TALLY.iter_unpack(piece.rows):
            found[index] = [a + b for a, b in zip(found[index], counts, strict=True)]
        first = piece.next
        if not first:
            return dict(found)


def blocks(client: Client, tenant: str, space: int) -> Iterator[Block]:
    """The blocks of a space, as far as they are asked for."""
    first = 0
    while True:
        asked = wire.List(client.link.new_id(), tenant, space, first)
        piece = client.link.ask(asked, wire.Listed)
        for row in wire.LISTED.iter_unpack(piece.rows):
            _, group, shard, payload, leases, state, flags, _, rounds, key = row
            yield Block(
                key, group, shard, STATES[state], bool(flags & ON_DISK), payload, leases,
                bool(flags & WANTED), rounds,
            )  # fmt: skip
        first = piece.next
        if not first:
            return


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
