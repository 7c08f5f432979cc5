"""The planted bugs that `make sabotage` tries: each can still be planted."""

from __future__ import annotations

import ast

import pytest

from sabotage.plant import ROOT, Bug, Edit, NotPlanted, bugs


@pytest.mark.parametrize("bug", bugs(), ids=lambda bug: bug.name)
def test_a_bug_can_be_planted_and_has_its_tests(bug: Bug) -> None:
    for path, text in bug.planted(ROOT).items():
        if path.suffix == ".py":
            ast.parse(text)
    assert bug.tests
    for test in bug.tests:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0].rpartition('::')[2]}(" in (ROOT / file).read_text()


def test_names_of_bugs_differ() -> None:
    names = [bug.name for bug in bugs()]
    assert len(set(names)) == len(names) >= 70


@pytest.mark.parametrize("text", ["", "a b a"])
def test_an_edit_whose_text_does_not_occur_exactly_once_is_an_error(text: str) -> None:
    with pytest.raises(NotPlanted, match="not once"):
        Edit("file", "a", "b").planted(text)
