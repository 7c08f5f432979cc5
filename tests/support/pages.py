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
