"""A fault in one disk, directory, file, tenant, forget or stop does not affect the others."""

from __future__ import annotations

import asyncio
import errno
import os
import struct
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from daemon.tiers.test_forget import ONE, SLOTS, Tenant, after_a_start
from kvtier.errors import TierError
from kvtier_daemon.catalog import Catalog
from kvtier_daemon.catalog.policy import make
from kvtier_daemon.tiers.cold import directory, lifecycle
from kvtier_daemon.tiers.cold import disk as drives
from kvtier_daemon.tiers.cold import frames as moving_blocks
from kvtier_daemon.tiers.cold import segment_files as files
from kvtier_daemon.tiers.cold.directory import ColdDirectory, open_direct
from kvtier_daemon.tiers.cold.disk import FAULTS_TO_OFF, DiskLane
from kvtier_daemon.tiers.cold.index import Index
from kvtier_daemon.tiers.cold.lifecycle import DirectoryKeeper, ExtentMaps
from kvtier_daemon.tiers.cold.mover import Mover
from kvtier_daemon.tiers.cold.recovery import recover
from kvtier_daemon.tiers.cold.segment import first_frame
from kvtier_daemon.tiers.cold.segment_log import Stage
from kvtier_daemon.tools import fsck
from kvtier_kernels import Store
from support.cold_bench import (
    BLOCK,
    SEGMENT,
    SIZE,
    SPACE,
    SPEC,
    Bench,
    files_of,
    key,
    kill,
    run,
    used,
)


def test_a_forget_that_is_repeated_after_its_tombstone_failed_persists(tmp_path: Path) -> None:
    async def work() -> None:
        tenant = Tenant(tmp_path)
        await tenant.start()
        tenant.save(0)
        await tenant.on_disk(1)
        drive = tenant.bench.first.disk
        write_text, failures = drive.write_text, [errno.EIO]

        def failing(fd: int, at: int, text: bytes, over: drives.Callback) -> None:
            if failures and at == 4096:
                over(failures.pop(), None)
            else:
                write_text(fd, at, text, over)

        drive.write_text = failing  # type: ignore[method-assign]
        await tenant.forget(0)  # an automatic retry may have succeeded before
        assert not failures
        assert await tenant.forget(0) == ""
        await tenant.kill()
        assert await after_a_start(tmp_path, range(1)) == []

    run(work())


def test_a_disabled_lane_stays_disabled_after_more_faults() -> None:
    now = [100.0]
    lane = DiskLane("it", lambda: now[0])
    lane.give_up("a bug")
    for _ in range(FAULTS_TO_OFF):
        lane.fault("it failed", errno.EIO)
    now[0] += 6
    assert lane.given_up and not lane.is_on


def test_the_tombstone_of_a_place_does_not_hide_a_later_block_there(tmp_path: Path) -> None:
    async def life(new: range, bury: int | None = None) -> list[int]:
        bench = Bench([tmp_path])
        await bench.recover()
        found = sorted(bench.on_disk)
        assert not await bench.write(new)
        if bury is not None:
            one = bench.on_disk[bury]
            bench.tier.table.tombstone(struct.pack("<II", one.segment, one.page))
        await bench.tier.close()
        return found

    async def work() -> None:
        assert await life(range(2), bury=1) == []
        assert await life(range(0)) == [0]
        assert await life(range(2, 3)) == [0]
        assert await life(range(0)) == [0, 2]

    run(work())


def test_blocks_of_a_file_that_was_unreadable_at_one_start_are_found_at_the_next(
    tmp_path: Path,
) -> None:
    """The index keeps the description of their space: after a kill the blocks can be read only with it."""
    path, aside = tmp_path / "segments" / "t" / "000000", tmp_path / "aside"

    async def nothing(*_: Any) -> None:
        pass

    async def killed() -> None:
        bench = Bench([tmp_path])
        await bench.recover()
        assert not await bench.write(range(4))
        kill(bench)

    async def without_the_file() -> None:
        bench = Bench([tmp_path])
        await bench.tier.directories.recover(nothing)
        assert bench.first.stores["t"].files.unreadable == 1
        await bench.tier.close()

    async def with_it() -> None:
        bench = Bench([tmp_path])
        await bench.recover()
        assert sorted(bench.on_disk) == list(range(4))
        await bench.all_read()
        await bench.tier.close()

    run(killed())
    path.rename(aside)
    path.symlink_to(aside)  # the tier does not follow links
    run(without_the_file())
    path.unlink()
    aside.rename(path)
    run(with_it())


def test_tombstones_of_an_earlier_use_of_a_segment_hide_no_new_frame(
    tmp_path: Path,
) -> None:
    rounds, blocks = 10, SEGMENT // BLOCK - 2
    last = range((rounds - 1) * blocks, rounds * blocks)

    async def work() -> None:
        bench = Bench([tmp_path], share=0.17)  # five segments
        await bench.recover()
        for first in range(0, rounds * blocks, blocks):
            assert not await bench.write(range(first, first + blocks))
            for number in [n for n in bench.on_disk if n < last[0]]:
                one = bench.on_disk.pop(number)
                bench.tier.table.tombstone(struct.pack("<II", one.segment, one.page))
            await bench.tier.writer.settled("t")
            assert not await bench.tier.flush()
        assert sorted(bench.on_disk) == list(last)
        assert len(bench.tier.table.segments) < rounds, "no segment was reused"
        await bench.tier.close()
        bench = Bench([tmp_path], share=0.17)
        await bench.recover()
        assert sorted(bench.on_disk) == list(last)
        await bench.all_read()
        await bench.tier.close()

    run(work())


def test_a_file_that_can_not_be_recovered_counts_toward_the_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fill(first: int) -> None:
        bench = Bench([tmp_path])
        await bench.recover()
        for at in range(first, first + 800, 64):
            assert not await bench.write(range(at, at + 64))
            assert used(tmp_path) <= SIZE
        await bench.tier.close()

    run(fill(0))
    bad = set(files_of(tmp_path)[:20])

    def refusing(path: Path, *rest: Any, **more: Any) -> int:
        if path in bad:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        return open_direct(path, *rest, **more)

    monkeypatch.setattr(directory, "open_direct", refusing)
    run(fill(1000))


class Hung:
    """A disk that accepts writes and never completes them."""

    def __init__(self, disk: Any) -> None:
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)

    def write(self, *_: object) -> None:
        pass

    def sync(self, *_: object) -> None:
        pass


class TwoDisks(Tenant):
    def __init__(self, folders: list[Path]) -> None:
        self.bench = Bench(folders, 2 * SIZE)
        self.memory, self.extent = self.bench.memory, self.bench.extent
        self.catalog = Catalog(Store(), make("lru"))
        self.mover = Mover("t", self.catalog, self.bench.tier, SLOTS * BLOCK, through=True)
        for shelf in self.bench.tier.directories.stores():
            shelf._reclaim = self.mover.reclaimer.reclaim
        self.space = self.catalog.spaces.open(SPACE, SPEC, ONE)
        self.running = None


async def tend(tenant: Tenant) -> None:
    while True:
        tenant.bench.tier.run_periodic()
        await asyncio.sleep(0.02)


def two(tmp_path: Path) -> list[Path]:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    return folders


def test_a_disk_whose_writes_hang_does_not_stop_the_other_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drives, "HANGS_S", 0.3)
    monkeypatch.setattr(moving_blocks, "SETTLE_S", 0.6)

    async def work() -> None:
        tenant = TwoDisks(two(tmp_path))
        await tenant.start()
        tending = asyncio.create_task(tend(tenant))
        for number in range(4):
            tenant.save(number)
        await tenant.on_disk(4)
        bad = tenant.bench.first.disk
        bad.worker = Hung(bad.worker)  # type: ignore[assignment]
        for number in range(4, 12):
            tenant.save(number)
            await asyncio.sleep(0.1)
        while bad.writes.is_on:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        before = tenant.mover.counts["written"]
        for number in range(12, 20):
            tenant.save(number)
        try:
            await asyncio.wait_for(tenant.on_disk(before + 8), 45)
        finally:
            tending.cancel()
            assert tenant.running is not None
            tenant.running.cancel()
            await asyncio.gather(tending, tenant.running, return_exceptions=True)
            bad.worker = bad.worker._disk  # type: ignore[attr-defined]
            await tenant.bench.tier.close(0.1)

    run(work())


def test_an_index_that_hangs_lets_new_spaces_be_written_to_the_other_disk(tmp_path: Path) -> None:
    async def work() -> None:
        tenant = TwoDisks(two(tmp_path))
        await tenant.start()
        tenant.bench.first.directory.index.flush = lambda token: None  # type: ignore[method-assign]
        tenant.save(0)
        try:
            await asyncio.wait_for(tenant.on_disk(1), 45)
        finally:
            assert tenant.running is not None
            tenant.running.cancel()
            await asyncio.gather(tenant.running, return_exceptions=True)
            await tenant.bench.tier.close(0.1)

    run(work())


def test_a_directory_that_can_not_be_listed_does_not_disable_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = two(tmp_path)
    files = ColdDirectory.files

    def refusing(volume: ColdDirectory, tenant: str) -> list[Path]:
        if volume.path == folders[0]:
            raise OSError(errno.EIO, "the directory can't be listed")
        return files(volume, tenant)

    async def work() -> None:
        bench = Bench(folders, 2 * SIZE)
        await bench.recover()
        assert not await bench.write(range(100))
        await bench.tier.close()
        monkeypatch.setattr(ColdDirectory, "files", refusing)
        bench = Bench(folders, 2 * SIZE)
        try:
            await bench.recover()
            assert bench.on_disk
        finally:
            await bench.tier.close()

    run(work())


def test_a_forget_is_not_confirmed_before_the_heads_of_freed_segments_are_erased(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        tenant = Tenant(tmp_path)
        await tenant.start()
        shelf, _ = await tenant.sealed(20)
        write_text, failed = shelf.disk.write_text, asyncio.Event()

        def failing(fd: int, at: int, text: bytes, over: drives.Callback) -> None:
            if at == 0:
                failed.set()
                over(errno.EIO, None)  # only page 0 of the disk is bad
            else:
                write_text(fd, at, text, over)

        shelf.disk.write_text = failing  # type: ignore[method-assign]
        segment = shelf.log.reclaim()
        assert segment is not None
        tenant.mover.reclaimer.reclaim(shelf, segment)
        await failed.wait()
        said = await tenant.forget(0)
        await tenant.kill()
        found = await after_a_start(tmp_path, range(1))
        assert said or not found, "the forget was confirmed, and the block is found"

    run(work())


def test_blocks_forgotten_before_recovery_found_them_stay_forgotten_after_their_client_left(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        tenant = Tenant(tmp_path)
        await tenant.start()
        tenant.save(0)
        await tenant.on_disk(1)
        await tenant.kill()
        early = Tenant(tmp_path)
        early.catalog.forget(early.space, key(0))
        early.mover.forgets.forget(early.space, key(0), None)
        early.catalog.end_session(ONE, True)
        await early.start()
        early.mover.forgets.end_early_forgets()
        early.space = early.catalog.spaces.open(SPACE, SPEC, ONE)
        while early.knows(0):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await early.kill()

    run(work())


def test_the_spaces_of_one_tenant_leave_room_in_the_index_for_others(tmp_path: Path) -> None:
    async def work() -> None:
        bench = Bench([tmp_path])
        await bench.recover()
        bench.first.directory.index_bytes = 64 << 10
        known = [await bench.tier.writer.describe("t", os.urandom(32), SPEC) for _ in range(100)]
        assert 10 < known.count(True) < 64
        assert not known[-1]
        assert await bench.tier.writer.describe("other", os.urandom(32), SPEC)
        assert await bench.tier.writer.describe("t", SPACE, SPEC), "existing descriptions stay"
        await bench.tier.close()

    run(work())


def test_descriptions_whose_write_failed_take_no_room_in_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        bench = Bench([tmp_path])
        await bench.recover()
        bench.first.directory.index_bytes = 64 << 10
        with monkeypatch.context() as now:
            now.setattr(Index, "_commit", lambda *_: "no room")
            for _ in range(100):
                assert not await bench.tier.writer.describe("t", bytes(32), SPEC)
        assert await bench.tier.writer.describe("t", bytes(32), SPEC)
        await bench.tier.close()

    run(work())


def test_descriptions_of_spaces_without_blocks_are_removed_at_a_start(tmp_path: Path) -> None:
    async def life() -> int:
        bench = Bench([tmp_path])
        await bench.recover()
        await bench.first.descriptions.flush()
        there = len(bench.first.directory.index.entries(b"spaces"))
        for _ in range(20):
            await bench.tier.writer.describe("t", os.urandom(32), SPEC)
        if not bench.on_disk:
            await bench.write(range(4))
        await bench.tier.close()
        return there

    async def work() -> None:
        assert await life() == 0 + 1  # one is the bench's own space
        assert await life() <= 2
        assert await life() <= 2

    run(work())


def test_a_stop_while_a_segment_is_begun_seals_that_segment(tmp_path: Path) -> None:
    """Without a footer the next start would have to search for each of its frames."""

    async def nothing(*_: Any) -> None:
        pass

    async def work() -> None:
        first = Bench([tmp_path])
        await first.recover()
        await first.write(range(4))
        await first.tier.close()
        second = Bench([tmp_path])
        await second.tier.directories.recover(nothing)
        shelf = second.first.stores["t"]
        # On a busy machine it may be open already.
        assert [one.stage for one in shelf.log.others] in ([Stage.BEGINNING], [])
        await second.tier.close()
        files = [recover(path, None, {}) for path in files_of(tmp_path)]
        assert [one.sealed for one in files if one.head is not None] == [True]
        third = Bench([tmp_path])
        await third.recover()
        assert sorted(third.on_disk) == list(range(4))
        await third.all_read()
        await third.tier.close()

    run(work())


def test_blocks_that_one_start_did_not_find_are_not_found_by_a_later_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        bench = Bench([tmp_path])
        await bench.recover()
        await bench.write(range(3))
        torn, path = bench.on_disk[1], bench.tier.table.segments[bench.on_disk[1].segment].path
        kill(bench)
        fd = os.open(path, os.O_RDWR)
        os.pwrite(fd, b"torn" * 1024, (torn.page + torn.header_pages) * 4096)
        os.fsync(fd)
        os.close(fd)
        for other in files_of(tmp_path):  # so that no segment is free
            if str(other) != path:
                other.unlink()

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, "full")

        with monkeypatch.context() as now:
            now.setattr(ColdDirectory, "make", full)
            bench = Bench([tmp_path])
            await bench.recover()
            assert sorted(bench.on_disk) == [0]
            await bench.tier.close()
        bench = Bench([tmp_path])
        await bench.recover()
        assert sorted(bench.on_disk) == [0]  # the earlier start dropped block 2 permanently
        await bench.write(range(3, 4))
        kill(bench)
        bench = Bench([tmp_path])
        await bench.recover()
        found = sorted(bench.on_disk)
        await bench.tier.close()
        assert found == [0, 3]

    run(work())


def test_a_forget_is_not_confirmed_while_some_files_are_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        tenant = Tenant(tmp_path)
        await tenant.start()
        tenant.save(0)
        await tenant.on_disk(1)
        await tenant.kill()

        def refusing(path: Path, *_: object) -> None:
            raise TierError(f"{path}: can't be read: EIO")

        with monkeypatch.context() as now:
            now.setattr(files, "recover", refusing)
            tenant = Tenant(tmp_path)
            await tenant.start()
            said = await tenant.forget(0)
            await tenant.kill()
        found = await after_a_start(tmp_path, range(1))
        assert said or not found, "the forget was confirmed, and the block is found"

    run(work())


def test_a_foreign_file_that_can_not_be_removed_disables_no_tenant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        bench = Bench([tmp_path])
        await bench.recover()
        await bench.write(range(20))
        await bench.tier.close()
        stranger = tmp_path / "segments" / "gone"
        stranger.mkdir()
        (stranger / "000000").write_bytes(bytes(4096))
        unlink = Path.unlink

        def refusing(path: Path, missing_ok: bool = False) -> None:
            if path.parent == stranger:
                raise PermissionError(errno.EPERM, "immutable")
            unlink(path, missing_ok)

        monkeypatch.setattr(Path, "unlink", refusing)
        bench = Bench([tmp_path])
        try:
            await bench.recover()
        finally:
            await bench.tier.close()

    run(work())


def test_a_damaged_index_that_was_renamed_counts_toward_the_size(tmp_path: Path) -> None:
    async def fill(first: int) -> None:
        bench = Bench([tmp_path])
        await bench.recover()
        index = bench.first.directory.index
        for number in range(13):
            for at in range(250):
                index.put(b"segments", struct.pack(">QI", number, at), bytes(4000))
            await bench.first.descriptions.flush()
        for at in range(first, first + 800, 64):
            await bench.write(range(at, at + 64))
        assert used(tmp_path) <= SIZE, sorted(
            (p.name, p.stat().st_size >> 20) for p in (tmp_path / "index").iterdir()
        )
        await bench.tier.close()

    run(fill(0))
    data = tmp_path / "index" / "data.mdb"
    with data.open("r+b") as file:
        file.write(os.urandom(8192))
    run(fill(1000))


def test_a_directory_that_hangs_at_the_start_does_not_delay_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders, may_continue = two(tmp_path), threading.Event()
    read = ColdDirectory.read_index

    def hanging(volume: ColdDirectory) -> None:
        if volume.path == folders[0]:
            may_continue.wait(60)
        read(volume)

    async def work() -> None:
        bench = Bench(folders, 2 * SIZE)
        await bench.recover()
        assert not await bench.write(range(100))
        await bench.tier.close()
        monkeypatch.setattr(ColdDirectory, "read_index", hanging)
        bench = Bench(folders, 2 * SIZE)
        recovering = asyncio.create_task(bench.recover())
        try:
            async with asyncio.timeout(45):
                while not bench.on_disk:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        finally:
            may_continue.set()
            await recovering
            await bench.tier.close()

    run(work())


def test_a_stop_during_a_reclaim_loses_no_blocks(tmp_path: Path) -> None:
    async def work() -> None:
        tenant = Tenant(tmp_path)
        await tenant.start()
        shelf, _ = await tenant.sealed(20)
        segment = shelf.log.reclaim()
        assert segment is not None and tenant.running is not None

        copying = asyncio.Event()

        async def slow(_: object) -> None:
            copying.set()
            await asyncio.sleep(600)

        tenant.mover.reclaimer._copy_wanted = slow  # type: ignore[method-assign]
        tenant.mover.reclaimer.reclaim(shelf, segment)
        await copying.wait()
        tenant.running.cancel()
        await asyncio.gather(tenant.running, return_exceptions=True)
        await tenant.bench.tier.close()
        assert await after_a_start(tmp_path, range(20)) == list(range(20))

    run(work())


def test_an_extent_that_can_not_be_mapped_does_not_renumber_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The position of an extent is its number. If an extent could not be mapped, the next one must not
    get its number."""

    answers = iter([OSError(errno.ENOMEM, "no memory"), object()])

    def mapping(*_: object) -> object:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(lifecycle, "MappedExtent", mapping)
    mover: Any = SimpleNamespace(extents=[])
    tier: Any = SimpleNamespace(
        off_reason="",
        memory=SimpleNamespace(register=lambda _: 7),
        directories=SimpleNamespace(give_up=lambda _: None),
    )
    maps = ExtentMaps(tier, {"t": mover})
    extent: Any = SimpleNamespace(tenant="t", fd=-1, nbytes=4096)
    for _ in range(2):
        maps.map(extent)
    assert next(answers, None) is not None, (
        "the next extent was mapped although one before it failed"
    )
    assert mover.extents == [], f"extent 0 is read to where {mover.extents[0]} is"


def test_a_directory_that_is_lost_after_each_attach_is_retried_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    class Ended(Exception):  # noqa: N818
        pass

    class Keeper(DirectoryKeeper):
        async def try_attach(self, path: Path) -> bool:
            del directories.missing[path]
            return True

        async def detach(self, one: Any) -> None:
            directories.missing[tmp_path] = "lost"

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 8:
            raise Ended

    directories = SimpleNamespace(missing={tmp_path: "lost"}, lost=lambda _: object())
    tier: Any = SimpleNamespace(directories=directories)
    opener: Any = None
    with monkeypatch.context() as patch, pytest.raises(Ended):
        patch.setattr(lifecycle.asyncio, "sleep", sleep)
        run(Keeper(tier, opener, {}, {}).keep(tmp_path))
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30]


def test_fsck_reports_a_frame_that_can_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fill() -> None:
        bench = Bench([tmp_path])
        await bench.recover()
        await bench.write(range(20))
        await bench.tier.close()

    run(fill())

    class Os:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def pread(self, fd: int, nbytes: int, at: int) -> bytes:
            if at == first_frame(SEGMENT):
                raise OSError(errno.EIO, "a bad sector")
            return os.pread(fd, nbytes, at)

    monkeypatch.setattr(fsck, "os", Os())
    volume = ColdDirectory(tmp_path, None)
    try:
        report = fsck.check(volume)
    finally:
        volume.close()
    assert report.wrong == {"unreadable": 2}, "the first frame of each segment"


@pytest.mark.parametrize("where", ["segments/t/000000", "kvtier.lock"])
def test_a_link_in_a_directory_is_not_followed(tmp_path: Path, where: str) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "cold"
    victim.write_bytes(b"mine" * (1 << 18))
    (folder / where).parent.mkdir(parents=True)
    (folder / where).symlink_to(victim)

    async def work() -> None:
        try:
            bench = Bench([folder])
        except TierError:
            return
        await bench.recover()
        await bench.write(range(20))
        await bench.tier.close()

    run(work())
    assert victim.read_bytes() == b"mine" * (1 << 18)


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_a_mover_that_is_woken_while_it_is_cancelled_ends(tmp_path: Path, turns: int) -> None:
    async def work() -> None:
        tenant = Tenant(tmp_path)
        await tenant.start()
        assert tenant.running is not None
        await asyncio.sleep(0.01)
        tenant.mover.writes.saved(b"")  # as a commit does
        for _ in range(turns):
            await asyncio.sleep(0)
        tenant.running.cancel()
        await asyncio.wait([tenant.running], timeout=30)
        ended = tenant.running.done()
        while not tenant.running.done():  # the mover ignored the cancellation
            for task in asyncio.all_tasks():
                if task.get_name().startswith(("write ", "bring away ")):
                    task.cancel()
            await asyncio.sleep(0.003)
        await tenant.bench.tier.close()
        assert ended

    run(work())
