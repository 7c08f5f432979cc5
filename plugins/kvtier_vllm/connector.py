"""What vLLM sees: each call goes to the side that it is for. Where kvtier can't serve, every call says so."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import vllm
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier import SpecError
from kvtier.wire import MEMORY
from kvtier_vllm.device import open_device
from kvtier_vllm.events import Event, Removed
from kvtier_vllm.layout import Layout, check_hashes, describe, find_pages, read_layout
from kvtier_vllm.messages import PagesTold, Report, Step
from kvtier_vllm.metrics import KvtierPromMetrics, KvtierStats
from kvtier_vllm.options import Unsupported, read_options
from kvtier_vllm.order import backends_of
from kvtier_vllm.room import Room
from kvtier_vllm.scheduler import SchedulerSide
from kvtier_vllm.worker import WorkerSide

log = logging.getLogger("vllm.kvtier")

BLOCK_OUTERMOST = "BLHNC"


@dataclass
class StepMetadata(KVConnectorMetadata):
    step: Step | None = None


@dataclass
class PagesMetadata(KVConnectorHandshakeMetadata):
    told: PagesTold


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    report: Report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        assert isinstance(other, WorkerReport)
        return WorkerReport(self.report.add(other.report))


def published(event: Event, layout: Layout) -> BlockStored | BlockRemoved:
    """The event in the engine's words."""
    medium = MEDIUM_CPU if event.tier == MEMORY else MEDIUM_STORAGE
    group = layout.groups[event.group].group_id
    hashes = [maybe_convert_block_hash(BlockHash(one)) for one in event.hashes]
    if isinstance(event, Removed):
        return BlockRemoved(block_hashes=hashes, medium=medium, group_idx=group)
    parent = event.parent
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=None if parent is None else maybe_convert_block_hash(BlockHash(parent)),
        token_ids=event.tokens.tolist(), block_size=layout.block_tokens, medium=medium,
        lora_id=event.lora.adapter_id if event.lora else None,
        lora_name=event.lora.name if event.lora else None, group_idx=group,
    )  # fmt: skip


class KvtierConnector(KVConnectorBase_V1, SupportsHMA):
    """Saves whole blocks with kvtier's daemon, and loads them. Best effort: what it can't do is a miss."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._options = read_options(self._kv_transfer_config.kv_connector_extra_config)
        if vllm_config.scheduler_config.async_scheduling:
            # The next step is on its way before it is known what the last one left unfilled: what it computes
            # from that would be saved. Loads between steps are over before anything is computed from them.
            self._options = msgspec.structs.replace(self._options, load="async")
        if not self._kv_transfer_config.is_kv_producer:
            self._options = msgspec.structs.replace(self._options, save=False)
        self._layout: Layout | None = None
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._pages = PagesTold("", "no caches were registered")
        self._told: dict[int, PagesTold] = {}
        self._rank, self._reported = 0, False
        note = check_hashes(vllm_config)
        try:
            self._layout = read_layout(vllm_config, kv_cache_config)
        except Unsupported as error:
            if role is KVConnectorRole.SCHEDULER:
                log.warning("kvtier: the engine goes on without: %s", error)
            return
        if role is KVConnectorRole.SCHEDULER:
            told = vllm_config.kv_events_config
            events = told is not None and told.enable_kv_cache_events
            self._scheduler = SchedulerSide(
                self._layout, self._options, events=events,
                loads=self._kv_transfer_config.is_kv_consumer,
            )  # fmt: skip
            if note:
                log.warning("kvtier: %s", note)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """A block's layers side by side: one run of bytes to copy. vLLM takes another where its attention
        has none of these; it warns of that, so nothing is asked for on a CPU, whose attention has one."""
        return None if current_platform.is_cpu() else BLOCK_OUTERMOST

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Nothing is done layer by layer. An engine on a GPU asks before it loads weights: what is written
        wrong stops it here, not minutes later."""
        read_options(extra_config)
        return False

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()

    # --- the scheduler's side ----------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """vLLM's default raises where there are several pipeline stages, which ends the engine at its start.
        Such an engine is declined; another connector's metadata may still come here."""
        self.set_xfer_handshake_metadata(
            {rank: one for (stage, rank), one in metadata.items() if stage == 0}
        )

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """The workers have registered their caches: the space can be opened. Beside another connector this
        may be what that one's workers told; then it is opened when ours have, with their first step."""
        own = {r: one.told for r, one in metadata.items() if isinstance(one, PagesMetadata)}
        if own:
            self._open(own)

    def _open(self, told_by_rank: dict[int, PagesTold]) -> None:
        if self._scheduler is None or self._layout is None or self._told:
            return
        self._told = told_by_rank
        told = list(told_by_rank.values())
        try:
            for pages in told:
                if pages.why_not:
                    raise Unsupported(pages.why_not)
            if len({pages.digest for pages in told}) != 1:
                raise Unsupported("the ranks' caches are not alike")
            spec = describe(
                self._vllm_config, self._kv_cache_config, self._layout, told[0].digest,
                vllm.__version__, self._options,
            )  # fmt: skip
        except (Unsupported, SpecError, OSError) as error:
            log.warning("kvtier: the engine goes on without: %s", error)
            return
        self._scheduler.open(spec)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduler is not None:
            limits = self._vllm_config.scheduler_config
            sizes = [
                group.kv_cache_spec.block_size for group in self._kv_cache_config.kv_cache_groups
            ]
            self._scheduler.enter(
                Room(kv_cache_manager, sizes, limits.max_num_seqs, limits.max_num_batched_tokens)
            )

    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.queued(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        warm, cold = (
            (0, 0) if self._scheduler is None else self._scheduler.hit_of(request.request_id)
        )
        if warm + cold != num_external_tokens:
            sources = {CacheHitSource.EXTERNAL_UNSPECIFIED: num_external_tokens}
        else:
            sources = {CacheHitSource.HOST: warm, CacheHitSource.DISK: cold}
        return {source: tokens for source, tokens in sources.items() if tokens}

    def take_events(self) -> Iterable[BlockStored | BlockRemoved]:
        if self._scheduler is None:
            return
        assert self._layout is not None
        for event in self._scheduler.take_events():
            yield published(event, self._layout)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """All of them come by the scheduler, which the ranks report to."""
        return None if self._scheduler is None else KvtierStats(self._scheduler.stats.take())

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return KvtierStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return KvtierPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        step = None if self._scheduler is None else self._scheduler.step(scheduler_output)
        return StepMetadata(step)

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and isinstance(meta, WorkerReport):
            if meta.report.pages:
                self._open(meta.report.pages)
            self._scheduler.reported(
                meta.report, connector_output.failed_recving, connector_output.invalid_block_ids
            )

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None if self._scheduler is None else self._scheduler.finished(request)

    def reset_cache(self) -> bool:
        if self._scheduler is not None:
            self._scheduler.new_generation()
        return True

    # --- a worker's side ---------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        from vllm.distributed import get_tensor_model_parallel_rank

        self._rank = get_tensor_model_parallel_rank()
        if self._layout is None:
            return
        try:
            config, backends = self._kv_cache_config, backends_of(self._vllm_config)
            pages, arrays = find_pages(self._layout, kv_caches, config.num_blocks, backends)
            zeroes = getattr(config, "needs_kv_cache_zeroing", True)
            device = open_device(pages, arrays, self._options, config.num_blocks, zeroes)
        except Unsupported as error:
            self._pages = PagesTold("", str(error))
            return
        self._worker = WorkerSide(
            self._layout, self._options, self._rank, pages, arrays, device=device
        )
        self._pages = PagesTold(pages.digest)

    def get_handshake_metadata(self) -> PagesMetadata | None:
        """None where this engine is declined: of several connectors the first that has some is told."""
        return None if self._layout is None else PagesMetadata(self._pages)

    def _step(self) -> Step | None:
        meta = self._get_connector_metadata()
        assert isinstance(meta, StepMetadata)
        return meta.step

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, StepMetadata)
        step = kv_connector_metadata.step
        if self._worker is not None and step is not None:
            self._worker.begin(step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step = self._step()
        if self._worker is not None and step is not None:
            self._worker.start_loads(step.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded layer by layer."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing is saved before the whole step has ended."""

    def wait_for_save(self) -> None:
        step = self._step()
        if self._worker is not None and step is not None:
            self._worker.start_saves(step.saves)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        received, failed = self._worker.received()
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._worker is None else self._worker.bad_blocks()

    def build_connector_worker_meta(self) -> WorkerReport:
        if self._worker is not None:
            report = self._worker.report()
        else:
            step = self._step()  # which is over for another connector, too
            report = Report(step.number if step is not None else 0)
        if not self._reported:
            self._reported = True
            report.pages = {self._rank: self._pages}
        return WorkerReport(report)
