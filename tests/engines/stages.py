"""The recording connector, for pipeline stages.

With `enforce_eager`, vLLM's model runner for CPUs never creates the tensors in which a stage receives the
results of the previous one, so that its engine ends with the first request, with or without a connector. This
module creates them, as the runner does for a step without requests."""

from __future__ import annotations

from typing import Any

from recording import RecordingConnector
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

gather = GPUModelRunner.sync_and_gather_intermediate_tensors


class StagesConnector(RecordingConnector):
    """The recording connector, for pipeline stages."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        GPUModelRunner.sync_and_gather_intermediate_tensors = created


def created(runner: Any, *args: Any) -> Any:
    if runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )
    return gather(runner, *args)
