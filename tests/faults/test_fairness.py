"""The load of one tenant and the latency of another: counted in requests and bytes, on a simulated clock."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvtier import wire
from kvtier.units import MIB
from kvtier_daemon.catalog import Catalog
from kvtier_daemon.catalog.policy import make
from kvtier_daemon.config.members import Role
from kvtier_daemon.serving.context import Handler
from kvtier_daemon.serving.peer import Peer
from kvtier_daemon.serving.recorder import Recorder
from kvtier_daemon.serving.server import Server
from kvtier_daemon.serving.session import HALF_S, RECEIVE_FIRST_BYTES, Session
from kvtier_daemon.serving.turns import RECEIVING_BYTES, TURN_S
from kvtier_daemon.tenant import Tenant
from kvtier_kernels import Store
from support.daemons import Daemon
from support.raw import Raw

HELLO = wire.encode(wire.Hello(1, wire.SCHEMA, "raw"))


@dataclass
class Site:
    """A server in this process with tenants "attacker" and "victim". Each request of the attacker
    advances the clock by `cost_s`; otherwise the clock stands still."""

    path: str
    server: Server
    tenants: dict[str, Tenant]
    now: list[float]
    cost_s: float = 0.0
    served: dict[str, int] = field(default_factory=lambda: {"attacker": 0, "victim": 0})
    served_at: dict[str, float] = field(default_factory=dict)
    costly: tuple[str, ...] = ("attacker",)
    joining: str = "attacker"
    sockets: list[socket.socket] = field(default_factory=list)

    async def join(self, tenant: str) -> socket.socket:
        self.joining = tenant
        sock = socket.socket(socket.AF_UNIX)
        self.sockets.append(sock)
        sock.connect(self.path)
        sock.sendall(HELLO)
        sock.setblocking(False)
        assert isinstance(await self.answer(sock), wire.Welcome)
        return sock

    async def answer(self, sock: socket.socket) -> wire.Reply:
        """The next reply."""
        async with asyncio.timeout(60):
            data = await asyncio.get_running_loop().sock_recv(sock, 1 << 16)
        return wire.decode_reply(next(iter(wire.Framer().feed(data))))


@asynccontextmanager
async def site(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    loop, now = asyncio.get_running_loop(), [1000.0]
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "s"))
    listener.listen(128)
    listener.setblocking(False)
    tenants = {
        name: Tenant(name, bytes(32), 0, Catalog(Store(), make("lru")))
        for name in ("attacker", "victim")
    }
    server = Server(
        loop, listener, lambda peer: (tenants[here.joining], Role.ADMIN), tenants, lambda tenant: {}, 512,
        Recorder(folder, loop.time), clock=lambda: now[0],
    )  # fmt: skip
    here = Site(str(folder / "s"), server, tenants, now)
    serve = Session._serve

    def slow(self: Session, request: wire.Request, handler: Handler) -> None:
        tenant = self.tenant
        assert tenant is not None
        here.served[tenant.name] += 1
        here.served_at[tenant.name] = now[0]
        if tenant.name in here.costly:
            now[0] += here.cost_s
        if isinstance(request, wire.Stats):
            self.send(wire.Listed(request.id, 0, bytes(MIB)))
        else:
            serve(self, request, handler)

    monkeypatch.setattr(Session, "_serve", slow)
    monkeypatch.setattr(Peer, "privileged", False)
    try:
        async with asyncio.timeout(60):
            yield here
    finally:
        for sock in here.sockets:
            sock.close()
        server.close("done")
        listener.close()


@pytest.mark.parametrize("cost_s", [TURN_S / 10, TURN_S * 1.1, TURN_S * 30])
def test_many_connections_of_a_tenant_get_one_turn_of_each_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cost_s: float
) -> None:
    async def run() -> None:
        async with site(tmp_path, monkeypatch) as here:
            flood = [await here.join("attacker") for _ in range(60)]
            victim = await here.join("victim")
            here.cost_s = cost_s
            for sock in flood:
                sock.sendall(wire.encode(wire.Ping(7)) * 50)
            waits, rounds, began = [], here.server.turns.rounds, here.now[0]
            while here.served["attacker"] < 40:  # noqa: ASYNC110 - until they all wait
                await asyncio.sleep(0)
            for number in range(20):
                before = here.now[0]
                victim.sendall(wire.encode(wire.Ping(number + 1)))
                assert await here.answer(victim) == wire.Done(number + 1)
                waits.append(here.served_at["victim"] - before)
            # One turn of the attacker in the iteration in which the request is sent, and one in the
            # next.
            assert max(waits) < 2 * (TURN_S + cost_s) + 1e-9, waits
            assert here.served["attacker"] < 60 * 50, "it was under load to the end"
            rounds = here.server.turns.rounds - rounds
            assert here.now[0] - began < rounds * TURN_S + 2 * (TURN_S + cost_s), "debts are paid"
            while here.served["attacker"] < 60 * 50:  # noqa: ASYNC110
                await asyncio.sleep(0)

    asyncio.run(run())


@pytest.mark.parametrize("cost_s", [TURN_S / 10, TURN_S * 3])
def test_busy_tenants_are_served_in_proportion_to_their_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cost_s: float
) -> None:
    async def run() -> None:
        async with site(tmp_path, monkeypatch) as here:
            here.costly = ("attacker", "victim")
            here.server.turns.weigh({"attacker": 1, "victim": 4})
            shares = here.server.turns.shares
            assert shares["victim"].turn_s == TURN_S, "no turn is longer than without weights"
            assert shares["victim"].receiving_most == RECEIVING_BYTES * 4 // 6
            flood = [await here.join(tenant) for tenant in here.served for _ in range(20)]
            here.cost_s, before = cost_s, dict(here.served)
            for sock in flood:
                sock.sendall(wire.encode(wire.Ping(7)) * 100)
            while here.served["victim"] < before["victim"] + 1200:  # noqa: ASYNC110
                await asyncio.sleep(0)
            count = here.served["attacker"] - before["attacker"]
            assert 250 < count < 350, "a fourth of 1200"
            assert shares["attacker"].served_s == pytest.approx(count * cost_s, rel=0.2)

    asyncio.run(run())


def test_simultaneous_requests_of_many_connections_are_served_in_many_iterations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request each, so that none of them has waited when the request of another tenant arrives."""

    async def run() -> None:
        async with site(tmp_path, monkeypatch) as here:
            flood = [await here.join("attacker") for _ in range(60)]
            victim = await here.join("victim")
            here.cost_s = TURN_S * 1.1
            for number in range(1, 6):
                before = here.now[0]
                for sock in flood:
                    sock.sendall(wire.encode(wire.Ping(7)))
                victim.sendall(wire.encode(wire.Ping(number)))
                assert await here.answer(victim) == wire.Done(number)
                assert here.served_at["victim"] - before < 2 * (TURN_S + here.cost_s) + 1e-9
                while here.served["attacker"] < 60 * number:  # noqa: ASYNC110
                    await asyncio.sleep(0)

    asyncio.run(run())


def test_a_lone_client_is_answered_in_the_same_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with site(tmp_path, monkeypatch) as here:
            sock = await here.join("attacker")
            here.cost_s = TURN_S / 16
            for number in range(160):
                sock.sendall(wire.encode(wire.Ping(number + 1)))
                assert await here.answer(sock) == wire.Done(number + 1)
            assert here.server.turns.rounds <= 11, "a round for each turn that it used, and no more"

    asyncio.run(run())


def test_a_session_with_an_incomplete_request_is_disconnected_and_its_memory_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only clients with a memory reservation count: a client that waits for one is not late."""

    async def run() -> None:
        async with site(tmp_path, monkeypatch) as here:
            share = here.server.share_of(here.tenants["attacker"])
            frame = wire.encode(wire.MatchPrefix(9, 0, bytes(32 * 65_536)))
            fit = RECEIVING_BYTES // 3 // (len(frame) - RECEIVE_FIRST_BYTES)
            flood = [await here.join("attacker") for _ in range(fit + 3)]
            for sock in flood:
                with suppress(BlockingIOError):
                    sock.send(frame[:100_000])
            async with asyncio.timeout(60):
                while len(share.room_for) < 3:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            assert share.receiving_bytes <= RECEIVING_BYTES // 3
            waiting = {session.id for session in share.room_for}
            victim = await here.join("victim")
            victim.sendall(wire.encode(wire.Ping(3)))
            assert await here.answer(victim) == wire.Done(3)
            here.now[0] += HALF_S + 1
            here.server.check_clients()
            assert {s.id for s in here.server.sessions if s.tenant.name == "attacker"} == waiting
            assert not share.room_for
            here.now[0] += HALF_S + 1
            here.server.check_clients()
            assert {session.tenant.name for session in here.server.sessions} == {"victim"}
            assert (share.receiving_bytes, share.unsent_bytes) == (0, 0)
            answers = [await here.answer(sock) for sock in flood]
            assert {one.code for one in answers if isinstance(one, wire.Failed)} == {"bad_frame"}
            assert len(answers) == len(flood)

    asyncio.run(run())


def test_unread_answers_of_a_tenant_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with site(tmp_path, monkeypatch) as here:
            here.server.share_of(here.tenants["attacker"]).unsent_most = 3 * MIB
            share = here.server.share_of(here.tenants["attacker"])
            flood = [await here.join("attacker") for _ in range(10)]
            for sock in flood:
                sock.sendall(wire.encode(wire.Stats(7)))
            while here.served["attacker"] + len(share.unanswered) < 10:  # noqa: ASYNC110
                await asyncio.sleep(0)
            assert 3 * MIB < share.unsent_bytes <= 4 * MIB
            victim = await here.join("victim")
            victim.sendall(wire.encode(wire.Ping(3)))
            assert await here.answer(victim) == wire.Done(3)
            framers = {sock: wire.Framer() for sock in flood}
            while framers:
                for sock, framer in list(framers.items()):
                    with suppress(BlockingIOError):
                        if list(framer.feed(sock.recv(1 << 18))):
                            del framers[sock]
                await asyncio.sleep(0)
            assert here.served["attacker"] == 10
            assert share.unsent_bytes == 0

    asyncio.run(run())


def test_sessions_that_end_with_unread_answers_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with site(tmp_path, monkeypatch) as here:
            here.server.share_of(here.tenants["attacker"]).unsent_most = MIB
            share = here.server.share_of(here.tenants["attacker"])
            flood = [await here.join("attacker") for _ in range(10)]
            for sock in flood:
                sock.sendall(wire.encode(wire.Stats(7)))
            while here.served["attacker"] + len(share.unanswered) < 10:  # noqa: ASYNC110
                await asyncio.sleep(0)
            waiting = [one for one in share.unanswered if not one.outbox.nbytes]
            assert waiting
            for session in waiting:
                session._process_gone()
            assert share.is_unread and not set(waiting) & set(share.unanswered)

    asyncio.run(run())


def test_an_incomplete_request_is_excused_while_the_daemon_does_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other sessions of its tenant do not read their answers, so no more of its request is received."""

    async def run() -> None:
        async with site(tmp_path, monkeypatch) as here:
            here.server.share_of(here.tenants["attacker"]).unsent_most = MIB
            share = here.server.share_of(here.tenants["attacker"])
            slow = await here.join("attacker")
            (session,) = here.server.sessions
            ping = wire.encode(wire.Ping(3))
            slow.sendall(ping[:3])
            while not session.inbox.half_since:  # noqa: ASYNC110
                await asyncio.sleep(0)
            for sock in [await here.join("attacker") for _ in range(3)]:
                sock.sendall(wire.encode(wire.Stats(7)))
            while not share.is_unread:  # noqa: ASYNC110
                await asyncio.sleep(0)
            slow.sendall(ping[3:4])
            while session not in share.unanswered:  # noqa: ASYNC110
                await asyncio.sleep(0)
            here.now[0] += HALF_S + 1
            here.server.check_clients()  # disconnects sessions that do not read
            slow.sendall(ping[4:])
            assert await here.answer(slow) == wire.Done(3)

    asyncio.run(run())


@pytest.mark.parametrize("hello", [True, False])
def test_a_long_request_that_carries_no_keys_is_refused_by_its_head(
    shared_daemon: Daemon, hello: bool
) -> None:
    raw = Raw(shared_daemon, hello)
    nbytes = wire.LIMIT_REQUEST_BYTES + 1 if hello else wire.LIMIT_HELLO_BYTES + 1
    raw.sock.sendall(wire.LENGTH.pack(nbytes) + b"\x93\x02")
    raw.ends_with("bad_frame")


def test_endless_requests_use_a_bounded_amount_of_memory(
    shared_daemon: Daemon,
) -> None:
    before = shared_daemon.process_bytes()
    frame = wire.LENGTH.pack(wire.LIMIT_FRAME_BYTES) + b"\x97\x03\x01\x00\xc6"
    frame += bytes(wire.LIMIT_FRAME_BYTES - 6)
    flood = [Raw(shared_daemon) for _ in range(60)]
    left = {raw.sock: memoryview(frame) for raw in flood}
    for sock in left:
        sock.setblocking(False)
    with shared_daemon.connect() as other:
        stuck = 0
        while left and stuck < 50:  # in a row: the daemon takes nothing more
            stuck += 1
            for sock, rest in list(left.items()):
                with suppress(BlockingIOError):
                    left[sock] = rest[sock.send(rest) :]
                    stuck = 0
                if not left[sock]:
                    del left[sock]
            other.ping()
        assert shared_daemon.process_bytes() < before + 64 * MIB
    for raw in flood:
        raw.sock.close()
    shared_daemon.wait_for(lambda s: s["tenants"]["default"]["sessions"] == 0)
