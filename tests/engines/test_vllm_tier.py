"""kvtier as a secondary tier of vLLM's own offloading: vLLM's spec, its manager and its memory, and a real
daemon. A GPU fills that memory in an engine; here the test does."""

from __future__ import annotations

import itertools
import logging
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm.v1.engine.core", reason="needs vLLM: make test-engines")

from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from support.daemons import Daemon

pytestmark = pytest.mark.filterwarnings("ignore")

CHUNK_BYTES = 16 << 10
WAIT_S = 30.0
NUMBERS = itertools.count()


def config(socket: str, groups: int = 1, chunks: int = 16, **tier: Any) -> OffloadingConfig:
    one = {
        "type": "KvtierTier",
        "module_path": "kvtier_vllm_tier",
        "socket": socket,
        "weights": "w",
    } | tier
    return OffloadingConfig(
        groups=tuple(OffloadingGroupConfig(16, (f"layer.{at}",), at) for at in range(groups)),
        worker_kv_bytes_per_block=CHUNK_BYTES,
        enable_kv_cache_events=False,
        extra_config={
            "cpu_bytes_to_use": chunks * CHUNK_BYTES,
            "secondary_tiers": [{name: value for name, value in one.items() if value is not None}],
        },
        engine_id=f"test-{uuid.uuid4().hex[:8]}",
        model=OffloadingModelConfig("tiny", "bfloat16"),
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
        kv_cache_layout="LBHNC",
    )  # fmt: skip


class Engine:
    """The part of an engine that calls the manager, and its memory."""

    def __init__(self, config: OffloadingConfig) -> None:
        self.manager = TieringOffloadingSpec(config).get_manager()
        memory = self.manager.primary_tier.get_kv_memoryview()
        self.chunks = np.frombuffer(memory, np.uint8).reshape(memory.shape)
        self.tier = self.manager.secondary_tiers[0]

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def settle(self) -> None:
        until = time.monotonic() + WAIT_S
        self.step()
        while self.manager.has_pending_work():
            assert time.monotonic() < until, "transfers must end"
            self.step()
            time.sleep(0.002)

    def save(self, keys: list[Any]) -> None:
        request = self.request()
        stored = self.manager.prepare_store(keys, request)
        for key, chunk in zip(stored.keys_to_store, stored.store_spec.chunk_ids, strict=True):
            self.chunks[chunk] = np.frombuffer(content(key), np.uint8)
        self.manager.complete_store(stored.keys_to_store, request)
        self.manager.on_request_finished(request)
        self.settle()

    def request(self) -> ReqContext:
        request = ReqContext(f"request {next(NUMBERS)}")
        self.manager.on_new_request(request)
        return request

    def found(self, keys: list[Any]) -> int:
        """How many leading chunks become readable in memory, as the scheduler asks for them; their bytes are
        compared."""
        request, until = self.request(), time.monotonic() + WAIT_S
        while True:
            results = []
            for key in keys:
                results.append(self.manager.lookup(key, request))
                if results[-1] is LookupResult.MISS:
                    break
            if not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(results):
                break
            assert time.monotonic() < until, results
            self.settle()
        hits = [key for key, one in zip(keys, results, strict=False) if one is LookupResult.HIT]
        spec = self.manager.prepare_load(hits, request) if hits else None
        for key, chunk in zip(hits, spec.chunk_ids if spec else (), strict=True):
            assert self.chunks[chunk].tobytes() == content(key), "wrong bytes"
        if hits:
            self.manager.complete_load(hits, request)
        self.manager.on_request_finished(request)
        return len(hits)

    def close(self) -> None:
        self.manager.shutdown()


def keys_of(prompt: str, count: int, group: int = 0) -> list[Any]:
    hashes, last = [], prompt.encode()
    for _ in range(count):
        last = sha256(last).digest()
        hashes.append(make_offload_key(last, group))
    return hashes


def content(key: bytes) -> bytes:
    return sha256(key).digest() * (CHUNK_BYTES // 32)


@pytest.fixture
def engine(daemon_of: Callable[..., Daemon]) -> Iterator[Callable[..., Engine]]:
    running: list[Engine] = []
    daemon = daemon_of()

    def make(**more: Any) -> Engine:
        running.append(Engine(config(str(daemon.socket), **more)))
        return running[-1]

    make.daemon = daemon  # type: ignore[attr-defined]
    yield make
    for one in running:
        one.close()


def test_what_one_engine_stores_another_one_loads(engine: Callable[..., Engine]) -> None:
    keys = keys_of("a", 8)
    engine().save(keys)
    other = engine()
    assert other.found(keys) == 8
    assert other.found(keys_of("b", 8)) == 0
    assert other.found(keys[:4] + keys_of("b", 4)) == 4


def test_more_than_vllms_memory_is_kept(engine: Callable[..., Engine]) -> None:
    one, prompts = engine(chunks=8), [keys_of(str(at), 6) for at in range(6)]
    for keys in prompts:
        one.save(keys)
    assert [one.found(keys) for keys in prompts] == [6] * 6


def test_groups_are_apart(engine: Callable[..., Engine]) -> None:
    full, window = keys_of("a", 4, 0), keys_of("a", 4, 1)
    engine(groups=2).save(full + window[2:])
    other = engine(groups=2)
    assert other.found(full) == 4
    assert other.found(window) == 0  # the first two were not stored
    assert other.found(window[2:]) == 2


def test_questions_look_up_each_chunk_about_once(engine: Callable[..., Engine]) -> None:
    keys = keys_of("a", 12)
    engine().save(keys[:3] + keys[6:9])
    other = engine()
    daemon: Daemon = engine.daemon  # type: ignore[attr-defined]
    before = daemon.stats()["lookup_tokens"]
    found = other.tier._store.stored([key.hex() for key in keys])
    assert found == [True] * 3 + [False] * 3 + [True] * 3 + [False] * 3
    assert daemon.stats()["lookup_tokens"] - before <= (12 + 12) * 16


def test_other_weights_or_another_layout_find_nothing(engine: Callable[..., Engine]) -> None:
    keys = keys_of("a", 4)
    engine().save(keys)
    assert engine(weights="others").found(keys) == 0
    assert engine(groups=2).found(keys) == 0
    assert engine().found(keys) == 4


def test_a_daemon_that_ends_costs_misses_and_is_used_again(
    daemon_of: Callable[..., Daemon], engine: Callable[..., Engine]
) -> None:
    one, keys = engine(chunks=8), keys_of("a", 4)
    one.save(keys)
    daemon: Daemon = engine.daemon  # type: ignore[attr-defined]
    daemon.process.send_signal(signal.SIGKILL)
    daemon.process.wait()
    other = engine()
    assert other.found(keys) == 0
    other.save(keys_of("b", 4))  # is in vLLM's memory alone
    assert other.found(keys_of("b", 4)) == 4
    daemon_of(folder=Path(daemon.socket).parent)
    until = time.monotonic() + WAIT_S
    while other.tier._store.keeper.space is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    other.save(keys_of("c", 4))
    assert engine().found(keys_of("c", 4)) == 4


def test_a_hung_daemon_never_holds_the_scheduler(engine: Callable[..., Engine]) -> None:
    one, keys = engine(), keys_of("a", 4)
    daemon: Daemon = engine.daemon  # type: ignore[attr-defined]
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        request, longest = one.request(), 0.0
        until = time.monotonic() + WAIT_S
        while one.manager.lookup(keys[0], request) is not LookupResult.MISS:
            assert time.monotonic() < until
            began = time.monotonic()
            one.manager.lookup(keys[0], request)
            one.step()
            longest = max(longest, time.monotonic() - began)
        # The question took a second of the finder's thread.
        assert longest < 0.5
    finally:
        daemon.process.send_signal(signal.SIGCONT)


def test_a_block_that_is_forgotten_before_its_load_is_a_miss(engine: Callable[..., Engine]) -> None:
    keys = keys_of("a", 6)
    engine().save(keys)
    other = engine()
    request = other.request()
    while other.manager.lookup(keys[0], request) is LookupResult.RETRY:
        other.settle()
    space = other.tier._store.keeper.space
    assert space is not None
    space.forget(other.tier._store._keys(space, [keys[3].hex()]))
    assert other.found(keys) == 3
    other.manager.on_request_finished(request)


def test_no_weights_and_weak_hashes_are_refused(
    engine: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match='add "weights"'):
        engine(weights=None)
    one = engine()
    logging.getLogger("vllm.kvtier").addHandler(caplog.handler)
    weak = [make_offload_key(bytes(16), 0)]
    one.save(weak)
    other = engine()
    assert other.found(weak) == 0
    assert "sha256_cbor" in caplog.text


def test_all_copies_have_ended_when_the_engine_asks_for_that(engine: Callable[..., Engine]) -> None:
    one, keys = engine(), keys_of("a", 8)
    request = one.request()
    stored = one.manager.prepare_store(keys, request)
    for key, chunk in zip(stored.keys_to_store, stored.store_spec.chunk_ids, strict=True):
        one.chunks[chunk] = np.frombuffer(content(key), np.uint8)
    one.manager.complete_store(keys, request)
    one.manager.reset_cache()  # drains the tier
    one.chunks[:] = 0
    one.manager.on_request_finished(request)
    assert engine().found(keys) == 8
