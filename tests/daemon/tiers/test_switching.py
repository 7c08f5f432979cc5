"""Errors while the cold tier is switched: the tier is off with a reason, and can be switched on again."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

from kvtier import Client
from kvtier.errors import TierError
from kvtier_daemon import app as app_module
from kvtier_daemon import shutdown
from kvtier_daemon.app import App
from kvtier_daemon.catalog.segment_frames import SegmentFrames
from kvtier_daemon.observing.health import health
from kvtier_daemon.tiers.cold import attached, lifecycle
from kvtier_daemon.tiers.cold.attached import AttachedDirectories, StoreOptions, open_directory
from kvtier_daemon.tiers.cold.directory import ColdDirectory
from kvtier_daemon.tiers.cold.lifecycle import ColdLifecycle
from kvtier_daemon.tiers.cold.mover import Mover
from kvtier_daemon.tiers.cold.scrub import Scrubber
from kvtier_daemon.tiers.cold.tier import BlockWriter, ColdTier
from support.apps import served
from support.specs import pattern, spec_of


async def reached(app: App, state: str) -> dict[str, Any]:
    """The status of the cold tier when it has reached this state."""
    async with asyncio.timeout(60):
        while (told := await app.tier("cold", "status"))["state"] != state:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return told


async def well(app: App) -> None:
    """Wait until the memory is allocated and the health text is `ok`."""
    async with asyncio.timeout(60):
        while health(app._figures.of(None)).text != "ok":  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def switched(app: App, order: str, state: str) -> dict[str, Any]:
    await app.tier("cold", order)
    return await reached(app, state)


def test_the_event_loop_runs_while_a_slow_disk_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> ColdDirectory:
        begun.set()
        assert goes_on.wait(60), "the loop waits for the disk"
        return open_directory(*arguments)

    async def work(app: App) -> None:
        await switched(app, "off", "off")
        monkeypatch.setattr(lifecycle, "open_directory", slow)
        await switched(app, "on", "opening")
        while not begun.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for order in ("on", "off", "drain"):
            with pytest.raises(TierError, match="is opening"):
                await app.tier("cold", order)
        goes_on.set()
        await reached(app, "on")

    served(tmp_path, work)


@pytest.mark.parametrize("where", ["open", "drive", "use"])
@pytest.mark.parametrize("error", [TierError("cold: planted"), RuntimeError("planted")])
def test_a_cold_tier_that_can_not_be_switched_on_is_off_and_can_be_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: Exception
) -> None:
    def fails(*_: Any) -> Any:
        raise error

    async def work(app: App) -> None:
        await well(app)
        await switched(app, "off", "off")
        with monkeypatch.context() as broken:
            places: dict[str, tuple[object, str]] = {
                "open": (lifecycle, "open_directory"),
                "drive": (attached, "DirectoryDisk"),
                "use": (Scrubber, "__init__"),
            }
            broken.setattr(*places[where], fails)
            told = await app.tier("cold", "on")
            assert told["state"] == "opening" and not told["failure"]
            told = await reached(app, "off")
        assert "planted" in told["failure"]
        cold = app._figures.of(None)["tiers"]["cold"]
        assert "switching it on failed" in cold["failure"] and cold["state"] == "off"
        assert "switching it on failed" in health(app._figures.of(None)).text
        assert not (await switched(app, "on", "on"))["failure"]
        assert app.lower.tier is not None and app.lower.tier.writer.is_on
        await well(app)

    served(tmp_path, work)


@pytest.mark.parametrize(
    "broken", [(SegmentFrames, "drop_segment"), (Mover, "__init__"), (Scrubber, "__init__")]
)
def test_a_failed_switch_does_not_confuse_segments_of_two_tiers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: tuple[type, str]
) -> None:
    """Requests while the tier is off are recorded with the segment numbers of the previous tier."""

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("planted")

    def loaded(count: int) -> int:
        with Client.connect(str(tmp_path / "s")) as client:
            space = client.open(spec_of("taken"))
            keys = space.keys(list(range(count * 16)))
            if not space.match(keys).ready:
                space.save(keys, [pattern(key, space.spec.block_bytes) for key in keys])
            with space.load(keys) as blocks:
                assert all(
                    bytes(block) == pattern(key, space.spec.block_bytes)
                    for key, block in zip(keys, blocks, strict=True)
                )
                return len(blocks)

    async def work(app: App) -> None:
        await well(app)
        assert await asyncio.to_thread(loaded, 20) == 20
        await app.tier("warm", "drain")
        while (await app.tier("warm", "status"))["state"] != "drained":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await switched(app, "off", "off")
        before = app.lower.tier
        assert await asyncio.to_thread(loaded, 20) == 20  # wanted, for the first time
        with monkeypatch.context() as planted:
            planted.setattr(*broken, fails)
            await app.tier("cold", "on")
            told = await reached(app, "off")
        assert told["failure"] == "internal error: RuntimeError('planted'); see the daemon's log"
        assert app.lower.tier is before and not app._figures.of(None)["failures"]["internal"]
        assert not (await switched(app, "on", "on"))["failure"]
        assert app._figures.of(None)["tiers"]["cold"]["blocks"] == 20
        await well(app)

    served(tmp_path, work)


def test_counters_survive_switching_the_tier_off(tmp_path: Path) -> None:
    """A monitoring system takes a counter that decreases for a restart."""

    async def work(app: App) -> None:
        await well(app)
        assert app.lower.tier is not None
        coding = app.lower.tier.coding
        coding.failures, coding.staging.waited, coding.staging.refused = 4, 3, 2
        app.lower.tier.directories.attached[0].disk.writes.faults = 5
        for _ in range(2):
            await switched(app, "off", "off")
            await switched(app, "on", "on")
        told = app._figures.of(None)["tiers"]["cold"]
        counts = [told["coding"][name] for name in ("failures", "waited", "refused")]
        assert (counts, told["faults"]) == ([4, 3, 2], 5)

    served(tmp_path, work)


def mapped() -> int:
    """The number of mappings of daemon memory in this process."""
    return Path("/proc/self/maps").read_text().count("memfd:kvtier")


async def unmapped(most: int) -> None:
    """Wait until there are at most `most` mappings. Another thread may hold the last reference to one."""
    async with asyncio.timeout(60):
        while mapped() > most:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def test_a_tier_that_is_off_unmaps_the_arena_without_garbage_collection(
    tmp_path: Path,
) -> None:
    """Unmapping takes a tenth of a second per GiB, so it must not run in the event loop."""

    async def work(app: App) -> None:
        await well(app)
        assert app.lower.tier is not None
        app.lower.tier.memory.allocate(1 << 20)
        used, first = mapped(), weakref.ref(app.lower.tier)
        gc.disable()
        try:
            await switched(app, "off", "off")
            away = used - len(app.warm.extents) - 2  # its own page and the staging
            await unmapped(away)
            await switched(app, "on", "on")
            await switched(app, "off", "off")
            await unmapped(away)
            await switched(app, "on", "on")
        finally:
            gc.enable()
        gc.collect()
        assert first() is None, "the tier is still referenced"

    served(tmp_path, work)


def test_a_drain_reports_blocks_that_stay_only_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(count: int) -> None:
        with Client.connect(str(tmp_path / "s")) as client:
            space = client.open(spec_of("large"))
            keys = space.keys(list(range(count * 16)))
            space.save(keys, [pattern(key, space.spec.block_bytes) for key in keys])

    async def work(app: App) -> None:
        await well(app)
        monkeypatch.setattr(BlockWriter, "fits", lambda *_: False)
        await asyncio.to_thread(save, 20)
        await app.tier("warm", "drain")
        while (told := await app.tier("warm", "status"))["state"] != "drained":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert told["failure"].startswith("20 blocks stay only in memory: they are larger than a")
        monkeypatch.undo()
        await app.tier("warm", "on")
        await app.tier("warm", "drain")
        while (told := await app.tier("warm", "status"))["state"] != "drained":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not told["failure"] and not told["left_blocks"]

    served(tmp_path, work)


def test_a_drained_tier_is_not_closed_while_it_is_recovered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = asyncio.Event()
    recover = AttachedDirectories.recover

    async def slow(*arguments: Any) -> None:
        await goes_on.wait()
        await recover(*arguments)

    async def work(app: App) -> None:
        await switched(app, "off", "off")
        monkeypatch.setattr(AttachedDirectories, "recover", slow)
        await switched(app, "on", "recovering")
        await switched(app, "drain", "drained")
        with pytest.raises(TierError, match="still reading"):
            await app.tier("cold", "off")
        goes_on.set()
        assert app.lower.tier is not None
        await app.lower.tier.recovery.complete.wait()
        await switched(app, "off", "off")

    served(tmp_path, work)


def test_an_index_that_can_not_be_closed_does_not_delay_the_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing its files may wait for the disk, and has no time limit."""
    mended = threading.Event()
    ended: list[bool] = []

    def hangs(_: ColdDirectory, __: float) -> bool:
        ended.append(mended.wait(60))
        return ended[-1]

    async def work() -> None:
        volumes = [open_directory(tmp_path, 48 << 20)]
        tier = ColdTier(
            asyncio.get_running_loop(),
            volumes,
            StoreOptions(64 << 20, 1 << 20, {"t": 1.0}),
            lambda *_: None,
        )
        with monkeypatch.context() as broken:
            broken.setattr(ColdDirectory, "close", hangs)
            broken.setattr(attached, "INDEX_S", 0.05)
            assert not await tier.close(0.1)
            assert not ended, "the close waited for the index"
            mended.set()
        assert all(volume.close() for volume in volumes)

    asyncio.run(work())


def test_a_start_extends_its_timeout_while_a_disk_is_opened_but_not_while_memory_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon serves clients while memory is allocated, whatever the size."""
    monkeypatch.setattr(app_module, "START_S", 0.1)
    # A slow machine could otherwise start before it sent three requests.
    monkeypatch.setattr(lifecycle, "OPEN_S", 60.0)
    told: list[str] = []
    heard: list[str] = []

    def listen() -> None:  # reads continuously: a full socket queue drops messages
        while text := manager.recv(4096):
            told.append(text.decode())

    def slow(*arguments: Any) -> ColdDirectory:
        until = time.monotonic() + 60
        while len(told) < 3:
            assert time.monotonic() < until, "the start requested no more time"
            time.sleep(0.01)
        return open_directory(*arguments)

    async def work(app: App) -> None:
        async with asyncio.timeout(60):
            while not app.warm.complete or "warm tier" not in told[-1]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        heard.extend(told)

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "manager"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "manager"))
        monkeypatch.setattr(lifecycle, "open_directory", slow)
        listening = threading.Thread(target=listen)
        listening.start()
        try:
            served(tmp_path, work)
        finally:
            manager.sendto(b"", str(tmp_path / "manager"))
            listening.join(60)
    assert heard[:3] == ["EXTEND_TIMEOUT_USEC=100000"] * 3
    ready = next(at for at, text in enumerate(heard) if text.startswith("READY=1"))
    assert not any("warm tier" in text for text in heard[:ready])
    assert any("warm tier" in text for text in heard[ready:])
    assert not any("EXTEND" in text for text in heard[ready:])


def test_the_event_loop_runs_while_the_service_manager_changes_the_main_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back, goes_on = threading.Event(), threading.Event()

    class StandIn:
        def __init__(self) -> None:
            self.ended, self._held = os.pipe()

        def give_back(self) -> None:
            given_back.set()
            assert goes_on.wait(60), "the event loop waits for the service manager"
            os.close(self.ended)
            os.close(self._held)

    async def work(app: App) -> None:
        with monkeypatch.context() as hanging:
            hanging.setattr(ColdLifecycle, "hangs", True)
            while app._stand_in is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        while not given_back.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        goes_on.set()

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setattr(shutdown, "StandIn", StandIn)
        served(tmp_path, work)
