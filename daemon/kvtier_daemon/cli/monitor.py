"""`kvtier monitor`: prints the events of the daemon as they happen."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtier_daemon.cli.flags import Socket, flag, value

if TYPE_CHECKING:
    from kvtier import Client

FIRST = ("at", "kind", "tenant", "client")  # these have their own columns
ASK_S = 1.0  # without an event for this long, check whether the daemon still answers
DOUBTED = 20  # events without a field of the filter before a warning is printed


def monitor(
    wanted: Annotated[
        list[str] | None,
        typer.Option(
            "--filter",
            metavar="KIND | FIELD=VALUE",
            help="client, space, save, lookup, evict, promote, demote or fault; or a field, such "
            "as why=absent. Repeatable: an event must match one of the kinds and all of the "
            "fields.",
        ),
    ] = None,
    limit: Annotated[int, value("N", "Stop after N events; 0: never.", min=0)] = 0,
    json: Annotated[bool, flag("--json", "Print one JSON object per line.")] = False,
    socket: Socket = None,
) -> None:
    """Show events as they happen, until interrupted.

    Events are clients, saves, lookups, evictions, transfers and faults. A reader that is too slow loses
    the oldest events, and the output says how many.
    """
    from json import dumps

    from kvtier_daemon.cli.connecting import connected

    terms = [text for each in wanted or [] for text in each.split(",")]
    kinds = [text for text in terms if "=" not in text]
    fields = dict(text.split("=", 1) for text in terms if "=" in text)
    _check(fields, kinds)
    shown = 0
    unseen = Unseen(fields)
    with connected(socket, "monitor") as client:
        for event in _events(client, kinds):
            if doubt := unseen.look(event):
                typer.echo(f"kvtier: {doubt}", err=True)
            fits = all(str(event.get(name)) == value for name, value in fields.items())
            if not fits and event["kind"] != "missed":
                continue
            typer.echo(dumps(event) if json else _line(event))
            shown += 1
            if shown == limit:
                return


def _check(fields: Mapping[str, str], kinds: Collection[str]) -> None:
    """Refuse a filter that no event can match: the command would wait forever."""
    from kvtier_daemon.catalog import WHY_MISSED
    from kvtier_daemon.observing.events import KINDS, WHAT
    from kvtier_daemon.planning import WHY

    for field, wanted in fields.items():
        if not field or not wanted:
            raise typer.BadParameter(
                f"{field}={wanted}: write FIELD=VALUE, such as why=absent", param_hint="--filter"
            )
    values = {"kind": KINDS, "what": WHAT, "why": tuple(dict.fromkeys((*WHY_MISSED, *WHY, "off")))}
    for name, known in values.items():
        value = fields.get(name)
        # The reasons of client and fault events are free text.
        anything = value is None or (name == "why" and not {"fault", "client"}.isdisjoint(kinds))
        if not anything and value not in known:
            raise typer.BadParameter(
                f"{name}={value}: no event has this value; {name} is one of {', '.join(known)}"
                + ("; of kind fault and client it is any text" if name == "why" else ""),
                param_hint="--filter",
            )


class Unseen:
    """Warns of fields of the filter that no event has, such as a misspelt name."""

    def __init__(self, wanted: Iterable[str]) -> None:
        self._wanted = set(wanted)
        self._known: dict[str, None] = {}
        self._looked_at = 0

    def look(self, event: Mapping[str, Any]) -> str:
        """Return a warning after this event, or an empty string."""
        self._wanted -= event.keys()
        if not self._wanted or event["kind"] == "missed":
            return ""
        self._known |= dict.fromkeys(event)
        self._looked_at += 1
        if self._looked_at != DOUBTED:
            return ""
        names = " and ".join(repr(name) for name in sorted(self._wanted))
        return f"none of {DOUBTED} events has {names}; they have {', '.join(self._known)}"


def _events(client: Client, kinds: list[str]) -> Iterator[dict[str, Any]]:
    import sys
    from select import POLLIN, poll
    from time import time

    import msgspec

    from kvtier import wire
    from kvtier.errors import Refused, Unavailable

    waiting, output = poll(), sys.stdout.fileno() if sys.stdout else -1
    waiting.register(client.fileno(), POLLIN)
    if sys.stdout:
        waiting.register(output, 0)  # only errors: who read this has exited
    while True:
        ticket = client.link.tell(wire.Monitor(client.link.new_id(), kinds))
        reply: wire.Reply | None = None
        while reply is None:
            ready = dict(waiting.poll(ASK_S * 1000))
            if ready.get(output):
                raise BrokenPipeError
            if not ready:
                client.ping()
            answers = client.link.replies()
            if ticket in answers:
                reply = answers[ticket][1]
        if isinstance(reply, wire.Failed):
            raise Refused(reply.code, reply.text)
        if not isinstance(reply, wire.Events):
            raise Unavailable("the daemon sent an unexpected answer")
        if reply.missed:
            yield {"at": round(time(), 3), "kind": "missed", "events": reply.missed}
        for event in reply.events:
            yield msgspec.msgpack.decode(event)


def _line(event: Mapping[str, Any]) -> str:
    from datetime import datetime

    at = datetime.fromtimestamp(event["at"]).astimezone().strftime("%H:%M:%S.%f")[:-3]
    if event["kind"] == "missed":
        return f"{at} {event['events']:,} events were missed: this command reads too slowly"
    rest = "  ".join(
        f"{name} {value}" for name, value in event.items() if name not in FIRST and value != ""
    )
    who = "/".join(str(event[name]) for name in ("tenant", "client") if event.get(name))
    return f"{at} {event['kind']:<8}{who:<20} {rest}"
