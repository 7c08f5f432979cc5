"""Every benchmark can be imported, so that names that moved in the product are found by the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.daemons import server

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCHMARKS.glob("*.py")))
def test_a_benchmark_can_be_imported(name: str) -> None:
    program = f"import sys; sys.path.insert(0, sys.argv[1]); import {name}"
    done = server().run([str(BENCHMARKS)], program=program)
    missing = done.stderr.rpartition("No module named ")[2].strip().strip("'").split(".")[0]
    if missing in ("torch", "transformers", "vllm", "lmcache", "matplotlib", "numpy", "cupy"):
        pytest.skip(f"needs {missing}")
    assert done.returncode == 0, done.stderr
