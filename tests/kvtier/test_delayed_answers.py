"""Answers that the daemon delays, while other threads use the connection."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from kvtier import Refused, Unavailable, wire
from kvtier.connection import Connection, begin_delayed, look_for


@pytest.fixture
def pair() -> Iterator[tuple[Connection, socket.socket]]:
    ours, daemon = socket.socketpair()
    with daemon:
        connection = Connection(ours, time.monotonic, 10.0)
        yield connection, daemon
        connection.close(farewell=False)


def test_poll_leaves_the_answer_to_the_thread_that_looks_for_it(
    pair: tuple[Connection, socket.socket],
) -> None:
    connection, daemon = pair
    readable = begin_delayed(connection, wire.Cancel(7, 1))
    connection.send(wire.Cancel(8, 1))
    assert look_for(connection, 7) is None and not readable.poll(0)
    daemon.send(wire.encode(wire.Done(8)) + wire.encode(wire.Done(7)))
    assert readable.poll(1000)
    assert connection.poll() == {8: wire.Done(8)}
    assert connection.poll() == {}
    assert look_for(connection, 7) == wire.Done(7)
    assert look_for(connection, 7) is None


def test_another_thread_that_waits_leaves_the_answer_too(
    pair: tuple[Connection, socket.socket],
) -> None:
    connection, daemon = pair
    begin_delayed(connection, wire.Cancel(7, 1))
    connection.send(wire.Cancel(8, 1))
    daemon.send(wire.encode(wire.Done(7)) + wire.encode(wire.Done(8)))
    assert connection.wait(8) == wire.Done(8)
    assert look_for(connection, 7) == wire.Done(7)


def test_a_delayed_refusal_and_the_end_of_the_daemon_are_raised(
    pair: tuple[Connection, socket.socket],
) -> None:
    connection, daemon = pair
    for number in (7, 9):
        begin_delayed(connection, wire.Cancel(number, 1))
    daemon.send(wire.encode(wire.Failed(7, "bad_request", "no")))
    with pytest.raises(Refused, match="no"):
        while look_for(connection, 7) is None:
            pass
    daemon.close()
    with pytest.raises(Unavailable):
        look_for(connection, 9)
