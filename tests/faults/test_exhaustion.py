"""One client, honest or not, can't take the daemon from the others."""

from __future__ import annotations

import errno
import itertools
import os
import socket
import time
from collections.abc import Callable

import pytest

from daemons import Daemon
from faults.raw import Raw
from kvtier import Group, KvSpec, Refused, Unavailable, wire
from kvtier_daemon.peer import Peer
from kvtier_daemon.server import LIMIT_GHOSTS
from specs import pattern, spec_of


def works(daemon: Daemon) -> None:
    """Another client can save and load."""
    spec = spec_of("bystander")
    with daemon.connect() as client:
        space = client.open(spec)
        keys = space.keys(list(range(64)))
        space.save(keys, [pattern(key, spec.block_bytes) for key in keys])
        with space.load(keys) as blocks:
            assert [bytes(b) for b in blocks] == [pattern(k, spec.block_bytes) for k in keys]


def test_connections_lost_with_slots_are_counted_as_the_clients_they_were(
    daemon_of: Callable[..., Daemon],
) -> None:
    daemon = daemon_of(warm="16MiB")
    files = daemon.open_files()
    turned_away = False
    for number in range(LIMIT_GHOSTS + 5):
        try:
            raw = Raw(daemon)
        except (AssertionError, BrokenPipeError):
            turned_away = True
            break
        opened = raw.ask(wire.Open(2, spec_of("ghost")))
        assert isinstance(opened, wire.Opened)
        raw.ask(wire.Reserve(3, opened.space, 0, 0, b"", number.to_bytes(32, "little")))
        raw.sock.close()
        time.sleep(0.01)
    assert turned_away, "this process had its share"
    assert daemon.open_files() <= files + 2 * LIMIT_GHOSTS
    child = os.fork()
    if child == 0:
        try:
            works(daemon)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0, "another process has its own"


def test_a_peer_that_can_not_be_watched_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of descriptors is not "the process has ended": its slots would be reused under it."""

    class NoDescriptors(socket.socket):
        def getsockopt(self, level: int, option: int, size: int = 0) -> bytes:  # type: ignore[override]
            if option == 77:
                raise OSError(errno.EMFILE, "Too many open files")
            return super().getsockopt(level, option, size)

    ours, theirs = socket.socketpair()
    with ours, theirs, NoDescriptors(fileno=os.dup(ours.fileno())) as watched:
        with pytest.raises(OSError, match="Too many"):
            Peer.of(watched)
        peer = Peer.of(ours)
        assert not peer.gone
        assert (peer.pid, peer.uid) == (os.getpid(), os.getuid())
        peer.close()


def test_clients_that_take_nothing_hold_up_nobody(daemon_of: Callable[..., Daemon]) -> None:
    config = 'max_clients = 128\n[warm]\nsize = "64MiB"\nextent = "1MiB"'
    daemon = daemon_of(config=config)
    lazy = []
    for _ in range(60):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(daemon.socket)
        sock.sendall(wire.encode(wire.Hello(1, wire.SCHEMA, "lazy")))
        lazy.append(sock)
    works(daemon)
    for sock in lazy:
        sock.close()
    works(daemon)


def test_a_full_house_is_said(daemon_of: Callable[..., Daemon]) -> None:
    daemon = daemon_of(config='max_clients = 4\n[warm]\nsize = "64MiB"')
    clients = [daemon.connect() for _ in range(4)]
    with pytest.raises((Unavailable, Refused), match="clients"):
        daemon.connect()
    for client in clients:
        client.close()
    works(daemon)


def test_a_burst_of_one_client_does_not_come_before_anothers_request(shared_daemon: Daemon) -> None:
    groups = [
        Group(kind="window", layers=1, kv_heads=1, head_dim=64, window_tokens=16, shards=16)
    ] * 64
    spec = KvSpec.groups(groups, model="wide", dtype="bfloat16", block_tokens=16, weights="r")
    raw = Raw(shared_daemon)
    opened = raw.ask(wire.Open(2, spec))
    assert isinstance(opened, wire.Opened)
    key = os.urandom(32)
    for group, shard in itertools.product(range(64), range(16)):
        saved = raw.ask(wire.Reserve(3, opened.space, group, shard, b"", key))
        assert isinstance(saved, wire.Reserved)
        raw.ask(wire.Commit(4, saved.lease, 0, 1))
    with shared_daemon.connect() as other:
        many = wire.encode(wire.Match(5, opened.space, key * 1024))  # a million blocks to look at
        raw.sock.setblocking(False)
        sent = 0
        for _ in range(200):
            try:
                sent += raw.sock.send(many)
            except BlockingIOError:
                break
        started = time.perf_counter()
        other.ping()
        ours = time.perf_counter() - started
        raw.sock.settimeout(60)
        raw.sock.sendall(many[sent % len(many) :] if sent % len(many) else b"")
        raw.sock.sendall(wire.encode(wire.Ping(9)))
        while (answer := raw.answer()) != wire.Done(9):
            assert isinstance(answer, wire.Matched) and answer.ready == 1024
        theirs = time.perf_counter() - started
    raw.sock.close()
    assert ours < theirs / 2, "the other's ping was answered while the burst was being served"


def test_keys_times_places_have_a_limit(shared_daemon: Daemon) -> None:
    groups = [
        Group(kind="window", layers=1, kv_heads=1, head_dim=64, window_tokens=16, shards=16)
    ] * 64
    spec = KvSpec.groups(groups, model="wide", dtype="bfloat16", block_tokens=16, weights="r")
    raw = Raw(shared_daemon)
    opened = raw.ask(wire.Open(2, spec))
    assert isinstance(opened, wire.Opened)
    assert raw.refusal(wire.Hint(3, opened.space, os.urandom(32 * 1025), 0.5)) == "bad_request"
    raw.sock.close()
