"""How a client waits for an answer."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from itertools import groupby

import pytest

from kvtier import wire
from kvtier.connection import DONT_WAIT, MOST_RESTS, Connection


class Watched(Connection):
    """Answers each request itself: before the client looks for the answer, or once it sleeps."""

    def __init__(self, ours: socket.socket, daemon: socket.socket) -> None:
        super().__init__(ours, time.monotonic, 10.0)
        self.daemon = daemon
        self.looked = self.slept = False

    def _receive(self, flags: int) -> bool:
        self.looked |= flags == DONT_WAIT
        if flags != DONT_WAIT:
            self.slept = True
            self.answer()
        return super()._receive(flags)

    def answer(self) -> None:
        self.daemon.recv(1 << 16)
        self.daemon.send(wire.encode(wire.Done(7)))

    def ask(self, soon: bool) -> tuple[bool, bool]:
        """Whether the client looked for the answer, and whether it slept."""
        self.looked = self.slept = False
        self.send(wire.Cancel(7, 1))
        if soon:
            self.answer()
        assert self.wait(7) == wire.Done(7)
        return self.looked, self.slept


@pytest.fixture
def connection() -> Iterator[Watched]:
    ours, daemon = socket.socketpair()
    with daemon:
        made = Watched(ours, daemon)
        yield made
        made.close(farewell=False)


def test_an_answer_that_comes_soon_costs_no_sleep(connection: Watched) -> None:
    assert [connection.ask(True) for _ in range(10)] == [(True, False)] * 10


def test_after_slow_answers_ever_more_requests_sleep_at_once(connection: Watched) -> None:
    asked = [connection.ask(False) for _ in range(400)]
    assert {slept for _, slept in asked} == {True}
    rests = [len(list(run)) for looked, run in groupby(looked for looked, _ in asked) if not looked]
    assert rests[:8] == [1, 3, 7, 15, 31, 63, MOST_RESTS, MOST_RESTS]


def test_an_answer_that_comes_soon_ends_the_rests(connection: Watched) -> None:
    while connection.ask(False) != (False, True):
        pass
    assert connection.ask(True) == (True, False)
    assert [connection.ask(False) for _ in range(3)] == [(True, True), (False, True), (True, True)]
