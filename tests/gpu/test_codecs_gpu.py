"""The codecs on a GPU: it runs the tests of the processor levels, and of the kernels that are built for
the host."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.gpu_limits import CODECS_S, FILES, SANITIZER_S, TOOLS

pytestmark = pytest.mark.gpu
KERNELS = Path(__file__).parents[1] / "kernels"


def run(
    *command: str | Path,
    files: tuple[str, ...],
    seconds: int,
    only: str = "cuda",
) -> str:
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", only]
    done = subprocess.run(
        [*command, *pytest_, *(KERNELS / name for name in files)], capture_output=True, text=True,
        check=False, timeout=seconds, env={**os.environ, "KVTIER_DEVICE": "gpu"},
    )  # fmt: skip
    output = done.stdout[-3000:] + done.stderr[-1000:]
    assert done.returncode == 0 and "passed" in output and "skipped" not in output, output
    return output


@pytest.mark.parametrize("file", FILES)
def test_bytes_equal_those_of_the_processor_and_the_models(gpu: Any, file: str) -> None:
    run(files=(file,), seconds=CODECS_S)


@pytest.mark.parametrize("tool", TOOLS)
def test_a_sanitizer_finds_nothing_in_the_codecs(gpu: Any, tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not os.access(sanitizer, os.X_OK):
        pytest.skip("no compute-sanitizer: THE CODECS' KERNELS ARE NOT RUN UNDER IT HERE")
    output = run(
        sanitizer, "--tool", tool, "--error-exitcode", "7", "--target-processes", "application-only",
        files=("test_cuda_codecs.py",), seconds=SANITIZER_S, only="payloads or damaged",
    )  # fmt: skip
    assert re.search(r"ERROR SUMMARY: 0 errors|0 hazards", output), output
