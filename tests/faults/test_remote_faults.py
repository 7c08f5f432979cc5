"""The remote store, its process and its contents fail in all ways: no request of a client fails, no wrong
block is returned, the log has one line, and the tier returns by itself."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.key import Keys
from kvtier.space import Space
from support.daemons import Daemon
from support.faulty_store import FaultyStore
from support.object_store import ObjectStore, remote_of
from support.specs import pattern, spec_of

PROMPT = 4  # blocks
BACK_S = 60.0  # 30 s on a quiet machine
Hosts = Callable[..., Daemon]


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
    daemon.wait_for(lambda stats: remote_of(stats)["on"] is is_on, BACK_S)


def lines(daemon: Daemon, text: str) -> list[str]:
    return [line for line in daemon.log.read_text().splitlines() if text in line]


def save(space: Space, number: int) -> Keys:
    keys = space.keys([number] * PROMPT * space.spec.block_tokens)
    space.save(keys, [pattern(key, space.spec.block_bytes) for key in keys])
    return keys


def share(daemon: Daemon, space: Space, number: int, missing: int = PROMPT) -> Keys:
    """Save a prompt, request it again, and wait until the `missing` objects are in the store."""
    before = remote_of(daemon.stats())["states"]["written"]
    keys = save(space, number)
    assert space.match(keys).ready == PROMPT
    daemon.wait_for(lambda stats: remote_of(stats)["states"]["written"] >= before + missing)
    return keys


def loaded(daemon: Daemon, space: Space, keys: Keys) -> int:
    """Load what comes; return how many blocks. Their bytes must be those saved."""
    space.match(keys)
    daemon.wait_for(lambda stats: remote_of(stats)["asking"] == 0)
    until = time.monotonic() + 30
    while space.match(keys).coming and time.monotonic() < until:
        time.sleep(0.01)
    with space.load(keys) as blocks:
        for key, block in zip(keys, blocks, strict=False):
            assert bytes(block) == pattern(key, space.spec.block_bytes)
        return len(blocks)


def flip(text: bytearray, other: bytes, chance: random.Random) -> bytes:
    text[chance.randrange(len(text))] ^= 1 << chance.randrange(8)
    return bytes(text)


LIES: dict[str, Callable[[bytearray, bytes, random.Random], bytes]] = {
    "flipped": flip,
    "truncated": lambda text, other, chance: bytes(text[: chance.randrange(1, len(text))]),
    "swapped": lambda text, other, chance: other,
    "emptied": lambda text, other, chance: b"",
    "zeroed": lambda text, other, chance: bytes(len(text)),
    "mixed": lambda text, other, chance: bytes(text[:4096]) + other[4096:],
}


def test_a_transfer_that_breaks_once_does_not_make_its_object_absent(
    host: Hosts, tmp_path: Path
) -> None:
    with FaultyStore(tmp_path) as store:
        a, b = host("a", store.config), host("b", store.config)
        with a.connect() as first, b.connect() as second:
            ours, theirs = first.open(spec_of("broken")), second.open(spec_of("broken"))
            wait_until_on(a)
            wait_until_on(b)
            keys = share(a, ours, 1)[:1]
            store.cuts_answers = True
            theirs.match(keys)
            b.wait_for(lambda stats: remote_of(stats)["asking"] == 0)
            assert theirs.match(keys).coming == 1
            b.wait_for(lambda stats: remote_of(stats)["states"]["not_read"] == 1)
            store.cuts_answers = False
            assert loaded(b, theirs, keys) == 1
            assert remote_of(b.stats())["states"]["spoilt"] == 0


def test_a_transfer_that_times_out_does_not_make_its_object_absent(
    host: Hosts, tmp_path: Path
) -> None:
    with FaultyStore(tmp_path) as store:
        slow = store.config.replace("deadline_s = 30", "deadline_s = 1")
        a, b = host("a", store.config), host("b", slow)
        with a.connect() as first, b.connect() as second:
            ours, theirs = first.open(spec_of("slow")), second.open(spec_of("slow"))
            wait_until_on(a)
            wait_until_on(b)
            keys = share(a, ours, 1)
            store.pauses_s = 2.5
            until = time.monotonic() + 30
            while remote_of(b.stats())["states"]["not_read"] < 3 * PROMPT:
                assert time.monotonic() < until, str(remote_of(b.stats()))
                theirs.match(keys)
                time.sleep(0.05)
            assert remote_of(b.stats())["states"]["spoilt"] == 0
            store.pauses_s = 0.0
            wait_until_on(b)
            began = time.monotonic()
            while theirs.match(keys).ready < PROMPT:
                assert time.monotonic() < began + 30, remote_of(b.stats())
                time.sleep(0.01)
            assert loaded(b, theirs, keys) == PROMPT


def test_objects_that_lie_are_misses_and_are_replaced(store: ObjectStore, host: Hosts) -> None:
    a, b = host("a", store.config()), host("b", store.config())
    chance = random.Random(1)
    with a.connect() as first, b.connect() as second:
        ours, theirs = first.open(spec_of("lies")), second.open(spec_of("lies"))
        wait_until_on(a)
        wait_until_on(b)
        other = share(a, ours, 99)
        for number, (name, lie) in enumerate(LIES.items()):
            keys = share(a, ours, number)
            files = store.objects()
            swapped = files[f"{other[0].hex()}-0-0"].read_bytes()
            lies = dict[str, bytes]()
            for key in keys[1:]:
                one = f"{key.hex()}-0-0"
                lies[one] = lie(bytearray(files[one].read_bytes()), swapped, chance)
                files[one].write_bytes(lies[one])
            assert loaded(b, theirs, keys) <= 1, name
            assert loaded(b, theirs, keys) == 1, name
            # Computed again, used again: the objects are replaced, those that break at their second read.
            until = time.monotonic() + BACK_S
            while any(text == files[one].read_bytes() for one, text in lies.items()):
                assert time.monotonic() < until, name
                theirs.match(save(theirs, number))
                time.sleep(0.02)
        shown = remote_of(b.stats())
        assert shown["states"]["spoilt"] + shown["states"]["not_read"] >= 1
        assert shown["on"]
        assert b.stats()["failures"].get("internal", 0) == 0


@pytest.mark.slow
def test_a_store_that_ends_or_hangs_is_off_and_returns(store: ObjectStore, host: Hosts) -> None:
    a, b = host("a", store.config()), host("b", store.config(deadline_s=2))
    with a.connect() as first, b.connect() as second:
        ours, theirs = first.open(spec_of("ends")), second.open(spec_of("ends"))
        wait_until_on(a)
        wait_until_on(b)
        prompts = [share(a, ours, number) for number in range(4)]
        for stop, start in ((store.stop, store.start), (store.pause, store.resume)):
            keys = prompts.pop()
            assert theirs.match(keys).ready == 0
            stop()
            began = time.monotonic()
            until = began + BACK_S
            tried = 100
            while remote_of(b.stats())["on"] and time.monotonic() < until:
                tried += 1
                asked = time.monotonic()
                theirs.match(theirs.keys([tried] * 64))  # questions fail
                assert time.monotonic() - asked < 5, "a match waits for the store"
                assert len(save(theirs, tried)) == PROMPT
                time.sleep(0.05)
            assert not remote_of(b.stats())["on"]
            assert theirs.match(keys).coming == 0
            with theirs.load(keys) as blocks:
                assert not len(blocks)
            start()
            wait_until_on(b)
            assert loaded(b, theirs, keys) == PROMPT
        assert len(lines(b, " is off: ")) == 2
        assert len(lines(b, "works again")) == 2
        assert "Traceback" not in b.log.read_text()


@pytest.mark.slow
def test_a_process_that_ends_or_hangs_is_replaced(store: ObjectStore, host: Hosts) -> None:
    a = host("a", store.config(deadline_s=2))
    with a.connect() as client:
        space = client.open(spec_of("process"))
        wait_until_on(a)
        for number, end in enumerate((signal.SIGKILL, signal.SIGSTOP)):
            pid = remote_of(a.stats())["pid"]
            assert isinstance(pid, int)
            os.kill(pid, end)
            save(space, number)
            space.match(space.keys([1000 + number] * 64))  # a question that gets no answer
            a.wait_for(lambda stats, pid=pid: remote_of(stats)["pid"] not in (0, pid), BACK_S)
            wait_until_on(a)
            assert not Path(f"/proc/{pid}").exists()
        share(a, space, 7)
        assert len(lines(a, "its process ended")) == 1
        assert len(lines(a, "its process hangs")) == 1
        assert remote_of(a.stats())["restarts"] == 2


@pytest.mark.parametrize(
    "wrong",
    [
        "credentials",
        pytest.param("bucket", marks=pytest.mark.slow),
        pytest.param("certificate", marks=pytest.mark.slow),
    ],
)
def test_a_store_that_refuses_is_one_line_and_off(
    store: ObjectStore, host: Hosts, wrong: str
) -> None:
    config = {
        "credentials": store.config(store.write_credentials("wrong", "no secret")),
        "bucket": store.config(bucket="missing"),
        "certificate": store.config().replace("http://", "https://"),
    }[wrong]
    text = {"credentials": "403 Forbidden", "bucket": "NoSuchBucket", "certificate": ""}[wrong]
    a = host("a", config)
    with a.connect() as client:
        space = client.open(spec_of(wrong))
        until = time.monotonic() + BACK_S
        while not lines(a, " is off: ") and time.monotonic() < until:
            keys = save(space, 1)
            assert space.match(keys).ready == PROMPT
            time.sleep(0.02)
        (line,) = lines(a, " is off: ")
        assert text in line
        epoch = remote_of(a.stats())["pid"]
        a.wait_for(lambda stats: remote_of(stats)["pid"] not in (0, epoch), BACK_S)  # tried again
        assert len(lines(a, " is off: ")) == 1
        failure = remote_of(a.stats())["failure"]
        assert isinstance(failure, str)
        if wrong == "credentials":  # the operator corrects them
            store.write_credentials("wrong", store.secret)
            wait_until_on(a)


@pytest.mark.slow
def test_a_store_that_is_slow_or_full_or_breaks_answers_is_survived(
    host: Hosts, tmp_path: Path
) -> None:
    with FaultyStore(tmp_path) as store:
        a, b = host("a", store.config), host("b", store.config)
        with a.connect() as first, b.connect() as second:
            ours, theirs = first.open(spec_of("faulty")), second.open(spec_of("faulty"))
            wait_until_on(a)
            wait_until_on(b)
            store.refuses_puts = True
            keys = save(ours, 1)
            ours.match(keys)
            a.wait_for(lambda stats: not remote_of(stats)["writable"])
            assert remote_of(a.stats())["on"], "it can still be read"
            assert len(lines(a, "cannot write")) == 1
            store.refuses_puts = False
            shared = share(b, theirs, 2)
            store.cuts_answers = True
            assert loaded(a, ours, shared) == 0
            store.cuts_answers = False
            wait_until_on(a)
            store.waits_s = 0.2  # each request
            late = share(b, theirs, 3)
            assert loaded(a, ours, late) == PROMPT
