"""Mappings, their views, generations and the prefaulter."""

import errno
import gc
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading

import numpy as np
import pytest

import kvtier_kernels as kernels
from models import kernels as reference

MIB = 1 << 20


def mapped() -> str:
    with open("/proc/self/maps") as maps:
        return maps.read()


def test_mapping_shares_the_file(make_mapping):
    fd = os.memfd_create("shared")
    os.ftruncate(fd, 8192)
    one, two = kernels.Mapping(fd, 8192, True), kernels.Mapping(fd, 4096, False)
    memoryview(one)[7] = 42
    assert memoryview(two)[7] == 42 and os.pread(fd, 1, 7) == b"*"
    os.close(fd)
    memoryview(one)[8] = 43
    assert memoryview(two)[8] == 43
    assert (one.size, two.size, one.writable, two.writable) == (8192, 4096, True, False)
    assert one.address % 4096 == 0 and len(memoryview(one)) == 8192


def test_unmapping_does_not_block_other_threads():
    """Other threads continue meanwhile."""
    fd = os.memfd_create("large")
    os.ftruncate(fd, 128 * MIB)
    steps, ending = [0], threading.Event()

    def count() -> None:
        while not ending.is_set():
            steps[0] += 1

    counting = threading.Thread(target=count)
    counting.start()
    for _ in range(50):
        mapping = kernels.Mapping(fd, 128 * MIB, True)
        mapping.populate()
        before = steps[0]
        del mapping
        if went_on := steps[0] - before > 100:
            break
    ending.set()
    counting.join()
    os.close(fd)
    assert went_on


def test_mapping_lives_as_long_as_its_views(packed):
    fd = os.memfd_create("outlived")
    os.ftruncate(fd, MIB)
    mapping = kernels.Mapping(fd, MIB, True)
    os.close(fd)
    [view] = kernels.views([mapping], packed((0, 4096)), 4096, True)
    del mapping
    gc.collect()
    assert "outlived" in mapped()
    view[:4] = b"kept"
    inner = np.frombuffer(view, np.uint8)
    assert view.obj.size == MIB
    del view
    assert bytes(inner[:4]) == b"kept"
    del inner
    gc.collect()
    assert "outlived" not in mapped()


def test_mapping_refuses_a_file_that_is_too_short():
    fd = os.memfd_create("short")
    os.ftruncate(fd, 4096)
    with pytest.raises(ValueError, match="4096 bytes, fewer"):
        kernels.Mapping(fd, 4097, False)
    with pytest.raises(ValueError, match="size"):
        kernels.Mapping(fd, 0, False)
    os.close(fd)
    with pytest.raises(OSError) as error:
        kernels.Mapping(fd, 4096, False)
    assert error.value.errno == errno.EBADF


def test_mapping_refuses_to_write_through_a_read_only_descriptor(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    fd = os.open(path, os.O_RDONLY)
    with pytest.raises(PermissionError):
        kernels.Mapping(fd, 4096, True)
    assert bytes(kernels.Mapping(fd, 4096, False)) == bytes(4096)
    os.close(fd)


def test_read_only_mapping_gives_read_only_views(make_mapping, packed):
    mapping = make_mapping(8192, writable=False, content=b"abc")
    assert memoryview(mapping).readonly
    [view] = kernels.views([mapping], packed((0, 0)), 3, False)
    assert view.readonly and bytes(view) == b"abc"
    with pytest.raises(TypeError):
        view[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        kernels.views([mapping], packed((0, 0)), 3, True)
    with pytest.raises(ValueError, match="dst"):
        kernels.copy(mapping, bytes(8192))


def test_populate_faults_every_page_in(make_mapping):
    mapping = make_mapping(3 * MIB)
    if not mapping.populate():
        pytest.skip("this kernel has no MADV_POPULATE_WRITE")
    with open("/proc/self/smaps") as smaps:
        text = smaps.read()
    entry = text[text.index(f"{mapping.address:x}-") :]
    assert "Rss:                3072 kB" in entry[: entry.index("VmFlags")]
    assert make_mapping(MIB, writable=False).populate()


def test_views_show_their_slots(make_mapping, packed):
    first, second = make_mapping(16384), make_mapping(16384)
    slots = packed((0, 0), (2, 4096), (0, 12288))
    views = kernels.views([first, None, second], slots, 4096, True)
    for i, view in enumerate(views):
        view[:] = bytes([i + 1]) * 4096
    assert bytes(first) == b"\1" * 4096 + bytes(8192) + b"\3" * 4096
    assert bytes(second) == bytes(4096) + b"\2" * 4096 + bytes(8192)
    assert all(v.format == "B" and v.contiguous and not v.readonly for v in views)
    assert kernels.views([first], b"", 4096, True) == []
    [frozen] = kernels.views([first], packed((0, 0)), 4096, False)
    assert frozen.readonly


def test_views_check_bounds(make_mapping, packed):
    mapping = make_mapping(8192)
    for slot in ((1, 0), (0, 4097), (0, 2**63), (0, 2**64 - 4096)):
        with pytest.raises(IndexError, match="slot 1"):
            kernels.views([mapping], packed((0, 0), slot), 4096, True)
    with pytest.raises(IndexError, match="not mapped"):
        kernels.views([None], packed((0, 0)), 1, False)


@pytest.mark.parametrize(
    "use",
    [
        lambda view: np.frombuffer(view, np.uint8),
        lambda view: np.asarray(view)[5:].reshape(-1, 1),
        lambda view: view[1:2],
        memoryview,
        lambda view: view.cast("I"),
    ],
)
def test_release_views_keeps_views_that_are_in_use(make_mapping, packed, use):
    mapping = make_mapping(16384)
    views = kernels.views([mapping], packed((0, 0), (0, 4096), (0, 8192)), 4096, True)
    used = use(views[1])
    assert kernels.release_views(views) == 1
    with pytest.raises(ValueError, match="released"):
        views[0].tobytes()
    assert bytes(views[1]) == bytes(4096) and len(views) == 3
    assert kernels.release_views(views) == 1
    del used
    assert kernels.release_views(views) == 0
    assert kernels.release_views(views) == 0
    with pytest.raises(TypeError, match="memoryviews"):
        kernels.release_views([b""])


def test_fresh_detects_a_changed_generation(make_mapping, packed):
    fd = os.memfd_create("table")
    os.ftruncate(fd, 8 * 4)
    writer = np.frombuffer(kernels.Mapping(fd, 32, True), np.uint64)
    writer[:] = (5, 6, 7, 8)
    tables = [kernels.Mapping(fd, 32, False)]
    os.close(fd)
    slots = packed((0, 0, 5), (0, 3 * 4096, 8), (0, 2 * 4096, 7), (0, 4096, 6))
    assert kernels.fresh(tables, slots) == 4 == reference.fresh([writer], slots)
    writer[2] += 1
    assert kernels.fresh(tables, slots) == 2 == reference.fresh([writer], slots)
    writer[0] += 1
    assert kernels.fresh(tables, slots) == 0
    assert kernels.fresh(tables, b"") == 0
    with pytest.raises(IndexError, match="no generation"):
        kernels.fresh(tables, packed((0, 4 * 4096, 0)))
    with pytest.raises(IndexError, match="not mapped"):
        kernels.fresh([None], slots)


class Bell:
    def __init__(self):
        self.fd = os.eventfd(0)

    def wait(self, count):
        rung = 0
        while rung < count:
            assert select.select([self.fd], [], [], 20)[0], "the prefaulter said nothing"
            rung += struct.unpack("Q", os.read(self.fd, 8))[0]


@pytest.fixture
def bell():
    bell = Bell()
    yield bell
    os.close(bell.fd)


def test_prefaulter_allocates_files_in_order(bell):
    prefaulter = kernels.Prefaulter(bell.fd)
    fds = [os.memfd_create("prefault") for _ in range(3)]
    sizes = [MIB, 130 * MIB, 4096]
    assert [prefaulter.add(fd, size) for fd, size in zip(fds, sizes, strict=True)] == [0, 1, 2]
    bell.wait(3)
    assert prefaulter.progress() == [(size, 0) for size in sizes]
    for fd, size in zip(fds, sizes, strict=True):
        assert os.fstat(fd).st_blocks * 512 == size == os.fstat(fd).st_size
        os.close(fd)
    prefaulter.stop()


def test_prefaulter_uses_its_own_descriptor(bell):
    prefaulter = kernels.Prefaulter(bell.fd)
    fd = os.memfd_create("prefault")
    prefaulter.add(fd, 100 * MIB)
    os.close(fd)
    bell.wait(1)
    assert prefaulter.progress() == [(100 * MIB, 0)]


@pytest.mark.parametrize("size", [4096, MIB, 2 * MIB, 33 * MIB])
def test_prefaulter_clears_all_memory_of_a_file_also_in_huge_pages(bell, size):
    """It allocates one byte of each huge page first."""
    fd = os.memfd_create("prefault")
    os.ftruncate(fd, size)
    prefaulter = kernels.Prefaulter(bell.fd, True)
    prefaulter.add(fd, size)
    bell.wait(1)
    prefaulter.stop()
    assert prefaulter.progress() == [(size, 0)]
    huge = prefaulter.huge_bytes()
    assert huge % (2 * MIB) == 0 and huge <= size
    assert os.fstat(fd).st_blocks * 512 == size == os.fstat(fd).st_size
    assert os.pread(fd, size, 0) == bytes(size)
    os.close(fd)


def test_prefaulter_reports_a_failure_and_continues(bell, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"")
    frozen, good = os.open(path, os.O_RDONLY), os.memfd_create("prefault")
    prefaulter = kernels.Prefaulter(bell.fd)
    prefaulter.add(frozen, MIB)
    prefaulter.add(good, MIB)
    bell.wait(2)
    assert prefaulter.progress() == [(0, errno.EBADF), (MIB, 0)]
    os.close(frozen), os.close(good)


def test_prefaulter_reports_a_file_that_may_not_grow(bell, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    resource.setrlimit(resource.RLIMIT_FSIZE, (80 * MIB, limits[1]))
    try:
        prefaulter = kernels.Prefaulter(bell.fd)
        prefaulter.add(fd, 200 * MIB)
        bell.wait(1)
        assert prefaulter.progress() == [(64 * MIB, errno.EFBIG)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
        os.close(fd)


def test_prefaulter_stops_with_work_left(bell):
    prefaulter = kernels.Prefaulter(bell.fd)
    fd = os.memfd_create("prefault")
    prefaulter.add(fd, 2048 * MIB)
    prefaulter.stop()
    [(done, error)] = prefaulter.progress()
    assert done < 2048 * MIB and error == 0
    prefaulter.stop()
    with pytest.raises(ValueError, match="stopped"):
        prefaulter.add(fd, MIB)
    os.close(fd)


def test_prefaulter_refuses_invalid_arguments(bell):
    prefaulter = kernels.Prefaulter(bell.fd)
    with pytest.raises(ValueError, match="size"):
        prefaulter.add(bell.fd, 0)
    with pytest.raises(OSError):
        prefaulter.add(-1, MIB)
    with pytest.raises(OSError):
        kernels.Prefaulter(-1)


def in_child(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "import os, kvtier_kernels as kernels\n" + program],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


LOST = """
fd = os.memfd_create("lost")
os.ftruncate(fd, 8192)
gone, stays = kernels.Mapping(fd, 8192, True), kernels.Mapping(fd, 4096, True)
stays.guard()
memoryview(gone)[5000] = 1
"""


def test_a_guarded_mapping_reads_as_zeros_where_its_file_has_no_page():
    """The other pages of the mapping read as zeros too, because they may no longer belong to the file."""
    program = """
gone.guard()
memoryview(gone)[5] = memoryview(stays)[6] = 7
os.ftruncate(fd, 4096)
assert kernels.xxh3_128(memoryview(gone)[4096:]) == kernels.xxh3_128(bytes(4096))
assert gone.lost and not stays.lost
assert memoryview(gone)[5] == 0 and memoryview(stays)[5] == 7
memoryview(gone)[5000] = 9
assert memoryview(gone)[5000] == 9
print("alive")
"""
    done = in_child(LOST + program)
    assert done.stdout == "alive\n", done


def test_a_missing_page_elsewhere_still_ends_the_process():
    """In a mapping that is not guarded, or is no longer."""
    for what in ("pass", "gone.guard(); del gone; gone = kernels.Mapping(fd, 8192, True)"):
        done = in_child(f"{LOST}{what}\nos.ftruncate(fd, 4096)\nprint(memoryview(gone)[5000])")
        assert done.returncode == -signal.SIGBUS, done
