"""What the daemon knows of the blocks in an engine's own cache, with a real daemon."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvtier.link import Link
from kvtier_plugins import residency
from kvtier_plugins.residency import EngineBlocks, ResidencyReports
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
    daemon = daemon_of(warm="16MiB")
    engine = engine_of(daemon, pages=16)
    engine.daemon = daemon  # type: ignore[attr-defined]
    engine.scheduler.watch_pages(lambda page: page not in forgotten)
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
    other = engine_of(daemon, pages=16)
    engine.close()
    until(daemon, other, blocks=0, engines=0)


def test_groups_and_pages_of_different_sizes(daemon_of: Any, engine_of: EngineOf) -> None:
    daemon, layout = daemon_of(warm="16MiB"), layout_of([0, 0], parts=[2, 1])
    engine = engine_of(daemon, layout, pages=64)
    engine.scheduler.watch_pages(lambda page: True)
    engine.serve(PROMPT)
    until(daemon, engine, blocks=8, bytes=4 * layout.block_bytes)


def test_without_the_option_nothing_is_reported(daemon_of: Any, engine_of: EngineOf) -> None:
    daemon = daemon_of(warm="16MiB")
    engine = engine_of(daemon, residency=False)
    engine.scheduler.watch_pages(lambda page: True)
    engine.serve(PROMPT)
    assert shown(daemon)["entered_blocks"] == 0


def test_a_daemon_without_it_gets_no_report(
    daemon_of: Any, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older daemon ends the connection of a client that sends a message that it does not know."""
    daemon = daemon_of(warm="16MiB")
    stats = residency.Client.stats

    def older(client: Any) -> dict[str, Any]:
        return {name: one for name, one in stats(client).items() if name != "hot"}

    told: list[object] = []
    tell = Link.tell
    monkeypatch.setattr(residency.Client, "stats", older)
    monkeypatch.setattr(Link, "tell", lambda link, one: (told.append(one), tell(link, one))[1])
    engine = engine_of(daemon)
    engine.scheduler.watch_pages(lambda page: True)
    engine.serve(PROMPT)
    resident = engine.scheduler._resident
    assert resident is not None
    engine.until(lambda: resident.reports.ignored)
    engine.serve(range(1000, 1000 + 4 * BLOCK + 3))
    assert not [one for one in told if type(one).__name__ == "Resident"]
    monkeypatch.undo()
    assert shown(daemon)["entered_blocks"] == 0
    assert engine.scheduler.counts["lost"] == 0


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
    session, blocks = Connected(), EngineBlocks()
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
    blocks = EngineBlocks()
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
    blocks = EngineBlocks()
    for page in range(1, 100):
        blocks.filled(0, key(page), (page,))
    assert len(blocks.copies) == 10
