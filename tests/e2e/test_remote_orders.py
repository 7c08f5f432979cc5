"""An operator switches the remote tier, drains it, and changes its configuration while the daemon serves."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.key import Keys
from kvtier.space import Space
from support.daemons import Daemon, kvtier
from support.faulty_store import FaultyStore
from support.object_store import ObjectStore, remote_of, wait_until_ready
from support.specs import pattern, spec_of

PROMPT = 4  # blocks
WAIT_S = 60.0
Hosts = Callable[..., Daemon]


@pytest.fixture
def host(tmp_path: Path, daemon_of: Hosts) -> Hosts:
    def start(name: str, config: str) -> Daemon:
        secrets = tmp_path / name / "state" / "secrets"
        secrets.mkdir(parents=True, mode=0o700, exist_ok=True)
        (secrets / "default").write_bytes(bytes(32))
        (secrets / "default").chmod(0o600)
        daemon = daemon_of(folder=tmp_path / name, config=config)
        daemon.wait_for(lambda stats: remote_of(stats)["on"], WAIT_S)
        return daemon

    return start


def save(space: Space, number: int) -> Keys:
    keys = space.keys([number] * PROMPT * space.spec.block_tokens)
    space.save(keys, [pattern(key, space.spec.block_bytes) for key in keys])
    return keys


def share(daemon: Daemon, space: Space, number: int) -> Keys:
    before = remote_of(daemon.stats())["states"]["written"]
    keys = save(space, number)
    assert space.match(keys).ready == PROMPT
    daemon.wait_for(lambda stats: remote_of(stats)["states"]["written"] >= before + PROMPT, WAIT_S)
    return keys


def order(daemon: Daemon, what: str) -> tuple[int, dict[str, Any]]:
    done = kvtier("tier", what, "remote", "--json", "--socket", daemon.socket)
    return done.returncode, json.loads(done.stdout)


def test_off_ends_the_process_and_on_uses_the_store_again(host: Hosts, store: ObjectStore) -> None:
    a, b = host("a", store.config()), host("b", store.config())
    with a.connect() as first, b.connect() as second:
        ours, theirs = first.open(spec_of("switched")), second.open(spec_of("switched"))
        keys = share(a, ours, 1)
        pid = remote_of(b.stats())["pid"]
        assert order(b, "off") == (
            0, {"tier": "remote", "state": "off", "left_blocks": 0, "failure": ""}
        )  # fmt: skip
        assert not Path(f"/proc/{pid}").exists()
        assert (theirs.match(keys).ready, theirs.match(keys).coming) == (0, 0)
        assert len(save(theirs, 2)) == PROMPT
        assert "switched off; run `kvtier tier on remote`" in remote_of(b.stats())["failure"]
        refused = kvtier("tier", "drain", "remote", "--socket", b.socket)
        assert (refused.returncode, "it cannot be drained" in refused.stderr) == (2, True)
        code, told = order(b, "on")
        assert (code, told["state"]) == (0, "on")
        assert wait_until_ready(theirs, keys) == PROMPT
        with theirs.load(keys) as blocks:
            for key, block in zip(keys, blocks, strict=True):
                assert bytes(block) == pattern(key, theirs.spec.block_bytes)
        assert remote_of(b.stats())["restarts"] == 0, "orders are no failures"
        assert " is off: " not in b.log.read_text()


def test_a_drain_writes_what_waits_and_then_nothing_more(host: Hosts, tmp_path: Path) -> None:
    with FaultyStore(tmp_path) as store:
        store.waits_s = 0.3  # blocks still wait when the order comes
        a = host("a", store.config + 'write = "all"\n')
        with a.connect() as client:
            space = client.open(spec_of("drained"))
            save(space, 1)
            code, told = order(a, "drain")
            assert (code, told["state"], told["left_blocks"]) == (0, "drained", 0)
            assert remote_of(a.stats())["states"]["written"] == PROMPT
            save(space, 2)
            assert remote_of(a.stats())["queued"] == 0
            assert order(a, "status")[1]["state"] == "drained"
            assert order(a, "on")[1]["state"] == "on"
            save(space, 3)
            a.wait_for(lambda stats: remote_of(stats)["states"]["written"] == 2 * PROMPT, WAIT_S)


def test_a_host_hands_all_its_blocks_over_before_it_retires(
    host: Hosts, store: ObjectStore, tmp_path: Path
) -> None:
    """Also those that are only on disk, and those that were never used."""
    (tmp_path / "disk").mkdir()
    disk = f'[warm]\nsize = "4MiB"\n[cold]\ndirectories = ["{tmp_path}/disk"]\nsize = "256MiB"\n'
    a = host("a", store.config() + disk)
    prompts = 20  # 10 MiB
    with a.connect() as client:
        space = client.open(spec_of("retires"))
        for number in range(prompts):
            save(space, number)
        a.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] == prompts * PROMPT, WAIT_S)
        assert remote_of(a.stats())["states"]["written"] == 0
        in_memory = a.stats()["tiers"]["warm"]["blocks"]
        assert in_memory < prompts * PROMPT
        code, told = order(a, "hand-over")
        assert (code, told["state"], told["left_blocks"]) == (0, "on", 0), told
        assert remote_of(a.stats())["states"]["written"] == prompts * PROMPT
        assert order(a, "hand-over")[0] == 0
        assert remote_of(a.stats())["states"]["written"] == prompts * PROMPT, "they are there"
    assert not a.stop()
    b = host("b", store.config())
    with b.connect() as client:
        space = client.open(spec_of("retires"))
        for number in range(prompts):
            keys = space.keys([number] * PROMPT * space.spec.block_tokens)
            assert wait_until_ready(space, keys) == PROMPT
            with space.load(keys) as blocks:
                for key, block in zip(keys, blocks, strict=True):
                    assert bytes(block) == pattern(key, space.spec.block_bytes)


def test_blocks_that_are_not_shared_are_not_handed_over(host: Hosts, store: ObjectStore) -> None:
    a = host("a", store.config())
    with a.connect() as client:
        space = client.open(spec_of("kept"))
        keys = space.keys([1] * PROMPT * space.spec.block_tokens)
        blocks = [pattern(key, space.spec.block_bytes) for key in keys]
        space.save(keys, blocks, ttl_s=600.0)
        done = kvtier("tier", "hand-over", "remote", "--socket", a.socket)
        assert done.returncode == 2
        assert f"{PROMPT} blocks were not handed over" in done.stderr
        assert not remote_of(a.stats())["states"]["written"]
    refused = kvtier("tier", "hand-over", "warm", "--socket", a.socket)
    assert refused.returncode == 2
    assert order(a, "off")[0] == 0
    refused = kvtier("tier", "hand-over", "remote", "--socket", a.socket)
    assert refused.returncode == 2 and "cannot be written now" in refused.stderr


def test_an_order_for_a_tier_that_is_not_configured_is_refused(daemon_of: Hosts) -> None:
    daemon = daemon_of()
    done = kvtier("tier", "off", "remote", "--socket", daemon.socket)
    assert done.returncode == 2
    assert "the daemon has no remote tier" in done.stderr


@pytest.mark.parametrize("stop_s", [60, 0])
def test_a_clean_stop_writes_what_waits_within_its_limit(
    host: Hosts, tmp_path: Path, stop_s: int
) -> None:
    with FaultyStore(tmp_path) as store:
        store.waits_s = 0.3
        a = host("a", store.config + f'write = "all"\nstop_s = {stop_s}\n')
        with a.connect() as client:
            save(client.open(spec_of("last")), 1)
            a.process.send_signal(signal.SIGTERM)
            a.process.wait()
        assert (len(store.objects) == PROMPT) is (stop_s > 0)


def test_a_store_that_hangs_delays_a_stop_no_longer_than_stop_s(
    host: Hosts, tmp_path: Path
) -> None:
    with FaultyStore(tmp_path) as store:
        a = host("a", store.config + 'write = "all"\nstop_s = 1\n')
        store.waits_s = 10.0
        with a.connect() as client:
            save(client.open(spec_of("hanging")), 1)
            a.process.send_signal(signal.SIGTERM)
            a.process.wait()
        assert "not done" in a.log.read_text()
        store.waits_s = 0.0


def test_a_reload_changes_the_deadline_the_buffer_and_what_is_written(
    host: Hosts, store: ObjectStore, tmp_path: Path
) -> None:
    a = host("a", store.config(deadline_s=30))
    file = tmp_path / "a" / "kvtier.toml"
    with a.connect() as client:
        space = client.open(spec_of("reloaded"))
        share(a, space, 1)
        text = file.read_text()
        assert text.count("deadline_s = 30") == text.count('buffer = "16MiB"') == 1
        text = text.replace("deadline_s = 30", 'deadline_s = 7\nwrite = "all"\ncodec = "raw"')
        file.write_text(text.replace('buffer = "16MiB"', 'buffer = "32MiB"'))
        done = kvtier("reload", "--socket", a.socket)
        assert done.returncode == 0, done.stderr
        a.wait_for(lambda stats: remote_of(stats)["buffer_bytes"] == 32 << 20, WAIT_S)
        a.wait_for(lambda stats: remote_of(stats)["on"], WAIT_S)
        before = remote_of(a.stats())["states"]["written"]
        save(space, 2)
        a.wait_for(lambda stats: remote_of(stats)["states"]["written"] == before + PROMPT, WAIT_S)
        assert remote_of(a.stats())["restarts"] == 0
    diff = kvtier("config", "diff", "--socket", a.socket)
    assert diff.returncode == 0, diff.stdout


def test_a_daemon_that_dies_during_a_read_leaves_nothing_wrong(host: Hosts, tmp_path: Path) -> None:
    with FaultyStore(tmp_path) as store:
        a = host("a", store.config)
        with a.connect() as client:
            keys = share(a, client.open(spec_of("dies")), 1)
        b = host("b", store.config)
        with b.connect() as client:
            space = client.open(spec_of("dies"))
            space.match(keys)
            b.wait_for(lambda stats: remote_of(stats)["asking"] == 0, WAIT_S)
            store.waits_s = 1.0
            assert space.match(keys).coming == PROMPT
            b.wait_for(lambda stats: remote_of(stats)["reading"] > 0, WAIT_S)
            b.process.send_signal(signal.SIGKILL)
            b.process.wait()
        store.waits_s = 0.0
        b = host("b", store.config)
        with b.connect() as client:
            space = client.open(spec_of("dies"))
            assert wait_until_ready(space, keys) == PROMPT
            with space.load(keys) as blocks:
                for key, block in zip(keys, blocks, strict=True):
                    assert bytes(block) == pattern(key, space.spec.block_bytes)


def test_an_old_version_of_an_object_is_a_miss_or_the_equal_content(
    host: Hosts, tmp_path: Path
) -> None:
    """A store replays what it had before a block was forgotten, and before its key was removed."""
    old, new = "11" * 32, "22" * 32
    file = tmp_path / "keys"
    file.touch(0o600)
    file.write_text(f"{old}\n")
    with FaultyStore(tmp_path) as store:
        sealed = f'encryption = "aes-256-gcm"\nkey_file = "{file}"\n'
        a = host("a", store.config + sealed)
        with a.connect() as client:
            space = client.open(spec_of("replayed"))
            keys = share(a, space, 1)
            replayed = dict(store.objects)
            assert space.forget(keys) == PROMPT
            share(a, space, 1)
            fresh = dict(store.objects)
            assert fresh.keys() == replayed.keys() and fresh != replayed, "nonces differ"
        store.objects.update(replayed)
        b = host("b", store.config + sealed)
        with b.connect() as client:
            space = client.open(spec_of("replayed"))
            assert wait_until_ready(space, keys) == PROMPT
            with space.load(keys) as blocks:
                for key, block in zip(keys, blocks, strict=True):
                    assert bytes(block) == pattern(key, space.spec.block_bytes)
        file.write_text(f"{new}\n")
        c = host("c", store.config + sealed)
        with c.connect() as client:
            space = client.open(spec_of("replayed"))
            c.wait_for(
                lambda stats: bool(
                    space.match(keys).ready or remote_of(stats)["states"]["unknown_key"]
                ),
                WAIT_S,
            )
            assert space.match(keys).ready == 0
