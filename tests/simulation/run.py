"""One simulation: a plan is carried out, the machine heals, and everything is checked."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import os
import random
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from . import virtual  # first: it replaces the clocks
from .loop import NumberedTask
from .machine import MACHINE, Machine, ViolationError
from .oracle import Oracle
from .plan import (
    KEYS,
    OF_DISKS,
    OF_MACHINES,
    OF_OPERATORS,
    SPECS,
    Operation,
    config_of,
    plan_of,
)

# isort: split
from kvtier import wire
from kvtier_daemon.catalog.blocks import ID_BYTES
from kvtier_daemon.catalog.leases import NOBODY
from kvtier_daemon.tenant import Tenant

from .clients import Client, Link
from .daemon import FIRST_UID, Daemon
from .direct import DirectRead
from .virtual import CLOCK

OPERATOR_PID = 4000
SETTLE_S = 30.0
START_S = 60.0
SWEEP_S = 60.0
FOLDERS = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())


@dataclass
class Outcome:
    seed: int
    failure: str = ""
    trace: str = ""
    steps: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Stored:
    """How many blocks of a tenant are on disk, and in memory or on disk, and when some of them expire: those
    are only in memory."""

    framed: int
    known: int
    expires: tuple[float, ...]


class Simulation:
    def __init__(
        self, seed: int, plan: Sequence[Operation], folder: Path, base_fds: set[int], keeps_lines: bool,
        is_traced: bool,
    ) -> None:  # fmt: skip
        self.seed = seed
        config = config_of(seed)
        virtual.reset(seed, config.tick_s)
        NumberedTask.numbers = itertools.count(1)
        self.base_fds = base_fds
        self.machine = machine = Machine(seed, config, folder, is_traced or keeps_lines)
        machine.lines = [] if keeps_lines else None
        machine.counts = self.counts = Counter()
        machine.client_fds = set()
        for at in range(config.directories):
            (folder / f"disk{at}").mkdir(mode=0o700)
        self.plan = plan
        self.oracle = Oracle(machine)
        self.daemon: Daemon | None = None
        self.runs = 0
        self.is_finishing = False
        machine.clients = self.clients = [
            Client(machine, self.oracle, f"client {at}", at % config.tenants, FIRST_UID + at % config.tenants,
                   self.current)
            for at in range(config.clients)
        ]  # fmt: skip
        self.operator = Client(machine, self.oracle, "operator", -1, 0, self.current)

    def current(self) -> Daemon | None:
        return self.daemon

    # --- the daemon --------------------------------------------------------------------------

    def start(self) -> None:
        self.runs += 1
        self.daemon = Daemon(self.machine, self.runs)
        self.oracle.end_reads()

    def wait_serving(self) -> None:
        """Wait until the daemon serves, its tiers are on, and it knows all blocks."""
        machine, until = self.machine, CLOCK.now + START_S
        machine.run(CLOCK.now + 0.1)
        while not (self.daemon and self.daemon.is_serving and self._is_recovered()):
            link = self.operator.connected()
            if link is not None and machine.config.directories:
                link.ask(wire.Tier(0, "cold", "on"), lambda _: None)
                link.ask(wire.Tier(0, "warm", "on"), lambda _: None)
            if until - START_S / 2 < CLOCK.now < until and self._needs_restart():
                self.restart("stop", random.Random(0))
            if CLOCK.now > until:
                machine.violate(f"the daemon does not serve all blocks after {START_S:.0f} s")
            machine.run(CLOCK.now + 0.5)

    def _needs_restart(self) -> bool:
        """Whether a disk has hung while the tier was switched off: then only a restart helps."""
        switching = (
            self.daemon.app.lower._switching if self.daemon and self.daemon.is_serving else None
        )
        return switching is not None and switching._hangs and switching.state("cold") == "off"

    def _is_recovered(self) -> bool:
        app = self.daemon.app
        states = {app.lower.state(tier) for tier in ("warm", "cold")}
        return states == {"on"} and all(
            one.tier.recovery.is_complete for one in app.tenants.values()
        )

    def restart(self, how: str, chance: random.Random) -> None:
        machine, daemon = self.machine, self.daemon
        if daemon is None or (daemon.app._server is None and how == "stop"):
            return
        self.oracle.restarted()
        if how == "stop":
            # A scan that the stop interrupts leaves a file open, until the process ends.
            is_recovered = daemon.is_serving and self._is_recovered()
            daemon.stop()
            daemon.wait_stopped()
            self._check_descriptors(leaks=is_recovered and not machine.has_left)
        else:
            daemon.kill()
            self._check_descriptors(leaks=False)
        if how == "power":
            for client in self.clients:
                client.die()
            machine.disk.cut_power(machine.folder)
            for fd in machine.kept.values():
                os.close(fd)
            machine.kept.clear()
        self.daemon = None
        machine.run(CLOCK.now + chance.choice((0.0, 0.01, 2.0)))
        self.start()

    def _check_descriptors(self, leaks: bool) -> None:
        """All descriptors of the daemon are closed; those of one that was killed are closed here."""
        machine = self.machine
        known = self.base_fds | machine.client_fds | set(machine.kept.values())
        known |= {process.pidfd for process in machine.processes.values()}
        for client in (*self.clients, self.operator):
            for link in [client.link] if client.link else []:
                known |= set(link._fds)
        left = _open_of(_descriptors() - known)
        if leaks and left:
            names = [os.readlink(f"/proc/self/fd/{fd}") for fd in sorted(left)]
            machine.violate(f"the daemon left {len(left)} descriptors open: {names[:8]}")
        for fd in left:
            os.close(fd)

    # --- the plan ----------------------------------------------------------------------------

    def carry_out(self) -> None:
        machine = self.machine
        self.start()
        began = CLOCK.now
        for one in self.plan:
            machine.run(max(CLOCK.now, began + one.at))
            machine.trace("operation", one.kind, one.number)
            self.act(one.kind, random.Random(one.number))
            self.check_holders()
            for client in self.clients:
                if client.link is not None:
                    client.link.check_progress()

    def act(self, kind: str, chance: random.Random) -> None:
        machine = self.machine
        self.counts[kind] += 1
        if kind in OF_MACHINES:
            self.restart(kind, chance)
            if machine.config.has_faults and chance.random() < 0.15:
                self.counts["fail"] += 1
                machine.disk.fails = {"read": chance.choice((0.1, 0.5))}  # during the scan
                machine.after(0.2, self._heal, "fail")
            if machine.config.has_direct_reads and chance.random() < 0.5:
                # Few blocks are in memory now.
                machine.after(chance.choice((0.1, 0.5)), self._read_soon, chance.getrandbits(32))
        elif kind in OF_DISKS:
            self.harm(kind, chance)
        elif kind in OF_OPERATORS:
            self.operate(kind, chance)
        else:
            chance.choice(self.clients).act(kind, chance)
        machine.trace("done")

    def _read_soon(self, number: int) -> None:
        if not self.is_finishing:
            chance = random.Random(number)
            chance.choice(self.clients).act("direct", chance)

    def harm(self, kind: str, chance: random.Random) -> None:
        """Give the disk a fault for some time."""
        disk, machine = self.machine.disk, self.machine
        lasts = chance.choice((0.05, 0.5, 1.0, 3.0))
        if kind == "slow":
            disk.slow_s = chance.choice((0.005, 0.05, 0.5))
        elif kind == "hang":
            disk.hangs_until = CLOCK.now + chance.choice((0.2, 2.0, 8.0))
            return
        elif kind == "rot":
            disk.rot(machine.folder, chance)
            return
        else:
            kinds = chance.choice(
                (("read",), ("read",), ("write",), ("sync",), ("index",), ("write", "sync", "read"))
            )
            disk.fails = dict.fromkeys(kinds, chance.choice((0.1, 0.5, 1.0)))
            disk.code = chance.choice((errno.EIO, errno.EIO, errno.ENOSPC))
        machine.after(lasts, self._heal, kind)

    def _heal(self, kind: str) -> None:
        disk = self.machine.disk
        if kind == "slow":
            disk.slow_s = 0.0005
        else:
            disk.fails = {}

    def operate(self, kind: str, chance: random.Random) -> None:
        link = self.operator.connected()
        if link is None:
            return
        if kind == "tier":
            tier, order = chance.choice(
                (("cold", "off"), ("cold", "off"), ("cold", "drain"), ("cold", "on"), ("cold", "on"),
                 ("warm", "drain"), ("warm", "on"), ("warm", "status"))
            )  # fmt: skip
            link.ask(wire.Tier(0, tier, order), lambda _: None)
        else:
            config = self.machine.config
            change = {
                "write": chance.choice(("back", "through")),
                "codec": chance.choice(("raw", "auto", "zstd")),
                # A tenant that a user leaves gets other memory.
                "has_guests": chance.random() < 0.5,
            }
            self.machine.config = replace(config, **change)
            if not change["has_guests"]:
                # Pinned blocks leave retired memory too. Until a restart, no pin is checked.
                for tenant in range(config.tenants):
                    self.oracle.unpins(tenant)
            link.ask(wire.Settings(0, "reload"), lambda _: None)

    def check_holders(self) -> None:
        """What is held for a session is held for one that is there."""
        if self.daemon is None or not self.daemon.is_serving:
            return
        app = self.daemon.app
        sessions = {NOBODY, *(one.id for one in app._server.sessions)}
        for name, tenant in app.tenants.items():
            reading = tenant.catalog.reading
            ending = {session for session, _ in reading._left}  # in portions
            holders = {session for lease in reading._of.values() for session in lease.holders}
            holders |= {session for session, _ in tenant.catalog.holds.of}
            if gone := holders - sessions - ending:
                self.machine.violate(f"blocks of tenant {name} are held for ended sessions {gone}")

    # --- the end -----------------------------------------------------------------------------

    def finish(self) -> None:
        """Heal the machine, let everything end, check that nothing is left, and load everything."""
        machine, self.is_finishing = self.machine, True
        machine.disk.heal()
        self.wait_serving()
        for client in (*self.clients, self.operator):
            for link in (client.link,):
                if link is not None:
                    link.stalled_until = 0.0
                    machine.run(CLOCK.now + 0.1)
            client.die()
        self.settle()
        self.sweep()
        chance = random.Random(f"end {self.seed}")
        self.save_and_forget(chance)
        self.settle()
        before, how = self.stored(), chance.choice(("stop", "stop", "kill", "power"))
        keeps_memory = how != "power" and self.keeps_memory()
        tenants, reused = self.daemon.app.tenants, self.reused(self.daemon.app.tenants)
        self.restart(how, chance)
        reused = self.reused(tenants) - reused
        self.wait_serving()
        self.check_kept(before, how, keeps_memory, reused + self.reused(self.daemon.app.tenants))
        if machine.config.has_direct_reads and chance.random() < 0.5:
            self.read_directly(chance)
        self.sweep()
        self.operator.die()  # it may have connected to switch the tiers on
        self.settle()
        assert self.daemon is not None
        self.daemon.stop()
        self.daemon.wait_stopped()
        self._check_descriptors(leaks=not machine.has_left)
        machine.run(CLOCK.now)

    def save_and_forget(self, chance: random.Random) -> None:
        """Save some blocks, let the disk write them, and forget some: a restart must keep both promises."""
        machine = self.machine
        client = Client(machine, self.oracle, "last", 0, FIRST_UID, self.current)
        link, operator = client.connected(), self.operator.connected()
        assert link is not None and operator is not None
        for space in machine.config.spaces:
            client._open(link, space, lambda: None)
        machine.run(CLOCK.now + 0.02)
        for _ in range(3):
            client._save(link, chance.choice(machine.config.spaces), chance)
        machine.run(CLOCK.now + 0.5)
        if machine.config.directories:
            operator.ask(wire.Tier(0, "warm", "drain"), lambda _: None)
            machine.run(CLOCK.now + 0.5)
        for _ in range(chance.randrange(4)):
            client._forget(link, chance.choice(machine.config.spaces), chance)
        machine.run(CLOCK.now + 0.5)
        if machine.config.directories:
            operator.ask(wire.Tier(0, "warm", "on"), lambda _: None)
        machine.run(CLOCK.now + 0.1)
        client.die()
        self.operator.die()

    def read_directly(self, chance: random.Random) -> None:
        """Read all blocks on disk without the daemon, while some of them are forgotten."""
        machine = self.machine
        client = Client(machine, self.oracle, "direct", 0, FIRST_UID, self.current)
        link = client.connected()
        assert link is not None
        for space in machine.config.spaces:
            client._open(link, space, lambda: None)
        machine.run(CLOCK.now + 0.02)
        for space in machine.config.spaces:
            for chain in KEYS[space][: machine.config.chains]:
                DirectRead(link, space, chain, chance).begin()
            if chance.random() < 0.5:
                delay = chance.choice((0.0, 0.001, 0.02, 0.3))
                machine.after(delay, client._do, link, "forget", space, chance)
        machine.run(CLOCK.now + 0.5)
        if chance.random() < 0.5:
            link.close("bye")
        client.die()

    def settle(self) -> None:
        """Wait until nothing is held any longer, but not longer than that may take."""
        until = CLOCK.now + SETTLE_S
        self.machine.run(CLOCK.now + 0.1)
        while left := self.held():
            if CLOCK.now >= until:
                self.machine.violate(f"left {SETTLE_S:.0f} s after the last client: {left}")
            self.machine.run(CLOCK.now + 1.0)

    def held(self) -> dict[str, Any]:
        """What is held or moves. No client is connected."""
        daemon = self.daemon
        assert daemon is not None
        app = daemon.app
        server = app._server
        found: dict[str, Any] = {
            "sessions": len(server.sessions), "ghosts": len(server.ghosts),
            "answering": len(server.answering), "internal": server.failures["internal"],
        }  # fmt: skip
        for name, tenant in app.tenants.items():
            catalog = tenant.catalog
            residency = catalog.blocks.residency
            counts = catalog.counts()
            # Those of session 0 may be written to by a disk that hung when a daemon was killed.
            held = catalog._writing._quarantined
            counts["blocks"]["quarantined"] -= len(held.get(0, b"")) // ID_BYTES
            found |= {
                f"{name} direct reads": len(getattr(tenant.tier.direct, "_leases", ())),
                f"{name} blocks of engines": residency._held + len(residency._leave_first),
                f"{name} blocks away": len(residency._away) + len(residency._returning),
                f"{name} leases": len(catalog.leases) - len(catalog.pins._living()),
                f"{name} holds": len(catalog.holds),
                f"{name} write leases": len(catalog._writing.of),
                f"{name} quarantined": len(held.keys() - {0}),
                f"{name} reading": catalog.promotions.reading,
                f"{name} writing": catalog.demotions.writing if self.writes_end(name) else 0,
                f"{name} ready without the policy": self.unordered(
                    tenant, counts["blocks"]["ready"]
                ),
                f"{name} unsent": server.share_of(tenant).unsent_bytes,
                f"{name} receiving": server.share_of(tenant).receiving_bytes,
            }
            states = {
                state: count
                for state, count in counts["blocks"].items()
                if state.lower() not in ("ready", "free", "absent", "cold")
            }
            found |= {f"{name} blocks {state}": count for state, count in states.items()}
        if self.machine.config.directories and app.lower.tier is not None:
            found["reads of segments"] = sum(one.reading for one in app.lower.tier.table.segments)
        return {what: count for what, count in found.items() if count}

    def unordered(self, tenant: Tenant, ready: int) -> int:
        """How many more blocks are in memory (`ready`) than the policy may evict, or fewer. Pinned ones may
        not be, nor those that are being written."""
        catalog = tenant.catalog
        if catalog.pins._living() or catalog.demotions.writing:
            return 0
        catalog.blocks.policy.settle()
        return ready - len(catalog.blocks.policy)

    def writes_end(self, tenant: str) -> bool:
        """Whether all blocks of this tenant that are only in memory get written. Not if a start could not
        read files, which take their room: with fewer than three segments, the daemon tries to write again and
        again, and where a part of memory that it keeps on disk is larger than the disk, it writes in turn."""
        if not self.machine.config.directories:
            return True
        attached = self.daemon.app.lower.tier.directories.attached
        return not any(one.stores[tenant].files.unreadable for one in attached)

    def stored(self) -> dict[str, Stored]:
        """What each tenant has in memory and on disk."""
        assert self.daemon is not None
        found = {}
        for name, tenant in self.daemon.app.tenants.items():
            counts = tenant.catalog.counts()
            known = counts["blocks"]["ready"] + sum(counts["below"])
            expires = tuple(tenant.catalog.blocks.expiring.time_of.values())
            found[name] = Stored(counts["framed_blocks"], known, expires)
        return found

    def keeps_memory(self) -> bool:
        """Whether another daemon takes all memory over: nobody has left its users, or would by a reload that
        this daemon did not get."""
        app, how = self.daemon.app, self.machine.config
        tenants = app.tenants.values()
        retired = any(
            one.is_retired and not one.is_empty for each in tenants for one in each.extents
        )
        has_guests = any(len(one.uids) > 1 for one in app.config.tenants.values())
        return bool(how.keep_s) and not retired and has_guests == how.has_guests

    def reused(self, tenants: dict[str, Any]) -> Counter[str]:
        """How many blocks these tenants lost because their segments were reused, also by last writes."""
        return Counter({name: one.catalog.blocks.evicted["lost"] for name, one in tenants.items()})

    def check_kept(
        self, before: dict[str, Stored], how: str, keeps_memory: bool, reused: Counter[str]
    ) -> None:
        """A restart of an idle daemon lost no block that was on disk, or in memory that is kept, except in
        segments that were reused. Blocks may expire while a hung disk delays the stop."""
        machine, after = self.machine, self.stored()
        # Frames after one that was not written, or was damaged, may not be found.
        if self.counts["rot"] or self.counts["fail"]:
            return
        for name, had in before.items():
            expired = sum(at <= CLOCK.now for at in had.expires)
            expected = had.known - expired if keeps_memory else had.framed
            if after[name].known + reused[name] < expected:
                machine.violate(
                    f"{how}: tenant {name} had {expected} blocks, found {after[name].known}"
                )

    def sweep(self) -> None:
        """Load all blocks of all tenants: each is one that may be loaded, and each load ends."""
        machine = self.machine
        until = CLOCK.now + SWEEP_S
        waiting = 0
        sweepers = []
        for tenant in range(machine.config.tenants):
            client = Client(
                machine, self.oracle, f"sweep {tenant}", tenant, FIRST_UID + tenant, self.current
            )
            sweepers.append(client)
            link = client.connected()
            assert link is not None
            for space in machine.config.spaces:
                client._open(link, space, lambda link=link, space=space, client=client: None)
        machine.run(CLOCK.now + 0.05)
        for client in sweepers:
            link = client.link
            assert link is not None
            for space in machine.config.spaces:
                for chain in range(machine.config.chains):
                    waiting += 1
                    _Swept(client, link, space, chain, until).ask()
        for client in sweepers:
            link = client.link
            while link.asked or link.reading:
                if not machine.step(until):
                    machine.violate(
                        f"loads did not end in {SWEEP_S:.0f} s: {list(link.asked.values())[:2]}"
                    )
        for client in sweepers:
            client.link.close("bye")


class _Unused:
    """The chance of a load of which nothing was used."""

    @staticmethod
    def random() -> float:
        return 0.9


UNUSED: Any = _Unused()


class _Swept:
    """Loads one chain until nothing more is coming."""

    def __init__(self, client: Client, link: Link, space: int, chain: int, until: float) -> None:
        self.client, self.link, self.space = client, link, space
        self.keys = KEYS[space][chain]
        self.until = until
        client.requests += 1
        self.request = client.requests
        self.shards = list(range(SPECS[space].cache_groups[0].shards))

    def ask(self) -> None:
        self.asked_at = CLOCK.now
        load = wire.Load(
            0, self.link.spaces[self.space], b"".join(self.keys), 30_000, self.shards, self.request, 20_000,
            0, 500,
        )  # fmt: skip
        self.link.ask(load, self.loaded)

    def loaded(self, reply: wire.Loaded) -> None:
        client = self.client
        reading = client._loaded(
            self.link, self.space, self.keys, 0, 30_000, self.shards, self.asked_at, reply, "sweep"
        )
        client.machine.count("swept", reply.ready)
        if reading is not None:
            client._release_reading(self.link, reading, UNUSED)
        if reply.coming and CLOCK.now < self.until:
            client.machine.after(0.05, self.ask)
        elif reply.coming:
            client.machine.violate(f"blocks are coming and never come: {reply}")


def _descriptors() -> set[int]:
    """The descriptors of this process, and that of the list itself, which is closed."""
    return set(map(int, os.listdir("/proc/self/fd")))


def _open_of(fds: set[int]) -> set[int]:
    return {fd for fd in fds if _is_open(fd)}


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def simulate(
    seed: int, plan: Sequence[Operation] | None = None, keeps_lines: bool = False,
    is_traced: bool = False,
) -> Outcome:  # fmt: skip
    """Carry out the plan of this seed, or another one; return what happened. Without `is_traced`, the digest
    of the trace is that of nothing."""
    plan = plan_of(seed) if plan is None else plan
    outcome = Outcome(seed)
    folder = Path(tempfile.mkdtemp(prefix="kvtier-simulation-", dir=FOLDERS))
    simulation = None
    gc.disable()
    before = _open_of(_descriptors())
    try:
        simulation = Simulation(seed, plan, folder, before, keeps_lines, is_traced)
        try:
            simulation.carry_out()
            simulation.finish()
        except ViolationError as error:
            outcome.failure = str(error)
        except Exception:  # noqa: BLE001  # a bug of the simulation, or of the daemon
            outcome.failure = "the simulation failed:\n" + traceback.format_exc()
        machine = simulation.machine
        if machine.violations:
            outcome.failure = machine.violations[0]
        outcome.trace, outcome.steps = machine.hash.hexdigest(), machine.steps
        outcome.counts, outcome.lines = simulation.counts, machine.lines or []
        _discard(simulation)
        simulation = machine = MACHINE.now = None
        gc.collect()
    finally:
        for fd in _descriptors() - before:
            with contextlib.suppress(OSError):
                os.close(fd)
        shutil.rmtree(folder, ignore_errors=True)
        gc.enable()
    return outcome


def _discard(simulation: Simulation) -> None:
    """Close what is left of a simulation that failed."""
    machine = simulation.machine
    for client in (*simulation.clients, simulation.operator):
        if client.link is not None:
            client.link.sock.close()
    if simulation.daemon is not None and simulation.daemon.is_up:
        with contextlib.suppress(Exception):
            simulation.daemon.kill()
    for process in machine.processes.values():
        os.close(process.pidfd)
    for fd in machine.kept.values():
        os.close(fd)
    sys.stdout.flush()
