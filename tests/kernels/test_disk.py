"""The disk worker: real files, both engines, and the result of every failure."""

import contextlib
import ctypes
import errno
import fcntl
import gc
import os
import platform
import random
import resource
import select
import struct
import subprocess
import sys
import textwrap
import time
from functools import cache

import numpy as np
import pytest
import xxhash

import kvtier_kernels as kernels
from kvtier.frame import RAW, Entry, Template, stamp
from kvtier_daemon.codec import framing
from kvtier_daemon.codec.table import BY_NAME
from kvtier_daemon.tiers.cold.disk import SEAL
from models import kernels as reference
from models.codecs import seal
from models.kernels.disk import DIGEST, URGENT
from support.rings import WHY_NO_LOCK, WHY_NO_RING

PAGE = 4096
MIB = 1 << 20
SLOT = 64 * PAGE


ENGINES = ["io_uring", "threads"]


class Bench:
    """A disk, its eventfd, a mapping of 64 slots, and files."""

    def __init__(self, folder, engine, fixed=True, writable=True, **more):
        self.folder = folder
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.disk = kernels.Disk(self.bell, engine, **more)
        memory = os.memfd_create("arena")
        os.ftruncate(memory, 64 * SLOT)  # a page is memory once it is used, or pinned by io_uring
        self.mapping = kernels.Mapping(memory, 64 * SLOT, True)
        self.extent = self.disk.register(
            self.mapping if writable else kernels.Mapping(memory, 64 * SLOT, False), fixed
        )
        os.close(memory)
        self.memory = memoryview(self.mapping)
        self.files = []
        self.results = {}

    def file(self, content=b"", flags=os.O_RDWR, direct=True, name=None):
        path = self.folder / (name or f"file{len(self.files)}")
        if not path.exists() or content:
            path.write_bytes(content)
        try:
            fd = os.open(path, flags | (os.O_DIRECT if direct else 0))
        except OSError:
            pytest.skip("this file system has no direct I/O")
        self.files.append(fd)
        return fd

    def op(self, token, fd, offset, nbytes, slot, flags=0, rest=b"", deadline=0, extent=None):
        at = slot * SLOT
        extent = self.extent if extent is None else extent
        return reference.OPERATION.pack(
            token, fd, flags, offset, nbytes, extent, deadline, at, rest
        )

    def wait(self, *tokens):
        """The errors of these tokens, in this order, as the eventfd signals them."""
        until = time.monotonic() + 60
        while not all(token in self.results for token in tokens):
            assert select.select([self.bell], [], [], max(0, until - time.monotonic()))[0], (
                f"still without {[t for t in tokens if t not in self.results]}"
            )
            os.eventfd_read(self.bell)
            for token, error, extra in self.disk.done():
                assert token not in self.results, f"{token} came twice"
                self.results[token] = (error, extra, len(self.results))
        return [self.results[token][0] for token in tokens]

    def extra(self, token):
        return self.results[token][1]

    def order(self, *tokens):
        """These tokens in the order of their completion."""
        return sorted(tokens, key=lambda token: self.results[token][2])

    def close(self):
        assert self.disk.stop(30) == 0
        for fd in [self.bell, *self.files]:
            with contextlib.suppress(OSError):
                os.close(fd)


@pytest.fixture(params=ENGINES)
def engine(request):
    return request.param


@pytest.fixture
def bench(tmp_path, engine):
    made = []

    def make(**more):
        made.append(Bench(tmp_path, engine, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


class Plug:
    """Memory that the kernel cannot write to before `pull`: a read into it blocks its thread, like a
    disk that hangs."""

    MODE_MISSING = 1
    API, REGISTER = 0xC018AA3F, 0xC020AA00

    def __init__(self, bench):
        call = {"x86_64": 323, "aarch64": 282}.get(platform.machine())
        self.fd = -1
        if call is not None:
            self.fd = ctypes.CDLL(None, use_errno=True).syscall(call, os.O_CLOEXEC)
        if self.fd < 0:
            pytest.skip("no userfaultfd here")
        memory = os.memfd_create("plug")
        os.ftruncate(memory, SLOT)  # a hole
        self.mapping = kernels.Mapping(memory, SLOT, True)
        os.close(memory)
        fcntl.ioctl(self.fd, self.API, bytearray(struct.pack("<QQQ", 0xAA, 0, 0)))
        where = struct.pack("<QQQQ", self.mapping.address, SLOT, self.MODE_MISSING, 0)
        fcntl.ioctl(self.fd, self.REGISTER, bytearray(where))
        self.bench = bench
        self.extent = bench.disk.register(self.mapping, False)

    def read(self, token, fd, deadline=0):
        self.bench.disk.read(
            self.bench.op(token, fd, 0, PAGE, 0, deadline=deadline, extent=self.extent)
        )
        until = time.monotonic() + 60
        while self.bench.disk.in_flight == 0 and time.monotonic() < until:
            time.sleep(0.001)
        assert self.bench.disk.in_flight == 1

    def pull(self):
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


@cache
def noise(nbytes):
    return random.Random(1).randbytes(nbytes)


@pytest.fixture
def plugged(bench):
    """A disk with one operation at a time, which hangs: token 1000."""
    made = []

    def make(**more):
        one = bench(depth=1, **more)
        plug = Plug(one)
        made.append(plug)
        fd = one.file(noise(64 * SLOT))
        plug.read(1000, fd, more.get("deadline", 0))
        return one, plug, fd

    yield make
    for plug in made:
        plug.pull()


def digest(data):
    return xxhash.xxh3_128_digest(data)


def header_at(at, nbytes):
    return struct.pack("<QQ", at, nbytes)


# --- the engine ---------------------------------------------------------------------------------


def test_the_disk_reports_its_engine_and_the_reason(bench, engine):
    disk = bench(depth=4).disk
    assert (disk.engine, disk.why) == (engine, "asked for")
    assert disk.depth == 4 and disk.threads == (1 if engine == "io_uring" else 4)


def test_disk_refuses_invalid_options():
    fd = os.eventfd(0)
    for more in ({"engine": "aio"}, {"depth": 0}, {"threads": 0}, {"depth": 1 << 20}):
        with pytest.raises(ValueError, match=next(iter(more))):
            kernels.Disk(fd, **more)
    os.close(fd)
    with pytest.raises(OSError, match="notify_fd"):
        kernels.Disk(-1)


REFUSE_RINGS = """
import ctypes, errno, os, struct
libc = ctypes.CDLL(None, use_errno=True)
code = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (6, 0, 0, 0x50000 | errno.EPERM), (6, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *line) for line in code))
program = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", 4, ctypes.addressof(code)))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program) == 0
import kvtier_kernels
bell = os.eventfd(0)
disk = kvtier_kernels.Disk(bell)
assert disk.engine == "threads" and "io_uring_setup" in disk.why, disk.why
fd = os.open(__import__("sys").executable, os.O_RDONLY)
disk.read_bytes(1, fd, 1, 3)
os.eventfd_read(bell)
assert disk.done() == [(1, 0, b"ELF")]
try:
    kvtier_kernels.Disk(bell, "io_uring")
except OSError as error:
    assert error.errno == errno.EPERM and "seccomp" in str(error), error
else:
    raise SystemExit("not refused")
"""


def run_python(code):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=os.path.dirname(__file__),
        env=os.environ | {"PYTHONPATH": os.path.dirname(os.path.dirname(__file__))},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# A disk object is deleted while an operation hangs: the process continues, and its memory stays
# valid.
ABANDONED = """
import os, select, sys
sys.path[:0] = [os.getcwd()]
import pytest
import test_disk, gc, pathlib, tempfile
with tempfile.TemporaryDirectory() as folder:
    for engine in ["threads"] + ([] if test_disk.WHY_NO_RING else ["io_uring"]):
        one = test_disk.Bench(pathlib.Path(folder), engine, depth=1)
        try:
            plug = test_disk.Plug(one)
        except pytest.skip.Exception:
            sys.exit(0)
        plug.read(1, one.file(b"x" * 4096))
        plug.bench = plug.mapping = one.mapping = None
        del one.disk
        gc.collect()
        with open("/proc/self/maps") as maps:
            assert "memfd:plug" in maps.read()
        plug.pull()
        assert select.select([one.bell], [], [], 60)[0]
"""


def test_auto_falls_back_to_threads_where_rings_are_refused():
    run_python(REFUSE_RINGS)


# --- reads and writes ---------------------------------------------------------------------------


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("direct", [True, False])
def test_records_of_odd_sizes_are_read_back(bench, fixed, direct):
    one = bench(fixed=fixed)
    fd = one.file(direct=direct)
    sizes = [1, 4095, 4096, 4097, 100_000, SLOT - 1, SLOT]
    chance = random.Random(0)
    payloads = [chance.randbytes(size) for size in sizes]
    headers = chance.randbytes(3 * 4097)
    ops, at, places = b"", 0, []
    for i, payload in enumerate(payloads):
        one.memory[i * SLOT : i * SLOT + len(payload)] = payload
        header = [(0, 0), (0, 100), (100, PAGE), (5, 4097)][i % 4]
        ops += one.op(i, fd, at, len(payload), i, DIGEST, header_at(*header))
        places.append((at, header))
        at += PAGE * (-(-header[1] // PAGE) - (-len(payload) // PAGE))
    one.disk.write(ops, headers)
    one.disk.sync(99, fd)
    assert one.wait(*range(len(sizes)), 99) == [0] * (len(sizes) + 1)
    assert one.order(99, 0, 1)[-1] == 99
    assert os.fstat(fd).st_size == at
    raw = (one.folder / "file0").read_bytes()
    ops = b""
    for i, (payload, (at, (start, nbytes))) in enumerate(zip(payloads, places, strict=True)):
        assert one.extra(i) == digest(payload)
        assert raw[at : at + nbytes] == headers[start : start + nbytes]
        filled = -(-nbytes // PAGE) * PAGE
        assert not any(raw[at + nbytes : at + filled])
        ops += one.op(100 + i, fd, at + filled, len(payload), 20 + i, DIGEST, digest(payload))
    one.disk.read(ops)
    assert one.wait(*range(100, 100 + len(sizes))) == [0] * len(sizes)
    for i, payload in enumerate(payloads):
        assert one.memory[(20 + i) * SLOT : (20 + i) * SLOT + len(payload)] == payload


@pytest.mark.parametrize("threads", [1, 3])
def test_batches_may_be_larger_than_the_depth(bench, threads):
    one = bench(depth=3, threads=threads)
    data = random.Random(2).randbytes(64 * PAGE)
    fd = one.file(data)
    ops = b"".join(one.op(i, fd, i % 64 * PAGE, PAGE, i % 64) for i in range(1000))
    one.disk.read(ops)
    assert one.wait(*range(1000)) == [0] * 1000
    for i in range(64):
        assert one.memory[i * SLOT : i * SLOT + PAGE] == data[i * PAGE : (i + 1) * PAGE]


def test_verify_catches_zeroed_bytes_and_the_wrong_record(bench):
    one = bench()
    records = [random.Random(i).randbytes(SLOT) for i in range(3)]
    spoiled = bytearray(b"".join(records))
    spoiled[SLOT + 777 : SLOT + 777 + 64] = bytes(64)
    spoiled[2 * SLOT :] = records[0]
    fd = one.file(bytes(spoiled))
    ops = [one.op(i, fd, i * SLOT, SLOT, i, DIGEST, digest(records[i])) for i in range(3)]
    one.disk.read(b"".join(ops))
    assert one.wait(0, 1, 2) == [0, errno.EBADMSG, errno.EBADMSG]


def test_a_truncated_file_is_an_error(bench):
    one = bench()
    fd = one.file(b"x" * (SLOT + 100))
    one.disk.read(
        one.op(1, fd, 0, SLOT + 101, 0)
        + one.op(2, fd, 0, SLOT + 100, 2)
        + one.op(3, fd, SLOT, 101, 4)
        + one.op(4, fd, 100 * SLOT, 1, 6)
    )
    assert one.wait(1, 2, 3, 4) == [errno.ENODATA, 0, errno.ENODATA, errno.ENODATA]


def test_bytes_are_read_from_anywhere(bench):
    one = bench()
    data = random.Random(3).randbytes(5 * PAGE + 1234)
    fd = one.file(data)
    ranges = [
        (0, 1),
        (0, PAGE),
        (4090, 12),
        (5 * PAGE, 1234),
        (1, len(data) - 1),
        (5 * PAGE + 1233, 1),
    ]
    for token, (at, nbytes) in enumerate(ranges):
        one.disk.read_bytes(token, fd, at, nbytes, urgent=bool(token % 2))
    assert one.wait(*range(len(ranges))) == [0] * len(ranges)
    for token, (at, nbytes) in enumerate(ranges):
        assert one.extra(token) == data[at : at + nbytes]
    one.disk.read_bytes(100, fd, len(data) - 1, 2)
    one.disk.read_bytes(101, 9999, 0, 1)
    assert one.wait(100, 101) == [errno.ENODATA, errno.EBADF]
    assert one.extra(100) is None
    for wrong in ((0, 0), (0, 1 << 30), (1 << 63, 1)):
        with pytest.raises(ValueError, match=r"nbytes|offset"):
            one.disk.read_bytes(102, fd, *wrong)


def test_staged_reads_use_the_workers_memory(bench):
    """And it is not copied: the amount is limited until the views of it are released."""
    one = bench()
    fd = one.file(direct=False)
    os.ftruncate(fd, 64 * MIB)
    os.pwrite(fd, b"some bytes", PAGE + 5)
    one.disk.read_bytes(1, fd, PAGE + 5, 10, staged=True)
    one.disk.read_bytes(2, fd, 64 * MIB - 1, 2, staged=True)
    assert one.wait(1, 2) == [0, errno.ENODATA]
    view = one.extra(1)
    assert isinstance(view, memoryview) and view.readonly and view == b"some bytes"
    one.results.clear()
    for token in (3, 4, 5):
        one.disk.read_bytes(token, fd, 0, 64 * MIB, staged=True)
    assert one.wait(3, 4) == [0, 0]
    assert one.disk.queued == (0, 1, 0) and one.disk.in_flight == 0
    part = one.results.pop(3)[1][PAGE : PAGE + 20]
    assert one.disk.queued == (0, 1, 0), "a part of it is in use"
    del part
    assert one.wait(5) == [0] and one.disk.queued == (0, 0, 0)
    one.results.pop(4)
    one.disk.read_bytes(6, 9999, 0, 64 * MIB, staged=True)
    one.disk.read_bytes(7, fd, 0, 64 * MIB, staged=True)
    assert one.wait(6, 7) == [errno.EBADF, 0], "what failed has no memory"
    assert view == b"some bytes", "nobody else has used its memory"


def test_stop_waits_for_frames_that_are_being_decoded(bench):
    """Everything that the kernel returned is decoded or cancelled, once, and nothing afterwards."""
    one = bench()
    made = [encoded(number) for number in range(32)]
    fd = one.file(b"".join(text for *_, text in made))
    ops = [
        frame_op(one, number, fd, number * 2 * SLOT, number, made[number]) for number in range(32)
    ]
    one.disk.read_frames(b"".join(ops))
    assert one.wait(0) == [0]
    assert one.disk.stop(30) == 0
    after = bytes(one.memory)
    for token, error, _ in one.disk.done():
        assert token not in one.results
        one.results[token] = (error, None, len(one.results))
    assert sorted(one.results) == list(range(32))
    for number, (error, *_) in one.results.items():
        assert error in (0, errno.ECANCELED)
        if not error:
            assert one.memory[number * SLOT : (number + 1) * SLOT] == made[number][0]
    time.sleep(0.05)
    assert bytes(one.memory) == after


def test_operations_without_memory_overtake_those_that_wait_for_memory(bench):
    one = bench()
    fd = one.file(b"x" * SLOT, direct=False)
    os.ftruncate(fd, 64 * MIB)
    for token in (1, 2):
        one.disk.read_bytes(token, fd, 0, 64 * MIB, staged=True)
    assert one.wait(1, 2) == [0, 0]
    made = encoded(1)
    other = one.file(made[3])
    one.disk.read_bytes(3, fd, 0, 10, urgent=True, staged=True)
    one.disk.read_frames(
        frame_op(one, 4, other, 0, 0, made, flags=URGENT) + frame_op(one, 5, other, 0, 1, made)
    )
    one.disk.read(one.op(6, fd, 0, SLOT, 2, URGENT) + one.op(7, fd, 0, SLOT, 3))
    one.disk.read_bytes(8, fd, 0, 10)
    assert one.wait(6, 7, 8) == [0, 0, 0]
    assert one.disk.queued == (2, 1, 0), "they take memory until they are decoded"
    one.disk.read_bytes(9, fd, 0, 10, staged=True, deadline_ms=5)
    assert one.wait(9) == [errno.ETIMEDOUT]
    one.results.pop(1)
    assert one.wait(3, 4, 5) == [0, 0, 0]
    one.results.pop(2)


def test_a_view_outlives_its_disk(bench):
    one = bench()
    fd = one.file(b"some bytes".ljust(PAGE))
    one.disk.read_bytes(1, fd, 0, 10, staged=True)
    assert one.wait(1) == [0]
    view = one.extra(1)
    one.results.clear()
    assert one.disk.stop(30) == 0
    del one.disk
    gc.collect()
    assert view == b"some bytes"
    del view
    one.disk = kernels.Disk(one.bell, "threads")  # the fixture stops it


def test_a_bad_descriptor_is_ebadf(bench):
    one = bench()
    one.disk.read(one.op(1, 9999, 0, PAGE, 0) + one.op(2, -1, 0, PAGE, 1))
    one.disk.write(one.op(3, 9999, 0, PAGE, 0, 0, header_at(0, 1)), b"h")
    one.disk.sync(4, -1)
    assert one.wait(1, 2, 3, 4) == [errno.EBADF] * 4


def test_no_operation_of_an_invalid_batch_is_submitted(bench):
    one = bench()
    fd = one.file(b"x" * SLOT)
    good = one.op(1, fd, 0, PAGE, 0)
    for wrong, error in [
        (one.op(2, fd, 0, SLOT + 1, 63), IndexError),
        (one.op(2, fd, 0, 1, 64), IndexError),
        (one.op(2, fd, 0, 1 << 63, 0), IndexError),
        (one.op(2, fd, 0, 1, 0, extent=7), IndexError),
        (one.op(2, fd, 0, 0, 0), ValueError),
        (one.op(2, fd, 512, PAGE, 0), ValueError),
        (one.op(2, fd, 1 << 63, PAGE, 0), ValueError),
        (one.op(2, fd, 0, PAGE, 0, flags=64), ValueError),
        (b"x", ValueError),
    ]:
        with pytest.raises(error):
            one.disk.read(good + wrong)
        with pytest.raises(error):
            one.disk.write(good + wrong)
    for at, nbytes in ((0, 5), (4, 1), ((1 << 64) - 1, 2)):
        with pytest.raises(IndexError):
            one.disk.write(one.op(1, fd, 0, PAGE, 0, 0, header_at(at, nbytes)), b"four")
    assert one.disk.queued == (0, 0, 0) and one.disk.in_flight == 0 and one.disk.done() == []
    assert (one.folder / "file0").read_bytes() == b"x" * SLOT


def test_a_read_only_mapping_can_be_written_to_disk(bench):
    one = bench(writable=False)
    one.memory[:4] = b"kept"
    fd = one.file()
    with pytest.raises(ValueError, match="read-only"):
        one.disk.read(one.op(1, fd, 0, PAGE, 0))
    one.disk.write(one.op(1, fd, 0, PAGE, 0))
    assert one.wait(1) == [0]
    assert (one.folder / "file0").read_bytes() == b"kept".ljust(PAGE, b"\0")


def test_nothing_but_zeros_follows_the_payload_of_a_frame(bench):
    """The memory behind it, up to the end of its page, may have bytes of an earlier block."""
    one = bench()
    _, header_bytes, nbytes, frame = encoded(3)
    assert nbytes % PAGE
    one.memory[: 2 * SLOT] = b"x" * (2 * SLOT)
    one.memory[:nbytes] = frame[header_bytes : header_bytes + nbytes]
    fd, header = one.file(), frame[:header_bytes]
    place = header_at(0, header_bytes)
    one.disk.write(one.op(1, fd, 0, nbytes, 0, DIGEST | SEAL, rest=place), header)
    assert one.wait(1) == [0]
    written = (one.folder / "file0").read_bytes()
    assert written == frame[: header_bytes + nbytes].ljust(len(written), b"\0")
    assert one.memory[-(-nbytes // PAGE) * PAGE] == ord("x"), "no other page changed"


# --- failures that a sync reports ----------------------------------------------------------------


def test_sync_reports_a_failed_write_once(bench):
    one = bench()
    fd = one.file(b"x" * SLOT, os.O_RDONLY)
    other = one.file(b"x" * SLOT)
    one.disk.write(one.op(1, fd, 0, PAGE, 0))
    assert one.wait(1) == [errno.EBADF]
    one.disk.sync(2, other)
    one.disk.sync(3, fd)
    assert one.wait(2, 3) == [0, errno.EBADF]
    one.disk.sync(4, fd)
    assert one.wait(4) == [0]
    one.disk.write(one.op(5, fd, 0, PAGE, 0))
    assert one.wait(5) == [errno.EBADF]
    one.disk.forget(fd)
    one.disk.sync(6, fd)
    assert one.wait(6) == [0]


def test_a_sync_asks_the_kernel_for_a_flush(bench):
    """A pipe has no flush: a flush returns EINVAL, writeback without one ESPIPE, and no operation 0."""
    one = bench()
    one.files += os.pipe()
    one.disk.sync(1, one.files[-1])
    assert one.wait(1) == [errno.EINVAL]


def test_a_failure_belongs_to_the_first_sync_after_it(bench):
    one = bench(depth=8)
    fd = one.file(b"x" * SLOT, os.O_RDONLY)
    for round_ in range(50):
        base = round_ * 10
        one.disk.sync(base, fd)
        one.disk.write(one.op(base + 1, fd, 0, PAGE, 0))
        one.disk.sync(base + 2, fd)
        one.disk.sync(base + 3, fd)
        tokens = [base, base + 1, base + 2, base + 3]
        assert one.wait(*tokens) == [0, errno.EBADF, errno.EBADF, 0]
        assert one.order(*tokens[1:3]) == tokens[1:3]


def test_a_full_disk_is_enospc(bench):
    one = bench()
    fd = os.open("/dev/full", os.O_RDWR)
    one.files.append(fd)
    one.disk.write(one.op(1, fd, 0, PAGE, 0, DIGEST, header_at(0, 1)), b"h")
    assert one.wait(1) == [errno.ENOSPC]
    assert one.extra(1) is None


def test_a_write_that_is_cut_short_is_an_error(bench):
    one = bench()
    fd = one.file()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SLOT // 2, hard))
    try:
        one.disk.write(one.op(1, fd, 0, SLOT, 0))
        one.disk.sync(2, fd)
        assert one.wait(1, 2) == [errno.EFBIG, errno.EFBIG]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("depth", "threads"), [(1, 1), (8, 2)])
def test_large_frames_are_written_whole(bench, depth, threads):
    """With a ring, header and payload are two concurrent calls."""
    one = bench(depth=depth, threads=threads)
    if one.disk.engine == "io_uring":
        assert wait_for_registration(one.disk, 64 * SLOT) == 64 * SLOT
    one.memory[:] = random.Random(8).randbytes(64 * SLOT)
    fd, sizes = one.file(), [SLOT, 4 * SLOT, 5 * SLOT + 10]
    headers, ops, wanted, tokens = bytearray(), bytearray(), bytearray(), []
    for token in range(30):
        nbytes, pages = sizes[token % 3], 1 + token % 2
        header = bytes([token]) * (pages * PAGE)
        place = header_at(len(headers), len(header))
        ops += one.op(token, fd, len(wanted), nbytes, token, rest=place)
        headers += header
        end = token * SLOT + -(-nbytes // PAGE) * PAGE
        wanted += header + one.memory[token * SLOT : end]
        tokens.append(token)
    one.disk.write(ops, headers)
    one.disk.sync(99, fd)
    assert set(one.wait(*tokens, 99)) == {0}
    assert (one.folder / "file0").read_bytes() == wanted


@pytest.mark.parametrize("most", [PAGE, SLOT])
def test_a_large_frame_that_is_cut_short_is_an_error(bench, most):
    one = bench()
    if one.disk.engine == "io_uring":
        assert wait_for_registration(one.disk, 64 * SLOT) == 64 * SLOT
    fd = one.file()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        one.disk.write(one.op(1, fd, 0, 2 * SLOT, 0, rest=header_at(0, PAGE)), bytes(PAGE))
        one.disk.sync(2, fd)
        assert one.wait(1, 2) == [errno.EFBIG, errno.EFBIG]
        assert one.disk.in_flight == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# --- order, deadlines, the end ------------------------------------------------------------------


def test_urgent_reads_come_before_reads_before_writes(plugged):
    one, plug, fd = plugged()
    out = one.file()
    one.disk.write(b"".join(one.op(i, out, i * PAGE, PAGE, i) for i in range(5)))
    one.disk.sync(5, out)
    one.disk.read(b"".join(one.op(10 + i, fd, i * PAGE, PAGE, 10 + i) for i in range(5)))
    one.disk.read(b"".join(one.op(20 + i, fd, i * PAGE, PAGE, 20 + i, URGENT) for i in range(5)))
    one.disk.read_bytes(25, fd, 0, 10, urgent=True)
    assert one.disk.queued == (6, 5, 6) and one.disk.in_flight == 1
    plug.pull()
    tokens = [1000, 20, 21, 22, 23, 24, 25, 10, 11, 12, 13, 14, 0, 1, 2, 3, 4, 5]
    assert one.wait(*tokens) == [0] * len(tokens)
    assert one.order(*tokens) == tokens
    assert one.disk.queued == (0, 0, 0) and one.disk.in_flight == 0


def test_reads_do_not_starve_writes(plugged):
    one, plug, fd = plugged()
    out = one.file()
    one.disk.read(b"".join(one.op(i, fd, 0, PAGE, 0) for i in range(100)))
    one.disk.write(b"".join(one.op(200 + i, out, i * PAGE, PAGE, 1) for i in range(3)))
    plug.pull()
    tokens = [*range(100), 200, 201, 202]
    assert one.wait(*tokens) == [0] * 103
    assert [one.order(*tokens).index(200 + i) for i in range(3)] == [16, 33, 50]


def test_urgent_reads_overtake_a_full_queue_of_writes(bench):
    one = bench(depth=4)
    data = random.Random(4).randbytes(SLOT)
    fd, out = one.file(data), one.file()
    writes = range(400)
    one.disk.write(b"".join(one.op(i, out, i * SLOT, SLOT, i % 32) for i in writes))
    one.disk.read(one.op(1000, fd, 0, SLOT, 40, URGENT | DIGEST, digest(data)))
    assert one.wait(1000, *writes) == [0] * 401
    # Operations that the kernel had, or that ended before, but not the others.
    assert one.order(1000, *writes).index(1000) < 200


def test_overdue_operations_in_the_queue_touch_no_memory(plugged):
    one, plug, fd = plugged()
    out = one.file(b"old".ljust(PAGE, b"\0"))
    one.memory[:SLOT] = bytes(SLOT)
    one.disk.read(
        one.op(1, fd, 0, PAGE, 0, deadline=20)
        + one.op(2, fd, 0, PAGE, 0, URGENT, deadline=1)
        + one.op(3, fd, 0, PAGE, 1, deadline=3_600_000)
    )
    one.disk.write(one.op(4, out, 0, PAGE, 0, deadline=10))
    one.disk.sync(5, out, deadline_ms=30)
    one.disk.sync(6, out)
    one.disk.read_bytes(7, fd, 0, 10, deadline_ms=5)
    assert one.wait(1, 2, 4, 5, 7) == [errno.ETIMEDOUT] * 5
    assert one.disk.overdue() == 0
    plug.pull()
    # The write was not done: the first sync that runs reports it.
    assert one.wait(1000, 3, 6) == [0, 0, errno.ETIMEDOUT]
    assert one.memory[:SLOT] == bytes(SLOT)
    assert (one.folder / "file1").read_bytes() == b"old".ljust(PAGE, b"\0")


def test_overdue_operations_in_the_kernel_are_counted(bench):
    one = bench(depth=1)
    plug = Plug(one)
    plug.read(1, one.file(b"x" * PAGE), deadline=1000)
    until = time.monotonic() + 60
    while one.disk.overdue() == 0 and time.monotonic() < until:
        time.sleep(0.001)
    assert one.disk.overdue() == 1 and one.disk.done() == []
    plug.pull()
    assert one.wait(1) == [0] and one.disk.overdue() == 0


def test_stop_cancels_queued_operations_and_waits_for_the_kernel(plugged):
    one, plug, fd = plugged()
    out = one.file()
    one.disk.read(one.op(1, fd, 0, PAGE, 0))
    one.disk.write(one.op(2, out, 0, PAGE, 0))
    one.disk.sync(3, out)
    one.disk.sync(4, fd)
    assert one.disk.stop(0.05) == 1
    assert one.wait(1, 2, 3, 4) == [errno.ECANCELED] * 4
    for submit in (
        lambda: one.disk.read(one.op(5, fd, 0, PAGE, 0)),
        lambda: one.disk.write(one.op(5, fd, 0, PAGE, 0)),
        lambda: one.disk.sync(5, fd),
    ):
        with pytest.raises(ValueError, match="stopped"):
            submit()
    plug.pull()
    assert one.wait(1000) == [0]
    assert one.disk.stop(60) == 0 and one.disk.stop() == 0
    assert one.disk.in_flight == 0 and os.fstat(out).st_size == 0


def test_stop_with_many_operations_returns_all_of_them(bench):
    one = bench(depth=8)
    fd = one.file(b"x" * 64 * SLOT)
    one.disk.read(b"".join(one.op(i, fd, i % 64 * SLOT, SLOT, i % 64) for i in range(500)))
    assert one.disk.stop(60) == 0
    errors = one.wait(*range(500))
    assert set(errors) <= {0, errno.ECANCELED} and errno.ECANCELED in errors


def test_a_disk_may_be_deleted_at_any_time(tmp_path, engine):
    for wait in (0, 0, 0.001, 0.01):
        one = Bench(tmp_path, engine, depth=8)
        fd = one.file(b"x" * 64 * SLOT)
        one.disk.read(b"".join(one.op(i, fd, i % 64 * SLOT, SLOT, i % 64) for i in range(200)))
        os.close(one.bell)
        time.sleep(wait)
        disk, one.disk = one.disk, None
        del one, disk
        gc.collect()
        os.close(fd)


def test_memory_in_use_by_the_kernel_outlives_the_disk():
    run_python(ABANDONED)


@pytest.mark.faults
def test_operations_that_need_several_calls_are_complete(bench):
    one = bench()
    size = (1 << 30) + 3 * PAGE
    memory = os.memfd_create("large")
    os.ftruncate(memory, size)
    mapping = kernels.Mapping(memory, size, True)
    os.close(memory)
    extent = one.disk.register(mapping, False)
    view = memoryview(mapping)
    fd = one.file()
    os.ftruncate(fd, size)
    marks = {0: b"first", (1 << 30) - 3: b"across", size - 4: b"last"}
    with open(one.folder / "file0", "r+b") as file:
        for at, mark in marks.items():
            file.seek(at)
            file.write(mark)
    one.disk.read(reference.OPERATION.pack(1, fd, 0, 0, size, extent, 0, 0, b""))
    assert one.wait(1) == [0]
    for at, mark in marks.items():
        assert view[at : at + len(mark)] == mark
        view[at : at + len(mark)] = mark.upper()
    one.disk.write(
        reference.OPERATION.pack(2, fd, 0, 0, size, extent, 0, 0, header_at(0, 2)), b"hh"
    )
    assert one.wait(2) == [0]
    with open(one.folder / "file0", "rb") as file:
        assert file.read(3) == b"hh\0"
        for at, mark in marks.items():
            file.seek(PAGE + at)
            assert file.read(len(mark)) == mark.upper()


def test_the_disk_keeps_its_mappings(bench):
    one = bench()
    data = random.Random(5).randbytes(SLOT)
    fd = one.file(data)
    with open("/proc/self/maps") as maps:
        assert "memfd:arena" in maps.read()
    one.mapping = one.memory = None
    gc.collect()
    one.disk.read(one.op(1, fd, 0, SLOT, 0, DIGEST, digest(data)))
    assert one.wait(1) == [0]


def test_a_forked_child_can_not_use_it(bench):
    one = bench()
    fd = one.file(b"x" * SLOT)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            one.disk.read(one.op(1, fd, 0, PAGE, 0))
        except RuntimeError:
            one.disk = None
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    one.disk.read(one.op(1, fd, 0, PAGE, 0))
    assert one.wait(1) == [0]


def test_idle_threads_use_no_cpu(bench):
    one = bench(depth=4)
    one.disk.read_bytes(1, one.file(b"x"), 0, 1)
    assert one.wait(1) == [0]
    time.sleep(0.05)
    before = one.disk.cpu_s
    time.sleep(0.3)
    assert before > 0 and one.disk.cpu_s - before < 0.05
    one.disk.stop()
    assert one.disk.cpu_s >= before


# --- registered memory --------------------------------------------------------------------------


def wait_for_registration(disk, nbytes):
    if WHY_NO_LOCK:
        pytest.skip(WHY_NO_LOCK)
    until = time.monotonic() + 60
    while disk.registered_bytes < nbytes and time.monotonic() < until:
        time.sleep(0.001)
    return disk.registered_bytes


@pytest.mark.skipif(bool(WHY_NO_RING), reason=WHY_NO_RING)
@pytest.mark.parametrize("threads", [1, 2])
def test_extents_are_registered_during_operations(tmp_path, threads):
    one = Bench(tmp_path, "io_uring", depth=8, threads=threads)
    data = random.Random(6).randbytes(SLOT)
    fd = one.file(data)
    size = 300 * MIB  # two pieces, and blocks that lie in both
    memory = os.memfd_create("more")
    os.ftruncate(memory, size)
    more = kernels.Mapping(memory, size, True)
    os.close(memory)
    extents = [one.extent, one.disk.register(more), one.disk.register(more, fixed=False)]
    assert extents == [0, 1, 2]
    for round_ in range(2):
        slots = [0, 63]
        beyond = 256 * MIB // SLOT
        ops = [one.op(s, fd, 0, SLOT, s, DIGEST, digest(data)) for s in slots]
        for extent in (1, 2):
            for s in (0, beyond - 1, beyond):
                ops.append(one.op(len(ops) + 100, fd, 0, SLOT, s, DIGEST, digest(data), 0, extent))
            across = reference.OPERATION.pack(
                len(ops) + 100, fd, DIGEST, 0, SLOT, extent, 0, 256 * MIB - PAGE, digest(data)
            )
            ops.append(across)
        tokens = [struct.unpack_from("<Q", op)[0] for op in ops]
        for op in ops:  # one at a time: some of them overlap
            one.disk.read(op)
            [token] = struct.unpack_from("<Q", op)
            assert one.wait(token) == [0]
        one.results.clear()
        assert len(set(tokens)) == len(tokens)
        if round_ == 0:
            assert wait_for_registration(one.disk, 64 * SLOT + size) == 64 * SLOT + size
    one.close()


SMALL_MEMLOCK = """
import os, resource, sys, time
import kvtier_kernels
from models.kernels import OPERATION
fd = os.open(sys.executable, os.O_RDONLY)
if os.getuid() == 0:
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
bell = os.eventfd(0)
disk = kvtier_kernels.Disk(bell, "io_uring")
memory = os.memfd_create("x")
os.ftruncate(memory, 4 << 20)
mapping = kvtier_kernels.Mapping(memory, 4 << 20, True)
small = os.memfd_create("x")
os.ftruncate(small, 1 << 16)
assert disk.register(mapping) == 0
assert disk.register(kvtier_kernels.Mapping(small, 1 << 16, True)) == 1
for round in range(2):
    disk.read(b"".join(OPERATION.pack(i + 1, fd, 0, 0, 4096, i, 0, 0, b"") for i in range(2)))
    found = []
    while len(found) < 2:
        os.eventfd_read(bell)
        found += disk.done()
    assert sorted(found) == [(1, 0, None), (2, 0, None)], found
    assert memoryview(mapping)[1:4] == b"ELF"
    until = time.monotonic() + 60
    while disk.registered_bytes == 0 and time.monotonic() < until:
        time.sleep(0.001)
print(disk.registered_bytes)
"""


@pytest.mark.skipif(bool(WHY_NO_RING or WHY_NO_LOCK), reason=WHY_NO_RING or WHY_NO_LOCK)
def test_memory_that_may_not_be_locked_is_used_unregistered():
    assert int(run_python(SMALL_MEMLOCK)) == 1 << 16


STARTS = """
import os, resource, sys, time
import kvtier_kernels as kernels

engine, most, uid = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
os.setgroups([]), os.setgid(uid), os.setuid(uid)  # the limit counts the threads of a user, except root
bell = os.eventfd(0)

def descriptors():
    return sorted(os.listdir("/proc/self/fd"))

def tried(limit):
    resource.setrlimit(resource.RLIMIT_NPROC, (limit, most + 1))
    before = descriptors()
    try:
        kernels.Disk(bell, engine, depth=4, threads=2, decoders=2).stop()
    except RuntimeError as error:
        assert "Resource temporarily unavailable" in str(error), error
        until = time.monotonic() + 30
        while len(os.listdir("/proc/self/task")) > 1:
            assert time.monotonic() < until, "the started threads do not end"
            time.sleep(0.001)
        assert descriptors() == before
        return 0
    return 1

print([tried(limit) for limit in range(1, most + 2)])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become a user without other threads")
def test_a_disk_whose_nth_thread_can_not_be_started_ends_the_others(engine):
    threads = 1 + 2 + (2 if engine == "io_uring" else 4)  # the clock, the decoders, the workers
    uid = 1_000_000 + os.getpid()
    done = subprocess.run(
        [sys.executable, "-c", STARTS, engine, str(threads), str(uid)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [*["[0,"], *["0,"] * (threads - 1), "1]"], done.stdout


# --- against the twin ---------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fixed", [True, False])
def test_random_operations_equal_those_of_the_model(bench, fixed):
    chance = random.Random(f"{fixed}")
    one = bench(fixed=fixed, depth=6, threads=2)
    pages, blocks = 16, 40
    content = chance.randbytes(blocks * pages * PAGE)
    disk_files = [
        one.file(content, direct=direct, name=f"ours{direct}") for direct in (True, False)
    ]
    model_files = [
        one.file(content, direct=False, name=f"theirs{direct}") for direct in (True, False)
    ]
    disk_files.append(9999)
    model_files.append(9999)
    memory = bytearray(64 * SLOT)
    twin = reference.Disk(digest=digest)
    twin.register(memory)
    noise = chance.randbytes(2 * SLOT)
    token = 0
    while token < 5000:
        count = chance.randint(1, 60)
        slots, regions = chance.sample(range(64), count), {}
        operations = []
        for slot in slots:
            token += 1
            which = chance.choices((0, 1, 2), (20, 20, 1))[0]
            taken = regions.setdefault(which, set())
            region = chance.randrange(blocks + 2)
            shift = chance.randrange(4)
            nbytes = chance.randint(1, 8 * PAGE)
            kind = chance.choice(("read", "read", "write", "bytes"))
            if region in taken or (kind == "write" and region >= blocks):
                kind = "sync"
            taken.add(region)
            at = (region * pages + shift) * PAGE
            right = bytes(16)
            if which != 2 and token % 7:
                right = digest(os.pread(model_files[which], nbytes, at))
            operations.append((kind, token, which, at, nbytes, slot, right))
        for disk, files, arena in ((one.disk, disk_files, one.memory), (twin, model_files, memory)):
            for kind, number, which, at, nbytes, slot, right in operations:
                flags = number % 2 * DIGEST
                if kind == "read":
                    flags |= (number % 3 == 0) * URGENT
                    disk.read(
                        one.op(number, files[which], at, nbytes, slot, flags, right, extent=0)
                    )
                elif kind == "write":
                    start = number % SLOT
                    arena[slot * SLOT : slot * SLOT + nbytes] = noise[start : start + nbytes]
                    place = header_at(number % 5, number % 3 * (PAGE - 1))
                    disk.write(
                        one.op(number, files[which], at, nbytes, slot, flags, place, extent=0),
                        noise,
                    )
                elif kind == "bytes":
                    disk.read_bytes(number, files[which], at + number % PAGE, nbytes)
                else:
                    disk.sync(number, files[which])
        expected = {number: (error, extra) for number, error, extra in twin.done()}
        one.wait(*expected)
        found = {number: one.results.pop(number)[:2] for number in expected}
        for kind, number, which, _, nbytes, slot, _ in operations:
            assert found[number] == expected[number], (kind, number, which)
            nbytes = -(-nbytes // PAGE) * PAGE
            here = slice(slot * SLOT, slot * SLOT + nbytes)
            if kind == "read" and found[number][0] not in (0, errno.EBADMSG):
                one.memory[here] = memory[here] = bytes(nbytes)
            assert bytes(one.memory[here]) == memory[here], (kind, number)
    assert not one.results
    for direct in (True, False):
        first, second = (one.folder / f"{name}{direct}" for name in ("ours", "theirs"))
        assert first.read_bytes() == second.read_bytes()


# --- encoded frames -------------------------------------------------------------------------------


@cache
def encoded(number, codec="r32"):
    """A block, and its frame as in a file: the size of the header, the size of the payload, and all bytes."""
    chance, nbytes = np.random.default_rng(number), SLOT
    numbers = chance.integers(0, 256, (nbytes // 2, 2), np.uint8)
    numbers[:, 1] = chance.choice((0x3E, 0xBF), nbytes // 2)
    block = numbers.tobytes()
    template = Template(b"s" * 32, 0, 0, RAW, (Entry(0, 0, RAW, 0, nbytes, nbytes),))
    header, into = template.blank(b""), bytearray(nbytes)
    size = framing.encode(BY_NAME[codec], "bfloat16", header, block, into)
    assert size < nbytes
    stamp(header, bytes([number]) * 32, b"", 1, number)
    payload = bytes(into[:size])
    return block, len(header), size, (seal(bytes(header), payload) + payload).ljust(2 * SLOT, b"\0")


def frame_op(bench, token, fd, at, slot, made, digest=None, flags=0, deadline=0, **changed):
    block, header_bytes, size, text = made
    if digest is None:
        digest = kernels.xxh3_128(text[header_bytes : header_bytes + size])
    op = bench.op(token, fd, at, len(block), slot, flags, digest, deadline)
    tail = {"payload": size, "header": header_bytes, "element": 0} | changed
    return op + struct.pack("<QII72x", *tail.values())


@pytest.mark.parametrize("decoders", [1, 3])
def test_encoded_frames_are_decoded_into_their_slots(bench, decoders):
    disk = bench(decoders=decoders)
    made = [encoded(number, ("fix4", "r32")[number % 2]) for number in range(32)]
    fd = disk.file(b"".join(text for *_, text in made))
    disk.memory[:] = b"\xee" * len(disk.memory)
    ops = b"".join(
        frame_op(disk, number, fd, number * 2 * SLOT, number, one, flags=URGENT)
        for number, one in enumerate(made)
    )
    disk.disk.read_frames(ops)
    assert disk.wait(*range(32)) == [0] * 32
    for number, (block, *_) in enumerate(made):
        assert disk.memory[number * SLOT : (number + 1) * SLOT] == block
    assert set(disk.memory[32 * SLOT :]) == {0xEE}, "no slot but theirs"
    _, _, decoded = disk.disk.moved()
    assert {kind: one[0] for kind, one in decoded.items()} == {
        (1, 0): 16 * SLOT,
        (2, 0): 16 * SLOT,
    }


@pytest.mark.parametrize("flags", [0, URGENT])
@pytest.mark.parametrize("count", [2, 4])
def test_bandwidth_is_measured_only_with_enough_concurrent_reads(bench, count, flags):
    """Fewer reads remain when others wait for decoders, so they are not measured."""
    one = bench()
    plug = Plug(one)
    fd = one.file(b"x" * SLOT)
    ops = [
        reference.OPERATION.pack(n, fd, flags, 0, PAGE, plug.extent, 0, n * PAGE, b"")
        for n in range(count)
    ]
    one.disk.read(b"".join(ops))
    until = time.monotonic() + 60
    while one.disk.in_flight < count and time.monotonic() < until:
        time.sleep(0.001)
    time.sleep(0.2)
    plug.pull()
    assert one.wait(*range(count)) == [0] * count
    nbytes, seconds, _ = one.disk.moved()
    if count == 2:
        assert (nbytes, seconds) == (0, 0.0)
    else:
        assert nbytes >= PAGE and seconds >= 0.2
    one.disk.read_bytes(9, fd, 0, 100, urgent=True)
    assert one.wait(9) == [0]
    assert one.disk.moved()[:2] == (nbytes, seconds), "no block"


def test_a_damaged_frame_is_an_error_and_touches_no_other_slot(bench):
    disk, made = bench(), encoded(1)
    _, header_bytes, size, text = made
    places = {"magic": 0, "key": 100, "entry": 260, "payload": header_bytes + size // 2}
    texts = []
    for at in places.values():
        bad = bytearray(text)
        bad[at] ^= 1
        texts.append(bytes(bad))
    fd = disk.file(b"".join(texts) + text)
    digest = kernels.xxh3_128(text[header_bytes : header_bytes + size])
    for number in range(len(texts)):
        disk.disk.read_frames(
            frame_op(disk, number, fd, number * 2 * SLOT, 2 * number, made, digest)
        )
    last = len(texts) * 2 * SLOT
    other = frame_op(disk, 10, fd, last, 20, made, bytes(16))
    longer = frame_op(disk, 11, fd, last, 22, made, digest, payload=size + 1)
    element = frame_op(disk, 12, fd, last, 24, made, digest, element=1)
    good = frame_op(disk, 13, fd, last, 26, made, digest)
    disk.disk.read_frames(other + longer + element + good)
    found = disk.wait(*range(len(texts)), 10, 11, 12, 13)
    assert found == [errno.EBADMSG] * (len(texts) + 3) + [0]
    for slot in range(1, 28, 2):
        assert not any(disk.memory[slot * SLOT : (slot + 1) * SLOT])
    short = disk.file(text[:PAGE])
    disk.disk.read_frames(frame_op(disk, 14, short, 0, 0, made, digest))
    assert disk.wait(14) == [errno.ENODATA]


@pytest.mark.parametrize(
    "changed",
    [{"payload": 0}, {"payload": SLOT + 1}, {"header": 0}, {"header": 100}, {"element": 5}],
    ids=str,
)
def test_an_impossible_frame_is_refused_with_its_whole_batch(bench, changed):
    disk, made = bench(), encoded(1)
    fd = disk.file(made[3])
    good = frame_op(disk, 1, fd, 0, 0, made)
    with pytest.raises(ValueError):
        disk.disk.read_frames(good + frame_op(disk, 2, fd, 0, 2, made, **changed))
    with pytest.raises(ValueError, match="152 bytes"):
        disk.disk.read_frames(good[:-1])
    assert disk.disk.queued == (0, 0, 0) and not any(disk.memory[:SLOT])


def test_more_frames_than_can_be_decoded_at_once_are_all_read(bench):
    disk, made = bench(depth=2), encoded(3)
    fd = disk.file(made[3])
    for token in range(300):
        disk.disk.read_frames(frame_op(disk, token, fd, 0, token % 64, made))
    raw = disk.file(b"r" * SLOT)
    disk.disk.read(disk.op(1000, raw, 0, SLOT, 63, URGENT))
    assert disk.wait(*range(300), 1000) == [0] * 301


def test_a_stopped_disk_decodes_frames_that_it_has_read(bench):
    disk, made = bench(), encoded(3)
    fd = disk.file(made[3])
    disk.disk.read_frames(b"".join(frame_op(disk, n, fd, 0, n, made) for n in range(64)))
    assert disk.disk.stop(30) == 0
    for token, error, _ in disk.disk.done():
        assert error in (0, errno.ECANCELED)
        if not error:
            assert disk.memory[token * SLOT : (token + 1) * SLOT] == made[0]


def test_frames_larger_than_the_memory_together_are_all_read(tmp_path):
    """Each needs 12 MiB until it is decoded, so they wait for those before them."""
    disk = Bench(tmp_path, "threads", depth=8)
    nbytes = 64 * SLOT
    block = encoded(5)[0]
    parts = nbytes // len(block)
    pieces = tuple(Entry(n, 0, RAW, n * SLOT, SLOT, SLOT) for n in range(parts))
    header = Template(b"s" * 32, 0, 0, RAW, pieces).blank(b"")
    into = bytearray(nbytes)
    size = framing.encode(BY_NAME["fix4"], "bfloat16", header, block * parts, into)
    stamp(header, b"k" * 32, b"", 1, 1)
    payload = bytes(into[:size])
    fd = disk.file((seal(bytes(header), payload) + payload).ljust(2 * nbytes, b"\0"))
    made = (block * parts, len(header), size, seal(bytes(header), payload) + payload)
    disk.disk.read_frames(b"".join(frame_op(disk, n, fd, 0, 0, made) for n in range(24)))
    assert disk.wait(*range(24)) == [0] * 24
    assert disk.memory == block * parts
    disk.close()


# --- frames that are decoded while they are read ---------------------------------------------------


@cache
def large(number, parts=32, codec="r32"):
    """A frame of `parts` parts of a slot each; about 3/4 of it is read in pieces."""
    block, *_ = encoded(number)
    pieces = tuple(Entry(n, 0, RAW, n * SLOT, SLOT, SLOT) for n in range(parts))
    header, into = (
        Template(b"s" * 32, 0, 0, RAW, pieces).blank(b""),
        bytearray(parts * SLOT),
    )
    size = framing.encode(BY_NAME[codec], "bfloat16", header, block * parts, into)
    stamp(header, bytes([number]) * 32, b"", 1, number)
    payload = bytes(into[:size])
    return block * parts, len(header), size, seal(bytes(header), payload) + payload


def test_frames_in_pieces_are_read_correctly(bench):
    disk = bench(decoders=2)
    made = [large(number, parts) for number, parts in ((1, 32), (2, 5), (3, 1), (4, 16))]
    fds = [disk.file(one[3]) for one in made]  # exact sizes: the last page is incomplete
    for turn in range(6):
        disk.memory[:] = b"\xee" * len(disk.memory)
        slot, places, ops = 0, [], b""
        for number, (fd, one) in enumerate(zip(fds, made, strict=True)):
            ops += frame_op(disk, 10 * turn + number, fd, 0, slot, one)
            places.append(slot)
            slot += len(one[0]) // SLOT
        disk.disk.read_frames(ops)
        assert disk.wait(*range(10 * turn, 10 * turn + len(made))) == [0] * len(made)
        for place, one in zip(places, made, strict=True):
            assert bytes(disk.memory[place * SLOT : place * SLOT + len(one[0])]) == one[0]
        assert set(disk.memory[slot * SLOT :]) == {0xEE}, "no slot but theirs"


def test_a_frame_is_decoded_while_it_is_read(bench):
    """A frame that is damaged at its end is refused if it was read completely, so decoded parts were
    decoded before."""
    disk, (block, header_bytes, size, text) = bench(), large(1, 60)
    torn = disk.file(text[:-1] + bytes([text[-1] ^ 1]))
    made = block, header_bytes, size, text
    for token in range(200):  # the decoder may be late
        disk.memory[:] = bytes(len(disk.memory))
        disk.disk.read_frames(frame_op(disk, token, torn, 0, 0, made))
        assert disk.wait(token) == [errno.EBADMSG]
        assert not any(disk.memory[59 * SLOT :]), "its end"
        if disk.memory[: 4 * SLOT] == block[: 4 * SLOT]:
            return
    raise AssertionError("never")


def test_damage_in_any_piece_is_an_error(bench):
    disk, made = bench(), large(1)
    _, header_bytes, size, text = made
    for token, at in enumerate((0, 40, 300, header_bytes + 9, header_bytes + size // 2, -1)):
        bad = bytearray(text)
        bad[at] ^= 1
        good = disk.file(text)
        ops = frame_op(disk, 10 * token, disk.file(bytes(bad)), 0, 0, made)
        ops += frame_op(disk, 10 * token + 1, good, 0, 32, made)
        disk.disk.read_frames(ops)
        assert disk.wait(10 * token, 10 * token + 1) == [errno.EBADMSG, 0]
        assert disk.memory[32 * SLOT :] == made[0]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.999])
def test_a_truncated_frame_is_an_error(bench, share):
    disk, made = bench(), large(1)
    text = made[3]
    fd = disk.file(text[: int(len(text) * share) // PAGE * PAGE] or b"")
    for token in range(4):
        disk.disk.read_frames(frame_op(disk, token, fd, 0, 0, made))
    assert disk.wait(*range(4)) == [errno.ENODATA] * 4


def test_a_file_that_can_not_be_read_gives_one_error_per_frame(bench):
    disk, made = bench(), large(1)
    fd = disk.file(made[3], flags=os.O_WRONLY)
    for token in range(4):
        disk.disk.read_frames(frame_op(disk, token, fd, 0, 0, made))
    assert disk.wait(*range(4)) == [errno.EBADF] * 4


def test_a_disk_can_be_stopped_between_pieces(bench):
    made = large(3)
    for after in range(8):
        disk = bench(decoders=2)
        fd = disk.file(made[3])
        disk.disk.read_frames(
            b"".join(frame_op(disk, n, fd, 0, 32 * (n % 2), made) for n in range(8))
        )
        time.sleep(after / 1000)
        assert disk.disk.stop(30) == 0
        for token, error, _ in disk.disk.done():
            assert error in (0, errno.ECANCELED)
            at = 32 * (token % 2) * SLOT
            assert error or bytes(disk.memory[at : at + len(made[0])]) == made[0]
