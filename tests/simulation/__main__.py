"""Run seeds of the simulation: python -m tests.simulation --seeds 0:1000 --jobs 2"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import sys
from collections import Counter

from . import virtual
from .run import Outcome, simulate


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", default="0:100", help="FIRST:LAST, without LAST; or one seed")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--trace", action="store_true", help="print the trace")
    parser.add_argument("--hashes", action="store_true", help="print the digest of each trace")
    parser.add_argument("--first", action="store_true", help="stop at the first failure")
    return parser.parse_args()


def main() -> int:
    asked = parsed()
    first, _, last = asked.seeds.partition(":")
    seeds = range(int(first), int(last) if last else int(first) + 1)
    gc.collect()
    gc.freeze()  # the modules: the collections between two seeds are fast
    began, failures, counts, steps = virtual.real_time(), [], Counter[str](), 0
    for seed in seeds:
        outcome = simulate(seed, keeps_lines=asked.trace)
        counts += outcome.counts
        steps += outcome.steps
        if asked.trace:
            print(*outcome.lines, sep="\n")
        if asked.hashes:
            print(seed, outcome.trace)
        if outcome.failure:
            failures.append(seed)
            print(f"seed {seed}: {outcome.failure}", flush=True)
            if asked.first:
                break
    seconds = virtual.real_time() - began
    print(f"{len(seeds)} seeds, {len(failures)} failed, {seconds:.1f} s, {steps} steps: {dict(counts)}")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
