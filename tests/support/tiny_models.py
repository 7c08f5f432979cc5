"""Create causal language models of a few thousand weights, with a tokenizer of bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "initializer_range": 0.15, "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
# The configuration, and the module whose output is K before RoPE.
KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("LlamaConfig", {"head_dim": 16}, "k_proj"),
    "llama3": ("LlamaConfig", {"head_dim": 16, "rope_parameters": LLAMA3_ROPE}, "k_proj"),
    "mistral": ("MistralConfig", {"head_dim": 16, "sliding_window": 32}, "k_proj"),
    "qwen2": ("Qwen2Config", {}, "k_proj"),
    "qwen3": ("Qwen3Config", {"head_dim": 16}, "k_norm"),
    "gemma": ("GemmaConfig", {"head_dim": 16}, "k_proj"),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
         "sliding_window": 32},
        "k_norm",
    ),
    "stablelm": ("StableLmConfig", {"partial_rotary_factor": 0.5}, "k_proj"),
    "cohere": ("CohereConfig", {}, "k_proj"),  # interleaved
}  # fmt: skip
LATENT, TURNED = 32, 8  # cached dimensions of a token: a latent, and a part that RoPE rotates
OF_LATENTS = {
    "num_key_value_heads": 4, "kv_lora_rank": LATENT, "qk_rope_head_dim": TURNED, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "q_lora_rank": None, "first_k_dense_replace": 3, "n_routed_experts": 4,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip
LATENT_KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "deepseek2": ("DeepseekV2Config", OF_LATENTS, "kv_a_proj_with_mqa"),
    "deepseek3": ("DeepseekV3Config", OF_LATENTS, "kv_a_proj_with_mqa"),
}  # fmt: skip


def save_model(folder: Path, kind: str = "llama", **changes: Any) -> Path:
    """Save a model with the same weights every time."""
    import torch
    import transformers

    name, more, _ = (KINDS | LATENT_KINDS)[kind]
    config = getattr(transformers, name)(**{**SIZES, **more, **changes}, dtype="bfloat16")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer() -> Any:
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    whole = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=whole)


def words(count: int) -> str:
    """Return text that repeats itself after a long distance."""
    return "".join(f"{number * 7919 % 1009:x} is {number % 13} and " for number in range(count))
