"""Answers that the daemon delays, while other threads use the connection."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Iterator

import pytest

from kvtier import Refused, Unavailable, wire
from kvtier.connection import Connection, begin_delayed, look_for
from kvtier.link import Link, ask_delayed


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


class SocketLink(Link):
    """A link over an existing connection that is not made again."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.lock = threading.RLock()
        self.arena = type("NoArena", (), {"extents": [], "tables": []})()
        self._deferred = deque()
        self._last_id = 0
        self._pending = {}

    def _reconnected(self, until: float) -> bool:
        return False


class SteppedClock:
    """The time is that of the last step."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def asked(link: Link) -> tuple[threading.Thread, list[object]]:
    """Start a thread that asks; what it ends with."""
    ended: list[object] = []

    def run() -> None:
        try:
            ask_delayed(
                link,
                lambda id_: wire.Cancel(id_, 1),
                wire.Done,
                lambda reply, _: ended.append(reply),
            )
        except Unavailable as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, ended


def test_the_deadline_of_an_answer_begins_when_the_request_is_sent() -> None:
    ours, daemon = socket.socketpair()
    clock = SteppedClock()
    link = SocketLink(Connection(ours, clock, 10.0))
    with daemon, ours:
        with link.lock:  # another thread waits for an answer nearly as long as it may
            thread, ended = asked(link)
            clock.now = 9.0
        assert daemon.recv(1000)
        clock.now = 18.0
        time.sleep(0.01)  # several looks
        assert not ended and not link.connection.broken
        daemon.send(wire.encode(wire.Done(1)))
        thread.join()
    assert ended == [wire.Done(1)]


def test_requests_of_other_threads_are_sent_while_a_thread_waits(
    pair: tuple[Connection, socket.socket],
) -> None:
    connection, daemon = pair
    link = SocketLink(connection)
    thread, ended = asked(link)
    daemon.recv(1000)
    # As `tell` leaves a request that finds the lock held.
    frame = wire.encode(wire.Cancel(0, 9))
    link._deferred.append((0, bytearray(frame)))
    daemon.settimeout(10)
    assert daemon.recv(1000) == frame
    daemon.send(wire.encode(wire.Done(1)))
    thread.join()
    assert ended == [wire.Done(1)]


@pytest.mark.parametrize("where", ["receiving", "waiting"])
def test_an_interrupt_ends_the_connection(
    pair: tuple[Connection, socket.socket], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, daemon = pair
    link = SocketLink(connection)

    def interrupted(*_: object) -> object:
        raise KeyboardInterrupt

    if where == "receiving":
        daemon.send(wire.encode(wire.Done(1)))
        monkeypatch.setattr(
            connection, "_framer", type("Framer", (), {"push_and_take": interrupted})()
        )
    else:
        readable = type("Readable", (), {"poll": interrupted})()
        monkeypatch.setattr(
            "kvtier.link.begin_delayed", lambda *given: begin_delayed(*given) and readable
        )
    with pytest.raises(KeyboardInterrupt):
        ask_delayed(link, lambda id_: wire.Cancel(id_, 1), wire.Done, lambda *_: None)
    assert "interrupted" in connection.broken and connection.is_lost
