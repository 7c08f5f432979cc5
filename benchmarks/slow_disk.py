"""A disk that is slower than it is: a library that stands before the reads and writes of one process, on
files below one folder. All calls share one bandwidth, and stand still now and then."""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

LIBRARY = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* Bytes a second (0: as fast as it is); nanoseconds from one stall to the next, and of a stall. */
static volatile int64_t *told;
static const char *where;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int64_t free_at;  /* when all calls so far are over */

__attribute__((constructor)) static void begin(void) {
    where = getenv("SLOW_AT");
    const int fd = open(getenv("SLOW_SWITCH"), O_RDWR | O_CLOEXEC);
    told = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void slow_down(int fd, int64_t nbytes) {
    const int64_t rate = told[0], every = told[1], stall = told[2];
    if (rate == 0 || nbytes <= 0) return;
    char name[64], path[4096];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    const ssize_t size = readlink(name, path, sizeof path);
    if (size < 0 || strncmp(path, where, strlen(where)) != 0) return;
    pthread_mutex_lock(&lock);
    int64_t at = now_ns();
    if (free_at < at) free_at = at;
    if (every != 0 && free_at % every < stall) free_at += stall - free_at % every;
    free_at += nbytes * 1000000000LL / rate;
    const int64_t until = free_at;
    pthread_mutex_unlock(&lock);
    struct timespec wake = {until / 1000000000LL, until % 1000000000LL};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &wake, NULL) != 0) {}
}

static int64_t sum(const struct iovec *v, int n) {
    int64_t total = 0;
    for (int i = 0; i < n; i++) total += v[i].iov_len;
    return total;
}

#define SLOW(name, nbytes, given, passed) \
    ssize_t name given { \
        static ssize_t (*real) given; \
        if (real == NULL) real = (ssize_t(*) given)dlsym(RTLD_NEXT, #name); \
        slow_down(fd, nbytes); \
        return real passed; \
    }
SLOW(pread64, n, (int fd, void *b, size_t n, off_t at), (fd, b, n, at))
SLOW(preadv, sum(v, n), (int fd, const struct iovec *v, int n, off_t at), (fd, v, n, at))
SLOW(preadv64, sum(v, n), (int fd, const struct iovec *v, int n, off_t at), (fd, v, n, at))
SLOW(pwrite64, n, (int fd, const void *b, size_t n, off_t at), (fd, b, n, at))
SLOW(pwritev, sum(v, n), (int fd, const struct iovec *v, int n, off_t at), (fd, v, n, at))
SLOW(pwritev64, sum(v, n), (int fd, const struct iovec *v, int n, off_t at), (fd, v, n, at))
"""


@dataclass(frozen=True)
class Speed:
    """Without `bytes_s` the disk is unchanged."""

    name: str
    bytes_s: int = 0
    stall_every_s: float = 0.0
    stall_s: float = 0.0


class SlowDisk:
    """For a process that is started with `env`; its speed can be set while that runs."""

    def __init__(self, folder: Path, disk: Path) -> None:
        source, library, switch = folder / "slow.c", folder / "slow.so", folder / "slow"
        source.write_text(LIBRARY)
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-O1", "-w", "-o", library, source, "-ldl", "-lpthread"],
            check=True,
        )
        switch.write_bytes(bytes(4096))
        with switch.open("r+b") as file:
            self._told = mmap.mmap(file.fileno(), 4096)
        self.env = {
            "LD_PRELOAD": str(library), "SLOW_AT": f"{disk}/", "SLOW_SWITCH": str(switch),
        }  # fmt: skip

    def set(self, speed: Speed) -> None:
        stalls = (int(speed.stall_every_s * 1e9), int(speed.stall_s * 1e9))
        struct.pack_into("<3q", self._told, 0, speed.bytes_s, *stalls)

    def measure(self, folder: Path) -> float:
        """Bytes a second that a process of its own writes there now."""
        script = (
            "import os, sys, time\n"
            "fd = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR)\n"
            "began = time.monotonic()\n"
            "for at in range(20): os.pwrite(fd, bytes(1 << 20), at << 20)\n"
            "print((20 << 20) / (time.monotonic() - began))\n"
        )
        path = folder / "measured"
        done = subprocess.run(
            [sys.executable, "-c", script, str(path)], env=os.environ | self.env, check=True,
            capture_output=True, text=True,
        )  # fmt: skip
        path.unlink()
        return float(done.stdout)
