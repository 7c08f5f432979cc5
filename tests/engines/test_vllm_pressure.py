"""A cache that is too small: requests are preempted, aborted and resumed, and pages are reused while
they are saved. Answers are correct, loaded pages are those that were saved, and nothing remains held."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as NotYet
from pathlib import Path
from typing import Any

import pytest

from engines.served import Records, Served
from support.daemons import Daemon
from support.effort import effort
from support.prompts import BLOCK, check_same, prompt

PAGES = 40  # of which vLLM reserves one
CHUNK = 4 * BLOCK  # of a prompt, in one step
GROWING = [prompt(seed, 250) for seed in range(200, 206)]
GROWN = 200  # tokens, by which four of the requests no longer fit
MANY = [prompt(seed, 250 + seed % 20) for seed in range(210, 228)]
TOKENS = 40
STILL_S = 1.0  # an event that happens immediately would be seen within this time


@pytest.fixture(scope="module")
def engine(shared_daemon: Daemon, engine_of: Callable[..., Any]) -> Served:
    started = engine_of(
        "llama", shared_daemon.socket, script="serving.py", connector="SlowConnector",
        extra={"load": "async"},
        num_gpu_blocks_override=PAGES, max_model_len=512, max_num_batched_tokens=CHUNK,
        enable_chunked_prefill=True, disable_log_stats=False,
    )  # fmt: skip
    return Served(started)


@pytest.fixture(scope="module")
def records(engine: Served) -> Records:
    return Records(engine.engine.records)


@pytest.fixture(autouse=True)
def nothing_is_left(
    engine: Served, records: Records, shared_daemon: Daemon, request: pytest.FixtureRequest
) -> Iterator[None]:
    yield
    engine.check_nothing_is_held(shared_daemon)
    assert records.wrong() + records.wrong() == []


def test_preempted_requests_have_the_same_answers_as_alone(
    engine: Served, records: Records
) -> None:
    """Their blocks are saved when they are preempted, and loaded when they are resumed."""
    right = engine.compute(GROWING, GROWN)
    before = engine.state()["preemptions"]
    for _ in range(3):
        engine.reset()
        running = [engine.begin(one, GROWN) for one in GROWING]
        for one, other in zip(running, right, strict=True):
            check_same(one.result(), other)
    state = engine.state()
    print(f"{state['preemptions'] - before} preemptions, {state['counts']}")
    assert state["preemptions"] - before >= 3
    assert not any(name.startswith("load_failed") for name in state["counts"])
    assert records.wrong() == [] and records.compared > 50


def test_reused_pages_are_never_loaded_with_wrong_content(engine: Served, records: Records) -> None:
    """The first pass computes and saves, the next ones load; in each pass requests wait for pages."""
    right = engine.compute(MANY, TOKENS)
    before = records.compared
    for _ in range(effort(3, 4, 4)):
        running = [engine.begin(one, TOKENS) for one in MANY]
        for one, other in zip(running, right, strict=True):
            check_same(one.result(), other)
        assert records.wrong() == []
    assert records.compared - before > 100


@pytest.mark.parametrize("state", ["queued", "loading", "running", "saving"])
def test_aborted_requests_do_not_affect_others(engine: Served, state: str) -> None:
    """While other requests run, for which their pages become free."""
    known = [prompt(seed, 330) for seed in range(230, 234)]
    right = engine.compute(known, 8)
    for one in known:
        engine.serve(one, 8)
    wait_for_saves(engine, known)
    aborted = 0
    for number in range(12):
        engine.reset()
        others = [engine.begin(one, 8) for one in known[1:3]]
        # A prompt that is to be loaded is known, one that is to be saved is new.
        mine = prompt(300 + number, 330) if state in ("saving", "running") else known[number % 4]
        given_up = engine.begin(mine, 100, abort=state)
        aborted += given_up.result().get("aborted") == state
        for one, other in zip(others, right[1:3], strict=True):
            check_same(one.result(), other)
    assert aborted >= 6
    engine.reset()
    check_same(engine.serve(known[0], 8), right[0])


def wait_for_saves(engine: Served, prompts: list[list[int]]) -> None:
    """Wait until all whole blocks of these prompts are loaded."""
    for one in prompts:
        for _ in range(100):
            engine.reset()
            if engine.serve(one, 1)["cached"] == (len(one) - 1) // BLOCK * BLOCK:
                break
        else:
            raise AssertionError("not saved")


def test_a_reset_preempts_running_requests_and_forgets_saved_blocks(engine: Served) -> None:
    one = prompt(240, 330)
    (right,) = engine.compute([one], 100)
    engine.serve(one, 100)
    wait_for_saves(engine, [one])
    engine.reset(connector=True)
    running = engine.begin(one, 100)
    while engine.state()["free"] == PAGES - 1:
        assert not running.done()
    # The request resumes in the same step with a new generation, as is required when weights are
    # changed in place.
    assert engine.reset(running=True, connector=True)
    assert not running.done()
    done = running.result()
    check_same(done, right)
    assert done["cached"] == 0
    # Blocks computed after the reset belong to the new generation.
    wait_for_saves(engine, [one])


class Held:
    """Saves wait at this point until the context ends."""

    def __init__(self, folder: Path, where: str) -> None:
        self._flag, self._now = folder / where, folder / f"{where}.now"

    def __enter__(self) -> Held:
        self._now.unlink(missing_ok=True)
        self._flag.touch()
        return self

    def __exit__(self, *_: object) -> None:
        self._flag.unlink(missing_ok=True)

    def wait_for_one(self) -> None:
        deadline = time.monotonic() + 20
        while not self._now.exists():
            assert time.monotonic() < deadline, "nothing is saved"
            time.sleep(0.01)


def fill(engine: Served, seed: int) -> list[Any]:
    """Requests that need more pages than the engine has."""
    return [engine.begin(prompt(one, 480), 8) for one in range(seed, seed + 3)]


def test_a_page_is_not_reused_during_its_copy(engine: Served) -> None:
    """The step that would overwrite it waits for the copy, and the copied page is intact."""
    one = prompt(250, 330)
    (right,) = engine.compute([one], 8)
    engine.reset()
    with Held(engine.engine.records, "copying") as held:
        # Each chunk is saved separately: the first one is held, and the others are queued behind
        # it.
        engine.serve(one, 8)
        held.wait_for_one()
        others = fill(engine, 260)
        with pytest.raises(NotYet):
            for other in others:
                other.result(STILL_S)
    for other in others:
        assert other.result()["reason"] == "length"
    engine.reset()
    again = engine.serve(one, 8)
    check_same(again, right)
    assert CHUNK <= again["cached"] <= 10 * BLOCK


def test_a_save_whose_page_was_reused_is_aborted(engine: Served, shared_daemon: Daemon) -> None:
    """It had slots, and had copied nothing: none of its blocks is found, and no step waited."""
    one = prompt(270, 330)
    engine.check_nothing_is_held(shared_daemon)
    before = engine.state()["counts"].get("drop:overwritten", 0)
    engine.reset()
    with Held(engine.engine.records, "reserved") as held:
        engine.serve(one, 8)
        held.wait_for_one()
        for other in fill(engine, 280):
            assert other.result()["reason"] == "length"
    state = engine.check_nothing_is_held(shared_daemon)
    assert state["counts"]["drop:overwritten"] - before >= 10
    engine.reset()
    assert engine.serve(one, 8)["cached"] == 0
