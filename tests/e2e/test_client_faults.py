"""Faults around a client: forks, interrupts, a close in another thread, mappings that fail."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvtier.arena
import kvtier.link
from kvtier import Client, Match, Refused, Unavailable
from kvtier.arena import Arena
from support.daemons import Daemon
from support.specs import pattern, spec_of

TOKENS = list(range(16 * 8))


def filled(space: Any, keys: Any) -> None:
    space.save(keys, [pattern(key, space.spec.block_bytes) for key in keys])


def in_a_child(work: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether `work` returns True in a forked child, within this time."""
    child = os.fork()
    if child == 0:
        good = False
        try:
            good = work()
        finally:
            os._exit(0 if good else 1)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def test_a_begun_request_is_sent_although_the_one_before_it_is_refused(
    shared_daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shared_daemon.connect() as client:
        space, unknown = client.open(spec_of("begun")), client.open(spec_of("begun"))
        keys = space.keys(TOKENS)
        filled(space, keys)
        unknown.index = 77_777
        tickets: list[int] = []
        wait = client.link.connection.wait

        def slow_wait(request_id: int) -> Any:
            thread = threading.Thread(target=lambda: tickets.append(space.begin_match(keys)))
            thread.start()
            thread.join(60)
            return wait(request_id)

        monkeypatch.setattr(client.link.connection, "wait", slow_wait)
        with pytest.raises(Refused):
            unknown.match(keys)
        assert select.select([client.fileno()], [], [], 5)[0], "sent without another call"
        answer = client.poll()[tickets[0]]
        assert isinstance(answer, Match) and answer.ready == len(keys)


def test_a_close_between_an_answer_and_its_lease_leaves_the_slots_readable(
    shared_daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = shared_daemon.connect()
    space = client.open(spec_of("closed"))
    keys = space.keys(TOKENS)
    filled(space, keys)
    wait = client.link.connection.wait

    def then_close(request_id: int) -> Any:
        reply = wait(request_id)
        client.close()
        return reply

    monkeypatch.setattr(client.link.connection, "wait", then_close)
    lease = space.lease(keys)
    part = lease.part(0, 0)
    assert lease.fresh(part) == len(keys)
    shown = lease.views(part, space.spec.block_bytes)
    assert [bytes(view) for view in shown] == [pattern(k, space.spec.block_bytes) for k in keys]
    lease.release()


def test_a_close_between_a_grant_and_its_copy_fails_the_save(
    daemon_of: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = daemon_of()
    client = daemon.connect()
    space = client.open(spec_of("closed save"))
    keys = space.keys(TOKENS)
    wait = client.link.connection.wait

    def then_close(request_id: int) -> Any:
        reply = wait(request_id)
        client.close()
        return reply

    monkeypatch.setattr(client.link.connection, "wait", then_close)
    with pytest.raises(Unavailable, match="closed"):
        space.save(keys, bytes(len(keys) * space.spec.block_bytes))
    daemon.connect().close()
    daemon.wait_for(lambda stats: stats["tiers"]["warm"]["states"]["quarantined"] == 0)
    assert daemon.stats()["tiers"]["warm"]["blocks"] == 0


@pytest.mark.parametrize("error", [OSError("no"), ValueError("no"), MemoryError("no")])
def test_an_extent_that_can_not_be_mapped_makes_the_daemon_unavailable(
    shared_daemon: Daemon, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(kvtier.arena, "Mapping", fail)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Unavailable, match="map an extent: no"):
        shared_daemon.connect().stats()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_sources_of_the_wrong_size_are_refused_even_if_all_blocks_are_stored(
    shared_daemon: Daemon,
) -> None:
    with shared_daemon.connect() as client:
        space = client.open(spec_of("sized"))
        keys = space.keys(TOKENS)
        filled(space, keys)
        short = np.zeros(space.spec.block_bytes - 1, np.uint8)
        whole = np.zeros(8 * space.spec.block_bytes + 1, np.uint8)
        for wrong in ([short] * 8, [memoryview(short)] * 8, whole, memoryview(whole), [whole] * 7):
            with pytest.raises(ValueError, match="not"):
                space.save(keys, wrong)


class OnlyDlpack:
    """A tensor without the buffer protocol, like those of torch."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


@pytest.mark.parametrize("kind", [OnlyDlpack, memoryview, list])
def test_one_source_for_all_blocks_may_contain_stored_blocks(
    shared_daemon: Daemon, kind: Any
) -> None:
    spec = spec_of(f"some here {kind.__name__}")
    with shared_daemon.connect() as client:
        space = client.open(spec)
        keys = space.keys(TOKENS)
        space.forget(keys)
        with space.reserve(keys[:2]) as saving:
            for key, slot in saving.items():
                slot[:] = pattern(key, spec.block_bytes)
        arrays = np.frombuffer(b"".join(pattern(k, spec.block_bytes) for k in keys), np.uint8)
        rows = arrays.copy().reshape(8, -1)
        saved = space.save(keys, kind(rows))
        assert (saved.stored, saved.present) == (6, 2)
        into = np.zeros_like(rows)
        assert space.load_into(keys, list(into) if kind is list else kind(into)) == 8
        assert np.array_equal(into, rows)


def test_a_shard_that_no_group_has_is_refused_without_a_lease(
    shared_daemon: Daemon,
) -> None:
    with shared_daemon.connect() as client:
        space = client.open(spec_of("shards"))
        keys = space.keys(TOKENS)
        filled(space, keys)
        held = client.stats()["tenants"]["default"]["leases"]
        for call in (space.lease, space.begin_lease):
            with pytest.raises(ValueError, match="no shard 7"):
                call(keys, shards=[7])
        assert client.stats()["tenants"]["default"]["leases"] == held


class Interrupted:
    """A socket on which the next call of this name is interrupted after its effect."""

    def __init__(self, sock: Any, name: str) -> None:
        self._sock, self._name = sock, name

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._sock, name)
        if name != self._name:
            return method

        def call(*args: Any) -> None:
            method(*args)
            raise KeyboardInterrupt

        return call


@pytest.mark.parametrize("name", ["send", "recvmsg_into"])
def test_after_an_interrupt_begun_requests_are_sent_again_over_another_connection(
    shared_daemon: Daemon, name: str
) -> None:
    client = shared_daemon.connect()
    space = client.open(spec_of("interrupts"))
    keys = space.keys(TOKENS)
    tickets = set()
    if name != "send":
        tickets.add(space.begin_match(keys))
        assert select.select([client.fileno()], [], [], 5)[0]
    connection: Any = client.link.connection
    connection._sock = Interrupted(connection._sock, name)
    with pytest.raises(KeyboardInterrupt):
        space.begin_match(keys) if name == "send" else client.poll()
    client.ping()
    assert client.link.connection is not connection
    tickets.add(space.begin_match(keys))
    found = dict[int, Any]()
    while len(found) < len(tickets):
        assert select.select([client.fileno()], [], [], 20)[0]
        found |= client.poll()
    assert found.keys() == tickets  # without that of the call that was interrupted
    client.close()


def test_a_large_begun_request_may_wait_alone(daemon_of: Callable[..., Daemon]) -> None:
    daemon = daemon_of()
    with daemon.connect() as client:
        space = client.open(spec_of("large", block_tokens=1))
        keys = space.keys(list(range(65_536)))
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            ticket = space.begin_match(keys)
            assert client.poll() == {}
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + 60
        while not (found := client.poll()) and time.monotonic() < deadline:
            time.sleep(0.005)
        answer = found[ticket]
        assert isinstance(answer, Match) and answer.ready == 0 and not answer.refused


def test_a_save_reports_its_first_error(daemon_of: Callable[..., Daemon]) -> None:
    daemon = daemon_of()
    client = daemon.connect()
    space = client.open(spec_of("first"))
    with pytest.raises(ZeroDivisionError), space.reserve(space.keys(TOKENS)):
        daemon.process.kill()
        daemon.process.wait()
        raise ZeroDivisionError
    client.close()


def test_a_forked_child_does_not_end_its_parents_save(shared_daemon: Daemon) -> None:
    spec = spec_of("forked")
    with shared_daemon.connect() as client:
        space = client.open(spec)
        keys = space.keys(TOKENS)
        space.forget(keys)
        with space.reserve(keys) as saving:
            for key, slot in saving.items():
                slot[:] = pattern(key, spec.block_bytes)

            def leave() -> bool:
                with pytest.raises(Unavailable, match="fork"):
                    saving.__exit__(None, None, None)
                with pytest.raises(Unavailable, match="fork"), space.reserve(keys):
                    pass
                client.close()
                return True

            assert in_a_child(leave)
            with shared_daemon.connect() as other:
                assert other.open(spec).match(keys).ready == 0, "the child committed nothing"
        assert space.match(keys).ready == len(keys)


def test_a_child_forked_while_a_client_closes_can_connect(shared_daemon: Daemon) -> None:
    kvtier.link._ended_tokens["somewhere"] = [b"its parent's"]
    locked, done = threading.Event(), threading.Event()

    def hold() -> None:
        with kvtier.link._ended_lock:
            locked.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    locked.wait()

    def connect() -> bool:
        with Client.connect(shared_daemon.socket, populate=False) as client:
            client.ping()
        return not kvtier.link._ended_tokens.get("somewhere")

    try:
        assert in_a_child(connect)
    finally:
        done.set()
        thread.join()
        del kvtier.link._ended_tokens["somewhere"]


def test_a_closed_arena_stops_populating(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvtier.arena, "_populate", lambda queue: None)
    arena = Arena(read_only=True, populate=True)
    queue = arena._unpopulated
    assert queue is not None
    path = tmp_path / "extent"
    path.write_bytes(bytes(8192))
    for index in range(3):
        arena.add(index, 8192, *(os.open(path, os.O_RDONLY) for _ in range(2)))
    arena.close()
    assert queue.get_nowait() is None and queue.empty()


SIGNALLED = """
import signal, sys
from kvtier import Client, Unavailable
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
try:
    Client.connect(sys.argv[1], timeout_s=0.5)
except Unavailable as error:
    print(error)
"""


def test_a_request_ends_at_its_time_limit_even_if_signals_arrive_all_the_time(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()  # and never answers
        done = subprocess.run(
            [sys.executable, "-c", SIGNALLED, path], capture_output=True, text=True, timeout=20
        )
    assert done.stdout == "the daemon did not answer within 0.5 s\n", done.stderr
