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
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import harness
from bench_cold import ColdDaemon, noise_of
from bench_warm import buffers
from harness import Arm, Daemon, Row, at_most, interval, pairs
from kvtier import Client, Group, Keys, KvSpec, Space, load_tokens

MIB = 1 << 20
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

    def chosen() -> None:
        for layer, choice in enumerate(choices):
            assert load_tokens(space, keys, choice, target, layers=[layer], deadline_ms=10_000)

    def with_indexer() -> None:
        for layer, choice in enumerate(choices):
            assert space.load_into(keys, indexer_part(layer), group=1, layers=[layer]) == count
            assert load_tokens(space, keys, choice, target, layers=[layer], deadline_ms=10_000)

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
        yield row(title, Arm(with_indexer), Arm(all_of_it), None)
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


class Blocks:
    """Single blocks that are only on disk. Each load of a whole block takes another one, because then the
    block is in memory."""

    def __init__(self, space: Space, count: int) -> None:
        self.space = space
        self.keys = [space.keys([n] * 16) for n in range(count)]
        self.fresh = itertools.chain(self.keys)

    def load(self, next_keys: Callable[[], Keys], target: Any, **options: Any) -> None:
        assert self.space.load_into(next_keys(), target, wait_ms=WAIT_MS, **options) == 1


def disk(folder: Path) -> Iterator[Row]:
    count = 4 * ROUNDS + 16
    size = 2 * count * 2 * MIB
    options: dict[str, Any] = {"write": "through", "options": PERMIT}
    sources = noise_of(count * 2 * MIB)
    with ColdDaemon(folder, size, 2 * size, **options) as daemon:
        daemon.wait_for_arena()
        space = daemon.client.open(gqa())
        blocks = Blocks(space, count)
        for number, keys in enumerate(blocks.keys):
            one = sources[number * 2 * MIB : (number + 1) * 2 * MIB]
            assert space.save(keys, [one]).stored == 1
        daemon.wait_for_written(count)
    with ColdDaemon(folder, size, 2 * size, **options) as daemon:
        daemon.wait_for_arena()
        space = daemon.client.open(gqa())
        until = harness.time.monotonic() + 60
        while daemon.client.stats()["tiers"]["cold"]["blocks"] < count:
            assert harness.time.monotonic() < until
            harness.time.sleep(0.05)
        yield from disk_rows(Blocks(space, count), sources, count)


def disk_rows(blocks: Blocks, sources: memoryview, count: int) -> Iterator[Row]:
    size = 2 * MIB // LAYERS
    (part,), (target,) = buffers(1, size), buffers(1, 2 * MIB)
    numbers = itertools.cycle(range(LAYERS))
    # The last ones stay on disk: parts are read from these.
    cold = itertools.cycle(blocks.keys[-2 * ROUNDS :])
    for at, keys in list(enumerate(blocks.keys))[-2 * ROUNDS :]:
        blocks.load(lambda keys=keys: keys, part, layers=[7])  # type: ignore[misc]
        start = at * 2 * MIB + 7 * size
        assert part == sources[start : start + size]
    name = f"one layer of {LAYERS} of one block of 2 MiB on disk, relative to the block"
    arms: dict[str, tuple[Arm, float | None]] = {
        "through the daemon's memory": (
            Arm(lambda: blocks.load(lambda: next(blocks.fresh), target)), 0.25,
        ),
        "read by the client too": (
            Arm(lambda: blocks.load(lambda: next(cold), target, layers=range(LAYERS))), None,
        ),
    }  # fmt: skip
    for how, (whole, bar) in arms.items():
        one = Arm(lambda: blocks.load(lambda: next(cold), part, layers=[next(numbers)]))
        yield row(f"{name} {how}", one, whole, bar)
    ready = blocks.space.match(blocks.keys[-1]).ready
    assert ready == 0, "the blocks that parts were read from are still only on disk"


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
