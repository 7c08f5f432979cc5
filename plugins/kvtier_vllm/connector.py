"""The classes that vLLM calls: the connector, its messages, and its metrics.

Each call of vLLM goes to the scheduler's side or to a worker's side. If kvtier does not support an engine,
there is no side, and every call has no effect.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import msgspec
import vllm
from prometheus_client import Counter, Histogram
from vllm.distributed.kv_events import BlockRemoved, BlockStored
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
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier import SpecError
from kvtier_plugins import Unsupported
from kvtier_vllm.device import open_device
from kvtier_vllm.events import Event, Removed, SpecKind, fields_of
from kvtier_vllm.identity import describe, whole_cache
from kvtier_vllm.layout import (
    Layout,
    backends_of,
    check_hashes,
    find_pages,
    hashes_media,
    read_layout,
)
from kvtier_vllm.lookups import EngineLimits
from kvtier_vllm.messages import RankPages, RankReport, Step
from kvtier_vllm.options import read_options
from kvtier_vllm.scheduler import SchedulerSide
from kvtier_vllm.stats import (
    BUCKETS_S,
    BY_ADAPTER,
    COUNTERS,
    NO_ADAPTER,
    OTHER_ADAPTERS,
    TIMES,
    Busiest,
    added,
)
from kvtier_vllm.worker import WorkerSide

log = logging.getLogger("vllm.kvtier")

BLOCK_OUTERMOST = "BLHNC"
# With `save = "lazy"`: blocks in this part of the pages are about to be dropped.
NEXT_PAGES_PART = 4


@dataclass
class StepMetadata(KVConnectorMetadata):
    step: Step | None = None


@dataclass
class PagesMetadata(KVConnectorHandshakeMetadata):
    pages: RankPages


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    report: RankReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        assert isinstance(other, WorkerReport)
        return WorkerReport(self.report.add(other.report))


def published(
    event: Event, layout: Layout, kinds: Mapping[int, SpecKind]
) -> BlockStored | BlockRemoved:
    """vLLM's event for an event of this plugin."""
    fields = fields_of(
        event, layout, kinds, lambda one: maybe_convert_block_hash(BlockHash(one))
    )  # fmt: skip
    return BlockRemoved(**fields) if isinstance(event, Removed) else BlockStored(**fields)


def extra_keys(request: Any, begin: int, end: int) -> Any:
    """What else determines the hash of these tokens, as vLLM publishes it."""
    keys, _ = generate_block_hash_extra_keys(request, begin, end, 0)
    (published,) = to_event_extra_keys([keys]) or [None]
    return published


def kinds_of(kv_cache_config: Any) -> dict[int, SpecKind]:
    """What each of the engine's groups caches."""
    specs = (group.kv_cache_spec for group in kv_cache_config.kv_cache_groups)
    return {
        number: SpecKind(get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec))
        for number, spec in enumerate(specs)
    }


def next_pages(pool: Any, count: int) -> Iterator[int]:
    """The pages that vLLM would give to a request next, at most this many, and a part of all."""
    queue, count = pool.free_block_queue, min(count, pool.num_gpu_blocks // NEXT_PAGES_PART)
    page = queue.fake_free_list_head.next_free_block
    while count > 0 and page is not None and page is not queue.fake_free_list_tail:
        yield page.block_id
        page, count = page.next_free_block, count - 1


def calls_layers(forward_context: Any) -> bool:
    """Whether a step in this context calls `wait_for_layer_load` for each layer. A graph of the whole model
    does not: the first model runner names it in the context, and the second one passes an empty context."""
    mode = getattr(forward_context, "cudagraph_runtime_mode", None)
    layers = getattr(forward_context, "attn_metadata", None)
    return layers is not None and getattr(mode, "name", "") in ("NONE", "PIECEWISE")


# Workers whose steps the second model runner announces, see `wrap_model_runner`.
ANNOUNCED: weakref.WeakSet[WorkerSide] = weakref.WeakSet()


def wrap_model_runner() -> None:
    """Let the second model runner begin a step of the workers in ANNOUNCED before it touches any page, as the
    first one does. It calls `handle_preemptions` only after it has zeroed the pages that change hands, and
    copied into them. Raises Unsupported if this vLLM has no such model runner."""
    try:
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner

        execute = GPUModelRunner.execute_model
    except (ImportError, AttributeError) as error:
        raise Unsupported(f"the engine zeroes pages in an unknown way: {error}") from error
    if hasattr(execute, "announces"):
        return

    @wraps(execute)
    def execute_model(runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        for step in steps_in(getattr(scheduler_output, "kv_connector_metadata", None)):
            for worker in list(ANNOUNCED):
                worker.begin(step)
        return execute(runner, scheduler_output, *args, **kwargs)

    execute_model.announces = True  # type: ignore[attr-defined]
    GPUModelRunner.execute_model = execute_model


# The workers' sides of this process, for `end_copies`.
WORKERS: weakref.WeakSet[WorkerSide] = weakref.WeakSet()
# Words in the names of calls of workers that change weights, vLLM's own and those of trainers; and calls that
# only read weights, though their names contain one.
WEIGHTS = ("weight", "param", "state_dict", "load_model")
READ_WEIGHTS = (
    "compute_weight_checksums", "init_weight_transfer_engine", "shutdown_weight_transfer_engine",
)  # fmt: skip


def wrap_core() -> None:
    """Let each engine core of this process tell its scheduler's side what vLLM tells no connector: that the
    weights may have changed, that the engine's own cache was reset, and that it loads an adapter. Raises
    Unsupported if this vLLM has other functions for that."""
    try:
        from vllm.v1.engine.core import EngineCore

        call, reset = EngineCore.collective_rpc, EngineCore.reset_prefix_cache
        load = EngineCore.add_lora
    except (ImportError, AttributeError) as error:
        raise Unsupported(str(error)) from error
    if hasattr(call, "announces"):
        return

    @wraps(call)
    def collective_rpc(core: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(core, method, *args, **kwargs)
        finally:
            if changes_weights(method):
                for side in sides_of(core.scheduler.get_kv_connector()):
                    side.new_generation(weights=True)

    @wraps(reset)
    def reset_prefix_cache(core: Any, *args: Any, **kwargs: Any) -> Any:
        done = reset(core, *args, **kwargs)
        if done:
            for side in sides_of(core.scheduler.get_kv_connector()):
                side.own_cache_reset()
        return done

    @wraps(load)
    def add_lora(core: Any, lora_request: Any, *args: Any, **kwargs: Any) -> Any:
        for side in sides_of(core.scheduler.get_kv_connector()):
            side.adapters.extras(lora_request)  # its files may change before the first request
        return load(core, lora_request, *args, **kwargs)

    EngineCore.add_lora = add_lora
    collective_rpc.announces = True  # type: ignore[attr-defined]
    EngineCore.collective_rpc = collective_rpc
    EngineCore.reset_prefix_cache = reset_prefix_cache


def wrap_discards() -> None:
    """Let the executors of this process announce that the memory of the pages is about to be discarded.
    Raises Unsupported if this vLLM has other functions for that."""
    try:
        from vllm.v1.executor.abstract import Executor

        discards = Executor.sleep, Executor.discard
    except (ImportError, AttributeError) as error:
        raise Unsupported(f"the engine discards pages in an unknown way: {error}") from error
    if hasattr(Executor.sleep, "announces"):
        return

    def announced(discard: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(discard)
        def announce(executor: Any, *args: Any, **kwargs: Any) -> Any:
            executor.collective_rpc(end_copies)
            return discard(executor, *args, **kwargs)

        announce.announces = True  # type: ignore[attr-defined]
        return announce

    Executor.sleep, Executor.discard = map(announced, discards)


def sides_of(connector: Any) -> Iterator[SchedulerSide]:
    """The scheduler's sides of an engine's connector, which may be several connectors."""
    for one in getattr(connector, "sub_connectors", ()):
        yield from sides_of(one)
    if isinstance(connector, KvtierConnector) and connector._scheduler is not None:
        yield connector._scheduler


def changes_weights(method: Any) -> bool:
    """Whether this call of an engine's workers may change the weights. A function may do anything."""
    if not isinstance(method, str) or method == "apply_model":
        return True
    return any(word in method for word in WEIGHTS) and method not in READ_WEIGHTS


def end_copies(_: Any) -> None:
    """In a worker's process: return when no copy uses pages of the engine."""
    for side in list(WORKERS):
        side.end_copies()


def steps_in(metadata: Any) -> Iterator[Step]:
    """This connector's step in a step's metadata, which may be those of several connectors."""
    if isinstance(metadata, StepMetadata):
        if metadata.step is not None:
            yield metadata.step
    else:
        for one in getattr(metadata, "metadata", ()):
            yield from steps_in(one)


class KvtierConnector(KVConnectorBase_V1, SupportsHMA):
    """Saves whole blocks to kvtier's daemon, and loads them. A failure is a cache miss, never an error of the
    engine. vLLM's interface determines the methods, which are therefore more than 20."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._options = read_options(self._kv_transfer_config.kv_connector_extra_config)
        if vllm_config.scheduler_config.async_scheduling:
            # A step begins before the last step's failed loads are known, and would save what it computes
            # from unfilled pages. Loads between steps end before a step computes from them.
            self._options = msgspec.structs.replace(self._options, load="async")
        if self._options.save == "lazy":
            # Then no block is computed from pages that a load did not fill.
            self._options = msgspec.structs.replace(self._options, load="async")
        if not self._kv_transfer_config.is_kv_producer:
            self._options = msgspec.structs.replace(self._options, save=False)
        self._layout: Layout | None = None
        self._kinds: dict[int, SpecKind] = {}
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._pages = RankPages("", "the engine registered no caches")
        self._pages_by_rank: dict[int, RankPages] = {}
        self._rank, self._reported = 0, False
        self._mark_of: Callable[[int], object] | None = None
        self._next_pages: Callable[[int], Iterator[int]] | None = None
        note = check_hashes(vllm_config)
        try:
            self._wrap_engine(role)
            self._layout = read_layout(vllm_config, kv_cache_config)
        except Unsupported as error:
            if role is KVConnectorRole.SCHEDULER:
                log.warning("kvtier: disabled for this engine: %s", str(error))
            return
        if role is KVConnectorRole.SCHEDULER:
            config = vllm_config.kv_events_config
            events = config is not None and config.enable_kv_cache_events
            self._kinds = kinds_of(kv_cache_config) if events else {}
            self._scheduler = SchedulerSide(
                self._layout, self._options, events=extra_keys if events else None,
                loads=self._kv_transfer_config.is_kv_consumer, media=hashes_media(vllm_config),
            )  # fmt: skip
            if not hashes_media(vllm_config):
                log.warning(
                    "kvtier: requests with images, videos or audio load and save nothing, because vLLM does "
                    "not hash their content: set --mm-processor-cache-gb, or --enable-prefix-caching"
                )
            if note:
                log.warning("kvtier: %s", note)

    def _wrap_engine(self, role: KVConnectorRole) -> None:
        """Let the engine announce what this connector must know. Raises Unsupported if sleep mode needs that
        and this vLLM does not allow it."""
        if role is KVConnectorRole.SCHEDULER:
            try:
                wrap_core()
            except Unsupported as error:
                log.warning("kvtier: changes of weights are not noticed: %s", str(error))
        sleeps = self._vllm_config.model_config.enable_sleep_mode
        if sleeps or role is KVConnectorRole.SCHEDULER:
            try:
                wrap_discards()
            except Unsupported:
                if sleeps:
                    raise

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """All layers of a block next to each other, so that a block is one copy. If the attention does not
        support this layout, vLLM warns and uses another one. CPU attention has only one layout,
        so this requests no layout."""
        return None if current_platform.is_cpu() else BLOCK_OUTERMOST

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """False: no load is by layers in a step that replays a graph of the whole model. An engine on a GPU
        calls this before it loads weights, so an invalid option stops it here, not minutes later."""
        read_options(extra_config)
        return False

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def shutdown(self) -> None:
        if self._worker is not None:
            ANNOUNCED.discard(self._worker)
            WORKERS.discard(self._worker)
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()

    # --- the scheduler's side ----------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """The same by pipeline stage and tensor-parallel rank. vLLM's default raises if there are several
        stages, which ends the engine at its start."""
        ranks = self._vllm_config.parallel_config.tensor_parallel_size
        self.set_xfer_handshake_metadata(
            {stage * ranks + rank: one for (stage, rank), one in metadata.items()}
        )

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """The workers have registered their caches: open the space. With several connectors the metadata may
        be another one's; then it is opened with the first reports of this connector's workers."""
        own = {r: one.pages for r, one in metadata.items() if isinstance(one, PagesMetadata)}
        if own:
            self._open(own)

    def _open(self, pages_by_rank: dict[int, RankPages]) -> None:
        if self._scheduler is None or self._layout is None or self._pages_by_rank:
            return
        self._pages_by_rank = pages_by_rank
        try:
            layout, digest = whole_cache(self._layout, pages_by_rank)
            spec = describe(
                self._vllm_config, self._kv_cache_config, layout, digest, vllm.__version__,
                self._options,
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001  # configurations of any engine version
            known = isinstance(error, (Unsupported, SpecError, OSError))
            log.warning(
                "kvtier: disabled for this engine: %s", str(error) if known else repr(error)
            )
            return
        self._scheduler.open(spec)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduler is not None:
            limits = self._vllm_config.scheduler_config
            sizes = [
                group.kv_cache_spec.block_size for group in self._kv_cache_config.kv_cache_groups
            ]
            self._scheduler.set_limits(
                EngineLimits(
                    kv_cache_manager, sizes, limits.max_num_seqs, limits.max_num_batched_tokens
                ),
                self._mark_of,
                self._next_pages,
            )

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """The engine's own cache: later requests do not find a page without a hash."""
        if gpu_block_pool.enable_caching:
            pages = gpu_block_pool.blocks
            self._mark_of = lambda page: pages[page].block_hash
            self._next_pages = partial(next_pages, gpu_block_pool)

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
            yield published(event, self._layout, self._kinds)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """The scheduler returns all statistics; the ranks report to it."""
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
        from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank

        ranks = self._vllm_config.parallel_config.tensor_parallel_size
        self._rank = get_pp_group().rank_in_group * ranks + get_tensor_model_parallel_rank()
        if self._layout is None:
            return
        try:
            config, backends = self._kv_cache_config, backends_of(self._vllm_config)
            pages, arrays = find_pages(self._layout, kv_caches, config.num_blocks, backends)
            wrapped = arrays and arrays[0].device.type != "cpu" and self._wraps_model_runner()
            device = open_device(pages, arrays, self._options, config.num_blocks)
        except Unsupported as error:
            self._pages = RankPages("", str(error))
            return
        self._worker = WorkerSide(
            self._layout, self._options, self._rank, pages, arrays, device=device
        )
        WORKERS.add(self._worker)
        if wrapped:
            ANNOUNCED.add(self._worker)
        self._pages = RankPages(pages.digest, layout=self._layout)

    def _wraps_model_runner(self) -> bool:
        """Whether the model runner announces steps. Raises Unsupported if it has to, and cannot."""
        if not getattr(self._vllm_config, "use_v2_model_runner", False):
            return False  # it calls `handle_preemptions` first
        try:
            wrap_model_runner()
        except Unsupported:
            if getattr(self._kv_cache_config, "needs_kv_cache_zeroing", True):
                raise
            return False
        return True

    def get_handshake_metadata(self) -> PagesMetadata | None:
        """None if kvtier is disabled: of several connectors, vLLM uses the first one's metadata."""
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
            self._worker.loads.start(step.loads, calls_layers(forward_context))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """On a GPU, the engine's stream waits for this layer's part of the loads within the step."""
        if self._worker is not None:
            self._worker.loads.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Does nothing: saves begin after the step."""

    def wait_for_save(self) -> None:
        step = self._step()
        if self._worker is not None and step is not None:
            self._worker.start_saves(step.saves)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        received, failed = self._worker.loads.received()
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._worker is None else self._worker.loads.bad_blocks()

    def build_connector_worker_meta(self) -> WorkerReport:
        if self._worker is not None:
            report = self._worker.report()
        else:
            step = self._step()  # another connector may need the number
            report = RankReport(step.number if step is not None else 0)
        if not self._reported:
            self._reported = True
            report.pages = {self._rank: self._pages}
        return WorkerReport(report)


class KvtierStats(KVConnectorStats):
    """The result of `PluginStats.take`, on its way from the scheduler to vLLM's loggers."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KvtierStats:
        return KvtierStats(added(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """The figures for a log line: all counts except those by adapter, and number and sum of the times."""
        figures: dict[str, int | float] = {
            name: count
            for name, count in sorted(self.data["counts"].items())
            if name.partition(":")[0] not in BY_ADAPTER
        }
        for name, times in self.data["times"].items():
            figures[f"{name}_count"] = len(times)
            figures[f"{name}_sum"] = round(sum(times), 4)
        return figures


class KvtierPromMetrics(KVConnectorPromMetrics):
    """The Prometheus series. All exist from the start for each engine, except those of LoRA adapters, which
    begin with the adapter's first request."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._bound: dict[tuple[int, str], Any] = {}
        for one in COUNTERS:
            names = [*labelnames, one.label] if one.label else labelnames
            metric = metric_types[Counter](name=one.name, documentation=one.help, labelnames=names)
            for engine, values in per_engine_labelvalues.items():
                for label in one.values:
                    self._bound[engine, f"{one.kind}:{label}"] = metric.labels(*values, label)
                if not one.label:
                    self._bound[engine, one.kind] = metric.labels(*values)
        for kind, (name, text) in TIMES.items():
            metric = metric_types[Histogram](
                name=name, documentation=text, buckets=BUCKETS_S, labelnames=labelnames
            )
            for engine, values in per_engine_labelvalues.items():
                self._bound[engine, kind] = metric.labels(*values)

        self._values = per_engine_labelvalues
        self._adapted: dict[str, Any] = {}
        for counted, (name, text) in BY_ADAPTER.items() if vllm_config.lora_config else ():
            self._adapted[counted] = metric_types[Counter](
                name=name, documentation=text, labelnames=[*labelnames, "adapter"]
            )
            for values in per_engine_labelvalues.values():
                for label in (NO_ADAPTER, OTHER_ADAPTERS):
                    self._adapted[counted].labels(*values, label)
        # Series of several processes cannot be removed, nor those of Ray's metrics.
        self._busiest = Busiest(
            "PROMETHEUS_MULTIPROC_DIR" not in os.environ
            and hasattr(metric_types[Counter], "remove")
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        counts = transfer_stats_data.get("counts", {})
        for name, count in counts.items() if self._adapted else ():
            kind, _, adapter = name.partition(":")
            if kind == "adapter_requests":
                self._replace_adapter(adapter, count)
        for name, count in counts.items():
            kind, _, label = name.partition(":")
            if kind in self._adapted:
                values = (*self._values[engine_idx], self._busiest.label(label))
                self._adapted[kind].labels(*values).inc(count)
            elif (metric := self._bound.get((engine_idx, name))) is not None:
                metric.inc(count)
        for name, times in transfer_stats_data.get("times", {}).items():
            for seconds in times:
                self._bound[engine_idx, name].observe(seconds)

    def _replace_adapter(self, adapter: str, requests: int) -> None:
        """Remove the series of the adapter that this one replaces, if any."""
        replaced = self._busiest.requested(adapter, requests)
        if replaced is not None:
            for metric in self._adapted.values():
                for values in self._values.values():
                    metric.remove(*values, replaced)
