"""A new host reads the blocks that the others want most before anything asks for them."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtier import Group, frame
from kvtier.key import Keys
from kvtier.space import Space
from kvtier_daemon.codec.table import BY_NAME
from kvtier_daemon.tiers.remote.objects import encode
from kvtier_daemon.tiers.remote.wanted import list_headers, list_identity
from kvtier_kernels import seal_frame
from support.daemons import Daemon, kvtier
from support.object_store import BUCKET, ObjectStore, remote_of
from support.specs import pattern, spec_of

PROMPT = 8  # blocks
HASTE = {"TELL_S": 0.1}
WARM = "warm_up_percent = 50\n"
Hosts = Callable[..., Daemon]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ObjectStore]:
    (tmp_path / "store").mkdir()
    store = ObjectStore(tmp_path / "store")
    yield store
    store.stop()


@pytest.fixture
def host(tmp_path: Path, daemon_of: Hosts, store: ObjectStore) -> Hosts:
    def start(
        name: str, more: str = WARM, secret: bytes = bytes(32), config: str = "", **haste: float
    ) -> Daemon:
        secrets = tmp_path / name / "state" / "secrets"
        secrets.mkdir(parents=True, mode=0o700, exist_ok=True)
        (secrets / "default").write_bytes(secret)
        (secrets / "default").chmod(0o600)
        daemon = daemon_of(
            folder=tmp_path / name, config=config + store.config(more=more), haste=HASTE | haste
        )
        daemon.wait_for(lambda stats: remote_of(stats)["on"])
        return daemon

    return start


def lists(store: ObjectStore) -> list[Path]:
    root = store.folder / "data" / BUCKET / "fleet" / "wanted" / "v1"
    return [path for path in root.rglob("*-*") if path.is_file()]


def share(daemon: Daemon, space: Space, number: int, times: int = 1) -> Keys:
    """Save a prompt, request it some times, and wait until the store has it."""
    before = remote_of(daemon.stats())["states"]["written"]
    keys = space.keys([number] * PROMPT * space.spec.block_tokens)
    for group, kind in enumerate(space.spec.cache_groups):
        for shard in range(kind.shards):
            blocks = [pattern(key, space.spec.group_block_bytes(group)) for key in keys]
            space.save(keys, blocks, group=group, shard=shard)
    for _ in range(times):
        assert space.match(keys).ready == PROMPT
    wanted = before + PROMPT * space.spec.places
    daemon.wait_for(lambda stats: bool(remote_of(stats)["states"]["written"] >= wanted))
    return keys


def told(daemon: Daemon, store: ObjectStore, spaces: int = 1) -> None:
    """Wait until lists have been written that contain everything until now."""
    daemon.wait_for(lambda _: len(lists(store)) == spaces)
    before = {path: path.stat().st_mtime_ns for path in lists(store)}
    daemon.wait_for(lambda _: all(path.stat().st_mtime_ns > before[path] for path in before))
    before = {path: path.stat().st_mtime_ns for path in lists(store)}
    daemon.wait_for(lambda _: all(path.stat().st_mtime_ns > before[path] for path in before))


def warmed(daemon: Daemon) -> dict[str, int]:
    """Wait until the warm-up has ended; return its figures."""
    stats = daemon.wait_for(
        lambda stats: bool(
            remote_of(stats)["state"] == "on" and any(remote_of(stats)["warm_up"].values())
        )
    )
    found: dict[str, int] = remote_of(stats)["warm_up"]
    return found


def check(space: Space, keys: Keys) -> None:
    assert space.match(keys).ready == PROMPT
    with space.load(keys) as blocks:
        for key, block in zip(keys, blocks, strict=True):
            assert bytes(block) == pattern(key, space.spec.block_bytes)


def order(daemon: Daemon) -> tuple[int, dict[str, Any]]:
    done = kvtier("tier", "warm-up", "remote", "--json", "--socket", daemon.socket)
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize(
    "sealed",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["plain", "encrypted"],
)
def test_the_first_request_on_a_new_host_hits_what_others_want(
    host: Hosts, store: ObjectStore, tmp_path: Path, sealed: bool
) -> None:
    (file := tmp_path / "keys").touch(0o600)
    file.write_text("11" * 32 + "\n")
    more = WARM + (f'encryption = "aes-256-gcm"\nkey_file = "{file}"\n' if sealed else "")
    a = host("a", more)
    with a.connect() as client:
        space = client.open(spec_of("warmed"))
        prompts = [share(a, space, number) for number in (1, 2, 3)]
        told(a, store)
        (text,) = [path.read_bytes() for path in lists(store)]
        assert (bytes(prompts[0][0]) in text) is not sealed
        assert (b"warmed" in text) is not sealed
    assert not a.stop()  # the store has no list that is being replaced
    b = host("b", more)
    assert warmed(b) == {"lists": 1, "ignored": 0, "blocks": 3 * PROMPT}
    with b.connect() as client:
        space = client.open(spec_of("warmed"))
        for keys in prompts:
            check(space, keys)
        assert remote_of(b.stats())["states"]["read"] == 3 * PROMPT


def test_memory_is_filled_to_its_share_with_the_most_wanted(
    host: Hosts, store: ObjectStore
) -> None:
    a = host("a")
    with a.connect() as client:
        space = client.open(spec_of("share"))
        prompts = [share(a, space, number, 1 + 3 * (number == 2)) for number in range(5)]
        told(a, store)
    assert not a.stop()
    # 16% of 4 MiB: 10 blocks of 64 KiB.
    b = host("b", "warm_up_percent = 16\n")
    assert warmed(b)["blocks"] == 10
    with b.connect() as client:
        space = client.open(spec_of("share"))
        check(space, prompts[2])
        assert b.stats()["tiers"]["warm"]["state_bytes"]["ready"] <= 0.16 * (4 << 20)


def test_a_host_with_blocks_reads_the_lists_only_when_it_is_told_to(
    host: Hosts, store: ObjectStore
) -> None:
    b = host("b")
    code, answer = order(b)
    assert code == 2 and "no list of a host" in answer["failure"], answer
    with b.connect() as client:
        own = client.open(spec_of("told"))
        assert share(b, own, 9)
    a = host("a")
    with a.connect() as client:
        keys = share(a, client.open(spec_of("told")), 1)
        told(a, store, 2)
    assert remote_of(b.stats())["states"]["read"] == 0
    code, answer = order(b)
    assert (code, answer["state"], answer["left_blocks"], answer["failure"]) == (0, "on", 0, "")
    with b.connect() as client:
        check(client.open(spec_of("told")), keys)
    off = host("off", "")
    refused = kvtier("tier", "warm-up", "remote", "--socket", off.socket)
    assert refused.returncode == 2 and "set remote.warm_up_percent" in refused.stderr
    assert kvtier("tier", "warm-up", "warm", "--socket", b.socket).returncode == 2


def test_hosts_without_the_key_tell_nothing_and_read_nothing(
    host: Hosts, store: ObjectStore
) -> None:
    a = host("a", "")
    with a.connect() as client:
        share(a, client.open(spec_of("silent")), 1)
    time.sleep(0.5)  # five times as long as the time between lists
    assert lists(store) == []
    assert remote_of(a.stats())["warm_up"] == {"lists": 0, "ignored": 0, "blocks": 0}


def test_flipped_swapped_and_foreign_lists_are_ignored(host: Hosts, store: ObjectStore) -> None:
    a = host("a")
    with a.connect() as client:
        for name in ("first", "second"):
            keys = share(a, client.open(spec_of(name)), 1)
        told(a, store, 2)
    assert not a.stop()
    one, two = lists(store)
    texts = one.read_bytes(), two.read_bytes()
    one.write_bytes(texts[1])
    two.write_bytes(texts[0][:-1] + bytes([texts[0][-1] ^ 1]))
    (one.parent / "not-a-list").write_bytes(texts[0])
    b = host("b")
    assert warmed(b) == {"lists": 0, "ignored": 3, "blocks": 0}
    assert b.log.read_text().count("is ignored:") == 2
    one.write_bytes(texts[0])
    c = host("c", secret=b"of another fleet".ljust(32))
    c.wait_for(lambda stats: "lists name" in c.log.read_text())
    assert remote_of(c.stats())["warm_up"] == {"lists": 0, "ignored": 0, "blocks": 0}
    d = host("d")
    assert warmed(d)["lists"] == 1
    with d.connect() as client:
        assert bytes(keys[0])
        found = [client.open(spec_of(name)) for name in ("first", "second")]
        ready = [space.match(space.keys([1] * PROMPT * 16)).ready for space in found]
        assert sorted(ready) == [0, PROMPT]


def list_frame(path: Path, codec: str, shorter: int = 0) -> bytes:
    """A frame with correct digests that has the name of a list, and no code of the fleet."""
    of = list_identity(*map(bytes.fromhex, path.name.split("-")))
    text, most = bytes(8192), bytes(8193)
    if not shorter:
        headers = list_headers(spec_of("any"), of.space, len(text))
        into = bytearray(headers.most_bytes)
        block, all_of_it = memoryview(text), memoryview(into)
        return bytes(
            into[: encode(headers, BY_NAME[codec], None, of.key, b"", b"", block, all_of_it)]
        )
    nbytes = len(text) - shorter
    entries = (frame.Entry(0, 0, frame.RAW, 0, nbytes, len(text)),)
    header = bytearray(
        frame.Frame(
            of, b"", frame.RAW, nbytes, len(text), 0, 0, frame.ZERO_DIGEST, frame.ZERO_DIGEST, entries
        ).encode()
    )  # fmt: skip
    seal_frame(header, most[:nbytes])
    return bytes(header) + most[:nbytes]


def test_no_frame_of_a_list_ends_the_warm_up(host: Hosts, store: ObjectStore) -> None:
    """The frame is read before the code of the list is verified."""
    a = host("a")
    with a.connect() as client:
        keys = share(a, client.open(spec_of("forged")), 1)
        told(a, store)
    assert not a.stop()  # its list does not change meanwhile
    (good,) = lists(store)
    space, _ = good.name.split("-")
    for number, (codec, shorter) in enumerate([("zstd", 0), ("fix4", 0), ("raw", 1), ("raw", -1)]):
        path = good.with_name(f"{space}-{bytes([number]).hex() * 32}")
        path.write_bytes(list_frame(path, codec, shorter))
    b = host("b")
    assert warmed(b) == {"lists": 1, "ignored": 4, "blocks": PROMPT}
    assert "internal error" not in b.log.read_text()
    with b.connect() as client:
        check(client.open(spec_of("forged")), keys)


def test_copies_of_a_list_are_not_read(host: Hosts, store: ObjectStore) -> None:
    a = host("a")
    with a.connect() as client:
        share(a, client.open(spec_of("copied")), 1)
        told(a, store)
    (good,) = lists(store)
    assert not a.stop()
    (good.parent / "more").mkdir()
    name = good.name
    for copy in (name.upper(), f"{name[:2]} {name[2:]}", f"more/{name}"):
        (good.parent / copy).write_bytes(good.read_bytes())
    assert warmed(host("b")) == {"lists": 1, "ignored": 3, "blocks": PROMPT}


def test_useless_lists_take_no_place_of_good_ones(host: Hosts, store: ObjectStore) -> None:
    a = host("a")
    with a.connect() as client:
        share(a, client.open(spec_of("many")), 1)
        told(a, store)
    (good,) = lists(store)
    space, _ = good.name.split("-")
    for number in range(20):
        (good.parent / f"{space}-{bytes([number]).hex() * 32}").write_bytes(b"old")
    assert warmed(host("b", MOST_LISTS=1))["lists"] == 1


def test_a_host_with_a_missing_disk_tells_and_is_warmed_up(
    host: Hosts, store: ObjectStore, tmp_path: Path
) -> None:
    """Its recovery does not end. What is saved meanwhile does not count as blocks from before."""
    a = host("a")
    with a.connect() as client:
        keys = share(a, client.open(spec_of("missing")), 1)
        told(a, store)
    (tmp_path / "one").mkdir()
    cold = cold_of(tmp_path / "one", tmp_path / "two")
    assert not host("b", config=cold).stop()
    (tmp_path / "two").mkdir(exist_ok=True)
    shutil.rmtree(tmp_path / "two")
    b = host("b", config=cold, FOUND_S=2)
    with b.connect() as client:
        space = client.open(spec_of("missing"))
        share(b, space, 2)
        b.wait_for(lambda _: len(lists(store)) == 2)
        assert warmed(b)["blocks"] == PROMPT
        check(space, keys)


def cold_of(*folders: Path) -> str:
    paths = ", ".join(f'"{folder}"' for folder in folders)
    return f'[cold]\ndirectories = [{paths}]\nsize = "96MiB"\nsegment = "1MiB"\nwrite = "through"\n'


def test_a_host_with_blocks_on_disk_is_not_warmed_up(
    host: Hosts, store: ObjectStore, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    cold = cold_of(tmp_path / "disk")
    b = host("b", config=cold)
    with b.connect() as client:
        share(b, client.open(spec_of("kept")), 2)
        b.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] == PROMPT)
    assert not b.stop()
    for path in lists(store):
        path.unlink()
    a = host("a")
    with a.connect() as client:
        share(a, client.open(spec_of("kept")), 1)
        told(a, store)
    b = host("b", config=cold)
    b.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] == PROMPT)
    time.sleep(1)  # several times as long as until the first warm-up
    assert remote_of(b.stats())["warm_up"] == {"lists": 0, "ignored": 0, "blocks": 0}


def test_objects_that_are_gone_are_no_blocks_and_end_the_warm_up(
    host: Hosts, store: ObjectStore
) -> None:
    a = host("a")
    with a.connect() as client:
        space = client.open(spec_of("gone"))
        keys, kept = share(a, space, 1), share(a, space, 2)
        told(a, store)
    for name, path in store.objects().items():
        if name.startswith(bytes(keys[4]).hex()):
            path.unlink()
    b = host("b")
    assert warmed(b)["blocks"] == PROMPT + 4
    with b.connect() as client:
        space = client.open(spec_of("gone"))
        assert space.match(keys).ready == 4
        check(space, kept)


def test_a_model_with_windows_and_shards_is_warmed_up(host: Hosts, store: ObjectStore) -> None:
    full = Group(layers=2, kv_heads=4, head_dim=64, shards=2)
    window = Group(kind="window", layers=2, kv_heads=4, head_dim=64, window_tokens=48)
    spec = msgspec.structs.replace(spec_of("hybrid"), cache_groups=(full, window))
    a = host("a")
    with a.connect() as client:
        keys = share(a, client.open(spec), 1)
        told(a, store)
    b = host("b")
    assert warmed(b)["blocks"] == PROMPT
    with b.connect() as client:
        assert client.open(spec).match(keys).ready == PROMPT


def test_the_first_start_after_a_purge_reads_no_block_of_the_space(
    host: Hosts, store: ObjectStore
) -> None:
    """Also none that another host wants; an operator may order that."""
    a, b = host("a"), host("b")
    with a.connect() as first, b.connect() as second:
        ours, theirs = first.open(spec_of("purged")), second.open(spec_of("purged"))
        keys, kept = share(a, ours, 1), share(b, theirs, 2)
        others = share(b, second.open(spec_of("other")), 3)
        told(b, store, 3)
        done = kvtier("purge", "--all", "--yes", "--socket", a.socket)
        assert done.returncode == 0, done.stderr
        b.wait_for(lambda _: len(lists(store)) == 2)
    assert not a.stop()
    a = host("a")
    assert warmed(a)["blocks"] == PROMPT
    with a.connect() as client:
        check(client.open(spec_of("other")), others)
        space = client.open(spec_of("purged"))
        assert space.match(keys).ready == 0
        assert order(a)[0] == 0
        check(space, kept)
        assert space.match(keys).ready == 0
    assert not a.stop()
    a = host("a")
    assert warmed(a)["blocks"] == 2 * PROMPT
