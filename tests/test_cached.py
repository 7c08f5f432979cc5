"""The cache of test results: only successful results are kept, and no stale one is used."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.cached import digest, made_once


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVTIER_TEST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_result_is_computed_once(folder: Path) -> None:
    made: list[Path] = []

    def make(into: Path) -> None:
        made.append(into)
        into.write_text("result")

    assert [made_once("name", make).read_text() for _ in range(3)] == ["result"] * 3
    assert len(made) == 1 and made[0].parent != folder, "it is moved there when it is whole"


def test_a_failed_result_is_not_kept(folder: Path) -> None:
    def fails(into: Path) -> None:
        into.write_text("half")
        raise AssertionError("the compiler ended with 1")

    for _ in range(2):
        with pytest.raises(AssertionError, match="ended with 1"):
            made_once("name", fails)
    assert [path.name for path in folder.iterdir()] == ["name.lock"]

    def works(into: Path) -> None:
        into.write_text("whole")

    assert made_once("name", works).read_text() == "whole"


def test_the_digest_depends_on_contents_names_and_order(tmp_path: Path) -> None:
    one, two = tmp_path / "one.h", tmp_path / "two.h"
    one.write_text("int a;")
    two.write_text("int b;")
    before = digest("-O1", one, two)
    assert before == digest("-O1", one, two)
    others = {
        digest("-O2", one, two),
        digest("-O1", two, one),
        digest("-O1", one),
        digest("-O", "1", one, two),
    }
    one.write_text("int c;")
    others.add(digest("-O1", one, two))
    one.rename(tmp_path / "other.h")
    others.add(digest("-O1", tmp_path / "other.h", two))
    assert len(others | {before}) == 7
