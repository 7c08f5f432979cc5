"""Contexts that are larger than the memory of their cache: the blocks stay in the daemon."""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from engines.tiny import prompt, tiny_model  # noqa: E402
from kvtier import Client, InvalidArgument, KvSpec, Refused, StaleLease, Unavailable  # noqa: E402
from kvtier.space import Space  # noqa: E402
from kvtier_transformers import (  # noqa: E402
    KvtierCache,
    UnsupportedModel,
    attach,
    held,
    offload,
    ring,
)
from support.daemons import Daemon  # noqa: E402
from support.tensors import tensor_bytes  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
BLOCK, TOKENS, NEW = 16, 300, 40
ERROR = 1e-4
LAYERS = {
    "gpt2": {"n_layer": 12, "num_hidden_layers": 12},
    "deepseek3": {"num_hidden_layers": 12, "first_k_dense_replace": 11},
}
KINDS = ("llama", "gpt2", "falcon", "deepseek3", "qwen3")


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are computed in several steps, and the room of the buffers grows several times."""
    monkeypatch.setattr(offload, "PREFILL_TOKENS", 64)
    monkeypatch.setattr(offload, "ROOM_TOKENS", 8)


@pytest.fixture
def client(shared_daemon: Daemon) -> Iterator[Client]:
    with shared_daemon.connect() as connected:
        yield connected


def harmless(hook: Any) -> Any:
    """The same hook, as one of the plugin itself: those of others are refused, as they may change values."""
    hook.__module__ = "kvtier_transformers.tests"
    return hook


def deep(kind: str) -> Any:
    return tiny_model(kind, **LAYERS.get(kind, {"num_hidden_layers": 12}))


def generated(model: Any, ids: Any, tokens: int = NEW, **more: Any) -> Any:
    return model.generate(
        ids, max_new_tokens=tokens, do_sample=False, return_dict_in_generate=True, output_logits=True,
        **more,
    )  # fmt: skip


def assert_same(found: Any, wanted: Any) -> None:
    assert torch.equal(found.sequences, wanted.sequences)
    for one, other in zip(found.logits, wanted.logits, strict=True):
        assert (one - other).abs().max() <= ERROR


def cache_bytes(model: Any, rows: int = 1, tokens: int = TOKENS + NEW) -> int:
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache)
    return rows * tokens * sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


class Watch(transformers.StoppingCriteria):  # type: ignore[misc]
    """Calls `act` after a number of new tokens, and notes the largest size of the tensors of a cache."""

    def __init__(self, cache: Any = None, at: int = 0, act: Callable[[], object] = int) -> None:
        self.most, self.cache, self.steps, self.at, self.act = 0, cache, 0, at, act

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.most = max(self.most, tensor_bytes(self.cache))
        self.steps += 1
        if self.steps == self.at:
            self.act()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def watched(cache: Any = None, at: int = 0, act: Callable[[], object] = int) -> Any:
    return transformers.StoppingCriteriaList([Watch(cache, at, act)])


def leases(stats: dict[str, Any]) -> int:
    return sum(one["leases"] for one in stats["tenants"].values())


@contextlib.contextmanager
def failing(module: Any, error: type[BaseException] = RuntimeError) -> Iterator[None]:
    def fail(*_: object) -> None:
        raise error("the model failed")

    hook = module.register_forward_pre_hook(harmless(fail))
    yield
    hook.remove()


def lease_fails(monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """The next requests for a lease fail: as many as the list that this returns has items."""
    left, lease = [0] * times, Space.lease

    def fail(self: Space, *args: Any, **kwargs: Any) -> Any:
        if left:
            left.pop()
            raise Unavailable("the daemon does not answer")
        return lease(self, *args, **kwargs)

    monkeypatch.setattr(Space, "lease", fail)
    return left


SMALL = '[warm]\nsize = "4MiB"\npolicy = "lru"\n'


def fill(daemon: Daemon, nbytes: int = 4 << 20, wait: bool = True) -> None:
    """Save other blocks, twice the memory, which take that of all blocks that no lease holds. With `wait`,
    first wait for the end of all leases of readers."""
    if wait:
        # One lease is that of a save.
        daemon.wait_for(
            lambda stats: leases(stats) <= bool(stats["tiers"]["warm"]["states"]["writing"])
        )
    spec = KvSpec.dense(
        model="other",
        layers=12,
        kv_heads=2,
        head_dim=16,
        dtype="float32",
        block_tokens=BLOCK,
        weights="1",
    )
    with daemon.connect(name="other") as other:
        space, count = other.open(spec), 16
        for first in range(0, 2 * nbytes // spec.block_bytes, count):
            keys = space.keys(list(range(first, first + count * BLOCK)))
            space.save(keys, bytearray(count * spec.block_bytes), wait_s=0)


# --- within the memory -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_context_of_four_times_the_memory_generates_the_same(client: Client, kind: str) -> None:
    model, ids = deep(kind), prompt(TOKENS)
    wanted, memory = generated(model, ids), cache_bytes(model) // 4
    for expected in (0, 288):
        cache = KvtierCache.from_prompt(model, ids, client, block_tokens=BLOCK, memory=memory)
        assert cache.loaded_tokens == expected
        watch = watched(cache)
        assert_same(generated(model, ids, past_key_values=cache, stopping_criteria=watch), wanted)
        assert 0.5 * memory < watch[0].most <= memory
        assert cache.save() == 336
        cache.close()
        assert tensor_bytes(cache) < 0.05 * memory
    assert not model._forward_pre_hooks


def test_layers_are_copied_ahead_if_a_processor_is_free(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = deep("llama"), prompt(TOKENS, seed=12)
    if ids.device.type == "cuda":
        pytest.skip("layers of a GPU are always copied ahead")
    wanted, memory = generated(model, ids), cache_bytes(model) // 4
    threads: list[Counter[str]] = []
    copied = held.Run.copy_layer

    def copy_layer(self: Any, number: int, pieces: Any) -> None:
        threads[-1][threading.current_thread().name[:6]] += 1
        copied(self, number, pieces)

    monkeypatch.setattr(held.Run, "copy_layer", copy_layer)
    for processors in (1, 2):
        threads.append(Counter())
        monkeypatch.setattr("os.sched_getaffinity", lambda _, count=processors: range(count))
        with attach(model, client, block_tokens=BLOCK, memory=memory):
            assert_same(generated(model, ids), wanted)
    assert threads[0].keys() == {"MainTh"}
    # The first layer after a change of the buffers is not ahead.
    assert threads[1]["kvtier"] > 0.9 * threads[1].total()


def test_the_blocks_are_those_of_caches_without_a_limit(client: Client) -> None:
    model, ids = deep("llama"), prompt(TOKENS, seed=2)
    wanted = generated(model, ids)
    memory = cache_bytes(model) // 4
    with attach(model, client, block_tokens=BLOCK, memory=memory) as attached:
        assert_same(generated(model, ids), wanted)
        assert attached.counts["saved_blocks"] == (TOKENS + NEW - 1) // BLOCK
    longer = torch.cat([wanted.sequences, prompt(20, seed=3)], 1)
    wanted = generated(model, longer)
    with attach(model, client, block_tokens=BLOCK) as attached:
        assert_same(generated(model, longer), wanted)
        assert attached.counts["loaded_tokens"] == 336
    with attach(model, client, block_tokens=BLOCK, memory=2 * memory) as attached:
        assert_same(generated(model, longer), wanted)
        assert attached.counts["loaded_tokens"] == 352
        assert not attached.counts["recomputed_tokens"]


def test_the_rows_of_a_batch_have_their_own_blocks(client: Client) -> None:
    model = deep("llama")
    ids = torch.cat([prompt(100, seed=4), prompt(100, seed=5), prompt(100, seed=4)])
    wanted = generated(model, ids)
    memory = cache_bytes(model, rows=3, tokens=140) // 2
    generated_before = KvtierCache.from_prompt(model, ids[1:2], client, block_tokens=BLOCK)
    assert_same(
        generated(model, ids[1:2], past_key_values=generated_before), generated(model, ids[1:2])
    )
    generated_before.save()
    with attach(model, client, block_tokens=BLOCK, memory=memory) as attached:
        for loaded in (0, 3 * 96):
            before = attached.counts["loaded_tokens"]
            assert_same(generated(model, ids), wanted)
            assert attached.counts["loaded_tokens"] - before == loaded
        assert not attached.counts["recomputed_tokens"]


def test_several_calls_continue_one_cache(client: Client) -> None:
    model, ids = deep("llama"), prompt(TOKENS, seed=6)
    memory = cache_bytes(model) // 4
    wanted = generated(model, ids).sequences
    cache = KvtierCache.from_prompt(model, ids, client, block_tokens=BLOCK, memory=memory)
    first = generated(model, ids, tokens=7, past_key_values=cache).sequences
    found = generated(model, first, tokens=NEW - 7, past_key_values=cache).sequences
    assert torch.equal(found, wanted)
    # Many tokens at once, all of whose logits are wanted.
    cache = KvtierCache.from_prompt(model, ids[:, :20], client, block_tokens=BLOCK, memory=memory)
    with torch.inference_mode():
        some = model(ids[:, 19:], past_key_values=cache).logits
        assert (some - model(ids).logits[:, 19:]).abs().max() <= ERROR


def test_threads_share_a_model(client: Client) -> None:
    model, memory = deep("llama"), cache_bytes(deep("llama")) // 4
    prompts = [prompt(TOKENS, seed=20 + at) for at in range(3)]
    wanted = [generated(model, ids).sequences for ids in prompts]
    with attach(model, client, block_tokens=BLOCK, memory=memory), ThreadPoolExecutor(3) as pool:
        for found, expected in zip(
            pool.map(partial(generated, model), prompts), wanted, strict=True
        ):
            assert torch.equal(found.sequences, expected)


def test_a_call_of_another_cache_meets_hooks_that_are_being_added_or_removed(
    client: Client,
) -> None:
    """Another thread does that: torch calls such a hook without the keyword arguments."""
    model, ids = deep("llama"), prompt(60, seed=15)
    with torch.no_grad():
        wanted = model(ids).logits
        cache = KvtierCache.from_prompt(
            model, ids, client, block_tokens=BLOCK, memory=cache_bytes(model)
        )
        kinds = model._forward_pre_hooks_with_kwargs, model._forward_hooks_with_kwargs
        before = [dict(kind) for kind in kinds]
        assert all(before)
        for kind in kinds:
            kind.clear()
        assert torch.equal(model(ids).logits, wanted)
        for kind, hooks in zip(kinds, before, strict=True):
            kind.update(hooks)
        found = model(ids[:, cache.get_seq_length() :], past_key_values=cache).logits
    assert (found - wanted[:, -found.shape[1] :]).abs().max() <= ERROR


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_pass_that_failed_is_repeated(client: Client, error: type[BaseException]) -> None:
    """It has overwritten the tokens after the last block in some layers."""
    model, ids = deep("llama"), prompt(TOKENS, seed=13)
    memory = cache_bytes(model) // 4
    cache = KvtierCache.from_prompt(model, ids[:, :200], client, block_tokens=BLOCK, memory=memory)
    with torch.no_grad():
        wanted = model(ids).logits[:, 199:]
        with failing(model.model.layers[5], error), pytest.raises(error, match="the model failed"):
            model(ids[:, 199:230], past_key_values=cache)
        assert cache.get_seq_length() == 199
        with pytest.raises(InvalidArgument, match="call the model of the cache"):
            model.model(ids[:, 199:230], past_key_values=cache)
        found = [model(one, past_key_values=cache).logits for one in ids[:, 199:].split(31, 1)]
    assert (torch.cat(found, 1) - wanted).abs().max() <= ERROR


def test_a_call_that_fails_after_the_last_layer_adds_no_tokens(client: Client) -> None:
    model, ids = deep("llama"), prompt(100, seed=14)
    cache = KvtierCache.from_prompt(model, ids[:, :50], client, block_tokens=BLOCK, memory="1MiB")
    with torch.no_grad():
        wanted = model(ids).logits[:, 49:]
        for error in (RuntimeError, KeyboardInterrupt):
            with failing(model.lm_head, error), pytest.raises(error, match="the model failed"):
                model(ids[:, 49:79], past_key_values=cache)
            assert cache.get_seq_length() == 49
        found = [model(one, past_key_values=cache).logits for one in ids[:, 49:].split(30, 1)]
    assert (torch.cat(found, 1) - wanted).abs().max() <= ERROR


def test_a_failure_of_the_daemon_after_the_last_layer_fails_no_call(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = deep("llama"), prompt(100, seed=15)
    cache = KvtierCache.from_prompt(model, ids[:, :48], client, block_tokens=BLOCK, memory="1MiB")
    with torch.no_grad():
        wanted = model(ids).logits[0]
        failures = lease_fails(monkeypatch, 1)
        for at in range(47, 50):
            logits = model(ids[:, at : at + 1], past_key_values=cache).logits[0, 0]
            assert (logits - wanted[at]).abs().max() <= ERROR
            assert cache.get_seq_length() == at + 1
    assert not failures


def test_a_repair_that_fails_is_repeated(client: Client) -> None:
    model, ids = deep("llama"), prompt(100, seed=16)
    cache = KvtierCache.from_prompt(model, ids[:, :50], client, block_tokens=BLOCK, memory="1MiB")
    with torch.no_grad():
        wanted = model(ids).logits[0]
        for error in (RuntimeError, RuntimeError, KeyboardInterrupt, RuntimeError):
            with failing(model.model.layers[5], error), pytest.raises(error):
                model(ids[:, 49:79], past_key_values=cache)
            assert cache.get_seq_length() == 49
        logits = model(ids[:, 49:79], past_key_values=cache).logits[0]
    assert (logits - wanted[49:79]).abs().max() <= ERROR


def test_a_failure_of_the_daemon_before_a_repair_skips_no_repair(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = deep("llama"), prompt(100, seed=17)
    cache = KvtierCache.from_prompt(
        model, ids[:, :50], client, block_tokens=BLOCK, memory="1MiB", lease_ms=1
    )
    with torch.no_grad():
        wanted = model(ids).logits[0]
        with failing(model.model.layers[5]), pytest.raises(RuntimeError):
            model(ids[:, 49:79], past_key_values=cache)
        failures = lease_fails(monkeypatch, 1)
        with pytest.raises(Unavailable):
            model(ids[:, 49:79], past_key_values=cache)
        assert not failures
        logits = model(ids[:, 49:79], past_key_values=cache).logits[0]
    assert (logits - wanted[49:79]).abs().max() <= ERROR


def test_after_an_interrupt_of_a_fetch_its_buffer_has_one_writer(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(2))
    model, ids = deep("llama"), prompt(100, seed=18)
    cache = KvtierCache.from_prompt(model, ids[:, :98], client, block_tokens=BLOCK, memory="1MiB")
    interrupted, copied_late = threading.Event(), threading.Event()
    copied, fetch = held.Run.copy_layer, ring.LayerRing.fetch

    def copy_layer(self: Any, number: int, pieces: Any) -> None:
        late = number == 5 and not interrupted.is_set()
        if late:
            # The other thread waits for this layer, soon.
            threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGUSR1)).start()
            assert interrupted.wait(20)
            pause.wait(0.3)
        copied(self, number, pieces)
        if late:
            copied_late.set()

    def fetch_late(self: Any, number: int, rows: Any) -> None:
        if number == 1:
            copied_late.wait(1)
        fetch(self, number, rows)

    def interrupt(*_: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    main, pause = threading.get_ident(), threading.Event()
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with torch.no_grad():
            wanted = model(ids).logits[0, 97]
            monkeypatch.setattr(held.Run, "copy_layer", copy_layer)
            with pytest.raises(KeyboardInterrupt):
                model(ids[:, 97:98], past_key_values=cache)
            monkeypatch.setattr(ring.LayerRing, "fetch", fetch_late)
            logits = model(ids[:, 97:98], past_key_values=cache).logits[0, 0]
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (logits - wanted).abs().max() <= ERROR


def test_the_end_of_a_cache_releases_all(client: Client, shared_daemon: Daemon) -> None:
    model, ids = deep("llama"), prompt(TOKENS, seed=7)
    memory = cache_bytes(model) // 4
    cache = KvtierCache.from_prompt(model, ids, client, block_tokens=BLOCK, memory=memory)
    assert model._forward_pre_hooks
    assert leases(shared_daemon.stats())
    del cache
    gc.collect()
    assert not model._forward_pre_hooks
    shared_daemon.wait_for(lambda stats: not leases(stats))


# --- blocks that are gone ----------------------------------------------------------------------


@pytest.mark.parametrize(("lease_ms", "is_held"), [(60_000, True), (1, False)])
def test_blocks_in_use_are_held_and_those_that_are_gone_are_computed_again(
    daemon_of: Callable[..., Daemon], lease_ms: int, is_held: bool
) -> None:
    daemon = daemon_of(config=SMALL)
    model, ids = deep("llama"), prompt(TOKENS)
    wanted, memory = generated(model, ids), cache_bytes(model) // 4
    options = {"block_tokens": BLOCK, "memory": memory, "lease_ms": lease_ms}
    with daemon.connect() as client, attach(model, client, **options) as attached:
        watch = watched(None, 20, lambda: fill(daemon, wait=not is_held))
        assert_same(generated(model, ids, stopping_criteria=watch), wanted)
        recomputed = attached.counts["recomputed_tokens"]
        assert recomputed == 0 if is_held else recomputed > 100, attached.counts


def test_blocks_that_are_gone_within_a_pass_are_an_error_and_the_next_pass_computes_them(
    daemon_of: Callable[..., Daemon],
) -> None:
    daemon = daemon_of(config=SMALL)
    model, ids = deep("llama"), prompt(TOKENS)
    wanted, memory = generated(model, ids), cache_bytes(model) // 4
    with daemon.connect() as client:
        cache = KvtierCache.from_prompt(
            model, ids, client, block_tokens=BLOCK, memory=memory, lease_ms=1
        )
        taken: list[int] = []

        def evict(*_: object) -> None:
            taken.append(1)
            if len(taken) == 10:
                fill(daemon)

        hook = model.model.layers[5].register_forward_pre_hook(harmless(evict))
        with pytest.raises(StaleLease, match="evicted"):
            generated(model, ids, past_key_values=cache)
        hook.remove()
        so_far = cache.get_seq_length()
        assert TOKENS < so_far < TOKENS + 12
        found = generated(
            model,
            wanted.sequences[:, : so_far + 1],
            TOKENS + NEW - so_far - 1,
            past_key_values=cache,
        )
        assert torch.equal(found.sequences, wanted.sequences)
        assert cache.offload._store.counts["recomputed_tokens"] > 100


@pytest.mark.parametrize(
    "seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_evictions_and_failures_at_any_time_change_no_logits(
    daemon_of: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Between passes, within them and within repairs, with one token or several."""
    chance, daemon, model = random.Random(seed), daemon_of(config=SMALL), deep("llama")
    ids, memory = prompt(TOKENS + 60, seed=seed), cache_bytes(model, tokens=TOKENS + 60) // 4
    with torch.no_grad():
        wanted = model(ids).logits[0]
    place, failures = [-1], Counter[str]()

    def act(*_: object, layer: int) -> None:
        if place[0] == layer:
            place[0] = -1
            error = chance.choice([None, None, RuntimeError, KeyboardInterrupt])
            if error is not None:
                raise error("the model failed")
            fill(daemon)

    for number, layer in enumerate((*model.model.layers, model.lm_head)):
        layer.register_forward_pre_hook(harmless(partial(act, layer=number)))
    left = lease_fails(monkeypatch, 0)
    with daemon.connect() as client, torch.no_grad():
        cache = KvtierCache.from_prompt(
            model, ids[:, :200], client, block_tokens=BLOCK, memory=memory, lease_ms=1
        )
        while (done := cache.get_seq_length()) < ids.shape[1]:
            place[0] = chance.choice([-1, -1, 0, 1, 5, 11, 12])
            left[:] = [0] * (chance.random() < 0.1)
            if chance.random() < 0.1:
                fill(daemon)
            some = ids[:, done : done + chance.choice([1, 1, 3, 15, 16, 40])]
            try:
                logits = model(some, past_key_values=cache).logits[0]
            except (StaleLease, Unavailable, RuntimeError, KeyboardInterrupt) as error:
                failures[type(error).__name__] += 1
                assert cache.get_seq_length() == done
                continue
            assert (logits - wanted[done : done + some.shape[1]]).abs().max() <= ERROR
        assert len(failures) > 1, failures
        assert cache.offload._store.counts["recomputed_tokens"]
        cache.close()
    daemon.wait_for(lambda stats: not leases(stats))


def test_a_damaged_block_is_computed_again(shared_daemon: Daemon) -> None:
    from kvtier_kernels import release_views, views

    model, ids = deep("llama"), prompt(TOKENS, seed=8)
    wanted, memory = generated(model, ids), cache_bytes(model) // 4
    with shared_daemon.connect() as client:
        with attach(model, client, block_tokens=BLOCK):
            generated(model, ids)
        plain = KvtierCache.from_prompt(model, ids, client, block_tokens=BLOCK)
        space = plain.source.place.space
        lease = space.lease(space.keys(ids[0].tolist()))
        (slot,) = views(
            client.link.mappings[0], lease.part(0, 0).slots[:24], space.block_bytes, True
        )
        slot[5] ^= 1
        release_views([slot])
        lease.release()
    with (
        shared_daemon.connect(verify=True) as client,
        attach(model, client, block_tokens=BLOCK, memory=memory) as attached,
    ):
        # It may still be there when the prompt is computed again: then there is no place for the new one.
        with contextlib.suppress(StaleLease):
            assert_same(generated(model, ids), wanted)
        assert attached.counts["loaded_tokens"] == 0
        shared_daemon.wait_for(
            lambda stats: any(one["spoilt_blocks"] for one in stats["tenants"].values())
        )
        assert_same(generated(model, ids), wanted)


def test_blocks_on_disk_are_read_even_if_computing_would_be_faster(
    tmp_path: Path, daemon_of: Callable[..., Daemon]
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    cold = f'[cold]\ndirectories = ["{disk}"]\nsize = "64MiB"\nwrite = "through"\nscrub = 0\n'
    daemon = daemon_of(config=cold + SMALL)
    daemon.wait_for_disks()
    model, ids = deep("llama"), prompt(TOKENS)
    wanted, memory = generated(model, ids), cache_bytes(model) // 4
    options = {"block_tokens": BLOCK, "memory": memory, "patience_ms": 10_000}
    with daemon.connect() as client, attach(model, client, **options) as attached:
        assert_same(generated(model, ids), wanted)
        daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] >= 21)
        fill(daemon)
        attached._store.place().space.prefill(1e-9)
        assert_same(generated(model, ids), wanted)
        assert attached.counts["loaded_tokens"] == 288
        assert attached.counts["disk_tokens"] > 100
        assert not attached.counts["recomputed_tokens"]


@pytest.mark.parametrize("keep_s", [0, 60])
def test_a_daemon_that_starts_again_is_used_again(
    daemon_of: Callable[..., Daemon], tmp_path: Path, keep_s: int
) -> None:
    """The blocks that the cache had are read from the memory of the old one."""
    folder = tmp_path / "daemon"
    daemon = daemon_of(folder=folder, keep_s=keep_s)
    model, ids = deep("llama"), prompt(TOKENS)
    wanted, memory = generated(model, ids), cache_bytes(model) // 4

    def restart() -> None:
        daemon.process.send_signal(signal.SIGKILL)
        daemon.process.wait(20)
        daemon_of(folder=folder, keep_s=keep_s)

    options = {"block_tokens": BLOCK, "memory": memory}
    with daemon.connect() as client, attach(model, client, **options) as attached:
        assert_same(generated(model, ids, stopping_criteria=watched(None, 12, restart)), wanted)
        assert not attached.counts["recomputed_tokens"]


def test_a_lost_connection_ends_nothing(daemon_of: Callable[..., Daemon]) -> None:
    daemon = daemon_of(config=SMALL)
    model, ids = deep("llama"), prompt(TOKENS)
    wanted, memory = generated(model, ids), cache_bytes(model) // 4
    options = {"block_tokens": BLOCK, "memory": memory}
    with daemon.connect() as client, attach(model, client, **options) as attached:

        def disconnect() -> None:
            client.link.connection._sock.shutdown(socket.SHUT_RDWR)
            fill(daemon)

        assert_same(generated(model, ids, stopping_criteria=watched(None, 12, disconnect)), wanted)
        assert attached.counts["recomputed_tokens"] > 100


def test_a_renewal_that_fails_keeps_the_blocks_and_leaks_no_lease(
    shared_daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = deep("llama"), prompt(100, seed=32)
    before = leases(shared_daemon.stats())
    with shared_daemon.connect() as client, torch.no_grad():
        cache = KvtierCache.from_prompt(
            model, ids[:, :98], client, block_tokens=BLOCK, memory="1MiB"
        )
        wanted, ours = model(ids).logits[0, 97], leases(shared_daemon.stats())
        for row in cache.offload._held:
            row._renew_at = 0.0
        failures = lease_fails(monkeypatch, 1)
        with pytest.raises(Unavailable):
            model(ids[:, 97:98], past_key_values=cache)
        assert not failures
        assert leases(shared_daemon.stats()) == ours
        logits = model(ids[:, 97:98], past_key_values=cache).logits[0, 0]
        assert (logits - wanted).abs().max() <= ERROR
        assert not cache.offload._store.counts["recomputed_tokens"]
        cache.close()
        assert leases(shared_daemon.stats()) == before


def test_a_renewal_that_fails_after_one_of_two_leases_releases_it(
    shared_daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Space, "most_keys", lambda _: 3)
    model, ids = deep("llama"), prompt(100, seed=33)
    before = leases(shared_daemon.stats())
    with shared_daemon.connect() as client:
        cache = KvtierCache.from_prompt(
            model, ids[:, :98], client, block_tokens=BLOCK, memory="1MiB"
        )
        (row,), ours = cache.offload._held, leases(shared_daemon.stats())
        runs, row._renew_at = row.runs, 0.0
        add = row._add

        def added(lease: Any, warm: Any = None) -> None:
            add(lease, warm)
            lease_fails(monkeypatch, 1)

        monkeypatch.setattr(row, "_add", added)
        with pytest.raises(Unavailable):
            row.hold(cache.offload._keys[0][:6])
        assert row.runs == runs
        assert leases(shared_daemon.stats()) == ours
        cache.close()
        assert leases(shared_daemon.stats()) == before


def test_blocks_that_another_client_does_not_finish_are_an_error_until_it_ends(
    client: Client, shared_daemon: Daemon
) -> None:
    model, ids = deep("llama"), prompt(100, seed=34)
    cache = KvtierCache.from_prompt(
        model, ids[:, :20], client, block_tokens=BLOCK, memory="1MiB", patience_ms=50
    )
    space = cache.offload._space
    keys = space.keys(ids[0].tolist(), b"", cache.offload._extras)
    with torch.no_grad(), shared_daemon.connect(name="other") as other:
        wanted = model(ids).logits[0]
        saving = other.open(space.spec).reserve(keys[2:4])
        with saving, contextlib.suppress(StaleLease):
            assert len(saving) == 2
            logits = model(ids[:, 19:98], past_key_values=cache).logits[0]
            assert (logits - wanted[19:98]).abs().max() <= ERROR
            for _ in range(2):
                with pytest.raises(StaleLease, match="another client"):
                    model(ids[:, 98:99], past_key_values=cache)
                assert cache.get_seq_length() == 98
            raise StaleLease("gives the slots back")
        logits = model(ids[:, 98:99], past_key_values=cache).logits[0, 0]
        assert (logits - wanted[98]).abs().max() <= ERROR


def test_a_daemon_that_is_gone_is_an_error(daemon_of: Callable[..., Daemon]) -> None:
    daemon = daemon_of()
    model, ids = deep("llama"), prompt(TOKENS)
    memory = cache_bytes(model) // 4
    with daemon.connect(reconnect_s=0) as client:
        attached = attach(model, client, block_tokens=BLOCK, memory=memory)
        with attached, pytest.raises(Unavailable):
            generated(model, ids, stopping_criteria=watched(None, 3, daemon.stop))
        with pytest.raises(Unavailable, match="no daemon"):
            attach(model, client, block_tokens=BLOCK, memory=memory)._run(ids)


# --- what is refused ---------------------------------------------------------------------------


def test_a_context_that_does_not_fit_is_refused(
    client: Client, daemon_of: Callable[..., Daemon]
) -> None:
    model, ids = deep("llama"), prompt(TOKENS, seed=9)
    with pytest.raises(InvalidArgument, match="300 tokens need"):
        KvtierCache.from_prompt(model, ids, client, block_tokens=BLOCK, memory="100KiB")
    layer = cache_bytes(model, tokens=1) // 12
    memory = layer * (2 * (TOKENS + 10) + 12 * BLOCK)
    cache = KvtierCache.from_prompt(model, ids, client, block_tokens=BLOCK, memory=memory)
    with pytest.raises(InvalidArgument, match="311 tokens need"):
        generated(model, ids, past_key_values=cache)
    assert cache.get_seq_length() == 310
    cache.close()
    assert not model._forward_pre_hooks
    both = torch.cat([ids, prompt(TOKENS, seed=10)])
    with (
        daemon_of(warm="1MiB").connect() as small,
        pytest.raises(Refused, match=r"warm\.size"),
    ):
        KvtierCache.from_prompt(model, both, small, block_tokens=BLOCK, memory=2 * memory)
    assert not model._forward_pre_hooks


def test_what_generate_may_not_have_room_for_is_refused_before_it_computes(client: Client) -> None:
    model, ids = deep("llama"), prompt(100, seed=35)
    layer = cache_bytes(model, tokens=1) // 12
    memory = layer * (2 * 120 + 12 * BLOCK)
    with attach(model, client, block_tokens=BLOCK, memory=memory) as attached:
        for more in ({"max_new_tokens": 22}, {"max_length": 122}):
            with pytest.raises(InvalidArgument, match="121 tokens need"):
                model.generate(ids, **more)
            assert not attached.counts["saved_blocks"]
        assert_same(generated(model, ids, tokens=21), attached._generate(
            ids, max_new_tokens=21, do_sample=False, return_dict_in_generate=True, output_logits=True,
        ))  # fmt: skip


def test_a_call_with_other_values_than_those_of_its_tokens_is_refused_and_saves_nothing(
    client: Client,
) -> None:
    model, ids = deep("llama"), prompt(100, seed=36)
    some, mask = ids[:, 19:], torch.ones(1, 100, dtype=torch.long)
    padded = torch.cat([torch.zeros_like(mask[:, :10]), mask[:, 10:]], 1)
    places = torch.arange(19, 100)[None]
    cache = KvtierCache.from_prompt(model, ids[:, :20], client, block_tokens=BLOCK, memory="1MiB")
    with torch.no_grad():
        wanted = model(ids).logits[0]
        for more in (
            {"attention_mask": padded},
            {"attention_mask": mask[:, 1:]},
            {"attention_mask": mask[:, None, None].float()},
            {"position_ids": places + 200},
            {"position_ids": places[:, :1]},
            {"cache_position": places[0] + 1},
            {"cache_position": torch.tensor(19)},
            {"attention_mask": {"full_attention": mask}},
            {"token_type_ids": torch.zeros_like(some)},
            {"inputs_embeds": torch.zeros(1, 81, 48)},
            {"position_embeddings": (torch.zeros(1), torch.zeros(1))},
        ):
            with pytest.raises(InvalidArgument, match=f"memory: .*{next(iter(more))}"):
                model(some, past_key_values=cache, **more)
        with pytest.raises(InvalidArgument, match="by name"):
            model(some, padded, past_key_values=cache)
        with pytest.raises(InvalidArgument, match=r"attention_mask|position_ids"):
            model.generate(ids, attention_mask=padded, max_new_tokens=2, past_key_values=cache)
        assert cache.save() == BLOCK
        more = {"attention_mask": mask, "position_ids": places}
        logits = model(some, past_key_values=cache, **more).logits[0]
        assert (logits - wanted[19:]).abs().max() <= ERROR
        cache.close()
        plain = KvtierCache.from_prompt(model, ids, client, block_tokens=BLOCK)
        assert plain.loaded_tokens == 96
        logits = model(ids[:, 96:], past_key_values=plain).logits[0]
        assert (logits - wanted[96:]).abs().max() <= ERROR


def test_a_cache_of_weights_that_have_changed_is_refused(client: Client) -> None:
    model, ids = deep("llama"), prompt(100, seed=37)
    cache = KvtierCache.from_prompt(model, ids[:, :20], client, block_tokens=BLOCK, memory="1MiB")
    before = [one.clone() for one in model.parameters()]
    with torch.no_grad():
        for one in model.parameters():
            one.mul_(1.5)
        with pytest.raises(InvalidArgument, match="changed"):
            model(ids[:, 19:], past_key_values=cache)
        for one, value in zip(model.parameters(), before, strict=True):
            one.copy_(value)
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(InvalidArgument, match="changed"),
        ):
            model(ids[:, 19:], past_key_values=cache)
        assert cache.save() == BLOCK
        logits = model(ids[:, 19:], past_key_values=cache).logits
        assert (logits - model(ids).logits[:, 19:]).abs().max() <= ERROR


def test_what_cannot_be_offloaded_is_refused(client: Client) -> None:
    model, ids = deep("llama"), prompt(40)
    with pytest.raises(InvalidArgument, match=r"memory: .* not an amount"):
        attach(model, client, memory="much")
    with pytest.raises(InvalidArgument, match="importance"):
        attach(model, client, memory="1MiB", importance="last")
    for kind in ("mistral", "gemma3", "lfm2"):
        with pytest.raises(UnsupportedModel, match="full attention"):
            KvtierCache.from_prompt(tiny_model(kind), ids, client, memory="1MiB")
    with attach(model, client, memory="1MiB", block_tokens=BLOCK):
        for more in (
            {"num_beams": 2},
            {"do_sample": True, "num_return_sequences": 2},
            {"use_cache": False},
        ):
            with pytest.raises(InvalidArgument, match="memory: a call with"):
                model.generate(ids, max_new_tokens=2, **more)
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        with pytest.raises(InvalidArgument, match="padding"):
            model.generate(ids, attention_mask=mask, max_new_tokens=2)
    cache = KvtierCache.from_prompt(model, ids, client, block_tokens=BLOCK, memory="1MiB")
    with pytest.raises(InvalidArgument, match="cannot be changed"):
        cache.crop(-3)
    with torch.no_grad(), pytest.raises(InvalidArgument, match="input_ids"):
        model(inputs_embeds=torch.zeros(1, 1, 48), past_key_values=cache)
    with pytest.raises(InvalidArgument, match="without gradients"):
        model(ids[:, -1:], past_key_values=cache)
    with torch.no_grad(), pytest.raises(InvalidArgument, match="call the model of the cache"):
        model.model(ids[:, -1:], past_key_values=cache)
