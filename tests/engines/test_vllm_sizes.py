"""`kvtier size` equals the allocation of vLLM's own layers, to the byte."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from engines.forking import Forks
from kvtier_daemon.tools.sizing import read_config

HERE = Path(__file__).parent
FEW_EXPERTS = {"n_routed_experts": 8, "n_group": 1, "topk_group": 1}
# transformers' class, its fields, and the type of the cache.
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("Llama", {"num_key_value_heads": 8}, "auto"),
    "llama_fp8": ("Llama", {"num_key_value_heads": 8}, "fp8"),
    "mistral": ("Mistral", {"num_hidden_layers": 4}, "auto"),
    "gemma2": ("Gemma2", {"num_hidden_layers": 4}, "auto"),
    "gemma3": ("Gemma3Text", {"num_hidden_layers": 12, "architectures": ["Gemma3ForCausalLM"]}, "auto"),
    "gpt_oss": ("GptOss", {"num_hidden_layers": 4, "num_local_experts": 4}, "auto"),
    "deepseek_v3": ("DeepseekV3", {"num_hidden_layers": 61, **FEW_EXPERTS}, "auto"),
    "qwen3_next": ("Qwen3Next", {"num_hidden_layers": 8, "num_experts": 4, "num_experts_per_tok": 2}, "auto"),
    "jamba": ("Jamba", {"num_hidden_layers": 16, "num_experts": 2}, "auto"),
    "falcon": ("Falcon", {"num_hidden_layers": 2}, "auto"),
    "mamba2": ("Mamba2", {"num_hidden_layers": 4}, "auto"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    transformers = pytest.importorskip("transformers")
    made = {}
    for name, (kind, fields, _) in MODELS.items():
        made[name] = tmp_path_factory.mktemp(name)
        config = getattr(transformers, f"{kind}Config")(**fields).to_dict()
        config |= {"torch_dtype": "bfloat16"}
        config["architectures"] = fields.get("architectures", [f"{kind}ForCausalLM"])
        (made[name] / "config.json").write_text(json.dumps(config))
    return made


@pytest.fixture(scope="module")
def allocated(
    folders: dict[str, Path], forks: Forks, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    arguments = {name: f"{folders[name]}={MODELS[name][2]}" for name in MODELS}
    log = tmp_path_factory.mktemp("sizes") / "log"
    report = json.loads(forks.run(HERE / "sizes.py", *arguments.values(), log=log, seconds=900))
    return {name: report[argument] for name, argument in arguments.items()}


@pytest.mark.parametrize("name", MODELS)
def test_each_layer_s_bytes_are_the_engine_s(
    name: str, folders: dict[str, Path], allocated: dict[str, Any]
) -> None:
    assert isinstance(allocated[name], list), allocated[name]
    config = json.loads((folders[name] / "config.json").read_text())
    cache = read_config(config, kv_format=MODELS[name][2], state_dtype="float32")
    ours = Counter(
        (layer.kind, layer.state_bytes or layer.token_bytes(cache.kv_format), layer.window_tokens)
        for layer in cache.layers
    )
    theirs = Counter(
        (layer["kind"], layer["bytes"], layer.get("window", 0)) for layer in allocated[name]
    )
    assert ours == theirs and ours.total() > 0
