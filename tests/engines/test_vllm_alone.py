"""An engine without a daemon, or with invalid options: its behaviour and its messages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.daemons import Daemon
from support.effort import ALL
from support.prompts import BLOCK, check_same, prompt

PROMPTS = [prompt(seed) for seed in range(3)]


def warned(engine: Any) -> list[str]:
    """The plugin's warnings in the log."""
    lines = engine.log.read_text().splitlines()
    return [line for line in lines if "kvtier: " in line and "WARNING" in line]


def test_without_a_daemon_the_engine_works_and_warns_once(
    engine_of: Callable[..., Any], daemon_of: Callable[..., Daemon], tmp_path: Path
) -> None:
    """The connector is found by its name, through vLLM's plugins, as users configure it. A daemon that
    starts later is used."""
    engine = engine_of(
        "llama", str(tmp_path / "kvtier.sock"), connector="KvtierConnector", spawned=ALL
    )
    right = [engine.generate([one])[0] for one in PROMPTS]
    engine.reset()
    for one, other in zip(engine.generate(PROMPTS), right, strict=True):
        check_same(one, other)
        assert one["cached"] == 0
    (warning,) = warned(engine)
    assert "continuing without the daemon" in warning and "no daemon" in warning
    daemon_of(folder=tmp_path, warm="64MiB")
    for _ in range(200):
        engine.reset()
        again = engine.generate(PROMPTS)
        if all(one["cached"] == 10 * BLOCK for one in again):
            break
    for one, other in zip(again, right, strict=True):
        check_same(one, other)
        assert one["cached"] == 10 * BLOCK
    _, back = warned(engine)
    assert "connected to the daemon" in back


def test_an_invalid_option_is_reported_in_one_line(
    engine_of: Callable[..., Any], shared_daemon: Daemon
) -> None:
    with pytest.raises(AssertionError) as error:
        engine_of("llama", shared_daemon.socket, extra={"patience": 5})
    lines = [line for line in str(error.value).splitlines() if "kvtier has no option" in line]
    assert "'patience': did you mean 'patience_ms'?" in lines[-1]


def test_an_idle_engine_reconnects_after_a_restart_of_the_daemon(
    engine_of: Callable[..., Any], daemon_of: Callable[..., Daemon], tmp_path: Path
) -> None:
    """Its first request is a hit from the disk: scheduler and rank have reconnected without a request."""
    (tmp_path / "cold").mkdir()
    config = (
        f'[warm]\nsize = "32MiB"\n[cold]\ndirectories = ["{tmp_path / "cold"}"]\n'
        'size = "256MiB"\nwrite = "through"\n'
    )
    daemon = daemon_of(folder=tmp_path, config=config)
    engine = engine_of(
        "llama", daemon.socket, extra={"patience_ms": 20_000}, connector="KvtierConnector"
    )
    right = engine.generate(PROMPTS)
    daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] >= 10 * len(PROMPTS), 60.0)
    engine.reset()
    daemon.stop()
    daemon = daemon_of(folder=tmp_path, config=config)
    daemon.wait_for(lambda stats: stats["sessions"] == 2, 60.0)
    (first,) = engine.generate(PROMPTS[:1])
    check_same(first, right[0])
    assert first["cached"] == 10 * BLOCK
