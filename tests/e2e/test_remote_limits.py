"""Limits of the remote tier: blocks that fill its buffer, many blocks at once, and forgets of blocks that are
on their way."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier import wire
from kvtier.key import Keys
from kvtier.space import Space
from support.daemons import Daemon, kvtier
from support.faulty_store import FaultyStore
from support.specs import pattern, spec_of

BLOCK_LAYERS = 320  # of a block of 5 MiB: the half of the buffer for writes holds one
Hosts = Callable[..., Daemon]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FaultyStore]:
    with FaultyStore(tmp_path) as store:
        yield store


@pytest.fixture
def host(tmp_path: Path, daemon_of: Hosts, store: FaultyStore) -> Hosts:
    def start(more: str = "", warm: str = "16MiB", name: str = "a") -> Daemon:
        secrets = tmp_path / name / "state" / "secrets"
        secrets.mkdir(parents=True, mode=0o700)
        (secrets / "default").write_bytes(bytes(32))
        (secrets / "default").chmod(0o600)
        daemon = daemon_of(folder=tmp_path / name, warm=warm, config=store.config + more)
        daemon.wait_for(lambda stats: stats["tiers"]["remote"]["on"])
        return daemon

    return start


def remote_of(daemon: Daemon) -> dict[str, Any]:
    remote: dict[str, Any] = daemon.stats()["tiers"]["remote"]
    return remote


def save(space: Space, number: int, blocks: int) -> Keys:
    keys = space.keys([number] * blocks * space.spec.block_tokens)
    for shard in range(space.spec.cache_groups[0].shards):
        nbytes = space.spec.group_block_bytes(0)
        space.save(keys, [pattern(key, nbytes) for key in keys], shard=shard)
    return keys


def test_blocks_that_fill_the_buffer_are_written_one_by_one(
    host: Hosts, store: FaultyStore
) -> None:
    daemon = host('write = "all"\n', warm="64MiB")
    with daemon.connect() as client:
        save(client.open(spec_of("large", layers=BLOCK_LAYERS)), 1, 6)
        daemon.wait_for(lambda stats: stats["tiers"]["remote"]["states"]["written"] == 6, 20)
        daemon.wait_for(lambda stats: stats["tiers"]["remote"]["buffer_used_bytes"] == 0)


def test_a_purge_in_portions_deletes_the_objects_of_each(host: Hosts, store: FaultyStore) -> None:
    daemon = host('write = "all"\n', warm="64MiB")
    with daemon.connect() as client:  # a portion of a purge is 32 MiB
        save(client.open(spec_of("purged", layers=BLOCK_LAYERS)), 1, 9)
        daemon.wait_for(lambda stats: len(store.objects) == 9)
        done = kvtier("purge", "--socket", daemon.socket, "--tenant", "default", "--yes")
        assert done.returncode == 0, done.stderr
    assert not store.objects


def forget_meanwhile(daemon: Daemon, space: Space, keys: Keys) -> int:
    """Forget these blocks; return the most that a lookup finds until that is answered, and then."""
    with daemon.connect() as client:
        number, link = client.open(space.spec).index, client.link
        link.tell(lambda id_: wire.Forget(id_, number, keys.packed))
        client.ping()  # the daemon has received it
        most = 0
        while not (answers := link.replies()):
            most = max(most, space.match(keys).ready)
            time.sleep(0.005)
        ((_, answer),) = answers.values()
        assert isinstance(answer, wire.Counted)
    return max(most, space.match(keys).ready)


def test_a_block_that_is_forgotten_while_it_is_written_does_not_return(
    host: Hosts, store: FaultyStore
) -> None:
    daemon = host()
    with daemon.connect() as client:
        space = client.open(spec_of("written"))
        keys = save(space, 1, 2)
        daemon.wait_for(lambda stats: stats["tiers"]["remote"]["asking"] == 0)
        store.put_s, store.delete_s = 0.5, 1.0
        assert space.match(keys).ready == 2
        daemon.wait_for(lambda stats: stats["tiers"]["remote"]["writing"] > 0)
        assert forget_meanwhile(daemon, space, keys) == 0
        assert not store.objects


def test_a_block_that_is_forgotten_while_the_store_is_asked_does_not_return(
    host: Hosts, store: FaultyStore
) -> None:
    a, b = host('write = "all"\n'), host(name="b")
    with a.connect() as first, b.connect() as second:
        space = second.open(spec_of("asked"))
        keys = save(first.open(spec_of("asked")), 1, 2)
        a.wait_for(lambda stats: len(store.objects) == 2)
        store.waits_s, store.delete_s = 0.3, 1.0
        space.match(keys)  # asks
        assert forget_meanwhile(b, space, keys) == 0
        assert not store.objects


def test_many_blocks_in_many_parts_are_forgotten_at_once(host: Hosts) -> None:
    daemon = host()
    with daemon.connect() as client:
        spec = spec_of("many", layers=1, kv_heads=2, head_dim=8, tensor_parallel=2)
        space = client.open(spec)
        pid = remote_of(daemon)["pid"]
        assert space.forget(Keys(os.urandom(32 * 65_000))) == 0
        assert remote_of(daemon)["pid"] == pid
        assert remote_of(daemon)["on"]


def test_a_space_is_listed_again_after_a_list_failed(host: Hosts, store: FaultyStore) -> None:
    a, b = host('write = "all"\n'), host(name="b")
    with a.connect() as first, b.connect() as second:
        keys = save(first.open(spec_of("listed")), 1, 3)
        a.wait_for(lambda stats: len(store.objects) == 3)
        space = second.open(spec_of("listed"))
        store.refuses_lists = True
        space.match(space.keys([7] * 16))
        b.wait_for(lambda stats: stats["tiers"]["remote"]["asking"] == 0)
        store.refuses_lists = False
        space.match(space.keys([8] * 16))
        b.wait_for(lambda stats: stats["tiers"]["remote"]["known_objects"] >= len(keys) + 2)
