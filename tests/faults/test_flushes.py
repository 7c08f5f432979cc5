"""Writes that are reported as complete were flushed before, with both engines: observed below the
system calls."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels.test_disk import ENGINES, PAGE
from kvtier_daemon.tiers.cold.disk import DirectoryDisk
from support.disks import Shim
from support.noted import Noted, noted

LONGEST_S = 60.0


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Noted]:
    with noted(tmp_path) as one:
        yield one


async def written(file: Noted, engine: str, count: int) -> list[tuple[int, list[object]]]:
    """Write pages to the file one at a time. Returns the result of each, and the requests before it."""
    loop, results = asyncio.get_running_loop(), []
    drive = DirectoryDisk(loop, "noted", engine, time.monotonic)
    fd = os.open(file.path, os.O_RDWR | os.O_DIRECT)
    try:
        for number in range(count):
            over: asyncio.Future[int] = loop.create_future()
            text = bytes([number + 1]) * PAGE

            def ended(code: int, _: bytes | None, over: asyncio.Future[int] = over) -> None:
                results.append((code, list(file.requests)))
                over.set_result(code)

            drive.write_text(fd, number * PAGE, text, ended)
            await asyncio.wait_for(over, LONGEST_S)
    finally:
        assert await drive.close(LONGEST_S)
        os.close(fd)
    return results


@pytest.mark.parametrize("engine", ENGINES)
def test_a_write_completes_after_its_flush(file: Noted, engine: str) -> None:
    results = asyncio.run(written(file, engine, 3))
    one, two, three = ((number * PAGE, PAGE) for number in range(3))
    flushed = [one, "flush"], [one, "flush", two, "flush"]
    assert results == [(0, flushed[0]), (0, flushed[1]), (0, [*flushed[1], three, "flush"])]
    assert file.text == b"".join(bytes([number + 1]) * PAGE for number in range(3))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_flush_that_fails_fails_the_write(file: Noted, engine: str) -> None:
    file.flush_error = errno.EIO
    results = asyncio.run(written(file, engine, 1))
    assert results == [(errno.EIO, [(0, PAGE), "flush"])]


INDEX = """
import select, sys
from pathlib import Path
from kvtier_daemon.tiers.cold.index import Index

index = Index(Path(sys.argv[1]), 64 << 20)
print("open", flush=True)
sys.stdin.readline()
index.put(b"segments", b"a", b"")
index.flush(7)
while not (done := list(index.done())):
    select.select([index.event_fd], [], [])
print(done, flush=True)
"""


def test_an_index_whose_flush_fails_confirms_no_change(tmp_path: Path) -> None:
    folder = tmp_path / "index"
    folder.mkdir()
    shim = Shim(tmp_path, folder)
    child = subprocess.Popen(
        [sys.executable, "-c", INDEX, str(folder)],
        env=shim.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdin is not None and child.stdout is not None
    try:
        assert child.stdout.readline() == "open\n"
        with shim.failing(errno.EIO, "sync"):
            child.stdin.write("\n")
            child.stdin.flush()
            assert select.select([child.stdout], [], [], LONGEST_S)[0]
            assert "Input/output error" in child.stdout.readline()
        assert shim.struck("sync")
    finally:
        child.kill()
        child.communicate()
        shim.close()
