"""The cold tier's files: written blocks are readable, are found after a restart, and take no more than
`cold.size`."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.errors import TierError
from kvtier.frame import PAGE
from kvtier_daemon.tiers.cold.recovery import recover
from kvtier_daemon.tiers.cold.segment_store import SegmentStore
from support.cold_bench import (
    BLOCK,
    MIB,
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
from support.specs import pattern


@pytest.fixture(params=["io_uring", "threads"])
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


def test_blocks_are_read_as_they_were_written(tmp_path: Path, engine: str) -> None:
    async def work() -> None:
        bench = Bench([tmp_path], engine=engine)
        await bench.recover()
        assert await bench.write(range(100)) == []
        assert len(bench.on_disk) == 100
        await bench.all_read()
        await bench.tier.close()

    run(work())


def test_a_start_finds_what_was_written(tmp_path: Path) -> None:
    async def first() -> None:
        bench = Bench([tmp_path])
        await bench.recover()
        await bench.write(range(100))
        await bench.tier.close()

    async def again(low: int, high: int) -> None:
        bench = Bench([tmp_path])
        await bench.recover()
        assert sorted(bench.on_disk) == list(range(high))
        await bench.all_read()
        await bench.write(range(high, high + 10))
        await bench.tier.close()

    run(first())
    for turn in range(4):
        run(again(0, 100 + 10 * turn))
    assert used(tmp_path) <= SIZE


def test_a_space_that_is_named_during_the_scan_keeps_its_description(tmp_path: Path) -> None:
    """A saved block may wait for the tier while the scan finds that its space has no frames."""

    async def named() -> None:
        bench = Bench([tmp_path])
        await bench.recover()
        await bench.tier.close()

    async def used() -> None:
        bench = Bench([tmp_path])
        await bench.tier.writer.describe("t", SPACE, SPEC)
        await bench.recover()
        await bench.write(range(10))
        kill(bench)

    async def found() -> None:
        bench = Bench([tmp_path])
        await bench.recover()
        assert sorted(bench.on_disk) == list(range(10))
        await bench.tier.close()

    for work in (named, used, found):
        run(work())


@pytest.mark.parametrize("disks", [1, 2])
def test_a_full_tier_stays_within_its_size_and_keeps_the_newest_blocks(
    tmp_path: Path, disks: int
) -> None:
    folders = [tmp_path / str(n) for n in range(disks)]
    for folder in folders:
        folder.mkdir()

    async def work() -> None:
        bench = Bench(folders, SIZE * disks)
        await bench.recover()
        for first in range(0, 1600 * disks, 64):
            await bench.write(range(first, first + 64))
            assert sum(map(used, folders)) <= SIZE * disks
        await bench.all_read()
        assert len(bench.on_disk) * BLOCK > 0.4 * SIZE * disks
        newest = range(1600 * disks - 200, 1600 * disks)
        assert set(newest) <= set(bench.on_disk)
        await bench.tier.close()

    run(work())
    assert sum(map(used, folders)) <= SIZE * disks


def test_a_damaged_block_is_an_error_and_intact_blocks_are_read(tmp_path: Path) -> None:
    async def work() -> None:
        bench = Bench([tmp_path])
        await bench.recover()
        await bench.write(range(40))
        one, other = bench.on_disk[7], bench.on_disk[8]
        fd = bench.tier.table.segments[one.segment].fd
        path = bench.tier.table.segments[one.segment].path
        plain = os.open(path, os.O_RDWR)
        os.pwrite(plain, bytes(64), (one.page + one.header_pages) * PAGE + 1000)
        text = os.pread(plain, (other.header_pages * PAGE + BLOCK), bench.on_disk[9].page * PAGE)
        os.pwrite(plain, text, other.page * PAGE)
        os.fsync(plain)
        os.posix_fadvise(plain, 0, 0, os.POSIX_FADV_DONTNEED)
        assert fd != plain
        os.close(plain)
        assert await bench.read(7) == errno.EBADMSG
        assert await bench.read(8) == errno.EBADMSG
        assert await bench.read(9) == pattern(key(9), BLOCK)
        assert bench.tier.reader.is_on and not bench.tier.directories.faults, (
            "damage does not count as a disk fault"
        )
        os.truncate(path, PAGE)
        assert await bench.read(9) == errno.ENODATA
        await bench.tier.close()

    run(work())


def test_a_directory_in_use_is_refused_to_a_second_daemon(tmp_path: Path) -> None:
    async def work() -> None:
        bench = Bench([tmp_path])
        with pytest.raises(TierError, match=f"this daemon already, pid {os.getpid()}"):
            Bench([tmp_path])
        await bench.tier.close()
        await Bench([tmp_path]).tier.close()

    run(work())


def test_a_missing_directory_or_a_size_that_is_too_small_is_an_error(tmp_path: Path) -> None:
    async def work() -> None:
        with pytest.raises(TierError, match="create it"):
            Bench([tmp_path / "missing"])
        with pytest.raises(TierError, match="needed"):
            Bench([tmp_path], size=8 * MIB)

    run(work())


def test_a_segment_left_open_by_a_kill_is_sealed_at_the_next_start(tmp_path: Path) -> None:
    def footers() -> list[bool]:
        found = [recover(path, None, {}) for path in files_of(tmp_path)]
        return [one.sealed for one in found if one.head is not None]

    async def killed() -> None:
        bench = Bench([tmp_path])
        await bench.recover()
        await bench.write(range(40))
        kill(bench)

    async def again() -> None:
        bench = Bench([tmp_path])
        await bench.recover()
        assert sorted(bench.on_disk) == list(range(40))
        await bench.tier.writer.settled("t")
        while not all(recover(path, None, {}).sealed for path in open_at_kill):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await bench.all_read()
        await bench.tier.close()

    run(killed())
    assert not all(footers())
    found = {path: recover(path, None, {}) for path in files_of(tmp_path)}
    open_at_kill = [path for path, one in found.items() if one.head is not None and not one.sealed]
    run(again())
    assert all(footers())
    run(again())


def test_frames_after_one_torn_by_a_kill_are_not_found_after_later_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a frame whose write did not end, other frames may be complete and have the current epoch.
    The next life must not accept them."""

    async def first() -> None:
        bench = Bench([tmp_path])
        await bench.recover()
        await bench.write(range(10))
        one = bench.on_disk[5]
        kill(bench)
        with (tmp_path / "segments" / "t" / "000000").open("r+b") as file:
            file.seek((one.page + one.header_pages) * PAGE)
            file.write(bytes(PAGE))

    async def again(known: list[int], new: range) -> None:
        bench = Bench([tmp_path])
        await bench.recover()
        assert sorted(bench.on_disk) == known
        await bench.write(new)
        if new:
            kill(bench)
        else:
            await bench.tier.close()

    run(first())
    with monkeypatch.context() as early:  # the log ends before another segment is begun
        early.setattr(SegmentStore, "prepare", lambda _: None)
        run(again([0, 1, 2, 3, 4], range(0)))
    run(again([0, 1, 2, 3, 4], range(20, 21)))
    run(again([0, 1, 2, 3, 4, 20], range(0)))


def test_a_smaller_size_is_enforced_at_the_start(tmp_path: Path) -> None:
    async def work(size: int, low: int) -> int:
        bench = Bench([tmp_path], size=size)
        await bench.recover()
        assert used(tmp_path) <= size
        for first in range(low, low + 1200, 64):
            await bench.write(range(first, first + 64))
            assert used(tmp_path) <= size
        await bench.all_read()
        await bench.tier.close()
        return len(bench.on_disk)

    async def all_of_it() -> None:
        much = await work(SIZE, 0)
        little = await work(SIZE - 12 * MIB, 10_000)
        assert 0 < little < much

    run(all_of_it())
