"""What the daemon knows of the blocks in an engine's own cache, with a real daemon."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvtier.link import Link
from kvtier_plugins import residency
from kvtier_plugins.residency import EngineBlocks, ResidencyReports
from kvtier_vllm.lookups import EngineLimits
from kvtier_vllm.messages import RankReport
from support.daemons import Daemon
from support.fake_engine import BLOCK, FakeEngine, layout_of

EngineOf = Callable[..., FakeEngine]
PROMPT = range(4 * BLOCK + 3)


def shown(daemon: Daemon) -> dict[str, int]:
    found: dict[str, int] = daemon.stats()["hot"]["resident"]
    return found


def until(daemon: Daemon, engine: FakeEngine, **wanted: int) -> None:
    """Step until the daemon shows these figures."""
    deadline = time.monotonic() + 30
    while not wanted.items() <= shown(daemon).items():
        assert time.monotonic() < deadline, (wanted, shown(daemon))
        engine.step()


@pytest.fixture
def forgotten() -> set[int]:
    """Pages that the engine does not find any longer."""
    return set()


@pytest.fixture
def engine(daemon_of: Any, engine_of: EngineOf, forgotten: set[int]) -> Iterator[FakeEngine]:
    daemon = daemon_of(warm="4MiB")
    engine = engine_of(daemon, pages=16, residency=True)
    engine.daemon = daemon  # type: ignore[attr-defined]
    engine.scheduler.set_limits(EngineLimits(), lambda page: None if page in forgotten else "mark")
    yield engine


def test_the_daemon_knows_what_the_engine_holds(engine: FakeEngine) -> None:
    daemon: Daemon = engine.daemon  # type: ignore[attr-defined]
    engine.serve(PROMPT)
    until(daemon, engine, engines=1, blocks=4, bytes=4 * engine.layout.block_bytes)
    # The same pages, reused by another prompt.
    engine.serve(range(1000, 1000 + 4 * BLOCK + 3))
    until(daemon, engine, blocks=4, entered_blocks=8, left_blocks=4)


def test_pages_that_the_engine_forgets_without_reuse_are_noticed(
    engine: FakeEngine, forgotten: set[int]
) -> None:
    daemon: Daemon = engine.daemon  # type: ignore[attr-defined]
    engine.serve(PROMPT)
    until(daemon, engine, blocks=4)
    forgotten.update(range(16))
    until(daemon, engine, blocks=0, left_blocks=4)


def test_after_a_lost_connection_all_blocks_are_sent_again(engine: FakeEngine) -> None:
    daemon: Daemon = engine.daemon  # type: ignore[attr-defined]
    engine.serve(PROMPT)
    until(daemon, engine, blocks=4)
    session = engine.scheduler._daemon.session
    assert session is not None
    engine.scheduler._daemon.lost(session, "for the test")
    del session
    until(daemon, engine, blocks=4, entered_blocks=8, engines=1)


def test_the_engine_holds_nothing_after_its_end(engine: FakeEngine, engine_of: EngineOf) -> None:
    daemon: Daemon = engine.daemon  # type: ignore[attr-defined]
    engine.serve(PROMPT)
    until(daemon, engine, blocks=4)
    other = engine_of(daemon, pages=16, residency=True)
    engine.close()
    until(daemon, other, blocks=0, engines=0)


def test_groups_and_pages_of_different_sizes(daemon_of: Any, engine_of: EngineOf) -> None:
    daemon, layout = daemon_of(warm="4MiB"), layout_of([0, 0], parts=[2, 1])
    engine = engine_of(daemon, layout, pages=64, residency=True)
    engine.scheduler.set_limits(EngineLimits(), lambda page: "mark")
    engine.serve(PROMPT)
    until(daemon, engine, blocks=8, bytes=4 * layout.block_bytes)


def test_without_the_option_nothing_is_reported(daemon_of: Any, engine_of: EngineOf) -> None:
    daemon = daemon_of(warm="4MiB")
    engine = engine_of(daemon)
    engine.scheduler.set_limits(EngineLimits(), lambda page: "mark")
    engine.serve(PROMPT)
    assert shown(daemon)["entered_blocks"] == 0


def test_a_daemon_without_it_gets_no_report(
    daemon_of: Any, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older daemon ends the connection of a client that sends a message that it does not know."""
    daemon = daemon_of(warm="4MiB")
    stats = residency.Client.stats

    def older(client: Any) -> dict[str, Any]:
        return {name: one for name, one in stats(client).items() if name != "hot"}

    told: list[object] = []
    tell = Link.tell
    monkeypatch.setattr(residency.Client, "stats", older)
    monkeypatch.setattr(Link, "tell", lambda link, one: (told.append(one), tell(link, one))[1])
    engine = engine_of(daemon, residency=True)
    engine.scheduler.set_limits(EngineLimits(), lambda page: "mark")
    engine.serve(PROMPT)
    resident = engine.scheduler._resident
    assert resident is not None
    engine.until(lambda: resident.reports.ignored)
    engine.serve(range(1000, 1000 + 4 * BLOCK + 3))
    assert not [one for one in told if type(one).__name__ == "Resident"]
    monkeypatch.undo()
    assert shown(daemon)["entered_blocks"] == 0
    assert engine.scheduler.counts["lost"] == 0


# --- save = "lazy" -------------------------------------------------------------------------------


def lazy_engine(daemon: Daemon, engine_of: EngineOf, pages: int) -> FakeEngine:
    """An engine whose marks are the numbers of requests that filled its pages, and which gives away the pages
    that were free for the longest time."""
    engine = engine_of(daemon, pages=pages, save="lazy")
    marks: dict[int, object] = {}
    engine.marks = marks  # type: ignore[attr-defined]
    engine.scheduler.set_limits(EngineLimits(), marks.get, lambda count: engine.free[:count])
    return engine


def serve(engine: FakeEngine, tokens: range) -> None:
    """Serve a prompt, and put its pages at the end of the free ones, the tail first."""
    request = engine.add(tokens)
    marks: dict[int, object] = engine.marks  # type: ignore[attr-defined]
    allocate = engine.allocate

    def marked(one: Any, computed: int, count: int) -> None:
        allocate(one, computed, count)
        marks.update(dict.fromkeys((page for pages in one.pages for page in pages), one.request_id))

    engine.allocate = marked  # type: ignore[method-assign]
    engine.run(request)
    engine.allocate = allocate  # type: ignore[method-assign]
    assert not engine.wrong_pages(request)
    engine.scheduler.finished(request)
    engine.free += [page for pages in request.pages for page in reversed(pages)]


def prompt(number: int) -> range:
    return range(number * 10_000, number * 10_000 + 4 * BLOCK + 3)


def test_lazy_saves_a_block_when_the_engine_is_about_to_drop_it(
    daemon_of: Any, engine_of: EngineOf
) -> None:
    daemon = daemon_of(warm="4MiB")
    engine = lazy_engine(daemon, engine_of, pages=16)
    engine.until(lambda: engine.scheduler._daemon.session is not None)
    serve(engine, prompt(1))
    engine.until(lambda: not engine.scheduler.in_flight["saves"])
    assert daemon.stats()["tiers"]["warm"]["blocks"] == 0
    serve(engine, prompt(2))  # its step gives pages away, and the first prompt's follow
    engine.until(lambda: not engine.scheduler.in_flight["saves"])
    assert daemon.stats()["tiers"]["warm"]["blocks"] == 4
    other = engine_of(daemon)
    assert other.serve(prompt(1)).cached == 4 * BLOCK
    assert other.serve(prompt(2)).cached == 0
    assert not engine.scheduler.counts["drop:overwritten"]


def test_lazy_never_saves_wrong_bytes(daemon_of: Any, engine_of: EngineOf) -> None:
    """Pages are given away while they are copied, and blocks are lost; what is found is what was computed."""
    daemon = daemon_of(warm="4MiB")
    engine = lazy_engine(daemon, engine_of, pages=13)
    engine.until(lambda: engine.scheduler._daemon.session is not None)
    chance = random.Random(1)
    for _ in range(60):
        serve(engine, prompt(chance.randrange(12)))
        if chance.random() < 0.3:
            chance.shuffle(engine.free)  # other pages are next than those that were expected
    engine.until(lambda: not any(engine.scheduler.in_flight.values()))
    other, found = engine_of(daemon), 0
    for number in range(12):
        found += other.serve(prompt(number)).cached  # it compares every page
    assert found > 4 * BLOCK


def test_lazy_saves_no_page_that_has_other_content_now() -> None:
    """Another part of the engine has filled a page, or the engine no longer finds it: its mark differs."""
    marks: dict[int, object] = dict.fromkeys(range(1, 7), "mine")
    blocks = EngineBlocks(marks.get)
    for at in range(3):
        blocks.filled(0, key(at), (2 * at + 1, 2 * at + 2), savable=True)
    assert [copy.block[1] for copy in blocks.copies_in(range(6, 0, -1))] == [key(2), key(1), key(0)]
    marks[4] = "other"
    del marks[1]
    assert [copy.block[1] for copy in blocks.copies_in(range(6, 0, -1))] == [key(2)]
    blocks.check()
    assert set(blocks.copies) == {(0, key(2))}


def test_lazy_saves_nothing_that_was_computed_from_unfilled_pages(
    daemon_of: Any, engine_of: EngineOf
) -> None:
    daemon = daemon_of(warm="4MiB")
    engine = lazy_engine(daemon, engine_of, pages=16)
    engine.until(lambda: engine.scheduler._daemon.session is not None)
    serve(engine, prompt(1))
    engine.scheduler.reported(RankReport(), set(), {99})
    serve(engine, prompt(2))
    engine.until(lambda: not engine.scheduler.in_flight["saves"])
    assert daemon.stats()["tiers"]["warm"]["blocks"] == 0


# --- what is sent --------------------------------------------------------------------------------


class Space:
    """Records what is sent."""

    def __init__(self) -> None:
        self.held: set[tuple[int, bytes]] = set()
        self.messages: list[int] = []

    def tell_resident(
        self, group: int, entered: Any = (), left: Any = (), reset: bool = False
    ) -> None:
        if reset:
            self.held.clear()
        self.messages.append(len(entered) + len(left))
        self.held |= {(group, bytes(one)) for one in entered}
        self.held -= {(group, bytes(one)) for one in left}


class Connected:
    def __init__(self) -> None:
        self.space, self.client = Space(), self
        self.link = self.connection = self
        self.backlog_bytes = 0

    def stats(self) -> dict[str, Any]:
        return {"hot": {}}


def key(name: int) -> bytes:
    return name.to_bytes(32, "big")


def settled(session: Connected, blocks: EngineBlocks) -> None:
    deadline = time.monotonic() + 30
    while session.space.held != set(blocks.copies):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_thread_that_falls_behind_sends_all_blocks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "LIMIT_QUEUED", 50)
    monkeypatch.setattr(residency, "SENT_BLOCKS", 7)
    session, blocks = Connected(), EngineBlocks(lambda page: "mark")
    reports = ResidencyReports(lambda: session)  # type: ignore[arg-type, return-value]
    try:
        for turn in range(40):
            for page in range(30):
                blocks.filled(page % 2, key(page * 1000 + turn), (page + 1,))
            if turn % 3 == 0:
                blocks.reused({1 + turn % 30})
            reports.add(blocks)
            assert sum(map(len, reports._queue)) <= 50 + 30
        settled(session, blocks)
        assert max(session.space.messages) <= 7
    finally:
        reports.close()


def test_copies_of_a_block_count_and_parts_leave_together() -> None:
    blocks = EngineBlocks(lambda page: "mark")
    blocks.filled(0, key(1), (1, 2))
    blocks.filled(0, key(1), (3, 4))
    assert blocks.take_changes() == [((0, key(1)), True)]
    blocks.reused([2])
    assert blocks.take_changes() == []
    blocks.filled(0, key(1), (3, 4))  # known
    blocks.reused({3})
    assert blocks.take_changes() == [((0, key(1)), False)] and not blocks.copies
    blocks.reused([1, 4])
    assert blocks.take_changes() == []


def test_the_memory_of_an_engines_blocks_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "LIMIT_BLOCKS", 10)
    blocks = EngineBlocks(lambda page: "mark")
    for page in range(1, 100):
        blocks.filled(0, key(page), (page,))
    assert len(blocks.copies) == 10
