"""Two hosts, each with a daemon and a state directory of its own, share blocks through an object store."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier import frame
from kvtier.key import Keys
from kvtier.space import Space
from support.daemons import Daemon, kvtier
from support.object_store import BUCKET, KEY, ObjectStore, wait_until_ready
from support.specs import pattern, spec_of

PROMPT = 8  # blocks
WAIT_S = 60.0
OLD, NEW = b"of the fleet".ljust(32), b"of the fleet, from now on".ljust(32)
Hosts = Callable[..., Daemon]


@pytest.fixture
def host(tmp_path: Path, daemon_of: Hosts, store: ObjectStore) -> Hosts:
    """Start the daemon of a host. All have the same secret, as docs/remote.md says."""

    def start(
        name: str, more: str = "", config: str = "", secret: bytes = OLD, accepted: bytes = b"",
        tenant: str = "default",
    ) -> Daemon:  # fmt: skip
        folder = tmp_path / name
        secrets = folder / "state" / "secrets"
        secrets.mkdir(parents=True, mode=0o700, exist_ok=True)
        secrets.parent.chmod(0o700)
        for file, text in ((tenant, secret), (f"{tenant}.accepted", accepted)):
            (secrets / file).unlink(missing_ok=True)
            if text:
                (secrets / file).write_bytes(text)
                (secrets / file).chmod(0o600)
        daemon = daemon_of(folder=folder, config=config + store.config(more=more))
        daemon.wait_for(lambda stats: stats["tiers"]["remote"]["on"])
        return daemon

    return start


def save(space: Space, number: int) -> Keys:
    keys = space.keys([number] * PROMPT * space.spec.block_tokens)
    for group, kind in enumerate(space.spec.cache_groups):
        for shard in range(kind.shards):
            blocks = [pattern(key, space.spec.group_block_bytes(group)) for key in keys]
            space.save(keys, blocks, group=group, shard=shard)
    return keys


def share(daemon: Daemon, space: Space, number: int) -> Keys:
    """Save a prompt, request it again, and wait until it is in the store."""
    before = daemon.stats()["tiers"]["remote"]["states"]["written"]
    keys = save(space, number)
    assert space.match(keys).ready == PROMPT
    wanted = before + PROMPT * space.spec.places
    daemon.wait_for(lambda stats: stats["tiers"]["remote"]["states"]["written"] >= wanted)
    return keys


def loaded(space: Space, keys: Keys, blocks: int = PROMPT) -> int:
    """Load until as many blocks are there; return how many came. Their bytes must be those saved."""
    with space.load(keys[: wait_until_ready(space, keys, blocks)]) as ready:
        for key, block in zip(keys, ready, strict=False):
            assert bytes(block) == pattern(key, space.spec.block_bytes)
        return len(ready)


def test_a_host_hits_what_another_one_saved_also_after_that_one_died(host: Hosts) -> None:
    a, b = host("a"), host("b")
    with a.connect() as client:
        space = client.open(spec_of("fleet"))
        keys, late = share(a, space, 1), share(a, space, 2)
    with b.connect() as client:
        space = client.open(spec_of("fleet"))
        space.match(keys)  # asks for them, and for all objects of the space
        b.wait_for(lambda stats: stats["tiers"]["remote"]["asking"] == 0)
        assert loaded(space, keys) == PROMPT
        a.process.send_signal(signal.SIGKILL)
        a.process.wait()
        assert loaded(space, late) == PROMPT
        stats = b.stats()
        assert stats["hit_tokens"]["remote"] == 2 * PROMPT * space.spec.block_tokens
        assert stats["tiers"]["remote"]["states"]["read"] == 2 * PROMPT
        shown = client.explain(keys=bytes(keys[0]))["keys"][0]
        assert shown["why"] == "in_memory"


@pytest.mark.slow
def test_blocks_that_were_saved_once_stay_on_their_host_unless_all_are_shared(host: Hosts) -> None:
    a, b = host("a"), host("b", 'write = "all"\n')
    for daemon in (a, b):
        with daemon.connect() as client:
            save(client.open(spec_of("once")), 1)
    b.wait_for(lambda stats: stats["tiers"]["remote"]["states"]["written"] == PROMPT)
    assert a.stats()["tiers"]["remote"]["states"]["written"] == 0


def test_a_forgotten_block_is_deleted_in_the_store(host: Hosts, store: ObjectStore) -> None:
    a, b = host("a"), host("b")
    with a.connect() as client:
        space = client.open(spec_of("forget"))
        keys = share(a, space, 1)
        before = len(store.objects())
        assert space.forget(keys[:1]) == 1
        assert len(store.objects()) == before - 1
    with b.connect() as client:
        space = client.open(spec_of("forget"))
        space.match(keys)
        b.wait_for(lambda stats: stats["tiers"]["remote"]["asking"] == 0)
        assert space.match(keys).coming == 0
        shown = client.explain(keys=keys[1])["keys"][0]
        assert shown["why"] == "in_remote"


def test_the_secret_of_a_fleet_is_replaced_host_by_host_without_misses(host: Hosts) -> None:
    """Each host accepts the other secret, and uses the new one from its restart on. One at a time."""
    a, b = host("a", accepted=NEW), host("b", accepted=OLD + NEW)
    with a.connect() as first, b.connect() as second:
        ours, theirs = first.open(spec_of("rotated")), second.open(spec_of("rotated"))
        keys = share(a, ours, 1)
        assert loaded(theirs, keys) == PROMPT
        lent = theirs.keys([1] * PROMPT * 16)
        assert lent == keys and lent.others == ours.keys([1] * PROMPT * 16).others

        assert not b.stop()
        b = host("b", secret=NEW, accepted=OLD)  # the client of B stays
        assert theirs.match(keys).ready == 0
        renewed = theirs.keys([1] * PROMPT * 16)
        assert (renewed.packed, renewed.others) == (keys.others[0], (keys.packed,))
        # Under the old key, and it becomes a block under the new one.
        wait_until_ready(theirs, renewed, PROMPT)
        with theirs.load(renewed) as blocks:
            assert [bytes(block) for block in blocks] == [pattern(key, 65536) for key in keys]
        b.wait_for(lambda stats: stats["tiers"]["remote"]["states"]["written"] == PROMPT)

        more = share(b, theirs, 2)
        known = ours.keys([2] * PROMPT * 16)
        assert known.others == (more.packed,)
        wait_until_ready(ours, known, PROMPT)
        with ours.load(known) as blocks:
            assert [bytes(block) for block in blocks] == [pattern(key, 65536) for key in more]

        # Forgotten under both.
        assert theirs.forget(renewed[:1]) == 1
        assert ours.forget(known) == PROMPT
    c = host("c", secret=NEW)
    with c.connect() as client:
        space = client.open(spec_of("rotated"))
        assert not space.keys([1] * 16).others
        for gone in (renewed[:1], more):
            space.match(Keys(gone.packed))
            c.wait_for(lambda stats: stats["tiers"]["remote"]["asking"] == 0)
            assert space.match(Keys(gone.packed)).coming == 0
    d = host("d", secret=OLD)
    with d.connect() as client:
        space = client.open(spec_of("rotated"))
        space.match(keys[:1])
        d.wait_for(lambda stats: stats["tiers"]["remote"]["asking"] == 0)
        assert space.match(keys[:1]).coming == 0


def test_another_secret_is_accepted_for_its_tenant_only(
    tmp_path: Path, host: Hosts, store: ObjectStore
) -> None:
    a = host("a")
    with a.connect() as client:
        keys = share(a, client.open(spec_of("tenants")), 1)
    tenants = (
        f'[tenants.default]\nuids = [{os.getuid()}]\nquota = "2MiB"\n'
        '[tenants.other]\nuids = [65534]\nquota = "2MiB"\n'
    )
    b = host("b", config=tenants, secret=NEW, accepted=OLD, tenant="other")
    with b.connect() as client:
        space = client.open(spec_of("tenants"))
        assert not space.keys([1] * 16).others
        # Keys of the other tenant's secret, which this one does not have.
        forged = Keys(space.keys([1] * PROMPT * 16).packed, b"", (keys.packed,))
        for _ in range(2):
            assert space.match(forged).ready == 0
            b.wait_for(lambda stats: stats["tiers"]["remote"]["asking"] == 0)
        assert space.match(forged).coming == 0


def write_keys(file: Path, *keys: str) -> None:
    new = file.with_suffix(".new")
    new.touch(0o600)
    new.write_text("\n".join(keys))
    new.rename(file)


def encrypted(file: Path) -> str:
    return f'codec = "raw"\nencryption = "aes-256-gcm"\nkey_file = "{file}"\n'


def test_hosts_with_the_same_keys_share_encrypted_blocks_also_during_a_rotation(
    host: Hosts, store: ObjectStore, tmp_path: Path
) -> None:
    old, new = "11" * 32, "22" * 32
    files = {name: tmp_path / f"{name}.keys" for name in "ab"}
    for file in files.values():
        write_keys(file, old)
    hosts = {name: host(name, encrypted(file)) for name, file in files.items()}
    a, b = hosts["a"], hosts["b"]

    def rotate(name: str, *keys: str) -> None:
        write_keys(files[name], *keys)
        assert not kvtier("reload", "--socket", hosts[name].socket).returncode
        hosts[name].wait_for(lambda _: "2 keys from" in hosts[name].log.read_text())

    with a.connect() as first, b.connect() as second:
        ours, theirs = first.open(spec_of("sealed")), second.open(spec_of("sealed"))
        keys, more = share(a, ours, 1), share(a, ours, 2)
        for key in keys:
            block = pattern(key, ours.spec.block_bytes)
            text = store.objects()[f"{key.hex()}-0-0"].read_bytes()
            text = text[frame.peek(text) :]  # the header contains the key, and so does the block
            assert len(text) == len(block)
            assert not any(block[at : at + 16] in text for at in range(0, len(block), 16))
        assert loaded(theirs, keys) == PROMPT

        rotate("b", new, old)
        assert loaded(theirs, more) == PROMPT
        unknown = share(b, theirs, 3)
        a.wait_for(
            lambda stats: (
                bool(ours.match(unknown).ready)
                or stats["tiers"]["remote"]["states"]["unknown_key"] > 0
            )
        )
        assert ours.match(unknown).ready == 0
        rotate("a", old, new)
        assert loaded(ours, share(b, theirs, 4)) == PROMPT
    assert a.stats()["tiers"]["remote"]["states"]["spoilt"] == 0


def test_without_a_usable_key_file_the_store_is_off_until_there_is_one(
    tmp_path: Path, daemon_of: Hosts, store: ObjectStore
) -> None:
    file = tmp_path / "keys"
    daemon = daemon_of(folder=tmp_path, config=store.config(more=encrypted(file)))
    daemon.wait_for(lambda stats: "does not exist" in stats["tiers"]["remote"]["failure"])
    with daemon.connect() as client:
        space = client.open(spec_of("waiting"))
        keys = save(space, 1)
        assert loaded(space, keys) == PROMPT
    write_keys(file, "11" * 32)
    daemon.wait_for(lambda stats: stats["tiers"]["remote"]["on"])
    told = [line for line in daemon.log.read_text().splitlines() if " is off: " in line]
    assert len(told) == 1 and f"is off: {file}: the key file does not exist" in told[0]


@pytest.mark.slow
def test_memory_disk_and_store_answer_one_request_together(host: Hosts, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    config = (
        f'[warm]\nsize = "8MiB"\n[cold]\ndirectories = ["{tmp_path}/disk"]\nsize = "256MiB"\n'
        'segment = "1MiB"\n'
    )
    a, b = host("a"), host("b", config=config)
    with a.connect() as client:
        keys = share(a, client.open(spec_of("mixed")), 1)
    with b.connect() as client:
        space = client.open(spec_of("mixed"))
        few = keys[: PROMPT // 2]
        space.save(few, [pattern(key, space.spec.block_bytes) for key in few])
        space.match(keys)  # asks for the others
        b.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] == len(few))
        b.wait_for(lambda stats: stats["tiers"]["remote"]["known_objects"] >= PROMPT)
        for number in range(100, 180):  # evict them from memory
            save(space, number)
        assert space.match(few).ready < len(few)
        assert loaded(space, keys) == PROMPT
        hits = b.stats()["hit_tokens"]
        assert hits["cold"] >= space.spec.block_tokens
        assert hits["remote"] == PROMPT // 2 * space.spec.block_tokens


def test_the_steps_of_the_page_work(tmp_path: Path, daemon_of: Hosts, store: ObjectStore) -> None:
    page = (Path(__file__).parents[2] / "docs" / "remote.md").read_text()
    blocks = re.findall(r"^ +```(\w+)\n(.*?)```", page, re.DOTALL | re.MULTILINE)
    (made,) = (text for _, text in blocks if "fleet-secret" in text)
    subprocess.run(["sh", "-c", made], cwd=tmp_path, check=True)
    assert len((tmp_path / "fleet-secret").read_bytes()) == 32
    config, pooled = (textwrap.dedent(text) for kind, text in blocks if kind == "toml")
    assert "mooncake://" in pooled
    (credentials,) = (textwrap.dedent(text) for kind, text in blocks if kind == "ini")
    file = tmp_path / "s3-credentials"
    file.touch(0o600)
    named = credentials.replace("AKIAEXAMPLE", KEY).replace("wJalrXUtnFEMI", store.secret)
    file.write_text(named)
    for before, after in (
        ("kvtier-blocks", BUCKET), ("https://s3.example:9000", store.endpoint),
        ("/etc/kvtier/s3-credentials", str(file)),
    ):  # fmt: skip
        assert before in config
        config = config.replace(before, after)
    daemon = daemon_of(folder=tmp_path / "it", config=config)
    daemon.wait_for(lambda stats: stats["tiers"]["remote"]["on"])
    (steps,) = (text for _, text in blocks if "kvtier doctor" in text)
    shown = {}
    for line in textwrap.dedent(steps).splitlines():
        here = line.replace("/etc/kvtier/kvtier.toml", str(tmp_path / "it" / "kvtier.toml"))
        arguments = shlex.split(here)[1:]
        done = kvtier(*arguments, KVTIER_SOCKET=daemon.socket, COLUMNS="300")
        assert done.returncode == 0 or arguments == ["doctor"], done.stdout + done.stderr
        shown[arguments[0]] = " ".join(done.stdout.split())
    assert f"s3://{BUCKET}/fleet-a at {store.endpoint}" in shown["status"]
    assert "used without TLS" in shown["doctor"]
