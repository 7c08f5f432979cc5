"""Run seeds of the simulation: python -m tests.simulation --seeds 0:1000 --jobs 2"""

from __future__ import annotations

import argparse
import gc
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from . import virtual
from .plan import Operation, config_of, plan_of
from .run import Outcome, simulate
from .shrink import shrunk
from .workers import commit, note, recorded_end, run_all


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument(
        "--seeds", default="0:100",
        help="FIRST:LAST, without LAST; FIRST+COUNT; +COUNT, from where the record ends; or one seed",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, default=0, help="processes; 0: this one")
    parser.add_argument(
        "--record", type=Path, help="append a line about the seeds that were run to this file"
    )
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


def seeds_of(text: str, record: Path | None) -> range:
    if "+" in text:
        first, _, count = text.partition("+")
        start = int(first) if first else recorded_end(record) if record else 0
        return range(start, start + int(count))
    first, _, last = text.partition(":")
    return range(int(first), int(last) if last else int(first) + 1)


def main() -> int:
    asked = parsed()
    seeds = seeds_of(asked.seeds, asked.record)
    gc.collect()
    gc.freeze()  # the modules: the collections between two seeds are fast
    if asked.jobs:
        asked.shrink, of = True, commit()
        progress = run_all(seeds, asked.jobs, partial(run_some, asked))
        if asked.record:
            note(asked.record, of, progress)
        done = progress.covered
        print(f"commit {of}, seeds {done.start}:{done.stop}: {progress}")
        return bool(progress.failed)
    began, found = virtual.real_time(), run_some(asked, seeds)
    seconds = virtual.real_time() - began
    if not asked.digests:
        print(
            f"{found['run']} seeds, {len(found['failed'])} failed, {found['steps']} steps, {seconds:.1f} s: "
            f"{found['counts']}"
        )
    return bool(found["failed"])


def run_some(asked: argparse.Namespace, seeds: range) -> dict[str, Any]:
    """Run these seeds in this process, print failures, and return what happened."""
    counts, steps, failed, run = Counter[str](), 0, list[int](), 0
    for seed in seeds:
        plan = plan_of(seed)
        if asked.keep:
            plan = [plan[int(number)] for number in asked.keep.split(",")]
        outcome = simulate(seed, plan, asked.trace, asked.digests)
        counts += outcome.counts
        steps += outcome.steps
        run += 1
        if asked.trace:
            print(*outcome.lines, sep="\n")
        if asked.digests:
            print(seed, outcome.trace)
        if outcome.failure:
            print(f"seed {seed} FAILS: {outcome.failure}", flush=True)
            if asked.shrink and not failed:
                report(seed, shrink(seed, outcome))
            failed.append(seed)
            if asked.first:
                break
    return {"run": run, "failed": failed, "steps": steps, "counts": dict(counts)}


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


if __name__ == "__main__":
    sys.exit(main())
