"""The latencies of loads, saves and waits, as the requests of one session record them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvtier import wire
from kvtier.layout import space_id
from kvtier_daemon.catalog import Catalog, SessionId
from kvtier_daemon.catalog.policy import make
from kvtier_daemon.observing.events import EventFeed
from kvtier_daemon.observing.histogram import Latencies
from kvtier_daemon.serving.requests import Requests, lookups
from kvtier_daemon.tenant import Tenant
from kvtier_kernels import Store
from support.specs import spec_of
from support.stores import PAGE, keys

ME = SessionId(1)
SPEC = spec_of("latencies", layers=1, kv_heads=1, head_dim=64)


class Timed:
    """The requests of a session whose clock is `now`. `coming` blocks are being read at any time."""

    def __init__(self) -> None:
        self.now, self.coming, self.defers = 0.0, 0, False
        self.catalog = Catalog(Store(), make("lru"))
        self.catalog.add_extent(64 * PAGE, bytearray(8 * 64))
        self.space = self.catalog.spaces.open(space_id(SPEC, "t"), SPEC, ME).number
        find = self.catalog.reading.find

        def found(space: Any, asked: bytes) -> Any:
            ready, _, parts = find(space, asked)
            return ready, self.coming, parts

        self.catalog.reading.find = found  # type: ignore[method-assign]
        tier: Any = SimpleNamespace(
            recovery=SimpleNamespace(is_awaited=False, cancel_calls=lambda _: None),
            reads=SimpleNamespace(
                is_on=True, promote=lambda *_, **__: (self.coming, 1.0, "faster")
            ),
            pending=SimpleNamespace(
                released=lambda _: None,
                end_reads=lambda _: None,
                call_when_read=lambda *_: self.defers,
                cancel_calls=lambda _: None,
            ),
            writes=SimpleNamespace(saved=lambda _: None),
        )
        self.tenant = Tenant("t", bytes(32), 0, self.catalog, tier)
        self.latencies = Latencies()
        timer = SimpleNamespace(cancel=lambda: None)
        server: Any = SimpleNamespace(
            clock=lambda: self.now,
            recorder=SimpleNamespace(is_on=False),
            loop=SimpleNamespace(call_later=lambda *_: timer),
            events=EventFeed(lambda: 0.0),
            latencies=self.latencies,
        )
        session: Any = SimpleNamespace(
            id=ME, name="one", verifies=False, serve_later=lambda _: None
        )
        self._requests = Requests(session, server)

    def ask(self, request: wire.Request) -> Any:
        reply = self._requests.handlers[type(request)](self.tenant, request)
        self._requests.settle()
        return reply

    def reserve(self, *names: int) -> wire.Reserved:
        reserved = self.ask(wire.Reserve(1, self.space, 0, 0, b"", keys(*names)))
        assert isinstance(reserved, wire.Reserved)
        return reserved

    def save(self, *names: int) -> None:
        self.ask(wire.Commit(1, self.reserve(*names).lease, 0, len(names)))

    def load(self, name: int = 1, coming: int = 0, request: int = 0, wait_ms: int = 0) -> Any:
        self.coming = coming
        asked = wire.Load(1, self.space, keys(name), 100, [0], request, wait_ms=wait_ms)
        return self.ask(asked)

    def match(self, coming: int, request: int = 0, name: int = 0) -> None:
        self.coming = coming
        self.ask(wire.MatchPrefix(1, self.space, keys(name), request))

    def release(self, loaded: wire.Loaded) -> None:
        self.ask(wire.Release(1, loaded.lease))

    def noted(self, what: str) -> tuple[int, float]:
        report = self.latencies.report()[what]
        return report["counts"][-1], report["sum_s"]


def test_a_load_lasts_until_it_is_released() -> None:
    timed = Timed()
    timed.save(1)
    one = timed.load()
    other = timed.load()
    adopted = timed.ask(wire.Adopt(1, other.token, [0]))
    assert timed.load(name=2).lease == 0
    timed.now = 2.0
    timed.release(one)
    timed.now = 3.0
    timed.release(other)
    timed.release(adopted)  # a lease is recorded once for a session
    assert timed.noted("load") == (2, 5.0)


def test_a_save_lasts_until_all_of_it_is_committed() -> None:
    timed = Timed()
    first, second = timed.reserve(1, 2, 3), timed.reserve(4, 5)
    for now, begin, count in ((1.0, 0, 2), (4.0, 2, 1)):
        timed.now = now
        timed.ask(wire.Commit(1, first.lease, begin, count))
    assert timed.noted("save") == (1, 4.0)
    timed.ask(wire.Commit(1, second.lease, 0, 1))
    timed.ask(wire.Abort(1, second.lease))
    assert timed.noted("save") == (1, 4.0)


def test_a_wait_lasts_until_no_block_is_coming() -> None:
    timed = Timed()
    timed.match(0)
    timed.match(3, request=7)
    timed.match(3, name=1)
    timed.now = 1.0
    timed.match(2, request=7)
    timed.match(0, name=2)  # another lookup
    assert timed.noted("wait") == (0, 0.0)
    timed.now = 2.5
    timed.match(0, request=7)
    timed.match(0, name=1)
    assert timed.noted("wait") == (2, 5.0)


def test_a_deferred_answer_is_a_wait() -> None:
    timed = Timed()
    timed.save(1)
    timed.defers = True
    assert timed.load(request=7, wait_ms=50) is None
    timed.defers, timed.now = False, 2.0
    loaded = timed.load(request=7)
    timed.now = 3.0
    timed.release(loaded)
    assert timed.noted("wait") == (1, 2.0)
    assert timed.noted("load") == (1, 1.0), "there was no lease before the answer"


def test_leases_that_are_never_released_need_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lookups, "LIMIT_NOTED", 10)
    timed = Timed()
    timed.save(1)
    loaded = [timed.load(coming=1, request=number) for number in range(1, 31)]
    timed.coming = 0
    for one in loaded:
        timed.release(one)
    assert timed.noted("load")[0] == 10
