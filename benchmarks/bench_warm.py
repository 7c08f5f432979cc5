"""The warm tier's data path: saves and loads through a real daemon, against the machine's own copies.

"The best copy loop" is the fastest of glibc's memcpy and a plain loop of streaming stores, by one thread or
by two (by one, where one thread saves or loads): all are tried first, and the row says which. "NT loop"
is the second of these by one thread. All run on buffers of the same sizes in the same run, anonymous, faulted
in and in huge pages.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import harness
from harness import Arm, Daemon, Row, pairs, ratio_row
from kvtier import Client, KvSpec, Space
from kvtier_kernels import Pieces, gather, nt_loops, scatter
from kvtier_kernels import views as slot_views

MIB = 1 << 20
REQUEST_BYTES = 512 * MIB
WARM = "3GiB"
TOKENS = 16
prompts = itertools.count(1)


def spec_of(block_bytes: int) -> KvSpec:
    # 1 layer of 16 tokens: heads are chosen so that a block has the wanted size.
    heads = block_bytes // (2 * 128 * 2 * TOKENS)
    return KvSpec.dense(
        model=f"bench-{block_bytes}", layers=1, kv_heads=heads, head_dim=128, dtype="bfloat16",
        block_tokens=TOKENS, weights="rev:1",
    )  # fmt: skip


def buffers(count: int, nbytes: int, seed: int = 1) -> list[memoryview]:
    """Anonymous, in huge pages, page-aligned as an engine's are, faulted in, and all different."""
    memory = mmap.mmap(-1, count * nbytes)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = memoryview(memory)
    for at in range(0, len(whole), 4096):
        whole[at : at + 8] = (at * seed + 12345).to_bytes(8, "little")
    return [whole[at * nbytes : (at + 1) * nbytes] for at in range(count)]


def nothing() -> None:
    """Before a round that needs no preparation."""


def fresh_keys(space: Space, blocks: int) -> Any:
    start = next(prompts)
    return space.keys([start] * TOKENS + list(range(TOKENS * (blocks - 1))))


def saves(client: Client, block_bytes: int, rounds: int) -> list[Row]:
    from kvtier_daemon.tools import (
        machine_limits,  # not at the top: `compare.py` measures trees without it
    )

    rows = []
    spec = spec_of(block_bytes)
    assert spec.block_bytes == block_bytes
    space = client.open(spec)
    count = REQUEST_BYTES // block_bytes
    sources, targets = buffers(count, block_bytes), buffers(count, block_bytes)
    label = f"{block_bytes // MIB} MiB blocks"
    todo: dict[str, Any] = {}

    def prepare() -> None:
        todo["keys"] = fresh_keys(space, count)

    def save(checksum: bool, threads: int | None = None) -> Callable[[], None]:
        def run() -> None:
            saved = space.save(todo["keys"], sources, checksum=checksum, threads=threads)
            assert saved.stored == count

        return run

    # Valid first: what comes back is what went in.
    prepare()
    save(True)()
    assert space.load_into(todo["keys"], targets) == count
    assert all(a == b for a, b in zip(targets, sources, strict=True))
    for _ in range(4):  # fill the tier: steady state evicts
        prepare()
        save(False)()

    def load(threads: int | None = None) -> Callable[[], None]:
        def run() -> None:
            assert space.load_into(todo["keys"], targets, threads=threads) == count

        return run

    every, alone = (
        machine_limits.best(machine_limits.copies(targets, sources, most)) for most in (2, 1)
    )
    for name, run, before, (setting, limit), bar in (
        ("save", save(False), prepare, every, 0.95),
        ("save by one thread", save(False, 1), prepare, alone, None),
        ("save with checksum", save(True), prepare, every, 0.95),
        ("save with checksum by one thread", save(True, 1), prepare, alone, None),
        ("load", load(), nothing, every, 0.95),
        ("load by one thread", load(1), nothing, alone, None),
    ):
        one, other = Arm(run, before), Arm(limit)
        ratios = pairs(one, other, rounds, warmups=2)
        title = f"{name}, {label}, to the best copy loop"
        rows.append(ratio_row(title, ratios, bar, REQUEST_BYTES, one, other))
        rows[-1].more["limit"] = setting
    return rows


def verified(socket: str, rounds: int) -> list[Row]:
    """Loads whose blocks are compared with their checksums, to the same loads without that."""
    with Client.connect(socket, verify=True) as checking, Client.connect(socket) as trusting:
        return [
            row
            for block_bytes in (2 * MIB, 32 * MIB)
            for row in _verified(checking, trusting, block_bytes, rounds)
        ]


def _verified(checking: Client, trusting: Client, block_bytes: int, rounds: int) -> list[Row]:
    count = REQUEST_BYTES // block_bytes
    space, unverified = (one.open(spec_of(block_bytes)) for one in (checking, trusting))
    sources, targets = buffers(count, block_bytes), buffers(count, block_bytes)
    keys = fresh_keys(space, count)
    assert space.save(keys, sources).stored == count

    def load(space: Space, threads: int | None) -> Callable[[], None]:
        def run() -> None:
            assert space.load_into(keys, targets, threads=threads) == count

        return run

    def as_views() -> None:
        with space.load(keys) as blocks:
            assert len(blocks) == count

    load(space, None)()
    assert all(a == b for a, b in zip(targets, sources, strict=True))
    label, rows = f"{block_bytes // MIB} MiB blocks", []
    for title, run, other_run in (
        (f"verified load, {label}, to it unverified", load(space, None), load(unverified, None)),
        (
            f"verified load by one thread, {label}, to it unverified",
            load(space, 1),
            load(unverified, 1),
        ),
        (f"verified views, {label}, to a copy by one thread", as_views, load(unverified, 1)),
    ):
        one, other = Arm(run), Arm(other_run)
        ratios = pairs(one, other, rounds, warmups=2)
        rows.append(ratio_row(title, ratios, None, REQUEST_BYTES, one, other))
        rows[-1].more["cpu ratio"] = median(one.cpu_seconds) / median(other.cpu_seconds)
    return rows


def views(client: Client, rounds: int) -> list[Row]:
    """256 blocks as read-only views: match, lease, map, release."""
    space = client.open(spec_of(2 * MIB))
    keys = fresh_keys(space, 256)
    assert space.save(keys, bytearray(512 * MIB), checksum=False).stored == 256
    times = []
    for _ in range(200 * rounds):
        started = time.perf_counter()
        with space.load(keys) as blocks:
            count = len(blocks)
        times.append(time.perf_counter() - started)
        assert count == 256
    p50, p99 = median(times) * 1e6, harness.percentile(times, 0.99) * 1e6
    return [
        harness.at_most("load as views, 256 blocks, release included", p50, "us", 150, p99_us=p99)
    ]


def pieces(client: Client, rounds: int) -> list[Row]:
    """64 strided pieces of 32 KiB a block: an engine's paged layers to one slot and back."""
    layers, piece, count = 64, 32 * 1024, 128
    block_bytes = layers * piece
    pool = [memoryview(bytearray(count * piece * 2)) for _ in range(layers)]
    for number, layer in enumerate(pool):
        for at in range(0, len(layer), 4096):
            layer[at : at + 8] = (at * 64 + number).to_bytes(8, "little")
    paged = Pieces(pool, [0] * layers, [piece * 2] * layers, [piece] * layers)
    space = client.open(spec_of(block_bytes))
    ids = list(range(count))
    targets = buffers(count, block_bytes)
    flat = [
        (targets[block][layer * piece : (layer + 1) * piece],
         pool[layer][block * piece * 2 : block * piece * 2 + piece])
        for block in ids for layer in range(layers)
    ]  # fmt: skip
    packed = [target for target, _ in flat], [source for _, source in flat]
    keys = fresh_keys(space, count)
    extents = client.link.arena.extents
    rows = []
    with space.reserve(keys) as saving:
        assert len(saving) == count

        def run_gather() -> None:
            gather(paged, ids, extents, saving.slots, 1, False)

        def run_scatter() -> None:
            scatter(paged, ids, extents, saving.slots, 1, False)

        def limit_in() -> None:
            nt_loops(*packed)

        def limit_out() -> None:
            nt_loops(*packed[::-1])

        run_gather()
        limit_in()
        slots = slot_views(extents, saving.slots, block_bytes, False)
        assert all(bytes(slots[n]) == bytes(targets[n]) for n in range(0, count, 17))
        del slots
        for name, run, limit in (
            ("gather", run_gather, limit_in),
            ("scatter", run_scatter, limit_out),
        ):
            one, other = Arm(run), Arm(limit)
            ratios = pairs(one, other, rounds, warmups=2)
            rows.append(
                ratio_row(f"{name}, 64 pieces of 32 KiB a block, to NT loop", ratios, 0.9,
                          count * block_bytes, one, other)
            )  # fmt: skip
    return rows


# --- four clients at once -----------------------------------------------------------------------

WINDOW_S = 0.8
CLIENT_BLOCKS = 128


def run_worker(role: str, socket: str, number: int) -> None:
    """A process that, at each line of stdin, works for WINDOW_S and prints how many bytes it moved."""
    block = 2 * MIB
    sources, targets = buffers(CLIENT_BLOCKS, block, number), buffers(CLIENT_BLOCKS, block)
    if role == "copy":
        from kvtier_daemon.tools import machine_limits

        _, copy = machine_limits.best(machine_limits.copies(targets, sources, 1))

        def work() -> int:
            copy()
            return CLIENT_BLOCKS * block
    else:
        client = Client.connect(socket)
        space = client.open(spec_of(block))
        own = space.keys([10**9 + number] * TOKENS * CLIENT_BLOCKS)
        turn = itertools.count()
        if role == "load":
            assert len(space.save(own, sources)) == CLIENT_BLOCKS

        def work() -> int:
            if role == "load":
                assert space.load_into(own, targets, deadline_ms=5000) == CLIENT_BLOCKS
                return CLIENT_BLOCKS * block
            name = [2 * 10**9 + number, next(turn)] * (TOKENS // 2)
            keys = space.keys(name + list(range(TOKENS * (CLIENT_BLOCKS - 1))))
            return space.save(keys, sources, checksum=True).stored * block

    work()
    time.sleep(1.0)  # the mapping is faulted in by a thread
    print("ready", flush=True)
    for _ in sys.stdin:
        moved, started = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - started) < WINDOW_S:
            moved += work()
        print(json.dumps([moved, elapsed]), flush=True)


def four_clients(daemon: Daemon, rounds: int) -> list[Row]:
    def start(roles: list[str]) -> list[subprocess.Popen[str]]:
        workers = [
            subprocess.Popen(
                [sys.executable, __file__, "--worker", role, daemon.socket, str(number)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for number, role in enumerate(roles)
        ]  # fmt: skip
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
        return workers

    def window(workers: list[subprocess.Popen[str]]) -> float:
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        total = 0.0
        for worker in workers:
            assert worker.stdout is not None
            moved, elapsed = json.loads(worker.stdout.readline())
            total += moved / elapsed
        return total / 1e9

    clients, copiers = start(["save", "save", "load", "load"]), start(["copy", "copy"])
    try:
        window(clients), window(copiers)
        ratios, ours, machine_limits = [], [], []
        for number in range(rounds):
            first, second = (clients, copiers) if number % 2 == 0 else (copiers, clients)
            measured = {id(first): window(first), id(second): window(second)}
            ours.append(measured[id(clients)])
            machine_limits.append(measured[id(copiers)])
            ratios.append(ours[-1] / machine_limits[-1])
    finally:
        for worker in clients + copiers:
            assert worker.stdin is not None
            worker.stdin.close()
            worker.wait(20)
    low, high = harness.interval(ratios)
    value = median(ratios)
    more = {"GB/s": median(ours), "limit GB/s": median(machine_limits)}
    name = "four clients, half saving with checksums, to two best copy loops"
    return [Row(name, value, "x", ">= 0.9", value >= 0.9, low, high, more)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    parser.add_argument("--rounds", type=int, default=harness.ROUNDS)
    parser.add_argument("--worker", nargs=3, metavar=("ROLE", "SOCKET", "NUMBER"))
    arguments = parser.parse_args()
    if arguments.worker:
        role, socket, number = arguments.worker
        run_worker(role, socket, int(number))
        return 0
    rows: list[Row] = []
    probes = [harness.noise()]
    with tempfile.TemporaryDirectory() as folder, Daemon(Path(folder), WARM) as daemon:
        daemon.wait_for_arena()
        with Client.connect(daemon.socket) as client:
            time.sleep(1.5)  # the mapping is faulted in by a thread
            for block_bytes in (2 * MIB, 32 * MIB):
                rows += saves(client, block_bytes, arguments.rounds)
            rows += views(client, arguments.rounds)
            rows += pieces(client, arguments.rounds)
        rows += verified(daemon.socket, arguments.rounds)
        rows += four_clients(daemon, arguments.rounds)
    probes.append(harness.noise())
    return harness.report("warm", rows, probes, arguments.out)


if __name__ == "__main__":
    sys.exit(main())
