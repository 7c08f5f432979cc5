"""Fake engines for the tests of a plugin's two sides."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.connection import Connection
from kvtier_daemon.cli.purge import purge
from kvtier_vllm.daemon import Reconnect
from support.daemons import BUSY_S, Daemon, start_daemon
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


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Daemon]]:
    """The daemon of the tests of a module; another one if a test left anything in it, such as memory that an
    engine may still write to."""
    running: list[Daemon] = []

    def clean() -> Daemon:
        if not running or any(running[-1].stats()["tiers"]["warm"]["states"].values()):
            running.append(start_daemon(tmp_path_factory.mktemp("daemon")))
        return running[-1]

    yield clean
    for daemon in running:
        daemon.end()


@pytest.fixture
def shared(served: Callable[[], Daemon]) -> Iterator[Daemon]:
    """Provide a daemon without blocks and sessions: one for all tests of a module that neither stop it nor
    read its sums. A test names it before its engines, which end first."""
    daemon = served()
    yield daemon
    daemon.wait_for(lambda stats: stats["sessions"] == 0)
    purge(everything=True, yes=True, socket=Path(daemon.socket))


@pytest.fixture
def own_daemon(daemon_of: Callable[..., Daemon]) -> Daemon:
    return daemon_of()
