"""Verified loads: a block that another client of the tenant has overwritten is a miss, and is forgotten."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtier import Client, Group, KvSpec, wire
from kvtier.client import Lease
from kvtier.errors import SpoiltBlocks
from kvtier.space import Space
from kvtier_kernels import Pieces, release_views, views
from support.daemons import Daemon
from support.specs import pattern, spec_of

BLOCKS = 8
BAD = 3


@pytest.fixture
def daemon(daemon_of: Callable[..., Daemon]) -> Daemon:
    return daemon_of()


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with daemon.connect(verify=True) as client:
        yield client


def saved(client: Client, spec: KvSpec, checksum: bool = True) -> tuple[Space, Any]:
    space = client.open(spec)
    keys = space.keys(list(range(16 * BLOCKS)))
    for group in range(len(spec.cache_groups)):
        nbytes = space.group_block_bytes(group)
        blocks = [pattern(key, nbytes) for key in keys]
        assert space.save(keys, blocks, group=group, checksum=checksum).stored == BLOCKS
    return space, keys


def scribble(daemon: Daemon, spec: KvSpec, keys: Any, block: int, group: int = 0) -> None:
    """Overwrite one byte of a block as another client of the tenant."""
    with daemon.connect() as other:
        space = other.open(spec)
        with_slots = space.lease(keys)
        part = with_slots.part(group, 0)
        slots = part.slots[(block - part.first) * wire.SLOT_BYTES :][: wire.SLOT_BYTES]
        (slot,) = views(other.link.mappings[0], slots, space.group_block_bytes(group), True)
        slot[5] ^= 1
        release_views([slot])
        with_slots.release()


def spoilt(daemon: Daemon, count: int = 1) -> None:
    daemon.wait_for(
        lambda stats: all(t["spoilt_blocks"] == count for t in stats["tenants"].values())
    )


def targets(space: Space) -> list[bytearray]:
    return [bytearray(space.block_bytes) for _ in range(BLOCKS)]


def test_a_copy_ends_before_an_overwritten_block_which_is_forgotten(
    daemon: Daemon, client: Client
) -> None:
    spec = spec_of("verified")
    space, keys = saved(client, spec)
    into = targets(space)
    assert space.load_into(keys, into) == BLOCKS
    scribble(daemon, spec, keys, BAD)
    with daemon.connect() as other:
        trusting, wrong = other.open(spec), targets(space)
        assert trusting.load_into(keys, wrong) == BLOCKS
        assert [a != b for a, b in zip(into, wrong, strict=True)].index(True) == BAD
    assert space.load_into(keys, into) == BAD
    spoilt(daemon)
    assert space.match(keys).ready == BAD
    assert "1 blocks of tenant default were changed after their save: forgotten" in (
        daemon.log.read_text()
    )
    (found,) = client.explain(keys=keys[BAD])["keys"]
    assert "spoilt" in str(found), found
    # It can be saved again, and the blocks behind it were not lost.
    again = space.save(keys, [pattern(key, space.block_bytes) for key in keys])
    assert again.stored == 1 and space.load_into(keys, into) == BLOCKS


def test_views_end_before_an_overwritten_block(daemon: Daemon, client: Client) -> None:
    spec = spec_of("verified")
    space, keys = saved(client, spec)
    scribble(daemon, spec, keys, BAD)
    with space.load(keys) as blocks:
        assert [bytes(block) for block in blocks if block] == [
            pattern(key, space.block_bytes) for key in keys[:BAD]
        ]
        assert len(blocks) == BAD
    spoilt(daemon)
    with space.load(keys) as blocks:
        assert len(blocks) == BAD
    scribble(daemon, spec, keys, 0)
    with space.load(keys) as blocks:
        assert len(blocks) == 0
    spoilt(daemon, 2)


def test_a_window_with_an_overwritten_block_is_not_used(daemon: Daemon, client: Client) -> None:
    full = Group(layers=2, kv_heads=4, head_dim=64)
    window = Group(kind="window", layers=2, kv_heads=4, head_dim=64, window_tokens=48)
    spec = msgspec.structs.replace(spec_of("window"), cache_groups=(full, window))
    space, keys = saved(client, spec)
    into = [bytearray(space.group_block_bytes(1)) for _ in range(BLOCKS)]
    assert space.load_into(keys, into, group=1) == BLOCKS
    scribble(daemon, spec, keys, BLOCKS - 1, group=1)
    assert space.load_into(keys, into, group=0) == BLOCKS, "this group is not affected"
    assert space.load_into(keys, into, group=1) == 0
    spoilt(daemon)
    assert space.match(keys).ready == BLOCKS - 1


def test_blocks_that_were_saved_without_a_checksum_are_loaded_unverified(
    daemon: Daemon, client: Client
) -> None:
    spec = spec_of("unverified")
    space, keys = saved(client, spec, checksum=False)
    scribble(daemon, spec, keys, BAD)
    assert space.load_into(keys, targets(space)) == BLOCKS


@pytest.mark.parametrize("codec", ["raw", "fix4", "zstd", "encrypted"])
def test_blocks_with_frames_of_any_codec_are_verified(
    tmp_path: Path, daemon_of: Callable[..., Daemon], codec: str
) -> None:
    """While they are in memory since their save, and after they were read from disk."""
    (tmp_path / "keys").write_text("11" * 32)
    (tmp_path / "keys").chmod(0o600)
    (tmp_path / "disk").mkdir()
    how = f'codec = "{codec}"'
    if codec == "encrypted":
        how = f'encryption = "aes-256-gcm"\nkey_file = "{tmp_path}/keys"'
    config = f'[cold]\ndirectories = ["{tmp_path}/disk"]\nsize = "64MiB"\nsegment = "1MiB"\n{how}\n'
    daemon = daemon_of(folder=tmp_path, config=config)
    spec = spec_of("framed")
    blocks = [compressible(number, spec) for number in range(BLOCKS)]
    for is_new in (True, False):
        with daemon.connect(verify=True) as client:
            space = client.open(spec)
            keys, into = space.keys(list(range(16 * BLOCKS))), targets(space)
            if is_new:
                assert space.save(keys, blocks).stored == BLOCKS
            daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] == BLOCKS)
            assert space.load_into(keys, into, wait_ms=30_000) == BLOCKS and into == blocks
            scribble(daemon, spec, keys, BAD)
            assert space.load_into(keys, into) == BAD
        spoilt(daemon)
        if is_new:
            with daemon.connect() as client:  # in memory and on disk again
                assert client.open(spec).save(keys, blocks).stored == 1
            daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] == BLOCKS)
            daemon.stop()
            daemon = daemon_of(folder=tmp_path, config=config)


def compressible(number: int, spec: KvSpec) -> bytes:
    return struct.pack("<HH", 0x3F80 + number, 0x3F81) * (spec.block_bytes // 4)


def test_a_recheck_forgets_no_sound_block(daemon: Daemon, client: Client) -> None:
    space, keys = saved(client, spec_of("sound"))
    with daemon.connect(read_only=True) as reader:
        lease = reader.open(space.spec).lease(keys, 60_000)
        for number in (lease._id, 999_999):
            request = wire.Recheck(reader.link.new_id(), number)
            assert reader.link.ask(request, wire.Counted).blocks == 0
        lease.release()
    assert space.match(keys).ready == BLOCKS


def test_another_process_of_the_engine_gets_the_checksums_with_the_lease(
    daemon: Daemon, client: Client
) -> None:
    spec = spec_of("adopted")
    space, keys = saved(client, spec)
    scribble(daemon, spec, keys, BAD)
    with daemon.connect() as scheduler, daemon.connect(verify=True) as worker:
        held = scheduler.open(spec).lease(keys, 60_000)
        assert held.part(0, 0).digests == b""
        adopted: Lease = worker.adopt(held.token)
        part = adopted.part(0, 0)
        assert len(part.digests) == BLOCKS * wire.DIGEST_BYTES
        shown = adopted.views(part, space.block_bytes)
        assert adopted.matching(part, shown) == BAD
        release_views(shown)
        adopted.release()
        held.release()
    spoilt(daemon)


@pytest.mark.parametrize("parts", [1, 4])
def test_pages_of_an_engine_are_not_filled_from_an_overwritten_block(
    daemon: Daemon, client: Client, parts: int
) -> None:
    spec = spec_of("pages")
    space, keys = saved(client, spec)
    nbytes = space.block_bytes // parts
    memory = bytearray(nbytes * (BLOCKS * parts + 1))
    pieces = Pieces([memory], [0], [nbytes], [nbytes])
    ids = list(range(1, BLOCKS * parts + 1))
    reader = client.reader()
    lease = space.lease(keys, 60_000)
    part = lease.part(0, 0)
    assert reader.scatter(part.slots, pieces, ids, parts=parts, digests=part.digests) == BLOCKS
    assert memory[nbytes:] == b"".join(pattern(key, space.block_bytes) for key in keys)
    scribble(daemon, spec, keys, BAD)
    with pytest.raises(SpoiltBlocks):
        reader.scatter(part.slots, pieces, ids, parts=parts, digests=part.digests)
    lease.recheck()
    lease.release()
    spoilt(daemon)


def test_a_reply_with_checksums_fits_into_a_frame(daemon: Daemon, client: Client) -> None:
    space = client.open(spec_of("many", tensor_parallel=4))
    with daemon.connect() as other:
        assert space.most_keys(4) < other.open(space.spec).most_keys(4)
    count = wire.told_slots(verify=True)
    part = wire.Part(0, 0, 0, bytes(count * wire.SLOT_BYTES), bytes(count * wire.DIGEST_BYTES))
    assert space.most_keys(4) * 4 <= count
    frame = wire.encode(wire.Loaded(1, count, 0, 0.0, 1, bytes(16), [part]))
    assert len(frame) > 0.9 * wire.LIMIT_FRAME_BYTES
