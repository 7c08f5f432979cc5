"""Every benchmark can be imported, so that names that moved in the product are found by the tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCHMARKS.glob("*.py")))
def test_a_benchmark_can_be_imported(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=BENCHMARKS, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    missing = done.stderr.rpartition("No module named ")[2].strip().strip("'").split(".")[0]
    if missing in ("torch", "transformers", "vllm", "lmcache", "matplotlib", "numpy", "cupy"):
        pytest.skip(f"needs {missing}")
    assert done.returncode == 0, done.stderr
