"""Prompts for small engines, and when two answers are the same."""

from __future__ import annotations

import random
from typing import Any

import pytest

BLOCK = 32
CLOSE = 1e-2  # of logprobs in float32
LONG = 10 * BLOCK + 5


def prompt(seed: int, tokens: int = LONG) -> list[int]:
    return random.Random(seed).choices(range(3, 500), k=tokens)


def check_same(one: Any, other: Any, close: float = CLOSE) -> None:
    """The same tokens by the same logprobs, and not always the same token."""
    assert one["reason"] == other["reason"] == "length"
    assert one["tokens"] == other["tokens"]
    assert one["logprobs"] == pytest.approx(other["logprobs"], abs=close)
    assert len(set(one["tokens"])) > len(one["tokens"]) // 2, f"degenerate: {one['tokens']}"
