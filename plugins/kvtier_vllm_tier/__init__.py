"""kvtier below vLLM's own offloading: a secondary tier of its TieringOffloadingSpec.

vLLM copies blocks between the GPU and memory of its own. It stores chunks of that memory here, and loads
those that it misses. All calls come from the scheduler's thread and return at once: threads do the work.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.version import __version__ as VLLM_VERSION  # noqa: N812

from kvtier import Group, KvSpec
from kvtier_kernels import Pieces
from kvtier_plugins.page_store import HostPages, PageStore, RankCache

log = logging.getLogger("vllm.kvtier")

CHUNKS = "chunks"
SHA256_KEY_BYTES = 32 + 4  # a block's hash, and its group
THREADS = 2  # one can load while another one saves
CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class TierOptions:
    """What `kvtier_plugins.page_store.PageStore` needs."""

    socket: str | None
    patience_ms: int
    copy_threads: int
    verify: bool


@dataclass(frozen=True, slots=True)
class Chunks(HostPages):
    """The chunks in vLLM's memory, by their numbers."""

    pieces: Pieces

    def numbers(self, indices: Sequence[int], count: int) -> Sequence[int]:
        if len(indices) != count:
            raise ValueError(f"{len(indices)} places for {count} chunks")
        return [int(one) for one in indices]


@dataclass(slots=True)
class LastStored:
    """The last chunk of a request that was stored, by group: the one before the next."""

    by_group: dict[bytes, str]


def describe(config: Any, chunk_bytes: int, weights: str) -> KvSpec:
    """The KvSpec of chunks of an engine with this OffloadingConfig."""
    layout = {
        "layout": config.kv_cache_layout,
        "canonical": config.canonical_layout,
        "replicated": config.replicated_layout,
        "blocks": config.cache.blocks_per_chunk,
        "hashed": config.cache.tokens_per_hash,
        "groups": [
            [one.group_id, one.tokens_per_block, list(one.layer_names)] for one in config.groups
        ],
        "parallel": [
            config.parallel.tp_size, config.parallel.pp_size, config.parallel.pcp_size,
            config.parallel.dcp_size, config.parallel.world_size,
        ],
    }  # fmt: skip
    digest = hashlib.sha256(json.dumps(layout, sort_keys=True).encode()).hexdigest()[:32]
    tokens = max(one.tokens_per_block for one in config.groups) * config.cache.blocks_per_chunk
    layers = sum(len(one.layer_names) for one in config.groups)
    return KvSpec.groups(
        [Group(layers=max(1, layers), opaque_bytes=chunk_bytes, shards=1)],
        model=config.model.name,
        dtype="uint8",
        block_tokens=tokens,
        weights=weights,
        layout=f"chunks:{digest}",
        engine="vllm",
        engine_layout=f"tier {VLLM_VERSION} {config.model.dtype}",
    )


class KvtierTier(SecondaryTierManager):
    """Chunks in the daemon, in its memory and on its disks. A chunk that cannot be stored or loaded is a
    miss, and is counted by its reason."""

    cache_hit_source: ClassVar[CacheHitSource] = CacheHitSource.EXTERNAL_UNSPECIFIED

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, weights: str = "",
        socket: str | None = None, patience_ms: int = 1000, copy_threads: int = 2, verify: bool = False,
        backpressure_detector: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if not weights:
            raise ValueError(
                f'{tier_type}: add "weights": a name that changes with everything that changes the model\'s'
                " values: its revision, quantization, overrides and adapters"
            )
        if min(patience_ms, copy_threads) < 1:
            raise ValueError(f"{tier_type}: patience_ms and copy_threads must be at least 1")
        size = self.block_size_bytes
        pieces = Pieces([primary_kv_view.cast("B")], [0], [size], [size])
        self._store = PageStore(
            RankCache(
                describe(offloading_spec.config, size, weights),
                {CHUNKS: Chunks(pieces)},
                "vllm tier",
                log,
            ),
            TierOptions(socket, patience_ms, copy_threads, verify),
        )
        self._threads = ThreadPoolExecutor(THREADS, "kvtier-tier")
        self._finder = ThreadPoolExecutor(1, "kvtier-find")
        self._running: set[Future[None]] = set()
        self._finished: deque[JobResult] = deque()
        # Questions, which belong to the scheduler's thread. `_found` is filled by the finder.
        self._asked: dict[OffloadKey, None] = {}
        self._looking: set[OffloadKey] = set()
        self._found: dict[OffloadKey, bool] = {}
        self._wanted_by: dict[str, set[OffloadKey]] = {}
        self._has_warned = False
        self._lock = threading.Lock()  # of `_found` and `_looking`

    # --- questions -----------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if len(key) != SHA256_KEY_BYTES:
            self._warn_of_hashes()
            return LookupResult.MISS
        self._wanted_by.setdefault(req_context.req_id, set()).add(key)
        with self._lock:
            found = self._found.get(key)
            if found is None and key not in self._looking:
                self._asked[key] = None
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: Any) -> None:
        if self._asked:
            asked, self._asked = list(self._asked), {}
            with self._lock:
                self._looking.update(asked)
            self._finder.submit(self._find, asked)

    def _find(self, keys: list[OffloadKey]) -> None:
        """Answer the questions of a step, which are in the order of a prompt."""
        found = self._store.stored([key.hex() for key in keys])
        with self._lock:
            self._found.update(zip(keys, found, strict=True))
            self._looking.difference_update(keys)

    def _warn_of_hashes(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "kvtier: nothing is stored: block hashes other than SHA-256 can be forged; start vLLM with"
                " --prefix-caching-hash-algo sha256_cbor"
            )

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        req_context.set_state(LastStored({}))
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget the answers for this request: they may not hold for the next one."""
        wanted = self._wanted_by.pop(req_context.req_id, set())
        others = set().union(*self._wanted_by.values()) if wanted and self._wanted_by else set()
        with self._lock:
            for key in wanted - others:
                self._found.pop(key, None)
                self._asked.pop(key, None)

    def has_pending_work(self) -> bool:
        with self._lock:
            return bool(self._asked or self._looking)

    # --- copies --------------------------------------------------------------------------------

    def submit_store(self, job_metadata: TransferJob) -> None:
        before = self._before(job_metadata)
        self._submit(job_metadata, lambda keys, places: self._save(keys, places, before))

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, self._load)

    def _before(self, job: TransferJob) -> str:
        """The chunk of the request before the first one of this job, of the same group, if it is known."""
        keys = list(job.keys)
        last: LastStored | None = job.req_context.get_state(LastStored)
        if last is None or not keys:
            return ""
        before = last.by_group.get(keys[0][-4:], "")
        for key in keys:
            last.by_group[key[-4:]] = key.hex()
        return before

    def _submit(self, job: TransferJob, copy: Any) -> None:
        def run() -> None:
            keys, good = list(job.keys), [False] * len(job.keys)
            try:
                good = copy(keys, job.chunk_ids)
            finally:
                moved = {key for key, there in zip(keys, good, strict=True) if there}
                self._finished.append(
                    JobResult(
                        job.job_id,
                        len(moved) == len(set(keys)),
                        moved if job.is_promotion else None,
                    )
                )

        future = self._threads.submit(run)
        self._running.add(future)
        future.add_done_callback(self._running.discard)

    def _load(self, keys: list[OffloadKey], places: Sequence[int]) -> list[bool]:
        """Load chunks. One that is not there ends a load, and the next one begins behind it."""
        good: list[bool] = []
        while len(good) < len(keys):
            at = len(good)
            there = self._store.load(CHUNKS, [key.hex() for key in keys[at:]], places[at:])
            count = there.index(False) if False in there else len(there)
            good += [True] * count + [False] * (at + count < len(keys))
            with self._lock:
                for key in keys[at + count : at + count + 1]:
                    self._found[key] = False
        return good

    def _save(self, keys: list[OffloadKey], places: Sequence[int], before: str) -> list[bool]:
        """Save chunks, each group in its order."""
        good = [len(key) != SHA256_KEY_BYTES for key in keys]
        for group in dict.fromkeys(key[-4:] for key in keys):
            own = [
                at
                for at, key in enumerate(keys)
                if key[-4:] == group and len(key) == SHA256_KEY_BYTES
            ]
            first = before if bytes.fromhex(before)[-4:] == group else ""
            stored = self._store.save(
                CHUNKS, [keys[at].hex() for at in own], [places[at] for at in own], first
            )
            for at, there in zip(own, stored, strict=True):
                good[at] = there
        return good

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def drain_jobs(self) -> None:
        for future in list(self._running):
            future.exception()

    def shutdown(self) -> None:
        self.drain_jobs()
        self._finder.shutdown(cancel_futures=True)
        self._threads.shutdown()
        self._store.close()
