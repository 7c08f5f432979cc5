"""Blocks move from the disk to the store before their place there is reused."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvtier.key import Keys
from kvtier.space import Space
from support.daemons import Daemon, kvtier
from support.faulty_store import FaultyStore
from support.object_store import BUCKET, ObjectStore, remote_of
from support.specs import pattern, spec_of

PROMPT = 16  # blocks, 1 MiB
FULL = 20  # prompts: more than the disk has room for
MEMORY = '[warm]\nsize = "4MiB"\npolicy = "lru"\n'
HASTE = {"ARCHIVE_S": 0.02, "PAUSE_S": 0.05, "TELL_S": 0.1}
SEALED = 'encryption = "aes-256-gcm"\nkey_file = "{}"\n'
Hosts = Callable[..., Daemon]


@pytest.fixture
def host(tmp_path: Path, daemon_of: Hosts) -> Hosts:
    """A host with 4 MiB of memory and a disk of 34 MiB, of which blocks get 17."""

    def start(remote: str, cold: str = "", name: str = "a") -> Daemon:
        folder = tmp_path / name
        (folder / "disk").mkdir(parents=True, exist_ok=True)
        disk = (
            f'[cold]\ndirectories = ["{folder}/disk"]\nsize = "34MiB"\n'
            f'write = "through"\nscrub = 0\n{cold}'
        )
        daemon = daemon_of(folder=folder, config=MEMORY + disk + remote, haste=HASTE)
        daemon.wait_for(lambda stats: remote_of(stats)["on"])
        return daemon

    return start


def states(daemon: Daemon) -> dict[str, int]:
    found: dict[str, int] = remote_of(daemon.stats())["states"]
    return found


def content(key: bytes, nbytes: int) -> bytes:
    """Of a block; half of it can be compressed."""
    half = nbytes // 2
    return random.Random(key).randbytes(half) + pattern(key, nbytes - half)


def keys_of(space: Space, number: int) -> Keys:
    return space.keys([number] * PROMPT * space.spec.block_tokens)


def save(space: Space, number: int) -> None:
    keys = keys_of(space, number)
    saved = space.save(keys, [content(key, space.spec.block_bytes) for key in keys], wait_s=10.0)
    assert len(saved) == PROMPT, saved


def save_all(daemon: Daemon, space: Space, numbers: range, pause_s: float = 0.0) -> None:
    """Save these prompts; each is on disk before the next one is saved."""
    for number in numbers:
        before = daemon.stats()["tiers"]["cold"]["states"]["written"]
        save(space, number)
        daemon.wait_for(
            lambda stats, want=before + PROMPT: bool(
                stats["tiers"]["cold"]["states"]["written"] >= want
            )
        )
        time.sleep(pause_s)


def places(client: Any, keys: Keys) -> set[str]:
    return {one["why"] for one in client.explain(keys=b"".join(keys))["keys"]}


def load(daemon: Daemon, space: Space, number: int) -> None:
    keys = keys_of(space, number)
    daemon.wait_for(lambda stats: bool(space.match(keys).ready == PROMPT))
    with space.load(keys) as blocks:
        for key, block in zip(keys, blocks, strict=True):
            assert bytes(block) == content(key, space.spec.block_bytes)


@pytest.mark.parametrize(
    "sealed",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["plain", "encrypted"],
)
def test_what_is_archived_is_found_after_it_left_the_disk(
    host: Hosts, store: ObjectStore, tmp_path: Path, sealed: bool
) -> None:
    (file := tmp_path / "keys").touch(0o600)
    file.write_text("11" * 32 + "\n")
    more = SEALED.format(file) if sealed else ""
    cold = (SEALED.format(file) if sealed else "") + 'codec = "zstd"\n'
    a = host(store.config(more='write = "none"\narchive = "all"\n' + more), cold)
    with a.connect() as client:
        space = client.open(spec_of(f"archive-{sealed}"))
        first, number, pause_s = 0, 0, 0.1
        # Not faster than the archive. If a busy machine loses a prompt: slow down, and take the next one.
        while (where := places(client, keys_of(space, first))) != {"in_remote"}:
            if first < number and where <= {"in_remote", "never_saved", "lost"}:
                first, pause_s = first + 1, min(2 * pause_s, 3.0)
            assert number < 5 * FULL, (states(a), a.stats()["tiers"]["cold"])
            save_all(a, space, range(number, number + 1), pause_s)
            number += 1
        assert states(a)["archived"] >= PROMPT
        load(a, space, first)
        assert states(a)["read"] == PROMPT
    contents = [path.read_bytes() for path in store.objects().values()]
    assert contents
    plain = content(keys_of(space, first)[0], space.spec.block_bytes)[:64]
    assert not sealed or not any(plain in one for one in contents)


def test_only_blocks_that_were_requested_again_are_archived_as_used(
    host: Hosts, store: ObjectStore
) -> None:
    a = host(store.config(more='write = "none"\narchive = "used"\n'))
    with a.connect() as client:
        space = client.open(spec_of("archive-used"))
        used, number, pause_s = list[int](), 0, 0.05
        # If a busy machine loses a prompt that was requested again: slow down, and take another one.
        while not states(a)["archived"]:
            assert number < 5 * FULL, (states(a), a.stats()["tiers"]["cold"])
            save_all(a, space, range(number, number + 1), pause_s)
            if number % (2 * FULL) == 0:
                load(a, space, number)
                used.append(number)
                pause_s *= 2
            number += 1
        save_all(a, space, range(number, number + FULL))
        a.wait_for(lambda stats: not remote_of(stats)["writing"])
        assert states(a)["archived"] == states(a)["written"] <= PROMPT * len(used)
        for one in set(range(number)) - set(used):
            assert places(client, keys_of(space, one)).isdisjoint({"in_remote"})


def reload(daemon: Daemon, before: str, after: str) -> None:
    file = daemon.log.parent / "kvtier.toml"
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))
    done = kvtier("reload", "--socket", daemon.socket)
    assert done.returncode == 0, done.stderr


def test_a_reload_starts_and_ends_the_archive(host: Hosts, store: ObjectStore) -> None:
    a = host(store.config(more='write = "none"\n'))
    with a.connect() as client:
        space = client.open(spec_of("archive-reload"))
        save_all(a, space, range(FULL))
        assert states(a)["archived"] == 0
        reload(a, 'write = "none"', 'write = "none"\narchive = "all"')
        a.wait_for(lambda stats: remote_of(stats)["states"]["archived"] > 0)
        assert remote_of(a.stats())["archive"] == "all"
        reload(a, 'archive = "all"', 'archive = "none"')
        a.wait_for(lambda stats: not remote_of(stats)["writing"])
        save_all(a, space, range(FULL, FULL + 4))  # what was being read then has been written
        archived = states(a)["archived"]
        save_all(a, space, range(FULL + 4, 2 * FULL))
        assert states(a)["archived"] == archived


def test_a_store_that_hangs_does_not_delay_the_reuse_of_a_segment(
    host: Hosts, tmp_path: Path
) -> None:
    with FaultyStore(tmp_path) as store:
        store.put_s = 60.0
        a = host(store.config + 'write = "none"\narchive = "all"\n')
        with a.connect() as client:
            space = client.open(spec_of("archive-hangs"))
            save_all(a, space, range(FULL))
            a.wait_for(lambda stats: remote_of(stats)["writing"] > 0)
            began = time.monotonic()
            save_all(a, space, range(FULL, 3 * FULL))
            assert time.monotonic() - began < store.put_s, "the disk was written over twice"
            assert states(a)["archived"] == 0
            load(a, space, 3 * FULL - 1)
        store.put_s = 0.0


def test_a_block_that_the_store_refused_is_archived_later(host: Hosts, tmp_path: Path) -> None:
    with FaultyStore(tmp_path) as store:
        a = host(store.config + 'write = "none"\n')
        with a.connect() as client:
            save_all(a, client.open(spec_of("archive-refused")), range(FULL))
            store.refuses_puts = True
            reload(a, 'write = "none"', 'write = "none"\narchive = "all"')
            a.wait_for(lambda _: bool(store.refused))
            store.refuses_puts = False
            a.wait_for(lambda _: store.refused[0] in store.objects)
            assert states(a)["not_written"] > 0


def test_a_block_that_was_forgotten_is_not_archived(host: Hosts, tmp_path: Path) -> None:
    """Also while its object is being written."""
    with FaultyStore(tmp_path) as store:
        store.put_s = 1.0
        a = host(store.config + 'write = "none"\narchive = "all"\n')
        with a.connect() as client:
            space = client.open(spec_of("archive-forgets"))
            save_all(a, space, range(FULL))
            a.wait_for(lambda stats: remote_of(stats)["writing"] > 0)
            for number in range(FULL):
                space.forget(keys_of(space, number))
            a.wait_for(lambda stats: remote_of(stats)["writing"] == 0)
            assert store.objects == {}
            save_all(a, space, range(FULL, FULL + 1))
            time.sleep(1.5)  # until it looks again
            assert not [one for one in store.objects if keys_of(space, 0)[0].hex() in one]


@pytest.mark.parametrize("how", ["purge", "forget"])
def test_what_was_purged_or_forgotten_after_it_left_the_disk_is_not_warmed_up(
    host: Hosts, store: ObjectStore, how: str
) -> None:
    """A purge deletes its objects also; a forget deletes those of the keys that it names."""
    remote = store.config(more='write = "none"\narchive = "all"\nwarm_up_percent = 50\n')
    remote = remote.replace('"fleet"', f'"of-{how}"')
    a = host(remote)
    a.wait_for(lambda _: "lists name" in a.log.read_text())  # it was empty
    with a.connect() as client:
        space = client.open(spec_of(f"archive-{how}"))
        first, number, pause_s = 0, 0, 0.1
        # Not faster than the archive, as above.
        while not (where := places(client, keys_of(space, first))) <= {"in_remote"}:
            if first < number and where <= {"in_remote", "never_saved", "lost"}:
                first, pause_s = number, min(2 * pause_s, 3.0)
            assert number < 7 * FULL, (states(a), a.stats()["tiers"]["cold"])
            save_all(a, space, range(number, number + 1), pause_s)
            if number == first:
                assert space.match(keys_of(space, first)).ready == PROMPT
            number += 1
        keys = keys_of(space, first)

        def objects_with(folder: str, text: bytes) -> list[Path]:
            found = []
            for path in (store.folder / "data" / BUCKET / f"of-{how}" / folder).rglob("*"):
                # The server may rename or remove it meanwhile.
                with suppress(FileNotFoundError, IsADirectoryError):
                    if text in path.read_bytes() + path.name.encode():
                        found.append(path)
            return found

        a.wait_for(lambda _: bool(objects_with("wanted", bytes(keys[0]))))
        if how == "forget":
            space.forget(keys)
        else:
            done = kvtier("purge", "--all", "--yes", "--socket", a.socket)
            assert done.returncode == 0, done.stderr
        assert not objects_with("wanted", bytes(keys[0]))
        assert not objects_with("v1", bytes(keys[0]).hex().encode())
        if how == "forget":
            return  # the host is not empty at its next start
    assert not a.stop()
    a = host(remote)
    a.wait_for(lambda _: a.log.read_text().count("lists name") == 2)
    with a.connect() as client:
        space = client.open(spec_of(f"archive-{how}"))
        for _ in range(5):
            found = space.match(keys)
            assert (found.ready, found.coming) == (0, 0)
            time.sleep(0.1)
