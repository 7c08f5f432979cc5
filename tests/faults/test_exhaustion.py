"""A single client, hostile or not, cannot make the daemon unusable for the others."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier import Group, KvSpec, Refused, Unavailable, wire
from kvtier.units import MIB
from kvtier_daemon.catalog import Catalog
from kvtier_daemon.catalog.policy import make
from kvtier_daemon.config.members import Role
from kvtier_daemon.serving.peer import Peer
from kvtier_daemon.serving.recorder import Recorder
from kvtier_daemon.serving.server import LIMIT_GHOSTS, Server
from kvtier_daemon.tenant import Tenant
from kvtier_kernels import Store
from support.daemons import Daemon
from support.raw import Raw
from support.specs import pattern, spec_of


def works(daemon: Daemon) -> None:
    """Another client can save and load."""
    spec = spec_of("bystander")
    with daemon.connect() as client:
        space = client.open(spec)
        keys = space.keys(list(range(64)))
        space.save(keys, [pattern(key, spec.block_bytes) for key in keys])
        with space.load(keys) as blocks:
            assert [bytes(b) for b in blocks] == [pattern(k, spec.block_bytes) for k in keys]


def test_lost_connections_with_slots_count_as_clients(
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


def test_every_possible_uid_is_accepted() -> None:
    class HighUid(socket.socket):
        def getsockopt(self, level: int, option: int, size: int = 0) -> bytes:  # type: ignore[override]
            if option == socket.SO_PEERCRED:
                return struct.pack("iII", os.getpid(), 4_294_967_290, 0)
            return super().getsockopt(level, option, size)

    ours, theirs = socket.socketpair()
    with ours, theirs, HighUid(fileno=os.dup(ours.fileno())) as high:
        peer = Peer.of(high)
        assert peer.uid == 4_294_967_290
        peer.close()


def test_the_end_of_a_client_before_hello_is_detected_although_another_process_has_its_socket(
    daemon_of: Callable[..., Daemon],
) -> None:
    daemon = daemon_of(warm="16MiB")
    files = daemon.open_files()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(daemon.socket)
        os.close(write)
        if os.fork() == 0:
            os.read(read, 1)  # keeps the socket open until the test ends
        os._exit(0)
    os.waitpid(child, 0)
    daemon.wait_for_open_files(files, 5)
    os.close(write)
    os.close(read)


def broken(daemon: Daemon) -> bytes:
    """The token of a client that ended with a slot in use."""
    raw = Raw(daemon, hello=False)
    raw.send(wire.Hello(1, wire.SCHEMA, "broken"))
    welcome = raw.answer()
    assert isinstance(welcome, wire.Welcome), welcome
    opened = raw.ask(wire.Open(2, spec_of("broken")))
    assert isinstance(opened, wire.Opened)
    granted = raw.ask(wire.Reserve(3, opened.space, 0, 0, b"", os.urandom(32)))
    assert isinstance(granted, wire.Reserved) and granted.slots
    raw.sock.close()
    return welcome.token


@pytest.mark.parametrize("clients, config", [(2, "max_clients = 2\n"), (LIMIT_GHOSTS, "")])
def test_a_full_daemon_accepts_a_client_that_replaces_its_own_session(
    daemon_of: Callable[..., Daemon], clients: int, config: str
) -> None:
    daemon = daemon_of(config=config + '[warm]\nsize = "16MiB"')
    tokens = [broken(daemon) for _ in range(clients)]
    for ended, welcome in (([], False), ([b"guess" * 3], False), (tokens, True)):
        raw = Raw(daemon, hello=False)
        raw.send(wire.Hello(1, wire.SCHEMA, "again", False, ended))
        assert isinstance(raw.answer(), wire.Welcome) == welcome
        raw.sock.close()
    assert daemon.stats()["tiers"]["warm"]["states"]["quarantined"] == 0


def test_processes_of_another_pid_namespace_are_distinguished(tmp_path: Path) -> None:
    async def run() -> None:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        tenant = Tenant("t", bytes(32), 0, Catalog(Store(), make("lru")))
        server = Server(
            asyncio.get_running_loop(),
            listener,
            lambda peer: (tenant, Role.ADMIN),
            {"t": tenant},
            lambda tenant: {},
            64,
            Recorder(tmp_path, time.monotonic),
        )
        for pid, refused in ((0, False), (7, True)):
            ghosts = [
                SimpleNamespace(peer=Peer(pid, 0, -1), tenant=tenant) for _ in range(LIMIT_GHOSTS)
            ]
            server.ghosts = ghosts  # type: ignore[assignment]
            assert bool(server.refusal(Peer(pid, 0, -1, tenant), b"")) == refused
        server.ghosts = set()
        server.close("done")
        listener.close()

    asyncio.run(run())


def test_clients_that_read_nothing_use_no_descriptors(daemon_of: Callable[..., Daemon]) -> None:
    daemon = daemon_of(config='[warm]\nsize = "64MiB"\nextent = "256KiB"')
    before = daemon.open_files()
    lazy = []
    for _ in range(24):
        raw = Raw(daemon, hello=False)
        raw.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        raw.send(wire.Hello(1, wire.SCHEMA, "lazy"))
        lazy.append(raw)
    daemon.wait_for(lambda stats: stats["connections"] >= 24)
    daemon.wait_for_open_files(before + 2 * 24)  # a socket and a pidfd each
    works(daemon)
    for raw in lazy:
        raw.sock.close()


def test_an_idle_client_is_sent_nothing_while_the_arena_grows(
    daemon_of: Callable[..., Daemon],
) -> None:
    """The client would not read the message, and must not be regarded as hung."""
    daemon = daemon_of(config='[warm]\nsize = "512MiB"\nextent = "16MiB"', wait=False)
    with daemon.connect() as client:
        mapped = client.link.arena.nbytes
        assert mapped < 512 * MIB
        while select.select([client.fileno()], [], [], 0)[0]:
            client.poll()
        daemon.wait_for_arena()
        assert not select.select([client.fileno()], [], [], 0.1)[0]
        client.ping()
        assert client.link.arena.nbytes == 512 * MIB


def test_a_peer_that_can_not_be_watched_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lack of descriptors does not mean "the process has ended": its slots would be reused while it
    writes."""

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


def test_clients_that_do_not_read_delay_no_other_client(daemon_of: Callable[..., Daemon]) -> None:
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


def test_a_full_daemon_reports_it(daemon_of: Callable[..., Daemon]) -> None:
    daemon = daemon_of(config='max_clients = 4\n[warm]\nsize = "64MiB"')
    clients = [daemon.connect() for _ in range(4)]
    with pytest.raises((Unavailable, Refused), match="clients"):
        daemon.connect()
    for client in clients:
        client.close()
    works(daemon)


def test_a_burst_of_one_client_does_not_delay_anothers_request(shared_daemon: Daemon) -> None:
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
    many = wire.encode(wire.MatchPrefix(5, opened.space, key * 1024))  # a million blocks to check
    with shared_daemon.connect() as other:

        def ping_within_a_burst() -> float:
            """The time of the other's ping, relative to that of the burst."""
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
            return ours / (time.perf_counter() - started)

        # This process may be paused after the answer has arrived.
        assert any(ping_within_a_burst() < 0.5 for _ in range(5)), "it waits for the burst"
    raw.sock.close()


def test_the_number_of_keys_times_groups_and_shards_is_limited(shared_daemon: Daemon) -> None:
    groups = [
        Group(kind="window", layers=1, kv_heads=1, head_dim=64, window_tokens=16, shards=16)
    ] * 64
    spec = KvSpec.groups(groups, model="wide", dtype="bfloat16", block_tokens=16, weights="r")
    raw = Raw(shared_daemon)
    opened = raw.ask(wire.Open(2, spec))
    assert isinstance(opened, wire.Opened)
    assert raw.refusal(wire.Hint(3, opened.space, os.urandom(32 * 1025), 0.5)) == "bad_request"
    raw.sock.close()
