"""Copies between a GPU's pages and a real arena, in both directions, relative to one large copy to pinned
memory; and the codecs on the GPU, relative to a copy of as many raw bytes within its memory.

All times are wall-clock times of the whole transfer, including the tables and the wait for its event.
Without a GPU it prints that, and writes nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

import harness
import kvtier_kernels as kernels
from harness import Arm, Daemon, Row, at_least, at_most, pairs, ratio_row
from kv import bf16, synthetic
from kvtier import Client, Group, KvSpec
from kvtier_kernels.cuda import Copier, CopyLane, CudaError, Driver
from kvtier_kernels.cuda import codecs as device_codecs

KIB, MIB = 1 << 10, 1 << 20
TRANSFER_BYTES = 256 * MIB
WARM = "1GiB"
PIECES = (16 * KIB, 32 * KIB, 64 * KIB, 128 * KIB, 256 * KIB, 1 * MIB, 4 * MIB)
BLOCK_BYTES = 4 * MIB
MOST_LAYERS = 64
WAIT_S = 60.0
RUN_S = 540.0  # a borrowed machine runs one command for ten minutes
# Bars: of one pinned copy, by the least size of the pieces; and GB/s of raw bytes.
COPY_BARS = ((64 * KIB, 0.9), (0, 0.6))
DECODE_BARS = {"r32": 100.0, "fix4": 300.0, "q8": 500.0}
START_BAR_US = 100.0  # on the host, of 4,096 parts
# What the codecs are given: parts of a block of a model with 8 heads of 128 channels.
TOKENS, HEADS, DIM = 16, 8, 128
PART_BYTES = 2 * TOKENS * HEADS * DIM
CODED_BYTES = 128 * MIB
CODECS = {"fix4": 1, "r32": 2, "q8": 4, "q4": 5, "q2": 6, "ecsq": 7, "cachegen": 8}
STEP, ANCHOR_STEP, REACH = 144, 120, 15  # exponents: a quarter, and 1/32


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
            taken = chosen[inwards] == way
            bar = next(bar for least, bar in COPY_BARS if piece >= least) if taken else None
            row = ratio_row(title, ratios, bar, TRANSFER_BYTES, arm, limit)
            row.more["chosen"] = taken
            rows.append(row)

    def moved(lane: CopyLane, slots: bytes, inwards: bool) -> None:
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


def normal_table(step: float) -> bytes:
    """Frequencies of normal numbers in such steps, and of the escape."""
    shares = np.exp(-0.5 * (np.arange(-REACH, REACH + 1) * step) ** 2)
    table = np.append(np.maximum(1, np.floor(shares / shares.sum() * 224)), 1).astype(int)
    table[REACH] += 256 - table.sum()
    return bytes(table.tolist())


def coded(driver: Driver, name: str, rounds: int) -> list[Row]:
    """One codec, both ways: every byte is compared with the processor's first."""
    codec, count = CODECS[name], CODED_BYTES // PART_BYTES
    raw = bf16(synthetic(CODED_BYTES // 2)).tobytes()
    sizes, channels = [PART_BYTES] * count, HEADS * DIM
    grid = (TOKENS, channels, DIM, False)
    into = bytearray(len(raw))
    by = None
    if name in ("ecsq", "cachegen"):
        turns = np.floor(10_000.0 ** (-np.arange(DIM / 2) / (DIM / 2)) / (2 * np.pi) * 2.0**64)
        ropes = [(turns.astype("<u8").tobytes(), False)]
        said = (HEADS, DIM, 0, 0, bytes(4 * channels), bytes([ANCHOR_STEP]) * channels,
                bytes([STEP]) * channels, normal_table(0.25))  # fmt: skip
        native = kernels.Calibration(codec, 0, 10, ropes, [said])
        by = device_codecs.calibration(driver, codec, 0, 10, ropes, [said])
        found = kernels.encode_calibrated(
            native, 0, raw, [(0, one) for one in sizes], False, 0, into
        )
    else:
        found = kernels.encode_parts(codec, 0, raw, sizes, into, [grid] * count)
    encoded = sum(size for _, size in found)
    assert {taken for taken, _ in found} == {codec}
    shared = device_codecs.Codecs(driver, scratch_bytes=4 * CODED_BYTES)
    coder = device_codecs.Coder(shared)
    stream = driver.stream()
    memory = [driver.device_memory(CODED_BYTES) for _ in range(3)]  # raw, encoded, decoded
    host = driver.pinned_memory(CODED_BYTES)
    shown = np.frombuffer(memoryview(host), np.uint8)

    def moved(to: int, source: int) -> None:
        driver.copy(to, source, CODED_BYTES, stream)
        driver.call("cuStreamSynchronize", stream)

    shown[:] = np.frombuffer(raw, np.uint8)
    moved(memory[0], ctypes.addressof(host))
    parts = np.zeros(count, device_codecs.RAW_PART)
    parts["address"] = memory[0] + np.arange(count) * PART_BYTES
    parts["nbytes"] = PART_BYTES
    parts["rows"], parts["channels"], parts["head"], parts["by_token"] = grid
    payload = np.array([(memory[1], CODED_BYTES)], device_codecs.PAYLOAD)
    texts = np.zeros(count, device_codecs.ENCODED_PART)
    lengths = np.array([size for _, size in found])
    texts["codec"], texts["address"] = codec, memory[1] + np.cumsum(lengths) - lengths
    texts["nbytes"], texts["raw_bytes"] = lengths, PART_BYTES
    texts["into"] = memory[2] + np.arange(count) * PART_BYTES

    def encode() -> None:
        coder.encode(codec, 0, parts, payload, stream, by)
        coder.finish()

    starts: list[float] = []  # without the device: the tables, and the calls of the driver

    def decode() -> None:
        started = time.perf_counter()
        coder.decode(codec, 0, texts, stream, by)
        starts.append(time.perf_counter() - started)
        assert not coder.finish()["bad"].any()

    encode()
    moved(ctypes.addressof(host), memory[1])
    assert shown[:encoded].tobytes() == into[:encoded], f"{name}: other bytes than the processor's"
    decode()
    moved(ctypes.addressof(host), memory[2])
    places, at = [], 0
    for taken, size in found:
        places.append((taken, at, size, PART_BYTES))
        at += size
    back = bytearray(len(raw))
    if by is None:
        assert kernels.decode_parts(0, into, places, back) == count
    else:
        known = [(0, *place) for place in places]
        assert kernels.decode_calibrated(native, 0, into, known, False, back) == count
    assert shown.tobytes() == back, f"{name}: decoded to other bytes than the processor's"
    rows = []
    for title, run in (("encode", encode), ("decode", decode)):
        arm, limit = Arm(run), Arm(lambda: moved(memory[2], memory[0]))
        ratios = pairs(arm, limit, rounds, warmups=2)
        row = ratio_row(
            f"{title} {name}, to a copy on the device", ratios, None, CODED_BYTES, arm, limit
        )
        row.more["smaller"] = len(raw) / encoded
        rows.append(row)
        if title == "decode" and name in DECODE_BARS:
            rows.append(at_least(f"decode {name}", row.more["GB/s"], "GB/s", DECODE_BARS[name]))
            start_us = median(starts[-rounds:]) * 1e6
            rows.append(at_most(f"start of decode {name}", start_us, "us", START_BAR_US))
    coder.close()
    shared.close()
    if by is not None:
        by.close()
    for address in memory:
        driver.try_call("cuMemFree_v2", address)
    driver.free_pinned(host)
    driver.try_call("cuStreamDestroy_v2", stream)
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


def in_time(
    parts: Iterable[tuple[str, Callable[[], list[Row]]]],
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> list[Row]:
    """The rows of these parts. A part that would begin too late is left out, and its row misses its bar."""
    rows, until = [], clock() + seconds
    for name, part in parts:
        if clock() < until:
            rows += part()
        else:
            rows.append(Row(f"{name}, left out", seconds, "s", "measured", False))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    parser.add_argument("--rounds", type=int, default=harness.ROUNDS)
    parser.add_argument("--seconds", type=float, default=RUN_S, help="begin no part after that")
    arguments = parser.parse_args()
    try:
        driver = Driver(0)
    except CudaError as error:
        print(f"no GPU here, nothing measured: {error}")
        return 0
    copier = Copier(driver)
    memory = Memory(driver)
    probes = [harness.noise()]
    with tempfile.TemporaryDirectory() as folder, Daemon(Path(folder), WARM) as daemon:
        daemon.wait_for_arena()
        with Client.connect(daemon.socket) as client:
            rounds = arguments.rounds
            parts = [
                (
                    f"copies of {piece // KIB} KiB",
                    partial(copies, client, copier, memory, piece, rounds),
                )
                for piece in PIECES
            ]
            parts += [(name, partial(coded, driver, name, rounds)) for name in CODECS]
            parts.append(("registering", partial(registering, driver, memory)))
            rows = in_time(parts, arguments.seconds)
    probes.append(harness.noise())
    return harness.report(
        "gpu", rows, probes, arguments.out, device=driver.name, architecture=driver.architecture,
        ways=copier.ways,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
