"""The screen of `kvtier top`, with textual. `top_views` draws the content."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
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
from kvtier_daemon.cli.top_views import VIEWS, Moment, ScreenHistory, ScreenRoom, draw

CHROME_ROWS = 4  # the row of views, the row of keys, and the margins
FASTEST_S, SLOWEST_S = 0.2, 60.0
JOB_CONTROL = (signal.SIGTSTP, signal.SIGCONT)


class Top(App[None]):
    """Gets reports in a thread, so that keys work while a daemon does not answer."""

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
        Binding("space", "pause", "pause"),
        Binding("plus,equals_sign", "interval(2)", "slower", key_display="+"),
        Binding("minus", "interval(0.5)", "faster", key_display="-"),
        Binding("q", "quit", "quit"),
        # otherwise textual prints which key quits
        Binding("ctrl+c", "quit", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", show=False, priority=True),
    ]

    def __init__(
        self, look: Callable[[], Moment], history: ScreenHistory, interval_s: float, view: str
    ) -> None:
        super().__init__(ansi_color=True)
        self._look = look
        self._history = history
        self._interval_s = interval_s
        self._view = VIEWS.index(view)
        self._paused = False
        self._timer: Timer | None = None

    def compose(self) -> ComposeResult:
        yield Static(id="views")
        with VerticalScroll():
            yield Static(id="body")
        yield Static(id="trouble")
        yield Footer()

    def on_mount(self) -> None:
        if not self.is_headless:
            self._handle_job_control()
            asyncio.get_running_loop().add_signal_handler(
                signal.SIGTERM, self.exit, None, 128 + signal.SIGTERM
            )
        self._restart_timer()
        self._redraw()

    def on_resize(self) -> None:
        self._redraw()

    def action_suspend_process(self) -> None:
        os.kill(0, signal.SIGTSTP)  # also to a parent that waits for this process, such as a script

    def _handle_job_control(self) -> None:
        """Replace textual's handlers: that of SIGCONT starts a second reader of the terminal if no SIGTSTP
        came before, and both remain when the event loop has ended."""
        for number in JOB_CONTROL:
            asyncio.get_running_loop().add_signal_handler(number, self._reenter, number)

    def _reenter(self, number: int) -> None:
        """Give the terminal back, stop after SIGTSTP, and take it again in the foreground. Before a SIGCONT
        alone, SIGSTOP has stopped this process, and a shell may have changed the terminal."""
        if self._exit:  # the terminal has been given back, or will be
            return
        for each in JOB_CONTROL:
            asyncio.get_running_loop().remove_signal_handler(each)
        with self.suspend():
            if number == signal.SIGTSTP:
                os.kill(os.getpid(), signal.SIGTSTP)
            while _is_in_background():
                os.kill(os.getpid(), signal.SIGTSTP)
        self._handle_job_control()

    def action_view(self, at: int) -> None:
        self._view = at
        self._redraw()

    def action_turn(self, by: int) -> None:
        self.action_view((self._view + by) % len(VIEWS))

    def action_pause(self) -> None:
        self._paused = not self._paused
        self._redraw()

    def action_interval(self, factor: float) -> None:
        self._interval_s = min(SLOWEST_S, max(FASTEST_S, self._interval_s * factor))
        self._restart_timer()
        self._redraw()

    def _restart_timer(self) -> None:
        if self._timer is not None:
            self._timer.stop()
        self._timer = self.set_interval(self._interval_s, self._tick)

    def _tick(self) -> None:
        if not self._paused:
            self._get_report()

    @work(thread=True, exclusive=True, group="report")
    def _get_report(self) -> None:
        worker = get_current_worker()
        trouble = ""
        moment: Moment | None = None
        try:
            moment = self._look()
        except KvtierError as error:
            trouble = " ".join(str(error).split())
        if not worker.is_cancelled:
            self.call_from_thread(self._show, moment, trouble)

    def _show(self, moment: Moment | None, trouble: str) -> None:
        if moment is not None:
            self._history.add(moment)
        self.query_one("#trouble", Static).update(Text(trouble))
        self._redraw()

    def _redraw(self) -> None:
        names = Text()
        for at, name in enumerate(VIEWS):
            names.append(f" {at + 1} {name} ", "reverse" if at == self._view else "dim")
        names.append(f"   every {self._interval_s:g} s", "dim")
        if self._paused:
            names.append("  paused", "bold")
        self.query_one("#views", Static).update(names)
        room = ScreenRoom(max(40, self.size.width - 2), self.size.height - CHROME_ROWS)
        self.query_one("#body", Static).update(draw(self._history, VIEWS[self._view], room))


def _is_in_background() -> bool:
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) != os.getpgrp()
    except OSError:  # it is not the terminal of this session
        return False
