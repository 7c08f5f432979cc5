"""`kvtier explain`: why a lookup hit or missed, where a block is, or why it is not stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from kvtier_daemon.cli.flags import Socket, flag, print_json

KEY_DIGITS = 64
WHY = {
    "": "all blocks were found",
    "in_memory": "it is in memory",
    "coming": "it is being read from disk",
    "on_disk": "it is on disk",
    "tier_off": "it is on disk, but the disk is off: `kvtier status` says why",
    "unasked": "it is on disk, stored with another cold.codecs setting: no request can find it",
    "in_remote": "it is in the remote store, and a request reads it from there",
    "in_progress": "a client is writing it",
    "incomplete": "some of its groups or shards are here, others are not",
    "never_stored": "it was never stored, or it left so long ago that no record of it is kept",
    "other_identity": "nothing was ever stored under this description; others that are like it have blocks",
    "evicted": "it was evicted for others, and there is no cold tier",
    "expired": "its pin ran out, and then it was evicted",
    "forgotten": "a client or an operator forgot it, or its ttl is over",
    "lost": "its place on disk was used again",
    "spoilt": "its bytes were damaged, on disk or in memory",
    "budget": "it was evicted unwritten: cold.daily_writes was used up",
    "off": "it was evicted unwritten: the disks did not accept writes",
    "slow_disk": "it was evicted before the disk had written it",
    "once": "it was evicted unwritten: it had been used only once, and writes are limited",
    "absent": "the first missing block was not stored",
    "cold": "the missing blocks were on disk",
    "promoting": "the missing blocks were being read from disk",
    "not_read": "the missing blocks were on disk and could not be read",
    "slower": "recomputing was expected to be faster than reading from disk",
    "crowded": "the disk was too busy to be faster than recomputing",
    "unreliable": "the last reads of the disk or store were late, or a store was not measured yet",
    "tried_compute": "recomputed to measure how long that takes (one request in a hundred)",
    "too_many": "too many requests were waiting for the disk",
}  # fmt: skip


def explain(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[REQUEST | KEY...]",
            help="The number of a lookup, or keys in hex. Default: the last lookups.",
        ),
    ] = None,
    json: Annotated[bool, flag("--json", "Print one JSON object instead of text.")] = False,
    socket: Socket = None,
) -> None:
    """Show why a lookup hit or missed, or where blocks are. Exits with 3 if no daemon answers."""
    from kvtier_daemon.cli.connecting import connected

    lookup, keys = _parsed(what or [])
    with connected(socket, "explain") as client:
        told = client.explain(lookup, keys)
    if json:
        print_json(told)
        return
    for line in _lines(told):
        typer.echo(line)


def _parsed(what: list[str]) -> tuple[int, bytes]:
    if len(what) == 1 and what[0].isdecimal() and len(what[0]) < KEY_DIGITS:
        return int(what[0]), b""
    try:
        keys = [bytes.fromhex(text) for text in what if len(text) == KEY_DIGITS]
    except ValueError:
        keys = []
    if len(keys) < len(what):
        raise typer.BadParameter(f"give the number of a lookup, or keys of {KEY_DIGITS} hex digits")
    return 0, b"".join(keys)


def _lines(told: Mapping[str, Any]) -> Iterator[str]:
    for lookup in told.get("lookups", [told["lookup"]] if "lookup" in told else []):
        found = f"{lookup['ready']} ready, {lookup['coming']} coming of {lookup['blocks']} blocks"
        found += f", {lookup['used']} used"
        yield (
            f"{lookup['number']}: {lookup['ago_s']:.1f} s ago, {lookup['client']}, space"
            f" {lookup['space']}: {found}; {WHY.get(lookup['why'], lookup['why'])}"
        )
    from kvtier_daemon.cli.tables import count

    for key in told.get("keys", []):
        by = f", by {key['policy']}" if "policy" in key else ""
        ago = f" ({key['ago_s']:.0f} s ago{by})" if "ago_s" in key else ""
        engines = key.get("engines", 0)
        held = f"; {count(engines, 'engine')} hold{'s' * (engines == 1)} it" if engines else ""
        copies = f"; a copy is on GPU {', '.join(key['gpus'])}" if "gpus" in key else ""
        yield f"{key['key']}: {WHY.get(key['why'], key['why'])}{ago}{held}{copies}"
        for near in key.get("near", []):
            fields = ", ".join(
                f"{name} {values['there']!r} (here {values['here']!r})"
                for name, values in near["differs"].items()
            )
            yield f"    space {near['space']} has blocks; it differs in: {fields}"
    if not any(told.values()):
        yield "no lookups yet"
