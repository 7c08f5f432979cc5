"""Small generated models: random, but every token of a prompt affects the output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCABULARY = 512
WINDOW = 100
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 2048, "initializer_range": 0.15, "torch_dtype": "float32",
}  # fmt: skip


# The number of experts: all of them are used for every token, so that rounding cannot change the
# choice.
EXPERTS = 2
TIED = 0.05
LONG_TOKENS = 256
# An image: its edge in pixels, and the tokens that stand for it, in front of the text.
IMAGE, IMAGE_TOKENS, IMAGE_TOKEN = 56, 32, 300
# Channels of K in an uneven model: these, and those that RoPE rotates with them, are larger by this
# factor.
LARGE_CHANNELS = (3, 4)
LARGE = 512.0


def configuration(kind: str) -> Any:
    """The configuration of a model of this kind."""
    import transformers

    if kind in ("llama", "retrained", "uneven"):
        return transformers.LlamaConfig(num_hidden_layers=4, **COMMON)
    if kind == "longrope":
        # Other rotations above LONG_TOKENS. All of the head is rotated.
        half = COMMON["head_dim"] // 2
        rope = {
            "rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0,
            "original_max_position_embeddings": LONG_TOKENS,
            "short_factor": [1.0] * half, "long_factor": [1.5 + 0.3 * at for at in range(half)],
        }  # fmt: skip
        sizes = {name: value for name, value in COMMON.items() if name != "head_dim"}
        return transformers.Phi3Config(
            num_hidden_layers=4, rope_parameters=rope, pad_token_id=0,
            original_max_position_embeddings=LONG_TOKENS, **sizes | {"hidden_size": 256},
        )  # fmt: skip
    if kind == "captions":
        seen = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
                "intermediate_size": 128, "initializer_range": 0.5}  # fmt: skip
        text = {
            name: COMMON[name] for name in ("vocab_size", "hidden_size", "max_position_embeddings")
        }
        return transformers.Blip2Config(
            vision_config=seen | {"image_size": IMAGE, "patch_size": IMAGE // 4},
            qformer_config=seen
            | {"vocab_size": 8, "encoder_hidden_size": 64, "cross_attention_frequency": 1},
            text_config=text | {
                "model_type": "opt", "ffn_dim": 256, "num_hidden_layers": 3, "num_attention_heads": 2,
                "word_embed_proj_dim": 128, "init_std": 0.15, "pad_token_id": 1,
            },
            num_query_tokens=IMAGE_TOKENS, image_token_index=IMAGE_TOKEN,
        )  # fmt: skip
    if kind == "mistral":
        return transformers.MistralConfig(num_hidden_layers=3, sliding_window=WINDOW, **COMMON)
    if kind == "mixtral":
        return transformers.MixtralConfig(
            num_hidden_layers=3, num_local_experts=EXPERTS, num_experts_per_tok=EXPERTS, **COMMON
        )
    if kind == "gemma2":
        return transformers.Gemma2Config(
            num_hidden_layers=4, sliding_window=WINDOW, query_pre_attn_scalar=64, **COMMON
        )
    if kind == "gemma3":
        return transformers.Gemma3TextConfig(
            num_hidden_layers=6, sliding_window=WINDOW, query_pre_attn_scalar=64,
            tie_word_embeddings=False, **COMMON,
        )  # fmt: skip
    if kind == "gemma4":
        # Its full layers have heads of twice the width, so a page of the same size holds half as
        # many tokens.
        return transformers.Gemma4TextConfig(
            num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2,
            sliding_window=WINDOW, global_head_dim=128, num_kv_shared_layers=0,
            hidden_size_per_layer_input=0, vocab_size_per_layer_input=VOCABULARY,
            tie_word_embeddings=False, **COMMON,
        )  # fmt: skip
    if kind == "gpt_oss":
        return transformers.GptOssConfig(
            num_hidden_layers=4, sliding_window=WINDOW, num_local_experts=EXPERTS,
            num_experts_per_tok=EXPERTS, **COMMON,
        )  # fmt: skip
    if kind == "deepseek":
        latent = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
                  "v_head_dim": 128, "q_lora_rank": None}  # fmt: skip
        experts = {"n_routed_experts": EXPERTS, "num_experts_per_tok": EXPERTS, "n_shared_experts": 1,
                   "moe_intermediate_size": 128, "first_k_dense_replace": 1}  # fmt: skip
        return transformers.DeepseekV2Config(
            num_hidden_layers=3, topk_group=1, n_group=1, **latent, **experts,
            **COMMON | {"num_key_value_heads": 4, "initializer_range": 0.08},
        )  # fmt: skip
    if kind == "qwen3_next":
        linear = {"linear_key_head_dim": 64, "linear_value_head_dim": 64,
                  "linear_num_key_heads": 2, "linear_num_value_heads": 4}  # fmt: skip
        experts = {"num_experts": EXPERTS, "num_experts_per_tok": EXPERTS, "moe_intermediate_size": 128,
                   "shared_expert_intermediate_size": 128}  # fmt: skip
        return transformers.Qwen3NextConfig(
            num_hidden_layers=4, layer_types=["linear_attention"] * 3 + ["full_attention"],
            **linear, **experts, **COMMON,
        )  # fmt: skip
    raise ValueError(kind)


def make_model(kind: str, folder: Path) -> Path:
    """Write a model of this kind. The result is deterministic."""
    import torch
    import transformers

    if kind.startswith("eagle"):
        return make_draft(folder, int(kind.removeprefix("eagle")))
    torch.manual_seed(0 if kind != "retrained" else 1)  # the same model with other weights
    config = configuration(kind)
    if kind == "captions":
        return make_captions(config, folder)
    model = transformers.AutoModelForCausalLM.from_config(config)
    if config.tie_word_embeddings:
        # The output would equal the input if the layers had little weight, so their weights are
        # scaled up.
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(TIED)
            model.model.norm.weight.fill_(1 / TIED)
    if kind == "uneven":
        make_uneven(model)
        tokenizer().save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def make_captions(config: Any, folder: Path) -> Path:
    """Write a model that reads images, and its processor."""
    import torch
    import transformers

    model = transformers.Blip2ForConditionalGeneration(config).float()
    with torch.no_grad():
        model.query_tokens.normal_()
    model.save_pretrained(folder)
    letters = tokenizer()
    letters.add_tokens([f"<{number}>" for number in range(len(letters), IMAGE_TOKEN)])
    letters.add_special_tokens({"additional_special_tokens": ["<image>"]})
    images = transformers.BlipImageProcessorPil(size={"height": IMAGE, "width": IMAGE})
    processor = transformers.Blip2Processor(images, letters, num_query_tokens=IMAGE_TOKENS)
    processor.save_pretrained(folder)
    return folder


def make_uneven(model: Any) -> None:
    """A few channels of K are much larger than the others, as in trained models; Q compensates for it."""
    import torch

    dims = COMMON["head_dim"]
    channels = [at + half for at in LARGE_CHANNELS for half in (0, dims // 2)]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.unflatten(0, (-1, dims))[:, channels] *= LARGE
            layer.self_attn.q_proj.weight.unflatten(0, (-1, dims))[:, channels] /= LARGE


def make_draft(folder: Path, seed: int) -> Path:
    """Write an EAGLE draft model for the Llama model: one layer, which also reads the model's last results.
    Its weights depend on the seed."""
    import torch
    import transformers
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        num_hidden_layers=1, architectures=["LlamaForCausalLM"], **COMMON
    )
    layer = transformers.AutoModelForCausalLM.from_config(config).model.layers[0]
    tensors = {f"layers.0.{name}": tensor for name, tensor in layer.state_dict().items()}
    del tensors["layers.0.input_layernorm.weight"]
    hidden = COMMON["hidden_size"]
    tensors["fc.weight"] = torch.randn(hidden, 2 * hidden) * COMMON["initializer_range"]
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tokenizer() -> Any:
    """One token per byte: for calibration, which reads text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE(vocab={letter: at for at, letter in enumerate(letters)}, merges=[])
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def make_adapter(folder: Path, seed: int, rank: int = 8) -> Path:
    """Write a LoRA adapter for the Llama model; its content depends on the seed."""
    import torch
    from safetensors.torch import save_file

    layers: int = configuration("llama").num_hidden_layers
    hidden, out = COMMON["hidden_size"], COMMON["num_key_value_heads"] * COMMON["head_dim"]
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.v_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, hidden, generator=random) * 0.2
        tensors[f"{name}.lora_B.weight"] = torch.randn(out, rank, generator=random) * 0.2
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return folder


def main() -> None:
    import sys

    kind, folder, *seed = sys.argv[1:]
    if kind == "adapter":
        make_adapter(Path(folder), int(seed[0]))
    else:
        make_model(kind, Path(folder))
    print("made")


if __name__ == "__main__":
    main()
