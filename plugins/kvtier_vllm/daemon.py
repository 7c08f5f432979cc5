"""The daemon as the scheduler's side reaches it."""

from __future__ import annotations

import logging
import os
from collections import Counter

from kvtier import KvSpec
from kvtier_vllm.line import Line, Session


class Daemon:
    """Has no session before it is opened, nor while it is away. `counts` is told of those that ended."""

    def __init__(self, socket: str | None, counts: Counter[str]) -> None:
        self.line: Line | None = None
        self._socket = socket
        self._counts = counts

    def open(self, spec: KvSpec, engine: str) -> None:
        """Connect, and open this space, in the background."""
        name = f"vllm scheduler {os.getpid()}"
        self.line = Line(
            self._socket, spec, name, populate=False, level=logging.WARNING, engine=engine
        )

    @property
    def session(self) -> Session | None:
        return None if self.line is None else self.line.session

    @property
    def tried(self) -> bool:
        """Whether it is known that there is no session, where there is none."""
        return self.line is None or self.line.tried

    def ended(self, session: Session) -> None:
        """Count the end of this session, once."""
        if not session.counted:
            session.counted = True
            self._counts["lost"] += 1

    def lost(self, session: Session, why: object) -> None:
        self.ended(session)
        assert self.line is not None
        self.line.lost(session, str(why))

    def close(self) -> None:
        if self.line is not None:
            self.line.close()
