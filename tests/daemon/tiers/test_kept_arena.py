"""What outlives a daemon: descriptors in a keeper process, and the manifest of an arena."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from kvtier.layout import space_id
from kvtier_daemon.catalog import Catalog, SessionId
from kvtier_daemon.catalog.policy import make
from kvtier_daemon.serving.writers import Writers
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers import keeper
from kvtier_daemon.tiers.fd_store import KeeperStore, QueuedStore
from kvtier_daemon.tiers.kept_arena import (
    SEALS,
    ExtentFiles,
    KeptArena,
    KeptSession,
)
from kvtier_kernels import Store
from support.kept import Held, held
from support.specs import spec_of
from support.stores import PAGE, keys

__all__ = ["held"]  # a fixture

OWNERS = {"one": b"1" * 16, "two": b"2" * 16}
EXTENT = 64 * PAGE
PAGES = 2048
SPEC = spec_of("kept", layers=1, kv_heads=1, head_dim=64)
TOKEN = b"t" * 16


def arena_of(store: Held) -> KeptArena:
    return KeptArena(store, OWNERS, huge_pages=False)


def keep_extent(arena: KeptArena) -> None:
    fds = []
    for nbytes in (EXTENT, EXTENT // PAGE * 8, EXTENT // PAGE * 128):
        fd = os.memfd_create("extent", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        fds.append(fd)
    arena.keep("one", ExtentFiles(EXTENT, *fds))
    for fd in fds:
        os.close(fd)


def taken(arena: KeptArena, quota_bytes: int = 1 << 30) -> int:
    """How many extents it takes over."""
    extents = arena.take("one", quota_bytes)
    for fd in (fd for files in extents for fd in files[1:]):
        os.close(fd)
    return len(extents)


def test_memory_that_ends_each_daemon_at_its_start_is_not_tried_for_ever(held: Held) -> None:
    arena = arena_of(held)
    keep_extent(arena)
    arena.close()
    for expected in (1, 1, 0):
        arena = arena_of(held)
        assert taken(arena) == expected
        arena.close()  # it ended before it had settled


def test_a_daemon_that_takes_memory_over_makes_the_next_one_try_again(held: Held) -> None:
    arena = arena_of(held)
    keep_extent(arena)
    for _ in range(4):
        arena.close()
        arena = arena_of(held)
        assert taken(arena) == 1
        arena.settle()
    arena.close()


def test_memory_above_the_quota_is_not_taken_over(held: Held) -> None:
    arena = arena_of(held)
    for _ in range(3):
        keep_extent(arena)
    arena.close()
    arena = arena_of(held)
    assert taken(arena, 2 * EXTENT + EXTENT // 2) == 2
    arena.settle()
    arena.close()
    assert len(held.fds) == 1 + 2 * 3, "the rest is freed"


def test_numbers_of_sessions_are_not_used_again(held: Held) -> None:
    arena = arena_of(held)
    for number in (1, 7):
        arena.session_began(number, KeptSession("one", TOKEN, 1, 0, 0))
    arena.close()
    arena = arena_of(held)
    assert arena.next_session == 8
    arena.close()


def test_only_its_own_tenant_frees_the_slots_of_an_earlier_session(held: Held) -> None:
    """The token is the same: a client sends those of all its connections."""
    arena = arena_of(held)
    arena.session_began(5, KeptSession("one", TOKEN, 0, 0, 0))  # in another pid namespace
    arena.close()
    arena = arena_of(held)
    generations, notes = mmap.mmap(-1, 8 * PAGES), mmap.mmap(-1, 128 * PAGES)
    catalogs = [Catalog(Store(), make("lru")) for _ in range(2)]
    for catalog in catalogs:
        catalog.add_extent(PAGES * PAGE, generations, notes)
    before, catalog = catalogs
    space = before.spaces.open(space_id(SPEC, "one"), SPEC, SessionId(5))
    before.reserve(SessionId(5), space, 0, 0, b"", keys("a"))
    spaces = {space.number: (space.identity, SPEC)}
    _, sessions, _ = catalog.kept.adopt(spaces, [(0, 0, PAGES)])
    one, two = Tenant("one", b"", 0, catalog), Tenant("two", b"", 0, Catalog(Store(), make("lru")))
    loop = asyncio.new_event_loop()
    writers = Writers(loop, arena)
    writers.watch(one, sessions)
    for tenant, token, left in ((two, TOKEN, 1), (one, b"x" * 16, 1), (one, TOKEN, 0)):
        writers.end_for_good(tenant, token)
        assert catalog.counts()["blocks"]["quarantined"] == left
    writers.close()
    loop.close()
    arena.close()


# --- the keeper process ---------------------------------------------------------------------------


def listening(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen()
    return listener


def test_a_keeper_waits_from_the_end_of_the_last_daemon_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(keeper.time, "monotonic", lambda: now)
    listener = listening(tmp_path / "keeper")
    keeping = keeper.Keeper(listener, 60.0)
    thread = threading.Thread(target=keeping.run)
    thread.start()
    store = KeeperStore(tmp_path / "keeper", 60)
    store.put("one", 0)
    assert len(taken_fds(store)) == 1
    now = 1000.0  # the daemon ran for long
    store.close()
    deadline = time.perf_counter() + 30
    while keeping._daemons:
        assert time.perf_counter() < deadline
        time.sleep(0.001)
    thread.join(0.2)  # a keeper that counts from its start ends here
    assert thread.is_alive()
    store = KeeperStore(tmp_path / "keeper", 0)
    assert len(taken_fds(store)) == 1
    store.remove("one")  # a keeper that holds nothing ends with its daemon
    store.close()
    thread.join(30)
    assert not thread.is_alive()
    listener.close()


def taken_fds(store: KeeperStore) -> list[str]:
    fds = store.take()
    for fd in fds.values():
        os.close(fd)
    return list(fds)


def test_a_keeper_that_fails_while_it_returns_descriptors_is_left_for_good(tmp_path: Path) -> None:
    """A later daemon would find blocks that were forgotten meanwhile."""
    path = tmp_path / "keeper"
    listener = listening(path)

    def serve() -> None:
        daemon, _ = listener.accept()
        assert daemon.recv(16) == keeper.TAKE
        socket.send_fds(daemon, [keeper.PUT + b"one"], [0])
        daemon.close()

    thread = threading.Thread(target=serve)
    thread.start()
    store = KeeperStore(path, 60)
    files = len(os.listdir("/proc/self/fd"))
    assert taken_fds(store) == []
    thread.join(30)
    assert not path.exists()
    assert len(os.listdir("/proc/self/fd")) < files, "its connection and the descriptors are closed"
    listener.close()


def test_a_daemon_that_is_killed_after_a_new_extent_has_stored_all_its_parts(
    tmp_path: Path,
) -> None:
    """No slot of the extent is given away before `keep` returns, so nothing that was saved is lost."""
    path = tmp_path / "keeper"
    for number in range(1, 9):
        child = os.fork()
        if not child:
            sys.setswitchinterval(60.0)  # no other thread runs while this one does not wait
            arena = KeptArena(QueuedStore(KeeperStore(path, 60)), OWNERS, huge_pages=False)
            arena.take("one", 1 << 30)
            arena.settle()
            keep_extent(arena)
            os.kill(os.getpid(), signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        store = KeeperStore(path, 0)
        arena = KeptArena(QueuedStore(store), OWNERS, huge_pages=False)
        assert taken(arena) == number
        arena.settle()
        arena.close()
    store = KeeperStore(path, 0)
    for name in taken_fds(store):
        store.remove(name)
    store.close()
