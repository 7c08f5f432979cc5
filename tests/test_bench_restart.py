"""The evaluation of the benchmark of the first request after a restart, without an engine."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import bench_restart as bench
from harness import Row


def arms(restarted: list[bench.One], later_s: list[float]) -> dict[str, bench.Arm]:
    """Rounds with these first requests, and with later requests of this duration."""
    found = {name: bench.Arm([one(seconds) for seconds in later_s]) for name in bench.ARMS}
    found[bench.RESTARTED] = bench.Arm(restarted)
    return found


def one(first_s: float, cold: int = bench.PREFIX) -> bench.One:
    return bench.One(first_s, 0, cold, dict.fromkeys(bench.PARTS, 0.0))


def rows(restarted: list[bench.One], later_s: list[float]) -> dict[str, Row]:
    return {row.name: row for row in bench.rows_of(arms(restarted, later_s))}


def test_a_ratio_uses_the_requests_of_one_round() -> None:
    ratio = f"first token, restarted / {bench.IDLE_COLD}"
    found = rows([one(0.1), one(0.4), one(0.9)], [0.1, 0.2, 0.9])[ratio]
    assert (found.value, found.ok) == (1.0, True)
    found = rows([one(0.12), one(0.4), one(0.9)], [0.1, 0.2, 0.9])[ratio]
    assert (found.value, found.ok) == (0.12 / 0.1, False)


def test_one_round_with_a_partly_loaded_prefix_fails_the_bar() -> None:
    name = "restarted: share of the prefix that was loaded, least of all rounds"
    whole = rows([one(0.1)] * 3, [0.1] * 3)[name]
    assert (whole.value, whole.ok) == (1.0, True)
    part = rows([one(0.1), one(0.1, cold=192), one(0.1)], [0.1] * 3)[name]
    assert (part.value, part.ok, part.more["whole"]) == (192 / bench.PREFIX, False, 2)
