"""Writes that keep up with saves, and a stop that loses nothing, through a real daemon.

Bursts: prefixes are saved in requests of an eighth to a half of the memory, at 0.8 of the rate at which the
same daemon writes to this disk. That rate is measured before each half minute of bursts, while unwritten
blocks always wait. Blocks that are evicted before they are written are counted. Then the daemon is killed,
and another one is asked for each of the last prefixes: one whose first block is not found is broken.
Stops: SIGTERM with blocks that are only in memory, relative to plain O_DIRECT writes of as many bytes to the
same disk, in turn.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import harness
from bench_cold import ColdDaemon, fresh_keys, noise_of, spec_of
from disks import MIB, beside, recycled
from disks import Arm as Runs
from harness import Row, at_least, at_most, percentile
from kvtier import Client
from kvtier.key import KEY_BYTES, Keys

BLOCK = MIB
PLAIN_BYTES = 8 * MIB  # per write
SHARE = 0.8
KEPT = 0.99
DRAIN_S, WINDOW_S = 5.0, 30.0
TICK_S = 0.002
ASKED_KEYS = 1024
BROKEN = 0.01
STOP = 1.3


def evicted_unwritten(client: Client) -> int:
    """How many blocks were evicted before they were on disk, for whatever reason."""
    return int(sum(client.stats()["tiers"]["cold"]["unwritten"].values()))


def on_disk(client: Client, prefixes: list[Keys]) -> list[list[bool]]:
    """Whether each block of these prefixes is on disk."""
    names = b"".join(prefix.packed for prefix in prefixes)
    found: list[bool] = []
    for at in range(0, len(names), ASKED_KEYS * KEY_BYTES):
        answers = client.explain(keys=names[at : at + ASKED_KEYS * KEY_BYTES])["keys"]
        found += [answer["why"] == "on_disk" for answer in answers]
    rest = iter(found)
    return [list(itertools.islice(rest, len(prefix))) for prefix in prefixes]


def recovered(folder: Path, warm: int, cold: int, prefixes: list[Keys]) -> list[list[bool]]:
    with ColdDaemon(folder, warm, cold) as daemon:
        while daemon.client.stats()["tiers"]["cold"]["state"] != "on":
            time.sleep(0.01)
        daemon.client.open(spec_of(BLOCK))
        return on_disk(daemon.client, prefixes)


# --- bursts -------------------------------------------------------------------------------------


class Bursts:
    """Saves to one daemon, at 0.8 of the rate at which it writes."""

    def __init__(self, daemon: ColdDaemon, warm: int) -> None:
        self.prefixes: list[Keys] = []
        self.save_s: list[float] = []
        self.seconds = self.intended_s = 0.0
        self.late: list[int] = []  # of each half minute
        self._daemon = daemon
        self._space = daemon.client.open(spec_of(BLOCK))
        self._most = warm // 2 // BLOCK
        self._sources = noise_of(self._most * BLOCK)
        self._chance = random.Random(0)

    def save(self, blocks: int) -> None:
        keys = fresh_keys(self._space, blocks)
        stored = self._space.save(keys, self._sources[: blocks * BLOCK]).stored
        assert stored == blocks, f"{stored} of {blocks} blocks were saved"
        self.prefixes.append(keys)

    def drain_bytes_s(self, seconds: float, first_bytes: int = 0) -> float:
        """Measure at which rate the daemon writes, after these many bytes. About half of the memory waits
        to be written."""
        blocks = self._most // 2
        first = written = self._daemon.states()["written"]
        saved, before, began = 0, 0, 0.0
        while not began or time.perf_counter() < began + seconds:
            written = self._daemon.states()["written"] - first
            if not began and written * BLOCK >= first_bytes:
                began, before = time.perf_counter(), written
            if saved - written > 2 * blocks:
                time.sleep(TICK_S)
            else:
                self.save(blocks)
                saved += blocks
        rate = (written - before) * BLOCK / (time.perf_counter() - began)
        self._daemon.wait_for_written(first + saved)
        return rate

    def run(self, seconds: float, bytes_s: float) -> None:
        """Save for this time at this rate."""
        before = evicted_unwritten(self._daemon.client)
        began = due = time.monotonic()
        while due < began + seconds:
            time.sleep(max(0.0, due - time.monotonic()))
            started = time.monotonic()
            self.save(blocks := self._most * self._chance.randint(1, 4) // 4)
            self.save_s.append(time.monotonic() - started)
            due += blocks * BLOCK / bytes_s
        self.seconds += max(time.monotonic(), due) - began
        self.intended_s += due - began
        self.late.append(evicted_unwritten(self._daemon.client) - before)


def bursts(folder: Path, warm: int, cold: int, seconds: float) -> list[Row]:
    with ColdDaemon(folder, warm, cold) as daemon:
        daemon.wait_for_arena()
        saves = Bursts(daemon, warm)
        drains = [saves.drain_bytes_s(DRAIN_S, cold)]  # all segments are used again
        while saves.intended_s < seconds:
            saves.run(min(WINDOW_S, seconds), SHARE * drains[-1])
            if saves.intended_s < seconds:
                drains.append(saves.drain_bytes_s(DRAIN_S))
        daemon.kill()
    # Those that have room on disk, and had time to get there before the kill.
    kept, room = [], int(0.75 * cold) // BLOCK
    for keys in reversed(saves.prefixes[:-2]):
        room -= len(keys)
        if room < 0:
            break
        kept.append(keys)
    found = recovered(folder, warm, cold, kept)
    broken = sum(not blocks[0] for blocks in found)
    saved = sum(map(len, saves.prefixes))
    times = {
        "p50": median(saves.save_s),
        "p99": percentile(saves.save_s, 0.99),
        "longest": max(saves.save_s),
    }
    shown = {
        "saved": saved,
        "in half minutes": str(saves.late),
        "drain GB/s": str([round(one / 1e9, 2) for one in drains]),
    }
    asked = {"prefixes": len(kept), "whole": sum(all(blocks) for blocks in found)}
    name = "bursts at 0.8 of the drain rate"
    return [
        at_most(f"{name}: blocks evicted before they were written", sum(saves.late), "", 0, **shown),
        at_least(f"{name}: saves at that rate", saves.intended_s / saves.seconds, "", KEPT, **times),
        at_most(f"{name}, then killed: prefixes without their head", broken / len(kept), "", BROKEN, **asked),
    ]  # fmt: skip


def slow_saves(folder: Path, warm: int, cold: int, count: int) -> list[Row]:
    """Half of the memory every half second; then 30 s without requests, and a stop."""
    sources, prefixes = noise_of(warm // 2), []
    with ColdDaemon(folder, warm, cold) as daemon:
        daemon.wait_for_arena()
        space = daemon.client.open(spec_of(BLOCK))
        due = time.monotonic()
        for _ in range(count):
            time.sleep(max(0.0, due - time.monotonic()))
            prefixes.append(fresh_keys(space, len(sources) // BLOCK))
            assert space.save(prefixes[-1], sources).stored == len(prefixes[-1])
            due += 0.5
        late = evicted_unwritten(daemon.client)
        time.sleep(30)
        daemon.client.close()
        daemon.process.send_signal(signal.SIGTERM)
        daemon.process.wait(120)
        found = list(itertools.chain(*recovered(folder, warm, cold, prefixes)))
    name = "half of the memory each half second"
    return [
        at_most(f"{name}: blocks evicted before they were written", late, "", 0),
        at_least(f"{name}, idle for 30 s, stopped: blocks found", sum(found), "", len(found)),
    ]


# --- stops --------------------------------------------------------------------------------------


class Stops(Runs):
    """A daemon whose blocks are only in memory gets SIGTERM. Counts the blocks that the next daemon finds, of
    those that were only in memory."""

    def __init__(self, folder: Path, warm: int, cold: int, blocks: int) -> None:
        super().__init__()
        self._folder, self._warm, self._cold, self._blocks = folder, warm, cold, blocks
        self._sources = noise_of(256 * BLOCK)
        self.alone = self.found = 0

    def once(self) -> None:
        prefixes = []
        with ColdDaemon(self._folder, self._warm, self._cold) as daemon:
            daemon.wait_for_arena()
            daemon.client.tier("cold", "drain")  # so that nothing is written before the stop
            while daemon.client.tier("cold")["state"] != "drained":
                time.sleep(0.01)
            space = daemon.client.open(spec_of(BLOCK))
            for _ in range(self._blocks * BLOCK // len(self._sources)):
                prefixes.append(fresh_keys(space, len(self._sources) // BLOCK))
                stored = space.save(prefixes[-1], self._sources).stored
                assert stored == len(prefixes[-1]), stored
            assert not any(map(any, on_disk(daemon.client, prefixes)))
            daemon.client.tier("cold", "on")
            started = time.perf_counter()
            daemon.process.send_signal(signal.SIGTERM)
            daemon.process.wait(120)
            self.seconds.append(time.perf_counter() - started)
            daemon.client.close()
        self.alone += self._blocks
        self.found += sum(map(sum, recovered(self._folder, self._warm, self._cold, prefixes)))


class Plain(Runs):
    """O_DIRECT writes of as many bytes to a file that has its blocks, and one fdatasync."""

    def __init__(self, file: Path, nbytes: int) -> None:
        super().__init__()
        recycled(file, nbytes)
        self._file, self._nbytes = file, nbytes
        self._memory = mmap.mmap(-1, PLAIN_BYTES)
        self._memory.write(os.urandom(PLAIN_BYTES))

    def once(self) -> None:
        fd = os.open(self._file, os.O_WRONLY | os.O_DIRECT)
        started = time.perf_counter()
        for at in range(0, self._nbytes, PLAIN_BYTES):
            os.pwrite(fd, self._memory, at)
        os.fdatasync(fd)
        self.seconds.append(time.perf_counter() - started)
        os.close(fd)


def stops(folder: Path, nbytes: int, pairs: int) -> list[Row]:
    stop = Stops(folder, nbytes + nbytes // 8, int(1.3 * nbytes), nbytes // BLOCK)
    plain = Plain(folder / "plain", nbytes)
    for _ in range(2):  # later stops reuse segments
        stop.once()
    stop.forget()
    stop.alone = stop.found = 0
    for number in range(pairs):
        for arm in (stop, plain) if number % 2 == 0 else (plain, stop):
            arm.once()
    ratios = [1 / ratio for ratio in beside(stop, plain)]
    low, high = harness.interval(ratios)
    value, gib = median(ratios), nbytes / (1 << 30)
    more = {"s": median(stop.seconds), "plain s": median(plain.seconds)}
    name = f"a stop with {gib:g} GiB only in memory"
    return [
        at_least(f"{name}: blocks found", stop.found, "", stop.alone),
        Row(
            f"{name}: time relative to plain writes", value, "x", f"<= {STOP}", value <= STOP, low, high, more
        ),
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default=None, help="where the cold tier is; a temporary folder")
    parser.add_argument("--seconds", type=float, default=600.0, help="of bursts")
    parser.add_argument("--warm", type=int, default=256, help="MiB of memory for the bursts")
    parser.add_argument("--stop", type=int, default=2048, help="MiB only in memory at a stop")
    parser.add_argument("--pairs", type=int, default=5, help="stops")
    parser.add_argument("--only", choices=("bursts", "slow", "stops"), default=None)
    parser.add_argument("--out", default=None)
    given = parser.parse_args()
    probes, rows = [harness.noise()], []
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        if given.only in (None, "slow"):
            rows += slow_saves(folder / "slow", 64 * MIB, 2048 * MIB, 6)
        if given.only in (None, "bursts"):
            rows += bursts(folder / "bursts", given.warm * MIB, 4096 * MIB, given.seconds)
        if given.only in (None, "stops"):
            (folder / "stops").mkdir()
            rows += stops(folder / "stops", given.stop * MIB, given.pairs)
    probes.append(harness.noise())
    return harness.report("writes", rows, probes, given.out)


if __name__ == "__main__":
    sys.exit(main())
