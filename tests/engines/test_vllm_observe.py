"""kvtier in an engine's metrics, hit sources and KV events, through vLLM's own interfaces."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.daemons import Daemon, start_daemon
from support.prompts import BLOCK, prompt
from support.routers import Dynamo, Llmd, batch, pod_of

TOKENS = 10 * BLOCK


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("observed")


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    (folder / "cold").mkdir()
    cold = f'[cold]\ndirectories = ["{folder / "cold"}"]\nsize = "512MiB"\nwrite = "through"\n'
    daemon = start_daemon(folder, config='[warm]\nsize = "16MiB"\n' + cold)
    yield daemon
    daemon.stop()


class Listener:
    """A subscriber of the engine's events."""

    def __init__(self, endpoint: str) -> None:
        import zmq

        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.connect(endpoint)
        self.socket.subscribe(b"")
        self.there: dict[str, set[Any]] = {"GPU": set(), "CPU": set(), "STORAGE": set()}
        self.parents: dict[Any, Any] = {}
        self.tokens: dict[str, dict[Any, list[int]]] = {medium: {} for medium in self.there}
        self.batches = self.evicted = 0
        self.dynamo, self.llmd = Dynamo(BLOCK), Llmd()
        self.kinds: set[tuple[Any, ...]] = set()
        self.seed = 10_000

    def listen(self) -> None:
        while self.socket.poll(20):
            topic, number, body = self.socket.recv_multipart()
            assert pod_of(topic) == ("pod-1", "llama") and len(number) == 8
            self.batches += 1
            events, _ = batch(body)
            for event in events:
                self.dynamo.take(event)
                self.llmd.take(event)
                names = ("type", "locality", "ownership", "kv_cache_spec_kind", "group_idx")
                if event.get("medium") in ("CPU", "STORAGE"):
                    self.kinds.add(tuple(event.get(name) for name in names))
                if event["type"] == "AllBlocksCleared":
                    self.there["GPU"].clear()
                    continue
                hashes, there = event["block_hashes"], self.there[event["medium"]]
                if event["type"] == "BlockRemoved":
                    there.difference_update(hashes)
                    self.evicted += len(hashes) if event["medium"] == "CPU" else 0
                    continue
                there.update(hashes)
                for at, one in enumerate(hashes):
                    tokens = event["token_ids"][at * BLOCK : (at + 1) * BLOCK]
                    self.tokens[event["medium"]][one] = tokens
                    self.parents[one] = hashes[at - 1] if at else event["parent_block_hash"]

    def until(self, engine: Any, holds: Callable[[], bool], blocks: int = 1) -> None:
        """Events are sent with steps: have the engine make steps, each with `blocks` new blocks."""
        deadline = time.monotonic() + 90
        while not holds():
            assert time.monotonic() < deadline, {key: len(one) for key, one in self.there.items()}
            self.seed += 1
            engine.generate([prompt(self.seed, blocks * BLOCK + 8)], 1)
            self.listen()


@pytest.fixture(scope="module")
def engine(daemon: Daemon, engine_of: Callable[..., Any], folder: Path) -> Any:
    return engine_of(
        "llama", daemon.socket, disable_log_stats=False,
        kv_events_config={
            "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"ipc://{folder}/events",
            "topic": "kv@pod-1@llama",
        },
        extra={"patience_ms": 20_000, "load": "sync", "timeline": str(folder / "hits.json")},
    )  # fmt: skip


@pytest.fixture(scope="module")
def listener(engine: Any, folder: Path) -> Iterator[Listener]:
    listener = Listener(f"ipc://{folder}/events")
    listener.until(engine, lambda: listener.batches > 0)
    yield listener
    listener.socket.close(0)


def chain(listener: Listener, medium: str, tokens: list[int]) -> list[Any]:
    """The hashes of the prompt's leading blocks in the medium, according to the events."""
    found: list[Any] = []
    for at in range(len(tokens) // BLOCK):
        part = tokens[at * BLOCK : (at + 1) * BLOCK]
        parent = found[-1] if found else None
        for one in listener.there[medium]:
            if listener.tokens[medium][one] == part and listener.parents[one] == parent:
                found.append(one)
                break
    return found


def test_every_series_exists_before_the_first_request(engine: Any) -> None:
    from kvtier_vllm.stats import COUNTERS, TIMES

    metrics = engine.metrics()
    names = {
        f"{one.name}:{value}" if one.label else one.name
        for one in COUNTERS
        for value in one.values or ("",)
    }
    assert names | {name for name, _ in TIMES.values()} == set(metrics)
    assert not any(metrics[name] for name in names if "missed" not in name)


@pytest.mark.filterwarnings("ignore")
def test_metrics_show_a_limited_number_of_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """If another adapter gets the place of the least busy one, the series of all engines for that one
    are removed."""
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest

    from kvtier_vllm import stats
    from kvtier_vllm.connector import KvtierPromMetrics, KvtierStats

    monkeypatch.setattr(stats, "LIMIT_ADAPTERS", 2)
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    before = set(REGISTRY._collector_to_names)
    config = SimpleNamespace(lora_config=object(), kv_transfer_config=None)
    kinds = {kind: kind for kind in (Counter, Gauge, Histogram)}
    try:
        shown = KvtierPromMetrics(config, kinds, ["engine"], {0: ["0"], 1: ["1"]})

        def served(adapter: str, requests: int, engine: int) -> None:
            counted = stats.PluginStats()
            counted.adapted("adapter_saved_blocks", adapter, 7 * requests)
            counted.adapted("adapter_requests", adapter, requests)
            taken = counted.take()
            shown.observe(taken, engine)
            assert KvtierStats(taken).reduce() == {}, "a line of the log has none of them"

        def adapters(engine: int) -> dict[str, float]:
            pattern = rf'saved_blocks_total{{adapter="(\w+)",engine="{engine}"}} (\S+)'
            found = re.findall(pattern, generate_latest().decode())
            return {name: float(count) for name, count in found}

        for engine in (0, 1):
            assert adapters(engine) == {"none": 0, "other": 0}
        served("a", 9, 0)
        served("b", 2, 0)
        served("b", 1, 1)
        served("c", 5, 0)
        served("none", 1, 0)
        assert adapters(0) == {"a": 63, "b": 14, "other": 35, "none": 7}
        served("c", 3, 0)
        assert adapters(0) == {"a": 63, "c": 21, "other": 35, "none": 7}
        assert adapters(1) == {"none": 0, "other": 0}
    finally:
        for one in set(REGISTRY._collector_to_names) - before:
            REGISTRY.unregister(one)


def test_metrics_sources_and_events_follow_a_block(
    engine: Any, listener: Listener, daemon: Daemon
) -> None:
    """Saved, loaded from memory, evicted, loaded from disk."""
    engine.generate([prompt(1)], 1)
    listener.until(engine, lambda: len(chain(listener, "CPU", prompt(1))) == 10)
    hashes = chain(listener, "CPU", prompt(1))
    assert chain(listener, "GPU", prompt(1)) == hashes, "the engine calls them so"
    listener.until(engine, lambda: chain(listener, "STORAGE", prompt(1)) == hashes)
    for tier, medium in (("device", "gpu"), ("host", "cpu"), ("disk", "storage")):
        assert listener.dynamo.prefix(tier, prompt(1)) == 10
        assert listener.llmd.prefix(medium, prompt(1), BLOCK) == 10
    assert not listener.dynamo.dropped and not listener.llmd.skipped
    stored = "BlockStored", "LOCAL", None, "full_attention", 0
    assert stored in listener.kinds
    assert listener.kinds <= {stored, ("BlockRemoved", "LOCAL", None, None, 0)}
    saved = engine.metrics()
    assert saved["vllm:kvtier_saved_tokens"] >= TOKENS
    assert saved["vllm:kvtier_saved_bytes"] >= 10 * BLOCK * 4096
    assert saved["vllm:kvtier_save_seconds"] >= 1 and not saved["vllm:kvtier_loaded_tokens"]

    engine.reset()
    assert engine.generate([prompt(1)], 1)[0]["cached"] == TOKENS
    warm = engine.metrics()
    assert warm["vllm:kvtier_hit_tokens:warm"] == warm["vllm:kvtier_loaded_tokens"] == TOKENS
    assert warm["vllm:kvtier_load_seconds"] == 1 and not warm["vllm:kvtier_hit_tokens:cold"]
    cached = engine.metrics("vllm:prompt_tokens_cached_by_source")
    assert cached["vllm:prompt_tokens_cached_by_source:host"] == TOKENS
    assert not cached["vllm:prompt_tokens_cached_by_source:disk"]

    listener.until(engine, lambda: not set(hashes) & listener.there["CPU"], 20)
    assert listener.dynamo.prefix("host", prompt(1)) == 0
    assert set(hashes) <= listener.there["STORAGE"]
    engine.reset()
    # The engine waits for the disk if that is expected to be faster than recompute.
    for _ in range(20):
        (one,) = engine.generate([prompt(1)], 1)
        engine.reset()
        if one["cached"] == TOKENS:
            break
    now = engine.metrics()
    cold = now["vllm:kvtier_hit_tokens:cold"]
    assert now["vllm:kvtier_hit_tokens:warm"] + cold == now["vllm:kvtier_loaded_tokens"]
    cached = engine.metrics("vllm:prompt_tokens_cached_by_source")
    assert cached["vllm:prompt_tokens_cached_by_source:disk"] == cold
    listener.until(engine, lambda: set(hashes) <= listener.there["CPU"])
    # The daemon counts the tokens that the engine used, and its two processes as one engine.
    now = engine.metrics()
    used = {tier: now[f"vllm:kvtier_hit_tokens:{tier}"] for tier in ("warm", "cold")}
    stats = daemon.wait_for(lambda stats: stats["used_tokens"] == used)
    assert stats["bytes"]["loaded"] == now["vllm:kvtier_loaded_bytes"]
    assert (stats["engines"], stats["sessions"]) == (1, 2)
    (line,) = [line for line in engine.log.read_text().splitlines() if "kvtier: connected" in line]
    assert daemon.socket in line and "warm 16 MiB, cold 512 MiB" in line


def test_a_failed_load_is_not_a_hit(engine: Any) -> None:
    before = engine.metrics()
    engine.reset()
    engine.break_loads("stale")
    try:
        engine.generate([prompt(1)], 1)
    finally:
        engine.break_loads("")
    after = engine.metrics()
    grown = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert grown["vllm:kvtier_failed_loads:stale"] == 1
    assert grown["vllm:kvtier_failed_tokens"] == TOKENS
    assert not {"vllm:kvtier_loaded_tokens", "vllm:kvtier_hit_tokens:warm"} & set(grown)


def test_a_pinned_prompt_outlives_others(engine: Any, listener: Listener) -> None:
    engine.reset()
    engine.generate([prompt(2)], 1, parameters={"kvtier": {"pin": 600}})
    listener.until(engine, lambda: engine.metrics()["vllm:kvtier_pins:held"] > 0)
    hashes = set(chain(listener, "CPU", prompt(2)))
    assert len(hashes) == 10
    engine.reset()
    (one,) = engine.generate([prompt(2)], 8, parameters={"kvtier": {"pin": 600}})
    assert one["told"]["kvtier"] == {"warm_tokens": TOKENS, "cold_tokens": 0, "pinned_blocks": 10}
    assert engine.generate([prompt(2)], 1)[0]["told"] is None
    evicted = listener.evicted
    # More than the memory holds.
    listener.until(engine, lambda: listener.evicted > evicted + 150, 20)
    assert hashes <= listener.there["CPU"]


def test_every_hit_has_its_timeline(engine: Any, folder: Path) -> None:
    engine.stop()
    spans = json.loads((folder / "hits.json").read_text()[:-2] + "]")
    requests = {one["args"]["request"] for one in spans}
    assert len(requests) >= 3
    for request in requests:
        names = [one["name"] for one in spans if one["args"]["request"] == request]
        assert {"the daemon answers", "copy, rank 0", "first step"} <= set(names)
