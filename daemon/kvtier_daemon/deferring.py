"""Answers that are given when what a request waits for is there: so nobody asks for it again and again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from kvtier import wire
from kvtier_daemon.mover import Mover

if TYPE_CHECKING:
    from kvtier_daemon.server import Server
    from kvtier_daemon.session import Session

LIMIT_BYTES = 8 << 20  # of the keys that one session's have; more are answered at once
LONGEST_S = 1.0


@dataclass(slots=True)
class Deferred:
    """An answer that is owed: it is given by `timer` at the latest."""

    load: wire.Load
    mover: Mover
    timer: asyncio.TimerHandle


class Deferring:
    """Of one session."""

    def __init__(self, session: Session, server: Server) -> None:
        self._session = session
        self._server = server
        self._owed: dict[int, Deferred] = {}  # by the client's number of the request
        self._bytes = 0

    def defers(self, mover: Mover, load: wire.Load) -> bool:
        """Whether this is answered later. Of one request's it is the last one."""
        number = load.request
        self._give(number)
        if load.wait_ms < 1 or not number or self._bytes + len(load.keys) > LIMIT_BYTES:
            return False
        give = partial(self._give, number)
        if not mover.tell_when_over((self._session.id, number), give):
            return False
        timer = self._server.loop.call_later(min(load.wait_ms / 1000, LONGEST_S), give)
        self._owed[number] = Deferred(load, mover, timer)
        self._bytes += len(load.keys)
        return True

    def _give(self, number: int) -> None:
        if (owed := self._take(number)) is not None:
            self._session.serve_later(msgspec.structs.replace(owed.load, wait_ms=0))

    def cancel(self, number: int) -> None:
        """Nobody waits for this one any more: it is told of nothing, and holds nothing."""
        if (owed := self._take(number)) is not None:
            self._session.send(wire.Loaded(owed.load.id, 0, 0, 0.0, 0, b"", []))

    def _take(self, number: int) -> Deferred | None:
        owed = self._owed.pop(number, None)
        if owed is not None:
            self._bytes -= len(owed.load.keys)
            owed.timer.cancel()
            owed.mover.tell_no_more((self._session.id, number))
        return owed
