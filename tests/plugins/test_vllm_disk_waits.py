"""Which blocks are read from disk for a request, when, and how long the request is held back for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier_vllm import daemon as plugin_daemon
from kvtier_vllm import lookups
from kvtier_vllm.forecast import Forecast
from kvtier_vllm.lookups import EngineLimits
from kvtier_vllm.prompt import LookupQuery, Wait
from support.daemons import Daemon
from support.fake_engine import BLOCK, LAYERS, PAGE_BYTES, FakeEngine, FakeRequest, spec_for

BLOCKS = 8
PROMPT = range(BLOCKS * BLOCK + 3)
BYTES = LAYERS * PAGE_BYTES
WARM_BLOCKS = (4 << 20) // BYTES
EngineOf = Callable[..., FakeEngine]


@pytest.fixture
def daemon(daemon_of: Callable[..., Daemon], tmp_path: Path) -> Daemon:
    """A daemon with a disk, which is written to immediately."""
    cold = tmp_path / "cold"
    cold.mkdir()
    config = f'[cold]\ndirectories = ["{cold}"]\nsize = "96MiB"\nwrite = "through"\n'
    return daemon_of(config='[warm]\nsize = "4MiB"\n' + config)


@pytest.fixture
def engine(daemon: Daemon, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """An engine whose prompt is only on disk, and which expects a read to be faster than recompute."""
    monkeypatch.setattr(plugin_daemon, "WAIT_IN_STEP_S", 20.0)  # a busy machine is slow
    monkeypatch.setattr(Forecast, "recompute_s", lambda *_: float("inf"))
    monkeypatch.setattr(Forecast, "prefill", (0.0, 0.0))
    engine = engine_of(daemon, patience_ms=20_000)
    engine.serve(PROMPT)
    crowd_out(daemon, engine)
    return engine


def crowd_out(daemon: Daemon, engine: FakeEngine) -> None:
    """Fill the memory with other blocks after the prompt was written to disk, and wait until these are
    written too: blocks that are only in memory keep their slots, and a read from disk would find none."""
    daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] >= BLOCKS)
    with daemon.connect() as client:
        space = client.open(spec_for(engine.layout))
        for token in (1, 2, 3):
            keys = space.keys([token] * (BLOCK * WARM_BLOCKS // 2))
            space.save(keys, bytes(len(keys) * BYTES))
    daemon.wait_for(lambda stats: not stats["tiers"]["cold"]["dirty"])


def blocks_read(daemon: Daemon) -> int:
    return int(daemon.stats()["tiers"]["cold"]["states"]["read"])


class Cache:
    """The engine's own cache, as its cache manager reports it: `tokens` tokens of any prompt."""

    def __init__(self, tokens: int, free_blocks: int = 1000) -> None:
        self.tokens = tokens
        self.coordinator = SimpleNamespace(
            find_longest_cache_hit=lambda hashes, most: ((), self.tokens, 0)
        )
        self.block_pool = SimpleNamespace(get_num_free_blocks=lambda: free_blocks)


@pytest.mark.parametrize("told", [True, False])
def test_blocks_that_the_engine_has_itself_are_not_read_from_disk(
    daemon: Daemon, engine: FakeEngine, told: bool
) -> None:
    """The engine reports its cached tokens early, or only when the scheduler asks."""
    if told:
        enter(engine, Cache(5 * BLOCK))
    request = engine.serve(PROMPT, resident=5 * BLOCK)
    assert request.cached == BLOCKS * BLOCK
    assert engine.scheduler.counts["hit_tokens:cold"] == 3 * BLOCK
    assert blocks_read(daemon) == 3


def test_blocks_that_the_engine_lost_meanwhile_are_read(daemon: Daemon, engine: FakeEngine) -> None:
    cache = Cache(5 * BLOCK)
    enter(engine, cache)
    request = engine.add(PROMPT, resident=2 * BLOCK)
    engine.run(request)
    assert request.cached == BLOCKS * BLOCK and not engine.wrong_pages(request)
    assert blocks_read(daemon) == 6
    engine.finish(request)


def test_no_block_is_read_if_the_engine_has_all_of_them(daemon: Daemon, engine: FakeEngine) -> None:
    enter(engine, Cache(BLOCKS * BLOCK))
    assert engine.serve(PROMPT, resident=BLOCKS * BLOCK).cached == BLOCKS * BLOCK
    assert blocks_read(daemon) == 0


def test_the_engines_own_blocks_are_looked_up_once_if_all_are_in_memory(
    engine: FakeEngine,
) -> None:
    """A lookup covers each block: for a prompt of 100k tokens it takes a millisecond, in each step that
    the request waits."""
    engine.serve(PROMPT)  # from disk
    cache, looks = Cache(0), list[int]()
    find = cache.coordinator.find_longest_cache_hit
    cache.coordinator.find_longest_cache_hit = lambda *one: looks.append(1) or find(*one)
    enter(engine, cache)
    request = engine.add(PROMPT)
    prompt = engine.scheduler._prompts[request.request_id]
    engine.waiting.remove(request)
    engine.until(lambda: prompt.lookup.lease is not None)
    assert prompt.lookup.lease is not None and prompt.lookup.lease.ready == BLOCKS
    for _ in range(5):
        engine.step()
    assert len(looks) == 1


def enter(engine: FakeEngine, cache: Any, **limits: Any) -> None:
    engine.scheduler.set_limits(EngineLimits(cache, [BLOCK], **limits))


# --- how long a request is held back ---------------------------------------------------------


def held(engine: FakeEngine, request: FakeRequest, after_s: float) -> bool:
    """Whether the scheduler is told to ask again later, when it asked first `after_s` seconds ago."""
    side = engine.scheduler
    prompt, now = side._prompts[request.request_id], side._clock()
    prompt.lookup.wait.since = now - after_s
    return side.matched(request, 0)[0] is None


def on_its_way(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> FakeRequest:
    """A request with 3 blocks in memory. The others are being read, and will be for a long time."""
    side = engine.scheduler
    assert engine.serve(range(3 * BLOCK + 1)).cached == 3 * BLOCK
    request = engine.add(PROMPT)
    prompt = side._prompts[request.request_id]
    engine.waiting.remove(request)
    engine.until(lambda: not prompt.lookup.ticket and prompt.lookup.lease is not None)
    assert (
        prompt.lookup.lease is not None
        and prompt.lookup.lease.ready == 3
        and prompt.lookup.lease.coming == 5
    )
    prompt.lookup.lease.eta_ms, prompt.lookup.answered = 5000.0, LookupQuery(read_disk=True)
    return request


@pytest.fixture
def patient(daemon: Daemon, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """An engine with a patience of 10 s, and whose prompt is only on disk."""
    monkeypatch.setattr(plugin_daemon, "WAIT_IN_STEP_S", 20.0)  # a busy machine is slow
    monkeypatch.setattr(Forecast, "recompute_s", lambda *_: float("inf"))
    monkeypatch.setattr(Forecast, "prefill", (0.0, 0.0))
    monkeypatch.setattr(Forecast, "longest_step_s", lambda _: 0.0)
    engine = engine_of(daemon, patience_ms=10_000)
    engine.serve(PROMPT)
    crowd_out(daemon, engine)
    return engine


def test_a_request_is_held_back_while_the_scheduler_asks_again_in_time(
    patient: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = on_its_way(patient, monkeypatch)
    assert held(patient, request, 9.0)
    assert patient.scheduler.matched(request, 0)[0] is None
    assert not held(patient, request, 10.5)


def test_a_request_is_not_held_back_if_the_next_step_ends_after_its_patience(
    patient: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler asks only between steps: ready blocks are loaded, and the others recomputed."""
    request = on_its_way(patient, monkeypatch)
    other = patient.add(range(5000, 5000 + 2 * BLOCK))  # the next steps compute it
    patient.waiting.remove(other)
    monkeypatch.setattr(Forecast, "longest_step_s", lambda _: 2.0)
    assert held(patient, request, 7.0)
    side = patient.scheduler
    side._prompts[request.request_id].lookup.wait.since = side._clock() - 9.0
    assert side.matched(request, 0)[0] == 3 * BLOCK


@pytest.mark.sampled(1)
@pytest.mark.parametrize("limit", ["blocks", "seats", "tokens"])
def test_a_request_is_not_held_back_if_another_would_take_its_place(
    patient: FakeEngine, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """If held back, the request would be asked about only after the other one ended."""
    request = on_its_way(patient, monkeypatch)
    monkeypatch.setattr(Forecast, "longest_step_s", lambda _: 2.0)
    other = patient.add(range(5000, 5000 + 20 * BLOCK))
    patient.waiting.remove(other)
    few = {"blocks": Cache(0, free_blocks=10), "seats": Cache(0), "tokens": Cache(0)}[limit]
    limits = {"blocks": {}, "seats": {"most_requests": 1}, "tokens": {"step_tokens": 4 * BLOCK}}[
        limit
    ]
    enter(patient, Cache(0))
    assert held(patient, request, 0.0)
    enter(patient, few, **limits)
    patient.scheduler._decisions.queue.next_step()
    assert not held(patient, request, 0.0)


def test_a_new_lookup_is_answered_at_once_if_there_is_no_time_to_hold_the_request(
    daemon: Daemon, patient: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine lost its cached blocks after the request was queued: blocks that the daemon has in
    memory are loaded without another step."""
    monkeypatch.setattr(lookups, "LAST_WAIT_S", 10.0)
    assert patient.serve(range(3 * BLOCK + 1)).cached == 3 * BLOCK
    enter(patient, Cache(5 * BLOCK), most_requests=0)
    request, _ = patient.add(PROMPT), patient.add(range(5000, 5000 + BLOCK))
    side = patient.scheduler
    assert side._prompts[request.request_id].lookup.lease_first == 5
    assert side.matched(request, 0)[0] == 3 * BLOCK


def test_the_reasons_for_holding_a_request_back_are_distinguished() -> None:
    wait = Wait()
    assert wait.begin(10.0) == 10.0
    wait.hold("answer", 10.0)
    wait.arrived("answer", 10.25)
    wait.begin(11.0)
    wait.hold("disk", 11.0)
    wait.begin(12.0)
    wait.hold("disk", 12.0)
    wait.arrived("disk", 12.5)
    wait.begin(13.0)
    assert wait.end(13.0) == 3.0
    assert wait.parts == {"answer": 0.25, "disk": 1.5, "scheduler": 1.25}
    assert wait.end(14.0) is None


def test_blocks_read_since_the_last_answer_are_loaded_if_there_is_no_time_to_hold(
    daemon: Daemon, patient: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that were read from disk for a request are not recomputed."""
    monkeypatch.setattr(lookups, "LAST_WAIT_S", 10.0)
    enter(patient, Cache(0))
    request = patient.add(PROMPT)  # the first in the queue: its blocks are read
    prompt = patient.scheduler._prompts[request.request_id]
    assert prompt.lookup.lease is not None and prompt.lookup.lease.coming == BLOCKS
    daemon.wait_for(lambda stats: stats["tiers"]["cold"]["states"]["read"] == BLOCKS)
    patient.add(range(5000, 5000 + BLOCK))
    enter(patient, Cache(0), most_requests=0)
    assert patient.scheduler.matched(request, 0)[0] == BLOCKS * BLOCK


def test_blocks_that_the_engine_loses_while_a_request_is_queued_are_read_in_advance(
    daemon: Daemon, patient: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "LAST_WAIT_S", 10.0)
    cache = Cache(5 * BLOCK)
    enter(patient, cache)
    request = patient.add(PROMPT)
    patient.waiting.remove(request)
    daemon.wait_for(lambda stats: stats["tiers"]["cold"]["states"]["read"] == 3)
    cache.tokens = 2 * BLOCK
    prompt = patient.scheduler._prompts[request.request_id]
    patient.until(
        lambda: (
            prompt.lookup.lease_first == 2
            and prompt.lookup.lease is not None
            and not prompt.lookup.lease.coming
        )
    )
    assert blocks_read(daemon) == 6
    assert patient.scheduler.matched(request, 2 * BLOCK)[0] == 6 * BLOCK


@pytest.mark.parametrize("held", [0, 3])
def test_blocks_that_the_engine_lost_are_not_loaded_from_a_dead_daemon(
    daemon: Daemon, patient: FakeEngine, held: int
) -> None:
    """The engine had 5 blocks itself when the request was queued, so the lease lacks these. `held` of the
    blocks after them are leased."""
    cache = Cache(5 * BLOCK)
    enter(patient, cache)
    request = patient.add(PROMPT)
    patient.waiting.remove(request)
    prompt = patient.scheduler._prompts[request.request_id]
    state = prompt.lookup
    if held:
        patient.until(lambda: state.lease is not None and not state.lease.coming)
    assert state.lease is not None and state.lease_first == 5
    assert (state.lease.ready, len(state.lease.parts)) == (5 + held, min(held, 1))
    daemon.process.kill()
    daemon.process.wait()
    patient.until(lambda: patient.scheduler._daemon.session is None)
    request.resident = 2 * BLOCK
    patient.waiting.append(request)
    patient.run(request)
    assert request.cached == 2 * BLOCK and not request.failed
    assert not patient.wrong_pages(request)
