"""Two hosts share blocks through a Mooncake Store: a real master, and memory that a third process lends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.frame import Identity
from kvtier.key import Keys
from kvtier.space import Space
from kvtier_daemon.tiers.remote.objects import object_name
from support.daemons import Daemon
from support.mooncake import MooncakePool, master_program
from support.object_store import remote_of, wait_until_ready
from support.ports import reserved_port
from support.specs import pattern, spec_of

PROMPT = 8  # blocks
WAIT_S = 60.0
Hosts = Callable[..., Daemon]


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[MooncakePool]:
    pool = MooncakePool(tmp_path)
    yield pool
    pool.stop()


@pytest.fixture
def host(tmp_path: Path, daemon_of: Hosts) -> Hosts:
    def start(name: str, config: str) -> Daemon:
        secrets = tmp_path / name / "state" / "secrets"
        secrets.mkdir(parents=True, mode=0o700)
        (secrets / "default").write_bytes(bytes(32))
        (secrets / "default").chmod(0o600)
        return daemon_of(folder=tmp_path / name, config=config)

    return start


def wait_until_on(daemon: Daemon, is_on: bool = True) -> None:
    daemon.wait_for(lambda stats: remote_of(stats)["on"] is is_on, WAIT_S)


def save(space: Space, number: int) -> Keys:
    keys = space.keys([number] * PROMPT * space.spec.block_tokens)
    space.save(keys, [pattern(key, space.spec.block_bytes) for key in keys])
    return keys


def share(daemon: Daemon, space: Space, number: int) -> Keys:
    """Save a prompt, request it again, and wait until it is in the store."""
    before = remote_of(daemon.stats())["states"]["written"]
    keys = save(space, number)
    assert space.match(keys).ready == PROMPT
    daemon.wait_for(lambda stats: remote_of(stats)["states"]["written"] >= before + PROMPT, WAIT_S)
    return keys


def loaded(space: Space, keys: Keys, blocks: int = PROMPT) -> int:
    """Load when as many blocks are there; return how many came. Their bytes must be those saved."""
    with space.load(keys[: wait_until_ready(space, keys, blocks)]) as ready:
        for key, block in zip(keys, ready, strict=False):
            assert bytes(block) == pattern(key, space.spec.block_bytes)
        return len(ready)


def test_a_host_hits_what_another_one_saved_also_after_that_one_died(
    host: Hosts, pool: MooncakePool
) -> None:
    a, b = host("a", pool.config()), host("b", pool.config())
    wait_until_on(a)
    wait_until_on(b)
    with a.connect() as client:
        space = client.open(spec_of("pooled"))
        keys, late = share(a, space, 1), share(a, space, 2)
    with b.connect() as client:
        space = client.open(spec_of("pooled"))
        assert loaded(space, keys) == PROMPT
        a.process.send_signal(signal.SIGKILL)
        a.process.wait()
        assert loaded(space, late) == PROMPT
        assert remote_of(b.stats())["states"]["read"] == 2 * PROMPT
        assert remote_of(b.stats())["store"] == f"mooncake://{pool.address}/fleet"
        assert space.forget(late) == PROMPT
    c = host("c", pool.config())
    wait_until_on(c)
    with c.connect() as client:
        space = client.open(spec_of("pooled"))
        assert loaded(space, keys) == PROMPT
        space.match(late)
        c.wait_for(lambda stats: remote_of(stats)["asking"] == 0)
        assert space.match(late).coming == 0, "it was forgotten on another host"


def test_a_master_that_is_not_there_is_one_line_and_off(host: Hosts) -> None:
    master_program()  # skips the test without Mooncake's client
    a = host("a", f'[remote]\nurl = "mooncake://127.0.0.1:{reserved_port()}"\n')
    a.wait_for(lambda stats: remote_of(stats)["failure"] == "Connection refused", WAIT_S)
    with a.connect() as client:
        space = client.open(spec_of("alone"))
        keys = save(space, 1)
        assert space.match(keys).ready == PROMPT
    a.wait_for(lambda _: a.log.read_text().count(" is off: ") == 1)


@pytest.mark.slow
def test_memory_that_a_daemon_lends_is_lost_with_it_and_only_misses_follow(
    host: Hosts, tmp_path: Path
) -> None:
    pool = MooncakePool(tmp_path, lent_bytes=0)
    try:
        a = host("a", pool.config('segment = "64MiB"\n'))
        b = host("b", pool.config(deadline_s=2))
        wait_until_on(a)
        wait_until_on(b)
        with a.connect() as client:
            space = client.open(spec_of("lent"))
            keys, late = share(a, space, 1), share(a, space, 2)
        with b.connect() as client:
            space = client.open(spec_of("lent"))
            assert loaded(space, keys) == PROMPT
            a.process.send_signal(signal.SIGKILL)
            a.process.wait()
            until = time.monotonic() + 5
            while time.monotonic() < until:
                asked = time.monotonic()
                found = space.match(late)
                assert time.monotonic() - asked < 2, "a match waits for the store"
                assert found.ready == 0
                time.sleep(0.05)
            assert len(save(space, 3)) == PROMPT
            assert space.match(keys).ready == PROMPT
    finally:
        pool.stop()


def test_a_host_that_dies_with_lent_memory_does_not_end_the_processes_of_others(
    host: Hosts, tmp_path: Path
) -> None:
    """They lend memory too: it would be lost, and then others would fail to read that."""
    pool = MooncakePool(tmp_path)
    try:
        a = host("a", pool.config())
        wait_until_on(a)
        with a.connect() as first:
            ours = first.open(spec_of("dies"))
            shared = [share(a, ours, number) for number in range(1, 5)]
        # Not before: some of these blocks would be in its memory, which stays.
        b = host("b", pool.config('segment = "64MiB"\n'))
        wait_until_on(b)
        with b.connect() as second:
            theirs = second.open(spec_of("dies"))
            pid = remote_of(b.stats())["pid"]
            for keys in shared:
                theirs.match(keys[1:2])  # asks about all of them
            b.wait_for(lambda stats: remote_of(stats)["asking"] == 0, WAIT_S)
            pool.stop_lending()
            deadline = time.monotonic() + WAIT_S
            while remote_of(b.stats())["states"]["not_read"] < 2 * PROMPT:
                assert time.monotonic() < deadline, (
                    f"reads must have failed: {remote_of(b.stats())}"
                )
                for keys in shared:
                    theirs.prefetch(keys)  # a match does not read from a store that was slow
                b.wait_for(lambda stats: remote_of(stats)["asking"] == 0, WAIT_S)
                b.wait_for(lambda stats: remote_of(stats)["reading"] == 0, WAIT_S)
            time.sleep(0.5)  # a process that was given up is replaced by now
            after = remote_of(b.stats())
            assert after["on"] and (after["pid"], after["restarts"]) == (pid, 0)
            assert theirs.match(save(theirs, 9)).ready == PROMPT
    finally:
        pool.stop()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["ends", "hangs"])
def test_a_master_that_fails_is_off_and_returns(
    host: Hosts, pool: MooncakePool, fault: str
) -> None:
    a = host("a", pool.config(deadline_s=2))
    wait_until_on(a)
    with a.connect() as client:
        space = client.open(spec_of("fails"))
        share(a, space, 1)
        stop, start = (pool.stop, pool.start) if fault == "ends" else (pool.pause, pool.resume)
        stop()
        until, tried = time.monotonic() + WAIT_S, 100
        while remote_of(a.stats())["on"] and time.monotonic() < until:
            tried += 1
            asked = time.monotonic()
            space.match(space.keys([tried] * 64))  # questions fail
            assert time.monotonic() - asked < 2, "a match waits for the store"
            assert len(save(space, tried)) == PROMPT
            time.sleep(0.05)
        wait_until_on(a, is_on=False)
        assert space.match(save(space, 999)).ready == PROMPT
        start()
        wait_until_on(a)
        share(a, space, 1000)
    assert "Traceback" not in a.log.read_text()


@pytest.mark.slow
def test_a_full_pool_drops_writes_and_can_be_read(host: Hosts, tmp_path: Path) -> None:
    pool = MooncakePool(tmp_path, lent_bytes=16 << 20)
    try:
        a, b = host("a", pool.config()), host("b", pool.config())
        wait_until_on(a)
        wait_until_on(b)
        with a.connect() as first, b.connect() as second:
            ours, theirs = first.open(spec_of("full")), second.open(spec_of("full"))
            blocks = (16 << 20) // ours.spec.block_bytes
            number = 0
            while (
                not remote_of(a.stats())["states"]["not_written"] and number < 4 * blocks / PROMPT
            ):
                number += 1
                assert ours.match(save(ours, number)).ready == PROMPT
                a.wait_for(
                    lambda stats: remote_of(stats)["queued"] + remote_of(stats)["writing"] == 0
                )
            assert remote_of(a.stats())["states"]["not_written"]
            assert remote_of(a.stats())["on"], "it can still be read"
            theirs.match(theirs.keys([number - 1] * PROMPT * theirs.spec.block_tokens))
            assert remote_of(b.stats())["on"]
    finally:
        pool.stop()


DAMAGE = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert not store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", sys.argv[1])
text = bytearray(store.get(sys.argv[2]))
assert text, "there must be such an object"
text[-1] ^= 1
assert not store.upsert(sys.argv[2], bytes(text))
"""


def test_a_damaged_object_is_a_miss_and_is_replaced(host: Hosts, pool: MooncakePool) -> None:
    a, b = host("a", pool.config()), host("b", pool.config())
    wait_until_on(a)
    wait_until_on(b)
    with a.connect() as first, b.connect() as second:
        ours, theirs = first.open(spec_of("damaged")), second.open(spec_of("damaged"))
        keys = share(a, ours, 1)
        place = Identity(ours.identity, 0, 0, bytes(keys[1]))
        name = f"fleet/{object_name(place)}"
        subprocess.run([sys.executable, "-c", DAMAGE, pool.address, name], check=True)
        assert loaded(theirs, keys, 1) >= 1
        b.wait_for(lambda stats: remote_of(stats)["states"]["spoilt"] == 1, WAIT_S)
        # Computed again on B, used again there, and so replaced in the store. Blocks after the damaged one
        # may still be on their way.
        save(theirs, 1)
        b.wait_for(lambda stats: remote_of(stats)["reading"] == 0, WAIT_S)
        before = remote_of(b.stats())["states"]["written"]
        assert theirs.match(keys).ready == PROMPT
        b.wait_for(lambda stats: remote_of(stats)["states"]["written"] > before, WAIT_S)
    c = host("c", pool.config())
    wait_until_on(c)
    with c.connect() as client:
        assert loaded(client.open(spec_of("damaged")), keys) == PROMPT
