"""The cold tier through a real daemon, relative to fio on the same disk in the same run.

Blocks go from clients' memory to segment files and back; each request is made by a client on the daemon's
socket. Each row proves that the disk, and not the page cache, was measured: the segment files have no page
in it, and the kernel counted the bytes that the daemon read from the disk.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import disks
import harness
import kv
import traces
from disks import (
    BLOCK,
    FIXED_CPU,
    HEADER,
    MIB,
    PAIRS,
    PLAIN_CPU,
    VERIFY_CPU,
    Arm,
    Fio,
    Place,
    Worker,
)
from harness import Daemon, Row, at_least, at_most, percentile
from kvtier import Client, KvSpec, Space
from kvtier.frame import RAW, Entry, Identity, Template
from kvtier.key import Keys
from kvtier_daemon.codec.encryption import FrameCipher
from kvtier_daemon.tiers.cold.directory import OTHER_BYTES
from kvtier_daemon.tiers.cold.index import FIRST_MAP_BYTES
from kvtier_daemon.tiers.cold.recovery import entries_of, recover
from kvtier_daemon.tiers.cold.segment import described_bytes, first_frame, footer_bytes, space_bytes
from kvtier_kernels import decode_frame, memcpy, seal_frame

TOKENS = 16
GROUP = 1024
WRITES_A_SYNC = 16  # 32 MiB, as the daemon does
RECORD = BLOCK + HEADER
TICK_S = 0.001
QUIET_TICKS = 3
TRACE_BLOCK = 16 << 10
CIPHER_BLOCKS, CIPHER_ROUNDS = 32, 5
# As a tier of 200 GiB has; one and a half of them are always empty.
TRACE_SEGMENTS = 200
# The files of a small directory other than segments.
BESIDE_BYTES = FIRST_MAP_BYTES + OTHER_BYTES
prompts = itertools.count(1)


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    pairs: int
    chain: int  # blocks of 2 MiB in a run
    worker_mib: int
    segment_mib: int
    drained_mib: int  # the cold tier that is written over and over
    singles: int  # blocks read alone, in a run
    million: int
    starts: int
    requests: int
    busy_s: float


FULL = Size(PAIRS, 256, 1024, 1024, 8192, 16, -(-1_000_000 // GROUP) * GROUP, 5, 8000, 15.0)
QUICK = Size(3, 64, 256, 256, 4096, 8, 100 * GROUP, 2, 2000, 4.0)


def spec_of(block_bytes: int) -> KvSpec:
    # 1 layer of 16 tokens and K and V: the heads are as many as the block has room for.
    head_dim = min(128, block_bytes // (2 * 2 * TOKENS))
    return KvSpec.dense(
        model=f"bench-cold-{block_bytes}", layers=1, head_dim=head_dim, dtype="bfloat16", weights="rev:1",
        kv_heads=block_bytes // (2 * head_dim * 2 * TOKENS), block_tokens=TOKENS,
    )  # fmt: skip


def fresh_keys(space: Space, blocks: int) -> Keys:
    start = next(prompts)
    return space.keys([start] * TOKENS + list(range(TOKENS * (blocks - 1))))


def noise_of(nbytes: int) -> memoryview:
    """Bytes that no disk can make less of."""
    return memoryview(os.urandom(nbytes))


# --- the daemon, from outside -------------------------------------------------------------------


class ColdDaemon(Daemon):
    """A daemon with a cold tier, and a client of it."""

    def __init__(
        self, folder: Path, warm_bytes: int, cold_bytes: int, write: str = "back", engine: str = "auto",
        segment_bytes: int = 0, codec: str = "raw", options: str = "", policy: str = "",
    ) -> None:  # fmt: skip
        self.cold = folder / "cold"
        self.cold.mkdir(parents=True, exist_ok=True)
        segment = f"segment = {segment_bytes}\n" if segment_bytes else ""
        cold = f'directories = ["{self.cold}"]\nsize = {cold_bytes}\n{segment}'
        more = f'[cold]\n{cold}write = "{write}"\nengine = "{engine}"\ncodec = "{codec}"\n{options}'
        super().__init__(folder, str(warm_bytes), more, policy)
        self.client = Client.connect(self.socket, populate=False)

    def __exit__(self, *_: object) -> None:
        self.client.close()
        super().__exit__()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(20)

    def files(self) -> list[Path]:
        return sorted((self.cold / "segments" / "default").iterdir())

    def states(self) -> dict[str, int]:
        found: dict[str, int] = self.client.stats()["tiers"]["cold"]["states"]
        return found

    def cpu_s(self) -> float:
        """CPU seconds of all its threads: those of /proc/PID/stat, without the rounding to ticks."""
        return time.clock_gettime((~self.process.pid << 3) | 2)

    def stat_cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def wait_for_written(self, blocks: int, patience_s: float = 60.0) -> None:
        """Wait until `blocks` blocks in total were written for the first time."""
        until = time.monotonic() + patience_s
        while self.states()["written"] < blocks:
            assert time.monotonic() < until, f"{self.states()}: {blocks} were to be written"
            time.sleep(TICK_S)

    def save(self, space: Space, keys: Keys, sources: Any, checksum: bool = True) -> None:
        """Save these, and wait until they are on disk. Where blocks are written when they come near to
        being evicted, others are."""
        written = self.states()["written"]
        saved = space.save(keys, sources, checksum=checksum)
        assert saved.stored == len(keys), saved
        self.wait_for_written(written + len(keys))


def brought(space: Space, keys: Keys, patience_s: float, sleep_s: float = 0.0) -> tuple[int, int]:
    """Match until no blocks are coming. Returns how many were coming at first, and how many are ready
    now."""
    until = time.monotonic() + patience_s
    found = space.match(keys)
    coming = found.coming
    while found.coming and time.monotonic() < until:
        if sleep_s:
            time.sleep(sleep_s)
        found = space.match(keys)
    end_hold(space, keys)
    return coming, found.ready


def end_hold(space: Space, keys: Keys) -> None:
    """Load what was read for a match: until then, the daemon keeps it in memory for some seconds."""
    space.lease(keys).release()


# --- from the disk ------------------------------------------------------------------------------


class Promotions(Arm):
    """A chain that is only on disk: from its match until all of it is ready, through the daemon. `share` of
    its blocks comes from the disk."""

    def __init__(
        self, daemon: ColdDaemon, space: Space, chains: list[Keys], share: float = 1.0
    ) -> None:
        super().__init__()
        self._share = share
        self._daemon, self._space = daemon, space
        self._chains = itertools.cycle(chains)
        self._last_s = 0.0
        self.etas: list[float] = []  # estimated time in the match, relative to the actual time

    def once(self) -> None:
        keys, space = next(self._chains), self._space
        read, _ = disks.disk_bytes(self._daemon.process.pid)
        cpu, started = self._daemon.cpu_s(), time.perf_counter()
        found = space.match(keys)
        assert (found.ready, found.coming) == (0, len(keys)), found
        eta_s = found.eta_ms / 1e3
        time.sleep(0.8 * self._last_s)  # to ask costs the daemon, too
        while found.coming:
            time.sleep(TICK_S)
            found = space.match(keys)
        self._last_s = time.perf_counter() - started
        self.seconds.append(self._last_s)
        self.cpu.append(self._daemon.cpu_s() - cpu)
        self.etas.append(eta_s / self._last_s)
        assert found.ready == len(keys), found
        end_hold(space, keys)
        read = disks.disk_bytes(self._daemon.process.pid)[0] - read
        assert read >= self._share * len(keys) * BLOCK, f"{read} bytes came from the disk"


class Singles(Arm):
    """Blocks that are on disk alone, one at a time; the median of a run is its time."""

    def __init__(self, space: Space, blocks: Iterator[Keys], count: int) -> None:
        super().__init__()
        self._space, self._blocks, self._count = space, blocks, count

    def once(self) -> None:
        times = []
        for _ in range(self._count):
            keys = next(self._blocks)
            started = time.perf_counter()
            assert brought(self._space, keys, 5.0) == (1, 1)
            times.append(time.perf_counter() - started)
        self.seconds.append(median(times))


class FioAlone(Fio):
    """The median of a run's single reads is its time."""

    def once(self) -> None:
        super().once()
        self.seconds[-1] = self.latencies[-1]


def worker_rows(folder: Path, size: Size) -> list[Row]:
    """The worker alone, in this process: what the daemon's rows can reach."""
    place = Place(folder, size.worker_mib * MIB)
    fio = Fio([place.read_file], place.nbytes, BLOCK, 8)
    plain, verified = (
        [Worker(place, "io_uring", 8, fixed, verify, False) for fixed in (True, False)]
        for verify in (False, True)
    )
    disks.in_turn([*plain, *verified, fio], size.pairs)
    rows = []
    for at, label in ((0, "registered"), (1, "not registered")):
        name, bar = f"worker, cold to warm, {label}", (FIXED_CPU, PLAIN_CPU)[at]
        rows.append(disks.speed_row(name, plain[at], fio, place.nbytes, 0.95))
        rows.append(disks.cpu_row(name, plain[at], place.nbytes, bar))
        checked = verified[at]
        name += ", verified"
        rows.append(disks.speed_row(name, checked, plain[at], place.nbytes, 0.95, "unverified"))
        rows.append(disks.cpu_row(name, checked, place.nbytes, bar + VERIFY_CPU))
    for worker in (*plain, *verified):
        worker.close()
    place.read_file.unlink()
    place.write_file.unlink()
    return rows


def reads(folder: Path, size: Size) -> list[Row]:
    """Chains of 2 MiB blocks from segments to slots, each verified on the way; then blocks one at a time."""
    rows = []
    nbytes = size.chain * BLOCK
    # Three chains in memory at most, and never the one that is next.
    warm, cold = 3 * nbytes + 64 * MIB, 64 * size.segment_mib * MIB
    sources = noise_of(nbytes)
    spec = spec_of(BLOCK)
    chains: list[Keys] = []
    singles: list[Keys] = []
    for engine, bar in (("io_uring", FIXED_CPU), ("threads", PLAIN_CPU)):
        label = {"io_uring": "io_uring, registered", "threads": "threads"}[engine]
        with ColdDaemon(folder, warm, cold, "through", engine, policy="lru") as daemon:
            daemon.wait_for_arena()
            space = daemon.client.open(spec)
            assert daemon.client.stats()["tiers"]["cold"]["engine"] == engine
            if not chains:
                for checksum in (True, False) * 4:
                    chains.append(fresh_keys(space, size.chain))
                    daemon.save(space, chains[-1], sources, checksum)
                for _ in range(2 * size.chain):
                    singles.append(fresh_keys(space, 1))
                    daemon.save(space, singles[-1], sources[:BLOCK])
            wait_until_found(daemon, 10 * size.chain)
            for keys in chains[:4]:  # what was saved last, or nothing, is in memory
                assert brought(space, keys, 20.0, TICK_S)[1] == len(keys)
            time.sleep(1.0)  # its memory is registered by a thread
            files = [path for path in daemon.files() if path.stat().st_size >= 2 * nbytes][:3]
            fio = Fio(files, nbytes, BLOCK, 8, hole=HEADER, first=2 * HEADER)
            assert disks.cached_bytes(daemon.files()) == 0
            arms = [
                Promotions(daemon, space, chains[4 + at :: 2] + chains[at:4:2]) for at in (0, 1)
            ]
            own, ticks = daemon.cpu_s(), daemon.stat_cpu_s()
            disks.in_turn([*arms, fio], size.pairs)
            own, ticks = daemon.cpu_s() - own, daemon.stat_cpu_s() - ticks
            assert abs(own - ticks) < 0.05 + 0.05 * ticks, (own, ticks)
            for arm, saved in zip(arms, ("with checksums", "without"), strict=True):
                name = f"daemon, cold to warm, {label}, saved {saved}"
                rows.append(disks.speed_row(name, arm, fio, nbytes, 0.95))
                eta = median(arm.etas)
                rows.append(disks.cpu_row(name, arm, nbytes, bar + VERIFY_CPU, eta_share=eta))
            alone = FioAlone(files, size.singles * BLOCK, BLOCK, 1, at_random=True)
            one = Singles(space, itertools.cycle(singles), size.singles)
            disks.in_turn([one, alone], size.pairs, 0.2)
            rows.append(alone_row(label, one, alone))
            assert disks.cached_bytes(daemon.files()) == 0
    return rows


def codecs(folder: Path, size: Size) -> list[Row]:
    """The same chains of K and V stored by each codec: bytes of blocks per second, relative to fio reading
    as many from a file, and to blocks that are stored raw."""
    rows = []
    blocks = size.chain // 2
    nbytes = blocks * BLOCK
    some = kv.bf16(kv.synthetic(min(nbytes, 64 * MIB) // 2)).tobytes()
    sources = memoryview(some * (nbytes // len(some)))
    names = ("raw", "fix4", "r32", "auto")
    with ExitStack() as stack:
        arms, cold = [], {}
        for codec in names:
            daemon = stack.enter_context(
                ColdDaemon(
                    folder / codec, 2 * nbytes + 16 * MIB, 64 * size.segment_mib * MIB, "through", codec=codec
                )
            )  # fmt: skip
            daemon.wait_for_arena()
            space = daemon.client.open(spec_of(BLOCK))
            chains = [fresh_keys(space, blocks) for _ in range(8)]
            for keys in chains:
                daemon.save(space, keys, sources)
            for keys in chains[:4]:  # what was saved last is in memory
                assert brought(space, keys, 20.0, TICK_S)[1] == len(keys)
            arms.append(Promotions(daemon, space, chains[4:] + chains[:4], 0.6))
            assert disks.cached_bytes(daemon.files()) == 0
            cold[codec] = daemon.client.stats()["tiers"]["cold"]
        time.sleep(1.0)  # memory is registered by a thread
        place = Place(folder, nbytes)
        fio = Fio([place.read_file], nbytes, BLOCK, 8)
        disks.in_turn([*arms, fio], size.pairs)
        for codec, arm in zip(names, arms, strict=True):
            name = f"daemon, cold to warm, stored {codec}"
            whole = cold[codec]["blocks"] * BLOCK
            ratio = whole / cold[codec]["used_bytes"]
            (one,) = cold[codec]["coding"]["spaces"]
            rows.append(disks.speed_row(name, arm, fio, nbytes, None))
            rows[-1].more.update({"smaller": ratio, "chosen": one["codec"]})
            if codec != "raw":
                rows.append(disks.speed_row(name, arm, arms[0], nbytes, None, "raw"))
            rows.append(disks.cpu_row(name, arm, nbytes, None, eta_share=median(arm.etas)))
        place.read_file.unlink()
    return rows


def encryption(folder: Path, size: Size) -> list[Row]:
    """The same chains stored plain and encrypted: the time of a hit, and what it costs one core to encrypt
    and decrypt a block, relative to copying it."""
    rows = cipher_rows()
    blocks = size.chain // 4
    nbytes = blocks * BLOCK
    some = kv.bf16(kv.synthetic(min(nbytes, 64 * MIB) // 2)).tobytes()
    sources = memoryview(some * (nbytes // len(some)))
    keys_file = folder / "keys"
    keys_file.touch(0o600)
    keys_file.write_text(os.urandom(32).hex())
    on = f'encryption = "aes-256-gcm"\nkey_file = "{keys_file}"\n'
    codecs = ("raw", "r32")
    with ExitStack() as stack:
        arms = []
        for codec, options in itertools.product(codecs, ("", on)):
            daemon = stack.enter_context(
                ColdDaemon(
                    folder / f"{codec}{len(arms)}", 2 * nbytes + 16 * MIB, 64 * 64 * MIB, "through",
                    codec=codec, options=options, policy="lru",
                )
            )  # fmt: skip
            daemon.wait_for_arena()
            space = daemon.client.open(spec_of(BLOCK))
            chains = [fresh_keys(space, blocks) for _ in range(8)]
            for keys in chains:
                daemon.save(space, keys, sources)
            for keys in chains[:4]:  # what was saved last is in memory
                assert brought(space, keys, 20.0, TICK_S)[1] == len(keys)
            arms.append(Promotions(daemon, space, chains[4:] + chains[:4], 0.6))
        time.sleep(1.0)  # memory is registered by a thread
        disks.in_turn(arms, size.pairs)
    for number, codec in enumerate(codecs):
        plain, encrypted = arms[2 * number : 2 * number + 2]
        ratios = disks.beside(plain, encrypted)
        low, high = harness.interval(ratios)
        rows.append(
            Row(
                f"cold hit of {blocks} blocks stored {codec}, encrypted: time relative to plain",
                median(ratios), "x", "<= 1.1", median(ratios) <= 1.1, low, high,
                {
                    "GB/s": nbytes / 1e9 / median(encrypted.seconds),
                    "plain GB/s": nbytes / 1e9 / median(plain.seconds),
                    "daemon cpu s/GB": median(encrypted.cpu) / (nbytes / 1e9),
                    "plain daemon cpu s/GB": median(plain.cpu) / (nbytes / 1e9),
                },
            )
        )  # fmt: skip
    return rows


def cipher_rows() -> list[Row]:
    """CPU times of the thread, which other processes do not lengthen; each block alternately with a copy."""
    cipher = FrameCipher.of([os.urandom(32)], "bench")
    name = Identity(bytes(32), 0, 0, bytes(32))
    kind = Template(name.space, 0, 0, RAW, (Entry(0, 0, RAW, 0, BLOCK, BLOCK),))
    blocks, encrypted, out = (bytearray(os.urandom(CIPHER_BLOCKS * BLOCK)) for _ in range(3))
    headers = [bytearray() for _ in range(CIPHER_BLOCKS)]

    def slot(of: bytearray, number: int) -> memoryview:
        number %= CIPHER_BLOCKS
        return memoryview(of)[number * BLOCK : (number + 1) * BLOCK]

    def encrypt(number: int) -> None:
        headers[number] = kind.blank(b"")
        cipher.encrypt(headers[number], slot(blocks, number), slot(encrypted, number))

    def decrypt(number: int) -> None:
        header, into = headers[number], slot(out, number)
        keys, identity = cipher.keys, name.encode()
        digest = bytes(header[168:184])
        payload = slot(encrypted, number)
        assert decode_frame(0, header, payload, digest, into, keys=keys, identity=identity)

    rows = []
    for label, work in (("encrypt", encrypt), ("decrypt", decrypt)):
        ratios, seconds, copies = [], [], []
        for _ in range(CIPHER_ROUNDS):
            for number in range(CIPHER_BLOCKS):
                began = time.thread_time()
                memcpy(slot(out, number + 9), slot(blocks, number + 9))
                copied = time.thread_time()
                work(number)
                ended = time.thread_time()
                if label == "encrypt":
                    seal_frame(headers[number], slot(encrypted, number))
                else:
                    assert slot(out, number) == slot(blocks, number)
                ratios.append((copied - began) / (ended - copied))
                seconds.append(ended - copied)
                copies.append(copied - began)
        low, high = harness.interval(ratios)
        value = BLOCK / 1e9 / median(seconds)
        rows.append(
            Row(
                f"{label} a block of 2 MiB, one core", value, "GB/s", ">= 1.5", value >= 1.5,
                BLOCK / 1e9 / sorted(seconds)[int(0.95 * len(seconds))], BLOCK / 1e9 / min(seconds),
                {
                    "/ memcpy": median(ratios), "interval": [low, high],
                    "memcpy GB/s": BLOCK / 1e9 / median(copies),
                },
            )
        )  # fmt: skip
    return rows


def alone_row(label: str, one: Arm, alone: Arm) -> Row:
    ratios = [1 / ratio for ratio in disks.beside(one, alone)]
    low, high = harness.interval(ratios)
    value = median(ratios)
    return Row(
        f"daemon, one cold block alone, {label}: time relative to fio's", value, "x", "<= 1.5", value <= 1.5,
        low, high, {"us": median(one.seconds) * 1e6, "fio us": median(alone.seconds) * 1e6},
    )  # fmt: skip


def wait_until_found(daemon: ColdDaemon, blocks: int, patience_s: float = 60.0) -> float:
    """Return how long after its start the daemon has found `blocks` blocks on disk."""
    until = time.monotonic() + patience_s
    while (found := daemon.client.stats()["tiers"]["cold"]["blocks"]) < blocks:
        assert time.monotonic() < until, f"{found} of {blocks} blocks are there"
        time.sleep(0.002)
    return time.perf_counter() - daemon.started


# --- to the disk --------------------------------------------------------------------------------


class Drains(Arm):
    """Saves this many bytes, which evicts as many: until they are durable on disk."""

    def __init__(self, daemon: ColdDaemon, space: Space, sources: Any, checksum: bool) -> None:
        super().__init__()
        self._daemon, self._space, self._checksum = daemon, space, checksum
        self._sources = sources
        self._blocks = len(sources) // BLOCK
        self._last_s = 0.0

    def once(self) -> None:
        keys, daemon = fresh_keys(self._space, self._blocks), self._daemon
        written, (_, before) = daemon.states()["written"], disks.disk_bytes(daemon.process.pid)
        cpu, started = daemon.cpu_s(), time.perf_counter()
        saved = self._space.save(keys, self._sources, checksum=self._checksum)
        assert saved.stored == self._blocks, saved
        time.sleep(max(0.0, 0.8 * self._last_s - (time.perf_counter() - started)))
        daemon.wait_for_written(written + self._blocks)
        self._last_s = time.perf_counter() - started
        self.seconds.append(self._last_s)
        self.cpu.append(daemon.cpu_s() - cpu)
        _, after = disks.disk_bytes(daemon.process.pid)
        assert after - before >= self._blocks * BLOCK, f"{after - before} bytes went to the disk"


def drains(folder: Path, size: Size) -> list[Row]:
    """Measure the writes while memory is full, to segments that are reused."""
    nbytes = size.chain * BLOCK
    sources = noise_of(nbytes)
    recycled = folder / "records"
    disks.recycled(recycled, size.chain * RECORD)
    fio = Fio([recycled], size.chain * RECORD, RECORD, 8, writes=True, sync=WRITES_A_SYNC)
    with ColdDaemon(folder, 4 * nbytes, size.drained_mib * MIB) as daemon:
        daemon.wait_for_arena()
        space = daemon.client.open(spec_of(BLOCK))
        arms = [Drains(daemon, space, sources, checksum) for checksum in (True, False)]
        for _ in range(4):  # memory is full, and all of it is on disk
            assert space.save(fresh_keys(space, size.chain), sources).stored == size.chain
        daemon.wait_for_written(4 * size.chain)
        for _ in range(size.drained_mib * MIB // nbytes + 1):
            arms[0].once()
        lost = daemon.client.stats()["evicted_blocks"]
        assert lost.get("lost"), f"no segment was used again: {lost}"
        disks.in_turn([*arms, fio], size.pairs)
        rows = []
        for arm, saved in zip(arms, ("with checksums", "without"), strict=True):
            name = f"daemon, warm to cold, saved {saved}"
            rows.append(disks.speed_row(name, arm, fio, nbytes, 0.90))
            rows.append(disks.cpu_row(name, arm, nbytes, None))
        assert disks.cached_bytes(daemon.files()) == 0
    recycled.unlink()
    return rows


# --- restarts -----------------------------------------------------------------------------------


def restarts(folder: Path, size: Size) -> list[Row]:
    """A million blocks of 4 KiB are on disk: stopped and started, killed and started."""
    spec = spec_of(4096)
    frames = 2 * 4096 * size.million
    warm, cold = 512 * MIB, int(1.5 * frames) + BESIDE_BYTES
    with ColdDaemon(folder, warm, cold, "through") as daemon:
        daemon.wait_for_arena()
        space = daemon.client.open(spec)
        started = time.perf_counter()
        chains = [save_unseen(daemon, space) for _ in range(size.million // GROUP)]
        daemon.wait_for_written(size.million)
        filling_s = time.perf_counter() - started
    clean = [start(folder, warm, cold, spec, chains, size.million) for _ in range(size.starts)]
    with ColdDaemon(folder, warm, cold, "through") as daemon:
        wait_until_found(daemon, size.million)
        daemon.wait_for_arena()
        space = daemon.client.open(spec)
        before = daemon.states()["written"]
        more = [save_unseen(daemon, space) for _ in range(16)]
        daemon.wait_for_written(before + len(more) * GROUP)
        files = daemon.files()
        daemon.kill()
    blocks = size.million + len(more) * GROUP
    walked = [
        found for path in files
        if not (found := recover(path, None, {space.identity: spec})).sealed
        and entries_of(found)
    ]  # fmt: skip
    scanned = sum(one.end for one in walked)
    assert scanned, "no segment was open"
    crashed = [
        start(folder, warm, cold, spec, chains + more, blocks, kill=True)
        for _ in range(size.starts)
    ]
    fio = Fio([one.path for one in walked], scanned // MIB * MIB, MIB, 8)
    disks.in_turn([fio], size.starts, 0.0)
    scan_s = median(fio.seconds) * len(walked)
    low, high = harness.interval(clean)
    name = f"restart with {size.million:,} blocks on disk"
    rows = [
        Row(f"{name}, clean: all found after", median(clean), "s", "<= 2", median(clean) <= 2, low, high,
            {"saved in s": filling_s})
    ]  # fmt: skip
    beyond = [took - scan_s for took in crashed]
    low, high = harness.interval(beyond)
    rows.append(
        Row(f"{name}, killed: all found after, beyond fio's scan", median(beyond), "s", "<= 2",
            median(beyond) <= 2, low, high,
            {"scanned MiB": scanned / MIB, "fio's scan s": scan_s, "in all s": median(crashed)})
    )  # fmt: skip
    return rows


def save_unseen(daemon: ColdDaemon, space: Space) -> Keys:
    """A chain whose bytes don't matter, not faster than the disk takes it."""
    keys = fresh_keys(space, GROUP)
    while backlog(daemon) > 32 * GROUP:
        time.sleep(0.01)
    with space.reserve(keys) as saving:
        assert len(saving) == GROUP, saving.refused
        saving.commit(GROUP)
    return keys


def backlog(daemon: ColdDaemon) -> int:
    """Blocks that were saved and are not on disk yet."""
    stats = daemon.client.stats()
    return int(stats["saved_tokens"] // TOKENS - stats["tiers"]["cold"]["states"]["written"])


def start(
    folder: Path, warm: int, cold: int, spec: KvSpec, chains: list[Keys], blocks: int, kill: bool = False
) -> float:  # fmt: skip
    """How long a start takes until all is found; then some of it is read, as what is found has to be true."""
    assert disks.cached_bytes((folder / "cold" / "segments" / "default").iterdir()) == 0
    with ColdDaemon(folder, warm, cold, "through") as daemon:
        took = wait_until_found(daemon, blocks)
        daemon.wait_for_arena()
        space = daemon.client.open(spec)
        for keys in random.sample(chains[:-1], 8) + chains[-1:]:
            found = brought(space, keys, 20.0, TICK_S)
            assert found == (GROUP, GROUP), f"{found} of {GROUP}: {daemon.client.stats()}"
        if kill:
            daemon.kill()
    return took


def scan(folder: Path, size: Size) -> list[Row]:
    """An open segment of 2 MiB blocks, after a kill: read by the daemon's own code, and by fio."""
    nbytes = size.chain * BLOCK
    segment = 2 * nbytes
    with ColdDaemon(folder, 2 * nbytes, 64 * segment, "through") as daemon:
        daemon.wait_for_arena()
        space = daemon.client.open(spec_of(BLOCK))
        keys = fresh_keys(space, size.chain)
        daemon.save(space, keys, noise_of(nbytes))
        path = daemon.files()[0]
        daemon.kill()
    spaces = {space.identity: space.spec}

    class Recoveries(Arm):
        def once(self) -> None:
            assert disks.cached_bytes([path]) == 0
            cpu, started = time.process_time(), time.perf_counter()
            found = recover(path, None, spaces)
            self.seconds.append(time.perf_counter() - started)
            self.cpu.append(time.process_time() - cpu)
            assert not found.sealed and entries_of(found) == size.chain

    one, fio = Recoveries(), Fio([path], nbytes, BLOCK, 8)
    disks.in_turn([one, fio], size.pairs, 0.2)
    name = "scan of an open segment of 2 MiB blocks"
    return [disks.speed_row(name, one, fio, nbytes, None), disks.cpu_row(name, one, nbytes, None)]


# --- how late the loop is -----------------------------------------------------------------------


def probe(socket: str) -> None:
    """Ping every millisecond until stdin ends; then print what each took, in milliseconds."""
    took = []
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    with Client.connect(socket, populate=False) as client:
        client.ping()
        print("ready", flush=True)
        due = time.perf_counter()
        while not over.is_set():
            started = time.perf_counter()
            client.ping()
            ended = time.perf_counter()
            took.append((ended - started) * 1e3)
            due = max(due + TICK_S, ended)
            time.sleep(due - ended)
    print(json.dumps(took), flush=True)


@dataclass
class Lateness:
    """What pings took in milliseconds: of the daemon that works, and of one that has nothing to do."""

    busy: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)

    def row(self, what: str) -> Row:
        at = [percentile(every_tick(times), 0.999) for times in (self.busy, self.idle)]
        return at_most(
            f"loop while {what}: p99.9 beyond an idle one's", at[0] - at[1], "ms", 3.0,
            busy=at[0], idle=at[1], p99=percentile(every_tick(self.busy), 0.99), worst=max(self.busy),
            pings=len(self.busy),
        )  # fmt: skip


def every_tick(times: list[float]) -> list[float]:
    """What pings at every tick would have taken: those that a long one kept from being sent, too."""
    tick = TICK_S * 1e3
    return [late - tick * n for late in times for n in range(max(1, int(late / tick)))]


@contextmanager
def pinged(folder: Path, daemon: Daemon) -> Iterator[Lateness]:
    """Ping this daemon, and another that has nothing to do, from a process each."""
    idle = folder / "idle"
    idle.mkdir(exist_ok=True)
    found = Lateness()
    with Daemon(idle, "64MiB") as other:
        probes = [
            subprocess.Popen(
                [sys.executable, __file__, "--probe", socket],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for socket in (daemon.socket, other.socket)
        ]  # fmt: skip
        try:
            for each in probes:
                assert each.stdout is not None and each.stdout.readline() == "ready\n"
            yield found
            found.busy, found.idle = (json.loads(each.communicate("")[0]) for each in probes)
        finally:
            for each in probes:
                each.kill()
                each.wait()


def busy_loop(folder: Path, size: Size) -> list[Row]:
    """Chains of 2 MiB blocks are saved, written and read at once, as fast as one client can."""
    half = size.chain // 2
    sources = noise_of(half * BLOCK)
    with ColdDaemon(folder, 8 * half * BLOCK, size.drained_mib * MIB, "through") as daemon:
        daemon.wait_for_arena()
        space = daemon.client.open(spec_of(BLOCK))
        chains = [fresh_keys(space, half) for _ in range(16)]
        for keys in chains:
            daemon.save(space, keys, sources)
        before = daemon.states()
        with pinged(folder, daemon) as late:
            until = time.monotonic() + size.busy_s
            while time.monotonic() < until:
                chains.append(fresh_keys(space, half))
                space.save(chains[-1], sources, checksum=len(chains) % 2 == 0)
                brought(space, chains.pop(0), 10.0, TICK_S)
        moved = {what: count - before[what] for what, count in daemon.states().items()}
        assert moved["read"] and moved["written"], moved
    row = late.row("2 MiB blocks are written and read")
    row.more |= {
        f"{what} GB/s": moved[what] * BLOCK / 1e9 / size.busy_s for what in ("read", "written")
    }
    return [row]


# --- real requests ------------------------------------------------------------------------------


def trace(folder: Path, size: Size, requests: list[traces.Request], share: float) -> list[Row]:
    """Replay requests one by one, slowly: the writes of each are on disk before the next one. Fills the
    segments with as many frames as fit; other files of the tier are small and not counted."""
    every = sum(map(len, requests))
    unique = len({name for request in requests for name in request})
    on_disk = int(unique * share)
    # The part that is kept clean, a quarter, has room for any request.
    in_memory = max(on_disk // 20, 4 * max(map(len, requests)))
    frame = TRACE_BLOCK + HEADER
    frames = max(MIB // frame + 1, on_disk // TRACE_SEGMENTS)  # a segment has a MiB at least
    spec = spec_of(TRACE_BLOCK)
    footer = footer_bytes(described_bytes(space_bytes((bytes(32), spec))), frames)
    body = frames * frame + footer
    segment = first_frame(body) + body
    cold = on_disk // frames * segment + BESIDE_BYTES
    payload = noise_of(TRACE_BLOCK)
    hits = saved = 0
    place = folder / f"{share:.0%}"
    with ColdDaemon(place, in_memory * TRACE_BLOCK, cold, segment_bytes=segment) as daemon:
        daemon.wait_for_arena()
        space = daemon.client.open(spec)
        _, before = disks.disk_bytes(daemon.process.pid)
        started = time.perf_counter()
        with pinged(place, daemon) as late:
            for request in requests:
                keys = space.keys([name for name in request for _ in range(TOKENS)])
                brought(space, keys, 2.0, TICK_S / 2)
                with space.load(keys) as blocks:
                    hits += len(blocks)
                saved += space.save(keys, [payload] * len(keys)).stored
                wait_until_quiet(daemon)
        took = time.perf_counter() - started
        states, stats = daemon.states(), daemon.client.stats()
        written = disks.disk_bytes(daemon.process.pid)[1] - before
    lru = traces.lru_hits(requests, on_disk) / every
    of_both = traces.lru_hits(requests, on_disk + in_memory) / every
    name = f"trace, cold tier of {share:.0%} of {unique:,} blocks"
    new, again = states["written"], states["written_again"]
    return [
        at_least(f"{name}: hit rate", hits / every, "", round(lru, 4), requests=len(requests),
                 seconds=took, not_read=states["not_read"], spoilt=states["spoilt"],
                 lru_of_memory_too=of_both),
        at_most(f"{name}: written for each new byte", (new + again) / new, "x", 1.25,
                blocks_new=new, blocks_again=again, saved=saved, by_the_disk=written / (new * frame),
                never_written=stats["evicted_blocks"]["capacity"]),
        late.row(f"the trace runs through {share:.0%}"),
    ]  # fmt: skip


def wait_until_quiet(daemon: ColdDaemon) -> None:
    """Until nothing was being written, nor begun, for some ticks."""
    last: dict[str, Any] = {}
    same = 0
    while same < QUIET_TICKS:
        now = daemon.client.stats()["tiers"]["cold"]
        quiet = now["states"] == last and not now["writing"] and not now["reading"]
        last, same = now["states"], same + 1 if quiet else 0
        time.sleep(TICK_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where the files go: on the disk in question")
    parser.add_argument(
        "--trace", type=Path, help="requests as JSON lines with `hash_ids`; else made up"
    )
    parser.add_argument("--quick", action="store_true", help="little of everything, and no verdict")
    parser.add_argument("--only", default="", help="parts whose name has this")
    parser.add_argument("--out")
    parser.add_argument("--probe", metavar="SOCKET")
    given = parser.parse_args()
    if given.probe:
        probe(given.probe)
        return 0
    if shutil.which("fio") is None:
        print("skipped: there is no fio here")
        return 0
    size = QUICK if given.quick else FULL
    most = size.requests
    requests = traces.read(given.trace, most) if given.trace else traces.made_up(most)
    parts: dict[str, Callable[[Path], list[Row]]] = {
        "worker": lambda folder: worker_rows(folder, size),
        "reads": lambda folder: reads(folder, size),
        "codecs": lambda folder: codecs(folder, size),
        "encryption": lambda folder: encryption(folder, size),
        "drains": lambda folder: drains(folder, size),
        "scan": lambda folder: scan(folder, size),
        "loop": lambda folder: busy_loop(folder, size),
        "trace 10%": lambda folder: trace(folder, size, requests, 0.10),
        "trace 20%": lambda folder: trace(folder, size, requests, 0.20),
        "restarts": lambda folder: restarts(folder, size),
    }
    rows: list[Row] = []
    probes = [harness.noise()]
    for name, part in parts.items():
        if given.only not in name:
            continue
        started = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            found = part(Path(folder))
        rows += found
        print(*(row.line() for row in found), sep="\n")
        print(f"({name}: {time.perf_counter() - started:.0f} s)", flush=True)
    probes.append(harness.noise())
    if given.quick:
        print("nothing is kept of so little")
        return 0
    return harness.report("cold", rows, probes, given.out)


if __name__ == "__main__":
    sys.exit(main())
