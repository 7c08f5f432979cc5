"""`make figures` uses no result of code that has changed since."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import figures

IDENTITY = ("-c", "user.name=test", "-c", "user.email=test@example.com")


def commit(root: Path, path: str, text: str) -> str:
    (root / path).parent.mkdir(exist_ok=True)
    (root / path).write_text(text)
    for arguments in (["add", "."], [*IDENTITY, "commit", "--quiet", "--message", path]):
        subprocess.run(["git", *arguments], cwd=root, check=True)
    return figures.git(root, "rev-parse", "--short", "HEAD")


def result_of(commit: str, **more: Any) -> dict[str, Any]:
    return {
        "environment": {"commit": commit, "cores": 2, "cpu": "c", **more},
        "valid": True,
        "rows": [],
    }


@pytest.fixture
def root(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    return tmp_path


def test_a_result_is_out_of_date_when_measured_code_changed_since(root: Path) -> None:
    measured = commit(root, "kvtier/a.py", "1")
    commit(root, "docs/a.md", "no code")
    assert figures.out_of_date(result_of(measured), root) == ""
    (root / "kvtier" / "a.py").write_text("2, and not committed")
    assert "kvtier/a.py" in figures.out_of_date(result_of(measured), root)
    again = commit(root, "kvtier/a.py", "2")
    assert "kvtier/a.py" in figures.out_of_date(result_of(measured), root)
    assert figures.out_of_date(result_of(again), root) == ""
    assert "not committed" in figures.out_of_date(result_of(again, uncommitted=True), root)


def test_a_result_is_out_of_date_when_its_commit_is_not_of_this_recent_history(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "RECENT", 3)
    measured = commit(root, "docs/a.md", "0")
    for number in range(1, 3):
        commit(root, "docs/a.md", str(number))
        assert figures.out_of_date(result_of(measured), root) == ""
    commit(root, "docs/a.md", "3")
    assert "last 3" in figures.out_of_date(result_of(measured), root)
    for unknown in ("", "0123456"):
        assert "last 3" in figures.out_of_date(result_of(unknown), root)


def test_figures_out_of_date_are_named_and_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr(figures, "results", lambda: {"warm": result_of("0123456")})
    monkeypatch.setattr(figures, "wanted", lambda: {page: "figures"})
    monkeypatch.setattr(sys, "argv", ["figures.py"])
    assert figures.main() == 1 and not page.exists()
    output = capsys.readouterr().out
    assert "warm: 0 rows of commit 0123456" in output and "bench_warm.py" in output
    monkeypatch.setattr(sys, "argv", ["figures.py", "--stale"])
    assert figures.main() == 0 and page.read_text() == "figures"
