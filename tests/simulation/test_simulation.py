"""The daemon is simulated with many seeds; each runs in a process of its own, because clocks are replaced."""

from __future__ import annotations

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
