"""Models of a few thousand random weights, of many architectures of transformers."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCABULARY = 256
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "initializer_range": 0.15, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
WINDOW = 24
ALTERNATING = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": WINDOW,
    "head_dim": 16, "query_pre_attn_scalar": 16,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENTS = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "q_lora_rank": None, "first_k_dense_replace": 2, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1,
}  # fmt: skip
MAMBA = {
    "mamba_d_state": 16,
    "mamba_n_heads": 4,
    "mamba_d_head": 24,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"head_dim": 16}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "mistral": ("MistralConfig", {"head_dim": 16, "sliding_window": WINDOW}),
    "gemma2": ("Gemma2Config", ALTERNATING),
    "gemma3": ("Gemma3TextConfig", ALTERNATING),
    "cohere2": ("Cohere2Config", {k: v for k, v in ALTERNATING.items() if k[0] in "ls"}),
    "gpt2": ("GPT2Config", {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 1024}),
    "opt": ("OPTConfig", {"ffn_dim": 64, "word_embed_proj_dim": 48}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "falcon": ("FalconConfig", {"multi_query": True, "new_decoder_architecture": False}),
    "bloom": ("BloomConfig", {"n_layer": 3, "n_head": 4}),
    "phi3": ("Phi3Config", {}),
    "mixtral": ("MixtralConfig", {"sliding_window": None, **EXPERTS}),
    "gpt_oss": ("GptOssConfig", {"head_dim": 16, "sliding_window": WINDOW, **EXPERTS,
                                 "layer_types": ["sliding_attention", "full_attention"] * 2,
                                 "num_hidden_layers": 4}),
    "llama4": ("Llama4TextConfig", {"head_dim": 16, "intermediate_size_mlp": 64, "attention_chunk_size": 32,
                                    "num_local_experts": 2, "num_hidden_layers": 4}),
    "deepseek2": ("DeepseekV2Config", LATENTS),
    "deepseek3": ("DeepseekV3Config", LATENTS),
    "qwen3_next": ("Qwen3NextConfig", {
        "head_dim": 16, "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}),
    "jamba": ("JambaConfig", {"attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 2,
                              "mamba_d_state": 16, "use_mamba_kernels": False}),
    "bamba": ("BambaConfig", {"attn_layer_indices": [1], **MAMBA}),
    "falcon_h1": ("FalconH1Config", {"head_dim": 16, "mamba_d_ssm": 96, **MAMBA}),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention", "conv"], "block_ff_dim": 64}),
    "granite_hybrid": ("GraniteMoeHybridConfig", {
        "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 2, "num_experts_per_tok": 1,
        "shared_intermediate_size": 32, **MAMBA}),
    "mamba2": ("Mamba2Config", {"state_size": 16, "num_heads": 4, "head_dim": 24, "n_groups": 1}),
}  # fmt: skip


def tiny_model(kind: str, **changes: Any) -> Any:
    """Return a model with the same weights every time, in float32."""
    name, more = KINDS[kind]
    config = getattr(transformers, name)(**{**SIZES, **more, **changes})
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def tiny_vision_model() -> Any:
    """Return a model for text and images, of Qwen 2.5 VL. An image of 4 x 4 patches has four tokens 250."""
    text = {
        **SIZES,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]},
    }
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 48,
        "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 1, "window_size": 16,
        "fullatt_block_indexes": [0],
    }  # fmt: skip
    config = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=250, video_token_id=251,
        vision_start_token_id=252, vision_end_token_id=253,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen2_5_VLForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = None
    return model


def prompt(tokens: int, seed: int = 1, rows: int = 1) -> torch.Tensor:
    """The same tokens on every device."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (rows, tokens), generator=generator, device="cpu")
    return ids.to(torch.get_default_device())
