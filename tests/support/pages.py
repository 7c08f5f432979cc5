"""Find the fenced code blocks of a page."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Block:
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    found = re.findall(r"^```([^\n]*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [Block(language, text) for language, text in found]


def command(text: str, begins: str) -> str:
    """The command of a block that begins with these words, over all lines of its quotes, as printed."""
    lines = text[text.index(begins) :].splitlines(keepends=True)
    taken = ""
    for line in lines:
        taken += line
        if not line.endswith("\\\n") and taken.count("'") % 2 == 0:
            break
    return taken.rstrip()
