"""Isolation of tenants: a user cannot read, map, hint at or evict blocks of another tenant."""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier import Client
from support.daemons import Daemon, server
from support.specs import pattern, spec_of

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="needs root to be two users")

NOBODY = pwd.getpwnam("nobody").pw_uid
CONFIG = f"""
socket_mode = "0666"
[warm]
size = "32MiB"
extent = "8MiB"
[tenants.ours]
uids = [0]
quota = "50%"
[tenants.theirs]
uids = [{NOBODY}]
quota = "50%"
"""

# Runs as another user: executes the code it gets, and prints the result.
OTHER = """
import mmap, os, socket, sys
sys.path[:0] = sys.argv[2].split(":")
import kvtier_kernels, kvtier
from kvtier import Client, KvtierError
from support.specs import pattern, spec_of
os.setgid(65534); os.setuid(int(sys.argv[3]))
spec = spec_of("shared-name")
client = Client.connect(sys.argv[1], populate=False)
space = client.open(spec)
"""


def as_nobody(daemon: Daemon, code: str, *arguments: str) -> str:
    words = [daemon.socket, ":".join(sys.path), str(NOBODY), *arguments]
    done = server().run(words, program=OTHER + code)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def daemon(open_folder: Path, daemon_of: Callable[..., Daemon]) -> Daemon:
    return daemon_of(folder=open_folder, config=CONFIG)


def ours(daemon: Daemon) -> tuple[Client, Any, Any]:
    client = daemon.connect()
    spec = spec_of("shared-name")
    space = client.open(spec)
    keys = space.keys(list(range(16 * 8)))
    assert space.save(keys, [pattern(key, spec.block_bytes) for key in keys]).stored == 8
    return client, space, keys


def test_the_same_tokens_have_other_keys_in_another_tenant(daemon: Daemon) -> None:
    client, _, keys = ours(daemon)
    with client:
        other_keys = as_nobody(daemon, "print(space.keys(list(range(16 * 8))).packed.hex())")
        assert len(other_keys) == len(keys.packed.hex())
        assert other_keys != keys.packed.hex()


def test_stolen_keys_match_nothing(daemon: Daemon) -> None:
    client, space, keys = ours(daemon)
    with client:
        code = """
stolen = kvtier.Keys(bytes.fromhex(sys.argv[4]))
print(space.match(stolen).ready, space.hint(stolen, 0.0), space.pin(stolen), space.forget(stolen))
"""
        assert as_nobody(daemon, code, keys.packed.hex()) == "0 0 0 0"
        assert space.match(keys).ready == 8


def test_stolen_lease_tokens_are_refused(daemon: Daemon) -> None:
    client, space, keys = ours(daemon)
    with client:
        lease = space.lease(keys, deadline_ms=60_000)
        code = """
try:
    client.adopt(bytes.fromhex(sys.argv[4]))
except KvtierError as error:
    print(error.code)
"""
        assert as_nobody(daemon, code, lease.token.hex()) == "unknown_lease"
        lease.release()


def test_filling_the_cache_evicts_only_blocks_of_the_same_tenant(daemon: Daemon) -> None:
    client, space, keys = ours(daemon)
    with client:
        code = """
kept = 0
for turn in range(8):
    keys = space.keys([turn] * 16 + list(range(16 * 99)))
    kept += space.save(keys, bytes(100 * spec.block_bytes)).stored
print(kept, client.stats()["tiers"]["warm"]["used_bytes"])
"""
        assert as_nobody(daemon, code) == f"800 {16 << 20}"
        assert space.match(keys).ready == 8


def test_pins_use_at_most_a_quarter_of_their_tenants_quota(daemon: Daemon) -> None:
    client, space, keys = ours(daemon)
    with client:
        code = """
pinned = 0
for turn in range(8):
    keys = space.keys([turn] * 16 + list(range(16 * 31)))
    space.save(keys, bytes(32 * spec.block_bytes))
    pinned += space.pin(keys, 600)
more = space.keys([99] * 16 + list(range(16 * 179)))
kept = space.save(more, bytes(180 * spec.block_bytes)).stored
print(pinned * spec.block_bytes, kept, client.stats()["tenants"]["theirs"]["pinned_bytes"])
"""
        quarter = (16 << 20) // 4
        assert as_nobody(daemon, code) == f"{quarter} 180 {quarter}"
        assert space.match(keys).ready == 8
        assert space.pin(keys) == 8
        assert client.stats()["tenants"]["ours"]["used_bytes"] == 8 * space.spec.block_bytes


def test_a_tenants_lookups_are_explained_only_to_its_users(daemon: Daemon) -> None:
    client, space, keys = ours(daemon)
    with client:
        space.match(keys)
        space.match(space.keys(list(range(1000, 1016))))
        code = """
told = client.explain(keys=bytes.fromhex(sys.argv[4])[:32])
print(client.explain(), told["keys"][0]["why"])
"""
        assert as_nobody(daemon, code, keys.packed.hex()) == "{'lookups': []} never_stored"
        assert len(client.explain()["lookups"]) == 2


def test_stats_contain_only_the_own_tenant(daemon: Daemon) -> None:
    client, _, _ = ours(daemon)
    with client:
        code = "print(client.tenant, sorted(client.stats()['tenants']), client.stats()['saved_tokens'])"
        assert as_nobody(daemon, code) == "theirs ['theirs'] 0"
        assert sorted(client.stats()["tenants"]) == ["ours", "theirs"], "root may see all"


def test_only_extents_of_the_own_tenant_are_sent(daemon: Daemon) -> None:
    client, _, keys = ours(daemon)
    with client:
        code = """
found = 0
for extent in client.link.arena.extents:
    found += bytes.fromhex(sys.argv[4]) in bytes(memoryview(extent))
print(len(client.link.arena.extents), client.link.arena.nbytes, found)
"""
        assert as_nobody(daemon, code, keys[3].hex()) == f"2 {16 << 20} 0"


def test_generation_tables_can_not_be_written_even_if_reopened(daemon: Daemon) -> None:
    client, _, _ = ours(daemon)
    with client:
        code = """
from kvtier import wire
sock = socket.socket(socket.AF_UNIX); sock.connect(sys.argv[1])
sock.sendall(wire.encode(wire.Hello(1, wire.SCHEMA, "raw")))
fds = []
while len(fds) < 2:
    data, more, _, _ = socket.recv_fds(sock, 1 << 16, 16); fds += more
extent, table = fds[:2]
outcome = []
for attempt in (
    lambda: mmap.mmap(table, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE),
    lambda: os.open(f"/proc/self/fd/{table}", os.O_RDWR),
    lambda: os.ftruncate(extent, 4096),
    lambda: os.fchmod(table, 0o777),
):
    try:
        attempt(); outcome.append("done")
    except OSError:
        outcome.append("refused")
print(*outcome)
"""
        assert as_nobody(daemon, code) == "refused refused refused refused"


def test_a_user_without_a_tenant_is_refused(daemon: Daemon) -> None:
    other = OTHER.replace("os.setuid(int(sys.argv[3]))", "os.setuid(12345)")
    done = server().run([daemon.socket, ":".join(sys.path), "0"], program=other)
    assert "no tenant is configured for uid 12345" in done.stderr
