"""KV bytes per token for published Hugging Face configs."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier_daemon.cli import main
from kvtier_daemon.tools.sizing import (
    PrefillCost,
    break_even_bandwidth,
    break_even_tokens,
    read_config,
)
from support.pages import blocks

Config = dict[str, Any]
BF16 = {"torch_dtype": "bfloat16"}


def llama(**more: Any) -> Config:
    return {
        "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, **BF16, **more,
    }  # fmt: skip


DEEPSEEK = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
    "num_key_value_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, **BF16,
}  # fmt: skip
GEMMA3 = {  # the 4B model as published: the numbers of heads are the defaults of the class
    "model_type": "gemma3", "torch_dtype": "bfloat16", "vision_config": {"num_hidden_layers": 27},
    "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34,
                    "sliding_window": 1024},
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "num_hidden_layers": 24, "hidden_size": 2880, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, **BF16,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}  # fmt: skip
JAMBA = {
    "model_type": "jamba", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_conv": 4,
    "mamba_d_state": 16, "mamba_expand": 2, **BF16,
}  # fmt: skip
QWEN3_NEXT = {
    "model_type": "qwen3_next", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, **BF16,
}  # fmt: skip

# The bytes of a token, of a token outside of the windows, and of the states of a sequence.
KNOWN: dict[str, tuple[Config, int, int, int]] = {
    "Llama-3-8B": (llama(), 131_072, 131_072, 0),
    "Llama-3-70B": (
        llama(num_hidden_layers=80, hidden_size=8192, num_attention_heads=64), 327_680, 327_680, 0,
    ),
    "Llama-3.2-11B-Vision": (  # with layers that attend only to the image
        llama(
            model_type="mllama", num_hidden_layers=40,
            cross_attention_layers=[3, 8, 13, 18, 23, 28, 33, 38],
        ), 131_072, 131_072, 0,
    ),
    "Llama-2-7B": (llama(num_key_value_heads=None), 524_288, 524_288, 0),
    "one head": (llama(multi_query=True, num_key_value_heads=None), 16_384, 16_384, 0),
    "DeepSeek-V3": (DEEPSEEK, 70_272, 70_272, 0),
    "DeepSeek-V3.2": (DEEPSEEK | {"index_head_dim": 128}, 61 * (1152 + 132), 61 * (1152 + 132), 0),
    "Mistral-7B": (llama(model_type="mistral", sliding_window=4096), 131_072, 0, 0),
    "Qwen2 with its window off": (
        llama(model_type="qwen2", sliding_window=4096, use_sliding_window=False), 131_072, 131_072, 0,
    ),
    "Qwen2 with windows in the last layers": (
        llama(model_type="qwen2", sliding_window=4096, use_sliding_window=True, max_window_layers=28),
        131_072, 28 * 4096, 0,
    ),
    "Gemma-2-9B": (
        llama(model_type="gemma2", num_hidden_layers=42, hidden_size=3584, num_attention_heads=16,
              head_dim=256, sliding_window=4096), 344_064, 172_032, 0,
    ),
    "Gemma-3-4B": (GEMMA3, 34 * 4096, 5 * 4096, 0),
    "gpt-oss-20b": (GPT_OSS, 24 * 2048, 12 * 2048, 0),
    "gpt-oss, types left out": (GPT_OSS | {"layer_types": None}, 24 * 2048, 12 * 2048, 0),
    "Jamba": (JAMBA, 16_384, 16_384, 28 * (8192 * 3 + 8192 * 16) * 2),
    "Qwen3-Next": (QWEN3_NEXT, 24_576, 24_576, 36 * (8192 * 3 + 32 * 128 * 128) * 2),
    "Qwen3-Next, states in float32": (
        QWEN3_NEXT | {"mamba_ssm_dtype": "float32"}, 24_576, 24_576,
        36 * (8192 * 3 * 2 + 32 * 128 * 128 * 4),
    ),
    "Bamba": (
        {"model_type": "bamba", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
         "num_key_value_heads": 8, "attn_layer_indices": [9, 18, 27], "mamba_expand": 2, "mamba_n_heads": 128,
         "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4, **BF16},
        3 * 4096, 3 * 4096, 29 * ((8192 + 2 * 128) * 3 + 8192 * 128) * 2,
    ),
    "short convolutions": (
        llama(full_attn_idxs=[2, 5], num_hidden_layers=6, conv_L_cache=3, conv_dim=4096), 8192, 8192,
        4 * 4096 * 2 * 2,
    ),
    "GPT-2": (
        {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "dtype": "float16"}, 36_864,
        36_864, 0,
    ),
    "Falcon-7B": (
        {"model_type": "falcon", "num_hidden_layers": 32, "hidden_size": 4544, "num_attention_heads": 71,
         "multi_query": True, **BF16}, 8192, 8192, 0,
    ),
    "layers that read another's": (llama(num_kv_shared_layers=12), 20 * 4096, 20 * 4096, 0),
    "layers of different heads": (
        llama(num_key_value_heads=[8] * 30 + [1, 2]), 30 * 4096 + 3 * 512, 30 * 4096 + 3 * 512, 0,
    ),
    "an fp8 cache in the weights' quantisation": (
        llama(quantization_config={"kv_cache_scheme": {"num_bits": 8, "type": "float"}}), 65_536, 65_536, 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_the_bytes_of_a_model_are_correct(name: str) -> None:
    config, token, growth, state = KNOWN[name]
    cache = read_config(config)
    assert (cache.token_bytes, cache.full_token_bytes, cache.state_bytes) == (token, growth, state)


@pytest.mark.parametrize(
    ("kv_format", "nbytes"),
    [("fp8", 65_536), ("fp8_e4m3", 65_536), ("float32", 262_144), ("fp8_per_token_head", 67_584),
     ("int4_per_token_head", 34_816), ("nvfp4", 36_864)],
)  # fmt: skip
def test_a_quantised_cache_counts_its_scales(kv_format: str, nbytes: int) -> None:
    assert read_config(llama(), kv_format=kv_format).token_bytes == nbytes


def test_latent_attention_has_its_own_formats() -> None:
    assert read_config(DEEPSEEK, kv_format="fp8_ds_mla").token_bytes == 61 * 656
    with pytest.raises(ConfigError, match="kv_lora_rank: fp8_ds_mla is a format for latent"):
        read_config(llama(), kv_format="fp8_ds_mla")


def test_gpus_share_heads_and_replicate_them_if_there_are_few() -> None:
    for gpus, one, all_ in ((4, 32_768, 131_072), (16, 16_384, 131_072)):
        cache = read_config(llama(), tensor_parallel=gpus)
        assert (cache.token_bytes, cache.prefix_bytes(1, whole=True)) == (one, all_)
    latent = read_config(DEEPSEEK, tensor_parallel=8)
    assert (latent.token_bytes, latent.prefix_bytes(1, whole=True)) == (70_272, 70_272)
    with pytest.raises(ConfigError, match="num_key_value_heads: 8 cannot be divided over 3 GPUs"):
        read_config(llama(), tensor_parallel=3)


def test_a_sequence_keeps_its_windows_and_one_state() -> None:
    mistral = read_config(llama(model_type="mistral", sliding_window=4096))
    assert mistral.prefix_bytes(100_000) == 4096 * 131_072
    assert mistral.prefix_bytes(100_000, 16) == (4096 + 16) * 131_072
    jamba = read_config(JAMBA)
    assert jamba.prefix_bytes(100, 16) == 112 * 16_384 + jamba.state_bytes


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (llama(num_hidden_layers=None), "num_hidden_layers: is missing"),
        (llama(num_attention_heads=None), "num_attention_heads: is missing"),
        (llama(hidden_size=None), "hidden_size: is missing"),
        (llama(num_key_value_heads="eight"), "num_key_value_heads: 'eight' is not an integer"),
        (llama(num_key_value_heads=-1), "num_key_value_heads: -1 is not an integer"),
        (llama(num_hidden_layers=True), "num_hidden_layers: True is not an integer"),
        (llama(layer_types=["full_attention"] * 31), "layer_types: 31 entries for 32 layers"),
        (llama(layer_types=["spiral"] * 32), r"layer_types\[0\]: unknown kind of layer 'spiral'"),
        (llama(layer_types=["sliding_attention"] * 32), "sliding_window: is missing"),
        (llama(hidden_size=4097), "hidden_size: 4097 cannot be divided"),
        (llama(layer_types=["mamba"] * 32), "mamba_d_conv: is missing"),
        (llama(num_hidden_layers=1_000_000_000), "1000000000 is not an integer from 1 to 10,000"),
        (llama(torch_dtype="bfloat17"), "torch_dtype: 'bfloat17' is no float type of torch"),
        (llama(dtype=16), "dtype: 16 is no float type of torch"),
        (llama(num_key_value_heads=["a"] * 32), r"num_key_value_heads\[0\]: 'a' is not an integer"),
        (llama(block_configs=[{}] * 32), "n_heads_in_group: None is not an integer"),
        (
            llama(sliding_window=9, sliding_window_pattern=""),
            "sliding_window_pattern: '' is empty",
        ),
        ({"layer_types": 7}, "layer_types: is not a list"),
        ({}, "num_hidden_layers: is missing"),
        ([], "not a JSON object"),
    ],
)
def test_an_error_names_the_field(config: Config, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_config(config)


def test_break_even_is_where_loading_and_computing_are_equal() -> None:
    cache = read_config(llama())
    prefill = PrefillCost(1e-4, 1e-9)
    bandwidth = break_even_bandwidth(cache, prefill, 4096, 0.005)
    assert bandwidth is not None
    assert 0.005 + 4096 * 131_072 / bandwidth == pytest.approx(prefill.seconds(4096))
    tokens = break_even_tokens(cache, prefill, 3e9, 0.005)
    assert tokens is not None

    def gain(count: int) -> float:
        return prefill.seconds(count) - 0.005 - count * 131_072 / 3e9

    assert gain(tokens) >= 0 > gain(tokens - 1)
    assert break_even_tokens(cache, PrefillCost(1e-6), 1e9, 0.001) is None
    assert break_even_bandwidth(cache, prefill, 10, 0.005) is None


def test_the_command_reads_a_directory_and_the_weights_in_it(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama()))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(16 << 30)
    with pytest.raises(SystemExit) as left:
        main(["size", str(tmp_path), "--json", "--tokens", "8192", "--gpu-memory", "80GiB"])
    assert not left.value.code
    output = json.loads(capsys.readouterr().out)
    assert output["bytes_per_token"] == 131_072
    assert output["gpu"]["weight_bytes"] == 16 << 30
    assert output["gpu"]["sequences"] == 56  # (72 - 16) GiB, of 1 GiB each
    with pytest.raises(SystemExit):
        main(["size", str(tmp_path / "config.json")])
    assert "131,072 B" in capsys.readouterr().out


def test_the_page_shows_the_command_and_its_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Meta-Llama-3-8B").mkdir()
    (tmp_path / "Meta-Llama-3-8B/config.json").write_text(json.dumps(llama()))
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[3] / "docs/sizing.md"
    (shown,) = [one.text for one in blocks(page) if one.text.startswith("$ kvtier size")]
    first, *lines = shown.splitlines()
    with pytest.raises(SystemExit) as left:
        main(shlex.split(first)[2:])
    assert not left.value.code
    output = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert output == [" ".join(line.split()) for line in lines]


def test_a_file_without_an_end_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["size", "/dev/zero"])
    assert left.value.code == 2 and "/dev/zero: is too long" in capsys.readouterr().err


def test_a_config_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama()), encoding="utf-8-sig")
    with pytest.raises(SystemExit) as left:
        main(["size", str(tmp_path)])
    assert not left.value.code


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '"x"', "\xff" * 10])
def test_a_file_that_is_not_a_config_is_refused_in_one_line(
    tmp_path: Any, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(SystemExit) as left:
        main(["size", str(tmp_path)])
    output = capsys.readouterr().err
    assert left.value.code == 2 and output.count("\n") == 1 and "config.json" in output


@pytest.mark.parametrize("flag", ["--gpu-share", "--latency-ms", "--prefill-rate", "--gpu-hour"])
@pytest.mark.parametrize("number", ["nan", "inf"])
def test_a_flag_takes_finite_numbers_only(
    tmp_path: Path, flag: str, number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama()))
    with pytest.raises(SystemExit) as left:
        main(["size", str(tmp_path), flag, number])
    output = capsys.readouterr().err
    assert left.value.code == 2
    assert flag in output
