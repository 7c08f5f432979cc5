"""Run seeds of the simulation: python -m tests.simulation --seeds 0:1000 --jobs 2"""

from __future__ import annotations

import argparse
import gc
import itertools
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

from . import virtual
from .plan import Operation, config_of, plan_of
from .run import Outcome, simulate
from .shrink import shrunk

COMMAND = (sys.executable, "-m", "tests.simulation")
BATCH = 250  # seeds of one process
TOLD_S = 600.0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", default="0:100", help="FIRST:LAST, without LAST; or one seed")
    parser.add_argument("--jobs", type=int, default=0, help="processes; 0: this one")
    parser.add_argument(
        "--keep", default="", help="numbers of the operations to carry out, of one seed"
    )
    parser.add_argument("--trace", action="store_true", help="print what happens")
    parser.add_argument(
        "--digests", action="store_true", help="print the digest of each trace only"
    )
    parser.add_argument("--shrink", action="store_true", help="shrink the first seed that fails")
    parser.add_argument("--first", action="store_true", help="stop at the first seed that fails")
    return parser.parse_args()


def main() -> int:
    asked = parsed()
    first, _, last = asked.seeds.partition(":")
    seeds = range(int(first), int(last) if last else int(first) + 1)
    if asked.jobs:
        return run_batches(seeds, asked.jobs)
    gc.collect()
    gc.freeze()  # the modules: the collections between two seeds are fast
    began, failed, counts, steps = virtual.real_time(), 0, Counter[str](), 0
    for seed in seeds:
        plan = plan_of(seed)
        if asked.keep:
            plan = [plan[int(number)] for number in asked.keep.split(",")]
        outcome = simulate(seed, plan, asked.trace, asked.digests)
        counts += outcome.counts
        steps += outcome.steps
        if asked.trace:
            print(*outcome.lines, sep="\n")
        if asked.digests:
            print(seed, outcome.trace)
        if outcome.failure:
            failed += 1
            print(f"seed {seed} FAILS: {outcome.failure}", flush=True)
            if asked.shrink:
                report(seed, shrink(seed, outcome))
            if asked.shrink or asked.first:
                break
    seconds = virtual.real_time() - began
    if not asked.digests:
        print(
            f"{seed + 1 - seeds.start} seeds, {failed} failed, {steps} steps, {seconds:.1f} s: {dict(counts)}"
        )
    return bool(failed)


def shrink(seed: int, outcome: Outcome) -> list[int]:
    """Return the numbers of the operations that suffice for this kind of failure."""
    plan, kind = plan_of(seed), kind_of(outcome.failure)

    def fails(some: Sequence[int]) -> bool:
        return kind_of(simulate(seed, [plan[number] for number in some]).failure) == kind

    return shrunk(range(len(plan)), fails)


def kind_of(failure: str) -> str:
    """The failure without its numbers, as far as it is the same kind."""
    text = failure.partition(": ")[2].partition("\n")[0]
    return "".join(each for each in text if not each.isdigit())[:40] if failure else ""


def report(seed: int, numbers: Sequence[int]) -> None:
    plan = plan_of(seed)
    print(f"\n{config_of(seed)}\n{len(numbers)} of {len(plan)} operations suffice:")
    for number in numbers:
        one: Operation = plan[number]
        print(f"  {number:3}  at {one.at:8.3f} s  {one.kind} {one.number}")
    keep = ",".join(map(str, numbers))
    outcome = simulate(seed, [plan[number] for number in numbers])
    print(f"\n{outcome.failure}\n")
    print(f"to repeat it: python -m tests.simulation --seeds {seed} --keep {keep or ','} --trace\n")


def run_batches(seeds: range, jobs: int) -> int:
    """Run the seeds in several processes. The first seed of each batch that fails is shrunk."""
    starts = iter(range(seeds.start, seeds.stop, BATCH))
    began, told, done, failed = virtual.real_time(), virtual.real_time(), 0, 0
    running: list[tuple[range, subprocess.Popen[str]]] = []
    while True:
        for start in itertools.islice(starts, jobs - len(running)):
            batch = range(start, min(start + BATCH, seeds.stop))
            command = [*COMMAND, "--seeds", f"{batch.start}:{batch.stop}", "--shrink"]
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            running.append((batch, process))
        if not running:
            break
        batch, process = running.pop(0)
        output, _ = process.communicate()
        done += len(batch)
        if process.returncode:
            failed += 1
            print(f"--- seeds {batch.start} to {batch.stop - 1}\n{output}", flush=True)
        if virtual.real_time() - told > TOLD_S:
            told = virtual.real_time()
            print(f"{done} of {len(seeds)} seeds after {told - began:.0f} s", flush=True)
    print(f"{len(seeds)} seeds, {failed} batches failed, {virtual.real_time() - began:.0f} s")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
