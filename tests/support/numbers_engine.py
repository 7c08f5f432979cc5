"""vLLM's own engine core, scheduler and cache manager with a rank that computes nothing. The content of every
page follows from the tokens, so each page is compared before it is read. For models that a CPU cannot run.

A rank keeps its pages in tensors with vLLM's layout, and runs a step as vLLM's runner does: copies of blocks,
loads that the step needs, the step itself, which continues states in another page, other loads, saves. A step
that computes nothing ends before a save can end, and vLLM reuses at once the pages that a window no longer
needs. So a step of a rank that is not `hasty` takes as long as its saves.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import vllm.distributed.parallel_state as parallel
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.engine import EngineCoreRequest, core
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.utils import allocate_kv_cache, copy_kv_cache_blocks_inplace
from vllm.v1.worker.worker_base import CompilationTimes

# At its start and its end, an engine lets its process collect the garbage of all that is imported.
core.freeze_gc_heap = lambda: None
gc.unfreeze = lambda: None

BLOCK = 16
WINDOW = 40
VOCABULARY = 500
HEADS, DIMS, DTYPE = 2, 32, torch.float32
PAGE_BYTES = 2 * BLOCK * HEADS * DIMS * 4
LAYOUT = "LBHNC"
WHOLE = (1 << 64) - 1
SETTLE_S = 60.0
JUNK = 0xEE
PATIENCE_MS = 30_000  # a busy machine must not make a request give up
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "vocab_size": 512,
    "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": DIMS, "max_position_embeddings": 4096, "torch_dtype": "float32",
}  # fmt: skip

shapes = MambaStateShapeCalculator
STATES = {
    # The layers of a small Jamba, Bamba and Qwen3-Next, as vLLM builds them.
    "mamba1": (shapes.mamba1_state_shape(1, 64, 16, 4), MambaAttentionBackendEnum.MAMBA1),
    "mamba2": (shapes.mamba2_state_shape(1, 64, 1, 4, 16, 16, 4), MambaAttentionBackendEnum.MAMBA2),
    "gdn": (
        shapes.gated_delta_net_state_shape(1, 2, 4, 16, 16, 4), MambaAttentionBackendEnum.GDN_ATTN,
    ),
}  # fmt: skip


def state(kind: str, **changes: Any) -> MambaSpec:
    """A layer of states whose page is as long as an attention layer's, as in vLLM's platforms."""
    shape, backend = STATES[kind]
    return MambaSpec(
        **{
            "block_size": BLOCK, "shapes": tuple(shape), "dtypes": (torch.bfloat16, torch.float32),
            "page_size_padded": PAGE_BYTES, "mamba_type": backend, "mamba_cache_mode": "align",
        }
        | changes
    )  # fmt: skip


def attention(window: int = 0, heads: int = HEADS, **more: Any) -> KVCacheSpec:
    fields: dict[str, Any] = {
        "block_size": BLOCK, "num_kv_heads": heads, "head_size": DIMS, "dtype": DTYPE,
    }  # fmt: skip
    return (
        SlidingWindowSpec(**fields, sliding_window=window)
        if window
        else FullAttentionSpec(**fields, **more)
    )


def layers(*specs: KVCacheSpec) -> dict[str, KVCacheSpec]:
    return {f"model.layers.{at}.attn": spec for at, spec in enumerate(specs)}


MODELS = {
    "full": layers(attention(), attention()),
    "window": layers(attention(WINDOW), attention(WINDOW)),
    "full and window": layers(attention(), attention(WINDOW), attention(WINDOW), attention()),
    "jamba": layers(*[state("mamba1")] * 3, attention(), *[state("mamba1")] * 3, attention()),
    "bamba": layers(*[state("mamba2")] * 2, attention()),
    "qwen3_next": layers(*[state("gdn")] * 3, attention()),
    "mamba": layers(state("mamba1"), state("mamba1")),
}  # fmt: skip
# With heads for several ranks.
OF_RANKS = {
    "four heads": layers(attention(heads=4), attention(heads=4)),
    "four heads, window": layers(attention(heads=4), attention(WINDOW, heads=4)),
}


def mixed(number: int, other: int) -> int:
    """Combine two numbers into a third (splitmix64)."""
    z = (number * 0x9E3779B97F4A7C15 + other + 1) & WHOLE
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WHOLE
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WHOLE
    return z ^ (z >> 31)


@dataclass
class Known:
    """A request on a rank: its tokens, and a number for each prefix of them."""

    tokens: list[int]
    blocks: list[list[int]]
    computed: int
    state_at: int | None = None  # the block with its states
    prefixes: list[int] = field(default_factory=list)
    weights: int = 0

    def prefix(self, stop: int) -> list[int]:
        while len(self.prefixes) < stop:
            before = self.prefixes[-1] if self.prefixes else self.weights
            self.prefixes.append(mixed(before, self.tokens[len(self.prefixes)]))
        return self.prefixes

    def next_token(self) -> int:
        return 3 + self.prefix(len(self.tokens))[len(self.tokens) - 1] % (VOCABULARY - 3)


def answer_to(prompt: Sequence[int], count: int, weights: int = 0) -> list[int]:
    """Return the correct answer of an engine with these weights."""
    request = Known(list(prompt), [], 0, weights=weights)
    for _ in range(count):
        request.tokens.append(request.next_token())
    return request.tokens[len(prompt) :]


class Rank:
    """A rank of an engine: the only one, or a pipeline stage. `wrong` lists the pages with wrong content when
    they were read: request, layer, block."""

    def __init__(self, config: VllmConfig, specs: dict[str, KVCacheSpec], stage: int = 0) -> None:
        self.config = config
        self.stage = stage
        self.tensor_rank = 0
        self.first_head = 0
        self.specs = specs
        self.requests: dict[str, Known] = {}
        self.wrong: list[tuple[str, str, int]] = []
        self.compared = 0
        self.hasty = False
        self.weights = 0
        self.spreads = False  # whether results of wrong pages are wrong too
        self.output: ModelRunnerOutput | None = None
        self.connector: Any = None
        if not parallel.model_parallel_is_initialized():
            with tempfile.NamedTemporaryFile() as file, set_current_vllm_config(config):
                parallel.init_distributed_environment(1, 0, f"file://{file.name}.group", 0, "gloo")
                parallel.initialize_model_parallel()

    # --- calls of the engine at its start

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return self.specs

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return [LAYOUT]

    def set_kv_cache_layout(self, layout: str) -> None:
        self.config.cache_config.kv_cache_layout = layout

    def determine_available_memory(self) -> int:
        return 1 << 30

    def initialize_from_config(self, configs: list[KVCacheConfig]) -> None:
        self.cache = configs[self.stage]
        self.caches = allocate_kv_cache(self.cache, torch.device("cpu"), KVCacheLayout[LAYOUT])
        self.group_of = {
            name: at
            for at, group in enumerate(self.cache.kv_cache_groups)
            for name in group.layer_names
        }
        if self.config.kv_transfer_config is not None:
            self.connector = KVConnectorFactory.create_connector(
                self.config, KVConnectorRole.WORKER, self.cache
            )
            self.connector.register_kv_caches(self.caches)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(0.0, 0.0)

    def get_kv_connector_handshake_metadata(self) -> Any:
        told = self.connector and self.connector.get_handshake_metadata()
        return {(self.stage, self.tensor_rank): told} if told is not None else None

    def synchronize_device(self) -> None:
        """Do nothing: there is no device."""

    reset_mm_cache = reset_encoder_cache = synchronize_device

    def sleep(self, level: int) -> None:
        """Discard the memory of all pages: the engine sleeps."""
        self.discard(("kv_cache",))

    def discard(self, tags: Sequence[str]) -> None:
        """Discard the memory of all pages."""
        for cache in self.caches.values():
            cache.view(torch.uint8).fill_(JUNK)

    def compute_weight_checksums(self) -> dict[str, str]:
        return {"all": str(self.weights)}

    def reload_weights(self, seed: int) -> None:
        """From now on the content of every page, and every answer, is another one."""
        self.weights = seed

    def wake_up(self, tags: Any) -> None:
        """Provide the memory again, with undefined content."""

    def shutdown(self) -> None:
        if self.connector is not None:
            self.connector.shutdown()

    # --- pages

    def page(self, name: str, block: int) -> torch.Tensor:
        """Return a view of a page: [heads, tokens, bytes of one] for attention, flat bytes for a state."""
        return self.caches[name][block].view(torch.uint8)

    def meant(self, name: str, request: Known, start: int, stop: int) -> torch.Tensor:
        """Return the content of a page of attention for these tokens: [heads, tokens, bytes of one]."""
        heads, _, nbytes = self.page(name, 0).shape
        layer = int(name.split(".")[2])
        chain = np.array(request.prefix(stop)[start:stop], np.uint64)
        with np.errstate(over="ignore"):
            first = 1 + self.first_head * nbytes // 8
            words = np.arange(first, first + heads * nbytes // 8, dtype=np.uint64) * np.uint64(
                2 * layer + 3
            )
            data = chain[:, None] * words[None, :]
        return (
            torch.from_numpy(data.view(np.uint8)).view(stop - start, heads, nbytes).transpose(0, 1)
        )

    def meant_state(self, name: str, request: Known, stop: int) -> torch.Tensor:
        """Return the content of a page of states after this number of tokens."""
        size = self.page(name, 0).shape
        words = np.arange(1, 1 + -(-size.numel() // 8), dtype=np.uint64)
        with np.errstate(over="ignore"):
            data = words * np.uint64(mixed(request.prefix(stop)[stop - 1], int(name.split(".")[2])))
        return torch.from_numpy(data.view(np.uint8)[: size.numel()].copy()).view(size)

    def fill(self, request_id: str) -> None:
        """Write into a request's pages what another engine computed."""
        request = self.requests[request_id]
        stop, request.computed = request.computed, 0
        self.write(request, stop)
        request.computed = stop

    def spoil(self, pages: Sequence[int]) -> None:
        for cache in self.caches.values():
            for page in pages:
                cache[page].view(torch.uint8).fill_(JUNK)

    def compare(self, request_id: str, request: Known) -> bool:
        """Compare the pages that this request is about to read; return whether all are correct."""
        computed, before = request.computed, len(self.wrong)
        for name, spec in self.specs.items():
            blocks = request.blocks[self.group_of[name]]
            if isinstance(spec, MambaSpec):
                at = (computed - 1) // BLOCK if request.state_at is None else request.state_at
                self.compared += 1
                if not torch.equal(
                    self.page(name, blocks[at]), self.meant_state(name, request, computed)
                ):
                    self.wrong.append((request_id, name, at))
                continue
            window = getattr(spec, "sliding_window", None)
            first = max(0, computed - window + 1) if window else 0
            meant = self.meant(name, request, first, computed)
            for at in range(first // BLOCK, -(-computed // BLOCK)):
                start, stop = max(first, at * BLOCK), min(computed, (at + 1) * BLOCK)
                have = self.page(name, blocks[at])[:, start - at * BLOCK : stop - at * BLOCK]
                self.compared += 1
                if not blocks[at] or not torch.equal(have, meant[:, start - first : stop - first]):
                    self.wrong.append((request_id, name, at))
        return len(self.wrong) == before

    def write(self, request: Known, stop: int) -> None:
        """Write the results of a step into the pages."""
        for name, spec in self.specs.items():
            blocks = request.blocks[self.group_of[name]]
            if isinstance(spec, MambaSpec):
                at = (stop - 1) // BLOCK
                self.page(name, blocks[at]).copy_(self.meant_state(name, request, stop))
                continue
            meant = self.meant(name, request, request.computed, stop)
            for at in range(request.computed // BLOCK, -(-stop // BLOCK)):
                first, last = max(request.computed, at * BLOCK), min(stop, (at + 1) * BLOCK)
                place = self.page(name, blocks[at])[:, first - at * BLOCK : last - at * BLOCK]
                place.copy_(meant[:, first - request.computed : last - request.computed])
        request.state_at = (stop - 1) // BLOCK

    # --- a step

    def wait_until_saved(self) -> None:
        """Wait until the saves of this step have ended, with or without success."""
        worker, deadline = ours(self.connector)._worker, time.monotonic() + SETTLE_S
        while (
            worker is not None
            and not worker.saves.pending.keys() <= worker.state.report.saves.keys()
        ):
            assert time.monotonic() < deadline, (
                f"not saved after {SETTLE_S} s: {worker.saves.pending}"
            )
            time.sleep(0.0002)

    def take(self, scheduled: Any) -> None:
        """Apply the engine's changes to its requests."""
        for request_id in scheduled.finished_req_ids:
            self.requests.pop(request_id, None)
        for block in scheduled.new_block_ids_to_zero or ():
            for name, spec in self.specs.items():
                if not isinstance(spec, MambaSpec):
                    self.page(name, block).zero_()
        copy_kv_cache_blocks_inplace(
            self.caches.values(), self.cache.num_blocks, scheduled.kv_cache_block_copies or ()
        )
        for new in scheduled.scheduled_new_reqs:
            blocks = [list(ids) for ids in new.block_ids]
            self.requests[new.req_id] = Known(
                list(new.prompt_token_ids), blocks, new.num_computed_tokens, weights=self.weights
            )
        cached = scheduled.scheduled_cached_reqs
        for at, request_id in enumerate(cached.req_ids):
            request, ids = self.requests[request_id], cached.new_block_ids[at]
            request.computed = cached.num_computed_tokens[at]
            if request_id in cached.resumed_req_ids:
                request.blocks, request.state_at = [list(one) for one in ids], None
                # Tokens that were in progress at the preemption are left out.
                request.tokens = list(cached.all_token_ids[request_id])
                del request.prefixes[len(request.tokens) :]
            elif ids:
                for blocks, more in zip(request.blocks, ids, strict=True):
                    blocks += more

    def execute_model(self, scheduled: Any) -> ModelRunnerOutput | None:
        if self.connector is not None:
            self.connector.handle_preemptions(scheduled.kv_connector_metadata)
        self.take(scheduled)
        told = KVConnectorOutput()
        names, sampled = list(scheduled.num_scheduled_tokens), []
        if self.connector is not None:
            self.connector.bind_connector_metadata(scheduled.kv_connector_metadata)
        if self.connector is not None and scheduled.has_sync_kv_loads:
            self.connector.start_load_kv(None)
        for name, count in scheduled.num_scheduled_tokens.items():
            request = self.requests[name]
            stop = request.computed + count
            good = not request.computed or self.compare(name, request)
            self.write(request, stop)
            if self.spreads and not good:
                full = next(iter(self.specs))
                blocks = request.blocks[self.group_of[full]]
                self.spoil(blocks[request.computed // BLOCK : -(-stop // BLOCK)])
            request.computed = stop
            tokens = [request.next_token()] if stop == len(request.tokens) else []
            request.tokens += tokens
            sampled.append(tokens)
        if self.connector is not None:
            if not scheduled.has_sync_kv_loads:
                self.connector.start_load_kv(None)
            self.connector.wait_for_save()
            if not self.hasty:
                self.wait_until_saved()
            results = self.connector.get_transfer_results(scheduled.finished_req_ids)
            told.finished_recving = results.finished_recving
            told.failed_recving = results.failed_recving
            told.invalid_block_ids = self.connector.get_block_ids_with_load_errors()
            told.kv_connector_worker_meta = self.connector.build_connector_worker_meta()
            self.connector.clear_connector_metadata()
        if not names:
            return ModelRunnerOutput.with_kv_conn_output_only(told)
        self.output = ModelRunnerOutput(
            names, {name: at for at, name in enumerate(names)}, sampled, kv_connector_output=told
        )
        return None

    def sample_tokens(self, grammar: Any) -> ModelRunnerOutput:
        output, self.output = self.output, None
        return output or EMPTY_MODEL_RUNNER_OUTPUT


def ours(connector: Any) -> Any:
    """Return the connector under test, also if the engine has several."""
    several = getattr(connector, "sub_connectors", [connector])
    return several[-1]


class Numbers(Executor):
    """Runs the engine's calls on a rank in this process. `ranks_of` creates it for one model."""

    specs: dict[str, KVCacheSpec]

    def _init_executor(self) -> None:
        self.rank = Rank(self.vllm_config, self.specs)

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def collective_rpc(
        self, method: Any, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None,
        non_block: bool = False,
    ) -> list[Any]:  # fmt: skip
        call = partial(method, self.rank) if callable(method) else getattr(self.rank, method)
        result = call(*args, **kwargs or {})
        if not non_block:
            return [result]
        future: Future[Any] = Future()
        future.set_result(result)
        return [future]

    def check_health(self) -> None:
        """Do nothing: it is part of this process."""


class NumbersInStages(Numbers):
    """Two pipeline stages with half of the layers each, which work at the same time. The second stage
    executes a step after the first one has."""

    def _init_executor(self) -> None:
        names = list(self.specs)
        half = len(names) // 2
        parts = names[:half], names[half:]
        self.ranks = [
            Rank(self.vllm_config, {name: self.specs[name] for name in part}, stage)
            for stage, part in enumerate(parts)
        ]
        self.rank = self.ranks[1]  # its tokens are the answers
        self.ranks[0].wrong = self.rank.wrong
        self.pools = [ThreadPoolExecutor(1, f"stage{stage}") for stage in range(2)]

    def collective_rpc(
        self, method: Any, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None,
        non_block: bool = False,
    ) -> list[Any]:  # fmt: skip
        def called(rank: Rank, before: Future[Any] | None) -> Any:
            if before is not None:
                before.result()
            call = partial(method, rank) if callable(method) else getattr(rank, method)
            if method != "initialize_from_config":
                return call(*args, **kwargs or {})
            # The process has only one group of ranks, in which this is the first one.
            group = SimpleNamespace(rank_in_group=rank.stage)
            with patch("vllm.distributed.get_pp_group", lambda: group):
                return call(*args, **kwargs or {})

        first = self.pools[0].submit(called, self.ranks[0], None)
        second = self.pools[1].submit(called, self.ranks[1], first)
        results = first, second
        if method not in ("execute_model", "sample_tokens"):
            return [result.result() for result in results]
        assert non_block and self.kv_output_aggregator is not None
        aggregated: Future[Any] = Future()

        def aggregate(_: Future[Any]) -> None:
            outputs = [result.result() for result in results]
            aggregated.set_result(self.kv_output_aggregator.aggregate(outputs, output_rank=1))

        second.add_done_callback(aggregate)
        return [aggregated]

    def shutdown(self) -> None:
        super().shutdown()
        for pool in self.pools:
            pool.shutdown()


class NumbersInTensorRanks(Numbers):
    """Ranks with a range of the heads of each layer: those of the model, divided by the ranks."""

    def _init_executor(self) -> None:
        count = self.vllm_config.parallel_config.tensor_parallel_size
        specs = {
            name: replace(spec, num_kv_heads=spec.num_kv_heads // count)
            for name, spec in self.specs.items()
        }
        self.ranks = [Rank(self.vllm_config, specs) for _ in range(count)]
        for number, rank in enumerate(self.ranks):
            (heads,) = {spec.num_kv_heads for spec in specs.values()}
            rank.tensor_rank, rank.first_head, rank.wrong = (
                number,
                number * heads,
                self.ranks[0].wrong,
            )
        self.rank = self.ranks[0]  # its tokens are the answers

    def collective_rpc(
        self, method: Any, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None,
        non_block: bool = False,
    ) -> list[Any]:  # fmt: skip
        results = []
        for number, rank in enumerate(self.ranks):
            call = partial(method, rank) if callable(method) else getattr(rank, method)
            given = args
            if method == "initialize_from_config":
                given = ([args[0][number]],)
            # The process has only one rank.
            with patch("vllm.distributed.get_tensor_model_parallel_rank", lambda n=number: n):
                results.append(call(*given, **kwargs or {}))
        if method not in ("execute_model", "sample_tokens"):
            return results
        assert self.kv_output_aggregator is not None
        output = self.kv_output_aggregator.aggregate(results, output_rank=0)
        if not non_block:
            return [output]
        future: Future[Any] = Future()
        future.set_result(output)
        return [future]


def in_tensor_ranks(count: int) -> Callable[[VllmConfig], None]:
    """Let an engine have this many tensor-parallel ranks."""

    def tune(config: VllmConfig) -> None:
        config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = count

    tune.kind = NumbersInTensorRanks  # type: ignore[attr-defined]
    return tune


def in_stages(config: VllmConfig) -> None:
    """Let an engine have two pipeline stages."""
    config.parallel_config.pipeline_parallel_size = config.parallel_config.world_size = 2
    config.parallel_config.distributed_executor_backend = "mp"


class NumbersEngine:
    """A running engine core. `step` is one step of its loop."""

    def __init__(
        self, model: str, folder: Path, socket: str | None = None, *, blocks: int = 200,
        budget: int = 64, asynchronous: bool = False, sleeps: bool = False, hasty: bool = False,
        extra: dict[str, Any] | None = None, other_connector: str = "", role: str = "kv_both",
        tune: Callable[[VllmConfig], None] = lambda config: None, **changes: Any,
    ) -> None:  # fmt: skip
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(MODEL))
        transfer = socket and {
            "kv_connector": "KvtierConnector", "kv_connector_module_path": "kvtier_vllm.connector",
            "kv_role": role, "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "socket": socket, "weights": model, "patience_ms": PATIENCE_MS,
            } | (extra or {}),
        }  # fmt: skip
        if other_connector:
            other = {
                "kv_connector": other_connector,
                "kv_connector_module_path": f"support.{other_connector.lower()}",
                "kv_role": "kv_both",
            }
            transfer = {
                "kv_connector": "MultiConnector", "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"connectors": [other, transfer]},
            }  # fmt: skip
        config = EngineArgs(
            **{
                "model": str(folder), "skip_tokenizer_init": True, "block_size": BLOCK, "max_model_len": 2048,
                "max_num_batched_tokens": budget, "max_num_seqs": 8, "enable_prefix_caching": True,
                "prefix_caching_hash_algo": "sha256_cbor", "num_gpu_blocks_override": blocks,
                "enforce_eager": True, "kv_transfer_config": transfer or None,
            }
            | changes
        ).create_engine_config()  # fmt: skip
        # The CPU platform disables both.
        config.scheduler_config.async_scheduling = asynchronous
        config.model_config.enable_sleep_mode = sleeps
        specs = (MODELS | OF_RANKS)[model]
        if any(isinstance(spec, MambaSpec) for spec in specs.values()):
            config.cache_config.mamba_cache_mode = "align"
            config.cache_config.mamba_block_size = BLOCK
        tune(config)
        kind = NumbersInStages if tune is in_stages else getattr(tune, "kind", Numbers)
        ranks = type("Ranks", (kind,), {"specs": specs})
        self.core = EngineCore(config, ranks, log_stats=True)
        self.rank: Rank = self.core.model_executor.rank
        for rank in getattr(self.core.model_executor, "ranks", [self.rank]):
            rank.hasty = hasty
        self.connector: Any = ours(self.core.scheduler.get_kv_connector())
        self.answers: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.loaded: dict[str, int] = {}
        self.numbers = 0
        if self.connector is not None and self.connector._layout is not None:
            self.connect()

    def connect(self) -> None:
        """Step until all requests are answered and their saves have ended."""
        side = self.connector._scheduler
        self.until(
            lambda: bool(side._daemon.session and side._decisions.ranks.reported), self.step_idly
        )

    def add(self, prompt: Sequence[int], tokens: int = 8, load: bool = True) -> str:
        self.numbers += 1
        name = f"r{self.numbers}"
        told = None if load else {"kv_transfer_params": {"kvtier": {"load": False}}}
        request = EngineCoreRequest(
            request_id=name, prompt_token_ids=list(prompt), mm_features=None,
            sampling_params=SamplingParams(
                temperature=0, max_tokens=tokens, ignore_eos=True, extra_args=told
            ),
            pooling_params=None, arrival_time=time.time(), lora_request=None, cache_salt=None,
            data_parallel_rank=None,
        )  # fmt: skip
        self.answers[name] = []
        self.core.add_request(*self.core.preprocess_add_request(request))
        return name

    def step(self) -> None:
        outputs, executed = self.core.step_fn()
        self.core.post_step(executed)
        for output in (outputs or {}).values():
            for one in output.outputs:
                self.answers[one.request_id] += one.new_token_ids
                if one.prefill_stats is not None:
                    self.loaded[one.request_id] = one.prefill_stats.num_external_cached_tokens
                if one.finish_reason is not None:
                    self.reasons[one.request_id] = str(one.finish_reason)
        if not executed:
            time.sleep(0.001)

    @property
    def busy(self) -> bool:
        return bool(self.core.scheduler.has_requests() or self.core.batch_queue)

    def step_idly(self) -> None:
        """Run a step, even without work: an engine runs one sooner or later."""
        if not self.busy:
            self.core.scheduler.finished_req_ids.add("")
        self.step()

    def until(self, holds: Callable[[], bool], step: Callable[[], None] | None = None) -> None:
        deadline = time.monotonic() + SETTLE_S
        while not holds():
            assert time.monotonic() < deadline, f"still not so after {SETTLE_S} s: {self.held}"
            (step or self.step)()

    def run(self, *prompts: Sequence[int], tokens: int = 8) -> list[int]:
        """Serve these prompts at the same time; return how many tokens of each were loaded."""
        names = [self.add(prompt, tokens) for prompt in prompts]
        self.until(lambda: all(name in self.reasons for name in names))
        for name, prompt in zip(names, prompts, strict=True):
            right = answer_to(prompt, tokens, self.rank.weights)
            assert self.answers[name] == right, f"{name}: another answer"
        self.settle()
        assert not self.rank.wrong, self.rank.wrong
        return [self.loaded[name] for name in names]

    def settle(self) -> None:
        """Step until all saves have ended and the plugin holds no block."""
        self.until(lambda: not (self.busy or self.held), self.step_idly)

    @property
    def held(self) -> dict[str, int]:
        side = self.connector and self.connector._scheduler
        return {what: count for what, count in side.in_flight.items() if count} if side else {}

    def close(self) -> None:
        self.core.shutdown()
