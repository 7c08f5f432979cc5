"""Saves of an engine that exceed the daemon's memory while its disk writes what was saved before."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier_vllm import worker
from kvtier_vllm.forecast import Forecast
from support.daemons import Daemon
from support.fake_engine import BLOCK, FakeEngine, layout_of
from support.gated import WRITE_BLOCKS, gated_daemon, unwritten

BLOCKS = 64  # of a request; memory has room for two
EngineOf = Callable[..., FakeEngine]


@pytest.fixture(autouse=True)
def load_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine computes in an instant: it would compute some blocks again rather than wait for the disk."""
    monkeypatch.setattr(Forecast, "recompute_s", lambda *_: float("inf"))


def tokens(number: int) -> range:
    return range(number * 10_000, number * 10_000 + BLOCKS * BLOCK)


def full_of_unwritten(
    daemon_of: Callable[..., Daemon], engine_of: EngineOf, folder: Path, held: bool = False
) -> tuple[Daemon, Path, FakeEngine]:
    room = 2 * BLOCKS * layout_of().groups[0].block_bytes
    daemon, gate = gated_daemon(daemon_of, folder, room, held=held)
    engine = engine_of(daemon, pages=4 * BLOCKS, patience_ms=60_000)
    for number in range(2):
        engine.serve(tokens(number))
    return daemon, gate, engine


def is_stored(daemon: Daemon, engine: FakeEngine, number: int) -> bool:
    """Whether an engine gets all blocks of a request but the last one, which it computes itself, and saves
    none again. It asks more than once: a busy machine may take a read for one of a busy disk."""
    before = daemon.stats()["saved_tokens"]
    asked = (engine.serve([*tokens(number), 0]).cached for _ in range(20))
    return any(cached == BLOCKS * BLOCK for cached in asked) and (
        daemon.stats()["saved_tokens"] == before
    )


def test_a_burst_beyond_the_memory_waits_for_the_disk_and_loses_no_block(
    daemon_of: Callable[..., Daemon], engine_of: EngineOf, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(worker, "SAVE_WAIT_S", 60.0)
    daemon, gate, engine = full_of_unwritten(daemon_of, engine_of, tmp_path)

    def open_gate() -> None:
        daemon.wait_for(lambda stats: stats["refused_tokens"]["writing"])
        gate.touch()

    opening = threading.Thread(target=open_gate)
    opening.start()
    engine.serve(tokens(2))
    opening.join()
    daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] == 3 * BLOCKS)
    assert unwritten(daemon.stats()) == 0
    assert [is_stored(daemon, engine, number) for number in range(3)] == [True] * 3


def test_a_burst_is_spared_between_the_first_blocks_on_disk_and_the_end_of_their_write(
    daemon_of: Callable[..., Daemon], engine_of: EngineOf, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(worker, "SAVE_WAIT_S", 60.0)
    daemon, gate, engine = full_of_unwritten(daemon_of, engine_of, tmp_path, held=True)
    gate.touch()
    daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] == 2 * WRITE_BLOCKS)

    def end_writes() -> None:
        daemon.wait_for(lambda stats: stats["refused_tokens"]["writing"])
        gate.with_suffix(".ends").touch()

    ending = threading.Thread(target=end_writes)
    ending.start()
    engine.serve(tokens(2))
    ending.join()
    daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] == 3 * BLOCKS)
    assert unwritten(daemon.stats()) == 0


def test_a_save_that_waits_for_the_disk_ends_when_the_engine_needs_its_pages(
    daemon_of: Callable[..., Daemon], engine_of: EngineOf, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(worker, "SAVE_WAIT_S", 60.0)
    daemon, gate, engine = full_of_unwritten(daemon_of, engine_of, tmp_path)
    request = engine.run(engine.add(tokens(2)))
    daemon.wait_for(lambda stats: stats["refused_tokens"]["writing"])
    assert engine.scheduler.in_flight["saves"]
    engine.finish(request)  # the next request gets its pages
    began = time.monotonic()
    other = engine.run(engine.add(tokens(3)[: BLOCK - 1]))
    assert not engine.wrong_pages(other)
    assert time.monotonic() - began < 30.0
    engine.finish(other)
    assert unwritten(daemon.stats()) == 0
    assert [is_stored(daemon, engine, number) for number in range(2)] == [True] * 2
    gate.touch()  # or the daemon tries to write until its limit for a stop


def test_a_save_that_has_waited_in_vain_leaves_a_hole_and_evicts_nothing(
    daemon_of: Callable[..., Daemon], engine_of: EngineOf, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(worker, "SAVE_WAIT_S", 0.01)
    daemon, gate, engine = full_of_unwritten(daemon_of, engine_of, tmp_path)
    engine.serve(tokens(2))
    assert daemon.stats()["refused_tokens"]["writing"]
    assert unwritten(daemon.stats()) == 0
    assert [is_stored(daemon, engine, number) for number in range(2)] == [True] * 2
    gate.touch()  # or the daemon tries to write until its limit for a stop
