"""Answers that are delayed until other clients have written the blocks that a request awaits."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier import wire
from kvtier.layout import space_id
from kvtier_daemon.catalog import Catalog, SessionId, awaited
from kvtier_daemon.catalog.policy import make
from kvtier_daemon.observing.events import EventFeed
from kvtier_daemon.observing.histogram import Latencies
from kvtier_daemon.serving import deferred_answers
from kvtier_daemon.serving.requests import Requests
from kvtier_daemon.serving.turns import Turns
from kvtier_daemon.tenant import Tenant
from kvtier_kernels import Store
from support.specs import spec_of
from support.stores import PAGE, keys

SPEC = spec_of("awaited", layers=1, kv_heads=1, head_dim=64)
SHARDED = spec_of("sharded", layers=1, kv_heads=2, head_dim=64, tensor_parallel=2)
NAMES = (1, 2, 3, 4)
WITHIN_MS, WAIT_MS = 600, 50


class SteppedLoop:
    """A loop and a clock that advance when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self._soon: list[Callable[[], None]] = []
        self._timers: list[tuple[float, Callable[[], None], Any]] = []

    def call_soon(self, work: Callable[..., None], *given: Any) -> None:
        self._soon.append(lambda: work(*given))

    def call_later(self, delay_s: float, work: Callable[[], None]) -> Any:
        handle = SimpleNamespace(cancelled=False)
        handle.cancel = lambda: setattr(handle, "cancelled", True)
        self._timers.append((self.now + delay_s, work, handle))
        return handle

    def run(self, seconds: float = 0.0) -> None:
        self.now += seconds
        due = [one for one in self._timers if one[0] <= self.now]
        self._timers = [one for one in self._timers if one[0] > self.now]
        for _, work, handle in due:
            if not handle.cancelled:
                work()
        while self._soon:
            self._soon.pop(0)()


class Session:
    """A client without a connection."""

    def __init__(self, host: Host, number: int) -> None:
        self.id, self.tenant, self.sent = SessionId(number), host.tenant, list[Any]()
        session: Any = SimpleNamespace(
            id=self.id, name="one", verifies=False, device=False, send=self.sent.append,
            serve_later=self.serve,
        )  # fmt: skip
        self.requests = Requests(session, host.server)
        self.space = host.catalog.spaces.open(space_id(host.spec, "t"), host.spec, self.id).number

    def serve(self, request: wire.Request) -> None:
        if (reply := self.ask(request)) is not None:
            self.sent.append(reply)

    def ask(self, request: wire.Request) -> Any:
        try:
            return self.requests.handlers[type(request)](self.tenant, request)
        finally:
            self.requests.settle()

    def reserve(self, *names: int, shard: int = 0) -> int:
        lease: int = self.ask(wire.Reserve(1, self.space, 0, shard, b"", keys(*names))).lease
        assert lease
        return lease

    def commit(self, lease: int, first: int, count: int) -> None:
        self.ask(wire.Commit(1, lease, first, count))

    def load(self, number: int = 7, wait_ms: int = 0, within_ms: int = WITHIN_MS) -> Any:
        asked = wire.Load(
            number, self.space, keys(*NAMES), 60_000, [0], number, within_ms, wait_ms=wait_ms,
            awaits=True,
        )  # fmt: skip
        return self.ask(asked)

    def waits(self, number: int = 7) -> None:
        """Ask twice: the second answer is delayed."""
        assert self.load(number).coming == len(NAMES)
        assert self.load(number, WAIT_MS) is None

    def last(self) -> wire.Loaded:
        assert len(self.sent) == 1, self.sent
        reply = self.sent.pop()
        assert isinstance(reply, wire.Loaded)
        return reply

    def end(self, host: Host, gone: bool) -> None:
        self.requests.lookups.counted.end(host.catalog)
        self.requests.lookups.deferred.end()
        host.catalog.end_session(self.id, gone)


class Host:
    def __init__(self, spec: Any = SPEC) -> None:
        self.spec, self.loop = spec, SteppedLoop()
        self.catalog = Catalog(Store(), make("lru"))
        self.catalog.add_extent(256 * PAGE, bytearray(8 * 256))
        self.tenant = Tenant("t", bytes(32), 0, self.catalog)
        loop: Any = self.loop
        self.server: Any = SimpleNamespace(
            clock=lambda: self.loop.now, recorder=SimpleNamespace(is_on=False), loop=loop,
            events=EventFeed(lambda: 0.0), latencies=Latencies(), turns=Turns(loop, {"t": 1}),
        )  # fmt: skip
        self.writer, self.reader = Session(self, 1), Session(self, 2)


def test_a_request_is_answered_when_the_last_block_is_committed() -> None:
    host = Host()
    lease = host.writer.reserve(*NAMES)
    host.reader.waits()
    for at in range(len(NAMES)):
        assert not host.reader.sent
        host.writer.commit(lease, at, 1)
        host.loop.run()
    reply = host.reader.last()
    assert (reply.id, reply.ready, reply.coming) == (7, len(NAMES), 0) and reply.lease
    assert not len(host.catalog.awaited)


def test_a_commit_in_any_order_is_awaited() -> None:
    host = Host()
    first, last = host.writer.reserve(*NAMES[:2]), host.writer.reserve(*NAMES[2:])
    host.reader.waits()
    host.writer.commit(last, 0, 2)
    host.loop.run()
    assert not host.reader.sent
    host.writer.commit(first, 0, 2)
    host.loop.run()
    assert host.reader.last().ready == len(NAMES)


def test_a_block_is_awaited_in_all_its_shards() -> None:
    host = Host(SHARDED)
    leases = [host.writer.reserve(*NAMES, shard=shard) for shard in (0, 1)]
    host.reader.waits()
    host.writer.commit(leases[1], 0, len(NAMES))
    host.loop.run()
    assert not host.reader.sent
    host.writer.commit(leases[0], 0, len(NAMES))
    host.loop.run()
    assert host.reader.last().ready == len(NAMES)


def test_no_wakeup_is_lost_between_two_questions() -> None:
    host = Host()
    lease = host.writer.reserve(*NAMES)
    assert host.reader.load().coming == len(NAMES)
    host.writer.commit(lease, 0, len(NAMES))
    assert host.reader.load(wait_ms=WAIT_MS).ready == len(NAMES)


def test_the_first_question_of_a_request_is_answered_at_once() -> None:
    host = Host()
    host.writer.reserve(*NAMES)
    assert host.reader.load(wait_ms=WAIT_MS).coming == len(NAMES)


@pytest.mark.parametrize("how", ["abort", "gone", "quarantined"])
def test_a_writer_that_gives_up_ends_the_wait(how: str) -> None:
    host = Host()
    lease = host.writer.reserve(*NAMES)
    host.reader.waits()
    host.writer.commit(lease, 0, 1)
    host.loop.run()
    assert not host.reader.sent
    if how == "abort":
        host.writer.ask(wire.Abort(1, lease))
    else:
        host.writer.end(host, how == "gone")
    host.loop.run()
    reply = host.reader.last()
    assert (reply.ready, reply.coming) == (1, 0) and reply.lease
    assert host.reader.load(8).coming == 0, "another request does not wait for it either"


def test_the_wait_ends_when_one_of_two_writers_gives_up() -> None:
    host = Host()
    other = Session(host, 3)
    lease = other.reserve(*NAMES[:1])
    host.writer.reserve(*NAMES[1:])
    host.reader.waits()
    other.ask(wire.Abort(1, lease))
    host.loop.run()
    reply = host.reader.last()
    assert (reply.ready, reply.coming) == (0, 0)


@pytest.mark.parametrize("how", ["forget", "purge"])
def test_the_wait_ends_when_a_block_is_forgotten(how: str) -> None:
    host = Host()
    lease = host.writer.reserve(*NAMES)
    host.reader.waits()
    host.writer.commit(lease, 0, 2)
    space = host.catalog.spaces.at(host.reader.space)
    if how == "forget":
        host.catalog.forget(space, keys(1))
    else:
        host.catalog.purge(space, keys(*NAMES), lambda slot, nbytes: None)
    host.loop.run()
    reply = host.reader.last()
    assert (reply.ready, reply.coming, reply.lease) == (0, 0, 0)
    host.writer.commit(lease, 2, 2)
    host.loop.run()
    assert not host.reader.sent


def test_the_wait_ends_at_its_time_limit_and_when_computing_is_faster() -> None:
    host = Host()
    host.writer.reserve(*NAMES)
    host.reader.waits()
    host.loop.run(WAIT_MS / 1000)
    assert host.reader.last().coming == len(NAMES)
    assert host.reader.load(wait_ms=10_000) is None
    host.loop.run(WITHIN_MS / 1000 - WAIT_MS / 1000)
    assert host.reader.last().coming == 0
    assert host.reader.load(wait_ms=WAIT_MS).coming == 0, "it waits once"
    host.catalog.spaces.at(host.reader.space).prefill = (0.02 / (4 * SPEC.block_tokens), 0.0)
    host.reader.waits(8)
    host.loop.run(0.021)
    assert host.reader.last().coming == 0


def test_a_cancelled_request_and_an_ended_session_wait_for_nothing() -> None:
    host = Host()
    lease = host.writer.reserve(*NAMES)
    host.reader.waits()
    host.reader.ask(wire.Cancel(0, 7))
    reply = host.reader.last()
    assert (reply.id, reply.ready, reply.lease) == (7, 0, 0)
    assert not len(host.catalog.awaited)
    host.reader.waits(8)
    host.reader.end(host, True)
    assert not len(host.catalog.awaited)
    host.writer.commit(lease, 0, len(NAMES))
    host.loop.run(1.0)
    assert not host.reader.sent


def test_of_one_request_the_last_question_waits() -> None:
    host = Host()
    lease = host.writer.reserve(*NAMES)
    host.reader.waits()
    assert host.reader.load(wait_ms=WAIT_MS) is None
    assert host.reader.last().coming == len(NAMES)
    host.writer.commit(lease, 0, len(NAMES))
    host.loop.run()
    assert host.reader.last().ready == len(NAMES)


def test_the_number_of_waiting_requests_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awaited, "LIMIT_SESSION", 2)
    monkeypatch.setattr(awaited, "LIMIT_WAITING", 3)
    host = Host()
    other = Session(host, 3)
    lease = host.writer.reserve(*NAMES)
    for number in (1, 2):
        host.reader.waits(number)
    assert host.reader.load(3).coming and host.reader.load(3, WAIT_MS).coming, "of the session"
    other.waits(1)
    assert other.load(2).coming and other.load(2, WAIT_MS).coming, "of the tenant"
    host.writer.commit(lease, 0, len(NAMES))
    host.loop.run()
    assert [one.ready for one in host.reader.sent + other.sent] == [len(NAMES)] * 3
    assert not len(host.catalog.awaited)


def test_the_bytes_of_waiting_requests_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_answers, "LIMIT_BYTES", 32 * len(NAMES))
    host = Host()
    host.writer.reserve(*NAMES)
    host.reader.waits(1)
    assert host.reader.load(2).coming and host.reader.load(2, WAIT_MS).coming


def test_answers_that_become_due_together_are_given_in_the_turns_of_the_tenant() -> None:
    host = Host()
    lease = host.writer.reserve(*NAMES)
    for number in range(1, 9):
        host.reader.waits(number)
    serve, spent = host.reader.serve, host.server.turns.shares["t"]

    def slow(request: wire.Request) -> None:
        serve(request)
        host.server.turns.spend(spent, spent.turn_s / 2)

    host.reader.requests.lookups.deferred._session.serve_later = slow
    host.writer.commit(lease, 0, len(NAMES))
    assert not host.reader.sent, "not within the request of the writer"
    per_round = []
    while host.loop._soon:
        before = len(host.reader.sent)
        host.loop._soon.pop(0)()
        per_round.append(len(host.reader.sent) - before)
    assert per_round[:4] == [2] * 4 and not any(per_round[4:])
