"""The power of a disk is cut again and again under load: what comes back is never wrong and never forgotten,
what was on disk is found, and the directory stays within its size.

A seed determines the file system, the configuration, the moment of each cut (a number of writes and flushes)
and what the disk loses and tears. Threads run as they like, so a seed repeats the disk's choices and not the
whole run. POWER_SEEDS=17 or 0:100 selects seeds; a failure prints the command.
"""

from __future__ import annotations

import os
import random
import re
import select
import subprocess
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest

from faults.test_daemon_crash import (
    CAP,
    CODECS,
    FOUND,
    OTHER_UID,
    SPECS,
    Engine,
    brought,
    connect,
    places_of,
    used,
)
from kvtier import Client, Refused, Unavailable
from kvtier.frame import PAGE
from kvtier.key import Keys
from kvtier.space import Space
from kvtier.wire import CAME, DISK
from kvtier_daemon.cli import listing
from support.daemons import SERVE, Daemon, start_daemon
from support.effort import ALL, effort
from support.losses_by_twins import once_lost_soon
from support.oracle import Oracle, content
from support.power import SECTORS, PoweredDisk, image, powered
from support.specs import spec_of

TENANTS = {"ours": (0, 40), "theirs": (OTHER_UID, 30), "vault": (1, 30)}  # uid, quota
VAULT_SPECS = (spec_of("vault"), spec_of("lossy vault"))
CHAIN = 8
KEPT_CHAINS = 10  # 80 blocks; the vault's segments have room for 250
CUTS = effort(2, 5, 5)  # of each seed
LOADS_S, START_S = 1.0, 60.0
SEEDS_TO_FIND = 6
FOUND_BY = ("what was on disk is not", "was forgotten", "forgotten blocks came back", "the log has")
# No power cut may damage the index, and none may confuse the daemon.
DEFECTS = re.compile("Traceback|fail their digests|the index .* is damaged")
TORN = re.compile("segments/vault/.* tombstone pages .* are damaged")
BACKLOG_S = 0.05
FIRST = 11


def seeds() -> list[int]:
    chosen = os.environ.get("POWER_SEEDS")
    first, _, end = (chosen or f"{FIRST}:{FIRST + effort(1, 4, 50)}").partition(":")
    return list(range(int(first), int(end or int(first) + 1)))


@lru_cache(256)
def versions(key: bytes, at: int, lossy: bool) -> tuple[bytes, ...]:
    """What may be served for block `at` of a chain of the vault."""
    spec = VAULT_SPECS[lossy]
    saved = content(key, 1, spec.block_bytes)
    if not lossy:
        return (saved,)
    return saved, once_lost_soon("q8", spec, spec.block_tokens * at, saved)


Name = tuple[bool, int]  # of a chain of the vault: whether it is lossy, and its number


@dataclass
class Vault:
    """What the vault knows, over all lives."""

    number: int = 0
    on_disk: deque[Name] = field(default_factory=partial(deque, maxlen=KEPT_CHAINS))
    forgotten: deque[Name] = field(default_factory=partial(deque, maxlen=KEPT_CHAINS))

    def check(self, client: Client) -> list[str]:
        """Compare everything that the daemon returns, and return what is missing. Nothing forgotten may be
        found."""
        spaces, missing = [client.open(spec) for spec in VAULT_SPECS], []
        for lossy, number in self.forgotten:
            found = spaces[lossy].match(vault_keys(spaces[lossy], number))
            assert not found.ready + found.coming, f"chain {number} of the vault was forgotten"
        for lossy, number in self.on_disk:
            keys = vault_keys(spaces[lossy], number)
            why = _bring(spaces[lossy], keys)
            with spaces[lossy].load(keys, deadline_ms=60_000) as blocks:
                for at, (key, block) in enumerate(zip(keys, blocks, strict=False)):
                    assert bytes(block or b"") in versions(key, at, lossy), f"wrong bytes: {number}"
                if len(blocks) < CHAIN:
                    missing.append(f"{len(blocks)} of {CHAIN} of chain {number}, {why}")
        return missing


def vault_keys(space: Space, number: int) -> Keys:
    return space.keys([number * 1000 + n for n in range(CHAIN * space.spec.block_tokens)])


class Answers:
    """Counts what the daemon has confirmed; calls `reached` at the count of one kind: the worst moment for a
    promise that is not kept."""

    KINDS = ("on disk", "forgotten", "purged")

    def __init__(self, kind: str, count: int, reached: Callable[[], None]) -> None:
        self.kind = kind
        self._left = count
        self._reached = reached
        self._lock = threading.Lock()

    def came(self, kind: str) -> None:
        if kind != self.kind:
            return
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._reached()


class VaultEngine(threading.Thread):
    """The only client of a tenant whose segments always have room for its newest chains. It learns from the
    daemon's changes what is on disk."""

    def __init__(self, vault: Vault, client: Client, seed: int, answers: Answers) -> None:
        super().__init__(daemon=True)
        self._answers = answers
        self.failure: BaseException | None = None
        self._vault = vault
        self._client = client
        self._spaces = [client.open(spec) for spec in VAULT_SPECS]
        self._chance = random.Random(seed)
        self._waiting: dict[bytes, Name] = {}
        self._left: Counter[Name] = Counter()

    def run(self) -> None:
        try:
            self._tickets = {space.begin_watch(): space for space in self._spaces}
            while True:
                self._save()
                until = time.monotonic() + BACKLOG_S
                while self._waiting and time.monotonic() < until:
                    self._listen()
                if self._chance.random() < 0.2 and len(self._vault.on_disk) > KEPT_CHAINS // 2:
                    self._forget()
        except Unavailable:
            pass
        except BaseException as error:  # noqa: BLE001
            self.failure = error

    def _save(self) -> None:
        self._vault.number += 1
        lossy = self._chance.random() < 0.5
        keys = vault_keys(self._spaces[lossy], self._vault.number)
        blocks = [versions(key, at, lossy)[0] for at, key in enumerate(keys)]
        name = lossy, self._vault.number
        self._waiting |= dict.fromkeys(keys, name)  # the change may arrive before the answer
        self._left[name] = CHAIN
        if self._spaces[lossy].save(keys, blocks).stored < CHAIN:
            self._left[name] = -1
            for key in keys:
                self._waiting.pop(key, None)

    def _listen(self) -> None:
        select.select([self._client], [], [], BACKLOG_S / 5)
        for ticket, answer in self._client.poll().items():
            space = self._tickets.pop(ticket)
            assert not answer.missed and not answer.refused, answer
            for change in answer.changes:
                if (change.what, change.tier) == (CAME, DISK) and change.key in self._waiting:
                    name = self._waiting.pop(change.key)
                    self._left[name] -= 1
                    if self._left[name] == 0:
                        self._vault.on_disk.append(name)
                        self._answers.came("on disk")
            self._tickets[space.begin_watch()] = space

    def _forget(self) -> None:
        lossy, number = name = self._vault.on_disk.popleft()
        with suppress(Refused):  # it may come back
            self._spaces[lossy].forget(vault_keys(self._spaces[lossy], number))
            self._vault.forgotten.append(name)
            self._answers.came("forgotten")


def _bring(space: Space, keys: Keys) -> str:
    """Wait until the chain is in memory; return the reason if it is not on disk. A busy machine makes the
    daemon refuse reads for a while."""
    until = time.monotonic() + START_S
    while (found := space.match(keys)).coming or (found.why and found.ready < len(keys)):
        assert time.monotonic() < until, f"it does not come: {found}"
        time.sleep(0.001 if found.coming else 0.1)
    return found.why


def _is_well(cold: dict[str, Any]) -> bool:
    return bool(cold["on"] and cold["state"] == "on" and not cold["failure"])


class Busy(Engine):
    """Also saves with a TTL, and purges its space if it may."""

    purged: set[bytes]
    answers: Answers
    may_purge = False

    def _step(self, chance: float) -> None:
        purge_share = 0.2 if self.answers.kind == "purged" else 0.01
        try:
            if chance < 0.04:
                self._save_for_a_while()
            elif chance < 0.04 + purge_share and self.may_purge:
                self._purge()
                self.answers.came("purged")
            else:
                super()._step(self._chance.random())
        except Refused as error:
            if error.code != "disk_failed":  # after that nothing is promised
                raise

    def _forget(self) -> None:
        super()._forget()
        self.answers.came("forgotten")

    def _save_for_a_while(self) -> None:
        place = self.places[self._own]
        keys = ttl_keys(place.space)
        place.space.save(keys, bytes(len(keys) * place.block_bytes), ttl_s=3600)

    def _purge(self) -> None:
        place, link = self.places[self._own], self.places[self._own].space.link
        client = Client(link)
        before = {key: self._oracle.newest(key) for keys in place.chains for key in keys}
        own = place.space.identity.hex()
        for one in listing.spaces(client, place.tenant)["spaces"]:
            if one["identity"] == own:  # a space without blocks may not be listed
                list(listing.forget_space(client, place.tenant, one["space"]))
        list(listing.erase_unused(client, place.tenant))
        for key, version in before.items():
            self._oracle.forgotten(key)
            if version:
                self.purged.add(content(key, version, PAGE)[-64:])


def ttl_keys(space: Space) -> Keys:
    return space.keys(list(range(10**7, 10**7 + 2 * space.spec.block_tokens)))


class Cuts:
    """One seed: a file system, and the lives of daemons between power cuts."""

    def __init__(
        self, folder: Path, disk: PoweredDisk, seed: int, command: tuple[str, ...] = SERVE,
        env: Mapping[str, str] | None = None, engine: str = "",
    ) -> None:  # fmt: skip
        self.folder = folder
        self.disk = disk
        self.seed = seed
        self.chance = random.Random(seed)
        self.sector = self.chance.choice(SECTORS)
        self.engine = engine or self.chance.choice(("threads", "auto"))
        self.oracle = Oracle()
        self.vault = Vault()
        self.purged: set[bytes] = set()  # the last bytes of first pages of blocks
        self.counts: Counter[str] = Counter()
        self._command, self._env = command, env
        self._log = folder / "daemon.log"

    @property
    def cold(self) -> Path:
        return self.disk.path / "cold"

    def run(self, cuts: int = CUTS) -> None:
        self.cold.mkdir(mode=0o700)
        subprocess.run(["sync", "-f", self.cold], check=True)
        while len(self.disk.cuts) < cuts:
            self.life()
            self.disk.restore()
            self.check_files()
        daemon, _ = self.start()
        try:
            assert daemon is not None
            self.look(daemon)
        finally:
            if daemon is not None:
                daemon.process.kill()
                daemon.process.wait()
        ages = self.oracle.returned
        assert not ages, f"{len(ages)} forgotten blocks came back"
        self.counts["served"] = self.oracle.served

    def check_files(self) -> None:
        """Check what a cut has left before any daemon starts."""
        assert used([self.cold]) <= CAP, "the cut left more files than cold.size"
        for path in (self.cold / "segments").glob("*/*") if self.purged else ():
            text = path.read_bytes()
            pieces = {text[end - 64 : end] for end in range(PAGE, len(text) + 1, PAGE)}
            assert not pieces & self.purged, f"{path} has purged bytes"
            self.counts["files searched"] += 1

    def life(self) -> None:
        """Start a daemon, look at what it has, and cut the power: at the start, under load, right after an
        answer, or at the end."""
        chance = self.chance
        moment = chance.choices(("start", "load", "answer", "end"), (2, 4, 3, 1))[0]
        after = int(chance.choice((30, 300, 1500)) * chance.random()) + 1
        if moment == "start":
            self.disk.arm(chance.getrandbits(32), after % 60 + 1, self.sector)
        daemon, is_cut = self.start()
        try:
            if not is_cut:
                assert daemon is not None
                if moment != "start":
                    self.look(daemon)
                self.live(daemon, moment, after)
        finally:
            if daemon is not None:
                daemon.process.kill()
                daemon.process.wait()
        self.counts[moment] += 1
        self.oracle.killed(time.monotonic())

    def start(self) -> tuple[Daemon | None, bool]:
        """Start a daemon; return it, and whether the power was cut meanwhile."""
        before = self._log.stat().st_size if self._log.exists() else 0
        try:
            daemon = start_daemon(
                self.folder, config=self.config(), wait=False, command=self._command, env=self._env
            )
        except AssertionError:
            if self.disk.wait_for_cut(0):
                return None, True
            raise
        until = time.monotonic() + START_S
        while FOUND.search(self.log_from(before)) is None:
            if self.disk.wait_for_cut(0.005):
                return daemon, True
            assert time.monotonic() < until, self.log_from(before)
        daemon.wait_for_arena()  # otherwise there may be no memory to read into
        # A slow machine opens the directory after the start.
        with connect(daemon, 0) as client:
            while not _is_well(client.stats()["tiers"]["cold"]):
                if self.disk.wait_for_cut(0.005):
                    return daemon, True
                assert time.monotonic() < until, client.stats()["tiers"]["cold"]
        return daemon, False

    def log_from(self, at: int) -> str:
        return self._log.read_bytes()[at:].decode()

    def config(self) -> str:
        tenants = "".join(
            f'[tenants.{name}]\nuids = [{uid}]\nquota = "{quota}%"\n'
            for name, (uid, quota) in TENANTS.items()
        )
        return (
            'socket_mode = "0666"\n[warm]\nsize = "32MiB"\nextent = "4MiB"\n[cold]\n'
            f'directories = ["{self.cold}"]\nsize = "{CAP}"\nsegment = "1MiB"\n'
            f'write = "{self.chance.choice(("through", "through", "back"))}"\n'
            f'engine = "{self.engine}"\ncodec = "{self.chance.choice(CODECS)}"\n'
            f'codecs = ["lossy*=q8"]\n{tenants}'
        )

    def look(self, daemon: Daemon) -> None:
        """Compare every block that is returned after a start."""
        for name, (uid, _) in TENANTS.items():
            with connect(daemon, uid) as client:
                if name == "vault":
                    promised = len(self.vault.on_disk)
                    missing = self.vault.check(client)
                    torn = len(TORN.findall(self.log_from(0)))
                    self.counts["promised"] += promised
                    self.counts["segments with torn tombstones"] = torn
                    self.counts["missing"] += len(missing)
                    # A disk that tears a page of tombstones loses the blocks that it covers.
                    excused = torn and self.sector < PAGE
                    assert excused or not missing, f"what was on disk is not: {missing}"
                    continue
                for place in places_of(client):
                    ttl = place.space.match(ttl_keys(place.space))
                    assert not ttl.ready + ttl.coming, "a block with a TTL was on disk"
                    for keys in place.chains:
                        brought(place, keys)
                        place.served(self.oracle, keys)
        cold = daemon.stats()["tiers"]["cold"]
        assert cold["on"] and not cold["faults"] and not cold["failure"], cold
        assert cold["used_bytes"] <= CAP
        said = [line for line in self.log_from(0).splitlines() if DEFECTS.search(line)]
        assert not said, f"the log has {said}"

    def live(self, daemon: Daemon, moment: str, after: int) -> None:
        with ExitStack() as stack:
            clients = [
                stack.enter_context(connect(daemon, uid))
                for uid, _ in TENANTS.values()
                for _ in SPECS
            ]
            try:
                self._load(daemon, clients, moment, after)
            finally:
                daemon.process.kill()
                daemon.process.wait()

    def _load(self, daemon: Daemon, clients: list[Client], moment: str, after: int) -> None:
        chance, disk, stop = self.chance, self.disk, threading.Event()
        engines = [
            Busy(client, at % len(SPECS), self.oracle, [], chance.getrandbits(32), stop)
            for at, client in enumerate(clients[: -len(SPECS)])
        ]
        kind = chance.choice(Answers.KINDS) if moment == "answer" else ""
        answers = Answers(kind, chance.randint(1, 4 if kind == "purged" else 12), disk.cut)
        for engine in engines:
            engine.answers, engine.purged = answers, self.purged
            engine.may_purge = engine.places[0].tenant == "ours"
        drains = chance.random() < 0.3
        if moment != "start":
            disk.arm(chance.getrandbits(32), after if moment == "load" else 0, self.sector)
        threads = [*engines, VaultEngine(self.vault, clients[-1], chance.getrandbits(32), answers)]
        for thread in threads:
            thread.start()
        largest = 0
        until = time.monotonic() + LOADS_S
        while not disk.wait_for_cut(0.05) and time.monotonic() < until:
            largest = max(largest, used([self.cold]))
            if drains:
                with suppress(Unavailable, Refused):
                    clients[0].tier("warm", "drain")
                drains = False
        if moment == "end":
            disk.arm(chance.getrandbits(32), after % 60 + 1, self.sector)
            daemon.process.terminate()
            while daemon.process.poll() is None and not disk.wait_for_cut(0.005):
                pass
        # The machine stops with its disk.
        disk.cut()
        assert disk.wait_for_cut()
        daemon.process.kill()
        daemon.process.wait()
        stop.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a client hangs where its daemon is gone"
            if thread.failure is not None:
                raise thread.failure
        assert largest <= CAP
        self.counts["largest MiB"] = max(self.counts["largest MiB"], largest >> 20)


LAZY = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int is_left_out(int fd) {
    char name[64], path[4096] = {0};
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    return readlink(name, path, sizeof path - 1) > 0 && strstr(path, getenv("LAZY_AT")) != NULL;
}

#define LAZY(name) \
    int name(int fd) { \
        static int (*real)(int); \
        if (real == NULL) real = (int (*)(int))dlsym(RTLD_NEXT, #name); \
        return is_left_out(fd) ? 0 : real(fd); \
    }
LAZY(fsync)
LAZY(fdatasync)
"""


def lazy(folder: Path, at: str) -> dict[str, str]:
    """The environment of a daemon that never flushes files with this text in their paths."""
    source, library = folder / "lazy.c", folder / "lazy.so"
    source.write_text(LAZY)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return os.environ | {"LD_PRELOAD": str(library), "LAZY_AT": at}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user can enter: other users connect too."""
    with tempfile.TemporaryDirectory(prefix="kvtier-power-") as path:
        Path(path).chmod(0o755)
        yield Path(path)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    place = tmp_path_factory.mktemp("images")
    return lambda kind: image(place, kind)


@pytest.mark.parametrize("seed", seeds())
@pytest.mark.parametrize("kind", ["ext4", "xfs"] if ALL else ["ext4"])
def test_power_cuts_lose_nothing_that_was_on_disk(
    folder: Path, images: Callable[[str], Path], kind: str, seed: int
) -> None:
    with powered(folder, kind, images(kind)) as disk:
        cuts = Cuts(folder, disk, seed)
        try:
            cuts.run()
        except BaseException:
            print(f"POWER_SEEDS={seed} python -m pytest '{__file__}' -k {kind}")
            print(disk.cuts, cuts.sector, cuts.engine, cuts.log_from(0)[-6000:])
            raise
        print("power cuts:", kind, seed, cuts.sector, dict(cuts.counts), disk.cuts)


@pytest.mark.slow
@pytest.mark.parametrize("at", ["/segments/", "/index/data.mdb", "/kvtier.id"])
def test_power_cuts_find_a_flush_that_is_left_out(
    folder: Path, images: Callable[[str], Path], at: str
) -> None:
    env, found = lazy(folder, at), ""
    for seed in range(SEEDS_TO_FIND):
        place = folder / str(seed)
        place.mkdir(mode=0o755)
        with powered(place, "ext4", images("ext4")) as disk:
            try:
                Cuts(place, disk, seed, env=env, engine="threads").run()
            except AssertionError as error:
                found = str(error).partition("\n")[0]
                print(f"found by seed {seed}, cut {len(disk.cuts)}: {found[:300]}")
                break
    assert any(one in found for one in FOUND_BY), found
