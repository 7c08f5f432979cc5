"""The last lines of the daemon's log, for a bug report where no journal keeps them."""

from __future__ import annotations

import logging
from collections import deque
from typing import Final

KEPT: Final = 1000
LINE_CHARS: Final = 1000


class Recent(logging.Handler):
    """Keeps the last KEPT records as text, each cut to LINE_CHARS, and never fails."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self.lines: deque[str] = deque(maxlen=KEPT)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep this one."""
        try:
            self.lines.append(self.format(record)[:LINE_CHARS])
        except (TypeError, ValueError):
            self.handleError(record)


RECENT: Final = Recent()
