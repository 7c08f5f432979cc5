"""`kvtier top`: shows the state of the daemon, updated every second."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier_daemon.cli.flags import Socket, flag, value

if TYPE_CHECKING:
    from kvtier_daemon.cli.top_views import Moment


def top(
    once: Annotated[
        bool, flag("--once", "Print one screen of the last interval and exit.")
    ] = False,
    view: Annotated[str, value("NAME", "The view: tiers, hits, moves or clients.")] = "tiers",
    interval: Annotated[
        float, value("SECONDS", "Time between two updates.", min=0.2, max=60)
    ] = 1.0,
    json: Annotated[
        bool, flag("--json", "Print one JSON object per update instead of a screen.")
    ] = False,
    socket: Socket = None,
) -> None:
    """Watch tiers, hits and misses, transfers and clients.

    Keys: 1 to 4 or the arrows select the view, space pauses, + and - change the interval, q quits.
    Needs textual, except for --once and --json: pip install 'textual>=8'.
    """
    from kvtier.client import default_socket
    from kvtier_daemon.cli.top_views import VIEWS

    if view not in VIEWS:
        raise typer.BadParameter(f"--view: {view!r} is not one of {', '.join(VIEWS)}")
    path = Path(socket or default_socket())
    if json:
        _as_json(path, interval, once)
    elif once:
        _once(path, interval, view)
    else:
        _watch(path, interval, view)


def _look(path: Path) -> Moment:
    """Return a report. Connects each time, so that it also finds a restarted daemon."""
    from time import monotonic

    import msgspec

    from kvtier import wire
    from kvtier_daemon.cli.connecting import connected
    from kvtier_daemon.cli.top_views import Moment

    with connected(path, "top") as client:
        stats = client.stats()
        report = client.link.ask(wire.Spaces(client.link.new_id(), "", -1), wire.Report)
        clients = msgspec.msgpack.decode(report.stats["clients"])
    return Moment(monotonic(), stats, clients)


def _once(path: Path, interval: float, view: str) -> None:
    from time import sleep

    from kvtier_daemon.cli.tables import console_of
    from kvtier_daemon.cli.top_views import ScreenHistory, ScreenRoom, draw

    history = ScreenHistory()
    history.add(_look(path))
    sleep(interval)
    history.add(_look(path))
    console = console_of()
    room = ScreenRoom(console.width, ascii_only=console.options.ascii_only)
    console.print(draw(history, view, room))


def _as_json(path: Path, interval: float, once: bool) -> None:
    from json import dumps
    from time import sleep

    while True:
        moment = _look(path)
        typer.echo(dumps({"stats": moment.stats, "clients": moment.clients}))
        if once:
            return
        sleep(interval)


def _watch(path: Path, interval: float, view: str) -> None:
    import sys

    from kvtier.errors import ConfigError
    from kvtier_daemon.cli.top_views import ScreenHistory

    history = ScreenHistory()
    history.add(_look(path))  # fail before the screen is taken over if no daemon answers
    if not sys.stdout.isatty():
        raise ConfigError("the output is not a terminal: use --once for one screen, or --json")
    try:
        from kvtier_daemon.cli.top_app import Top
    except ImportError as error:
        raise ConfigError(
            f"kvtier top needs textual ({error}): pip install 'textual>=8', or use --once"
        ) from error
    app = Top(partial(_look, path), history, interval, view)
    app.run()
    if app.return_code:
        raise typer.Exit(app.return_code)
