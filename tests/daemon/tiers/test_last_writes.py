"""A stop writes the blocks that are only in memory, the newest first, within its time."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
from array import array
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from daemon.tiers.test_writing import ME, SLOTS, Desk, desk_in, keys
from kvtier import Client, Unavailable
from kvtier_daemon.app import App
from kvtier_daemon.tiers.cold import last_writes
from kvtier_daemon.tiers.cold.directory import ColdDirectory
from kvtier_daemon.tiers.cold.flusher import WRITES_AT_ONCE
from kvtier_daemon.tiers.cold.last_writes import LastWrites
from kvtier_daemon.tiers.cold.segment_files import LEAST_SEGMENTS
from kvtier_daemon.tiers.cold.segment_log import Segment
from kvtier_daemon.tiers.cold.segment_store import SegmentStore
from support.apps import served
from support.cold_bench import BLOCK, SEGMENT, SPACE, SPEC, Bench, key, run


def last_writes_of(desk: Desk) -> LastWrites:
    tenants = {"t": SimpleNamespace(catalog=desk.catalog)}
    return LastWrites(desk.bench.tier, tenants, {"t": desk.mover})  # type: ignore[arg-type]


def ignore(progress: str) -> None:
    pass


def on_disk(desk: Desk, first: int, count: int) -> int:
    store = desk.catalog.blocks.store
    ids = store.resident(desk.space.index, keys(first, count))
    return count - len(array("I", store.dirty(ids)))


async def saved_only_in_memory(app: App, count: int) -> None:
    """Save blocks; the tier does not learn of them."""
    async with asyncio.timeout(60):
        while not app.warm.complete:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    (tenant,) = app.tenants.values()
    space = tenant.catalog.spaces.open(SPACE, SPEC, ME)
    granted = tenant.catalog.reserve(ME, space, 0, 0, b"", keys(0, count))
    tenant.catalog.commit(ME, granted.lease, 0, count, b"")


def test_a_stop_keeps_what_is_only_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(app: App) -> None:
        await saved_only_in_memory(app, 8)

    with caplog.at_level(logging.INFO):
        served(tmp_path, work)
    assert "kept 8 blocks, lost 0" in caplog.text


def test_a_stop_writes_nothing_if_the_configuration_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(app: App) -> None:
        app.lower.order("cold", "drain")
        await saved_only_in_memory(app, 8)

    served(tmp_path, work, "stop_s = 0\n")
    assert "kept 0 blocks, lost 8: cold.stop_s is 0" in caplog.text


def test_a_stop_says_why_blocks_are_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work(app: App) -> None:
        app.lower.order("cold", "drain")
        await saved_only_in_memory(app, 8)

    served(tmp_path, work)
    assert "kept 0 blocks, lost 8: the disks do not accept writes (drained)" in caplog.text


def test_a_stop_sends_clients_away_and_a_second_signal_ends_its_writes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(str(tmp_path / "notify"))
    manager.settimeout(60)
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))

    def told() -> str:
        while "STATUS=writing" not in (text := manager.recv(4096).decode()):
            pass
        return text + manager.recv(4096).decode()

    async def work(app: App) -> None:
        connected = partial(Client.connect, app.config.socket, populate=False)
        with await asyncio.to_thread(connected) as before:
            app.lower.tier.writer.may_write = lambda: False  # type: ignore[union-attr]
            await saved_only_in_memory(app, 8)
            os.kill(os.getpid(), signal.SIGTERM)
            text = await asyncio.to_thread(told)
            assert "STOPPING=1" in text and "STATUS=writing 8 blocks" in text
            assert f"EXTEND_TIMEOUT_USEC={25_000_000}" in text
            for connect in (before.ping, connected):
                with pytest.raises(Unavailable, match="told to stop"):
                    await asyncio.to_thread(connect)

    with manager:
        served(tmp_path, work)  # sends the signal again
    assert "kept 0 blocks, lost 8: the daemon was told to end at once" in caplog.text


def test_the_time_for_the_last_writes_is_limited(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        desk = await desk_in(tmp_path)
        monkeypatch.setattr(desk.bench.tier.writer, "may_write", lambda: False)
        desk.save(100, 8)
        await last_writes_of(desk).run(0.05, "lost", ignore)  # type: ignore[arg-type]
        monkeypatch.setattr(last_writes, "STALLS_S", 0.05)
        await last_writes_of(desk).run(60, "left in memory", ignore)
        await desk.end()

    run(work())
    assert "kept 0 blocks, lost 8: the 0.05 s of cold.stop_s are over" in caplog.text
    assert "kept 0 blocks, left in memory 8: no block was written" in caplog.text


def test_the_newest_blocks_are_kept_if_the_disk_has_no_room_for_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        bench = Bench([tmp_path], share=0.18)
        await bench.recover()
        desk = Desk(bench, through=True)
        bench.tier.writer.accepts = False
        for first in range(0, SLOTS, 8):
            desk.save(1000 * first, 8)
        bench.tier.writer.accepts = True
        desk.mover.writes._saved.clear()
        files = bench.first.stores["t"].files
        room = (files.most_bytes - last_writes.SPARE_SEGMENTS * SEGMENT) // BLOCK // 8
        assert 2 <= room < SLOTS // 8
        await last_writes_of(desk).run(60, "lost", ignore)
        kept = [on_disk(desk, 1000 * first, 8) for first in range(0, SLOTS, 8)]
        assert kept == [0] * (SLOTS // 8 - room) + [8] * room
        lost = f"kept {8 * room} blocks, lost {SLOTS - 8 * room}: the cold tier has no room"
        assert lost in caplog.text
        await desk.end()

    run(work())


@pytest.mark.parametrize("seen", [True, False])
def test_a_full_file_system_gets_each_block_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, seen: bool
) -> None:
    """Its segments are reused: without a limit, a stop would write the same blocks again and again."""

    async def work() -> None:
        make, made = ColdDirectory.make, 0

        def few(directory: ColdDirectory, path: Path, nbytes: int) -> int:
            nonlocal made
            if made == LEAST_SEGMENTS:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            made += 1
            return make(directory, path, nbytes)

        leave = Bench.leave

        def reuse(bench: Bench, store: SegmentStore, segment: Segment) -> None:
            desk.catalog.segments.drop_segment(segment.number)
            leave(bench, store, segment)

        monkeypatch.setattr(ColdDirectory, "make", few)
        monkeypatch.setattr(Bench, "leave", reuse)
        bench = Bench([tmp_path])
        await bench.recover()
        desk = Desk(bench)
        for first in range(0, SLOTS, 8):
            desk.save(1000 * first, 8, told=seen)
        if seen:  # the daemon has found out that the file system is full
            async with asyncio.timeout(60):
                while not bench.tier.failure:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
        before = desk.mover.counts["written"]
        missing = SLOTS - sum(on_disk(desk, 1000 * first, 8) for first in range(0, SLOTS, 8))
        await last_writes_of(desk).run(60, "lost", ignore)
        # A daemon that finds out during the stop may reuse what it has written until then, and replan that.
        in_flight = WRITES_AT_ONCE * SEGMENT // BLOCK
        assert desk.mover.counts["written"] - before <= SLOTS + (0 if seen else in_flight)
        kept = sum(on_disk(desk, 1000 * first, 8) for first in range(0, SLOTS, 8))
        assert 0 < kept < SLOTS
        gained = max(0, kept - SLOTS + missing)
        assert (
            f"kept {gained} blocks, lost {SLOTS - kept}: the cold tier has no room" in caplog.text
        )
        await desk.end()

    run(work())


def test_blocks_that_lose_their_segment_in_a_round_wait_for_the_next(tmp_path: Path) -> None:
    """Each round has its own limit: otherwise a full disk would be written until the time is over."""

    async def work() -> None:
        desk = await desk_in(tmp_path)
        desk.bench.tier.writer.accepts = False
        desk.save(100, 8, told=False)
        drain = desk.mover.writes.drain
        drain.begin_last(8 * BLOCK)
        planned = array("I", drain.plan().ids)
        desk.catalog.demotions.not_demoted(planned.tobytes())
        drain.wrote(7)
        assert array("I", drain.plan().ids) == planned  # one write failed
        desk.catalog.demotions.not_demoted(planned.tobytes())
        drain.wrote(1)
        assert not drain.plan().ids
        assert drain.is_done
        await desk.end()

    run(work())


def test_a_stop_without_blocks_that_are_only_in_memory_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        desk = await desk_in(tmp_path)
        desk.save(100, 8)
        await desk.written(8)
        with caplog.at_level(logging.INFO):
            await last_writes_of(desk).run(60, "lost", ignore)
        await desk.end()

    run(work())
    assert "before the stop, nothing was written: no block was only in memory" in caplog.text
    assert "kept" not in caplog.text


def test_a_stop_does_not_wait_for_blocks_that_are_larger_than_a_segment(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        desk = await desk_in(tmp_path)
        desk.save(100, 8, told=False)
        desk.save_large(200, 2)
        await last_writes_of(desk).run(60, "lost", ignore)
        assert on_disk(desk, 100, 8) == 8
        await desk.end()

    run(work())
    assert "kept 8 blocks, lost 2: they are larger than a segment" in caplog.text


def test_blocks_whose_frames_were_reused_meanwhile_are_written_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        desk = await desk_in(tmp_path)
        desk.save(100, 8)
        await desk.written(8)
        desk.bench.tier.writer.accepts = False
        desk.save(200, 8)
        settle = desk.mover.writes._settle

        def settle_and_reuse(*landed: object) -> None:
            desk.mover.writes._settle = settle  # type: ignore[method-assign]
            settle(*landed)  # type: ignore[arg-type]
            for number in range(len(desk.bench.tier.table.segments)):
                ids = array("I", desk.catalog.blocks.store.in_segment(number)[0])
                if desk.catalog.blocks.store.keys_of(ids[:1].tobytes()) == key(100):
                    desk.catalog.segments.drop_segment(number)

        desk.mover.writes._settle = settle_and_reuse  # type: ignore[method-assign]
        desk.bench.tier.writer.accepts = True
        with caplog.at_level(logging.INFO):
            await last_writes_of(desk).run(60, "lost", ignore)
        assert not desk.catalog.demotions.in_memory_alone
        await desk.end()

    run(work())
    assert ", lost 0" in caplog.text
