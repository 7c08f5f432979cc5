"""The verdicts of `make bench-compare`."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
from compare import Row  # noqa: E402


@pytest.mark.parametrize(
    ("name", "pairs", "verdict"),
    [
        ("a", [(100.0, 104.0), (101.0, 105.0), (99.0, 103.0)], "ok"),
        ("a", [(100.0, 50.0)] * 5, "ok"),
        ("a", [(100.0, 110.0), (101.0, 109.0), (99.0, 111.0)], "WORSE"),
        ("a", [(100.0, 200.0), (100.0, 107.0), (100.0, 60.0), (60.0, 120.0)], "UNCLEAR"),
        ("match, p99 beyond echo", [(10.0, 30.0)] * 3, "ok"),
        ("match, p99 beyond echo", [(50.0, 90.0)] * 3, "WORSE"),
        ("match, p99 beyond echo", [(-5.0, -2.0)] * 3, "ok"),
    ],
)
def test_a_row_is_worse_beyond_the_limit_and_unclear_if_its_rounds_disagree(
    name: str, pairs: list[tuple[float, float]], verdict: str
) -> None:
    assert Row(name, pairs).verdict(0.05) == verdict


def test_the_comparing_side_imports_only_modules_of_earlier_trees() -> None:
    product = {
        f"{name} {one.name}"
        for file in ("compare_side.py", "bench_control.py", "bench_warm.py", "harness.py")
        for node in ast.parse((BENCHMARKS / file).read_text()).body
        if isinstance(node, ast.ImportFrom) and (name := node.module or "").startswith("kvtier")
        for one in node.names
    }
    clients = {f"kvtier {name}" for name in ("Client", "KvSpec", "Space", "wire")}
    kernels = {
        f"kvtier_kernels {name}"
        for name in ("Pieces", "Store", "gather", "nt_loops", "scatter", "views")
    }
    assert product == clients | kernels | {"kvtier.layout space_id"}
