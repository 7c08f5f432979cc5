"""The daemon's outputs for monitoring: metrics that parsers accept, health in one line, and a bounded
web server."""

from __future__ import annotations

import asyncio
import re
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from kvtier.errors import ConfigError
from kvtier_daemon.catalog import SessionId
from kvtier_daemon.observing import events as events_module
from kvtier_daemon.observing import web
from kvtier_daemon.observing.events import EventFeed
from kvtier_daemon.observing.exposition import Family, Sample, accepts_openmetrics, render
from kvtier_daemon.observing.health import health
from kvtier_daemon.observing.histogram import LATENCY_S, Histogram
from kvtier_daemon.observing.history import KEPT, History
from kvtier_daemon.observing.loop_lag import LoopLag
from kvtier_daemon.observing.web import HttpPages, Web, listen
from kvtier_daemon.tiers.states import SWITCHED_OFF

# --- text -----------------------------------------------------------------------------------------

names = st.from_regex(r"\A[a-z]+_[a-z]{3,8}\Z").filter(
    lambda name: not name.endswith(("_info", "_total", "_sum", "_count", "_bucket", "_created"))
)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
values = st.one_of(st.integers(0, 2**63), st.floats(0, 1e18))


@st.composite
def families(draw: st.DrawFn) -> list[Family]:
    found = []
    for name in draw(st.lists(names, max_size=4, unique=True)):
        kind = draw(st.sampled_from(["counter", "gauge", "histogram"]))
        labelled = draw(st.lists(texts, min_size=1, max_size=3, unique=True))
        samples = []
        for label in labelled:
            value: Any = draw(values)
            if kind == "histogram":
                histogram = Histogram()
                for seconds in draw(st.lists(st.floats(0, 100), max_size=5)):
                    histogram.note(seconds)
                value = histogram.report()
            samples.append(Sample((("label", label),), value))
        found.append(Family(name, kind, draw(texts).strip(), samples))
    return found


@given(families(), st.booleans())
def test_rendered_metrics_are_parsed_to_the_same_values(
    found: list[Family], as_openmetrics: bool
) -> None:
    text = render(found, as_openmetrics).decode()
    parse = (
        openmetrics.text_string_to_metric_families
        if as_openmetrics
        else text_string_to_metric_families
    )
    parsed = {family.name: family for family in parse(text)}
    assert len(parsed) == len(found)
    for family in found:
        got = parsed[family.name]
        assert got.type == family.kind
        if as_openmetrics:
            assert got.documentation == family.help
        for sample in family.samples:
            of = [each for each in got.samples if each.labels["label"] == sample.labels[0][1]]
            if isinstance(sample.value, int | float):
                assert [float(each.value) for each in of] == [float(sample.value)]
            else:
                counts = [each.value for each in of if each.name.endswith("_bucket")]
                assert counts == sample.value["counts"]
                assert next(each.value for each in of if each.name.endswith("_count")) == counts[-1]
                total = next(each.value for each in of if each.name.endswith("_sum"))
                assert total == sample.value["sum_s"]


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        ("", False),
        ("*/*", False),
        ("text/html,application/xhtml+xml,*/*;q=0.8", False),
        ("application/openmetrics-text; version=1.0.0", True),
        ("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1", True),
        ("application/openmetrics-text;q=0.2,text/plain;q=0.9", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=x", False),
    ],
)  # fmt: skip
def test_openmetrics_is_sent_if_the_client_prefers_it(accept: str, wanted: bool) -> None:
    assert accepts_openmetrics(accept) is wanted


@given(st.lists(st.one_of(st.floats(0, 60), st.sampled_from(LATENCY_S)), max_size=30))
def test_a_histogram_counts_values_up_to_its_bounds(noted: list[float]) -> None:
    histogram = Histogram()
    for seconds in noted:
        histogram.note(seconds)
    report = histogram.report()
    ordered = sorted(noted)
    at_most = [sum(one <= bound for one in ordered) for bound in LATENCY_S]
    assert report["counts"] == [*at_most, len(noted)]
    assert report["sum_s"] == pytest.approx(sum(noted))
    assert bisect_left(LATENCY_S, 0.0) == 0


# --- lag, health ----------------------------------------------------------------------------------


def test_a_stalled_loop_is_measured() -> None:
    async def work() -> None:
        lag = LoopLag(asyncio.get_running_loop())
        await asyncio.sleep(0.12)
        noted = lag.report()["counts"][-1]
        assert noted >= 1
        time.sleep(0.4)  # noqa: ASYNC251 - the stall is what the test measures
        assert lag.most(10) >= 0.3, "not even while its timer waits"
        await asyncio.sleep(0.12)
        report = lag.report()
        assert report["most_s"]["10"] >= 0.3 and report["most_s"]["60"] >= 0.3
        late = dict(zip(report["le_s"], report["counts"], strict=False))
        assert report["counts"][-1] - late[0.2] >= 1
        lag.stop()

    asyncio.run(work())


def test_a_stall_is_forgotten_after_a_minute() -> None:
    class Loop:
        def call_later(self, seconds: float, step: Callable[[], None]) -> Any:
            self.step = step

    now = 0.0
    loop: Any = Loop()
    lag = LoopLag(loop, lambda: now)
    now = 3.0
    loop.step()
    assert lag.most(10) == lag.most(60) == pytest.approx(2.95)
    for _ in range(1200):
        now += 0.05
        loop.step()
        if lag.most(10) < 1:
            break
    assert 10 <= now - 3 < 12 and lag.most(60) == pytest.approx(2.95)
    while now < 64:
        now += 0.05
        loop.step()
    assert lag.most(60) < 1


def figures_of(**changes: Any) -> dict[str, Any]:
    """The figures that the health needs, without problems."""
    warm = {"allocated_bytes": 1 << 20, "capacity_bytes": 1 << 20, "failure": ""}
    cold = {"on": True, "given_up": False, "failure": ""}
    tiers = {"warm": warm | changes.pop("warm", {}), "cold": cold | changes.pop("cold", {})}
    return {
        "stopping": False, "loop": {"most_s": {"10": 0.001}}, "tiers": tiers,
    } | changes  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "ok", "text"),
    [
        ({}, True, "ok"),
        ({"stopping": True}, False, "failed: the daemon is stopping"),
        ({"loop": {"most_s": {"10": 2.34}}}, False, "failed: its event loop stalled for 2.3 s in the"),
        ({"warm": {"allocated_bytes": 0}}, False, "failed: there is no warm tier: its first extent is being"),
        ({"warm": {"allocated_bytes": 0, "failure": "no\nmemory"}}, False,
         "failed: there is no warm tier: no memory"),
        ({"warm": {"allocated_bytes": 4096, "failure": "full"}}, True,
         "degraded: the warm tier has 4 KiB of 1 MiB: full"),
        ({"cold": {"given_up": True, "failure": "/d: gone"}}, True,
         "degraded: the cold tier is off until a restart: /d: gone"),
        ({"cold": {"on": False}}, True, "degraded: the cold tier is off, retrying: its disks"),
        ({"cold": {"failure": "slow"}}, True, "degraded: the cold tier: slow"),
        ({"cold": {"on": False, "state": "off", "failure": SWITCHED_OFF}}, True,
         "degraded: the cold tier is off: requested by an operator"),
        ({"cold": {"on": False, "state": "drained"}}, True, "degraded: the cold tier is drained: it is"),
        ({"cold": {"on": False, "state": "drained", "failure": "/d: EIO"}}, True,
         "degraded: the cold tier is off, retrying: /d: EIO"),
        ({"cold": {"on": False, "state": "off", "given_up": True, "failure": "/d: gone"}}, True,
         "degraded: the cold tier is off until a restart: /d: gone"),
    ],
)  # fmt: skip
def test_health_is_one_line_with_the_reason(changes: dict[str, Any], ok: bool, text: str) -> None:
    found = health(figures_of(**changes))
    assert found.ok is ok
    assert found.text.startswith(text) and "\n" not in found.text


def test_a_slow_watcher_misses_the_oldest_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "LIMIT_KEPT", 5)
    events, calls = EventFeed(lambda: 0.0), []
    watcher = events.watch(SessionId(1), None, (), lambda: calls.append(1))
    for number in range(12):
        events.tell("save", "t", number=number)
    missed, found = watcher.take(3)
    numbers = [msgspec.msgpack.decode(event)["number"] for event in found]
    assert (missed, numbers, len(calls)) == (7, [7, 8, 9], 1)
    events.tell("save", "t", number=12)
    missed, found = watcher.take(99)
    assert [msgspec.msgpack.decode(event)["number"] for event in found] == [10, 11, 12]
    assert missed == 0


def test_a_daemon_without_a_cold_tier_is_healthy() -> None:
    figures = figures_of()
    del figures["tiers"]["cold"]
    assert health(figures).text == "ok"


# --- the server -----------------------------------------------------------------------------------


class Asked:
    """A web server on its own port, tested with raw requests."""

    def __init__(self, figures: Callable[[], dict[str, Any]]) -> None:
        self.failures = 0
        self._listener = listen("127.0.0.1", 0)
        self.port = self._listener.getsockname()[1]
        history = History(figures)
        self.web = Web(
            asyncio.get_running_loop(),
            HttpPages(figures, history.report, ["gpu7.example"]),
            self._count,
        )

    def _count(self) -> None:
        self.failures += 1

    async def __aenter__(self) -> Asked:
        await self.web.listen(self._listener)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.web.close()

    async def send(self, text: bytes) -> bytes:
        """The server's answer until it closes the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(text)
        try:
            return await asyncio.wait_for(reader.read(), 20)
        except ConnectionError:
            return b""
        finally:
            writer.close()

    async def get(
        self, path: str, method: str = "GET", host: str = "localhost"
    ) -> tuple[int, dict[str, str], bytes]:
        text = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n\r\n"
        return parsed(await self.send(text.encode()))


def parsed(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *rest = head.decode().split("\r\n")
    pairs = (line.split(": ", 1) for line in rest)
    return int(first.split()[1]), {name.lower(): value for name, value in pairs}, body


def served(
    work: Callable[[Asked], Awaitable[None]], figures: Callable[[], dict[str, Any]] = figures_of
) -> None:
    async def all_of_it() -> None:
        async with Asked(figures) as asked:
            await work(asked)

    asyncio.run(all_of_it())


def test_each_page_answers_and_closes_the_connection() -> None:
    async def work(asked: Asked) -> None:
        for path, kind in (
            ("/", "text/html"),
            ("/healthz?x", "text/plain"),
            ("/status", "application/json"),
        ):
            status, headers, body = await asked.get(path)
            assert status == 200 and headers["content-type"].startswith(kind), path
            assert int(headers["content-length"]) == len(body) > 0
            assert headers["connection"] == "close"
            assert "default-src 'none'" in headers["content-security-policy"]
            assert (
                headers["x-content-type-options"] == "nosniff"
                and headers["cache-control"] == "no-store"
            )
            without = await asked.get(path, "HEAD")
            assert without[0] == 200 and without[2] == b""
            assert without[1]["content-length"] == headers["content-length"]

    served(work)


def test_health_has_its_own_http_status() -> None:
    async def work(asked: Asked) -> None:
        status, _, body = await asked.get("/healthz")
        assert (status, body) == (503, b"failed: the daemon is stopping\n")

    served(work, lambda: figures_of(stopping=True))


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("LOCALHOST:80", 200), ("127.0.0.1:9410", 200), ("[::1]:9410", 200),
        ("10.1.2.3", 200),
        ("gpu7.example:1", 200), ("evil.example", 421), ("gpu7.example.evil.example", 421), ("", 421),
        ("localhost.evil.example:9410", 421), ("127.0.0.1.evil.example", 421), ("[::1", 421), ("a b", 421),
    ],
)  # fmt: skip
def test_a_request_with_a_foreign_host_name_is_refused(host: str, status: int) -> None:
    async def work(asked: Asked) -> None:
        assert (await asked.get("/healthz", host=host))[0] == status

    served(work)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"POST /status HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nabc", 405),
        (b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        (b"GET /secret HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET /../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET http://localhost/status HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET /healthz HTTP/1.1\r\n\r\n", 400),  # without a Host
        (b"GET /healthz HTTP/1.0\r\n\r\n", 200),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", 400),
        (b"\x16\x03\x01\x00\xa5\x01\x00", 400),  # TLS
        (b"nonsense\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 10_000 + b"\r\n\r\n", 431),
        (b"GET /" + b"x" * 10_000, 431),
        # Only the first request is answered.
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3, 200),
    ],
)  # fmt: skip
def test_malformed_requests_are_refused(text: bytes, status: int) -> None:
    async def work(asked: Asked) -> None:
        answer = await asked.send(text)
        assert parsed(answer)[0] == status
        assert answer.count(b"HTTP/1.1 ") == 1
        assert asked.failures == 0

    served(work)


class Transport:
    """Records the written bytes."""

    def __init__(self) -> None:
        self.written = b""
        self.aborted = False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None: ...

    def abort(self) -> None:
        self.aborted = True


def connected() -> tuple[web.HttpConnection, Transport, Web]:
    asked = Web(
        asyncio.get_running_loop(),
        HttpPages(figures_of, lambda _: {}),
        lambda: pytest.fail("it failed"),
    )
    connection, transport = web.HttpConnection(asked), Transport()
    connection.connection_made(transport)  # type: ignore[arg-type]
    return connection, transport, asked


def test_bytes_after_a_request_do_not_shorten_its_answer() -> None:
    async def work() -> None:
        connection, transport, _ = connected()
        for text in (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET /", b"x" * 20_000):
            connection.data_received(text)
        assert transport.written.count(b"HTTP/1.1 ") == 1 and transport.written.endswith(b"ok\n")
        assert not transport.aborted
        connection.connection_lost(None)

    asyncio.run(work())


@given(st.binary(max_size=300))
def test_random_bytes_get_an_answer_or_none(text: bytes) -> None:
    async def work() -> None:
        for prefix in (b"", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"):
            connection, transport, asked = connected()
            for at in range(0, len(prefix + text), 40):
                connection.data_received((prefix + text)[at : at + 40])
            connection.connection_lost(None)
            assert not transport.written or transport.written.startswith(b"HTTP/1.1 ")
            assert not asked.connections

    asyncio.run(work())


def test_slow_clients_are_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "REQUEST_S", 0.2)

    async def work(asked: Asked) -> None:
        assert await asked.send(b"GET /healthz HTTP/1.1\r\nHost: loc") == b""
        assert not asked.web.connections
        # A client that does not read its answer is disconnected too.
        _, writer = await asyncio.open_connection("127.0.0.1", asked.port, limit=16)
        writer.write(b"GET /status HTTP/1.0\r\n\r\n")
        async with asyncio.timeout(60):
            while len(asked.web.connections) != 1:  # noqa: ASYNC110
                await asyncio.sleep(0)
        deadline = time.monotonic() + 60
        while asked.web.connections:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        writer.close()

    served(work, lambda: figures_of(much="x" * (16 << 20)))


def test_idle_connections_are_closed_for_a_new_one() -> None:
    async def work(asked: Asked) -> None:
        held = [
            await asyncio.open_connection("127.0.0.1", asked.port)
            for _ in range(web.LIMIT_CONNECTIONS)
        ]
        async with asyncio.timeout(60):
            while len(asked.web.connections) < web.LIMIT_CONNECTIONS:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for number in range(3):
            assert (await asked.get("/healthz"))[0] == 200
            assert len(asked.web.connections) <= web.LIMIT_CONNECTIONS
            if number == 0:
                assert await held[0][0].read() == b"", "the oldest was hung up on"
        held[-1][1].write(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert (await held[-1][0].read()).startswith(b"HTTP/1.1 200"), "the others were not"
        for _, writer in held:
            writer.close()

    served(work)


def test_a_failing_page_is_counted_and_the_server_continues() -> None:
    def broken() -> dict[str, Any]:
        raise KeyError("of ours")

    async def work(asked: Asked) -> None:
        status, _, body = await asked.get("/status")
        assert status == 500 and b"KeyError" not in body
        assert asked.failures == 1
        assert (await asked.get("/"))[0] == 200

    served(work, broken)


def test_a_port_in_use_is_an_error_in_one_line() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"^http.listen: 127.0.0.1:{port}: Address already in use; `ss"
        ):
            listen("127.0.0.1", port)
    with pytest.raises(ConfigError, match="no network interface of this machine has that address"):
        listen("203.0.113.7", 9410)


def test_the_page_loads_nothing_from_other_hosts() -> None:
    text, policy = web._file()
    page = text.decode()
    assert policy.count("'sha256-") == 2 and "unsafe" not in policy
    assert page.count("<script") == page.count("<style") == 1
    assert not re.findall(r"(?:src|href)=\"(?!/|data:)", page)
    assert set(re.findall(r"https?://[^\"\s]+", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.findall(r"\bon[a-z]+=|\sstyle=|innerHTML|eval\(", page)


def test_the_page_gets_only_values_it_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    up = 0.0

    def figures() -> dict[str, Any]:
        none = {"saved": 0, "loaded": 0}
        return {
            "uptime_s": up, "lookup_tokens": 5, "coming_tokens": 1, "coming_remote_tokens": 0,
            "awaited_tokens": 0,
            "hit_tokens": {"warm": 2, "cold": 1, "remote": 1}, "miss_tokens": {"absent": 1},
            "bytes": none, "tiers": {"warm": {}},
        }  # fmt: skip

    history = History(figures)
    for _ in range(KEPT + 10):
        up += 2.0
        history.note()
    report = history.report(-1.0)
    assert len(report["points"]) == KEPT
    assert len(history.report(up - 4)["points"]) == 2
    time_s, lookups, warm, cold, misses, moved, remote = report["points"][-1]
    assert (time_s, lookups, warm, cold, remote) == (up, 4, 2, 0, 1)
    assert lookups == warm + cold + remote + sum(misses)
    assert len(misses) == len(report["reasons"]) and len(moved) == len(report["routes"])
