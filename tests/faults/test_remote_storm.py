"""Many faults of a real store in random order: no wrong block, no failed request, no match that waits, and
the remote tier returns by itself. `REMOTE_FAULTS=500` sets how many, `REMOTE_SEED` the order.

A busy machine delays everything, so nothing is awaited for a fixed time: a wait fails if the daemons have
done nothing for `STILL_S`, or have tried to open the store more often than `ATTEMPTS` times. The longest
recovery is printed."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvtier.key import Keys
from kvtier.space import Space
from support.daemons import Daemon
from support.effort import effort
from support.object_store import ObjectStore
from support.proxy import Proxy
from support.specs import pattern, spec_of

PROMPT = 3  # blocks
FAULTS = int(os.environ.get("REMOTE_FAULTS", effort(8, 100, 500)))
STILL_S = 60.0  # the daemons try again after 15 s at most
ATTEMPTS = 10  # to open the store, until it works again
MATCH_S = 2.0  # a match that waited for the store would take longer
LOOK_S = 0.05
# A block whose transfer broke twice is asked about again after one to two minutes: here, sooner.
HASTE = {"ABSENT_S": 3.0}
MOST_LOOKS = 30
Fault = Callable[["Fleet"], Iterator[None]]


@dataclass(slots=True)
class Fleet:
    """Two hosts; A writes and B reads. `keys` is the prompt of this fault."""

    store: ObjectStore
    proxy: Proxy
    a: Daemon
    b: Daemon
    ours: Space
    theirs: Space
    chance: random.Random
    keys: Keys = field(default_factory=lambda: Keys(b""))
    other: Keys = field(default_factory=lambda: Keys(b""))
    longest_match_s: float = 0.0
    longest_back_s: float = 0.0
    most_attempts: int = 0
    blocks: Counter[str] = field(default_factory=Counter)

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait until this holds, while the daemons do something about it."""
        last, since, tried = self.progress(), time.monotonic(), set[int]()
        while not holds():
            now = self.progress()
            if now != last:
                last, since = now, time.monotonic()
            tried |= {one["pid"] for one in now} - {0}
            is_tried = len(tried) <= 2 * ATTEMPTS
            assert is_tried and time.monotonic() - since < STILL_S, f"{what}: {now}"
            self.most_attempts = max(self.most_attempts, (len(tried) + 1) // 2)
            time.sleep(LOOK_S)

    def progress(self) -> list[dict[str, Any]]:
        """What the daemons have done with the store."""
        names = ("on", "writable", "pid", "restarts", "faults", "states")
        return [{name: remote_of(one)[name] for name in names} for one in (self.a, self.b)]

    def files(self, keys: Keys) -> list[Path]:
        found = self.store.objects()
        return [found[f"{bytes(key).hex()}-0-0"] for key in keys]

    def match(self, space: Space, keys: Keys) -> int:
        """Return how many blocks are in memory; a match never waits for the store."""
        began = time.monotonic()
        ready = space.match(keys).ready
        self.longest_match_s = max(self.longest_match_s, time.monotonic() - began)
        return ready

    def load(self, space: Space, keys: Keys) -> int:
        """Load what is in memory, and compare every byte."""
        with space.load(keys[: self.match(space, keys)]) as blocks:
            for key, block in zip(keys, blocks, strict=False):
                self.blocks["compared"] += 1
                self.blocks["wrong"] += bytes(block) != pattern(key, space.spec.block_bytes)
            return len(blocks)

    def save(self, space: Space, number: int) -> Keys:
        keys = space.keys([number] * PROMPT * space.spec.block_tokens)
        space.save(keys, [pattern(key, space.spec.block_bytes) for key in keys])
        return keys

    def share(self, number: int) -> Keys:
        before = remote_of(self.a)["states"]["written"]
        keys = self.save(self.ours, number)

        def is_shared() -> bool:
            assert self.ours.match(keys).ready == PROMPT
            written: int = remote_of(self.a)["states"]["written"]
            return written >= before + PROMPT

        self.until(is_shared, "not shared")
        return keys

    def wait_until_on(self) -> None:
        began = time.monotonic()
        self.until(lambda: all(one["on"] and one["writable"] for one in self.progress()), "not on")
        self.longest_back_s = max(self.longest_back_s, time.monotonic() - began)


def remote_of(daemon: Daemon) -> dict[str, Any]:
    remote: dict[str, Any] = daemon.stats()["tiers"]["remote"]
    return remote


def server_killed(fleet: Fleet) -> Iterator[None]:
    fleet.store.stop()
    yield
    fleet.store.start()


def server_hung(fleet: Fleet) -> Iterator[None]:
    fleet.store.pause()
    yield
    fleet.store.resume()


def slow(fleet: Fleet) -> Iterator[None]:
    fleet.proxy.waits_s = 0.1
    yield
    fleet.proxy.waits_s = 0.0


def partitioned(fleet: Fleet) -> Iterator[None]:
    fleet.proxy.is_cut = True
    yield
    fleet.proxy.is_cut = False


def connections_reset(fleet: Fleet) -> Iterator[None]:
    fleet.proxy.reset()
    yield


def full(fleet: Fleet) -> Iterator[None]:
    """No file can grow."""
    before = resource.prlimit(fleet.store.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(fleet.store.pid, resource.RLIMIT_FSIZE, (0, before[1]))
    fleet.match(fleet.ours, fleet.save(fleet.ours, fleet.chance.randrange(1 << 20, 1 << 21)))
    yield
    resource.prlimit(fleet.store.pid, resource.RLIMIT_FSIZE, before)


def process_of_store(fleet: Fleet, number: signal.Signals) -> Iterator[None]:
    pid = remote_of(fleet.b)["pid"]
    if pid:
        os.kill(pid, number)
    yield


def process_killed(fleet: Fleet) -> Iterator[None]:
    yield from process_of_store(fleet, signal.SIGKILL)


def process_hung(fleet: Fleet) -> Iterator[None]:
    yield from process_of_store(fleet, signal.SIGSTOP)


def flipped(fleet: Fleet) -> Iterator[None]:
    for file in fleet.files(fleet.keys):
        text = bytearray(file.read_bytes())
        text[fleet.chance.randrange(len(text))] ^= 1 << fleet.chance.randrange(8)
        file.write_bytes(text)
    yield


def truncated(fleet: Fleet) -> Iterator[None]:
    for file in fleet.files(fleet.keys):
        text = file.read_bytes()
        file.write_bytes(text[: fleet.chance.randrange(len(text))])
    yield


def swapped(fleet: Fleet) -> Iterator[None]:
    for file, other in zip(fleet.files(fleet.keys), fleet.files(fleet.other), strict=True):
        file.write_bytes(other.read_bytes())
    yield


def replayed(fleet: Fleet) -> Iterator[None]:
    """The store has again what was forgotten."""
    files = {file: file.read_bytes() for file in fleet.files(fleet.keys)}
    fleet.ours.forget(fleet.keys)
    for file, text in files.items():
        file.write_bytes(text)
    yield


LIES = (flipped, truncated, swapped, replayed)
KINDS: tuple[Fault, ...] = (
    server_killed, server_hung, slow, partitioned, connections_reset, full, process_killed, process_hung,
    *LIES,
)  # fmt: skip


@contextmanager
def fleet_of(folder: Path, daemon_of: Callable[..., Daemon]) -> Iterator[Fleet]:
    store = ObjectStore(folder / "store")
    try:
        with Proxy(store.port) as proxy:
            config = store.config(deadline_s=1).replace(f":{store.port}", f":{proxy.port}")
            daemons = []
            for name in "ab":
                secrets = folder / name / "state" / "secrets"
                secrets.mkdir(parents=True, mode=0o700)
                (secrets / "default").write_bytes(bytes(32))
                (secrets / "default").chmod(0o600)
                daemons.append(daemon_of(folder=folder / name, config=config, haste=HASTE))
            a, b = daemons
            with a.connect() as first, b.connect() as second:
                fleet = Fleet(
                    store, proxy, a, b, first.open(spec_of("storm")), second.open(spec_of("storm")),
                    random.Random(int(os.environ.get("REMOTE_SEED", "1"))),
                )  # fmt: skip
                fleet.wait_until_on()
                yield fleet
    finally:
        store.stop()


@pytest.mark.slow
def test_many_faults_in_a_row_cause_misses_only(
    tmp_path: Path, daemon_of: Callable[..., Daemon]
) -> None:
    storm(tmp_path, daemon_of, FAULTS)


def test_a_few_faults_in_a_row_cause_misses_only(
    tmp_path: Path, daemon_of: Callable[..., Daemon]
) -> None:
    storm(tmp_path, daemon_of, 3, (server_killed, process_killed, flipped))


def storm(
    folder: Path, daemon_of: Callable[..., Daemon], faults: int, kinds: tuple[Fault, ...] = KINDS
) -> None:
    done: Counter[str] = Counter()
    with fleet_of(folder, daemon_of) as fleet:
        fleet.other = fleet.share(0)
        # Each kind as often as the others.
        order = [kinds[number % len(kinds)] for number in range(faults)]
        fleet.chance.shuffle(order)
        for number, fault in enumerate(order, 1):
            fleet.keys = fleet.share(number)
            fleet.other = fleet.other if fault is not swapped else fleet.share(faults + number)
            running = fault(fleet)
            next(running)
            done[fault.__name__] += 1
            for look in range(fleet.chance.randrange(1, MOST_LOOKS)):
                fleet.load(fleet.theirs, fleet.keys)
                tried = fleet.theirs.keys([(1 << 22) + number * MOST_LOOKS + look] * 64)
                fleet.match(fleet.theirs, tried)  # a question to the store
                time.sleep(0.02)
            own = fleet.save(fleet.theirs, (1 << 24) + number)
            assert fleet.load(fleet.theirs, own) == PROMPT, "a save needs no store"
            assert next(running, None) is None
            fleet.wait_until_on()
            if fault not in LIES:
                fleet.until(
                    lambda: fleet.load(fleet.theirs, fleet.keys) == PROMPT,
                    f"fault {number}, {fault.__name__}, is not over",
                )
            fleet.load(fleet.theirs, fleet.keys)
        for daemon in (fleet.a, fleet.b):
            failures = daemon.stats()["failures"]
            assert not any(failures.values()), failures
            assert "Traceback" not in daemon.log.read_text()
        print(
            f"{sum(done.values())} faults {dict(done)}: {fleet.blocks['compared']} blocks compared, "
            f"{fleet.blocks['wrong']} wrong; longest match {fleet.longest_match_s * 1e3:.1f} ms; back after "
            f"{fleet.longest_back_s:.1f} s at most, with {fleet.most_attempts} attempts to open the store"
        )
    assert not fleet.blocks["wrong"]
    assert fleet.blocks["compared"]
    assert fleet.longest_match_s < MATCH_S
