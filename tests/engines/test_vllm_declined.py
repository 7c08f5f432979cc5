"""Engines with a cache that kvtier does not support: they start, answer, and give the reason in one line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.daemons import Daemon
from support.prompts import prompt

pytest.importorskip("vllm.v1.engine.core", reason="needs vLLM: make test-engines")
pytestmark = pytest.mark.filterwarnings("ignore")

from kvtier_plugins import Unsupported  # noqa: E402
from kvtier_vllm import connector, layout  # noqa: E402
from support.neighbour import Neighbour  # noqa: E402
from support.numbers_engine import (  # noqa: E402
    MODELS,
    NumbersEngine,
    Rank,
    answer_to,
    attention,
    in_stages,
    layers,
    state,
)  # fmt: skip

EngineOf = Callable[..., NumbersEngine]


@pytest.fixture
def numbers_of(
    tmp_path: Path, shared_daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> Iterator[EngineOf]:
    """Starts engines of numbers without waiting for their connection."""
    running: list[NumbersEngine] = []
    monkeypatch.setattr(NumbersEngine, "connect", lambda engine: None)

    def start(model: str, **changes: Any) -> NumbersEngine:
        running.append(NumbersEngine(model, tmp_path / "m", shared_daemon.socket, **changes))
        return running[-1]

    yield start
    for engine in running:
        engine.close()


def parallel(name: str) -> Callable[[Any], None]:
    def tune(config: Any) -> None:
        setattr(config.parallel_config, name, 2)

    return tune


def stages_by_ray(config: Any) -> None:
    config.parallel_config.pipeline_parallel_size = 2
    config.parallel_config.distributed_executor_backend = "ray"


def without_prefix_caching(config: Any) -> None:
    config.cache_config.enable_prefix_caching = False
    config.cache_config.mamba_cache_mode = "none"


def averaging(config: Any) -> None:
    from vllm.config import PoolerConfig

    config.model_config.pooler_config = PoolerConfig(seq_pooling_type="MEAN")
    config.cache_config.enable_prefix_caching = False


def states(**changes: Any) -> dict[str, Any]:
    return {"model": layers(state("gdn", **changes), attention())}


# The changes with which an engine is started, and its message.
DECLINED: dict[str, tuple[dict[str, Any], str]] = {
    "pipeline": ({"tune": stages_by_ray}, "pipeline_parallel_size=2 with the executor ray"),
    "a stage without attention": (
        {"model": MODELS["qwen3_next"], "tune": in_stages}, "a pipeline stage has no layer of group",
    ),
    "decode context": (
        {"tune": parallel("decode_context_parallel_size")}, "decode_context_parallel_size=2",
    ),
    "prefill context": (
        {"tune": parallel("prefill_context_parallel_size")}, "prefill_context_parallel_size=2",
    ),
    "states with speculation": (states(num_speculative_blocks=1), "speculative decoding"),
    "a pooler of all tokens": (
        {"tune": averaging}, "vLLM does not support prefix caching for this model",
    ),
    "attention to later tokens": (
        {"model": layers(attention(), attention(non_causal=True))}, "depends on the tokens after it",
    ),
    "states without prefix caching": (
        states(mamba_cache_mode="none") | {"tune": without_prefix_caching}, "prefix caching",
    ),
}  # fmt: skip


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The connector's warnings. vLLM drops the handlers of its loggers when an engine starts."""
    lines: list[str] = []
    monkeypatch.setattr(connector.log, "warning", lambda text, *more: lines.append(text % more))
    return lines


def check_serves(engine: NumbersEngine) -> None:
    """The engine answers, loads nothing, and holds nothing."""
    for _ in range(2):
        name = engine.add(prompt(1, 60), 4)
        engine.until(lambda name=name: name in engine.reasons)  # type: ignore[misc]
        assert engine.answers[name] == answer_to(prompt(1, 60), 4)
        assert not engine.loaded[name]
        engine.core.reset_prefix_cache(reset_connector=True)
    engine.settle()


@pytest.mark.parametrize("what", DECLINED)
def test_an_engine_that_is_declined_starts_and_says_why(
    numbers_of: EngineOf, warnings: list[str], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    changes, why = DECLINED[what]
    changes = dict(changes)
    monkeypatch.setitem(MODELS, "declined", changes.pop("model", MODELS["full"]))
    if "context" in what:
        # A rank has only a part of each block's tokens, but the ranks' pages cover whole blocks.
        monkeypatch.setattr(Rank, "compare", lambda *_: True)
        monkeypatch.setattr(Rank, "write", lambda *_: None)
    check_serves(numbers_of("declined", **changes))
    (line,) = warnings
    assert line.startswith("kvtier: disabled for this engine: ") and why in line


@pytest.mark.parametrize("why", ["states every 16 tokens", "mixes layers"])
def test_declined_groups_do_not_end_the_engine(
    numbers_of: EngineOf, warnings: list[str], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """The configurations themselves are tested with the layouts; here the engine must continue."""

    def refuse(*_: Any) -> None:
        raise Unsupported(why)

    monkeypatch.setattr(layout, "_cached", refuse)
    check_serves(numbers_of("full"))
    (line,) = warnings
    assert why in line


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("open_device", Unsupported),
        ("describe", Unsupported),
        ("describe", KeyError),
        ("describe", TypeError),
    ],
)
def test_a_refusal_by_a_rank_or_the_identity_does_not_end_the_engine(
    numbers_of: EngineOf, warnings: list[str], monkeypatch: pytest.MonkeyPatch, where: str,
    error: type[Exception],
) -> None:  # fmt: skip
    """Pages on a GPU without a usable driver, weights without an identity, and an unknown configuration."""

    def refuse(*_: Any) -> None:
        raise error(f"refused by {where}")

    monkeypatch.setattr(connector, where, refuse)
    check_serves(numbers_of("full"))
    (line,) = warnings
    assert f"refused by {where}" in line


def test_an_engine_that_is_declined_leaves_the_metadata_to_another_connector(
    numbers_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several stages each connector gets all metadata of the one that is used."""
    metadata: list[Any] = []
    monkeypatch.setattr(Neighbour, "offers", {})
    monkeypatch.setattr(Neighbour, "get_handshake_metadata", lambda _: "the neighbour's")
    monkeypatch.setattr(
        Neighbour, "set_xfer_handshake_metadata_pp_aware", lambda _, one: metadata.append(one)
    )
    engine = numbers_of("full", other_connector="Neighbour", tune=stages_by_ray)
    check_serves(engine)
    assert metadata == [{(0, 0): "the neighbour's"}]


def test_no_attention_for_cpus_supports_context_parallelism() -> None:
    """vLLM ends at its start with it. Only the latents of MLA may be divided in prefill."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    attention, mla = (AttentionBackendEnum[name].get_class() for name in ("CPU_ATTN", "CPU_MLA"))
    assert not attention.supports_pcp() and mla.supports_pcp()
    for backend in (attention, mla):
        assert not backend.get_impl_cls().can_return_lse_for_decode


def test_sleep_mode_is_declined_if_the_engine_cannot_announce_it(
    numbers_of: EngineOf, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a version of vLLM with other functions. Without sleep mode such an engine is served."""
    from vllm.v1.executor.abstract import Executor

    monkeypatch.delattr(Executor, "discard")
    assert numbers_of("full").connector._scheduler is not None and not warnings
    check_serves(numbers_of("full", sleeps=True))
    (line,) = warnings
    assert "discards pages in an unknown way" in line


def test_changes_of_weights_are_noticed_though_discards_cannot_be(
    numbers_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.abstract import Executor

    for name in ("collective_rpc", "reset_prefix_cache"):
        monkeypatch.setattr(EngineCore, name, inspect.unwrap(getattr(EngineCore, name)))
    monkeypatch.delattr(Executor, "discard")
    engine = numbers_of("full")
    keys = engine.connector._scheduler._keys
    generations = [keys._generation]
    engine.core.collective_rpc("reload_weights", args=(7,))
    generations.append(keys._generation)
    assert engine.core.reset_prefix_cache()
    generations.append(keys._generation)
    assert len(set(generations)) == 3


def test_an_engine_that_hides_changes_of_weights_is_served_with_a_warning(
    numbers_of: EngineOf, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.engine.core import EngineCore

    monkeypatch.delattr(EngineCore, "reset_prefix_cache")
    assert numbers_of("full").connector._scheduler is not None
    (line,) = warnings
    assert "changes of weights are not noticed" in line and "reset_prefix_cache" in line


def test_an_engine_with_an_unknown_configuration_starts(
    numbers_of: EngineOf, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a version of vLLM without a method that the plugin calls."""
    from vllm.config import SpeculativeConfig

    monkeypatch.delattr(SpeculativeConfig, "uses_draft_kv_cache")
    speculation = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    numbers_of("full", speculative_config=speculation)
    (line,) = warnings
    assert "disabled" in line and "uses_draft_kv_cache" in line
