"""The screen of `kvtier top`, by textual. Everything that is drawn comes from `screens`."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.timer import Timer
from textual.widgets import Footer, Static
from textual.worker import get_current_worker

from kvtier.errors import KvtierError
from kvtier_daemon.cli.screens import VIEWS, History, Moment, Room, draw

CHROME_ROWS = 4  # the views, the keys, and what is between
FASTEST_S, SLOWEST_S = 0.2, 60.0


class Top(App[None]):
    """Asks in a thread, so that keys are answered while a daemon is not."""

    CSS = """
    Screen { background: transparent; }
    #views { height: 1; padding: 0 1; margin-bottom: 1; }
    #body { height: auto; }
    #trouble { dock: bottom; height: auto; color: $error; padding: 0 1; margin-bottom: 1; }
    """
    TITLE = "kvtier"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            Binding(str(at), f"view({at - 1})", name, show=False)
            for at, name in enumerate(VIEWS, 1)
        ),
        Binding("left", "turn(-1)", "view", key_display="←"),
        Binding("right,tab", "turn(1)", "view", key_display="→"),
        Binding("space", "hold", "hold"),
        Binding("plus,equals_sign", "pace(2)", "slower", key_display="+"),
        Binding("minus", "pace(0.5)", "faster", key_display="-"),
        Binding("q", "quit", "quit"),
        Binding("ctrl+c", "quit", show=False, priority=True),  # else it says which key would do it
    ]

    def __init__(
        self, look: Callable[[], Moment], history: History, interval_s: float, view: str
    ) -> None:
        super().__init__(ansi_color=True)
        self._look = look
        self._history = history
        self._interval_s = interval_s
        self._view = VIEWS.index(view)
        self._held = False
        self._timer: Timer | None = None

    def compose(self) -> ComposeResult:
        yield Static(id="views")
        with VerticalScroll():
            yield Static(id="body")
        yield Static(id="trouble")
        yield Footer()

    def on_mount(self) -> None:
        self._pace()
        self._redraw()

    def on_resize(self) -> None:
        self._redraw()

    def action_view(self, at: int) -> None:
        self._view = at
        self._redraw()

    def action_turn(self, by: int) -> None:
        self.action_view((self._view + by) % len(VIEWS))

    def action_hold(self) -> None:
        self._held = not self._held
        self._redraw()

    def action_pace(self, factor: float) -> None:
        self._interval_s = min(SLOWEST_S, max(FASTEST_S, self._interval_s * factor))
        self._pace()
        self._redraw()

    def _pace(self) -> None:
        if self._timer is not None:
            self._timer.stop()
        self._timer = self.set_interval(self._interval_s, self._tick)

    def _tick(self) -> None:
        if not self._held:
            self._ask()

    @work(thread=True, exclusive=True, group="ask")
    def _ask(self) -> None:
        worker = get_current_worker()
        trouble = ""
        moment: Moment | None = None
        try:
            moment = self._look()
        except KvtierError as error:
            trouble = " ".join(str(error).split())
        if not worker.is_cancelled:
            self.call_from_thread(self._took, moment, trouble)

    def _took(self, moment: Moment | None, trouble: str) -> None:
        if moment is not None:
            self._history.add(moment)
        self.query_one("#trouble", Static).update(Text(trouble))
        self._redraw()

    def _redraw(self) -> None:
        names = Text()
        for at, name in enumerate(VIEWS):
            names.append(f" {at + 1} {name} ", "reverse" if at == self._view else "dim")
        names.append(f"   every {self._interval_s:g} s", "dim")
        if self._held:
            names.append("  held", "bold")
        self.query_one("#views", Static).update(names)
        room = Room(max(40, self.size.width - 2), self.size.height - CHROME_ROWS)
        self.query_one("#body", Static).update(draw(self._history, VIEWS[self._view], room))
