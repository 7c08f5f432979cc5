"""The watchdog's probe: it can run indefinitely, and it fails after a fault."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.errors import TierError
from kvtier_daemon import probe
from kvtier_daemon.catalog import Catalog
from kvtier_daemon.probe import Probe
from kvtier_daemon.tiers.cold import disk_probe
from kvtier_daemon.tiers.cold.directory import open_direct
from kvtier_daemon.tiers.cold.disk import DirectoryDisk
from kvtier_daemon.tiers.cold.disk_probe import DiskProbe


def test_a_probed_block_is_read_back_repeatedly() -> None:
    one = Probe()
    one.put_and_get()
    memory = one._catalog.blocks.memory_bytes()
    for _ in range(500):
        one.put_and_get()
    assert one._catalog.blocks.memory_bytes() == memory
    assert one._catalog.counts()["blocks"]["ready"] == 0


def test_a_block_that_is_read_back_changed_fails_the_probe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, commit = Probe(), Catalog.commit

    def spoil(*arguments: Any) -> bytes:
        memoryview(one._memory)[:] = bytes(probe.EXTENT_BYTES)
        return commit(*arguments)

    monkeypatch.setattr(Catalog, "commit", spoil)
    with pytest.raises(TierError, match="other bytes than it saved"):
        one.put_and_get()
    one = Probe()
    monkeypatch.setattr(Catalog, "commit", lambda *_: b"")
    with pytest.raises(TierError, match="did not find its block"):
        one.put_and_get()


opening = open_direct  # which the tests replace


class Disks:
    def __init__(self, path: Path, drive: DirectoryDisk) -> None:
        directory = SimpleNamespace(path=path, open=lambda *arguments: opening(*arguments))
        attached = SimpleNamespace(directory=directory, disk=drive)
        self.directories = SimpleNamespace(attached=[attached])


def probed(folder: Path, work: Callable[[DiskProbe, Any, DirectoryDisk], None]) -> DirectoryDisk:
    async def run() -> DirectoryDisk:
        drive = DirectoryDisk(asyncio.get_running_loop(), "it", "threads", time.monotonic)
        one, disks = DiskProbe(), Disks(folder, drive)
        work(one, disks, drive)
        one.begin(disks)  # type: ignore[arg-type]
        assert one._probing == {drive}
        one.begin(disks)  # type: ignore[arg-type]
        async with asyncio.timeout(60):
            while one._probing:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await drive.close(5)
        return drive

    return asyncio.run(run())


def test_a_probed_page_is_read_back_and_leaves_no_file(tmp_path: Path) -> None:
    drive = probed(tmp_path, lambda *_: None)
    assert (drive.faults, drive.reads.good, drive.writes.good) == (0, 1, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_does_not_accept_the_page_has_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(bytes(4096))
    monkeypatch.setitem(
        globals(), "opening", lambda *_: os.open(tmp_path / "file", os.O_RDONLY | os.O_CLOEXEC)
    )
    drive = probed(tmp_path, lambda *_: None)
    assert drive.faults == 1 and "the disk probe failed" in drive.writes.failure


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.ETIMEDOUT])
def test_a_full_disk_has_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Segments have reserved space: a full file system does not switch a tier off."""

    def work(one: DiskProbe, disks: Any, drive: DirectoryDisk) -> None:
        monkeypatch.setattr(drive, "write_text", lambda fd, at, text, over: over(code, None))

    drive = probed(tmp_path, work)
    assert not drive.faults and not drive.failure


def test_a_page_that_is_read_back_changed_is_a_read_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = iter([b"a" * 4096])
    monkeypatch.setattr(disk_probe.secrets, "token_bytes", lambda _: next(pages))

    def work(_: DiskProbe, __: Any, drive: DirectoryDisk) -> None:
        read = drive.read_text

        def other(fd: int, at: int, nbytes: int, over: Any) -> None:
            read(fd, at, nbytes, lambda code, text: over(code, b"b" + (text or b"")[1:]))

        monkeypatch.setattr(drive, "read_text", other)

    drive = probed(tmp_path, work)
    assert drive.faults == 1 and "the disk probe failed" in drive.reads.failure


def test_a_probe_file_created_after_the_disk_was_closed_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the tier is switched off meanwhile: the file's descriptor number is soon reused."""
    opens, may_continue = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> int:
        opens.set()
        assert may_continue.wait(60)
        return open_direct(*arguments)

    monkeypatch.setitem(globals(), "opening", slow)

    async def run() -> None:
        drive = DirectoryDisk(asyncio.get_running_loop(), "it", "threads", time.monotonic)
        one = DiskProbe()
        one.begin(Disks(tmp_path, drive))  # type: ignore[arg-type]
        await asyncio.to_thread(opens.wait)
        closing = asyncio.create_task(drive.close(5))
        while not drive.is_over:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        may_continue.set()
        assert await closing
        async with asyncio.timeout(60):
            while one._probing:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    asyncio.run(run())
    held = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not [path for path in held if path.is_relative_to(tmp_path)]
