"""Parts of blocks relative to whole ones: a layer from memory and from disk, and the tokens that attention to
the top k selects.

A row is the median over rounds of the time of the part, divided by the time of the whole in the same round.
Before a row is measured, the part is compared with the same bytes of the whole.

The tokens of a top-k read are drawn as indexers select them: of 5% of a context, a quarter are its last
tokens, half are runs around a few places, a quarter are anywhere. Each layer has its own.
"""

from __future__ import annotations

import argparse
import array
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import harness
from bench_cold import ColdDaemon, noise_of
from bench_warm import buffers
from harness import Arm, Daemon, Row, at_most, interval, pairs
from kvtier import Client, Group, Keys, KvSpec, Space, load_tokens

MIB, GIB = 1 << 20, 1 << 30
LAYERS = 32
ROUNDS = 15
SHARE = 0.05
PERMIT = '\n[tenants.default]\nuids = ["*"]\ndirect_reads = true\n'
WAIT_MS = 10_000


def row(name: str, part: Arm, whole: Arm, bar: float | None, rounds: int = ROUNDS) -> Row:
    ratios = [1 / ratio for ratio in pairs(part, whole, rounds, warmups=2)]
    low, high = interval(ratios)
    value = median(ratios)
    more = {"ms": 1e3 * median(part.seconds), "whole ms": 1e3 * median(whole.seconds)}
    more["CPU x"] = median(part.cpu_seconds) / max(1e-6, median(whole.cpu_seconds))
    if bar is None:
        return Row(name, value, "x", low=low, high=high, more=more)
    found = at_most(name, value, "x", bar, **more)
    found.low, found.high = low, high
    return found


def gqa() -> KvSpec:
    """Blocks of 2 MiB with 32 layers."""
    return KvSpec.dense(
        model="partial", layers=LAYERS, kv_heads=8, head_dim=128, dtype="bfloat16", block_tokens=16,
        weights="1",
    )  # fmt: skip


# --- from memory --------------------------------------------------------------------------------


def layers(client: Client, count: int) -> Iterator[Row]:
    space = client.open(gqa())
    keys = space.keys(list(range(16 * count)))
    sources, targets = buffers(count, space.block_bytes), buffers(count, space.block_bytes, 2)
    assert space.save(keys, sources).stored == count
    size = space.block_bytes // LAYERS
    parts = buffers(count, size)

    def one(number: int) -> None:
        assert space.load_into(keys, parts, layers=[number]) == count

    def whole() -> None:
        assert space.load_into(keys, targets) == count

    for number in range(LAYERS):
        one(number)
        span = slice(number * size, (number + 1) * size)
        assert all(part == source[span] for part, source in zip(parts, sources, strict=True))
    numbers = itertools.cycle(range(LAYERS))
    name = f"one layer of {LAYERS} of {count} blocks of 2 MiB in memory, relative to the blocks"
    yield row(name, Arm(lambda: one(next(numbers))), Arm(whole), 1 / 16)
    single, part, target = keys[:1], parts[:1], targets[:1]
    yield row(
        f"one layer of {LAYERS} of one block of 2 MiB in memory, the request included",
        Arm(lambda: _ignore(space.load_into(single, part, layers=[next(numbers)]))),
        Arm(lambda: _ignore(space.load_into(single, target))), None, 15 * ROUNDS,
    )  # fmt: skip
    space.forget(keys)


def _ignore(_: object) -> None:
    """An Arm returns nothing."""


def selected(tokens: int, chance: random.Random) -> array.array[int]:
    """The tokens that one layer selects, in the order of their places."""
    wanted = int(SHARE * tokens)
    found = set(range(tokens - wanted // 4, tokens))
    while len(found) < 3 * wanted // 4:
        start = chance.randrange(tokens)
        found.update(range(start, min(tokens, start + chance.randint(4, 32))))
    while len(found) < wanted:
        found.add(chance.randrange(tokens))
    return array.array("I", sorted(found)[-wanted:])


def top_k(
    client: Client, name: str, groups: list[Group], block_tokens: int, count: int
) -> Iterator[Row]:
    """Rows for one kind of model: `groups[0]` has the tokens, `groups[1]` the keys of the indexer, if any."""
    spec = KvSpec.groups(
        groups, model=f"partial {name}", dtype="bfloat16", block_tokens=block_tokens, weights="1"
    )
    space, tokens = client.open(spec), count * block_tokens
    keys = space.keys(list(range(tokens)))
    nbytes = [space.group_block_bytes(group) for group in range(len(groups))]
    whole = [buffers(count, size, 3 + group) for group, size in enumerate(nbytes)]
    for group, sources in enumerate(whole):
        assert space.save(keys, sources, group).stored == count
    chance = random.Random(1)
    choices = [selected(tokens, chance) for _ in range(groups[0].layers)]
    token = nbytes[0] // (groups[0].layers * groups[0].parts * block_tokens)
    (target,) = buffers(1, groups[0].parts * len(choices[0]) * token)
    indexer = buffers(count, nbytes[1]) if len(groups) > 1 else []

    def chosen(before: Callable[[int], None] = lambda layer: None) -> None:
        lease = space.lease(keys, 10_000)
        for layer, choice in enumerate(choices):
            before(layer)
            assert load_tokens(space, lease, choice, target, layers=[layer])
        lease.release()

    def indexer_keys(layer: int) -> None:
        assert space.load_into(keys, indexer_part(layer), 10_000, group=1, layers=[layer]) == count

    def indexer_part(layer: int) -> list[memoryview]:
        size = nbytes[1] // groups[1].layers
        return [block[:size] for block in indexer]

    def all_of_it() -> None:
        assert space.load_into(keys, whole_targets, deadline_ms=10_000) == count

    whole_targets = buffers(count, nbytes[0], 9)
    for layer, choice in enumerate(choices):
        assert load_tokens(space, keys, choice, target, layers=[layer])
        check(whole[0], target, layer, choice, block_tokens, token, groups[0].parts)
    title = f"{SHARE:.0%} of the tokens of {count} blocks, {name}, each layer its own"
    yield row(f"{title}, relative to all", Arm(chosen), Arm(all_of_it), 0.15)
    if indexer:
        title += ", and before that all keys of its indexer"
        yield row(title, Arm(lambda: chosen(indexer_keys)), Arm(all_of_it), None)
    space.forget(keys)


def check(
    blocks: list[memoryview], target: memoryview, layer: int, tokens: array.array[int], block_tokens: int,
    nbytes: int, parts: int,
) -> None:  # fmt: skip
    for part in range(parts):
        for number, at in enumerate(tokens):
            block, within = divmod(at, block_tokens)
            start = ((layer * parts + part) * block_tokens + within) * nbytes
            found = (part * len(tokens) + number) * nbytes
            assert target[found : found + nbytes] == blocks[block][start : start + nbytes]


MLA = [
    Group(layers=8, kv_heads=1, head_dim=576, parts=1),
    Group(layers=8, kv_heads=1, head_dim=64, parts=1),  # 128 bytes per token, as keys in fp8
]
GQA = [Group(layers=8, kv_heads=8, head_dim=128)]


def memory(folder: Path) -> Iterator[Row]:
    with Daemon(folder, "2560MiB") as daemon:
        daemon.wait_for_arena()
        with Client.connect(daemon.socket) as client:
            yield from layers(client, 256)
            yield from top_k(client, "MLA with an indexer", MLA, 64, 1024)
            yield from top_k(client, "K and V of 8 heads", GQA, 16, 1024)


# --- from disk ----------------------------------------------------------------------------------


SINGLES, CHAINS, LONG = 45, 8, 64


class OnDisk:
    """Prefixes that are only on disk. A load of whole blocks takes the next one, because its blocks are then
    in memory; the last ones stay on disk, and parts are read from these."""

    def __init__(self, space: Space, count: int, blocks: int, kept: int) -> None:
        self.space, self.blocks = space, blocks
        tail = list(range(16 * (blocks - 1)))
        self.keys = [space.keys([blocks * 1000 + n] * 16 + tail) for n in range(count + kept)]
        self.kept = self.keys[-kept:]
        self._fresh, self._cold = iter(self.keys), itertools.cycle(self.kept)

    def whole(self, targets: Any) -> None:
        self._load(next(self._fresh), targets)

    def part(self, targets: Any, layers: Sequence[int]) -> None:
        self._load(next(self._cold), targets, layers=layers)

    def _load(self, keys: Keys, targets: Any, **options: Any) -> None:
        assert self.space.load_into(keys, targets, wait_ms=WAIT_MS, **options) == self.blocks


def disk(folder: Path) -> Iterator[Row]:
    size = 3 * GIB
    options: dict[str, Any] = {"write": "through", "options": PERMIT}
    source = noise_of(2 * MIB)  # a layer of one block is not that of another
    with ColdDaemon(folder, size, size, **options) as daemon:
        daemon.wait_for_arena()
        blocks = 0
        for one in prefixes(daemon.client.open(gqa())):
            for keys in one.keys:
                assert one.space.save(keys, [source] * one.blocks).stored == one.blocks
            blocks += len(one.keys) * one.blocks
        daemon.wait_for_written(blocks)
    with ColdDaemon(folder, size, size, **options) as daemon:
        daemon.wait_for_arena()
        until = time.monotonic() + 60
        while daemon.client.stats()["tiers"]["cold"]["blocks"] < blocks:
            assert time.monotonic() < until
            time.sleep(0.05)
        for one in prefixes(daemon.client.open(gqa())):
            yield from disk_rows(one, source)


def prefixes(space: Space) -> tuple[OnDisk, OnDisk]:
    return OnDisk(space, SINGLES + 2, 1, 20), OnDisk(space, CHAINS + 2, LONG, 2)


def disk_rows(on: OnDisk, source: memoryview) -> Iterator[Row]:
    size, numbers = 2 * MIB // LAYERS, itertools.cycle(range(LAYERS))
    parts, targets = buffers(on.blocks, size), buffers(on.blocks, 2 * MIB)
    for layer in range(LAYERS):
        on.part(parts, [layer])
        assert all(part == source[layer * size : (layer + 1) * size] for part in parts)
    which = "one block" if on.blocks == 1 else f"{on.blocks} blocks"
    name = f"one layer of {LAYERS} of {which} of 2 MiB on disk"
    rounds = SINGLES if on.blocks == 1 else CHAINS
    one = Arm(lambda: on.part(parts, [next(numbers)]))
    yield row(
        f"{name}, relative to the load of it all", one, Arm(lambda: on.whole(targets)), 0.25, rounds
    )
    assert on.space.locate(on.kept)[0].memory == 0, "parts were read from disk"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where the files go: on the disk in question")
    parser.add_argument("--only", default="", help="parts whose name has this")
    parser.add_argument("--out")
    given = parser.parse_args()
    rows: list[Row] = []
    probes = [harness.noise()]
    for name, part in {"memory": memory, "disk": disk}.items():
        if given.only in name:
            with tempfile.TemporaryDirectory(dir=given.folder) as folder:
                for found in part(Path(folder)):
                    rows.append(found)
                    print(found.line(), flush=True)
    probes.append(harness.noise())
    return harness.report("partial", rows, probes, given.out)


if __name__ == "__main__":
    sys.exit(main())
