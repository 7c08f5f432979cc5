"""A flipped bit in a space's description on disk: no prefix is ready that is not ready with the correct
description."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from kvtier import Client, KvSpec
from kvtier.layout import Group
from kvtier.space import Space
from kvtier_daemon.cli import listing
from support.daemons import Daemon, start_daemon

WINDOW = 80  # 5 blocks of 16 tokens; with one flipped bit it is 16, which is one block
SPEC = KvSpec.groups(
    [Group(kind="window", layers=1, kv_heads=1, head_dim=64, window_tokens=WINDOW)],
    model="m", dtype="bfloat16", block_tokens=16, weights="w",
)  # fmt: skip


def serve(folder: Path) -> Daemon:
    cold = folder / "cold"
    cold.mkdir(exist_ok=True, mode=0o700)
    text = (
        f'[cold]\ndirectories = ["{cold}"]\nsize = "96MiB"\nsegment = "1MiB"\nwrite = "through"\n'
    )
    return start_daemon(folder, warm="16MiB", config=text)


def last_block_alone(client: Client) -> Space:
    """A space with only the last of ten blocks: a window of five blocks needs the four before it too."""
    space = client.open(SPEC)
    keys = space.keys(list(range(160)))
    space.save(keys[9:], [os.urandom(SPEC.block_bytes)])
    return space


def expected(client: Client) -> int:
    found = client.open(SPEC).match(client.open(SPEC).keys(list(range(160))))
    return found.ready + found.coming


def recovered(daemon: Daemon) -> None:
    daemon.wait_for(lambda stats: stats["tiers"]["cold"]["state"] == "on")


def test_a_flipped_bit_in_the_index_makes_no_prefix_ready(tmp_path: Path) -> None:
    daemon = serve(tmp_path)
    with daemon.connect() as client:
        last_block_alone(client)
        assert expected(client) == 0
        daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] == 1)
    daemon.process.kill()  # the segment has no footer: only the index describes the space
    daemon.process.wait()
    data = tmp_path / "cold" / "index" / "data.mdb"
    text = data.read_bytes()
    field = msgspec.msgpack.encode("window_tokens")
    good, bad = field + bytes([WINDOW]), field + bytes([16])
    assert good in text
    data.write_bytes(text.replace(good, bad))
    daemon = serve(tmp_path)
    try:
        recovered(daemon)
        with daemon.connect() as client:
            assert expected(client) == 0, "one block of a window of five makes no prefix ready"
        assert "1 records of table spaces fail their digests" in daemon.log.read_text()
    finally:
        daemon.stop()


def test_without_its_secret_a_tenants_blocks_are_not_found(tmp_path: Path) -> None:
    secret = tmp_path / "state" / "secrets" / "default"
    daemon = serve(tmp_path)
    with daemon.connect() as client:
        space = client.open(SPEC)
        keys = space.keys(list(range(160)))
        space.save(keys, [os.urandom(SPEC.block_bytes) for _ in keys])
        daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] == 10)
    daemon.stop()
    old = secret.read_bytes()
    secret.unlink()
    for said in (None, old):  # with another secret, and then with the first one again
        if said is not None:
            secret.write_bytes(said)
        daemon = serve(tmp_path)
        recovered(daemon)
        with daemon.connect() as client:
            space = client.open(SPEC)
            assert listing.spaces(client, "")["spaces"][0]["disk_blocks"] == 0
            found = space.match(keys)
            assert found.ready + found.coming == 0
        daemon.stop()
    assert "another secret" in daemon.log.read_text()
