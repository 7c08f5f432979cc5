"""The pages of an SGLang rank in a real daemon: a contract for every layout of a pool, and every fault."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.frame import PAGE
from kvtier.space import Space
from kvtier.units import MIB
from kvtier.wire import SLOT
from kvtier_plugins import page_store as store_module
from kvtier_plugins.page_store import PageStore, RankCache
from kvtier_sglang.identity import INDEXER, KV, ModelFacts, RankPlace, describe, server_run
from kvtier_sglang.options import StorageOptions
from kvtier_sglang.pages import find_pages
from support.daemons import Daemon
from support.gated import gated_daemon, unwritten
from support.host_pools import HostPool, IndexerPool, hashes, indices_of

LOG = logging.getLogger("sglang.kvtier")
ALONE = RankPlace(0, 1, "stage 0 of 1", 1, True)
FACTS = ModelFacts("org/model", None, "auto", 0, 1, "default", "0.5.23", {"dtype": "float16"})
SLOTS = [3, 9, 4, 15, 0]


@pytest.fixture
def store_of() -> Iterator[Callable[..., PageStore]]:
    """Makes the store of a rank; closes it at the end."""
    stores = []

    def make(
        socket: str, pools: dict[str, Any], place: RankPlace = ALONE, **options: Any
    ) -> PageStore:
        pages = {name: find_pages(pool) for name, pool in pools.items()}
        spec = describe(FACTS, pages, place, weights=options.pop("weights", "rev:1"))
        cache = RankCache(spec, pages, "sglang", LOG, place.shard, place.writes)
        stores.append(PageStore(cache, StorageOptions(socket=socket, **options)))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"still not so after {seconds} s"
        time.sleep(0.01)


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_pages_come_back_in_other_places_of_another_pool(
    shared_daemon: Daemon, store_of: Callable[..., PageStore], layout: str
) -> None:
    source, target, keys = HostPool(layout), HostPool(layout), hashes(5, layout)
    content = source.fill(SLOTS, 1)
    saver = store_of(shared_daemon.socket, {KV: source})
    assert saver.exists(keys) == 0
    assert saver.save(KV, keys, indices_of(SLOTS)) == [True] * 5
    loader = store_of(shared_daemon.socket, {KV: target})
    others = target.fill(range(16), 2)
    assert loader.exists(keys) == 5
    assert loader.load(KV, keys, indices_of([7, 2, 11, 0, 5])) == [True] * 5
    assert target.read([7, 2, 11, 0, 5]) == content
    rest = [number for number in range(16) if number not in (7, 2, 11, 0, 5)]
    assert target.read(rest) == [others[number] for number in rest]
    assert loader.counts["loaded"] == 5 and saver.counts["saved:granted"] == 5


def test_a_part_of_a_chain_is_found_alone_and_ends_at_the_first_missing_page(
    shared_daemon: Daemon, store_of: Callable[..., PageStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang asks in batches, and names the pages before a batch only on request."""
    pool, keys = HostPool(), hashes(6, "parts")
    content = pool.fill(SLOTS, 3)
    store = store_of(shared_daemon.socket, {KV: pool})
    assert store.save(KV, keys[1:3], indices_of(SLOTS[1:3]), keys[0]) == [True] * 2
    assert store.save(KV, keys[4:6], indices_of(SLOTS[3:5])) == [True] * 2
    assert store.exists(keys) == 0 and store.exists(keys[1:]) == 2 and store.exists(keys[4:]) == 2
    pool.fill(range(16), 4)
    assert store.load(KV, keys[1:], indices_of([1, 2, 3, 4, 5])) == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert pool.read([1, 2]) == content[1:3]
    assert store.save(KV, keys[:4], indices_of(SLOTS[:4])) == [True] * 4  # two are present
    assert store.exists(keys) == 6
    monkeypatch.setattr(Space, "most_keys", lambda _: 2)  # of one request
    assert store.exists(keys) == 6 and store.exists([*keys[:3], *hashes(2, "other")]) == 3
    assert store.exists([]) == 0 and store.load(KV, [], indices_of([])) == []


def test_a_backup_beyond_the_memory_waits_for_the_disk_and_loses_no_page(
    daemon_of: Callable[..., Daemon], store_of: Callable[..., PageStore], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(store_module, "SAVE_WAIT_S", 60.0)
    daemon, gate = gated_daemon(daemon_of, tmp_path, MIB)
    store, indices = store_of(daemon.socket, {KV: HostPool()}), indices_of(range(16))

    def save(number: int) -> bool:
        return all(store.save(KV, hashes(16, str(number)), indices))

    saved = [save(0)]
    page = daemon.stats()["tiers"]["warm"]["used_bytes"] // 16
    full = MIB // (16 * -(-page // PAGE) * PAGE)
    saved += [save(number) for number in range(1, full)]
    later = threading.Thread(target=lambda: saved.append(save(full)))
    later.start()
    daemon.wait_for(lambda stats: stats["refused_tokens"]["writing"])
    gate.touch()
    later.join(60)
    assert saved == [True] * (full + 1) and unwritten(daemon.stats()) == 0
    daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] == 16 * (full + 1))


def test_a_page_is_found_only_with_its_indexer_page(
    shared_daemon: Daemon, store_of: Callable[..., PageStore]
) -> None:
    pools, keys = {KV: HostPool("page_first"), INDEXER: IndexerPool()}, hashes(4, "indexer")
    store = store_of(shared_daemon.socket, pools)
    pools[INDEXER].rows.array[:] = [[row] * 48 for row in range(16)]
    assert store.save(KV, keys, indices_of([0, 1, 2, 3])) == [True] * 4
    assert store.exists(keys) == 0
    assert store.load(KV, keys, indices_of([4, 5, 6, 7])) == [False] * 4
    assert store.save(INDEXER, keys[:3], indices_of([8, 9, 10])) == [True] * 3
    assert store.exists(keys) == 3
    assert store.load(INDEXER, keys, indices_of([4, 5, 6, 7])) == [True] * 3 + [False]
    assert [row[0] for row in pools[INDEXER].rows.array[4:8]] == [8, 9, 10, 7]


def test_pages_of_ranks_are_found_when_all_ranks_have_saved(
    shared_daemon: Daemon, store_of: Callable[..., PageStore]
) -> None:
    keys, pools = hashes(3, "ranks"), [HostPool(), HostPool()]
    content = [pool.fill([1, 2, 3], seed) for seed, pool in enumerate(pools)]
    ranks = [
        store_of(shared_daemon.socket, {KV: pool}, RankPlace(shard, 2, "stage 0 of 1", 2, True))
        for shard, pool in enumerate(pools)
    ]
    assert ranks[0].save(KV, keys, indices_of([1, 2, 3])) == [True] * 3
    assert [rank.exists(keys) for rank in ranks] == [0, 0]
    assert ranks[1].save(KV, keys[:2], indices_of([1, 2])) == [True] * 2
    assert [rank.exists(keys) for rank in ranks] == [2, 2]
    for rank, pool, pages in zip(ranks, pools, content, strict=True):
        assert rank.load(KV, keys, indices_of([7, 8, 9])) == [True, True, False]
        assert pool.read([7, 8]) == pages[:2]


def test_a_rank_that_is_not_the_writer_saves_nothing(
    shared_daemon: Daemon, store_of: Callable[..., PageStore]
) -> None:
    reader = store_of(
        shared_daemon.socket, {KV: HostPool()}, RankPlace(0, 1, "stage 0 of 1", 2, False)
    )
    keys = hashes(2, "not the writer")
    assert reader.save(KV, keys, indices_of([0, 1])) == [False] * 2
    assert reader.exists(keys) == 0


def test_other_weights_and_other_layouts_share_nothing(
    shared_daemon: Daemon, store_of: Callable[..., PageStore]
) -> None:
    keys = hashes(2, "identity")
    store = store_of(shared_daemon.socket, {KV: HostPool()})
    assert store.save(KV, keys, indices_of([0, 1])) == [True] * 2
    assert store_of(shared_daemon.socket, {KV: HostPool()}).exists(keys) == 2
    assert store_of(shared_daemon.socket, {KV: HostPool()}, weights="rev:2").exists(keys) == 0
    assert store_of(shared_daemon.socket, {KV: HostPool("page_first")}).exists(keys) == 0


def test_after_a_clear_all_ranks_find_only_what_was_saved_since(
    shared_daemon: Daemon, store_of: Callable[..., PageStore]
) -> None:
    keys = hashes(2, "cleared")
    ranks = [store_of(shared_daemon.socket, {KV: HostPool()}) for _ in range(2)]
    assert ranks[0].save(KV, keys, indices_of([0, 1])) == [True] * 2
    for rank in ranks:
        rank.clear(server_run())
        assert rank.exists(keys) == 0
    assert ranks[0].save(KV, keys, indices_of([0, 1])) == [True] * 2
    assert ranks[1].exists(keys) == 2
    ranks[1].clear(server_run())
    assert [rank.exists(keys) for rank in ranks] == [2, 0]


def test_indices_that_are_no_pages_move_nothing(
    shared_daemon: Daemon, store_of: Callable[..., PageStore]
) -> None:
    pool, keys = HostPool(), hashes(2, "indices")
    store = store_of(shared_daemon.socket, {KV: pool})
    before = pool.fill(range(16), 5)
    assert store.save(KV, keys, indices_of([0, 1])) == [True] * 2
    for wrong in (
        indices_of([0]),
        indices_of([0, 1, 2, 3]),
        indices_of([0, 1]) + 1,
        indices_of([0, 16]),
        indices_of([0, -1]),
    ):
        assert store.load(KV, keys, wrong) == [False] * 2
        assert store.save(KV, hashes(2, "never"), wrong) == [False] * 2
    assert pool.read(range(16)) == before and store.exists(hashes(2, "never")) == 0
    assert store.load("mamba", keys, indices_of([0, 1])) == [False] * 2
    assert store.keeper.space is not None  # the daemon is not to blame


def test_without_a_daemon_nothing_is_found_and_one_line_is_logged(
    store_of: Callable[..., PageStore], daemon_of: Callable[..., Daemon], tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    pool, keys = HostPool(), hashes(2)
    with caplog.at_level(logging.INFO, "sglang.kvtier"):
        store = store_of(str(tmp_path / "kvtier.sock"), {KV: pool})
        for _ in range(3):
            assert store.exists(keys) == 0
            assert store.load(KV, keys, indices_of([0, 1])) == [False] * 2
            assert store.save(KV, keys, indices_of([0, 1])) == [False] * 2
        attempts, connect = [], store.keeper._connect
        store.keeper._connect = lambda: (attempts.append(1), connect())[1]
        until(lambda: len(attempts) >= 2)
        assert len(caplog.records) == 1 and "continuing without" in caplog.text
        daemon_of(folder=tmp_path)
        until(lambda: store.keeper.space is not None)
        assert store.save(KV, keys, indices_of([0, 1])) == [True] * 2
        assert len(caplog.records) == 2 and "connected to the daemon" in caplog.text
    assert store.counts["away"] == 18


@pytest.mark.parametrize("end", ["kill", "stop", "hang"])
def test_a_daemon_that_ends_or_hangs_costs_one_deadline_and_is_used_again(
    store_of: Callable[..., PageStore], daemon_of: Callable[..., Daemon], tmp_path: Path, end: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    pool, keys = HostPool(), hashes(2)
    content = pool.fill([0, 1], 6)
    daemon = daemon_of(folder=tmp_path)
    store = store_of(daemon.socket, {KV: pool}, patience_ms=100)
    assert store.save(KV, keys, indices_of([0, 1])) == [True] * 2
    assert store.keeper.client is not None
    store.keeper.client.link.connection.timeout_s = 0.3  # the next connection has more time
    if end == "hang":
        daemon.process.send_signal(signal.SIGSTOP)
    elif end == "kill":
        daemon.process.kill()
        daemon.process.wait()
    else:
        daemon.stop()
    caplog.clear()
    with caplog.at_level(logging.INFO, "sglang.kvtier"):
        assert store.load(KV, keys, indices_of([2, 3])) == [False] * 2
        assert store.exists(keys) == 0 and store.save(KV, keys, indices_of([0, 1])) == [False] * 2
        assert (store.counts["failed:load"], store.counts["away"]) == (
            1,
            4,
        )  # nothing else was asked
        assert [record.levelname for record in caplog.records] == ["WARNING"]
    if end == "hang":
        daemon.process.send_signal(signal.SIGCONT)
    else:
        daemon_of(folder=tmp_path)
    until(lambda: store.keeper.space is not None)
    if end != "hang":
        assert store.exists(keys) == 0  # its memory was not kept
        assert store.save(KV, keys, indices_of([0, 1])) == [True] * 2
    assert store.load(KV, keys, indices_of([2, 3])) == [True] * 2
    assert pool.read([2, 3]) == content


@pytest.mark.parametrize("held", [False, True])
def test_a_load_waits_for_pages_on_disk(
    store_of: Callable[..., PageStore], daemon_of: Callable[..., Daemon], tmp_path: Path, held: bool
) -> None:
    store, _, pool, keys, content = on_disk(store_of, daemon_of, tmp_path)
    if held:
        found = store.hold(keys)
        assert 0 < found.waited_s < 2
        assert store.load_held(found, {KV: indices_of([8, 9, 10, 11])}, 4)
        assert store.hold(keys).waited_s == 0
    else:
        assert store.load(KV, keys, indices_of([8, 9, 10, 11])) == [True] * 4
    assert pool.read([8, 9, 10, 11]) == content


def test_a_wait_for_the_disk_ends_while_another_thread_waits(
    store_of: Callable[..., PageStore], daemon_of: Callable[..., Daemon], tmp_path: Path
) -> None:
    store, _, _, keys, _ = on_disk(store_of, daemon_of, tmp_path, patience_ms=300)
    took: list[float] = []

    def look() -> None:
        began = time.monotonic()
        store.hold(keys).release()
        took.append(time.monotonic() - began)

    looks = threading.Thread(target=look, daemon=True)
    with store._loading:
        looks.start()
        looks.join(5)
    looks.join(5)
    assert took and took[0] < 2


def test_a_lease_is_released_if_the_answer_of_the_next_one_fails(
    store_of: Callable[..., PageStore], daemon_of: Callable[..., Daemon], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    store, _, _, keys, _ = on_disk(store_of, daemon_of, tmp_path)
    leases, space = [], store.keeper.space
    assert space is not None and store.load(KV, keys[:2], indices_of([4, 5])) == [True] * 2
    lease = space.lease
    monkeypatch.setattr(
        space, "lease", lambda *given: (leases.append(lease(*given)), leases[-1])[1]
    )

    def fails(*given: Any) -> Any:
        raise ValueError("no answer")

    monkeypatch.setattr(store, "_answer", fails)
    assert store.hold(keys).ready == 0
    assert (leases[0].ready, leases[0].coming, leases[0]._id) == (2, 2, 0)


def on_disk(
    store_of: Callable[..., PageStore], daemon_of: Callable[..., Daemon], tmp_path: Path, **options: Any
) -> tuple[PageStore, Daemon, HostPool, list[str], list[bytes]]:  # fmt: skip
    """A store, and four pages of it that are on disk only."""
    (tmp_path / "disk").mkdir()
    cold = f'[cold]\ndirectories = ["{tmp_path / "disk"}"]\nsize = "96MiB"\nsegment = "1MiB"\n'
    daemon = daemon_of(folder=tmp_path, config=cold)
    daemon.wait_for_disks()
    pool, keys = HostPool(), hashes(4)
    content = pool.fill([0, 1, 2, 3], 7)
    store = store_of(daemon.socket, {KV: pool}, **options)
    assert store.save(KV, keys, indices_of([0, 1, 2, 3])) == [True] * 4
    space = store.keeper.space
    assert space is not None
    until(lambda: space.kept() == (4, 4))
    daemon.stop()
    daemon = daemon_of(folder=tmp_path, config=cold)
    daemon.wait_for_disks()
    until(lambda: store.keeper.space is not None)
    until(lambda: space.kept() == (0, 4))
    return store, daemon, pool, keys, content


def test_with_verify_an_overwritten_page_is_not_loaded(
    shared_daemon: Daemon, store_of: Callable[..., PageStore]
) -> None:
    pool, keys = HostPool(), hashes(3, "verified")
    store = store_of(shared_daemon.socket, {KV: pool}, verify=True)
    assert store.save(KV, keys, indices_of([0, 1, 2])) == [True] * 3
    assert store.load(KV, keys, indices_of([3, 4, 5])) == [True] * 3
    space, client = store.keeper.space, store.keeper.client
    assert space is not None and client is not None
    lease = space.lease(store._keys(space, keys[1:2]))
    ((extent, _, offset, _),) = SLOT.iter_unpack(lease.part(0, 0).slots)
    memory = client.reader().mappings[extent]
    assert memory is not None
    memoryview(memory)[offset] ^= 1
    lease.release()
    assert store.load(KV, keys, indices_of([3, 4, 5])) == [False] * 3
    assert store.counts["spoilt"] == 3
    until(lambda: store.exists(keys) == 1)  # the daemon has forgotten it
    assert store.load(KV, keys, indices_of([3, 4, 5])) == [True, False, False]


def test_held_pages_stay_in_memory_and_are_loaded_after_the_daemon_has_ended(
    store_of: Callable[..., PageStore], daemon_of: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon = daemon_of(folder=tmp_path, warm="1MiB")
    pool, keys = HostPool(), hashes(4, "held")
    content = pool.fill([0, 1, 2, 3], 8)
    store = store_of(daemon.socket, {KV: pool})
    assert store.save(KV, keys, indices_of([0, 1, 2, 3])) == [True] * 4
    held = store.hold([*keys, *hashes(2, "never saved")])
    assert (held.ready, held.coming) == (4, 0)
    for number in range(100):  # more than the memory has
        store.save(KV, hashes(16, f"others {number}"), indices_of(range(16)))
    assert store.exists(keys) == 4
    daemon.process.kill()
    daemon.process.wait()
    assert store.load_held(held, {KV: indices_of([9, 8])}, 2)
    assert pool.read([9, 8]) == content[:2]
    assert held.ready == 0 and not store.load_held(held, {KV: indices_of([9, 8])}, 2)
    assert store.hold(keys).ready == 0  # no daemon
    assert store.counts["failed:load"] == 0


def test_pages_that_are_held_no_longer_are_not_loaded_as_others(
    store_of: Callable[..., PageStore], daemon_of: Callable[..., Daemon], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """After the deadline their slots contain other pages."""
    daemon = daemon_of(folder=tmp_path, warm="1MiB")
    pool, keys = HostPool(), hashes(4, "late")
    store = store_of(daemon.socket, {KV: pool})
    assert store.save(KV, keys, indices_of([0, 1, 2, 3])) == [True] * 4
    monkeypatch.setattr(store_module, "LEASE_MS", 1)
    held = store.hold(keys)
    assert held.ready == 4
    time.sleep(0.1)
    for number in range(100):
        store.save(KV, hashes(16, f"later {number}"), indices_of(range(16)))
    assert store.exists(keys) == 0
    assert not store.load_held(held, {KV: indices_of([4, 5, 6, 7])}, 4)
    assert store.counts["load_missing"] == 4
