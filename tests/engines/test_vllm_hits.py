"""A vLLM engine loads exactly the bytes that it saved: within one life and over restarts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.daemons import Daemon, start_daemon
from support.prompts import BLOCK, check_same, prompt


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("daemon")


@pytest.fixture(scope="module")
def daemons(folder: Path) -> Iterator[list[Daemon]]:
    running: list[Daemon] = []
    yield running
    for daemon in running:
        daemon.stop()


def start(folder: Path, running: list[Daemon]) -> Daemon:
    cold = folder / "cold"
    cold.mkdir(exist_ok=True)
    config = f'[warm]\nsize = "128MiB"\n[cold]\ndirectories = ["{cold}"]\nsize = "512MiB"\n'
    running.append(start_daemon(folder, config=config))
    return running[-1]


@pytest.fixture(scope="module")
def daemon(folder: Path, daemons: list[Daemon]) -> Daemon:
    return start(folder, daemons)


@pytest.fixture(scope="module")
def engine(daemon: Daemon, engine_of: Callable[..., Any]) -> Any:
    return engine_of("llama", daemon.socket, extra={"socket": daemon.socket, "load": "sync"})


def test_a_prompt_is_loaded_after_the_engine_forgot_it(engine: Any, daemon: Daemon) -> None:
    (first,) = engine.generate([prompt(1)], 40)
    assert first["cached"] == 0
    # Ten blocks of the prompt, and one that was filled while decoding.
    engine.wait_for_saves(daemon, 11)
    engine.reset()
    engine.forget_records()
    (again,) = engine.generate([prompt(1)], 40)
    assert again["cached"] == 10 * BLOCK
    check_same(first, again)
    count, wrong = engine.compare()
    assert (count, wrong) == (10 * 4, [])
    assert all(one["now"] for one in engine.recorded("loaded"))


def test_decoded_blocks_are_found_by_the_next_turn(engine: Any, daemon: Daemon) -> None:
    (first,) = engine.generate([prompt(2)], 40)
    turn = prompt(2) + first["tokens"]
    engine.wait_for_saves(daemon, 22)
    engine.reset()
    engine.forget_records()
    assert engine.generate([turn], 1)[0]["cached"] == 11 * BLOCK
    count, wrong = engine.compare()
    assert (count, wrong) == (11 * 4, [])


@pytest.mark.parametrize("how, wrong_pages", [("swap", 8), ("zero", 1)])
def test_a_wrong_page_is_detected(engine: Any, daemon: Daemon, how: str, wrong_pages: int) -> None:
    """The controls: two blocks of a prefix are exchanged, or one page is zeroed."""
    engine.generate([prompt(1)], 1)
    engine.reset()
    engine.forget_records()
    engine.break_loads(how)
    try:
        engine.generate([prompt(1)], 8)
    finally:
        engine.break_loads("")
    count, wrong = engine.compare()
    assert count == 10 * 4 and len(wrong) == wrong_pages
    engine.reset()


def check_failed_load(engine: Any) -> None:
    """A load that fails is recomputed, and none of its pages is saved."""
    engine.reset()
    (right,) = engine.generate([prompt(1)], 40)
    assert right["cached"] == 10 * BLOCK
    engine.reset()
    engine.break_loads("stale")
    try:
        (computed,) = engine.generate([prompt(1)], 40)
    finally:
        engine.break_loads("")
    check_same(right, computed)
    assert engine.recorded("held")[-1]["counts"]["load_failed:stale"] == 1
    engine.reset()
    check_same(right, engine.generate([prompt(1)], 40)[0])


def test_a_load_that_fails_within_a_step_is_computed(engine: Any) -> None:
    check_failed_load(engine)


def test_another_prompt_has_no_hits(engine: Any) -> None:
    engine.reset()
    one, other = engine.generate([prompt(1), prompt(3)], 8)
    assert one["cached"] == 10 * BLOCK and other["cached"] == 0
    assert one["tokens"] != other["tokens"]


def test_many_prompts_at_once(engine: Any, daemon: Daemon) -> None:
    prompts = [prompt(1, 64) + prompt(seed, 100 + 10 * seed) for seed in range(10, 26)]
    first = engine.generate(prompts, 12)
    engine.wait_for_saves(daemon, 22 + 16 * 4)
    engine.reset()
    engine.forget_records()
    again = engine.generate(prompts, 12)
    for one, other in zip(first, again, strict=True):
        check_same(one, other)
        assert other["cached"] >= 5 * BLOCK
    count, wrong = engine.compare()
    assert count >= 16 * 3 * 4 and wrong == []


def test_a_reset_of_the_connector_forgets(engine: Any, daemon: Daemon) -> None:
    engine.reset(connector=True)
    (one,) = engine.generate([prompt(1)], 1)
    assert one["cached"] == 0


def test_nothing_is_held_after_all_requests_ended(engine: Any, daemon: Daemon) -> None:
    engine.generate([prompt(50, 40)], 1)
    held = engine.recorded("held")[-1]
    assert (held["prompts"], held["leases"], held["tickets"]) == (0, 0, 0)
    # The daemon may read the release after it answers this client.
    daemon.wait_for(lambda stats: not stats["tenants"]["default"]["leases"], 20.0)


def test_warm_and_cold_hits_over_restarts(
    engine: Any, daemon: Daemon, daemons: list[Daemon], folder: Path,
    engine_of: Callable[..., Any],
) -> None:  # fmt: skip
    """The engine restarts: hits from memory. The daemon restarts: hits from the disk. With loads
    between steps."""
    engine.stop()
    extra = {"socket": daemon.socket, "load": "async", "patience_ms": 5000}
    second = engine_of("llama", daemon.socket, engine.records, extra=extra, spawned=True)
    (plain,) = second.generate([prompt(4)], 8)
    (warm,) = second.generate([prompt(2)], 8)
    assert (plain["cached"], warm["cached"]) == (0, 10 * BLOCK)
    count, wrong = second.compare()
    assert count >= 10 * 4 and wrong == []
    check_failed_load(second)
    daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] >= 33, 30.0)
    daemon.stop()
    second.reset()
    (without,) = second.generate([prompt(2)], 8)
    check_same(warm, without)
    assert without["cached"] == 0
    start(folder, daemons)
    second.reset()
    # The plugin reconnects by itself, within its retry interval; the daemon may still be finding blocks.
    for _ in range(100):
        second.forget_records()
        (cold,) = second.generate([prompt(2)], 8)
        second.reset()
        if cold["cached"] == 10 * BLOCK:
            break
    assert cold["cached"] == 10 * BLOCK
    check_same(warm, cold)
    count, wrong = second.compare()
    assert count == 10 * 4 and wrong == []
    assert not any(one["now"] for one in second.recorded("loaded"))
    second.stop()
