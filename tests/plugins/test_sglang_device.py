"""The pages of a server's own pools on a CUDA device, saved and loaded directly, with a CUDA driver without a
device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest

from kvtier_kernels.cuda import CopyLane, blocks
from kvtier_plugins.page_store import PageStore, RankCache
from kvtier_sglang.device import DeviceCopies
from kvtier_sglang.identity import INDEXER, KV, ModelFacts, RankPlace, describe
from kvtier_sglang.options import LinkerOptions
from support.daemons import Daemon
from support.fake_cuda import FakeCuda
from support.host_pools import HostPool, IndexerPool, hashes, indices_of

LOG = logging.getLogger("sglang.kvtier")
FACTS = ModelFacts("org/model", None, "auto", 0, 1, "default", "0.5.23", {"dtype": "float16"})
Pools = dict[str, HostPool | IndexerPool]


@pytest.fixture
def store_of(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., PageStore]]:
    """Makes the store of a rank whose pools are on the device; closes it at the end."""
    monkeypatch.setattr(blocks, "compile_kernel", lambda text, architecture: b"host\0")
    made: list[tuple[PageStore, DeviceCopies]] = []

    def make(socket: str, pools: Pools, verify: bool = False) -> PageStore:
        copies = DeviceCopies(fake_cuda.driver())
        for pool in pools.values():
            fake_cuda.device(
                pool.kv_buffer.array if isinstance(pool, HostPool) else pool.rows.array
            )
        pages = {name: copies.pages(pool) for name, pool in pools.items()}
        spec = describe(FACTS, pages, RankPlace(0, 1, "stage 0 of 1", 1, True), weights="rev:1")
        options = LinkerOptions(socket=socket, verify=verify)
        made.append((PageStore(RankCache(spec, pages, "sglang", LOG), options), copies))
        return made[-1][0]

    yield make
    for store, copies in made:
        store.close()
        copies.close()


@pytest.mark.parametrize("verify", [False, True])
def test_pages_on_a_device_come_back_in_other_places(
    shared_daemon: Daemon, store_of: Callable[..., PageStore], verify: bool
) -> None:
    pools: Pools = {KV: HostPool("page_first"), INDEXER: IndexerPool()}
    kv, indexer = pools[KV], pools[INDEXER]
    assert isinstance(kv, HostPool) and isinstance(indexer, IndexerPool)
    content = kv.fill(range(16), 1)
    indexer.rows.array[:] = [[row] * 48 for row in range(16)]
    store = store_of(shared_daemon.socket, pools, verify)
    assert kv.read(range(16)) == content  # measuring the ways to copy has changed nothing
    client = store.keeper.client  # copies that it has begun may outlive it
    assert client is not None and client.link.caller.device
    keys = hashes(4, f"device {verify}")
    for name in pools:
        assert store.save(name, keys, indices_of([3, 9, 4, 15])) == [True] * 4
    held = store.hold(keys)
    assert held.ready == 4
    assert store.load_held(held, dict.fromkeys(pools, indices_of([0, 1, 2])), 3)
    assert kv.read([0, 1, 2]) == [content[at] for at in (3, 9, 4)]
    assert [row[0] for row in indexer.rows.array[:4]] == [3, 9, 4, 3]
    assert store.load(KV, keys, indices_of([5, 6, 7, 8])) == [True] * 4
    assert kv.read([5, 6, 7, 8]) == [content[at] for at in (3, 9, 4, 15)]


def test_a_device_that_fails_saves_nothing_and_loads_nothing(
    shared_daemon: Daemon, store_of: Callable[..., PageStore], fake_cuda: FakeCuda
) -> None:
    pool, keys = HostPool("page_first"), hashes(2, "lost device")
    content = pool.fill(range(16), 2)
    store = store_of(shared_daemon.socket, {KV: pool})
    assert store.save(KV, keys, indices_of([0, 1])) == [True] * 2
    fake_cuda.lose()
    assert store.save(KV, hashes(2, "not saved"), indices_of([0, 1])) == [False] * 2
    held = store.hold(keys)
    assert held.ready == 2 and not store.load_held(held, {KV: indices_of([2, 3])}, 2)
    fake_cuda.mend()
    assert store.exists(hashes(2, "not saved")) == 0
    assert store.load(KV, keys, indices_of([2, 3])) == [True] * 2
    assert pool.read([2, 3]) == content[:2]


def test_an_interrupt_waits_for_the_copy(
    shared_daemon: Daemon, store_of: Callable[..., PageStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon would give the slots to others while the GPU writes them."""
    pool, drain, drained = HostPool("page_first"), CopyLane.drain, list[int]()
    store = store_of(shared_daemon.socket, {KV: pool})

    def interrupted(lane: CopyLane) -> None:
        raise KeyboardInterrupt

    def counted(lane: CopyLane) -> None:
        drain(lane)
        drained.append(1)

    monkeypatch.setattr(CopyLane, "finish", interrupted)
    monkeypatch.setattr(CopyLane, "drain", counted)
    with pytest.raises(KeyboardInterrupt):
        store.save(KV, hashes(2, "interrupted"), indices_of([0, 1]))
    assert drained
