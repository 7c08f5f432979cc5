"""The model of the examples: one of your own, or a small one with random weights.

A random model writes nonsense, but it computes as much as a trained one of its size.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig


class Bytes:
    """A tokenizer for the random model: one token per byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


def load() -> tuple[Any, Any]:
    """Return the model and the tokenizer at the path in the first argument, or the random ones."""
    if len(sys.argv) > 1:
        path = sys.argv[1]
        return AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=16384,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config).eval(), Bytes()


def answer(model: Any, tokenizer: Any, prompt: str, tokens: int = 8) -> tuple[str, float]:
    """Generate an answer of this many tokens. Return it, and the seconds that it took."""
    ids = torch.tensor([tokenizer.encode(prompt)])
    began = time.perf_counter()
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
    )
    return tokenizer.decode(output[0, ids.shape[1] :].tolist()), time.perf_counter() - began
