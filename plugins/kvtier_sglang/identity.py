"""The identity of a server's cache: its KvSpec, and which part of each page a rank holds."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier import Group, KvSpec
from kvtier.layout import DTYPE_BYTES, LIMIT_SHARDS
from kvtier_plugins import Unsupported
from kvtier_plugins.weights import cached_file, model_name, model_weights
from kvtier_sglang.pages import ServedPool

KV = "kv"
INDEXER = "indexer"
# The pools that can be kept: each page of a prompt has a page in each of them.
GROUPS = (KV, INDEXER)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a server was started with, as far as it determines the values in its cache. `texts`: the other
    settings. `version`: the label of weights that were updated in place. `adapters`: the paths of the LoRA
    adapters at the start: SGLang's keys contain the name and the path of such an adapter, not its content.
    """

    path: str
    revision: str | None
    load_format: str
    seed: int
    hosts: int
    version: str
    engine: str
    texts: Mapping[str, str]
    adapters: tuple[str, ...] = ()

    def weights(self) -> str:
        if self.load_format == "dummy":
            return f"dummy:{self.seed}"
        return model_weights(self.path, self.revision)

    def config(self) -> str:
        """A digest of the model's configuration, with its RoPE, of the settings and of the adapters."""
        path: Path | None = Path(self.path) / "config.json"
        if not Path(self.path).is_dir():
            path = cached_file(self.path, self.revision or "main", "config.json")
        config = path.read_text() if path is not None and path.is_file() else ""
        adapters = {one: model_weights(one, None, "adapter_config.json") for one in self.adapters}
        text = json.dumps([config, dict(self.texts), adapters], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank among those that hold parts of the same pages. `writes`: it saves its shard; ranks with equal
    pages share a shard, and one of them writes it."""

    shard: int
    shards: int
    stage: str
    ranks: int
    writes: bool

    @classmethod
    def of(cls, config: Any) -> RankPlace:
        """The place of a rank with this HiCacheStorageConfig."""
        parts = 1 if config.is_mla_model else config.tp_size
        shards = parts * config.attn_cp_size
        if shards > LIMIT_SHARDS:
            raise Unsupported(f"{shards} ranks hold parts of each page: at most {LIMIT_SHARDS}")
        if config.dcp_size > 1:
            raise Unsupported("decode context parallelism: ranks hold different tokens of a page")
        shard = (
            0 if config.is_mla_model else config.tp_rank
        ) * config.attn_cp_size + config.attn_cp_rank
        # The layers of pipeline stages differ in number: each stage has a space of its own.
        return cls(
            shard, shards, f"stage {config.pp_rank} of {config.pp_size}", config.tp_size,
            config.is_storage_writer,
        )  # fmt: skip


def describe(
    facts: ModelFacts, pools: Mapping[str, ServedPool], place: RankPlace, weights: str = ""
) -> KvSpec:
    """The KvSpec of this rank's pipeline stage. The pools are in the order of GROUPS."""
    if facts.hosts > 1:
        raise Unsupported("the server has ranks on several hosts, and each host has its own daemon")
    kv = pools[KV]
    return KvSpec.groups(
        [
            Group(layers=one.layers, opaque_bytes=one.block_bytes, shards=place.shards)
            for one in pools.values()
        ],
        model=model_name(facts.path),
        dtype=kv.dtype if kv.dtype in DTYPE_BYTES else "uint8",
        block_tokens=kv.page_tokens,
        weights=weights or facts.weights(),
        layout=" ".join(f"{name}:{one.digest}" for name, one in pools.items()),
        rope=f"config:{facts.config()}",
        engine="sglang",
        engine_layout=f"sglang {facts.engine}, {place.stage}",
        tensor_parallel=place.ranks,
    )  # fmt: skip


def server_run() -> bytes:
    """A name of this run of the server, the same for all of its ranks: their parent process."""
    parent = os.getppid()
    try:
        started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        started = ""
    return f"{parent} {started}".encode()
