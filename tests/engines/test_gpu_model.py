"""The models of a GPU run, over the driver without a device; that of transformers is in host memory."""

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
    stages = [*command, "model", "transformers"]
    done = subprocess.run(stages, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [row, end, logits, ratio, last] = json.loads(out.read_text())["rows"]
    assert row["ok"] and row["more"]["loaded tokens"] == 128
    assert logits["ok"] and logits["more"]["loaded tokens"] == 6 * 256
    assert ratio["ok"] is None and end["ok"] and last["ok"]
