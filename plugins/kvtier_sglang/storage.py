"""The storage backend that SGLang creates by its name: its HiCacheStorage, over a PageStore."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult
from sglang.srt.observability.metrics_collector import StorageMetrics

from kvtier_plugins import Unsupported
from kvtier_plugins.page_store import Moved
from kvtier_sglang.identity import GROUPS, KV, RankPlace, server_run
from kvtier_sglang.options import read_options
from kvtier_sglang.pages import ServedPool, find_pages
from kvtier_sglang.server import ServedPages


class KvtierStorage(HiCacheStorage):
    """Keeps the KV pages of a rank, and the pages of a DSA indexer with them. What it cannot keep is logged
    once; it then stores nothing, and the server works without it."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        self._config = storage_config
        self._options = read_options(storage_config.extra_config or {})
        self._pools: dict[str, Any] = {}
        self._served = ServedPages()

    # --- pools ---------------------------------------------------------------------------------

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        self._pools[str(host_pool_name)] = host_pool
        if self._served.opened is not None and str(host_pool_name) not in GROUPS:
            self._served.decline(f"the pool {host_pool_name} cannot be kept")

    def on_host_pools_registered(self) -> None:
        """All pools are known: describe them, and connect."""
        self._pools[KV] = self.mem_pool_host
        self._served.open(self._find, self._options)

    def _find(self) -> tuple[Mapping[str, ServedPool], RankPlace]:
        if others := sorted(self._pools.keys() - set(GROUPS)):
            raise Unsupported(f"pools that cannot be kept: {', '.join(others)}")
        pools = {name: find_pages(self._pools[name]) for name in GROUPS if name in self._pools}
        return pools, RankPlace.of(self._config)

    # --- pages ---------------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        store = self._served.usable()
        return store.exists(keys) if store is not None else 0

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        store = self._served.usable()
        return store.load(KV, keys, host_indices) if store is not None else [False] * len(keys)

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        return self._save(KV, keys, host_indices, extra_info)

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Sequence[Any] | None = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """A page is stored if all of its pools are, so there is one answer for all pools."""
        known = all(str(one.name) in self._pools for one in pool_transfers or ())
        pages = self.batch_exists(keys) if known else 0
        hits = {one.name: pages for one in pool_transfers or ()}
        return PoolTransferResult(pages, hits, list(range(1, pages + 1)))

    def batch_get_v2(
        self, transfers: Sequence[Any], extra_info: Any = None
    ) -> dict[str, list[bool]]:
        store, results = self._served.usable(), {}
        for one in transfers:
            keys = one.keys or []
            there = store.load(str(one.name), keys, one.host_indices) if store is not None else []
            results[one.name] = there or [False] * len(keys)
        return results

    def batch_set_v2(
        self, transfers: Sequence[Any], extra_info: Any = None
    ) -> dict[str, list[bool]]:
        return {
            one.name: self._save(str(one.name), one.keys or [], one.host_indices, extra_info)
            for one in transfers
        }

    def _save(self, pool: str, keys: list[str], indices: Any, extra_info: Any) -> list[bool]:
        store = self._served.usable()
        if store is None:
            return [False] * len(keys)
        before = (extra_info.prefix_keys if extra_info is not None else None) or [""]
        return store.save(pool, keys, indices, before[-1])

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    # SGLang copies pages with these only without `interface_v1`, which `read_options` demands.

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        return None

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[None]:
        return [None] * len(keys)

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return False

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        return False

    # --- the rest ------------------------------------------------------------------------------

    def clear(self) -> None:
        if (store := self._served.opened) is not None:
            store.clear(server_run())

    def get_stats(self) -> StorageMetrics | None:
        """The copies since the last call, if the server has metrics."""
        store = self._served.opened
        if store is None or not self._config.enable_storage_metrics:
            return None
        metrics = StorageMetrics()
        for moved, pages, speeds in (
            (store.loads, metrics.prefetch_pgs, metrics.prefetch_bandwidth),
            (store.saves, metrics.backup_pgs, metrics.backup_bandwidth),
        ):
            while moved:
                one: Moved = moved.popleft()
                pages.append(one.pages)
                speeds.append(one.nbytes / 1e9 / max(one.seconds, 1e-9))
        return metrics

    def close(self) -> None:
        self._served.close()
