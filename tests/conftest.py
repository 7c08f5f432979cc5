"""Fixtures: real daemons, stopped at the end."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from daemons import Daemon, start_daemon
from fake_cuda import FakeCuda, build, toolkit


@pytest.fixture
def daemon_of(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Starts daemons, each in a folder of its own unless told; stops them at the end."""
    running: list[Daemon] = []

    def start(**options: Any) -> Daemon:
        folder = options.pop("folder", None) or tmp_path / f"daemon-{len(running)}"
        folder.mkdir(exist_ok=True)
        running.append(start_daemon(folder, **options))
        return running[-1]

    yield start
    for daemon in running:
        daemon.stop()
        assert "Traceback" not in daemon.log.read_text(), daemon.log.read_text()


@pytest.fixture(scope="module")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for the tests of a module that leave nothing behind."""
    daemon = start_daemon(tmp_path_factory.mktemp("daemon"))
    yield daemon
    daemon.stop()
    assert "Traceback" not in daemon.log.read_text(), daemon.log.read_text()


@pytest.fixture(scope="session")
def cuda_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if toolkit() is None:
        pytest.skip("no cuda.h: NOTHING OF CUDA IS TESTED HERE")
    return build(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def fake_cuda(cuda_library: Path) -> Iterator[FakeCuda]:
    """A CUDA driver without a device. Nothing is left of it at the end, and nothing went astray."""
    fake = FakeCuda(cuda_library)
    yield fake
    fake.hold(False)
    gc.collect()
    broken, left = fake.broken, fake.live()
    fake.forget()
    assert not broken
    assert not any(left.values()), left
