"""A handler of an engine may keep log records. An exception in a record keeps the frames that it passed, and
with them a daemon's connection and memory that the plugin has given up."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[2] / "plugins"


@pytest.mark.parametrize(
    "path", sorted(PACKAGES.rglob("*.py")), ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_no_exception_is_an_argument_of_a_log_record(path: Path) -> None:
    for handler in ast.walk(ast.parse(path.read_text())):
        if not isinstance(handler, ast.ExceptHandler) or handler.name is None:
            continue
        for call in ast.walk(handler):
            if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("log."):
                names = {one.id for one in call.args if isinstance(one, ast.Name)}
                where = f"{path.name}:{call.lineno}"
                assert handler.name not in names, f"{where}: log str({handler.name})"
                kept = {word.arg for word in call.keywords}
                assert "exc_info" not in kept and ast.unparse(call.func) != "log.exception", where
