"""Forgotten blocks stay forgotten if the index is lost, or if any file is copied or restored."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from daemon.tiers.test_forget import Tenant, after_a_start
from kvtier.errors import TierError
from kvtier_daemon.tiers.cold.segment import PAGES_EACH, TombstonePages, first_frame
from kvtier_daemon.tiers.cold.segment_log import Stage
from support.cold_bench import SIZE, Bench, files_of, run

PAGE = 4096
LONG = bool(os.environ.get("KVTIER_FAULTS"))


async def forgotten_on_disk(folder: Path, before: Callable[[], None] = lambda: None) -> None:
    """Eight blocks in a sealed segment, of which 3 and 5 were forgotten with confirmation. `before`
    runs ahead of the forget."""
    tenant = Tenant(folder)
    await tenant.start()
    await tenant.sealed(8)
    before()
    assert await tenant.forget(3, 5) == ""
    await tenant.kill()


def delete_index(folder: Path) -> None:
    shutil.rmtree(folder / "index")


def zero_index(folder: Path) -> None:
    data = folder / "index" / "data.mdb"
    data.write_bytes(bytes(data.stat().st_size))


@pytest.mark.parametrize("damage", [delete_index, zero_index])
def test_forgotten_blocks_stay_forgotten_without_the_index(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        await forgotten_on_disk(tmp_path)
        damage(tmp_path)
        caplog.clear()
        assert await after_a_start(tmp_path, range(8)) == [0, 1, 2, 4, 6, 7]
        assert "index" in caplog.text, "the log reports the damaged index"
        assert await after_a_start(tmp_path, range(8)) == [0, 1, 2, 4, 6, 7]

    with caplog.at_level(logging.WARNING):
        run(work())


def test_forgotten_blocks_stay_forgotten_with_an_index_older_than_the_segments(
    tmp_path: Path,
) -> None:
    cold, old = tmp_path / "cold", tmp_path / "old"
    cold.mkdir()

    async def work() -> None:
        await forgotten_on_disk(cold, lambda: (shutil.copytree(cold / "index", old), None)[1])
        shutil.rmtree(cold / "index")
        old.rename(cold / "index")
        assert await after_a_start(cold, range(8)) == [0, 1, 2, 4, 6, 7]

    run(work())


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_copy_of_a_segment_file_is_refused(
    tmp_path: Path, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    copy = tmp_path / "segments" / "t" / "000070"

    def duplicate() -> None:
        shutil.copyfile(copy.with_name("000000"), copy)

    async def work() -> None:
        if when == "before":
            await forgotten_on_disk(tmp_path, duplicate)
        else:
            await forgotten_on_disk(tmp_path)
            duplicate()
        assert await after_a_start(tmp_path, range(8)) == [0, 1, 2, 4, 6, 7]
        assert "000070" in caplog.text and "copy of segment 0" in caplog.text

    with caplog.at_level(logging.WARNING):
        run(work())


def test_a_copy_of_a_segment_that_was_freed_since_is_refused(tmp_path: Path) -> None:
    original = tmp_path / "segments" / "t" / "000000"

    async def work() -> None:
        await forgotten_on_disk(
            tmp_path, lambda: (shutil.copyfile(original, original.with_name("000070")), None)[1]
        )
        with original.open("r+b") as file:
            file.write(bytes(PAGE))
        assert await after_a_start(tmp_path, range(8)) == []

    run(work())


@pytest.mark.parametrize("first", ["one", "other"])
def test_a_segment_of_another_directory_is_refused(
    tmp_path: Path, first: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The copy has the name that its head contains, and was made before the forget."""
    one, other = tmp_path / "one", tmp_path / "other"

    def duplicate() -> None:
        shutil.copytree(one / "segments", other / "segments")

    async def work() -> None:
        one.mkdir()
        await forgotten_on_disk(one, duplicate)
        folders = [one, other] if first == "one" else [other, one]
        tenant = Tenant(tmp_path, bench=Bench(folders, 2 * SIZE))
        await tenant.start()
        assert [at for at in range(8) if tenant.knows(at)] == [0, 1, 2, 4, 6, 7]
        assert f"{other}/segments/t/000000: it was written under another" in caplog.text
        await tenant.kill()

    with caplog.at_level(logging.WARNING):
        run(work())


def test_a_copy_of_a_directory_is_refused(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"

    async def work() -> None:
        one.mkdir()
        await forgotten_on_disk(one, lambda: (shutil.copytree(one, other), None)[1])
        with pytest.raises(TierError, match=f"{other} is a copy of {one}"):
            Bench([one, other], 2 * SIZE)
        assert await after_a_start(one, range(8)) == [0, 1, 2, 4, 6, 7]

    run(work())


@pytest.mark.parametrize("at", range(0, PAGE, 16 if LONG else 512))
def test_a_damaged_tombstone_page_drops_the_frames_it_covers(tmp_path: Path, at: int) -> None:
    async def work() -> None:
        await forgotten_on_disk(tmp_path)
        (path,) = (path for path in files_of(tmp_path) if path.name == "000000")
        text = bytearray(path.read_bytes())
        text[PAGE + at] ^= 1
        path.write_bytes(text)
        assert await after_a_start(tmp_path, range(8)) == []

    run(work())


def test_a_forget_whose_tombstones_can_not_be_written_fails_and_is_retried(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        tenant = Tenant(tmp_path)
        await tenant.start()
        shelf, _ = await tenant.sealed(8)
        write_text, failing = shelf.disk.write_text, [True]

        def write(fd: int, at: int, text: bytes, over: Any) -> None:
            if failing and at == PAGE:
                over(errno.EIO, None)
            else:
                write_text(fd, at, text, over)

        shelf.disk.write_text = write  # type: ignore[method-assign]
        said = await tenant.forget(3)
        assert "cannot write its tombstones" in said and "Input/output error" in said
        failing.clear()
        assert await tenant.forget(5) == "", "failed changes are written with it"
        await tenant.kill()
        assert await after_a_start(tmp_path, range(8)) == [0, 1, 2, 4, 6, 7]

    run(work())


def test_tombstones_do_not_apply_to_the_next_use_of_a_segment(tmp_path: Path) -> None:
    nbytes = 1 << 30
    marks = TombstonePages(nbytes)
    pages = [first_frame(nbytes) // PAGE, PAGES_EACH - 1, PAGES_EACH, nbytes // PAGE - 1]
    for page in pages:
        marks.add(page)
    assert marks.dirty == {0, 1, marks.count - 1}
    text = marks.encode(7, 0, marks.count)
    assert len(text) == marks.count * PAGE == first_frame(nbytes) - PAGE
    same, damaged = TombstonePages.decode(text, 7, nbytes)
    assert not damaged and [page for page in pages if page in same] == pages
    assert pages[0] + 1 not in same and len(same) == 4
    _, damaged = TombstonePages.decode(text, 8, nbytes)
    assert damaged == list(range(marks.count))
    swapped = text[PAGE : 2 * PAGE] + text[:PAGE] + text[2 * PAGE :]
    assert TombstonePages.decode(swapped, 7, nbytes)[1] == [0, 1]


def test_many_forgets_at_once_write_each_page_of_tombstones_once(tmp_path: Path) -> None:
    async def work() -> None:
        tenant = Tenant(tmp_path)
        await tenant.start()
        shelf, _ = await tenant.sealed(8)
        writes: list[int] = []
        write_text = shelf.disk.write_text

        def write(fd: int, at: int, text: bytes, over: Any) -> None:
            writes.append(at)
            write_text(fd, at, text, over)

        shelf.disk.write_text = write  # type: ignore[method-assign]
        assert await asyncio.gather(*(tenant.forget(at) for at in range(8))) == [""] * 8
        assert writes.count(PAGE) <= 2, "the first one, and all others together"
        await tenant.kill()
        assert await after_a_start(tmp_path, range(8)) == []

    run(work())


def test_a_tombstone_in_a_segment_that_is_being_freed_blocks_nothing(tmp_path: Path) -> None:
    async def work() -> None:
        tenant = Tenant(tmp_path)
        await tenant.start()
        shelf, first = await tenant.sealed(8)
        write_text, held = shelf.disk.write_text, []

        def write(fd: int, at: int, text: bytes, over: Any) -> None:
            if fd == first.fd and not any(text):
                held.append(lambda: write_text(fd, at, text, over))
            else:
                write_text(fd, at, text, over)

        shelf.disk.write_text = write  # type: ignore[method-assign]
        assert shelf.log.reclaim() is first
        tenant.mover.reclaimer.reclaim(shelf, first)
        while not held:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert first.stage is Stage.FREEING
        shelf.tombstones.add(first, 5)
        shelf.tombstones.write()
        assert first.idle, "its head is being zeroed: that is enough"
        held.pop()()
        while first.stage is Stage.FREEING:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert await shelf.tombstones.flush() == ""
        await tenant.kill()

    run(work())
