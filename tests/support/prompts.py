"""Prompts for small engines, and the comparison of two answers."""

from __future__ import annotations

import random
from typing import Any

import pytest

BLOCK = 32
CLOSE = 1e-2  # difference of logprobs in float32
LONG = 10 * BLOCK + 5


def prompt(seed: int, tokens: int = LONG) -> list[int]:
    return random.Random(seed).choices(range(3, 500), k=tokens)


def check_same(one: Any, other: Any, close: float = CLOSE) -> None:
    """Assert equal tokens and close logprobs, and that the answer is not one repeated token."""
    assert one["reason"] == other["reason"] == "length"
    assert one["tokens"] == other["tokens"]
    assert one["logprobs"] == pytest.approx(other["logprobs"], abs=close)
    assert len(set(one["tokens"])) > len(one["tokens"]) // 2, f"degenerate: {one['tokens']}"
