"""The simulator: block accesses per second of a replay under each policy, relative to numbering the trace's
blocks.

    python benchmarks/bench_sim.py [--trace FILE] [--policies lru,auto] [--out FILE]

Without a file the trace is made up: 2,000,000 block accesses and more. A file is repeated under new names
until it has as many. Each replay is held against its twin on the first requests before it is timed.
"""

from __future__ import annotations

import argparse
import sys
from array import array
from collections.abc import Callable
from pathlib import Path

import traces
from harness import Arm, Row, at_least, noise, pairs, report
from kvtier_daemon.catalog.policy import make
from kvtier_kernels import Optimum, Replay, Trace
from models.kernels import replay as reference

ACCESSES = 2_000_000
SHARES = (1, 5, 20)  # percent of the unique blocks
BARS = {"lru": 2e6, "auto": 5e5}
CHECKED = 300
ROUNDS = 5
SECONDS_EACH = 0.3  # between two requests


def packed(requests: list[traces.Request]) -> tuple[bytes, bytes, bytes]:
    names = array("Q", [name for request in requests for name in request])
    seconds = array("d", [number * SECONDS_EACH for number in range(len(requests))])
    return names.tobytes(), array("I", map(len, requests)).tobytes(), seconds.tobytes()


def repeated(requests: list[traces.Request]) -> list[traces.Request]:
    """The same again under other names, until there are enough accesses."""
    step = 1 + max(max(request) for request in requests if request)
    have = sum(map(len, requests))
    rounds = -(-ACCESSES // have)
    return [[name + step * turn for name in one] for turn in range(rounds) for one in requests]


def void(_: object) -> None:
    """Arms return nothing."""


def check(requests: list[traces.Request], policy: str) -> None:
    """The native replay does what its twin does, with another object of the same policy."""
    few = requests[:CHECKED]
    numbers: dict[int, int] = {}
    small = [[numbers.setdefault(name, len(numbers)) for name in request] for request in few]
    blocks = max(1, len(numbers) // 10)
    seconds = [number * SECONDS_EACH for number in range(len(few))]
    told = array("I", Replay(Trace(*packed(small)), make(policy), blocks).run(CHECKED)).tolist()
    if policy == "lru":  # others may break ties by ids, which are other ones there
        assert told == reference.replay(small, seconds, make(policy), blocks), policy
    assert sum(told) <= sum(reference.optimum(small, blocks)), policy


def main() -> int:
    asked = argparse.ArgumentParser()
    asked.add_argument("--trace", type=Path)
    asked.add_argument("--policies", default="lru,auto")
    asked.add_argument("--out")
    options = asked.parse_args()
    probes = [noise()]
    if options.trace:
        requests = repeated(traces.read(options.trace, 1 << 30))
    else:
        requests = traces.made_up(ACCESSES // 20)
    parts = packed(requests)
    trace = Trace(*parts)
    assert trace.accesses >= ACCESSES, trace.accesses
    rows: list[Row] = []

    def timed(name: str, run: Callable[[], object], bar: float) -> None:
        one, other = Arm(lambda: void(run())), Arm(lambda: void(Trace(*parts)))
        ratios = pairs(one, other, ROUNDS)
        rate = trace.accesses / sorted(one.seconds)[ROUNDS // 2]
        spread = max(one.seconds) / min(one.seconds)
        more = {"of_numbering": sorted(ratios)[ROUNDS // 2], "spread": spread}
        rows.append(
            at_least(name, rate, "accesses/s", bar, **more)
            if bar
            else Row(name, rate, "accesses/s", more=more)
        )

    for policy in options.policies.split(","):
        check(requests, policy)
        for share in SHARES:
            blocks = trace.unique * share // 100
            timed(
                f"{policy}, {share}% of the blocks",
                lambda policy=policy, blocks=blocks: Replay(trace, make(policy), blocks).run(
                    1 << 40
                ),
                BARS.get(policy, 0),
            )
    for share in SHARES:
        blocks = trace.unique * share // 100
        timed(
            f"optimum, {share}% of the blocks",
            lambda blocks=blocks: Optimum(trace, blocks).run(1 << 40),
            0,
        )
    probes.append(noise())
    return report("sim", rows, probes, options.out)


if __name__ == "__main__":
    sys.exit(main())
