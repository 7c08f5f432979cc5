"""The linker that SGLang creates by its name: its UnifiedCacheLinker, over a PageStore.

The scheduler's thread calls it. A lookup holds the pages that it reports until they are loaded, because
SGLang aborts the requests of a load that fails. One thread loads pages, and one saves them. What a call
returns to SGLang depends on its arguments alone, except for lookups and results, which SGLang reduces over
the ranks.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from queue import Empty, Queue
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import (
    CPUFP8KVCacheMethod,
    UnquantizedKVCacheMethod,
)
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import (
    DevicePoolEntry,
    DevicePoolGroup,
    resolve_hybrid_device_pool_group,
)
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (
    LayerWiseLoadCounter,
    UnifiedCacheLinker,
    device_module,
)
from sglang.srt.runtime_context import get_parallel

from kvtier.wire import GRANTED, PRESENT
from kvtier_plugins import Unsupported
from kvtier_plugins.page_store import HeldPages
from kvtier_sglang.device import DeviceCopies
from kvtier_sglang.identity import GROUPS, RankPlace
from kvtier_sglang.options import read_linker_options
from kvtier_sglang.pages import SHAPE, ServedPool, find_pages
from kvtier_sglang.server import ServedPages, log

BUSY_SHARE = 4  # after a wait for the disk, the scheduler does not wait for this many times as long
ASK_AGAIN_S = 1.0  # SGLang repeats the lookup of a waiting request before each batch
COMING_AGAIN_S = 0.05  # the same, while pages of it are coming from disk
LEAST_LEASE_S = 2.0  # that is left of pages that a load copies
MOST_HELD = 256  # requests
WAITING_SAVES = 2  # with this many queued, none waits for the disk: their pages cannot be evicted
SCALELESS = (UnquantizedKVCacheMethod, CPUFP8KVCacheMethod)  # all of a page is in two buffers
MOST_NAMES = 1 << 16  # of which the page before is known


class LinkerLoad(NamedTuple):
    """Pages to load: those that the lookup holds, if it was for them, their keys, and the places by pool."""

    held: HeldPages | None
    keys: list[str]
    indices: dict[str, Any]


class EntryPool:
    """A pool on the device, as `find_places` reads it."""

    def __init__(self, entry: DevicePoolEntry) -> None:
        self._entry, pool = entry, entry.device_pool
        self.page_size = size = entry.page_size
        first, second = (self.get_page_buffer_meta(range(at, at + size))[0][0] for at in (0, size))
        buffer = entry.get_hybrid_pool_buffer()[0]
        rows = (second - first) // (buffer.stride(0) * buffer.element_size())  # of a page
        self.size = min(len(one) for one in entry.get_hybrid_pool_buffer()) // rows * size
        details = (getattr(pool, "kv_cache_layout", ""), getattr(pool, "quant_method", None))
        self.layout = f"device {type(pool).__name__} {details[0]} {type(details[1]).__name__}"

    def __getattr__(self, name: str) -> Any:
        if name not in SHAPE:
            raise AttributeError(name)
        return getattr(self._entry.device_pool, name)

    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        return self._entry.get_hybrid_pool_buffer()  # type: ignore[no-any-return]

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        tensor = torch.tensor(list(indices), device="cpu")
        return self._entry.get_page_buffer_meta(tensor)  # type: ignore[no-any-return]


def pool_group(kvcache: Any, params: Any, components: set[ComponentType]) -> DevicePoolGroup:
    """The pools of a model with full attention. Raises Unsupported, or ValueError."""
    if components != {ComponentType.FULL}:
        raise Unsupported("models with states or sliding windows are not supported yet")
    if params.pp_size > 1:
        raise Unsupported("pipeline stages do not agree on what they have found")
    kind, page, layers = type(kvcache), params.page_size, range(kvcache.layer_num)
    if get_parallel().attn_dcp_size > 1:
        raise Unsupported("decode context parallelism: ranks hold different tokens of a page")
    if kind is DSATokenToKVPool:
        return resolve_hybrid_device_pool_group(
            kvcache=kvcache, page_size=page, params=params, components=components
        )
    if params.mtp_draft_device_pools or params.sidecar_draft_device_pools:
        raise Unsupported("draft models with a cache of their own are not supported yet")
    mapping: dict[int, int | tuple[int, int]]
    if kind is MLATokenToKVPool and kvcache.kv_scale_buffer is None:
        buffers, mapping = list(kvcache.kv_buffer), {at: at for at in layers}
    elif (
        kind is MHATokenToKVPool
        and kvcache.kv_cache_layout == "nhd"
        and type(kvcache.quant_method) in SCALELESS
    ):
        buffers = [*kvcache.k_buffer, *kvcache.v_buffer]
        mapping = {at: (at, len(layers) + at) for at in layers}
    else:
        raise Unsupported(f"pages of a {kind.__name__} of this layout are not supported")
    entry = DevicePoolEntry(
        name=PoolName.KV, indices_from_pool=PoolName.KV, device_pool=kvcache, components=[buffers],
        layer_mapping=mapping, page_size=page, rows_are_pages=False,
    )  # fmt: skip
    return DevicePoolGroup([entry], len(layers), page, rank_replicated=kind is MLATokenToKVPool)


def rank_place(params: Any, rank_replicated: bool) -> RankPlace:
    """The place of this process among the ranks that hold parts of a page."""
    rank, size = 0, get_parallel().tp_size
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        ranks = params.attn_tp_cache_group or params.tp_cache_group
        rank = torch.distributed.get_rank(group=ranks)
        size = torch.distributed.get_world_size(group=ranks)
    return RankPlace.of(
        HiCacheStorageConfig(
            tp_rank=rank, tp_size=size, pp_rank=params.pp_rank, pp_size=params.pp_size,
            attn_cp_rank=params.attn_cp_rank, attn_cp_size=params.attn_cp_size,
            is_mla_model=rank_replicated, enable_storage_metrics=False, is_page_first_layout=False,
            model_name=None,
        )
    )  # fmt: skip


class KvtierLinker(UnifiedCacheLinker):
    """Keeps the KV pages of a rank, and the pages of a DSA indexer with them. What it cannot keep is logged
    once; it then finds and stores nothing, and the server works without it."""

    def __init__(
        self, server_args: Any, params: Any, *, components: set[ComponentType],
        extra_config: Mapping[str, Any] | None = None, forward_stream: Any = None,
    ) -> None:  # fmt: skip
        self.forward_stream = forward_stream
        self.pools: dict[PoolName, DevicePoolEntry] = {}
        self._params, self._components = params, components
        self._kvcache = params.token_to_kv_pool_allocator.get_kvcache()
        self.layer_done_counter = LayerWiseLoadCounter(getattr(self._kvcache, "layer_num", 1) or 1)
        self._group: DevicePoolGroup | None = None
        self._copies: DeviceCopies | None = None
        self._device: Any = None
        self._writes = True
        self._held: OrderedDict[str, tuple[float, HeldPages]] = OrderedDict()
        self._may_wait_at = 0.0
        self._before: dict[str, str] = {}  # the page before each
        self._queued: dict[str, list[LinkerLoad]] = {}
        self._loads: Queue[tuple[int, list[LinkerLoad], list[Any]] | None] = Queue()
        self._offloads: Queue[tuple[list[Any], list[Any]] | None] = Queue()
        self._results: Queue[bool] = Queue()
        self._closed = self._hurries = False
        self._served = ServedPages()
        self._served.open(self._find, read_linker_options(extra_config or {}))
        started: Queue[str] = Queue()
        self._threads = [
            threading.Thread(target=self._run, args=(run, started), name=f"kvtier-{name}", daemon=True)
            for name, run in (("load", self._run_loads), ("offload", self._run_offloads))
        ]  # fmt: skip
        for thread in self._threads:
            thread.start()
        if failed := [why for _ in self._threads if (why := started.get())]:
            self._served.decline(failed[0])
        if self._served.opened is None:
            self.pools = {}

    def _find(self) -> tuple[Mapping[str, ServedPool], RankPlace]:
        self._group = group = pool_group(self._kvcache, self._params, self._components)
        self.pools = group.entry_map
        pools = {
            name: EntryPool(self.pools[PoolName(name)]) for name in GROUPS if name in self.pools
        }
        place = rank_place(self._params, group.rank_replicated)
        self._writes = place.writes
        self._device = group.entries[0].get_hybrid_pool_buffer()[0].device
        self._copies = copies = DeviceCopies.of(self._device)
        if copies is None:
            return {name: find_pages(pool) for name, pool in pools.items()}, place
        return {name: copies.pages(pool) for name, pool in pools.items()}, place

    # --- lookups ---------------------------------------------------------------------------------

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """Every number of leading pages that are in memory; they stay there for the load of this request."""
        store = self._served.usable()
        keys = [key for one in transfers if one.name == PoolName.KV for key in one.keys or ()]
        if store is None or not keys or len(transfers) > 1:
            return []
        now = time.monotonic()
        self._let_go(now)
        self._note_order(keys)
        again_s, held = self._held.pop(rid, (0.0, None))
        if held is None or held.keys != keys or now > again_s:
            before, held = held, store.hold(keys, now >= self._may_wait_at)
            again_s = now + (COMING_AGAIN_S if held.coming else ASK_AGAIN_S)
            if held.waited_s:
                self._may_wait_at = now + held.waited_s * (1 + BUSY_SHARE)
            if before is not None:
                before.release()  # only now: the pages stay in memory
        self._held[rid] = again_s, held
        return list(range(1, held.ready + 1))

    def _let_go(self, now: float) -> None:
        """Release the pages of requests that have not been looked up again for long."""
        while self._held:
            rid, (_, held) = next(iter(self._held.items()))
            if len(self._held) < MOST_HELD and now < held.until - LEAST_LEASE_S:
                return
            del self._held[rid]
            held.release()

    def _note_order(self, keys: list[str]) -> None:
        """These pages follow each other: the daemon evicts the end of a prompt before its beginning."""
        if len(self._before) > MOST_NAMES:
            self._before.clear()
        self._before.update(zip(keys[1:], keys, strict=False))

    # --- loads -----------------------------------------------------------------------------------

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Queue a load. False only if there is nothing to load: all ranks must return the same."""
        wanted = [] if self._group is None else self._group.resolve_transfers(transfers)
        if not wanted:
            return False
        keys = list(wanted[0].keys)
        _, held = self._held.pop(rid, (0.0, None))
        fits = held is not None and len(keys) <= held.ready and keys == held.keys[: len(keys)]
        if held is not None and not (fits and time.monotonic() < held.until - LEAST_LEASE_S):
            held.release()
            held = None
        places = {str(one.name): one.host_indices for one in wanted}
        self._queued.setdefault(rid, []).append(LinkerLoad(held, keys, places))
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        loads = self._queued.pop(rid, [])
        _release(loads)
        return bool(loads)

    def start_layer_wise_loading(self) -> int:
        if not self._queued:
            return -1
        loads, self._queued = [one for some in self._queued.values() for one in some], {}
        slots_ready = device_module.Event()
        slots_ready.record()
        index: int = self.layer_done_counter.update_producer()
        self._loads.put((index, loads, [slots_ready]))
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return bool(self.layer_done_counter.finish(counter_index))

    def _run_loads(self) -> None:
        while (task := self._loads.get()) is not None:
            index, loads, events = task
            try:
                for event in events:
                    event.synchronize()
                if not all(map(self._is_loaded, loads)):
                    raise RuntimeError("the pages of a request are no longer stored")
                for layer in range(self.layer_done_counter.num_layers):
                    self.layer_done_counter.complete(index, layer)
            except Exception as error:  # noqa: BLE001  # SGLang aborts the requests
                self.layer_done_counter.fail(index, error)
                log.warning("kvtier: a load failed: %s: %s", type(error).__name__, str(error))
            finally:
                _release(loads)
                self._loads.task_done()

    def _is_loaded(self, load: LinkerLoad) -> bool:
        """Copy the pages that the lookup held, or those that are found again."""
        store = self._served.opened
        if store is None:
            return False
        held, count = load.held, len(load.keys)
        if held is not None and store.load_held(held, load.indices, count):
            return True
        again = store.hold(load.keys)
        return again.ready == count and store.load_held(again, load.indices, count)

    # --- offloads --------------------------------------------------------------------------------

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Queue a save. False only if there is nothing to save: all ranks must return the same."""
        if not any(one.keys for one in transfers):
            return False
        self._offloads.put((transfers, self.record_offload_ready()))
        return True

    def _run_offloads(self) -> None:
        while (task := self._offloads.get()) is not None:
            saved = False
            try:
                saved = self._is_saved(*task)
            except Exception as error:  # noqa: BLE001  # the pages are not stored
                log.warning("kvtier: a save failed: %s: %s", type(error).__name__, str(error))
            finally:
                self._results.put(saved)
                self._offloads.task_done()

    def _is_saved(self, transfers: list[Any], events: list[Any]) -> bool:
        """Save the pages in all pools. Of ranks with equal pages one saves them."""
        for event in events:
            event.synchronize()
        store = self._served.usable()
        if store is None or self._group is None:
            return False
        wanted = self._group.resolve_transfers(transfers)
        if not wanted or not self._writes:
            return bool(wanted)
        keys = list(wanted[0].keys)
        before = self._before.get(keys[0], "")

        def waits() -> bool:
            return not self._hurries and self._offloads.qsize() < WAITING_SAVES

        saved = [
            store.save(str(one.name), keys, one.host_indices, before, waits, (GRANTED, PRESENT))
            for one in wanted
        ]
        return all(map(all, saved))

    def num_completed_offloads(self) -> int:
        return self._results.qsize()

    def pop_completed_offload(self) -> bool:
        return self._results.get_nowait()

    # --- the rest --------------------------------------------------------------------------------

    def _run(self, work: Callable[[], None], started: Queue[str]) -> None:
        """Prepare a thread, and do its work also if that failed: nothing may wait for a thread that ended."""
        why = ""
        try:
            if self._copies is not None:
                self._copies.driver.own_thread()
                device_module.set_device(self._device)  # of the indices that it reads
        except Exception as error:  # noqa: BLE001  # the linker declines
            why = f"{type(error).__name__}: {error}"
        started.put(why)
        work()

    def reset(self) -> None:
        """Wait for all copies, and forget what was queued. Stored pages stay."""
        for loads in self._queued.values():
            _release(loads)
        self._queued, self._hurries = {}, True
        self._loads.join()
        self._offloads.join()
        self._hurries = False
        while True:
            try:
                self._results.get_nowait()
            except Empty:
                break
        while self._held:
            self._held.popitem()[1][1].release()
        self.layer_done_counter.reset()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.reset()
        self._loads.put(None)
        self._offloads.put(None)
        for thread in self._threads:
            thread.join()
        self._served.close()
        if self._copies is not None:
            self._copies.close()


def _release(loads: list[LinkerLoad]) -> None:
    for one in loads:
        if one.held is not None:
            one.held.release()
