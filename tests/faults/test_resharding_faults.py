"""Blocks that are made of the objects of another engine's ranks are complete and right, or misses, whatever
the store, its contents and its process do."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from kvtier import KvSpec
from kvtier.errors import KvtierError
from kvtier.frame import Identity
from kvtier.key import Keys
from kvtier.layout import space_id
from kvtier.space import Space
from kvtier_daemon.codec.resharding import family_of
from kvtier_daemon.codec.table import BY_NAME
from kvtier_daemon.tiers.remote.families import encode_description, folder_of
from kvtier_daemon.tiers.remote.objects import encode, object_name
from kvtier_daemon.tiers.remote.wanted import list_headers
from support.daemons import Daemon
from support.effort import effort
from support.faulty_store import FaultyStore
from support.heads import block, load_ranks, ranks_spec, save_ranks
from support.object_store import remote_of

PROMPT = 4  # blocks
WAIT_S = 60.0
SECRET = bytes(32)
Hosts = Callable[..., Daemon]
replace = msgspec.structs.replace


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FaultyStore]:
    with FaultyStore(tmp_path) as store:
        yield store


@pytest.fixture
def host(tmp_path: Path, daemon_of: Hosts, store: FaultyStore) -> Hosts:
    def start(
        name: str, more: str = "reshard = true\n", deadline_s: int = 30, **haste: float
    ) -> Daemon:
        secrets = tmp_path / name / "state" / "secrets"
        secrets.mkdir(parents=True, mode=0o700)
        (secrets / "default").write_bytes(SECRET)
        (secrets / "default").chmod(0o600)
        config = store.config.replace("= 30", f"= {deadline_s}") + more
        daemon = daemon_of(folder=tmp_path / name, config=config, haste=haste)
        daemon.wait_for(lambda stats: remote_of(stats)["on"])
        return daemon

    return start


def path_of(space: Space, key: bytes, shard: int, group: int = 0) -> str:
    return f"/blocks/{object_name(Identity(space.identity, group, shard, key))}"


def states(daemon: Daemon) -> dict[str, int]:
    found: dict[str, int] = remote_of(daemon.stats())["states"]
    return found


def share(daemon: Daemon, space: Space, number: int) -> Keys:
    before = states(daemon)["written"]
    keys = save_ranks(space, number, PROMPT)
    assert space.match(keys).ready == PROMPT
    wanted = before + PROMPT * space.spec.places
    daemon.wait_for(lambda stats: remote_of(stats)["states"]["written"] >= wanted)
    return keys


def know(daemon: Daemon, space: Space, keys: Keys) -> None:
    """Let the daemon know the siblings of the space, and what the store has; it reads nothing."""
    until, number = time.monotonic() + WAIT_S, 1000
    while space.locate([keys])[0].store < PROMPT:
        assert time.monotonic() < until
        number += 1
        space.match(space.keys([number] * 64))
        time.sleep(0.02)
    daemon.wait_for(lambda stats: remote_of(stats)["asking"] == 0)


def came(daemon: Daemon, space: Space, keys: Keys) -> int:
    """Load what comes, and compare it; return how many blocks."""
    until = time.monotonic() + WAIT_S
    while space.match(keys).coming and time.monotonic() < until:
        time.sleep(0.01)
    return load_ranks(space, keys)


def nothing_is_left(daemon: Daemon) -> None:
    stats = daemon.wait_for(
        lambda stats: remote_of(stats)["reading"] == remote_of(stats)["buffer_used_bytes"] == 0
    )
    assert stats["tiers"]["warm"]["states"]["writing"] == 0
    assert stats["failures"].get("internal", 0) == 0


def damage(text: bytes) -> bytes:
    return text[:-1] + bytes([text[-1] ^ 1])


Lie = Callable[[FaultyStore, str, str], None]


def swap(store: FaultyStore, one: str, other: str) -> None:
    store.objects[one], store.objects[other] = store.objects[other], store.objects[one]


LIES: dict[str, tuple[Lie, str]] = {
    "absent": (lambda store, one, other: store.objects.__delitem__(one), "absent"),
    "damaged": (lambda store, one, other: store.objects.update({one: damage(store.objects[one])}), "spoilt"),
    "truncated": (lambda store, one, other: store.objects.update({one: store.objects[one][:-9]}), "spoilt"),
    "empty": (lambda store, one, other: store.objects.update({one: b""}), "spoilt"),
    "swapped": (swap, "spoilt"),
    "twice the same": (lambda store, one, other: store.objects.update({one: store.objects[other]}), "spoilt"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("theirs", "ours", "sealed"),
    [
        (4, 2, False), (2, 4, True),
        pytest.param(4, 2, True, marks=pytest.mark.slow), pytest.param(2, 4, False, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_block_of_which_one_object_is_wrong_is_a_miss_in_all_shards_that_need_it(
    host: Hosts, store: FaultyStore, tmp_path: Path, theirs: int, ours: int, sealed: bool
) -> None:
    more = "reshard = true\n"
    if sealed:
        file = tmp_path / "keys"
        file.touch(0o600)
        file.write_text("11" * 32)
        more += f'encryption = "aes-256-gcm"\nkey_file = "{file}"\n'
    a, b = host("a", more), host("b", more)
    with a.connect() as first, b.connect() as second:
        source, target = first.open(ranks_spec(theirs)), second.open(ranks_spec(ours))
        prompts = {name: share(a, source, number) for number, name in enumerate(LIES, 10)}
        know(b, target, prompts["absent"])
        for number, (name, (lie, outcome)) in enumerate(LIES.items()):
            keys, before = prompts[name], states(b)
            wrong = number % theirs  # each shard in turn
            neighbour = wrong ^ 1  # of the same block of the target, if there are two
            lie(store, path_of(source, keys[2], wrong), path_of(source, keys[2], neighbour))
            assert came(b, target, keys) == 2, name
            nothing_is_left(b)
            after = states(b)
            assert after[outcome] > before[outcome], name
            assert after["resharded"] - before["resharded"] >= 2 * ours
            # The shards of a block that need no wrong object may be there. No wrong byte is.
            for shard in range(ours):
                with target.load(keys, shard=shard) as blocks:
                    assert len(blocks) == 2
        assert states(b)["unknown_key"] == 0


def frame_of(spec: KvSpec, identity: bytes, family: bytes, text: bytes) -> bytes:
    """The object of a description."""
    headers = list_headers(spec, identity, len(text))
    into = bytearray(headers.most_bytes)
    encode(headers, BY_NAME["raw"], None, family, b"", b"", memoryview(text), memoryview(into))
    return bytes(into)


def test_a_description_that_lies_is_ignored(host: Hosts, store: FaultyStore) -> None:
    """Of each host that knows the secret: about the heads of a real space, of a space with another tenant or
    family, under another name, and by hosts that do not know the secret."""
    a = host("a")
    target_spec, source_spec = ranks_spec(2), ranks_spec(4)
    family, real = family_of(target_spec, "default"), space_id(source_spec, "default")
    with a.connect() as client:
        keys = share(a, client.open(source_spec), 1)
    folder = f"/blocks/{folder_of(SECRET, family)}"
    (told,) = [name for name in store.objects if name.startswith(folder)]
    assert told == folder + real.hex()
    good = store.objects[told]
    group = source_spec.cache_groups[0]
    more_heads = replace(source_spec, cache_groups=(replace(group, kv_heads=2, shards=2),))
    other_family = ranks_spec(8, weights="other")
    lies = {
        "about the heads": (real, more_heads, family, SECRET),
        "about the ranks": (real, ranks_spec(1), family, SECRET),
        "of another tenant": (space_id(source_spec, "other"), source_spec, family, SECRET),
        "of another family": (space_id(other_family, "default"), other_family, family, SECRET),
        "without the secret": (real, source_spec, family, bytes(31) + b"1"),
        "for another family": (real, source_spec, bytes(32), SECRET),
    }
    for number, (what, (identity, spec, its, secret)) in enumerate(lies.items()):
        del store.objects[told]
        text = encode_description(spec, identity, its, secret)
        told = folder + identity.hex()
        store.objects[told] = frame_of(spec, identity, family, text)
        b = host(f"b{number}")
        with b.connect() as client:
            target = client.open(target_spec)
            target.match(keys)
            b.wait_for(lambda _, b=b: "is ignored: " in b.log.read_text())
            target.match(keys)
            b.wait_for(lambda stats: remote_of(stats)["asking"] == 0)
            assert target.match(keys).coming == 0, what
            assert remote_of(b.stats())["siblings"] == 0
            remedy = f"{told[8:]} cannot be used: .*; delete that"
            with pytest.raises(KvtierError, match=remedy):  # what may it hide?
                target.forget(keys)
        assert b.log.read_text().count("is ignored: ") == 1, what
        b.stop()
    del store.objects[told]
    # Names that are not those of spaces say nothing, and a good one is used.
    store.objects[folder + real.hex().upper()] = store.objects[folder + "x"] = b"?"
    store.objects[folder + real.hex()] = good
    c = host("c")
    with c.connect() as client:
        target = client.open(target_spec)
        assert load_ranks(target, keys, WAIT_S) == PROMPT
        assert remote_of(c.stats())["siblings"] == 1
    assert "is ignored: " not in c.log.read_text()


def test_a_forget_fails_if_the_family_cannot_be_read(host: Hosts, store: FaultyStore) -> None:
    """The objects of a sibling that is not known may be there: it must not seem to have been forgotten."""
    a, b = host("a"), host("b")
    with a.connect() as first, b.connect() as second:
        keys = share(a, first.open(ranks_spec(4)), 1)
        target = second.open(ranks_spec(2))
        store.refuses_lists = True
        with pytest.raises(KvtierError, match=r"SlowDown|503"):
            target.forget(keys)
        store.refuses_lists = False
        b.wait_for(lambda stats: remote_of(stats)["on"])
        assert target.forget(keys) == 0
        assert not [name for name in store.objects if keys[0].hex() in name]


def test_a_forget_deletes_the_objects_of_spaces_of_which_it_cannot_make_blocks(
    host: Hosts, store: FaultyStore
) -> None:
    """A third host could make blocks of them, and share these."""
    a, b, c = host("a"), host("b"), host("c")
    heads = {"heads": 6}
    with a.connect() as first, b.connect() as second, c.connect() as third:
        keys = share(a, first.open(ranks_spec(3, heads)), 1)
        target = second.open(ranks_spec(2, heads))
        assert target.forget(keys) == 0
        assert states(b)["not_resharded"] == 1
        assert not [name for name in store.objects if keys[0].hex() in name]
        between = third.open(ranks_spec(6, heads))
        between.match(keys)
        c.wait_for(lambda stats: remote_of(stats)["siblings"] == 1)
        assert load_ranks(between, keys) == 0


def test_no_object_is_written_before_the_description_of_its_space(
    host: Hosts, store: FaultyStore
) -> None:
    """Hosts of its family could not forget it."""
    a = host("a", RETRY_S=0.2)
    store.refuses_named = "/families/"
    with a.connect() as client:
        space = client.open(ranks_spec(2))
        keys = save_ranks(space, 1, PROMPT)
        assert space.match(keys).ready == PROMPT
        a.wait_for(lambda stats: remote_of(stats)["states"]["not_written"] >= PROMPT * 2)
        assert store.refused and not store.objects
        store.refuses_named = ""
        until = time.monotonic() + WAIT_S
        while len(store.objects) <= PROMPT * 2 and time.monotonic() < until:
            space.match(keys)
            time.sleep(0.05)
        assert "/families/" in next(iter(store.objects))
        assert len(store.objects) == PROMPT * 2 + 1


@pytest.mark.parametrize("order", ["forget", "forget of the sibling"])
def test_blocks_that_are_forgotten_while_they_are_made_do_not_arrive(
    host: Hosts, store: FaultyStore, order: str
) -> None:
    a, b = host("a"), host("b")
    with a.connect() as first, b.connect() as second:
        source, target = first.open(ranks_spec(4)), second.open(ranks_spec(2))
        keys = share(a, source, 1)
        know(b, target, keys)
        store.pauses_s = 1.0  # in the middle of each object
        assert target.match(keys).coming == PROMPT
        if order == "forget":
            target.forget(keys)
        else:
            assert source.forget(keys) == PROMPT * 4  # it takes effect on its own host
        store.pauses_s = 0.0
        nothing_is_left(b)
        if order == "forget":
            assert load_ranks(target, keys) == 0 and states(b)["resharded"] == 0
            assert not [name for name in store.objects if keys[0].hex() in name]
        else:  # what was read before stays on the other host, and is right
            assert load_ranks(target, keys) in range(PROMPT + 1)


@pytest.mark.parametrize("how", ["cut", "killed", "slow"])
def test_reads_that_break_are_misses_and_the_next_ones_are_good(
    host: Hosts, store: FaultyStore, how: str
) -> None:
    a, b = host("a"), host("b", deadline_s=2)
    with a.connect() as first, b.connect() as second:
        source, target = first.open(ranks_spec(4)), second.open(ranks_spec(2))
        keys = share(a, source, 1)
        know(b, target, keys)
        store.cuts_answers = how == "cut"
        store.pauses_s = {"cut": 0.0, "killed": 1.0, "slow": 4.0}[how]
        assert target.match(keys).coming == PROMPT
        if how == "killed":
            pid = remote_of(b.stats())["pid"]
            os.kill(pid, signal.SIGKILL)
            b.wait_for(lambda stats: remote_of(stats)["pid"] not in (0, pid))
        b.wait_for(lambda stats: remote_of(stats)["states"]["not_read"] > 0)
        store.cuts_answers, store.pauses_s = False, 0.0
        b.wait_for(lambda stats: remote_of(stats)["on"] and remote_of(stats)["reading"] == 0)
        # A request that may wait is read from a store that has been slow.
        assert target.wait(keys, int(WAIT_S * 1000)).ready == load_ranks(target, keys) == PROMPT
        nothing_is_left(b)
        assert states(b)["spoilt"] == 0


def test_two_spaces_that_need_the_same_object_at_once_both_get_it_or_a_miss(
    host: Hosts, store: FaultyStore
) -> None:
    a, b = host("a"), host("b")
    with a.connect() as first, b.connect() as second:
        source = first.open(ranks_spec(4))
        keys = share(a, source, 1)
        spaces = [second.open(ranks_spec(ranks)) for ranks in (4, 2, 1)]
        for space in spaces[1:]:
            know(b, space, keys)
        store.pauses_s = 0.3
        for space in spaces:
            assert space.match(keys).coming == PROMPT
        store.pauses_s = 0.0
        for space in spaces:
            assert load_ranks(space, keys, WAIT_S) == PROMPT
        nothing_is_left(b)


def test_shards_that_were_evicted_alone_are_made_again(host: Hosts, store: FaultyStore) -> None:
    """Blocks of one object, of which some shards are in memory and others are not."""
    a, b = host("a"), host("b")
    with a.connect() as first, b.connect() as second:
        source, target = first.open(ranks_spec(1)), second.open(ranks_spec(4))
        keys = share(a, source, 1)
        for shard in (0, 3):
            target.save(keys, [block(target.spec, 0, shard, key) for key in keys], shard=shard)
        assert load_ranks(target, keys, WAIT_S) == PROMPT
        assert states(b)["resharded"] == 2 * PROMPT
        nothing_is_left(b)


def test_no_byte_is_wrong_whatever_happens_to_objects_of_any_ranks(
    host: Hosts, store: FaultyStore
) -> None:
    """Each prompt is saved by an engine of some ranks, some of its objects are damaged, and engines of all
    other ranks load it. A good prompt comes completely."""
    chance, daemons = random.Random(7), {ranks: host(f"ranks{ranks}") for ranks in (1, 2, 4)}
    groups = {"heads": 4}, {"heads": 4, "kind": "window", "window_tokens": 64, "layers": 1}
    undamaged: set[int] = set()  # the ranks that loaded such objects of other ranks
    with ExitStack() as stack:
        spaces = {
            ranks: stack.enter_context(daemon.connect()).open(ranks_spec(ranks, *groups))
            for ranks, daemon in daemons.items()
        }
        for number in range(effort(2, 30, 120)):
            theirs = (4, 2, 1)[number % 3]
            keys = share(daemons[theirs], spaces[theirs], number)
            # They were written in any order.
            names = sorted(name for key in keys for name in store.objects if key.hex() in name)
            damaged = number % 4
            # One lie alone is noticed: it is about full attention. Windows do not need all blocks.
            candidates = [name for name in names if damaged > 1 or "-0-" in name[-8:]]
            for at, one in enumerate(chance.sample(candidates, damaged), number):
                lie, _ = list(LIES.values())[at % len(LIES)]
                if one in store.objects:
                    lie(
                        store, one, chance.choice([name for name in names if name in store.objects])
                    )
            for ours, space in spaces.items():
                if ours != theirs:
                    until, space_keys = time.monotonic() + WAIT_S, space.keys([1000 + number] * 64)
                    space.forget(space_keys)  # looks for new siblings at once
                    while not damaged and load_ranks(space, keys) < PROMPT:
                        assert time.monotonic() < until
                        time.sleep(0.02)
                    undamaged |= set() if damaged else {ours}
                    for _ in range(3):  # they find out, read, and find out again
                        space.match(space_keys)
                        daemons[ours].wait_for(lambda stats: remote_of(stats)["asking"] == 0)
                        assert came(daemons[ours], space, keys) <= PROMPT
                    nothing_is_left(daemons[ours])
        read = {ranks: states(daemon) for ranks, daemon in daemons.items()}
        assert undamaged and all(read[ranks]["resharded"] > 0 for ranks in undamaged)
        assert sum(one["spoilt"] + one["absent"] for one in read.values()) > 0
