"""Copies between a GPU's pages and a real arena, in both ways, beside one large copy to pinned memory.

Every time is a wall clock's around the whole transfer, tables and the wait for its event included. Without a
GPU it says so, and writes nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import harness
from harness import Arm, Daemon, Row, pairs, ratio_row
from kvtier import Client, Group, KvSpec
from kvtier_kernels.cuda import Copier, CudaError, Driver, Lane

KIB, MIB = 1 << 10, 1 << 20
TRANSFER_BYTES = 256 * MIB
WARM = "1GiB"
PIECES = (16 * KIB, 32 * KIB, 64 * KIB, 128 * KIB, 256 * KIB, 1 * MIB, 4 * MIB)
BLOCK_BYTES = 4 * MIB
MOST_LAYERS = 64
WAIT_S = 60.0


class Memory:
    """As much as is moved at once: of the device, and of the host's, pinned."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.device = driver.device_memory(TRANSFER_BYTES)
        self.pinned = driver.pinned_memory(TRANSFER_BYTES)
        self.shown = np.frombuffer(self.pinned, np.uint8)
        self.stream = driver.stream()

    def copy(self, inwards: bool) -> None:
        """One large copy, out of the device's memory or into it."""
        host = ctypes.addressof(self.pinned)
        to, source = (host, self.device) if inwards else (self.device, host)
        self.driver.copy(to, source, TRANSFER_BYTES, self.stream)
        self.driver.call("cuStreamSynchronize", self.stream)

    def fill(self) -> None:
        self.shown[:] = np.frombuffer(os.urandom(MIB), np.uint8).repeat(TRANSFER_BYTES // MIB)
        self.shown[:: 4 * KIB] = np.arange(TRANSFER_BYTES // (4 * KIB)) % 251
        self.copy(inwards=False)


def copies(client: Client, copier: Copier, memory: Memory, piece: int, rounds: int) -> list[Row]:
    """Layers apart, as most engines keep them; pages in no order."""
    layers = min(MOST_LAYERS, max(1, BLOCK_BYTES // piece))
    size = layers * piece
    count = TRANSFER_BYTES // size
    where = (
        [memory.device] * layers, [TRANSFER_BYTES] * layers,
        [n * count * piece for n in range(layers)], [piece] * layers, [piece] * layers,
    )  # fmt: skip
    memory.fill()
    pieces = copier.pieces(*where, blocks=count)
    chosen = dict(pieces.ways)
    group = Group(kind="full", layers=layers, opaque_bytes=size)
    name = f"{piece // KIB} KiB pieces"
    spec = KvSpec.groups([group], model=name, dtype="uint8", block_tokens=1, weights="rev:1")
    space = client.open(spec)
    reader = client.reader()
    wait_for(lambda: len(copier.pins.of(reader.mappings).ready) == reader.extents)
    ids = np.random.default_rng(1).permutation(count).tolist()
    keys = space.keys(list(range(count)))
    lane = copier.lane()
    rows: list[Row] = []
    before = memory.shown.copy()

    def timed(inwards: bool, slots: bytes) -> None:
        for way in copier.ways:
            pieces.ways[inwards] = way
            arm = Arm(lambda: moved(lane, slots, inwards))
            limit = Arm(lambda: memory.copy(inwards))
            ratios = pairs(arm, limit, rounds, warmups=2)
            direction = "save" if inwards else "load"
            title = f"{direction}, {name}, {way}, to one pinned copy"
            row = ratio_row(title, ratios, None, TRANSFER_BYTES, arm, limit)
            row.more["chosen"] = chosen[inwards] == way
            rows.append(row)

    def moved(lane: Lane, slots: bytes, inwards: bool) -> None:
        lane.start(pieces, ids, reader.mappings, slots, inwards, None)
        lane.finish()

    with space.reserve(keys) as saving:
        assert len(saving) == count, saving.refused
        for way in copier.ways:  # valid first, each way against the bytes that are there
            pieces.ways = {True: way, False: way}
            moved(lane, saving.slots, True)
            memory.shown[:] = 0
            memory.copy(inwards=False)
            moved(lane, saving.slots, False)
            memory.copy(inwards=True)
            assert np.array_equal(memory.shown, before), f"{way} does not bring back what it took"
        timed(True, saving.slots)
        saving.commit(count)
    lease = space.lease(keys, 600_000)
    assert lease.ready == count
    timed(False, lease.part(0, 0).slots)
    assert reader.fresh(lease.part(0, 0).slots) == count
    lease.release()
    space.forget(keys)
    return rows


def registering(driver: Driver, memory: Memory) -> list[Row]:
    """What registering an extent takes, and what it does to an engine's thread meanwhile."""
    size = 1 << 30
    extent = np.zeros(size, np.uint8)
    extent[:: 4 * KIB] = 1
    took: list[float] = []

    def register() -> None:
        driver.own_thread()
        started = time.perf_counter()
        driver.register(extent.ctypes.data, size)
        took.append(time.perf_counter() - started)

    def longest(until: Callable[[], bool]) -> float:
        most = 0.0
        while not until():
            started = time.perf_counter()
            driver.copy(memory.device, memory.device + MIB, 64 * KIB, memory.stream)
            driver.call("cuStreamSynchronize", memory.stream)
            most = max(most, time.perf_counter() - started)
        return most

    start = time.perf_counter()
    alone = longest(lambda: time.perf_counter() - start > 0.5)
    thread = threading.Thread(target=register)
    thread.start()
    beside = longest(lambda: not thread.is_alive())
    thread.join()
    driver.call("cuMemHostUnregister", extent.ctypes.data)
    return [
        Row("registering 1 GiB", took[0], "s"),
        Row("the longest small copy meanwhile", beside * 1e3, "ms", more={"alone ms": alone * 1e3}),
    ]


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError("the extents were not registered")
        time.sleep(0.01)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    parser.add_argument("--rounds", type=int, default=harness.ROUNDS)
    arguments = parser.parse_args()
    try:
        driver = Driver(0)
    except CudaError as error:
        print(f"no GPU here, nothing measured: {error}")
        return 0
    copier = Copier(driver)
    memory = Memory(driver)
    rows: list[Row] = []
    probes = [harness.noise()]
    with tempfile.TemporaryDirectory() as folder, Daemon(Path(folder), WARM) as daemon:
        daemon.wait_for_arena()
        with Client.connect(daemon.socket) as client:
            for piece in PIECES:
                rows += copies(client, copier, memory, piece, arguments.rounds)
    rows += registering(driver, memory)
    probes.append(harness.noise())
    return harness.report(
        "gpu", rows, probes, arguments.out, device=driver.name, architecture=driver.architecture,
        ways=copier.ways,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
