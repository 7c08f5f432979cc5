"""The planner: its costs, and, on a modelled disk, the cost of write-back for an urgent load, and the
largest cost of a started load relative to recomputing."""

from __future__ import annotations

import argparse
import random
import sys
import time

import harness
from harness import Row, at_most, percentile
from kvtier_daemon.planning import DiskLink, Planner
from kvtier_daemon.tiers.cold.read_queue import GIVE_BACK_BLOCKS
from models.planning import BLOCK, RATE, Load, World

WAITING = 8
URGENT = 600
MOST = 4096  # that one request may ask for


def blocks(name: str, count: int) -> list[str]:
    return [f"{name}.{at}" for at in range(count)]


def waits(writes: bool) -> tuple[list[float], int, float]:
    """Return how long urgent loads take while eight others wait, how much was written meanwhile, and the
    total time."""
    world = World(writes=writes)
    dice = random.Random(1)
    waiting = [Load(f"long {again} {at}", again * 1.5, blocks(f"long{again}.{at}", 128), 20.0)
               for again in range(40) for at in range(WAITING)]  # fmt: skip
    urgent = [Load(f"urgent {at}", 0.02 + (at + dice.random() / 2) / 10, blocks(f"u{at}", 16), 0.5)
              for at in range(URGENT)]  # fmt: skip
    world.run(waiting + urgent)
    return [load.over_at for load in urgent], world.disk.written, world.now - world.start


def write_back() -> list[Row]:
    alone, _, _ = waits(writes=False)
    beside, written, took = waits(writes=True)
    share = percentile(beside, 0.99) / percentile(alone, 0.99)
    name = "8 loads on 3 GB/s: p99 of an urgent load, with write-back"
    return [at_most(name, share, "x without", 1.2, alone_ms=percentile(alone, 0.99) * 1000,
                    written_gb_s=written / took / 1e9)]  # fmt: skip


def beside_recompute() -> list[Row]:
    """Crowds of loads, some of which recompute beats: how much longer than it a load takes that is begun."""
    worst, begun, refused = 0.0, 0, 0
    for seed in range(200):
        dice, at, loads = random.Random(seed), 0.0, []
        for number in range(60):
            count = dice.choice([1, 4, 16, 64, 200])
            at += dice.expovariate(RATE / (60 * BLOCK))
            recompute_s = 0.02 + dice.choice([0.5, 1.1, 2, 5, 20]) * count * BLOCK / RATE
            loads.append(Load(f"{number}", at, blocks(f"{number}", count), recompute_s))
        World(writes=seed % 2 == 0).run(loads)
        for load in loads:
            assert load.verdict is not None
            begun, refused = begun + load.verdict.load, refused + (not load.verdict.load)
            if load.verdict.load:
                worst = max(worst, load.over_at / load.recompute_s)
    name = "12,000 loads: the slowest that was begun, relative to recompute"
    return [at_most(name, worst, "x", 1.05, begun=begun, refused=refused)]


def costs() -> list[Row]:
    """With a fake clock, so that nothing moves but what is asked."""
    planner, each = Planner(lambda: 0.0, dice=lambda: 1.0), 64
    link, weighs, adds = DiskLink(lambda: 0.0), [], []
    for number in range(256):
        fresh = [((number, block), link, 4096) for block in range(each)]
        began = time.perf_counter()
        planner.weigh(number, {link: each * 4096}, recompute_s=100.0)
        weighed = time.perf_counter()
        planner.add(number, fresh)
        weighs.append(weighed - began)
        adds.append((time.perf_counter() - weighed) / each)
    began = time.perf_counter()
    names = planner.order.take(link, 1024)
    for name in names:
        planner.ended(name, good=True)
    took = (time.perf_counter() - began) / len(names)
    return [
        Row("a request, with 256 waiting: weighed in", percentile(weighs[200:], 0.5) * 1e6, "us"),
        Row("a block: asked for, handed over, ended", (percentile(adds, 0.5) + took) * 1e6, "us"),
    ]


def stalls() -> list[Row]:
    """Measure long calls: the event loop serves no client during a call."""
    weighs, goes = [], []
    for _ in range(9):
        planner, link = Planner(lambda: 0.0, dice=lambda: 1.0), DiskLink(lambda: 0.0)
        planner.weigh(1, {link: MOST * 4096})
        planner.add(1, [(block, link, 4096) for block in range(MOST)])
        began = time.perf_counter()
        planner.weigh(2, {}, iter(range(MOST)), recompute_s=100.0)
        weighs.append(time.perf_counter() - began)
        planner.add(2, [], range(MOST))
        began = time.perf_counter()
        planner.cancel(1, GIVE_BACK_BLOCKS)
        goes.append(time.perf_counter() - began)
        while planner.is_cancelling:
            began = time.perf_counter()
            planner.continue_cancel(GIVE_BACK_BLOCKS)
            goes[-1] = max(goes[-1], time.perf_counter() - began)
    return [
        at_most(f"a request that finds {MOST:,} blocks on their way: weighed in",
                percentile(weighs, 0.5) * 1000, "ms", 2.0),
        at_most(f"a request that waits for {MOST:,} blocks, as another: the longest piece of calling back",
                percentile(goes, 0.5) * 1000, "ms", 2.0),
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    probes = [harness.noise()]
    rows = write_back() + beside_recompute() + costs() + stalls()
    probes.append(harness.noise())
    return harness.report("planner", rows, probes, arguments.out)


if __name__ == "__main__":
    sys.exit(main())
