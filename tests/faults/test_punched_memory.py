"""A client that punches holes into its own extents: no page that the daemon accesses may kill it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier import wire
from kvtier.units import MIB
from support.daemons import Daemon
from support.huge import huge_pages
from support.raw import Raw
from support.specs import pattern, spec_of

PUNCH_HOLE = 0x01 | 0x02  # with the size kept
TOKENS = list(range(16 * 16))
libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]

CONFIG = """
[warm]
size = "{warm}"
huge_pages = {huge}
[cold]
directories = ["{folder}"]
size = "64MiB"
segment = "1MiB"
write = "through"
codec = "{codec}"
[tenants.victim]
uids = [65533]
quota = "50%"
[tenants.attacker]
uids = ["*"]
quota = "50%"
"""


def extents_of(daemon: Daemon) -> list[int]:
    """The descriptors of the tenant's extents, as a client receives them."""
    raw = Raw(daemon, hello=False)
    raw.send(wire.Hello(1, wire.SCHEMA, "puncher"), wire.Ping(2))
    found: list[int] = []
    while True:
        data, fds, _, _ = socket.recv_fds(raw.sock, 1 << 16, 16)
        found += fds[0::2]
        for table in fds[1::2]:
            os.close(table)
        if any(wire.decode_reply(body) == wire.Done(2) for body in raw.framer.feed(data)):
            raw.sock.close()
            return found


def punch(fd: int) -> None:
    size = os.fstat(fd).st_size
    assert libc.fallocate(fd, PUNCH_HOLE, 0, size) == 0, os.strerror(ctypes.get_errno())


@contextlib.contextmanager
def free_pages_taken() -> Iterator[None]:
    """Another process uses every free huge page; pages that the kernel has pinned for I/O are not free."""
    fd = os.memfd_create("other", os.MFD_HUGETLB | os.MFD_HUGE_2MB)
    try:
        size = 0
        with contextlib.suppress(OSError):
            while True:
                os.posix_fallocate(fd, size, 2 * MIB)
                size += 2 * MIB
        yield
    finally:
        os.close(fd)


@pytest.mark.parametrize("codec", ["raw", "fix4"])
def test_a_hole_in_huge_pages_kills_neither_the_daemon_nor_blocks_of_others(
    tmp_path: Path, daemon_of: Callable[..., Daemon], codec: str
) -> None:
    (tmp_path / "disk").mkdir()
    config = CONFIG.format(warm="8MiB", huge="true", folder=tmp_path / "disk", codec=codec)
    with huge_pages(4):
        daemon = daemon_of(config=config)
        fds = extents_of(daemon)
        assert sum(os.fstat(fd).st_size for fd in fds) == 4 * MIB
        with daemon.connect() as client:
            spec = spec_of("punched")
            space = client.open(spec)
            keys = space.keys(TOKENS)
            with space.reserve(keys) as saving:
                for fd in fds:
                    punch(fd)
                with free_pages_taken():
                    saving.commit(len(keys))
                    # Each write reads its block before any of it is on disk.
                    while "removed pages from the memory" not in daemon.log.read_text():
                        assert daemon.process.poll() is None, "the hole ended the daemon"
                        client.ping()
            stats = client.stats()
            assert stats["tiers"]["cold"]["failure"] == "", "the disk is not to blame"
            assert stats["tiers"]["cold"]["faults"] == 0
        for fd in fds:
            os.close(fd)
        assert daemon.stop() == 0
        lost = f"lost {len(keys)}: they are larger than a segment (raise cold.segment), or a client"
        assert lost in daemon.log.read_text(), "the stop waited for blocks that cannot be written"


def test_a_hole_in_small_pages_is_filled_without_memory_of_the_daemon(
    tmp_path: Path, daemon_of: Callable[..., Daemon]
) -> None:
    (tmp_path / "disk").mkdir()
    config = CONFIG.format(warm="32MiB", huge="false", folder=tmp_path / "disk", codec="raw")
    daemon = daemon_of(config=config)
    fds = extents_of(daemon)
    before = daemon.process_bytes()
    with daemon.connect() as client:
        spec = spec_of("punched")
        space = client.open(spec)
        for number in range(4):
            keys = space.keys([number, *TOKENS])
            with space.reserve(keys) as saving:
                for fd in fds:
                    punch(fd)
                saving.commit(len(keys))
        daemon.wait_for(lambda s: s["tiers"]["cold"]["blocks"] == 4 * len(keys))
        assert daemon.process_bytes() < before + 16 * MIB
        fresh = space.keys([99, *TOKENS])
        space.save(fresh, [pattern(key, spec.block_bytes) for key in fresh])
        with space.load(fresh) as blocks:
            assert [bytes(b) for b in blocks] == [pattern(k, spec.block_bytes) for k in fresh]
    for fd in fds:
        os.close(fd)
