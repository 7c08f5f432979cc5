"""A disk is asked as long as that is worth it: reads and writes each by themselves."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import threading
import time
from pathlib import Path

import pytest

from daemon.tiers.test_cold import BLOCK, SIZE, Bench, run
from kvtier_daemon.tiers.cold.disk import (
    FAULTS_TO_OFF,
    HANGS_S,
    LONGEST_OFF_S,
    OFF_S,
    DirectoryDisk,
    DiskLane,
    anonymous,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lane(clock: Clock) -> DiskLane:
    return DiskLane("reading /disk", clock)


def faults(lane: DiskLane, count: int = FAULTS_TO_OFF) -> None:
    for _ in range(count):
        lane.fault("it failed")


def test_faults_in_a_row_switch_a_lane_off_for_longer_and_longer(
    lane: DiskLane, clock: Clock
) -> None:
    pause = OFF_S
    for _ in range(10):
        faults(lane, FAULTS_TO_OFF - 1)
        assert lane.is_on
        faults(lane, 1)
        assert not lane.is_on
        clock.now += pause - 0.1
        assert not lane.is_on
        clock.now += 0.2
        assert lane.is_on
        pause = min(2 * pause, LONGEST_OFF_S)
    assert pause == LONGEST_OFF_S
    assert lane.failure == "it failed"
    lane.worked()
    assert lane.is_on and not lane.failure
    faults(lane)
    clock.now += OFF_S + 0.1
    assert lane.is_on, "the pause is short again"


def test_what_works_in_between_keeps_a_lane_on(lane: DiskLane) -> None:
    for _ in range(10):
        faults(lane, FAULTS_TO_OFF - 1)
        lane.worked()
    assert lane.is_on


def test_what_was_begun_before_a_pause_does_not_end_it(lane: DiskLane, clock: Clock) -> None:
    faults(lane)
    lane.worked()
    assert not lane.is_on
    clock.now += OFF_S + 0.1
    lane.worked()
    assert lane.is_on and not lane.failure


def test_a_lane_that_hangs_is_off_until_it_comes_back(lane: DiskLane, clock: Clock) -> None:
    lane.tend()
    clock.now += 10 * HANGS_S
    lane.tend()
    assert lane.is_on, "nothing to wait for"
    lane.began()
    lane.began()
    clock.now += HANGS_S - 0.1
    lane.tend()
    lane.ended()  # slow is not hanging
    clock.now += HANGS_S - 0.1
    lane.tend()
    assert lane.is_on
    clock.now += 0.2
    lane.tend()
    assert not lane.is_on and "no request completed" in lane.failure
    lane.ended()
    lane.tend()
    assert lane.is_on and not lane.failure


def test_what_was_too_late_for_the_disk_is_no_sign_of_it(lane: DiskLane, clock: Clock) -> None:
    """It never was with the disk; reads that wait behind one that hangs end so, one after the other."""
    lane.began()
    for _ in range(3):
        lane.began()
        clock.now += HANGS_S / 2
        lane.ended(errno.ETIMEDOUT)
    lane.tend()
    assert not lane.is_on
    lane.ended(errno.EIO)
    lane.tend()
    assert lane.is_on


def test_a_lane_that_was_given_up_stays_off(lane: DiskLane, clock: Clock) -> None:
    lane.give_up("a bug")
    clock.now += 1e9
    lane.worked()
    lane.tend()
    assert not lane.is_on and lane.failure == "a bug"


def test_what_is_done_beside_the_loop_counts_as_a_write(tmp_path: Path, clock: Clock) -> None:
    async def work() -> None:
        drive = DirectoryDisk(asyncio.get_running_loop(), str(tmp_path), "threads", clock)
        go_on = threading.Event()
        waiting = drive.run_in_thread(go_on.wait)
        clock.now += HANGS_S + 1
        drive.tend()
        assert not drive.writes.is_on and drive.reads.is_on
        assert not drive.stop(0), "a thread is in the kernel still"
        go_on.set()
        assert await waiting

    run(work())


def test_a_drive_that_has_ended_cancels_what_it_is_asked_for(tmp_path: Path) -> None:
    """An extent may become ready, and a read be asked for, after the end has begun."""

    async def work() -> None:
        drive = DirectoryDisk(asyncio.get_running_loop(), str(tmp_path), "threads", time.monotonic)
        assert drive.stop(20)
        codes: list[int] = []
        drive.read_text(0, 0, 4096, lambda code, _: codes.append(code))
        drive.write_text(0, 0, bytes(4096), lambda code, _: codes.append(code))
        while len(codes) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert codes == [errno.ECANCELED] * 2
        with pytest.raises(OSError, match="closed"):
            drive.worker.register(anonymous(4096))

    run(work())


def test_a_look_that_fails_is_said_and_a_file_system_that_is_dead_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        bench = Bench([tmp_path])
        await bench.recover()
        unheard: list[object] = []
        bench.loop.set_exception_handler(lambda _, context: unheard.append(context))
        attached = bench.first
        drive, volume = attached.disk, attached.directory

        def fails() -> str:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(volume, "elsewhere", fails)
        while not drive.lost:
            bench.tier.directories.check_locations()
            await asyncio.sleep(0.001)
        gc.collect()
        assert not unheard and "Input/output error" in bench.tier.failure
        assert not bench.tier.reader.is_on and not bench.tier.directories.given_up, (
            "it is tried again"
        )
        numbers = await bench.tier.directories.detach(attached, bench.tier.reads.pump)
        await bench.tier.directories.closed(volume)
        assert {number for _, number in numbers} == set(range(len(bench.tier.table.segments)))
        directories = bench.tier.directories
        assert not directories.attached and list(directories.missing) == [tmp_path]
        assert not any(one.tombstones.count for one in bench.tier.table.segments), (
            "kept at each detach"
        )
        await bench.tier.close()

    run(work())


def test_a_write_that_fails_is_the_writes_fault_alone(tmp_path: Path) -> None:
    async def work() -> None:
        bench = Bench([tmp_path])
        await bench.recover()
        await bench.write(range(4))
        segment = bench.first.stores["t"].log.open
        assert segment is not None
        drive = bench.first.disk
        read_only = os.open(segment.path, os.O_RDONLY | os.O_DIRECT)
        right = os.dup(segment.fd)
        os.dup2(read_only, segment.fd)
        assert await bench.write(range(4, 5)) == [4]
        os.dup2(right, segment.fd)
        os.close(right)
        os.close(read_only)
        assert drive.faults == 1 and drive.reads.is_on
        assert isinstance(await bench.read(2), bytes)
        assert await bench.write(range(5, 9)) == []
        assert not bench.tier.failure, "another segment takes what is written"
        await bench.all_read()
        await bench.tier.close()

    run(work())


def test_a_directory_that_is_off_takes_only_its_own_away(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()

    async def work() -> None:
        bench = Bench(folders, 2 * SIZE)
        await bench.recover()
        await bench.write(range(48))
        tier = bench.tier
        assert not tier.unreadable_segments()
        tier.directories.attached[0].disk.give_up("it is out")
        theirs = {
            n for n, one in enumerate(tier.table.segments) if one.path.startswith(str(folders[0]))
        }
        assert tier.unreadable_segments() == theirs and 0 < len(theirs) < len(tier.table.segments)
        assert tier.reader.is_on and tier.writer.is_on
        before = set(bench.on_disk)
        await bench.write(range(48, 80))
        after = {bench.on_disk[number].segment for number in set(bench.on_disk) - before}
        assert after and not after & theirs
        tier.directories.attached[1].disk.give_up("this too")
        assert not tier.reader.is_on and not tier.writer.is_on
        assert tier.failure == "it is out; this too"
        await tier.close()

    assert BLOCK * 48 < SIZE
    run(work())
