"""Other shapes of cache: several groups, windows, two ranks. Byte for byte, as with one group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from daemons import Daemon
from prompts import BLOCK, check_same, prompt

WINDOW_BLOCKS = 4  # of 100 tokens: the 99 before the next one


@pytest.mark.parametrize(
    "kind, ranks, pages",
    [
        # A window needs its last blocks, of each of its layers.
        ("mistral", 1, 3 * WINDOW_BLOCKS),
        ("gemma3", 1, 5 * WINDOW_BLOCKS + 10),
        ("llama", 2, 2 * 4 * 10),
    ],
)
def test_a_prompt_is_loaded_as_it_was_saved(
    shared_daemon: Daemon, engine_of: Callable[..., Any], kind: str, ranks: int, pages: int
) -> None:
    engine = engine_of(kind, shared_daemon.socket, tensor_parallel_size=ranks)
    before = shared_daemon.stats()["saved_tokens"]
    (first,) = engine.generate([prompt(1)], 40)
    shared_daemon.wait_for(lambda stats: stats["saved_tokens"] >= before + 11 * BLOCK, 30.0)
    engine.reset()
    engine.forget_records()
    (again,) = engine.generate([prompt(1)], 40)
    assert again["cached"] == 10 * BLOCK
    check_same(first, again)
    count, wrong = engine.compare()
    assert (count, wrong) == (pages, [])
    engine.stop()
    assert "kvtier:" not in engine.log.read_text()
