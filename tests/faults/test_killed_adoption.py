"""The daemon is killed at random system calls, above all while it takes memory over, and clients go on."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from kvtier_daemon.claim import owner_of
from kvtier_daemon.tiers.fd_store import QueuedStore
from support.daemons import SERVE, start_daemon
from support.effort import effort
from support.kept import KEEP_S, Loading, end, folder, loading

__all__ = ["folder", "loading"]  # fixtures

# Of the main thread: those of the manifest, of new extents and of clients; and about how many there are in a
# start and some requests.
CALLS = {
    "pwrite64": 12, "pread64": 40, "memfd_create": 8, "fcntl": 120, "ftruncate": 8, "sendmsg": 40,
    "recvmsg": 20, "lseek": 30, "flock": 4, "accept4": 6, "sendto": 200, "recvfrom": 200, "mmap": 500,
    "munmap": 60, "epoll_wait": 300, "epoll_ctl": 60,
}  # fmt: skip


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_no_call_of_a_client_fails_if_the_daemon_is_killed_at_any_system_call(
    folder: Path, loading: Callable[[str, int], list[Loading]]
) -> None:
    options = {"keep_s": KEEP_S, "warm": "16MiB"}
    daemon = start_daemon(folder, **options)  # type: ignore[arg-type]
    clients = loading(daemon.socket, 3)
    chance, ended = random.Random(7), 0
    for _ in range(effort(2, 30, 300)):
        for one in clients:
            one.wait_for_turns(5)
        end(daemon, signal.SIGKILL)
        call = chance.choice(list(CALLS))
        inject = f"inject={call}:signal=SIGKILL:when={chance.randint(1, CALLS[call])}"
        command = ["strace", "-o", "/dev/null", "-e", inject, *SERVE]
        traced = None
        with contextlib.suppress(AssertionError):  # it was killed before it served
            traced = start_daemon(folder, command=command, wait=False, **options)  # type: ignore[arg-type]
        until = time.monotonic() + 0.5
        while traced is not None and traced.process.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        if traced is not None and traced.process.poll() is None:
            if pid := owner_of(Path(traced.socket)):
                os.kill(pid, signal.SIGKILL)
            traced.process.wait(30)
        else:
            ended += 1
        daemon = start_daemon(folder, **options)  # type: ignore[arg-type]
    for one in clients:
        one.wait_for_turns(20)
    daemon.wait_for(lambda stats: not stats["tiers"]["warm"]["states"]["quarantined"])
    for counts in [one.stop() for one in clients]:
        assert not counts["failed"] and not counts["wrong"] and not counts["returned"], counts
        assert counts["loaded"] and counts["saved"], counts
    assert "internal error" not in daemon.log.read_text()
    daemon.stop()


class Hanging:
    """A store whose process is stopped, until it may go on."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.got: list[str] = []
        self.waits = 0

    def take(self) -> Mapping[str, int]:
        return {}

    def put(self, name: str, fd: int, within_s: float = 60.0) -> bool:
        self.waits += 1
        if not self.may_go_on.wait(within_s):
            return False
        os.fstat(fd)
        self.got.append(name)
        return True

    def remove(self, name: str, within_s: float = 60.0) -> bool:
        self.got.append(f"-{name}")
        return True

    def close(self) -> None:
        self.got.append("closed")


def test_a_store_that_hangs_delays_nothing_and_gets_everything_in_order_later() -> None:
    hanging = Hanging()
    store = QueuedStore(hanging)
    for number in range(100):
        fd = os.memfd_create("extent")
        store.put(str(number), fd)
        os.close(fd)
    store.remove("5")
    assert not hanging.got
    assert hanging.waits <= 2, "of the daemon and of the thread"
    hanging.may_go_on.set()
    store.close()
    assert hanging.got == [*map(str, range(100)), "-5", "closed"]
