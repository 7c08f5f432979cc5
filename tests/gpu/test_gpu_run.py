"""The run on a borrowed GPU machine, over the driver without a device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.effort import ALL
from support.fake_cuda import toolkit

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    toolkit() is None, reason="no cuda.h: NOTHING OF CUDA IS TESTED HERE"
)

NAMES = ("environment", "texts", "codecs", "copies", "captures", "kills", "holder", "kvikio", "model",
         "transformers", "rates", "engine", "sanitizers")  # fmt: skip
# Without what calls tests of this project, which run by themselves too. `kills` does more, in 4 s of
# CPU time: tests/faults/test_killed_device_writers.py is what remains of it in `make test`.
KILLS = ("kills",) if ALL else ()
WITHOUT_TESTS = (
    "environment", "captures", *KILLS, "model", "transformers", "rates", "engine", "sanitizers",
)  # fmt: skip
RATES = ("GB/s", "us", "x")


def run(out: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Return how it ended, and the results."""
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "gpu_run.py"),
        "--emulated",
        "--out",
        str(out),
    ]
    done = subprocess.run(
        [*command, *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done, json.loads(out.read_text()) if out.exists() else {}


def test_stages_run_without_a_device_and_rates_have_no_verdict(tmp_path: Path) -> None:
    done, found = run(tmp_path / "gpu.json", *WITHOUT_TESTS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [stage["name"] for stage in found["stages"]] == list(WITHOUT_TESTS)
    ends = [row for row in found["rows"] if row["name"].endswith(": the stage")]
    assert len(ends) == len(WITHOUT_TESTS) and all(row["ok"] for row in ends)
    rates = [row for row in found["rows"] if row["unit"] in RATES and row["bar"]]
    assert len(rates) > 5
    assert all(row["ok"] is None and row["more"]["note"] == "no device" for row in rates)
    judged = {row["name"].partition(": ")[2] for row in found["rows"] if row["ok"]}
    assert "saves that read before the default stream had written" in judged


def test_a_failed_or_hung_stage_is_a_failed_row_and_the_others_still_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_run

    scripts = {
        "rows_then_fails": "import json, sys; from dataclasses import asdict; from harness import Row; "
                           "row = json.dumps(asdict(Row('found', 3, 's'))); "
                           "open(sys.argv[2], 'a').write(row + chr(10)); sys.exit('broken')",
        "hangs": "import time; time.sleep(1000)",
        "ends": "pass",
    }  # fmt: skip
    places = f"import sys\nsys.path.insert(0, {str(ROOT / 'benchmarks')!r})\n"
    program = places + f"exec({scripts!r}[sys.argv[1]])\n"
    (tmp_path / "gpu_stages.py").write_text(program)
    monkeypatch.setattr(gpu_run, "HERE", tmp_path)
    results = gpu_run.Results(tmp_path / "gpu.json", {})
    for name in scripts:
        stage = gpu_run.Stage(name, name, 30 if name != "hangs" else 1)
        gpu_run.run(stage, stage.seconds, tmp_path, results)
    rows = {row["name"]: row for row in json.loads(results.path.read_text())["rows"]}
    assert rows["rows_then_fails: found"]["value"] == 3
    failed = rows["rows_then_fails: the stage"]
    assert failed["ok"] is False and failed["more"]["how"] == "failed with status 1"
    assert "broken" in failed["more"]["output"]
    assert rows["hangs: the stage"]["more"]["how"] == "hung"
    assert rows["ends: the stage"]["ok"] is True


def test_all_stages_fit_into_nine_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_run

    assert tuple(stage.name for stage in gpu_run.STAGES) == NAMES
    assert sum(stage.seconds for stage in gpu_run.STAGES) <= 9 * 60


def test_an_unknown_stage_is_refused(tmp_path: Path) -> None:
    done, found = run(tmp_path / "gpu.json", "nothing")
    assert (
        done.returncode == 2 and "no stage is named nothing; there are environment" in done.stderr
    )
    assert not found
