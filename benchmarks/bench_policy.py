"""Policies: what they hit, of a trace from a file and of workloads that are made up, and what they cost.

    python benchmarks/bench_policy.py [--trace FILE] [--out results.json] [--quick]
        [--requests N] [--seeds N] [--sensitivity]

A replay simulates one tier: a block is a hit if all blocks before it in its request are, and after a request
all its blocks are stored. For a recorded trace it prints the hit rate of the whole trace, of its second
half, and of each half alone. workloads.py has the other traces: half of them are unseen while policies are
tuned. Times are CPU times. --sensitivity prints only the effect of other constants.
"""

from __future__ import annotations

import argparse
import random
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import harness
import traces
import workloads
from kvtier_daemon.catalog.policy import NAMED, NO_PARENT, make
from kvtier_kernels import Optimum, Policy, Replay, Trace
from models.policies.native import Value

POINTS = (1, 2, 5, 10, 20)  # percent of a trace's unique blocks
CLASSICS = ("lru", "lfu", "arc", "s3fifo")
NAMES = [name for name in NAMED if name != "auto"]
BATCH = 1024
ROUNDS = 3
# Of `value`: kernels/include/policy_selector.h has what each means.
CONSTANTS: dict[str, float] = {
    "to_leave": 1.0, "back": 0.7, "fading": 0.98, "judgements": 8.0,
    "few": 20.0, "memory": 1 << 17, "more_seen": 8,
}  # fmt: skip

Rates = dict[str, list[float]]


@dataclass(frozen=True)
class Made:
    """A trace for replays, and how many blocks each of its requests asks for."""

    native: Trace
    lengths: array[int]

    @classmethod
    def of(cls, trace: Sequence[traces.Timed]) -> Made:
        lengths = array("I", [len(chain) for _, chain in trace])
        names = array("Q", [name for _, chain in trace for name in chain])
        seconds = array("d", [when for when, _ in trace])
        return cls(Trace(names.tobytes(), lengths.tobytes(), seconds.tobytes()), lengths)

    def rates(self, policy: Callable[[], Policy] | None, points: Sequence[int]) -> Rates:
        """Hit rates at these sizes, of all of it and of its second half; of the optimum for no policy."""
        whole, second = [], []
        half = len(self.lengths) // 2
        for percent in points:
            blocks = max(1, self.native.unique * percent // 100)
            run = Replay(self.native, policy(), blocks) if policy else Optimum(self.native, blocks)
            hits = array("I", run.run(len(self.lengths)))
            whole.append(round(sum(hits) / sum(self.lengths), 4))
            second.append(round(sum(hits[half:]) / sum(self.lengths[half:]), 4))
        return {"whole": whole, "second half": second}


def halves(path: Path) -> dict[str, Made]:
    """A recorded trace, its first half alone, with which policies are tuned, and its unseen second half."""
    trace = traces.read_timed(path)
    half = len(trace) // 2
    return {
        "whole": Made.of(trace),
        "first half alone": Made.of(trace[:half]),
        "second half alone": Made.of(trace[half:]),
    }


def closed(found: Sequence[float], lru: Sequence[float], best: Sequence[float]) -> float:
    """Return the closed share of the gap from LRU to the optimum; 0 if there is no gap."""
    gap = sum(best) - sum(lru)
    return (sum(found) - sum(lru)) / gap if gap > 1e-9 else 0.0


def recorded(path: Path, points: Sequence[int]) -> list[harness.Row]:
    rows = []
    for part, trace in halves(path).items():
        best = trace.rates(None, points)
        found = {name: trace.rates(NAMED[name], points) for name in NAMES}
        for which in best:
            if part != "whole" and which != "whole":
                continue
            lru, played = found["lru"][which], part if which == "whole" else which
            for name in NAMES:
                value = closed(found[name][which], lru, best[which])
                more = {which: found[name][which], "optimum": best[which]}
                if played == "whole":
                    bar = 0.2 if name == "value" else None
                    title = f"{path.stem}: gap to the optimum closed, {name}"
                else:
                    bar, title = None, f"{path.stem}, {played}: closed of the gap, {name}"
                rows.append(
                    harness.Row(
                        title, value, "", f">= {bar}" if bar else "",
                        value >= bar if bar else None, more=more,
                    )
                )  # fmt: skip
            over = least_over(found, which)
            classic = [
                max(at) for at in zip(*(found[name][which] for name in CLASSICS), strict=True)
            ]
            share = closed(found["value"][which], classic, best[which])
            unseen = part == "second half alone"
            rows.append(
                harness.Row(
                    f"{path.stem}, {played}: closed of the gap from the best classic, value", share, "",
                    ">= 0.2" if unseen else "", share >= 0.2 if unseen else None,
                    more={name: found[name][which] for name in (*CLASSICS, "value")},
                )
            )  # fmt: skip
            rows.append(
                harness.Row(
                    f"{path.stem}, {played}: value over the best classic, at its worst", over, "",
                    ">= -0.002", over >= -0.002,
                )
            )  # fmt: skip
    return rows


def least_over(found: dict[str, Rates], which: str = "whole") -> float:
    """How far `value` is over the best classic where it is least."""
    best = [max(rates) for rates in zip(*(found[name][which] for name in CLASSICS), strict=True)]
    return min(one - other for one, other in zip(found["value"][which], best, strict=True))


PARTS = {
    "tuned": (workloads.TUNED, workloads.TUNED_SEEDS),
    "unseen": (workloads.UNSEEN, workloads.UNSEEN_SEEDS),
}


def rates_of(part: str, kind: str, seed: int, requests: int, points: Sequence[int]) -> Rates:
    """Hit rates of the classics, `value` and the optimum."""
    trace = Made.of(PARTS[part][0][kind](requests, seed))
    rates = {name: trace.rates(NAMED[name], points)["whole"] for name in (*CLASSICS, "value")}
    return {**rates, "optimum": trace.rates(None, points)["whole"]}


def services(requests: int, points: Sequence[int], seeds: int) -> list[harness.Row]:
    """Workloads that are tuned with and unseen ones: how far `value` is over the best classic at its worst
    size, and how much of the gap between that and the optimum it closes."""
    rows = []
    with ProcessPoolExecutor() as pool:
        for part, (kinds, own) in PARTS.items():
            which = [(kind, seed) for kind in kinds for seed in own[:seeds]]
            runs = [pool.submit(rates_of, part, *one, requests, points) for one in which]
            overs, shares = [], []
            for (kind, seed), run in zip(which, runs, strict=True):
                rates = run.result()
                classic = [max(at) for at in zip(*(rates[name] for name in CLASSICS), strict=True)]
                over = [one - other for one, other in zip(rates["value"], classic, strict=True)]
                overs += over
                shares.append(closed(rates["value"], classic, rates["optimum"]))
                title = f"{part}, {kind}, seed {seed}: value over the best classic, at its worst"
                rows.append(
                    harness.Row(
                        title, min(over), "", ">= -0.002", min(over) > -0.00205,
                        more={**rates, "closed of the gap to the optimum": shares[-1]},
                    )
                )  # fmt: skip
            within = sum(one > -0.00205 for one in overs) / len(overs)
            lost = sum(max(0.0, -one - 0.002) for one in overs)
            enough = sum(share >= 0.08 for share in shares) / len(shares)
            for what, value in (
                ("points not more than 0.2 below the best classic", within),
                ("below that in the others, in sum", lost),
                ("workloads with 8% of the gap from the best classic closed", enough),
                ("closed of that gap, mean", sum(shares) / len(shares)),
            ):
                rows.append(harness.Row(f"{part}, all: {what}", value, ""))
    return rows


def sensitivity(
    path: Path | None, requests: int, points: Sequence[int], seeds: Sequence[int]
) -> list[harness.Row]:
    """What half and twice of each constant change, in points: the mean hit rate of the recorded trace's first
    half, and of those that are made up."""
    made = [Made.of(kind(requests, seed)) for kind in workloads.TUNED.values() for seed in seeds]
    if path:
        made.insert(0, halves(path)["first half alone"])

    def means(policy: Callable[[], Policy]) -> list[float]:
        return [sum(trace.rates(policy, points)["whole"]) / len(points) for trace in made]

    own, rows = means(Value), []
    for name, value in CONSTANTS.items():
        for times in (0.5, 2):
            other = 1 - (1 - value) * times if name == "fading" else value * times
            constant = {name: type(value)(other)}
            with_it = means(lambda constant=constant: Value(**constant))
            change = [100 * (one - before) for one, before in zip(with_it, own, strict=True)]
            first = change.pop(0) if path else None
            rows.append(
                harness.Row(
                    f"{name} = {constant[name]:g}, not {value:g}: of the made-up, on average",
                    sum(change) / len(change), "points",
                    more={"least": min(change), "most": max(change), "first half": first},
                )
            )  # fmt: skip
            if first is not None:
                rows.append(
                    harness.Row(f"{name} = {constant[name]:g}: of the first half", first, "points")
                )
    return rows


# --- cost ----------------------------------------------------------------------------------------


class Timed:
    """CPU seconds of this thread, call by call."""

    def __init__(self) -> None:
        self.calls: list[float] = []
        self.items = 0

    def __call__(self, items: int, call: Callable[[], object]) -> None:
        started = time.thread_time()
        call()
        self.calls.append(time.thread_time() - started)
        self.items += items

    def least(self, others: Sequence[Timed]) -> Timed:
        """Of the same calls made several times, each as it was at its fastest."""
        found = Timed()
        each = zip(self.calls, *(other.calls for other in others), strict=True)
        found.calls, found.items = [min(same) for same in each], self.items
        return found

    @property
    def longest_s(self) -> float:
        return max(self.calls)

    @property
    def us(self) -> float:
        return sum(self.calls) * 1e6 / max(1, self.items)


def costs(name: str, blocks: int, turns: int) -> list[harness.Row]:
    """What calls cost. All is the same each time, so what took longer once was the machine's doing."""
    rounds = [_calls(name, blocks, turns) for _ in range(ROUNDS)]
    memory = rounds[0][1]
    access, victims, rest = (
        same[0].least(same[1:]) for same in zip(*(calls for calls, _ in rounds), strict=True)
    )
    bars = name == "value"
    longest = 1e3 * max(access.longest_s, victims.longest_s, rest.longest_s)
    return [
        _cost(f"{name}: an access, in batches of {BATCH}", access.us, "us", 0.2 if bars else None),
        _cost(f"{name}: a victim", victims.us, "us", 2.0 if bars else None),
        _cost(f"{name}: the longest call", longest, "ms", 2.0 if bars else None),
        _cost(f"{name}: memory of a block", memory, "B", None),
    ]


def _calls(name: str, blocks: int, turns: int) -> tuple[list[Timed], float]:
    """Chains of 1,024 blocks: old ones are wanted, or the coldest go and a new one comes. Accesses, victims,
    other calls, and bytes a block."""
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
    return [access, victims, others], policy.memory_bytes() / blocks


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
    parser.add_argument("--requests", type=int, default=6000, help="of each workload")
    parser.add_argument("--seeds", type=int, default=2, help="how many of each workload, 1 or 2")
    parser.add_argument(
        "--sensitivity", action="store_true", help="half and twice of each of value's constants"
    )
    arguments = parser.parse_args()
    probes = [harness.noise()]
    rows = []
    requests, points = (1500, (1, 5, 20)) if arguments.quick else (arguments.requests, POINTS)
    seeds = 1 if arguments.quick else arguments.seeds
    if arguments.sensitivity:
        rows = sensitivity(arguments.trace, requests, points, workloads.TUNED_SEEDS[:seeds])
    else:
        for name in NAMES:
            rows += costs(name, 64 * BATCH if arguments.quick else BATCH * BATCH, 2000)
        rows += services(requests, points, seeds)
        if arguments.trace:
            rows += recorded(arguments.trace, points)
    probes.append(harness.noise())
    return harness.report("policy", rows, probes, arguments.out)


if __name__ == "__main__":
    raise SystemExit(main())
