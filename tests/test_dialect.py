"""`make check` finds phrases in the documents that a reader understands only at the second reading."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import dialect

HARD = [
    "Nobody gets anything any more.",
    "What was saved is told to who asks.",
    "Blocks of this kind have none until then, and so is the index.",
    "It reads beside the loop, so many at once.",
    "Whoever waits lets go, for good.",
]
ORDINARY = [
    "It reads no more than 4 KiB, and so on.",
    "A user who connects may read what the tenant saved.",
    "None of these files is large; what is the size of the cache?",
    "There are so many that the limit is reached.",
    "Users who wait are disconnected as soon as the daemon stops.",
]


@pytest.mark.parametrize("text", HARD)
def test_hard_phrases_are_counted(text: str) -> None:
    assert dialect.count(text, ".md").hits


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_english_is_not_counted(text: str) -> None:
    assert dialect.count(text, ".md").hits == ()


def test_code_is_not_counted_and_a_phrase_has_its_line() -> None:
    page = "One line.\n```text\nnobody\n```\nThe message is `nobody`,\nand nobody reads it.\n"
    (hit,) = dialect.count(page, ".md").hits
    assert (hit.line, hit.phrase) == (6, "nobody")
    source = 'x = "nobody"  # ours\n\n\ndef f():\n    """Do it.\n\n    For nobody.\n    """\n'
    (hit,) = dialect.count(source, ".py").hits
    assert (hit.line, hit.phrase) == (7, "nobody")
    (hit,) = dialect.count('auto s = "nobody";\n// by nobody\n', ".cpp").hits
    assert (hit.line, hit.phrase) == (2, "nobody")


def test_the_check_fails_above_the_budget(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["dialect.py", "--check"])
    monkeypatch.setattr(dialect, "BUDGETS", {"documents": dialect.BUDGETS["documents"]})
    assert dialect.main() == 0  # `make check` reads all of them
    monkeypatch.setitem(dialect.FOLDERS, "documents", ("docs/decisions/*.md", "docs/*.md"))
    monkeypatch.setitem(dialect.BUDGETS, "documents", 0.0)
    assert dialect.main() == 1
    assert "at most 0" in capsys.readouterr().out
