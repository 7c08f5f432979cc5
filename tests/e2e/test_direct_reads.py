"""Clients that read frames from the daemon's segments themselves: what is granted, and for how long."""

from __future__ import annotations

import dataclasses
import errno
import mmap
import os
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvtier import Client, FrameError, KvSpec, Refused
from kvtier.direct import DirectFrame, DirectLease, read_directly
from kvtier.frame import ENCRYPTED, PAGE, RAW
from kvtier.read_file import LIMIT_READ_FILES, UNKNOWN, ReadFile, ReadFiles
from kvtier_daemon.tenant import Tenant
from kvtier_kernels import xxh3_128
from support.daemons import Daemon, kvtier
from support.filled import filled
from support.specs import pattern, spec_of

SPEC = spec_of("direct", kv_heads=1)  # blocks of 16 KiB
CHAIN = 16
ALL = bytes(range(256))
PATIENT = {"LIMIT_DIRECT_S": 60.0}  # a busy machine is slow
DEADLINE_MS = 60_000
DaemonOf = Callable[..., Daemon]


def direct_daemon(
    daemon_of: DaemonOf, folder: Path, disk: Path, more: str = "", permits: str = "true"
) -> Daemon:
    folder.mkdir(exist_ok=True)
    cold = (
        f'[cold]\ndirectories = ["{disk}"]\nsize = "64MiB"\nsegment = "1MiB"\ncodec = "raw"\n{more}'
    )
    tenant = f'[tenants.default]\nuids = ["*"]\ndirect_reads = {permits}\n'
    daemon = daemon_of(
        config='[warm]\nsize = "4MiB"\n' + cold + tenant, folder=folder, haste=PATIENT
    )
    daemon.wait_for_disks()
    return daemon


def tokens(chain: int) -> list[int]:
    return [chain * 1_000_000 + n for n in range(16 * CHAIN)]


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


@pytest.fixture
def daemon(daemon_of: DaemonOf, tmp_path: Path, disk: Path) -> Daemon:
    """A daemon whose blocks of chains 0 and 1 are only on disk."""
    filled(tmp_path, "two chains", fill)
    return restarted(daemon_of, tmp_path, disk)


def fill(folder: Path, start: DaemonOf) -> None:
    (folder / "disk").mkdir(parents=True)
    first = direct_daemon(start, folder / "one", folder / "disk")
    with first.connect() as client:
        space = client.open(SPEC)
        for chain in range(2):
            keys = space.keys(tokens(chain))
            assert (
                space.save(keys, [pattern(key, SPEC.block_bytes) for key in keys]).stored == CHAIN
            )


def restarted(daemon_of: DaemonOf, tmp_path: Path, disk: Path) -> Daemon:
    again = direct_daemon(daemon_of, tmp_path / "one", disk)
    again.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] == 2 * CHAIN)
    return again


def asked(client: Client, chain: int = 0, spec: KvSpec = SPEC, **options: int) -> DirectLease:
    space = client.open(spec)
    options.setdefault("deadline_ms", DEADLINE_MS)
    return read_directly(space, space.keys(tokens(chain)), ALL, **options)


def payload(frame: DirectFrame) -> bytes:
    return os.pread(frame.file.fd, frame.read_bytes, frame.payload_at)[: frame.payload_bytes]


def header(frame: DirectFrame) -> bytes:
    return os.pread(frame.file.fd, frame.header_bytes, frame.header_at)


@pytest.fixture(autouse=True)
def writes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Read with Python's own memory, which is not aligned for direct I/O. Return the result of a write to
    each descriptor that arrives."""
    made = ReadFile.__init__
    tried = []

    def init(self: ReadFile, number: int, nbytes: int, fd: int) -> None:
        tried.append(written(fd))
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        os.close(fd)
        made(self, number, nbytes, again)

    monkeypatch.setattr(ReadFile, "__init__", init)
    return tried


def written(fd: int) -> int:
    """Write a page where nothing is; return the error."""
    with mmap.mmap(-1, PAGE) as page:
        try:
            os.pwrite(fd, page, os.fstat(fd).st_size - PAGE)
        except OSError as error:
            return error.errno or 0
    return 0


def test_granted_frames_are_the_blocks_that_were_saved(daemon: Daemon) -> None:
    with daemon.connect() as client:
        keys = client.open(SPEC).keys(tokens(0))
        lease = asked(client)
        assert [frame.at for frame in lease.frames] == list(range(CHAIN))
        for frame in lease.frames:
            found = frame.verify(header(frame), SPEC.block_bytes)
            assert found.codec == RAW and frame.is_inside
            assert xxh3_128(payload(frame)) == found.payload_digest == frame.digest
            assert payload(frame) == pattern(keys[frame.at], SPEC.block_bytes)
        sound = [frame.at % 3 != 0 for frame in lease.frames]
        assert lease.end(sound) == sound
        assert lease.end([True] * CHAIN) == [False] * CHAIN, "it has ended"
    stats = daemon.stats()
    assert stats["used_tokens"]["cold"] == sum(sound) * SPEC.block_tokens
    counts = stats["tiers"]["cold"]["states"]
    assert (counts["direct"], counts["not_direct"]) == (sum(sound), CHAIN - sum(sound))


@pytest.mark.parametrize(("first", "most"), [(0, 4), (5, 4), (14, 4), (16, 4), (3, 0)])
def test_a_part_of_the_blocks_can_be_requested(daemon: Daemon, first: int, most: int) -> None:
    with daemon.connect() as client:
        space = client.open(SPEC)
        keys = space.keys(tokens(0))
        lease = read_directly(space, keys, ALL, first=first, most=most)
        assert [frame.at for frame in lease.frames] == list(range(CHAIN))[first : first + most]
        for frame in lease.frames:
            frame.verify(header(frame), SPEC.block_bytes)
        assert all(lease.end([True] * len(lease.frames)))


def test_blocks_in_memory_are_not_granted(daemon: Daemon) -> None:
    with daemon.connect() as client:
        space = client.open(SPEC)
        keys = space.keys(tokens(0))
        while space.match(keys[:4]).ready < 4:
            time.sleep(0.002)
        assert [frame.at for frame in asked(client).frames] == list(range(4, CHAIN))


def test_a_tenant_without_permission_gets_nothing(
    daemon_of: DaemonOf, tmp_path: Path, disk: Path
) -> None:
    refusing = direct_daemon(daemon_of, tmp_path / "one", disk, permits="false")
    with refusing.connect() as client, pytest.raises(Refused, match="direct_reads = true"):
        asked(client)


def test_other_codecs_are_not_granted(daemon: Daemon) -> None:
    with daemon.connect() as client:
        space = client.open(SPEC)
        keys = space.keys(tokens(0))
        assert not read_directly(space, keys, bytes([ENCRYPTED | RAW, 3])).frames
        assert read_directly(space, keys, bytes([RAW])).frames


def test_a_descriptor_cannot_write(daemon: Daemon, writes: list[int]) -> None:
    with daemon.connect() as client:
        assert asked(client).frames
        assert writes and set(writes) == {errno.EBADF}


def test_blocks_forgotten_during_the_read_are_misses(daemon: Daemon) -> None:
    with daemon.connect() as client, daemon.connect() as other:
        space = client.open(SPEC)
        keys = space.keys(tokens(0))
        lease = asked(client)
        other.open(SPEC).forget(keys[5:7])
        assert lease.end([True] * CHAIN) == [at not in (5, 6) for at in range(CHAIN)]


def test_blocks_that_came_to_memory_during_the_read_are_still_stored(daemon: Daemon) -> None:
    with daemon.connect() as client:
        space = client.open(SPEC)
        lease = asked(client)
        while space.match(space.keys(tokens(0))).ready < CHAIN:
            time.sleep(0.002)
        assert all(lease.end([True] * CHAIN))


def test_after_the_deadline_all_blocks_are_misses(daemon: Daemon) -> None:
    with daemon.connect() as client:
        for _ in range(10):  # the daemon may have removed some of these leases by itself
            lease = asked(client, deadline_ms=1)
            time.sleep(0.01)
            assert not any(lease.end([True] * CHAIN))


def test_a_lease_of_another_session_cannot_be_ended(daemon: Daemon) -> None:
    with daemon.connect() as client, daemon.connect() as other:
        lease, others = asked(client), asked(other)
        others._lease, kept = lease._lease, others._lease
        assert not any(others.end([True] * CHAIN))
        others._lease = kept
        assert all(others.end([True] * CHAIN)) and all(lease.end([True] * CHAIN))


def test_leases_that_a_client_does_not_end_are_limited_and_end_with_it(daemon: Daemon) -> None:
    with daemon.connect() as client:
        leases = [asked(client) for _ in range(16)]
        with pytest.raises(Refused, match="16 direct reads"):
            asked(client)
        leases[0].end([True] * CHAIN)
        asked(client)
    with daemon.connect() as client:
        assert asked(client).frames


def test_a_header_of_another_block_epoch_or_payload_is_refused(daemon: Daemon) -> None:
    with daemon.connect() as client:
        one, two = asked(client).frames[:2]
        text = header(one)
        assert one.verify(text, SPEC.block_bytes)
        with pytest.raises(FrameError, match="another block"):
            two.verify(text, SPEC.block_bytes)
        with pytest.raises(FrameError, match="another epoch"):
            dataclasses.replace(one, epoch=one.epoch + 1).verify(text, SPEC.block_bytes)
        with pytest.raises(FrameError, match="digest mismatch"):
            one.verify(text[:100] + bytes([text[100] ^ 1]) + text[101:], SPEC.block_bytes)
        with pytest.raises(FrameError, match="another one"):
            one.verify(text, SPEC.block_bytes + 1)
        with pytest.raises(FrameError, match="no frame"):
            one.verify(bytes(len(text)), SPEC.block_bytes)


class Writer(threading.Thread):
    """Saves one chain after another, so that the oldest segments are reused."""

    def __init__(self, daemon: Daemon) -> None:
        super().__init__()
        self.chain = 1
        self._daemon = daemon
        self._ended = threading.Event()

    def run(self) -> None:
        with self._daemon.connect() as client:
            space = client.open(SPEC)
            while not self._ended.is_set():
                keys = space.keys(tokens(self.chain + 1))
                space.save(keys, [pattern(key, SPEC.block_bytes) for key in keys])
                self.chain += 1

    def stop(self) -> None:
        self._ended.set()
        self.join()


def test_a_segment_is_not_reused_under_a_lease_and_has_another_epoch_afterwards(
    daemon: Daemon,
) -> None:
    writer = Writer(daemon)
    with daemon.connect() as client:
        space = client.open(SPEC)
        first = asked(client)
        first.end([True] * CHAIN)
        lost = first.frames
        writer.start()
        try:
            changed_since(lost, [header(frame) for frame in lost])
            frames, chain = [], 1
            while not frames:  # the oldest that are left
                lease = asked(client, chain := chain + 1)
                until, frames = time.monotonic() + 1.0, list(lease.frames)
            keys = space.keys(tokens(chain))
            while time.monotonic() < until:
                for frame in frames:
                    frame.verify(header(frame), SPEC.block_bytes)
                    assert payload(frame) == pattern(keys[frame.at], SPEC.block_bytes)
            lease.end([True] * len(frames))  # some may have lost their place, but not their bytes
            for frame in changed_since(frames, [header(frame) for frame in frames]):
                with pytest.raises(FrameError):
                    frame.verify(header(frame), SPEC.block_bytes)
        finally:
            writer.stop()


def changed_since(frames: Sequence[DirectFrame], texts: Sequence[bytes]) -> list[DirectFrame]:
    """Wait until the header of one of these frames has changed; return those that have."""
    while True:
        now = [frame for frame, text in zip(frames, texts, strict=True) if header(frame) != text]
        if now:
            return now
        time.sleep(0.002)


def test_a_client_closes_its_oldest_files_and_reports_them() -> None:
    files = ReadFiles()
    for number in range(1, LIMIT_READ_FILES + 4):
        files.add(ReadFile(number, 1, os.open("/dev/null", os.O_RDONLY)))
    used = files.use(1)
    files.close_oldest()
    assert files.closed == [2, 3, 4] and files.use(2) is None and used is files.use(1)


def test_a_number_of_forgets_that_ended_is_unknown() -> None:
    """A user that has left the tenant may have mapped it."""
    blocks = SimpleNamespace(forgets=array("Q", (5,)))
    tenant = Tenant("t", b"", 0, cast(Any, SimpleNamespace(blocks=blocks)))
    first, second = ReadFiles(), ReadFiles()
    first.add(ReadFile(0, PAGE, tenant.count_forgets().handles(True)[0]))
    assert first.forgets == 5
    blocks.forgets[0] += 1
    assert first.forgets == 6
    tenant.end_forget_count()
    blocks.forgets[0] += 1
    second.add(ReadFile(0, PAGE, tenant.count_forgets().handles(True)[0]))
    blocks.forgets[0] += 1
    assert first.forgets == UNKNOWN and second.forgets == 9


def test_a_tier_that_is_switched_off_grants_nothing_and_its_blocks_are_still_stored(
    daemon: Daemon,
) -> None:
    with daemon.connect() as client:
        lease = asked(client)
        text = header(lease.frames[0])
        client.tier("cold", "off")
        daemon.wait_for(lambda stats: stats["tiers"]["cold"]["state"] == "off")
        assert not asked(client).frames
        assert lease.frames[0].verify(text, SPEC.block_bytes)
        assert all(lease.end([True] * CHAIN))
        client.tier("cold", "on")
        daemon.wait_for(lambda stats: stats["tiers"]["cold"].get("blocks") == 2 * CHAIN)
        again: list[bool] = []
        while len(again) < CHAIN:
            again = (lease := asked(client)).end([True] * len(lease.frames))
        assert all(again)


def test_a_purge_erases_what_a_lease_names(daemon: Daemon) -> None:
    """A descriptor shows forgotten blocks until they are erased."""
    with daemon.connect() as client:
        lease = asked(client)
        frame = lease.frames[0]
        client.open(SPEC).forget(client.open(SPEC).keys(tokens(0)))
        frame.verify(header(frame), SPEC.block_bytes)
        done = kvtier("purge", "--tenant", "default", "--yes", "--socket", daemon.socket)
        assert done.returncode == 0, done.stderr
        with pytest.raises(FrameError):
            frame.verify(header(frame), SPEC.block_bytes)
        assert not any(lease.end([True] * CHAIN))


def test_a_group_may_open_the_files_of_its_tenant_as_long_as_it_is_configured(
    daemon_of: DaemonOf, tmp_path: Path, disk: Path
) -> None:
    group = os.getgid() or 12_345  # root may give a file to any group
    modes = []
    for permits in (f"true\ndirect_group = {group}", "true"):
        daemon = direct_daemon(daemon_of, tmp_path / "one", disk, permits=permits)
        with daemon.connect() as client:
            space = client.open(SPEC)
            keys = space.keys(tokens(0))
            space.save(keys, [pattern(key, SPEC.block_bytes) for key in keys])
        daemon.stop()
        files = [
            path for path in (disk / "segments" / "default").iterdir() if path.name.isdecimal()
        ]
        assert files
        modes.append({path.stat().st_mode & 0o777 for path in files})
        assert {path.stat().st_gid for path in files} == {group}
        assert (disk / "segments").stat().st_mode & 0o077 == 0
    assert modes == [{0o640}, {0o600}]


def test_the_daemon_counts_the_files_that_a_client_has(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that the client has closed is sent again with the next frame in it."""
    with daemon.connect() as client:
        first = asked(client).frames[0].file
        monkeypatch.setattr("kvtier.read_file.LIMIT_READ_FILES", 0)
        again = asked(client).frames[0].file
        assert again.number != first.number
        assert os.fstat(again.fd).st_ino == os.fstat(first.fd).st_ino


def test_descriptors_of_a_daemon_that_ended_are_misses(
    daemon: Daemon, daemon_of: DaemonOf, tmp_path: Path, disk: Path
) -> None:
    with daemon.connect(reconnect_s=60.0) as client:
        lease = asked(client)
        daemon.stop()
        restarted(daemon_of, tmp_path, disk)
        assert not any(lease.end([True] * CHAIN))
        assert asked(client).frames
