"""A real engine whose own cache the daemon knows: blocks that the engine has leave memory, and return when
the engine drops them."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.conftest import Engine
from support.daemons import Daemon
from support.prompts import BLOCK

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
traces = importlib.import_module("traces")

PAGES = 129  # of which vLLM reserves one
MOST_BLOCKS = 28
COLD = """[warm]
size = "32MiB"
[cold]
size = "1GiB"
segment = "8MiB"
codec = "raw"
directories = ["{}"]
"""
REQUESTS = 220


def prompts() -> list[list[int]]:
    """The chats of the benchmarks: each block of a prompt has tokens of its own."""
    found = []
    for _, names in traces.chat(REQUESTS, seed=3):
        tokens: list[int] = []
        for name in names[:MOST_BLOCKS]:
            tokens += random.Random(name).choices(range(3, 500), k=BLOCK)
        found.append([*tokens, 7])
    return found


def play(
    engine: Engine, daemon: Daemon, asked: list[list[int]]
) -> tuple[int, int, list[list[int]]]:
    """Serve the prompts one after another: tokens that came from the engine's cache or memory, tokens that
    came from the disk, and the answers."""
    cached, answers = 0, []
    for one in asked:
        (answer,) = engine.generate([one], tokens=1)
        cached += answer["cached"]
        answers.append(answer["tokens"])
    used = daemon.stats()["used_tokens"]
    return cached - used["cold"], used["cold"], answers


@pytest.mark.slow
def test_more_prompts_are_found_in_memory(
    daemon_of: Callable[..., Daemon], engine_of: Callable[..., Any], tmp_path: Path
) -> None:
    """With a memory of twice the engine's cache. The answers are the same."""
    asked, found = prompts(), {}
    for residency in (False, True):
        disk = tmp_path / f"cold-{residency}"
        disk.mkdir()
        daemon = daemon_of(config=COLD.format(disk))
        daemon.wait_for_disks()
        engine = engine_of(
            "llama", daemon.socket, connector="KvtierConnector", extra={"residency": residency},
            num_gpu_blocks_override=PAGES,
        )  # fmt: skip
        found[residency] = play(engine, daemon, asked)
        resident = daemon.stats()["hot"]["resident"]
        engine.stop()
        assert resident["blocks"] == (PAGES - 2 if residency else 0)
        assert (resident["returned_blocks"] > 0) == residency
    blind, known = found[False], found[True]
    print(f"{sum(map(len, asked))} tokens; found in memory and on disk: {blind[:2]}, {known[:2]}")
    assert known[2] == blind[2]
    assert known[0] > 1.05 * blind[0]
