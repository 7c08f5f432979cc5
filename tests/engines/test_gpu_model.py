"""The model of a GPU run, over the driver without a device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.fake_cuda import toolkit

pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(toolkit() is None, reason="no cuda.h: NOTHING OF CUDA IS TESTED HERE")
def test_a_model_continues_with_the_pages_of_a_killed_process(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "gpu_run.py"),
        "--emulated",
        "--out",
        str(out),
    ]
    done = subprocess.run([*command, "model"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [row, end] = json.loads(out.read_text())["rows"]
    assert row["ok"] and row["more"]["loaded tokens"] == 128
    assert end["ok"]
