"""Internal errors in background tasks: they are logged and counted, and the daemon continues."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvtier_daemon import app as app_module
from kvtier_daemon.app import App
from kvtier_daemon.catalog import Catalog
from kvtier_daemon.catalog.segment_frames import SegmentFrames
from kvtier_daemon.config.schema import LoadedConfig
from kvtier_daemon.observing.status import StatusFigures
from kvtier_daemon.serving.recorder import Recorder
from kvtier_daemon.serving.server import Server
from kvtier_daemon.tiers.cold import lifecycle
from kvtier_daemon.tiers.cold.mover import Mover
from kvtier_daemon.tiers.cold.read_queue import PendingRequests
from support.apps import served


def planted(*_: Any, **__: Any) -> None:
    raise RuntimeError("planted")


@pytest.mark.parametrize(
    "owner, name",
    [(Catalog, "expire_leases"), (Server, "check_clients"), (PendingRequests, "expire")],
)
def test_a_failing_periodic_task_is_logged_and_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    owner: type, name: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(app_module, "TEND_S", 0.01)

    async def work(app: App) -> None:
        assert app._server is not None and app.lower.tier is not None
        monkeypatch.setattr(owner, name, planted)
        while app._server.failures["internal"] < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert app.lower.tier.directories.given_up == (owner is PendingRequests), (
            "what can't be looked after is off"
        )
        monkeypatch.undo()

    served(tmp_path, work)
    assert caplog.text.count("logged once for each cause") == 1
    assert "planted" in caplog.text, "with where it happened"


def test_a_stop_that_can_start_no_thread_still_writes_what_is_only_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(app: App) -> None:
        monkeypatch.setattr(faulthandler, "dump_traceback_later", planted)

    caplog.set_level(logging.INFO)
    served(tmp_path, work)
    assert "before the stop, nothing was written" in caplog.text


@pytest.mark.parametrize("owner, name", [(Catalog, "expire_leases"), (Mover, "tend")])
def test_a_periodic_task_that_fails_for_one_tenant_runs_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    owner: type, name: str,
) -> None:  # fmt: skip
    """A second failure of the same task is logged too."""
    monkeypatch.setattr(app_module, "TEND_S", 0.01)
    calls = Counter[str]()

    async def work(app: App) -> None:
        assert app._server is not None and app.lower.tier is not None

        def fails(self: Any, *_: Any) -> None:
            tenant = app.tenants["first"]
            if self in (tenant.catalog, tenant.tier):
                calls["first"] += 1
                if calls["first"] > 3:
                    raise ValueError("another")
                planted()
            calls["second"] += 1

        monkeypatch.setattr(owner, name, fails)
        async with asyncio.timeout(60):
            while calls["first"] < 6:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert calls["second"] >= 5
        assert not app.lower.tier.directories.given_up
        monkeypatch.undo()

    tenants = "".join(
        f'[tenants.{name}]\nuids = [{uid}]\nquota = "50%"\n'
        for name, uid in (("first", 0), ("second", 65534))
    )
    served(tmp_path, work, tenants)
    assert caplog.text.count("logged once for each cause") == 2
    assert "planted" in caplog.text and "another" in caplog.text


def test_a_failing_reload_or_status_line_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(app_module, "TELL_S", 0.01)

    async def work(app: App) -> None:
        assert app._server is not None
        monkeypatch.setattr(StatusFigures, "line", planted)
        while not app._server.failures["internal"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        monkeypatch.undo()
        before = app._server.failures["internal"]
        monkeypatch.setattr(LoadedConfig, "again", planted)
        os.kill(os.getpid(), signal.SIGHUP)
        while app._server.failures["internal"] == before:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        monkeypatch.undo()
        assert (await app.settings("reload"))["changes"] == []

    served(tmp_path, work)
    assert "reload refused, the previous configuration stays in force: planted" in caplog.text


def test_memory_whose_mapping_failed_is_mapped_for_the_next_cold_tier(
    tmp_path: Path,
) -> None:
    async def work(app: App) -> None:
        assert app.lower.extents is not None
        while not app.warm.complete:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        app.lower.extents.failed = True
        await app.tier("cold", "off")
        while (await app.tier("cold", "status"))["state"] != "off":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await app.tier("cold", "on")
        while (await app.tier("cold", "status"))["state"] != "on":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        (tenant,) = app.tenants.values()
        assert len(tenant.tier.extents) == len(app.warm.extents) > 0

    served(tmp_path, work)


def test_a_failure_to_record_uses_of_one_tenant_does_not_affect_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a failure used to disable the cold tier for all tenants."""
    monkeypatch.setattr(lifecycle, "ACCESS_LOG_S", 0.01)
    calls = Counter[str]()

    async def work(app: App) -> None:
        assert app.lower.tier is not None

        def fails(self: Any, _: int) -> bytes:
            if self is app.tenants["first"].catalog.segments:
                calls["first"] += 1
                planted()
            calls["second"] += 1
            return b""

        monkeypatch.setattr(SegmentFrames, "take_used", fails)
        async with asyncio.timeout(60):
            while calls["first"] < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert calls["second"] >= 2
        assert not app.lower.tier.directories.given_up and app.lower.tier.reader.is_on
        monkeypatch.undo()

    tenants = "".join(
        f'[tenants.{name}]\nuids = [{uid}]\nquota = "50%"\n'
        for name, uid in (("first", 0), ("second", 65534))
    )
    served(tmp_path, work, tenants)
    assert "internal error in periodic work (access log of tenant first)" in caplog.text


def test_a_failing_callback_of_the_event_loop_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(app: App) -> None:
        asyncio.get_running_loop().call_soon(planted)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert app._server is not None
        assert app._server.failures["internal"] == 1

    served(tmp_path, work)
    assert "planted" in caplog.text


def test_a_failing_recorder_reports_it_and_can_begin_another_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        recorder = Recorder(tmp_path, asyncio.get_running_loop().time)
        running = asyncio.create_task(recorder.run())
        with monkeypatch.context() as broken:
            broken.setattr(Recorder, "_add_line", planted)
            recorder.start(1 << 20)
            recorder.looked_up("t", 1, 16, bytes(64))
            async with asyncio.timeout(60):
                while recorder.stats()["writing"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        assert "planted" in recorder.stats()["failure"]
        assert not recorder.is_on
        recorder.looked_up("t", 1, 16, bytes(64))
        recorder.start(1 << 20)
        recorder.looked_up("t", 1, 16, bytes(64))
        recorder.stop()
        async with asyncio.timeout(60):
            while recorder.stats()["writing"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        stats = recorder.stats()
        assert (stats["failure"], stats["requests"]) == ("", 1)
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(work())
    assert "planted" in caplog.text


@pytest.mark.parametrize("error", [RuntimeError("planted"), OSError(28, "planted")])
def test_a_recorder_that_fails_at_the_end_does_not_prevent_the_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def work() -> None:
        recorder = Recorder(tmp_path, asyncio.get_running_loop().time)
        running = asyncio.create_task(recorder.run())
        recorder.start(1 << 20)
        await asyncio.sleep(0.05)

        async def fails(*_: Any) -> None:
            raise error

        monkeypatch.setattr(Recorder, "_flush", fails)
        running.cancel()
        done, _ = await asyncio.wait([running], timeout=30)
        assert done and running.cancelled()
        assert "planted" in recorder.stats()["failure"]

    asyncio.run(work())
