"""Replies to lookups with a disk: each request counts once, even if it is repeated."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from daemon.serving.test_planned_reads import Held, key, keys
from daemon.tiers import test_forget
from daemon.tiers.test_forget import ONE, SLOTS
from kvtier import wire
from kvtier.key import KEY_BYTES
from kvtier_daemon.catalog.holds import HOLD_S
from kvtier_daemon.observing.events import EventFeed
from kvtier_daemon.observing.histogram import Latencies
from kvtier_daemon.planning import PATIENCE_S, planner, read_order, recomputed
from kvtier_daemon.planning.recomputed import TRIAL_BLOCKS
from kvtier_daemon.serving import deferred_answers
from kvtier_daemon.serving.recorder import Recorder
from kvtier_daemon.serving.requests import Requests
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.cold import attached, read_queue
from support.cold_bench import BLOCK, run

COUNT = 20
TOKENS = 16


class Client:
    """Sends requests without a connection."""

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
            events=EventFeed(loop.time),
            latencies=Latencies(),
        )
        session: Any = SimpleNamespace(
            id=ONE, name="one", verifies=False, send=self.sent.append, serve_later=self.serve
        )
        self.answers = Requests(session, server)
        self.space = self.held.space.number
        reading = self.catalog.reading
        use = reading.note_use

        def used(space: Any, parts: Any, asked: bytes, count: bool) -> None:
            self.uses.append(count)
            use(space, parts, asked, count)

        reading.note_use = used  # type: ignore[method-assign]

    def answer(self, request: wire.Request) -> wire.Reply | None:
        try:
            return self.answers.handlers[type(request)](self.tenant, request)
        finally:
            self.answers.settle()

    def match(self, count: int = COUNT, request: int = 0) -> wire.Matched:
        reply = self.answer(wire.MatchPrefix(1, self.space, keys(count), request))
        assert isinstance(reply, wire.Matched)
        return reply

    def load(self, count: int = COUNT, request: int = 0) -> wire.Loaded:
        asked = wire.Load(1, self.space, keys(count), 1000, [0], request)
        reply = self.answer(asked)
        assert isinstance(reply, wire.Loaded)
        return reply

    def serve(self, request: wire.Request) -> None:
        reply = self.answer(request)
        if reply is not None:
            self.sent.append(reply)

    def wait(self, wait_ms: int, request: int = 7, number: int = 2) -> None:
        """Repeat the request with a time limit; it is answered when the blocks are ready."""
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
        self.answer(message)

    def prefill(self, seconds: float) -> None:
        self.held.space.prefill = (seconds, 0.0) if seconds else None

    @property
    def counted(self) -> dict[str, int]:
        """In blocks: lookups, hits and misses."""
        hits, misses = self.catalog.usage.hit_tokens, self.catalog.usage.miss_tokens
        missed = {f"no: {why}": tokens for why, tokens in misses.items()}
        all_ = {"asked": self.catalog.usage.lookup_tokens, **hits, **missed}
        return {name: tokens // TOKENS for name, tokens in all_.items() if tokens}


@pytest.fixture(autouse=True)
def _few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_order, "WINDOW_S", 0.0)
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
def test_a_repeated_request_counts_as_one_lookup_and_one_use(tmp_path: Path, how: str) -> None:
    async def work(client: Client) -> None:
        before, ask = client.counted, getattr(client, how)
        for turn in range(3):
            # Concurrently, as the requests of an engine are.
            for request, count in ((7, COUNT), (8, 10)):
                assert ask(count, request).coming == count, turn
        assert since(client, before) == {"asked": COUNT + 10, "cold": COUNT + 10}
        await client.held.submit_reads()
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


def test_a_match_and_its_load_without_a_request_number_count_as_one(tmp_path: Path) -> None:
    async def work(client: Client) -> None:
        client.match(), client.match(), client.load()
        assert sum(client.uses) == 1
        client.load()
        assert sum(client.uses) == 2
        await client.held.submit_reads()
        client.match()
        assert sum(client.uses) == 2, "how far is it?"
        client.match()
        assert sum(client.uses) == 3
        client.load(request=3)
        client.load()
        assert sum(client.uses) == 4, "who has a number is nobody else"

    with_client(tmp_path, work)


def test_the_remembered_requests_of_a_session_are_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier_daemon.serving.requests.lookups.LIMIT_COUNTED", 2)

    async def work(client: Client) -> None:
        for request in (1, 2, 3):
            client.match(request=request)
        assert len(client.answers.lookups.counted.of) == 2
        client.match(request=3)
        assert sum(client.uses) == 3
        client.match(request=1)
        assert sum(client.uses) == 4

    with_client(tmp_path, work)


def test_a_prefetch_and_a_match_of_the_same_prefix_are_two_requests(tmp_path: Path) -> None:
    async def work(client: Client) -> None:
        client.tell(wire.Prefetch(1, client.space, keys(COUNT)))
        assert client.match().why == "unknown", "somebody waits"
        await client.held.turn()
        begun = len(client.held.read)
        assert begun < COUNT
        planner = client.held.reads.planner
        assert planner.order._urgent[client.held.bench.first.disk.link] == COUNT
        client.mover.pending.cancel((ONE, (client.space, 32 * COUNT, key(COUNT - 1))))
        assert not planner.order._urgent[client.held.bench.first.disk.link]
        assert client.catalog.promotions.reading == COUNT, "the prefetch goes on"

    with_client(tmp_path, work)


def test_declined_requests_do_not_count_toward_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_queue, "LIMIT_SESSION", 3)
    monkeypatch.setattr(recomputed, "LIMIT_BLOCKS", 0)

    async def work(client: Client) -> None:
        client.prefill(1e-15)
        whys = [client.match(request=1 + at).why for at in range(6)]
        assert whys == ["slower"] * 6
        client.prefill(0.0)
        whys = [client.match(request=11 + at).why for at in range(4)]
        assert whys == ["unknown"] * 3 + ["too_many"]

    with_client(tmp_path, work)


def test_declined_blocks_are_misses_with_their_reason(
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
        client.held.reads.pending.expire()
        assert client.match(request=2).why == "late"
        assert since(client, before) == {"asked": COUNT, "no: late": COUNT}
        assert client.match(request=2).why == "late"
        assert since(client, before) == {"asked": COUNT, "no: late": COUNT}, "once"

    with_client(tmp_path, work)


def test_unreadable_blocks_are_misses(tmp_path: Path) -> None:
    async def work(client: Client) -> None:
        before, tier = client.counted, client.held.bench.tier
        nowhere = frozenset(segment.number for segment in tier.table.segments)
        tier.unreadable_segments = lambda: nowhere  # type: ignore[method-assign]
        reply = client.load()
        assert (reply.coming, reply.why) == (0, "not_read")
        assert since(client, before) == {"asked": COUNT, "no: not_read": COUNT}
        assert client.catalog.lookups.last(1)[0].why == "not_read"
        assert client.catalog.lookups.last(1)[0].missing == key(0)

    with_client(tmp_path, work)


@pytest.mark.parametrize("how", ["load", "match"])
@pytest.mark.parametrize("because", ["unreadable", "forgotten"])
def test_an_answer_without_blocks_that_come_ends_the_reads_of_its_request(
    tmp_path: Path, how: str, because: str
) -> None:
    async def work(client: Client) -> None:
        ask = getattr(client, how)
        assert ask(request=7).coming == COUNT
        if because == "unreadable":
            tier = client.held.bench.tier
            nowhere = frozenset(segment.number for segment in tier.table.segments)
            tier.unreadable_segments = lambda: nowhere  # type: ignore[method-assign]
        else:
            client.catalog.forget(client.held.space, key(0))
        assert ask(request=7).coming == 0
        await client.held.turn()
        assert len(client.held.read) == 0, "nothing waits for the reads"
        await client.held.submit_reads()
        await client.held.turn()
        assert not client.catalog.holds.of, "blocks are held for a request that does not wait"
        assert client.catalog.promotions.reading == 0

    with_client(tmp_path, work)


def test_blocks_that_are_recomputed_repeatedly_are_promoted(tmp_path: Path) -> None:
    async def work(client: Client) -> None:
        client.prefill(BLOCK / 1e12)
        for request in (1, 1, 1):
            assert client.load(request=request).why == "slower"
            assert client.catalog.promotions.reading == 0
        assert client.load(request=2).why == "slower"
        assert client.catalog.promotions.reading == TRIAL_BLOCKS < COUNT
        await client.held.submit_reads()
        assert client.load(request=3).ready == TRIAL_BLOCKS

    with_client(tmp_path, work)


def test_a_waiting_request_is_answered_when_its_last_block_is_ready(tmp_path: Path) -> None:
    async def work(client: Client) -> None:
        before = client.counted
        assert client.load(request=7).coming == COUNT
        client.wait(60_000)
        client.wait(60_000, request=8, number=3)  # it asked for nothing before
        await client.held.turn()
        assert not client.sent
        await client.held.submit_reads()
        await client.held.turn()
        first, reply = client.sent
        client.sent.clear()
        for one, number in ((first, 2), (reply, 3)):
            assert isinstance(one, wire.Loaded) and one.lease
            assert (one.id, one.ready, one.coming) == (number, COUNT, 0)
        assert since(client, before) == {"asked": 2 * COUNT, "cold": 2 * COUNT}
        client.wait(60_000)
        assert client.last().ready == COUNT, "nothing is on its way any more"

    with_client(tmp_path, work)


def test_a_first_request_that_waits_is_answered_at_once_if_a_block_is_ready_or_none_is_read(
    tmp_path: Path,
) -> None:
    async def work(client: Client) -> None:
        client.load(COUNT // 2, request=6)
        await client.held.submit_reads()
        client.load(COUNT // 2, request=6)
        client.wait(60_000)
        reply = client.last()
        assert (reply.ready, reply.coming) == (COUNT // 2, COUNT // 2) and reply.lease
        client.prefill(1e-15)
        space, asked = client.space, keys(COUNT)[KEY_BYTES * COUNT // 2 :]
        client.serve(wire.Load(3, space, asked, 60_000, [0], 9, 5000, wait_ms=60_000))
        assert client.last().id == 3, "it would have been computed earlier"

    with_client(tmp_path, work)


def test_a_waiting_request_is_answered_with_its_progress_at_its_time_limit(tmp_path: Path) -> None:
    async def work(client: Client) -> None:
        client.load(request=7)
        client.wait(60)
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
def test_a_waiting_request_is_answered_at_once_when_its_reads_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    async def work(client: Client) -> None:
        tier = client.held.bench.tier
        with monkeypatch.context() as none_begins:
            none_begins.setattr(read_queue, "READ_BLOCKS", 0)
            client.load(request=7)
            client.wait(60_000)
            await client.held.turn()
            assert not client.sent
            if why == "late":
                now = client.held.reads.planner._clock() + 2 * PATIENCE_S
                none_begins.setattr(client.held.reads.planner, "_clock", lambda: now)
                client.held.reads.pending.expire()
            elif why == "shut":
                tier.shut()
        if why == "off":
            tier.directories.attached[0].disk.give_up("gone")
            client.held.reads.pump(tier.directories.attached[0].disk)
        for _ in range(20):
            await client.held.turn()
        reply = client.last()
        assert (reply.id, reply.ready, reply.coming) == (2, 0, 0)

    with_client(tmp_path, work)


def test_a_cancelled_wait_is_answered_and_holds_no_lease(tmp_path: Path) -> None:
    async def work(client: Client) -> None:
        client.load(request=7)
        client.wait(60_000)
        client.tell(wire.Cancel(0, 7))
        reply = client.last()
        assert (reply.id, reply.ready, reply.lease) == (2, 0, 0)
        await client.held.submit_reads()
        await client.held.turn()
        assert not client.sent and not len(client.catalog.leases)

    with_client(tmp_path, work)


def test_a_wait_beyond_the_limit_of_bytes_is_answered_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferred_answers, "LIMIT_BYTES", COUNT * KEY_BYTES)

    async def work(client: Client) -> None:
        for request in (7, 8):
            client.load(request=request)
        client.wait(60_000)
        client.wait(60_000, request=8, number=3)
        assert client.last().id == 3

    with_client(tmp_path, work)


def save_much(client: Client) -> int:
    """Reserve all free memory, and abort. Returns the number of granted blocks."""
    at = [1000 + number for number in range(SLOTS)]
    granted = client.catalog.reserve(ONE, client.held.space, 0, 0, b"", b"".join(map(key, at)))
    client.catalog.abort(ONE, granted.lease)
    return granted.outcomes.count(wire.GRANTED)


@pytest.mark.parametrize("how", ["load", "match"])
def test_blocks_read_for_a_request_are_held_until_it_is_answered(tmp_path: Path, how: str) -> None:
    async def work(client: Client) -> None:
        holds, ask = client.catalog.holds, getattr(client, how)
        for request in (7, 8):  # the second one joins the reads of the first
            assert ask(12, request).coming == 12
        await client.held.submit_reads()
        assert len(holds) == 12
        assert save_much(client) == SLOTS - 12
        reply = client.load(12, 7)
        assert (reply.ready, reply.coming, len(holds)) == (12, 0, 12)
        client.tell(wire.Release(0, reply.lease))
        assert save_much(client) == SLOTS - 12, "the other has yet to be answered"
        reply = client.load(12, 8)
        assert (reply.ready, len(holds)) == (12, 0)
        client.tell(wire.Release(0, reply.lease))
        assert save_much(client) == SLOTS
        assert client.load(12, 9).coming == 12

    with_client(tmp_path, work)


def test_blocks_of_a_match_without_a_number_are_held_for_its_load(tmp_path: Path) -> None:
    async def work(client: Client) -> None:
        assert client.match(12).coming == 12
        await client.held.submit_reads()
        assert (client.match(12).ready, len(client.catalog.holds)) == (12, 12)
        assert save_much(client) == SLOTS - 12
        assert (client.load(12).ready, len(client.catalog.holds)) == (12, 0)

    with_client(tmp_path, work)


# With the last two, a hold ends without a request.
WAYS = ("cancelled", "late", "session"), ("forgotten", "time")


@pytest.mark.parametrize(
    ("how", "when"),
    [(how, "before") for how in WAYS[0]] + [(how, "after") for how in sum(WAYS, ())],
)
def test_a_request_that_ended_has_no_blocks_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, when: str
) -> None:
    """Neither the blocks that arrived before, nor those that arrive later, are held."""

    async def work(client: Client) -> None:
        client.match(12, request=7)
        await client.held.turn()
        assert client.held.read
        if when == "after":
            await client.held.submit_reads()
            assert len(client.catalog.holds) == 12
        if how == "cancelled":
            client.tell(wire.Cancel(0, 7))
        elif how == "late":
            now = client.held.reads.planner._clock() + 2 * PATIENCE_S
            monkeypatch.setattr(client.held.reads.planner, "_clock", lambda: now)
            client.held.reads.pending.expire()
            client.load(12, request=7)
        elif how == "session":
            client.mover.pending.session_ended(ONE)
            client.catalog.end_session(ONE, gone=True)
        elif how == "forgotten":
            client.tell(wire.Forget(1, client.space, key(3)))
        await client.held.submit_reads()
        client.catalog.expire_leases(asyncio.get_running_loop().time() + HOLD_S * (how == "time"))
        assert len(client.catalog.holds) == 0

    with_client(tmp_path, work)


def test_prefetched_blocks_are_not_held(tmp_path: Path) -> None:
    async def work(client: Client) -> None:
        client.tell(wire.Prefetch(1, client.space, keys(COUNT)))
        await client.held.submit_reads()
        assert client.catalog.match(client.held.space, keys(COUNT)).ready == COUNT
        assert len(client.catalog.holds) == 0

    with_client(tmp_path, work)


def test_releasing_an_earlier_lease_does_not_end_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "GONE_S", -1.0)

    async def work(client: Client) -> None:
        client.load(COUNT // 2, request=6)
        await client.held.submit_reads()
        first, second = client.load(request=7), client.load(request=7)
        assert first.lease and second.coming
        waits = client.held.reads.planner.is_waiting
        client.tell(wire.Release(0, first.lease))
        client.held.reads.pending.expire()
        assert waits((ONE, 7))
        client.tell(wire.Release(0, second.lease))
        client.held.reads.pending.expire()
        assert not waits((ONE, 7))

    with_client(tmp_path, work)


class Restarted:
    """A daemon after its restart: blocks are on its disk, and the recovery has not found them yet."""

    def __init__(self, client: Client) -> None:
        self.client, self.before = client, client.counted

    @classmethod
    async def on(cls, folder: Path) -> Restarted:
        before = Client(folder)
        await before.held.on_disk_alone(COUNT)
        await before.held.end()
        return cls(Client(folder))

    def ask(self, number: int = 2, request: int = 7, within_ms: int = 60_000) -> None:
        space, asked = self.client.space, keys(COUNT)
        self.client.serve(wire.Load(number, space, asked, 60_000, [0], request, within_ms))

    async def look(self) -> None:
        """Run the recovery, as the daemon does."""
        await self.client.held.start()
        await self.client.held.turn()

    async def end(self) -> None:
        await self.client.held.end()


def test_a_request_during_recovery_is_answered_with_the_recovered_blocks(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        restarted = await Restarted.on(tmp_path)
        client = restarted.client
        restarted.ask()
        assert not client.sent, "nothing is known yet"
        await restarted.look()
        reply = client.last()
        assert (reply.id, reply.ready, reply.coming) == (2, 0, COUNT)
        assert since(client, restarted.before) == {"asked": COUNT, "cold": COUNT}
        await restarted.end()

    run(work())


@pytest.mark.parametrize(("within_ms", "compute_s"), [(20, 0.0), (600_000, 1e-5)])
def test_a_request_during_a_long_recovery_is_answered_with_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, within_ms: int, compute_s: float
) -> None:
    """The search takes longer than the client waits, or than recompute."""
    monkeypatch.setattr(deferred_answers, "LONGEST_S", 600.0)
    monkeypatch.setattr(attached, "FIND_S", 600.0)

    async def work() -> None:
        restarted = await Restarted.on(tmp_path)
        client = restarted.client
        client.prefill(compute_s)
        restarted.ask(within_ms=within_ms)
        for _ in range(1000):
            if client.sent:
                break
            await asyncio.sleep(0.01)
        reply = client.last()
        assert (reply.id, reply.ready, reply.coming) == (2, 0, 0)
        restarted.ask(number=3)
        assert client.last().id == 3, "a request waits once"
        await restarted.look()
        await restarted.end()

    run(work())


def test_no_request_waits_for_a_recovery_beyond_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attached, "FIND_S", 0.001)

    async def work() -> None:
        restarted = await Restarted.on(tmp_path)
        await asyncio.sleep(0.01)
        restarted.ask()
        reply = restarted.client.last()
        assert (reply.id, reply.ready, reply.coming) == (2, 0, 0)
        await restarted.look()
        await restarted.end()

    run(work())


def test_a_request_without_a_time_limit_does_not_wait_for_recovery(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        restarted = await Restarted.on(tmp_path)
        restarted.ask(within_ms=0)
        assert restarted.client.last().coming == 0
        restarted.ask(request=0)
        assert restarted.client.last().coming == 0
        await restarted.look()
        await restarted.end()

    run(work())


def test_a_request_cancelled_during_recovery_is_answered_and_holds_no_lease(tmp_path: Path) -> None:
    async def work() -> None:
        restarted = await Restarted.on(tmp_path)
        client = restarted.client
        restarted.ask()
        client.tell(wire.Cancel(0, 7))
        reply = client.last()
        assert (reply.id, reply.ready, reply.lease) == (2, 0, 0)
        await restarted.look()
        assert not client.sent
        await restarted.end()

    run(work())
