"""A disk that loses power: a block device with a volatile write cache, in a process of its own.

The kernel reads and writes one FUSE file through a loop device. What a flush covers is on the medium; the
rest is in the cache. A cut puts a random part of the cache on the medium, in another order and in torn
pieces, and drops the rest; then every request fails until the power is on again. All choices come from a
seed.

A flush covers a write only if the write was answered before the flush arrived. Some writes are answered late,
so a program that does not wait for the end of a write before it flushes loses that write.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import random
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.disks import MAKE, OPTIONS, PATIENCE_S, Mounted, command, end, loop, needs
from support.one_file import NoMount, OneFile

LATE_SHARE, LATE_MS = 0.1, 1  # of the writes; with no other request in this time they are answered
SECTORS = (512, 4096)  # what a disk writes whole
NBYTES = {"ext4": 160 << 20, "xfs": 330 << 20}


@dataclass(slots=True, eq=False)
class Write:
    at: int
    data: memoryview
    is_answered: bool = False


class CachedDisk(OneFile):
    """`media` is what a power cut leaves. `cut` is called once, after `after` more writes and flushes."""

    def __init__(self, path: Path, image: Path, tell: socket.socket) -> None:
        with image.open("rb") as file:
            self.media = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._seen = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        super().__init__(path)
        self._tell = tell
        self._cache: list[Write] = []
        self._late: list[tuple[int, Write]] = []
        self._is_on = True
        self._chance = random.Random(0)
        self._sector = SECTORS[0]
        self._after = 0
        self._events = 0
        self._failing: frozenset[str] = frozenset()

    @property
    def size(self) -> int:
        return len(self.media)

    def order(
        self, what: str, seed: int = 0, after: int = 0, sector: int = SECTORS[0],
        ways: Sequence[str] = (),
    ) -> None:  # fmt: skip
        if what == "fail":
            self._failing = frozenset(ways)
        elif what == "arm":
            self._chance, self._after, self._sector = random.Random(seed), after, sector
            self._events = 0
        elif what == "cut":
            self._cut()
        elif what == "on":
            self.fence()
            self._is_on = True

    # --- requests ----------------------------------------------------------------------------

    def read(self, at: int, size: int) -> bytes:
        self._check("read")
        return self._seen[at : at + size]

    def write(self, unique: int, at: int, data: memoryview) -> bool:
        self._check("write")
        self._seen[at : at + len(data)] = data
        one = Write(at, data)
        self._cache.append(one)
        self._event()
        if self._chance.random() < LATE_SHARE:
            self._late.append((unique, one))
            return False
        one.is_answered = True
        return True

    def flush(self) -> None:
        self._check("flush")
        if self._after == 1 and self._chance.random() < 0.5:
            self._event()  # before the flush has an effect
        self._store([one for one in self._cache if one.is_answered])
        self._cache = [one for one in self._cache if not one.is_answered]
        self._event()  # after it, and before it is answered

    def end_late(self, code: int = 0) -> None:
        """Answer the writes that were not answered at once, in another order."""
        self._chance.shuffle(self._late)
        for unique, one in self._late:
            one.is_answered = True
            self.wrote(unique, len(one.data), code)
        self._late = []

    @property
    def has_late(self) -> bool:
        return bool(self._late)

    # --- power -------------------------------------------------------------------------------

    def _check(self, way: str) -> None:
        if not self._is_on:
            raise OSError(errno.EIO, "no power")
        if way in self._failing:
            raise OSError(errno.EIO, "asked for")

    def _event(self) -> None:
        self._events += 1
        self._after -= 1
        if self._after == 0:
            self._cut()
            raise OSError(errno.EIO, "no power")

    def _store(self, writes: list[Write]) -> None:
        for one in writes:
            self.media[one.at : one.at + len(one.data)] = one.data

    def _cut(self) -> None:
        """Put a part of the cache on the medium, and lose the rest."""
        if not self._is_on:
            return
        chance, cached = self._chance, list(self._cache)
        if chance.random() < 0.5:
            chance.shuffle(cached)
        share, whole_share = (
            chance.choice((0.0, 0.1, 0.5, 0.9, 1.0)),
            chance.choice((0.0, 0.5, 1.0)),
        )
        stored = torn = 0
        for one in cached:
            if chance.random() < whole_share:
                kept = [one] if chance.random() < share else []
            else:
                pieces = range(0, len(one.data), self._sector)
                kept = [
                    Write(one.at + at, one.data[at : at + self._sector])
                    for at in pieces
                    if chance.random() < share
                ]
                torn += 0 < len(kept) < len(pieces)
            stored += bool(kept)
            self._store(kept)
        for one in self._cache:
            until = one.at + len(one.data)
            self._seen[one.at : until] = self.media[one.at : until]
        self._cache, self._is_on, self._after = [], False, 0
        told = {"events": self._events, "cached": len(cached), "stored": stored, "torn": torn}
        self.end_late(errno.EIO)
        self._tell.send(json.dumps(told).encode())


def main(path: str, image: str, descriptor: str) -> None:
    told = socket.socket(fileno=int(descriptor))
    try:
        disk = CachedDisk(Path(path), Path(image), told)
    except NoMount as error:
        told.send(json.dumps({"failure": str(error)}).encode())
        return
    told.send(b"{}")
    looking = select.poll()
    looking.register(disk.fd, select.POLLIN)
    looking.register(told, select.POLLIN)
    while True:
        ready = dict(looking.poll(LATE_MS if disk.has_late else None))
        if not ready:
            disk.end_late()
        if told.fileno() in ready:
            text = told.recv(1 << 16)
            if not text:
                break
            disk.order(**json.loads(text))
            told.send(b"{}")
        if disk.fd in ready and not disk.serve():
            break
    disk.unmount()


class PoweredDisk:
    """A mounted file system on such a disk. `path` is where it is mounted while the power is on."""

    def __init__(
        self, folder: Path, front: Path, server: subprocess.Popen[bytes], told: socket.socket, kind: str
    ) -> None:  # fmt: skip
        self.cuts: list[dict[str, int]] = []
        self._told = told
        self._restored = 0  # after how many cuts the power was last switched on
        self._answers: list[dict[str, Any]] = []
        self._heard = threading.Condition()
        self._turn = threading.Lock()
        self._front = front
        self._server = server
        threading.Thread(target=self._listen, daemon=True).start()
        # XFS refuses a second file system with its UUID; the one before the cut may still be in use.
        self._options = "noatime,nouuid" if kind == "xfs" else OPTIONS[kind]
        self._mounts = contextlib.ExitStack()
        self.path = folder / "disk"
        self._mount()

    def arm(self, seed: int, after: int, sector: int) -> None:
        """Cut the power after this many writes and flushes; 0: not before `cut`."""
        self._order(what="arm", seed=seed, after=after, sector=sector)

    def cut(self) -> None:
        """Cut the power now, unless it is off."""
        self._order(what="cut")

    @contextlib.contextmanager
    def failing(self, *ways: str) -> Iterator[None]:
        """Let these requests ("read", "write", "flush") fail with EIO until the end of the context."""
        self._order(what="fail", ways=ways)
        try:
            yield
        finally:
            self._order(what="fail", ways=())

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """Answer no request until the end of the context."""
        self._server.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._server.send_signal(signal.SIGCONT)

    def wait_for_cut(self, timeout_s: float = PATIENCE_S) -> bool:
        """Wait until the power is cut. False if that takes longer."""
        with self._heard:
            return self._heard.wait_for(lambda: len(self.cuts) > self._restored, timeout_s)

    def restore(self) -> None:
        """Switch the power on if it was cut, and mount the file system again, which replays its journal."""
        self.unmount()
        self._restored = len(self.cuts)
        self._order(what="on")
        self._mount()

    def unmount(self) -> None:
        self._mounts.close()

    def _mount(self) -> None:
        # A new loop device: a process with a copy of all mounts may keep the old file system in use.
        device = self._mounts.enter_context(loop(self._front))
        # Without direct I/O, which older kernels refuse here, there is one write at a time.
        subprocess.run(["losetup", "--direct-io=on", device], capture_output=True, check=False)
        self._mounts.callback(Mounted(device, self.path, self._options).close)

    def _order(self, **order: Any) -> None:
        with self._turn, self._heard:
            self._told.send(json.dumps(order).encode())
            assert self._heard.wait_for(lambda: self._answers, PATIENCE_S), (
                "the disk does not answer"
            )
            self._answers.clear()

    def _listen(self) -> None:
        while text := self._told.recv(1 << 16):
            told = json.loads(text)
            with self._heard:
                (self.cuts if told else self._answers).append(told)
                self._heard.notify_all()


def image(folder: Path, kind: str) -> Path:
    """Return a file with an empty file system, which is made once in this folder."""
    needs("losetup", MAKE[kind][0], "mount", "umount")
    if kind == "xfs" and "\txfs\n" not in Path("/proc/filesystems").read_text():
        pytest.skip("this kernel has no XFS")
    path = folder / f"{kind}.image"
    if not path.exists():
        with path.open("wb") as file:
            file.truncate(NBYTES[kind])
        command(*MAKE[kind], path)
    return path


@contextlib.contextmanager
def powered(folder: Path, kind: str, file: Path) -> Iterator[PoweredDisk]:
    """Provide a file system, at first that of the image `file`, which never changes."""
    front = folder / "front"
    own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.ExitStack() as stack:
        stack.callback(own.close)
        with theirs:
            server = subprocess.Popen(
                [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n"
                 "from support.power import main; main(*sys.argv[1:])", front, file,
                 str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
            )  # fmt: skip
        stack.callback(end, server)
        text = own.recv(1 << 16)
        assert text, "the disk's process ended"
        if failure := json.loads(text).get("failure"):
            pytest.skip(failure)
        stack.callback(subprocess.run, ["umount", "-l", front], check=False)
        disk = PoweredDisk(folder, front, server, own, kind)
        stack.callback(disk.unmount)
        yield disk
