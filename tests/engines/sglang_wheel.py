"""SGLang's own classes on a host without a GPU. Three parts are replaced: torchvision, which its imports
name; the registration of host memory with CUDA; and its compiled hash of pages, by the same in Python."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

MISSING = [name for name in ("sglang", "torch", "orjson") if find_spec(name) is None]
WHY = (
    f"needs {', '.join(MISSING)} (make test-sglang): the backend is not tested with SGLang's own factory, "
    "host pools and controller"
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
    from sglang.srt.mem_cache.hybrid_cache import hybrid_cache_controller as controllers
    from sglang.srt.mem_cache.pool_host import base, common
    from sglang.srt.runtime_context import get_context, get_parallel

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    common._cuda_host_register = lambda *_, **__: None
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    controllers.get_storage_hash_str = page_hashes
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
