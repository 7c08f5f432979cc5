"""The examples of the documents run, and show what their page says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from support import forked
from support.effort import ALL

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
LOADED = re.compile(r"loaded (\d+) of (\d+) tokens")
IMPORTED = ("torch", "transformers.models.llama.modeling_llama", "kvtier_transformers")
LONGEST_S = 600.0  # on a busy machine
RUN = "import runpy, sys\nsys.path.insert(0, {!r})\nrunpy.run_path({!r}, run_name='__main__')\n"

pytest.importorskip("transformers")
forks = cache(forked.started)


def printed(program: Path, folder: Path) -> str:
    """What the program prints in this folder: as users run it in the longer tests, otherwise in a fork of a
    process that has imported torch."""
    if ALL:
        done = subprocess.run(
            [sys.executable, str(program)], cwd=folder, capture_output=True, text=True, check=False
        )
    else:
        before = Path.cwd()
        os.chdir(folder)
        try:
            done = forks().run(
                [], program=RUN.format(str(program.parent), str(program)), imports=IMPORTED,
                seconds=LONGEST_S,
            )  # fmt: skip
        finally:
            os.chdir(before)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def shares(text: str) -> list[float]:
    """Which part of each prompt was loaded."""
    return [int(loaded) / int(total) for loaded, total in LOADED.findall(text)]


def test_a_chat_goes_on_after_a_restart(tmp_path: Path) -> None:
    text = printed(EXAMPLES / "chat_after_restart.py", tmp_path)
    assert "the answers are equal: True" in text
    assert shares(text)[0] > 0.9


def test_questions_share_the_system_prompt(tmp_path: Path) -> None:
    first, second, third = shares(printed(EXAMPLES / "shared_prompt.py", tmp_path))
    assert first == 0 < 0.5 < second < 0.9 < third


def test_documents_beyond_the_memory_come_from_disk(tmp_path: Path) -> None:
    text = printed(EXAMPLES / "more_than_memory.py", tmp_path)
    found = shares(text)
    assert found[:4] == [0] * 4
    assert min(found[4:]) > 0.8
    assert int(re.findall(r"read from disk: (\d+) MiB", text)[0]) > 0


def test_the_notebook_runs_twice(tmp_path: Path) -> None:
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    program = "\n".join("".join(one["source"]) for one in cells if one["cell_type"] == "code")
    (file := tmp_path / "notebook.py").write_text(program)
    for turn in range(2):
        first, second = shares(printed(file, tmp_path))
        assert (first > 0.9) == (turn > 0)
        assert second > 0.9
