"""A daemon whose cold tier is encrypted: a kill, a rotated key, and key files that cannot be used."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier import Client
from kvtier.space import Space
from kvtier_daemon.codec.encryption import key_id
from support.daemons import Daemon, kvtier
from support.specs import spec_of

BLOCKS = 8
KEYS = ("11" * 32, "22" * 32)
CONFIG = """
[cold]
directories = ["{folder}/disk"]
size = "64MiB"
segment = "1MiB"
scrub = "0"
encryption = "{encryption}"
key_file = "{folder}/keys"
"""


def blocks_of(space: Space) -> list[bytes]:
    return [bytes([97 + number]) * space.block_bytes for number in range(BLOCKS)]


def opened(client: Client, name: str) -> tuple[Space, list[bytes]]:
    space = client.open(spec_of(name))
    return space, space.keys(list(range(16 * BLOCKS)))


def save(daemon: Daemon, name: str) -> None:
    """Save blocks, and wait until they are on disk."""
    before = daemon.stats()["tiers"]["cold"]["blocks"]
    with daemon.connect() as client:
        space, keys = opened(client, name)
        assert space.save(keys, blocks_of(space)).stored == BLOCKS
    daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] == before + BLOCKS)


def loads(daemon: Daemon, name: str) -> bool:
    with daemon.connect() as client:
        space, keys = opened(client, name)
        into = [bytearray(space.block_bytes) for _ in keys]
        deadline = time.monotonic() + 60
        while (found := space.load_into(keys, into)) < BLOCKS and time.monotonic() < deadline:
            match = space.match(keys)
            assert match.coming or match.ready == BLOCKS, "they are neither in memory nor on disk"
            time.sleep(0.01)
        return [bytes(one) for one in into[:found]] == blocks_of(space)


def write_keys(folder: Path, *keys: str, mode: int = 0o600) -> None:
    new = folder / "keys.new"
    new.write_text("\n".join(keys))
    new.chmod(mode)
    new.rename(folder / "keys")


def is_plain(folder: Path) -> bool:
    files = [path.read_bytes() for path in (folder / "disk").rglob("*") if path.is_file()]
    return any(bytes([97 + number]) * 64 in text for text in files for number in range(BLOCKS))


@pytest.fixture
def encrypted(tmp_path: Path, daemon_of: Callable[..., Daemon]) -> Callable[..., Daemon]:
    (tmp_path / "disk").mkdir()

    def start(encryption: str = "aes-256-gcm") -> Daemon:
        config = CONFIG.format(folder=tmp_path, encryption=encryption)
        return daemon_of(folder=tmp_path, config=config)

    return start


def test_blocks_outlive_a_kill_a_rotated_key_and_the_end_of_encryption(
    tmp_path: Path, encrypted: Callable[..., Daemon]
) -> None:
    write_keys(tmp_path, KEYS[0])
    daemon = encrypted()
    save(daemon, "first")
    daemon.process.send_signal(signal.SIGKILL)
    daemon.process.wait()
    assert not is_plain(tmp_path)

    daemon = encrypted()
    daemon.wait_for_disks()
    assert loads(daemon, "first")
    write_keys(tmp_path, KEYS[1], KEYS[0])
    done = kvtier("reload", "--socket", daemon.socket)
    first = f"{tmp_path / 'keys'}: 2; {key_id(bytes.fromhex(KEYS[1])).hex()} is the first"
    assert (done.returncode, done.stderr) == (0, "") and first in done.stdout
    daemon.wait_for(lambda _: "2 keys from" in daemon.log.read_text())
    save(daemon, "second")
    assert not daemon.stop()
    assert not is_plain(tmp_path)

    disk, only = str(tmp_path / "disk"), tmp_path / "only"
    only.write_text(KEYS[1])
    only.chmod(0o600)
    for file, unknown in ((tmp_path / "keys", 0), (only, BLOCKS)):
        done = kvtier("fsck", disk, "--key-file", str(file), "--json")
        found = json.loads(done.stdout)[disk]
        assert not done.returncode and not found["wrong"], done.stderr
        assert (found["encrypted_frames"], found["unknown_keys"]) == (2 * BLOCKS, unknown)

    daemon = encrypted("off")
    daemon.wait_for_disks()
    assert loads(daemon, "first") and loads(daemon, "second")


def test_without_a_usable_key_file_the_cold_tier_is_off_until_there_is_one(
    tmp_path: Path, encrypted: Callable[..., Daemon]
) -> None:
    write_keys(tmp_path, KEYS[0], mode=0o640)
    daemon = encrypted()
    cold = daemon.stats()["tiers"]["cold"]
    assert not cold["on"] and "keys: has mode 0640" in cold["failure"]
    with daemon.connect() as client:
        space, keys = opened(client, "warm")
        assert space.save(keys, blocks_of(space)).stored == BLOCKS
        assert space.load_into(keys, [bytearray(space.block_bytes) for _ in keys]) == BLOCKS
    os.unlink(tmp_path / "keys")
    daemon.wait_for(lambda stats: "does not exist" in stats["tiers"]["cold"]["failure"])
    write_keys(tmp_path, KEYS[0])
    daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] == BLOCKS)
    assert not is_plain(tmp_path)
    # A reload that finds no keys changes nothing.
    os.unlink(tmp_path / "keys")
    done = kvtier("reload", "--socket", daemon.socket)
    assert done.returncode == 1 and "no setting has changed" in done.stdout
    assert "does not exist" in done.stderr and "keeps its earlier keys" in done.stderr
    daemon.wait_for(lambda _: "using the earlier keys" in daemon.log.read_text())
    save(daemon, "again")
    assert not is_plain(tmp_path)
