"""A directory of the cold tier is unusable at the start, or its file system fails: the daemon uses the
others, uses this directory again without a restart, and ends in time."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest

from e2e.test_cold_tier import CHAIN, save
from faults.test_cold_disks import Serve, Served, serving
from support.disks import PATIENCE_S, Mounted, mounted
from support.power import PoweredDisk, image, powered

MIB = 1 << 20
LONG = bool(os.environ.get("KVTIER_FAULTS"))
NBYTES = {"ext4": 128 * MIB, "xfs": 330 * MIB}
HASTE = {
    "AGAIN_S": 0.2,
    "LONGEST_AGAIN_S": 0.4,
    "LOCATION_S": 0.2,
    "LOCATION_FAILED_S": 0.2,
    "OPEN_S": 2.0,
}
END_S = 25.0  # less than TimeoutStopSec of the unit

Disk = Callable[[str], Mounted]
Device = Callable[[str], PoweredDisk]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """Creates a file system of this type at each call."""
    with ExitStack() as stack:
        names = count()

        def make(kind: str) -> Mounted:
            folder = tmp_path / f"{kind}-{next(names)}"
            folder.mkdir()
            return stack.enter_context(mounted(folder, NBYTES[kind], kind))

        yield make


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    """Creates a file system of this type on a block device whose requests can fail."""
    with ExitStack() as stack:

        def make(kind: str) -> PoweredDisk:
            return stack.enter_context(powered(tmp_path, kind, image(tmp_path, kind)))

        yield make


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    yield from serving(tmp_path)


def other(tmp_path: Path, alone: bool) -> list[Path]:
    """A second directory without faults, unless the faulty one is alone."""
    if alone:
        return []
    (tmp_path / "other").mkdir()
    return [tmp_path / "other"]


def serves(one: Served, alone: bool) -> None:
    """The memory serves, and a disk without faults does."""
    save(one.client, 50)
    assert one.load(50) == CHAIN
    if not alone:
        one.until_written(count(60))


def is_well(one: Served) -> bool:
    cold = one.cold
    return not cold["failure"] and cold["on"] and cold["state"] == "on"


def ends(one: Served, codes: tuple[int, ...] = (0,)) -> None:
    one.client.close()
    one.daemon.process.terminate()
    began = time.monotonic()
    assert one.daemon.process.wait(60) in codes, one.log()
    assert time.monotonic() - began < END_S


def cases(*faults: str, sampled: int | None = None) -> list[object]:
    """Every fault on both file systems, with and without another directory; without KVTIER_FAULTS=1 one
    case of each of the first `sampled` faults on XFS, and one of the first fault on ext4."""
    found = []
    for number, fault in enumerate(faults):
        samples = {("xfs", number % 2 == 0)} if number < (sampled or len(faults)) else set()
        if number == 0:
            samples.add(("ext4", False))
        for kind in ("xfs", "ext4"):
            for alone in (True, False):
                sample = (kind, alone) in samples
                mark = pytest.mark.skipif(not (LONG or sample), reason="KVTIER_FAULTS=1")
                name = f"{fault}, {kind}, {'the only one' if alone else 'one of two'}"
                found.append(pytest.param(fault, kind, alone, id=name, marks=mark))
    return found


@pytest.mark.parametrize("fault, kind, alone", cases("shut down"))
def test_a_file_system_that_shuts_down_is_detached_and_used_again(
    tmp_path: Path,
    disk: Disk,
    serve: Serve,
    fault: str,
    kind: str,
    alone: bool,
) -> None:
    broken = disk(kind)
    one = serve([broken.path, *other(tmp_path, alone)], **HASTE)
    one.save(0, 1, 2, 3)
    broken.shut_down()
    save(one.client, 10)
    one.until(lambda: str(broken.path) in one.cold["failure"], "not said")
    serves(one, alone)
    one.until(lambda: "it can be unmounted" in one.log(), "its files stay open")
    broken.unmount()
    broken.mount()
    one.until(lambda: is_well(one), "it is not used again")
    assert one.daemon.process.poll() is None
    one.until_written(count(80))
    for chain in (0, 1, 2, 3, 10, 50):
        assert one.load(chain) in range(CHAIN + 1)
    assert one.load(2) == CHAIN or not alone, "its segments are found again"
    ends(one)


# The requests of the block device that fail.
FAILING = {
    "all requests fail": ("read", "write", "flush"),
    "reads fail": ("read",),
    "writes fail": ("write",),
    "flushes fail": ("flush",),
}


def uses_disk(one: Served, chain: int) -> None:
    """Write a chain to disk, and read chains from it."""
    save(one.client, chain)
    for earlier in range(4):
        one.load(earlier, seconds=0.1)


def can_be_written(folder: Path) -> bool:
    """False after an error of the file system's log: from then on the file system refuses all writes."""
    try:
        with (folder / "probe").open("wb") as file:
            file.write(b"probe")
            os.fsync(file.fileno())
        (folder / "probe").unlink()
    except OSError as error:
        assert error.errno in (errno.EIO, errno.EROFS), error
        return False
    return True


def mount_again(one: Served, broken: PoweredDisk, kind: str) -> None:
    """XFS shuts down, and the daemon closes its files. ext4 becomes read-only, and an operator switches the
    tier off meanwhile."""
    if kind == "xfs":
        one.until(lambda: "it can be unmounted" in one.log(), "its files stay open")
    else:
        one.until(lambda: "Read-only file system" in one.cold["failure"], "it says another reason")
        one.client.tier("cold", "off")
        one.until(lambda: one.cold["state"] == "off", "it is not off")
    began = time.monotonic()
    broken.restore()
    assert time.monotonic() - began < PATIENCE_S / 2, "the unmount waits for files that are open"
    if kind == "ext4":
        one.client.tier("cold", "on")


@pytest.mark.parametrize("fault, kind, alone", cases(*FAILING, sampled=1))
def test_a_block_device_with_errors_is_reported_and_used_again(
    tmp_path: Path,
    device: Device,
    serve: Serve,
    fault: str,
    kind: str,
    alone: bool,
) -> None:
    broken = device(kind)
    one = serve([broken.path, *other(tmp_path, alone)], **HASTE)
    one.save(0, 1, 2, 3)
    with broken.failing(*FAILING[fault]):
        chains = count(10)
        one.until(lambda: uses_disk(one, next(chains)) or bool(one.cold["failure"]), "not said")
        assert str(broken.path) in one.cold["failure"]
        serves(one, alone)
    assert one.daemon.process.poll() is None
    if fault == "reads fail":
        assert can_be_written(broken.path)
    elif not can_be_written(broken.path):
        mount_again(one, broken, kind)
    one.until(lambda: is_well(one), "it is not used again")
    assert one.daemon.process.poll() is None
    one.until_written(count(80))
    found = [one.load(chain) for chain in (0, 1, 2, 3, 10, 50)]
    assert found[:4] == [CHAIN] * 4 or not alone, "its segments are found again"
    ends(one)


@pytest.mark.parametrize("fault, kind, alone", cases("missing", "read-only", "hung", "shut down"))
def test_a_directory_that_is_unusable_at_the_start_is_used_later(
    tmp_path: Path,
    disk: Disk,
    serve: Serve,
    fault: str,
    kind: str,
    alone: bool,
) -> None:
    broken = disk(kind)
    folders = [broken.path, *other(tmp_path, alone)]
    one = serve(folders, **HASTE)
    one.save(0, 1, 2, 3)
    assert one.end() == 0
    with ExitStack() as until:
        if fault == "missing":
            # It comes back with its file system: before a mount, a daemon may use the directory.
            folder = broken.path.parent
            away = folder.rename(folder.with_name("away"))
            until.callback(away.rename, folder)
        elif fault == "read-only":
            broken.unmount()
            broken.mount("ro")
            until.callback(broken.mount, "remount", "rw")
        elif fault == "hung":
            until.enter_context(broken.frozen())
        else:
            broken.shut_down()
            until.callback(broken.mount)
            until.callback(broken.unmount)
        one.start(is_there=False)
        one.until(lambda: str(broken.path) in one.cold["failure"], "not said")
        serves(one, alone)
        ends(one)
        one.start(is_there=False)
        serves(one, alone)
    one.until(lambda: is_well(one), "it is not used")
    one.until(lambda: one.load(2) == CHAIN or not alone, "what was there is not found")
    for chain in (0, 1, 3, 50):
        assert one.load(chain) in range(CHAIN + 1)
    one.until_written(count(80))
    ends(one)


def arena_of(pid: int) -> set[str]:
    """The mappings of the arena in all threads of a process, even if its main thread has ended."""
    maps = [task.joinpath("maps").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return {line.split()[-2] for text in maps for line in text.splitlines() if "kvtier-def" in line}


@pytest.mark.parametrize("engine", ["threads", "io_uring"])
def test_a_daemon_whose_end_is_blocked_by_a_disk_does_not_block_the_next_one(
    tmp_path: Path,
    disk: Disk,
    serve: Serve,
    engine: str,
) -> None:
    broken = disk("xfs")
    one = serve([broken.path], engine, END_S=0.5, CLOSE_S=0.5, **HASTE)
    one.save(0, 1, 2)
    first = one.daemon
    assert any(
        "memfd" in line for line in Path(f"/proc/{first.process.pid}/maps").read_text().split()
    )
    with broken.frozen():
        save(one.client, 10)
        one.until(lambda: "no request completed" in one.cold["failure"], "not said")
        one.client.close()
        first.process.terminate()
        began = time.monotonic()
        while "ending without waiting" not in one.log() or Path(first.socket).exists():
            assert time.monotonic() - began < END_S, one.log()
            time.sleep(0.02)
        one.start(is_there=False)
        serves(one, True)
        assert "is used by another daemon" in one.cold["failure"] or "opened" in one.cold["failure"]
        while Path(f"/proc/{first.process.pid}/task").exists() and arena_of(first.process.pid):
            assert time.monotonic() - began < END_S, arena_of(first.process.pid)
            time.sleep(0.02)
    assert first.process.wait(60) == 75
    one.until(lambda: is_well(one), "it is not used")
    assert [one.load(chain) for chain in (0, 1, 50)] == [CHAIN] * 3
    ends(one)
