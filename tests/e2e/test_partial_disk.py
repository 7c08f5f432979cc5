"""Loads of parts of blocks that are only on disk: the client reads their frames, verified entry by entry."""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kvtier.direct
import kvtier.direct_parts
import kvtier.read_file
from kvtier import Client, Group, KvSpec, frame, load_tokens, wire
from kvtier.direct import read_directly
from kvtier.frame import PAGE, decode
from kvtier.read_file import UNKNOWN
from kvtier.space import Space
from kvtier_daemon.codec.table import BY_NAME
from support.daemons import Daemon, start_daemon
from support.filled import filled
from support.specs import spec_of

BLOCKS = 8
SPEC = spec_of("partial disk", layers=8)  # blocks of 128 KiB
CONFIG = """
[warm]
size = "4MiB"
[cold]
directories = ["{disk}"]
size = "64MiB"
segment = "1MiB"
scrub = "0"
{cold}
[tenants.default]
uids = ["*"]
direct_reads = {permits}
"""
ENCRYPTED = 'encryption = "aes-256-gcm"\nkey_file = "{folder}/keys"'
CODECS = {  # the options of the cold tier, and whether the client decodes them
    "raw": ('codec = "raw"', True),
    "fix4": ('codec = "fix4"', True),
    "r32": ('codec = "r32"', True),
    "zstd": ('codec = "zstd"', False),
    "q8": ('codecs = ["partial*=q8"]', True),
    "encrypted": (f'codec = "r32"\n{ENCRYPTED}', False),
}
ENCRYPTED_R32 = frame.ENCRYPTED | frame.R32
PARTS: list[tuple[Any, range | None]] = [
    ([3], None), (range(2, 7), None), ([7, 0, 3], None), (None, range(5, 9)), ([6, 1], range(15, 16)),
    ([0, 7], range(1)),
]  # fmt: skip


def values(spec: KvSpec, group: int, count: int, seed: int) -> list[bytes]:
    """Blocks of bfloat16 that codecs make smaller."""
    size = spec.group_block_bytes(group) // 2
    draw = np.random.default_rng(seed).standard_normal((count, size)).astype(np.float32)
    return [(row.view(np.uint32) >> 16).astype(np.uint16).tobytes() for row in draw]


def started(
    daemon_of: Callable[..., Daemon], folder: Path, codec: str = "raw", permits: str = "true"
) -> Daemon:
    cold = CODECS[codec][0].format(folder=folder)
    folder.mkdir(exist_ok=True)
    (folder / "keys").write_text("11" * 32)
    (folder / "keys").chmod(0o600)
    (folder / "disk").mkdir(exist_ok=True)
    config = CONFIG.format(disk=folder / "disk", cold=cold, permits=permits)
    # A busy machine is slow.
    daemon = daemon_of(config=config, folder=folder, haste={"LIMIT_DIRECT_S": 60.0})
    daemon.wait_for_disks()
    return daemon


class OnDisk:
    """A daemon whose blocks of a space are only on disk, and what they are."""

    def __init__(
        self, daemon_of: Callable[..., Daemon], folder: Path, codec: str = "raw", spec: KvSpec = SPEC,
        permits: str = "true",
    ) -> None:  # fmt: skip
        self.spec, self.blocks = spec, {}
        for group, kind in enumerate(spec.cache_groups):
            for shard in range(kind.shards):
                self.blocks[group, shard] = values(spec, group, BLOCKS, 10 * group + shard)
        total = BLOCKS * len(self.blocks)

        def fill(source: Path, start: Callable[..., Daemon]) -> None:
            daemon = started(start, source, codec, permits)
            with daemon.connect() as client:
                space, keys = self.open(client)
                for (group, shard), blocks in self.blocks.items():
                    assert space.save(keys, blocks, group, shard).stored == BLOCKS
                daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] == total)

        filled(folder, (codec, spec, permits), fill)
        self.daemon = started(daemon_of, folder, codec, permits)
        self.daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] == total)
        self.before = 0  # blocks that clients of earlier tests have read

    def open(self, client: Client) -> tuple[Space, Any]:
        space = client.open(self.spec)
        return space, space.keys(list(range(BLOCKS * self.spec.block_tokens)))

    def direct(self, client: Client) -> int:
        """How many blocks clients have read themselves, this one included."""
        client.ping()  # after what it reported
        return self.all_direct() - self.before

    def all_direct(self) -> int:
        return int(self.daemon.stats()["tiers"]["cold"]["states"]["direct"])


def part_of(
    spec: KvSpec, group: int, block: bytes, layers: Any, tokens: range | None
) -> bytes:  # fmt: skip
    kind = spec.cache_groups[group]
    whole = np.frombuffer(block, np.uint8).reshape(kind.layers, kind.parts, spec.block_tokens, -1)
    chosen = whole if layers is None else whole[list(layers)]
    return (chosen if tokens is None else chosen[:, :, tokens.start : tokens.stop]).tobytes()


def load(space: Space, keys: Any, layers: Any, tokens: Any, **options: Any) -> list[bytes]:
    size = len(part_of(space.spec, options.get("group", 0), bytes(space.group_block_bytes(
        options.get("group", 0))), layers, tokens))  # fmt: skip
    targets = [bytearray(size) for _ in keys]
    options.setdefault("wait_ms", 60_000)
    ready = space.load_into(keys, targets, layers=layers, tokens=tokens, **options)
    assert not any(map(any, targets[ready:]))
    return [bytes(one) for one in targets[:ready]]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("codec", CODECS)
def test_parts_are_those_of_a_whole_load_for_every_codec(
    daemon_of: Callable[..., Daemon], tmp_path: Path, codec: str
) -> None:
    disk = OnDisk(daemon_of, tmp_path / "one", codec)
    decodes = CODECS[codec][1]
    with disk.daemon.connect() as client:
        space, keys = disk.open(client)
        lease = read_directly(space, keys, bytes(range(256)))
        stored = {one.codec for one in lease.frames}
        assert stored == {ENCRYPTED_R32 if codec == "encrypted" else BY_NAME[codec].number}
        lease.end([False] * BLOCKS)
        found = [load(space, keys, *part) for part in PARTS]
        assert disk.direct(client) == (len(PARTS) * BLOCKS if decodes else 0)
        assert space.match(keys[:1]).ready == (0 if decodes else 1), "the daemon read whole blocks"
        whole = [bytearray(space.block_bytes) for _ in keys]
        assert space.load_into(keys, whole, wait_ms=60_000) == BLOCKS
        assert (list(map(bytes, whole)) == disk.blocks[0, 0]) == (codec != "q8")
        for part, blocks in zip(PARTS, found, strict=True):
            assert blocks == [part_of(SPEC, 0, bytes(block), *part) for block in whole]


@pytest.fixture
def disk(daemon_of: Callable[..., Daemon], tmp_path: Path) -> OnDisk:
    return OnDisk(daemon_of, tmp_path / "one")


@pytest.fixture(scope="module")
def one_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnDisk]:
    running: list[Daemon] = []

    def start(**options: Any) -> Daemon:
        running.append(start_daemon(**options))
        return running[-1]

    try:
        yield OnDisk(start, tmp_path_factory.mktemp("shared") / "one")
    finally:
        for daemon in running:
            daemon.end()


@pytest.fixture
def shared_disk(one_disk: OnDisk) -> OnDisk:
    """For tests that only read directly: nothing is read into memory, and no block is lost."""
    cold = one_disk.daemon.stats()["tiers"]["cold"]
    assert (cold["states"]["read"], cold["blocks"]) == (0, BLOCKS)
    one_disk.before = one_disk.all_direct()
    return one_disk


def read_bytes() -> int:
    """How many bytes this process has read from disks."""
    return int(Path("/proc/self/io").read_text().partition("read_bytes: ")[2].split()[0])


PARTS_READ: list[tuple[Any, range | None, int]] = [  # and how many layers of 8 that reads
    ([5], None, 1), ([0], range(3, 4), 1), ([0, 1, 7], None, 3), ([0, 3], None, 4), (None, range(1), 8),
]  # fmt: skip


@pytest.mark.parametrize(("layers", "tokens", "many"), PARTS_READ)
def test_only_headers_and_the_entries_that_are_needed_are_read(
    shared_disk: OnDisk, layers: Any, tokens: range | None, many: int
) -> None:
    """A digest covers a part of a layer, and a small gap is read too."""
    with shared_disk.daemon.connect() as client:
        space, keys = shared_disk.open(client)
        found, wanted = 1 << 30, BLOCKS * (PAGE + many * SPEC.block_bytes // 8)
        for _ in range(5):  # the process may read other pages, such as those of its code
            before = read_bytes()
            assert len(load(space, keys, layers, tokens)) == BLOCKS
            found = min(found, read_bytes() - before)
        if read_bytes() == 0:
            pytest.skip("the files are not on a disk")
        assert wanted <= found < wanted + 2 * PAGE


def test_several_groups_and_shards_are_read_each_from_their_frames(
    daemon_of: Callable[..., Daemon], tmp_path: Path
) -> None:
    groups = [
        Group(layers=3, kv_heads=2, head_dim=64, shards=2),
        Group(layers=4, kv_heads=1, head_dim=128, parts=1),
    ]
    spec = KvSpec.groups(
        groups, model="partial groups", weights="1", dtype="bfloat16", block_tokens=32
    )
    disk = OnDisk(daemon_of, tmp_path / "one", "r32", spec)
    with disk.daemon.connect() as client:
        space, keys = disk.open(client)
        for (group, shard), part in itertools.product(
            disk.blocks, (([1], None), ([2, 0], range(7, 30)))
        ):
            found = load(space, keys, *part, group=group, shard=shard)
            assert found == [part_of(spec, group, one, *part) for one in disk.blocks[group, shard]]
        assert disk.direct(client) == 6 * BLOCKS


def test_a_space_with_a_window_is_loaded_through_memory(
    daemon_of: Callable[..., Daemon], tmp_path: Path
) -> None:
    full = Group(layers=2, kv_heads=1, head_dim=64)
    window = Group(kind="window", layers=2, kv_heads=1, head_dim=64, window_tokens=64)
    spec = KvSpec.groups(
        [full, window], model="partial window", weights="1", dtype="bfloat16", block_tokens=16
    )
    disk = OnDisk(daemon_of, tmp_path / "one", "raw", spec)
    with disk.daemon.connect() as client:
        space, keys = disk.open(client)
        found = load(space, keys, [1], None)
        assert found == [part_of(spec, 0, one, [1], None) for one in disk.blocks[0, 0]]
        assert disk.direct(client) == 0


def test_a_tenant_without_direct_reads_loads_through_memory(
    daemon_of: Callable[..., Daemon], tmp_path: Path
) -> None:
    disk = OnDisk(daemon_of, tmp_path / "one", permits="false")
    with disk.daemon.connect() as client:
        space, keys = disk.open(client)
        for _ in range(2):
            found = load(space, keys, [1], None)
            assert found == [part_of(SPEC, 0, one, [1], None) for one in disk.blocks[0, 0]]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("wanted", [{0}, {5}, {0, 1, 2}, {2, 3, 6}, {7}, set(range(BLOCKS))])
def test_a_prefix_that_is_partly_in_memory_is_read_from_both(
    disk: OnDisk, wanted: set[int]
) -> None:
    with disk.daemon.connect() as client:
        space, keys = disk.open(client)
        for number in wanted:
            assert space.wait(keys[number : number + 1], 60_000).ready == 1
        part = [2], range(4, 11)
        expected = [part_of(SPEC, 0, one, *part) for one in disk.blocks[0, 0]]
        assert load(space, keys, *part) == expected
        assert disk.direct(client) == BLOCKS - len(wanted)
        one = bytearray(sum(map(len, expected)))
        options: Any = {"layers": part[0], "tokens": part[1], "wait_ms": 60_000}
        assert space.load_into(keys, one, **options) == BLOCKS and one == b"".join(expected)


def damage(disk: OnDisk, client: Client, at: int, entry: int | None) -> None:
    """Change one byte of an entry of block `at` on disk, or of its header."""
    space, keys = disk.open(client)
    lease = read_directly(space, keys, bytes(range(256)), first=at, most=1)
    (one,) = lease.frames
    path = os.readlink(f"/proc/self/fd/{one.file.fd}")
    lease.end([True])
    with open(path, "r+b") as file:
        file.seek(one.header_at)
        header = decode(file.read(one.header_bytes))
        within = 100 if entry is None else one.header_bytes + header.entries[entry].offset + 9
        file.seek(one.header_at + within)
        byte = file.read(1)[0]
        file.seek(one.header_at + within)
        file.write(bytes([byte ^ 1]))
        file.flush()
        os.fsync(file.fileno())


@pytest.mark.sampled(5)
@pytest.mark.parametrize("codec", ["raw", "r32", "q8"])
@pytest.mark.parametrize("entry", [None, 0, 6, 7, 15])
def test_damaged_entries_are_misses_and_others_are_read(
    daemon_of: Callable[..., Daemon], tmp_path: Path, codec: str, entry: int | None
) -> None:
    disk = OnDisk(daemon_of, tmp_path / "one", codec)
    with disk.daemon.connect() as client:
        space, keys = disk.open(client)
        sound = {layer: load(space, keys, [layer], None) for layer in range(8)}
        damage(disk, client, 4, entry)
        for layer in range(8):
            bad = entry is None or entry // 2 == layer
            if not bad:
                assert load(space, keys, [layer], None) == sound[layer], layer
        layer = 0 if entry is None else entry // 2
        found = load(space, keys, [layer], None)
        if (codec, entry) == ("raw", None):
            assert found == sound[layer], "the daemon reads no headers of raw frames"
            return
        assert found == sound[layer][:4]
        disk.daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] == BLOCKS - 1)
        assert space.match(keys).ready + space.match(keys).coming <= 4, "the daemon dropped it"


@pytest.mark.parametrize("loads", [0, 2])
@pytest.mark.parametrize("first", [0, 3])
def test_blocks_that_are_forgotten_under_the_read_are_misses(
    disk: OnDisk, monkeypatch: pytest.MonkeyPatch, first: int, loads: int
) -> None:
    """Also in later reads, for which the client need not ask unless a block was forgotten."""
    monkeypatch.setattr(kvtier.direct, "UNLEASED_S", 600.0)  # a busy machine is slow
    whole = kvtier.direct_parts.read_frame_parts
    with disk.daemon.connect() as client, disk.daemon.connect() as other:
        space, keys = disk.open(client)
        for _ in range(loads):
            assert len(load(space, keys, [2], None)) == BLOCKS

        def read(*given: Any) -> bytes:
            found = whole(*given)
            assert all(found)
            other.open(SPEC).forget(keys[first : first + 1])
            return found

        monkeypatch.setattr(kvtier.direct_parts, "read_frame_parts", read)
        found = load(space, keys, [2], None)
        assert found == [part_of(SPEC, 0, one, [2], None) for one in disk.blocks[0, 0]][:first]


@pytest.mark.parametrize("knows", ["the connection", "the time"])
def test_blocks_that_another_daemon_forgets_under_the_read_are_misses(
    daemon_of: Callable[..., Daemon], disk: OnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    knows: str,
) -> None:  # fmt: skip
    """The number that counts the forgets is that of a daemon that has ended."""
    whole = kvtier.direct_parts.read_frame_parts
    if knows == "the time":
        monkeypatch.setattr(kvtier.direct, "is_quiet", lambda _: True)
    limit_s = {"the time": 0.001, "the connection": 600.0}[knows]  # daemons of tests start fast
    monkeypatch.setattr(kvtier.direct, "UNLEASED_S", limit_s)
    with disk.daemon.connect(reconnect_s=60.0) as client:
        space, keys = disk.open(client)
        assert len(load(space, keys, [2], None)) == BLOCKS

        def read(*given: Any) -> bytes:
            found = whole(*given)
            assert all(found)
            monkeypatch.setattr(kvtier.direct_parts, "read_frame_parts", whole)
            assert disk.daemon.stop() == 0
            again = started(daemon_of, tmp_path / "one")
            again.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] == BLOCKS)
            with again.connect() as other:
                other.open(SPEC).forget(keys[:1])
            return found

        monkeypatch.setattr(kvtier.direct_parts, "read_frame_parts", read)
        assert load(space, keys, [2], None) == []


def test_without_memory_for_the_number_of_forgets_each_read_has_a_lease(
    shared_disk: OnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with shared_disk.daemon.connect() as client:
        space, keys = shared_disk.open(client)
        monkeypatch.setattr(kvtier.read_file.mmap, "mmap", fails)
        for layer in range(3):
            assert len(load(space, keys, [layer], None)) == BLOCKS
        assert client.link.connection.files.forgets == UNKNOWN
        assert shared_disk.direct(client) == 3 * BLOCKS


def test_damage_that_is_found_without_a_lease_is_counted(disk: OnDisk) -> None:
    with disk.daemon.connect() as client:
        space, keys = disk.open(client)
        assert len(load(space, keys, [0], None)) == BLOCKS
        damage(disk, client, 4, 5)
        before = disk.direct(client)
        load(space, keys, [2], None)
        assert disk.direct(client) == before + BLOCKS - 1
        assert disk.daemon.stats()["tiers"]["cold"]["states"]["not_direct"] == 1


def test_only_the_first_read_asks_whether_its_blocks_are_still_stored(
    disk: OnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    with disk.daemon.connect() as client, disk.daemon.connect() as other:
        (space, keys), asked = disk.open(client), []
        ask = space.link.ask

        def counted(*given: Any) -> Any:
            asked.append(given[1])
            return ask(*given)

        monkeypatch.setattr(space.link, "ask", counted)
        monkeypatch.setattr(kvtier.direct, "UNLEASED_S", 600.0)  # a busy machine is slow
        for number in range(4):
            if number == 3:
                other.open(SPEC).forget(keys[4:])
            assert len(load(space, keys[:4], [number], None)) == 4
        assert asked == [
            wire.DirectReadGranted,
            wire.DirectReadChecked,
            *[wire.DirectReadGranted] * 3,
        ]
        assert disk.direct(client) == 4 * 4, "the others are counted too"


def test_the_layers_of_a_block_count_its_tokens_once(disk: OnDisk) -> None:
    with disk.daemon.connect() as client:
        space, keys = disk.open(client)
        for layer in range(8):
            assert len(load(space, keys, [layer], None)) == BLOCKS
        client.ping()
        stats = client.stats()
        assert stats["used_tokens"]["cold"] == BLOCKS * SPEC.block_tokens
        assert stats["bytes"]["loaded"] == BLOCKS * SPEC.block_bytes


@pytest.mark.parametrize("how", ["the next request", "the end"])
def test_what_was_read_without_a_lease_is_reported_later(disk: OnDisk, how: str) -> None:
    with disk.daemon.connect() as client:
        space, keys = disk.open(client)
        assert len(load(space, keys[:1], [2], None)) == 1
        assert disk.direct(client) == 1
        assert len(load(space, keys[:1], [2], None)) == 1
        assert disk.all_direct() - disk.before == 1
        if how == "the next request":
            space.match(keys[:1])
            disk.daemon.wait_for(lambda _: disk.all_direct() - disk.before == 2)
    disk.daemon.wait_for(lambda _: disk.all_direct() - disk.before == 2)


def test_without_a_wait_nothing_is_read_directly(disk: OnDisk) -> None:
    with disk.daemon.connect() as client:
        space, keys = disk.open(client)
        assert load(space, keys, [2], None, wait_ms=0) == [] and disk.direct(client) == 0


def batches_of(client: Client, monkeypatch: pytest.MonkeyPatch, row_s: float = 0.0) -> list[int]:
    """How many blocks each batch has from now on. By the client's clock, only reads take time."""
    whole, counts, now = kvtier.direct_parts.read_frame_parts, list[int](), [time.monotonic()]

    def read(rows: Any, *given: Any) -> bytes:
        counts.append(len(rows))
        now[0] += row_s * len(rows)
        return whole(rows, *given)

    client.link.connection.clock = lambda: now[0]
    monkeypatch.setattr(kvtier.direct_parts, "read_frame_parts", read)
    # On a busy machine, a read takes longer than it may take without a lease, and is repeated with one.
    monkeypatch.setattr(kvtier.direct, "UNLEASED_S", 600.0)
    return counts


@pytest.mark.parametrize(
    ("layers", "tokens", "touched"),
    [([3], None, 1), ([3], range(1), 1), ([6, 1], range(2), 2), (range(2, 5), None, 3),
     ([4] * 5, None, 5), (None, range(1), 8)],
)  # fmt: skip
def test_batches_are_as_large_as_their_limit(
    shared_disk: OnDisk, monkeypatch: pytest.MonkeyPatch, layers: Any, tokens: Any, touched: int
) -> None:
    """Of the bytes that are read, which are whole layers, and of those in memory."""
    monkeypatch.setattr(kvtier.direct_parts, "BATCH_BYTES", 3 * touched * SPEC.block_bytes // 8)
    with shared_disk.daemon.connect() as client:
        space, keys = shared_disk.open(client)
        counts = batches_of(client, monkeypatch)
        expected = [part_of(SPEC, 0, one, layers, tokens) for one in shared_disk.blocks[0, 0]]
        assert (
            load(space, keys, layers, tokens) == expected and shared_disk.direct(client) == BLOCKS
        )
    assert counts == [3, 3, 2]


def test_batches_of_a_slow_disk_are_smaller(
    shared_disk: OnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvtier.direct_parts, "BATCH_BYTES", 4 * SPEC.block_bytes // 8)
    with shared_disk.daemon.connect() as client:
        space, keys = shared_disk.open(client)
        counts = batches_of(client, monkeypatch, kvtier.direct_parts.BATCH_S / 2.5)
        assert len(load(space, keys, [3], None)) == BLOCKS and shared_disk.direct(client) == BLOCKS
    assert counts == [4, 2, 2]


def test_a_batch_that_has_begun_is_used_after_the_wait(
    disk: OnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon is asked for the others, and may read them."""
    monkeypatch.setattr(kvtier.direct_parts, "BATCH_BYTES", 4 * SPEC.block_bytes // 8)
    with disk.daemon.connect() as client:
        space, keys = disk.open(client)
        counts = batches_of(client, monkeypatch, row_s=0.15)
        expected = [part_of(SPEC, 0, one, [3], None) for one in disk.blocks[0, 0]]
        assert load(space, keys, [3], None, wait_ms=400) == expected[:4]
    assert counts == [4], "no other one begins"


@pytest.mark.parametrize(("warm", "most"), [(range(1, 5), 2), (range(1, 2), 1)])
def test_a_batch_sends_a_limited_number_of_keys(
    disk: OnDisk, monkeypatch: pytest.MonkeyPatch, warm: range, most: int
) -> None:
    whole, sent = kvtier.direct_parts.read_directly, []

    def read(space: Space, keys: Any, *given: Any) -> Any:
        sent.append(len(keys))
        return whole(space, keys, *given)

    monkeypatch.setattr(kvtier.direct_parts, "read_directly", read)
    monkeypatch.setattr(kvtier.direct_parts, "LIMIT_DIRECT_BLOCKS", 3)
    monkeypatch.setattr(kvtier.direct_parts, "BATCH_BYTES", most * SPEC.block_bytes // 8)
    with disk.daemon.connect() as client:
        space, keys = disk.open(client)
        assert space.wait(keys[warm.start : warm.stop], 60_000).ready == len(warm)
        expected = [part_of(SPEC, 0, one, [3], None) for one in disk.blocks[0, 0]]
        assert load(space, keys, [3], None) == expected and disk.direct(client) == BLOCKS - len(
            warm
        )
        assert not space.match(keys[5:]).ready, "the daemon read none of them"
    assert max(sent) == 3


@pytest.mark.parametrize("most", [1, 2, BLOCKS])
def test_blocks_behind_those_that_only_the_daemon_can_read_are_read_directly(
    daemon_of: Callable[..., Daemon], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    blocks = values(SPEC, 0, BLOCKS, 3)
    for half, codec in enumerate(("zstd", "raw")):
        daemon = started(daemon_of, tmp_path / "one", codec)
        with daemon.connect() as client:
            space = client.open(SPEC)
            keys = space.keys(list(range(BLOCKS * SPEC.block_tokens)))
            some = slice(4 * half, 4 * half + 4)
            assert space.save(keys[some], blocks[some]).stored == 4
            daemon.wait_for(
                lambda stats, half=half: stats["tiers"]["cold"]["blocks"] == 4 + 4 * half
            )
        daemon.stop()
    daemon = started(daemon_of, tmp_path / "one")
    daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] == BLOCKS)
    monkeypatch.setattr(kvtier.direct_parts, "BATCH_BYTES", most * SPEC.block_bytes // 8)
    with daemon.connect() as client:
        space = client.open(SPEC)
        lease = read_directly(space, keys, bytes([frame.RAW]), most=most)
        assert [one.at for one in lease.frames] == list(range(4, BLOCKS))[:most]
        lease.end([False] * len(lease.frames))
        assert load(space, keys, [3], None) == [part_of(SPEC, 0, one, [3], None) for one in blocks]
        client.ping()
        assert daemon.stats()["tiers"]["cold"]["states"]["direct"] == 4


def test_chosen_tokens_wait_for_whole_blocks(disk: OnDisk) -> None:
    chosen = [77, 3, 127, 3]
    with disk.daemon.connect() as client:
        space, keys = disk.open(client)
        prefix = np.concatenate(
            [np.frombuffer(one, np.uint8).reshape(16, 16, -1) for one in disk.blocks[0, 0]], axis=1
        )
        target: npt.NDArray[np.uint8] = np.zeros(prefix[:, chosen].shape, np.uint8)
        assert not load_tokens(space, keys, chosen, target)
        assert load_tokens(space, keys, chosen, target, wait_ms=60_000)
        assert (target == prefix[:, chosen]).all()
