"""A daemon that ends leaves its memory, and the next one serves the same blocks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from kvtier.units import parse_bytes
from kvtier_daemon.tiers import keeper
from kvtier_daemon.tiers.fd_store import KeeperStore
from kvtier_daemon.tiers.kept_arena import HALF_BYTES, HEAD, MANIFEST, head_of
from support.daemons import kvtier, start_daemon
from support.kept import BLOCKS, KEEP_S, end, folder, loaded, quarantined, save, start, tokens
from support.specs import spec_of

__all__ = ["folder"]  # a fixture


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_next_daemon_serves_the_blocks_that_were_in_memory(
    folder: Path, how: signal.Signals
) -> None:
    daemon = start(folder)
    with daemon.connect() as client:
        blocks = save(client)
    for _ in range(2):
        end(daemon, how)
        daemon = start(folder)
        with daemon.connect() as client:
            assert loaded(client) == blocks
    daemon.stop()


def test_an_interrupt_frees_the_memory(folder: Path) -> None:
    daemon = start(folder)
    with daemon.connect() as client:
        save(client)
    end(daemon, signal.SIGINT)
    daemon = start(folder)
    with daemon.connect() as client:
        assert loaded(client) == []
    daemon.stop()


def test_new_blocks_go_beside_those_that_were_taken_over_until_the_oldest_are_evicted(
    folder: Path,
) -> None:
    config = (
        '[warm]\nsize = "16MiB"\npolicy = "lru"\n'  # another policy may keep what is used often
    )
    daemon = start(folder, config=config)
    with daemon.connect() as client:
        first = save(client)
    end(daemon, signal.SIGKILL)
    daemon = start(folder, config=config)
    with daemon.connect() as client:
        second = save(client, first=1000)
        assert loaded(client) == first and loaded(client, first=1000) == second
        room = client.stats()["tiers"]["warm"]["capacity_bytes"] // len(first[0])
        for at in range(0, room, BLOCKS):
            save(client, first=10_000 + at)
        assert loaded(client) == []
    daemon.stop()


def test_what_was_forgotten_or_has_expired_stays_gone(folder: Path) -> None:
    daemon = start(folder, warm="8MiB")
    with daemon.connect() as client:
        save(client)
        save(client, first=1000)
        space = client.open(spec_of())
        gone = space.keys(tokens(space, 0, BLOCKS))
        assert space.forget(gone) == BLOCKS
        short = space.keys(tokens(space, 2000, 4))
        space.save(short, bytes(4 * space.spec.block_bytes), ttl_s=1.0)
        long = space.keys(tokens(space, 3000, 4))
        space.save(long, bytes(4 * space.spec.block_bytes), ttl_s=3600.0)
    end(daemon, signal.SIGKILL)
    daemon = start(folder, warm="8MiB")
    with daemon.connect() as client:
        assert loaded(client) == [] and len(loaded(client, first=1000)) == BLOCKS
        assert len(loaded(client, first=3000, count=4)) == 4
        deadline = time.monotonic() + 60
        while loaded(client, first=2000, count=4):
            assert time.monotonic() < deadline, "a block outlived its TTL"
            time.sleep(0.05)
        assert len(loaded(client, first=3000, count=4)) == 4
    daemon.stop()


# Reserves slots, and waits: an engine that still copies when the daemon is killed.
WRITER = """
import sys
import threading
from kvtier import Client, KvSpec
client = Client.connect(sys.argv[1], populate=False)
space = client.open(KvSpec.dense(model="writer", layers=4, kv_heads=4, head_dim=64, dtype="bfloat16",
                                 block_tokens=16, weights="rev:1"))
keys = space.keys(list(range(16 * 8)))
with space.reserve(keys) as saving:
    assert len(saving) == 8
    print("reserved", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("first", [signal.SIGKILL, signal.SIGTERM])
def test_slots_of_a_process_that_may_still_write_are_held_until_it_ends(
    folder: Path, first: signal.Signals
) -> None:
    daemon = start(folder)
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, daemon.socket], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == b"reserved\n"
        for how in (first, signal.SIGTERM):
            end(daemon, how)
            daemon = start(folder)
            assert quarantined(daemon) == 8
    daemon.wait_for(lambda stats: not stats["tiers"]["warm"]["states"]["quarantined"])
    end(daemon, signal.SIGKILL)
    daemon = start(folder)
    assert quarantined(daemon) == 0
    daemon.stop()


@pytest.mark.parametrize("changed", ["users", "secret", "tenant"])
def test_memory_of_other_users_is_not_taken_over(folder: Path, changed: str) -> None:
    me = os.getuid()

    def config(name: str, uids: list[int]) -> str:
        return f"[tenants.{name}]\nuids = {uids}\nquota = '100%'\n"

    daemon = start(folder, config=config("one", [me, 12345]))
    with daemon.connect() as client:
        save(client)
    end(daemon, signal.SIGKILL)
    if changed == "secret":
        (folder / "state/secrets/one").unlink()
    name, uids = (
        ("two" if changed == "tenant" else "one"),
        [me] if changed == "users" else [me, 12345],
    )
    daemon = start(folder, config=config(name, uids))
    with daemon.connect() as client:
        assert loaded(client) == []
        assert client.stats()["tiers"]["warm"]["blocks"] == 0
    if changed == "users":
        assert "the users or the secret of tenant one have changed" in daemon.log.read_text()
    daemon.stop()


def test_a_user_that_a_reload_added_and_a_restart_removed_has_no_part_in_the_memory(
    folder: Path,
) -> None:
    def config(*uids: int) -> str:
        return f"[tenants.one]\nuids = {list(uids)}\nquota = '100%'\n"

    daemon = start(folder, config=config(os.getuid()))
    with daemon.connect() as client:
        save(client)
    file = folder / "kvtier.toml"
    before = file.read_text()
    file.write_text(before.replace(f"[{os.getuid()}]", f"[{os.getuid()}, 12345]"))
    assert kvtier("reload", "--socket", daemon.socket).returncode == 0
    end(daemon, signal.SIGKILL)
    daemon = start(folder, config=config(os.getuid()))
    with daemon.connect() as client:
        assert loaded(client) == []
    daemon.stop()


@pytest.mark.parametrize("size", ["32MiB", "128MiB"])
def test_memory_shrinks_and_grows_with_the_configuration(folder: Path, size: str) -> None:
    daemon = start(folder, config='[warm]\nsize = "64MiB"\nextent = "16MiB"\n')
    with daemon.connect() as client:
        save(client)
    end(daemon, signal.SIGKILL)
    daemon = start(folder, config=f'[warm]\nsize = "{size}"\nextent = "16MiB"\n')
    with daemon.connect() as client:
        assert len(loaded(client)) == BLOCKS  # 3 MiB of the first extent
    warm = daemon.stats()["tiers"]["warm"]
    assert warm["capacity_bytes"] == warm["allocated_bytes"] == parse_bytes(size)
    daemon.stop()


def test_another_format_is_told_and_not_used(folder: Path) -> None:
    daemon = start(folder)
    with daemon.connect() as client:
        save(client)
    end(daemon, signal.SIGKILL)
    store = KeeperStore(folder / "kvtier.sock.keeper", KEEP_S)
    fds = store.take()
    text = msgspec.msgpack.encode({"format": 99, "tenants": 1})
    heads = [HEAD.unpack(os.pread(fds[MANIFEST], HEAD.size, at)) for at in (0, HALF_BYTES)]
    sequence = max(heads)[0] + 1
    os.pwrite(fds[MANIFEST], head_of(sequence, text) + text, sequence % 2 * HALF_BYTES)
    for fd in fds.values():
        os.close(fd)
    store.close()
    daemon = start(folder)
    assert "has format 99, not 2: its blocks are not used" in daemon.log.read_text()
    with daemon.connect() as client:
        assert loaded(client) == []
        save(client)
    end(daemon, signal.SIGKILL)
    daemon = start(folder)
    with daemon.connect() as client:
        assert len(loaded(client)) == BLOCKS
    daemon.stop()


def test_blocks_that_are_on_disk_too_are_known_as_such_after_a_restart(folder: Path) -> None:
    config = f'[cold]\ndirectories = ["{folder / "cold"}"]\nsize = "256MiB"\nwrite = "through"\n'
    (folder / "cold").mkdir()
    daemon = start(folder, config=config)
    with daemon.connect() as client:
        blocks = save(client)
    daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] == BLOCKS)
    end(daemon, signal.SIGKILL)
    daemon = start(folder, config=config)
    with daemon.connect() as client:
        assert loaded(client) == blocks
    stats = daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] == BLOCKS)
    assert stats["tiers"]["warm"]["blocks"] == BLOCKS
    daemon.stop()


def test_a_block_that_changed_after_its_save_is_forgotten(folder: Path) -> None:
    daemon = start(folder)
    with daemon.connect() as client:
        blocks = save(client)
    end(daemon, signal.SIGKILL)
    store = KeeperStore(folder / "kvtier.sock.keeper", KEEP_S)
    fds = store.take()
    (data,) = (fd for name, fd in fds.items() if name.endswith("-data"))
    at = os.pread(data, BLOCKS * len(blocks[0]), 0).index(blocks[BLOCKS // 2])
    os.pwrite(data, b"x", at + 1000)
    for fd in fds.values():
        os.close(fd)
    store.close()
    daemon = start(folder)
    daemon.wait_for(lambda stats: stats["tiers"]["warm"]["blocks"] == BLOCKS - 1)
    with daemon.connect() as client:
        assert loaded(client) == blocks[: BLOCKS // 2]
    assert "1 blocks of tenant default were changed" in daemon.log.read_text()
    daemon.stop()


def test_a_second_daemon_gets_no_part_of_memory_that_is_in_use(folder: Path) -> None:
    daemon = start(folder)
    with daemon.connect() as client:
        blocks = save(client)
    (folder / "kvtier.sock").unlink()  # as a cleaner of temporary files does
    second = start(folder)
    assert "another daemon uses the memory" in second.log.read_text()
    with second.connect() as client:
        assert loaded(client) == []
        save(client, first=1000)
    second.stop()
    end(daemon, signal.SIGKILL)
    daemon = start(folder)
    with daemon.connect() as client:
        assert loaded(client) == blocks and loaded(client, first=1000) == []
    daemon.stop()


def test_a_daemon_that_keeps_nothing_frees_what_an_earlier_one_left(folder: Path) -> None:
    daemon = start(folder)
    with daemon.connect() as client:
        save(client)
    end(daemon, signal.SIGKILL)
    start_daemon(folder, keep_s=0).stop()
    daemon = start(folder)
    with daemon.connect() as client:
        assert loaded(client) == []
    daemon.stop()


def test_a_keeper_holds_on_to_a_daemon_that_is_silent_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "PATIENCE_S", 0.01)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(tmp_path / "keeper"))
    listener.listen()
    thread = threading.Thread(target=keeper.Keeper(listener, 0.02).run)
    store = KeeperStore(tmp_path / "keeper", KEEP_S)
    store.put("one", 0)
    thread.start()  # a keeper without a connection would end at once
    time.sleep(0.3)  # far longer than the keeper's times: silence is what is tested
    store.put("two", 0)
    held = store.take()
    assert set(held) == {"one", "two"}
    for fd in held.values():
        os.close(fd)
    store.close()
    thread.join(30)
    assert not thread.is_alive()
    listener.close()
