"""Fake engines for the tests of a plugin's two sides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.daemons import Daemon
from support.fake_engine import FakeEngine


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
