"""The daemon is simulated with many seeds; each runs in a process of its own, because clocks are replaced."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.effort import effort

ROOT = Path(__file__).parent.parent.parent
BATCHES = 2
SEEDS = effort(100, 450, 2000)  # 40 ms of one processor each
EACH = SEEDS // BATCHES
FAILED_BEFORE = 55_716, 81_631, 170_674


def run(*arguments: str, **environment: str) -> str:
    """Return what the simulation prints. It must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation", *arguments], cwd=ROOT, text=True, check=False,
        env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert not done.returncode, done.stdout
    return done.stdout


@pytest.mark.parametrize("batch", range(BATCHES))
def test_no_seed_violates_a_promise(batch: int) -> None:
    first = batch * EACH
    run("--seeds", f"{first}:{first + EACH}", "--shrink")


@pytest.mark.parametrize("seed", FAILED_BEFORE)
def test_a_seed_that_failed_before_violates_no_promise(seed: int) -> None:
    run("--seeds", str(seed), "--shrink")


def test_a_seed_has_the_same_trace_in_each_process() -> None:
    first, second = (
        run("--seeds", "0:6", "--digests", PYTHONHASHSEED=str(hash)) for hash in (1, 2)
    )
    assert first == second
    assert len(set(first.split())) == 2 * 6, "the traces of different seeds are the same"


# An oracle that is wrong stands for a daemon that is: it believes that each forget forgets all blocks.
WRONG_ORACLE = """
import sys
from tests.simulation.__main__ import main
from tests.simulation.oracle import Oracle
right = Oracle.forgotten
Oracle.forgotten = lambda oracle, _: right(oracle, list(oracle._values.values()))
sys.argv[1:] = ["--seeds", "17:67", "--shrink"]
sys.exit(main())
"""


def test_a_seed_that_fails_is_shrunk() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WRONG_ORACLE],
        cwd=ROOT,
        text=True,
        check=False,
        stdout=subprocess.PIPE,
    )
    assert done.returncode == 1, done.stdout
    listed = done.stdout.partition("operations suffice:\n")[2].partition("\n\n")[0].splitlines()
    kinds = [line.split()[4] for line in listed]
    assert len(kinds) < 10, done.stdout
    assert kinds.count("save"), done.stdout
    assert {"forget", "purge"} & set(kinds), done.stdout
    keep = done.stdout.partition("--keep ")[2].split()[0]
    assert keep.split(",") == [line.split()[0] for line in listed]


# A daemon is killed while its clients watch spaces that they look up. Prints how many machines are left.
KILLED = """
import gc
from tests.simulation.machine import Machine
from tests.simulation.plan import Operation
from tests.simulation.run import simulate
kinds = ["save", "watch", "load", "match"] * 4 + ["kill"]
plan = [Operation(0.1 * (at + 1), kind, at) for at, kind in enumerate(kinds)]
outcome = simulate(0, plan)
assert not outcome.failure, outcome.failure
assert outcome.counts["kill"] == 1, outcome.counts
print(sum(isinstance(one, Machine) for one in gc.get_objects()))
"""


def test_nothing_of_a_seed_is_left_in_its_process() -> None:
    left = subprocess.run(
        [sys.executable, "-c", KILLED], cwd=ROOT, text=True, check=True, stdout=subprocess.PIPE
    )
    assert left.stdout == "0\n"


def test_ranges_of_seeds_are_run_in_portions_and_recorded(tmp_path: Path) -> None:
    record = tmp_path / "seeds.jsonl"
    run("--seeds", "3+4", "--jobs", "2", "--record", str(record))
    told = run("--seeds", "+2", "--jobs", "1", "--record", str(record))
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    assert [row["seeds"] for row in rows] == [[3, 7], [7, 9]]
    assert [row["run"] for row in rows] == [4, 2]
    assert not any(row["failed"] for row in rows)
    assert "seeds 7:9: 2 of 2 seeds" in told


# Processes that run one batch of one seed each.
REPLACED = """
import sys
import tests.simulation.__main__ as program
from tests.simulation import workers
workers.BATCH, workers.BATCHES_MOST = 1, 1
sys.argv[1:] = ["--seeds", "0:7", "--jobs", "3", "--record", sys.argv[1]]
sys.exit(program.main())
"""


def test_processes_are_replaced_while_others_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", REPLACED, tmp_path / "seeds.jsonl"], cwd=ROOT, text=True, check=False,
        stdout=subprocess.PIPE, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert json.loads((tmp_path / "seeds.jsonl").read_text())["run"] == 7


# The second seed ends its process, as a crash of native code does.
CRASH = """
import os, sys
import tests.simulation.__main__ as program
right = program.simulate
program.simulate = lambda seed, *more: os.abort() if seed == 1 else right(seed, *more)
sys.argv[1:] = ["--seeds", "0:3", "--jobs", "1", "--record", sys.argv[1]]
sys.exit(program.main())
"""


def test_a_process_that_dies_counts_as_a_failure(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CRASH, tmp_path / "seeds.jsonl"], cwd=ROOT, text=True, check=False,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    assert "ended with -6 in seeds 0 to 2" in done.stdout
    assert json.loads((tmp_path / "seeds.jsonl").read_text())["failed"] == [0, 1, 2]
