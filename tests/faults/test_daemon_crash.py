"""A daemon is killed repeatedly at random moments under load: it never returns wrong or forgotten
blocks, blocks that it reported as written are found, and its directories stay within their size."""

from __future__ import annotations

import contextlib
import os
import pwd
import random
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvtier import Client, KvSpec, Unavailable
from kvtier.frame import PAGE, pages
from kvtier.key import Keys
from kvtier.space import Space
from support.daemons import Daemon, start_daemon
from support.effort import effort
from support.oracle import Oracle
from support.specs import spec_of

MIB = 1 << 20
CYCLES = effort(10, 30, 500)
CAP = 80 * MIB
CHAINS, CHAIN = 16, 12
PROMISED = (
    7 * MIB
)  # a tenant's newest saves: with frames and second chances half of what its segments hold
FOUND = re.compile(r"cold tier is ready: (\d+) blocks found")  # in the last directory
FOUND_BEFORE = re.compile(r"directories are not in use: (\d+) blocks found")
CODECS = ("r32", "auto", "fix4", "zstd", "raw")  # each life reads the blocks of all others
AS_ANOTHER = threading.Lock()
OTHER_UID = pwd.getpwnam("nobody").pw_uid
TENANTS = {"ours": 0, "theirs": OTHER_UID} if os.getuid() == 0 else {"ours": os.getuid()}
SPECS = (
    spec_of("crash"),  # 64 KiB
    spec_of("crash, no whole pages", layers=3, kv_heads=3, head_dim=72),
)


def config(disks: list[Path], write: str, codec: str) -> str:
    quota = 100 // len(TENANTS)
    tenants = "".join(
        f'[tenants.{name}]\nuids = [{uid}]\nquota = "{quota}%"\n' for name, uid in TENANTS.items()
    )
    folders = ", ".join(f'"{disk}"' for disk in disks)
    return (
        f'socket_mode = "0666"\n[warm]\nsize = "16MiB"\nextent = "4MiB"\n[cold]\ndirectories = [{folders}]\n'
        f'size = "{CAP}"\nsegment = "1MiB"\nwrite = "{write}"\ncodec = "{codec}"\n{tenants}'
    )


def connect(daemon: Daemon, uid: int) -> Client:
    """A client that the daemon regards as this user's."""
    with AS_ANOTHER:
        own = os.geteuid()
        os.seteuid(uid)
        try:
            return daemon.connect(timeout_s=20.0)
        finally:
            os.seteuid(own)


def used(folders: list[Path]) -> int:
    """The disk space of all files in the directories, as the file system counts it."""
    total = 0
    with AS_ANOTHER:
        for folder in folders:
            with contextlib.suppress(OSError):  # the disk may have lost power
                for place, _, names in os.walk(folder):
                    for name in names:
                        with contextlib.suppress(FileNotFoundError):
                            total += os.lstat(f"{place}/{name}").st_blocks * 512
    return total


class Watcher(threading.Thread):
    """Measures the directories continuously."""

    def __init__(self, folders: list[Path]) -> None:
        super().__init__(daemon=True)
        self._folders = folders
        self._over = threading.Event()
        self.most = 0
        self.looks = 0

    def run(self) -> None:
        while not self._over.wait(0.01):
            self.most = max(self.most, used(self._folders))
            self.looks += 1

    def stop(self) -> None:
        self._over.set()
        self.join()


@dataclass
class Place:
    """A space of a tenant, and its chains."""

    tenant: str
    space: Space
    chains: list[Keys]

    @property
    def block_bytes(self) -> int:
        return self.space.block_bytes

    def served(self, oracle: Oracle, keys: Keys) -> int:
        """The number of leading blocks that are returned from memory; the oracle checks each."""
        dead = [oracle.dead(key) for key in keys]
        with self.space.load(keys, deadline_ms=60_000) as blocks:
            for key, block, limit in zip(keys, blocks, dead, strict=False):
                assert block is not None
                oracle.judge(key, bytes(block), limit)
            return len(blocks)


def places_of(client: Client) -> list[Place]:
    def chains(space: Space, spec: KvSpec) -> list[Keys]:
        tokens = spec.block_tokens * CHAIN
        return [space.keys([number * 1000 + n for n in range(tokens)]) for number in range(CHAINS)]

    spaces = [(client.open(spec), spec) for spec in SPECS]
    return [Place(client.tenant, space, chains(space, spec)) for space, spec in spaces]


@dataclass(frozen=True, slots=True)
class Done:
    """The result for a chain: all of its `count` blocks were new, or it was forgotten."""

    own: int
    chain: int
    count: int
    nbytes: int  # of the new blocks, in both cases


class Engine(threading.Thread):
    """A client: the only one that saves and forgets in its space. It reads from all spaces of its
    tenant, until it is stopped or its daemon ends."""

    def __init__(
        self,
        client: Client,
        own: int,
        oracle: Oracle,
        done: list[Done],
        seed: int,
        stop: threading.Event,
    ) -> None:
        super().__init__(daemon=True)
        self.places = places_of(client)
        self._own = own
        self._oracle = oracle
        self._done = done
        self._chance = random.Random(seed)
        self._over = stop
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._over.is_set():
                self._step(self._chance.random())
        except Unavailable:
            pass  # the request that failed may have had its effect
        except BaseException as error:  # noqa: BLE001
            self.failure = error

    def _step(self, chance: float) -> None:
        if chance < 0.45:
            self._save()
        elif chance < 0.9:
            self._read()
        else:
            self._forget()

    def _save(self) -> None:
        place = self.places[self._own]
        number = self._chance.randrange(CHAINS)
        keys = place.chains[number][: self._chance.randint(1, CHAIN)]
        blocks = [self._oracle.saving(key, place.block_bytes) for key in keys]
        saved = place.space.save(keys, blocks, checksum=self._chance.random() < 0.5)
        whole = saved.stored if saved.stored == len(keys) else 0
        self._done.append(Done(self._own, number, whole, saved.stored * place.block_bytes))

    def _read(self) -> None:
        place = self._chance.choice(self.places)
        keys = self._chance.choice(place.chains)
        if place.space.match(keys).coming and self._chance.random() < 0.7:
            time.sleep(0.002)
        place.served(self._oracle, keys)

    def _forget(self) -> None:
        place = self.places[self._own]
        number = self._chance.randrange(CHAINS)
        keys = place.chains[number][self._chance.choice([0, CHAIN // 2]) :]
        place.space.forget(keys)
        for key in keys:
            self._oracle.forgotten(key)
        self._done.append(Done(self._own, number, 0, 0))


def brought(place: Place, keys: Keys) -> None:
    """Wait until no block of a chain is coming."""
    until = time.monotonic() + 60
    while place.space.match(keys).coming:
        assert time.monotonic() < until, "what is coming never comes"
        time.sleep(0.001)


def at_rest(stats: dict[str, Any]) -> bool:
    states = stats["tiers"]["warm"]["states"]
    held = [tenant["leases"] for tenant in stats["tenants"].values()]
    return not any([states["writing"], states["doomed"], states["quarantined"], *held])


def settle(daemon: Daemon) -> dict[str, Any]:
    """The stats when no block is leased and no movement is in progress."""
    last = None
    while True:
        stats = daemon.wait_for(at_rest)
        cold = stats["tiers"]["cold"]
        now = (cold["states"]["written"], cold["states"]["written_again"], cold["blocks"])
        under_way = cold["writing"] or cold["reading"] or cold["leaving"]
        if now == last and not under_way:
            return stats
        last = now
        time.sleep(0.25)


@dataclass
class Crashes:
    """The lives of a daemon over the same directories, and their results."""

    folder: Path
    disks: list[Path]
    oracle: Oracle = field(default_factory=Oracle)
    promised: dict[tuple[str, int, int], int] = field(default_factory=dict)  # blocks, by chain
    reported: int = 0  # blocks on disk, according to the daemon
    kept: int = 0
    on_disk: int = 0  # blocks that were found after a start
    cold_hits: int = 0
    codecs: set[str] = field(default_factory=set)  # codecs of stored blocks

    def start(self, write: str, codec: str) -> Daemon:
        log = self.folder / "daemon.log"
        before = log.stat().st_size if log.exists() else 0
        daemon = start_daemon(self.folder, config=config(self.disks, write, codec))
        until = time.monotonic() + 60
        while (found := FOUND.search(log.read_text(), before)) is None:
            assert time.monotonic() < until, log.read_text()[before:]
            time.sleep(0.005)
        earlier = FOUND_BEFORE.findall(log.read_text()[before:])
        self.on_disk += (blocks := sum(map(int, earlier), int(found[1])))
        assert blocks >= self.reported, f"{blocks} of {self.reported} blocks that were on disk"
        self.reported = 0
        return daemon

    def look(self, daemon: Daemon) -> None:
        """Verify that every block that is returned after a start is correct, and that all promised
        blocks are found."""
        for uid in TENANTS.values():
            with connect(daemon, uid) as client:
                for own, place in enumerate(places_of(client)):
                    for number, keys in enumerate(place.chains):
                        brought(place, keys)
                        served = place.served(self.oracle, keys)
                        wanted = self.promised.get((place.tenant, own, number), 0)
                        assert served >= wanted, (
                            f"{served} of {wanted} blocks that were on disk:"
                            f" {client.explain()['lookups'][:4]}"
                        )
                        self.kept += wanted
        self.promised = {}
        stats = daemon.wait_for(at_rest)
        self.cold_hits += stats["hit_tokens"]["cold"]
        consistent(stats)

    def live(self, daemon: Daemon, chance: random.Random, settled: bool) -> None:
        """Run clients until the kill; or stop them before it, and record the blocks that must be found
        afterwards."""
        stop = threading.Event()
        done: dict[str, list[Done]] = {name: [] for name in TENANTS}
        clients = [connect(daemon, uid) for uid in TENANTS.values() for _ in SPECS]
        engines = [
            Engine(client, at % len(SPECS), self.oracle, done[client.tenant], chance.getrandbits(32), stop)
            for at, client in enumerate(clients)
        ]  # fmt: skip
        for engine in engines:
            engine.start()
        time.sleep(0.02 + chance.random() * 0.25)
        if settled:
            stop.set()
            for engine in engines:
                engine.join()
            settle(daemon)
            for engine in engines[:: len(SPECS)]:
                self.promise(engine.places, done[engine.places[0].tenant])
            spaces = daemon.stats()["tiers"]["cold"]["coding"]["spaces"]
            self.codecs |= {space["codec"] for space in spaces}
            stats = settle(daemon)  # a lookup promotes the blocks that it checks
            consistent(stats)
            self.reported = stats["tiers"]["cold"]["blocks"]
        killed_at = time.monotonic()
        daemon.process.send_signal(signal.SIGKILL)
        daemon.process.wait()
        for engine in engines:
            engine.join(60)
            assert not engine.is_alive(), "a client hangs where its daemon is gone"
            if engine.failure is not None:
                raise engine.failure
        self.oracle.killed(killed_at)
        for client in clients:
            client.close()

    def promise(self, places: list[Place], done: list[Done]) -> None:
        """The chains that were saved last, are not forgotten, and are stored: blocks evicted before
        their write are not."""
        left, seen = PROMISED, set()
        for one in reversed(done):
            left -= one.nbytes
            chain = (one.own, one.chain)
            if left >= 0 and one.count and chain not in seen:
                place = places[one.own]
                found = place.space.match(place.chains[one.chain])
                here = min(one.count, found.ready + found.coming)
                self.promised[place.tenant, *chain] = here
            if one.count or not one.nbytes:
                seen.add(chain)


def consistent(stats: dict[str, Any]) -> None:
    warm, cold = stats["tiers"]["warm"], stats["tiers"]["cold"]
    assert warm["used_bytes"] == sum(each["used_bytes"] for each in stats["tenants"].values())
    assert warm["blocks"] == sum(each["blocks"] for each in stats["tenants"].values())
    assert warm["used_bytes"] <= warm["capacity_bytes"]
    smallest, largest = sorted(spec.block_bytes for spec in SPECS)
    most = pages(largest) + PAGE
    assert smallest // 2 * cold["blocks"] <= cold["used_bytes"] <= most * cold["blocks"]
    assert cold["used_bytes"] <= cold["capacity_bytes"] == CAP
    assert cold["on"] and not cold["faults"], cold


def emptied(daemon: Daemon, oracle: Oracle) -> None:
    """After all blocks are forgotten, the memory is empty, and each tenant can save as much as at the
    beginning."""
    for uid in TENANTS.values():
        with connect(daemon, uid) as client:
            for place in places_of(client):
                for keys in place.chains:
                    place.space.forget(keys)
    stats = daemon.wait_for(at_rest)
    assert not stats["tiers"]["warm"]["used_bytes"] and not stats["tiers"]["cold"]["blocks"], stats
    for name, uid in TENANTS.items():
        with connect(daemon, uid) as client:
            space = client.open(SPECS[0])
            count = stats["tenants"][name]["capacity_bytes"] // SPECS[0].block_bytes
            keys = space.keys(list(range(10**6, 10**6 + 16 * count)))
            assert space.save(keys, bytes(count * SPECS[0].block_bytes)).stored == count


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder that every user can enter, unlike tmp_path: another user connects too."""
    with tempfile.TemporaryDirectory() as path:
        Path(path).chmod(0o755)
        yield Path(path)


@pytest.fixture(scope="module")
def crashes(folder: Path) -> Iterator[Crashes]:
    disks = [folder / name for name in ("disk-0", "disk-1")]
    for disk in disks:
        disk.mkdir()
    crashes = Crashes(folder, disks)
    chance = random.Random(17)
    watcher = Watcher(disks)
    watcher.start()
    daemon = None
    try:
        for cycle in range(CYCLES):
            write = "through" if cycle % 3 else "back"
            daemon = crashes.start(write, CODECS[cycle % len(CODECS)])
            crashes.look(daemon)
            assert used(disks) <= CAP
            crashes.live(daemon, chance, settled=cycle % 2 == 1)
            assert used(disks) <= CAP
        daemon = crashes.start("through", "auto")
        crashes.look(daemon)
        emptied(daemon, crashes.oracle)
        yield crashes
    finally:
        watcher.stop()
        if daemon is not None:
            daemon.stop()
    text = (folder / "daemon.log").read_text()
    assert "Traceback" not in text, text
    assert watcher.looks > CYCLES and 0 < watcher.most <= CAP


def test_after_kills_a_daemon_returns_no_wrong_or_forgotten_block(crashes: Crashes) -> None:
    """Every returned block was checked, before and after each kill; here the test verifies that there
    were enough."""
    assert crashes.oracle.served > 100 * CYCLES
    assert crashes.on_disk > 50 * CYCLES and crashes.cold_hits > 0
    assert crashes.kept > 2 * CYCLES
    assert crashes.codecs == {"raw", "fix4", "r32", "zstd"}


def test_confirmed_forgets_persist_across_kills(crashes: Crashes) -> None:
    ages = crashes.oracle.returned
    assert not ages, f"{len(ages)} came back, the kill up to {max(ages):.3f} s after the answer"
