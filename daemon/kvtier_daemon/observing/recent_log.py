"""The last lines of the daemon's log, for bug reports of daemons without a journal."""

from __future__ import annotations

import logging
from collections import deque
from typing import Final

KEPT: Final = 1000
LINE_CHARS: Final = 1000


class RecentLog(logging.Handler):
    """Keeps the last KEPT records as text, each cut to LINE_CHARS. Never raises."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self.lines: deque[str] = deque(maxlen=KEPT)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.lines.append(self.format(record)[:LINE_CHARS])
        except (TypeError, ValueError):
            self.handleError(record)


RECENT: Final = RecentLog()
