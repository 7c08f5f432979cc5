"""Unexpected content of a cold directory, or an error of its file system, loses no other blocks."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtier.errors import TierError
from kvtier.frame import PAGE
from kvtier_daemon.claim import InUseError
from kvtier_daemon.tiers.cold import segment_files as files
from kvtier_daemon.tiers.cold.attached import StoreOptions, open_directory
from kvtier_daemon.tiers.cold.directory import ColdDirectory
from kvtier_daemon.tiers.cold.directory_lock import claim
from kvtier_daemon.tiers.cold.recovery import Recovered, recover
from kvtier_daemon.tiers.cold.segment_log import Stage
from kvtier_daemon.tiers.cold.segment_store import RETRY_GROW_S
from kvtier_daemon.tiers.cold.tier import ColdTier
from support import cold_bench
from support.cold_bench import (
    MIB,
    SEGMENT,
    SIZE,
    SPACE,
    SPEC,
    Bench,
    files_of,
    run,
    used,
)
from support.disks import mounted


def filled(folder: Path, count: int = 100) -> None:
    async def work() -> None:
        bench = Bench([folder])
        await bench.recover()
        await bench.write(range(count))
        await bench.tier.close()

    run(work())


def bytes_of(path: str) -> bytes:
    return Path(path).read_bytes()


def numbers_of(path: Path) -> set[int]:
    one = recover(path, None, {})
    return {int.from_bytes(one.rows[at : at + 32], "big") for at in range(0, len(one.rows), 128)}


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_an_unreadable_file_loses_its_blocks_and_counts_toward_the_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    filled(tmp_path)
    bad = files_of(tmp_path)[2]
    lost = numbers_of(bad)
    assert lost

    def refusing(path: Path, *rest: Any, **more: Any) -> Recovered:
        if path == bad:
            raise TierError(f"{path}: cannot be read: {os.strerror(code)}")
        return recover(path, *rest, **more)

    monkeypatch.setattr(files, "recover", refusing)

    async def work() -> None:
        bench = Bench([tmp_path])
        await bench.recover()
        assert bench.tier.directories.faults == 1
        assert set(bench.on_disk) == set(range(100)) - lost
        for first in range(1000, 1800, 64):
            assert not await bench.write(range(first, first + 64))
            assert used(tmp_path) <= SIZE
        await bench.all_read()
        await bench.tier.close()

    run(work())
    assert bad.exists()


def test_meaningless_rows_of_the_index_are_ignored(tmp_path: Path) -> None:
    filled(tmp_path)
    no_text = msgspec.msgpack.encode(SPEC).replace(SPEC.dtype.encode(), b"\xff" * len(SPEC.dtype))
    volume = ColdDirectory(tmp_path, None)
    volume.index.put(b"spaces", b"t\0" + b"x" * 32, b"no description")
    volume.index.put(b"spaces", b"t\0" + SPACE, b"\xc1")
    volume.index.put(b"spaces", b"t\0" + b"y" * 32, no_text)
    volume.close()

    async def work() -> None:
        bench = Bench([tmp_path])
        await bench.recover()
        assert sorted(bench.on_disk) == list(range(100)) and not bench.tier.directories.faults
        await bench.all_read()
        await bench.tier.close()

    run(work())


@pytest.mark.parametrize("segment", [MIB // 2, 2 * MIB])
def test_segments_of_another_size_are_readable_until_they_are_reclaimed(
    tmp_path: Path, segment: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The segment size follows `cold.size`. A change of it once deleted all blocks."""
    filled(tmp_path, 200)
    monkeypatch.setattr(cold_bench, "SEGMENT", segment)

    async def work() -> None:
        bench = Bench([tmp_path])
        await bench.recover()
        assert set(bench.on_disk) == set(range(200))
        await bench.all_read()
        for first in range(1000, 2200, 64):
            assert not await bench.write(range(first, first + 64))
            assert used(tmp_path) <= SIZE
        await bench.all_read()
        assert not set(bench.on_disk) & set(range(200)), "the oldest have left"
        await bench.tier.close()

    run(work())
    assert {path.stat().st_size for path in files_of(tmp_path)} == {segment}
    assert "have another size than cold.segment" in caplog.text


def test_a_removed_tenant_folder_is_created_again(tmp_path: Path) -> None:
    async def work() -> None:
        bench = Bench([tmp_path])
        await bench.recover()
        await bench.write(range(30))
        shutil.rmtree(tmp_path / "segments")
        assert not await bench.write(range(30, 130))
        await bench.all_read()
        assert files_of(tmp_path) and bench.tier.reader.is_on and not bench.tier.directories.faults
        await bench.tier.close()

    run(work())
    shutil.rmtree(tmp_path / "segments")
    filled(tmp_path, 10)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_creating_the_first_file_is_retried_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    made = ColdDirectory.make
    tries = 0

    def refusing(*_: object) -> int:
        nonlocal tries
        tries += 1
        raise OSError(code, os.strerror(code))

    async def work() -> None:
        bench = Bench([tmp_path])
        one = bench.first.stores["t"]
        now = 100.0
        one._clock = lambda: now
        monkeypatch.setattr(ColdDirectory, "make", refusing)
        await bench.recover()
        for _ in range(20):
            assert one.write([], lambda *_: None) == 0
            await asyncio.sleep(0.005)
        assert tries == 1 and os.strerror(code) in bench.tier.failure
        assert bench.tier.reader.is_on, "known blocks may be read"
        monkeypatch.setattr(ColdDirectory, "make", made)
        now += RETRY_GROW_S + 1
        assert not await bench.write(range(8))
        assert not bench.tier.failure
        await bench.all_read()
        await bench.tier.close()

    run(work())


def test_a_file_whose_creation_fails_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, at: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes // 2)
        raise OSError(errno.ENOSPC, "No space left on device")

    volume = ColdDirectory(tmp_path, None)
    monkeypatch.setattr(os, "posix_fallocate", full)
    path = volume.segment_path("t", 7)
    with pytest.raises(OSError, match="No space"):
        volume.make(path, MIB)
    assert not path.exists()
    volume.close()


def test_a_segment_has_its_room_on_a_file_system_that_can_not_allocate(tmp_path: Path) -> None:
    nbytes = MIB + 3 * PAGE
    with mounted(tmp_path, 16 * MIB, "ext3") as disk:
        disk.path.chmod(0o700)
        volume = ColdDirectory(disk.path, None)
        path = volume.segment_path("t", 7)
        fd = volume.make(path, nbytes)
        found = os.fstat(fd)
        assert found.st_size == nbytes <= found.st_blocks * 512
        os.close(fd)
        disk.fill()
        with pytest.raises(OSError, match="No space"):
            volume.make(path.with_name("000008"), nbytes)
        assert os.listdir(path.parent) == ["000007"]
        volume.close()


def test_a_segment_that_is_read_is_not_used_again_before_the_read_has_ended(tmp_path: Path) -> None:
    async def work() -> None:
        bench = Bench([tmp_path])
        await bench.recover()
        await bench.write(range(40))
        first = bench.tier.table.segments[bench.on_disk[0].segment]
        first.reading += 1  # a slow read is in progress
        before = bytes_of(first.path)
        write, refused = bench.tier.writer.write, 0

        def counted(*arguments: Any) -> int:
            nonlocal refused
            accepted = write(*arguments)
            refused += accepted == 0
            return accepted

        bench.tier.writer.write = counted  # type: ignore[method-assign]
        writing = asyncio.create_task(bench.write(range(40, 1000)))
        while first.stage is not Stage.LEAVING:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        refused = 0
        while refused < 50:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        assert first.stage is Stage.LEAVING and not writing.done()
        assert bytes_of(first.path) == before
        first.reading -= 1
        bench.first.stores["t"].free_if_unused(first)
        assert not await writing
        assert first.head is not None and bytes_of(first.path) != before
        await bench.all_read()
        await bench.tier.close()

    run(work())


def test_a_freed_segment_has_no_head(tmp_path: Path) -> None:
    """A start would otherwise find its frames, also those that were forgotten meanwhile."""

    async def work() -> None:
        bench = Bench([tmp_path])
        await bench.recover()
        at, log = 0, bench.first.stores["t"].log
        while not bench.lost or not log.free:
            assert at < 5000
            await bench.write(range(at, at + 8))
            at += 8
            await asyncio.sleep(0.01)
        for segment in log.free:
            assert bytes_of(segment.path)[:PAGE] == bytes(PAGE)
            assert recover(Path(segment.path), None, {}).head is None
        await bench.tier.close()

    run(work())


def test_segments_of_a_tenant_that_is_not_configured_are_removed(tmp_path: Path) -> None:
    filled(tmp_path)
    shutil.copytree(tmp_path / "segments" / "t", tmp_path / "segments" / "gone")
    filled(tmp_path)
    assert not any((tmp_path / "segments" / "gone").iterdir())
    assert files_of(tmp_path)


def test_files_that_are_not_segments_are_kept(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / "segments" / "t" / "notes.txt").write_text("mine")
    (tmp_path / "segments" / "t" / "000099").mkdir()

    async def work() -> None:
        bench = Bench([tmp_path])
        await bench.recover()
        assert sorted(bench.on_disk) == list(range(100)) and not bench.tier.directories.faults
        await bench.tier.close()

    run(work())
    assert (tmp_path / "segments" / "t" / "notes.txt").read_text() == "mine"


def test_no_name_of_a_file_keeps_new_segments_from_being_written(tmp_path: Path) -> None:
    """A segment is named by 6 to 9 digits; the number of a new one is above those of the others."""
    filled(tmp_path)
    folder = tmp_path / "segments" / "t"
    copies = "20260504101112", "1000000000", "\u0661\u0662\u0663\u0664\u0665\u0666", "17"
    last = "999999999"  # a name that a segment can have
    for name in (*copies, last):
        shutil.copy(folder / "000000", folder / name)

    async def work() -> None:
        bench = Bench([tmp_path])
        await bench.recover()
        assert sorted(bench.on_disk) == list(range(100))
        before = len(files_of(tmp_path))
        at = 100
        while len(files_of(tmp_path)) == before:
            assert at < 5000
            assert not await bench.write(range(at, at + 8))
            at += 8
        assert not bench.tier.directories.faults
        await bench.tier.close()

    run(work())
    assert {path.name for path in folder.iterdir()} >= set(copies)
    assert max(set(os.listdir(folder)) - {*copies, last}) < "000100"


def test_a_tenant_above_its_share_loses_segments_before_another_gets_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, most = 48 * MIB, 31
    there = tmp_path / "segments" / "b"
    there.mkdir(parents=True)
    for number in range(most):
        with (there / f"{number:06d}").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, SEGMENT)
    made, beside = ColdDirectory.make, []

    def making(volume: ColdDirectory, path: Path, nbytes: int) -> int:
        beside.append(sum(1 for _ in (tmp_path / "segments").glob("*/*")))
        return made(volume, path, nbytes)

    async def nothing(*_: object) -> None: ...

    async def work() -> None:
        loop = asyncio.get_running_loop()
        tier = ColdTier(
            loop, [open_directory(tmp_path, size)], StoreOptions(size, SEGMENT, {"a": 0.8, "b": 0.2}),
            lambda *_: None,
        )  # fmt: skip
        await tier.directories.recover(nothing)
        while not tier.directories.attached[0].stores["a"].log.open:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await tier.close()

    monkeypatch.setattr(ColdDirectory, "make", making)
    run(work())
    assert beside and max(beside) < most


def test_a_directory_that_is_configured_twice_is_no_directory_of_another_daemon(
    tmp_path: Path,
) -> None:
    (tmp_path / "link").symlink_to("one")
    (tmp_path / "one").mkdir(mode=0o700)
    fds = claim(tmp_path / "one", os.getpid())[:2]
    try:
        with pytest.raises(InUseError, match="link is used by this daemon already"):
            claim(tmp_path / "link", os.getpid())
        with pytest.raises(InUseError, match=f"used by another daemon, pid {os.getpid()}"):
            claim(tmp_path / "link", os.getpid() + 1)
    finally:
        for fd in fds:
            os.close(fd)


def test_a_full_disk_without_room_for_the_lock_text_is_locked_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    volume = ColdDirectory(tmp_path, SIZE)
    assert "kvtier.lock: No space left on device" in caplog.text
    with pytest.raises(TierError, match="used by another daemon"):
        ColdDirectory(tmp_path, SIZE)
    assert volume.close()


def test_a_size_larger_than_the_file_system_is_logged_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path)
    there = sum(path.stat().st_blocks * 512 for path in tmp_path.glob("segments/*/*"))
    free = os.statvfs(tmp_path)
    room = there + free.f_frsize * free.f_bavail
    for size, said in ((SIZE, False), (room * 2, True)):
        caplog.clear()
        volume = open_directory(tmp_path, size)
        assert ("less than its part of cold.size" in caplog.text) == said
        assert said == (volume.lacks_bytes() > 0)
        assert volume.close()


def test_existing_segments_count_as_available_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path)
    volume = open_directory(tmp_path, SIZE)
    there = sum(path.stat().st_blocks * 512 for path in tmp_path.glob("segments/*/*"))
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((PAGE,) * 2 + (0,) * 8))
    assert there and volume.lacks_bytes() == volume.segments_bytes - there
    assert volume.close()
