"""Small models made on the spot: random, but so that every token of a prompt matters to what comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 512
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 2048, "initializer_range": 0.15, "torch_dtype": "float32",
}  # fmt: skip


def make_model(kind: str, folder: Path) -> Path:
    """Write a model of this kind there. The same every time."""
    import torch
    import transformers

    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(num_hidden_layers=4, **COMMON)
    elif kind == "mistral":
        config = transformers.MistralConfig(num_hidden_layers=3, sliding_window=100, **COMMON)
    elif kind == "gemma3":
        config = transformers.Gemma3TextConfig(
            num_hidden_layers=6,
            sliding_window=100,
            query_pre_attn_scalar=64,
            tie_word_embeddings=False,
            **COMMON,
        )
    else:
        raise ValueError(kind)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return folder


def main() -> None:
    import sys

    make_model(sys.argv[1], Path(sys.argv[2]))


if __name__ == "__main__":
    main()
