"""Disks that fail on request: a small file system that can be filled, frozen and made read-only; a library
that intercepts the system calls of one process. `support/power.py` has a block device that fails."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from support import forked
from support.cached import compiler, digest, made_once

PATIENCE_S = 60.0
SHUT_DOWN, WITHOUT_ITS_LOG = 0x8004587D, 2  # XFS_IOC_GOINGDOWN, and ext4's


def needs(*tools: str, root: bool = True) -> None:
    """Skip the test if this machine lacks a tool or root."""
    if root and os.geteuid():
        pytest.skip("needs root, to mount")
    for tool in tools:
        if shutil.which(tool, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is None:
            pytest.skip(f"needs {tool}")
    if "losetup" in tools and not Path("/dev/loop-control").exists():
        pytest.skip("needs loop devices")


def command(*words: str | Path) -> str:
    """Run a command that must succeed; return its output."""
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False)
    assert not done.returncode, f"{words}: {done.stderr}"
    return done.stdout.strip()


class Mounted:
    """A file system on a loop device, with methods that make it fail."""

    def __init__(self, device: str, path: Path, options: str = "errors=remount-ro") -> None:
        self.device = device
        self.path = path
        self._options = options
        path.mkdir(exist_ok=True)
        self.mount()

    def mount(self, *options: str) -> None:
        command("mount", "-o", ",".join((self._options, *options)), self.device, self.path)

    def shut_down(self) -> None:
        """Shut the file system down, as an error of its log does: calls fail until it is mounted again."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, SHUT_DOWN, struct.pack("I", WITHOUT_ITS_LOG))
        finally:
            os.close(fd)

    def unmount(self) -> None:
        """Unmount, as soon as no process has a file open there."""
        deadline = time.monotonic() + PATIENCE_S
        while (done := subprocess.run(["umount", self.path], capture_output=True)).returncode:
            assert time.monotonic() < deadline, f"still in use: {done.stderr.decode()}"
            time.sleep(0.05)

    def fill(self) -> None:
        """Fill the free space with a file that is not the daemon's."""
        with (self.path / "filler").open("wb", buffering=0) as filler:
            for size in (1 << 20, 4096):
                with contextlib.suppress(OSError):
                    while True:
                        os.posix_fallocate(filler.fileno(), os.fstat(filler.fileno()).st_size, size)
        assert os.statvfs(self.path).f_bavail * 4096 < 1 << 20

    def drain(self) -> None:
        (self.path / "filler").unlink()
        command("sync", "-f", self.path)

    def go_read_only(self) -> None:
        """Make the file system read-only, as it does itself after an error, although files are open there."""
        trigger = Path(f"/sys/fs/ext4/{Path(self.device).name}/trigger_fs_error")
        if not trigger.exists():
            pytest.skip("this kernel can't be told of an error of a file system")
        trigger.write_text("1\n")

    def repair(self) -> None:
        """Unmount, check and mount again, as an administrator does. No process may use it meanwhile."""
        self.close()
        subprocess.run(["e2fsck", "-fy", self.device], check=False, capture_output=True)
        command("mount", self.device, self.path)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Block writes until the end of the context."""
        command("fsfreeze", "-f", self.path)
        try:
            yield
        finally:
            command("fsfreeze", "-u", self.path)

    def close(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while subprocess.run(["umount", self.path], check=False, capture_output=True).returncode:
            if time.monotonic() > deadline:  # a process that is ending has it open
                command("umount", "-l", self.path)
                break
            time.sleep(0.05)


@contextlib.contextmanager
def loop(file: Path) -> Iterator[str]:
    """Provide a loop device with the bytes of this file."""
    tried = subprocess.run(
        ["losetup", "--find", "--show", file], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        pytest.skip(f"no loop device can be had: {tried.stderr.strip()}")
    device = tried.stdout.strip()
    try:
        yield device
    finally:
        command("losetup", "--detach", device)


# ext3 cannot allocate without writing.
MAKE = {
    "ext3": ("mkfs.ext4", "-q", "-m", "0", "-O", "^extent,^64bit"),
    "ext4": ("mkfs.ext4", "-q", "-m", "0"),
    "xfs": ("mkfs.xfs", "-q"),
}
OPTIONS = {"ext3": "errors=remount-ro", "ext4": "errors=remount-ro", "xfs": "noatime"}


@contextlib.contextmanager
def mounted(folder: Path, nbytes: int, kind: str = "ext4") -> Iterator[Mounted]:
    """Provide a new file system of `nbytes`."""
    make = MAKE[kind]
    needs("losetup", make[0], "mount", "umount", "fsfreeze")
    if kind == "xfs" and "\txfs\n" not in Path("/proc/filesystems").read_text():
        pytest.skip("this kernel has no XFS")
    image = folder / "image"
    with image.open("wb") as file:
        file.truncate(nbytes)
    command(*make, image)
    with loop(image) as device:
        disk = Mounted(device, folder / "disk", OPTIONS[kind])
        try:
            yield disk
        finally:
            disk.close()


def end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGCONT)
    process.terminate()
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# --- a library that intercepts calls ----------------------------------------------------------

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

enum { READ, WRITE, SYNC, ALLOCATE };
static volatile int *told;  /* for each: an errno, -1 to hang, or -1 - n to wait for n ms */
static const char *where;

/* At the first call: the process may be the fork of one that has no switch. Threads may do it at once. */
static int begun(void) {
    if (told != NULL) return 1;
    const char *const path = getenv("FAULT_SWITCH");
    if (path == NULL) return 0;
    where = getenv("FAULT_AT");
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    told = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    return 1;
}

static int fails(int fd, int what) {
    if (!begun() || told[what] == 0) return 0;
    char name[64], path[4096];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    const ssize_t size = readlink(name, path, sizeof path);
    if (size < 0 || strncmp(path, where, strlen(where)) != 0) return 0;
    __atomic_add_fetch((int *)&told[8 + what], 1, __ATOMIC_RELAXED);
    while (told[what] == -1) usleep(1000);
    const int delay_ms = -1 - told[what];
    if (delay_ms > 0) usleep(1000 * delay_ms);
    return errno = delay_ms > 0 ? 0 : told[what];
}

#define BEFORE(result, name, what, given, passed) \
    result name given { \
        static result (*real) given; \
        if (real == NULL) real = (result(*) given)dlsym(RTLD_NEXT, #name); \
        return fails(fd, what) ? -1 : real passed; \
    }
BEFORE(ssize_t, pread, READ, (int fd, void *b, size_t n, off_t at), (fd, b, n, at))
BEFORE(ssize_t, pread64, READ, (int fd, void *b, size_t n, off_t at), (fd, b, n, at))
BEFORE(ssize_t, preadv, READ, (int fd, const struct iovec *v, int n, off_t at), (fd, v, n, at))
BEFORE(ssize_t, pwrite, WRITE, (int fd, const void *b, size_t n, off_t at), (fd, b, n, at))
BEFORE(ssize_t, pwrite64, WRITE, (int fd, const void *b, size_t n, off_t at), (fd, b, n, at))
BEFORE(ssize_t, pwritev, WRITE, (int fd, const struct iovec *v, int n, off_t at), (fd, v, n, at))
BEFORE(int, fdatasync, SYNC, (int fd), (fd))
BEFORE(int, fsync, SYNC, (int fd), (fd))

#define ALLOCATES(name) \
    int name(int fd, off_t at, off_t n) { \
        static int (*real)(int, off_t, off_t); \
        if (real == NULL) real = (int (*)(int, off_t, off_t))dlsym(RTLD_NEXT, #name); \
        return fails(fd, ALLOCATE) ? errno : real(fd, at, n); \
    }
ALLOCATES(posix_fallocate)
ALLOCATES(posix_fallocate64)
"""

CALLS = ("read", "write", "sync", "allocate")
HANGS = -1


@cache
def server_with(library: Path) -> forked.Server:
    return forked.started({**os.environ, "LD_PRELOAD": str(library)})


class Shim:
    """Intercepts the calls of a process that is started with `env`, on files below `path`. Daemons with `env`
    are forks of `server`."""

    def __init__(self, folder: Path, path: Path) -> None:
        needs("cc", root=False)
        self.path = path
        words = ("cc", "-shared", "-fPIC", "-O1", "-w", "-x", "c", "-", "-ldl")

        def make(library: Path) -> None:
            subprocess.run([*words, "-o", library], input=SHIM, text=True, check=True)

        self._library = made_once(digest(compiler("cc"), SHIM, *words) + ".so", make)
        switch = folder / "switch"
        switch.write_bytes(bytes(4096))
        with switch.open("r+b") as file:
            self._told = mmap.mmap(file.fileno(), 4096)
        self.env = {
            **os.environ,
            "LD_PRELOAD": str(self._library), "FAULT_AT": f"{path}/", "FAULT_SWITCH": str(switch),
        }  # fmt: skip

    @property
    def server(self) -> forked.Server:
        return server_with(self._library)

    @contextlib.contextmanager
    def failing(self, code: int, *calls: str) -> Iterator[None]:
        """Until the end of the context, let these calls fail with `code`; or never return if it is HANGS; or
        begin later, by `HANGS - code` ms, if it is less."""
        self._set(code, calls)
        try:
            yield
        finally:
            self._set(0, calls)

    def struck(self, *calls: str) -> int:
        """Return how many of these calls have failed or hung so far."""
        counts = struct.unpack_from(f"<{len(CALLS)}i", self._told, 32)
        return sum(counts[CALLS.index(call)] for call in calls)

    def _set(self, code: int, calls: Iterable[str]) -> None:
        for call in calls:
            struct.pack_into("<i", self._told, 4 * CALLS.index(call), code)

    def close(self) -> None:
        self._told.close()
