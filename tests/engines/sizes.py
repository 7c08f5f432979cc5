"""What vLLM allocates for models of which only the configuration exists: `sizes.py FOLDER...` prints it
as JSON."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

BLOCK_TOKENS = 16


def layers_of(folder: str, kv_dtype: str) -> list[dict[str, Any]]:
    """Kind and bytes of each layer with a cache: the engine's own layers, without weights."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.v1.kv_cache_interface import MambaSpec

    arguments = EngineArgs(
        model=folder, skip_tokenizer_init=True, dtype="bfloat16", block_size=BLOCK_TOKENS,
        kv_cache_dtype=kv_dtype, mamba_ssm_cache_dtype="float32",
    )  # fmt: skip
    config = arguments.create_engine_config()
    with set_current_vllm_config(config), torch.device("meta"):
        initialize_model(config)
    found = []
    for layer in config.compilation_config.static_forward_context.values():
        if not isinstance(layer, AttentionLayerBase):
            continue
        spec = layer.get_kv_cache_spec(config)
        if spec is None:  # it uses the cache of another layer
            continue
        if isinstance(spec, MambaSpec):
            found.append({"kind": "state", "bytes": spec.state_content_size_bytes})
            continue
        window = getattr(spec, "sliding_window", None) or getattr(
            spec, "attention_chunk_size", None
        )
        nbytes, left = divmod(spec.real_page_size_bytes, spec.block_size)
        assert left == 0
        found.append(
            {"kind": "window" if window else "full", "bytes": nbytes, "window": window or 0}
        )
    return found


def main() -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as meeting, set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{meeting}/all", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        report: dict[str, Any] = {}
        for argument in sys.argv[1:]:
            folder, _, kv_dtype = argument.partition("=")
            try:
                report[argument] = layers_of(folder, kv_dtype or "auto")
            except Exception as error:  # noqa: BLE001 - it is reported, and the test fails
                report[argument] = f"{type(error).__name__}: {error}"
    json.dump(report, replies)


if __name__ == "__main__":
    main()
