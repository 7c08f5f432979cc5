"""What harm one thing may do to others: a disk, a directory, a file, a tenant, a forget, a stop."""

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

from daemon.tiers.test_cold import (
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
from daemon.tiers.test_forget import ONE, SLOTS, Tenant, after_a_start
from kvtier.errors import TierError
from kvtier_daemon.catalog import Catalog
from kvtier_daemon.catalog.policy import make
from kvtier_daemon.tiers.cold import attached, lifecycle
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


def test_a_forget_asked_for_again_after_its_tombstone_failed_holds(tmp_path: Path) -> None:
    async def work() -> None:
        tenant = Tenant(tmp_path)
        await tenant.start()
        tenant.save(0)
        await tenant.on_disk(1)
        drive = tenant.bench.first.disk
        write_text, failures = drive.write_text, [errno.EIO]

        def failing(fd: int, at: int, text: bytes, over: drives.Over) -> None:
            if failures and at == 4096:
                over(failures.pop(), None)
            else:
                write_text(fd, at, text, over)

        drive.write_text = failing  # type: ignore[method-assign]
        await tenant.forget(0)  # if it was tried again by then, that is well
        assert not failures
        assert await tenant.forget(0) == ""
        await tenant.kill()
        assert await after_a_start(tmp_path, range(1)) == []

    run(work())


def test_a_lane_that_was_given_up_is_not_woken_by_faults() -> None:
    now = [100.0]
    lane = DiskLane("it", lambda: now[0])
    lane.give_up("a bug")
    for _ in range(FAULTS_TO_OFF):
        lane.fault("EIO")
    now[0] += 6
    assert lane.given_up and not lane.is_on


def test_a_place_that_was_forgotten_is_not_so_for_who_comes_next(tmp_path: Path) -> None:
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
    """What the index says of their space stays: after a kill only that says how to read them."""
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
    path.symlink_to(aside)  # links are not followed
    run(without_the_file())
    path.unlink()
    aside.rename(path)
    run(with_it())


def test_tombstones_hide_no_frame_that_is_written_when_their_segment_is_used_again(
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
        assert len(bench.tier.table.segments) < rounds, "none was used again"
        await bench.tier.close()
        bench = Bench([tmp_path], share=0.17)
        await bench.recover()
        assert sorted(bench.on_disk) == list(last)
        await bench.all_read()
        await bench.tier.close()

    run(work())


def test_a_file_that_can_not_be_taken_up_counts_for_the_cap(
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

    def refusing(path: Path) -> int:
        if path in bad:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        return open_direct(path)

    monkeypatch.setattr(attached, "open_direct", refusing)
    run(fill(1000))


class Hung:
    """A disk that takes writes and never ends them."""

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
            shelf._reclaim = self.mover.reclaim
        self.space = self.catalog.open(SPACE, SPEC, ONE)
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


def test_a_disk_whose_writes_hang_takes_no_other_one_along(
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
            await asyncio.wait_for(tenant.on_disk(before + 8), 5)
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
            await asyncio.wait_for(tenant.on_disk(1), 6)
        finally:
            assert tenant.running is not None
            tenant.running.cancel()
            await asyncio.gather(tenant.running, return_exceptions=True)
            await tenant.bench.tier.close(0.1)

    run(work())


def test_one_directory_that_can_not_be_listed_takes_no_other_along(
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


def test_a_forget_is_not_answered_while_a_head_could_not_be_taken_back(tmp_path: Path) -> None:
    async def work() -> None:
        tenant = Tenant(tmp_path)
        await tenant.start()
        shelf, _ = await tenant.sealed(20)
        write_text = shelf.disk.write_text

        def failing(fd: int, at: int, text: bytes, over: drives.Over) -> None:
            if at == 0:
                over(errno.EIO, None)  # page 0 is bad, the rest of the disk is not
            else:
                write_text(fd, at, text, over)

        shelf.disk.write_text = failing  # type: ignore[method-assign]
        segment = shelf.log.reclaim()
        assert segment is not None
        tenant.mover.reclaim(shelf, segment)
        await asyncio.sleep(0.2)
        said = await tenant.forget(0)
        await tenant.kill()
        found = await after_a_start(tmp_path, range(1))
        assert said or not found, "forgotten, it was said, and it is back"

    run(work())


def test_what_was_forgotten_before_it_was_found_is_gone_though_its_client_is_too(
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
        early.mover.forget(early.space, key(0), None)
        early.catalog.end_session(ONE, True)
        await early.start()
        early.mover.repeat_early_forgets()
        early.space = early.catalog.open(SPACE, SPEC, ONE)
        await asyncio.sleep(0.05)
        assert not early.knows(0)
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
        assert await bench.tier.writer.describe("t", SPACE, SPEC), "what is known stays so"
        await bench.tier.close()

    run(work())


def test_descriptions_that_could_not_be_written_take_no_room(
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


def test_spaces_that_nothing_is_left_of_make_room_at_a_start(tmp_path: Path) -> None:
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
        assert await life() == 0 + 1  # the bench's own
        assert await life() <= 2
        assert await life() <= 2

    run(work())


def test_a_stop_while_a_segment_is_begun_leaves_it_with_a_footer(tmp_path: Path) -> None:
    """Or the next start would have to look for each of its frames."""

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
        assert [one.stage for one in shelf.log.others] == [Stage.BEGINNING]
        await second.tier.close()
        files = [recover(path, None, {}) for path in files_of(tmp_path)]
        assert [one.sealed for one in files if one.head is not None] == [True]
        third = Bench([tmp_path])
        await third.recover()
        assert sorted(third.on_disk) == list(range(4))
        await third.all_read()
        await third.tier.close()

    run(work())


def test_what_no_start_has_found_does_not_come_back_later(
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
        for other in files_of(tmp_path):  # none was free
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
        assert sorted(bench.on_disk) == [0]  # 2 is forgotten now: there is nothing to be done
        await bench.write(range(3, 4))
        kill(bench)
        bench = Bench([tmp_path])
        await bench.recover()
        found = sorted(bench.on_disk)
        await bench.tier.close()
        assert found == [0, 3]

    run(work())


def test_a_forget_is_not_answered_while_files_were_not_read(
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
        assert said or not found, "forgotten, it was said, and it is back"

    run(work())


def test_a_stranger_that_can_not_be_removed_takes_nobody_along(
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


def test_a_damaged_index_that_was_put_aside_counts_for_the_cap(tmp_path: Path) -> None:
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


def test_one_directory_that_hangs_at_the_start_takes_no_other_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders, let_go = two(tmp_path), threading.Event()
    read = ColdDirectory.read_index

    def hanging(volume: ColdDirectory) -> None:
        if volume.path == folders[0]:
            let_go.wait(60)
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
            await asyncio.wait([recovering], timeout=6)
            assert bench.on_disk, "nothing of the good directory is there"
        finally:
            let_go.set()
            await recovering
            await bench.tier.close()

    run(work())


def test_a_stop_costs_nothing_that_a_kill_does_not(tmp_path: Path) -> None:
    async def work() -> None:
        tenant = Tenant(tmp_path)
        await tenant.start()
        shelf, _ = await tenant.sealed(20)
        segment = shelf.log.reclaim()
        assert segment is not None and tenant.running is not None

        async def slow(_: object) -> None:
            await asyncio.sleep(60)

        tenant.mover._reclaimer._copy_wanted = slow  # type: ignore[method-assign]
        tenant.mover.reclaim(shelf, segment)
        await asyncio.sleep(0.05)
        tenant.running.cancel()
        await asyncio.gather(tenant.running, return_exceptions=True)
        await tenant.bench.tier.close()
        assert await after_a_start(tmp_path, range(20)) == list(range(20))

    run(work())


def test_extents_that_can_not_be_mapped_move_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extents have numbers by their order: where one is missing, the next must not have its number."""

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
    assert next(answers, None) is not None, "after one that could not be mapped none is tried"
    assert mover.extents == [], f"extent 0 is read to where {mover.extents[0]} is"


def test_a_directory_that_is_lost_whenever_it_is_looked_into_is_tried_less_often(
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


def test_fsck_tells_of_a_frame_that_can_not_be_read(
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
def test_a_link_in_a_directory_leads_to_nobody_elses_file(tmp_path: Path, where: str) -> None:
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
def test_a_mover_that_is_woken_as_it_is_to_end_ends(tmp_path: Path, turns: int) -> None:
    async def work() -> None:
        tenant = Tenant(tmp_path)
        await tenant.start()
        assert tenant.running is not None
        await asyncio.sleep(0.01)
        tenant.mover.saved(b"")  # as a commit does
        for _ in range(turns):
            await asyncio.sleep(0)
        tenant.running.cancel()
        await asyncio.wait([tenant.running], timeout=3)
        ended = tenant.running.done()
        while not tenant.running.done():  # it has forgotten that it was to
            for task in asyncio.all_tasks():
                if task.get_name().startswith(("write ", "bring away ")):
                    task.cancel()
            await asyncio.sleep(0.003)
        await tenant.bench.tier.close()
        assert ended

    run(work())
