"""After a purge, no byte of a purged block is in a file of the cold directory or in the memory of the tenant,
also in the memory that a restart takes over; and no byte of another block is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from kvtier import Client, wire
from kvtier.space import Space
from support.daemons import Daemon, kvtier
from support.specs import spec_of

BLOCKS = 8
KEEP_S = 60
PAGE = 4096
SHARED = "/memfd:kvtier"


def content(key: bytes, nbytes: int) -> bytes:
    """Bytes from which the key does not follow: the two are searched for separately."""
    return sha256(b"content" + key).digest() * (nbytes // 32)


def saved(client: Client, name: str) -> tuple[Space, list[bytes]]:
    space = client.open(spec_of(name))
    keys = space.keys(list(range(16 * BLOCKS)))
    blocks = [content(key, space.block_bytes) for key in keys]
    assert space.save(keys, blocks).stored == BLOCKS
    return space, list(keys)


def is_whole(client: Client, name: str) -> bool:
    space = client.open(spec_of(name))
    keys = space.keys(list(range(16 * BLOCKS)))
    into = [bytearray(space.block_bytes) for _ in keys]
    found = space.load_into(keys, into)
    return [bytes(one) for one in into[:found]] == [content(key, space.block_bytes) for key in keys]


def memory_of(daemon: Daemon) -> Iterator[tuple[str, bytes]]:
    """The shared memory of a daemon: its extents, their generations and notes, its manifest. Of some files it
    has only a descriptor, of others only a mapping."""
    process = Path(f"/proc/{daemon.process.pid}")
    for fd in sorted(os.listdir(process / "fd"), key=int):
        try:
            if (name := os.readlink(process / "fd" / fd)).startswith(SHARED):
                yield name, (process / "fd" / fd).read_bytes()
        except FileNotFoundError:
            continue
    maps = (process / "maps").read_text().splitlines()
    with (process / "mem").open("rb", buffering=0) as memory:
        for line in maps:
            span, *_, name = line.split(maxsplit=5)
            if name.startswith(SHARED):
                first, last = (int(one, 16) for one in span.split("-"))
                memory.seek(first)
                yield name, memory.read(last - first)


def files_of(disk: Path) -> Iterator[tuple[str, bytes]]:
    return ((str(path), path.read_bytes()) for path in disk.rglob("*") if path.is_file())


def traces(places: Iterator[tuple[str, bytes]], keys: list[bytes]) -> set[str]:
    """Where the content or the name of one of these blocks is."""
    texts = [text for key in keys for text in (key, content(key, 32))]
    found = ((where, without_zeros(text)) for where, text in places)
    return {where for where, text in found if any(one in text for one in texts)}


def without_zeros(text: bytes) -> bytes:
    """The pages that contain data: most of a manifest and of a disk is empty."""
    whole = len(text) // PAGE * PAGE
    pages = np.frombuffer(text[:whole], "<u8").reshape(-1, PAGE // 8)
    return pages[pages.any(axis=1)].tobytes() + text[whole:]


@contextmanager
def leased(client: Client, space: Space, keys: list[bytes]) -> Iterator[None]:
    lease = space.lease(keys[:4], deadline_ms=60_000)
    assert lease.ready == 4
    yield
    client.ping()  # the release is sent before
    lease.release()
    client.ping()


@pytest.mark.parametrize(
    "way", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_no_byte_of_a_purged_block_is_left(
    daemon_of: Callable[..., Daemon], tmp_path: Path, way: signal.Signals
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    options = {
        "folder": tmp_path / "daemon",
        "keep_s": KEEP_S,
        "config": f"""
            [warm]
            size = "4MiB"
            keep_s = {KEEP_S}
            [cold]
            directories = ["{disk}"]
            size = "96MiB"
            segment = "1MiB"
            write = "through"
            codec = "raw"
        """,
    }
    daemon = daemon_of(**options)
    daemon.wait_for_disks()
    with daemon.connect() as client:
        space, gone = saved(client, "gone")
        _, kept = saved(client, "kept")
        daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] == 2 * BLOCKS)
        assert traces(files_of(disk), gone)
        assert any("-notes" in name for name in traces(memory_of(daemon), gone))
        with leased(client, space, gone):
            done = kvtier(
                "purge", "--socket", daemon.socket, "--space", str(_number(client, space)), "--yes"
            )
            assert done.returncode == 0, done.stderr
        assert traces(memory_of(daemon), gone) == set()
        assert traces(files_of(disk), gone) == set(), "frames, footers or the index"
        assert traces(files_of(disk), kept) and is_whole(client, "kept")
    daemon.process.send_signal(way)
    daemon.process.wait(60)
    daemon = daemon_of(**options)
    daemon.wait_for_disks()
    with daemon.connect() as client:
        assert client.open(spec_of("gone")).match(gone).ready == 0
        assert is_whole(client, "kept")
        assert traces(memory_of(daemon), gone) == set()
        assert traces(files_of(disk), gone) == set()


def test_blocks_of_others_are_whole_after_purges_under_saves(
    daemon_of: Callable[..., Daemon],
) -> None:
    """Slots of purged blocks are given to others at once: a late erasure would destroy them."""
    daemon = daemon_of(warm="4MiB")
    with daemon.connect() as client, daemon.connect() as reader:
        saved(client, "kept")
        for turn in range(6):
            space, keys = saved(client, f"gone {turn % 3}")
            with leased(reader, reader.open(space.spec), keys):
                first = 1
                while first:
                    request = wire.Purge(
                        client.link.new_id(), "", _number(client, space), first - 1
                    )
                    first = client.link.ask(request, wire.Purged).next
                    first += bool(first)
            assert space.match(keys).ready == 0
            saved(client, f"new {turn}")
            assert all(is_whole(client, f"new {one}") for one in range(max(0, turn - 2), turn + 1))
            assert is_whole(client, "kept")
            assert traces(memory_of(daemon), keys) == set()


def _number(client: Client, space: Space) -> int:
    from msgspec import msgpack

    report = client.link.ask(wire.Spaces(client.link.new_id(), "", 0), wire.Report)
    spaces = msgpack.decode(report.stats["spaces"])
    return next(one["space"] for one in spaces if one["identity"] == space.identity.hex())
