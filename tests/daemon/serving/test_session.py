"""One session in this process: the effects of an internal error, and their limits."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import select
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvtier import wire
from kvtier.errors import Refused
from kvtier_daemon.catalog import Catalog
from kvtier_daemon.catalog.blocks import DeferredPolicy
from kvtier_daemon.catalog.policy import make
from kvtier_daemon.config.members import Role
from kvtier_daemon.serving.context import Requester, others_of
from kvtier_daemon.serving.peer import Peer
from kvtier_daemon.serving.recorder import Recorder
from kvtier_daemon.serving.server import Server
from kvtier_daemon.tenant import Tenant
from kvtier_kernels import Store
from support.specs import spec_of

LONGEST_S = 60.0


def test_an_internal_error_ends_one_session_and_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def bug(*_: Any) -> None:
        raise RuntimeError("planted")

    async def run() -> None:
        loop = asyncio.get_running_loop()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        listener.setblocking(False)
        tenant = Tenant("t", bytes(32), 0, Catalog(Store(), make("lru")))
        recorder = Recorder(tmp_path, loop.time)
        server = Server(
            loop,
            listener,
            lambda peer: (tenant, Role.ADMIN),
            {"t": tenant},
            lambda tenant: {},
            8,
            recorder,
        )
        monkeypatch.setattr(Catalog, "find", bug)
        answers = [
            await loop.run_in_executor(None, talk, str(tmp_path / "s"), ask) for ask in (1, 0)
        ]
        assert isinstance(answers[0], wire.Failed)
        assert (answers[0].code, answers[0].fatal) == ("internal", True)
        assert answers[1] == wire.Done(3)
        assert server.failures["internal"] == 1
        server.close("done")
        listener.close()

    asyncio.run(run())
    assert "planted" in caplog.text, "with where it happened"


def test_leases_of_a_session_end_although_returning_its_reads_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def bug(*_: Any) -> None:
        raise RuntimeError("planted")

    async def run() -> None:
        loop = asyncio.get_running_loop()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        listener.setblocking(False)
        mover: Any = SimpleNamespace(pending=SimpleNamespace(session_ended=bug))
        tenant = Tenant("t", bytes(32), 0, Catalog(Store(), make("lru")), mover)
        recorder = Recorder(tmp_path, loop.time)
        server = Server(
            loop,
            listener,
            lambda peer: (tenant, Role.ADMIN),
            {"t": tenant},
            lambda tenant: {},
            8,
            recorder,
        )
        await loop.run_in_executor(None, talk, str(tmp_path / "s"), 0)
        async with asyncio.timeout(60):
            while server.sessions:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (len(tenant.catalog.spaces), server.ghosts) == (0, set())
        assert server.failures["internal"] == 1
        server.close("done")
        listener.close()

    asyncio.run(run())
    assert "planted" in caplog.text


class Connected:
    """A client that sent Hello and was accepted."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    async def ask(self, request: wire.Message) -> wire.Reply:
        loop, framer = asyncio.get_running_loop(), wire.Framer()
        async with asyncio.timeout(LONGEST_S):
            await loop.sock_sendall(self.sock, wire.encode(request))
            while text := await loop.sock_recv(self.sock, 1 << 16):
                for body in framer.feed(text):
                    return wire.decode_reply(body)
        raise EOFError("the daemon has hung up")


class Serving:
    """A server of these tenants, with clients that belong to them alternately."""

    def __init__(self, folder: Path, max_clients: int, *names: str) -> None:
        self.path = str(folder / "s")
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen()
        self.listener.setblocking(False)
        tenants = [Tenant(name, bytes(32), 0, Catalog(Store(), make("lru"))) for name in names]
        self.turns, loop = itertools.cycle(tenants), asyncio.get_running_loop()
        self.server = Server(
            loop, self.listener, lambda peer: (next(self.turns), Role.ADMIN),
            {one.name: one for one in tenants},
            lambda tenant: {}, max_clients, Recorder(folder, loop.time),
        )  # fmt: skip
        self.tenants, self.clients = tenants, list[Connected]()

    async def connect(self, **hello: Any) -> tuple[Connected, wire.Reply]:
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        self.clients.append(Connected(sock))
        await asyncio.get_running_loop().sock_connect(sock, self.path)
        said = wire.Hello(1, wire.SCHEMA, "test", **hello)
        return self.clients[-1], await self.clients[-1].ask(said)

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.clients:
            one.sock.close()
        self.server.close("done")
        self.listener.close()


def test_a_tenant_has_exactly_its_share_of_the_clients(tmp_path: Path) -> None:
    async def work() -> None:
        with Serving(tmp_path, 6, "t", "u") as here:
            here.turns = itertools.cycle(here.tenants[:1])
            replies = [(await here.connect())[1] for _ in range(4)]
            assert [type(reply) for reply in replies] == [wire.Welcome] * 3 + [wire.Failed]
            assert getattr(replies[3], "code", "") == "too_many"
            here.clients[0].sock.close()
            while sum(each.greeted for each in here.server.sessions) == 3:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            assert isinstance((await here.connect())[1], wire.Welcome)
            here.turns = itertools.cycle(here.tenants[1:])
            assert isinstance((await here.connect())[1], wire.Welcome)

    asyncio.run(work())


def test_a_tenant_may_have_a_limit_of_clients_of_its_own(tmp_path: Path) -> None:
    async def work() -> None:
        with Serving(tmp_path, 6, "t", "u") as here:
            for limits, t, u in (({"t": 1}, 1, 5), ({"t": 4, "u": 1}, 3, 0), ({}, 0, 1)):
                here.server.limit_clients(6, limits)
                for tenant, more in zip(here.tenants, (t, u), strict=True):
                    here.turns = itertools.cycle([tenant])
                    replies = [(await here.connect())[1] for _ in range(more + 1)]
                    welcome = [isinstance(reply, wire.Welcome) for reply in replies]
                    assert welcome == [True] * more + [False], (limits, tenant.name)
                if limits == {"t": 1}:
                    for client in here.clients:
                        client.sock.close()
                    here.clients.clear()
                    while here.server.sessions:  # noqa: ASYNC110
                        await asyncio.sleep(0.001)
                    here.turns = itertools.cycle(here.tenants)
                    for _ in range(2):
                        await here.connect()

    asyncio.run(work())


def test_a_token_ends_only_a_session_of_its_own_tenant(tmp_path: Path) -> None:
    """Otherwise slots that a session still writes would be reused."""

    async def work() -> None:
        with Serving(tmp_path, 8, "t", "u") as here:
            here.tenants[0].catalog.add_extent(1 << 20, bytearray(2048))
            writer, welcome = await here.connect()
            assert isinstance(welcome, wire.Welcome) and welcome.tenant == "t"
            opened = await writer.ask(wire.Open(2, spec_of("token")))
            assert isinstance(opened, wire.Opened)
            reserved = await writer.ask(wire.Reserve(3, opened.space, 0, 0, b"", bytes(32)))
            assert isinstance(reserved, wire.Reserved) and reserved.lease
            _, other = await here.connect(ended=[welcome.token])
            assert isinstance(other, wire.Welcome) and other.tenant == "u"
            assert await writer.ask(wire.Commit(4, reserved.lease, 0, 1)) == wire.Done(4)
            _, ours = await here.connect(ended=[welcome.token])
            assert isinstance(ours, wire.Welcome) and ours.tenant == "t"
            with pytest.raises((EOFError, BrokenPipeError)):
                await writer.ask(wire.Ping(5))

    asyncio.run(work())


WRITING: tuple[Callable[[int], wire.Request], ...] = (
    lambda space: wire.Reserve(3, space, 0, 0, b"", bytes(32)),
    lambda space: wire.Regain(3, space, 0, 0, bytes(32)),
    lambda space: wire.Pin(3, space, bytes(32), 1000),
    lambda space: wire.Unpin(3, space, bytes(32)),
    lambda space: wire.Hint(3, space, bytes(32), 0.0),
    lambda space: wire.Forget(3, space, bytes(32)),
    lambda space: wire.Purge(3, "t", space),
    lambda space: wire.HotJoin(3, "gpu", [0]),
    lambda space: wire.HotReserve(3, bytes(24), False),
)
READING = (
    wire.Open, wire.MatchPrefix, wire.Load, wire.Adopt, wire.Release, wire.Prefetch, wire.Watch, wire.Stats,
    wire.Record, wire.Ping, wire.Cancel, wire.Prefill, wire.Explain, wire.Settings, wire.Tier,
    wire.Spaces, wire.List, wire.Monitor, wire.Grow, wire.Recheck, wire.HotOffer, wire.HotGrant,
    wire.DirectRead, wire.DirectReadEnd, wire.DirectReadUsed, wire.DirectReadCodec,
    wire.Resident, wire.Locate,
)  # fmt: skip


def test_a_read_only_session_can_make_no_request_that_writes(tmp_path: Path) -> None:
    """Every request either only reads, or needs a lease of a save, or is tried here."""

    async def work() -> None:
        with Serving(tmp_path, 8, "t") as here:
            here.tenants[0].catalog.add_extent(1 << 20, bytearray(2048))
            kinds = {type(make(0)) for make in WRITING}
            for read_only in (True, False):
                client, _ = await here.connect(read_only=read_only)
                (session,) = (one for one in here.server.sessions if one.read_only == read_only)
                handlers = session.requests.handlers.keys()
                assert handlers == {*kinds, *READING, wire.Commit, wire.Abort, wire.HotEnd}
                opened = await client.ask(wire.Open(2, spec_of("read only")))
                assert isinstance(opened, wire.Opened)
                for make in WRITING:
                    reply = await client.ask(make(opened.space))
                    refused = isinstance(reply, wire.Failed) and reply.code == "read_only"
                    assert refused == read_only, make(opened.space)

    asyncio.run(work())


def talk(path: str, matches: int) -> wire.Reply:
    """Send Hello, Open, matches, and Ping. Returns the reply after Opened."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(path)
        requests: list[wire.Message] = [
            wire.Hello(1, wire.SCHEMA, "bug\nforged line"),
            wire.Open(2, spec_of("bug")),
        ]
        requests += [wire.MatchPrefix(9, 0, bytes(32))] * matches
        requests += [wire.Ping(3)]
        sock.sendall(b"".join(map(wire.encode, requests)))
        framer, replies = wire.Framer(), []
        while len(replies) < 3:
            replies += [wire.decode_reply(body) for body in framer.feed(sock.recv(1 << 16))]
    return replies[2]


def test_a_lookup_is_answered_before_its_policy_is_updated(tmp_path: Path) -> None:
    """The policy checks whether the reply has already reached the client."""
    path, answered, looked = str(tmp_path / "s"), [], threading.Event()

    counted: list[int] = []  # the answers that were there when a match was counted
    before: list[int] = []  # tokens that were counted when a match was decided

    def there() -> list[wire.Reply]:
        with contextlib.suppress(BlockingIOError):
            body = wire.Framer().feed(client.recv(4096, socket.MSG_PEEK))
            return [wire.decode_reply(one) for one in body]
        return []

    class Looking:
        def added(self, ids: bytes, names: bytes = b"", parents: bytes = b"") -> None:
            answered.extend(there())
            looked.set()

        def wanted(self, ids: bytes, names: bytes = b"") -> None:
            answered.extend(there())
            looked.set()

        def __getattr__(self, name: str) -> Any:
            return lambda *_: b""

    def ask(message: wire.Message, waits: bool = False) -> Any:
        client.setblocking(True)
        client.sendall(wire.encode(message))
        client.setblocking(False)
        if waits:
            assert looked.wait(LONGEST_S)
            looked.clear()
        select.select([client], [], [], LONGEST_S)
        (body,) = wire.Framer().feed(client.recv(1 << 16))
        return wire.decode_reply(body)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()
        listener.setblocking(False)
        policy: Any = Looking()
        uses = DeferredPolicy(policy)
        tenant = Tenant("t", bytes(32), 0, Catalog(Store(), uses), uses=uses)
        tenant.catalog.add_extent(1 << 20, bytearray(1 << 12))
        find, usage = tenant.catalog.find, tenant.catalog.usage
        count = usage.count_lookup

        def finding(*arguments: Any) -> Any:
            before.append(usage.lookup_tokens)
            return find(*arguments)

        def counting(*arguments: Any) -> None:
            counted.extend(reply.id for reply in there())
            count(*arguments)

        tenant.catalog.find, usage.count_lookup = finding, counting  # type: ignore[method-assign]
        recorder = Recorder(tmp_path, loop.time)
        server = Server(
            loop,
            listener,
            lambda peer: (tenant, Role.ADMIN),
            {"t": tenant},
            lambda tenant: {},
            8,
            recorder,
        )
        await loop.run_in_executor(None, talk_of_a_match)
        server.close("done")
        listener.close()

    def talk_of_a_match() -> None:
        client.connect(path)
        ask(wire.Hello(1, wire.SCHEMA, "asks"))
        space = ask(wire.Open(2, spec_of("m"))).space
        key = bytes(range(32))
        lease = ask(wire.Reserve(3, space, 0, 0, b"", key)).lease
        ask(wire.Commit(4, lease, 0, 1, b""), waits=True)
        assert ask(wire.MatchPrefix(5, space, key), waits=True).ready == 1
        assert (counted, before) == ([5], [0])
        client.setblocking(True)
        client.sendall(b"".join(wire.encode(wire.MatchPrefix(n, space, key)) for n in (6, 7)))
        client.setblocking(False)
        while len(there()) < 2:
            select.select([client], [], [], 0.01)
        assert before == [0, *(n * spec_of("m").block_tokens for n in (1, 2))]

    with socket.socket(socket.AF_UNIX) as client:
        asyncio.run(asyncio.wait_for(run(), LONGEST_S))
    assert [reply.id for reply in answered][:2] == [4, 5]


def test_keys_under_another_secret_count_only_for_users_who_may_write() -> None:
    tenant = Tenant("t", bytes(32), 0, Catalog(Store(), make("lru")), accepted=(b"a" * 32,))
    keys, others = bytes(64), bytes([1]) * 64

    def chains(role: Role, others: bytes = others, blocks: int = 2) -> list[bytes]:
        request = wire.MatchPrefix(1, 0, keys, others=others, other_blocks=blocks)
        session = SimpleNamespace(peer=Peer(1, 1, -1, tenant, role))
        return others_of(tenant, request, cast(Requester, session))

    assert chains(Role.WRITE) == [others]
    assert chains(Role.READ) == []
    assert chains(Role.WRITE, b"", 0) == []
    assert chains(Role.WRITE, others + others) == [], "of an earlier start: two secrets"
    assert chains(Role.WRITE, others[:32], 1) == [others[:32]]
    for wrong in (
        (others, 3),
        (others, -1),
        (others, 0),
        (others[:33], 1),
        (bytes(32 * 20_000), 2),
    ):
        with pytest.raises(Refused, match="other keys"):
            chains(Role.WRITE, *wrong)
