"""Times the native kernels against memcpy and the plain streaming loop, once they are checked."""

import argparse
import json
import mmap
import os
import platform
import random
import statistics
import struct
import time
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import kvtier_kernels as kernels

MIB = 1 << 20
Arm = Callable[[], object]


def nt_loop(dst, src):
    kernels.nt_loops([dst], [src])


def prefaulted(size: int) -> mmap.mmap:
    """Anonymous memory, every page touched."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, size, mmap.PAGESIZE):
        memory[at] = 1
    return memory


def seconds(arm: Arm) -> float:
    start = time.perf_counter()
    arm()
    return time.perf_counter() - start


def compare(
    name: str, size: int, ours: Arm, base: Arm, bar: float, pairs: int
) -> dict[str, object]:
    """The median of paired ratios: the arms run in turn, so a neighbour's noise hits both."""
    ours(), base()
    times = []
    for i in range(pairs):
        if i % 2 == 0:
            mine = seconds(ours)
            times.append((mine, seconds(base)))
        else:
            theirs = seconds(base)
            times.append((seconds(ours), theirs))
    ratios = [theirs / mine for mine, theirs in times]
    low, middle, high = statistics.quantiles(ratios, n=4)
    rate = size / statistics.median(mine for mine, _ in times) / 1e9
    print(
        f"{name:58} {rate:6.2f} GB/s  x{middle:.3f} [{low:.3f} {high:.3f}]  bar {bar}", flush=True
    )
    return {"name": name, "gb_per_s": rate, "ratio": middle, "iqr": [low, high], "bar": bar}


def microseconds(
    name: str, arm: Arm, bar: float, runs: int, before: Arm = lambda: None
) -> dict[str, object]:
    times = sorted(seconds(arm) for _ in range(runs) if before() is None)
    p50, p99 = times[runs // 2] * 1e6, times[runs * 99 // 100] * 1e6
    print(f"{name:58} {p50:8.1f} us p50  {p99:8.1f} us p99  bar {bar}", flush=True)
    return {"name": name, "p50_us": p50, "p99_us": p99, "bar_us": bar}


def each(function: Callable[[Any, Any], None], pairs: list[tuple[memoryview, memoryview]]) -> None:
    for dst, src in pairs:
        function(dst, src)


def slots_of(total: int, block: int) -> bytes:
    return b"".join(struct.pack("<IIQQ", 0, 0, at, 7) for at in range(0, total, block))


def copies(total: int, pairs: int) -> list[dict[str, object]]:
    arena_fd = os.memfd_create("bench")
    os.ftruncate(arena_fd, total)
    arena = kernels.Mapping(arena_fd, total, True)
    assert arena.populate()
    os.close(arena_fd)
    maps: list[kernels.Mapping | None] = [arena]
    memory = memoryview(prefaulted(total))
    memory[:] = random.Random(1).randbytes(MIB) * (total // MIB)
    results = []
    for block in (2 * MIB, 32 * MIB):
        results += whole_blocks(maps, memory, block, pairs)
    return results + paged_blocks(maps, memory, pairs)


def whole_blocks(
    maps: list[kernels.Mapping | None], memory: memoryview, block: int, pairs: int
) -> list[dict[str, object]]:
    total = len(memory)
    slots = slots_of(total, block)
    parts = [memory[at : at + block] for at in range(0, total, block)]
    views = kernels.views(maps, slots, block, True)
    buffers = kernels.Buffers(parts, 0, len(parts), block, writable=True)
    digests = kernels.copy_in(maps, slots, buffers, 1, True)
    assert digests[:16] == kernels.xxh3_128(parts[0]) and views[-1] == parts[-1]
    assert kernels.copy_out(maps, slots, buffers, 1, True) == digests
    inwards = list(zip(views, parts, strict=True))
    results = []
    for way, move, both in (
        ("copy_in", kernels.copy_in, inwards),
        ("copy_out", kernels.copy_out, [(part, view) for view, part in inwards]),
    ):
        nt, plain = partial(each, nt_loop, both), partial(each, kernels.memcpy, both)
        run = partial(move, maps, slots, buffers)
        for what, arm, base, bar in (
            ("/ nt_loop", partial(run, 1, False), nt, 0.95),
            ("/ memcpy", partial(run, 1, False), plain, 0.0),
            ("with checksum / memcpy", partial(run, 1, True), plain, 1.1),
            ("with checksum / nt_loop", partial(run, 1, True), nt, 0.0),
            ("2 threads / nt_loop", partial(run, 2, False), nt, 0.0),
            ("2 threads with checksum / memcpy", partial(run, 2, True), plain, 0.0),
        ):
            name = f"{way} {block // MIB} MiB {what}"
            results.append(compare(name, total, arm, base, bar, pairs))
    return results


def paged_blocks(
    maps: list[kernels.Mapping | None], memory: memoryview, pairs: int
) -> list[dict[str, object]]:
    total = len(memory)
    results = []
    # An engine's layers: 64 arrays with a piece of 32 KiB per block each, blocks in random order.
    block, piece = 2 * MIB, 32 * 1024
    slots, count = slots_of(total, block), total // block
    layers = [memory[at : at + count * piece] for at in range(0, total, count * piece)]
    pieces = kernels.Pieces(layers, [0] * 64, [piece] * 64, [piece] * 64)
    ids = random.Random(2).sample(range(count), count)
    views = kernels.views(maps, slots, block, True)
    places = [
        (views[i][piece * j : piece * (j + 1)], layers[j][piece * b : piece * (b + 1)])
        for i, b in enumerate(ids)
        for j in range(64)
    ]
    kernels.gather(pieces, ids, maps, slots)
    assert all(slot == source for slot, source in places)
    kernels.scatter(pieces, ids, maps, slots)
    back = [(source, slot) for slot, source in places]
    whole = partial(nt_loop, maps[0], memory)
    for way, move, both in (("gather", kernels.gather, places), ("scatter", kernels.scatter, back)):
        run = partial(move, pieces, ids, maps, slots)
        for what, arm, base, bar in (
            (
                "/ nt_loop on the pieces",
                partial(run, 1, False),
                partial(each, nt_loop, both),
                0.9,
            ),
            ("/ nt_loop on one range", partial(run, 1, False), whole, 0.0),
            (
                "with checksum / memcpy",
                partial(run, 1, True),
                partial(kernels.memcpy, maps[0], memory),
                0.0,
            ),
            ("2 threads / nt_loop on one range", partial(run, 2, False), whole, 0.0),
        ):
            results.append(compare(f"{way} 64 x 32 KiB {what}", total, arm, base, bar, pairs))
    return results


def control(runs: int) -> list[dict[str, object]]:
    fd = os.memfd_create("bench")
    os.ftruncate(fd, 64 * MIB)
    arena = kernels.Mapping(fd, 64 * MIB, True)
    table = kernels.Mapping(fd, 64 * MIB // 512, False)
    slots = b"".join(struct.pack("<IIQQ", 0, 0, 65536 * i, 0) for i in range(256))
    assert kernels.fresh([table], slots) == 256
    secret, parent = bytes(32), bytes(range(32))
    tokens = [random.Random(3).randrange(150_000) for _ in range(1024 * 16)]
    packed = array("I", tokens)
    assert kernels.chain_keys(secret, parent, tokens, 16) == kernels.chain_keys(
        secret, parent, packed, 16
    )
    held: list[memoryview] = []

    def show() -> None:
        held[:] = kernels.views([arena], slots, 65536, True)

    def let_go() -> None:
        assert kernels.release_views(held) == 0

    results = [
        microseconds("views of 256 slots", show, 40, runs, before=held.clear),
        microseconds("release_views of 256", let_go, 0, runs, before=show),
        microseconds("fresh of 256 slots", lambda: kernels.fresh([table], slots), 10, runs),
    ]
    for impl in kernels.implementations("blake3"):
        kernels.force("blake3", impl)
        for name, source, bar in (("list", tokens, 300), ("array", packed, 300)):
            results.append(
                microseconds(
                    f"chain_keys of 1,024 x 16 tokens from a {name}, {impl}",
                    lambda source=source: kernels.chain_keys(secret, parent, source, 16),
                    bar,
                    runs,
                )
            )
    kernels.force("blake3", "auto")
    return results


def device_tables(runs: int) -> list[dict[str, object]]:
    """What a batch of 4,096 parts of 32 KiB for a device costs the host before it calls the driver."""
    count, raw_bytes = 4096, 32 << 10
    batch = kernels.DeviceBatch(4, 0, False, 0, b"", 0)  # q8 of bf16
    places = range(0, count * raw_bytes, raw_bytes)
    texts = b"".join(struct.pack("<Ii4Q", 4, -1, at, 18_448, at, raw_bytes) for at in places)
    raws = b"".join(struct.pack("<2QIi4I", at, raw_bytes, 0, -1, 16, 1024, 128, 0) for at in places)
    payload = struct.pack("<2Q", 0, count * raw_bytes)
    *_, nbytes, _ = batch.to_encode(raws, payload, 0, 0, 0)
    memory = array("Q", bytes(nbytes))
    address = memory.buffer_info()[0]
    return [
        microseconds(
            f"tables of {count:,} parts to decode on a device",
            lambda: batch.to_decode(texts, address, nbytes), 50, runs,
        ),
        microseconds(
            f"tables of {count:,} parts to encode on a device",
            lambda: batch.to_encode(raws, payload, address, nbytes, 0), 50, runs,
        ),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--impl", default="auto", help="implementation of the copies")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    kernels.force("copy", arguments.impl)
    results = control(400) + device_tables(400) + copies(arguments.mib * MIB, arguments.pairs)
    if arguments.json is not None:
        environment = {"cpu": kernels.cpu_features(), "machine": platform.machine()}
        environment |= {"cores": os.cpu_count(), "kernel": platform.release()}
        arguments.json.write_text(
            json.dumps({"environment": environment, "results": results}, indent=1)
        )


if __name__ == "__main__":
    main()
