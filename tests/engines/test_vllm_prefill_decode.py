"""A prompt is computed by one engine, and its answer by another one: two real engines and a real daemon."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from engines.served import Served
from support.daemons import Daemon

pytest.importorskip("vllm.v1.engine.core", reason="needs vLLM: make test-engines")

BLOCK = 16
TOKENS = 24
WAIT_S = 60.0
EngineOf = Callable[..., Any]


def prompt(seed: int, blocks: int = 12) -> list[int]:
    return [(seed * 7919 + at * 31) % 500 + 1 for at in range(blocks * BLOCK + 1)]


def started(engine_of: EngineOf, daemon: Daemon, role: str, **changes: Any) -> Served:
    extra = {"patience_ms": int(WAIT_S * 1000)}
    return Served(
        engine_of("llama", daemon.socket, script="serving.py", role=role, extra=extra, **changes)
    )


@pytest.fixture(scope="module")
def prefill(shared_daemon: Daemon, engine_of: EngineOf) -> Served:
    return started(engine_of, shared_daemon, "kv_producer", connector="SlowConnector")


@pytest.fixture(scope="module")
def decode(shared_daemon: Daemon, engine_of: EngineOf) -> Served:
    return started(engine_of, shared_daemon, "kv_consumer")


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_decoder_answers_what_an_engine_alone_answers(prefill: Served, decode: Served) -> None:
    text = prompt(1)
    [expected] = decode.compute([text], TOKENS)
    assert decode.reset()
    first = prefill.serve(text, 1)
    assert first["parameters"] == {"kvtier": {"await": True}}
    answer = decode.serve(text, TOKENS, parameters=first["parameters"])
    assert answer["cached"] == len(text) - 1
    assert answer["tokens"] == expected["tokens"]
    assert answer["logprobs"] == pytest.approx(expected["logprobs"], abs=1e-4)
    assert first["tokens"] == expected["tokens"][:1]


def test_a_decoder_waits_for_blocks_that_are_being_copied(prefill: Served, decode: Served) -> None:
    text = prompt(2)
    [expected] = decode.compute([text], TOKENS)
    assert decode.reset()
    held = prefill.engine.records / "copying"
    held.touch()
    first = prefill.serve(text, 1)
    until((prefill.engine.records / "copying.now").exists)
    answer = decode.begin(text, TOKENS, parameters=first["parameters"])
    assert decode.state() and not answer.done(), "it would compute the blocks again"
    held.unlink()
    answered = answer.result(WAIT_S)
    assert answered["cached"] == len(text) - 1
    assert answered["tokens"] == expected["tokens"]


def test_the_roles_save_and_load_nothing_else(prefill: Served, decode: Served) -> None:
    text = prompt(3)
    prefill.serve(text, 1)
    assert prefill.reset()
    assert prefill.serve(text, 1)["cached"] == 0, "a producer loads nothing"
    counts = decode.state()["counts"]
    assert not counts.get("saved_tokens") and counts["loaded_tokens"]
