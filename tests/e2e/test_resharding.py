"""Hosts whose engines have another tensor parallelism load each other's blocks from a real store."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.key import Keys, space_secret, token_keys
from kvtier.space import Space
from support.daemons import Daemon, kvtier
from support.heads import block, load_ranks, ranks_spec, save_ranks
from support.object_store import BUCKET, ObjectStore, remote_of
from support.specs import spec_of

PROMPT = 6  # blocks
WAIT_S = 60.0
ON = "reshard = true\n"
SECRET = b"of the fleet".ljust(32)
Hosts = Callable[..., Daemon]
GROUPS = {
    "dense": ({"heads": 8},),
    "window and draft": (
        {"heads": 8}, {"heads": 8, "kind": "window", "window_tokens": 64, "layers": 3},
        {"heads": 2, "layers": 1, "head_dim": 32},
    ),
    "latents": ({"parts": 1, "head_dim": 48},),
    "latents and heads": ({"heads": 4}, {"heads": 1, "layers": 1}),
}  # fmt: skip


@pytest.fixture
def host(tmp_path: Path, daemon_of: Hosts, store: ObjectStore) -> Hosts:
    def start(
        name: str, more: str = ON, secret: bytes = SECRET, accepted: bytes = b"", config: str = "",
        tenant: str = "default",
    ) -> Daemon:  # fmt: skip
        folder = tmp_path / name
        secrets = folder / "state" / "secrets"
        secrets.mkdir(parents=True, mode=0o700)
        secrets.parent.chmod(0o700)
        for file, text in ((tenant, secret), (f"{tenant}.accepted", accepted)):
            if text:
                (secrets / file).write_bytes(text)
                (secrets / file).chmod(0o600)
        # Each test has a prefix of its own.
        section = store.config(more=more).replace('"fleet"', f'"{tmp_path.name}"')
        daemon = daemon_of(folder=folder, config=config + section)
        daemon.wait_for(lambda stats: remote_of(stats)["on"])
        return daemon

    return start


def share(daemon: Daemon, space: Space, number: int) -> Keys:
    """Save a prompt, request it again, and wait until it is in the store."""
    before = remote_of(daemon.stats())["states"]["written"]
    keys = save_ranks(space, number, PROMPT)
    assert space.match(keys).ready == PROMPT
    wanted = before + PROMPT * space.spec.places
    daemon.wait_for(lambda stats: remote_of(stats)["states"]["written"] >= wanted)
    return keys


def asked(daemon: Daemon, space: Space, keys: Keys, siblings: int = 1) -> int:
    """Let the daemon find out what the store has; return how many blocks it would read."""
    space.match(keys)
    daemon.wait_for(lambda stats: remote_of(stats)["siblings"] >= siblings)
    for _ in range(2):
        space.match(keys)
        daemon.wait_for(lambda stats: remote_of(stats)["asking"] == 0)
    (found,) = space.locate([keys])
    return found.memory + found.store


def states(daemon: Daemon) -> dict[str, int]:
    found: dict[str, int] = remote_of(daemon.stats())["states"]
    return found


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("theirs", "ours"), [(4, 2), (2, 4)])
@pytest.mark.parametrize("groups", GROUPS)
def test_an_engine_loads_what_one_with_another_tensor_parallelism_saved(
    host: Hosts, groups: str, theirs: int, ours: int
) -> None:
    order = "latent=32+16" if groups == "latents" else "tokens first"
    specs = [ranks_spec(ranks, *GROUPS[groups], order=order) for ranks in (theirs, ours)]
    a, b = host("a"), host("b")
    with a.connect() as first, b.connect() as second:
        source, target = first.open(specs[0]), second.open(specs[1])
        keys = share(a, source, 1)
        assert target.keys([1] * PROMPT * 32) == keys
        asked(b, target, target.keys([9] * 64))  # lists all objects
        assert target.locate([keys])[0].store == PROMPT
        assert load_ranks(target, keys, WAIT_S) == PROMPT
        found = states(b)
        window = sum(kind.shards for kind in specs[1].cache_groups if kind.kind == "window")
        arrived = PROMPT * specs[1].places - (PROMPT - 2) * window  # the last two of a window
        assert found["read"] == found["resharded"] == arrived
        assert found["spoilt"] == found["absent"] == found["not_resharded"] == 0
        assert b.stats()["hit_tokens"]["remote"] == PROMPT * 32
        # It is a block of its space like any other: used again, the host shares it as its own.
        assert target.match(keys).ready == PROMPT
        b.wait_for(lambda stats: remote_of(stats)["states"]["written"] == arrived)


def test_encrypted_objects_and_objects_under_another_secret_become_blocks_too(
    host: Hosts, tmp_path: Path
) -> None:
    file, new = tmp_path / "keys", b"from now on".ljust(32)
    file.touch(0o600)
    file.write_text("11" * 32)
    sealed = f'{ON}encryption = "aes-256-gcm"\nkey_file = "{file}"\n'
    a, b = host("a", sealed), host("b", sealed, new, SECRET)
    with a.connect() as first, b.connect() as second:
        source, target = first.open(ranks_spec(4)), second.open(ranks_spec(2))
        share(a, source, 1)
        keys = target.keys([1] * PROMPT * 32)
        assert keys.others == (source.keys([1] * PROMPT * 32).packed,)
        assert load_ranks_under(target, keys, source.keys([1] * PROMPT * 32)) == PROMPT
        assert states(b)["resharded"] == PROMPT * 2
        # In the store it is then a block under the new secret.
        b.wait_for(lambda stats: remote_of(stats)["states"]["written"] == PROMPT * 2)


def load_ranks_under(space: Space, keys: Keys, saved: Keys) -> int:
    """As `load_ranks`, of blocks whose content follows from the keys under which they were saved."""
    until = time.monotonic() + WAIT_S
    while (found := space.match(keys)).ready < len(keys) and time.monotonic() < until:
        time.sleep(0.01)
    for shard in range(space.spec.cache_groups[0].shards):
        with space.load(keys, shard=shard) as ready:
            for key, one in zip(saved, ready, strict=True):
                assert bytes(one) == block(space.spec, 0, shard, key)
    return found.ready


def test_it_is_off_by_default_and_then_no_description_is_written(
    host: Hosts, store: ObjectStore, tmp_path: Path
) -> None:
    a, b = host("a", ""), host("b")
    with a.connect() as first, b.connect() as second:
        source = first.open(ranks_spec(4))
        keys = share(a, source, 1)
        tokens = [1] * PROMPT * 32
        # Keys are those of the space, so these hosts share nothing, and cannot forget it.
        assert keys == token_keys(space_secret(SECRET, source.identity), tokens, 32)
        for ranks in (4, 2):
            target = second.open(ranks_spec(ranks))
            assert target.keys(tokens) != keys
            assert asked(b, target, target.keys(tokens), 0) == 0
    assert not list((store.folder / "data" / BUCKET / tmp_path.name).glob("families/**/*"))
    assert not remote_of(a.stats())["reshard"] and remote_of(a.stats())["siblings"] == 0


@pytest.mark.parametrize("other", ["secret", "tenant"])
def test_another_fleet_or_tenant_has_families_of_its_own(
    host: Hosts, other: str, store: ObjectStore, tmp_path: Path
) -> None:
    """Also if its users know the keys."""
    a = host("a")
    if other == "secret":
        b = host("b", secret=b"of another fleet".ljust(32))
    else:
        tenants = f'[tenants.other]\nuids = [{os.getuid()}]\nquota = "2MiB"\n'
        b = host("b", config=tenants, tenant="other")
    with a.connect() as first, b.connect() as second:
        keys = share(a, first.open(ranks_spec(4)), 1)
        target = second.open(ranks_spec(2))
        assert target.keys([1] * 64) != keys[:2]
        assert asked(b, target, keys, 0) == 0
        assert share(b, target, 2)
    folders = {
        path.parent
        for path in (store.folder / "data" / BUCKET / tmp_path.name).glob("families/v1/*/*")
    }
    assert len(folders) == 2
    assert remote_of(b.stats())["siblings"] == 0


def test_what_is_forgotten_does_not_return_from_a_sibling(host: Hosts) -> None:
    """Also if the host learns of the sibling during the forget."""
    a, b = host("a"), host("b")
    with a.connect() as first, b.connect() as second:
        source, target = first.open(ranks_spec(4)), second.open(ranks_spec(2))
        known, unknown, kept = (share(a, source, number) for number in range(3))
        assert target.forget(unknown) == 0  # the first request of this space
        assert asked(b, target, unknown) == 0
        assert load_ranks(target, known, WAIT_S) == PROMPT
        assert target.forget(known[2:]) == (PROMPT - 2) * 2
        assert asked(b, target, known) == 2
        # The copies in the memory of the other host stay, as always.
        assert source.match(known).ready == PROMPT
        assert load_ranks(target, kept, WAIT_S) == PROMPT


def test_a_forget_takes_effect_in_all_spaces_of_the_family_on_this_host(
    host: Hosts, store: ObjectStore, tmp_path: Path
) -> None:
    """Otherwise the host could share what the other space has in memory or on disk, and make blocks of it."""
    cold = tmp_path / "cold"
    cold.mkdir(mode=0o700)
    a = host("a", config=f'[cold]\ndirectories = ["{cold}"]\nsize = "64MiB"\n')
    with a.connect() as client:
        four, two = (client.open(ranks_spec(ranks)) for ranks in (4, 2))
        keys = share(a, four, 1)
        assert load_ranks(two, keys, WAIT_S) == PROMPT
        assert two.forget(keys) == PROMPT * 2
        for space in (four, two):
            found = space.match(keys)
            assert found.ready == found.coming == 0
    assert not list(
        (store.folder / "data" / BUCKET / tmp_path.name).glob(f"v1/**/*{keys[0].hex()}*")
    )


def test_a_purge_deletes_the_objects_of_siblings_too(host: Hosts) -> None:
    a, b = host("a"), host("b")
    with a.connect() as first, b.connect() as second:
        source, target = first.open(ranks_spec(4)), second.open(ranks_spec(2))
        keys = share(a, source, 1)
        assert load_ranks(target, keys, WAIT_S) == PROMPT
        purged = kvtier("purge", "--all", "--yes", "--socket", b.socket)
        assert not purged.returncode, purged.stderr
        assert asked(b, target, keys) == 0


def test_a_model_that_cannot_be_resharded_is_told_once(host: Hosts) -> None:
    a = host("a")
    with a.connect() as client:
        for _ in range(3):
            space = client.open(spec_of("plain"))
            space.match(space.keys([1] * 64))
    lines = [line for line in a.log.read_text().splitlines() if "not resharded" in line]
    assert len(lines) == 1 and "blocks of plain are not resharded: layout: " in lines[0]
    assert states(a)["not_resharded"] == 1


def test_ranks_of_which_neither_number_divides_the_other_are_told_once(host: Hosts) -> None:
    a, b = host("a"), host("b")
    with a.connect() as first, b.connect() as second:
        keys = share(a, first.open(ranks_spec(2, {"heads": 6})), 1)
        target = second.open(ranks_spec(3, {"heads": 6}))
        target.match(keys)
        b.wait_for(lambda stats: remote_of(stats)["states"]["not_resharded"] == 1)
        assert asked(b, target, keys, 0) == 0
    lines = [line for line in b.log.read_text().splitlines() if "not resharded" in line]
    assert len(lines) == 1 and "cache_groups[0].shards: 2 cannot become 3" in lines[0]


def test_own_objects_come_first_and_a_sibling_s_complete_them(host: Hosts) -> None:
    a, b, c = host("a"), host("b"), host("c")
    specs = [ranks_spec(ranks) for ranks in (4, 2)]
    with a.connect() as first, b.connect() as second, c.connect() as third:
        source, target = first.open(specs[0]), second.open(specs[1])
        keys = share(a, source, 1)
        own = save_ranks(target, 1, 2)
        assert target.match(own).ready == 2
        b.wait_for(lambda stats: remote_of(stats)["states"]["written"] == 4)
        space = third.open(specs[1])
        assert asked(c, space, keys) == PROMPT
        assert load_ranks(space, keys, WAIT_S) == PROMPT
        assert states(c)["read"] == 2 * PROMPT
        assert 2 * PROMPT - 4 <= states(c)["resharded"] < 2 * PROMPT
