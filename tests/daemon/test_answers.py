"""What lookups are answered, with a disk under them: each request counts once, however often it asks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from daemon import test_forget
from daemon.test_cold import BLOCK, run
from daemon.test_forget import ONE, SLOTS
from daemon.test_planned_reads import Held, key, keys
from kvtier import planning, wire
from kvtier.errors import Refused
from kvtier.key import KEY_BYTES
from kvtier.planning import PATIENCE_S, beaten, links
from kvtier_daemon import deferring
from kvtier_daemon.answers import ANSWERS, Answers
from kvtier_daemon.observing.events import Events
from kvtier_daemon.recorder import Recorder
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers import reads

COUNT = 20
TOKENS = 16


class Client:
    """Asks, without a connection."""

    def __init__(self, folder: Path) -> None:
        self.held = Held(folder)
        self.catalog, self.mover = self.held.catalog, self.held.mover
        self.tenant = Tenant("t", bytes(32), 0, self.catalog, self.mover)
        self.uses: list[int] = []
        self.sent: list[wire.Message] = []
        loop = asyncio.get_running_loop()
        server: Any = SimpleNamespace(
            clock=loop.time,
            recorder=Recorder(folder, loop.time),
            loop=loop,
            events=Events(loop.time),
        )
        session: Any = SimpleNamespace(
            id=ONE, name="one", read_only=False, send=self.sent.append, serve_later=self.serve
        )
        self.answers = Answers(session, server)
        self.space = self.held.space.number
        use = self.catalog._use

        def used(space: Any, parts: Any, asked: bytes, count: bool) -> None:
            self.uses.append(count)
            use(space, parts, asked, count)

        self.catalog._use = used  # type: ignore[method-assign]

    def match(self, count: int = COUNT, request: int = 0) -> wire.Matched:
        reply = self.answers.to(self.tenant, wire.Match(1, self.space, keys(count), request))
        assert isinstance(reply, wire.Matched)
        return reply

    def load(self, count: int = COUNT, request: int = 0) -> wire.Loaded:
        asked = wire.Load(1, self.space, keys(count), 1000, [0], request)
        reply = self.answers.to(self.tenant, asked)
        assert isinstance(reply, wire.Loaded)
        return reply

    def serve(self, request: wire.Request) -> None:
        reply = self.answers.to(self.tenant, request)
        if reply is not None:
            self.sent.append(reply)

    def wait(self, wait_ms: int, request: int = 7, number: int = 2) -> None:
        """Ask for as much again, to be answered when it is there."""
        asked = wire.Load(
            number, self.space, keys(COUNT), 60_000, [0], request, 5000, wait_ms=wait_ms
        )
        self.serve(asked)

    def last(self) -> wire.Loaded:
        assert len(self.sent) == 1
        reply = self.sent.pop()
        assert isinstance(reply, wire.Loaded)
        return reply

    def tell(self, message: wire.Request) -> None:
        self.answers.to(self.tenant, message)

    def prefill(self, seconds: float) -> None:
        self.held.space.prefill = (seconds, 0.0) if seconds else None

    @property
    def counted(self) -> dict[str, int]:
        """In blocks: what was looked up, hit and missed."""
        hits, misses = self.catalog.hit_tokens, self.catalog.miss_tokens
        missed = {f"no: {why}": tokens for why, tokens in misses.items()}
        all_ = {"asked": self.catalog.lookup_tokens, **hits, **missed}
        return {name: tokens // TOKENS for name, tokens in all_.items() if tokens}


WRITES: tuple[Callable[[int], wire.Request], ...] = (
    lambda space: wire.Reserve(1, space, 0, 0, b"", key(COUNT)),
    lambda space: wire.Pin(1, space, key(0), 1000),
    lambda space: wire.Unpin(1, space, key(0)),
    lambda space: wire.Hint(1, space, key(0), 0.0),
    lambda space: wire.Forget(1, space, key(0)),
    lambda space: wire.Purge(1, "t", space),
)
READS = (
    wire.Open, wire.Match, wire.Load, wire.Adopt, wire.Release, wire.Prefetch, wire.Watch, wire.Stats,
    wire.Record, wire.Ping, wire.Cancel, wire.Prefill, wire.Explain, wire.Settings, wire.Tier,
    wire.Spaces, wire.List, wire.Monitor, wire.Grow,
)  # fmt: skip
OF_A_RESERVATION = (wire.Commit, wire.Abort)


def test_a_read_only_session_can_make_no_request_that_writes(tmp_path: Path) -> None:
    """Every request that there is either reads, or is tried here."""
    kinds = {type(make(0)) for make in WRITES}
    assert {*kinds, *READS, *OF_A_RESERVATION} == set(ANSWERS)

    async def work(client: Client) -> None:
        client.answers._session.read_only = True
        for make in WRITES:
            with pytest.raises(Refused) as refused:
                client.answers.to(client.tenant, make(client.space))
            assert refused.value.code == "read_only", make(client.space)
        assert client.catalog.pinned_bytes == 0
        assert client.match().coming == COUNT

    with_client(tmp_path, work)


@pytest.fixture(autouse=True)
def _few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "WINDOW_S", 0.0)
    monkeypatch.setattr(test_forget, "key", key)


def with_client(folder: Path, work: Callable[[Client], Awaitable[None]]) -> None:
    async def all_of_it() -> None:
        client = Client(folder)
        await client.held.on_disk_alone(COUNT)
        client.uses.clear()
        before = client.counted
        await work(client)
        await client.held.end()
        assert not before.keys() - client.counted.keys()

    run(all_of_it())


def since(client: Client, before: dict[str, int]) -> dict[str, int]:
    now = client.counted
    return {name: n for name in now if (n := now[name] - before.get(name, 0))}


@pytest.mark.parametrize("how", ["load", "match"])
def test_a_request_is_one_lookup_and_one_use_however_often_it_asks(
    tmp_path: Path, how: str
) -> None:
    async def work(client: Client) -> None:
        before, ask = client.counted, getattr(client, how)
        for turn in range(3):
            for request, count in ((7, COUNT), (8, 10)):  # side by side, as an engine's are
                assert ask(count, request).coming == count, turn
        assert since(client, before) == {"asked": COUNT + 10, "cold": COUNT + 10}
        await client.held.let_go()
        assert ask(COUNT, 7).ready == COUNT and ask(10, 8).ready == 10
        assert since(client, before) == {"asked": COUNT + 10, "cold": COUNT + 10}
        assert sum(client.uses) == 2
        assert ask(COUNT, 9).ready == COUNT
        ask(12, 7)
        assert sum(client.uses) == 4, "another request, and another prefix, are"
        client.tell(wire.Cancel(0, 7))
        ask(12, 7)
        assert sum(client.uses) == 5, "its number is free for another one"

    with_client(tmp_path, work)


def test_of_those_without_a_number_a_match_and_its_load_are_one(tmp_path: Path) -> None:
    async def work(client: Client) -> None:
        client.match(), client.match(), client.load()
        assert sum(client.uses) == 1
        client.load()
        assert sum(client.uses) == 2
        await client.held.let_go()
        client.match()
        assert sum(client.uses) == 2, "how far is it?"
        client.match()
        assert sum(client.uses) == 3
        client.load(request=3)
        client.load()
        assert sum(client.uses) == 4, "who has a number is nobody else"

    with_client(tmp_path, work)


def test_what_a_session_asked_for_is_remembered_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier_daemon.answers.LIMIT_ASKED", 2)

    async def work(client: Client) -> None:
        for request in (1, 2, 3):
            client.match(request=request)
        assert len(client.answers._asked) == 2
        client.match(request=3)
        assert sum(client.uses) == 3
        client.match(request=1)
        assert sum(client.uses) == 4

    with_client(tmp_path, work)


def test_a_prefetch_and_a_match_of_the_same_are_two_that_ask(tmp_path: Path) -> None:
    async def work(client: Client) -> None:
        client.tell(wire.Prefetch(1, client.space, keys(COUNT)))
        assert client.match().why == "unknown", "somebody waits"
        await client.held.turn()
        begun = len(client.held.read)
        assert begun < COUNT
        planner = client.held.reads.planner
        assert planner._urgent[client.held.bench.tier.drives[0].link] == COUNT
        client.mover.cancel((ONE, (client.space, 32 * COUNT, key(COUNT - 1))))
        assert not planner._urgent[client.held.bench.tier.drives[0].link]
        assert client.catalog.cold.reading == COUNT, "the prefetch goes on"

    with_client(tmp_path, work)


def test_who_is_to_compute_takes_nobodys_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "LIMIT_SESSION", 3)
    monkeypatch.setattr(beaten, "LIMIT_BLOCKS", 0)

    async def work(client: Client) -> None:
        client.prefill(1e-15)
        whys = [client.match(request=1 + at).why for at in range(6)]
        assert whys == ["slower"] * 6
        client.prefill(0.0)
        whys = [client.match(request=11 + at).why for at in range(4)]
        assert whys == ["unknown"] * 3 + ["too_many"]

    with_client(tmp_path, work)


def test_what_is_computed_is_a_miss_by_the_name_of_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(client: Client) -> None:
        before = client.counted
        client.prefill(1e-15)
        assert client.match(request=1).why == "slower"
        assert since(client, before) == {"asked": COUNT, "no: slower": COUNT}
        client.prefill(0.0)
        planner, now = client.held.reads.planner, [client.held.reads.planner._clock()]
        monkeypatch.setattr(planner, "_clock", lambda: now[0])
        before = client.counted
        assert client.match(request=2).coming == COUNT
        assert since(client, before) == {"asked": COUNT, "cold": COUNT}
        await client.held.turn()
        now[0] += PATIENCE_S + 0.01
        client.held.reads.tend()
        assert client.match(request=2).why == "late"
        assert since(client, before) == {"asked": COUNT, "no: late": COUNT}
        assert client.match(request=2).why == "late"
        assert since(client, before) == {"asked": COUNT, "no: late": COUNT}, "once"

    with_client(tmp_path, work)


def test_what_can_not_be_read_is_no_hit(tmp_path: Path) -> None:
    async def work(client: Client) -> None:
        before, tier = client.counted, client.held.bench.tier
        nowhere = frozenset(segment.number for segment in tier.segments)
        tier.out_of_reach = lambda: nowhere  # type: ignore[method-assign]
        reply = client.load()
        assert (reply.coming, reply.why) == (0, "not_read")
        assert since(client, before) == {"asked": COUNT, "no: not_read": COUNT}
        assert client.catalog.lookups.last(1)[0].why == "not_read"
        assert client.catalog.lookups.last(1)[0].missing == key(0)

    with_client(tmp_path, work)


def test_what_is_computed_again_and_again_is_found_in_memory(tmp_path: Path) -> None:
    async def work(client: Client) -> None:
        client.prefill(BLOCK / 1e12)
        for request in (1, 1, 1):
            assert client.load(request=request).why == "slower"
            assert client.catalog.cold.reading == 0
        assert client.load(request=2).why == "slower"
        assert client.catalog.cold.reading == COUNT
        await client.held.let_go()
        assert client.load(request=3).ready == COUNT
        assert COUNT < SLOTS

    with_client(tmp_path, work)


def test_who_waits_is_answered_when_the_last_block_is_there(tmp_path: Path) -> None:
    async def work(client: Client) -> None:
        before = client.counted
        assert client.load(request=7).coming == COUNT
        client.wait(60_000)
        client.wait(60_000, request=8)
        assert client.last().coming == COUNT, "that one asked for nothing before"
        await client.held.turn()
        assert not client.sent
        await client.held.let_go()
        await client.held.turn()
        told = client.last()
        assert (told.id, told.ready, told.coming) == (2, COUNT, 0) and told.lease
        assert since(client, before) == {"asked": 2 * COUNT, "cold": 2 * COUNT}
        client.wait(60_000)
        assert client.last().ready == COUNT, "nothing is on its way any more"

    with_client(tmp_path, work)


def test_who_waits_is_told_how_far_it_is_after_the_time_it_gave(tmp_path: Path) -> None:
    async def work(client: Client) -> None:
        client.load(request=7)
        client.wait(20)
        assert not client.sent
        for _ in range(1000):
            if client.sent:
                break
            await asyncio.sleep(0.01)
        assert client.last().coming == COUNT
        client.wait(60_000, number=3)
        client.wait(60_000, number=4)
        assert client.last().id == 3, "of one request's the last one waits"

    with_client(tmp_path, work)


@pytest.mark.parametrize("why", ["late", "off", "shut"])
def test_who_waits_for_what_will_not_come_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    async def work(client: Client) -> None:
        tier = client.held.bench.tier
        with monkeypatch.context() as none_begins:
            none_begins.setattr(reads, "READ_BLOCKS", 0)
            client.load(request=7)
            client.wait(60_000)
            await client.held.turn()
            assert not client.sent
            if why == "late":
                now = client.held.reads.planner._clock() + 2 * PATIENCE_S
                none_begins.setattr(client.held.reads.planner, "_clock", lambda: now)
                client.held.reads.tend()
            elif why == "shut":
                tier.shut()
        if why == "off":
            tier.drives[0].give_up("gone")
            client.held.reads._pump_soon(tier.drives[0])
        for _ in range(20):
            await client.held.turn()
        told = client.last()
        assert (told.id, told.ready, told.coming) == (2, 0, 0)

    with_client(tmp_path, work)


def test_who_waits_no_more_is_told_so_and_holds_nothing(tmp_path: Path) -> None:
    async def work(client: Client) -> None:
        client.load(request=7)
        client.wait(60_000)
        client.tell(wire.Cancel(0, 7))
        told = client.last()
        assert (told.id, told.ready, told.lease) == (2, 0, 0)
        await client.held.let_go()
        await client.held.turn()
        assert not client.sent and not len(client.catalog._leases)

    with_client(tmp_path, work)


def test_who_has_much_to_be_told_of_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferring, "LIMIT_BYTES", COUNT * KEY_BYTES)

    async def work(client: Client) -> None:
        for request in (7, 8):
            client.load(request=request)
        client.wait(60_000)
        client.wait(60_000, request=8, number=3)
        assert client.last().id == 3

    with_client(tmp_path, work)


def test_who_has_a_later_lease_still_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "GONE_S", -1.0)

    async def work(client: Client) -> None:
        client.load(COUNT // 2, request=6)
        await client.held.let_go()
        first, second = client.load(request=7), client.load(request=7)
        assert first.lease and second.coming
        waits = client.held.reads.planner.is_waiting
        client.tell(wire.Release(0, first.lease))
        client.held.reads.tend()
        assert waits((ONE, 7))
        client.tell(wire.Release(0, second.lease))
        client.held.reads.tend()
        assert not waits((ONE, 7))

    with_client(tmp_path, work)
