"""Policies: what they hit, of a trace from a file and of made-up ones, and what they cost.

    python benchmarks/bench_policy.py [--trace FILE] [--out results.json] [--quick]

A replay is of one tier: a block is a hit if all before it in its request are, and after a request all its
blocks are there. Times are of this process's CPU.
"""

from __future__ import annotations

import argparse
import random
import struct
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import harness
import traces
from kvtier.policy.base import NATIVE, NO_PARENT, make
from kvtier_kernels import Policy

POINTS = (1, 2, 5, 10, 20)  # percent of a trace's unique blocks
CLASSICS = ("lru", "lfu", "arc", "s3fifo")
NAMES = [name for name in NATIVE if name != "auto"]
BATCH = 1024
GOLDEN = 0x9E3779B97F4A7C15


class Replay:
    """A tier of so many blocks, and how many of those asked for it had."""

    def __init__(self, policy: Policy, blocks: int) -> None:
        self._policy, self._blocks = policy, blocks
        self._at: dict[int, int] = {}
        self._of: list[int] = []
        self._spare: list[int] = []
        self.hits = self.asked = 0

    def request(self, now: float, chain: Sequence[int]) -> None:
        policy, at = self._policy, self._at
        policy.now(now)
        found = array("I")
        for name in chain:
            if name not in at:
                break
            found.append(at[name])
        self.hits += len(found)
        self.asked += len(chain)
        policy.wanted(found.tobytes(), _named(chain[: len(found)]))
        new: list[int] = []
        ids, parents = array("I"), array("I")
        before = found[-1] if found else NO_PARENT
        for name in chain[len(found) :]:
            if name in at:  # behind a gap
                before = at[name]
                found.append(before)
                continue
            if self._spare:
                one = self._spare.pop()
                self._of[one] = name
            else:
                one = len(self._of)
                self._of.append(name)
            at[name] = one
            new.append(name)
            ids.append(one)
            parents.append(before)
            before = one
        policy.added(ids.tobytes(), _named(new), parents.tobytes())
        policy.refreshed(found.tobytes())
        if len(at) > self._blocks:
            victims = array("I", policy.victims(len(at) - self._blocks))
            for one in victims:
                del at[self._of[one]]
            self._spare.extend(victims)
            policy.gone(victims.tobytes())


def _named(chain: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(chain)}Q", *(name * GOLDEN % 2**64 for name in chain))


def rates(
    trace: Sequence[traces.Timed], name: str, points: Sequence[int]
) -> dict[str, list[float]]:
    """Hit rates at these sizes: of all of the trace, and of its second half."""
    unique = len({block for _, chain in trace for block in chain})
    whole, second = [], []
    for percent in points:
        replay = Replay(make(name), unique * percent // 100)
        for at, (now, chain) in enumerate(trace):
            if at == len(trace) // 2:
                half = (replay.hits, replay.asked)
            replay.request(now, chain)
        whole.append(round(replay.hits / replay.asked, 4))
        second.append(round((replay.hits - half[0]) / (replay.asked - half[1]), 4))
    return {"whole": whole, "second half": second}


def optimum(trace: Sequence[traces.Timed], blocks: int) -> float:
    """What a tier that knows the future hits: the block of the latest next use goes, tails first."""
    import heapq

    never = len(trace)
    following: dict[int, int] = {}
    nexts = []
    for at in reversed(range(never)):
        chain = trace[at][1]
        nexts.append([following.get(block, never) for block in chain])
        following.update(dict.fromkeys(chain, at))
    held: dict[int, tuple[int, int]] = {}
    order: list[tuple[int, int, int]] = []
    hits = asked = 0
    for (_, chain), soon in zip(trace, reversed(nexts), strict=True):
        asked += len(chain)
        hits += next((at for at, block in enumerate(chain) if block not in held), len(chain))
        for at, block in enumerate(chain):
            held[block] = (-soon[at], -at)
            heapq.heappush(order, (-soon[at], -at, block))
        while len(held) > blocks:
            when, depth, block = heapq.heappop(order)
            if held.get(block) == (when, depth):
                del held[block]
    return hits / asked


def recorded(path: Path, points: Sequence[int]) -> list[harness.Row]:
    trace = traces.read_timed(path)
    unique = len({block for _, chain in trace for block in chain})
    best = [optimum(trace, unique * percent // 100) for percent in points]
    found = {name: rates(trace, name, points) for name in NAMES}
    lru = found["lru"]["whole"]
    rows = []
    for name in NAMES:
        whole = found[name]["whole"]
        closed = (sum(whole) - sum(lru)) / (sum(best) - sum(lru))
        bar = 0.2 if name == "value" else None
        rows.append(
            harness.Row(
                f"{path.stem}: gap to the optimum closed, {name}", closed, "", f">= {bar}" if bar else "",
                closed >= bar if bar else None, more={**found[name], "optimum": best},
            )
        )  # fmt: skip
    return rows


def made_up(requests: int, points: Sequence[int]) -> list[harness.Row]:
    """Of `value`, how far it is under the best classic at its worst size."""
    rows = []
    for kind, make_trace in traces.KINDS.items():
        trace = make_trace(requests)
        found = {name: rates(trace, name, points)["whole"] for name in NAMES}
        best = [max(found[name][at] for name in CLASSICS) for at in range(len(points))]
        least = min(one - other for one, other in zip(found["value"], best, strict=True))
        rows.append(
            harness.Row(
                f"made up, {kind}: value over the best classic, at its worst", least, "", ">= -0.002",
                least >= -0.002, more=found,
            )
        )  # fmt: skip
    return rows


# --- cost ----------------------------------------------------------------------------------------


class Timed:
    """CPU seconds of calls: all of them, and the longest."""

    def __init__(self) -> None:
        self.cpu_s = self.longest_s = 0.0
        self.items = 0

    def __call__(self, items: int, call: Callable[[], object]) -> None:
        started = time.process_time()
        call()
        took = time.process_time() - started
        self.longest_s = max(self.longest_s, took)
        self.cpu_s += took
        self.items += items

    @property
    def us(self) -> float:
        return self.cpu_s * 1e6 / max(1, self.items)


def costs(name: str, blocks: int, turns: int) -> list[harness.Row]:
    """Chains of 1,024 blocks: old ones are wanted, or the coldest go and a new one comes."""
    chance, policy = random.Random(1), make(name)
    chains: list[tuple[bytes, bytes]] = []
    access, victims, others = Timed(), Timed(), Timed()

    def add(now: float, ids: array[int]) -> None:
        names = chance.randbytes(8 * len(ids))
        parents = array("I", [NO_PARENT, *ids[:-1]]).tobytes()
        others(1, lambda: policy.now(now))
        access(len(ids), lambda: policy.added(ids.tobytes(), names, parents))
        chains.append((ids.tobytes(), names))

    for first in range(0, blocks, BATCH):
        add(first / BATCH / 10, array("I", range(first, first + BATCH)))
    start = blocks / BATCH / 10
    for turn in range(turns):
        ids, names = chance.choice(chains)
        others(1, lambda turn=turn: policy.now(start + turn / 10))
        access(BATCH, lambda ids=ids, names=names: policy.wanted(ids, names))
        if turn % 4 == 0:
            gone: list[bytes] = []
            victims(BATCH, lambda gone=gone: gone.append(policy.victims(BATCH)))
            others(1, lambda gone=gone: policy.gone(gone[0]))
            dead = set(array("I", gone[0]))
            chains[:] = [
                one for one in chains if dead.isdisjoint(array("I", one[0][:4] + one[0][-4:]))
            ]
            add(start + turn / 10, array("I", gone[0]))
    bars = name == "value"
    longest = 1e3 * max(access.longest_s, victims.longest_s, others.longest_s)
    return [
        _cost(f"{name}: an access, in batches of {BATCH}", access.us, "us", 0.2 if bars else None),
        _cost(f"{name}: a victim", victims.us, "us", 2.0 if bars else None),
        _cost(f"{name}: the longest call", longest, "ms", 2.0 if bars else None),
        _cost(f"{name}: memory of a block", policy.memory_bytes() / blocks, "B", None),
    ]


def _cost(name: str, value: float, unit: str, bar: float | None) -> harness.Row:
    if bar is None:
        return harness.Row(name, value, unit)
    return harness.at_most(name, value, unit, bar)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--trace", type=Path, help="a JSON object a line, with timestamp and hash_ids"
    )
    parser.add_argument("--out", help="where the result goes")
    parser.add_argument("--quick", action="store_true", help="less of everything")
    arguments = parser.parse_args()
    probes = [harness.noise()]
    rows = []
    for name in NAMES:
        rows += costs(name, 64 * BATCH if arguments.quick else BATCH * BATCH, 2000)
    requests, points = (1500, (1, 5, 20)) if arguments.quick else (6000, POINTS)
    rows += made_up(requests, points)
    if arguments.trace:
        rows += recorded(arguments.trace, points)
    probes.append(harness.noise())
    return harness.report("policy", rows, probes, arguments.out)


if __name__ == "__main__":
    raise SystemExit(main())
