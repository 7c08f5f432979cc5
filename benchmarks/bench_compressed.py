"""Compressed memory: how much more blocks memory holds, what a hit in it takes, and its hit rate on a trace.

    python benchmarks/bench_compressed.py [--model PATH] [--minilm PATH] [--trace FILE] [--only PART]

The effective capacity is the daemon's own figure after blocks with the K and V of a model have filled its
memory: bytes of blocks per byte of slots and compressed memory. A hit is a load of blocks that have no slot,
relative to the load, by two threads, of blocks that have slots. The bar is for the time that it takes longer.
The trace is replayed with the daemon's order of blocks, on a tier of 10% of the blocks, and on one that is
larger by the effective capacity.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np

import harness
from bench_codec import minilm
from bench_cold import ColdDaemon
from bench_warm import buffers
from harness import Arm, Row, at_least, at_most, interval, pairs
from kv import Bert, Floats, Llama, bf16, synthetic
from kvtier import KvSpec, Space
from kvtier_daemon.sim.replay import replay
from kvtier_daemon.sim.trace import read
from kvtier_daemon.tools.sizing import PrefillCost

MIB = 1 << 20
EFFECTIVE = 1.40
TOKENS = 256  # of a block with a model's K and V
ROUNDS = 24
WAIT_MS = 20_000


def blocks_of(parts: list[tuple[Floats, Floats]]) -> Iterator[bytes]:
    """Blocks of consecutive tokens: of each layer K, then V."""
    for first in range(0, len(parts[0][0]) - TOKENS + 1, TOKENS):
        pieces = [part[first : first + TOKENS].reshape(-1) for layer in parts for part in layer]
        yield bf16(np.concatenate(pieces)).tobytes()


def llama_blocks(path: Path) -> tuple[KvSpec, list[bytes]]:
    model = Llama(path)
    letters, found = next(iter(sorted(path.glob("*.txt")))).read_text(), []
    for number in range(4):
        found += blocks_of(list(model.kv(model.tokens(letters[number * 40_000 :], 4 * TOKENS))))
    c = model.config
    spec = KvSpec.dense(
        model="tinylm", layers=c["num_hidden_layers"], kv_heads=c["num_key_value_heads"],
        head_dim=c["head_dim"], dtype="bfloat16", block_tokens=TOKENS, weights="1",
    )  # fmt: skip
    return spec, found


def minilm_blocks(path: Path) -> tuple[KvSpec, list[bytes]]:
    model = Bert(path)
    size, letters = model.config["max_position_embeddings"], (path / "README.md").read_text()
    tokens = model.tokens(letters[: 40 * size * 4])
    found = []
    for start in range(0, min(len(tokens), 4 * size) - size + 1, size):
        found += blocks_of(
            [
                (key.reshape(size, -1), value.reshape(size, -1))
                for key, value in model.kv(tokens[start : start + size])
            ]
        )
    heads = model.config["num_attention_heads"]
    spec = KvSpec.dense(
        model="minilm", layers=model.config["num_hidden_layers"], kv_heads=heads,
        head_dim=model.config["hidden_size"] // heads, dtype="bfloat16", block_tokens=TOKENS,
        weights="1",
    )  # fmt: skip
    return spec, found


def compressing(folder: Path, slots: int, compressed: int, cold: int) -> ColdDaemon:
    os.environ["KVTIER_WARM__COMPRESSED"] = str(compressed)
    try:
        return ColdDaemon(folder, slots, cold, write="through")
    finally:
        del os.environ["KVTIER_WARM__COMPRESSED"]


def settle(daemon: ColdDaemon, blocks: int) -> None:
    """Wait until this number of blocks is on disk, and those that leave their slots next are compressed."""
    daemon.wait_for_written(blocks)
    before, now = -1, 0
    while before != now:
        before = now
        time.sleep(0.03)
        now = daemon.client.stats()["tiers"]["warm"]["compressed"]["compressed"]


def capacity(folder: Path, name: str, spec: KvSpec, blocks: list[bytes]) -> Row:
    """The effective capacity when memory is full of these blocks, each under several keys."""
    assert len(blocks[0]) == spec.block_bytes
    slots, compressed = 32 * MIB, 352 * MIB
    count = 2 * (slots + compressed) // spec.block_bytes
    with compressing(folder, slots, compressed, 2048 * MIB) as daemon:
        daemon.wait_for_arena()
        space = daemon.client.open(spec)
        for number in range(count):
            keys = space.keys([number] * TOKENS)
            assert space.save(keys, [blocks[number % len(blocks)]], wait_s=20).stored == 1
            if number % 4 == 0:
                settle(daemon, number)
        settle(daemon, count)
        found = daemon.client.stats()["tiers"]["warm"]
        # Its blocks are the saved ones.
        target = bytearray(spec.block_bytes)
        for number in range(count - 200, count, 7):
            keys = space.keys([number] * TOKENS)
            assert space.load_into(keys, [target], wait_ms=WAIT_MS) == 1
            assert target == blocks[number % len(blocks)]
        reads = daemon.client.stats()["tiers"]["warm"]["compressed"]["read"]
    one = found["compressed"]
    ratio = one["blocks"] * spec.block_bytes / one["used_bytes"]
    return at_least(
        f"effective capacity, {name}, 1/12 of memory in slots", one["effective"], "x", EFFECTIVE,
        frames=ratio, full=one["used_bytes"] / compressed, dropped=one["dropped"], read=reads,
    )  # fmt: skip


# --- a hit --------------------------------------------------------------------------------------


class Prompts:
    """Prompts that are loaded in turn. When one is loaded, its blocks have left their slots."""

    def __init__(self, space: Space, count: int, blocks: int) -> None:
        self.space, self.blocks = space, blocks
        tokens = space.spec.block_tokens
        tail = list(range(tokens * (blocks - 1)))
        self.keys = [space.keys([1000 * blocks + n] * tokens + tail) for n in range(count)]
        self.last, *self._others = self.keys
        self._turns = itertools.cycle(self._others)

    def load(self, targets: list[memoryview]) -> None:
        self.load_one(next(self._turns), targets)

    def load_one(self, keys: object, targets: list[memoryview]) -> None:
        found = self.space.load_into(keys, targets, threads=2, wait_ms=WAIT_MS)  # type: ignore[arg-type]
        assert found == self.blocks


def hits(folder: Path) -> Iterator[Row]:
    yield hit(folder / "few", 8, 96 * MIB)
    yield hit(folder / "many", 64, 512 * MIB)


def hit(folder: Path, blocks: int, slots: int) -> Row:
    spec = KvSpec.dense(
        model="hits", layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", block_tokens=16,
        weights="1",
    )  # fmt: skip
    size = spec.block_bytes
    count = 3 * slots // (blocks * size)
    drawn = bf16(synthetic(size)).tobytes()  # two blocks
    with compressing(folder, slots, 3 * slots, 8 * slots) as daemon:
        daemon.wait_for_arena()
        prompts = Prompts(daemon.client.open(spec), count, blocks)

        def source(number: int) -> list[bytes]:
            firsts = [64 * (number * blocks + at) % size for at in range(blocks)]
            return [drawn[first : first + size] for first in firsts]

        for number, keys in enumerate(prompts.keys):
            assert prompts.space.save(keys, source(number), wait_s=20).stored == blocks
            settle(daemon, (number + 1) * blocks)
        targets = buffers(blocks, size)
        # All of it is right, and gets a frame, also what left its slot before it had one.
        for number, keys in [*enumerate(prompts.keys)] * 2:
            prompts.load_one(keys, targets)
            assert targets == source(number)
            settle(daemon, 0)

        def raw() -> None:
            prompts.load_one(prompts.last, targets)

        before, cpu_s = daemon.client.stats()["tiers"], list[float]()

        def compressed() -> None:
            began = daemon.cpu_s()
            prompts.load(targets)
            cpu_s.append(daemon.cpu_s() - began)

        one, other = Arm(compressed), Arm(raw, raw)
        ratios = [1 / ratio - 1 for ratio in pairs(one, other, ROUNDS, warmups=2)]
        after = daemon.client.stats()["tiers"]
    from_disk = after["cold"]["states"]["read"] - before["cold"]["states"]["read"]
    read = after["warm"]["compressed"]["read"] - before["warm"]["compressed"]["read"]
    found = f"{read} blocks of compressed memory, {from_disk} of the disk"
    assert read >= ROUNDS * blocks and not from_disk, found
    seconds, raw_s = median(one.seconds), median(other.seconds)
    row = at_most(
        f"what {blocks} compressed blocks of 2 MiB take longer, relative to raw ones",
        median(ratios), "x", 1.15, ms=1e3 * seconds, raw_ms=1e3 * raw_s,
        GB_s=blocks * size / 1e9 / (seconds - raw_s), read=read,
        daemon_cpu_of_copy=median(cpu_s) / median(other.cpu_seconds),
    )  # fmt: skip
    row.low, row.high = interval(ratios)
    return row


# --- a trace ------------------------------------------------------------------------------------


def trace_rows(path: Path) -> Iterator[Row]:
    requests = read(path, 0)
    unique, ratio = requests.native.unique, 0.67
    share = (EFFECTIVE - 1) / (1 / ratio - 1)
    prefill = PrefillCost(1e-4, 0.0)
    for policy in ("auto", "lru", "s3fifo", "prefix"):
        small, large = unique // 10, int(unique / 10 * EFFECTIVE)
        raw = replay(requests, policy, small, prefill).hit_rate
        more = replay(requests, policy, large, prefill).hit_rate
        found = replay(requests, policy, small, prefill, compressed=share, ratio=ratio).hit_rate
        yield at_least(
            f"hit rate of 10% with compressed memory, over that of 14%, {policy}",
            100 * (found - more), "points", -0.3, ten=100 * raw, fourteen=100 * more,
            compressed=100 * found,
        )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where the files go: on a disk")
    parser.add_argument("--model", type=Path, help="a Llama-like checkpoint")
    parser.add_argument("--minilm", type=Path)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--only", default="", help="parts whose name has this")
    parser.add_argument("--out")
    given = parser.parse_args()
    rows: list[Row] = []
    probes = [harness.noise()]

    def parts() -> Iterator[Row]:
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            if given.only in "capacity":
                if given.model is not None:
                    yield capacity(Path(folder) / "a", "tinylm", *llama_blocks(given.model))
                if (found := minilm(given.minilm)) is not None:
                    yield capacity(Path(folder) / "b", "MiniLM", *minilm_blocks(found))
            if given.only in "hits":
                yield from hits(Path(folder))
            if given.only in "trace" and given.trace is not None:
                yield from trace_rows(given.trace)

    for row in parts():
        rows.append(row)
        print(row.line(), flush=True)
    probes.append(harness.noise())
    return harness.report("compressed", rows, probes, given.out)


if __name__ == "__main__":
    sys.exit(main())
