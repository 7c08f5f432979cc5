"""Fake engines for the tests of a plugin's two sides."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvtier.connection import Connection
from kvtier_vllm.daemon import Reconnect
from support.daemons import BUSY_S, Daemon
from support.fake_engine import FakeEngine


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon on a busy machine is not given up because it answers late."""
    for name in ("keeper", "page_store"):
        monkeypatch.setattr(f"kvtier_plugins.{name}.TIMEOUT_S", BUSY_S)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that wait for the daemon in a thread other than those of the plugin."""
    found: list[str] = []

    def watch(kind: Any, name: str) -> None:
        call = getattr(kind, name)

        def watched(*args: Any) -> Any:
            if not threading.current_thread().name.startswith("kvtier-"):
                found.append(name)
            return call(*args)

        monkeypatch.setattr(kind, name, watched)

    watch(Connection, "wait")
    watch(Connection, "send")
    watch(Reconnect, "wait_first")
    return found


@pytest.fixture
def engine_of() -> Iterator[Callable[..., FakeEngine]]:
    """Makes engines with this daemon, or this socket; closes them at the end."""
    engines = []

    def make(daemon: Daemon | str, *args: Any, **options: Any) -> FakeEngine:
        socket = daemon if isinstance(daemon, str) else daemon.socket
        engines.append(FakeEngine(socket, *args, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
