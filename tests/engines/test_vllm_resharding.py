"""vLLM engines with four tensor-parallel ranks and with two, on hosts of their own, load each other's blocks.
Each byte of every page of every rank is compared before a step reads it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.daemons import Daemon
from support.object_store import ObjectStore, remote_of
from support.prompts import BLOCK as TOKENS
from support.prompts import LONG, check_same, prompt

pytest.importorskip("vllm.v1.engine.core", reason="needs vLLM: make test-engines")
pytestmark = pytest.mark.filterwarnings("ignore")

import vllm.v1.attention.backends.cpu_attn  # noqa: E402, F401  # it tells the order of pages

from kvtier_vllm.forecast import Forecast  # noqa: E402
from support.numbers_engine import BLOCK, NumbersEngine, in_tensor_ranks  # noqa: E402

WAIT_S = 60.0
Hosts = Callable[..., Daemon]


def hosts_of(folder: Path, daemon_of: Hosts, store: ObjectStore) -> list[Daemon]:
    daemons = []
    for name in ("a", "b"):
        secrets = folder / name / "state" / "secrets"
        secrets.mkdir(parents=True, mode=0o700)
        (secrets / "default").write_bytes(bytes(32))
        (secrets / "default").chmod(0o600)
        more = 'reshard = true\nwrite = "all"\n'
        config = store.config(more=more).replace('"fleet"', f'"{folder.name}"')
        daemons.append(daemon_of(folder=folder / name, config=config))
        daemons[-1].wait_for(lambda stats: remote_of(stats)["on"])
    return daemons


@pytest.fixture
def slow_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of numbers compute in no time: tell plugin and daemon that it takes a second a token."""
    monkeypatch.setattr(Forecast, "prefill", property(lambda self: (1.0, 0.0)))
    monkeypatch.setattr(Forecast, "recompute_s", lambda self, tokens, before: float(tokens))


@pytest.mark.parametrize("model", ["four heads", "four heads, window"])
@pytest.mark.parametrize(("theirs", "ours"), [(4, 2), (2, 4)])
def test_ranks_load_the_heads_that_other_ranks_saved(
    slow_computing: None,
    tmp_path: Path,
    daemon_of: Hosts,
    store: ObjectStore,
    model: str,
    theirs: int,
    ours: int,
) -> None:
    engines = list[NumbersEngine]()
    daemons = hosts_of(tmp_path, daemon_of, store)
    try:
        for daemon, ranks in zip(daemons, (theirs, ours), strict=True):
            engines.append(
                NumbersEngine(
                    model, tmp_path / "model", daemon.socket, extra={"weights": str(tmp_path)},
                    tune=in_tensor_ranks(ranks),
                )
            )  # fmt: skip
        (a, b), (first, second) = daemons, engines
        question = prompt(1, 8 * BLOCK + 3)
        assert first.run(question) == [0]
        window = theirs if "window" in model else 0
        wanted = 8 * theirs + (8 * window)
        a.wait_for(lambda stats: remote_of(stats)["states"]["written"] >= wanted)
        # The first requests let the host find out what the store has.
        loaded, until = 0, time.monotonic() + WAIT_S
        probe = 100
        while remote_of(b.stats())["siblings"] == 0:
            assert time.monotonic() < until
            second.run(prompt(probe, 2 * BLOCK + 3))
            probe += 1
        b.wait_for(lambda stats: remote_of(stats)["asking"] == 0)
        (loaded,) = second.run(question)
        shown = remote_of(b.stats())
        found = [shown[name] for name in ("states", "loads", "known_objects", "siblings")]
        assert loaded == 8 * BLOCK, str((found, second.connector._scheduler.counts))
        compared = [rank.compared for rank in second.core.model_executor.ranks]
        assert min(compared) > 0 and len(compared) == ours
        assert not second.rank.wrong
        assert remote_of(b.stats())["states"]["resharded"] > 0
    finally:
        for engine in engines:
            engine.close()


@pytest.mark.slow
def test_an_engine_without_ranks_continues_the_prompt_that_two_ranks_computed(
    tmp_path: Path, daemon_of: Hosts, store: ObjectStore, engine_of: Callable[..., Any]
) -> None:
    """Real engines with a real model: the answers are close, as those of both without a cache are."""
    a, b = hosts_of(tmp_path, daemon_of, store)
    first = engine_of("llama", a.socket, tensor_parallel_size=2, spawned=True)
    (computed,) = first.generate([prompt(1)])
    blocks = LONG // TOKENS
    a.wait_for(lambda stats: remote_of(stats)["states"]["written"] >= 2 * blocks)
    second = engine_of("llama", b.socket, connector="PatientConnector")
    until, seed = time.monotonic() + WAIT_S, 100
    while remote_of(b.stats())["siblings"] == 0:
        assert time.monotonic() < until
        second.generate([prompt(seed)])
        seed += 1
    b.wait_for(lambda stats: remote_of(stats)["asking"] == 0)
    (answer,) = second.generate([prompt(1)])
    assert remote_of(b.stats())["states"]["resharded"] == blocks
    assert answer["cached"] == blocks * TOKENS
    check_same(answer, computed)
