"""Other cache layouts, and features that change what is cached or how: loads are exact, as with one group."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engines.processor import need_avx512, need_tiles
from support.daemons import Daemon
from support.effort import ALL
from support.prompts import BLOCK, CLOSE, check_same, prompt

long = pytest.mark.skipif(
    not os.environ.get("KVTIER_FAULTS"), reason="an engine more; KVTIER_FAULTS=1"
)
STATES_BLOCK = 160  # in tokens: vLLM makes attention pages this long so that states fit
WINDOW_BLOCKS = 4  # of 100 tokens: the 99 before the next one
REPEATING = prompt(1, 40) * 8 + prompt(1, 5)


@dataclass
class Case:
    """How an engine is started, and what it loads of a prompt: the number of pages, and of whole blocks."""

    kind: str
    pages: int
    options: dict[str, Any] = field(default_factory=dict)
    blocks: int = 10
    block: int = BLOCK
    tokens: list[int] = field(default_factory=lambda: prompt(1))
    compared: int = 40
    close: float = CLOSE
    slow: bool = False
    tiles: bool = False  # only if the processor supports them


# On a processor with tiles, vLLM would choose kernels that need them, and bfloat16, without these
# settings.
REFERENCE = {"block_size": 16, "attention_backend": "CPU_MLA"}
FP8 = {"kv_cache_dtype": "fp8"}
NGRAM = {
    "speculative_config": {
        "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4,
    }
}  # fmt: skip
BESIDE = {
    "connectors": [
        {"kv_connector": "Elsewhere", "kv_connector_module_path": "elsewhere", "kv_role": "kv_both"}
    ]
}
STAGES = {"pipeline_parallel_size": 2, "connector": "StagesConnector"}
CASES = {
    # A window needs its last blocks, in each of its layers.
    "mistral": Case("mistral", 3 * WINDOW_BLOCKS),
    "gemma2": Case("gemma2", 2 * 10 + 2 * WINDOW_BLOCKS, slow=True),
    "gemma3": Case("gemma3", 5 * WINDOW_BLOCKS + 10),
    # Blocks of 32 and of 64 tokens: five of 64; the window needs 99 tokens of them, in three pages
    # of 32.
    "gemma4": Case("gemma4", 2 * 10 + 2 * 2, blocks=5, block=2 * BLOCK),
    "gpt_oss": Case("gpt_oss", 2 * 10 + 2 * WINDOW_BLOCKS, slow=True),
    # Neither prefix caching nor chunked prefill works there, and the engine's own decode and
    # prefill differ.
    "deepseek": Case("deepseek", 3 * 20, REFERENCE, 20, 16, compared=4, close=0.05),
    "deepseek on tiles": Case(
        "deepseek", 3 * 10, {"dtype": "bfloat16"}, compared=2, close=0.05, tiles=True
    ),
    "two ranks": Case("llama", 2 * 4 * 10, {"tensor_parallel_size": 2}),
    # Two layers and one layer: the second shard has an undefined end, which no checksum may cover.
    "uneven stages": Case(
        "mistral", 3 * WINDOW_BLOCKS, STAGES | {"extra": {"verify": True}}, slow=True
    ),
    "stages with groups": Case("gemma2", 2 * 10 + 2 * WINDOW_BLOCKS, STAGES, slow=True),
    "stages of ranks": Case("llama", 2 * 4 * 10, STAGES | {"tensor_parallel_size": 2}, slow=True),
    "fp8": Case("llama", 4 * 10, FP8),
    "ngram": Case("llama", 4 * 10, NGRAM, tokens=REPEATING, slow=True),
    "beside another": Case("llama", 4 * 10, {"beside": BESIDE}, slow=True),
}


def assert_silent(engine: Any) -> None:
    """The plugin has reported its connection, and nothing else, except that a busy machine answered late."""
    lines = [line for line in engine.log.read_text().splitlines() if "kvtier:" in line]
    late = ("the daemon did not answer within", ": connected to the daemon")
    lines = [line for line in lines if not any(text in line for text in late)]
    assert lines and all("kvtier: connected to kvtier" in line for line in lines), lines


def wait_until_saved(daemon: Daemon, tokens: int) -> None:
    """Wait until `tokens` tokens are saved and no save is in progress: groups and ranks save in
    sequence, and each counts its tokens."""

    def over(stats: dict[str, Any]) -> bool:
        writing = stats["tiers"]["warm"]["states"]["writing"]
        return bool(stats["saved_tokens"] >= tokens and not writing)

    daemon.wait_for(over, 30.0)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[long] if case.slow else []) for name, case in CASES.items()],
)
def test_a_prompt_is_loaded_as_it_was_saved(
    shared_daemon: Daemon, engine_of: Callable[..., Any], name: str
) -> None:
    case = CASES[name]
    if case.tiles:
        need_tiles()
    if case.options == FP8:
        need_avx512()
    engine = engine_of(case.kind, shared_daemon.socket, **case.options)
    before = shared_daemon.stats()["saved_tokens"]
    (first,) = engine.generate([case.tokens], 40)
    cached = case.blocks * case.block
    wait_until_saved(shared_daemon, before + cached + case.block)
    engine.reset()
    engine.forget_records()
    (again,) = engine.generate([case.tokens], 40)
    assert again["cached"] == cached
    for answer in (first, again):
        for what in ("tokens", "logprobs"):
            answer[what] = answer[what][: case.compared]
    check_same(first, again, case.close)
    assert engine.compare() == (case.pages, [])
    engine.stop()
    assert_silent(engine)


def test_two_pipeline_stages_load_their_layers(
    shared_daemon: Daemon, engine_of: Callable[..., Any]
) -> None:
    """A load that fails in one of them is computed again, though the other one has filled its pages. Steps
    begin before the results of the last one are known."""
    engine = engine_of("llama", shared_daemon.socket, **STAGES)
    texts = [prompt(seed) for seed in (44, 45, 46)]
    before = shared_daemon.stats()["saved_tokens"]
    first = engine.generate(texts, 40)
    wait_until_saved(shared_daemon, before + 3 * 11 * BLOCK)
    for how, cached in (("stale 1", 0), ("stale 0", 0), ("", 10 * BLOCK)):
        engine.reset()
        engine.forget_records()
        engine.break_loads(how)
        again = engine.generate(texts, 40)
        for one, other in zip(first, again, strict=True):
            check_same(one, other)
            assert other["cached"] == cached
        pages, wrong = engine.compare()
        assert (pages, wrong) == (3 * 4 * 10, []) if cached else not wrong
    # On CPUs nothing is discarded, but each rank ends its copies, and the connector is reset.
    engine.sleep()
    ended = [one for one in engine.recorded("called") if one["name"] == "end_copies"]
    assert len(ended) == 2
    for found in (0, 10 * BLOCK):
        again = engine.generate(texts, 40)
        for one, other in zip(first, again, strict=True):
            check_same(one, other)
            assert other["cached"] == found
        wait_until_saved(shared_daemon, before + 2 * 3 * 11 * BLOCK)
        engine.reset()
    engine.stop()


@pytest.mark.parametrize("connector", ["own cache", pytest.param("connector", marks=[long])])
def test_blocks_of_other_weights_are_not_found(
    shared_daemon: Daemon, engine_of: Callable[..., Any], model_of: Callable[[str], Path],
    connector: str,
) -> None:  # fmt: skip
    """Weights that are loaded in place, of which vLLM tells no connector. The engine's own cache must be
    reset; whether its connector is reset too makes no difference."""
    text = prompt(41 if connector == "connector" else 42)
    engine = engine_of("llama", shared_daemon.socket)
    before = shared_daemon.stats()["saved_tokens"]
    (first,) = engine.generate([text], 40)
    wait_until_saved(shared_daemon, before + 11 * BLOCK)
    engine.call("reload_weights", weights_path=str(model_of("retrained")))
    engine.reset(connector == "connector")
    (other,) = engine.generate([text], 40)
    assert other["cached"] == 0 and other["tokens"] != first["tokens"]
    wait_until_saved(shared_daemon, before + 2 * 11 * BLOCK)
    engine.reset()
    engine.forget_records()
    (again,) = engine.generate([text], 40)
    assert again["cached"] == 10 * BLOCK
    check_same(other, again)
    assert engine.compare() == (4 * 10, [])
    engine.stop()
    fresh = engine_of("llama", shared_daemon.socket, engine.records)
    (answer,) = fresh.generate([text], 40)
    assert answer["cached"] == 10 * BLOCK
    check_same(first, answer)
    fresh.stop()


def test_draft_layers_are_loaded_with_the_layers_of_the_model(
    shared_daemon: Daemon, engine_of: Callable[..., Any], model_of: Callable[[str], Path]
) -> None:
    """An EAGLE draft model: its layer is cached in the group of the model's layers. Its tokens do not change
    the answer, and blocks of another draft model's layer are not found."""

    def with_draft(kind: str, *records: Path) -> Any:
        draft = {"method": "eagle", "model": str(model_of(kind)), "num_speculative_tokens": 2}
        return engine_of("llama", shared_daemon.socket, *records, speculative_config=draft)

    text, engine = prompt(43), with_draft("eagle1")
    before = shared_daemon.stats()["saved_tokens"]
    (first,) = engine.generate([text], 40)
    wait_until_saved(shared_daemon, before + 11 * BLOCK)
    engine.reset()
    engine.forget_records()
    (again,) = engine.generate([text], 40)
    assert again["cached"] == 10 * BLOCK
    check_same(first, again)
    assert engine.compare() == (5 * 10, [])
    engine.stop()
    assert_silent(engine)
    other = with_draft("eagle2")
    (answer,) = other.generate([text], 40)
    assert answer["cached"] == 0
    check_same(first, answer)
    other.stop()


def test_blocks_depend_on_the_content_of_the_adapter(
    shared_daemon: Daemon, engine_of: Callable[..., Any], tmp_path: Path,
    make_adapter: Callable[[Path, int], Path],
) -> None:  # fmt: skip
    """Two adapters and no adapter: three different prompts. The engine's own hash identifies an adapter
    only by name and path."""
    one, two = (make_adapter(tmp_path / str(seed), seed) for seed in (1, 2))
    engine = engine_of(
        "llama", shared_daemon.socket, enable_lora=True, max_loras=2, max_lora_rank=8,
        disable_log_stats=False,
    )  # fmt: skip
    asked = [{}, {"adapter": ("a", 1, str(one))}, {"adapter": ("b", 2, str(two))}]
    before = shared_daemon.stats()["saved_tokens"]
    first = [engine.generate([prompt(1)], 40, **more)[0] for more in asked]
    assert [answer["cached"] for answer in first] == [0, 0, 0]
    assert len({tuple(answer["tokens"]) for answer in first}) == 3
    wait_until_saved(shared_daemon, before + 3 * 11 * BLOCK)
    engine.reset()
    engine.forget_records()
    for more, right in zip(asked, first, strict=True):
        (again,) = engine.generate([prompt(1)], 40, **more)
        assert again["cached"] == 10 * BLOCK
        check_same(right, again)
    assert engine.compare() == (3 * 4 * 10, [])
    told = engine.metrics("vllm:kvtier_adapter_")
    for name in ("none", "a", "b"):
        assert told[f"vllm:kvtier_adapter_requests:{name}"] == 2
        assert told[f"vllm:kvtier_adapter_hit_tokens:{name}"] == 10 * BLOCK
        assert told[f"vllm:kvtier_adapter_loaded_blocks:{name}"] == 10
        assert told[f"vllm:kvtier_adapter_saved_blocks:{name}"] >= 11
    engine.reset()
    make_adapter(one, 3)
    (other,) = engine.generate([prompt(1)], 40, adapter=("a", 3, str(one)))
    assert other["cached"] == 0 and other["tokens"] != first[1]["tokens"]
    engine.stop()


def test_a_model_with_states_continues_from_a_saved_state(
    shared_daemon: Daemon, engine_of: Callable[..., Any]
) -> None:
    """After a restart, in blocks of 160 tokens: all blocks of one layer, and the last state of three
    layers."""
    # Its linear attention exists only in bfloat16. States of float32 are the default only with AVX-512.
    options = {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32"}
    engine = engine_of("qwen3_next", shared_daemon.socket, **options)
    before = shared_daemon.stats()["tiers"]["warm"]["blocks"]
    text = prompt(1, 700)
    (first,) = engine.generate([text], 40)
    engine.wait_for_saves(shared_daemon, before + 4 + 3)
    engine.stop()
    other = engine_of("qwen3_next", shared_daemon.socket, engine.records, spawned=ALL, **options)
    other.forget_records()
    (again,) = other.generate([text], 40)
    assert again["cached"] == 4 * STATES_BLOCK
    check_same(first, again)
    assert other.compare() == (4 + 3, [])
    # Its attention blocks are stored from before, but none of its states: nothing is loaded up to
    # there.
    (between,) = other.generate([text[: 3 * STATES_BLOCK + 1]], 1)
    assert between["cached"] == 0
    for how, wrong in (("zero", 1), ("swap", 2)):
        other.reset()
        other.forget_records()
        other.break_loads(how)
        (spoilt,) = other.generate([text], 40)
        pages, found = other.compare()
        assert (spoilt["cached"], pages, len(found)) == (4 * STATES_BLOCK, 4 + 3, wrong)
    other.stop()
    assert_silent(other)


@long
def test_engines_that_run_at_once_share_their_blocks(
    daemon_of: Callable[..., Daemon], engine_of: Callable[..., Any]
) -> None:
    """One engine loads what the other saved. Data-parallel ranks of a dense model are such engines."""
    daemon = daemon_of(warm="64MiB")
    one = engine_of("llama", daemon.socket)
    other = engine_of("llama", daemon.socket, one.records)
    engines = (one, other)
    for engine, seed in zip(engines, (1, 2), strict=True):
        engine.begin([prompt(seed)], 40)
    first = [engine.answer()[0] for engine in engines]
    wait_until_saved(daemon, 2 * 11 * BLOCK)
    for engine in engines:
        engine.reset()
    one.forget_records()
    for engine, seed in zip(engines, (2, 1), strict=True):
        engine.begin([prompt(seed)], 40)
    crossed = [engine.answer()[0] for engine in engines]
    assert [answer["cached"] for answer in crossed] == [10 * BLOCK, 10 * BLOCK]
    for right, answer in zip(reversed(first), crossed, strict=True):
        check_same(right, answer)
    assert one.compare() == (2 * 4 * 10, [])
    for engine in engines:
        engine.stop()


@long
def test_ranks_that_step_together_load_what_the_other_has_computed(
    engine_of: Callable[..., Any], daemon_of: Callable[..., Daemon]
) -> None:
    """Two requests at once, and one while the other rank has no request and only steps along."""
    daemon = daemon_of(warm="64MiB")
    engine = engine_of(
        "mixtral", daemon.socket, script="stepping.py", connector="ExpertsConnector", spawned=True
    )
    prompts = [prompt(seed) for seed in range(3)]
    # No block is found yet: the third request is computed by a rank that is alone.
    both = engine.generate(prompts[:2], ranks=[0, 1])
    computed = [*both, *engine.generate(prompts[2:], ranks=[0])]
    wait_until_saved(daemon, 3 * 10 * BLOCK)
    both = engine.generate(prompts[:2], ranks=[1, 0])
    loaded = [*both, *engine.generate(prompts[2:], ranks=[1])]
    for one, other in zip(computed, loaded, strict=True):
        check_same(one, other)
        assert (one["cached"], other["cached"]) == (0, 10 * BLOCK)
    assert engine.compare() == (3 * 3 * 10, [])
