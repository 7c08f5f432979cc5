"""The plugin's outputs: counts, tiers, events, pins, timelines."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier import Keys, wire
from kvtier.client import Lease
from kvtier.wire import SLOT_BYTES
from kvtier_kernels import release_views, views
from kvtier_vllm import events as plugin_events
from kvtier_vllm import stats as plugin_stats
from kvtier_vllm import timeline as plugin_timeline
from kvtier_vllm.events import Removed, Stored
from kvtier_vllm.forecast import Forecast
from kvtier_vllm.options import LIMIT_PIN_S, RequestOptions, read_request_options
from kvtier_vllm.stats import (
    COUNTERS,
    LIMIT_ADAPTERS,
    LIMIT_KNOWN_ADAPTERS,
    Busiest,
    PluginStats,
    added,
)
from kvtier_vllm.timeline import Timelines
from support.daemons import Daemon
from support.fake_engine import (
    BLOCK,
    LAYERS,
    PAGE_BYTES,
    FakeEngine,
    FakeRequest,
    layout_of,
    spec_for,
)

PROMPT = range(8 * BLOCK + 3)
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


def crowd_out(daemon: Daemon, engine: FakeEngine, on_disk: int = 0) -> None:
    """Evict all blocks without leases from memory, after at least `on_disk` blocks were written."""
    if on_disk:
        daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] >= on_disk)
    with daemon.connect() as client:
        space = client.open(spec_for(engine.layout))
        for start in range(1, 3):
            tokens = [start] * (BLOCK * WARM_BLOCKS // 2)
            parts = engine.layout.shards.count * len(engine.layout.groups)
            keys = space.keys(tokens)[: WARM_BLOCKS // 2 // parts]
            for group in range(len(engine.layout.groups)):
                for shard in range(engine.layout.shards.count):
                    space.save(keys, bytes(len(keys) * BYTES), group, shard)
        tokens = [7] * (BLOCK * WARM_BLOCKS)
        keys = space.keys(tokens)[: WARM_BLOCKS // parts]
        for group in range(len(engine.layout.groups)):
            for shard in range(engine.layout.shards.count):
                space.save(keys, bytes(len(keys) * BYTES), group, shard)


def hits(engine: FakeEngine) -> tuple[int, int]:
    counts = engine.scheduler.counts
    return counts["hit_tokens:warm"], counts["hit_tokens:cold"]


# --- counts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", ["sync", "async"])
def test_a_hit_is_counted_in_the_tier_of_the_first_lookup(
    daemon: Daemon, engine_of: EngineOf, load: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(daemon, load=load, patience_ms=20_000)
    monkeypatch.setattr(Forecast, "recompute_s", lambda *_: float("inf"))
    monkeypatch.setattr(Forecast, "prefill", (0.0, 0.0))
    engine.serve(PROMPT)
    engine.serve(PROMPT)
    assert hits(engine) == (8 * BLOCK, 0)
    crowd_out(daemon, engine, on_disk=8)
    assert engine.serve(range(3 * BLOCK + 1)).cached == 3 * BLOCK
    assert hits(engine) == (8 * BLOCK, 3 * BLOCK)
    request = engine.serve(PROMPT)
    assert request.cached == 8 * BLOCK
    assert hits(engine) == (11 * BLOCK, 8 * BLOCK)
    assert request.sources == (3 * BLOCK, 5 * BLOCK), "told to the engine when it is allocated"


def test_a_failed_load_is_not_a_hit(shared: Daemon, engine_of: EngineOf) -> None:
    engine = engine_of(shared, load="async")
    engine.serve(PROMPT)
    request = engine.add(PROMPT)
    while engine.scheduler.matched(request, 0)[0] is None:
        engine.carry_out({}, {}, [])
    lease = engine.scheduler._prompts[request.request_id].lookup.lease
    assert isinstance(lease, Lease)
    lease.release()
    crowd_out(shared, engine)
    engine.run(request)
    assert request.failed
    counts = engine.scheduler.counts
    assert hits(engine) == (0, 0)
    assert counts["failed_tokens"] == 8 * BLOCK and counts["load_failed:stale"] == 1
    assert counts["loaded_tokens"] == counts["loaded_bytes"] == 0


@pytest.mark.parametrize("load", ["sync", "async"])
def test_a_block_that_was_overwritten_is_computed_again(
    own_daemon: Daemon, engine_of: EngineOf, load: str
) -> None:
    engine = engine_of(own_daemon, load=load, verify=True)
    engine.serve(PROMPT)
    assert engine.serve(PROMPT).cached == 8 * BLOCK
    request = engine.add(PROMPT)
    while engine.scheduler.matched(request, 0)[0] is None:
        engine.carry_out({}, {}, [])
    lease = engine.scheduler._prompts[request.request_id].lookup.lease
    assert isinstance(lease, Lease)
    part = lease.part(0, 0)
    with own_daemon.connect() as other:
        slot = part.slots[3 * SLOT_BYTES : 4 * SLOT_BYTES]
        (bytes_of,) = views(other.link.mappings[0], slot, 1, True)
        bytes_of[0] ^= 1
        release_views([bytes_of])
    engine.run(request)
    assert engine.scheduler.counts["load_failed:spoilt"] == 1
    assert engine.scheduler.counts["failed_tokens"] == 8 * BLOCK
    own_daemon.wait_for(lambda stats: stats["tenants"]["default"]["spoilt_blocks"] == 1)
    engine.serve(PROMPT)  # saves the block again, unless the failed request has done so
    assert engine.serve(PROMPT).cached == 8 * BLOCK
    assert engine.scheduler.counts["load_failed:spoilt"] == 1


def test_a_repeated_lookup_counts_one_miss(shared: Daemon, engine_of: EngineOf) -> None:
    engine = engine_of(shared)
    engine.serve(range(1000, 1000 + 2 * BLOCK))
    request = engine.add(PROMPT)
    while engine.scheduler.matched(request, 0)[0] is None:
        engine.carry_out({}, {}, [])
    for _ in range(3):
        assert engine.scheduler.matched(request, 0) == (0, False)
    engine.run(request)
    engine.until(lambda: not engine.scheduler.in_flight["saves"])
    engine.finish(request)
    assert engine.scheduler.counts["miss:absent"] == 2
    engine.serve(PROMPT)
    assert engine.scheduler.counts["miss:absent"] == 2


def test_blocks_in_the_engines_own_cache_are_not_misses(
    shared: Daemon, engine_of: EngineOf
) -> None:
    engine = engine_of(shared)
    engine.serve(range(1000, 1000 + 2 * BLOCK))
    missed = engine.scheduler.counts["miss:absent"]
    request = engine.add(PROMPT)
    engine.waiting.clear()
    prompt = engine.scheduler._prompts[request.request_id]
    engine.until(lambda: prompt.lookup.lease is not None)
    assert engine.scheduler.matched(request, 8 * BLOCK) == (0, False)
    engine.scheduler.allocated(request, [list(range(1, 10))], 0)
    assert engine.scheduler.counts["miss:absent"] == missed
    engine.finish(request)


def test_the_counts_of_ranks_add_up(shared: Daemon, engine_of: EngineOf) -> None:
    engine = engine_of(shared, layout_of([0, 20], ranks=2))
    for _ in range(2):
        engine.serve(PROMPT)
    told = engine.scheduler.stats.take()
    counts, times = told["counts"], told["times"]
    assert counts["saved_tokens"] == counts["loaded_tokens"] == 8 * BLOCK
    # Every block of the first group, on two ranks; blocks of a window are saved only while they
    # have pages.
    assert counts["saved_bytes"] == 2 * (8 + 8) * BYTES
    assert counts["loaded_bytes"] == 2 * (8 + 2) * BYTES
    # A window's blocks are saved in two parts: those it is about to lose, and those it keeps.
    assert (len(times["load_s"]), len(times["save_s"])) == (2, 2 * 3)
    assert len(times["wait_s"]) == 2 and min(min(one) for one in times.values()) >= 0
    assert engine.scheduler.stats.take() == {}, "each is told once"


def test_every_count_of_a_kind_has_its_series(own_daemon: Daemon, engine_of: EngineOf) -> None:
    """A reason without a series would be counted but not visible."""
    engine = engine_of(own_daemon, patience_ms=200)
    engine.until(lambda: engine.serve(PROMPT).cached > 0)
    engine.serve(PROMPT, kv_transfer_params={"kvtier": {"load": False}})
    own_daemon.process.kill()
    own_daemon.process.wait()
    engine.serve(range(500, 600))
    labels = {one.kind: one.values for one in COUNTERS}
    kinds = {name.partition(":")[0] for name in engine.scheduler.counts}
    assert {"hit_tokens", "miss", "not_saved", "saved_bytes"} <= kinds & set(labels)
    for name in engine.scheduler.counts:
        kind, _, label = name.partition(":")
        assert label in labels.get(kind, ()) or not label, name


def test_times_that_are_not_collected_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin_stats, "LIMIT_TIMES", 3)
    stats = PluginStats()
    for _ in range(5):
        stats.took("load_s", 1.0)
    assert stats.take() == {"counts": {}, "times": {"load_s": [1.0] * 3}}


def test_two_stats_are_merged() -> None:
    one = {"counts": {"a": 1}, "times": {"load_s": [1.0]}}
    other = {"counts": {"a": 2, "b": 1}, "times": {"load_s": [2.0], "save_s": [3.0]}}
    both = {"counts": {"a": 3, "b": 1}, "times": {"load_s": [1.0, 2.0], "save_s": [3.0]}}
    assert added(one, other) == both
    assert added({}, one) == added(one, {}) == one


# --- by adapter --------------------------------------------------------------------------------


def test_loads_and_saves_are_counted_by_adapter(
    shared: Daemon, engine_of: EngineOf, tmp_path: Path
) -> None:
    engine = engine_of(shared, layout_of([0, 20], ranks=2))
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    lora = SimpleNamespace(lora_name="support", lora_path=str(tmp_path))
    for request in ({"lora_request": lora}, {"lora_request": lora}, {}):
        engine.serve(PROMPT, **request)
    counts = engine.scheduler.stats.take()["counts"]
    told = {name: count for name, count in counts.items() if name.startswith("adapter_")}
    # Blocks of both groups on two ranks; of the window, two are loaded.
    assert told == {
        "adapter_requests:support": 2,
        "adapter_prompt_tokens:support": 2 * len(PROMPT),
        "adapter_saved_blocks:support": 2 * (8 + 8),
        "adapter_hit_tokens:support": 8 * BLOCK,
        "adapter_loaded_blocks:support": 2 * (8 + 2),
        "adapter_requests:none": 1,
        "adapter_prompt_tokens:none": len(PROMPT),
        "adapter_saved_blocks:none": 2 * (8 + 8),
    }
    assert engine.scheduler.stats.take() == {}, "each is told once, and no name is kept"


def test_names_of_adapters_that_are_not_collected_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plugin_stats, "LIMIT_TIMES", 3)
    stats = PluginStats()
    for number in range(5):
        for _ in range(2):
            stats.adapted("adapter_requests", str(number), 1)
    assert stats.take()["counts"] == {f"adapter_requests:{number}": 2 for number in range(3)}


def test_the_busiest_adapters_have_series_of_their_own() -> None:
    busiest = Busiest(replaces=True)
    names = [f"a{number}" for number in range(LIMIT_ADAPTERS)]
    for name in names:
        assert busiest.requested(name, 10) is None
    assert [busiest.label(name) for name in names] == names
    assert busiest.requested("new", 21) is None and busiest.label("new") == "other"
    assert busiest.requested("a3", 10) is None
    replaced = busiest.requested("new", 1)
    assert replaced in names and replaced != "a3"
    assert busiest.label("new") == "new" and busiest.label(replaced) == "other"
    assert busiest.requested(replaced, 11) is None, (
        "more than twice as busy as another, or not at all"
    )


def test_an_unused_adapter_loses_its_series() -> None:
    busiest = Busiest(replaces=True)
    for number in range(LIMIT_ADAPTERS):
        busiest.requested(f"old{number}", 100_000)
    rounds = 0
    while busiest.label("new") == "other":
        busiest.requested("new", 100)
        rounds += 1
    assert rounds < 1000


def test_the_first_adapters_keep_their_series_if_series_cannot_be_removed() -> None:
    busiest = Busiest(replaces=False)
    for number in range(LIMIT_ADAPTERS + 1):
        assert busiest.requested(f"a{number}", 1 + 100 * number) is None
    assert busiest.label(f"a{LIMIT_ADAPTERS}") == "other" and busiest.label("a0") == "a0"


@pytest.mark.parametrize("name", ["none", "other"])
def test_an_adapter_with_a_reserved_name_gets_no_series(name: str) -> None:
    busiest = Busiest(replaces=True)
    busiest.requested(name, 5)
    assert busiest.label(name) == name and not busiest._named


def test_the_memory_for_adapters_is_bounded() -> None:
    busiest = Busiest(replaces=True)
    for number in range(3 * LIMIT_KNOWN_ADAPTERS):
        busiest.requested(f"a{number}", 1)
    assert len(busiest._recent) <= LIMIT_KNOWN_ADAPTERS and len(busiest._named) == LIMIT_ADAPTERS


# --- events ------------------------------------------------------------------------------------


class Index:
    """The index of a program that follows the engine's events."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.there: set[tuple[int, int, bytes]] = set()
        self.tokens: dict[bytes, list[int]] = {}

    def listen(self) -> None:
        for event in self.engine.scheduler.take_events():
            names = {(event.tier, event.group, one) for one in event.hashes}
            if isinstance(event, Removed):
                assert names <= self.there, "only what was stored is removed"
                self.there -= names
                continue
            assert not names & self.there, "stored once"
            self.there |= names
            tokens = event.tokens.tolist()
            assert len(tokens) == BLOCK * len(event.hashes)
            for at, one in enumerate(event.hashes):
                self.tokens[one] = tokens[at * BLOCK : (at + 1) * BLOCK]

    def until(self, holds: Callable[[], bool]) -> None:
        def heard() -> bool:
            self.listen()
            return holds()

        self.engine.until(heard)

    def has(self, tier: int, request: FakeRequest, group: int = 0) -> int:
        """The number of leading blocks of the prompt in the tier."""
        names = [(tier, group, one) in self.there for one in request.block_hashes]
        return names.index(False) if False in names else len(names)


@pytest.mark.parametrize("ranks", [1, 2])
def test_events_follow_a_block_from_tier_to_tier(
    daemon: Daemon, engine_of: EngineOf, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Forecast, "recompute_s", lambda *_: float("inf"))
    monkeypatch.setattr(Forecast, "prefill", (0.0, 0.0))
    engine = engine_of(daemon, layout_of(ranks=ranks), events=True, patience_ms=20_000)
    index = Index(engine)
    request = engine.serve(PROMPT)
    index.until(lambda: index.has(wire.MEMORY, request) == index.has(wire.DISK, request) == 8)
    for at, one in enumerate(request.block_hashes):
        assert index.tokens[one] == list(PROMPT)[at * BLOCK : (at + 1) * BLOCK]
    crowd_out(daemon, engine, on_disk=8 * ranks)
    index.until(lambda: not index.has(wire.MEMORY, request))
    assert index.has(wire.DISK, request) == 8
    assert engine.serve(PROMPT).cached == 8 * BLOCK
    index.until(lambda: index.has(wire.MEMORY, request) == 8)


def test_consecutive_blocks_are_one_event(shared: Daemon, engine_of: EngineOf) -> None:
    engine = engine_of(shared, events=True)
    request = engine.serve(PROMPT)
    events: list[Any] = []

    def told() -> bool:
        events.extend(engine.scheduler.take_events())
        return sum(len(event.hashes) for event in events) == 8

    engine.until(told)
    hashes = request.block_hashes
    assert isinstance(events[0], Stored) and events[0].parent is None
    for before, after in pairwise(events):
        assert after.parent == before.hashes[-1]
    assert [one for event in events for one in event.hashes] == hashes
    assert len(events) <= 3


def test_blocks_of_another_engine_are_reported_after_their_tokens_are_known(
    shared: Daemon, engine_of: EngineOf
) -> None:
    engine_of(shared).serve(PROMPT)
    engine = engine_of(shared, events=True)
    index = Index(engine)
    request = engine.serve(PROMPT)
    index.listen()
    assert request.cached == 8 * BLOCK and index.has(wire.MEMORY, request) == 8


def test_without_events_no_feed_is_requested(shared: Daemon, engine_of: EngineOf) -> None:
    engine = engine_of(shared)
    for _ in range(2):
        engine.serve(PROMPT)
    assert engine.scheduler.take_events() == []
    session = engine.scheduler._daemon.session
    assert session is not None
    assert wire.Watch not in session.client.link._pending.values()


def test_all_blocks_are_reported_as_removed_after_the_daemon_ended(
    own_daemon: Daemon, engine_of: EngineOf
) -> None:
    engine = engine_of(own_daemon, events=True)
    index = Index(engine)
    request = engine.serve(PROMPT)
    index.until(lambda: index.has(wire.MEMORY, request) == 8)
    own_daemon.process.kill()
    own_daemon.process.wait()
    engine.serve(range(500, 600))
    index.until(lambda: not index.there)


def test_all_blocks_are_reported_as_removed_in_a_new_generation(
    shared: Daemon, engine_of: EngineOf
) -> None:
    engine = engine_of(shared, events=True)
    index = Index(engine)
    request = engine.serve(PROMPT)
    index.until(lambda: index.has(wire.MEMORY, request) == 8)
    engine.scheduler.new_generation()
    index.listen()
    assert not index.there
    engine.serve(PROMPT)
    index.until(lambda: index.has(wire.MEMORY, request) == 8)


def test_missed_changes_are_reported_as_removals(shared: Daemon, engine_of: EngineOf) -> None:
    engine = engine_of(shared, events=True)
    index = Index(engine)
    # Pinned blocks are not evicted, so their removal is reported only because changes were missed.
    request = engine.serve(PROMPT, kv_transfer_params={"kvtier": {"pin": 600}})
    index.until(lambda: index.has(wire.MEMORY, request) == 8)
    engine.until(lambda: engine.scheduler.counts["pin:held"] > 0)
    with shared.connect() as client:
        space = client.open(spec_for(engine.layout))
        for start in range(1, 49):
            keys = space.keys([start] * (BLOCK * WARM_BLOCKS))
            space.save(keys, bytes(WARM_BLOCKS * BYTES))
    index.until(lambda: engine.scheduler.counts["missed"] > 0)
    assert not index.there


def test_the_number_of_known_blocks_is_bounded(
    shared: Daemon, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin_events, "LIMIT_KNOWN", 10)
    engine = engine_of(shared, events=True)
    index = Index(engine)
    first = engine.serve(PROMPT)
    index.until(lambda: index.has(wire.MEMORY, first) == 8)
    second = engine.serve(range(1000, 1000 + 8 * BLOCK + 3))
    index.until(lambda: index.has(wire.MEMORY, second) == 8)
    # Only the last two blocks of the first prompt are remembered, so its prefix is unknown.
    assert len(index.there) == 10 and not index.has(wire.MEMORY, first)


# --- pins --------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [False, True])
def test_a_pinned_prompt_stays(
    shared: Daemon, engine_of: EngineOf, before: bool, waits: list[str]
) -> None:
    """A prompt is pinned when it is saved, or when it is found if it was saved earlier."""
    engine = engine_of(shared)
    if before:
        engine.serve(PROMPT)
    waits.clear()
    engine.serve(PROMPT, kv_transfer_params={"kvtier": {"pin": 600}})
    engine.until(lambda: engine.scheduler.counts["pin:held"] > 0)
    assert not waits, "the scheduler's thread waited for the daemon"
    engine.serve(range(1000, 1000 + 8 * BLOCK + 3))
    crowd_out(shared, engine)
    assert engine.serve(PROMPT).cached == 8 * BLOCK
    assert engine.serve(range(1000, 1000 + 8 * BLOCK + 3)).cached == 0
    engine.settle()


def test_a_very_long_prompt_is_pinned_when_all_of_it_has_keys(
    shared: Daemon, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although its request has ended then."""
    engine = engine_of(shared)
    engine.serve(PROMPT)
    monkeypatch.setattr("kvtier_vllm.identity.LIMIT_HASHES", 3)
    pinned: list[int] = []
    plain = engine.scheduler._pins._send
    monkeypatch.setattr(
        engine.scheduler._pins, "_send", lambda pin: (pinned.append(len(pin.keys)), plain(pin))
    )
    wishes = {"load": False, "save": False, "pin": 600}
    engine.finish(engine.run(engine.add(PROMPT, kv_transfer_params={"kvtier": wishes})))
    assert not pinned
    engine.until(lambda: engine.scheduler.counts["pin:held"] > 0)
    assert pinned == [8]
    engine.settle()


def test_a_save_of_an_old_generation_is_not_pinned(
    shared: Daemon, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its save was in progress when the generation changed, so its keys are no longer looked up. Later
    saves are pinned."""
    engine = engine_of(shared)
    engine.until(lambda: engine.scheduler._daemon.session is not None)
    pinned: list[int] = []
    plain = engine.scheduler._pins._send
    monkeypatch.setattr(
        engine.scheduler._pins, "_send", lambda pin: (pinned.append(len(pin.keys)), plain(pin))
    )
    held, wishes = threading.Event(), {"kvtier": {"load": False, "pin": 600}}
    engine.workers[0].state.tasks.put(lambda: bool(held.wait(60)))
    request = engine.run(engine.add(PROMPT, kv_transfer_params=wishes))
    assert engine.scheduler.in_flight["saves"] == engine.scheduler.in_flight["pins"] == 1
    engine.scheduler.new_generation()
    pinned.clear()
    held.set()
    engine.until(lambda: not engine.scheduler.in_flight["saves"])
    engine.finish(request)
    assert not pinned
    engine.serve(PROMPT, kv_transfer_params=wishes)
    assert pinned == [8, 8]  # found blocks (zero so far), and saved blocks
    engine.settle()


def test_a_prompt_is_pinned_in_each_generation(
    shared: Daemon, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that was interrupted by the change of generation is computed, or found, with new keys."""
    engine = engine_of(shared)
    side = engine.scheduler
    engine.until(lambda: side._daemon.session is not None)
    pinned: list[Keys] = []
    monkeypatch.setattr(side._pins, "_send", lambda pin: pinned.append(pin.keys))
    request = engine.add(PROMPT, kv_transfer_params={"kvtier": {"load": False, "pin": 600}})
    for count in (1, 1, 2):
        if count == 2:
            side.new_generation()
        side.allocated(request, [[]], 0)
        assert len(pinned) == count
    assert len(pinned[0]) == len(pinned[1]) == 8 and pinned[0].packed != pinned[1].packed


@pytest.mark.parametrize("before", [False, True])
def test_a_pin_ends(own_daemon: Daemon, engine_of: EngineOf, before: bool) -> None:
    engine = engine_of(own_daemon)
    if before:
        engine.serve(PROMPT)
    engine.serve(PROMPT, kv_transfer_params={"kvtier": {"pin": 0.5}})
    engine.until(lambda: engine.scheduler.counts["pin:held"] > 0)
    own_daemon.wait_for(lambda stats: not stats["tenants"]["default"]["leases"])
    crowd_out(own_daemon, engine)
    assert engine.serve(PROMPT).cached == 0


@pytest.mark.parametrize(
    "pin", [-1, True, "600", None, float("nan"), float("inf"), [1]], ids=lambda pin: repr(pin)
)
def test_an_invalid_pin_is_ignored(pin: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert read_request_options({"kvtier": {"pin": pin, "save": False}}) == RequestOptions(
        True, False, 0.0
    )
    assert "expected seconds" in caplog.text


def test_request_parameters_of_any_type_are_accepted() -> None:
    assert (
        read_request_options(None)
        == read_request_options({})
        == read_request_options({"kvtier": None})
        == RequestOptions()
    )
    assert (
        read_request_options([1])
        == read_request_options({"kvtier": "x"})
        == read_request_options({"p": 1})
        == RequestOptions()
    )
    assert read_request_options({"kvtier": {"pin": 10**30}}).pin_s == LIMIT_PIN_S
    assert read_request_options({"kvtier": {"load": 0}}) == RequestOptions(False, True, 0.0)


def test_a_request_with_many_large_parameters_gives_one_short_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = {f"{at}" * 1000: 1 for at in range(10_000)}
    assert read_request_options({"kvtier": given}) == RequestOptions()
    read_request_options({"kvtier": {"pin": "x" * 10**6}})
    read_request_options({"kvtier": [["x"] * 1000] * 1000})
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3 and all(len(line) < 500 for line in lines), lines
    assert "ignoring unknown '0000" in lines[0] and ", ...; known are load" in lines[0]


def hints(*actions: tuple[str, str, Any]) -> Any:
    """Shaped as vLLM's KvHintsEnvelope."""
    found = [
        SimpleNamespace(action_id="a", action_type=kind, action_version=version, payload=payload)
        for kind, version, payload in actions
    ]
    return SimpleNamespace(protocol_version="1", message_id="m", actions=found)


def test_hints_of_an_orchestrator_are_options_and_parameters_of_the_request_win(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = hints(("other", "1", {"pin": 1}), ("kvtier", "1", {"pin": 600, "ttl": 60}))
    assert read_request_options(None, asked) == RequestOptions(pin_s=600, ttl_s=60)
    both = read_request_options({"kvtier": {"pin": 5}}, asked)
    assert both == RequestOptions(pin_s=5, ttl_s=60)
    assert both.given  # so the response says what became of them
    assert read_request_options({"kvtier": "x"}, asked) == RequestOptions()
    later = hints(("kvtier", "1", {"pin": 600}), ("kvtier", "1", {"pin": 7}))
    assert read_request_options({}, later).pin_s == 7
    caplog.clear()
    assert read_request_options({}, hints(("kvtier", "2", {"pin": 600}))) == RequestOptions()
    assert "version '2'" in caplog.text
    for odd in (hints(), hints(("kvtier", "1", None)), SimpleNamespace(actions=None), object()):
        assert read_request_options(None, odd) == RequestOptions()


def test_a_request_with_hints_is_pinned(shared_daemon: Daemon, engine_of: EngineOf) -> None:
    engine = engine_of(shared_daemon)
    engine.serve(PROMPT, kv_hints=hints(("kvtier", "1", {"pin": 0.5})))
    engine.until(lambda: engine.scheduler.counts["pin:held"] == 1)


@pytest.mark.parametrize(
    "told, says",
    [({"load": "false"}, "expected true or false"), ({"save": None}, "expected true or false"),
     ({"laod": False}, "unknown 'laod'; known are load, save, pin")],
)  # fmt: skip
def test_an_invalid_request_parameter_is_logged(
    told: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_request_options({"kvtier": told}) == RequestOptions()
    (said,) = caplog.records
    assert says in said.getMessage() and said.name == "vllm.kvtier"


# --- warm-up -----------------------------------------------------------------------------------


def test_a_warm_up_request_promotes_its_prompt_without_loading_it(
    daemon: Daemon, engine_of: EngineOf
) -> None:
    engine = engine_of(daemon)
    engine.serve(PROMPT)
    crowd_out(daemon, engine, on_disk=8)
    warm: list[tuple[int | None, int | None]] = []
    while not warm or warm[-1] != (8, 0):
        wants = {"kvtier": {"warm": True, "load": False}}
        request = engine.run(engine.add(PROMPT, kv_transfer_params=wants))
        assert not request.cached
        finished = engine.scheduler.finished(request)
        assert finished is not None
        told = finished["kvtier"]
        assert told.keys() == {"warm_tokens", "cold_tokens", "memory_blocks", "coming_blocks"}
        warm.append((told["memory_blocks"], told["coming_blocks"]))
        engine.free = [page for pages in request.pages for page in pages if page] + engine.free
        assert len(warm) < 500, warm
    known = [(ready, coming) for ready, coming in warm if ready is not None]
    assert all(ready + (coming or 0) <= 8 for ready, coming in known)
    assert engine.serve(PROMPT).sources == (8 * BLOCK, 0)
    assert hits(engine) == (8 * BLOCK, 0), "all of it came from memory"


def test_the_response_of_a_one_step_request_contains_the_daemons_answers(
    shared: Daemon, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM ends a request before it passes on the reports of the step."""
    engine = engine_of(shared)
    engine.serve(PROMPT)
    side = engine.scheduler
    with monkeypatch.context() as patch:
        patch.setattr(side, "reported", lambda *_: None)
        wants = {"kvtier": {"warm": True, "pin": 600, "load": False}}
        request = engine.run(engine.add(PROMPT, kv_transfer_params=wants))
        session = side._daemon.session
        assert session is not None
        session.client.ping()  # answered after all earlier requests
        told = side.finished(request)
    assert told == {
        "kvtier": {
            "warm_tokens": 0, "cold_tokens": 0, "pinned_blocks": 8,
            "memory_blocks": 8, "coming_blocks": 0,
        }
    }  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("warm", [0, False, "yes", None], ids=repr)
def test_a_request_without_warm_up_promotes_nothing(
    daemon: Daemon, engine_of: EngineOf, warm: Any
) -> None:
    engine = engine_of(daemon)
    engine.serve(PROMPT)
    crowd_out(daemon, engine, on_disk=8)
    engine.serve(PROMPT, kv_transfer_params={"kvtier": {"warm": warm, "load": False}})
    with daemon.connect() as client:
        assert client.open(spec_for(engine.layout)).match(keys_of(engine)).ready == 0


def keys_of(engine: FakeEngine) -> Keys:
    """The keys of the prompt's blocks."""
    session = engine.scheduler._daemon.session
    assert session is not None
    hashes = FakeRequest("none", list(PROMPT)).block_hashes
    return session.space.keys_of_hashes(hashes, b"", b"")


# --- a time to live ----------------------------------------------------------------------------


def test_blocks_saved_with_a_ttl_are_not_found_after_it(
    daemon: Daemon, engine_of: EngineOf
) -> None:
    """The prompt's own blocks expire; blocks that were stored before do not. The expiring blocks are
    not on the disk."""
    engine = engine_of(daemon)
    engine.serve(range(3 * BLOCK + 1))
    engine.serve(PROMPT, kv_transfer_params={"kvtier": {"ttl": 5}})
    assert engine.scheduler.counts["saved_tokens"] == 8 * BLOCK
    daemon.wait_for(lambda stats: stats["evicted_blocks"]["forgotten"] == 5)
    request = engine.serve(PROMPT)
    assert request.cached == 3 * BLOCK
    daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] == 8)


@pytest.mark.parametrize("ttl", [0, -1, True, "60", None, float("nan")], ids=repr)
def test_a_request_with_an_invalid_ttl_saves_nothing(
    own_daemon: Daemon, engine_of: EngineOf, ttl: Any
) -> None:
    engine = engine_of(own_daemon)
    engine.serve(PROMPT, kv_transfer_params={"kvtier": {"ttl": ttl}})
    assert not engine.scheduler.counts["saved_tokens"] and not own_daemon.stats()["saved_tokens"]


def test_a_ttl_is_read(caplog: pytest.LogCaptureFixture) -> None:
    assert read_request_options({"kvtier": {"ttl": 60}}) == RequestOptions(ttl_s=60.0)
    assert read_request_options({"kvtier": {"ttl": 10**30}}).ttl_s == LIMIT_PIN_S, (
        "sooner is allowed"
    )
    assert read_request_options({"kvtier": {"ttl": 60, "save": False}}) == RequestOptions(
        save=False
    )
    assert read_request_options({"kvtier": {"ttl": 0}}) == RequestOptions(save=False)
    assert not caplog.text
    assert read_request_options({"kvtier": {"ttl": "1h"}}) == RequestOptions(save=False)
    assert "expected seconds" in caplog.text


# --- timelines ---------------------------------------------------------------------------------


def written(path: Path) -> list[dict[str, Any]]:
    """Parses the file like other readers of the format: the last comma and the bracket may be missing."""
    text = path.read_text()
    assert text.startswith("[\n") and text.endswith(",\n")
    return list(json.loads(text[:-2] + "]"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize("where", ["warm", "cold"])
def test_a_timeline_contains_all_phases_of_a_hit_in_order(
    daemon: Daemon, engine_of: EngineOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    load: str, where: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(Forecast, "recompute_s", lambda *_: float("inf"))
    monkeypatch.setattr(Forecast, "prefill", (0.0, 0.0))
    path = tmp_path / "hits.json"
    ranks = 1 if load == "sync" else 2
    engine = engine_of(
        daemon, layout_of(ranks=ranks), load=load, timeline=str(path), patience_ms=20_000
    )
    engine.serve(PROMPT)
    if where == "cold":
        crowd_out(daemon, engine, on_disk=8 * ranks)
    request = engine.serve(PROMPT)
    engine.close()
    spans = written(path)
    assert {one["args"]["request"] for one in spans} == {request.request_id}, "misses are no hits"
    assert spans[0]["args"]["tokens"][where] == 8 * BLOCK
    named = {one["name"]: one for one in spans}
    assert len(named) == len(spans)
    expected = ["until it is asked about", "the daemon answers"]
    expected += ["blocks come from disk"] if where == "cold" else []
    expected += ["waits for its turn", "on its way to the ranks"]
    copies = [f"copy, rank {rank}" for rank in range(ranks)]
    after = (
        ["first step"] if load == "sync" else ["the end is noticed", "rescheduled", "first step"]
    )
    assert set(named) == {*expected, *copies, *after}
    at = [named[name] for name in expected + (after if load == "async" else [])]
    for before, later in pairwise(at):
        assert before["dur"] >= 0 and before["ts"] + before["dur"] <= later["ts"] + 1
    step, first = named["first step"], named["copy, rank 0"]
    within = step["ts"] <= first["ts"] and first["ts"] + first["dur"] <= step["ts"] + step["dur"]
    assert within == (load == "sync")
    assert len({named[name]["tid"] for name in copies} | {step["tid"]}) == ranks + 1


def test_without_a_file_no_timeline_is_recorded(shared: Daemon, engine_of: EngineOf) -> None:
    engine = engine_of(shared)
    engine.serve(PROMPT)
    request = engine.add(PROMPT)
    timelines = engine.scheduler.timelines
    assert not timelines._open and not timelines._thread.is_alive()
    engine.finish(engine.run(request))
    assert request.cached and not timelines.hits


def test_a_request_of_one_step_has_its_timeline(tmp_path: Path) -> None:
    """The request ends before the engine reports the end of its step."""
    timelines = Timelines(str(tmp_path / "hits.json"), time.monotonic)
    timelines.queued("a")
    timelines.allocated("a", {"warm": 16, "cold": 0})
    timelines.scheduled(1, ["a"])
    timelines.finished("a")
    timelines.stepped(1)
    timelines.close()
    assert [one["name"] for one in written(tmp_path / "hits.json")] == ["first step"]
    assert timelines._lanes == [0] and not timelines._open


def test_an_aborted_request_leaves_no_timeline(
    shared: Daemon, engine_of: EngineOf, tmp_path: Path
) -> None:
    engine = engine_of(shared, load="async", timeline=str(tmp_path / "hits.json"))
    engine.serve(PROMPT)
    request = engine.add(PROMPT)
    engine.until(lambda: bool(engine.loading))
    engine.finish(request)
    engine.until(lambda: not engine.loading)
    timelines = engine.scheduler.timelines
    assert not timelines._open and not timelines.hits
    assert timelines._lanes == [0], "the next one has its place"


def test_an_unwritable_timeline_file_is_reported_once(
    shared: Daemon, engine_of: EngineOf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(shared, timeline=str(tmp_path / "nowhere" / "hits.json"))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert engine.serve(PROMPT).done
        engine.until(lambda: not engine.scheduler.timelines._thread.is_alive())
    assert caplog.text.count("cannot write timelines") == 1


def test_a_file_has_its_limit(
    shared: Daemon, engine_of: EngineOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "hits.json"
    monkeypatch.setattr(plugin_timeline, "LIMIT_FILE_BYTES", 100)
    engine = engine_of(shared, timeline=str(path))
    for _ in range(2):
        engine.serve(PROMPT)
    engine.until(lambda: not engine.scheduler.timelines._thread.is_alive())
    assert path.read_text() == ""


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_daemon_counts_the_tokens_that_an_engine_used(
    own_daemon: Daemon, engine_of: EngineOf, ranks: int
) -> None:
    """Found blocks do not count as used if the request is aborted, or if the engine has the prefix itself."""
    engine = engine_of(own_daemon, layout_of(ranks=ranks))
    engine.serve(PROMPT)
    request = engine.add(PROMPT)
    while engine.scheduler.matched(request, 0)[0] is None:
        engine.carry_out({}, {}, [])
    engine.finish(request)
    engine.settle()
    stats = own_daemon.stats()
    assert stats["hit_tokens"]["warm"] == 8 * BLOCK
    assert stats["used_tokens"]["warm"] == stats["bytes"]["loaded"] == 0
    engine.serve(PROMPT)
    stats = own_daemon.wait_for(lambda stats: stats["bytes"]["loaded"] > 0)
    assert stats["used_tokens"] == {"warm": 8 * BLOCK, "cold": 0}
    assert stats["bytes"]["loaded"] == 8 * BYTES * ranks == engine.scheduler.counts["loaded_bytes"]


def test_an_engine_with_several_ranks_counts_as_one(
    own_daemon: Daemon, engine_of: EngineOf
) -> None:
    """Its scheduler and each of its ranks have a session."""
    engine = engine_of(own_daemon, layout_of(ranks=2))
    engine.serve(PROMPT)
    stats = own_daemon.wait_for(lambda stats: stats["sessions"] == 3)
    assert stats["engines"] == stats["tenants"]["default"]["engines"] == 1
    with own_daemon.connect() as client:
        client.open(spec_for(engine.layout))
        assert own_daemon.stats()["engines"] == 2


# --- what a response says ------------------------------------------------------------------------


def test_a_request_may_get_its_hits_and_pins_in_its_response(
    daemon: Daemon, engine_of: EngineOf
) -> None:
    """Its tokens by tier, and the number of blocks of its pin. The response of another request contains
    nothing."""
    engine = engine_of(daemon, load="async", patience_ms=20_000)
    wants = {"kvtier": {"pin": 600, "priority": 0.9}}
    told: list[Any] = []
    finished = engine.scheduler.finished
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.scheduler, "finished", lambda one: told.append(finished(one)))
        request = engine.run(engine.add(PROMPT, kv_transfer_params=wants))
        engine.until(lambda: engine.scheduler.counts["pin:held"] > 0)
        engine.finish(request)
        request = engine.run(engine.add(PROMPT, kv_transfer_params={"kvtier": {}}))
        engine.finish(request)
        engine.serve(PROMPT)
    assert told == [
        {"kvtier": {"warm_tokens": 0, "cold_tokens": 0, "pinned_blocks": 8}},
        {"kvtier": {"warm_tokens": 8 * BLOCK, "cold_tokens": 0}},
        None,
    ]


def test_a_failed_load_is_not_reported_as_a_hit(
    shared: Daemon, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(shared, load="async")
    engine.serve(PROMPT)
    worker = engine.workers[0]
    monkeypatch.setattr(
        worker.loads, "_load", lambda load: worker.loads._count(load, "stale", 0, time.monotonic())
    )
    request = engine.run(engine.add(PROMPT, kv_transfer_params={"kvtier": {}}))
    assert request.failed
    told = engine.scheduler.finished(request)
    assert told == {"kvtier": {"warm_tokens": 0, "cold_tokens": 0}}


def test_blocks_of_high_priority_outlive_blocks_of_low_priority(
    shared: Daemon, engine_of: EngineOf
) -> None:
    engine = engine_of(shared)
    for first, priority in ((0, 1.0), (1000, 0.0)):
        tokens = range(first, first + 8 * BLOCK + 3)
        engine.serve(tokens, kv_transfer_params={"kvtier": {"priority": priority}})
    with shared.connect() as client:
        space = client.open(spec_for(engine.layout))
        tokens = [7] * (BLOCK * WARM_BLOCKS)
        for at in range(0, WARM_BLOCKS - 8, 64):
            keys = space.keys(tokens)[at : min(at + 64, WARM_BLOCKS - 8)]
            space.save(keys, bytes(len(keys) * BYTES))
    assert engine.serve(range(8 * BLOCK + 3)).cached == 8 * BLOCK
    assert engine.serve(range(1000, 1000 + 8 * BLOCK + 3)).cached == 0


@pytest.mark.parametrize("priority", [-0.1, 1.5, "high", True, None, float("nan")], ids=repr)
def test_an_invalid_priority_is_ignored(priority: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert read_request_options({"kvtier": {"priority": priority}}) == RequestOptions()
    (line,) = [one.getMessage() for one in caplog.records]
    assert "expected a number from 0 to 1" in line
