"""Every benchmark can be imported, so that names that moved in the product are found by the tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.daemons import server

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


NAMES = sorted(path.stem for path in BENCHMARKS.glob("*.py"))

# Each in a fork, so that none finds what another one imported; only numpy is imported before.
IMPORT_EACH = """
import contextlib, json, os, sys, traceback
sys.path.insert(0, sys.argv[1])
with contextlib.suppress(ImportError):
    import numpy
for name in sys.argv[2:]:
    if os.fork():
        os.wait()
        continue
    error = ""
    try:
        __import__(name)
    except BaseException:
        error = traceback.format_exc()
    print(json.dumps([name, error]), flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def errors() -> dict[str, str]:
    """The traceback of each import; empty if it succeeds."""
    done = server().run([str(BENCHMARKS), *NAMES], program=IMPORT_EACH)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_can_be_imported(errors: dict[str, str], name: str) -> None:
    missing = errors[name].rpartition("No module named ")[2].strip().strip("'").split(".")[0]
    if missing in ("torch", "transformers", "vllm", "lmcache", "matplotlib", "numpy", "cupy"):
        pytest.skip(f"needs {missing}")
    assert not errors[name]
