"""The daemon's word of what comes and goes in the tiers, as events."""

from __future__ import annotations

import logging
from collections import Counter

from kvtier import KvtierError
from kvtier.client import Changes
from kvtier_vllm.daemon import Daemon
from kvtier_vllm.events import Events
from kvtier_vllm.line import Session

log = logging.getLogger("vllm.kvtier")


class Watch:
    """Asks the daemon what comes and goes, once more after each answer. `counts` is told what was missed."""

    def __init__(self, events: Events, daemon: Daemon, counts: Counter[str]) -> None:
        self._events = events
        self._daemon = daemon
        self._counts = counts
        self._session: Session | None = None

    def go_on(self) -> None:
        """With another session nothing is known."""
        session = self._daemon.session
        if session is not self._session:
            self._events.forget()
            self._session = session
            self._ask()

    def changed(self, changes: Changes) -> None:
        """The daemon says what came and went; ask for the next."""
        if changes.refused:
            log.warning("kvtier: no events of the tiers: %s", changes.refused)
            return
        if changes.missed:
            self._counts["missed"] += changes.missed
            self._events.forget()
        self._events.heard(changes.changes)
        self._ask()

    def _ask(self) -> None:
        if self._session is not None:
            try:
                self._session.space.begin_watch()
            except KvtierError as error:
                self._daemon.lost(self._session, error)
