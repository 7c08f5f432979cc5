"""What determines the content of a block besides its tokens: an engine that computes other content finds
nothing, and a request whose content is not identified loads and saves nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1.engine.core", reason="needs vLLM: make test-engines")

from engines.models import IMAGE_TOKENS, LONG_TOKENS
from engines.test_vllm_models import assert_silent, long, wait_until_saved
from kvtier_vllm.identity import Adapters
from support.daemons import Daemon
from support.prompts import BLOCK, CLOSE, check_same, prompt

EngineOf = Callable[..., Any]
LETTERS = [token % 256 for token in prompt(1, 100)]  # of the tokenizer of a model for images
WITH_IMAGE = IMAGE_TOKENS + len(LETTERS)


def messages(engine: Any) -> list[str]:
    """The plugin's lines in the log, without the connection."""
    lines = [line for line in engine.log.read_text().splitlines() if "kvtier:" in line]
    return [line.partition("kvtier: ")[2] for line in lines if "kvtier: connected to" not in line]


def test_an_engine_with_longer_contexts_and_other_rotations_finds_nothing(
    shared_daemon: Daemon, engine_of: EngineOf
) -> None:
    """LongRoPE: vLLM chooses the rotation of all tokens by `max_model_len`."""
    answers = []
    for longest in (LONG_TOKENS, LONG_TOKENS + 1):
        engine = engine_of("longrope", shared_daemon.socket, max_model_len=longest)
        before = shared_daemon.stats()["saved_tokens"]
        answers += engine.generate([prompt(1, 171)], 8)
        wait_until_saved(shared_daemon, before + 5 * BLOCK)
        engine.stop()
        assert_silent(engine)
    short, other = answers
    assert short["cached"] == other["cached"] == 0
    assert short["tokens"] != other["tokens"]


def test_a_pooler_of_all_tokens_is_served_without_kvtier(
    shared_daemon: Daemon, engine_of: EngineOf
) -> None:
    """With a cached prefix, it ends the engine."""
    engine = engine_of(
        "uneven", shared_daemon.socket, runner="pooling", pooler_config={"seq_pooling_type": "MEAN"},
        skip_tokenizer_init=False,
    )  # fmt: skip
    before = shared_daemon.stats()["saved_tokens"]
    answers = []
    for _ in range(2):
        engine.order(embed=[prompt(1, 100)])
        answers += engine.answer()
    assert answers[0] == answers[1]
    engine.stop()
    assert shared_daemon.stats()["saved_tokens"] == before
    (line,) = messages(engine)
    assert line == "disabled for this engine: vLLM does not support prefix caching for this model"


def test_a_pooler_of_the_last_token_gives_the_same_embedding_after_a_hit(
    shared_daemon: Daemon, engine_of: EngineOf
) -> None:
    engine = engine_of(
        "uneven", shared_daemon.socket, runner="pooling", pooler_config={"seq_pooling_type": "LAST"},
        skip_tokenizer_init=False, disable_log_stats=False,
    )  # fmt: skip
    before = shared_daemon.stats()["saved_tokens"]
    answers = []
    for _ in range(2):
        engine.order(embed=[prompt(1, 100)])
        answers += engine.answer()
        wait_until_saved(shared_daemon, before + 3 * BLOCK)
        engine.reset()
    assert answers[0] == pytest.approx(answers[1], abs=CLOSE) and len(set(answers[0])) > BLOCK
    assert engine.metrics()["vllm:kvtier_loaded_tokens"] == 3 * BLOCK
    engine.stop()
    assert_silent(engine)


def test_images_that_the_engine_only_numbers_are_neither_saved_nor_loaded(
    shared_daemon: Daemon, engine_of: EngineOf
) -> None:
    """Without its caches, vLLM hashes the number of an image, which begins with 1 in each engine."""
    engine = engine_of(
        "captions", shared_daemon.socket, skip_tokenizer_init=False, disable_log_stats=False,
        mm_processor_cache_gb=0, enable_prefix_caching=False,
    )  # fmt: skip
    before = shared_daemon.stats()["saved_tokens"]
    answers = engine.generate([LETTERS] * 2, images=[1, 2])
    answers += engine.generate([LETTERS])
    assert [one["cached"] for one in answers] == [0, 0, 0]
    wait_until_saved(shared_daemon, before + len(LETTERS) // BLOCK * BLOCK)
    engine.stop()
    assert shared_daemon.stats()["saved_tokens"] == before + len(LETTERS) // BLOCK * BLOCK
    (line,) = messages(engine)
    assert "requests with images, videos or audio load and save nothing" in line


def test_an_adapter_of_a_hub_is_identified_where_vllm_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_adapter: Callable[[Path, int], Path]
) -> None:
    from huggingface_hub import constants
    from vllm.lora.request import LoRARequest
    from vllm.lora.utils import get_adapter_absolute_path

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository, commit = tmp_path / "hub" / "models--someone--sql", "7" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    snapshot = make_adapter(repository / "snapshots" / commit, 1)
    assert get_adapter_absolute_path("someone/sql") == str(snapshot)
    adapters = Adapters()
    found = adapters.extras(LoRARequest("sql", 1, "someone/sql"))
    assert found and found == adapters.extras(LoRARequest("same", 2, str(snapshot)))
    # The branch moves to another commit while the engine keeps the first one in its memory.
    make_adapter(repository / "snapshots" / ("8" * 40), 2)
    (repository / "refs" / "main").write_text("8" * 40)
    assert adapters.extras(LoRARequest("sql", 1, "someone/sql")) is None


@long
def test_an_image_is_loaded_where_it_was_processed_in_the_same_way(
    shared_daemon: Daemon, engine_of: EngineOf
) -> None:
    found: list[list[int]] = []
    answers = []
    for options in ({}, {}, {"mm_processor_kwargs": {"do_normalize": False}}):
        engine = engine_of(
            "captions", shared_daemon.socket, skip_tokenizer_init=False, **options
        )  # fmt: skip
        before = shared_daemon.stats()["saved_tokens"]
        answers.append(engine.generate([LETTERS] * 2, images=[1, 2]))
        found.append([one["cached"] for one in answers[-1]])
        new = 0 if sum(found[-1]) else 2
        wait_until_saved(shared_daemon, before + new * (WITH_IMAGE // BLOCK) * BLOCK)
        engine.stop()
        assert_silent(engine)
    whole = (WITH_IMAGE - 1) // BLOCK * BLOCK
    assert found == [[0, 0], [whole, whole], [0, 0]]
    for first, again, other in zip(*answers, strict=True):
        check_same(first, again)
        assert abs(first["logprobs"][0] - other["logprobs"][0]) > CLOSE
    assert abs(answers[0][0]["logprobs"][0] - answers[0][1]["logprobs"][0]) > CLOSE
