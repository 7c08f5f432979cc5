"""The distribution: a wheel that is built from the sdist, installed in an empty environment, can save
and load."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    not os.environ.get("KVTIER_FAULTS"), reason="builds for minutes: set KVTIER_FAULTS=1"
)


def run(*command: object, cwd: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, cwd=cwd,
        env=environment, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.faults
def test_the_wheel_of_the_sdist_works_in_an_empty_environment(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    program = f"import scikit_build_core.build as build; build.build_sdist({str(raw)!r})"
    run(sys.executable, "-c", program, cwd=ROOT)
    (sdist,) = raw.glob("*.tar.gz")
    run(
        sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps",
        "--wheel-dir", raw, sdist,
    )  # fmt: skip
    (wheel,) = raw.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if name.startswith(("tests", "benchmarks"))]
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", venv)
    # As in the documents: pip install dist/kvtier-*.whl
    (tmp_path / "dist").mkdir()
    shutil.copy(wheel, tmp_path / "dist")
    run("sh", "-c", f"{venv}/bin/pip install dist/kvtier-*.whl", cwd=tmp_path)
    installed = run(venv / "bin/pip", "list", "--format=freeze").lower()
    assert not [line for line in installed.splitlines() if line.startswith(("torch", "nvidia"))]
    # In another directory, so that the sources are not imported.
    assert "hit" in run(venv / "bin/kvtier", "demo", cwd=tmp_path).lower()
    shown = run(
        venv / "bin/kvtier", "install-service", "--dry-run", "--root", tmp_path / "root",
        "--program", "/opt/kvtier/bin/kvtier", cwd=tmp_path,
    )  # fmt: skip
    assert "Type=notify" in shown


@pytest.mark.faults
def test_a_checkout_is_installed_as_in_the_documents(tmp_path: Path) -> None:
    """`pip install .` in a copy of the tracked files, which pip builds in isolation."""
    listed = run("git", "ls-files", cwd=ROOT).split("\n")
    for name in filter(None, listed):
        (tmp_path / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "checkout" / name)
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    pip = tmp_path / "venv/bin/pip"
    run(pip, "install", ".", cwd=tmp_path / "checkout")
    check_transformers(pip, tmp_path)
    shutil.rmtree(tmp_path / "checkout")
    shown = run(tmp_path / "venv/bin/kvtier", "install-service", "--dry-run", "--program",
                "/opt/kvtier/bin/kvtier", cwd=tmp_path)  # fmt: skip
    assert "ExecStart=/opt/kvtier/bin/kvtier serve" in shown
    assert "hit" in run(tmp_path / "venv/bin/kvtier", "demo", cwd=tmp_path).lower()


def check_transformers(pip: Path, folder: Path) -> None:
    """`pip install '.[transformers]'`: pip knows the extra, and it has what the plugin imports.
    Nothing is installed: that would be 3 GB."""
    told = folder / "report.json"
    run(pip, "install", "--dry-run", "--no-deps", "--ignore-installed", "--report", told,
        ".[transformers]", cwd=folder / "checkout")  # fmt: skip
    (one,) = json.loads(told.read_text())["install"]
    assert one["requested_extras"] == ["transformers"]
    metadata = one["metadata"]
    assert "transformers" in metadata["provides_extra"]
    needed = [
        text for text in metadata["requires_dist"] if re.search(r"extra == .transformers.", text)
    ]
    names = {re.match(r"[\w-]+", text).group() for text in needed}  # type: ignore[union-attr]
    source = "".join(
        path.read_text() for path in (ROOT / "plugins/kvtier_transformers").glob("*.py")
    )
    imported = set(
        re.findall(r"^\s*(?:import|from) (torch|transformers|numpy)\b", source, re.MULTILINE)
    )
    assert imported <= names and {"torch", "transformers"} <= names, needed
