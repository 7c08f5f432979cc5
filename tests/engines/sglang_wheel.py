"""SGLang's own classes on a host without a GPU. Three parts are replaced: torchvision, which its imports
name; the registration of host memory with CUDA; and its compiled hash of pages, by the same in Python."""

from __future__ import annotations

import contextlib
import hashlib
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

MISSING = [name for name in ("sglang", "torch", "orjson") if find_spec(name) is None]
WHY = (
    f"needs {', '.join(MISSING)} (make test-sglang): the plugin is not tested with SGLang's own factories, "
    "pools, controller and radix cache"
)
PAGE = 64  # tokens, as a DSA indexer demands
RANKS = {
    "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_tp_rank": 0, "attn_tp_size": 1,
    "attn_dp_rank": 0, "attn_dcp_size": 1, "attn_dcp_rank": 0,
}  # fmt: skip


class _Absent(ModuleType):
    """A module with any name in it."""

    __path__: list[str] = []  # noqa: RUF012
    __version__ = "0.28.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _absent(f"{self.__name__}.{name}")


def _absent(name: str) -> ModuleType:
    if name not in sys.modules:
        sys.modules[name] = _Absent(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)
    return sys.modules[name]


if not MISSING and find_spec("torchvision") is None:
    for module in (
        "",
        ".io",
        ".transforms",
        ".transforms.functional",
        ".transforms.v2",
        ".transforms.v2.functional",
    ):
        _absent(f"torchvision{module}")


def page_hashes(
    tokens: Sequence[int], prior: str | None = None, page_size: int = PAGE
) -> list[str]:
    """SGLang's names of pages: SHA-256 over the name of the page before, and the tokens."""
    found, digest = [], bytes.fromhex(prior or "")
    for at in range(0, len(tokens) - page_size + 1, page_size):
        text = b"".join(token.to_bytes(4, "little") for token in tokens[at : at + page_size])
        digest = hashlib.sha256(digest + text).digest()
        found.append(digest.hex())
    return found


@contextlib.contextmanager
def served(folder: Path, layout: str = "page_first", **settings: Any) -> Iterator[None]:
    """The settings of a process that serves a model with these weights."""
    from sglang.srt.mem_cache import utils
    from sglang.srt.mem_cache.hybrid_cache import hybrid_cache_controller as controllers
    from sglang.srt.mem_cache.pool_host import base, common
    from sglang.srt.runtime_context import get_context, get_parallel

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    common._cuda_host_register = lambda *_, **__: None
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    controllers.get_storage_hash_str = page_hashes
    utils.get_native_hash = lambda key, prior, size: page_hashes(
        list(key), prior.hex() if prior else None, size
    )
    with get_context().override_server_args(
        model_path=str(folder), page_size=PAGE, hicache_mem_layout=layout, hicache_ratio=2.0,
        hicache_io_backend="kernel", **settings,
    ), get_parallel().override(**RANKS):  # fmt: skip
        yield


def device_pool(kind: str, pages: int = 32) -> Any:
    """A pool of KV as the engine has on its device, here in main memory."""
    import torch
    from sglang.srt.mem_cache import memory_pool

    tokens = pages * PAGE
    if kind == "mha":
        return memory_pool.MHATokenToKVPool(tokens, PAGE, torch.bfloat16, 2, 16, 3, "cpu", False)
    if kind == "mla":
        return memory_pool.MLATokenToKVPool(tokens, PAGE, torch.bfloat16, 32, 16, 3, "cpu", False)
    return memory_pool.DSATokenToKVPool(
        tokens, PAGE, 32, torch.bfloat16, 16, 3, "cpu", 128, False, 48
    )


def host_group(kind: str, device: Any) -> Any:
    """The host pools that SGLang builds for it, filled with random bytes."""
    import torch
    from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import (
        build_kv_only_group,
        build_pool_entry,
    )

    layers = dict(enumerate(range(3)))
    group = build_kv_only_group(
        page_size=PAGE, kv_pool=device, full_layer_mapping=layers, use_mla=kind != "mha"
    )
    if kind == "dsa":
        (decl,) = [one for one in device.host_pool_decls() if one.indices_from_pool is not None]
        anchor = group.anchor_entry.host_pool
        pool = decl.host_pool_builder.build(
            decl=decl, anchor_host=anchor, allocator_type="default", packed_draft_device_pools=()
        )
        group.add_entry(
            build_pool_entry(
                name=decl.pool_name, host_pool=pool, device_pool=device, layer_mapping=layers,
                transfer_layer_id_max=3,
            )
        )  # fmt: skip
    for entry in group.entries:
        memory = getattr(entry.host_pool, "index_k_with_scale_buffer", None)
        memory = entry.host_pool.kv_buffer if memory is None else memory
        memory.view(torch.uint8).random_(0, 256)
    return group


def extra(socket: str, **changes: Any) -> dict[str, Any]:
    """What docs/sglang.md says to write."""
    return {
        "backend_name": "kvtier", "module_path": "kvtier_sglang.storage", "class_name": "KvtierStorage",
        "interface_v1": 1, "kvtier": {"socket": socket},
    } | changes  # fmt: skip


def storage_config(given: dict[str, Any], **changes: Any) -> Any:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    return HiCacheStorageConfig(
        **(
            {
                "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
                "is_mla_model": False, "enable_storage_metrics": True, "is_page_first_layout": True,
                "model_name": "m", "extra_config": given,
            }
            | changes
        )
    )  # fmt: skip


def backend(group: Any, config: Any) -> Any:
    """A backend from SGLang's factory, with these pools."""
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    pool = group.anchor_entry.host_pool
    found = StorageBackendFactory.create_backend("dynamic", config, pool)
    found.register_mem_pool_host(pool)
    for entry in group.entries:
        found.register_mem_host_pool_v2(entry.host_pool, entry.name)
    found.on_host_pools_registered()
    return found


def controller(group: Any, device: Any, given: dict[str, Any], world: Any) -> Any:
    import threading

    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

    return HybridCacheController(
        SimpleNamespace(get_kvcache=lambda: device), group, PAGE, world, threading.Event(),
        write_policy="write_through", io_backend="direct", storage_backend="dynamic",
        prefetch_threshold=PAGE, model_name="m", storage_backend_extra_config=given,
        transfer_layer_id_max=3,
    )  # fmt: skip


def page(pool: Any, number: int) -> bytes:
    """A page, as SGLang's own flat copy of it."""
    import torch

    flat = pool.get_data_page(number * PAGE, flat=True).contiguous()
    return bytes(flat.view(torch.uint8).numpy().tobytes())


# --- the linker --------------------------------------------------------------------------------------


class Request:
    """What SGLang's radix cache and its linker read and write of a request."""

    def __init__(self, rid: str, tokens: Sequence[int], **key: str) -> None:
        from sglang.srt.mem_cache.radix_cache import RadixKey

        self.rid, self.extra_key, self.kv = rid, key.get("extra_key"), None
        self.key = RadixKey(array("q", tokens), **key)
        self.swa_branching_seqlen = self.discard_output_reason = self.session = None
        self.skip_radix_cache_insert = False
        self.last_node: Any = None
        self.indices: Any = None  # of its prefix on the device
        self.prefix_len = self.in_tree = 0


class Tree:
    """SGLang's radix cache over a pool of a device, here in main memory, with the linker that its factory
    creates. `pages` maps the name of each page to its content in all buffers, as the model computes it."""

    def __init__(self, kind: str, given: dict[str, Any], pages: int = 32, **changes: Any) -> None:
        import torch
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        self.pool = device_pool(kind, pages)
        self.allocator = PagedTokenToKVPoolAllocator(
            pages * PAGE, PAGE, torch.bfloat16, "cpu", self.pool, need_sort=False
        )
        params = CacheInitParams(
            disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE, tree_components=(ComponentType.FULL,), tree_core_backend="python", **changes,
        )  # fmt: skip
        self.cache = UnifiedRadixCache(params)
        self.linker = create_unified_cache_linker(
            None, params, backend="dynamic", config=linker_config(given),
            components=set(self.cache.components),
        )  # fmt: skip
        self.cache.init_cache_linker(self.linker)
        self.pool.register_layer_transfer_counter(self.cache.linker.layer_done_counter)

    def buffers(self) -> list[tuple[Any, bool]]:
        """All buffers of the pool, and whether a row of it is a page."""
        if hasattr(self.pool, "k_buffer") and self.pool.k_buffer is not None:
            return [(one, False) for one in (*self.pool.k_buffer, *self.pool.v_buffer)]
        rows = [(one, False) for one in self.pool.kv_buffer]
        return rows + [(one, True) for one in getattr(self.pool, "index_k_with_scale_buffer", ())]

    def _page(self, buffer: Any, is_row: bool, number: int) -> Any:
        import torch

        page = buffer[number] if is_row else buffer[number * PAGE : (number + 1) * PAGE]
        return page.view(torch.uint8).flatten()

    def content(self, number: int) -> bytes:
        return b"".join(bytes(self._page(*one, number).numpy()) for one in self.buffers())

    def compute(self, name: str, number: int) -> None:
        """As the model computes a page: its values depend on all tokens before its end."""
        import torch

        for at, one in enumerate(self.buffers()):
            page = self._page(*one, number)
            text = hashlib.shake_128(f"{name} {at}".encode()).digest(len(page))
            page.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))

    def match(self, request: Request) -> int:
        """Look a request up; return how many pages the linker found beyond those on the device."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        found = self.cache.match_prefix(MatchPrefixParams(key=request.key, req=request))
        request.last_node, request.prefix_len = found.last_device_node, found.device_prefix_len
        request.indices = self.cache.prefix_device_indices(request)
        request.in_tree = request.prefix_len
        self._found = found
        return int(found.host_hit_length) // PAGE

    def queue_load(self, request: Request) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

        found = self._found
        loaded, _ = self.cache.init_load_back(
            InitLoadBackParams(found.best_match_node, found.host_hit_length, None, request)
        )
        request.prefix_len += int(loaded)
        request.indices = self.cache.prefix_device_indices(request)

    def forward(self, *requests: Request) -> list[Request]:
        """Start the loads, and wait for each layer as attention does. Returns the requests to abort."""
        index = self.cache.ready_to_load_host_cache()
        self.cache.linker.layer_done_counter.set_consumer(index)
        for layer in range(3):
            self.pool.get_key_buffer(layer)
        failed: list[Request] = self.cache.finish_external_linker_loads(list(requests))
        return failed

    def pages_of(self, request: Request) -> list[int]:
        """The pages on the device that hold the prefix of a request."""
        return [int(one) // PAGE for one in request.indices[::PAGE]]

    def finish(self, request: Request) -> None:
        """Compute what is left of a request, and insert all of it."""
        import torch
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams

        names, have = self.names(request), request.indices
        left = len(names) * PAGE - len(have)
        if self.allocator.available_size() < left:
            self.cache.evict(EvictParams(num_tokens=left))
        fresh = self.allocator.alloc(left)
        for name, number in zip(names[len(have) // PAGE :], fresh[::PAGE], strict=True):
            self.compute(name, int(number) // PAGE)
        value = torch.cat([have, fresh])
        self.cache.insert(
            InsertParams(key=request.key, value=value, prev_prefix_len=request.in_tree)
        )

    def names(self, request: Request) -> list[str]:
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        names: list[str] = get_storage_hash_str(request.key, None, page_size=PAGE)
        return names

    def settle(self, count: int) -> list[bool]:
        """Wait until so many saves have ended; return their results."""
        linker, deadline = self.cache.linker, time.monotonic() + 30
        assert len(linker.pending_offloads) == count
        while linker.num_completed_offloads() < count:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        told: list[bool] = []
        commit = linker.commit_completed_offloads
        linker.commit_completed_offloads = lambda some: (told.extend(some), commit(some))[1]
        self.cache.check_hicache_events()
        linker.commit_completed_offloads = commit
        assert not linker.pending_offloads
        return told

    def close(self) -> None:
        self.cache.release_host_resources()


def linker_config(given: dict[str, Any]) -> dict[str, Any]:
    """What docs/sglang.md says to write."""
    return {
        "linker": "KvtierLinker", "linker_module_path": "kvtier_sglang.linker",
        "linker_extra_config": given,
    }  # fmt: skip
