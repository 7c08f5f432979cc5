"""`kvtier top`: the daemon at a glance, and again every second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier_daemon.cli.flags import Socket

if TYPE_CHECKING:
    from kvtier_daemon.cli.screens import Moment


def top(
    once: Annotated[
        bool, typer.Option("--once", help="Print one screen of the last interval, and end.")
    ] = False,
    view: Annotated[
        str, typer.Option(metavar="NAME", help="tiers, hits, moves or clients.")
    ] = "tiers",
    interval: Annotated[
        float, typer.Option(min=0.2, max=60, metavar="SECONDS", help="Between two looks.")
    ] = 1.0,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object a look, in place of a screen.")
    ] = False,
    socket: Socket = None,
) -> None:
    """Watch tiers, hits and misses, what moves, and clients.

    Keys: 1 to 4 or the arrows for the view, space to hold, + and - for the interval, q to end. Needs
    textual, but for --once and --json: pip install 'textual>=8'.
    """
    from kvtier.client import default_socket
    from kvtier_daemon.cli.screens import VIEWS

    if view not in VIEWS:
        raise typer.BadParameter(f"--view: {view!r} is none of {', '.join(VIEWS)}")
    path = Path(socket or default_socket())
    if json:
        _as_json(path, interval, once)
    elif once:
        _once(path, interval, view)
    else:
        _watch(path, interval, view)


def _look(path: Path) -> Callable[[], Moment]:
    """What asks the daemon; each call connects, so that a daemon which was restarted is found again."""

    def look() -> Moment:
        from time import monotonic

        import msgspec

        from kvtier import wire
        from kvtier_daemon.cli.screens import Moment
        from kvtier_daemon.cli.status import connected

        with connected(path, "top") as client:
            stats = client.stats()
            report = client.link.ask(wire.Spaces(client.link.new_id(), "", -1), wire.Report)
            clients = msgspec.msgpack.decode(report.stats["clients"])
        return Moment(monotonic(), stats, clients)

    return look


def _once(path: Path, interval: float, view: str) -> None:
    from time import sleep

    from kvtier_daemon.cli.drawing import console_of
    from kvtier_daemon.cli.screens import History, Room, draw

    look, history = _look(path), History()
    history.add(look())
    sleep(interval)
    history.add(look())
    console = console_of()
    room = Room(console.width, ascii_only=console.options.ascii_only)
    console.print(draw(history, view, room))


def _as_json(path: Path, interval: float, once: bool) -> None:
    from json import dumps
    from time import sleep

    look = _look(path)
    while True:
        moment = look()
        typer.echo(dumps({"stats": moment.stats, "clients": moment.clients}))
        if once:
            return
        sleep(interval)


def _watch(path: Path, interval: float, view: str) -> None:
    import sys

    from kvtier.errors import ConfigError
    from kvtier_daemon.cli.screens import History

    look, history = _look(path), History()
    history.add(look())  # a daemon that isn't there is told before the screen is taken
    if not sys.stdout.isatty():
        raise ConfigError("the output is no terminal: --once prints one screen, --json objects")
    try:
        from kvtier_daemon.cli.watching import Top
    except ImportError as error:
        raise ConfigError(
            f"kvtier top needs textual ({error}): pip install 'textual>=8', or use --once"
        ) from error
    Top(look, history, interval, view).run()
