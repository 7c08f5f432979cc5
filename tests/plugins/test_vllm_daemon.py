"""The plugin's connection to the daemon."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import kvtier
from kvtier_vllm import daemon as plugin_daemon
from kvtier_vllm.daemon import Reconnect
from support.daemons import Daemon
from support.faulty_store import FaultyStore
from support.kept import end, folder, start
from support.specs import spec_of

__all__ = ["folder"]  # a fixture


def test_a_lost_session_is_closed_if_no_new_one_is_made(
    shared_daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plugin may stop before the thread that would reconnect runs."""
    line = Reconnect(shared_daemon.socket, spec_of("line"), "line", populate=False)
    session = line.wait_first()
    assert session is not None
    with monkeypatch.context() as late:
        late.setattr(line, "retry_now", lambda: None)
        line.lost(session, "for this test")
    line.close()
    line._thread.join(60)
    assert session.client.fileno() == -1


def until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"still not so after {seconds} s"
        time.sleep(0.01)


def test_a_daemon_with_a_store_and_no_other_tier_is_connected_to(
    daemon_of: Callable[..., Daemon], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names its tiers, of which not each has a size."""
    caplog.set_level(logging.INFO, "vllm.kvtier")
    with FaultyStore(tmp_path) as store:
        daemon = daemon_of(folder=tmp_path / "it", config=store.config)
        line = Reconnect(daemon.socket, spec_of("line"), "line", populate=False)
        assert line.wait_first() is not None
        until(lambda: "tenant default, warm 4 MiB, remote; this model" in caplog.text)
        line.close()
        line._thread.join(60)
        assert not daemon.stop()


def test_an_idle_connection_notices_the_end_of_the_daemon_and_reconnects(
    daemon_of: Callable[..., Daemon], tmp_path: Path
) -> None:
    """No request is sent meanwhile, as in an idle engine."""
    daemon = daemon_of(folder=tmp_path)
    line = Reconnect(daemon.socket, spec_of("line"), "line", populate=False)
    session = line.wait_first()
    assert session is not None
    for way in (Daemon.stop, lambda daemon: daemon.process.kill()):
        before = line.session
        way(daemon)
        until(lambda before=before: line.session is not before)  # type: ignore[misc]
        daemon = daemon_of(folder=tmp_path)
        until(lambda: line.session is not None)
    assert session.client.fileno() == -1
    line.close()
    line._thread.join(60)
    assert not line._thread.is_alive()


def test_a_rank_keeps_its_mappings_if_the_daemon_keeps_its_memory(folder: Path) -> None:
    daemon = start(folder)
    line = Reconnect(daemon.socket, spec_of("line"), "rank", populate=True)
    session = line.wait_first()
    assert session is not None
    mapped = list(session.reader.mappings)  # as a rank holds the reader until it has another one
    end(daemon, signal.SIGKILL)
    daemon = start(folder)
    until(lambda: line.session not in (None, session))
    assert line.session is not None and list(line.session.reader.mappings) == mapped
    assert line.session.reader.daemon_run != session.reader.daemon_run
    line.close()
    daemon.stop()


def test_a_populating_connection_maps_new_extents_while_it_is_idle(
    daemon_of: Callable[..., Daemon], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank connects to a daemon that still allocates memory: its first load must find all extents
    mapped."""
    monkeypatch.setattr(plugin_daemon, "PING_S", 0.01)
    daemon = daemon_of(
        folder=tmp_path, config='[warm]\nsize = "64MiB"\nextent = "4MiB"\n', wait=False
    )
    line = Reconnect(daemon.socket, spec_of("line"), "line", populate=True)
    session = line.wait_first()
    assert session is not None
    until(lambda: session.reader.extents == 16)
    line.close()


def test_a_new_connection_logs_the_daemon_and_its_memory(
    daemon_of: Callable[..., Daemon], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line per engine: the ranks log nothing."""
    daemon = daemon_of(folder=tmp_path)
    spec = spec_of("line")
    with daemon.connect() as client:
        for other in ("another", "line"):
            space = client.open(spec_of(other))
            keys = space.keys(list(range(5 * space.spec.block_tokens)))
            space.save(keys, bytes(5 * space.block_bytes))
        assert space.kept() == (5, 0)
        assert client.open(spec_of("nothing")).kept() == (0, 0)
    with caplog.at_level(logging.INFO, "vllm.kvtier"):
        for populate in (False, True):
            line = Reconnect(daemon.socket, spec, "line", populate=populate)
            assert line.wait_first() is not None
            line.close()
            line._thread.join(60)
    (message,) = [one.getMessage() for one in caplog.records]
    assert f"connected to kvtier {kvtier.__version__} at {daemon.socket}, tenant default" in message
    assert "warm 4 MiB" in message
    assert "has 5 blocks in memory and 0 on disk" in message
